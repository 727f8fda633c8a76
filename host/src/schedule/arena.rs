//! The device arena: which bytes each intermediate buffer occupies.
//!
//! Tasks on different workers run side by side, so a lifetime is a set of tasks, not an interval of one list. Two
//! buffers may share bytes when every task that touches the first *happens before* every task that writes the second,
//! through events that are there anyway: reuse then adds no wait, and the critical path stays as it is.
//!
//! What happens before what is taken operator by operator. Operator `y` *covers* operator `z` when every task of `y`
//! comes after all tasks of `z`: it waits on an event that all of them trigger; or every task of `y` comes after some
//! task of an operator that covers `z`; or after every task of an operator some task of which comes after each task of
//! `z`. A buffer's lifetime ends, in program order, where every later operator covers all operators that touch it;
//! these half-open intervals of operators are a packing problem for [`crate::memory`]. That the reuse is ordered is
//! judged afterwards on bytes, by [`crate::graph::task::check`] over the arena as one buffer.

use crate::graph::task::{Before, OpSet, Reach, TaskGraph};
use crate::graph::tensor::{BufferId, BufferKind, TensorId};
use crate::graph::threadblock::ThreadBlockGraph;
use crate::memory;
use std::collections::HashSet;

/// Alignment of every buffer: two cache lines on a CPU, what a bulk copy likes on a GPU.
pub const ALIGN_BYTES: u64 = 256;

/// Where the intermediates lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arena {
    /// Per buffer of the graph, its offset; meaningless for buffers that are neither intermediates nor flagged.
    pub offsets: Vec<u64>,
    /// Bytes of the arena.
    pub peak_bytes: u64,
    /// Bytes of what is flagged, beside it: the offsets of these buffers count from their own start.
    pub flagged_bytes: u64,
    /// No plan for these lifetimes can need fewer.
    pub lower_bound_bytes: u64,
    /// What it would take if nothing shared bytes.
    pub without_reuse_bytes: u64,
}

/// A set of operators that forgets none, a bit each.
#[derive(Clone, PartialEq, Eq)]
struct Bits(Vec<u64>);

impl Bits {
    fn empty(len: usize) -> Bits {
        Bits(vec![0; len.div_ceil(64)])
    }
    fn all(len: usize) -> Bits {
        let mut bits = Bits(vec![u64::MAX; len.div_ceil(64)]);
        if let (Some(last), rest @ 1..) = (bits.0.last_mut(), len % 64) {
            *last = (1 << rest) - 1;
        }
        bits
    }

    /// Takes out what is not in `other`, and says what that was.
    fn keep(&mut self, other: &Bits, mut out: impl FnMut(usize)) {
        for (at, (own, other)) in self.0.iter_mut().zip(&other.0).enumerate() {
            let mut gone = *own & !other;
            *own &= other;
            while gone != 0 {
                out(64 * at + gone.trailing_zeros() as usize);
                gone &= gone - 1;
            }
        }
    }
}

impl OpSet for Bits {
    fn insert(&mut self, op: u32) {
        self.0[op as usize / 64] |= 1 << (op % 64);
    }
    fn union(&mut self, other: &Bits) {
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a |= b);
    }
}

/// Per operator, what comes before it; in `all` are those it covers.
fn before(tasks: &TaskGraph) -> Vec<Before<Bits>> {
    let n_ops = tasks.op_first.len() - 1;
    let triggerers = tasks.triggers.inverted(tasks.events.len());
    // Per event, how many of each operator's tasks trigger it; task ids ascend, so operators do.
    let mut producers: Vec<Vec<(u32, u32)>> = vec![Vec::new(); tasks.events.len()];
    for (event, producers) in producers.iter_mut().enumerate() {
        for task in triggerers.of(event) {
            let of = tasks.tasks[*task as usize].op;
            match producers.last_mut() {
                Some((op, count)) if *op == of => *count += 1,
                _ => producers.push((of, 1)),
            }
        }
    }
    let n_tasks = |op: usize| tasks.op_first[op + 1] - tasks.op_first[op];
    let mut before: Vec<Before<Bits>> = Vec::with_capacity(n_ops);
    // The last operator that asked about an event, and about a task.
    let mut event_seen = vec![u32::MAX; tasks.events.len()];
    let mut task_seen = vec![u32::MAX; tasks.tasks.len()];
    // Of the operator at hand, tasks that wait on some, and on all, tasks of each producer; tasks of each producer
    // waited on.
    let (mut some, mut all, mut waited) = (vec![0u32; n_ops], vec![0u32; n_ops], vec![0u32; n_ops]);
    let (mut last_some, mut last_all) = (vec![u32::MAX; n_ops], vec![u32::MAX; n_ops]);
    let mut found: Vec<usize> = Vec::new();
    for op in 0..n_ops {
        for id in tasks.tasks_of(op) {
            for &event in tasks.waits.of(id as usize) {
                for (producer, count) in &producers[event as usize] {
                    let producer = *producer as usize;
                    if producer >= op {
                        continue;
                    }
                    if std::mem::replace(&mut last_some[producer], id) != id {
                        if some[producer] == 0 {
                            found.push(producer);
                        }
                        some[producer] += 1;
                    }
                    if *count == n_tasks(producer) && std::mem::replace(&mut last_all[producer], id) != id {
                        all[producer] += 1;
                    }
                }
                if std::mem::replace(&mut event_seen[event as usize], op as u32) == op as u32 {
                    continue;
                }
                for &task in triggerers.of(event as usize) {
                    let producer = tasks.tasks[task as usize].op as usize;
                    if producer < op && std::mem::replace(&mut task_seen[task as usize], op as u32) != op as u32 {
                        waited[producer] += 1;
                    }
                }
            }
        }
        let own = n_tasks(op);
        let mut known = Before { all: Bits::empty(n_ops), each: Bits::empty(n_ops) };
        found.sort_unstable();
        for producer in found.drain(..) {
            let reach = Reach {
                full: std::mem::take(&mut all[producer]) == own,
                covers_consumers: std::mem::take(&mut some[producer]) == own,
                covers_producers: std::mem::take(&mut waited[producer]) == n_tasks(producer),
            };
            known.learn(producer as u32, &before[producer], reach);
        }
        before.push(known);
    }
    before
}

