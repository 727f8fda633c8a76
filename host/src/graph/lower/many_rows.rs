//! [`Cut::PerWorker`], passes of several rows: products on the tensor cores of workers that share what they read
//! through a cache.
//!
//! - An activation that only products with weights in bf16 or fewer bits read is bf16: they round it anyway, and then
//!   copy it as it is.
//! - Such products are cut along rows and columns, a block for each part: see [`shape`]; those of [a few
//!   rows](super::few_rows), whose weights come in tiles, along columns alone.
//! - [Experts](super::experts) have all their rows together.
//! - A norm between two such products goes [into both](norms_into_products).
//! - A head's each are cut likewise, head by head.
//! - In the pass over a batch each sequence's attention is [one operator](super::fuse), and cut along positions, too,
//!   as that of passes over one row: as far as its share of the workers goes. Merges come after all sequences'
//!   attention, since a worker does one thing after another: what waits for others' shares would keep it from the next
//!   sequence's.
//! - The attention of several rows of a sequence is cut along positions, too, where its rows are few and the positions
//!   many.

use super::*;
use crate::machine::part;
use perpetua_device::kernels::{AttentionMerge, DecodeAttention, GatedLinear, Linear, RmsNorm, rms_norm};

/// Sides of the parts that a product's body computes at once: rows of x, and of the weights. See the device's
/// `gpu::warpgroup`.
const SHAPES: [[u64; 2]; 5] = [[64, 16], [64, 32], [64, 64], [64, 128], [128, 128]];

/// Rows of the weights that a part may have besides, multiplied as the next more of [`SHAPES`], if all parts have as
/// many and x has no more: every part reads all of x anew.
const NARROWER: [u64; 7] = [8, 24, 40, 48, 80, 96, 112];

/// Cuts `graph`, a pass over several rows.
pub(super) fn lower(graph: &KernelGraph, target: &Target) -> Result<ThreadBlockGraph, Vec<Violation>> {
    let mut rounded = fuse::fuse_attention(graph)
        .and_then(|fused| experts::route(&fused, target))
        .map_err(|error| vec![Violation { op: "fused".to_owned(), what: error.to_string() }])?;
    let is_rounded = read_by_products(&rounded);
    for tensor in rounded.table.tensors.iter_mut().filter(|tensor| is_rounded[tensor.buffer.idx()]) {
        tensor.dtype = DType::Bf16;
    }
    for (buffer, _) in rounded.table.buffers.iter_mut().zip(is_rounded).filter(|(_, is_rounded)| *is_rounded) {
        buffer.bytes /= 2;
    }
    let mut lowered = cut_all(&rounded, target);
    lowered.has_tiles = few_rows::take_tiles(&rounded, &mut lowered, target);
    let ops: Vec<&Operator> = rounded.ops().collect();
    for (first, group) in side_by_side(&ops, |op| op.cut.is_none() && is_product(op, &rounded.table)) {
        let workers = u64::from(target.n_workers);
        let height_and_width = if lowered.has_tiles {
            few_rows::shape(group, &rounded.table, workers)
        } else {
            shape(group, &rounded.table, workers)
        };
        for (op, cut) in group.iter().zip(&mut lowered.ops[first..]) {
            cut_in_two(op, &rounded.table, cut, sizes(op, &rounded.table).parts(height_and_width).map(|n| n as u32));
        }
    }
    for (op, cut) in ops.iter().zip(&mut lowered.ops) {
        let of = sizes(op, &rounded.table);
        if of.heads > 1 && takes_brains(op, &rounded.table) {
            let [rows, columns] = of.parts(shape(&[op], &rounded.table, u64::from(target.n_workers)));
            cut.grid = [of.heads, columns, rows].map(|n| n as u32);
        }
    }
    share_positions(&rounded, &mut lowered, target);
    if let (Pass::Batch, Some(sequences)) = (graph.pass, graph.rows) {
        let share = Target { n_workers: target.n_workers / sequences, ..target.clone() };
        per_worker::split_positions(&rounded, &mut lowered, &share);
        lowered.ops = merges_last(std::mem::take(&mut lowered.ops), &lowered.table);
    }
    norms_into_products(&rounded, &mut lowered);
    lowered.check()?;
    Ok(lowered)
}

