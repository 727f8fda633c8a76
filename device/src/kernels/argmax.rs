//! values[b], indices[b] = the largest of block b's part of x and where it stands, ties to the lower index, NaN below
//! everything. x: [1, n]; values: [1] f32; indices: [1] i32, counted from the start of the whole row.

use super::*;
use crate::block::Candidate;
#[cfg(not(target_arch = "nvptx64"))]
use perpetua_shared::DType;

/// See the module head.
#[derive(Debug)]
pub struct ArgmaxPartial;

/// Parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    /// Blocks the row is cut into.
    pub blocks: u32,
    /// Elements of the whole row: block b starts at b * len / blocks.
    pub len_elems: u32,
}

impl Params {
    /// Where block `block`'s part starts in the whole row.
    pub fn first(&self, block: u32) -> usize {
        (u64::from(block) * u64::from(self.len_elems) / u64::from(self.blocks.max(1))) as usize
    }
}

impl MacroKernel for ArgmaxPartial {
    const NAME: &'static str = "argmax_partial";
    const SLOTS: &'static [Slot] = &[Slot::read("x"), Slot::write("values"), Slot::write("indices")];
    type Params = Params;

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(p: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [x, values, indices] = io else { unreachable!("slots were counted") };
        rules::dtype("x", x, &[DType::F32])?;
        rules::rank("x", x, 2)?;
        rules::extent("x", x, 0, 1)?;
        rules::unit_stride("x", x)?;
        rules::dtype("values", values, &[DType::F32])?;
        rules::dtype("indices", indices, &[DType::I32])?;
        [("values", values), ("indices", indices)].into_iter().try_for_each(|(name, operand)| {
            rules::rank(name, operand, 1)?;
            // One block's place, or the whole row of places before it is cut.
            rules::extent(name, operand, 0, if operand.extent[0] == p.blocks { p.blocks } else { 1 })
        })
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(p: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [x, values, indices] = core::array::from_fn(|i| call.tensor(i));
        let mut best = (f32::NEG_INFINITY, -1i32);
        for (i, &value) in x.slice::<f32, 2>([0, 0], x.extent(1)).iter().enumerate() {
            if value > best.0 || (best.1 < 0 && !value.is_nan()) {
                best = (value, (p.first(call.task.block[0]) + i) as i32);
            }
        }
        values.set([0], best.0);
        indices.set_i32([0], best.1);
        Ok(())
    }

    #[inline(always)]
    unsafe fn gpu(p: &Params, call: &gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        // SAFETY: the operands are the slots' and every index is below its extent.
        unsafe {
            let (x, values, indices) = (call.tensor(0), call.tensor(1), call.tensor(2));
            let mut best = Candidate::NONE;
            for index in block.mine(x.extent(1)) {
                best = best.better(Candidate { value: x.get([0, index]), index });
            }
            let best = block.best(best);
            if block.thread == 0 {
                values.set([0], best.value);
                let first = p.first(call.block::<0>()) as u32;
                indices.set_word(0, if best.index == u32::MAX { u32::MAX } else { first + best.index });
            }
        }
        Ok(())
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn cpu(p: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
        let [x, values, indices] = core::array::from_fn(|i| call.tensor(i));
        let row = crate::cpu::rows::Row::of(&x, [0, 0], x.extent(1));
        let best = scratch.isa.run(crate::cpu::rowwise::Largest(row));
        // The first element that equals it; -inf and no index when all are NaN.
        let elements = x.slice::<f32, 2>([0, 0], x.extent(1));
        let found = elements.iter().position(|value| *value == best);
        values.set([0], found.map_or(f32::NEG_INFINITY, |i| elements[i]));
        indices.set_i32([0], found.map_or(-1, |i| (p.first(call.task.block[0]) + i) as i32));
        Ok(())
    }
}
