//! The persistent kernel on an NVIDIA GPU: one launch per run of the token loop. Or, to see what that brings, the same
//! bodies as a launch per operator ([`Mode::PerOperator`]).
//!
//! *Memory.* Everything the kernel touches lies in one allocation on the device: the image, the counters, then the
//! bindings. The launch block that says where is the kernel's parameter. Weights are brought there once, as they lie in
//! the checkpoint: the kernels read rows, so there is nothing to repack. *Talking.* Tokens come through the
//! [mailbox](perpetua_shared::launch::Mail), pinned memory of the host that the kernel writes and never waits for. The
//! control block lies on the device, where 132 workers read it every iteration; the word `stop` is written there by a
//! copy on a second stream, which runs beside the kernel, by whichever thread tells the run's [`Stopper`]. *Ending.*
//! The kernel ends by itself: at a stop token, at the bounds in its control block, when it is told to stop, and when a
//! wait outlasts [`Options::timeout`], which is a fault that names task, event and workers. Should it not, the host
//! gives up after a few times as long, says so, and leaves the context alone: what a kernel that does not end still
//! writes must not be given back. When the process dies the driver ends the kernel.

mod device;
mod drills;
mod launch;
mod mail;
mod resources;
mod stall;

use super::memory::{MemoryError, WeightSource};
use super::sections::Sections;
use super::{Executor, RunError, Stopper, check_control, count_on};
use crate::compile::Compiled;
use crate::cuda::driver::CudaError;
use crate::cuda::{Gpu, GpuError, Ticket};
use crate::image::Image;
use bytemuck::Zeroable;
use device::{Device, Layout};
use launch::{Launches, StopWord};
use mail::{Mailbox, Post};
use perpetua_shared::control::{Control, End};
use perpetua_shared::image::BindingKind;
use perpetua_shared::launch::LaunchParams;
use perpetua_shared::limits::MAX_PROGRAMS;
use perpetua_shared::task::Operand;
use perpetua_shared::{Fault, FaultCode, Technique, Techniques};
use resources::Resources;
use stall::{Patience, Positions, Verdict};
use std::time::{Duration, Instant};

/// What a run is on the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// One launch of the persistent kernel.
    #[default]
    Persistent,
    /// A CUDA graph for each pass, in which every operator is a launch: what others do, to compare with. Weights come
    /// as they do in the persistent kernel, but none before their operator's launch; there are no traces, and nothing
    /// that could stall.
    PerOperator,
}

/// How the kernel behaves.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// What a run is.
    pub mode: Mode,
    /// The longest a worker waits for one event, one row or one tile.
    pub timeout: Duration,
    /// What is not done. Whether there are [`Technique::Flags`] is a matter of the program that an engine compiles for
    /// the GPU, see [`Target::has_flags`](crate::graph::lower::Target::has_flags); the rest may be chosen anew for each
    /// run, see [`Cuda::leave_out`].
    pub without: Techniques,
    /// Whether the host can read which task each worker began last even when the context is lost: a store through the
    /// bus for each task, to find what a GPU does not take. Otherwise that is told of stalls alone.
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

/// The executor.
#[derive(Debug)]
pub struct Cuda {
    image: Image,
    options: Options,
    device: Device,
    /// The bindings of these kinds.
    control: usize,
    tokens: usize,
    launches: Launches,
    stop_word: StopWord,
    mailbox: Mailbox,
    positions: Positions,
    is_tracing: bool,
    /// What earlier runs have counted.
    program_runs: [u32; MAX_PROGRAMS],
    iteration: u32,
    /// The run's that is under way.
    ticket: Option<Ticket>,
    /// Of the run under way, or the last one.
    stopper: Stopper,
    launched: Instant,
    finished: Option<Instant>,
    patience: Patience,
    outcome: Option<Result<Control, RunError>>,
    /// Why nothing can be run any more.
    lost: Option<RunError>,
}

impl Cuda {
    /// Makes `compiled`, an image for as many workers as the device has SMs, resident on `gpu`; `progress` is called
    /// with the bytes of weights and constants that have been handed over.
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
        let (image, bindings) = (compiled.image.clone(), &compiled.bindings);
        let view = image.view();
        let mut sections = Sections::new(&image);
        let layout = Layout::new(&image, &sections, bindings, options.n_trace);
        let entered = gpu.enter()?;
        layout.check_fits(&gpu)?;
        let mut resources = Resources::new(gpu.clone());
        let function = launch::kernel(&mut resources, options.mode)?;
        let mut device = Device::new(resources, layout)?;
        let [control, tokens] = [BindingKind::Control, BindingKind::Tokens].map(|kind| {
            let found = device.find(|room| room.kind == kind);
            found.expect("every image has one of each: `compile` adds it, and `image::check` judges that")
        });
        let places = device.bytes_of(tokens) as usize / 4;
        let stop_word = StopWord::new(&mut device)?;
        let mailbox = Mailbox::new(&mut device, &view, places)?;
        let positions = Positions::new(&mut device, view.n_workers, &options)?;

