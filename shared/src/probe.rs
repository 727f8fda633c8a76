//! Probes: small kernels that measure what a GPU can do, so that shares of it can be told.

use crate::launch::TASK_THREADS;
use bytemuck::{Pod, Zeroable};

/// Every block streams its own bytes into shared memory by bulk copies, `rounds` times, and looks at none of them: the ceiling of what a
/// loader can reach, of memory or, where all of them are few, of L2. A block's time is `out[block]`.
pub const READ: &str = "perpetua_probe_read";
/// As [`READ`], by copies of sixteen bytes a thread, as bodies for many rows copy: [`UNDER_WAY`] tiles at once, by some of [`TASK_THREADS`] threads.
pub const COPY: &str = "perpetua_probe_sixteen";
/// Blocks 0 and 1 count to each other through two counters: `rounds` times there and back take `out[0]`.
pub const HOP: &str = "perpetua_probe_hop";
/// All blocks meet `rounds` times at one counter: `out[block]`.
pub const MEET: &str = "perpetua_probe_meet";

/// Blocks 0 and 1, of [`TASK_THREADS`] threads, hand each other a row of [`ROW_WORDS`] words a thread, `rounds`
/// times there and back in `out[0]`: behind a counter, as events have it, or, with `by_flags`, each word with its
/// [flag](crate::flag); then blocks from 2 on ask for block 0's row, too, all the time, as all workers do that wait for one.
pub const HAND: &str = "perpetua_probe_hand";

/// Threads of the blocks of the probe called `name`.
pub fn threads(name: &str) -> u32 {
    match name {
        HAND | COPY => TASK_THREADS,
        _ => 32,
    }
}

/// Tiles whose copies are under way at once in [`COPY`]: there is room for one more at least.
pub const UNDER_WAY: u32 = 4;

/// See [`HAND`].
pub const ROW_WORDS: u32 = 4;

/// Where in the counters the flagged words of [`HAND`]'s two rows begin, and how far the second is from the first; of the rows behind
/// counters the first begins where `source` does.
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
    /// Bytes a block reads: a multiple of `tile_bytes`.
    pub bytes: u64,
    /// The longest a block waits for another.
    pub timeout_ns: u64,
    /// Bytes of a copy: a multiple of 16, and in [`COPY`] of 16 for each thread that copies.
    pub tile_bytes: u32,
    /// Copies under way at once: at most [`TILE_BARRIERS`](crate::launch::TILE_BARRIERS), and no more than fit. Of [`COPY`] the tiles there are.
    pub n_tiles: u32,
    /// Blocks.
    pub blocks: u32,
    /// How often blocks meet, or read their bytes.
    pub rounds: u32,
    /// See [`HAND`].
    pub by_flags: u32,
    /// Warps that copy in [`COPY`].
    pub warps: u32,
}

const _: () = assert!(ROW_WORDS == 4 && ROW_WORDS as u64 * 4 * TASK_THREADS as u64 <= ROW_BYTES);
