//! The GPU body of `attention`: a warp per (row, head), softmax on the fly; where there are fewer of those than warps,
//! as in decoding, several warps share the positions and merge what they found (flash-decoding).
//!
//! A warp takes 32 positions at a time. First each lane computes one position's score; then the running maximum and
//! total are updated (Milakov and Gimelshein 2018); then the lanes turn to the head's dimensions, two neighbours each,
//! and add the 32 value rows, each weighted by a shuffled score. A head of more than 256 dimensions is done in slices,
//! the scores anew for each. (Heads whose queries, several, come in whole 32s of dimensions are tensor cores': see
//! `group` and `wide`.) Parts of the positions meet in shared memory: a part that found maximum m and total l
//! counts exp(m - M) times, M the largest of the maxima.

use super::group::{self, Group, Sums};
use super::*;
use crate::arch::scalar::{fma, reciprocal};
use crate::arch::{WARP, memory, shared, warp};
use crate::block::FREE_SHARED;
use crate::gpu::math::{exp, larger};
use crate::gpu::rows::singles;
use crate::gpu::tile::{Rows, within};
use crate::gpu::{BF16, F32, Row, Tensor};
use core::f32::consts::LOG2_E;

/// Dimensions a lane accumulates: a slice is 256 wide.
const PER_LANE: usize = 8;
pub(in crate::kernels) const SLICE: u32 = PER_LANE as u32 * WARP;

/// Words of a part in shared memory: maximum, total, sums; and how many parts there is room for.
pub(in crate::kernels) const PART: u32 = 2 + SLICE;
const MAX_PARTS: u32 = (shared::KEPT - FREE_SHARED) / PART;

/// A query row, wherever it lies.
pub(in crate::kernels) trait Query: Copy {
    /// Whether eight elements may be fetched at once.
    fn by_eight(&self) -> bool;

    /// Element `i`.
    ///
    /// # Safety
    /// It is there.
    unsafe fn get(&self, i: u32) -> f32;

    /// Eight elements from `i`, a multiple of 8, on.
    ///
    /// # Safety
    /// They are there, and [`by_eight`](Query::by_eight).
    unsafe fn eight(&self, i: u32) -> [f32; 8];
}

impl Query for Row {
    fn by_eight(&self) -> bool {
        self.is(F32) && self.is_aligned(16)
    }

    unsafe fn get(&self, i: u32) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { Row::get(self, i) }
    }

    unsafe fn eight(&self, i: u32) -> [f32; 8] {
        // SAFETY: the caller's promise.
        unsafe { singles(self.load16(i), self.load16(i + 4)) }
    }
}

/// A query row in shared memory, from a word on that is a multiple of four.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Kept(pub(in crate::kernels) u32);

impl Query for Kept {
    fn by_eight(&self) -> bool {
        true
    }

    unsafe fn get(&self, i: u32) -> f32 {
        // SAFETY: the caller's promise.
        f32::from_bits(unsafe { shared::load(self.0 + i) })
    }

    unsafe fn eight(&self, i: u32) -> [f32; 8] {
        // SAFETY: the caller's promise.
        unsafe { singles(shared::load16(self.0 + i), shared::load16(self.0 + i + 4)) }
    }
}

/// What a part of the positions, or all, add up to, before the division by the total.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Found {
    max: f32,
    total: f32,
    /// See [`dimension`].
    sums: [f32; PER_LANE],
}

impl Found {
    /// With a `sink`, if that is one.
    fn with(mut self, sink: f32) -> Found {
        if sink > f32::NEG_INFINITY {
            let max = larger(self.max, sink);
            let shrink = exp(self.max - max);
            self.total = fma(self.total, shrink, exp(sink - max));
            self.max = max;
            for step in 0..PER_LANE {
                self.sums[step] *= shrink;
            }
        }
        self
    }
}

/// The sink of query head `g` of head `h`, of operand `slot`; -inf, which is none, where there is no such operand, or
/// another split has the sink.
///
/// # Safety
/// As [`MacroKernel::gpu`]; the operand is such, and has the head.
pub(in crate::kernels) unsafe fn sink(splits: u32, call: &crate::gpu::Call<'_>, slot: usize, [h, g]: [u32; 2]) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let sinks = call.tensor(slot);
        let counts = sinks.is_present() & ((splits <= 1) | (call.block::<1>() == 0));
        if counts { sinks.row([h]).get(g) } else { f32::NEG_INFINITY }
    }
}

