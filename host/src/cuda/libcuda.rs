//! The driver's own library, opened when it is first asked for: one program serves machines with and without a GPU.

use super::driver::code;
use super::driver::{
    Context, CudaError, DeviceInfo, DevicePtr, Driver, Function, Graph, GraphExec, Launch, Module, Node, OperatorNode,
    Pinned, Result, Stream,
};
use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::fmt;

/// Where the library is looked for, the system's own names for it.
const NAMES: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] };

/// Declares the table of functions and how it is filled: the name in this program, the symbol, the types of its
/// arguments. All of them return a `CUresult`.
macro_rules! functions {
    ($($field:ident = $symbol:literal ($($argument:ty),*);)*) => {
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Functions {
            fn load(library: &Library) -> Result<Functions> {
                Ok(Functions {
                    // SAFETY: the types are those of the driver's reference for the symbol.
                    $($field: unsafe {
                        *library.get(concat!($symbol, "\0").as_bytes()).map_err(|error| CudaError {
                            call: $symbol,
                            code: code::MISSING_SYMBOL,
                            name: "not in this driver".to_owned(),
                            text: Some(words(&error)),
                        })?
                    },)*
                })
            }
        }
    };
}

type Handle = *mut c_void;

functions! {
    init = "cuInit"(c_uint);
    driver_version = "cuDriverGetVersion"(*mut c_int);
    error_name = "cuGetErrorName"(c_int, *mut *const c_char);
    error_string = "cuGetErrorString"(c_int, *mut *const c_char);
    device_count = "cuDeviceGetCount"(*mut c_int);
    device = "cuDeviceGet"(*mut c_int, c_int);
    device_name = "cuDeviceGetName"(*mut c_char, c_int, c_int);
    device_memory = "cuDeviceTotalMem_v2"(*mut usize, c_int);
    device_attribute = "cuDeviceGetAttribute"(*mut c_int, c_int, c_int);
    retain = "cuDevicePrimaryCtxRetain"(*mut Handle, c_int);
    release = "cuDevicePrimaryCtxRelease_v2"(c_int);
    push = "cuCtxPushCurrent_v2"(Handle);
    pop = "cuCtxPopCurrent_v2"(*mut Handle);
    context_device = "cuCtxGetDevice"(*mut c_int);
    stream_create = "cuStreamCreate"(*mut Handle, c_uint);
    stream_destroy = "cuStreamDestroy_v2"(Handle);
    stream_synchronize = "cuStreamSynchronize"(Handle);
    stream_query = "cuStreamQuery"(Handle);
    module_load = "cuModuleLoadDataEx"(*mut Handle, *const c_void, c_uint, *mut c_int, *mut Handle);
    module_unload = "cuModuleUnload"(Handle);
    module_function = "cuModuleGetFunction"(*mut Handle, Handle, *const c_char);
    function_attribute = "cuFuncSetAttribute"(Handle, c_int, c_int);
    occupancy = "cuOccupancyMaxActiveBlocksPerMultiprocessor"(*mut c_int, Handle, c_int, usize);
    launch = "cuLaunchCooperativeKernel"(
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut Handle
    );
    graph_create = "cuGraphCreate"(*mut Handle, c_uint);
    graph_add = "cuGraphAddKernelNode_v2"(*mut Handle, Handle, *const Handle, usize, *const KernelNodeParams);
    graph_instantiate = "cuGraphInstantiateWithFlags"(*mut Handle, Handle, c_ulonglong);
    graph_destroy = "cuGraphDestroy"(Handle);
    graph_exec_destroy = "cuGraphExecDestroy"(Handle);
    graph_launch = "cuGraphLaunch"(Handle, Handle);
    memory = "cuMemGetInfo_v2"(*mut usize, *mut usize);
    alloc = "cuMemAlloc_v2"(*mut u64, usize);
    free = "cuMemFree_v2"(u64);
    host_alloc = "cuMemHostAlloc"(*mut Handle, usize, c_uint);
    host_device = "cuMemHostGetDevicePointer_v2"(*mut u64, Handle, c_uint);
    host_free = "cuMemFreeHost"(Handle);
    copy_in = "cuMemcpyHtoDAsync_v2"(u64, *const c_void, usize, Handle);
    copy_out = "cuMemcpyDtoHAsync_v2"(*mut c_void, u64, usize, Handle);
    set = "cuMemsetD8Async"(u64, u8, usize, Handle);
}

