//! The feasible memory scheduler on plain graphs.
//!
//! In goes a [`Graph`]: ops on a data engine and a compute engine, each op making one buffer in a small memory out of
//! the buffers of others. Out comes a [`Schedule`]: a start for every op, an offset for every buffer, and what is
//! spilled meanwhile. It follows the scheduler of the VPUX compiler (OpenVINO's NPU plugin, `FeasibleMemoryScheduler`),
//! in three steps:
//!
//! 1. a run without prefetch finds an order of the compute ops and when each runs ([`run`]);
//! 2. prefetch edges are derived from it: which compute op must have retired before a load may start ([`prefetch`]);
//! 3. a second run with these edges lets the data engine work ahead.
//!
//! The better of the two runs is kept, so prefetching never makes a schedule later. A run without spills is better than
//! any run with them, then the shorter one is, then the one with fewer spills. Both runs depend on a ranking of the
//! compute ops; several are tried, and for small graphs the best one is improved by exchanging neighbours, because
//! there it is cheap. Everything is deterministic.
//!
//! *Spills only where nothing else fits*: a graph need not spill if its ops can run in some order, each output at one
//! offset from its op's start to its last user's end (an output nobody uses: to the makespan). Finding such an order is
//! as hard as packing, so this is a goal, not a law: a run spills only where its own order leaves no room, and of all
//! that are tried one without spills is kept, however short the others are. The tests hold it against exhaustive
//! search.
//!
//! A run takes a few look-ups an op, in a bit set of what is ready and in the few gaps of memory; only a window of
//! victims is found by looking at all buffers on chip.
//!
//! PERF: 100 000 ops in 30 ms and a million in 0.34 s, without spills (`bench_memory`'s tiles through a ring); layers
//! of ops in a memory so tight that one op in three is spilled, 5 us an op. One core of a 2-core Xeon, November 2026.
//!
//! Laws, judged by [`check`], which shares no code with the scheduler:
//! 1. each op runs once, for its cycles; each engine does one thing at a time;
//! 2. an op starts when all its inputs are complete and resident, and they stay resident until it ends;
//! 3. buffers that hold bytes at the same time hold different ones, below the capacity and at aligned offsets;
//! 4. a buffer holds its bytes from its op's start to its last user's end (an output nobody uses: to the makespan)
//!    except from `write_end` to `read_start` of a spill. Only outputs of data ops are dropped without a write. Where
//!    the outputs nobody uses do not all fit, those left outside have `read_start == read_end == makespan`: never read
//!    back.

pub mod check;
mod graph;
pub mod json;
mod prefetch;
mod rank_set;
mod run;

pub use graph::{Graph, GraphError, Kind, Op};

use crate::random::split_mix;
use run::{Policy, Preference, Run, Start, Trace};

/// When an op runs and where its output first lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placed {
    /// In cycles.
    pub start: u64,
    /// `start` and the op's cycles.
    pub end: u64,
    /// In bytes.
    pub offset: u64,
}

/// An output that leaves the chip for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spill {
    /// Whose output.
    pub op: u32,
    /// When the data engine begins to save it.
    pub write_start: u64,
    /// From here on it holds nothing; equal to `write_start` where it is dropped because it can be loaded again.
    pub write_end: u64,
    /// From here on it holds `offset..offset + bytes`.
    pub read_start: u64,
    /// From here on it can be used.
    pub read_end: u64,
    /// Where it comes back to.
    pub offset: u64,
}

/// A load that is allowed ahead of its need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefetchEdge {
    /// The data op.
    pub data: u32,
    /// The compute op that must have retired before it starts.
    pub after: u32,
}

/// What the scheduler decides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// Parallel to the graph's ops.
    pub ops: Vec<Placed>,
    /// In the order of their decision.
    pub spills: Vec<Spill>,
    /// Empty where the run without prefetch was no worse.
    pub prefetch_edges: Vec<PrefetchEdge>,
    /// When everything is done.
    pub makespan: u64,
    /// The most bytes held at any one time.
    pub peak_bytes: u64,
    /// The makespan of the best run without prefetch, and without spills where the schedule has none; of the schedule
    /// itself, where all such runs spill.
    pub without_prefetch_makespan: u64,
}

