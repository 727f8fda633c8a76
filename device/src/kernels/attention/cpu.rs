//! The CPU body of `attention`: online softmax over blocks of positions, for a tile of queries at once.
//!
//! ```text
//! for each key/value head
//!   for each tile of queries (rows x the heads of the group: they share K and V)
//!     for each block of 64 positions:   K block ─▶ scores ─▶ max, exp, sum ─▶ V block ─▶ weighted sums, rescaled
//! ```
//! K and V are read once per tile, so in decode once. The scores of a block are formed while the values of the one
//! before are summed, a few positions of each in turn, so that both are streams which never pause, and each asks for
//! its own lines ahead. In prefill a tile of rows passes over blocks that stay in cache.
//!
//! PERF: a whole block of each in turn, with the other's lines asked for meanwhile, read at 25 of 41 GB/s (bf16, 4096
//! positions, groups of 1, 2 and 4, one core of a Turin); in turns of 8 positions at 30 to 32, AVX2 alone at 32 instead
//! of 25, 24 and, where its products are too many to keep up, 20 instead of 18 (2026-11-24).
//!
//! A row's results do not depend on the rows beside it: blocks start at multiples of 64 whatever the row, each of a
//! row's sums runs over positions in order, and positions a row may not see are not added, not even as zeros (what
//! stands there may be NaN). So decode gives the bits of prefill, except where that is a matrix unit's (`tiles`) or
//! rounded (`pairs`).
//!
//! Tolerance against the reference: scores and sums are formed in another order, exp is exact to 2 ulp: 2^-12 of
//! max |v| for scores within +-16.

use super::*;
use crate::cpu::gemm::{self, Weights};
use crate::cpu::rows::{self, Row, has_unit_stride};
use crate::cpu::simd::{Bf16, Body, Dot, F16, F32, Leaf, Level, Simd, Storage, exp};
use crate::io::Tensor;
use core::marker::PhantomData;
use core::ops::Range;
use perpetua_shared::DType;

/// Positions of a block: K and V of it (16 KiB each at d = 128 in bf16) stay in L1 beside a tile's queries.
pub(super) const BLOCK: usize = 64;

/// In decode, positions of a block whose keys, or values, are read before it is the others' turn, with `queries`: the
/// less there is to do with them, the sooner.
///
/// PERF: with 8, one core that reads 38 GB/s got 31 with one query or two and 21 with eight; so 34, 35 and 22 (AVX-512,
/// Turin, 2026-11-30).
fn turn<S: Simd>(queries: usize) -> usize {
    (32 / S::LANES * queries).next_multiple_of(4)
}

/// How far ahead of itself a decode step asks for keys and for values.
const AHEAD_BYTES: usize = 8 << 10;

/// Queries of a tile, where the group is not larger by itself.
const QUERIES: usize = 24;

/// Longer heads' scores would need partial sums (see `gemm::scores`).
pub(super) const MAX_HEAD_DIM: usize = 1024;

