//! Exact search: a placement within the capacity, or the proof that there is none.
//!
//! After M. D. Moffitt, "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine Learning" (ASPLOS
//! 2023): buffers are placed in the order of their offsets, from the bottom up, each resting on what lies below it;
//! many placements are shifted or shuffled copies of one another, and only one of each kind is looked for. Code, data
//! structures and some of the rules are our own.
//!
//! # What is searched
//! Call a placement *settled* if no buffer can be moved straight down past free bytes. Moving buffers down until none
//! can move ends (the sum of offsets falls), so if there is a placement there is a settled one, and in a settled one
//! every buffer lies at its *floor*: the highest top among the placed buffers it shares a slot with, aligned. Listing a
//! settled placement by `(offset, rank)` for a fixed ranking gives exactly one sequence, and the search enumerates
//! sequences: a node is a set of placed buffers, a child places one more at its floor, not before the last `(offset,
//! rank)`.
//!
//! # What is pruned
//! * *Slot bound.* What is unplaced in a slot will lie above `max(lowest floor of those buffers, last offset)`; with
//!   the sum of their sizes that must not exceed the capacity.
//! * *Height.* If an unplaced buffer fits completely below an offset, then whoever is placed at that offset now,
//!   nothing will ever be put where that buffer would fit, and the placement would not be settled.
//! * *Twins.* Equal buffers are placed in order of rank; of two buffers with equal lifetimes, one resting on exactly
//!   the other, the lower has the lower rank (swapping them moves nothing else). Both rules keep the placement that is
//!   least in the order (sum over buffers of size x lifetime x centre height, then sequence of ranks): swaps leave the
//!   first part as it is and lower the second, moving down lowers the first. So the rules do not work against each
//!   other.
//! * *Splitting.* Slots that no unplaced buffer crosses cut the rest into parts with no influence on each other. A part
//!   that has no solution leaves the node without one, and its siblings need not be undone one by one. Each part is
//!   enumerated in a sequence of its own, by a ranking made for what is left of it (the rules for twins keep to the
//!   first ranking: they speak of placements, not of sequences).
//! * *Jumping.* Every failure comes with its reason, a range of slots such that it stands as long as nothing in them
//!   changes: for a slot over capacity the lifetimes of its unplaced buffers; for a part tried in vain its slots; in
//!   both cases widened by the reasons of the bounds that were raised. If the reason shares no slot with the buffer
//!   just placed, placing another one instead cannot help, and the node fails for the same reason.
//! * *Passing over.* Once all sequences that place a buffer now have been tried, it can only lie on one still to be
//!   placed, at least as high as the lowest of those will end; slot bounds see it there. The reason of that bound takes
//!   in the reasons of those failures and of the bounds it was computed from.
//!
//! # Order of search
//! Children go by `(floor, rank)`; rankings that begin with the load of the busiest slot are made anew for every part,
//! by the load still to be placed (a hundredfold on the hardest of minimalloc's benchmarks). Run times are heavy-tailed
//! in the ranking, so several rankings take turns with limits on the nodes that double each round; any of them may find
//! a placement or finish the proof.

use crate::random::split_mix;
use std::cmp::Reverse;
use std::time::Instant;

use super::timeline::Timeline;
use super::types::Buffer;

/// Why no placement is returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Exhausted {
    /// There is none.
    Proof,
    /// The time or node limit came first.
    Limit,
}

/// How often, in nodes, the clock is read.
const NODES_PER_CLOCK: u64 = 1024;

/// The entries of the table from slots to buffers that a search may have.
const MAX_TABLE_ENTRIES: usize = 50_000_000;

/// The keys of a ranking, most important first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Key {
    /// The load of the busiest slot the buffer is alive in.
    Total,
    /// Its lifetime.
    Width,
    /// Lifetime times size.
    Area,
}