/// `CUDA_KERNEL_NODE_PARAMS_v2`.
#[repr(C)]
struct KernelNodeParams {
    function: Handle,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    params: *mut Handle,
    extra: *mut Handle,
    /// Instead of a function, in the context that follows; null.
    kernel: Handle,
    context: Handle,
}

const _: () = assert!(size_of::<KernelNodeParams>() == 72);

/// `CUdevice_attribute`.
mod attribute {
    pub(super) const MULTIPROCESSORS: i32 = 16;
    pub(super) const L2_BYTES: i32 = 38;
    pub(super) const MAJOR: i32 = 75;
    pub(super) const MINOR: i32 = 76;
    pub(super) const COOPERATIVE_LAUNCH: i32 = 95;
    pub(super) const SHARED_BYTES_OPT_IN: i32 = 97;
    pub(super) const SHARED_BYTES_RESERVED: i32 = 111;
}

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: c_uint = 1;
/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`.
const PORTABLE_MAPPED: c_uint = 1 | 2;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
const MAX_DYNAMIC_SHARED: c_int = 8;
/// `CU_JIT_INFO_LOG_BUFFER`, `CU_JIT_ERROR_LOG_BUFFER` and each one's size in bytes.
const JIT_LOGS: [c_int; 4] = [3, 4, 5, 6];
const LOG_BYTES: usize = 16 << 10;

/// Why there is no driver to talk to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// No library of that name: no driver is installed, or it is not where the system looks.
    #[error("no NVIDIA driver: {0}")]
    Missing(String),
    /// It is there, and does not work.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// `error` and what is behind it.
fn words(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// The library, initialised.
pub struct LibCuda {
    functions: Functions,
    _library: Library,
}

impl fmt::Debug for LibCuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LibCuda")
    }
}

impl LibCuda {
    /// Opens and initialises it.
    ///
    /// # Errors
    /// No library, one that lacks a function, or a driver that cannot start.
    pub fn open() -> std::result::Result<LibCuda, OpenError> {
        let mut missing = String::new();
        for &name in NAMES {
            // SAFETY: the driver's library; what it runs when it is loaded is the driver's affair.
            match unsafe { Library::new(name) } {
                Ok(library) => return Ok(LibCuda::init(library)?),
                Err(error) if missing.is_empty() => missing = words(&error),
                Err(_) => {}
            }
        }
        Err(OpenError::Missing(missing))
    }

    fn init(library: Library) -> Result<LibCuda> {
        let cuda = LibCuda { functions: Functions::load(&library)?, _library: library };
        // SAFETY: flags must be 0.
        cuda.check("cuInit", unsafe { (cuda.functions.init)(0) })?;
        Ok(cuda)
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == code::SUCCESS { Ok(()) } else { Err(self.error(call, code)) }
    }

    fn error(&self, call: &'static str, code: c_int) -> CudaError {
        let word = |ask: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int| {
            let mut text = std::ptr::null();
            // SAFETY: the driver sets the pointer to a constant string of its own, or leaves it null.
            unsafe {
                ask(code, &raw mut text);
                (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
            }
        };
        let name = word(self.functions.error_name).unwrap_or_else(|| "an error unknown to this driver".to_owned());
        CudaError { call, code, name, text: word(self.functions.error_string) }
    }

    fn attribute(&self, device: c_int, attribute: c_int) -> Result<u32> {
        let mut value = 0;
        // SAFETY: the driver writes one int.
        let code = unsafe { (self.functions.device_attribute)(&raw mut value, attribute, device) };
        self.check("cuDeviceGetAttribute", code)?;
        Ok(value.max(0) as u32)
    }

    fn device_info(&self, ordinal: u32) -> Result<DeviceInfo> {
        let device = self.device(ordinal)?;
        let mut name = [0; 256];
        // SAFETY: the driver writes at most as many bytes, the last one 0.
        let code = unsafe { (self.functions.device_name)(name.as_mut_ptr(), name.len() as c_int, device) };
        self.check("cuDeviceGetName", code)?;
        // SAFETY: as above.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let mut memory_bytes = 0;
        // SAFETY: the driver writes one size.
        let code = unsafe { (self.functions.device_memory)(&raw mut memory_bytes, device) };
        self.check("cuDeviceTotalMem", code)?;
        Ok(DeviceInfo {
            ordinal,
            name,
            compute_capability: (self.attribute(device, attribute::MAJOR)?, self.attribute(device, attribute::MINOR)?),
            n_sms: self.attribute(device, attribute::MULTIPROCESSORS)?,
            shared_bytes: self.attribute(device, attribute::SHARED_BYTES_OPT_IN)?,
            reserved_shared_bytes: self.attribute(device, attribute::SHARED_BYTES_RESERVED)?,
            memory_bytes: memory_bytes as u64,
            l2_bytes: self.attribute(device, attribute::L2_BYTES)?,
            has_cooperative_launch: self.attribute(device, attribute::COOPERATIVE_LAUNCH)? != 0,
        })
    }

    fn device(&self, ordinal: u32) -> Result<c_int> {
        let mut device = 0;
        // SAFETY: the driver writes one int.
        self.check("cuDeviceGet", unsafe { (self.functions.device)(&raw mut device, ordinal as c_int) })?;
        Ok(device)
    }
}

fn handle(number: usize) -> Handle {
    std::ptr::with_exposed_provenance_mut(number)
}

// SAFETY: every method calls the function it is named after with the arguments its reference asks for; results are
// written to locals of the right size.
unsafe impl Driver for LibCuda {
    fn version(&self) -> Result<u32> {
        let mut version = 0;
        // SAFETY: see the impl.
        self.check("cuDriverGetVersion", unsafe { (self.functions.driver_version)(&raw mut version) })?;
        Ok(version as u32)
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let mut count = 0;
        // SAFETY: see the impl.
        self.check("cuDeviceGetCount", unsafe { (self.functions.device_count)(&raw mut count) })?;
        (0..count as u32).map(|ordinal| self.device_info(ordinal)).collect()
    }

    fn retain_context(&self, ordinal: u32) -> Result<Context> {
        let device = self.device(ordinal)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: see the impl.
        self.check("cuDevicePrimaryCtxRetain", unsafe { (self.functions.retain)(&raw mut context, device) })?;
        Ok(Context(context.expose_provenance()))
    }

    fn release_context(&self, ordinal: u32) -> Result<()> {
        let device = self.device(ordinal)?;
        // SAFETY: see the impl.
        self.check("cuDevicePrimaryCtxRelease", unsafe { (self.functions.release)(device) })
    }

    fn push_context(&self, context: Context) -> Result<()> {
        // SAFETY: see the impl.
        self.check("cuCtxPushCurrent", unsafe { (self.functions.push)(handle(context.0)) })
    }

    fn pop_context(&self) -> Result<()> {
        let mut context = std::ptr::null_mut();
        // SAFETY: see the impl.
        self.check("cuCtxPopCurrent", unsafe { (self.functions.pop)(&raw mut context) })
    }

    fn context_device(&self) -> Result<u32> {
        let mut device = 0;
        // SAFETY: see the impl.
        self.check("cuCtxGetDevice", unsafe { (self.functions.context_device)(&raw mut device) })?;
        Ok(device as u32)
    }

    fn create_stream(&self) -> Result<Stream> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: see the impl.
        self.check("cuStreamCreate", unsafe { (self.functions.stream_create)(&raw mut stream, NON_BLOCKING) })?;
        Ok(Stream(stream.expose_provenance()))
    }

    fn destroy_stream(&self, stream: Stream) -> Result<()> {
        // SAFETY: see the impl.
        self.check("cuStreamDestroy", unsafe { (self.functions.stream_destroy)(handle(stream.0)) })
    }

    fn synchronize(&self, stream: Stream) -> Result<()> {
        // SAFETY: see the impl.
        self.check("cuStreamSynchronize", unsafe { (self.functions.stream_synchronize)(handle(stream.0)) })
    }

    fn is_done(&self, stream: Stream) -> Result<bool> {
        // SAFETY: see the impl.
        match unsafe { (self.functions.stream_query)(handle(stream.0)) } {
            code::NOT_READY => Ok(false),
            code => self.check("cuStreamQuery", code).map(|()| true),
        }
    }

    fn load_module(&self, image: &[u8]) -> Result<(Module, String)> {
        let mut module = std::ptr::null_mut();
        let mut logs = [vec![0u8; LOG_BYTES], vec![0u8; LOG_BYTES]];
        let mut options = JIT_LOGS;
        let [info, errors] = &mut logs;
        // Values narrower than a pointer are passed in its place.
        let (info, errors) = (info.as_mut_ptr().cast(), errors.as_mut_ptr().cast());
        let mut values = [info, handle(LOG_BYTES), errors, handle(LOG_BYTES)];
        // SAFETY: see the impl; the logs outlive the call.
        let code = unsafe {
            let (image, n) = (image.as_ptr().cast(), JIT_LOGS.len() as c_uint);
            (self.functions.module_load)(&raw mut module, image, n, options.as_mut_ptr(), values.as_mut_ptr())
        };
        let [info, errors] = logs.map(|log| {
            let log: Vec<u8> = log.into_iter().take_while(|byte| *byte != 0).collect();
            String::from_utf8_lossy(&log).trim().to_owned()
        });
        self.check("cuModuleLoadDataEx", code).map_err(|mut error| {
            if !errors.is_empty() {
                error.text = Some(format!("the driver's compiler says: {errors}"));
            }
            error
        })?;
        Ok((Module(module.expose_provenance()), info))
    }

    fn unload_module(&self, module: Module) -> Result<()> {
        // SAFETY: see the impl.
        self.check("cuModuleUnload", unsafe { (self.functions.module_unload)(handle(module.0)) })
    }

    fn function(&self, module: Module, name: &str) -> Result<Function> {
        let name = CString::new(name).expect("names of kernels have no zero byte");
        let mut function = std::ptr::null_mut();
        // SAFETY: see the impl.
        let code = unsafe { (self.functions.module_function)(&raw mut function, handle(module.0), name.as_ptr()) };
        self.check("cuModuleGetFunction", code)?;
        Ok(Function(function.expose_provenance()))
    }

    fn set_shared_bytes(&self, function: Function, bytes: u32) -> Result<()> {
        // SAFETY: see the impl.
        let code =
            unsafe { (self.functions.function_attribute)(handle(function.0), MAX_DYNAMIC_SHARED, bytes as c_int) };
        self.check("cuFuncSetAttribute", code)
    }

    fn blocks_per_sm(&self, function: Function, threads: u32, shared_bytes: u32) -> Result<u32> {
        let mut blocks = 0;
        // SAFETY: see the impl.
        let code = unsafe {
            (self.functions.occupancy)(&raw mut blocks, handle(function.0), threads as c_int, shared_bytes as usize)
        };
        self.check("cuOccupancyMaxActiveBlocksPerMultiprocessor", code)?;
        Ok(blocks.max(0) as u32)
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        let Launch { function, blocks, threads, shared_bytes, stream, param } = *launch;
        let mut params: [Handle; 1] = [param.as_ptr().cast_mut().cast()];
        // SAFETY: see the impl; parameters are only read, and copied before the call returns.
        let code = unsafe {
            let (function, stream) = (handle(function.0), handle(stream.0));
            (self.functions.launch)(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, params.as_mut_ptr())
        };
        self.check("cuLaunchCooperativeKernel", code)
    }

    fn create_graph(&self) -> Result<Graph> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: see the impl; flags must be 0.
        self.check("cuGraphCreate", unsafe { (self.functions.graph_create)(&raw mut graph, 0) })?;
        Ok(Graph(graph.expose_provenance()))
    }

    fn add_node(&self, graph: Graph, after: Option<Node>, node: &OperatorNode) -> Result<Node> {
        let OperatorNode { function, blocks, threads, shared_bytes, mut params, mut program, mut first_task } = *node;
        let mut params: [Handle; 3] =
            [(&raw mut params).cast(), (&raw mut program).cast(), (&raw mut first_task).cast()];
        let node = KernelNodeParams {
            function: handle(function.0),
            grid: [blocks, 1, 1],
            block: [threads, 1, 1],
            shared_bytes,
            params: params.as_mut_ptr(),
            extra: std::ptr::null_mut(),
            kernel: std::ptr::null_mut(),
            context: std::ptr::null_mut(),
        };
        let (mut added, after) = (std::ptr::null_mut(), after.map(|node| handle(node.0)));
        // SAFETY: see the impl; parameters are copied before the call returns.
        let code = unsafe {
            let after = after.as_slice();
            (self.functions.graph_add)(&raw mut added, handle(graph.0), after.as_ptr(), after.len(), &raw const node)
        };
        self.check("cuGraphAddKernelNode", code)?;
        Ok(Node(added.expose_provenance()))
    }

    fn instantiate(&self, graph: Graph) -> Result<GraphExec> {
        let mut exec = std::ptr::null_mut();
        // SAFETY: see the impl.
        let code = unsafe { (self.functions.graph_instantiate)(&raw mut exec, handle(graph.0), 0) };
        self.check("cuGraphInstantiateWithFlags", code)?;
        Ok(GraphExec(exec.expose_provenance()))
    }

    fn destroy_graph(&self, graph: Graph) -> Result<()> {
        // SAFETY: see the impl.
        self.check("cuGraphDestroy", unsafe { (self.functions.graph_destroy)(handle(graph.0)) })
    }

    fn destroy_exec(&self, exec: GraphExec) -> Result<()> {
        // SAFETY: see the impl.
        self.check("cuGraphExecDestroy", unsafe { (self.functions.graph_exec_destroy)(handle(exec.0)) })
    }

    unsafe fn launch_graph(&self, exec: GraphExec, stream: Stream) -> Result<()> {
        // SAFETY: see the impl.
        self.check("cuGraphLaunch", unsafe { (self.functions.graph_launch)(handle(exec.0), handle(stream.0)) })
    }

    fn memory(&self) -> Result<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: see the impl.
        self.check("cuMemGetInfo", unsafe { (self.functions.memory)(&raw mut free, &raw mut total) })?;
        Ok((free as u64, total as u64))
    }

    fn alloc(&self, bytes: u64) -> Result<DevicePtr> {
        let mut at = 0;
        // SAFETY: see the impl.
        self.check("cuMemAlloc", unsafe { (self.functions.alloc)(&raw mut at, bytes as usize) })?;
        Ok(DevicePtr(at))
    }

    unsafe fn free(&self, at: DevicePtr) -> Result<()> {
        // SAFETY: see the impl.
        self.check("cuMemFree", unsafe { (self.functions.free)(at.0) })
    }

    fn alloc_pinned(&self, bytes: usize) -> Result<Pinned> {
        let mut host = std::ptr::null_mut();
        // SAFETY: see the impl.
        self.check("cuMemHostAlloc", unsafe { (self.functions.host_alloc)(&raw mut host, bytes, PORTABLE_MAPPED) })?;
        let mut device = 0;
        // SAFETY: see the impl; flags must be 0.
        let code = unsafe { (self.functions.host_device)(&raw mut device, host, 0) };
        let pinned = Pinned { host: host.cast(), device: DevicePtr(device), bytes };
        if let Err(error) = self.check("cuMemHostGetDevicePointer", code) {
            // SAFETY: allocated above, used by nobody. The first error is the one to tell.
            let _ = unsafe { self.free_pinned(pinned) };
            return Err(error);
        }
        Ok(pinned)
    }

    unsafe fn free_pinned(&self, memory: Pinned) -> Result<()> {
        // SAFETY: see the impl.
        self.check("cuMemFreeHost", unsafe { (self.functions.host_free)(memory.host.cast()) })
    }

    unsafe fn copy_in(&self, to: DevicePtr, from: *const u8, bytes: usize, stream: Stream) -> Result<()> {
        // SAFETY: see the impl.
        let code = unsafe { (self.functions.copy_in)(to.0, from.cast(), bytes, handle(stream.0)) };
        self.check("cuMemcpyHtoDAsync", code)
    }

    unsafe fn copy_out(&self, to: *mut u8, from: DevicePtr, bytes: usize, stream: Stream) -> Result<()> {
        // SAFETY: see the impl.
        let code = unsafe { (self.functions.copy_out)(to.cast(), from.0, bytes, handle(stream.0)) };
        self.check("cuMemcpyDtoHAsync", code)
    }

    unsafe fn set(&self, at: DevicePtr, value: u8, bytes: u64, stream: Stream) -> Result<()> {
        // SAFETY: see the impl.
        let code = unsafe { (self.functions.set)(at.0, value, bytes as usize, handle(stream.0)) };
        self.check("cuMemsetD8Async", code)
    }
}
