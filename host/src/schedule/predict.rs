//! What a schedule would take on a machine: a simulation of loaders, consumers, events and memory, tile by tile.
//!
//! Every worker has a loader and consumers. The loader follows the worker's [data ops](super::prefetch) in order, each
//! as soon as the one before is off the bus and its bytes are free; a copy takes its bytes at the worker's share of the
//! memory rate, and has arrived one latency later; a prefetch, likewise, in the L2 cache. The consumers follow the
//! compute ops in order: the first of a task gets ready and waits for its events, as seen from that worker (one hop
//! after the last trigger of another worker, a shorter one where flags tell it, at once after its own); each waits for
//! its tiles; it takes the largest of its tiles at the consumption rate and its flops, the first of a task also its
//! activations at the near rate and a fixed cost. A task without tiles takes the larger of its flops and of all that it
//! reads, at the near rate, but for [what it may read](Reads::early_bytes) while it waits for its events.
//!
//! Nobody waits for a prefetch: a body reads rows while they arrive, and itself what has not been asked for yet, which
//! goes by the bus as soon as it begins. So it ends when it has worked through them at the near rate, but not before it
//! could read the last tile's worth of them after they are all there.
//!
//! Where a plan brings tiles [ahead](super::prefetch::Plan::repeat) of the next pass, the pass predicted is one that
//! comes after another just like it.
//!
//! Just-in-time tasks stand in no list. The schedulers deal them out in program order; each launches its share in
//! order, a task one dispatch latency after the last trigger of its events, and whoever has waited longest takes it,
//! or, when all are busy, whoever is done first: a worker that waits looks at the queue before it looks at its event.
//! What such a task reads of weights and caches goes by its worker's share of the bus while it runs, since no loader
//! knew where it would.
//!
//! A worker's share of the bus is fixed: bytes one worker leaves unused go to no other. That is pessimistic, and makes
//! uneven work show.

use super::prefetch::{ComputeOp, Plan, Reads, prefetched_bytes};
use crate::graph::task::{Lists, TaskClass, TaskGraph};
use crate::machine::Machine;
use perpetua_device::kernels::Cost;
use perpetua_shared::DType;
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, VecDeque};

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
    /// Bytes of weights and caches that come from memory.
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
    /// When its last task ended, or, while it runs one, will.
    free_s: f64,
    /// Tasks it has begun.
    begun: u32,
    /// When it turned to each of its list.
    turned_s: Vec<f64>,
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

    /// Puts a copy of `copy_s` on the bus at `from_s` or as soon as it is free; when it begins.
    fn copy(&mut self, from_s: f64, copy_s: f64) -> f64 {
        let from_s = from_s.max(self.bus_s);
        if from_s > self.bus_s {
            self.book_gap(from_s);
        }
        self.loader.busy_s += copy_s;
        self.bus_s = from_s + copy_s;
        from_s
    }

    /// The consumers, idle so far, go on at `at_s`, of which they have spent `early_s` getting ready.
    fn wake(&mut self, at_s: f64, early_s: f64) {
        let from_s = self.free_s + early_s;
        if at_s > from_s {
            self.waits.push((from_s, at_s));
            self.consumer.event_s += at_s - from_s;
        }
        self.consumer.busy_s += early_s;
        self.begun += 1;
    }
}

/// What happens next. Of what happens at once, tasks end first, and who waits sees the queue before its event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Moment {
    /// A worker ends a task.
    Ended { worker: usize, task: u32 },
    /// A just-in-time task comes into the queue.
    Launched { task: u32 },
    /// The events of a worker's next task have fired, as seen from it, and it has not begun another since.
    Fired { worker: usize, begun: u32 },
}

/// The just-in-time tasks of a program.
#[derive(Debug, Default)]
struct Launches {
    /// In program order.
    tasks: Vec<u32>,
    /// Per task of these, events that have not fired.
    left: Vec<usize>,
    /// Per event, which of these wait on it.
    waiting: Lists,
    /// Per scheduler, how many of its share it has launched.
    launched: Vec<usize>,
}

