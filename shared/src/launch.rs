//! The launch block: how the host tells the persistent kernel where everything lies.
//!
//! The kernel's only parameter is one of these, by value: constant memory, which costs its readers neither registers
//! nor a trip to any cache but their own. Addresses are device addresses. The host launches one block of
//! [`BLOCK_THREADS`] threads per worker, all of them resident at once (a cooperative launch), with [`SHARED_BYTES`] of
//! dynamic shared memory (which is more than a kernel gets unasked: set its attribute).

use crate::technique::Techniques;
use bytemuck::{Pod, Zeroable};

/// Name of the kernel's entry in the PTX.
pub const ENTRY: &str = "perpetua_worker";

/// Name of the entry that runs one operator, for launches of it alone: its parameters are a [`LaunchParams`], the
/// program and the operator's first task, its grid a block for each task, with as many threads and as much shared
/// memory as a worker's.
pub const OPERATOR: &str = "perpetua_operator";

/// Threads of a worker's block: 8 warps, so that a thread may have 255 registers. Registers are handed out by four
/// warps, so with one more it were 168, and the widest bodies would spill; giving the loader's to the others
/// (`setmaxnreg`) does not help, ptxas spills then too.
pub const BLOCK_THREADS: u32 = 256;

/// Those of them that run tasks and meet at the block's barrier. The last warp is the loader's.
pub const TASK_THREADS: u32 = BLOCK_THREADS - 32;

/// Where the shared memory that a block asks for begins: what is before it the driver keeps for itself. The host
/// refuses a device whose driver keeps another number of bytes
/// (`CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK`), and a kernel traps.
pub const RESERVED_SHARED_BYTES: u32 = 1024;

/// Dynamic shared memory of a block: the words and mbarriers that bodies share, and the [tiles](TILE_BYTES), which are
/// its end. It is what a block may have on sm_90, and kernels have no other, so that each of its bytes has an address
/// that is known when they are compiled.
pub const SHARED_BYTES: u32 = 227 << 10;

/// Those of them that are tiles.
pub const TILE_BYTES: u32 = 208 << 10;

/// Those of them that are before the tiles.
pub const BEFORE_TILES_BYTES: u32 = SHARED_BYTES - TILE_BYTES;

/// Barriers of tiles: as many are under way or unread at most. They take turns.
pub const TILE_BARRIERS: u32 = 32;

/// See [`LaunchParams::paces`]: a [`PrefetchOp`](crate::PrefetchOp) waits for fewer tasks.
pub const PACE_PASS: u32 = 1 << 20;

