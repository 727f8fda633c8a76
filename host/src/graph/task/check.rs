//! The judge of a task graph. It shares no code with [`lower`](super::lower()) and no idea of regions with it: it looks
//! at runs of bytes and at chains of events.
//!
//! *Which pairs must be ordered.* At one byte, put the accesses in program order and cut the list into groups that are
//! free among themselves: reads, or additions, or a single write. Neighbouring groups conflict pairwise, so each task
//! of one must come before each of the next; groups further apart are then ordered through those between. Checking the
//! neighbours at every byte therefore checks every conflicting pair. Bytes touched by the same accesses are looked at
//! once.
//!
//! *Rows.* Where all tensors of a buffer are rows of one length, two rows between the same cuts are touched by the same
//! tasks in the same columns; one of them is looked at.
//!
//! *Whether a pair is ordered.* By a search backwards from the later task, through its events to the tasks that trigger
//! them and so on; with worker lists also to the task before it on its worker.

use super::worker::{Stall, WorkerLists, simulate};
use super::{Lists, TaskClass, TaskGraph};
use crate::graph::tensor::{BufferId, TensorId};
use crate::graph::threadblock::{Access, AccessKind, BlockOp, ThreadBlockGraph};
use std::collections::{BTreeSet, HashSet};
use std::ops::Range;

/// A law a task graph breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// Tables that do not fit together.
    #[error("{0}")]
    Shape(String),
    /// Laws the thread-block graph itself breaks.
    #[error("{0}")]
    Graph(String),
    /// Law 1: two tasks touch the same bytes and nothing orders them.
    #[error(
        "task t{first} ({first_name}) and task t{second} ({second_name}) both touch bytes {}..{} of buffer {buffer}, as tensor {first_tensor} and tensor {second_tensor}, one of them writes, and {}", .bytes.start, .bytes.end,
        if *.same_op { "they are blocks of one operator" } else { "no chain of events orders them" }
    )]
    Unordered {
        /// The earlier task.
        first: u32,
        /// Its operator and block.
        first_name: String,
        /// The later task.
        second: u32,
        /// Its operator and block.
        second_name: String,
        /// The buffer.
        buffer: String,
        /// The earlier task's tensor.
        first_tensor: String,
        /// The later task's tensor.
        second_tensor: String,
        /// The first run of bytes both touch.
        bytes: Range<u64>,
        /// Whether they are blocks of one operator.
        same_op: bool,
    },
    /// Law 3: an event has another target than triggers.
    #[error("event e{event} fires at {target} triggers, but {triggers} tasks trigger it")]
    Count {
        /// The event.
        event: u32,
        /// Its target.
        target: u32,
        /// Tasks that trigger it.
        triggers: u32,
    },
    /// Law 3: tasks that wait on each other in a circle, with events and worker order taken together.
    #[error("{tasks} tasks wait on each other in a circle or behind one, task t{first} ({first_name}) among them")]
    Cycle {
        /// How many.
        tasks: u32,
        /// One of them.
        first: u32,
        /// Its operator and block.
        first_name: String,
    },
    /// Law 3: the worker lists cannot be run to their end.
    #[error("{0}")]
    Stall(Stall),
    /// A just-in-time task that no event launches.
    #[error("task t{task} ({name}) is launched when its last event fires, but it waits on none")]
    NeverLaunched {
        /// The task.
        task: u32,
        /// Its operator and block.
        name: String,
    },
}

/// Violations reported at most; a broken graph breaks a law in thousands of pairs.
const REPORTED: usize = 64;

