//! `perpetua bench`: step times, and the share of the read bandwidth measured in the same run.

use super::loss::{self, Loss};
use super::perplexity::{Divergences, Prediction};
use super::{
    DeviceName, ModelArgs, Outcome, TOKENS_BAR, at_least, bytes, greedy_options, is_generator, median_and_spread,
    progress, report, say, warm, within, writable, write_whole,
};
use perpetua::compile::Compiled;
use perpetua::cuda::Gpu;
use perpetua::cuda::probe::Prober;
use perpetua::exec::cuda::{self, Mode};
use perpetua::exec::memory::WeightSource;
use perpetua::exec::operators::operators;
use perpetua::exec::threads::usable_cores;
use perpetua::graph::task::bytes_from_memory;
use perpetua::model::Quantize;
use perpetua::{Embedder, Engine, EngineConfig, EngineError, Model};
use perpetua_device::cpu::bandwidth;
use perpetua_device::cpu::simd::Isa;
use perpetua_shared::Technique;
use perpetua_shared::control::{Control, Request, Step};
use perpetua_shared::image::VERIFIES;
use perpetua_shared::limits::{MAX_DRAFTS, MAX_SEQUENCES};
use serde_json::json;
use std::path::PathBuf;
use std::time::{Duration, Instant};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Prompt tokens before the measured ones, or tokens of a sentence [default: 128, or as many as the model takes].
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = at_least::<usize>(1))]
    context: Option<usize>,
    /// Tokens to measure (sentences, for an embedding model).
    #[arg(long, value_name = "N", default_value_t = 32, allow_negative_numbers = true, value_parser = at_least::<usize>(1))]
    tokens: usize,
    /// Decode this many sequences together, every pass over the weights making a token for each (text models).
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = within(1, MAX_SEQUENCES))]
    batch: Option<usize>,
    /// What passes cost that verify up to N guesses (`generate --prompt-lookup`), beside a step (text models).
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = within(1, MAX_DRAFTS), conflicts_with = "batch")]
    prompt_lookup: Option<usize>,
    /// Measure so often; the figures are those of the median run.
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true, value_parser = at_least::<usize>(1))]
    runs: usize,
    /// On a GPU: measure the same without each technique that makes it fast, and as one launch per operator under a
    /// CUDA graph, too.
    #[arg(long)]
    compare: bool,
    /// Write the figures there.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// On a GPU: when each worker ran which task in a step, in the format of Chrome's and Perfetto's traces.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// On a GPU: two layers of a step as a picture, as `plan --timeline` draws what is predicted.
    #[arg(long, value_name = "FILE")]
    timeline: Option<PathBuf>,
}

/// Prompt tokens unless told otherwise.
const CONTEXT: usize = 128;

impl Args {
    /// Of `model`: `runs` runs of `tokens` tokens after `context`, compared, their trace written to `trace` and drawn
    /// beside it.
    pub(super) fn of(model: ModelArgs, context: usize, tokens: usize, runs: usize, trace: PathBuf) -> Args {
        let (context, timeline) = (Some(context), Some(trace.with_extension("svg")));
        let (batch, prompt_lookup, json, trace) = (None, None, None, Some(trace));
        Args { model, context, tokens, batch, prompt_lookup, runs, compare: true, json, trace, timeline }
    }

    /// The same, and what passes take that verify up to so many guesses, if there are to be any.
    pub(super) fn guessing(self, prompt_lookup: Option<usize>) -> Args {
        Args { prompt_lookup, ..self }
    }

    /// The same of `sequences` together, if so many are given, compared with nothing but one alone.
    pub(super) fn uncompared(&self, sequences: Option<usize>) -> Args {
        let (batch, model) = (sequences, self.model.clone());
        Args { batch, prompt_lookup: None, compare: false, trace: None, timeline: None, json: None, model, ..*self }
    }
}