/// See the module head. Sections are those of [`image`](crate::image), in its order; empty ones may have address 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct LaunchParams {
    /// `[ProgramDesc; n_programs]`.
    pub programs: u64,
    /// `[TaskDesc; n_tasks]`.
    pub tasks: u64,
    /// `[[u32; turn_words]; n_tasks]`: each a [`Turn`](crate::Turn) and its operands.
    pub turns: u64,
    /// `[EventDesc; n_events]`.
    pub events: u64,
    /// `[u32; n_waits]`.
    pub waits: u64,
    /// `[u32; n_triggers]`.
    pub triggers: u64,
    /// `[u32; n_programs * (n_workers + 2)]`.
    pub list_heads: u64,
    /// `[u32]`: as many as the last head says.
    pub lists: u64,
    /// `[u64; bindings]`: where each binding lies, each aligned to 16 bytes at least.
    pub bindings: u64,
    /// `[u64; bindings]`: bytes of the part of each that one sequence of a batch has; 0: it is all sequences'.
    pub parts: u64,
    /// `[u32; n_events]`: the event counters, then, if `n_slots` is not 0, `[u32; 2 + n_slots]`: the queue of
    /// just-in-time tasks. All zeroed when `iteration` is 0.
    pub counters: u64,
    /// The [`Control`](crate::control::Control) block: the image's binding of that kind.
    pub control: u64,
    /// A [`Fault`](crate::Fault), zeroed. A code other than 0 also tells every worker to leave.
    pub fault: u64,
    /// `[u32; n_programs * (n_workers + 1)]`: where each worker's data ops of each program start, and the end.
    pub data_heads: u64,
    /// [`DataOp`](crate::DataOp)s, their sources bindings: as many as the last head says.
    pub data: u64,
    /// `[u32; n_programs * (n_workers + 1)]`: likewise of prefetches.
    pub prefetch_heads: u64,
    /// [`PrefetchOp`](crate::PrefetchOp)s: as many as the last head says.
    pub prefetches: u64,
    /// `[Mail; n_mail]` in memory of the host that the GPU has mapped, zeroed, which the host may read while the kernel
    /// runs. An entry is a place in the token buffer, and is written when the pass has ended that has made the token
    /// there; or, of a pass that makes none, that has read a prompt up to the token there.
    pub mailbox: u64,
    /// `[u32; n_workers]`, zeroed: one more than the task each worker began last.
    pub positions: u64,
    /// `[u32; n_workers]`: how far each worker is, for its own loader, which brings no tiles in passes of several rows:
    /// [`PACE_PASS`] for each pass of the launch that it has begun, and one for each task of the pass that it has come
    /// to.
    pub paces: u64,
    /// `[TaskTrace; n_workers * n_trace]`, zeroed: a row per worker, filled in the order of its list until it is full.
    pub trace: u64,
    /// The longest a worker waits for one event.
    pub timeout_ns: u64,
    /// Entries of each section.
    pub n_programs: u32,
    /// See [`LaunchParams::n_programs`].
    pub n_tasks: u32,
    /// See [`LaunchParams::turns`]; a multiple of 4.
    pub turn_words: u32,
    /// See [`LaunchParams::n_programs`].
    pub n_events: u32,
    /// See [`LaunchParams::n_programs`].
    pub n_waits: u32,
    /// See [`LaunchParams::n_programs`].
    pub n_triggers: u32,
    /// Workers the lists are made for: the number of blocks.
    pub n_workers: u32,
    /// Iterations that have run since the counters were zeroed.
    pub iteration: u32,
    /// See [`LaunchParams::mailbox`]; places beyond it are not reported.
    pub n_mail: u32,
    /// See [`LaunchParams::trace`]; 0: no times are taken.
    pub n_trace: u32,
    /// Slots of the queue, a power of two, at least as many as a program has just-in-time tasks; 0: none has any.
    pub n_slots: u32,
    /// What others do in its place; without [tiles](crate::Technique::Tiles), none has any, whatever tasks say.
    pub without: Techniques,
}

const _: () = assert!(size_of::<LaunchParams>() == 22 * 8 + 12 * 4);

/// How a pass ended, in the mailbox, or how one did for a sequence of a batch. Of a pass that makes several tokens of a
/// sequence there are as many, all with the same number of tokens in the cache. The word is written at once, so a host
/// that sees it not zero sees all of it, and no fence is needed; the time may come later, though not after the kernel's
/// end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Mail {
    /// [`Mail::word_of`] of the pass; 0: it has not ended.
    pub word: u64,
    /// The GPU's clock at its end.
    pub stamp_ns: u64,
}

impl Mail {
    /// Bits 0..32 the token, if one was made; 32..62 how many tokens are in the cache; 62 whether a token was made; 63
    /// set.
    #[inline]
    pub const fn word_of(in_cache: u32, token: Option<u32>) -> u64 {
        let position = ((in_cache & (u32::MAX >> 2)) as u64) << 32 | 1 << 63;
        match token {
            Some(token) => position | 1 << 62 | token as u64,
            None => position,
        }
    }

    /// How many tokens are in the cache, and the token made; `None` before the pass's end.
    pub const fn read(word: u64) -> Option<(u32, Option<u32>)> {
        if word == 0 {
            return None;
        }
        let token = if word >> 62 & 1 == 1 { Some(word as u32) } else { None };
        Some(((word >> 32) as u32 & (u32::MAX >> 2), token))
    }
}

/// When a worker ran a task, by the GPU's clock, which all its workers share.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct TaskTrace {
    /// Its worker had turned to it.
    pub began_ns: u64,
    /// Its body had returned, all its tiles used. 0: it has not, and nothing else counts.
    pub ended_ns: u64,
    /// The task.
    pub task: u32,
    /// The iteration, as in [`Step`](crate::Step).
    pub iteration: u32,
    /// Of the time between the two, how long the first warp waited for tiles.
    pub data_ns: u32,
    /// Likewise how long its first thread waited for other tasks.
    pub event_ns: u32,
}

#[cfg(test)]
mod tests {
    use super::Mail;

    #[test]
    fn a_word_of_mail_is_never_zero_and_says_what_was_written() {
        for (position, token) in [(0, None), (0, Some(0)), (7, Some(u32::MAX)), ((1 << 30) - 1, None)] {
            assert_eq!(Mail::read(Mail::word_of(position, token)), Some((position, token)));
        }
        assert_eq!(Mail::read(0), None);
    }
}
