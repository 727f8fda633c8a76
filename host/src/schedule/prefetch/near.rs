//! What bodies read from global memory, and loaders ask the L2 cache for before they do.
//!
//! In a pass of one row that is little beside what comes in tiles. A pass of several rows has no tiles at all: its
//! products take the memory for themselves. So its loaders ask for the beginnings of the next tasks' weights and caches
//! while their worker waits for an event or computes, as much as [`Machine::near_ahead_bytes`]: the memory is busy
//! meanwhile, and a body begins with what is there and reads on by itself. Of weights that several tasks read, each its
//! own rows of activations, the first asks, and for what only a pass that samples reads, only there.
//!
//! ```text
//! worker's tasks   | norm | q | attention |   o   | gate and up ...
//! asked for            q, attention's caches, o        ...           while norm is its task
//! ```

use super::{Reads, UNIT_BYTES, WorkerPlan, biases_of_experts, experts_bytes};
use crate::graph::task::{Task, TaskGraph, task_operands};
use crate::graph::tensor::BufferKind;
use crate::graph::threadblock::{AccessKind, BlockOp, ThreadBlockGraph};
use crate::machine::{Machine, part};
use perpetua_device::kernels::{self, Attention, Cost, DecodeAttention, Numbered, attention, decode_attention, linear};
use perpetua_shared::{DType, Operand, PrefetchOp, TaskFlags};
use std::collections::HashSet;

/// What stretches of rows of which not all is asked for are whole numbers of: a line of the cache.
const LINE_BYTES: u64 = 128;

/// Bytes that `op` asks for, of positions with a full cache.
pub fn prefetched_bytes(op: &PrefetchOp) -> u64 {
    u64::from(op.most_stretches()) * u64::from(op.bytes)
}

/// A prefetch of all of `operand`, from the unit its first byte is in; the last one only if all of it is the operand's.
pub(super) fn whole(operand: &Operand) -> Option<PrefetchOp> {
    let first = operand.offset_bytes / UNIT_BYTES * UNIT_BYTES;
    let bytes = (operand.offset_bytes + operand.span_bytes() - first) / UNIT_BYTES * UNIT_BYTES;
    let bytes = u32::try_from(bytes).ok().filter(|bytes| *bytes > 0)?;
    Some(PrefetchOp { source_offset_bytes: first, bytes, apart_bytes: bytes, stretches: 1, ..PrefetchOp::default() })
}

/// A prefetch of the positions that `task`, of an attention over one row or cut along positions, reads of `operand`, a
/// cache of one head.
pub(super) fn positions(graph: &ThreadBlockGraph, task: &Task, slot: usize, operand: &Operand) -> Option<PrefetchOp> {
    let op = &graph.ops[task.op as usize];
    let kernel = op.kernel?;
    let (is_read, splits, window) = match kernel.task_type {
        Attention::TASK_TYPE => {
            let params: attention::Params = kernels::params(&kernel.params);
            ([attention::slot::K, attention::slot::V].contains(&slot), params.splits, params.window)
        }
        DecodeAttention::TASK_TYPE => {
            let params: decode_attention::Params = kernels::params(&kernel.params);
            (true, params.splits, params.window)
        }
        _ => return None,
    };
    let one_row = op.row_axis.is_none() || op.rows == 1 || splits > 1;
    let (splits, split) = (splits.max(1), if splits > 1 { task.block[1] } else { 0 });
    let [heads, positions, d, _] = operand.extent;
    let bytes = d * operand.dtype()?.size_bytes() as u32;
    let fits = is_read
        && one_row
        && (heads, operand.rank) == (1, 3)
        && operand.stride_elems[1] == d
        && positions.checked_mul(bytes).is_some_and(|all| all > 0)
        && u64::from(bytes).is_multiple_of(UNIT_BYTES)
        && operand.offset_bytes.is_multiple_of(UNIT_BYTES);
    fits.then(|| PrefetchOp {
        source_offset_bytes: operand.offset_bytes,
        bytes,
        apart_bytes: bytes,
        stretches: positions,
        splits,
        split,
        window,
        most: positions,
        ..PrefetchOp::default()
    })
}

