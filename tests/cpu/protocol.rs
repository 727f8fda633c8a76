//! The worker loop under loom: every interleaving, and every value a relaxed load may see, of small worlds. The loop is
//! the one that runs on the GPU and on CPU threads; only [`Sync`](perpetua_device::sync::Sync) is loom's. Twins with one
//! ordering or one wait less must be refused.
//!
//! With just-in-time tasks there is a scheduler, a thread of its own as on a GPU, or whoever of the workers waits, as on CPU
//! threads; queue and scheduler are the device crate's too.
//!
//! Who has polled a few times, enough to see every value, polls again only when a word has been written ([`Rest`]), or
//! there would be no end of interleavings. Two workers beside a scheduler thread are too many all the same: there are one worker and
//! the scheduler, and two workers that launch; the simulated GPU has the rest, by seeds.
//!
//! Bound: two preemptions a run (loom's advice: most bugs need no more), two iterations of the token loop.

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Arc, Mutex};
use perpetua_device::queue::{self, Words};
use perpetua_device::scheduler::Scheduler;
use perpetua_device::sync::Sync;
use perpetua_device::worker::{Body, ImageView, run};
use perpetua_shared::control::NO_PROGRAM;
use perpetua_shared::event::{EVENT_ARRIVED, EVENT_ITERATION, EventDesc, reached};
use perpetua_shared::{EventId, Fault, Step, TaskDesc, TaskFlags, TaskId, WorkerId};

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
    /// Reads, and counts that it has run.
    ReadOnce,
}

/// Who launches just-in-time tasks.
#[derive(Clone, Copy, PartialEq)]
enum Launcher {
    Nobody,
    Thread,
    Workers,
}

/// An image and what its tasks do.
struct World {
    view: ImageView<'static>,
    work: &'static [Work],
    orders: Orders,
    launcher: Launcher,
}

/// Where the orders of the protocol stand, to weaken one.
#[derive(Clone, Copy)]
struct Orders {
    trigger: Ordering,
    publish: Ordering,
    /// Of what a worker reads of the queue.
    acquire: Ordering,
    /// Whether a claim is one step.
    is_claimed: bool,
}

const RIGHT: Orders =
    Orders { trigger: Ordering::Release, publish: Ordering::Release, acquire: Ordering::Acquire, is_claimed: true };

const WRITTEN: u32 = 2;
const HAS_READ: u32 = 3;

static EVENTS: [EventDesc; 4] = [event(1), event(2), event(1), event(1)];
static WAITS: [u32; 3] = [WRITTEN, HAS_READ, EVENT_ARRIVED.0];
static TRIGGERS: [u32; 3] = [WRITTEN, HAS_READ, EVENT_ITERATION.0];

/// w0 writes and ends the iteration, w1 reads between the two.
fn hand_over(orders: Orders) -> World {
    static TASKS: [TaskDesc; 3] = [task((0, 0), (0, 1)), task((0, 1), (1, 1)), task((1, 2), (2, 1))];
    static HEADS: [u32; 4] = [0, 2, 3, 3];
    static LISTS: [u32; 3] = [0, 2, 1];
    let work = &[Work::Write, Work::Read, Work::Advance];
    World { view: view(&TASKS, &HEADS, &LISTS), work, orders, launcher: Launcher::Nobody }
}

/// w0 writes and ends the iteration; two tasks between that are launched when w0 has written; w1, if there is one, has none
/// of its own.
fn launched(launcher: Launcher, n_workers: usize, orders: Orders) -> World {
    const READ: TaskDesc = TaskDesc { flags: TaskFlags::JUST_IN_TIME, ..task((0, 1), (1, 1)) };
    static EVENTS: [[EventDesc; 4]; 2] =
        [[event(1), event(1), event(1), event(2)], [event(1), event(2), event(1), event(2)]];
    static TASKS: [TaskDesc; 4] = [task((0, 0), (0, 1)), READ, READ, task((1, 2), (2, 1))];
    static HEADS: [&[u32]; 2] = [&[0, 2, 4], &[0, 2, 2, 4]];
    static LISTS: [u32; 4] = [0, 3, 1, 2];
    let work = &[Work::Write, Work::ReadOnce, Work::ReadOnce, Work::Advance];
    let view = view(&TASKS, HEADS[n_workers - 1], &LISTS);
    let view = ImageView { events: &EVENTS[n_workers - 1], n_workers: n_workers as u32, ..view };
    World { view, work, orders, launcher }
}

