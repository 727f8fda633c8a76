//! Dot products of weight rows with activation rows: one activation row is decode's matrix-vector product, hundreds are
//! prefill's matrix product.
//!
//! ```text
//!               activations, packed: groups of <= TILE_COLS rows,
//!               a step (chunk of k) of all rows of a group side by side
//!                     │ x0 x1 .. x5 │ x0 x1 .. x5 │
//!  weights, in place  ├─────────────┼─────────────┤
//!  w0 ───────── k ──▶ │   a tile: 4 x 6 sums in   │
//!  w1 ──────────────▶ │   registers, each a vector│
//!  w2 ──────────────▶ │   of partial sums         │
//!  w3 ──────────────▶ │                           │
//! ```
//! Weights are read where they lie, along k, four rows at once. A tile keeps one vector of partial sums per output;
//! step c of k adds to it, in order, and one fixed tree adds its lanes at the end. That is the whole order of
//! summation, so it does not depend on the tile's size.
//!
//! A block of activation rows is packed at once. A group's rows stay in the nearest cache they fit while the weight rows
//! of the task pass by, from L2 after the first group. k is not cut: L2 feeds a tile as fast as L1 does, while partial
//! sums are sixteen times as large as the sums.
//!
//! PERF: bf16 512x256x1024 on one AVX-512 core of 159 GFLOP/s: 91 with tiles as the compiler allots their registers,
//! 99 with [`Dot::tile`] in assembly (Sapphire Rapids, 2026-11-21).

use super::rows::{Row, has_unit_stride};
use super::simd::{Dot, Leaf, Simd};
use crate::io::Tensor;
use core::marker::PhantomData;

/// Rows of weights a tile takes.
pub(crate) const TILE_ROWS: usize = 4;

/// Bytes of packed activations that are passed over at once: half of L2, so that the weights of a task fit beside them.
const BLOCK_BYTES: usize = 1 << 20;

/// Bytes of weights that pass by the groups of a block at once, so that they come from L2 after the first: with as much of
/// the next part and the sums of both beside the packed block.
const PART_BYTES: usize = 192 << 10;

/// Bytes of the sums that a [few](are_few) groups form before they are taken.
const SUMS_BYTES: usize = 128 << 10;

/// How far ahead weights are asked for that come from L2.
const NEAR_LINES: usize = 8;

/// Weight rows: one matrix, or two whose rows alternate in pairs (two of the first, two of the second), so that a tile
/// holds both halves of a gated product.
#[derive(Clone, Copy)]
pub(crate) struct Weights<E> {
    /// First row of each matrix; equal when there is one.
    pub(crate) base: [*const E; 2],
    /// Elements between rows.
    pub(crate) stride: [usize; 2],
    /// Rows of each.
    pub(crate) rows: usize,
    /// Whether the second counts.
    pub(crate) paired: bool,
    /// Elements of a row.
    pub(crate) k: usize,
}

impl<E> Weights<E> {
    /// Rows of all matrices.
    #[inline(always)]
    pub(crate) fn all_rows(&self) -> usize {
        if self.paired { 2 * self.rows } else { self.rows }
    }

    /// The first row of matrix `w`, whose dtype's storage `E` is.
    pub(crate) fn base_of(w: &Tensor) -> *const E {
        assert_eq!(w.dtype().size_bytes(), size_of::<E>(), "weights must have their dtype's storage");
        assert!(has_unit_stride::<2>(w), "weight rows need unit stride");
        if w.extent(0) == 0 || w.extent(1) == 0 {
            return core::ptr::NonNull::dangling().as_ptr();
        }
        w.address([0, 0]).cast()
    }

