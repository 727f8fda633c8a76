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

use crate::compile::{CompileError, Compiled, Config, Source, compile};
use crate::cuda::{Gpu, GpuError};
use crate::device_image::device_image;
use crate::exec::cuda::{Cuda, CudaNewError};
use crate::exec::memory::{Keep, Memory, MemoryError, WeightSource, available_bytes};
use crate::exec::{RunError, cuda, reference, simt, threads};
use crate::graph::lower::Target;
use crate::model::config::Architecture;
use crate::model::decoder::{BuildError, Declared, Decoder, Head};
use crate::model::{self, DecodeStream, ModelError, ModelFolder, Quantize, Quantized};
use perpetua_shared::control::{Control, End, NO_PROGRAM, Step};
use perpetua_shared::limits::MAX_STOP_TOKENS;
use perpetua_shared::task::Operand;
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
    /// Opens the model in folder `dir`: its configuration now, tokenizer and weights when they are first needed.
    ///
    /// # Errors
    /// What is missing in the folder, or what its configuration asks for that this library does not do.
    pub fn load(dir: impl AsRef<Path>) -> Result<Model, ModelError> {
        Ok(Model { folder: Arc::new(ModelFolder::open(dir)?), quantized: None })
    }

    /// The same model with its matrices in fewer bits (see [`model::quantize`]), held in memory; CPU only. `progress` is
    /// called with the bytes of every matrix read.
    ///
    /// ```no_run
    /// # use perpetua::{Model, model::Quantize};
    /// let model = Model::load("path/to/Qwen3-0.6B")?.quantize(Quantize::Q8, |_| {})?;
    /// # Ok::<(), perpetua::EngineError>(())
    /// ```
    ///
    /// # Errors
    /// A sentence model; weights that are missing, misshapen or not finite; too little memory.
    pub fn quantize(&self, how: Quantize, mut progress: impl FnMut(u64)) -> Result<Model, EngineError> {
        let Quantize::Q8 = how;
        self.decoder()?;
        let tensors = model::layout::tensors(self.config());
        let needed = Quantized::needed(&tensors);
        if let Some(available) = available_bytes()
            && needed > available
        {
            let what = "weights in 8 bits".to_owned();
            return Err(MemoryError::TooLarge { what, bytes: needed, available }.into());
        }
        let quantized = Quantized::new(self.weights()?, &tensors, &mut progress)?;
        Ok(Model { folder: self.folder.clone(), quantized: Some(Arc::new(quantized)) })
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

impl WeightSource for Model {
    fn bytes(&self, name: &str) -> Option<&[u8]> {
        match self.quantized.as_ref().and_then(|quantized| quantized.get(name)) {
            Some(bytes) => Some(bytes),
            None => Some(self.folder.weights().ok()?.get(name)?.bytes),
        }
    }
    fn keep(&self) -> Keep {
        Arc::new(self.clone())
    }
}

/// Where an engine runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
}

/// How an engine is made.
#[derive(Clone, Debug, Default)]
pub struct EngineConfig {
    /// Where it runs.
    pub device: Device,
    /// CPU workers, `None`: one per core this process may use; SMs of a GPU, `None`: all; or simulated SMs, `None`: 4.
    pub threads: Option<usize>,
    /// Positions of the KV cache; `None`: the model's context, at most [`DEFAULT_MAX_CONTEXT`].
    pub max_context: Option<usize>,
    /// Compile passes that give every row's logits instead of passes that choose tokens.
    pub all_logits: bool,
    /// Rows of the passes to compile for prompts, each a program of its own; empty: [`DEFAULT_CHUNKS`].
    pub chunks: Vec<usize>,
    /// The GPU of [`Device::Cuda`]; `None`: the first that will do, see [`Gpu::open`]. Here a program gives a context and a
    /// stream of its own.
    pub gpu: Option<Gpu>,
    /// How the kernel on the GPU behaves.
    pub cuda: cuda::Options,
}

/// The context an engine has unless told otherwise: what a KV cache may take without being asked for.
pub const DEFAULT_MAX_CONTEXT: usize = 4096;

