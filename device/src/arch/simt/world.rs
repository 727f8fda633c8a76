//! Threads, warps and blocks at work: coroutines of one host thread, switched where threads wait for each other.
//!
//! A seeded choice picks the warp that runs next, and the lane it starts with; a warp goes on while its lanes can, up
//! to a number of rounds that is drawn too. A lane that polls a word and sleeps is not run again before somebody has
//! changed that word. When nobody can run any more, time jumps ahead, so that bounded waits end the way they would on
//! the GPU; when that moves nobody either, it is a deadlock.

use super::error::{SimtError, Wrong};
use super::memory::{Allocation, COPY_UNIT, Clock, Global, MBARRIERS, Order, Shared, Touch, WordTouch};
use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};
use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::fmt::Write;
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};
use std::rc::Rc;

/// How a launch is simulated.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Blocks of the grid, all resident at once.
    pub blocks: u32,
    /// Threads of a block that meet at its barrier: whole warps.
    pub threads: u32,
    /// Warps beside them that do not.
    pub service_warps: u32,
    /// Shared memory for bulk copies, in bytes.
    pub tile_bytes: u32,
    /// Seed of the schedule.
    pub seed: u64,
    /// What the GPU's clock says at the launch.
    pub began_ns: u64,
}

impl Options {
    /// `blocks` blocks of `threads` threads and nothing else.
    pub fn new(blocks: u32, threads: u32, seed: u64) -> Options {
        Options { blocks, threads, service_warps: 0, tile_bytes: 0, seed, began_ns: 1 }
    }

    fn block_threads(&self) -> u32 {
        self.threads + 32 * self.service_warps
    }
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
    /// Likewise, each once, of each allocation that [counts](Allocation::counted) them: its name, and how many.
    pub read: Vec<(String, u64)>,
    /// Bytes written to global memory.
    pub bytes_written: u64,
    /// Products that warps have made by themselves.
    pub warp_products: u64,
    /// Products that warps have begun as part of a warpgroup.
    pub products: u64,
    /// Bulk copies into shared memory.
    pub copies: u64,
    /// Their bytes.
    pub bytes_copied: u64,
    /// The most bytes that a block's copies had under way at once.
    pub peak_in_flight: u64,
    /// What the GPU's clock says at the launch's end.
    pub ended_ns: u64,
    /// Who waited for what when nobody could go on; the launch then ended by its threads' own bounds on waiting.
    pub stall: Option<String>,
}

/// Why a thread does not run.
#[derive(Clone, Copy, Debug)]
enum Wait {
    /// It can.
    Ready,
    /// At a barrier of its block.
    Barrier(u32),
    /// For a phase of its block's mbarrier.
    Phase(u32),
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
    /// What it brings to, or has from, a collective on more than a word.
    words: [u32; 10],
    /// Words it has read with relaxed order since it last slept.
    polled: Vec<usize>,
    /// Whether it has fenced the proxies since it last learnt of others' writes.
    is_fenced: bool,
    /// Copies of sixteen bytes that it has begun, in groups, the last of which is not committed; those that it has
    /// waited for and not fenced.
    sixteens: VecDeque<Vec<Sixteen>>,
    unfenced: Vec<u32>,
    /// Tasks it has come to, all threads of a block the same ones, and the last of them.
    n_tasks: u32,
    task: Option<u32>,
    yielder: *const Yielder<(), ()>,
}

/// A thread's copy of sixteen bytes to tile byte `to`, of zeros where there is no source.
#[derive(Clone, Copy, Debug)]
struct Sixteen {
    from: Option<usize>,
    to: u32,
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
    Union,
    WarpSync,
    Mma,
    MmaBytes,
    LdMatrix,
    ProductsBegin,
    Product,
    ProductsCommit,
    ProductsWait,
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
    /// Whether products have been begun and not committed.
    multiplies: bool,
    /// Tile bytes that its products read, in groups, the last of which is not committed.
    products: VecDeque<Vec<u32>>,
    /// How many products it has begun.
    n_products: usize,
}

/// Named barriers of a block.
const BARRIERS: usize = 16;

#[derive(Debug)]
struct Block {
    /// The first is the one that all `Options::threads` meet at.
    barriers: [Meeting; BARRIERS],
    vote: bool,
    /// What the last vote said.
    outcome: bool,
    /// Threads that have ended: of those that meet, and of all.
    gone: u32,
    all_gone: u32,
    shared: Shared,
    mbarriers: Vec<Mbarrier>,
    /// Per warpgroup, its products: each warp must begin the same ones.
    products: Vec<Vec<(u64, u64)>>,
    /// Bytes of copies under way.
    in_flight: u64,
    /// The task that some thread has come to and none is beyond, and how many there were.
    task: Option<u32>,
    n_tasks: u32,
}

/// Who does something, and where.
#[derive(Clone, Copy, Debug)]
struct Place {
    block: u32,
    thread: u32,
    number: u32,
}

/// A barrier in shared memory, with a count of arrivals and one of bytes.
#[derive(Debug)]
struct Mbarrier {
    /// Arrivals of a phase; 0 before it is initialised.
    count: u32,
    /// Arrivals that this phase still lacks.
    lacking: u32,
    /// Bytes that it expects and that have not come.
    bytes: i64,
    /// Phases that have ended.
    phase: u32,
    /// Who initialised it when, and whether that has been fenced for the copies.
    init: Option<(u32, u32)>,
    is_fenced: bool,
    /// What this phase will carry, and what the last one does.
    pending: Clock,
    done: Rc<Clock>,
    /// Per thread that has waited: how many phases it has seen the end of.
    seen: HashMap<u32, u32>,
    waiters: Vec<u32>,
}

