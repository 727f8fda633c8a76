//! Which experts a row goes to, and how much each counts: what [`ExpertsUp`](super::ExpertsUp) and
//! [`ExpertsDown`](super::ExpertsDown) find out of a row's logits, every task for itself, since that takes less than to
//! wait for one who would tell it.
//!
//! Chosen are the experts with the largest logits, ties to the lower number; or, where there is a correction,
//! `[experts]`, those whose logit's sigmoid and correction are the largest sum (DeepSeek-V3's way to even out how often
//! each is chosen). Slot 0 is the best one's. How much an expert counts its logit says, by itself or beside others:
//! [`Counting`]. Beside weightings that are not by sigmoids the correction corrects that: each expert's number there is
//! what it is multiplied with (Gemma 4's scales). (MPK: `MOE_TOPK_SOFTMAX`, `MOE_TOPK_SIGMOID`.)

use super::{Cost, MAX_NORMED, product, total};
#[cfg(not(target_arch = "nvptx64"))]
use super::{Violation, linear, rules};
use crate::arch::shared;
use crate::block::Block;
use crate::gpu::packed::{Eight, Four, LookedUp, Packed};
use crate::gpu::rows::STAGE;
use crate::gpu::tiles::prefetch_bytes;
use crate::gpu::{self, math::exp};
#[cfg(not(target_arch = "nvptx64"))]
use crate::{cpu::Scratch, io};
#[cfg(not(target_arch = "nvptx64"))]
use perpetua_shared::{DType, Fault, Step, TaskDesc};
use perpetua_shared::{Operand, Technique};

/// Experts of a layer: the GPU has their logits in shared memory.
pub const MAX_EXPERTS: u32 = 1024;

/// Experts a row goes to.
pub const MAX_CHOSEN: u32 = 32;

/// How much an expert counts that a row goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Weighting {
    /// Its part of the softmax over all experts' logits.
    All = 0,
    /// Its part of the softmax over those of the experts chosen.
    Chosen = 1,
    /// Its logit's sigmoid.
    Sigmoid = 2,
    /// Its part of the sum of those of the experts chosen.
    Sigmoids = 3,
}

impl Weighting {
    /// The one that is this number.
    pub const fn from_u32(number: u32) -> Option<Weighting> {
        match number {
            0 => Some(Weighting::All),
            1 => Some(Weighting::Chosen),
            2 => Some(Weighting::Sigmoid),
            3 => Some(Weighting::Sigmoids),
            _ => None,
        }
    }

    /// Whether it is by sigmoids, beside which a correction is added where experts are chosen.
    pub const fn is_of_sigmoids(self) -> bool {
        matches!(self, Weighting::Sigmoid | Weighting::Sigmoids)
    }
}

/// How much experts count, as a task's parameters have it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Counting {
    /// A [`Weighting`].
    pub weighting: u32,
    /// What all that is multiplied with.
    pub factor: f32,
    /// What is added to the sum that they are parts of, if they are of one.
    pub added: f32,
}

impl Counting {
    /// By `weighting` alone.
    pub const fn of(weighting: Weighting) -> Counting {
        Counting { weighting: weighting as u32, factor: 1.0, added: 0.0 }
    }

    /// Its weighting.
    pub(crate) fn weighting(self) -> Weighting {
        // `check` has seen that there is one.
        Weighting::from_u32(self.weighting).unwrap_or(Weighting::All)
    }

    /// What is read of `correction` for experts that are chosen alone, since it scales these.
    pub(crate) fn scales(self, correction: &Operand) -> &Operand {
        const ABSENT: Operand = Operand::ABSENT;
        if self.weighting().is_of_sigmoids() { &ABSENT } else { correction }
    }

    /// Judges it.
    #[cfg(not(target_arch = "nvptx64"))]
    pub(crate) fn check(self) -> Result<(), Violation> {
        match Weighting::from_u32(self.weighting) {
            Some(_) => Ok(()),
            None => Err(format!("weighting {} is unknown", self.weighting)),
        }
    }
}