pub(super) fn run(p: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
    let [q, k, v, y, sinks] = core::array::from_fn(|i| call.tensor(i));
    if k.dtype() != v.dtype() || q.extent(3) > MAX_HEAD_DIM || p.splits > 1 {
        // No cache mixes them, no model has such heads, and only attention for GPUs is split.
        return Attention::reference(p, call);
    }
    let rows = call.rows(slot::Q);
    if rows == 0 || q.extent(3) == 0 {
        return Ok(());
    }
    let seen = Seen { p: *p, pass: [call.step.first_pos, call.step.rows], row_first: call.task.row_first };
    let visible = seen.by(rows - 1).end;
    assert!(visible <= k.extent(1), "row sees {visible} positions of {}", k.extent(1));
    assert!(has_unit_stride::<3>(&k) && has_unit_stride::<3>(&v), "positions need unit stride");
    if bidirectional::is_for(p, [&q, &k, &v]) {
        scratch.isa.run(bidirectional::Attend { rows, seen, scale: p.scale, q, k, v, y, scratch });
        return Ok(());
    }
    #[cfg(target_arch = "x86_64")]
    if tiles::is_for(p, [&q, &k, &v], scratch) {
        let task = tiles::Attend { rows, seen, q: &q, k: &k, v: &v, y: &y, sinks: &sinks };
        // SAFETY: the operands are those that were looked at; strides and positions have been above.
        if unsafe { task.run(scratch) } {
            return Ok(());
        }
    }
    #[cfg(target_arch = "x86_64")]
    if p.order == super::super::linear::Order::Rounded as u32
        && scratch.isa.multiplies_pairs()
        && k.dtype() == DType::Bf16
    {
        use crate::cpu::simd::{Pairs, Vectors};
        // SAFETY: the set has pairs.
        unsafe { Attend { rows, seen, q, k, v, y, sinks, scratch }.with::<Vectors, Pairs, pairs::InPairs>() };
        return Ok(());
    }
    scratch.isa.run(Attend { rows, seen, q, k, v, y, sinks, scratch });
    Ok(())
}

/// What a task's rows see.
#[derive(Clone, Copy)]
pub(super) struct Seen {
    pub(super) p: Params,
    pass: [u32; 2],
    row_first: u32,
}

impl Seen {
    /// The positions that the task's row `row` sees; those of later rows neither begin nor end before.
    pub(super) fn by(&self, row: usize) -> Range<usize> {
        let (first, end) = self.p.seen(self.pass, self.row_first + row as u32);
        first as usize..end as usize
    }
}

/// The running maximum and total of query head `g` of head `h` before all positions: its sink's, if it has one.
pub(super) fn before_all(sinks: &Tensor, at: [usize; 2]) -> (f32, f32) {
    sink(sinks, [1, 0], at).map_or((f32::NEG_INFINITY, 0.0), |sink| (sink, 1.0))
}

struct Attend<'a> {
    rows: usize,
    seen: Seen,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    sinks: Tensor,
    scratch: &'a mut Scratch,
}

impl Body for Attend<'_> {
    type Output = ();
    unsafe fn run<L: Level>(self) {
        // SAFETY: the level exists (caller).
        unsafe {
            match self.k.dtype() {
                DType::Bf16 => self.with::<L::S, L::Bf16, Each<Bf16>>(),
                DType::F16 => self.with::<L::S, L::F16, Each<F16>>(),
                _ => self.with::<L::S, L::F32, Each<F32>>(),
            }
        }
    }
}

/// What a tile of queries keeps, in scratch.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    queries: usize,
    /// Weighted sums, [queries, d rounded up to `width`].
    pub(super) sums: *mut f32,
    pub(super) width: usize,
    /// A block's scores, then their exponentials: [queries, BLOCK]; after them as many of the next block.
    pub(super) scores: *mut f32,
    /// Running maximum and total of every query.
    max: *mut f32,
    total: *mut f32,
}