/// Judges `tasks` as the task graph of `graph`, by laws 1 and 3; with `workers`, as run by them.
pub fn check(graph: &ThreadBlockGraph, tasks: &TaskGraph, workers: Option<&WorkerLists>) -> Result<(), Vec<Violation>> {
    let mut broken = Vec::new();
    if let Err(laws) = graph.check() {
        broken.extend(laws.into_iter().map(|law| Violation::Graph(law.to_string())));
        return Err(broken);
    }
    check_shape(graph, tasks, &mut broken);
    if !broken.is_empty() {
        return Err(broken);
    }
    let triggerers = tasks.triggers.inverted(tasks.events.len());
    for (event, target) in tasks.events.iter().enumerate() {
        let triggers = triggerers.of(event).len() as u32;
        if triggers != *target {
            broken.push(Violation::Count { event: event as u32, target: *target, triggers });
        }
    }
    for (t, task) in tasks.tasks.iter().enumerate() {
        let just_in_time = tasks.classes.get(task.op as usize) == Some(&TaskClass::JustInTime);
        if just_in_time && tasks.waits.of(t).is_empty() {
            broken.push(Violation::NeverLaunched { task: t as u32, name: name_of(graph, tasks, t as u32) });
        }
    }
    if let Some(workers) = workers
        && let Err(stall) = simulate(tasks, workers)
    {
        broken.push(Violation::Stall(stall));
        return Err(broken);
    }
    let mut search = Search::new(tasks, &triggerers, workers);
    if let Some((first, n)) = search.positions() {
        broken.push(Violation::Cycle { tasks: n, first, first_name: name_of(graph, tasks, first) });
        return Err(broken);
    }
    for_each_buffer(graph, tasks, |buffer, pairs| {
        for (first, second) in search.unordered(pairs) {
            if broken.len() < REPORTED {
                broken.push(unordered(graph, tasks, buffer, first, second));
            }
        }
        broken.len() < REPORTED
    });
    if broken.is_empty() { Ok(()) } else { Err(broken) }
}

/// Pairs of tasks that the events order directly, and those of them that touch a common byte in conflicting ways with
/// no access between them there: law 2 asks that the two be equal. Counted pair by pair, from bytes.
pub fn waited_and_needed(graph: &ThreadBlockGraph, tasks: &TaskGraph) -> (u64, u64) {
    let triggerers = tasks.triggers.inverted(tasks.events.len());
    let mut waited: Vec<(u32, u32)> = Vec::new();
    for second in 0..tasks.tasks.len() as u32 {
        for event in tasks.waits.of(second as usize) {
            waited.extend(triggerers.of(*event as usize).iter().map(|first| (*first, second)));
        }
    }
    waited.sort_unstable();
    waited.dedup();
    let mut needed = vec![false; waited.len()];
    for_each_buffer(graph, tasks, |_, pairs| {
        // Both lists are sorted.
        let mut at = 0;
        for pair in pairs {
            at += waited[at..].partition_point(|w| *w < pair);
            if waited.get(at) == Some(&pair) {
                needed[at] = true;
            }
        }
        true
    });
    (waited.len() as u64, needed.iter().filter(|n| **n).count() as u64)
}

fn name_of(graph: &ThreadBlockGraph, tasks: &TaskGraph, task: u32) -> String {
    let task = tasks.tasks[task as usize];
    format!("{} {:?}", graph.ops[task.op as usize].name, task.block)
}

