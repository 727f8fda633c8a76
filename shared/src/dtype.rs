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
    /// Signed bytes with a scale per 64: weight matrices only, whose rows are laid out as [`Q8`] says.
    Q8 = 8,
    /// One of 16 levels each, with a scale per 32: weight matrices only, whose rows are laid out as [`Q4`] says.
    Q4 = 9,
    /// Microscaling FP4 of the Open Compute Project, MXFP4: numbers of 4 bits with a power of two for each 32 of a row.
    /// Weight matrices only, whose rows are laid out as [`Q4`]'s, with other [levels](MX4_LEVELS).
    Mx4 = 10,
    /// Whole numbers of 4 bits around zero, as quantised models' files have them, with a scale for each 32 of a row.
    /// Weight matrices only, whose rows are laid out as [`Q4`]'s, with other [levels](INT4_LEVELS).
    Int4 = 11,
}

/// How a row of weights in fewer bits is laid out: cache lines of elements, in groups that a cache line of their scales
/// goes before. Line by line, a row is read in the order of its addresses. Such a row is one thing: its elements have
/// no strides of their own, and none is written by a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lines {
    /// Elements of a line.
    pub elems: usize,
    /// Lines of a group.
    pub per_group: usize,
}

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

impl Lines {
    /// Bytes of a row of `k` elements: whole cache lines.
    pub const fn row_bytes(self, k: usize) -> usize {
        let lines = k.div_ceil(self.elems);
        (lines + lines.div_ceil(self.per_group)) * LINE_BYTES
    }

    /// Where line `line` of a row is: the offsets in bytes of its elements, and of its scales, an even share of its
    /// group's.
    #[inline]
    pub const fn at(self, line: usize) -> [usize; 2] {
        let (group, number) = (line / self.per_group, line % self.per_group);
        [
            (line + group + 1) * LINE_BYTES,
            (group * (self.per_group + 1)) * LINE_BYTES + number * (LINE_BYTES / self.per_group),
        ]
    }
}

/// Rows of [`DType::Q8`]: a line is a block of elements that share a scale, an f32. Element i is `byte * scale`, which
/// is exact in f32 where the scale has at most 17 significant bits; beyond the row's last, bytes are zero.
pub const Q8: Lines = Lines { elems: 64, per_group: 16 };

/// Rows of [`DType::Q4`]: byte j of a line has element j in its low half and element 64 + j in its high one, as numbers
/// of [`Q4_LEVELS`]. Each [`Q4_BLOCK`] of them shares a scale, a bf16. Element i is `level * scale`, exact in f32;
/// blocks beyond the row's last have the scale zero.
pub const Q4: Lines = Lines { elems: 128, per_group: 8 };

/// Elements of a row in [`DType::Q4`] that share a scale.
pub const Q4_BLOCK: usize = 32;

/// What a scale is multiplied with in [`DType::Q4`]. Weights are many near zero and few far from it: steps grow
/// outwards. The largest of a block becomes the first, whatever its sign, since scales have one, too.
///
/// Found by Lloyd's iteration on blocks of normal numbers, of Student's t with five degrees of freedom, and of
/// all-MiniLM-L6-v2's matrices; then rounded to seven bits, and improved one by one as whole numbers. Seven bits, since
/// two products of such a number with a signed byte fit 16 bits, which the byte products of AVX2 need.
pub const Q4_LEVELS: [i8; 16] = [-63, -49, -38, -29, -22, -15, -9, -4, 1, 6, 11, 17, 23, 31, 40, 55];

/// What a scale is multiplied with in [`DType::Mx4`]: twice the values of E2M1, a sign, two bits of exponent and one of
/// mantissa, which number them. So a scale is half of the block's power of two.
pub const MX4_LEVELS: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// What a scale is multiplied with in [`DType::Int4`]: numbers less eight.
pub const INT4_LEVELS: [i8; 16] = [-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7];

/// Where element `i` of a row in [`DType::Q4`] is: the offset of its byte, by how many bits that is shifted down, and
/// the offset of its scale.
#[inline]
pub const fn q4_at(i: usize) -> (usize, u32, usize) {
    let [elements, scales] = Q4.at(i / Q4.elems);
    let within = i % Q4.elems;
    let is_high = within >= Q4.elems / 2;
    (elements + within % (Q4.elems / 2), if is_high { 4 } else { 0 }, scales + within / Q4_BLOCK * 2)
}

impl DType {
    /// Every element type, in the order of their numbers.
    pub const ALL: [DType; 11] = [
        DType::F32,
        DType::Bf16,
        DType::F16,
        DType::I32,
        DType::U32,
        DType::U8,
        DType::I64,
        DType::Q8,
        DType::Q4,
        DType::Mx4,
        DType::Int4,
    ];

