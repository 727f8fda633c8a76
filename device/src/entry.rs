//! The persistent kernel: one entry, one block per worker; the same bodies one launch per operator, to compare it with;
//! and what happens on a panic.
//!
//! **Launch**: the grid is `n_workers` blocks, all resident (cooperative launch); a block is
//! [`BLOCK_THREADS`](perpetua_shared::launch::BLOCK_THREADS) threads, of which the first
//! [`TASK_THREADS`](perpetua_shared::launch::TASK_THREADS) run tasks, the next is the loader ([`tiles`]) and the one
//! after it, where the image has just-in-time tasks, a scheduler ([`scheduler`]), with
//! [`SHARED_BYTES`](perpetua_shared::launch::SHARED_BYTES) of dynamic shared memory; the one parameter is a
//! [`LaunchParams`], by value. `data_heads` and `data` say which weights the loader brings, `prefetch_heads` and
//! `prefetches` what it asks the L2 cache for; `without` what is not done.
//!
//! [`worker`] is the kernel; on a GPU `perpetua_worker` is its name, on the host a simulated launch calls it. It turns
//! the [`LaunchParams`] into the image and the words the [worker loop](crate::worker) wants and runs it on every thread
//! of the block. References are made only to the image, which nobody writes while workers are resident; whatever
//! another worker or the host writes is reached by raw pointers.

use crate::advance::step_of;
pub use crate::arch::LaunchBlock;
use crate::arch::{memory, thread};
use crate::block::Block;
use crate::gpu::Call;
use crate::gpu::scheduler;
use crate::gpu::sync::{Gpu, anew};
use crate::gpu::tiles::{self, Lists, Tiles, Waited};
use crate::gpu::turn::{self, Seen};
use crate::kernels::run_gpu;
use crate::worker::{Body, Image, await_task, run};
use core::hint::cold_path;
use perpetua_shared::control::{Control, NO_PROGRAM, Sequence};
use perpetua_shared::launch::TaskTrace;
use perpetua_shared::{
    DataOp, EventDesc, EventId, Fault, PrefetchOp, Step, TaskDesc, TaskFlags, TaskId, Technique, Turn, WorkerId,
};

/// The image where the launch block says it is.
///
/// Its promise, which every method relies on: the host has checked the image, so every index in it is in range, and
/// nobody writes it while the kernel runs.
#[derive(Clone, Copy)]
struct DeviceImage {
    params: LaunchBlock,
}

/// A field of the image's launch block.
macro_rules! param {
    ($image:expr, $field:ident) => {
        crate::arch::param!($image.params, $field)
    };
}

/// `count` entries from entry `first` of the section at `address`.
///
/// # Safety
/// They are there, and nobody writes them while the kernel runs.
unsafe fn entries<'a, T>(address: u64, first: u32, count: u32) -> &'a [T] {
    let start: *const T = core::ptr::with_exposed_provenance(address as usize);
    // SAFETY: the caller's promise; an empty slice, too, starts at an address that is not null: no section is empty
    // that a task of a checked image refers to.
    unsafe { memory::constant(start.add(first as usize), count as usize) }
}

impl DeviceImage {
    /// Whether the launch does not leave `technique` out.
    fn uses(&self, technique: Technique) -> bool {
        !param!(self, without).has(technique)
    }

    /// See [`ImageView::list`](crate::worker::ImageView::list).
    fn list(&self, program: usize, worker: WorkerId) -> &[u32] {
        // SAFETY: see `DeviceImage`.
        unsafe {
            let [first, end] = self.ends(param!(self, list_heads), param!(self, n_workers) + 1, program as u32, worker);
            entries(param!(self, lists), first, end - first)
        }
    }

    /// Where a worker's entries of a program start and end, by the section of heads at `heads`, with so many `lists` a
    /// program.
    ///
    /// # Safety
    /// The section is the image's, as are program and worker.
    unsafe fn ends(&self, heads: u64, lists: u32, program: u32, worker: WorkerId) -> [u32; 2] {
        let row = program * (lists + 1) + worker.0;
        // SAFETY: a row of heads has an entry for each list and one more.
        unsafe { memory::load(core::ptr::with_exposed_provenance::<[u32; 2]>(heads as usize + 4 * row as usize)) }
    }
}

impl Image for DeviceImage {
    /// One more than a task, or 0.
    type Place = u32;

