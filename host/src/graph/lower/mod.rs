//! Kernel graph to thread-block graph: every operator gets its grid, for a target.
//!
//! Under [`Cut::TaskBytes`] columns of a weight matrix are cut so that a task reads about [`Target::task_bytes`] of
//! weights (small enough to balance, large enough that an event costs nothing beside it), but into at least one block
//! per worker where there are columns enough. Heads are cut one by one, and rows too when there are fewer heads than
//! workers; row-wise operators are cut into a block per worker once they have enough work.
//!
//! [`Cut::PerWorker`]: see [`per_worker`] for passes of one row, [`many_rows`] for others. Graphs that do not decode:
//! [`whole_pass`].

mod experts;
mod few_rows;
mod fuse;
mod many_rows;
mod per_worker;
mod whole_pass;

pub(in crate::graph) use per_worker::COPY;

use super::kernel::{Axis, AxisRole, KernelGraph, Operator, Pass, PromptPrecision, of_one_head, whole_operand};
use super::tensor::{BufferKind, TensorId, TensorTable};
use super::threadblock::{Access, AccessKind, BlockOp, GRID_AXES, KernelCall, ThreadBlockGraph, Violation, part};
use crate::machine::Machine;
use perpetua_device::kernels::{
    self, Attention, AttentionMerge, DecodeAttention, ExpertsDown, ExpertsUp, GatedLinear, Linear, MAX_NORMED,
    Numbered, Spec, Use, attention, decode_attention, experts_down, experts_up, gated_linear, linear, param_words,
    routed_linear,
};
use perpetua_shared::{DType, Operand, TaskFlags};

// Of every product, whose second matrix comes after the first.
use linear::slot::{W, X};

const _: () = {
    use gated_linear::slot;
    assert!(X == slot::X && W == slot::GATE && W + 1 == slot::UP);
    assert!(X == experts_up::slot::X && X == experts_down::slot::X && X == routed_linear::slot::X);
};

/// How operators are cut. See the module head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Into tasks of about [`Target::task_bytes`].
    TaskBytes,
    /// In passes of one row into a block per worker, in those of several into parts that share what they read; graphs
    /// that do not say how many rows they have, as [`Cut::TaskBytes`].
    PerWorker,
}

/// What a graph is compiled for.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    /// Its name, for reports: `cpu:2`, `h200`, `reference`.
    pub name: String,
    /// Resident workers.
    pub n_workers: u32,
    /// Bytes of weights a task should read.
    pub task_bytes: u64,
    /// Whether tasks of 8 rows or more pack all their activations, each for itself: then there are as few as workers,
    /// of any size.
    pub packs_rows: bool,
    /// Columns a block should have a multiple of, where that is possible: what the inner loops handle at once.
    pub column_granule: u32,
    /// How operators are cut.
    pub cut: Cut,
    /// Whether graphs that do not decode are cut by rows, where every worker has enough of them (see [`whole_pass`]).
    pub cuts_rows: bool,
    /// Whether workers have loaders, which bring weights into their shared memory.
    pub has_loaders: bool,
    /// Positions of the cache that a worker should have at least, where several share a head's ([`Cut::PerWorker`]); of
    /// such whose keys and values are wider than most, fewer.
    pub split_positions: u32,
    /// Bytes that a worker reads of what another wrote in the time that a hop between two takes ([`Cut::PerWorker`]).
    pub hop_bytes: u64,
    /// Whether workers hand each other what they can by [flags](perpetua_shared::flag), where a pass has one row.
    pub has_flags: bool,
    /// What its workers are.
    pub machine: Machine,
}

