//! A task of one row whose weights come in tiles: `linear`'s and `gated_linear`'s in one body, whether the row is
//! normalised, merged or as it is, so that an SM fetches the code for a layer's products once (`docs/cycles.md`).

use super::super::flags::unmarked;
use super::super::math::{activate, reciprocal, rsqrt, silu};
use super::super::tiles::Tiles;
use super::super::{Call, Row, Tensor, turn};
use super::taken::Taken;
use super::terms::{self, First, Norm, TERMS};
use super::{Form, Kind, SQUARES, products, room};
use crate::arch::{atomic, memory, shared, warp};
use crate::block::{Block, Candidate};
use crate::kernels::attention_merge::{Merge, Parts};
use crate::kernels::linear::{Activation, slot};
use crate::kernels::{argmax, gated_linear, linear, params};
#[cfg(not(target_arch = "nvptx64"))]
use crate::{
    gpu::F32,
    kernels::attention::FOUND,
    kernels::attention_merge::are_in_eights,
    kernels::{GatedLinear, Linear, Numbered},
};
use core::hint::cold_path;
use perpetua_shared::divisor::Divisor;
use perpetua_shared::{Fault, Technique};
#[cfg(not(target_arch = "nvptx64"))]
use perpetua_shared::{Operand, TaskDesc};

/// Such a task, as it is known when it runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    kind: Kind,
    of: Of,
    /// See [`Taken::per_row`].
    per_row: u32,
    /// Where the row is to be merged, what for.
    merge: Merge,
}

/// What is multiplied with what.
#[derive(Clone, Copy, Debug)]
struct Of {
    /// Two matrices of weights: `gated_linear`'s. Else `linear`'s one.
    two: bool,
    /// The row is what the splits of an attention found, to be [merged](crate::kernels::attention_merge).
    merges: bool,
}

impl Of {
    /// How many matrices there are.
    fn matrices(self) -> u32 {
        1 + u32::from(self.two)
    }

    /// The operand that is one or the other kernel's: computed, since a choice of two places would branch.
    fn slot(self, linear: usize, gated: usize) -> usize {
        linear.wrapping_add(usize::from(self.two).wrapping_mul(gated.wrapping_sub(linear)))
    }

    fn norm(self) -> usize {
        self.slot(slot::NORM, gated_linear::slot::NORM)
    }
}

impl Product {
    /// What a record says of such a task ([`Turn::known`](perpetua_shared::Turn::known)): one more than its kind, in
    /// the lowest three bits, and [what it is of](Of), then what it divides by. Zeros, if `task`, whose `operands` have
    /// addresses, is none.
    #[cfg(not(target_arch = "nvptx64"))]
    pub(crate) fn known(task: &TaskDesc, operands: &[Operand], is_aligned: impl Fn(&Operand) -> bool) -> [u32; 4] {
        let two = task.task_type == GatedLinear::TASK_TYPE;
        if task.tiles == 0 || !two && task.task_type != Linear::TASK_TYPE {
            return [0; 4];
        }
        let p = params::<linear::Params>(&task.params);
        let of = Of { two, merges: !two && p.merges != 0 };
        let is_weighted = if two { params::<gated_linear::Params>(&task.params).is_weighted } else { p.is_weighted };
        let [x, w, norm, up] =
            [slot::X, slot::W, of.norm(), of.slot(slot::W, gated_linear::slot::UP)].map(|i| operands[i]);
        let Some(kind) = Kind::of(w.dtype) else { return [0; 4] };
        let [columns, k, ..] = w.extent;
        // Rows longer than a tile are more tiles than there are rows.
        let are_whole = task.tiles <= u32::from(norm.is_present()) + of.matrices() * columns;
        let fits = by_form!(kind, F => k.is_multiple_of(F::ROW_MULTIPLE) && k <= F::LONGEST);
        let is_row = if of.merges {
            let [a, b, c, _] = x.stride_elems;
            are_in_eights([a, b, c], x.extent[3])
        } else {
            x.dtype == F32
        };
        if up.dtype != w.dtype || !are_whole || !fits || !is_row || !is_aligned(&x) || is_weighted != 0 {
            return [0; 4];
        }
        let Merge([d, group]) = if of.merges { Merge::new(x.extent[3] - FOUND, x.extent[2]) } else { Merge::NONE };
        let bits = [(of.two, Self::TWO), (of.merges, Self::MERGES), (x.extent[0] == 1, Self::ONE)];
        let form = 1 + kind as u32 + bits.map(|(is_so, bit)| u32::from(is_so) * bit).iter().sum::<u32>();
        [form, by_form!(kind, F => Taken::per_row(F::row_bytes(k))), d.0, group.0]
    }

