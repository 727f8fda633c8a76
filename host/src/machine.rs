//! The numbers a program is cut, planned and predicted with, per kind of machine: this is the one place they stand.
//! Every stage may use them, so they use none.
//!
//! Each says where it comes from.

use perpetua_shared::launch::{BEFORE_TILES_BYTES, SHARED_BYTES};

/// What a part of a product of several rows takes an SM, in cycles, fitted to what `examples/instructions` counts. See
/// `graph::lower::many_rows`.
pub(crate) mod part {
    /// Until the first products, and a task's own.
    pub(crate) const START: u64 = 1200;
    /// Sums that it finishes in a cycle.
    pub(crate) const SUMS: u64 = 6;
    /// Of 64 columns: what all wait for, and what as many rows as are brought at a time take the warps that copy. In
    /// parts of 64 by 64 or smaller, of which two times 64 columns make a step, and in others.
    pub(crate) const NARROW: [u64; 2] = [50, 19];
    /// See [`NARROW`].
    pub(crate) const WIDE: [u64; 2] = [100, 30];
    /// Rows that the warps that copy bring at a time.
    pub(crate) const ROWS_AT_ONCE: u64 = 12;
    /// What a row of weights in 8 bits takes them more, of 64 columns, until it is bf16: so many cycles of so many
    /// rows.
    pub(crate) const EIGHTS: [u64; 2] = [10, 3];
    /// Likewise in 4 bits.
    pub(crate) const FOURS: [u64; 2] = [15, 3];
    /// Columns of the weights that it copies before its task's events have fired: of parts of up to 64 columns, of
    /// others of up to 64 rows, of all others.
    pub(crate) const EARLY: [u64; 3] = [768, 256, 128];
    /// Multiplications and additions that the tensor cores do in a cycle.
    pub(crate) const PRODUCTS: u64 = 2048;
}

/// Rows of weights of which a tile has as many at least beside bodies that take memory for several rows of activations:
/// these are read from shared memory for each two tiles' rows anew.
///
/// PERF: with a row a tile `down` of Llama-3.2-1B took 29,400 cycles of 4 rows, with two 16,800; of Qwen3-8B, one a
/// tile, 84,000, as with many rows 37,600 (docs/cycles.md).
pub(crate) const LEAST_ROWS: u64 = 2;

/// Where bodies end, tiles begin at a multiple of this.
const TILES_BEGIN_AT: u64 = 1 << 10;

/// Sizes, rates and latencies of one worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// On-chip memory of a worker.
    pub shared_bytes: u64,
    /// What of it tiles do not get: barriers, reductions between warps, activations in flight.
    pub reserve_bytes: u64,
    /// What of it tiles leave, at its beginning, to bodies that take some beside them.
    pub bodies_bytes: u64,
    /// Largest tile, one copy, where rows are no longer.
    pub tile_bytes: u64,
    /// What the tiles of a step may be together, one of each matrix that a kernel takes a tile of.
    pub step_bytes: u64,
    /// What the rows of a step may be, one of each matrix, to be a tile each although they are longer. Longer ones come
    /// in pieces.
    pub row_bytes: u64,
    /// Rows that a body multiplies at once: a tile of more of them has a multiple.
    pub rows_at_once: u64,
    /// Barriers for copies in flight or not yet used.
    pub n_barriers: u32,
    /// What of the cache that all workers share one may have asked for without having begun the task that reads it,
    /// where nothing comes in tiles.
    pub near_ahead_bytes: u64,
    /// Bytes per second of memory bandwidth that one worker has while all stream.
    pub bytes_per_s: f64,
    /// From a copy's end on the memory bus to its bytes' use.
    pub load_latency_s: f64,
    /// Bytes per second at which a worker works through tiles that have arrived.
    pub tile_bytes_per_s: f64,
    /// Likewise of weights in 4 bits, whose levels have to be found first.
    pub fours_per_s: f64,
    /// Bytes per second at which a worker reads and writes activations (L2 on a GPU).
    pub near_bytes_per_s: f64,
    /// Floating-point operations per second of one worker.
    pub flops_per_s: f64,
    /// From the last trigger of an event to a waiting task's start on another worker.
    pub hop_s: f64,
    /// From a [flagged](perpetua_shared::flag) row's last element to a waiting task's having read it, on another
    /// worker.
    pub flag_hop_s: f64,
    /// From the last trigger of a just-in-time task's events to its start on a worker that waits: a scheduler sees the
    /// event, and the worker the queue.
    pub dispatch_s: f64,
    /// What a task does before it has to have its events, while it waits for them if it waits.
    pub early_s: f64,
    /// Cost of a task after that, besides all that.
    pub task_s: f64,
}

