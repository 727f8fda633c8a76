//! [`Cut::PerWorker`], passes of more rows than tiles are for: products on the tensor cores of workers that share what they read
//! through a cache.
//!
//! - An activation that only products with bf16 weights read is bf16: they round it anyway, and then copy it as it is.
//! - Such products are cut along rows and columns, into a block per worker at most: see [`parts`].

use super::*;
use crate::schedule::machine::Machine;
use perpetua_device::kernels::{GatedLinear, Linear};

/// Sides of the parts that a product's body computes at once: rows of x, and of the weights. See the device's `gpu::warpgroup`.
const SHAPES: [[u64; 2]; 3] = [[64, 64], [64, 128], [128, 128]];

/// Cuts `graph`, a pass over many rows.
pub(super) fn lower(graph: &KernelGraph, target: &Target) -> Result<ThreadBlockGraph, Vec<Violation>> {
    let mut rounded = graph.clone();
    for buffer in read_by_products(graph) {
        for tensor in rounded.table.tensors.iter_mut().filter(|tensor| tensor.buffer.idx() == buffer) {
            tensor.dtype = DType::Bf16;
        }
        rounded.table.buffers[buffer].bytes /= 2;
    }
    let mut lowered = cut_all(&rounded, target);
    for (op, cut) in rounded.ops().zip(&mut lowered.ops) {
        if op.cut.is_none() && is_product(op, &rounded.table) {
            cut_product(op, &rounded.table, cut, target);
        }
    }
    lowered.check()?;
    Ok(lowered)
}

/// Weight matrices of a product, slots 1 and up; 0 for another operator.
fn n_matrices(op: &Operator) -> usize {
    match op.kernel.task_type {
        Linear::TASK_TYPE => 1,
        GatedLinear::TASK_TYPE => 2,
        _ => 0,
    }
}

/// Whether `op` is a product of as many rows as the pass has with weights that the tensor cores take.
fn is_product(op: &Operator, table: &TensorTable) -> bool {
    let n = n_matrices(op);
    let is_bf16 = |t: &Option<TensorId>| t.is_some_and(|t| table[t].dtype == DType::Bf16);
    n > 0 && op.slots[1..=n].iter().all(is_bf16) && op.slots[0].is_some_and(|x| table[x].shape[0] > TILED_ROWS as usize)
}

/// The buffers of f32 that one operator writes and only [products](is_product) read, as x.
fn read_by_products(graph: &KernelGraph) -> Vec<usize> {
    let table = &graph.table;
    let mut fits: Vec<bool> = table.buffers.iter().map(|buffer| buffer.kind == BufferKind::Intermediate).collect();
    let mut n_read = vec![0; fits.len()];
    for op in graph.ops() {
        let Some(spec) = Spec::of(op.kernel.task_type) else { return Vec::new() };
        for (slot, tensor) in op.slots.iter().enumerate() {
            let Some(tensor) = *tensor else { continue };
            let buffer = table[tensor].buffer.idx();
            let as_x = slot == 0 && is_product(op, table);
            n_read[buffer] += usize::from(as_x);
            fits[buffer] &= table[tensor].dtype == DType::F32 && (as_x || spec.slots[slot].usage == Use::Write);
        }
    }
    for (_, tensor) in graph.outputs() {
        fits[table[*tensor].buffer.idx()] = false;
    }
    (0..fits.len()).filter(|buffer| fits[*buffer] && n_read[*buffer] > 0).collect()
}

fn cut_product(op: &Operator, table: &TensorTable, cut: &mut BlockOp, target: &Target) {
    let (Some(x), Some(w)) = (op.slots[0], op.slots[1]) else { return };
    let (rows, k, n) = (table[x].shape[0], table[x].shape[1], table[w].shape[0]);
    cut_in_two(op, table, cut, parts(rows as u64, n as u64, k as u64, n_matrices(op) as u64, target));
}

/// Into how many blocks a product of `rows` by `n` columns of each of `matrices` is cut, along rows and columns: those with which
/// the worker that has most is done first, by flops or by the bytes of both operands, which parts share through the cache alone.
fn parts(rows: u64, n: u64, k: u64, matrices: u64, target: &Target) -> [u32; 2] {
    let machine = Machine::of(target);
    let workers = u64::from(target.n_workers);
    let cut = |[height, width]: [u64; 2]| {
        let (row_blocks, column_parts) = (rows.div_ceil(height), n.div_ceil(width / matrices));
        let column_blocks = (workers / row_blocks).clamp(1, column_parts);
        let of_worker = (row_blocks * column_blocks).div_ceil(workers) * column_parts.div_ceil(column_blocks);
        let flops = (2 * height * width * k) as f64 / machine.flops_per_s;
        let bytes = (2 * (height + width) * k) as f64 / machine.near_bytes_per_s;
        (of_worker as f64 * flops.max(bytes), [row_blocks as u32, column_blocks as u32])
    };
    let best = SHAPES.map(cut).into_iter().min_by(|(a, _), (b, _)| a.total_cmp(b));
    best.map_or([1, 1], |(_, blocks)| blocks)
}
