//! Products as sums of outer products, where no pass of one row has to give the same bits: encoders.
//!
//! ```text
//!             activations, packed: [k, rows], so that a vector is
//!             one element of as many rows
//!                     │ x0 │ x1 │ x2 │ x3 │  <- k
//!  weights, in place  ├────┴────┴────┴────┤
//!  w0 ───────── k ──▶ │  a tile: 6 x 4    │
//!  ..                 │  vectors of sums, │
//!  w5 ──────────────▶ │  a row per lane   │
//! ```
//! A lane is an output, so no lanes are added up in the end, which cost [`gemm`](super::gemm) a quarter of its time at
//! k = 384. Every step broadcasts one element of each weight row. Both ways, into `[k, rows]` and of the sums back into
//! rows, blocks of vectors are transposed in registers.
//!
//! An output is the sum of its products in the order of k, whatever stands beside it, so tasks may be cut in any way.

use super::gemm::Weights;
use super::rows::Row;
use super::simd::{Leaf, Simd};
use crate::io::Tensor;
use core::marker::PhantomData;
use perpetua_shared::DType;

/// Columns whose sums are kept at once: a multiple of every tile's rows.
pub(crate) const PANEL: usize = 96;

/// Bytes of packed activations that are passed over at once: half of L2.
const BLOCK_BYTES: usize = 1 << 20;

/// Weight rows of the tile that is `vectors` wide.
const fn tile_rows<S: Simd>(vectors: usize) -> usize {
    let rows = S::SUMS / vectors;
    if rows > 12 { 12 } else { rows }
}

/// Vectors of the widest tile: a sixth of the sums, as far as that goes.
const fn widest<S: Simd>() -> usize {
    if S::SUMS < 12 { 1 } else { S::SUMS / 6 }
}

/// Activation rows that are packed at once, and the distance of the packed rows of k.
struct Plan {
    /// Rows.
    block_rows: usize,
    /// f32 between elements k and k + 1 of a row: `block_rows` in whole vectors, an odd number of cache lines, so that
    /// a tile's vectors, one of each element, are spread over all sets of a cache.
    ///
    /// PERF: 128x192x1536 on one core 80 GFLOP/s where it was 61, 512x256x1024 78 where it was 62, with powers of two
    /// (Zen 3, AVX2, 2026-11-24).
    stride: usize,
}

impl Plan {
    /// For `rows` activation rows of `k` elements.
    fn new(rows: usize, k: usize) -> Plan {
        let in_cache = (BLOCK_BYTES / 4 / k.max(1)).clamp(64, 512) / 64 * 64;
        let block_rows = in_cache.min(rows);
        Plan { block_rows, stride: block_rows.next_multiple_of(16) | 16 }
    }
}

/// Products of whole blocks of activation rows, in an order of their own, whatever is computed beside an output.
pub(crate) trait Products<S: Simd> {
    /// Storage of a weight.
    type Elem;

    /// Packs rows `first..first + rows` of `x`, of `k` elements, as [`Products::multiply`] expects them.
    ///
    /// # Safety
    /// `packed` has room for `k * stride` f32, `stride` at least `rows` in blocks of 16, `wide` for 16 rows of f32
    /// unless the activations are f32; the level exists.
    unsafe fn pack(x: &Tensor, first: usize, shape: [usize; 2], wide: *mut f32, packed: *mut f32, stride: usize);

    /// sums[j][m] = weights[j] . x[m] for `n` weight rows of `k` elements, `w_stride` apart, and `rows` packed
    /// activation rows; `sums`' rows are written in blocks of 16.
    ///
    /// # Safety
    /// Weights are readable; `packed` is as [`Products::pack`] left it for as many rows and `stride`; `sums` has `n`
    /// rows of such blocks, `sums_stride` apart; the level exists.
    unsafe fn multiply(
        w: *const Self::Elem,
        w_stride: usize,
        shape: [usize; 3],
        packed: *const f32,
        stride: usize,
        sums: *mut f32,
        sums_stride: usize,
    );
}

