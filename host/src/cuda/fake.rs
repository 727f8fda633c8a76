//! A driver without a GPU: it keeps a record of every call, does the work of a stream only when somebody waits for it,
//! and runs the persistent kernel: its source on the simulated GPU, or the PTX that it was handed ([`Runs`]).
//!
//! It holds its callers to what the driver's reference demands: a context is current, pointers lie in what was
//! allocated and copies between host and device use pinned memory, nothing is freed twice, blocks fit. What a caller
//! gets wrong is an error with the code a driver would give, or, where a driver would do damage, a panic.

use super::code_probe;
use super::driver::{
    Context, CudaError, DeviceInfo, DevicePtr, Driver, Function, Graph, GraphExec, Launch, Module, Node, OperatorNode,
    Pinned, Result, Stream,
};
use crate::ptx;
use perpetua_device::entry::{self, LaunchBlock};
use perpetua_device::simt::{self, Access, Allocation};
use perpetua_shared::event::EventDesc;
use perpetua_shared::image::ProgramDesc;
use perpetua_shared::launch::{
    BEFORE_TILES_BYTES, BLOCK_THREADS, ENTRY, LaunchParams, OPERATOR, RESERVED_SHARED_BYTES, SHARED_BYTES, TASK_THREADS,
};
use perpetua_shared::probe::{self, ProbeParams};
use perpetua_shared::{DataOp, PrefetchOp, TaskDesc, Technique};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

/// What a launch runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runs {
    /// The kernels' source, compiled for the host, on the simulated GPU, which judges every access.
    Source,
    /// The PTX of the module that was loaded, instruction by instruction ([`ptx`]).
    Ptx,
}

/// The device that the fake has.
#[derive(Clone, Debug)]
pub struct Options {
    /// What it says of itself.
    pub device: DeviceInfo,
    /// What launches run.
    pub runs: Runs,
    /// Seed of the simulated schedule; each launch takes the next one.
    pub seed: u64,
    /// Of PTX, see [`ptx::Launch::stray`].
    pub stray: u64,
    /// Whether reports of PTX say where slots and cycles went.
    pub counts: Option<ptx::InstructionCache>,
    /// Likewise: of the machine code that this is.
    pub assembled: Option<Arc<ptx::Assembled>>,
    /// A call that fails, the first time it is made, and with which code.
    pub fails: Option<(&'static str, i32)>,
    /// Launches never end.
    pub hangs: bool,
    /// Launches of the persistent kernel with this technique lose the context.
    pub fatal: Option<Technique>,
}

impl Options {
    /// An H200 cut down to `n_sms` SMs and `memory_bytes`.
    pub fn new(n_sms: u32, memory_bytes: u64) -> Options {
        let device = DeviceInfo {
            ordinal: 0,
            name: "Fake H200".to_owned(),
            compute_capability: (9, 0),
            n_sms,
            shared_bytes: 227 << 10,
            reserved_shared_bytes: RESERVED_SHARED_BYTES,
            memory_bytes,
            l2_bytes: 60 << 20,
            has_cooperative_launch: true,
        };
        Options {
            device,
            runs: Runs::Source,
            seed: 0,
            stray: 8,
            counts: None,
            assembled: None,
            fails: None,
            hangs: false,
            fatal: None,
        }
    }
}

/// See the module head.
#[derive(Debug)]
pub struct Fake {
    options: Options,
    state: Mutex<State>,
    /// Held by whoever does the work of streams: one at a time, so that a kernel needs no lock of the state's, and
    /// other threads' calls get through while it runs. Taken before the state's.
    work: Mutex<()>,
}

/// Memory, in units that are aligned as a driver's allocations are at least.
#[derive(Debug)]
struct Block {
    _units: Vec<Unit>,
    bytes: usize,
}

#[derive(Clone, Copy, Debug)]
#[repr(align(256))]
struct Unit(#[allow(dead_code, reason = "bytes, reached by address")] [u8; 256]);

impl Block {
    /// Filled with a pattern that no test expects: allocations hold anything.
    fn new(bytes: usize) -> (u64, Block) {
        let mut units = vec![Unit([0xa5; 256]); bytes.div_ceil(256)];
        (units.as_mut_ptr().expose_provenance() as u64, Block { _units: units, bytes })
    }
}

/// A [`Launch`], or one of a graph's nodes, with the copies of its parameters that a driver makes.
#[derive(Debug)]
struct Launched {
    kernel: String,
    module: usize,
    blocks: u32,
    threads: u32,
    shared_bytes: u32,
    params: Vec<Vec<u8>>,
    /// From the end of what is before it on its stream to its begin.
    gap_ns: u64,
}

/// The module that `text` is. Those read last are kept: every engine loads the same few, and to read one takes as long
/// as a short run.
fn parsed(text: &str) -> std::result::Result<Arc<ptx::Module>, ptx::PtxError> {
    static READ: Mutex<VecDeque<(String, Arc<ptx::Module>)>> = Mutex::new(VecDeque::new());
    const KEPT: usize = 3;
    let mut read = READ.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, module)) = read.iter().find(|(other, _)| other == text) {
        return Ok(Arc::clone(module));
    }
    let module = Arc::new(ptx::Module::parse(text)?);
    read.push_back((text.to_owned(), Arc::clone(&module)));
    if read.len() > KEPT {
        read.pop_front();
    }
    Ok(module)
}

