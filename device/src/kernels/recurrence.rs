//! Layers that pass a state from row to row: a matrix for each value head, which every row first forgets some of, then
//! adds something to at its key, and asks by its query. Row by row, with g = exp(-exp(a_log) * d) and d = softplus(a +
//! dt_bias):
//!
//! ```text
//! S <- g S;   S[j,:] <- S[j,:] + c[j] k;   y[j] = S[j,:] . q (+ skip * v[j])
//! ```
//! - With b, linear attention by the gated delta rule: c[j] = sigmoid(b) (v[j] - S[j,:] . k), what is known at the key
//!   being corrected; k and q are divided by their lengths, q by sqrt(d_k), too. (Yang, Kautz, Hatamizadeh, *Gated
//!   Delta Networks*, 2024.)
//! - Without, a state space: c[j] = d v[j]. (Dao, Gu, *Transformers are SSMs*, 2024: Mamba-2, whose B, C and x are k, q
//!   and v here.)
//!
//! q, k: [rows, key_heads, d_k], d_k at most [`MAX_KEY`]; v, y: [rows, key_heads, group, d_v]; a, b: [rows, key_heads,
//! group]; a_log, dt_bias, skip: [key_heads, group]; state: [key_heads, group, d_v, d_k] f32, kept from pass to pass:
//! zeros, whatever it holds, before position 0. A length |x| is sqrt(x . x + 1e-6). f32 accumulation. Prompts have the
//! bits of their tokens one by one.
//!
//! A row of the state asks for k and q at once: with S not decayed yet, y[j] = g S[j,:] . q + c[j] k . q. It is read
//! and written once.

use super::*;
use crate::arch::{WARP, memory, scalar, scalar::fma, shared, warp};
use crate::block::FREE_SHARED;
use crate::gpu::math::{exp, rsqrt, softplus};

/// See the module head.
#[derive(Debug)]
pub struct Recurrence;

/// Parameters: none.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {}

/// Elements of a key: four a lane.
pub const MAX_KEY: u32 = 4 * WARP;

/// Added to the sum of squares of a query or key.
pub(crate) const NORM_EPS: f32 = 1e-6;

slots! {
    Q: read "q",
    K: read "k",
    V: read "v",
    A: read "a",
    B: optional "b",
    A_LOG: read "a_log",
    DT_BIAS: read "dt_bias",
    STATE: update "state",
    Y: write "y",
    SKIP: optional "skip",
}

/// How much of a head's state a row leaves, and what it multiplies with what it adds: by b, if there is one.
#[cfg(not(target_arch = "nvptx64"))]
pub(crate) fn gates(a: f32, b: Option<f32>, a_log: f32, dt_bias: f32) -> [f32; 2] {
    let x = a + dt_bias;
    let softplus = if x > 20.0 { x } else { x.exp().ln_1p() };
    [(-a_log.exp() * softplus).exp(), b.map_or(softplus, |b| 1.0 / (1.0 + (-b).exp()))]
}

impl MacroKernel for Recurrence {
    const NAME: &'static str = "recurrence";
    const SLOTS: &'static [Slot] = slot::ALL;
    type Params = Params;
    const FLAGGED: &'static [usize] = &[slot::Q, slot::K, slot::V, slot::A, slot::B, slot::Y];
    // What is found of a state goes into it, row after row.
    const TOLERANCE: f32 = 1e-4;

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(_: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [q, k, v, a, b, a_log, dt_bias, state, y, skip] = io else { unreachable!("slots were counted") };
        let [rows, heads, d_k, _] = q.extent;
        let [_, _, group, d_v] = v.extent;
        if d_k > MAX_KEY {
            return Err(format!("keys have {d_k} elements, expected at most {MAX_KEY}"));
        }
        for (name, operand) in [("q", q), ("k", k)] {
            rules::rank(name, operand, 3)?;
            rules::extent(name, operand, 2, d_k)?;
        }
        for (name, operand) in [("v", v), ("y", y)] {
            rules::rank(name, operand, 4)?;
            rules::extent(name, operand, 2, group)?;
            rules::extent(name, operand, 3, d_v)?;
        }
        for (name, operand) in [("a", a), ("b", b)] {
            rules::rank(name, operand, 3)?;
            rules::extent(name, operand, 2, group)?;
        }
        for (name, operand) in [("a_log", a_log), ("dt_bias", dt_bias), ("skip", skip)] {
            rules::rank(name, operand, 2)?;
            rules::extent(name, operand, 0, heads)?;
            rules::extent(name, operand, 1, group)?;
        }
        for (name, operand) in [("q", q), ("k", k), ("v", v), ("a", a), ("b", b), ("y", y)] {
            rules::extent(name, operand, 0, rows)?;
            rules::extent(name, operand, 1, heads)?;
        }
        let of_head = [("a_log", a_log), ("dt_bias", dt_bias), ("skip", skip)];
        for (name, operand) in [("q", q), ("k", k), ("v", v), ("a", a), ("b", b), ("y", y)].into_iter().chain(of_head) {
            rules::dtype(name, operand, &rules::FLOATS)?;
            rules::unit_stride(name, operand)?;
        }
        rules::dtype("state", state, &[perpetua_shared::DType::F32])?;
        rules::rank("state", state, 4)?;
        rules::unit_stride("state", state)?;
        for (dim, expected) in [heads, group, d_v, d_k].into_iter().enumerate() {
            rules::extent("state", state, dim, expected)?;
        }
        rules::flagged_in(&[("q", q), ("k", k), ("v", v), ("a", a), ("b", b), ("y", y)], rows)
    }

