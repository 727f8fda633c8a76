//! WHERE: which worker runs which tasks, in which order.
//!
//! Every worker's list is in program order, so the lists are live whatever the events (the earliest unfinished task is
//! always next on its worker's list with nothing left to wait for). The tasks of one operator are given out in runs of
//! neighbours, so that a worker streams neighbouring weights, balanced by what they cost rather than by their number.

use crate::graph::task::{TaskClass, TaskGraph, WorkerLists};
use crate::graph::tensor::{DTensor, row_major};
use crate::graph::threadblock::{Access, ThreadBlockGraph};
use perpetua_device::kernels::{GatedLinear, Linear, Numbered, linear};
use std::cmp::Reverse;

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

/// Per operator, the earlier operator whose blocks its own go with: block `b` reads what block `b` there wrote, so that on
/// one worker the two need no hop between them. Itself, where there is none.
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

/// Whether operators `a` and `b` are products of the same activations.
fn are_side_by_side(blocks: &ThreadBlockGraph, a: usize, b: usize) -> bool {
    let x_of = |op: usize| {
        let is_product = |task_type: u16| [Linear::TASK_TYPE, GatedLinear::TASK_TYPE].contains(&task_type);
        let op = &blocks.ops[op];
        op.kernel.filter(|kernel| is_product(kernel.task_type)).and_then(|_| op.accesses[linear::slot::X].as_ref())
    };
    x_of(a).zip(x_of(b)).is_some_and(|(a, b)| a.tensor == b.tensor)
}

/// Whether two accesses with the same map give a block the same bytes: of one tensor, or of two whose first dimension alone
/// is cut, over all of one buffer.
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
/// Who has had less than another by more than `ahead`, what a worker can take in before its turn, had nothing to do meanwhile and
/// cannot make up for that: given more than its part of what comes next, it would keep the others waiting.
pub fn balance(blocks: &ThreadBlockGraph, graph: &TaskGraph, cost: &[u64], n_workers: u32, ahead: u64) -> WorkerLists {
    let leaders = leaders(blocks, graph);
    let mut group_cost: Vec<Vec<u64>> = vec![Vec::new(); leaders.len()];
    for (op, leader) in leaders.iter().enumerate() {
        let of_leader = &mut group_cost[*leader];
        of_leader.resize(graph.tasks_of(op).len(), 0);
        graph.tasks_of(op).zip(of_leader).for_each(|(task, sum)| *sum += cost[task as usize]);
    }
    let mut lists = vec![Vec::new(); n_workers as usize];
    let (mut load, mut has_one) = (vec![0u64; n_workers as usize], vec![false; n_workers as usize]);
    let mut places: Vec<Vec<u32>> = vec![Vec::new(); leaders.len()];
    let (mut order, mut most) = (Vec::new(), 0u64);
    for (op, &leader) in leaders.iter().enumerate().filter(|(op, _)| !is_launched(graph, *op)) {
        let n = graph.tasks_of(op).len();
        if leader == op {
            order.clear();
            order.extend(0..n);
            order.sort_by_key(|block| Reverse(group_cost[op][*block]));
            places[op].resize(n, 0);
            let least = most.saturating_sub(ahead);
            if op == 0 || !are_side_by_side(blocks, op - 1, op) {
                has_one.fill(false);
            }
            // No worker gets a second block before each has one, of all that run side by side.
            for round in order.chunks(n_workers as usize) {
                let mut turns: Vec<u32> = (0..n_workers).collect();
                turns.sort_by_key(|worker| (has_one[*worker as usize], load[*worker as usize], *worker));
                for (block, worker) in round.iter().zip(turns) {
                    places[op][*block] = worker;
                    has_one[worker as usize] = true;
                    let sum = &mut load[worker as usize];
                    *sum = (*sum).max(least) + group_cost[op][*block];
                    most = most.max(*sum);
                }
            }
        }
        for (block, task) in graph.tasks_of(op).enumerate() {
            lists[places[leader][block] as usize].push(task);
        }
    }
    WorkerLists { lists }
}