const RANKINGS: [[Key; 3]; 4] = {
    use Key::{Area, Total, Width};
    [[Total, Width, Area], [Total, Area, Width], [Width, Area, Total], [Area, Total, Width]]
};

/// Rankings of a round: the plain ones, then each once more with its keys shaken.
const RANKINGS_PER_ROUND: u64 = 8;

/// Looks for offsets within `capacity_bytes`. Buffers of no bytes are not expected.
pub(super) fn search(
    buffers: &[Buffer],
    capacity_bytes: u64,
    deadline: Option<Instant>,
    max_nodes: u64,
) -> Result<Vec<u64>, Exhausted> {
    let world = World::new(buffers).ok_or(Exhausted::Limit)?;
    let mut limit = 8 * buffers.len() as u64 + 64;
    let mut total_nodes = 0;
    for round in 0u64.. {
        for turn in 0..RANKINGS_PER_ROUND {
            let ranking = RANKINGS[turn as usize % RANKINGS.len()];
            let shake = (turn >= RANKINGS.len() as u64).then_some(round * RANKINGS_PER_ROUND + turn);
            let ranks = world.ranks(ranking, shake);
            let n_nodes = limit.min(max_nodes - total_nodes);
            let has_total_first = ranking[0] == Key::Total;
            let mut search = Search::new(&world, ranks, has_total_first, capacity_bytes, n_nodes, deadline);
            let outcome = search.run();
            total_nodes += search.n_nodes;
            match outcome {
                Outcome::Found => return Ok(search.offsets),
                Outcome::Failed { .. } => return Err(Exhausted::Proof),
                Outcome::Limit if search.is_late || total_nodes >= max_nodes => return Err(Exhausted::Limit),
                Outcome::Limit => {}
            }
        }
        limit = limit.saturating_mul(2);
    }
    unreachable!("rounds end by a verdict, the deadline or the node limit long before 2^64 of them")
}

/// The problem as the search sees it: slots reduced to those whose set of live buffers is contained in no neighbour's.
/// By Helly's theorem for intervals two buffers share one of these slots whenever they are alive together at all.
struct World {
    buffers: Vec<Buffer>,
    /// Half-open ranges of slots.
    spans: Vec<(u32, u32)>,
    n_slots: usize,
    /// Buffers by slot: `members[starts[slot]..starts[slot + 1]]`.
    starts: Vec<usize>,
    members: Vec<u32>,
    loads: Vec<u64>,
    /// Whether the swap rule holds: with alignments a swapped pair may take more room.
    may_swap: bool,
}

impl World {
    fn new(buffers: &[Buffer]) -> Option<Self> {
        let timeline = Timeline::new(buffers);
        // A slot is kept if something was born in it and something dies right after: only there the live set is
        // maximal.
        let mut is_born = vec![false; timeline.n_slots + 1];
        let mut is_dead = vec![false; timeline.n_slots + 1];
        for &(first, end) in &timeline.spans {
            is_born[first as usize] = true;
            is_dead[end as usize] = true;
        }
        let mut number = vec![0u32; timeline.n_slots + 1];
        let mut n_slots = 0u32;
        let mut has_birth = false;
        for slot in 0..timeline.n_slots {
            has_birth |= is_born[slot];
            number[slot] = n_slots;
            if has_birth && is_dead[slot + 1] {
                n_slots += 1;
                has_birth = false;
            }
        }
        number[timeline.n_slots] = n_slots;
        // `number[slot]` is the first kept slot at or after `slot`.
        let spans: Vec<(u32, u32)> =
            timeline.spans.iter().map(|&(first, end)| (number[first as usize], number[end as usize])).collect();
        let n_slots = n_slots as usize;
        let n_entries: usize = spans.iter().map(|&(first, end)| (end - first) as usize).sum();
        if n_entries > MAX_TABLE_ENTRIES {
            return None;
        }
        let mut starts = vec![0; n_slots + 1];
        let mut loads = vec![0; n_slots];
        for (&(first, end), buffer) in spans.iter().zip(buffers) {
            debug_assert!(first < end, "a buffer is alive in a maximal slot");
            for slot in first..end {
                starts[slot as usize + 1] += 1;
                loads[slot as usize] += buffer.size_bytes;
            }
        }
        for slot in 0..n_slots {
            starts[slot + 1] += starts[slot];
        }
        let mut next = starts.clone();
        let mut members = vec![0; n_entries];
        for (i, &(first, end)) in spans.iter().enumerate() {
            for slot in first..end {
                members[next[slot as usize]] = i as u32;
                next[slot as usize] += 1;
            }
        }
        let may_swap = buffers.iter().all(|buffer| buffer.alignment == 1);
        Some(Self { buffers: buffers.to_vec(), spans, n_slots, starts, members, loads, may_swap })
    }

