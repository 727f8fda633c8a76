//! Global memory: what the launch was given, checked at every access.

use std::cell::Cell;

/// The memory that a launch may touch.
#[derive(Debug, Default)]
pub struct Memory {
    /// By address.
    ranges: Vec<Range>,
    /// The range found last.
    last: Cell<usize>,
}

#[derive(Debug)]
struct Range {
    name: String,
    at: u64,
    bytes: u64,
    host: *mut u8,
    is_constant: bool,
}

impl Memory {
    /// Adds `bytes` bytes that the kernel finds at address `at` and that lie at `host`.
    ///
    /// # Safety
    /// They are there as long as this is, for writing too unless `is_constant`, and nobody else touches them meanwhile.
    ///
    /// # Panics
    /// They overlap others.
    pub unsafe fn add(&mut self, name: impl Into<String>, at: u64, host: *mut u8, bytes: u64, is_constant: bool) {
        let after = self.ranges.partition_point(|range| range.at < at);
        let is_free = self.ranges[..after].last().is_none_or(|range| range.at + range.bytes <= at)
            && self.ranges.get(after).is_none_or(|range| at + bytes <= range.at);
        assert!(is_free, "{bytes} bytes at {at:#x} overlap others");
        self.ranges.insert(after, Range { name: name.into(), at, bytes, host, is_constant });
    }

    /// Where the `bytes` bytes at `at` lie.
    fn find(&self, at: u64, bytes: u64, is_write: bool) -> Result<*mut u8, String> {
        let holds = |range: &Range| range.at <= at && at - range.at + bytes <= range.bytes;
        let range = match self.ranges.get(self.last.get()) {
            Some(range) if holds(range) => range,
            _ => {
                let before = self.ranges.partition_point(|range| range.at <= at).checked_sub(1);
                let nearest = before.map(|before| &self.ranges[before]);
                let Some(range) = nearest.filter(|range| holds(range)) else {
                    let nearest = nearest.map_or(String::new(), |range| {
                        format!(", {} bytes into {}, which has {}", at - range.at, range.name, range.bytes)
                    });
                    return Err(format!("{bytes} bytes at {at:#x} are in no allocation{nearest}"));
                };
                self.last.set(before.expect("there is one"));
                range
            }
        };
        if is_write && range.is_constant {
            return Err(format!("writes {}, which is constant, at byte {}", range.name, at - range.at));
        }
        Ok(range.host.wrapping_add((at - range.at) as usize))
    }

    /// Fails unless the `bytes` bytes at `at` may be read.
    pub(super) fn check(&self, at: u64, bytes: u64) -> Result<(), String> {
        self.find(at, bytes, false).map(|_| ())
    }

    pub(super) fn read(&self, at: u64, into: &mut [u8]) -> Result<(), String> {
        let from = self.find(at, into.len() as u64, false)?;
        // SAFETY: so many bytes of a range, which are there and which nobody else touches (`add`).
        unsafe { from.copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// What is at `at`.
    pub(super) fn value<T: bytemuck::Pod>(&self, at: u64) -> Result<T, String> {
        let from = self.find(at, size_of::<T>() as u64, false)?;
        // SAFETY: as above, of a type that is whatever its bytes are.
        Ok(unsafe { from.cast::<T>().read_unaligned() })
    }

    pub(super) fn write(&self, at: u64, bytes: &[u8]) -> Result<(), String> {
        let to = self.find(at, bytes.len() as u64, true)?;
        // SAFETY: as above, of a range that may be written.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }
}
