//! y[r, s] = weight * act(x[r] . gate[e]^T) * (x[r] . up[e]^T), where e is the expert that row r goes to through slot s, and weight is
//! how much it counts (see [`routing`]): the first half of a mixture of experts. x: [rows, k]; logits: [rows, experts] f32; gate, up:
//! [experts, n, k]; y: [rows, slots, n]; f32 accumulation. Reads the weights of the experts that rows go to, once. With `norm`, [k], x, one
//! row, is first normalised, as in [`linear`](super::linear). (MPK: `MOE_W13_LINEAR`, its gate and its up.)

#[cfg(not(target_arch = "nvptx64"))]
use super::linear::{Activation, Order};
use super::routing::{Found, Weighting};
use super::*;
use crate::gpu::math::activate;
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
    /// An [`Activation`](super::linear::Activation).
    pub activation: u32,
    /// An [`Order`](super::linear::Order).
    pub order: u32,
    /// Added to the mean square of x, where it is normalised.
    pub eps: f32,
    /// A [`Weighting`].
    pub weighting: u32,
}

slots! {
    X: read "x",
    LOGITS: read "logits",
    GATE: read "gate",
    UP: read "up",
    Y: write "y",
    NORM: optional "norm",
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
        let [x, logits, gate, up, y, norm] = io else { unreachable!("slots were counted") };
        if Activation::from_u32(p.activation).is_none() {
            return Err(format!("activation {} is unknown", p.activation));
        }
        if Order::from_u32(p.order).is_none() {
            return Err(format!("order of summation {} is unknown", p.order));
        }
        Weighting::check(p.weighting)?;
        for (name, operand, rank) in [("x", x, 2), ("y", y, 3)] {
            rules::dtype(name, operand, &rules::FLOATS)?;
            rules::rank(name, operand, rank)?;
            rules::unit_stride(name, operand)?;
        }
        let [rows, k, ..] = x.extent;
        routing::check(logits, rows, y.extent[1])?;
        for (name, weights) in [("gate", gate), ("up", up)] {
            routing::weights(name, weights, logits.extent[1])?;
            rules::extent(name, weights, 2, k)?;
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

    fn cost(_: &Params, io: &[Operand]) -> Cost {
        let [x, _, gate, up, y, _] = io else { return Cost::default() };
        routing::cost(&[gate, up], x.extent[0], y.extent[1], default_cost(Self::SLOTS, io))
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(p: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [x, logits, gate, up, y, norm] = core::array::from_fn(|i| call.tensor(i));
        let activation = Activation::from_u32(p.activation).unwrap_or(Activation::None);
        let mut routes = Vec::new();
        routing::routes_of(&logits, call.rows(slot::X), y.extent(1), Weighting::of(p.weighting), &mut routes);
        for route in routes {
            let x = rms_norm::row(&x, route.row, &norm, p.eps, false);
            let of = |w: &crate::io::Tensor, n: usize| -> f32 {
                x.iter().enumerate().map(|(k, x)| x * w.get([route.expert, n, k])).sum()
            };
            for n in 0..gate.extent(1) {
                let value = activation.apply(of(&gate, n)) * of(&up, n);
                y.set([route.row, route.slot, n], route.weight * value);
            }
        }
        Ok(())
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn cpu(p: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
        let [x, logits, gate, up, y] = core::array::from_fn(|i| call.tensor(i));
        let params = gated_linear::Params { activation: p.activation, order: p.order, ..Default::default() };
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
        let routed = routing::Routed { logits, chosen: y.extent(1), weighting: Weighting::of(p.weighting), shape };
        routed.each_expert(call, scratch, take, put, |expert, [x, y], call, scratch| {
            use gated_linear::slot::{GATE, UP, X, Y};
            let mut tensors = [crate::io::Tensor::ABSENT; GatedLinear::SLOTS.len()];
            (tensors[X], tensors[GATE], tensors[UP], tensors[Y]) = (x, gate.part(expert), up.part(expert), y);
            GatedLinear::cpu(&params, &Call { tensors: &tensors, ..*call }, scratch)
        })
    }

    unsafe fn gpu(p: &Params, call: &gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        // SAFETY: the operands are the slots', and every index is below its extent, experts' because there are as many logits; the
        // conditions around `two_dots` depend on the warp and the task alone, so whole warps call it.
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
                let found = Found::choose(call, block, slot::LOGITS, r, chosen, Weighting::of(p.weighting));
                // Where most rows go to experts of their own: else they have been asked for.
                if rows == 1 || rows * chosen <= call.tensor(slot::LOGITS).extent(1) {
                    found.ask(call, block, slot::GATE, chosen);
                    found.ask(call, block, slot::UP, chosen);
                }
                let finish = |slot, column, [g, u]: [f32; 2]| {
                    let value = found.weight(slot) * activate(p.activation, g) * u;
                    call.tensor(slot::Y).set([r, slot, column], value);
                };
                if let Some(kind) = form {
                    let operands = [slot::GATE, slot::UP];
                    by_form!(kind, F => afar::pairs::<F>(call, operands, (found, chosen), block, finish));
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
                            finish(slot, column, sums);
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
