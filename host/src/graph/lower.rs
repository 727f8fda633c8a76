//! Kernel graph to thread-block graph: every operator gets its grid, for a target.
//!
//! Under [`Cut::TaskBytes`] columns of a weight matrix are cut so that a task reads about [`Target::task_bytes`] of weights
//! (small enough to balance, large enough that an event costs nothing beside it), but into at least one block per worker
//! where there are columns enough. Heads are cut one by one, and rows too when there are fewer heads than workers;
//! row-wise operators are cut into a block per worker once they have enough work.
//!
//! [`Cut::PerWorker`] is for passes of one row whose workers prefetch across tasks, where bytes must be even and every wait
//! costs a hop between workers:
//! - A weight matrix is cut into one block per worker, as even as its columns allow. Workers that attend get no block of
//!   the projections before it when their keys and values are as many bytes as such a block: they load those meanwhile.
//! - A row-wise operator whose result only such matrices read is *replicated*: as many blocks as the readers have, each
//!   making its own copy, block `b` of the reader reading copy `b`. Placed on one worker, the pair needs no hop.
//! - Attention is cut along positions as well as heads, into a block per worker, since there are far more workers than
//!   heads: every block writes what it found of its share, and an `attention_merge` after it, an operator of a block per
//!   head, makes the result.

use super::kernel::{Axis, AxisRole, KernelGraph, Operator};
use super::tensor::{BufferKind, TensorId, TensorTable};
use super::threadblock::{Access, AccessKind, BlockOp, GRID_AXES, KernelCall, ThreadBlockGraph, Violation, part};
use perpetua_device::kernels::{self, Attention, AttentionMerge, Numbered, Spec, Use, attention, param_words};
use perpetua_shared::{DType, Operand};

/// How operators over one row are cut. See the module head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Into tasks of about [`Target::task_bytes`].
    TaskBytes,
    /// Into one block per worker; passes of several rows as [`Cut::TaskBytes`].
    PerWorker,
}

/// What a graph is compiled for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Its name, for reports: `cpu:2`, `h200`, `reference`.
    pub name: String,
    /// Resident workers.
    pub n_workers: u32,
    /// Bytes of weights a task should read.
    pub task_bytes: u64,
    /// How many times as many in a pass of 16 rows or more, where every task packs all activations for itself.
    pub packed_times: u64,
    /// Columns a block should have a multiple of, where that is possible: what the inner loops handle at once.
    pub column_granule: u32,
    /// How operators over one row are cut.
    pub cut: Cut,
    /// Positions of the cache for each worker that attends to a head, where several do ([`Cut::PerWorker`]): at least as many
    /// as one reads while the workers of the others' shares hear of each other.
    pub split_positions: u32,
}

impl Target {
    /// CPU threads: 192 KiB of weights are 6 to 12 us of one core's bandwidth, a hundred times the cost of an event.
    ///
    /// PERF: in passes of many rows packing took 10 % of the time with tasks of 192 KiB (MiniLM, 128 tokens, 2 cores,
    /// Sapphire Rapids, 2026-11-21).
    pub fn cpu(n_workers: u32) -> Target {
        Target {
            name: format!("cpu:{n_workers}"),
            n_workers,
            task_bytes: 192 << 10,
            packed_times: 10,
            column_granule: 8,
            cut: Cut::TaskBytes,
            split_positions: u32::MAX,
        }
    }

    /// An H200: 132 SMs, whose loaders prefetch across tasks. Where rows are several, 64 KiB are 2 us of an SM's share of
    /// the memory bandwidth.
    pub fn h200() -> Target {
        Target { name: "h200".to_owned(), ..Target::gpu(132) }
    }

    /// As [`Target::h200`], with `n_workers` SMs.
    pub fn gpu(n_workers: u32) -> Target {
        Target {
            name: format!("gpu:{n_workers}"),
            n_workers,
            task_bytes: 64 << 10,
            packed_times: 1,
            column_granule: 8,
            cut: Cut::PerWorker,
            split_positions: 512,
        }
    }

