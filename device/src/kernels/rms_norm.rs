//! y[r,:] = x[r,:] * rsqrt(mean(x[r,:]^2) + eps) * w. x, y: [rows, hidden]; w: [hidden]; f32 accumulation.
//! Moves 2*rows*hidden + hidden elements.

use super::*;
use crate::arch::{WARP, each_of_four, memory, scalar::fma, warp};
use crate::gpu::math::rsqrt;

/// Elements that a warp has under way: four eights a lane.
const AT_ONCE: u32 = 4 * 8 * WARP;

/// `sum` and the squares of `eight`, which stays in registers: nothing finds its elements by a number.
#[inline(always)]
fn squares_of([a, b, c, d, e, f, g, h]: [f32; 8], sum: f32) -> f32 {
    let of = |x: f32, sum: f32| fma(x, x, sum);
    of(h, of(g, of(f, of(e, of(d, of(c, of(b, of(a, sum))))))))
}

/// `eight`, each times `scale` and its weight.
#[inline(always)]
fn scaled([a, b, c, d, e, f, g, h]: [f32; 8], scale: f32, w: [f32; 8]) -> [f32; 8] {
    let of = |x: f32, w: f32| x * scale * w;
    [of(a, w[0]), of(b, w[1]), of(c, w[2]), of(d, w[3]), of(e, w[4]), of(f, w[5]), of(g, w[6]), of(h, w[7])]
}

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
        // SAFETY: the operands are the slots' and every index is below its extent; a lane reads and writes its own
        // columns, so `y` may be `x`; a warp has its rows whole, so that all its lanes add up together, or the block has the only one.
        unsafe {
            // Found here, not kept over all the other kernels of a worker.
            let block = &Block { thread: memory::opaque_word(block.thread), ..*block };
            let at = |first: u32| {
                let at = first + 8 * block.lane();
                [at, at + 8 * WARP, at + 16 * WARP, at + 24 * WARP]
            };
            // The only row is all warps', in turns.
            let is_alone = call.rows(&call.tensor(0)) == 1;
            let (start, step) = if is_alone { (block.warp() * AT_ONCE, block.warps() * AT_ONCE) } else { (0, AT_ONCE) };
            let mut r = if is_alone { 0 } else { block.warp() };
            while r < call.rows(&call.tensor(0)) {
                let n = call.tensor(0).extent(1);
                let (x, y) = (call.tensor(0).row([r]), call.tensor(2).row([r]));
                let w = call.tensor(1).row([]);
                let (mut first, mut squares) = (start, 0.0);
                let mut values = x.eights(at(start), n);
                loop {
                    each_of_four!(c => squares = squares_of(values[c], squares));
                    if first + step >= n {
                        break;
                    }
                    first += step;
                    values = x.eights(at(first), n);
                }
                // Backwards, from the elements that are there.
                let mut weights = w.eights(at(first), n);
                let squares = if is_alone { block.sum(squares) } else { warp::sum(squares) };
                let scale = rsqrt(squares / n as f32 + p.eps);
                loop {
                    let places = at(first);
                    each_of_four!(c => y.set_eight(places[c], n, scaled(values[c], scale, weights[c])));
                    if first == start {
                        break;
                    }
                    first -= step;
                    (values, weights) = (x.eights(at(first), n), w.eights(at(first), n));
                }
                r += if is_alone { 1 } else { block.warps() };
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
