//! Global and shared memory as the simulator sees them: what may be touched at all, who touched what last, and which
//! accesses are ordered.
//!
//! Happens-before is tracked as FastTrack does (Flanagan and Freund 2009), with the GPU's hierarchy in place of one
//! clock a thread. A block is two *teams*: the threads that meet at its barrier, and the rest (service warps, and a
//! pseudo-thread for each mbarrier, which makes the bulk copies that complete on it). A team has a counter, its *time*,
//! that steps at every barrier, release and warp collective; an access is the pair (thread, time of its team). It is
//! ordered before a thread's next access when that thread
//! - is the same one, or
//! - is of the same team, which has been at a barrier since, or
//! - is of a team that has *seen* that time: a release by the one and an acquire by the other carried it over, and a
//!   barrier on each side carried it to and from the other threads, or
//! - is a lane of the same warp, which has been at a `warp::sync` since; a release by one lane then carries all of
//!   them, or
//! - (reads before a write only) is a lane of the same warp, which has exchanged values since. A shuffle orders no
//!   memory; but a value that went into one has been read.
//!
//! An mbarrier's phase carries what its arrivals release and the copies that it counted. The unit is two bytes, the
//! smallest element bodies write; in shared memory a word, in the tiles sixteen bytes, the unit of bulk copies.

use super::error::Wrong;
use crate::arch::bulk;
use std::collections::HashMap;
use std::rc::Rc;

/// Mbarriers of a block.
pub(super) const MBARRIERS: u32 = crate::arch::mbarrier::COUNT;

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
    /// Which bytes have been read, if that is counted.
    read: Option<Vec<bool>>,
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
        Allocation { name: name.into(), base: base.expose_provenance(), bytes, access, pages, read: None }
    }

    /// The same, of which the [report](super::Report::read) says how many bytes have been read.
    pub fn counted(self) -> Allocation {
        Allocation { read: Some(vec![false; self.bytes]), ..self }
    }

    fn note_read(&mut self, address: usize, bytes: usize) {
        if let Some(read) = &mut self.read {
            read[address - self.base..][..bytes].fill(true);
        }
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
    /// All lanes of a warp, sorted by warp.
    warps: Vec<(u32, u32)>,
}

impl Clock {
    pub(super) fn new(blocks: u32) -> Clock {
        Clock { blocks: vec![0; blocks as usize], threads: Vec::new(), warps: Vec::new() }
    }

    /// Adds what `other` knows. A team has `threads` numbers, a power of two.
    pub(super) fn join(&mut self, other: &Clock, threads: u32) {
        for (mine, theirs) in self.blocks.iter_mut().zip(&other.blocks) {
            *mine = (*mine).max(*theirs);
        }
        merge(&mut self.threads, &other.threads);
        merge(&mut self.warps, &other.warps);
        let blocks = &self.blocks;
        let team = |thread: u32| (thread >> threads.trailing_zeros()) as usize;
        self.threads.retain(|(thread, time)| *time > blocks[team(*thread)]);
        self.warps.retain(|(warp, time)| *time > blocks[team(warp * 32)]);
    }

    fn add(&mut self, thread: u32, time: u32) {
        raise(&mut self.threads, thread, time);
    }

    /// The time up to which `thread`, as one thread or as a lane, is known.
    fn thread(&self, thread: u32) -> u32 {
        find(&self.threads, thread).max(self.warp(thread / 32))
    }

    fn warp(&self, warp: u32) -> u32 {
        find(&self.warps, warp)
    }
}

fn raise(times: &mut Vec<(u32, u32)>, who: u32, time: u32) {
    match times.binary_search_by_key(&who, |(known, _)| *known) {
        Ok(at) => times[at].1 = times[at].1.max(time),
        Err(at) => times.insert(at, (who, time)),
    }
}

/// [`raise`] by all of `others`, sorted as `times` are.
fn merge(times: &mut Vec<(u32, u32)>, others: &[(u32, u32)]) {
    let (mut at, mut new) = (0, 0);
    for &(who, time) in others {
        at += times[at..].iter().take_while(|(known, _)| *known < who).count();
        match times.get_mut(at) {
            Some((known, mine)) if *known == who => *mine = (*mine).max(time),
            _ => new += 1,
        }
    }
    if new == 0 {
        return;
    }
    // From the last: who is known already moves up as far as there are new ones before it.
    let mut from = times.len();
    let mut to = from + new;
    times.resize(to, (0, 0));
    for &(who, time) in others.iter().rev() {
        while from > 0 && times[from - 1].0 > who {
            (from, to) = (from - 1, to - 1);
            times[to] = times[from];
        }
        if from == 0 || times[from - 1].0 != who {
            to -= 1;
            times[to] = (who, time);
        }
    }
}

