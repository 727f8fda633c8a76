//! Bodies that go through the rows of a sequence one after the other, from state to state, and what stands behind them.
//!
//! Each sums in one order, whatever number of rows a pass has: a prompt gives the bits of its tokens one by one.

use super::Scratch;
use super::rows::{self, Row};
use super::rowwise::sum_over;
use super::simd::{Body, Leaf, Level, Simd, activate, gated};
use crate::io::Tensor;
use crate::kernels::linear::Activation;
use crate::kernels::recurrence;
use core::marker::PhantomData;

/// See the macro kernel `causal_conv`.
pub(crate) struct CausalConv<'a> {
    pub(crate) rows: usize,
    /// Whether the state counts as zeros.
    pub(crate) is_first: bool,
    pub(crate) activation: Activation,
    pub(crate) x: Tensor,
    pub(crate) w: Tensor,
    pub(crate) bias: Tensor,
    pub(crate) gate: Tensor,
    pub(crate) scale: Tensor,
    pub(crate) state: Tensor,
    pub(crate) y: Tensor,
    pub(crate) scratch: &'a mut Scratch,
}

/// Columns whose rows lie in the scratch memory together.
const COLUMNS: usize = 128;

impl Body for CausalConv<'_> {
    type Output = ();
    unsafe fn run<L: Level>(self) {
        let (n, taps) = (self.x.extent(1), self.w.extent(1));
        let [u, filters] = self.scratch.areas([(taps - 1 + self.rows) * COLUMNS, taps * COLUMNS]);
        for first in (0..n).step_by(COLUMNS) {
            let columns = COLUMNS.min(n - first);
            for (c, j) in (0..columns).flat_map(|c| (0..taps).map(move |j| (c, j))) {
                // SAFETY: inside the area.
                unsafe { filters.add(j * COLUMNS + c).write(self.w.get([first + c, j])) };
            }
            // SAFETY: the level exists (caller); the areas have room, and nobody else has them.
            unsafe { L::S::call(Columns::<L::S> { conv: &self, first, columns, u, filters, set: PhantomData }) };
        }
    }
}

struct Columns<'a, 'b, S> {
    conv: &'a CausalConv<'b>,
    first: usize,
    columns: usize,
    /// `[taps - 1 + rows, COLUMNS]`: what is convolved, that of earlier passes first.
    u: *mut f32,
    /// `[taps, COLUMNS]`.
    filters: *const f32,
    set: PhantomData<S>,
}

impl<S: Simd> Leaf for Columns<'_, '_, S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let CausalConv { rows, is_first, activation, x, w, bias, gate, scale, state, y, .. } = self.conv;
        let (first, columns, before) = (self.first, self.columns, w.extent(1) - 1);
        let row = |tensor: &Tensor, r: usize| Row::of(tensor, [r, first], columns);
        let optional = |tensor: &Tensor, r: usize| tensor.is_present().then(|| row(tensor, r));
        // SAFETY: inside the rows and the areas; the set exists (caller).
        unsafe {
            let at = |r: usize, i: usize| self.u.add(r * COLUMNS + i);
            for r in 0..before + rows {
                let (from, by) = match r.checked_sub(before) {
                    Some(r) => (Some(row(x, r)), optional(gate, r)),
                    None => ((!is_first).then(|| row(state, r)), None),
                };
                let mut i = 0;
                while i < columns {
                    let n = S::LANES.min(columns - i);
                    let mut value = match from {
                        Some(from) => from.load::<S>(i, n),
                        None => S::splat(0.0),
                    };
                    if let Some(by) = by {
                        value = S::mul(value, by.load::<S>(i, n));
                    }
                    rows::store::<S>(at(r, i), n, value);
                    i += n;
                }
            }
            let bias = bias.is_present().then(|| Row::of(bias, [first], columns));
            for r in 0..*rows {
                let (scale, y) = (optional(scale, r), row(y, r));
                let mut i = 0;
                while i < columns {
                    let n = S::LANES.min(columns - i);
                    let mut sum = S::splat(0.0);
                    for j in 0..=before {
                        let filter = rows::load::<S>(self.filters.add(j * COLUMNS + i), n);
                        sum = S::fma(filter, rows::load::<S>(at(r + j, i), n), sum);
                    }
                    if let Some(bias) = bias {
                        sum = S::add(sum, bias.load::<S>(i, n));
                    }
                    let mut made = activate::<S>(*activation, sum);
                    if let Some(scale) = scale {
                        made = S::mul(made, scale.load::<S>(i, n));
                    }
                    y.store::<S>(i, n, made);
                    i += n;
                }
            }
            // A pass without rows leaves what there is.
            for j in 0..if *rows > 0 { before } else { 0 } {
                let state = row(state, j);
                let mut i = 0;
                while i < columns {
                    let n = S::LANES.min(columns - i);
                    state.store::<S>(i, n, rows::load::<S>(at(rows + j, i), n));
                    i += n;
                }
            }
        }
    }
}

