//! Per-worker plans of shared memory: which bytes each worker's loader fetches, in which order, to where, and from when
//! on.
//!
//! ```text
//! worker's tasks    | norm |     q_proj      | o_proj     ...        (events between them)
//! compute ops       |  c0  | c1   c2   c3    | c4   c5    ...
//! data ops          | d0   | d1   d2   d3    | d4   d5    ...        d4 starts when c1 has freed its bytes,
//! shared memory     [d0|d1|d2|d3]  then  [d4|d5|..]                  while q_proj may still wait for its event
//! ```
//!
//! A task *streams* the weights that its macro kernel takes from tiles ([`tiled`](perpetua_device::kernels::tiled)):
//! they are cut into tiles of whole rows where a row fits a tile, or memory has room for a few. The task becomes as
//! many compute ops as its longest stream has tiles; compute op `i` consumes tile `i` of each stream (a norm's weights
//! with the first rows, gate with up), and a task that streams nothing is one compute op. Data ops are all tiles of a
//! worker's list in the order they are consumed, across tasks and operators: weights depend on no activation, so the
//! loader waits on no event, only for room.
//!
//! What a body reads from global memory instead, small weights and the KV cache, is asked of the L2 cache by the loader
//! in passing, between the tiles before and those after: a [`PrefetchOp`], which takes no shared memory and nobody
//! waits for. In passes of several rows, which have no tiles, that is [all there is](near).
//!
//! Compute ops retire in the order in which their tiles were loaded, so a ring is the best allocator there is: a tile
//! goes where the one before it ends, or to the start of memory, and may be loaded once the youngest tile it overwrites
//! has been consumed. (On a GPU, where a body may hold the tiles of one compute op until it has those of the next,
//! memory has room for four times as many.) This is the feasible memory scheduler of [`super::plain`] with its data ops
//! in consumption order and nothing ever spilled, in linear time.
//!
//! When a pass's last tiles are on their way the memory would have nothing to do until the next token is there. So the
//! first tiles of a program that is run again and again are brought [ahead](Plan::repeat), as far as they do not
//! overwrite what is still to be read.
//!
//! Laws, judged by [`check()`], which shares no code with the planner: a plan covers exactly what its tasks read; no
//! two tiles that may be live together overlap or share a barrier; nothing leaves the capacity; no copy waits for its
//! own reader or a later one, so that loader and consumer always get on.

mod check;
mod near;

pub use check::{Violation, check};
pub use near::{prefetched_bytes, reads_of_many_rows};

use crate::graph::task::{Task, TaskGraph, WorkerLists, task_operands};
use crate::graph::tensor::BufferKind;
use crate::graph::threadblock::{Access, AccessKind, BlockOp, ThreadBlockGraph};
use crate::machine::Machine;
use crate::parallel::{LISTS, side_by_side};
use perpetua_device::kernels::{
    Cost, ExpertsDown, ExpertsUp, Numbered, RoutedLinear, experts_down, experts_up, linear, routed_linear,
};
use perpetua_shared::limits::MAX_RANK;
use perpetua_shared::{DType, DataOp, Operand, PrefetchOp};
use std::collections::VecDeque;
use std::fmt;

/// Alignment of a tile in shared memory, and of cuts inside a row.
pub const TILE_ALIGN_BYTES: u64 = 128;

/// A stretch of a task's work that consumes one tile of each of its streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ComputeOp {
    /// The task.
    pub task: u32,
    /// Its tiles: `data[data_first..data_end]` of its worker.
    pub data_first: u32,
    /// See [`ComputeOp::data_first`].
    pub data_end: u32,
}

/// One worker's plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerPlan {
    /// What its loader copies, in order.
    pub data: Vec<DataOp>,
    /// What its loader asks the L2 cache for, in order.
    pub prefetches: Vec<PrefetchOp>,
    /// What its consumers do, in order.
    pub computes: Vec<ComputeOp>,
}

