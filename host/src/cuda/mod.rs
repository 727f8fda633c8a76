//! NVIDIA GPUs: the driver, and the device an engine runs on.
//!
//! [`Gpu::open`] opens libcuda, if there is one, and takes the first device that can run this build's GPU code;
//! [`Gpu::adopt`] uses a context and a stream that the program already has (its raw handles, whatever crate made them).
//! [`driver`] is the list of calls made, as a trait; [`libcuda`] the real one; [`fake`] keeps a record of them and runs
//! the kernel on the simulated GPU, so that everything above the trait is tested without a GPU.

mod code_probe;
pub mod driver;
pub mod fake;
pub mod libcuda;
pub mod probe;
mod ptx_isa;
mod ticket;
mod upload;

use crate::device_image::DeviceModule;
use driver::{Context, CudaError, DeviceInfo, Driver, Module, Stream, code};
use libcuda::{LibCuda, OpenError};
use perpetua_shared::launch::RESERVED_SHARED_BYTES;
pub use ptx_isa::PtxIsa;
use std::fmt::{Display, Formatter};
use std::sync::{Arc, OnceLock};
pub(crate) use ticket::Ticket;
pub use upload::upload_threads;
pub(crate) use upload::{Piece, upload};

/// Compute capability the GPU code is compiled for. It is architecture-specific code (`sm_90a`): neither older nor
/// newer chips run it.
pub const COMPUTE_CAPABILITY: (u32, u32) = (9, 0);

/// Why there is no GPU to run on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// No driver, or none that works.
    #[error("{0}")]
    Driver(Arc<OpenError>),
    /// The driver sees none.
    #[error("the NVIDIA driver sees no GPU (see CUDA_VISIBLE_DEVICES and nvidia-smi)")]
    NoDevice,
    /// No device that can run this build's code.
    #[error("{device} has compute capability {}.{}: this build's GPU code is for {}.{} (H100, H200, GH200)",
        found.0, found.1, COMPUTE_CAPABILITY.0, COMPUTE_CAPABILITY.1)]
    Unsupported {
        /// Its name.
        device: String,
        /// Its compute capability.
        found: (u32, u32),
    },
    /// Workers could wait for one that never starts.
    #[error("{0} has no cooperative launch, which resident workers need (a virtual GPU?)")]
    NoCooperativeLaunch(String),
    /// Shared memory begins elsewhere than the code takes it to.
    #[error(
        "the driver of {device} keeps {found} bytes of each block's shared memory: this build's GPU code is for {RESERVED_SHARED_BYTES}"
    )]
    Reserved {
        /// The device.
        device: String,
        /// How many it keeps.
        found: u32,
    },
    /// The build had no device toolchain.
    #[error("this build has no GPU code: run ./x setup and build again")]
    NoImage,
    /// The kernel does not fit.
    #[error(
        "the kernel does not fit an SM of {device}: {shared_bytes} bytes of shared memory and {threads} threads a block"
    )]
    TooLarge {
        /// The device.
        device: String,
        /// What a block wants.
        shared_bytes: u32,
        /// What a block wants.
        threads: u32,
    },
    /// More memory than the device has left.
    #[error(
        "{device} has {free} bytes free, {needed} are needed: {weights} of weights, {cache} of KV cache (see EngineConfig::max_context), \
         {rest} of intermediates and image"
    )]
    Memory {
        /// The device.
        device: String,
        /// There is.
        free: u64,
        /// Wanted in all.
        needed: u64,
        /// Of which weights,
        weights: u64,
        /// state kept from pass to pass,
        cache: u64,
        /// and everything else.
        rest: u64,
    },
    /// A call failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// libcuda, opened once for the program.
///
/// # Errors
/// Why it cannot be opened: the same answer each time.
pub fn libcuda() -> Result<Arc<LibCuda>, GpuError> {
    static LIBRARY: OnceLock<Result<Arc<LibCuda>, Arc<OpenError>>> = OnceLock::new();
    LIBRARY.get_or_init(|| LibCuda::open().map(Arc::new).map_err(Arc::new)).clone().map_err(GpuError::Driver)
}

/// Whether `device` can run this build's GPU code.
///
/// # Errors
/// Why it cannot.
pub fn check_device(device: &DeviceInfo) -> Result<(), GpuError> {
    if device.compute_capability != COMPUTE_CAPABILITY {
        return Err(GpuError::Unsupported { device: device.name.clone(), found: device.compute_capability });
    }
    if !device.has_cooperative_launch {
        return Err(GpuError::NoCooperativeLaunch(device.name.clone()));
    }
    if device.reserved_shared_bytes != RESERVED_SHARED_BYTES {
        return Err(GpuError::Reserved { device: device.name.clone(), found: device.reserved_shared_bytes });
    }
    Ok(())
}

