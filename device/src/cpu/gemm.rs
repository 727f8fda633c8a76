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
#[cfg(target_arch = "x86_64")]
use super::simd::{BrainRow, Pairs, STEP, Vectors, Widened};
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

    /// Rows `first..first + rows` of each matrix.
    pub(crate) fn part(&self, first: usize, rows: usize) -> Weights<E> {
        debug_assert!(first + rows <= self.rows);
        let base = core::array::from_fn(|i| self.base[i].wrapping_add(first * self.stride[i]));
        Weights { base, rows, ..*self }
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

/// f32 of the room of a packed row of `k` elements.
fn packed_row<S: Simd, D: Dot<S>>(k: usize) -> usize {
    k.div_ceil(D::CHUNK) * D::ROOM
}

/// How the weights of a product come to be multiplied.
pub(crate) trait Supply<S: Simd> {
    /// Storage of a weight of the matrix.
    type Elem: Copy;
    /// What multiplies them.
    type Dot: Dot<S>;

    /// f32 of the room that a row of `k` elements is made in; 0 where rows are multiplied where they lie.
    fn room(k: usize) -> usize;

    /// `part`, as it is multiplied.
    ///
    /// # Safety
    /// The weights are readable, rows in whole lines where they have lines; `room` is writable as far as the rows need it; the level exists.
    unsafe fn made(part: &Weights<Self::Elem>, room: *mut f32) -> Weights<<Self::Dot as Dot<S>>::Elem>;

    /// Asks for the first weights of `part`: the activations are packed while they come.
    ///
    /// # Safety
    /// The level exists.
    unsafe fn ask(part: &Weights<Self::Elem>);
}

/// Weights where they lie.
pub(crate) struct InPlace<D>(PhantomData<D>);

impl<S: Simd, D: Dot<S>> Supply<S> for InPlace<D> {
    type Elem = D::Elem;
    type Dot = D;

    fn room(_: usize) -> usize {
        0
    }

    unsafe fn made(part: &Weights<D::Elem>, _: *mut f32) -> Weights<D::Elem> {
        *part
    }

    unsafe fn ask(part: &Weights<D::Elem>) {
        let lines = (part.k / D::LINE_ELEMS).min(D::AHEAD_LINES);
        for line in 0..lines {
            for j in 0..TILE_ROWS.min(part.all_rows()) {
                // SAFETY: any address may be asked for.
                unsafe { D::prefetch(part.row(j).0, line) };
            }
        }
    }
}

/// Weights in fewer bits made bf16, times their scales and rounded, for [`Pairs`].
#[cfg(target_arch = "x86_64")]
pub(crate) struct AsPairs<E>(PhantomData<E>);

#[cfg(target_arch = "x86_64")]
impl<E: Widened> Supply<Vectors> for AsPairs<E>
where
    E::Elem: Copy,
{
    type Elem = E::Elem;
    type Dot = Pairs;

    fn room(k: usize) -> usize {
        k.next_multiple_of(STEP) / 2
    }

    unsafe fn made(part: &Weights<E::Elem>, room: *mut f32) -> Weights<u16> {
        let (stride, rows) = (part.k.next_multiple_of(STEP), part.all_rows());
        let first: *mut u16 = room.cast();
        let base = [first, if part.paired { first.wrapping_add(part.rows * stride) } else { first }];
        for j in 0..rows {
            let (matrix, i) = (j / part.rows, j % part.rows);
            let row = part.base[matrix].wrapping_add(i * part.stride[matrix]);
            // SAFETY: rows of whole lines are rows of whole steps; the room is large enough (caller).
            unsafe { Pairs::call(BrainRow::<E> { row, k: part.k, to: base[matrix].add(i * stride) }) };
        }
        let base = base.map(<*mut u16>::cast_const);
        Weights { base, stride: [stride; 2], rows: part.rows, paired: part.paired, k: part.k }
    }

    // Rows are read one after the other, as the hardware expects.
    unsafe fn ask(_: &Weights<E::Elem>) {}
}

/// Rows (of each matrix) of the parts of `weights` that `cols` activation rows are multiplied with in turn: all where they are one group, as many as
/// have few sums where they are [few](are_few), and see every weight once, too; of weights that are made never more than stay in a cache.
fn part_rows<S: Simd, P: Supply<S>>(weights: &Weights<P::Elem>, cols: usize) -> usize {
    let (matrices, made) = (1 + usize::from(weights.paired), P::room(weights.k));
    let parts = if made == 0 && cols <= P::Dot::TILE_COLS {
        1
    } else if made == 0 && are_few::<S, P::Dot>(cols) {
        (weights.rows * matrices * cols * size_of::<f32>()).div_ceil(SUMS_BYTES)
    } else {
        let row = if made == 0 { weights.stride[0] * size_of::<P::Elem>() } else { made * size_of::<f32>() };
        (weights.rows * matrices * row).div_ceil(PART_BYTES)
    };
    weights.rows.div_ceil(parts.max(1)).next_multiple_of(8).min(weights.rows)
}

/// Activation rows, of `rows` of `k` elements, that are packed at once; f32 that each of them takes at most, in whole steps of the longest: neither depends on a level.
fn block_of(rows: usize, k: usize) -> [usize; 2] {
    let floats = k.next_multiple_of(perpetua_shared::dtype::Q4.elems);
    let in_cache = BLOCK_BYTES / 4 / floats.max(1);
    [(in_cache.clamp(12, 384) / 12 * 12).min(rows), floats]
}

/// Lengths of the scratch areas that [`products`] of `rows` activation rows wants: packed activations, a row of f32, weights that are made, and sums.
pub(crate) fn areas<S: Simd, P: Supply<S>>(rows: usize, weights: &Weights<P::Elem>) -> [usize; 4] {
    let [block, floats] = block_of(rows, weights.k);
    let part = part_rows::<S, P>(weights, block) * (1 + usize::from(weights.paired));
    [block * floats, weights.k, part * P::room(weights.k), part * block]
}

/// The products of the first `rows` rows of `x` with all rows of `weights`, a block of rows and a part of the weights after the other: calls
/// `finish([first row, rows], [first column, columns], sums)`, where a row has its sums with the part of the first matrix, then with that of the second.
///
/// # Safety
/// The weights are readable, as [`Supply::made`] wants them; the areas are as long as [`areas`] says; the level exists.
pub(crate) unsafe fn products<S: Simd, P: Supply<S>>(
    x: &Tensor,
    rows: usize,
    weights: &Weights<P::Elem>,
    [packed, wide, room, sums]: [*mut f32; 4],
    finish: impl Fn([usize; 2], [usize; 2], *const f32),
) {
    let k = weights.k;
    let [block, _] = block_of(rows, k);
    let most = part_rows::<S, P>(weights, block);
    let part = |column: usize| weights.part(column, most.min(weights.rows - column));
    let mut first = 0;
    while first < rows {
        let cols = block.min(rows - first);
        // SAFETY: the areas are as large as asked for (caller); rows of `x` are of `k` elements, or `Row::of` panics.
        unsafe {
            P::ask(weights);
            pack_rows::<S, P::Dot>(|m| Row::of(x, [first + m, 0], k), cols, k, wide, packed);
            let mut column = 0;
            while column < weights.rows {
                let now = part(column);
                let after = column + now.rows;
                let next = if after < weights.rows { Next::of(&part(after)) } else { Next::NONE };
                multiply::<S, P::Dot>(&P::made(&now, room), next, packed, cols, sums, now.all_rows());
                finish([first, cols], [column, now.rows], sums);
                column = after;
            }
        }
        first += cols;
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
                D::pack(self.dst.add((c * self.width + self.m) * D::ROOM), x.add(at), D::CHUNK.min(k - at));
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

/// The order in which a group is multiplied with weight rows, and what is asked for meanwhile.
trait Order<E>: Copy {
    /// Rows, and of them whole tiles.
    fn rows(&self) -> [usize; 2];
    /// The rows of tile `p`, each with its column of the sums.
    fn tile(&self, p: usize) -> [(*const E, usize); TILE_ROWS];
    /// Row `j`, which is in no tile, and its column.
    fn row(&self, j: usize) -> (*const E, usize);
    /// Rows of which the lines are asked for that lie [`ahead`](Order::ahead) of those read of tile `p`.
    fn asked(&self, p: usize) -> [*const E; TILE_ROWS];
    /// Likewise while row `j` is read.
    fn asked_row(&self, j: usize) -> *const E;
    fn ahead(&self) -> usize {
        0
    }
}

/// Rows of [`Weights`] as these order them.
struct Streams<'a, E> {
    weights: &'a Weights<E>,
    /// Those of the first tile, and from them to the next tile's.
    first: [(*const E, usize); TILE_ROWS],
    apart: [usize; TILE_ROWS],
    /// How many lines on they are asked for in the same rows, or, where that is 0, how many tiles on.
    ahead: usize,
    tiles_on: usize,
}

impl<E> Clone for Streams<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E> Copy for Streams<'_, E> {}

impl<'a, E> Streams<'a, E> {
    /// Those of `weights`, of rows of `lines`, asked for `ahead` lines on.
    fn of(weights: &'a Weights<E>, lines: usize, ahead: usize) -> Streams<'a, E> {
        let matrix = |r: usize| if weights.paired { r / 2 } else { 0 };
        Streams {
            weights,
            first: core::array::from_fn(|r| weights.row(if weights.streams() > 0 { r } else { 0 })),
            apart: core::array::from_fn(|r| weights.stride[matrix(r)]),
            // In a long row further on, and so at its end in the row that follows it in memory, which mostly comes next; in a
            // short one at the same place of one that comes. To choose at every line costs more than what is asked for in vain.
            ahead: if lines > ahead { ahead } else { 0 },
            // Of short rows as many tiles on as have the lines, at least one.
            //
            // PERF: k = 1024 on one core that reads 35: 8 bits 30 -> 35 GB/s, 4 bits 26 -> 35 (AVX-512, Turin, 2026-11-25).
            tiles_on: (ahead / lines.max(1)).max(1),
        }
    }
}

impl<E> Order<E> for Streams<'_, E> {
    #[inline(always)]
    fn rows(&self) -> [usize; 2] {
        [self.weights.all_rows(), self.weights.streams()]
    }
    #[inline(always)]
    fn tile(&self, p: usize) -> [(*const E, usize); TILE_ROWS] {
        core::array::from_fn(|r| (self.first[r].0.wrapping_add(p * self.apart[r]), self.first[r].1 + p))
    }
    #[inline(always)]
    fn row(&self, j: usize) -> (*const E, usize) {
        self.weights.row(j)
    }
    #[inline(always)]
    fn asked(&self, p: usize) -> [*const E; TILE_ROWS] {
        let at = if self.ahead > 0 { p } else { (p + self.tiles_on).min(self.weights.streams() - 1) };
        self.tile(at).map(|(row, _)| row)
    }
    #[inline(always)]
    fn asked_row(&self, j: usize) -> *const E {
        self.row(if self.ahead > 0 { j } else { (j + 1).min(self.weights.all_rows() - 1) }).0
    }
    #[inline(always)]
    fn ahead(&self) -> usize {
        self.ahead
    }
}

/// Keys one after the other: `n`, `stride` apart. Meanwhile those are asked for that are `on` further on, as long as they are below `known`.
#[derive(Clone, Copy)]
struct Keys<E> {
    first: *const E,
    stride: usize,
    n: usize,
    on: usize,
    known: usize,
}

impl<E: Copy> Order<E> for Keys<E> {
    #[inline(always)]
    fn rows(&self) -> [usize; 2] {
        [self.n, self.n / TILE_ROWS]
    }
    #[inline(always)]
    fn tile(&self, p: usize) -> [(*const E, usize); TILE_ROWS] {
        core::array::from_fn(|r| self.row(TILE_ROWS * p + r))
    }
    #[inline(always)]
    fn row(&self, j: usize) -> (*const E, usize) {
        (self.first.wrapping_add(j * self.stride), j)
    }
    #[inline(always)]
    fn asked(&self, p: usize) -> [*const E; TILE_ROWS] {
        core::array::from_fn(|r| self.asked_row(TILE_ROWS * p + r))
    }
    #[inline(always)]
    fn asked_row(&self, j: usize) -> *const E {
        self.row(if j + self.on < self.known { j + self.on } else { j }).0
    }
}

/// One tile, or one row.
#[derive(Clone, Copy)]
struct One<E> {
    rows: [(*const E, usize); TILE_ROWS],
    asked: [*const E; TILE_ROWS],
    is_tile: bool,
}

impl<E: Copy> Order<E> for One<E> {
    #[inline(always)]
    fn rows(&self) -> [usize; 2] {
        if self.is_tile { [TILE_ROWS, 1] } else { [1, 0] }
    }
    #[inline(always)]
    fn tile(&self, _: usize) -> [(*const E, usize); TILE_ROWS] {
        self.rows
    }
    #[inline(always)]
    fn row(&self, _: usize) -> (*const E, usize) {
        self.rows[0]
    }
    #[inline(always)]
    fn asked(&self, _: usize) -> [*const E; TILE_ROWS] {
        self.asked
    }
    #[inline(always)]
    fn asked_row(&self, _: usize) -> *const E {
        self.asked[0]
    }
}

/// The tiles of all rows of weights and a packed group of `M` activation rows, one after the other.
///
/// PERF: a call for each tile, which looked for its rows, took as long as reading 1 KiB: bf16, k = 1024, on one core that reads 41: 30 -> 34 GB/s
/// (AVX-512, Turin, 2026-11-30).
struct Group<'a, S: Simd, D: Dot<S>, O, const M: usize> {
    order: O,
    k: usize,
    x: *const f32,
    sums: *mut f32,
    sums_stride: usize,
    next: &'a mut Next,
    set: PhantomData<(S, D)>,
}

impl<S: Simd, D: Dot<S>, O, const M: usize> Group<'_, S, D, O, M> {
    /// Whether tiles are part of the group's own code. Where a set has 16 registers, the compiler spills sums of tiles that it allots them to among anything else.
    ///
    /// PERF: AVX2, bf16, 4 rows, k = 3072: 17 GB/s, with a call for each such tile 21 (Turin, 2026-11-30).
    const HOLDS_TILES: bool = M == 1 || S::TILE_COLS > 3 || D::HAS_TILE && M == D::TILE_COLS;
}

