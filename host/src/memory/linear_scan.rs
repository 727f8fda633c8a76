//! LinearScan: an allocator driven by time, and the packing heuristic that it makes.
//!
//! [`LinearScan`] keeps the free gaps of an address range. It serves the feasible memory scheduler, which allocates
//! when an op starts and frees when its last user ends, and [`place`], which does the same along a known timeline. The
//! rules are those of the VPUX compiler's allocator of that name: best fit, except that the open end of the range (the
//! gap in the direction of growth) is used only when nothing else fits, because a peak once raised never comes down;
//! growth is upwards for what stays and downwards for what was brought in early, so that the two do not interleave.
//!
//! Laws: gaps are disjoint, not empty and never touch; what is freed was taken.

use super::timeline::Timeline;
use super::types::{Buffer, Placement};

/// From which end of the range new allocations grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Low addresses first.
    Up,
    /// High addresses first.
    Down,
}

/// The free gaps of an address range.
#[derive(Debug, Clone)]
pub struct LinearScan {
    /// `(first, end)` of every gap.
    gaps: Pairs,
    /// `(bytes, first)` of every gap, for best fit.
    by_size: Pairs,
    capacity_bytes: u64,
    free_bytes: u64,
}

impl LinearScan {
    /// An empty range of `capacity_bytes`.
    pub fn new(capacity_bytes: u64) -> Self {
        let mut scan = Self { gaps: Pairs::new(), by_size: Pairs::new(), capacity_bytes, free_bytes: 0 };
        scan.free(0, capacity_bytes);
        scan
    }

    /// The bytes in no allocation.
    pub fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    /// The size of the largest gap.
    pub fn largest_gap_bytes(&self) -> u64 {
        self.by_size.last().map_or(0, |gap| gap.0)
    }

    /// Where `size_bytes` would go: the offset, or `None` where no gap holds them. An allocation of no bytes is at 0
    /// and is never freed.
    pub fn find(&self, size_bytes: u64, alignment: u64, direction: Direction) -> Option<u64> {
        if size_bytes == 0 {
            return Some(0);
        }
        let fit = |first: u64, end: u64| match direction {
            Direction::Up => {
                let offset = first.checked_next_multiple_of(alignment)?;
                (offset.checked_add(size_bytes)? <= end).then_some(offset)
            }
            Direction::Down => {
                let highest = end.checked_sub(size_bytes)?;
                let offset = highest - highest % alignment;
                (offset >= first).then_some(offset)
            }
        };
        let mut open_end = None;
        for (bytes, first) in self.by_size.from(self.by_size.seek((size_bytes, 0))) {
            let end = first + bytes;
            let is_open = match direction {
                Direction::Up => end == self.capacity_bytes,
                Direction::Down => first == 0,
            };
            match fit(first, end) {
                Some(offset) if is_open => open_end = Some(offset),
                Some(offset) => return Some(offset),
                None => {}
            }
        }
        open_end
    }

    /// Takes the bytes [`find`](Self::find) names.
    pub fn alloc(&mut self, size_bytes: u64, alignment: u64, direction: Direction) -> Option<u64> {
        let offset = self.find(size_bytes, alignment, direction)?;
        self.take(offset, size_bytes);
        Some(offset)
    }

    /// Takes the given bytes.
    ///
    /// # Panics
    /// If they are not free.
    pub fn take(&mut self, offset: u64, size_bytes: u64) {
        if size_bytes == 0 {
            return;
        }
        let end = self.end_of(offset, size_bytes);
        // The last gap that begins here or before; one may end at `u64::MAX`.
        let at = self.gaps.seek((offset + 1, 0));
        let gap = self.gaps.before(at).filter(|&(_, (_, gap_end))| end <= gap_end);
        let (at, (gap_first, gap_end)) = gap.expect("bytes to be taken lie in one gap: the caller found them free");
        self.by_size.remove((gap_end - gap_first, gap_first));
        // What is left of the gap keeps its place among the gaps.
        match (gap_first < offset, end < gap_end) {
            (false, false) => self.gaps.remove_at(at),
            (true, false) => self.gaps.replace(at, (gap_first, offset)),
            (false, true) => self.gaps.replace(at, (end, gap_end)),
            (true, true) => {
                self.gaps.replace(at, (gap_first, offset));
                self.gaps.insert((end, gap_end));
            }
        }
        if gap_first < offset {
            self.by_size.insert((offset - gap_first, gap_first));
        }
        if end < gap_end {
            self.by_size.insert((gap_end - end, end));
        }
        self.free_bytes -= size_bytes;
    }