/// The dimension, in its slice, of a lane's sum `step`.
fn dimension(step: usize, lane: u32) -> u32 {
    step as u32 / 2 * 2 * WARP + 2 * lane + step as u32 % 2
}

/// # Safety
/// As [`MacroKernel::gpu`].
pub(super) unsafe fn run(p: &Params, call: &crate::gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
    // SAFETY: the operands are the slots' and `check` has matched their extents; `t` is below what the row may see,
    // which the cache holds; whole warps shuffle and the whole block meets, since every condition around a shuffle is
    // the same for all lanes, and those around a barrier for all threads. A part's words are one warp's until the
    // barrier.
    unsafe {
        if few_queries(p, call, block) || many_rows(p, call, block) {
            return Ok(());
        }
        let lane = block.lane();
        let (items, d) = {
            let q = call.tensor(slot::Q);
            (call.rows(&q) * q.extent(1) * q.extent(2), q.extent(3))
        };
        let warps = if block.warps() < MAX_PARTS { block.warps() } else { MAX_PARTS };
        let parts = if items == 0 || items > warps { 1 } else { warps / items };
        let mut slice = 0;
        while slice < d {
            let mut unit = block.warp();
            while unit < items * parts {
                // Fetched anew for every head: held over the loops they would cost them registers.
                let (q, k, v) = (call.tensor(slot::Q), call.tensor(slot::K), call.tensor(slot::V));
                let (heads, group) = (q.extent(1), q.extent(2));
                let item = unit / parts;
                let (r, h, g) = (item / (heads * group), item / group % heads, item % group);
                let (first, end) = part(share_of(p, call, r), unit % parts, parts);
                let head = Heads { q: q.row([r, h, g]), k: Head::new(&k, h), v: Head::new(&v, h), d, scale: p.scale };
                let found = attend(&head, slice, first, end, lane);
                if parts == 1 {
                    put(p, (call, [slot::Y, slot::SINKS]), [r, h, g], d, slice, lane, found);
                } else {
                    keep(FREE_SHARED + unit * PART, &found, lane);
                }
                unit += block.warps();
            }
            if parts > 1 {
                block.sync();
                let item = block.warp();
                if item < items {
                    let q = call.tensor(slot::Q);
                    let (heads, group) = (q.extent(1), q.extent(2));
                    let (r, h, g) = (item / (heads * group), item / group % heads, item % group);
                    let at = FREE_SHARED + item * parts * PART;
                    let found = merge(at, parts, share_of(p, call, r), lane);
                    put(p, (call, [slot::Y, slot::SINKS]), [r, h, g], d, slice, lane, found);
                }
                block.sync();
            }
            slice += SLICE;
        }
    }
    Ok(())
}

/// The positions that the task attends to for row `r` of its own: first and end.
fn share_of(p: &Params, call: &crate::gpu::Call<'_>, r: u32) -> (u32, u32) {
    p.share_of([call.first_pos(), call.pass_rows()], call.row_first() + r, call.block::<1>())
}

/// How many rows' queries, `group` each of `d` dimensions, a [`Group`] has room for, and takes well; of heads that
/// other bodies take many rows of, `rows` or none.
fn rows_together(rows: u32, group: u32, d: u32) -> u32 {
    if d > group::DIMENSIONS {
        let mut together = rows;
        while together > 1 && (together * group > group::QUERIES || !wide::is_roomy(together * group, d)) {
            together -= 1;
        }
        return if group::has_room(together * group, d) { together } else { 0 };
    }
    if group::has_room(rows * group, d) { rows } else { 0 }
}

