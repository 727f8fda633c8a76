//! The GPU body of `gated_linear`: a warp per pair of weight rows, over up to four rows of x at a time; the weights from
//! tiles where the worker's loader brings them, else from global memory. Passes of many rows go to the tensor cores
//! (`gpu::wide`).

use super::*;
use crate::gpu::math::activate;
use crate::gpu::packed::{Eight, Four};
use crate::gpu::rows::{self, Outputs as _, Rows, Staging, dots, pick, ready_and_staged, tiled};
use crate::gpu::thin::{self, Brain, First, long};
use crate::gpu::{warpgroup, weighted, wide};

/// # Safety
/// As [`MacroKernel::gpu_early`].
#[inline(always)]
pub(super) unsafe fn run(
    p: &Params,
    call: &crate::gpu::Call<'_>,
    block: &Block,
    ready: impl Fn() -> Result<(), Fault>,
) -> Result<(), Fault> {
    // SAFETY: as in `linear`.
    unsafe {
        let rows = call.rows(&call.tensor(0));
        let is_one = rows == 1 && p.is_weighted == 0;
        let columns = call.tensor(1).extent(0);
        let is_flagged = call.tensor(0).is_flagged() && call.tensor(1).extent(1) <= MAX_NORMED;
        let staged = call.tensor(NORM).is_present() && p.is_weighted == 0 || is_flagged;
        let how = Staging { norm: NORM, eps: p.eps, merges: false, like: (1, 1) };
        let outputs = Outputs { p, call };
        let row = First { call, x: call.tensor(0) };
        let ask = |_: u32| 0;
        let finish = {
            #[inline(always)]
            |n: u32, sums: [f32; 2], _: u32| outputs.finish(n, sums)
        };
        if is_one && thin::is_for::<Brain, 2>(call, &row, how) {
            return thin::run::<Brain, 2, 30>(call, &row, how, block, ready, ask, finish);
        }
        if is_one && thin::is_for::<Eight, 2>(call, &row, how) {
            return thin::run::<Eight, 2, 24>(call, &row, how, block, ready, ask, finish);
        }
        if is_one && thin::is_for::<Four, 2>(call, &row, how) {
            return thin::run::<Four, 2, 12>(call, &row, how, block, ready, ask, finish);
        }
        if warpgroup::is_for::<2>(call, block, rows) {
            return warpgroup::multiply::<2>(call, block, rows, ready, &outputs);
        }
        let is_long = is_one && long::is_for::<Brain, 2>(call, &row, how, 1, block);
        let is_long_eight = is_one && long::is_for::<Eight, 2>(call, &row, how, 1, block);
        let is_long_four = is_one && long::is_for::<Four, 2>(call, &row, how, 1, block);
        ready_and_staged(call, how, staged && !(is_long || is_long_eight || is_long_four), block, ready)?;
        if is_long {
            long::run::<Brain, 2>(call, &row, 1, block, ask, finish);
            return Ok(());
        }
        if is_long_eight {
            long::run::<Eight, 2>(call, &row, 1, block, ask, finish);
            return Ok(());
        }
        if is_long_four {
            long::run::<Four, 2>(call, &row, 1, block, ask, finish);
            return Ok(());
        }
        if let Some(tiles) = call.tiles
            && tiles.left() > 0
            && rows == 1
        {
            tiled::<2>(call, tiles, block, staged, &outputs);
            return Ok(());
        }
        if wide::is_for::<2>(call, block, rows) {
            wide::multiply::<2>(call, block, rows, |r, n, sums| outputs.put_normed(r, n, sums));
            return Ok(());
        }
        let mut n = block.warp();
        while n < columns {
            let mut r = 0;
            while r < rows {
                let x = Rows { call, rows, first: r, staged };
                let step = if rows == 1 { 1 } else { 4 };
                // The same code serves both weights: once for the gate, once more for what it opens.
                let (mut g, mut u) = (0.0, 0.0);
                let mut which = 0;
                while which < 2 {
                    g = u;
                    u = if step == 1 {
                        let [sum] = dots::<1>(x, 1 + which, n, block.lane());
                        sum
                    } else {
                        pick(dots::<4>(x, 1 + which, n, block.lane()), block.lane())
                    };
                    which += 1;
                }
                let row = r + block.lane();
                if block.lane() < step && row < rows {
                    outputs.put_normed(row, n, [g, u]);
                }
                r += step;
            }
            n += block.warps();
        }
    }
    Ok(())
}

/// Where sums become outputs.
struct Outputs<'a> {
    p: &'a Params,
    call: &'a crate::gpu::Call<'a>,
}

impl Outputs<'_> {
    /// Writes output `n` of row `r`.
    #[inline(always)]
    unsafe fn put(&self, r: u32, n: u32, [mut g, mut u]: [f32; 2]) {
        // SAFETY: the operands are the slots', row and column are there (caller).
        unsafe {
            let (gate_bias, up_bias, y) = (self.call.tensor(3), self.call.tensor(4), self.call.tensor(5));
            if gate_bias.is_present() {
                g += gate_bias.get([n]);
            }
            if up_bias.is_present() {
                u += up_bias.get([n]);
            }
            self.call.put(&y, [r, n], activate(self.p.activation, g) * u);
        }
    }
}

/// What x is normalised by.
const NORM: usize = 6;

impl Outputs<'_> {
    /// As [`put`](Outputs::put), of sums that may have to be normalised yet.
    #[inline(always)]
    unsafe fn put_normed(&self, r: u32, n: u32, [g, u]: [f32; 2]) {
        // SAFETY: the caller's promise.
        unsafe {
            let weighted = self.p.is_weighted != 0;
            let factor = if weighted { weighted::factor_of(self.call, NORM, self.p.eps, r) } else { 1.0 };
            self.put(r, n, [g * factor, u * factor]);
        }
    }
}

impl warpgroup::Finish<2> for Outputs<'_> {
    #[inline(always)]
    unsafe fn begin(&self, place: &warpgroup::Place, block: &Block) {
        if self.p.is_weighted != 0 {
            // SAFETY: the caller's promise.
            unsafe { weighted::find(self.call, NORM, self.p.eps, [place.m0, place.rows], block, warpgroup::THREADS) };
        }
    }

    #[inline(always)]
    unsafe fn four(&self, r: u32, n: u32, [g, u]: [[f32; 4]; 2]) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            let (y, end) = (self.call.tensor(5), self.call.tensor(5).extent(1));
            let factor = if self.p.is_weighted != 0 { weighted::factor(r) } else { 1.0 };
            let bias = |operand: usize| {
                let bias = self.call.tensor(operand);
                if bias.is_present() { bias.row([]).four(n, end) } else { [0.0; 4] }
            };
            let (of_g, of_u) = (bias(3), bias(4));
            let one = |i: usize| activate(self.p.activation, g[i] * factor + of_g[i]) * (u[i] * factor + of_u[i]);
            y.row([r]).set_four_below(n, end, [one(0), one(1), one(2), one(3)]);
        }
        0.0
    }
}

impl rows::Outputs<2> for Outputs<'_> {
    #[inline(always)]
    unsafe fn finish(&self, n: u32, sums: [f32; 2]) {
        // SAFETY: the caller's promise.
        unsafe { self.put(0, n, sums) }
    }
}