pub(crate) fn run(args: &Args) -> Outcome {
    if matches!(args.model.device, DeviceName::Simt) {
        return Err("there is nothing to measure on --device simt: its launches are simulated as a whole, and their times mean \
                    nothing (--device ptx goes through the steps of a benchmark, with times that mean nothing either)"
            .into());
    }
    let of_steps = args.trace.is_some() || args.timeline.is_some();
    if of_steps && args.batch.is_some() {
        return Err("--trace and --timeline are of the steps of one sequence: not with --batch".into());
    }
    writable([&args.json, &args.trace, &args.timeline].into_iter().flat_map(Option::as_deref), [&*args.model.model])?;
    let model = args.model.open()?;
    if args.batch.is_some() && !is_generator(&model) {
        return Err("--batch is for text models: sentences are embedded one by one".into());
    }
    if args.prompt_lookup.is_some() && !is_generator(&model) {
        return Err("--prompt-lookup is for text models: of a sentence nothing is guessed".into());
    }
    if (args.compare || of_steps) && !is_generator(&model) {
        return Err("--compare, --trace and --timeline are for text models, whose steps they are about".into());
    }
    let mut figures = if is_generator(&model) { whole(args, &model)? } else { embedder(args, &model)? };
    if matches!(args.model.device, DeviceName::Ptx) {
        figures["simulated"] = "a GPU that this machine simulates: its times and rates mean nothing".into();
        say("the GPU is simulated: its times and rates mean nothing");
    }
    if let Some(share) = figures["share_of_bandwidth_percent"].as_f64().filter(|share| *share > 100.0) {
        say(&format!(
            "{share:.0} % of the bandwidth is more than memory gives: the model fits into caches, or this machine was busy with something else when the bandwidth was measured"
        ));
    }
    report(&figures, args.json.as_deref())
}

/// What is measured of one run.
struct Run {
    prefill: Duration,
    /// Sorted.
    steps: Vec<Duration>,
    waited: Duration,
    whole: Duration,
    /// Of the first sequence.
    tokens: Vec<u32>,
}

impl Run {
    fn median(&self) -> f64 {
        quantile(&self.steps, 0.5)
    }

    /// `args.runs` runs, by their steps' medians.
    fn several(args: &Args, engine: &mut Engine, prompts: &[Vec<u32>]) -> Result<Vec<Run>, Box<dyn std::error::Error>> {
        let mut runs = (0..args.runs).map(|_| Run::of(args, engine, prompts)).collect::<Result<Vec<Run>, _>>()?;
        runs.sort_by(|a, b| a.median().total_cmp(&b.median()));
        Ok(runs)
    }

    fn of(args: &Args, engine: &mut Engine, prompts: &[Vec<u32>]) -> Result<Run, Box<dyn std::error::Error>> {
        let options = greedy_options(args.tokens);
        let bar = progress((prompts.len() * args.tokens) as u64, "measuring", TOKENS_BAR);
        let waited = engine.resident().waited();
        let mut tokens = Vec::new();
        if args.batch.is_some() {
            engine.generate_batch(prompts, &options)?.try_for_each(|token| {
                token.map(|(sequence, token)| {
                    tokens.extend((sequence == 0).then_some(token.id));
                    bar.inc(1);
                })
            })?;
        } else {
            engine.generate(&prompts[0], &options)?.try_for_each(|token| {
                token.map(|token| {
                    tokens.push(token.id);
                    bar.inc(1);
                })
            })?;
        }
        bar.finish_and_clear();
        let waited = engine.resident().waited() - waited;
        let stamps = engine.stamps();
        // Reading a prompt alone makes its first token; a batch leaves the prompts' last tokens to its first step.
        let first = stamps.len() - args.tokens - usize::from(args.batch.is_some());
        Ok(Run {
            prefill: stamps[first] - stamps[0],
            steps: steps(&stamps[first..]),
            waited,
            whole: stamps[stamps.len() - 1] - stamps[0],
            tokens,
        })
    }
}

/// Tokens of the run that is traced: its last step is the one looked at.
const TRACED_TOKENS: usize = 3;

/// A short run, so that pages and clocks are warm.
fn warm_up(args: &Args, engine: &mut Engine, prompt: &[u32]) -> Outcome {
    let options = greedy_options(2.min(args.tokens));
    Ok(engine.generate(&prompt[..prompt.len().min(8)], &options)?.try_for_each(|token| token.map(|_| ()))?)
}

/// Prompt tokens for which it is measured how long the first token takes, if there are more in the prompt.
const SHORT_PROMPTS: [usize; 3] = [16, 64, 256];