/// See the macro kernel `recurrence`.
pub(crate) struct Recurrence<'a> {
    pub(crate) rows: usize,
    /// Whether the state counts as zeros.
    pub(crate) is_first: bool,
    pub(crate) q: Tensor,
    pub(crate) k: Tensor,
    pub(crate) v: Tensor,
    /// a, b, a_log and dt_bias.
    pub(crate) gates: [Tensor; 4],
    pub(crate) skip: Tensor,
    pub(crate) state: Tensor,
    pub(crate) y: Tensor,
    pub(crate) scratch: &'a mut Scratch,
}

/// Rows of a state, 16 KiB of 128 elements each, that stay in the first cache while the pass's rows go through them.
const STATE_ROWS: usize = 32;

/// A row of the pass, as all rows of a head's state want it.
#[derive(Clone, Copy)]
struct Found {
    /// How much of the state stays.
    decay: f32,
    /// What multiplies what is added.
    by: f32,
    /// k . q.
    both: f32,
    /// How much of what is known at the key is taken from what is added.
    of_known: f32,
    /// How much of v is in y.
    skip: f32,
}

impl Body for Recurrence<'_> {
    type Output = ();
    unsafe fn run<L: Level>(self) {
        let [heads, group, d_v, d_k] = [0, 1, 2, 3].map(|dim| self.state.extent(dim));
        let rows = self.rows;
        if rows == 0 {
            return;
        }
        // Three words of a row are what is found of it.
        let [keys, queries, found] = self.scratch.areas([rows * d_k, rows * d_k, 3 * rows]);
        let [a, b, a_log, dt_bias] = &self.gates;
        let corrects = b.is_present();
        for h in 0..heads {
            for r in 0..rows {
                let copy = |from: &Tensor, to: *mut f32, by: f32| {
                    let (from, by) = (Row::of(from, [r, h, 0], d_k), corrects.then_some(by));
                    // SAFETY: the level exists (caller); the area has a row of as many.
                    unsafe { L::S::call(Copied::<L::S> { from, to: to.add(r * d_k), by, set: PhantomData }) };
                };
                copy(&self.k, keys, 1.0);
                copy(&self.q, queries, 1.0 / (d_k as f32).sqrt());
                // SAFETY: both have just been written.
                let both = unsafe {
                    let (key, query) = (keys.add(r * d_k), queries.add(r * d_k));
                    L::S::call(Dot::<L::S> { a: key, b: query, n: d_k, set: PhantomData })
                };
                // SAFETY: inside the area.
                unsafe { found.add(3 * r + 2).write(both) };
            }
            for g in 0..group {
                for r in 0..rows {
                    let b = corrects.then(|| b.get([r, h, g]));
                    let gates = recurrence::gates(a.get([r, h, g]), b, a_log.get([h, g]), dt_bias.get([h, g]));
                    // SAFETY: inside the area.
                    unsafe { found.add(3 * r).cast::<[f32; 2]>().write(gates) };
                }
                let skip = if self.skip.is_present() { self.skip.get([h, g]) } else { 0.0 };
                for first in (0..d_v).step_by(STATE_ROWS) {
                    let n = STATE_ROWS.min(d_v - first);
                    if self.is_first {
                        (first..first + n).for_each(|j| self.state.slice_mut([h, g, j, 0], d_k).fill(0.0));
                    }
                    let mut state = [core::ptr::null_mut(); STATE_ROWS];
                    for (j, row) in state[..n].iter_mut().enumerate() {
                        *row = self.state.address([h, g, first + j, 0]).cast();
                    }
                    for r in 0..rows {
                        // SAFETY: written above.
                        let found = unsafe {
                            let [decay, by, both] = found.add(3 * r).cast::<[f32; 3]>().read();
                            Found { decay, by, both, of_known: if corrects { decay } else { 0.0 }, skip }
                        };
                        // SAFETY: the level exists (caller); the rows are there, of f32, and this task's alone.
                        unsafe {
                            L::S::call(StateRows::<L::S> {
                                state: &state[..n],
                                key: keys.add(r * d_k),
                                query: queries.add(r * d_k),
                                d_k,
                                found,
                                v: Row::of(&self.v, [r, h, g, first], n),
                                y: Row::of(&self.y, [r, h, g, first], n),
                                set: PhantomData,
                            });
                        }
                    }
                }
            }
        }
    }
}

