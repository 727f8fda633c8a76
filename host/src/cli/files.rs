//! How fast files can be read: from memory, where the system keeps what has been read or written, and from the disk.

use std::fs::File;
use std::io::{Read, Result, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// What a thread reads at once, into memory it has read into before.
const PART_BYTES: u64 = 2 << 20;

/// Reads `files` from the first byte on with `n_threads` threads, each part by whoever comes first; after `most` no
/// more parts are begun. How many bytes it read, and how long that took.
pub(super) fn read_through(files: &[PathBuf], n_threads: usize, most: Duration) -> Result<(u64, Duration)> {
    let mut parts = Vec::new();
    for path in files {
        let len = std::fs::metadata(path)?.len();
        parts.extend((0..len).step_by(PART_BYTES as usize).map(|at| (path, at, PART_BYTES.min(len - at))));
    }
    let (next, read, error) = (AtomicUsize::new(0), AtomicU64::new(0), Mutex::new(None));
    let began = Instant::now();
    let thread = || -> Result<()> {
        let mut buffer = vec![0; PART_BYTES as usize];
        // A thread's own: from what is read of an open file the system guesses what will be.
        let mut open: Option<(&Path, File)> = None;
        while began.elapsed() < most {
            let Some(&(path, at, n)) = parts.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
            let file = match &mut open {
                Some((of, file)) if *of == path => file,
                _ => &mut open.insert((path, File::open(path)?)).1,
            };
            file.seek(SeekFrom::Start(at))?;
            file.read_exact(&mut buffer[..n as usize])?;
            read.fetch_add(n, Ordering::Relaxed);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        for _ in 0..n_threads {
            scope.spawn(|| {
                if let Err(failed) = thread() {
                    error.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).get_or_insert(failed);
                }
            });
        }
    });
    let took = began.elapsed();
    match error.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
        Some(failed) => Err(failed),
        None => Ok((read.into_inner(), took)),
    }
}

/// Has the system take `files` out of memory, so that they are read from the disk the next time. It keeps what somebody
/// has mapped and read, and everything on a file system that lies in memory: see [`in_memory`].
pub(super) fn forget(files: &[PathBuf]) -> Result<()> {
    #[cfg(target_os = "linux")]
    for path in files {
        use std::os::fd::AsRawFd;
        let file = File::open(path)?;
        // Only what is on the disk can be dropped.
        file.sync_all()?;
        // SAFETY: the descriptor is open, and the call changes no byte of the file. Whether it did what it should is
        // seen later.
        let _ = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = files;
    Ok(())
}

/// Which part of `files` the system has in memory, from 0 to 1; None where it cannot be asked.
pub(super) fn in_memory(files: &[PathBuf]) -> Result<Option<f64>> {
    #[cfg(target_os = "linux")]
    {
        let (mut n_there, mut n_pages) = (0, 0);
        for path in files {
            let pages = pages_in_memory(&File::open(path)?)?;
            n_there += pages.iter().filter(|page| **page & 1 == 1).count();
            n_pages += pages.len();
        }
        Ok(Some(n_there as f64 / n_pages.max(1) as f64))
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = files;
        Ok(None)
    }
}

/// A byte for each of `file`'s pages; its lowest bit says whether the system has it in memory.
#[cfg(target_os = "linux")]
fn pages_in_memory(file: &File) -> Result<Vec<u8>> {
    if file.metadata()?.len() == 0 {
        return Ok(Vec::new());
    }
    // SAFETY: not one byte of the mapping is looked at.
    let map = unsafe { memmap2::Mmap::map(file)? };
    // SAFETY: it reads a constant of the system.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
    let mut pages = vec![0; map.len().div_ceil(page)];
    // SAFETY: the range is the mapping, and there is a byte for each of its pages.
    match unsafe { libc::mincore(map.as_ptr().cast_mut().cast(), map.len(), pages.as_mut_ptr()) } {
        0 => Ok(pages),
        _ => Err(std::io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(sizes: &[usize]) -> (tempfile::TempDir, Vec<PathBuf>) {
        let dir = tempfile::tempdir().expect("a folder");
        let paths = sizes.iter().enumerate().map(|(i, n)| {
            let path = dir.path().join(i.to_string());
            std::fs::write(&path, vec![1; *n]).expect("written");
            path
        });
        let paths = paths.collect();
        (dir, paths)
    }

    #[test]
    fn every_byte_is_read_once() {
        let (_dir, paths) = files(&[5 << 20, 0, 17]);
        for n_threads in [1, 3] {
            let (bytes, took) = read_through(&paths, n_threads, Duration::from_secs(60)).expect("read");
            assert_eq!(bytes, (5 << 20) + 17);
            assert!(took > Duration::ZERO);
        }
        assert_eq!(read_through(&paths, 2, Duration::ZERO).expect("read").0, 0, "the time is over");
        let absent = [paths[0].with_file_name("absent")];
        assert!(read_through(&absent, 2, Duration::from_secs(60)).is_err());
    }

    /// What has been forgotten is not in memory until it is read; on a file system that lies in memory nothing is
    /// forgotten.
    #[cfg(target_os = "linux")]
    #[test]
    fn what_is_forgotten_is_read_again() {
        let (_dir, paths) = files(&[1 << 20, 0]);
        let there = || in_memory(&paths).expect("asked").expect("Linux says");
        assert_eq!(there(), 1.0, "just written");
        forget(&paths).expect("it is there");
        let kept = there();
        if kept == 1.0 {
            println!("skipped: temporary files lie in memory here");
            return;
        }
        assert_eq!(kept, 0.0);
        assert_eq!(std::fs::read(&paths[0]).expect("read"), vec![1; 1 << 20]);
        assert_eq!(there(), 1.0, "just read");
        assert!(forget(&[paths[0].with_file_name("absent")]).is_err());
    }
}
