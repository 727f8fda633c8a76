//! [`DType::Q4`](perpetua_shared::DType::Q4): blocks of 32 along a row, each element the nearest of 16 levels times the
//! block's scale, a bf16.
//!
//! The scale with the least squared error is looked for: the block's largest element becomes about the outermost level,
//! as it is or with the other sign (levels reach further on one side), larger or smaller by [`STRETCHES`]; the best of
//! these is then refined twice by the scale that is best for the levels chosen with it, as Lloyd's iteration does.
//! Squared error beside llama.cpp's formats of as many bits, as parts of the sum of squares (normal numbers; Student's
//! t, five degrees of freedom; all-MiniLM-L6-v2's matrices): 0.0056, 0.0068, 0.0058; Q4_0 0.0074, 0.0116, 0.0081;
//! IQ4_NL 0.0058, 0.0079, 0.0061; Q4_K 0.0051, 0.0069, 0.0054.

use half::bf16;
use perpetua_shared::dtype::{Q4_BLOCK, Q4_LEVELS, q4_at};

use super::{SHIFT, largest};

/// What the largest element becomes, in parts of the outermost level's.
const STRETCHES: [f32; 4] = [0.85, 0.933, 1.017, 1.1];

/// How often the best scale is refined.
const REFINEMENTS: usize = 2;

/// A block whose largest element is smaller is zeros: scales of smaller ones have no inverse.
const SMALLEST: f32 = 1e-33;

/// The outermost level.
const OUTERMOST: f32 = Q4_LEVELS[0] as f32;

/// The number of the level nearest to what lies in `[(i - 128) / 2, (i - 127) / 2)`: between two such bounds, there
/// being levels at whole numbers, it is the same.
const NEAREST: [u8; 256] = {
    let mut nearest = [0; 256];
    let mut i = 0;
    while i < 256 {
        let mut number = 0;
        // In quarters: beyond the middle of two levels, the upper is nearer.
        while number < 15 && 2 * (i as i32 - 128) + 1 > 2 * (Q4_LEVELS[number] as i32 + Q4_LEVELS[number + 1] as i32) {
            number += 1;
        }
        nearest[i] = number as u8;
        i += 1;
    }
    nearest
};

/// The levels of these numbers.
const NEAREST_LEVEL: [f32; 256] = {
    let mut levels = [0.0; 256];
    let mut i = 0;
    while i < 256 {
        levels[i] = Q4_LEVELS[NEAREST[i] as usize] as f32;
        i += 1;
    }
    levels
};

/// Quantises one row into zeros; the first element that is not finite as the error.
pub(super) fn row(weights: &[f32], out: &mut [u8]) -> Result<(), usize> {
    for (i, part) in weights.chunks(Q4_BLOCK).enumerate() {
        let first = i * Q4_BLOCK;
        let largest = largest(part).map_err(|at| first + at)?;
        if largest < SMALLEST {
            continue;
        }
        let mut block = [0f32; Q4_BLOCK];
        block[..part.len()].copy_from_slice(part);
        let best = best(&block, largest);
        // A block's elements are neighbours, all in one half of their bytes.
        let (byte, shift, scale) = q4_at(first);
        for (out, at) in out[byte..].iter_mut().zip(&best.at).take(part.len()) {
            *out |= NEAREST[usize::from(*at)] << shift;
        }
        out[scale..][..2].copy_from_slice(&best.scale.to_le_bytes());
    }
    Ok(())
}

/// A block as levels.
struct Levels {
    scale: bf16,
    /// Where in [`NEAREST`].
    at: [u8; Q4_BLOCK],
    /// Sum of squares, in those of the block's largest element.
    error: f32,
}

/// The best that is found for a block whose largest magnitude is `largest`; see the module head.
fn best(block: &[f32; Q4_BLOCK], largest: f32) -> Levels {
    // Relative to the largest, so that no square is too large or too small.
    let parts = block.map(|w| w / largest);
    let with_scale = |scale: f32| with_scale(&parts, largest, scale);
    let nearer = |a: Levels, b: Levels| if b.error < a.error { b } else { a };
    let both_signs = STRETCHES.into_iter().flat_map(|stretch| [stretch / OUTERMOST, -stretch / OUTERMOST]);
    let best = both_signs.map(with_scale).reduce(nearer).expect("there are stretches");
    (0..REFINEMENTS).fold(best, |best, _| {
        let levels = levels_at(&best.at);
        let product = sum(&parts, &levels, |part, level| part * level);
        nearer(best, with_scale(product / sum(&levels, &levels, |level, same| level * same)))
    })
}

/// The nearest levels with the bf16 nearest to `scale`, both relative to `largest`, as `parts` are.
fn with_scale(parts: &[f32; Q4_BLOCK], largest: f32, scale: f32) -> Levels {
    let kept = bf16::from_f32(scale * largest);
    let scale = kept.to_f32() / largest;
    let halves = 2.0 / scale;
    // Down to a whole number, which is the last byte. A table cannot be looked up in by vectors, all else is done by
    // them.
    let mut at = [0; Q4_BLOCK];
    for (at, part) in at.iter_mut().zip(parts) {
        *at = ((part * halves + 127.5).clamp(0.0, 255.0) + SHIFT).to_bits() as u8;
    }
    let levels = levels_at(&at);
    let error = sum(parts, &levels, |part, level| {
        let off = part - scale * level;
        off * off
    });
    // Near the largest f32 a scale may be, and its products not.
    let is_finite = (kept.to_f32() * OUTERMOST).is_finite();
    Levels { scale: kept, at, error: if is_finite { error } else { f32::INFINITY } }
}

