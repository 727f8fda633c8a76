//! `perpetua plan`: compile without running, and say what came out.

use super::{Outcome, QuantizeName, Rows, at_least, bytes, plan_graph, print, within, writable, write_whole};
use perpetua::compile::{CompileError, Compiled, Config, Program, Source, compile};
use perpetua::engine::{decoder_sources, pass_name, passing_dtype, sentence_sources};
use perpetua::graph::lower::Target;
use perpetua::graph::task::{TaskGraph, WorkerLists, dot, json, svg};
use perpetua::graph::threadblock::ThreadBlockGraph;
use perpetua::machine::Machine;
use perpetua::model::decoder::{Cache, Declared, Head, build};
use perpetua::model::synth::{preset_config, text_presets};
use perpetua::model::{DecoderConfig, ModelConfig, Quantize, layout};
use perpetua::schedule::predict::{Prediction, Prefetch, predict};
use perpetua::schedule::prefetch::{self, Plan};
use perpetua::schedule::timeline::{Beside, Run, Timeline};
use perpetua_shared::DType;
use perpetua_shared::limits::{MAX_DRAFTS, MAX_SEQUENCES};
use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What `--graph` and `--tasks-json` name, for `--help`.
pub(crate) const FORMAT: &str = r#"A kernel graph (--graph; docs/formats.md has every field):
  {"tensors": [{"name": "x", "shape": [1, 64], "dtype": "f32"},
               {"name": "y", "shape": [1, 64], "dtype": "f32"},
               {"name": "z", "view_of": "y", "offset_elems": 0,
                "shape": [2, 32], "strides": [32, 1]}],
   "ops": [{"name": "a", "grid": [4, 1, 1],
            "reads": [{"tensor": "x", "map": [1, -1, -1]}],
            "writes": [{"tensor": "y", "map": [1, -1, -1]}]},
           {"name": "b", "grid": [2, 1, 1],
            "reads": [{"tensor": "z", "map": [0, -1, -1]}],
            "writes": []}]}
map: for each axis of the grid the dimension that it cuts, or -1.
Out (--tasks-json), numbered by position:
  {"tasks": [{"op", "op_index", "block", "worker", "waits", "triggers"}],
   "events": [{"num_triggers"}], "workers": [[task]]}"#;

#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("what").required(true).args(["model", "graph", "preset", "config"])))]
pub(crate) struct Args {
    /// Model folder.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// A real model's shapes, bf16 weights assumed: no checkpoint is needed.
    #[arg(long, value_name = "NAME", value_parser = clap::builder::PossibleValuesParser::new(text_presets()))]
    preset: Option<String>,
    /// A config.json to take the shapes from, bf16 weights assumed.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Plan as for matrices in fewer bits (--preset and --config only).
    #[arg(long, value_enum, value_name = "HOW", conflicts_with_all = ["model", "graph"])]
    quantize: Option<QuantizeName>,
    /// A kernel graph as JSON.
    #[arg(long, value_name = "FILE")]
    graph: Option<PathBuf>,
    /// What to compile for: h200, cpu:N (N threads), workers:N (N SMs without loaders, flags and fusion, to compare
    /// with).
    #[arg(long, value_name = "TARGET", default_value = "h200", value_parser = parse_target)]
    target: Target,
    /// Positions of the KV cache the pass attends over (models only): 512, or as many as the model has.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = at_least::<usize>(1), conflicts_with = "graph")]
    context: Option<usize>,
    /// Tokens of the pass: 1 is decode (models only).
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true, value_parser = at_least::<usize>(1), conflicts_with = "graph")]
    rows: usize,
    /// Decode the next tokens of so many sequences in one pass (models only).
    #[arg(long, value_name = "N", allow_negative_numbers = true, conflicts_with_all = ["rows", "graph"], value_parser = within(1, MAX_SEQUENCES))]
    batch: Option<usize>,
    /// Verify up to N guesses of what follows the next token in one pass (models only).
    #[arg(long, value_name = "N", allow_negative_numbers = true, conflicts_with_all = ["rows", "batch", "graph"], value_parser = within(1, MAX_DRAFTS))]
    prompt_lookup: Option<usize>,
    /// Operators or macro kernels whose tasks are launched just in time (models only).
    #[arg(long, value_name = "NAME", value_delimiter = ',', conflicts_with = "graph")]
    just_in_time: Vec<String>,
    #[command(flatten)]
    pictures: Pictures,
    /// Write the predicted run as a picture: two layers of it, on some workers (models only).
    #[arg(long, value_name = "FILE", conflicts_with = "graph")]
    timeline: Option<PathBuf>,
    /// Write the predicted run as a Chrome/Perfetto trace (models only).
    #[arg(long, value_name = "FILE", conflicts_with = "graph")]
    trace: Option<PathBuf>,
    /// Judge the plan with the independent checkers.
    #[arg(long)]
    check: bool,
}

