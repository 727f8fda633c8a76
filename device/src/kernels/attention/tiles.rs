//! The CPU body of `attention` in prompts, on a matrix unit ([`amx`]), over bf16 keys and values.
//!
//! ```text
//! for each key/value head
//!   q ─▶ hi + lo, packed                       once a task
//!   for each block of 256 positions
//!     V ─▶ Vᵀ                                  once a task
//!     for each tile of 32 queries (rows x the heads of the group)
//!       K · qᵀ ─▶ scores ─▶ max, exp, sum ─▶ exponentials, hi + lo ─▶ Vᵀ · them ─▶ weighted sums, rescaled
//! ```
//! K and V are exact operands, queries and exponentials keep 16 bits in two bf16 terms. A lane is a query, so that no
//! lanes are added up, and exponentials are packed where they are formed.
//!
//! A row's results do not depend on the rows beside it: blocks start at multiples of 256, each of a row's sums runs
//! over positions in order, and what it may not see is added as a product with zero, which changes nothing as long as
//! keys and values are finite. The body looks at them, and leaves a task that sees others to the vectors, which add
//! nothing.
//!
//! Tolerance: as the other bodies'. Scores are off by |q| |k| scale * 2^-16 at most, weighted sums by max |v| * 2^-16.

use super::Params;
use super::cpu::{Divide, MAX_HEAD_DIM, Seen, before_all};
use crate::cpu::Scratch;
use crate::cpu::amx::{self, InPlace, TILE, Tiles};
use crate::cpu::outer::{self, Products};
use crate::cpu::rows::Row;
use crate::cpu::simd::{Leaf, STEP, Simd, Vectors, exp, with_avx512_bf16};
use crate::io::Tensor;
use crate::kernels::linear::Order;
use core::arch::x86_64::*;
use core::marker::PhantomData;
use perpetua_shared::DType;

/// Positions of a block: with as many, a tile's scores and exponentials are in L2, most of them in L1.
const BLOCK: usize = 256;

/// Queries of a tile: what the unit multiplies at once.
const QUERIES: usize = 2 * TILE;

/// Whether [`Attend`] is for these operands.
pub(super) fn is_for(p: &Params, [q, k, v]: [&Tensor; 3], scratch: &Scratch) -> bool {
    p.order != Order::Lanes as u32
        && scratch.isa.has_matrix_unit()
        && [k, v].iter().all(|tensor| tensor.dtype() == DType::Bf16)
        && amx::takes(q.extent(3))
        && q.extent(3) <= MAX_HEAD_DIM
        // Rows see everything before them.
        && p.window as usize >= k.extent(1)
}

/// `rows` rows of queries, all of which see position 0.
pub(super) struct Attend<'a> {
    pub(super) rows: usize,
    pub(super) seen: Seen,
    pub(super) q: &'a Tensor,
    pub(super) k: &'a Tensor,
    pub(super) v: &'a Tensor,
    pub(super) y: &'a Tensor,
    pub(super) sinks: &'a Tensor,
}

/// What a task keeps, in scratch.
#[derive(Clone, Copy)]
struct Areas {
    /// Queries of a head, as [`amx::split`] packs them.
    packed: *mut f32,
    /// 16 queries in f32.
    wide: *mut f32,
    /// Weighted sums of every tile: [d, QUERIES].
    sums: *mut f32,
    /// Running maximum and total of every query.
    max: *mut f32,
    total: *mut f32,
    /// Vᵀ of a block: [d, BLOCK] bf16.
    values: *mut f32,
    /// Scores of a tile: [BLOCK, QUERIES].
    scores: *mut f32,
    /// Their exponentials, packed as activations are.
    weights: *mut f32,
    /// What the maximum's growth makes of a tile's sums.
    factor: *mut f32,
    /// The weighted sums of a block, as `sums`; in the end the rows of a tile: [QUERIES, d].
    found: *mut f32,
}