    /// Gives bytes back that were taken, all of one allocation or a part of it.
    ///
    /// # Panics
    /// If they lie outside the range, or some are free.
    pub fn free(&mut self, offset: u64, size_bytes: u64) {
        if size_bytes == 0 {
            return;
        }
        let (mut first, mut end) = (offset, self.end_of(offset, size_bytes));
        let at = self.gaps.seek((offset, 0));
        let below = self.gaps.before(at);
        let above = self.gaps.get(at);
        assert!(below.is_none_or(|(_, gap)| gap.1 <= first), "{first}..{end} are freed but {below:?} was free");
        assert!(above.is_none_or(|gap| end <= gap.0), "{first}..{end} are freed but {above:?} was free");
        let below = below.filter(|&(_, gap)| gap.1 == first);
        let above = above.filter(|&gap| gap.0 == end);
        if let Some((_, (below_first, below_end))) = below {
            self.by_size.remove((below_end - below_first, below_first));
            first = below_first;
        }
        if let Some((above_first, above_end)) = above {
            self.by_size.remove((above_end - above_first, above_first));
            end = above_end;
        }
        match (below, above) {
            (None, None) => self.gaps.insert((first, end)),
            (None, Some(_)) => self.gaps.replace(at, (first, end)),
            (Some((below_at, _)), above) => {
                self.gaps.replace(below_at, (first, end));
                if above.is_some() {
                    self.gaps.remove_at(at);
                }
            }
        }
        self.by_size.insert((end - first, first));
        self.free_bytes += size_bytes;
    }

    /// Where these bytes end, which is in the range.
    fn end_of(&self, offset: u64, size_bytes: u64) -> u64 {
        let end = offset.checked_add(size_bytes).filter(|end| *end <= self.capacity_bytes);
        end.unwrap_or_else(|| {
            panic!("{size_bytes} bytes at {offset} leave the range, which has {}", self.capacity_bytes)
        })
    }
}

/// Pairs in ascending order, in leaves.
///
/// A memory has few gaps at a time, and then there is one leaf: a sorted vector, which is several times faster than a
/// B-tree. Many leaves are searched by their last pairs.
#[derive(Debug, Clone)]
struct Pairs {
    /// At least one; none is empty but a single one.
    leaves: Vec<Vec<(u64, u64)>>,
}

/// The most pairs in a leaf, 2 KiB of them.
const MAX_LEAF: usize = 128;

/// The leaf and the place in it; the end is the place after the last leaf's last pair.
type Position = (usize, usize);

impl Pairs {
    fn new() -> Self {
        Self { leaves: vec![Vec::new()] }
    }

    fn last(&self) -> Option<(u64, u64)> {
        self.leaves.last()?.last().copied()
    }

    /// The position of the first pair that is no less.
    fn seek(&self, pair: (u64, u64)) -> Position {
        let leaf = match self.leaves.len() - 1 {
            0 => 0,
            last => self.leaves[..last].partition_point(|leaf| leaf.last().is_some_and(|&last| last < pair)),
        };
        (leaf, self.leaves[leaf].partition_point(|&other| other < pair))
    }

    fn get(&self, (leaf, idx): Position) -> Option<(u64, u64)> {
        self.leaves[leaf].get(idx).copied()
    }

    /// The pair before a position, and where it is.
    fn before(&self, (leaf, idx): Position) -> Option<(Position, (u64, u64))> {
        let at = match idx.checked_sub(1) {
            Some(idx) => (leaf, idx),
            None => {
                let leaf = leaf.checked_sub(1)?;
                (leaf, self.leaves[leaf].len() - 1)
            }
        };
        Some((at, self.leaves[at.0][at.1]))
    }

