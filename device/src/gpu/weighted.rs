//! A norm between two products of several rows, which is in both of them: see [`linear`](crate::kernels::linear). What
//! the one before it leaves of each row, the sums of squares of its parts, the one after it makes a factor of, while
//! its first copies are on their way.

use super::math::{reciprocal, rsqrt};
use super::warpgroup::{self, COLUMNS, ROWS};
use super::{Call, Tensor};
use crate::arch::{each_of_four, shared, warp};
use crate::block::{Block, FREE_SHARED};
use crate::kernels::linear::slot;

/// Words of rows' factors.
const FACTORS: u32 = FREE_SHARED;

const _: () = assert!(FACTORS + ROWS <= shared::KEPT);
const _: () = assert!(crate::kernels::linear::MOST_WEIGHTED == COLUMNS, "a row's squares are one part's");

/// How many lanes add up each of `count` rows' `parts`, as a power of two: as many as leave a row of each to them at
/// once, and of those what gives each lane 32 parts or fewer, which it asks for together.
fn log_lanes(count: u32, parts: u32) -> u32 {
    const MOST: u32 = 4;
    if count <= warpgroup::THREADS >> MOST {
        return MOST;
    }
    if parts <= 32 {
        0
    } else if parts <= 64 {
        1
    } else {
        2
    }
}

/// What the sums of a product are multiplied with where the norm's weights are in its x (`Params::is_weighted`): 1 /
/// root of the mean square of a row, whose parts' sums of squares are operand `operand`. Where they are not, it is 1.
#[derive(Clone, Copy)]
pub(crate) struct Norm<'a> {
    pub(crate) call: &'a Call<'a>,
    pub(crate) operand: usize,
    pub(crate) eps: f32,
    pub(crate) is_weighted: bool,
}

impl Norm<'_> {
    /// Finds the factors of `count` rows of operand `x`, from row `m0` on, for [`found`](Norm::found).
    ///
    /// # Safety
    /// `threads` threads, the first of the block in whole warps, make this same call; the operands are those of a
    /// product; `count` is at most [`ROWS`]; the block meets before any thread asks for a factor.
    pub(crate) unsafe fn find(&self, [m0, count]: [u32; 2], block: &Block, threads: u32) {
        if !self.is_weighted {
            return;
        }
        // SAFETY: the caller's promises; a word is written by one thread.
        unsafe {
            let (norm, k) = (self.call.tensor(self.operand), self.call.tensor(slot::W).extent(1));
            let (parts, share) = (norm.extent(1), reciprocal(k));
            let log_lanes = log_lanes(count, parts);
            let lanes = 1 << log_lanes;
            let (own, lane) = (block.thread >> log_lanes, block.thread & (lanes - 1));
            let mut first = 0;
            while first < count {
                let row = first + own;
                let is_there = row < count;
                let squares = norm.row([m0 + if is_there { row } else { 0 }]);
                let mut sum = 0.0;
                let mut at = 8 * lane;
                while at < parts {
                    let next = 8 * lanes;
                    let eights = squares.eights([at, at + next, at + 2 * next, at + 3 * next], parts);
                    each_of_four!(i => {
                        let [a, b, c, d, e, f, g, h] = eights[i];
                        sum += ((a + b) + (c + d)) + ((e + f) + (g + h));
                    });
                    at += 4 * next;
                }
                let mut mask = 1;
                while mask < lanes {
                    sum += f32::from_bits(warp::shuffle_xor(sum.to_bits(), mask));
                    mask *= 2;
                }
                if is_there && lane == 0 {
                    shared::store(FACTORS + (m0 + row) % ROWS, rsqrt(sum * share + self.eps).to_bits());
                }
                first += threads >> log_lanes;
            }
        }
    }

    /// The factors of rows `r`, which [`find`](Norm::find) has found.
    ///
    /// # Safety
    /// It has, for the rows of the same part.
    pub(crate) unsafe fn found<const R: usize>(&self, r: [u32; R]) -> [f32; R] {
        if !self.is_weighted {
            return [1.0; R];
        }
        // SAFETY: the caller's promise; a part has no more rows.
        r.map(|r| f32::from_bits(unsafe { shared::load(FACTORS + r % ROWS) }))
    }

    /// The factor of row `r`, by whoever asks.
    ///
    /// # Safety
    /// The operands are those of a product; it has row `r`.
    pub(crate) unsafe fn of(&self, r: u32) -> f32 {
        if !self.is_weighted {
            return 1.0;
        }
        // SAFETY: the caller's promise.
        unsafe {
            let (norm, k) = (self.call.tensor(self.operand), self.call.tensor(slot::W).extent(1));
            let mut sum = 0.0;
            for part in 0..norm.extent(1) {
                sum += norm.get([r, part]);
            }
            rsqrt(sum / k as f32 + self.eps)
        }
    }
}

/// Makes `weighted` of the first `rows` rows of `y`, with `weights`, and puts into `squares` the sums of their squares:
/// what is left to do where nothing has kept these.
///
/// # Safety
/// Every thread of the block makes this same call, which meets first; the operands are a product's of those names.
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
