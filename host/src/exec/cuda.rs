//! The persistent kernel on an NVIDIA GPU: one launch per run of the token loop. Or, to see what that brings, the same bodies
//! as a launch per operator ([`Mode::PerOperator`]).
//!
//! *Memory.* Everything the kernel touches lies in one allocation on the device: the image, the counters, then the bindings. The launch
//! block that says where is the kernel's parameter. Weights are brought there once, as they lie in the checkpoint: the kernels read rows, so there is
//! nothing to repack.
//! *Talking.* Tokens come through the [mailbox](perpetua_shared::launch::Mail), pinned memory of the host that the kernel
//! writes and never waits for. The control block lies on the device, where 132 workers read it every iteration; the word
//! `stop` is written there by a copy on a second stream, which runs beside the kernel, by whichever thread tells the run's
//! [`Stopper`].
//! *Ending.* The kernel ends by itself: at a stop token, at the bounds in its control block, when it is told to stop, and
//! when a wait outlasts [`Options::timeout`], which is a fault that names task, event and workers. Should it not, the host
//! gives up after a few times as long, says so, and leaves the context alone: what a kernel that does not end still writes
//! must not be given back. When the process dies the driver ends the kernel.
//! *Operator by operator.* A program is a CUDA graph, a chain of its [operators](operators()): each begins when the one before
//! has ended, so there are no events, and loaders bring what their own task takes. The step lies in the control block on the device, where `advance` moves
//! it on, so one graph serves every pass. The host knows which programs follow each other, but for an end that comes early, and
//! launches [`AHEAD`] passes ahead: on the way from one to the next nobody waits for the host. Passes launched beyond the end
//! see another program in the step, or none, and do nothing.

use super::memory::{MemoryError, WeightSource, read_f32, weight_parts};
use super::operators::operators;
use super::sections::{self, Sections};
use super::threads::usable_cores;
use super::{Executor, RunError, Stopper, check_sequences, count_on};
use crate::compile::Compiled;
use crate::cuda::driver::{
    CudaError, DevicePtr, Driver, Function, GraphExec, Launch, Module, OperatorNode, Pinned, Stream,
};
use crate::cuda::{Entered, Gpu, GpuError, Piece, Ticket, upload};
use crate::device_image::device_image;
use crate::image::Image;
use bytemuck::Zeroable;
use perpetua_device::advance;
use perpetua_shared::control::{Control, End, NO_PROGRAM, STOP, Step};
use perpetua_shared::image::{BindingKind, ProgramDesc};
use perpetua_shared::launch::{BLOCK_THREADS, LaunchParams, Mail, TILE_BYTES, TaskTrace};
use perpetua_shared::task::Operand;
use perpetua_shared::{DType, EventId, Fault, FaultCode, TaskId, Technique, Techniques, Turn, WorkerId};
use std::collections::{BTreeMap, VecDeque};
use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What a run is on the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// One launch of the persistent kernel.
    #[default]
    Persistent,
    /// A CUDA graph for each pass, in which every operator is a launch: what others do, to compare with. Weights come as they do in the
    /// persistent kernel, but none before their operator's launch; there are no traces, and nothing that could stall.
    PerOperator,
}

/// How the kernel behaves.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// What a run is.
    pub mode: Mode,
    /// The longest a worker waits for one event, one row or one tile.
    pub timeout: Duration,
    /// What is not done. Whether there are [`Technique::Flags`] is a matter of the program that an engine compiles for the GPU, see
    /// [`Target::has_flags`](crate::graph::lower::Target::has_flags); the rest may be chosen anew for each run, see [`Cuda::leave_out`].
    pub without: Techniques,
    /// Whether the host can read which task each worker began last even when the context is lost: a store through the bus for each task, to
    /// find what a GPU does not take. Otherwise that is told of stalls alone.
    pub recorder: bool,
    /// Tasks of each worker whose times are taken in each run, see [`Cuda::trace`] and [`Cuda::set_tracing`]; 0: none.
    pub n_trace: u32,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            mode: Mode::Persistent,
            timeout: Duration::from_millis(500),
            without: Techniques::NONE,
            recorder: false,
            n_trace: 0,
        }
    }
}

/// Alignment of everything on the device: a bulk copy's 16 bytes, and a sector of the cache.
const ALIGN: u64 = 256;

/// Dynamic shared memory that a kernel may have without its attribute.
const SHARED_UNASKED: u32 = 48 << 10;

/// Passes launched before the first of them has ended, at most.
const AHEAD: usize = 16;

/// Pinned memory through which everything but the weights goes, a part at a time.
const STAGE_BYTES: usize = 1 << 20;

/// Where things lie in the one allocation, from its start.
#[derive(Debug, Default)]
struct Layout {
    /// Each of the image's, as they are [listed](Sections::list).
    sections: Vec<u64>,
    /// Counters, the fault record, positions and paces: zeroed together.
    counters: u64,
    fault: u64,
    positions: u64,
    paces: u64,
    trace: u64,
    trace_end: u64,
    bindings: Vec<u64>,
    bytes: u64,
}

impl Layout {
    fn new(compiled: &Compiled, sections: &Sections<'_>, options: &Options) -> Layout {
        let view = compiled.image.view();
        let mut layout = Layout::default();
        let mut end = 0u64;
        let mut place = |bytes: usize, align: u64| {
            let at = end.next_multiple_of(align.max(ALIGN));
            end = at + bytes as u64;
            at
        };
        layout.sections = sections.list().iter().map(|section| place(section.bytes.len(), 1)).collect();
        layout.counters = place(4 * sections::counters(&view), 1);
        layout.fault = place(size_of::<Fault>(), 1);
        layout.positions = place(4 * view.n_workers as usize, 1);
        layout.paces = place(4 * view.n_workers as usize, 1);
        layout.trace = place(size_of::<TaskTrace>() * options.n_trace as usize * view.n_workers as usize, 1);
        layout.trace_end = place(0, 1);
        for binding in &compiled.bindings {
            layout.bindings.push(place(binding.bytes as usize, u64::from(binding.align_bytes)));
        }
        layout.bytes = end.next_multiple_of(ALIGN);
        layout
    }
}

