//! Weights in 8 bits ([`perpetua_shared::dtype::Q8`]), which are multiplied as they are, with activations that are
//! [whole numbers](super::whole): a line is a chunk, with a scale of its own. A product is exact, in 32 bits, of 64 of
//! k; what becomes of it in f32 is its scales' product times it, added to others.

use super::super::Q8;
use super::super::packed::{Eight, LINE, Packed};
use super::super::tiles::ZEROS;
use super::afar::{Afar, Numbered, made_numbers, make_numbers};
use super::form::{CHUNK_BYTES, CHUNK_WORDS, Form};
use super::long::Units;
use super::terms::{Asked, TERMS};
use super::whole::{self, SHIFT, in_bytes, largest, largest_of, scale_of, whole};
use super::{Chunk, Column, First};
use crate::arch::scalar::{dot_bytes, fma};
use crate::arch::{bulk, memory, shared, warp};
use crate::block::Block;

const _: () = assert!(LINE == CHUNK_BYTES, "a chunk is a line");

/// Sixteen bytes, and the scale of their line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bytes {
    bytes: [u32; 4],
    scale: f32,
}

impl Form for Eight {
    const DTYPE: u16 = Q8;
    const CHUNK: u32 = 64;
    const ROW_MULTIPLE: u32 = 64;
    const CHUNK_TERMS: u32 = 2 * CHUNK_WORDS + 1;
    const LONGEST: u32 = 8192;
    const TOGETHER: bool = true;
    /// Of its bytes, and of its scale.
    type Place = [u32; 2];
    type Weights = Bytes;
    const NO_WEIGHTS: Bytes = Bytes { bytes: [0; 4], scale: 0.0 };
    type Values = ((u32, u32), f32);
    type Sum = f32;
    const ZERO: f32 = 0.0;

    fn row_bytes(k: u32) -> u32 {
        <Eight as Packed>::row_bytes(k)
    }

    fn swap(k: u32) -> u32 {
        whole::swap(k / CHUNK_BYTES, <Eight as Packed>::row_bytes(k))
    }

    fn words(k: u32) -> u32 {
        (k / 2 + k / CHUNK_BYTES).next_multiple_of(4)
    }

    fn place(chunk: u32) -> [u32; 2] {
        Eight::line(chunk)
    }

    unsafe fn load(at: u32, place: [u32; 2]) -> Bytes {
        // Rows begin on a line, of which a lane's are a part.
        let row = at / CHUNK_BYTES * CHUNK_BYTES;
        // SAFETY: the caller's promise.
        unsafe { Bytes { bytes: bulk::load16(at + place[0]), scale: f32::from_bits(bulk::load4(row + place[1])) } }
    }

    unsafe fn values(column: &Column, chunk: &Chunk, chunks: u32) -> Self::Values {
        let is_there = chunk.number < chunks;
        let at = if is_there { column.at + chunk.column * CHUNK_WORDS } else { ZEROS };
        // The scale is that of the chunk which the lane's own row has.
        let scale = if is_there { TERMS + 2 * CHUNK_WORDS * chunks + chunk.own } else { ZEROS };
        // SAFETY: the caller's promise.
        unsafe { (shared::load8(at).into(), f32::from_bits(shared::load(scale))) }
    }

    unsafe fn add(sum: f32, weights: Bytes, (row, scale): Self::Values) -> f32 {
        // SAFETY: the caller's promise.
        let sums = unsafe { warp::mma_bytes(weights.bytes, row.into(), [SHIFT.to_bits() as i32, 0, 0, 0]) };
        fma(whole(sums[0] + sums[3]), weights.scale * scale, sum)
    }

