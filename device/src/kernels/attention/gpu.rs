//! The GPU body of `attention`: a warp per (row, head), softmax on the fly.
//!
//! The warp takes 32 positions at a time. First each lane computes one position's score; then the running maximum and
//! total are updated (Milakov and Gimelshein 2018); then the lanes turn to the head's dimensions and add the 32 value
//! rows, each weighted by a shuffled score. A head of more than 256 dimensions is done in slices, the scores anew for
//! each.

use super::*;
use crate::arch::scalar::fma;
use crate::arch::{WARP, warp};
use crate::gpu::math::exp;
use crate::gpu::{Row, Tensor};

/// Dimensions a lane accumulates: a slice is 256 wide.
const PER_LANE: usize = 8;
const SLICE: u32 = PER_LANE as u32 * WARP;

/// # Safety
/// As [`MacroKernel::gpu`].
#[inline(always)]
pub(super) unsafe fn run(p: &Params, call: &crate::gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
    // SAFETY: the operands are the slots' and `check` has matched their extents; `t` is below what the row may see, which
    // the cache holds; whole warps shuffle, since every loop bound around a shuffle is the same for all lanes.
    unsafe {
        let lane = block.lane();
        let mut item = block.warp();
        loop {
            // Fetched anew for every head: held over the loops they would cost them registers.
            let (q, k, v, y) = (call.tensor(0), call.tensor(1), call.tensor(2), call.tensor(3));
            let (heads, group, d) = (q.extent(1), q.extent(2), q.extent(3));
            if item >= call.rows(&q) * heads * group {
                break;
            }
            let (r, h, g) = (item / (heads * group), item / group % heads, item % group);
            let visible = p.visible(call.step, call.task.row_first + r) as u32;
            let (q, y, k, v) = (q.row([r, h, g]), y.row([r, h, g]), Head::new(&k, h), Head::new(&v, h));
            let mut slice = 0;
            while slice < d {
                let mut max = f32::NEG_INFINITY;
                let mut total = 0.0;
                let mut sums = [0f32; PER_LANE];
                let mut t0 = 0;
                while t0 < visible {
                    let t = t0 + lane;
                    let mut score = f32::NEG_INFINITY;
                    if t < visible {
                        let k = k.row(t);
                        let mut dot = 0.0;
                        for i in 0..d {
                            dot = fma(q.get(i), k.get(i), dot);
                        }
                        score = dot * p.scale;
                    }
                    let new_max = warp::max(max_of(max, score));
                    // With every score so far at -inf (a NaN or an overflow upstream) the weights are NaN, as they are
                    // in the reference.
                    let shrink = exp(max - new_max);
                    let weight = if t < visible { exp(score - new_max) } else { 0.0 };
                    max = new_max;
                    total = fma(total, shrink, warp::sum(weight));
                    for i in 0..PER_LANE {
                        sums[i] *= shrink;
                    }
                    let count = if visible - t0 < WARP { visible - t0 } else { WARP };
                    for j in 0..count {
                        let weight = f32::from_bits(warp::shuffle(weight.to_bits(), j));
                        let v = v.row(t0 + j);
                        for step in 0..PER_LANE {
                            let i = slice + step as u32 * WARP + lane;
                            if i < d {
                                sums[step] = fma(weight, v.get(i), sums[step]);
                            }
                        }
                    }
                    t0 += WARP;
                }
                for step in 0..PER_LANE {
                    let i = slice + step as u32 * WARP + lane;
                    if i < d {
                        y.set(i, sums[step] / total);
                    }
                }
                slice += SLICE;
            }
            item += block.warps();
        }
    }
    Ok(())
}

/// One head of a cache: its first row, and how far it is from one row to the next.
#[derive(Clone, Copy)]
struct Head {
    first: Row,
    step: u32,
}

impl Head {
    #[inline(always)]
    fn new(cache: &Tensor, head: u32) -> Head {
        Head { first: cache.row([head]), step: cache.stride(1) }
    }

    /// The row of position `t`.
    #[inline(always)]
    fn row(&self, t: u32) -> Row {
        self.first.after(u64::from(t) * u64::from(self.step))
    }
}

#[inline(always)]
fn max_of(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}
