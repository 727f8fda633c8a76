//! The CPU body of `linear`: see `cpu::gemm` for how the products are formed, and `cpu::outer` for [`Order::Sequential`].
//!
//! Activations are kept in f32 whatever the weights are, so only the order of summation differs from the reference.
//! Tolerance per output: sum |x| |w| * 2^-18.

use super::*;
use crate::cpu::gemm::{self, Plan, Weights};
use crate::cpu::outer;
use crate::cpu::rows::{self, Row};
use crate::cpu::simd::{Body, Dot, F16, Leaf, Level, Simd, Widen, activate};
use crate::io::Tensor;
use core::marker::PhantomData;
use perpetua_shared::DType;

pub(super) fn run(p: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
    let [x, w, bias, residual, y] = core::array::from_fn(|i| call.tensor(i));
    let activation = Activation::from_u32(p.activation).unwrap_or(Activation::None);
    let sequential = p.order == Order::Sequential as u32 && w.dtype() == DType::F32;
    scratch.isa.run(Linear { rows: call.rows(0), x, w, bias, residual, y, activation, sequential, scratch });
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
    sequential: bool,
    scratch: &'a mut Scratch,
}

impl Body for Linear<'_> {
    type Output = ();
    unsafe fn run<L: Level>(self) {
        // SAFETY: the level exists (caller).
        unsafe {
            match self.w.dtype() {
                DType::F32 if self.sequential => self.in_order::<L::S>(),
                DType::Bf16 => self.with::<L::S, L::Bf16>(),
                DType::F16 => self.with::<L::S, Widen<F16>>(),
                DType::Q8 => self.with::<L::S, L::Q8>(),
                _ => self.with::<L::S, L::F32>(),
            }
        }
    }
}

impl Linear<'_> {
    /// [`Order::Sequential`].
    unsafe fn in_order<S: Simd>(self) {
        let (n, k) = (self.w.extent(0), self.w.extent(1));
        if self.rows == 0 || n == 0 {
            return;
        }
        let plan = outer::Plan::new(self.rows, k);
        let panel = outer::PANEL * plan.stride;
        let wide = if self.x.dtype() == DType::F32 { 0 } else { 16 * k };
        let [packed, wide, sums, rows] = self.scratch.areas([plan.stride * k, wide, panel, panel]);
        let w = Weights::<f32>::base_of(&self.w);
        let mut first = 0;
        while first < self.rows {
            let cols = plan.block_rows.min(self.rows - first);
            // SAFETY: the areas are as large as the plan says; the weights' box holds n rows of k (rows of `x` are of
            // that length, or `Row::of` panics); the level exists (caller).
            unsafe {
                outer::pack::<S>(&self.x, first, [cols, k], wide, packed, plan.stride);
                let mut column = 0;
                while column < n {
                    let n = outer::PANEL.min(n - column);
                    let w = w.wrapping_add(column * self.w.stride(0));
                    outer::multiply::<S>(w, self.w.stride(0), [n, k, cols], packed, plan.stride, sums, plan.stride);
                    outer::transpose::<S>(sums, plan.stride, [n, cols], rows, outer::PANEL);
                    self.finish::<S>([first, cols], [column, n], rows, outer::PANEL);
                    column += n;
                }
            }
            first += cols;
        }
    }

    /// Writes columns `column..column + n` of `rows` rows from `first` on, of which there are `sums`.
    unsafe fn finish<S: Simd>(
        &self,
        [first, rows]: [usize; 2],
        [column, n]: [usize; 2],
        sums: *const f32,
        stride: usize,
    ) {
        let bias = self.bias.is_present().then(|| Row::of(&self.bias, [column], n));
        for m in 0..rows {
            let y = Row::of(&self.y, [first + m, column], n);
            let residual = self.residual.is_present().then(|| Row::of(&self.residual, [first + m, column], n));
            // SAFETY: a row of `n` sums each; the level exists (caller).
            unsafe {
                let sums = sums.add(m * stride);
                S::call(Finish::<S> { sums, bias, activation: self.activation, residual, y, set: PhantomData });
            }
        }
    }

    unsafe fn with<S: Simd, D: Dot<S>>(self) {
        let (n, k) = (self.w.extent(0), self.w.extent(1));
        if self.rows == 0 || n == 0 {
            return;
        }
        let plan = Plan::new(self.rows, k);
        let base = Weights::<D::Elem>::base_of(&self.w);
        let weights = Weights { base: [base; 2], stride: [self.w.stride(0); 2], rows: n, paired: false, k };
        let part = weights.part_rows(plan.block_rows);
        let [packed, wide, sums] = self.scratch.areas([plan.packed_floats, k, plan.block_rows * part]);
        let mut first = 0;
        while first < self.rows {
            let cols = plan.block_rows.min(self.rows - first);
            // SAFETY: the areas are as large as the plan says; the weights' box holds n rows of k (rows of `x` are of
            // that length, or `Row::of` panics); the level exists (caller).
            unsafe {
                weights.prefetch::<S, D>();
                gemm::pack_rows::<S, D>(|m| Row::of(&self.x, [first + m, 0], k), cols, k, wide, packed);
                let mut column = 0;
                while column < n {
                    let n = part.min(n - column);
                    gemm::multiply::<S, D>(&weights.part(column, n), packed, cols, sums, n);
                    self.finish::<S>([first, cols], [column, n], sums, n);
                    column += n;
                }
            }
            first += cols;
        }
    }
}

/// y = act(sums + bias) + residual, all of one length.
struct Finish<S> {
    sums: *const f32,
    bias: Option<Row>,
    activation: Activation,
    residual: Option<Row>,
    y: Row,
    set: PhantomData<S>,
}

impl<S: Simd> Leaf for Finish<S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let mut i = 0;
        while i < self.y.len() {
            let n = S::LANES.min(self.y.len() - i);
            // SAFETY: inside all rows (see the type).
            unsafe {
                let mut v = rows::load::<S>(self.sums.add(i), n);
                if let Some(bias) = self.bias {
                    v = S::add(v, bias.load::<S>(i, n));
                }
                v = activate::<S>(self.activation, v);
                if let Some(residual) = self.residual {
                    v = S::add(v, residual.load::<S>(i, n));
                }
                self.y.store::<S>(i, n, v);
            }
            i += n;
        }
    }
}