/// Milliseconds from a prompt's handing over to the first token, the median of three times, by how many of `prompt`'s
/// tokens are read: of all of them as in the runs, which took `whole`.
fn first_token(engine: &mut Engine, prompt: &[u32], whole: Duration) -> Result<serde_json::Value, EngineError> {
    let mut figures = serde_json::Map::new();
    let mut put = |n: usize, took: Duration| figures.insert(n.to_string(), (took.as_secs_f64() * 1e3).into());
    let lengths = SHORT_PROMPTS.into_iter().filter(|n| *n < prompt.len());
    let bar = progress(3 * lengths.clone().sum::<usize>() as u64, "short prompts", TOKENS_BAR);
    for n in lengths {
        let mut took = Vec::new();
        for _ in 0..3 {
            engine.generate(&prompt[..n], &greedy_options(1))?.try_for_each(|token| token.map(|_| ()))?;
            let stamps = engine.stamps();
            took.push(stamps[stamps.len() - 1] - stamps[0]);
            bar.inc(n as u64);
        }
        took.sort_unstable();
        put(n, took[1]);
    }
    bar.finish_and_clear();
    put(prompt.len(), whole);
    Ok(figures.into())
}

/// How often each number of rows is measured.
const VERIFICATIONS: usize = 9;

/// What passes over the token after `prompt` and 1 to `drafts` guesses of those after it take beyond a step of that
/// token alone, the medians of passes in turn, beside such a `step` among others, in seconds: each of these passes is a
/// run of its own, the beginning and the end of which are in both.
fn verifying(engine: &mut Engine, prompt: &[u32], drafts: usize, step: f64) -> Result<serde_json::Value, EngineError> {
    // Tokens to be read as guesses.
    engine.generate(prompt, &greedy_options(drafts + 1))?.try_for_each(|token| token.map(|_| ()))?;
    let programs = engine.resident().compiled().image.view().programs;
    let verify = programs.iter().position(|program| program.kind == VERIFIES);
    let first_pos = prompt.len() as u32;
    let (n_tokens, max_context) = (first_pos + 1, engine.context() as u32);
    let most = (drafts + 1).min(engine.context() - prompt.len());
    let bar = progress((VERIFICATIONS * most) as u64, "guesses", TOKENS_BAR);
    let mut took = vec![Vec::new(); most];
    for _ in 0..VERIFICATIONS {
        for (rows, took) in (1..).zip(&mut took) {
            let program = if rows == 1 { 0 } else { verify.unwrap_or(0) as u32 };
            let step = Step { program, first_pos, rows, sampling: 1, ..Step::default() };
            let requests = [Request::greedy(1); _];
            let control = Control { n_tokens, max_context, requests, step, ..bytemuck::Zeroable::zeroed() };
            engine.resident_mut().start(control);
            engine.resident_mut().finish()?;
            let stamps = engine.stamps();
            took.push(stamps[stamps.len() - 1] - stamps[0]);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    took.iter_mut().for_each(|took| took.sort_unstable());
    let alone = quantile(&took[0], 0.5);
    let figure = |(guesses, took): (usize, &Vec<Duration>)| {
        let pass = step + quantile(took, 0.5) - alone;
        let text = format!("{:.3} ms, {:.2} times a step", pass * 1e3, pass / step.max(1e-12));
        (format!("{guesses}_guesses"), serde_json::Value::from(text))
    };
    Ok(took.iter().enumerate().skip(1).map(figure).collect::<serde_json::Map<_, _>>().into())
}

/// What another way through the GPU's code makes of the same prompts, by its `runs`, beside `run`.
fn beside(runs: &[Run], run: &Run, keeps_bits: bool, way: &str) -> Result<serde_json::Value, String> {
    let other = &runs[runs.len() / 2];
    let same = other.tokens.iter().zip(&run.tokens).take_while(|(a, b)| a == b).count();
    // Where sums have another order, or rows no flags in their numbers, and two tokens are as likely, another may be
    // made.
    if keeps_bits && other.tokens != run.tokens {
        return Err(format!("{way}: other tokens, from number {same} on"));
    }
    Ok(json!({
        "step_ms_median": other.median() * 1e3,
        "step_ms_of_runs": spread(runs),
        "times_the_persistent_step": other.median() / run.median().max(1e-12),
        "times_the_prompt": other.prefill.as_secs_f64() / run.prefill.as_secs_f64().max(1e-12),
        "same_tokens": same,
    }))
}

/// The same prompts without `technique`, which `run` had.
fn without_one(
    args: &Args,
    engine: &mut Engine,
    prompts: &[Vec<u32>],
    run: &Run,
    technique: Technique,
) -> Result<serde_json::Value, Box<dyn std::error::Error>> {
    if let Some(cuda) = engine.resident_mut().cuda() {
        cuda.leave_out(args.model.without.set().with(technique));
    }
    let runs = Run::several(args, engine, prompts)?;
    Ok(beside(&runs, run, technique.keeps_bits(), &format!("without {}", technique.name()))?)
}

/// What was measured of a text model, and why something was not.
pub(super) struct Measured {
    pub(super) figures: serde_json::Value,
    pub(super) failures: Vec<String>,
}

impl Measured {
    /// What `found` is, unless it failed.
    fn found<T>(&mut self, what: &str, found: Result<T, Box<dyn std::error::Error>>) -> Option<T> {
        found.map_err(|error| self.failures.push(format!("{what}: {error}"))).ok()
    }

    /// Adds what was found as the figure of this name, which may be that of a part of one.
    fn add(&mut self, name: &[&str], found: Result<serde_json::Value, Box<dyn std::error::Error>>) {
        if let Some(found) = self.found(&name.join(" "), found) {
            *name.iter().fold(&mut self.figures, |figures, name| &mut figures[*name]) = found;
        }
    }
}

/// The figures of a text model, all of them.
pub(super) fn whole(args: &Args, model: &Model) -> Result<serde_json::Value, Box<dyn std::error::Error>> {
    let Measured { figures, failures } = generator(args, model, &mut |_| Ok(()))?;
    if failures.is_empty() { Ok(figures) } else { Err(failures.join("; ").into()) }
}

/// The same prompts by an engine of its own, made as `config` says, whose numbers are `run`'s if it `keeps_bits`.
fn by_another(
    args: &Args,
    model: &Model,
    config: &EngineConfig,
    prompts: &[Vec<u32>],
    run: &Run,
    keeps_bits: bool,
    name: &str,
) -> Result<serde_json::Value, Box<dyn std::error::Error>> {
    let mut engine = super::resident(model, config)?;
    warm_up(args, &mut engine, &prompts[0])?;
    let runs = Run::several(args, &mut engine, prompts)?;
    let mut figures = beside(&runs, run, keeps_bits, name)?;
    if config.cuda.mode == Mode::PerOperator {
        let compiled = engine.resident().compiled();
        figures["launches_per_step"] = operators(&compiled.image, decoding(args, compiled)).len().into();
    }
    Ok(figures)
}

/// The program of the steps that are measured: a batch's comes last, that of one sequence first.
fn decoding(args: &Args, compiled: &Compiled) -> usize {
    if args.batch.is_some() { compiled.programs.len() - 1 } else { 0 }
}

/// The fastest and the slowest of `runs`, which are sorted, in milliseconds a step.
fn spread(runs: &[Run]) -> [f64; 2] {
    [&runs[0], &runs[runs.len() - 1]].map(|run| run.median() * 1e3)
}

/// The figures of a text model; `keep` is called with those there are, before others are measured. Once there is the
/// step's time, what fails ends nothing else.
pub(super) fn generator(
    args: &Args,
    model: &Model,
    keep: &mut dyn FnMut(&serde_json::Value) -> Outcome,
) -> Result<Measured, Box<dyn std::error::Error>> {
    let mut bench = Bench::new(args, model)?;
    let mut measured = Measured { figures: json!({}), failures: Vec::new() };
    let taken = bench.take(&mut measured)?;
    measured.figures = bench.figures(&taken);
    // The first token's pass is the prompt's last.
    if bench.gpu.is_some() && args.batch.is_none() {
        keep(&measured.figures)?;
        let read = bench.bytes_read(TRACED_TOKENS.min(args.tokens) - 1);
        let runs_on = bench.runs_on();
        let loss = losses(args, &mut bench.engine, &bench.prompts[0], &runs_on);
        measured.add(&["loss"], loss.map(|loss| loss.table(read, taken.bandwidth)));
    }
    if let Some(drafts) = args.prompt_lookup {
        keep(&measured.figures)?;
        measured.add(&["verifying"], bench.verified(drafts, &taken));
    }
    if let Some(quantized) = model.quantized() {
        measured.figures["quantized_weights"] = bytes(quantized.size_bytes()).into();
        measured.add(&["accuracy"], accuracy(args, model, quantized.how(), &bench.prompts[0]).map(Into::into));
    }
    // Last: it takes the engine apart.
    if args.compare {
        bench.compare(taken.run(), &mut measured, keep)?;
    }
    Ok(measured)
}

/// A text model that is resident, and what it is to read.
struct Bench<'a> {
    args: &'a Args,
    model: &'a Model,
    config: EngineConfig,
    engine: Engine,
    gpu: Option<Gpu>,
    context: usize,
    /// Of each sequence.
    prompts: Vec<Vec<u32>>,
    load: Duration,
}

/// What was measured of it.
struct Taken {
    /// By their steps' medians.
    runs: Vec<Run>,
    /// Seconds a step of one sequence takes, where several are decoded together.
    alone: Option<f64>,
    /// Where one is.
    first_token: Option<serde_json::Value>,
    /// Bytes a second; no number, where it could not be measured, so that shares of it are none.
    bandwidth: f64,
    event: Option<Duration>,
}

impl Taken {
    /// The median one.
    fn run(&self) -> &Run {
        &self.runs[self.runs.len() / 2]
    }
}

impl<'a> Bench<'a> {
    fn new(args: &'a Args, model: &'a Model) -> Result<Bench<'a>, Box<dyn std::error::Error>> {
        // The first token comes of reading the prompt; a batch leaves it to a step.
        if args.tokens < 2 && args.batch.is_none() {
            return Err("--tokens 1: no step between two tokens to measure, expected at least 2 without --batch".into());
        }
        let context = args.context.unwrap_or(CONTEXT);
        let needed = context.checked_add(args.tokens).ok_or("--context and --tokens: too many")?;
        if needed > model.max_tokens() {
            return Err(format!(
                "--context {context} --tokens {}: {needed} positions, the model has {}",
                args.tokens,
                model.max_tokens()
            )
            .into());
        }
        if let Some(most) = args.model.max_context.filter(|most| *most < needed) {
            return Err(format!("--max-context {most}: --context and --tokens need {needed} positions").into());
        }
        let began = Instant::now();
        let usual = args.model.config(model, needed);
        let traced = cuda::Options { n_trace: loss::TRACED, ..usual.cuda };
        let config = EngineConfig { sequences: args.batch, cuda: traced, ..usual };
        let mut engine = super::resident(model, &config)?;
        if let Some(cuda) = engine.resident_mut().cuda() {
            cuda.set_tracing(false);
        }
        let gpu = engine.resident_mut().cuda().map(|cuda| cuda.gpu().clone());
        if gpu.is_none() && (args.compare || args.trace.is_some() || args.timeline.is_some()) {
            return Err("--compare, --trace and --timeline are for GPUs (--device cuda)".into());
        }
        warm(model)?;
        let load = began.elapsed();
        // Ids spread over the vocabulary by a fixed rule: the same on every machine, others for each sequence.
        let vocab = model.config().vocab_size() as u64;
        let id = |sequence: usize, i: usize| ((sequence * 613 + i) as u64 * 7919 % vocab) as u32;
        let prompt = |sequence| (0..context).map(|i| id(sequence, i)).collect();
        let prompts = (0..args.batch.unwrap_or(1)).map(prompt).collect();
        Ok(Bench { args, model, config, engine, gpu, context, prompts, load })
    }

    fn take(&mut self, measured: &mut Measured) -> Result<Taken, Box<dyn std::error::Error>> {
        let (args, engine, prompt) = (self.args, &mut self.engine, &self.prompts[0]);
        let before = measured.found("bandwidth", bandwidth(engine, self.model));
        let event_before = engine.resident_mut().event_cost();
        warm_up(args, engine, prompt)?;
        // What a batch is compared with: as many steps, of which reading the prompt is none.
        let alone = match args.batch {
            Some(_) => {
                engine.generate(prompt, &greedy_options(args.tokens + 1))?.try_for_each(|token| token.map(|_| ()))?;
                let stamps = engine.stamps();
                Some(quantile(&steps(&stamps[stamps.len() - 1 - args.tokens..]), 0.5))
            }
            None => None,
        };
        let runs = Run::several(args, engine, &self.prompts)?;
        let prefill = runs[runs.len() / 2].prefill;
        let first_token = if args.batch.is_none() { Some(first_token(engine, prompt, prefill)?) } else { None };
        let after = measured.found("bandwidth", bandwidth(engine, self.model));
        let event_after = engine.resident_mut().event_cost();
        let bandwidth = before.into_iter().chain(after).fold(f64::NAN, f64::max);
        Ok(Taken { runs, alone, first_token, bandwidth, event: event_before.into_iter().chain(event_after).min() })
    }

    /// What it runs on.
    fn runs_on(&self) -> String {
        self.gpu.as_ref().map_or_else(|| Isa::best().name().to_owned(), |gpu| gpu.info().name.clone())
    }

    /// Bytes that the step behind so many measured tokens reads: those of one sequence, and as much more of the others'
    /// caches.
    fn bytes_read(&self, tokens: usize) -> u64 {
        let blocks = &self.engine.resident().compiled().programs[0].blocks;
        let [none, own] = [0, self.context + tokens].map(|position| bytes_from_memory(blocks, position));
        none + self.prompts.len() as u64 * (own - none)
    }

    fn figures(&self, taken: &Taken) -> serde_json::Value {
        let (args, run, n_sequences) = (self.args, taken.run(), self.prompts.len());
        let resident = self.engine.resident();
        let decode = &resident.compiled().programs[decoding(args, resident.compiled())];
        let n_workers = resident.compiled().image.header().n_workers as usize;
        let read_tokens = n_sequences * (self.context - usize::from(args.batch.is_some()));
        // Half way through the measured tokens.
        let (read, median) = (self.bytes_read(args.tokens / 2), run.median());
        let rate = read as f64 / median;
        let mut figures = json!({
            "model": args.model.model.display().to_string(),
            "runs_on": self.runs_on(),
            "workers": n_workers,
            "load_s": self.load.as_secs_f64(),
            "compile_ms": resident.compile_time().as_secs_f64() * 1e3,
            "context": self.context,
            "prefill_tokens_per_s": read_tokens as f64 / run.prefill.as_secs_f64().max(1e-9),
            "step_ms_median": median * 1e3,
            "step_ms_p5": quantile(&run.steps, 0.05) * 1e3,
            "step_ms_p95": quantile(&run.steps, 0.95) * 1e3,
            "tokens_per_s": n_sequences as f64 / median,
            "bytes_per_step": bytes(read),
            "read_gb_per_s": rate / 1e9,
            "bandwidth_gb_per_s": taken.bandwidth / 1e9,
            "share_of_bandwidth_percent": 100.0 * rate / taken.bandwidth,
            "tasks_per_step": decode.tasks.tasks.len(),
            "events_per_step": decode.counted.events.len(),
            "waiting_percent": 100.0 * run.waited.as_secs_f64() / (n_workers as f64 * run.whole.as_secs_f64()),
            "memory_beside_weights": bytes(resident.owned_bytes()),
            "peak_rss": peak_rss().map_or("unknown".to_owned(), bytes),
        });
        let mut put = |what: &str, value: serde_json::Value| figures[what] = value;
        if let Some(first_token) = &taken.first_token {
            put("first_token_ms", first_token.clone());
        }
        if let Some(event) = taken.event {
            put("event_ns", (event.as_nanos() as u64).into());
        }
        if taken.runs.len() > 1 {
            put("step_ms_of_runs", json!(spread(&taken.runs)));
        }
        if let Some(alone) = taken.alone {
            put("sequences", n_sequences.into());
            put("tokens_per_s_each", (1.0 / median).into());
            put("tokens_per_s_alone", (1.0 / alone).into());
            put("times_alone", (n_sequences as f64 * alone / median).into());
        }
        figures
    }

    /// What passes cost that verify up to `drafts` guesses.
    fn verified(&self, drafts: usize, taken: &Taken) -> Result<serde_json::Value, Box<dyn std::error::Error>> {
        let most = (self.context + self.args.tokens.max(1 + drafts)).min(self.model.max_tokens());
        let usual = self.args.model.config(self.model, most);
        let mut engine = Engine::new(self.model, &EngineConfig { prompt_lookup: Some(drafts), ..usual })?;
        let step = taken.alone.unwrap_or(taken.run().median());
        Ok(verifying(&mut engine, &self.prompts[0], drafts, step)?)
    }

    /// The same prompts without each technique, and with a launch for each operator, beside `run`.
    fn compare(
        self,
        run: &Run,
        measured: &mut Measured,
        keep: &mut dyn FnMut(&serde_json::Value) -> Outcome,
    ) -> Outcome {
        let Bench { args, model, config, mut engine, prompts, .. } = self;
        let without = args.model.without.set();
        // Flags are compiled: to be without them wants an engine of its own, below.
        let left_out = without.with(Technique::Flags);
        for technique in Technique::ALL.into_iter().filter(|technique| !left_out.has(*technique)) {
            keep(&measured.figures)?;
            let found = without_one(args, &mut engine, &prompts, run, technique);
            measured.add(&["without", technique.name()], found);
        }
        drop(engine);
        let way = |cuda, keeps_bits, name: &str| {
            by_another(args, model, &EngineConfig { cuda, ..config.clone() }, &prompts, run, keeps_bits, name)
        };
        let usual = cuda::Options { without, ..Default::default() };
        if !without.has(Technique::Flags) {
            keep(&measured.figures)?;
            let (keeps_bits, name) = (Technique::Flags.keeps_bits(), Technique::Flags.name());
            let found = way(cuda::Options { without: left_out, ..usual }, keeps_bits, &format!("without {name}"));
            measured.add(&["without", name], found);
        }
        keep(&measured.figures)?;
        let by_operator = cuda::Options { mode: Mode::PerOperator, ..usual };
        measured.add(&["launch_per_operator"], way(by_operator, true, "a launch per operator"));
        Ok(())
    }
}

