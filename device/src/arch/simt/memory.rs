//! Global and shared memory as the simulator sees them: what may be touched at all, who touched what last, and which
//! accesses are ordered.
//!
//! Happens-before is tracked as FastTrack does (Flanagan and Freund 2009), with the GPU's hierarchy in place of one clock
//! a thread. A block has a counter, its *time*, that steps at every barrier, release and warp collective; an access is
//! the pair (thread, time of its block). It is ordered before a thread's next access when that thread
//! - is the same one, or
//! - is of the same block, which has been at a barrier since, or
//! - is of a block that has *seen* that time: a release by the one and an acquire by the other carried it over, and a
//!   barrier on each side carried it to and from the other threads, or
//! - (reads before a write only) is a lane of the same warp, which has exchanged values since. A shuffle orders no
//!   memory; but a value that went into one has been read.
//!
//! The unit is two bytes, the smallest element bodies write.

use super::error::Wrong;
use std::collections::HashMap;

/// How a launch may use an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read only, by everyone at any time: weights, the image.
    Constant,
    /// Read and written; it holds something from the start.
    Written,
    /// Read and written; until it is written it holds nothing.
    Unwritten,
    /// Words that are only touched atomically.
    Atomic,
}

/// Memory a launch may touch.
#[derive(Debug)]
pub struct Allocation {
    pub(super) name: String,
    pub(super) base: usize,
    pub(super) bytes: usize,
    pub(super) access: Access,
    /// A page of cells for every [`PAGE`] of them, made when first touched.
    pages: Vec<Option<Box<[Cell]>>>,
}

impl Allocation {
    /// The `bytes` bytes at `base`.
    ///
    /// # Safety
    /// They are there, for writing too unless `access` is [`Access::Constant`], and during the launch nobody else
    /// touches them but atomically, or writes them if `access` is [`Access::Constant`].
    pub unsafe fn new(name: impl Into<String>, base: *mut u8, bytes: usize, access: Access) -> Allocation {
        let cells = if matches!(access, Access::Written | Access::Unwritten) { bytes.div_ceil(UNIT) } else { 0 };
        let pages = (0..cells.div_ceil(PAGE)).map(|_| None).collect();
        Allocation { name: name.into(), base: base.expose_provenance(), bytes, access, pages }
    }
}

const UNIT: usize = 2;
const PAGE: usize = 1024;

/// A thread at a time of its block. Time 0: never.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Epoch {
    who: u32,
    time: u32,
}

/// Who touched two bytes last.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cell {
    write: Epoch,
    /// Of a thread; or of several, see the marks.
    read: Epoch,
}

// Marks on `Epoch::who` of a read: several lanes of the warp, several threads of the block (of which `who` is one), or
// several blocks, whose reads are in `Readers`.
const LANES: u32 = 1 << 30;
const THREADS: u32 = 2 << 30;
const BLOCKS: u32 = 3 << 30;
const MARK: u32 = 3 << 30;

/// Times of all blocks, and of single threads beyond them.
#[derive(Clone, Debug, Default)]
pub(super) struct Clock {
    blocks: Vec<u32>,
    /// Sorted by thread.
    threads: Vec<(u32, u32)>,
}

impl Clock {
    pub(super) fn new(blocks: u32) -> Clock {
        Clock { blocks: vec![0; blocks as usize], threads: Vec::new() }
    }

    pub(super) fn join(&mut self, other: &Clock, threads: u32) {
        for (mine, theirs) in self.blocks.iter_mut().zip(&other.blocks) {
            *mine = (*mine).max(*theirs);
        }
        for &(thread, time) in &other.threads {
            self.add(thread, time);
        }
        let blocks = &self.blocks;
        self.threads.retain(|(thread, time)| *time > blocks[(thread / threads) as usize]);
    }

    fn add(&mut self, thread: u32, time: u32) {
        match self.threads.binary_search_by_key(&thread, |(known, _)| *known) {
            Ok(at) => self.threads[at].1 = self.threads[at].1.max(time),
            Err(at) => self.threads.insert(at, (thread, time)),
        }
    }

    fn thread(&self, thread: u32) -> u32 {
        self.threads.binary_search_by_key(&thread, |(known, _)| *known).map_or(0, |at| self.threads[at].1)
    }
}

/// What one block knows of the order of things.
#[derive(Debug)]
pub(super) struct BlockTime {
    now: u32,
    /// `now` when its last barrier ended: everything of its own before that is ordered.
    barrier: u32,
    /// The same for the last exchange of each warp.
    warps: Vec<u32>,
    /// What it has seen of the others.
    seen: Clock,
}

