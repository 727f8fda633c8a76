//! A norm between two products of several rows, which is in both of them: see [`linear`](crate::kernels::linear). What the one before it leaves of each
//! row, the sums of squares of its parts, the one after it makes a factor of, while its first copies are on their way.

use super::math::{reciprocal, rsqrt};
use super::warpgroup::{COLUMNS, ROWS};
use super::{Call, Tensor};
use crate::arch::{each_of_four, shared, warp};
use crate::block::{Block, FREE_SHARED};

/// Words of rows' factors.
const FACTORS: u32 = FREE_SHARED;

const _: () = assert!(FACTORS + ROWS <= shared::KEPT);
const _: () = assert!(crate::kernels::linear::MOST_WEIGHTED == COLUMNS, "a row's squares are one part's");

/// Lanes that add up a row's parts.
const LANES: u32 = 4;

/// Finds what the sums of `count` rows of operand 0 are multiplied with, from row `m0` on, for [`factor`]: 1 / root of what operand `norm` has the
/// sums of squares of, in the mean.
///
/// # Safety
/// `threads` threads, the first of the block in whole warps, make this same call; the operands are those of a product whose x is weighted; `count` is at
/// most [`ROWS`]; the block meets before any thread asks for a factor.
#[inline(always)]
pub(crate) unsafe fn find(call: &Call<'_>, norm: usize, eps: f32, [m0, count]: [u32; 2], block: &Block, threads: u32) {
    // SAFETY: the caller's promises; a word is written by one thread.
    unsafe {
        let (norm, k) = (call.tensor(norm), call.tensor(1).extent(1));
        let (parts, share) = (norm.extent(1), reciprocal(k));
        let (own, lane) = (block.thread / LANES, block.thread % LANES);
        let mut first = 0;
        while first < count {
            let row = first + own;
            let is_there = row < count;
            let squares = norm.row([m0 + if is_there { row } else { 0 }]);
            let mut sum = 0.0;
            let mut at = 0;
            while at < parts {
                let mut fours = [[0.0; 4]; 4];
                each_of_four!(i => fours[i] = squares.four(at + 4 * (lane + LANES * i as u32), parts));
                each_of_four!(i => sum += (fours[i][0] + fours[i][1]) + (fours[i][2] + fours[i][3]));
                at += 16 * LANES;
            }
            sum += f32::from_bits(warp::shuffle_xor(sum.to_bits(), 1));
            sum += f32::from_bits(warp::shuffle_xor(sum.to_bits(), 2));
            if is_there && lane == 0 {
                shared::store(FACTORS + (m0 + row) % ROWS, rsqrt(sum * share + eps).to_bits());
            }
            first += threads / LANES;
        }
    }
}

/// What the sums of row `r` of operand 0 are multiplied with.
///
/// # Safety
/// [`find`] has found it, for the rows of the same part.
#[inline(always)]
pub(crate) unsafe fn factor(r: u32) -> f32 {
    // SAFETY: the caller's promise; a part has no more rows.
    f32::from_bits(unsafe { shared::load(FACTORS + r % ROWS) })
}

/// As [`factor`], found anew.
///
/// # Safety
/// The operands are those of a product whose x is weighted; it has row `r`.
#[inline(always)]
pub(crate) unsafe fn factor_of(call: &Call<'_>, norm: usize, eps: f32, r: u32) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let (norm, k) = (call.tensor(norm), call.tensor(1).extent(1));
        let mut sum = 0.0;
        for part in 0..norm.extent(1) {
            sum += norm.get([r, part]);
        }
        rsqrt(sum / k as f32 + eps)
    }
}

/// Makes `weighted` of the first `rows` rows of `y`, with `weights`, and puts into `squares` the sums of their squares: what is left to do where nothing
/// has kept these.
///
/// # Safety
/// Every thread of the block makes this same call, which meets first; the operands are a product's of those names.
#[inline(always)]
pub(crate) unsafe fn weigh(rows: u32, y: &Tensor, [weights, weighted, squares]: [&Tensor; 3], block: &Block) {
    // SAFETY: the block meets between y's writes and these reads; a row is one thread's.
    unsafe {
        block.sync();
        for r in block.mine(rows) {
            let mut sum = 0.0;
            for n in 0..y.extent(1) {
                let value = y.get([r, n]);
                weighted.set([r, n], value * weights.get([n]));
                sum += value * value;
            }
            squares.set([r, 0], sum);
        }
    }
}