impl Attend<'_> {
    /// Whether it has been done: keys and values must be finite.
    ///
    /// # Safety
    /// The operands are as [`is_for`] wants them, with positions of unit stride, and hold as many positions as the last
    /// row sees.
    pub(super) unsafe fn run(&self, scratch: &mut Scratch) -> bool {
        let (n_kv, group, d) = (self.q.extent(1), self.q.extent(2), self.q.extent(3));
        let queries = (self.rows * group).next_multiple_of(QUERIES);
        let wide = if self.q.dtype() == DType::F32 { 0 } else { TILE * d };
        let [packed, wide, sums, max, total, values, scores, weights, factor, found] = scratch.areas([
            queries * d,
            wide,
            queries * d,
            queries,
            queries,
            d * BLOCK / 2,
            BLOCK * QUERIES,
            BLOCK * QUERIES,
            QUERIES,
            d * QUERIES,
        ]);
        let areas = Areas { packed, wide, sums, max, total, values, scores, weights, factor, found };
        // SAFETY: the areas are as large as their descriptions say; the rest is the caller's promise.
        (0..n_kv).all(|h| unsafe { self.head(h, areas) })
    }

    /// Positions that query `m` sees, from 0 on.
    fn visible(&self, m: usize) -> usize {
        self.seen.by(m / self.q.extent(2)).end
    }

    unsafe fn head(&self, h: usize, areas: Areas) -> bool {
        let (group, d) = (self.q.extent(2), self.q.extent(3));
        let queries = self.rows * group;
        // SAFETY: positions below the last query's visible ones are inside K and V (caller), tiles inside the areas;
        // the unit is there (`is_for`).
        unsafe {
            for m in 0..queries.next_multiple_of(TILE) {
                // Beyond the last query are some that nobody looks at.
                (*areas.max.add(m), *areas.total.add(m)) = before_all(self.sinks, [h, m % group]);
            }
            for first in (0..queries).step_by(TILE) {
                self.pack_queries(h, first, areas);
            }
            let (k, k_stride) = (self.k.address([h, 0, 0]).cast::<u16>().cast_const(), self.k.stride(1));
            let (v, v_stride) = (self.v.address([h, 0, 0]).cast::<u16>().cast_const(), self.v.stride(1));
            let all = self.visible(queries - 1);
            for start in (0..all).step_by(BLOCK) {
                let n = BLOCK.min(all - start);
                let keys = k.add(start * k_stride);
                let block = Block { keys, k_stride, values: v.add(start * v_stride), v_stride, n, d, to: areas.values };
                if !with_avx512_bf16(block) {
                    return false;
                }
                for first in (0..queries).step_by(QUERIES) {
                    let count = QUERIES.min(queries - first);
                    let seen = self.visible(first + count - 1).saturating_sub(start).min(n);
                    if seen > 0 {
                        self.tile([first, count], [start, seen], [keys.cast(), areas.values.cast()], k_stride, areas);
                    }
                }
            }
            for first in (0..queries).step_by(QUERIES) {
                let count = QUERIES.min(queries - first);
                let shape = [d, count.next_multiple_of(TILE)];
                outer::transpose::<Vectors>(areas.sums.add(first * d), QUERIES, shape, areas.found, d);
                for m in 0..count {
                    let y = Row::of(self.y, self.place(h, first + m), d);
                    let (sums, total) = (areas.found.add(m * d).cast_const(), *areas.total.add(first + m));
                    Vectors::call(Divide::<Vectors> { sums, total, y, set: PhantomData });
                }
            }
        }
        true
    }

    /// Where query `m` of head `h` stands in q and y.
    fn place(&self, h: usize, m: usize) -> [usize; 4] {
        let group = self.q.extent(2);
        [m / group, h, m % group, 0]
    }

    /// Queries `first..first + TILE`, as many of them as there are.
    unsafe fn pack_queries(&self, h: usize, first: usize, areas: Areas) {
        let d = self.q.extent(3);
        let n = TILE.min(self.rows * self.q.extent(2) - first);
        let mut rows = [core::ptr::null(); TILE];
        for (i, row) in rows.iter_mut().take(n).enumerate() {
            let query = Row::of(self.q, self.place(h, first + i), d);
            // SAFETY: `wide` has room for TILE queries unless they are f32; `packed` for all of them.
            *row = unsafe { outer::widened::<Vectors>(query, areas.wide.wrapping_add(i * d)) };
        }
        // SAFETY: as above; `d` is whole tiles (`is_for`).
        unsafe { amx::split(rows, [n, d], areas.packed.add(first * d)) };
    }

    /// Lets queries `first..first + count` see `seen` positions of the block that begins at `start`.
    unsafe fn tile(
        &self,
        [first, count]: [usize; 2],
        [start, seen]: [usize; 2],
        [keys, values]: [*const u16; 2],
        k_stride: usize,
        areas: Areas,
    ) {
        let d = self.q.extent(3);
        let long = seen.next_multiple_of(STEP);
        // SAFETY: the operands and areas are `head`'s.
        unsafe {
            let packed = areas.packed.add(first * d);
            let multiply = <Tiles<InPlace> as Products<Vectors>>::multiply;
            multiply(keys, k_stride, [seen, d, count], packed, 0, areas.scores, QUERIES);
            for m in (0..count).step_by(TILE) {
                let seen_by =
                    core::array::from_fn(|i| self.visible(first + m + i).saturating_sub(start).min(seen) as i32);
                with_avx512_bf16(Softmax {
                    scores: areas.scores.add(m),
                    n: seen,
                    seen: seen_by,
                    scale: self.seen.p.scale,
                    max: areas.max.add(first + m),
                    total: areas.total.add(first + m),
                    factor: areas.factor.add(m),
                    weights: areas.weights.add(m * long),
                });
            }
            let sums = areas.sums.add(first * d);
            // Every query sees position 0.
            let to = if start == 0 { sums } else { areas.found };
            multiply(values, BLOCK, [d, long, count], areas.weights, 0, to, QUERIES);
            if start > 0 {
                Vectors::call(Rescale {
                    sums,
                    factor: areas.factor,
                    found: areas.found,
                    d,
                    blocks: count.div_ceil(TILE),
                });
            }
        }
    }
}

