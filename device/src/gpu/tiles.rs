//! Weights on their way through shared memory: the loader, which fetches them, and the tiles that bodies take.
//!
//! ```text
//! loader      wait EMPTY[b] ── write the tile's place ── arrive on FULL[b], expecting its bytes ── begin the copy
//! task warps  wait FULL[b]  ── read place and tile ── meet as a warp ── one lane arrives on EMPTY[b]
//! ```
//! The loader, a lane of a warp of its own, goes through its worker's [`DataOp`]s of the pass, across tasks and
//! operators. It waits for room, never for an event: weights depend on no activation, so they arrive while the worker
//! waits. In passing it asks the L2 cache for what bodies read from global memory ([`PrefetchOp`]): nobody waits for
//! that, and where there are no tiles it keeps to the pace at which its worker begins tasks. With nothing left to bring
//! it begins the pass again ([`DataOp::ahead`]): the next one is most often of the same program, and its first tiles
//! are there when its token is.
//!
//! # Why it neither hangs nor overwrites
//! - The `d`th tile of a launch, in all its passes, goes by barrier `d % `[`TILE_BARRIERS`], in that barrier's phase `d
//!   / `[`TILE_BARRIERS`]. Every task warp waits on every tile, in order, and releases it, whether its body reads it or
//!   not (what a body leaves, [`Tiles::drain`] takes). So each barrier's phases are seen one by one by everyone, and
//!   their parity cannot mean another.
//! - A copy starts when all tiles of the first [`DataOp::after`] compute ops have been released, which a rule of the
//!   plan makes those whose bytes or barrier it reuses, and none that comes after its own reader. So consumers, who
//!   need nothing but tiles once their events have fired, always get on, and so does the loader.
//! - The loader learns each pass from thread 0 (`STEP`, `TAKEN`), after the tiles of the pass before have all been
//!   released. What it has brought ahead are that pass's first tiles. If the pass is another program's, or none, the
//!   loader says how many they are, and all threads take and release them. A worker that faults takes the rest of its
//!   list's tiles before it tells the loader to leave, so no copy is under way when the block ends.
//! - A loader waits for its worker's pace with no tile of the pass to bring, so the worker does not wait for it. It
//!   stops when the worker's next pass begins, which it does after a fault, too.

use crate::arch::{WARP, atomic, bulk, mbarrier, memory, shared, thread, trap, warp};
use crate::gpu::sync::{Gpu, Patience};
use crate::gpu::turn::Seen;
use core::cell::Cell;
use core::hint::cold_path;
use perpetua_shared::control::NO_PROGRAM;
use perpetua_shared::data::share;
use perpetua_shared::event::reached;
#[cfg(doc)]
use perpetua_shared::launch::LaunchParams;
use perpetua_shared::launch::{PACE_PASS, TILE_BARRIERS};
use perpetua_shared::{DataOp, PrefetchOp, Step};

const FULL: u32 = 0;
const EMPTY: u32 = TILE_BARRIERS;
const STEP: u32 = 2 * TILE_BARRIERS;
const TAKEN: u32 = STEP + 1;

// Words of shared memory: four zeros, place and bytes of each barrier's tile, then the program of the pass and its
// position, then how long the first thread has waited, while it measures that, for what `Waited` names.
/// What is read where nothing is: to read elsewhere takes no longer, to choose between a number that has been read and
/// zero waits for it.
pub(super) const ZEROS: u32 = shared::KEPT;
const PLACES: u32 = ZEROS + 4;
const _: () = assert!(PLACES.is_multiple_of(2), "a tile's two words are read as one");
const PROGRAM: u32 = PLACES + 2 * TILE_BARRIERS;
const POSITION: u32 = PROGRAM + 1;
const WAITED: u32 = POSITION + 3;
// How many passes the first thread has begun, and how many of its tasks it has timed: its own, but in registers they
// would be held over all bodies.
const PASSES: u32 = WAITED + 2;
const TIMED: u32 = PASSES + 1;
// Beside a pass's program, in its word: it samples.
const SAMPLES: u32 = 1 << 30;
// Between passes, where nobody waits for tasks: how many tiles have been brought for a pass that has not come.
const IN_VAIN: u32 = WAITED + Waited::Tasks as u32;

/// What is there beyond these: barriers, and words of shared memory.
pub(super) const BARRIERS: u32 = TAKEN + 1;
pub(super) const WORDS_END: u32 = TIMED + 1;

