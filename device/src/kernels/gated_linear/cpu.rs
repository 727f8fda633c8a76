//! The CPU body of `gated_linear`: two gate rows and two up rows in a tile, so that both matrices stream together. See
//! `cpu::gemm`; the tolerance is `linear`'s for each factor.

use super::super::linear::cpu::{By, InPanels, Supplied, form};
use super::*;
use crate::cpu::gemm::{self, Supply, Weights};
use crate::cpu::outer::{self, Products};
use crate::cpu::rows::{self, Row};
use crate::cpu::simd::{Body, Leaf, Level, Simd, gate_by};
use crate::io::Tensor;
use core::marker::PhantomData;

/// With `gating` in the place of the parameters' activation.
pub(in crate::kernels) fn run(p: &Params, gating: Gating, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
    let [x, gate, up, gate_bias, up_bias, y] = core::array::from_fn(|i| call.tensor(i));
    if gate.dtype() != up.dtype() {
        // No checkpoint mixes them; one tile cannot.
        reference(p, gating, call);
        return Ok(());
    }
    let by = By::of(p.order, &x, &gate, scratch);
    scratch.isa.run(Gated { rows: call.rows(slot::X), x, gate, up, gate_bias, up_bias, y, gating, by, scratch });
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
    gating: Gating,
    by: By,
    scratch: &'a mut Scratch,
}

impl Body for Gated<'_> {
    type Output = ();
    unsafe fn run<L: Level>(self) {
        let (by, dtype) = (self.by, self.gate.dtype());
        // SAFETY: the level exists (caller), and `by` is for the operands; both matrices are of one dtype.
        unsafe { form::<L>(self, by, dtype) }
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

impl Supplied for Gated<'_> {
    unsafe fn supplied<S: Simd, P: Supply<S>>(self) {
        let (n, k) = (self.gate.extent(0), self.gate.extent(1));
        if self.rows == 0 || n == 0 {
            return;
        }
        assert!(self.up.extent(0) == n && self.up.extent(1) == k, "gate and up must have one shape");
        let weights = Weights {
            base: [&self.gate, &self.up].map(Weights::<P::Elem>::base_of),
            stride: [self.gate.stride(0), self.up.stride(0)],
            rows: n,
            paired: true,
            k,
        };
        let areas = self.scratch.areas(gemm::areas::<S, P>(self.rows, &weights));
        // SAFETY: the areas are as asked for; both boxes hold n rows of k, whole lines where they have lines; a part's
        // sums lie as `finish` is told; the level exists (caller).
        unsafe {
            gemm::products::<S, P>(&self.x, self.rows, &weights, areas, |rows, columns, gates| {
                let n = columns[1];
                self.finish::<S>(rows, columns, [gates, gates.add(n)], 2 * n);
            });
        }
    }
}

impl Gated<'_> {
    /// Writes columns `column..column + n` of `rows` rows from `first` on, of whose gates and ups there are sums, in
    /// rows `stride` apart.
    unsafe fn finish<S: Simd>(
        &self,
        [first, rows]: [usize; 2],
        [column, n]: [usize; 2],
        [gates, ups]: [*const f32; 2],
        stride: usize,
    ) {
        let gate_bias = self.gate_bias.is_present().then(|| Row::of(&self.gate_bias, [column], n));
        let up_bias = self.up_bias.is_present().then(|| Row::of(&self.up_bias, [column], n));
        let gating = self.gating;
        for m in 0..rows {
            let y = Row::of(&self.y, [first + m, column], n);
            // SAFETY: a row of `n` sums each; the level exists (caller).
            unsafe {
                let (gates, ups) = (gates.add(m * stride), ups.add(m * stride));
                S::call(Finish::<S> { gates, ups, gate_bias, up_bias, gating, y, set: PhantomData });
            }
        }
    }
}

/// y = what [`Gating`] makes of gate sums + bias and up sums + bias; all of one length.
struct Finish<S> {
    gates: *const f32,
    ups: *const f32,
    gate_bias: Option<Row>,
    up_bias: Option<Row>,
    gating: Gating,
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
                self.y.store::<S>(i, n, gate_by::<S>(self.gating, gate, up));
            }
            i += n;
        }
    }
}