    unsafe fn total(sums: [f32; 2], block: &Block) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { whole::total(sums, block) }
    }

    unsafe fn put(unit: u32, is_there: bool, values: [f32; 8], k: u32) {
        // SAFETY: the caller's promise; eight neighbours have a chunk, whose number of units is one of eights.
        unsafe {
            let [scale, inverse] = scale_of(largest_of::<8>(values));
            let [a, b, c, d, e, f, g, h] = values;
            let ([high, low], [next_high, next_low]) =
                (in_bytes([a, b, c, d], inverse), in_bytes([e, f, g, h], inverse));
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

impl Numbers {
    /// Those of sixteen elements.
    fn of(first: [f32; 8], second: [f32; 8]) -> Numbers {
        let [scale, inverse] = scale_of(largest(first).max(largest(second)));
        let [a, b, c, d, e, f, g, h] = first;
        let [i, j, k, l, m, n, o, p] = second;
        let in_bytes = |four: [f32; 4]| in_bytes(four, inverse);
        let [s, t, u, v] =
            [in_bytes([a, b, c, d]), in_bytes([e, f, g, h]), in_bytes([i, j, k, l]), in_bytes([m, n, o, p])];
        Numbers { high: [s[0], t[0], u[0], v[0]], low: [s[1], t[1], u[1], v[1]], scale }
    }
}

impl Units for Eight {
    const UNIT: u32 = 16;
    const LONG_ROW_MULTIPLE: u32 = 16;
    const MOST: u32 = 4;
    const MOST_OF_TWO: u32 = 3;
    type Asked = (Asked, Asked);
    type Row = Numbers;
    const NOTHING: Numbers = Numbers { high: [0; 4], low: [0; 4], scale: 0.0 };

    unsafe fn ask(row: &First<'_>, unit: u32) -> (Asked, Asked) {
        // SAFETY: the caller's promise.
        unsafe { (row.ask(2 * unit), row.ask(2 * unit + 1)) }
    }

    fn unit(row: &First<'_>, asked: (Asked, Asked)) -> Numbers {
        Numbers::of(row.values(asked.0), row.values(asked.1))
    }

    unsafe fn weights(at: u32, unit: u32) -> Bytes {
        // SAFETY: the caller's promise.
        unsafe { Eight::load(at + unit % 4 * 16, Eight::place(unit / 4)) }
    }

    fn multiply(sums: &mut [f32; 4], i: usize, weights: Bytes, row: Numbers) {
        let (mut high, mut low) = (SHIFT.to_bits() as i32, SHIFT.to_bits() as i32);
        for j in 0..4 {
            high = dot_bytes(weights.bytes[j], row.high[j], high);
            low = dot_bytes(weights.bytes[j], row.low[j], low);
        }
        sums[i % 4] = fma(fma(whole(high), 256.0, whole(low)), weights.scale * row.scale, sums[i % 4]);
    }
}

impl Afar for Eight {
    const AT_ONCE: u32 = 4;
    const FILLED: u32 = 16;
    type Fetched = Bytes;
    const IS_MADE: bool = true;

    unsafe fn fetch(row: *const u8, unit: u32) -> Bytes {
        let [bytes, scale] = Eight::line(unit / 4);
        // SAFETY: the caller's promise.
        unsafe {
            Bytes {
                bytes: memory::load16_stream(row.wrapping_add((bytes + unit % 4 * 16) as usize)),
                scale: memory::load(row.wrapping_add(scale as usize).cast()),
            }
        }
    }

    fn fetched((): (), _: u32, fetched: Bytes) -> Bytes {
        fetched
    }

    unsafe fn make(unit: u32, k: u32) {
        // SAFETY: the caller's promise.
        unsafe { make_numbers::<Eight>(unit, k) }
    }

    unsafe fn made(unit: u32) -> Numbers {
        // SAFETY: the caller's promise.
        unsafe { made_numbers::<Eight>(unit) }
    }
}

/// High bytes and low ones.
impl Numbered for Eight {
    const FOURS: u32 = 2;

    fn of([first, second, ..]: [[f32; 8]; 4]) -> Numbers {
        Numbers::of(first, second)
    }

    fn in_fours(row: Numbers) -> ([[u32; 4]; 5], f32) {
        ([row.high, row.low, [0; 4], [0; 4], [0; 4]], row.scale)
    }

    fn of_fours([high, low, ..]: [[u32; 4]; 5], scale: f32) -> Numbers {
        Numbers { high, low, scale }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swapped_lines_are_pairs() {
        for k in (64..20_000).step_by(64) {
            assert!(Eight::swap(k) == 0 || (k / 64).is_multiple_of(2), "all chunks of {k} elements are pairs");
        }
    }
}
