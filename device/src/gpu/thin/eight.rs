//! Weights in 8 bits ([`perpetua_shared::dtype::Q8`]), which are multiplied as they are: a line is a chunk, with a scale of its own.
//!
//! Activations become whole numbers, too, of 16 bits, by a scale for each 64 of them: 256 high + low, both signed bytes, which are the two terms
//! of the row. A product is exact, in 32 bits, of 64 of k; what becomes of it in f32 is its scales' product times it, added to others. What is
//! lost of an activation is at most 2^-16 of the largest of its 64.

use super::form::{CHUNK_BYTES, CHUNK_WORDS, Form};
use super::long::Units;
use super::terms::{Asked, TERMS};
use super::{Column, First};
use crate::arch::scalar::{dot_bytes, fma, low_bytes, reciprocal};
use crate::arch::{bulk, shared, warp};
use crate::block::Block;
use perpetua_shared::DType;
use perpetua_shared::dtype::Q8;

/// Bytes of a group of lines, with those of their scales.
const LINES: u32 = Q8.per_group as u32;
const GROUP_BYTES: u32 = (LINES + 1) * CHUNK_BYTES;

const _: () = assert!(Q8.elems == 64 && Q8.elems as u32 == CHUNK_BYTES, "a chunk is a line");

/// The largest of 64 activations is so many.
const LARGEST: f32 = 32512.0;

/// Added to a number between -2^22 and 2^22, rounds it to a whole one, which the low bits of the sum are; and as such, to its bits, likewise.
const SHIFT: f32 = 12_582_912.0;

/// Activations all smaller than this are zero: 1 / scale has to be a number.
const SMALLEST: u32 = 0x0d80_0000;

/// See the module head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Eight;

/// Sixteen bytes, and the scale of their line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bytes {
    bytes: [u32; 4],
    scale: f32,
}

/// The largest magnitude of eight values, as bits: those of NaN are more than any number's.
#[inline(always)]
fn largest(values: [f32; 8]) -> u32 {
    let [a, b, c, d, e, f, g, h] = values;
    let bits = |value: f32| value.to_bits() & 0x7fff_ffff;
    // Two and two: one after the other each would wait for the one before.
    let two = |one: f32, other: f32| bits(one).max(bits(other));
    two(a, b).max(two(c, d)).max(two(e, f).max(two(g, h)))
}

/// The scale of activations whose largest is this, and what they are multiplied with to be whole numbers.
#[inline(always)]
fn scale_of(largest: u32) -> [f32; 2] {
    let scale = f32::from_bits(largest) * (1.0 / LARGEST);
    // Of what is not finite the scale tells.
    let inverse = reciprocal(scale);
    [scale, if largest < SMALLEST { 0.0 } else { inverse }]
}

/// Four activations as whole numbers, by `inverse` of their scale: the high bytes and the low ones, of 256 high + low.
#[inline(always)]
fn in_bytes(values: [f32; 4], inverse: f32) -> [u32; 2] {
    // 128 more, so that what is below is from 0 to 255.
    let one = |i: usize| fma(values[i], inverse, SHIFT + 128.0).to_bits();
    let [low, high] = low_bytes([one(0), one(1), one(2), one(3)]);
    [high, low ^ 0x8080_8080]
}

/// A sum of products of bytes, to whose bits [`SHIFT`]'s have been added.
#[inline(always)]
fn whole(sum: i32) -> f32 {
    f32::from_bits(sum as u32) - SHIFT
}

impl Eight {
    /// Where element `i` of a row is: its byte, and its scale.
    #[inline(always)]
    pub(crate) fn element(i: u32) -> (u32, u32) {
        let [bytes, scale] = Self::place(i / CHUNK_BYTES);
        (bytes + i % CHUNK_BYTES, scale)
    }
}

