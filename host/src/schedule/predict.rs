//! What a schedule would take on a machine: a simulation of loaders, consumers, events and memory, tile by tile.
//!
//! Every worker has a loader and consumers. The loader follows the worker's [data ops](super::prefetch) in order, each as
//! soon as the one before is off the bus and its bytes are free; a copy takes its bytes at the worker's share of the memory
//! rate, and has arrived one latency later; a prefetch, likewise, in the L2 cache. The consumers follow the compute ops in order: the first of a task waits for
//! its events, as seen from that worker (one hop after the last trigger of another worker, at once after its own); each
//! waits for its tiles; it takes the largest of its tiles at the consumption rate and its flops, the first of a task also
//! its activations at the near rate and a fixed cost.
//!
//! A worker's share of the bus is fixed: bytes one worker leaves unused go to no other. That is pessimistic, and makes
//! uneven work show.

use super::machine::Machine;
use super::prefetch::{Plan, prefetched_bytes};
use crate::graph::task::{TaskGraph, WorkerLists};
use perpetua_device::kernels::Cost;

/// How far loaders run ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefetch {
    /// As far as memory allows, across tasks and operators.
    AcrossTasks,
    /// Within a task only: nothing is loaded before the task's events have fired.
    WithinTask,
}

/// When something runs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Span {
    /// Its worker.
    pub worker: u32,
    /// Seconds from the start of the pass.
    pub start_s: f64,
    /// Seconds from the start of the pass.
    pub end_s: f64,
}

/// Where the time of one side of the workers goes, summed over workers and divided by their number.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loader {
    /// Copying.
    pub busy_s: f64,
    /// Memory full, or nothing to load yet, because the consumers wait for an event.
    pub event_s: f64,
    /// Memory full, because the consumers have not worked through it.
    pub full_s: f64,
    /// All is loaded, the pass goes on: the last operators, and uneven bytes.
    pub tail_s: f64,
}

/// Likewise for the consumers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Consumer {
    /// Computing.
    pub busy_s: f64,
    /// Waiting for events.
    pub event_s: f64,
    /// Waiting for tiles.
    pub data_s: f64,
    /// Done, while others are not.
    pub tail_s: f64,
}

/// A predicted pass.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prediction {
    /// Per task, from its first compute op's start to its last one's end.
    pub spans: Vec<Span>,
    /// Per worker and data op, from its start on the bus to its arrival.
    pub loads: Vec<Vec<(f64, f64)>>,
    /// Per worker and compute op, its end.
    pub retired_s: Vec<Vec<f64>>,
    /// Length of the pass.
    pub step_s: f64,
    /// Bytes streamed from memory.
    pub bytes: u64,
    /// The pass if memory were the only limit and never idle.
    pub floor_s: f64,
    /// Where the memory bus's time goes.
    pub loader: Loader,
    /// Where the consumers' time goes.
    pub consumer: Consumer,
}

impl Prediction {
    /// The share of the pass in which the memory bus is busy.
    pub fn busy_share(&self) -> f64 {
        self.floor_s / self.step_s.max(f64::MIN_POSITIVE)
    }
}

/// When an event was last triggered, and by whom: what a waiting task sees depends on where it runs.
#[derive(Clone, Copy, Debug, Default)]
struct Fired {
    last_s: f64,
    worker: usize,
    /// The last trigger by any other worker.
    other_s: f64,
    has_other: bool,
}

impl Fired {
    fn trigger(&mut self, worker: usize, at_s: f64, is_first: bool) {
        if is_first || worker == self.worker {
            (self.last_s, self.worker) = (self.last_s.max(at_s), worker);
        } else if at_s > self.last_s {
            (self.other_s, self.has_other) = (self.last_s, true);
            (self.last_s, self.worker) = (at_s, worker);
        } else {
            (self.other_s, self.has_other) = (self.other_s.max(at_s), true);
        }
    }