/// The shared memory of every worker, over time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Where on a worker they may begin.
    pub first_byte: u64,
    /// Bytes tiles may occupy on a worker.
    pub capacity_bytes: u64,
    /// Barriers a worker has.
    pub n_barriers: u32,
    /// Bytes that a worker without tiles may have asked for and not turned to.
    pub near_ahead_bytes: u64,
    /// Per worker.
    pub workers: Vec<WorkerPlan>,
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A task needs more at once than there is.
    #[error("task {task} of {op}: needs {bytes} bytes of tiles at once, a worker has {capacity_bytes}")]
    Capacity {
        /// The task.
        task: u32,
        /// Its operator.
        op: String,
        /// Bytes of its tiles.
        bytes: u64,
        /// What there is.
        capacity_bytes: u64,
    },
    /// More copies than a plan is made of.
    #[error("operator {op}: tasks read more than {MAX_TILED_BYTES} bytes of weights in tiles up to here")]
    Bytes {
        /// The operator of the task that went over.
        op: String,
    },
    /// A task needs more barriers at once than there are.
    #[error("task {task} of {op}: needs {tiles} tiles at once, a worker has {n_barriers} barriers")]
    Barriers {
        /// The task.
        task: u32,
        /// Its operator.
        op: String,
        /// Its tiles.
        tiles: usize,
        /// What there is.
        n_barriers: u32,
    },
}

/// One operand that a task streams through shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    /// Its buffer.
    pub source: u32,
    /// Its box.
    pub operand: Operand,
    /// How many parts rows of a matrix are taken in: the first parts of all rows, then the next ones
    /// ([`linear::segment_len`]). 1: rows are whole, one after the other.
    pub segments: u32,
}

impl Stream {
    /// Bytes in the box.
    pub fn bytes(&self) -> u64 {
        self.operand.bytes()
    }
}

/// What a task reads of weights and caches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reads {
    /// From tiles.
    pub tiles: Vec<Stream>,
    /// From global memory: prefetches yet without a place in a list.
    pub near: Vec<PrefetchOp>,
    /// From there, too: bytes that nobody asks for before the task reads them.
    pub rest_bytes: u64,
    /// Of what is asked for, bytes that the body may have read before the task's events have fired.
    pub early_bytes: u64,
}

impl Reads {
    /// Bytes of all that.
    pub fn bytes(&self) -> u64 {
        let near_bytes = self.near.iter().map(prefetched_bytes).sum::<u64>();
        self.tiles.iter().map(Stream::bytes).sum::<u64>() + near_bytes + self.rest_bytes
    }
}

/// The most bytes that a plan's tiles may have, all together: no machine we know has memory for more weights, whose
/// copies take some gigabytes.
pub const MAX_TILED_BYTES: u64 = 1 << 40;

/// Copies and prefetches move whole units of this.
const UNIT_BYTES: u64 = 16;

/// Per task, what it reads. A task whose declared cost reads less than its weights looks rows up in a table: it has
/// none.
pub fn reads(graph: &ThreadBlockGraph, tasks: &TaskGraph, costs: &[Cost]) -> Vec<Reads> {
    let mut buffer = Vec::new();
    tasks.tasks.iter().zip(costs).map(|(task, cost)| task_reads(graph, task, cost, &mut buffer)).collect()
}

fn task_reads(graph: &ThreadBlockGraph, task: &Task, cost: &Cost, buffer: &mut Vec<Operand>) -> Reads {
    let op = &graph.ops[task.op as usize];
    let operands = task_operands(graph, task, buffer);
    let source = |slot: usize| -> Option<(u32, &BufferKind)> {
        let tensor = op.accesses[slot].as_ref()?.tensor;
        Some((graph.table[tensor].buffer.0, &graph.table.buffer_of(tensor).kind))
    };
    let is_weight = |slot: &usize| {
        let read = op.accesses[*slot].as_ref().is_some_and(|access| access.kind == AccessKind::Read);
        read && source(*slot).is_some_and(|(_, kind)| *kind == BufferKind::Weight)
    };
    let mut reads = Reads::default();
    let tiled = op.tiled();
    let present = || tiled.iter().copied().filter(|slot| op.accesses[*slot].is_some());
    // What a body takes side by side is cut alike: of matrices in two types neither comes in tiles.
    let matrices = present().map(|slot| &operands[slot]).filter(|operand| operand.rank == 2);
    let mut bytes = matrices.map(|operand| operand.dtype().map(DType::size_bytes));
    let are_alike = bytes.next().is_none_or(|first| bytes.all(|other| other == first));
    let are_carried = are_alike && present().all(|slot| is_weight(&slot) && is_carried(&operands[slot]));
    if are_carried {
        let segments = op.kernel.map_or(1, |kernel| linear::segments(kernel.task_type, &kernel.params));
        let stream = |slot: usize| Some(Stream { source: source(slot)?.0, operand: operands[slot], segments });
        reads.tiles.extend(present().filter_map(stream));
    }
    for slot in 0..op.accesses.len() {
        let Some((source, kind)) = source(slot) else { continue };
        let near = match kind {
            BufferKind::Weight if biases_of_experts(op).contains(&slot) => None,
            BufferKind::Weight if is_weight(&slot) && !(are_carried && tiled.contains(&slot)) => {
                near::whole(&operands[slot])
            }
            BufferKind::State => near::positions(graph, task, slot, &operands[slot]),
            _ => None,
        };
        reads.near.extend(near.map(|near| PrefetchOp { source, ..near }));
    }
    reads.rest_bytes = experts_bytes(graph, op, operands, cost);
    if reads.bytes() > cost.bytes_read {
        reads = Reads::default();
    }
    reads
}

