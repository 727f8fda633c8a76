//! [`Cut::PerWorker`]: passes of one row whose workers prefetch across tasks, where bytes must be even and every wait
//! costs a hop between workers.
//!
//! - Operators are [fused](super::fuse) first.
//! - Products of one activation are cut into as many blocks as there are workers, all together: each into its share by
//!   bytes, so that every worker has one block of one of them.
//! - A row-wise operator whose result only products read is *replicated*: as many blocks as the readers have, each
//!   making its own copy, block `b` of the reader reading copy `b`. Placed on one worker, the pair needs no hop.
//! - Attention is cut along positions as well as heads: every block writes what it found of its share, and an
//!   `attention_merge` after it makes the result: a block per query head, or, where that reads less than a hop costs,
//!   in every block of the product that reads it.
//! - A row that is longer than a body's registers is taken in segments, by so few rows of weights a block that their
//!   sums have room.
//! - The search for a row's largest element is made by the product that makes the row: each block finds its own.

use super::*;
use perpetua_device::kernels::{ArgmaxPartial, MAX_FLAGGED, argmax, attention_merge};

/// Cuts `graph`, a pass over one row.
pub(super) fn lower(graph: &KernelGraph, target: &Target) -> Result<ThreadBlockGraph, Vec<Violation>> {
    let fused =
        fuse::fuse(graph).map_err(|error| vec![Violation { op: "fused".to_owned(), what: error.to_string() }])?;
    let mut lowered = cut_all(&fused, target);
    one_block_per_worker(&fused, &mut lowered, target);
    take_in_segments(&fused, &mut lowered, target);
    replicate(&fused, &mut lowered);
    split_positions(&fused, &mut lowered, target);
    search_in_products(&fused, &mut lowered);
    lowered.check()?;
    Ok(lowered)
}

/// Bytes of the caches that `op` reads of one head.
fn head_bytes(table: &TensorTable, op: &Operator) -> u64 {
    let Some(spec) = Spec::of(op.kernel.task_type) else { return 0 };
    let slots = spec.slots.iter().zip(&op.slots).filter(|(slot, _)| matches!(slot.usage, Use::Read | Use::Append));
    let caches = slots.filter_map(|(_, t)| (*t).filter(|t| table.buffer_of(*t).kind == BufferKind::State));
    caches.map(|cache| table[cache].dtype.tensor_bytes(&table[cache].shape[1..])).sum()
}

/// Bytes of a position's key and value in most models: as many [`Target::split_positions`] are of.
const POSITION_BYTES: u64 = 512;

/// Positions that a task takes at once: fewer would wait as long for memory.
const LEAST_POSITIONS: u64 = 16;

fn one_block_per_worker(graph: &KernelGraph, lowered: &mut ThreadBlockGraph, target: &Target) {
    let table = &graph.table;
    let ops: Vec<&Operator> = graph.ops().collect();
    for (first, group) in side_by_side(&ops, |op| is_matrix(op, table)) {
        let bytes: Vec<u64> = group.iter().map(|op| read_bytes(op, &op.axes[0], table)).collect();
        // Those that read a replicated copy must be cut alike.
        let apart = group.len() > 1 && !may_be_copied(&ops, table, group[0].slots[X]);
        let (mut workers, mut left) = (target.n_workers, bytes.iter().sum::<u64>());
        for (at, bytes) in (first..).zip(bytes) {
            let share = (u64::from(workers) * bytes + left / 2) / left.max(1);
            let n = if apart { (share as u32).max(1) } else { target.n_workers };
            (workers, left) = (workers.saturating_sub(n), left - bytes);
            if bytes >= SMALL_MATRIX_BYTES {
                lowered.ops[at].grid[0] = n.min(ops[at].axes[0].len as u32);
            }
        }
    }
    // Experts' weights are nobody's side: which they are is known when the logits are.
    for (op, block) in ops.iter().zip(&mut lowered.ops) {
        if op.cut.is_none() && op.slots.iter().flatten().any(|t| table.is_stack(*t)) {
            block.grid[0] = target.n_workers.min(op.axes[0].len as u32);
        }
    }
}

