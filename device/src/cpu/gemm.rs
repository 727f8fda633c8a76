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
//! summation, so it depends neither on the tile's size nor on the blocks below.
//!
//! Blocks: as many activation rows as half of L2 holds are packed at once and all weights pass over them; k is cut so
//! that four pieces of weight rows stay in L1 while the groups pass by (the vectors of partial sums wait in scratch).

use super::rows::{Row, has_unit_stride};
use super::simd::{Dot, Leaf, Simd};
use crate::io::Tensor;
use core::marker::PhantomData;

/// Rows of weights a tile takes.
pub(crate) const TILE_ROWS: usize = 4;

/// Bytes of packed activations that are passed over at once: under half of the 1 to 2 MiB of L2 that servers have.
const BLOCK_BYTES: usize = 768 << 10;

/// Cache lines of each weight row that stay in L1 with three more rows: 24 KiB of 32 to 48.
const BLOCK_LINES: usize = 96;

/// How far ahead weights are asked for, in cache lines of each row: 2 KiB.
/// PERF: without prefetch a matrix-vector product reached 72 % of the read bandwidth, with it 93 % (Emerald Rapids, 2
/// cores, 2026-11-20).
const AHEAD_LINES: usize = 32;

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
        assert_eq!(
            w.dtype().size_bytes(),
            size_of::<E>(),
            "weights must have their dtype's storage"
        );
        assert!(has_unit_stride::<2>(w), "weight rows need unit stride");
        if w.extent(0) == 0 || w.extent(1) == 0 {
            return core::ptr::NonNull::dangling().as_ptr();
        }
        w.address([0, 0]).cast()
    }

    /// Asks for the start of the first tile's rows: the activations are packed while they come.
    ///
    /// # Safety
    /// The level exists.
    #[inline(always)]
    pub(crate) unsafe fn prefetch<S: Simd>(&self) {
        let lines = (self.k * size_of::<E>() / 64).min(AHEAD_LINES);
        for line in 0..lines {
            for j in 0..TILE_ROWS.min(self.all_rows()) {
                // SAFETY: any address may be asked for.
                unsafe { S::prefetch(self.row(j).0.wrapping_byte_add(64 * line).cast()) };
            }
        }
    }

    /// Row `j` in the order tiles take them, and the column of the sums it belongs to (the second matrix's follow the
    /// first's).
    #[inline(always)]
    fn row(&self, j: usize) -> (*const E, usize) {
        let (matrix, i) = if self.paired {
            let i = j / 4 * 2 + (j & 1);
            // The last pair of an odd count is one row of each.
            if j & 2 != 0 {
                (1, i)
            } else if i >= self.rows {
                (1, i - 1)
            } else {
                (0, i)
            }
        } else {
            (0, j)
        };
        (
            self.base[matrix].wrapping_add(i * self.stride[matrix]),
            matrix * self.rows + i,
        )
    }
}

/// Scratch of [`multiply`], in f32: packed activations and partial sums.
pub(crate) struct Plan {
    /// Activation rows packed at once.
    pub(crate) block_rows: usize,
    /// f32 of the packed block.
    pub(crate) packed_floats: usize,
    /// f32 of the partial sums.
    pub(crate) partial_floats: usize,
}

impl Plan {
    /// For `rows` activation rows of `k` elements; the most that any level needs, so that it does not depend on one.
    pub(crate) fn new(rows: usize, k: usize) -> Plan {
        // f32, whole chunks of 32; packed bf16 takes half.
        let row_floats = k.next_multiple_of(32);
        let block_rows = (BLOCK_BYTES / 2 / row_floats.max(1)).clamp(12, 384) / 12 * 12;
        let block_rows = block_rows.min(rows);
        Plan {
            block_rows,
            packed_floats: block_rows * row_floats,
            partial_floats: block_rows * TILE_ROWS * 16,
        }
    }
}

/// How many of `left` columns the next group takes: a width that [`Tile`] is made for. The sizes do not matter to the
/// sums.
fn group<S: Simd>(left: usize) -> usize {
    [6, 4, 3, 2]
        .into_iter()
        .find(|width| *width <= left.min(S::TILE_COLS))
        .unwrap_or(1)
}

/// Packs one activation row as number `m` of a group of `width`. `wide` has room for a row, `dst` for a group of whole
/// chunks.
struct Pack<S: Simd, D: Dot<S>> {
    row: Row,
    wide: *mut f32,
    dst: *mut D::Packed,
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
                D::pack(
                    self.dst.add((c * self.width + self.m) * D::PACKED),
                    x.add(at),
                    D::CHUNK.min(k - at),
                );
                c += 1;
            }
        }
    }
}

/// Part of the k dimension, in cache lines of weights and what is left over at its end.
#[derive(Clone, Copy)]
struct Span {
    /// Whole cache lines, absolute.
    first_line: usize,
    end_line: usize,
    /// Cache lines of the whole row.
    all_lines: usize,
    /// Whether the row ends with this span: then the chunks and elements after the last whole line belong to it.
    last: bool,
}