/// How the attention of several rows is cut, and what merges it.
#[derive(Clone, Copy, Debug)]
struct Shares {
    /// Ways a head's positions are shared, at least 2.
    n: u32,
    /// Blocks of rows that share them, and that merge.
    blocks: u32,
    merges: u32,
}

/// How `op`, an attention that is cut into `blocks` blocks of rows, is better cut along positions, too: so that the
/// bytes read and written one after the other are fewest, a share's keys and values, what it found, and what a merge
/// reads of all shares, behind a hop. The body takes [`QUERIES_AT_ONCE`] queries with the keys and values of one; or,
/// if rows are in so many blocks at least, `few`, a few, and does not keep these waiting.
fn shares_of(table: &TensorTable, op: &Operator, blocks: u32, few: Option<u32>, target: &Target) -> Option<Shares> {
    let (Attention::TASK_TYPE, None, &[Some(q), Some(k), Some(v), ..]) = (op.kernel.task_type, &op.cut, &op.slots[..])
    else {
        return None;
    };
    let [rows, heads, group, d] = table[q].shape[..] else { return None };
    let attention::Params { window, ahead, .. } = kernels::params(&op.kernel.params);
    let are_bf16 = [k, v].iter().all(|cache| table[*cache].dtype == DType::Bf16);
    // Others are attended to row by row, each by its own way through the positions.
    if rows < 2 || (window, ahead) != (attention::ALL, 0) || !are_bf16 || d > 128 || !d.is_multiple_of(8) {
        return None;
    }
    let positions = table[k].shape[1];
    let head_bytes = (2 * positions * d * DType::Bf16.size_bytes()) as u64;
    let found_bytes = (group * (attention::FOUND as usize + d) * DType::F32.size_bytes()) as u64;
    let workers = target.n_workers / heads as u32;
    let cut_evenly = |most: u32| (1..=most.clamp(1, rows as u32)).rev().filter(|n| (rows as u32).is_multiple_of(*n));
    let merges = cut_evenly(workers).next().unwrap_or(1);
    let read = |blocks: u32, n: u32| {
        let rows = rows as u64 / u64::from(blocks);
        let at_once = if few.is_some() { few_rows::QUERIES_AT_ONCE } else { QUERIES_AT_ONCE };
        let ways = (rows * group as u64).div_ceil(at_once);
        head_bytes * ways / u64::from(n) + if n > 1 { rows * found_bytes } else { 0 }
    };
    let merge = |n: u32| u64::from(n) * found_bytes * rows as u64 / u64::from(merges) + target.hop_bytes;
    let most =
        |blocks: u32| (workers / blocks).min(positions as u32 / target.split_positions).min(per_worker::MAX_SPLITS);
    let row_blocks = cut_evenly(workers).filter(|blocks| few.is_none_or(|least| *blocks >= least));
    let ways = row_blocks.flat_map(|blocks| (2..=most(blocks)).map(move |n| Shares { n, blocks, merges }));
    let best = ways.min_by_key(|shares| read(shares.blocks, shares.n) + merge(shares.n))?;
    (read(best.blocks, best.n) + merge(best.n) < read(blocks, 1)).then_some(best)
}

/// Queries that attention of several rows takes together: a warpgroup's. Keys and values take about as long there as to
/// come from L2. See the device's `attention`.
const QUERIES_AT_ONCE: u64 = 64;

/// Cuts attention along positions, where that is better: see [`shares_of`].
fn share_positions(graph: &KernelGraph, lowered: &mut ThreadBlockGraph, target: &Target) {
    let mut ops = Vec::with_capacity(lowered.ops.len());
    for (op, mut block) in graph.ops().zip(std::mem::take(&mut lowered.ops)) {
        let few = lowered.has_tiles.then(|| few_rows::row_blocks(op, &graph.table)).flatten();
        let merge = shares_of(&graph.table, op, block.grid[1], few, target)
            .and_then(|shares| share(&mut lowered.table, op, &mut block, shares));
        ops.push(block);
        ops.extend(merge);
    }
    lowered.ops = ops;
}