/// Which entries of the mailbox the passes of a run write.
#[derive(Debug, Default)]
struct Post {
    /// Of the passes that read prompts and make no token, which come first: where the last token that each reads stands in the token buffer.
    reads: Vec<usize>,
    /// Where the next token of each sequence will stand, in the token buffer, too, when the run begins.
    first: Vec<usize>,
}

impl Post {
    /// Of a run from `control`, of an image with `programs`; a sequence has `part` tokens of the buffer.
    fn new(control: &Control, programs: &[ProgramDesc], part: usize) -> Post {
        let sequences = control.sequences[..control.n_sequences as usize].iter().enumerate();
        let first = match control.n_sequences {
            0 => vec![control.n_tokens as usize],
            _ => sequences.map(|(at, sequence)| at * part + sequence.n_tokens as usize).collect(),
        };
        let last = |step: Step| step.sequence as usize * part + (step.first_pos + step.rows).saturating_sub(1) as usize;
        Post { reads: steps(control, programs).take_while(|step| step.sampling == 0).map(last).collect(), first }
    }
}

/// What the host has seen of the run under way.
#[derive(Debug, Default)]
struct Seen {
    post: Post,
    /// Passes that have read prompts.
    n_read: usize,
    /// What has been made of each sequence.
    made: Vec<Made>,
    /// Tokens in the cache.
    position: u32,
    /// The token buffer, as far as the host has written it or heard of it.
    tokens: Vec<u32>,
}

/// What a run has made of a sequence.
#[derive(Clone, Debug, Default)]
struct Made {
    /// Tokens.
    n: usize,
    /// The entry of each pass's first token, and how many tokens were in the cache when the last one had ended.
    passes: Vec<usize>,
    position: u32,
}

impl Seen {
    /// Of a run that begins, over what the token buffer holds.
    fn begin(&mut self, post: Post) {
        let made = vec![Made::default(); post.first.len()];
        *self = Seen { made, post, n_read: 0, position: 0, tokens: std::mem::take(&mut self.tokens) };
    }

    /// The sequence that most passes have made tokens of: any has one from each, until it ends.
    fn longest(&self) -> &[usize] {
        self.made.iter().map(|made| &made.passes[..]).max_by_key(|passes| passes.len()).unwrap_or_default()
    }

    /// How many passes have ended.
    fn passes(&self) -> usize {
        self.n_read + self.longest().len()
    }

    /// The entry of pass `pass`, which has ended.
    fn entry(&self, pass: usize) -> usize {
        let reads = &self.post.reads;
        reads.get(pass).copied().unwrap_or_else(|| self.longest()[pass - reads.len()])
    }

    /// Where the next token of `sequence` will stand.
    fn next_of(&self, sequence: usize) -> usize {
        self.post.first[sequence] + self.made[sequence].n
    }

    /// Sequence `sequence` has made `token`, in a pass after which there were `position` tokens in the cache.
    fn make(&mut self, sequence: usize, token: u32, position: u32) {
        let at = self.next_of(sequence);
        let made = &mut self.made[sequence];
        made.n += 1;
        // Those of one pass say the same, and each pass reads something.
        if made.passes.is_empty() || made.position != position {
            made.passes.push(at);
            made.position = position;
        }
        if at >= self.tokens.len() {
            self.tokens.resize(at + 1, 0);
        }
        self.tokens[at] = token;
    }
}

/// A run's, since the host last looked and heard something new.
#[derive(Debug)]
struct Silence {
    passes: usize,
    since: Instant,
    /// When the run was told to stop for it.
    told: Option<Instant>,
}

/// The executor.
#[derive(Debug)]
pub struct Cuda {
    gpu: Gpu,
    image: Image,
    options: Options,
    layout: Layout,
    sizes: Vec<u64>,
    names: Vec<(BindingKind, String)>,
    control: usize,
    tokens: usize,
    resources: Resources,
    base: DevicePtr,
    kernels: Kernels,
    stage: Pinned,
    /// The word 1, and the mailbox.
    flag: Pinned,
    mailbox: Pinned,
    n_mail: usize,
    /// Where workers are, if that is in memory of the host.
    recorder: Option<Pinned>,
    stream: Stream,
    side: Stream,
    params: LaunchParams,
    /// Programs whose passes are yet to be launched, and how many passes of the run have been.
    passes: VecDeque<u32>,
    n_launched: usize,
    program_runs: [u32; perpetua_shared::limits::MAX_PROGRAMS],
    iteration: u32,
    /// The run's that is under way.
    ticket: Option<Ticket>,
    /// Of the run under way, or the last one.
    stopper: Stopper,
    is_tracing: bool,
    launched: Instant,
    finished: Option<Instant>,
    seen: Mutex<Seen>,
    silence: Option<Silence>,
    /// For how long the run had not been heard of when it was told to stop for that, and nobody else had told it.
    gave_up: Option<Duration>,
    outcome: Option<Result<Control, RunError>>,
    /// Why nothing can be run any more.
    lost: Option<RunError>,
}

/// What is launched.
#[derive(Clone, Debug)]
enum Kernels {
    Persistent(Function),
    /// By program.
    PerOperator(Vec<GraphExec>),
}