/// Has products of rows that are longer than what a body holds of one take them in segments. See the module head.
fn take_in_segments(graph: &KernelGraph, lowered: &mut ThreadBlockGraph, target: &Target) {
    let table = &graph.table;
    for (op, block) in graph.ops().zip(&mut lowered.ops) {
        let (Linear::TASK_TYPE, [Some(x), Some(w), ..]) = (op.kernel.task_type, &op.slots[..]) else { continue };
        let (x, w) = (&table[*x], &table[*w]);
        let [columns, k] = w.shape[..] else { continue };
        let is_plain = !fuse::is_normed(op) && op.cut.is_none() && x.shape[0] == 1 && k.is_multiple_of(8);
        let is_whole = x.dtype == DType::F32 && (x.offset_elems * x.dtype.size_bytes()).is_multiple_of(16);
        if k <= MAX_FLAGGED as usize || !is_plain || !is_whole || w.dtype != DType::Bf16 {
            continue;
        }
        let segments = (k as u32).div_ceil(MAX_FLAGGED);
        let most = (linear::LONG_SUMS / segments).saturating_sub(1) as usize;
        let Some(kernel) = &mut block.kernel else { continue };
        if most == 0 {
            continue;
        }
        let blocks = columns.div_ceil(most) as u32;
        block.grid[0] = block.grid[0].max(blocks.next_multiple_of(target.n_workers)).min(columns as u32);
        kernel.params = param_words(&linear::Params { segments, ..kernels::params(&kernel.params) });
    }
}

/// Whether a row-wise operator makes `tensor` for products alone, each of which may read [a copy](replicate).
fn may_be_copied(ops: &[&Operator], table: &TensorTable, tensor: Option<TensorId>) -> bool {
    let Some(buffer) = tensor.map(|t| table[t].buffer) else { return false };
    let touches = |t: &Option<TensorId>| t.is_some_and(|t| table[t].buffer == buffer);
    let is_maker = |op: &Operator| {
        let slots = Spec::of(op.kernel.task_type).map_or(&[][..], |spec| spec.slots);
        let mut written = slots.iter().zip(&op.slots).filter(|(slot, _)| slot.usage != Use::Read);
        matches!(&op.axes[..], [axis] if axis.role == AxisRole::Rows) && written.any(|(_, t)| touches(t))
    };
    let multiplies = |op: &Operator| is_matrix(op, table) && op.slots.iter().skip(X + 1).all(|t| !touches(t));
    let mut users = ops.iter().filter(|op| op.slots.iter().any(touches));
    users.next().is_some_and(|op| is_maker(op)) && users.all(|op| multiplies(op))
}

/// The operators other than `number` that touch `buffer`, if all are products after it that read `made` whole, cut
/// alike; and into how many blocks.
fn only_products(
    ops: &[Option<&Operator>],
    lowered: &ThreadBlockGraph,
    number: usize,
    made: TensorId,
    table: &TensorTable,
) -> Option<(Vec<usize>, u32)> {
    let buffer = lowered.table[made].buffer;
    let (mut readers, mut copies) = (Vec::new(), None);
    for (at, other) in lowered.ops.iter().enumerate().filter(|(at, _)| *at != number) {
        for access in other.accesses.iter().flatten() {
            if lowered.table[access.tensor].buffer != buffer {
                continue;
            }
            let fits = access.kind == AccessKind::Read
                && access.map == [None; GRID_AXES]
                && lowered.table[access.tensor].len_elems() == lowered.table[made].len_elems()
                && at > number
                && ops[at].is_some_and(|op| is_matrix(op, table))
                && *copies.get_or_insert(other.grid[0]) == other.grid[0];
            if !fits {
                return None;
            }
            readers.push(at);
        }
    }
    copies.filter(|copies| *copies > 1).map(|copies| (readers, copies))
}