impl Launches {
    fn new(tasks: &TaskGraph, n_schedulers: usize) -> Launches {
        let ops = tasks.classes.iter().enumerate().filter(|(_, class)| **class == TaskClass::JustInTime);
        let launched: Vec<u32> = ops.flat_map(|(op, _)| tasks.tasks_of(op)).collect();
        let mut waits = Lists::default();
        launched.iter().for_each(|task| waits.push(tasks.waits.of(*task as usize)));
        Launches {
            left: launched.iter().map(|task| tasks.waits.of(*task as usize).len()).collect(),
            tasks: launched,
            waiting: waits.inverted(tasks.events.len()),
            launched: vec![0; n_schedulers],
        }
    }

    /// `event` has fired: what its schedulers launch now.
    fn fire(&mut self, event: usize) -> Vec<u32> {
        let mut ready = Vec::new();
        let n = self.launched.len();
        for &number in self.waiting.of(event) {
            self.left[number as usize] -= 1;
            let share = number as usize % n;
            while let Some(0) = self.left.get(share + n * self.launched[share]) {
                ready.push(self.tasks[share + n * self.launched[share]]);
                self.launched[share] += 1;
            }
        }
        ready
    }
}

/// Predicts one pass; `told` says of which events [flags](crate::graph::flags::told) take the place, `reads` are the
/// tasks' ([`reads`](super::prefetch::reads)). `None` when not all of it runs.
pub fn predict(
    tasks: &TaskGraph,
    told: &[bool],
    plan: &Plan,
    reads: &[Reads],
    costs: &[Cost],
    machine: &Machine,
    prefetch: Prefetch,
) -> Option<Prediction> {
    let n_workers = plan.workers.len();
    let pass = |ahead: Vec<Ahead>| Pass {
        tasks,
        told,
        plan,
        reads,
        costs,
        machine,
        prefetch,
        streamed: streamed_bytes(tasks.tasks.len(), plan),
        spans: vec![Span::default(); tasks.tasks.len()],
        loads: plan.workers.iter().map(|own| Vec::with_capacity(own.data.len())).collect(),
        retired: plan.workers.iter().map(|own| Vec::with_capacity(own.computes.len())).collect(),
        left: tasks.events.clone(),
        fired: vec![Fired::default(); tasks.events.len()],
        workers: ahead.iter().map(|own| Worker { bus_s: own.bus_s, ..Worker::default() }).collect(),
        ahead,
        blocked: vec![Vec::new(); tasks.events.len()],
        launches: Launches::new(tasks, n_workers),
        queue: VecDeque::new(),
        idle: BTreeSet::new(),
        moments: BinaryHeap::new(),
        launched_bytes: 0,
    };
    let mut last = pass(vec![Ahead::default(); n_workers]).whole()?;
    let mut next = last.ahead_of_next();
    if next.iter().any(|own| !own.arrived_s.is_empty()) {
        last = pass(next).whole()?;
        next = last.ahead_of_next();
    }
    let step_s = last.step_s();
    let rest_bytes = |compute: &ComputeOp| reads[compute.task as usize].rest_bytes;
    let read_bytes: u64 = plan.workers.iter().flat_map(|own| &own.computes).map(rest_bytes).sum();
    let bytes = plan.bytes() + read_bytes + last.launched_bytes;
    let Pass { workers, spans, loads, retired, .. } = last;
    let mut prediction = Prediction {
        spans,
        loads,
        retired_s: retired,
        step_s,
        bytes,
        floor_s: bytes as f64 / (machine.bytes_per_s * n_workers as f64),
        ..Prediction::default()
    };
    for (worker, next) in workers.iter().zip(next) {
        let share = |sum: &mut f64, part: f64| *sum += part / n_workers as f64;
        let (loader, consumer) = (&mut prediction.loader, &mut prediction.consumer);
        share(&mut loader.busy_s, worker.loader.busy_s + next.copied_s);
        share(&mut loader.event_s, worker.loader.event_s);
        share(&mut loader.full_s, worker.loader.full_s);
        share(&mut loader.tail_s, (step_s - worker.bus_s - next.copied_s).max(0.0));
        share(&mut consumer.busy_s, worker.consumer.busy_s);
        share(&mut consumer.event_s, worker.consumer.event_s);
        share(&mut consumer.data_s, worker.consumer.data_s);
        share(&mut consumer.tail_s, step_s - worker.free_s);
    }
    Some(prediction)
}

