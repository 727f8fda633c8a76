//! Operators of a pass over one row, made fewer: every one less is a wait less between workers.
//!
//! - A [`RmsNorm`] whose result only products read goes into them: each normalises its row itself.
//! - A [`SelectRow`] of one row is that row: who reads it reads what it was selected from.
//! - [`Rope`] and the [`Attention`] over the cache it appends to, or another's, become one [`DecodeAttention`]; in the
//!   pass over a batch, too, in which each sequence has them for itself, over its own row.
//!
//! An operator goes where its last reader is, so nothing it reads may be written in between, and nothing else may read
//! what it no longer makes. Tensors that nobody makes any more stay in the table, without bytes.

use super::*;
use crate::graph::kernel::GraphError;
use crate::graph::tensor::DTensor;
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
    let mut ops = Ops::of(graph);
    for at in 0..ops.all.len() {
        select(&mut ops, at);
        norm(&mut ops, at);
        attend(&mut ops, at);
    }
    graph.with_ops(ops.all.into_iter().flatten())
}

/// `graph`, a pass over several rows, with the attention of those operators made one that have a row alone.
///
/// # Errors
/// As [`fuse`].
pub(super) fn fuse_attention(graph: &KernelGraph) -> Result<KernelGraph, GraphError> {
    let mut ops = Ops::of(graph);
    (0..ops.all.len()).for_each(|at| attend(&mut ops, at));
    graph.with_ops(ops.all.into_iter().flatten())
}

/// The operators of a graph while some become one.
struct Ops<'a> {
    graph: &'a KernelGraph,
    /// By their first numbers; `None` where there is none any more.
    all: Vec<Option<Operator>>,
    /// Per buffer that some operator writes, those that touch it, in order, and perhaps some that no longer do: so
    /// nobody looks through all of them. Of a buffer there are a few for each sequence of a batch at most.
    touching: Vec<Vec<usize>>,
}

impl<'a> Ops<'a> {
    fn of(graph: &'a KernelGraph) -> Ops<'a> {
        let buffer = |t: TensorId| graph.table[t].buffer.idx();
        let mut is_written = vec![false; graph.table.buffers.len()];
        for op in graph.ops() {
            let slots = Spec::of(op.kernel.task_type).map_or(&[][..], |spec| spec.slots);
            let written = slots.iter().zip(&op.slots).filter(|(slot, _)| slot.usage != Use::Read);
            written.filter_map(|(_, t)| *t).for_each(|t| is_written[buffer(t)] = true);
        }
        let mut touching = vec![Vec::new(); is_written.len()];
        for (number, op) in graph.ops().enumerate() {
            for t in op.slots.iter().flatten().filter(|t| is_written[buffer(**t)]) {
                let of_buffer: &mut Vec<usize> = &mut touching[buffer(*t)];
                if of_buffer.last() != Some(&number) {
                    of_buffer.push(number);
                }
            }
        }
        Ops { graph, all: graph.ops().cloned().map(Some).collect(), touching }
    }

    /// The operators of numbers in `range` that touch the buffer of `tensor`, which somebody writes.
    fn of_buffer(&self, tensor: TensorId, range: std::ops::Range<usize>) -> impl Iterator<Item = (usize, &Operator)> {
        let touching = &self.touching[self.graph.table[tensor].buffer.idx()];
        let first = touching.partition_point(|number| *number < range.start);
        let numbers = touching[first..].iter().take_while(move |number| **number < range.end);
        numbers.filter_map(|number| Some((*number, self.all[*number].as_ref()?)))
    }

    /// Those of them that touch `tensor`.
    fn touching(&self, tensor: TensorId, range: std::ops::Range<usize>) -> impl Iterator<Item = (usize, &Operator)> {
        self.of_buffer(tensor, range).filter(move |(_, op)| touches(self.graph, op, tensor, None))
    }

    /// Whether an operator in `range` writes what `of` reads.
    fn is_overwritten(&self, range: std::ops::Range<usize>, of: &[TensorId]) -> bool {
        of.iter().any(|t| self.of_buffer(*t, range.clone()).any(|(_, op)| writes(self.graph, op, *t)))
    }

    /// Operator `number` now touches `tensor`, too.
    fn note(&mut self, number: usize, tensor: TensorId) {
        let touching = &mut self.touching[self.graph.table[tensor].buffer.idx()];
        // Of what nobody writes nobody asks.
        if !touching.is_empty()
            && let Err(at) = touching.binary_search(&number)
        {
            touching.insert(at, number);
        }
    }
}

/// Where in every stretch of `apart` elements those of `tensor` lie, the first and the last, if that is the same in
/// each.
fn within(tensor: &DTensor, apart: usize) -> Option<[usize; 2]> {
    let inner = tensor.shape.iter().zip(&tensor.strides).filter(|(_, stride)| !stride.is_multiple_of(apart));
    let first = tensor.offset_elems % apart;
    let last = first + inner.map(|(n, stride)| n.saturating_sub(1) * stride).sum::<usize>();
    (last < apart).then_some([first, last])
}

/// Whether `a` and `b`, of one buffer, take turns in it, as queries do with their gates: then they have no byte in
/// common.
fn alternate(a: &DTensor, b: &DTensor) -> bool {
    a.strides.iter().filter(|apart| **apart > 1).any(|apart| match (within(a, *apart), within(b, *apart)) {
        (Some([first, last]), Some([from, to])) => last < from || to < first,
        _ => false,
    })
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
        other == buffer && from <= last && first <= to && !alternate(&graph.table[tensor], &graph.table[t])
    };
    op.slots.iter().enumerate().any(|(slot, t)| Some(slot) != except && t.is_some_and(meets))
}