/// Graphs up to this size are given several rankings.
const MAX_PORTFOLIO_OPS: usize = 20_000;
/// Ops that may be placed altogether while a small graph's ranking is improved.
const IMPROVEMENT_STEPS: usize = 20_000;
/// Exchanges in a row that may bring nothing.
const MAX_STALLED: usize = 120;
/// Likewise while the best schedule spills: what needs no spill shall have none.
const MAX_STALLED_SPILLING: usize = 500;
/// Graphs up to this size are improved at all, so fewer than [`MAX_PORTFOLIO_OPS`].
const MAX_IMPROVED_OPS: usize = 256;

/// Schedules a graph.
pub fn schedule(graph: &Graph) -> Schedule {
    let n = graph.ops.len();
    let start = Start::new(graph);
    let policy = |ranks, preference| Policy { ranks, preference };
    let mut best = attempt(graph, &start, &policy(order_ranks(graph), Preference::Active));
    if n <= MAX_PORTFOLIO_OPS {
        let bound = graph.lower_bound_cycles();
        let tails = tail_ranks(graph);
        for (ranks, preference) in
            [(tails.clone(), Preference::Active), (tails, Preference::Rank), (order_ranks(graph), Preference::Rank)]
        {
            if best.may_improve(bound) {
                best.keep(attempt(graph, &start, &policy(ranks, preference)));
            }
        }
        if n <= MAX_IMPROVED_OPS {
            improve(graph, &start, &mut best, bound);
        }
    }
    best.into_schedule(graph)
}

/// The best of two runs, and the best without prefetch.
struct Attempt {
    trace: Trace,
    /// Whether the best run without prefetch spills, and its makespan.
    without_prefetch: (bool, u64),
}

/// What makes a run better: less of this.
fn key(trace: &Trace) -> (bool, u64, usize) {
    (!trace.spills.is_empty(), trace.makespan, trace.spills.len())
}

fn attempt(graph: &Graph, start: &Start, policy: &Policy) -> Attempt {
    let first = Run::new(start, &policy.ranks).without_prefetch(policy.preference);
    let edges = prefetch::edges(graph, &first);
    let mut positions = vec![u32::MAX; graph.ops.len()];
    for (idx, &op) in (0u32..).zip(&first.compute_order) {
        positions[op as usize] = idx;
    }
    let second = Run::new(start, &positions).with_prefetch(&first, &edges);
    let without_prefetch = (!first.spills.is_empty(), first.makespan);
    let is_better = key(&second) <= key(&first);
    Attempt { trace: if is_better { second } else { first }, without_prefetch }
}

impl Attempt {
    /// Keeps what is better of either.
    fn keep(&mut self, other: Attempt) {
        self.without_prefetch = self.without_prefetch.min(other.without_prefetch);
        if key(&other.trace) < key(&self.trace) {
            self.trace = other.trace;
        }
    }

    /// Whether a better run is not ruled out.
    fn may_improve(&self, bound: u64) -> bool {
        self.trace.makespan > bound || !self.trace.spills.is_empty()
    }

    fn into_schedule(self, graph: &Graph) -> Schedule {
        let Trace { ops, spills, prefetch_edges, makespan, .. } = self.trace;
        // Runs that spill are no measure of one that does not.
        let without_prefetch_makespan = match self.without_prefetch {
            (true, _) if spills.is_empty() => makespan,
            (_, without) => without,
        };
        let mut schedule = Schedule { ops, spills, prefetch_edges, makespan, peak_bytes: 0, without_prefetch_makespan };
        let mut held = 0;
        schedule.peak_bytes = schedule.changes(graph).iter().fold(0, |peak: i64, &(_, change)| {
            held += change;
            peak.max(held)
        }) as u64;
        schedule
    }
}

