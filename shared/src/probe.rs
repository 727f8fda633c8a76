//! Probes: small kernels that measure what a GPU can do, so that shares of it can be told.

#[cfg(doc)]
use crate::launch::TILE_BARRIERS;
use crate::launch::{BLOCK_THREADS, TASK_THREADS};
use bytemuck::{Pod, Zeroable};

/// Every block streams its own bytes into shared memory by bulk copies, `rounds` times, and looks at none of them: the
/// ceiling of what a loader can reach, of memory or, where all of them are few, of L2. A block's time is `out[block]`.
pub const READ: &str = "perpetua_probe_read";
/// As [`READ`], by copies of sixteen bytes a thread, as bodies for many rows copy: [`UNDER_WAY`] tiles at once, by some
/// of [`TASK_THREADS`] threads.
pub const COPY: &str = "perpetua_probe_sixteen";
/// Blocks 0 and 1 count to each other through two counters: `rounds` times there and back take `out[0]`.
pub const HOP: &str = "perpetua_probe_hop";
/// All blocks meet `rounds` times at one counter: `out[block]`.
pub const MEET: &str = "perpetua_probe_meet";

/// Blocks 0 and 1, of [`TASK_THREADS`] threads, hand each other a row of [`ROW_WORDS`] words a thread, `rounds` times
/// there and back in `out[0]`: behind a counter, as events have it, or, with `by_flags`, each word with its
/// [flag](crate::flag); then blocks from 2 on ask for block 0's row, too, all the time, as all workers do that wait for
/// one.
pub const HAND: &str = "perpetua_probe_hand";

/// Each block is a worker without tasks: its loader hands [`TASK_THREADS`] threads tiles, which all of them take, read
/// if `reads`, and release, as bodies do with weights. The first `n_tiles` are brought; of the others, which
/// `out[block]` is the time of, only what `is_brought` says.
pub const TAKE: &str = "perpetua_probe_take";
/// A tile of [`TAKE`] is a multiple of so many bytes: four times sixteen for each thread.
pub const TAKEN_BYTES: u32 = 4 * 16 * TASK_THREADS;

/// All of them.
pub const ALL: [&str; 6] = [READ, COPY, TAKE, HOP, HAND, MEET];

/// Threads of the blocks of the probe called `name`.
pub fn threads(name: &str) -> u32 {
    match name {
        HAND | COPY => TASK_THREADS,
        TAKE => BLOCK_THREADS,
        _ => 32,
    }
}

/// Tiles whose copies are under way at once in [`COPY`]: there is room for one more at least.
pub const UNDER_WAY: u32 = 4;

/// See [`HAND`].
pub const ROW_WORDS: u32 = 4;

/// Where in the counters the flagged words of [`HAND`]'s two rows begin, and how far the second is from the first; of
/// the rows behind counters the first begins where `source` does.
pub const WORDS_AT: u64 = 4096;
/// See [`WORDS_AT`].
pub const ROW_BYTES: u64 = 8192;

/// The block's time when it gave up waiting.
pub const GAVE_UP: u64 = u64::MAX;

/// What a probe is told: its only parameter, by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct ProbeParams {
    /// Bytes to read, `blocks` times `bytes`.
    pub source: u64,
    /// Counters, zeroed: two words, 128 bytes apart, and for [`HAND`] two rows of words.
    pub counters: u64,
    /// `[u64; blocks]`: nanoseconds.
    pub out: u64,
    /// Bytes a block reads: a multiple of `tile_bytes`. In [`TAKE`] each byte is 1.
    pub bytes: u64,
    /// The longest a block waits for another.
    pub timeout_ns: u64,
    /// Bytes of a copy: a multiple of 16, in [`COPY`] of 16 for each thread that copies, in [`TAKE`] of
    /// [`TAKEN_BYTES`].
    pub tile_bytes: u32,
    /// Copies under way at once: at most [`TILE_BARRIERS`], and no more than fit. Of [`COPY`] the tiles there are.
    pub n_tiles: u32,
    /// Blocks.
    pub blocks: u32,
    /// How often blocks meet, or read their bytes.
    pub rounds: u32,
    /// See [`HAND`].
    pub by_flags: u32,
    /// Warps that copy in [`COPY`].
    pub warps: u32,
    /// Whether the tiles of [`TAKE`] are copied, each time.
    pub is_brought: u32,
    /// Whether they are read.
    pub reads: u32,
}

const _: () = assert!(ROW_WORDS == 4 && ROW_WORDS as u64 * 4 * TASK_THREADS as u64 <= ROW_BYTES);
