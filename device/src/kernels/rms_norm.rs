//! y[r,:] = (x[r,:] * rsqrt(mean(x[r,:]^2) + eps) * w (+ residual[r,:])) (* scale). x, y, residual: [rows, hidden]; w:
//! [hidden]; scale: [1]; f32 accumulation. Moves 2*rows*hidden + hidden elements, and rows*hidden of a residual. With
//! `weights`, [hidden], what a product after another norm reads, too: `weighted`, [rows, hidden], and `squares`, [rows,
//! 1], as [`linear`](super::linear) has them.

use super::*;
use crate::arch::{WARP, each_of_four, memory, scalar::fma, warp};
use crate::gpu::math::rsqrt;

/// Elements that a warp has under way: four eights a lane.
const AT_ONCE: u32 = 4 * 8 * WARP;

/// Elements of a row that the threads of a block have under way.
#[cfg(not(target_arch = "nvptx64"))]
const MOST_FLAGGED: u32 = 4 * 8 * perpetua_shared::launch::TASK_THREADS;

/// `sum` and the squares of `eight`, which stays in registers: nothing finds its elements by a number.
fn squares_of([a, b, c, d, e, f, g, h]: [f32; 8], sum: f32) -> f32 {
    let of = |x: f32, sum: f32| fma(x, x, sum);
    of(h, of(g, of(f, of(e, of(d, of(c, of(b, of(a, sum))))))))
}

/// `eight` and `more`, one by one.
fn sum_of([a, b, c, d, e, f, g, h]: [f32; 8], more: [f32; 8]) -> [f32; 8] {
    [a + more[0], b + more[1], c + more[2], d + more[3], e + more[4], f + more[5], g + more[6], h + more[7]]
}

/// The only row there is, of `n` elements: all threads', each of which has four eights of it in registers. What it is
/// added to is there long before it, so that is asked for first.
///
/// # Safety
/// As [`MacroKernel::gpu`]; the block has as many threads.
unsafe fn alone(p: &Params, call: &gpu::Call<'_>, block: &Block, n: u32) {
    let at = |c: u32| 8 * (block.thread + c * block.threads);
    let places = [at(0), at(1), at(2), at(3)];
    // SAFETY: the caller's promises; a thread reads and writes its own columns.
    unsafe {
        let (residual, y) = (call.tensor(slot::RESIDUAL), call.tensor(slot::Y));
        let mut more = [[0.0; 8]; 4];
        if residual.is_present() {
            more = call.eights(slot::RESIDUAL, &residual.row([0]), places, n);
        }
        let of_all = of_all(call);
        let weights = call.tensor(slot::W).row([]).eights(places, n);
        let values = call.eights(slot::X, &call.tensor(slot::X).row([0]), places, n);
        let mut squares = 0.0;
        each_of_four!(c => squares = squares_of(values[c], squares));
        let scale = rsqrt(block.sum(squares) / n as f32 + p.eps);
        let y_row = y.row([0]);
        each_of_four!(c => {
            let of = sum_of(scaled(values[c], scale, weights[c]), more[c]).map(|x| x * of_all);
            call.put_eight(&y, &y_row, places[c], n, of);
        });
    }
}

/// What all of y is multiplied with.
///
/// # Safety
/// As [`MacroKernel::gpu`].
unsafe fn of_all(call: &gpu::Call<'_>) -> f32 {
    // SAFETY: it is the operand's only element.
    unsafe {
        let scale = call.tensor(slot::SCALE);
        if scale.is_present() { scale.get([0]) } else { 1.0 }
    }
}

/// `eight`, each times `scale` and its weight.
fn scaled([a, b, c, d, e, f, g, h]: [f32; 8], scale: f32, w: [f32; 8]) -> [f32; 8] {
    let of = |x: f32, w: f32| x * scale * w;
    [of(a, w[0]), of(b, w[1]), of(c, w[2]), of(d, w[3]), of(e, w[4]), of(f, w[5]), of(g, w[6]), of(h, w[7])]
}