const _: () = assert!(TAKEN < mbarrier::COUNT && WORDS_END <= shared::WORDS && TILE_BARRIERS == 32);
const _: () = assert!(ZEROS.is_multiple_of(4));

/// Makes the barriers, for `task_threads` threads that take tiles. It comes before anything else in shared memory, and
/// ends the kernel if that is not where its code takes it to be.
///
/// # Safety
/// Thread 0 of the block calls it, once, before a barrier of all its threads.
pub(crate) unsafe fn init(task_threads: u32) {
    if !shared::is_in_place() {
        trap();
    }
    // SAFETY: the caller's promise.
    unsafe {
        for number in 0..TILE_BARRIERS {
            mbarrier::init(FULL + number, 1);
            mbarrier::init(EMPTY + number, task_threads / WARP);
        }
        mbarrier::init(STEP, 1);
        mbarrier::init(TAKEN, 1);
        mbarrier::fence();
        shared::store16(ZEROS, [0; 4]);
        shared::store(PASSES, 0);
        shared::store(TIMED, 0);
    }
}

/// Waits until the phase of parity `parity` of `barrier` has ended. Nobody can go on without it, so when that takes too
/// long the grid ends with a fault recorded.
pub(super) unsafe fn wait(sync: &Gpu, barrier: u32, parity: u32) {
    let mut started = 0;
    // SAFETY: `init` has made the barrier.
    while !unsafe { mbarrier::try_wait(barrier, parity) } {
        cold_path();
        // It has waited as long as the system lets it, which nobody says: the clock is looked at each time.
        let now = thread::timer_ns();
        if started == 0 {
            started = now;
        } else if now.wrapping_sub(started) > sync.timeout_ns() {
            sync.give_up();
            trap();
        }
    }
}

/// Barrier of a launch's `d`th tile, and the parity of its phase.
fn phase(d: u32) -> (u32, u32) {
    (d % TILE_BARRIERS, (d / TILE_BARRIERS) % 2)
}

/// Where the loader finds the worker's copies.
pub(crate) trait Lists {
    /// The data ops of a program, and how many.
    fn data(&self, program: u32) -> (*const DataOp, u32);
    /// Its prefetches, likewise.
    fn prefetches(&self, program: u32) -> (*const PrefetchOp, u32);
    /// Whether to begin the pass after, once there is nothing left to bring.
    fn goes_ahead(&self) -> bool;
    /// Where binding `binding` has the part of sequence `sequence`, or lies, if it has none for each.
    fn binding(&self, binding: u32, sequence: u32) -> *const u8;
    /// Where the worker [says](LaunchParams::paces) how far it is.
    fn pace(&self) -> *mut u32;
}

/// The loader's life.
///
/// # Safety
/// One lane of a service warp calls it; the lists are those of a plan that has been judged, their sources those of
/// bindings, readable and constant.
pub(crate) unsafe fn load(lists: &impl Lists, sync: &Gpu) {
    // A worker that waits for an event in vain says so in time; its loader, which has waited for it, must not do so
    // first: it does not know which event, and to give up inside a block is to trap.
    let sync = &Gpu { patience: 4, ..*sync };
    // Passes; the program of the last one, and its tiles.
    let (mut pass, mut last) = (0u32, NO_PROGRAM);
    let mut brought = Brought::default();
    // SAFETY: see the module head.
    unsafe {
        loop {
            wait(sync, STEP, pass & 1);
            let (program, is_sampling) = told_pass();
            let (position, sequence) = (shared::load(POSITION), shared::load(POSITION + 2));
            let is_again = program == last;
            // With none nobody waits to hear it.
            if !is_again && brought.ahead > 0 {
                shared::store(IN_VAIN, brought.ahead);
            }
            mbarrier::arrive(TAKEN);
            if program == NO_PROGRAM {
                return;
            }
            pass = pass.wrapping_add(1);
            last = program;
            let ops = lists.data(program);
            brought.begin(sync, is_again, ops.1);
            let pace = pass.wrapping_mul(PACE_PASS);
            let of_pass = Pass { pace, position, sequence, is_sampling };
            brought.bring(lists, sync, ops.0, lists.prefetches(program), of_pass);
            if lists.goes_ahead() {
                brought.bring_ahead(lists, sync, ops.0);
            }
        }
    }
}

