//! The GPU body of `sample`: the same draw as the CPU's, without sorting.
//!
//! Weights are not negative, so their bits order as they do; cutting to the top k, to the mass top p and to the number
//! drawn each is a search for one weight, bit by bit, with a sum over the block for every bit. Among equal weights the
//! lower index comes first, as in a stable sort: what is left after the search is to count equals.

use super::*;
use crate::arch::shared;
use crate::block::{Candidate, FREE_SHARED};
use crate::gpu::Tensor;
use crate::gpu::math::exp;
use perpetua_shared::FaultCode;

/// # Safety
/// As [`MacroKernel::gpu`].
pub(super) unsafe fn run(call: &crate::gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
    // SAFETY: the operands are the slots' and every index is below its extent; all conditions around block-wide calls
    // depend on the task's data alone, which every thread reads alike.
    unsafe {
        let (logits, control, tokens) =
            (call.tensor(slot::LOGITS), call.tensor(slot::CONTROL), call.tensor(slot::TOKENS));
        let (values, indices) = (call.tensor(slot::VALUES), call.tensor(slot::INDICES));
        let position = call.first_pos() + call.pass_rows();
        let word = |offset: usize| control.get_word(offset as u32 / 4);
        let sequence = call.sequence();
        let penalty = f32::from_bits(word(request!(repetition_penalty of sequence)));
        let mut best = Candidate::NONE;
        if penalty == NO_PENALTY {
            for at in block.mine(values.extent(0)) {
                // A part whose logits are all NaN gives the index -1, which is the largest there is.
                best = best.better(Candidate { value: values.get([at]), index: indices.get_word(at) });
            }
        } else {
            let text = call.tensor(slot::TEXT);
            penalise(&logits, if text.is_present() { &text } else { &tokens }, position, penalty, block);
            for index in block.mine(logits.extent(1)) {
                best = best.better(Candidate { value: logits.get([0, index]), index });
            }
        }
        let best = block.best(best);
        if best.index == u32::MAX {
            return Err(call.fault(FaultCode::NotANumber, position, 0, 0));
        }
        let temperature = f32::from_bits(word(request!(temperature of sequence)));
        let mut token = best.index;
        if temperature > 0.0 {
            let draw = Draw { logits: &logits, block, max: best.value, temperature };
            let seed_at = request!(seed of sequence);
            token = draw.token(
                word(request!(top_k of sequence)),
                f32::from_bits(word(request!(top_p of sequence))),
                uniform([word(seed_at), word(seed_at + 4)], position),
            );
        }
        if block.thread == 0 {
            tokens.set_word(if tokens.extent(0) == 1 { 0 } else { position }, token);
        }
    }
    Ok(())
}

/// Words of shared memory for tokens that the text has, a bit each: of so many at once.
const SEEN_WORDS: u32 = 4096;
const SEEN: u32 = FREE_SHARED;

const _: () = assert!(SEEN + SEEN_WORDS <= shared::KEPT, "the tokens' bits have room");

/// See [`penalise`](super::penalise): of the first `n` tokens of `text`.
///
/// # Safety
/// Every thread of the block makes this same call; `logits` is a row of f32, and nobody else touches it.
unsafe fn penalise(logits: &Tensor, text: &Tensor, n: u32, penalty: f32, block: &Block) {
    let vocab = logits.extent(1);
    let mut first = 0;
    // SAFETY: words and bits are below their numbers. A logit is that thread's to change which set its token's bit, and
    // all of them are changed behind one barrier and before another.
    unsafe {
        while first < vocab {
            let here = (vocab - first).min(32 * SEEN_WORDS);
            for at in block.mine(here.div_ceil(32)) {
                shared::store(SEEN + at, 0);
            }
            block.sync();
            for at in block.mine(n) {
                let token = text.get_word(at).wrapping_sub(first);
                if token < here {
                    let bit = 1 << (token % 32);
                    if shared::or(SEEN + token / 32, bit) & bit == 0 {
                        let at = [0, first + token];
                        logits.set(at, penalised(logits.get(at), penalty));
                    }
                }
            }
            block.sync();
            first += here;
        }
    }
}

struct Draw<'a> {
    logits: &'a Tensor,
    block: &'a Block,
    max: f32,
    temperature: f32,
}

/// The weights that are still in: all above `weight` (as bits), and the first `ties` of those that equal it.
#[derive(Clone, Copy)]
struct Cut {
    weight: u32,
    ties: u32,
}

