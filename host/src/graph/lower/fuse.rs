//! Operators of a pass over one row, made fewer: every one less is a wait less between workers.
//!
//! - A [`RmsNorm`] whose result only products read goes into them: each normalises its row itself.
//! - A [`SelectRow`] of one row is that row: who reads it reads what it was selected from.
//! - [`Rope`] and the [`Attention`] over the cache it appends to become one [`DecodeAttention`]; in the pass over a batch, too, in
//!   which each sequence has them for itself, over its own row.
//!
//! An operator goes where its last reader is, so nothing it reads may be written in between, and nothing else may read what
//! it no longer makes. Tensors that nobody makes any more stay in the table, without bytes.

use super::*;
use crate::graph::kernel::GraphError;
use perpetua_device::kernels::{
    DecodeAttention, ExpertsUp, GatedLinear, Linear, MAX_NORMED, RmsNorm, Rope, SelectRow, decode_attention,
    experts_up, gated_linear, linear, rms_norm, rope, routing,
};

/// Where such a product has its norm's weights.
pub(super) fn norm_slot(task_type: u16) -> Option<usize> {
    match task_type {
        Linear::TASK_TYPE => Some(linear::slot::NORM),
        GatedLinear::TASK_TYPE => Some(gated_linear::slot::NORM),
        ExpertsUp::TASK_TYPE => Some(experts_up::slot::NORM),
        _ => None,
    }
}

/// Elements of a row that product `op` may normalise first.
fn most_normed(graph: &KernelGraph, op: &Operator) -> usize {
    let logits = op.slots.get(experts_up::slot::LOGITS).copied().flatten();
    let logits = logits.filter(|_| op.kernel.task_type == ExpertsUp::TASK_TYPE);
    logits.map_or(MAX_NORMED, |logits| routing::most_staged(graph.table[logits].shape[1] as u32)) as usize
}

/// Whether `op` is a product that normalises its row first.
pub(super) fn is_normed(op: &Operator) -> bool {
    norm_slot(op.kernel.task_type).is_some_and(|slot| op.slots.get(slot).copied().flatten().is_some())
}

/// `graph`, a pass over one row, with what can be one operator made one.
///
/// # Errors
/// None that a graph whose operators have been judged can give.
pub(super) fn fuse(graph: &KernelGraph) -> Result<KernelGraph, GraphError> {
    let mut ops: Vec<Option<Operator>> = graph.ops().cloned().map(Some).collect();
    for at in 0..ops.len() {
        select(graph, &mut ops, at);
        norm(graph, &mut ops, at);
        attend(graph, &mut ops, at);
    }
    graph.with_ops(ops.into_iter().flatten())
}

/// `graph`, a pass over several rows, with the attention of those operators made one that have a row alone.
///
/// # Errors
/// As [`fuse`].
pub(super) fn fuse_attention(graph: &KernelGraph) -> Result<KernelGraph, GraphError> {
    let mut ops: Vec<Option<Operator>> = graph.ops().cloned().map(Some).collect();
    (0..ops.len()).for_each(|at| attend(graph, &mut ops, at));
    graph.with_ops(ops.into_iter().flatten())
}

/// Whether `op` reads or writes the bytes of `tensor`, or some between them, other than through `except`.
fn touches(graph: &KernelGraph, op: &Operator, tensor: TensorId, except: Option<usize>) -> bool {
    let span = |t: TensorId| {
        let tensor = &graph.table[t];
        let last = tensor.shape.iter().zip(&tensor.strides).map(|(n, stride)| n.saturating_sub(1) * stride);
        (tensor.buffer, tensor.offset_elems, tensor.offset_elems + last.sum::<usize>())
    };
    let (buffer, first, last) = span(tensor);
    let meets = |t: TensorId| {
        let (other, from, to) = span(t);
        other == buffer && from <= last && first <= to
    };
    op.slots.iter().enumerate().any(|(slot, t)| Some(slot) != except && t.is_some_and(meets))
}

fn writes(graph: &KernelGraph, op: &Operator, tensor: TensorId) -> bool {
    let Some(spec) = Spec::of(op.kernel.task_type) else { return true };
    let buffer = graph.table[tensor].buffer;
    let mut slots = spec.slots.iter().zip(&op.slots);
    slots.any(|(slot, t)| slot.usage != Use::Read && t.is_some_and(|t| graph.table[t].buffer == buffer))
}

/// Whether an operator of `ops[range]` writes what `of` reads.
fn is_overwritten(
    graph: &KernelGraph,
    ops: &[Option<Operator>],
    range: std::ops::Range<usize>,
    of: &[TensorId],
) -> bool {
    ops[range].iter().flatten().any(|op| of.iter().any(|t| writes(graph, op, *t)))
}

/// Leaves out operator `at`, if it selects the only row there is.
fn select(graph: &KernelGraph, ops: &mut [Option<Operator>], at: usize) {
    let Some(op) = ops[at].as_ref().filter(|op| op.kernel.task_type == SelectRow::TASK_TYPE && op.cut.is_none()) else {
        return;
    };
    let [Some(x), Some(y)] = op.slots[..] else { return };
    let (from, to) = (&graph.table[x], &graph.table[y]);
    let is_same = (&from.shape, &from.strides, from.dtype) == (&to.shape, &to.strides, to.dtype);
    if !is_same || from.shape[0] != 1 || is_output(graph, &graph.table, y) {
        return;
    }
    let mut readers = Vec::new();
    for (other, op) in ops.iter().enumerate() {
        let Some(op) = op.as_ref().filter(|op| other != at && touches(graph, op, y, None)) else { continue };
        let reads_parts = op.slots.iter().flatten().any(|t| *t != y && graph.table[*t].buffer == to.buffer);
        if other < at || reads_parts || writes(graph, op, y) || op.cut.is_some() {
            return;
        }
        readers.push(other);
    }
    if readers.last().is_some_and(|last| is_overwritten(graph, ops, at + 1..*last, &[x])) {
        return;
    }
    for reader in readers {
        let slots = ops[reader].iter_mut().flat_map(|op| &mut op.slots);
        for slot in slots.filter(|slot| **slot == Some(y)) {
            *slot = Some(x);
        }
    }
    ops[at] = None;
}