/// Cuts `block`, the attention `op`, as `shares` say. What a share finds goes to a tensor of its own, of which the
/// operator returned makes the result.
fn share(table: &mut TensorTable, op: &Operator, block: &mut BlockOp, shares: Shares) -> Option<BlockOp> {
    let kernel = block.kernel.as_mut()?;
    let [rows, heads, group, d] = table[op.slots[attention::slot::Q]?].shape[..] else { return None };
    let shape = [heads, shares.n as usize, rows * group, attention::FOUND as usize + d];
    let parts = table.add(&format!("{} parts", block.name), &shape, DType::F32, BufferKind::Intermediate).ok()?;
    let params = attention::Params { splits: shares.n, ..kernels::params(&kernel.params) };
    kernel.params = param_words(&params);
    let flags = kernel.flags;
    let y = block.accesses[attention::slot::Y].as_ref()?.tensor;
    let of_head = [Some(0), None, None];
    let maps = [[Some(1), None, Some(0)], of_head, of_head, [Some(0), Some(1), Some(2)], of_head];
    for (access, map) in block.accesses.iter_mut().zip(maps) {
        if let Some(access) = access {
            access.map = map;
        }
    }
    block.accesses[attention::slot::Y].as_mut()?.tensor = parts;
    (block.grid[1], block.grid[2]) = (shares.n, shares.blocks);
    block.row_axis = Some(2);
    Some(per_worker::merge_of(block, flags, [parts, y], per_worker::Merged::Rows([rows as u32, shares.merges])))
}

/// `ops` with each merge moved behind the attention that follows it, of other sequences, as far as neither touches what
/// the other writes.
fn merges_last(ops: Vec<BlockOp>, table: &TensorTable) -> Vec<BlockOp> {
    let is = |op: &BlockOp, task_type: u16| op.kernel.is_some_and(|kernel| kernel.task_type == task_type);
    let clash = |a: &Access, b: &Access| {
        table[a.tensor].buffer == table[b.tensor].buffer && (a.kind.writes() || b.kind.writes())
    };
    let order = |a: &BlockOp, b: &BlockOp| {
        a.accesses.iter().flatten().any(|a| b.accesses.iter().flatten().any(|b| clash(a, b)))
    };
    let (mut ordered, mut merges) = (Vec::with_capacity(ops.len()), Vec::new());
    for op in ops {
        if is(&op, AttentionMerge::TASK_TYPE) {
            merges.push(op);
            continue;
        }
        if !is(&op, DecodeAttention::TASK_TYPE) || merges.iter().any(|merge| order(merge, &op)) {
            ordered.append(&mut merges);
        }
        ordered.push(op);
    }
    ordered.append(&mut merges);
    ordered
}

/// Has the products before and after a norm do what it does, and leaves it out: what is between two products is a hop
/// then, where it was two and a norm. Before it may also be another norm, that is added to something. See the device's
/// [`linear`].
fn norms_into_products(graph: &KernelGraph, lowered: &mut ThreadBlockGraph) {
    let mut touching = vec![Vec::new(); lowered.table.buffers.len()];
    for (number, op) in lowered.ops.iter().enumerate() {
        for access in op.accesses.iter().flatten() {
            let of_buffer: &mut Vec<usize> = &mut touching[lowered.table[access.tensor].buffer.idx()];
            if of_buffer.last() != Some(&number) {
                of_buffer.push(number);
            }
        }
    }
    let between: Vec<BetweenProducts> =
        (0..lowered.ops.len()).filter_map(|at| BetweenProducts::of(graph, lowered, &touching, at)).collect();
    let mut left_out = vec![false; lowered.ops.len()];
    for norm in between {
        let at = norm.at;
        left_out[at] = norm.go_into_products(lowered).is_some();
    }
    let mut left_out = left_out.into_iter();
    lowered.ops.retain(|_| !left_out.next().unwrap_or(false));
}