/// What the block holds of the weights above some bound.
#[derive(Clone, Copy)]
struct Above {
    count: u32,
    mass: f64,
}

impl Draw<'_> {
    /// Weight of logit `at`, as bits; 0 for one that can never be drawn.
    unsafe fn weight(&self, at: u32) -> u32 {
        // SAFETY: the caller promises an index of the row.
        let logit = unsafe { self.logits.get([0, at]) };
        let weight = if logit == self.max { 1.0 } else { exp((logit - self.max) / self.temperature) };
        // NaN is not above zero.
        if weight > 0.0 { weight.to_bits() } else { 0 }
    }

    /// Count and mass of the weights above `bound`, whole block. The sums run in the same order every time, so the
    /// searches see a function that does not rise.
    unsafe fn above(&self, bound: u32) -> Above {
        let mut mine = Above { count: 0, mass: 0.0 };
        for at in self.block.mine(self.logits.extent(1)) {
            // SAFETY: `at` is an index of the row.
            let weight = unsafe { self.weight(at) };
            if weight > bound {
                mine.count += 1;
                mine.mass += f64::from(f32::from_bits(weight));
            }
        }
        // SAFETY: every thread of the block is here (caller).
        unsafe { Above { count: self.block.sum_u32(mine.count), mass: self.block.sum64(mine.mass) } }
    }

    /// The smallest bound for which `enough` holds, and what is above it. `enough` holds for all bounds from some one
    /// on.
    unsafe fn search(&self, enough: impl Fn(&Above) -> bool) -> (u32, Above) {
        // No weight is above 1.
        let mut high = 1f32.to_bits();
        let mut at_high = Above { count: 0, mass: 0.0 };
        let mut low = 0;
        while low < high {
            let middle = low + (high - low) / 2;
            // SAFETY: every thread of the block is here (caller), with the same bounds.
            let above = unsafe { self.above(middle) };
            if enough(&above) {
                high = middle;
                at_high = above;
            } else {
                low = middle + 1;
            }
        }
        (high, at_high)
    }

    /// See [`draw`](super::draw): the same cuts, the same order.
    ///
    /// # Safety
    /// Every thread of the block makes this same call; `logits` is a row of f32.
    unsafe fn token(&self, top_k: u32, top_p: f32, u: f64) -> u32 {
        // SAFETY: every thread of the block takes the same way, since sums and parameters are the same in each.
        unsafe {
            let mut cut = Cut { weight: 0, ties: 0 };
            let mut in_all = self.above(0);
            if top_k > 0 && top_k < in_all.count {
                // The k-th largest is the smallest weight with fewer than k above it.
                let (weight, above) = self.search(|above| above.count < top_k);
                cut = Cut { weight, ties: top_k - above.count };
                in_all.mass = above.mass + f64::from(cut.ties) * f64::from(f32::from_bits(weight));
            }
            if top_p < 1.0 {
                let wanted = f64::from(top_p) * in_all.mass;
                // Kept while the mass before it is below what is wanted.
                let (weight, above) = self.search(|above| above.mass < wanted);
                if weight >= cut.weight && weight > 0 {
                    let each = f64::from(f32::from_bits(weight));
                    let mut ties = 1;
                    let most = if weight == cut.weight { cut.ties } else { u32::MAX };
                    while ties < most && above.mass + f64::from(ties) * each < wanted {
                        // Beyond those there are, ties cost nothing but this count; the draw below meets no more.
                        ties += 1;
                    }
                    let there = self.count_of(weight);
                    cut = Cut { weight, ties: if ties < there { ties } else { there } };
                    in_all.mass = above.mass + f64::from(cut.ties) * each;
                }
                // In falling order: the class of equal weights that the number falls into, then its place in it.
                let target = u * in_all.mass;
                let (weight, above) = self.search(|above| above.mass <= target);
                let weight = if weight > cut.weight { weight } else { cut.weight };
                let above = if weight == cut.weight { self.above(weight) } else { above };
                let last = if weight == cut.weight { cut.ties } else { self.count_of(weight) };
                let mut place = 0;
                let each = f64::from(f32::from_bits(weight));
                while place + 1 < last && above.mass + f64::from(place + 1) * each <= target {
                    place += 1;
                }
                return self.find(Walk::Tie { weight, place });
            }
            self.find(Walk::Mass { cut, target: u * in_all.mass })
        }
    }

    /// How many weights equal `weight`.
    unsafe fn count_of(&self, weight: u32) -> u32 {
        // SAFETY: every thread of the block is here (caller).
        unsafe { self.above(weight - 1).count - self.above(weight).count }
    }

    /// Walks the row in index order, each thread a run of its own: first every thread adds up its run, then the thread
    /// whose run holds the end of the walk finds it.
    unsafe fn find(&self, walk: Walk) -> u32 {
        // SAFETY: every thread of the block is here (caller); indices are below the row's length; a thread writes its
        // own words of shared memory, and a barrier stands between writing and reading.
        unsafe {
            let n = self.logits.extent(1);
            let run = n.div_ceil(self.block.threads);
            let first = self.block.thread * run;
            let end = if first + run < n { first + run } else { n };
            let equal = match walk {
                Walk::Tie { weight, .. } => weight,
                Walk::Mass { cut, .. } => cut.weight,
            };
            // First the equals, which count one by one.
            let mut equals = 0;
            for at in first..end {
                equals += u32::from(self.weight(at) == equal);
            }
            let before = self.before(equals);
            match walk {
                Walk::Tie { place, .. } => {
                    let mut seen = before;
                    let mut found = u32::MAX;
                    for at in first..end {
                        if self.weight(at) == equal {
                            if seen == place {
                                found = at;
                            }
                            seen += 1;
                        }
                    }
                    self.lowest(found)
                }
                Walk::Mass { cut, target } => {
                    let kept = |weight: u32, seen: &mut u32| {
                        let is_equal = weight == cut.weight && weight > 0;
                        *seen += u32::from(is_equal);
                        weight > cut.weight || (is_equal && *seen <= cut.ties)
                    };
                    let mut seen = before;
                    let mut mass = 0.0;
                    for at in first..end {
                        let weight = self.weight(at);
                        if kept(weight, &mut seen) {
                            mass += f64::from(f32::from_bits(weight));
                        }
                    }
                    let mut total = self.before64(mass);
                    let mut seen = before;
                    let (mut found, mut last) = (u32::MAX, u32::MAX);
                    for at in first..end {
                        let weight = self.weight(at);
                        if kept(weight, &mut seen) {
                            total += f64::from(f32::from_bits(weight));
                            last = at;
                            if found == u32::MAX && total > target {
                                found = at;
                            }
                        }
                    }
                    let found = self.lowest(found);
                    // Rounding can leave the number beyond the last candidate, which then is it.
                    if found == u32::MAX { self.highest(last) } else { found }
                }
            }
        }
    }

    /// The sum over the threads below this one.
    unsafe fn before(&self, value: u32) -> u32 {
        // SAFETY: as in `find`.
        unsafe {
            shared::store(FREE_SHARED + self.block.thread, value);
            self.block.sync();
            let mut sum = 0;
            for thread in 0..self.block.thread {
                sum += shared::load(FREE_SHARED + thread);
            }
            self.block.sync();
            sum
        }
    }

    /// [`Draw::before`] in f64, in thread order.
    unsafe fn before64(&self, value: f64) -> f64 {
        // SAFETY: as in `find`; two words a thread.
        unsafe {
            let at = FREE_SHARED + 2 * self.block.thread;
            shared::store(at, value.to_bits() as u32);
            shared::store(at + 1, (value.to_bits() >> 32) as u32);
            self.block.sync();
            let mut sum = 0.0;
            for thread in 0..self.block.thread {
                let at = FREE_SHARED + 2 * thread;
                sum += f64::from_bits(u64::from(shared::load(at)) | u64::from(shared::load(at + 1)) << 32);
            }
            self.block.sync();
            sum
        }
    }

    /// The lowest index any thread gives.
    unsafe fn lowest(&self, index: u32) -> u32 {
        // SAFETY: every thread of the block is here (caller).
        unsafe { self.block.best(Candidate { value: 0.0, index }).index }
    }

    /// The highest index any thread gives; `u32::MAX` stands for none.
    unsafe fn highest(&self, index: u32) -> u32 {
        let turned = if index == u32::MAX { u32::MAX } else { u32::MAX - 1 - index };
        // SAFETY: every thread of the block is here (caller).
        let lowest = unsafe { self.lowest(turned) };
        if lowest == u32::MAX { 0 } else { u32::MAX - 1 - lowest }
    }
}

/// Where a walk over the row ends.
#[derive(Clone, Copy)]
enum Walk {
    /// At the `place`-th (from 0) of the weights that equal `weight`.
    Tie { weight: u32, place: u32 },
    /// Where the mass of what `cut` leaves rises above `target`.
    Mass { cut: Cut, target: f64 },
}