    fn first(&self, program: usize, worker: WorkerId) -> u32 {
        self.list(program, worker).first().map_or(0, |id| id + 1)
    }

    fn at(&self, place: u32) -> Option<u32> {
        place.checked_sub(1)
    }

    fn after(&self, _: u32) -> u32 {
        turn::next()
    }

    fn just_in_time(&self, program: usize) -> &[u32] {
        // Without any in the image, its lists need not be looked at.
        if param!(self, n_slots) == 0 { &[] } else { self.list(program, WorkerId(param!(self, n_workers))) }
    }

    fn task(&self, id: u32) -> &TaskDesc {
        // SAFETY: see `DeviceImage`.
        unsafe { entries(param!(self, tasks), id, 1).get_unchecked(0) }
    }

    fn waits(&self, task: &TaskDesc) -> &[u32] {
        // SAFETY: see `DeviceImage`.
        unsafe { entries(param!(self, waits), task.wait_first, u32::from(task.wait_count)) }
    }

    fn is_left_out(&self, _: u32, step: &Step) -> bool {
        let flags = turn::flags();
        // Of most tasks one question, since each is waited for.
        if flags & !(TaskFlags::JUST_IN_TIME | TaskFlags::READS_EARLY) == 0 {
            return false;
        }
        // The tasks of a sequence that has ended have no rows, and nothing to do; nor have those of a row that the pass
        // does not have.
        let has_none = TaskFlags::names_part(flags) && turn::seen().rows == 0;
        has_none || step.sampling == 0 && flags & TaskFlags::ONLY_WHEN_SAMPLING != 0
    }

    fn wait_count(&self, _: u32) -> u32 {
        turn::wait_count()
    }

    fn wait(&self, _: u32, at: u32) -> (EventId, u32) {
        let (waits, events) = (param!(self, waits), param!(self, events));
        let (waits, events) =
            (core::ptr::with_exposed_provenance(waits as usize), core::ptr::with_exposed_provenance(events as usize));
        // SAFETY: see `DeviceImage`.
        let [event, triggers] = unsafe { turn::wait(at, waits, events) };
        (EventId(event), triggers)
    }

    fn trigger_count(&self, _: u32) -> u32 {
        turn::trigger_count()
    }

    fn trigger(&self, _: u32, at: u32) -> EventId {
        // SAFETY: see `DeviceImage`.
        EventId(unsafe { turn::trigger(at, core::ptr::with_exposed_provenance(param!(self, triggers) as usize)) })
    }

    fn num_triggers(&self, event: u32) -> u32 {
        // SAFETY: see `DeviceImage`.
        unsafe { entries::<EventDesc>(param!(self, events), event, 1).get_unchecked(0).num_triggers }
    }
}

impl DeviceImage {
    /// The record of the task numbered `id`.
    fn turn(&self, id: u32) -> *const u32 {
        let turns: *const u32 = core::ptr::with_exposed_provenance(param!(self, turns) as usize);
        turns.wrapping_add(id as usize * param!(self, turn_words) as usize)
    }

    /// Asks for the record of the task numbered `id`, for [`turn_to`](DeviceImage::turn_to) to put where bodies look at
    /// it.
    fn ask(&self, id: u32, block: &Block) -> u32 {
        // SAFETY: see `DeviceImage`.
        unsafe { turn::ask(self.turn(id), param!(self, turn_words), block) }
    }

    /// Makes it the turn of the task numbered `id`, whose record has been [asked](DeviceImage::ask) for, in the pass
    /// `pass`.
    ///
    /// # Safety
    /// Every thread of the block makes this same call, and none looks at the task before any more.
    unsafe fn turn_to(&self, id: u32, asked: u32, pass: Seen, block: &Block) {
        let words = param!(self, turn_words);
        // SAFETY: see `DeviceImage`, and the caller's promise; conditions are the same for all threads.
        unsafe {
            turn::put(self.turn(id), words, asked, pass, block);
            block.sync();
            let flags = turn::flags();
            if pass.sequence == 0 && !TaskFlags::names_part(flags) {
                return;
            }
            cold_path();
            if pass.sequence != 0 {
                let parts = core::ptr::with_exposed_provenance(param!(self, parts) as usize);
                turn::shift(parts, pass.sequence, words, block);
            }
            if TaskFlags::names_part(flags) && block.thread == 0 {
                turn::see(self.seen_by(flags, turn::seen()));
            }
            block.sync();
        }
    }