/// The order of all accesses.
#[derive(Debug)]
pub(super) struct Order {
    /// Threads of a block.
    threads: u32,
    blocks: Vec<BlockTime>,
    /// What each thread has acquired since its block's last barrier.
    acquired: Vec<Option<Box<Clock>>>,
    /// What the last releases to each word carry.
    released: HashMap<usize, Clock>,
    /// Reads by several blocks, per block.
    readers: Vec<Vec<Epoch>>,
    free_readers: Vec<u32>,
}

impl Order {
    pub(super) fn new(blocks: u32, threads: u32) -> Order {
        let block =
            || BlockTime { now: 1, barrier: 0, warps: vec![0; threads as usize / 32], seen: Clock::new(blocks) };
        Order {
            threads,
            blocks: (0..blocks).map(|_| block()).collect(),
            acquired: (0..blocks * threads).map(|_| None).collect(),
            released: HashMap::new(),
            readers: Vec::new(),
            free_readers: Vec::new(),
        }
    }

    fn step(&mut self, block: u32) -> u32 {
        let now = &mut self.blocks[block as usize].now;
        *now = now.checked_add(1).expect("a launch has fewer than 2^32 collectives a block");
        *now
    }

    /// All threads of `block` have met.
    pub(super) fn barrier(&mut self, block: u32) {
        let now = self.step(block);
        let time = &mut self.blocks[block as usize];
        time.barrier = now;
        let first = (block * self.threads) as usize;
        for slot in &mut self.acquired[first..first + self.threads as usize] {
            if let Some(clock) = slot.take() {
                time.seen.join(&clock, self.threads);
            }
        }
    }

    /// All lanes of warp `warp` of `block` have exchanged values.
    pub(super) fn exchange(&mut self, block: u32, warp: u32) {
        let now = self.step(block);
        self.blocks[block as usize].warps[warp as usize] = now;
    }

    /// `thread` releases to the word at `address`.
    pub(super) fn release(&mut self, thread: u32, address: usize) {
        let block = thread / self.threads;
        let n_blocks = self.blocks.len() as u32;
        let time = &self.blocks[block as usize];
        let clock = self.released.entry(address).or_insert_with(|| Clock::new(n_blocks));
        clock.join(&time.seen, self.threads);
        if let Some(acquired) = &self.acquired[thread as usize] {
            clock.join(acquired, self.threads);
        }
        // What the block's other threads did before its last barrier, and all this one did.
        let own = &mut clock.blocks[block as usize];
        *own = (*own).max(time.barrier);
        clock.add(thread, time.now + 1);
        self.step(block);
    }

    /// `thread` acquires from the word at `address`.
    pub(super) fn acquire(&mut self, thread: u32, address: usize) {
        let Some(clock) = self.released.get(&address) else { return };
        let n_blocks = self.blocks.len() as u32;
        let slot = &mut self.acquired[thread as usize];
        slot.get_or_insert_with(|| Box::new(Clock::new(n_blocks))).join(clock, self.threads);
    }

    /// Whether `thread` has seen what thread `who` did at `time`.
    #[inline]
    fn is_seen(&self, thread: u32, who: u32, time: u32) -> bool {
        if who == thread {
            return true;
        }
        let (block, other) = (thread / self.threads, who / self.threads);
        let mine = &self.blocks[block as usize];
        if if block == other { time < mine.barrier } else { time < mine.seen.blocks[other as usize] } {
            return true;
        }
        if time < mine.seen.thread(who) {
            return true;
        }
        match &self.acquired[thread as usize] {
            Some(clock) => time < clock.blocks[other as usize] || time < clock.thread(who),
            None => false,
        }
    }

    /// Whether what `read` stands for is ordered before a write by `thread`.
    #[inline]
    fn is_read_seen(&self, thread: u32, read: Epoch) -> bool {
        let who = read.who & !MARK;
        match read.who & MARK {
            0 if self.is_seen(thread, who, read.time) => return true,
            0 => {}
            BLOCKS => {
                return self.readers[who as usize]
                    .iter()
                    .all(|read| read.time == 0 || self.is_read_seen(thread, *read));
            }
            // Any of several: ordered if another thread's would be. `who` may be `thread` itself.
            _ => {
                let (block, other) = (thread / self.threads, who / self.threads);
                let mine = &self.blocks[block as usize];
                let seen = if block == other { mine.barrier } else { mine.seen.blocks[other as usize] };
                let acquired = self.acquired[thread as usize].as_ref().map_or(0, |clock| clock.blocks[other as usize]);
                if read.time < seen.max(acquired) {
                    return true;
                }
            }
        }
        let same_warp = who / 32 == thread / 32 && read.who & MARK != THREADS;
        same_warp
            && read.time < self.blocks[(thread / self.threads) as usize].warps[(thread % self.threads / 32) as usize]
    }