/// A GPU with the context and, perhaps, the stream that an engine uses there. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Gpu {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    driver: Arc<dyn Driver>,
    info: DeviceInfo,
    context: Context,
    /// The primary context, retained here; else it is the program's own.
    is_retained: bool,
    stream: Option<Stream>,
    /// Whoever owns the context and the stream.
    _keep: Option<Keep>,
}

/// Something that must live as long as a [`Gpu`].
#[derive(Clone)]
struct Keep {
    _what: Arc<dyn std::any::Any + Send + Sync>,
}

impl std::fmt::Debug for Keep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keep")
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.is_retained {
            // Nobody is left to tell; the process's end releases it as well.
            let _ = self.driver.release_context(self.info.ordinal);
        }
    }
}

impl Gpu {
    /// The first device of the system's driver that can run this build's code, in its primary context.
    ///
    /// # Errors
    /// No driver, no device, or none of the right kind.
    pub fn open() -> Result<Gpu, GpuError> {
        Gpu::with_driver(libcuda()?)
    }

    /// As [`Gpu::open`], of another driver.
    ///
    /// # Errors
    /// As [`Gpu::open`].
    pub fn with_driver(driver: Arc<dyn Driver>) -> Result<Gpu, GpuError> {
        let devices = driver.devices()?;
        let mut refusal = GpuError::NoDevice;
        for info in devices {
            match check_device(&info) {
                Ok(()) => {
                    let context = driver.retain_context(info.ordinal)?;
                    let inner = Inner { driver, info, context, is_retained: true, stream: None, _keep: None };
                    return Ok(Gpu { inner: Arc::new(inner) });
                }
                // The first device's is what the user will ask about.
                Err(error) if matches!(refusal, GpuError::NoDevice) => refusal = error,
                Err(_) => {}
            }
        }
        Err(refusal)
    }

    /// The device of a context the program already has: `context` is a `CUcontext`, `stream` a `CUstream` of it, on
    /// which the kernel is launched; null for a stream of the engine's own. Crates such as cudarc and cust give both
    /// (`CudaContext::cu_ctx`, `CudaStream::cu_stream`; `Context::as_raw`, `Stream::as_inner`).
    ///
    /// # Errors
    /// A device that cannot run this build's code, or a driver that refuses the handles.
    ///
    /// # Safety
    /// Both are handles of the process's libcuda that outlive every engine made with the result; and the legacy default
    /// stream is not given, which would wait for the whole device.
    pub unsafe fn adopt(context: *mut std::ffi::c_void, stream: *mut std::ffi::c_void) -> Result<Gpu, GpuError> {
        let stream = (!stream.is_null()).then(|| Stream(stream.expose_provenance()));
        Gpu::make(libcuda()?, Context(context.expose_provenance()), stream, None)
    }

    /// As [`Gpu::adopt`], of another driver.
    ///
    /// # Errors
    /// As [`Gpu::adopt`].
    pub fn adopt_from(driver: Arc<dyn Driver>, context: Context, stream: Option<Stream>) -> Result<Gpu, GpuError> {
        Gpu::make(driver, context, stream, None)
    }

    /// The device of a cudarc stream, on which the kernel is launched. With cudarc's default stream, which would wait
    /// for the whole device, engines have streams of their own. The stream lives as long as every engine.
    ///
    /// # Errors
    /// As [`Gpu::adopt`].
    #[cfg(feature = "cudarc")]
    pub fn from_cudarc(stream: &Arc<cudarc::driver::CudaStream>) -> Result<Gpu, GpuError> {
        let context = Context(stream.context().cu_ctx().expose_provenance());
        let handle = stream.cu_stream();
        let own = (!handle.is_null()).then(|| Stream(handle.expose_provenance()));
        Gpu::make(libcuda()?, context, own, Some(Keep { _what: stream.clone() }))
    }

    /// The device of a cust context, on a stream of it or on the engine's own. Both live as long as every engine.
    ///
    /// # Errors
    /// As [`Gpu::adopt`].
    #[cfg(feature = "cust")]
    pub fn from_cust(
        context: &Arc<cust::context::Context>,
        stream: Option<Arc<cust::stream::Stream>>,
    ) -> Result<Gpu, GpuError> {
        let handle = stream.as_ref().map(|stream| Stream(stream.as_inner().expose_provenance()));
        let keep = Keep { _what: Arc::new((context.clone(), stream)) };
        Gpu::make(libcuda()?, Context(context.as_raw().expose_provenance()), handle, Some(keep))
    }