/// Gives every product its own copy of a row-wise operator's result. See the module head.
fn replicate(graph: &KernelGraph, lowered: &mut ThreadBlockGraph) {
    let ops: Vec<Option<&Operator>> = graph.ops().map(Some).collect();
    for (number, op) in ops.iter().flatten().enumerate() {
        let [axis] = &op.axes[..] else { continue };
        if axis.role != AxisRole::Rows || op.cut.is_some() {
            continue;
        }
        let writes = lowered.ops[number].accesses.iter().flatten().filter(|access| access.kind.writes());
        let [made] = writes.map(|access| access.tensor).collect::<Vec<_>>()[..] else { continue };
        if is_output(graph, &lowered.table, made) || lowered.table.buffer_of(made).kind != BufferKind::Intermediate {
            continue;
        }
        let Some((readers, copies)) = only_products(&ops, lowered, number, made, &graph.table) else { continue };
        let Some(seen) = copy_out(lowered, made, &readers, copies) else { continue };
        let block = &mut lowered.ops[number];
        (block.grid, block.row_axis, block.rows) = ([copies, 1, 1], None, 0);
        for access in block.accesses.iter_mut().flatten() {
            access.map = [None; GRID_AXES];
            if access.tensor == made {
                (access.tensor, access.map) = (seen, COPY);
            }
        }
    }
}

/// A block has the copy whose number it has.
pub(in crate::graph) const COPY: [Option<u8>; GRID_AXES] = [Some(0), None, None];

/// Makes `copies` copies of `made`, of which each block of the `readers` reads its own from now on: a tensor of
/// `made`'s shape, copies in place of its one row.
fn copy_out(lowered: &mut ThreadBlockGraph, made: TensorId, readers: &[usize], copies: u32) -> Option<TensorId> {
    let tensor = &lowered.table[made];
    let (buffer, name, dtype) = (tensor.buffer, format!("{} copies", tensor.name), tensor.dtype);
    let mut shape = tensor.shape.clone();
    let flat = [copies as usize, tensor.len_elems()];
    if shape.first() != Some(&1) {
        return None;
    }
    shape[0] = copies as usize;
    let replicas = lowered.table.add(&name, &flat, dtype, BufferKind::Intermediate).ok()?;
    let seen = match shape == flat {
        true => replicas,
        false => lowered.table.view(&name, replicas, 0, &shape, &crate::graph::tensor::row_major(&shape)).ok()?,
    };
    for at in readers {
        for access in lowered.ops[*at].accesses.iter_mut().flatten() {
            if lowered.table[access.tensor].buffer == buffer {
                (access.tensor, access.map) = (replicas, COPY);
            }
        }
    }
    Some(seen)
}

/// Splits of a head's positions at most: what a merge reads grows with them, what they save does not.
pub(super) const MAX_SPLITS: u32 = 16;

/// The operands of an attention of one row that the cut asks for: query, keys and result.
fn attention_slots(op: &Operator) -> Option<[usize; 3]> {
    match op.kernel.task_type {
        Attention::TASK_TYPE => {
            use attention::slot::{K, Q, Y};
            Some([Q, K, Y])
        }
        DecodeAttention::TASK_TYPE => {
            use decode_attention::slot::{K_CACHE, Q, Y};
            Some([Q, K_CACHE, Y])
        }
        _ => None,
    }
}

/// How the positions that an attention attends to are shared.
#[derive(Clone, Copy, Debug)]
struct Splits {
    /// Ways a head's are split; 1: not.
    n: u32,
    /// Whether every block that reads the result merges for itself.
    by_readers: bool,
}