/// Adds the products of `R` weight rows and a packed group of `M` activation rows over `span`. Partial sums come from
/// `partial` (room for R * M vectors) unless the span is the first, and go there unless it is the last; then the lanes
/// are added into `sums[m * sums_stride + columns[r]]`.
struct Tile<S: Simd, D: Dot<S>, const R: usize, const M: usize> {
    w: [*const D::Elem; R],
    /// Rows whose start is asked for when these end.
    next: [*const D::Elem; R],
    columns: [usize; R],
    x: *const D::Packed,
    k: usize,
    span: Span,
    /// Whether to ask for weights ahead of their use.
    ahead: bool,
    partial: *mut f32,
    sums: *mut f32,
    sums_stride: usize,
    set: PhantomData<S>,
}

impl<S: Simd, D: Dot<S>, const R: usize, const M: usize> Leaf for Tile<S, D, R, M> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Tile {
            w,
            next,
            columns,
            x,
            k,
            span,
            ahead,
            partial,
            sums,
            sums_stride,
            ..
        } = self;
        let per_line = (64 / size_of::<D::Elem>() / D::CHUNK).max(1);
        let line_elems = per_line * D::CHUNK;
        // SAFETY: lines and chunks below are inside the rows of `k` elements; prefetches may be of any address; partial
        // sums and sums are as the type says.
        unsafe {
            let mut acc = [[S::splat(0.0); M]; R];
            if span.first_line > 0 {
                let mut i = 0;
                while i < R * M {
                    acc[i / M][i % M] = S::load(partial.add(i * S::LANES));
                    i += 1;
                }
            }
            // Ahead in the same row as long as there is one, then at the start of the rows that come next.
            let turn = span
                .all_lines
                .saturating_sub(AHEAD_LINES)
                .clamp(span.first_line, span.end_line);
            let offset = AHEAD_LINES.min(span.all_lines);
            let mut line = span.first_line;
            while line < span.end_line {
                if ahead {
                    let mut r = 0;
                    while r < R {
                        let at = if line < turn {
                            w[r].wrapping_add((line + offset) * line_elems)
                        } else {
                            next[r].wrapping_add((line + offset - span.all_lines) * line_elems)
                        };
                        S::prefetch(at.cast());
                        r += 1;
                    }
                }
                let mut u = 0;
                while u < per_line {
                    chunk::<S, D, R, M>(&w, x, line * per_line + u, D::CHUNK, &mut acc);
                    u += 1;
                }
                line += 1;
            }
            if !span.last {
                let mut i = 0;
                while i < R * M {
                    S::store(partial.add(i * S::LANES), acc[i / M][i % M]);
                    i += 1;
                }
                return;
            }
            let mut c = span.all_lines * per_line;
            while c * D::CHUNK < k {
                chunk::<S, D, R, M>(&w, x, c, k - c * D::CHUNK, &mut acc);
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

/// Chunk `c` of a [`Tile`], of which `n` elements exist.
#[inline(always)]
unsafe fn chunk<S: Simd, D: Dot<S>, const R: usize, const M: usize>(
    w: &[*const D::Elem; R],
    x: *const D::Packed,
    c: usize,
    n: usize,
    acc: &mut [[S::F; M]; R],
) {
    // SAFETY: chunk `c` is inside the rows and the packed group (caller).
    unsafe {
        let at = c * D::CHUNK;
        let mut wr = [if n >= D::CHUNK {
            D::load(w[0].add(at))
        } else {
            D::load_part(w[0].add(at), n)
        }; R];
        let mut r = 1;
        while r < R {
            wr[r] = if n >= D::CHUNK {
                D::load(w[r].add(at))
            } else {
                D::load_part(w[r].add(at), n)
            };
            r += 1;
        }
        let mut m = 0;
        while m < M {
            let xm = D::load_x(x.add((c * M + m) * D::PACKED));
            let mut r = 0;
            while r < R {
                acc[r][m] = D::mac(acc[r][m], wr[r], xm);
                r += 1;
            }
            m += 1;
        }
    }
}

/// sums[m][column of row j] = weights[j] . x[m], for `packed` rows (groups as [`group`] cuts them) and all weight rows.
///
/// # Safety
/// Weights are readable; `packed`, `partial` and `sums` are as large as the [`Plan`] says; the level exists.
pub(crate) unsafe fn multiply<S: Simd, D: Dot<S>>(
    weights: &Weights<D::Elem>,
    packed: *const D::Packed,
    cols: usize,
    partial: *mut f32,
    sums: *mut f32,
    sums_stride: usize,
) {
    let n = weights.all_rows();
    let mut j = 0;
    // SAFETY: rows j.. are below n, and `next` is only asked for ahead of time.
    unsafe {
        while j + TILE_ROWS <= n {
            let rows = core::array::from_fn::<_, 4, _>(|r| weights.row(j + r));
            let next = core::array::from_fn::<_, 4, _>(|r| weights.row(j + TILE_ROWS + r).0);
            let (w, columns) = (rows.map(|r| r.0), rows.map(|r| r.1));
            row_group::<S, D, 4>(&w, &next, &columns, weights.k, packed, cols, partial, sums, sums_stride);
            j += TILE_ROWS;
        }
        while j < n {
            let (w, column) = weights.row(j);
            let next = weights.row(j + 1).0;
            row_group::<S, D, 1>(
                &[w],
                &[next],
                &[column],
                weights.k,
                packed,
                cols,
                partial,
                sums,
                sums_stride,
            );
            j += 1;
        }
    }
}

/// [`multiply`] for attention: sums[m][j] = keys[j] . x[m]. The lines asked for meanwhile are not the next keys but the
/// values of the same positions, which are wanted next.
///
/// # Safety
/// As [`multiply`]; rows of at most [`BLOCK_LINES`] lines, so that there are no partial sums to keep.
pub(crate) unsafe fn scores<S: Simd, D: Dot<S>>(
    keys: &Weights<D::Elem>,
    values: *const D::Elem,
    values_stride: usize,
    packed: *const D::Packed,
    cols: usize,
    sums: *mut f32,
    sums_stride: usize,
) {
    let none = core::ptr::null_mut();
    let mut j = 0;
    // SAFETY: as `multiply`.
    unsafe {
        while j + TILE_ROWS <= keys.rows {
            let w = core::array::from_fn::<_, 4, _>(|r| keys.row(j + r).0);
            let next = core::array::from_fn::<_, 4, _>(|r| values.wrapping_add((j + r) * values_stride));
            let columns = [j, j + 1, j + 2, j + 3];
            row_group::<S, D, 4>(&w, &next, &columns, keys.k, packed, cols, none, sums, sums_stride);
            j += TILE_ROWS;
        }
        while j < keys.rows {
            let next = values.wrapping_add(j * values_stride);
            let w = keys.row(j).0;
            row_group::<S, D, 1>(&[w], &[next], &[j], keys.k, packed, cols, none, sums, sums_stride);
            j += 1;
        }
    }
}

/// `R` weight rows against all packed groups.
#[allow(clippy::too_many_arguments, reason = "the loop's whole state, in one place")]
unsafe fn row_group<S: Simd, D: Dot<S>, const R: usize>(
    w: &[*const D::Elem; R],
    next: &[*const D::Elem; R],
    columns: &[usize; R],
    k: usize,
    packed: *const D::Packed,
    cols: usize,
    partial: *mut f32,
    sums: *mut f32,
    sums_stride: usize,
) {
    let all_lines = k / (64 / size_of::<D::Elem>());
    let row_packed = k.div_ceil(D::CHUNK) * D::PACKED;
    let block_lines = if cols <= S::TILE_COLS { usize::MAX } else { BLOCK_LINES };
    let mut first_line = 0usize;
    loop {
        let end_line = all_lines.min(first_line.saturating_add(block_lines));
        let span = Span {
            first_line,
            end_line,
            all_lines,
            last: end_line == all_lines,
        };
        let mut m = 0;
        while m < cols {
            let width = group::<S>(cols - m);
            macro_rules! widths {
                ($($m:literal)*) => {
                    match width {
                        // SAFETY: the group's packed rows, partial sums and sums start where the `m` rows before end.
                        $($m if $m <= S::TILE_COLS => unsafe {
                            D::call(Tile::<S, D, R, $m> {
                                w: *w,
                                next: *next,
                                columns: *columns,
                                x: packed.add(m * row_packed),
                                k,
                                span,
                                // Only the first group meets the weights outside L1.
                                ahead: m == 0,
                                partial: partial.wrapping_add(m * R * S::LANES),
                                sums: sums.add(m * sums_stride),
                                sums_stride,
                                set: PhantomData,
                            })
                        },)*
                        _ => unreachable!("a group of {width} columns"),
                    }
                };
            }
            widths!(1 2 3 4 6);
            m += width;
        }
        if span.last {
            return;
        }
        first_line = end_line;
    }
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
    packed: *mut D::Packed,
) {
    let row_packed = k.div_ceil(D::CHUNK) * D::PACKED;
    let mut first = 0;
    while first < cols {
        let width = group::<S>(cols - first);
        for m in 0..width {
            // SAFETY: the group starts where the rows before it end.
            unsafe {
                let dst = packed.add(first * row_packed);
                D::call(Pack::<S, D> {
                    row: row(first + m),
                    wide,
                    dst,
                    m,
                    width,
                    set: PhantomData,
                });
            }
        }
        first += width;
    }
}