/// A norm that the product before it and those after it can do, by their numbers.
#[derive(Debug)]
struct BetweenProducts {
    before: usize,
    at: usize,
    after: Vec<usize>,
    weights: TensorId,
    normed: TensorId,
    eps: f32,
}

/// Whether `linear`, a call of that kernel, has x as it lies.
fn is_plain(linear: &KernelCall) -> bool {
    let params = kernels::params::<linear::Params>(&linear.params);
    params.merges == 0 && params.segments <= 1
}

/// Where a product has what its x is normalised by.
fn norm_slot(task_type: u16) -> Option<usize> {
    fuse::norm_slot(task_type).filter(|_| [Linear::TASK_TYPE, GatedLinear::TASK_TYPE].contains(&task_type))
}

/// How a product that is [cut in two](cut_in_two) has x.
const OF_ROWS: [Option<u8>; GRID_AXES] = [None, Some(0), None];

/// An operator that can make what a product after a norm reads: the slots of what it makes without that, and of
/// `weights`, `weighted` and `squares`; how it has what it makes, and weights.
#[derive(Clone, Copy, Debug)]
struct Before {
    y: usize,
    weights: usize,
    weighted: usize,
    squares: usize,
    of_part: [Option<u8>; GRID_AXES],
    of_columns: [Option<u8>; GRID_AXES],
}

impl Before {
    /// As what a task of type `task_type` can be.
    fn of(task_type: u16) -> Option<Before> {
        let (of_part, of_columns) = ([Some(1), Some(0), None], [Some(0), None, None]);
        match task_type {
            Linear::TASK_TYPE => {
                use linear::slot::{VALUES, WEIGHTED, WEIGHTS, Y};
                Some(Before { y: Y, weights: WEIGHTS, weighted: WEIGHTED, squares: VALUES, of_part, of_columns })
            }
            RmsNorm::TASK_TYPE => {
                use rms_norm::slot::{SQUARES, WEIGHTED, WEIGHTS, Y};
                let (of_part, of_columns) = ([Some(0), None, None], [None; GRID_AXES]);
                Some(Before { y: Y, weights: WEIGHTS, weighted: WEIGHTED, squares: SQUARES, of_part, of_columns })
            }
            _ => None,
        }
    }
}

/// Whether `op` has no operand beyond `last`, but, if it is a norm, what it multiplies all with.
fn has_no_more(op: &BlockOp, task_type: u16, last: usize) -> bool {
    let is_scale = |slot: usize| task_type == RmsNorm::TASK_TYPE && slot == rms_norm::slot::SCALE;
    op.accesses.iter().enumerate().skip(last + 1).all(|(slot, access)| access.is_none() || is_scale(slot))
}

