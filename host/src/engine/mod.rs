//! A model, compiled and resident: token ids in, tokens, logits or embeddings out.
//!
//! ```no_run
//! use perpetua::{Engine, EngineConfig, GenerateOptions, Model};
//!
//! let model = Model::load("path/to/Qwen3-0.6B")?;
//! let mut engine = Engine::new(&model, &EngineConfig::default())?;
//! let prompt = model.encode("The licence gives every user the freedom to")?;
//! for token in engine.generate(&prompt, &GenerateOptions::default())? {
//!     print!("{}", token?.text);
//! }
//! # Ok::<(), perpetua::EngineError>(())
//! ```

mod batch;
mod embedder;
mod generation;
mod resident;
mod text;

use generation::{Made, Run};
use resident::Place;
use text::Text;

pub use crate::exec::Stopper;
pub use batch::BatchGeneration;
pub use embedder::{Embedder, passing_dtype};
pub use generation::Generation;
pub use resident::Resident;

use crate::compile::{CompileError, Source};
use crate::cuda::{Gpu, GpuError};
use crate::exec::cuda::CudaNewError;
use crate::exec::memory::{MemoryError, available_bytes};
use crate::exec::{RunError, cuda, threads};
use crate::graph::kernel::PromptPrecision;
use crate::model::decoder::{BuildError, Cache, Declared, Head};
use crate::model::{self, ModelConfig, ModelError, ModelFolder, PENALTIES, Quantize, Quantized, is_penalty};
use perpetua_shared::control::{Control, End, NO_PROGRAM, Request};
use perpetua_shared::image::{EVERY_SEQUENCE, VERIFIES};
use perpetua_shared::limits::{MAX_DRAFTS, MAX_PROGRAMS, MAX_SEQUENCES, MAX_STOP_TOKENS};
use perpetua_shared::{DType, ProgramId};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A model folder, opened. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Model {
    folder: Arc<ModelFolder>,
    quantized: Option<Arc<Quantized>>,
}

impl Model {
    /// Opens the model in folder `dir`: its configuration now, tokenizer and weights when they are first needed (of a
    /// tied head the weights now, which say whether it is). Weights are mapped, not copied: their files must not be
    /// changed as long as there is a clone of this or an engine with it. Truncating one ends the process (SIGBUS).
    ///
    /// # Errors
    /// What is missing in the folder, or what its configuration asks for that this library does not do.
    pub fn load(dir: impl AsRef<Path>) -> Result<Model, ModelError> {
        Ok(Model { folder: Arc::new(ModelFolder::open(dir)?), quantized: None })
    }

    /// The same model with its matrices in fewer bits (see [`model::quantize`]), held in memory. `progress` is
    /// called with the bytes of every matrix read.
    ///
    /// ```no_run
    /// # use perpetua::{Model, Quantize};
    /// let model = Model::load("path/to/Qwen3-0.6B")?.quantize(Quantize::Q8, |_| {})?;
    /// # Ok::<(), perpetua::EngineError>(())
    /// ```
    ///
    /// # Errors
    /// An encoder; weights that are missing, misshapen or not finite; too little memory.
    pub fn quantize(&self, how: Quantize, mut progress: impl FnMut(u64)) -> Result<Model, EngineError> {
        if self.config().architecture().is_encoder() {
            let (given, expected) =
                (format!("{how} of an encoder"), "a decoder: only these have weights in fewer bits");
            return Err(EngineError::option("quantize", given, expected));
        }
        let tensors = model::layout::tensors(self.config());
        let weights = self.weights()?;
        let needed = Quantized::needed(weights, &tensors, how);
        if let Some(available) = available_bytes()
            && needed > available
        {
            let what = format!("weights in {how}");
            return Err(MemoryError::TooLarge { what, bytes: needed, available }.into());
        }
        let quantized = Quantized::new(weights, &tensors, how, &mut progress)?;
        Ok(Model { folder: self.folder.clone(), quantized: Some(Arc::new(quantized)) })
    }

    /// Makes what the network reads in another form or order than files have it in, gpt-oss's experts and others, in
    /// memory, on all cores, if that has not been done: an [`Engine`] does, without saying how far it is. `progress` is
    /// called with bytes that have been made, of as many as [`Weights::unmade_bytes`](model::Weights::unmade_bytes)
    /// says.
    ///
    /// # Errors
    /// Weights that are missing, misshapen or not numbers; too little memory.
    pub fn unpack(&self, mut progress: impl FnMut(u64)) -> Result<(), EngineError> {
        if self.quantized.is_some() {
            // They are there.
            return Ok(());
        }
        let weights = self.weights()?;
        let needed = weights.unmade_bytes();
        if let Some(available) = available_bytes()
            && needed > available
        {
            return Err(MemoryError::TooLarge {
                what: "weights in the order in which the network reads them".to_owned(),
                bytes: needed,
                available,
            }
            .into());
        }
        Ok(weights.make_all(&mut progress)?)
    }