    /// Rows (of each matrix) of the parts that `cols` activation rows are multiplied with in turn: all where they are one
    /// group, as many as have few sums where they are [few](are_few), and see every weight once, too.
    pub(crate) fn part_rows<S: Simd, D: Dot<S, Elem = E>>(&self, cols: usize) -> usize {
        let matrices = 1 + usize::from(self.paired);
        let parts = if cols <= D::TILE_COLS {
            1
        } else if are_few::<S, D>(cols) {
            (self.rows * matrices * cols * size_of::<f32>()).div_ceil(SUMS_BYTES)
        } else {
            (self.rows * matrices * self.stride[0] * size_of::<E>()).div_ceil(PART_BYTES)
        };
        self.rows.div_ceil(parts.max(1)).next_multiple_of(8).min(self.rows)
    }

    /// Rows `first..first + rows` of each matrix.
    pub(crate) fn part(&self, first: usize, rows: usize) -> Weights<E> {
        debug_assert!(first + rows <= self.rows);
        let base = core::array::from_fn(|i| self.base[i].wrapping_add(first * self.stride[i]));
        Weights { base, rows, ..*self }
    }

    /// Asks for the start of the first tile's rows: the activations are packed while they come.
    ///
    /// # Safety
    /// The level exists.
    #[inline(always)]
    pub(crate) unsafe fn prefetch<S: Simd, D: Dot<S, Elem = E>>(&self) {
        let lines = (self.k / D::LINE_ELEMS).min(D::AHEAD_LINES);
        for line in 0..lines {
            for j in 0..TILE_ROWS.min(self.all_rows()) {
                // SAFETY: any address may be asked for.
                unsafe { D::prefetch(self.row(j).0, line) };
            }
        }
    }

    /// Row `j` in the order tiles take them, and the column of the sums it belongs to (the second matrix's follow the
    /// first's). The four rows of a tile come from four quarters of the rows, so that memory is read as four distant
    /// streams.
    ///
    /// PERF: with four neighbouring rows of 2 KiB a matrix-vector product reached 12.4 GB/s where rows of 8 KiB reached
    /// 16.1 (Sapphire Rapids, 2026-11-21).
    fn row(&self, j: usize) -> (*const E, usize) {
        let (p, r) = (j / 4, j % 4);
        let (matrix, i) = match (self.paired, p < self.streams()) {
            (false, true) => (0, r * self.streams() + p),
            (false, false) => (0, j),
            (true, true) => (r / 2, r % 2 * self.streams() + p),
            // What an odd count leaves is one row of each.
            (true, false) => (r % 2, self.rows - 1),
        };
        (self.base[matrix].wrapping_add(i * self.stride[matrix]), matrix * self.rows + i)
    }

    /// Tiles of four rows.
    fn streams(&self) -> usize {
        self.all_rows() / 4
    }
}

/// Scratch of [`multiply`]: packed activations.
pub(crate) struct Plan {
    /// Activation rows packed at once.
    pub(crate) block_rows: usize,
    /// f32 of the packed block.
    pub(crate) packed_floats: usize,
}

impl Plan {
    /// For `rows` activation rows of `k` elements; the most that any level needs, so that it does not depend on one.
    pub(crate) fn new(rows: usize, k: usize) -> Plan {
        // Whole steps of the longest.
        let row_floats = k.next_multiple_of(perpetua_shared::dtype::Q4.elems);
        let in_cache = BLOCK_BYTES / 4 / row_floats.max(1);
        let block_rows = (in_cache.clamp(12, 384) / 12 * 12).min(rows);
        Plan { block_rows, packed_floats: block_rows * row_floats }
    }
}

/// How many of `left` columns the next group takes, a width that [`Tile`] is made for: all, if the registers have room for their sums, as many as
/// they have room for, or of the last two groups half. The sizes do not matter to the sums.
///
/// PERF: 5 rows are one group, where they were 4 and 1: 24 -> 28 GB/s of bf16 weights (AVX-512, Turin, 2026-11-25).
fn group<S: Simd, D: Dot<S>>(left: usize) -> usize {
    let widest = D::TILE_COLS;
    if left <= widest {
        left
    } else if left < 2 * widest {
        left.div_ceil(2)
    } else {
        widest
    }
}

