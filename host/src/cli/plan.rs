//! `perpetua plan`: compile without running, and say what came out.

use super::{Outcome, bytes, plan_graph, write_whole};
use perpetua::Model;
use perpetua::compile::{Compiled, Config, Program, Source, compile};
use perpetua::engine::{decoder_sources, sentence_sources};
use perpetua::graph::lower::Target;
use perpetua::graph::task::{dot, json, svg};
use perpetua::model::decoder::Head;
use perpetua::schedule::predict::{Prediction, Rates, predict};
use perpetua_shared::DType;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("what").required(true).args(["model", "graph"])))]
pub(crate) struct Args {
    /// Model folder.
    #[arg(long, value_name = "DIR", required_unless_present = "graph", conflicts_with = "graph")]
    model: Option<PathBuf>,
    /// A kernel graph as JSON.
    #[arg(long, value_name = "FILE")]
    graph: Option<PathBuf>,
    /// What to compile for: h200, cpu:N, workers:N.
    #[arg(long, value_name = "TARGET", default_value = "h200", value_parser = parse_target)]
    target: Target,
    /// Positions of the KV cache the pass attends over (models only).
    #[arg(long, value_name = "N", default_value_t = 512)]
    context: usize,
    /// Tokens of the pass: 1 is decode (models only).
    #[arg(long, value_name = "N", default_value_t = 1)]
    rows: usize,
    /// Write tasks, events and worker lists as JSON.
    #[arg(long, value_name = "FILE")]
    tasks_json: Option<PathBuf>,
    /// Write the graph for graphviz.
    #[arg(long, value_name = "FILE")]
    dot: Option<PathBuf>,
    /// Write a picture.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write the predicted run as a Chrome/Perfetto trace (models only).
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Judge the plan with the independent checkers.
    #[arg(long)]
    check: bool,
}

fn parse_target(text: &str) -> Result<Target, String> {
    let workers = |n: &str| match n.parse::<u32>() {
        Ok(n) if (1..=perpetua_shared::limits::MAX_WORKERS as u32).contains(&n) => Ok(n),
        _ => Err(format!("{n:?} workers, expected 1 to {}", perpetua_shared::limits::MAX_WORKERS)),
    };
    match text.split_once(':') {
        None if text == "h200" => Ok(Target::h200()),
        Some(("cpu", n)) => workers(n).map(Target::cpu),
        Some(("workers", n)) => workers(n).map(Target::workers),
        _ => Err("expected h200, cpu:N or workers:N".to_owned()),
    }
}

pub(crate) fn run(args: &Args) -> Outcome {
    let Some(dir) = &args.model else {
        let Some(graph) = &args.graph else { unreachable!("clap asks for one of the two") };
        if args.trace.is_some() {
            return Err("--trace needs --model: a plain graph does not say what its tasks cost".into());
        }
        let [tasks_json, dot, svg] = [&args.tasks_json, &args.dot, &args.svg].map(Option::as_deref);
        return plan_graph::run(graph, args.target.n_workers, tasks_json, dot, svg, args.check);
    };
    let model = Model::load(dir)?;
    let compiled = compile(sources(args, &model)?, &Config { target: args.target.clone(), check: args.check })?;
    let program = &compiled.programs[0];
    let rates = if args.target.name.starts_with("cpu") { Rates::CPU } else { Rates::H200 };
    let prediction = predict(&program.tasks, &program.lists, &program.costs, &rates)
        .ok_or("the worker lists do not run to their end")?;
    summary(&compiled, program, &prediction, args);
    if let Some(path) = &args.tasks_json {
        write_whole(path, |file| json::write_tasks(&program.blocks, &program.tasks, &program.lists, file))?;
    }
    if let Some(path) = &args.dot {
        write_whole(path, |file| dot::write_dot(&program.blocks, &program.tasks, file))?;
    }
    if let Some(path) = &args.svg {
        write_whole(path, |file| svg::write_svg(&program.blocks, &program.tasks, file))?;
    }
    if let Some(path) = &args.trace {
        write_whole(path, |file| write_trace(file, program, &prediction))?;
    }
    Ok(())
}

