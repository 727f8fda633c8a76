//! The judge of shared-memory plans. It knows the laws, not the planner: it replays each worker's count of retired
//! compute ops and keeps what is in memory in a map from address to tile.

use super::{Plan, Reads, WorkerPlan};
use crate::graph::task::WorkerLists;
use perpetua_shared::{DataOp, Operand, PrefetchOp};
use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};

/// A law a plan breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// The compute ops of a worker are not its tasks, each in one stretch, in order.
    #[error("w{worker}: compute op {compute} belongs to t{found}, expected {expected}")]
    Order {
        /// The worker.
        worker: usize,
        /// Its compute op.
        compute: usize,
        /// The task there.
        found: u32,
        /// What its list asks for.
        expected: String,
    },
    /// Compute ops and data ops do not name each other.
    #[error("w{worker}: data op {data} is read by compute op {used_by}, but listed with {listed}")]
    Reader {
        /// The worker.
        worker: usize,
        /// Its data op.
        data: usize,
        /// The reader it names.
        used_by: u32,
        /// The compute op that lists it.
        listed: usize,
    },
    /// A task's tiles are not its streams, byte for byte.
    #[error("w{worker}, t{task}: {what}")]
    Coverage {
        /// The worker.
        worker: usize,
        /// The task.
        task: u32,
        /// What is missing or too much.
        what: String,
    },
    /// A tile leaves shared memory, or its barrier does not exist.
    #[error(
        "w{worker}: data op {data} is at {start}..{end} with barrier {barrier}; there are {capacity_bytes} bytes from {first_byte} on and {n_barriers} barriers"
    )]
    Bounds {
        /// The worker.
        worker: usize,
        /// Its data op.
        data: usize,
        /// Its beginning.
        start: u64,
        /// Its end.
        end: u64,
        /// Its barrier.
        barrier: u16,
        /// Where what there is begins.
        first_byte: u64,
        /// What there is.
        capacity_bytes: u64,
        /// What there is.
        n_barriers: u32,
    },
    /// A copy waits for its own reader or a later one: nothing would ever move again.
    #[error("w{worker}: data op {data}, read by compute op {used_by}, waits for {after} compute ops")]
    Deadlock {
        /// The worker.
        worker: usize,
        /// Its data op.
        data: usize,
        /// Its reader.
        used_by: u32,
        /// What it, or a copy before it, waits for.
        after: u32,
    },
    /// Two tiles that may be live together share bytes or a barrier.
    #[error("w{worker}: data op {data} takes {what} of data op {other}, which is not consumed yet")]
    Overlap {
        /// The worker.
        worker: usize,
        /// The later data op.
        data: usize,
        /// The earlier one.
        other: usize,
        /// `bytes` or `the barrier`.
        what: &'static str,
    },
    /// A copy ahead of its pass that is not one of the first, or has to wait in it.
    #[error(
        "w{worker}: data op {data} is brought ahead of its pass, as not all before it are, or waits for {after} compute ops"
    )]
    Ahead {
        /// The worker.
        worker: usize,
        /// Its data op.
        data: usize,
        /// What it waits for.
        after: u32,
    },
    /// A copy ahead of its pass takes what the pass before, of the same list, has not read.
    #[error("w{worker}: data op {data}, ahead of its pass, takes {what} of data op {other}, one of the last {unread}")]
    OverlapAhead {
        /// The worker.
        worker: usize,
        /// The data op.
        data: usize,
        /// That of the pass before.
        other: usize,
        /// How many of that pass's may be unread.
        unread: usize,
        /// `bytes` or `the barrier`.
        what: &'static str,
    },
    /// More is asked for ahead of the tasks that read it than may be, or too late.
    #[error("w{worker}: prefetch {prefetch}, which waits for {after} tasks and is for compute op {used_by}, {what}")]
    Pace {
        /// The worker.
        worker: usize,
        /// The prefetch.
        prefetch: usize,
        /// Tasks that must have begun.
        after: u32,
        /// Its reader.
        used_by: u32,
        /// What is wrong with that.
        what: String,
    },
}

