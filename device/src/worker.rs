//! The loop every resident worker runs.
//!
//! ```text
//! repeat: read the step ── trigger ARRIVED ── for each task of my list: wait on its events, run it, trigger its events
//!         └──────────────────────────────────────── wait on ITERATION ◀──────────────── last task: advance, trigger ITERATION
//! ```
//! A body may be begun before its task's events have fired, and wait for them itself ([`Body::waits`]).
//!
//! Where a program has just-in-time tasks, every wait may end with one of these from the [queue](crate::queue) instead;
//! the worker runs it and waits on. A program without takes no look at the queue.
//!
//! # Why it neither hangs nor overtakes
//! - *Order in an iteration.* The lists and events of a program are live (law 3, judged when the image is made): with
//!   every worker resident, the earliest unfinished task in program order is always either running or next on its
//!   worker's list with all its events fired, or just-in-time and launched, or about to be
//!   ([scheduler](crate::scheduler)).
//! - *Flags.* A body may wait for numbers that other tasks [flag](perpetua_shared::flag), which no event tells. They
//!   are earlier in program order and in no list behind it (the image's check runs the lists so), so the earliest
//!   unfinished task finds its own there.
//! - *Just in time.* A worker that waits, be it for the event of its next task, for which the launched task may be what
//!   is missing, or for the iteration's end, takes launched tasks meanwhile. So a launched task is left in the queue
//!   only while all workers run others, which end.
//! - *Between iterations.* `advance`, the last task, transitively waits on every other task of the program and on
//!   `EVENT_ARRIVED`, which every worker triggers after it has read the step. So when it overwrites the step, everyone
//!   has read the old one; when it triggers `EVENT_ITERATION`, no task of the iteration is unfinished. A task of the
//!   next iteration starts after its worker has seen that trigger, hence after every task of this one: buffers need no
//!   ordering across iterations beyond it.
//! - *Counters* are monotonic. In run `n` of a program (from 0) its event `e` fires at `(n + 1) * num_triggers(e)`
//!   triggers; `n` is part of the step, so a worker holds no state of its own but the iteration number.

use crate::sync::Sync;
use core::hint::cold_path;
use perpetua_shared::control::NO_PROGRAM;
use perpetua_shared::event::{EVENT_ARRIVED, EVENT_ITERATION, EventDesc, FIRST_PROGRAM_EVENT};
use perpetua_shared::image::ProgramDesc;
use perpetua_shared::task::{Operand, TaskDesc, TaskFlags};
use perpetua_shared::{EventId, Fault, Step, TaskId, WorkerId};

/// A checked image's sections, as slices. Made only from an image that `decode` has accepted, so every index in it is
/// in range.
#[derive(Clone, Copy, Debug)]
pub struct ImageView<'a> {
    /// Programs.
    pub programs: &'a [ProgramDesc],
    /// Tasks of all programs.
    pub tasks: &'a [TaskDesc],
    /// Operands of all tasks.
    pub operands: &'a [Operand],
    /// Events of all programs; the first two are the loop's own.
    pub events: &'a [EventDesc],
    /// Event ids.
    pub waits: &'a [u32],
    /// Event ids.
    pub triggers: &'a [u32],
    /// Row `p` (of `n_workers + 2` entries): where worker `w`'s list of program `p` starts, where that of its
    /// just-in-time tasks does, and the end.
    pub list_heads: &'a [u32],
    /// Task ids: in execution order, and just-in-time tasks in program order.
    pub lists: &'a [u32],
    /// Workers.
    pub n_workers: u32,
}

impl<'a> ImageView<'a> {
    /// Worker `worker`'s tasks of program `program`, in execution order.
    pub fn list(&self, program: usize, worker: WorkerId) -> &'a [u32] {
        let at = program * (self.n_workers as usize + 2) + worker.idx();
        &self.lists[self.list_heads[at] as usize..self.list_heads[at + 1] as usize]
    }

    /// The tasks of program `program` that schedulers launch, in program order.
    pub fn just_in_time(&self, program: usize) -> &'a [u32] {
        self.list(program, WorkerId(self.n_workers))
    }

    /// The most just-in-time tasks of a program: what the [queue](crate::queue) is made for.
    pub fn max_just_in_time(&self) -> u32 {
        (0..self.programs.len()).map(|program| self.just_in_time(program).len() as u32).max().unwrap_or(0)
    }

    /// The events `task` waits on.
    pub fn waits(&self, task: &TaskDesc) -> &'a [u32] {
        &self.waits[task.wait_first as usize..][..task.wait_count as usize]
    }

    /// The events `task` triggers.
    pub fn triggers(&self, task: &TaskDesc) -> &'a [u32] {
        &self.triggers[task.trigger_first as usize..][..task.trigger_count as usize]
    }

    /// The operands of `task`.
    pub fn operands(&self, task: &TaskDesc) -> &'a [Operand] {
        &self.operands[task.operand_first as usize..][..task.operand_count as usize]
    }
}