impl Attend<'_> {
    /// Of the `n` positions from `t` on, those that query `m` of a tile starting at row `row` sees, counted from there.
    fn seen(&self, row: usize, group: usize, m: usize, t: usize, n: usize) -> Range<usize> {
        let Range { start, end } = self.seen.by(row + m / group);
        let end = end.saturating_sub(t).min(n);
        start.saturating_sub(t).min(end)..end
    }

    unsafe fn with<S: Simd, D: Dot<S>, V: Sums<S, Elem = D::Elem>>(self) {
        let (n_kv, group, d) = (self.q.extent(1), self.q.extent(2), self.q.extent(3));
        let tile_rows = (QUERIES / group.max(1)).max(1).min(self.rows);
        let queries = tile_rows * group;
        // Both in whole steps of 32, the longest.
        let width = d.next_multiple_of(32);
        let [packed, wide, sums, scores, max, total] =
            self.scratch.areas([queries * width, d, queries * width, 2 * queries * BLOCK, queries, queries]);
        for h in 0..n_kv {
            let mut row = 0;
            while row < self.rows {
                let tile_rows = tile_rows.min(self.rows - row);
                let tile = Tile { queries: tile_rows * group, sums, width, scores, max, total };
                let query = |m: usize| Row::of(&self.q, [row + m / group, h, m % group, 0], d);
                // SAFETY: the areas are as large as asked for above, the level exists (caller), and positions below the
                // last row's visible ones are inside K and V (checked by `run`).
                unsafe {
                    gemm::pack_rows::<S, D>(query, tile.queries, d, wide, packed);
                    self.tile::<S, D, V>(h, row, group, d, packed, tile);
                    for m in 0..tile.queries {
                        let y = Row::of(&self.y, [row + m / group, h, m % group, 0], d);
                        let (sums, total) = (tile.sums.add(m * width), *tile.total.add(m));
                        S::call(Divide::<S> { sums, total, y, set: PhantomData });
                    }
                }
                row += tile_rows;
            }
        }
    }

    unsafe fn tile<S: Simd, D: Dot<S>, V: Sums<S, Elem = D::Elem>>(
        &self,
        h: usize,
        row: usize,
        group: usize,
        d: usize,
        packed: *const f32,
        mut tile: Tile,
    ) {
        let all = self.seen.by(row + (tile.queries - 1) / group).end;
        // SAFETY: the tile's areas hold `queries` of everything; positions below `all` are inside K and V.
        unsafe {
            for m in 0..tile.queries {
                (*tile.max.add(m), *tile.total.add(m)) = before_all(&self.sinks, [h, m % group]);
            }
            core::ptr::write_bytes(tile.sums, 0, tile.queries * tile.width);
            if all == 0 {
                return;
            }
            let (k, v): (*const D::Elem, *const D::Elem) =
                (self.k.address([h, 0, 0]).cast(), self.v.address([h, 0, 0]).cast());
            let (k_stride, v_stride) = (self.k.stride(1), self.v.stride(1));
            // Where there are more tiles than one, all but the first find these lines in a cache.
            let asks = self.rows == 1;
            let turn = if asks { turn::<S>(tile.queries) } else { BLOCK };
            let known = |t: usize| if asks { all - t } else { 0 };
            let ahead = |stride: usize| (AHEAD_BYTES / size_of::<D::Elem>() / stride.max(1)).max(1);
            let score = |t: usize, part: Range<usize>, scores: *mut f32| {
                let (t, n) = (t + part.start, part.len());
                let keys =
                    Weights { base: [k.add(t * k_stride); 2], stride: [k_stride; 2], rows: n, paired: false, k: d };
                let scores = scores.add(part.start);
                let block = gemm::Block { packed, cols: tile.queries, sums: scores, sums_stride: BLOCK };
                gemm::scores::<S, D>(&keys, ahead(k_stride), known(t), block);
            };
            // The first query's window begins first.
            let mut t = self.seen.by(row).start / BLOCK * BLOCK;
            let mut next_scores = tile.scores.add(tile.queries * BLOCK);
            score(t, 0..BLOCK.min(all - t), tile.scores);
            while t < all {
                let n = BLOCK.min(all - t);
                let (base, ahead) = (v.add(t * v_stride).cast(), ahead(v_stride));
                let values = Values { base, stride: v_stride, d, ahead, known: known(t) };
                // Every query sees `common` positions of the block; those that see others go there alone, before and
                // after these.
                let mut common = 0..n;
                for m in 0..tile.queries {
                    let seen = self.seen(row, group, m, t, n);
                    common = common.start.max(seen.start)..common.end.min(seen.end);
                    S::call(Softmax::<S> { tile, m, seen, scale: self.seen.p.scale, set: PhantomData });
                    V::prepare(tile.scores.add(m * BLOCK));
                }
                common.end = common.end.max(common.start);
                let alone = |part: &dyn Fn(Range<usize>) -> Range<usize>| {
                    for m in 0..tile.queries {
                        let part = part(self.seen(row, group, m, t, n));
                        if !part.is_empty() {
                            add_values::<S, V>(&tile, m, 1, part, &Values { known: 0, ..values });
                        }
                    }
                };
                if common.start > 0 {
                    alone(&|seen| seen.start..seen.end.min(common.start));
                }
                // Keys of the next block and values of this one in turn, so that both are read all the time.
                let next = t + BLOCK;
                let left = all.saturating_sub(next).min(BLOCK);
                let mut first = 0;
                while first < n {
                    let end = (first + turn).min(n);
                    if first < left {
                        score(next, first..(first + turn).min(left), next_scores);
                    }
                    let part = common.start.max(first)..common.end.min(end);
                    if !part.is_empty() {
                        add_values::<S, V>(&tile, 0, tile.queries, part, &values);
                    }
                    first = end;
                }
                if common.end < n {
                    alone(&|seen| seen.start.max(common.end)..seen.end);
                }
                (tile.scores, next_scores) = (next_scores, tile.scores);
                t = next;
            }
        }
    }
}