    /// The first of the readers at `at` whose read is not ordered before a write by `thread`.
    #[inline(never)]
    fn unseen_reader(&self, thread: u32, at: u32) -> Option<u32> {
        let mut readers = self.readers[at as usize].iter();
        readers.find(|read| read.time != 0 && !self.is_read_seen(thread, **read)).map(|read| read.who & !MARK)
    }

    /// What stands for `read` and a read by `thread` now, both of one block.
    fn merged(&self, thread: u32, read: Epoch) -> Epoch {
        let time = self.blocks[(thread / self.threads) as usize].now;
        if read.time == 0 || self.is_read_seen(thread, read) {
            return Epoch { who: thread, time };
        }
        let same_warp = (read.who & !MARK) / 32 == thread / 32 && read.who & MARK != THREADS;
        Epoch { who: thread | if same_warp { LANES } else { THREADS }, time }
    }

    /// Judges and records one access to `cell`; on an error says by whom the other access was.
    #[inline]
    fn touch(&mut self, cell: &mut Cell, thread: u32, is_write: bool) -> Result<(), (&'static str, u32)> {
        let block = thread / self.threads;
        let now = self.blocks[block as usize].now;
        if cell.write.time != 0 && !self.is_seen(thread, cell.write.who, cell.write.time) {
            return Err(("written", cell.write.who));
        }
        let read = cell.read;
        if is_write {
            if read.time != 0 {
                if !self.is_read_seen(thread, read) {
                    let culprit = match read.who & MARK {
                        BLOCKS => self.unseen_reader(thread, read.who & !MARK).unwrap_or_default(),
                        _ => read.who & !MARK,
                    };
                    return Err(("read", culprit));
                }
                if read.who & MARK == BLOCKS {
                    self.free_readers.push(read.who & !MARK);
                }
            }
            *cell = Cell { write: Epoch { who: thread, time: now }, read: Epoch::default() };
        } else if read.who == thread {
            cell.read.time = now;
        } else if read.who & MARK == BLOCKS {
            let at = (read.who & !MARK) as usize;
            self.readers[at][block as usize] = self.merged(thread, self.readers[at][block as usize]);
        } else if read.time == 0 || (read.who & !MARK) / self.threads == block || self.is_read_seen(thread, read) {
            cell.read = self.merged(thread, read);
        } else {
            let at = self.free_readers.pop().unwrap_or_else(|| {
                self.readers.push(Vec::new());
                self.readers.len() as u32 - 1
            });
            let mut readers = vec![Epoch::default(); self.blocks.len()];
            readers[((read.who & !MARK) / self.threads) as usize] = read;
            readers[block as usize] = Epoch { who: thread, time: now };
            self.readers[at as usize] = readers;
            cell.read = Epoch { who: at | BLOCKS, time: now };
        }
        Ok(())
    }

    fn describe(&self, thread: u32) -> String {
        format!("thread {} of block {}", thread % self.threads, thread / self.threads)
    }
}

/// Global memory: the allocations, by address.
#[derive(Debug)]
pub(super) struct Global {
    allocations: Vec<Allocation>,
    /// The one found last.
    last: usize,
}

/// What an access does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Touch {
    Read,
    Write,
    Atomic,
    /// A look at constant memory, as a slice.
    View,
}

impl Global {
    pub(super) fn new(mut allocations: Vec<Allocation>) -> Global {
        allocations.retain(|a| a.bytes > 0);
        allocations.sort_by_key(|a| (a.base, a.bytes));
        for pair in allocations.windows(2) {
            let constant = pair.iter().all(|a| a.access == Access::Constant);
            assert!(
                constant || pair[0].base + pair[0].bytes <= pair[1].base,
                "{} overlaps {}",
                pair[0].name,
                pair[1].name
            );
        }
        Global { allocations, last: 0 }
    }

    fn find(&mut self, address: usize) -> Option<usize> {
        let inside = |a: &Allocation| address >= a.base && address - a.base < a.bytes;
        if !self.allocations.get(self.last).is_some_and(inside) {
            let at = self.allocations.partition_point(|a| a.base <= address).checked_sub(1)?;
            if !inside(&self.allocations[at]) {
                return None;
            }
            self.last = at;
        }
        Some(self.last)
    }

