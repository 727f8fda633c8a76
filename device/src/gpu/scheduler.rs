//! A block's scheduler: a lane of the service warp, beside the loader.
//!
//! Thread 0 hands it each pass that has just-in-time tasks (`STEP`, `TAKEN`), and the end. It launches its block's
//! share of them ([`Scheduler`]) and then sleeps until the next such pass. It looks at one task at a time: the
//! neighbours of a task in its operator are other blocks', and each look at another would cost the first one a trip to
//! L2.
//!
//! A pass ends after all its tasks, so after the scheduler has launched its share and left the pass's lists alone:
//! thread 0 never hands over a pass before the one before is done. Where a task's event does not come, the scheduler
//! reports it, as a worker does, and when another has reported anything it leaves the pass.

use super::sync::{Gpu, Patience};
use super::tiles::{self, wait};
use crate::arch::{mbarrier, shared};
use crate::scheduler::Scheduler;
use crate::worker::Image;
use perpetua_shared::control::NO_PROGRAM;
use perpetua_shared::{Fault, FaultCode, Step, WorkerId};

const STEP: u32 = tiles::BARRIERS;
const TAKEN: u32 = STEP + 1;

// Words of shared memory.
const PROGRAM: u32 = tiles::WORDS_END;
const RUNS: u32 = PROGRAM + 1;
const ITERATION: u32 = RUNS + 1;
/// Passes that have been handed over: thread 0's own.
const PASSES: u32 = ITERATION + 1;
/// The word in which thread 0 tells its block which task it took.
pub(super) const TAKEN_TASK: u32 = PASSES + 1;

/// What is there beyond these.
pub(super) const WORDS_END: u32 = TAKEN_TASK + 1;

const _: () = assert!(TAKEN < mbarrier::COUNT);

/// Makes the barriers.
///
/// # Safety
/// Thread 0 of the block calls it, once, before a barrier of all its threads.
pub(crate) unsafe fn init() {
    // SAFETY: the caller's promise.
    unsafe {
        mbarrier::init(STEP, 1);
        mbarrier::init(TAKEN, 1);
        shared::store(PASSES, 0);
    }
}

/// The pass `step`, with just-in-time tasks, begins; or, with [`NO_PROGRAM`], none will.
///
/// # Safety
/// Thread 0 of a block with a scheduler calls it.
pub(crate) unsafe fn begin(sync: &Gpu, step: &Step) {
    // SAFETY: one thread of the block; the scheduler reads the words between the two barriers' phases.
    unsafe {
        let passes = shared::load(PASSES);
        shared::store(PASSES, passes.wrapping_add(1));
        if passes > 0 {
            wait(sync, TAKEN, passes.wrapping_sub(1) & 1);
        }
        shared::store(PROGRAM, step.program);
        shared::store(RUNS, step.program_runs);
        shared::store(ITERATION, step.iteration);
        mbarrier::arrive(STEP);
    }
}

/// The life of the scheduler of block `worker` of `n_workers`.
///
/// # Safety
/// One lane of a service warp calls it.
pub(crate) unsafe fn schedule<I: Image>(image: &I, worker: WorkerId, n_workers: u32, sync: &Gpu) {
    // As the loader: to wait for the pass too long is for others to report.
    let patient = Gpu { patience: 4, ..*sync };
    let mut pass = 0u32;
    loop {
        // SAFETY: `init` has made the barriers; thread 0 wrote the words before it arrived.
        let step = unsafe {
            wait(&patient, STEP, pass & 1);
            let (program, program_runs) = (shared::load(PROGRAM), shared::load(RUNS));
            let step = Step { program, program_runs, iteration: shared::load(ITERATION), ..Step::default() };
            mbarrier::arrive(TAKEN);
            step
        };
        if step.program == NO_PROGRAM {
            return;
        }
        pass = pass.wrapping_add(1);
        let mut scheduler = Scheduler::new(worker.0, n_workers, 1);
        let mut patience = Patience::default();
        loop {
            let (is_done, pending) = scheduler.round(image, &step, sync);
            if is_done {
                break;
            }
            let Some(pending) = pending else {
                patience = Patience::default();
                continue;
            };
            let too_long = || {
                let fault = Fault::new(FaultCode::Timeout, pending.event.0, pending.count, pending.target);
                sync.report(&Fault { task: pending.task.0, worker: worker.0, ..fault });
            };
            if patience.ends(sync, too_long) {
                break;
            }
        }
    }
}