impl BetweenProducts {
    /// Operator `at` of `lowered`, if it is one; `touching` has the operators that touch each buffer, in order.
    fn of(
        graph: &KernelGraph,
        lowered: &ThreadBlockGraph,
        touching: &[Vec<usize>],
        at: usize,
    ) -> Option<BetweenProducts> {
        let (op, table) = (&lowered.ops[at], &lowered.table);
        let kernel = op.kernel.filter(|kernel| kernel.task_type == RmsNorm::TASK_TYPE)?;
        let [Some(x), Some(weights), Some(normed), None, None, ..] = &op.accesses[..] else { return None };
        let [x, weights, normed] = [x, weights, normed].map(|access| access.tensor);
        let buffer = |t: TensorId| table[t].buffer;
        let is_whole = table[x].shape == table[normed].shape && table[x].dtype == DType::F32;
        if !is_whole
            || !op.has_weights(table, rms_norm::slot::W)
            || table[normed].dtype != DType::Bf16
            || is_output(graph, table, normed)
        {
            return None;
        }
        let after: Vec<usize> = touching[buffer(normed).idx()].iter().copied().filter(|other| *other != at).collect();
        let reads_it = |other: usize| {
            let op = &lowered.ops[other];
            let is_it = |access: &&Access| buffer(access.tensor) == buffer(normed);
            let [access] = op.accesses.iter().flatten().filter(is_it).collect::<Vec<_>>()[..] else { return false };
            let slot = op.kernel.filter(|k| k.flags == kernel.flags).and_then(|k| norm_slot(k.task_type));
            other > at
                && op.accesses[X].as_ref() == Some(access)
                && (access.tensor, access.kind, access.map) == (normed, AccessKind::Read, OF_ROWS)
                && slot.is_some_and(|slot| op.accesses[slot].is_none())
        };
        let writes_x = |other: &&usize| {
            let mut accesses = lowered.ops[**other].accesses.iter().flatten();
            **other < at && accesses.any(|access| access.kind.writes() && buffer(access.tensor) == buffer(x))
        };
        let before = *touching[buffer(x).idx()].iter().rfind(writes_x)?;
        let fits = !after.is_empty() && after.iter().all(|other| reads_it(*other)) && {
            let op = &lowered.ops[before];
            let k = op.kernel.filter(|k| k.flags == 0 || k.flags == kernel.flags)?;
            let slots = Before::of(k.task_type)?;
            let made = Access { tensor: x, kind: AccessKind::Write, map: slots.of_part };
            let columns = table[x].shape.get(1).map_or(0, |n| n.div_ceil(op.grid[0] as usize));
            op.accesses[slots.y] == Some(made)
                && has_no_more(op, k.task_type, slots.y.max(rms_norm::slot::RESIDUAL))
                && (k.task_type != Linear::TASK_TYPE || columns <= linear::MOST_WEIGHTED as usize && is_plain(&k))
        };
        let eps = kernels::params::<rms_norm::Params>(&kernel.params).eps;
        fits.then_some(BetweenProducts { before, at, after, weights, normed, eps })
    }

    /// Has the products do it, unless the one before it does that for another already.
    fn go_into_products(self, lowered: &mut ThreadBlockGraph) -> Option<()> {
        let BetweenProducts { before, at, after, weights, normed, eps } = self;
        let slots = Before::of(lowered.ops[before].kernel?.task_type)?;
        // One norm's is all that an operator makes.
        if lowered.ops[before].accesses[slots.weighted].is_some() {
            return None;
        }
        let is_cut = slots.of_columns[0].is_some();
        let (rows, parts) =
            (lowered.table[normed].shape[0], if is_cut { lowered.ops[before].grid[0] as usize } else { 1 });
        // Rows on sixteen bytes.
        let (name, pitch) = (format!("{} squares", lowered.ops[at].name), parts.next_multiple_of(4));
        let all = lowered.table.add(&name, &[rows, pitch], DType::F32, BufferKind::Intermediate).ok()?;
        let squares = lowered.table.view(&name, all, 0, &[rows, parts], &[pitch, 1]).ok()?;
        let access = |tensor, kind, map| Some(Access { tensor, kind, map });
        let accesses = &mut lowered.ops[before].accesses;
        accesses[slots.squares] = access(squares, AccessKind::Write, slots.of_part);
        accesses[slots.weights] = access(weights, AccessKind::Read, slots.of_columns);
        accesses[slots.weighted] = access(normed, AccessKind::Write, slots.of_part);
        for other in after {
            let op = &mut lowered.ops[other];
            let kernel = op.kernel.as_mut()?;
            op.accesses[norm_slot(kernel.task_type)?] = access(squares, AccessKind::Read, OF_ROWS);
            let words = &mut kernel.params;
            *words = if kernel.task_type == Linear::TASK_TYPE {
                param_words(&linear::Params { eps, is_weighted: 1, ..kernels::params(words) })
            } else {
                param_words(&gated_linear::Params { eps, is_weighted: 1, ..kernels::params(words) })
            };
        }
        Some(())
    }
}