/// What has been brought for a worker's pass before it begins.
#[derive(Clone, Debug, Default)]
struct Ahead {
    /// When, from the start of the pass, each of its first tiles is there.
    arrived_s: Vec<f64>,
    /// When the bus is free for others.
    bus_s: f64,
    /// How long it had them.
    copied_s: f64,
}

/// A pass under way.
struct Pass<'a> {
    tasks: &'a TaskGraph,
    told: &'a [bool],
    plan: &'a Plan,
    reads: &'a [Reads],
    costs: &'a [Cost],
    machine: &'a Machine,
    prefetch: Prefetch,
    streamed: Vec<u64>,
    spans: Vec<Span>,
    loads: Vec<Vec<(f64, f64)>>,
    retired: Vec<Vec<f64>>,
    left: Vec<u32>,
    fired: Vec<Fired>,
    workers: Vec<Worker>,
    /// Per worker.
    ahead: Vec<Ahead>,
    /// Per event, workers that wait for it; some may have taken a just-in-time task since.
    blocked: Vec<Vec<usize>>,
    launches: Launches,
    /// Launched, and taken by nobody yet.
    queue: VecDeque<u32>,
    /// Workers that run nothing, by since when, in bits, which times that are not negative are ordered by.
    idle: BTreeSet<(u64, usize)>,
    moments: BinaryHeap<Reverse<(u64, Moment)>>,
    launched_bytes: u64,
}