    /// How its weights were quantised, if they were.
    pub fn quantized(&self) -> Option<&Quantized> {
        self.quantized.as_deref()
    }
}

impl std::ops::Deref for Model {
    type Target = ModelFolder;
    fn deref(&self) -> &ModelFolder {
        &self.folder
    }
}

/// Where an engine runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Device {
    /// [`Device::Cuda`] where there is a GPU that runs this build's code, else [`Device::Cpu`].
    #[default]
    Auto,
    /// Resident CPU threads.
    Cpu,
    /// One thread, plain loops in f32: the definition of correct, and slow.
    Reference,
    /// An NVIDIA GPU.
    Cuda,
    /// The GPU's code on a simulated GPU that judges every access: for those who write it, and slow.
    Simt,
    /// What rustc made of the GPU's code, its PTX, run instruction by instruction: for those who write it.
    Ptx,
}

/// How an engine is made.
#[derive(Clone, Debug, Default)]
pub struct EngineConfig {
    /// Where it runs.
    pub device: Device,
    /// CPU workers, `None`: one per core this process may use, no more than a quota of CPU time lasts for; SMs of a
    /// GPU, `None`: all; or simulated SMs, `None`: 4.
    pub threads: Option<usize>,
    /// Positions of the KV cache; `None`: the model's context, at most [`DEFAULT_MAX_CONTEXT`].
    pub max_context: Option<usize>,
    /// Compile passes that give every row's logits instead of passes that choose tokens.
    pub all_logits: bool,
    /// Rows of the passes to compile for prompts, each a program of its own; empty: [`DEFAULT_CHUNKS`], or on a GPU
    /// [`GPU_CHUNKS`].
    pub chunks: Vec<usize>,
    /// Compile a pass that decodes this many sequences together, each with a KV cache of its own, for
    /// [`Engine::generate_batch`]: 1 to [`MAX_SEQUENCES`].
    pub sequences: Option<usize>,
    /// Guess at most this many tokens, 1 to [`MAX_DRAFTS`], of what may follow the next one, wherever the text's last
    /// tokens have stood in it before, prompt included (prompt lookup decoding), and verify them in the pass that makes
    /// the next one: a text that repeats what it was given takes fewer passes. What [`Engine::generate`] makes stays
    /// the same, on the CPU to the bit, draws included; on a GPU passes of several rows round what they multiply to
    /// bf16. Batches do without, and so does a launch per operator.
    pub prompt_lookup: Option<usize>,
    /// The GPU of [`Device::Cuda`]; `None`: the first that will do, see [`Gpu::open`]. Here a program gives a context
    /// and a stream of its own.
    pub gpu: Option<Gpu>,
    /// How CPU workers behave, and where they run.
    pub cpu: threads::Options,
    /// How the kernel on the GPU behaves.
    pub cuda: cuda::Options,
    /// Operators launched just in time, by their names or their macro kernels': see
    /// [`compile::Config::just_in_time`](crate::compile::Config::just_in_time).
    pub just_in_time: Vec<String>,
    /// With which numbers prompts are read on the CPU; [`Device::Auto`] is the CPU where that is to be exact.
    pub prompt_precision: PromptPrecision,
}

/// The context an engine has unless told otherwise: what a KV cache may take without being asked for.
pub const DEFAULT_MAX_CONTEXT: usize = 4096;

/// Rows of the passes that read prompts: a short one for short prompts, a long one that reads the weights seldom.
pub const DEFAULT_CHUNKS: [usize; 3] = [8, 32, 128];

/// [`DEFAULT_CHUNKS`] where products are a tensor core's, of 64 rows at least: fewer take as long. A pass of twice as
/// many rows as a prompt has gives half of the workers nothing to multiply.
pub const GPU_CHUNKS: [usize; 4] = [64, 128, 256, 512];

