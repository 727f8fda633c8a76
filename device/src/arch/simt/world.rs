//! Threads, warps and blocks at work: coroutines of one host thread, switched where threads wait for each other.
//!
//! A seeded choice picks the warp that runs next, and the lane it starts with; a warp goes on while its lanes can, up to
//! a number of rounds that is drawn too. A lane that polls a word and sleeps is not run again before somebody has
//! changed that word. When nobody can run any more, time jumps ahead, so that bounded waits end the way they would on the
//! GPU; when that moves nobody either, it is a deadlock.

use super::error::{SimtError, Wrong};
use super::memory::{Allocation, Global, Order, Shared, Touch};
use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};
use std::cell::Cell;
use std::collections::HashMap;
use std::fmt::Write;
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};

/// How a launch is simulated.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Blocks of the grid, all resident at once.
    pub blocks: u32,
    /// Threads of a block: whole warps.
    pub threads: u32,
    /// Seed of the schedule.
    pub seed: u64,
}

/// What a launch did.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// How often a thread was given the processor.
    pub switches: u64,
    /// Barriers of blocks.
    pub barriers: u64,
    /// Exchanges of warps.
    pub exchanges: u64,
    /// Bytes read from global memory, by all threads.
    pub bytes_read: u64,
    /// Bytes written to global memory.
    pub bytes_written: u64,
    /// Who waited for what when nobody could go on; the launch then ended by its threads' own bounds on waiting.
    pub stall: Option<String>,
}

/// Why a thread does not run.
#[derive(Clone, Copy, Debug)]
enum Wait {
    /// It can.
    Ready,
    /// At its block's barrier.
    Barrier,
    /// At an exchange with its warp.
    Exchange,
    /// It polls words (see [`Thread::polled`]) and sleeps.
    Word,
    /// It has ended.
    Gone,
}

#[derive(Debug)]
struct Thread {
    wait: Wait,
    /// What it brings to an exchange, then what it got.
    value: u32,
    /// The lane it wants the value of.
    source: u32,
    /// Words it has read with relaxed order since it last slept.
    polled: Vec<usize>,
    yielder: *const Yielder<(), ()>,
}

/// Where lanes or threads meet.
#[derive(Clone, Copy, Debug, Default)]
struct Meeting {
    /// How many have come.
    come: u32,
    /// What the first came for, and where.
    first: Option<(Purpose, &'static Location<'static>)>,
}

/// What threads meet for: those that meet must agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    Barrier,
    Vote,
    ShuffleXor,
    Shuffle,
}

#[derive(Debug, Default)]
struct Warp {
    /// Lanes that can run.
    ready: u32,
    /// Whether it stands in [`World::queue`], or is the one that runs.
    queued: bool,
    /// Lanes at an exchange.
    exchange: Meeting,
    /// Lanes at the block's barrier; the place.
    barrier: Meeting,
    /// Lanes that have ended.
    gone: u32,
}

#[derive(Debug)]
struct Block {
    barrier: Meeting,
    vote: bool,
    /// What the last vote said.
    outcome: bool,
    gone: u32,
    shared: Shared,
    task: Option<u32>,
}

/// One launch.
#[derive(Debug)]
pub(super) struct World {
    options: Options,
    random: u64,
    now_ns: u64,
    current: u32,
    threads: Vec<Thread>,
    warps: Vec<Warp>,
    blocks: Vec<Block>,
    /// Warps with lanes that can run.
    queue: Vec<u32>,
    /// Threads that sleep until a word changes.
    pollers: HashMap<usize, Vec<u32>>,
    /// Threads that have not ended.
    left: u32,
    global: Global,
    order: Order,
    report: Report,
}

thread_local! {
    static WORLD: Cell<*mut World> = const { Cell::new(core::ptr::null_mut()) };
}

/// Takes the launch out of reach, however it ends.
struct Running;

impl Drop for Running {
    fn drop(&mut self) {
        WORLD.set(core::ptr::null_mut());
    }
}

/// Calls `f` with the launch that the calling thread belongs to. `f` must neither switch nor come back here.
#[inline]
pub(super) fn with<R>(f: impl FnOnce(&mut World) -> R) -> R {
    let world = WORLD.get();
    assert!(!world.is_null(), "device code runs inside a launch");
    // SAFETY: set by `launch` on this host thread, which clears it before the world goes; the borrow ends before any
    // switch to another coroutine, and calls do not nest.
    f(unsafe { &mut *world })
}

