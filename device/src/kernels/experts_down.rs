//! y[r] = residual[r] + the sum over slots s of x[r, s] . w[e]^T + weight * bias[e], where e is the expert that row r
//! goes to through slot s, and weight is how much it counts (see [`routing`]): the second half of a mixture of experts,
//! whose first half has weighted what they made. x: [rows, slots, k]; logits: [rows, experts] f32; correction:
//! [experts]; w: [experts, n, k]; bias: [experts, n]; residual, y: [rows, n]; f32 accumulation. Reads the weights of
//! the experts that rows go to, once. (MPK: `MOE_W2_LINEAR` and `MOE_MUL_SUM_ADD`.)

#[cfg(not(target_arch = "nvptx64"))]
use super::linear::Order;
use super::routing::{Counting, Found, Weighting};
use super::*;
use crate::arch::scalar::fma;
use crate::gpu::packed::{Eight, Four};
use crate::gpu::rows::dot_of_parts;
use crate::gpu::thin::afar;
#[cfg(not(target_arch = "nvptx64"))]
use half::bf16;
#[cfg(not(target_arch = "nvptx64"))]
use perpetua_shared::DType;

/// See the module head.
#[derive(Debug)]
pub struct ExpertsDown;

/// Parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    /// An [`Order`](super::linear::Order).
    pub order: u32,
    /// How much experts count, as in the first half.
    pub counting: Counting,
}

slots! {
    X: read "x",
    LOGITS: read "logits",
    W: read "w",
    RESIDUAL: optional "residual",
    Y: write "y",
    BIAS: optional "bias",
    CORRECTION: optional "correction",
}

// As in the other products, where a row is staged.
const _: () = assert!(slot::X == linear::slot::X);

impl MacroKernel for ExpertsDown {
    const NAME: &'static str = "experts_down";
    const SLOTS: &'static [Slot] = slot::ALL;
    type Params = Params;
    /// [`Linear`](super::Linear)'s.
    const TOLERANCE: f32 = 2e-3;
    const FLAGGED: &'static [usize] = &[slot::LOGITS, slot::RESIDUAL, slot::Y];

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(p: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [x, logits, w, residual, y, bias, correction] = io else { unreachable!("slots were counted") };
        p.counting.check()?;
        if Order::from_u32(p.order).is_none() {
            return Err(format!("order of summation {} is unknown", p.order));
        }
        for (name, operand, rank) in [("x", x, 3), ("residual", residual, 2), ("y", y, 2)] {
            rules::dtype(name, operand, &rules::FLOATS)?;
            rules::rank(name, operand, rank)?;
            rules::unit_stride(name, operand)?;
        }
        let [rows, chosen, k, _] = x.extent;
        routing::check(logits, correction, rows, chosen)?;
        routing::weights("w", w, logits.extent[1])?;
        rules::extent("w", w, 2, k)?;
        routing::bias("bias", bias, w)?;
        if bias.is_present() && p.counting.weighting() == Weighting::All {
            return Err("`bias` stands beside experts that count by parts of all, expected of those chosen".to_owned());
        }
        rules::flagged_in(&[("residual", residual), ("y", y)], rows)?;
        for (name, operand) in [("residual", residual), ("y", y)] {
            rules::extent(name, operand, 0, rows)?;
            rules::extent(name, operand, 1, w.extent[1])?;
        }
        Ok(())
    }