impl Pass<'_> {
    /// Runs all of it, if all of it runs.
    fn whole(mut self) -> Option<Self> {
        (self.run() == self.tasks.tasks.len()).then_some(self)
    }

    /// How long the pass, which has run, took.
    fn step_s(&self) -> f64 {
        self.workers.iter().map(|worker| worker.free_s).fold(0.0, f64::max)
    }

    /// What is brought, once the pass's own tiles are, for the next one, which begins when this one, which has run,
    /// ends.
    fn ahead_of_next(&self) -> Vec<Ahead> {
        let step_s = self.step_s();
        let of_worker = |(number, worker): (usize, &Worker)| {
            let data = &self.plan.workers[number].data;
            let (mut ahead, mut bus_s) = (Ahead::default(), worker.bus_s);
            for op in data.iter().take_while(|op| op.ahead > 0 && self.prefetch == Prefetch::AcrossTasks) {
                // The youngest tile that must have been read.
                let read = data.len().checked_sub(usize::from(op.ahead));
                let read_s = read.map_or(0.0, |last| self.retired[number][data[last].used_by as usize]);
                let copy_s = f64::from(op.bytes) / self.machine.bytes_per_s;
                bus_s = bus_s.max(read_s) + copy_s;
                ahead.copied_s += copy_s;
                ahead.arrived_s.push(bus_s + self.machine.load_latency_s - step_s);
            }
            Ahead { bus_s: (bus_s - step_s).max(0.0), ..ahead }
        };
        self.workers.iter().enumerate().map(of_worker).collect()
    }

    /// Runs what can run; how many tasks.
    fn run(&mut self) -> usize {
        for worker in 0..self.workers.len() {
            self.idle.insert((0, worker));
            self.look(worker);
        }
        let mut n_ended = 0;
        while let Some(Reverse((at, moment))) = self.moments.pop() {
            let at_s = f64::from_bits(at);
            match moment {
                Moment::Ended { worker, task } => {
                    n_ended += 1;
                    self.end(worker, task, at_s);
                    match self.queue.pop_front() {
                        Some(task) => self.run_launched(worker, task, at_s),
                        None => {
                            self.idle.insert((at, worker));
                            self.look(worker);
                        }
                    }
                }
                Moment::Launched { task } => match self.idle.pop_first() {
                    Some((_, worker)) => self.run_launched(worker, task, at_s),
                    None => self.queue.push_back(task),
                },
                Moment::Fired { worker, begun } if begun == self.workers[worker].begun => {
                    self.idle.remove(&(self.workers[worker].free_s.to_bits(), worker));
                    self.run_listed(worker, at_s);
                }
                Moment::Fired { .. } => {}
            }
        }
        n_ended
    }

    fn happens(&mut self, at_s: f64, moment: Moment) {
        self.moments.push(Reverse((at_s.to_bits(), moment)));
    }

    /// Worker `number`, idle, looks whether its next task may begin, and when.
    fn look(&mut self, number: usize) {
        let worker = &self.workers[number];
        let Some(op) = self.plan.workers[number].computes.get(worker.next) else { return };
        let waits = self.tasks.waits.of(op.task as usize);
        if let Some(&event) = waits.iter().find(|event| self.left[**event as usize] > 0) {
            self.blocked[event as usize].push(number);
            return;
        }
        let seen = waits.iter().map(|event| {
            let event = *event as usize;
            let hop_s = if self.told[event] { self.machine.flag_hop_s } else { self.machine.hop_s };
            self.fired[event].seen_s(number, hop_s)
        });
        let (at_s, begun) = (seen.fold(worker.free_s + self.machine.early_s, f64::max), worker.begun);
        self.happens(at_s, Moment::Fired { worker: number, begun });
    }

    /// Worker `number` has ended `task`: its triggers.
    fn end(&mut self, number: usize, task: u32, at_s: f64) {
        for &event in self.tasks.triggers.of(task as usize) {
            let event = event as usize;
            self.fired[event].trigger(number, at_s, self.left[event] == self.tasks.events[event]);
            self.left[event] -= 1;
            if self.left[event] > 0 {
                continue;
            }
            for waiting in std::mem::take(&mut self.blocked[event]) {
                if self.idle.contains(&(self.workers[waiting].free_s.to_bits(), waiting)) {
                    self.look(waiting);
                }
            }
            for task in self.launches.fire(event) {
                self.happens(at_s + self.machine.dispatch_s, Moment::Launched { task });
            }
        }
    }

    /// Worker `number` runs `task`, launched just in time, from `at_s` on.
    fn run_launched(&mut self, number: usize, task: u32, at_s: f64) {
        let (cost, machine) = (&self.costs[task as usize], self.machine);
        let worker = &mut self.workers[number];
        worker.wake(at_s, 0.0);
        let bytes = self.reads[task as usize].bytes();
        self.launched_bytes += bytes;
        let near_s = (cost.bytes_read + cost.bytes_written) as f64 / machine.near_bytes_per_s;
        let busy_s = machine.early_s + machine.task_s + near_s.max(cost.flops as f64 / machine.flops_per_s);
        let mut end_s = at_s + busy_s;
        if bytes > 0 {
            worker.copy(at_s, bytes as f64 / machine.bytes_per_s);
            end_s = end_s.max(worker.bus_s + machine.load_latency_s);
        }
        worker.consumer.busy_s += busy_s;
        worker.consumer.data_s += end_s - at_s - busy_s;
        worker.free_s = end_s;
        self.spans[task as usize] = Span { worker: number as u32, start_s: at_s, end_s };
        self.happens(end_s, Moment::Ended { worker: number, task });
    }

    /// Worker `number` runs the next task of its list from `at_s` on.
    fn run_listed(&mut self, number: usize, at_s: f64) {
        let (own, machine) = (&self.plan.workers[number], self.machine);
        let worker = &mut self.workers[number];
        let first = worker.next;
        let number_of_task = own.computes[first].task;
        let task = number_of_task as usize;
        let (cost, streamed) = (&self.costs[task], self.streamed[task]);
        let are_fours =
            self.reads[task].tiles.iter().any(|stream| matches!(stream.operand.dtype(), Some(DType::Q4 | DType::Int4)));
        let rate = if are_fours { machine.fours_per_s } else { machine.tile_bytes_per_s };
        worker.turned_s.push(worker.free_s);
        let read_early = match self.prefetch {
            Prefetch::AcrossTasks => {
                ((at_s - worker.free_s - machine.load_latency_s) * machine.near_bytes_per_s).max(0.0)
            }
            Prefetch::WithinTask => 0.0,
        }
        .min(self.reads[task].early_bytes as f64);
        worker.wake(at_s, machine.early_s);
        worker.free_s = at_s;
        while let Some(op) = own.computes.get(worker.next).filter(|op| op.task == number_of_task) {
            let may_start_s = worker.free_s;
            let mut start_s = may_start_s;
            let (mut bytes, mut near_bytes) = (0, 0);
            // Within a task nothing is loaded before its events have fired; its tiles follow each other.
            let not_before_s = match self.prefetch {
                Prefetch::WithinTask if worker.next == first => may_start_s,
                Prefetch::WithinTask | Prefetch::AcrossTasks => 0.0,
            };
            while let Some(near) =
                own.prefetches.get(worker.prefetched).filter(|near| near.used_by as usize == worker.next)
            {
                worker.prefetched += 1;
                let turned_s = near.after.checked_sub(1).map_or(0.0, |place| worker.turned_s[place as usize]);
                worker.copy(turned_s.max(not_before_s), prefetched_bytes(near) as f64 / machine.bytes_per_s);
                near_bytes += prefetched_bytes(near);
            }
            if worker.next == first && self.reads[task].rest_bytes > 0 {
                worker.copy(may_start_s, self.reads[task].rest_bytes as f64 / machine.bytes_per_s);
                near_bytes += self.reads[task].rest_bytes;
            }
            // When all has arrived that is read while it does, and the last of it has been read.
            let last_bytes = near_bytes.min(machine.tile_bytes) as f64;
            let near_s = worker.bus_s + machine.load_latency_s + last_bytes / machine.near_bytes_per_s;
            for at in op.data_first as usize..op.data_end as usize {
                let data = &own.data[at];
                bytes += u64::from(data.bytes);
                if let Some(&arrived_s) = self.ahead[number].arrived_s.get(at) {
                    self.loads[number].push((0.0, arrived_s.max(0.0)));
                    start_s = start_s.max(arrived_s);
                    continue;
                }
                let free_s = data.after.checked_sub(1).map_or(0.0, |op| self.retired[number][op as usize]);
                let from_s = worker.copy(free_s.max(not_before_s), f64::from(data.bytes) / machine.bytes_per_s);
                let arrived_s = worker.bus_s + machine.load_latency_s;
                self.loads[number].push((from_s, arrived_s));
                start_s = start_s.max(arrived_s);
            }
            let part = if streamed > 0 { bytes as f64 / streamed as f64 } else { 1.0 };
            let mut busy_s = (bytes as f64 / rate).max(part * cost.flops as f64 / machine.flops_per_s);
            if worker.next == first {
                let near = (cost.bytes_read + cost.bytes_written).saturating_sub(streamed);
                let near_s = (near as f64 - read_early) / machine.near_bytes_per_s;
                // A body without tiles reads while it computes.
                busy_s = machine.task_s + if streamed > 0 { busy_s + near_s } else { busy_s.max(near_s) };
                self.spans[task] = Span { worker: number as u32, start_s, end_s: start_s };
            }
            worker.free_s = start_s + busy_s;
            if near_bytes > 0 {
                worker.free_s = worker.free_s.max(near_s);
            }
            worker.consumer.busy_s += busy_s;
            worker.consumer.data_s += worker.free_s - may_start_s - busy_s;
            self.retired[number].push(worker.free_s);
            worker.next += 1;
        }
        self.spans[task].end_s = worker.free_s;
        let end_s = worker.free_s;
        self.happens(end_s, Moment::Ended { worker: number, task: number_of_task });
    }
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

