//! Where a step's time goes on a GPU, by the times the kernel took itself.
//!
//! ```text
//! worker 0  |prologue| task  |hop| task: data, compute |  tail  |
//! worker 1  |  prologue   | task |   hop   | task | tail        |
//!           ^ the step before has ended                         ^ this one has
//! ```
//! Averages over the workers, so the parts sum to the step. Weights arrive during prologue, hops and tail as well, so
//! the parts do not say what would be gained without each, only what nobody computed in.

use super::{Outcome, write_whole};
use perpetua::image::Image;
use perpetua::schedule::timeline::{Beside, Run, Timeline};
use perpetua::{Engine, GenerateOptions};
use perpetua_shared::WorkerId;
use perpetua_shared::launch::TaskTrace;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Where the time of one step went, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Loss {
    /// From the end of the step before to this one's.
    pub(super) step_us: f64,
    /// Until a worker's first task: it hears of the step, reads it, and waits for whoever comes first.
    pub(super) prologue_us: f64,
    /// Between a worker's tasks, and in them: events that had not fired, and rows that were not there.
    pub(super) hops_us: f64,
    /// In tasks: tiles that had not arrived.
    pub(super) data_us: f64,
    /// In tasks: the rest.
    pub(super) compute_us: f64,
    /// After a worker's last task.
    pub(super) tail_us: f64,
}

impl Loss {
    /// Of the last step in `trace` that has one before it.
    pub(super) fn of(trace: &[(WorkerId, TaskTrace)]) -> Option<Loss> {
        let step = trace.iter().map(|(_, entry)| entry.iteration).max()?;
        let of_step = |step: u32| trace.iter().filter(move |(_, entry)| entry.iteration == step);
        let begin = of_step(step.checked_sub(1)?).map(|(_, entry)| entry.ended_ns).max()?;
        let end = of_step(step).map(|(_, entry)| entry.ended_ns).max()?;
        let mut workers: BTreeMap<u32, Vec<&TaskTrace>> = BTreeMap::new();
        for (worker, entry) in of_step(step) {
            workers.entry(worker.0).or_default().push(entry);
        }
        let [mut prologue, mut hops, mut data, mut compute, mut tail] = [0u64; 5];
        for tasks in workers.values() {
            let mut at = begin;
            for (i, task) in tasks.iter().enumerate() {
                let (for_tasks, for_data) = (u64::from(task.event_ns), u64::from(task.data_ns));
                *if i == 0 { &mut prologue } else { &mut hops } += task.began_ns.saturating_sub(at) + for_tasks;
                data += for_data;
                compute += (task.ended_ns - task.began_ns).saturating_sub(for_data + for_tasks);
                at = task.ended_ns;
            }
            tail += end.saturating_sub(at);
        }
        let us = |ns: u64| ns as f64 / 1e3 / f64::from(workers.len() as u32);
        Some(Loss {
            step_us: (end - begin) as f64 / 1e3,
            prologue_us: us(prologue),
            hops_us: us(hops),
            data_us: us(data),
            compute_us: us(compute),
            tail_us: us(tail),
        })
    }

    /// As a table, for a step that reads `bytes` where `ceiling` bytes a second can be read.
    pub(super) fn table(&self, bytes: u64, ceiling: f64) -> Value {
        let floor_us = bytes as f64 / ceiling * 1e6;
        let percent = |us: f64| 100.0 * us / self.step_us;
        json!({
            "step_us": self.step_us,
            "bytes": bytes,
            "ceiling_gb_per_s": ceiling / 1e9,
            "floor_us": floor_us,
            "floor_percent": percent(floor_us),
            "prologue_us": self.prologue_us,
            "hops_exposed_us": self.hops_us,
            "waiting_for_data_us": self.data_us,
            "computing_us": self.compute_us,
            "tail_us": self.tail_us,
        })
    }
}

/// Tasks of each worker that are traced: several passes.
pub(super) const TRACED: u32 = 1 << 14;

/// When each worker of `engine` ran which tasks, in a run of its own.
pub(super) fn trace(
    engine: &mut Engine,
    prompt: &[u32],
    options: &GenerateOptions,
) -> Result<Vec<(WorkerId, TaskTrace)>, Box<dyn std::error::Error>> {
    const NO_GPU: &str = "times are taken on a GPU";
    engine.resident_mut().cuda().ok_or(NO_GPU)?.set_tracing(true);
    engine.generate(prompt, options)?.try_for_each(|token| token.map(|_| ()))?;
    let cuda = engine.resident_mut().cuda().ok_or(NO_GPU)?;
    let trace = cuda.trace()?;
    cuda.set_tracing(false);
    let mut n_traced = BTreeMap::new();
    trace.iter().for_each(|(worker, _)| *n_traced.entry(worker.0).or_insert(0) += 1);
    match n_traced.values().all(|n| *n < TRACED) {
        true => Ok(trace),
        false => Err(format!("a worker ran more than {TRACED} tasks in a few passes").into()),
    }
}