    /// The rank of each buffer: 0 is tried first. With a seed in `shake` lifetimes and areas are scaled by up to a
    /// quarter.
    fn ranks(&self, ranking: [Key; 3], shake: Option<u64>) -> Vec<u32> {
        let mut state = shake.unwrap_or(0);
        let scales: Vec<u64> = (0..self.buffers.len())
            .map(|_| match shake {
                None => 1024,
                Some(_) => 1024 + split_mix(&mut state) % 512,
            })
            .collect();
        let key = |i: usize, key: Key| -> u128 {
            let Buffer { lower, upper, size_bytes, .. } = self.buffers[i];
            match key {
                Key::Total => {
                    let (first, end) = self.spans[i];
                    u128::from(self.loads[first as usize..end as usize].iter().copied().max().unwrap_or(0))
                }
                Key::Width => u128::from(upper - lower).saturating_mul(u128::from(scales[i])),
                Key::Area => (u128::from(upper - lower) * u128::from(size_bytes)).saturating_mul(u128::from(scales[i])),
            }
        };
        let mut order: Vec<_> = (0..self.buffers.len())
            .map(|i| (ranking.map(|k| u128::MAX - key(i, k)), self.buffers[i].lower, self.buffers[i].size_bytes, i))
            .collect();
        order.sort_unstable();
        let mut ranks = vec![0; order.len()];
        for (rank, &(.., i)) in order.iter().enumerate() {
            ranks[i] = rank as u32;
        }
        ranks
    }
}

/// The smallest range of slots that covers both.
fn hull(a: (u32, u32), b: (u32, u32)) -> (u32, u32) {
    (a.0.min(b.0), a.1.max(b.1))
}

enum Outcome {
    Found,
    /// No placement; the slots of the part that has none.
    Failed {
        first: u32,
        end: u32,
    },
    Limit,
}

/// What to restore on the way back.
enum Undo {
    Floor { buffer: u32, floor: u64 },
    Bound { buffer: u32, bound: u64, reason: (u32, u32) },
    Slot { slot: u32, lowest: u64, witness: u32 },
    Placed { buffer: u32, top_from: u32 },
}

/// Unplaced buffers, a range of `Search::pool`, and the slots they are alive in.
#[derive(Clone, Copy)]
struct Part {
    first_item: usize,
    end_item: usize,
    first: u32,
    end: u32,
}

struct Search<'a> {
    world: &'a World,
    capacity: u64,
    /// The ranking the search began with: symmetric placements are told apart by it.
    first_ranks: Vec<u32>,
    /// The ranking in force: a part cut off anew may have one of its own.
    ranks: Vec<u32>,
    /// Whether parts are ranked anew.
    has_total_first: bool,
    /// The equal buffer of the next lower rank, or the buffer itself.
    twin_before: Vec<u32>,
    /// The offset at which each unplaced buffer would rest now; `u64::MAX` once placed, so that it is never a minimum.
    floors: Vec<u64>,
    /// A lower bound of the offset each unplaced buffer can still get, at least its floor; `u64::MAX` once placed.
    bounds: Vec<u64>,
    /// The slots that explain each bound: as long as nothing in them changes, the bound stands.
    reasons: Vec<(u32, u32)>,
    offsets: Vec<u64>,
    /// Sum of the unplaced sizes in each slot.
    rest: Vec<u64>,
    /// The lowest bound of the unplaced buffers in each slot, and the buffer that has it.
    lowest: Vec<u64>,
    witness: Vec<u32>,
    /// For each border between slots, how many unplaced buffers live across it.
    crossing: Vec<u32>,
    /// The placed buffer on top in each slot, and a log of what was there before.
    top: Vec<u32>,
    top_log: Vec<u32>,
    trail: Vec<Undo>,
    pool: Vec<u32>,
    n_nodes: u64,
    max_nodes: u64,
    deadline: Option<Instant>,
    is_late: bool,
}