    /// A generic target of `n_workers` workers.
    pub fn workers(n_workers: u32) -> Target {
        Target {
            name: format!("workers:{n_workers}"),
            n_workers,
            task_bytes: 64 << 10,
            packed_times: 1,
            column_granule: 8,
            cut: Cut::TaskBytes,
            split_positions: u32::MAX,
        }
    }

    /// One worker, nothing cut: what the reference executor runs.
    pub fn reference() -> Target {
        Target {
            name: "reference".to_owned(),
            n_workers: 1,
            task_bytes: u64::MAX,
            packed_times: 1,
            column_granule: 1,
            cut: Cut::TaskBytes,
            split_positions: u32::MAX,
        }
    }
}

/// Rows from which on [`Target::packed_times`] counts.
const PACKED_ROWS: u32 = 16;

/// A matrix below this is not worth cutting.
const SMALL_MATRIX_BYTES: u64 = 16 << 10;

/// Elements a row-wise task should have before its operator is cut further.
const ROW_TASK_ELEMS: usize = 2048;

/// Cuts every operator of `graph` for `target`.
///
/// # Errors
/// The laws of the thread-block graph that a cut given by hand breaks, and every block its macro kernel refuses.
pub fn lower(graph: &KernelGraph, target: &Target) -> Result<ThreadBlockGraph, Vec<Violation>> {
    let times = if graph.rows.is_some_and(|rows| rows >= PACKED_ROWS) { target.packed_times } else { 1 };
    let target = &Target { task_bytes: target.task_bytes.saturating_mul(times), ..target.clone() };
    let ops = graph.ops().map(|op| op.cut.clone().unwrap_or_else(|| cut(op, &graph.table, target))).collect();
    let mut lowered = ThreadBlockGraph { table: graph.table.clone(), ops };
    if target.cut == Cut::PerWorker && graph.rows == Some(1) {
        one_block_per_worker(graph, &mut lowered, target);
        replicate(graph, &mut lowered);
        split_positions(graph, &mut lowered, target);
    }
    lowered.check()?;
    Ok(lowered)
}

fn cut(op: &Operator, table: &TensorTable, target: &Target) -> BlockOp {
    let spec = Spec::of(op.kernel.task_type).expect("operators are judged when they are added");
    let mut grid = [1u32; GRID_AXES];
    let heads = op.axes.iter().find(|axis| axis.role == AxisRole::Heads).map_or(1, |axis| axis.len);
    for (axis, blocks) in op.axes.iter().zip(&mut grid) {
        *blocks = match axis.role {
            // Nothing is cut where nothing runs side by side, except what the tensors' shapes demand.
            AxisRole::Blocks => axis.len as u32,
            _ if target.n_workers == 1 && target.task_bytes == u64::MAX => 1,
            AxisRole::Heads => axis.len as u32,
            AxisRole::Columns => column_blocks(op, axis, table, target),
            AxisRole::Rows => row_blocks(op, axis, table, target, heads),
        };
    }
    let accesses = spec.slots.iter().zip(&op.slots).enumerate().map(|(slot, (declared, tensor))| {
        let mut map = [None; GRID_AXES];
        for (axis, entry) in op.axes.iter().zip(&mut map) {
            *entry = axis.dims[slot];
        }
        let kind = match declared.usage {
            Use::Read => AccessKind::Read,
            Use::Write => AccessKind::Write,
            Use::Update => AccessKind::ReadWrite,
        };
        tensor.map(|tensor| Access { tensor, kind, map })
    });
    let row_axis = op.axes.iter().position(|axis| axis.role == AxisRole::Rows);
    BlockOp {
        name: op.name.clone(),
        grid,
        accesses: accesses.collect(),
        row_axis: row_axis.map(|axis| axis as u8),
        rows: row_axis.map_or(0, |axis| op.axes[axis].len as u32),
        kernel: Some(op.kernel),
    }
}

