//! The worker loop under two model checkers. The loop is the one that runs on the GPU and on CPU threads; only
//! [`Sync`](perpetua_device::sync::Sync) is theirs ([`Model`]). Twins with one ordering or one wait less must be
//! refused.
//!
//! With just-in-time tasks there is a scheduler, a thread of its own as on a GPU, or whoever of the workers waits, as
//! on CPU threads; queue and scheduler are the device crate's too.
//!
//! *loom*: every interleaving, and every value a relaxed load may see, of small worlds. Who has polled a few times,
//! enough to see every value, polls again only when a word has been written ([`Rest`]), or there would be no end of
//! interleavings. Two workers beside a scheduler thread are too many all the same: there are one worker and the
//! scheduler, and two workers that launch. Bound: two preemptions a run (loom's advice: most bugs need no more), two
//! iterations of the token loop.
//!
//! *shuttle*: two and three workers beside a scheduler thread, by seeds: schedules that are random, and such as preempt
//! only a few times, at random places, which find a bug that takes `d` of them with a known probability (PCT,
//! Burckhardt et al. 2010). Its atomics are sequentially consistent whatever they are asked for, so it judges
//! interleavings and no orderings: those are loom's, in the smaller worlds, and the simulated GPU's.

use perpetua_device::queue::{self, Words};
use perpetua_device::scheduler::Scheduler;
use perpetua_device::sync::Sync;
use perpetua_device::worker::{Body, ImageView, await_task, run};
use perpetua_shared::control::NO_PROGRAM;
use perpetua_shared::event::{EVENT_ARRIVED, EVENT_ITERATION, EventDesc, reached};
use perpetua_shared::{EventId, Fault, Step, TaskDesc, TaskFlags, TaskId, WorkerId, flag};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What a model checker makes a world of.
trait Model: Send + core::marker::Sync + 'static {
    type Word: Send + core::marker::Sync;
    type Cell<T: Send>: Send + core::marker::Sync;
    type Lock<T: Send>: Send + core::marker::Sync;
    type Thread<T>;

    fn word() -> Self::Word;
    fn load(word: &Self::Word, order: Ordering) -> u32;
    fn store(word: &Self::Word, value: u32, order: Ordering);
    fn add(word: &Self::Word, order: Ordering) -> u32;
    fn exchange(word: &Self::Word, old: u32, new: u32) -> bool;

    fn cell<T: Send>(value: T) -> Self::Cell<T>;
    /// Reads; nobody may write meanwhile, nor have written unordered.
    fn read<T: Send, R>(cell: &Self::Cell<T>, read: impl FnOnce(&T) -> R) -> R;
    /// Writes; nobody else may touch it meanwhile.
    fn write<T: Send>(cell: &Self::Cell<T>, write: impl FnOnce(&mut T));

    fn lock<T: Send>(value: T) -> Self::Lock<T>;
    fn try_lock<T: Send>(lock: &Self::Lock<T>, f: impl FnOnce(&mut T));

    fn spawn<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> Self::Thread<T>;
    fn join<T>(thread: Self::Thread<T>) -> T;
    fn yield_now();
}

struct Loom;

impl Model for Loom {
    type Word = loom::sync::atomic::AtomicU32;
    type Cell<T: Send> = LoomCell<T>;
    type Lock<T: Send> = loom::sync::Mutex<T>;
    type Thread<T> = loom::thread::JoinHandle<T>;

    fn word() -> Self::Word {
        Self::Word::new(0)
    }

    fn load(word: &Self::Word, order: Ordering) -> u32 {
        word.load(order)
    }

    fn store(word: &Self::Word, value: u32, order: Ordering) {
        word.store(value, order);
    }

    fn add(word: &Self::Word, order: Ordering) -> u32 {
        word.fetch_add(1, order)
    }