fn check_shape(graph: &ThreadBlockGraph, tasks: &TaskGraph, broken: &mut Vec<Violation>) {
    let n_tasks = tasks.tasks.len();
    let mut expect = |holds: bool, what: &dyn Fn() -> String| {
        if !holds {
            broken.push(Violation::Shape(what()));
        }
        holds
    };
    let heads = &tasks.op_first;
    let rising = heads.windows(2).all(|w| w[0] <= w[1]);
    let ends = heads.first() == Some(&0) && heads.last() == Some(&(n_tasks as u32));
    if !expect(heads.len() == graph.ops.len() + 1 && rising && ends, &|| {
        format!("first tasks of {} operators do not cover {n_tasks} tasks", graph.ops.len())
    }) {
        return;
    }
    for (i, op) in graph.ops.iter().enumerate() {
        let of_op = &tasks.tasks[heads[i] as usize..heads[i + 1] as usize];
        let in_grid_order = of_op.iter().enumerate().all(|(n, t)| t.op as usize == i && t.block == op.block(n as u64));
        expect(of_op.len() as u64 == op.n_blocks() && in_grid_order, &|| {
            format!("operator {}: its tasks are not its {} blocks in grid order", op.name, op.n_blocks())
        });
    }
    for (what, lists) in [("waits", &tasks.waits), ("triggers", &tasks.triggers)] {
        let rising = lists.heads.windows(2).all(|w| w[0] <= w[1]);
        let ends = lists.heads.first() == Some(&0) && lists.heads.last() == Some(&(lists.entries.len() as u32));
        if !expect(lists.heads.len() == n_tasks + 1 && rising && ends, &|| {
            format!("the {what} are not one list per task")
        }) {
            continue;
        }
        let strange = lists.entries.iter().find(|e| **e as usize >= tasks.events.len());
        expect(strange.is_none(), &|| {
            format!("the {what} name event e{}, but there are {}", strange.unwrap_or(&0), tasks.events.len())
        });
        let twice = (0..n_tasks).find(|t| {
            let list = lists.of(*t);
            list.iter().collect::<HashSet<_>>().len() != list.len()
        });
        expect(twice.is_none(), &|| format!("task t{} {what} one event twice", twice.unwrap_or(0)));
    }
}

/// Reads, additions and writes of one operator at one byte are looked at in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Act {
    Read,
    Add,
    Write,
}

fn act(kind: AccessKind) -> Act {
    match kind {
        AccessKind::Read => Act::Read,
        AccessKind::ReduceAdd | AccessKind::Append => Act::Add,
        AccessKind::Write | AccessKind::ReadWrite => Act::Write,
    }
}

/// An access of a task at a run of bytes, in the order in which groups are formed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Entry {
    op: u32,
    act: Act,
    task: u32,
}

/// Calls `visit` for every buffer with the pairs of tasks that must be ordered directly, until it says `false`.
fn for_each_buffer(graph: &ThreadBlockGraph, tasks: &TaskGraph, mut visit: impl FnMut(usize, Vec<(u32, u32)>) -> bool) {
    let mut users: Vec<Vec<(u32, &Access)>> = vec![Vec::new(); graph.table.buffers.len()];
    for (i, op) in graph.ops.iter().enumerate() {
        for access in op.accesses.iter().flatten() {
            if !graph.table[access.tensor].shape.contains(&0) {
                users[graph.table[access.tensor].buffer.idx()].push((i as u32, access));
            }
        }
    }
    for (buffer, users) in users.iter().enumerate() {
        if users.iter().any(|(_, a)| a.kind.writes()) && !visit(buffer, pairs_of(graph, tasks, users)) {
            return;
        }
    }
}

/// Neighbouring conflicting pairs among the accesses of one buffer.
fn pairs_of(graph: &ThreadBlockGraph, tasks: &TaskGraph, users: &[(u32, &Access)]) -> Vec<(u32, u32)> {
    let rows = Rows::common(graph, users);
    // Where an access starts (true) and ends (false), by address.
    let mut edges: Vec<(u64, bool, Entry)> = Vec::new();
    for (op, access) in users {
        let block_op = &graph.ops[*op as usize];
        let first = tasks.op_first[*op as usize];
        for number in 0..block_op.n_blocks() {
            let entry = Entry { op: *op, act: act(access.kind), task: first + number as u32 };
            for run in byte_runs(graph, block_op, access, block_op.block(number), rows.as_ref()) {
                edges.push((run.start, true, entry));
                edges.push((run.end, false, entry));
            }
        }
    }
    pairs_along(edges)
}