impl Target {
    /// CPU threads: 512 KiB of weights are 13 to 30 us of one core's bandwidth, and half of what it may ask for ahead
    /// (`Machine::CPU`).
    ///
    /// PERF: the four streams of a task begin at other places than those of the task before ended, and the hardware's
    /// own prefetching has to find them again: with 192 KiB two cores read weights at 62 GB/s, with 512 KiB at 65, with
    /// 1 to 4 MiB at 66 to 67, of 74 to 80 (Turin, 2026-11-24; docs/cpu.md).
    ///
    /// PERF: in passes of many rows packing took 10 % of the time with tasks of 192 KiB (MiniLM, 128 tokens); with tasks ten
    /// times as large it takes 4 %, and qwen3-0.6b reads a prompt of 512 tokens at 197 tokens/s where it was 173. With a task
    /// per worker, of up to 6 MiB, packing takes 12 % of the time that tiles of a matrix unit do, where it was 17 % (2 cores,
    /// Sapphire Rapids, 2026-11-21).
    pub fn cpu(n_workers: u32) -> Target {
        Target {
            name: format!("cpu:{n_workers}"),
            task_bytes: 512 << 10,
            packs_rows: true,
            cuts_rows: true,
            has_loaders: false,
            machine: Machine::CPU,
            ..Target::workers(n_workers)
        }
    }

    /// An H200: 132 SMs, whose loaders prefetch across tasks. Where rows are several, 64 KiB are 2 us of an SM's share
    /// of the memory bandwidth.
    pub fn h200() -> Target {
        Target { name: "h200".to_owned(), ..Target::gpu(132) }
    }

    /// As [`Target::h200`], with `n_workers` SMs.
    pub fn gpu(n_workers: u32) -> Target {
        Target {
            name: format!("gpu:{n_workers}"),
            cut: Cut::PerWorker,
            split_positions: 64,
            // Found by predicted steps: with what L2 gives in a hop by flags and a task's own cost, 34 KB, they are up
            // to 7 us longer at 512 positions.
            hop_bytes: 80_000,
            has_flags: true,
            ..Target::workers(n_workers)
        }
    }

    /// A generic target of `n_workers` workers, which are SMs of an H200 as far as it is planned and predicted; the
    /// others say how they differ.
    pub fn workers(n_workers: u32) -> Target {
        Target {
            name: format!("workers:{n_workers}"),
            n_workers,
            task_bytes: 64 << 10,
            packs_rows: false,
            column_granule: 8,
            cut: Cut::TaskBytes,
            cuts_rows: false,
            has_loaders: true,
            split_positions: u32::MAX,
            hop_bytes: 0,
            has_flags: false,
            machine: Machine::H200,
        }
    }

    /// One worker, nothing cut: what the reference executor runs.
    pub fn reference() -> Target {
        Target {
            name: "reference".to_owned(),
            task_bytes: u64::MAX,
            column_granule: 1,
            has_loaders: false,
            ..Target::workers(1)
        }
    }
}

/// The machine of `target` as the tiles of `graph` find it: less what bodies take beside them.
pub(crate) fn machine_of(graph: &ThreadBlockGraph, target: &Target) -> Machine {
    let [bodies_bytes, row_bytes] = few_rows::room(graph);
    if bodies_bytes == 0 || !graph.has_tiles {
        return target.machine;
    }
    target.machine.beside(bodies_bytes, row_bytes).expect("passes of a few rows have tiles where there is room")
}

/// Rows from which on [`Target::packs_rows`] counts.
const PACKED_ROWS: u32 = 8;

/// A matrix below this is not worth cutting.
const SMALL_MATRIX_BYTES: u64 = 16 << 10;

/// Of experts' weights a task's stretch of one is this part of what a task of another product reads: each begins anew.
///
/// PERF: see docs/cpu.md, experts.
const STRETCHES: u64 = 3;

/// Elements a row-wise task should have before its operator is cut further.
const ROW_TASK_ELEMS: usize = 2048;

