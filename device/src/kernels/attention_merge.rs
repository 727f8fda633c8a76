//! y[0,h,g,:] = sum over s of w[s] * sums[h,s,g,:] / sum over s of w[s] * total[h,s,g], with w[s] = exp(max[h,s,g] - M) and M the
//! largest of the maxima: what the splits of an `attention` found, together.
//!
//! parts: [kv_heads, splits, group, 2 + d] f32, each row maximum, total and weighted sums; y: [1, kv_heads, group, d]. A total
//! of 0 says that the split had no positions (else its largest score alone counts 1). Where every score of a split is -inf
//! (a NaN or an overflow upstream) the result is NaN.

use super::*;
use crate::arch::scalar::fma;
use crate::arch::{WARP, warp};
use crate::gpu::math::exp;

/// See the module head.
#[derive(Debug)]
pub struct AttentionMerge;

/// Parameters: none.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {}

/// Splits there may be: a lane holds one's weight.
pub const MAX_SPLITS: u32 = WARP;

/// Sums a lane has under way: memory answers long after it is asked.
const AHEAD: u32 = 8;

impl MacroKernel for AttentionMerge {
    const NAME: &'static str = "attention_merge";
    const SLOTS: &'static [Slot] = &[Slot::read("parts"), Slot::write("y")];
    type Params = Params;

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(_: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [parts, y] = io else { unreachable!("slots were counted") };
        rules::dtype("parts", parts, &[perpetua_shared::DType::F32])?;
        rules::dtype("y", y, &rules::FLOATS)?;
        for (name, operand) in [("parts", parts), ("y", y)] {
            rules::rank(name, operand, 4)?;
            rules::unit_stride(name, operand)?;
        }
        if parts.extent[1] > MAX_SPLITS {
            return Err(format!("`parts` has {} splits, expected at most {MAX_SPLITS}", parts.extent[1]));
        }
        rules::extent("y", y, 0, 1)?;
        rules::extent("y", y, 1, parts.extent[0])?;
        rules::extent("y", y, 2, parts.extent[2])?;
        rules::extent("parts", parts, 3, y.extent[3].saturating_add(2))
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(_: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [parts, y] = core::array::from_fn(|i| call.tensor(i));
        for h in 0..parts.extent(0) {
            for g in 0..parts.extent(2) {
                let found = (0..parts.extent(1)).filter(|s| parts.get([h, *s, g, 1]) != 0.0);
                let max = found.clone().map(|s| parts.get([h, s, g, 0])).fold(f32::NEG_INFINITY, f32::max);
                let weights: Vec<(usize, f32)> = found.map(|s| (s, (parts.get([h, s, g, 0]) - max).exp())).collect();
                let sum = |at: usize| weights.iter().map(|(s, weight)| weight * parts.get([h, *s, g, at])).sum::<f32>();
                let total = sum(1);
                (0..y.extent(3)).for_each(|i| y.set([0, h, g, i], sum(2 + i) / total));
            }
        }
        Ok(())
    }

    #[inline(always)]
    unsafe fn gpu(_: &Params, call: &gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        // SAFETY: the operands are the slots' and `check` has matched their extents; a lane writes its own elements; whole
        // warps shuffle, since no condition around a shuffle depends on the lane.
        unsafe {
            let (parts, y) = (call.tensor(0), call.tensor(1));
            let (splits, group, d) = (parts.extent(1), parts.extent(2), y.extent(3));
            let lane = block.lane();
            // A warp for 32 elements of a head.
            let pieces = d.div_ceil(WARP);
            let mut unit = block.warp();
            while unit < parts.extent(0) * group * pieces {
                let (item, i) = (unit / pieces, unit % pieces * WARP + lane);
                let (h, g) = (item / group, item % group);
                let (mut max, mut total) = (f32::NEG_INFINITY, 0.0);
                if lane < splits {
                    let part = parts.row([h, lane, g]);
                    (max, total) = (part.get(0), part.get(1));
                }
                // Without positions the maximum is -inf, which makes no other smaller.
                let largest = warp::max(max);
                let weight = if total == 0.0 { 0.0 } else { exp(max - largest) };
                let all = warp::sum(weight * total);
                let mut sum = 0.0;
                let mut first = 0;
                while first < splits {
                    let mut values = [0.0; AHEAD as usize];
                    for ahead in 0..AHEAD {
                        if first + ahead < splits && i < d {
                            values[ahead as usize] = parts.row([h, first + ahead, g]).get(2 + i);
                        }
                    }
                    for ahead in 0..AHEAD {
                        let weight = f32::from_bits(warp::shuffle(weight.to_bits(), first + ahead));
                        sum = fma(weight, values[ahead as usize], sum);
                    }
                    first += AHEAD;
                }
                if i < d {
                    y.row([0, h, g]).set(i, sum / all);
                }
                unit += block.warps();
            }
        }
        Ok(())
    }
}