/// Turns the scores of query `m` at the positions it has `seen` of a block into exponentials relative to the new
/// running maximum, and rescales its total and sums to it. Those before become zeros.
struct Softmax<S> {
    tile: Tile,
    m: usize,
    seen: Range<usize>,
    scale: f32,
    set: PhantomData<S>,
}

impl<S: Simd> Leaf for Softmax<S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Softmax { tile, m, seen, scale, .. } = self;
        if seen.is_empty() {
            return;
        }
        // SAFETY: scores hold BLOCK elements a query, a multiple of the vector; the level exists (caller).
        unsafe {
            let scores = tile.scores.add(m * BLOCK);
            let old = *tile.max.add(m);
            // No scale is negative.
            (0..seen.start).for_each(|before| *scores.add(before) = f32::NEG_INFINITY);
            let mut max = scaled::<S>(scores, seen.end, scale);
            max = if max > old { max } else { old };
            let relative = relative_to(max);
            let mut sum = exponentials::<S>(scores, seen.end, relative);
            if max != old {
                let factor = exp::<S>(S::splat(old - relative));
                let mut one = [0f32; 16];
                S::store(one.as_mut_ptr(), factor);
                sum += *tile.total.add(m) * one[0];
                let sums = tile.sums.add(m * tile.width);
                let mut i = 0;
                while i < tile.width {
                    S::store(sums.add(i), S::mul(S::load(sums.add(i)), factor));
                    i += S::LANES;
                }
            } else {
                sum += *tile.total.add(m);
            }
            *tile.max.add(m) = max;
            *tile.total.add(m) = sum;
        }
    }
}

/// Multiplies the first `n` scores with `scale`; the largest. What stands beyond them in the last vector becomes -inf:
/// it changes no maximum, and its exponential is zero.
///
/// # Safety
/// Scores are whole vectors; the level exists.
#[inline(always)]
pub(super) unsafe fn scaled<S: Simd>(scores: *mut f32, n: usize, scale: f32) -> f32 {
    // SAFETY: vectors of the scores (caller).
    unsafe {
        let scale = S::splat(scale);
        let mut best = S::splat(f32::NEG_INFINITY);
        let mut i = 0;
        while i < n {
            let v = S::mul(S::load(scores.add(i)), scale);
            let v = if n - i < S::LANES { masked::<S>(v, n - i) } else { v };
            S::store(scores.add(i), v);
            best = S::max(v, best);
            i += S::LANES;
        }
        S::largest(best)
    }
}

