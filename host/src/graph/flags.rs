//! Which intermediates are [flagged](perpetua_shared::flag): handed from task to task without events.
//!
//! A buffer is flagged when it is written by one operator, whole and in every pass, and all who write and read it can
//! do so by flags ([`MacroKernel::FLAGGED`](perpetua_device::kernels::MacroKernel::FLAGGED)): in passes of one row
//! nearly all are, from the embedding to the last layer. What a flagged element orders is itself. So events are found
//! for the graph [without](without_flagged) these buffers, as if nobody touched them, and they share their bytes with
//! none.

use super::lower::{COPY, block_operands};
use super::task::TaskGraph;
use super::tensor::{BufferKind, OpId};
use super::threadblock::{Access, AccessKind, BlockOp, GRID_AXES, ThreadBlockGraph};
use perpetua_device::kernels::Spec;
use perpetua_shared::{DType, Operand, TaskFlags};

/// Flags what can be of the intermediates of `graph`, a pass of one row. Tasks of operators that `is_listed` denies may
/// be anywhere at any time, and are told by events alone.
pub fn flag(graph: &mut ThreadBlockGraph, is_listed: impl Fn(usize) -> bool) {
    // Per buffer, who touches it.
    let mut users: Vec<Vec<(usize, usize, Access)>> = vec![Vec::new(); graph.table.buffers.len()];
    for (op, block_op) in graph.ops.iter().enumerate() {
        for (slot, access) in block_op.accesses.iter().enumerate() {
            if let Some(access) = access {
                users[graph.table[access.tensor].buffer.idx()].push((op, slot, access.clone()));
            }
        }
    }
    for (buffer, users) in users.iter().enumerate() {
        if graph.table.buffers[buffer].kind == BufferKind::Intermediate
            && users.iter().all(|(op, slot, access)| is_listed(*op) && can_be(graph, *op, *slot, access))
            && is_handed_over(graph, buffer, users)
        {
            graph.table.buffers[buffer].kind = BufferKind::Flagged;
            // A row may be too long for its reader.
            if !users.iter().all(|(op, ..)| is_taken(graph, *op)) {
                graph.table.buffers[buffer].kind = BufferKind::Intermediate;
            }
        }
    }
}

/// `graph`, where nobody touches what is flagged: what events must order.
pub fn without_flagged(graph: &ThreadBlockGraph) -> ThreadBlockGraph {
    let mut rest = graph.clone();
    for access in rest.ops.iter_mut().flat_map(|op| &mut op.accesses) {
        let is_flagged = |access: &mut Access| graph.table.buffer_of(access.tensor).kind == BufferKind::Flagged;
        access.take_if(is_flagged);
    }
    rest
}

/// Per event of `tasks`, those of `graph`, whether flags take its place: whether all that trigger it hand over what
/// they make so.
pub fn told(graph: &ThreadBlockGraph, tasks: &TaskGraph) -> Vec<bool> {
    let hands_over = |op: &BlockOp| {
        let kinds = op.accesses.iter().flatten().filter(|access| access.kind.writes());
        let mut kinds = kinds.map(|access| &graph.table.buffer_of(access.tensor).kind);
        kinds.clone().any(|kind| *kind == BufferKind::Flagged) && kinds.all(|kind| *kind != BufferKind::Intermediate)
    };
    let by_flags: Vec<bool> = graph.ops.iter().map(hands_over).collect();
    let mut told = vec![true; tasks.events.len()];
    for (number, task) in tasks.tasks.iter().enumerate() {
        for event in tasks.triggers.of(number) {
            told[*event as usize] &= by_flags[task.op as usize];
        }
    }
    told
}

/// Whether operator `op` can write or read what its operand `slot` is by flags.
fn can_be(graph: &ThreadBlockGraph, op: usize, slot: usize, access: &Access) -> bool {
    let Some(kernel) = graph.ops[op].kernel else { return false };
    let knows = Spec::of(kernel.task_type).is_some_and(|spec| spec.flagged.contains(&slot));
    // What is not written in every pass would have the flag of another.
    let is_done = access.kind == AccessKind::Read
        || access.kind == AccessKind::Write && kernel.flags & TaskFlags::ONLY_WHEN_SAMPLING == 0;
    knows && is_done && graph.table[access.tensor].dtype == DType::F32
}

/// Whether one operator writes all of `buffer`, and others, after it, read it; but not copies that blocks make each for
/// the block of their own number, which runs on the same worker: those need no flag, and share their bytes with others.
fn is_handed_over(graph: &ThreadBlockGraph, buffer: usize, users: &[(usize, usize, Access)]) -> bool {
    let (writers, readers): (Vec<_>, Vec<_>) = users.iter().partition(|(.., access)| access.kind.writes());
    let [(writer, _, written)] = writers[..] else { return false };
    let bytes = graph.table[written.tensor].len_elems() * DType::F32.size_bytes();
    let copies = graph.ops[*writer].grid;
    let is_copied = written.map == COPY && copies[0] > 1 && graph.table[written.tensor].shape[0] == copies[0] as usize;
    let are_own =
        is_copied && readers.iter().all(|(reader, _, read)| read.map == COPY && graph.ops[*reader].grid == copies);
    bytes > 0
        && !are_own
        && bytes as u64 == graph.table.buffers[buffer].bytes
        && !readers.is_empty()
        && readers.iter().all(|(reader, ..)| reader > writer)
}

/// Whether the kernel of operator `op` takes its operands as they are flagged now.
fn is_taken(graph: &ThreadBlockGraph, op: usize) -> bool {
    let block_op = &graph.ops[op];
    let Some((kernel, spec)) = block_op.kernel.and_then(|kernel| Some((kernel, Spec::of(kernel.task_type)?))) else {
        return true;
    };
    let operands: Vec<Operand> = block_operands(graph, OpId(op as u32), [0; GRID_AXES]).collect();
    spec.check(&kernel.params, &operands).is_ok()
}
