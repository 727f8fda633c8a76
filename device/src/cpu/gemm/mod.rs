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
//! A block of activation rows is packed at once. A group's rows stay in the nearest cache they fit while the weight
//! rows of the task pass by, from L2 after the first group. k is not cut: L2 feeds a tile as fast as L1 does, while
//! partial sums are sixteen times as large as the sums.
//!
//! PERF: bf16 512x256x1024 on one AVX-512 core of 159 GFLOP/s: 91 with tiles as the compiler allots their registers,
//! 99 with [`Dot::tile`] in assembly (Sapphire Rapids, 2026-11-21).

mod order;
mod supply;
mod tile;

#[cfg(target_arch = "x86_64")]
pub(crate) use supply::AsPairs;
pub(crate) use supply::{InPlace, Supply};

use super::rows::{Row, has_unit_stride};
use super::simd::{Dot, Leaf, Simd};
use crate::io::Tensor;
use core::marker::PhantomData;
use order::{Keys, One, Streams};
use tile::{Columns, Next, of_width};

/// Rows of weights a tile takes.
pub(crate) const TILE_ROWS: usize = 4;

/// Bytes of packed activations that are passed over at once: half of L2, so that the weights of a task fit beside them.
const BLOCK_BYTES: usize = 1 << 20;

/// Bytes of weights that pass by the groups of a block at once, so that they come from L2 after the first: with as much
/// of the next part and the sums of both beside the packed block.
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

/// Rows (of each matrix) of the parts of `weights` that `cols` activation rows are multiplied with in turn: all where
/// they are one group, as many as have few sums where they are [few](are_few), and see every weight once, too; of
/// weights that are made never more than stay in a cache.
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

/// Activation rows, of `rows` of `k` elements, that are packed at once; f32 that each of them takes at most, in whole
/// steps of the longest: neither depends on a level.
fn block_of(rows: usize, k: usize) -> [usize; 2] {
    let floats = k.next_multiple_of(perpetua_shared::dtype::Q4.elems);
    let in_cache = BLOCK_BYTES / 4 / floats.max(1);
    [(in_cache.clamp(12, 384) / 12 * 12).min(rows), floats]
}

/// Lengths of the scratch areas that [`products`] of `rows` activation rows wants: packed activations, a row of f32,
/// weights that are made, and sums.
pub(crate) fn areas<S: Simd, P: Supply<S>>(rows: usize, weights: &Weights<P::Elem>) -> [usize; 4] {
    let [block, floats] = block_of(rows, weights.k);
    let part = part_rows::<S, P>(weights, block) * (1 + usize::from(weights.paired));
    [block * floats, weights.k, part * P::room(weights.k), part * block]
}

/// The products of the first `rows` rows of `x` with all rows of `weights`, a block of rows and a part of the weights
/// after the other: calls `finish([first row, rows], [first column, columns], sums)`, where a row has its sums with the
/// part of the first matrix, then with that of the second.
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
                let block = Block { packed, cols, sums, sums_stride: now.all_rows() };
                multiply::<S, P::Dot>(&P::made(&now, room), next, block);
                finish([first, cols], [column, now.rows], sums);
                column = after;
            }
        }
        first += cols;
    }
}

/// How many of `left` columns the next group takes, a width that tiles are made for: all, if the registers have room
/// for their sums, as many as they have room for, or of the last two groups half. The sizes do not matter to the sums.
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

/// Whether `cols` activation rows are several groups, but so few that reading the weights takes about as long as the
/// products: then each tile's weights are multiplied with all groups before the next tile's, for which these ask
/// meanwhile, each for a share, so that memory never rests.
///
/// PERF: GB/s of bf16 weights on one core that reads 34, with all groups after each other -> tile by tile: AVX-512, k =
/// 1024, 8 rows 17.4 -> 18.6, while memory was slow (24) 11.4 -> 18.1; AVX2, k = 3072, 4, 6 and 8 rows 16.1 -> 20.3,
/// 13.9 -> 16.3, 10.5 -> 12.3. With 12 rows and more it is no faster (Turin, 2026-11-25).
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