/// Lengths of the scratch areas that [`panels`] wants for the same.
pub(crate) fn panel_areas(x: &Tensor, rows: usize, weights: &[&Tensor]) -> [usize; 4] {
    let k = weights[0].extent(1);
    let stride = Plan::new(rows, k).stride;
    let wide = if x.dtype() == DType::F32 { 0 } else { 16 * k };
    [stride * k, wide, PANEL * stride, weights.len() * PANEL * stride]
}

/// The products of the first `rows` rows of `x` with the rows of `N` matrices of one shape, a panel of at most
/// [`PANEL`] columns after the other: calls `finish([first row, rows], [first column, columns], sums)`, each matrix's
/// sums in rows [`PANEL`] apart.
///
/// # Safety
/// The areas are as long as [`panel_areas`] says; the level exists.
pub(crate) unsafe fn panels<S: Simd, P: Products<S>, const N: usize>(
    x: &Tensor,
    rows: usize,
    weights: [&Tensor; N],
    [packed, wide, sums, in_rows]: [*mut f32; 4],
    finish: impl Fn([usize; 2], [usize; 2], [*const f32; N]),
) {
    let (n, k) = (weights[0].extent(0), weights[0].extent(1));
    assert!(weights.iter().all(|w| w.extent(0) == n && w.extent(1) == k), "matrices must have one shape");
    if rows == 0 || n == 0 {
        return;
    }
    let plan = Plan::new(rows, k);
    let bases = weights.map(Weights::<P::Elem>::base_of);
    let mut first = 0;
    while first < rows {
        let cols = plan.block_rows.min(rows - first);
        // SAFETY: the areas are as large as the plan says (caller); the weights' boxes hold n rows of k (rows of `x`
        // are of that length, or `Row::of` panics); the level exists (caller).
        unsafe {
            P::pack(x, first, [cols, k], wide, packed, plan.stride);
            let mut column = 0;
            while column < n {
                let n = PANEL.min(n - column);
                let found = core::array::from_fn(|i| {
                    let (w_stride, to) = (weights[i].stride(0), in_rows.add(i * PANEL * plan.stride));
                    let w = bases[i].wrapping_add(column * w_stride);
                    P::multiply(w, w_stride, [n, k, cols], packed, plan.stride, sums, plan.stride);
                    transpose::<S>(sums, plan.stride, [n, cols], to, PANEL);
                    to.cast_const()
                });
                finish([first, cols], [column, n], found);
                column += n;
            }
        }
        first += cols;
    }
}

/// [`Products`] of f32 weights: the module's own.
pub(crate) struct Outer;

impl<S: Simd> Products<S> for Outer {
    type Elem = f32;

    /// Into [k, rows], in whole vectors.
    unsafe fn pack(x: &Tensor, first: usize, [rows, k]: [usize; 2], wide: *mut f32, packed: *mut f32, stride: usize) {
        let mut r = 0;
        while r < rows {
            let n = 16.min(rows - r);
            // SAFETY: the rows are of `k` elements; `wide` has room for n of them.
            unsafe {
                let (src, src_stride) = rows_of_f32::<S>(x, first + r, [n, k], wide);
                transpose::<S>(src, src_stride, [n, k], packed.add(r), stride);
            }
            r += n;
        }
    }

    unsafe fn multiply(
        w: *const f32,
        w_stride: usize,
        shape: [usize; 3],
        packed: *const f32,
        stride: usize,
        sums: *mut f32,
        sums_stride: usize,
    ) {
        // SAFETY: the caller's promises are the same.
        unsafe { multiply::<S>(w, w_stride, shape, packed, stride, sums, sums_stride) }
    }
}