/// Judges `logits`, `[rows, experts]`, of which rows go to `chosen`, and what corrects them, `[experts]`, if that is
/// present.
#[cfg(not(target_arch = "nvptx64"))]
pub(crate) fn check(logits: &Operand, correction: &Operand, rows: u32, chosen: u32) -> Result<(), Violation> {
    rules::dtype("logits", logits, &[DType::F32])?;
    rules::rank("logits", logits, 2)?;
    rules::unit_stride("logits", logits)?;
    rules::extent("logits", logits, 0, rows)?;
    rules::flagged_in(&[("logits", logits)], rows)?;
    let experts = logits.extent[1];
    if chosen == 0 || chosen > experts.min(MAX_CHOSEN) || experts > MAX_EXPERTS {
        return Err(format!(
            "{chosen} of {experts} experts, expected from 1 to {MAX_CHOSEN} of at most {MAX_EXPERTS}, and of those there are"
        ));
    }
    if correction.is_present() {
        rules::dtype("correction", correction, &rules::FLOATS)?;
        rules::rank("correction", correction, 1)?;
        rules::unit_stride("correction", correction)?;
        rules::extent("correction", correction, 0, experts)?;
    }
    Ok(())
}

/// Weights `[experts, n, k]`.
#[cfg(not(target_arch = "nvptx64"))]
pub(crate) fn weights(name: &str, operand: &Operand, experts: u32) -> Result<(), Violation> {
    rules::rank(name, operand, 3)?;
    rules::extent(name, operand, 0, experts)?;
    let [_, n, k, _] = operand.extent;
    let [_, stride, unit, _] = operand.stride_elems;
    rules::weights(name, &Operand { rank: 2, extent: [n, k, 1, 1], stride_elems: [stride, unit, 0, 0], ..*operand })
}

/// Biases of the columns that `weights` have, `[experts, n]`.
#[cfg(not(target_arch = "nvptx64"))]
pub(crate) fn bias(name: &str, operand: &Operand, weights: &Operand) -> Result<(), Violation> {
    rules::dtype(name, operand, &rules::FLOATS)?;
    rules::rank(name, operand, 2)?;
    rules::unit_stride(name, operand)?;
    rules::extent(name, operand, 0, weights.extent[0])?;
    rules::extent(name, operand, 1, weights.extent[1])
}

/// An expert that a row goes to.
#[cfg(not(target_arch = "nvptx64"))]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Chosen {
    pub(crate) expert: usize,
    /// What it was chosen for: the largest are.
    score: f32,
    /// Its logit.
    logit: f32,
    /// How much it counts.
    pub(crate) weight: f32,
}

/// What a row's experts are found out of.
#[cfg(not(target_arch = "nvptx64"))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Router {
    /// `[rows, experts]`.
    pub(crate) logits: io::Tensor,
    /// `[experts]`, if it is present.
    pub(crate) correction: io::Tensor,
    /// How much experts count.
    pub(crate) counting: Counting,
}

#[cfg(not(target_arch = "nvptx64"))]
impl Router {
    /// The experts that row `row` goes to, as many as `out` has slots. What is no number is less than any other.
    fn choose(&self, row: usize, out: &mut [Chosen]) {
        let sigmoid = |logit: f32| 1.0 / (1.0 + (-logit).exp());
        let all = self.logits.slice::<f32, 2>([row, 0], self.logits.extent(1));
        let weighting = self.counting.weighting();
        let has_correction = self.correction.is_present();
        let is_corrected = has_correction && weighting.is_of_sigmoids();
        let mut found = 0;
        for (expert, logit) in all.iter().enumerate() {
            let score = if is_corrected { sigmoid(*logit) + self.correction.get([expert]) } else { *logit };
            let score = if score.is_nan() { f32::NEG_INFINITY } else { score };
            // Slots before `at` hold what is no less.
            let mut at = found;
            while at > 0 && out[at - 1].score < score {
                at -= 1;
            }
            if at == out.len() {
                continue;
            }
            found = (found + 1).min(out.len());
            out[at..found].rotate_right(1);
            let logit = if logit.is_nan() { f32::NEG_INFINITY } else { *logit };
            out[at] = Chosen { expert, score, logit, weight: 0.0 };
        }
        let best = out[0].logit;
        let part = |logit: f32| if weighting.is_of_sigmoids() { sigmoid(logit) } else { (logit - best).exp() };
        let added = self.counting.added;
        let whole = match weighting {
            Weighting::All => all.iter().map(|logit| part(*logit)).sum::<f32>() + added,
            Weighting::Chosen | Weighting::Sigmoids => out.iter().map(|chosen| part(chosen.logit)).sum::<f32>() + added,
            Weighting::Sigmoid => 1.0,
        };
        for chosen in out {
            chosen.weight = part(chosen.logit) / whole * self.counting.factor;
            if has_correction && !is_corrected {
                chosen.weight *= self.correction.get([chosen.expert]);
            }
        }
    }

