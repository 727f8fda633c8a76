//! A task as a GPU's worker fetches it: one record with all that its body, its waits and its triggers want of the
//! image.
//!
//! From the image's sections that would be four trips to memory, one after the other: the worker's list, the task, its
//! operands, and their bindings. The host makes the records when it knows where bindings lie.

use crate::limits::PARAM_WORDS;
use bytemuck::{Pod, Zeroable};

/// Triggers and waits in a record; those of few tasks are more.
pub const TURN_EVENTS: usize = 8;

/// The head of a record. The task's [`Operand`](crate::Operand)s follow, each with its address in place of its offset.
/// 192 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Turn {
    /// See [`TaskDesc`](crate::TaskDesc), as for all fields of its names.
    pub task_type: u16,
    /// See above.
    pub flags: u16,
    /// One more than the task after it in its worker's list; 0: none is.
    pub next: u32,
    /// See above.
    pub block: [u32; 3],
    /// See above.
    pub row_first: u32,
    /// See above.
    pub wait_first: u32,
    /// See above.
    pub wait_count: u16,
    /// See above.
    pub trigger_count: u16,
    /// See above.
    pub trigger_first: u32,
    /// See above.
    pub tiles: u32,
    /// See above.
    pub params: [u32; PARAM_WORDS],
    /// The first events that it triggers.
    pub triggers: [u32; TURN_EVENTS],
    /// The first events that it waits on, each with its [`num_triggers`](crate::EventDesc::num_triggers).
    pub waits: [[u32; 2]; TURN_EVENTS],
    /// The task's number.
    pub task: u32,
    /// The first of the image's data ops that are the task's tiles, if it has any.
    pub data_first: u32,
    /// What its body would else find out of its operands each time: its kernel's own words, zeros where it has none.
    pub known: [u32; 4],
}

const _: () = assert!(size_of::<Turn>() == 192 && size_of::<Turn>().is_multiple_of(16));