/// What prefetches have to know of a pass.
#[derive(Clone, Copy, Debug, Default)]
struct Pass {
    /// The worker's pace when it begins.
    pace: u32,
    position: u32,
    sequence: u32,
    is_sampling: bool,
}

/// Tiles that a loader has brought.
#[derive(Clone, Copy, Debug, Default)]
struct Brought {
    /// How many before this pass's.
    base: u32,
    /// The pass's.
    n: u32,
    /// The pass's that the loader has seen released.
    freed: u32,
    /// Those of the pass after.
    ahead: u32,
}

impl Brought {
    /// Sees all of the last pass's tiles released, and what was brought ahead in vain; a pass of `n` tiles begins.
    ///
    /// # Safety
    /// As [`load`].
    unsafe fn begin(&mut self, sync: &Gpu, is_again: bool, n: u32) {
        let before = if is_again { self.n } else { self.n + self.ahead };
        // SAFETY: the caller's promise.
        unsafe { self.free(sync, before) };
        self.base = self.base.wrapping_add(before);
        (self.n, self.freed) = (n, 0);
        if !is_again {
            self.ahead = 0;
        }
    }

    /// Waits until so many of the pass's tiles have been released.
    ///
    /// # Safety
    /// As [`load`].
    unsafe fn free(&mut self, sync: &Gpu, n: u32) {
        while self.freed < n {
            let (barrier, parity) = phase(self.base.wrapping_add(self.freed));
            // SAFETY: the caller's promise.
            unsafe { wait(sync, EMPTY + barrier, parity) };
            self.freed += 1;
        }
    }

    /// Brings the pass's tiles, `ops`, but for those that have been, and asks for what stands between them in
    /// `prefetches`.
    ///
    /// # Safety
    /// As [`load`]; `ops` are `n` data ops of one list, one after the other.
    unsafe fn bring(
        &mut self,
        lists: &impl Lists,
        sync: &Gpu,
        ops: *const DataOp,
        (prefetches, n_prefetches): (*const PrefetchOp, u32),
        pass: Pass,
    ) {
        // Prefetches before this one have been issued.
        let mut issued = 0;
        // SAFETY: see the module head; `at < n` in every list, which nobody writes.
        unsafe {
            for at in self.ahead..=self.n {
                while issued < n_prefetches {
                    let op = prefetches.add(issued as usize);
                    if memory::load(&raw const (*op).before) > at {
                        break;
                    }
                    let after = memory::load(&raw const (*op).after);
                    if after > 0 && !keep_pace(lists, sync, pass.pace, after) {
                        issued = n_prefetches;
                        break;
                    }
                    if pass.is_sampling || memory::load(&raw const (*op).only_when_sampling) == 0 {
                        prefetch(op, lists, [pass.position, pass.sequence]);
                    }
                    issued += 1;
                }
                if at == self.n {
                    break;
                }
                let op = ops.add(at as usize);
                let after = memory::load(&raw const (*op).after);
                while self.freed < at && memory::load(&raw const (*ops.add(self.freed as usize)).used_by) < after {
                    self.free(sync, self.freed + 1);
                }
                copy(lists, op, self.base.wrapping_add(at));
            }
        }
        self.ahead = 0;
    }

    /// Brings what may be brought of `ops` for the next pass.
    ///
    /// # Safety
    /// As [`bring`](Brought::bring).
    unsafe fn bring_ahead(&mut self, lists: &impl Lists, sync: &Gpu, ops: *const DataOp) {
        // SAFETY: see `bring`. A copy's bytes and barrier are those of no tile among the last ones that may be unread.
        unsafe {
            while self.ahead < self.n {
                let op = ops.add(self.ahead as usize);
                let ahead = u32::from(memory::load(&raw const (*op).ahead));
                if ahead == 0 {
                    return;
                }
                self.free(sync, (self.n + 1).saturating_sub(ahead));
                copy(lists, op, self.base.wrapping_add(self.n + self.ahead));
                self.ahead += 1;
            }
        }
    }
}

/// Begins the copy `op`, the launch's `number`th tile.
///
/// # Safety
/// As [`load`]; there is room for it.
unsafe fn copy(lists: &impl Lists, op: *const DataOp, number: u32) {
    // SAFETY: the caller's promise.
    unsafe {
        let source = lists.binding(memory::load(&raw const (*op).source), 0);
        let source = source.add(memory::load(&raw const (*op).source_offset_bytes) as usize);
        let bytes = memory::load(&raw const (*op).bytes);
        let to = memory::load(&raw const (*op).dest_offset_bytes);
        let (barrier, _) = phase(number);
        shared::store(PLACES + 2 * barrier, to);
        shared::store(PLACES + 2 * barrier + 1, bytes);
        mbarrier::arrive_expect(FULL + barrier, bytes);
        bulk::copy(to, source, bytes, FULL + barrier);
    }
}

