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
}

impl DType {
    /// Every element type, in the order of their numbers.
    pub const ALL: [DType; 7] = [DType::F32, DType::Bf16, DType::F16, DType::I32, DType::U32, DType::U8, DType::I64];

    /// Bytes per element.
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::Bf16 | DType::F16 => 2,
            DType::U8 => 1,
            DType::I64 => 8,
        }
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