/// Ends the launch with the error of `judged`, if there is one.
pub(super) fn demand<R>(judged: Result<R, Box<SimtError>>) -> R {
    match judged {
        Ok(value) => value,
        // Past the panic hook: nobody panicked, and `launch` catches it.
        Err(error) => resume_unwind(error),
    }
}

/// Lets others run until this thread is ready again.
pub(super) fn suspend() {
    let yielder = with(|world| world.threads[world.current as usize].yielder);
    // SAFETY: the yielder of the coroutine that runs now, which lives as long as it does.
    unsafe { (*yielder).suspend(()) };
}

/// Virtual memory of a thread's stack. Only what is touched is ever backed; unoptimised bodies need a lot.
const STACK_BYTES: usize = 256 << 10;

/// Time jumps without any change after which a stall is called a deadlock: a poller looks at its clock less often than
/// it polls.
const JUMPS: u32 = 256;

type Lane = Coroutine<(), (), (), DefaultStack>;

/// Runs `body` on every thread of a grid.
///
/// # Errors
/// The first error of the simulated program: the launch ends there.
///
/// # Panics
/// When the options make no grid, allocations overlap, or the system gives no memory for stacks.
pub fn launch(options: &Options, allocations: Vec<Allocation>, body: impl Fn()) -> Result<Report, Box<SimtError>> {
    let Options { blocks, threads, seed } = *options;
    assert!(blocks > 0 && threads > 0 && threads.is_multiple_of(32) && threads <= 1024, "blocks are whole warps");
    assert!(WORLD.get().is_null(), "a launch inside a launch");
    let block = || Block {
        barrier: Meeting::default(),
        vote: false,
        outcome: false,
        gone: 0,
        shared: Shared::new(crate::arch::shared::WORDS),
        task: None,
    };
    let n = blocks * threads;
    let thread = || Thread { wait: Wait::Ready, value: 0, source: 0, polled: Vec::new(), yielder: core::ptr::null() };
    let warp = || Warp { ready: u32::MAX, queued: true, ..Warp::default() };
    let mut world = World {
        options: *options,
        random: seed,
        now_ns: 1,
        current: 0,
        threads: (0..n).map(|_| thread()).collect(),
        warps: (0..n / 32).map(|_| warp()).collect(),
        blocks: (0..blocks).map(|_| block()).collect(),
        queue: (0..n / 32).collect(),
        pollers: HashMap::new(),
        left: n,
        global: Global::new(allocations),
        order: Order::new(blocks, threads),
        report: Report::default(),
    };
    let mut lanes: Vec<Lane> = Vec::with_capacity(n as usize);
    for _ in 0..n {
        let stack = DefaultStack::new(STACK_BYTES).expect("memory for the simulated threads' stacks");
        let body = &body;
        let run = move |yielder: &Yielder<(), ()>, ()| {
            with(|world| world.threads[world.current as usize].yielder = yielder);
            body();
            demand(with(World::leave));
        };
        // SAFETY: `run` borrows `body`, which outlives `lanes`.
        lanes.push(unsafe { Coroutine::with_stack_unchecked(stack, run) });
    }
    WORLD.set(&raw mut world);
    let running = Running;
    let outcome = drive(&mut lanes);
    // Threads that have not ended are unwound now.
    drop(lanes);
    drop(running);
    outcome.map(|()| world.report)
}

fn drive(lanes: &mut [Lane]) -> Result<(), Box<SimtError>> {
    let mut jumps = 0;
    loop {
        let Some((warp, mut rounds)) = with(World::pick) else {
            if with(|world| world.left) == 0 {
                return Ok(());
            }
            jumps += 1;
            with(|world| world.jump(jumps))?;
            continue;
        };
        let mut moved = false;
        while rounds > 0 {
            let (ready, start) = with(|world| (world.warps[warp as usize].ready, world.below(32)));
            if ready == 0 {
                break;
            }
            for lane in (start..32).chain(0..start).filter(|lane| ready >> lane & 1 != 0) {
                moved |= with(|world| world.enter(warp * 32 + lane));
                let resumed = catch_unwind(AssertUnwindSafe(|| lanes[(warp * 32 + lane) as usize].resume(())));
                match resumed {
                    Ok(CoroutineResult::Yield(()) | CoroutineResult::Return(())) => {}
                    Err(payload) => return Err(with(|world| world.told(payload))),
                }
            }
            rounds -= 1;
        }
        with(|world| world.requeue(warp));
        if moved {
            jumps = 0;
        }
    }
}