    /// The data ops of the task numbered `id`, and how many.
    ///
    /// # Safety
    /// See [`DeviceImage`]; it has some data.
    unsafe fn data_of(&self, id: u32) -> (*const DataOp, u32) {
        let turn: *const Turn = self.turn(id).cast();
        // SAFETY: the caller's promise.
        let [first, n] =
            unsafe { [memory::load(&raw const (*turn).data_first), memory::load(&raw const (*turn).tiles)] };
        let data: *const DataOp = core::ptr::with_exposed_provenance(param!(self, data) as usize);
        (data.wrapping_add(first as usize), n)
    }

    /// What a task with `flags`, which name a part of it, sees of `pass`.
    ///
    /// # Safety
    /// See [`DeviceImage`]; the batch has the sequence, if they name one.
    unsafe fn seen_by(&self, flags: u16, pass: Seen) -> Seen {
        let Seen { first_pos, rows, sequence } = pass;
        let control = core::ptr::with_exposed_provenance::<Control>(param!(self, control) as usize);
        // SAFETY: the caller's promise; nobody writes them before the pass has ended, and the wait for the one before
        // has made them visible.
        let sequence_at = |number: usize| unsafe {
            let sequence = (&raw const (*control).sequences).cast::<Sequence>().add(number);
            let (position, end) = (&raw const (*sequence).position, &raw const (*sequence).end);
            let [position, end] = [memory::load_volatile(position), memory::load_volatile(end)];
            Sequence { position, end, ..Sequence::default() }
        };
        Seen::of(&step_of(flags, &Step { first_pos, rows, sequence, ..Step::default() }, sequence_at))
    }
}

impl Lists for (DeviceImage, WorkerId) {
    fn data(&self, program: u32) -> (*const DataOp, u32) {
        let (image, worker) = *self;
        if !image.uses(Technique::Tiles) {
            return (core::ptr::null(), 0);
        }
        // SAFETY: see `DeviceImage`; the heads are two words at least.
        unsafe {
            let [first, end] = image.ends(param!(image, data_heads), param!(image, n_workers), program, worker);
            let data: *const DataOp = core::ptr::with_exposed_provenance(param!(image, data) as usize);
            (data.wrapping_add(first as usize), end - first)
        }
    }

    fn prefetches(&self, program: u32) -> (*const PrefetchOp, u32) {
        let (image, worker) = *self;
        if !image.uses(Technique::L2Prefetch) {
            return (core::ptr::null(), 0);
        }
        // SAFETY: see `DeviceImage`; the heads are two words at least.
        unsafe {
            let [first, end] = image.ends(param!(image, prefetch_heads), param!(image, n_workers), program, worker);
            let ops: *const PrefetchOp = core::ptr::with_exposed_provenance(param!(image, prefetches) as usize);
            (ops.wrapping_add(first as usize), end - first)
        }
    }

    fn goes_ahead(&self) -> bool {
        self.0.uses(Technique::TilesAhead)
    }

    fn binding(&self, binding: u32, sequence: u32) -> *const u8 {
        // SAFETY: see `DeviceImage`.
        let of = |table| unsafe { entries::<u64>(table, binding, 1).as_ptr().read() };
        let mut at = of(param!(self.0, bindings));
        if sequence > 0 {
            at += of(param!(self.0, parts)) * u64::from(sequence);
        }
        core::ptr::with_exposed_provenance(at as usize)
    }

    fn pace(&self) -> *mut u32 {
        let (image, worker) = *self;
        core::ptr::with_exposed_provenance_mut::<u32>(param!(image, paces) as usize).wrapping_add(worker.idx())
    }
}

/// Runs task bodies on the calling thread's block.
struct BlockBody<'a> {
    image: DeviceImage,
    worker: WorkerId,
    block: Block,
    tiles: Tiles<'a>,
    /// Of the record of the task that comes next in the worker's list the thread's word.
    next: u32,
}

