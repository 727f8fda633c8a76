//! Weights in 4 bits, as [`perpetua_shared::dtype::Q4`] has them, whose levels are multiplied as bytes, with
//! activations that are [whole numbers](super::whole), a scale for a line's.
//!
//! ```text
//! line      64 bytes, 128 of k: in their low halves those of blocks 0 and 1, in the high ones those of 2 and 3, each with a scale
//! lane t    eight bytes of the first half of a line, eight of the second: the eighths t of four blocks
//! A         words 0 and 2 in row g a block's, words 1 and 3 in row g + 8 the next one's: a product of low halves, one of high ones
//! ```
//! So what a lane finds in D is of one block each, and it scales every one of the four. A lane's bytes are not sixteen
//! in a row, as with other forms; of eight bytes a lane half a warp, four rows, is served at a time, and these find
//! different banks: an odd row's line is the other one of a pair, as in other forms, and of every four rows two begin
//! with the second half of a line.
//!
//! Levels come out of their numbers raised ([by 64](super::super::packed::InTable), or 8) and in the order of
//! [`Numbering::raised`], which is that of the activations then. So a block's sum has so many times its activations too
//! much, and begins with as much less: what the same product makes of rows of nothing but -64, once for all rows.

use super::super::packed::{FOUR_ELEMS, Four, Fours, LINE, Numbering, Packed};
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

const _: () = assert!(LINE == CHUNK_BYTES && FOUR_ELEMS == 128, "a chunk is a line");

/// Half a line.
const HALF: u32 = LINE / 2;

/// What sixteen bytes are, as a product takes them: the levels in their low halves, those in their high ones, and the
/// scales of their blocks, by two. Bytes that wait for the row in registers would be half as many, and have this still
/// to do once it is there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Levels {
    low: [u32; 4],
    high: [u32; 4],
    scales: (u32, u32),
}

impl Levels {
    /// Those of eight bytes and eight more.
    fn of<N: Numbering>(table: N::Table, first: (u32, u32), second: (u32, u32), scales: (u32, u32)) -> Levels {
        let (((a, c), (e, g)), ((b, d), (f, h))) = (N::raised(table, first), N::raised(table, second));
        Levels { low: [a, b, c, d], high: [e, f, g, h], scales }
    }
}

impl Levels {
    /// Those of sixteen bytes in a row, unit `unit`, whose line has these scales: each of two words begins with the
    /// unit's.
    fn of_unit<N: Numbering>(table: N::Table, unit: u32, ([a, b, c, d], [s, t]): ([u32; 4], [u32; 2])) -> Levels {
        let shift = unit % 4 / 2 * 16;
        Levels::of::<N>(table, (a, b), (c, d), (s >> shift, t >> shift))
    }
}

/// The scales that a word is.
fn scales_of(word: u32) -> (f32, f32) {
    (Four::scale(word, 0), Four::scale(word, 2))
}

/// Words of a term of a row in so many chunks. They come in pairs: the low halves of both, then the high ones.
const fn term_words(chunks: u32) -> u32 {
    2 * CHUNK_WORDS * chunks.next_multiple_of(2)
}

/// Where chunk `chunk` is in that; what belongs to the high halves is [two chunks'](CHUNK_WORDS) words further on.
fn chunk_at(chunk: u32) -> u32 {
    chunk / 2 * 4 * CHUNK_WORDS + chunk % 2 * CHUNK_WORDS
}

/// Four times as much less as levels are raised by.
const fn less<N: Numbering>() -> u32 {
    (N::RAISED as u8).wrapping_neg() as u32 * 0x0101_0101
}

/// Eight activations as bytes in the order of [`Numbering::raised`]: high ones and low ones.
fn eight_in_bytes<N: Numbering>(eight: [f32; 8], inverse: f32) -> [[u32; 2]; 2] {
    let [one, other] = N::in_order(eight);
    [in_bytes(one, inverse), in_bytes(other, inverse)]
}

