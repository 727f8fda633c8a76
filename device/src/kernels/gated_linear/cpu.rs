//! The CPU body of `gated_linear`: two gate rows and two up rows in a tile, so that both matrices stream together. See
//! `cpu::gemm`; the tolerance is `linear`'s for each factor.

use super::super::linear::cpu::{By, InPanels};
use super::*;
use crate::cpu::gemm::{self, Plan, Weights};
use crate::cpu::outer::{self, Outer, Products};
use crate::cpu::rows::{self, Row};
use crate::cpu::simd::{Body, Dot, Leaf, Level, Simd, activate};
use crate::io::Tensor;
use core::marker::PhantomData;
use perpetua_shared::DType;

pub(super) fn run(p: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
    let [x, gate, up, gate_bias, up_bias, y] = core::array::from_fn(|i| call.tensor(i));
    if gate.dtype() != up.dtype() {
        // No checkpoint mixes them; one tile cannot.
        return GatedLinear::reference(p, call);
    }
    let activation = Activation::from_u32(p.activation).unwrap_or(Activation::None);
    let by = By::of(p.order, &x, &gate, scratch);
    scratch.isa.run(Gated { rows: call.rows(slot::X), x, gate, up, gate_bias, up_bias, y, activation, by, scratch });
    Ok(())
}

struct Gated<'a> {
    rows: usize,
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor,
    up_bias: Tensor,
    y: Tensor,
    activation: Activation,
    by: By,
    scratch: &'a mut Scratch,
}

impl Body for Gated<'_> {
    type Output = ();
    unsafe fn run<L: Level>(self) {
        // SAFETY: the level exists (caller).
        unsafe {
            match self.by {
                By::Lanes => {}
                By::Outer => return self.in_panels::<L::S, Outer>(),
                #[cfg(target_arch = "x86_64")]
                By::Tiles => {
                    let dtype = self.gate.dtype();
                    return self.in_tiles::<L::S>(dtype);
                }
            }
            match self.gate.dtype() {
                DType::Bf16 => self.with::<L::S, L::Bf16>(),
                DType::F16 => self.with::<L::S, L::F16>(),
                DType::Q8 => self.with::<L::S, L::Q8>(),
                DType::Q4 => self.with::<L::S, L::Q4>(),
                _ => self.with::<L::S, L::F32>(),
            }
        }
    }
}

impl InPanels for Gated<'_> {
    unsafe fn in_panels<S: Simd, P: Products<S>>(self) {
        let matrices = [&self.gate, &self.up];
        let areas = self.scratch.areas(outer::panel_areas(&self.x, self.rows, &matrices));
        // SAFETY: the areas are as asked for, and a panel's sums lie as `finish` is told; the level exists (caller).
        unsafe {
            outer::panels::<S, P, 2>(&self.x, self.rows, matrices, areas, |rows, columns, sums| {
                self.finish::<S>(rows, columns, sums, outer::PANEL);
            });
        }
    }
}

impl Gated<'_> {
    unsafe fn with<S: Simd, D: Dot<S>>(self) {
        let (n, k) = (self.gate.extent(0), self.gate.extent(1));
        if self.rows == 0 || n == 0 {
            return;
        }
        assert!(self.up.extent(0) == n && self.up.extent(1) == k, "gate and up must have one shape");
        let plan = Plan::new(self.rows, k);
        let weights = Weights {
            base: [Weights::<D::Elem>::base_of(&self.gate), Weights::<D::Elem>::base_of(&self.up)],
            stride: [self.gate.stride(0), self.up.stride(0)],
            rows: n,
            paired: true,
            k,
        };
        let part = weights.part_rows::<S, D>(plan.block_rows);
        let [packed, wide, sums] = self.scratch.areas([plan.packed_floats, k, plan.block_rows * 2 * part]);
        let mut first = 0;
        while first < self.rows {
            let cols = plan.block_rows.min(self.rows - first);
            // SAFETY: the areas are as large as the plan says; both boxes hold n rows of k (as do rows of `x`, or
            // `Row::of` panics); the level exists (caller).
            unsafe {
                weights.prefetch::<S, D>();
                gemm::pack_rows::<S, D>(|m| Row::of(&self.x, [first + m, 0], k), cols, k, wide, packed);
                let mut column = 0;
                while column < n {
                    let next = (column + part < n).then(|| weights.part(column + part, part.min(n - column - part)));
                    let n = part.min(n - column);
                    gemm::multiply::<S, D>(&weights.part(column, n), next, packed, cols, sums, 2 * n);
                    self.finish::<S>([first, cols], [column, n], [sums, sums.add(n)], 2 * n);
                    column += n;
                }
            }
            first += cols;
        }
    }

    /// Writes columns `column..column + n` of `rows` rows from `first` on, of whose gates and ups there are sums, in rows `stride`
    /// apart.
    unsafe fn finish<S: Simd>(
        &self,
        [first, rows]: [usize; 2],
        [column, n]: [usize; 2],
        [gates, ups]: [*const f32; 2],
        stride: usize,
    ) {
        let gate_bias = self.gate_bias.is_present().then(|| Row::of(&self.gate_bias, [column], n));
        let up_bias = self.up_bias.is_present().then(|| Row::of(&self.up_bias, [column], n));
        let activation = self.activation;
        for m in 0..rows {
            let y = Row::of(&self.y, [first + m, column], n);
            // SAFETY: a row of `n` sums each; the level exists (caller).
            unsafe {
                let (gates, ups) = (gates.add(m * stride), ups.add(m * stride));
                S::call(Finish::<S> { gates, ups, gate_bias, up_bias, activation, y, set: PhantomData });
            }
        }
    }
}

/// y = act(gate sums + bias) * (up sums + bias); all of one length.
struct Finish<S> {
    gates: *const f32,
    ups: *const f32,
    gate_bias: Option<Row>,
    up_bias: Option<Row>,
    activation: Activation,
    y: Row,
    set: PhantomData<S>,
}

impl<S: Simd> Leaf for Finish<S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let len = self.y.len();
        let mut i = 0;
        while i < len {
            let n = S::LANES.min(len - i);
            // SAFETY: inside all rows (see the type).
            unsafe {
                let mut gate = rows::load::<S>(self.gates.add(i), n);
                let mut up = rows::load::<S>(self.ups.add(i), n);
                if let Some(bias) = self.gate_bias {
                    gate = S::add(gate, bias.load::<S>(i, n));
                }
                if let Some(bias) = self.up_bias {
                    up = S::add(up, bias.load::<S>(i, n));
                }
                self.y.store::<S>(i, n, S::mul(activate::<S>(self.activation, gate), up));
            }
            i += n;
        }
    }
}