impl Form for Eight {
    const DTYPE: u16 = DType::Q8 as u16;
    const CHUNK: u32 = 64;
    const LONGEST: u32 = 8192;
    const TOGETHER: bool = true;
    /// Of its bytes, and of its scale.
    type Place = [u32; 2];
    type Weights = Bytes;
    const NO_WEIGHTS: Bytes = Bytes { bytes: [0; 4], scale: 0.0 };
    type Values = (u32, u32, f32);
    type Sum = f32;
    const ZERO: f32 = 0.0;

    #[inline(always)]
    fn row_bytes(k: u32) -> u32 {
        let lines = k.div_ceil(CHUNK_BYTES);
        (lines + lines.div_ceil(LINES)) * CHUNK_BYTES
    }

    #[inline(always)]
    fn swap(k: u32) -> u32 {
        // The last of an odd number of lines has none to change with.
        let (lines, all) = (k / CHUNK_BYTES, Self::row_bytes(k) / CHUNK_BYTES);
        u32::from((lines | all).is_multiple_of(2))
    }

    #[inline(always)]
    fn words(k: u32) -> u32 {
        (k / 2 + k / CHUNK_BYTES).next_multiple_of(4)
    }

    #[inline(always)]
    fn norm_at(unit: u32, k: u32) -> (u32, u32) {
        let first = TERMS + Self::words(k) + 4 * unit;
        (first, first + k / 2)
    }

    #[inline(always)]
    fn has_room_for_norm(k: u32, bytes: u32) -> bool {
        TERMS + Self::words(k) + k * bytes / 4 <= shared::KEPT
    }

    #[inline(always)]
    fn place(chunk: u32) -> [u32; 2] {
        let (group, line) = (chunk / LINES, chunk % LINES);
        [(chunk + group + 1) * CHUNK_BYTES, group * GROUP_BYTES + line * 4]
    }

    #[inline(always)]
    unsafe fn load(at: u32, place: [u32; 2]) -> Bytes {
        // Rows begin on a line, of which a lane's are a part.
        let row = at / CHUNK_BYTES * CHUNK_BYTES;
        // SAFETY: the caller's promise.
        unsafe { Bytes { bytes: bulk::load16(at + place[0]), scale: f32::from_bits(bulk::load4(row + place[1])) } }
    }

    #[inline(always)]
    unsafe fn values(column: &Column, chunk: u32, chunks: u32) -> (u32, u32, f32) {
        let is_there = chunk < chunks;
        let chunk = if is_there { chunk } else { 0 };
        // The scale is that of the chunk which the lane's own row has.
        let scale = TERMS + 2 * CHUNK_WORDS * chunks + (chunk ^ column.own);
        // SAFETY: the caller's promise.
        let ([first, second], scale) = unsafe {
            (shared::load8(column.at + (chunk ^ column.parity) * CHUNK_WORDS), f32::from_bits(shared::load(scale)))
        };
        (if is_there { first } else { 0 }, if is_there { second } else { 0 }, if is_there { scale } else { 0.0 })
    }

    #[inline(always)]
    unsafe fn add(sum: f32, weights: Bytes, (first, second, scale): (u32, u32, f32)) -> f32 {
        // SAFETY: the caller's promise.
        let sums = unsafe { warp::mma_bytes(weights.bytes, [first, second], [SHIFT.to_bits() as i32, 0, 0, 0]) };
        fma(whole(sums[0] + sums[3]), weights.scale * scale, sum)
    }

    #[inline(always)]
    unsafe fn total([one, other]: [f32; 2], block: &Block) -> f32 {
        let own = (one + other) * if block.lane() % 4 < 2 { 256.0 } else { 1.0 };
        // SAFETY: the caller's promise.
        own + f32::from_bits(unsafe { warp::shuffle_xor(own.to_bits(), 2) })
    }

