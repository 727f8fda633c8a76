//! Activations as products of bytes take them: whole numbers of 16 bits, by a scale for so many of them: 256 high +
//! low, both signed bytes, which are the two terms of the row. What is lost of one is at most 2^-16 of the largest of
//! those that share its scale.

use super::super::packed::LINE;
use crate::arch::scalar::{fma, low_bytes, reciprocal};
use crate::arch::warp;
use crate::block::Block;

/// The largest is so many.
const LARGEST: f32 = 32512.0;

/// Added to a number between -2^22 and 2^22, rounds it to a whole one, which the low bits of the sum are; and as such,
/// to its bits, likewise.
pub(super) const SHIFT: f32 = 12_582_912.0;

/// Activations all smaller than this are zero: 1 / scale has to be a number.
const SMALLEST: u32 = 0x0d80_0000;

/// The largest magnitude of eight values, as bits: those of NaN are more than any number's.
pub(super) fn largest(values: [f32; 8]) -> u32 {
    let [a, b, c, d, e, f, g, h] = values;
    let bits = |value: f32| value.to_bits() & 0x7fff_ffff;
    // Two and two: one after the other each would wait for the one before.
    let two = |one: f32, other: f32| bits(one).max(bits(other));
    two(a, b).max(two(c, d)).max(two(e, f).max(two(g, h)))
}

/// That of the values of as many `LANES`, a power of two.
///
/// # Safety
/// Every lane of the warp makes this same call.
pub(super) unsafe fn largest_of<const LANES: u32>(values: [f32; 8]) -> u32 {
    let mut most = largest(values);
    // SAFETY: the caller's promise.
    unsafe {
        most = most.max(warp::shuffle_xor(most, 1));
        most = most.max(warp::shuffle_xor(most, 2));
        most = most.max(warp::shuffle_xor(most, 4));
        if LANES == 16 {
            most = most.max(warp::shuffle_xor(most, 8));
        }
    }
    most
}

/// The scale of activations whose largest is this, and what they are multiplied with to be whole numbers.
pub(super) fn scale_of(largest: u32) -> [f32; 2] {
    let scale = f32::from_bits(largest) * (1.0 / LARGEST);
    // Of what is not finite the scale tells.
    let inverse = reciprocal(scale);
    [scale, if largest < SMALLEST { 0.0 } else { inverse }]
}

/// Four activations as whole numbers, by `inverse` of their scale: the high bytes and the low ones, of 256 high + low.
pub(super) fn in_bytes(values: [f32; 4], inverse: f32) -> [u32; 2] {
    // 128 more, so that what is below is from 0 to 255.
    let one = |i: usize| fma(values[i], inverse, SHIFT + 128.0).to_bits();
    let [low, high] = low_bytes([one(0), one(1), one(2), one(3)]);
    [high, low ^ 0x8080_8080]
}

/// A sum of products of bytes, to whose bits [`SHIFT`]'s have been added.
pub(super) fn whole(sum: i32) -> f32 {
    f32::from_bits(sum as u32) - SHIFT
}

/// [`Form::swap`](super::Form::swap) for rows of so many bytes, in so many lines of elements: the last of an odd number
/// of these has none to change with.
pub(super) fn swap(lines: u32, row_bytes: u32) -> u32 {
    u32::from((lines | (row_bytes / LINE)).is_multiple_of(2))
}

/// [`Form::total`](super::Form::total), where the terms are high bytes and low ones.
///
/// # Safety
/// As there.
pub(super) unsafe fn total([one, other]: [f32; 2], block: &Block) -> f32 {
    let own = (one + other) * if block.lane() % 4 < 2 { 256.0 } else { 1.0 };
    // SAFETY: the caller's promise.
    own + f32::from_bits(unsafe { warp::shuffle_xor(own.to_bits(), 2) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activations_are_whole_numbers_of_their_scale() {
        for values in [[1.0f32, -1.0, 0.5, 1e-4], [3e-9, 2e-9, -7e-10, 0.0], [0.0; 4], [-3e38, 1e38, 2.0, -1e37]] {
            let [scale, inverse] = scale_of(largest([values, values].concat().try_into().expect("eight")));
            let [high, low] = in_bytes(values, inverse).map(u32::to_le_bytes);
            for (i, value) in values.into_iter().enumerate() {
                let number = 256 * i32::from(high[i] as i8) + i32::from(low[i] as i8);
                let off = f64::from(value) - f64::from(number) * f64::from(scale);
                assert!(off.abs() <= 0.51 * f64::from(scale), "{value} is {number} of {scale}");
            }
        }
        let with = |value: f32| scale_of(largest([1.0, 2.0, 3.0, value, -4.0, 0.0, 5.0, 6.0]))[0];
        assert!(with(f32::NAN).is_nan() && with(f32::NEG_INFINITY).is_infinite());
    }
}