/// Per task of a pass of several rows, what is asked for before it begins, and what it reads beyond that.
pub fn reads_of_many_rows(
    graph: &ThreadBlockGraph,
    tasks: &TaskGraph,
    costs: &[Cost],
    machine: &Machine,
) -> Vec<Reads> {
    let mut asked = HashSet::new();
    let mut buffer = Vec::new();
    let of_task = |(task, cost): (&Task, &Cost)| {
        let operands = task_operands(graph, task, &mut buffer);
        let flags = graph.ops[task.op as usize].kernel.map_or(0, |kernel| kernel.flags);
        let only_when_sampling = u32::from(flags & TaskFlags::ONLY_WHEN_SAMPLING != 0);
        let mut all = Vec::new();
        for (slot, access) in graph.ops[task.op as usize].accesses.iter().enumerate() {
            let Some(access) = access else { continue };
            let (operand, buffer) = (&operands[slot], graph.table[access.tensor].buffer.idx());
            let whole = match graph.table.buffer_of(access.tensor).kind {
                BufferKind::Weight if biases_of_experts(&graph.ops[task.op as usize]).contains(&slot) => None,
                BufferKind::Weight if access.kind == AccessKind::Read => whole(operand),
                BufferKind::State => positions(graph, task, slot, operand),
                _ => None,
            };
            all.extend(whole.map(|op| (PrefetchOp { source: buffer as u32, only_when_sampling, ..op }, operand)));
        }
        let bytes = |ops: &[(PrefetchOp, &Operand)]| ops.iter().map(|(op, _)| prefetched_bytes(op)).sum::<u64>();
        // Of a table rows are looked up.
        if bytes(&all) > cost.bytes_read {
            return Reads::default();
        }
        // Of a cache, too, the share that several blocks of rows read.
        all.retain(|(op, operand)| {
            asked.insert((op.source, op.source_offset_bytes, op.bytes, operand.extent, [op.splits, op.split]))
        });
        let op = &graph.ops[task.op as usize];
        let rest_bytes = bytes(&all) + experts_bytes(graph, op, operands, cost);
        // Equal parts of the room there is, of which what is small leaves some to the others.
        all.sort_by_key(|(op, _)| prefetched_bytes(op));
        let (n, mut room) = (all.len() as u64, machine.near_ahead_bytes);
        let part = |(left, (op, operand)): (u64, &(PrefetchOp, &Operand))| {
            let op = beginning(op, operand, room / left)?;
            room -= prefetched_bytes(&op);
            Some(op)
        };
        let near: Vec<PrefetchOp> = (1..=n).rev().zip(&all).filter_map(part).collect();
        let rest_bytes = rest_bytes - near.iter().map(prefetched_bytes).sum::<u64>();
        let early_bytes = early_bytes(graph, op, operands);
        Reads { near, rest_bytes, early_bytes, ..Reads::default() }
    };
    tasks.tasks.iter().zip(costs).map(of_task).collect()
}

/// Of the weights of a task of `op`, what it copies before its events have fired: the first columns, where tensor cores
/// multiply. See the device's `gpu::warpgroup`.
fn early_bytes(graph: &ThreadBlockGraph, op: &BlockOp, operands: &[Operand]) -> u64 {
    let matrices = || op.early_reads(&graph.table).iter().map(|slot| &operands[*slot]);
    // Only products read any early.
    let (x, all_rows) = (&operands[linear::slot::X], matrices().map(|w| u64::from(w.extent[0])).sum::<u64>());
    if x.dtype() != Some(DType::Bf16) {
        return 0;
    }
    let [narrow, low, high] = part::EARLY;
    let columns = match (all_rows <= 64, x.extent[0] <= 64) {
        (true, _) => narrow,
        (false, true) => low,
        (false, false) => high,
    };
    let k = u64::from(x.extent[1].max(1));
    matrices().map(|w| w.bytes() * columns.min(k) / k).sum()
}

/// Of `op`, which asks for all of `operand`, no more than `most` bytes: what is read first, of a matrix the first
/// columns of each row, of a cache the first positions.
fn beginning(op: &PrefetchOp, operand: &Operand, most: u64) -> Option<PrefetchOp> {
    if prefetched_bytes(op) <= most {
        return Some(*op);
    }
    if op.splits > 0 {
        let n = (most / u64::from(op.bytes)) as u32;
        return (n > 0).then_some(PrefetchOp { most: n, ..*op });
    }
    let operand = &operand.strided();
    let [n, columns, ..] = operand.extent;
    let elem = operand.dtype()?.size_bytes() as u64;
    let apart_bytes = u64::from(operand.stride_elems[0]) * elem;
    let fits = operand.rank == 2
        && n > 0
        && operand.stride_elems[1] == 1
        && apart_bytes.is_multiple_of(UNIT_BYTES)
        && operand.offset_bytes.is_multiple_of(UNIT_BYTES);
    let bytes = (most / u64::from(n.max(1))).min(u64::from(columns) * elem) / LINE_BYTES * LINE_BYTES;
    let (bytes, apart_bytes) = (u32::try_from(bytes).ok()?, u32::try_from(apart_bytes).ok()?);
    (fits && bytes > 0).then_some(PrefetchOp { bytes, apart_bytes, stretches: n, ..*op })
}

