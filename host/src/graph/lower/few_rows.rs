//! [`Cut::PerWorker`], passes of a few rows, those of small batches and of guesses: [`many_rows`] whose products take
//! their weights from tiles, as [one row's](super::per_worker) do, so that these are on their way while workers wait
//! for each other.
//!
//! A product is cut into as many blocks of columns as there are workers, or nearly: by eights, since four columns are
//! finished at once. What else uses the tiles' memory has [a part of
//! it](perpetua_device::kernels::MacroKernel::beside_tiles) for itself: the activations of each product, and the blocks
//! of keys and values that attention takes where a head's queries are more than those of one row may be; else rows are
//! cut so that they are not. Where too little is left for tiles, rows are too many or too long, or weights are in fewer
//! bits, all is done as with many.

use super::many_rows::{Sizes, is_product, n_matrices, sizes};
use super::*;
use crate::machine::LEAST_ROWS;
use perpetua_device::kernels::Rope;

/// Columns that take a block as long as all that it does besides: fetching its rows of activations above all.
const BLOCK_COLUMNS: u64 = 8;

/// Has `lowered`, the operators of `graph` as others cut them, leave tiles the memory that they need, if all products
/// can take them. Whether they can.
pub(super) fn take_tiles(graph: &KernelGraph, lowered: &mut ThreadBlockGraph, target: &Target) -> bool {
    let few = 2..=linear::MOST_FEW;
    let are_few = target.has_loaders && decodes(graph) && graph.rows.is_some_and(|rows| few.contains(&rows));
    if !are_few || !graph.ops().all(|op| can_be(op, &graph.table, &target.machine)) {
        return false;
    }
    let before = lowered.ops.clone();
    for (op, block) in graph.ops().zip(&mut lowered.ops) {
        match (&mut block.kernel, row_blocks(op, &graph.table), &op.axes[..]) {
            (Some(kernel), None, _) if kernel.task_type == Attention::TASK_TYPE => {
                let params = kernels::params::<attention::Params>(&kernel.params);
                kernel.params = param_words(&attention::Params { is_beside_tiles: 1, ..params });
            }
            (Some(_), Some(blocks), _) => block.grid[1] = blocks,
            // What a row takes is mostly one thing waiting for another.
            (Some(kernel), _, [heads, rows]) if kernel.task_type == Rope::TASK_TYPE && op.cut.is_none() => {
                block.grid[1] = (target.n_workers / heads.len as u32).clamp(1, rows.len as u32);
            }
            _ => {}
        }
    }
    let [bodies_bytes, row_bytes] = room(lowered);
    let has_room = bodies_bytes > 0 && target.machine.beside(bodies_bytes, row_bytes).is_some();
    if !has_room {
        lowered.ops = before;
    }
    has_room
}

/// Of `op`, if it is an attention whose rows can be attended to as one row's queries are in decoding, where these are
/// few: how many blocks of rows it has at least. See the device's `attention::group`.
pub(super) fn row_blocks(op: &Operator, table: &TensorTable) -> Option<u32> {
    let (Attention::TASK_TYPE, None, &[Some(q), Some(k), Some(v), ..]) = (op.kernel.task_type, &op.cut, &op.slots[..])
    else {
        return None;
    };
    let &[rows, _, group, d] = &table[q].shape[..] else { return None };
    let are_bf16 = [k, v].iter().all(|cache| table[*cache].dtype == DType::Bf16);
    let is_fit = are_bf16 && d.is_multiple_of(32) && d <= 128;
    if !is_fit || kernels::params::<attention::Params>(&op.kernel.params).ahead > 0 {
        return None;
    }
    let fits = |blocks: &usize| rows.is_multiple_of(*blocks) && (rows / blocks * group) as u64 <= QUERIES_AT_ONCE;
    (1..=rows).find(fits).map(|blocks| blocks as u32)
}

/// Queries that such an attention takes at once.
pub(super) const QUERIES_AT_ONCE: u64 = 8;

/// Whether `op` can be in such a pass: products of all its rows by matrices in bf16 whose rows are not too long,
/// experts' none.
fn can_be(op: &Operator, table: &TensorTable, machine: &Machine) -> bool {
    if op.slots.iter().flatten().any(|t| table.is_stack(*t)) {
        return false;
    }
    if n_matrices(op) == 0 || op.slots[X].is_none_or(|x| table[x].shape[0] < 2) {
        return true;
    }
    let Sizes { k, n, dtype, .. } = sizes(op, table);
    let is_brain = op.slots[X].is_some_and(|x| table[x].dtype == DType::Bf16) && dtype == DType::Bf16;
    let is_short = LEAST_ROWS * k * DType::Bf16.size_bytes() as u64 <= machine.tile_bytes;
    op.cut.is_none() && is_product(op, table) && is_brain && is_short && k.is_multiple_of(32) && n.is_multiple_of(8)
}

/// Bytes that a body of `graph` takes beside tiles at most, and those of a row of weights, all matrices'.
pub(super) fn room(graph: &ThreadBlockGraph) -> [u64; 2] {
    let of_op = |(number, op): (usize, &BlockOp)| {
        let kernel = op.kernel?;
        let spec = Spec::of(kernel.task_type)?;
        let id = crate::graph::tensor::OpId(number as u32);
        let operands: Vec<Operand> = block_operands(graph, id, [0; GRID_AXES]).collect();
        let matrices = op.tiled().iter().map(|slot| &operands[*slot]).filter(|operand| operand.rank == 2);
        let row_bytes = matrices.map(|matrix| matrix.bytes() / u64::from(matrix.extent[0].max(1))).sum();
        Some([(spec.beside_tiles)(&kernel.params, &operands), row_bytes])
    };
    let each = graph.ops.iter().enumerate().filter_map(of_op);
    each.fold([0; 2], |[bodies, rows], [body, row]| [bodies.max(body), rows.max(row)])
}

/// The sides of the parts, a block each, with which `group`, products that run side by side, is done first: all rows,
/// and as many columns, of each matrix, as divide all products'.
pub(super) fn shape(group: &[&Operator], table: &TensorTable, workers: u64) -> [u64; 2] {
    let each = || group.iter().map(|op| sizes(op, table));
    let matrices = each().map(|sizes| sizes.matrices).max().unwrap_or(1);
    let most = each().map(|sizes| sizes.n).min().unwrap_or(8);
    let fits = |columns: &u64| each().all(|sizes| sizes.n.is_multiple_of(*columns));
    let takes = |columns: &u64| {
        let blocks: u64 = each().map(|sizes| sizes.n / columns).sum();
        blocks.div_ceil(workers) * (columns + BLOCK_COLUMNS)
    };
    let columns = (8..=most).step_by(8).filter(fits).min_by_key(takes).unwrap_or(8);
    [u64::from(linear::MOST_FEW), columns * matrices]
}