/// Rows of the passes that read prompts: a short one for short prompts, a long one that reads the weights seldom.
pub const DEFAULT_CHUNKS: [usize; 3] = [8, 32, 128];

/// Why an engine cannot be made or cannot go on.
#[derive(Debug, thiserror::Error)]
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
    #[error("cannot start the worker threads: {0}")]
    Threads(std::io::Error),
    /// The GPU.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// No tokens to start from.
    #[error("the prompt is empty: expected at least one token")]
    EmptyPrompt,
    /// More tokens than the context holds.
    #[error(
        "the prompt has {tokens} tokens, but the context holds {context} (the model allows {model}; see --max-context)"
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
    /// An option out of range.
    #[error("{name} {given}: expected {expected}")]
    Option {
        /// Which.
        name: &'static str,
        /// Its value.
        given: String,
        /// What would do.
        expected: &'static str,
    },
    /// A method that this engine was not compiled for.
    #[error("this engine was not compiled for {0}")]
    Purpose(&'static str),
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
    /// Token ids that end the text; `None`: those of the model's generation_config.json.
    pub stop_tokens: Option<Vec<u32>>,
}

impl Default for GenerateOptions {
    fn default() -> GenerateOptions {
        GenerateOptions { max_new_tokens: 128, temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0, stop_tokens: None }
    }
}

impl GenerateOptions {
    fn check(&self) -> Result<(), EngineError> {
        let bad = |name, given: String, expected| Err(EngineError::Option { name, given, expected });
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return bad("temperature", self.temperature.to_string(), "0 (greedy) or a positive number");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return bad("top-p", self.top_p.to_string(), "a number above 0, at most 1");
        }
        match &self.stop_tokens {
            Some(stop) if stop.len() > MAX_STOP_TOKENS => {
                bad("stop tokens", format!("{} of them", stop.len()), "at most 16")
            }
            _ => Ok(()),
        }
    }
}

/// One token, as it is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// The text it completes: valid UTF-8, possibly empty while a character is still half there.
    pub text: String,
}

/// What runs the image.
#[derive(Debug)]
enum Executor {
    Threads(threads::Threads),
    Reference(Box<reference::Reference>),
    Simt(Box<simt::Simt>),
    Cuda(Box<Cuda>),
}

/// A compiled image and its executor: what engines and embedders share.
#[derive(Debug)]
pub struct Resident {
    compiled: Compiled,
    executor: Executor,
    compile_time: Duration,
}

impl Resident {
    /// Compiles `sources` and makes them resident.
    ///
    /// # Errors
    /// From the compiler, the memory or the system.
    pub fn new(
        sources: Vec<Source>,
        weights: &dyn WeightSource,
        device: Device,
        n_threads: Option<usize>,
    ) -> Result<Resident, EngineError> {
        let place = Place::of(&EngineConfig { device, threads: n_threads, ..EngineConfig::default() })?;
        Resident::at(sources, weights, place, |_| {})
    }

    /// As [`Resident::new`], on CPU workers with other than the usual habits.
    ///
    /// # Errors
    /// As [`Resident::new`].
    pub fn with_options(
        sources: Vec<Source>,
        weights: &dyn WeightSource,
        n_threads: Option<usize>,
        options: threads::Options,
    ) -> Result<Resident, EngineError> {
        let n_workers = workers(n_threads, threads::allowed_cores().len(), perpetua_shared::limits::MAX_WORKERS)?;
        Resident::at(sources, weights, Place::Cpu { n_workers, options }, |_| {})
    }

    /// As [`Resident::new`], on `gpu`; `progress` is called with the bytes of weights that have been handed over.
    ///
    /// # Errors
    /// As [`Resident::new`].
    pub fn on_gpu(
        sources: Vec<Source>,
        weights: &dyn WeightSource,
        gpu: Gpu,
        options: cuda::Options,
        progress: impl FnMut(u64),
    ) -> Result<Resident, EngineError> {
        let n_workers = gpu.info().n_sms;
        Resident::at(sources, weights, Place::Gpu { gpu, n_workers, options }, progress)
    }

