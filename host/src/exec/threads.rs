//! Resident CPU workers.
//!
//! Each worker is a thread that stays for the executor's life. A *run* starts when the host has written the control
//! block and rings the bell; every worker then runs the device crate's [worker loop](perpetua_device::worker) until a
//! step says that the loop has ended, and goes back to waiting for the bell. Event counters go on counting from run to
//! run.
//!
//! Just-in-time tasks have no thread of their own to launch them: a worker that looks for something to do first plays
//! the [scheduler](perpetua_device::scheduler), unless another does so at that moment. The one that has triggered a
//! task's last event is the next to look.
//!
//! The worker that ends an iteration looks whether the run's [`Stopper`] has been told: nobody but workers writes what
//! they read.
//!
//! Waiting inside a run spins for a while and then yields the core, so that more workers than cores still move. Every
//! wait is bounded: a worker that has waited longer than [`Options::timeout`] while no task anywhere finished writes a
//! fault; so does one whose body fails or panics; the others see the flag in their next wait, everyone leaves the loop,
//! and the host gets the fault by name. After a fault the counters are zeroed, so the executor can be used again.

mod cores;

pub use cores::{Pinning, allowed_cores, usable_cores};

use super::memory::{Memory, MemoryError};
use super::{Executor, RunError, Stopper, check_control, count_on};
use crate::image::Image;
use crate::machine::Machine;
use crate::schedule::prefetch::{self, Reads, Stream};
use cores::{Claim, pin};
use perpetua_device::advance::step_of;
use perpetua_device::cpu::Scratch;
use perpetua_device::cpu::ahead::Ahead;
use perpetua_device::io::{Call, Tensor};
use perpetua_device::kernels::{self, Advance, Numbered, Spec};
use perpetua_device::queue::{self, Words};
use perpetua_device::scheduler::Scheduler;
use perpetua_device::sync::Sync as WorkerSync;
use perpetua_device::worker::{self, Body, ImageView};
use perpetua_shared::control::{Control, End, PRODUCED, STOP, Sequence};
use perpetua_shared::event::reached;
use perpetua_shared::image::BindingKind;
use perpetua_shared::limits::{MAX_OPERANDS, MAX_SEQUENCES};
use perpetua_shared::{EventId, Fault, FaultCode, Operand, Step, TaskDesc, TaskId, WorkerId};
use std::cell::Cell;
use std::mem::offset_of;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How workers behave.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long a worker waits while nothing at all happens before it calls that a stall.
    pub timeout: Duration,
    /// Where workers run.
    pub pinning: Pinning,
    /// For tests: before each task a worker dawdles for a while that depends on this seed, the task and the iteration,
    /// so that tasks meet in orders that an idle machine would hardly show.
    pub dawdle: Option<u64>,
}

impl Default for Options {
    fn default() -> Options {
        Options { timeout: Duration::from_secs(60), pinning: Pinning::Apart, dawdle: None }
    }
}

/// A counter with a cache line to itself: neighbours are triggered by different workers.
#[repr(align(64))]
#[derive(Debug, Default)]
struct Counter(AtomicU32);

/// What workers tell each other by, and how they wait for it.
#[derive(Debug)]
struct Counters {
    words: Box<[Counter]>,
    /// Set with the first fault.
    aborted: AtomicBool,
    /// See [`Options::timeout`].
    timeout: Duration,
}

/// What the host and the workers share.
#[derive(Debug)]
struct Shared {
    image: Image,
    memory: Memory,
    options: Options,
    /// Of the events; then the queue's words.
    counters: Counters,
    launches: Mutex<Launches>,
    /// Per task, the weights its worker asks for before the task's events have fired.
    ahead: Box<[Ahead]>,
    fault: Mutex<Option<Fault>>,
    /// Of the run under way, or the last one.
    stopper: Mutex<Stopper>,
    /// Iterations since the counters were zeroed, agreed on by all workers at the end of a run.
    iteration: AtomicU32,
    bell: Mutex<Bell>,
    rung: Condvar,
    /// Who wants to hear of tokens.
    host: Mutex<Option<Thread>>,
    /// Nanoseconds workers spent waiting for events, summed.
    waited_ns: AtomicU64,
    /// When each iteration of the last run ended.
    stamps: Mutex<Vec<Instant>>,
}

