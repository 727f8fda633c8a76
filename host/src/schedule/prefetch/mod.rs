//! Per-worker plans of shared memory: which bytes each worker's loader fetches, in which order, to where, and from when on.
//!
//! ```text
//! worker's tasks    | norm |     q_proj      | o_proj     ...        (events between them)
//! compute ops       |  c0  | c1   c2   c3    | c4   c5    ...
//! data ops          | d0   | d1   d2   d3    | d4   d5    ...        d4 starts when c1 has freed its bytes,
//! shared memory     [d0|d1|d2|d3]  then  [d4|d5|..]                  while q_proj may still wait for its event
//! ```
//!
//! A task *streams* the weights and cache rows it reads: they are cut into tiles of whole rows where a row fits a tile.
//! The task becomes as many compute ops as its longest stream has tiles; compute op `i` consumes tile `i` of each stream
//! (gate with up, keys with values), and a task that streams nothing is one compute op. Data ops are all tiles of a
//! worker's list in the order they are consumed, across tasks and operators: weights depend on no activation, so the
//! loader waits on no event, only for room. Cache rows that this pass appends are the exception, and are left out of the
//! copy ([`DataFlags::UP_TO_POSITION`]): the task reads those few rows itself, after its events.
//!
//! Compute ops retire in the order in which their tiles were loaded, so a ring is the best allocator there is: a tile goes
//! where the one before it ends, or to the start of memory, and may be loaded once the youngest tile it overwrites has
//! been consumed. This is the feasible memory scheduler of [`super::plain`] with its data ops in consumption order and
//! nothing ever spilled, in linear time.
//!
//! Laws, judged by [`check()`], which shares no code with the planner: a plan covers exactly the streams of its tasks; no two
//! tiles that may be live together overlap or share a barrier; nothing leaves the capacity; no copy waits for its own
//! reader or a later one, so that loader and consumer always get on.

mod check;

pub use check::{Violation, check};

use crate::compile::task_operands;
use crate::graph::task::{TaskGraph, WorkerLists};
use crate::graph::tensor::BufferKind;
use crate::graph::threadblock::{Access, AccessKind, BlockOp, GRID_AXES, ThreadBlockGraph, part};
use crate::schedule::machine::Machine;
use perpetua_device::kernels::Cost;
use perpetua_shared::limits::MAX_RANK;
use perpetua_shared::{DataFlags, DataOp, Operand};
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
    /// What its consumers do, in order.
    pub computes: Vec<ComputeOp>,
}

/// The shared memory of every worker, over time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Bytes tiles may occupy on a worker.
    pub capacity_bytes: u64,
    /// Barriers a worker has.
    pub n_barriers: u32,
    /// Per worker.
    pub workers: Vec<WorkerPlan>,
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
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
    /// See [`DataFlags`].
    pub flags: u16,
    /// Its box.
    pub operand: Operand,
}

impl Stream {
    /// Bytes in the box.
    pub fn bytes(&self) -> u64 {
        self.operand.len_elems() * self.operand.dtype().map_or(0, |dtype| dtype.size_bytes() as u64)
    }
}

/// Buffers that some operator of `graph` writes.
fn written(graph: &ThreadBlockGraph) -> Vec<bool> {
    let mut written = vec![false; graph.table.buffers.len()];
    for access in graph.ops.iter().flat_map(|op| op.accesses.iter().flatten()).filter(|access| access.kind.writes()) {
        written[graph.table[access.tensor].buffer.idx()] = true;
    }
    written
}

/// Per task, the operands it streams: what it only reads, of weights and state. A task whose declared cost reads less
/// than that looks rows up in a table and streams nothing.
pub fn streams(graph: &ThreadBlockGraph, tasks: &TaskGraph, costs: &[Cost]) -> Vec<Vec<Stream>> {
    let written = written(graph);
    let mut buffer = Vec::new();
    let of_task = |(task, cost): (&crate::graph::task::Task, &Cost)| {
        let accesses = &graph.ops[task.op as usize].accesses;
        let mut streams = Vec::new();
        for (access, operand) in accesses.iter().zip(task_operands(graph, task, &mut buffer)) {
            let Some(access) = access.as_ref().filter(|access| access.kind == AccessKind::Read) else { continue };
            let buffer = graph.table[access.tensor].buffer.idx();
            if !matches!(graph.table.buffers[buffer].kind, BufferKind::Weight | BufferKind::State) {
                continue;
            }
            let flags = if written[buffer] { DataFlags::UP_TO_POSITION } else { 0 };
            let mut operand = *operand;
            if graph.table.buffers[buffer].kind == BufferKind::State {
                narrow(&graph.ops[task.op as usize], access, task.block, &mut operand);
            }
            streams.push(Stream { source: buffer as u32, flags, operand });
        }
        if streams.iter().map(Stream::bytes).sum::<u64>() > cost.bytes_read {
            streams.clear();
        }
        streams
    };
    tasks.tasks.iter().zip(costs).map(of_task).collect()
}