/// Judges `plan` for `lists`, whose tasks read `reads`: every law broken, at most one a data op and kind.
///
/// # Errors
/// What is wrong, by worker.
pub fn check(plan: &Plan, lists: &WorkerLists, reads: &[Reads]) -> Result<(), Vec<Violation>> {
    let mut broken = Vec::new();
    let empty = WorkerPlan::default();
    for worker in 0..lists.lists.len().max(plan.workers.len()) {
        let own = plan.workers.get(worker).unwrap_or(&empty);
        let list = lists.lists.get(worker).map_or(&[][..], Vec::as_slice);
        let linked = tasks_in_order(worker, own, list, &mut broken) & readers(worker, own, &mut broken);
        if linked {
            coverage(worker, own, reads, &mut broken);
            near(worker, own, reads, &mut broken);
            paced(worker, plan, own, &mut broken);
        }
        memory(worker, plan, own, &mut broken);
        ahead(worker, plan, own, &mut broken);
    }
    if broken.is_empty() { Ok(()) } else { Err(broken) }
}

fn tasks_in_order(worker: usize, plan: &WorkerPlan, list: &[u32], broken: &mut Vec<Violation>) -> bool {
    let before = broken.len();
    let mut at = 0;
    for (compute, op) in plan.computes.iter().enumerate() {
        let goes_on = compute > 0 && plan.computes[compute - 1].task == op.task;
        if goes_on {
            continue;
        }
        if list.get(at) != Some(&op.task) {
            let expected = list.get(at).map_or("none".to_owned(), |task| format!("t{task}"));
            broken.push(Violation::Order { worker, compute, found: op.task, expected });
            return false;
        }
        at += 1;
    }
    if at < list.len() {
        let expected = format!("t{} after it", list[at]);
        let last = plan.computes.len();
        broken.push(Violation::Order { worker, compute: last, found: u32::MAX, expected });
    }
    broken.len() == before
}

fn readers(worker: usize, plan: &WorkerPlan, broken: &mut Vec<Violation>) -> bool {
    let before = broken.len();
    let mut next = 0;
    for (listed, op) in plan.computes.iter().enumerate() {
        if op.data_first as usize != next || op.data_end < op.data_first || op.data_end as usize > plan.data.len() {
            broken.push(Violation::Reader { worker, data: next, used_by: u32::MAX, listed });
            return false;
        }
        for data in op.data_first as usize..op.data_end as usize {
            let used_by = plan.data[data].used_by;
            if used_by as usize != listed {
                broken.push(Violation::Reader { worker, data, used_by, listed });
            }
        }
        next = op.data_end as usize;
    }
    if next != plan.data.len() {
        let listed = plan.computes.len();
        broken.push(Violation::Reader { worker, data: next, used_by: plan.data[next].used_by, listed });
    }
    broken.len() == before
}

/// Every byte of every stream is copied once, for its task; nothing else is.
fn coverage(worker: usize, plan: &WorkerPlan, reads: &[Reads], broken: &mut Vec<Violation>) {
    let mut first = 0;
    while first < plan.computes.len() {
        let task = plan.computes[first].task;
        let mut end = first;
        while end < plan.computes.len() && plan.computes[end].task == task {
            end += 1;
        }
        let range = plan.computes[first].data_first as usize..plan.computes[end - 1].data_end as usize;
        let mut copied: HashMap<u32, Vec<(u64, u64)>> = HashMap::new();
        for op in &plan.data[range] {
            let end = op.source_offset_bytes + u64::from(op.bytes);
            copied.entry(op.source).or_default().push((op.source_offset_bytes, end));
        }
        let mut needed: HashMap<u32, Vec<(u64, u64)>> = HashMap::new();
        for stream in reads.get(task as usize).into_iter().flat_map(|reads| &reads.tiles) {
            rows(&stream.operand, needed.entry(stream.source).or_default());
        }
        let mut report = |what: String| broken.push(Violation::Coverage { worker, task, what });
        for (key, ranges) in &mut copied {
            let found = merged(ranges);
            let expected = needed.remove(key).map(|mut ranges| merged(&mut ranges)).unwrap_or_default();
            if found != expected {
                let total = |ranges: &[(u64, u64)]| ranges.iter().map(|(a, b)| b - a).sum::<u64>();
                let (found, expected) = (total(&found), total(&expected));
                report(format!("copies {found} bytes of buf{key}, other than the {expected} it streams"));
            }
        }
        for (key, ranges) in needed {
            if ranges.iter().any(|(a, b)| a < b) {
                report(format!("copies nothing of buf{key}, which it streams"));
            }
        }
        first = end;
    }
}