const NOBODY: u32 = u32::MAX;

impl<'a> Search<'a> {
    fn new(
        world: &'a World,
        ranks: Vec<u32>,
        has_total_first: bool,
        capacity: u64,
        max_nodes: u64,
        deadline: Option<Instant>,
    ) -> Self {
        let n = world.buffers.len();
        let mut by_rank = vec![0u32; n];
        for (i, &rank) in ranks.iter().enumerate() {
            by_rank[rank as usize] = i as u32;
        }
        let mut twin_before: Vec<u32> = (0..n as u32).collect();
        let mut seen = std::collections::HashMap::new();
        for &i in &by_rank {
            let buffer = &world.buffers[i as usize];
            let key = (world.spans[i as usize], buffer.size_bytes, buffer.alignment);
            if let Some(before) = seen.insert(key, i) {
                twin_before[i as usize] = before;
            }
        }
        let mut crossing = vec![0; world.n_slots + 1];
        for &(first, end) in &world.spans {
            for border in first + 1..end {
                crossing[border as usize] += 1;
            }
        }
        let witness =
            (0..world.n_slots).map(|slot| world.members[world.starts[slot]..].first().copied().unwrap_or(NOBODY));
        Self {
            world,
            capacity,
            twin_before,
            floors: vec![0; n],
            bounds: vec![0; n],
            reasons: world.spans.clone(),
            offsets: vec![0; n],
            rest: world.loads.clone(),
            lowest: vec![0; world.n_slots],
            witness: witness.collect(),
            crossing,
            top: vec![NOBODY; world.n_slots],
            top_log: Vec::new(),
            trail: Vec::new(),
            pool: by_rank,
            first_ranks: ranks.clone(),
            ranks,
            has_total_first,
            n_nodes: 0,
            max_nodes,
            deadline,
            is_late: false,
        }
    }

    fn run(&mut self) -> Outcome {
        if self.world.loads.iter().any(|&load| load > self.capacity) {
            return Outcome::Failed { first: 0, end: self.world.n_slots as u32 };
        }
        let whole = Part { first_item: 0, end_item: self.pool.len(), first: 0, end: self.world.n_slots as u32 };
        self.solve_split(whole, None, 0, 0)
    }

    /// Cuts the part where nothing crosses and solves the pieces in turn.
    fn solve_split(&mut self, part: Part, without: Option<u32>, offset: u64, rank: u32) -> Outcome {
        let pool_len = self.pool.len();
        let mut pieces: Vec<Part> = Vec::new();
        let mut first = part.first;
        for border in part.first + 1..=part.end {
            if border < part.end && self.crossing[border as usize] > 0 {
                continue;
            }
            let first_item = self.pool.len();
            for item in part.first_item..part.end_item {
                let i = self.pool[item];
                let span = self.world.spans[i as usize];
                if span.0 >= first && span.1 <= border && Some(i) != without {
                    self.pool.push(i);
                }
            }
            if self.pool.len() > first_item {
                pieces.push(Part { first_item, end_item: self.pool.len(), first, end: border });
            }
            first = border;
        }
        // The tightest piece is the likeliest to fail.
        pieces.sort_by_key(|piece| {
            let slots = piece.first as usize..piece.end as usize;
            let bound = slots.map(|s| self.lowest[s].max(offset) + self.rest[s]).max().unwrap_or(0);
            (self.capacity.saturating_sub(bound), piece.end_item - piece.first_item)
        });
        let mut outcome = Outcome::Found;
        let is_ranked_anew = self.has_total_first && pieces.len() > 1;
        for piece in pieces {
            if is_ranked_anew {
                let before = self.rank_anew(piece);
                outcome = self.solve(piece, offset, 0);
                for (i, rank) in before {
                    self.ranks[i as usize] = rank;
                }
            } else {
                outcome = self.solve(piece, offset, rank);
            }
            if !matches!(outcome, Outcome::Found) {
                break;
            }
        }
        self.pool.truncate(pool_len);
        outcome
    }