impl<S: Simd, D: Dot<S>, O: Order<D::Elem>, const M: usize> Leaf for Group<'_, S, D, O, M> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Group { order, k, x, sums, sums_stride, next, .. } = self;
        let ([n, tiles], ahead) = (order.rows(), order.ahead());
        // SAFETY: the rows are readable, and what is `asked` for is only that; see the type.
        unsafe {
            let mut p = 0;
            while p < tiles {
                let (rows, asked) = (order.tile(p), order.asked(p));
                let (w, columns) = (rows.map(|(w, _)| w), rows.map(|(_, column)| column));
                let tile =
                    Tile::<S, D, TILE_ROWS, M> { w, asked, ahead, columns, x, k, sums, sums_stride, set: PhantomData };
                if Self::HOLDS_TILES {
                    tile.run();
                } else {
                    D::call(tile);
                }
                next.ask::<S>();
                p += 1;
            }
            let mut j = TILE_ROWS * tiles;
            while j < n {
                let ((w, column), asked) = (order.row(j), [order.asked_row(j)]);
                let (w, columns) = ([w], [column]);
                Tile::<S, D, 1, M> { w, asked, ahead, columns, x, k, sums, sums_stride, set: PhantomData }.run();
                j += 1;
            }
        }
    }
}

/// The [`Group`] of `width` packed rows at `x`.
///
/// # Safety
/// As [`multiply`], of these.
unsafe fn of_width<S: Simd, D: Dot<S>>(
    width: usize,
    order: impl Order<D::Elem>,
    k: usize,
    x: *const f32,
    (sums, sums_stride): (*mut f32, usize),
    next: &mut Next,
) {
    macro_rules! widths {
        ($($m:literal)*) => {
            match width {
                // SAFETY: the caller's promises.
                $($m if $m <= D::TILE_COLS => unsafe {
                    D::call(Group::<S, D, _, $m> { order, k, x, sums, sums_stride, next, set: PhantomData })
                },)*
                _ => unreachable!("a group of {width} columns"),
            }
        };
    }
    widths!(1 2 3 4 5 6);
}