/// Likewise, from where accesses start and end.
fn pairs_along(mut edges: Vec<(u64, bool, Entry)>) -> Vec<(u32, u32)> {
    edges.sort_unstable();
    // How often each access is present here: overlapping views may bring it twice.
    let mut here: BTreeSet<Present> = BTreeSet::new();
    let mut looked_at: HashSet<u64> = HashSet::new();
    let mut hash = 0u64;
    let mut pairs = Pairs::default();
    let mut i = 0;
    while i < edges.len() {
        let address = edges[i].0;
        let mut changes = Changes::default();
        while i < edges.len() && edges[i].0 == address {
            let (_, starts, entry) = edges[i];
            let mut copy = 0;
            if starts {
                while !here.insert((entry, copy)) {
                    copy += 1;
                }
                hash = hash.wrapping_add(mixed(entry));
            } else {
                while here.contains(&(entry, copy + 1)) {
                    copy += 1;
                }
                here.remove(&(entry, copy));
                hash = hash.wrapping_sub(mixed(entry));
            }
            let of = if starts { &mut changes.came } else { &mut changes.gone };
            of.push((entry, copy));
            i += 1;
        }
        if looked_at.insert(hash)
            && let Some(range) = changes.settle()
        {
            neighbours(around(&here, range), &changes, &mut pairs);
        }
    }
    pairs.each_once()
}

/// An access that is present at an address, and which of several that are the same.
type Present = (Entry, u32);

/// What comes and goes at an address.
#[derive(Default)]
struct Changes {
    came: Vec<Present>,
    gone: Vec<Present>,
}

impl Changes {
    /// Sorts both and leaves out what goes and comes again; from the first to the last of the rest, if there is any.
    fn settle(&mut self) -> Option<(Present, Present)> {
        self.came.sort_unstable();
        self.gone.sort_unstable();
        let gone = self.gone.clone();
        self.gone.retain(|one| self.came.binary_search(one).is_err());
        self.came.retain(|one| gone.binary_search(one).is_err());
        let first = self.came.first().into_iter().chain(self.gone.first()).min()?;
        let last = self.came.last().into_iter().chain(self.gone.last()).max()?;
        Some((*first, *last))
    }
}

/// Those of `here` among which there may be neighbours that were none before what is from `first` to `last` has come or
/// gone: these, and two groups before and behind them, since of the nearest ones they may be a part, or have stood
/// between them.
fn around(here: &BTreeSet<Present>, (first, last): (Present, Present)) -> impl Iterator<Item = Present> + '_ {
    let mut groups = Groups::default();
    let before = here.range(..first).rev().take_while(|(entry, _)| groups.of(*entry) <= 2);
    let from = before.last().copied().unwrap_or(first);
    let mut groups = Groups::default();
    here.range(from..).take_while(move |present| **present <= last || groups.of(present.0) <= 2).copied()
}

/// Counts groups along accesses: see [`neighbours`].
#[derive(Default)]
struct Groups {
    n: usize,
    acting: Option<Act>,
}

impl Groups {
    /// In which group `entry` is that comes next, from 1 on.
    fn of(&mut self, entry: Entry) -> usize {
        if self.acting != Some(entry.act) || entry.act == Act::Write {
            self.n += 1;
            self.acting = Some(entry.act);
        }
        self.n
    }
}

/// Pairs of tasks, of which many come again and again: at every address that both touch.
#[derive(Default)]
struct Pairs {
    pairs: Vec<(u32, u32)>,
    /// How many there were when each was there once.
    n_once: usize,
}

impl Pairs {
    /// Pairs that are kept as they come, at least, before it is seen which are the same.
    const AS_THEY_COME: usize = 1 << 20;

    fn extend(&mut self, pairs: impl Iterator<Item = (u32, u32)>) {
        self.pairs.extend(pairs);
        // As many new ones as there were: so no more than twice what is needed is held, and sorting costs a factor of a
        // logarithm.
        if self.pairs.len() > 2 * self.n_once + Self::AS_THEY_COME {
            self.pairs.sort_unstable();
            self.pairs.dedup();
            self.n_once = self.pairs.len();
        }
    }

    /// All, sorted.
    fn each_once(mut self) -> Vec<(u32, u32)> {
        self.pairs.sort_unstable();
        self.pairs.dedup();
        self.pairs
    }
}