/// A module: its image, and, where that is run, what it is.
#[derive(Debug)]
struct Loaded {
    image: Vec<u8>,
    ptx: Option<Arc<ptx::Module>>,
}

/// A function.
#[derive(Debug)]
struct Known {
    name: String,
    module: usize,
    /// The dynamic shared memory it may have.
    most: u32,
}

#[derive(Debug)]
enum Work {
    CopyIn { to: u64, from: usize, bytes: usize },
    CopyOut { to: usize, from: u64, bytes: usize },
    Set { at: u64, value: u8, bytes: usize },
    Launch(Launched),
}

#[derive(Debug, Default)]
struct State {
    calls: Vec<String>,
    device: BTreeMap<u64, Block>,
    pinned: BTreeMap<u64, Block>,
    streams: HashMap<usize, VecDeque<Work>>,
    modules: HashMap<usize, Loaded>,
    functions: HashMap<usize, Known>,
    /// Their nodes, each with the one it depends on.
    graphs: HashMap<usize, Vec<(Node, Option<Node>, OperatorNode)>>,
    execs: HashMap<usize, Vec<OperatorNode>>,
    current: HashMap<ThreadId, Vec<Context>>,
    retained: u32,
    last_handle: usize,
    launches: u64,
    /// Of the last launch of PTX.
    report: ptx::Report,
    /// The GPU's clock.
    now_ns: u64,
    has_failed: bool,
    /// What every call says after the kernel has gone wrong.
    lost: Option<CudaError>,
}

fn error(call: &'static str, code: i32, name: &str) -> CudaError {
    CudaError { call, code, name: name.to_owned(), text: None }
}

impl State {
    fn handle(&mut self) -> usize {
        self.last_handle += 1;
        self.last_handle
    }

    /// Keeps the report, and returns when its launch ended.
    fn keep(&mut self, report: ptx::Report) -> u64 {
        self.report = report;
        self.report.ended_ns
    }

    /// After a kernel that went wrong nothing works any more.
    fn outlive(&mut self, ran: Ran, call: &'static str) -> Result<()> {
        ran.map(|ended_ns| self.now_ns = ended_ns).map_err(|what| {
            let lost = CudaError { text: Some(what), ..error(call, 719, "CUDA_ERROR_LAUNCH_FAILED") };
            self.lost = Some(lost.clone());
            lost
        })
    }

    /// Whether `bytes` bytes at `at` lie in one allocation of `blocks`.
    fn has(blocks: &BTreeMap<u64, Block>, at: u64, bytes: usize) -> bool {
        let block = blocks.range(..=at).next_back();
        block.is_some_and(|(base, block)| at - base + bytes as u64 <= block.bytes as u64)
    }
}

impl Fake {
    /// A driver with one device.
    pub fn new(options: Options) -> Fake {
        Fake { options, state: Mutex::default(), work: Mutex::default() }
    }

    /// Every call so far, with its arguments; addresses and handles are left out.
    pub fn calls(&self) -> Vec<String> {
        self.state().calls.clone()
    }

    /// What the last launch did, where launches run PTX; its phases are tasks, one more than their numbers.
    pub fn report(&self) -> ptx::Report {
        self.state().report.clone()
    }