/// Bytes of the tensors that the axis cuts and the operator only reads: what a task streams.
fn read_bytes(op: &Operator, axis: &Axis, table: &TensorTable) -> u64 {
    let cut = op.slots.iter().zip(&axis.dims).filter(|(_, dim)| dim.is_some());
    cut.filter_map(|(slot, _)| *slot)
        .map(|t| (table[t].len_elems() * table[t].dtype.size_bytes()) as u64)
        .max()
        .unwrap_or(0)
}

/// Whether `op`'s only axis cuts the columns of a weight, as a linear's does.
fn is_matrix(op: &Operator, table: &TensorTable) -> bool {
    let [axis] = &op.axes[..] else { return false };
    let mut cut = op.slots.iter().zip(&axis.dims).filter(|(_, dim)| dim.is_some()).filter_map(|(slot, _)| *slot);
    let is_weight =
        |t: TensorId| table[t].shape.len() > 1 && table.buffers[table[t].buffer.idx()].kind == BufferKind::Weight;
    op.cut.is_none() && axis.role == AxisRole::Columns && cut.any(is_weight)
}

fn one_block_per_worker(graph: &KernelGraph, lowered: &mut ThreadBlockGraph, target: &Target) {
    let table = &graph.table;
    let state_bytes = |op: &Operator| -> u64 {
        let spec = Spec::of(op.kernel.task_type).expect("operators are judged when they are added");
        let slots = spec.slots.iter().zip(&op.slots).filter(|(slot, _)| slot.usage == Use::Read);
        let buffers = slots.filter_map(|(_, t)| t.map(|t| &table.buffers[table[t].buffer.idx()]));
        buffers.filter(|buffer| buffer.kind == BufferKind::State).map(|buffer| buffer.bytes).sum()
    };
    let ops: Vec<&Operator> = graph.ops().collect();
    // From the end: the projections between a row-wise operator and an attention run beside it.
    let mut attending = (0u32, 0u64);
    let mut end = ops.len();
    while end > 0 {
        let op = ops[end - 1];
        if !is_matrix(op, table) {
            if op.axes.iter().any(|axis| axis.role == AxisRole::Heads) {
                let blocks = lowered.ops[end - 1].n_blocks() as u32 * n_splits(table, op, target);
                let bytes = state_bytes(op);
                if bytes > 0 {
                    attending = (blocks, bytes / u64::from(blocks));
                }
            } else {
                attending = (0, 0);
            }
            end -= 1;
            continue;
        }
        let first = (0..end).rev().find(|at| !is_matrix(ops[*at], table)).map_or(0, |at| at + 1);
        let bytes: u64 = ops[first..end].iter().map(|op| read_bytes(op, &op.axes[0], table)).sum();
        let (blocks, block_bytes) = attending;
        let beside = blocks < target.n_workers / 2 && 2 * block_bytes * u64::from(target.n_workers) >= bytes;
        let workers = target.n_workers - if beside { blocks } else { 0 };
        for at in first..end {
            if read_bytes(ops[at], &ops[at].axes[0], table) >= SMALL_MATRIX_BYTES {
                lowered.ops[at].grid[0] = workers.min(ops[at].axes[0].len as u32);
            }
        }
        attending = (0, 0);
        end = first;
    }
}

