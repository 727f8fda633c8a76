//! y = act(x . gate^T) * (x . up^T): the first half of a gated MLP. x: [rows, k]; gate, up: [n, k]; y: [rows, n];
//! f32 accumulation. Reads 2*n*k weight elements once. With `norm`, [k], or [rows, parts] of an x with a norm's weights in it already, x is first
//! normalised, as in [`linear`](super::linear).

#[cfg(not(target_arch = "nvptx64"))]
use super::linear::{Activation, Order};
use super::*;

#[cfg(not(target_arch = "nvptx64"))]
mod cpu;
mod gpu;

/// See the module head.
#[derive(Debug)]
pub struct GatedLinear;

/// Parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    /// An [`Activation`].
    pub activation: u32,
    /// Added to the mean square of x, where it is normalised.
    pub eps: f32,
    /// An [`Order`](super::linear::Order).
    pub order: u32,
    /// 1: the norm's weights are in x, and `norm` is sums of squares.
    pub is_weighted: u32,
}

slots! {
    X: read "x",
    GATE: read "gate",
    UP: read "up",
    GATE_BIAS: optional "gate_bias",
    UP_BIAS: optional "up_bias",
    Y: write "y",
    NORM: optional "norm",
}

// Products on a GPU find them by `linear`'s numbers.
const _: () = assert!(slot::X == linear::slot::X && slot::GATE == linear::slot::W && slot::UP == slot::GATE + 1);

impl MacroKernel for GatedLinear {
    const NAME: &'static str = "gated_linear";
    const SLOTS: &'static [Slot] = slot::ALL;
    type Params = Params;
    /// [`Linear`](super::Linear)'s, for a product of two.
    const TOLERANCE: f32 = 2e-3;
    const TILED: &'static [usize] = &[slot::NORM, slot::GATE, slot::UP];
    const EARLY_READS: &'static [usize] = &[slot::GATE, slot::UP];
    const FLAGGED: &'static [usize] = &[slot::X, slot::Y];

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(p: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [x, gate, up, gate_bias, up_bias, y, norm] = io else { unreachable!("slots were counted") };
        if Activation::from_u32(p.activation).is_none() {
            return Err(format!("activation {} is unknown", p.activation));
        }
        if Order::from_u32(p.order).is_none() {
            return Err(format!("order of summation {} is unknown", p.order));
        }
        rules::weights("gate", gate)?;
        rules::weights("up", up)?;
        for (name, operand, rank) in [("x", x, 2), ("gate_bias", gate_bias, 1), ("up_bias", up_bias, 1), ("y", y, 2)] {
            rules::dtype(name, operand, &rules::FLOATS)?;
            rules::rank(name, operand, rank)?;
            rules::unit_stride(name, operand)?;
        }
        rules::extent("gate", gate, 1, x.extent[1])?;
        rules::norm(norm, x, p.is_weighted)?;
        rules::flagged_row("x", x, &[gate, up], MAX_FLAGGED_OF_TWO)?;
        rules::flagged_in(&[("y", y)], x.extent[0])?;
        rules::extent("up", up, 0, gate.extent[0])?;
        rules::extent("up", up, 1, x.extent[1])?;
        rules::extent("gate_bias", gate_bias, 0, gate.extent[0])?;
        rules::extent("up_bias", up_bias, 0, gate.extent[0])?;
        rules::extent("y", y, 0, x.extent[0])?;
        rules::extent("y", y, 1, gate.extent[0])
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn beside_tiles(_: &Params, io: &[Operand]) -> u64 {
        linear::beside_tiles(&io[slot::X])
    }

    fn cost(_: &Params, io: &[Operand]) -> Cost {
        let [x, gate, up, ..] = io else { return Cost::default() };
        let flops = product([2, u64::from(x.extent[0]), total([gate.len_elems(), up.len_elems()])]);
        Cost { flops, ..default_cost(Self::SLOTS, io) }
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(p: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [x, gate, up, gate_bias, up_bias, y, norm] = core::array::from_fn(|i| call.tensor(i));
        let activation = Activation::from_u32(p.activation).unwrap_or(Activation::None);
        let dot = |x: &[f32], w: &crate::io::Tensor, bias: &crate::io::Tensor, n: usize| {
            let sum: f32 = x.iter().enumerate().map(|(k, x)| x * w.get([n, k])).sum();
            if bias.is_present() { sum + bias.get([n]) } else { sum }
        };
        for r in 0..call.rows(slot::X) {
            let x = rms_norm::row(&x, r, &norm, p.eps, p.is_weighted != 0);
            for n in 0..gate.extent(0) {
                y.set([r, n], activation.apply(dot(&x, &gate, &gate_bias, n)) * dot(&x, &up, &up_bias, n));
            }
        }
        Ok(())
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn cpu(p: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
        if call.tensor(slot::NORM).is_present() {
            return Self::reference(p, call);
        }
        cpu::run(p, call, scratch)
    }

    const THIN: bool = true;
    const EARLY: bool = true;

    unsafe fn gpu_early(
        p: &Params,
        call: &crate::gpu::Call<'_>,
        block: &Block,
        ready: impl Fn() -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        // SAFETY: the caller's promise.
        unsafe { gpu::run(p, call, block, ready) }
    }
}
