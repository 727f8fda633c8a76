//! Element types, as numbered in images.

use core::fmt;

/// The element type of a tensor. The discriminants are part of the image format: append, never reuse.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE 754 binary32.
    F32 = 1,
    /// bfloat16: the upper half of a binary32.
    Bf16 = 2,
    /// IEEE 754 binary16.
    F16 = 3,
    /// Signed 32-bit integer (token ids).
    I32 = 4,
    /// Unsigned 32-bit integer (control words).
    U32 = 5,
    /// Raw bytes.
    U8 = 6,
    /// Signed 64-bit integer.
    I64 = 7,
    /// Signed bytes with a scale per [`Q8_BLOCK`]: weight matrices only, whose rows are laid out as [`q8_block_at`] says.
    Q8 = 8,
}

/// Elements of a row that share a scale: a cache line of them.
pub const Q8_BLOCK: usize = 64;

/// Blocks whose scales lie together, before them: a cache line of scales in f32.
pub const Q8_GROUP: usize = 16;

/// Bytes of a row of `k` elements in [`DType::Q8`]: whole cache lines, one for each block and one for each group's scales.
pub const fn q8_row_bytes(k: usize) -> usize {
    let blocks = k.div_ceil(Q8_BLOCK);
    (blocks + blocks.div_ceil(Q8_GROUP)) * Q8_BLOCK
}

/// Where block `block` of a row in [`DType::Q8`] is: the offsets in bytes of its elements, zero beyond the row's last, and
/// of its scale, an f32. Element i is `byte * scale`, which is exact in f32 where the scale has at most 17 significant
/// bits. Read block by block, a row is read in the order of its addresses.
#[inline(always)]
pub const fn q8_block_at(block: usize) -> [usize; 2] {
    let group = block / Q8_GROUP;
    [(block + group + 1) * Q8_BLOCK, group * (Q8_GROUP + 1) * Q8_BLOCK + block % Q8_GROUP * 4]
}

impl DType {
    /// Every element type, in the order of their numbers.
    pub const ALL: [DType; 8] =
        [DType::F32, DType::Bf16, DType::F16, DType::I32, DType::U32, DType::U8, DType::I64, DType::Q8];

    /// Bytes per element; for [`DType::Q8`] without the scales.
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::Bf16 | DType::F16 => 2,
            DType::U8 | DType::Q8 => 1,
            DType::I64 => 8,
        }
    }

    /// Alignment that memory of it must have.
    pub const fn align_bytes(self) -> usize {
        match self {
            // Rows are whole cache lines.
            DType::Q8 => Q8_BLOCK,
            _ => self.size_bytes(),
        }
    }

    /// Bytes of a row-major tensor of this shape; of Q8, a matrix.
    pub fn tensor_bytes(self, shape: &[usize]) -> u64 {
        let (outer, inner) = match (self, shape) {
            (DType::Q8, [outer @ .., k]) => (outer, q8_row_bytes(*k)),
            _ => (shape, self.size_bytes()),
        };
        outer.iter().fold(inner as u64, |bytes, n| bytes.saturating_mul(*n as u64))
    }

    /// The name used in text forms and JSON: `f32`, `bf16`, ...
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::I32 => "i32",
            DType::U32 => "u32",
            DType::U8 => "u8",
            DType::I64 => "i64",
            DType::Q8 => "q8",
        }
    }

    /// The type numbered `number`, if there is one.
    pub fn from_u8(number: u8) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| *dtype as u8 == number)
    }

    /// The type called `name` (see [`DType::name`]), if there is one.
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| dtype.name() == name)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