    #[inline(always)]
    unsafe fn put(unit: u32, is_there: bool, values: [f32; 8], k: u32) {
        // SAFETY: the caller's promise; eight neighbours have a chunk, whose number of units is one of eights.
        unsafe {
            let mut most = largest(values);
            most = most.max(warp::shuffle_xor(most, 1));
            most = most.max(warp::shuffle_xor(most, 2));
            most = most.max(warp::shuffle_xor(most, 4));
            let [scale, inverse] = scale_of(most);
            let [a, b, c, d, e, f, g, h] = values;
            let ([high, next_high], [low, next_low]) = {
                let ([h0, l0], [h1, l1]) = (in_bytes([a, b, c, d], inverse), in_bytes([e, f, g, h], inverse));
                ([h0, h1], [l0, l1])
            };
            if is_there {
                // Of each four words the first and the third come first, as a product takes them.
                let at = TERMS + unit / 2 * 4 + unit % 2;
                shared::store(at, high);
                shared::store(at + 2, next_high);
                shared::store(at + k / 4, low);
                shared::store(at + k / 4 + 2, next_low);
                if unit.is_multiple_of(8) {
                    shared::store(TERMS + k / 2 + unit / 8, scale.to_bits());
                }
            }
        }
    }
}

/// A unit of the row, as whole numbers of a scale.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numbers {
    high: [u32; 4],
    low: [u32; 4],
    scale: f32,
}

impl Units for Eight {
    const UNIT: u32 = 16;
    const MOST: u32 = 4;
    const MOST_OF_TWO: u32 = 3;
    type Asked = (Asked, Asked);
    type Row = Numbers;
    const NOTHING: Numbers = Numbers { high: [0; 4], low: [0; 4], scale: 0.0 };

    #[inline(always)]
    unsafe fn ask(row: &First<'_>, unit: u32) -> (Asked, Asked) {
        // SAFETY: the caller's promise.
        unsafe { (row.ask(2 * unit), row.ask(2 * unit + 1)) }
    }

    #[inline(always)]
    fn unit(row: &First<'_>, asked: (Asked, Asked)) -> Numbers {
        let (first, second) = (row.values(asked.0), row.values(asked.1));
        let [scale, inverse] = scale_of(largest(first).max(largest(second)));
        let [a, b, c, d, e, f, g, h] = first;
        let [i, j, k, l, m, n, o, p] = second;
        let in_bytes = |four: [f32; 4]| in_bytes(four, inverse);
        let [s, t, u, v] =
            [in_bytes([a, b, c, d]), in_bytes([e, f, g, h]), in_bytes([i, j, k, l]), in_bytes([m, n, o, p])];
        Numbers { high: [s[0], t[0], u[0], v[0]], low: [s[1], t[1], u[1], v[1]], scale }
    }

    #[inline(always)]
    unsafe fn weights(at: u32, unit: u32) -> Bytes {
        // SAFETY: the caller's promise.
        unsafe { Eight::load(at + unit % 4 * 16, Eight::place(unit / 4)) }
    }

    #[inline(always)]
    fn multiply(sums: &mut [f32; 4], i: usize, weights: Bytes, row: Numbers) {
        let (mut high, mut low) = (SHIFT.to_bits() as i32, SHIFT.to_bits() as i32);
        for j in 0..4 {
            high = dot_bytes(weights.bytes[j], row.high[j], high);
            low = dot_bytes(weights.bytes[j], row.low[j], low);
        }
        sums[i % 4] = fma(fma(whole(high), 256.0, whole(low)), weights.scale * row.scale, sums[i % 4]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_where_their_type_says() {
        for k in (64..20_000).step_by(64) {
            assert_eq!(Eight::row_bytes(k) as usize, Q8.row_bytes(k as usize));
            let chunks = k / CHUNK_BYTES;
            assert_eq!(Eight::place(chunks - 1).map(|at| at as usize), Q8.at(chunks as usize - 1), "of {k} elements");
            assert!(Eight::swap(k) == 0 || chunks.is_multiple_of(2), "all chunks of {k} elements are pairs");
        }
    }

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
