//! The GPU body of `linear`: a warp per weight row, over up to four rows of x at a time; the weights from tiles where
//! the worker's loader brings them, else from global memory. One row with tiles of weights goes to `gpu::thin`, a few
//! to `gpu::thin::few`, many go to `gpu::warpgroup` or `gpu::wide`: tensor cores all.

use super::*;
use crate::block::Candidate;
use crate::gpu::fours::Fours;
use crate::gpu::math::{activate, activate_fours};
use crate::gpu::rows::{self, Outputs as _, Rows, Staging, dots, pick, ready_and_staged, tiled};
use crate::gpu::thin::{First, by_form, few, long};
use crate::gpu::{warpgroup, weighted, wide};
use core::array::from_fn;
use core::cell::Cell;

/// Where sums become outputs: functions, since a closure that is called in several places need not become part of its
/// caller, and one that does not costs a stack. What is needed once an output they fetch then: held over the loops it
/// would cost registers.
struct Outputs<'a> {
    p: &'a Params,
    call: &'a crate::gpu::Call<'a>,
    /// The largest of the outputs of one row that this thread has made.
    best: Cell<Candidate>,
}

/// # Safety (of each)
/// The call's operands are the slots'; `n` and `r` stay below the extents that `check` has matched.
impl rows::Outputs<1> for Outputs<'_> {
    unsafe fn finish(&self, n: u32, [sum]: [f32; 1]) {
        // SAFETY: the caller's promise.
        unsafe { self.add(n, sum, self.ask(n)) }
    }
}

impl Outputs<'_> {
    /// Asks for what is added to output `n` of the one row.
    unsafe fn ask(&self, n: u32) -> u32 {
        // SAFETY: the caller's promise.
        unsafe {
            let residual = self.call.tensor(slot::RESIDUAL);
            if residual.is_present() { self.call.ask(&residual, [0, n]) } else { 0 }
        }
    }

    /// `sum` with the bias of output `n`, activated.
    unsafe fn activated(&self, n: u32, sum: f32) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            let bias = self.call.tensor(slot::BIAS);
            activate(self.p.activation & !MULTIPLIES, if bias.is_present() { sum + bias.get([n]) } else { sum })
        }
    }

    /// Writes output `n` of the one row, to which is added what was [asked](Outputs::ask) for.
    unsafe fn add(&self, n: u32, sum: f32, asked: u32) {
        // SAFETY: the caller's promise.
        unsafe {
            let before = self.call.told(slot::RESIDUAL, &self.call.tensor(slot::RESIDUAL), [0, n], asked);
            let value = joined(self.p.activation, self.activated(n, sum), before);
            self.call.put(&self.call.tensor(slot::Y), [0, n], value);
            // Always: to ask first would take longer.
            self.best.set(self.best.get().better(Candidate { value, index: n }));
        }
    }

    /// Writes output `n` of row `r` of many: of those none is flagged, and nothing is searched.
    unsafe fn finish_one_of_many(&self, r: u32, n: u32, sum: f32) {
        // SAFETY: the caller's promise.
        unsafe {
            let residual = self.call.tensor(slot::RESIDUAL);
            let before = if residual.is_present() { residual.get([r, n]) } else { 0.0 };
            let activated = self.activated(n, sum * self.norm().of(r));
            self.call.tensor(slot::Y).set([r, n], joined(self.p.activation, activated, before));
        }
    }

    /// What sums are multiplied with.
    fn norm(&self) -> weighted::Norm<'_> {
        weighted::Norm { call: self.call, operand: slot::NORM, eps: self.p.eps, is_weighted: self.p.is_weighted != 0 }
    }

    /// Makes what the product after a norm reads, if this one is before one.
    unsafe fn weigh(&self, rows: u32, block: &Block) {
        // SAFETY: the caller's promise.
        unsafe {
            if self.call.tensor(slot::WEIGHTED).is_present() {
                let (y, squares, weights, weighted) = (
                    self.call.tensor(slot::Y),
                    self.call.tensor(slot::VALUES),
                    self.call.tensor(slot::WEIGHTS),
                    self.call.tensor(slot::WEIGHTED),
                );
                weighted::weigh(rows, &y, [&weights, &weighted, &squares], block);
            }
        }
    }
}

/// What an output becomes with the residual.
pub(crate) fn joined(activation: u32, output: f32, residual: f32) -> f32 {
    if activation & MULTIPLIES != 0 { output * residual } else { output + residual }
}

/// Four columns of many rows' outputs.
#[derive(Clone, Copy)]
pub(super) struct Columns {
    activation: u32,
    bias: [f32; 4],
    residual: Fours,
    y: Fours,
    weights: [f32; 4],
    weighted: Fours,
}