#[cfg(test)]
mod tests {
    use super::super::prefetch::{self, Violation, WorkerPlan};
    use super::*;
    use crate::graph::task::{Task, WorkerLists};
    use bytemuck::Zeroable;
    use perpetua_shared::{DataOp, PrefetchOp};

    /// A byte a second, from wherever, and seconds that can be added up by hand.
    const MACHINE: Machine = Machine {
        tile_bytes: 2,
        row_bytes: 2,
        bytes_per_s: 1.0,
        load_latency_s: 1.0,
        near_bytes_per_s: 1.0,
        flops_per_s: 1.0,
        hop_s: 2.0,
        flag_hop_s: 0.5,
        dispatch_s: 3.0,
        early_s: 0.0,
        task_s: 0.0,
        ..Machine::H200
    };

    /// An operator a task: what it writes, which of two events it waits on and triggers, and whether it is
    /// just-in-time.
    type Row = (u64, Option<u32>, Option<u32>, bool);

    fn prediction(rows: &[Row], lists: &[&[u32]], near: &[(u32, u32)]) -> Option<Prediction> {
        prediction_on(&MACHINE, rows, lists, near, [false; 2])
    }

    fn prediction_on(
        machine: &Machine,
        rows: &[Row],
        lists: &[&[u32]],
        near: &[(u32, u32)],
        told: [bool; 2],
    ) -> Option<Prediction> {
        let mut tasks = TaskGraph::default();
        let (mut costs, mut reads) = (Vec::new(), vec![Reads::default(); rows.len()]);
        tasks.events = vec![0; 2];
        for (op, (bytes, wait, trigger, is_launched)) in rows.iter().enumerate() {
            tasks.op_first.push(op as u32);
            tasks.tasks.push(Task { op: op as u32, block: Default::default() });
            tasks.waits.push(wait.as_slice());
            tasks.triggers.push(trigger.as_slice());
            trigger.iter().for_each(|event| tasks.events[*event as usize] += 1);
            tasks.classes.push(if *is_launched { TaskClass::JustInTime } else { TaskClass::AheadOfTime });
            costs.push(Cost { bytes_written: *bytes, ..Cost::default() });
        }
        tasks.op_first.push(rows.len() as u32);
        for &(task, bytes) in near {
            reads[task as usize].near.push(PrefetchOp { bytes, stretches: 1, ..PrefetchOp::default() });
        }
        let worker = |list: &&[u32]| {
            let mut plan = WorkerPlan::default();
            for (number, task) in list.iter().enumerate() {
                let own = reads[*task as usize].near.iter();
                plan.prefetches.extend(own.map(|op| PrefetchOp { used_by: number as u32, ..*op }));
                plan.computes.push(ComputeOp { task: *task, data_first: 0, data_end: 0 });
            }
            plan
        };
        let plan = Plan { workers: lists.iter().map(worker).collect(), ..Plan::default() };
        predict(&tasks, &told, &plan, &reads, &costs, machine, Prefetch::AcrossTasks)
    }