/// Cuts every operator of `graph` for `target`.
///
/// # Errors
/// The laws of the thread-block graph that a cut given by hand breaks, and every block its macro kernel refuses.
pub fn lower(graph: &KernelGraph, target: &Target) -> Result<ThreadBlockGraph, Vec<Violation>> {
    match graph.rows {
        Some(1) if target.cut == Cut::PerWorker => return per_worker::lower(graph, target),
        Some(_) if target.cut == Cut::PerWorker => return many_rows::lower(graph, target),
        _ => {}
    }
    let lowered = cut_all(graph, target);
    lowered.check()?;
    Ok(lowered)
}

fn cut_all(graph: &KernelGraph, target: &Target) -> ThreadBlockGraph {
    let are_few = target.packs_rows && graph.rows.is_some_and(|rows| rows >= PACKED_ROWS);
    let task_bytes = if are_few { u64::MAX } else { target.task_bytes };
    let target = &Target { task_bytes, ..target.clone() };
    let mut ops: Vec<BlockOp> =
        graph.ops().map(|op| op.cut.clone().unwrap_or_else(|| cut(op, graph, target))).collect();
    set_order(graph, &mut ops);
    if !decodes(graph) {
        whole_pass::lower(graph, target, &mut ops);
    }
    ThreadBlockGraph { table: graph.table.clone(), ops, has_tiles: graph.rows == Some(1) }
}

/// Rows from which on a pass that reads a prompt may be multiplied as matrix units do, or in pairs of bf16.
const PROMPT_ROWS: u32 = 16;

/// Tells products how they may sum.
fn set_order(graph: &KernelGraph, ops: &mut [BlockOp]) {
    let order = match graph.rows {
        _ if !decodes(graph) => linear::Order::Free,
        Some(rows) if rows >= PROMPT_ROWS && graph.pass == Pass::Sequence => match graph.prompt_precision {
            PromptPrecision::Exact => return,
            PromptPrecision::High => linear::Order::Prompt,
            PromptPrecision::Bf16 => linear::Order::Rounded,
        },
        _ => return,
    } as u32;
    for kernel in ops.iter_mut().filter_map(|op| op.kernel.as_mut()) {
        kernel.params = match kernel.task_type {
            Linear::TASK_TYPE => param_words(&linear::Params { order, ..kernels::params(&kernel.params) }),
            GatedLinear::TASK_TYPE => param_words(&gated_linear::Params { order, ..kernels::params(&kernel.params) }),
            Attention::TASK_TYPE => param_words(&attention::Params { order, ..kernels::params(&kernel.params) }),
            ExpertsUp::TASK_TYPE => param_words(&experts_up::Params { order, ..kernels::params(&kernel.params) }),
            ExpertsDown::TASK_TYPE => param_words(&experts_down::Params { order, ..kernels::params(&kernel.params) }),
            _ => kernel.params,
        };
    }
}

/// Whether passes of one row go on where passes of many ended, and must give the bits these would.
fn decodes(graph: &KernelGraph) -> bool {
    graph.table.buffers.iter().any(|buffer| buffer.kind == BufferKind::State)
}