/// What the loop reads of an image. Slices in memory are one way to hold it; the GPU's is to fetch each section's
/// address when it is wanted, since sixteen addresses kept in registers are registers the bodies do not have.
pub trait Image {
    /// A place in a worker's list.
    type Place: Copy;
    /// The start of [`ImageView::list`].
    fn first(&self, program: usize, worker: WorkerId) -> Self::Place;
    /// The task at `place`; `None` at the end.
    fn at(&self, place: Self::Place) -> Option<u32>;
    /// The place after `place`, where there is a task, whose turn it is.
    fn after(&self, place: Self::Place) -> Self::Place;
    /// See [`ImageView::just_in_time`].
    fn just_in_time(&self, program: usize) -> &[u32];
    /// The task numbered `id`.
    fn task(&self, id: u32) -> &TaskDesc;
    /// See [`ImageView::waits`].
    fn waits(&self, task: &TaskDesc) -> &[u32];
    /// Whether the task numbered `id`, whose turn it is, is left out of the pass `step`.
    fn is_left_out(&self, id: u32, step: &Step) -> bool {
        step.sampling == 0 && self.task(id).flags & TaskFlags::ONLY_WHEN_SAMPLING != 0
    }
    /// How many events the task numbered `id` waits on, whose turn it is.
    fn wait_count(&self, id: u32) -> u32;
    /// The one numbered `at` of them, and its [`EventDesc::num_triggers`].
    fn wait(&self, id: u32, at: u32) -> (EventId, u32);
    /// How many events the task numbered `id` triggers, whose turn it is.
    fn trigger_count(&self, id: u32) -> u32;
    /// The one numbered `at` of them.
    fn trigger(&self, id: u32, at: u32) -> EventId;
    /// [`EventDesc::num_triggers`] of the event numbered `event`.
    fn num_triggers(&self, event: u32) -> u32;
}

impl<'a> Image for ImageView<'a> {
    /// What is left of the list.
    type Place = &'a [u32];

    fn first(&self, program: usize, worker: WorkerId) -> &'a [u32] {
        self.list(program, worker)
    }

    fn at(&self, place: &'a [u32]) -> Option<u32> {
        place.first().copied()
    }

    fn after(&self, place: &'a [u32]) -> &'a [u32] {
        &place[1..]
    }

    fn just_in_time(&self, program: usize) -> &[u32] {
        ImageView::just_in_time(self, program)
    }

    fn task(&self, id: u32) -> &TaskDesc {
        &self.tasks[id as usize]
    }

    fn waits(&self, task: &TaskDesc) -> &[u32] {
        ImageView::waits(self, task)
    }

    fn wait_count(&self, id: u32) -> u32 {
        self.tasks[id as usize].wait_count.into()
    }

    fn wait(&self, id: u32, at: u32) -> (EventId, u32) {
        let event = ImageView::waits(self, &self.tasks[id as usize])[at as usize];
        (EventId(event), self.events[event as usize].num_triggers)
    }

    fn trigger_count(&self, id: u32) -> u32 {
        self.tasks[id as usize].trigger_count.into()
    }

    fn trigger(&self, id: u32, at: u32) -> EventId {
        EventId(self.triggers(&self.tasks[id as usize])[at as usize])
    }

    fn num_triggers(&self, event: u32) -> u32 {
        self.events[event as usize].num_triggers
    }
}

/// Runs task bodies: a thread block's macro kernels on a GPU, the CPU bodies on a thread.
pub trait Body {
    /// Whether [`run`](Body::run) and [`skip`](Body::skip) are called before the next task's events have fired, and
    /// wait for them themselves, by [`await_task`]; not if `may_take` a just-in-time task meanwhile. A body may wait in
    /// any case: once more costs a look.
    fn waits(&self, may_take: bool) -> bool {
        let _ = may_take;
        false
    }

    /// A pass begins; or, with [`NO_PROGRAM`], the loop ends.
    fn begin(&mut self, step: &Step) {
        let _ = step;
    }

    /// The task numbered `id` is left out of this pass; a body that [waits](Body::waits) does so here, too.
    ///
    /// # Errors
    /// A wait's.
    fn skip(&mut self, id: TaskId, step: &Step, iteration: u32) -> Result<(), Fault> {
        let _ = (id, step, iteration);
        Ok(())
    }

    /// The task numbered `id` comes next: its events are about to be waited for.
    fn ahead(&mut self, id: TaskId) {
        let _ = id;
    }

    /// The task numbered `id` comes first, launched just in time.
    fn instead(&mut self, id: TaskId) {
        let _ = id;
    }

    /// The task that has just had its turn triggers nothing, so all who wait for it are this worker's later tasks.
    fn untold(&mut self) {}