    fn at(
        sources: Vec<Source>,
        weights: &dyn WeightSource,
        place: Place,
        progress: impl FnMut(u64),
    ) -> Result<Resident, EngineError> {
        let began = Instant::now();
        let compiled = compile(sources, &Config::new(place.target()))?;
        let compile_time = began.elapsed();
        let executor = match place {
            Place::Gpu { gpu, options, .. } => {
                Executor::Cuda(Box::new(Cuda::new(gpu, &compiled, weights, options, progress)?))
            }
            Place::Reference => {
                let memory = Memory::new(&compiled, weights)?;
                Executor::Reference(Box::new(reference::Reference::new(compiled.image.clone(), memory)))
            }
            Place::Simt { .. } => {
                let (memory, options) = (Memory::new(&compiled, weights)?, simt::Options::default());
                Executor::Simt(Box::new(simt::Simt::new(compiled.image.clone(), memory, options)))
            }
            Place::Cpu { n_workers, mut options } => {
                let memory = Memory::new(&compiled, weights)?;
                let cores = threads::allowed_cores();
                // More workers than cores: the scheduler places them better than a list could.
                if options.cores.is_empty() && n_workers as usize <= cores.len() {
                    options.cores = cores;
                }
                Executor::Threads(
                    threads::Threads::new(compiled.image.clone(), memory, options).map_err(EngineError::Threads)?,
                )
            }
        };
        Ok(Resident { compiled, executor, compile_time })
    }

    /// What was compiled.
    pub fn compiled(&self) -> &Compiled {
        &self.compiled
    }

    /// How long compiling took.
    pub fn compile_time(&self) -> Duration {
        self.compile_time
    }

    /// Rows `..rows` of an f32 output of rank 2, or its first `rows` elements when it has rank 1; waits for a run to end.
    ///
    /// # Errors
    /// A device that is lost.
    pub fn read_f32(&mut self, output: &Operand, rows: usize) -> Result<Vec<f32>, RunError> {
        Ok(match &mut self.executor {
            Executor::Threads(threads) => threads.memory().read_f32(output, rows),
            Executor::Reference(reference) => reference.memory().read_f32(output, rows),
            Executor::Simt(simt) => simt.memory().read_f32(output, rows),
            Executor::Cuda(cuda) => cuda.read_f32(output, rows)?,
        })
    }

    /// The memory of an executor on this machine, once its run has ended.
    fn memory(&mut self) -> Result<&Memory, &mut Cuda> {
        match &mut self.executor {
            Executor::Threads(threads) => Ok(threads.memory()),
            Executor::Reference(reference) => Ok(reference.memory()),
            Executor::Simt(simt) => Ok(simt.memory()),
            Executor::Cuda(cuda) => Err(cuda),
        }
    }

    /// Writes the input called `name`; waits for a run to end.
    ///
    /// # Errors
    /// When there is no such input, or it has another size.
    pub fn set_input(&mut self, name: &str, contents: &[u8]) -> Result<(), MemoryError> {
        match self.memory() {
            // SAFETY: `memory` has waited for the workers, and none can be started while `self` is borrowed.
            Ok(memory) => unsafe { memory.set_input(name, contents) },
            Err(cuda) => cuda.set_input(name, contents),
        }
    }

    fn set_tokens(&mut self, tokens: &[u32]) {
        match self.memory() {
            // SAFETY: as `set_input`.
            Ok(memory) => unsafe { memory.set_tokens(0, tokens) },
            Err(cuda) => cuda.set_tokens(tokens),
        }
    }

    /// The output called `name` of program `program`.
    pub fn output(&self, program: ProgramId, name: &str) -> Option<Operand> {
        let outputs = &self.compiled.programs.get(program.idx())?.outputs;
        outputs.iter().find(|(known, _)| known == name).map(|(_, operand)| *operand)
    }

    /// Starts a run from `control`.
    pub fn start(&mut self, control: Control) {
        match &mut self.executor {
            Executor::Threads(threads) => threads.start(control),
            Executor::Reference(reference) => reference.start(control),
            Executor::Simt(simt) => simt.start(control),
            Executor::Cuda(cuda) => cuda.start(control),
        }
    }