/// See the module head.
#[derive(Debug)]
pub struct RmsNorm;

/// Parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    /// Added to the mean square.
    pub eps: f32,
}

/// Row `r` of `x`, normalised if `norm` is present: by these weights or, where they are in x already (`is_weighted`),
/// by the sums of squares of its parts.
#[cfg(not(target_arch = "nvptx64"))]
pub(super) fn row(x: &crate::io::Tensor, r: usize, norm: &crate::io::Tensor, eps: f32, is_weighted: bool) -> Vec<f32> {
    let mut row: Vec<f32> = (0..x.extent(1)).map(|c| x.get([r, c])).collect();
    if is_weighted {
        let squares: f32 = (0..norm.extent(1)).map(|part| norm.get([r, part])).sum();
        let scale = 1.0 / (squares / row.len() as f32 + eps).sqrt();
        row.iter_mut().for_each(|x| *x *= scale);
    } else if norm.is_present() {
        let weights = norm;
        let squares: f32 = row.iter().map(|x| x * x).sum();
        let scale = 1.0 / (squares / row.len() as f32 + eps).sqrt();
        row.iter_mut().enumerate().for_each(|(c, x)| *x = *x * scale * weights.get([c]));
    }
    row
}

slots! {
    X: read "x",
    W: read "w",
    Y: write "y",
    RESIDUAL: optional "residual",
    WEIGHTS: optional "weights",
    WEIGHTED: optional_write "weighted",
    SQUARES: optional_write "squares",
    SCALE: optional "scale",
}