    fn cost(_: &Params, io: &[Operand]) -> Cost {
        let cost = default_cost(Self::SLOTS, io);
        let [q, _, _, _, _, _, _, state, ..] = io else { return cost };
        Cost { flops: product([7, q.extent[0].into(), state.len_elems()]), ..cost }
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(_: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [q, k, v, a, b, a_log, dt_bias, state, y, skip] = core::array::from_fn(|i| call.tensor(i));
        let [heads, group, d_v, d_k] = [0, 1, 2, 3].map(|dim| state.extent(dim));
        let corrects = b.is_present();
        let unit = |x: &crate::io::Tensor, r: usize, h: usize, by: f32| {
            let row: Vec<f32> = (0..d_k).map(|i| x.get([r, h, i])).collect();
            let norm = (row.iter().map(|x| x * x).sum::<f32>() + NORM_EPS).sqrt() * by;
            if corrects { row.into_iter().map(|x| x / norm).collect::<Vec<f32>>() } else { row }
        };
        for (h, g) in (0..heads).flat_map(|h| (0..group).map(move |g| (h, g))) {
            for r in 0..call.rows(slot::Q) {
                let (query, key) = (unit(&q, r, h, (d_k as f32).sqrt()), unit(&k, r, h, 1.0));
                let b = corrects.then(|| b.get([r, h, g]));
                let [decay, beta] = gates(a.get([r, h, g]), b, a_log.get([h, g]), dt_bias.get([h, g]));
                for j in 0..d_v {
                    let is_new = call.step.first_pos == 0 && r == 0;
                    let mut s: Vec<f32> =
                        (0..d_k).map(|i| if is_new { 0.0 } else { decay * state.get([h, g, j, i]) }).collect();
                    let known: f32 = s.iter().zip(&key).map(|(s, k)| s * k).sum();
                    let value = v.get([r, h, g, j]);
                    let added = beta * if corrects { value - known } else { value };
                    s.iter_mut().zip(&key).for_each(|(s, k)| *s += added * k);
                    let asked: f32 = s.iter().zip(&query).map(|(s, q)| s * q).sum();
                    y.set([r, h, g, j], asked + if skip.is_present() { skip.get([h, g]) * value } else { 0.0 });
                    s.iter().enumerate().for_each(|(i, s)| state.set([h, g, j, i], *s));
                }
            }
        }
        Ok(())
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn cpu(_: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
        let [q, k, v, a, b, a_log, dt_bias, state, y, skip] = core::array::from_fn(|i| call.tensor(i));
        let (rows, is_first, isa) = (call.rows(slot::Q), call.step.first_pos == 0, scratch.isa);
        let gates = [a, b, a_log, dt_bias];
        isa.run(crate::cpu::recurrent::Recurrence { rows, is_first, q, k, v, gates, skip, state, y, scratch });
        Ok(())
    }

    unsafe fn gpu(_: &Params, call: &gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        // SAFETY: the operands are the slots' and every index is below its extent. A warp has eight rows of the state
        // to itself, all rows of the pass one after the other; what is found of these for all is made between two
        // barriers.
        unsafe {
            // Found here, not kept over all the other kernels of a worker.
            let block = &Block { thread: memory::opaque_word(block.thread), ..*block };
            let (rows, heads, group, d_v) = {
                let v = call.tensor(slot::V);
                (call.rows(&v), v.extent(1), v.extent(2), v.extent(3))
            };
            for head in 0..heads * group {
                let (h, g) = (head / group, head % group);
                let mut first = 0;
                while first < rows {
                    let count = if rows - first < AT_ONCE { rows - first } else { AT_ONCE };
                    let mut r = block.warp();
                    while r < count {
                        find(call, block.lane(), [first + r, h, g], r);
                        r += block.warps();
                    }
                    block.sync();
                    let is_new = call.first_pos() == 0 && first == 0;
                    let mut column = COLUMNS * block.warp();
                    while column < d_v {
                        columns(call, block.lane(), [first, count], [h, g, column], is_new);
                        column += COLUMNS * block.warps();
                    }
                    first += count;
                    // The next ones' take these ones' place.
                    if first < rows || head + 1 < heads * group {
                        block.sync();
                    }
                }
            }
        }
        Ok(())
    }
}

/// Rows of the pass whose numbers are found together, in shared memory.
const AT_ONCE: u32 = 128;

/// Rows of the state, columns of y, that a warp has at a time.
const COLUMNS: u32 = 8;

/// Words of shared memory for what is found of row `r` of those at once: what k and q are multiplied by, how much of
/// the state stays, what multiplies what is added; k . q, how much of what is known at the key is taken from what is
/// added, and how much of v is in y.
fn found(r: u32) -> u32 {
    FREE_SHARED + 8 * r
}

const _: () = assert!(FREE_SHARED.is_multiple_of(4) && FREE_SHARED + 8 * AT_ONCE <= shared::KEPT);

/// A lane's four elements of operand `operand` at [row, head], zeros beyond the last.
///
/// # Safety
/// The operand is [`Recurrence`]'s query or key, and the row is there.
unsafe fn four(call: &gpu::Call<'_>, operand: usize, [r, h]: [u32; 2], lane: u32) -> [f32; 4] {
    // SAFETY: the caller's promise; elements below `n` are asked for alone.
    unsafe {
        let tensor = call.tensor(operand);
        let (row, n, at) = (tensor.row([r, h]), tensor.extent(2), 4 * lane);
        if !tensor.is_flagged() {
            return row.four(at, n);
        }
        let there = |i: u32| if at + i < n { at + i } else { n - 1 };
        let [a, b, c, d] = call.gather(operand, &row, [there(0), there(1), there(2), there(3)]);
        let zero_beyond = |i: u32, x: f32| if at + i < n { x } else { 0.0 };
        [zero_beyond(0, a), zero_beyond(1, b), zero_beyond(2, c), zero_beyond(3, d)]
    }
}

/// a . b, and c.
fn dot([a, b, c, d]: [f32; 4], [e, f, g, h]: [f32; 4], more: f32) -> f32 {
    fma(d, h, fma(c, g, fma(b, f, fma(a, e, more))))
}

/// Finds, of row `r` of the pass, what is wanted of it for all columns of head `h`, `g`: see [`found`]. It is number
/// `at` of those found together.
///
/// # Safety
/// All lanes of the warp make this same call, and nobody else touches these words; the row is there.
unsafe fn find(call: &gpu::Call<'_>, lane: u32, [r, h, g]: [u32; 3], at: u32) {
    // SAFETY: the caller's promise.
    unsafe {
        let key = four(call, slot::K, [r, h], lane);
        let query = four(call, slot::Q, [r, h], lane);
        let one = |operand: usize| {
            let [value] = call.gather(operand, &call.tensor(operand).row([r, h]), [g]);
            value
        };
        let weight = |operand: usize| call.tensor(operand).get([h, g]);
        let step = softplus(one(slot::A) + weight(slot::DT_BIAS));
        let decay = exp(-exp(weight(slot::A_LOG)) * step);
        let (mut of_key, mut of_query, mut by, mut known) = (1.0, 1.0, step, 0.0);
        if call.tensor(slot::B).is_present() {
            of_key = rsqrt(warp::sum(dot(key, key, 0.0)) + NORM_EPS);
            of_query = rsqrt(warp::sum(dot(query, query, 0.0)) + NORM_EPS);
            of_query *= rsqrt(call.tensor(slot::Q).extent(2) as f32);
            (by, known) = (scalar::reciprocal(1.0 + exp(-one(slot::B))), decay);
        }
        let both = warp::sum(dot(key, query, 0.0)) * of_key * of_query;
        let skip = if call.tensor(slot::SKIP).is_present() { weight(slot::SKIP) } else { 0.0 };
        if lane == 0 {
            shared::store16(found(at), [of_key, of_query, decay, by].map(f32::to_bits));
            shared::store16(found(at) + 4, [both, known, skip, 0.0].map(f32::to_bits));
        }
    }
}

/// Of sixteen numbers a lane the sums over all lanes, number n on lanes 2 n and 2 n + 1: half of what a lane has left
/// goes to another one each time.
///
/// # Safety
/// All lanes of the warp make this same call.
unsafe fn sums(numbers: [f32; 16], lane: u32) -> f32 {
    // What stays here, and what goes there: the upper half of lanes keeps the upper half of numbers.
    let halve = |low: f32, high: f32, mask: u32| {
        let (keep, give) = if lane & mask == 0 { (low, high) } else { (high, low) };
        // SAFETY: the caller's promise.
        keep + f32::from_bits(unsafe { warp::shuffle_xor(give.to_bits(), mask) })
    };
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = numbers;
    let eight = |low: f32, high: f32| halve(low, high, 16);
    let [a, b, c, d] = {
        let [a, b, c, d, e, f, g, h] =
            [eight(a, i), eight(b, j), eight(c, k), eight(d, l), eight(e, m), eight(f, n), eight(g, o), eight(h, p)];
        [halve(a, e, 8), halve(b, f, 8), halve(c, g, 8), halve(d, h, 8)]
    };
    let one = halve(halve(a, c, 4), halve(b, d, 4), 2);
    // SAFETY: the caller's promise.
    one + f32::from_bits(unsafe { warp::shuffle_xor(one.to_bits(), 1) })
}

/// Takes `count` rows of the pass from `first` on, of which all has been [found](find), through the state's rows from
/// `column` on of head `h`, `g`.
///
/// # Safety
/// All lanes of the warp make this same call, and nobody else touches these rows of the state, nor y's columns; they
/// are there, as far as they are below the last.
unsafe fn columns(call: &gpu::Call<'_>, lane: u32, [first, count]: [u32; 2], [h, g, column]: [u32; 3], is_new: bool) {
    // SAFETY: the caller's promise; columns beyond the last are that one's, which nobody writes for them.
    unsafe {
        let (d_v, d_k) = {
            let state = call.tensor(slot::STATE);
            (state.extent(2), state.extent(3))
        };
        let at = |j: u32| if column + j < d_v { column + j } else { d_v - 1 };
        let load = |j: u32| {
            if is_new { [0.0; 4] } else { call.tensor(slot::STATE).row([h, g, at(j)]).four(4 * lane, d_k) }
        };
        let mut s = [load(0), load(1), load(2), load(3), load(4), load(5), load(6), load(7)];
        // Which column's a lane has of v, and, in the upper half, of y.
        let own = at((lane % 16) / 2);
        let mut r = 0;
        while r < count {
            let key = four(call, slot::K, [first + r, h], lane);
            let query = four(call, slot::Q, [first + r, h], lane);
            let [value] = call.gather(slot::V, &call.tensor(slot::V).row([first + r, h, g]), [own]);
            let [of_key, of_query, decay, by] = shared::load16(found(r)).map(f32::from_bits);
            let [both, of_known, skip, _] = shared::load16(found(r) + 4).map(f32::from_bits);
            let key = key.map(|x| x * of_key);
            let query = query.map(|x| x * of_query);
            let known = |j: usize| dot(s[j], key, 0.0);
            let asked = |j: usize| dot(s[j], query, 0.0);
            let mine = sums(
                [
                    known(0),
                    known(1),
                    known(2),
                    known(3),
                    known(4),
                    known(5),
                    known(6),
                    known(7),
                    asked(0),
                    asked(1),
                    asked(2),
                    asked(3),
                    asked(4),
                    asked(5),
                    asked(6),
                    asked(7),
                ],
                lane,
            );
            let added = fma(-of_known, mine, value) * by;
            let of = |from: u32| f32::from_bits(warp::shuffle(added.to_bits(), from));
            // Both halves' lanes have the lower half's.
            let own_added = of(lane % 16);
            let made = fma(decay, mine, fma(own_added, both, skip * value));
            let is_there = column + (lane % 16) / 2 < d_v;
            if (lane >= 16) & lane.is_multiple_of(2) & is_there {
                call.put(&call.tensor(slot::Y), [first + r, h, g, own], made);
            }
            let after = |[a, b, c, d]: [f32; 4], by: f32| {
                let [e, f, g, h] = key;
                [fma(e, by, a * decay), fma(f, by, b * decay), fma(g, by, c * decay), fma(h, by, d * decay)]
            };
            s = [
                after(s[0], of(0)),
                after(s[1], of(2)),
                after(s[2], of(4)),
                after(s[3], of(6)),
                after(s[4], of(8)),
                after(s[5], of(10)),
                after(s[6], of(12)),
                after(s[7], of(14)),
            ];
            r += 1;
        }
        let keep = |j: u32, four: [f32; 4]| {
            if column + j < d_v {
                let row = call.tensor(slot::STATE).row([h, g, column + j]);
                if 4 * lane < d_k {
                    row.set_four_below(4 * lane, d_k, four);
                }
            }
        };
        keep(0, s[0]);
        keep(1, s[1]);
        keep(2, s[2]);
        keep(3, s[3]);
        keep(4, s[4]);
        keep(5, s[5]);
        keep(6, s[6]);
        keep(7, s[7]);
    }
}