impl warpgroup::Finish<1> for Outputs<'_> {
    type Columns = Columns;

    unsafe fn begin(&self, place: &warpgroup::Place, block: &Block) {
        // SAFETY: the caller's promise.
        unsafe { self.norm().find([place.m0, place.rows], block, warpgroup::THREADS) };
    }

    unsafe fn columns(&self, n: u32) -> Columns {
        // SAFETY: the caller's promise; a vector is a row.
        unsafe {
            let matrix = |operand: usize| Fours::of(&self.call.tensor(operand), n);
            let vector = |operand: usize| {
                let [four] = Fours::of_vector(&self.call.tensor(operand), n).get([0]);
                four
            };
            Columns {
                activation: self.p.activation,
                bias: vector(slot::BIAS),
                residual: matrix(slot::RESIDUAL),
                y: matrix(slot::Y),
                weights: vector(slot::WEIGHTS),
                weighted: matrix(slot::WEIGHTED),
            }
        }
    }

    unsafe fn rows<const R: usize>(&self, of: &Columns, r: [u32; R], sums: [[[f32; 4]; 1]; R]) -> [f32; R] {
        // SAFETY: the caller's promise.
        unsafe {
            let (before, factors) = (of.residual.get(r), self.norm().found(r));
            let normed: [[f32; 4]; R] = from_fn(|i| from_fn(|c| sums[i][0][c] * factors[i] + of.bias[c]));
            let activated = activate_fours(of.activation & !MULTIPLIES, normed);
            let joined = |i: usize, c: usize| joined(of.activation, activated[i][c], before[i][c]);
            let values: [[f32; 4]; R] = from_fn(|i| from_fn(|c| joined(i, c)));
            of.y.set(r, values);
            if !of.weighted.is_present() {
                return [0.0; R];
            }
            of.weighted.set(r, from_fn(|i| from_fn(|c| values[i][c] * of.weights[c])));
            let square = |value: f32, c: u32| if c < of.y.there() { value * value } else { 0.0 };
            values.map(|[a, b, c, d]| (square(a, 0) + square(b, 1)) + (square(c, 2) + square(d, 3)))
        }
    }

    unsafe fn adds_up(&self) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.call.tensor(slot::WEIGHTED).is_present() }
    }

    unsafe fn row(&self, r: u32, sum: f32) {
        // SAFETY: the caller's promise.
        unsafe { self.call.tensor(slot::VALUES).set([r, 0], sum) };
    }
}

/// # Safety
/// As [`MacroKernel::gpu_early`].
pub(super) unsafe fn run(
    p: &Params,
    call: &crate::gpu::Call<'_>,
    block: &Block,
    ready: impl Fn() -> Result<(), Fault>,
) -> Result<(), Fault> {
    // SAFETY: the operands are the slots'; `n` and `r` stay below the extents that `check` has matched; the conditions
    // around `dots` depend on the warp and the task alone, so whole warps call it.
    unsafe {
        let rows = if p.merges != 0 { 1 } else { call.rows(&call.tensor(slot::X)) };
        let columns = call.tensor(slot::W).extent(0);
        let is_flagged = call.tensor(slot::X).is_flagged() && call.tensor(slot::W).extent(1) <= MAX_NORMED;
        let is_normed = call.tensor(slot::NORM).is_present() && p.is_weighted == 0;
        let staged = is_normed || p.merges != 0 || is_flagged;
        let (is_weighted, merges) = (p.is_weighted != 0, p.merges != 0);
        let how = Staging { norm: slot::NORM, eps: p.eps, is_weighted, merges, like: (slot::W, 1) };
        let outputs = Outputs { p, call, best: Cell::new(Candidate::NONE) };
        let ask_one = |n: u32| outputs.ask(n);
        let finish_one = |n: u32, [sum]: [f32; 1], asked: u32| outputs.add(n, sum, asked);
        let row = First { call, x: call.tensor(slot::X) };
        let is_one = p.merges == 0 && rows == 1 && p.is_weighted == 0;
        if few::is_for::<1>(call, rows) {
            return few::multiply::<1>(call, block, rows, ready, &outputs);
        }
        if warpgroup::is_for::<1>(call, block, rows) {
            return warpgroup::multiply::<1>(call, block, rows, ready, &outputs);
        }
        let segments = p.segments.max(1);
        let long_form = if is_one { long::form_of::<1>(call, &row, how, segments, block) } else { None };
        ready_and_staged(call, how, staged && long_form.is_none(), block, ready)?;
        if let Some(form) = long_form {
            by_form!(form, F => long::run::<F, 1>(call, &row, segments, block, ask_one, finish_one));
        } else if let Some(tiles) = call.tiles
            && tiles.left() > 0
            && rows == 1
            && !is_weighted
            && !call.tensor(slot::WEIGHTED).is_present()
        {
            tiled::<1>(call, tiles, block, staged, &outputs);
        } else if wide::is_for::<1>(call, block, rows) {
            wide::multiply::<1>(call, block, rows, |r, n, [sum]| outputs.finish_one_of_many(r, n, sum));
            outputs.weigh(rows, block);
            return Ok(());
        } else {
            let mut n = block.warp();
            while n < columns {
                if rows == 1 {
                    let [sum] = dots::<1>(Rows { call, rows, first: 0, staged }, slot::W, n, block.lane());
                    if block.lane() == 0 {
                        outputs.finish(n, [sum * outputs.norm().of(0)]);
                    }
                } else {
                    let mut r = 0;
                    while r < rows {
                        let sums = dots::<4>(Rows { call, rows, first: r, staged }, slot::W, n, block.lane());
                        let row = r + block.lane();
                        if block.lane() < 4 && row < rows {
                            outputs.finish_one_of_many(row, n, pick(sums, block.lane()));
                        }
                        r += 4;
                    }
                }
                n += block.warps();
            }
            outputs.weigh(rows, block);
        }
        if call.tensor(slot::INDICES).is_present() {
            let best = block.best(outputs.best.get());
            if block.thread == 0 {
                argmax::put(&p.best, best, call.block::<0>(), [call.tensor(slot::VALUES), call.tensor(slot::INDICES)]);
            }
        }
    }
    Ok(())
}