/// Weights that come next, which are asked for, a few lines a tile, while others are multiplied out of a cache.
struct Next {
    /// Where those of each matrix are that have not been asked for, and how many bytes.
    from: [*const u8; 2],
    left: usize,
    /// Bytes of each that one tile asks for.
    share: usize,
}

impl Next {
    const NONE: Next = Next { from: [core::ptr::null(); 2], left: 0, share: 0 };

    /// `weights`, all at once until they are [shared](Next::over).
    fn of<E>(weights: &Weights<E>) -> Next {
        let left = weights.rows * weights.stride[0] * size_of::<E>();
        Next { from: weights.base.map(<*const E>::cast), left, share: left }
    }

    /// Asked for over `tiles`.
    fn over(self, tiles: usize) -> Next {
        Next { share: self.left.div_ceil(tiles.max(1)).next_multiple_of(64), ..self }
    }

    /// A tile's share.
    #[inline(always)]
    unsafe fn ask<S: Simd>(&mut self) {
        let mut at = 0;
        while at < self.share.min(self.left) {
            // SAFETY: any address may be asked for.
            unsafe {
                S::prefetch(self.from[0].wrapping_add(at));
                if self.from[1] != self.from[0] {
                    S::prefetch(self.from[1].wrapping_add(at));
                }
            }
            at += 64;
        }
        self.left = self.left.saturating_sub(at);
        self.from = self.from.map(|from| from.wrapping_add(at));
    }
}