fn find(times: &[(u32, u32)], who: u32) -> u32 {
    times.binary_search_by_key(&who, |(known, _)| *known).map_or(0, |at| times[at].1)
}

/// What one team knows of the order of things.
#[derive(Debug)]
pub(super) struct BlockTime {
    now: u32,
    /// `now` when its last barrier ended: everything of its own before that is ordered.
    barrier: u32,
    /// The same for the last exchange of each warp.
    warps: Vec<u32>,
    /// The same for the last `warp::sync` of each warp.
    synced: Vec<u32>,
    /// What it has seen of the others.
    seen: Clock,
}

/// The order of all accesses. "Block" in its names means a team: see the module head.
#[derive(Debug)]
pub(super) struct Order {
    /// Numbers of threads from one team to the next, a power of two: every access asks which team a thread is of.
    threads: u32,
    /// Threads of the first team of a block.
    meeting: u32,
    blocks: Vec<BlockTime>,
    /// What each thread has acquired since its block's last barrier. Threads acquire side by side: most have one clock,
    /// or the same two.
    acquired: Vec<Option<Rc<Clock>>>,
    /// Two clocks of which a thread had the one and acquired the other, and what became of them.
    joined: Option<[Rc<Clock>; 3]>,
    /// What the last releases to each word carry.
    released: HashMap<usize, Rc<Clock>>,
    /// Reads by several blocks, per block.
    readers: Vec<Vec<Epoch>>,
    free_readers: Vec<u32>,
}

impl Order {
    /// For `blocks` blocks of `meeting` threads that meet and `service` that do not.
    pub(super) fn new(blocks: u32, meeting: u32, service: u32) -> Order {
        let (threads, teams) = (meeting.max(service + MBARRIERS).max(32).next_power_of_two(), 2 * blocks);
        let warps = threads as usize / 32;
        let team =
            || BlockTime { now: 1, barrier: 0, warps: vec![0; warps], synced: vec![0; warps], seen: Clock::new(teams) };
        Order {
            threads,
            meeting,
            blocks: (0..teams).map(|_| team()).collect(),
            acquired: vec![None; (teams * threads) as usize],
            joined: None,
            released: HashMap::new(),
            readers: Vec::new(),
            free_readers: Vec::new(),
        }
    }

    /// The team of `thread`.
    #[inline]
    fn team(&self, thread: u32) -> u32 {
        thread >> self.threads.trailing_zeros()
    }

    /// Which of its team `thread` is.
    #[inline]
    fn place(&self, thread: u32) -> u32 {
        thread & (self.threads - 1)
    }

    /// The warp, in its team, of `thread`.
    #[inline]
    fn warp_in_team(&self, thread: u32) -> usize {
        (self.place(thread) / 32) as usize
    }

    /// The number of thread `thread` of `block`.
    pub(super) fn number(&self, block: u32, thread: u32) -> u32 {
        let service = thread >= self.meeting;
        (2 * block + u32::from(service)) * self.threads + if service { thread - self.meeting } else { thread }
    }

    /// The number of what makes the copies that complete on mbarrier `barrier` of `block`.
    fn copier(&self, block: u32, barrier: u32) -> u32 {
        (2 * block + 2) * self.threads - MBARRIERS + barrier
    }

    /// The time of `thread`'s team.
    pub(super) fn now(&self, thread: u32) -> u32 {
        self.blocks[self.team(thread) as usize].now
    }

    pub(super) fn no_clock(&self) -> Clock {
        Clock::new(self.blocks.len() as u32)
    }

    fn step(&mut self, block: u32) -> u32 {
        let now = &mut self.blocks[block as usize].now;
        *now = now.checked_add(1).expect("a launch has fewer than 2^32 collectives a block");
        *now
    }

    /// All threads of `block` that meet have met.
    pub(super) fn barrier(&mut self, block: u32) {
        let block = 2 * block;
        let now = self.step(block);
        let time = &mut self.blocks[block as usize];
        time.barrier = now;
        let first = (block * self.threads) as usize;
        let mut joined: Option<Rc<Clock>> = None;
        for clock in self.acquired[first..first + self.threads as usize].iter_mut().filter_map(Option::take) {
            if !joined.is_some_and(|joined| Rc::ptr_eq(&joined, &clock)) {
                time.seen.join(&clock, self.threads);
            }
            joined = Some(clock);
        }
    }

    /// All threads of `block` have met, those that never do at its own barrier, too; what they have acquired they tell
    /// each other themselves.
    pub(super) fn barrier_of_all(&mut self, block: u32) {
        for team in [2 * block, 2 * block + 1] {
            self.blocks[team as usize].barrier = self.step(team);
        }
    }

