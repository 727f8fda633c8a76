//! The launch block: how the host tells the persistent kernel where everything lies.
//!
//! The kernel's only parameter is a pointer to one of these in device memory. Addresses are device addresses. The host
//! launches one block of [`BLOCK_THREADS`] threads per worker, all of them resident at once (a cooperative launch), with
//! [`TILE_BYTES`] of dynamic shared memory (which is more than a kernel gets unasked: set its attribute).

use bytemuck::{Pod, Zeroable};

/// Name of the kernel's entry in the PTX.
pub const ENTRY: &str = "perpetua_worker";

/// Threads of a worker's block: 8 warps, so that a thread may have 255 registers. Registers are handed out by four warps, so
/// with one more it were 168, and the widest bodies would spill; giving the loader's to the others (`setmaxnreg`) does not
/// help, ptxas spills then too.
pub const BLOCK_THREADS: u32 = 256;

/// Those of them that run tasks and meet at the block's barrier. The last warp is the loader's.
pub const TASK_THREADS: u32 = BLOCK_THREADS - 32;

/// Dynamic shared memory of a block, all of it tiles. With 17 KiB of static shared memory that is what a block may have on
/// sm_90, 227 KiB, but for 2.
pub const TILE_BYTES: u32 = 208 << 10;

/// Barriers of tiles: as many are under way or unread at most. Data op `d` of a list goes by barrier `d % TILE_BARRIERS`.
pub const TILE_BARRIERS: u32 = 32;

/// See the module head. Sections are those of [`image`](crate::image), in its order; empty ones may have address 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct LaunchParams {
    /// `[ProgramDesc; n_programs]`.
    pub programs: u64,
    /// `[TaskDesc; n_tasks]`.
    pub tasks: u64,
    /// `[Operand; n_operands]`.
    pub operands: u64,
    /// `[EventDesc; n_events]`.
    pub events: u64,
    /// `[u32; n_waits]`.
    pub waits: u64,
    /// `[u32; n_triggers]`.
    pub triggers: u64,
    /// `[u32; n_programs * (n_workers + 1)]`.
    pub list_heads: u64,
    /// `[u32; n_list_entries]`.
    pub lists: u64,
    /// `[u64; bindings]`: where each binding lies, each aligned to 16 bytes at least.
    pub bindings: u64,
    /// `[u32; n_events]`: the event counters, zeroed when `iteration` is 0.
    pub counters: u64,
    /// The [`Control`](crate::control::Control) block: the image's binding of that kind.
    pub control: u64,
    /// A [`Fault`](crate::Fault), zeroed. A code other than 0 also tells every worker to leave.
    pub fault: u64,
    /// `[u32; n_programs * (n_workers + 1)]`: where each worker's data ops of each program start, and the end.
    pub data_heads: u64,
    /// [`DataOp`](crate::DataOp)s, their sources bindings.
    pub data: u64,
    /// `[u32; n_tasks]`: how many data ops each task takes, in the order of its worker's list.
    pub task_tiles: u64,
    /// The longest a worker waits for one event.
    pub timeout_ns: u64,
    /// Entries of each section.
    pub n_programs: u32,
    /// See [`LaunchParams::n_programs`].
    pub n_tasks: u32,
    /// See [`LaunchParams::n_programs`].
    pub n_operands: u32,
    /// See [`LaunchParams::n_programs`].
    pub n_events: u32,
    /// See [`LaunchParams::n_programs`].
    pub n_waits: u32,
    /// See [`LaunchParams::n_programs`].
    pub n_triggers: u32,
    /// See [`LaunchParams::n_programs`].
    pub n_list_entries: u32,
    /// Workers the lists are made for: the number of blocks.
    pub n_workers: u32,
    /// Iterations that have run since the counters were zeroed.
    pub iteration: u32,
    /// See [`LaunchParams::n_programs`].
    pub n_data: u32,
}

const _: () = assert!(size_of::<LaunchParams>() == 16 * 8 + 10 * 4);
