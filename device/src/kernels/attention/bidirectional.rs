//! The CPU body of bidirectional `attention` over f32 keys and values: all of a tile's scores at once.
//!
//! ```text
//! for each key/value head
//!   K ─▶ Kᵀ, packed                     once a task
//!   for each tile of queries
//!     q · Kᵀ ─▶ scores ─▶ max, exp, sum ─▶ exponentials · V ─▶ divided by the sum
//! ```
//! Every row sees the same positions, and no pass of one row has to give these bits again, so that both products are sums
//! of outer products ([`outer`]): a lane is a position, then an element of the value, and no lanes are added up.
//!
//! Sums run over positions (scores: over elements) in order, whatever rows a task has.
//!
//! Tolerance: as the causal body's.

use super::cpu::{Divide, exponentials, relative_to, scaled};
use super::{BIDIRECTIONAL, Params};
use crate::cpu::Scratch;
use crate::cpu::outer;
use crate::cpu::rows::Row;
use crate::cpu::simd::{Body, Leaf, Level, Simd};
use crate::io::Tensor;
use core::marker::PhantomData;
use perpetua_shared::DType;

/// Queries of a tile: whole tiles of [`outer::multiply`], whose scores stay in L2 at 4096 positions.
const QUERIES: usize = 48;

/// Whether [`Attend`] is for these operands.
pub(super) fn is_for(p: &Params, [q, k, v]: [&Tensor; 3]) -> bool {
    p.window == BIDIRECTIONAL && p.splits <= 1 && [q, k, v].iter().all(|tensor| tensor.dtype() == DType::F32)
}

/// `rows` queries, each of which attends to the first `positions` of k and v.
pub(super) struct Attend<'a> {
    pub(super) rows: usize,
    pub(super) positions: usize,
    pub(super) scale: f32,
    pub(super) q: Tensor,
    pub(super) k: Tensor,
    pub(super) v: Tensor,
    pub(super) y: Tensor,
    pub(super) scratch: &'a mut Scratch,
}

impl Body for Attend<'_> {
    type Output = ();
    unsafe fn run<L: Level>(self) {
        // SAFETY: the level exists (caller).
        unsafe { self.with::<L::S>() }
    }
}

impl Attend<'_> {
    unsafe fn with<S: Simd>(self) {
        let Attend { rows, positions, scale, q, k, v, y, scratch } = self;
        let (n_kv, group, d) = (q.extent(1), q.extent(2), q.extent(3));
        let queries = QUERIES.min(rows);
        // Rows of whole vectors, of any level.
        let (wide, long) = (d.next_multiple_of(16), positions.next_multiple_of(16));
        let in_place = d % S::LANES == 0;
        let padded = if in_place { 0 } else { positions * wide };
        let [keys, values, scores, totals, sums] =
            scratch.areas([d * long, padded, queries * long, queries, queries * wide]);
        for h in 0..n_kv {
            // SAFETY: `positions` rows of `d` are inside k and v (`run` has seen to it), whose elements are f32
            // (`is_for`) with unit stride, as q's are by the macro kernel's check; the areas are as large as asked for; the
            // level exists (caller).
            unsafe {
                let [k_head, v_head] = [&k, &v].map(|t| t.address([h, 0, 0]).cast::<f32>().cast_const());
                outer::transpose::<S>(k_head, k.stride(1), [positions, d], keys, long);
                let (values, v_stride) = match in_place {
                    true => (v_head, v.stride(1)),
                    false => {
                        for t in 0..positions {
                            core::ptr::copy_nonoverlapping(v_head.add(t * v.stride(1)), values.add(t * wide), d);
                        }
                        (values.cast_const(), wide)
                    }
                };
                for g in 0..group {
                    let mut first = 0;
                    while first < rows {
                        let n = queries.min(rows - first);
                        let q_rows = q.address([first, h, g, 0]).cast::<f32>().cast_const();
                        outer::multiply::<S>(q_rows, q.stride(0), [n, d, positions], keys, long, scores, long);
                        for m in 0..n {
                            let (scores, total) = (scores.add(m * long), totals.add(m));
                            S::call(Softmax::<S> { scores, positions, scale, total, set: PhantomData });
                        }
                        outer::multiply::<S>(scores, long, [n, positions, d], values, v_stride, sums, wide);
                        for m in 0..n {
                            let (sums, total) = (sums.add(m * wide), *totals.add(m));
                            let y = Row::of(&y, [first + m, h, g, 0], d);
                            S::call(Divide::<S> { sums, total, y, set: PhantomData });
                        }
                        first += n;
                    }
                }
            }
        }
    }
}

/// Turns scores, in whole vectors, into exp(score * scale - the largest), and sums them.
struct Softmax<S> {
    scores: *mut f32,
    positions: usize,
    scale: f32,
    total: *mut f32,
    set: PhantomData<S>,
}

impl<S: Simd> Leaf for Softmax<S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Softmax { scores, positions, scale, total, .. } = self;
        // SAFETY: vectors of the scores (see the type); the level exists (caller).
        unsafe {
            let max = scaled::<S>(scores, positions, scale);
            *total = exponentials::<S>(scores, positions, relative_to(max));
        }
    }
}