/// Vᵀ of `n` positions into `to`, with zeros up to whole steps. Whether their keys and values are finite.
struct Block {
    keys: *const u16,
    k_stride: usize,
    values: *const u16,
    v_stride: usize,
    n: usize,
    d: usize,
    to: *mut f32,
}

/// Pairs of positions by elements.
#[repr(align(64))]
struct Pairs([[u32; TILE]; TILE]);

impl Leaf for Block {
    type Output = bool;
    unsafe fn run(self) -> bool {
        let Block { keys, k_stride, values, v_stride, n, d, to } = self;
        let mut pairs = Pairs([[0; TILE]; TILE]);
        // SAFETY: elements of the positions (see the type), 16 at a time, which divide d; `to` holds d rows of BLOCK.
        unsafe {
            let mut seen = _mm256_setzero_si256();
            for t in 0..n {
                for i in (0..d).step_by(TILE) {
                    seen = largest(seen, _mm256_loadu_si256(keys.add(t * k_stride + i).cast()));
                }
            }
            for t in (0..n).step_by(STEP) {
                for i in (0..d).step_by(TILE) {
                    for (p, pair) in pairs.0.iter_mut().enumerate() {
                        let (mut even, mut odd) = (_mm256_setzero_si256(), _mm256_setzero_si256());
                        let t = t + 2 * p;
                        if t < n {
                            even = _mm256_loadu_si256(values.add(t * v_stride + i).cast());
                        }
                        if t + 1 < n {
                            odd = _mm256_loadu_si256(values.add((t + 1) * v_stride + i).cast());
                        }
                        seen = largest(largest(seen, even), odd);
                        let odd = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(odd));
                        _mm512_store_si512(pair.as_mut_ptr().cast(), _mm512_or_si512(_mm512_cvtepu16_epi32(even), odd));
                    }
                    // A pair is as large as an f32, and moves as one.
                    Vectors::transpose(pairs.0.as_ptr().cast(), TILE, to.add(i * BLOCK / 2 + t / 2), BLOCK / 2);
                }
            }
            _mm256_cmpge_epu16_mask(seen, _mm256_set1_epi16(0x7f80)) == 0
        }
    }
}

/// The larger magnitudes of bf16, NaN being larger than infinity: their order is that of their bits.
#[inline(always)]
unsafe fn largest(a: __m256i, b: __m256i) -> __m256i {
    // SAFETY: arithmetic only.
    unsafe { _mm256_max_epu16(a, _mm256_and_si256(b, _mm256_set1_epi16(0x7fff))) }
}