/// Rows `first..first + n` of `x`, of `k` elements, and the f32 from one to the next: where they are, or widened into
/// `wide`.
///
/// # Safety
/// `wide` has room for them, unless they are f32; the level exists.
pub(super) unsafe fn rows_of_f32<S: Simd>(
    x: &Tensor,
    first: usize,
    [n, k]: [usize; 2],
    wide: *mut f32,
) -> (*const f32, usize) {
    assert!(first + n <= x.extent(0), "rows must end inside the box");
    let row = |i: usize| Row::of(x, [first + i, 0], k);
    if let Some(own) = row(0).as_f32() {
        return (own, x.stride(0));
    }
    for i in 0..n {
        // SAFETY: there is room for the row (caller).
        unsafe { widened::<S>(row(i), wide.add(i * k)) };
    }
    (wide, k)
}

/// dst[c][r] = src[r][c] for `rows` x `columns` elements; `dst`'s rows are filled up to whole vectors with zeros.
///
/// # Safety
/// `src` is readable, and `dst` is writable up to whole vectors of `rows`, at most `dst_stride`; the level exists.
pub(crate) unsafe fn transpose<S: Simd>(
    src: *const f32,
    src_stride: usize,
    [rows, columns]: [usize; 2],
    dst: *mut f32,
    dst_stride: usize,
) {
    // SAFETY: the caller's promises are the type's.
    unsafe { S::call(Transpose::<S> { src, src_stride, rows, columns, dst, dst_stride, set: PhantomData }) }
}

struct Transpose<S> {
    src: *const f32,
    src_stride: usize,
    rows: usize,
    columns: usize,
    dst: *mut f32,
    dst_stride: usize,
    set: PhantomData<S>,
}

impl<S: Simd> Leaf for Transpose<S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Transpose { src, src_stride, rows, columns, dst, dst_stride, .. } = self;
        let mut r = 0;
        while r < rows {
            let n = S::LANES.min(rows - r);
            let mut c = 0;
            // SAFETY: blocks and elements are inside both matrices (see `transpose`).
            unsafe {
                if n == S::LANES {
                    while c + S::LANES <= columns {
                        let mut i = 0;
                        while i < S::LANES {
                            // The next rows; another core may have written them.
                            S::prefetch(src.wrapping_add((r + S::LANES + i) * src_stride + c).cast());
                            i += 1;
                        }
                        S::transpose(src.add(r * src_stride + c), src_stride, dst.add(c * dst_stride + r), dst_stride);
                        c += S::LANES;
                    }
                }
                while c < columns {
                    let mut lanes = [0f32; 16];
                    let mut i = 0;
                    while i < n {
                        lanes[i] = *src.add((r + i) * src_stride + c);
                        i += 1;
                    }
                    S::store(dst.add(c * dst_stride + r), S::load(lanes.as_ptr()));
                    c += 1;
                }
            }
            r += S::LANES;
        }
    }
}

/// [`Row::widened`], with the set enabled.
///
/// # Safety
/// `to` has room for the row, unless it is of f32; the level exists.
pub(crate) unsafe fn widened<S: Simd>(row: Row, to: *mut f32) -> *const f32 {
    // SAFETY: the caller's promises are the type's.
    unsafe { S::call(Widened::<S> { row, to, set: PhantomData }) }
}

struct Widened<S> {
    row: Row,
    to: *mut f32,
    set: PhantomData<S>,
}

impl<S: Simd> Leaf for Widened<S> {
    type Output = *const f32;
    #[inline(always)]
    unsafe fn run(self) -> *const f32 {
        // SAFETY: there is room for the row (see `widened`).
        unsafe { self.row.widened::<S>(self.to) }
    }
}