/// How `op` is split for `target`: so that the bytes read one after the other are fewest, a split's keys and values,
/// then the splits to merge, all heads' by who wants them all, or a head's and a hop's worth. Not at all where it is no
/// attention.
fn splits_of(graph: &KernelGraph, op: &Operator, target: &Target) -> Splits {
    let table = &graph.table;
    let whole = Splits { n: 1, by_readers: true };
    let Some([q, keys, _]) = attention_slots(op).filter(|_| op.cut.is_none()) else { return whole };
    let (Some(q), Some(keys)) = (op.slots[q], op.slots[keys]) else { return whole };
    let [_, heads, group, d] = table[q].shape[..] else { return whole };
    let (positions, head_bytes) = (table[keys].shape[1] as u32, head_bytes(table, op));
    let position_bytes = (head_bytes / u64::from(positions).max(1)).max(POSITION_BYTES);
    let least = (u64::from(target.split_positions) * POSITION_BYTES / position_bytes).max(LEAST_POSITIONS);
    let least = least.min(u64::from(target.split_positions)) as u32;
    let most = (target.n_workers / heads as u32).min(positions / least).clamp(1, MAX_SPLITS);
    let found_bytes = (group * (attention::FOUND as usize + d) * DType::F32.size_bytes()) as u64;
    let read = |splits: &Splits| {
        let n = u64::from(splits.n);
        head_bytes / n
            + match (n, splits.by_readers) {
                (1, _) => 0,
                (_, true) => n * heads as u64 * found_bytes,
                (_, false) => n * found_bytes + target.hop_bytes,
            }
    };
    // Where rows are several the product that reads them reads them all.
    let may_read = |by_readers: &bool| !by_readers || graph.rows == Some(1);
    let ways = (1..=most)
        .flat_map(|n| [true, false].into_iter().filter(may_read).map(move |by_readers| Splits { n, by_readers }));
    ways.min_by_key(read).unwrap_or(whole)
}

/// Cuts attention along positions. See the module head.
pub(super) fn split_positions(graph: &KernelGraph, lowered: &mut ThreadBlockGraph, target: &Target) {
    assert_eq!(graph.ops().len(), lowered.ops.len(), "operators are split before others join them");
    let mut with_merges = Vec::with_capacity(lowered.ops.len());
    // Operators of the graph by the lowered operator's number, which merges move.
    let mut ops: Vec<Option<&Operator>> = Vec::with_capacity(lowered.ops.len());
    let mut by_readers = Vec::new();
    for (op, mut block) in graph.ops().zip(std::mem::take(&mut lowered.ops)) {
        let splits = splits_of(graph, op, target);
        let merge = (splits.n > 1).then(|| split(&mut lowered.table, op, &mut block, splits.n, target)).flatten();
        with_merges.push(block);
        ops.push(Some(op));
        if let Some((merge, y)) = merge {
            by_readers.extend(splits.by_readers.then_some((with_merges.len(), y)));
            with_merges.push(merge);
            ops.push(None);
        }
    }
    lowered.ops = with_merges;
    let mut left_out = vec![false; ops.len()];
    for (number, y) in by_readers {
        left_out[number] = merge_in_readers(graph, lowered, &ops, number, y);
    }
    let mut left_out = left_out.into_iter();
    lowered.ops.retain(|_| !left_out.next().unwrap_or(false));
}