/// Spreads what `plan`, which has no tiles, asks for over its tasks: no more than [`Machine::near_ahead_bytes`] for
/// those that its worker has not begun, but for what the next one alone wants.
pub(super) fn pace(plan: &mut WorkerPlan, machine: &Machine) {
    let mut needed = vec![0; plan.computes.len()];
    plan.prefetches.iter().for_each(|op| needed[op.used_by as usize] += prefetched_bytes(op));
    // Of tasks `begun..` up to the one looked at.
    let (mut begun, mut ahead_bytes, mut next) = (0, 0, 0);
    for op in &mut plan.prefetches {
        let used_by = op.used_by as usize;
        while next <= used_by {
            ahead_bytes += needed[next];
            next += 1;
        }
        while ahead_bytes > machine.near_ahead_bytes.max(needed[used_by]) {
            ahead_bytes -= needed[begun];
            begun += 1;
        }
        op.after = begun as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Plan, Reads, Violation, check, plan_list};
    use super::*;
    use crate::graph::task::WorkerLists;
    use proptest::prelude::*;

    const MACHINE: Machine = Machine { near_ahead_bytes: 1024, ..Machine::H200 };

    fn op(bytes: u32) -> PrefetchOp {
        PrefetchOp { bytes, apart_bytes: bytes, stretches: 1, ..PrefetchOp::default() }
    }

    proptest! {
        /// Whatever tasks ask for, it is asked for in time, and not too much of it; any sooner it would be too much.
        #[test]
        fn prefetches_keep_pace(sizes in prop::collection::vec(prop::collection::vec(1u32..120, 0..3), 1..40)) {
            let near = |sizes: &Vec<u32>| sizes.iter().map(|n| op(16 * n)).collect();
            let reads: Vec<Reads> = sizes.iter().map(|own| Reads { near: near(own), ..Reads::default() }).collect();
            let list: Vec<u32> = (0..sizes.len() as u32).collect();
            let worker = plan_list(&list, &reads, &MACHINE, &|task| format!("t{task}")).expect("no tiles");
            let lists = WorkerLists { lists: vec![list] };
            let plan = Plan { near_ahead_bytes: MACHINE.near_ahead_bytes, workers: vec![worker], ..Plan::default() };
            prop_assert_eq!(check(&plan, &lists, &reads), Ok(()));
            let ops = &plan.workers[0].prefetches;
            for at in (0..ops.len()).filter(|at| ops[*at].after > 0) {
                let mut sooner = plan.clone();
                let earlier = |op: &&mut PrefetchOp| op.after == ops[at].after && op.used_by <= ops[at].used_by;
                sooner.workers[0].prefetches.iter_mut().filter(earlier).for_each(|op| op.after -= 1);
                let broken = check(&sooner, &lists, &reads).expect_err("a task sooner");
                prop_assert!(broken.iter().all(|violation| matches!(violation, Violation::Pace { .. })), "{broken:?}");
            }
            if let Some(last) = ops.last() {
                let mut late = plan.clone();
                late.workers[0].prefetches.last_mut().expect("there is one").after = last.used_by + 1;
                let broken = check(&late, &lists, &reads).expect_err("its reader has begun");
                prop_assert!(broken[0].to_string().contains("its reader has begun"), "{}", broken[0]);
            }
        }
    }

    /// A matrix of `n` rows of `columns` bf16, `stride` apart.
    fn matrix(n: u32, columns: u32, stride: u32) -> Operand {
        Operand { dtype: 2, rank: 2, extent: [n, columns, 1, 1], stride_elems: [stride, 1, 0, 0], ..Operand::ABSENT }
    }

    #[test]
    fn a_beginning_is_of_every_row() {
        assert_eq!(matrix(1, 1, 1).dtype(), Some(perpetua_shared::DType::Bf16));
        let beginning = |operand: &Operand, most| {
            let found = beginning(&whole(operand).expect("it has bytes"), operand, most);
            found.map(|op| (op.stretches, op.bytes, op.apart_bytes))
        };
        // All of it; of 32 rows of 8192 bytes those 3 KiB that are 24 lines; not a line of each; no whole units from
        // row to row.
        assert_eq!(beginning(&matrix(32, 64, 64), 4096), Some((1, 4096, 4096)));
        assert_eq!(beginning(&matrix(32, 4096, 4096), 98_304), Some((32, 3072, 8192)));
        assert_eq!(beginning(&matrix(32, 4096, 4096), 98_303), Some((32, 2944, 8192)));
        assert_eq!(beginning(&matrix(32, 4096, 4096), 4095), None);
        assert_eq!(beginning(&matrix(32, 4100, 4100), 98_304), None);
        // Rows that are not all of a wider matrix's.
        assert_eq!(beginning(&matrix(4, 64, 256), 256), None);
        assert_eq!(beginning(&matrix(4, 64, 256), 512), Some((4, 128, 512)));
    }
}