    // Beside the kind in its word.
    const TWO: u32 = 8;
    const MERGES: u32 = 16;
    /// The task has no other row.
    const ONE: u32 = 32;

    /// The task of `call`, if it is such, in a pass of one row. One question, since each is waited for.
    pub(crate) fn of(call: &Call<'_>) -> Option<Product> {
        let [form, per_row, d, group] = turn::known();
        let of = Of { two: form & Self::TWO != 0, merges: form & Self::MERGES != 0 };
        let rows = call.pass_rows().saturating_sub(call.row_first());
        let is_row = of.merges | (rows == 1) | ((rows != 0) & (form & Self::ONE != 0));
        // None are left where nobody brings tiles.
        let left = call.tiles.map_or(0, Tiles::left);
        let kind = Kind::numbered((form % 8).wrapping_sub(1));
        ((form % 8 != 0) & is_row & (left != 0) & call.uses(Technique::ThinProducts)).then_some(Product {
            kind,
            of,
            per_row,
            merge: Merge([Divisor(d), Divisor(group)]),
        })
    }

    /// Runs it. What it can it does before `ready`.
    ///
    /// # Safety
    /// Every thread of the block makes this same call, and the tiles are those of a plan for this task.
    ///
    /// # Errors
    /// Those of `ready`.
    pub(crate) unsafe fn run(
        self,
        call: &Call<'_>,
        block: &Block,
        ready: impl Fn() -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        // SAFETY: the caller's promise.
        unsafe { by_form!(self.kind, F => run::<F>(call, self, block, ready)) }
    }
}

