//! The words of the packing problem: a buffer, a problem, a placement.

use thiserror::Error;

/// The largest total of sizes and alignments a problem may have: half the address range, so that no sum of an offset, a
/// size and an alignment inside the solvers can overflow.
const MAX_TOTAL_BYTES: u64 = u64::MAX / 2;

/// Bytes with a lifetime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Buffer {
    /// The first instant at which the buffer is alive.
    pub lower: u64,
    /// The first instant at which it no longer is; `lower..upper` is never empty in a [`Problem`].
    pub upper: u64,
    /// How many bytes it holds while alive. A buffer of no bytes conflicts with nothing.
    pub size_bytes: u64,
    /// Its offset is a multiple of this; 1 where any offset will do.
    pub alignment: u64,
}

impl Buffer {
    /// A buffer that may lie at any offset.
    pub fn new(lower: u64, upper: u64, size_bytes: u64) -> Self {
        Self { lower, upper, size_bytes, alignment: 1 }
    }

    /// The same buffer, restricted to multiples of `alignment`.
    pub fn aligned(self, alignment: u64) -> Self {
        Self { alignment, ..self }
    }
}

/// Buffers and the bytes they must fit into. Its existence says that the solvers' arithmetic cannot overflow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    buffers: Vec<Buffer>,
    capacity_bytes: u64,
}

/// Why a list of buffers is no [`Problem`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ProblemError {
    /// A lifetime that ends before or when it begins.
    #[error("buffer {index}: lifetime [{lower}, {upper}) is empty, expected lower < upper")]
    EmptyLifetime {
        /// Position in the list.
        index: usize,
        /// As given.
        lower: u64,
        /// As given.
        upper: u64,
    },
    /// An alignment of zero.
    #[error("buffer {index}: alignment 0, expected at least 1")]
    ZeroAlignment {
        /// Position in the list.
        index: usize,
    },
    /// Sizes that no 64-bit arena could hold.
    #[error("buffer {index}: sizes and alignments up to here sum to more than {MAX_TOTAL_BYTES} bytes")]
    TooManyBytes {
        /// Position in the list of the buffer that went over.
        index: usize,
    },
}

impl Problem {
    /// Checks the buffers and takes them in.
    pub fn new(buffers: Vec<Buffer>, capacity_bytes: u64) -> Result<Self, ProblemError> {
        validate(&buffers)?;
        Ok(Self { buffers, capacity_bytes })
    }

    /// The buffers, in the order given; a placement's offsets follow it.
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// What the placement has to fit into.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }
}

/// The laws a buffer list keeps before any solver sees it.
pub(super) fn validate(buffers: &[Buffer]) -> Result<(), ProblemError> {
    let mut total_bytes = 0u64;
    for (index, buffer) in buffers.iter().enumerate() {
        let Buffer { lower, upper, size_bytes, alignment } = *buffer;
        if lower >= upper {
            return Err(ProblemError::EmptyLifetime { index, lower, upper });
        }
        if alignment == 0 {
            return Err(ProblemError::ZeroAlignment { index });
        }
        // A buffer never needs more room than its size and the padding before it.
        total_bytes = total_bytes
            .checked_add(size_bytes)
            .and_then(|total| total.checked_add(alignment))
            .filter(|&total| total <= MAX_TOTAL_BYTES)
            .ok_or(ProblemError::TooManyBytes { index })?;
    }
    Ok(())
}

/// An offset for every buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Parallel to the buffers.
    pub offsets: Vec<u64>,
    /// The highest byte any buffer reaches.
    pub peak_bytes: u64,
}

impl Placement {
    /// A placement from its offsets; the peak follows from them.
    pub(super) fn from_offsets(buffers: &[Buffer], offsets: Vec<u64>) -> Self {
        let tops = buffers.iter().zip(&offsets).map(|(buffer, offset)| offset + buffer.size_bytes);
        let peak_bytes = tops.max().unwrap_or(0);
        Self { offsets, peak_bytes }
    }
}
