//! WHERE: which worker runs which tasks, in which order.
//!
//! Every worker's list is in program order, so the lists are live whatever the events (the earliest unfinished task is
//! always next on its worker's list with nothing left to wait for). The tasks of one operator are given out in runs of
//! neighbours, so that a worker streams neighbouring weights, balanced by what they cost rather than by their number.

use crate::graph::task::{TaskClass, TaskGraph, WorkerLists};
use crate::graph::tensor::{DTensor, row_major};
use crate::graph::threadblock::{Access, ThreadBlockGraph};
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// Gives the tasks of `graph` to `n_workers` workers; `cost[t]` is what task `t` costs, in any unit.
pub fn assign(graph: &TaskGraph, cost: &[u64], n_workers: u32) -> WorkerLists {
    let mut lists = vec![Vec::new(); n_workers as usize];
    for (op, ends) in graph.op_first.windows(2).enumerate() {
        if is_launched(graph, op) {
            continue;
        }
        let tasks = ends[0]..ends[1];
        let total: u128 = cost[tasks.start as usize..tasks.end as usize].iter().map(|c| u128::from(*c) + 1).sum();
        let few = tasks.len() < n_workers as usize;
        let mut before = 0u128;
        for (at, task) in tasks.clone().enumerate() {
            let own = u128::from(cost[task as usize]) + 1;
            // The worker into whose share of the operator's cost the middle of the task falls.
            let worker = if few {
                at * n_workers as usize / tasks.len()
            } else {
                ((before + own / 2) * u128::from(n_workers) / total) as usize
            };
            lists[worker].push(task);
            before += own;
        }
    }
    WorkerLists { lists }
}

/// Whether a scheduler launches the tasks of operator `op`: they are in no list.
fn is_launched(graph: &TaskGraph, op: usize) -> bool {
    graph.classes.get(op) == Some(&TaskClass::JustInTime)
}

/// Per operator, the earlier operator whose blocks its own go with: block `b` reads what block `b` there wrote, so that
/// on one worker the two need no hop between them. Itself, where there is none.
fn leaders(blocks: &ThreadBlockGraph, graph: &TaskGraph) -> Vec<usize> {
    let mut writers: Vec<Option<(usize, &Access)>> = vec![None; blocks.table.buffers.len()];
    let mut leaders: Vec<usize> = (0..blocks.ops.len()).collect();
    for (number, op) in blocks.ops.iter().enumerate() {
        for access in op.accesses.iter().flatten().filter(|access| access.kind.reads()) {
            let Some((writer, written)) = writers[blocks.table[access.tensor].buffer.idx()] else { continue };
            if is_launched(graph, number) || is_launched(graph, writer) {
                continue;
            }
            let cut_apart = access.map.iter().zip(op.grid).all(|(dim, n)| n == 1 || dim.is_some());
            let alike = written.map == access.map && sees_alike(blocks, written, access);
            if alike && cut_apart && blocks.ops[writer].grid == op.grid && op.n_blocks() > 1 {
                leaders[number] = leaders[writer];
                break;
            }
        }
        for access in op.accesses.iter().flatten().filter(|access| access.kind.writes()) {
            writers[blocks.table[access.tensor].buffer.idx()] = Some((number, access));
        }
    }
    leaders
}

/// Per operator, the operators of the longest chain of events that leads to it. Those of one level run side by side.
fn levels(graph: &TaskGraph) -> Vec<u32> {
    let mut of_event = vec![0u32; graph.events.len()];
    let mut levels = Vec::with_capacity(graph.op_first.len());
    for op in 0..graph.op_first.len() - 1 {
        let tasks = || graph.tasks_of(op).map(|task| task as usize);
        let level = tasks().flat_map(|task| graph.waits.of(task)).map(|event| of_event[*event as usize]).max();
        let level = level.unwrap_or(0);
        for event in tasks().flat_map(|task| graph.triggers.of(task)) {
            let fired = &mut of_event[*event as usize];
            *fired = (level + 1).max(*fired);
        }
        levels.push(level);
    }
    levels
}

/// Whether two accesses with the same map give a block the same bytes: of one tensor, or of two whose first dimension
/// alone is cut, over all of one buffer.
fn sees_alike(blocks: &ThreadBlockGraph, a: &Access, b: &Access) -> bool {
    let (x, y) = (&blocks.table[a.tensor], &blocks.table[b.tensor]);
    let first_only = a.map.iter().flatten().all(|dim| *dim == 0);
    let whole = |t: &DTensor| t.offset_elems == 0 && t.strides == row_major(&t.shape);
    a.tensor == b.tensor
        || first_only && whole(x) && whole(y) && x.shape[0] == y.shape[0] && x.len_elems() == y.len_elems()
}