/// Why an engine cannot be made or cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The model folder.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The network.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The compiler.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The run.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The system gives no threads.
    #[error("cannot start a thread: {0}")]
    Threads(std::io::Error),
    /// The GPU.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// No tokens to start from.
    #[error("the prompt is empty: expected at least one token")]
    EmptyPrompt,
    /// More tokens than the context holds.
    #[error(
        "the prompt has {tokens} tokens, but the context holds {context} (the model allows {model}; see EngineConfig::max_context)"
    )]
    PromptTooLong {
        /// Given.
        tokens: usize,
        /// Positions of this engine's cache.
        context: usize,
        /// Positions the model allows.
        model: usize,
    },
    /// A context the model was not made for.
    #[error("max context {asked}: expected 1 to {model}, the context of this model")]
    Context {
        /// Asked for.
        asked: usize,
        /// Allowed.
        model: usize,
    },
    /// More prompts than the engine was made for, or none.
    #[error(
        "{prompts} prompts given, expected 1 to {sequences}, the sequences this engine was made for (see EngineConfig::sequences)"
    )]
    Batch {
        /// Given.
        prompts: usize,
        /// Sequences there are caches for.
        sequences: usize,
    },
    /// A batch has no cache for another sequence.
    #[error(
        "all {sequences} sequences of the batch are under way: expected one to have ended (see EngineConfig::sequences)"
    )]
    Full {
        /// Sequences there are caches for.
        sequences: usize,
    },
    /// An option out of range.
    #[error("{name} {given}: expected {expected}")]
    Option {
        /// Which.
        name: &'static str,
        /// Its value.
        given: String,
        /// What would do.
        expected: String,
    },
    /// A method that this engine was not compiled for.
    #[error("this engine was not compiled for {0}")]
    Purpose(&'static str),
}

impl EngineError {
    fn option(name: &'static str, given: impl ToString, expected: impl Into<String>) -> EngineError {
        EngineError::Option { name, given: given.to_string(), expected: expected.into() }
    }
}

impl From<CudaNewError> for EngineError {
    fn from(error: CudaNewError) -> EngineError {
        match error {
            CudaNewError::Gpu(error) => error.into(),
            CudaNewError::Memory(error) => error.into(),
        }
    }
}

/// How tokens are chosen, and when to stop.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// Tokens to make at most.
    pub max_new_tokens: usize,
    /// 0: greedy. Else logits are divided by it before a draw.
    pub temperature: f32,
    /// Draw from the smallest set of tokens whose probabilities reach this; 1: from all.
    pub top_p: f32,
    /// Draw from the `top_k` likeliest; 0: from all.
    pub top_k: usize,
    /// Seed of the draws.
    pub seed: u64,
    /// What the logits of tokens that prompt and text have already are divided by, or multiplied with where they are
    /// below 0, before all else; 1: nothing is done. `None`: that of the model's generation_config.json, as
    /// `transformers` takes it, even where the likeliest token is.
    pub repetition_penalty: Option<f32>,
    /// Token ids that end the text, at most 16 different ones ([`MAX_STOP_TOKENS`]), in a batch of all sequences under
    /// way together; `None`: those of the model's generation_config.json.
    pub stop_tokens: Option<Vec<u32>>,
    /// Texts that end the text, with [`End::StopString`]: it ends before the first of them, and what may still become
    /// one is in no token's [text](Token::text) until it cannot. The token that completes one is the last that there
    /// is; its text is what stands before it.
    ///
    /// ```no_run
    /// # use perpetua::{Engine, EngineConfig, GenerateOptions, Model};
    /// # let model = Model::load("path/to/Qwen3-0.6B")?;
    /// # let mut engine = Engine::new(&model, &EngineConfig::default())?;
    /// let options = GenerateOptions { stop_strings: vec!["\nQ:".to_owned()], ..GenerateOptions::default() };
    /// for token in engine.generate(&model.encode("Q: Why is the sky blue?\nA:")?, &options)? {
    ///     print!("{}", token?.text);
    /// }
    /// # Ok::<(), perpetua::EngineError>(())
    /// ```
    pub stop_strings: Vec<String>,
    /// Do not read again what the prompt begins with if the generation before, of this engine, has read or made the
    /// same: the next turn of a conversation then takes as long as what is new in it. But for the order of sums nothing
    /// changes: on the CPU, where prompts are read [exactly](PromptPrecision::Exact), not a bit; elsewhere tokens that
    /// were made have been rounded as made, not as read. In a batch it is about the cache that a sequence
    /// [gets](BatchGeneration::add), and what another has left there. A model whose layers [pass
    /// states](ModelConfig::passes_states) from row to row goes on where the generation before has ended, or reads all.
    ///
    /// ```no_run
    /// # use perpetua::{ChatMessage, Engine, EngineConfig, GenerateOptions, Model};
    /// # let model = Model::load("path/to/Qwen3-0.6B")?;
    /// # let mut engine = Engine::new(&model, &EngineConfig::default())?;
    /// let options = GenerateOptions { reuse_prefix: true, ..GenerateOptions::default() };
    /// let mut messages = Vec::new();
    /// for question in ["Why is the sky blue?", "And in the evening?"] {
    ///     messages.push(ChatMessage::new("user", question));
    ///     let mut answer = String::new();
    ///     for token in engine.generate(&model.encode_chat(&messages)?, &options)? {
    ///         answer.push_str(&token?.text);
    ///     }
    ///     messages.push(ChatMessage::new("assistant", answer));
    /// }
    /// # Ok::<(), perpetua::EngineError>(())
    /// ```
    pub reuse_prefix: bool,
    /// The longest a generation may take from its start, its prompt included: then it ends as if told to stop, with the
    /// tokens made so far and [`End::Deadline`], whether or not somebody asks for them: a thread of its own looks at
    /// the clock.
    pub max_time: Option<Duration>,
}

