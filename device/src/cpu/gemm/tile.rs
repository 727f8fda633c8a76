//! Tiles: four weight rows by as many activation rows as registers hold sums for, one after the other for all weight
//! rows.

use super::order::Order;
use super::{TILE_ROWS, Weights};
use crate::cpu::simd::{Dot, Leaf, Simd};
use core::marker::PhantomData;

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
        // SAFETY: lines and chunks below are inside the rows of `k` elements; prefetches may be of any address; sums
        // are as the type says.
        unsafe {
            let mut acc = [[S::splat(0.0); M]; R];
            let mut c;
            if R == TILE_ROWS && M >= D::TILES_FROM {
                c = k / D::CHUNK;
                if c > 0 {
                    // Rows that come next lie as far beyond those of a tile, all four; where they do not, they are
                    // asked for in vain.
                    let by = asked[0].addr().wrapping_sub(w[0].addr()).wrapping_add(64 * ahead);
                    // SAFETY: there are four rows.
                    let sums = &mut *acc.as_mut_ptr().cast::<[[S::F; M]; TILE_ROWS]>();
                    D::tile([w[0], w[1 % R], w[2 % R], w[3 % R]], by, x, c, sums);
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

/// The tiles of all rows of weights and a packed group of `M` activation rows, one after the other.
///
/// PERF: a call for each tile, which looked for its rows, took as long as reading 1 KiB: bf16, k = 1024, on one core
/// that reads 41: 30 -> 34 GB/s (AVX-512, Turin, 2026-11-30).
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
    /// Whether tiles are part of the group's own code. Where a set has 16 registers, the compiler spills sums of tiles
    /// that it allots them to among anything else.
    ///
    /// PERF: AVX2, bf16, 4 rows, k = 3072: 17 GB/s, with a call for each such tile 21 (Turin, 2026-11-30).
    const HOLDS_TILES: bool = M == 1 || S::TILE_COLS > 3 || M >= D::TILES_FROM;
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

/// A group of packed activation rows, and where its sums go.
pub(super) struct Columns {
    /// Which of its block it is.
    pub(super) number: usize,
    /// Rows.
    pub(super) width: usize,
    /// Elements of a row.
    pub(super) k: usize,
    pub(super) x: *const f32,
    pub(super) sums: *mut f32,
    pub(super) sums_stride: usize,
}

/// The [`Group`] of these columns.
///
/// # Safety
/// As `multiply`, of these.
pub(super) unsafe fn of_width<S: Simd, D: Dot<S>>(columns: &Columns, order: impl Order<D::Elem>, next: &mut Next) {
    let &Columns { width, k, x, sums, sums_stride, .. } = columns;
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
pub(super) struct Next {
    /// Where those of each matrix are that have not been asked for, and how many bytes.
    from: [*const u8; 2],
    left: usize,
    /// Bytes of each that one tile asks for.
    share: usize,
}

impl Next {
    pub(super) const NONE: Next = Next { from: [core::ptr::null(); 2], left: 0, share: 0 };

    /// `weights`, all at once until they are [shared](Next::over).
    pub(super) fn of<E>(weights: &Weights<E>) -> Next {
        let left = weights.rows * weights.stride[0] * size_of::<E>();
        Next { from: weights.base.map(<*const E>::cast), left, share: left }
    }

    /// Asked for over `tiles`.
    pub(super) fn over(self, tiles: usize) -> Next {
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