    /// Asks a run to end after the pass under way.
    pub fn stop(&self) {
        match &self.executor {
            Executor::Threads(threads) => threads.stop(),
            Executor::Cuda(cuda) => cuda.stop(),
            Executor::Reference(_) | Executor::Simt(_) => {}
        }
    }

    /// The executor, where it is a GPU: for traces and drills.
    pub fn cuda(&mut self) -> Option<&mut Cuda> {
        match &mut self.executor {
            Executor::Cuda(cuda) => Some(cuda),
            _ => None,
        }
    }

    fn produced(&self) -> u32 {
        match &self.executor {
            Executor::Threads(threads) => threads.produced(),
            Executor::Reference(reference) => reference.produced(),
            Executor::Simt(simt) => simt.produced(),
            Executor::Cuda(cuda) => cuda.produced(),
        }
    }

    fn token(&self, position: usize) -> u32 {
        match &self.executor {
            Executor::Threads(threads) => threads.token(position),
            Executor::Reference(reference) => reference.memory().token(position),
            Executor::Simt(simt) => simt.memory().token(position),
            Executor::Cuda(cuda) => cuda.token(position),
        }
    }

    fn is_running(&mut self) -> bool {
        match &mut self.executor {
            Executor::Threads(threads) => threads.is_running(),
            Executor::Cuda(cuda) => cuda.is_running(),
            Executor::Reference(_) | Executor::Simt(_) => false,
        }
    }

    fn rest(&self) {
        match &self.executor {
            Executor::Threads(threads) => threads.rest(),
            Executor::Cuda(cuda) => cuda.rest(),
            Executor::Reference(_) | Executor::Simt(_) => {}
        }
    }

    fn position(&self) -> u32 {
        match &self.executor {
            Executor::Threads(threads) => threads.position(),
            Executor::Cuda(cuda) => cuda.position(),
            Executor::Reference(_) | Executor::Simt(_) => 0,
        }
    }

    /// Waits for the run to end.
    ///
    /// # Errors
    /// Its first fault.
    pub fn finish(&mut self) -> Result<Control, RunError> {
        match &mut self.executor {
            Executor::Threads(threads) => threads.finish(),
            Executor::Reference(reference) => reference.finish(),
            Executor::Simt(simt) => simt.finish(),
            Executor::Cuda(cuda) => cuda.finish(),
        }
    }

    /// When the last run started, and when each of its passes ended.
    pub fn stamps(&self) -> Vec<Instant> {
        match &self.executor {
            Executor::Threads(threads) => threads.stamps(),
            Executor::Reference(reference) => reference.stamps().to_vec(),
            Executor::Simt(simt) => simt.stamps().to_vec(),
            Executor::Cuda(cuda) => cuda.stamps(),
        }
    }

    /// Time all workers together have waited for events so far.
    pub fn waited(&self) -> Duration {
        match &self.executor {
            Executor::Threads(threads) => threads.waited(),
            Executor::Reference(_) | Executor::Simt(_) | Executor::Cuda(_) => Duration::ZERO,
        }
    }

    /// Bytes allocated beside the weights used in place: cache, intermediates, tables.
    pub fn owned_bytes(&self) -> u64 {
        match &self.executor {
            Executor::Threads(threads) => threads.owned_bytes(),
            Executor::Reference(reference) => reference.memory().owned_bytes(),
            Executor::Simt(simt) => simt.memory().owned_bytes(),
            Executor::Cuda(cuda) => cuda.owned_bytes(),
        }
    }

    /// Runs one pass of program `program` over `tokens`, as the first of their sequence.
    ///
    /// # Errors
    /// The first fault.
    pub fn run_tokens(&mut self, program: ProgramId, tokens: &[u32]) -> Result<(), RunError> {
        self.set_tokens(tokens);
        let n = tokens.len() as u32;
        self.start(one_pass(program, 0, n, n));
        self.finish().map(|_| ())
    }

    /// Runs one pass of program `program` over all its rows: the whole of a graph without a token dimension.
    ///
    /// # Errors
    /// The first fault.
    pub fn run_once(&mut self, program: ProgramId, rows: u32) -> Result<(), RunError> {
        self.start(one_pass(program, 0, rows, rows));
        self.finish().map(|_| ())
    }
}

