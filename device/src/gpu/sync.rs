//! [`Sync`] over words of global memory.
//!
//! Hand-over between two workers: the producer's threads write, meet at their barrier, and one of them adds to the
//! counter with release; one thread of the consumer sees the count and reads it once more with acquire, then its block
//! meets at the barrier. Release and acquire order the two threads, the barriers carry that order to their blocks, so
//! plain loads after the wait see plain stores from before the trigger. What is handed over by [flags](super::flags)
//! needs none of this.

use super::scheduler::TAKEN_TASK;
use super::turn;
use crate::arch::{LaunchBlock, atomic, memory, param, shared, thread};
use crate::queue::{Words, take};
use crate::sync::Sync;
use core::hint::cold_path;
use core::mem::offset_of;
use perpetua_shared::control::Control;
use perpetua_shared::event::{EVENT_ITERATION, reached};
use perpetua_shared::{EventId, Fault, FaultCode, Step, TaskId};

/// A worker's view of the words it shares with the others. Where these are, the launch's parameters say each time: a
/// worker would hold it in registers over all bodies.
#[derive(Clone, Copy, Debug)]
pub struct Gpu {
    pub(crate) params: LaunchBlock,
    /// How many times the launch's timeout a wait may take.
    pub(crate) patience: u32,
}

// How long a poller sleeps, and after how many polls it looks at the clock and at the fault flag: often enough to leave
// within a few microseconds, rarely enough to keep the extra load off the path of a wait that succeeds, as most do
// before the first look.
const SLEEP_NS: u32 = 20;
const POLLS_PER_LOOK: u32 = 64;
const FIRST_LOOK: u32 = 8;

impl Gpu {
    /// That of the launch that `params` are.
    pub(crate) fn new(params: LaunchBlock) -> Gpu {
        Gpu { params, patience: 1 }
    }

    /// The parameters of a block without others, which has a fault record and nothing to wait for.
    #[cfg(test)]
    pub(crate) fn params_alone(fault: *mut Fault) -> perpetua_shared::launch::LaunchParams {
        let fault = fault.expose_provenance() as u64;
        perpetua_shared::launch::LaunchParams { fault, timeout_ns: u64::MAX, ..bytemuck::Zeroable::zeroed() }
    }

    /// Event counters, then the queue of just-in-time tasks.
    fn counters(&self) -> *mut u32 {
        core::ptr::with_exposed_provenance_mut(param!(self.params, counters) as usize)
    }

    /// The step in the control block.
    fn step_at(&self) -> *const Step {
        core::ptr::with_exposed_provenance(param!(self.params, control) as usize + offset_of!(Control, step))
    }

    /// The fault record; its first word is also the flag that sends everyone home.
    fn fault(&self) -> *mut Fault {
        core::ptr::with_exposed_provenance_mut(param!(self.params, fault) as usize)
    }

    /// The longest a wait may take.
    pub(crate) fn timeout_ns(&self) -> u64 {
        param!(self.params, timeout_ns).saturating_mul(self.patience.into())
    }

    /// Polls by the calling thread alone; looks for a just-in-time task, too, in a pass that has some. In vain: it has
    /// been reported.
    fn poll(&self, event: EventId, target: u32, pass: Option<&Step>) -> Result<Option<TaskId>, Gone> {
        let mut patience = Patience::default();
        loop {
            if let Some(task) = pass.and_then(|step| take(self, &anew(step))) {
                cold_path();
                return Ok(Some(task));
            }
            let count = self.load(event.0);
            if reached(count, target) {
                // Pairs with `add_release` in `trigger`.
                self.acquire(event.0);
                return Ok(None);
            }
            let too_long = || {
                // At a list's end it is no task's turn.
                let task = if event.0 == EVENT_ITERATION.0 { u32::MAX } else { turn::task() };
                let fault = Fault::new(FaultCode::Timeout, event.0, count, target);
                self.report(&Fault { task, worker: thread::block_idx(), ..fault });
            };
            if patience.ends(self, too_long) {
                cold_path();
                return Err(Gone);
            }
        }
    }

    /// Records, unless another fault is recorded already, that a wait inside the block outlasted its bound.
    pub(crate) fn give_up(&self) {
        // SAFETY: the record's first word is its code.
        unsafe { atomic::compare_exchange(self.fault().cast(), 0, FaultCode::Timeout as u32) };
    }

    /// Whether one has been recorded.
    pub(crate) fn has_fault(&self) -> bool {
        self.fault_code() != 0
    }

    /// Its code, or 0.
    pub(crate) fn fault_code(&self) -> u32 {
        // SAFETY: the record's first word is its code.
        unsafe { atomic::load_relaxed(self.fault().cast()) }
    }

    /// Records `fault`, unless another is recorded already, and tells every worker to leave.
    pub(crate) fn report(&self, fault: &Fault) {
        // SAFETY: the record lies in global memory; only the thread whose exchange finds 0 writes the rest of it, and
        // only the host reads that, after the launch.
        unsafe {
            if atomic::compare_exchange(self.fault().cast(), 0, fault.code) == 0 {
                let record = self.fault();
                memory::store_volatile(&raw mut (*record).task, fault.task);
                memory::store_volatile(&raw mut (*record).worker, fault.worker);
                memory::store_volatile(&raw mut (*record).detail, fault.detail);
                memory::store_volatile(&raw mut (*record).found, fault.found);
                memory::store_volatile(&raw mut (*record).expected, fault.expected);
            }
        }
    }
}