/// Whether two places are one; the same line as a rule is the same address.
fn is_same(a: &'static Location<'static>, b: &'static Location<'static>) -> bool {
    core::ptr::eq(a, b) || a == b
}

impl World {
    fn below(&mut self, n: u32) -> u32 {
        // SplitMix64.
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ z >> 31) % u64::from(n)) as u32
    }

    /// The warp to run next, and for how many rounds at most.
    fn pick(&mut self) -> Option<(u32, u32)> {
        if self.queue.is_empty() {
            return None;
        }
        let at = self.below(self.queue.len() as u32);
        let warp = self.queue.swap_remove(at as usize);
        let rounds = 1 << self.below(8);
        Some((warp, rounds))
    }

    fn requeue(&mut self, warp: u32) {
        let state = &mut self.warps[warp as usize];
        state.queued = state.ready != 0;
        if state.queued {
            self.queue.push(warp);
        }
    }

    /// Gives thread `thread` the processor; says whether it was due to more than time's passing.
    fn enter(&mut self, thread: u32) -> bool {
        self.current = thread;
        self.now_ns += 5;
        self.report.switches += 1;
        !matches!(self.threads[thread as usize].wait, Wait::Word)
    }

    fn wake(&mut self, thread: u32) {
        let warp = &mut self.warps[thread as usize / 32];
        warp.ready |= 1 << (thread % 32);
        if !warp.queued {
            warp.queued = true;
            self.queue.push(thread / 32);
        }
    }

    fn block_threads(&self) -> u32 {
        self.options.threads
    }

    fn block_of(&self, thread: u32) -> u32 {
        thread / self.options.threads
    }

    fn error(&self, wrong: Wrong, what: String, at: Option<&'static Location<'static>>) -> Box<SimtError> {
        let block = self.block_of(self.current);
        let task = self.blocks[block as usize].task;
        Box::new(SimtError { wrong, what, block, thread: self.current % self.options.threads, task, at })
    }

    /// What a coroutine's unwinding says.
    fn told(&self, payload: Box<dyn std::any::Any + Send>) -> Box<SimtError> {
        match payload.downcast::<SimtError>() {
            Ok(error) => error,
            Err(payload) => {
                let text = payload.downcast_ref::<&str>().map(|s| (*s).to_owned());
                let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
                self.error(Wrong::Panic, text.unwrap_or_else(|| "a panic".to_owned()), None)
            }
        }
    }

    fn wait(&mut self, wait: Wait) {
        let thread = self.current;
        self.threads[thread as usize].wait = wait;
        self.warps[thread as usize / 32].ready &= !(1 << (thread % 32));
    }

    /// The current thread ends.
    fn leave(&mut self) -> Result<(), Box<SimtError>> {
        let (thread, block) = (self.current, self.block_of(self.current));
        if let Some((_, at)) = self.blocks[block as usize].barrier.first {
            let what = "a thread ends while others of its block wait at a barrier".to_owned();
            return Err(self.error(Wrong::Divergence, what, Some(at)));
        }
        if let Some((purpose, at)) = self.warps[thread as usize / 32].exchange.first {
            let what = format!("a lane ends while others of its warp wait at a {purpose:?}");
            return Err(self.error(Wrong::Divergence, what, Some(at)));
        }
        self.wait(Wait::Gone);
        self.warps[thread as usize / 32].gone += 1;
        self.blocks[block as usize].gone += 1;
        self.left -= 1;
        Ok(())
    }

    /// Nobody can run: time passes.
    fn jump(&mut self, jumps: u32) -> Result<(), Box<SimtError>> {
        let stuck = self.describe();
        let sleepers: Vec<u32> =
            (0..self.threads.len() as u32).filter(|t| matches!(self.threads[*t as usize].wait, Wait::Word)).collect();
        if sleepers.is_empty() || jumps > JUMPS {
            return Err(self.error(Wrong::Deadlock, stuck, None));
        }
        self.report.stall.get_or_insert(stuck);
        self.now_ns += 1 << 40;
        self.pollers.clear();
        for thread in sleepers {
            self.wake(thread);
        }
        Ok(())
    }

    /// Who waits for what.
    fn describe(&self) -> String {
        let mut text = String::from("nobody can go on:");
        for (number, block) in self.blocks.iter().enumerate() {
            if block.gone == self.options.threads {
                continue;
            }
            let _ = write!(text, " block {number}");
            if let Some(task) = block.task {
                let _ = write!(text, " (t{task})");
            }
            text.push(':');
            if let Some((_, at)) = block.barrier.first {
                let _ = write!(text, " {} at the barrier of {}:{};", block.barrier.come, at.file(), at.line());
            }
            let first = number as u32 * self.options.threads;
            for thread in first..first + self.options.threads {
                match self.threads[thread as usize].wait {
                    Wait::Word => {
                        let word = self.threads[thread as usize].polled[0];
                        let _ = write!(text, " thread {} polls {}", thread - first, self.global.name(word));
                        if word != 0 {
                            // SAFETY: `polled` holds words that have been judged to lie inside an allocation.
                            let value = unsafe { core::ptr::with_exposed_provenance::<u32>(word).read_volatile() };
                            let _ = write!(text, ", which stands at {value}");
                        }
                        text.push(';');
                    }
                    Wait::Exchange => {
                        let _ = write!(text, " thread {} waits for its warp;", thread - first);
                    }
                    _ => {}
                }
            }
        }
        text
    }

    pub(super) fn thread_idx(&self) -> u32 {
        self.current % self.options.threads
    }

    pub(super) fn block_idx(&self) -> u32 {
        self.block_of(self.current)
    }

    pub(super) fn block_dim(&self) -> u32 {
        self.block_threads()
    }

    pub(super) fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// The current thread's block turns to task `task`.
    pub(super) fn at_task(&mut self, task: u32) {
        let block = self.block_idx() as usize;
        if self.blocks[block].task != Some(task) {
            self.blocks[block].task = Some(task);
            self.blocks[block].shared.poison();
        }
    }

    /// The current thread comes to its block's barrier; says whether it was the last.
    pub(super) fn barrier(
        &mut self,
        purpose: Purpose,
        vote: bool,
        at: &'static Location<'static>,
    ) -> Result<bool, Box<SimtError>> {
        let (thread, block) = (self.current, self.block_idx());
        let warp = &mut self.warps[thread as usize / 32];
        let state = &mut self.blocks[block as usize];
        if let Some((other, there)) = warp.exchange.first {
            let what = format!(
                "a lane at a barrier, others of its warp at the {other:?} of {}:{}",
                there.file(),
                there.line()
            );
            return Err(self.error(Wrong::Divergence, what, Some(at)));
        }
        if state.gone > 0 {
            let what =
                format!("a thread at a barrier that {} of its block will not come to: they have ended", state.gone);
            return Err(self.error(Wrong::Divergence, what, Some(at)));
        }
        let (first, there) = *state.barrier.first.get_or_insert((purpose, at));
        let (_, of_warp) = *warp.barrier.first.get_or_insert((purpose, at));
        // Warps may come from different lines, the lanes of one may not: theirs is one instruction.
        if first != purpose || !is_same(of_warp, at) {
            let there = if first != purpose { there } else { of_warp };
            let what = format!("a thread at one barrier, others at that of {}:{}", there.file(), there.line());
            return Err(self.error(Wrong::Divergence, what, Some(at)));
        }
        state.vote |= vote;
        state.barrier.come += 1;
        if state.barrier.come < self.options.threads {
            self.wait(Wait::Barrier);
            return Ok(false);
        }
        state.outcome = state.vote;
        state.vote = false;
        state.barrier = Meeting::default();
        let first = block * self.options.threads;
        for warp in &mut self.warps[first as usize / 32..][..self.options.threads as usize / 32] {
            warp.barrier = Meeting::default();
        }
        self.order.barrier(block);
        self.report.barriers += 1;
        for other in first..first + self.options.threads {
            self.threads[other as usize].wait = Wait::Ready;
            self.wake(other);
        }
        Ok(true)
    }

    /// What the vote that has just ended said.
    pub(super) fn outcome(&self) -> bool {
        self.blocks[self.block_idx() as usize].outcome
    }

    /// The current lane comes to an exchange; says whether it was the last.
    pub(super) fn exchange(
        &mut self,
        purpose: Purpose,
        value: u32,
        source: u32,
        at: &'static Location<'static>,
    ) -> Result<bool, Box<SimtError>> {
        let (thread, block) = (self.current, self.block_idx());
        let number = thread as usize / 32;
        let warp = &mut self.warps[number];
        if let Some((_, there)) = warp.barrier.first {
            let what = format!(
                "a lane at a {purpose:?}, others of its warp at the barrier of {}:{}",
                there.file(),
                there.line()
            );
            return Err(self.error(Wrong::Divergence, what, Some(at)));
        }
        if warp.gone > 0 {
            let what =
                format!("a lane at a {purpose:?} that {} of its warp will not come to: they have ended", warp.gone);
            return Err(self.error(Wrong::Divergence, what, Some(at)));
        }
        let (first, there) = *warp.exchange.first.get_or_insert((purpose, at));
        if first != purpose || !is_same(there, at) {
            let what = format!(
                "a lane at a {purpose:?}, others of its warp at the {first:?} of {}:{}",
                there.file(),
                there.line()
            );
            return Err(self.error(Wrong::Divergence, what, Some(at)));
        }
        warp.exchange.come += 1;
        self.threads[thread as usize].value = value;
        self.threads[thread as usize].source = source % 32;
        if self.warps[number].exchange.come < 32 {
            self.wait(Wait::Exchange);
            return Ok(false);
        }
        self.warps[number].exchange = Meeting::default();
        let lanes = &mut self.threads[number * 32..][..32];
        let values: [u32; 32] = core::array::from_fn(|lane| lanes[lane].value);
        for lane in lanes {
            lane.value = values[lane.source as usize];
            lane.wait = Wait::Ready;
        }
        self.warps[number].ready = u32::MAX;
        // The current lane runs, so its warp is queued.
        self.order.exchange(block, number as u32 % (self.options.threads / 32));
        self.report.exchanges += 1;
        Ok(true)
    }

    /// What the exchange that has just ended gave the current lane.
    pub(super) fn value(&self) -> u32 {
        self.threads[self.current as usize].value
    }

    /// The current thread touches global memory.
    #[inline]
    pub(super) fn touch(
        &mut self,
        address: usize,
        bytes: usize,
        align: usize,
        touch: Touch,
        at: &'static Location<'static>,
    ) -> Result<(), Box<SimtError>> {
        match touch {
            Touch::Read => self.report.bytes_read += bytes as u64,
            Touch::Write => self.report.bytes_written += bytes as u64,
            Touch::Atomic | Touch::View => {}
        }
        let judged = self.global.touch(&mut self.order, self.current, address, bytes, align, touch);
        judged.map_err(|(wrong, what)| self.error(wrong, what, Some(at)))
    }

    /// The current thread reads (`None`) or writes a word of shared memory.
    pub(super) fn shared(
        &mut self,
        word: u32,
        store: Option<u32>,
        at: &'static Location<'static>,
    ) -> Result<u32, Box<SimtError>> {
        let block = self.block_idx() as usize;
        let judged = self.blocks[block].shared.touch(&mut self.order, self.current, word, store);
        judged.map_err(|(wrong, what)| self.error(wrong, what, Some(at)))
    }

    /// The current thread has read `word` with relaxed order.
    pub(super) fn polled(&mut self, word: usize) {
        let polled = &mut self.threads[self.current as usize].polled;
        if !polled.contains(&word) {
            polled.push(word);
        }
    }

    pub(super) fn acquire(&mut self, word: usize) {
        self.order.acquire(self.current, word);
        // The wait is over. Words of past waits would only wake the thread for nothing, and hide in a report which one
        // it waits for now.
        self.threads[self.current as usize].polled.clear();
    }

    pub(super) fn release(&mut self, word: usize) {
        self.order.release(self.current, word);
    }

    /// `word` has changed: who polls it goes on.
    pub(super) fn changed(&mut self, word: usize) {
        for thread in self.pollers.remove(&word).unwrap_or_default() {
            if matches!(self.threads[thread as usize].wait, Wait::Word) {
                self.threads[thread as usize].wait = Wait::Ready;
                self.wake(thread);
            }
        }
    }

    /// The current thread sleeps: until what it polls changes, if it polls.
    pub(super) fn sleep(&mut self, ns: u32) {
        self.now_ns += u64::from(ns);
        let thread = self.current;
        let polled = self.threads[thread as usize].polled.clone();
        if polled.is_empty() {
            return;
        }
        self.wait(Wait::Word);
        for word in polled {
            let waiting = self.pollers.entry(word).or_default();
            if !waiting.contains(&thread) {
                waiting.push(thread);
            }
        }
    }

    /// The current thread has slept.
    pub(super) fn awake(&mut self) {
        let thread = &mut self.threads[self.current as usize];
        thread.polled.clear();
        thread.wait = Wait::Ready;
    }
}