fn cut(op: &Operator, graph: &KernelGraph, target: &Target) -> BlockOp {
    let table = &graph.table;
    let spec = Spec::of(op.kernel.task_type).expect("operators are judged when they are added");
    let mut grid = [1u32; GRID_AXES];
    let heads = op.axes.iter().filter(|axis| are_heads(axis)).map(|axis| axis.len).product();
    // In the pass over a batch every sequence has an operator of its own of such a kind.
    let alike = match TaskFlags::sequence(op.kernel.flags) {
        Some(_) if graph.pass == Pass::Batch => graph.rows.unwrap_or(1),
        _ => 1,
    };
    for (axis, blocks) in op.axes.iter().zip(&mut grid) {
        *blocks = match axis.role {
            // Nothing is cut where nothing runs side by side, except what the tensors' shapes demand.
            AxisRole::Blocks | AxisRole::SingleHeads => axis.len as u32,
            _ if target.n_workers == 1 && target.task_bytes == u64::MAX => 1,
            AxisRole::Heads => axis.len as u32,
            AxisRole::HeadColumns => head_parts(axis, heads * alike as usize, target),
            AxisRole::Columns => column_blocks(op, axis, table, target).div_ceil(alike),
            AxisRole::Rows => row_blocks(op, axis, table, target, heads),
        };
    }
    let accesses = spec.slots.iter().zip(&op.slots).enumerate().map(|(slot, (_, tensor))| {
        let mut map = [None; GRID_AXES];
        for (axis, entry) in op.axes.iter().zip(&mut map) {
            *entry = axis.dims[slot];
        }
        let usage = kernels::use_of(spec, slot, |slot| op.slots[slot].is_some());
        tensor.map(|tensor| Access { tensor, kind: usage.into(), map })
    });
    let axis_of = |role| op.axes.iter().position(|axis| axis.role == role);
    let row_axis = axis_of(AxisRole::Rows);
    BlockOp {
        name: op.name.clone(),
        grid,
        accesses: accesses.collect(),
        row_axis: row_axis.map(|axis| axis as u8),
        rows: row_axis.map_or(0, |axis| op.axes[axis].len as u32),
        head_axis: axis_of(AxisRole::SingleHeads).map(|axis| axis as u8),
        kernel: Some(op.kernel),
    }
}

/// Whether `axis` runs over heads.
fn are_heads(axis: &Axis) -> bool {
    matches!(axis.role, AxisRole::Heads | AxisRole::SingleHeads)
}

/// The operators of `ops` that are `such`, products, those of the same x that follow each other together, as they run
/// side by side; and where the first of them stands.
fn side_by_side<'a, 'b>(ops: &'a [&'b Operator], such: impl Fn(&Operator) -> bool) -> Vec<(usize, &'a [&'b Operator])> {
    let (mut found, mut first) = (Vec::new(), 0);
    for group in ops.chunk_by(|a, b| such(a) && such(b) && a.slots[X] == b.slots[X]) {
        if such(group[0]) {
            found.push((first, group));
        }
        first += group.len();
    }
    found
}

/// Bytes of the largest tensor that the axis cuts: what a task streams.
fn read_bytes(op: &Operator, axis: &Axis, table: &TensorTable) -> u64 {
    if let Some(stack) = op.slots.iter().flatten().find(|t| table.is_stack(**t)) {
        // A task reads a stretch of each expert that rows go to, one after the other.
        return STRETCHES * table.buffer_of(*stack).bytes / table[*stack].shape[0].max(1) as u64;
    }
    let cut = op.slots.iter().zip(&axis.dims).filter(|(_, dim)| dim.is_some());
    cut.filter_map(|(slot, _)| *slot).map(|t| table[t].dtype.tensor_bytes(&table[t].shape)).max().unwrap_or(0)
}

/// Cuts `op`, whose one axis is its columns, into `row_blocks` and `column_blocks` blocks.
fn cut_in_two(op: &Operator, table: &TensorTable, cut: &mut BlockOp, [row_blocks, column_blocks]: [u32; 2]) {
    let ([columns], Some(x)) = (&op.axes[..], op.slots[X]) else { return };
    cut.grid = [column_blocks, row_blocks, 1];
    (cut.row_axis, cut.rows) = (Some(1), table[x].shape[0] as u32);
    // What has rows of the pass: x, and whatever is cut along its second dimension.
    for (slot, access) in cut.accesses.iter_mut().enumerate() {
        if let Some(access) = access.as_mut().filter(|_| slot == X || columns.dims[slot] == Some(1)) {
            access.map[1] = Some(0);
        }
    }
}

/// Whether the buffer of `tensor`, of `table`, which begins with `graph`'s tensors, can be read back after a run.
fn is_output(graph: &KernelGraph, table: &TensorTable, tensor: TensorId) -> bool {
    graph.outputs().iter().any(|(_, t)| table[*t].buffer == table[tensor].buffer)
}