/// A product of weights in form `F`.
///
/// # Safety
/// As [`Product::run`].
///
/// # Errors
/// Those of `ready`.
unsafe fn run<F: Form>(
    call: &Call<'_>,
    Product { of, per_row, merge, .. }: Product,
    block: &Block,
    ready: impl Fn() -> Result<(), Fault>,
) -> Result<(), Fault> {
    // SAFETY: the caller's promises. All conditions but those around what a lane keeps depend on the task alone. A warp
    // writes its own sums, which others read between two barriers; lanes of rows that are not there read weights of
    // others.
    unsafe {
        let Some(tiles) = call.tiles else { return Ok(()) };
        let (columns, k) = (call.tensor(slot::W).extent(0), call.tensor(slot::W).extent(1));
        let oldest = tiles.next();
        let norm = Norm::take(tiles, &call.tensor(of.norm()));
        // All that no other task has a part in, so that it is not behind the row: what outputs are made of, and the
        // first tiles' places.
        let outputs = Outputs::new(call, of);
        let eps = params::<linear::Params>(&call.params()).eps;
        let (share, matrices) = (reciprocal(k), of.matrices());
        // Where a warp keeps its sums, of how many rows of each matrix at most, and of how many at a time.
        let (warps, second) = (block.warps(), u32::from(of.two));
        let (squares_at, parts) = (TERMS + F::words(k), TERMS + F::words(k) + SQUARES);
        let pitch = room(parts, warps);
        let own = memory::opaque_word(parts + block.warp() * pitch);
        let (most, per) = (memory::opaque_word(pitch >> second), 16 >> second);
        let mut taken = Taken::none(per_row, matrices);
        taken.take(tiles);
        let outcome = ready();
        if outcome.is_err() {
            cold_path();
            tiles.release_some(oldest, tiles.next().wrapping_sub(oldest));
            return outcome;
        }
        // PERF: asked for before the row is staged, since machine code waits for it where the products begin.
        let early = if block.thread < columns { outputs.ask(block.thread) } else { 0 };
        let squares = if of.merges {
            terms::stage::<F, _>(&Parts::new(call, merge), &norm, k, block)
        } else {
            terms::stage::<F, _>(&First { call, x: call.tensor(slot::X) }, &norm, k, block)
        };
        norm.release(tiles);
        let is_normed = norm.is_present();
        if is_normed {
            let squares = warp::sum(squares);
            if block.lane() == 0 {
                shared::store(squares_at + block.warp(), squares.to_bits());
            }
        }
        // Where a lane finds its two rows of weights: of one matrix the second is eight further on, of two it is the
        // other's.
        let (g, t) = (block.lane() / 4, block.lane() % 4);
        let row = |i: u32| if of.two { g } else { g + 8 * i };
        let place = |taken: &Taken, i: u32, row: u32| {
            taken.at(if of.two { i } else { 0 }) + row * F::row_bytes(k) + F::lane_at(block)
        };
        // The first row whose sums are kept, and how many are.
        let (mut first, mut kept) = (0, 0);
        let mut best = Candidate::NONE;
        loop {
            // One question, since each is waited for.
            while ((taken.done < taken.rows) | (tiles.left() >= matrices)) & (kept + per <= most) {
                let oldest = taken.oldest(tiles);
                if taken.done == taken.rows {
                    taken.take(tiles);
                }
                let mut here = per.min(taken.rows - taken.done);
                let mut at = [0; 2];
                for i in 0..2 {
                    at[i as usize] = place(&taken, i, taken.done + row(i).min(here - 1));
                }
                taken.done += here;
                // What these leave empty the next tiles fill, for which those before need not be released
                // (`DataOp::after`).
                if here < per && tiles.left() >= matrices {
                    taken.take(tiles);
                    taken.done = taken.rows.min(per - here);
                    for i in 0..2 {
                        if row(i) >= here {
                            at[i as usize] = place(&taken, i, (row(i) - here).min(taken.done - 1));
                        }
                    }
                    here += taken.done;
                }
                let sums = if of.two || here > 8 {
                    products::<F, true>(at, k, block)
                } else {
                    products::<F, false>(at, k, block)
                };
                if t == g % 2 * F::swap(k) {
                    for i in 0..2 {
                        if row(i) < here {
                            let to = if of.two { 2 * g + i } else { row(i) };
                            shared::store(own + kept * matrices + to, sums[i as usize].to_bits());
                        }
                    }
                }
                kept += here;
                taken.release(tiles, oldest);
            }
            block.sync();
            // 1 / root of the mean square, which all of the row has a part in: so every product is multiplied with it,
            // and none waits.
            let mut scale = 1.0;
            if is_normed {
                let mut total = 0.0;
                for warp in 0..warps {
                    total += f32::from_bits(shared::load(squares_at + warp));
                }
                scale = rsqrt(total * share + eps);
            }
            for at in block.mine(kept) {
                // The sums of one matrix, or of the first and then of the second.
                let (mut before, mut sum) = (0.0, 0.0);
                let mut i = 0;
                while i < matrices {
                    before = sum;
                    sum = 0.0;
                    for warp in 0..warps {
                        sum += f32::from_bits(shared::load(parts + warp * pitch + at * matrices + i));
                    }
                    sum *= scale;
                    i += 1;
                }
                let n = first + at;
                let asked = if n == block.thread { early } else { outputs.ask(n) };
                let value = outputs.finish(n, if of.two { [before, sum] } else { [sum, 0.0] }, asked);
                // Always: to ask first would take longer.
                best = best.better(Candidate { value, index: n });
            }
            first += kept;
            if taken.done == taken.rows && tiles.left() < matrices {
                break;
            }
            kept = 0;
            block.sync();
        }
        if !of.two && call.tensor(slot::INDICES).is_present() {
            let best = block.best(best);
            if block.thread == 0 {
                let place = params::<linear::Params>(&call.params()).best;
                argmax::put(&place, best, call.block::<0>(), [call.tensor(slot::VALUES), call.tensor(slot::INDICES)]);
            }
        }
        Ok(())
    }
}

