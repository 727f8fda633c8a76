//! What a schedule would take on a target: a simulation of workers, events and memory, task by task.
//!
//! Every worker runs its list in order. A task starts when its worker is free and its events have fired, as seen from
//! that worker one hop after the last trigger; it takes the larger of its bytes at the worker's share of the memory rate
//! and its flops at the worker's compute rate, plus a fixed cost. That is the simplest model that has the three losses
//! decode suffers from: waiting for events, uneven ends, and bytes. What a prefetching loader would hide is not credited.

use crate::graph::task::{TaskGraph, WorkerLists};
use perpetua_device::kernels::Cost;

/// Rates and latencies of a target. The GPU's are literature values until they are measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Bytes per second one worker can stream while all do.
    pub bytes_per_s: f64,
    /// Floating-point operations per second of one worker.
    pub flops_per_s: f64,
    /// From the last trigger of an event to a waiting worker's start.
    pub hop_s: f64,
    /// Cost of a task besides its bytes and flops.
    pub task_s: f64,
}

impl Rates {
    /// One H200 SM: 4.3 TB/s (seen on copies) shared by 132; 6 TFLOP/s dense bf16; 1.5 us a hop.
    pub const H200: Rates = Rates { bytes_per_s: 4.3e12 / 132.0, flops_per_s: 6.0e12, hop_s: 1.5e-6, task_s: 0.2e-6 };
    /// One core of a cloud CPU with AVX-512: 16.5 GB/s; 100 GFLOP/s; 0.2 us a hop.
    pub const CPU: Rates = Rates { bytes_per_s: 16.5e9, flops_per_s: 100e9, hop_s: 0.2e-6, task_s: 0.2e-6 };
}

/// When one task runs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Span {
    /// Its worker.
    pub worker: u32,
    /// Seconds from the start of the pass.
    pub start_s: f64,
    /// Seconds from the start of the pass.
    pub end_s: f64,
}

/// A predicted pass.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prediction {
    /// Per task.
    pub spans: Vec<Span>,
    /// Length of the pass.
    pub step_s: f64,
    /// Bytes all tasks move.
    pub bytes: u64,
    /// The pass if memory were the only limit and never idle.
    pub floor_s: f64,
    /// Summed over workers and divided by their number: waiting for events.
    pub waiting_s: f64,
    /// Likewise: done, while others are not.
    pub tail_s: f64,
    /// Likewise: running tasks.
    pub busy_s: f64,
}

/// Predicts one pass; `None` when the lists do not run to their end.
pub fn predict(tasks: &TaskGraph, lists: &WorkerLists, costs: &[Cost], rates: &Rates) -> Option<Prediction> {
    let n_workers = lists.lists.len();
    let mut spans = vec![Span::default(); tasks.tasks.len()];
    let mut left = tasks.events.clone();
    let mut fired_s = vec![0.0f64; tasks.events.len()];
    let mut free_s = vec![0.0f64; n_workers];
    let mut next = vec![0usize; n_workers];
    let mut blocked: Vec<Vec<usize>> = vec![Vec::new(); tasks.events.len()];
    let mut ready: Vec<usize> = (0..n_workers).collect();
    let (mut waiting, mut busy, mut done) = (0.0, 0.0, 0);
    // Order of processing does not matter: a task's times follow from its worker's and its events' alone.
    while let Some(worker) = ready.pop() {
        while let Some(&task) = lists.lists[worker].get(next[worker]) {
            let waits = tasks.waits.of(task as usize);
            if let Some(&event) = waits.iter().find(|event| left[**event as usize] > 0) {
                blocked[event as usize].push(worker);
                break;
            }
            let seen_s = waits.iter().map(|event| fired_s[*event as usize] + rates.hop_s).fold(0.0, f64::max);
            let start_s = free_s[worker].max(seen_s);
            let cost = &costs[task as usize];
            let bytes_s = (cost.bytes_read + cost.bytes_written) as f64 / rates.bytes_per_s;
            let end_s = start_s + rates.task_s + bytes_s.max(cost.flops as f64 / rates.flops_per_s);
            spans[task as usize] = Span { worker: worker as u32, start_s, end_s };
            waiting += start_s - free_s[worker];
            busy += end_s - start_s;
            free_s[worker] = end_s;
            next[worker] += 1;
            done += 1;
            for &event in tasks.triggers.of(task as usize) {
                let event = event as usize;
                fired_s[event] = fired_s[event].max(end_s);
                left[event] -= 1;
                if left[event] == 0 {
                    ready.append(&mut blocked[event]);
                }
            }
        }
    }
    if done != tasks.tasks.len() {
        return None;
    }
    let step_s = free_s.iter().copied().fold(0.0, f64::max);
    let bytes = costs.iter().map(|cost| cost.bytes_read + cost.bytes_written).sum();
    let share = |sum: f64| sum / n_workers as f64;
    Some(Prediction {
        spans,
        step_s,
        bytes,
        floor_s: bytes as f64 / (rates.bytes_per_s * n_workers as f64),
        waiting_s: share(waiting),
        tail_s: share(free_s.iter().map(|free| step_s - free).sum()),
        busy_s: share(busy),
    })
}