    /// All lanes of `thread`'s warp have exchanged values.
    pub(super) fn exchange(&mut self, thread: u32) {
        let (block, warp) = (self.team(thread), self.warp_in_team(thread));
        let now = self.step(block);
        self.blocks[block as usize].warps[warp] = now;
    }

    /// All lanes of `thread`'s warp have met at a `warp::sync`, which orders memory.
    pub(super) fn warp_sync(&mut self, thread: u32) {
        let (block, warp) = (self.team(thread), self.warp_in_team(thread));
        let first = (thread / 32 * 32) as usize;
        let mut known: Option<Rc<Clock>> = None;
        for lane in first..first + 32 {
            match (&mut known, self.acquired[lane].take()) {
                (known @ None, clock) => *known = clock,
                (Some(known), Some(clock)) => self.join(known, &clock),
                _ => {}
            }
        }
        if known.is_some() {
            self.acquired[first..first + 32].fill(known);
        }
        let now = self.step(block);
        let time = &mut self.blocks[block as usize];
        (time.warps[warp], time.synced[warp]) = (now, now);
    }

    /// `thread` releases to what carries `clock`.
    pub(super) fn release_to(&mut self, thread: u32, clock: &mut Clock) {
        let block = self.team(thread);
        let time = &self.blocks[block as usize];
        clock.join(&time.seen, self.threads);
        if let Some(acquired) = &self.acquired[thread as usize] {
            clock.join(acquired, self.threads);
        }
        // What the block's other threads did before its last barrier, its warp before its last sync, and all this one
        // did.
        let own = &mut clock.blocks[block as usize];
        *own = (*own).max(time.barrier);
        let synced = time.synced[self.warp_in_team(thread)];
        if synced > *own {
            raise(&mut clock.warps, thread / 32, synced);
        }
        clock.add(thread, time.now + 1);
        self.step(block);
    }

    /// `thread` acquires what `clock` carries.
    pub(super) fn acquire_from(&mut self, thread: u32, clock: &Rc<Clock>) {
        let known = match self.acquired[thread as usize].take() {
            None => Rc::clone(clock),
            Some(mut known) => {
                self.join(&mut known, clock);
                known
            }
        };
        self.acquired[thread as usize] = Some(known);
    }

    /// `known` knows what `clock` does.
    fn join(&mut self, known: &mut Rc<Clock>, clock: &Rc<Clock>) {
        if Rc::ptr_eq(known, clock) {
            return;
        }
        match &self.joined {
            Some([one, other, both]) if Rc::ptr_eq(one, known) && Rc::ptr_eq(other, clock) => *known = Rc::clone(both),
            _ => {
                let before = Rc::clone(known);
                Rc::make_mut(known).join(clock, self.threads);
                self.joined = Some([before, Rc::clone(clock), Rc::clone(known)]);
            }
        }
    }

    /// `thread` releases to the word at `address`.
    pub(super) fn release(&mut self, thread: u32, address: usize) {
        let mut clock = self.released.remove(&address).unwrap_or_else(|| self.no_clock().into());
        self.release_to(thread, Rc::make_mut(&mut clock));
        self.released.insert(address, clock);
    }

    /// What has been released to the word at `address` is overwritten.
    pub(super) fn forget(&mut self, address: usize) {
        self.released.remove(&address);
    }

    /// `thread` acquires from the word at `address`.
    pub(super) fn acquire(&mut self, thread: u32, address: usize) {
        let Some(clock) = self.released.get(&address).cloned() else { return };
        self.acquire_from(thread, &clock);
    }

    /// A bulk copy that completes on `barrier` of `block` begins; returns when.
    pub(super) fn begin_copy(&mut self, block: u32) -> u32 {
        self.step(2 * block + 1)
    }

    /// The copy that began at `time` has landed: `clock` carries it.
    pub(super) fn end_copy(&self, block: u32, barrier: u32, time: u32, clock: &mut Clock) {
        clock.add(self.copier(block, barrier), time + 1);
    }

