//! A compiled image and what runs it.

use super::{Device, EngineConfig, EngineError};
use crate::compile::{Compiled, Config, Source, compile};
use crate::cuda::fake::{self, Fake, Runs};
use crate::cuda::{Gpu, GpuError};
use crate::device_image::device_image;
use crate::exec::cuda::Cuda;
use crate::exec::memory::{Memory, MemoryError, WeightSource};
use crate::exec::{Executor, RunError, Stopper, check_pass, cuda, reference, simt, threads};
use crate::graph::lower::Target;
use perpetua_device::cpu::simd::Isa;
use perpetua_shared::control::{Control, Step};
use perpetua_shared::image::BindingKind;
use perpetua_shared::limits::MAX_WORKERS;
use perpetua_shared::task::Operand;
use perpetua_shared::{ProgramId, Technique};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Of `kept` tokens that a cache has, how many `prompt` begins with: what need not be read again. With `whole`, the
/// cache has nothing but what is so after the last of them.
pub(super) fn reusable(kept: usize, prompt: &[u32], whole: bool, token: impl Fn(usize) -> u32) -> usize {
    let alike = (0..kept.min(prompt.len())).take_while(|at| token(*at) == prompt[*at]).count();
    if whole && alike < kept { 0 } else { alike }
}

/// A compiled image and its executor: what engines and embedders share.
#[derive(Debug)]
pub struct Resident {
    pub(super) compiled: Compiled,
    executor: Box<dyn Executor>,
    compile_time: Duration,
    /// So many tokens of the token buffer have their keys and values in the cache, which the last text generation has
    /// left there; 0 when something else has run since.
    kept: usize,
}

impl Resident {
    /// Compiles `sources` and makes them resident where `config` says, as it says there; what it says of a model
    /// (context, chunks, batches) is in the sources.
    ///
    /// # Errors
    /// From the compiler, the memory or the system.
    pub fn new(
        sources: Vec<Source>,
        weights: &dyn WeightSource,
        config: &EngineConfig,
    ) -> Result<Resident, EngineError> {
        Resident::at(sources, weights, Place::of(config)?, &config.just_in_time, |_| {})
    }

    /// As [`Resident::new`], at `place`; `just_in_time` are operators as [`Config::just_in_time`] has them, and
    /// `progress` is called with the bytes of weights that have been handed to a GPU.
    ///
    /// # Errors
    /// As [`Resident::new`].
    pub(super) fn at(
        sources: Vec<Source>,
        weights: &dyn WeightSource,
        place: Place,
        just_in_time: &[String],
        progress: impl FnMut(u64),
    ) -> Result<Resident, EngineError> {
        let began = Instant::now();
        let compiled =
            compile(sources, &Config { just_in_time: just_in_time.to_vec(), ..Config::new(place.target()) })?;
        let compile_time = began.elapsed();
        let image = || compiled.image.clone();
        let memory = || Memory::new(&compiled, weights);
        let executor: Box<dyn Executor> = match place {
            Place::Gpu { gpu, options, .. } => Box::new(Cuda::new(gpu, &compiled, weights, options, progress)?),
            Place::Reference => Box::new(reference::Reference::new(image(), memory()?)),
            Place::Simt { .. } => Box::new(simt::Simt::new(image(), memory()?, simt::Options::default())),
            Place::Cpu { options, .. } => {
                Box::new(threads::Threads::new(image(), memory()?, options).map_err(EngineError::Threads)?)
            }
        };
        Ok(Resident { compiled, executor, compile_time, kept: 0 })
    }

    /// What was compiled.
    pub fn compiled(&self) -> &Compiled {
        &self.compiled
    }

    /// How long compiling took.
    pub fn compile_time(&self) -> Duration {
        self.compile_time
    }

    /// Rows `..rows` of an f32 output of rank 2, or its first `rows` elements when it has rank 1; waits for a run to
    /// end.
    ///
    /// # Errors
    /// A device that is lost.
    ///
    /// # Panics
    /// When the output is another compilation's, or not of floats.
    pub fn read_f32(&mut self, output: &Operand, rows: usize) -> Result<Vec<f32>, RunError> {
        let mut out = Vec::new();
        self.append_f32(output, rows, &mut out)?;
        Ok(out)
    }

    /// As [`Resident::read_f32`], to the end of `out`.
    pub(super) fn append_f32(&mut self, output: &Operand, rows: usize, out: &mut Vec<f32>) -> Result<(), RunError> {
        self.executor.append_f32(output, rows, out)
    }