fn levels_at(at: &[u8; Q4_BLOCK]) -> [f32; Q4_BLOCK] {
    let mut levels = [0.0; Q4_BLOCK];
    for (level, at) in levels.iter_mut().zip(at) {
        *level = NEAREST_LEVEL[usize::from(*at)];
    }
    levels
}

/// The sum of `of` over a block, in eight parts that do not wait for each other.
#[inline(always)]
fn sum(a: &[f32; Q4_BLOCK], b: &[f32; Q4_BLOCK], of: impl Fn(f32, f32) -> f32) -> f32 {
    let mut sums = [0f32; 8];
    for (a, b) in a.as_chunks::<8>().0.iter().zip(b.as_chunks::<8>().0) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += of(*a, *b);
        }
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use perpetua_shared::dtype::Q4;
    use proptest::prelude::*;
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    fn quantized(weights: &[f32]) -> Vec<u8> {
        let mut out = vec![0; Q4.row_bytes(weights.len())];
        assert_eq!(row(weights, &mut out), Ok(()));
        out
    }

    fn scale(row: &[u8], block: usize) -> f32 {
        // By the layout's description, not by its function.
        let (line, within) = (block / 4, block % 4);
        let at = line / 8 * 9 * 64 + line % 8 * 8 + within * 2;
        bf16::from_le_bytes([row[at], row[at + 1]]).to_f32()
    }

    fn level(row: &[u8], i: usize) -> i8 {
        let (line, within) = (i / 128, i % 128);
        let byte = row[(line / 8 * 9 + 1 + line % 8) * 64 + within % 64];
        Q4_LEVELS[usize::from(if within < 64 { byte & 15 } else { byte >> 4 })]
    }

    /// Squared error with the largest as the outermost level and all others as the nearest.
    fn plain(block: &[f32]) -> f64 {
        let extreme = block.iter().copied().fold(0f32, |e, w| if w.abs() > e.abs() { w } else { e });
        let scale = f64::from(bf16::from_f32(extreme / OUTERMOST).to_f32());
        let off = |w: f32| {
            Q4_LEVELS.map(|level| (f64::from(level) * scale - f64::from(w)).abs()).into_iter().fold(f64::MAX, f64::min)
        };
        block.iter().map(|w| off(*w).powi(2)).sum()
    }

    proptest! {
        #[test]
        fn each_element_is_its_nearest_level(
            weights in prop::collection::vec(prop_oneof![-1f32..1.0, -1e-3f32..1e-3, Just(0.0), -3e38f32..3e38], 1..300),
        ) {
            let out = quantized(&weights);
            for (b, block) in weights.chunks(Q4_BLOCK).enumerate() {
                let scale = f64::from(scale(&out, b));
                let mut error = 0.0;
                for (i, w) in block.iter().enumerate() {
                    let off = |level: i8| (f64::from(level) * scale - f64::from(*w)).abs();
                    let (found, nearest) = (off(level(&out, b * Q4_BLOCK + i)), Q4_LEVELS.map(off).into_iter().fold(f64::MAX, f64::min));
                    // As near as the rounding of a quotient lets see.
                    prop_assert!(found <= nearest + 64.0 * scale.abs() * 1e-5, "element {i} of block {b}: {w} is off by {found}, could by {nearest}");
                    error += found * found;
                }
                let size: f64 = block.iter().map(|w| f64::from(*w).powi(2)).sum();
                prop_assert!(error <= plain(block) * 1.1 + size * 1e-3, "block {b}: {error:e}, {:e} without looking for a scale", plain(block));
            }
        }
    }

    /// Against the scale that makes the largest the outermost level, which needs no search, and what the module head
    /// says.
    #[test]
    fn the_scale_that_is_found_is_closer() {
        let mut random = SmallRng::seed_from_u64(7);
        let weights: Vec<f32> =
            (0..1 << 16).map(|_| (0..12).map(|_| random.random_range(-0.5..0.5f32)).sum::<f32>()).collect();
        let out = quantized(&weights);
        let (mut found, mut without, mut size) = (0.0, 0.0, 0.0);
        for (b, block) in weights.chunks(Q4_BLOCK).enumerate() {
            let scale = f64::from(scale(&out, b));
            for (i, w) in block.iter().enumerate() {
                found += (f64::from(level(&out, b * Q4_BLOCK + i)) * scale - f64::from(*w)).powi(2);
                size += f64::from(*w).powi(2);
            }
            without += plain(block);
        }
        println!("{:.5} of the sum of squares, {:.5} without looking", found / size, without / size);
        assert!(found < 0.0058 * size && found < 0.85 * without);
    }

    #[test]
    fn blocks_of_extremes_are_kept() {
        for largest in [1e-32, 1.0, 3.4e38f32] {
            let weights: Vec<f32> = (0..Q4_BLOCK).map(|i| largest * (i as f32 / 15.5 - 1.0)).collect();
            let out = quantized(&weights);
            for (i, w) in weights.iter().enumerate() {
                let kept = f32::from(level(&out, i)) * scale(&out, 0);
                assert!((kept - w).abs() <= 0.16 * largest, "{largest:e}: element {i}, {w:e}, is {kept:e}");
            }
        }
        for largest in [0.0, 1e-44, 1e-34] {
            assert!(quantized(&[largest; 70]).iter().all(|byte| *byte == 0), "{largest:e} is zero");
        }
    }

    #[test]
    fn an_infinite_element_is_named() {
        for (at, bad) in [(97, f32::NEG_INFINITY), (0, f32::NAN), (129, f32::INFINITY)] {
            let mut weights = vec![0.5; 130];
            weights[at] = bad;
            assert_eq!(row(&weights, &mut vec![0; Q4.row_bytes(130)]), Err(at));
        }
    }
}
