//! The worker loop under loom: every interleaving, and every value a relaxed load may see, of small worlds. The loop is
//! the one that runs on the GPU and on CPU threads; only [`Sync`](perpetua_device::sync::Sync) is loom's. Twins with one
//! ordering or one wait less must be refused.
//!
//! Bound: two preemptions a run (loom's advice: most bugs need no more), two iterations of the token loop.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use perpetua_device::sync::Sync;
use perpetua_device::worker::{Body, ImageView, run};
use perpetua_shared::control::NO_PROGRAM;
use perpetua_shared::event::{EVENT_ARRIVED, EVENT_ITERATION, EventDesc, reached};
use perpetua_shared::{EventId, Fault, Step, TaskDesc, TaskId, WorkerId};

const fn task(waits: (u32, u16), triggers: (u32, u16)) -> TaskDesc {
    TaskDesc {
        task_type: 0,
        flags: 0,
        op: 0,
        block: [0; 3],
        row_first: 0,
        operand_first: 0,
        operand_count: 0,
        wait_first: waits.0,
        wait_count: waits.1,
        trigger_count: triggers.1,
        trigger_first: triggers.0,
        tiles: 0,
        params: [0; 8],
    }
}

const fn event(num_triggers: u32) -> EventDesc {
    EventDesc { num_triggers }
}

/// What a task does to the world.
#[derive(Clone, Copy)]
enum Work {
    Write,
    Read,
    Advance,
}

/// An image and what its tasks do.
struct World {
    view: ImageView<'static>,
    work: &'static [Work],
    /// The order of a trigger.
    trigger: Ordering,
}

const WRITTEN: u32 = 2;
const HAS_READ: u32 = 3;

static EVENTS: [EventDesc; 4] = [event(1), event(2), event(1), event(1)];
static WAITS: [u32; 3] = [WRITTEN, HAS_READ, EVENT_ARRIVED.0];
static TRIGGERS: [u32; 3] = [WRITTEN, HAS_READ, EVENT_ITERATION.0];

/// w0 writes and ends the iteration, w1 reads between the two.
fn hand_over(trigger: Ordering) -> World {
    static TASKS: [TaskDesc; 3] = [task((0, 0), (0, 1)), task((0, 1), (1, 1)), task((1, 2), (2, 1))];
    static HEADS: [u32; 3] = [0, 2, 3];
    static LISTS: [u32; 3] = [0, 2, 1];
    let work = &[Work::Write, Work::Read, Work::Advance];
    World { view: view(&TASKS, &HEADS, &LISTS), work, trigger }
}

/// w0 does all there is; only `EVENT_ARRIVED` says that w1 has seen the step. `waits`: how many of the two loop events
/// the last task waits on.
fn idle_worker(waits: u16) -> World {
    static ALL: [TaskDesc; 1] = [task((2, 1), (2, 1))];
    static NONE: [TaskDesc; 1] = [task((2, 0), (2, 1))];
    static HEADS: [u32; 3] = [0, 1, 1];
    static LISTS: [u32; 1] = [0];
    let tasks = if waits == 0 { &NONE } else { &ALL };
    World { view: view(tasks, &HEADS, &LISTS), work: &[Work::Advance], trigger: Ordering::Release }
}

fn view(tasks: &'static [TaskDesc], list_heads: &'static [u32], lists: &'static [u32]) -> ImageView<'static> {
    ImageView {
        programs: &[],
        tasks,
        operands: &[],
        events: &EVENTS,
        waits: &WAITS,
        triggers: &TRIGGERS,
        list_heads,
        lists,
        n_workers: 2,
    }
}

/// The words workers share.
struct Words {
    counters: [AtomicU32; 4],
    step: UnsafeCell<Step>,
    data: UnsafeCell<u32>,
    trigger: Ordering,
}

struct Worker {
    words: Arc<Words>,
    work: &'static [Work],
}

impl Sync for Worker {
    fn wait(&self, event: EventId, target: u32) -> Result<(), Fault> {
        while !reached(self.words.counters[event.idx()].load(Ordering::Acquire), target) {
            loom::thread::yield_now();
        }
        Ok(())
    }

    fn trigger(&self, event: EventId) {
        self.words.counters[event.idx()].fetch_add(1, self.words.trigger);
    }

    fn step(&self) -> Step {
        // SAFETY: loom judges whether somebody writes it meanwhile.
        self.words.step.with(|step| unsafe { *step })
    }
}

struct Tasks<'a>(&'a Worker);

impl Body for Tasks<'_> {
    fn run(&mut self, id: TaskId, _: &TaskDesc, step: &Step) -> Result<(), Fault> {
        let words = &self.0.words;
        match self.0.work[id.idx()] {
            // SAFETY: loom judges these accesses.
            Work::Write => words.data.with_mut(|data| unsafe { *data = 10 + step.iteration }),
            // SAFETY: as above.
            Work::Read => words.data.with(|data| assert_eq!(unsafe { *data }, 10 + step.iteration)),
            Work::Advance => words.step.with_mut(|next| {
                let iteration = step.iteration + 1;
                let program = if iteration < ITERATIONS { 0 } else { NO_PROGRAM };
                // SAFETY: as above.
                unsafe { *next = Step { program, iteration, program_runs: iteration, ..*step } };
            }),
        }
        Ok(())
    }
}

const ITERATIONS: u32 = 2;

fn explore(world: fn() -> World) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(move || {
        let World { view, work, trigger } = world();
        let words = Arc::new(Words {
            counters: core::array::from_fn(|_| AtomicU32::new(0)),
            step: UnsafeCell::new(Step { rows: 1, ..Step::default() }),
            data: UnsafeCell::new(0),
            trigger,
        });
        let start = |number| {
            let worker = Worker { words: words.clone(), work };
            move || run(&view, WorkerId(number), 0, &worker, &mut Tasks(&worker))
        };
        let other = loom::thread::spawn(start(1));
        assert_eq!(start(0)(), Ok(ITERATIONS));
        assert_eq!(other.join().expect("no panic"), Ok(ITERATIONS));
        let count = words.counters[EVENT_ITERATION.idx()].load(Ordering::Relaxed);
        assert_eq!(count, ITERATIONS, "no trigger is lost or counted twice");
    });
}

/// Whether loom finds something in `world`.
fn refuses(world: fn() -> World) -> bool {
    std::panic::catch_unwind(|| explore(world)).is_err()
}

#[test]
fn workers_hand_over_and_go_on() {
    explore(|| hand_over(Ordering::Release));
}

#[test]
fn a_worker_without_tasks_keeps_up() {
    explore(|| idle_worker(1));
}

#[test]
fn a_trigger_that_does_not_release_is_refused() {
    assert!(refuses(|| hand_over(Ordering::Relaxed)));
}

#[test]
fn a_step_nobody_waits_to_be_seen_is_refused() {
    assert!(refuses(|| idle_worker(0)));
}