    /// Writes the input called `name`; waits for a run to end.
    ///
    /// # Errors
    /// When there is no such input, or it has another size.
    pub fn set_input(&mut self, name: &str, contents: &[u8]) -> Result<(), MemoryError> {
        self.executor.set_input(name, contents)
    }

    pub(super) fn set_tokens(&mut self, position: usize, tokens: &[u32]) {
        self.kept = 0;
        self.executor.set_tokens(position, tokens);
    }

    /// What a generation that has ended with `control` leaves in the cache.
    pub(super) fn keep(&mut self, control: &Control) {
        self.kept = if control.n_sequences == 0 { control.step.first_pos as usize } else { 0 };
    }

    /// How many tokens at the start of `prompt` are in the cache, of which a run may go on from any, or, if `whole`,
    /// from the last alone.
    pub(super) fn kept_of(&self, prompt: &[u32], whole: bool) -> usize {
        reusable(self.kept, prompt, whole, |at| self.token(at))
    }

    /// The output called `name` of program `program`.
    pub fn output(&self, program: ProgramId, name: &str) -> Option<Operand> {
        let outputs = &self.compiled.programs.get(program.idx())?.outputs;
        outputs.iter().find(|(known, _)| known == name).map(|(_, operand)| *operand)
    }

    /// Whether there is such a program, with so many rows, and room for so many tokens.
    fn check_pass(&self, program: ProgramId, rows: u32, tokens: usize) -> Result<(), RunError> {
        check_pass(&self.compiled.image, program, rows)?;
        let buffer = self.compiled.bindings.iter().find(|binding| binding.kind == BindingKind::Tokens);
        let Some(buffer) = buffer else { unreachable!("every image has one") };
        let room = buffer.bytes as usize / size_of::<u32>();
        if tokens > room {
            let expected = format!("{room} at most, which the token buffer has room for");
            return Err(RunError::Pass { given: format!("{tokens} tokens"), expected });
        }
        Ok(())
    }

    /// Starts a run from `control`.
    ///
    /// # Panics
    /// As [`Executor::start_with`].
    pub fn start(&mut self, control: Control) {
        self.start_with(control, &Stopper::default());
    }

    /// As [`Resident::start`]; `stopper`, of this run alone, ends it after the pass under way.
    ///
    /// # Panics
    /// As [`Executor::start_with`].
    pub fn start_with(&mut self, control: Control, stopper: &Stopper) {
        self.kept = 0;
        self.executor.start_with(control, stopper);
    }

    /// The executor, where it is a GPU: for traces and drills.
    pub fn cuda(&mut self) -> Option<&mut Cuda> {
        self.executor.cuda()
    }

    pub(super) fn produced(&self) -> u32 {
        self.executor.produced()
    }

    pub(super) fn produced_of(&self, sequence: usize) -> u32 {
        self.executor.produced_of(sequence)
    }

    pub(super) fn token(&self, position: usize) -> u32 {
        self.executor.token(position)
    }

    pub(super) fn is_running(&mut self) -> bool {
        self.executor.is_running()
    }

    pub(super) fn rest(&self) {
        self.executor.rest();
    }

    pub(super) fn position(&self) -> u32 {
        self.executor.position()
    }

    /// Waits for the run to end.
    ///
    /// # Errors
    /// Its first fault.
    pub fn finish(&mut self) -> Result<Control, RunError> {
        self.executor.finish()
    }

    /// When the last run started, and when each of its passes ended.
    pub fn stamps(&self) -> Vec<Instant> {
        self.executor.stamps()
    }

    /// Time all workers together have waited for events so far.
    pub fn waited(&self) -> Duration {
        self.executor.waited()
    }

    /// See [`Executor::event_cost`].
    pub fn event_cost(&mut self) -> Option<Duration> {
        self.executor.event_cost()
    }

    /// Bytes allocated beside the weights used in place: cache, intermediates, tables.
    pub fn owned_bytes(&self) -> u64 {
        self.executor.owned_bytes()
    }

    /// Runs one pass of program `program` over `tokens`, as the first of their sequence.
    ///
    /// # Errors
    /// The first fault; no such program, or more tokens than it or the token buffer has rows.
    pub fn run_tokens(&mut self, program: ProgramId, tokens: &[u32]) -> Result<(), RunError> {
        self.check_pass(program, tokens.len() as u32, tokens.len())?;
        self.set_tokens(0, tokens);
        let n = tokens.len() as u32;
        self.start(one_pass(program, 0, n, n));
        self.finish().map(|_| ())
    }