/// Gives every matrix operator its own copy of a row-wise operator's result. See the module head.
fn replicate(graph: &KernelGraph, lowered: &mut ThreadBlockGraph) {
    let ops: Vec<&Operator> = graph.ops().collect();
    for (number, op) in ops.iter().enumerate() {
        let [axis] = &op.axes[..] else { continue };
        if axis.role != AxisRole::Rows || op.cut.is_some() {
            continue;
        }
        let writes = lowered.ops[number].accesses.iter().flatten().filter(|access| access.kind.writes());
        let [made] = writes.map(|access| access.tensor).collect::<Vec<_>>()[..] else { continue };
        let buffer = lowered.table[made].buffer;
        let is_output = graph.outputs().iter().any(|(_, t)| lowered.table[*t].buffer == buffer);
        if is_output || lowered.table.buffers[buffer.idx()].kind != BufferKind::Intermediate {
            continue;
        }
        // Every other use: a matrix operator that reads the tensor whole, all cut alike.
        let mut readers = Vec::new();
        let mut copies = None;
        let mut only_matrices = true;
        for (at, other) in lowered.ops.iter().enumerate().filter(|(at, _)| *at != number) {
            for access in other.accesses.iter().flatten() {
                if lowered.table[access.tensor].buffer != buffer {
                    continue;
                }
                let fits = access.tensor == made
                    && access.kind == AccessKind::Read
                    && access.map == [None; GRID_AXES]
                    && at > number
                    && is_matrix(ops[at], &graph.table)
                    && *copies.get_or_insert(other.grid[0]) == other.grid[0];
                only_matrices &= fits;
                readers.push(at);
            }
        }
        let Some(copies) = copies.filter(|copies| only_matrices && *copies > 1) else { continue };
        let tensor = &lowered.table[made];
        let shape = [copies as usize, tensor.len_elems()];
        let (name, dtype) = (format!("{} copies", tensor.name), tensor.dtype);
        let Ok(replicas) = lowered.table.add(&name, &shape, dtype, BufferKind::Intermediate) else { continue };
        let copy = [Some(0), None, None];
        for at in readers {
            for access in lowered.ops[at].accesses.iter_mut().flatten().filter(|access| access.tensor == made) {
                (access.tensor, access.map) = (replicas, copy);
            }
        }
        let block = &mut lowered.ops[number];
        (block.grid, block.row_axis, block.rows) = ([copies, 1, 1], None, 0);
        for access in block.accesses.iter_mut().flatten() {
            access.map = [None; GRID_AXES];
            if access.tensor == made {
                (access.tensor, access.map) = (replicas, copy);
            }
        }
    }
}

/// Splits of a head's positions at most: what a merge reads grows with them, what they save does not.
const MAX_SPLITS: u32 = 16;

/// How many ways the positions that `op` attends to, in a pass of one row, are split for `target`: as many as there are
/// workers for a head, and positions for. 1 where it is no attention.
fn n_splits(table: &TensorTable, op: &Operator, target: &Target) -> u32 {
    if op.kernel.task_type != Attention::TASK_TYPE || op.cut.is_some() {
        return 1;
    }
    let heads = op.axes.iter().find(|axis| axis.role == AxisRole::Heads).map_or(1, |axis| axis.len as u32);
    // The keys: [heads, positions, head dim].
    let positions = op.slots[1].map_or(0, |keys| table[keys].shape[1] as u32);
    (target.n_workers / heads.max(1)).min(positions / target.split_positions).clamp(1, MAX_SPLITS)
}

/// Cuts attention along positions. See the module head.
fn split_positions(graph: &KernelGraph, lowered: &mut ThreadBlockGraph, target: &Target) {
    let cut = std::mem::take(&mut lowered.ops);
    for (op, mut block) in graph.ops().zip(cut) {
        let merge = match n_splits(&graph.table, op, target) {
            1 => None,
            splits => split(&mut lowered.table, &mut block, splits),
        };
        lowered.ops.push(block);
        lowered.ops.extend(merge);
    }
}

