//! The orders in which weight rows are multiplied, and what is asked for meanwhile.

use super::{TILE_ROWS, Weights};

/// The order in which a group is multiplied with weight rows, and what is asked for meanwhile.
pub(super) trait Order<E>: Copy {
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
pub(super) struct Streams<'a, E> {
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
    pub(super) fn of(weights: &'a Weights<E>, lines: usize, ahead: usize) -> Streams<'a, E> {
        let matrix = |r: usize| if weights.paired { r / 2 } else { 0 };
        Streams {
            weights,
            first: core::array::from_fn(|r| weights.row(if weights.streams() > 0 { r } else { 0 })),
            apart: core::array::from_fn(|r| weights.stride[matrix(r)]),
            // In a long row further on, and so at its end in the row that follows it in memory, which mostly comes
            // next; in a short one at the same place of one that comes. To choose at every line costs more than what is
            // asked for in vain.
            ahead: if lines > ahead { ahead } else { 0 },
            // Of short rows as many tiles on as have the lines, at least one.
            //
            // PERF: k = 1024 on one core that reads 35: 8 bits 30 -> 35 GB/s, 4 bits 26 -> 35 (AVX-512, Turin,
            // 2026-11-25).
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

/// Keys one after the other: `n`, `stride` apart. Meanwhile those are asked for that are `on` further on, as long as
/// they are below `known`.
#[derive(Clone, Copy)]
pub(super) struct Keys<E> {
    pub(super) first: *const E,
    pub(super) stride: usize,
    pub(super) n: usize,
    pub(super) on: usize,
    pub(super) known: usize,
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
pub(super) struct One<E> {
    pub(super) rows: [(*const E, usize); TILE_ROWS],
    pub(super) asked: [*const E; TILE_ROWS],
    pub(super) is_tile: bool,
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