/// What must be given back.
#[derive(Debug)]
struct Resources {
    gpu: Gpu,
    streams: Vec<Stream>,
    graphs: Vec<GraphExec>,
    module: Option<Module>,
    memory: Option<DevicePtr>,
    pinned: Vec<Pinned>,
    /// The kernel may still run: then nothing is.
    is_lost: bool,
}

impl Drop for Resources {
    fn drop(&mut self) {
        if self.is_lost {
            // Nor is the context, which would wait for the kernel.
            std::mem::forget(self.gpu.clone());
            return;
        }
        let Ok(_entered) = self.gpu.enter() else { return };
        let driver = self.gpu.driver();
        // Nobody is left to hear of errors, and there is nothing to do about them.
        for stream in &self.streams {
            let _ = driver.synchronize(*stream);
        }
        for stream in self.streams.drain(..) {
            let _ = driver.destroy_stream(stream);
        }
        for graph in self.graphs.drain(..) {
            let _ = driver.destroy_exec(graph);
        }
        if let Some(module) = self.module.take() {
            let _ = driver.unload_module(module);
        }
        // SAFETY: allocated by `Cuda::new`, and the streams that used them are idle.
        unsafe {
            if let Some(memory) = self.memory.take() {
                let _ = driver.free(memory);
            }
            for pinned in self.pinned.drain(..) {
                let _ = driver.free_pinned(pinned);
            }
        }
    }
}

/// Why the executor cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaNewError {
    /// The device.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// The weights.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

impl From<CudaError> for CudaNewError {
    fn from(error: CudaError) -> CudaNewError {
        CudaNewError::Gpu(GpuError::Cuda(error))
    }
}

impl Cuda {
    /// Makes `compiled`, an image for as many workers as the device has SMs, resident on `gpu`; `progress` is called with
    /// the bytes of weights and constants that have been handed over.
    ///
    /// # Errors
    /// A device that lacks the room, the driver, or weights that are not there.
    pub fn new(
        gpu: Gpu,
        compiled: &Compiled,
        weights: &dyn WeightSource,
        options: Options,
        progress: impl FnMut(u64),
    ) -> Result<Cuda, CudaNewError> {
        let mut resources = Resources {
            gpu: gpu.clone(),
            streams: Vec::new(),
            graphs: Vec::new(),
            module: None,
            memory: None,
            pinned: Vec::new(),
            is_lost: false,
        };
        let image = compiled.image.clone();
        let view = image.view();
        let mut sections = Sections::new(&image);
        let layout = Layout::new(compiled, &sections, &options);
        let entered = gpu.enter()?;
        let driver = gpu.driver();
        refuse_too_large(&gpu, compiled, &layout)?;
        let code = device_image().ok_or(GpuError::NoImage)?;
        let code = match options.mode {
            Mode::Persistent => &code.worker,
            Mode::PerOperator => &code.operator,
        };
        let module = gpu.load_module(code)?;
        resources.module = Some(module);
        let function = kernel(&gpu, module, code.entry, BLOCK_THREADS, TILE_BYTES)?;
        let base = driver.alloc(layout.bytes)?;
        resources.memory = Some(base);
        let side = driver.create_stream()?;
        resources.streams.push(side);
        let stream = match gpu.stream() {
            Some(stream) => stream,
            None => {
                let stream = driver.create_stream()?;
                resources.streams.push(stream);
                stream
            }
        };
        let tokens = compiled.bindings.iter().position(|b| b.kind == BindingKind::Tokens);
        // A graph without tokens has passes that read rows of something else.
        let places = tokens.map_or(0, |tokens| compiled.bindings[tokens].bytes as usize / 4);
        let n_mail = view.programs.iter().map(|program| program.max_rows as usize).max().unwrap_or(0).max(places) + 1;
        let mut pinned = |bytes: usize| {
            let pinned = driver.alloc_pinned(bytes)?;
            resources.pinned.push(pinned);
            Ok::<_, CudaError>(pinned)
        };
        let (stage, flag, mailbox) = (pinned(STAGE_BYTES)?, pinned(4)?, pinned(n_mail * size_of::<Mail>())?);
        let recorder = options.recorder.then(|| pinned(4 * view.n_workers as usize)).transpose()?;
        // SAFETY: fresh, aligned memory of this size.
        unsafe { flag.host.cast::<u32>().write(1) };

        let at = |offset: u64| base.offset(offset).0;
        let control = compiled.bindings.iter().position(|b| b.kind == BindingKind::Control);
        let control = control.expect("every image has a control block: `compile` adds it");
        let params = LaunchParams {
            counters: at(layout.counters),
            control: at(layout.bindings[control]),
            fault: at(layout.fault),
            mailbox: mailbox.device.0,
            positions: recorder.map_or(at(layout.positions), |recorder| recorder.device.0),
            paces: at(layout.paces),
            trace: at(layout.trace),
            timeout_ns: u64::try_from(options.timeout.as_nanos()).unwrap_or(u64::MAX),
            n_mail: n_mail as u32,
            n_trace: options.n_trace,
            without: options.without,
            ..sections.launch_params(layout.sections.iter().map(|offset| at(*offset)))
        };
        let kernels = match options.mode {
            Mode::Persistent => Kernels::Persistent(function),
            Mode::PerOperator => {
                // Nothing is counted or traced in launches of an operator.
                let params = LaunchParams { iteration: 0, n_trace: 0, ..params };
                for program in 0..view.programs.len() {
                    let graph = program_graph(driver, &image, program as u32, function, &params)?;
                    resources.graphs.push(graph);
                }
                Kernels::PerOperator(resources.graphs.clone())
            }
        };

        sections.bind(layout.bindings.iter().map(|offset| at(*offset)).collect());
        let mut pieces = Vec::new();
        let mut piece = |offset: u64, bytes| pieces.push(Piece { to: base.offset(offset), bytes });
        for (section, offset) in sections.list().iter().zip(&layout.sections) {
            piece(*offset, section.bytes);
        }
        for (binding, offset) in compiled.bindings.iter().zip(&layout.bindings) {
            match (binding.kind, &binding.contents) {
                (BindingKind::Weight, _) => {
                    let mut to = *offset;
                    for part in weight_parts(weights, binding)? {
                        piece(to, part);
                        to += part.len() as u64;
                    }
                }
                (_, Some(contents)) => piece(*offset, contents),
                (_, None) if binding.bytes == 0 => {}
                // SAFETY: the binding's room, which nothing uses yet.
                (_, None) => unsafe { driver.set(base.offset(*offset), 0, binding.bytes, stream)? },
            }
        }
        // SAFETY: as above; the sections follow each other.
        unsafe { driver.set(base.offset(layout.counters), 0, layout.trace_end - layout.counters, stream)? };
        driver.synchronize(stream)?;
        // SAFETY: every piece goes to a place of the layout that was made for it, and nothing runs.
        unsafe { upload(&gpu, &pieces, usable_cores(), progress)? };
        drop(entered);

        Ok(Cuda {
            options,
            sizes: compiled.bindings.iter().map(|b| b.bytes).collect(),
            names: compiled.bindings.iter().map(|b| (b.kind, b.name.clone())).collect(),
            control,
            tokens: tokens.unwrap_or(usize::MAX),
            resources,
            base,
            kernels,
            stage,
            flag,
            mailbox,
            n_mail,
            recorder,
            stream,
            side,
            params,
            passes: VecDeque::new(),
            n_launched: 0,
            program_runs: Zeroable::zeroed(),
            iteration: 0,
            ticket: None,
            stopper: Stopper::default(),
            is_tracing: true,
            launched: Instant::now(),
            finished: None,
            seen: Mutex::default(),
            silence: None,
            gave_up: None,
            outcome: None,
            lost: None,
            layout,
            image,
            gpu,
        })
    }