impl BlockBody<'_> {
    /// Asks for the record of the task that comes next in the list, if the task whose turn it is, of the list or not,
    /// has one after it.
    fn ask_for_next(&mut self) {
        if let Some(next) = turn::next().checked_sub(1) {
            self.next = self.image.ask(next, &self.block);
        }
    }

    /// Lets the loader know that a pass begins, before it hears which, or that the worker leaves.
    ///
    /// # Safety
    /// Every thread of the block makes this same call.
    unsafe fn begin_pace(&self) {
        if self.block.thread == 0 {
            // SAFETY: thread 0.
            unsafe { tiles::set_pace(&(self.image, self.worker), self.tiles.passes().wrapping_add(1)) };
        }
    }

    /// Hands the scheduler the pass `step`, or, with [`NO_PROGRAM`], sends it home.
    fn schedule(&self, step: &Step) {
        if self.block.thread == 0 {
            // SAFETY: thread 0; callers see that there is a scheduler.
            unsafe { scheduler::begin(self.tiles.sync(), step) };
        }
    }

    fn task_tiles(&self) -> u32 {
        // No choice, which would be waited for.
        turn::tiles() * u32::from(self.image.uses(Technique::Tiles))
    }

    /// The call of the task whose turn it is.
    fn call(&self, step: &Step) -> Call<'_> {
        // SAFETY: see `DeviceImage`.
        let programs = unsafe { entries(param!(self.image, programs), 0, param!(self.image, n_programs)) };
        Call { program_runs: step.program_runs, programs, tiles: Some(&self.tiles), launch: Some(self.image.params) }
    }
}

impl BlockBody<'_> {
    /// Waits for the events of the task whose turn it is. Always, since a choice that the loop has made before would
    /// have the compiler write all bodies twice: a task that was waited for already, where others may be taken
    /// meanwhile, looks once more.
    ///
    /// # Errors
    /// That there has been a fault.
    fn ready(&self, id: TaskId, step: &Step, iteration: u32) -> Result<(), Fault> {
        if turn::wait_count() == 0 {
            return Ok(());
        }
        // As in `await_task`.
        cold_path();
        let began_ns = self.tiles.now_ns();
        let outcome = await_task(&self.image, id, step, iteration, self.tiles.sync());
        self.tiles.waited(Waited::Tasks, began_ns);
        outcome
    }

    /// Says where the worker is, its loader too, and notes when the task began if the block's first thread, which alone
    /// is asked for it, has room for that.
    ///
    /// # Safety
    /// See [`DeviceImage`].
    unsafe fn begin_task(&self, id: TaskId) {
        if self.block.thread != 0 {
            return;
        }
        let positions = core::ptr::with_exposed_provenance_mut::<u32>(param!(self.image, positions) as usize);
        // SAFETY: a word for every worker, which it alone writes.
        unsafe {
            memory::store_volatile(positions.add(self.worker.idx()), id.0 + 1);
            tiles::step_on(&(self.image, self.worker));
        }
        let is_traced = self.tiles.n_timed() < param!(self.image, n_trace);
        self.tiles.time(is_traced);
        if is_traced {
            cold_path();
            // SAFETY: see `trace_entry`. It is there and not in a register, which would be held over all bodies.
            unsafe { memory::store_volatile(&raw mut (*self.trace_entry()).began_ns, thread::timer_ns()) };
        }
    }

    /// The next entry of the worker's row of the trace, its own, and in the row if the task is
    /// [timed](Tiles::is_timed).
    fn trace_entry(&self) -> *mut TaskTrace {
        let row = self.worker.0 * param!(self.image, n_trace);
        let trace = core::ptr::with_exposed_provenance_mut::<TaskTrace>(param!(self.image, trace) as usize);
        trace.wrapping_add((row + self.tiles.n_timed()) as usize)
    }

    /// Notes when the task ended, whose beginning has been noted.
    ///
    /// # Safety
    /// See [`DeviceImage`]; the task is [timed](Tiles::is_timed).
    unsafe fn trace(&self, id: TaskId, step: &Step) {
        let at = self.trace_entry();
        self.tiles.has_timed();
        // SAFETY: see `trace_entry`; `begin_task` saw that there was room.
        unsafe {
            memory::store_volatile(&raw mut (*at).ended_ns, thread::timer_ns());
            memory::store_volatile(&raw mut (*at).task, id.0);
            memory::store_volatile(&raw mut (*at).iteration, step.iteration);
            memory::store_volatile(&raw mut (*at).data_ns, self.tiles.waited_ns(Waited::Tiles));
            memory::store_volatile(&raw mut (*at).event_ns, self.tiles.waited_ns(Waited::Tasks));
        }
    }
}