/// The scheduler that all workers share.
#[derive(Debug, Default)]
struct Launches {
    /// The pass it is in, by its iteration, and what it has left to launch.
    pass: Option<(u32, Scheduler)>,
    is_done: bool,
}

/// Just-in-time tasks it looks at: their events' counters are in the caches of this machine.
const WINDOW: u32 = 32;

#[derive(Debug, Default)]
struct Bell {
    /// Counts runs.
    run: u64,
    /// Workers that have not finished this run.
    busy: u32,
    /// Time to leave for good.
    closing: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while one of these was held cannot leave it half-written: each holds a plain value.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The executor.
#[derive(Debug)]
pub struct Threads {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    running: bool,
    /// How the last run failed, if it did.
    failed: Option<RunError>,
    /// Held until the workers have gone.
    cores: Claim,
}

impl Threads {
    /// Starts the workers `image` is made for.
    ///
    /// # Errors
    /// When the system gives no more threads.
    pub fn new(image: Image, memory: Memory, options: Options) -> std::io::Result<Threads> {
        assert!(memory.serves(&image), "an image runs on memory of its own compilation");
        let is_flagged = image.bindings().iter().any(|binding| binding.kind == BindingKind::Flagged as u32);
        assert!(!is_flagged, "an image whose tasks tell each other by flags is a GPU's");
        let n_workers = image.header().n_workers;
        let view = image.view();
        let n_counters = view.events.len() + queue::words(view.max_just_in_time()) as usize;
        let counters = Counters::new(n_counters, options.timeout);
        let cores = Claim::new(&options.pinning, n_workers as usize);
        let ahead = plan_ahead(&image, &memory);
        let shared = Arc::new(Shared {
            ahead,
            image,
            memory,
            options,
            counters,
            launches: Mutex::new(Launches::default()),
            fault: Mutex::new(None),
            stopper: Mutex::default(),
            iteration: AtomicU32::new(0),
            bell: Mutex::new(Bell::default()),
            rung: Condvar::new(),
            host: Mutex::new(None),
            waited_ns: AtomicU64::new(0),
            stamps: Mutex::new(Vec::new()),
        });
        let mut threads = Threads { shared, workers: Vec::new(), running: false, failed: None, cores };
        for worker in 0..n_workers {
            let (shared, core) = (threads.shared.clone(), threads.cores.core(worker as usize));
            // On failure `threads` is dropped, which sends the workers already there home.
            let spawned = std::thread::Builder::new()
                .name(format!("perpetua w{worker}"))
                .spawn(move || resident(&shared, WorkerId(worker), core))?;
            threads.workers.push(spawned);
        }
        Ok(threads)
    }

    /// The image the workers run.
    pub fn image(&self) -> &Image {
        &self.shared.image
    }

    /// The memory, to read outputs from. Waits for the run to end.
    pub fn memory(&mut self) -> &Memory {
        self.wait_idle();
        &self.shared.memory
    }

    /// Asks the run to end after the iteration that runs.
    pub fn stop(&self) {
        lock(&self.shared.stopper).stop();
    }

    fn wait_idle(&mut self) {
        let mut bell = lock(&self.shared.bell);
        while bell.busy > 0 {
            bell = self.shared.rung.wait(bell).unwrap_or_else(PoisonError::into_inner);
        }
        drop(bell);
        self.running = false;
    }
}

impl Executor for Threads {
    fn start_with(&mut self, mut control: Control, stopper: &Stopper) {
        check_control(&self.shared.image, &control);
        self.wait_idle();
        self.failed = None;
        let base = self.shared.memory.control_base();
        // SAFETY: no worker runs.
        let before = unsafe { base.read() };
        count_on(&mut control, before.program_runs, self.shared.iteration.load(Ordering::Relaxed));
        // SAFETY: no worker runs; the bell's mutex publishes this to the workers.
        unsafe { base.write(control) };
        *lock(&self.shared.stopper) = stopper.clone();
        *lock(&self.shared.host) = Some(std::thread::current());
        let mut stamps = lock(&self.shared.stamps);
        stamps.clear();
        stamps.push(Instant::now());
        drop(stamps);
        let mut bell = lock(&self.shared.bell);
        bell.run += 1;
        bell.busy = self.workers.len() as u32;
        drop(bell);
        self.running = true;
        self.shared.rung.notify_all();
    }

