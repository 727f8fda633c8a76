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
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    /// Blocks the row is cut into.
    pub blocks: u32,
    /// Elements of the whole row: block b starts at b * len / blocks.
    pub len_elems: u32,
}

impl Params {
    /// Where block `block`'s part starts in the whole row.
    pub fn first(&self, block: u32) -> u32 {
        // `check` has seen that the product is one of 32 bits.
        let blocks = if self.blocks == 0 { 1 } else { self.blocks };
        block.wrapping_mul(self.len_elems) / blocks
    }
}

/// Judges x, values and indices.
#[cfg(not(target_arch = "nvptx64"))]
pub(super) fn check(p: &Params, [x, values, indices]: [&Operand; 3]) -> Result<(), Violation> {
    if u64::from(p.blocks) * u64::from(p.len_elems) > u64::from(u32::MAX) {
        return Err(format!("{} elements in {} blocks, expected a product below 2^32", p.len_elems, p.blocks));
    }
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

/// The definition.
#[cfg(not(target_arch = "nvptx64"))]
pub(super) fn find(p: &Params, call: &Call<'_>, [x, values, indices]: [&crate::io::Tensor; 3]) {
    let mut best = (f32::NEG_INFINITY, -1i32);
    for i in 0..x.extent(1) {
        let value = x.get([0, i]);
        if value > best.0 || (best.1 < 0 && !value.is_nan()) {
            best = (value, p.first(call.task.block[0]) as i32 + i as i32);
        }
    }
    values.set([0], best.0);
    indices.set_i32([0], best.1);
}

/// Says what `best`, an index into the part of the task's block, is in the whole row.
///
/// # Safety
/// One thread calls it; `values` and `indices` are the operands of those names.
pub(crate) unsafe fn put(p: &Params, best: Candidate, block: u32, [values, indices]: [gpu::Tensor; 2]) {
    // SAFETY: the caller's promise.
    unsafe {
        values.set([0], best.value);
        indices.set_word(0, if best.index == u32::MAX { u32::MAX } else { p.first(block) + best.index });
    }
}

slots! {
    X: read "x",
    VALUES: write "values",
    INDICES: write "indices",
}

impl MacroKernel for ArgmaxPartial {
    const NAME: &'static str = "argmax_partial";
    const SLOTS: &'static [Slot] = slot::ALL;
    type Params = Params;

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(p: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [x, values, indices] = io else { unreachable!("slots were counted") };
        check(p, [x, values, indices])
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(p: &Params, call: &Call<'_>) -> Result<(), Fault> {
        find(p, call, [&call.tensor(slot::X), &call.tensor(slot::VALUES), &call.tensor(slot::INDICES)]);
        Ok(())
    }

    unsafe fn gpu(p: &Params, call: &gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        // SAFETY: the operands are the slots' and every index is below its extent.
        unsafe {
            let (x, values, indices) = (call.tensor(slot::X), call.tensor(slot::VALUES), call.tensor(slot::INDICES));
            let mut best = Candidate::NONE;
            for index in block.mine(x.extent(1)) {
                best = best.better(Candidate { value: x.get([0, index]), index });
            }
            let best = block.best(best);
            if block.thread == 0 {
                put(p, best, call.block::<0>(), [values, indices]);
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
        indices.set_i32([0], found.map_or(-1, |i| p.first(call.task.block[0]) as i32 + i as i32));
        Ok(())
    }
}