    /// The device.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Bytes on the device, weights included.
    pub fn device_bytes(&self) -> u64 {
        self.layout.bytes
    }

    fn driver(&self) -> &dyn Driver {
        self.gpu.driver()
    }

    /// Makes the context current, unless a kernel runs there that does not end: whoever waited for a stream would wait for it.
    fn enter(&self) -> Result<Entered<'_>, CudaError> {
        if self.resources.is_lost {
            let name = "the kernel does not end".to_owned();
            return Err(CudaError { call: "a run", code: 702, name, text: None });
        }
        self.gpu.enter()
    }

    fn at(&self, binding: usize) -> DevicePtr {
        self.base.offset(self.layout.bindings[binding])
    }

    /// Copies `bytes` to the device and waits for it.
    ///
    /// # Safety
    /// There is room for them at `to`, and no kernel runs that uses it.
    unsafe fn write(&self, to: DevicePtr, bytes: &[u8]) -> Result<(), CudaError> {
        let _entered = self.enter()?;
        for (i, part) in bytes.chunks(STAGE_BYTES).enumerate() {
            // SAFETY: the stage is as large and nobody reads it: every use of it ends by waiting for the stream.
            unsafe {
                self.stage.host.copy_from_nonoverlapping(part.as_ptr(), part.len());
                self.driver().copy_in(to.offset((i * STAGE_BYTES) as u64), self.stage.host, part.len(), self.stream)?;
            }
            self.driver().synchronize(self.stream)?;
        }
        Ok(())
    }

    /// Copies from the device into `bytes`.
    ///
    /// # Safety
    /// There are as many bytes at `from`, and no kernel runs that writes them.
    unsafe fn read(&self, from: DevicePtr, bytes: &mut [u8]) -> Result<(), CudaError> {
        let _entered = self.enter()?;
        for (i, part) in bytes.chunks_mut(STAGE_BYTES).enumerate() {
            // SAFETY: as in `write`.
            unsafe {
                self.driver().copy_out(
                    self.stage.host,
                    from.offset((i * STAGE_BYTES) as u64),
                    part.len(),
                    self.stream,
                )?;
                self.driver().synchronize(self.stream)?;
                self.stage.host.copy_to_nonoverlapping(part.as_mut_ptr(), part.len());
            }
        }
        Ok(())
    }

    /// Tokens of the buffer that a sequence has.
    fn tokens_of_sequence(&self) -> usize {
        if self.tokens < self.sizes.len() { self.image.part_bytes(self.tokens) as usize / 4 } else { 0 }
    }

    /// Launches a run; that of the stopper `before` was the last.
    fn launch(&mut self, control: &Control, before: &Stopper) -> Result<(), CudaError> {
        let n_trace = if self.is_tracing { self.options.n_trace } else { 0 };
        let params = LaunchParams { iteration: self.iteration, n_trace, ..self.params };
        if before.is_told() {
            // A copy of the word may be under way.
            let _entered = self.gpu.enter()?;
            self.driver().synchronize(self.side)?;
        }
        // SAFETY: the control block has its place in the layout and no kernel runs; the mailbox is the host's until one does.
        unsafe {
            self.mailbox.host.write_bytes(0, self.n_mail * size_of::<Mail>());
            if let Some(recorder) = self.recorder {
                recorder.host.write_bytes(0, 4 * self.params.n_workers as usize);
            }
            self.write(self.at(self.control), bytemuck::bytes_of(control))?;
        }
        self.open();
        let _entered = self.gpu.enter()?;
        let traced = self.layout.trace_end - self.layout.trace;
        if n_trace > 0 {
            // SAFETY: the trace's place.
            unsafe { self.driver().set(self.base.offset(self.layout.trace), 0, traced, self.stream)? };
        }
        let ticket = Ticket::draw(&self.gpu);
        self.launched = Instant::now();
        match self.kernels {
            Kernels::Persistent(function) => {
                let launch = Launch {
                    function,
                    blocks: self.params.n_workers,
                    threads: BLOCK_THREADS,
                    shared_bytes: TILE_BYTES,
                    stream: self.stream,
                    param: bytemuck::bytes_of(&params),
                };
                // SAFETY: the launch block is as `LaunchParams` says, of an image that its check has judged; all of it stays
                // until the executor is dropped, which waits for the kernel's end.
                unsafe { self.driver().launch(&launch)? };
            }
            Kernels::PerOperator(_) => {
                drop(_entered);
                self.passes = steps(control, self.image.view().programs).map(|step| step.program).collect();
                self.n_launched = 0;
                self.launch_ahead()?;
            }
        }
        self.ticket = Some(ticket);
        Ok(())
    }

    /// Launches passes until [`AHEAD`] of them have not been heard of.
    fn launch_ahead(&mut self) -> Result<(), CudaError> {
        let Kernels::PerOperator(graphs) = &self.kernels else { return Ok(()) };
        let heard = self.look().passes();
        let n = (heard + AHEAD).saturating_sub(self.n_launched).min(self.passes.len());
        let _entered = self.gpu.enter()?;
        for program in self.passes.drain(..n) {
            // SAFETY: as in `launch`: each node is an operator of the image's, in its order.
            unsafe { self.gpu.driver().launch_graph(graphs[program as usize], self.stream)? };
            self.n_launched += 1;
        }
        Ok(())
    }

    /// For drills: `event` will be one trigger short in every run to come until a fault, so that whoever waits for it
    /// stalls. Waits for a run to end.
    ///
    /// # Errors
    /// A device that is lost.
    pub fn miscount(&mut self, event: EventId) -> Result<(), RunError> {
        self.wait();
        assert!(event.0 < self.params.n_events, "the image has {} events", self.params.n_events);
        let counter = self.base.offset(self.layout.counters + 4 * u64::from(event.0));
        let mut count = 0u32;
        // SAFETY: the event's counter; no kernel runs.
        let write = unsafe {
            self.read(counter, bytemuck::bytes_of_mut(&mut count))
                .and_then(|()| self.write(counter, &count.wrapping_sub(1).to_ne_bytes()))
        };
        write.map_err(|error| self.lose(error))
    }

    /// For drills: task `task` will write nothing, until it is no longer muted, so that whoever waits for what it
    /// [flags](perpetua_shared::flag) stalls. Waits for a run to end.
    ///
    /// # Errors
    /// A device that is lost.
    pub fn mute(&mut self, task: TaskId, is_muted: bool) -> Result<(), RunError> {
        self.wait();
        assert!(task.0 < self.params.n_tasks, "the image has {} tasks", self.params.n_tasks);
        let record = self.params.turns + 4 * u64::from(self.params.turn_words) * u64::from(task.0);
        let word = DevicePtr(record).offset(offset_of!(Turn, row_first) as u64);
        // No pass has so many rows.
        let row_first = if is_muted { u32::MAX } else { self.image.view().tasks[task.idx()].row_first };
        // SAFETY: a word of the task's record; no kernel runs.
        unsafe { self.write(word, &row_first.to_ne_bytes()) }.map_err(|error| self.lose(error))
    }

    /// Has whoever tells the stopper copy the word `stop` to the device, until [`Cuda::wait`] has seen the run's end.
    fn open(&self) {
        let (gpu, to) = (self.gpu.clone(), self.at(self.control).offset(STOP as u64));
        let (flag, side) = (self.flag, self.side);
        let bring = move || -> Result<(), CudaError> {
            let _entered = gpu.enter()?;
            // The whole of it, which may go to other threads as its address alone may not.
            let flag = flag;
            // SAFETY: `stop` is a word of the control block that the host may write at any time; the flag is never written
            // again; all is there until the executor is dropped, which closes the stopper before. Nobody waits for the copy,
            // lest a GPU that does not answer stop the host, too: before the word is written otherwise, `launch` does.
            unsafe { gpu.driver().copy_in(to, flag.host, 4, side) }
        };
        // A device that is lost says so to whoever waits for the run's end.
        self.stopper.open(move || drop(bring()));
    }

    /// Asks the run to end after the iteration that runs.
    pub fn stop(&self) {
        self.stopper.stop();
    }

    fn seen_mut(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads what mail there is.
    fn look(&self) -> MutexGuard<'_, Seen> {
        let mut seen = self.seen_mut();
        let entry = |at: usize| {
            if at >= self.n_mail {
                return None;
            }
            let mail = self.mailbox.host.cast::<Mail>().wrapping_add(at);
            // SAFETY: inside the mailbox, aligned; the kernel writes the word at once, and the host only between runs.
            let word = unsafe { AtomicU64::from_ptr(&raw mut (*mail).word) };
            Mail::read(word.load(Ordering::Acquire))
        };
        let next_read = |seen: &Seen| seen.post.reads.get(seen.n_read).copied();
        while let Some((position, _)) = next_read(&seen).and_then(entry) {
            seen.n_read += 1;
            seen.position = position;
        }
        for sequence in 0..seen.made.len() {
            while let Some((position, Some(token))) = entry(seen.next_of(sequence)) {
                seen.make(sequence, token, position);
                seen.position = position;
            }
        }
        seen
    }

    /// Gives up on a run of which nothing has been heard for so long that it cannot end by itself, and which has been told to
    /// stop in vain.
    fn lose_patience(&mut self) {
        // It begins when those before it have ended.
        if self.ticket.as_ref().is_some_and(Ticket::is_waiting) {
            self.silence = None;
            return;
        }
        let patience = 4 * self.options.timeout + Duration::from_secs(2);
        let passes = self.look().passes();
        let silence = self.silence.get_or_insert_with(|| Silence { passes, since: Instant::now(), told: None });
        if silence.passes != passes {
            self.silence = None;
        } else if silence.told.unwrap_or(silence.since).elapsed() > patience {
            if silence.told.replace(Instant::now()).is_none() {
                // The first time counts: after it the run has been told, though not by whoever wanted it to end.
                if self.gave_up.is_none() {
                    self.gave_up = Some(silence.since.elapsed()).filter(|_| !self.stopper.is_told());
                }
                return self.stop();
            }
            let silent = silence.since.elapsed().as_secs_f64();
            let what = format!(
                "the kernel has not been heard of for {silent:.1} s and does not end; the GPU's context cannot be used any more \
                 by this process{}",
                self.recorded().unwrap_or_default()
            );
            let (task, worker) = ("a run".to_owned(), "the GPU".to_owned());
            self.lost = Some(RunError::Defect { task, worker, what });
            self.resources.is_lost = true;
            self.ticket = None;
        }
    }

    /// Waits for the kernel's end.
    fn wait(&mut self) {
        while self.is_running() {
            self.rest();
        }
        self.stopper.close();
        if self.finished.is_none() {
            self.finished = Some(Instant::now());
        }
    }

    fn lose(&mut self, error: CudaError) -> RunError {
        let error = match self.recorded() {
            Some(others) => RunError::Lost { error, others },
            None => RunError::Cuda(error),
        };
        self.lost.get_or_insert(error).clone()
    }

    fn collect(&mut self) -> Result<Result<Control, RunError>, CudaError> {
        let (mut control, mut fault) = (Control::zeroed(), Fault::default());
        // SAFETY: their places in the layout; no kernel runs.
        unsafe {
            self.read(self.at(self.control), bytemuck::bytes_of_mut(&mut control))?;
            self.read(self.base.offset(self.layout.fault), bytemuck::bytes_of_mut(&mut fault))?;
        }
        if fault.code == FaultCode::None as u32 {
            self.program_runs = control.program_runs;
            self.iteration = match self.kernels {
                Kernels::Persistent(_) => control.step.iteration,
                // Nothing counts on from run to run, and the graphs' launch blocks say 0.
                Kernels::PerOperator(_) => 0,
            };
            return Ok(match self.gave_up.filter(|_| control.end == End::Stopped as u32) {
                None => Ok(control),
                Some(silence) => {
                    let what =
                        format!("the kernel was not heard of for {:.1} s, and was told to stop", silence.as_secs_f64());
                    Err(RunError::Defect { task: "a run".to_owned(), worker: "the GPU".to_owned(), what })
                }
            });
        }
        let mut error = RunError::of(&fault, &self.image);
        if let RunError::Stalled { others, .. } = &mut error {
            *others = self.positions()?;
        }
        // Start over with clean counters and flags, no fault and nobody anywhere.
        self.program_runs = Zeroable::zeroed();
        self.iteration = 0;
        let _entered = self.gpu.enter()?;
        // SAFETY: the sections follow each other, as do a binding's bytes; no kernel runs.
        unsafe {
            let bytes = self.layout.trace - self.layout.counters;
            self.driver().set(self.base.offset(self.layout.counters), 0, bytes, self.stream)?;
            for (binding, (kind, _)) in self.names.iter().enumerate() {
                if *kind == BindingKind::Flagged {
                    self.driver().set(self.at(binding), 0, self.sizes[binding], self.stream)?;
                }
            }
        }
        self.driver().synchronize(self.stream)?;
        Ok(Err(error))
    }

    /// What each worker began last, in words.
    fn positions(&self) -> Result<String, CudaError> {
        if let Some(recorded) = self.recorded() {
            return Ok(recorded);
        }
        let mut words = vec![0u32; self.params.n_workers as usize];
        // SAFETY: its place in the layout; no kernel runs.
        unsafe { self.read(self.base.offset(self.layout.positions), bytemuck::cast_slice_mut(&mut words))? };
        Ok(self.places(&words))
    }

    /// The same, where it is in memory of the host, whatever the device does.
    fn recorded(&self) -> Option<String> {
        let words = self.recorder?.host.cast::<u32>();
        // SAFETY: a word for every worker, aligned, which a kernel may write meanwhile.
        let words = (0..self.params.n_workers as usize).map(|worker| unsafe { words.add(worker).read_volatile() });
        Some(self.places(&words.collect::<Vec<u32>>()))
    }

    /// `words`, one more than the task of each worker, in words: equal ones together, the rarest (those that are behind) first.
    fn places(&self, words: &[u32]) -> String {
        let mut at: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for (worker, word) in words.iter().enumerate() {
            let place = match word.checked_sub(1) {
                Some(task) => self.image.task_name(task),
                None => "nothing yet".to_owned(),
            };
            at.entry(place).or_default().push(worker);
        }
        let mut groups: Vec<(String, Vec<usize>)> = at.into_iter().collect();
        groups.sort_by_key(|(_, workers)| workers.len());
        let words = groups.iter().take(8).map(|(place, workers)| match workers[..] {
            [worker] => format!("w{worker} began {place}"),
            [first, ..] => format!("{} workers (w{first}, ...) began {place}", workers.len()),
            [] => unreachable!("a group has a member"),
        });
        format!("; last, {}", words.collect::<Vec<_>>().join(", "))
    }

    /// What runs to come do without; waits for a run to end.
    ///
    /// # Panics
    /// Of a launch per operator, and when it has other [`Technique::Flags`] than before: those were compiled.
    pub fn leave_out(&mut self, without: Techniques) {
        self.wait();
        assert!(matches!(self.kernels, Kernels::Persistent(_)), "graphs of operators are made once");
        assert_eq!(without.has(Technique::Flags), self.params.without.has(Technique::Flags), "flags are compiled");
        self.params.without = without;
    }

    /// Whether runs to come take times: as many as [`Options::n_trace`] made room for.
    pub fn set_tracing(&mut self, is_tracing: bool) {
        self.is_tracing = is_tracing;
    }

    /// When each worker ran the first [`Options::n_trace`] tasks of the last run that took times; waits for a run to end.
    ///
    /// # Errors
    /// A device that is lost.
    pub fn trace(&mut self) -> Result<Vec<(WorkerId, TaskTrace)>, RunError> {
        self.wait();
        let n_trace = self.options.n_trace as usize;
        let mut entries = vec![TaskTrace::default(); n_trace * self.params.n_workers as usize];
        // SAFETY: its place in the layout; no kernel runs.
        let read = unsafe { self.read(self.base.offset(self.layout.trace), bytemuck::cast_slice_mut(&mut entries)) };
        read.map_err(|error| self.lose(error))?;
        let rows = entries.chunks(n_trace.max(1)).zip(0..);
        let written = rows.flat_map(|(row, w)| row.iter().filter(|e| e.ended_ns != 0).map(move |e| (WorkerId(w), *e)));
        Ok(written.collect())
    }
}

