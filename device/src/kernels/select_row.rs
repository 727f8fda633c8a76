//! y[0,:] = x[rows - 1,:]: the pass's last row, which alone goes through the head. x: [rows, hidden]; y: [1, hidden].

use super::*;

/// See the module head.
#[derive(Debug)]
pub struct SelectRow;

/// No parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {}

slots! {
    X: read "x",
    Y: write "y",
}

impl MacroKernel for SelectRow {
    const NAME: &'static str = "select_row";
    const SLOTS: &'static [Slot] = slot::ALL;
    type Params = Params;

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(_: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [x, y] = io else { unreachable!("slots were counted") };
        rules::one_row_of(x, y)
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(_: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [x, y] = core::array::from_fn(|i| call.tensor(i));
        let Some(last) = call.rows(slot::X).checked_sub(1) else { return Ok(()) };
        (0..x.extent(1)).for_each(|c| y.set([0, c], x.get([last, c])));
        Ok(())
    }

    unsafe fn gpu(_: &Params, call: &gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        // SAFETY: the operands are the slots' and every index is below its extent.
        unsafe {
            let (x, y) = (call.tensor(slot::X), call.tensor(slot::Y));
            if let Some(last) = call.rows(&x).checked_sub(1) {
                for c in block.mine(x.extent(1)) {
                    y.set([0, c], x.get([last, c]));
                }
            }
        }
        Ok(())
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn cpu(p: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
        use crate::cpu::rows::{Row, has_unit_stride};
        let [x, y] = core::array::from_fn(|i| call.tensor(i));
        if !has_unit_stride::<2>(&x) || !has_unit_stride::<2>(&y) {
            return Self::reference(p, call);
        }
        let Some(last) = call.rows(slot::X).checked_sub(1) else { return Ok(()) };
        let (a, y) = (Row::of(&x, [last, 0], x.extent(1)), Row::of(&y, [0, 0], x.extent(1)));
        scratch.isa.run(crate::cpu::rowwise::SumRows { a, b: None, c: None, scale: 1.0, y });
        Ok(())
    }
}