impl Default for GenerateOptions {
    fn default() -> GenerateOptions {
        GenerateOptions {
            max_new_tokens: 128,
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            seed: 0,
            repetition_penalty: None,
            stop_tokens: None,
            stop_strings: Vec::new(),
            reuse_prefix: false,
            max_time: None,
        }
    }
}

impl GenerateOptions {
    /// When a generation that begins now is to end. A time that no clock will show is none.
    fn deadline(&self) -> Option<Instant> {
        self.max_time.and_then(|time| Instant::now().checked_add(time))
    }

    /// Judges what needs no model to be judged: [`Engine::generate`] does, and whoever would rather know it before a
    /// model is loaded.
    ///
    /// # Errors
    /// An option, as given, and what is expected.
    pub fn check(&self) -> Result<(), EngineError> {
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return Err(EngineError::option("temperature", self.temperature, "0 (greedy) or a positive number"));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(EngineError::option("top-p", self.top_p, "a number above 0, at most 1"));
        }
        if let Some(penalty) = self.repetition_penalty.filter(|penalty| !is_penalty(*penalty)) {
            return Err(EngineError::option("repetition penalty", penalty, PENALTIES));
        }
        if self.stop_strings.iter().any(String::is_empty) {
            return Err(EngineError::option("stop string", "\"\"", "a text that is not empty"));
        }
        Ok(())
    }
}

/// Whether a control block has room for `n` stop tokens, which are `which`.
fn check_stop_tokens(n: usize, which: &str) -> Result<(), EngineError> {
    if n <= MAX_STOP_TOKENS {
        return Ok(());
    }
    Err(EngineError::option("stop tokens", format!("{n} {which}"), format!("at most {MAX_STOP_TOKENS}")))
}

/// What `options` ask of a sequence of `model`, and the tokens that end it, which its `stops` stand for.
fn request(model: &Model, options: &GenerateOptions) -> Result<(Request, Vec<u32>), EngineError> {
    options.check()?;
    let (stop, which) = match &options.stop_tokens {
        Some(stop) => (stop, "different ones"),
        None => (&model.generation().eos_token_ids, "different ones in generation_config.json"),
    };
    let mut stop = stop.clone();
    stop.sort_unstable();
    stop.dedup();
    check_stop_tokens(stop.len(), which)?;
    let request = Request {
        max_new_tokens: u32::try_from(options.max_new_tokens).unwrap_or(u32::MAX),
        temperature: options.temperature.to_bits(),
        top_p: options.top_p.to_bits(),
        top_k: options.top_k.min(u32::MAX as usize) as u32,
        seed: [options.seed as u32, (options.seed >> 32) as u32],
        repetition_penalty: options.repetition_penalty.unwrap_or(model.generation().repetition_penalty).to_bits(),
        stops: (1 << stop.len()) - 1,
    };
    Ok((request, stop))
}

/// Whether `model` can read `prompt` with a cache of `context` positions.
fn check_prompt(model: &Model, context: usize, prompt: &[u32]) -> Result<(), EngineError> {
    if prompt.is_empty() {
        return Err(EngineError::EmptyPrompt);
    }
    if prompt.len() > context {
        return Err(EngineError::PromptTooLong { tokens: prompt.len(), context, model: model.max_tokens() });
    }
    model::check_token_ids(prompt, model.config().vocab_size())?;
    Ok(())
}