/// Whether `cols` activation rows are several groups, but so few that reading the weights takes about as long as the products: then each tile's
/// weights are multiplied with all groups before the next tile's, for which these ask meanwhile, each for a share, so that memory never rests.
///
/// PERF: GB/s of bf16 weights on one core that reads 34, with all groups after each other -> tile by tile: AVX-512, k = 1024, 8 rows 17.4 -> 18.6,
/// while memory was slow (24) 11.4 -> 18.1; AVX2, k = 3072, 4, 6 and 8 rows 16.1 -> 20.3, 13.9 -> 16.3, 10.5 -> 12.3. With 12 rows and more it
/// is no faster (Turin, 2026-11-25).
fn are_few<S: Simd, D: Dot<S>>(cols: usize) -> bool {
    cols > D::TILE_COLS && cols <= 8.min(3 * D::TILE_COLS)
}

/// Packs one activation row as number `m` of a group of `width`. `wide` has room for a row, `dst` for a group of whole
/// chunks.
struct Pack<S: Simd, D: Dot<S>> {
    row: Row,
    wide: *mut f32,
    dst: *mut f32,
    m: usize,
    width: usize,
    set: PhantomData<(S, D)>,
}

impl<S: Simd, D: Dot<S>> Leaf for Pack<S, D> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let k = self.row.len();
        // SAFETY: places are inside the row and the group (see the type).
        unsafe {
            let x = self.row.widened::<S>(self.wide);
            let mut c = 0;
            while c * D::CHUNK < k {
                let at = c * D::CHUNK;
                D::pack(self.dst.add((c * self.width + self.m) * D::CHUNK), x.add(at), D::CHUNK.min(k - at));
                c += 1;
            }
        }
    }
}

/// sums[m * sums_stride + columns[r]] = the products of `R` weight rows and a packed group of `M` activation rows.
struct Tile<S: Simd, D: Dot<S>, const R: usize, const M: usize> {
    w: [*const D::Elem; R],
    /// Rows of which lines are asked for meanwhile, those `ahead` beyond the ones read.
    asked: [*const D::Elem; R],
    ahead: usize,
    columns: [usize; R],
    x: *const f32,
    k: usize,
    sums: *mut f32,
    sums_stride: usize,
    set: PhantomData<S>,
}

impl<S: Simd, D: Dot<S>, const R: usize, const M: usize> Leaf for Tile<S, D, R, M> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Tile { w, asked, ahead, columns, x, k, sums, sums_stride, .. } = self;
        // SAFETY: lines and chunks below are inside the rows of `k` elements; prefetches may be of any address; sums are
        // as the type says.
        unsafe {
            let mut acc = [[S::splat(0.0); M]; R];
            let mut c;
            if D::HAS_TILE && R == TILE_ROWS && M == D::TILE_COLS {
                c = k / D::CHUNK;
                if c > 0 {
                    // Rows that come next lie as far beyond those of a tile, all four; where they do not, they are asked for in vain.
                    let by = asked[0].addr().wrapping_sub(w[0].addr()).wrapping_add(64 * ahead);
                    D::tile([w[0], w[1 % R], w[2 % R], w[3 % R]], by, x, c, acc.as_mut_ptr().cast());
                }
            } else {
                let per_line = D::LINE_ELEMS / D::CHUNK;
                let lines = k / D::LINE_ELEMS;
                let mut line = 0;
                while line < lines {
                    let mut r = 0;
                    while r < R {
                        D::prefetch(asked[r], line + ahead);
                        r += 1;
                    }
                    let mut u = 0;
                    while u < per_line {
                        D::chunk::<R, M>(&w, x, line * per_line + u, D::CHUNK, &mut acc);
                        u += 1;
                    }
                    line += 1;
                }
                c = lines * per_line;
            }
            while c * D::CHUNK < k {
                D::chunk::<R, M>(&w, x, c, D::CHUNK.min(k - c * D::CHUNK), &mut acc);
                c += 1;
            }
            let mut m = 0;
            while m < M {
                let row = sums.add(m * sums_stride);
                let four = S::sum4([acc[0][m], acc[1 % R][m], acc[2 % R][m], acc[3 % R][m]]);
                let mut r = 0;
                while r < R {
                    *row.add(columns[r]) = four[r];
                    r += 1;
                }
                m += 1;
            }
        }
    }
}