/// Puts operator `at`, if it is a norm that can go, into its readers.
fn norm(graph: &KernelGraph, ops: &mut [Option<Operator>], at: usize) {
    let Some(op) = ops[at].as_ref().filter(|op| op.kernel.task_type == RmsNorm::TASK_TYPE && op.cut.is_none()) else {
        return;
    };
    // One that is added to something is somebody's residual, too.
    let (&[Some(x), Some(w), Some(y), None, ..], flags) = (&op.slots[..], op.kernel.flags) else { return };
    let eps = kernels::params::<rms_norm::Params>(&op.kernel.params).eps;
    if graph.table[x].shape[..] != graph.table[y].shape[..]
        || graph.table[x].shape[0] != 1
        || is_output(graph, &graph.table, y)
    {
        return;
    }
    let fits = |op: &Operator| {
        norm_slot(op.kernel.task_type).is_some_and(|slot| {
            op.slots[slot].is_none()
                && op.slots[X] == Some(y)
                && op.cut.is_none()
                && op.kernel.flags == flags
                && graph.table[x].shape[1] <= most_normed(graph, op)
                && !touches(graph, op, y, Some(X))
        })
    };
    let mut readers = Vec::new();
    for (other, op) in ops.iter().enumerate() {
        let Some(op) = op.as_ref().filter(|op| other != at && touches(graph, op, y, None)) else { continue };
        if other < at || !fits(op) {
            return;
        }
        readers.push(other);
    }
    let Some(&last) = readers.last() else { return };
    if is_overwritten(graph, ops, at + 1..last, &[x]) {
        return;
    }
    for reader in readers {
        let Some(op) = ops[reader].as_mut() else { continue };
        let Some(slot) = norm_slot(op.kernel.task_type) else { continue };
        (op.slots[X], op.slots[slot]) = (Some(x), Some(w));
        let words = &mut op.kernel.params;
        *words = match op.kernel.task_type {
            Linear::TASK_TYPE => param_words(&linear::Params { eps, ..kernels::params(words) }),
            ExpertsUp::TASK_TYPE => param_words(&experts_up::Params { eps, ..kernels::params(words) }),
            _ => param_words(&gated_linear::Params { eps, ..kernels::params(words) }),
        };
    }
    ops[at] = None;
}

/// Makes operator `at`, if it is a rotation and append, one with the attention after it.
fn attend(graph: &KernelGraph, ops: &mut [Option<Operator>], at: usize) {
    let Some(rope) = ops[at].as_ref().filter(|op| op.kernel.task_type == Rope::TASK_TYPE && op.cut.is_none()) else {
        return;
    };
    let [Some(q), Some(k), Some(v), q_norm, k_norm, Some(frequencies), Some(k_cache), Some(v_cache)] = rope.slots[..]
    else {
        return;
    };
    // The next operator that has to do with the query or the caches.
    let own = [q, k_cache, v_cache];
    let next = (at + 1..ops.len())
        .find(|next| ops[*next].as_ref().is_some_and(|op| own.iter().any(|t| touches(graph, op, *t, None))));
    let Some((number, op)) = next.and_then(|next| Some((next, ops[next].as_ref()?))) else { return };
    let (&[Some(query), Some(keys), Some(values), Some(y)], Attention::TASK_TYPE) =
        (&op.slots[..], op.kernel.task_type)
    else {
        return;
    };
    let params: attention::Params = kernels::params(&op.kernel.params);
    let [rows, heads, group, d] = graph.table[q].shape[..] else { return };
    let fits = (query, keys, values) == (q, k_cache, v_cache)
        && op.cut.is_none()
        && op.kernel.flags == rope.kernel.flags
        && params.ahead == 0
        && params.splits == 1
        && rows == 1
        && group * d <= decode_attention::MAX_QUERY as usize
        && !is_output(graph, &graph.table, q)
        && !is_overwritten(graph, ops, at + 1..number, &[k, v]);
    // Nobody else may want the query turned.
    let others = ops.iter().enumerate().filter(|(other, _)| *other > number);
    if !fits || others.flat_map(|(_, op)| op).any(|op| touches(graph, op, q, None)) {
        return;
    }
    let rope::Params { eps, turned_pairs, factor } = kernels::params(&rope.kernel.params);
    let attention::Params { scale, window, .. } = params;
    let params = decode_attention::Params { eps, scale, splits: 1, window, turned_pairs, factor };
    let slots =
        vec![Some(q), Some(k), Some(v), q_norm, k_norm, Some(frequencies), Some(k_cache), Some(v_cache), Some(y)];
    let dims = vec![Some(1), Some(1), Some(1), None, None, None, Some(0), Some(0), Some(1)];
    let one = Operator {
        name: op.name.clone(),
        kernel: KernelCall { task_type: DecodeAttention::TASK_TYPE, params: param_words(&params), ..op.kernel },
        slots,
        axes: vec![Axis { len: heads, dims, role: AxisRole::Heads }],
        cut: None,
    };
    ops[at] = None;
    ops[number] = Some(one);
}