impl Executor for Cuda {
    fn start_with(&mut self, mut control: Control, stopper: &Stopper) {
        check_sequences(&self.image, &control);
        self.wait();
        if matches!(self.kernels, Kernels::PerOperator(_)) {
            // Which program comes next would depend on the text, and passes are launched ahead.
            control.max_drafts = 0;
        }
        let part = self.tokens_of_sequence();
        self.seen_mut().begin(Post::new(&control, self.image.view().programs, part));
        self.silence = None;
        self.gave_up = None;
        self.finished = None;
        self.launched = Instant::now();
        if let Some(lost) = &self.lost {
            self.outcome = Some(Err(lost.clone()));
            return;
        }
        count_on(&mut control, self.program_runs, self.iteration);
        self.outcome = None;
        let before = std::mem::replace(&mut self.stopper, stopper.clone());
        if let Err(error) = self.launch(&control, &before) {
            let lost = self.lose(error);
            self.outcome = Some(Err(lost));
        }
    }

    fn finish(&mut self) -> Result<Control, RunError> {
        self.wait();
        if let Some(lost) = &self.lost {
            return Err(lost.clone());
        }
        if let Some(outcome) = &self.outcome {
            return outcome.clone();
        }
        let outcome = self.collect().map_err(|error| self.lose(error))?;
        self.outcome = Some(outcome.clone());
        outcome
    }

