//! y[r,h,g,:] = softmax(q[r,h,g,:] . k[h,:,:]^T * scale) . v[h,:,:], over the positions row r may see.
//!
//! q, y: [rows, kv_heads, group, d] (`group` query heads share a key/value head); k, v: [kv_heads, context, d]. Causal:
//! row r sees positions 0..=first_pos + r. Bidirectional: it sees the pass's rows. f32 accumulation.

use super::*;

#[cfg(not(target_arch = "nvptx64"))]
mod cpu;
mod gpu;

/// See the module head.
#[derive(Debug)]
pub struct Attention;

/// Parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    /// Multiplies the scores; 1/sqrt(d) as a rule.
    pub scale: f32,
    /// 1: causal; 0: bidirectional.
    pub causal: u32,
}

impl Params {
    /// How many positions row `row` of the pass sees.
    pub fn visible(&self, step: &perpetua_shared::Step, row: u32) -> usize {
        (if self.causal != 0 { step.first_pos + row + 1 } else { step.rows }) as usize
    }
}

impl MacroKernel for Attention {
    const NAME: &'static str = "attention";
    const SLOTS: &'static [Slot] = &[Slot::read("q"), Slot::read("k"), Slot::read("v"), Slot::write("y")];
    type Params = Params;

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(_: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [q, k, v, y] = io else { unreachable!("slots were counted") };
        for (name, operand, rank) in [("q", q, 4), ("k", k, 3), ("v", v, 3), ("y", y, 4)] {
            rules::dtype(name, operand, &rules::FLOATS)?;
            rules::rank(name, operand, rank)?;
            rules::unit_stride(name, operand)?;
        }
        for (name, operand) in [("k", k), ("v", v)] {
            rules::extent(name, operand, 0, q.extent[1])?;
            rules::extent(name, operand, 1, k.extent[1])?;
            rules::extent(name, operand, 2, q.extent[3])?;
        }
        (0..4).try_for_each(|dim| rules::extent("y", y, dim, q.extent[dim]))
    }

    fn cost(_: &Params, io: &[Operand]) -> Cost {
        // Over the whole context: the length at run time is not known here.
        let [q, k, ..] = io else { return Cost::default() };
        let flops = 4 * q.len_elems() * u64::from(k.extent[1]);
        Cost { flops, ..default_cost(Self::SLOTS, io) }
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(p: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [q, k, v, y] = core::array::from_fn(|i| call.tensor(i));
        let (n_kv, group, d) = (q.extent(1), q.extent(2), q.extent(3));
        for r in 0..call.rows(0) {
            let visible = p.visible(call.step, call.task.row_first + r as u32);
            for h in 0..n_kv {
                for g in 0..group {
                    let mut scores: Vec<f32> = (0..visible)
                        .map(|t| p.scale * (0..d).map(|i| q.get([r, h, g, i]) * k.get([h, t, i])).sum::<f32>())
                        .collect();
                    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    scores.iter_mut().for_each(|s| *s = (*s - max).exp());
                    let total: f32 = scores.iter().sum();
                    for i in 0..d {
                        let sum: f32 = scores.iter().enumerate().map(|(t, s)| s * v.get([h, t, i])).sum();
                        y.set([r, h, g, i], sum / total);
                    }
                }
            }
        }
        Ok(())
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn cpu(p: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
        cpu::run(p, call, scratch)
    }

    #[inline(always)]
    unsafe fn gpu(p: &Params, call: &crate::gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        // SAFETY: the caller's promise.
        unsafe { gpu::run(p, call, block) }
    }
}
