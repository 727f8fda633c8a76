//! Packing, put together: quick heuristics, then the exact search, part by part.
//!
//! [`arena`] is for a compiler that wants a good placement now: near-linear, no capacity, no clock. [`pack`] answers
//! whether a problem fits its capacity, with proof where it says no. [`minimise`] looks for the lowest peak and says
//! whether it is known to be the lowest. All are deterministic and use one thread; a clock only ever ends a search, it
//! steers nothing.
//!
//! Two steps come before any search. *Decomposition*: at an instant that no buffer lives across, the problem falls into
//! two that share nothing; each part is packed alone, and buffers alive in no conflict at all sit at 0. *The lower
//! bound*: a load above the capacity at any instant is proof of infeasibility, and a placement whose peak equals the
//! load is optimal, so nothing more is tried.

use std::time::{Duration, Instant};

use super::first_fit::{self, Budget, Order};
use super::linear_scan;
use super::search::{self, Exhausted};
use super::timeline::Timeline;
use super::types::{Buffer, Placement, Problem, validate};

/// Entries the heuristics of [`arena`] may look at: about a second of work, spent only where the quick ones miss the
/// lower bound.
const ARENA_STEPS: u64 = 1_000_000_000;

/// Above this size sorting alone takes that long, and the heuristics get a tenth of the steps.
const MANY_BUFFERS: usize = 250_000;

/// Up to this size [`arena`] also lets the exact search go straight for the load, for a few nodes a buffer.
const MAX_ARENA_SEARCH_BUFFERS: usize = 2048;

/// Parts up to this size are given to the exact search.
pub const MAX_SEARCH_BUFFERS: usize = 4096;

/// What is known about a problem after [`pack`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It fits, so.
    Solved(Placement),
    /// It does not fit, and this has been proved.
    Infeasible(Proof),
    /// Neither was found in the time given.
    NotFound,
}

/// How a problem is known not to fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// At some instant the buffers alive sum to `load_bytes`, more than the capacity.
    Load {
        /// The sum.
        load_bytes: u64,
    },
    /// Every placement that could matter was tried.
    Exhausted,
}

/// The result of [`minimise`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Minimum {
    /// The lowest placement found.
    pub placement: Placement,
    /// No placement has a lower peak than this. Equal to the placement's own peak when that is proved lowest.
    pub lower_bound_bytes: u64,
}

impl Minimum {
    /// Whether the placement is proved to be as low as any.
    pub fn is_optimal(&self) -> bool {
        self.placement.peak_bytes == self.lower_bound_bytes
    }
}

/// A good placement quickly: the best of the heuristics within a fixed budget of steps.
///
/// # Panics
/// If the buffers are no [`Problem`].
pub fn arena(buffers: &[Buffer]) -> Placement {
    assert_valid(buffers);
    let timeline = Timeline::new(buffers);
    let loads = timeline.loads(buffers);
    let best = quick(buffers, &timeline, &loads, 0);
    let load_bytes = loads.iter().copied().max().unwrap_or(0);
    let is_small = buffers.len() <= MAX_ARENA_SEARCH_BUFFERS && buffers.iter().all(|buffer| buffer.size_bytes > 0);
    if best.peak_bytes > load_bytes
        && is_small
        && let Ok(offsets) = search::search(buffers, load_bytes, None, 3 * buffers.len() as u64)
    {
        return Placement::from_offsets(buffers, offsets);
    }
    best
}

/// The best of the heuristics; stops early at a peak of `good_enough_bytes` or the load, whichever is more.
fn quick(buffers: &[Buffer], timeline: &Timeline, loads: &[u64], good_enough_bytes: u64) -> Placement {
    let target = good_enough_bytes.max(loads.iter().copied().max().unwrap_or(0));
    let mut best = linear_scan::place_along(buffers, timeline);
    let steps = if buffers.len() > MANY_BUFFERS { ARENA_STEPS / 10 } else { ARENA_STEPS };
    let mut budget = Budget { steps };
    for order in Order::ALL {
        if best.peak_bytes <= target {
            break;
        }
        // A buffer that would end above the best peak ends the attempt: it cannot win any more.
        let limit_bytes = best.peak_bytes - 1;
        let order = order.of(buffers, timeline, loads);
        if let Some(better) = first_fit::place_in_order(buffers, timeline, &order, limit_bytes, &mut budget) {
            best = better;
        }
    }
    best
}

/// Looks for a placement within the problem's capacity for at most `timeout`.
pub fn pack(problem: &Problem, timeout: Duration) -> Verdict {
    attempt(problem, timeout).0
}

