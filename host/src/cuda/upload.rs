//! From the mapped file to the device: several threads copy pieces into pinned memory, from which the device fetches
//! them while the next are copied. Memory of the host stays bounded, whatever the size of the model.
//!
//! The floor is the slower of the disk and the bus. One thread reads a mapped file slower than either; so there are
//! several, each with a stream and two buffers: while one is under way the other is filled. Their memory is one
//! allocation, since pinning takes the driver time for every call and every page. And the system is told what is going
//! to be read ([`ask_for`]), as else it reads little more from the disk than a thread waits for.

use super::Gpu;
use super::driver::{CudaError, DevicePtr, Pinned, Stream};
use crate::parallel::spawned;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

/// Bytes to bring to the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece<'a> {
    /// Where to.
    pub(crate) to: DevicePtr,
    /// What.
    pub(crate) bytes: &'a [u8],
}

/// A buffer's bytes. Large enough that a copy's start costs little beside it (a bus of 55 GB/s takes 19 us for it), and
/// no larger: pinning takes the driver time for every page, and what a core has just written is best still in its cache
/// when the device reads it.
///
/// PERF: an H200's host, whose threads had two of 2 MiB each, allocated one by one, brought 2.47 GB in 99 ms, where the
/// bus takes 46 (2026-11-27). Two threads fill buffers of 8 MiB from the page cache at 4.8 to 5.9 GB/s of a core's
/// time, and of 2 MiB at 6.4 to 7.3 (Xeon, Emerald Rapids, 2 cores of it, Linux 6.18, 2026-11-22), of 1 MiB as fast
/// (2026-11-27). As much as `read` into them, 6.5 to 7.6, and as with pages entered into the page table ahead
/// (`MADV_POPULATE_READ`), 7.0 to 7.4: faults are a small part of the time.
pub(super) const BUFFER_BYTES: usize = 1 << 20;

/// Buffers of a thread.
const BUFFERS: usize = 2;

/// How many threads bring bytes to a device, on a host of which the process has `cores` cores: one for each, but no
/// fewer than 4, which wait for the disk for most of their time where it is slow, and no more than 12.
///
/// PERF: a core fills buffers from the page cache at 6.5 GB/s (as above; two at 13), so 9 of them do for the 55 GB/s of
/// 16 lanes of PCIe 5, and 12 where they take memory's bandwidth from each other. That is 24 MiB of pinned memory at
/// most.
pub fn upload_threads(cores: usize) -> usize {
    cores.clamp(4, 12)
}

/// Copies all `pieces` with the threads of a host of `cores` cores; `progress` is called with the bytes of each part
/// that has been handed over.
///
/// # Errors
/// The first call that failed; then some pieces are not there.
///
/// # Safety
/// On the device there is room for every piece where it is to go, and nobody uses it meanwhile.
pub(crate) unsafe fn upload(
    gpu: &Gpu,
    pieces: &[Piece<'_>],
    cores: usize,
    mut progress: impl FnMut(u64),
) -> Result<(), CudaError> {
    let parts: Vec<Piece<'_>> = pieces
        .iter()
        .flat_map(|piece| {
            let chunks = piece.bytes.chunks(BUFFER_BYTES).enumerate();
            chunks.map(|(i, bytes)| Piece { to: piece.to.offset((i * BUFFER_BYTES) as u64), bytes })
        })
        .collect();
    let largest = parts.iter().map(|part| part.bytes.len()).max().unwrap_or(0);
    let n_threads = upload_threads(cores).min(parts.len());
    if n_threads == 0 {
        return Ok(());
    }
    let _entered = gpu.enter()?;
    let buffers = buffers(gpu, n_threads, largest)?;
    let next = AtomicUsize::new(0);
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|scope| {
        for number in 0..n_threads {
            let (parts, next, sender, buffers) = (&parts, &next, sender.clone(), &buffers);
            spawned(scope, move || {
                let outcome = worker(parts, next, buffers, number, &sender);
                if let Err(error) = outcome {
                    // The others stop at their next part; the receiver is there as long as any sender.
                    next.store(parts.len(), Ordering::Relaxed);
                    let _ = sender.send(Err(error));
                }
            });
        }
        drop(sender);
        let mut outcome = Ok(());
        for message in receiver {
            match message {
                Ok(bytes) => progress(bytes),
                Err(error) if outcome.is_ok() => outcome = Err(error),
                Err(_) => {}
            }
        }
        outcome
    })
}

/// What so many threads upload through, of `bytes` each buffer. As for [`Buffers::new`].
pub(super) fn buffers(gpu: &Gpu, n_threads: usize, bytes: usize) -> Result<Buffers<'_>, CudaError> {
    Buffers::new(gpu, n_threads, BUFFERS, bytes)
}

/// Streams with pinned buffers, as many each, given back when dropped.
pub(super) struct Buffers<'a> {
    gpu: &'a Gpu,
    pub(super) streams: Vec<Stream>,
    memory: Pinned,
    /// Buffers of a stream, and bytes of one.
    each: usize,
    bytes: usize,
}