fn writes(graph: &KernelGraph, op: &Operator, tensor: TensorId) -> bool {
    let Some(spec) = Spec::of(op.kernel.task_type) else { return true };
    let buffer = graph.table[tensor].buffer;
    let mut slots = spec.slots.iter().zip(&op.slots);
    slots.any(|(slot, t)| slot.usage != Use::Read && t.is_some_and(|t| graph.table[t].buffer == buffer))
}

/// Leaves out operator `at`, if it selects the only row there is.
fn select(ops: &mut Ops<'_>, at: usize) {
    let graph = ops.graph;
    let Some(op) = ops.all[at].as_ref().filter(|op| op.kernel.task_type == SelectRow::TASK_TYPE && op.cut.is_none())
    else {
        return;
    };
    let [Some(x), Some(y)] = op.slots[..] else { return };
    let (from, to) = (&graph.table[x], &graph.table[y]);
    let is_same = (&from.shape, &from.strides, from.dtype) == (&to.shape, &to.strides, to.dtype);
    if !is_same || from.shape[0] != 1 || is_output(graph, &graph.table, y) {
        return;
    }
    let mut readers = Vec::new();
    for (other, op) in ops.touching(y, 0..ops.all.len()).filter(|(other, _)| *other != at) {
        let reads_parts = op.slots.iter().flatten().any(|t| *t != y && graph.table[*t].buffer == to.buffer);
        if other < at || reads_parts || writes(graph, op, y) || op.cut.is_some() {
            return;
        }
        readers.push(other);
    }
    if readers.last().is_some_and(|last| ops.is_overwritten(at + 1..*last, &[x])) {
        return;
    }
    for reader in readers {
        ops.note(reader, x);
        let slots = ops.all[reader].iter_mut().flat_map(|op| &mut op.slots);
        for slot in slots.filter(|slot| **slot == Some(y)) {
            *slot = Some(x);
        }
    }
    ops.all[at] = None;
}