/// A 64-bit fingerprint, so that sums of them tell sets of accesses apart.
fn mixed(entry: Entry) -> u64 {
    let mut x =
        (u64::from(entry.op) << 34 ^ u64::from(entry.task) << 2 ^ entry.act as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// Adds the pairs of neighbouring groups that may be none of before: with what has come, and across what has gone.
fn neighbours(present: impl Iterator<Item = Present>, changes: &Changes, pairs: &mut Pairs) {
    let (mut last, mut group): (Vec<Present>, Vec<Present>) = (Vec::new(), Vec::new());
    let (mut groups, mut number) = (Groups::default(), 0);
    for one in present {
        if groups.of(one.0) != number {
            number = groups.n;
            add_pairs(&last, &group, changes, pairs);
            last = std::mem::take(&mut group);
        }
        group.push(one);
    }
    add_pairs(&last, &group, changes, pairs);
}

/// See [`neighbours`]: of two groups that are.
fn add_pairs(last: &[Present], group: &[Present], changes: &Changes, pairs: &mut Pairs) {
    let (Some(first), Some(end)) = (last.first(), group.last()) else { return };
    let mut add = |one: &Present, other: &Present| {
        pairs.extend((one.0.task != other.0.task).then_some((one.0.task, other.0.task)).into_iter());
    };
    let gone = changes.gone.partition_point(|gone| gone < first);
    let is_across = changes.gone.get(gone).is_some_and(|gone| gone < end);
    let came: Vec<&Present> = last.iter().filter(|one| is_across || changes.came.binary_search(one).is_ok()).collect();
    for other in group {
        if changes.came.binary_search(other).is_ok() {
            last.iter().for_each(|one| add(one, other));
        } else {
            came.iter().for_each(|one| add(one, other));
        }
    }
}

/// Rows of one length that all tensors of a buffer consist of.
struct Rows {
    stride: u64,
    /// One row of every stretch between cuts.
    looked_at: Vec<u64>,
}

impl Rows {
    /// The longest stride, if it makes rows of all tensors.
    fn common(graph: &ThreadBlockGraph, users: &[(u32, &Access)]) -> Option<Rows> {
        let longest = |id: TensorId| -> u64 {
            let t = &graph.table[id];
            let strides = t.shape.iter().zip(&t.strides).filter(|(n, _)| **n > 1).map(|(_, s)| *s as u64);
            strides.max().unwrap_or(0) * t.dtype.size_bytes() as u64
        };
        let stride = users.iter().map(|(_, a)| longest(a.tensor)).max().filter(|s| *s > 0)?;
        let mut cuts: BTreeSet<u64> = BTreeSet::new();
        for (op, access) in users {
            let t = &graph.table[access.tensor];
            let elem = t.dtype.size_bytes() as u64;
            let start = t.offset_elems as u64 * elem;
            let mut last = start % stride + elem;
            let mut rows: Option<(usize, usize)> = None;
            for (dim, (n, s)) in t.shape.iter().zip(&t.strides).enumerate() {
                if *n > 1 && *s as u64 * elem == stride {
                    if rows.is_some() {
                        return None;
                    }
                    rows = Some((dim, *n));
                } else if *n > 1 {
                    last += (*n as u64 - 1) * *s as u64 * elem;
                }
            }
            if last > stride {
                return None;
            }
            let first = start / stride;
            let Some((dim, n)) = rows else {
                cuts.extend([first, first + 1]);
                continue;
            };
            let axis = (0..access.map.len()).find(|a| access.map[*a].is_some_and(|d| usize::from(d) == dim));
            let parts = axis.map_or(1, |a| graph.ops[*op as usize].grid[a]);
            for part in 0..=u128::from(parts) {
                cuts.insert(first + (n as u128 * part / u128::from(parts)) as u64);
            }
        }
        Some(Rows { stride, looked_at: cuts.into_iter().collect() })
    }
}

/// The runs of bytes a block touches: all, or those in the rows that are looked at.
fn byte_runs(
    graph: &ThreadBlockGraph,
    op: &BlockOp,
    access: &Access,
    block: [u32; 3],
    rows: Option<&Rows>,
) -> Vec<Range<u64>> {
    let t = &graph.table[access.tensor];
    let elem = t.dtype.size_bytes() as u64;
    let mut starts = vec![t.offset_elems as u64 * elem];
    let mut dims: Vec<(u64, Range<u64>)> = Vec::new();
    for (dim, (n, s)) in t.shape.iter().zip(&t.strides).enumerate() {
        let mut range = 0..*n as u64;
        for (axis, cut) in access.map.iter().enumerate() {
            if cut.is_some_and(|d| usize::from(d) == dim) {
                let (b, g) = (u128::from(block[axis]), u128::from(op.grid[axis]));
                range = (*n as u128 * b / g) as u64..(*n as u128 * (b + 1) / g) as u64;
            }
        }
        if range.is_empty() {
            return Vec::new();
        }
        dims.push((*s as u64 * elem, range));
    }
    // Long strides outside; the innermost dimensions join into one run where they are dense.
    dims.sort_by_key(|(stride, range)| (*stride, range.end));
    let mut width = elem;
    let mut outer = dims.len();
    for (i, (stride, range)) in dims.iter().enumerate() {
        let is_row = rows.is_some_and(|r| r.stride == *stride && range.end > 1);
        let len = range.end - range.start;
        if len > 1 && (*stride > width || is_row) {
            outer = i;
            break;
        }
        starts[0] += range.start * stride;
        width = width.max((len - 1) * stride + width);
    }
    for (stride, range) in dims[outer.min(dims.len())..].iter().rev() {
        let is_row = rows.is_some_and(|r| r.stride == *stride && range.end > 1);
        let base = t.offset_elems as u64 * elem / stride.max(&1);
        let kept: Vec<u64> = match rows {
            Some(rows) if is_row => {
                let at = rows.looked_at.iter().filter(|row| **row >= base);
                at.map(|row| row - base).filter(|i| range.contains(i)).collect()
            }
            _ => range.clone().collect(),
        };
        starts = starts.iter().flat_map(|start| kept.iter().map(move |i| start + i * stride)).collect();
    }
    starts.into_iter().map(|start| start..start + width).collect()
}

/// The report for a pair.
fn unordered(graph: &ThreadBlockGraph, tasks: &TaskGraph, buffer: usize, first: u32, second: u32) -> Violation {
    let accesses = |task: u32| {
        let task = tasks.tasks[task as usize];
        let op = &graph.ops[task.op as usize];
        let here = move |a: &&Access| graph.table[a.tensor].buffer == BufferId(buffer as u32);
        op.accesses.iter().flatten().filter(here).map(move |a| {
            let mut runs = if graph.table[a.tensor].shape.contains(&0) {
                Vec::new()
            } else {
                byte_runs(graph, op, a, task.block, None)
            };
            runs.sort_unstable_by_key(|r| r.start);
            (a, runs)
        })
    };
    let mut found: Option<(Range<u64>, TensorId, TensorId)> = None;
    for (a, a_runs) in accesses(first) {
        for (b, b_runs) in accesses(second) {
            let (x, y) = (act(a.kind), act(b.kind));
            if x == y && x != Act::Write {
                continue;
            }
            let (mut i, mut j) = (0, 0);
            while i < a_runs.len() && j < b_runs.len() {
                let common = a_runs[i].start.max(b_runs[j].start)..a_runs[i].end.min(b_runs[j].end);
                if !common.is_empty() {
                    if found.as_ref().is_none_or(|(bytes, ..)| common.start < bytes.start) {
                        found = Some((common, a.tensor, b.tensor));
                    }
                    break;
                }
                if a_runs[i].end < b_runs[j].end {
                    i += 1;
                } else {
                    j += 1;
                }
            }
        }
    }
    let tensor = |id: Option<TensorId>| id.map_or(String::new(), |id| graph.table[id].name.clone());
    Violation::Unordered {
        first,
        first_name: name_of(graph, tasks, first),
        second,
        second_name: name_of(graph, tasks, second),
        buffer: graph.table.buffers[buffer].name.clone(),
        first_tensor: tensor(found.as_ref().map(|f| f.1)),
        second_tensor: tensor(found.as_ref().map(|f| f.2)),
        bytes: found.map_or(0..0, |f| f.0),
        same_op: tasks.tasks[first as usize].op == tasks.tasks[second as usize].op,
    }
}

/// Backward search through events and worker order.
struct Search<'a> {
    tasks: &'a TaskGraph,
    triggerers: &'a Lists,
    /// The task before each on its worker.
    before: Option<Vec<Option<u32>>>,
    /// Place of each task in an order that respects events and workers.
    position: Vec<u32>,
    seen_task: Vec<u32>,
    seen_event: Vec<u32>,
    stamp: u32,
    stack: Vec<u32>,
}

impl<'a> Search<'a> {
    fn new(tasks: &'a TaskGraph, triggerers: &'a Lists, workers: Option<&WorkerLists>) -> Self {
        let before = workers.map(|workers| {
            let mut before = vec![None; tasks.tasks.len()];
            for pair in workers.lists.iter().flat_map(|list| list.windows(2)) {
                before[pair[1] as usize] = Some(pair[0]);
            }
            before
        });
        Search {
            tasks,
            triggerers,
            before,
            position: Vec::new(),
            seen_task: vec![0; tasks.tasks.len()],
            seen_event: vec![0; tasks.events.len()],
            stamp: 0,
            stack: Vec::new(),
        }
    }

    /// Orders all tasks; a task that cannot be ordered and how many there are, if events and workers form a cycle.
    fn positions(&mut self) -> Option<(u32, u32)> {
        let n = self.tasks.tasks.len();
        let waiters = self.tasks.waits.inverted(self.tasks.events.len());
        let mut follower = vec![None; n];
        let mut missing: Vec<u32> = (0..n).map(|t| self.tasks.waits.of(t).len() as u32).collect();
        for (task, before) in self.before.iter().flatten().enumerate() {
            if let Some(before) = before {
                follower[*before as usize] = Some(task as u32);
                missing[task] += 1;
            }
        }
        let mut left: Vec<u32> = (0..self.tasks.events.len()).map(|e| self.triggerers.of(e).len() as u32).collect();
        for (event, _) in left.iter().enumerate().filter(|(_, n)| **n == 0) {
            for task in waiters.of(event) {
                missing[*task as usize] -= 1;
            }
        }
        const UNPLACED: u32 = u32::MAX;
        self.position = vec![UNPLACED; n];
        let mut queue: Vec<u32> = (0..n as u32).rev().filter(|t| missing[*t as usize] == 0).collect();
        let mut placed = 0;
        while let Some(task) = queue.pop() {
            self.position[task as usize] = placed;
            placed += 1;
            let mut arrive = |task: u32| {
                missing[task as usize] -= 1;
                if missing[task as usize] == 0 {
                    queue.push(task);
                }
            };
            if let Some(task) = follower[task as usize] {
                arrive(task);
            }
            for &event in self.tasks.triggers.of(task as usize) {
                left[event as usize] -= 1;
                if left[event as usize] == 0 {
                    waiters.of(event as usize).iter().for_each(|t| arrive(*t));
                }
            }
        }
        let stuck = self.position.iter().position(|p| *p == UNPLACED)?;
        Some((stuck as u32, n as u32 - placed))
    }

    /// The pairs of which the second does not come after the first.
    fn unordered(&mut self, mut pairs: Vec<(u32, u32)>) -> Vec<(u32, u32)> {
        pairs.sort_unstable_by_key(|(first, second)| (*second, *first));
        let mut bad = Vec::new();
        let mut i = 0;
        while i < pairs.len() {
            // Tasks that wait on the same events come after the same tasks: they are looked at together.
            let waits = self.tasks.waits.of(pairs[i].1 as usize);
            let mut end = i;
            while end < pairs.len() && self.tasks.waits.of(pairs[end].1 as usize) == waits {
                end += 1;
            }
            let group = &pairs[i..end];
            let floor = group.iter().map(|(first, _)| self.position[*first as usize]).min().unwrap_or(0);
            self.reach_from(group[0].1, floor, false);
            let missed: Vec<(u32, u32)> =
                group.iter().copied().filter(|(first, _)| self.seen_task[*first as usize] != self.stamp).collect();
            for of_one in missed.chunk_by(|a, b| a.1 == b.1) {
                let second = of_one[0].1;
                if self.before.is_some() {
                    let floor = of_one.iter().map(|(first, _)| self.position[*first as usize]).min().unwrap_or(0);
                    self.reach_from(second, floor, true);
                }
                let op = |task: u32| self.tasks.tasks[task as usize].op;
                let is_bad = |first: u32| op(first) == op(second) || self.seen_task[first as usize] != self.stamp;
                bad.extend(of_one.iter().copied().filter(|(first, _)| is_bad(*first)));
            }
            i = end;
        }
        bad
    }

    /// Marks every task at `floor` or after it that comes before `task`.
    fn reach_from(&mut self, task: u32, floor: u32, with_workers: bool) {
        self.stamp += 1;
        self.stack.push(task);
        while let Some(task) = self.stack.pop() {
            if let Some(before) = self.before.as_ref().filter(|_| with_workers).and_then(|b| b[task as usize])
                && self.position[before as usize] >= floor
                && self.seen_task[before as usize] != self.stamp
            {
                self.seen_task[before as usize] = self.stamp;
                self.stack.push(before);
            }
            for &event in self.tasks.waits.of(task as usize) {
                if std::mem::replace(&mut self.seen_event[event as usize], self.stamp) == self.stamp {
                    continue;
                }
                for &first in self.triggerers.of(event as usize) {
                    if self.position[first as usize] >= floor && self.seen_task[first as usize] != self.stamp {
                        self.seen_task[first as usize] = self.stamp;
                        self.stack.push(first);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What is present at every address, from the first edge on, and all neighbours in it.
    fn pairs_at_every_address(edges: &[(u64, bool, Entry)]) -> Vec<(u32, u32)> {
        let mut pairs = Pairs::default();
        for (address, ..) in edges {
            let mut present: Vec<Entry> = Vec::new();
            for (_, _, entry) in edges.iter().filter(|(at, starts, _)| at <= address && *starts) {
                present.push(*entry);
            }
            for (_, _, entry) in edges.iter().filter(|(at, starts, _)| at <= address && !*starts) {
                let at = present.iter().position(|other| other == entry).expect("what ends has started");
                present.swap_remove(at);
            }
            present.sort_unstable();
            let present: Vec<Present> = present.into_iter().map(|entry| (entry, 0)).collect();
            let all = Changes { came: present.clone(), gone: Vec::new() };
            neighbours(present.into_iter(), &all, &mut pairs);
        }
        pairs.each_once()
    }

    proptest! {
        /// Looking only at what has changed finds what looking at everything finds.
        #[test]
        fn neighbours_are_found_by_what_changes(
            runs in proptest::collection::vec((0u64..24, 1u64..12, 0u32..5, 0u8..3, 0u32..4), 1..30),
        ) {
            let edges: Vec<(u64, bool, Entry)> = runs
                .into_iter()
                .flat_map(|(start, len, op, act, task)| {
                    let act = [Act::Read, Act::Add, Act::Write][usize::from(act)];
                    let entry = Entry { op, act, task: 4 * op + task };
                    [(start, true, entry), (start + len, false, entry)]
                })
                .collect();
            prop_assert_eq!(pairs_along(edges.clone()), pairs_at_every_address(&edges));
        }
    }

    #[test]
    fn pairs_that_come_again_are_held_once() {
        let mut pairs = Pairs::default();
        for round in 0..3000 {
            pairs.extend((0..1000).map(|i| (i, (i + round) % 7)));
            assert!(pairs.pairs.len() <= 2 * 7000 + Pairs::AS_THEY_COME + 1000);
        }
        let all: Vec<(u32, u32)> = (0..1000).flat_map(|i| (0..7).map(move |j| (i, j))).collect();
        assert!(pairs.n_once > 0, "it was seen at least once which are the same");
        assert_eq!(pairs.each_once(), all);
    }
}