/// A control block for one pass of `program` over positions `first_pos..first_pos + rows`, nothing sampled.
fn one_pass(program: ProgramId, first_pos: u32, rows: u32, n_tokens: u32) -> Control {
    let step = Step { program: program.0, first_pos, rows, ..Step::default() };
    Control { n_tokens, max_context: u32::MAX, step, ..bytemuck::Zeroable::zeroed() }
}

/// Simulated SMs unless told otherwise.
const SIMT_WORKERS: usize = 4;

/// [`EngineConfig::device`], looked at: what it stands for on this machine.
enum Place {
    Reference,
    Cpu { n_workers: u32, options: threads::Options },
    Simt { n_workers: u32 },
    Gpu { gpu: Gpu, n_workers: u32, options: cuda::Options },
}

impl Place {
    fn of(config: &EngineConfig) -> Result<Place, EngineError> {
        let max = perpetua_shared::limits::MAX_WORKERS;
        let cpu = || {
            let n_workers = workers(config.threads, threads::allowed_cores().len(), max)?;
            Ok(Place::Cpu { n_workers, options: threads::Options::default() })
        };
        let on = |gpu: Gpu| {
            let n_sms = gpu.info().n_sms as usize;
            let n_workers = workers(config.threads, n_sms, n_sms.min(max))?;
            Ok(Place::Gpu { gpu, n_workers, options: config.cuda })
        };
        match (config.device, &config.gpu) {
            (Device::Reference, _) => Ok(Place::Reference),
            (Device::Simt, _) => Ok(Place::Simt { n_workers: workers(config.threads, SIMT_WORKERS, max)? }),
            (Device::Cpu, _) => cpu(),
            (Device::Cuda | Device::Auto, Some(gpu)) => on(gpu.clone()),
            (Device::Cuda, None) if device_image().is_none() => Err(GpuError::NoImage.into()),
            (Device::Cuda, None) => on(Gpu::open()?),
            (Device::Auto, None) if device_image().is_none() => cpu(),
            (Device::Auto, None) => Gpu::open().map_or_else(|_| cpu(), on),
        }
    }

    fn target(&self) -> Target {
        match self {
            Place::Reference => Target::reference(),
            Place::Cpu { n_workers, .. } => Target::cpu(*n_workers),
            Place::Simt { n_workers } => Target::workers(*n_workers),
            Place::Gpu { n_workers, .. } => Target::gpu(*n_workers),
        }
    }
}

/// How many workers `given` asks for, by default `usual`.
fn workers(given: Option<usize>, usual: usize, max: usize) -> Result<u32, EngineError> {
    let n = given.unwrap_or(usual);
    if n == 0 || n > max {
        let expected = if given.is_some() && max < perpetua_shared::limits::MAX_WORKERS {
            "1 to the number of the GPU's SMs"
        } else {
            "1 to 512"
        };
        return Err(EngineError::Option { name: "threads", given: n.to_string(), expected });
    }
    Ok(n as u32)
}

/// The passes of a text generation model, as kernel graphs: one per chunk size, decode first.
///
/// # Errors
/// What the checkpoint lacks, or an operator that cannot be.
pub fn decoder_sources(
    model: &Model,
    context: usize,
    chunks: &[usize],
    cache_dtype: DType,
    head: Head,
) -> Result<Vec<Source>, EngineError> {
    let config = model.decoder()?;
    let weights = match model.quantized() {
        Some(_) => Declared::Quantized(model.weights()?),
        None => Declared::Checkpoint(model.weights()?),
    };
    let mut rows: Vec<usize> = chunks.iter().map(|rows| (*rows).clamp(1, context)).collect();
    if head == Head::Sample {
        rows.push(1);
    }
    rows.sort_unstable();
    rows.dedup();
    let source = |rows: usize| {
        let net = Decoder::new(config, weights, rows, context, cache_dtype, head);
        let graph = match config.architecture {
            Architecture::Qwen3 => model::qwen3::build(net)?,
            Architecture::Qwen2 => model::qwen2::build(net)?,
            Architecture::Llama => model::llama::build(net)?,
            Architecture::Mistral => model::mistral::build(net)?,
            Architecture::Bert => unreachable!("`decoder` refuses sentence models"),
        };
        let name = if rows == 1 { "decode".to_owned() } else { format!("prefill {rows}") };
        Ok(Source { name, graph, in_token_loop: head == Head::Sample })
    };
    rows.into_iter().map(source).collect()
}

