//! LinearScan: an allocator driven by time, and the packing heuristic that it makes.
//!
//! [`LinearScan`] keeps the free gaps of an address range. It serves the feasible memory scheduler, which allocates when
//! an op starts and frees when its last user ends, and [`place`], which does the same along a known timeline. The rules
//! are those of the VPUX compiler's allocator of that name: best fit, except that the open end of the range (the gap in
//! the direction of growth) is used only when nothing else fits, because a peak once raised never comes down; growth is
//! upwards for what stays and downwards for what was brought in early, so that the two do not interleave.
//!
//! Laws, asserted in debug builds: gaps are disjoint, not empty and never touch; what is freed was not free.

use std::collections::{BTreeMap, BTreeSet};

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
    /// `first -> end` of every gap.
    gaps: BTreeMap<u64, u64>,
    /// `(bytes, first)` of every gap, for best fit.
    by_size: BTreeSet<(u64, u64)>,
    capacity_bytes: u64,
    free_bytes: u64,
}

impl LinearScan {
    /// An empty range of `capacity_bytes`.
    pub fn new(capacity_bytes: u64) -> Self {
        let mut scan = Self { gaps: BTreeMap::new(), by_size: BTreeSet::new(), capacity_bytes, free_bytes: 0 };
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

    /// Where `size_bytes` would go: the offset, or `None` where no gap holds them. An allocation of no bytes is at 0 and
    /// is never freed.
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
        for &(bytes, first) in self.by_size.range((size_bytes, 0)..) {
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
        let end = offset + size_bytes;
        let gap = self.gaps.range(..=offset).next_back().map(|(&first, &gap_end)| (first, gap_end));
        let (gap_first, gap_end) =
            gap.filter(|gap| gap.1 >= end).expect("bytes to be taken lie in one gap: the caller found them free");
        self.remove_gap(gap_first, gap_end);
        if gap_first < offset {
            self.insert_gap(gap_first, offset);
        }
        if end < gap_end {
            self.insert_gap(end, gap_end);
        }
        self.free_bytes -= size_bytes;
    }

    /// Gives bytes back.
    pub fn free(&mut self, offset: u64, size_bytes: u64) {
        if size_bytes == 0 {
            return;
        }
        let (mut first, mut end) = (offset, offset + size_bytes);
        if let Some((&below, &below_end)) = self.gaps.range(..=offset).next_back() {
            debug_assert!(below_end <= first, "bytes {first}..{end} are freed but {below}..{below_end} was free");
            if below_end == first {
                self.remove_gap(below, below_end);
                first = below;
            }
        }
        if let Some((&above, &above_end)) = self.gaps.range(offset..).next() {
            debug_assert!(above >= end, "bytes {first}..{end} are freed but {above}..{above_end} was free");
            if above == end {
                self.remove_gap(above, above_end);
                end = above_end;
            }
        }
        self.insert_gap(first, end);
        self.free_bytes += size_bytes;
    }

    fn insert_gap(&mut self, first: u64, end: u64) {
        self.gaps.insert(first, end);
        self.by_size.insert((end - first, first));
    }

    fn remove_gap(&mut self, first: u64, end: u64) {
        self.gaps.remove(&first);
        self.by_size.remove(&(end - first, first));
    }
}

/// Packs by walking time once: what dies is freed, then what is born is allocated, larger buffers first. O(n log n), the
/// fastest of the heuristics and good where lifetimes are short.
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

    #[test]
    fn no_bytes_take_no_room() {
        let mut scan = LinearScan::new(0);
        assert_eq!(scan.alloc(0, 64, Direction::Up), Some(0));
        assert_eq!(scan.alloc(1, 1, Direction::Up), None);
    }
}
