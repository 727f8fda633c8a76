//! Tiles of weights, as products of one row go through them: by whole rows.

use super::super::tiles::Tiles;

/// Tiles that a warp has taken, one of each matrix.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taken {
    /// Where they begin: of one matrix at the second place.
    at: [u32; 2],
    /// Rows of weights in each, and how many of those have been read.
    pub(super) rows: u32,
    pub(super) done: u32,
    /// One or two.
    matrices: u32,
    /// See [`Taken::per_row`].
    per_row: u32,
}

impl Taken {
    /// What bytes are multiplied with to be rows of `row_bytes`, in the upper word: exactly, for numbers as small as a
    /// tile's.
    pub(super) fn per_row(row_bytes: u32) -> u32 {
        u32::MAX / row_bytes + 1
    }

    /// None yet, of rows of which there are so many [per](Taken::per_row) byte, in each of so many matrices.
    pub(super) fn none(per_row: u32, matrices: u32) -> Taken {
        Taken { at: [0; 2], rows: 0, done: 0, matrices, per_row }
    }

    /// Takes the next ones.
    ///
    /// # Safety
    /// As [`Tiles::take`]; there are so many.
    pub(super) unsafe fn take(&mut self, tiles: &Tiles<'_>) {
        // The last one's is the second place, whether there is another or not.
        let mut i = 0;
        while i < self.matrices {
            // SAFETY: the caller's promise.
            let tile = unsafe { tiles.take() };
            self.at = [self.at[1], tile.at];
            self.rows = ((u64::from(tile.bytes) * u64::from(self.per_row)) >> 32) as u32;
            i += 1;
        }
        self.done = 0;
    }

    /// Where the tile of matrix `matrix` begins.
    pub(super) fn at(&self, matrix: u32) -> u32 {
        if matrix + 1 < self.matrices { self.at[0] } else { self.at[1] }
    }

    /// The number, in the launch, of the first tile that has not been released, if all that could be have been.
    pub(super) fn oldest(&self, tiles: &Tiles<'_>) -> u32 {
        tiles.next().wrapping_sub(if self.done < self.rows { self.matrices } else { 0 })
    }

    /// Releases those from number `first` on of which all has been read.
    ///
    /// # Safety
    /// As [`Tiles::release_some`].
    pub(super) unsafe fn release(&self, tiles: &Tiles<'_>, first: u32) {
        // SAFETY: the caller's promise.
        unsafe { tiles.release_some(first, self.oldest(tiles).wrapping_sub(first)) };
    }
}
