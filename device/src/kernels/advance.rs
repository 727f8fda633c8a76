//! Ends an iteration: counts the token made, decides whether the loop goes on and publishes the next step (see
//! [`crate::advance`]). control: the control block as u32 words; tokens: [capacity] i32; chosen: [rows] i32, in a program that verifies drafts the
//! token that each row gives. Drafts for the next pass, if it is to verify some, go to where they would be in tokens. The last task of every program.

use super::*;
use crate::arch::memory;
#[cfg(not(target_arch = "nvptx64"))]
use core::sync::atomic::{AtomicU32, Ordering};
#[cfg(not(target_arch = "nvptx64"))]
use perpetua_shared::DType;
use perpetua_shared::control::Control;
#[cfg(not(target_arch = "nvptx64"))]
use perpetua_shared::{
    control::{PRODUCED, STOP},
    image::{EVERY_SEQUENCE, ProgramDesc},
    limits::MAX_DRAFTS,
};

/// See the module head.
#[derive(Debug)]
pub struct Advance;

/// No parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {}

impl MacroKernel for Advance {
    const NAME: &'static str = "advance";
    const SLOTS: &'static [Slot] = &[Slot::update("tokens"), Slot::optional("chosen"), Slot::update("control")];
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
                let (mut given, mut drafts) = ([0; MAX_DRAFTS + 1], [0; MAX_DRAFTS]);
                let rows = step.rows as usize;
                (0..rows).for_each(|row| given[row] = chosen.get_i32([row]) as u32);
                (0..rows - 1).for_each(|row| drafts[row] = token(next + row as u32));
                let (given, drafts) = (&given[..rows], &drafts[..rows - 1]);
                let made = crate::advance::advance_verified(&mut control, call.programs, given, drafts);
                (0..made).for_each(|row| tokens.set_i32([next as usize + row], given[row] as i32));
            } else {
                let token = if step.sampling == 0 { 0 } else { token(step.first_pos + step.rows) };
                crate::advance::advance(&mut control, call.programs, token);
            }
            let put = |position: u32, token: u32| tokens.set_i32([position as usize], token as i32);
            crate::advance::draft(&mut control, call.programs, token, put);
        }
        let out: [u32; WORDS] = bytemuck::cast(control);
        // `stop` is the host's word. `produced` goes last, its own and each sequence's: a host that sees it sees the token
        // too.
        let is_new = |i: usize| out[i] != before[i] && i != STOP / 4 && i != PRODUCED / 4;
        (0..WORDS).filter(|i| is_new(*i)).for_each(|i| atomic(&words, i).store(out[i], Ordering::Release));
        atomic(&words, PRODUCED / 4).store(out[PRODUCED / 4], Ordering::Release);
        Ok(())
    }

    #[inline(always)]
    unsafe fn gpu(_: &Params, call: &gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        if block.thread == 0 {
            // SAFETY: one thread works on the block in place, and no other task runs now (see the worker loop); the host
            // may write `stop` meanwhile, a word that is read once and never written here. The token read is the one
            // `sample` wrote before its event.
            unsafe {
                let (tokens, words) = (call.tensor(0), call.tensor(2));
                let control = memory::exclusive(words.address([0]).cast::<Control>());
                if control.n_sequences > 0 {
                    advance_each(call, control, &tokens);
                    return Ok(());
                }
                let token = match control.step.sampling {
                    0 => None,
                    _ => Some(tokens.get_word(control.step.first_pos + control.step.rows)),
                };
                crate::advance::advance(control, call.programs, token.unwrap_or(0));
                call.tell(call.mail_of_pass(), call.first_pos().wrapping_add(call.pass_rows()), token);
            }
        }
        Ok(())
    }
}

/// The turn of a batch, and what it tells the host: each token made, where it stands in the token buffer; of a pass that has read a
/// prompt, where the last token read stands.
///
/// # Safety
/// As [`MacroKernel::gpu`], on one thread; `tokens` is the operand of that name.
#[inline(always)]
unsafe fn advance_each(call: &gpu::Call<'_>, control: &mut Control, tokens: &gpu::Tensor) {
    let step = control.step;
    // A pass over all sequences has all of the token buffer, one that reads a prompt that sequence's part.
    let parts = if step.sampling == 0 { 1 } else { call.programs[step.program as usize].max_rows };
    let part = tokens.extent(0) / parts;
    // SAFETY: the caller's promise; `sample` has written the token of each sequence that had not ended.
    unsafe {
        let token = |number: usize, position: u32| {
            let at = number as u32 * part + position;
            let token = tokens.get_word(at);
            call.tell(at, position, Some(token));
            token
        };
        crate::advance::advance_batch(control, call.programs, token);
        if step.sampling == 0 {
            let read = step.first_pos + step.rows;
            call.tell(step.sequence * part + read - 1, read, None);
        }
    }
}

/// Sequences a batch may have: the rows of the program for them.
#[cfg(not(target_arch = "nvptx64"))]
fn max_sequences(programs: &[ProgramDesc]) -> usize {
    programs.iter().find(|p| p.in_token_loop == EVERY_SEQUENCE).map_or(1, |p| p.max_rows as usize)
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