    fn seen_s(&self, worker: usize, hop_s: f64) -> f64 {
        match (self.worker == worker, self.has_other) {
            (true, true) => self.last_s.max(self.other_s + hop_s),
            (true, false) => self.last_s,
            (false, _) => self.last_s + hop_s,
        }
    }
}

/// One worker, so far.
#[derive(Clone, Debug, Default)]
struct Worker {
    next: usize,
    prefetched: usize,
    free_s: f64,
    bus_s: f64,
    /// Waits for events, in order; those before `passed` end before the bus's last gap.
    waits: Vec<(f64, f64)>,
    passed: usize,
    loader: Loader,
    consumer: Consumer,
}

impl Worker {
    /// The bus was idle until `until_s`: books how much of that the consumers waited for events.
    fn book_gap(&mut self, until_s: f64) {
        let (from_s, mut event_s) = (self.bus_s, 0.0);
        while self.waits.get(self.passed).is_some_and(|wait| wait.1 <= from_s) {
            self.passed += 1;
        }
        for (start_s, end_s) in &self.waits[self.passed..] {
            event_s += (end_s.min(until_s) - start_s.max(from_s)).max(0.0);
        }
        self.loader.event_s += event_s;
        self.loader.full_s += until_s - from_s - event_s;
    }
}