    /// Whether `thread` has seen what thread `who` did at `time`.
    #[inline]
    pub(super) fn is_seen(&self, thread: u32, who: u32, time: u32) -> bool {
        if who == thread {
            return true;
        }
        let (block, other) = (self.team(thread), self.team(who));
        let mine = &self.blocks[block as usize];
        if if block == other { time < mine.barrier } else { time < mine.seen.blocks[other as usize] } {
            return true;
        }
        if time < mine.seen.thread(who) {
            return true;
        }
        if who / 32 == thread / 32 && time < mine.synced[self.warp_in_team(thread)] {
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
                let (block, other) = (self.team(thread), self.team(who));
                let mine = &self.blocks[block as usize];
                let seen = if block == other { mine.barrier } else { mine.seen.blocks[other as usize] };
                let acquired = self.acquired[thread as usize].as_ref().map_or(0, |clock| clock.blocks[other as usize]);
                if read.time < seen.max(acquired) {
                    return true;
                }
            }
        }
        let same_warp = who / 32 == thread / 32 && read.who & MARK != THREADS;
        same_warp && read.time < self.blocks[self.team(thread) as usize].warps[self.warp_in_team(thread)]
    }

    /// The first of the readers at `at` whose read is not ordered before a write by `thread`.
    #[inline(never)]
    fn unseen_reader(&self, thread: u32, at: u32) -> Option<u32> {
        let mut readers = self.readers[at as usize].iter();
        readers.find(|read| read.time != 0 && !self.is_read_seen(thread, **read)).map(|read| read.who & !MARK)
    }

    /// What stands for `read` and a read by `thread` now, both of one block.
    fn merged(&self, thread: u32, read: Epoch) -> Epoch {
        let time = self.blocks[self.team(thread) as usize].now;
        if read.time == 0 || self.is_read_seen(thread, read) {
            return Epoch { who: thread, time };
        }
        let same_warp = (read.who & !MARK) / 32 == thread / 32 && read.who & MARK != THREADS;
        Epoch { who: thread | if same_warp { LANES } else { THREADS }, time }
    }

    /// Judges and records a write to `cell` by a copy that `thread` has begun at `time` and `barrier` counts; on an
    /// error says by whom the other access was.
    fn copy_to(&mut self, cell: &mut Cell, thread: u32, barrier: u32, time: u32) -> Result<(), (&'static str, u32)> {
        self.touch(cell, thread, true)?;
        let who = self.copier(self.team(thread) / 2, barrier);
        cell.write = Epoch { who, time };
        Ok(())
    }

    /// Whether `thread` has seen what lanes of warp `warp` did at `time`.
    fn is_warp_seen(&self, thread: u32, warp: u32, time: u32) -> bool {
        let (block, other) = (self.team(thread), self.team(warp * 32));
        let mine = &self.blocks[block as usize];
        if time < mine.seen.warp(warp).max(if block == other { mine.barrier } else { mine.seen.blocks[other as usize] })
        {
            return true;
        }
        let acquired = self.acquired[thread as usize].as_ref();
        thread / 32 == warp || acquired.is_some_and(|clock| time < clock.blocks[other as usize].max(clock.warp(warp)))
    }

    /// Whether what `read` stands for, one or more lanes of a warp, is ordered before a write by `thread`.
    fn are_lanes_seen(&self, thread: u32, read: Epoch) -> bool {
        let who = read.who & !MARK;
        if read.who & MARK == 0 && self.is_seen(thread, who, read.time) {
            return true;
        }
        if who / 32 == thread / 32 {
            let team = &self.blocks[self.team(thread) as usize];
            let exchanged = team.warps[self.warp_in_team(thread)];
            return read.time < team.barrier.max(exchanged);
        }
        self.is_warp_seen(thread, who / 32, read.time)
    }

    /// Judges and records a read of `cell`, whose reads are kept by warp: `read` is that of `thread`'s.
    fn touch_read(&mut self, cell: &Cell, read: &mut Epoch, thread: u32) -> Result<(), (&'static str, u32)> {
        if !self.is_seen(thread, cell.write.who, cell.write.time) {
            return Err(("written", cell.write.who));
        }
        let lone = read.time == 0 || read.who == thread || self.are_lanes_seen(thread, *read);
        *read = Epoch { who: thread | if lone { 0 } else { LANES }, time: self.now(thread) };
        Ok(())
    }

    /// Judges and records a write to `cell`, given its reads by warp.
    fn touch_write(&mut self, cell: &mut Cell, reads: &mut [Epoch], thread: u32) -> Result<(), (&'static str, u32)> {
        if let Some(read) = reads.iter().find(|read| read.time != 0 && !self.are_lanes_seen(thread, **read)) {
            return Err(("read", read.who & !MARK));
        }
        self.touch(cell, thread, true)?;
        reads.fill(Epoch::default());
        Ok(())
    }

    /// The warp, in its block, of `thread`.
    fn warp_in_block(&self, thread: u32) -> usize {
        let (team, at) = (self.team(thread), self.place(thread));
        ((at + team % 2 * self.meeting) / 32) as usize
    }

    /// [`Order::copy_to`] for a read.
    fn copy_from(&mut self, cell: &mut Cell, thread: u32, barrier: u32, time: u32) -> Result<(), (&'static str, u32)> {
        let before = cell.read;
        self.touch(cell, thread, false)?;
        // With readers that the copy's thread has not seen, theirs and its own marks stay: the later write must wait
        // for that thread at least.
        if before.time == 0 || self.is_read_seen(thread, before) {
            cell.read = Epoch { who: self.copier(self.team(thread) / 2, barrier), time };
        }
        Ok(())
    }

    /// Judges and records one access to `cell`; on an error says by whom the other access was.
    #[inline]
    fn touch(&mut self, cell: &mut Cell, thread: u32, is_write: bool) -> Result<(), (&'static str, u32)> {
        let block = self.team(thread);
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
        } else if read.time == 0 || self.team(read.who & !MARK) == block || self.is_read_seen(thread, read) {
            cell.read = self.merged(thread, read);
        } else {
            let at = self.free_readers.pop().unwrap_or_else(|| {
                self.readers.push(Vec::new());
                self.readers.len() as u32 - 1
            });
            let mut readers = vec![Epoch::default(); self.blocks.len()];
            readers[self.team(read.who & !MARK) as usize] = read;
            readers[block as usize] = Epoch { who: thread, time: now };
            self.readers[at as usize] = readers;
            cell.read = Epoch { who: at | BLOCKS, time: now };
        }
        Ok(())
    }

    fn describe(&self, thread: u32) -> String {
        let (team, at) = (self.team(thread), self.place(thread));
        match (team % 2, (at + MBARRIERS).checked_sub(self.threads)) {
            (1, Some(barrier)) => format!("a bulk copy to mbarrier {barrier} of block {}", team / 2),
            (service, _) => format!("thread {} of block {}", at + service * self.meeting, team / 2),
        }
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
    /// An atomic one that only reads.
    Poll,
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

    /// Bytes read, each once, of the allocations that [count](Allocation::counted) them.
    pub(super) fn read(&self) -> Vec<(String, u64)> {
        let counted = |a: &Allocation| {
            let read = a.read.as_ref()?;
            Some((a.name.clone(), read.iter().filter(|is_read| **is_read).count() as u64))
        };
        self.allocations.iter().filter_map(counted).collect()
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
        if matches!(touch, Touch::Read | Touch::Poll) {
            allocation.note_read(address, bytes);
        }
        match (allocation.access, touch) {
            (Access::Constant, Touch::Read | Touch::View) | (_, Touch::Atomic | Touch::Poll) => return Ok(()),
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

impl Global {
    /// Judges the source of a bulk copy that `thread`, which has fenced the proxies or not, begins.
    #[allow(clippy::too_many_arguments, reason = "what a copy is")]
    pub(super) fn copy_from(
        &mut self,
        order: &mut Order,
        thread: u32,
        is_fenced: bool,
        address: usize,
        bytes: usize,
        barrier: u32,
        time: u32,
    ) -> Result<(), (Wrong, String)> {
        if !address.is_multiple_of(COPY_UNIT) {
            return Err((Wrong::Misaligned, format!("a bulk copy from {}, aligned to 16", self.name(address))));
        }
        let Some(at) = self.find(address).filter(|at| {
            let a = &self.allocations[*at];
            a.bytes - (address - a.base) >= bytes
        }) else {
            return Err((Wrong::OutOfBounds, format!("a bulk copy of {bytes} bytes from {}", self.name(address))));
        };
        self.allocations[at].note_read(address, bytes);
        let (access, base) = (self.allocations[at].access, self.allocations[at].base);
        match access {
            Access::Constant => return Ok(()),
            Access::Atomic => {
                let place = self.name(address);
                return Err((Wrong::Forbidden, format!("a bulk copy from {place}, a word of atomics")));
            }
            Access::Written | Access::Unwritten => {}
        }
        let (allocation, offset) = (at, address - base);
        for at in offset / UNIT..(offset + bytes) / UNIT {
            let page = &mut self.allocations[allocation].pages[at / PAGE];
            let cell = &mut page.get_or_insert_with(|| vec![Cell::default(); PAGE].into())[at % PAGE];
            let (written, unwritten) = (cell.write.time != 0, access == Access::Unwritten);
            let judged = order.copy_from(cell, thread, barrier, time);
            let place = || self.name(base + at * UNIT);
            if !written && unwritten {
                return Err((Wrong::Poison, format!("a bulk copy of {}, which nobody has written", place())));
            }
            if let Err((did, who)) = judged {
                let who = order.describe(who);
                return Err((Wrong::Race, format!("a bulk copy of {}, {did} by {who}, and nothing between", place())));
            }
            if written && !is_fenced {
                let what = format!("a bulk copy of {}, written in this launch, without a proxy fence", place());
                return Err((Wrong::Proxy, what));
            }
        }
        Ok(())
    }
}

impl Global {
    /// Judges a prefetch: it reads nothing, but its bytes must be there.
    pub(super) fn prefetch(&mut self, address: usize, bytes: usize) -> Result<(), (Wrong, String)> {
        if !address.is_multiple_of(COPY_UNIT) || !bytes.is_multiple_of(COPY_UNIT) {
            let what = format!("a prefetch of {bytes} bytes at {}: not sixteens", self.name(address));
            return Err((Wrong::Misaligned, what));
        }
        if bytes == 0 || bytes > bulk::MOST_PREFETCHED as usize {
            let what = format!("a prefetch of {bytes} bytes at {}: not so many at once", self.name(address));
            return Err((Wrong::OutOfBounds, what));
        }
        match self.find(address) {
            Some(at) if self.allocations[at].bytes - (address - self.allocations[at].base) >= bytes => Ok(()),
            _ => Err((Wrong::OutOfBounds, format!("a prefetch of {bytes} bytes at {}", self.name(address)))),
        }
    }
}

/// The unit of bulk copies.
pub(super) const COPY_UNIT: usize = 16;

/// What stands in tiles that nothing has filled: NaN.
const POISON: u128 = 0x7fc0_dead_7fc0_dead_7fc0_dead_7fc0_dead;

/// A block's shared memory: its words, and the tiles that bulk copies fill.
#[derive(Debug)]
pub(super) struct Shared {
    words: Vec<u32>,
    cells: Vec<Cell>,
    /// Per word, whether bits have been set in it since it was stored: then it is for nothing else.
    are_bits: Vec<bool>,
    /// Per word and warp, who read it last.
    reads: Vec<Epoch>,
    /// Sixteen bytes each.
    tiles: Vec<u128>,
    tile_cells: Vec<Cell>,
    /// Per cell and warp, when it was last read; a copy into it needs to know all of them.
    tile_reads: Vec<u32>,
    tile_states: Vec<TileState>,
    /// Per cell, by how many warps' products it is being read.
    multiplied: Vec<u32>,
    /// Cells that threads' copies have written since the task began.
    by_threads: Vec<u32>,
    warps: usize,
}

/// What a thread does with a word of shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WordTouch {
    Load,
    Store(u32),
    /// Sets these bits of it.
    Or(u32),
}

/// Through which proxy a cell of the tiles was written, and whether the other one sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TileState {
    /// By a bulk copy, or not at all.
    Bulk,
    /// A thread's copy is on its way.
    Landing,
    /// It has landed, and its thread has waited for it.
    Landed,
    /// And fenced it.
    Fenced,
}

impl Shared {
    pub(super) fn new(words: u32, tile_bytes: u32, warps: u32) -> Shared {
        let n = tile_bytes as usize / COPY_UNIT;
        Shared {
            words: vec![0x7fc0_dead; words as usize],
            cells: vec![Cell::default(); words as usize],
            are_bits: vec![false; words as usize],
            reads: vec![Epoch::default(); (words * warps) as usize],
            tiles: vec![POISON; n],
            tile_cells: vec![Cell::default(); n],
            tile_reads: vec![0; n * warps as usize],
            tile_states: vec![TileState::Bulk; n],
            multiplied: vec![0; n],
            by_threads: Vec::new(),
            warps: warps as usize,
        }
    }

    /// Judges a write of the tile cell `at` that `thread` begins: nobody reads it any more. Its reads are forgotten.
    fn judge_tile_write(&mut self, order: &Order, thread: u32, at: usize, what: &str) -> Result<(), (Wrong, String)> {
        let place = at * COPY_UNIT;
        if self.multiplied[at] > 0 {
            return Err((Wrong::Race, format!("{what} to tile byte {place}, which a product still reads")));
        }
        if self.tile_states[at] == TileState::Landing {
            return Err((Wrong::Race, format!("{what} to tile byte {place}, where another one is on its way")));
        }
        let reads = &mut self.tile_reads[at * self.warps..][..self.warps];
        let first = order.number(order.team(thread) / 2, 0);
        let warp = |warp: usize| order.number(order.team(first) / 2, warp as u32 * 32) / 32;
        let unseen = (0..reads.len()).find(|w| reads[*w] != 0 && !order.is_warp_seen(thread, warp(*w), reads[*w]));
        if let Some(reader) = unseen {
            let who = order.describe(warp(reader) * 32);
            return Err((Wrong::Race, format!("{what} to tile byte {place}, read by {who}, and nothing between")));
        }
        reads.fill(0);
        Ok(())
    }

    /// Judges the destination of a bulk copy. What was there is poison from now on.
    pub(super) fn copy_to(
        &mut self,
        order: &mut Order,
        thread: u32,
        to: u32,
        bytes: u32,
        barrier: u32,
        time: u32,
    ) -> Result<(), (Wrong, String)> {
        let (first, n) = (to as usize / COPY_UNIT, bytes as usize / COPY_UNIT);
        if !to.is_multiple_of(COPY_UNIT as u32) || !bytes.is_multiple_of(COPY_UNIT as u32) || bytes == 0 {
            return Err((Wrong::Misaligned, format!("a bulk copy of {bytes} bytes to tile byte {to}: not sixteens")));
        }
        if first + n > self.tiles.len() {
            let what = format!("a bulk copy of {bytes} bytes to tile byte {to} of {}", self.tiles.len() * COPY_UNIT);
            return Err((Wrong::OutOfBounds, what));
        }
        for at in first..first + n {
            self.judge_tile_write(order, thread, at, "a bulk copy")?;
            if self.tile_states[at] == TileState::Landed {
                let what = format!("a bulk copy to tile byte {}, written by a thread without a fence", at * COPY_UNIT);
                return Err((Wrong::Proxy, what));
            }
            order.copy_to(&mut self.tile_cells[at], thread, barrier, time).map_err(|(did, who)| {
                let who = order.describe(who);
                (
                    Wrong::Race,
                    format!("a bulk copy to tile byte {}, {did} by {who}, and nothing between", at * COPY_UNIT),
                )
            })?;
            self.tile_states[at] = TileState::Bulk;
            self.tiles[at] = POISON;
        }
        Ok(())
    }

    /// Judges the destination of a copy of sixteen bytes that `thread` begins. What was there is poison from now on.
    pub(super) fn copy_sixteen_to(&mut self, order: &mut Order, thread: u32, to: u32) -> Result<(), (Wrong, String)> {
        if !to.is_multiple_of(COPY_UNIT as u32) {
            return Err((Wrong::Misaligned, format!("a copy of sixteen bytes to tile byte {to}")));
        }
        let at = to as usize / COPY_UNIT;
        if at >= self.tiles.len() {
            let what = format!("a copy of sixteen bytes to tile byte {to} of {}", self.tiles.len() * COPY_UNIT);
            return Err((Wrong::OutOfBounds, what));
        }
        self.judge_tile_write(order, thread, at, "a copy")?;
        order.touch(&mut self.tile_cells[at], thread, true).map_err(|(did, who)| {
            let who = order.describe(who);
            (Wrong::Race, format!("a copy to tile byte {to}, {did} by {who}, and nothing between"))
        })?;
        self.tile_states[at] = TileState::Landing;
        self.tiles[at] = POISON;
        Ok(())
    }

    /// The sixteen bytes of a copy, which `thread` has begun, are there.
    pub(super) fn land_sixteen(&mut self, order: &Order, thread: u32, to: u32, bytes: u128) {
        let at = to as usize / COPY_UNIT;
        self.tiles[at] = bytes;
        self.tile_states[at] = TileState::Landed;
        self.tile_cells[at].write = Epoch { who: thread, time: order.now(thread) };
        self.by_threads.push(at as u32);
    }

    /// What threads have copied to tile byte `to`, products see.
    pub(super) fn fence_sixteen(&mut self, to: u32) {
        let state = &mut self.tile_states[to as usize / COPY_UNIT];
        if *state == TileState::Landed {
            *state = TileState::Fenced;
        }
    }

    /// Judges a read of sixteen bytes at tile byte `at` by a product that `thread`'s warp begins.
    pub(super) fn multiply(&mut self, order: &Order, thread: u32, at: u32) -> Result<(), (Wrong, String)> {
        self.judge_tile_read(order, thread, at)?;
        let cell = at as usize / COPY_UNIT;
        if self.tile_states[cell] == TileState::Landed {
            let what = format!("a product of tile byte {at}, written by a thread that has not fenced it");
            return Err((Wrong::Proxy, what));
        }
        self.multiplied[cell] += 1;
        Ok(())
    }

    /// The product is done, and `thread`'s warp has waited for it.
    pub(super) fn multiplied(&mut self, order: &Order, thread: u32, at: u32) {
        let cell = at as usize / COPY_UNIT;
        self.multiplied[cell] -= 1;
        self.tile_reads[cell * self.warps + order.warp_in_block(thread)] = order.now(thread);
    }

    /// The sixteen bytes at tile byte `at`, already judged.
    pub(super) fn sixteen(&self, at: u32) -> u128 {
        self.tiles[at as usize / COPY_UNIT]
    }

    fn judge_tile_read(&self, order: &Order, thread: u32, at: u32) -> Result<(), (Wrong, String)> {
        let cell = at as usize / COPY_UNIT;
        let Some(write) = self.tile_cells.get(cell).map(|cell| cell.write) else {
            let all = self.tiles.len() * COPY_UNIT;
            return Err((Wrong::OutOfBounds, format!("a read of tile byte {at} of {all}")));
        };
        if write.time == 0 {
            return Err((Wrong::Poison, format!("a read of tile byte {at}, which no copy has filled")));
        }
        if self.tile_states[cell] == TileState::Landing {
            return Err((Wrong::Poison, format!("a read of tile byte {at}, whose copy nobody has waited for")));
        }
        if !order.is_seen(thread, write.who, write.time) {
            let who = order.describe(write.who);
            return Err((Wrong::Race, format!("a read of tile byte {at}, written by {who}, and nothing between")));
        }
        Ok(())
    }

    /// The bytes of a copy arrive.
    pub(super) fn land(&mut self, to: u32, bytes: &[u128]) {
        self.tiles[to as usize / COPY_UNIT..][..bytes.len()].copy_from_slice(bytes);
    }

    /// Judges a read of `bytes` bytes of the tiles, aligned to their number; returns the sixteen they lie in.
    pub(super) fn tile(
        &mut self,
        order: &mut Order,
        thread: u32,
        at: u32,
        bytes: u32,
    ) -> Result<u128, (Wrong, String)> {
        if !at.is_multiple_of(bytes) {
            return Err((Wrong::Misaligned, format!("{bytes} bytes at tile byte {at}")));
        }
        self.judge_tile_read(order, thread, at)?;
        self.tile_reads[at as usize / COPY_UNIT * self.warps + order.warp_in_block(thread)] = order.now(thread);
        Ok(self.tiles[at as usize / COPY_UNIT])
    }

    /// Forgets what is in it: another task's words are nobody's.
    pub(super) fn poison(&mut self) {
        let kept = crate::arch::shared::KEPT as usize;
        self.words[..kept].fill(0x7fc0_dead);
        for cell in &mut self.cells[..kept] {
            // Time 0 marks what was never written; that it was is still needed to order the next write.
            if cell.write.time != 0 {
                *cell = Cell { write: Epoch::default(), read: cell.write };
            }
        }
        for at in std::mem::take(&mut self.by_threads) {
            let (at, cell) = (at as usize, &mut self.tile_cells[at as usize]);
            if matches!(self.tile_states[at], TileState::Landed | TileState::Fenced) && cell.write.time != 0 {
                *cell = Cell { write: Epoch::default(), read: cell.write };
                self.tiles[at] = POISON;
            }
        }
    }

    /// Judges what `thread` does with word `at`, and does it; what the word was before. Setting bits is an atomic:
    /// others may do so at once, as they may read, but nobody store to the word.
    pub(super) fn touch(
        &mut self,
        order: &mut Order,
        thread: u32,
        at: u32,
        touch: WordTouch,
    ) -> Result<u32, (Wrong, String)> {
        let Some(cell) = self.cells.get_mut(at as usize) else {
            return Err((Wrong::OutOfBounds, format!("word {at} of shared memory, which has {}", self.words.len())));
        };
        let is_store = matches!(touch, WordTouch::Store(_));
        if !is_store && cell.write.time == 0 {
            return Err((Wrong::Poison, format!("a read of shared word {at}, which this task has not written")));
        }
        if touch == WordTouch::Load && self.are_bits[at as usize] {
            return Err((Wrong::Race, format!("a read of shared word {at}, of which threads set bits")));
        }
        let reads = &mut self.reads[at as usize * self.warps..][..self.warps];
        let judged = if is_store {
            order.touch_write(cell, reads, thread)
        } else {
            order.touch_read(cell, &mut reads[order.warp_in_block(thread)], thread)
        };
        judged.map_err(|(did, who)| {
            let does = if is_store { "write" } else { "read" };
            let who = order.describe(who);
            (Wrong::Race, format!("a {does} of shared word {at}, {did} by {who}, and nothing between"))
        })?;
        let (word, are_bits) = (&mut self.words[at as usize], &mut self.are_bits[at as usize]);
        let was = *word;
        match touch {
            WordTouch::Load => {}
            WordTouch::Store(value) => (*word, *are_bits) = (value, false),
            WordTouch::Or(bits) => (*word, *are_bits) = (was | bits, true),
        }
        Ok(was)
    }
}

#[cfg(test)]
mod tests {
    use super::{merge, raise};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn times() -> impl Strategy<Value = Vec<(u32, u32)>> {
        let times = proptest::collection::btree_map(0u32..40, 1u32..9, 0..30);
        times.prop_map(|times: BTreeMap<u32, u32>| times.into_iter().collect())
    }

    proptest! {
        #[test]
        fn lists_of_times_are_merged_as_one_by_one(mut some in times(), others in times()) {
            let mut expected = some.clone();
            others.iter().for_each(|(who, time)| raise(&mut expected, *who, *time));
            merge(&mut some, &others);
            prop_assert_eq!(some, expected);
        }
    }
}