impl MacroKernel for RmsNorm {
    const NAME: &'static str = "rms_norm";
    const SLOTS: &'static [Slot] = slot::ALL;
    type Params = Params;
    const FLAGGED: &'static [usize] = &[slot::X, slot::Y, slot::RESIDUAL];

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(_: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [x, w, y, residual, weights, weighted, squares, scale] = io else { unreachable!("slots were counted") };
        for (name, operand, rank) in
            [("x", x, 2), ("w", w, 1), ("y", y, 2), ("residual", residual, 2), ("scale", scale, 1)]
        {
            rules::dtype(name, operand, &rules::FLOATS)?;
            rules::rank(name, operand, rank)?;
            rules::unit_stride(name, operand)?;
        }
        rules::extent("w", w, 0, x.extent[1])?;
        rules::extent("scale", scale, 0, 1)?;
        if scale.is_present() && !residual.is_present() {
            return Err("`scale` is present without `residual`, expected it in the weights then".to_owned());
        }
        for (name, operand) in [("y", y), ("residual", residual)] {
            rules::extent(name, operand, 0, x.extent[0])?;
            rules::extent(name, operand, 1, x.extent[1])?;
        }
        for (name, operand) in [("x", x), ("y", y), ("residual", residual)] {
            let [rows, n, ..] = operand.extent;
            let are_eights = n.is_multiple_of(8) && operand.offset_bytes.is_multiple_of(16);
            if operand.is_flagged != 0 && (rows != 1 || n > MOST_FLAGGED || !are_eights) {
                return Err(format!(
                    "`{name}` is {rows} x {n} and flagged, expected one row of at most {MOST_FLAGGED}, of eights, then"
                ));
            }
        }
        match [weights, weighted, squares].map(Operand::is_present) {
            [false, false, false] => Ok(()),
            [true, true, true] => rules::weighted(y, [weights, weighted], ("squares", squares)),
            are_present => {
                Err(format!("of `weights`, `weighted` and `squares` {are_present:?} are present, expected all or none"))
            }
        }
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(p: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [x, w, y, residual, weights, weighted, squares, scale] = core::array::from_fn(|i| call.tensor(i));
        let of_all = if scale.is_present() { scale.get([0]) } else { 1.0 };
        for r in 0..call.rows(slot::X) {
            let mut sum = 0.0;
            for (c, value) in row(&x, r, &w, p.eps, false).into_iter().enumerate() {
                let value = if residual.is_present() { value + residual.get([r, c]) } else { value } * of_all;
                y.set([r, c], value);
                if weighted.is_present() {
                    weighted.set([r, c], value * weights.get([c]));
                    sum += value * value;
                }
            }
            if weighted.is_present() {
                squares.set([r, 0], sum);
            }
        }
        Ok(())
    }

    unsafe fn gpu(p: &Params, call: &gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        // SAFETY: the operands are the slots' and every index is below its extent; a lane reads and writes its own
        // columns, so `y` may be `x`; a warp has its rows whole, so that all its lanes add up together, or the block
        // has the only one.
        unsafe {
            // Found here, not kept over all the other kernels of a worker.
            let block = &Block { thread: memory::opaque_word(block.thread), ..*block };
            let (rows, n) = (call.rows(&call.tensor(slot::X)), call.tensor(slot::X).extent(1));
            let is_alone = rows == 1 && !call.tensor(slot::WEIGHTED).is_present();
            if is_alone && n <= 4 * 8 * block.threads {
                alone(p, call, block, n);
                return Ok(());
            }
            let at = |first: u32| {
                let at = first + 8 * block.lane();
                [at, at + 8 * WARP, at + 16 * WARP, at + 24 * WARP]
            };
            let mut r = block.warp();
            while r < rows {
                let (x, y, residual) =
                    (call.tensor(slot::X).row([r]), call.tensor(slot::Y).row([r]), call.tensor(slot::RESIDUAL));
                let w = call.tensor(slot::W).row([]);
                let (mut first, mut squares) = (0, 0.0);
                let mut values = x.eights(at(0), n);
                loop {
                    each_of_four!(c => squares = squares_of(values[c], squares));
                    if first + AT_ONCE >= n {
                        break;
                    }
                    first += AT_ONCE;
                    values = x.eights(at(first), n);
                }
                // Backwards, from the elements that are there.
                let mut weights = w.eights(at(first), n);
                let scale = rsqrt(warp::sum(squares) / n as f32 + p.eps);
                let of_all = of_all(call);
                let mut squares_of_y = 0.0;
                loop {
                    let places = at(first);
                    each_of_four!(c => values[c] = scaled(values[c], scale, weights[c]));
                    if residual.is_present() {
                        let more = residual.row([r]).eights(places, n);
                        each_of_four!(c => values[c] = sum_of(values[c], more[c]));
                    }
                    each_of_four!(c => values[c] = values[c].map(|x| x * of_all));
                    each_of_four!(c => y.set_eight(places[c], n, values[c]));
                    let weighted = call.tensor(slot::WEIGHTED);
                    if weighted.is_present() {
                        let weights = call.tensor(slot::WEIGHTS).row([]).eights(places, n);
                        let weighted = weighted.row([r]);
                        each_of_four!(c => squares_of_y = squares_of(values[c], squares_of_y));
                        each_of_four!(c => weighted.set_eight(places[c], n, scaled(values[c], 1.0, weights[c])));
                    }
                    if first == 0 {
                        break;
                    }
                    first -= AT_ONCE;
                    (values, weights) = (x.eights(at(first), n), w.eights(at(first), n));
                }
                let squares = call.tensor(slot::SQUARES);
                if squares.is_present() {
                    let sum = warp::sum(squares_of_y);
                    if block.lane() == 0 {
                        squares.set([r, 0], sum);
                    }
                }
                r += block.warps();
            }
        }
        Ok(())
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn cpu(p: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
        let [x, w, y, residual, _, weighted, _, scale] = core::array::from_fn(|i| call.tensor(i));
        if weighted.is_present() {
            return Self::reference(p, call);
        }
        let scale = if scale.is_present() { scale.get([0]) } else { 1.0 };
        scratch.isa.run(crate::cpu::rowwise::RmsNorm {
            rows: call.rows(slot::X),
            eps: p.eps,
            x,
            residual,
            w,
            scale,
            y,
        });
        Ok(())
    }
}
