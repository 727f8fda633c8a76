//! Element types, as they are numbered in an image.
//!
//! The numbers are part of the image format: they are appended to, never reused.

use core::fmt;

/// What one element of a tensor is.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE 754 single precision.
    F32 = 1,
    /// The upper half of an [`DType::F32`].
    Bf16 = 2,
    /// IEEE 754 half precision.
    F16 = 3,
    /// Signed 32-bit integer.
    I32 = 4,
    /// Unsigned 32-bit integer.
    U32 = 5,
    /// One byte.
    U8 = 6,
    /// Signed 64-bit integer.
    I64 = 7,
}

impl DType {
    /// Every type, in the order of their numbers.
    pub const ALL: [DType; 7] = [
        DType::F32,
        DType::Bf16,
        DType::F16,
        DType::I32,
        DType::U32,
        DType::U8,
        DType::I64,
    ];

    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::U8 => 1,
            DType::Bf16 | DType::F16 => 2,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::I64 => 8,
        }
    }

    /// The name used in text forms and messages: `bf16`.
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

    /// The type with this number, if there is one.
    pub const fn from_u8(number: u8) -> Option<DType> {
        Some(match number {
            1 => DType::F32,
            2 => DType::Bf16,
            3 => DType::F16,
            4 => DType::I32,
            5 => DType::U32,
            6 => DType::U8,
            7 => DType::I64,
            _ => return None,
        })
    }

    /// The type with this name, if there is one.
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| dtype.name() == name)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::DType;

    #[test]
    fn numbers_and_names_lead_back() {
        for dtype in DType::ALL {
            assert_eq!(DType::from_u8(dtype as u8), Some(dtype));
            assert_eq!(DType::from_name(dtype.name()), Some(dtype));
        }
        assert_eq!(
            (0..=255).filter(|&n| DType::from_u8(n).is_some()).count(),
            DType::ALL.len()
        );
    }
}