    fn spans(prediction: &Prediction) -> Vec<(u32, f64, f64)> {
        prediction.spans.iter().map(|span| (span.worker, span.start_s, span.end_s)).collect()
    }

    /// Two tiles of two bytes, each a task's, which take five seconds where nothing is there, and four once the bus is
    /// never idle.
    #[test]
    fn tiles_come_ahead_of_their_pass() {
        let mut tasks = TaskGraph::default();
        for op in 0..2 {
            tasks.op_first.push(op);
            tasks.tasks.push(Task { op, block: Default::default() });
            tasks.waits.push(&[]);
            tasks.triggers.push(&[]);
            tasks.classes.push(TaskClass::AheadOfTime);
        }
        tasks.op_first.push(2);
        let lists = WorkerLists { lists: vec![vec![0, 1]] };
        let mut worker = WorkerPlan::default();
        for task in 0..2 {
            let op = DataOp {
                bytes: 2,
                dest_offset_bytes: 2 * task,
                used_by: task,
                barrier: task as u16,
                ..DataOp::zeroed()
            };
            worker.data.push(op);
            worker.computes.push(ComputeOp { task, data_first: task, data_end: task + 1 });
        }
        let mut plan = Plan { capacity_bytes: 4, n_barriers: 4, workers: vec![worker], ..Plan::default() };
        let machine = Machine { tile_bytes_per_s: f64::INFINITY, ..MACHINE };
        let (reads, costs) = (vec![Reads::default(); 2], vec![Cost::default(); 2]);
        let step = |plan: &Plan, prefetch| {
            let found = predict(&tasks, &[], plan, &reads, &costs, &machine, prefetch).expect("it runs");
            (found.step_s, found.loader.busy_s)
        };
        assert_eq!(step(&plan, Prefetch::AcrossTasks), (5.0, 4.0));
        // The last task would have the memory for itself.
        plan.repeat(|task| task == 1);
        assert!(!plan.repeats());
        plan.repeat(|task| task == 0);
        // The first while the second is unread, the second once that is read.
        assert_eq!(plan.workers[0].data.iter().map(|op| op.ahead).collect::<Vec<_>>(), [2, 1]);
        assert_eq!(step(&plan, Prefetch::AcrossTasks), (4.0, 4.0));
        assert_eq!(step(&plan, Prefetch::WithinTask), (6.0, 4.0));

        let all = |plan: &Plan| prefetch::check(plan, &lists, &reads).unwrap_err();
        let mut broken = plan.clone();
        broken.workers[0].data[1].ahead = 2;
        let overlaps = |violation: &Violation| {
            matches!(violation, Violation::OverlapAhead { data: 1, other: 1, what: "bytes", .. })
        };
        assert!(all(&broken).iter().any(overlaps));
        broken.workers[0].data[0].ahead = 0;
        assert!(all(&broken).iter().any(|violation| matches!(violation, Violation::Ahead { data: 1, .. })));
        let few = Plan { n_barriers: 1, ..plan.clone() };
        let takes =
            |violation: &Violation| matches!(violation, Violation::OverlapAhead { data: 0, what: "the barrier", .. });
        assert!(all(&few).iter().any(takes));
    }