    fn finish(&mut self) -> Result<Control, RunError> {
        self.wait_idle();
        if let Some(fault) = lock(&self.shared.fault).take() {
            // Nobody runs: start over with clean counters.
            self.shared.counters.reset();
            *lock(&self.shared.launches) = Launches::default();
            self.shared.iteration.store(0, Ordering::Relaxed);
            let base = self.shared.memory.control_base();
            // SAFETY: no worker runs.
            unsafe { (*base).program_runs = Default::default() };
            self.failed = Some(RunError::of(&fault, &self.shared.image));
        }
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        // SAFETY: no worker runs.
        let control = unsafe { self.shared.memory.control_base().read() };
        let has_run = lock(&self.shared.bell).run > 0;
        debug_assert!(!has_run || control.end != End::Running as u32, "a loop without a fault ends for a reason");
        Ok(control)
    }

    fn produced(&self) -> u32 {
        // Acquire: partner is the release store in `advance`, so the tokens counted can be read.
        self.shared.memory.control_word(PRODUCED).load(Ordering::Acquire)
    }

    fn produced_of(&self, sequence: usize) -> u32 {
        assert!(sequence < MAX_SEQUENCES, "a batch's sequence");
        let at = offset_of!(Control, sequences) + sequence * size_of::<Sequence>() + offset_of!(Sequence, produced);
        // Acquire: partner is the release store in `advance`.
        self.shared.memory.control_word(at).load(Ordering::Acquire)
    }

    fn token(&self, position: usize) -> u32 {
        self.shared.memory.token(position)
    }

    fn set_tokens(&mut self, position: usize, tokens: &[u32]) {
        // SAFETY: `memory` has waited for the workers, and none can be started while `self` is borrowed.
        unsafe { self.memory().set_tokens(position, tokens) }
    }

    fn set_input(&mut self, name: &str, contents: &[u8]) -> Result<(), MemoryError> {
        // SAFETY: as `set_tokens`.
        unsafe { self.memory().set_input(name, contents) }
    }

    fn append_f32(&mut self, output: &Operand, rows: usize, out: &mut Vec<f32>) -> Result<(), RunError> {
        self.memory().append_f32(output, rows, out);
        Ok(())
    }

    fn stamps(&self) -> Vec<Instant> {
        lock(&self.shared.stamps).clone()
    }

    fn owned_bytes(&self) -> u64 {
        self.shared.memory.owned_bytes()
    }

    fn is_running(&mut self) -> bool {
        if self.running && lock(&self.shared.bell).busy == 0 {
            self.running = false;
        }
        self.running
    }

    fn rest(&self) {
        let (mut host, current) = (lock(&self.shared.host), std::thread::current());
        if host.as_ref().is_none_or(|host| host.id() != current.id()) {
            // Whoever has looked before may have missed what woke another thread: it looks again.
            *host = Some(current);
            return;
        }
        drop(host);
        // Woken by a token or the run's end.
        std::thread::park_timeout(Duration::from_millis(20));
    }

    fn position(&self) -> u32 {
        let offset = offset_of!(Control, step) + offset_of!(Step, first_pos);
        self.shared.memory.control_word(offset).load(Ordering::Relaxed)
    }

    fn waited(&self) -> Duration {
        Duration::from_nanos(self.shared.waited_ns.load(Ordering::Relaxed))
    }