/// The tasks of the last step of `trace`, each with its worker and when it ran, in nanoseconds from the first one's
/// start. A body does a little before it waits for others; it is shown after that, as predicted ones are.
fn last_step(trace: &[(WorkerId, TaskTrace)]) -> Vec<(WorkerId, &TaskTrace, [u64; 2])> {
    let step = trace.iter().map(|(_, entry)| entry.iteration).max().unwrap_or(0);
    let tasks = || trace.iter().filter(|(_, entry)| entry.iteration == step);
    let begin = tasks().map(|(_, entry)| entry.began_ns).min().unwrap_or(0);
    let ran = |entry: &TaskTrace| {
        let began_ns = (entry.began_ns + u64::from(entry.event_ns)).min(entry.ended_ns);
        [began_ns, entry.ended_ns].map(|ns| ns - begin)
    };
    tasks().map(|(worker, entry)| (*worker, entry, ran(entry))).collect()
}

/// Writes the last step of `trace` to `path` in the format of Chrome's and Perfetto's, under the name `process`.
pub(super) fn write_trace(path: &Path, process: &str, image: &Image, trace: &[(WorkerId, TaskTrace)]) -> Outcome {
    write_whole(path, |file| {
        writeln!(file, "{{\"displayTimeUnit\": \"ns\", \"traceEvents\": [")?;
        for (worker, entry, [from_ns, to_ns]) in last_step(trace) {
            let (for_data, for_tasks) = (f64::from(entry.data_ns) / 1e3, f64::from(entry.event_ns) / 1e3);
            let event = json!({
                "name": image.task_name(entry.task), "ph": "X", "pid": 0, "tid": 2 * worker.0 + 1,
                "ts": from_ns as f64 / 1e3,
                "dur": (to_ns - from_ns) as f64 / 1e3,
                "args": {"task": entry.task, "waited_for_data_us": for_data, "waited_for_tasks_us": for_tasks},
            });
            writeln!(file, "{event},")?;
        }
        let name = json!({"name": "process_name", "ph": "M", "pid": 0, "args": {"name": process}});
        writeln!(file, "{name}\n]}}")
    })
}

/// The last step of `trace` as a picture of what `process` ran.
pub(super) fn timeline<'a>(process: &str, image: &'a Image, trace: &[(WorkerId, TaskTrace)]) -> Timeline<'a> {
    let tasks = last_step(trace);
    let seconds = |ns: u64| ns as f64 * 1e-9;
    let n_workers = image.header().n_workers as usize;
    let (mut runs, mut waits) = (Vec::new(), vec![Vec::new(); n_workers]);
    for (worker, entry, [from_ns, to_ns]) in &tasks {
        let op = image.view().tasks.get(entry.task as usize).map_or("", |task| image.op_name(task.op));
        runs.push(Run { worker: worker.0, op, time_s: [*from_ns, *to_ns].map(seconds) });
        if entry.data_ns > 0 {
            let until_ns = (from_ns + u64::from(entry.data_ns)).min(*to_ns);
            waits[worker.idx()].push([*from_ns, until_ns].map(seconds));
        }
    }
    let step_s = seconds(tasks.iter().map(|(_, _, [_, to_ns])| *to_ns).max().unwrap_or(0));
    let name = format!("a step of {process}, measured");
    Timeline { name, n_workers, step_s, runs, beside: Beside::Waits(waits) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_sum_to_the_step() {
        let entry = |worker: u32, iteration: u32, began_ns: u64, ended_ns: u64, data_ns: u32| {
            (WorkerId(worker), TaskTrace { began_ns, ended_ns, task: 0, iteration, data_ns, ..TaskTrace::default() })
        };
        let mut trace = [
            // The step before: only its end counts.
            entry(0, 6, 100, 5_000, 0),
            entry(1, 6, 100, 9_000, 0),
            entry(0, 7, 10_000, 14_000, 1_000),
            entry(0, 7, 17_000, 21_000, 0),
            entry(1, 7, 13_000, 19_000, 2_000),
        ];
        // Of a worker's first task it is what the step begins with.
        (trace[2].1.event_ns, trace[3].1.event_ns) = (500, 1_500);
        let loss = Loss::of(&trace).expect("two steps");
        let expected = Loss {
            step_us: 12.0,
            prologue_us: (1.5 + 4.0) / 2.0,
            hops_us: 4.5 / 2.0,
            data_us: (1.0 + 2.0) / 2.0,
            compute_us: (2.5 + 2.5 + 4.0) / 2.0,
            tail_us: 2.0 / 2.0,
        };
        assert_eq!(loss, expected);
        let Loss { step_us, prologue_us, hops_us, data_us, compute_us, tail_us } = loss;
        assert_eq!(prologue_us + hops_us + data_us + compute_us + tail_us, step_us);
        // 36 KB at 4.5 GB/s: 8 of the 12 us.
        let table = loss.table(36_000, 4.5e9);
        assert_eq!((table["floor_us"].as_f64(), table["bytes"].as_u64()), (Some(8.0), Some(36_000)));
        assert_eq!(Loss::of(&trace[2..]), None, "nothing says when the step began");
    }
}
