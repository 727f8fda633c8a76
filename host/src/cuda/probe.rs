//! What a GPU can do, measured: the rate at which loaders can read, and how long workers take to hear of each other.

use super::driver::{CudaError, DevicePtr, Launch, Module, Stream};
use super::{Gpu, GpuError};
use perpetua_shared::launch::{TILE_BARRIERS, TILE_BYTES};
use perpetua_shared::probe::{GAVE_UP, HOP, MEET, ProbeParams, READ, THREADS};
use std::time::Duration;

/// A device with the probes loaded, and memory for them.
#[derive(Debug)]
pub struct Prober {
    gpu: Gpu,
    module: Module,
    stream: Stream,
    /// Counters, times, and the bytes to read: allocations of their own.
    memory: Vec<DevicePtr>,
    source_bytes: u64,
    pinned: super::driver::Pinned,
}

/// Bytes of the small allocations.
const SMALL: u64 = 4096;

impl Prober {
    /// Loads the probes and takes `source_bytes` of memory to read.
    ///
    /// # Errors
    /// No GPU code in this build, or the driver.
    pub fn new(gpu: Gpu, source_bytes: u64) -> Result<Prober, GpuError> {
        let entered = gpu.enter()?;
        let driver = gpu.driver();
        let module = gpu.load_module()?;
        let stream = driver.create_stream()?;
        let pinned = driver.alloc_pinned(SMALL as usize)?;
        let mut prober = Prober { gpu: gpu.clone(), module, stream, memory: Vec::new(), source_bytes, pinned };
        // From here on what has been made is given back when the prober is dropped.
        for bytes in [SMALL, SMALL, source_bytes] {
            prober.memory.push(driver.alloc(bytes)?);
        }
        // SAFETY: just allocated.
        unsafe { driver.set(prober.memory[2], 1, source_bytes, stream)? };
        driver.synchronize(stream)?;
        drop(entered);
        Ok(prober)
    }

    /// Launches probe `name` with `params` on `blocks` SMs: each block's time.
    fn run(&mut self, name: &str, blocks: u32, params: ProbeParams) -> Result<Vec<Duration>, GpuError> {
        assert!(u64::from(blocks) * 8 <= SMALL, "a time for every block");
        let _entered = self.gpu.enter()?;
        let driver = self.gpu.driver();
        let function = driver.function(self.module, name)?;
        driver.set_shared_bytes(function, TILE_BYTES)?;
        let [counters, out, source] = self.memory[..] else { unreachable!("three allocations, see `new`") };
        let params = ProbeParams {
            source: source.0,
            counters: counters.0,
            out: out.0,
            timeout_ns: 500_000_000,
            blocks,
            ..params
        };
        let launch = Launch {
            function,
            blocks,
            threads: THREADS,
            shared_bytes: TILE_BYTES,
            stream: self.stream,
            param: bytemuck::bytes_of(&params),
        };
        let mut times = vec![0u64; blocks as usize];
        // SAFETY: the pinned memory holds the times and is used by one copy; allocations are as large; the parameters are as the probe wants them (`read` and the others).
        unsafe {
            driver.set(counters, 0, SMALL, self.stream)?;
            driver.launch(&launch)?;
            driver.synchronize(self.stream)?;
            driver.copy_out(self.pinned.host, out, 8 * times.len(), self.stream)?;
            driver.synchronize(self.stream)?;
            self.pinned.host.copy_to_nonoverlapping(times.as_mut_ptr().cast(), 8 * times.len());
        }
        if times.contains(&GAVE_UP) {
            let text = Some("a block waited for another in vain".to_owned());
            return Err(CudaError { call: "a probe", code: 719, name: name.to_owned(), text }.into());
        }
        Ok(times.into_iter().map(Duration::from_nanos).collect())
    }

    /// Bytes a second that loaders on `blocks` SMs bring into shared memory by copies of `tile_bytes`, `n_tiles` under way
    /// at once on each. By the slowest block's time, which is shorter than the launch's.
    ///
    /// # Errors
    /// The driver.
    ///
    /// # Panics
    /// If the tiles do not fit an SM, or the memory to read is less than a tile for every SM.
    pub fn read(&mut self, blocks: u32, tile_bytes: u32, n_tiles: u32) -> Result<f64, GpuError> {
        assert!(tile_bytes.is_multiple_of(16) && n_tiles <= TILE_BARRIERS && tile_bytes * n_tiles <= TILE_BYTES);
        let bytes = self.source_bytes / u64::from(blocks) / u64::from(tile_bytes) * u64::from(tile_bytes);
        assert!(bytes > 0, "less than a tile for every SM");
        let times = self.run(READ, blocks, ProbeParams { bytes, tile_bytes, n_tiles, ..ProbeParams::default() })?;
        let slowest = times.iter().max().copied().unwrap_or_default();
        Ok((bytes * u64::from(blocks)) as f64 / slowest.as_secs_f64().max(1e-9))
    }

    /// From one worker's trigger to another's seeing it.
    ///
    /// # Errors
    /// The driver.
    pub fn hop(&mut self, rounds: u32) -> Result<Duration, GpuError> {
        let times = self.run(HOP, 2, ProbeParams { rounds, ..ProbeParams::default() })?;
        Ok(times[0] / (2 * rounds))
    }

    /// A barrier of `blocks` workers at one counter.
    ///
    /// # Errors
    /// The driver.
    pub fn meet(&mut self, blocks: u32, rounds: u32) -> Result<Duration, GpuError> {
        let times = self.run(MEET, blocks, ProbeParams { rounds, ..ProbeParams::default() })?;
        Ok(times.iter().max().copied().unwrap_or_default() / rounds)
    }
}

impl Drop for Prober {
    fn drop(&mut self) {
        let Ok(_entered) = self.gpu.enter() else { return };
        let driver = self.gpu.driver();
        // Nobody is left to hear of errors.
        let _ = driver.synchronize(self.stream);
        let _ = driver.destroy_stream(self.stream);
        let _ = driver.unload_module(self.module);
        // SAFETY: allocated in `new`; the stream that used them is idle.
        unsafe {
            for memory in self.memory.drain(..) {
                let _ = driver.free(memory);
            }
            let _ = driver.free_pinned(self.pinned);
        }
    }
}