    /// `address` in words: the allocation it lies in, or the one before it.
    pub(super) fn name(&self, address: usize) -> String {
        match self.allocations.partition_point(|a| a.base <= address).checked_sub(1) {
            Some(at) => {
                let a = &self.allocations[at];
                if a.access == Access::Atomic {
                    return format!("{}[{}]", a.name, (address - a.base) / 4);
                }
                format!("{} + {} (of {} bytes)", a.name, address - a.base, a.bytes)
            }
            None => format!("{address:#x}"),
        }
    }

    /// Judges an access by `thread`.
    #[inline]
    pub(super) fn touch(
        &mut self,
        order: &mut Order,
        thread: u32,
        address: usize,
        bytes: usize,
        align: usize,
        touch: Touch,
    ) -> Result<(), (Wrong, String)> {
        if !address.is_multiple_of(align) {
            return Err((Wrong::Misaligned, format!("{bytes} bytes at {}, aligned to {align}", self.name(address))));
        }
        if bytes == 0 {
            return Ok(());
        }
        let Some(at) = self.find(address).filter(|at| {
            let a = &self.allocations[*at];
            a.bytes - (address - a.base) >= bytes
        }) else {
            return Err((Wrong::OutOfBounds, format!("{bytes} bytes at {}", self.name(address))));
        };
        let allocation = &mut self.allocations[at];
        match (allocation.access, touch) {
            (Access::Constant, Touch::Read | Touch::View) | (_, Touch::Atomic) => return Ok(()),
            (Access::Constant, Touch::Write) => {
                return Err((Wrong::Forbidden, format!("a write to {}, which is only read", self.name(address))));
            }
            (Access::Atomic, _) => {
                return Err((Wrong::Forbidden, format!("a plain access to {}, a word of atomics", self.name(address))));
            }
            (_, Touch::View) => {
                return Err((Wrong::Forbidden, format!("a reference to {}, which is written", self.name(address))));
            }
            (Access::Written | Access::Unwritten, Touch::Read | Touch::Write) => {}
        }
        let offset = address - allocation.base;
        let (mut first, end) = (offset / UNIT, (offset + bytes).div_ceil(UNIT));
        while first < end {
            let page = allocation.pages[first / PAGE].get_or_insert_with(|| vec![Cell::default(); PAGE].into());
            let stop = end.min((first / PAGE + 1) * PAGE);
            for (at, cell) in (first..stop).zip(&mut page[first % PAGE..]) {
                if touch == Touch::Read && cell.write.time == 0 && allocation.access == Access::Unwritten {
                    let place = self.name(address - offset + at * UNIT);
                    return Err((Wrong::Poison, format!("a read of {place}, which nobody has written")));
                }
                if let Err((did, who)) = order.touch(cell, thread, touch == Touch::Write) {
                    let place = self.name(address - offset + at * UNIT);
                    let does = if touch == Touch::Write { "write" } else { "read" };
                    let who = order.describe(who);
                    return Err((Wrong::Race, format!("a {does} of {place}, {did} by {who}, and nothing between")));
                }
            }
            first = stop;
        }
        Ok(())
    }
}

/// A block's shared memory.
#[derive(Debug)]
pub(super) struct Shared {
    words: Vec<u32>,
    cells: Vec<Cell>,
}

impl Shared {
    pub(super) fn new(words: u32) -> Shared {
        Shared { words: vec![0x7fc0_dead; words as usize], cells: vec![Cell::default(); words as usize] }
    }

    /// Forgets what is in it: another task's words are nobody's.
    pub(super) fn poison(&mut self) {
        self.words.fill(0x7fc0_dead);
        for cell in &mut self.cells {
            // Time 0 marks what was never written; that it was is still needed to order the next write.
            cell.read = if cell.read.time == 0 { cell.write } else { cell.read };
            cell.write = Epoch::default();
        }
    }

    pub(super) fn touch(
        &mut self,
        order: &mut Order,
        thread: u32,
        at: u32,
        store: Option<u32>,
    ) -> Result<u32, (Wrong, String)> {
        let Some(cell) = self.cells.get_mut(at as usize) else {
            return Err((Wrong::OutOfBounds, format!("word {at} of shared memory, which has {}", self.words.len())));
        };
        if store.is_none() && cell.write.time == 0 {
            return Err((Wrong::Poison, format!("a read of shared word {at}, which this task has not written")));
        }
        order.touch(cell, thread, store.is_some()).map_err(|(did, who)| {
            let does = if store.is_some() { "write" } else { "read" };
            let who = order.describe(who);
            (Wrong::Race, format!("a {does} of shared word {at}, {did} by {who}, and nothing between"))
        })?;
        if let Some(value) = store {
            self.words[at as usize] = value;
        }
        Ok(self.words[at as usize])
    }
}
