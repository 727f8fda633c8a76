//! `perpetua perplexity`: how well a model predicts a text, and what weights in fewer bits cost it there.
//!
//! The text is read in windows, each from an empty cache, and of each the second half is scored, where every prediction
//! has a context: as llama.cpp's program of this name does it, so that figures compare. A window begins with what the
//! tokenizer puts before a text; tokens at the end that fill no window are not read.

use super::{ModelArgs, Outcome, TOKENS_BAR, at_least, logits, progress, read_text, report, writable};
use perpetua::{Engine, EngineError, Model};
use serde_json::{Value, json};
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The text, UTF-8; - is standard input. With --quantize, the checkpoint's own weights predict it, too, and are
    /// what is compared with.
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Tokens of a window, of which the second half is scored [default: 512, or as many as the model takes, or
    /// --max-context].
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = at_least::<usize>(1))]
    window: Option<usize>,
    /// Write the figures there.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Tokens of a window unless told otherwise.
const WINDOW: usize = 512;

pub(crate) fn run(args: &Args) -> Outcome {
    writable(args.json.as_deref(), [&*args.model.model, &args.text])?;
    let text = read_text(&args.text)?;
    // Before anything that takes long.
    let checkpoint = Model::load(&args.model.model)?;
    checkpoint.decoder()?;
    let windows = windows(args, &checkpoint, &text)?;
    let model = args.model.open()?;
    let engine = |model: &Model| logits::engine(&args.model, model, windows[0].len());
    let mut ours = engine(&model)?;
    let exact = args.model.quantize.map(|_| engine(&checkpoint)).transpose()?;
    let figures = figures(&windows, &mut ours, exact)?;
    report(&figures, args.json.as_deref())
}

/// The windows' token ids. A text of fewer tokens than a window is one.
fn windows(args: &Args, model: &Model, text: &str) -> Result<Vec<Vec<u32>>, Box<dyn std::error::Error>> {
    let before = model.encode("")?;
    let (least, allowed) = (before.len() + 2, model.max_tokens());
    let most = match args.model.max_context {
        // More than the model has is for the engine to refuse.
        Some(context) if context < least => {
            return Err(format!("--max-context {context}: expected {least} or more, the tokens of a window").into());
        }
        context => context.unwrap_or(allowed).min(allowed),
    };
    let window = args.window.unwrap_or(WINDOW.min(most));
    if !(least..=most).contains(&window) {
        return Err(format!("--window {window}: expected {least} to {most} tokens").into());
    }
    let ids = model.encode(text)?;
    let ids = ids.strip_prefix(&before[..]).unwrap_or(&ids);
    if ids.len() < 2 {
        return Err(format!("{}: {} tokens: expected 2 or more", args.text.display(), ids.len()).into());
    }
    let n_new = (window - before.len()).min(ids.len());
    Ok(ids.chunks_exact(n_new).map(|chunk| [&before, chunk].concat()).collect())
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
            let found = Prediction::of(&logits[row.clone()]);
            let nll = found.nll(ids[next]);
            loss.add(nll);
            if let Some(beside) = &beside {
                let expected = Prediction::of(&beside[row]);
                checkpoint.add(expected.nll(ids[next]));
                change.add(nll - expected.nll(ids[next]));
                divergences.add(&expected, &found);
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

    /// `None` of a single one, which says nothing about others.
    fn standard_error(&self) -> Option<f64> {
        let variance = (self.squares / self.n as f64 - self.mean().powi(2)).max(0.0);
        (self.n > 1).then(|| (variance / (self.n as f64 - 1.0)).sqrt())
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
    /// Of a position.
    pub(super) fn add(&mut self, expected: &Prediction, found: &Prediction) {
        let divergence = expected.divergence(found);
        self.n += 1;
        self.sum += divergence;
        self.worst = self.worst.max(divergence);
        self.same_choice += usize::from(expected.first_choice() == found.first_choice());
    }

    pub(super) fn mean(&self) -> f64 {
        self.sum / self.n as f64
    }
}

/// What follows a token, by its logits.
pub(super) struct Prediction<'a> {
    logits: &'a [f32],
    /// ln(sum(exp(logits))).
    log_sum: f64,
}

impl<'a> Prediction<'a> {
    pub(super) fn of(logits: &'a [f32]) -> Self {
        let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let log_sum = max + logits.iter().map(|x| (f64::from(*x) - max).exp()).sum::<f64>().ln();
        Prediction { logits, log_sum }
    }

    /// -ln of the probability of `id`.
    fn nll(&self, id: u32) -> f64 {
        self.log_sum - f64::from(self.logits[id as usize])
    }

    /// The Kullback-Leibler divergence from this of `other`, in nats.
    pub(super) fn divergence(&self, other: &Prediction) -> f64 {
        let pairs = self.logits.iter().zip(other.logits);
        pairs
            .map(|(p, q)| {
                let (lp, lq) = (f64::from(*p) - self.log_sum, f64::from(*q) - other.log_sum);
                lp.exp() * (lp - lq)
            })
            .sum()
    }

    fn first_choice(&self) -> Option<usize> {
        (0..self.logits.len()).max_by(|a, b| self.logits[*a].total_cmp(&self.logits[*b]))
    }
}