/// Weight matrices of a product, from slot `W` on; 0 for another operator.
pub(super) fn n_matrices(op: &Operator) -> usize {
    match op.kernel.task_type {
        Linear::TASK_TYPE => 1,
        GatedLinear::TASK_TYPE => 2,
        _ => 0,
    }
}

/// Whether `op` is a product of as many rows as the pass has with weights that the tensor cores take, one for all
/// heads.
pub(super) fn is_product(op: &Operator, table: &TensorTable) -> bool {
    takes_brains(op, table) && !op.axes.iter().any(are_heads)
}

/// Whether tensor cores multiply rows in bf16 with weights of this type.
pub(super) fn are_multiplied_as_brains(dtype: DType) -> bool {
    dtype == DType::Bf16 || dtype.lines().is_some()
}

/// Whether `op` is one that multiplies rows in bf16: such a product, or a head's each.
fn takes_brains(op: &Operator, table: &TensorTable) -> bool {
    let n = n_matrices(op);
    let are_all = |dtype| op.slots[W..W + n].iter().all(|t| t.is_some_and(|t| table[t].dtype == dtype));
    let are_taken = |t: TensorId| are_multiplied_as_brains(table[t].dtype) && are_all(table[t].dtype);
    n > 0 && op.slots[W].is_some_and(are_taken) && op.slots[X].is_some_and(|x| table[x].shape[0] > 1)
}

/// Per buffer, whether it is of f32, and one operator writes it and only [products](is_product), experts' too, read it,
/// as x.
fn read_by_products(graph: &KernelGraph) -> Vec<bool> {
    let table = &graph.table;
    let mut fits: Vec<bool> = table.buffers.iter().map(|buffer| buffer.kind == BufferKind::Intermediate).collect();
    let mut n_read = vec![0; fits.len()];
    for op in graph.ops() {
        let Some(spec) = Spec::of(op.kernel.task_type) else { return vec![false; fits.len()] };
        for (slot, tensor) in op.slots.iter().enumerate() {
            let Some(tensor) = *tensor else { continue };
            let buffer = table[tensor].buffer.idx();
            let as_x = slot == X && (takes_brains(op, table) || experts::is_routed(op));
            let is_made = matches!(spec.slots[slot].usage, Use::Write | Use::Append);
            n_read[buffer] += usize::from(as_x);
            fits[buffer] &= table[tensor].dtype == DType::F32 && (as_x || is_made);
        }
    }
    for (_, tensor) in graph.outputs() {
        fits[table[*tensor].buffer.idx()] = false;
    }
    fits.iter().zip(n_read).map(|(fits, n_read)| *fits && n_read > 0).collect()
}

/// Of a product: rows of x, columns of all, rows of each of so many matrices, of so many heads.
pub(super) struct Sizes {
    pub(super) rows: u64,
    pub(super) k: u64,
    pub(super) n: u64,
    pub(super) matrices: u64,
    /// 1, where they are not a head's.
    pub(super) heads: u64,
    /// The weights' type.
    pub(super) dtype: DType,
}

pub(super) fn sizes(op: &Operator, table: &TensorTable) -> Sizes {
    let shape = |slot: usize| op.slots.get(slot).copied().flatten().map_or(&[][..], |t| &table[t].shape);
    let of = |dim: Option<&usize>| dim.map_or(0, |n| *n as u64);
    let (x, w) = (shape(X), shape(W));
    let dtype = op.slots.get(W).copied().flatten().map_or(DType::Bf16, |w| table[w].dtype);
    let heads = op.axes.iter().find(|axis| axis.role == AxisRole::SingleHeads).map_or(1, |axis| axis.len as u64);
    let (rows, k, n) = (of(x.first()), of(x.last()), of(w.iter().nth_back(1)));
    Sizes { rows, k, n, matrices: n_matrices(op) as u64, heads, dtype }
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
            dtype if dtype.levels().is_some() => part::FOURS,
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
            let parts = sizes.heads * sizes.parts(*shape).iter().product::<u64>();
            (n_parts + parts, longest.max(sizes.part_cycles(*shape)))
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
