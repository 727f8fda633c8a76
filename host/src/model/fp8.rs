//! Matrices whose files have them in FP8: E4M3 (a sign, four bits of exponent, three of mantissa; no infinity, "FP8
//! Formats for Deep Learning", arXiv 2209.05433), and scales that a whole matrix, a row, or a block of rows and columns
//! shares. An element is its number times its scale.
//!
//! The network reads them in bf16, the numbers nearest to these, as `transformers` has them where there is no GPU;
//! `Quantize::Q8` makes of these again a byte each. Scales of activations are not heeded: activations are not rounded
//! to 8 bits.

use half::bf16;
use safetensors::tensor::Dtype as FileDtype;

use super::error::{ModelError, shape_text};
use super::quantize;
use super::remade::{Origin, Part, Remade};
use super::weights::float_dtype;

/// What is behind a matrix's name in that of its scales: in DeepSeek's files, and those that do as they; in those of
/// compressed-tensors, ModelOpt and FBGEMM.
pub(super) const SCALES: [&str; 2] = ["_scale_inv", "_scale"];

/// What the names of scales end with that say how activations, keys and values may be rounded.
pub(super) const SCALES_OF_ACTIVATIONS: [&str; 8] = [
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".activation_scale",
    ".output_scale",
    ".output_zero_point",
    ".k_scale",
    ".v_scale",
];

/// What the matrix called `name`, of this shape, is made of, itself in FP8 and its scales, which are of shape `grid`,
/// for blocks of so many rows and columns each, where files say how many.
///
/// # Errors
/// Scales that are neither one, nor one a row, nor one a block.
pub(super) fn remade(
    [name, scales]: [&str; 2],
    shape: &[usize],
    grid: &[usize],
    block: Option<[usize; 2]>,
) -> Result<Remade, ModelError> {
    let wrong = |expected: String| ModelError::ScaleShape { name: scales.to_owned(), given: grid.to_owned(), expected };
    let (rows, k) = match shape {
        &[rows, k] if rows > 0 && k > 0 => (rows, k),
        _ => return Err(wrong(format!("those of a matrix, which {name} {} is not", shape_text(shape)))),
    };
    let blocks = |[r, c]: [usize; 2]| [rows.div_ceil(r), k.div_ceil(c)];
    let block = match (grid, block) {
        ([] | [1] | [1, 1], _) => [rows, k],
        (&[r, c], Some(block)) if [r, c] == blocks(block) => block,
        (&[r] | &[r, 1], _) if r == rows => [1, k],
        (&[r, c], None) if r > 0 && c > 0 && rows.is_multiple_of(r) && k.is_multiple_of(c) => [rows / r, k / c],
        _ => {
            let of_blocks = block.map_or("even parts of these".to_owned(), |block| shape_text(&blocks(block)));
            return Err(wrong(format!("[1], [{rows}, 1] or {of_blocks}")));
        }
    };
    let of = Origin::Fp8 { elements: name.to_owned(), scales: scales.to_owned(), grid: grid.to_owned(), block };
    Ok(Remade { name: name.to_owned(), shape: shape.to_owned(), of, matrices: 1 })
}

/// Whether scales may be of this type: a float, or E8M0, the exponent of a power of two.
pub(super) fn may_be_scales(dtype: FileDtype) -> bool {
    float_dtype(dtype).is_some() || dtype == FileDtype::F8_E8M0
}