/// sums[m][column of row j] = weights[j] . x[m], for `packed` rows (groups as [`group`] cuts them) and all weight rows.
///
/// # Safety
/// Weights are readable; `packed` and `sums` are as large as the [`Plan`] says; the level exists.
pub(crate) unsafe fn multiply<S: Simd, D: Dot<S>>(
    weights: &Weights<D::Elem>,
    packed: *const f32,
    cols: usize,
    sums: *mut f32,
    sums_stride: usize,
) {
    let (n, k) = (weights.all_rows(), weights.k);
    if are_few::<S, D>(cols) {
        let after = |j: usize| weights.row((j + TILE_ROWS).min(n - 1)).0;
        // SAFETY: the caller's promises; rows are below n.
        return unsafe { tile_by_tile::<S, D>([n, k], |j| weights.row(j), after, packed, cols, sums, sums_stride) };
    }
    let row_packed = k.div_ceil(D::CHUNK) * D::CHUNK;
    let lines = k / D::LINE_ELEMS;
    let mut m = 0;
    while m < cols {
        let width = group::<S, D>(cols - m);
        // In a long row further on, and so at its end in the row that follows it in memory, which mostly comes next; in a
        // short one at the same place of one that comes. To choose at every line costs more than what is asked for in vain.
        let ahead = if m == 0 { D::AHEAD_LINES } else { NEAR_LINES };
        let is_long = lines > ahead;
        // Of short rows as many tiles on as have the lines, at least one.
        //
        // PERF: k = 1024 on one core that reads 35: 8 bits 30 -> 35 GB/s, 4 bits 26 -> 35 (AVX-512, Turin, 2026-11-25).
        let rows_on = TILE_ROWS * (ahead / lines.max(1)).max(1);
        let ahead = if is_long { ahead } else { 0 };
        // SAFETY: the group's packed rows and sums start where those of the `m` rows before end. Rows j.. are below n;
        // `asked` is only asked for.
        unsafe {
            let x = packed.add(m * row_packed);
            let sums = sums.add(m * sums_stride);
            let mut j = 0;
            while j + TILE_ROWS <= n {
                let rows = core::array::from_fn::<_, 4, _>(|r| weights.row(j + r));
                let next = core::array::from_fn(|r| weights.row((j + rows_on + r).min(n - 1)).0);
                let (w, columns) = (rows.map(|r| r.0), rows.map(|r| r.1));
                let asked = if is_long { w } else { next };
                any_width::<S, D, 4>(width, w, asked, ahead, columns, x, k, sums, sums_stride);
                j += TILE_ROWS;
            }
            while j < n {
                let (w, column) = weights.row(j);
                let asked = if is_long { w } else { weights.row((j + 1).min(n - 1)).0 };
                any_width::<S, D, 1>(width, [w], [asked], ahead, [column], x, k, sums, sums_stride);
                j += 1;
            }
        }
        m += width;
    }
}

