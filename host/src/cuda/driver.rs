//! The calls of the CUDA driver that perpetua makes, as a trait: libcuda is one implementation, a fake that runs the
//! same kernel on the simulated GPU another.

use perpetua_shared::launch::LaunchParams;
use std::fmt;

/// A failed call: which, what the driver said, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed: {name} ({code}){}{}", text.as_deref().map(|text| format!(", {text}")).unwrap_or_default(),
    advice(*code).map(|advice| format!("; {advice}")).unwrap_or_default())]
pub struct CudaError {
    /// The driver's function.
    pub call: &'static str,
    /// The `CUresult`.
    pub code: i32,
    /// Its name, such as `CUDA_ERROR_OUT_OF_MEMORY`.
    pub name: String,
    /// More, where there is more: the log of the JIT compiler, the driver's own words.
    pub text: Option<String>,
}

/// `CUresult`s that perpetua treats specially.
pub mod code {
    /// The call did what it should.
    pub const SUCCESS: i32 = 0;
    /// A stream has work left.
    pub const NOT_READY: i32 = 600;
    /// Not enough device memory.
    pub const OUT_OF_MEMORY: i32 = 2;
    /// A symbol is not in the driver: it is older than what is asked of it.
    pub const MISSING_SYMBOL: i32 = 500;
}

/// What a user can do about error `code`.
fn advice(code: i32) -> Option<&'static str> {
    Some(match code {
        2 => "free device memory (other processes use it too), or ask for less with EngineConfig::max_context",
        3 | 999 => "check the driver with nvidia-smi; after an update of the driver the machine wants a restart",
        34 => "this libcuda is the toolkit's stub, not a driver's: mend LD_LIBRARY_PATH",
        46 => "another process has the GPU to itself: see nvidia-smi's compute mode",
        100 => "no GPU is visible to this process: see CUDA_VISIBLE_DEVICES and nvidia-smi",
        101 => "there is no device of that number: see CUDA_VISIBLE_DEVICES",
        200 | 209 | 218 | 222 | 300 => {
            "the driver is too old for this build's GPU code: it wants that of CUDA 12.1 or newer"
        }
        221 | 223 => {
            "the driver's compiler of PTX (libnvidia-ptxjitcompiler) is not here, and it does not take the cubin: in a container, \
                      add the capability `compute`, or take a driver that takes it"
        }
        500 => "the driver is too old: it wants that of CUDA 12.0 or newer",
        701 => "the kernel wants more registers or shared memory than a block of this GPU may have",
        700 | 702 | 709 | 710 | 714..=719 => {
            "the GPU's context is lost: make a new engine in a new process; if it is lost again, `perpetua gpu-check fixtures` looks \
             for what this GPU does not get on with"
        }
        720 => "the kernel's blocks cannot all be resident: another process uses the GPU, or MIG has cut it",
        801 => "the driver does not allow it here (a virtual GPU, MPS limits)",
        802 => "the system is not ready: on machines with NVSwitch, start nvidia-fabricmanager",
        803 => "library and kernel module of the driver differ: restart the machine",
        _ => return None,
    })
}

impl CudaError {
    /// This one, which came of a second try, after `first`; it tells both.
    #[must_use]
    pub fn after(mut self, first: &CudaError) -> CudaError {
        let earlier = format!("before, {} failed: {} ({})", first.call, first.name, first.code);
        self.text = Some(self.text.map_or(earlier.clone(), |text| format!("{text}; {earlier}")));
        self
    }

    /// Whether the context can no longer be used after it.
    pub fn is_sticky(&self) -> bool {
        matches!(self.code, 214 | 220 | 700 | 702 | 709 | 710 | 714..=719)
    }
}

/// The result of a driver call.
pub type Result<T> = std::result::Result<T, CudaError>;

// What a handle is made of is this crate's: safe calls take handles, so none is made but by a driver.
macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct $name(pub(crate) usize);
    )*};
}