/// Gives the tasks of `graph` to `n_workers` workers so that all have cost as even as can be after every operator, not
/// only at the end: the costliest block goes to the worker with the least so far. Blocks that read what a block of the
/// same number wrote follow it, and are part of its cost. Lists are in program order, as those of [`assign`].
///
/// Who has had less than another by more than it can take in [ahead](Slack::ahead) had nothing to do meanwhile and
/// cannot make up for that: given more than its part of what comes next, it would keep the others waiting.
///
/// A kernel with fewer blocks than workers stays with those that have run it: an SM holds the code of about one layer,
/// and who gets the attention of every third only has to fetch it each time. Who runs it first are those with the
/// fewest other kernels. Operators of one block that cost less than a [hop](Slack::hop) stay with one worker, since
/// those that follow each other need none there.
pub fn balance(
    blocks: &ThreadBlockGraph,
    graph: &TaskGraph,
    cost: &[u64],
    n_workers: u32,
    Slack { ahead, hop }: Slack,
) -> WorkerLists {
    let (leaders, levels) = (leaders(blocks, graph), levels(graph));
    let mut group_cost: Vec<Vec<u64>> = vec![Vec::new(); leaders.len()];
    for (op, leader) in leaders.iter().enumerate() {
        let of_leader = &mut group_cost[*leader];
        of_leader.resize(graph.tasks_of(op).len(), 0);
        graph.tasks_of(op).zip(of_leader).for_each(|(task, sum)| *sum += cost[task as usize]);
    }
    let mut workers = vec![Worker::default(); n_workers as usize];
    let mut places: Vec<Vec<u32>> = vec![Vec::new(); leaders.len()];
    let (mut order, mut most) = (Vec::new(), 0u64);
    for (op, &leader) in leaders.iter().enumerate().filter(|(op, _)| !is_launched(graph, *op)) {
        let n = graph.tasks_of(op).len();
        let kernel = blocks.ops[op].kernel.map(|kernel| kernel.task_type);
        let is_small = n == 1 && group_cost[leader][0] <= hop;
        if leader == op {
            order.clear();
            order.extend(0..n);
            order.sort_by_key(|block| Reverse(group_cost[op][*block]));
            places[op].resize(n, 0);
            let least = most.saturating_sub(ahead);
            // No worker gets a second block before each has one, of all that run side by side.
            for round in order.chunks(n_workers as usize) {
                let mut turns: Vec<u32> = (0..n_workers).collect();
                turns.sort_by_cached_key(|&number| {
                    let worker = &workers[number as usize];
                    let hands_over = is_small && worker.has_small;
                    (worker.levels.contains(&levels[op]), !hands_over, worker.new_beside(kernel), worker.load, number)
                });
                for (block, number) in round.iter().zip(turns) {
                    places[op][*block] = number;
                    let load = &mut workers[number as usize].load;
                    *load = (*load).max(least) + group_cost[op][*block];
                    most = most.max(*load);
                }
            }
        }
        for (block, task) in graph.tasks_of(op).enumerate() {
            let worker = &mut workers[places[leader][block] as usize];
            worker.list.push(task);
            worker.levels.insert(levels[op]);
            worker.kernels.extend(kernel);
            worker.has_small |= is_small;
        }
    }
    WorkerLists { lists: workers.into_iter().map(|worker| worker.list).collect() }
}

/// What [`balance`] weighs even cost against, in the same unit.
#[derive(Clone, Copy, Debug)]
pub struct Slack {
    /// What a worker can take in before its turn.
    pub ahead: u64,
    /// What a worker does in the time of a hop.
    pub hop: u64,
}

/// What a worker has been given so far.
#[derive(Clone, Default)]
struct Worker {
    list: Vec<u32>,
    /// The cost of it, and of what it had nothing to do for.
    load: u64,
    /// Of which levels it has blocks.
    levels: BTreeSet<u32>,
    /// Whether it has those operators that are a block each and cost less than a hop.
    has_small: bool,
    /// Which macro kernels it runs.
    kernels: BTreeSet<u16>,
}

impl Worker {
    /// Beside how many other kernels `kernel` would be new here; nothing where it is not new, or there is none.
    fn new_beside(&self, kernel: Option<u16>) -> Option<usize> {
        let is_new = kernel.is_some_and(|kernel| !self.kernels.contains(&kernel));
        is_new.then_some(self.kernels.len())
    }
}