/// One token, as it is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// The text it completes: valid UTF-8, possibly empty while a character is still half there, or a stop string may
    /// be. That of the last token ends with U+FFFD where the tokens end inside a character.
    pub text: String,
}

/// The passes of a decoder over one sequence, as kernel graphs: one per chunk size, decode first.
///
/// # Errors
/// What the checkpoint lacks, or an operator that cannot be.
pub fn decoder_sources(model: &Model, chunks: &[usize], cache: Cache, head: Head) -> Result<Vec<Source>, EngineError> {
    let mut rows: Vec<usize> = chunks.iter().map(|rows| (*rows).clamp(1, cache.context)).collect();
    if head == Head::Sample {
        rows.push(1);
    }
    rows.sort_unstable();
    rows.dedup();
    rows.into_iter().map(|rows| decoder_source(model, rows, cache, head)).collect()
}

fn decoder_source(model: &Model, rows: usize, cache: Cache, head: Head) -> Result<Source, EngineError> {
    let config = match model.config() {
        ModelConfig::Decoder(config) => config,
        ModelConfig::Bert(_) | ModelConfig::ModernBert(_) => model.decoder()?,
    };
    let graph = model::decoder::build(config, declared(model)?, rows, cache, head)?;
    let in_token_loop = head != Head::AllLogits;
    Ok(Source { name: pass_name(rows, head), graph, in_token_loop })
}

/// Where a decoder's weights come from.
///
/// # Errors
/// When the model's checkpoint is gone.
pub fn declared(model: &Model) -> Result<Declared<'_>, ModelError> {
    let weights = model.weights()?;
    Ok(match model.quantized() {
        Some(quantized) => Declared::Quantized(weights, quantized),
        None => Declared::Checkpoint(weights),
    })
}

/// What a decoder's pass over `rows` rows is called.
pub fn pass_name(rows: usize, head: Head) -> String {
    match (head, rows) {
        (Head::SampleEach, _) => format!("decode of {rows}"),
        (Head::Verify, _) => format!("verify {rows}"),
        (_, 1) => "decode".to_owned(),
        _ => format!("prefill {rows}"),
    }
}

/// The passes of a sentence embedding model, as kernel graphs: one per number of rows. Where it [takes a sentence
/// whole](ModelFolder::takes_whole), there is no `cache`, but its context and type are those of sentences, and of their
/// keys and values; else a sentence may take several.
///
/// # Errors
/// What the checkpoint lacks, or an operator that cannot be.
pub fn sentence_sources(model: &Model, rows: &[usize], cache: Cache) -> Result<Vec<Source>, EngineError> {
    let sentence = model.sentence_model()?;
    let prefix = model.encoder_prefix()?;
    let source = |rows: usize| {
        let graph = match model.config() {
            ModelConfig::Bert(bert) => model::bert::build(bert, sentence, model.weights()?, prefix, rows),
            ModelConfig::ModernBert(bert) => {
                let Cache { context, dtype, .. } = cache;
                model::modern_bert::build(bert, sentence, model.weights()?, rows, context, dtype)
            }
            ModelConfig::Decoder(decoder) => {
                model::decoder::build_embedder(decoder, sentence, declared(model)?, rows, cache)
            }
        }?;
        Ok(Source { name: format!("embed {rows}"), graph, in_token_loop: false })
    };
    let mut rows: Vec<usize> = rows.iter().map(|rows| (*rows).clamp(1, cache.context)).collect();
    rows.sort_unstable();
    rows.dedup();
    rows.into_iter().map(source).collect()
}

/// A program may make an engine on one thread and use it on another.
const fn may_change_threads<T: Send>() {}
const _: () = {
    may_change_threads::<Engine>();
    may_change_threads::<Embedder>();
    may_change_threads::<Generation<'static>>();
    may_change_threads::<BatchGeneration<'static>>();
};

/// Programs that an engine may have beside those of [`EngineConfig::chunks`]: decoding, a batch's, and the one that
/// verifies.
const OTHER_PROGRAMS: usize = 3;

/// [`EngineConfig`], looked at for one model.
struct Plan<'a> {
    place: Place,
    /// Positions of the KV cache.
    context: usize,
    cache_dtype: DType,
    /// Rows of the passes that read a prompt or a sentence.
    chunks: &'a [usize],
}