    /// Where `rows` rows go, `chosen` ways each, an expert's after the other's: in this order CPU bodies add up,
    /// whatever rows there are beside one.
    pub(crate) fn routes(&self, rows: usize, chosen: usize, out: &mut Vec<Route>) {
        let mut found = [Chosen::default(); MAX_CHOSEN as usize];
        let found = &mut found[..chosen];
        out.clear();
        for row in 0..rows {
            self.choose(row, found);
            let slots = found.iter().enumerate();
            out.extend(slots.map(|(slot, Chosen { expert, weight, .. })| Route {
                expert: *expert,
                row,
                slot,
                weight: *weight,
            }));
        }
        out.sort_unstable_by_key(|route| (route.expert, route.row));
    }
}

/// A row that goes to an expert, through one of its slots.
#[cfg(not(target_arch = "nvptx64"))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route {
    pub(crate) expert: usize,
    pub(crate) row: usize,
    pub(crate) slot: usize,
    pub(crate) weight: f32,
}

/// Rows that go to experts, as CPU bodies compute them: an expert's rows together, as one product.
#[cfg(not(target_arch = "nvptx64"))]
#[derive(Debug)]
pub(crate) struct Routed {
    pub(crate) router: Router,
    /// Experts a row goes to.
    pub(crate) chosen: usize,
    /// Rows of a pass at most, elements that an expert takes of each, and elements that it makes.
    pub(crate) shape: [usize; 3],
}