/// Attends to keys and values of bf16 where a head's queries, of several rows, are as few as those of one row may be in
/// decoding, and [as](Group) there; of wide heads, so many rows at a time. Whether it has.
unsafe fn few_queries(p: &Params, call: &crate::gpu::Call<'_>, block: &Block) -> bool {
    // SAFETY: the operands are the slots' and `check` has matched their extents; the rest is `run`'s caller's promise.
    // Queries are staged by one thread each eight elements, between two barriers.
    unsafe {
        let (q, k, v) = (call.tensor(slot::Q), call.tensor(slot::K), call.tensor(slot::V));
        let (heads, group, d) = (q.extent(1), q.extent(2), q.extent(3));
        let rows = call.rows(&q);
        let are_brains = (k.dtype() == BF16) & (v.dtype() == BF16) & is_whole(&k, 2, 8) & is_whole(&v, 2, 8);
        let is_fit = are_brains & (rows * group >= MANY) & call.uses(Technique::GroupAttention);
        let together = if is_fit { rows_together(rows, group, d) } else { 0 };
        if together == 0 || p.ahead > 0 {
            return false;
        }
        let all = call.first_pos() + call.pass_rows();
        let part_of_group = reciprocal(group as f32);
        // The rows of one head after those of the other, as many at a time as there is room for.
        let (mut h, mut row) = (0, 0);
        while h < heads {
            let count = group * if rows - row < together { rows - row } else { together };
            // Positions that some of them see; those of the first one are the first.
            let (first, end) = if p.splits > 1 {
                p.share(all, call.block::<1>())
            } else {
                (share_of(p, call, row).0, share_of(p, call, row + count / group - 1).1)
            };
            let block = &Block { thread: memory::opaque_word(block.thread), threads: block.threads };
            // Fours of a query.
            let (fours, part_of_fours) = (d / 4, reciprocal((d / 4) as f32));
            let of_unit = |unit: u32| {
                let m = quotient(unit, fours, part_of_fours);
                (m, 4 * (unit - m * fours))
            };
            let q = call.tensor(slot::Q);
            for unit in block.mine(count * fours) {
                let (m, i) = of_unit(unit);
                let r = quotient(m, group, part_of_group);
                let [one, two, three, four] = q.row([row + r, h, m - r * group]).four(i, d);
                group::stage(d, m, i, [one, two]);
                group::stage(d, m, i + 2, [three, four]);
            }
            block.sync();
            let y = call.tensor(slot::Y);
            let to = |m: u32| {
                let r = quotient(m, group, part_of_group);
                let g = m - r * group;
                let of_query = if p.splits > 1 { y.row([h, 0, row * group + m]) } else { y.row([row + r, h, g]) };
                (of_query, sink(p.splits, call, slot::SINKS, [h, g]))
            };
            let seen = |m: u32| share_of(p, call, row + quotient(m, group, part_of_group));
            let (k, v) = (Head::new(&call.tensor(slot::K), h), Head::new(&call.tensor(slot::V), h));
            let own = Group { k, v, queries: count, d, scale: p.scale };
            if first < end {
                own.attend((first, end), &seen, block, to, |(row, sink), i, found| {
                    put_sums(p.splits, (call, &call.tensor(slot::Y)), row, i, found.with(*sink));
                });
            } else {
                // A share of few positions among many workers.
                for unit in block.mine(count * fours) {
                    let (m, i) = of_unit(unit);
                    let (row, sink) = to(m);
                    put_sums(p.splits, (call, &y), &row, i, Sums::NONE.with(sink));
                }
            }
            block.sync();
            row += together;
            if row >= rows {
                (h, row) = (h + 1, 0);
            }
        }
        true
    }
}

/// Rows of queries from which on tensor cores are worth it.
const MANY: u32 = 2;