fn sources(args: &Args, model: &Model) -> Result<Vec<Source>, Box<dyn std::error::Error>> {
    let max = model.max_tokens();
    let within = |name: &str, n: usize, max: usize| match n {
        0 => Err(format!("--{name} 0, expected 1 to {max}")),
        n if n > max => Err(format!("--{name} {n}, expected 1 to {max}, the context of this model")),
        n => Ok(n),
    };
    if !super::is_generator(model) {
        return Ok(sentence_sources(model, &[within("rows", args.rows, max)?])?);
    }
    let context = within("context", args.context, max)?;
    let rows = within("rows", args.rows, context)?;
    let head = Head::Sample;
    let mut sources = decoder_sources(model, context, &[rows], DType::Bf16, head)?;
    // Decode is always among them; only what was asked for is planned.
    sources.retain(|source| source.graph.rows == Some(rows as u32));
    Ok(sources)
}

fn summary(compiled: &Compiled, program: &Program, prediction: &Prediction, args: &Args) {
    let stats = &program.tasks.stats;
    let row = |what: &str, text: String| println!("{what:16} {text}");
    row("program", format!("{} for {}", program.name, args.target.name));
    row("ops", program.blocks.ops.len().to_string());
    row("tasks", program.tasks.tasks.len().to_string());
    row("events", program.tasks.events.len().to_string());
    row("waits", format!("{} (median {} a task, at most {})", stats.waits, stats.median_waits, stats.max_waits));
    row("triggers", stats.triggers.to_string());
    row("pairs", stats.pairs.to_string());
    row("oversync", format!("{:.3}", stats.oversync));
    let arena = &program.arena;
    row(
        "arena",
        format!(
            "{} (lower bound {}, without reuse {})",
            bytes(arena.peak_bytes),
            bytes(arena.lower_bound_bytes),
            bytes(arena.without_reuse_bytes)
        ),
    );
    row("image", bytes(compiled.image.bytes().len() as u64));
    let us = |s: f64| format!("{:.1} us", s * 1e6);
    row(
        "predicted step",
        format!("{} for {} (floor {})", us(prediction.step_s), bytes(prediction.bytes), us(prediction.floor_s)),
    );
    let share = |s: f64| 100.0 * s / prediction.step_s.max(f64::MIN_POSITIVE);
    row(
        "of it",
        format!(
            "running {:.1} %, waiting for events {:.1} %, idle at the end {:.1} %",
            share(prediction.busy_s),
            share(prediction.waiting_s),
            share(prediction.tail_s)
        ),
    );
    row("rates", "literature values, not measured on this target; no prefetch across tasks credited".to_owned());
    let stages: Vec<String> =
        program.stages.iter().map(|(stage, time)| format!("{stage} {:.2} ms", time.as_secs_f64() * 1e3)).collect();
    let total: Duration = program.stages.iter().map(|(_, time)| *time).sum();
    row("compile", format!("{:.2} ms: {}", total.as_secs_f64() * 1e3, stages.join(", ")));
    if args.check {
        row("check", "every overlap ordered, in the arena too; the image keeps its rules".to_owned());
    }
}

/// The trace event format that Chrome's tracing and Perfetto read: a complete event per task, a track per worker.
fn write_trace(file: &mut dyn std::io::Write, program: &Program, prediction: &Prediction) -> std::io::Result<()> {
    writeln!(file, "{{\"displayTimeUnit\": \"ns\", \"traceEvents\": [")?;
    for worker in 0..program.lists.lists.len() {
        let name = serde_json::json!({"name": "thread_name", "ph": "M", "pid": 0, "tid": worker, "args": {"name": format!("w{worker}")}});
        writeln!(file, "{name},")?;
    }
    for (number, (task, span)) in program.tasks.tasks.iter().zip(&prediction.spans).enumerate() {
        let cost = &program.costs[number];
        let event = serde_json::json!({
            "name": program.blocks.ops[task.op as usize].name,
            "ph": "X", "pid": 0, "tid": span.worker,
            "ts": span.start_s * 1e6, "dur": (span.end_s - span.start_s) * 1e6,
            "args": {"task": number, "block": task.block, "bytes": cost.bytes_read + cost.bytes_written, "flops": cost.flops},
        });
        let comma = if number + 1 < program.tasks.tasks.len() { "," } else { "" };
        writeln!(file, "{event}{comma}")?;
    }
    writeln!(file, "]}}")
}
