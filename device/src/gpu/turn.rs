//! The task whose turn it is, in shared memory: its record, which holds what its body, its waits and its triggers want
//! of the image, asked for while the task before it runs, a word a thread, so that none waits for memory between two
//! tasks.
//!
//! From global memory that would be on every task's path, and what bodies look at behind the last event: acquiring it
//! empties L1.

use super::scheduler;
use crate::arch::{memory, shared};
use crate::block::Block;
use crate::kernels::MAX_SLOTS;
use core::hint::cold_path;
use core::mem::offset_of;
use perpetua_shared::launch::TASK_THREADS;
use perpetua_shared::limits::{MAX_RANK, PARAM_WORDS};
use perpetua_shared::turn::TURN_EVENTS;
use perpetua_shared::{EventDesc, Operand, Step, Turn};

/// What a task sees of its pass: see [`Step`], whose words these are.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) first_pos: u32,
    pub(crate) rows: u32,
    pub(crate) sequence: u32,
}

impl Seen {
    /// All there is to see of `step`.
    pub(crate) fn of(step: &Step) -> Seen {
        let Step { first_pos, rows, sequence, .. } = *step;
        Seen { first_pos, rows, sequence }
    }
}

const TURN_WORDS: u32 = size_of::<Turn>() as u32 / 4;
const OPERAND_WORDS: u32 = size_of::<Operand>() as u32 / 4;

// Words of shared memory: what the task sees of its pass, and its record, which begins at a multiple of sixteen bytes,
// so that words are loaded four at a time.
const SEEN: u32 = scheduler::WORDS_END;
const TURN: u32 = (SEEN + 3).next_multiple_of(4);
const OPERANDS: u32 = TURN + TURN_WORDS;

/// Words of a record at most: on a GPU there is a thread for each.
const MOST_WORDS: u32 = TURN_WORDS + OPERAND_WORDS * MAX_SLOTS as u32;

const _: () = assert!(TURN + MOST_WORDS <= shared::WORDS && MOST_WORDS <= TASK_THREADS && MAX_RANK == 4);

/// Asks for the calling thread's word of the record of `words` words at `from`: long before its task's turn, so that
/// nobody waits for it.
///
/// # Safety
/// The record is one of a checked image's.
pub(crate) unsafe fn ask(from: *const u32, words: u32, block: &Block) -> u32 {
    let at = memory::opaque_word(block.thread);
    // SAFETY: a word of the record; beyond its end it is the first, which nobody looks at.
    unsafe { memory::load(from.wrapping_add(if at < words { at as usize } else { 0 })) }
}

/// Puts the record of `words` words at `from`, of a task in the pass `seen`, where all threads may look at it after
/// their block's next barrier; `asked` is the calling thread's word of it.
///
/// # Safety
/// Every thread of the block makes this same call, none looks at the task before any more, and the record is one of a
/// checked image's.
pub(crate) unsafe fn put(from: *const u32, words: u32, asked: u32, seen: Seen, block: &Block) {
    // SAFETY: the caller's promise; words of one thread.
    unsafe {
        if block.thread == 0 {
            see(seen);
        }
    }
    // Computed anew every time: what follows from it would be held over all bodies.
    let mut at = memory::opaque_word(block.thread);
    // SAFETY: a record has no more words than there is room for, and a word is written by one thread.
    unsafe {
        if at < words {
            shared::store(TURN + at, asked);
        }
        // Simulated blocks may have fewer threads than a record has words.
        if MOST_WORDS > block.threads {
            at += block.threads;
            while at < words {
                shared::store(TURN + at, memory::load(from.wrapping_add(at as usize)));
                at += block.threads;
            }
        }
    }
}

/// [`ask`] and [`put`] at once.
///
/// # Safety
/// As [`put`].
#[cfg(test)]
pub(crate) unsafe fn fetch(from: *const u32, words: u32, seen: Seen, block: &Block) {
    // SAFETY: the caller's promise.
    unsafe { put(from, words, ask(from, words, block), seen, block) }
}

/// The task sees `seen`, as all threads may after their block's next barrier.
///
/// # Safety
/// One thread calls it, and none looks at what the task saw before any more.
pub(crate) unsafe fn see(seen: Seen) {
    // SAFETY: the caller's promise.
    unsafe {
        shared::store(SEEN, seen.first_pos);
        shared::store(SEEN + 1, seen.rows);
        shared::store(SEEN + 2, seen.sequence);
    }
}

/// What the task sees of its pass.
#[track_caller]
pub(crate) fn seen() -> Seen {
    // SAFETY: see `word`.
    let [first_pos, rows, sequence] = unsafe { shared::constant(SEEN) };
    Seen { first_pos, rows, sequence }
}