/// The operands of `op` that are biases of experts, a row for each, of which a task reads those of the experts it
/// chooses.
fn biases_of_experts(op: &BlockOp) -> &'static [usize] {
    match op.kernel.map(|kernel| kernel.task_type) {
        Some(ExpertsUp::TASK_TYPE) => &[experts_up::slot::GATE_BIAS, experts_up::slot::UP_BIAS],
        Some(ExpertsDown::TASK_TYPE) => &[experts_down::slot::BIAS],
        Some(RoutedLinear::TASK_TYPE) => &[routed_linear::slot::BIAS, routed_linear::slot::UP_BIAS],
        _ => &[],
    }
}

/// Of what a task of `op` reads, the weights of experts: which they are is not known before it runs, so that nobody
/// brings them.
fn experts_bytes(graph: &ThreadBlockGraph, op: &BlockOp, operands: &[Operand], cost: &Cost) -> u64 {
    let is_stack = |access: &Access| graph.table.is_stack(access.tensor);
    if !op.accesses.iter().flatten().any(is_stack) {
        return 0;
    }
    let read = op.accesses.iter().zip(operands).enumerate().filter(|(slot, _)| !biases_of_experts(op).contains(slot));
    let rest =
        read.filter(|(_, (access, _))| access.as_ref().is_some_and(|a| a.kind == AccessKind::Read && !is_stack(a)));
    let rest_bytes = rest.map(|(_, (_, operand))| operand.bytes()).sum::<u64>();
    // Of operands that all tasks have whole the cost says a task's part.
    let is_shared = op.kernel.is_some_and(|kernel| kernel.task_type == RoutedLinear::TASK_TYPE);
    cost.bytes_read.saturating_sub(if is_shared { rest_bytes / op.n_blocks().max(1) } else { rest_bytes })
}

/// The longest row in lines that is carried: all of it in one tile, whatever the machine's are.
const MOST_LINES_BYTES: u64 = 24 << 10;

/// Whether bulk copies can carry `operand` row by row. MXFP4 is experts' alone, whom no loader serves.
fn is_carried(operand: &Operand) -> bool {
    let most = match operand.dtype() {
        Some(DType::F32 | DType::Bf16 | DType::F16) => u64::MAX,
        Some(DType::Q8 | DType::Q4 | DType::Int4) => MOST_LINES_BYTES,
        _ => return false,
    };
    let operand = operand.strided();
    let last = usize::from(operand.rank.max(1)) - 1;
    let elem = operand.dtype().map_or(0, |dtype| dtype.size_bytes() as u64);
    let row_bytes = u64::from(operand.extent[last]) * elem;
    let rows_follow = operand.rank < 2 || operand.extent[0] == 1 || operand.stride_elems[0] == operand.extent[1];
    operand.rank <= 2
        && (operand.stride_elems[last] == 1 || operand.extent[last] == 1)
        && rows_follow
        && (1..=most).contains(&row_bytes)
        && row_bytes.is_multiple_of(UNIT_BYTES)
        && operand.offset_bytes.is_multiple_of(UNIT_BYTES)
}

