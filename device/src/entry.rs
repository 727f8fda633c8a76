//! The persistent kernel: one entry, one block per worker, and what happens on a panic.
//!
//! The entry turns the [`LaunchParams`] into the slices and words the [worker loop](crate::worker) wants and runs it on
//! every thread of the block. References are made only to the image, which nobody writes while workers are resident;
//! whatever another worker or the host writes is reached by raw pointers.

use crate::arch::{thread, trap};
use crate::block::Block;
use crate::gpu::{Call, sync::Gpu};
use crate::kernels::run_gpu;
use crate::worker::{Body, ImageView, run};
use core::mem::offset_of;
use perpetua_shared::control::Control;
use perpetua_shared::launch::LaunchParams;
use perpetua_shared::{Fault, FaultCode, Step, TaskDesc, TaskFlags, TaskId, WorkerId};

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    trap()
}

/// Runs task bodies on the calling thread's block.
struct BlockBody<'a> {
    image: ImageView<'a>,
    bindings: *const u64,
    block: Block,
}

impl Body for BlockBody<'_> {
    fn run(&mut self, _: TaskId, task: &TaskDesc, step: &Step) -> Result<(), Fault> {
        if task.flags & TaskFlags::ONLY_WHEN_SAMPLING != 0 && step.sampling == 0 {
            return Ok(());
        }
        let call = Call {
            task,
            operands: self.image.operands(task),
            step,
            programs: self.image.programs,
            bindings: self.bindings,
        };
        // SAFETY: the loop brings every thread of the block here with the same task, whose waits have been met; the
        // image has been checked.
        unsafe { run_gpu(&call, &self.block) }
    }
}

/// A section of the image.
///
/// # Safety
/// `address` is that of `n` entries which nobody writes while the kernel runs, or `n` is 0.
unsafe fn section<'a, T>(address: u64, n: u32) -> &'a [T] {
    if n == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { core::slice::from_raw_parts(core::ptr::with_exposed_provenance(address as usize), n as usize) }
}

/// The worker whose number is the block's index.
///
/// # Safety
/// `params` and all it points to are as [`LaunchParams`] says, for an image that the host has checked; the grid has
/// `n_workers` blocks of `BLOCK_THREADS` threads, all of them resident.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn perpetua_worker(params: *const LaunchParams) {
    // SAFETY: the caller's promise.
    let (params, image) = unsafe {
        let params = params.read();
        let image = ImageView {
            programs: section(params.programs, params.n_programs),
            tasks: section(params.tasks, params.n_tasks),
            operands: section(params.operands, params.n_operands),
            events: section(params.events, params.n_events),
            waits: section(params.waits, params.n_waits),
            triggers: section(params.triggers, params.n_triggers),
            list_heads: section(params.list_heads, params.n_programs * (params.n_workers + 1)),
            lists: section(params.lists, params.n_list_entries),
            n_workers: params.n_workers,
        };
        (params, image)
    };
    let sync = Gpu {
        counters: core::ptr::with_exposed_provenance_mut(params.counters as usize),
        step: core::ptr::with_exposed_provenance(params.control as usize + offset_of!(Control, step)),
        fault: core::ptr::with_exposed_provenance_mut(params.fault as usize),
        timeout_ns: params.timeout_ns,
    };
    let mut body = BlockBody {
        image,
        bindings: core::ptr::with_exposed_provenance(params.bindings as usize),
        block: Block::current(),
    };
    let worker = WorkerId(thread::block_idx());
    if let Err(fault) = run(&image, worker, params.iteration, &sync, &mut body) {
        // Threads that left because another one faulted have nothing to add.
        if fault.code != FaultCode::Aborted as u32 {
            sync.report(&fault);
        }
    }
}

/// Not a kernel anyone launches: `if c { A } barrier; if c { B }`, from which a compiler that does not know barriers makes
/// two. The tests count one here.
///
/// # Safety
/// `words` points to one word per thread.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn perpetua_probe_barrier(words: *mut u32, bound: u32) {
    let at = thread::thread_idx();
    // SAFETY: a thread's own word; every thread reaches the barrier.
    unsafe {
        let word = words.add(at as usize);
        let below = at < bound;
        if below {
            *word += 1;
        }
        thread::sync();
        if below {
            *word *= 3;
        }
    }
}