impl Machine {
    /// One SM of an H200. 227 KiB of shared memory a block, 19 KiB of it kept back, so that 208 KiB remain, in tiles of
    /// up to 32 KiB and of eights of rows, as a tensor core's product takes them: with fewer a worker spends more on
    /// taking tiles than it can, with more the last one is waited for longer; a longer row whole, if a body may hold
    /// one while the next is on its way and as much again; 96 KiB an SM, 12.7 MB in all, of 50 MB of L2, in which the
    /// tasks at work have as much again, and activations.
    ///
    /// Measured (tests/records/h200-2026-11-27): 4.73 TB/s from memory over 132 SMs; 0.7 us from a trigger to another
    /// worker's seeing it, 1.23 until that has read a row; 0.54 by flags; a dispatch is a trigger to a scheduler and a
    /// row from there. Counted (docs/cycles.md, machine code, at 1.98 GHz): tiles at 42 bytes a cycle; weights in 4
    /// bits at 17.6, by the PTX; what attention and merges read out of L2 at 22; 1,050 cycles of a task before its
    /// events and 1,450 after. Assumed: 0.8 us from request to arrival; 6 TFLOP/s dense bf16.
    pub const H200: Machine = Machine {
        shared_bytes: SHARED_BYTES as u64,
        reserve_bytes: BEFORE_TILES_BYTES as u64,
        bodies_bytes: 0,
        tile_bytes: 32 << 10,
        step_bytes: 64 << 10,
        row_bytes: 52 << 10,
        rows_at_once: 8,
        n_barriers: 32,
        near_ahead_bytes: 96 << 10,
        bytes_per_s: 4.73e12 / 132.0,
        load_latency_s: 0.8e-6,
        tile_bytes_per_s: 83e9,
        fours_per_s: 31e9,
        near_bytes_per_s: 43e9,
        flops_per_s: 6.0e12,
        hop_s: 1.23e-6,
        flag_hop_s: 0.54e-6,
        dispatch_s: 1.93e-6,
        early_s: 0.53e-6,
        task_s: 0.73e-6,
    };

    /// One core of a cloud CPU with AVX-512: half its 2 MiB of L2 cache as the distance software prefetch may run
    /// ahead, and no other cache to ask; 16.5 GB/s from memory, three times that from the cache; 100 GFLOP/s; 0.2 us a
    /// hop, and as much a dispatch, since who waits is the scheduler.
    pub const CPU: Machine = Machine {
        shared_bytes: 2 << 20,
        reserve_bytes: 1 << 20,
        bodies_bytes: 0,
        tile_bytes: 16 << 10,
        step_bytes: 32 << 10,
        row_bytes: 16 << 10,
        rows_at_once: 1,
        n_barriers: 1 << 10,
        near_ahead_bytes: 0,
        bytes_per_s: 16.5e9,
        load_latency_s: 0.1e-6,
        tile_bytes_per_s: 50e9,
        fours_per_s: 50e9,
        near_bytes_per_s: 50e9,
        flops_per_s: 100e9,
        hop_s: 0.2e-6,
        flag_hop_s: 0.2e-6,
        dispatch_s: 0.2e-6,
        early_s: 0.0,
        task_s: 0.2e-6,
    };

    /// Bytes that tiles may occupy.
    pub fn capacity_bytes(&self) -> u64 {
        self.shared_bytes - self.reserve_bytes - self.bodies_bytes
    }

    /// The same machine, whose tiles leave so much to bodies: of what they have left a step's are a third at most, so
    /// that some may be held while the next are on their way. None, if that would be no room for [`LEAST_ROWS`] rows of
    /// `row_bytes`, all matrices'.
    pub fn beside(self, bodies_bytes: u64, row_bytes: u64) -> Option<Machine> {
        let bodies_bytes = bodies_bytes.next_multiple_of(TILES_BEGIN_AT);
        if self.reserve_bytes + bodies_bytes + 3 * LEAST_ROWS * row_bytes > self.shared_bytes {
            return None;
        }
        let left = Machine { bodies_bytes, ..self };
        let third = left.capacity_bytes() / 3;
        Some(Machine { step_bytes: self.step_bytes.min(third), row_bytes: self.row_bytes.min(third), ..left })
    }
}