/// Activation rows, packed, and where the sums of each go.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    /// Groups as [`pack_rows`] leaves them.
    pub(crate) packed: *const f32,
    /// Rows.
    pub(crate) cols: usize,
    /// Those of the first row.
    pub(crate) sums: *mut f32,
    /// f32 from those of a row to those of the next.
    pub(crate) sums_stride: usize,
}

impl Block {
    /// Its groups, of rows of `k` elements.
    fn groups<S: Simd, D: Dot<S>>(self, k: usize) -> impl Iterator<Item = Columns> {
        let Block { packed, cols, sums, sums_stride } = self;
        let (mut first, mut number) = (0, 0);
        core::iter::from_fn(move || {
            if first == cols {
                return None;
            }
            let width = group::<S, D>(cols - first);
            let (x, sums) =
                (packed.wrapping_add(first * packed_row::<S, D>(k)), sums.wrapping_add(first * sums_stride));
            let columns = Columns { number, width, k, x, sums, sums_stride };
            (first, number) = (first + width, number + 1);
            Some(columns)
        })
    }
}

/// Makes the block's sums with `weights`: of row j in its [column](Weights::row). Where the first group is not the only
/// one, those after it ask for the weights `next`.
///
/// # Safety
/// Weights are readable, the block's rows are packed, and its sums have room for a sum of each with each; the level
/// exists.
unsafe fn multiply<S: Simd, D: Dot<S>>(weights: &Weights<D::Elem>, next: Next, block: Block) {
    if are_few::<S, D>(block.cols) {
        // SAFETY: the caller's promises.
        return unsafe { tile_by_tile::<S, D>(weights, block) };
    }
    let lines = weights.k / D::LINE_ELEMS;
    let tiles = (block.cols.div_ceil(D::TILE_COLS) - 1) * weights.streams();
    let (mut none, mut next) = (Next::NONE, next.over(tiles));
    for columns in block.groups::<S, D>(weights.k) {
        let (ahead, next) = if columns.number == 0 { (D::AHEAD_LINES, &mut none) } else { (NEAR_LINES, &mut next) };
        // SAFETY: a group of the block (caller).
        unsafe { of_width::<S, D>(&columns, Streams::of(weights, lines, ahead), next) };
    }
}

/// As [`multiply`]: a tile's rows with all groups before the next. Meanwhile the next tile's are asked for, by each
/// group its share.
///
/// # Safety
/// As [`multiply`].
unsafe fn tile_by_tile<S: Simd, D: Dot<S>>(weights: &Weights<D::Elem>, block: Block) {
    let (n, groups) = (weights.all_rows(), block.cols.div_ceil(D::TILE_COLS));
    let mut none = Next::NONE;
    let mut j = 0;
    while j < n {
        let is_tile = j + TILE_ROWS <= n;
        let at = |j: usize| weights.row(j.min(n - 1));
        let rows: [_; TILE_ROWS] = core::array::from_fn(|r| at(j + r));
        let after: [_; TILE_ROWS] = core::array::from_fn(|r| at(j + TILE_ROWS + r).0);
        for columns in block.groups::<S, D>(weights.k) {
            // What another group asks for is here: to ask again for what is being read costs least.
            let asked = core::array::from_fn(|r| if r % groups == columns.number { after[r] } else { rows[r].0 });
            // SAFETY: a group of the block (caller). Rows j.. are below n.
            unsafe { of_width::<S, D>(&columns, One { rows, asked, is_tile }, &mut none) };
        }
        j += if is_tile { TILE_ROWS } else { 1 };
    }
}

/// [`multiply`] for attention, keys in order. Meanwhile those are asked for that are `ahead` further on, as long as
/// they are below `known`.
///
/// # Safety
/// As [`multiply`].
pub(crate) unsafe fn scores<S: Simd, D: Dot<S>>(keys: &Weights<D::Elem>, ahead: usize, known: usize, block: Block) {
    let mut none = Next::NONE;
    for columns in block.groups::<S, D>(keys.k) {
        // All but the first group find the keys in a cache.
        let known = if columns.number == 0 { known } else { 0 };
        let order = Keys { first: keys.base[0], stride: keys.stride[0], n: keys.rows, on: ahead, known };
        // SAFETY: a group of the block (caller).
        unsafe { of_width::<S, D>(&columns, order, &mut none) };
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