/// The losses of a traced run after `prompt`, which is written and drawn where `args` say.
fn losses(args: &Args, engine: &mut Engine, prompt: &[u32], runs_on: &str) -> Result<Loss, Box<dyn std::error::Error>> {
    let trace = loss::trace(engine, prompt, &greedy_options(TRACED_TOKENS.min(args.tokens)))?;
    let (name, image) = (args.model.model.display().to_string(), &engine.resident().compiled().image);
    if let Some(path) = &args.trace {
        loss::write_trace(path, &name, image, &trace)?;
    }
    if let Some(path) = &args.timeline {
        let name = args.model.model.file_name().map_or(name.clone(), |name| name.display().to_string());
        let timeline = loss::timeline(&format!("{name} on {runs_on}"), image, &trace);
        write_whole(path, |file| timeline.write(file))?;
    }
    Ok(Loss::of(&trace).ok_or("the trace has no two steps")?)
}

/// The most that weights in 8 bits may cost: mean Kullback-Leibler divergence, as a part of the entropy of what is
/// predicted. One percent more bits for the same text. For 4 bits there is no such bar: what they cost depends on how
/// redundant a network's weights are, and random ones are not at all.
const MAX_LOSS: f64 = 0.01;

/// The logits of quantised weights beside those of the checkpoint's, over the prompt's first positions.
fn accuracy(
    args: &Args,
    quantized: &Model,
    how: Quantize,
    prompt: &[u32],
) -> Result<String, Box<dyn std::error::Error>> {
    let ids = &prompt[..prompt.len().min(64)];
    let logits = |model: &Model| {
        let config = EngineConfig { all_logits: true, chunks: vec![ids.len()], ..args.model.config(model, ids.len()) };
        Engine::new(model, &config)?.logits(ids, |_| ())
    };
    let (ours, exact) = (logits(quantized)?, logits(&Model::load(&args.model.model)?)?);
    let vocab = exact.len() / ids.len();
    let (mut divergences, mut entropy) = (Divergences::default(), 0.0);
    let level = vec![0.0; vocab];
    for (ours, exact) in ours.chunks(vocab).zip(exact.chunks(vocab)) {
        let exact = Prediction::of(exact);
        divergences.add(&exact, &Prediction::of(ours));
        entropy += (vocab as f64).ln() - exact.divergence(&Prediction::of(&level));
    }
    let Divergences { sum, worst, same_choice, .. } = divergences;
    let (verdict, allowed) = match how {
        Quantize::Q4 => ("", String::new()),
        Quantize::Q8 => {
            let verdict = if sum <= MAX_LOSS * entropy { "passed: " } else { "FAILED: " };
            (verdict, format!(" ({} % allowed)", 100.0 * MAX_LOSS))
        }
    };
    Ok(format!(
        "{verdict}mean KL {:.1e} nats, {:.2} % of the entropy{allowed}, worst {worst:.1e}; {same_choice} of {} first choices the same",
        sum / ids.len() as f64,
        100.0 * sum / entropy,
        ids.len()
    ))
}

