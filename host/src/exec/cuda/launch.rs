//! The launches of a run, and the word that ends it.
//!
//! *The persistent kernel* is launched once. *Operator by operator.* A program is a CUDA graph, a chain of its
//! [operators](operators()): each begins when the one before has ended, so there are no events, and loaders bring what
//! their own task takes. The step lies in the control block on the device, where `advance` moves it on, so one graph
//! serves every pass. The host knows which programs follow each other, but for an end that comes early, and launches
//! [`AHEAD`] passes ahead: on the way from one to the next nobody waits for the host. Passes launched beyond the end
//! see another program in the step, or none, and do nothing.

use super::Mode;
use super::device::Device;
use super::resources::Resources;
use crate::cuda::GpuError;
use crate::cuda::driver::{CudaError, Driver, Function, GraphExec, Launch, OperatorNode, Pinned};
use crate::device_image::device_image;
use crate::exec::Stopper;
use crate::exec::operators::operators;
use crate::image::Image;
use perpetua_device::advance;
use perpetua_shared::control::{Control, NO_PROGRAM, STOP, Step};
use perpetua_shared::image::ProgramDesc;
use perpetua_shared::launch::{BLOCK_THREADS, LaunchParams, SHARED_BYTES};
use std::collections::VecDeque;

/// Passes launched before the first of them has ended, at most.
const AHEAD: usize = 16;

/// The kernel of `mode`, loaded, which may be launched with a worker's threads and shared memory.
pub(super) fn kernel(resources: &mut Resources, mode: Mode) -> Result<Function, GpuError> {
    let code = device_image().ok_or(GpuError::NoImage)?;
    let code = match mode {
        Mode::Persistent => &code.worker,
        Mode::PerOperator => &code.operator,
    };
    let module = resources.load(code)?;
    let driver = resources.driver();
    let (threads, shared_bytes) = (BLOCK_THREADS, SHARED_BYTES);
    let function = driver.function(module, code.entry)?;
    // More than a kernel may have without.
    driver.set_shared_bytes(function, shared_bytes)?;
    if driver.blocks_per_sm(function, threads, shared_bytes)? == 0 {
        return Err(GpuError::TooLarge { device: resources.gpu().info().name.clone(), shared_bytes, threads });
    }
    Ok(function)
}

/// What is launched, and how far the run under way is with it.
#[derive(Debug)]
pub(super) struct Launches {
    kernels: Kernels,
    /// The launch block, but for what changes from run to run.
    pub(super) params: LaunchParams,
    /// Programs whose passes are yet to be launched, and how many passes of the run have been.
    passes: VecDeque<u32>,
    n_launched: usize,
}

#[derive(Debug)]
enum Kernels {
    Persistent(Function),
    /// By program.
    PerOperator(Vec<GraphExec>),
}

impl Launches {
    /// Of `function`, the kernel of `mode`, over `image` on `device`, as `params` says.
    pub(super) fn new(
        device: &mut Device,
        image: &Image,
        mode: Mode,
        function: Function,
        params: LaunchParams,
    ) -> Result<Launches, CudaError> {
        let kernels = match mode {
            Mode::Persistent => Kernels::Persistent(function),
            Mode::PerOperator => {
                // Nothing is counted or traced in launches of an operator.
                let params = LaunchParams { iteration: 0, n_trace: 0, ..params };
                let mut graphs = Vec::new();
                for program in 0..image.view().programs.len() {
                    let graph = program_graph(device.driver(), image, program as u32, function, &params)?;
                    device.resources.keep(graph);
                    graphs.push(graph);
                }
                Kernels::PerOperator(graphs)
            }
        };
        Ok(Launches { kernels, params, passes: VecDeque::new(), n_launched: 0 })
    }

    /// Whether a run is one launch.
    pub(super) fn is_persistent(&self) -> bool {
        matches!(self.kernels, Kernels::Persistent(_))
    }