/// Ways to look at tasks and events.
#[derive(Debug, clap::Args)]
pub(crate) struct Pictures {
    /// Write tasks, events and worker lists as JSON.
    #[arg(long, value_name = "FILE")]
    tasks_json: Option<PathBuf>,
    /// Write the graph for graphviz.
    #[arg(long, value_name = "FILE")]
    dot: Option<PathBuf>,
    /// Write a picture.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

impl Pictures {
    /// Writes those that were asked for; whether any were.
    pub(crate) fn write(
        &self,
        graph: &ThreadBlockGraph,
        tasks: &TaskGraph,
        lists: &WorkerLists,
    ) -> Result<bool, Box<dyn std::error::Error>> {
        if let Some(path) = &self.tasks_json {
            write_whole(path, |file| json::write_tasks(graph, tasks, lists, file))?;
        }
        if let Some(path) = &self.dot {
            write_whole(path, |file| dot::write_dot(graph, tasks, file))?;
        }
        if let Some(path) = &self.svg {
            write_whole(path, |file| svg::write_svg(graph, tasks, file))?;
        }
        Ok([&self.tasks_json, &self.dot, &self.svg].into_iter().any(Option::is_some))
    }
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
    let Pictures { tasks_json, dot, svg } = &args.pictures;
    let outputs = [tasks_json, dot, svg, &args.timeline, &args.trace];
    let inputs = [&args.model, &args.config, &args.graph];
    writable(outputs.into_iter().flat_map(Option::as_deref), inputs.into_iter().flat_map(Option::as_deref))?;
    if let Some(graph) = &args.graph {
        return plan_graph::run(graph, args.target.n_workers, &args.pictures, args.check);
    }
    let just_in_time = args.just_in_time.clone();
    let config = Config { check: args.check, just_in_time, ..Config::new(args.target.clone()) };
    let compiled = compile(sources(args)?, &config)?;
    let program = &compiled.programs[0];
    let planned = Planned::new(program, &args.target, args.check)?;
    print(&summary(&compiled, program, &planned, args))?;
    args.pictures.write(&program.blocks, &program.tasks, &program.lists)?;
    if let Some(path) = &args.timeline {
        let timeline = timeline(program, &planned, &args.target.name);
        write_whole(path, |file| timeline.write(file))?;
    }
    if let Some(path) = &args.trace {
        write_whole(path, |file| write_trace(file, program, &planned))?;
    }
    Ok(())
}

/// The shared memory of a program's workers, and what it makes of the step.
struct Planned<'a> {
    machine: Machine,
    plan: Cow<'a, Plan>,
    took: Duration,
    across: Prediction,
    within: Prediction,
    /// Of a pass of more rows than tiles are for: seconds its flops take at least.
    multiply_s: Option<f64>,
}

