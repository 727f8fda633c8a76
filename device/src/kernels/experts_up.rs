//! y[r, s] = weight * act(x[r] . gate[e]^T + gate_bias[e]) * (x[r] . up[e]^T + up_bias[e]), where e is the expert that
//! row r goes to through slot s, and weight is how much it counts (see [`routing`]): the first half of a mixture of
//! experts. It may be gated otherwise: see [`Gating`]. x: [rows, k]; logits: [rows, experts] f32; correction:
//! [experts]; gate, up: [experts, n, k]; gate_bias, up_bias: [experts, n]; y: [rows, slots, n]; f32 accumulation. Reads
//! the weights of the experts that rows go to, once. With `norm`, [k], x, one row, is first normalised, as in
//! [`linear`](super::linear). (MPK: `MOE_W13_LINEAR`, its gate and its up.)

use super::gated_linear::Gating;
#[cfg(not(target_arch = "nvptx64"))]
use super::linear::Order;
use super::routing::{Counting, Found};
use super::*;
use crate::gpu::math::gate;
use crate::gpu::rows::{Staging, Vector, two_dots};
use crate::gpu::thin::{First, afar, by_form};
#[cfg(not(target_arch = "nvptx64"))]
use perpetua_shared::DType;

/// See the module head.
#[derive(Debug)]
pub struct ExpertsUp;

/// Parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    /// What becomes of a column's two sums.
    pub gating: Gating,
    /// An [`Order`](super::linear::Order).
    pub order: u32,
    /// Added to the mean square of x, where it is normalised.
    pub eps: f32,
    /// How much experts count.
    pub counting: Counting,
}

slots! {
    X: read "x",
    LOGITS: read "logits",
    GATE: read "gate",
    UP: read "up",
    Y: write "y",
    NORM: optional "norm",
    GATE_BIAS: optional "gate_bias",
    UP_BIAS: optional "up_bias",
    CORRECTION: optional "correction",
}

// As in the other products, where a row is staged.
const _: () = assert!(slot::X == linear::slot::X);

impl MacroKernel for ExpertsUp {
    const NAME: &'static str = "experts_up";
    const SLOTS: &'static [Slot] = slot::ALL;
    type Params = Params;
    /// [`GatedLinear`](super::GatedLinear)'s.
    const TOLERANCE: f32 = 2e-3;
    const FLAGGED: &'static [usize] = &[slot::X, slot::LOGITS];

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(p: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [x, logits, gate, up, y, norm, gate_bias, up_bias, correction] = io else {
            unreachable!("slots were counted")
        };
        p.gating.check()?;
        if Order::from_u32(p.order).is_none() {
            return Err(format!("order of summation {} is unknown", p.order));
        }
        p.counting.check()?;
        for (name, operand, rank) in [("x", x, 2), ("y", y, 3)] {
            rules::dtype(name, operand, &rules::FLOATS)?;
            rules::rank(name, operand, rank)?;
            rules::unit_stride(name, operand)?;
        }
        let [rows, k, ..] = x.extent;
        routing::check(logits, correction, rows, y.extent[1])?;
        for (name, weights) in [("gate", gate), ("up", up)] {
            routing::weights(name, weights, logits.extent[1])?;
            rules::extent(name, weights, 2, k)?;
        }
        for (name, bias) in [("gate_bias", gate_bias), ("up_bias", up_bias)] {
            routing::bias(name, bias, gate)?;
        }
        rules::norm(norm, x, 0)?;
        let most = routing::most_staged(logits.extent[1]);
        if (norm.is_present() || x.is_flagged != 0) && (rows != 1 || k > most) {
            return Err(format!(
                "`x` is {rows} x {k}, to be normalised or flagged, expected one row of at most {most} then"
            ));
        }
        rules::extent("up", up, 1, gate.extent[1])?;
        rules::extent("y", y, 0, rows)?;
        rules::extent("y", y, 2, gate.extent[1])
    }

