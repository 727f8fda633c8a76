//! Buffers and the tensors that lie in them (MPK: `DTensor`).
//!
//! A buffer is a run of bytes with a purpose; a tensor is a strided box of elements in one buffer. Several tensors may
//! share a buffer: views, slices, reshapes. What a task touches is decided on the buffer's bytes, so sharing is seen.

use perpetua_shared::DType;
use perpetua_shared::limits::MAX_RANK;
use std::fmt;

/// Index of a [`Buffer`] in its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId(pub u32);

/// Index of a [`DTensor`] in its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorId(pub u32);

/// Index of an operator, in program order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub u32);

macro_rules! arena_id {
    ($name:ident, $letter:literal) => {
        impl $name {
            /// The index as a `usize`.
            pub const fn idx(self) -> usize {
                self.0 as usize
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($letter, "{}"), self.0)
            }
        }
    };
}
arena_id!(BufferId, "buf");
arena_id!(TensorId, "x");
arena_id!(OpId, "op");

/// What a buffer is for, hence who provides its bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum BufferKind {
    /// Made and used up within one pass; its address in the arena is planned.
    Intermediate,
    /// As an intermediate, of [flagged](perpetua_shared::flag) f32: its bytes are its own.
    Flagged,
    /// Written by the host before a run.
    Input,
    /// A tensor of the checkpoint, used in place.
    Weight,
    /// So many matrices of the checkpoint, of one shape, as one tensor: `*` in its name stands for their numbers.
    WeightStack(u32),
    /// A table the compiler made; its bytes.
    Constant(Vec<u8>),
    /// Kept from pass to pass (the KV cache), zero at the start.
    State,
    /// The control block.
    Control,
    /// Token ids.
    Tokens,
}

/// A run of bytes with a purpose. Buffers of different programs with the same name and a kind other than
/// `Intermediate` are the same memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Its name: for weights, the checkpoint's.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// See [`BufferKind`].
    pub kind: BufferKind,
}

/// A strided box of elements in a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DTensor {
    /// Its name, for reports.
    pub name: String,
    /// Elements along each dimension, at most [`MAX_RANK`] of them.
    pub shape: Vec<usize>,
    /// Elements from one index to the next, per dimension.
    pub strides: Vec<usize>,
    /// Element type.
    pub dtype: DType,
    /// Where it lies.
    pub buffer: BufferId,
    /// Its first element, counted in elements from the buffer's start.
    pub offset_elems: usize,
}

impl DTensor {
    /// Elements in the box, or the largest number where that is too small: strides of zero see few as many.
    pub fn len_elems(&self) -> usize {
        self.shape.iter().fold(1, |len, n| len.saturating_mul(*n))
    }
}

impl fmt::Display for DTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?} {}", self.name, self.shape, self.dtype)
    }
}

/// Row-major strides of `shape`.
pub fn row_major(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1usize; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim].saturating_mul(shape[dim].max(1));
    }
    strides
}

/// The buffers and tensors of one graph.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorTable {
    /// Buffers, indexed by [`BufferId`].
    pub buffers: Vec<Buffer>,
    /// Tensors, indexed by [`TensorId`].
    pub tensors: Vec<DTensor>,
}

/// The most bytes of a buffer that is made with its tensor: no machine we know has memory for more, and sums over all
/// buffers of a graph stay inside 64 bits.
pub const MAX_BUFFER_BYTES: u64 = 1 << 40;

/// Why a tensor cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// More dimensions than an operand carries.
    #[error("tensor {name}: {rank} dimensions, expected at most {MAX_RANK}")]
    Rank {
        /// The tensor.
        name: String,
        /// What it has.
        rank: usize,
    },
    /// Shape and strides of different lengths.
    #[error("tensor {name}: {strides} strides for {rank} dimensions")]
    Strides {
        /// The tensor.
        name: String,
        /// Strides given.
        strides: usize,
        /// Dimensions given.
        rank: usize,
    },
    /// More bytes than a buffer may have.
    #[error("tensor {name}: shape {shape:?} of {dtype} is {bytes} bytes, expected at most {MAX_BUFFER_BYTES}")]
    Bytes {
        /// The tensor.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
        /// Its element type.
        dtype: DType,
        /// Its size, or the largest number where that is too small.
        bytes: u64,
    },
    /// A view of a tensor that there is not.
    #[error("tensor {name}: its base {base} does not exist")]
    Base {
        /// The view.
        name: String,
        /// As given.
        base: TensorId,
    },
    /// It leaves its buffer.
    #[error("tensor {name}: ends at byte {end}, but its buffer {buffer} has {bytes}")]
    OutOfBounds {
        /// The tensor.
        name: String,
        /// Its end.
        end: u128,
        /// The buffer.
        buffer: String,
        /// The buffer's size.
        bytes: u64,
    },
}