impl<'a> Planned<'a> {
    fn new(program: &'a Program, target: &Target, check: bool) -> Result<Planned<'a>, Box<dyn std::error::Error>> {
        let machine = target.machine;
        let is_long =
            target.has_loaders && !program.blocks.has_tiles && program.blocks.ops.iter().any(|op| op.rows > 1);
        let (reads, plan, took) = if target.has_loaders {
            let (_, took) =
                program.stages.iter().find(|(stage, _)| *stage == "tiles").expect("a stage that compile times");
            (Cow::Borrowed(&program.reads[..]), Cow::Borrowed(&program.plan), *took)
        } else {
            // As if workers had loaders.
            let start = Instant::now();
            let reads = prefetch::reads(&program.blocks, &program.tasks, &program.costs);
            let plan = prefetch::plan(&program.blocks, &program.tasks, &program.lists, &reads, &machine)?;
            let took = start.elapsed();
            if check {
                prefetch::check(&plan, &program.lists, &reads).map_err(CompileError::Tiles)?;
            }
            (Cow::Owned(reads), Cow::Owned(plan), took)
        };
        let run = |prefetch| {
            predict(&program.tasks, &program.told, &plan, &reads, &program.costs, &machine, prefetch)
                .ok_or("the worker lists do not run to their end")
        };
        let (across, within) = (run(Prefetch::AcrossTasks)?, run(Prefetch::WithinTask)?);
        let flops: u64 = program.costs.iter().map(|cost| cost.flops).sum();
        let multiply_s = flops as f64 / (machine.flops_per_s * f64::from(target.n_workers));
        Ok(Planned { machine, plan, took, across, within, multiply_s: is_long.then_some(multiply_s) })
    }
}

/// The option that asks for a pass of several rows that decodes, if one does.
fn many_rows(args: &Args) -> Option<&'static str> {
    [("batch", args.batch), ("prompt-lookup", args.prompt_lookup)].into_iter().find_map(|(name, n)| n.map(|_| name))
}

fn sources(args: &Args) -> Result<Vec<Source>, Box<dyn std::error::Error>> {
    let up_to = |name: &str, n: usize, max: usize, what: &str| match n {
        n if n > max => Err(format!("--{name} {n}, expected 1 to {max}, {what}")),
        n => Ok(n),
    };
    let rows = |cache: &Cache| up_to("rows", args.rows, cache.context, "what the cache is planned for (--context)");
    // The rows of a pass, the cache, and what comes of it.
    let pass = |max: usize| -> Result<(usize, Cache, Head), String> {
        let context = args.context.unwrap_or(max.min(512));
        let cache = Cache::bf16(up_to("context", context, max, "the context of this model")?);
        Ok(match (args.batch, args.prompt_lookup) {
            (None, None) => (rows(&cache)?, cache, Head::Sample),
            (None, Some(n)) => ((n + 1).min(cache.context), cache, Head::Verify),
            (Some(n), _) => (n, Cache { sequences: n, ..cache }, Head::SampleEach),
        })
    };
    let Some(dir) = &args.model else {
        let config = match (&args.preset, &args.config) {
            (Some(name), _) => ModelConfig::from_value(Path::new(name), &preset_config(name)?)?,
            (None, Some(file)) => ModelConfig::open(file)?,
            (None, None) => unreachable!("clap asks for one of the four"),
        };
        let mut in_fewer_bits = layout::packed(&config);
        in_fewer_bits.extend(args.quantize.into_iter().flat_map(|how| Quantize::from(how).dtypes(&config)));
        let ModelConfig::Decoder(config @ DecoderConfig { is_bidirectional: false, .. }) = &config else {
            return Err("a model of sentences is planned from its folder: use --model".into());
        };
        let (rows, cache, head) = pass(config.max_position_embeddings)?;
        let graph = build(config, Declared::AssumedBut(DType::Bf16, &in_fewer_bits), rows, cache, head)?;
        let name = pass_name(rows, head);
        return Ok(vec![Source { name, graph, in_token_loop: true }]);
    };
    let model = super::load(dir)?;
    let max = model.max_tokens();
    if !super::is_generator(&model) {
        if let Some(name) = many_rows(args) {
            return Err(format!("--{name} needs a text model: one of sentences reads them one by one").into());
        }
        // An encoder's sentences are all it looks at.
        let is_encoder = model.config().architecture().is_encoder();
        let mut cache = if is_encoder { Cache::bf16(max) } else { pass(max)?.1 };
        if model.takes_whole() {
            cache.dtype = passing_dtype(args.target.has_loaders);
        }
        return Ok(sentence_sources(&model, &[rows(&cache)?], cache)?);
    }
    let (rows, cache, head) = pass(max)?;
    let mut sources = decoder_sources(&model, &[rows], cache, head)?;
    // Decode is always among them; only what was asked for is planned.
    sources.retain(|source| source.graph.rows == Some(rows as u32));
    Ok(sources)
}