/// Cuts `block`, an attention of one row, `op`, `splits` ways along positions. What it finds goes to a tensor of its
/// own, from which the operator returned makes the result, which is returned too.
fn split(
    table: &mut TensorTable,
    op: &Operator,
    block: &mut BlockOp,
    splits: u32,
    target: &Target,
) -> Option<(BlockOp, TensorId)> {
    let [q, _, y] = attention_slots(op)?;
    let (q, kernel) = (op.slots[q]?, block.kernel.as_mut()?);
    let [_, heads, group, d] = table[q].shape[..] else { return None };
    let shape = [heads, splits as usize, group, attention::FOUND as usize + d];
    let parts = table.add(&format!("{} parts", block.name), &shape, DType::F32, BufferKind::Intermediate).ok()?;
    kernel.params = match kernel.task_type {
        Attention::TASK_TYPE => param_words(&attention::Params { splits, ..kernels::params(&kernel.params) }),
        _ => param_words(&decode_attention::Params { splits, ..kernels::params(&kernel.params) }),
    };
    let flags = kernel.flags;
    for access in block.accesses.iter_mut().flatten() {
        access.map[1] = None;
    }
    let found = Access { tensor: parts, kind: AccessKind::Write, map: [Some(0), Some(1), None] };
    let whole = block.accesses[y].replace(found)?;
    (block.grid[1], block.row_axis, block.rows) = (splits, None, 0);
    let are_enough = heads * group <= target.n_workers as usize;
    let merged = Merged::Queries(if are_enough { group as u32 } else { 1 });
    Some((merge_of(block, flags, [parts, whole.tensor], merged), whole.tensor))
}

/// How what is merged of a head is cut.
#[derive(Clone, Copy, Debug)]
pub(super) enum Merged {
    /// One row's queries, into so many blocks.
    Queries(u32),
    /// So many rows, into so many equal blocks.
    Rows([u32; 2]),
}

/// The operator that makes `y` of what the blocks of `attention`, which has `flags`, leave in `parts`: blocks for each
/// head.
pub(super) fn merge_of(attention: &BlockOp, flags: u16, [parts, y]: [TensorId; 2], merged: Merged) -> BlockOp {
    // In parts rows and queries are one dimension.
    let ([rows, blocks], dim, row_axis) = match merged {
        Merged::Queries(blocks) => ([0, blocks], 2, None),
        Merged::Rows(rows_in_blocks) => (rows_in_blocks, 0, Some(1)),
    };
    let access = |tensor, kind, map| Some(Access { tensor, kind, map });
    BlockOp {
        name: format!("{} merge", attention.name),
        grid: [attention.grid[0], blocks, 1],
        accesses: vec![
            access(parts, AccessKind::Read, [Some(0), Some(2), None]),
            access(y, AccessKind::Write, [Some(1), Some(dim), None]),
        ],
        row_axis,
        rows,
        head_axis: None,
        kernel: Some(KernelCall {
            task_type: AttentionMerge::TASK_TYPE,
            flags,
            params: param_words(&attention_merge::Params {}),
        }),
    }
}

/// Has the products that read the result `y` of the merge `number` make it themselves, so that nobody needs the merge;
/// says whether all of them can.
fn merge_in_readers(
    graph: &KernelGraph,
    lowered: &mut ThreadBlockGraph,
    ops: &[Option<&Operator>],
    number: usize,
    y: TensorId,
) -> bool {
    if is_output(graph, &lowered.table, y) || lowered.table[y].len_elems() > MAX_NORMED as usize {
        return false;
    }
    let Some((readers, _)) = only_products(ops, lowered, number, y, &graph.table) else { return false };
    let Some(parts) = lowered.ops[number].accesses[attention_merge::slot::PARTS].as_ref().map(|access| access.tensor)
    else {
        return false;
    };
    let is_able = |at: &usize| {
        ops[*at].is_some_and(|op| {
            let reads = |t: Option<TensorId>| t.is_some_and(|t| lowered.table[t].buffer == lowered.table[y].buffer);
            let others = op.slots[linear::slot::W..].iter().filter(|t| reads(**t)).count();
            op.kernel.task_type == Linear::TASK_TYPE
                && reads(op.slots[linear::slot::X])
                && !fuse::is_normed(op)
                && others == 0
        })
    };
    if !readers.iter().all(is_able) {
        return false;
    }
    for at in readers {
        let block = &mut lowered.ops[at];
        block.accesses[linear::slot::X] =
            Some(Access { tensor: parts, kind: AccessKind::Read, map: [None; GRID_AXES] });
        // One row, and not the pass's first: the parts' first dimension is heads.
        (block.row_axis, block.rows) = (None, 0);
        if let Some(kernel) = &mut block.kernel {
            kernel.params = param_words(&linear::Params { merges: 1, ..kernels::params(&kernel.params) });
        }
    }
    true
}

