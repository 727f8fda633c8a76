//! Data moves into a worker's shared memory.

use bytemuck::{Pod, Zeroable};

/// One copy of contiguous bytes into a worker's shared memory, in the order its loader issues them. 32 bytes.
///
/// A worker's compute ops retire in order, so one count of retired compute ops per worker is all the loader waits for: it
/// may start this copy when [`DataOp::after`] of them have retired, and the bytes are free again when
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
    /// Compute ops of this worker that must have retired before the copy may start.
    pub after: u32,
    /// The compute op of this worker that reads the bytes; its completion frees them.
    pub used_by: u32,
    /// The barrier that is full when the bytes have arrived.
    pub barrier: u16,
    /// See [`DataFlags`].
    pub flags: u16,
}

/// Bits of [`DataOp::flags`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataFlags;

impl DataFlags {
    /// The source is a cache that this very pass appends to. The copy ends at the first position of the pass, whatever
    /// its `bytes`; rows from there on are read by the compute op, from memory, after its task's events.
    pub const UP_TO_POSITION: u16 = 1;
}

const _: () = assert!(size_of::<DataOp>() == 32);