fn summary(compiled: &Compiled, program: &Program, planned: &Planned<'_>, args: &Args) -> String {
    let Planned { plan, across, within, machine, took, multiply_s } = planned;
    let mut rows = Rows::default();
    rows.row("program", format!("{} for {}", program.name, args.target.name));
    rows.stats(&program.tasks.stats);
    let mut row = |what: &str, text: String| rows.row(what, text);
    if program.arena.flagged_bytes > 0 {
        let bytes = bytes(program.arena.flagged_bytes);
        row(
            "flagged",
            format!("{bytes} of intermediates; the image has {} of the events", program.counted.stats.events),
        );
    }
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
    let took = format!("planned in {:.2} ms", took.as_secs_f64() * 1e3);
    if multiply_s.is_none() {
        let copied = format!("{} copies of {}", plan.n_data(), bytes(plan.bytes()));
        let most = format!(
            "at most {} of {} a worker",
            bytes(plan.peak_bytes().saturating_sub(plan.first_byte)),
            bytes(plan.capacity_bytes)
        );
        row("shared memory", format!("{copied}, {most}, {took}"));
    } else {
        let asked = format!("{} prefetches of {}", plan.n_prefetches(), bytes(plan.bytes()));
        row("L2 cache", format!("{asked}, at most {} ahead a worker, {took}", bytes(machine.near_ahead_bytes)));
    }
    let us = |s: f64| format!("{:.1} us", s * 1e6);
    let share = |s: f64, of: &Prediction| 100.0 * s / of.step_s.max(f64::MIN_POSITIVE);
    let bus = |of: &Prediction| {
        format!(
            "busy {:.1} %; idle: memory full while an event is awaited {:.1} %, memory full while computing {:.1} %, at the end {:.1} %",
            share(of.loader.busy_s, of),
            share(of.loader.event_s, of),
            share(of.loader.full_s, of),
            share(of.loader.tail_s, of)
        )
    };
    let by_flops = multiply_s.map_or(String::new(), |s| format!(", {} by flops", us(s)));
    let floor = format!("floor {}{by_flops}", us(across.floor_s));
    row("predicted step", format!("{} for {} ({floor})", us(across.step_s), bytes(across.bytes)));
    row("memory bus", bus(across));
    row(
        "consumers",
        format!(
            "computing {:.1} %, waiting for events {:.1} %, for data {:.1} %, idle at the end {:.1} %",
            share(across.consumer.busy_s, across),
            share(across.consumer.event_s, across),
            share(across.consumer.data_s.max(0.0), across),
            share(across.consumer.tail_s, across)
        ),
    );
    row("no prefetch", format!("across operators: {}; {}", us(within.step_s), bus(within)));
    row(
        "assumed",
        format!(
            "{:.1} GB/s a worker, load latency {:.2} us, hop {:.2} us, by flags {:.2} us",
            machine.bytes_per_s / 1e9,
            machine.load_latency_s * 1e6,
            machine.hop_s * 1e6,
            machine.flag_hop_s * 1e6
        ),
    );
    rows.stages(&program.stages);
    if args.check {
        rows.row(
            "check",
            "every overlap ordered, in the arena too; the image keeps its rules; no tile in another's way",
        );
    }
    rows.0
}

