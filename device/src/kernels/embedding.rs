//! y[r,:] = scale * (table[tokens[pos + r],:] (+ positions[pos + r,:] + kinds[0,:])). tokens: [capacity] i32; table:
//! [vocab, hidden]; positions: [max positions, hidden] and kinds: [kinds, hidden], both optional (BERT); y: [rows,
//! hidden].

use super::*;
#[cfg(not(target_arch = "nvptx64"))]
use perpetua_shared::{DType, FaultCode};

/// See the module head.
#[derive(Debug)]
pub struct Embedding;

/// Parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    /// Rows of `table`: a token id must be below.
    pub vocab: u32,
    /// What the sum is multiplied with; 1 as a rule.
    pub scale: f32,
}

slots! {
    TOKENS: read "tokens",
    TABLE: read "table",
    POSITIONS: optional "positions",
    KINDS: optional "kinds",
    Y: write "y",
}

impl MacroKernel for Embedding {
    const NAME: &'static str = "embedding";
    const SLOTS: &'static [Slot] = slot::ALL;
    type Params = Params;
    const FLAGGED: &'static [usize] = &[slot::Y];

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(_: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [tokens, table, positions, kinds, y] = io else { unreachable!("slots were counted") };
        rules::dtype("tokens", tokens, &[DType::I32])?;
        rules::rank("tokens", tokens, 1)?;
        rules::weights("table", table)?;
        rules::extent("table", table, 1, y.extent[1])?;
        for (name, operand) in [("positions", positions), ("kinds", kinds), ("y", y)] {
            rules::dtype(name, operand, &rules::FLOATS)?;
            rules::rank(name, operand, 2)?;
            rules::unit_stride(name, operand)?;
            rules::extent(name, operand, 1, y.extent[1])?;
        }
        Ok(())
    }

    fn cost(_: &Params, io: &[Operand]) -> Cost {
        // One row of each table per row of `y`, whatever the tables' sizes.
        let [_, table, positions, kinds, y] = io else { return Cost::default() };
        let row = |o: &Operand| o.dtype().map_or(0, |d| d.size_bytes() as u64);
        Cost {
            bytes_read: total([
                product([y.len_elems(), row(table) + row(positions) + row(kinds)]),
                4 * u64::from(y.extent[0]),
            ]),
            bytes_written: product([y.len_elems(), row(y)]),
            flops: 0,
        }
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(p: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [tokens, table, positions, kinds, y] = core::array::from_fn(|i| call.tensor(i));
        for r in 0..call.rows(slot::Y) {
            let pos = call.step.first_pos as usize + call.task.row_first as usize + r;
            let token = tokens.get_i32([pos]);
            if token < 0 || token as u32 >= p.vocab {
                return Err(Fault::new(FaultCode::TokenOutOfRange, pos as u32, token as u32, p.vocab));
            }
            for c in 0..y.extent(1) {
                let mut value = table.get([token as usize, c]);
                if positions.is_present() {
                    value += positions.get([pos, c]);
                }
                if kinds.is_present() {
                    value += kinds.get([0, c]);
                }
                y.set([r, c], value * p.scale);
            }
        }
        Ok(())
    }

    unsafe fn gpu(p: &Params, call: &gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        // SAFETY: the operands are the slots' and every index is below its extent; token ids are checked, by every
        // thread alike, before a row of `table` is touched.
        unsafe {
            let (tokens, table, y) = (call.tensor(slot::TOKENS), call.tensor(slot::TABLE), call.tensor(slot::Y));
            let (positions, kinds) = (call.tensor(slot::POSITIONS), call.tensor(slot::KINDS));
            for r in 0..call.rows(&y) {
                let pos = call.first_pos() + call.row_first() + r;
                let token = tokens.get_word(pos);
                if token >= p.vocab {
                    return Err(call.fault(FaultCode::TokenOutOfRange, pos, token, p.vocab));
                }
                for c in block.mine(y.extent(1)) {
                    let mut value = table.weight([token, c]);
                    if positions.is_present() {
                        value += positions.get([pos, c]);
                    }
                    if kinds.is_present() {
                        value += kinds.get([0, c]);
                    }
                    call.put(&y, [r, c], value * p.scale);
                }
            }
        }
        Ok(())
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn cpu(p: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
        use crate::cpu::rows::{Row, has_unit_stride};
        let [tokens, table, positions, kinds, y] = core::array::from_fn(|i| call.tensor(i));
        let strided = ![table, positions, kinds, y].iter().all(has_unit_stride::<2>);
        if strided || table.dtype().lines().is_some() {
            return Self::reference(p, call);
        }
        let hidden = y.extent(1);
        for r in 0..call.rows(slot::Y) {
            let pos = call.step.first_pos as usize + call.task.row_first as usize + r;
            let token = tokens.get_i32([pos]);
            if token < 0 || token as u32 >= p.vocab {
                return Err(Fault::new(FaultCode::TokenOutOfRange, pos as u32, token as u32, p.vocab));
            }
            scratch.isa.run(crate::cpu::rowwise::SumRows {
                a: Row::of(&table, [token as usize, 0], hidden),
                b: positions.is_present().then(|| Row::of(&positions, [pos, 0], hidden)),
                c: kinds.is_present().then(|| Row::of(&kinds, [0, 0], hidden)),
                scale: p.scale,
                y: Row::of(&y, [r, 0], hidden),
            });
        }
        Ok(())
    }
}