/// Hill climbing: random exchanges in the order in which compute ops ran, kept when there are no more spills and
/// then the schedule is no longer.
fn improve(graph: &Graph, start: &Start, best: &mut Attempt, bound: u64) {
    let n = graph.ops.len();
    let mut order = best.trace.compute_order.clone();
    let mut state = 0x5eed;
    let mut random = |below: usize| split_mix(&mut state) as usize % below;
    if order.len() < 2 {
        return;
    }
    let mut current = (best.trace.spills.len(), best.trace.makespan);
    let mut n_stalled = 0;
    for _ in 0..IMPROVEMENT_STEPS / n.max(1) {
        let max_stalled = if best.trace.spills.is_empty() { MAX_STALLED } else { MAX_STALLED_SPILLING };
        if !best.may_improve(bound) || n_stalled > max_stalled {
            break;
        }
        n_stalled += 1;
        let mut tried = order.clone();
        let moved = tried.remove(random(order.len()));
        tried.insert(random(order.len()), moved);
        let mut ranks = vec![0; n];
        for (rank, &op) in tried.iter().enumerate() {
            ranks[op as usize] = rank as u32;
        }
        let other = attempt(graph, start, &Policy { ranks, preference: Preference::Rank });
        // Fewer spills lead to none.
        let found = (other.trace.spills.len(), other.trace.makespan);
        if found <= current {
            current = found;
            order.clone_from(&other.trace.compute_order);
        }
        if key(&other.trace) < key(&best.trace) {
            n_stalled = 0;
        }
        best.keep(other);
    }
}

/// Compute ops as the graph lists them, or as near as its inputs allow.
fn order_ranks(graph: &Graph) -> Vec<u32> {
    (0..graph.ops.len() as u32).collect()
}

/// Compute ops with the longest path behind them first.
fn tail_ranks(graph: &Graph) -> Vec<u32> {
    let mut tails = vec![0u64; graph.ops.len()];
    for &op in graph.topological.iter().rev() {
        let after = graph.consumers(op).iter().map(|&consumer| tails[consumer as usize]).max().unwrap_or(0);
        tails[op as usize] = after + graph.ops[op as usize].cycles;
    }
    let mut order: Vec<u32> = (0..graph.ops.len() as u32).collect();
    order.sort_by_key(|&op| u64::MAX - tails[op as usize]);
    let mut ranks = vec![0; order.len()];
    for (rank, op) in order.into_iter().enumerate() {
        ranks[op as usize] = rank as u32;
    }
    ranks
}

impl Schedule {
    /// When how many bytes begin or cease to be held: in time order, and of one time those that cease first.
    ///
    /// Each engine runs its ops mostly in the order of the list, so what is pushed is a few ascending runs, which a
    /// stable sort only merges.
    fn changes(&self, graph: &Graph) -> Vec<(u64, i64)> {
        // No graph's bytes sum to 2^63.
        let bytes = |op: u32| graph.ops[op as usize].bytes as i64;
        let mut changes = Vec::with_capacity(2 * (self.ops.len() + self.spills.len()));
        for op in 0..self.ops.len() as u32 {
            let users = graph.consumers(op);
            let end = users.iter().map(|&user| self.ops[user as usize].end).max().unwrap_or(self.makespan);
            changes.push((end, -bytes(op)));
        }
        changes.extend(self.spills.iter().map(|spill| (spill.write_end, -bytes(spill.op))));
        for kind in [Kind::Compute, Kind::Data] {
            let placed = (0u32..).zip(&self.ops).filter(|&(op, _)| graph.ops[op as usize].kind == kind);
            changes.extend(placed.map(|(op, placed)| (placed.start, bytes(op))));
        }
        changes.extend(self.spills.iter().map(|spill| (spill.read_start, bytes(spill.op))));
        changes.sort_by_key(|change| change.0);
        changes
    }
}