/// The contiguous pieces of `stream`, as offset and bytes in its source: parts of rows where it is taken in segments;
/// otherwise none larger than the `machine`'s tiles, in as many rows as it multiplies at once where that are more, but
/// for whole rows of at most `row_bytes`, and rows in lines, which are never cut.
fn tiles(stream: &Stream, machine: &Machine, row_bytes: u64, out: &mut Vec<(u64, u32)>) {
    out.clear();
    let is_in_lines = stream.operand.lines().is_some();
    let operand = &stream.operand.strided();
    let elem = operand.dtype().map_or(0, |dtype| dtype.size_bytes() as u64);
    if operand.bytes() == 0 {
        return;
    }
    if stream.segments > 1 {
        let [rows, k, ..] = operand.extent;
        let (row, part) = (u64::from(k) * elem, u64::from(linear::segment_len(k, stream.segments)) * elem);
        for from in (0..row).step_by(part as usize) {
            let bytes = part.min(row - from) as u32;
            out.extend((0..u64::from(rows)).map(|n| (operand.offset_bytes + n * row + from, bytes)));
        }
        return;
    }
    // The innermost dimensions that lie one after the other make a run; the rest are walked.
    let (mut run, mut row, mut inner) = (elem, None, MAX_RANK);
    for dim in (0..MAX_RANK).rev() {
        let (n, stride) = (u64::from(operand.extent[dim]), u64::from(operand.stride_elems[dim]) * elem);
        if n > 1 && stride != run {
            break;
        }
        run *= n;
        if n > 1 {
            row = row.or(Some(run));
        }
        inner = dim;
    }
    let row = row.unwrap_or(elem);
    let Machine { tile_bytes, rows_at_once, .. } = *machine;
    let tile_bytes = if row <= row_bytes || is_in_lines { tile_bytes.max(row) } else { tile_bytes };
    let piece = match tile_bytes / row {
        0 => row.div_ceil(row.div_ceil(tile_bytes)).next_multiple_of(TILE_ALIGN_BYTES).min(tile_bytes),
        rows if rows > rows_at_once => rows / rows_at_once * rows_at_once * row,
        rows => rows * row,
    };
    let outer: u64 = operand.extent[..inner].iter().map(|n| u64::from(*n)).product();
    for number in 0..outer {
        let (mut rest, mut offset) = (number, operand.offset_bytes);
        for dim in (0..inner).rev() {
            let n = u64::from(operand.extent[dim]);
            offset += rest % n * u64::from(operand.stride_elems[dim]) * elem;
            rest /= n;
        }
        // A row longer than a tile is cut by itself, so that no tile holds parts of two rows.
        let unit = if row > tile_bytes { row } else { run };
        for start in (0..run).step_by(unit as usize) {
            let end = start + unit;
            let mut at = start;
            while at < end {
                let bytes = piece.min(end - at);
                out.push((offset + at, bytes as u32));
                at += bytes;
            }
        }
    }
}

/// Memory of one worker while its plan is made.
struct Ring {
    first_byte: u64,
    end: u64,
    head: u64,
    /// Start, end and reader of tiles that may still be live, oldest first.
    live: VecDeque<(u64, u64, u32)>,
    after: u32,
}

impl Ring {
    /// Room for `bytes`: where, and how many compute ops must have retired before.
    fn place(&mut self, bytes: u64, used_by: u32) -> (u64, u32) {
        if self.head + bytes > self.end {
            self.head = self.first_byte;
        }
        let (start, end) = (self.head, self.head + bytes);
        // Tiles are freed in order, so all that are older than the youngest one overwritten go with it.
        if let Some(last) = self.live.iter().rposition(|(s, e, _)| *s < end && start < *e) {
            self.after = self.after.max(self.live[last].2 + 1);
            self.live.drain(..=last);
        }
        self.live.push_back((start, end, used_by));
        self.head = end;
        (start, self.after)
    }
}

/// Plans the shared memory of every worker of `lists`.
///
/// # Errors
/// A task that needs more at once than a worker has; more than [`MAX_TILED_BYTES`].
pub fn plan(
    graph: &ThreadBlockGraph,
    tasks: &TaskGraph,
    lists: &WorkerLists,
    reads: &[Reads],
    machine: &Machine,
) -> Result<Plan, PlanError> {
    let name = |task: u32| graph.ops[tasks.tasks[task as usize].op as usize].name.clone();
    let mut bytes = 0u64;
    for (task, reads) in (0..).zip(reads) {
        bytes = reads.tiles.iter().fold(bytes, |bytes, stream| bytes.saturating_add(stream.bytes()));
        if bytes > MAX_TILED_BYTES {
            return Err(PlanError::Bytes { op: name(task) });
        }
    }
    let planned = side_by_side(lists.lists.iter().collect(), LISTS, |_, list| plan_list(list, reads, machine, &name));
    let workers = planned.into_iter().collect::<Result<_, _>>()?;
    let Machine { n_barriers, near_ahead_bytes, bodies_bytes: first_byte, .. } = *machine;
    Ok(Plan { first_byte, capacity_bytes: machine.capacity_bytes(), n_barriers, near_ahead_bytes, workers })
}

