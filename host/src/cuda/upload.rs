//! From the mapped file to the device: several threads copy pieces into pinned memory, from which the device fetches them
//! while the next are copied. Memory of the host stays bounded, whatever the size of the model.
//!
//! The floor is the slower of the disk and the bus. One thread reads a mapped file at a few GB/s, less than either; so
//! there are several, each with two buffers and a stream for each: while one is under way the other is filled.

use super::Gpu;
use super::driver::{CudaError, DevicePtr, Pinned, Stream};
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

const THREADS: usize = 4;
/// A buffer's bytes: 8 of these are pinned. Large enough that a copy's start costs nothing.
const BUFFER_BYTES: usize = 8 << 20;

/// Copies all `pieces`; `progress` is called with the bytes of each part that has been handed over.
///
/// # Errors
/// The first call that failed; then some pieces are not there.
///
/// # Safety
/// On the device there is room for every piece where it is to go, and nobody uses it meanwhile.
pub(crate) unsafe fn upload(gpu: &Gpu, pieces: &[Piece<'_>], mut progress: impl FnMut(u64)) -> Result<(), CudaError> {
    let parts: Vec<Piece<'_>> = pieces
        .iter()
        .flat_map(|piece| {
            let chunks = piece.bytes.chunks(BUFFER_BYTES).enumerate();
            chunks.map(|(i, bytes)| Piece { to: piece.to.offset((i * BUFFER_BYTES) as u64), bytes })
        })
        .collect();
    let next = AtomicUsize::new(0);
    let (sender, receiver) = mpsc::channel();
    let largest = parts.iter().map(|part| part.bytes.len()).max().unwrap_or(0);
    std::thread::scope(|scope| {
        for _ in 0..THREADS.min(parts.len()) {
            let (parts, next, sender) = (&parts, &next, sender.clone());
            scope.spawn(move || {
                let outcome = worker(gpu, parts, next, largest, &sender);
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

/// Two pinned buffers with a stream each, given back when dropped.
struct Buffers<'a> {
    gpu: &'a Gpu,
    made: Vec<(Pinned, Stream)>,
}

impl Drop for Buffers<'_> {
    fn drop(&mut self) {
        let driver = self.gpu.driver();
        for (buffer, stream) in self.made.drain(..) {
            // On the way out of an error there is nobody to hear of another. The stream is idle before its buffer goes.
            let _ = driver.synchronize(stream);
            let _ = driver.destroy_stream(stream);
            // SAFETY: allocated in `worker`, and no copy is under way.
            let _ = unsafe { driver.free_pinned(buffer) };
        }
    }
}

fn worker(
    gpu: &Gpu,
    parts: &[Piece<'_>],
    next: &AtomicUsize,
    buffer_bytes: usize,
    sender: &mpsc::Sender<Result<u64, CudaError>>,
) -> Result<(), CudaError> {
    let _entered = gpu.enter()?;
    let driver = gpu.driver();
    let mut buffers = Buffers { gpu, made: Vec::new() };
    for turn in 0.. {
        let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
        if buffers.made.len() < 2 {
            let stream = driver.create_stream()?;
            match driver.alloc_pinned(buffer_bytes) {
                Ok(buffer) => buffers.made.push((buffer, stream)),
                Err(error) => {
                    // The allocation's error is the one to tell.
                    let _ = driver.destroy_stream(stream);
                    return Err(error);
                }
            }
        }
        let (buffer, stream) = buffers.made[turn % buffers.made.len()];
        // The buffer's last copy may still be under way.
        driver.synchronize(stream)?;
        // SAFETY: the buffer has room for the largest part and is this thread's; the stream is idle, so nobody reads it;
        // the part has room on the device (the promise of `upload`'s caller).
        unsafe {
            buffer.host.copy_from_nonoverlapping(part.bytes.as_ptr(), part.bytes.len());
            driver.copy_in(part.to, buffer.host, part.bytes.len(), stream)?;
        }
        // The receiver outlives the threads.
        let _ = sender.send(Ok(part.bytes.len() as u64));
    }
    for (_, stream) in &buffers.made {
        driver.synchronize(*stream)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::fake::{Fake, Options};
    use std::sync::Arc;

    #[test]
    fn every_byte_arrives_where_it_should() {
        let driver = Arc::new(Fake::new(Options::new(1, 64 << 20)));
        let gpu = Gpu::with_driver(driver.clone()).expect("a device of the right kind");
        let bytes = |n: usize, seed: usize| -> Vec<u8> { (0..n).map(|i| (i * 31 + (i >> 8) + seed) as u8).collect() };
        // More than the buffers hold at once, and sizes that end anywhere.
        let parts = [bytes(3 * BUFFER_BYTES + 17, 1), bytes(1, 2), Vec::new(), bytes(BUFFER_BYTES, 3), bytes(4099, 4)];
        let total: usize = parts.iter().map(Vec::len).sum();
        let entered = gpu.enter().expect("a context");
        let base = gpu.driver().alloc(total as u64).expect("room");
        let mut at = 0;
        let pieces = parts.iter().map(|bytes| {
            at += bytes.len() as u64;
            Piece { to: base.offset(at - bytes.len() as u64), bytes }
        });
        let pieces: Vec<Piece<'_>> = pieces.collect();
        let mut handed = 0;
        // SAFETY: the allocation has room for all of them, one after the other.
        unsafe { upload(&gpu, &pieces, |bytes| handed += bytes) }.expect("uploaded");
        assert_eq!(handed, total as u64);
        // The fake's device memory is the host's.
        // SAFETY: live, as long, and idle.
        let found =
            unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(base.0 as usize), total) };
        assert!(found == parts.concat());
        let calls = driver.calls();
        assert!(calls.iter().filter(|call| call.starts_with("cuMemHostAlloc")).count() <= 2 * THREADS);
        // SAFETY: allocated above, used by nobody.
        unsafe { gpu.driver().free(base) }.expect("freed");
        drop(entered);
        drop(gpu);
        assert_eq!(driver.leaks(), Vec::<String>::new());
    }
}