/// sums[m][column of row j] = weights[j] . x[m], for `packed` rows (groups as [`group`] cuts them) and all weight rows. Where the first group is not
/// the only one, those after it ask for the weights `next`.
///
/// # Safety
/// Weights are readable; `packed` has the rows, and `sums` room for a sum of each with each; the level exists.
unsafe fn multiply<S: Simd, D: Dot<S>>(
    weights: &Weights<D::Elem>,
    next: Next,
    packed: *const f32,
    cols: usize,
    sums: *mut f32,
    sums_stride: usize,
) {
    if are_few::<S, D>(cols) {
        // SAFETY: the caller's promises.
        return unsafe { tile_by_tile::<S, D>(weights, packed, cols, sums, sums_stride) };
    }
    let k = weights.k;
    let (row_packed, lines) = (packed_row::<S, D>(k), k / D::LINE_ELEMS);
    let tiles = (cols.div_ceil(D::TILE_COLS) - 1) * weights.streams();
    let (mut none, mut next) = (Next::NONE, next.over(tiles));
    let mut m = 0;
    while m < cols {
        let width = group::<S, D>(cols - m);
        let (ahead, next) = if m == 0 { (D::AHEAD_LINES, &mut none) } else { (NEAR_LINES, &mut next) };
        let order = Streams::of(weights, lines, ahead);
        // SAFETY: the group's packed rows and sums start where those of the `m` rows before end.
        unsafe {
            let (x, sums) = (packed.add(m * row_packed), (sums.add(m * sums_stride), sums_stride));
            of_width::<S, D>(width, order, k, x, sums, next);
        }
        m += width;
    }
}