/// Where a product's largest elements go.
const BEST: [usize; 2] = [linear::slot::VALUES, linear::slot::INDICES];

/// Has products find the largest of what they make, where an operator does nothing else. See the module head.
fn search_in_products(graph: &KernelGraph, lowered: &mut ThreadBlockGraph) {
    let mut number = 0;
    while number < lowered.ops.len() {
        if search_in_product(graph, lowered, number).is_some() {
            lowered.ops.remove(number);
        } else {
            number += 1;
        }
    }
}

/// The same for operator `number`, if it is such a search, which then is nobody's any more.
fn search_in_product(graph: &KernelGraph, lowered: &mut ThreadBlockGraph, number: usize) -> Option<()> {
    let search = &lowered.ops[number];
    search.kernel.filter(|kernel| kernel.task_type == ArgmaxPartial::TASK_TYPE)?;
    let slots = [argmax::slot::X, argmax::slot::VALUES, argmax::slot::INDICES];
    let [x, values, indices] = slots.map(|slot| search.accesses[slot].as_ref().map(|access| access.tensor));
    let (row, found) = (lowered.table[x?].clone(), [values?, indices?]);
    let touches = |access: &Access| lowered.table[access.tensor].buffer == row.buffer;
    // Who wrote the row last, and all of it.
    let wrote = |access: &&Access| access.kind.writes() && touches(access);
    let product = lowered.ops[..number].iter().rposition(|op| op.accesses.iter().flatten().any(|a| wrote(&a)))?;
    let op = &lowered.ops[product];
    let y = op.accesses.get(linear::slot::Y)?.as_ref()?;
    let made = &lowered.table[y.tensor];
    let blocks = op.grid[0];
    let is_able = op.kernel.is_some_and(|kernel| kernel.task_type == Linear::TASK_TYPE)
        && op.grid == [blocks, 1, 1]
        && (y.map, &made.shape[..]) == ([Some(1), None, None], &row.shape[..])
        && (made.offset_elems, made.dtype) == (row.offset_elems, DType::F32)
        && made.shape[0] == 1
        && BEST.iter().all(|slot| op.accesses[*slot].is_none())
        && op.accesses.iter().flatten().filter(wrote).count() == 1
        && !found.iter().any(|tensor| is_output(graph, &lowered.table, *tensor));
    let len_elems = u32::try_from(made.shape[1]).ok().filter(|len| len.checked_mul(blocks).is_some());
    let best = argmax::Params { blocks, len_elems: len_elems.filter(|_| is_able)? };

    let mut add = |tensor: TensorId| {
        let (name, dtype) = (lowered.table[tensor].name.clone(), lowered.table[tensor].dtype);
        lowered.table.add(&format!("{name} of products"), &[blocks as usize], dtype, BufferKind::Intermediate).ok()
    };
    let instead = [add(found[0])?, add(found[1])?];
    for access in lowered.ops[number + 1..].iter_mut().flat_map(|op| op.accesses.iter_mut().flatten()) {
        if let Some(at) = found.iter().position(|tensor| *tensor == access.tensor) {
            access.tensor = instead[at];
        }
    }
    let op = &mut lowered.ops[product];
    for (slot, tensor) in BEST.into_iter().zip(instead) {
        op.accesses[slot] = Some(Access { tensor, kind: AccessKind::Write, map: [Some(0), None, None] });
    }
    let kernel = op.kernel.as_mut()?;
    kernel.params = param_words(&linear::Params { best, ..kernels::params(&kernel.params) });
    Some(())
}