/// The passes of a sentence embedding model, as kernel graphs: one per number of rows.
///
/// # Errors
/// What the checkpoint lacks, or an operator that cannot be.
pub fn sentence_sources(model: &Model, rows: &[usize]) -> Result<Vec<Source>, EngineError> {
    let (bert, sentence) = model.encoder()?;
    let weights = model.weights()?;
    let prefix = model.bert_prefix()?;
    let source = |rows: &usize| {
        let graph = model::bert::build(bert, sentence, weights, prefix, *rows)?;
        Ok(Source { name: format!("embed {rows}"), graph, in_token_loop: false })
    };
    rows.iter().map(source).collect()
}

/// A text generation model, resident.
#[derive(Debug)]
pub struct Engine {
    model: Model,
    resident: Resident,
    context: usize,
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
        let place = match config.device {
            Device::Auto if model.quantized().is_some() => {
                Place::of(&EngineConfig { device: Device::Cpu, ..config.clone() })
            }
            _ => Place::of(config),
        }?;
        if model.quantized().is_some() && matches!(place, Place::Simt { .. } | Place::Gpu { .. }) {
            let given = "of a model in 8 bits".to_owned();
            return Err(EngineError::Option {
                name: "device",
                given,
                expected: "cpu or reference: no GPU kernel reads them",
            });
        }
        let allowed = model.max_tokens();
        let context = config.max_context.unwrap_or(allowed.min(DEFAULT_MAX_CONTEXT));
        if context == 0 || context > allowed {
            return Err(EngineError::Context { asked: context, model: allowed });
        }
        // The reference keeps its cache in f32; what users run keeps it in bf16, as every engine does.
        let cache_dtype = if config.device == Device::Reference { DType::F32 } else { DType::Bf16 };
        let chunks = if config.chunks.is_empty() { &DEFAULT_CHUNKS[..] } else { &config.chunks };
        let head = if config.all_logits { Head::AllLogits } else { Head::Sample };
        let sources = decoder_sources(model, context, chunks, cache_dtype, head)?;
        let resident = Resident::at(sources, model, place, progress)?;
        Ok(Engine { model: model.clone(), resident, context, all_logits: config.all_logits })
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
        if prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        if prompt.len() > self.context {
            return Err(EngineError::PromptTooLong {
                tokens: prompt.len(),
                context: self.context,
                model: self.model.max_tokens(),
            });
        }
        model::check_token_ids(prompt, self.model.config().vocab_size())?;
        Ok(())
    }

    /// Starts a generation from `prompt`: an iterator over the tokens as they are made. Dropping it stops the run.
    ///
    /// # Errors
    /// A prompt that is empty, too long or has ids the model does not; options out of range.
    pub fn generate(&mut self, prompt: &[u32], options: &GenerateOptions) -> Result<Generation<'_>, EngineError> {
        if self.all_logits {
            return Err(EngineError::Purpose("generating tokens"));
        }
        options.check()?;
        self.check_prompt(prompt)?;
        let stop = match &options.stop_tokens {
            Some(stop) => stop.clone(),
            None => self.model.generation().eos_token_ids.clone(),
        };
        if stop.len() > MAX_STOP_TOKENS {
            let given = format!("{} of them in generation_config.json", stop.len());
            return Err(EngineError::Option { name: "stop tokens", given, expected: "at most 16" });
        }
        let mut control: Control = bytemuck::Zeroable::zeroed();
        control.n_tokens = prompt.len() as u32;
        control.max_new_tokens = u32::try_from(options.max_new_tokens).unwrap_or(u32::MAX);
        control.max_context = self.context as u32;
        control.n_stop_tokens = stop.len() as u32;
        control.stop_tokens[..stop.len()].copy_from_slice(&stop);
        control.temperature = options.temperature.to_bits();
        control.top_p = options.top_p.to_bits();
        control.top_k = options.top_k.min(u32::MAX as usize) as u32;
        control.seed = [options.seed as u32, (options.seed >> 32) as u32];
        control.step =
            perpetua_device::advance::step_from(&control, self.resident.compiled.image.view().programs, 0, 0);
        self.resident.set_tokens(prompt);
        let has_work = options.max_new_tokens > 0 && control.step.program != NO_PROGRAM;
        if has_work {
            self.resident.start(control);
        }
        // A model without a tokenizer still generates ids.
        let text = match self.model.folder.tokenizer() {
            Ok(tokenizer) => Some(tokenizer.decode_stream()),
            Err(_) => None,
        };
        let ended = !has_work;
        Ok(Generation { resident: &mut self.resident, text, prompt_len: prompt.len(), taken: 0, ended, end: None })
    }

    /// The logits of every position of `ids`, `[ids.len(), vocab]`, in passes of the compiled chunk sizes; `each` hears
    /// how many positions are done.
    ///
    /// # Errors
    /// As [`Engine::generate`]; or an engine not made with [`EngineConfig::all_logits`].
    pub fn logits(&mut self, ids: &[u32], mut each: impl FnMut(usize)) -> Result<Vec<f32>, EngineError> {
        if !self.all_logits {
            return Err(EngineError::Purpose("every position's logits"));
        }
        self.check_prompt(ids)?;
        self.resident.set_tokens(ids);
        let max_rows: Vec<u32> = self.resident.compiled.image.view().programs.iter().map(|p| p.max_rows).collect();
        let mut logits = Vec::with_capacity(ids.len() * self.model.config().vocab_size());
        let mut first = 0;
        while first < ids.len() {
            let left = ids.len() - first;
            let fitting = max_rows.iter().position(|rows| *rows as usize >= left);
            let program = ProgramId(fitting.unwrap_or(max_rows.len() - 1) as u32);
            let rows = left.min(max_rows[program.idx()] as usize);
            self.resident.start(one_pass(program, first as u32, rows as u32, (first + rows) as u32));
            self.resident.finish()?;
            let output = self.resident.output(program, "logits").ok_or(EngineError::Purpose("logits"))?;
            logits.extend(self.resident.read_f32(&output, rows)?);
            first += rows;
            each(first);
        }
        Ok(logits)
    }

    /// The logits that the last token of the last generation was chosen from.
    pub fn last_logits(&mut self) -> Option<Vec<f32>> {
        let decode = ProgramId(0);
        let output = self.resident.output(decode, "logits")?;
        self.resident.read_f32(&output, 1).ok()
    }

    /// When the last run started, and when each of its passes ended.
    pub fn stamps(&self) -> Vec<Instant> {
        self.resident.stamps()
    }
}

