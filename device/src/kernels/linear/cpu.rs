//! The CPU body of `linear`: see `cpu::gemm` for how the products are formed, and `cpu::outer` and
//! `cpu::amx` for other orders.
//!
//! Activations are kept in f32 whatever the weights are, so only the order of summation differs from the reference, but
//! where a prompt is multiplied in pairs of bf16 ([`By::Pairs`]): there activations are rounded to bf16, as tensor
//! cores take them, and weights in fewer bits are. Tolerance per output: sum |x| |w| * 2^-18; on a matrix unit 2^-16
//! with weights of bf16, 2^-14 with others; of pairs 2^-18 beside what is rounded, with it 2^-8, or 2^-7 where weights
//! are rounded too.

use super::*;
use crate::cpu::gemm::{self, InPlace, Supply, Weights};
use crate::cpu::outer::{self, Outer, Products};
use crate::cpu::rows::{self, Row};
use crate::cpu::simd::{Body, Int4, Leaf, Level, Mx4, Q4, Simd, activate};
use crate::io::Tensor;
use core::marker::PhantomData;
use perpetua_shared::DType;

pub(super) fn run(p: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
    let [x, w, bias, residual, y] = core::array::from_fn(|i| call.tensor(i));
    let (activation, multiplies) = (p.activation().unwrap_or(Activation::None), p.multiplies());
    let by = By::of(p.order, &x, &w, scratch);
    scratch.isa.run(Linear { rows: call.rows(slot::X), x, w, bias, residual, y, activation, multiplies, by, scratch });
    Ok(())
}

/// How products are formed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernels) enum By {
    /// `cpu::gemm`.
    Lanes,
    /// The same with both factors in bf16.
    #[cfg(target_arch = "x86_64")]
    Pairs,
    /// `cpu::outer`.
    Outer,
    /// `cpu::amx`.
    #[cfg(target_arch = "x86_64")]
    Tiles,
}

impl By {
    /// For weights `w` in order `order`, an [`Order`]. It must not depend on how rows and columns are cut (nobody cuts
    /// prompts' rows one by one, or encoders' below [`ROWS_TO_SPLIT`] where there are matrix units).
    pub(in crate::kernels) fn of(order: u32, x: &Tensor, w: &Tensor, scratch: &Scratch) -> By {
        let order = Order::from_u32(order).unwrap_or(Order::Lanes);
        let is_outer = order == Order::Free && w.dtype() == DType::F32;
        // A row that was selected from many is read as decode reads its own: for the bandwidth.
        #[cfg(target_arch = "x86_64")]
        if order != Order::Lanes
            && x.extent(0) >= if is_outer { ROWS_TO_SPLIT } else { 2 }
            && scratch.isa.has_matrix_unit()
            && crate::cpu::amx::takes(w.extent(1))
        {
            return By::Tiles;
        }
        #[cfg(target_arch = "x86_64")]
        if x.extent(0) >= 2
            && scratch.isa.multiplies_pairs()
            && match w.dtype() {
                DType::Q8 | DType::Q4 | DType::Mx4 | DType::Int4 => matches!(order, Order::Prompt | Order::Rounded),
                DType::Bf16 => order == Order::Rounded,
                _ => false,
            }
        {
            return By::Pairs;
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (x, scratch);
        if is_outer { By::Outer } else { By::Lanes }
    }
}

/// Rows from which on tiles of f32 weights, which have to be split, are as fast as outer products.
///
/// PERF: 16x768x384 on one core 78 GFLOP/s as tiles and 78 as outer products, 64x1536x384 176 and 114; MiniLM with 16
/// tokens 1.15 of the time, with 32 1.0, with 64 0.7 (Sapphire Rapids, 2026-11-21).
#[cfg(target_arch = "x86_64")]
pub(crate) const ROWS_TO_SPLIT: usize = 32;

/// What is done with products of weights that come as `P` has them.
pub(in crate::kernels) trait Supplied: Sized {
    /// # Safety
    /// The level exists; `P` is for the weights' dtype.
    unsafe fn supplied<S: Simd, P: Supply<S>>(self);

    /// With pairs of bf16, of weights of `dtype`.
    ///
    /// # Safety
    /// The processor has them.
    #[cfg(target_arch = "x86_64")]
    unsafe fn in_pairs(self, dtype: DType) {
        use crate::cpu::gemm::AsPairs;
        use crate::cpu::simd::{Fours, Pairs, Q8, Vectors};
        // SAFETY: the caller's promise.
        unsafe {
            match dtype {
                DType::Q8 => self.supplied::<Vectors, AsPairs<Q8>>(),
                DType::Q4 => self.supplied::<Vectors, AsPairs<Fours<Q4>>>(),
                DType::Mx4 => self.supplied::<Vectors, AsPairs<Fours<Mx4>>>(),
                DType::Int4 => self.supplied::<Vectors, AsPairs<Fours<Int4>>>(),
                _ => self.supplied::<Vectors, InPlace<Pairs>>(),
            }
        }
    }
}

/// What is done with products of whole panels.
pub(in crate::kernels) trait InPanels: Sized {
    /// # Safety
    /// The level exists; `P` is for the weights' dtype.
    unsafe fn in_panels<S: Simd, P: Products<S>>(self);

