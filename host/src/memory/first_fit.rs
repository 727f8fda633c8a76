//! First fit in a chosen order: each buffer as low as it goes among those already placed.
//!
//! The oldest heuristic of dynamic storage allocation, and with a few orders to choose from one of the best: large
//! buffers first is what TensorFlow Lite's arena does ("Efficient memory management for deep neural net inference",
//! Pisarchyk and Lee, 2020). It usually walks, for each buffer, the list of those that overlap it in time; these lists
//! have a quadratic number of entries, so none is kept here. What is placed stays in address order in short runs, each
//! with the bounding interval of its lifetimes, and a run that cannot overlap is skipped whole. Neighbours of equal
//! lifetime that touch are merged into one entry, so tensors that live through the whole program cost nothing.

use std::cmp::Reverse;

use super::timeline::Timeline;
use super::types::{Buffer, Placement};

/// Entries per run before it is split in two.
const RUN_LEN: usize = 128;

/// Occupied addresses over a range of slots.
#[derive(Clone, Copy)]
struct Entry {
    offset: u64,
    end_offset: u64,
    first: u32,
    end: u32,
}

/// Entries in address order and the hull of their lifetimes.
struct Run {
    entries: Vec<Entry>,
    first: u32,
    end: u32,
    end_offset: u64,
}

impl Run {
    fn new(entries: Vec<Entry>) -> Self {
        let first = entries.iter().map(|e| e.first).min().unwrap_or(u32::MAX);
        let end = entries.iter().map(|e| e.end).max().unwrap_or(0);
        let end_offset = entries.iter().map(|e| e.end_offset).max().unwrap_or(0);
        Self { entries, first, end, end_offset }
    }
}

/// How many entries a heuristic may look at: a budget of steps and not of time, so that results do not depend on the
/// machine.
pub(super) struct Budget {
    pub(super) steps: u64,
}

/// Places `buffers` in the given order, which names each of them once. `None` when the budget ran out, or when some
/// buffer would end above `limit_bytes`.
pub(super) fn place_in_order(
    buffers: &[Buffer],
    timeline: &Timeline,
    order: &[u32],
    limit_bytes: u64,
    budget: &mut Budget,
) -> Option<Placement> {
    let mut runs: Vec<Run> = vec![Run::new(Vec::new())];
    let mut offsets = vec![0; buffers.len()];
    for &i in order {
        let Buffer { size_bytes, alignment, .. } = buffers[i as usize];
        if size_bytes == 0 {
            continue;
        }
        let (first, end) = timeline.spans[i as usize];
        let mut offset = 0u64;
        let mut steps = runs.len() as u64;
        'search: for run in &runs {
            if run.first >= end || run.end <= first || run.end_offset <= offset {
                continue;
            }
            steps += run.entries.len() as u64;
            for entry in &run.entries {
                if entry.first < end && first < entry.end && entry.end_offset > offset {
                    if entry.offset >= offset + size_bytes {
                        break 'search;
                    }
                    offset = entry.end_offset.next_multiple_of(alignment);
                }
            }
        }
        if offset + size_bytes > limit_bytes {
            return None;
        }
        budget.steps = budget.steps.checked_sub(steps)?;
        offsets[i as usize] = offset;
        insert(&mut runs, Entry { offset, end_offset: offset + size_bytes, first, end });
    }
    Some(Placement::from_offsets(buffers, offsets))
}

fn insert(runs: &mut Vec<Run>, new: Entry) {
    let run_idx = runs.partition_point(|run| run.entries.first().is_some_and(|e| e.offset <= new.offset));
    let run_idx = run_idx.saturating_sub(1);
    let run = &mut runs[run_idx];
    let at = run.entries.partition_point(|e| e.offset <= new.offset);
    run.first = run.first.min(new.first);
    run.end = run.end.max(new.end);
    run.end_offset = run.end_offset.max(new.end_offset);
    // Only direct neighbours in address order are looked at: merging is for speed, missing one costs an entry.
    if at > 0 {
        let below = &mut run.entries[at - 1];
        if (below.first, below.end, below.end_offset) == (new.first, new.end, new.offset) {
            below.end_offset = new.end_offset;
            return;
        }
    }
    run.entries.insert(at, new);
    if run.entries.len() > RUN_LEN {
        let upper = run.entries.split_off(RUN_LEN / 2);
        let lower = std::mem::take(&mut run.entries);
        runs[run_idx] = Run::new(lower);
        runs.insert(run_idx + 1, Run::new(upper));
    }
}

/// The orders worth trying. Each is a static key; later keys break ties of earlier ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Large buffers first, long lives first among equals.
    Size,
    /// Large buffers first, by birth among equals.
    SizeBirth,
    /// Outwards in time from the busiest instant, large buffers first among equals.
    Peak,
    /// Large products of size and lifetime first.
    Area,
    /// Long lives first, large buffers first among equals.
    Lifetime,
    /// In order of birth, large buffers first among equals.
    Birth,
    /// In order of death, from the last.
    Death,
    /// Those alive at the busiest instants first, then long lives, then large sizes.
    Load,
}

impl Order {
    /// All of them, the one that is best most often first.
    pub const ALL: [Order; 8] = [
        Order::Size,
        Order::Peak,
        Order::SizeBirth,
        Order::Lifetime,
        Order::Area,
        Order::Load,
        Order::Birth,
        Order::Death,
    ];

    /// The buffers in this order.
    pub(super) fn of(self, buffers: &[Buffer], timeline: &Timeline, loads: &[u64]) -> Vec<u32> {
        let size = |i: usize| u64::MAX - buffers[i].size_bytes;
        let life = |i: usize| u64::MAX - (buffers[i].upper - buffers[i].lower);
        let peak = loads.iter().enumerate().max_by_key(|&(slot, &load)| (load, Reverse(slot)));
        let peak = peak.map_or(0, |(slot, _)| slot as u32);
        let mut keyed: Vec<(u128, u64, u64, u32)> = (0..buffers.len())
            .map(|i| {
                let (first, end) = timeline.spans[i];
                let key = match self {
                    Order::Size => (u128::from(size(i)), life(i), u64::from(first)),
                    Order::SizeBirth => (u128::from(size(i)), u64::from(first), life(i)),
                    Order::Peak => {
                        let distance = first.saturating_sub(peak).max((peak + 1).saturating_sub(end));
                        (u128::from(distance), size(i), u64::from(first))
                    }
                    Order::Area => {
                        let life = u128::from(buffers[i].upper - buffers[i].lower);
                        (u128::MAX - u128::from(buffers[i].size_bytes) * life, size(i), u64::from(first))
                    }
                    Order::Lifetime => (u128::from(life(i)), size(i), u64::from(first)),
                    Order::Birth => (u128::from(first), size(i), life(i)),
                    Order::Death => (u128::from(u32::MAX - end), size(i), life(i)),
                    Order::Load => {
                        // Long lives are scanned slot by slot only up to a bound: the key is a hint, not a law.
                        let slots = &loads[first as usize..(end as usize).min(first as usize + 4096)];
                        let busiest = slots.iter().copied().max().unwrap_or(0);
                        (u128::from(u64::MAX - busiest), life(i), size(i))
                    }
                };
                (key.0, key.1, key.2, i as u32)
            })
            .collect();
        keyed.sort_unstable();
        keyed.into_iter().map(|key| key.3).collect()
    }
}
