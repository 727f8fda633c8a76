//! The task whose turn it is, in shared memory: what its body and its triggers want of the image, fetched while the worker still
//! waits for the task's events.
//!
//! From global memory a task's descriptor, then its operands, then the addresses of their bindings would be three trips to L2 one
//! after the other, and to memory where nobody kept the image there, all of them behind the last event: acquiring it empties L1.

use super::scheduler;
use crate::arch::{WARP, memory, shared};
use crate::block::Block;
use crate::kernels::MAX_SLOTS;
use core::mem::offset_of;
use perpetua_shared::TaskDesc;
use perpetua_shared::limits::{MAX_RANK, PARAM_WORDS};
use perpetua_shared::task::Operand;

const TASK_WORDS: u32 = size_of::<TaskDesc>() as u32 / 4;
const OPERAND_WORDS: u32 = size_of::<Operand>() as u32 / 4;

/// Triggers of a task that are fetched; those of few are more.
const TRIGGERS: u32 = 8;

// Words of shared memory: the descriptor, its operands, their addresses in place of offsets, and what it triggers.
const TASK: u32 = scheduler::WORDS_END;
const OPERANDS: u32 = TASK + TASK_WORDS;
const EVENTS: u32 = OPERANDS + OPERAND_WORDS * MAX_SLOTS as u32;

const _: () = assert!(EVENTS + TRIGGERS <= shared::WORDS && MAX_RANK == 4);

/// Where the image's sections lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sections {
    pub(crate) task: *const TaskDesc,
    pub(crate) operands: *const Operand,
    pub(crate) triggers: *const u32,
    pub(crate) bindings: *const u64,
}

/// Fetches `from.task`; all threads may look at it after their block's next barrier. The first warp, which polls, leaves it to the
/// others, if there are any.
///
/// # Safety
/// Every thread of the block makes this same call, none looks at the task before any more, and the sections are those of a
/// checked image.
#[inline(always)]
pub(crate) unsafe fn fetch(from: &Sections, block: &Block) {
    let others = block.threads > WARP;
    let (me, step) =
        if others { (block.thread.wrapping_sub(WARP), block.threads - WARP) } else { (block.thread, WARP) };
    if me >= step {
        return;
    }
    // SAFETY: words and operands of the task are there, and a word is written by one thread.
    unsafe {
        let task = from.task;
        let first = memory::load(&raw const (*task).operand_first);
        let operands = OPERAND_WORDS * memory::load(&raw const (*task).operand_count);
        let (trigger_first, triggers) =
            (memory::load(&raw const (*task).trigger_first), memory::load(&raw const (*task).trigger_count));
        let triggers = if u32::from(triggers) < TRIGGERS { u32::from(triggers) } else { TRIGGERS };
        let mut at = me;
        while at < TASK_WORDS + operands + triggers {
            if at < TASK_WORDS {
                shared::store(TASK + at, memory::load(task.cast::<u32>().add(at as usize)));
            } else if at < TASK_WORDS + operands {
                let at = at - TASK_WORDS;
                let operand = from.operands.add((first + at / OPERAND_WORDS) as usize);
                match at % OPERAND_WORDS {
                    0 => {
                        let binding = memory::load(&raw const (*operand).binding);
                        let base = memory::load(from.bindings.add(binding.idx()));
                        let address = base + memory::load(&raw const (*operand).offset_bytes);
                        shared::store(OPERANDS + at, address as u32);
                        shared::store(OPERANDS + at + 1, (address >> 32) as u32);
                    }
                    // With the first; and the binding, which nobody asks for any more.
                    1 | 2 => {}
                    word => shared::store(OPERANDS + at, memory::load(operand.cast::<u32>().add(word as usize))),
                }
            } else {
                let at = at - TASK_WORDS - operands;
                shared::store(EVENTS + at, memory::load(from.triggers.add((trigger_first + at) as usize)));
            }
            at += step;
        }
    }
}

/// Word of the descriptor that starts `OFFSET` bytes from its start.
#[inline(always)]
#[track_caller]
fn word<const OFFSET: usize>() -> u32 {
    const { assert!(OFFSET.is_multiple_of(4) && OFFSET < size_of::<TaskDesc>()) };
    // SAFETY: fetched before the last barrier, and not written before the next.
    let [word] = unsafe { shared::constant(TASK + OFFSET as u32 / 4) };
    word
}

/// [`TaskDesc::task_type`].
#[inline(always)]
#[track_caller]
pub(crate) fn task_type() -> u16 {
    word::<{ offset_of!(TaskDesc, task_type) }>() as u16
}

/// [`TaskDesc::flags`].
#[inline(always)]
#[track_caller]
pub(crate) fn flags() -> u16 {
    (word::<{ offset_of!(TaskDesc, task_type) }>() >> 16) as u16
}

/// [`TaskDesc::row_first`].
#[inline(always)]
#[track_caller]
pub(crate) fn row_first() -> u32 {
    word::<{ offset_of!(TaskDesc, row_first) }>()
}

/// [`TaskDesc::tiles`].
#[inline(always)]
#[track_caller]
pub(crate) fn tiles() -> u32 {
    word::<{ offset_of!(TaskDesc, tiles) }>()
}

/// [`TaskDesc::trigger_count`].
#[inline(always)]
#[track_caller]
pub(crate) fn trigger_count() -> u32 {
    word::<{ offset_of!(TaskDesc, wait_count) }>() >> 16
}

/// Event `at` of those that it triggers, `all` of which begin at its `trigger_first`.
///
/// # Safety
/// There are so many, in a checked image.
#[inline(always)]
#[track_caller]
pub(crate) unsafe fn trigger(at: u32, all: *const u32) -> u32 {
    // SAFETY: the caller's promise; see `word`.
    unsafe {
        if at < TRIGGERS {
            let [event] = shared::constant(EVENTS + at);
            return event;
        }
        memory::load(all.add((word::<{ offset_of!(TaskDesc, trigger_first) }>() + at) as usize))
    }
}

/// Its index along axis `AXIS` of the operator's grid.
#[inline(always)]
#[track_caller]
pub(crate) fn block<const AXIS: usize>() -> u32 {
    const { assert!(AXIS < 3) };
    // SAFETY: see `word`.
    let [word] = unsafe { shared::constant(TASK + (offset_of!(TaskDesc, block) / 4 + AXIS) as u32) };
    word
}

/// [`TaskDesc::params`].
#[inline(always)]
#[track_caller]
pub(crate) fn params() -> [u32; PARAM_WORDS] {
    // SAFETY: see `word`.
    unsafe { shared::constant(TASK + offset_of!(TaskDesc, params) as u32 / 4) }
}

/// Operand `at`: its address, and its words from the type on.
#[inline(always)]
#[track_caller]
pub(crate) fn operand(at: usize) -> (u64, [u32; OPERAND_WORDS as usize - 3]) {
    let at = OPERANDS + OPERAND_WORDS * at as u32;
    // SAFETY: see `word`.
    let ([low, high], rest) = unsafe { (shared::constant(at), shared::constant(at + 3)) };
    (u64::from(low) | u64::from(high) << 32, rest)
}