/// sums[m][column of row j] = row j . x[m] for `n` rows of `k` elements, `row` giving each and its column: a tile's rows with all groups of `packed`
/// before the next. The rows that `asked` gives for a tile's are asked for meanwhile, by each group its share.
///
/// # Safety
/// As [`multiply`].
unsafe fn tile_by_tile<S: Simd, D: Dot<S>>(
    [n, k]: [usize; 2],
    row: impl Fn(usize) -> (*const D::Elem, usize),
    asked: impl Fn(usize) -> *const D::Elem,
    packed: *const f32,
    cols: usize,
    sums: *mut f32,
    sums_stride: usize,
) {
    let row_packed = k.div_ceil(D::CHUNK) * D::CHUNK;
    let groups = cols.div_ceil(D::TILE_COLS);
    let mut j = 0;
    while j < n {
        let is_tile = j + TILE_ROWS <= n;
        let (mut m, mut number) = (0, 0);
        while m < cols {
            let width = group::<S, D>(cols - m);
            // What another group asks for is here: to ask again for what is being read costs least.
            let share = |r: usize| if r % groups == number { asked(j + r) } else { row(j + r).0 };
            // SAFETY: the group's packed rows and sums start where those of the `m` rows before end. Rows j.. are below n.
            unsafe {
                let (x, sums) = (packed.add(m * row_packed), sums.add(m * sums_stride));
                if is_tile {
                    let rows = core::array::from_fn::<_, 4, _>(|r| row(j + r));
                    let (w, columns) = (rows.map(|r| r.0), rows.map(|r| r.1));
                    any_width::<S, D, 4>(width, w, core::array::from_fn(share), 0, columns, x, k, sums, sums_stride);
                } else {
                    let (w, column) = row(j);
                    any_width::<S, D, 1>(width, [w], [share(0)], 0, [column], x, k, sums, sums_stride);
                }
            }
            (m, number) = (m + width, number + 1);
        }
        j += if is_tile { TILE_ROWS } else { 1 };
    }
}

/// [`multiply`] for attention: sums[m][j] = keys[j] . x[m], keys in order. Meanwhile those are asked for that are `ahead`
/// further on, as long as they are below `known`.
///
/// # Safety
/// As [`multiply`].
pub(crate) unsafe fn scores<S: Simd, D: Dot<S>>(
    keys: &Weights<D::Elem>,
    ahead: usize,
    known: usize,
    packed: *const f32,
    cols: usize,
    sums: *mut f32,
    sums_stride: usize,
) {
    let key = |j: usize| keys.base[0].wrapping_add(j * keys.stride[0]);
    let asked = |j: usize| if j + ahead < known { key(j + ahead) } else { key(j) };
    // SAFETY: the caller's promises.
    unsafe { tile_by_tile::<S, D>([keys.rows, keys.k], |j| (key(j), j), asked, packed, cols, sums, sums_stride) }
}

/// The [`Tile`] of `R` weight rows and a group of `width` activation rows.
#[allow(clippy::too_many_arguments, reason = "the fields of a tile")]
unsafe fn any_width<S: Simd, D: Dot<S>, const R: usize>(
    width: usize,
    w: [*const D::Elem; R],
    asked: [*const D::Elem; R],
    ahead: usize,
    columns: [usize; R],
    x: *const f32,
    k: usize,
    sums: *mut f32,
    sums_stride: usize,
) {
    macro_rules! widths {
        ($($m:literal)*) => {
            match width {
                // SAFETY: the caller's promises are the type's.
                $($m if $m <= D::TILE_COLS => unsafe {
                    D::call(Tile::<S, D, R, $m> {
                        w, asked, ahead, columns, x, k, sums, sums_stride, set: PhantomData,
                    })
                },)*
                _ => unreachable!("a group of {width} columns"),
            }
        };
    }
    widths!(1 2 3 4 5 6);
}

/// Packs rows into the groups [`multiply`] expects; rows that are not f32 pass through `wide`, `k` f32.
///
/// # Safety
/// `packed` is as large as the [`Plan`] says, `wide` has `k` elements; the level exists.
pub(crate) unsafe fn pack_rows<S: Simd, D: Dot<S>>(
    row: impl Fn(usize) -> Row,
    cols: usize,
    k: usize,
    wide: *mut f32,
    packed: *mut f32,
) {
    let row_packed = k.div_ceil(D::CHUNK) * D::CHUNK;
    let mut first = 0;
    while first < cols {
        let width = group::<S, D>(cols - first);
        for m in 0..width {
            // SAFETY: the group starts where the rows before it end.
            unsafe {
                let dst = packed.add(first * row_packed);
                D::call(Pack::<S, D> { row: row(first + m), wide, dst, m, width, set: PhantomData });
            }
        }
        first += width;
    }
}