    fn cost(p: &Params, io: &[Operand]) -> Cost {
        let [x, _, gate, up, y, _, gate_bias, up_bias, correction] = io else { return Cost::default() };
        let scales = p.counting.scales(correction);
        routing::cost(&[gate, up, gate_bias, up_bias, scales], x.extent[0], y.extent[1], default_cost(Self::SLOTS, io))
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(p: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [x, logits, gate, up, y, norm, gate_bias, up_bias, correction] = core::array::from_fn(|i| call.tensor(i));
        let mut routes = Vec::new();
        let router = routing::Router { logits, correction, counting: p.counting };
        router.routes(call.rows(slot::X), y.extent(1), &mut routes);
        for route in routes {
            let x = rms_norm::row(&x, route.row, &norm, p.eps, false);
            let of = |w: &crate::io::Tensor, bias: &crate::io::Tensor, n: usize| -> f32 {
                let sum: f32 = x.iter().enumerate().map(|(k, x)| x * w.get([route.expert, n, k])).sum();
                if bias.is_present() { sum + bias.get([route.expert, n]) } else { sum }
            };
            for n in 0..gate.extent(1) {
                let value = p.gating.apply(of(&gate, &gate_bias, n), of(&up, &up_bias, n));
                y.set([route.row, route.slot, n], route.weight * value);
            }
        }
        Ok(())
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn cpu(p: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
        let [x, logits, gate, up, y] = core::array::from_fn(|i| call.tensor(i));
        let params = gated_linear::Params { order: p.order, ..Default::default() };
        let [gate_bias, up_bias, correction] =
            [slot::GATE_BIAS, slot::UP_BIAS, slot::CORRECTION].map(|slot| call.tensor(slot));
        let take = |route: &routing::Route, from: &mut [f32]| from.copy_from_slice(x.slice([route.row, 0], from.len()));
        let put = |route: &routing::Route, made: &[f32]| {
            let y = y.slice_mut::<f32, 3>([route.row, route.slot, 0], made.len());
            y.iter_mut().zip(made).for_each(|(y, made)| *y = route.weight * made);
        };
        // Lowered for workers that read x from afar: CPUs keep the norm, an operator of its own.
        if x.dtype() != DType::F32 || y.dtype() != DType::F32 || call.tensor(slot::NORM).is_present() {
            return Self::reference(p, call);
        }
        let shape = [x.extent(0), x.extent(1), gate.extent(1)];
        let router = routing::Router { logits, correction, counting: p.counting };
        let routed = routing::Routed { router, chosen: y.extent(1), shape };
        routed.each_expert(call, scratch, take, put, |expert, [x, y], call, scratch| {
            use gated_linear::slot::{GATE, GATE_BIAS, UP, UP_BIAS, X, Y};
            let mut tensors = [crate::io::Tensor::ABSENT; GatedLinear::SLOTS.len()];
            (tensors[X], tensors[GATE], tensors[UP], tensors[Y]) = (x, gate.part(expert), up.part(expert), y);
            for (slot, bias) in [(GATE_BIAS, &gate_bias), (UP_BIAS, &up_bias)] {
                if bias.is_present() {
                    tensors[slot] = bias.part(expert);
                }
            }
            gated_linear::cpu::run(&params, p.gating, &Call { tensors: &tensors, ..*call }, scratch)
        })
    }

    unsafe fn gpu(p: &Params, call: &gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        // SAFETY: the operands are the slots', and every index is below its extent, experts' because there are as many
        // logits; the conditions around `two_dots` depend on the warp and the task alone, so whole warps call it.
        unsafe {
            let (rows, chosen) = (call.rows(&call.tensor(slot::X)), call.tensor(slot::Y).extent(1));
            let staged = call.tensor(slot::NORM).is_present() || call.tensor(slot::X).is_flagged();
            let how = Staging { norm: slot::NORM, eps: p.eps, is_weighted: false, merges: false, like: (slot::X, 1) };
            let mut form = None;
            if staged {
                let (first, k) = (First { call, x: call.tensor(slot::X) }, call.tensor(slot::X).extent(1));
                afar::stage(&first, how, k, block);
                form = afar::form_of(call, [slot::GATE, slot::UP]);
                if let Some(kind) = form {
                    by_form!(kind, F => afar::make::<F>(call.tensor(slot::GATE).extent(2), block));
                }
            }
            let mut r = 0;
            while r < rows {
                let found = Found::choose::<true>(call, block, [slot::LOGITS, slot::CORRECTION], r, chosen, p.counting);
                // Where most rows go to experts of their own: else they have been asked for.
                if rows == 1 || rows * chosen <= call.tensor(slot::LOGITS).extent(1) {
                    found.ask(call, block, slot::GATE, chosen);
                    found.ask(call, block, slot::UP, chosen);
                }
                let ask = |slot, column| {
                    let of = |operand: usize| {
                        let bias = call.tensor(operand);
                        if bias.is_present() { bias.get([found.expert(slot), column]) } else { 0.0 }
                    };
                    [of(slot::GATE_BIAS), of(slot::UP_BIAS)]
                };
                let finish = |slot, column, [g, u]: [f32; 2], [of_g, of_u]: [f32; 2]| {
                    let value = found.weight(slot) * gate(p.gating, g + of_g, u + of_u);
                    call.tensor(slot::Y).set([r, slot, column], value);
                };
                if let Some(kind) = form {
                    let operands = [slot::GATE, slot::UP];
                    by_form!(kind, F => afar::pairs::<F>(call, operands, (found, chosen), block, ask, finish));
                } else {
                    let (n, k) = (call.tensor(slot::GATE).extent(1), call.tensor(slot::GATE).extent(2));
                    let mut at = block.warp();
                    while at < chosen * n {
                        let (slot, column) = (at / n, at % n);
                        let (x, expert) = (Vector { staged, row: call.tensor(slot::X).row([r]) }, found.expert(slot));
                        let [gate, up] = [call.tensor(slot::GATE), call.tensor(slot::UP)];
                        let rows = [gate.weight_row([expert, column]), up.weight_row([expert, column])];
                        let sums = two_dots(x, rows, k, block.lane());
                        if block.lane() == 0 {
                            finish(slot, column, sums, ask(slot, column));
                        }
                        at += block.warps();
                    }
                }
                // What was found is read until here.
                block.sync();
                r += 1;
            }
        }
        Ok(())
    }
}
