//! Bytes in memory of our own that begin on a cache line, as rows of [lines](perpetua_shared::dtype::Lines) must.

use bytemuck::Zeroable;

use super::error::ModelError;

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// See the module head.
pub(super) struct AlignedBytes {
    lines: Vec<Line>,
    len: usize,
}

impl AlignedBytes {
    /// `len` zeros, for tensor `name`.
    ///
    /// # Errors
    /// When the system has no memory for them.
    pub(super) fn zeroed(name: &str, len: usize) -> Result<AlignedBytes, ModelError> {
        let mut lines = Vec::new();
        lines
            .try_reserve_exact(len.div_ceil(64))
            .map_err(|_| ModelError::NoMemory { name: name.to_owned(), bytes: len as u64 })?;
        lines.resize(len.div_ceil(64), Line::zeroed());
        Ok(AlignedBytes { lines, len })
    }
}

impl std::ops::Deref for AlignedBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }
}

impl std::ops::DerefMut for AlignedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }
}

impl std::fmt::Debug for AlignedBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AlignedBytes({})", self.len)
    }
}
