//! What an executor has of the driver. Each thing is noted as soon as it is made, so all is given back however far the
//! making came.

use crate::cuda::driver::{CudaError, DevicePtr, Driver, GraphExec, Module, Pinned, Stream};
use crate::cuda::{Entered, Gpu, GpuError};
use crate::device_image::DeviceModule;

/// What must be given back.
#[derive(Debug)]
pub(super) struct Resources {
    gpu: Gpu,
    streams: Vec<Stream>,
    graphs: Vec<GraphExec>,
    module: Option<Module>,
    memory: Option<DevicePtr>,
    pinned: Vec<Pinned>,
    /// The kernel may still run: then nothing is.
    is_lost: bool,
}

impl Resources {
    /// None yet. `gpu`'s context is current whenever one is made.
    pub(super) fn new(gpu: Gpu) -> Resources {
        Resources {
            gpu,
            streams: Vec::new(),
            graphs: Vec::new(),
            module: None,
            memory: None,
            pinned: Vec::new(),
            is_lost: false,
        }
    }

    /// Where they are.
    pub(super) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Who has given them.
    pub(super) fn driver(&self) -> &dyn Driver {
        self.gpu.driver()
    }

    /// The code of the kernel.
    pub(super) fn load(&mut self, code: &DeviceModule) -> Result<Module, GpuError> {
        let module = self.gpu.load_module(code)?;
        self.module = Some(module);
        Ok(module)
    }

    /// The memory on the device.
    pub(super) fn alloc(&mut self, bytes: u64) -> Result<DevicePtr, CudaError> {
        let memory = self.driver().alloc(bytes)?;
        self.memory = Some(memory);
        Ok(memory)
    }

    /// One more stream.
    pub(super) fn stream(&mut self) -> Result<Stream, CudaError> {
        let stream = self.driver().create_stream()?;
        self.streams.push(stream);
        Ok(stream)
    }

    /// Some more pinned memory.
    pub(super) fn pinned(&mut self, bytes: usize) -> Result<Pinned, CudaError> {
        let pinned = self.driver().alloc_pinned(bytes)?;
        self.pinned.push(pinned);
        Ok(pinned)
    }

    /// A graph that has been made.
    pub(super) fn keep(&mut self, graph: GraphExec) {
        self.graphs.push(graph);
    }

    /// Nothing is given back: a kernel that does not end still uses it.
    pub(super) fn lose(&mut self) {
        self.is_lost = true;
    }

    /// Makes the context current, unless a kernel runs there that does not end: whoever waited for a stream would wait
    /// for it.
    pub(super) fn enter(&self) -> Result<Entered<'_>, CudaError> {
        if self.is_lost {
            let name = "the kernel does not end".to_owned();
            return Err(CudaError { call: "a run", code: 702, name, text: None });
        }
        self.gpu.enter()
    }
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
        // SAFETY: allocated above, once, and the streams that used them are idle.
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