impl<'a> Buffers<'a> {
    /// `each` of `bytes` for every one of `n_streams`. `gpu`'s context is current, and when they are dropped.
    pub(super) fn new(gpu: &'a Gpu, n_streams: usize, each: usize, bytes: usize) -> Result<Buffers<'a>, CudaError> {
        let driver = gpu.driver();
        let memory = driver.alloc_pinned(n_streams * each * bytes)?;
        let mut buffers = Buffers { gpu, streams: Vec::with_capacity(n_streams), memory, each, bytes };
        for _ in 0..n_streams {
            buffers.streams.push(driver.create_stream()?);
        }
        Ok(buffers)
    }

    /// Buffer `which` of stream `stream`.
    pub(super) fn buffer(&self, stream: usize, which: usize) -> *mut u8 {
        assert!(stream < self.streams.len() && which < self.each, "buffer {which} of stream {stream}");
        self.memory.host.wrapping_add((stream * self.each + which) * self.bytes)
    }

    /// Waits until no copy is under way.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        self.streams.iter().try_for_each(|stream| self.gpu.driver().synchronize(*stream))
    }
}

impl Drop for Buffers<'_> {
    fn drop(&mut self) {
        let driver = self.gpu.driver();
        // On the way out of an error there is nobody to hear of another. The streams are idle before the memory goes.
        for stream in self.streams.drain(..) {
            let _ = driver.synchronize(stream);
            let _ = driver.destroy_stream(stream);
        }
        // SAFETY: allocated in `new`, and no copy is under way.
        let _ = unsafe { driver.free_pinned(self.memory) };
    }
}

