//! Probes: small kernels that measure what a GPU can do, so that shares of it can be told.

use bytemuck::{Pod, Zeroable};

/// Every block streams its own bytes into shared memory by bulk copies and looks at none of them: the ceiling of what a
/// loader can reach. A block's time is `out[block]`.
pub const READ: &str = "perpetua_probe_read";
/// Blocks 0 and 1 count to each other through two counters: `rounds` times there and back take `out[0]`.
pub const HOP: &str = "perpetua_probe_hop";
/// All blocks meet `rounds` times at one counter: `out[block]`.
pub const MEET: &str = "perpetua_probe_meet";

/// Threads of a probe's block.
pub const THREADS: u32 = 32;

/// The block's time when it gave up waiting.
pub const GAVE_UP: u64 = u64::MAX;

/// What a probe is told: its only parameter, by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct ProbeParams {
    /// Bytes to read, `blocks` times `bytes`.
    pub source: u64,
    /// Counters, zeroed: two words, 128 bytes apart.
    pub counters: u64,
    /// `[u64; blocks]`: nanoseconds.
    pub out: u64,
    /// Bytes a block reads: a multiple of `tile_bytes`.
    pub bytes: u64,
    /// The longest a block waits for another.
    pub timeout_ns: u64,
    /// Bytes of a copy: a multiple of 16.
    pub tile_bytes: u32,
    /// Copies under way at once: at most [`TILE_BARRIERS`](crate::launch::TILE_BARRIERS), and no more than fit.
    pub n_tiles: u32,
    /// Blocks.
    pub blocks: u32,
    /// How often blocks meet.
    pub rounds: u32,
}