    /// Launches a run from `control`, `iteration` iterations after the counters were zeroed, which takes the times of
    /// `n_trace` tasks of each worker. Nothing has been heard of it.
    pub(super) fn begin(
        &mut self,
        device: &Device,
        image: &Image,
        control: &Control,
        iteration: u32,
        n_trace: u32,
    ) -> Result<(), CudaError> {
        let Kernels::Persistent(function) = self.kernels else {
            self.passes = steps(control, image.view().programs).map(|step| step.program).collect();
            self.n_launched = 0;
            return self.go_on(device, 0);
        };
        let params = LaunchParams { iteration, n_trace, ..self.params };
        let launch = Launch {
            function,
            blocks: params.n_workers,
            threads: BLOCK_THREADS,
            shared_bytes: SHARED_BYTES,
            stream: device.stream,
            param: bytemuck::bytes_of(&params),
        };
        let _entered = device.gpu().enter()?;
        // SAFETY: the launch block is as `LaunchParams` says, of an image that its check has judged; all of it stays
        // until the executor is dropped, which waits for the kernel's end.
        unsafe { device.driver().launch(&launch) }
    }

    /// Launches passes until [`AHEAD`] of them have not been heard of, when `heard` have been.
    pub(super) fn go_on(&mut self, device: &Device, heard: usize) -> Result<(), CudaError> {
        let Kernels::PerOperator(graphs) = &self.kernels else { return Ok(()) };
        let n = (heard + AHEAD).saturating_sub(self.n_launched).min(self.passes.len());
        let _entered = device.gpu().enter()?;
        for program in self.passes.drain(..n) {
            // SAFETY: as in `begin`: each node is an operator of the image's, in its order.
            unsafe { device.driver().launch_graph(graphs[program as usize], device.stream)? };
            self.n_launched += 1;
        }
        Ok(())
    }

    /// Whether the run goes on when what has been launched has ended, and `heard` passes have been heard of. Passes
    /// that have ended without being heard of came after the loop's end.
    pub(super) fn has_more(&self, heard: usize) -> bool {
        !self.passes.is_empty() && heard == self.n_launched
    }
}

/// The word `stop` of the control block, which a copy on a second stream brings to the device, beside the kernel.
#[derive(Debug)]
pub(super) struct StopWord {
    /// The word 1.
    flag: Pinned,
}

impl StopWord {
    pub(super) fn new(device: &mut Device) -> Result<StopWord, CudaError> {
        let flag = device.resources.pinned(4)?;
        // SAFETY: fresh, aligned memory of this size.
        unsafe { flag.host.cast::<u32>().write(1) };
        Ok(StopWord { flag })
    }

    /// Waits for a copy that may be under way, if the run of the stopper `before` has been told to end.
    pub(super) fn settle(&self, device: &Device, before: &Stopper) -> Result<(), CudaError> {
        if !before.is_told() {
            return Ok(());
        }
        let _entered = device.gpu().enter()?;
        device.driver().synchronize(device.side)
    }

    /// Has whoever tells `stopper` copy the word to the `control` block, until the stopper is closed.
    pub(super) fn open(&self, device: &Device, control: usize, stopper: &Stopper) {
        let (gpu, to) = (device.gpu().clone(), device.at(control).offset(STOP as u64));
        let (flag, side) = (self.flag, device.side);
        let bring = move || -> Result<(), CudaError> {
            let _entered = gpu.enter()?;
            // The whole of it, which may go to other threads as its address alone may not.
            let flag = flag;
            // SAFETY: `stop` is a word of the control block that the host may write at any time; the flag is never
            // written again; all is there until the executor is dropped, which closes the stopper before. Nobody waits
            // for the copy, lest a GPU that does not answer stop the host, too: before the word is written otherwise,
            // `settle` does.
            unsafe { gpu.driver().copy_in(to, flag.host, 4, side) }
        };
        // A device that is lost says so to whoever waits for the run's end.
        stopper.open(move || drop(bring()));
    }
}

/// The steps of a run from `control`'s on, pass by pass, unless a stop token, the host or a fault ends it before.
pub(super) fn steps(control: &Control, programs: &[ProgramDesc]) -> impl Iterator<Item = Step> {
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
                shared_bytes: SHARED_BYTES,
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