impl<'a> Plan<'a> {
    fn of(model: &Model, config: &'a EngineConfig) -> Result<Plan<'a>, EngineError> {
        let place = match config.device {
            Device::Auto if config.prompt_precision == PromptPrecision::Exact => {
                Place::of(&EngineConfig { device: Device::Cpu, ..config.clone() })
            }
            _ => Place::of(config),
        }?;
        let allowed = model.max_tokens();
        let context = config.max_context.unwrap_or(allowed.min(DEFAULT_MAX_CONTEXT));
        if context == 0 || context > allowed {
            return Err(EngineError::Context { asked: context, model: allowed });
        }
        // The reference keeps its cache in f32; what users run keeps it in bf16, as every engine does.
        let cache_dtype = if config.device == Device::Reference { DType::F32 } else { DType::Bf16 };
        let most = MAX_PROGRAMS - OTHER_PROGRAMS;
        if config.chunks.len() > most || config.chunks.contains(&0) {
            let given = format!("{:?}", config.chunks);
            return Err(EngineError::option("chunks", given, format!("at most {most} numbers of rows, 1 or more")));
        }
        let chunks = match &config.chunks[..] {
            [] if matches!(place, Place::Gpu { .. }) => &GPU_CHUNKS[..],
            [] => &DEFAULT_CHUNKS[..],
            given => given,
        };
        Ok(Plan { place, context, cache_dtype, chunks })
    }
}

/// A text generation model, resident.
#[derive(Debug)]
pub struct Engine {
    model: Model,
    resident: Resident,
    context: usize,
    /// Sequences of a batch; 0: no batches.
    sequences: usize,
    /// Tokens that a pass may guess; 0: none.
    drafts: u32,
    all_logits: bool,
}

impl Engine {
    /// Compiles `model` and starts its workers.
    ///
    /// # Errors
    /// From the model folder, the compiler, the memory or the system.
    pub fn new(model: &Model, config: &EngineConfig) -> Result<Engine, EngineError> {
        Engine::with_progress(model, config, |_| {})
    }

    /// As [`Engine::new`]; `progress` is called with the bytes that have been handed to a GPU.
    ///
    /// # Errors
    /// As [`Engine::new`].
    pub fn with_progress(
        model: &Model,
        config: &EngineConfig,
        progress: impl FnMut(u64),
    ) -> Result<Engine, EngineError> {
        // Judged before weights are touched: the answer should not take reading gigabytes.
        model.decoder()?;
        let Plan { place, context, cache_dtype, chunks } = Plan::of(model, config)?;
        if let Some(drafts) = config.prompt_lookup {
            if drafts == 0 || drafts > MAX_DRAFTS {
                return Err(EngineError::option("prompt lookup", drafts, format!("1 to {MAX_DRAFTS} tokens")));
            }
            if config.all_logits {
                return Err(EngineError::Purpose("every position's logits and prompt lookup at once"));
            }
        }
        if let Some(sequences) = config.sequences {
            if sequences == 0 || sequences > MAX_SEQUENCES {
                return Err(EngineError::option("batch", sequences, format!("1 to {MAX_SEQUENCES}")));
            }
            if config.all_logits {
                return Err(EngineError::Purpose("every position's logits and batches at once"));
            }
        }
        let head = if config.all_logits { Head::AllLogits } else { Head::Sample };
        let cache = Cache { sequences: config.sequences.unwrap_or(1), context, dtype: cache_dtype };
        let mut sources = decoder_sources(model, chunks, cache, head)?;
        if let Some(sequences) = config.sequences {
            sources.push(decoder_source(model, sequences, cache, Head::SampleEach)?);
        }
        if let Some(drafts) = config.prompt_lookup {
            let rows = (drafts + 1).min(context);
            sources.push(decoder_source(model, rows, cache, Head::Verify)?);
        }
        sources.iter_mut().for_each(|source| source.graph.prompt_precision = config.prompt_precision);
        model.unpack(|_| {})?;
        let resident = Resident::at(sources, model, place, &config.just_in_time, progress)?;
        let sequences = config.sequences.unwrap_or(0);
        let drafts = config.prompt_lookup.unwrap_or(0) as u32;
        Ok(Engine { model: model.clone(), resident, context, sequences, drafts, all_logits: config.all_logits })
    }