handles! {
    /// A `CUcontext`.
    Context,
    /// A `CUstream`.
    Stream,
    /// A `CUmodule`.
    Module,
    /// A `CUfunction`.
    Function,
    /// A `CUgraph`.
    Graph,
    /// A `CUgraphNode`.
    Node,
    /// A `CUgraphExec`.
    GraphExec,
}

/// An address in device memory, or of the host's memory as the device sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// The address `bytes` further on.
    #[must_use]
    pub fn offset(self, bytes: u64) -> DevicePtr {
        DevicePtr(self.0 + bytes)
    }
}

impl fmt::Display for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// Pinned memory of the host that the device has mapped.
#[derive(Clone, Copy, Debug)]
pub struct Pinned {
    /// Where the host finds it.
    pub host: *mut u8,
    /// Where the device does.
    pub device: DevicePtr,
    /// How much there is.
    pub bytes: usize,
}

// SAFETY: an address and a length; who may touch the memory when is the executor's to say.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

/// What the driver says of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its number, from 0, among those this process sees.
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// Major and minor.
    pub compute_capability: (u32, u32),
    /// Streaming multiprocessors.
    pub n_sms: u32,
    /// The most shared memory a block may have when it asks.
    pub shared_bytes: u32,
    /// How much of each block's the driver keeps.
    pub reserved_shared_bytes: u32,
    /// Bytes of device memory.
    pub memory_bytes: u64,
    /// Bytes of its second-level cache.
    pub l2_bytes: u32,
    /// Whether all blocks of a launch can be guaranteed to be resident.
    pub has_cooperative_launch: bool,
}

/// A launch of one kernel with one parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch<'a> {
    /// The kernel.
    pub function: Function,
    /// Blocks, all of them resident or the launch fails.
    pub blocks: u32,
    /// Threads of each.
    pub threads: u32,
    /// Dynamic shared memory of each.
    pub shared_bytes: u32,
    /// The stream.
    pub stream: Stream,
    /// The parameter's bytes: a [`LaunchParams`], or a [`ProbeParams`](perpetua_shared::probe::ProbeParams).
    pub param: &'a [u8],
}

/// A node of a graph: a launch of the kernel [`OPERATOR`](perpetua_shared::launch::OPERATOR).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperatorNode {
    /// The kernel.
    pub function: Function,
    /// Blocks, one for each task.
    pub blocks: u32,
    /// Threads of each.
    pub threads: u32,
    /// Dynamic shared memory of each.
    pub shared_bytes: u32,
    /// Its first parameter.
    pub params: LaunchParams,
    /// Its second: the program.
    pub program: u32,
    /// Its third: the operator's first task.
    pub first_task: u32,
}