/// Plans the shared memory of the worker whose tasks are `list`; `name` says a task's operator for the error.
pub(crate) fn plan_list(
    list: &[u32],
    reads: &[Reads],
    machine: &Machine,
    name: &dyn Fn(u32) -> String,
) -> Result<WorkerPlan, PlanError> {
    let capacity_bytes = machine.capacity_bytes();
    let barriers = machine.n_barriers as usize;
    let mut plan = WorkerPlan::default();
    let first_byte = machine.bodies_bytes;
    let end = first_byte + capacity_bytes;
    let mut ring = Ring { first_byte, end, head: first_byte, live: VecDeque::new(), after: 0 };
    let mut cut: Vec<Vec<(u64, u32)>> = Vec::new();
    for &task in list {
        let streams = &reads[task as usize].tiles;
        let (before, used_by) = (plan.data.len() as u32, plan.computes.len() as u32);
        plan.prefetches.extend(reads[task as usize].near.iter().map(|op| PrefetchOp { before, used_by, ..*op }));
        cut.resize_with(cut.len().max(streams.len()), Vec::new);
        for (stream, tiles_of) in streams.iter().zip(&mut cut) {
            // A norm's weights come with the first step's alone.
            let matrices = streams.iter().filter(|stream| stream.operand.rank == 2).count().max(1) as u64;
            let tile_bytes = machine.tile_bytes.min(machine.step_bytes / matrices);
            let row_bytes = machine.row_bytes / streams.len() as u64;
            tiles(stream, &Machine { tile_bytes, ..*machine }, row_bytes, tiles_of);
        }
        let steps = cut[..streams.len()].iter().map(Vec::len).max().unwrap_or(0).max(1);
        for step in 0..steps {
            let own = streams.iter().zip(&cut).filter_map(|(s, tiles)| tiles.get(step).map(|tile| (s, *tile)));
            let padded = |bytes: u32| u64::from(bytes).next_multiple_of(TILE_ALIGN_BYTES);
            let (n, needed) = own.clone().fold((0, 0), |(n, sum), (_, tile)| (n + 1, sum + padded(tile.1)));
            if needed > capacity_bytes {
                return Err(PlanError::Capacity { task, op: name(task), bytes: needed, capacity_bytes });
            }
            if n > barriers {
                return Err(PlanError::Barriers { task, op: name(task), tiles: n, n_barriers: machine.n_barriers });
            }
            let used_by = plan.computes.len() as u32;
            // Tiles read together may not overwrite each other: where they would, they start at the start of memory.
            if ring.head + needed > end && 2 * needed > capacity_bytes {
                ring.head = first_byte;
            }
            let data_first = plan.data.len();
            for (stream, (source_offset_bytes, bytes)) in own {
                let number = plan.data.len();
                // The barrier's last copy must have been consumed, too.
                if let Some(last) = number.checked_sub(barriers) {
                    ring.after = ring.after.max(plan.data[last].used_by + 1);
                }
                let (dest, after) = ring.place(padded(bytes), used_by);
                debug_assert!(after <= used_by, "a copy never waits for its own reader");
                plan.data.push(DataOp {
                    source_offset_bytes,
                    source: stream.source,
                    bytes,
                    dest_offset_bytes: dest as u32,
                    after,
                    used_by,
                    barrier: (number % barriers) as u16,
                    ahead: 0,
                });
            }
            let (data_first, data_end) = (data_first as u32, plan.data.len() as u32);
            plan.computes.push(ComputeOp { task, data_first, data_end });
        }
    }
    // Beside tiles prefetches go at their pace: as memory becomes free.
    if plan.data.is_empty() {
        near::pace(&mut plan, machine);
    }
    Ok(plan)
}

impl Plan {
    /// Has what waits for nothing brought ahead of the pass, where the pass before was one of the same program; but not
    /// to a worker that, with all tiles of its list taken, comes to a task that `takes_memory`, all of it, for itself.
    pub fn repeat(&mut self, takes_memory: impl Fn(u32) -> bool) {
        let n_barriers = self.n_barriers as usize;
        for WorkerPlan { data, computes, .. } in &mut self.workers {
            let n = data.len();
            if computes.iter().any(|op| op.data_end as usize == n && takes_memory(op.task)) {
                continue;
            }
            for at in 0..n.min(n_barriers) {
                let DataOp { dest_offset_bytes: start, bytes, after, .. } = data[at];
                if after > 0 {
                    break;
                }
                let overlaps =
                    |op: &DataOp| op.dest_offset_bytes < start + bytes && start < op.dest_offset_bytes + op.bytes;
                // What comes after the youngest one it overwrites, and has none of the barriers up to its own.
                let younger = data.iter().rev().take_while(|op| !overlaps(op)).count();
                data[at].ahead = 1 + younger.min(n_barriers - 1 - at) as u16;
            }
        }
    }

