//! Data moves of a worker's loader: into its shared memory, and into the cache all workers share.

#[cfg(doc)]
use crate::TaskFlags;
use crate::divisor::Divisor;
use bytemuck::{Pod, Zeroable};

/// One copy of contiguous bytes into a worker's shared memory, in the order its loader issues them. 32 bytes.
///
/// A worker's compute ops retire in order, so one count of retired compute ops per worker is all the loader waits for:
/// it may start this copy when [`DataOp::after`] of them have retired, and the bytes are free again when
/// [`DataOp::used_by`]` + 1` have. It never waits on an event.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct DataOp {
    /// Byte offset of the first byte from the source's start.
    pub source_offset_bytes: u64,
    /// The memory it comes from: a buffer of the graph in a plan, a binding in an image.
    pub source: u32,
    /// Bytes to copy.
    pub bytes: u32,
    /// Where they go, counted from the start of the shared memory that tiles have.
    pub dest_offset_bytes: u32,
    /// Compute ops of this worker that must have retired before the copy may start; not, among them, the one before its
    /// reader, if that is of the same task: a body may hold the tiles of one until it has those of the next.
    pub after: u32,
    /// The compute op of this worker that reads the bytes; its completion frees them.
    pub used_by: u32,
    /// The barrier that is full when the bytes have arrived, in the first pass of a launch; later ones go on where it
    /// ends.
    pub barrier: u16,
    /// Of a list's first copies: one more than how many of the list's last tiles may be unread when the copy is made
    /// ahead of the next pass, in case that is one of the same program; 0: it waits for its pass.
    pub ahead: u16,
}

/// Bytes that a worker's loader asks the L2 cache for, in passing, because a body is going to read them from there:
/// weights that do not come in tiles, and the rows of a KV cache, which rows being known at run time. 56 bytes. Nobody
/// waits for them and nothing depends on them but time.
///
/// They are stretches of equal length, in a matrix the beginnings of its rows, in a cache a position each.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct PrefetchOp {
    /// Byte offset of the first stretch from the source's start.
    pub source_offset_bytes: u64,
    /// The memory it comes from: a buffer of the graph in a plan, a binding in an image.
    pub source: u32,
    /// Bytes of a stretch.
    pub bytes: u32,
    /// From a stretch's start to the next one's.
    pub apart_bytes: u32,
    /// How many there are.
    pub stretches: u32,
    /// 0: all of them are asked for. Otherwise stretch `i` is position `i`, and of those before the pass's first
    /// position those in [`share`] `split` of `splits` of all that the pass sees.
    pub splits: u32,
    /// See [`PrefetchOp::splits`].
    pub split: u32,
    /// Of positions: how many a row sees, up to its own.
    pub window: u32,
    /// Of positions: the first so many of them at most.
    pub most: u32,
    /// The data op of the worker's list before which it is issued.
    pub before: u32,
    /// The compute op of this worker that reads them.
    pub used_by: u32,
    /// Tasks of its worker's list that the worker must have come to in the pass before it is issued; 0 in a list with
    /// data ops, which go at the pace at which memory becomes free.
    pub after: u32,
    /// 1: it is issued only in passes that sample, as its reader runs only in these
    /// ([`TaskFlags::ONLY_WHEN_SAMPLING`]); else 0.
    pub only_when_sampling: u32,
}

impl PrefetchOp {
    /// Stretches that are asked for, at most.
    pub fn most_stretches(&self) -> u32 {
        let seen = self.stretches.min(self.window);
        if self.splits == 0 { self.stretches } else { seen.div_ceil(self.splits).min(self.most) }
    }
}

/// The positions, of the last `window` of the first `visible`, that split `number` of `splits` has: first and end.
/// Shares are equal but for the last ones, which may be empty.
#[inline]
pub const fn share(visible: u32, window: u32, splits: u32, number: u32) -> (u32, u32) {
    let before = visible.saturating_sub(window);
    if splits <= 1 {
        return (before, visible);
    }
    share_of((visible - before).div_ceil(splits), before, visible, number)
}

/// [`share`], where `by` divides by `splits`: of fewer than 2^26 positions and up to 64 splits.
#[inline]
pub const fn share_by(visible: u32, window: u32, splits: u32, by: Divisor, number: u32) -> (u32, u32) {
    let before = visible.saturating_sub(window);
    if splits <= 1 {
        return (before, visible);
    }
    share_of(by.divide(visible - before + (splits - 1)), before, visible, number)
}

/// Of positions `before..visible` the `number`th `len`.
#[inline]
const fn share_of(len: u32, before: u32, visible: u32, number: u32) -> (u32, u32) {
    let (first, end) = (before + number * len, before + (number + 1) * len);
    (if first < visible { first } else { visible }, if end < visible { end } else { visible })
}

const _: () = assert!(size_of::<DataOp>() == 32 && size_of::<PrefetchOp>() == 56);

#[cfg(test)]
mod tests {
    use super::*;

    /// Each position that a row sees is in one share, and the others in none.
    #[test]
    fn shares_are_what_the_window_holds() {
        for visible in 0..40 {
            for window in [1, 2, 7, 39, 40, u32::MAX] {
                for splits in 1..9 {
                    let shares = (0..splits).map(|number| {
                        let by = share_by(visible, window, splits, Divisor::of(splits), number);
                        assert_eq!(by, share(visible, window, splits, number), "{visible} {window} {splits}");
                        by
                    });
                    let mut end = visible.saturating_sub(window);
                    for (from, to) in shares.filter(|(from, to)| from < to) {
                        assert_eq!(from, end, "{visible} {window} {splits}");
                        end = to;
                    }
                    assert_eq!(end, visible, "{visible} {window} {splits}");
                }
            }
        }
    }
}