impl<N: Numbering> Form for Fours<N> {
    const DTYPE: u16 = N::DTYPE;
    const CHUNK: u32 = FOUR_ELEMS;
    const ROW_MULTIPLE: u32 = FOUR_ELEMS;
    // Of an odd number of them there is room for one more.
    const CHUNK_TERMS: u32 = 4 * CHUNK_WORDS + 1;
    const LONGEST: u32 = 8192;
    const TOGETHER: bool = true;
    /// Of its bytes, and of its scales.
    type Place = [u32; 2];
    type Weights = Levels;
    const NO_WEIGHTS: Levels = Levels { low: [0; 4], high: [0; 4], scales: (0, 0) };
    /// Those of the low halves, of the high ones, what the blocks' sums begin with, and the scale.
    type Values = ((u32, u32), (u32, u32), (i32, i32), (i32, i32), f32);
    type Sum = f32;
    const ZERO: f32 = 0.0;

    fn row_bytes(k: u32) -> u32 {
        <Fours<N> as Packed>::row_bytes(k)
    }

    fn swap(k: u32) -> u32 {
        whole::swap(k / FOUR_ELEMS, <Fours<N> as Packed>::row_bytes(k))
    }

    fn words(k: u32) -> u32 {
        (2 * term_words(k / FOUR_ELEMS) + k / FOUR_ELEMS).next_multiple_of(4)
    }

    fn place(chunk: u32) -> [u32; 2] {
        Self::line(chunk)
    }

    fn lane_at(block: &Block) -> u32 {
        let (g, t) = (block.lane() / 4, block.lane() % 4);
        g / 2 % 2 * HALF + 8 * t
    }

    fn start(k: u32, term: u32, words: u32, t: u32) -> u32 {
        term * term_words(k / FOUR_ELEMS) + 8 * words + 2 * t
    }

    unsafe fn load(at: u32, place: [u32; 2]) -> Levels {
        // Rows begin on a line, of which a lane's are a part.
        let row = at / CHUNK_BYTES * CHUNK_BYTES;
        // SAFETY: the caller's promise.
        let ([a, b], [c, d], [s, t]) =
            unsafe { (bulk::load8(at + place[0]), bulk::load8((at ^ HALF) + place[0]), bulk::load8(row + place[1])) };
        let begins_second = at & HALF != 0;
        let in_order = |one: u32, other: u32| if begins_second { (other, one) } else { (one, other) };
        let ((a, c), (b, d)) = (in_order(a, c), in_order(b, d));
        Levels::of::<N>(N::OWN, (a, b), (c, d), (s, t))
    }

    unsafe fn values(column: &Column, chunk: &Chunk, chunks: u32) -> Self::Values {
        let is_there = chunk.number < chunks;
        let at = column.at + chunk_at(if is_there { chunk.column } else { column.parity });
        // The scale is that of the chunk which the lane's own row has.
        let scale = if is_there { TERMS + 2 * term_words(chunks) + chunk.own } else { ZEROS };
        const BEGIN: [i32; 4] = [SHIFT.to_bits() as i32, 0, 0, SHIFT.to_bits() as i32];
        // SAFETY: the caller's promise; a product of rows that are all alike has for each what is asked for.
        unsafe {
            let (low, high) = (shared::load8(at), shared::load8(at + 2 * CHUNK_WORDS));
            let scale = f32::from_bits(shared::load(scale));
            let rows = [const { less::<N>() }; 4];
            let less = (warp::mma_bytes(rows, low, BEGIN), warp::mma_bytes(rows, high, BEGIN));
            let begin = ((less.0[0], less.0[3]), (less.1[0], less.1[3]));
            // Of a chunk that is not there what is multiplied is nothing, whatever the numbers are.
            (low.into(), high.into(), begin.0, begin.1, scale)
        }
    }

    unsafe fn add(sum: f32, weights: Levels, (a, b, of_low, of_high, scale): Self::Values) -> f32 {
        // SAFETY: the caller's promise.
        let (low, high) = unsafe {
            (
                warp::mma_bytes(weights.low, a.into(), [of_low.0, 0, 0, of_low.1]),
                warp::mma_bytes(weights.high, b.into(), [of_high.0, 0, 0, of_high.1]),
            )
        };
        let ((s0, s1), (s2, s3)) = (scales_of(weights.scales.0), scales_of(weights.scales.1));
        let of_low = fma(whole(low[3]), s1, whole(low[0]) * s0);
        let of_high = fma(whole(high[3]), s3, whole(high[0]) * s2);
        fma(of_low + of_high, scale, sum)
    }