    /// Runs `task` in the pass `step`, iteration `iteration`. If the body [waits](Body::waits), then before it touches
    /// anything that another task does.
    ///
    /// # Errors
    /// Whatever the macro kernel faults with; the loop adds the task and the worker.
    fn run(&mut self, id: TaskId, task: &TaskDesc, step: &Step, iteration: u32) -> Result<(), Fault>;
}

/// Runs the loop of worker `worker` from the step that the control block holds until a step says [`NO_PROGRAM`].
/// Returns how many iterations have run since the counters were zeroed; `iteration` is that number at the call.
///
/// # Errors
/// The first fault of this worker, with task and worker filled in.
// On the GPU everything is one function: what is not inlined passes its arguments through local memory.
pub fn run<I: Image, S: Sync, B: Body>(
    image: &I,
    worker: WorkerId,
    mut iteration: u32,
    sync: &S,
    body: &mut B,
) -> Result<u32, Fault> {
    loop {
        let step = sync.step();
        body.begin(&step);
        if step.program == NO_PROGRAM {
            return Ok(iteration);
        }
        sync.trigger(EVENT_ARRIVED);
        let mut place = image.first(step.program as usize, worker);
        // Asked once a pass: without such tasks nobody looks at the queue.
        let pass = (!image.just_in_time(step.program as usize).is_empty()).then_some(&step);
        loop {
            let next = image.at(place);
            if let Some(next) = next {
                body.ahead(TaskId(next));
            }
            // Errors leave at once: merged with what else goes on, their words would be held over all bodies.
            let taken = if next.is_some() && body.waits(pass.is_some()) {
                None
            } else {
                match await_next(image, next, &step, pass, iteration, sync) {
                    Ok(taken) => taken,
                    Err(fault) => {
                        cold_path();
                        return Err(Fault { worker: worker.0, task: next.unwrap_or(fault.task), ..fault });
                    }
                }
            };
            let id = match (taken, next) {
                (Some(taken), _) => {
                    cold_path();
                    body.instead(taken);
                    taken.0
                }
                (None, Some(next)) => {
                    place = image.after(place);
                    next
                }
                (None, None) => break,
            };
            run_task(image, TaskId(id), &step, iteration, sync, body).map_err(|mut fault| {
                cold_path();
                fault.worker = worker.0;
                fault.task = id;
                fault
            })?;
        }
        iteration = iteration.wrapping_add(1);
    }
}

/// At how many triggers `event` fires in the pass `step`, which is iteration `iteration`.
pub(crate) fn target<I: Image>(image: &I, event: u32, step: &Step, iteration: u32) -> u32 {
    nth(event, step, iteration).wrapping_mul(image.num_triggers(event))
}

/// How many times `event` has to have fired then.
fn nth(event: u32, step: &Step, iteration: u32) -> u32 {
    // The loop's own events count iterations of every program, a program's events its own runs.
    let fired_before = if event < FIRST_PROGRAM_EVENT.0 { iteration } else { step.program_runs };
    fired_before.wrapping_add(1)
}

/// Waits for the events of task `id`, whose turn it is in the pass `step`, iteration `iteration`.
///
/// # Errors
/// A wait's, without task and worker.
pub fn await_task<I: Image, S: Sync>(
    image: &I,
    id: TaskId,
    step: &Step,
    iteration: u32,
    sync: &S,
) -> Result<(), Fault> {
    await_next(image, Some(id.0), step, None, iteration, sync).map(drop)
}

/// Waits for the events of `next`, or, at the list's end, for that of the iteration; or until there is a just-in-time
/// task to run first, which it returns.
fn await_next<I: Image, S: Sync>(
    image: &I,
    next: Option<u32>,
    step: &Step,
    pass: Option<&Step>,
    iteration: u32,
    sync: &S,
) -> Result<Option<TaskId>, Fault> {
    let Some(id) = next else {
        let event = EVENT_ITERATION;
        return sync.wait(event, target(image, event.0, step, iteration), pass);
    };
    for at in 0..image.wait_count(id) {
        // Most tasks of a decoding step wait for flags, and tell by them.
        cold_path();
        let (event, triggers) = image.wait(id, at);
        let taken = sync.wait(event, nth(event.0, step, iteration).wrapping_mul(triggers), pass)?;
        if taken.is_some() {
            return Ok(taken);
        }
    }
    Ok(None)
}

fn run_task<I: Image, S: Sync, B: Body>(
    image: &I,
    id: TaskId,
    step: &Step,
    iteration: u32,
    sync: &S,
    body: &mut B,
) -> Result<(), Fault> {
    if image.is_left_out(id.0, step) {
        cold_path();
        body.skip(id, step, iteration)?;
    } else {
        body.run(id, image.task(id.0), step, iteration)?;
    }
    let triggers = image.trigger_count(id.0);
    if triggers == 0 {
        body.untold();
    }
    for at in 0..triggers {
        cold_path();
        sync.trigger(image.trigger(id.0, at));
    }
    Ok(())
}