/// Strides of a tensor that fills its buffer: row-major, rows of [`Lines`](perpetua_shared::dtype::Lines) as one thing
/// each.
fn strides_of(shape: &[usize], dtype: DType) -> Vec<usize> {
    match (dtype.lines(), shape) {
        (Some(lines), [_, k]) => vec![lines.row_bytes(*k), 0],
        (Some(lines), [_, n, k]) => vec![n.saturating_mul(lines.row_bytes(*k)), lines.row_bytes(*k), 0],
        _ => row_major(shape),
    }
}

impl TensorTable {
    /// Adds a buffer with one row-major tensor that fills it.
    ///
    /// # Errors
    /// Too many dimensions, or more than [`MAX_BUFFER_BYTES`].
    pub fn add(
        &mut self,
        name: &str,
        shape: &[usize],
        dtype: DType,
        kind: BufferKind,
    ) -> Result<TensorId, TensorError> {
        let bytes = dtype.tensor_bytes(shape);
        if bytes > MAX_BUFFER_BYTES {
            return Err(TensorError::Bytes { name: name.to_owned(), shape: shape.to_vec(), dtype, bytes });
        }
        self.buffers.push(Buffer { name: name.to_owned(), bytes, kind });
        let buffer = BufferId(self.buffers.len() as u32 - 1);
        self.push(DTensor {
            name: name.to_owned(),
            shape: shape.to_vec(),
            strides: strides_of(shape, dtype),
            dtype,
            buffer,
            offset_elems: 0,
        })
    }

    /// Adds a view: a box of `base`'s buffer, `offset_elems` elements after `base`'s first.
    ///
    /// # Errors
    /// A base that does not exist, too many dimensions, or a box that leaves the buffer.
    pub fn view(
        &mut self,
        name: &str,
        base: TensorId,
        offset_elems: usize,
        shape: &[usize],
        strides: &[usize],
    ) -> Result<TensorId, TensorError> {
        let of = self.tensors.get(base.idx()).ok_or_else(|| TensorError::Base { name: name.to_owned(), base })?;
        let tensor = DTensor {
            name: name.to_owned(),
            shape: shape.to_vec(),
            strides: strides.to_vec(),
            dtype: of.dtype,
            buffer: of.buffer,
            offset_elems: of.offset_elems.saturating_add(offset_elems),
        };
        self.push(tensor)
    }

    /// Adds a tensor, if it lies in its buffer.
    pub(crate) fn push(&mut self, tensor: DTensor) -> Result<TensorId, TensorError> {
        let name = || tensor.name.clone();
        if tensor.shape.len() > MAX_RANK {
            return Err(TensorError::Rank { name: name(), rank: tensor.shape.len() });
        }
        if tensor.strides.len() != tensor.shape.len() {
            return Err(TensorError::Strides { name: name(), strides: tensor.strides.len(), rank: tensor.shape.len() });
        }
        let buffer = &self.buffers[tensor.buffer.idx()];
        if !tensor.shape.contains(&0) {
            let steps = tensor.shape.iter().zip(&tensor.strides).map(|(n, s)| (*n as u128 - 1) * *s as u128);
            let last = steps.fold(tensor.offset_elems as u128, u128::saturating_add);
            let end = last.saturating_add(1).saturating_mul(tensor.dtype.size_bytes() as u128);
            if end > u128::from(buffer.bytes) {
                return Err(TensorError::OutOfBounds {
                    name: name(),
                    end,
                    buffer: buffer.name.clone(),
                    bytes: buffer.bytes,
                });
            }
        }
        self.tensors.push(tensor);
        Ok(TensorId(self.tensors.len() as u32 - 1))
    }

    /// Whether `tensor` is the weights of experts, a matrix each.
    pub(crate) fn is_stack(&self, tensor: TensorId) -> bool {
        matches!(self.buffer_of(tensor).kind, BufferKind::WeightStack(_))
    }

    /// The buffer of `tensor`.
    pub fn buffer_of(&self, tensor: TensorId) -> &Buffer {
        &self.buffers[self[tensor].buffer.idx()]
    }
}

impl std::ops::Index<TensorId> for TensorTable {
    type Output = DTensor;
    fn index(&self, id: TensorId) -> &DTensor {
        &self.tensors[id.idx()]
    }
}
