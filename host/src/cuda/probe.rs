//! What a GPU can do, measured: the rate at which loaders can read, how long workers take to hear of each other, and
//! how fast bytes come to it from the host.

use super::driver::{CudaError, DevicePtr, Launch, Module, Stream};
use super::upload::{self, BUFFER_BYTES, Buffers, upload, upload_threads};
use super::{Gpu, GpuError, Piece, code_probe};
use crate::device_image::device_image;
use perpetua_shared::launch::{SHARED_BYTES, TASK_THREADS, TILE_BARRIERS, TILE_BYTES};
use perpetua_shared::probe::{
    COPY, GAVE_UP, HAND, HOP, MEET, ProbeParams, READ, ROW_BYTES, TAKE, TAKEN_BYTES, UNDER_WAY, WORDS_AT, threads,
};
use std::time::{Duration, Instant};

/// A device with the probes loaded, and memory for them.
#[derive(Debug)]
pub struct Prober {
    gpu: Gpu,
    module: Module,
    /// The one of [`code`](Prober::code), loaded when it is first wanted.
    code: Option<Module>,
    stream: Stream,
    /// Counters, times, and the bytes to read: allocations of their own.
    memory: Vec<DevicePtr>,
    source_bytes: u64,
    pinned: super::driver::Pinned,
}

/// Where the tiles of [`Prober::take`] come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TilesFrom {
    /// They stay as they are.
    Nowhere,
    /// The second-level cache.
    L2,
    /// Memory.
    Memory,
}

/// Bytes of the small allocations.
const SMALL: u64 = WORDS_AT + 2 * ROW_BYTES;

/// A copy that shows what the bus can do: so large that its start is nothing beside it.
const BUS_COPY_BYTES: u64 = 8 << 20;
/// Streams that such copies are given to in turn.
const BUS_STREAMS: usize = 4;

impl Prober {
    /// Loads the probes and takes `source_bytes` of memory to read.
    ///
    /// # Errors
    /// No GPU code in this build, or the driver.
    pub fn new(gpu: Gpu, source_bytes: u64) -> Result<Prober, GpuError> {
        let entered = gpu.enter()?;
        let driver = gpu.driver();
        let module = gpu.load_module(&device_image().ok_or(GpuError::NoImage)?.worker)?;
        let stream = driver.create_stream()?;
        let pinned = driver.alloc_pinned(SMALL as usize)?;
        let mut prober =
            Prober { gpu: gpu.clone(), module, code: None, stream, memory: Vec::new(), source_bytes, pinned };
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
        self.run_of(self.module, (name, threads(name)), blocks, params)
    }

    /// Likewise, of another module, with so many threads.
    fn run_of(
        &mut self,
        module: Module,
        (name, threads): (&str, u32),
        blocks: u32,
        params: ProbeParams,
    ) -> Result<Vec<Duration>, GpuError> {
        assert!(u64::from(blocks) * 8 <= SMALL, "a time for every block");
        let _entered = self.gpu.enter()?;
        let driver = self.gpu.driver();
        let function = driver.function(module, name)?;
        driver.set_shared_bytes(function, SHARED_BYTES)?;
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
            threads,
            shared_bytes: SHARED_BYTES,
            stream: self.stream,
            param: bytemuck::bytes_of(&params),
        };
        let mut times = vec![0u64; blocks as usize];
        // SAFETY: the pinned memory holds the times and is used by one copy; allocations are as large; the parameters
        // are as the probe wants them (`read` and the others).
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

    /// Bytes a second that loaders on `blocks` SMs bring from memory into shared memory by copies of `tile_bytes`,
    /// `n_tiles` under way at once on each. By the slowest block's time, which is shorter than the launch's.
    ///
    /// # Errors
    /// The driver.
    ///
    /// # Panics
    /// If the tiles do not fit an SM, or the memory to read is less than a tile for every SM.
    pub fn read(&mut self, blocks: u32, tile_bytes: u32, n_tiles: u32) -> Result<f64, GpuError> {
        let params = ProbeParams { tile_bytes, n_tiles, rounds: 1, ..ProbeParams::default() };
        self.read_of(READ, self.source_bytes, blocks, params)
    }