    /// Measured between two threads where the first two workers run, which rest meanwhile.
    fn event_cost(&mut self) -> Option<Duration> {
        self.wait_idle();
        if self.workers.len() < 2 {
            return None;
        }
        event_cost([0, 1].map(|worker| self.cores.core(worker)))
    }
}

/// Rounds of a sample of [`event_cost`]: enough that reading the clock does not show.
const ROUNDS: u32 = 16;

/// Samples, of which the median counts.
const SAMPLES: u32 = 401;

/// The time that a trigger takes from one thread to another, on `cores`, by the counters that workers use: two events,
/// each waited for by one thread and answered with the other. `None` when a thread gets no turn for a minute.
fn event_cost(cores: [Option<usize>; 2]) -> Option<Duration> {
    let counters = Counters::new(2, Options::default().timeout);
    let thread = |core: Option<usize>, serve: bool| {
        core.into_iter().for_each(pin);
        let waited = Cell::new(Duration::ZERO);
        let (mine, other) = if serve { (EventId(0), EventId(1)) } else { (EventId(1), EventId(0)) };
        let mut samples = Vec::new();
        for sample in 0..SAMPLES {
            let began = Instant::now();
            for round in sample * ROUNDS..(sample + 1) * ROUNDS {
                if serve {
                    counters.trigger(other);
                }
                counters.wait(mine, round + 1, &waited, || None, || ()).ok()?;
                if !serve {
                    counters.trigger(other);
                }
            }
            samples.push(began.elapsed());
        }
        samples.sort_unstable();
        Some(samples[samples.len() / 2] / (2 * ROUNDS))
    };
    std::thread::scope(|scope| {
        scope.spawn(|| thread(cores[1], false));
        // On a thread of its own, too: the caller's stays where it may run.
        scope.spawn(|| thread(cores[0], true)).join().ok()?
    })
}

impl Counters {
    fn new(n: usize, timeout: Duration) -> Counters {
        let words = (0..n).map(|_| Counter::default()).collect();
        Counters { words, aborted: AtomicBool::new(false), timeout }
    }

    /// As they were at first. Nobody may be waiting.
    fn reset(&self) {
        self.words.iter().for_each(|counter| counter.0.store(0, Ordering::Relaxed));
        self.aborted.store(false, Ordering::Relaxed);
    }

    /// Something that changes with every trigger of every event. Never `None`, so that the first look never matches.
    fn triggers_seen(&self) -> Option<u64> {
        Some(self.words.iter().fold(0u64, |sum, c| sum.wrapping_add(u64::from(c.0.load(Ordering::Relaxed)))))
    }

    /// Waits until `event` stands at `target`, or `look` has found a task to run first, which it returns. While it
    /// spins it calls `meanwhile`; the time is added to `waited`.
    #[inline(always)]
    fn wait(
        &self,
        event: EventId,
        target: u32,
        waited: &Cell<Duration>,
        look: impl Fn() -> Option<TaskId>,
        meanwhile: impl Fn(),
    ) -> Result<Option<TaskId>, Fault> {
        let counter = &self.words[event.idx()].0;
        let taken = look();
        // Acquire: partner is the release add in `trigger`.
        if taken.is_some() || reached(counter.load(Ordering::Acquire), target) {
            return Ok(taken);
        }
        let began = Instant::now();
        let mut since = began;
        let mut seen = None;
        let mut spins = 0u32;
        loop {
            let taken = look();
            let count = counter.load(Ordering::Acquire);
            if taken.is_some() || reached(count, target) {
                waited.set(waited.get() + began.elapsed());
                return Ok(taken);
            }
            if self.aborted.load(Ordering::Acquire) {
                return Err(Fault::new(FaultCode::Aborted, event.0, count, target));
            }
            spins += 1;
            if spins < SPINS {
                meanwhile();
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
                if since.elapsed() > self.timeout {
                    // A long task elsewhere is no stall: only if nothing at all was triggered meanwhile is it one.
                    let triggers = self.triggers_seen();
                    if triggers == seen {
                        return Err(Fault::new(FaultCode::Timeout, event.0, count, target));
                    }
                    seen = triggers;
                    since = Instant::now();
                }
            }
        }
    }