        let at = |offset: u64| device.place(offset).0;
        let params = LaunchParams {
            counters: at(device.layout.counters),
            control: device.at(control).0,
            fault: at(device.layout.fault),
            mailbox: mailbox.address(),
            positions: positions.address(&device).0,
            paces: at(device.layout.paces),
            trace: at(device.layout.trace),
            timeout_ns: u64::try_from(options.timeout.as_nanos()).unwrap_or(u64::MAX),
            n_mail: mailbox.n_mail as u32,
            n_trace: options.n_trace,
            without: options.without,
            ..sections.launch_params(device.sections())
        };
        let launches = Launches::new(&mut device, &image, options.mode, function, params)?;
        sections.bind(device.bindings());
        // SAFETY: the layout was made for them, and nothing has been launched.
        unsafe { device.bring(&sections, bindings, weights, progress)? };
        drop(entered);

        Ok(Cuda {
            patience: Patience::new(options.timeout),
            options,
            device,
            control,
            tokens,
            launches,
            stop_word,
            mailbox,
            positions,
            is_tracing: true,
            program_runs: Zeroable::zeroed(),
            iteration: 0,
            ticket: None,
            stopper: Stopper::default(),
            launched: Instant::now(),
            finished: None,
            outcome: None,
            lost: None,
            image,
        })
    }

    /// The device.
    pub fn gpu(&self) -> &Gpu {
        self.device.gpu()
    }

    /// Bytes on the device, weights included.
    pub fn device_bytes(&self) -> u64 {
        self.device.layout.bytes
    }

    /// What runs to come do without; waits for a run to end.
    ///
    /// # Panics
    /// Of a launch per operator, and when it has other [`Technique::Flags`] than before: those were compiled.
    pub fn leave_out(&mut self, without: Techniques) {
        self.wait();
        assert!(self.launches.is_persistent(), "graphs of operators are made once");
        let params = &mut self.launches.params;
        assert_eq!(without.has(Technique::Flags), params.without.has(Technique::Flags), "flags are compiled");
        params.without = without;
    }

    /// Asks the run to end after the iteration that runs.
    pub fn stop(&self) {
        self.stopper.stop();
    }

    /// Tokens of the buffer that a sequence has.
    fn tokens_of_sequence(&self) -> usize {
        self.image.part_bytes(self.tokens) as usize / 4
    }

    /// Launches a run; that of the stopper `before` was the last.
    fn launch(&mut self, control: &Control, before: &Stopper) -> Result<(), CudaError> {
        self.stop_word.settle(&self.device, before)?;
        // SAFETY: the control block has its place in the layout, and no kernel runs.
        unsafe {
            self.mailbox.clear();
            self.positions.clear();
            self.device.write(self.device.at(self.control), bytemuck::bytes_of(control))?;
        }
        // Until `wait` has seen the run's end.
        self.stop_word.open(&self.device, self.control, &self.stopper);
        let n_trace = if self.is_tracing { self.options.n_trace } else { 0 };
        if n_trace > 0 {
            // SAFETY: no kernel runs.
            unsafe { self.device.zero_trace()? };
        }
        let ticket = Ticket::draw(self.gpu());
        self.launched = Instant::now();
        self.launches.begin(&self.device, &self.image, control, self.iteration, n_trace)?;
        self.ticket = Some(ticket);
        Ok(())
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

    /// Launches what is to follow, and says whether all that has been launched has ended.
    fn go_on(&mut self) -> Result<bool, CudaError> {
        self.launches.go_on(&self.device, self.mailbox.look().passes())?;
        let _entered = self.gpu().enter()?;
        self.device.driver().is_done(self.device.stream)
    }

    /// Gives up on a run of which nothing has been heard for so long that it cannot end by itself, and which has been
    /// told to stop in vain.
    fn lose_patience(&mut self) {
        // It begins when those before it have ended.
        if self.ticket.as_ref().is_some_and(Ticket::is_waiting) {
            return self.patience.rest();
        }
        match self.patience.judge(self.mailbox.look().passes(), self.stopper.is_told()) {
            Verdict::Wait => {}
            Verdict::Stop => self.stop(),
            Verdict::GiveUp(silent) => {
                self.lost = Some(stall::given_up(silent, self.positions.recorded(&self.image)));
                self.device.resources.lose();
                self.ticket = None;
            }
        }
    }

    /// The device fails with `error`: why nothing can be run any more.
    fn lose(&mut self, error: CudaError) -> RunError {
        let error = match self.positions.recorded(&self.image) {
            Some(others) => RunError::Lost { error, others },
            None => RunError::Cuda(error),
        };
        self.lost.get_or_insert(error).clone()
    }

    /// How the run has ended, once no kernel runs.
    fn collect(&mut self) -> Result<Result<Control, RunError>, CudaError> {
        let (mut control, mut fault) = (Control::zeroed(), Fault::default());
        // SAFETY: their places in the layout; no kernel runs.
        unsafe {
            self.device.read(self.device.at(self.control), bytemuck::bytes_of_mut(&mut control))?;
            self.device.read(self.device.place(self.device.layout.fault), bytemuck::bytes_of_mut(&mut fault))?;
        }
        if fault.code == FaultCode::None as u32 {
            self.program_runs = control.program_runs;
            // In graphs nothing counts on from run to run, and their launch blocks say 0.
            self.iteration = if self.launches.is_persistent() { control.step.iteration } else { 0 };
            let stopped = self.patience.stopped().filter(|_| control.end == End::Stopped as u32);
            return Ok(stopped.map_or(Ok(control), Err));
        }
        let mut error = RunError::of(&fault, &self.image);
        if let RunError::Stalled { others, .. } = &mut error {
            // SAFETY: no kernel runs.
            *others = unsafe { self.positions.told(&self.device, &self.image)? };
        }
        self.program_runs = Zeroable::zeroed();
        self.iteration = 0;
        // SAFETY: no kernel runs.
        unsafe { self.device.start_over()? };
        Ok(Err(error))
    }
}