    /// The pairs from a position on.
    fn from(&self, (leaf, idx): Position) -> impl Iterator<Item = (u64, u64)> {
        self.leaves[leaf][idx..].iter().chain(self.leaves[leaf + 1..].iter().flatten()).copied()
    }

    /// Puts another pair in the place of one, between the same neighbours.
    fn replace(&mut self, (leaf, idx): Position, pair: (u64, u64)) {
        self.leaves[leaf][idx] = pair;
    }

    fn insert(&mut self, pair: (u64, u64)) {
        let (leaf, idx) = self.seek(pair);
        let pairs = &mut self.leaves[leaf];
        pairs.insert(idx, pair);
        if pairs.len() > MAX_LEAF {
            let upper = pairs.split_off(MAX_LEAF / 2);
            self.leaves.insert(leaf + 1, upper);
        }
    }

    fn remove(&mut self, pair: (u64, u64)) {
        let at = self.seek(pair);
        debug_assert_eq!(self.get(at), Some(pair), "what is removed is there");
        self.remove_at(at);
    }

    fn remove_at(&mut self, (leaf, idx): Position) {
        self.leaves[leaf].remove(idx);
        if self.leaves[leaf].is_empty() && self.leaves.len() > 1 {
            self.leaves.remove(leaf);
        }
    }
}

/// Packs by walking time once: what dies is freed, then what is born is allocated, larger buffers first. O(n log n),
/// the fastest of the heuristics and good where lifetimes are short.
///
/// # Panics
/// If the buffers are no [`Problem`](super::Problem).
pub fn place(buffers: &[Buffer]) -> Placement {
    super::pack::assert_valid(buffers);
    place_along(buffers, &Timeline::new(buffers))
}