    /// Likewise from L2: a quarter of what it holds, since its halves may each hold what both want, or a tile for every
    /// SM where that is more; `rounds` times.
    ///
    /// # Errors
    /// The driver.
    ///
    /// # Panics
    /// As [`read`](Prober::read).
    pub fn read_l2(&mut self, rounds: u32, blocks: u32, tile_bytes: u32, n_tiles: u32) -> Result<f64, GpuError> {
        let params = ProbeParams { tile_bytes, n_tiles, rounds, ..ProbeParams::default() };
        self.read_of(READ, self.quarter_of_l2(blocks, tile_bytes), blocks, params)
    }

    /// Likewise, by copies of sixteen bytes a thread of `warps` warps, as bodies for many rows copy, [`UNDER_WAY`]
    /// tiles of `tile_bytes` at once.
    ///
    /// # Errors
    /// The driver.
    ///
    /// # Panics
    /// As [`read`](Prober::read), or if a tile is no multiple of sixteen bytes for each thread.
    pub fn copy_l2(&mut self, rounds: u32, blocks: u32, tile_bytes: u32, warps: u32) -> Result<f64, GpuError> {
        assert!(
            (1..=TASK_THREADS / 32).contains(&warps) && tile_bytes.is_multiple_of(16 * 32 * warps),
            "a tile's threads"
        );
        let bytes = self.quarter_of_l2(blocks, tile_bytes);
        let params = ProbeParams { tile_bytes, n_tiles: UNDER_WAY + 1, rounds, warps, ..ProbeParams::default() };
        self.read_of(COPY, bytes, blocks, params)
    }

    /// How long a tile of `tile_bytes`, [`TILE_STEP`](Prober::TILE_STEP) or a multiple, keeps workers on `blocks` SMs
    /// whose loaders hand them `tiles` or more: `n_tiles` at most at once, brought `from` L2 or memory or only said to
    /// be there, and read by those who take them or not.
    ///
    /// # Errors
    /// The driver, or what has been read is not what has been brought.
    ///
    /// # Panics
    /// As [`read`](Prober::read), or if the tile is no such multiple, or there are fewer tiles than at once.
    pub fn take(
        &mut self,
        blocks: u32,
        (tile_bytes, n_tiles): (u32, u32),
        tiles: u32,
        from: TilesFrom,
        reads: bool,
    ) -> Result<Duration, GpuError> {
        assert!(tile_bytes.is_multiple_of(TAKEN_BYTES) && tiles > n_tiles, "tiles that can be taken");
        let all = if from == TilesFrom::Memory { self.source_bytes } else { self.quarter_of_l2(blocks, tile_bytes) };
        let of_block = (all / u64::from(blocks) / u64::from(tile_bytes)).min(u64::from(tiles)) as u32;
        let rounds = tiles.div_ceil(of_block.max(1));
        let is_brought = u32::from(from != TilesFrom::Nowhere);
        let params =
            ProbeParams { tile_bytes, n_tiles, rounds, is_brought, reads: reads.into(), ..ProbeParams::default() };
        let bytes = u64::from(blocks) * u64::from(of_block) * u64::from(tile_bytes);
        {
            let _entered = self.gpu.enter()?;
            // As the probe wants them, whatever others have left there.
            // SAFETY: no more than the allocation has, which nobody else uses.
            unsafe { self.gpu.driver().set(self.memory[2], 1, bytes, self.stream)? };
        }
        let (_, slowest) = self.slowest_of(TAKE, bytes, blocks, params)?;
        Ok(slowest / (of_block * rounds - n_tiles))
    }

