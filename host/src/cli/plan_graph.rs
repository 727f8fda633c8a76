//! `perpetua plan --graph`: tasks and events of a graph of cut operators that no model file describes.

use super::{Outcome, Rows, note, print, write_whole};
use perpetua::compile::CompileError;
use perpetua::graph::task::{self, TaskClass, Violation, dot, json, svg};
use std::path::Path;
use std::time::{Duration, Instant};

/// Reads the graph, finds tasks, events and worker lists for `n_workers`, judges them if asked to, and writes what is
/// wanted; figures go to stdout.
pub(crate) fn run(
    graph_path: &Path,
    n_workers: u32,
    tasks_json: Option<&Path>,
    dot: Option<&Path>,
    svg: Option<&Path>,
    check: bool,
) -> Outcome {
    let name = graph_path.display();
    let mut stages: Vec<(&str, Duration)> = Vec::new();
    let mut clock = Instant::now();
    let mut stage = |name| {
        stages.push((name, clock.elapsed()));
        clock = Instant::now();
    };
    let text = std::fs::read_to_string(graph_path).map_err(|error| format!("{name}: {error}"))?;
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
    if let Some(path) = tasks_json {
        write_whole(path, |out| json::write_tasks(graph, &tasks, &workers, out))?;
    }
    if let Some(path) = dot {
        write_whole(path, |out| dot::write_dot(graph, &tasks, out))?;
    }
    if let Some(path) = svg {
        write_whole(path, |out| svg::write_svg(graph, &tasks, out))?;
    }
    if tasks_json.or(dot).or(svg).is_some() {
        stage("write");
    }

    let stats = &tasks.stats;
    let mut rows = Rows::default();
    let mut row = |what: &str, text: String| rows.row(what, text);
    row("ops", stats.ops.to_string());
    row("tasks", stats.tasks.to_string());
    row("events", stats.events.to_string());
    row("waits", format!("{} (median {} a task, at most {})", stats.waits, stats.median_waits, stats.max_waits));
    row("triggers", stats.triggers.to_string());
    row("pairs", stats.pairs.to_string());
    row("oversync", format!("{:.3}", stats.oversync));
    row("edges", format!("{} between operators, {} of them implied by others", stats.edges, stats.implied_edges));
    row("workers", n_workers.to_string());
    let times: Vec<String> =
        stages.iter().map(|(stage, time)| format!("{stage} {:.2} ms", time.as_secs_f64() * 1e3)).collect();
    let total: Duration = stages.iter().map(|(_, time)| *time).sum();
    row("compile", format!("{:.2} ms: {}", total.as_secs_f64() * 1e3, times.join(", ")));
    if check {
        row("check", "every overlap ordered, no wait without need, the worker lists run to their end".to_owned());
    }
    print(&rows.0)
}

fn report(broken: &[Violation]) -> String {
    let some: Vec<String> = broken.iter().take(4).map(Violation::to_string).collect();
    let more =
        if broken.len() > some.len() { format!("; and {} more", broken.len() - some.len()) } else { String::new() };
    format!("the plan breaks its laws: {}{more}", some.join("; "))
}