    fn produced(&self) -> u32 {
        self.look().made.iter().map(|made| made.n as u32).sum()
    }

    fn produced_of(&self, sequence: usize) -> u32 {
        self.look().made.get(sequence).map_or(0, |made| made.n as u32)
    }

    fn token(&self, position: usize) -> u32 {
        self.seen_mut().tokens[position]
    }

    fn set_tokens(&mut self, position: usize, tokens: &[u32]) {
        self.wait();
        let end = position + tokens.len();
        assert!(4 * end as u64 <= self.sizes[self.tokens], "tokens must fit the token buffer");
        let mut seen = self.seen_mut();
        if seen.tokens.len() < end {
            seen.tokens.resize(end, 0);
        }
        seen.tokens[position..end].copy_from_slice(tokens);
        drop(seen);
        let to = self.at(self.tokens).offset(4 * position as u64);
        // SAFETY: they fit, and no kernel runs.
        if let Err(error) = unsafe { self.write(to, bytemuck::cast_slice(tokens)) } {
            self.lose(error);
        }
    }

    fn set_input(&mut self, name: &str, contents: &[u8]) -> Result<(), MemoryError> {
        self.wait();
        let known = |(kind, known): &(BindingKind, String)| *kind == BindingKind::Input && known == name;
        let number = self.names.iter().position(known).ok_or_else(|| MemoryError::Missing(name.to_owned()))?;
        if contents.len() as u64 != self.sizes[number] {
            let found = contents.len() as u64;
            return Err(MemoryError::Size { name: name.to_owned(), found, expected: self.sizes[number] });
        }
        // SAFETY: the binding has exactly this many bytes, and no kernel runs.
        if let Err(error) = unsafe { self.write(self.at(number), contents) } {
            self.lose(error);
        }
        Ok(())
    }