    fn quarter_of_l2(&self, blocks: u32, tile_bytes: u32) -> u64 {
        let quarter = u64::from(self.gpu.info().l2_bytes) / 4;
        quarter.max(u64::from(blocks) * u64::from(tile_bytes)).min(self.source_bytes)
    }

    /// The rate at which `probe` reads `bytes`, whole tiles of them for each of `blocks` blocks.
    fn read_of(&mut self, probe: &str, bytes: u64, blocks: u32, params: ProbeParams) -> Result<f64, GpuError> {
        let (bytes, slowest) = self.slowest_of(probe, bytes, blocks, params)?;
        Ok((bytes * u64::from(blocks) * u64::from(params.rounds)) as f64 / slowest.as_secs_f64().max(1e-9))
    }

    /// How many of `bytes` each of `blocks` blocks has in `probe`, whole tiles, and how long the slowest takes.
    fn slowest_of(
        &mut self,
        probe: &str,
        bytes: u64,
        blocks: u32,
        params: ProbeParams,
    ) -> Result<(u64, Duration), GpuError> {
        let ProbeParams { tile_bytes, n_tiles, .. } = params;
        assert!(tile_bytes.is_multiple_of(16) && n_tiles <= TILE_BARRIERS && tile_bytes * n_tiles <= TILE_BYTES);
        let bytes = bytes / u64::from(blocks) / u64::from(tile_bytes) * u64::from(tile_bytes);
        assert!(bytes > 0, "less than a tile for every SM");
        let times = self.run(probe, blocks, ProbeParams { bytes, ..params })?;
        Ok((bytes, times.into_iter().max().unwrap_or_default()))
    }

    /// From one worker's trigger to another's seeing it.
    ///
    /// # Errors
    /// The driver.
    pub fn hop(&mut self, rounds: u32) -> Result<Duration, GpuError> {
        let times = self.run(HOP, 2, ProbeParams { rounds, ..ProbeParams::default() })?;
        Ok(times[0] / (2 * rounds))
    }