/// sums[j][m] = weights[j] . x[m] for `n` weight rows of `k` elements, `w_stride` apart, and `rows` packed activation
/// rows; `sums`' rows are written in whole vectors.
///
/// # Safety
/// Weights are readable; `packed` has `k` rows, `stride` apart, of `rows` in whole vectors; `sums` has `n` such rows,
/// `sums_stride` apart; the level exists.
pub(crate) unsafe fn multiply<S: Simd>(
    w: *const f32,
    w_stride: usize,
    [n, k, rows]: [usize; 3],
    packed: *const f32,
    stride: usize,
    sums: *mut f32,
    sums_stride: usize,
) {
    let vectors = rows.div_ceil(S::LANES);
    // The widest tile sets how many weight rows are taken at once: they stay in L1 while the rows pass by.
    let mut j = 0;
    while j < n {
        let taken = 24.min(n - j);
        let mut v = 0;
        while v < vectors {
            let width = widest::<S>().min(vectors - v);
            let tall = tile_rows::<S>(width);
            let mut i = 0;
            while i < taken {
                let count = if taken - i >= tall { tall } else { 1 };
                // SAFETY: the tile's rows and vectors are inside; what is asked for may be any address.
                unsafe {
                    let tile = Place {
                        w: w.wrapping_add((j + i) * w_stride),
                        w_stride,
                        k,
                        x: packed.add(v * S::LANES),
                        x_stride: stride,
                        sums: sums.add((j + i) * sums_stride + v * S::LANES),
                        sums_stride,
                        // While the last vectors pass the rows taken, the next ones come.
                        ahead: if v + width == vectors { 24 * w_stride } else { 0 },
                    };
                    any_tile::<S>(tile, count, width);
                }
                i += count;
            }
            v += width;
        }
        j += taken;
    }
}

/// Where a tile finds its operands.
#[derive(Clone, Copy)]
struct Place {
    w: *const f32,
    w_stride: usize,
    k: usize,
    x: *const f32,
    x_stride: usize,
    sums: *mut f32,
    sums_stride: usize,
    /// How far behind its rows those lie that are asked for; 0: none.
    ahead: usize,
}

/// The [`Tile`] of `rows` weight rows and `vectors` vectors.
unsafe fn any_tile<S: Simd>(place: Place, rows: usize, vectors: usize) {
    macro_rules! tiles {
        ($($r:literal x $v:literal)*) => {
            match (rows, vectors) {
                // SAFETY: the caller's promises are the type's.
                $(($r, $v) if $v <= widest::<S>() && ($r == 1 || $r == tile_rows::<S>($v)) => unsafe {
                    S::call(Tile::<S, $r, $v>(place, PhantomData))
                },)*
                _ => unreachable!("a tile of {rows} rows and {vectors} vectors"),
            }
        };
    }
    tiles!(1 x 1 1 x 2 1 x 3 1 x 4 4 x 1 12 x 1 6 x 2 12 x 2 8 x 3 6 x 4);
}

/// sums[r][v] of `R` weight rows and `V` vectors.
struct Tile<S, const R: usize, const V: usize>(Place, PhantomData<S>);

impl<S: Simd, const R: usize, const V: usize> Leaf for Tile<S, R, V> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Place { w, w_stride, k, x, x_stride, sums, sums_stride, ahead } = self.0;
        // SAFETY: elements below k of the rows, and vectors of the packed rows (see `multiply`).
        unsafe {
            let mut acc = [[S::splat(0.0); V]; R];
            let mut at = 0;
            while at < k {
                let end = if k - at > 16 { at + 16 } else { k };
                if ahead != 0 {
                    let mut r = 0;
                    while r < R {
                        S::prefetch(w.wrapping_add(ahead + r * w_stride + at).cast());
                        r += 1;
                    }
                }
                while at < end {
                    let mut xs = [S::splat(0.0); V];
                    let mut v = 0;
                    while v < V {
                        xs[v] = S::load(x.add(at * x_stride + v * S::LANES));
                        v += 1;
                    }
                    let mut r = 0;
                    while r < R {
                        let one = S::splat(*w.add(r * w_stride + at));
                        let mut v = 0;
                        while v < V {
                            acc[r][v] = S::fma(one, xs[v], acc[r][v]);
                            v += 1;
                        }
                        r += 1;
                    }
                    at += 1;
                }
            }
            let mut r = 0;
            while r < R {
                let mut v = 0;
                while v < V {
                    S::store(sums.add(r * sums_stride + v * S::LANES), acc[r][v]);
                    v += 1;
                }
                r += 1;
            }
        }
    }
}