    /// Positions of the KV cache.
    pub fn context(&self) -> usize {
        self.context
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The image and its executor.
    pub fn resident(&self) -> &Resident {
        &self.resident
    }

    /// See [`Engine::resident`].
    pub fn resident_mut(&mut self) -> &mut Resident {
        &mut self.resident
    }

    fn check_prompt(&self, prompt: &[u32]) -> Result<(), EngineError> {
        check_prompt(&self.model, self.context, prompt)
    }

    /// Starts a generation from `prompt`: an iterator over the tokens as they are made. Dropping it stops the run.
    ///
    /// # Errors
    /// A prompt that is empty, too long or has ids the model does not; options out of range.
    pub fn generate(&mut self, prompt: &[u32], options: &GenerateOptions) -> Result<Generation<'_>, EngineError> {
        let deadline = options.deadline();
        self.check_prompt(prompt)?;
        let mut control = self.control(options)?;
        let text = Text::of(&self.model, &options.stop_strings)?;
        control.n_tokens = prompt.len() as u32;
        (control.max_drafts, control.n_drafts) = (self.drafts, self.drafts);
        // The last token is read in any case: of it the first new one is made.
        let whole = self.model.config().passes_states();
        let reused = if options.reuse_prefix { self.resident.kept_of(&prompt[..prompt.len() - 1], whole) } else { 0 };
        let programs = self.resident.compiled.image.view().programs;
        control.step = perpetua_device::advance::step_from(&control, programs, reused as u32, 0);
        self.resident.set_tokens(0, prompt);
        let has_work = options.max_new_tokens > 0 && control.step.program != NO_PROGRAM;
        // Without a run, what is counted is an earlier run's.
        let taken = if has_work { 0 } else { self.resident.produced() as usize };
        let end = (!has_work).then_some(End::MaxTokens);
        let made = Made { text, next: prompt.len(), taken, last: None, held: None, end };
        let mut run = Run::none(&mut self.resident);
        if has_work {
            run.begin(control, deadline)?;
        }
        Ok(Generation { run, made, prompt_len: prompt.len(), reused, has_run: has_work })
    }

    /// Starts a generation from each of `prompts`, all decoded together: every pass over the weights makes a token for
    /// each of them. They are numbered as given; sequence `s` draws with the seed `options.seed + s`, and its tokens
    /// are those that [`Engine::generate`] makes from its prompt with that seed, on the CPU, to the bit where prompts
    /// are read [exactly](PromptPrecision::Exact); on a GPU passes of several rows round what they multiply to bf16.
    /// Dropping the iterator stops the run.
    ///
    /// ```no_run
    /// # use perpetua::{Engine, EngineConfig, GenerateOptions, Model};
    /// # let model = Model::load("path/to/Qwen3-0.6B")?;
    /// let mut engine = Engine::new(&model, &EngineConfig { sequences: Some(2), ..EngineConfig::default() })?;
    /// let prompts = [model.encode("A cat is")?, model.encode("A dog is")?];
    /// for made in engine.generate_batch(&prompts, &GenerateOptions::default())? {
    ///     let (sequence, token) = made?;
    ///     println!("{sequence}: {}", token.text);
    /// }
    /// # Ok::<(), perpetua::EngineError>(())
    /// ```
    ///
    /// # Errors
    /// As [`Engine::generate`]; or no prompts, or more than [`EngineConfig::sequences`].
    pub fn generate_batch<P: AsRef<[u32]>>(
        &mut self,
        prompts: &[P],
        options: &GenerateOptions,
    ) -> Result<BatchGeneration<'_>, EngineError> {
        let sequences = self.sequences;
        let mut batch = self.batch()?;
        if prompts.is_empty() || prompts.len() > sequences {
            return Err(EngineError::Batch { prompts: prompts.len(), sequences });
        }
        for (number, prompt) in prompts.iter().enumerate() {
            let seed = options.seed.wrapping_add(number as u64);
            let options = GenerateOptions { seed, reuse_prefix: false, ..options.clone() };
            let asked = batch.ask(prompt.as_ref(), &options)?;
            batch.put(prompt.as_ref(), asked)?;
        }
        batch.go_on()?;
        Ok(batch)
    }

