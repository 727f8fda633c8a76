//! The GPU body of `gated_linear`: a warp per pair of weight rows, over up to four rows of x at a time.

use super::*;
use crate::gpu::math::activate;
use crate::gpu::rows::{dots, pick};

/// # Safety
/// As [`MacroKernel::gpu`].
pub(super) unsafe fn run(p: &Params, call: &crate::gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
    // SAFETY: as in `linear`.
    unsafe {
        let (x, gate, up, y) = (call.tensor(0), call.tensor(1), call.tensor(2), call.tensor(5));
        let (gate_bias, up_bias) = (call.tensor(3), call.tensor(4));
        let rows = call.rows(&x);
        let finish = |r: u32, n: u32, mut g: f32, mut u: f32| {
            if gate_bias.is_present() {
                g += gate_bias.get([n]);
            }
            if up_bias.is_present() {
                u += up_bias.get([n]);
            }
            y.set([r, n], activate(p.activation, g) * u);
        };
        let mut n = block.warp();
        while n < gate.extent(0) {
            let mut r = 0;
            if rows == 1 {
                let [g] = dots::<1>(&x, 0, 1, &gate, n, block.lane());
                let [u] = dots::<1>(&x, 0, 1, &up, n, block.lane());
                if block.lane() == 0 {
                    finish(0, n, g, u);
                }
                r = 1;
            }
            while r < rows {
                let g = dots::<4>(&x, r, rows, &gate, n, block.lane());
                let u = dots::<4>(&x, r, rows, &up, n, block.lane());
                let row = r + block.lane();
                if block.lane() < 4 && row < rows {
                    finish(row, n, pick(g, block.lane()), pick(u, block.lane()));
                }
                r += 4;
            }
            n += block.warps();
        }
    }
    Ok(())
}