/// Largest number of bytes a phase may expect.
const MAX_PHASE_BYTES: i64 = (1 << 20) - 1;

/// A bulk copy, or a piece of one, that has not landed.
#[derive(Debug)]
struct Copy {
    block: u32,
    from: usize,
    to: u32,
    bytes: u32,
    barrier: u32,
    /// The barrier's phase when it began.
    phase: u32,
    time: u32,
    at: &'static Location<'static>,
}

/// One launch.
#[derive(Debug)]
pub(super) struct World {
    options: Options,
    random: u64,
    now_ns: u64,
    current: u32,
    /// Its block, which of the block's it is, and its number in the order of accesses: every access asks.
    place: Place,
    threads: Vec<Thread>,
    warps: Vec<Warp>,
    blocks: Vec<Block>,
    /// Warps with lanes that can run.
    queue: Vec<u32>,
    copies: Vec<Copy>,
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

/// Mappings of a process beside those of the stacks, of which each has two, one of them its guard: libraries, weights
/// and large allocations, and many to spare.
const OTHER_MAPPINGS: u64 = 2000;

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
/// When the options make no grid, or allocations overlap.
pub fn launch(options: &Options, allocations: Vec<Allocation>, body: impl Fn()) -> Result<Report, Box<SimtError>> {
    launch_beside(options, allocations, || (), body)
}

/// As [`launch`]. `host` is called now and then, between threads' turns: what the host does meanwhile, to words of
/// memory that it may write while the kernel runs.
///
/// # Errors
/// As [`launch`].
///
/// # Panics
/// As [`launch`].
pub fn launch_beside(
    options: &Options,
    allocations: Vec<Allocation>,
    host: impl FnMut(),
    body: impl Fn(),
) -> Result<Report, Box<SimtError>> {
    let Options { blocks, seed, .. } = *options;
    let threads = options.block_threads();
    assert!(
        blocks > 0 && options.threads > 0 && threads.is_multiple_of(32) && threads <= 1024,
        "blocks are whole warps"
    );
    let n = blocks * threads;
    let stacks = stacks(n)?;
    let order = Order::new(blocks, options.threads, 32 * options.service_warps);
    let mbarrier = || Mbarrier {
        count: 0,
        lacking: 0,
        bytes: 0,
        phase: 0,
        init: None,
        is_fenced: false,
        pending: order.no_clock(),
        done: order.no_clock().into(),
        seen: HashMap::new(),
        waiters: Vec::new(),
    };
    assert!(WORLD.get().is_null(), "a launch inside a launch");
    let block = || Block {
        barriers: [Meeting::default(); BARRIERS],
        vote: false,
        outcome: false,
        gone: 0,
        all_gone: 0,
        shared: Shared::new(crate::arch::shared::WORDS, options.tile_bytes, threads / 32),
        mbarriers: (0..MBARRIERS).map(|_| mbarrier()).collect(),
        products: vec![Vec::new(); threads.div_ceil(128) as usize],
        in_flight: 0,
        task: None,
        n_tasks: 0,
    };
    let thread = || Thread {
        wait: Wait::Ready,
        value: 0,
        source: 0,
        words: [0; 10],
        polled: Vec::new(),
        is_fenced: false,
        sixteens: VecDeque::from([Vec::new()]),
        unfenced: Vec::new(),
        n_tasks: 0,
        task: None,
        yielder: core::ptr::null(),
    };
    let warp = || Warp { ready: u32::MAX, queued: true, products: VecDeque::from([Vec::new()]), ..Warp::default() };
    let mut world = World {
        options: *options,
        random: seed,
        now_ns: options.began_ns,
        current: 0,
        place: Place { block: 0, thread: 0, number: order.number(0, 0) },
        threads: (0..n).map(|_| thread()).collect(),
        warps: (0..n / 32).map(|_| warp()).collect(),
        blocks: (0..blocks).map(|_| block()).collect(),
        queue: (0..n / 32).collect(),
        copies: Vec::new(),
        pollers: HashMap::new(),
        left: n,
        global: Global::new(allocations),
        order,
        report: Report::default(),
    };
    let mut lanes: Vec<Lane> = Vec::with_capacity(n as usize);
    for stack in stacks {
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
    let outcome = drive(&mut lanes, host);
    // Threads that have not ended are unwound now.
    drop(lanes);
    drop(running);
    outcome.map(|()| Report { read: world.global.read(), ..world.report })
}

/// A stack for each of `n` threads.
fn stacks(n: u32) -> Result<Vec<DefaultStack>, Box<SimtError>> {
    let refusal =
        |what| Box::new(SimtError { wrong: Wrong::NoStacks, what, block: 0, thread: 0, task: None, at: None });
    let needed = 2 * u64::from(n) + OTHER_MAPPINGS;
    // Asked before: a process that has all the mappings it may can fail in any allocation.
    let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    if let Some(limit) = limit.and_then(|text| text.trim().parse::<u64>().ok()).filter(|limit| needed > *limit) {
        return Err(refusal(format!(
            "the stacks of {n} simulated threads need {needed} mappings of memory, and a process may have {limit} here: \
             simulate fewer SMs (--threads), or raise the limit (sysctl -w vm.max_map_count={needed})"
        )));
    }
    let stack = |made| {
        DefaultStack::new(STACK_BYTES).map_err(|error| {
            let kib = STACK_BYTES >> 10;
            refusal(format!(
                "there is no memory for the stacks of {n} simulated threads, {kib} KiB each: after {made} of them, {error}; \
                 simulate fewer SMs (--threads)"
            ))
        })
    };
    (0..n).map(stack).collect()
}

fn drive(lanes: &mut [Lane], mut host: impl FnMut()) -> Result<(), Box<SimtError>> {
    let mut jumps = 0;
    loop {
        host();
        // Copies land when they like, but the sooner the longer others have nothing to do.
        with(|world| if world.queue.is_empty() || world.below(16) == 0 { world.land() } else { Ok(()) })?;
        let Some((warp, mut rounds)) = with(World::pick) else {
            if with(|world| world.left) == 0 {
                return with(|world| world.end());
            }
            if with(|world| !world.copies.is_empty()) {
                continue;
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
        self.go_to(thread);
        self.now_ns += 5;
        self.report.ended_ns = self.now_ns;
        self.report.switches += 1;
        !matches!(self.threads[thread as usize].wait, Wait::Word | Wait::Phase(_))
    }

    /// What follows is done by `thread`.
    fn go_to(&mut self, thread: u32) {
        let (block, in_block) = (self.block_of(thread), thread % self.options.block_threads());
        self.current = thread;
        self.place = Place { block, thread: in_block, number: self.order.number(block, in_block) };
    }

    fn wake(&mut self, thread: u32) {
        let warp = &mut self.warps[thread as usize / 32];
        warp.ready |= 1 << (thread % 32);
        if !warp.queued {
            warp.queued = true;
            self.queue.push(thread / 32);
        }
    }

    fn block_of(&self, thread: u32) -> u32 {
        thread / self.options.block_threads()
    }

    /// The current thread, as the order of accesses numbers it.
    #[inline]
    fn ordinal(&self) -> u32 {
        self.place.number
    }

    fn error(&self, wrong: Wrong, what: String, at: Option<&'static Location<'static>>) -> Box<SimtError> {
        let block = self.block_of(self.current);
        let task = self.threads[self.current as usize].task;
        Box::new(SimtError { wrong, what, block, thread: self.thread_idx(), task, at })
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
        let meets = self.thread_idx() < self.options.threads;
        if let Some((_, at)) = self.blocks[block as usize].barriers[0].first.filter(|_| meets) {
            let what = "a thread ends while others of its block wait at a barrier".to_owned();
            return Err(self.error(Wrong::Divergence, what, Some(at)));
        }
        if let Some((purpose, at)) = self.warps[thread as usize / 32].exchange.first {
            let what = format!("a lane ends while others of its warp wait at a {purpose:?}");
            return Err(self.error(Wrong::Divergence, what, Some(at)));
        }
        let is_copying = self.threads[thread as usize].sixteens.iter().any(|group| !group.is_empty());
        if is_copying || self.warps[thread as usize / 32].products.iter().any(|group| !group.is_empty()) {
            let what = format!(
                "a thread ends with {} that it has not waited for",
                if is_copying { "copies" } else { "products" }
            );
            return Err(self.error(Wrong::Transactions, what, None));
        }
        self.wait(Wait::Gone);
        self.warps[thread as usize / 32].gone += 1;
        self.blocks[block as usize].gone += u32::from(meets);
        self.blocks[block as usize].all_gone += 1;
        self.left -= 1;
        Ok(())
    }

    /// All threads have ended: no copy may be under way any more, nor expected.
    fn end(&mut self) -> Result<(), Box<SimtError>> {
        if let Some(&Copy { block, barrier, at, .. }) = self.copies.first() {
            self.go_to(block * self.options.block_threads());
            let what = format!("the block ends while a copy to mbarrier {barrier} is under way");
            return Err(self.error(Wrong::Transactions, what, Some(at)));
        }
        for block in 0..self.blocks.len() as u32 {
            let open = self.blocks[block as usize].mbarriers.iter().position(|barrier| barrier.bytes != 0);
            if let Some(barrier) = open {
                self.go_to(block * self.options.block_threads());
                let bytes = self.blocks[block as usize].mbarriers[barrier].bytes;
                let what = format!("the block ends while mbarrier {barrier} expects {bytes} bytes more");
                return Err(self.error(Wrong::Transactions, what, None));
            }
        }
        Ok(())
    }

    /// One copy that is under way lands: any.
    fn land(&mut self) -> Result<(), Box<SimtError>> {
        if self.copies.is_empty() {
            return Ok(());
        }
        let at = self.below(self.copies.len() as u32);
        let copy = self.copies.swap_remove(at as usize);
        // Errors are told of the block's first thread.
        let current = self.current;
        self.go_to(copy.block * self.options.block_threads());
        let block = &mut self.blocks[copy.block as usize];
        block.in_flight -= u64::from(copy.bytes);
        let from: *const u128 = core::ptr::with_exposed_provenance(copy.from);
        // SAFETY: aligned and inside a live allocation, as has been judged when the copy began.
        block.shared.land(copy.to, unsafe { core::slice::from_raw_parts(from, copy.bytes as usize / COPY_UNIT) });
        let barrier = &mut block.mbarriers[copy.barrier as usize];
        barrier.bytes -= i64::from(copy.bytes);
        self.order.end_copy(copy.block, copy.barrier, copy.time, &mut barrier.pending);
        if barrier.phase != copy.phase {
            let what =
                format!("{} bytes land on mbarrier {}, whose phase ended without them", copy.bytes, copy.barrier);
            return Err(self.error(Wrong::Transactions, what, Some(copy.at)));
        }
        self.complete(copy.block, copy.barrier, copy.at)?;
        self.go_to(current);
        Ok(())
    }

    /// Ends the phase of `barrier` if nothing is lacking.
    fn complete(&mut self, block: u32, number: u32, at: &'static Location<'static>) -> Result<(), Box<SimtError>> {
        let barrier = &mut self.blocks[block as usize].mbarriers[number as usize];
        if barrier.lacking > 0 || barrier.bytes > 0 {
            return Ok(());
        }
        if barrier.bytes < 0 {
            let what = format!("copies bring {} bytes more than mbarrier {number} expects", -barrier.bytes);
            return Err(self.error(Wrong::Transactions, what, Some(at)));
        }
        barrier.phase += 1;
        barrier.lacking = barrier.count;
        barrier.done = Rc::new(barrier.pending.clone());
        for thread in std::mem::take(&mut barrier.waiters) {
            if matches!(self.threads[thread as usize].wait, Wait::Phase(_)) {
                self.threads[thread as usize].wait = Wait::Ready;
                self.wake(thread);
            }
        }
        Ok(())
    }

    /// Mbarrier `number` of the current thread's block, once it may be used.
    fn mbarrier(&mut self, number: u32, at: &'static Location<'static>) -> Result<&mut Mbarrier, Box<SimtError>> {
        let (block, thread) = (self.block_idx() as usize, self.ordinal());
        if number >= MBARRIERS {
            let what = format!("mbarrier {number} of {MBARRIERS}");
            return Err(self.error(Wrong::OutOfBounds, what, Some(at)));
        }
        let Some((who, time)) = self.blocks[block].mbarriers[number as usize].init else {
            let what = format!("mbarrier {number} is used before it is initialised");
            return Err(self.error(Wrong::Mbarrier, what, Some(at)));
        };
        if !self.order.is_seen(thread, who, time) {
            let what = format!("mbarrier {number} is used, initialised by another thread, and nothing between");
            return Err(self.error(Wrong::Race, what, Some(at)));
        }
        Ok(&mut self.blocks[block].mbarriers[number as usize])
    }

    pub(super) fn mbarrier_init(
        &mut self,
        number: u32,
        count: u32,
        at: &'static Location<'static>,
    ) -> Result<(), Box<SimtError>> {
        let (block, epoch) = (self.block_idx() as usize, (self.ordinal(), self.order.now(self.ordinal())));
        if number >= MBARRIERS || count == 0 || self.blocks[block].mbarriers[number as usize].count != 0 {
            let what = format!("mbarrier {number} of {MBARRIERS} is initialised with {count}, or for the second time");
            return Err(self.error(Wrong::Mbarrier, what, Some(at)));
        }
        let barrier = &mut self.blocks[block].mbarriers[number as usize];
        (barrier.count, barrier.lacking, barrier.init) = (count, count, Some(epoch));
        Ok(())
    }

    /// What the current thread has initialised may be used by copies.
    pub(super) fn mbarrier_fence(&mut self) {
        let (block, thread) = (self.block_idx() as usize, self.ordinal());
        for barrier in &mut self.blocks[block].mbarriers {
            barrier.is_fenced |= barrier.init.is_some_and(|(who, _)| who == thread);
        }
    }

    /// The current thread arrives, and makes the phase expect `bytes` more.
    pub(super) fn mbarrier_arrive(
        &mut self,
        number: u32,
        bytes: u32,
        at: &'static Location<'static>,
    ) -> Result<(), Box<SimtError>> {
        let (block, thread) = (self.block_idx(), self.ordinal());
        let barrier = self.mbarrier(number, at)?;
        barrier.bytes += i64::from(bytes);
        let expected = barrier.bytes;
        if expected > MAX_PHASE_BYTES {
            let what = format!("mbarrier {number} expects {expected} bytes in a phase, {MAX_PHASE_BYTES} at most");
            return Err(self.error(Wrong::Transactions, what, Some(at)));
        }
        if barrier.lacking == 0 {
            let what = format!("an arrival at mbarrier {number}, whose phase has had all its arrivals");
            return Err(self.error(Wrong::Mbarrier, what, Some(at)));
        }
        barrier.lacking -= 1;
        let mut pending = std::mem::take(&mut barrier.pending);
        self.order.release_to(thread, &mut pending);
        self.blocks[block as usize].mbarriers[number as usize].pending = pending;
        self.complete(block, number, at)
    }

    /// Whether the phase of parity `parity` has ended; if not, the current thread is to be suspended once.
    pub(super) fn mbarrier_try_wait(
        &mut self,
        number: u32,
        parity: u32,
        at: &'static Location<'static>,
    ) -> Result<bool, Box<SimtError>> {
        let over = self.mbarrier_test_wait(number, parity, at)?;
        if !over {
            let current = self.current;
            self.mbarrier(number, at)?.waiters.push(current);
            self.wait(Wait::Phase(number));
        }
        Ok(over)
    }

    /// Whether the phase of parity `parity` has ended.
    pub(super) fn mbarrier_test_wait(
        &mut self,
        number: u32,
        parity: u32,
        at: &'static Location<'static>,
    ) -> Result<bool, Box<SimtError>> {
        let (thread, current) = (self.ordinal(), self.current);
        let barrier = self.mbarrier(number, at)?;
        // `seen` phases have ended as this thread knows, `phase` have. What ended last has parity (phase - 1) & 1, also
        // before any has.
        let (phase, seen) = (barrier.phase, *barrier.seen.entry(current).or_insert(0));
        let over = phase & 1 != parity & 1;
        let gone_by = if over { phase > seen + 1 } else { phase > seen };
        if gone_by {
            let what = format!(
                "a wait for parity {parity} of mbarrier {number} by a thread that has seen {seen} of its phases end, but \
                 {phase} have"
            );
            return Err(self.error(Wrong::Mbarrier, what, Some(at)));
        }
        if !over {
            return Ok(false);
        }
        barrier.seen.insert(current, phase);
        let done = Rc::clone(&barrier.done);
        self.order.acquire_from(thread, &done);
        self.threads[current as usize].is_fenced = false;
        Ok(true)
    }

    /// The current thread begins a bulk copy.
    pub(super) fn copy(
        &mut self,
        to: u32,
        from: usize,
        bytes: u32,
        number: u32,
        at: &'static Location<'static>,
    ) -> Result<(), Box<SimtError>> {
        let (block, thread) = (self.block_idx(), self.ordinal());
        let barrier = self.mbarrier(number, at)?;
        let phase = barrier.phase;
        if !barrier.is_fenced {
            let what = format!("a bulk copy counted by mbarrier {number}, whose initialisation no fence has published");
            return Err(self.error(Wrong::Proxy, what, Some(at)));
        }
        let time = self.order.begin_copy(block);
        let shared = &mut self.blocks[block as usize].shared;
        let is_fenced = self.threads[self.current as usize].is_fenced;
        let judged = shared.copy_to(&mut self.order, thread, to, bytes, number, time).and_then(|()| {
            let global = &mut self.global;
            global.copy_from(&mut self.order, thread, is_fenced, from, bytes as usize, number, time)
        });
        judged.map_err(|(wrong, what)| self.error(wrong, what, Some(at)))?;
        self.report.copies += 1;
        self.report.bytes_copied += u64::from(bytes);
        let in_flight = &mut self.blocks[block as usize].in_flight;
        *in_flight += u64::from(bytes);
        self.report.peak_in_flight = self.report.peak_in_flight.max(*in_flight);
        // In two pieces, which may land apart.
        let first = self.below(bytes / COPY_UNIT as u32) * COPY_UNIT as u32;
        for (start, end) in [(0, first), (first, bytes)] {
            if start < end {
                let (from, to, bytes) = (from + start as usize, to + start, end - start);
                self.copies.push(Copy { block, from, to, bytes, barrier: number, phase, time, at });
            }
        }
        Ok(())
    }

    /// The current thread asks for bytes to be brought into L2.
    pub(super) fn prefetch(
        &mut self,
        from: usize,
        bytes: u32,
        at: &'static Location<'static>,
    ) -> Result<(), Box<SimtError>> {
        let judged = self.global.prefetch(from, bytes as usize);
        judged.map_err(|(wrong, what)| self.error(wrong, what, Some(at)))
    }

    /// The current thread fences the proxies.
    pub(super) fn fence_proxy(&mut self) {
        self.threads[self.current as usize].is_fenced = true;
    }

    /// The current thread begins to copy sixteen bytes, of `from` or zeros, to tile byte `to`.
    pub(super) fn copy_sixteen(
        &mut self,
        to: u32,
        from: Option<usize>,
        at: &'static Location<'static>,
    ) -> Result<(), Box<SimtError>> {
        if let Some(from) = from {
            self.touch(from, COPY_UNIT, COPY_UNIT, Touch::Read, at)?;
        }
        let (block, thread) = (self.block_idx() as usize, self.ordinal());
        let judged = self.blocks[block].shared.copy_sixteen_to(&mut self.order, thread, to);
        judged.map_err(|(wrong, what)| self.error(wrong, what, Some(at)))?;
        let groups = &mut self.threads[self.current as usize].sixteens;
        groups.back_mut().expect("an open group").push(Sixteen { from, to });
        let in_flight = &mut self.blocks[block].in_flight;
        *in_flight += if from.is_some() { COPY_UNIT as u64 } else { 0 };
        self.report.peak_in_flight = self.report.peak_in_flight.max(*in_flight);
        Ok(())
    }

    /// The current thread writes sixteen bytes of the tiles.
    pub(super) fn tile_store(
        &mut self,
        to: u32,
        bytes: u128,
        at: &'static Location<'static>,
    ) -> Result<(), Box<SimtError>> {
        let (block, thread) = (self.block_idx() as usize, self.ordinal());
        let shared = &mut self.blocks[block].shared;
        let judged = shared.copy_sixteen_to(&mut self.order, thread, to);
        judged.map_err(|(wrong, what)| self.error(wrong, what, Some(at)))?;
        self.blocks[block].shared.land_sixteen(&self.order, thread, to, bytes);
        self.threads[self.current as usize].unfenced.push(to);
        Ok(())
    }

    /// The current thread's copies so far are a group.
    pub(super) fn copy_commit(&mut self) {
        self.threads[self.current as usize].sixteens.push_back(Vec::new());
    }

    /// The current thread waits for all its groups but `left`: they land now, as late as they may.
    pub(super) fn copy_wait(&mut self, left: u32) {
        let (block, thread, current) = (self.block_idx() as usize, self.ordinal(), self.current as usize);
        while self.threads[current].sixteens.len() > left as usize + 1 {
            for Sixteen { from, to } in self.threads[current].sixteens.pop_front().unwrap_or_default() {
                // SAFETY: aligned and inside a live allocation, as has been judged when the copy began.
                let bytes = from.map_or(0, |from| unsafe { core::ptr::with_exposed_provenance::<u128>(from).read() });
                self.blocks[block].shared.land_sixteen(&self.order, thread, to, bytes);
                self.blocks[block].in_flight -= if from.is_some() { COPY_UNIT as u64 } else { 0 };
                self.threads[current].unfenced.push(to);
            }
        }
    }

    /// The current thread's copies that have landed are fenced for products.
    pub(super) fn fence_tiles(&mut self) {
        let block = self.block_idx() as usize;
        for to in std::mem::take(&mut self.threads[self.current as usize].unfenced) {
            self.blocks[block].shared.fence_sixteen(to);
        }
    }

    /// The current lane's warp comes to an instruction of its warpgroup's products; says whether it was the last.
    pub(super) fn products(
        &mut self,
        purpose: Purpose,
        left: u32,
        at: &'static Location<'static>,
    ) -> Result<bool, Box<SimtError>> {
        if !self.exchange(purpose, left, 0, at)? {
            return Ok(false);
        }
        let (number, block, thread) = (self.current as usize / 32, self.block_idx() as usize, self.ordinal());
        let warp = &mut self.warps[number];
        match purpose {
            Purpose::ProductsBegin => warp.multiplies = true,
            Purpose::ProductsCommit => {
                warp.multiplies = false;
                warp.products.push_back(Vec::new());
            }
            _ => {
                while self.warps[number].products.len() > left as usize + 1 {
                    for at in self.warps[number].products.pop_front().unwrap_or_default() {
                        self.blocks[block].shared.multiplied(&self.order, thread, at);
                    }
                }
                if left == 0 && self.warps[number].products.iter().any(|group| !group.is_empty()) {
                    let what = "sums are taken before their products are committed".to_owned();
                    return Err(self.error(Wrong::Divergence, what, Some(at)));
                }
            }
        }
        Ok(true)
    }

    /// The current lane comes, with its warp, to a product of the matrices `a`, 0 where that is in registers, and `b`;
    /// says whether it was the last. What a warp whose rows of a are those from a number on takes of them is at
    /// `places`.
    pub(super) fn product(
        &mut self,
        [a, b]: [u64; 2],
        places: impl FnOnce(u32) -> Vec<Option<u32>>,
        at: &'static Location<'static>,
    ) -> Result<bool, Box<SimtError>> {
        let (current, block, thread) = (self.current as usize, self.block_idx() as usize, self.ordinal());
        self.threads[current].words[..4].copy_from_slice(&[a as u32, (a >> 32) as u32, b as u32, (b >> 32) as u32]);
        if !self.come(Purpose::Product, at)? {
            return Ok(false);
        }
        let warp = current / 32;
        let lanes = &self.threads[warp * 32..][..32];
        if lanes.iter().any(|lane| lane.words[..4] != self.threads[current].words[..4]) {
            let what = "lanes of a warp name different matrices for one product".to_owned();
            return Err(self.error(Wrong::Divergence, what, Some(at)));
        }
        if !self.warps[warp].multiplies {
            let what = "a product outside a warpgroup's begin and commit".to_owned();
            return Err(self.error(Wrong::Divergence, what, Some(at)));
        }
        if [a, b].iter().any(|matrix| matrix >> 3 & 7 != 0) {
            let what = "a product of a matrix that does not start on a multiple of 1024 bytes".to_owned();
            return Err(self.error(Wrong::Misaligned, what, Some(at)));
        }
        // All warps of the group make the same products, in the same order.
        let in_block = self.thread_idx() as usize / 32;
        let (n, of_group) = (self.warps[warp].n_products, &mut self.blocks[block].products[in_block / 4]);
        match of_group.get(n) {
            Some(other) if *other != (a, b) => {
                let what = format!("warps of one warpgroup differ in product {n}: {other:x?} and {:x?}", (a, b));
                return Err(self.error(Wrong::Divergence, what, Some(at)));
            }
            Some(_) => {}
            None => of_group.push((a, b)),
        }
        self.warps[warp].n_products += 1;
        self.report.products += 1;
        for place in places(in_block as u32 % 4 * 16) {
            let Some(place) = place else {
                let what = "a product of a matrix that is not one, or starts before the tiles".to_owned();
                return Err(self.error(Wrong::OutOfBounds, what, Some(at)));
            };
            let judged = self.blocks[block].shared.multiply(&self.order, thread, place);
            judged.map_err(|(wrong, what)| self.error(wrong, what, Some(at)))?;
            self.warps[warp].products.back_mut().expect("an open group").push(place);
        }
        self.part();
        Ok(true)
    }

    /// Sixteen bytes of the tiles of the current thread's block, which have been judged.
    pub(super) fn sixteen(&self, at: u32) -> u128 {
        self.blocks[self.block_idx() as usize].shared.sixteen(at)
    }

    /// The current thread reads `bytes` bytes of the tiles; returns the sixteen they lie in.
    pub(super) fn tile(
        &mut self,
        at: u32,
        bytes: u32,
        caller: &'static Location<'static>,
    ) -> Result<u128, Box<SimtError>> {
        let (block, thread) = (self.block_idx() as usize, self.ordinal());
        let judged = self.blocks[block].shared.tile(&mut self.order, thread, at, bytes);
        judged.map_err(|(wrong, what)| self.error(wrong, what, Some(caller)))
    }

    /// Nobody can run: time passes.
    fn jump(&mut self, jumps: u32) -> Result<(), Box<SimtError>> {
        let stuck = self.describe();
        let sleepers: Vec<u32> = (0..self.threads.len() as u32)
            .filter(|t| matches!(self.threads[*t as usize].wait, Wait::Word | Wait::Phase(_)))
            .collect();
        if sleepers.is_empty() || jumps > JUMPS {
            // Nothing is under way: bytes that somebody waits for will never come.
            let missing = self
                .blocks
                .iter()
                .any(|block| block.mbarriers.iter().any(|barrier| barrier.bytes > 0 && !barrier.waiters.is_empty()));
            let wrong = if missing { Wrong::Transactions } else { Wrong::Deadlock };
            return Err(self.error(wrong, stuck, None));
        }
        self.report.stall.get_or_insert(stuck);
        // First by steps that tell a wait's bound from one some times as long, since a poller reads its clock once in
        // 64 polls; then by leaps beyond any bound.
        self.now_ns += if jumps <= JUMPS / 2 { 1 << 24 } else { 1 << 40 };
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
            let threads = self.options.block_threads();
            if block.all_gone == threads {
                continue;
            }
            let _ = write!(text, " block {number}");
            if let Some(task) = block.task {
                let _ = write!(text, " (t{task})");
            }
            text.push(':');
            for barrier in &block.barriers {
                if let Some((_, at)) = barrier.first {
                    let _ = write!(text, " {} at the barrier of {}:{};", barrier.come, at.file(), at.line());
                }
            }
            for (number, barrier) in block.mbarriers.iter().enumerate().filter(|(_, b)| !b.waiters.is_empty()) {
                let Mbarrier { phase, lacking, bytes, .. } = barrier;
                let _ = write!(text, " mbarrier {number} in phase {phase} lacks {lacking} arrivals and {bytes} bytes;");
            }
            let first = number as u32 * threads;
            for thread in first..first + threads {
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
                    Wait::Phase(barrier) => {
                        let _ = write!(text, " thread {} waits for mbarrier {barrier};", thread - first);
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
        self.place.thread
    }

    pub(super) fn block_idx(&self) -> u32 {
        self.place.block
    }

    pub(super) fn block_dim(&self) -> u32 {
        self.options.block_threads()
    }

    /// Threads of a block that meet at its barrier.
    pub(super) fn meeting_threads(&self) -> u32 {
        self.options.threads
    }

    pub(super) fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// The current thread's block turns to task `task`.
    pub(super) fn at_task(&mut self, task: u32) {
        let thread = &mut self.threads[self.current as usize];
        thread.n_tasks += 1;
        thread.task = Some(task);
        let n_tasks = thread.n_tasks;
        let block = self.block_idx() as usize;
        let block = &mut self.blocks[block];
        // Threads that come later to a task that another one has begun, or ended, must not poison what it wrote.
        if n_tasks > block.n_tasks {
            block.n_tasks = n_tasks;
            block.task = Some(task);
            block.shared.poison();
        }
    }

    /// The current thread comes to barrier `id` of its block, where `expected` meet; says whether it was the last.
    pub(super) fn barrier(
        &mut self,
        id: u32,
        expected: u32,
        purpose: Purpose,
        vote: bool,
        at: &'static Location<'static>,
    ) -> Result<bool, Box<SimtError>> {
        let (thread, block, meets) = (self.current, self.block_idx(), self.thread_idx() < self.options.threads);
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
        let left =
            if id == 0 { self.options.threads - state.gone } else { self.options.block_threads() - state.all_gone };
        if left < expected {
            let what = format!("a thread at a barrier of {expected}, of whom only {left} are left: they have ended");
            return Err(self.error(Wrong::Divergence, what, Some(at)));
        }
        if id as usize >= BARRIERS || !expected.is_multiple_of(32) || (id == 0 && !meets) {
            let what = format!("barrier {id} of {expected} threads: no such barrier for this thread");
            return Err(self.error(Wrong::Divergence, what, Some(at)));
        }
        let meeting = &mut state.barriers[id as usize];
        let (first, there) = *meeting.first.get_or_insert((purpose, at));
        let (_, of_warp) = *warp.barrier.first.get_or_insert((purpose, at));
        // Warps may come from different lines, the lanes of one may not: theirs is one instruction.
        if first != purpose || !is_same(of_warp, at) {
            let there = if first != purpose { there } else { of_warp };
            let what = format!("a thread at one barrier, others at that of {}:{}", there.file(), there.line());
            return Err(self.error(Wrong::Divergence, what, Some(at)));
        }
        state.vote |= vote;
        meeting.come += 1;
        let come = meeting.come;
        self.wait(Wait::Barrier(id));
        if come < expected {
            return Ok(false);
        }
        let state = &mut self.blocks[block as usize];
        state.barriers[id as usize] = Meeting::default();
        if purpose == Purpose::Vote {
            state.outcome = std::mem::take(&mut state.vote);
        }
        let first = block * self.options.block_threads();
        let met: Vec<u32> = (first..first + self.options.block_threads())
            .filter(|other| matches!(self.threads[*other as usize].wait, Wait::Barrier(at) if at == id))
            .collect();
        if id == 0 {
            self.order.barrier(block);
        } else {
            if met.len() == self.options.block_threads() as usize {
                self.order.barrier_of_all(block);
            }
            let numbers: Vec<u32> = met.iter().map(|other| self.order.number(block, other - first)).collect();
            let mut clock = self.order.no_clock();
            numbers.iter().for_each(|number| self.order.release_to(*number, &mut clock));
            let clock = clock.into();
            numbers.iter().for_each(|number| self.order.acquire_from(*number, &clock));
        }
        self.report.barriers += 1;
        for other in met {
            self.warps[other as usize / 32].barrier = Meeting::default();
            self.threads[other as usize].wait = Wait::Ready;
            self.threads[other as usize].is_fenced = false;
            self.wake(other);
        }
        Ok(true)
    }

    /// What the vote that has just ended said.
    pub(super) fn outcome(&self) -> bool {
        self.blocks[self.block_idx() as usize].outcome
    }

    /// The current lane comes to a collective of its warp; says whether it was the last.
    fn come(&mut self, purpose: Purpose, at: &'static Location<'static>) -> Result<bool, Box<SimtError>> {
        let thread = self.current;
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
        if warp.exchange.come < 32 {
            self.wait(Wait::Exchange);
            return Ok(false);
        }
        Ok(true)
    }

    /// The current lane's warp, all of which has come, goes on.
    fn part(&mut self) {
        let number = self.current as usize / 32;
        self.warps[number].exchange = Meeting::default();
        for lane in &mut self.threads[number * 32..][..32] {
            lane.wait = Wait::Ready;
        }
        self.warps[number].ready = u32::MAX;
        // The current lane runs, so its warp is queued.
        self.order.exchange(self.ordinal());
        self.report.exchanges += 1;
    }

    /// The current lane comes to an exchange; says whether it was the last.
    pub(super) fn exchange(
        &mut self,
        purpose: Purpose,
        value: u32,
        source: u32,
        at: &'static Location<'static>,
    ) -> Result<bool, Box<SimtError>> {
        let thread = self.current as usize;
        self.threads[thread].value = value;
        self.threads[thread].source = source % 32;
        if !self.come(purpose, at)? {
            return Ok(false);
        }
        let lanes = &mut self.threads[thread / 32 * 32..][..32];
        let values: [u32; 32] = core::array::from_fn(|lane| lanes[lane].value);
        for lane in lanes {
            lane.value = values[lane.source as usize];
        }
        self.part();
        if purpose == Purpose::WarpSync {
            self.order.warp_sync(self.ordinal());
        }
        Ok(true)
    }

    /// The current lane comes, with `words`, to a collective in which `compute` makes of all lanes' words what each
    /// gets; says whether it was the last.
    pub(super) fn collective(
        &mut self,
        purpose: Purpose,
        words: [u32; 10],
        compute: impl FnOnce(&[[u32; 10]; 32]) -> [[u32; 4]; 32],
        at: &'static Location<'static>,
    ) -> Result<bool, Box<SimtError>> {
        let thread = self.current as usize;
        self.threads[thread].words = words;
        if !self.come(purpose, at)? {
            return Ok(false);
        }
        let lanes = &mut self.threads[thread / 32 * 32..][..32];
        let made = compute(&core::array::from_fn(|lane| lanes[lane].words));
        self.report.warp_products += u64::from(matches!(purpose, Purpose::Mma | Purpose::MmaBytes));
        for (lane, made) in lanes.iter_mut().zip(made) {
            lane.words[..4].copy_from_slice(&made);
        }
        self.part();
        Ok(true)
    }

    /// What the collective that has just ended gave the current lane.
    pub(super) fn made(&self) -> [u32; 4] {
        let words = &self.threads[self.current as usize].words;
        [words[0], words[1], words[2], words[3]]
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
            Touch::Atomic | Touch::Poll | Touch::View => {}
        }
        let thread = self.ordinal();
        let judged = self.global.touch(&mut self.order, thread, address, bytes, align, touch);
        judged.map_err(|(wrong, what)| self.error(wrong, what, Some(at)))
    }

    /// The current thread touches a word of shared memory: what it was before.
    pub(super) fn shared(
        &mut self,
        word: u32,
        touch: WordTouch,
        at: &'static Location<'static>,
    ) -> Result<u32, Box<SimtError>> {
        let block = self.block_idx() as usize;
        let thread = self.ordinal();
        let judged = self.blocks[block].shared.touch(&mut self.order, thread, word, touch);
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
        self.order.acquire(self.ordinal(), word);
        self.threads[self.current as usize].is_fenced = false;
        self.settled();
    }

    /// The current thread's wait is over. Words of past waits would only wake it for nothing, and hide in a report
    /// which one it waits for now.
    pub(super) fn settled(&mut self) {
        self.threads[self.current as usize].polled.clear();
    }

    pub(super) fn release(&mut self, word: usize) {
        self.order.release(self.ordinal(), word);
    }

    /// The current thread releases to `word`, which carries nothing else any more.
    pub(super) fn release_anew(&mut self, word: usize) {
        self.order.forget(word);
        self.release(word);
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
        let (thread, block) = (self.current, self.block_idx() as usize);
        if let Wait::Phase(barrier) = self.threads[thread as usize].wait {
            // Only time woke it.
            self.blocks[block].mbarriers[barrier as usize].waiters.retain(|waiter| *waiter != thread);
        }
        let thread = &mut self.threads[thread as usize];
        thread.polled.clear();
        thread.wait = Wait::Ready;
    }
}