/// Attends to keys and values of bf16, where queries are many, on tensor cores. Whether it has.
unsafe fn many_rows(p: &Params, call: &crate::gpu::Call<'_>, block: &Block) -> bool {
    // SAFETY: the operands are the slots' and `check` has matched their extents; the rest is `run`'s caller's promise.
    unsafe {
        let (q, k, v, y) = (call.tensor(slot::Q), call.tensor(slot::K), call.tensor(slot::V), call.tensor(slot::Y));
        let (count, heads, group, d) = (call.rows(&q) * q.extent(2), q.extent(1), q.extent(2), q.extent(3));
        let is_free = p.is_beside_tiles != 0 || call.tiles.is_some_and(|tiles| tiles.is_free());
        let are_brains = k.dtype() == BF16 && v.dtype() == BF16;
        let is_fit = is_free && call.uses(Technique::FlashAttention) && are_brains && d <= 128 && d.is_multiple_of(8);
        // Of any type, but that what a share finds is f32.
        let y_chunk = if p.splits > 1 { 4 } else { 8 };
        let are_whole = is_whole(&q, 3, 8) && is_whole(&k, 2, 8) && is_whole(&v, 2, 8) && is_whole(&y, 3, y_chunk);
        if !is_fit || count < MANY || !are_whole {
            return false;
        }
        if warpgroup::is_for(p, call, block) {
            warpgroup::attend(p, call, block);
            return true;
        }
        let part_of_group = reciprocal(group as f32);
        let mut h = 0;
        while h < heads {
            // The tensors anew for each row, which the compiler would hold over all loops otherwise: there are no
            // registers for it.
            let row = |operand: u32, m: u32| {
                let r = quotient(m, group, part_of_group);
                call.tensor(memory::opaque_word(operand) as usize).row([r, h, m - r * group])
            };
            let (k, v) = (Head::new(&call.tensor(slot::K), h), Head::new(&call.tensor(slot::V), h));
            // As if there were no end of positions.
            let seen = |m: u32| {
                let r = quotient(m, group, part_of_group);
                call.first_pos() + call.row_first() + r + 1 + p.ahead
            };
            let all = call.first_pos() + call.pass_rows();
            let share = p.share(all, call.block::<1>());
            let positions = if p.splits > 1 { share.1 } else { within(seen, all)(count - 1) };
            let window = p.window + p.ahead;
            let queries = &Rows { row: |m| row(slot::Q as u32, m), count, columns: d };
            let keys = &Rows { row: |t| k.row(t), count: positions, columns: d };
            let values = &Rows { row: |t| v.row(t), count: positions, columns: d };
            let results = &Rows { row: |m| row(slot::Y as u32, m), count, columns: d };
            let found_row = |m| call.tensor(memory::opaque_word(slot::Y as u32) as usize).row([h, 0, m]);
            let found = &Rows { row: found_row, count, columns: FOUND + d };
            let scale = p.scale * LOG2_E;
            let sinks = |m: u32| {
                let g = m - quotient(m, group, part_of_group) * group;
                LOG2_E * sink(p.splits, call, memory::opaque_word(slot::SINKS as u32) as usize, [h, g])
            };
            match (p.splits > 1, d <= 64) {
                (false, true) => flash::attend_64(block, queries, keys, values, results, seen, window, sinks, scale),
                (false, false) => flash::attend_128(block, queries, keys, values, results, seen, window, sinks, scale),
                (true, true) => {
                    flash::attend_share_64(block, queries, keys, values, found, seen, share.into(), sinks, scale)
                }
                (true, false) => {
                    flash::attend_share_128(block, queries, keys, values, found, seen, share.into(), sinks, scale)
                }
            }
            h += 1;
        }
        true
    }
}

/// `m / n`, `part` being `1 / n` but for its last bits, of an m below 2^20: no quotient is so near to a whole number,
/// half a step further on, that these would matter. A division is some 20 instructions, one after the other.
///
/// # Safety
/// `n` is not 0.
pub(super) unsafe fn quotient(m: u32, n: u32, part: f32) -> u32 {
    // SAFETY: finite, and no more than m.
    let quotient = unsafe { ((m as f32 + 0.5) * part).to_int_unchecked() };
    debug_assert_eq!(quotient, m / n);
    quotient
}

/// Whether all rows of `x`, of so many dimensions beside theirs, begin on sixteen bytes, which are `chunk` elements at
/// most.
fn is_whole(x: &Tensor, dims: usize, chunk: u32) -> bool {
    let mut is_whole = x.address([0, 0]).addr().is_multiple_of(16);
    for dim in 0..dims {
        is_whole &= x.stride(dim).is_multiple_of(chunk);
    }
    is_whole
}

/// The positions, of `from..to`, of part `number` of `parts`, whole 32s but for the last.
pub(in crate::kernels) fn part((from, to): (u32, u32), number: u32, parts: u32) -> (u32, u32) {
    let len = (to - from).div_ceil(WARP).div_ceil(parts) * WARP;
    let (first, end) = (from + number * len, from + (number + 1) * len);
    (if first < to { first } else { to }, if end < to { end } else { to })
}

