//! The task graph: one task per block, and the events that order them: WHAT WAITS for what.
//!
//! [`lower`] takes a [`ThreadBlockGraph`] to a [`TaskGraph`]; [`check()`] judges the result and shares no code with it.
//!
//! # Laws
//!
//! 1. *Complete.* Two tasks of different operators whose regions share a byte, at least one of them writing (and not
//!    both adding), run in program order: a chain of events leads from the earlier to the later.
//! 2. *Exact.* A task is made to wait for no task that law 1 and transitivity do not order before it, unless the exact
//!    events would cost more than [`Config::max_entries_per_part`] allows; [`Stats::oversync`] says by how much.
//! 3. *Live.* Events and tasks form no cycle, every event gets exactly its `num_triggers`, and worker lists in which
//!    every task follows the tasks it waits for can be run to their end ([`simulate`]).
//!
//! # How
//!
//! - `region`: every buffer gets axes in which each tensor of the buffer is a product of sets, so that what a
//!   block touches is a set per axis, and two blocks overlap when their sets meet on every axis.
//! - Per operator and buffer, each access is compared with the older accesses that are still *live* where it looks: a
//!   newer conflicting access supersedes an older one exactly on the bytes it covers. Only direct predecessors remain,
//!   and all other conflicts are ordered through them, byte by byte.
//! - The relation between the blocks of two operators is kept as a product over axes and never as pairs; a factor is
//!   found by one sweep over sorted runs of bytes, once for all layers that repeat it.
//! - Orderings that follow from nearer ones are dropped; the rest become events, one per distinct set of producers.
//!
//! Time and space are linear in tasks, waits and triggers.

mod build;
mod check;
pub mod dot;
mod family;
pub mod json;
mod operands;
mod order;
mod region;
mod relation;
pub mod svg;
mod worker;

pub use build::lower;
pub use check::{Violation, check, waited_and_needed};
pub use operands::{bytes_from_memory, task_costs, task_operands};
pub(crate) use order::{Before, OpSet, Reach};
pub use worker::{Stall, Stuck, WorkerLists, assign_round_robin, elide, simulate};

use super::threadblock::{self, GRID_AXES};
use std::fmt;

/// One task: a block of an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task {
    /// The operator's index in the thread-block graph.
    pub op: u32,
    /// The block's index in the operator's grid.
    pub block: [u32; GRID_AXES],
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.block;
        write!(f, "op{}[{x},{y},{z}]", self.op)
    }
}

/// Lists of ids, in one allocation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lists {
    /// Where list `i` starts; one entry more than there are lists.
    pub heads: Vec<u32>,
    /// The entries.
    pub entries: Vec<u32>,
}

impl Default for Lists {
    fn default() -> Self {
        Lists { heads: vec![0], entries: Vec::new() }
    }
}

impl Lists {
    /// List `i`.
    pub fn of(&self, i: usize) -> &[u32] {
        &self.entries[self.heads[i] as usize..self.heads[i + 1] as usize]
    }

    /// How many lists there are.
    pub fn len(&self) -> usize {
        self.heads.len().saturating_sub(1)
    }

    /// Whether there is no list.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends a list.
    pub fn push(&mut self, list: &[u32]) {
        self.entries.extend_from_slice(list);
        self.end_list();
    }

    /// Ends the list that the entries pushed since the last end make up.
    pub(crate) fn end_list(&mut self) {
        self.heads.push(self.entries.len() as u32);
    }

    /// The lists turned round: list `k` of the result has every `i` whose list here has `k`, in ascending order.
    pub fn inverted(&self, n_keys: usize) -> Lists {
        let mut heads = vec![0u32; n_keys + 1];
        for &key in &self.entries {
            heads[key as usize + 1] += 1;
        }
        for key in 0..n_keys {
            heads[key + 1] += heads[key];
        }
        let mut at = heads.clone();
        let mut entries = vec![0u32; self.entries.len()];
        for i in 0..self.len() {
            for &key in self.of(i) {
                entries[at[key as usize] as usize] = i as u32;
                at[key as usize] += 1;
            }
        }
        Lists { heads, entries }
    }
}

/// How a task gets to its worker. MPK: `TaskDesc` launch modes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TaskClass {
    /// It stands in a worker's list from the start and waits there for its events.
    #[default]
    AheadOfTime,
    /// A scheduler gives it to a worker when its last event fires; it stands in no worker's list.
    JustInTime,
    /// Ends an iteration: it comes after everything else. A compiled program's last operator, `advance`.
    EndIteration,
}

impl TaskClass {
    /// The name used in text forms.
    pub const fn name(self) -> &'static str {
        match self {
            TaskClass::AheadOfTime => "ahead-of-time",
            TaskClass::JustInTime => "just-in-time",
            TaskClass::EndIteration => "end",
        }
    }
}

/// Tasks and events.
#[derive(Clone, Debug, Default, PartialEq)]
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
    /// Per operator, how its tasks get to their workers.
    pub classes: Vec<TaskClass>,
    /// What was counted on the way.
    pub stats: Stats,
}

impl TaskGraph {
    /// Tasks that no event makes anyone wait for, in order: what the end of an iteration has to wait for.
    pub fn leaves(&self) -> Vec<u32> {
        (0..self.tasks.len() as u32).filter(|t| self.triggers.of(*t as usize).is_empty()).collect()
    }