/// As [`multiply`]: a tile's rows with all groups of `packed` before the next. Meanwhile the next tile's are asked for, by each group its share.
///
/// # Safety
/// As [`multiply`].
unsafe fn tile_by_tile<S: Simd, D: Dot<S>>(
    weights: &Weights<D::Elem>,
    packed: *const f32,
    cols: usize,
    sums: *mut f32,
    sums_stride: usize,
) {
    let (n, k) = (weights.all_rows(), weights.k);
    let row_packed = packed_row::<S, D>(k);
    let groups = cols.div_ceil(D::TILE_COLS);
    let mut none = Next::NONE;
    let mut j = 0;
    while j < n {
        let is_tile = j + TILE_ROWS <= n;
        let at = |j: usize| weights.row(j.min(n - 1));
        let rows: [_; TILE_ROWS] = core::array::from_fn(|r| at(j + r));
        let after: [_; TILE_ROWS] = core::array::from_fn(|r| at(j + TILE_ROWS + r).0);
        let (mut m, mut number) = (0, 0);
        while m < cols {
            let width = group::<S, D>(cols - m);
            // What another group asks for is here: to ask again for what is being read costs least.
            let asked = core::array::from_fn(|r| if r % groups == number { after[r] } else { rows[r].0 });
            // SAFETY: the group's packed rows and sums start where those of the `m` rows before end. Rows j.. are below n.
            unsafe {
                let (x, sums) = (packed.add(m * row_packed), (sums.add(m * sums_stride), sums_stride));
                of_width::<S, D>(width, One { rows, asked, is_tile }, k, x, sums, &mut none);
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
    let (k, row_packed) = (keys.k, packed_row::<S, D>(keys.k));
    let (mut m, mut none) = (0, Next::NONE);
    while m < cols {
        let width = group::<S, D>(cols - m);
        // All but the first group find the keys in a cache.
        let known = if m == 0 { known } else { 0 };
        let order = Keys { first: keys.base[0], stride: keys.stride[0], n: keys.rows, on: ahead, known };
        // SAFETY: the group's packed rows and sums start where those of the `m` rows before end (caller).
        unsafe {
            let (x, sums) = (packed.add(m * row_packed), (sums.add(m * sums_stride), sums_stride));
            of_width::<S, D>(width, order, k, x, sums, &mut none);
        }
        m += width;
    }
}

/// Packs rows into the groups [`multiply`] expects; rows that are not f32 pass through `wide`, `k` f32.
///
/// # Safety
/// `packed` has room for as many [packed rows](packed_row), `wide` for `k` elements; the level exists.
pub(crate) unsafe fn pack_rows<S: Simd, D: Dot<S>>(
    row: impl Fn(usize) -> Row,
    cols: usize,
    k: usize,
    wide: *mut f32,
    packed: *mut f32,
) {
    let row_packed = packed_row::<S, D>(k);
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