/// Brings the tiles of one task, of a launch that has no other: `n` data ops, `ops`, one after the other in their
/// worker's list.
///
/// # Safety
/// As [`load`], but for the pass, of which nobody is told.
pub(crate) unsafe fn load_task(lists: &impl Lists, sync: &Gpu, (ops, n): (*const DataOp, u32)) {
    let mut brought = Brought { n, ..Brought::default() };
    // SAFETY: the caller's promise. What an op waits for are tiles of its own task, or of one whose bytes nobody here
    // has.
    unsafe { brought.bring(lists, sync, ops, (core::ptr::null(), 0), Pass::default()) };
}

/// Says to others of the block that the pass is one of `program`, or, with [`NO_PROGRAM`], that there is none.
///
/// # Safety
/// One thread calls it, before a barrier that is between it and whoever [asks](told).
pub(crate) unsafe fn tell(program: u32) {
    // SAFETY: the caller's promise.
    unsafe { shared::store(PROGRAM, program) };
}

/// What [`tell`] has said.
///
/// # Safety
/// Called after that barrier, or by the one thread.
pub(crate) unsafe fn told() -> u32 {
    // SAFETY: the caller's promise.
    unsafe { shared::load(PROGRAM) }
}

/// The program of a pass that has been told of, and whether it samples.
///
/// # Safety
/// As [`told`].
unsafe fn told_pass() -> (u32, bool) {
    // SAFETY: the caller's promise.
    let found = unsafe { told() };
    (if found == NO_PROGRAM { found } else { found & !SAMPLES }, found & SAMPLES > 0)
}

/// Waits until the worker has come to its `after`th task in the pass at whose begin its pace was `pace`. With no end to
/// that the grid ends with a fault recorded.
///
/// Whether it is worth asking for more: no, once the pass is over.
///
/// # Safety
/// As [`load`].
unsafe fn keep_pace(lists: &impl Lists, sync: &Gpu, pace: u32, after: u32) -> bool {
    let mut patience = Patience::default();
    loop {
        // SAFETY: a word of the launch's, of which this is the one reader and thread 0 the one writer.
        let found = unsafe { atomic::load_relaxed(lists.pace()) };
        if reached(found, pace.wrapping_add(after)) {
            atomic::settled();
            return !reached(found, pace.wrapping_add(PACE_PASS));
        }
        let too_long = || {
            sync.give_up();
            trap();
        };
        if patience.ends(sync, too_long) {
            // The worker takes leave.
            return false;
        }
    }
}

/// Says how far the worker is: at the begin of a pass, `pass` of the launch from 1 on, or that it has begun a task.
///
/// # Safety
/// Thread 0 of the block calls it; before it tells the loader of the pass.
pub(crate) unsafe fn set_pace(lists: &impl Lists, pass: u32) {
    // SAFETY: see `keep_pace`.
    unsafe { atomic::store_relaxed(lists.pace(), pass.wrapping_mul(PACE_PASS)) };
}

/// The worker has come to a task, whether it is going to run it or not.
///
/// # Safety
/// Thread 0 of the block calls it.
pub(crate) unsafe fn step_on(lists: &impl Lists) {
    // SAFETY: see `keep_pace`.
    // PERF: not `fetch_add`, whose result would be waited for before the next task's record is asked for.
    unsafe { atomic::add_relaxed(lists.pace(), 1) };
}

