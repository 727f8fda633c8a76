//! A short convolution along the rows of a sequence, a filter for each column: y[r,c] = act(sum over j of w[c,j] * u[p + r + j + 1 - taps, c] + bias[c])
//! (* scale[r,c]), where u = x (* gate), and p is the pass's first position.
//!
//! x, gate, scale, y: [rows, n]; w: [n, taps], of at most [`MAX_TAPS`]; bias: [n]; state: [taps - 1, n] f32, the last
//! rows of u that earlier passes had, the oldest first: zeros, whatever it holds, before position 0. f32 accumulation,
//! in the order of j.
//!
//! (Qwen3.5's linear attention has one before it, with silu; LFM2's layers are one, gated on both sides.)

#[cfg(not(target_arch = "nvptx64"))]
use super::linear::Activation;
use super::*;
use crate::arch::{memory, scalar::fma};
use crate::gpu::math::activate;

/// See the module head.
#[derive(Debug)]
pub struct CausalConv;

/// Parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    /// An [`Activation`].
    pub activation: u32,
}

/// Rows that a filter may reach over, its own one of them.
pub const MAX_TAPS: u32 = 16;

slots! {
    X: read "x",
    W: read "w",
    BIAS: optional "bias",
    GATE: optional "gate",
    SCALE: optional "scale",
    STATE: update "state",
    Y: write "y",
}

impl MacroKernel for CausalConv {
    const NAME: &'static str = "causal_conv";
    const SLOTS: &'static [Slot] = slot::ALL;
    type Params = Params;
    const FLAGGED: &'static [usize] = &[slot::X, slot::GATE, slot::SCALE, slot::Y];

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(p: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [x, w, bias, gate, scale, state, y] = io else { unreachable!("slots were counted") };
        let ([rows, n, ..], taps) = (x.extent, w.extent[1]);
        if Activation::from_u32(p.activation).is_none() {
            return Err(format!("activation {} is unknown", p.activation));
        }
        if !(2..=MAX_TAPS).contains(&taps) {
            return Err(format!("`w` has {taps} taps, expected 2 to {MAX_TAPS}"));
        }
        for (name, operand) in [("x", x), ("gate", gate), ("scale", scale), ("y", y)] {
            rules::dtype(name, operand, &rules::FLOATS)?;
            rules::rank(name, operand, 2)?;
            rules::unit_stride(name, operand)?;
            rules::extent(name, operand, 0, rows)?;
            rules::extent(name, operand, 1, n)?;
        }
        for (name, operand, rank) in [("w", w, 2), ("bias", bias, 1)] {
            rules::dtype(name, operand, &rules::FLOATS)?;
            rules::rank(name, operand, rank)?;
            rules::unit_stride(name, operand)?;
            rules::extent(name, operand, 0, n)?;
        }
        rules::dtype("state", state, &[perpetua_shared::DType::F32])?;
        rules::rank("state", state, 2)?;
        rules::unit_stride("state", state)?;
        rules::extent("state", state, 0, taps - 1)?;
        rules::extent("state", state, 1, n)?;
        rules::flagged_in(&[("x", x), ("gate", gate), ("scale", scale), ("y", y)], rows)
    }

    fn cost(_: &Params, io: &[Operand]) -> Cost {
        let cost = default_cost(Self::SLOTS, io);
        let [x, w, ..] = io else { return cost };
        Cost { flops: product([2, x.len_elems(), w.extent[1].into()]), ..cost }
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(p: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [x, w, bias, gate, scale, state, y] = core::array::from_fn(|i| call.tensor(i));
        let (rows, taps) = (call.rows(slot::X), w.extent(1));
        let activation = Activation::from_u32(p.activation).unwrap_or(Activation::None);
        let before = taps - 1;
        for c in 0..x.extent(1) {
            let known = (0..before).map(|j| if call.step.first_pos == 0 { 0.0 } else { state.get([j, c]) });
            let new = (0..rows).map(|r| x.get([r, c]) * if gate.is_present() { gate.get([r, c]) } else { 1.0 });
            let u: Vec<f32> = known.chain(new).collect();
            for r in 0..rows {
                let sum: f32 = (0..taps).map(|j| w.get([c, j]) * u[r + j]).sum();
                let made = activation.apply(sum + if bias.is_present() { bias.get([c]) } else { 0.0 });
                y.set([r, c], made * if scale.is_present() { scale.get([r, c]) } else { 1.0 });
            }
            // A pass without rows leaves what there is.
            if rows > 0 {
                (0..before).for_each(|j| state.set([j, c], u[rows + j]));
            }
        }
        Ok(())
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn cpu(p: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
        let [x, w, bias, gate, scale, state, y] = core::array::from_fn(|i| call.tensor(i));
        let activation = Activation::from_u32(p.activation).unwrap_or(Activation::None);
        let (rows, is_first, isa) = (call.rows(slot::X), call.step.first_pos == 0, scratch.isa);
        isa.run(crate::cpu::recurrent::CausalConv {
            rows,
            is_first,
            activation,
            x,
            w,
            bias,
            gate,
            scale,
            state,
            y,
            scratch,
        });
        Ok(())
    }

    unsafe fn gpu(p: &Params, call: &gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        // SAFETY: the operands are the slots' and every index is below its extent. A thread reads of the state, and of
        // u's rows, what it wants, and none is written before all threads are here; then a thread has whole columns of
        // the state.
        unsafe {
            // Found here, not kept over all the other kernels of a worker.
            let block = &Block { thread: memory::opaque_word(block.thread), ..*block };
            let x = call.tensor(slot::X);
            let (rows, n, is_first) = (call.rows(&x), x.extent(1), call.first_pos() == 0);
            let before = call.tensor(slot::W).extent(1) - 1;
            // Of row `at` - (taps - 1) of the pass, or of those before it.
            let u = |at: u32, c: u32| {
                if at < before {
                    return if is_first { 0.0 } else { call.tensor(slot::STATE).get([at, c]) };
                }
                let one = |slot: usize| {
                    let tensor = call.tensor(slot);
                    let [value] = call.gather(slot, &tensor.row([at - before]), [c]);
                    value
                };
                let value = one(slot::X);
                if call.tensor(slot::GATE).is_present() { value * one(slot::GATE) } else { value }
            };
            for item in block.mine(rows * n) {
                let (r, c) = (item / n, item % n);
                let w = call.tensor(slot::W).row([c]);
                let (mut sum, mut j) = (0.0, 0);
                while j <= before {
                    sum = fma(w.get(j), u(r + j, c), sum);
                    j += 1;
                }
                let bias = call.tensor(slot::BIAS);
                if bias.is_present() {
                    sum += bias.get([c]);
                }
                let mut made = activate(p.activation, sum);
                let scale = call.tensor(slot::SCALE);
                if scale.is_present() {
                    let [by] = call.gather(slot::SCALE, &scale.row([r]), [c]);
                    made *= by;
                }
                call.put(&call.tensor(slot::Y), [r, c], made);
            }
            block.sync();
            if rows > 0 {
                let state = call.tensor(slot::STATE);
                for c in block.mine(n) {
                    // In its own place: what moves comes from behind.
                    for j in 0..before {
                        state.set([j, c], u(rows + j, c));
                    }
                }
            }
        }
        Ok(())
    }
}