    #[inline(always)]
    fn trigger(&self, event: EventId) {
        // Release: partner is the acquire load in `wait`.
        self.words[event.idx()].0.fetch_add(1, Ordering::Release);
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.stop();
        self.wait_idle();
        lock(&self.shared.bell).closing = true;
        self.shared.rung.notify_all();
        for worker in self.workers.drain(..) {
            // A worker's panics are caught and reported as faults; there is nothing left to hear.
            let _ = worker.join();
        }
    }
}

/// A worker's life.
fn resident(shared: &Shared, worker: WorkerId, core: Option<usize>) {
    core.into_iter().for_each(pin);
    let mut scratch = Scratch::default();
    let mut heard = 0;
    loop {
        let mut bell = lock(&shared.bell);
        while bell.run == heard && !bell.closing {
            bell = shared.rung.wait(bell).unwrap_or_else(PoisonError::into_inner);
        }
        if bell.closing {
            return;
        }
        heard = bell.run;
        drop(bell);
        let view = shared.image.view();
        let n_slots = queue::slots(view.max_just_in_time());
        let ahead = Cell::new(Ahead::default());
        let mut waiting = Waiting { shared, view, n_slots, ahead: &ahead, waited: Cell::new(Duration::ZERO) };
        let running = Cell::new(u32::MAX);
        let mut body = CpuBody { shared, view, ahead: &ahead, scratch: &mut scratch, running: &running };
        let started = shared.iteration.load(Ordering::Relaxed);
        let outcome = catch_unwind(AssertUnwindSafe(|| worker::run(&view, worker, started, &waiting, &mut body)));
        let fault = match outcome {
            Ok(Ok(iteration)) => {
                shared.iteration.store(iteration, Ordering::Relaxed);
                None
            }
            Ok(Err(fault)) => Some(fault),
            Err(_) => {
                let fault = Fault::new(FaultCode::Panic, 0, 0, 0);
                Some(Fault { task: running.get(), worker: worker.0, ..fault })
            }
        };
        if let Some(fault) = fault {
            let mut first = lock(&shared.fault);
            // A worker that was only told to stop does not hide why.
            if first.is_none() && fault.code != FaultCode::Aborted as u32 {
                *first = Some(fault);
            }
            shared.counters.aborted.store(true, Ordering::Release);
        }
        shared.waited_ns.fetch_add(waiting.waited.get_mut().as_nanos() as u64, Ordering::Relaxed);
        let mut bell = lock(&shared.bell);
        bell.busy -= 1;
        if bell.busy == 0 {
            shared.rung.notify_all();
            if let Some(host) = lock(&shared.host).take() {
                host.unpark();
            }
        }
    }
}

/// Per task of `image`, which weights its worker may ask for when its list comes to it: as far as the plan of this kind
/// of machine ([`prefetch`]) runs ahead of the tasks done by then.
fn plan_ahead(image: &Image, memory: &Memory) -> Box<[Ahead]> {
    let view = image.view();
    let machine = Machine::CPU;
    let matrices = |task: &TaskDesc| {
        let operands = view.operands(task);
        let tiled = Spec::of(task.task_type).map_or(&[][..], |spec| kernels::tiled(spec, &task.params));
        tiled.iter().map(move |slot| operands[*slot]).filter(|operand| operand.rank == 2)
    };
    let stream = |operand: Operand| Stream { source: operand.binding.0, operand, segments: 1 };
    let streams = |task: &TaskDesc| Reads { tiles: matrices(task).map(stream).collect(), ..Reads::default() };
    let reads: Vec<Reads> = view.tasks.iter().map(streams).collect();
    let mut ahead = vec![Ahead::default(); view.tasks.len()];
    let mut bytes = vec![0u64; view.tasks.len()];
    for (program, worker) in (0..view.programs.len()).flat_map(|p| (0..view.n_workers).map(move |w| (p, w))) {
        let list = view.list(program, WorkerId(worker));
        // A task that reads more at once than the cache holds streams as it runs, and nothing before.
        let Ok(plan) = prefetch::plan_list(list, &reads, &machine, &|task| image.task_name(task)) else { continue };
        let mut begun = None;
        for (number, compute) in plan.computes.iter().enumerate() {
            let (task, first) =
                *begun.insert(begun.filter(|(task, _)| *task == compute.task).unwrap_or((compute.task, number)));
            let early = plan.data[compute.data_first as usize..compute.data_end as usize].iter();
            bytes[task as usize] +=
                early.filter(|op| op.after as usize <= first).map(|op| u64::from(op.bytes)).sum::<u64>();
        }
        for &task in list {
            let tensors: Vec<Tensor> = matrices(&view.tasks[task as usize])
                // SAFETY: boxes lie inside their bindings (`image::check`); nothing is read or written through them.
                .map(|operand| unsafe { memory.tensor(&operand, 0) })
                .collect();
            ahead[task as usize] = Ahead::of(&tensors, bytes[task as usize]);
        }
    }
    ahead.into()
}

/// Waits and triggers on the shared counters.
struct Waiting<'a> {
    shared: &'a Shared,
    view: ImageView<'a>,
    n_slots: u32,
    /// What may be asked for meanwhile.
    ahead: &'a Cell<Ahead>,
    waited: Cell<Duration>,
}