/// The times between `stamps`, sorted.
fn steps(stamps: &[Instant]) -> Vec<Duration> {
    let mut steps: Vec<Duration> = stamps.windows(2).map(|pair| pair[1] - pair[0]).collect();
    steps.sort_unstable();
    steps
}

fn embedder(args: &Args, model: &Model) -> Result<serde_json::Value, Box<dyn std::error::Error>> {
    args.model.check_sentences(model)?;
    let max = model.max_tokens();
    if let Some(context) = args.context.filter(|context| *context > max) {
        return Err(format!("--context {context}: the model takes sentences of up to {max} tokens").into());
    }
    let began = Instant::now();
    let rows = args.context.unwrap_or(CONTEXT).min(max);
    let mut embedder = Embedder::new(model, &args.model.config(model, rows))?;
    warm(model)?;
    let load = began.elapsed();
    let vocab = model.config().vocab_size() as u64;
    let ids: Vec<u32> = (0..rows as u64).map(|i| (i * 7919 % vocab) as u32).collect();
    embedder.embed_ids(&ids)?;
    let mut times = Vec::new();
    for _ in 0..args.tokens {
        let began = Instant::now();
        embedder.embed_ids(&ids)?;
        times.push(began.elapsed());
    }
    times.sort_unstable();
    Ok(json!({
        "model": args.model.model.display().to_string(),
        "runs_on": match embedder.resident_mut().cuda() {
            Some(cuda) => cuda.gpu().info().name.clone(),
            None => Isa::best().name().to_owned(),
        },
        "workers": embedder.resident().compiled().image.header().n_workers,
        "load_s": load.as_secs_f64(),
        "compile_ms": embedder.resident().compile_time().as_secs_f64() * 1e3,
        "sentence_tokens": rows,
        "sentence_ms_median": quantile(&times, 0.5) * 1e3,
        "sentence_ms_p5": quantile(&times, 0.05) * 1e3,
        "sentence_ms_p95": quantile(&times, 0.95) * 1e3,
        "peak_rss": peak_rss().map_or("unknown".to_owned(), bytes),
    }))
}

