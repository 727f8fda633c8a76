//! y[r,:] = x[r,:] * rsqrt(mean(x[r,:]^2) + eps) * w. x, y: [rows, hidden]; w: [hidden]; f32 accumulation.
//! Moves 2*rows*hidden + hidden elements.

use super::*;
use crate::{arch::scalar::fma, gpu::math::rsqrt};

/// See the module head.
#[derive(Debug)]
pub struct RmsNorm;

/// Parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    /// Added to the mean square.
    pub eps: f32,
}

/// Row `r` of `x`, normalised if `weights` are present.
#[cfg(not(target_arch = "nvptx64"))]
pub(super) fn row(x: &crate::io::Tensor, r: usize, weights: &crate::io::Tensor, eps: f32) -> Vec<f32> {
    let mut row: Vec<f32> = (0..x.extent(1)).map(|c| x.get([r, c])).collect();
    if weights.is_present() {
        let squares: f32 = row.iter().map(|x| x * x).sum();
        let scale = 1.0 / (squares / row.len() as f32 + eps).sqrt();
        row.iter_mut().enumerate().for_each(|(c, x)| *x = *x * scale * weights.get([c]));
    }
    row
}

impl MacroKernel for RmsNorm {
    const NAME: &'static str = "rms_norm";
    const SLOTS: &'static [Slot] = &[Slot::read("x"), Slot::read("w"), Slot::write("y")];
    type Params = Params;

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(_: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [x, w, y] = io else { unreachable!("slots were counted") };
        for (name, operand, rank) in [("x", x, 2), ("w", w, 1), ("y", y, 2)] {
            rules::dtype(name, operand, &rules::FLOATS)?;
            rules::rank(name, operand, rank)?;
            rules::unit_stride(name, operand)?;
        }
        rules::extent("w", w, 0, x.extent[1])?;
        rules::extent("y", y, 0, x.extent[0])?;
        rules::extent("y", y, 1, x.extent[1])
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(p: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [x, w, y] = core::array::from_fn(|i| call.tensor(i));
        for r in 0..call.rows(0) {
            row(&x, r, &w, p.eps).iter().enumerate().for_each(|(c, value)| y.set([r, c], *value));
        }
        Ok(())
    }

    #[inline(always)]
    unsafe fn gpu(p: &Params, call: &gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        // SAFETY: the operands are the slots' and every index is below its extent; a thread reads and writes its own
        // columns, so `y` may be `x`.
        unsafe {
            let (x, w, y) = (call.tensor(0), call.tensor(1), call.tensor(2));
            let hidden = x.extent(1);
            for r in 0..call.rows(&x) {
                let mut squares = 0.0;
                for c in block.mine(hidden) {
                    let value = x.get([r, c]);
                    squares = fma(value, value, squares);
                }
                let scale = rsqrt(block.sum(squares) / hidden as f32 + p.eps);
                for c in block.mine(hidden) {
                    y.set([r, c], x.get([r, c]) * scale * w.get([c]));
                }
            }
        }
        Ok(())
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn cpu(p: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
        let [x, w, y] = core::array::from_fn(|i| call.tensor(i));
        scratch.isa.run(crate::cpu::rowwise::RmsNorm { rows: call.rows(0), eps: p.eps, x, w, y });
        Ok(())
    }
}
