//! `perpetua bench`: step times, and the share of the read bandwidth measured in the same run.

use super::{ModelArgs, Outcome, TOKENS_BAR, bytes, is_generator, progress, warm, write_whole};
use perpetua::cuda::probe::Prober;
use perpetua::exec::memory::WeightSource;
use perpetua::exec::threads::allowed_cores;
use perpetua::{Embedder, Engine, EngineConfig, GenerateOptions, Model};
use perpetua_device::cpu::bandwidth;
use perpetua_device::cpu::simd::Isa;
use serde_json::json;
use std::path::PathBuf;
use std::time::{Duration, Instant};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Prompt tokens before the measured ones.
    #[arg(long, value_name = "N", default_value_t = 128)]
    context: usize,
    /// Tokens to measure (sentences, for an embedding model).
    #[arg(long, value_name = "N", default_value_t = 32)]
    tokens: usize,
    /// Decode this many sequences together, every pass over the weights making a token for each (text models on the CPU).
    #[arg(long, value_name = "N")]
    batch: Option<usize>,
    /// Write the figures there.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Args {
    /// Of `model`, `tokens` tokens after `context`.
    pub(super) fn of(model: ModelArgs, context: usize, tokens: usize) -> Args {
        Args { model, context, tokens, batch: None, json: None }
    }
}

pub(crate) fn run(args: &Args) -> Outcome {
    if args.context == 0 || args.tokens == 0 {
        return Err(format!("--context {} --tokens {}: expected at least 1 of each", args.context, args.tokens).into());
    }
    let model = args.model.open()?;
    if args.batch.is_some() && !is_generator(&model) {
        return Err("--batch is for text models: sentences are embedded one by one".into());
    }
    let figures = if is_generator(&model) { generator(args, &model)? } else { embedder(args, &model)? };
    for (name, value) in figures.as_object().into_iter().flatten() {
        match value {
            serde_json::Value::Number(n) if n.is_f64() => println!("{name:28} {:.3}", n.as_f64().unwrap_or(0.0)),
            serde_json::Value::String(text) => println!("{name:28} {text}"),
            value => println!("{name:28} {value}"),
        }
    }
    if let Some(path) = &args.json {
        write_whole(path, |file| writeln!(file, "{figures:#}"))?;
    }
    Ok(())
}