impl Body for BlockBody<'_> {
    fn waits(&self, may_take: bool) -> bool {
        !may_take
    }

    fn begin(&mut self, step: &Step) {
        let n = if step.program == NO_PROGRAM { 0 } else { (self.image, self.worker).data(step.program).1 };
        // SAFETY: the loop brings every thread of the block here, after the last pass's last task.
        unsafe {
            self.begin_pace();
            self.tiles.begin(step, n, self.block.thread == 0);
        }
        if step.program != NO_PROGRAM
            && let Some(first) = self.image.at(self.image.first(step.program as usize, self.worker))
        {
            self.next = self.image.ask(first, &self.block);
        }
        let has_scheduler = param!(self.image, n_slots) > 0;
        if has_scheduler && (step.program == NO_PROGRAM || !self.image.just_in_time(step.program as usize).is_empty()) {
            self.schedule(step);
        }
    }

    fn ahead(&mut self, id: TaskId) {
        // SAFETY: the loop brings every thread of the block here, after the last task's end, behind a barrier.
        unsafe { self.image.turn_to(id.0, self.next, self.tiles.pass(), &self.block) };
    }

    fn instead(&mut self, id: TaskId) {
        // The list's next task has its turn later, so its record is kept.
        let asked = self.image.ask(id.0, &self.block);
        // SAFETY: see `ahead`.
        unsafe { self.image.turn_to(id.0, asked, self.tiles.pass(), &self.block) };
    }

    fn skip(&mut self, id: TaskId, step: &Step, iteration: u32) -> Result<(), Fault> {
        self.ask_for_next();
        self.tiles.begin_task(self.task_tiles());
        // SAFETY: the loop brings every thread of the block here.
        unsafe {
            if self.block.thread == 0 {
                tiles::step_on(&(self.image, self.worker));
            }
            self.tiles.drain();
        }
        self.ready(id, step, iteration)
    }

    fn untold(&mut self) {
        // What a trigger begins with: the worker's next task may read what this one wrote, and is about to be fetched.
        // SAFETY: the loop brings every thread of the block here.
        unsafe { self.block.sync() };
    }

    fn run(&mut self, id: TaskId, _: &TaskDesc, step: &Step, iteration: u32) -> Result<(), Fault> {
        // SAFETY: see `DeviceImage`. The loop brings every thread of the block here with the same task, whose waits
        // `ready` meets.
        unsafe {
            self.begin_task(id);
            self.ask_for_next();
            thread::at_task(id.0);
            self.tiles.begin_task(self.task_tiles());
            // What bodies compute from who they are stays in them; how many they are the compiler is told once more, so
            // that it writes loops over warps out.
            let block = Block { thread: memory::opaque_word(self.block.thread), threads: thread::task_threads() };
            // For the body alone: what comes after it looks at the loop's own.
            let fresh = anew(step);
            let ready = || self.ready(id, &fresh, iteration);
            let outcome = run_gpu(&self.call(&fresh), &block, ready);
            self.tiles.drain();
            if self.tiles.is_timed() {
                cold_path();
                self.trace(id, step);
            }
            outcome
        }
    }
}

/// The worker whose number is the block's index.
///
/// # Safety
/// `params` and all it points to are as [`LaunchParams`] says, for an image that the host has checked; the grid has
/// `n_workers` blocks of `BLOCK_THREADS` threads, all of them resident.
pub unsafe fn worker(params: LaunchBlock) {
    let image = DeviceImage { params };
    let sync = Gpu::new(image.params);
    let worker = WorkerId(thread::block_idx());
    let (block, threads) = (Block::here(), thread::block_dim());
    let thread = block.thread;
    // SAFETY: one thread makes the barriers, and every thread of the block comes to the one after. The warps beyond the
    // task threads' are no task's: the first of their lanes is the loader, the second the scheduler.
    unsafe {
        if thread == 0 {
            tiles::init(block.threads);
            if param!(image, n_slots) > 0 {
                scheduler::init();
            }
        }
        thread::sync_some(1, threads);
        if thread >= block.threads {
            if thread == block.threads {
                tiles::load(&(image, worker), &sync);
            } else if thread == block.threads + 1 && param!(image, n_slots) > 0 {
                scheduler::schedule(&image, worker, param!(image, n_workers), &sync);
            }
            return;
        }
    }
    let mut body = BlockBody { image, worker, block, tiles: Tiles::new(&sync, block.thread), next: 0 };
    // Whoever faults has recorded it.
    if run(&image, worker, param!(image, iteration), &sync, &mut body).is_err() {
        // SAFETY: faults are the whole block's.
        unsafe {
            body.begin_pace();
            body.tiles.leave(thread == 0);
        }
        if param!(image, n_slots) > 0 {
            body.schedule(&Step { program: NO_PROGRAM, ..Step::default() });
        }
    }
}