    unsafe fn total(sums: [f32; 2], block: &Block) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { whole::total(sums, block) }
    }

    unsafe fn put(unit: u32, is_there: bool, values: [f32; 8], k: u32) {
        // SAFETY: the caller's promise; sixteen neighbours have a chunk, whose number of units is one of sixteens.
        unsafe {
            let [scale, inverse] = scale_of(largest_of::<16>(values));
            let [[high, low], [next_high, next_low]] = eight_in_bytes::<N>(values, inverse);
            if is_there {
                let (within, term) = (unit % 16, term_words(k / FOUR_ELEMS));
                let at = TERMS + chunk_at(unit / 16) + within / 8 * 2 * CHUNK_WORDS + within % 8 * 2;
                shared::store(at, high);
                shared::store(at + 1, next_high);
                shared::store(at + term, low);
                shared::store(at + term + 1, next_low);
                if unit.is_multiple_of(16) {
                    let chunks = k / FOUR_ELEMS;
                    shared::store(TERMS + 2 * term_words(chunks) + unit / 16, scale.to_bits());
                }
            }
        }
    }
}

/// A unit of the row, as whole numbers of a scale: sixteen elements, and the sixteen that are in the same bytes' high
/// halves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numbers {
    high: [u32; 8],
    low: [u32; 8],
    /// What the sums of either sixteen begin with.
    high_begins: (i32, i32),
    low_begins: (i32, i32),
    scale: f32,
}

impl Numbers {
    /// Those of sixteen elements, and of the sixteen that are in the same bytes' high halves.
    fn of<N: Numbering>((a, b): ([f32; 8], [f32; 8]), (c, d): ([f32; 8], [f32; 8])) -> Numbers {
        let [scale, inverse] = scale_of(largest(a).max(largest(b)).max(largest(c).max(largest(d))));
        let eight = |values: [f32; 8]| eight_in_bytes::<N>(values, inverse);
        let ([a, b], [c, d], [e, f], [g, h]) = (eight(a), eight(b), eight(c), eight(d));
        let begins = |at: usize| {
            let less = |word: u32, sum: i32| dot_bytes(const { less::<N>() }, word, sum);
            let four = |a: u32, b: u32, c: u32, d: u32| less(a, less(b, less(c, less(d, SHIFT.to_bits() as i32))));
            (four(a[at], b[at], c[at], d[at]), four(e[at], f[at], g[at], h[at]))
        };
        Numbers {
            high: [a[0], b[0], c[0], d[0], e[0], f[0], g[0], h[0]],
            low: [a[1], b[1], c[1], d[1], e[1], f[1], g[1], h[1]],
            high_begins: begins(0),
            low_begins: begins(1),
            scale,
        }
    }
}

impl<N: Numbering> Units for Fours<N> {
    const UNIT: u32 = 32;
    const LONG_ROW_MULTIPLE: u32 = FOUR_ELEMS;
    const MOST: u32 = 2;
    const MOST_OF_TWO: u32 = 2;
    type Asked = ((Asked, Asked), (Asked, Asked));
    type Row = Numbers;
    const NOTHING: Numbers = Numbers { high: [0; 8], low: [0; 8], high_begins: (0, 0), low_begins: (0, 0), scale: 0.0 };

    unsafe fn ask(row: &First<'_>, unit: u32) -> Self::Asked {
        let eight = unit / 4 * 16 + unit % 4 * 2;
        // SAFETY: the caller's promise.
        unsafe { ((row.ask(eight), row.ask(eight + 1)), (row.ask(eight + 8), row.ask(eight + 9))) }
    }

    fn unit(row: &First<'_>, (low, high): Self::Asked) -> Numbers {
        Numbers::of::<N>((row.values(low.0), row.values(low.1)), (row.values(high.0), row.values(high.1)))
    }