/// x / sqrt(x . x + [`recurrence::NORM_EPS`]) * by; without `by`, x.
struct Copied<S> {
    from: Row,
    to: *mut f32,
    by: Option<f32>,
    set: PhantomData<S>,
}

impl<S: Simd> Leaf for Copied<S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let len = self.from.len();
        // SAFETY: inside the rows; the set exists (caller).
        unsafe {
            let squares = sum_over!(S, len, |i, n| {
                let x = self.from.load::<S>(i, n);
                S::mul(x, x)
            });
            let scale = S::splat(self.by.map_or(1.0, |by| by / (squares + recurrence::NORM_EPS).sqrt()));
            let mut i = 0;
            while i < len {
                let n = S::LANES.min(len - i);
                rows::store::<S>(self.to.add(i), n, S::mul(self.from.load::<S>(i, n), scale));
                i += n;
            }
        }
    }
}

/// a . b, of `n` elements.
struct Dot<S> {
    a: *const f32,
    b: *const f32,
    n: usize,
    set: PhantomData<S>,
}

impl<S: Simd> Leaf for Dot<S> {
    type Output = f32;
    #[inline(always)]
    unsafe fn run(self) -> f32 {
        // SAFETY: inside the rows; the set exists (caller).
        unsafe {
            sum_over!(S, self.n, |i, n| S::mul(rows::load::<S>(self.a.add(i), n), rows::load::<S>(self.b.add(i), n)))
        }
    }
}

/// One row of the pass through some rows of a head's state: two at a time, so that key and query are loaded for both.
struct StateRows<'a, S> {
    state: &'a [*mut f32],
    key: *const f32,
    query: *const f32,
    d_k: usize,
    found: Found,
    v: Row,
    y: Row,
    set: PhantomData<S>,
}

impl<S: Simd> Leaf for StateRows<'_, S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let (len, Found { decay, by, both, of_known, skip }) = (self.state.len(), self.found);
        // Beyond the last row, whole vectors.
        let (mut v, mut y) = ([0f32; STATE_ROWS + 16], [0f32; STATE_ROWS + 16]);
        // SAFETY: inside the rows; the set exists (caller).
        unsafe {
            let mut i = 0;
            while i < len {
                let n = S::LANES.min(len - i);
                S::store(v.as_mut_ptr().add(i), self.v.load::<S>(i, n));
                i += n;
            }
            let mut j = 0;
            while j < len {
                // A last one alone is done twice at once, into the same place.
                let two = [self.state[j], self.state[(j + 1).min(len - 1)]];
                let mut sums = [S::splat(0.0); 4];
                i = 0;
                while i < self.d_k {
                    let n = S::LANES.min(self.d_k - i);
                    let (key, query) = (rows::load::<S>(self.key.add(i), n), rows::load::<S>(self.query.add(i), n));
                    let (one, other) = (rows::load::<S>(two[0].add(i), n), rows::load::<S>(two[1].add(i), n));
                    sums[0] = S::fma(one, key, sums[0]);
                    sums[1] = S::fma(one, query, sums[1]);
                    sums[2] = S::fma(other, key, sums[2]);
                    sums[3] = S::fma(other, query, sums[3]);
                    i += n;
                }
                let [known, asked, other_known, other_asked] = S::sum4(sums);
                let added = [by * (v[j] - of_known * known), by * (v[j + 1] - of_known * other_known)];
                y[j] = decay * asked + added[0] * both + skip * v[j];
                y[j + 1] = decay * other_asked + added[1] * both + skip * v[j + 1];
                let added = [S::splat(added[0]), S::splat(if j + 1 < len { added[1] } else { added[0] })];
                let stays = S::splat(decay);
                i = 0;
                while i < self.d_k {
                    let n = S::LANES.min(self.d_k - i);
                    let key = rows::load::<S>(self.key.add(i), n);
                    let (one, other) = (rows::load::<S>(two[0].add(i), n), rows::load::<S>(two[1].add(i), n));
                    rows::store::<S>(two[0].add(i), n, S::fma(key, added[0], S::mul(one, stays)));
                    rows::store::<S>(two[1].add(i), n, S::fma(key, added[1], S::mul(other, stays)));
                    i += n;
                }
                j += 2;
            }
            i = 0;
            while i < len {
                let n = S::LANES.min(len - i);
                self.y.store::<S>(i, n, rows::load::<S>(y.as_ptr().add(i), n));
                i += n;
            }
        }
    }
}