    /// How its rows are laid out, if their elements have scales.
    pub const fn lines(self) -> Option<Lines> {
        match self {
            DType::Q8 => Some(Q8),
            DType::Q4 | DType::Mx4 | DType::Int4 => Some(Q4),
            _ => None,
        }
    }

    /// What its numbers of four bits stand for, if it has such.
    pub const fn levels(self) -> Option<&'static [i8; 16]> {
        match self {
            DType::Q4 => Some(&Q4_LEVELS),
            DType::Mx4 => Some(&MX4_LEVELS),
            DType::Int4 => Some(&INT4_LEVELS),
            _ => None,
        }
    }

    /// Whether its elements are floating-point numbers by themselves.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::Bf16 | DType::F16)
    }

    /// Bytes between elements that are neighbours; of rows of [`Lines`], what strides between rows count.
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::Bf16 | DType::F16 => 2,
            DType::U8 | DType::Q8 | DType::Q4 | DType::Mx4 | DType::Int4 => 1,
            DType::I64 => 8,
        }
    }

    /// Alignment that memory of it must have.
    pub const fn align_bytes(self) -> usize {
        if self.lines().is_some() { LINE_BYTES } else { self.size_bytes() }
    }

    /// Bytes of a row-major tensor of this shape; of rows of [`Lines`], a matrix.
    pub fn tensor_bytes(self, shape: &[usize]) -> u64 {
        let (outer, inner) = match (self.lines(), shape) {
            (Some(lines), [outer @ .., k]) => (outer, lines.row_bytes(*k)),
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
            DType::Q4 => "q4",
            DType::Mx4 => "mxfp4",
            DType::Int4 => "int4",
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Every byte of a row is one line's or one line's scales', in the order of addresses.
    #[test]
    fn a_row_is_its_lines_and_their_scales() {
        for (lines, scales_bytes) in [(Q8, 4), (Q4, 8)] {
            for k in [1usize, 64, 129, 1024, 1025, 5000] {
                let mut room = [0u8; 8192];
                let taken = &mut room[..lines.row_bytes(k)];
                for line in 0..k.div_ceil(lines.elems) {
                    let [elements, scales] = lines.at(line);
                    assert!(scales < elements && elements % LINE_BYTES == 0);
                    taken[elements..][..LINE_BYTES].iter_mut().for_each(|n| *n += 1);
                    taken[scales..][..scales_bytes].iter_mut().for_each(|n| *n += 1);
                }
                assert!(taken.iter().all(|n| *n <= 1), "two lines share a byte of {k} elements");
                // What is nobody's is the rest of the last group's scales.
                let spare = taken.iter().filter(|n| **n == 0).count();
                let of_last = (lines.per_group - k.div_ceil(lines.elems) % lines.per_group) % lines.per_group;
                assert_eq!(spare, of_last * scales_bytes, "{k} elements of {lines:?}");
            }
        }
    }

    #[test]
    fn elements_of_four_bits_are_where_the_layout_says() {
        assert_eq!([0, 63, 64, 127].map(q4_at), [(64, 0, 0), (127, 0, 2), (64, 4, 4), (127, 4, 6)]);
        // The second line and the third, and their scales beside the first's.
        assert_eq!([128, 299].map(q4_at), [(128, 0, 8), (192 + 43, 0, 18)]);
        assert!(Q4_LEVELS.is_sorted() && Q4_LEVELS.iter().all(|level| (-63..=63).contains(level)));
    }

    #[test]
    fn levels_of_microscaling_are_twice_the_numbers_of_its_bits() {
        for (bits, level) in MX4_LEVELS.into_iter().enumerate() {
            let (exponent, mantissa) = (bits as i32 >> 1 & 3, (bits & 1) as f32 / 2.0);
            let value = if exponent == 0 { mantissa } else { (1.0 + mantissa) * (1 << (exponent - 1)) as f32 };
            assert_eq!(f32::from(level), 2.0 * if bits & 8 == 0 { value } else { -value }, "{bits:04b}");
        }
        assert_eq!((DType::Mx4.lines(), DType::Mx4.name()), (Some(Q4), "mxfp4"));
        // gpt-oss's: 22.5 lines, the scales of three groups.
        assert_eq!(DType::Mx4.tensor_bytes(&[2, 2880]), 2 * (23 + 3) * 64);
    }

    #[test]
    fn types_are_found_by_number_and_name() {
        for dtype in DType::ALL {
            assert_eq!((DType::from_u8(dtype as u8), DType::from_name(dtype.name())), (Some(dtype), Some(dtype)));
            assert_eq!(dtype.levels().is_some(), dtype.lines() == Some(Q4));
        }
        assert_eq!(DType::from_u8(DType::ALL.len() as u8 + 1), None);
    }
}