#[cfg(not(target_arch = "nvptx64"))]
impl Routed {
    /// For each expert that rows of `call` go to, calls `take` for what it takes of each row, `multiply` with all of
    /// these, `[rows, k]`, and with what it shall make, `[rows, n]`, and `put` with what it has made of each.
    ///
    /// # Errors
    /// The first of `multiply`.
    pub(crate) fn each_expert(
        &self,
        call: &io::Call<'_>,
        scratch: &mut Scratch,
        take: impl Fn(&Route, &mut [f32]),
        put: impl Fn(&Route, &[f32]),
        multiply: impl Fn(usize, [io::Tensor; 2], &io::Call<'_>, &mut Scratch) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let [rows, k, n] = self.shape;
        // The products have scratch memory of their own.
        let (mut routes, mut memory) = (core::mem::take(&mut scratch.routes), core::mem::take(&mut scratch.gathered));
        self.router.routes(call.rows(linear::slot::X), self.chosen, &mut routes);
        if memory.len() < rows * (k + n) {
            memory.resize(rows * (k + n), 0.0);
        }
        let base = memory.as_mut_ptr();
        // SAFETY: the two boxes, apart, are as large as the memory; the one is written before, the other read after
        // `multiply`.
        let [x, y] = unsafe { [floats(base, [rows, k]), floats(base.add(rows * k), [rows, n])] };
        let mut outcome = Ok(());
        for own in routes.chunk_by(|a, b| a.expert == b.expert) {
            own.iter().enumerate().for_each(|(at, route)| take(route, x.slice_mut([at, 0], k)));
            let step = Step { rows: own.len() as u32, ..*call.step };
            let task = TaskDesc { row_first: 0, ..*call.task };
            let call = io::Call { tensors: &[], task: &task, step: &step, programs: call.programs };
            outcome = multiply(own[0].expert, [x, y], &call, scratch);
            if outcome.is_err() {
                break;
            }
            own.iter().enumerate().for_each(|(at, route)| put(route, y.slice([at, 0], n)));
        }
        (scratch.routes, scratch.gathered) = (routes, memory);
        outcome
    }
}

/// The matrix of f32 at `base`.
///
/// # Safety
/// As [`io::Tensor::new`].
#[cfg(not(target_arch = "nvptx64"))]
unsafe fn floats(base: *mut f32, [rows, columns]: [usize; 2]) -> io::Tensor {
    let operand = Operand {
        dtype: DType::F32 as u16,
        rank: 2,
        extent: [rows as u32, columns as u32, 1, 1],
        stride_elems: [columns as u32, 1, 0, 0],
        ..Operand::ABSENT
    };
    // SAFETY: the caller's promise.
    unsafe { io::Tensor::new(base.cast(), &operand) }
}

/// What is read and computed of experts' operands `of_experts`, matrices, each `[experts, n, k]`, and biases,
/// `[experts, n]`, if there are such, by `rows` rows that go to `chosen` experts each; `all` is what it would be to
/// read all.
pub(crate) fn cost(of_experts: &[&Operand], rows: u32, chosen: u32, all: Cost) -> Cost {
    let routes = u64::from(rows) * u64::from(chosen);
    let mut cost = Cost { flops: 0, ..all };
    for operand in of_experts.iter().filter(|operand| operand.is_present()) {
        let [experts, n, k, _] = operand.extent;
        let one = Operand { extent: [1, n, k, 1], ..**operand };
        // Of all experts', those of as many experts as rows go to at most.
        let unread = product([u64::from(experts).saturating_sub(routes), one.bytes()]);
        cost.bytes_read = cost.bytes_read.saturating_sub(unread);
        let flops_each = if operand.rank == 3 { 2 } else { 1 };
        cost.flops = total([cost.flops, product([flops_each, routes, one.len_elems()])]);
    }
    cost
}

/// A whole number, more than 0, that is the greater the greater `score` is; what is no number is less than any, and
/// both zeros are one.
fn order_of(score: f32) -> u32 {
    let score = if score >= f32::NEG_INFINITY { score + 0.0 } else { f32::NEG_INFINITY };
    let bits = score.to_bits();
    bits ^ ((bits as i32 >> 31) as u32 | 1 << 31)
}

/// The score that it is of.
fn of_order(order: u32) -> f32 {
    f32::from_bits(order ^ ((!(order as i32) >> 31) as u32 | 1 << 31))
}

/// 1 / (1 + exp(-x)).
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// What a block has found for one row, in shared memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found;

/// Where it is, behind whatever row has been staged: how much the experts count, which they are, and, where these are
/// corrected, their logits, a word each. Before them stand all scores, in their order.
const WEIGHTS: u32 = shared::KEPT - MAX_CHOSEN;
const EXPERTS: u32 = WEIGHTS - MAX_CHOSEN;
const LOGITS: u32 = EXPERTS - MAX_CHOSEN;

/// Words of shared memory before this are nobody's once the experts have been found.
pub(crate) const FREE_END: u32 = EXPERTS;

/// Elements of a row that a task may stage where there are `experts` logits.
pub const fn most_staged(experts: u32) -> u32 {
    let left = (LOGITS - STAGE).saturating_sub(experts.next_multiple_of(4));
    if left < MAX_NORMED { left } else { MAX_NORMED }
}

const _: () = assert!(LOGITS.is_multiple_of(4) && most_staged(128) == MAX_NORMED && most_staged(MAX_EXPERTS) > 0);

impl Found {
    /// Finds the `chosen` experts that row `row` of the logits goes to, which `operands` has beside what corrects them.
    /// A thread compares an expert with all others: that is one way through the scores for all, where one choice after
    /// another would be `chosen` with a barrier each.
    ///
    /// # Safety
    /// Every thread of the block makes this same call, and none reads what was found before any more; the operands are
    /// what [`check`] wants. Of [`Weighting::All`] there are no weights unless `OF_ALL`: nobody has code for it who
    /// needs none.
    pub(crate) unsafe fn choose<const OF_ALL: bool>(
        call: &gpu::Call<'_>,
        block: &Block,
        [logits, correction]: [usize; 2],
        row: u32,
        chosen: u32,
        counting: Counting,
    ) -> Found {
        // SAFETY: the operands are there (caller).
        let (experts, has_correction) =
            unsafe { (call.tensor(logits).extent(1), call.tensor(correction).is_present()) };
        let is_corrected = has_correction & counting.weighting().is_of_sigmoids();
        let words = experts.next_multiple_of(4);
        let orders = LOGITS - words;
        // SAFETY: a thread writes its own words, and those of the slots that no other expert has; barriers stand
        // between writers and readers.
        unsafe {
            let all = call.tensor(logits);
            let ask = |expert: u32| call.ask(&all, [row, expert]);
            let told = |expert: u32, asked: u32| call.told(logits, &all, [row, expert], asked);
            // The first of a thread's own, which few have a second of.
            let mut first = 0.0;
            // In fours, the last of which are filled up with what is less than any.
            for at in block.mine(words) {
                let mut order = 0;
                if at < experts {
                    let asked = ask(at);
                    let beside = if is_corrected { call.tensor(correction).get([at]) } else { 0.0 };
                    let own = told(at, asked);
                    if at == block.thread {
                        first = own;
                    }
                    order = order_of(if is_corrected { sigmoid(own) + beside } else { own });
                }
                shared::store(orders + at, order);
            }
            block.sync();
            for at in block.mine(experts) {
                let own = shared::load(orders + at);
                let (mut better, mut other) = (0, 0);
                while other < experts {
                    let [a, b, c, d] = shared::load16(orders + other);
                    // Of those before it equal ones are better, too.
                    let least = own - u32::from(other + 4 <= at);
                    better += u32::from(a > least) + u32::from(b > least);
                    better += u32::from(c > least) + u32::from(d > least);
                    other += 4;
                }
                let [a, b, c, _] = shared::load16(orders + at / 4 * 4);
                let is_equal = |one: u32, place: u32| u32::from(one == own) & u32::from(at % 4 > place);
                better += is_equal(a, 0) + is_equal(b, 1) + is_equal(c, 2);
                if better < chosen {
                    shared::store(EXPERTS + better, at);
                    if is_corrected {
                        let own = if at == block.thread { first } else { told(at, ask(at)) };
                        let own = if own >= f32::NEG_INFINITY { own } else { f32::NEG_INFINITY };
                        shared::store(LOGITS + better, own.to_bits());
                    }
                }
            }
            block.sync();
            let of_expert = |expert: u32| of_order(shared::load(orders + expert));
            let of_slot = |slot: u32| match is_corrected {
                true => f32::from_bits(shared::load(LOGITS + slot)),
                false => of_expert(shared::load(EXPERTS + slot)),
            };
            let (best, weighting) = (of_slot(0), counting.weighting());
            let part = |logit: f32| if weighting.is_of_sigmoids() { sigmoid(logit) } else { exp(logit - best) };
            let mut total = 0.0;
            if matches!(weighting, Weighting::Chosen | Weighting::Sigmoids) {
                let mut slot = 0;
                while slot < chosen {
                    total += part(of_slot(slot));
                    slot += 1;
                }
            } else if OF_ALL && weighting == Weighting::All {
                for expert in block.mine(experts) {
                    total += part(of_expert(expert));
                }
                total = block.sum(total);
            }
            // Last: a choice of what a sum begins with would be a table in memory.
            let whole = if weighting == Weighting::Sigmoid { 1.0 } else { total + counting.added };
            for slot in block.mine(chosen) {
                let mut part = part(of_slot(slot)) / whole * counting.factor;
                if has_correction & !is_corrected {
                    part *= call.tensor(correction).get([shared::load(EXPERTS + slot)]);
                }
                shared::store(WEIGHTS + slot, part.to_bits());
            }
            block.sync();
        }
        Found
    }

