//! The device arena: which bytes each intermediate buffer occupies.
//!
//! Tasks on different workers run side by side, so a lifetime is a set of tasks, not an interval of one list. Two buffers
//! may share bytes when every task that touches the first *happens before* every task that writes the second, through
//! events that are there anyway: reuse then adds no wait, and the critical path stays as it is.
//!
//! What happens before what is taken operator by operator. Operator `y` *covers* operator `z` when every task of `y` comes
//! after all tasks of `z`: it waits on an event that all of them trigger, or every task of `y` comes after some task of an
//! operator that covers `z`. A buffer's lifetime ends, in program order, where every later operator covers all operators
//! that touch it; these half-open intervals of operators are a packing problem for [`crate::memory`]. That the reuse is
//! ordered is judged afterwards on bytes, by [`crate::graph::task::check`] over the arena as one buffer.

use crate::graph::task::TaskGraph;
use crate::graph::tensor::{BufferId, BufferKind, TensorId};
use crate::graph::threadblock::ThreadBlockGraph;
use crate::memory;

/// Alignment of every buffer: two cache lines on a CPU, what a bulk copy likes on a GPU.
pub const ALIGN_BYTES: u64 = 256;

/// Where the intermediates lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arena {
    /// Per buffer of the graph, its offset; meaningless for buffers that are no intermediates.
    pub offsets: Vec<u64>,
    /// Bytes of the arena.
    pub peak_bytes: u64,
    /// No plan for these lifetimes can need fewer.
    pub lower_bound_bytes: u64,
    /// What it would take if nothing shared bytes.
    pub without_reuse_bytes: u64,
}

/// A set of operators.
#[derive(Clone, PartialEq, Eq)]
struct OpSet(Vec<u64>);

impl OpSet {
    fn empty(len: usize) -> OpSet {
        OpSet(vec![0; len.div_ceil(64)])
    }
    fn insert(&mut self, op: usize) {
        self.0[op / 64] |= 1 << (op % 64);
    }
    fn union(&mut self, other: &OpSet) {
        self.0.iter_mut().zip(&other.0).for_each(|(a, b)| *a |= b);
    }
    fn includes(&self, other: &OpSet) -> bool {
        self.0.iter().zip(&other.0).all(|(a, b)| b & !a == 0)
    }
    fn contains(&self, op: usize) -> bool {
        self.0[op / 64] >> (op % 64) & 1 != 0
    }
}

/// Per operator, the operators it covers.
fn covers(tasks: &TaskGraph) -> Vec<OpSet> {
    let n_ops = tasks.op_first.len() - 1;
    // Per event, how many of each operator's tasks trigger it; task ids ascend, so operators do.
    let mut producers: Vec<Vec<(u32, u32)>> = vec![Vec::new(); tasks.events.len()];
    for (id, task) in tasks.tasks.iter().enumerate() {
        for event in tasks.triggers.of(id) {
            match producers[*event as usize].last_mut() {
                Some((op, count)) if *op == task.op => *count += 1,
                _ => producers[*event as usize].push((task.op, 1)),
            }
        }
    }
    let mut covers: Vec<OpSet> = Vec::with_capacity(n_ops);
    for op in 0..n_ops {
        let range = tasks.op_first[op] as usize..tasks.op_first[op + 1] as usize;
        // Tasks of `op` that wait on some, and on all, tasks of each producer.
        let mut some = vec![0u32; op];
        let mut all = vec![0u32; op];
        for id in range.clone() {
            let mut once_some = OpSet::empty(op.max(1));
            let mut once_all = OpSet::empty(op.max(1));
            for (producer, count) in tasks.waits.of(id).iter().flat_map(|event| &producers[*event as usize]) {
                let producer = *producer as usize;
                if producer >= op {
                    continue;
                }
                if !once_some.contains(producer) {
                    once_some.insert(producer);
                    some[producer] += 1;
                }
                if *count == tasks.op_first[producer + 1] - tasks.op_first[producer] && !once_all.contains(producer) {
                    once_all.insert(producer);
                    all[producer] += 1;
                }
            }
        }
        let mut set = OpSet::empty(n_ops);
        for producer in 0..op {
            if some[producer] as usize == range.len() && !range.is_empty() {
                set.union(&covers[producer]);
            }
            if all[producer] as usize == range.len() && !range.is_empty() {
                set.insert(producer);
            }
        }
        covers.push(set);
    }
    covers
}

/// Plans the arena. Buffers of `outputs` live to the end of the pass.
pub fn plan(graph: &ThreadBlockGraph, tasks: &TaskGraph, outputs: &[TensorId]) -> Arena {
    let n_ops = graph.ops.len();
    let n_buffers = graph.table.buffers.len();
    let mut users = vec![OpSet::empty(n_ops); n_buffers];
    let mut first_last: Vec<Option<(usize, usize)>> = vec![None; n_buffers];
    for (number, op) in graph.ops.iter().enumerate() {
        for access in op.accesses.iter().flatten() {
            let BufferId(buffer) = graph.table[access.tensor].buffer;
            users[buffer as usize].insert(number);
            let (first, _) = first_last[buffer as usize].unwrap_or((number, number));
            first_last[buffer as usize] = Some((first, number));
        }
    }
    let covers = covers(tasks);
    let is_output = |buffer: usize| outputs.iter().any(|t| graph.table[*t].buffer.idx() == buffer);
    let mut ids = Vec::new();
    let mut buffers = Vec::new();
    for (number, buffer) in graph.table.buffers.iter().enumerate() {
        let Some((first, last)) = first_last[number] else { continue };
        if buffer.kind != BufferKind::Intermediate {
            continue;
        }
        // One past the last later operator that may run beside a user.
        let end = if is_output(number) {
            n_ops
        } else {
            (last + 1..n_ops).rev().find(|op| !covers[*op].includes(&users[number])).map_or(last + 1, |op| op + 1)
        };
        ids.push(number);
        buffers.push(
            memory::Buffer::new(first as u64, end as u64, buffer.bytes.next_multiple_of(ALIGN_BYTES).max(ALIGN_BYTES))
                .aligned(ALIGN_BYTES),
        );
    }
    let mut offsets = vec![0; n_buffers];
    if buffers.is_empty() {
        return Arena { offsets, peak_bytes: 0, lower_bound_bytes: 0, without_reuse_bytes: 0 };
    }
    let placement = memory::pack::arena(&buffers);
    ids.iter().zip(&placement.offsets).for_each(|(id, offset)| offsets[*id] = *offset);
    Arena {
        offsets,
        peak_bytes: placement.peak_bytes,
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