/// Narrows `operand`, a cache's rows, to the block's share of them where an axis other than the pass's rows cuts positions:
/// which those are is known at run time, and with a full cache these.
fn narrow(op: &BlockOp, access: &Access, block: [u32; GRID_AXES], operand: &mut Operand) {
    let shares = |axis: &usize| op.grid[*axis] > 1 && access.map[*axis].is_none() && op.row_axis != Some(*axis as u8);
    let Some(axis) = (0..GRID_AXES).find(shares) else { return };
    let share = part(operand.extent[1] as usize, block[axis], op.grid[axis]);
    let row_bytes = operand.stride_elems[1] as usize * operand.dtype().map_or(0, |dtype| dtype.size_bytes());
    operand.offset_bytes += (share.start * row_bytes) as u64;
    operand.extent[1] = share.len() as u32;
}

/// The contiguous pieces of `stream`, none larger than `tile_bytes`, as offset and bytes in its source.
fn tiles(stream: &Stream, tile_bytes: u64, out: &mut Vec<(u64, u32)>) {
    out.clear();
    let operand = &stream.operand;
    let elem = operand.dtype().map_or(0, |dtype| dtype.size_bytes() as u64);
    if operand.len_elems() * elem == 0 {
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
    let piece = match tile_bytes / row {
        0 => row.div_ceil(row.div_ceil(tile_bytes)).next_multiple_of(TILE_ALIGN_BYTES).min(tile_bytes),
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
    capacity_bytes: u64,
    head: u64,
    /// Start, end and reader of tiles that may still be live, oldest first.
    live: VecDeque<(u64, u64, u32)>,
    after: u32,
}

impl Ring {
    /// Room for `bytes`: where, and how many compute ops must have retired before.
    fn place(&mut self, bytes: u64, used_by: u32) -> (u64, u32) {
        if self.head + bytes > self.capacity_bytes {
            self.head = 0;
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
/// A task that needs more at once than a worker has.
pub fn plan(
    graph: &ThreadBlockGraph,
    tasks: &TaskGraph,
    lists: &WorkerLists,
    streams: &[Vec<Stream>],
    machine: &Machine,
) -> Result<Plan, PlanError> {
    let name = |task: u32| graph.ops[tasks.tasks[task as usize].op as usize].name.clone();
    let workers = lists.lists.iter().map(|list| plan_list(list, streams, machine, &name)).collect::<Result<_, _>>()?;
    Ok(Plan { capacity_bytes: machine.capacity_bytes(), n_barriers: machine.n_barriers, workers })
}

/// Plans the shared memory of the worker whose tasks are `list`; `name` says a task's operator for the error.
///
/// # Errors
/// As [`plan`].
pub fn plan_list(
    list: &[u32],
    streams: &[Vec<Stream>],
    machine: &Machine,
    name: &dyn Fn(u32) -> String,
) -> Result<WorkerPlan, PlanError> {
    let capacity_bytes = machine.capacity_bytes();
    let barriers = machine.n_barriers as usize;
    let mut plan = WorkerPlan::default();
    let mut ring = Ring { capacity_bytes, head: 0, live: VecDeque::new(), after: 0 };
    let mut cut: Vec<Vec<(u64, u32)>> = Vec::new();
    for &task in list {
        let streams = &streams[task as usize];
        cut.resize_with(cut.len().max(streams.len()), Vec::new);
        for (stream, tiles_of) in streams.iter().zip(&mut cut) {
            tiles(stream, machine.tile_bytes, tiles_of);
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
            if ring.head + needed > capacity_bytes && 2 * needed > capacity_bytes {
                ring.head = 0;
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
                    flags: stream.flags,
                });
            }
            let (data_first, data_end) = (data_first as u32, plan.data.len() as u32);
            plan.computes.push(ComputeOp { task, data_first, data_end });
        }
    }
    Ok(plan)
}

impl Plan {
    /// Copies of all workers.
    pub fn n_data(&self) -> usize {
        self.workers.iter().map(|worker| worker.data.len()).sum()
    }

    /// Bytes all workers copy.
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
    /// Bytes it copies.
    pub fn bytes(&self) -> u64 {
        self.data.iter().map(|op| u64::from(op.bytes)).sum()
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "capacity {} bytes, {} barriers", self.capacity_bytes, self.n_barriers)?;
        for (number, worker) in self.workers.iter().enumerate() {
            writeln!(f, "w{number}")?;
            for (compute, op) in worker.computes.iter().enumerate() {
                for data in &worker.data[op.data_first as usize..op.data_end as usize] {
                    writeln!(
                        f,
                        "  load buf{}+{} {} bytes to {} barrier {} after {}{}",
                        data.source,
                        data.source_offset_bytes,
                        data.bytes,
                        data.dest_offset_bytes,
                        data.barrier,
                        data.after,
                        if data.flags & DataFlags::UP_TO_POSITION != 0 { " up to position" } else { "" }
                    )?;
                }
                writeln!(f, "  c{compute} t{}", op.task)?;
            }
        }
        Ok(())
    }
}