    /// The tasks of operator `op`.
    pub fn tasks_of(&self, op: usize) -> std::ops::Range<u32> {
        self.op_first[op]..self.op_first[op + 1]
    }

    /// Why operator `op` cannot be launched just in time, if it cannot, wherever it stands.
    pub fn why_not_launched(&self, op: usize) -> Option<&'static str> {
        let has_no_wait = self.tasks_of(op).any(|task| self.waits.of(task as usize).is_empty());
        has_no_wait.then_some("a task of it waits for no other, so no event would launch it")
    }
}

/// Figures of a task graph.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Operators.
    pub ops: u64,
    /// Tasks.
    pub tasks: u64,
    /// Events.
    pub events: u64,
    /// Waits of all tasks.
    pub waits: u64,
    /// Triggers of all tasks.
    pub triggers: u64,
    /// Pairs of tasks that overlap directly and whose order no nearer pair implies, operator by operator.
    pub pairs: u64,
    /// Pairs of tasks the events order directly.
    pub waited_pairs: u64,
    /// `waited_pairs / pairs`: 1 when no task waits for one it does not need.
    pub oversync: f64,
    /// Operator pairs that conflict directly.
    pub edges: u64,
    /// Of these, dropped because nearer orderings imply them.
    pub implied_edges: u64,
    /// The median number of waits of a task.
    pub median_waits: u32,
    /// The largest number of waits of a task.
    pub max_waits: u32,
}

/// What a wait, a trigger and an event cost next to each other, in units of one trigger.
///
/// A trigger is one release-add to L2 that nobody waits for. A wait is a polled load the task cannot start without,
/// about one L2 round trip even when the event has fired. An event is four bytes that must be in L2.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// One wait.
    pub wait: f64,
    /// One trigger.
    pub trigger: f64,
    /// One event.
    pub event: f64,
}

impl Default for Costs {
    fn default() -> Self {
        Costs { wait: 4.0, trigger: 1.0, event: 0.25 }
    }
}

/// Choices of [`lower`].
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Weighs one way of saying an exact relation in events against another.
    pub costs: Costs,
    /// An exact relation on one axis that needs more waits and triggers than this per part on it is coarsened to "all
    /// before all": the only place where exactness is given up. Relations of regular cuts need at most 4.
    pub max_entries_per_part: u32,
    /// Operators that are not [`TaskClass::AheadOfTime`].
    pub classes: Vec<(u32, TaskClass)>,
    /// A rule to break, so that tests can show that breaking it is noticed.
    #[doc(hidden)]
    pub defect: Option<Defect>,
}

impl Default for Config {
    fn default() -> Self {
        Config { costs: Costs::default(), max_entries_per_part: 64, classes: Vec::new(), defect: None }
    }
}

/// A way to be wrong.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Defect {
    /// Writes do not wait for earlier readers.
    DropWar,
    /// Writes do not wait for earlier writers.
    DropWaw,
    /// Only the first tensor between two operators counts.
    FirstTensorOnly,
    /// An edge goes when any other path of operators joins its ends, aligned or not.
    StripResiduals,
    /// A write hides all of an older access that it touches.
    SupersedeWhole,
}

/// Two blocks of one operator touch the same bytes and one of them writes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "operator {op}: blocks {blocks:?} touch the same bytes of buffer {buffer}, through tensor {first} and tensor {second}, and one of them writes; the blocks of one operator are not ordered"
)]
pub struct BlocksConflict {
    /// The operator.
    pub op: String,
    /// Two of its blocks.
    pub blocks: [[u32; GRID_AXES]; 2],
    /// The buffer.
    pub buffer: String,
    /// The tensor of the first block.
    pub first: String,
    /// The tensor of the second block.
    pub second: String,
}

/// Why a graph has no task graph.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TaskError {
    /// Laws of the thread-block graph that it breaks.
    #[error("{}", .0.iter().map(|v| v.to_string()).collect::<Vec<_>>().join("; "))]
    Graph(Vec<threadblock::Violation>),
    /// Two blocks of one operator touch the same bytes and one of them writes.
    #[error(transparent)]
    BlocksConflict(Box<BlocksConflict>),
    /// More tasks than an image holds.
    #[error("operator {op}: the graph has more than {} tasks here", perpetua_shared::limits::MAX_TASKS)]
    TooManyTasks {
        /// The operator at which the bound is passed.
        op: String,
    },
    /// A tensor leaves its buffer.
    #[error("operator {op}: tensor {tensor} ends at byte {end}, but its buffer {buffer} has {bytes}")]
    OutOfBounds {
        /// The operator.
        op: String,
        /// The tensor.
        tensor: String,
        /// Its end, or the largest number below it.
        end: u64,
        /// The buffer.
        buffer: String,
        /// The buffer's size.
        bytes: u64,
    },
    /// Shape and strides of different lengths, or a buffer that does not exist.
    #[error("operator {op}: tensor {tensor}: {what}")]
    Malformed {
        /// The operator.
        op: String,
        /// The tensor.
        tensor: String,
        /// What is wrong, what is expected.
        what: String,
    },
    /// Regions in more pieces than can be compared.
    #[error(
        "operator {op}: tensor {tensor} lies in more than {limit} separate runs of bytes on one axis of its buffer, because no stride is common to all tensors of the buffer"
    )]
    Fragmented {
        /// The operator.
        op: String,
        /// The tensor.
        tensor: String,
        /// The most runs.
        limit: usize,
    },
}