    /// A batch that nobody has joined yet: see [`BatchGeneration::add`].
    ///
    /// # Errors
    /// An engine that was not made with [`EngineConfig::sequences`].
    pub fn batch(&mut self) -> Result<BatchGeneration<'_>, EngineError> {
        if self.sequences == 0 {
            return Err(EngineError::Purpose("batches: see EngineConfig::sequences"));
        }
        Ok(BatchGeneration::new(&self.model, &mut self.resident, self.context, self.sequences))
    }

    /// A control block for `options`, without tokens and step.
    fn control(&self, options: &GenerateOptions) -> Result<Control, EngineError> {
        if self.all_logits {
            return Err(EngineError::Purpose("generating tokens"));
        }
        let (request, stop) = request(&self.model, options)?;
        let mut control: Control = bytemuck::Zeroable::zeroed();
        control.max_context = self.context as u32;
        control.stop_tokens[..stop.len()].copy_from_slice(&stop);
        control.requests[0] = request;
        Ok(control)
    }

    /// The logits of every position of `ids`, `[ids.len(), vocab]`, in passes of the compiled chunk sizes; `each` hears
    /// how many positions are done.
    ///
    /// # Errors
    /// As [`Engine::generate`]; a position of whose logits none is a number; or an engine not made with
    /// [`EngineConfig::all_logits`].
    pub fn logits(&mut self, ids: &[u32], mut each: impl FnMut(usize)) -> Result<Vec<f32>, EngineError> {
        if !self.all_logits {
            return Err(EngineError::Purpose("every position's logits"));
        }
        self.check_prompt(ids)?;
        let vocab = self.model.config().vocab_size();
        let mut logits = Vec::new();
        logits.try_reserve_exact(ids.len() * vocab).map_err(|_| MemoryError::Refused {
            what: "logits of every position".to_owned(),
            bytes: (ids.len() * vocab * size_of::<f32>()) as u64,
        })?;
        self.resident.read(ids, |resident, program, positions| {
            let output = resident.output(program, "logits").ok_or(EngineError::Purpose("logits"))?;
            resident.append_f32(&output, positions.len(), &mut logits)?;
            let mut rows = logits[positions.start * vocab..].chunks(vocab);
            if let Some(row) = rows.position(|row| row.iter().all(|x| x.is_nan())) {
                return Err(RunError::NotANumber { position: (positions.start + row) as u32 }.into());
            }
            each(positions.end);
            Ok(())
        })?;
        Ok(logits)
    }

    /// The logits that each sequence's token of the last pass over a batch was chosen from, `[sequences, vocab]`. Rows
    /// of sequences that had ended before mean nothing. `None` where the last run was no batch's, or has made nothing.
    ///
    /// # Errors
    /// The fault that the batch ended with; or a device that is lost.
    pub fn batch_logits(&mut self) -> Result<Option<Vec<f32>>, EngineError> {
        let control = self.resident.finish()?;
        if control.produced == 0 || control.n_sequences == 0 {
            return Ok(None);
        }
        let programs = self.resident.compiled.image.view().programs;
        let batch = programs.iter().position(|program| program.kind == EVERY_SEQUENCE);
        let Some(output) = batch.and_then(|batch| self.resident.output(ProgramId(batch as u32), "logits")) else {
            return Ok(None);
        };
        Ok(Some(self.resident.read_f32(&output, self.sequences)?))
    }

    /// The logits that the last token of the last generation was chosen from; `None` before there has been one, and
    /// where it ended before it had made one. Of a batch: [`Engine::batch_logits`].
    ///
    /// # Errors
    /// The fault that the generation ended with; or a device that is lost.
    pub fn last_logits(&mut self) -> Result<Option<Vec<f32>>, EngineError> {
        let control = self.resident.finish()?;
        if control.produced == 0 || control.n_sequences > 0 {
            return Ok(None);
        }
        let last = ProgramId(control.last_program);
        let Some(output) = self.resident.output(last, "logits") else { return Ok(None) };
        // A pass that verified guesses has a row for each, and ended with the last that counted. Any other has the last
        // one's alone.
        let verified = self.resident.compiled.image.view().programs[last.idx()].kind == VERIFIES;
        let rows = if verified { control.step.rows as usize } else { 1 };
        let logits = self.resident.read_f32(&output, rows)?;
        Ok(Some(logits[logits.len() - self.model.config().vocab_size()..].to_vec()))
    }

    /// Passes that read a prompt of `tokens` tokens, the last of which makes the first new one.
    pub fn passes(&self, mut tokens: usize) -> usize {
        let programs = self.resident.compiled.image.view().programs;
        let mut passes = 0;
        while let Some(program) =
            perpetua_device::advance::choose_program(programs, tokens as u32).filter(|_| tokens > 0)
        {
            tokens = tokens.saturating_sub(programs[program as usize].max_rows as usize);
            passes += 1;
        }
        passes
    }

    /// When the last run started, and when each of its passes ended.
    pub fn stamps(&self) -> Vec<Instant> {
        self.resident.stamps()
    }
}