/// Asks the L2 cache for what `op` names in a pass of `sequence` at `position`.
///
/// # Safety
/// As [`load`].
unsafe fn prefetch(op: *const PrefetchOp, lists: &impl Lists, [position, sequence]: [u32; 2]) {
    // SAFETY: the op is one of a judged plan: what it names lies in its binding, on multiples of sixteen bytes;
    // positions before the pass's, which the cache holds, do too.
    unsafe {
        let source = lists.binding(memory::load(&raw const (*op).source), sequence);
        let source = source.add(memory::load(&raw const (*op).source_offset_bytes) as usize);
        let (bytes, apart) = (memory::load(&raw const (*op).bytes), memory::load(&raw const (*op).apart_bytes));
        let (mut at, mut end) = (0, memory::load(&raw const (*op).stretches));
        let splits = memory::load(&raw const (*op).splits);
        if splits > 0 {
            let (window, split) = (memory::load(&raw const (*op).window), memory::load(&raw const (*op).split));
            let (from, to) = share(position + 1, window, splits, split);
            let to = if to < position { to } else { position };
            let held = if to < end { to } else { end };
            let most = memory::load(&raw const (*op).most);
            (at, end) = (from, if from < held && most < held - from { from + most } else { held });
        }
        // What lies together is one stretch.
        let (mut from, mut bytes) = (source.wrapping_add(at as usize * apart as usize), bytes);
        if at < end && bytes == apart {
            (at, bytes) = (end - 1, (end - at) * bytes);
        }
        while at < end {
            prefetch_bytes(from, bytes);
            from = from.wrapping_add(apart as usize);
            at += 1;
        }
    }
}

/// A tile that has arrived.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tile {
    /// Its first byte in [`bulk`]'s memory.
    pub(crate) at: u32,
    /// How many there are.
    pub(crate) bytes: u32,
    barrier: u32,
}

impl Tile {
    /// No tile: it has no bytes.
    pub(crate) const NONE: Tile = Tile { at: 0, bytes: 0, barrier: 0 };
}

/// What a task waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waited {
    /// Tiles that have not arrived.
    Tiles,
    /// Other tasks.
    Tasks,
}

/// What a thread that runs tasks knows of its worker's tiles.
#[derive(Debug)]
pub(crate) struct Tiles<'a> {
    sync: &'a Gpu,
    /// The calling thread's index.
    thread: u32,
    /// The launch's next tile, and those with which the pass and the task end.
    next: Cell<u32>,
    pass_end: Cell<u32>,
    task_end: Cell<u32>,
    /// Whether this thread measures its waits.
    is_timed: Cell<bool>,
}

