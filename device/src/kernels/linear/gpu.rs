//! The GPU body of `linear`: a warp per weight row, over up to four rows of x at a time; the weights from tiles where the
//! worker's loader brings them, else from global memory. One row with tiles of bf16 and passes of many rows go to the tensor
//! cores (`gpu::thin`, `gpu::wide`).

use super::*;
use crate::gpu::math::activate;
use crate::gpu::rows::{Rows, Staging, dots, pick, stage, tiled};
use crate::gpu::{thin, warpgroup, wide};

/// # Safety
/// As [`MacroKernel::gpu`].
#[inline(always)]
pub(super) unsafe fn run(p: &Params, call: &crate::gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
    // SAFETY: the operands are the slots'; `n` and `r` stay below the extents that `check` has matched; the conditions
    // around `dots` depend on the warp and the task alone, so whole warps call it.
    unsafe {
        let rows = if p.merges != 0 { 1 } else { call.rows(&call.tensor(0)) };
        let columns = call.tensor(1).extent(0);
        let staged = call.tensor(5).is_present() || p.merges != 0;
        let is_thin = thin::is_for::<1>(call, rows, 5);
        let mut scale = 1.0;
        if staged || is_thin {
            let how = Staging { norm: 5, eps: p.eps, merges: p.merges != 0, in_terms: is_thin };
            scale = stage(call, how, block);
        }
        // What is needed once an output is fetched then: held over the loops it would cost them registers.
        let finish = |r: u32, n: u32, mut sum: f32| {
            let (bias, residual, y) = (call.tensor(2), call.tensor(3), call.tensor(4));
            if bias.is_present() {
                sum += bias.get([n]);
            }
            sum = activate(p.activation, sum);
            if residual.is_present() {
                sum += residual.get([r, n]);
            }
            y.set([r, n], sum);
        };
        if let Some(tiles) = call.tiles
            && tiles.left() > 0
            && rows <= TILED_ROWS
        {
            if is_thin {
                thin::multiply::<1>(call, tiles, block, scale, |n, [sum]| finish(0, n, sum));
            } else {
                tiled::<1>(call, tiles, block, rows, staged, |r, n, [sum]| finish(r, n, sum));
            }
            return Ok(());
        }
        if warpgroup::is_for::<1>(call, block, rows) {
            warpgroup::multiply::<1>(call, block, rows, |r, n, [sum]| finish(r, n, sum));
            return Ok(());
        }
        if wide::is_for(call, block, rows) {
            wide::multiply::<1>(call, block, rows, |r, n, [sum]| finish(r, n, sum));
            return Ok(());
        }
        let mut n = block.warp();
        while n < columns {
            if rows == 1 {
                let [sum] = dots::<1>(Rows { call, rows, first: 0, staged }, 1, n, block.lane());
                if block.lane() == 0 {
                    finish(0, n, sum);
                }
            } else {
                let mut r = 0;
                while r < rows {
                    let sums = dots::<4>(Rows { call, rows, first: r, staged }, 1, n, block.lane());
                    let row = r + block.lane();
                    if block.lane() < 4 && row < rows {
                        finish(row, n, pick(sums, block.lane()));
                    }
                    r += 4;
                }
            }
            n += block.warps();
        }
    }
    Ok(())
}
