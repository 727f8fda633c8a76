//! The task whose turn it is, in shared memory: what its body, its waits and its triggers want of the image, fetched before the
//! task's events have fired.
//!
//! From global memory a task's descriptor, then its operands, then the addresses of their bindings are three trips to L2 one
//! after the other, and to memory where nobody kept the image there. Behind the last event they would be on every task's path:
//! acquiring it empties L1.

use super::scheduler;
use crate::arch::{memory, shared};
use crate::block::Block;
use crate::kernels::MAX_SLOTS;
use core::mem::offset_of;
use perpetua_shared::limits::{MAX_RANK, PARAM_WORDS};
use perpetua_shared::task::Operand;
use perpetua_shared::{EventDesc, TaskDesc};

const TASK_WORDS: u32 = size_of::<TaskDesc>() as u32 / 4;
const OPERAND_WORDS: u32 = size_of::<Operand>() as u32 / 4;

/// Triggers and waits of a task that are fetched; those of few are more.
const TRIGGERS: u32 = 8;
const WAITS: u32 = 8;

// Words of shared memory: the descriptor, its operands, their addresses in place of offsets, what it triggers, and what it waits on
// with how many triggers that takes.
const TASK: u32 = scheduler::WORDS_END;
const OPERANDS: u32 = TASK + TASK_WORDS;
const EVENTS: u32 = OPERANDS + OPERAND_WORDS * MAX_SLOTS as u32;
const AWAITED: u32 = EVENTS + TRIGGERS;

const _: () = assert!(AWAITED + 2 * WAITS <= shared::WORDS && MAX_RANK == 4);

/// Where the image's sections lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sections {
    pub(crate) task: *const TaskDesc,
    pub(crate) operands: *const Operand,
    pub(crate) triggers: *const u32,
    pub(crate) waits: *const u32,
    pub(crate) events: *const EventDesc,
    pub(crate) bindings: *const u64,
}

/// Fetches `from.task`; all threads may look at it after their block's next barrier.
///
/// # Safety
/// Every thread of the block makes this same call, none looks at the task before any more, and the sections are those of a
/// checked image.
#[inline(always)]
pub(crate) unsafe fn fetch(from: &Sections, block: &Block) {
    // Computed anew every time: what follows from it would be held over all bodies.
    let (me, step) = (memory::opaque_word(block.thread), block.threads);
    // SAFETY: words, operands and events of the task are there, and a word is written by one thread.
    unsafe {
        let task = from.task;
        // What says where the rest is, and the descriptor itself: one trip. What those name is the second, and what operands and
        // events name in turn the third.
        let (first, operands) =
            (memory::load(&raw const (*task).operand_first), memory::load(&raw const (*task).operand_count));
        let (wait_first, trigger_first) =
            (memory::load(&raw const (*task).wait_first), memory::load(&raw const (*task).trigger_first));
        let (waits, triggers) =
            (memory::load(&raw const (*task).wait_count), memory::load(&raw const (*task).trigger_count));
        let mut at = me;
        while at < TASK_WORDS {
            shared::store(TASK + at, memory::load(task.cast::<u32>().add(at as usize)));
            at += step;
        }
        let few = |count: u16, most: u32| if u32::from(count) < most { u32::from(count) } else { most };
        let (waits, triggers) = (few(waits, WAITS), few(triggers, TRIGGERS));
        let operands = OPERAND_WORDS * operands;
        at = me;
        while at < operands + triggers + waits {
            // All kinds of words by the same instructions: lanes that part would wait for memory one after the other.
            let (is_operand, is_wait) = (at < operands, at >= operands + triggers);
            let operand = from.operands.wrapping_add((first + at / OPERAND_WORDS) as usize).cast::<u32>();
            let (word, event) = (at % OPERAND_WORDS, at.wrapping_sub(operands));
            let is_base = is_operand && word == 0;
            let source = if is_base {
                operand.wrapping_byte_add(offset_of!(Operand, binding))
            } else if is_operand {
                operand.wrapping_add(word as usize)
            } else if !is_wait {
                from.triggers.wrapping_add((trigger_first + event) as usize)
            } else {
                from.waits.wrapping_add((wait_first + event - triggers) as usize)
            };
            let offset = if is_base { operand.wrapping_byte_add(offset_of!(Operand, offset_bytes)) } else { source };
            let offset_high = if is_base { offset.wrapping_add(1) } else { source };
            let (word_there, low, high) = (memory::load(source), memory::load(offset), memory::load(offset_high));
            let address = u64::from(low) | u64::from(high) << 32;
            if is_base || is_wait {
                let next = if is_base {
                    from.bindings.wrapping_add(word_there as usize).cast::<u32>()
                } else {
                    let event = from.events.wrapping_add(word_there as usize);
                    event.cast::<u32>().wrapping_byte_add(offset_of!(EventDesc, num_triggers))
                };
                let next_high = if is_base { next.wrapping_add(1) } else { next };
                let (low, high) = (memory::load(next), memory::load(next_high));
                let address = address + (u64::from(low) | u64::from(high) << 32);
                let to = if is_base { OPERANDS + at } else { AWAITED + 2 * (event - triggers) };
                shared::store(to, if is_base { address as u32 } else { word_there });
                shared::store(to + 1, if is_base { (address >> 32) as u32 } else { low });
            } else if !is_operand || word > 2 {
                // What lies between is the offset's, and the binding, which nobody asks for any more.
                shared::store(if is_operand { OPERANDS + at } else { EVENTS + event }, word_there);
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

/// [`TaskDesc::wait_count`].
#[inline(always)]
#[track_caller]
pub(crate) fn wait_count() -> u32 {
    word::<{ offset_of!(TaskDesc, wait_count) }>() & 0xffff
}

/// Event `at` of those that it waits on, `all` of which begin at its `wait_first`, and how many triggers it takes; `events` is all of
/// them.
///
/// # Safety
/// There are so many, in a checked image.
#[inline(always)]
#[track_caller]
pub(crate) unsafe fn wait(at: u32, all: *const u32, events: *const EventDesc) -> [u32; 2] {
    // SAFETY: the caller's promise; see `word`.
    unsafe {
        if at < WAITS {
            return shared::constant(AWAITED + 2 * at);
        }
        let event = memory::load(all.add((word::<{ offset_of!(TaskDesc, wait_first) }>() + at) as usize));
        [event, memory::load(&raw const (*events.add(event as usize)).num_triggers)]
    }
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