impl<'a> Tiles<'a> {
    pub(crate) fn new(sync: &'a Gpu, thread: u32) -> Tiles<'a> {
        let zero = || Cell::new(0);
        Tiles { sync, thread, next: zero(), pass_end: zero(), task_end: zero(), is_timed: Cell::new(false) }
    }

    /// The pass has `n` tiles more.
    pub(crate) fn expect(&self, n: u32) {
        self.pass_end.set(self.pass_end.get().wrapping_add(n));
    }

    /// The pass `step` begins, whose list has `n` tiles; or, with [`NO_PROGRAM`], none will. Tiles for another are
    /// taken and released.
    ///
    /// # Safety
    /// Every thread of the block's tasks makes this same call, with no tile of the pass before left, and a
    /// [loader](load) is there.
    pub(crate) unsafe fn begin(&self, step: &Step, n: u32, is_first_thread: bool) {
        let mut are_in_vain = false;
        // SAFETY: one thread of the block; the loader reads and writes the words between the two barriers' phases.
        unsafe {
            if is_first_thread {
                let pass = self.passes();
                shared::store(PASSES, pass.wrapping_add(1));
                shared::store(IN_VAIN, 0);
                let mut is_other = false;
                if pass > 0 {
                    wait(self.sync, TAKEN, pass.wrapping_sub(1) & 1);
                    is_other = told_pass().0 != step.program;
                }
                tell(step.program | if step.sampling > 0 { SAMPLES } else { 0 });
                shared::store(POSITION, step.first_pos);
                shared::store(POSITION + 1, step.rows);
                shared::store(POSITION + 2, step.sequence);
                mbarrier::arrive(STEP);
                if is_other {
                    wait(self.sync, TAKEN, pass & 1);
                    are_in_vain = shared::load(IN_VAIN) > 0;
                }
            }
            if thread::sync_or(are_in_vain) {
                let in_vain = shared::load(IN_VAIN);
                self.expect(in_vain);
                self.begin_task(in_vain);
                self.drain();
            }
            self.expect(n);
        }
    }

    /// How many passes the block's first thread has begun; it alone asks.
    pub(crate) fn passes(&self) -> u32 {
        // SAFETY: a word of one thread alone, which `init` has written.
        unsafe { shared::load(PASSES) }
    }

    /// What there is to see of the pass, from the block's first barrier in it on.
    pub(crate) fn pass(&self) -> Seen {
        // SAFETY: written by `begin` before that barrier, and next after the pass's last.
        let [first_pos, rows, sequence] = unsafe { shared::constant(POSITION) };
        Seen { first_pos, rows, sequence }
    }

    /// The words its worker shares with the others.
    pub(crate) fn sync(&self) -> &Gpu {
        self.sync
    }

    /// The next task has `n` of them.
    pub(crate) fn begin_task(&self, n: u32) {
        self.task_end.set(self.next.get().wrapping_add(n));
    }

    /// How many tasks the block's first thread has [timed](Tiles::time) to their ends; it alone asks.
    pub(crate) fn n_timed(&self) -> u32 {
        // SAFETY: a word of one thread alone, which `init` has written.
        unsafe { shared::load(TIMED) }
    }

    /// A task has been timed to its end.
    pub(crate) fn has_timed(&self) {
        // SAFETY: see `n_timed`.
        unsafe { shared::store(TIMED, shared::load(TIMED) + 1) };
    }

    /// Measures this thread's waits from now on, or no longer: that of the block's first alone.
    pub(crate) fn time(&self, is_timed: bool) {
        self.is_timed.set(is_timed);
        if is_timed {
            cold_path();
            // SAFETY: words of one thread alone.
            unsafe {
                shared::store(WAITED + Waited::Tiles as u32, 0);
                shared::store(WAITED + Waited::Tasks as u32, 0);
            }
        }
    }

    /// Whether this thread measures its waits.
    pub(crate) fn is_timed(&self) -> bool {
        self.is_timed.get()
    }

    /// The time, for [`waited`](Tiles::waited), if this thread measures its waits; else 0.
    // The two ends of a wait and no closure between, which the compiler would not always take for part of its caller.
    pub(crate) fn now_ns(&self) -> u64 {
        if self.is_timed() {
            cold_path();
            thread::timer_ns()
        } else {
            0
        }
    }

    /// This thread has waited for `what` since `began_ns`.
    pub(crate) fn waited(&self, what: Waited, began_ns: u64) {
        if began_ns != 0 {
            cold_path();
            let ns = (thread::timer_ns() - began_ns) as u32;
            // SAFETY: a word of one thread alone.
            unsafe { shared::store(WAITED + what as u32, shared::load(WAITED + what as u32).wrapping_add(ns)) };
        }
    }

    /// How long this thread, which [measures](Tiles::time) it, has waited for `what`.
    pub(crate) fn waited_ns(&self, what: Waited) -> u32 {
        // SAFETY: a word of one thread alone.
        unsafe { shared::load(WAITED + what as u32) }
    }

    /// Whether a body may use the tiles' memory for itself: the pass has no more tiles for it.
    pub(crate) fn is_free(&self) -> bool {
        self.next.get() == self.pass_end.get()
    }

    /// How many tiles the task has left.
    pub(crate) fn left(&self) -> u32 {
        self.task_end.get().wrapping_sub(self.next.get())
    }

    /// The task's next tile, once it is there; [`left`](Tiles::left) says that there is one.
    ///
    /// # Safety
    /// Every lane of every warp that runs tasks makes this same call, and [`release`](Tiles::release)s what it got.
    pub(crate) unsafe fn take(&self) -> Tile {
        let (barrier, parity) = phase(self.next.get());
        self.next.set(self.next.get().wrapping_add(1));
        // SAFETY: the loader has made the barriers, and wrote the place before it arrived.
        unsafe {
            // PERF: most are there, and then this is all that there is to ask.
            if !mbarrier::test_wait(FULL + barrier, parity) {
                cold_path();
                let began_ns = self.now_ns();
                wait(self.sync, FULL + barrier, parity);
                self.waited(Waited::Tiles, began_ns);
            }
            let [at, bytes] = shared::load8(PLACES + 2 * barrier);
            Tile { at, bytes, barrier }
        }
    }

    /// Gives `tile`'s bytes back: the warp has read what it wanted.
    ///
    /// # Safety
    /// As [`take`](Tiles::take).
    pub(crate) unsafe fn release(&self, tile: Tile) {
        // SAFETY: the caller's promise. The warp's reads are before the one lane's arrival.
        unsafe {
            warp::sync();
            // Found out anew: it would be held over all bodies.
            if memory::opaque_word(self.thread).is_multiple_of(WARP) {
                mbarrier::arrive(EMPTY + tile.barrier);
            }
        }
    }

    /// The number, in the launch, of the tile that [`take`](Tiles::take) takes next.
    pub(crate) fn next(&self) -> u32 {
        self.next.get()
    }

    /// Gives back the bytes of the tiles numbered from `first` on, `n` of them, at most 32: the warp has read what it
    /// wanted.
    ///
    /// # Safety
    /// As [`take`](Tiles::take), of each; none has been released.
    pub(crate) unsafe fn release_some(&self, first: u32, n: u32) {
        let lane = memory::opaque_word(self.thread) % WARP;
        // SAFETY: the caller's promise. The warp's reads are before the lanes' arrivals, one on each tile's barrier.
        unsafe {
            warp::sync();
            if lane < n {
                mbarrier::arrive(EMPTY + phase(first.wrapping_add(lane)).0);
            }
        }
    }

    /// Takes and releases what the body has left of the task's tiles.
    ///
    /// # Safety
    /// As [`take`](Tiles::take).
    pub(crate) unsafe fn drain(&self) {
        while self.left() > 0 {
            // SAFETY: the caller's promise.
            unsafe { self.release(self.take()) };
        }
    }

    /// The worker leaves: takes what is left of the list, and tells the loader.
    ///
    /// # Safety
    /// As [`take`](Tiles::take).
    pub(crate) unsafe fn leave(&self, is_first_thread: bool) {
        self.task_end.set(self.pass_end.get());
        // SAFETY: the caller's promise.
        unsafe {
            self.drain();
            self.begin(&Step { program: NO_PROGRAM, ..Step::default() }, 0, is_first_thread);
        }
    }
}

/// Asks the L2 cache for `bytes` bytes, a multiple of 16, as many as there are.
///
/// # Safety
/// As [`bulk::prefetch`].
pub(crate) unsafe fn prefetch_bytes(from: *const u8, bytes: u32) {
    let mut asked = 0;
    while asked < bytes {
        let part = if bytes - asked < bulk::MOST_PREFETCHED { bytes - asked } else { bulk::MOST_PREFETCHED };
        // SAFETY: the caller's promise.
        unsafe { bulk::prefetch(from.add(asked as usize), part) };
        asked += part;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::LaunchBlock;
    use crate::arch::simt::{Access, Allocation, Options, launch};
    use core::cell::RefCell;
    use perpetua_shared::Fault;

    /// A pass whose worker has tasks, but no tiles.
    struct Paced<'a> {
        ops: &'a [PrefetchOp],
        pace: *mut u32,
        weights: *const u8,
        /// What the worker's pace was whenever something was asked for, and of which sequence.
        seen: &'a RefCell<Vec<(u32, u32)>>,
    }

    impl Lists for Paced<'_> {
        fn data(&self, _: u32) -> (*const DataOp, u32) {
            (core::ptr::null(), 0)
        }

        fn prefetches(&self, _: u32) -> (*const PrefetchOp, u32) {
            (self.ops.as_ptr(), self.ops.len() as u32)
        }

        fn goes_ahead(&self) -> bool {
            true
        }

        fn binding(&self, _: u32, sequence: u32) -> *const u8 {
            // SAFETY: all simulated threads are on this one.
            self.seen.borrow_mut().push((unsafe { self.pace.read() }, sequence));
            self.weights
        }

        fn pace(&self) -> *mut u32 {
            self.pace
        }
    }