/// What a task reads from global memory is asked for once, before the tiles of the task and after those of the ones
/// before it.
fn near(worker: usize, plan: &WorkerPlan, reads: &[Reads], broken: &mut Vec<Violation>) {
    let mut next = plan.prefetches.iter().peekable();
    for (compute, op) in plan.computes.iter().enumerate() {
        if compute > 0 && plan.computes[compute - 1].task == op.task {
            continue;
        }
        for expected in reads.get(op.task as usize).into_iter().flat_map(|reads| &reads.near) {
            let found = next.next();
            let after = found.map_or(0, |found| found.after);
            let expected = PrefetchOp { before: op.data_first, used_by: compute as u32, after, ..*expected };
            if found != Some(&expected) {
                let what = format!("prefetches {found:?}, expected {expected:?}");
                broken.push(Violation::Coverage { worker, task: op.task, what });
                return;
            }
        }
    }
    if let Some(op) = next.next() {
        let what = format!("prefetches {op:?}, which no task reads");
        broken.push(Violation::Coverage { worker, task: u32::MAX, what });
    }
}

/// Beside tiles nothing waits for tasks. Where there are none each task, as it begins, finds all that it wants asked
/// for, and no more than may be beyond that, unless one task's alone is more.
fn paced(worker: usize, plan: &Plan, own: &WorkerPlan, broken: &mut Vec<Violation>) {
    let mut latest = 0;
    for (prefetch, op) in own.prefetches.iter().enumerate() {
        let what = match op.after {
            after if after > 0 && !own.data.is_empty() => "has tiles beside it".to_owned(),
            after if after < latest => format!("comes behind one that waits for {latest}"),
            after if after > op.used_by => "comes when its reader has begun".to_owned(),
            _ => {
                latest = op.after;
                continue;
            }
        };
        broken.push(Violation::Pace { worker, prefetch, after: op.after, used_by: op.used_by, what });
        return;
    }
    if !own.data.is_empty() {
        return;
    }
    // What is on its way or there, and whose reader has not begun, by reader; all of it.
    let (mut ahead, mut bytes) = (BTreeMap::<u32, u64>::new(), 0);
    let mut ops = own.prefetches.iter().enumerate().peekable();
    for begun in 0..=own.computes.len() as u32 {
        let read = begun.checked_sub(1).and_then(|reader| ahead.remove(&reader));
        bytes -= read.unwrap_or(0);
        while let Some((prefetch, op)) = ops.next_if(|(_, op)| op.after <= begun) {
            // By itself, as the judge: not by what the plan's own arithmetic says.
            let n = u64::from(match op.splits {
                0 => op.stretches,
                splits => op.stretches.min(op.window).div_ceil(splits).min(op.most),
            });
            bytes += n * u64::from(op.bytes);
            *ahead.entry(op.used_by).or_default() += n * u64::from(op.bytes);
            if bytes > plan.near_ahead_bytes && ahead.len() > 1 {
                let what = format!("makes it {bytes} bytes that are asked for ahead, of {}", plan.near_ahead_bytes);
                broken.push(Violation::Pace { worker, prefetch, after: op.after, used_by: op.used_by, what });
                return;
            }
        }
    }
}

/// The byte ranges of each innermost row of `operand`.
fn rows(operand: &Operand, out: &mut Vec<(u64, u64)>) {
    let operand = &operand.strided();
    let elem = operand.dtype().map_or(0, |dtype| dtype.size_bytes() as u64);
    if operand.extent.contains(&0) {
        return;
    }
    let mut dims: Vec<(u64, u64)> =
        operand.extent.iter().zip(operand.stride_elems).map(|(n, s)| (u64::from(*n), u64::from(s) * elem)).collect();
    dims.retain(|(n, _)| *n > 1);
    let row = match dims.last() {
        Some((n, stride)) if *stride == elem => {
            let row = n * elem;
            dims.pop();
            row
        }
        _ => elem,
    };
    let mut starts = vec![operand.offset_bytes];
    for (n, stride) in dims {
        starts = starts.iter().flat_map(|start| (0..n).map(move |i| start + i * stride)).collect();
    }
    out.extend(starts.into_iter().map(|start| (start, start + row)));
}

