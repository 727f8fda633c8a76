//! y[r,h,:] = norm(x[r,h,:]) * f(gate[r,h,:]), or norm(x[r,h,:] * f(gate[r,h,:])), f the sigmoid, or silu, and norm(x)
//! = x * rsqrt(mean(x^2) + eps) * w. x, y: [rows, heads, d]; gate: the same, or [rows, heads, 1], one for all elements
//! of a head; w: [d], without which nothing is normalised; f32 accumulation. What an attention makes, head by head,
//! before it goes on.

use super::*;
use crate::arch::{WARP, memory, scalar, warp};
use crate::gpu::math::{exp, reciprocal, rsqrt};

/// See the module head.
#[derive(Debug)]
pub struct Gated;

/// Parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    /// Added to the mean square.
    pub eps: f32,
    /// 1: f(x) = x * sigmoid(x); 0: f(x) = sigmoid(x).
    pub is_silu: u32,
    /// 1: it is the gated row that is normalised.
    pub gates_first: u32,
}

impl Params {
    /// f.
    #[cfg(not(target_arch = "nvptx64"))]
    fn opened(&self, by: f32) -> f32 {
        if self.is_silu == 1 { by / (1.0 + (-by).exp()) } else { 1.0 / (1.0 + (-by).exp()) }
    }
}

slots! {
    X: read "x",
    W: optional "w",
    GATE: read "gate",
    Y: write "y",
}

impl MacroKernel for Gated {
    const NAME: &'static str = "gated";
    const SLOTS: &'static [Slot] = slot::ALL;
    type Params = Params;
    const FLAGGED: &'static [usize] = &[slot::X, slot::GATE, slot::Y];

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(p: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [x, w, gate, y] = io else { unreachable!("slots were counted") };
        if p.is_silu > 1 || p.gates_first > 1 {
            return Err(format!(
                "`is_silu` and `gates_first` are {} and {}, expected 0 or 1",
                p.is_silu, p.gates_first
            ));
        }
        for (name, operand) in [("x", x), ("gate", gate), ("y", y)] {
            rules::dtype(name, operand, &rules::FLOATS)?;
            rules::rank(name, operand, 3)?;
            rules::unit_stride(name, operand)?;
            for dim in 0..2 {
                rules::extent(name, operand, dim, x.extent[dim])?;
            }
        }
        rules::extent("y", y, 2, x.extent[2])?;
        if gate.extent[2] != 1 {
            rules::extent("gate", gate, 2, x.extent[2])?;
        }
        rules::dtype("w", w, &rules::FLOATS)?;
        rules::rank("w", w, 1)?;
        rules::unit_stride("w", w)?;
        rules::extent("w", w, 0, x.extent[2])?;
        rules::flagged_in(&[("x", x), ("gate", gate), ("y", y)], x.extent[0])
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(p: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [x, w, gate, y] = core::array::from_fn(|i| call.tensor(i));
        let (heads, d) = (x.extent(1), x.extent(2));
        for (r, h) in (0..call.rows(slot::X)).flat_map(|r| (0..heads).map(move |h| (r, h))) {
            let opened = |i: usize| p.opened(gate.get([r, h, if gate.extent(2) == 1 { 0 } else { i }]));
            let normed = |i: usize| x.get([r, h, i]) * if p.gates_first == 1 { opened(i) } else { 1.0 };
            let squares: f32 = (0..d).map(|i| normed(i).powi(2)).sum();
            let scale = 1.0 / (squares / d as f32 + p.eps).sqrt();
            for i in 0..d {
                let by = if w.is_present() { scale * w.get([i]) } else { 1.0 };
                y.set([r, h, i], x.get([r, h, i]) * opened(i) * by);
            }
        }
        Ok(())
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn cpu(p: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
        let [x, w, gate, y] = core::array::from_fn(|i| call.tensor(i));
        scratch.isa.run(crate::cpu::recurrent::Gated { rows: call.rows(slot::X), params: *p, x, w, gate, y });
        Ok(())
    }

    unsafe fn gpu(p: &Params, call: &gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        // SAFETY: the operands are the slots' and every index is below its extent; a warp has a head, or the block has
        // the only one, and a thread its own elements of it.
        unsafe {
            // Found here, not kept over all the other kernels of a worker.
            let block = &Block { thread: memory::opaque_word(block.thread), ..*block };
            let x = call.tensor(slot::X);
            let (rows, heads, d) = (call.rows(&x), x.extent(1), x.extent(2));
            let is_alone = rows * heads == 1;
            let (own, threads) = if is_alone { (block.thread, block.threads) } else { (block.lane(), WARP) };
            let places = |first: u32| {
                let at = first + 4 * own;
                [0, 1, 2, 3].map(|i| if at + i < d { at + i } else { d - 1 })
            };
            let is_one = call.tensor(slot::GATE).extent(2) == 1;
            let opened = |head: [u32; 2], at: [u32; 4]| {
                let by = call.gather(
                    slot::GATE,
                    &call.tensor(slot::GATE).row(head),
                    at.map(|at| if is_one { 0 } else { at }),
                );
                by.map(|by| {
                    let sigmoid = scalar::reciprocal(1.0 + exp(-by));
                    if p.is_silu == 1 { by * sigmoid } else { sigmoid }
                })
            };
            let mut item = if is_alone { 0 } else { block.warp() };
            while item < rows * heads {
                let head = [item / heads, item % heads];
                let row_of = |slot: usize| call.tensor(slot).row(head);
                let mut scale = 1.0;
                if call.tensor(slot::W).is_present() {
                    let (mut squares, mut first) = (0.0, 0);
                    while first < d {
                        let mut four = call.gather(slot::X, &row_of(slot::X), places(first));
                        if p.gates_first == 1 {
                            let by = opened(head, places(first));
                            for i in 0..4 {
                                four[i] *= by[i];
                            }
                        }
                        for i in 0..4 {
                            let is_there = first + 4 * own + (i as u32) < d;
                            squares += if is_there { four[i] * four[i] } else { 0.0 };
                        }
                        first += 4 * threads;
                    }
                    // One answer for the whole block.
                    let sum = if is_alone { block.sum(squares) } else { warp::sum(squares) };
                    scale = rsqrt(sum * reciprocal(d) + p.eps);
                }
                let mut first = 0;
                while first < d {
                    let at = places(first);
                    let mut four = call.gather(slot::X, &row_of(slot::X), at);
                    let by = opened(head, at);
                    if call.tensor(slot::W).is_present() {
                        let weights = call.tensor(slot::W).row([]).gather(at);
                        for i in 0..4 {
                            four[i] *= scale * weights[i];
                        }
                    }
                    let y = call.tensor(slot::Y);
                    let row = y.row(head);
                    for i in 0..4 {
                        let mine = first + 4 * own + i as u32;
                        if mine < d {
                            call.put_in_row(&y, &row, mine, four[i] * by[i]);
                        }
                    }
                    first += 4 * threads;
                }
                item += block.warps();
            }
        }
        Ok(())
    }
}