    fn cost(p: &Params, io: &[Operand]) -> Cost {
        let [x, _, w, _, _, bias, correction] = io else { return Cost::default() };
        routing::cost(
            &[w, bias, p.counting.scales(correction)],
            x.extent[0],
            x.extent[1],
            default_cost(Self::SLOTS, io),
        )
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(p: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [x, logits, w, residual, y, bias, correction] = core::array::from_fn(|i| call.tensor(i));
        let mut routes = Vec::new();
        let router = routing::Router { logits, correction, counting: p.counting };
        router.routes(call.rows(slot::X), x.extent(1), &mut routes);
        for r in 0..call.rows(slot::X) {
            for n in 0..w.extent(1) {
                let own = routes.iter().filter(|route| route.row == r);
                let product = |route: &routing::Route| -> f32 {
                    let sum: f32 =
                        (0..x.extent(2)).map(|k| x.get([r, route.slot, k]) * w.get([route.expert, n, k])).sum();
                    if bias.is_present() { sum + route.weight * bias.get([route.expert, n]) } else { sum }
                };
                let before = if residual.is_present() { residual.get([r, n]) } else { 0.0 };
                y.set([r, n], before + own.map(product).sum::<f32>());
            }
        }
        Ok(())
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn cpu(p: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
        let [x, logits, w, residual, y, bias, correction] = core::array::from_fn(|i| call.tensor(i));
        let is_float = |tensor: &crate::io::Tensor| !tensor.is_present() || tensor.dtype() == DType::F32;
        if ![x, residual, y].iter().all(is_float) {
            return Self::reference(p, call);
        }
        let n = w.extent(1);
        let params = linear::Params { order: p.order, ..Default::default() };
        for r in 0..call.rows(slot::X) {
            if !residual.is_present() {
                y.slice_mut::<f32, 2>([r, 0], n).fill(0.0);
            } else if residual.address([r, 0]) != y.address([r, 0]) {
                y.slice_mut::<f32, 2>([r, 0], n).copy_from_slice(residual.slice([r, 0], n));
            }
        }
        let take = |route: &routing::Route, from: &mut [f32]| {
            from.copy_from_slice(x.slice([route.row, route.slot, 0], from.len()));
        };
        let put = |route: &routing::Route, made: &[f32]| {
            let y = y.slice_mut::<f32, 2>([route.row, 0], made.len());
            y.iter_mut().zip(made).for_each(|(y, made)| *y += made);
            // As files have them: not an element at a time.
            if bias.is_present() && bias.dtype() == DType::Bf16 {
                let bias = bias.slice::<bf16, 2>([route.expert, 0], made.len());
                y.iter_mut().zip(bias).for_each(|(y, bias)| *y += route.weight * bias.to_f32());
            } else if bias.is_present() {
                let bias = (0..made.len()).map(|n| bias.get([route.expert, n]));
                y.iter_mut().zip(bias).for_each(|(y, bias)| *y += route.weight * bias);
            }
        };
        let shape = [x.extent(0), x.extent(2), n];
        let router = routing::Router { logits, correction, counting: p.counting };
        let routed = routing::Routed { router, chosen: x.extent(1), shape };
        routed.each_expert(call, scratch, take, put, |expert, [x, y], call, scratch| {
            use linear::slot::{W, X, Y};
            let mut tensors = [crate::io::Tensor::ABSENT; Linear::SLOTS.len()];
            (tensors[X], tensors[W], tensors[Y]) = (x, w.part(expert), y);
            Linear::cpu(&params, &Call { tensors: &tensors, ..*call }, scratch)
        })
    }

    unsafe fn gpu(p: &Params, call: &gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        // SAFETY: as in `experts_up`; a thread reads the residual where it writes, so `y` may lie on it.
        unsafe {
            let (rows, chosen) = (call.rows(&call.tensor(slot::X)), call.tensor(slot::X).extent(1));
            let mut r = 0;
            while r < rows {
                let found =
                    Found::choose::<false>(call, block, [slot::LOGITS, slot::CORRECTION], r, chosen, p.counting);
                if rows == 1 || rows * chosen <= call.tensor(slot::LOGITS).extent(1) {
                    found.ask(call, block, slot::W, chosen);
                }
                let residual = call.tensor(slot::RESIDUAL);
                let ask = |column| {
                    let bias = call.tensor(slot::BIAS);
                    let (mut slot, mut biases) = (0, 0.0);
                    while bias.is_present() && slot < chosen {
                        biases = fma(found.weight(slot), bias.get([found.expert(slot), column]), biases);
                        slot += 1;
                    }
                    (if residual.is_present() { call.ask(&residual, [r, column]) } else { 0 }, biases)
                };
                let finish = |column, sum: f32, (asked, biases): (u32, f32)| {
                    let value = sum + biases + call.told(slot::RESIDUAL, &residual, [r, column], asked);
                    call.put(&call.tensor(slot::Y), [r, column], value);
                };
                let (operands, row) = ([slot::X, slot::W], (r, found, chosen));
                if afar::has_parts::<Eight>(call, operands) {
                    afar::parts::<Eight>(call, operands, row, block, ask, finish);
                } else if afar::has_parts::<Four>(call, operands) {
                    afar::parts::<Four>(call, operands, row, block, ask, finish);
                } else {
                    let n = call.tensor(slot::W).extent(1);
                    let mut column = block.warp();
                    while column < n {
                        let asked = ask(column);
                        let sum = dot_of_parts(call, operands, [r, column], chosen, found, block.lane());
                        if block.lane() == 0 {
                            finish(column, sum, asked);
                        }
                        column += block.warps();
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