    /// Has the L2 cache ask for the matrices that are operand `operand`, those of the `chosen` experts, all at once:
    /// each warp would wait for one row after the other.
    ///
    /// # Safety
    /// As [`Found::expert`]; the operand is a stack of matrices, one for each expert.
    pub(crate) unsafe fn ask(self, call: &gpu::Call<'_>, block: &Block, operand: usize, chosen: u32) {
        if !call.uses(Technique::L2Prefetch) || block.thread >= chosen {
            return;
        }
        // SAFETY: the matrix is there (caller), in one piece of whole units.
        unsafe {
            let weights = call.tensor(operand);
            let [n, k] = [weights.extent(1), weights.extent(2)];
            let rows = weights.weight_row([self.expert(block.thread)]);
            let (row, bytes) = if Eight::is_of(weights.dtype()) {
                (Eight::row_bytes(k), Eight::row_bytes(k))
            } else if Four::is_of(weights.dtype()) {
                (Four::row_bytes(k), Four::row_bytes(k))
            } else {
                (k, k * weights.elem_bytes() as u32)
            };
            let bytes = n * bytes;
            if weights.stride(1) == row && rows.is_aligned(16) && bytes.is_multiple_of(16) {
                prefetch_bytes(rows.start(), bytes);
            }
        }
    }

    /// The expert of slot `slot`.
    ///
    /// # Safety
    /// The row goes to as many, and the block has not begun to choose again.
    pub(crate) unsafe fn expert(self, slot: u32) -> u32 {
        // SAFETY: written before the last barrier (caller).
        unsafe { shared::load(EXPERTS + slot) }
    }

    /// How much it counts.
    ///
    /// # Safety
    /// As [`Found::expert`].
    pub(crate) unsafe fn weight(self, slot: u32) -> f32 {
        // SAFETY: as in `expert`.
        f32::from_bits(unsafe { shared::load(WEIGHTS + slot) })
    }
}