/// A generation under way: iterate over its tokens.
#[derive(Debug)]
pub struct Generation<'a> {
    resident: &'a mut Resident,
    text: Option<DecodeStream<'a>>,
    prompt_len: usize,
    taken: usize,
    ended: bool,
    end: Option<End>,
}

impl Generation<'_> {
    /// Asks the run to end after the token under way; tokens already made can still be taken.
    pub fn stop(&self) {
        self.resident.stop();
    }

    /// How many of the prompt's tokens have been read.
    pub fn prompt_done(&self) -> usize {
        (self.resident.position() as usize).min(self.prompt_len)
    }

    /// Why it ended, once it has.
    pub fn end(&self) -> Option<End> {
        self.end
    }

    /// The next token if there is one within `patience`; `Ok(None)` says neither that there is one nor that it has ended
    /// (see [`Generation::end`] and [`Generation::is_ended`]).
    ///
    /// # Errors
    /// The run's first fault.
    pub fn poll(&mut self, patience: Duration) -> Result<Option<Token>, EngineError> {
        let began = Instant::now();
        loop {
            if self.resident.produced() as usize > self.taken {
                let id = self.resident.token(self.prompt_len + self.taken);
                self.taken += 1;
                let text = match &mut self.text {
                    Some(stream) => stream.push(id)?,
                    None => String::new(),
                };
                return Ok(Some(Token { id, text }));
            }
            if self.ended {
                return Ok(None);
            }
            if !self.resident.is_running() && self.resident.produced() as usize == self.taken {
                self.ended = true;
                let control = self.resident.finish()?;
                self.end = End::from_u32(control.end);
                // The reference has run as a whole; its tokens are there only now.
                continue;
            }
            if began.elapsed() >= patience {
                return Ok(None);
            }
            self.resident.rest();
        }
    }

    /// Whether the run is over and every token has been taken.
    pub fn is_ended(&self) -> bool {
        self.ended && self.resident.produced() as usize <= self.taken
    }

    /// Text that was held back because a character might still have been completed; empty as a rule.
    ///
    /// # Errors
    /// From the tokenizer.
    pub fn rest_of_text(&mut self) -> Result<String, EngineError> {
        match self.text.take() {
            Some(stream) => Ok(stream.finish()?),
            None => Ok(String::new()),
        }
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<Token, EngineError>;

    fn next(&mut self) -> Option<Result<Token, EngineError>> {
        loop {
            match self.poll(Duration::from_secs(3600)) {
                Ok(Some(token)) => return Some(Ok(token)),
                Ok(None) if self.is_ended() => return None,
                Ok(None) => {}
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

impl Drop for Generation<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.resident.stop();
            // Whatever the run ended with, nobody is there to hear it.
            let _ = self.resident.finish();
        }
    }
}

/// A sentence embedding model, resident.
#[derive(Debug)]
pub struct Embedder {
    model: Model,
    resident: Resident,
}

/// Rows of the passes compiled for sentences; the model's own maximum is added.
const SENTENCE_ROWS: [usize; 4] = [16, 32, 64, 128];

impl Embedder {
    /// Compiles `model` and starts its workers.
    ///
    /// # Errors
    /// From the model folder, the compiler, the memory or the system.
    pub fn new(model: &Model, config: &EngineConfig) -> Result<Embedder, EngineError> {
        let place = Place::of(config)?;
        let max = model.max_tokens();
        let mut rows: Vec<usize> = SENTENCE_ROWS.into_iter().filter(|rows| *rows < max).collect();
        rows.push(max);
        let sources = sentence_sources(model, &rows)?;
        let resident = Resident::at(sources, model, place, |_| {})?;
        Ok(Embedder { model: model.clone(), resident })
    }

    /// The embedding of `text`, cut to the model's longest input.
    ///
    /// # Errors
    /// From the tokenizer or the run.
    pub fn embed(&mut self, text: &str) -> Result<Vec<f32>, EngineError> {
        let ids = self.model.encode_sentence(text)?;
        self.embed_ids(&ids)
    }

    /// The embedding of the sentence with token ids `ids`.
    ///
    /// # Errors
    /// No ids, too many, or ids the model does not have.
    pub fn embed_ids(&mut self, ids: &[u32]) -> Result<Vec<f32>, EngineError> {
        if ids.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        model::check_token_ids(ids, self.model.config().vocab_size())?;
        let programs = self.resident.compiled.image.view().programs;
        let Some(program) = programs.iter().position(|p| p.max_rows as usize >= ids.len()) else {
            let max = self.model.max_tokens();
            return Err(EngineError::PromptTooLong { tokens: ids.len(), context: max, model: max });
        };
        let program = ProgramId(program as u32);
        self.resident.set_tokens(ids);
        self.resident.start(one_pass(program, 0, ids.len() as u32, ids.len() as u32));
        self.resident.finish()?;
        let output = self.resident.output(program, "embedding").ok_or(EngineError::Purpose("embeddings"))?;
        Ok(self.resident.read_f32(&output, 1)?)
    }

    /// See [`Embedder::resident`].
    pub fn resident_mut(&mut self) -> &mut Resident {
        &mut self.resident
    }

    /// The image and its executor.
    pub fn resident(&self) -> &Resident {
        &self.resident
    }
}
