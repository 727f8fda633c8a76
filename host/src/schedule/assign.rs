//! WHERE: which worker runs which tasks, in which order.
//!
//! Every worker's list is in program order, so the lists are live whatever the events (the earliest unfinished task is
//! always next on its worker's list with nothing left to wait for). The tasks of one operator are given out in runs of
//! neighbours, so that a worker streams neighbouring weights, balanced by what they cost rather than by their number.

use crate::graph::task::{TaskGraph, WorkerLists};

/// Gives the tasks of `graph` to `n_workers` workers; `cost[t]` is what task `t` costs, in any unit.
pub fn assign(graph: &TaskGraph, cost: &[u64], n_workers: u32) -> WorkerLists {
    let mut lists = vec![Vec::new(); n_workers as usize];
    for ends in graph.op_first.windows(2) {
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