/// Task `first` plus the block's index, if the step is one of `program`: an operator, where it is a launch of its own,
/// a block for each task. Nobody waits or triggers, since a launch on a stream begins when the one before has ended and
/// its writes are visible. The block's own loader brings the task's tiles, and none ahead of the launch, before which
/// nobody is there.
///
/// A step of another program ends the launch, and so does a fault: what has been launched ahead for a loop that has
/// ended runs to its end and touches nothing.
///
/// # Safety
/// As [`worker`], but for the grid: a block of `BLOCK_THREADS` threads for each of an operator's tasks, none of which
/// orders another; and whatever those tasks wait on has run in launches that have ended.
pub unsafe fn operator(params: LaunchBlock, program: u32, first: u32) {
    let image = DeviceImage { params };
    let sync = Gpu::new(image.params);
    let worker = WorkerId(thread::block_idx());
    let (block, threads) = (Block::here(), thread::block_dim());
    let thread = block.thread;
    let step = crate::sync::Sync::step(&sync);
    let id = first + worker.0;
    // SAFETY: one thread makes the barriers, and every thread of the block comes to the one after. They agree on the
    // fault, which another block may report meanwhile, and all have read the step before `advance` overwrites it. The
    // warps beyond the task threads' are no task's; those come to the second barrier with the same task.
    unsafe {
        if thread == 0 {
            tiles::init(block.threads);
            tiles::tell(if sync.has_fault() { NO_PROGRAM } else { step.program });
        }
        thread::sync_some(1, threads);
        if tiles::told() != program {
            return;
        }
        if thread >= block.threads {
            if thread == block.threads && image.uses(Technique::Tiles) {
                tiles::load_task(&(image, worker), &sync, image.data_of(id));
            }
            return;
        }
        image.turn_to(id, image.ask(id, &block), Seen::of(&step), &block);
    }
    thread::at_task(id);
    let body = BlockBody { image, worker, block, tiles: Tiles::new(&sync, block.thread), next: 0 };
    body.tiles.expect(body.task_tiles());
    body.tiles.begin_task(body.task_tiles());
    // SAFETY: the caller's promise; every thread of the block is here with the same task. No copy is under way when the
    // block ends.
    unsafe {
        if !image.is_left_out(id, &step) {
            // Whoever faults has recorded it.
            let _ = run_gpu(&body.call(&step), &block, || Ok(()));
        }
        body.tiles.drain();
    }
}

/// One task of kernel `K`, and nothing else: for the tests, which keep a ratchet on each kernel's registers and
/// instructions.
///
/// # Safety
/// As [`worker`]; `id` is a task of that kernel, whose waits have been met.
#[cfg(all(target_arch = "nvptx64", feature = "kernels"))]
pub(crate) unsafe fn alone<K: crate::kernels::MacroKernel>(params: LaunchBlock, id: u32) {
    let image = DeviceImage { params };
    let (worker, block) = (WorkerId(0), Block::here());
    let sync = Gpu::new(image.params);
    let body = BlockBody { image, worker, block, tiles: Tiles::new(&sync, block.thread), next: 0 };
    let step = crate::sync::Sync::step(&sync);
    // SAFETY: the caller's promise.
    let _ = unsafe {
        image.turn_to(id, image.ask(id, &block), Seen::of(&step), &block);
        body.tiles.begin_task(body.task_tiles());
        let call = body.call(&step);
        let params = crate::kernels::params(&call.params());
        let product = if K::THIN { crate::gpu::thin::Product::of(&call) } else { None };
        if let Some(product) = product {
            product.run(&call, &block, || Ok(()))
        } else if K::EARLY {
            K::gpu_early(&params, &call, &block, || Ok(()))
        } else {
            K::gpu(&params, &call, &block)
        }
    };
}

#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    crate::arch::trap()
}

#[cfg(all(target_arch = "nvptx64", feature = "operator"))]
#[allow(unreachable_pub)] // It is exported by name, not by path.
mod ptx_of_operators {
    use crate::arch::LaunchBlock;
    use perpetua_shared::launch::LaunchParams;