    /// Runs one pass of program `program` over the last of `tokens`; those before it have been run.
    ///
    /// # Errors
    /// The first fault; no such program, or more tokens than the token buffer has rows.
    pub fn run_last(&mut self, program: ProgramId, tokens: &[u32]) -> Result<(), RunError> {
        self.check_pass(program, tokens.len().min(1) as u32, tokens.len())?;
        self.set_tokens(0, tokens);
        let n = tokens.len() as u32;
        self.start(one_pass(program, n.saturating_sub(1), n.min(1), n));
        self.finish().map(|_| ())
    }

    /// Runs passes over `tokens`, as the first of their sequence: each of the first program that all that are left fit,
    /// or of the last one. `each` sees what every pass has made of the tokens at these positions.
    pub(super) fn read(
        &mut self,
        tokens: &[u32],
        mut each: impl FnMut(&mut Resident, ProgramId, Range<usize>) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        self.set_tokens(0, tokens);
        let max_rows: Vec<usize> = self.compiled.image.view().programs.iter().map(|p| p.max_rows as usize).collect();
        let mut first = 0;
        while first < tokens.len() {
            let left = tokens.len() - first;
            let program = max_rows.iter().position(|rows| *rows >= left).unwrap_or(max_rows.len() - 1);
            let end = first + left.min(max_rows[program]);
            let program = ProgramId(program as u32);
            self.start(one_pass(program, first as u32, (end - first) as u32, end as u32));
            self.finish()?;
            each(self, program, first..end)?;
            first = end;
        }
        Ok(())
    }

    /// Runs one pass of program `program` over its first `rows` rows, or all of them
    /// ([`ALL_ROWS`](perpetua_shared::control::ALL_ROWS)): the whole of a graph without a token dimension.
    ///
    /// # Errors
    /// The first fault; no such program, or more rows than it has.
    pub fn run_once(&mut self, program: ProgramId, rows: u32) -> Result<(), RunError> {
        self.check_pass(program, rows, 0)?;
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
pub(super) enum Place {
    Reference,
    Cpu { n_workers: u32, options: threads::Options },
    Simt { n_workers: u32 },
    Gpu { gpu: Gpu, n_workers: u32, options: cuda::Options },
}

impl Place {
    pub(super) fn of(config: &EngineConfig) -> Result<Place, EngineError> {
        let max = MAX_WORKERS;
        let cpu = || {
            let n_workers = workers(config.threads, threads::usable_cores(), max)?;
            Ok(Place::Cpu { n_workers, options: config.cpu.clone() })
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
            (Device::Ptx, _) => {
                let n_workers = workers(config.threads, SIMT_WORKERS, max)?;
                let options = fake::Options { runs: Runs::Ptx, ..fake::Options::new(n_workers, u64::MAX) };
                let gpu = Gpu::with_driver(Arc::new(Fake::new(options)))?;
                Ok(Place::Gpu { gpu, n_workers, options: config.cuda })
            }
            (Device::Cuda | Device::Auto, Some(gpu)) => on(gpu.clone()),
            (Device::Cuda, None) if device_image().is_none() => Err(GpuError::NoImage.into()),
            (Device::Cuda, None) => on(Gpu::open()?),
            (Device::Auto, None) if device_image().is_none() => cpu(),
            (Device::Auto, None) => Gpu::open().map_or_else(|_| cpu(), on),
        }
    }

    /// Whether it is one, or is simulated.
    pub(super) fn is_gpu(&self) -> bool {
        matches!(self, Place::Simt { .. } | Place::Gpu { .. })
    }

    fn target(&self) -> Target {
        match self {
            Place::Reference => Target::reference(),
            Place::Cpu { n_workers, .. } => {
                Target { cuts_rows: !Isa::best().has_matrix_unit(), ..Target::cpu(*n_workers) }
            }
            Place::Simt { n_workers } => Target::gpu(*n_workers),
            Place::Gpu { n_workers, options, .. } => {
                Target { has_flags: !options.without.has(Technique::Flags), ..Target::gpu(*n_workers) }
            }
        }
    }
}

/// How many workers `given` asks for, by default `usual`.
fn workers(given: Option<usize>, usual: usize, max: usize) -> Result<u32, EngineError> {
    let n = given.unwrap_or(usual);
    if n == 0 || n > max {
        let which = if max < MAX_WORKERS { ", the number of the GPU's SMs" } else { "" };
        return Err(EngineError::option("threads", n, format!("1 to {max}{which}")));
    }
    Ok(n as u32)
}