impl Executor for Cuda {
    fn start_with(&mut self, mut control: Control, stopper: &Stopper) {
        check_control(&self.image, &control);
        self.wait();
        if !self.launches.is_persistent() {
            // Which program comes next would depend on the text, and passes are launched ahead.
            control.max_drafts = 0;
        }
        let part = self.tokens_of_sequence();
        self.mailbox.begin(Post::new(&control, self.image.view().programs, part));
        self.patience.begin();
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
        self.mailbox.look().produced()
    }

    fn produced_of(&self, sequence: usize) -> u32 {
        self.mailbox.look().produced_of(sequence)
    }

    fn token(&self, position: usize) -> u32 {
        self.mailbox.seen().token(position)
    }

    fn set_tokens(&mut self, position: usize, tokens: &[u32]) {
        self.wait();
        let buffer = self.tokens;
        let end = 4 * (position + tokens.len()) as u64;
        assert!(end <= self.device.bytes_of(buffer), "tokens must fit the token buffer");
        self.mailbox.seen().set_tokens(position, tokens);
        let to = self.device.at(buffer).offset(4 * position as u64);
        // SAFETY: they fit, and no kernel runs.
        if let Err(error) = unsafe { self.device.write(to, bytemuck::cast_slice(tokens)) } {
            self.lose(error);
        }
    }

    fn set_input(&mut self, name: &str, contents: &[u8]) -> Result<(), MemoryError> {
        self.wait();
        let number = self.device.find(|room| room.kind == BindingKind::Input && room.name == name);
        let Some(number) = number else {
            return Err(MemoryError::no_input(name, self.device.names_of(BindingKind::Input)));
        };
        MemoryError::check_input(name, contents, self.device.bytes_of(number))?;
        // SAFETY: the binding has exactly this many bytes, and no kernel runs.
        if let Err(error) = unsafe { self.device.write(self.device.at(number), contents) } {
            self.lose(error);
        }
        Ok(())
    }

    fn append_f32(&mut self, output: &Operand, rows: usize, out: &mut Vec<f32>) -> Result<(), RunError> {
        self.wait();
        if let Some(lost) = &self.lost {
            return Err(lost.clone());
        }
        // SAFETY: of an output of the image's, and no kernel runs.
        unsafe { self.device.append_f32(output, rows, out) }.map_err(|error| self.lose(error))
    }

    fn stamps(&self) -> Vec<Instant> {
        [vec![self.launched], self.mailbox.stamps(self.launched, self.finished)].concat()
    }

    /// On the device.
    fn owned_bytes(&self) -> u64 {
        self.device_bytes() - self.device.layout.sum_of(BindingKind::Weight)
    }

    /// Not one that has been given up, because nothing has been heard of it for too long.
    fn is_running(&mut self) -> bool {
        if self.ticket.is_some() {
            match self.go_on() {
                Ok(false) => self.lose_patience(),
                Ok(true) if self.launches.has_more(self.mailbox.look().passes()) => {}
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
        self.mailbox.look().position()
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