/// Turns `n` scores of 16 queries, a query per lane, into exponentials relative to their new running maxima, packed as
/// activations with zeros up to whole steps; adds them to the totals, which are rescaled to these maxima by `factor`.
struct Softmax {
    /// In rows QUERIES apart.
    scores: *const f32,
    n: usize,
    /// Positions that each query sees.
    seen: [i32; TILE],
    scale: f32,
    max: *mut f32,
    total: *mut f32,
    factor: *mut f32,
    weights: *mut f32,
}

impl Leaf for Softmax {
    type Output = ();
    unsafe fn run(self) {
        let Softmax { scores, n, seen, scale, max, total, factor, weights } = self;
        // SAFETY: scores of `n` positions, weights of as many in whole steps (see the type).
        unsafe {
            let scale = _mm512_set1_ps(scale);
            let seen = _mm512_loadu_si512(seen.as_ptr().cast());
            let nothing = _mm512_set1_ps(f32::NEG_INFINITY);
            let old = _mm512_loadu_ps(max);
            // Two, so that one need not wait for the other. NaN is no maximum: its exponential is NaN.
            let mut best = [old; 2];
            for t in 0..n {
                best[t % 2] = _mm512_max_ps(score(scores, t, seen, scale), best[t % 2]);
            }
            let new = _mm512_max_ps(best[0], best[1]);
            // As `relative_to`.
            let is_nothing = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(new, nothing);
            let relative = _mm512_mask_mov_ps(new, is_nothing, _mm512_setzero_ps());
            let rescale = exp::<Vectors>(_mm512_sub_ps(old, relative));
            let mut sum = _mm512_mul_ps(_mm512_loadu_ps(total), rescale);
            let long = n.next_multiple_of(STEP);
            let [hi, lo] = [weights, weights.add(TILE * long / 2)];
            for t in (0..long).step_by(2) {
                let (mut even, mut odd) = (_mm512_setzero_ps(), _mm512_setzero_ps());
                if t < n {
                    even = exp::<Vectors>(_mm512_sub_ps(score(scores, t, seen, scale), relative));
                }
                if t + 1 < n {
                    odd = exp::<Vectors>(_mm512_sub_ps(score(scores, t + 1, seen, scale), relative));
                }
                sum = _mm512_add_ps(_mm512_add_ps(sum, even), odd);
                let terms = amx::terms(even, odd);
                _mm512_storeu_si512(hi.add(t * TILE / 2).cast(), amx::in_pairs(terms[0]));
                _mm512_storeu_si512(lo.add(t * TILE / 2).cast(), amx::in_pairs(terms[1]));
            }
            _mm512_storeu_ps(max, new);
            _mm512_storeu_ps(total, sum);
            _mm512_storeu_ps(factor, rescale);
        }
    }
}

/// The scaled scores of position `t`; -inf of queries that see no more than `seen` positions before it.
#[inline(always)]
unsafe fn score(scores: *const f32, t: usize, seen: __m512i, scale: __m512) -> __m512 {
    // SAFETY: a row of scores (caller).
    unsafe {
        let is_seen = _mm512_cmpgt_epi32_mask(seen, _mm512_set1_epi32(t as i32));
        let nothing = _mm512_set1_ps(f32::NEG_INFINITY);
        _mm512_mask_mul_ps(nothing, is_seen, _mm512_loadu_ps(scores.add(t * QUERIES)), scale)
    }
}

/// sums = sums * factor + found, all with a query per lane, of `blocks` * 16 queries.
struct Rescale {
    sums: *mut f32,
    factor: *const f32,
    found: *const f32,
    d: usize,
    blocks: usize,
}

impl Leaf for Rescale {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Rescale { sums, factor, found, d, blocks } = self;
        for m in 0..blocks {
            // SAFETY: vectors of d rows of QUERIES (see the type).
            unsafe {
                let factor = _mm512_loadu_ps(factor.add(m * TILE));
                for i in 0..d {
                    let at = i * QUERIES + m * TILE;
                    let sum = _mm512_loadu_ps(sums.add(at));
                    _mm512_storeu_ps(sums.add(at), _mm512_fmadd_ps(sum, factor, _mm512_loadu_ps(found.add(at))));
                }
            }
        }
    }
}