    fn exchange(word: &Self::Word, old: u32, new: u32) -> bool {
        word.compare_exchange(old, new, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    fn cell<T: Send>(value: T) -> Self::Cell<T> {
        LoomCell(loom::cell::UnsafeCell::new(value))
    }

    fn read<T: Send, R>(cell: &Self::Cell<T>, read: impl FnOnce(&T) -> R) -> R {
        // SAFETY: loom judges whether somebody writes it meanwhile.
        cell.0.with(|value| read(unsafe { &*value }))
    }

    fn write<T: Send>(cell: &Self::Cell<T>, write: impl FnOnce(&mut T)) {
        // SAFETY: loom judges whether somebody else touches it meanwhile.
        cell.0.with_mut(|value| write(unsafe { &mut *value }));
    }

    fn lock<T: Send>(value: T) -> Self::Lock<T> {
        loom::sync::Mutex::new(value)
    }

    fn try_lock<T: Send>(lock: &Self::Lock<T>, f: impl FnOnce(&mut T)) {
        if let Ok(mut value) = lock.try_lock() {
            f(&mut value);
        }
    }

    fn spawn<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> Self::Thread<T> {
        loom::thread::spawn(f)
    }

    fn join<T>(thread: Self::Thread<T>) -> T {
        thread.join().expect("no panic")
    }

    fn yield_now() {
        loom::thread::yield_now();
    }
}

struct LoomCell<T>(loom::cell::UnsafeCell<T>);

// SAFETY: loom judges every access.
unsafe impl<T: Send> core::marker::Sync for LoomCell<T> {}

struct Shuttle;

impl Model for Shuttle {
    type Word = shuttle::sync::atomic::AtomicU32;
    type Cell<T: Send> = ShuttleCell<T>;
    type Lock<T: Send> = shuttle::sync::Mutex<T>;
    type Thread<T> = shuttle::thread::JoinHandle<T>;

    fn word() -> Self::Word {
        Self::Word::new(0)
    }

    fn load(word: &Self::Word, _: Ordering) -> u32 {
        word.load(Ordering::SeqCst)
    }

    fn store(word: &Self::Word, value: u32, _: Ordering) {
        word.store(value, Ordering::SeqCst);
    }

    fn add(word: &Self::Word, _: Ordering) -> u32 {
        word.fetch_add(1, Ordering::SeqCst)
    }

    fn exchange(word: &Self::Word, old: u32, new: u32) -> bool {
        word.compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    fn cell<T: Send>(value: T) -> Self::Cell<T> {
        ShuttleCell { touched: Self::word(), value: std::sync::Mutex::new(value) }
    }

    fn read<T: Send, R>(cell: &Self::Cell<T>, read: impl FnOnce(&T) -> R) -> R {
        let before = cell.touched.fetch_add(2, Ordering::SeqCst);
        assert!(before.is_multiple_of(2), "somebody writes what is read");
        let result = read(&cell.value.lock().expect("no panic before"));
        cell.touched.fetch_sub(2, Ordering::SeqCst);
        result
    }

    fn write<T: Send>(cell: &Self::Cell<T>, write: impl FnOnce(&mut T)) {
        assert_eq!(cell.touched.fetch_add(1, Ordering::SeqCst), 0, "somebody touches what is written");
        write(&mut cell.value.lock().expect("no panic before"));
        cell.touched.fetch_sub(1, Ordering::SeqCst);
    }

    fn lock<T: Send>(value: T) -> Self::Lock<T> {
        shuttle::sync::Mutex::new(value)
    }

    fn try_lock<T: Send>(lock: &Self::Lock<T>, f: impl FnOnce(&mut T)) {
        if let Ok(mut value) = lock.try_lock() {
            f(&mut value);
        }
    }

    fn spawn<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> Self::Thread<T> {
        shuttle::thread::spawn(f)
    }

    fn join<T>(thread: Self::Thread<T>) -> T {
        thread.join().expect("no panic")
    }

    fn yield_now() {
        shuttle::thread::yield_now();
    }
}

/// A value, and who is at it: twice the readers, and one for a writer.
struct ShuttleCell<T> {
    touched: shuttle::sync::atomic::AtomicU32,
    /// Never waited for: it is held between two of shuttle's switches.
    value: std::sync::Mutex<T>,
}

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
    /// Hands a number over by its flag.
    Put,
    /// Waits for that.
    Get,
    /// Writes before it, and reads after it, what the flag does not order.
    WriteAndPut,
    GetAndRead,
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

/// w0 hands a number over by its flag and ends the iteration, w1 reads it between the two; `heard`: w0 waits until it
/// has.
fn flagged(work: &'static [Work; 3], heard: bool) -> World {
    static TASKS: [TaskDesc; 3] = [task((0, 0), (0, 0)), task((0, 0), (1, 1)), task((1, 2), (2, 1))];
    static UNHEARD: [TaskDesc; 3] = [task((0, 0), (0, 0)), task((0, 0), (1, 0)), task((2, 1), (2, 1))];
    static HEADS: [u32; 4] = [0, 2, 3, 3];
    static LISTS: [u32; 3] = [0, 2, 1];
    let tasks = if heard { &TASKS } else { &UNHEARD };
    World { view: view(tasks, &HEADS, &LISTS), work, orders: RIGHT, launcher: Launcher::Nobody }
}

/// w0 writes and ends the iteration; two tasks between that are launched when w0 has written; the others, if there are
/// any, have none of their own.
fn launched(launcher: Launcher, n_workers: usize, orders: Orders) -> World {
    const READ: TaskDesc = TaskDesc { flags: TaskFlags::JUST_IN_TIME, ..task((0, 1), (1, 1)) };
    static EVENTS: [[EventDesc; 4]; 3] = [
        [event(1), event(1), event(1), event(2)],
        [event(1), event(2), event(1), event(2)],
        [event(1), event(3), event(1), event(2)],
    ];
    static TASKS: [TaskDesc; 4] = [task((0, 0), (0, 1)), READ, READ, task((1, 2), (2, 1))];
    static HEADS: [&[u32]; 3] = [&[0, 2, 4], &[0, 2, 2, 4], &[0, 2, 2, 2, 4]];
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
struct Shared<M: Model> {
    counters: [M::Word; 8],
    step: M::Cell<Step>,
    data: M::Cell<u32>,
    /// A number with its flag.
    flagged: M::Word,
    /// What each just-in-time task makes: how often it has run.
    made: [M::Cell<u32>; 2],
    /// How many passes w0 has told the scheduler of; `u32::MAX`: that there are no more.
    passes: M::Word,
    launches: M::Lock<(u32, Scheduler)>,
    /// Counts what has been written. No word of the model's: it orders nothing, and need not be tried in every order.
    changes: std::sync::atomic::AtomicU32,
    orders: Orders,
}

impl<M: Model> Shared<M> {
    fn changes(&self) -> u32 {
        self.changes.load(Ordering::Relaxed)
    }

    fn changed(&self) {
        self.changes.fetch_add(1, Ordering::Relaxed);
    }
}

/// What a thread does that has polled in vain. loom shows a load an older value only once before the thread yields, and
/// no word has more than this many.
#[derive(Default)]
struct Rest {
    /// As they were before the last poll.
    changes: u32,
    /// Polls in a row during which nothing changed.
    polls: u32,
}

impl Rest {
    const POLLS: u32 = 3;

    fn rest<M: Model>(&mut self, words: &Shared<M>) {
        self.polls = if self.changes == words.changes() { self.polls + 1 } else { 0 };
        self.changes = words.changes();
        M::yield_now();
        while self.polls >= Rest::POLLS && self.changes == words.changes() {
            M::yield_now();
        }
        if self.changes != words.changes() {
            *self = Rest { changes: words.changes(), polls: 0 };
        }
    }
}

struct Worker<M: Model> {
    words: Arc<Shared<M>>,
    number: u32,
    view: ImageView<'static>,
    work: &'static [Work],
    launcher: Launcher,
}

const SLOTS: u32 = 2;

impl<M: Model> Words for Worker<M> {
    fn n_events(&self) -> u32 {
        EVENTS.len() as u32
    }

    fn n_slots(&self) -> u32 {
        SLOTS
    }

    fn load(&self, at: u32) -> u32 {
        M::load(&self.words.counters[at as usize], Ordering::Relaxed)
    }

    fn acquire(&self, at: u32) -> u32 {
        let is_event = (at as usize) < EVENTS.len();
        let order = if is_event { Ordering::Acquire } else { self.words.orders.acquire };
        M::load(&self.words.counters[at as usize], order)
    }

    fn publish(&self, at: u32, value: u32) {
        M::store(&self.words.counters[at as usize], value, self.words.orders.publish);
        self.words.changed();
    }

    fn draw(&self, at: u32) -> u32 {
        let was = M::add(&self.words.counters[at as usize], Ordering::Relaxed);
        self.words.changed();
        was
    }

    fn claim(&self, at: u32, old: u32, new: u32) -> bool {
        let word = &self.words.counters[at as usize];
        let is_claimed = if self.words.orders.is_claimed {
            M::exchange(word, old, new)
        } else {
            let is_there = M::load(word, Ordering::Relaxed) == old;
            if is_there {
                M::store(word, new, Ordering::Relaxed);
            }
            is_there
        };
        self.words.changed();
        is_claimed
    }
}

impl<M: Model> Worker<M> {
    /// As CPU threads do: launches, unless another is about it, then takes.
    fn look(&self, step: &Step) -> Option<TaskId> {
        if self.launcher == Launcher::Workers {
            M::try_lock(&self.words.launches, |launches| {
                if launches.0 < step.iteration + 1 {
                    *launches = (step.iteration + 1, Scheduler::new(0, 1, 2));
                }
                if launches.0 == step.iteration + 1 {
                    launches.1.round(&self.view, step, self);
                }
            });
        }
        queue::take(self, step)
    }

    /// A scheduler's life, as on a GPU: w0 tells it of each pass.
    fn schedule(&self) {
        for pass in 0.. {
            let mut rest = Rest::default();
            let passes = loop {
                match M::load(&self.words.passes, Ordering::Acquire) {
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

impl<M: Model> Sync for Worker<M> {
    fn wait(&self, event: EventId, target: u32, pass: Option<&Step>) -> Result<Option<TaskId>, Fault> {
        let mut rest = Rest::default();
        loop {
            if let Some(task) = pass.and_then(|step| self.look(step)) {
                return Ok(Some(task));
            }
            if reached(M::load(&self.words.counters[event.idx()], Ordering::Acquire), target) {
                return Ok(None);
            }
            rest.rest(&self.words);
        }
    }

    fn trigger(&self, event: EventId) {
        M::add(&self.words.counters[event.idx()], self.words.orders.trigger);
        self.words.changed();
    }

    fn step(&self) -> Step {
        M::read(&self.words.step, |step| *step)
    }
}

struct Tasks<'a, M: Model>(&'a Worker<M>);

impl<M: Model> Body for Tasks<'_, M> {
    fn begin(&mut self, step: &Step) {
        if self.0.number == 0 && self.0.launcher == Launcher::Thread {
            let passes = if step.program == NO_PROGRAM { u32::MAX } else { step.iteration + 1 };
            M::store(&self.0.words.passes, passes, Ordering::Release);
            self.0.words.changed();
        }
    }

    fn waits(&self, may_take: bool) -> bool {
        !may_take
    }

    fn run(&mut self, id: TaskId, _: &TaskDesc, step: &Step, iteration: u32) -> Result<(), Fault> {
        // Not in a pass with just-in-time tasks: what those acquire they shall have from the queue alone.
        if self.0.view.just_in_time(step.program as usize).is_empty() {
            await_task(&self.0.view, id, step, iteration, self.0)?;
        }
        let words = &self.0.words;
        let work = self.0.work[id.idx()];
        let (number, run) = ((10 + step.iteration) as f32, step.program_runs);
        match work {
            Work::Write | Work::WriteAndPut => M::write(&words.data, |data| *data = 10 + step.iteration),
            Work::Get | Work::GetAndRead => {
                let mut rest = Rest::default();
                loop {
                    let word = M::load(&words.flagged, Ordering::Relaxed);
                    if word & flag::MASK == flag::of_run(run) {
                        assert_eq!(flag::unmark(word), number);
                        break;
                    }
                    let before = if run == 0 { 0 } else { flag::of_run(run - 1) };
                    assert_eq!(word & flag::MASK, before, "the flag of a pass to come");
                    rest.rest(words);
                }
            }
            _ => {}
        }
        match work {
            Work::Put | Work::WriteAndPut => {
                M::store(&words.flagged, flag::mark(number, flag::of_run(run)), Ordering::Relaxed);
                words.changed();
            }
            Work::Read | Work::GetAndRead => M::read(&words.data, |data| assert_eq!(*data, 10 + step.iteration)),
            Work::Write | Work::Get => {}
            Work::ReadOnce => {
                M::read(&words.data, |data| assert_eq!(*data, 10 + step.iteration));
                M::write(&words.made[id.idx() - 1], |made| *made += 1);
            }
            Work::Advance => M::write(&words.step, |next| {
                let iteration = step.iteration + 1;
                let program = if iteration < ITERATIONS { 0 } else { NO_PROGRAM };
                *next = Step { program, iteration, program_runs: iteration, ..*step };
            }),
        }
        Ok(())
    }
}

const ITERATIONS: u32 = 2;

/// One run of `world`.
fn play<M: Model>(world: fn() -> World) {
    let World { view, work, orders, launcher } = world();
    let words = Arc::new(Shared::<M> {
        counters: core::array::from_fn(|_| M::word()),
        step: M::cell(Step { rows: 1, ..Step::default() }),
        data: M::cell(0),
        flagged: M::word(),
        made: core::array::from_fn(|_| M::cell(0)),
        passes: M::word(),
        launches: M::lock((0, Scheduler::new(0, 1, 1))),
        changes: Default::default(),
        orders,
    });
    let worker = |number| Worker { words: words.clone(), number, view, work, launcher };
    let start = |number| {
        let worker = worker(number);
        move || run(&view, WorkerId(number), 0, &worker, &mut Tasks(&worker))
    };
    let workers: Vec<_> = (1..view.n_workers).map(|number| M::spawn(start(number))).collect();
    let scheduler = (launcher == Launcher::Thread).then(|| {
        let scheduler = worker(view.n_workers);
        M::spawn(move || scheduler.schedule())
    });
    assert_eq!(start(0)(), Ok(ITERATIONS));
    for worker in workers {
        assert_eq!(M::join(worker), Ok(ITERATIONS));
    }
    if let Some(scheduler) = scheduler {
        M::join(scheduler);
    }
    let count = M::load(&words.counters[EVENT_ITERATION.idx()], Ordering::Relaxed);
    assert_eq!(count, ITERATIONS, "no trigger is lost or counted twice");
    if launcher != Launcher::Nobody {
        for made in &words.made {
            M::read(made, |made| assert_eq!(*made, ITERATIONS, "every task is launched and taken once a pass"));
        }
    }
}

/// Every run of `world`.
fn explore(world: fn() -> World) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.max_branches = 20_000;
    builder.check(move || play::<Loom>(world));
}

/// Runs of `world`: random ones, and such as preempt at three places.
fn sample(world: fn() -> World) {
    const RUNS: usize = 2_000;
    let mut config = shuttle::Config::new();
    config.silence_warnings = true;
    // Failures are asserted on; their schedules need no file.
    config.failure_persistence = shuttle::FailurePersistence::None;
    let random = RandomScheduler::new_from_seed(1, RUNS);
    shuttle::Runner::new(random, config.clone()).run(move || play::<Shuttle>(world));
    let few = PctScheduler::new_from_seed(2, 3, RUNS);
    shuttle::Runner::new(few, config).run(move || play::<Shuttle>(world));
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
fn numbers_are_handed_over_by_their_flags() {
    explore(|| flagged(&[Work::Put, Work::Get, Work::Advance], true));
}

#[test]
fn a_pass_that_begins_before_the_last_is_read_is_refused() {
    assert!(refuses(|| flagged(&[Work::Put, Work::Get, Work::Advance], false)));
}

#[test]
fn who_takes_a_flag_for_more_than_its_number_is_refused() {
    assert!(refuses(|| flagged(&[Work::WriteAndPut, Work::GetAndRead, Work::Advance], true)));
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

#[test]
fn workers_beside_a_scheduler_run_what_it_launches() {
    sample(|| launched(Launcher::Thread, 2, RIGHT));
    sample(|| launched(Launcher::Thread, 3, RIGHT));
}

/// Its twin, and one of the worlds that loom has, lest it find nothing for want of looking.
#[test]
fn shuttle_refuses_what_is_wrong() {
    let refuses = |world: fn() -> World| std::panic::catch_unwind(|| sample(world)).is_err();
    assert!(refuses(|| launched(Launcher::Thread, 2, Orders { is_claimed: false, ..RIGHT })));
    assert!(refuses(|| idle_worker(0)));
    sample(|| idle_worker(1));
}