pub(super) fn generator(args: &Args, model: &Model) -> Result<serde_json::Value, Box<dyn std::error::Error>> {
    let vocab = model.config().vocab_size() as u64;
    let needed = args.context.checked_add(args.tokens).ok_or("--context and --tokens: too many")?;
    if needed > model.max_tokens() {
        return Err(format!(
            "--context {} --tokens {}: {needed} positions, the model has {}",
            args.context,
            args.tokens,
            model.max_tokens()
        )
        .into());
    }
    if let Some(context) = args.model.max_context.filter(|context| *context < needed) {
        return Err(format!("--max-context {context}: --context and --tokens need {needed} positions").into());
    }
    let began = Instant::now();
    let config = EngineConfig { sequences: args.batch, ..args.model.config(model, needed) };
    let mut engine = super::resident(model, &config)?;
    warm(model)?;
    let load = began.elapsed();
    // Ids spread over the vocabulary by a fixed rule: the same on every machine, others for each sequence.
    let n_sequences = args.batch.unwrap_or(1);
    let id = |sequence: usize, i: usize| ((sequence * 613 + i) as u64 * 7919 % vocab) as u32;
    let prompts: Vec<Vec<u32>> =
        (0..n_sequences).map(|sequence| (0..args.context).map(|i| id(sequence, i)).collect()).collect();
    let prompt = &prompts[0];
    let options = GenerateOptions { max_new_tokens: args.tokens, stop_tokens: Some(Vec::new()), ..Default::default() };
    let n_threads = engine.resident().compiled().image.header().n_workers as usize;
    let before = bandwidth(&mut engine, model)?;
    // One short run first, so that pages and clocks are warm.
    let warm_up = GenerateOptions { max_new_tokens: 2.min(args.tokens), ..options.clone() };
    engine.generate(&prompt[..prompt.len().min(8)], &warm_up)?.try_for_each(|token| token.map(|_| ()))?;
    let bar = progress((n_sequences * args.tokens) as u64, "measuring", TOKENS_BAR);
    // What a batch is compared with: as many steps, of which reading the prompt is none.
    let alone = match args.batch {
        Some(_) => {
            let one = GenerateOptions { max_new_tokens: args.tokens + 1, ..options.clone() };
            engine.generate(prompt, &one)?.try_for_each(|token| token.map(|_| ()))?;
            let stamps = engine.stamps();
            Some(quantile(&steps(&stamps[stamps.len() - 1 - args.tokens..]), 0.5))
        }
        None => None,
    };
    let waited = engine.resident().waited();
    if args.batch.is_some() {
        engine.generate_batch(&prompts, &options)?.try_for_each(|token| token.map(|_| bar.inc(1)))?;
    } else {
        engine.generate(prompt, &options)?.try_for_each(|token| token.map(|_| bar.inc(1)))?;
    }
    bar.finish_and_clear();
    let after = bandwidth(&mut engine, model)?;
    let waited = engine.resident().waited() - waited;
    let stamps = engine.stamps();
    // Reading a prompt alone makes its first token; a batch leaves the prompts' last tokens to its first step.
    let (first, read_tokens) = match args.batch {
        Some(_) => (stamps.len() - args.tokens - 1, n_sequences * (args.context - 1)),
        None => (stamps.len() - args.tokens, args.context),
    };
    let prefill = stamps[first] - stamps[0];
    let steps = steps(&stamps[first..]);
    let programs = &engine.resident().compiled().programs;
    let decode: &perpetua::compile::Program = &programs[if args.batch.is_some() { programs.len() - 1 } else { 0 }];
    // The cache is planned in full; a step reads as much of it as there is: half way through the measured tokens.
    let read = step_bytes(&programs[0], model, args.context + args.tokens / 2, engine.context(), n_sequences);
    let bandwidth = before.max(after);
    let (tasks, events) = (decode.tasks.tasks.len(), decode.tasks.events.len());
    let (compile, owned) = (engine.resident().compile_time(), engine.resident().owned_bytes());
    let median = quantile(&steps, 0.5);
    let rate = read as f64 / median.max(1e-12);
    let runs_on = match engine.resident_mut().cuda() {
        Some(cuda) => cuda.gpu().info().name.clone(),
        None => Isa::best().name().to_owned(),
    };
    drop(engine);
    let mut figures = json!({
        "model": args.model.model.display().to_string(),
        "runs_on": runs_on,
        "workers": n_threads,
        "load_s": load.as_secs_f64(),
        "compile_ms": compile.as_secs_f64() * 1e3,
        "context": args.context,
        "prefill_tokens_per_s": read_tokens as f64 / prefill.as_secs_f64().max(1e-9),
        "step_ms_median": median * 1e3,
        "step_ms_p5": quantile(&steps, 0.05) * 1e3,
        "step_ms_p95": quantile(&steps, 0.95) * 1e3,
        "tokens_per_s": n_sequences as f64 / median.max(1e-12),
        "bytes_per_step": bytes(read),
        "read_gb_per_s": rate / 1e9,
        "bandwidth_gb_per_s": bandwidth / 1e9,
        "share_of_bandwidth_percent": 100.0 * rate / bandwidth,
        "tasks_per_step": tasks,
        "events_per_step": events,
        "waiting_percent": 100.0 * waited.as_secs_f64()
            / (n_threads as f64 * (stamps[stamps.len() - 1] - stamps[0]).as_secs_f64()),
        "memory_beside_weights": bytes(owned),
        "peak_rss": peak_rss().map_or("unknown".to_owned(), bytes),
    });
    if let (Some(alone), Some(figures)) = (alone, figures.as_object_mut()) {
        figures.insert("sequences".into(), n_sequences.into());
        figures.insert("tokens_per_s_each".into(), (1.0 / median.max(1e-12)).into());
        figures.insert("tokens_per_s_alone".into(), (1.0 / alone.max(1e-12)).into());
        figures.insert("times_alone".into(), (n_sequences as f64 * alone / median.max(1e-12)).into());
    }
    if let (Some(quantized), Some(figures)) = (model.quantized(), figures.as_object_mut()) {
        figures.insert("quantized_weights".into(), bytes(quantized.size_bytes()).into());
        figures.insert("accuracy".into(), accuracy(args, model, prompt)?.into());
    }
    Ok(figures)
}

