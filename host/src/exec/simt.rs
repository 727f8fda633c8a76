//! The GPU's code without a GPU: the persistent kernel, launched as on one, every thread a coroutine.
//!
//! The launch block, the table of bindings, the counters and the fault record are those of a real launch; blocks are
//! smaller ([`Options::block_threads`]), so that sums may have another order. The simulated GPU
//! ([`perpetua_device::simt`]) judges every access and every meeting of threads: an image whose events do not order
//! what they must, or a body that races, reads what nobody wrote or parts its lanes, ends the run with the task, block,
//! lane and line.

use super::at_once::{AtOnce, Loaded};
use super::memory::Memory;
use super::sections::{self, Section, Sections};
use super::{RunError, Stopper, count_on};
use crate::image::Image;
use perpetua_device::entry::{self, LaunchBlock};
use perpetua_device::simt::{self, Access, Allocation, Report, SimtError, Wrong};
use perpetua_shared::control::{Control, STOP};
use perpetua_shared::image::BindingKind;
use perpetua_shared::launch::{LaunchParams, Mail, TILE_BYTES};
use perpetua_shared::{BindingId, Fault, FaultCode, Techniques};
use std::ptr::with_exposed_provenance_mut;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// How the GPU is simulated.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Seed of the schedule; each run takes the next one.
    pub seed: u64,
    /// Threads of a worker's block that run tasks, a multiple of 32; the loader's warp comes on top. `None`: two warps,
    /// the fewest that can race with each other, or, if the run begins with a pass of more rows than tiles are for, a
    /// warpgroup and a warp.
    pub block_threads: Option<u32>,
    /// What is not done: not of [`Technique::Flags`](perpetua_shared::Technique::Flags), which are the image's.
    pub without: Techniques,
}

impl Default for Options {
    fn default() -> Options {
        Options { seed: 0, block_threads: None, without: Techniques::NONE }
    }
}

/// The executor. A run is over when it has been started, and only its start and end are stamped.
#[derive(Debug)]
pub struct Simt {
    loaded: Loaded,
    /// The address of each binding, exposed, as the launch block and the table say them: its memory's, or that of a
    /// copy of a weight that is not aligned as device memory is.
    bases: Vec<usize>,
    _copies: Vec<Vec<u128>>,
    options: Options,
    counters: Vec<u32>,
    /// Iterations since the counters were zeroed.
    iteration: u32,
    report: Report,
}

/// The longest a worker waits, in simulated time: longer than any run, shorter than the leaps of time when nobody can
/// go on.
const TIMEOUT_NS: u64 = 1 << 41;

impl Simt {
    /// Runs `image` on `memory`, a simulated SM for each of its workers.
    pub fn new(image: Image, memory: Memory, options: Options) -> Simt {
        let loaded = Loaded::new(image, memory);
        let Loaded { image, memory, .. } = &loaded;
        let view = image.view();
        let counters = vec![0; sections::counters(&view)];
        let mut bases = memory.bases().to_vec();
        let mut copies = Vec::new();
        for (number, (binding, base)) in (0..).zip(image.bindings().iter().zip(&mut bases)) {
            let stack = memory.stack(BindingId(number));
            let is_weight = BindingKind::from_u32(binding.kind) == Some(BindingKind::Weight);
            if !is_weight || stack.is_none() && base.addr() % 16 == 0 {
                continue;
            }
            let mut copy = vec![0u128; (binding.bytes as usize).div_ceil(16)];
            let (parts, bytes) = stack.unwrap_or((core::slice::from_ref(base), binding.bytes as usize));
            for (part, to) in parts.iter().zip(bytemuck::cast_slice_mut::<_, u8>(&mut copy).chunks_mut(bytes.max(1))) {
                // SAFETY: the executor's memory has so many bytes at every base, or where a part of it lies.
                to[..bytes].copy_from_slice(unsafe { core::slice::from_raw_parts(*part, bytes) });
            }
            *base = copy.as_mut_ptr().cast();
            copies.push(copy);
        }
        let bases = bases.into_iter().map(<*mut u8>::expose_provenance).collect();
        Simt { loaded, bases, _copies: copies, options, counters, iteration: 0, report: Report::default() }
    }

    /// The memory.
    pub fn memory(&self) -> &Memory {
        &self.loaded.memory
    }

    /// What the last run did, counted.
    pub fn report(&self) -> &Report {
        &self.report
    }