/// Seconds below which the fraction `q` of `sorted` lies.
fn quantile(sorted: &[Duration], q: f64) -> f64 {
    match sorted.len() {
        0 => 0.0,
        n => sorted[((n - 1) as f64 * q).round() as usize].as_secs_f64(),
    }
}

/// Bytes per second that the workers of `engine` could read.
fn bandwidth(engine: &mut Engine, model: &Model) -> Result<f64, Box<dyn std::error::Error>> {
    let n_workers = engine.resident().compiled().image.header().n_workers;
    match engine.resident_mut().cuda() {
        // By bulk copies, as loaders read; far more than the second-level cache holds.
        Some(cuda) => {
            let bytes = 40 * u64::from(cuda.gpu().info().l2_bytes);
            let mut prober = Prober::new(cuda.gpu().clone(), bytes)?;
            // The first one finds the clocks of a GPU that has had nothing to do.
            let mut read = || prober.read(n_workers, 16 << 10, 13);
            read()?;
            Ok(median_and_spread(5, read)?.0)
        }
        None => read_bandwidth(model, n_workers as usize),
    }
}

/// Bytes per second that `n_threads` threads read the model's weights with, each a part of its own: the median of five
/// passes. The very bytes a step reads, so that it is compared with what this memory can give.
fn read_bandwidth(model: &Model, n_threads: usize) -> Result<f64, Box<dyn std::error::Error>> {
    let weights = model.weights()?;
    let tensors: Vec<&[u8]> = weights.names().filter_map(|name| model.bytes(name)).collect();
    let total: usize = tensors.iter().map(|tensor| tensor.len()).sum();
    // Every tensor is cut into a piece per thread, so that the pieces of a thread are as many bytes as another's.
    let n_threads = n_threads.clamp(1, usable_cores());
    let pieces = |thread: usize| {
        tensors.iter().map(move |tensor| {
            let piece = tensor.len().div_ceil(n_threads);
            &tensor[(thread * piece).min(tensor.len())..((thread + 1) * piece).min(tensor.len())]
        })
    };
    let pass = || {
        let began = Instant::now();
        std::thread::scope(|scope| {
            for thread in 0..n_threads {
                scope.spawn(move || {
                    for piece in pieces(thread) {
                        std::hint::black_box(bandwidth::read(piece));
                    }
                });
            }
        });
        began.elapsed()
    };
    let mut passes: Vec<Duration> = (0..5).map(|_| pass()).collect();
    passes.sort_unstable();
    Ok(total as f64 / passes[passes.len() / 2].as_secs_f64())
}

/// The most memory this process has had, mapped weights included.
fn peak_rss() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}