/// See the macro kernel `gated`.
pub(crate) struct Gated {
    pub(crate) rows: usize,
    pub(crate) params: crate::kernels::gated::Params,
    pub(crate) x: Tensor,
    pub(crate) w: Tensor,
    pub(crate) gate: Tensor,
    pub(crate) y: Tensor,
}

impl Body for Gated {
    type Output = ();
    unsafe fn run<L: Level>(self) {
        let (heads, d) = (self.x.extent(1), self.x.extent(2));
        for (r, h) in (0..self.rows).flat_map(|r| (0..heads).map(move |h| (r, h))) {
            let [x, gate, y] = [&self.x, &self.gate, &self.y].map(|of| Row::of(of, [r, h, 0], of.extent(2)));
            let w = self.w.is_present().then(|| Row::of(&self.w, [0], d));
            let params = self.params;
            // SAFETY: the level exists (caller); the rows have one length, but for a gate that is one for all.
            unsafe { L::S::call(GatedRow::<L::S> { x, w, gate, y, params, set: PhantomData }) };
        }
    }
}

struct GatedRow<S> {
    x: Row,
    w: Option<Row>,
    gate: Row,
    y: Row,
    params: crate::kernels::gated::Params,
    set: PhantomData<S>,
}

impl<S: Simd> GatedRow<S> {
    /// f of the gate's element, where it is one for all.
    #[inline(always)]
    unsafe fn opened_at_once(&self) -> Option<S::F> {
        // SAFETY: the caller's promises are the same; beyond the one element are zeros.
        (self.gate.len() == 1).then(|| unsafe { self.opened(S::splat(S::sum(self.gate.load::<S>(0, 1)))) })
    }

    /// f of these.
    #[inline(always)]
    unsafe fn opened(&self, gate: S::F) -> S::F {
        // SAFETY: the caller's promises are the same.
        unsafe { gated::<S>(if self.params.is_silu == 1 { gate } else { S::splat(1.0) }, gate) }
    }
}

impl<S: Simd> Leaf for GatedRow<S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let len = self.x.len();
        // SAFETY: inside the rows; the set exists (caller).
        unsafe {
            let at_once = self.opened_at_once();
            let opened = |i: usize, n: usize| match at_once {
                Some(opened) => opened,
                None => self.opened(self.gate.load::<S>(i, n)),
            };
            // Of nobody where there is no norm.
            let normed = if self.w.is_some() { len } else { 0 };
            let squares = sum_over!(S, normed, |i, n| {
                let mut x = self.x.load::<S>(i, n);
                if self.params.gates_first == 1 {
                    x = S::mul(x, opened(i, n));
                }
                S::mul(x, x)
            });
            let scale = S::splat(1.0 / (squares / len as f32 + self.params.eps).sqrt());
            let mut i = 0;
            while i < len {
                let n = S::LANES.min(len - i);
                let mut x = S::mul(self.x.load::<S>(i, n), opened(i, n));
                if let Some(w) = self.w {
                    x = S::mul(S::mul(x, scale), w.load::<S>(i, n));
                }
                self.y.store::<S>(i, n, x);
                i += n;
            }
        }
    }
}
