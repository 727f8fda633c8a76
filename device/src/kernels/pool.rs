//! y[0,:] = the mean of x's rows, or its first row; divided by its Euclidean norm when asked (at least 1e-12, as
//! sentence-transformers does). x: [rows, hidden]; y: [1, hidden].

use super::*;
use crate::arch::scalar::{fma, sqrt};

/// See the module head.
#[derive(Debug)]
pub struct Pool;

/// Parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    /// 0: the first row (CLS); 1: the mean of the rows.
    pub mean: u32,
    /// 1: divide by the Euclidean norm.
    pub normalise: u32,
}

slots! {
    X: read "x",
    Y: write "y",
}

impl MacroKernel for Pool {
    const NAME: &'static str = "pool";
    const SLOTS: &'static [Slot] = slot::ALL;
    type Params = Params;

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(_: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [x, y] = io else { unreachable!("slots were counted") };
        rules::one_row_of(x, y)
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(p: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [x, y] = core::array::from_fn(|i| call.tensor(i));
        let rows = if p.mean != 0 { call.rows(slot::X) } else { call.rows(slot::X).min(1) };
        let mean = |c: usize| (0..rows).map(|r| x.get([r, c])).sum::<f32>() / rows.max(1) as f32;
        let mut scale = 1.0;
        if p.normalise != 0 {
            let squares: f32 = (0..x.extent(1)).map(|c| mean(c) * mean(c)).sum();
            scale = 1.0 / squares.sqrt().max(1e-12);
        }
        (0..x.extent(1)).for_each(|c| y.set([0, c], mean(c) * scale));
        Ok(())
    }

    unsafe fn gpu(p: &Params, call: &gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        // SAFETY: the operands are the slots' and every index is below its extent; no thread writes before the sum is
        // known to all.
        unsafe {
            let (x, y) = (call.tensor(slot::X), call.tensor(slot::Y));
            let mut rows = call.rows(&x);
            if p.mean == 0 && rows > 1 {
                rows = 1;
            }
            let divisor = if rows == 0 { 1.0 } else { rows as f32 };
            let mean = |c: u32| {
                let mut sum = 0.0;
                for r in 0..rows {
                    sum += x.get([r, c]);
                }
                sum / divisor
            };
            let mut scale = 1.0;
            if p.normalise != 0 {
                let mut squares = 0.0;
                for c in block.mine(x.extent(1)) {
                    let value = mean(c);
                    squares = fma(value, value, squares);
                }
                let norm = sqrt(block.sum(squares));
                scale = 1.0 / if norm > 1e-12 { norm } else { 1e-12 };
            }
            for c in block.mine(x.extent(1)) {
                y.set([0, c], mean(c) * scale);
            }
        }
        Ok(())
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn cpu(p: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
        use crate::cpu::rows::{Row, has_unit_stride};
        use crate::cpu::rowwise::{Squares, SumRows};
        let [x, y] = core::array::from_fn(|i| call.tensor(i));
        let rows = if p.mean != 0 { call.rows(slot::X) } else { call.rows(slot::X).min(1) };
        if rows == 0 || !has_unit_stride::<2>(&x) || !has_unit_stride::<2>(&y) {
            return Self::reference(p, call);
        }
        let hidden = x.extent(1);
        let [sum] = scratch.areas([hidden]);
        // SAFETY: the area has `hidden` elements and lives until the next call of `areas`.
        let sum = unsafe { Row::of_floats(sum, hidden) };
        let isa = scratch.isa;
        isa.run(SumRows { a: Row::of(&x, [0, 0], hidden), b: None, c: None, scale: 1.0, y: sum });
        for r in 1..rows {
            isa.run(SumRows { a: sum, b: Some(Row::of(&x, [r, 0], hidden)), c: None, scale: 1.0, y: sum });
        }
        isa.run(SumRows { a: sum, b: None, c: None, scale: 1.0 / rows as f32, y: sum });
        let mut scale = 1.0;
        if p.normalise != 0 {
            scale = 1.0 / isa.run(Squares(sum)).sqrt().max(1e-12);
        }
        isa.run(SumRows { a: sum, b: None, c: None, scale, y: Row::of(&y, [0, 0], hidden) });
        Ok(())
    }
}
