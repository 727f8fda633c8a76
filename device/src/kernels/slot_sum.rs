//! y[r] = residual[r] + the sum over slots s of x[r, s]: what a row's experts have made, together. x: [rows, slots, n];
//! residual, y: [rows, n]. Slots are added in their order, so that a row's bits depend on nothing beside it. (MPK:
//! `MOE_MUL_SUM_ADD`.)

use super::*;

/// See the module head.
#[derive(Debug)]
pub struct SlotSum;

/// Parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {}

slots! {
    X: read "x",
    RESIDUAL: optional "residual",
    Y: write "y",
}

impl MacroKernel for SlotSum {
    const NAME: &'static str = "slot_sum";
    const SLOTS: &'static [Slot] = slot::ALL;
    type Params = Params;

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(_: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [x, residual, y] = io else { unreachable!("slots were counted") };
        for (name, operand, rank) in [("x", x, 3), ("residual", residual, 2), ("y", y, 2)] {
            rules::dtype(name, operand, &rules::FLOATS)?;
            rules::rank(name, operand, rank)?;
            rules::unit_stride(name, operand)?;
        }
        for (name, operand) in [("residual", residual), ("y", y)] {
            rules::extent(name, operand, 0, x.extent[0])?;
            rules::extent(name, operand, 1, x.extent[2])?;
        }
        if x.extent[1] == 0 { Err("`x` has no slots, expected at least one".to_owned()) } else { Ok(()) }
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(_: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [x, residual, y] = core::array::from_fn(|i| call.tensor(i));
        for r in 0..call.rows(slot::X) {
            for n in 0..x.extent(2) {
                let before = if residual.is_present() { residual.get([r, n]) } else { 0.0 };
                y.set([r, n], (0..x.extent(1)).fold(before, |sum, slot| sum + x.get([r, slot, n])));
            }
        }
        Ok(())
    }

    unsafe fn gpu(_: &Params, call: &gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        // SAFETY: the operands are the slots', `check` has matched their extents, and four elements are one thread's.
        unsafe {
            let (rows, slots, n) =
                (call.rows(&call.tensor(slot::X)), call.tensor(slot::X).extent(1), call.tensor(slot::X).extent(2));
            let fours = n.div_ceil(4);
            for at in block.mine(rows * fours) {
                let (r, column) = (at / fours, at % fours * 4);
                let residual = call.tensor(slot::RESIDUAL);
                let mut sum = if residual.is_present() { residual.row([r]).four(column, n) } else { [0.0; 4] };
                let mut slot = 0;
                while slot < slots {
                    // Four slots are asked for together; what is there once is added once.
                    let of = |slot: u32| {
                        let (is_there, last) = (slot < slots, slots - 1);
                        let four = call.tensor(slot::X).row([r, if is_there { slot } else { last }]).four(column, n);
                        four.map(|value| if is_there { value } else { 0.0 })
                    };
                    let [a, b, c, d] = [of(slot), of(slot + 1), of(slot + 2), of(slot + 3)];
                    for i in 0..4 {
                        sum[i] = sum[i] + a[i] + b[i] + c[i] + d[i];
                    }
                    slot += 4;
                }
                call.tensor(slot::Y).row([r]).set_four_below(column, n, sum);
            }
        }
        Ok(())
    }
}
