//! y[r, s] = weights[r, s] * act(x[r] . w[e]^T + bias[e]) * (x[r] . up[e]^T + up_bias[e]), where e = experts[r, s] is
//! the expert that row r goes to through slot s ([`ExpertRoutes`](super::ExpertRoutes)): both halves of a mixture of
//! experts in passes of several rows. It may be gated otherwise: see [`Gating`]. Without `up` there is no such factor,
//! nor an activation; x may have a row for each slot, x[r, s]. x: [rows, k] or [rows, slots, k]; experts: [rows, slots]
//! i32, a row's all different; w, up: [experts, n, k]; bias, up_bias: [experts, n]; weights: [rows, slots] f32; y:
//! [rows, slots, n]; f32 accumulation. A number that no expert has leaves its slot as it is.
//!
//! `blocks` tasks share the work as they find it: a unit of it is a part of an expert's columns for some of the rows
//! that go there, and a task takes as many units in a row as any other. So whatever experts are chosen, all SMs read as
//! much. What a block has to know for that, each finds out for itself.
//!
//! Floor: the weights of the experts that rows go to, once, at the memory's rate. Each row of x is read once for every
//! 64 columns of `w` and `up` (128 without): 512 rows of Qwen3-30B-A3B's, 200 MB of L2's, beside 805 MB of weights. Cut
//! along n alone, in 132, they would be 2.2 GB. (MPK: `MOE_W13_LINEAR`, `MOE_W2_LINEAR`.)

use super::gated_linear::Gating;
use super::*;
#[cfg(not(target_arch = "nvptx64"))]
use perpetua_shared::DType;

mod gpu;

/// See the module head.
#[derive(Debug)]
pub struct RoutedLinear;

/// Parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    /// What becomes of a column's two sums; none without `up`.
    pub gating: Gating,
    /// Tasks that share the work: block b of the grid's first axis does its part of so many.
    pub blocks: u32,
    /// 1: x has a row for each slot.
    pub has_slots: u32,
}

/// Rows of a pass at most: a block has the list of those that go to an expert in shared memory.
pub const MAX_ROWS: u32 = 512;

slots! {
    X: read "x",
    EXPERTS: read "experts",
    W: read "w",
    UP: optional "up",
    WEIGHTS: optional "weights",
    // Which of its elements are a task's is known when it runs.
    Y: append "y",
    BIAS: optional "bias",
    UP_BIAS: optional "up_bias",
}

impl MacroKernel for RoutedLinear {
    const NAME: &'static str = "routed_linear";
    const SLOTS: &'static [Slot] = slot::ALL;
    type Params = Params;
    /// [`GatedLinear`](super::GatedLinear)'s.
    const TOLERANCE: f32 = 2e-3;

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(p: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [x, experts, w, up, weights, y, bias, up_bias] = io else { unreachable!("slots were counted") };
        p.gating.check()?;
        if !up.is_present() && (p.gating != Gating::default() || up_bias.is_present()) {
            return Err(format!("{:?}, or `up_bias`, without `up`, expected neither", p.gating));
        }
        let (x_rank, last) = if p.has_slots != 0 { (3, 2) } else { (2, 1) };
        for (name, operand, rank) in [("x", x, x_rank), ("y", y, 3)] {
            rules::dtype(name, operand, &rules::FLOATS)?;
            rules::rank(name, operand, rank)?;
            rules::unit_stride(name, operand)?;
        }
        for (name, operand, dtype) in [("experts", experts, DType::I32), ("weights", weights, DType::F32)] {
            rules::dtype(name, operand, &[dtype])?;
            rules::rank(name, operand, 2)?;
            rules::unit_stride(name, operand)?;
            rules::extent(name, operand, 0, x.extent[0])?;
            rules::extent(name, operand, 1, y.extent[1])?;
        }
        let ([rows, slots, n, _], n_experts) = (y.extent, w.extent[0]);
        for (name, matrices) in [("w", w), ("up", up)].into_iter().filter(|(_, matrices)| matrices.is_present()) {
            routing::weights(name, matrices, n_experts)?;
            rules::extent(name, matrices, 1, n)?;
            rules::extent(name, matrices, 2, x.extent[last])?;
        }
        routing::bias("bias", bias, w)?;
        routing::bias("up_bias", up_bias, up)?;
        rules::extent("x", x, 0, rows)?;
        if p.has_slots != 0 {
            rules::extent("x", x, 1, slots)?;
        }
        let fits = rows <= MAX_ROWS && (1..=routing::MAX_CHOSEN).contains(&slots) && n_experts <= routing::MAX_EXPERTS;
        if !fits || p.blocks == 0 || x.span_bytes() > u64::from(u32::MAX) {
            return Err(format!(
                "{rows} rows of {} bytes go to {slots} of {n_experts} experts by {} blocks, expected at most {MAX_ROWS} of 4 GiB to at most {} of {}",
                x.span_bytes(),
                p.blocks,
                routing::MAX_CHOSEN,
                routing::MAX_EXPERTS,
            ));
        }
        Ok(())
    }

    /// A task's part of what all do.
    fn cost(p: &Params, io: &[Operand]) -> Cost {
        let [_, experts, w, up, _, y, bias, up_bias] = io else { return Cost::default() };
        let all = default_cost(Self::SLOTS, io);
        // Of y nothing is read.
        let all = Cost { bytes_read: all.bytes_read - y.bytes(), ..all };
        let cost = routing::cost(&[w, up, bias, up_bias], experts.extent[0], experts.extent[1], all);
        let part = |all: u64| all.div_ceil(u64::from(p.blocks.max(1)));
        Cost { bytes_read: part(cost.bytes_read), bytes_written: part(cost.bytes_written), flops: part(cost.flops) }
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(p: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [x, experts, w, up, weights, y, bias, up_bias] = core::array::from_fn(|i| call.tensor(i));
        // The first block does it all.
        if call.task.block[0] != 0 {
            return Ok(());
        }
        for (r, slot) in (0..call.rows(slot::X)).flat_map(|r| (0..y.extent(1)).map(move |slot| (r, slot))) {
            let Ok(expert) = usize::try_from(experts.get_i32([r, slot])) else { continue };
            if expert >= w.extent(0) {
                continue;
            }
            let value = |k: usize| if p.has_slots != 0 { x.get([r, slot, k]) } else { x.get([r, k]) };
            let of = |w: &crate::io::Tensor, bias: &crate::io::Tensor, n: usize| -> f32 {
                let sum: f32 = (0..w.extent(2)).map(|k| value(k) * w.get([expert, n, k])).sum();
                if bias.is_present() { sum + bias.get([expert, n]) } else { sum }
            };
            let weight = if weights.is_present() { weights.get([r, slot]) } else { 1.0 };
            for n in 0..w.extent(1) {
                let first = of(&w, &bias, n);
                let made = if up.is_present() { p.gating.apply(first, of(&up, &up_bias, n)) } else { first };
                y.set([r, slot, n], weight * made);
            }
        }
        Ok(())
    }

    unsafe fn gpu(p: &Params, call: &crate::gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        // SAFETY: the caller's promise.
        unsafe { gpu::run(p, call, block) };
        Ok(())
    }
}