/// Writes a row's slice, or what a split found of it, to operand `y`; the sinks are operand `sinks`.
pub(in crate::kernels) unsafe fn put(
    p: &Params,
    (call, [y, sinks]): (&crate::gpu::Call<'_>, [usize; 2]),
    [r, h, g]: [u32; 3],
    d: u32,
    slice: u32,
    lane: u32,
    found: Found,
) {
    let split = p.splits > 1;
    // SAFETY: `i` is below the row's length, which is as much more where that holds what a split found; elements are
    // written by one lane each.
    unsafe {
        let found = found.with(sink(p.splits, call, sinks, [h, g]));
        let y = &call.tensor(y);
        let row = if split { y.row([h, 0, r * call.tensor(slot::Q).extent(2) + g]) } else { y.row([r, h, g]) };
        if split && slice == 0 && lane == 0 {
            call.put_in_row(y, &row, 0, found.max);
            call.put_in_row(y, &row, 1, found.total);
        }
        let (factor, at) = if split { (1.0, FOUND) } else { (reciprocal(found.total), 0) };
        // A loop for each way to write, since one around both would not be unrolled, and the sums would go to memory
        // for it.
        if y.is_flagged() {
            for step in 0..PER_LANE {
                let i = slice + dimension(step, lane);
                if i < d {
                    call.put_in_row(y, &row, at + i, found.sums[step] * factor);
                }
            }
            return;
        }
        for step in 0..PER_LANE {
            let i = slice + dimension(step, lane);
            if i < d {
                row.set(at + i, found.sums[step] * factor);
            }
        }
    }
}

/// Writes dimensions i to i + 3 of `row`, a query's in `y`, or what a split of `splits` found of them.
///
/// # Safety
/// As [`MacroKernel::gpu`]; the query has them, and they are the calling thread's.
pub(in crate::kernels) unsafe fn put_sums(
    splits: u32,
    (call, y): (&crate::gpu::Call<'_>, &Tensor),
    row: &Row,
    i: u32,
    found: Sums,
) {
    // SAFETY: the caller's promises; a split's row has `FOUND` more.
    unsafe {
        let split = splits > 1;
        if split && i == 0 {
            call.put_in_row(y, row, 0, found.max);
            call.put_in_row(y, row, 1, found.total);
        }
        let (factor, at) = if split { (1.0, FOUND) } else { (reciprocal(found.total), 0) };
        call.put_four(y, row, at + i, found.sums.map(|sum| sum * factor));
    }
}

/// Puts what a warp found into the [`PART`] words of shared memory from `at` on.
///
/// # Safety
/// They are the warp's until the block's next barrier, and every lane makes this same call.
pub(in crate::kernels) unsafe fn keep(at: u32, found: &Found, lane: u32) {
    // SAFETY: the caller's promises; a word is one lane's.
    unsafe {
        if lane == 0 {
            shared::store(at, found.max.to_bits());
            shared::store(at + 1, found.total.to_bits());
        }
        for step in 0..PER_LANE {
            shared::store(at + 2 + dimension(step, lane), found.sums[step].to_bits());
        }
    }
}

/// What the parts kept from word `at` on found, together; parts without positions have found nothing.
///
/// # Safety
/// They have been [kept](keep) before a barrier.
pub(in crate::kernels) unsafe fn merge(at: u32, parts: u32, positions: (u32, u32), lane: u32) -> Found {
    let mut all = Found { max: f32::NEG_INFINITY, total: 0.0, sums: [0.0; PER_LANE] };
    // SAFETY: the parts' words have been written before a barrier.
    unsafe {
        for number in 0..parts {
            let (first, end) = part(positions, number, parts);
            if first == end {
                break;
            }
            let at = at + number * PART;
            let max = f32::from_bits(shared::load(at));
            let largest = larger(all.max, max);
            // With every score so far at -inf (a NaN or an overflow upstream) the weights are NaN, as in the reference.
            let (old, new) = (if number == 0 { 0.0 } else { exp(all.max - largest) }, exp(max - largest));
            all.max = largest;
            all.total = fma(all.total, old, f32::from_bits(shared::load(at + 1)) * new);
            for step in 0..PER_LANE {
                let sum = f32::from_bits(shared::load(at + 2 + dimension(step, lane)));
                all.sums[step] = fma(all.sums[step], old, sum * new);
            }
        }
    }
    all
}

/// A query row and the cache of its head.
pub(in crate::kernels) struct Heads<Q> {
    pub(in crate::kernels) q: Q,
    pub(in crate::kernels) k: Head,
    pub(in crate::kernels) v: Head,
    pub(in crate::kernels) d: u32,
    pub(in crate::kernels) scale: f32,
}

/// Attends to positions `first..end`, adding up the dimensions from `slice` on.
pub(in crate::kernels) unsafe fn attend<Q: Query>(
    head: &Heads<Q>,
    slice: u32,
    first: u32,
    end: u32,
    lane: u32,
) -> Found {
    let Heads { q, k, v, d, scale } = *head;
    let mut found = Found { max: f32::NEG_INFINITY, total: 0.0, sums: [0.0; PER_LANE] };
    // Sixteen bytes of a key row at a time, four of a value row, where they lie so.
    let by_eight = q.by_eight() && k.first.is(BF16) && d % 8 == 0 && k.step % 8 == 0 && k.first.is_aligned(16);
    let by_two = v.first.is(BF16) && d % 2 == 0 && v.step % 2 == 0 && v.first.is_aligned(4);
    // SAFETY: positions and dimensions are inside the rows (caller); whole warps shuffle.
    unsafe {
        let mut t0 = first;
        while t0 < end {
            let t = t0 + lane;
            let mut score = f32::NEG_INFINITY;
            if t < end {
                let k = k.row(t);
                let mut dot = 0.0;
                let mut i = 0;
                if by_eight {
                    while i < d {
                        let (keys, query) = (k.load16(i), q.eight(i));
                        for j in 0..4 {
                            let (low, high) = (f32::from_bits(keys[j] << 16), f32::from_bits(keys[j] & 0xffff_0000));
                            dot = fma(query[2 * j], low, dot);
                            dot = fma(query[2 * j + 1], high, dot);
                        }
                        i += 8;
                    }
                }
                while i < d {
                    dot = fma(q.get(i), k.get(i), dot);
                    i += 1;
                }
                score = dot * scale;
            }
            let new_max = warp::max(larger(found.max, score));
            // With every score so far at -inf (a NaN or an overflow upstream) the weights are NaN, as they are
            // in the reference.
            let shrink = exp(found.max - new_max);
            let weight = if t < end { exp(score - new_max) } else { 0.0 };
            found.max = new_max;
            found.total = fma(found.total, shrink, warp::sum(weight));
            for i in 0..PER_LANE {
                found.sums[i] *= shrink;
            }
            let count = if end - t0 < WARP { end - t0 } else { WARP };
            for j in 0..count {
                let weight = f32::from_bits(warp::shuffle(weight.to_bits(), j));
                let v = v.row(t0 + j);
                for pair in 0..PER_LANE / 2 {
                    let i = slice + dimension(2 * pair, lane);
                    if by_two && i < d {
                        let both = memory::load(v.at(i).cast::<u32>());
                        let (low, high) = (f32::from_bits(both << 16), f32::from_bits(both & 0xffff_0000));
                        found.sums[2 * pair] = fma(weight, low, found.sums[2 * pair]);
                        found.sums[2 * pair + 1] = fma(weight, high, found.sums[2 * pair + 1]);
                    } else {
                        for step in 2 * pair..2 * pair + 2 {
                            let i = slice + dimension(step, lane);
                            if i < d {
                                found.sums[step] = fma(weight, v.get(i), found.sums[step]);
                            }
                        }
                    }
                }
            }
            t0 += WARP;
        }
    }
    found
}

/// One head of a cache: its first row, and how far it is from one row to the next.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Head {
    pub(super) first: Row,
    pub(super) step: u32,
}

impl Head {
    pub(in crate::kernels) fn new(cache: &Tensor, head: u32) -> Head {
        Head { first: cache.row([head]), step: cache.stride(1) }
    }

    /// The row of position `t`.
    pub(super) fn row(&self, t: u32) -> Row {
        self.first.after(u64::from(t) * u64::from(self.step))
    }

    /// Bytes from a position's row, of bf16, to the next.
    pub(super) fn bytes_apart(&self) -> usize {
        2 * self.step as usize
    }
}