/// `program` as predicted for the target called `target`, with the copies that its loaders make.
fn timeline<'a>(program: &'a Program, planned: &Planned<'_>, target: &str) -> Timeline<'a> {
    let Planned { plan, across: prediction, machine, .. } = planned;
    let runs = program.tasks.tasks.iter().zip(&prediction.spans).map(|(task, span)| Run {
        worker: span.worker,
        op: &program.blocks.ops[task.op as usize].name,
        time_s: [span.start_s, span.end_s],
    });
    // Copies, each with what follows it without a gap.
    let copies = prediction.loads.iter().zip(&plan.workers).map(|(loads, worker)| {
        let mut merged: Vec<[f64; 2]> = Vec::new();
        for ((start, _), op) in loads.iter().zip(&worker.data) {
            let end = start + f64::from(op.bytes) / machine.bytes_per_s;
            match merged.last_mut() {
                Some(before) if *start <= before[1] + 1e-9 => before[1] = before[1].max(end),
                _ => merged.push([*start, end]),
            }
        }
        merged
    });
    Timeline {
        name: format!("{} on {target}, predicted", program.name),
        n_workers: program.lists.lists.len(),
        step_s: prediction.step_s,
        runs: runs.collect(),
        beside: Beside::Copies(copies.collect()),
    }
}

/// The trace event format that Chrome's tracing and Perfetto read: complete events, two tracks per worker. Copies of
/// one task that follow each other without a gap are one event.
fn write_trace(
    file: &mut dyn std::io::Write,
    program: &Program,
    Planned { plan, across: prediction, machine, .. }: &Planned<'_>,
) -> std::io::Result<()> {
    let bytes_per_s = machine.bytes_per_s;
    writeln!(file, "{{\"displayTimeUnit\": \"ns\", \"traceEvents\": [")?;
    let name = |task: u32| &program.blocks.ops[program.tasks.tasks[task as usize].op as usize].name;
    for (worker, own) in plan.workers.iter().enumerate() {
        for (track, side) in ["loader", "compute"].iter().enumerate() {
            let event = serde_json::json!({"name": "thread_name", "ph": "M", "pid": 0, "tid": 2 * worker + track, "args": {"name": format!("w{worker} {side}")}});
            writeln!(file, "{event},")?;
        }
        let mut at = 0;
        while at < own.data.len() {
            let task_of = |data: usize| own.computes[own.data[data].used_by as usize].task;
            let loads = &prediction.loads[worker];
            let (task, first) = (task_of(at), at);
            let mut copied = 0;
            let on_bus = |data: usize| loads[data].0 + f64::from(own.data[data].bytes) / bytes_per_s;
            while at < own.data.len() && task_of(at) == task && (at == first || loads[at].0 <= on_bus(at - 1) + 1e-9) {
                copied += u64::from(own.data[at].bytes);
                at += 1;
            }
            let (start_s, end_s) = (loads[first].0, on_bus(at - 1));
            let event = serde_json::json!({
                "name": name(task), "ph": "X", "pid": 0, "tid": 2 * worker, "ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6,
                "args": {"task": task, "bytes": copied, "copies": at - first},
            });
            writeln!(file, "{event},")?;
        }
    }
    let n_tasks = program.tasks.tasks.len();
    for (number, (task, span)) in program.tasks.tasks.iter().zip(&prediction.spans).enumerate() {
        let cost = &program.costs[number];
        let event = serde_json::json!({
            "name": name(number as u32), "ph": "X", "pid": 0, "tid": 2 * span.worker + 1,
            "ts": span.start_s * 1e6, "dur": (span.end_s - span.start_s) * 1e6,
            "args": {"task": number, "block": task.block, "bytes": cost.bytes_read + cost.bytes_written, "flops": cost.flops},
        });
        writeln!(file, "{event}{}", if number + 1 < n_tasks { "," } else { "" })?;
    }
    writeln!(file, "]}}")
}