/// Writes the elements of the matrix of `k` columns, times their scales, to `out`, in bf16; the place of the first that
/// is no number as the error.
pub(super) fn widen(
    elements: &[u8],
    k: usize,
    scales: &Part<'_>,
    [rows_of, columns_of]: [usize; 2],
    out: &mut [u8],
) -> Result<(), [usize; 2]> {
    let scales = numbers(scales);
    let of_row = k.div_ceil(columns_of);
    for (r, (out, row)) in out.chunks_exact_mut(2 * k).zip(elements.chunks_exact(k)).enumerate() {
        let scales = &scales[r / rows_of * of_row..][..of_row];
        let blocks = out.chunks_mut(2 * columns_of).zip(row.chunks(columns_of)).zip(scales).enumerate();
        for (number, ((out, row), scale)) in blocks {
            // Whether one is no number is found out of all, which is faster; where, only then.
            let is_none = |byte: &u8| byte & 0x7f == 0x7f;
            let are_some = !row.iter().fold(false, |one, byte| one | is_none(byte));
            if !are_some || !bf16::from_f32(scale * LARGEST).is_finite() {
                let first = row.iter().position(is_none).unwrap_or(0);
                return Err([r, number * columns_of + first]);
            }
            for (out, byte) in out.chunks_exact_mut(2).zip(row) {
                out.copy_from_slice(&bf16::from_f32(number_of(*byte) * scale).to_le_bytes());
            }
        }
    }
    Ok(())
}

/// The largest number of E4M3.
const LARGEST: f32 = 448.0;

/// What a byte stands for.
pub(super) fn number_or_nan(byte: u8) -> f32 {
    if byte & 0x7f == 0x7f { f32::NAN } else { number_of(byte) }
}

/// What a byte stands for, unless it is none.
fn number_of(byte: u8) -> f32 {
    // Exponents of f32 are 120 larger; its subnormal numbers are those of E4M3, too.
    const LARGER: f32 = f32::from_bits((127 + 120) << 23);
    f32::from_bits(u32::from(byte & 0x80) << 24 | u32::from(byte & 0x7f) << 20) * LARGER
}

