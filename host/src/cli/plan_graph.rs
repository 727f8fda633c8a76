//! `perpetua plan --graph`: tasks and events of a graph of cut operators that no model file describes.

use super::plan::Pictures;
use super::{Outcome, Rows, name_of_text, note, print, read_text};
use perpetua::compile::CompileError;
use perpetua::graph::task::{self, TaskClass, Violation, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// Reads the graph, finds tasks, events and worker lists for `n_workers`, judges them if asked to, and writes what is
/// wanted; figures go to stdout.
pub(crate) fn run(graph_path: &Path, n_workers: u32, pictures: &Pictures, check: bool) -> Outcome {
    let name = name_of_text(graph_path);
    let mut stages: Vec<(&str, Duration)> = Vec::new();
    let mut clock = Instant::now();
    let mut stage = |name| {
        stages.push((name, clock.elapsed()));
        clock = Instant::now();
    };
    let text = read_text(graph_path)?;
    let described = json::read_described(&text).map_err(|error| format!("{name}: {error}"))?;
    for field in &described.ignored {
        note(&format!("{name}: {field} is not understood, and ignored"));
    }
    stage("read");
    let graph = &described.graph;
    let config = task::Config { classes: described.classes, ..task::Config::default() };
    let tasks = task::lower(graph, &config).map_err(|error| format!("{name}: {error}"))?;
    stage("dependencies");
    let workers = task::assign_round_robin(&tasks, n_workers as usize);
    stage("assign");
    if check {
        let mut late = (0..graph.ops.len()).filter(|op| tasks.classes[*op] == TaskClass::JustInTime);
        if let Some((op, why)) = late.find_map(|op| Some((op, tasks.why_not_launched(op)?))) {
            let op = graph.ops[op].name.clone();
            return Err(format!("{name}: {}", CompileError::JustInTime { op, why }).into());
        }
        task::check(graph, &tasks, Some(&workers)).map_err(|broken| report(&broken))?;
        let (waited, needed) = task::waited_and_needed(graph, &tasks);
        if waited as f64 > needed as f64 * tasks.stats.oversync * 1.000_001 {
            return Err(format!("tasks wait for {waited} others, but need only {needed}").into());
        }
        stage("check");
    }
    if pictures.write(graph, &tasks, &workers)? {
        stage("write");
    }

    let stats = &tasks.stats;
    let mut rows = Rows::default();
    rows.stats(stats);
    rows.row("edges", format!("{} between operators, {} of them implied by others", stats.edges, stats.implied_edges));
    rows.row("workers", n_workers);
    rows.stages(&stages);
    if check {
        rows.row("check", "every overlap ordered, no wait without need, the worker lists run to their end");
    }
    print(&rows.0)
}

fn report(broken: &[Violation]) -> String {
    let some: Vec<String> = broken.iter().take(4).map(Violation::to_string).collect();
    let more =
        if broken.len() > some.len() { format!("; and {} more", broken.len() - some.len()) } else { String::new() };
    format!("the plan breaks its laws: {}{more}", some.join("; "))
}