/// Where sums become outputs: found out before the row is there.
struct Outputs<'a> {
    call: &'a Call<'a>,
    of: Of,
    activation: u32,
    /// What is added to a sum, of the first matrix and of the second. Rows of no type are not there: no `Option`s,
    /// whose words would be nobody's on some ways, and so held in registers over all bodies.
    biases: [Row; 2],
    /// What is added at last; and whether it is flagged.
    residual: Row,
    is_told: bool,
    y: Tensor,
    row: Row,
    /// Whether outputs are as most models have them: flagged, without biases, SiLU in products of two matrices and no
    /// function in others.
    is_plain: bool,
}

impl<'a> Outputs<'a> {
    /// Those of the task.
    ///
    /// # Safety
    /// The operands are the kernel's.
    unsafe fn new(call: &'a Call<'a>, of: Of) -> Outputs<'a> {
        // SAFETY: the caller's promise.
        unsafe {
            let row_if = |is_there: bool, tensor: Tensor| if is_there { tensor.row([]) } else { Row::NONE };
            let bias = call.tensor(of.slot(slot::BIAS, gated_linear::slot::GATE_BIAS));
            let (other, residual) = (call.tensor(gated_linear::slot::UP_BIAS), call.tensor(slot::RESIDUAL));
            let y = call.tensor(of.slot(slot::Y, gated_linear::slot::Y));
            let activation = params::<linear::Params>(&call.params()).activation;
            let has_biases = bias.is_present() | (of.two & other.is_present());
            let is_usual = activation == if of.two { Activation::Silu.number() } else { Activation::None.number() };
            Outputs {
                call,
                of,
                activation,
                is_plain: y.is_flagged() & !has_biases & is_usual,
                biases: [bias.row([]), row_if(of.two, other)],
                residual: row_if(!of.two, residual),
                is_told: residual.is_flagged(),
                row: y.row([]),
                y,
            }
        }
    }

    /// Asks for what is added to output `n`.
    ///
    /// # Safety
    /// There is such an output.
    unsafe fn ask(&self, n: u32) -> u32 {
        // SAFETY: the caller's promise; flagged elements are words that are only touched atomically.
        unsafe {
            match &self.residual {
                row if !row.is_present() => 0,
                row if self.is_told => atomic::load_relaxed(row.at(n).cast_const().cast()),
                row => {
                    cold_path();
                    row.get(n).to_bits()
                }
            }
        }
    }

    /// Writes output `n`, of which these are the sums, and to which is added what was [asked](Outputs::ask) for; and
    /// returns it.
    ///
    /// # Safety
    /// As [`ask`](Outputs::ask).
    unsafe fn finish(&self, n: u32, [sum, other]: [f32; 2], asked: u32) -> f32 {
        // SAFETY: the caller's promise; flagged elements are words that are only touched atomically.
        unsafe {
            // PERF: one question for most models' products, where those below are one after the other.
            let is_there = !self.is_told | (self.call.lacks(&asked) == 0);
            if self.is_plain & is_there {
                let [before] = if self.is_told { unmarked([asked]) } else { [f32::from_bits(asked)] };
                let value = if self.of.two { silu(sum) * other } else { sum + before };
                self.call.put_flagged(&self.row, n, value);
                return value;
            }
            cold_path();
            let with = |sum: f32, bias: &Row| {
                if bias.is_present() {
                    cold_path();
                    sum + bias.get(n)
                } else {
                    sum
                }
            };
            let first = activate(self.activation & !linear::MULTIPLIES, with(sum, &self.biases[0]));
            let value = if self.of.two {
                first * with(other, &self.biases[1])
            } else if self.is_told {
                let [before] = unmarked(self.call.there(slot::RESIDUAL, [asked], || [self.ask(n)]));
                linear::joined(self.activation, first, before)
            } else {
                linear::joined(self.activation, first, f32::from_bits(asked))
            };
            self.call.put_in_row(&self.y, &self.row, n, value);
            value
        }
    }
}

// Both have these parameters first.
const _: () = {
    use core::mem::offset_of;
    assert!(offset_of!(linear::Params, activation) == offset_of!(gated_linear::Params, activation));
    assert!(offset_of!(linear::Params, eps) == offset_of!(gated_linear::Params, eps));
};