/// Scales as floats.
pub(super) fn numbers(scales: &Part<'_>) -> Vec<f32> {
    let Some(dtype) = float_dtype(scales.dtype) else {
        // E8M0: an exponent, of which one is no number.
        let power = |exponent: &u8| match exponent {
            0 => f32::from_bits(1 << 22),
            255 => f32::NAN,
            exponent => f32::from_bits(u32::from(*exponent) << 23),
        };
        return scales.bytes.iter().map(power).collect();
    };
    let mut wide = vec![0.0; scales.bytes.len() / dtype.size_bytes()];
    quantize::widen(dtype, scales.bytes, &mut wide);
    wide
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    /// By its definition: a sign, an exponent less 7, a mantissa of eighths.
    fn expected(byte: u8) -> f32 {
        let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7) / 8.0);
        let value = if exponent == 0 { mantissa * 2f32.powi(-6) } else { (1.0 + mantissa) * 2f32.powi(exponent - 7) };
        if byte & 0x80 == 0 { value } else { -value }
    }

    #[test]
    fn a_byte_is_the_number_of_its_parts() {
        for byte in (0..=255u8).filter(|byte| byte & 0x7f != 0x7f) {
            assert_eq!(number_of(byte), expected(byte), "{byte:08b}");
        }
        assert_eq!(number_of(0x7e), LARGEST);
    }

    fn part(dtype: FileDtype, bytes: &[u8]) -> Part<'_> {
        Part { dtype, shape: &[], bytes }
    }

    /// A matrix of 5 x 7 by one scale, one a row, and one a block of 2 x 3, in each type.
    #[test]
    fn elements_are_numbers_times_their_scales() {
        let elements: Vec<u8> = (0..35u8).map(|i| i.wrapping_mul(29) & 0xf7).collect();
        let scale = |number: usize| 2f32.powi(number as i32 % 7 - 3);
        for (block, of_row) in [([5, 7], 1), ([1, 7], 1), ([2, 3], 3)] {
            let n = 5usize.div_ceil(block[0]) * of_row;
            let scales: Vec<f32> = (0..n).map(scale).collect();
            let bytes = |of: &dyn Fn(f32) -> Vec<u8>| scales.iter().flat_map(|s| of(*s)).collect::<Vec<u8>>();
            let of_types = [
                (FileDtype::F32, bytes(&|s| s.to_le_bytes().to_vec())),
                (FileDtype::BF16, bytes(&|s| bf16::from_f32(s).to_le_bytes().to_vec())),
                (FileDtype::F16, bytes(&|s| f16::from_f32(s).to_le_bytes().to_vec())),
                (FileDtype::F8_E8M0, bytes(&|s| vec![(s.to_bits() >> 23) as u8])),
            ];
            for (dtype, bytes) in &of_types {
                let mut out = vec![0; 2 * 35];
                widen(&elements, 7, &part(*dtype, bytes), block, &mut out).expect("numbers");
                for (at, out) in out.chunks_exact(2).enumerate() {
                    let scale = scale(at / 7 / block[0] * of_row + at % 7 / block[1]);
                    let found = bf16::from_le_bytes([out[0], out[1]]).to_f32();
                    assert_eq!(found, expected(elements[at]) * scale, "{dtype:?}, {block:?}, element {at}");
                }
            }
        }
        // Products of twelve bits go to the nearest of eight.
        let mut out = [0; 2];
        let scale = 1.0 + 2f32.powi(-7) + 2f32.powi(-9);
        widen(&[0x39], 1, &part(FileDtype::F32, &scale.to_le_bytes()), [1, 1], &mut out).expect("a number");
        assert_eq!(bf16::from_le_bytes(out), bf16::from_f32(1.125 * scale));
    }

    #[test]
    fn what_is_no_number_is_found() {
        let mut out = [0; 24];
        let mut elements = [0x38; 12];
        let scales = [1f32; 4].map(f32::to_le_bytes).concat();
        let refused = |elements: &[u8], scales: &[u8], out: &mut [u8]| {
            widen(elements, 6, &part(FileDtype::F32, scales), [1, 3], out)
        };
        assert_eq!(refused(&elements, &scales, &mut out), Ok(()));
        elements[10] = 0xff;
        assert_eq!(refused(&elements, &scales, &mut out), Err([1, 4]));
        elements[10] = 0x7f;
        assert_eq!(refused(&elements, &scales, &mut out), Err([1, 4]));
        elements[10] = 0;
        for bad in [f32::NAN, f32::INFINITY, 1e36] {
            let scales = [1.0, bad, 1.0, 1.0].map(f32::to_le_bytes).concat();
            assert_eq!(refused(&elements, &scales, &mut out), Err([0, 3]));
        }
    }

    #[test]
    fn shapes_of_scales_say_what_shares_one() {
        let of = |shape: &[usize], grid: &[usize], block| {
            let remade = remade(["w", "w_scale"], shape, grid, block).map_err(|e| e.to_string())?;
            let Origin::Fp8 { block, .. } = remade.of else { unreachable!("it is of FP8") };
            Ok::<_, String>(block)
        };
        let given = Some([128, 128]);
        for grid in [&[][..], &[1], &[1, 1]] {
            assert_eq!(of(&[300, 200], grid, given), Ok([300, 200]));
        }
        assert_eq!(of(&[300, 200], &[300, 1], None), Ok([1, 200]));
        assert_eq!(of(&[300, 200], &[300], given), Ok([1, 200]));
        assert_eq!(of(&[300, 200], &[3, 2], given), Ok([128, 128]));
        assert_eq!(of(&[300, 200], &[3, 2], None), Ok([100, 100]));
        // A column of blocks, as many as rows: of one row each either way.
        assert_eq!(of(&[3, 100], &[3, 1], Some([1, 128])), Ok([1, 128]));
        let message = of(&[300, 200], &[4, 2], given).expect_err("none fits");
        assert_eq!(message, "w_scale: shape [4, 2], expected [1], [300, 1] or [3, 2]");
        assert!(of(&[300, 200], &[7, 2], None).expect_err("no even parts").contains("[300, 1]"));
        for shape in [&[2, 300, 200][..], &[300, 0], &[0, 200], &[300]] {
            assert!(of(shape, &[1], None).expect_err("no matrix").contains("expected those of a matrix, which w ["));
        }
        assert!(of(&[300, 200], &[0, 0], None).is_err());
    }
}