/// Sorted, neighbours joined; ranges that overlap stay apart, so that a byte copied twice shows.
fn merged(ranges: &mut [(u64, u64)]) -> Vec<(u64, u64)> {
    ranges.sort_unstable();
    let mut out: Vec<(u64, u64)> = Vec::new();
    for &(start, end) in ranges.iter().filter(|(start, end)| start < end) {
        match out.last_mut() {
            Some(last) if last.1 == start => last.1 = end,
            _ => out.push((start, end)),
        }
    }
    out
}

/// What the first copies find when the list begins again: every tile before the last ones has been read, those have
/// not.
fn ahead(worker: usize, plan: &Plan, own: &WorkerPlan, broken: &mut Vec<Violation>) {
    let n = own.data.len();
    let mut may_come = true;
    for (data, op) in own.data.iter().enumerate() {
        let Some(unread) = usize::from(op.ahead).checked_sub(1) else {
            may_come = false;
            continue;
        };
        if !may_come || op.after > 0 {
            broken.push(Violation::Ahead { worker, data, after: op.after });
            return;
        }
        let bytes = |op: &DataOp| op.dest_offset_bytes..op.dest_offset_bytes + op.bytes;
        for (other, before) in own.data.iter().enumerate().skip(n.saturating_sub(unread)) {
            let (a, b) = (bytes(op), bytes(before));
            let what = match (n + data - other).cmp(&(plan.n_barriers as usize)) {
                _ if a.start < b.end && b.start < a.end => "bytes",
                Ordering::Less => continue,
                _ => "the barrier",
            };
            broken.push(Violation::OverlapAhead { worker, data, other, unread, what });
            break;
        }
    }
}

/// Replays the worker's memory: a tile is there from the earliest moment its copy may start to its reader's completion.
fn memory(worker: usize, plan: &Plan, own: &WorkerPlan, broken: &mut Vec<Violation>) {
    let mut resident: BTreeMap<u64, (u64, usize)> = BTreeMap::new();
    let mut barriers: HashMap<u16, usize> = HashMap::new();
    // Reader and start of tiles, to be taken out when the reader has retired.
    let mut by_reader: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    let mut retired = 0;
    for (data, op) in own.data.iter().enumerate() {
        let (start, end) = (u64::from(op.dest_offset_bytes), u64::from(op.dest_offset_bytes) + u64::from(op.bytes));
        let Plan { first_byte, capacity_bytes, n_barriers, .. } = *plan;
        let is_inside = start >= first_byte && end <= first_byte + capacity_bytes;
        if !is_inside || u32::from(op.barrier) >= n_barriers {
            let barrier = op.barrier;
            broken.push(Violation::Bounds {
                worker,
                data,
                start,
                end,
                barrier,
                first_byte,
                capacity_bytes,
                n_barriers,
            });
            continue;
        }
        // Copies are issued in order: one that waits makes all after it wait.
        retired = retired.max(op.after);
        if retired > op.used_by {
            broken.push(Violation::Deadlock { worker, data, used_by: op.used_by, after: retired });
            continue;
        }
        let still = by_reader.split_off(&retired);
        for done in std::mem::replace(&mut by_reader, still).into_values().flatten() {
            let op = &own.data[done];
            resident.remove(&u64::from(op.dest_offset_bytes));
            barriers.remove(&op.barrier);
        }
        let below = resident.range(..end).next_back().filter(|(_, (other_end, _))| *other_end > start);
        if let Some((_, (_, other))) = below {
            broken.push(Violation::Overlap { worker, data, other: *other, what: "bytes" });
            continue;
        }
        if let Some(other) = barriers.get(&op.barrier) {
            broken.push(Violation::Overlap { worker, data, other: *other, what: "the barrier" });
            continue;
        }
        resident.insert(start, (end, data));
        barriers.insert(op.barrier, data);
        by_reader.entry(op.used_by).or_default().push(data);
    }
}
