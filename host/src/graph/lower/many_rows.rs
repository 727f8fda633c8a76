//! [`Cut::PerWorker`], passes of several rows: products on the tensor cores of workers that share what they read
//! through a cache.
//!
//! - An activation that only products with weights in bf16 or fewer bits read is bf16: they round it anyway, and then copy it as it is.
//! - Such products are cut along rows and columns, a block for each part: see [`shape`].
//! - [Experts](super::experts) have all their rows together.
//! - In the pass over a batch each sequence's attention is [one operator](super::fuse), and cut along positions, too, as that of passes over
//!   one row: as far as its share of the workers goes. Merges come after all sequences' attention, since a worker does one thing after another:
//!   what waits for others' shares would keep it from the next sequence's.
//! - In a pass that verifies drafts so is each row's. Together they would be few queries for a tensor core, and a head's positions one worker's.

use super::*;
use crate::graph::kernel::GraphError;
use crate::schedule::machine::part;
use perpetua_device::kernels::{AttentionMerge, DecodeAttention, GatedLinear, Linear};
use perpetua_shared::TaskFlags;

/// Sides of the parts that a product's body computes at once: rows of x, and of the weights. See the device's `gpu::warpgroup`.
const SHAPES: [[u64; 2]; 5] = [[64, 16], [64, 32], [64, 64], [64, 128], [128, 128]];

/// Rows of the weights that a part may have besides, multiplied as the next more of [`SHAPES`], if all parts have as many and x has no more:
/// every part reads all of x anew.
const NARROWER: [u64; 7] = [8, 24, 40, 48, 80, 96, 112];

/// Cuts `graph`, a pass over several rows.
pub(super) fn lower(graph: &KernelGraph, target: &Target) -> Result<ThreadBlockGraph, Vec<Violation>> {
    let mut rounded = fuse::fuse_attention(graph)
        .and_then(|fused| attend_apart(&fused))
        .and_then(|apart| experts::route(&apart, target))
        .map_err(|error| vec![Violation { op: "fused".to_owned(), what: error.to_string() }])?;
    for buffer in read_by_products(&rounded) {
        for tensor in rounded.table.tensors.iter_mut().filter(|tensor| tensor.buffer.idx() == buffer) {
            tensor.dtype = DType::Bf16;
        }
        rounded.table.buffers[buffer].bytes /= 2;
    }
    let mut lowered = cut_all(&rounded, target);
    let ops: Vec<&Operator> = rounded.ops().collect();
    for (first, group) in side_by_side(&ops, |op| op.cut.is_none() && is_product(op, &rounded.table)) {
        let height_and_width = shape(group, &rounded.table, u64::from(target.n_workers));
        for (op, cut) in group.iter().zip(&mut lowered.ops[first..]) {
            cut_in_two(op, &rounded.table, cut, sizes(op, &rounded.table).parts(height_and_width).map(|n| n as u32));
        }
    }
    if let (Pass::Batch | Pass::Verify, Some(rows)) = (graph.pass, graph.rows) {
        let share = Target { n_workers: target.n_workers / rows, ..target.clone() };
        per_worker::split_positions(&rounded, &mut lowered, &share);
        lowered.ops = merges_last(std::mem::take(&mut lowered.ops), &lowered.table);
    }
    lowered.check()?;
    Ok(lowered)
}

/// `graph` with the attention of each row an operator of its own, if it verifies drafts.
fn attend_apart(graph: &KernelGraph) -> Result<KernelGraph, GraphError> {
    if graph.pass != Pass::Verify {
        return Ok(graph.clone());
    }
    let mut apart = graph.clone();
    let mut ops = Vec::new();
    for op in graph.ops() {
        let (Attention::TASK_TYPE, None, &[Some(q), k, v, Some(y)]) = (op.kernel.task_type, &op.cut, &op.slots[..])
        else {
            ops.push(op.clone());
            continue;
        };
        let shape = graph.table[q].shape.clone();
        let row_shape = [&[1], &shape[1..]].concat();
        for row in 0..shape[0] {
            let [q, y] = [apart.row(q, row, &row_shape)?, apart.row(y, row, &row_shape)?].map(Some);
            let axes = op.axes.iter().map(|axis| match axis.role {
                AxisRole::Rows => Axis { len: 1, ..axis.clone() },
                _ => axis.clone(),
            });
            let flags = op.kernel.flags | TaskFlags::of_row(row);
            ops.push(Operator {
                name: format!("{}.{row}", op.name),
                kernel: KernelCall { flags, ..op.kernel },
                slots: vec![q, k, v, y],
                axes: axes.collect(),
                cut: None,
            });
        }
    }
    apart.with_ops(ops)
}

