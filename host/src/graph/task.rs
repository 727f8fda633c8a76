//! The task graph: one task per block, and the events that order them.

use super::threadblock::{GRID_AXES, ThreadBlockGraph};

/// One task: a block of an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task {
    /// The operator's index in the thread-block graph.
    pub op: u32,
    /// The block's index in the operator's grid.
    pub block: [u32; GRID_AXES],
}

/// Lists of event ids, one per task, in one allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lists {
    /// Where list `i` starts; one entry more than there are lists.
    pub heads: Vec<u32>,
    /// The entries.
    pub entries: Vec<u32>,
}

impl Lists {
    /// List `i`.
    pub fn of(&self, i: usize) -> &[u32] {
        &self.entries[self.heads[i] as usize..self.heads[i + 1] as usize]
    }
}

/// Tasks and events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaskGraph {
    /// Tasks in program order: operator by operator, blocks in grid order (x fastest).
    pub tasks: Vec<Task>,
    /// First task of each operator, and the end.
    pub op_first: Vec<u32>,
    /// Per event, how many triggers make it fire.
    pub events: Vec<u32>,
    /// Per task, the events it waits on.
    pub waits: Lists,
    /// Per task, the events it triggers.
    pub triggers: Lists,
}

/// First version: one event per operator that a later one depends on, in either direction.
pub fn lower(graph: &ThreadBlockGraph) -> TaskGraph {
    let _ = graph;
    TaskGraph::default()
}