/// Puts operator `at`, if it is a norm that can go, into its readers.
fn norm(ops: &mut Ops<'_>, at: usize) {
    let graph = ops.graph;
    let Some(op) = ops.all[at].as_ref().filter(|op| op.kernel.task_type == RmsNorm::TASK_TYPE && op.cut.is_none())
    else {
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
    for (other, op) in ops.touching(y, 0..ops.all.len()).filter(|(other, _)| *other != at) {
        if other < at || !fits(op) {
            return;
        }
        readers.push(other);
    }
    let Some(&last) = readers.last() else { return };
    if ops.is_overwritten(at + 1..last, &[x]) {
        return;
    }
    for reader in readers {
        ops.note(reader, x);
        ops.note(reader, w);
        let Some(op) = ops.all[reader].as_mut() else { continue };
        let Some(slot) = norm_slot(op.kernel.task_type) else { continue };
        (op.slots[X], op.slots[slot]) = (Some(x), Some(w));
        let words = &mut op.kernel.params;
        *words = match op.kernel.task_type {
            Linear::TASK_TYPE => param_words(&linear::Params { eps, ..kernels::params(words) }),
            ExpertsUp::TASK_TYPE => param_words(&experts_up::Params { eps, ..kernels::params(words) }),
            _ => param_words(&gated_linear::Params { eps, ..kernels::params(words) }),
        };
    }
    ops.all[at] = None;
}

/// Makes operator `at`, if it is a rotation and append, one with the attention after it.
fn attend(ops: &mut Ops<'_>, at: usize) {
    let graph = ops.graph;
    let Some(rope) = ops.all[at].as_ref().filter(|op| op.kernel.task_type == Rope::TASK_TYPE && op.cut.is_none())
    else {
        return;
    };
    let [Some(q), k, v, q_norm, k_norm, Some(frequencies), k_cache, v_cache] = rope.slots[..] else { return };
    // The next operator that has to do with the query or the caches that are appended to.
    let n_ops = ops.all.len();
    let touched = [Some(q), k_cache, v_cache].into_iter().flatten();
    let next = touched.filter_map(|t| ops.touching(t, at + 1..n_ops).next());
    let Some((number, op)) = next.min_by_key(|(number, _)| *number) else { return };
    let (&[Some(query), Some(keys), Some(values), Some(y), sinks], Attention::TASK_TYPE) =
        (&op.slots[..], op.kernel.task_type)
    else {
        return;
    };
    let params: attention::Params = kernels::params(&op.kernel.params);
    let [rows, heads, group, d] = graph.table[q].shape[..] else { return };
    let kept: Vec<TensorId> = [k, v].into_iter().flatten().collect();
    let fits = query == q
        && (k_cache.is_none() || (Some(keys), Some(values)) == (k_cache, v_cache))
        && op.cut.is_none()
        && op.kernel.flags == rope.kernel.flags
        && params.ahead == 0
        && params.splits == 1
        && rows == 1
        && group * d <= decode_attention::MAX_QUERY as usize
        && !is_output(graph, &graph.table, q)
        && !ops.is_overwritten(at + 1..number, &kept);
    // Nobody else may want the query turned.
    if !fits || ops.touching(q, number + 1..n_ops).next().is_some() {
        return;
    }
    let rope::Params { eps, turned_pairs, factor, norms } = kernels::params(&rope.kernel.params);
    let attention::Params { scale, window, .. } = params;
    let params = decode_attention::Params { eps, scale, splits: 1, window, turned_pairs, factor, norms };
    let inputs = [Some(q), k, v, q_norm, k_norm, Some(frequencies)];
    let slots = [&inputs[..], &[Some(keys), Some(values), Some(y), sinks]].concat();
    let dims = vec![Some(1), Some(1), Some(1), None, None, None, Some(0), Some(0), Some(1), Some(0)];
    let one = Operator {
        name: op.name.clone(),
        kernel: KernelCall { task_type: DecodeAttention::TASK_TYPE, params: param_words(&params), ..op.kernel },
        slots,
        axes: vec![Axis { len: heads, dims, role: AxisRole::Heads }],
        cut: None,
    };
    one.slots.iter().flatten().for_each(|t| ops.note(number, *t));
    ops.all[at] = None;
    ops.all[number] = Some(one);
}
