//! The CPU body of `linear`: see `cpu::gemm` for how the products are formed.
//!
//! Tolerance against the reference, per output: with bf16 weights and the bf16 dot product, activations are rounded to
//! bf16, so sum |x| |w| * 2^-8 (half of it is the rounding, the rest covers the order of summation); otherwise only the
//! order of summation differs, sum |x| |w| * 2^-18.

use super::*;
use crate::cpu::gemm::{self, Plan, Weights};
use crate::cpu::rows::{self, Row};
use crate::cpu::simd::{Body, Dot, F16, F32, Isa, Level, Simd, Widen, activate};
use crate::io::Tensor;
use perpetua_shared::DType;

pub(super) fn run(p: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
    run_on(Isa::best(), p, call, scratch)
}

pub(crate) fn run_on(isa: Isa, p: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
    let [x, w, bias, residual, y] = core::array::from_fn(|i| call.tensor(i));
    let activation = Activation::from_u32(p.activation).unwrap_or(Activation::None);
    isa.run(Linear { rows: call.rows(0), x, w, bias, residual, y, activation, scratch });
    Ok(())
}

struct Linear<'a> {
    rows: usize,
    x: Tensor,
    w: Tensor,
    bias: Tensor,
    residual: Tensor,
    y: Tensor,
    activation: Activation,
    scratch: &'a mut Scratch,
}

impl Body for Linear<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<L: Level>(self) {
        // SAFETY: the level exists (caller).
        unsafe {
            match self.w.dtype() {
                DType::Bf16 => self.with::<L::S, L::Bf16>(),
                DType::F16 => self.with::<L::S, Widen<F16>>(),
                _ => self.with::<L::S, Widen<F32>>(),
            }
        }
    }
}

impl Linear<'_> {
    #[inline(always)]
    unsafe fn with<S: Simd, D: Dot<S>>(self) {
        let (n, k) = (self.w.extent(0), self.w.extent(1));
        if self.rows == 0 || n == 0 {
            return;
        }
        let plan = Plan::new(self.rows, k);
        let [packed, partial, wide, sums] =
            self.scratch.areas([plan.packed_floats, plan.partial_floats, k, plan.block_rows * n]);
        let base = Weights::<D::Elem>::base_of(&self.w);
        let weights = Weights { base: [base; 2], stride: [self.w.stride(0); 2], rows: n, paired: false, k };
        let bias = self.bias.is_present().then(|| Row::of(&self.bias, [0], n));
        let mut first = 0;
        while first < self.rows {
            let cols = plan.block_rows.min(self.rows - first);
            // SAFETY: the areas are as large as the plan says; the weights' box holds n rows of k (rows of `x` are of
            // that length, or `Row::of` panics); the level exists (caller).
            unsafe {
                weights.prefetch::<S>();
                gemm::pack_rows::<S, D>(|m| Row::of(&self.x, [first + m, 0], k), cols, k, wide, packed.cast());
                gemm::multiply::<S, D>(&weights, packed.cast(), cols, partial, sums, n);
                let mut m = 0;
                while m < cols {
                    let y = Row::of(&self.y, [first + m, 0], n);
                    let residual =
                        self.residual.is_present().then(|| Row::of(&self.residual, [first + m, 0], n));
                    finish::<S>(sums.add(m * n), bias, self.activation, residual, y);
                    m += 1;
                }
            }
            first += cols;
        }
    }
}

/// y = act(sums + bias) + residual.
#[inline(always)]
unsafe fn finish<S: Simd>(sums: *const f32, bias: Option<Row>, act: Activation, residual: Option<Row>, y: Row) {
    let mut i = 0;
    while i < y.len() {
        let n = S::LANES.min(y.len() - i);
        // SAFETY: all have the length of `y`; the level exists (caller).
        unsafe {
            let mut v = rows::load::<S>(sums.add(i), n);
            if let Some(bias) = bias {
                v = S::add(v, bias.load::<S>(i, n));
            }
            v = activate::<S>(act, v);
            if let Some(residual) = residual {
                v = S::add(v, residual.load::<S>(i, n));
            }
            y.store::<S>(i, n, v);
        }
        i += n;
    }
}