pub(super) fn place_along(buffers: &[Buffer], timeline: &Timeline) -> Placement {
    let mut births: Vec<u32> = (0..buffers.len() as u32).collect();
    let mut deaths = births.clone();
    // Of those born at once the large ones go first, and of equally large ones those that stay longest.
    births.sort_unstable_by_key(|&i| {
        let (first, end) = timeline.spans[i as usize];
        (first, u64::MAX - buffers[i as usize].size_bytes, u32::MAX - end, i)
    });
    deaths.sort_unstable_by_key(|&i| (timeline.spans[i as usize].1, i));
    // A range that nothing can fill: no problem's sizes and alignments sum to more.
    let mut scan = LinearScan::new(u64::MAX / 2);
    let mut offsets = vec![0; buffers.len()];
    let mut deaths = deaths.into_iter().peekable();
    for i in births {
        let (now, _) = timeline.spans[i as usize];
        while let Some(dead) = deaths.next_if(|&dead| timeline.spans[dead as usize].1 <= now) {
            scan.free(offsets[dead as usize], buffers[dead as usize].size_bytes);
        }
        let Buffer { size_bytes, alignment, .. } = buffers[i as usize];
        offsets[i as usize] = scan
            .alloc(size_bytes, alignment, Direction::Up)
            .expect("a range as long as all sizes and alignments has room for each");
    }
    Placement::from_offsets(buffers, offsets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn best_fit_spares_the_open_end() {
        let mut scan = LinearScan::new(100);
        for size in [10, 20, 30] {
            scan.alloc(size, 1, Direction::Up).unwrap();
        }
        scan.free(10, 20);
        // 20 bytes at 10 and 40 at the end are free; 15 bytes go to the smaller, 30 only fit the open end.
        assert_eq!(scan.find(15, 1, Direction::Up), Some(10));
        assert_eq!(scan.find(30, 1, Direction::Up), Some(60));
        assert_eq!(scan.find(41, 1, Direction::Up), None);
        assert_eq!((scan.free_bytes(), scan.largest_gap_bytes()), (60, 40));
    }

    #[test]
    fn the_whole_address_range_is_a_gap_like_any_other() {
        for direction in [Direction::Up, Direction::Down] {
            let mut scan = LinearScan::new(u64::MAX);
            let offset = scan.alloc(128, 1 << 63, direction).unwrap();
            scan.free(offset, 128);
            assert_eq!((scan.free_bytes(), scan.largest_gap_bytes()), (u64::MAX, u64::MAX));
        }
    }

    #[test]
    fn growth_downwards_starts_at_the_top() {
        let mut scan = LinearScan::new(100);
        assert_eq!(scan.alloc(10, 8, Direction::Down), Some(88));
        assert_eq!(scan.alloc(2, 1, Direction::Down), Some(98), "the padding above is a gap like any other");
        assert_eq!(scan.alloc(10, 8, Direction::Up), Some(0));
        assert_eq!(scan.alloc(10, 8, Direction::Up), Some(16));
    }

    #[test]
    fn freeing_merges_with_both_neighbours() {
        let mut scan = LinearScan::new(90);
        let offsets: Vec<u64> = (0..3).map(|_| scan.alloc(30, 1, Direction::Up).unwrap()).collect();
        scan.free(offsets[0], 30);
        scan.free(offsets[2], 30);
        assert_eq!(scan.largest_gap_bytes(), 30);
        scan.free(offsets[1], 30);
        assert_eq!((scan.largest_gap_bytes(), scan.free_bytes()), (90, 90));
    }

    /// A range of 100 bytes of which 20..50 are taken, after `change`; what it panics with.
    fn refused(change: impl FnOnce(&mut LinearScan) + std::panic::UnwindSafe) -> String {
        let mut scan = LinearScan::new(100);
        scan.take(20, 30);
        let panic = std::panic::catch_unwind(move || change(&mut scan)).expect_err("it is refused");
        panic.downcast_ref::<String>().cloned().or(panic.downcast_ref::<&str>().map(|text| text.to_string())).unwrap()
    }

    #[test]
    fn what_was_not_taken_is_not_freed() {
        assert!(refused(|scan| scan.free(500, 10)).starts_with("10 bytes at 500 leave the range, which has 100"));
        assert!(refused(|scan| scan.free(u64::MAX, 2)).contains("leave the range"));
        assert!(refused(|scan| scan.take(u64::MAX, 2)).contains("leave the range"));
        for (offset, bytes) in [(10, 20), (20, 31), (0, 100), (60, 5), (50, 1), (19, 1)] {
            let message = refused(|scan| scan.free(offset, bytes));
            assert!(message.contains("was free"), "{offset} {bytes}: {message}");
        }
        let twice = |scan: &mut LinearScan| {
            scan.free(20, 30);
            scan.free(20, 30);
        };
        assert!(refused(twice).contains("was free"));
    }

    #[test]
    fn pairs_are_a_set_in_order_however_many_leaves() {
        let mut state = 1u64;
        let mut random = move |below: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        let (mut pairs, mut set) = (Pairs::new(), std::collections::BTreeSet::new());
        // Grows past many leaves, then shrinks to none.
        for step in 0..12_000 {
            let pair = (random(500), random(10));
            let is_growing = step < 6_000;
            if is_growing && set.insert(pair) {
                pairs.insert(pair);
            } else if !is_growing && let Some(&pair) = set.range(pair..).next().or(set.first()) {
                set.remove(&pair);
                pairs.remove(pair);
            }
            let at = pairs.seek(pair);
            assert_eq!(pairs.get(at), set.range(pair..).next().copied());
            assert_eq!(pairs.before(at).map(|before| before.1), set.range(..pair).next_back().copied());
            assert_eq!(pairs.last(), set.last().copied());
            if step % 500 == 0 {
                assert!(pairs.from((0, 0)).eq(set.iter().copied()));
                let is_one = pairs.leaves.len() == 1;
                assert!(pairs.leaves.iter().all(|leaf| leaf.len() <= MAX_LEAF && (is_one || !leaf.is_empty())));
            }
        }
        assert!(set.is_empty() && pairs.leaves == [vec![]]);
    }

    #[test]
    fn no_bytes_take_no_room() {
        let mut scan = LinearScan::new(0);
        assert_eq!(scan.alloc(0, 64, Direction::Up), Some(0));
        assert_eq!(scan.alloc(1, 1, Direction::Up), None);
    }
}
