//! Prefetch edges: how early each load may start, from a run that shows when each compute op runs.
//!
//! The first run says, for each position of the compute order, how many bytes are on chip then apart from the loads
//! made for it. Walking the loads in the order of need, each gets the earliest position at which it fits beside
//! everything: the bytes of every position from there to its consumer, and all loads that are on chip by then and still
//! unused. The data engine works in order, so these positions never decrease and one pass with a sliding maximum finds
//! them all, however many levels deep the memory allows.

use std::collections::VecDeque;

use super::graph::Graph;
use super::run::Trace;

/// A data op and the position of the compute op it is brought in for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) op: u32,
    pub(super) position: u32,
}

/// For each load of the run, how many compute ops must have retired before it may start. O(loads + compute ops).
pub(super) fn edges(graph: &Graph, first: &Trace) -> Vec<u32> {
    let base = &first.base_bytes;
    let mut edges = Vec::with_capacity(first.loads.len());
    // The window is `from..to`; `falling` holds positions in it whose bytes are more than those of all later ones.
    let (mut from, mut to) = (0u32, 0u32);
    let mut falling: VecDeque<u32> = VecDeque::new();
    let mut unused_bytes = 0u64;
    let mut used_loads = 0;
    for (idx, load) in first.loads.iter().enumerate() {
        while to < load.position {
            while falling.back().is_some_and(|&back| base[back as usize] <= base[to as usize]) {
                falling.pop_back();
            }
            falling.push_back(to);
            to += 1;
        }
        let own_bytes = graph.ops[load.op as usize].bytes.next_multiple_of(graph.alignment);
        unused_bytes += own_bytes;
        while from < load.position {
            let most = falling.front().map_or(0, |&front| base[front as usize]);
            if unused_bytes + most <= graph.capacity_bytes {
                break;
            }
            // Not before position `from` has retired; loads made for it are part of what comes after, or dead.
            from += 1;
            while falling.front().is_some_and(|&front| front < from) {
                falling.pop_front();
            }
            while used_loads < idx && first.loads[used_loads].position < from {
                let used = first.loads[used_loads].op;
                unused_bytes -= graph.ops[used as usize].bytes.next_multiple_of(graph.alignment);
                used_loads += 1;
            }
        }
        edges.push(from);
    }
    edges
}