/// [`pack`], and where more time would find no more: a capacity below which nothing is ever found, because a part too
/// large for the search ends there.
fn attempt(problem: &Problem, timeout: Duration) -> (Verdict, u64) {
    let deadline = Instant::now().checked_add(timeout);
    let (buffers, capacity_bytes) = (problem.buffers(), problem.capacity_bytes());
    let timeline = Timeline::new(buffers);
    let loads = timeline.loads(buffers);
    let load_bytes = loads.iter().copied().max().unwrap_or(0);
    if load_bytes > capacity_bytes {
        return (Verdict::Infeasible(Proof::Load { load_bytes }), 0);
    }
    let whole = quick(buffers, &timeline, &loads, capacity_bytes);
    if whole.peak_bytes <= capacity_bytes {
        return (Verdict::Solved(whole), 0);
    }
    let mut offsets = whole.offsets;
    let peak_bytes = |part: &[u32], offsets: &[u64]| {
        part.iter().map(|&i| offsets[i as usize] + buffers[i as usize].size_bytes).max().unwrap_or(0)
    };
    let mut parts = parts(buffers, &timeline);
    parts.retain(|part| peak_bytes(part, &offsets) > capacity_bytes);
    // Small parts first: should one of them not fit, that is proved soonest.
    parts.sort_by_key(Vec::len);
    let (mut is_limited, mut unsearched_bytes) = (false, 0);
    for part in parts {
        let members: Vec<Buffer> = part.iter().map(|&i| buffers[i as usize]).collect();
        if members.len() > MAX_SEARCH_BUFFERS {
            unsearched_bytes = unsearched_bytes.max(peak_bytes(&part, &offsets));
            continue;
        }
        match search::search(&members, capacity_bytes, deadline, u64::MAX) {
            Ok(found) => {
                for (&i, offset) in part.iter().zip(found) {
                    offsets[i as usize] = offset;
                }
            }
            Err(Exhausted::Proof) => return (Verdict::Infeasible(Proof::Exhausted), 0),
            Err(Exhausted::Limit) => is_limited = true,
        }
    }
    match (is_limited, unsearched_bytes) {
        (false, 0) => (Verdict::Solved(Placement::from_offsets(buffers, offsets)), 0),
        (false, least_bytes) => (Verdict::NotFound, least_bytes),
        (true, _) => (Verdict::NotFound, 0),
    }
}

/// Looks for the lowest peak for at most `timeout`, or until more time would change nothing.
///
/// The lower bound is tried first, since it is so often reached and ends the question; then capacities between bound
/// and peak, from above and below.
///
/// # Panics
/// If the buffers are no [`Problem`].
pub fn minimise(buffers: &[Buffer], timeout: Duration) -> Minimum {
    assert_valid(buffers);
    let start = Instant::now();
    let timeline = Timeline::new(buffers);
    let loads = timeline.loads(buffers);
    let mut lower_bound_bytes = loads.iter().copied().max().unwrap_or(0);
    let mut placement = quick(buffers, &timeline, &loads, 0);
    let problem = |capacity_bytes| Problem::new(buffers.to_vec(), capacity_bytes).expect("validated above");
    let mut share = timeout / 8;
    // The bound itself, then halfway between, each for a share of the time; a capacity not settled is left to the end.
    let mut floor = lower_bound_bytes;
    let mut capacity_bytes = lower_bound_bytes;
    // Nothing is ever found below this.
    let mut least_bytes = 0;
    while lower_bound_bytes.max(least_bytes) < placement.peak_bytes {
        let left = timeout.saturating_sub(start.elapsed());
        if left.is_zero() {
            break;
        }
        let (verdict, unsearched_bytes) = attempt(&problem(capacity_bytes), share.min(left));
        least_bytes = least_bytes.max(unsearched_bytes);
        match verdict {
            Verdict::Solved(better) => placement = better,
            Verdict::Infeasible(_) => {
                lower_bound_bytes = capacity_bytes + 1;
                floor = floor.max(lower_bound_bytes);
            }
            Verdict::NotFound => floor = floor.max(capacity_bytes + 1).max(least_bytes),
        }
        if floor >= placement.peak_bytes {
            // Everything below was tried once; begin again with more time each.
            floor = lower_bound_bytes.max(least_bytes);
            share = share.saturating_mul(2);
        }
        let gap = placement.peak_bytes.saturating_sub(floor);
        capacity_bytes = floor + gap / 2;
    }
    Minimum { placement, lower_bound_bytes }
}

/// The independent parts: buffers of different parts are never alive together. Buffers of no bytes are in none.
fn parts(buffers: &[Buffer], timeline: &Timeline) -> Vec<Vec<u32>> {
    let mut by_birth: Vec<u32> = (0..buffers.len() as u32).filter(|&i| buffers[i as usize].size_bytes > 0).collect();
    by_birth.sort_unstable_by_key(|&i| (timeline.spans[i as usize], i));
    let mut parts: Vec<Vec<u32>> = Vec::new();
    let mut part_end = 0;
    for i in by_birth {
        let (first, end) = timeline.spans[i as usize];
        match parts.last_mut() {
            Some(part) if first < part_end => part.push(i),
            _ => parts.push(vec![i]),
        }
        part_end = part_end.max(end);
    }
    parts
}

/// For the entry points that take a plain slice.
pub(super) fn assert_valid(buffers: &[Buffer]) {
    if let Err(error) = validate(buffers) {
        panic!("buffers to place are valid by construction of the caller: {error}");
    }
}