    /// Ranks the buffers of a part by the load that is left to place in their busiest slot, as the ranking at the start
    /// did by the whole load. Returns the ranks they had.
    fn rank_anew(&mut self, part: Part) -> Vec<(u32, u32)> {
        let items = &self.pool[part.first_item..part.end_item];
        let before = items.iter().map(|&i| (i, self.ranks[i as usize])).collect();
        let total = |i: u32| {
            let (first, end) = self.world.spans[i as usize];
            self.rest[first as usize..end as usize].iter().copied().max().unwrap_or(0)
        };
        let mut order: Vec<_> = items.iter().map(|&i| (Reverse(total(i)), self.first_ranks[i as usize], i)).collect();
        order.sort_unstable();
        for (rank, (.., i)) in order.into_iter().enumerate() {
            self.ranks[i as usize] = rank as u32;
        }
        before
    }

    /// Places what is left of a part, nothing before `(offset, rank)`.
    fn solve(&mut self, part: Part, offset: u64, rank: u32) -> Outcome {
        let slots = part.first as usize..part.end as usize;
        let is_over = self.lowest[slots.clone()]
            .iter()
            .zip(&self.rest[slots])
            .any(|(&lowest, &rest)| lowest.max(offset) + rest > self.capacity && rest > 0);
        if is_over {
            return self.failed(part);
        }
        let items = &self.pool[part.first_item..part.end_item];
        let mut height = u64::MAX;
        for &i in items {
            height = height.min(self.floors[i as usize] + self.world.buffers[i as usize].size_bytes);
        }
        let mut children: Vec<(u64, u32, u32)> = Vec::new();
        for &i in items {
            let floor = self.floors[i as usize];
            // A bound above the floor says that the buffer was passed over and that nothing was put beneath it since.
            let is_settled = self.bounds[i as usize] == floor;
            if is_settled && floor < height && (floor, self.ranks[i as usize]) >= (offset, rank) {
                let before = self.twin_before[i as usize];
                if before == i || self.floors[before as usize] == u64::MAX {
                    children.push((floor, self.ranks[i as usize], i));
                }
            }
        }
        children.sort_unstable();
        let node_trail_len = self.trail.len();
        for (floor, rank, i) in children {
            let span = self.world.spans[i as usize];
            let reason = if self.is_swapped(i, floor) {
                span
            } else {
                if self.n_nodes >= self.max_nodes {
                    return Outcome::Limit;
                }
                self.n_nodes += 1;
                let is_time = self.n_nodes.is_multiple_of(NODES_PER_CLOCK);
                if is_time && self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                    self.is_late = true;
                    self.max_nodes = self.n_nodes;
                    return Outcome::Limit;
                }
                let trail_len = self.trail.len();
                let reason = match self.place(part, i) {
                    Err(reason) => reason,
                    Ok(has_cut) => match self.descend(part, i, has_cut, floor, rank) {
                        Outcome::Failed { first, end } => (first, end),
                        outcome => return outcome,
                    },
                };
                self.undo(trail_len);
                if reason.1 <= span.0 || span.1 <= reason.0 {
                    self.undo(node_trail_len);
                    return Outcome::Failed { first: reason.0, end: reason.1 };
                }
                hull(reason, span)
            };
            if let Err((first, end)) = self.pass_over(part, i, reason) {
                self.undo(node_trail_len);
                return Outcome::Failed { first, end };
            }
        }
        let failed = self.failed(part);
        self.undo(node_trail_len);
        failed
    }

    /// Solves what is left of a part after `i` was placed in it.
    fn descend(&mut self, part: Part, i: u32, has_cut: bool, offset: u64, rank: u32) -> Outcome {
        if has_cut || part.end_item - part.first_item == 1 {
            return self.solve_split(part, Some(i), offset, rank);
        }
        let first_item = self.pool.len();
        for item in part.first_item..part.end_item {
            if self.pool[item] != i {
                self.pool.push(self.pool[item]);
            }
        }
        let outcome = self.solve(Part { first_item, end_item: self.pool.len(), ..part }, offset, rank);
        self.pool.truncate(first_item);
        outcome
    }

    /// Failure for reasons that lie anywhere in the part, or in what its bounds rest on.
    fn failed(&self, part: Part) -> Outcome {
        let items = &self.pool[part.first_item..part.end_item];
        let reasons = items.iter().map(|&i| self.reasons[i as usize]);
        let (first, end) = reasons.fold((part.first, part.end), hull);
        Outcome::Failed { first, end }
    }

    /// Whether buffer `i` would rest on exactly one buffer of its own lifetime and higher rank.
    fn is_swapped(&self, i: u32, floor: u64) -> bool {
        let span = self.world.spans[i as usize];
        let below = self.top[span.0 as usize];
        self.world.may_swap
            && below != NOBODY
            && self.world.spans[below as usize] == span
            && self.first_ranks[below as usize] > self.first_ranks[i as usize]
            && self.offsets[below as usize] + self.world.buffers[below as usize].size_bytes == floor
            && self.top[span.0 as usize..span.1 as usize].iter().all(|&top| top == below)
    }

    /// Places `i` at its floor: whether a border became free, or the reason why some slot is over capacity then.
    fn place(&mut self, part: Part, i: u32) -> Result<bool, (u32, u32)> {
        let world = self.world;
        let (first, end) = world.spans[i as usize];
        let size = world.buffers[i as usize].size_bytes;
        let top = self.floors[i as usize] + size;
        self.offsets[i as usize] = self.floors[i as usize];
        self.trail.push(Undo::Floor { buffer: i, floor: self.floors[i as usize] });
        self.floors[i as usize] = u64::MAX;
        self.set_bound(i, u64::MAX, (first, end));
        self.trail.push(Undo::Placed { buffer: i, top_from: self.top_log.len() as u32 });
        let mut has_cut = false;
        for slot in first as usize..end as usize {
            self.rest[slot] -= size;
            self.top_log.push(self.top[slot]);
            self.top[slot] = i;
            if slot > first as usize {
                self.crossing[slot] -= 1;
                has_cut |= self.crossing[slot] == 0;
            }
        }
        let mut dirty = (first, end);
        for item in part.first_item..part.end_item {
            let j = self.pool[item];
            let (j_first, j_end) = world.spans[j as usize];
            if j_first < end && first < j_end && self.floors[j as usize] < top {
                let buffer = &world.buffers[j as usize];
                let floor = if buffer.alignment == 1 { top } else { top.next_multiple_of(buffer.alignment) };
                if floor + buffer.size_bytes > self.capacity {
                    return Err((j_first, j_end));
                }
                self.trail.push(Undo::Floor { buffer: j, floor: self.floors[j as usize] });
                self.floors[j as usize] = floor;
                if self.bounds[j as usize] >= floor {
                    continue;
                }
                self.set_bound(j, floor, (j_first, j_end));
                dirty = (dirty.0.min(j_first), dirty.1.max(j_end));
            }
        }
        self.refresh(dirty.0, dirty.1)?;
        Ok(has_cut)
    }

    /// Every sequence that places `i` now has been tried and failed for `reason`, so from here on it rests on a buffer
    /// yet to be placed. An error, with its reason, if nothing is left that could carry it that low.
    fn pass_over(&mut self, part: Part, i: u32, reason: (u32, u32)) -> Result<(), (u32, u32)> {
        let world = self.world;
        let (first, end) = world.spans[i as usize];
        let mut bound = u64::MAX;
        let mut reason = hull(reason, self.reasons[i as usize]);
        for &j in &self.pool[part.first_item..part.end_item] {
            let (j_first, j_end) = world.spans[j as usize];
            if j_first < end && first < j_end && j != i {
                bound = bound.min(self.bounds[j as usize] + world.buffers[j as usize].size_bytes);
                reason = hull(reason, self.reasons[j as usize]);
            }
        }
        if bound == u64::MAX || bound + world.buffers[i as usize].size_bytes > self.capacity {
            return Err(reason);
        }
        // Even a bound that stays is kept with its reason: from here on `i` is no child any more.
        self.set_bound(i, bound.max(self.bounds[i as usize]), reason);
        self.refresh(first, end)
    }

    fn set_bound(&mut self, buffer: u32, bound: u64, reason: (u32, u32)) {
        let undo = Undo::Bound { buffer, bound: self.bounds[buffer as usize], reason: self.reasons[buffer as usize] };
        self.trail.push(undo);
        self.bounds[buffer as usize] = bound;
        self.reasons[buffer as usize] = reason;
    }

    /// Brings the slots' lowest bounds up to date. An error, with its reason, if one of them is then over capacity.
    fn refresh(&mut self, first: u32, end: u32) -> Result<(), (u32, u32)> {
        let world = self.world;
        for slot in first as usize..end as usize {
            let witness = self.witness[slot];
            if witness == NOBODY || self.bounds[witness as usize] == self.lowest[slot] || self.rest[slot] == 0 {
                continue;
            }
            let members = &world.members[world.starts[slot]..world.starts[slot + 1]];
            let mut lowest = (u64::MAX, NOBODY);
            for &j in members {
                let bound = self.bounds[j as usize];
                if bound < lowest.0 {
                    lowest = (bound, j);
                }
            }
            self.trail.push(Undo::Slot { slot: slot as u32, lowest: self.lowest[slot], witness });
            (self.lowest[slot], self.witness[slot]) = lowest;
            if lowest.0 + self.rest[slot] > self.capacity {
                let unplaced = members.iter().filter(|&&j| self.bounds[j as usize] != u64::MAX);
                let reasons = unplaced.map(|&j| self.reasons[j as usize]);
                return Err(reasons.fold((slot as u32, slot as u32 + 1), hull));
            }
        }
        Ok(())
    }

    fn undo(&mut self, trail_len: usize) {
        while self.trail.len() > trail_len {
            match self.trail.pop().expect("longer than trail_len") {
                Undo::Floor { buffer, floor } => self.floors[buffer as usize] = floor,
                Undo::Bound { buffer, bound, reason } => {
                    self.bounds[buffer as usize] = bound;
                    self.reasons[buffer as usize] = reason;
                }
                Undo::Slot { slot, lowest, witness } => {
                    self.lowest[slot as usize] = lowest;
                    self.witness[slot as usize] = witness;
                }
                Undo::Placed { buffer, top_from } => {
                    let (first, end) = self.world.spans[buffer as usize];
                    let size = self.world.buffers[buffer as usize].size_bytes;
                    for slot in first as usize..end as usize {
                        self.rest[slot] += size;
                        self.top[slot] = self.top_log[top_from as usize + slot - first as usize];
                        if slot > first as usize {
                            self.crossing[slot] += 1;
                        }
                    }
                    self.top_log.truncate(top_from as usize);
                }
            }
        }
    }
}
