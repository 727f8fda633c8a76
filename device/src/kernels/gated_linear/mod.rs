//! y = act(x . gate^T) * (x . up^T): the first half of a gated MLP. x: [rows, k]; gate, up: [n, k]; y: [rows, n]; f32
//! accumulation. Reads 2*n*k weight elements once. With `norm`, [k], or [rows, parts] of an x with a norm's weights in
//! it already, x is first normalised, as in [`linear`](super::linear).

#[cfg(not(target_arch = "nvptx64"))]
use super::linear::{Activation, Order};
use super::*;

#[cfg(not(target_arch = "nvptx64"))]
pub(super) mod cpu;
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

/// What is made of the sums g and u of a column's two products: act(g) * u; or, with a `limit`, g' * sigmoid(alpha *
/// g') * (u' + 1), where g' is no more than the limit and u' no further from 0, as gpt-oss's experts have it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Gating {
    /// An [`Activation`]; without a limit.
    pub activation: u32,
    /// 0: none.
    pub limit: f32,
    /// With a limit.
    pub alpha: f32,
}

impl Gating {
    /// By this activation alone.
    pub const fn of(activation: u32) -> Gating {
        Gating { activation, limit: 0.0, alpha: 0.0 }
    }

    /// Judges a parameter.
    #[cfg(not(target_arch = "nvptx64"))]
    pub(super) fn check(&self) -> Result<(), Violation> {
        let Gating { activation, limit, alpha } = *self;
        match Activation::from_u32(activation) {
            None => Err(format!("activation {activation} is unknown")),
            Some(activation) if limit != 0.0 && activation != Activation::None => {
                Err(format!("activation {activation:?} with a limit, expected none"))
            }
            Some(_) if !(0.0..f32::INFINITY).contains(&limit) || !alpha.is_finite() => {
                Err(format!("a limit of {limit} with alpha {alpha}, expected finite numbers, the limit not below 0"))
            }
            Some(_) => Ok(()),
        }
    }

    /// The function itself.
    #[cfg(not(target_arch = "nvptx64"))]
    pub fn apply(self, g: f32, u: f32) -> f32 {
        let Gating { activation, limit, alpha } = self;
        if limit == 0.0 {
            return Activation::from_u32(activation).unwrap_or(Activation::None).apply(g) * u;
        }
        let (g, u) = (if g > limit { limit } else { g }, u.clamp(-limit, limit));
        g / (1.0 + (-alpha * g).exp()) * (u + 1.0)
    }
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
        Gating::of(p.activation).check()?;
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
        reference(p, Gating::of(p.activation), call);
        Ok(())
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn cpu(p: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
        if call.tensor(slot::NORM).is_present() {
            return Self::reference(p, call);
        }
        cpu::run(p, Gating::of(p.activation), call, scratch)
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

/// The reference, with `gating` in the place of the parameters' activation.
#[cfg(not(target_arch = "nvptx64"))]
fn reference(p: &Params, gating: Gating, call: &Call<'_>) {
    let [x, gate, up, gate_bias, up_bias, y, norm] = core::array::from_fn(|i| call.tensor(i));
    let dot = |x: &[f32], w: &crate::io::Tensor, bias: &crate::io::Tensor, n: usize| {
        let sum: f32 = x.iter().enumerate().map(|(k, x)| x * w.get([n, k])).sum();
        if bias.is_present() { sum + bias.get([n]) } else { sum }
    };
    for r in 0..call.rows(slot::X) {
        let x = rms_norm::row(&x, r, &norm, p.eps, p.is_weighted != 0);
        for n in 0..gate.extent(0) {
            y.set([r, n], gating.apply(dot(&x, &gate, &gate_bias, n), dot(&x, &up, &up_bias, n)));
        }
    }
}