/// The most that quantised weights may cost: mean Kullback-Leibler divergence, as a part of the entropy of what is
/// predicted. One percent more bits for the same text.
const MAX_LOSS: f64 = 0.01;

/// The logits of quantised weights beside those of the checkpoint's, over the prompt's first positions.
fn accuracy(args: &Args, quantized: &Model, prompt: &[u32]) -> Result<String, Box<dyn std::error::Error>> {
    let ids = &prompt[..prompt.len().min(64)];
    let logits = |model: &Model| {
        let config = EngineConfig { all_logits: true, chunks: vec![ids.len()], ..args.model.config(model, ids.len()) };
        Engine::new(model, &config)?.logits(ids, |_| ())
    };
    let (ours, exact) = (logits(quantized)?, logits(&Model::load(&args.model.model)?)?);
    let vocab = exact.len() / ids.len();
    let (mut sum, mut worst, mut agree, mut entropy) = (0.0, 0f64, 0, 0.0);
    for (ours, exact) in ours.chunks(vocab).zip(exact.chunks(vocab)) {
        let divergence = divergence(exact, ours);
        sum += divergence;
        entropy += (vocab as f64).ln() - self::divergence(exact, &vec![0.0; vocab]);
        worst = worst.max(divergence);
        agree += usize::from(argmax(ours) == argmax(exact));
    }
    let verdict = if sum <= MAX_LOSS * entropy { "passed" } else { "FAILED" };
    Ok(format!(
        "{verdict}: mean KL {:.1e} nats, {:.2} % of the entropy ({} % allowed), worst {worst:.1e}; {agree} of {} first choices the same",
        sum / ids.len() as f64,
        100.0 * sum / entropy,
        100.0 * MAX_LOSS,
        ids.len()
    ))
}

/// KL(softmax(p) || softmax(q)), in nats.
pub(super) fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let log_sum = |x: &[f32]| {
        let max = f64::from(x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        max + x.iter().map(|v| (f64::from(*v) - max).exp()).sum::<f64>().ln()
    };
    let (zp, zq) = (log_sum(p), log_sum(q));
    p.iter()
        .zip(q)
        .map(|(p, q)| {
            let (lp, lq) = (f64::from(*p) - zp, f64::from(*q) - zq);
            lp.exp() * (lp - lq)
        })
        .sum()
}

fn argmax(x: &[f32]) -> Option<usize> {
    (0..x.len()).max_by(|a, b| x[*a].total_cmp(&x[*b]))
}

/// The times between `stamps`, sorted.
fn steps(stamps: &[Instant]) -> Vec<Duration> {
    let mut steps: Vec<Duration> = stamps.windows(2).map(|pair| pair[1] - pair[0]).collect();
    steps.sort_unstable();
    steps
}

/// Bytes a decode step reads with `position` tokens in each of `sequences` caches: those of `program`, the step of one
/// sequence over a cache planned for `context`, and as much more of the other caches.
fn step_bytes(
    program: &perpetua::compile::Program,
    model: &Model,
    position: usize,
    context: usize,
    sequences: usize,
) -> u64 {
    let all: u64 = program.costs.iter().map(|cost| cost.bytes_read).sum();
    let cache = model.decoder().map_or(0, |c| 2 * c.n_layers * c.n_kv_heads * c.head_dim * 2) as u64;
    all.saturating_sub(cache * context as u64) + cache * (sequences * position.min(context)) as u64
}

fn embedder(args: &Args, model: &Model) -> Result<serde_json::Value, Box<dyn std::error::Error>> {
    let began = Instant::now();
    let mut embedder = Embedder::new(model, &args.model.config(model, usize::MAX))?;
    warm(model)?;
    let load = began.elapsed();
    let rows = args.context.min(model.max_tokens());
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
        Some(cuda) => Ok(Prober::new(cuda.gpu().clone(), 2 << 30)?.read(n_workers, 16 << 10, 13)?),
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
    let n_threads = n_threads.clamp(1, allowed_cores().len().max(1));
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