    fn launch(&mut self, stopper: &Stopper) -> Result<(), RunError> {
        let mut fault = Fault::default();
        let view = self.loaded.image.view();
        let mut sections = Sections::new(&self.loaded.image);
        sections.bind(self.bases.iter().map(|base| *base as u64).collect());
        // Nobody reads these here; the kernel writes them all the same.
        let mut mailbox = [Mail::default(); 4];
        let mut positions = vec![0u32; view.n_workers as usize];
        let mut paces = positions.clone();
        let mut allocations = Vec::new();
        let list = sections.list();
        for Section { name, bytes, .. } in &list {
            let base = bytes.as_ptr().cast_mut();
            // SAFETY: every section outlives the launch, in which nobody writes it.
            allocations.push(unsafe { Allocation::new(*name, base, bytes.len(), Access::Constant) });
        }
        let params = LaunchParams {
            counters: self.counters.as_mut_ptr().expose_provenance() as u64,
            control: self.loaded.memory.control_base().expose_provenance() as u64,
            fault: (&raw mut fault).expose_provenance() as u64,
            mailbox: mailbox.as_mut_ptr().expose_provenance() as u64,
            positions: positions.as_mut_ptr().expose_provenance() as u64,
            paces: paces.as_mut_ptr().expose_provenance() as u64,
            timeout_ns: TIMEOUT_NS,
            iteration: self.iteration,
            n_mail: mailbox.len() as u32,
            without: self.options.without,
            ..sections.launch_params(list.iter().map(|section| section.bytes.as_ptr().addr() as u64))
        };
        for (number, (binding, base)) in self.loaded.image.bindings().iter().zip(&self.bases).enumerate() {
            let kind = BindingKind::from_u32(binding.kind).expect("image::check knows every kind");
            let access = match kind {
                BindingKind::Weight | BindingKind::Constant => Access::Constant,
                // What an iteration reads of the arena, one of this run has written.
                BindingKind::Arena => Access::Unwritten,
                BindingKind::Flagged => Access::Atomic,
                BindingKind::State | BindingKind::Control | BindingKind::Tokens | BindingKind::Input => Access::Written,
            };
            let (name, base, bytes) =
                (format!("{kind:?} b{number}"), with_exposed_provenance_mut(*base), binding.bytes);
            // SAFETY: the executor's memory has `bytes` bytes at every base and outlives the launch; only weights and
            // constants may be memory that cannot be written.
            allocations.push(unsafe { Allocation::new(name, base, bytes as usize, access) });
        }
        let counters: *mut u32 = self.counters.as_mut_ptr();
        // SAFETY: both outlive the launch and are touched by it alone.
        unsafe {
            allocations.push(Allocation::new("e", counters.cast(), 4 * self.counters.len(), Access::Atomic));
            let fault = (&raw mut fault).cast();
            allocations.push(Allocation::new("the fault record", fault, size_of::<Fault>(), Access::Written));
        }
        // SAFETY: both outlive the launch and are touched by it alone.
        unsafe {
            let bytes = size_of_val(&mailbox);
            allocations.push(Allocation::new("the mailbox", mailbox.as_mut_ptr().cast(), bytes, Access::Written));
            let bytes = size_of_val(&positions[..]);
            allocations.push(Allocation::new("positions", positions.as_mut_ptr().cast(), bytes, Access::Written));
            allocations.push(Allocation::new("paces", paces.as_mut_ptr().cast(), bytes, Access::Atomic));
        }
        // SAFETY: the control block is aligned and nobody else touches it between launches.
        let control = unsafe { self.loaded.memory.control_base().read() };
        let is_long = control.step.rows > 1 || control.n_sequences > 1;
        let block_threads = self.options.block_threads.unwrap_or(if is_long { 160 } else { 64 });
        let options = simt::Options {
            service_warps: 1,
            tile_bytes: TILE_BYTES,
            ..simt::Options::new(view.n_workers, block_threads, self.options.seed)
        };
        // Written by the thread in which the kernel's run, too, between their turns: `advance` takes the block for its
        // own.
        let host = || {
            if stopper.is_told() {
                self.loaded.memory.control_word(STOP).store(1, Ordering::Relaxed);
            }
        };
        let launched = simt::launch_beside(&options, allocations, host, || {
            // SAFETY: the launch block is as `LaunchParams` says, the image is checked, and the grid has its workers.
            unsafe { entry::worker(LaunchBlock::new(&params)) }
        });
        // SAFETY: the launch is over; it wrote the record through its address.
        let fault = unsafe { (&raw const fault).read_volatile() };
        match launched {
            Err(error) => Err(self.defect(&error)),
            Ok(_) if fault.code != FaultCode::None as u32 => Err(RunError::of(&fault, &self.loaded.image)),
            Ok(report) => {
                self.report = report;
                Ok(())
            }
        }
    }

    fn defect(&self, error: &SimtError) -> RunError {
        if error.wrong == Wrong::NoStacks {
            return RunError::NoStacks(error.to_string());
        }
        let task = error.task.map_or("no task".to_owned(), |task| self.loaded.image.task_name(task));
        RunError::Defect { task, worker: format!("w{}", error.block), what: error.to_string() }
    }
}

impl AtOnce for Simt {
    fn loaded(&self) -> &Loaded {
        &self.loaded
    }

    fn loaded_mut(&mut self) -> &mut Loaded {
        &mut self.loaded
    }

    fn run(&mut self, mut control: Control, stopper: &Stopper) -> Result<Control, RunError> {
        let base = self.loaded.memory.control_base();
        // SAFETY: the control block is aligned and nobody else touches it between launches.
        let before = unsafe { base.read() };
        count_on(&mut control, before.program_runs, self.iteration);
        // SAFETY: as above.
        unsafe { base.write(control) };
        let ran = self.launch(stopper);
        self.loaded.stamps.push(Instant::now());
        // SAFETY: as above; the launch is over.
        let after = unsafe { base.read() };
        self.iteration = after.step.iteration;
        self.options.seed = self.options.seed.wrapping_add(1);
        if ran.is_err() {
            self.counters.fill(0);
            self.iteration = 0;
            // SAFETY: as above; the flagged bindings have as many bytes.
            unsafe {
                (*base).program_runs = Default::default();
                for (binding, base) in self.loaded.image.bindings().iter().zip(&self.bases) {
                    if binding.kind == BindingKind::Flagged as u32 {
                        with_exposed_provenance_mut::<u8>(*base).write_bytes(0, binding.bytes as usize);
                    }
                }
            }
        }
        ran.map(|()| after)
    }
}