/// w0 does all there is; only `EVENT_ARRIVED` says that w1 has seen the step. `waits`: how many of the two loop events
/// the last task waits on.
fn idle_worker(waits: u16) -> World {
    static ALL: [TaskDesc; 1] = [task((2, 1), (2, 1))];
    static NONE: [TaskDesc; 1] = [task((2, 0), (2, 1))];
    static HEADS: [u32; 4] = [0, 1, 1, 1];
    static LISTS: [u32; 1] = [0];
    let tasks = if waits == 0 { &NONE } else { &ALL };
    let launcher = Launcher::Nobody;
    World { view: view(tasks, &HEADS, &LISTS), work: &[Work::Advance], orders: RIGHT, launcher }
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
struct Shared {
    counters: [AtomicU32; 8],
    step: UnsafeCell<Step>,
    data: UnsafeCell<u32>,
    /// What each just-in-time task makes: how often it has run.
    made: [UnsafeCell<u32>; 2],
    /// How many passes w0 has told the scheduler of; `u32::MAX`: that there are no more.
    passes: AtomicU32,
    launches: Mutex<(u32, Scheduler)>,
    /// Counts what has been written. No word of loom's: it orders nothing, and loom need not try it in every order.
    changes: std::sync::atomic::AtomicU32,
    orders: Orders,
}

impl Shared {
    fn changes(&self) -> u32 {
        self.changes.load(Ordering::Relaxed)
    }

    fn changed(&self) {
        self.changes.fetch_add(1, Ordering::Relaxed);
    }
}

/// What a thread does that has polled in vain. loom shows a load an older value only once before the thread yields, and no word
/// has more than this many.
#[derive(Default)]
struct Rest {
    /// As they were before the last poll.
    changes: u32,
    /// Polls in a row during which nothing changed.
    polls: u32,
}

impl Rest {
    const POLLS: u32 = 3;

    fn rest(&mut self, words: &Shared) {
        self.polls = if self.changes == words.changes() { self.polls + 1 } else { 0 };
        self.changes = words.changes();
        loom::thread::yield_now();
        while self.polls >= Rest::POLLS && self.changes == words.changes() {
            loom::thread::yield_now();
        }
        if self.changes != words.changes() {
            *self = Rest { changes: words.changes(), polls: 0 };
        }
    }
}

struct Worker {
    words: Arc<Shared>,
    number: u32,
    view: ImageView<'static>,
    work: &'static [Work],
    launcher: Launcher,
}

const SLOTS: u32 = 2;

impl Words for Worker {
    fn n_events(&self) -> u32 {
        EVENTS.len() as u32
    }

    fn n_slots(&self) -> u32 {
        SLOTS
    }

    fn load(&self, at: u32) -> u32 {
        self.words.counters[at as usize].load(Ordering::Relaxed)
    }

    fn acquire(&self, at: u32) -> u32 {
        let is_event = (at as usize) < EVENTS.len();
        let order = if is_event { Ordering::Acquire } else { self.words.orders.acquire };
        self.words.counters[at as usize].load(order)
    }

    fn publish(&self, at: u32, value: u32) {
        self.words.counters[at as usize].store(value, self.words.orders.publish);
        self.words.changed();
    }

    fn draw(&self, at: u32) -> u32 {
        let was = self.words.counters[at as usize].fetch_add(1, Ordering::Relaxed);
        self.words.changed();
        was
    }

    fn claim(&self, at: u32, old: u32, new: u32) -> bool {
        let word = &self.words.counters[at as usize];
        let is_claimed = if self.words.orders.is_claimed {
            word.compare_exchange(old, new, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        } else {
            let is_there = word.load(Ordering::Relaxed) == old;
            if is_there {
                word.store(new, Ordering::Relaxed);
            }
            is_there
        };
        self.words.changed();
        is_claimed
    }
}

impl Worker {
    /// As CPU threads do: launches, unless another is about it, then takes.
    fn look(&self, step: &Step) -> Option<TaskId> {
        if self.launcher == Launcher::Workers
            && let Ok(mut launches) = self.words.launches.try_lock()
        {
            if launches.0 < step.iteration + 1 {
                *launches = (step.iteration + 1, Scheduler::new(0, 1, 2));
            }
            if launches.0 == step.iteration + 1 {
                launches.1.round(&self.view, step, self);
            }
        }
        queue::take(self, step)
    }

    /// A scheduler's life, as on a GPU: w0 tells it of each pass.
    fn schedule(&self) {
        for pass in 0.. {
            let mut rest = Rest::default();
            let passes = loop {
                match self.words.passes.load(Ordering::Acquire) {
                    passes if passes > pass => break passes,
                    _ => rest.rest(&self.words),
                }
            };
            if passes == u32::MAX {
                return;
            }
            let step = Step { program_runs: pass, iteration: pass, ..Step::default() };
            let mut scheduler = Scheduler::new(0, 1, 1);
            while !scheduler.round(&self.view, &step, self).0 {
                rest.rest(&self.words);
            }
        }
    }
}

impl Sync for Worker {
    fn wait(&self, event: EventId, target: u32, pass: Option<&Step>) -> Result<Option<TaskId>, Fault> {
        let mut rest = Rest::default();
        loop {
            if let Some(task) = pass.and_then(|step| self.look(step)) {
                return Ok(Some(task));
            }
            if reached(self.words.counters[event.idx()].load(Ordering::Acquire), target) {
                return Ok(None);
            }
            rest.rest(&self.words);
        }
    }

    fn trigger(&self, event: EventId) {
        self.words.counters[event.idx()].fetch_add(1, self.words.orders.trigger);
        self.words.changed();
    }

    fn step(&self) -> Step {
        // SAFETY: loom judges whether somebody writes it meanwhile.
        self.words.step.with(|step| unsafe { *step })
    }
}

struct Tasks<'a>(&'a Worker);

impl Body for Tasks<'_> {
    fn begin(&mut self, step: &Step) {
        if self.0.number == 0 && self.0.launcher == Launcher::Thread {
            let passes = if step.program == NO_PROGRAM { u32::MAX } else { step.iteration + 1 };
            self.0.words.passes.store(passes, Ordering::Release);
            self.0.words.changed();
        }
    }

    fn run(&mut self, id: TaskId, _: &TaskDesc, step: &Step) -> Result<(), Fault> {
        let words = &self.0.words;
        match self.0.work[id.idx()] {
            // SAFETY: loom judges these accesses.
            Work::Write => words.data.with_mut(|data| unsafe { *data = 10 + step.iteration }),
            // SAFETY: as above.
            Work::Read => words.data.with(|data| assert_eq!(unsafe { *data }, 10 + step.iteration)),
            Work::ReadOnce => {
                // SAFETY: as above.
                words.data.with(|data| assert_eq!(unsafe { *data }, 10 + step.iteration));
                // SAFETY: as above.
                words.made[id.idx() - 1].with_mut(|made| unsafe { *made += 1 });
            }
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
    builder.max_branches = 20_000;
    builder.check(move || {
        let World { view, work, orders, launcher } = world();
        let words = Arc::new(Shared {
            counters: core::array::from_fn(|_| AtomicU32::new(0)),
            step: UnsafeCell::new(Step { rows: 1, ..Step::default() }),
            data: UnsafeCell::new(0),
            made: core::array::from_fn(|_| UnsafeCell::new(0)),
            passes: AtomicU32::new(0),
            launches: Mutex::new((0, Scheduler::new(0, 1, 1))),
            changes: Default::default(),
            orders,
        });
        let worker = |number| Worker { words: words.clone(), number, view, work, launcher };
        let start = |number| {
            let worker = worker(number);
            move || run(&view, WorkerId(number), 0, &worker, &mut Tasks(&worker))
        };
        let workers: Vec<_> = (1..view.n_workers).map(|number| loom::thread::spawn(start(number))).collect();
        let scheduler = (launcher == Launcher::Thread).then(|| {
            let scheduler = worker(2);
            loom::thread::spawn(move || scheduler.schedule())
        });
        assert_eq!(start(0)(), Ok(ITERATIONS));
        for worker in workers {
            assert_eq!(worker.join().expect("no panic"), Ok(ITERATIONS));
        }
        if let Some(scheduler) = scheduler {
            scheduler.join().expect("no panic");
        }
        let count = words.counters[EVENT_ITERATION.idx()].load(Ordering::Relaxed);
        assert_eq!(count, ITERATIONS, "no trigger is lost or counted twice");
        if launcher != Launcher::Nobody {
            for made in &words.made {
                made.with(|made| {
                    // SAFETY: loom judges it.
                    let made = unsafe { *made };
                    assert_eq!(made, ITERATIONS, "every task is launched and taken once a pass");
                });
            }
        }
    });
}

/// Whether loom finds something in `world`, other than that it is too large.
fn refuses(world: fn() -> World) -> bool {
    let Err(what) = std::panic::catch_unwind(|| explore(world)) else { return false };
    let what = what.downcast_ref::<String>().cloned().or(what.downcast_ref::<&str>().map(|what| what.to_string()));
    !what.expect("panics say why").contains("maximum number of branches")
}

#[test]
fn workers_hand_over_and_go_on() {
    explore(|| hand_over(RIGHT));
}

#[test]
fn a_worker_without_tasks_keeps_up() {
    explore(|| idle_worker(1));
}

#[test]
fn a_trigger_that_does_not_release_is_refused() {
    assert!(refuses(|| hand_over(Orders { trigger: Ordering::Relaxed, ..RIGHT })));
}

#[test]
fn a_step_nobody_waits_to_be_seen_is_refused() {
    assert!(refuses(|| idle_worker(0)));
}

#[test]
fn a_scheduler_launches_and_a_worker_takes() {
    explore(|| launched(Launcher::Thread, 1, RIGHT));
}

#[test]
fn waiting_workers_launch_and_take() {
    explore(|| launched(Launcher::Workers, 2, RIGHT));
}

#[test]
fn a_queue_that_does_not_release_is_refused() {
    assert!(refuses(|| launched(Launcher::Workers, 2, Orders { publish: Ordering::Relaxed, ..RIGHT })));
}

#[test]
fn a_taker_that_does_not_acquire_is_refused() {
    assert!(refuses(|| launched(Launcher::Workers, 2, Orders { acquire: Ordering::Relaxed, ..RIGHT })));
}

#[test]
fn a_claim_in_two_steps_is_refused() {
    assert!(refuses(|| launched(Launcher::Workers, 2, Orders { is_claimed: false, ..RIGHT })));
}