/// Predicts one pass; `None` when the lists do not run to their end.
pub fn predict(
    tasks: &TaskGraph,
    lists: &WorkerLists,
    plan: &Plan,
    costs: &[Cost],
    machine: &Machine,
    prefetch: Prefetch,
) -> Option<Prediction> {
    let n_workers = lists.lists.len();
    let mut spans = vec![Span::default(); tasks.tasks.len()];
    let mut loads: Vec<Vec<(f64, f64)>> = plan.workers.iter().map(|own| Vec::with_capacity(own.data.len())).collect();
    let mut retired: Vec<Vec<f64>> = plan.workers.iter().map(|own| Vec::with_capacity(own.computes.len())).collect();
    let streamed = streamed_bytes(tasks.tasks.len(), plan);
    let mut left = tasks.events.clone();
    let mut fired = vec![Fired::default(); tasks.events.len()];
    let mut workers = vec![Worker::default(); n_workers];
    let mut blocked: Vec<Vec<usize>> = vec![Vec::new(); tasks.events.len()];
    let mut ready: Vec<usize> = (0..n_workers).collect();
    // Order of processing does not matter: an op's times follow from its worker's and its events' alone.
    while let Some(number) = ready.pop() {
        let (own, worker) = (&plan.workers[number], &mut workers[number]);
        while let Some(op) = own.computes.get(worker.next) {
            let task = op.task as usize;
            let is_first = worker.next == 0 || own.computes[worker.next - 1].task != op.task;
            let is_last = own.computes.get(worker.next + 1).is_none_or(|next| next.task != op.task);
            let mut may_start_s = worker.free_s;
            if is_first {
                let waits = tasks.waits.of(task);
                if let Some(&event) = waits.iter().find(|event| left[**event as usize] > 0) {
                    blocked[event as usize].push(number);
                    break;
                }
                let seen = waits.iter().map(|event| fired[*event as usize].seen_s(number, machine.hop_s));
                may_start_s = seen.fold(may_start_s, f64::max);
                if may_start_s > worker.free_s {
                    worker.waits.push((worker.free_s, may_start_s));
                    worker.consumer.event_s += may_start_s - worker.free_s;
                }
            }
            let mut start_s = may_start_s;
            let mut bytes = 0;
            while let Some(near) =
                own.prefetches.get(worker.prefetched).filter(|near| near.used_by as usize == worker.next)
            {
                worker.prefetched += 1;
                let from_s = match prefetch {
                    Prefetch::AcrossTasks => worker.bus_s,
                    Prefetch::WithinTask => worker.bus_s.max(may_start_s),
                };
                if from_s > worker.bus_s {
                    worker.book_gap(from_s);
                }
                let copy_s = prefetched_bytes(near) as f64 / machine.bytes_per_s;
                worker.loader.busy_s += copy_s;
                worker.bus_s = from_s + copy_s;
                start_s = start_s.max(worker.bus_s + machine.load_latency_s);
            }
            for data in &own.data[op.data_first as usize..op.data_end as usize] {
                let free_s = data.after.checked_sub(1).map_or(0.0, |op| retired[number][op as usize]);
                let from_s = match prefetch {
                    Prefetch::AcrossTasks => free_s.max(worker.bus_s),
                    Prefetch::WithinTask if is_first => free_s.max(worker.bus_s).max(may_start_s),
                    // The task's first tile was held back, and tiles follow each other.
                    Prefetch::WithinTask => free_s.max(worker.bus_s),
                };
                if from_s > worker.bus_s {
                    worker.book_gap(from_s);
                }
                let copy_s = f64::from(data.bytes) / machine.bytes_per_s;
                worker.loader.busy_s += copy_s;
                worker.bus_s = from_s + copy_s;
                let arrived_s = worker.bus_s + machine.load_latency_s;
                loads[number].push((from_s, arrived_s));
                start_s = start_s.max(arrived_s);
                bytes += u64::from(data.bytes);
            }
            worker.consumer.data_s += start_s - may_start_s;
            let cost = &costs[task];
            let part = if streamed[task] > 0 { bytes as f64 / streamed[task] as f64 } else { 1.0 };
            let mut busy_s =
                (bytes as f64 / machine.tile_bytes_per_s).max(part * cost.flops as f64 / machine.flops_per_s);
            if is_first {
                let near = (cost.bytes_read + cost.bytes_written).saturating_sub(streamed[task]);
                busy_s += machine.task_s + near as f64 / machine.near_bytes_per_s;
                spans[task] = Span { worker: number as u32, start_s, end_s: start_s };
            }
            worker.consumer.busy_s += busy_s;
            worker.free_s = start_s + busy_s;
            retired[number].push(worker.free_s);
            worker.next += 1;
            if !is_last {
                continue;
            }
            spans[task].end_s = worker.free_s;
            for &event in tasks.triggers.of(task) {
                let event = event as usize;
                fired[event].trigger(number, worker.free_s, left[event] == tasks.events[event]);
                left[event] -= 1;
                if left[event] == 0 {
                    ready.append(&mut blocked[event]);
                }
            }
        }
    }
    if workers.iter().zip(&plan.workers).any(|(worker, own)| worker.next < own.computes.len()) {
        return None;
    }
    let step_s = workers.iter().map(|worker| worker.free_s).fold(0.0, f64::max);
    let bytes = plan.bytes();
    let mut prediction = Prediction {
        spans,
        loads,
        retired_s: retired,
        step_s,
        bytes,
        floor_s: bytes as f64 / (machine.bytes_per_s * n_workers as f64),
        ..Prediction::default()
    };
    for worker in &workers {
        let share = |sum: &mut f64, part: f64| *sum += part / n_workers as f64;
        let (loader, consumer) = (&mut prediction.loader, &mut prediction.consumer);
        share(&mut loader.busy_s, worker.loader.busy_s);
        share(&mut loader.event_s, worker.loader.event_s);
        share(&mut loader.full_s, worker.loader.full_s);
        share(&mut loader.tail_s, step_s - worker.bus_s);
        share(&mut consumer.busy_s, worker.consumer.busy_s);
        share(&mut consumer.event_s, worker.consumer.event_s);
        share(&mut consumer.data_s, worker.consumer.data_s);
        share(&mut consumer.tail_s, step_s - worker.free_s);
    }
    Some(prediction)
}

fn streamed_bytes(n_tasks: usize, plan: &Plan) -> Vec<u64> {
    let mut bytes = vec![0; n_tasks];
    for worker in &plan.workers {
        for op in &worker.data {
            bytes[worker.computes[op.used_by as usize].task as usize] += u64::from(op.bytes);
        }
    }
    bytes
}
