//! The forms in which rows of weights come, as tensor cores take them: sixteen bytes a lane in each, as they lie.

use super::super::BF16;
use super::super::packed::LookedUp;
use super::super::tiles::ZEROS;
use super::terms::put_terms;
use super::{Chunk, Column};
use crate::arch::{bulk, shared, warp};
use crate::block::Block;
use crate::kernels::MAX_NORMED;
use core::fmt::Debug;

/// Bytes of a chunk of a row, and words of it in a term of the activations.
pub(super) const CHUNK_BYTES: u32 = 64;
pub(super) const CHUNK_WORDS: u32 = 16;

/// A form of weights, and of the activations that they are multiplied with.
pub(crate) trait Form: Copy + Debug {
    /// The weights' type.
    const DTYPE: u16;

    /// Elements of a [chunk](CHUNK_BYTES), and what a row has a multiple of.
    const CHUNK: u32;
    const ROW_MULTIPLE: u32;

    /// Words of a chunk's terms, with a scale.
    const CHUNK_TERMS: u32;

    /// The longest row whose terms have room.
    const LONGEST: u32;

    /// Whether [`put`](Form::put) is something that a warp does together.
    const TOGETHER: bool;

    /// Where a chunk is in a row.
    type Place: Copy;

    /// What a lane has of a chunk of its row.
    type Weights: Copy + Debug;
    const NO_WEIGHTS: Self::Weights;

    /// What a lane has of the activations of a chunk: words by themselves, since two in an array go from function to
    /// function as one of 64 bits.
    type Values: Copy;

    /// Products that are being added up.
    type Sum: Copy;
    const ZERO: Self::Sum;

    /// Bytes of a row of `k`.
    fn row_bytes(k: u32) -> u32;

    /// 1 where rows of `k` are a multiple of 128 bytes apart, so that of two neighbours one has to be at the other half
    /// of a pair of chunks; else 0.
    fn swap(k: u32) -> u32;

    /// Words that the terms of a row of `k` take, a multiple of four.
    fn words(k: u32) -> u32;

    /// Where chunk `chunk` is.
    fn place(chunk: u32) -> Self::Place;

    /// From which byte of a chunk on a lane takes its own.
    fn lane_at(block: &Block) -> u32 {
        16 * (block.lane() % 4)
    }

    /// The word, in the terms of a row of `k`, at which term `term` of chunk 0 begins for lane t: as words 0 and 2 of a
    /// lane's weights are multiplied, or, where `words` is 1, 1 and 3.
    fn start(k: u32, term: u32, words: u32, t: u32) -> u32 {
        term * (k / Self::CHUNK) * CHUNK_WORDS + 4 * t + 2 * words
    }

    /// The sixteen bytes that a lane takes of the chunk at `place`, in a row whose first ones it would find at byte
    /// `at` of the tiles.
    ///
    /// # Safety
    /// As [`run`](super::run).
    unsafe fn load(at: u32, place: Self::Place) -> Self::Weights;

    /// The activations of `chunk`, or of its pair's other one, of `chunks`; zeros, where it is not one of those.
    ///
    /// # Safety
    /// As [`run`](super::run).
    unsafe fn values(column: &Column, chunk: &Chunk, chunks: u32) -> Self::Values;

    /// `sum` with what a chunk adds.
    ///
    /// # Safety
    /// As [`run`](super::run).
    unsafe fn add(sum: Self::Sum, weights: Self::Weights, values: Self::Values) -> Self::Sum;

    /// What a lane's two columns of two products add to the sum of its row, with the other term's: lane t has columns
    /// 2t and 2t + 1, words 0 and 2 and words 1 and 3 of a parity's rows in a term; two lanes on, in the other.
    ///
    /// # Safety
    /// As [`run`](super::run).
    unsafe fn total(sums: [Self::Sum; 2], block: &Block) -> f32;

    /// Puts the terms of unit `unit` of the row of `k` where they belong, if it `is_there`.
    ///
    /// # Safety
    /// The thread's own words; whole warps, neighbours with neighbouring units, where they do it
    /// [together](Form::TOGETHER).
    unsafe fn put(unit: u32, is_there: bool, values: [f32; 8], k: u32);
}

/// bf16, by activations in two terms of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Brain;

impl LookedUp for Brain {
    type Table = ();

    fn table(_: u16) {}

    fn is_of(dtype: u16) -> bool {
        dtype == BF16
    }
}

impl Form for Brain {
    const DTYPE: u16 = BF16;
    const CHUNK: u32 = 32;
    const ROW_MULTIPLE: u32 = 64;
    const CHUNK_TERMS: u32 = 2 * CHUNK_WORDS;
    const LONGEST: u32 = MAX_NORMED;
    const TOGETHER: bool = false;
    type Place = u32;
    type Weights = [u32; 4];
    const NO_WEIGHTS: [u32; 4] = [0; 4];
    type Values = (u32, u32);
    type Sum = [f32; 4];
    const ZERO: [f32; 4] = [0.0; 4];

    fn row_bytes(k: u32) -> u32 {
        2 * k
    }

    fn swap(_: u32) -> u32 {
        1
    }

    fn words(k: u32) -> u32 {
        k
    }

    fn place(chunk: u32) -> u32 {
        chunk * CHUNK_BYTES
    }

    unsafe fn load(at: u32, place: u32) -> [u32; 4] {
        // SAFETY: the caller's promise.
        unsafe { bulk::load16(at + place) }
    }

    unsafe fn values(column: &Column, chunk: &Chunk, chunks: u32) -> (u32, u32) {
        let at = if chunk.number < chunks { column.at + chunk.column * CHUNK_WORDS } else { ZEROS };
        // SAFETY: the caller's promise.
        unsafe { shared::load8(at).into() }
    }

    unsafe fn add(sum: [f32; 4], weights: [u32; 4], values: (u32, u32)) -> [f32; 4] {
        // SAFETY: the caller's promise.
        unsafe { warp::mma(weights, values.into(), sum) }
    }

    unsafe fn total([one, other]: [[f32; 4]; 2], _: &Block) -> f32 {
        let own = (one[0] + other[0]) + (one[3] + other[3]);
        // SAFETY: the caller's promise.
        own + f32::from_bits(unsafe { warp::shuffle_xor(own.to_bits(), 2) })
    }

    unsafe fn put(unit: u32, _: bool, values: [f32; 8], k: u32) {
        // SAFETY: the caller's promise.
        unsafe { put_terms(unit, values, k) }
    }
}