/// Brings parts, whichever are next, by stream `number`.
fn worker(
    parts: &[Piece<'_>],
    next: &AtomicUsize,
    buffers: &Buffers<'_>,
    number: usize,
    sender: &mpsc::Sender<Result<u64, CudaError>>,
) -> Result<(), CudaError> {
    let _entered = buffers.gpu.enter()?;
    let (driver, stream) = (buffers.gpu.driver(), buffers.streams[number]);
    for turn in 0.. {
        let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
        ask_for(part.bytes);
        let buffer = buffers.buffer(number, turn % BUFFERS);
        // SAFETY: the buffer has room for the largest part and is this thread's. Its last copy was the one before the
        // stream's last, and when that began the stream was idle, so nobody reads it. The part has room on the device
        // (the promise of `upload`'s caller).
        unsafe {
            buffer.copy_from_nonoverlapping(part.bytes.as_ptr(), part.bytes.len());
            driver.synchronize(stream)?;
            driver.copy_in(part.to, buffer, part.bytes.len(), stream)?;
        }
        // The receiver outlives the threads.
        let _ = sender.send(Ok(part.bytes.len() as u64));
    }
    driver.synchronize(stream)
}

const _: () = assert!(BUFFERS == 2, "a buffer's last copy was the one before the stream's last");

/// Asks the disk for all of `bytes` at once, where they are a mapped file's and not in memory: whoever reads them then
/// waits for the first only. It is advice: where the system does not take it, it reads ahead as it does for everybody.
/// Of other memory it does no more than reading would.
///
/// PERF: with the usual read-ahead of 128 KiB, four threads and a disk that `read` gets 1.4 GB/s from: 1.4 GB/s,
/// without it 1.0. What is in the page cache it slows by up to 5 % (6.9 GB/s of a core's time instead of 7.3), and by 7
/// to 19 % where a copy is quickest, from large pages (7.3 to 7.9 instead of 8.5 to 9.1): a core more makes up for
/// that, nothing for a disk that waits.
fn ask_for(bytes: &[u8]) {
    #[cfg(target_os = "linux")]
    {
        /// The system takes no more of one piece of advice than it reads ahead, which is seldom less.
        const ASKED_BYTES: usize = 128 << 10;
        let page = page_bytes();
        // Advice is of whole pages; what else lies in those at the ends is read as well.
        let before = bytes.as_ptr().addr() % page;
        let end = if bytes.is_empty() { 0 } else { before + bytes.len() };
        for from in (0..end).step_by(ASKED_BYTES) {
            let at = bytes.as_ptr().wrapping_sub(before).wrapping_add(from);
            // SAFETY: this advice changes no byte and takes none away, whatever memory it is of: it reads pages of a
            // file, or such as have been swapped out. They are those of `bytes`.
            let _ = unsafe { libc::madvise(at.cast_mut().cast(), ASKED_BYTES.min(end - from), libc::MADV_WILLNEED) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = bytes;
}

/// Bytes of a page of memory.
#[cfg(target_os = "linux")]
fn page_bytes() -> usize {
    // SAFETY: it reads a constant of the system.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::fake::{Fake, Options};
    use std::sync::Arc;

    /// Brings `parts` to a device of a fake driver, with the threads of `cores` cores: the calls it took.
    fn brought(parts: &[Vec<u8>], cores: usize) -> Vec<String> {
        let driver = Arc::new(Fake::new(Options::new(1, 256 << 20)));
        let gpu = Gpu::with_driver(driver.clone()).expect("a device of the right kind");
        let total: usize = parts.iter().map(Vec::len).sum();
        let entered = gpu.enter().expect("a context");
        let base = gpu.driver().alloc(total.max(1) as u64).expect("room");
        let mut at = 0;
        let pieces = parts.iter().map(|bytes| {
            at += bytes.len() as u64;
            Piece { to: base.offset(at - bytes.len() as u64), bytes }
        });
        let pieces: Vec<Piece<'_>> = pieces.collect();
        let mut handed = 0;
        let began = driver.calls().len();
        // SAFETY: the allocation has room for all of them, one after the other.
        unsafe { upload(&gpu, &pieces, cores, |bytes| handed += bytes) }.expect("uploaded");
        let calls = driver.calls().split_off(began);
        assert_eq!(handed, total as u64);
        // The fake's device memory is the host's.
        // SAFETY: live, as long, and idle.
        let found =
            unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(base.0 as usize), total) };
        assert!(found == parts.concat());
        // SAFETY: allocated above, used by nobody.
        unsafe { gpu.driver().free(base) }.expect("freed");
        drop(entered);
        drop(gpu);
        assert_eq!(driver.leaks(), Vec::<String>::new());
        calls
    }

    #[test]
    fn every_byte_arrives_where_it_should() {
        let bytes = |n: usize, seed: usize| -> Vec<u8> { (0..n).map(|i| (i * 31 + (i >> 8) + seed) as u8).collect() };
        // More than the buffers hold at once, and sizes that end anywhere.
        let parts = [bytes(26 * BUFFER_BYTES + 17, 1), bytes(1, 2), Vec::new(), bytes(BUFFER_BYTES, 3), bytes(4099, 4)];
        for (cores, n_threads) in [(1, 4), (7, 7), (64, 12)] {
            let calls = brought(&parts, cores);
            let of = |name: &str| calls.iter().filter(|call| call.starts_with(name)).count();
            assert_eq!(upload_threads(cores), n_threads);
            assert_eq!(of("cuStreamCreate"), n_threads);
            assert_eq!([of("cuMemHostAlloc"), of(&format!("cuMemHostAlloc {}", 2 * n_threads * BUFFER_BYTES))], [1, 1]);
        }
    }

    /// A small checkpoint wants neither threads nor pinned memory for a large one.
    #[test]
    fn what_is_small_takes_little() {
        let calls = brought(&[vec![7; 1000], vec![8; 10]], 64);
        let of = |name: &str| calls.iter().filter(|call| call.starts_with(name)).count();
        assert_eq!([of("cuStreamCreate"), of("cuMemHostAlloc"), of("cuMemHostAlloc 4000")], [2, 1, 1]);
        assert!(brought(&[], 64).is_empty() && brought(&[Vec::new()], 64).is_empty());
    }

    /// What is asked for comes into memory from the disk, all of it, and nobody has to read it for that.
    #[cfg(target_os = "linux")]
    #[test]
    fn what_is_asked_for_comes() {
        use std::io::Write;
        use std::os::fd::AsRawFd;
        use std::time::{Duration, Instant};
        let n: usize = 8 << 20;
        let bytes: Vec<u8> = (0..n).map(|i| (i % 251) as u8).collect();
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(&bytes).expect("written");
        file.sync_all().expect("written to the disk");
        // SAFETY: the descriptor is open.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        // SAFETY: nobody else has the file.
        let map = unsafe { memmap2::Mmap::map(&file) }.expect("mapped");
        let page = page_bytes();
        // Which pages are in memory, of the whole file.
        let there = || -> Vec<bool> {
            let mut pages = vec![0; n.div_ceil(page)];
            // SAFETY: the mapping, and a byte for each of its pages.
            assert_eq!(unsafe { libc::mincore(map.as_ptr().cast_mut().cast(), n, pages.as_mut_ptr()) }, 0);
            pages.into_iter().map(|page| page & 1 == 1).collect()
        };
        if there().contains(&true) {
            println!("skipped: temporary files lie in memory here");
            return;
        }
        // Neither end is a page's.
        let (first, end) = (n / 4 + 100, n / 2 + 777);
        ask_for(&map[first..end]);
        let began = Instant::now();
        while there()[first / page..end.div_ceil(page)].contains(&false) {
            assert!(began.elapsed() < Duration::from_secs(20), "it does not come");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(map[..] == bytes[..]);
        // Memory that is no file's, and none at all.
        ask_for(&bytes[3..n - 3]);
        ask_for(&[]);
        assert!(bytes.iter().enumerate().all(|(i, byte)| *byte == (i % 251) as u8));
    }
}