    fn append_f32(&mut self, output: &Operand, rows: usize, out: &mut Vec<f32>) -> Result<(), RunError> {
        self.wait();
        if let Some(lost) = &self.lost {
            return Err(lost.clone());
        }
        // From the box's first element to its last.
        let size = output.dtype().map_or(4, DType::size_bytes) as u64;
        let dims = 0..usize::from(output.rank);
        let last: u64 = dims.map(|d| u64::from(output.extent[d].max(1) - 1) * u64::from(output.stride_elems[d])).sum();
        let bytes = ((last + 1) * size) as usize;
        let mut words = vec![0u64; bytes.div_ceil(8)];
        let from = self.at(output.binding.idx()).offset(output.offset_bytes);
        // SAFETY: the image's check has judged the box inside its binding, and no kernel runs.
        unsafe { self.read(from, &mut bytemuck::cast_slice_mut(&mut words)[..bytes]) }
            .map_err(|error| self.lose(error))?;
        let operand = Operand { offset_bytes: 0, ..*output };
        // SAFETY: the words hold the whole box, from its first element on.
        out.append(&mut unsafe { read_f32(words.as_mut_ptr().cast(), &operand, rows) });
        Ok(())
    }

    /// The GPU's clock tells the distances between iterations, the host's the time of the last.
    fn stamps(&self) -> Vec<Instant> {
        let mut stamps = vec![self.launched];
        let seen = self.look();
        let finished = self.finished.unwrap_or_else(Instant::now);
        let mail = |pass| self.mailbox.host.cast::<Mail>().wrapping_add(seen.entry(pass));
        // SAFETY: inside the mailbox, and written before the words that have been seen, or at the kernel's end at the latest.
        let stamp = |pass: usize| unsafe { (&raw const (*mail(pass)).stamp_ns).read_volatile() };
        let last = seen.passes().checked_sub(1).map_or(0, stamp);
        let ago = |pass| Duration::from_nanos(last.saturating_sub(stamp(pass)));
        stamps.extend((0..seen.passes()).map(|pass| finished.checked_sub(ago(pass)).unwrap_or(self.launched)));
        stamps
    }