/// What exponentials are taken relative to, `max` being the largest score: as long as there is nothing but -inf (or
/// NaN), 0, so that -inf gives 0 and NaN stays.
#[inline(always)]
pub(super) fn relative_to(max: f32) -> f32 {
    if max == f32::NEG_INFINITY { 0.0 } else { max }
}

/// Turns the first `n` scores into exp(score - relative); their sum.
///
/// # Safety
/// As [`scaled`], which has been called.
#[inline(always)]
pub(super) unsafe fn exponentials<S: Simd>(scores: *mut f32, n: usize, relative: f32) -> f32 {
    // SAFETY: vectors of the scores (caller).
    unsafe {
        let mut total = S::splat(0.0);
        let mut i = 0;
        while i < n {
            let e = exp::<S>(S::sub(S::load(scores.add(i)), S::splat(relative)));
            S::store(scores.add(i), e);
            total = S::add(total, e);
            i += S::LANES;
        }
        S::sum(total)
    }
}

/// `v` with -inf from lane `n` on.
#[inline(always)]
unsafe fn masked<S: Simd>(v: S::F, n: usize) -> S::F {
    let mut lanes = [0f32; 16];
    // SAFETY: a vector fits.
    unsafe {
        S::store(lanes.as_mut_ptr(), v);
        lanes[n..].fill(f32::NEG_INFINITY);
        S::load(lanes.as_ptr())
    }
}

/// How exponentials are multiplied with values and summed.
pub(super) trait Sums<S: Simd> {
    /// Storage of a value.
    type Elem: Copy;

    /// Makes of a block's exponentials at `scores` what is multiplied.
    ///
    /// # Safety
    /// They are [`BLOCK`]; the level exists.
    unsafe fn prepare(_scores: *mut f32) {}

    /// Adds a part for `M` queries.
    ///
    /// # Safety
    /// The queries are the tile's, the positions V's; the level exists.
    unsafe fn add<const M: usize>(part: Part);
}

/// One position after the other, widened from `E`.
struct Each<E>(PhantomData<E>);

impl<S: Simd, E: Storage> Sums<S> for Each<E> {
    type Elem = E::Elem;

    unsafe fn add<const M: usize>(part: Part) {
        // SAFETY: the caller's promises are the same.
        unsafe { S::call(AddValues::<S, E, M>(part, PhantomData)) }
    }
}

/// Rows of V from a block's first position on.
#[derive(Clone, Copy)]
pub(super) struct Values {
    pub(super) base: *const u8,
    /// Elements between rows, and of one.
    pub(super) stride: usize,
    pub(super) d: usize,
    /// Rows further on that are asked for meanwhile, as long as they are below `known`.
    ahead: usize,
    known: usize,
}

/// sums[m,:] += exponential[m,t] * values[t,:] for queries `first..first + count` and positions `positions`, in order.
///
/// # Safety
/// The queries are the tile's, the positions V's; the level exists.
unsafe fn add_values<S: Simd, V: Sums<S>>(
    tile: &Tile,
    first: usize,
    count: usize,
    positions: Range<usize>,
    values: &Values,
) {
    let mut m = first;
    let end = first + count;
    while m < end {
        let known = if m == first { values.known } else { 0 };
        macro_rules! queries {
            ($($n:literal)*) => { $(
                if end - m >= $n && ($n <= 4 || S::TILE_COLS >= 6) {
                    let (tile, start, end, values) = (*tile, positions.start, positions.end, Values { known, ..*values });
                    // SAFETY: the caller's promises are the same.
                    unsafe { V::add::<$n>(Part { tile, m, start, end, values }) };
                    m += $n;
                    continue;
                }
            )* };
        }
        queries!(8 4 2 1);
    }
}

/// Positions `start..end` of a block for some queries from `m` on.
pub(super) struct Part {
    pub(super) tile: Tile,
    pub(super) m: usize,
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) values: Values,
}