/// The driver. Calls that need a context use the calling thread's current one.
///
/// # Safety
/// Implementations do what CUDA's reference says of the function each method is named after; what `unsafe` methods
/// demand of pointers is theirs to rely on.
#[allow(clippy::missing_errors_doc)] // All for the reasons the driver's reference gives, as a `CudaError`.
pub unsafe trait Driver: Send + Sync + fmt::Debug {
    /// cuDriverGetVersion: 1000 times the major and 10 times the minor version of CUDA it implements.
    fn version(&self) -> Result<u32>;
    /// cuDeviceGetCount and the attributes of every device.
    fn devices(&self) -> Result<Vec<DeviceInfo>>;
    /// cuDevicePrimaryCtxRetain of device `ordinal`.
    fn retain_context(&self, ordinal: u32) -> Result<Context>;
    /// cuDevicePrimaryCtxRelease of device `ordinal`.
    fn release_context(&self, ordinal: u32) -> Result<()>;
    /// cuCtxPushCurrent.
    fn push_context(&self, context: Context) -> Result<()>;
    /// cuCtxPopCurrent.
    fn pop_context(&self) -> Result<()>;
    /// cuCtxGetDevice of the current context.
    fn context_device(&self) -> Result<u32>;
    /// cuStreamCreate, one that does not wait for the default stream.
    fn create_stream(&self) -> Result<Stream>;
    /// cuStreamDestroy.
    fn destroy_stream(&self, stream: Stream) -> Result<()>;
    /// cuStreamSynchronize.
    fn synchronize(&self, stream: Stream) -> Result<()>;
    /// cuStreamQuery: whether all its work is done.
    fn is_done(&self, stream: Stream) -> Result<bool>;
    /// cuModuleLoadDataEx of an image: PTX, ended by a zero byte, or a cubin; and what the JIT compiler has to say, be
    /// it nothing. What it holds to be wrong is part of the error.
    fn load_module(&self, image: &[u8]) -> Result<(Module, String)>;
    /// cuModuleUnload.
    fn unload_module(&self, module: Module) -> Result<()>;
    /// cuModuleGetFunction.
    fn function(&self, module: Module, name: &str) -> Result<Function>;
    /// cuFuncSetAttribute of the most dynamic shared memory it may be launched with.
    fn set_shared_bytes(&self, function: Function, bytes: u32) -> Result<()>;
    /// cuOccupancyMaxActiveBlocksPerMultiprocessor.
    fn blocks_per_sm(&self, function: Function, threads: u32, shared_bytes: u32) -> Result<u32>;
    /// cuLaunchCooperativeKernel.
    ///
    /// # Safety
    /// The kernel takes a parameter of so many bytes, and what that says is as the kernel wants it and stays until it
    /// ends.
    unsafe fn launch(&self, launch: &Launch) -> Result<()>;
    /// cuGraphCreate.
    fn create_graph(&self) -> Result<Graph>;
    /// cuGraphAddKernelNode of a node that depends on `after`, if there is one.
    fn add_node(&self, graph: Graph, after: Option<Node>, node: &OperatorNode) -> Result<Node>;
    /// cuGraphInstantiateWithFlags, without any.
    fn instantiate(&self, graph: Graph) -> Result<GraphExec>;
    /// cuGraphDestroy. What has been instantiated of it stays.
    fn destroy_graph(&self, graph: Graph) -> Result<()>;
    /// cuGraphExecDestroy.
    fn destroy_exec(&self, exec: GraphExec) -> Result<()>;
    /// cuGraphLaunch.
    ///
    /// # Safety
    /// As [`Driver::launch`], of every node.
    unsafe fn launch_graph(&self, exec: GraphExec, stream: Stream) -> Result<()>;
    /// cuMemGetInfo: free and total bytes of device memory.
    fn memory(&self) -> Result<(u64, u64)>;
    /// cuMemAlloc.
    fn alloc(&self, bytes: u64) -> Result<DevicePtr>;
    /// cuMemFree.
    ///
    /// # Safety
    /// From [`Driver::alloc`], freed once, no work under way that uses it.
    unsafe fn free(&self, at: DevicePtr) -> Result<()>;
    /// cuMemHostAlloc, portable and mapped, and cuMemHostGetDevicePointer.
    fn alloc_pinned(&self, bytes: usize) -> Result<Pinned>;
    /// cuMemFreeHost.
    ///
    /// # Safety
    /// As [`Driver::free`].
    unsafe fn free_pinned(&self, memory: Pinned) -> Result<()>;
    /// cuMemcpyHtoDAsync.
    ///
    /// # Safety
    /// `from` is pinned memory that nobody writes until the stream has got there, `to` has as many bytes.
    unsafe fn copy_in(&self, to: DevicePtr, from: *const u8, bytes: usize, stream: Stream) -> Result<()>;
    /// cuMemcpyDtoHAsync.
    ///
    /// # Safety
    /// `to` is pinned memory that nobody touches until the stream has got there, `from` has as many bytes.
    unsafe fn copy_out(&self, to: *mut u8, from: DevicePtr, bytes: usize, stream: Stream) -> Result<()>;
    /// cuMemsetD8Async.
    ///
    /// # Safety
    /// `at` has as many bytes.
    unsafe fn set(&self, at: DevicePtr, value: u8, bytes: u64, stream: Stream) -> Result<()>;
}