/// Cache lines of each stream that are asked for before a task's events are looked at; a worker that has to wait goes
/// on.
/// PERF: decode of qwen3-0.6b is 1 % faster with 8 than without, in bf16 and in 8 bits; with 32 it is slower, since
/// what a task reads first then queues behind them (Sapphire Rapids, 2 cores, steps of four kinds in turn, 2026-11-21).
const FIRST_LINES: usize = 8;

/// Polls before the core is offered to others. About 10 us: longer than any balanced task's tail, shorter than a
/// scheduler's time slice by far.
const SPINS: u32 = 2000;

impl Words for Waiting<'_> {
    fn n_events(&self) -> u32 {
        self.view.events.len() as u32
    }

    fn n_slots(&self) -> u32 {
        self.n_slots
    }

    fn load(&self, at: u32) -> u32 {
        self.shared.counters.words[at as usize].0.load(Ordering::Relaxed)
    }

    fn acquire(&self, at: u32) -> u32 {
        // Acquire: partners are the release add in `trigger` and the release store in `publish`.
        self.shared.counters.words[at as usize].0.load(Ordering::Acquire)
    }

    fn publish(&self, at: u32, value: u32) {
        self.shared.counters.words[at as usize].0.store(value, Ordering::Release);
    }

    fn draw(&self, at: u32) -> u32 {
        self.shared.counters.words[at as usize].0.fetch_add(1, Ordering::Relaxed)
    }

    fn claim(&self, at: u32, old: u32, new: u32) -> bool {
        let word = &self.shared.counters.words[at as usize].0;
        word.compare_exchange(old, new, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

impl Waiting<'_> {
    /// Launches what is ready in the pass `step`, unless another worker is about it, and takes a task.
    fn look(&self, step: &Step) -> Option<TaskId> {
        let launches = match self.shared.launches.try_lock() {
            Ok(launches) => Some(launches),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        if let Some(mut launches) = launches {
            if launches.pass.is_none_or(|(iteration, _)| !reached(iteration, step.iteration)) {
                *launches = Launches { pass: Some((step.iteration, Scheduler::new(0, 1, WINDOW))), is_done: false };
            }
            let Launches { pass, is_done } = &mut *launches;
            // A worker that has not seen the end of its iteration finds that of the next; its own has nothing left.
            if let Some((iteration, scheduler)) = pass
                && *iteration == step.iteration
                && !*is_done
            {
                (*is_done, _) = scheduler.round(&self.view, step, self);
            }
        }
        queue::take(self, step)
    }
}

impl WorkerSync for Waiting<'_> {
    fn wait(&self, event: EventId, target: u32, pass: Option<&Step>) -> Result<Option<TaskId>, Fault> {
        let look = || pass.and_then(|step| self.look(step));
        let meanwhile = || {
            let mut ahead = self.ahead.get();
            ahead.ask(1);
            self.ahead.set(ahead);
        };
        self.shared.counters.wait(event, target, &self.waited, look, meanwhile)
    }

    fn trigger(&self, event: EventId) {
        self.shared.counters.trigger(event);
    }

    fn step(&self) -> Step {
        // SAFETY: `advance` writes the step only between the arrival of every worker and the iteration's event, and
        // this is called only between that event and this worker's arrival (see the worker loop's argument).
        unsafe { core::ptr::addr_of!((*self.shared.memory.control_base()).step).read_volatile() }
    }
}

/// Passes some time: mostly none, often a yield or two, now and then a fraction of a millisecond.
fn dawdle(seed: u64, task: TaskId, iteration: u32) {
    let mut z = seed ^ u64::from(task.0).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ u64::from(iteration) << 40;
    z = (z ^ z >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z ^= z >> 32;
    match z % 16 {
        0..8 => {}
        8..15 => (0..z % 5).for_each(|_| std::thread::yield_now()),
        _ => std::thread::sleep(Duration::from_micros(z >> 8 & 255)),
    }
}

/// Runs CPU bodies.
struct CpuBody<'a> {
    shared: &'a Shared,
    view: ImageView<'a>,
    ahead: &'a Cell<Ahead>,
    scratch: &'a mut Scratch,
    /// The task whose turn it is, for whoever finds that its body has panicked.
    running: &'a Cell<u32>,
}

impl Body for CpuBody<'_> {
    fn ahead(&mut self, id: TaskId) {
        let mut ahead = self.shared.ahead[id.idx()];
        ahead.ask(FIRST_LINES);
        self.ahead.set(ahead);
    }

    fn run(&mut self, id: TaskId, task: &TaskDesc, step: &Step, _: u32) -> Result<(), Fault> {
        self.running.set(id.0);
        if let Some(seed) = self.shared.options.dawdle {
            dawdle(seed, id, step.iteration);
        }
        let operands = self.view.operands(task);
        let mut tensors = [Tensor::ABSENT; MAX_OPERANDS];
        for (tensor, operand) in tensors.iter_mut().zip(operands) {
            // SAFETY: `image::check` has judged every box inside its binding and aligned; law 1 (judged by
            // `graph::task::check`) orders this task against all that touch the same bytes. The step's sequence is one
            // of the image's (`start`; `advance` chooses among as many), and the box is in the first one's part of a
            // binding that has parts, or the step's sequence is the first (`image::check`).
            *tensor = unsafe { self.shared.memory.tensor(operand, step.sequence) };
        }
        // SAFETY: as for the step itself, which this belongs to: nobody but `advance` writes it, between iterations.
        let step = step_of(task.flags, step, |number| unsafe { self.shared.memory.sequence(number) });
        let call = Call { tensors: &tensors[..operands.len()], task, step: &step, programs: self.view.programs };
        let Some(spec) = Spec::of(task.task_type) else {
            return Err(Fault::new(FaultCode::NoSuchKernel, u32::from(task.task_type), 0, 0));
        };
        let ends_iteration = task.task_type == Advance::TASK_TYPE;
        if ends_iteration && lock(&self.shared.stopper).is_told() {
            self.shared.memory.control_word(STOP).store(1, Ordering::Relaxed);
        }
        (spec.cpu)(&call, self.scratch)?;
        if ends_iteration {
            lock(&self.shared.stamps).push(Instant::now());
            if let Some(host) = lock(&self.shared.host).as_ref() {
                host.unpark();
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever it is: a trigger takes some time, and none is lost.
    #[test]
    fn an_event_costs_something() {
        let cost = event_cost([None, None]).expect("both threads get their turns");
        assert!(cost > Duration::ZERO && cost < Options::default().timeout, "{cost:?}");
    }
}
