//! `perpetua perplexity`: how well a model predicts a text, and what weights in fewer bits cost it there.
//!
//! The text is read in windows, each from an empty cache, and of each the second half is scored, where every prediction has
//! a context: as llama.cpp's program of this name does it, so that figures compare. A window begins with what the
//! tokenizer puts before a text; tokens at the end that fill no window are not read.

use super::{ModelArgs, Outcome, TOKENS_BAR, progress, report, resident, warm, writable};
use perpetua::{Engine, EngineConfig, EngineError, Model};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The text, UTF-8. With --quantize, the checkpoint's own weights predict it, too, and are what is compared with.
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Tokens of a window, of which the second half is scored [default: 512, or as many as the model takes].
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    window: Option<usize>,
    /// Write the figures there.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Tokens of a window unless told otherwise.
const WINDOW: usize = 512;

/// Rows of a pass: logits of more at once would cost memory for nothing.
const CHUNK: usize = 128;

pub(crate) fn run(args: &Args) -> Outcome {
    writable(args.json.as_deref())?;
    let text = read(&args.text)?;
    // Before anything that takes long.
    let checkpoint = Model::load(&args.model.model)?;
    checkpoint.decoder()?;
    let windows = windows(args, &checkpoint, &text)?;
    let model = args.model.open()?;
    let mut engine = engine(args, &model, &windows)?;
    let beside = args.model.quantize.map(|_| self::engine(args, &checkpoint, &windows)).transpose()?;
    let figures = figures(&windows, &mut engine, beside)?;
    report(&figures, args.json.as_deref())
}

fn read(path: &Path) -> Result<String, String> {
    let fail = |what: &str| format!("{}: {what}", path.display());
    let bytes = std::fs::read(path).map_err(|error| fail(&super::plain(&error)))?;
    String::from_utf8(bytes).map_err(|error| fail(&format!("byte {} is not UTF-8", error.utf8_error().valid_up_to())))
}

/// The windows' token ids. A text of fewer tokens than a window is one.
fn windows(args: &Args, model: &Model, text: &str) -> Result<Vec<Vec<u32>>, Box<dyn std::error::Error>> {
    let window = args.window.unwrap_or(WINDOW.min(model.max_tokens()));
    let before = model.encode("").unwrap_or_default();
    let least = before.len() + 2;
    if !(least..=model.max_tokens()).contains(&window) {
        return Err(format!("--window {window}: expected {least} to {} tokens", model.max_tokens()).into());
    }
    let ids = model.encode(text)?;
    let ids = ids.strip_prefix(&before[..]).unwrap_or(&ids);
    if ids.len() < 2 {
        return Err(format!("{}: {} tokens: expected 2 or more", args.text.display(), ids.len()).into());
    }
    let n_new = (window - before.len()).min(ids.len());
    Ok(ids.chunks_exact(n_new).map(|chunk| [&before, chunk].concat()).collect())
}

fn engine(args: &Args, model: &Model, windows: &[Vec<u32>]) -> Result<Engine, Box<dyn std::error::Error>> {
    let len = windows[0].len();
    let config = EngineConfig { all_logits: true, chunks: vec![len.min(CHUNK)], ..args.model.config(model, len) };
    let engine = resident(model, &config)?;
    warm(model)?;
    Ok(engine)
}

/// What the windows' scored tokens cost, and how far the predictions are from `exact`'s.
fn figures(
    windows: &[Vec<u32>],
    engine: &mut Engine,
    mut exact: Option<Engine>,
) -> Result<Value, Box<dyn std::error::Error>> {
    let read: usize = windows.iter().map(Vec::len).sum();
    let n_engines = 1 + u64::from(exact.is_some());
    let bar = progress(n_engines * read as u64, "reading", TOKENS_BAR);
    let (mut loss, mut checkpoint, mut change) = (Mean::default(), Mean::default(), Mean::default());
    let mut divergences = Divergences::default();
    for ids in windows {
        let logits_of = |engine: &mut Engine| -> Result<Vec<f32>, EngineError> {
            let before = bar.position();
            engine.logits(ids, |done| bar.set_position(before + done as u64))
        };
        let logits = logits_of(engine)?;
        let beside = exact.as_mut().map(logits_of).transpose()?;
        let vocab = logits.len() / ids.len();
        for next in ids.len().div_ceil(2)..ids.len() {
            // What follows a token is predicted in its row.
            let row = (next - 1) * vocab..next * vocab;
            let found = &logits[row.clone()];
            let nll = nll(found, ids[next]);
            loss.add(nll);
            if let Some(beside) = &beside {
                let expected = &beside[row];
                let expected_nll = self::nll(expected, ids[next]);
                checkpoint.add(expected_nll);
                change.add(nll - expected_nll);
                divergences.add(expected, found);
            }
        }
    }
    bar.finish_and_clear();
    let mut figures = json!({
        "tokens_read": read,
        "tokens_scored": loss.n,
        "nll_nats": loss.mean(),
        "nll_standard_error": loss.standard_error(),
        "perplexity": loss.mean().exp(),
    });
    if exact.is_some() {
        figures["checkpoint"] = json!({
            "nll_nats": checkpoint.mean(),
            "perplexity": checkpoint.mean().exp(),
        });
        figures["change"] = json!({
            "nll_nats": change.mean(),
            "nll_standard_error": change.standard_error(),
            "perplexity_percent": 100.0 * change.mean().exp_m1(),
            "mean_kl_nats": divergences.mean(),
            "worst_kl_nats": divergences.worst,
            "same_first_choice_percent": 100.0 * divergences.same_choice as f64 / divergences.n as f64,
        });
    }
    Ok(figures)
}

/// A mean of independent figures.
#[derive(Default)]
struct Mean {
    n: usize,
    sum: f64,
    squares: f64,
}

impl Mean {
    fn add(&mut self, x: f64) {
        self.n += 1;
        self.sum += x;
        self.squares += x * x;
    }

    fn mean(&self) -> f64 {
        self.sum / self.n as f64
    }

    fn standard_error(&self) -> f64 {
        let variance = (self.squares / self.n as f64 - self.mean().powi(2)).max(0.0);
        (variance / (self.n as f64 - 1.0).max(1.0)).sqrt()
    }
}

/// How far predictions are from those they should be, over some positions.
#[derive(Default)]
pub(super) struct Divergences {
    /// Positions.
    pub(super) n: usize,
    /// Sum of Kullback-Leibler divergences, nats.
    pub(super) sum: f64,
    /// The largest of them.
    pub(super) worst: f64,
    /// Positions with the same likeliest token.
    pub(super) same_choice: usize,
}

impl Divergences {
    /// A position's logits.
    pub(super) fn add(&mut self, expected: &[f32], found: &[f32]) {
        let divergence = divergence(expected, found);
        self.n += 1;
        self.sum += divergence;
        self.worst = self.worst.max(divergence);
        self.same_choice += usize::from(argmax(expected) == argmax(found));
    }

    pub(super) fn mean(&self) -> f64 {
        self.sum / self.n as f64
    }
}

/// ln(sum(exp(x))).
fn log_sum(x: &[f32]) -> f64 {
    let max = f64::from(x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    max + x.iter().map(|v| (f64::from(*v) - max).exp()).sum::<f64>().ln()
}

/// -ln(softmax(logits)[id]).
fn nll(logits: &[f32], id: u32) -> f64 {
    log_sum(logits) - f64::from(logits[id as usize])
}

/// KL(softmax(p) || softmax(q)), in nats.
pub(super) fn divergence(p: &[f32], q: &[f32]) -> f64 {
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