/// `ops` with each merge moved behind the attention that follows it, of other sequences or rows, as far as neither touches what the other writes.
fn merges_last(ops: Vec<BlockOp>, table: &TensorTable) -> Vec<BlockOp> {
    let is = |op: &BlockOp, types: &[u16]| op.kernel.is_some_and(|kernel| types.contains(&kernel.task_type));
    let clash = |a: &Access, b: &Access| {
        table[a.tensor].buffer == table[b.tensor].buffer && (a.kind.writes() || b.kind.writes())
    };
    let order = |a: &BlockOp, b: &BlockOp| {
        a.accesses.iter().flatten().any(|a| b.accesses.iter().flatten().any(|b| clash(a, b)))
    };
    let (mut ordered, mut merges) = (Vec::with_capacity(ops.len()), Vec::new());
    for op in ops {
        if is(&op, &[AttentionMerge::TASK_TYPE]) {
            merges.push(op);
            continue;
        }
        if !is(&op, &[Attention::TASK_TYPE, DecodeAttention::TASK_TYPE]) || merges.iter().any(|merge| order(merge, &op))
        {
            ordered.append(&mut merges);
        }
        ordered.push(op);
    }
    ordered.append(&mut merges);
    ordered
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
    let are_all = |dtype| op.slots[1..=n].iter().all(|t| t.is_some_and(|t| table[t].dtype == dtype));
    let are_taken = [DType::Bf16, DType::Q8, DType::Q4].into_iter().any(are_all);
    n > 0 && are_taken && op.slots[0].is_some_and(|x| table[x].shape[0] > 1)
}

/// The buffers of f32 that one operator writes and only [products](is_product), experts' too, read, as x.
fn read_by_products(graph: &KernelGraph) -> Vec<usize> {
    let table = &graph.table;
    let mut fits: Vec<bool> = table.buffers.iter().map(|buffer| buffer.kind == BufferKind::Intermediate).collect();
    let mut n_read = vec![0; fits.len()];
    for op in graph.ops() {
        let Some(spec) = Spec::of(op.kernel.task_type) else { return Vec::new() };
        for (slot, tensor) in op.slots.iter().enumerate() {
            let Some(tensor) = *tensor else { continue };
            let buffer = table[tensor].buffer.idx();
            let as_x = slot == 0 && (is_product(op, table) || experts::is_routed(op));
            let is_made = matches!(spec.slots[slot].usage, Use::Write | Use::Append);
            n_read[buffer] += usize::from(as_x);
            fits[buffer] &= table[tensor].dtype == DType::F32 && (as_x || is_made);
        }
    }
    for (_, tensor) in graph.outputs() {
        fits[table[*tensor].buffer.idx()] = false;
    }
    (0..fits.len()).filter(|buffer| fits[*buffer] && n_read[*buffer] > 0).collect()
}

/// Of a product: rows of x, columns of all, rows of each of so many matrices.
struct Sizes {
    rows: u64,
    k: u64,
    n: u64,
    matrices: u64,
    /// The weights' type.
    dtype: DType,
}

fn sizes(op: &Operator, table: &TensorTable) -> Sizes {
    let shape = |slot: usize| op.slots[slot].map_or([0; 2], |t| [table[t].shape[0] as u64, table[t].shape[1] as u64]);
    let ([rows, k], [n, _]) = (shape(0), shape(1));
    let dtype = op.slots[1].map_or(DType::Bf16, |w| table[w].dtype);
    Sizes { rows, k, n, matrices: n_matrices(op) as u64, dtype }
}

impl Sizes {
    /// How many parts of these sides there are, along rows and columns.
    fn parts(&self, [height, width]: [u64; 2]) -> [u64; 2] {
        [self.rows.div_ceil(height), self.n.div_ceil(width / self.matrices)]
    }

    /// What one takes.
    fn part_cycles(&self, [height, width]: [u64; 2]) -> u64 {
        let multiplied_width = width.next_power_of_two().max(SHAPES[0][1]);
        let copied = height.min(self.rows).div_ceil(part::ROWS_AT_ONCE) + width.div_ceil(part::ROWS_AT_ONCE);
        let is_narrow = height * multiplied_width <= 64 * 64;
        let [step, rows] = if is_narrow { part::NARROW } else { part::WIDE };
        let [cycles, of_rows] = match self.dtype {
            DType::Q8 => part::EIGHTS,
            DType::Q4 => part::FOURS,
            _ => [0, 1],
        };
        let brought = step + copied * rows + multiplied_width * cycles / of_rows;
        let multiplied = height * multiplied_width * 64 / part::PRODUCTS;
        part::START + height * width / part::SUMS + self.k.div_ceil(64) * brought.max(multiplied)
    }
}

/// The sides of the parts, a block each, with which `group`, products that run side by side, is done first.
fn shape(group: &[&Operator], table: &TensorTable, workers: u64) -> [u64; 2] {
    let takes = |shape: &[u64; 2]| {
        let sizes = group.iter().map(|op| sizes(op, table));
        let (n_parts, longest) = sizes.fold((0, 0), |(n_parts, longest), sizes| {
            (n_parts + sizes.parts(*shape).iter().product::<u64>(), longest.max(sizes.part_cycles(*shape)))
        });
        n_parts.div_ceil(workers) * longest
    };
    let fits = |[height, width]: &[u64; 2]| {
        group.iter().map(|op| sizes(op, table)).all(|Sizes { rows, n, matrices, .. }| {
            // Two matrices' rows are as many each, eight or a multiple.
            let is_even = width.is_multiple_of(8 * matrices) && n.is_multiple_of(width / matrices);
            is_even && rows.min(*height) <= *width
        })
    };
    let narrower = NARROWER.map(|width| [SHAPES[0][0], width]).into_iter().filter(fits);
    SHAPES.into_iter().chain(narrower).min_by_key(takes).unwrap_or(SHAPES[0])
}