    /// From one worker's beginning to store a row of some 900 numbers to another's having all of it, and its threads
    /// having met: behind a counter, as events are; or `by_flags`, as rows of a pass are, of `blocks` workers all of
    /// which ask for it.
    ///
    /// # Errors
    /// The driver.
    ///
    /// # Panics
    /// If the memory to read is less than two such rows.
    pub fn hand(&mut self, blocks: u32, rounds: u32, by_flags: bool) -> Result<Duration, GpuError> {
        assert!(self.source_bytes >= 2 * ROW_BYTES, "room for two rows");
        let times =
            self.run(HAND, blocks.max(2), ProbeParams { rounds, by_flags: by_flags.into(), ..ProbeParams::default() })?;
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

    /// Tiles of [`take`](Prober::take) are multiples of so many bytes.
    pub const TILE_STEP: u32 = TAKEN_BYTES;

    /// KiB of code that [`code`](Prober::code) can run, from the fewest to the most.
    pub const CODE_KIB: std::ops::RangeInclusive<u32> = code_probe::STEP_KIB..=code_probe::MOST_KIB;

    /// How long `blocks` SMs take to run `kib` KiB of straight code, a multiple of the fewest, `rounds` times.
    ///
    /// # Errors
    /// The driver, which compiles it.
    ///
    /// # Panics
    /// If it is no such multiple, or more than the most.
    pub fn code(&mut self, blocks: u32, kib: u32, rounds: u32) -> Result<Duration, GpuError> {
        assert!(Self::CODE_KIB.contains(&kib) && kib.is_multiple_of(code_probe::STEP_KIB), "{kib} KiB of code");
        let module = match self.code {
            Some(module) => module,
            None => {
                let _entered = self.gpu.enter()?;
                let (module, _) = self.gpu.driver().load_module(&[code_probe::ptx().as_bytes(), &[0]].concat())?;
                *self.code.insert(module)
            }
        };
        let params = ProbeParams { n_tiles: kib / code_probe::STEP_KIB, rounds, ..ProbeParams::default() };
        let times = self.run_of(module, (code_probe::ENTRY, code_probe::THREADS), blocks, params)?;
        Ok(times.iter().max().copied().unwrap_or_default())
    }

    /// Bytes a second that the bus brings from pinned memory to the device when nothing else is done: at least `bytes`,
    /// in large copies on several streams.
    ///
    /// # Errors
    /// The driver.
    pub fn bus(&mut self, bytes: u64) -> Result<f64, GpuError> {
        let copy_bytes = BUS_COPY_BYTES.min(self.source_bytes);
        let _entered = self.gpu.enter()?;
        let driver = self.gpu.driver();
        let buffers = Buffers::new(&self.gpu, BUS_STREAMS, 1, copy_bytes as usize)?;
        let n_copies = bytes.div_ceil(copy_bytes);
        let n_places = self.source_bytes / copy_bytes;
        let began = Instant::now();
        for copy in 0..n_copies {
            let number = copy as usize % BUS_STREAMS;
            let (buffer, stream) = (buffers.buffer(number, 0), buffers.streams[number]);
            let to = self.memory[2].offset(copy % n_places * copy_bytes);
            // SAFETY: the buffer has as many bytes and nobody writes it; so has the place, of which nobody wants what
            // it holds.
            unsafe { driver.copy_in(to, buffer, copy_bytes as usize, stream)? };
        }
        buffers.synchronize()?;
        Ok((n_copies * copy_bytes) as f64 / began.elapsed().as_secs_f64().max(1e-9))
    }

    /// How long it takes to make, and to give back, what a host of `cores` cores [uploads](Prober::upload) through,
    /// however much that is.
    ///
    /// # Errors
    /// The driver.
    pub fn upload_buffers(&self, cores: usize) -> Result<Duration, GpuError> {
        let _entered = self.gpu.enter()?;
        let began = Instant::now();
        drop(upload::buffers(&self.gpu, upload_threads(cores), BUFFER_BYTES)?);
        Ok(began.elapsed())
    }

    /// How long `pieces` take to come to the device, one after the other, as weights do when an engine is made on a
    /// host of `cores` cores.
    ///
    /// # Errors
    /// The driver.
    ///
    /// # Panics
    /// If they are more than the memory to read.
    pub fn upload(&mut self, pieces: &[&[u8]], cores: usize) -> Result<Duration, GpuError> {
        let mut at = 0;
        let place = |bytes: &&'_ [u8]| {
            let to = self.memory[2].offset(at);
            at += bytes.len() as u64;
            to
        };
        let places: Vec<DevicePtr> = pieces.iter().map(place).collect();
        assert!(at <= self.source_bytes, "{at} bytes, there is room for {}", self.source_bytes);
        let pieces: Vec<Piece<'_>> = places.into_iter().zip(pieces).map(|(to, &bytes)| Piece { to, bytes }).collect();
        let began = Instant::now();
        // SAFETY: each has room of its own in the allocation, which no launch uses.
        unsafe { upload(&self.gpu, &pieces, cores, |_| ())? };
        Ok(began.elapsed())
    }
}

impl Drop for Prober {
    fn drop(&mut self) {
        let Ok(_entered) = self.gpu.enter() else { return };
        let driver = self.gpu.driver();
        // Nobody is left to hear of errors.
        let _ = driver.synchronize(self.stream);
        let _ = driver.destroy_stream(self.stream);
        for module in self.code.take().into_iter().chain([self.module]) {
            let _ = driver.unload_module(module);
        }
        // SAFETY: allocated in `new`; the stream that used them is idle.
        unsafe {
            for memory in self.memory.drain(..) {
                let _ = driver.free(memory);
            }
            let _ = driver.free_pinned(self.pinned);
        }
    }
}