    /// Whether some worker is brought tiles ahead of the pass.
    pub fn repeats(&self) -> bool {
        self.workers.iter().any(|own| own.data.first().is_some_and(|op| op.ahead > 0))
    }

    /// Copies of all workers.
    pub fn n_data(&self) -> usize {
        self.workers.iter().map(|worker| worker.data.len()).sum()
    }

    /// Prefetches of all workers.
    pub fn n_prefetches(&self) -> usize {
        self.workers.iter().map(|worker| worker.prefetches.len()).sum()
    }

    /// Bytes all workers copy and prefetch.
    pub fn bytes(&self) -> u64 {
        self.workers.iter().map(WorkerPlan::bytes).sum()
    }

    /// The most bytes any worker's tiles reach up to.
    pub fn peak_bytes(&self) -> u64 {
        let ends = self.workers.iter().flat_map(|worker| &worker.data);
        ends.map(|op| u64::from(op.dest_offset_bytes) + u64::from(op.bytes)).max().unwrap_or(0)
    }
}

impl WorkerPlan {
    /// Bytes it copies and prefetches.
    pub fn bytes(&self) -> u64 {
        let copied: u64 = self.data.iter().map(|op| u64::from(op.bytes)).sum();
        copied + self.prefetches.iter().map(prefetched_bytes).sum::<u64>()
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let from = if self.first_byte > 0 { format!(" from {}", self.first_byte) } else { String::new() };
        writeln!(f, "capacity {} bytes{from}, {} barriers", self.capacity_bytes, self.n_barriers)?;
        for (number, worker) in self.workers.iter().enumerate() {
            writeln!(f, "w{number}")?;
            let mut prefetches = worker.prefetches.iter().peekable();
            for (compute, op) in worker.computes.iter().enumerate() {
                while let Some(near) = prefetches.next_if(|near| near.used_by as usize == compute) {
                    let PrefetchOp { source, source_offset_bytes, bytes, apart_bytes, stretches, .. } = near;
                    write!(
                        f,
                        "  prefetch buf{source}+{source_offset_bytes} {stretches} x {bytes} of {apart_bytes} bytes"
                    )?;
                    if near.splits > 0 {
                        write!(f, ", {} up to position, share {} of {}", near.most, near.split, near.splits)?;
                        if near.window < near.stretches {
                            write!(f, " of the last {}", near.window)?;
                        }
                    }
                    match near.after {
                        0 => writeln!(f)?,
                        after => writeln!(f, " after {after} tasks have begun")?,
                    }
                }
                for data in &worker.data[op.data_first as usize..op.data_end as usize] {
                    let DataOp { source, source_offset_bytes, bytes, dest_offset_bytes, barrier, after, .. } = data;
                    writeln!(
                        f,
                        "  load buf{source}+{source_offset_bytes} {bytes} bytes to {dest_offset_bytes} barrier {barrier} after {after}"
                    )?;
                }
                writeln!(f, "  c{compute} t{}", op.task)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Their elements have no strides: what is taken is their bytes, scales and all, in pieces as large as others'.
    #[test]
    fn rows_in_fewer_bits_are_taken_whole() {
        for dtype in [DType::Q8, DType::Q4, DType::Int4] {
            let [rows, k] = [300, 1000];
            let row_bytes = dtype.tensor_bytes(&[k]);
            let operand = Operand {
                dtype: dtype as u16,
                rank: 2,
                offset_bytes: 64,
                extent: [rows as u32, k as u32, 1, 1],
                stride_elems: [row_bytes as u32, 0, 0, 0],
                ..Operand::ABSENT
            };
            let (stream, mut taken) = (Stream { source: 0, operand, segments: 1 }, Vec::new());
            tiles(&stream, &Machine::CPU, Machine::CPU.row_bytes, &mut taken);
            let end = taken.iter().fold(64, |at, (offset, bytes)| {
                assert_eq!(
                    (*offset, u64::from(*bytes) % row_bytes),
                    (at, 0),
                    "{dtype}: whole rows, one after the other"
                );
                at + u64::from(*bytes)
            });
            assert_eq!((end - 64, stream.bytes()), (rows as u64 * row_bytes, rows as u64 * row_bytes));
            assert!(taken.len() as u64 <= stream.bytes() / (8 << 10), "{dtype}: {} pieces", taken.len());
        }
    }
}