    /// On the device.
    fn owned_bytes(&self) -> u64 {
        let weights = self.names.iter().zip(&self.sizes).filter(|((kind, _), _)| *kind == BindingKind::Weight);
        self.layout.bytes - weights.map(|(_, bytes)| bytes).sum::<u64>()
    }

    /// Not one that has been given up, because nothing has been heard of it for too long.
    fn is_running(&mut self) -> bool {
        if self.ticket.is_some() {
            let done = self
                .launch_ahead()
                .and_then(|()| self.gpu.enter())
                .and_then(|_entered| self.driver().is_done(self.stream));
            match done {
                Ok(false) => self.lose_patience(),
                // Passes that were launched before, have ended, and have not been heard of came after the loop's end.
                Ok(true) if !self.passes.is_empty() && self.look().passes() == self.n_launched => {}
                Ok(true) => self.ticket = None,
                Err(error) => {
                    self.ticket = None;
                    self.lose(error);
                }
            }
        }
        self.ticket.is_some()
    }

    fn rest(&self) {
        // A token takes some hundred microseconds, and a sleeping thread is late by fifty.
        std::thread::sleep(Duration::from_micros(20));
    }

    fn position(&self) -> u32 {
        self.look().position
    }

    fn cuda(&mut self) -> Option<&mut Cuda> {
        Some(self)
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if self.is_running() {
            self.stop();
        }
        self.wait();
    }
}

fn refuse_too_large(gpu: &Gpu, compiled: &Compiled, layout: &Layout) -> Result<(), GpuError> {
    let (free, _) = gpu.driver().memory()?;
    if layout.bytes <= free {
        return Ok(());
    }
    let of = |kind| compiled.bindings.iter().filter(|b| b.kind == kind).map(|b| b.bytes).sum();
    let (weights, cache): (u64, u64) = (of(BindingKind::Weight), of(BindingKind::State));
    let (device, needed) = (gpu.info().name.clone(), layout.bytes);
    Err(GpuError::Memory { device, free, needed, weights, cache, rest: needed - weights - cache })
}

/// The steps of a run from `control`'s on, pass by pass, unless a stop token, the host or a fault ends it before.
fn steps(control: &Control, programs: &[ProgramDesc]) -> impl Iterator<Item = Step> {
    let mut control = Control { stop: 0, ..*control };
    control.requests.iter_mut().for_each(|request| request.stops = 0);
    std::iter::from_fn(move || {
        let step = Some(control.step).filter(|step| step.program != NO_PROGRAM)?;
        match control.n_sequences {
            0 => advance::advance(&mut control, programs, 0),
            _ => advance::advance_batch(&mut control, programs, |_, _| 0),
        }
        Some(step)
    })
}

/// Program `program` of `image` as a chain of launches of `function`.
fn program_graph(
    driver: &dyn Driver,
    image: &Image,
    program: u32,
    function: Function,
    params: &LaunchParams,
) -> Result<GraphExec, CudaError> {
    let graph = driver.create_graph()?;
    let mut last = None;
    let mut chain = || {
        for tasks in operators(image, program as usize) {
            let node = OperatorNode {
                function,
                blocks: tasks.end - tasks.start,
                threads: BLOCK_THREADS,
                shared_bytes: TILE_BYTES,
                params: *params,
                program,
                first_task: tasks.start,
            };
            last = Some(driver.add_node(graph, last, &node)?);
        }
        driver.instantiate(graph)
    };
    let exec = chain();
    // Nothing is left to do with it, whatever the driver says.
    let _ = driver.destroy_graph(graph);
    exec
}

/// Entry `name`, which may be launched with that many threads and bytes of dynamic shared memory.
fn kernel(gpu: &Gpu, module: Module, name: &str, threads: u32, shared_bytes: u32) -> Result<Function, GpuError> {
    let driver = gpu.driver();
    let function = driver.function(module, name)?;
    if shared_bytes > SHARED_UNASKED {
        driver.set_shared_bytes(function, shared_bytes)?;
    }
    if driver.blocks_per_sm(function, threads, shared_bytes)? == 0 {
        return Err(GpuError::TooLarge { device: gpu.info().name.clone(), shared_bytes, threads });
    }
    Ok(function)
}
