//! The image: the only thing executors see. One block of bytes, sections in a fixed order, offsets and no pointers.
//!
//! ```text
//! ImageHeader | BindingDesc* | Operand* | ProgramDesc* | TaskDesc* | EventDesc* | waits u32* | triggers u32*
//!             | list heads u32* (programs x (workers + 2)) | lists u32* (task ids)
//!             | data heads u32* (programs x (workers + 1)) | DataOp* | prefetch heads u32* (likewise) | PrefetchOp*
//!             | name heads u32* | names (utf-8)
//! ```
//! A program's lists are those of its workers, then that of its just-in-time tasks. Each section starts at a multiple
//! of 8 bytes. The first two events are the loop's own ([`crate::event`]). The host's `image::encode` and
//! `image::decode` are its only makers; both check every index in it.

use bytemuck::{Pod, Zeroable};

/// First bytes of every image.
pub const MAGIC: [u8; 8] = *b"PERPIMG\0";
/// Format version; an image of another version is refused.
pub const VERSION: u32 = 7;

/// What a binding is for: how an executor provides it.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BindingKind {
    /// Intermediates of the programs; contents do not outlive an iteration unless read back as an output.
    Arena = 1,
    /// The KV cache: zeroed at the start, kept from pass to pass.
    State = 2,
    /// The [`Control`](crate::control::Control) block.
    Control = 3,
    /// Token ids, i32.
    Tokens = 4,
    /// One tensor of the checkpoint, used in place.
    Weight = 5,
    /// A table the compiler made (rotary frequencies); its bytes come with the compiled program.
    Constant = 6,
    /// Written by the host before a run.
    Input = 7,
    /// Elements that say which pass wrote them ([`flag`](crate::flag)): zeroed when the event counters are, kept from
    /// pass to pass.
    Flagged = 8,
}

impl BindingKind {
    /// The kind numbered `number`.
    pub fn from_u32(number: u32) -> Option<BindingKind> {
        use BindingKind::*;
        [Arena, State, Control, Tokens, Weight, Constant, Input, Flagged]
            .into_iter()
            .find(|kind| *kind as u32 == number)
    }
}

/// Counts of every section; offsets follow from them.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct ImageHeader {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`VERSION`].
    pub version: u32,
    /// Workers the lists are made for.
    pub n_workers: u32,
    /// Entries of each section, in order.
    pub n_bindings: u32,
    /// See [`ImageHeader::n_bindings`].
    pub n_programs: u32,
    /// See [`ImageHeader::n_bindings`].
    pub n_tasks: u32,
    /// See [`ImageHeader::n_bindings`].
    pub n_operands: u32,
    /// See [`ImageHeader::n_bindings`].
    pub n_events: u32,
    /// See [`ImageHeader::n_bindings`].
    pub n_waits: u32,
    /// See [`ImageHeader::n_bindings`].
    pub n_triggers: u32,
    /// See [`ImageHeader::n_bindings`].
    pub n_list_entries: u32,
    /// See [`ImageHeader::n_bindings`].
    pub n_data: u32,
    /// See [`ImageHeader::n_bindings`].
    pub n_prefetches: u32,
    /// Bytes of operator names.
    pub n_name_bytes: u32,
    /// Operators; the name heads are one more.
    pub n_ops: u32,
    /// FNV-1a of everything after the header.
    pub checksum: u64,
}

/// One binding.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct BindingDesc {
    /// Its size.
    pub bytes: u64,
    /// A [`BindingKind`].
    pub kind: u32,
    /// Alignment its start must have, a power of two.
    pub align_bytes: u32,
}

/// One program: the tasks of one pass.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct ProgramDesc {
    /// Tokens a pass can take at most; `u32::MAX` when it has no token dimension.
    pub max_rows: u32,
    /// `tasks[task_first..][..task_count]`.
    pub task_first: u32,
    /// See [`ProgramDesc::task_first`].
    pub task_count: u32,
    /// `events[event_first..][..event_count]` are its own.
    pub event_first: u32,
    /// See [`ProgramDesc::event_first`].
    pub event_count: u32,
    /// When it is run: [`APART`], [`TOKEN_LOOP`], [`EVERY_SEQUENCE`] or [`VERIFIES`].
    pub kind: u32,
}

/// [`ProgramDesc::kind`] of a program that runs when it is asked for.
pub const APART: u32 = 0;

/// [`ProgramDesc::kind`] of a program over the next rows of one sequence, which the token loop chooses by itself.
pub const TOKEN_LOOP: u32 = 1;

/// [`ProgramDesc::kind`] of a program whose rows each are the next token of a sequence of its own. An image has at most
/// one. Its `max_rows` is the number of sequences that every `State` and `Tokens` binding is as many equal parts for.
pub const EVERY_SEQUENCE: u32 = 2;

/// [`ProgramDesc::kind`] of a program whose rows are a sequence's next token and drafts, guesses of those after it, all
/// in the token buffer: it chooses the token that follows each row. An image has at most one.
pub const VERIFIES: u32 = 3;

const _: () =
    assert!(size_of::<ImageHeader>() == 72 && size_of::<BindingDesc>() == 16 && size_of::<ProgramDesc>() == 24);
