//! The CPU body of bidirectional `attention` over f32 keys and values: all of a tile's scores at once.
//!
//! ```text
//! for each key/value head
//!   K ─▶ Kᵀ, packed                     once a task
//!   for each tile of queries
//!     q · Kᵀ ─▶ scores ─▶ max, exp, sum ─▶ exponentials · V ─▶ divided by the sum
//! ```
//! No pass of one row has to give these bits again, so that both products are sums of outer products ([`outer`]): a
//! lane is a position, then an element of the value, and no lanes are added up. With a window a tile takes the
//! positions that one of its rows sees, from a whole vector on; what a row does not see is added as a product with
//! zero, which changes nothing as long as values are finite.
//!
//! Sums run over positions (scores: over elements) in order, whatever rows a task has.
//!
//! Tolerance: as the causal body's.

use super::Params;
use super::cpu::{Divide, Seen, exponentials, relative_to, scaled};
use crate::cpu::Scratch;
use crate::cpu::outer;
use crate::cpu::rows::Row;
use crate::cpu::simd::{Body, Leaf, Level, Simd};
use crate::io::Tensor;
use core::marker::PhantomData;
use core::ops::Range;
use perpetua_shared::DType;

/// Queries of a tile: whole tiles of [`outer::multiply`], whose scores stay in L2 at 4096 positions.
const QUERIES: usize = 48;

/// Positions at whose multiples tiles' begin: whole vectors, of any level.
const STEP: usize = 16;

/// Whether [`Attend`] is for these operands.
pub(super) fn is_for(p: &Params, [q, k, v]: [&Tensor; 3]) -> bool {
    p.ahead > 0 && p.splits <= 1 && [q, k, v].iter().all(|tensor| tensor.dtype() == DType::F32)
}

/// `rows` queries, which attend to what they see of k and v.
pub(super) struct Attend<'a> {
    pub(super) rows: usize,
    pub(super) seen: Seen,
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
        let Attend { rows, seen, scale, q, k, v, y, scratch } = self;
        let (n_kv, group, d) = (q.extent(1), q.extent(2), q.extent(3));
        // What any row sees, and what the rows of a tile do.
        let of_rows = |first: usize, n: usize| seen.by(first).start / STEP * STEP..seen.by(first + n - 1).end;
        let Range { start: begin, end } = of_rows(0, rows);
        let positions = end - begin;
        let queries = QUERIES.min(rows);
        let (wide, long) = (d.next_multiple_of(STEP), positions.next_multiple_of(STEP));
        let in_place = d % S::LANES == 0;
        let padded = if in_place { 0 } else { positions * wide };
        let [keys, values, scores, totals, sums] =
            scratch.areas([d * long, padded, queries * long, queries, queries * wide]);
        for h in 0..n_kv {
            // SAFETY: `positions` rows of `d` from `begin` on are inside k and v (`run` has seen to it), whose elements
            // are f32 (`is_for`) with unit stride, as q's are by the macro kernel's check; the areas are as large as
            // asked for; the level exists (caller).
            unsafe {
                let [k_head, v_head] = [&k, &v].map(|t| t.address([h, begin, 0]).cast::<f32>().cast_const());
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
                        let part = of_rows(first, n);
                        let (at, count) = (part.start - begin, part.len());
                        let q_rows = q.address([first, h, g, 0]).cast::<f32>().cast_const();
                        let (stride, keys) = (q.stride(0), keys.add(at));
                        outer::multiply::<S>(q_rows, stride, [n, d, count], keys, long, scores, long);
                        for m in 0..n {
                            let (scores, total) = (scores.add(m * long), totals.add(m));
                            let Range { start, end } = seen.by(first + m);
                            let seen = start - part.start..end - part.start;
                            S::call(Softmax::<S> { scores, seen, count, scale, total, set: PhantomData });
                        }
                        let values = values.add(at * v_stride);
                        outer::multiply::<S>(scores, long, [n, count, d], values, v_stride, sums, wide);
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

/// Turns the scores of what is `seen`, in whole vectors, into exp(score * scale - the largest), and sums them; the
/// others, of `count`, become zeros.
struct Softmax<S> {
    scores: *mut f32,
    seen: Range<usize>,
    count: usize,
    scale: f32,
    total: *mut f32,
    set: PhantomData<S>,
}

impl<S: Simd> Leaf for Softmax<S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Softmax { scores, seen: Range { start, end }, count, scale, total, .. } = self;
        // SAFETY: vectors of the scores (see the type); the level exists (caller).
        unsafe {
            (0..start).for_each(|before| *scores.add(before) = f32::NEG_INFINITY);
            let max = scaled::<S>(scores, end, scale);
            *total = exponentials::<S>(scores, end, relative_to(max));
            (end..count).for_each(|after| *scores.add(after) = 0.0);
        }
    }
}