/// Cuts `block`, an attention of one row whose axes are heads and rows, `splits` ways along positions: splits take the
/// place of the rows. What it finds goes to a tensor of its own, from which the operator returned makes the result.
fn split(table: &mut TensorTable, block: &mut BlockOp, splits: u32) -> Option<BlockOp> {
    let (Some(kernel), [Some(q), Some(_), Some(_), Some(y)]) = (&mut block.kernel, &mut block.accesses[..]) else {
        return None;
    };
    let [_, heads, group, d] = table[q.tensor].shape[..] else { return None };
    let shape = [heads, splits as usize, group, 2 + d];
    let parts = table.add(&format!("{} parts", block.name), &shape, DType::F32, BufferKind::Intermediate).ok()?;
    let params: attention::Params = kernels::params(&kernel.params);
    kernel.params = param_words(&attention::Params { splits, ..params });
    q.map[1] = None;
    let whole = std::mem::replace(y, Access { tensor: parts, kind: AccessKind::Write, map: [Some(0), Some(1), None] });
    (block.grid[1], block.row_axis, block.rows) = (splits, None, 0);
    let by_head = |tensor, kind, dim| Some(Access { tensor, kind, map: [Some(dim), None, None] });
    Some(BlockOp {
        name: format!("{} merge", block.name),
        grid: [block.grid[0], 1, 1],
        accesses: vec![by_head(parts, AccessKind::Read, 0), by_head(whole.tensor, AccessKind::Write, 1)],
        row_axis: None,
        rows: 0,
        kernel: Some(KernelCall {
            task_type: AttentionMerge::TASK_TYPE,
            flags: kernel.flags,
            params: param_words(&kernels::attention_merge::Params {}),
        }),
    })
}

fn column_blocks(op: &Operator, axis: &Axis, table: &TensorTable, target: &Target) -> u32 {
    let workers = target.n_workers as usize;
    let bytes = read_bytes(op, axis, table);
    let granules = (axis.len / target.column_granule as usize).max(1);
    let wanted = (bytes.div_ceil(target.task_bytes) as usize).next_multiple_of(workers).clamp(1, granules);
    if bytes < SMALL_MATRIX_BYTES {
        return 1;
    }
    // A count near the wanted one that divides the granules makes every block's columns whole granules.
    let fits =
        |blocks: &usize| granules.is_multiple_of(*blocks) && axis.len.is_multiple_of(target.column_granule as usize);
    let near = (wanted..=wanted + wanted / 2).find(|b| fits(b) && b.is_multiple_of(workers));
    near.or_else(|| (wanted..=wanted + wanted / 2).find(fits)).unwrap_or(wanted) as u32
}

fn row_blocks(op: &Operator, axis: &Axis, table: &TensorTable, target: &Target, heads: usize) -> u32 {
    let workers = target.n_workers as usize;
    if op.axes.iter().any(|axis| axis.role == AxisRole::Heads) {
        return workers.div_ceil(heads).min(axis.len.div_ceil(16)).max(1) as u32;
    }
    let elems = op.slots.iter().zip(&axis.dims).filter(|(_, dim)| dim.is_some()).filter_map(|(slot, _)| *slot);
    let elems = elems.map(|t| table[t].len_elems()).max().unwrap_or(0);
    (elems / ROW_TASK_ELEMS).clamp(1, workers).min(axis.len) as u32
}

/// The operand of a block: `access`'s box of its tensor, without an address (binding 0, offset from the buffer's start).
pub fn block_operand(
    graph: &ThreadBlockGraph,
    op: super::tensor::OpId,
    access: &Access,
    block: [u32; GRID_AXES],
) -> Operand {
    let tensor = &graph.table[access.tensor];
    let mut operand = super::kernel::whole_operand(tensor);
    let grid = graph.ops[op.idx()].grid;
    let mut first = tensor.offset_elems;
    for (axis, dim) in access.map.iter().enumerate() {
        let Some(dim) = dim.map(usize::from) else { continue };
        let range = part(tensor.shape[dim], block[axis], grid[axis]);
        first += range.start * tensor.strides[dim];
        operand.extent[dim] = range.len() as u32;
    }
    operand.offset_bytes = (first * tensor.dtype.size_bytes()) as u64;
    operand
}