/// Moves the operands of the record fetched, of `words` words, to the caches and tokens of sequence `sequence`, of
/// which binding `b` has `parts[b]` bytes; all threads may look at it after their block's next barrier.
///
/// # Safety
/// Every thread of the block makes this same call, after a barrier since the record was fetched; a checked image's
/// bindings have a part for the sequence.
pub(crate) unsafe fn shift(parts: *const u64, sequence: u32, words: u32, block: &Block) {
    let operand = memory::opaque_word(block.thread);
    if operand < (words - TURN_WORDS) / OPERAND_WORDS {
        let at = OPERANDS + OPERAND_WORDS * operand;
        // SAFETY: an operand's words are one thread's.
        unsafe {
            let binding = shared::load(at + 2);
            let address = u64::from(shared::load(at)) | u64::from(shared::load(at + 1)) << 32;
            let address = address + memory::load(parts.wrapping_add(binding as usize)) * u64::from(sequence);
            shared::store(at, address as u32);
            shared::store(at + 1, (address >> 32) as u32);
        }
    }
}

/// Word of the record that starts `OFFSET` bytes from its start.
#[track_caller]
fn word<const OFFSET: usize>() -> u32 {
    const { assert!(OFFSET.is_multiple_of(4) && OFFSET < size_of::<Turn>()) };
    // SAFETY: fetched before the last barrier, and not written before the next.
    let [word] = unsafe { shared::constant(TURN + OFFSET as u32 / 4) };
    word
}

/// [`Turn::task_type`].
#[track_caller]
pub(crate) fn task_type() -> u16 {
    word::<{ offset_of!(Turn, task_type) }>() as u16
}

/// [`Turn::flags`].
#[track_caller]
pub(crate) fn flags() -> u16 {
    (word::<{ offset_of!(Turn, task_type) }>() >> 16) as u16
}

/// [`Turn::next`].
#[track_caller]
pub(crate) fn next() -> u32 {
    word::<{ offset_of!(Turn, next) }>()
}

/// [`Turn::row_first`].
#[track_caller]
pub(crate) fn row_first() -> u32 {
    word::<{ offset_of!(Turn, row_first) }>()
}

/// [`Turn::task`].
#[track_caller]
pub(crate) fn task() -> u32 {
    word::<{ offset_of!(Turn, task) }>()
}

/// [`Turn::tiles`].
#[track_caller]
pub(crate) fn tiles() -> u32 {
    word::<{ offset_of!(Turn, tiles) }>()
}

/// [`Turn::wait_count`].
#[track_caller]
pub(crate) fn wait_count() -> u32 {
    word::<{ offset_of!(Turn, wait_count) }>() & 0xffff
}

/// Event `at` of those that it waits on, `all` of which begin at its `wait_first`, and how many triggers it takes;
/// `events` is all of them.
///
/// # Safety
/// There are so many, in a checked image.
#[track_caller]
pub(crate) unsafe fn wait(at: u32, all: *const u32, events: *const EventDesc) -> [u32; 2] {
    // SAFETY: the caller's promise; see `word`.
    unsafe {
        if at < TURN_EVENTS as u32 {
            return shared::constant(TURN + offset_of!(Turn, waits) as u32 / 4 + 2 * at);
        }
        cold_path();
        let event = memory::load(all.add((word::<{ offset_of!(Turn, wait_first) }>() + at) as usize));
        [event, memory::load(&raw const (*events.add(event as usize)).num_triggers)]
    }
}

/// [`Turn::trigger_count`].
#[track_caller]
pub(crate) fn trigger_count() -> u32 {
    word::<{ offset_of!(Turn, wait_count) }>() >> 16
}

/// Event `at` of those that it triggers, `all` of which begin at its `trigger_first`.
///
/// # Safety
/// There are so many, in a checked image.
#[track_caller]
pub(crate) unsafe fn trigger(at: u32, all: *const u32) -> u32 {
    // SAFETY: the caller's promise; see `word`.
    unsafe {
        if at < TURN_EVENTS as u32 {
            let [event] = shared::constant(TURN + offset_of!(Turn, triggers) as u32 / 4 + at);
            return event;
        }
        cold_path();
        memory::load(all.add((word::<{ offset_of!(Turn, trigger_first) }>() + at) as usize))
    }
}

/// [`Turn::known`].
#[track_caller]
pub(crate) fn known() -> [u32; 4] {
    // SAFETY: see `word`.
    unsafe { shared::constant(TURN + offset_of!(Turn, known) as u32 / 4) }
}

/// Its index along axis `AXIS` of the operator's grid.
#[track_caller]
pub(crate) fn block<const AXIS: usize>() -> u32 {
    const { assert!(AXIS < 3) };
    // SAFETY: see `word`.
    let [word] = unsafe { shared::constant(TURN + (offset_of!(Turn, block) / 4 + AXIS) as u32) };
    word
}

/// [`Turn::params`].
#[track_caller]
pub(crate) fn params() -> [u32; PARAM_WORDS] {
    // SAFETY: see `word`.
    unsafe { shared::constant(TURN + offset_of!(Turn, params) as u32 / 4) }
}

/// Operand `at`: its address, and its words from the type on.
#[track_caller]
pub(crate) fn operand(at: usize) -> (u64, [u32; OPERAND_WORDS as usize - 3]) {
    let at = OPERANDS + OPERAND_WORDS * at as u32;
    // SAFETY: see `word`.
    let ([low, high], rest) = unsafe { (shared::constant(at), shared::constant(at + 3)) };
    (u64::from(low) | u64::from(high) << 32, rest)
}