    /// # Safety
    /// As [`operator`](super::operator).
    #[unsafe(no_mangle)]
    pub unsafe extern "ptx-kernel" fn perpetua_operator(_: LaunchParams, program: u32, first: u32) {
        // SAFETY: the caller's promise.
        unsafe { super::operator(LaunchBlock::of_entry(), program, first) }
    }
}

#[cfg(all(target_arch = "nvptx64", feature = "worker"))]
#[allow(unreachable_pub)] // Its functions are exported by name, not by path.
mod ptx_of_workers {
    use crate::arch::{LaunchBlock, bulk, mbarrier, memory, shared, thread, warp};
    use crate::probe;
    use perpetua_shared::launch::LaunchParams;
    use perpetua_shared::probe::ProbeParams;

    /// # Safety
    /// As [`worker`](super::worker).
    #[unsafe(no_mangle)]
    pub unsafe extern "ptx-kernel" fn perpetua_worker(_: LaunchParams) {
        // SAFETY: the caller's promise.
        unsafe { super::worker(LaunchBlock::of_entry()) }
    }

    /// # Safety
    /// As [`probe::read`].
    #[unsafe(no_mangle)]
    pub unsafe extern "ptx-kernel" fn perpetua_probe_read(params: ProbeParams) {
        // SAFETY: the caller's promise.
        unsafe { probe::read(&params) }
    }

    /// # Safety
    /// As [`probe::copy`].
    #[unsafe(no_mangle)]
    pub unsafe extern "ptx-kernel" fn perpetua_probe_sixteen(params: ProbeParams) {
        // SAFETY: the caller's promise.
        unsafe { probe::copy(&params) }
    }

    /// # Safety
    /// As [`probe::take`].
    #[unsafe(no_mangle)]
    pub unsafe extern "ptx-kernel" fn perpetua_probe_take(params: ProbeParams) {
        // SAFETY: the caller's promise.
        unsafe { probe::take(&params) }
    }

    /// # Safety
    /// As [`probe::hop`].
    #[unsafe(no_mangle)]
    pub unsafe extern "ptx-kernel" fn perpetua_probe_hop(params: ProbeParams) {
        // SAFETY: the caller's promise.
        unsafe { probe::hop(&params) }
    }

    /// # Safety
    /// As [`probe::hand`].
    #[unsafe(no_mangle)]
    pub unsafe extern "ptx-kernel" fn perpetua_probe_hand(params: ProbeParams) {
        // SAFETY: the caller's promise.
        unsafe { probe::hand(&params) }
    }

    /// # Safety
    /// As [`probe::meet`].
    #[unsafe(no_mangle)]
    pub unsafe extern "ptx-kernel" fn perpetua_probe_meet(params: ProbeParams) {
        // SAFETY: the caller's promise.
        unsafe { probe::meet(&params) }
    }

    /// Not a kernel anyone launches: `if c { A } barrier; if c { B }`, from which a compiler that does not know
    /// barriers makes two. The tests count one here.
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

    /// Nor is this one: each instruction that copies, counts and multiplies, so that the tests see them assembled
    /// whether or not a kernel uses them.
    ///
    /// # Safety
    /// `words` points to 4 KiB.
    #[unsafe(no_mangle)]
    pub unsafe extern "ptx-kernel" fn perpetua_probe_copy(words: *mut u32) {
        let at = thread::thread_idx();
        // SAFETY: inside the 4 KiB and the words; every thread makes every call that wants them all.
        unsafe {
            if at == 0 {
                mbarrier::init(0, 1);
                mbarrier::init(1, 32);
                mbarrier::fence();
                bulk::prefetch(words.cast(), 2048);
                bulk::fence_proxy();
                mbarrier::arrive_expect(0, 2048);
                bulk::copy(128, words.cast(), 2048, 0);
            }
            thread::sync_some(1, 64);
            while !mbarrier::try_wait(0, 0) {}
            let a = bulk::load16(128 + 16 * at);
            shared::store16(4 * at, a);
            let (b, c) = (bulk::load4(4 * at), bulk::load2(2 * at));
            warp::sync();
            mbarrier::arrive(1);
            let d = warp::ldmatrix(4 * at);
            let e = shared::load16(4 * (at ^ 1));
            let sum = warp::mma(d, [e[0], b], [f32::from(c), 0.0, 0.0, f32::from_bits(e[1])]);
            memory::store(words.add(at as usize), sum[0].to_bits() ^ sum[1].to_bits() ^ sum[3].to_bits());
        }
    }
}