    /// With those of weights of `dtype` that a matrix unit forms.
    ///
    /// # Safety
    /// The level exists, and so does the unit.
    #[cfg(target_arch = "x86_64")]
    unsafe fn in_tiles<S: Simd>(self, dtype: DType) {
        use crate::cpu::amx::{InPlace, InTerms, Tiles};
        use crate::cpu::simd::{F16, F32, Fours, Q8};
        // SAFETY: the caller's promise.
        unsafe {
            match dtype {
                DType::Bf16 => self.in_panels::<S, Tiles<InPlace>>(),
                DType::F16 => self.in_panels::<S, Tiles<InTerms<F16, 2>>>(),
                DType::Q8 => self.in_panels::<S, Tiles<InTerms<Q8, 2>>>(),
                DType::Q4 => self.in_panels::<S, Tiles<InTerms<Fours<Q4>, 2>>>(),
                DType::Mx4 => self.in_panels::<S, Tiles<InTerms<Fours<Mx4>, 1>>>(),
                DType::Int4 => self.in_panels::<S, Tiles<InTerms<Fours<Int4>, 2>>>(),
                _ => self.in_panels::<S, Tiles<InTerms<F32, 2>>>(),
            }
        }
    }
}

/// Forms products as `by` says, of weights of `dtype`.
///
/// # Safety
/// The level exists; `by` is what [`By::of`] says of such operands.
pub(in crate::kernels) unsafe fn form<L: Level>(products: impl InPanels + Supplied, by: By, dtype: DType) {
    // SAFETY: the caller's promise.
    unsafe {
        match (by, dtype) {
            (By::Outer, _) => products.in_panels::<L::S, Outer>(),
            #[cfg(target_arch = "x86_64")]
            (By::Tiles, _) => products.in_tiles::<L::S>(dtype),
            #[cfg(target_arch = "x86_64")]
            (By::Pairs, _) => products.in_pairs(dtype),
            (By::Lanes, DType::Bf16) => products.supplied::<L::S, InPlace<L::Bf16>>(),
            (By::Lanes, DType::F16) => products.supplied::<L::S, InPlace<L::F16>>(),
            (By::Lanes, DType::Q8) => products.supplied::<L::S, InPlace<L::Q8>>(),
            (By::Lanes, DType::Q4) => products.supplied::<L::S, InPlace<L::Fours<Q4>>>(),
            (By::Lanes, DType::Mx4) => products.supplied::<L::S, InPlace<L::Fours<Mx4>>>(),
            (By::Lanes, DType::Int4) => products.supplied::<L::S, InPlace<L::Fours<Int4>>>(),
            (By::Lanes, _) => products.supplied::<L::S, InPlace<L::F32>>(),
        }
    }
}

struct Linear<'a> {
    rows: usize,
    x: Tensor,
    w: Tensor,
    bias: Tensor,
    residual: Tensor,
    y: Tensor,
    activation: Activation,
    multiplies: bool,
    by: By,
    scratch: &'a mut Scratch,
}

impl Body for Linear<'_> {
    type Output = ();
    unsafe fn run<L: Level>(self) {
        let (by, dtype) = (self.by, self.w.dtype());
        // SAFETY: the level exists (caller), and `by` is for the operands.
        unsafe { form::<L>(self, by, dtype) }
    }
}

impl InPanels for Linear<'_> {
    unsafe fn in_panels<S: Simd, P: Products<S>>(self) {
        let areas = self.scratch.areas(outer::panel_areas(&self.x, self.rows, &[&self.w]));
        // SAFETY: the areas are as asked for, and a panel's sums lie as `finish` is told; the level exists (caller).
        unsafe {
            outer::panels::<S, P, 1>(&self.x, self.rows, [&self.w], areas, |rows, columns, [sums]| {
                self.finish::<S>(rows, columns, sums, outer::PANEL);
            });
        }
    }
}

impl Linear<'_> {
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
                let (activation, multiplies) = (self.activation, self.multiplies);
                S::call(Finish::<S> { sums, bias, activation, residual, multiplies, y, set: PhantomData });
            }
        }
    }
}

impl Supplied for Linear<'_> {
    unsafe fn supplied<S: Simd, P: Supply<S>>(self) {
        let (n, k) = (self.w.extent(0), self.w.extent(1));
        if self.rows == 0 || n == 0 {
            return;
        }
        let base = Weights::<P::Elem>::base_of(&self.w);
        let weights = Weights { base: [base; 2], stride: [self.w.stride(0); 2], rows: n, paired: false, k };
        let areas = self.scratch.areas(gemm::areas::<S, P>(self.rows, &weights));
        // SAFETY: the areas are as asked for; the weights' box holds n rows of k, whole lines where they have lines; a
        // part's sums lie as `finish` is told; the level exists (caller).
        unsafe {
            gemm::products::<S, P>(&self.x, self.rows, &weights, areas, |rows, columns, sums| {
                self.finish::<S>(rows, columns, sums, columns[1]);
            });
        }
    }
}

/// y = act(sums + bias) + residual, or times it, all of one length.
struct Finish<S> {
    sums: *const f32,
    bias: Option<Row>,
    activation: Activation,
    residual: Option<Row>,
    multiplies: bool,
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
                    let residual = residual.load::<S>(i, n);
                    v = if self.multiplies { S::mul(v, residual) } else { S::add(v, residual) };
                }
                self.y.store::<S>(i, n, v);
            }
            i += n;
        }
    }
}