/// `step`, of which the compiler does not know that it is the same all through a pass: what bodies and polls compute
/// from it would be held over all of them.
pub(crate) fn anew(step: &Step) -> Step {
    let word = memory::opaque_word;
    Step {
        program: word(step.program),
        program_runs: word(step.program_runs),
        iteration: word(step.iteration),
        ..*step
    }
}

/// A fault has been reported, so it is time to leave.
#[derive(Clone, Copy, Debug)]
struct Gone;

/// How long a poller has polled.
#[derive(Default)]
pub(crate) struct Patience {
    started: u64,
    polls: u32,
}

impl Patience {
    /// Called after each poll that found nothing: sleeps for a while, and says when it is time to leave, since it has
    /// been `too_long`, which is called, or since a fault has been recorded.
    pub(crate) fn ends(&mut self, sync: &Gpu, too_long: impl FnOnce()) -> bool {
        if self.polls % POLLS_PER_LOOK == FIRST_LOOK {
            cold_path();
            let now = thread::timer_ns();
            if self.polls == FIRST_LOOK {
                self.started = now;
            } else if now.wrapping_sub(self.started) > sync.timeout_ns() {
                too_long();
                return true;
            }
            if sync.has_fault() {
                return true;
            }
        }
        self.polls = self.polls.wrapping_add(1);
        thread::sleep_ns(SLEEP_NS);
        false
    }
}

// SAFETY, of all of them: events of a checked image have a counter each, and the queue's words come after.
impl Words for Gpu {
    fn n_events(&self) -> u32 {
        param!(self.params, n_events)
    }

    fn n_slots(&self) -> u32 {
        param!(self.params, n_slots)
    }

    #[track_caller]
    fn load(&self, at: u32) -> u32 {
        // SAFETY: see above.
        unsafe { atomic::load_relaxed(self.counters().add(at as usize)) }
    }

    #[track_caller]
    fn acquire(&self, at: u32) -> u32 {
        // SAFETY: see above.
        unsafe { atomic::load_acquire(self.counters().add(at as usize)) }
    }

    #[track_caller]
    fn publish(&self, at: u32, value: u32) {
        // SAFETY: see above.
        unsafe { atomic::store_release(self.counters().add(at as usize), value) }
    }

    #[track_caller]
    fn draw(&self, at: u32) -> u32 {
        // SAFETY: see above.
        unsafe { atomic::fetch_add(self.counters().add(at as usize), 1) }
    }

    #[track_caller]
    fn claim(&self, at: u32, old: u32, new: u32) -> bool {
        // SAFETY: see above.
        unsafe { atomic::compare_exchange(self.counters().add(at as usize), old, new) == old }
    }
}

impl Sync for Gpu {
    /// See [`Fault::RECORDED`]: which it was nobody is told. Handed on from here its words would be held in registers
    /// over all bodies, since no compiler sees that on the other ways to where they are looked at they are not.
    fn wait(&self, event: EventId, target: u32, pass: Option<&Step>) -> Result<Option<TaskId>, Fault> {
        let mut is_gone = false;
        // SAFETY: the worker loop is the same on every thread of the block, which all come to each barrier. The word is
        // written by one before the first of two barriers, and read by all between them.
        unsafe {
            if thread::thread_idx() == 0 {
                let outcome = self.poll(event, target, pass);
                if pass.is_some() {
                    // One more than its number; 0: none.
                    shared::store(TAKEN_TASK, outcome.map_or(0, |taken| taken.map_or(0, |task| task.0 + 1)));
                }
                is_gone = outcome.is_err();
            }
            if thread::sync_or(is_gone) {
                cold_path();
                return Err(Fault::RECORDED);
            }
            if pass.is_none() {
                return Ok(None);
            }
            cold_path();
            let taken = shared::load(TAKEN_TASK).checked_sub(1).map(TaskId);
            thread::sync();
            Ok(taken)
        }
    }

    fn trigger(&self, event: EventId) {
        // SAFETY: the worker loop is the same on every thread of the block; events of a checked image have a counter
        // each.
        unsafe {
            thread::sync();
            if thread::thread_idx() == 0 {
                atomic::add_release(self.counters().add(event.idx()), 1);
            }
        }
    }

    fn step(&self) -> Step {
        // Word by word: a volatile copy of the whole would go through local memory.
        let at = self.step_at();
        // SAFETY: nobody writes the step now (the trait's contract), and the wait before this call has made it visible.
        unsafe {
            Step {
                program: memory::load_volatile(&raw const (*at).program),
                program_runs: memory::load_volatile(&raw const (*at).program_runs),
                first_pos: memory::load_volatile(&raw const (*at).first_pos),
                rows: memory::load_volatile(&raw const (*at).rows),
                sampling: memory::load_volatile(&raw const (*at).sampling),
                iteration: memory::load_volatile(&raw const (*at).iteration),
                sequence: memory::load_volatile(&raw const (*at).sequence),
            }
        }
    }
}
