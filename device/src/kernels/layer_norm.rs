//! y[r,:] = (h - mean(h)) * rsqrt(var(h) + eps) * w + b with h = x[r,:] (+ residual[r,:]). x, residual, y: [rows,
//! hidden]; w, b: [hidden]; biased variance; f32 accumulation.

use super::*;
use crate::{arch::scalar::fma, gpu::math::rsqrt};

/// See the module head.
#[derive(Debug)]
pub struct LayerNorm;

/// Parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    /// Added to the variance.
    pub eps: f32,
}

slots! {
    X: read "x",
    RESIDUAL: optional "residual",
    W: read "w",
    B: read "b",
    Y: write "y",
}

impl MacroKernel for LayerNorm {
    const NAME: &'static str = "layer_norm";
    const SLOTS: &'static [Slot] = slot::ALL;
    type Params = Params;
    const TOLERANCE: f32 = 1e-4;

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(_: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [x, residual, w, b, y] = io else { unreachable!("slots were counted") };
        for (name, operand, rank) in [("x", x, 2), ("residual", residual, 2), ("w", w, 1), ("b", b, 1), ("y", y, 2)] {
            rules::dtype(name, operand, &rules::FLOATS)?;
            rules::rank(name, operand, rank)?;
            rules::unit_stride(name, operand)?;
            rules::extent(name, operand, usize::from(rank) - 1, x.extent[1])?;
        }
        rules::extent("residual", residual, 0, x.extent[0])?;
        rules::extent("y", y, 0, x.extent[0])
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(p: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [x, residual, w, b, y] = core::array::from_fn(|i| call.tensor(i));
        let hidden = x.extent(1);
        for r in 0..call.rows(slot::X) {
            let h = |c: usize| x.get([r, c]) + if residual.is_present() { residual.get([r, c]) } else { 0.0 };
            let mean = (0..hidden).map(h).sum::<f32>() / hidden as f32;
            let variance = (0..hidden).map(|c| (h(c) - mean) * (h(c) - mean)).sum::<f32>() / hidden as f32;
            let scale = 1.0 / (variance + p.eps).sqrt();
            // In two passes over `h`, so that `y` may be `x` or `residual` itself element by element.
            for c in 0..hidden {
                y.set([r, c], (h(c) - mean) * scale * w.get([c]) + b.get([c]));
            }
        }
        Ok(())
    }

    unsafe fn gpu(p: &Params, call: &gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        // SAFETY: the operands are the slots' and every index is below its extent; a thread reads and writes its own
        // columns, so `y` may be `x` or `residual`.
        unsafe {
            let (x, residual, y) = (call.tensor(slot::X), call.tensor(slot::RESIDUAL), call.tensor(slot::Y));
            let (w, b) = (call.tensor(slot::W), call.tensor(slot::B));
            let hidden = x.extent(1);
            let h = |r: u32, c: u32| x.get([r, c]) + if residual.is_present() { residual.get([r, c]) } else { 0.0 };
            for r in 0..call.rows(&x) {
                let mut sum = 0.0;
                for c in block.mine(hidden) {
                    sum += h(r, c);
                }
                let mean = block.sum(sum) / hidden as f32;
                let mut squares = 0.0;
                for c in block.mine(hidden) {
                    let off = h(r, c) - mean;
                    squares = fma(off, off, squares);
                }
                let scale = rsqrt(block.sum(squares) / hidden as f32 + p.eps);
                for c in block.mine(hidden) {
                    y.set([r, c], (h(r, c) - mean) * scale * w.get([c]) + b.get([c]));
                }
            }
        }
        Ok(())
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn cpu(p: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
        let [x, residual, w, b, y] = core::array::from_fn(|i| call.tensor(i));
        let (rows, eps) = (call.rows(slot::X), p.eps);
        scratch.isa.run(crate::cpu::rowwise::LayerNorm { rows, eps, x, residual, w, b, y });
        Ok(())
    }
}