    #[test]
    fn a_hop_is_shorter_where_flags_tell() {
        let rows = [(10, None, Some(0), false), (5, Some(0), Some(1), false), (3, Some(1), None, false)];
        let ends = |told| {
            let found = prediction_on(&MACHINE, &rows, &[&[0, 2], &[1]], &[], told).expect("it runs");
            spans(&found).iter().map(|(_, start_s, end_s)| (*start_s, *end_s)).collect::<Vec<_>>()
        };
        // Events' hops take 2 seconds, flags' half a one.
        assert_eq!(ends([false, false]), [(0.0, 10.0), (12.0, 17.0), (19.0, 22.0)]);
        assert_eq!(ends([true, false]), [(0.0, 10.0), (10.5, 15.5), (17.5, 20.5)]);
    }

    /// Getting ready is waited for only as far as it takes longer than the task's event.
    #[test]
    fn a_task_gets_ready_while_it_waits() {
        let rows = [(10, None, Some(0), false), (5, Some(0), None, false)];
        for (early_s, lists, expected) in [
            (1.0, [&[0][..], &[1]], [(0, 1.0, 11.0), (1, 13.0, 18.0)]),
            (14.0, [&[0], &[1]], [(0, 14.0, 24.0), (1, 26.0, 31.0)]),
            (1.0, [&[0, 1], &[]], [(0, 1.0, 11.0), (0, 12.0, 17.0)]),
        ] {
            let machine = Machine { early_s, ..MACHINE };
            let found = prediction_on(&machine, &rows, &lists, &[], [false; 2]).expect("it runs");
            assert_eq!(spans(&found), expected);
            let Consumer { busy_s, event_s, data_s, tail_s } = found.consumer;
            assert_eq!(busy_s, (15.0 + 2.0 * early_s) / 2.0);
            assert_eq!(busy_s + event_s + data_s + tail_s, found.step_s);
        }
    }