    /// What was made and not given back: contexts, streams, modules, graphs, allocations on the device and of pinned
    /// memory.
    pub fn leaks(&self) -> Vec<String> {
        let state = self.state();
        let counts = [
            ("contexts", state.retained as usize),
            ("streams", state.streams.len()),
            ("modules", state.modules.len()),
            ("graphs", state.graphs.len() + state.execs.len()),
            ("device allocations", state.device.len()),
            ("pinned allocations", state.pinned.len()),
            ("contexts left current", state.current.values().map(Vec::len).sum()),
        ];
        counts.iter().filter(|(_, n)| *n > 0).map(|(what, n)| format!("{n} {what}")).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// See [`Fake::work`].
    fn work(&self) -> MutexGuard<'_, ()> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes `call` and refuses it where a driver would.
    fn begin(&self, call: &'static str, arguments: &str, wants_context: bool) -> Result<MutexGuard<'_, State>> {
        let mut state = self.state();
        let separator = if arguments.is_empty() { "" } else { " " };
        state.calls.push(format!("{call}{separator}{arguments}"));
        if let Some((fails, code)) = self.options.fails
            && fails == call
            && !state.has_failed
        {
            state.has_failed = true;
            return Err(error(call, code, "CUDA_ERROR_AS_ORDERED"));
        }
        if let Some(lost) = &state.lost {
            return Err(CudaError { call, ..lost.clone() });
        }
        let is_current = state.current.get(&thread::current().id()).is_some_and(|stack| !stack.is_empty());
        if wants_context && !is_current {
            return Err(error(call, 201, "CUDA_ERROR_INVALID_CONTEXT"));
        }
        Ok(state)
    }

    /// Does the copies that come first in streams other than `stream`: they are what may run beside its kernel. The
    /// caller does the work.
    fn copy_beside(&self, stream: Stream) -> Result<()> {
        let next = || {
            let state = self.state();
            let is_copy = |work: Option<&Work>| matches!(work, Some(Work::CopyIn { .. } | Work::CopyOut { .. }));
            let mut others = state.streams.iter().filter(|(other, _)| **other != stream.0);
            others.find(|(_, queue)| is_copy(queue.front())).map(|(other, _)| Stream(*other))
        };
        while let Some(other) = next() {
            self.step("cuStreamQuery", other)?;
        }
        Ok(())
    }

    /// Does the first work of `stream` that has not been done. Whether there was any. The caller does the work.
    fn step(&self, call: &'static str, stream: Stream) -> Result<bool> {
        let mut state = self.state();
        let queue = state.streams.get_mut(&stream.0).ok_or_else(|| error(call, 400, "CUDA_ERROR_INVALID_HANDLE"))?;
        if self.options.hangs && matches!(queue.front(), Some(Work::Launch(_))) {
            return Ok(true);
        }
        let Some(work) = queue.pop_front() else { return Ok(false) };
        let at = |address: u64| std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
        let host = std::ptr::with_exposed_provenance_mut::<u8>;
        let check = |is_there: bool| assert!(is_there, "{work:?} touches memory that has been freed meanwhile");
        match &work {
            Work::CopyIn { to, from, bytes } => {
                check(State::has(&state.device, *to, *bytes) && State::has(&state.pinned, *from as u64, *bytes));
                // SAFETY: both are allocations of this driver, live while its lock is held.
                unsafe { at(*to).copy_from_nonoverlapping(host(*from), *bytes) };
            }
            Work::CopyOut { to, from, bytes } => {
                check(State::has(&state.device, *from, *bytes) && State::has(&state.pinned, *to as u64, *bytes));
                // SAFETY: as above.
                unsafe { host(*to).copy_from_nonoverlapping(at(*from), *bytes) };
            }
            Work::Set { at: start, value, bytes } => {
                check(State::has(&state.device, *start, *bytes));
                // SAFETY: as above.
                unsafe { at(*start).write_bytes(*value, *bytes) };
            }
            Work::Launch(launch) => {
                state.launches += 1;
                let seed = self.options.seed.wrapping_add(state.launches);
                let began_ns = state.now_ns + launch.gap_ns;
                let module = state.modules.get(&launch.module).and_then(|module| module.ptx.clone());
                let params: Option<LaunchParams> = bytemuck::try_pod_read_unaligned(&launch.params[0]).ok();
                let memory = match &params {
                    Some(params) => memory_of(&state, params),
                    None => memory_of_probe(&state, &bytemuck::pod_read_unaligned(&launch.params[0])),
                };
                drop(state);
                // There is nothing to say where these fail: whoever waits for them will hear.
                let mut host = || drop(self.copy_beside(stream));
                let is_fatal = |params: LaunchParams| self.options.fatal.is_some_and(|it| !params.without.has(it));
                let ran = match module {
                    _ if params.is_some_and(is_fatal) => Err("a technique that is fatal here".to_owned()),
                    Some(module) => {
                        let counts = self.options.counts.filter(|_| launch.kernel == ENTRY);
                        run_ptx(
                            &module,
                            memory,
                            &ptx::Launch {
                                // Where workers say which task they are at.
                                marks: params.zip(counts).map(|(params, cache)| ptx::Marks {
                                    first: params.positions,
                                    n: params.n_workers,
                                    cache,
                                    assembled: self.options.assembled.as_deref(),
                                }),
                                entry: &launch.kernel,
                                blocks: launch.blocks,
                                threads: launch.threads,
                                shared_bytes: launch.shared_bytes,
                                params: &launch.params.iter().map(Vec::as_slice).collect::<Vec<_>>(),
                                seed,
                                stray: self.options.stray,
                                began_ns,
                                most_instructions: u64::MAX,
                            },
                            &mut host,
                        )
                        .map(|report| self.state().keep(report))
                    }
                    None => run_source(memory, launch, seed, began_ns, host),
                };
                self.state().outlive(ran, call)?;
            }
        }
        Ok(true)
    }
}

/// From a launch's end to the begin of the next in a graph.
const LAUNCH_NS: u64 = 1000;

/// When a kernel ended: or what was objected to, in words.
type Ran = std::result::Result<u64, String>;

/// Bytes of an allocation with what the kernel may do there.
struct Range {
    at: u64,
    bytes: u64,
    access: Access,
    name: &'static str,
}

/// All memory of `state`, cut where the launch block `params` says what it holds.
fn memory_of(state: &State, params: &LaunchParams) -> Vec<Range> {
    let (n_programs, n_workers) = (u64::from(params.n_programs), u64::from(params.n_workers));
    let n_queue = if params.n_slots == 0 { 0 } else { 2 + u64::from(params.n_slots) };
    let section = |name, at, n: u64, size: usize, access| Range { at, bytes: n * size as u64, access, name };
    let constant = |name, at, n: u32, size| section(name, at, u64::from(n), size, Access::Constant);
    // How many entries there are, the last of their heads says, of which each program has so many.
    let count = |heads: u64, of_each: u64| {
        let last = heads + 4 * (n_programs * of_each).saturating_sub(1);
        if !State::has(&state.device, last, 4) {
            return 0;
        }
        // SAFETY: four bytes of an allocation of this driver, live while its lock is held.
        unsafe { std::ptr::with_exposed_provenance::<u32>(last as usize).read() }
    };
    let mut ranges = vec![
        constant("programs", params.programs, params.n_programs, size_of::<ProgramDesc>()),
        constant("tasks", params.tasks, params.n_tasks, size_of::<TaskDesc>()),
        constant("turns", params.turns, params.n_tasks, 4 * params.turn_words as usize),
        constant("events", params.events, params.n_events, size_of::<EventDesc>()),
        constant("waits", params.waits, params.n_waits, 4),
        constant("triggers", params.triggers, params.n_triggers, 4),
        section("list heads", params.list_heads, n_programs * (n_workers + 2), 4, Access::Constant),
        constant("lists", params.lists, count(params.list_heads, n_workers + 2), 4),
        section("data heads", params.data_heads, n_programs * (n_workers + 1), 4, Access::Constant),
        constant("data ops", params.data, count(params.data_heads, n_workers + 1), size_of::<DataOp>()),
        section("prefetch heads", params.prefetch_heads, n_programs * (n_workers + 1), 4, Access::Constant),
        constant("prefetches", params.prefetches, count(params.prefetch_heads, n_workers + 1), size_of::<PrefetchOp>()),
        section("e", params.counters, u64::from(params.n_events) + n_queue, 4, Access::Atomic),
        section("paces", params.paces, n_workers, 4, Access::Atomic),
    ];
    ranges.retain(|range| range.bytes > 0);
    // The tables of bindings have no count of their own: each lies where an allocation says, up to the next section.
    let tables = [("the table of bindings", params.bindings), ("parts", params.parts)];
    let starts: Vec<u64> = ranges.iter().map(|range| range.at).chain(tables.map(|(_, at)| at)).collect();
    let table_end = |at: u64, end: u64| starts.iter().copied().filter(|next| *next > at).fold(end, u64::min);
    let mut all = Vec::new();
    let mut add = |name, at, bytes, access| {
        if bytes > 0 {
            all.push(Range { at, bytes, access, name });
        }
    };
    for (base, block) in &state.device {
        let end = base + block.bytes as u64;
        let mut inside: Vec<(u64, u64, Access, &'static str)> = ranges
            .iter()
            .filter(|range| (*base..end).contains(&range.at))
            .map(|range| (range.at, range.bytes, range.access, range.name))
            .collect();
        for (name, at) in tables.into_iter().filter(|(_, at)| (*base..end).contains(at)) {
            inside.push((at, table_end(at, end) - at, Access::Constant, name));
        }
        inside.sort_by_key(|range| range.0);
        let mut at = *base;
        for (start, bytes, access, name) in inside {
            add("device memory", at, start.saturating_sub(at), Access::Written);
            add(name, start, bytes, access);
            at = start + bytes;
        }
        add("device memory", at, end.saturating_sub(at), Access::Written);
    }
    for (base, block) in &state.pinned {
        add("mapped memory", *base, block.bytes as u64, Access::Written);
    }
    all
}

/// As [`memory_of`], of a probe.
fn memory_of_probe(state: &State, params: &ProbeParams) -> Vec<Range> {
    let range = |(base, block): (&u64, &Block)| {
        // What holds the counters holds nothing else: the callers' side of the bargain.
        let access = if *base == params.counters { Access::Atomic } else { Access::Written };
        Range { at: *base, bytes: block.bytes as u64, access, name: "device memory" }
    };
    state.device.iter().map(range).collect()
}

/// A launch on the simulated GPU.
fn run_source(memory: Vec<Range>, launch: &Launched, seed: u64, began_ns: u64, host: impl FnMut()) -> Ran {
    let is_probe = ![ENTRY, OPERATOR].contains(&launch.kernel.as_str());
    let threads = launch.threads.min(TASK_THREADS);
    let options = simt::Options {
        service_warps: (launch.threads - threads) / 32,
        // What is before them the simulated GPU has anyway.
        tile_bytes: launch.shared_bytes.saturating_sub(BEFORE_TILES_BYTES),
        began_ns,
        ..simt::Options::new(launch.blocks, threads, seed)
    };
    let word = |param: usize| bytemuck::pod_read_unaligned::<u32>(&launch.params[param]);
    let params = &launch.params[0];
    let kernel = || {
        // SAFETY: the caller of `Driver::launch` or `launch_graph` promised that the parameters are as the kernel wants
        // them.
        unsafe {
            if is_probe {
                let params: ProbeParams = bytemuck::pod_read_unaligned(params);
                return match launch.kernel.as_str() {
                    probe::READ => perpetua_device::probe::read(&params),
                    probe::COPY => perpetua_device::probe::copy(&params),
                    probe::TAKE => perpetua_device::probe::take(&params),
                    probe::HOP => perpetua_device::probe::hop(&params),
                    probe::HAND => perpetua_device::probe::hand(&params),
                    _ => perpetua_device::probe::meet(&params),
                };
            }
            let params: LaunchParams = bytemuck::pod_read_unaligned(params);
            match launch.kernel.as_str() {
                ENTRY => entry::worker(LaunchBlock::new(&params)),
                _ => entry::operator(LaunchBlock::new(&params), word(1), word(2)),
            }
        }
    };
    let allocation = |range: Range| {
        let base = std::ptr::with_exposed_provenance_mut(range.at as usize);
        // SAFETY: inside an allocation of this driver, which stays while work is done (`free` waits), and which the
        // launch alone touches, and copies between its threads' turns.
        unsafe { Allocation::new(range.name, base, range.bytes as usize, range.access) }
    };
    let ran = simt::launch_beside(&options, memory.into_iter().map(allocation).collect(), host, kernel);
    ran.map(|report| report.ended_ns).map_err(|error| format!("the simulated GPU says: {error}"))
}

/// A launch of what `module` is.
fn run_ptx(
    module: &ptx::Module,
    ranges: Vec<Range>,
    launch: &ptx::Launch<'_>,
    host: &mut dyn FnMut(),
) -> std::result::Result<ptx::Report, String> {
    let mut memory = ptx::Memory::default();
    for Range { at, bytes, access, name } in ranges {
        let host = std::ptr::with_exposed_provenance_mut(at as usize);
        // SAFETY: as in `run_source`.
        unsafe { memory.add(name, at, host, bytes, access == Access::Constant) };
    }
    module.launch_beside(launch, &memory, host).map_err(|error| format!("the PTX of {}: {error}", launch.entry))
}

// SAFETY: allocations are real memory that lives until it is freed; work is done in order.
unsafe impl Driver for Fake {
    fn version(&self) -> Result<u32> {
        self.begin("cuDriverGetVersion", "", false).map(|_| 12080)
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        self.begin("cuDeviceGetCount", "", false).map(|_| vec![self.options.device.clone()])
    }

    fn retain_context(&self, ordinal: u32) -> Result<Context> {
        let mut state = self.begin("cuDevicePrimaryCtxRetain", &ordinal.to_string(), false)?;
        state.retained += 1;
        Ok(Context(1 << 32))
    }

    fn release_context(&self, ordinal: u32) -> Result<()> {
        let mut state = self.begin("cuDevicePrimaryCtxRelease", &ordinal.to_string(), false)?;
        state.retained = state.retained.checked_sub(1).expect("released as often as retained");
        Ok(())
    }

    fn push_context(&self, context: Context) -> Result<()> {
        // Not in the record: every call of the executor begins with it.
        self.state().current.entry(thread::current().id()).or_default().push(context);
        Ok(())
    }

    fn pop_context(&self) -> Result<()> {
        let popped = self.state().current.get_mut(&thread::current().id()).and_then(Vec::pop);
        popped.map(|_| ()).ok_or_else(|| error("cuCtxPopCurrent", 201, "CUDA_ERROR_INVALID_CONTEXT"))
    }

    fn context_device(&self) -> Result<u32> {
        self.begin("cuCtxGetDevice", "", true).map(|_| self.options.device.ordinal)
    }

    fn create_stream(&self) -> Result<Stream> {
        let mut state = self.begin("cuStreamCreate", "", true)?;
        let handle = state.handle();
        state.streams.insert(handle, VecDeque::new());
        Ok(Stream(handle))
    }

    fn destroy_stream(&self, stream: Stream) -> Result<()> {
        let mut state = self.begin("cuStreamDestroy", "", true)?;
        let work = state
            .streams
            .remove(&stream.0)
            .ok_or_else(|| error("cuStreamDestroy", 400, "CUDA_ERROR_INVALID_HANDLE"))?;
        assert!(work.is_empty(), "a stream was destroyed with work under way: {work:?}");
        Ok(())
    }

    fn synchronize(&self, stream: Stream) -> Result<()> {
        drop(self.begin("cuStreamSynchronize", "", true)?);
        let _work = self.work();
        while self.step("cuStreamSynchronize", stream)? {}
        Ok(())
    }

    fn is_done(&self, stream: Stream) -> Result<bool> {
        // Not in the record: how often somebody asks is no one's business.
        self.begin("cuStreamQuery", "", true)?.calls.pop();
        let _work = self.work();
        // What other streams have to do they do meanwhile.
        self.copy_beside(stream)?;
        Ok(!self.step("cuStreamQuery", stream)?)
    }

    fn load_module(&self, image: &[u8]) -> Result<(Module, String)> {
        let kind = if image.starts_with(b"\x7fELF") { "cubin" } else { "PTX" };
        let mut state = self.begin("cuModuleLoadDataEx", kind, true)?;
        if kind == "PTX" {
            assert_eq!(image.last(), Some(&0), "PTX ends with a zero byte");
        }
        let mut loaded = Loaded { image: image.to_vec(), ptx: None };
        if self.options.runs == Runs::Ptx {
            // Machine code is for chips.
            let text =
                image.strip_suffix(&[0]).filter(|_| kind == "PTX").and_then(|text| std::str::from_utf8(text).ok());
            let text = text.ok_or_else(|| error("cuModuleLoadDataEx", 209, "CUDA_ERROR_NO_BINARY_FOR_GPU"))?;
            let parsed = parsed(text).map_err(|what| CudaError {
                text: Some(what.to_string()),
                ..error("cuModuleLoadDataEx", 218, "CUDA_ERROR_INVALID_PTX")
            })?;
            loaded.ptx = Some(parsed);
        }
        let handle = state.handle();
        state.modules.insert(handle, loaded);
        Ok((Module(handle), String::new()))
    }

    fn unload_module(&self, module: Module) -> Result<()> {
        let mut state = self.begin("cuModuleUnload", "", true)?;
        assert!(state.modules.remove(&module.0).is_some(), "unloaded once");
        Ok(())
    }

    fn function(&self, module: Module, name: &str) -> Result<Function> {
        let mut state = self.begin("cuModuleGetFunction", name, true)?;
        let image = state
            .modules
            .get(&module.0)
            .ok_or_else(|| error("cuModuleGetFunction", 400, "CUDA_ERROR_INVALID_HANDLE"))?;
        let has_name = match &image.ptx {
            Some(ptx) => ptx.entries().any(|entry| entry == name),
            None => image.image.windows(name.len()).any(|window| window == name.as_bytes()),
        };
        if !has_name || ![ENTRY, OPERATOR, code_probe::ENTRY].contains(&name) && !probe::ALL.contains(&name) {
            return Err(error("cuModuleGetFunction", 500, "CUDA_ERROR_NOT_FOUND"));
        }
        let handle = state.handle();
        let known = Known { name: name.to_owned(), module: module.0, most: 48 << 10 };
        state.functions.insert(handle, known);
        Ok(Function(handle))
    }

    fn set_shared_bytes(&self, function: Function, bytes: u32) -> Result<()> {
        let mut state = self.begin("cuFuncSetAttribute", &format!("MAX_DYNAMIC_SHARED_SIZE_BYTES {bytes}"), true)?;
        if bytes > self.options.device.shared_bytes {
            return Err(error("cuFuncSetAttribute", 1, "CUDA_ERROR_INVALID_VALUE"));
        }
        let known = state.functions.get_mut(&function.0);
        known.ok_or_else(|| error("cuFuncSetAttribute", 400, "CUDA_ERROR_INVALID_HANDLE"))?.most = bytes;
        Ok(())
    }

    fn blocks_per_sm(&self, function: Function, threads: u32, shared_bytes: u32) -> Result<u32> {
        let arguments = format!("threads {threads} shared {shared_bytes}");
        let state = self.begin("cuOccupancyMaxActiveBlocksPerMultiprocessor", &arguments, true)?;
        Ok(u32::from(
            threads <= BLOCK_THREADS
                && state.functions.get(&function.0).is_some_and(|known| shared_bytes <= known.most),
        ))
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        let Launch { function, blocks, threads, shared_bytes, stream, param } = *launch;
        let arguments = format!("blocks {blocks} threads {threads} shared {shared_bytes}");
        let mut state = self.begin("cuLaunchCooperativeKernel", &arguments, true)?;
        if blocks > self.options.device.n_sms {
            return Err(error("cuLaunchCooperativeKernel", 720, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"));
        }
        let Some(Known { name, module, most }) = state.functions.get(&function.0) else {
            return Err(error("cuLaunchCooperativeKernel", 400, "CUDA_ERROR_INVALID_HANDLE"));
        };
        if name == OPERATOR {
            return Err(error("cuLaunchCooperativeKernel", 1, "CUDA_ERROR_INVALID_VALUE"));
        }
        let (expected, param_bytes) = match name.as_str() {
            ENTRY => ((SHARED_BYTES, BLOCK_THREADS), size_of::<LaunchParams>()),
            code_probe::ENTRY => ((shared_bytes, code_probe::THREADS), size_of::<ProbeParams>()),
            _ => ((shared_bytes, probe::threads(name)), size_of::<ProbeParams>()),
        };
        if shared_bytes > *most || (shared_bytes, threads) != expected {
            return Err(error("cuLaunchCooperativeKernel", 1, "CUDA_ERROR_INVALID_VALUE"));
        }
        assert_eq!(param.len(), param_bytes, "a driver copies as many bytes as the kernel's parameter has");
        let (kernel, module) = (name.clone(), *module);
        let work = Launched { kernel, module, blocks, threads, shared_bytes, params: vec![param.to_vec()], gap_ns: 1 };
        self.queue(&mut state, "cuLaunchCooperativeKernel", stream, Work::Launch(work))
    }

    fn create_graph(&self) -> Result<Graph> {
        let mut state = self.begin("cuGraphCreate", "", true)?;
        let handle = state.handle();
        state.graphs.insert(handle, Vec::new());
        Ok(Graph(handle))
    }

    fn add_node(&self, graph: Graph, after: Option<Node>, node: &OperatorNode) -> Result<Node> {
        const CALL: &str = "cuGraphAddKernelNode";
        let OperatorNode { function, blocks, threads, shared_bytes, program, first_task, .. } = *node;
        let place = if after.is_some() { "after a node" } else { "first" };
        let arguments = format!(
            "{place}: blocks {blocks} threads {threads} shared {shared_bytes} program {program} task {first_task}"
        );
        let mut state = self.begin(CALL, &arguments, true)?;
        let most = state.functions.get(&function.0).filter(|known| known.name == OPERATOR).map(|known| known.most);
        let Some(most) = most else { return Err(error(CALL, 400, "CUDA_ERROR_INVALID_HANDLE")) };
        if blocks == 0 || (threads, shared_bytes) != (BLOCK_THREADS, SHARED_BYTES) || shared_bytes > most {
            return Err(error(CALL, 1, "CUDA_ERROR_INVALID_VALUE"));
        }
        let handle = Node(state.handle());
        let nodes = state.graphs.get_mut(&graph.0).ok_or_else(|| error(CALL, 400, "CUDA_ERROR_INVALID_HANDLE"))?;
        if after.is_some_and(|after| nodes.iter().all(|(node, ..)| *node != after)) {
            return Err(error(CALL, 1, "CUDA_ERROR_INVALID_VALUE"));
        }
        nodes.push((handle, after, *node));
        Ok(handle)
    }

    fn instantiate(&self, graph: Graph) -> Result<GraphExec> {
        const CALL: &str = "cuGraphInstantiateWithFlags";
        let mut state = self.begin(CALL, "0", true)?;
        let nodes = state.graphs.get(&graph.0).ok_or_else(|| error(CALL, 400, "CUDA_ERROR_INVALID_HANDLE"))?;
        // Nodes that nothing orders run in any order: the last made first.
        let (mut left, mut order): (Vec<_>, Vec<(Node, OperatorNode)>) = (nodes.clone(), Vec::new());
        while let Some(at) = left
            .iter()
            .rposition(|(_, after, _)| after.is_none_or(|after| order.iter().any(|(node, _)| *node == after)))
        {
            let (node, _, launch) = left.remove(at);
            order.push((node, launch));
        }
        let handle = state.handle();
        state.execs.insert(handle, order.into_iter().map(|(_, launch)| launch).collect());
        Ok(GraphExec(handle))
    }

    fn destroy_graph(&self, graph: Graph) -> Result<()> {
        let mut state = self.begin("cuGraphDestroy", "", true)?;
        assert!(state.graphs.remove(&graph.0).is_some(), "destroyed once");
        Ok(())
    }

    fn destroy_exec(&self, exec: GraphExec) -> Result<()> {
        let mut state = self.begin("cuGraphExecDestroy", "", true)?;
        assert!(state.execs.remove(&exec.0).is_some(), "destroyed once");
        Ok(())
    }

    unsafe fn launch_graph(&self, exec: GraphExec, stream: Stream) -> Result<()> {
        let mut state = self.begin("cuGraphLaunch", "", true)?;
        let nodes = state.execs.get(&exec.0).ok_or_else(|| error("cuGraphLaunch", 400, "CUDA_ERROR_INVALID_HANDLE"))?;
        for OperatorNode { function, blocks, threads, shared_bytes, params, program, first_task } in nodes.clone() {
            let Known { name, module, .. } = &state.functions[&function.0];
            let (kernel, module) = (name.clone(), *module);
            let params = [bytemuck::bytes_of(&params), &program.to_le_bytes(), &first_task.to_le_bytes()];
            let params = params.map(<[u8]>::to_vec).into();
            let work = Launched { kernel, module, blocks, threads, shared_bytes, params, gap_ns: LAUNCH_NS };
            self.queue(&mut state, "cuGraphLaunch", stream, Work::Launch(work))?;
        }
        Ok(())
    }

    fn memory(&self) -> Result<(u64, u64)> {
        let state = self.begin("cuMemGetInfo", "", true)?;
        let used: u64 = state.device.values().map(|block| block.bytes as u64).sum();
        Ok((self.options.device.memory_bytes.saturating_sub(used), self.options.device.memory_bytes))
    }

    fn alloc(&self, bytes: u64) -> Result<DevicePtr> {
        let mut state = self.begin("cuMemAlloc", &bytes.to_string(), true)?;
        let used: u64 = state.device.values().map(|block| block.bytes as u64).sum();
        if bytes == 0 || used + bytes > self.options.device.memory_bytes {
            let (code, name) =
                if bytes == 0 { (1, "CUDA_ERROR_INVALID_VALUE") } else { (2, "CUDA_ERROR_OUT_OF_MEMORY") };
            return Err(error("cuMemAlloc", code, name));
        }
        let (at, block) = Block::new(bytes as usize);
        state.device.insert(at, block);
        Ok(DevicePtr(at))
    }

    unsafe fn free(&self, at: DevicePtr) -> Result<()> {
        // As a driver does, it waits for what is under way.
        let _work = self.work();
        let mut state = self.begin("cuMemFree", "", true)?;
        state.device.remove(&at.0).map(|_| ()).ok_or_else(|| error("cuMemFree", 1, "CUDA_ERROR_INVALID_VALUE"))
    }

    fn alloc_pinned(&self, bytes: usize) -> Result<Pinned> {
        let mut state = self.begin("cuMemHostAlloc", &bytes.to_string(), true)?;
        let (at, block) = Block::new(bytes);
        state.pinned.insert(at, block);
        Ok(Pinned { host: std::ptr::with_exposed_provenance_mut(at as usize), device: DevicePtr(at), bytes })
    }

    unsafe fn free_pinned(&self, memory: Pinned) -> Result<()> {
        let _work = self.work();
        let mut state = self.begin("cuMemFreeHost", "", true)?;
        let block = state.pinned.remove(&memory.device.0);
        block.map(|_| ()).ok_or_else(|| error("cuMemFreeHost", 1, "CUDA_ERROR_INVALID_VALUE"))
    }

    unsafe fn copy_in(&self, to: DevicePtr, from: *const u8, bytes: usize, stream: Stream) -> Result<()> {
        let mut state = self.begin("cuMemcpyHtoDAsync", &bytes.to_string(), true)?;
        if bytes == 0
            || !State::has(&state.device, to.0, bytes)
            || !State::has(&state.pinned, from.addr() as u64, bytes)
        {
            return Err(error("cuMemcpyHtoDAsync", 1, "CUDA_ERROR_INVALID_VALUE"));
        }
        let work = Work::CopyIn { to: to.0, from: from.addr(), bytes };
        self.queue(&mut state, "cuMemcpyHtoDAsync", stream, work)
    }

    unsafe fn copy_out(&self, to: *mut u8, from: DevicePtr, bytes: usize, stream: Stream) -> Result<()> {
        let mut state = self.begin("cuMemcpyDtoHAsync", &bytes.to_string(), true)?;
        if bytes == 0
            || !State::has(&state.device, from.0, bytes)
            || !State::has(&state.pinned, to.addr() as u64, bytes)
        {
            return Err(error("cuMemcpyDtoHAsync", 1, "CUDA_ERROR_INVALID_VALUE"));
        }
        let work = Work::CopyOut { to: to.addr(), from: from.0, bytes };
        self.queue(&mut state, "cuMemcpyDtoHAsync", stream, work)
    }

    unsafe fn set(&self, at: DevicePtr, value: u8, bytes: u64, stream: Stream) -> Result<()> {
        let mut state = self.begin("cuMemsetD8Async", &format!("{value} {bytes}"), true)?;
        if bytes == 0 || !State::has(&state.device, at.0, bytes as usize) {
            return Err(error("cuMemsetD8Async", 1, "CUDA_ERROR_INVALID_VALUE"));
        }
        let work = Work::Set { at: at.0, value, bytes: bytes as usize };
        self.queue(&mut state, "cuMemsetD8Async", stream, work)
    }
}

impl Fake {
    fn queue(&self, state: &mut State, call: &'static str, stream: Stream, work: Work) -> Result<()> {
        let queue = state.streams.get_mut(&stream.0).ok_or_else(|| error(call, 400, "CUDA_ERROR_INVALID_HANDLE"))?;
        queue.push_back(work);
        Ok(())
    }
}
