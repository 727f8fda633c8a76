//! Ends an iteration: counts the token made, decides whether the loop goes on and publishes the next step (see
//! [`crate::advance`]). control: the control block as u32 words; tokens: [capacity] i32; chosen: [rows] i32, in a
//! program that verifies drafts the token that each row gives. Drafts for the next pass, if it is to verify some, go to
//! where they would be in tokens. The last task of every program.

use super::*;
use crate::arch::{memory, shared};
use crate::block::{Candidate, FREE_SHARED};
use crate::lookup::{MIN_NGRAM, alike};
#[cfg(not(target_arch = "nvptx64"))]
use core::sync::atomic::{AtomicU32, Ordering};
#[cfg(not(target_arch = "nvptx64"))]
use perpetua_shared::DType;
use perpetua_shared::control::Control;
use perpetua_shared::limits::MAX_DRAFTS;
#[cfg(not(target_arch = "nvptx64"))]
use perpetua_shared::{
    control::{PRODUCED, STOP},
    image::{EVERY_SEQUENCE, ProgramDesc},
};

/// See the module head.
#[derive(Debug)]
pub struct Advance;

/// No parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {}

slots! {
    TOKENS: update "tokens",
    CHOSEN: optional "chosen",
    CONTROL: update "control",
}

impl MacroKernel for Advance {
    const NAME: &'static str = "advance";
    const SLOTS: &'static [Slot] = slot::ALL;
    type Params = Params;

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(_: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [tokens, chosen, control] = io else { unreachable!("slots were counted") };
        rules::dtype("tokens", tokens, &[DType::I32])?;
        rules::rank("tokens", tokens, 1)?;
        if chosen.is_present() {
            rules::dtype("chosen", chosen, &[DType::I32])?;
            rules::rank("chosen", chosen, 1)?;
            if chosen.extent[0] as usize > MAX_DRAFTS + 1 {
                return Err(format!("{} rows, expected at most {}", chosen.extent[0], MAX_DRAFTS + 1));
            }
        }
        rules::dtype("control", control, &[DType::U32])?;
        rules::rank("control", control, 1)?;
        rules::unit_stride("control", control)?;
        rules::extent("control", control, 0, WORDS as u32)
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(_: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [tokens, chosen, words] = core::array::from_fn(|i| call.tensor(i));
        let before: [u32; WORDS] = core::array::from_fn(|i| load(&words, i));
        let mut control: Control = bytemuck::cast(before);
        if control.n_sequences > 0 {
            // Every sequence has an equal part of the token buffer.
            let part = tokens.extent(0) / max_sequences(call.programs);
            let token = |sequence: usize, position: u32| tokens.get_i32([sequence * part + position as usize]) as u32;
            crate::advance::advance_batch(&mut control, call.programs, token);
        } else {
            let token = |position: u32| tokens.get_i32([position as usize]) as u32;
            let step = control.step;
            // Of a pass that samples nothing, or has no rows, nothing has been chosen.
            if chosen.is_present() && step.sampling != 0 && step.rows > 0 {
                let next = step.first_pos + 1;
                let given = |row: u32| chosen.get_i32([row as usize]) as u32;
                let draft = |row: u32| token(next + row);
                let made = crate::advance::advance_verified(&mut control, call.programs, step.rows, given, draft);
                (0..made).for_each(|row| tokens.set_i32([(next + row) as usize], given(row) as i32));
            } else {
                let token = if step.sampling == 0 { 0 } else { token(step.first_pos + step.rows) };
                crate::advance::advance(&mut control, call.programs, token);
            }
            let put = |position: u32, token: u32| tokens.set_i32([position as usize], token as i32);
            crate::advance::draft(&mut control, call.programs, token, put);
        }
        let out: [u32; WORDS] = bytemuck::cast(control);
        // `stop` is the host's word. `produced` goes last, its own and each sequence's: a host that sees it sees the
        // token too.
        let is_new = |i: usize| out[i] != before[i] && i != STOP / 4 && i != PRODUCED / 4;
        (0..WORDS).filter(|i| is_new(*i)).for_each(|i| atomic(&words, i).store(out[i], Ordering::Release));
        atomic(&words, PRODUCED / 4).store(out[PRODUCED / 4], Ordering::Release);
        Ok(())
    }

    unsafe fn gpu(_: &Params, call: &gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        // SAFETY: one thread works on the block in place, and no other task runs now (see the worker loop); the host
        // may write `stop` meanwhile, a word that is read once and never written here. The tokens read are those that
        // `sample` wrote before its event.
        unsafe {
            let verifies = call.tensor(slot::CHOSEN).is_present();
            if verifies {
                fetch(call, block);
            }
            if block.thread == 0 {
                let (tokens, words) = (call.tensor(slot::TOKENS), call.tensor(slot::CONTROL));
                // Asked for ahead of the tokens. Who records a fault does so before it makes anything more of the pass,
                // by an exchange whose result it waits for; and whatever this task waits for came after that, be it by
                // events or by flags.
                let fault = call.fault_code();
                let tell = |at, in_cache, token| {
                    if fault == 0 {
                        call.tell(at, in_cache, token);
                    }
                };
                let control = memory::exclusive(words.address([0]).cast::<Control>());
                if control.n_sequences > 0 {
                    advance_each(call, control, &tokens, tell);
                } else if verifies && control.step.sampling != 0 && control.step.rows > 0 {
                    advance_verified(call, control, &tokens, tell);
                } else {
                    advance_one(call, control, &tokens, tell);
                }
                ask_for_drafts(call, control);
            }
            block.sync();
            let [most] = shared::constant::<1>(MOST);
            if most > 0 {
                draft(call, block, most);
            }
        }
        Ok(())
    }
}

// Words of shared memory. Of a pass that verifies drafts: the token that each row gives, and those that the rows after
// the first have read.
const CHOSEN: u32 = FREE_SHARED;
const DRAFTS: u32 = CHOSEN + MAX_DRAFTS as u32 + 1;
/// What the next pass may verify: how many drafts, behind a text of how many tokens, by which program.
const MOST: u32 = DRAFTS + MAX_DRAFTS as u32;
const TEXT: u32 = MOST + 1;
const PROGRAM: u32 = MOST + 2;

/// Fetches what the pass has chosen and read to where [`advance_verified`] looks for it, one word a thread: one after
/// the other each would be a trip to L2.
///
/// # Safety
/// As [`MacroKernel::gpu`]; every thread of the block makes this same call, in a pass that verifies drafts.
unsafe fn fetch(call: &gpu::Call<'_>, block: &Block) {
    let (row, rows) = (block.thread, call.pass_rows());
    // SAFETY: `chosen` has a word for each row, and `tokens` a place for what each but the last gives.
    unsafe {
        if row < rows {
            shared::store(CHOSEN + row, call.tensor(slot::CHOSEN).get_word(row));
        }
        if row + 1 < rows {
            shared::store(DRAFTS + row, call.tensor(slot::TOKENS).get_word(call.first_pos() + 1 + row));
        }
        block.sync();
    }
}

/// The turn after a pass that verified drafts, and what it tells the host: each token that counts.
///
/// # Safety
/// As [`MacroKernel::gpu`], on one thread, after [`fetch`]; `tokens` is the operand of that name.
unsafe fn advance_verified(
    call: &gpu::Call<'_>,
    control: &mut Control,
    tokens: &gpu::Tensor,
    tell: impl Fn(u32, u32, Option<u32>),
) {
    let (first_pos, rows) = (call.first_pos(), call.pass_rows());
    // SAFETY: the caller's promise.
    unsafe {
        let (chosen, draft) = (|row| shared::load(CHOSEN + row), |row| shared::load(DRAFTS + row));
        let made = crate::advance::advance_verified(control, call.programs, rows, chosen, draft);
        for row in 0..made {
            let (at, token) = (first_pos + 1 + row, chosen(row));
            tokens.set_word(at, token);
            tell(at, first_pos + made, Some(token));
        }
    }
}

/// The turn after any other pass over one sequence, and what it tells the host.
///
/// # Safety
/// As [`MacroKernel::gpu`], on one thread; `tokens` is the operand of that name.
unsafe fn advance_one(
    call: &gpu::Call<'_>,
    control: &mut Control,
    tokens: &gpu::Tensor,
    tell: impl Fn(u32, u32, Option<u32>),
) {
    let read = call.first_pos().wrapping_add(call.pass_rows());
    // SAFETY: the caller's promise.
    unsafe {
        let token = match control.step.sampling {
            0 => None,
            _ => Some(tokens.get_word(read)),
        };
        crate::advance::advance(control, call.programs, token.unwrap_or(0));
        // Where the token stands, or the last that has been read.
        let at = if token.is_some() { read } else { read.saturating_sub(1) };
        tell(at, read, token);
    }
}

/// Says what [`draft`] is to do.
///
/// # Safety
/// One thread calls it, and none looks at what is said before the block's next barrier.
unsafe fn ask_for_drafts(call: &gpu::Call<'_>, control: &Control) {
    let room = if control.n_sequences > 0 { None } else { crate::advance::room_for_drafts(control, call.programs) };
    let (program, most) = room.unwrap_or((0, 0));
    // SAFETY: the caller's promise.
    unsafe {
        shared::store(MOST, most);
        shared::store(TEXT, control.n_tokens);
        shared::store(PROGRAM, program);
    }
}

/// Has the next pass verify `most` drafts, if the text has gone before as it goes now: see [`crate::advance::draft`].
/// All threads look for where.
///
/// # Safety
/// As [`MacroKernel::gpu`], every thread of the block, after [`ask_for_drafts`] and a barrier.
unsafe fn draft(call: &gpu::Call<'_>, block: &Block, most: u32) {
    // SAFETY: the words have been written before the barrier. Tokens below `n` are known, and those from there on, as
    // many as there is room for, nobody's yet: a thread writes one of them.
    unsafe {
        let [n, program] = shared::constant::<2>(TEXT);
        let tokens = call.tensor(slot::TOKENS);
        let token = |at: u32| tokens.get_word(at);
        let mut best = Candidate::NONE;
        for behind in block.mine(n - 1) {
            let alike = alike(n, n - 1 - behind, token);
            if alike >= MIN_NGRAM {
                best = best.better(Candidate { value: alike as f32, index: behind });
            }
        }
        let best = block.best(best);
        if best.index == u32::MAX {
            return;
        }
        let first = n - 1 - best.index;
        if block.thread < most {
            // What follows may reach into what is being put: then it goes on as it stands there.
            tokens.set_word(n + block.thread, token(first + block.thread % (n - first)));
        }
        if block.thread == 0 {
            let control = memory::exclusive(call.tensor(slot::CONTROL).address([0]).cast::<Control>());
            crate::advance::verify_next(control, program, most);
        }
    }
}

/// The turn of a batch, and what it tells the host: each token made, where it stands in the token buffer; of a pass
/// that has read a prompt, where the last token read stands.
///
/// # Safety
/// As [`MacroKernel::gpu`], on one thread; `tokens` is the operand of that name.
unsafe fn advance_each(
    call: &gpu::Call<'_>,
    control: &mut Control,
    tokens: &gpu::Tensor,
    tell: impl Fn(u32, u32, Option<u32>),
) {
    let step = control.step;
    // A pass over all sequences has all of the token buffer, one that reads a prompt that sequence's part.
    let parts = if step.sampling == 0 { 1 } else { call.programs[step.program as usize].max_rows };
    let part = tokens.extent(0) / parts;
    // SAFETY: the caller's promise; `sample` has written the token of each sequence that had not ended.
    unsafe {
        let token = |number: usize, position: u32| {
            let at = number as u32 * part + position;
            let token = tokens.get_word(at);
            tell(at, position, Some(token));
            token
        };
        crate::advance::advance_batch(control, call.programs, token);
        if step.sampling == 0 {
            let read = step.first_pos + step.rows;
            tell(step.sequence * part + read - 1, read, None);
        }
    }
}

/// Sequences a batch may have: the rows of the program for them.
#[cfg(not(target_arch = "nvptx64"))]
fn max_sequences(programs: &[ProgramDesc]) -> usize {
    programs.iter().find(|p| p.kind == EVERY_SEQUENCE).map_or(1, |p| p.max_rows as usize)
}

#[cfg(not(target_arch = "nvptx64"))]
const WORDS: usize = size_of::<Control>() / 4;

/// The control words are shared with the host while workers run, so they are only touched as atomics.
#[cfg(not(target_arch = "nvptx64"))]
fn atomic(words: &crate::io::Tensor, i: usize) -> &AtomicU32 {
    // SAFETY: `address` checked that the word is in the box; it is aligned, and everyone accesses it atomically.
    unsafe { AtomicU32::from_ptr(words.address([i]).cast()) }
}

/// Control word `i`.
#[cfg(not(target_arch = "nvptx64"))]
pub(super) fn load(words: &crate::io::Tensor, i: usize) -> u32 {
    atomic(words, i).load(Ordering::Relaxed)
}