    /// Here of sixteen bytes in a row; of their scales each is the first of its two.
    unsafe fn weights(at: u32, unit: u32) -> Levels {
        let [bytes, scales] = Self::line(unit / 4);
        let quarter = unit % 4;
        // SAFETY: the caller's promise.
        let fetched = unsafe { (bulk::load16(at + bytes + quarter * 16), bulk::load8(at + scales)) };
        Levels::of_unit::<N>(N::OWN, unit, fetched)
    }

    fn multiply(sums: &mut [f32; 4], i: usize, weights: Levels, row: Numbers) {
        let [a, b, c, d] = weights.low;
        let [e, f, g, h] = weights.high;
        // Those of eight elements follow each other in the row, and take turns in a product of the tensor cores.
        let bytes = [a, c, b, d, e, g, f, h];
        let (mut high, mut low) = ([row.high_begins.0, row.high_begins.1], [row.low_begins.0, row.low_begins.1]);
        for j in 0..8 {
            high[j / 4] = dot_bytes(bytes[j], row.high[j], high[j / 4]);
            low[j / 4] = dot_bytes(bytes[j], row.low[j], low[j / 4]);
        }
        let of = |half: usize| fma(whole(high[half]), 256.0, whole(low[half]));
        let scale = |word: u32| Self::scale(word, 0) * row.scale;
        sums[i % 2] = fma(of(0), scale(weights.scales.0), sums[i % 2]);
        sums[2 + i % 2] = fma(of(1), scale(weights.scales.1), sums[2 + i % 2]);
    }
}

impl<N: Numbering> Afar for Fours<N> {
    const AT_ONCE: u32 = 2;
    const FILLED: u32 = FOUR_ELEMS;
    /// Bytes, and their line's scales.
    type Fetched = ([u32; 4], [u32; 2]);
    const IS_MADE: bool = true;

    unsafe fn fetch(row: *const u8, unit: u32) -> Self::Fetched {
        let [bytes, scales] = Self::line(unit / 4);
        // SAFETY: the caller's promise; a line's scales are eight bytes, and on as many.
        unsafe {
            let scales: u64 = memory::load(row.wrapping_add(scales as usize).cast());
            let bytes = memory::load16_stream(row.wrapping_add((bytes + unit % 4 * 16) as usize));
            (bytes, [scales as u32, (scales >> 32) as u32])
        }
    }

    fn fetched(table: N::Table, unit: u32, fetched: Self::Fetched) -> Levels {
        Levels::of_unit::<N>(table, unit, fetched)
    }

    unsafe fn make(unit: u32, k: u32) {
        // SAFETY: the caller's promise.
        unsafe { make_numbers::<Self>(unit, k) }
    }

    unsafe fn made(unit: u32) -> Numbers {
        // SAFETY: the caller's promise.
        unsafe { made_numbers::<Self>(unit) }
    }
}

/// High bytes, low ones, and what sums begin with.
impl<N: Numbering> Numbered for Fours<N> {
    const FOURS: u32 = 5;

    fn of([a, b, c, d]: [[f32; 8]; 4]) -> Numbers {
        Numbers::of::<N>((a, b), (c, d))
    }

    fn in_fours(row: Numbers) -> ([[u32; 4]; 5], f32) {
        let ([a, b, c, d, e, f, g, h], [i, j, k, l, m, n, o, p]) = (row.high, row.low);
        let ((s, t), (u, v)) = (row.high_begins, row.low_begins);
        let begins = [s as u32, t as u32, u as u32, v as u32];
        ([[a, b, c, d], [e, f, g, h], [i, j, k, l], [m, n, o, p], begins], row.scale)
    }

    fn of_fours([one, two, three, four, begins]: [[u32; 4]; 5], scale: f32) -> Numbers {
        let ([a, b, c, d], [e, f, g, h], [i, j, k, l], [m, n, o, p]) = (one, two, three, four);
        let [s, t, u, v] = begins;
        Numbers {
            high: [a, b, c, d, e, f, g, h],
            low: [i, j, k, l, m, n, o, p],
            high_begins: (s as i32, t as i32),
            low_begins: (u as i32, v as i32),
            scale,
        }
    }
}
