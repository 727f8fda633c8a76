//! What ptxas makes of PTX, as far as cycles are concerned: the instructions' order, and how long each has its warp
//! wait.
//!
//! Machine code of sm_90 waits by numbers that the assembler writes into it, for all that takes as long always, and for
//! the rest by six scoreboards: a load names the one that it uses, and whatever reads it, or is to stand behind it,
//! that it waits for this one, that is for all loads that use it. It has other instructions than the PTX, in another
//! order, but says which line each comes from (`ptxas -lineinfo`).

use super::decode::Instruction;

/// Instructions of a line of code: 128 bytes.
pub(super) const LINE: u32 = 8;

/// An entry in machine code.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assembled {
    /// Its instructions.
    pub instructions: Vec<MachineInstruction>,
}

/// One of an entry's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MachineInstruction {
    /// The line of the PTX that it comes from; 0 of none.
    pub line: u32,
    /// Cycles until its warp may issue the next one.
    pub cycles: u32,
    /// The scoreboards, a bit each of [`SCOREBOARDS`], that it waits for before it issues: until all that uses them has
    /// come.
    pub waits: u8,
    /// The one that its result uses until it comes, likewise; 0: it takes as long as always.
    pub uses: u8,
}

/// Scoreboards of a warp.
pub const SCOREBOARDS: usize = 6;

/// What an instruction of the PTX is in machine code; of PTX that has not been assembled, in which line of code it
/// would be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Placed {
    /// Machine instructions, and the cycles for which the warp waits after them, together.
    pub(super) issues: u32,
    pub(super) cycles: u64,
    /// Scoreboards that they wait for, and that they use.
    pub(super) waits: u8,
    pub(super) uses: u8,
    /// In which lines of code they are, and the last one's number.
    pub(super) lines: Vec<u32>,
    pub(super) last: u32,
}

/// What each of the instructions `code` is in machine code: nothing, where it is an operand of others.
pub(super) fn place(code: &[Instruction], assembled: &Assembled) -> Vec<Placed> {
    let mut placed = vec![Placed::default(); code.len()];
    // An instruction begins on its line, and ends before the next one's.
    let mut by_line: Vec<(u32, usize)> = code.iter().enumerate().map(|(pc, one)| (one.line, pc)).collect();
    by_line.sort_unstable();
    for (number, of) in (0..).zip(&assembled.instructions) {
        let after = by_line.partition_point(|(begins, _)| *begins <= of.line);
        let Some((_, pc)) = after.checked_sub(1).map(|at| by_line[at]) else { continue };
        let one = &mut placed[pc];
        one.issues += 1;
        one.cycles += u64::from(of.cycles);
        one.waits |= of.waits;
        one.uses |= of.uses;
        one.last = number;
        let in_code = number / LINE;
        if !one.lines.contains(&in_code) {
            one.lines.push(in_code);
        }
    }
    placed
}