/// Per operator, the last one that does not cover it: a later one, or itself.
fn last_beside(before: &[Before<Bits>]) -> Vec<usize> {
    let mut last: Vec<usize> = (0..before.len()).collect();
    let mut covered = Bits::all(before.len());
    for (op, known) in before.iter().enumerate().rev() {
        covered.keep(&known.all, |other| last[other] = last[other].max(op));
    }
    last
}

/// Plans the arena. Buffers of `outputs` live to the end of the pass.
pub fn plan(graph: &ThreadBlockGraph, tasks: &TaskGraph, outputs: &[TensorId]) -> Arena {
    let n_ops = graph.ops.len();
    let n_buffers = graph.table.buffers.len();
    let last_beside = last_beside(&before(tasks));
    let is_output: HashSet<BufferId> = outputs.iter().map(|t| graph.table[*t].buffer).collect();
    // Of the operators that touch each buffer the first, and the last one that may run beside one of them.
    let mut first_last: Vec<Option<(usize, usize)>> = vec![None; n_buffers];
    for (number, op) in graph.ops.iter().enumerate() {
        for access in op.accesses.iter().flatten() {
            let BufferId(buffer) = graph.table[access.tensor].buffer;
            let (first, last) = first_last[buffer as usize].unwrap_or((number, number));
            first_last[buffer as usize] = Some((first, last.max(last_beside[number])));
        }
    }
    let mut ids = Vec::new();
    let mut buffers = Vec::new();
    for (number, buffer) in graph.table.buffers.iter().enumerate() {
        let Some((first, last)) = first_last[number] else { continue };
        if buffer.kind != BufferKind::Intermediate {
            continue;
        }
        let end = if is_output.contains(&BufferId(number as u32)) { n_ops } else { last + 1 };
        ids.push(number);
        buffers.push(
            memory::Buffer::new(first as u64, end as u64, buffer.bytes.next_multiple_of(ALIGN_BYTES).max(ALIGN_BYTES))
                .aligned(ALIGN_BYTES),
        );
    }
    let mut offsets = vec![0; n_buffers];
    let mut flagged_bytes = 0;
    for (buffer, offset) in graph.table.buffers.iter().zip(&mut offsets) {
        if buffer.kind == BufferKind::Flagged {
            *offset = flagged_bytes;
            flagged_bytes += buffer.bytes.next_multiple_of(ALIGN_BYTES);
        }
    }
    if buffers.is_empty() {
        return Arena { offsets, peak_bytes: 0, flagged_bytes, lower_bound_bytes: 0, without_reuse_bytes: 0 };
    }
    let placement = memory::pack::arena(&buffers);
    ids.iter().zip(&placement.offsets).for_each(|(id, offset)| offsets[*id] = *offset);
    Arena {
        offsets,
        peak_bytes: placement.peak_bytes,
        flagged_bytes,
        lower_bound_bytes: memory::lower_bound(&buffers),
        without_reuse_bytes: buffers.iter().map(|b| b.size_bytes).sum(),
    }
}

/// `graph` with every intermediate moved into one arena buffer: what the dependency checker judges reuse on.
pub fn in_arena(graph: &ThreadBlockGraph, arena: &Arena) -> ThreadBlockGraph {
    let mut moved = graph.clone();
    let id = BufferId(moved.table.buffers.len() as u32);
    moved.table.buffers.push(crate::graph::tensor::Buffer {
        name: "arena".to_owned(),
        bytes: arena.peak_bytes,
        kind: BufferKind::Intermediate,
    });
    for tensor in &mut moved.table.tensors {
        if graph.table.buffers[tensor.buffer.idx()].kind == BufferKind::Intermediate {
            tensor.offset_elems += arena.offsets[tensor.buffer.idx()] as usize / tensor.dtype.size_bytes();
            tensor.buffer = id;
        }
    }
    moved
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the module head has it, of any sets.
    #[test]
    fn lifetimes_end_where_every_later_operator_covers() {
        let mut state = 1u64;
        let mut random = move |below: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        for n_ops in [0, 1, 2, 63, 64, 65, 130] {
            let mut before = Vec::new();
            for op in 0..n_ops {
                let mut all = Bits::empty(n_ops);
                (0..op as u32).filter(|_| random(20) > 0).for_each(|other| all.insert(other));
                before.push(Before { all, each: Bits::empty(n_ops) });
            }
            let covers = |op: usize, other: usize| before[op].all.0[other / 64] >> (other % 64) & 1 == 1;
            let last = |other: usize| (other + 1..n_ops).rev().find(|op| !covers(*op, other)).unwrap_or(other);
            assert_eq!(last_beside(&before), (0..n_ops).map(last).collect::<Vec<_>>());
        }
    }
}