    /// Two passes of three tasks, in the second of which the worker leaves after its first. Only the first samples.
    #[test]
    fn a_loader_without_tiles_keeps_its_workers_pace() {
        let op = |(after, only_when_sampling)| PrefetchOp {
            bytes: 16,
            apart_bytes: 32,
            stretches: 2,
            after,
            only_when_sampling,
            ..PrefetchOp::default()
        };
        let ops = [(0, 0), (0, 1), (1, 0), (1, 1), (3, 0)].map(op);
        let mut n_late = 0;
        for seed in 0..200 {
            let (mut pace, weights, seen) = (77u32, [0u128; 3], RefCell::new(Vec::new()));
            let mut fault = Fault::default();
            // SAFETY: all outlive the launch, which alone touches them meanwhile.
            let allocations = unsafe {
                vec![
                    Allocation::new("pace", (&raw mut pace).cast(), 4, Access::Atomic),
                    Allocation::new("fault", (&raw mut fault).cast(), size_of::<Fault>(), Access::Written),
                    Allocation::new("weights", weights.as_ptr().cast_mut().cast(), 48, Access::Constant),
                    Allocation::new("ops", ops.as_ptr().cast_mut().cast(), size_of_val(&ops), Access::Constant),
                ]
            };
            let params = Gpu::params_alone(&raw mut fault);
            // SAFETY: a launch without events, which outlives it.
            let gpu = Gpu::new(unsafe { LaunchBlock::new(&params) });
            let lists = Paced { ops: &ops, pace: &raw mut pace, weights: weights.as_ptr().cast(), seen: &seen };
            let options = Options { service_warps: 1, tile_bytes: 128, ..Options::new(1, 32, seed) };
            let launched = launch(&options, allocations, || {
                let me = thread::thread_idx();
                // SAFETY: one thread makes the barriers, one loads, one tells it how far the worker is.
                unsafe {
                    if me == 0 {
                        init(32);
                    }
                    thread::sync_some(1, 64);
                    if me >= 32 {
                        if me == 32 {
                            load(&lists, &gpu);
                        }
                        return;
                    }
                    let tiles = Tiles::new(&gpu, me);
                    for (pass, n_tasks) in [(1, 3), (2, 1), (3, 0)] {
                        let program = if n_tasks > 0 { 0 } else { NO_PROGRAM };
                        if me == 0 {
                            assert_eq!(tiles.passes() + 1, pass);
                            set_pace(&lists, pass);
                        }
                        let sampling = u32::from(pass == 1);
                        tiles.begin(&Step { program, sampling, sequence: 10 * pass, ..Step::default() }, 0, me == 0);
                        for _ in 0..n_tasks {
                            if me == 0 {
                                step_on(&lists);
                            }
                            (0..80).for_each(|_| thread::sync());
                        }
                    }
                }
            });
            launched.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            let (seen, mut at) = (seen.into_inner(), 0);
            for pass in [1, 2] {
                let is_for = |op: &&PrefetchOp| pass == 1 || op.only_when_sampling == 0;
                for op in ops.iter().filter(is_for) {
                    // What waits for nothing is asked for in any case; the rest, in order, until the pass is over.
                    let is_asked =
                        seen.get(at).is_some_and(|(pace, _)| op.after == 0 || *pace < (pass + 1) * PACE_PASS);
                    assert!(is_asked || op.after > 0, "seed {seed}: {seen:x?}");
                    if !is_asked {
                        break;
                    }
                    let (pace, sequence) = seen[at];
                    assert!(pace >= pass * PACE_PASS + op.after, "seed {seed}: {seen:x?}");
                    assert_eq!(sequence, 10 * pass, "seed {seed}: the part of another sequence");
                    n_late += usize::from(op.after == 3);
                    assert!(op.after < 3 || pass == 1, "the worker has left before its third task");
                    at += 1;
                }
            }
            assert_eq!(at, seen.len(), "seed {seed}: {seen:x?}");
        }
        assert!(n_late > 20, "{n_late} of 200 loaders were in time for the last task");
    }