/// [`add_values`] for `M` queries: as many vectors of each one's sums as there are registers for are held while the
/// positions pass.
struct AddValues<S, E, const M: usize>(Part, PhantomData<(S, E)>);

impl<S: Simd, E: Storage, const M: usize> AddValues<S, E, M> {
    /// Of columns `i` and those after, `N` vectors, or `part` elements, less than a vector.
    ///
    /// # Safety
    /// The columns are V's; [`Leaf::run`]'s promises.
    #[inline(always)]
    unsafe fn columns<const N: usize>(&self, i: usize, part: Option<usize>) {
        let Part { tile, m, start, end, values } = &self.0;
        // SAFETY: the queries' sums and exponentials are inside the tile, positions inside V; prefetches may be of any
        // address; the level exists (caller).
        unsafe {
            let sums = tile.sums.add(m * tile.width + i);
            let scores = tile.scores.add(m * BLOCK);
            let mut acc = [[S::splat(0.0); N]; M];
            let mut q = 0;
            while q < M {
                let mut n = 0;
                while n < N {
                    acc[q][n] = S::load(sums.add(q * tile.width + n * S::LANES));
                    n += 1;
                }
                q += 1;
            }
            let mut t = *start;
            while t < *end {
                let row = values.base.cast::<E::Elem>().add(t * values.stride + i);
                if t + values.ahead < values.known {
                    let asked = row.wrapping_add(values.ahead * values.stride);
                    let mut byte = 0;
                    while byte < N * S::LANES * size_of::<E::Elem>() {
                        S::prefetch(asked.wrapping_byte_add(byte).cast());
                        byte += 64;
                    }
                }
                let mut n = 0;
                while n < N {
                    let at = row.add(n * S::LANES);
                    let v = match part {
                        Some(part) => E::load_part::<S>(at, part),
                        None => E::load::<S>(at),
                    };
                    let mut q = 0;
                    while q < M {
                        acc[q][n] = S::fma(S::splat(*scores.add(q * BLOCK + t)), v, acc[q][n]);
                        q += 1;
                    }
                    n += 1;
                }
                t += 1;
            }
            let mut q = 0;
            while q < M {
                let mut n = 0;
                while n < N {
                    S::store(sums.add(q * tile.width + n * S::LANES), acc[q][n]);
                    n += 1;
                }
                q += 1;
            }
        }
    }
}

impl<S: Simd, E: Storage, const M: usize> Leaf for AddValues<S, E, M> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let d = self.0.values.d;
        let mut i = 0;
        while i < d {
            let vectors = (d - i) / S::LANES;
            // SAFETY: columns below `d`; the caller's promises.
            unsafe {
                if 8 * M <= S::SUMS && vectors >= 8 {
                    self.columns::<8>(i, None);
                    i += 8 * S::LANES;
                } else if 4 * M <= S::SUMS && vectors >= 4 {
                    self.columns::<4>(i, None);
                    i += 4 * S::LANES;
                } else if 2 * M <= S::SUMS && vectors >= 2 {
                    self.columns::<2>(i, None);
                    i += 2 * S::LANES;
                } else if vectors >= 1 {
                    self.columns::<1>(i, None);
                    i += S::LANES;
                } else {
                    self.columns::<1>(i, Some(d - i));
                    i = d;
                }
            }
        }
    }
}

/// y = sums / total, of the length of `y`.
pub(super) struct Divide<S> {
    pub(super) sums: *const f32,
    pub(super) total: f32,
    pub(super) y: Row,
    pub(super) set: PhantomData<S>,
}

impl<S: Simd> Leaf for Divide<S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let mut i = 0;
        while i < self.y.len() {
            let n = S::LANES.min(self.y.len() - i);
            // SAFETY: inside both rows (see the type).
            unsafe {
                let mean = S::div(rows::load::<S>(self.sums.add(i), n), S::splat(self.total));
                self.y.store::<S>(i, n, mean);
            }
            i += n;
        }
    }
}