    /// Task 0 launches 1 and 2, after which 3 comes.
    const LAUNCHED: [Row; 4] = [
        (10, None, Some(0), false),
        (5, Some(0), Some(1), true),
        (7, Some(0), Some(1), true),
        (4, Some(1), None, false),
    ];

    #[test]
    fn launched_tasks_go_to_whoever_has_waited_longest() {
        // The event fires at 10, both tasks are launched at 13. Worker 1 has waited since 0, worker 0 since 10. Worker
        // 1 sees the other's trigger of 20 at 22.
        let two = prediction(&LAUNCHED, &[&[0], &[3]], &[]).expect("it runs");
        assert_eq!(spans(&two), [(0, 0.0, 10.0), (1, 13.0, 18.0), (0, 13.0, 20.0), (1, 22.0, 26.0)]);
        let Consumer { busy_s, event_s, data_s, tail_s } = two.consumer;
        assert_eq!((two.step_s, two.bytes), (26.0, 0));
        assert_eq!([busy_s, event_s, data_s, tail_s], [(17.0 + 9.0) / 2.0, (3.0 + 17.0) / 2.0, 0.0, 6.0 / 2.0]);
    }

    #[test]
    fn launched_tasks_queue_where_all_are_busy() {
        // One worker, one scheduler: 2 stands in the queue until 1 has ended.
        let one = prediction(&LAUNCHED, &[&[0, 3]], &[]).expect("it runs");
        assert_eq!(spans(&one), [(0, 0.0, 10.0), (0, 13.0, 18.0), (0, 18.0, 25.0), (0, 25.0, 29.0)]);
        // A worker whose event has fired meanwhile takes what is in the queue first: 3 waits for task 0 alone.
        let rows = [LAUNCHED[0], LAUNCHED[1], LAUNCHED[2], (4, Some(0), None, false)];
        let one = prediction(&rows, &[&[0, 3]], &[]).expect("it runs");
        assert_eq!(spans(&one), [(0, 0.0, 10.0), (0, 14.0, 19.0), (0, 19.0, 26.0), (0, 10.0, 14.0)]);
        // Nobody triggers what they wait on.
        let rows = [(10, None, None, false), LAUNCHED[1], LAUNCHED[2], (4, Some(1), None, false)];
        assert_eq!(prediction(&rows, &[&[0, 3]], &[]), None);
    }

    #[test]
    fn what_launched_tasks_read_goes_by_the_bus() {
        // Task 1 reads 8 bytes from 13 on, the last of which are there at 22; that is when worker 1 triggers, too.
        let two = prediction(&LAUNCHED, &[&[0], &[3]], &[(1, 8)]).expect("it runs");
        assert_eq!(spans(&two), [(0, 0.0, 10.0), (1, 13.0, 22.0), (0, 13.0, 20.0), (1, 22.0, 26.0)]);
        assert_eq!((two.bytes, two.floor_s), (8, 4.0));
        assert_eq!((two.loader.busy_s, two.consumer.data_s), (8.0 / 2.0, 4.0 / 2.0));
    }

    #[test]
    fn rows_are_read_while_they_arrive() {
        // Six bytes asked for at once: off the bus at 6, there at 7; the last two take until 9.
        let rows = |before| [(before, None, Some(0), false), (6, Some(0), None, false)];
        let early = prediction(&rows(2), &[&[0, 1]], &[(1, 6)]).expect("it runs");
        assert_eq!(spans(&early), [(0, 0.0, 2.0), (0, 2.0, 9.0)]);
        assert_eq!(early.consumer.data_s, 1.0);
        let late = prediction(&rows(5), &[&[0, 1]], &[(1, 6)]).expect("it runs");
        assert_eq!(spans(&late), [(0, 0.0, 5.0), (0, 5.0, 11.0)]);
        assert_eq!(late.consumer.data_s, 0.0);
    }
}