    /// More than an instruction has room for is asked for by several: positions that lie together, and rows as long.
    #[test]
    fn much_is_asked_for_by_parts() {
        const BYTES: usize = 3 << 20;
        let (weights, mut pace, seen) = (vec![0u128; BYTES / 16], 0, RefCell::new(Vec::new()));
        let whole = PrefetchOp { bytes: 16, apart_bytes: 16, stretches: (BYTES / 16) as u32, ..PrefetchOp::default() };
        let of_positions = PrefetchOp { splits: 1, most: u32::MAX, window: u32::MAX, ..whole };
        let rows = PrefetchOp { bytes: 1 << 20, apart_bytes: 2 << 20, stretches: 2, ..whole };
        let ops = [whole, of_positions, rows];
        // SAFETY: both outlive the launch.
        let allocations = unsafe {
            vec![
                Allocation::new("weights", weights.as_ptr().cast_mut().cast(), BYTES, Access::Constant),
                Allocation::new("ops", ops.as_ptr().cast_mut().cast(), size_of_val(&ops), Access::Constant),
            ]
        };
        let lists = Paced { ops: &ops, pace: &raw mut pace, weights: weights.as_ptr().cast(), seen: &seen };
        let launched = launch(&Options::new(1, 32, 0), allocations, || {
            if thread::thread_idx() == 0 {
                // SAFETY: what is asked for lies in the weights.
                ops.iter().for_each(|op| unsafe { prefetch(op, &lists, [BYTES as u32 / 16, 0]) });
            }
        });
        launched.unwrap_or_else(|error| panic!("{error}"));
    }
}