/// Whether `op`'s only axis cuts the columns of a weight, as a linear's does.
fn is_matrix(op: &Operator, table: &TensorTable) -> bool {
    let [axis] = &op.axes[..] else { return false };
    let mut cut = op.slots.iter().zip(&axis.dims).filter(|(_, dim)| dim.is_some()).filter_map(|(slot, _)| *slot);
    let is_weight = |t: TensorId| table[t].shape.len() > 1 && table.buffer_of(t).kind == BufferKind::Weight;
    op.cut.is_none() && axis.role == AxisRole::Columns && cut.any(is_weight)
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

/// Into how many parts of equal, whole eights the columns of each of `heads` heads are cut: none where workers go from
/// task to task without a hop.
fn head_parts(axis: &Axis, heads: usize, target: &Target) -> u32 {
    let most = target.n_workers as usize / heads;
    let fits = |parts: &usize| axis.len.is_multiple_of(8 * parts);
    (1..=most).rev().find(fits).filter(|_| target.cut == Cut::PerWorker).unwrap_or(1) as u32
}

fn row_blocks(op: &Operator, axis: &Axis, table: &TensorTable, target: &Target, heads: usize) -> u32 {
    let workers = target.n_workers as usize;
    if op.axes.iter().any(are_heads) {
        // With a block more than there are workers one of them would do two.
        let blocks = if target.cut == Cut::PerWorker { workers / heads } else { workers.div_ceil(heads) };
        // Attention shares a head's keys; who turns rows shares nothing.
        let least = if op.kernel.task_type == Attention::TASK_TYPE { 16 } else { 4 };
        return blocks.min(axis.len.div_ceil(least)).max(1) as u32;
    }
    if target.cut == Cut::PerWorker {
        // What a worker takes for a row is mostly waiting for memory.
        return workers.min(axis.len) as u32;
    }
    let elems = op.slots.iter().zip(&axis.dims).filter(|(_, dim)| dim.is_some()).filter_map(|(slot, _)| *slot);
    let elems = elems.map(|t| table[t].len_elems()).max().unwrap_or(0);
    (elems / ROW_TASK_ELEMS).clamp(1, workers).min(axis.len) as u32
}

/// The operands of block `block` of operator `op`, slot by slot, each as [`block_operand`] has it.
pub fn block_operands(
    graph: &ThreadBlockGraph,
    op: super::tensor::OpId,
    block: [u32; GRID_AXES],
) -> impl Iterator<Item = Operand> {
    let operand = move |access: &Option<Access>| {
        access.as_ref().map_or(Operand::ABSENT, |access| block_operand(graph, op, access, block))
    };
    graph.ops[op.idx()].accesses.iter().map(operand)
}

/// The operand of a block: `access`'s box of its tensor, without an address (binding 0, offset from the buffer's
/// start).
fn block_operand(
    graph: &ThreadBlockGraph,
    op: super::tensor::OpId,
    access: &Access,
    block: [u32; GRID_AXES],
) -> Operand {
    let tensor = &graph.table[access.tensor];
    let mut operand = whole_operand(tensor);
    let BlockOp { grid, head_axis, .. } = graph.ops[op.idx()];
    let mut first = tensor.offset_elems;
    for (axis, dim) in access.map.iter().enumerate() {
        let Some(dim) = dim.map(usize::from) else { continue };
        let range = part(tensor.shape[dim], block[axis], grid[axis]);
        first += range.start * tensor.strides[dim];
        operand.extent[dim] = range.len() as u32;
    }
    operand.offset_bytes = (first * tensor.dtype.size_bytes()) as u64;
    operand.is_flagged = u8::from(graph.table.buffer_of(access.tensor).kind == BufferKind::Flagged);
    of_one_head(operand, head_axis.and_then(|axis| access.map[usize::from(axis)]))
}