    fn make(
        driver: Arc<dyn Driver>,
        context: Context,
        stream: Option<Stream>,
        keep: Option<Keep>,
    ) -> Result<Gpu, GpuError> {
        driver.push_context(context)?;
        let ordinal = driver.context_device();
        driver.pop_context()?;
        let ordinal = ordinal?;
        let info = driver.devices()?.into_iter().find(|info| info.ordinal == ordinal).ok_or(GpuError::NoDevice)?;
        check_device(&info)?;
        Ok(Gpu { inner: Arc::new(Inner { driver, info, context, is_retained: false, stream, _keep: keep }) })
    }

    /// What the driver says of the device.
    pub fn info(&self) -> &DeviceInfo {
        &self.inner.info
    }

    /// The driver.
    pub fn driver(&self) -> &dyn Driver {
        &*self.inner.driver
    }

    /// Which GPU it is, of those this process knows: the driver's address, and the device's number.
    fn place(&self) -> (usize, u32) {
        (Arc::as_ptr(&self.inner.driver).addr(), self.inner.info.ordinal)
    }

    /// The stream the program gave, if it gave one.
    pub(crate) fn stream(&self) -> Option<Stream> {
        self.inner.stream
    }

    /// Loads `module` into the context, which is current.
    pub(crate) fn load_module(&self, module: &DeviceModule) -> Result<Module, GpuError> {
        self.load(module).map(|(module, _)| module)
    }

    /// Loads `module`, and unloads it again: how the driver took it.
    ///
    /// # Errors
    /// The driver takes neither the cubin nor the PTX.
    pub fn try_load(&self, module: &DeviceModule) -> Result<Loaded, GpuError> {
        let _entered = self.enter()?;
        let (module, loaded) = self.load(module)?;
        self.driver().unload_module(module)?;
        Ok(loaded)
    }

    fn load(&self, module: &DeviceModule) -> Result<(Module, Loaded), GpuError> {
        let compile = |refused| {
            // As a C string: that is how the driver knows where it ends.
            let (loaded, said) = self.load_whole(&[module.ptx().as_bytes(), &[0]].concat(), module.entry)?;
            Ok((loaded, Loaded::Ptx { refused, said }))
        };
        let Some(cubin) = module.cubin() else { return compile(None).map_err(GpuError::Cuda) };
        // The driver reads its tables where they lie, as words.
        let mut words = vec![0u64; cubin.len().div_ceil(8)];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        bytes[..cubin.len()].copy_from_slice(cubin);
        match self.load_whole(&bytes[..cubin.len()], module.entry) {
            Ok((module, _)) => Ok((module, Loaded::Cubin)),
            // A driver older than the ptxas that made it, perhaps; it may know the PTX all the same.
            Err(refused) if refused.code != code::OUT_OF_MEMORY && !refused.is_sticky() => {
                let compiled = compile(Some(refused.clone()));
                compiled.map_err(|error: CudaError| error.after(&refused).into())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Loads GPU code, kernel and all: a driver may look at that only when it is asked for it.
    fn load_whole(&self, image: &[u8], entry: &str) -> Result<(Module, String), CudaError> {
        let (module, said) = self.driver().load_module(image)?;
        self.driver().function(module, entry).map(|_| (module, said)).inspect_err(|_| {
            // The other error is the one to tell.
            let _ = self.driver().unload_module(module);
        })
    }

    /// Makes the context current on this thread, until the guard is dropped.
    ///
    /// # Errors
    /// A context that is no more.
    pub fn enter(&self) -> Result<Entered<'_>, CudaError> {
        self.inner.driver.push_context(self.inner.context)?;
        Ok(Entered { driver: &*self.inner.driver })
    }
}

/// How a driver took a module of GPU code: see [`Gpu::try_load`].
#[derive(Debug, Clone)]
pub enum Loaded {
    /// As machine code.
    Cubin,
    /// As PTX, which it compiled.
    Ptx {
        /// What it said of the machine code, where this build has some.
        refused: Option<CudaError>,
        /// What its compiler had to say: that products wait for each other, say.
        said: String,
    },
}

impl Display for Loaded {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Loaded::Cubin => write!(f, "cubin"),
            Loaded::Ptx { refused, said } => {
                write!(f, "PTX")?;
                if let Some(error) = refused {
                    write!(f, ", since the cubin was refused: {error}")?;
                }
                if said.is_empty() { Ok(()) } else { write!(f, "; the driver's compiler says: {said}") }
            }
        }
    }
}

/// See [`Gpu::enter`].
#[derive(Debug)]
pub struct Entered<'a> {
    driver: &'a dyn Driver,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        // It was pushed by this thread, so the only failure is a driver that is shutting down.
        let _ = self.driver.pop_context();
    }
}
