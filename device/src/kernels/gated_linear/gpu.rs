//! The GPU body of `gated_linear`: a warp per pair of weight rows, over up to four rows of x at a time; the weights
//! from tiles where the worker's loader brings them, else from global memory. One row with tiles of weights goes to
//! `gpu::thin` before it comes here, a few go to `gpu::thin::few`, many to `gpu::warpgroup` or `gpu::wide`: tensor
//! cores all.

use super::*;
use crate::gpu::fours::Fours;
use crate::gpu::math::{activate, activate_fours};
use crate::gpu::rows::{self, Outputs as _, Rows, Staging, dots, pick, ready_and_staged, tiled};
use crate::gpu::thin::{First, by_form, few, long};
use crate::gpu::{warpgroup, weighted, wide};
use core::array::from_fn;

/// # Safety
/// As [`MacroKernel::gpu_early`].
pub(super) unsafe fn run(
    p: &Params,
    call: &crate::gpu::Call<'_>,
    block: &Block,
    ready: impl Fn() -> Result<(), Fault>,
) -> Result<(), Fault> {
    // SAFETY: as in `linear`.
    unsafe {
        let rows = call.rows(&call.tensor(slot::X));
        let is_one = rows == 1 && p.is_weighted == 0;
        let columns = call.tensor(slot::GATE).extent(0);
        let is_flagged = call.tensor(slot::X).is_flagged() && call.tensor(slot::GATE).extent(1) <= MAX_NORMED;
        let staged = call.tensor(slot::NORM).is_present() && p.is_weighted == 0 || is_flagged;
        let how = Staging {
            norm: slot::NORM,
            eps: p.eps,
            is_weighted: p.is_weighted != 0,
            merges: false,
            like: (slot::GATE, 1),
        };
        let outputs = Outputs { p, call };
        let row = First { call, x: call.tensor(slot::X) };
        let ask = |_: u32| 0;
        let finish = |n: u32, sums: [f32; 2], _: u32| outputs.finish(n, sums);
        if few::is_for::<2>(call, rows) {
            return few::multiply::<2>(call, block, rows, ready, &outputs);
        }
        if warpgroup::is_for::<2>(call, block, rows) {
            return warpgroup::multiply::<2>(call, block, rows, ready, &outputs);
        }
        let long_form = if is_one { long::form_of::<2>(call, &row, how, 1, block) } else { None };
        ready_and_staged(call, how, staged && long_form.is_none(), block, ready)?;
        if let Some(form) = long_form {
            by_form!(form, F => long::run::<F, 2>(call, &row, 1, block, ask, finish));
            return Ok(());
        }
        if let Some(tiles) = call.tiles
            && tiles.left() > 0
            && is_one
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
                        let [sum] = dots::<1>(x, slot::GATE + which, n, block.lane());
                        sum
                    } else {
                        pick(dots::<4>(x, slot::GATE + which, n, block.lane()), block.lane())
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
    unsafe fn put(&self, r: u32, n: u32, [mut g, mut u]: [f32; 2]) {
        // SAFETY: the operands are the slots', row and column are there (caller).
        unsafe {
            let (gate_bias, up_bias, y) =
                (self.call.tensor(slot::GATE_BIAS), self.call.tensor(slot::UP_BIAS), self.call.tensor(slot::Y));
            if gate_bias.is_present() {
                g += gate_bias.get([n]);
            }
            if up_bias.is_present() {
                u += up_bias.get([n]);
            }
            self.call.put(&y, [r, n], activate(self.p.activation, g) * u);
        }
    }

    /// As [`put`](Outputs::put), of sums that may have to be normalised yet.
    unsafe fn put_normed(&self, r: u32, n: u32, [g, u]: [f32; 2]) {
        // SAFETY: the caller's promise.
        unsafe {
            let factor = self.norm().of(r);
            self.put(r, n, [g * factor, u * factor]);
        }
    }

    /// What sums are multiplied with.
    fn norm(&self) -> weighted::Norm<'_> {
        weighted::Norm { call: self.call, operand: slot::NORM, eps: self.p.eps, is_weighted: self.p.is_weighted != 0 }
    }
}

/// Four columns of many rows' outputs.
#[derive(Clone, Copy)]
pub(super) struct Columns {
    activation: u32,
    biases: [[f32; 4]; 2],
    y: Fours,
}

impl warpgroup::Finish<2> for Outputs<'_> {
    type Columns = Columns;

    unsafe fn begin(&self, place: &warpgroup::Place, block: &Block) {
        // SAFETY: the caller's promise.
        unsafe { self.norm().find([place.m0, place.rows], block, warpgroup::THREADS) };
    }

    unsafe fn columns(&self, n: u32) -> Columns {
        // SAFETY: the caller's promise.
        unsafe {
            let bias = |operand: usize| {
                let [four] = Fours::of_vector(&self.call.tensor(operand), n).get([0]);
                four
            };
            Columns {
                activation: self.p.activation,
                biases: [bias(slot::GATE_BIAS), bias(slot::UP_BIAS)],
                y: Fours::of(&self.call.tensor(slot::Y), n),
            }
        }
    }

    unsafe fn rows<const R: usize>(&self, of: &Columns, r: [u32; R], sums: [[[f32; 4]; 2]; R]) -> [f32; R] {
        // SAFETY: the caller's promise.
        unsafe {
            let factors = self.norm().found(r);
            let normed = |which: usize| -> [[f32; 4]; R] {
                from_fn(|i| from_fn(|c| sums[i][which][c] * factors[i] + of.biases[which][c]))
            };
            let (opens, up) = (activate_fours(of.activation, normed(0)), normed(1));
            of.y.set(r, from_fn(|i| from_fn(|c| opens[i][c] * up[i][c])));
        }
        [0.0; R]
    }
}

impl rows::Outputs<2> for Outputs<'_> {
    unsafe fn finish(&self, n: u32, sums: [f32; 2]) {
        // SAFETY: the caller's promise.
        unsafe { self.put(0, n, sums) }
    }
}
