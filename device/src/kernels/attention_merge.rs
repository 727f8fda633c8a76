//! y[r,h,g,:] = sum over s of w[s] * sums[h,s,m,:] / sum over s of w[s] * total[h,s,m], with m = r * group + g, w[s] =
//! exp(max[h,s,m] - M) and M the largest of the maxima: what the splits of an `attention` found, together.
//!
//! parts: [kv_heads, splits, rows * group, [`FOUND`] + d] f32, each row maximum, total, two more and the weighted sums;
//! y: [rows, kv_heads, group, d]. A total of 0 says that the split had no positions (else its largest score alone
//! counts 1). Where every score of a split is -inf (a NaN or an overflow upstream) the result is NaN.

use super::attention::FOUND;
use super::*;
use crate::arch::scalar::{exp2, fma, reciprocal};
use crate::arch::{atomic, memory, warp};
use crate::gpu::flags::{Read, Wait};
use core::f32::consts::LOG2_E;
use core::hint::cold_path;
use perpetua_shared::divisor::Divisor;
use perpetua_shared::flag;

/// See the module head.
#[derive(Debug)]
pub struct AttentionMerge;

/// Parameters: none.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {}

/// Splits there may be.
pub const MAX_SPLITS: u32 = 32;

/// Splits of which a thread has the loads under way, and the next ones' while it merges these: memory answers long
/// after it is asked.
const AHEAD: usize = 4;

/// Bytes of `parts` that nobody reads: two words of each, see the [`FOUND`] words.
pub(super) fn unread_bytes(parts: &Operand) -> u64 {
    let [heads, splits, group, _] = parts.extent.map(u64::from);
    product([8, heads, splits, group])
}

slots! {
    PARTS: read "parts",
    Y: write "y",
}

// A product that merges has the parts where its row would be.
const _: () = assert!(slot::PARTS == linear::slot::X);

impl MacroKernel for AttentionMerge {
    const NAME: &'static str = "attention_merge";
    const SLOTS: &'static [Slot] = slot::ALL;
    type Params = Params;
    const FLAGGED: &'static [usize] = &[slot::PARTS, slot::Y];

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(_: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [parts, y] = io else { unreachable!("slots were counted") };
        merged_len(parts)?;
        rules::dtype("y", y, &rules::FLOATS)?;
        rules::rank("y", y, 4)?;
        rules::unit_stride("y", y)?;
        rules::extent("y", y, 1, parts.extent[0])?;
        rules::extent("parts", parts, 2, y.extent[0].saturating_mul(y.extent[2]))?;
        rules::flagged_in(&[("parts", parts), ("y", y)], y.extent[0])?;
        rules::extent("parts", parts, 3, y.extent[3].saturating_add(FOUND))
    }

    fn cost(_: &Params, io: &[Operand]) -> Cost {
        let all = default_cost(Self::SLOTS, io);
        let unread = io.first().map_or(0, unread_bytes);
        Cost { bytes_read: all.bytes_read.saturating_sub(unread), ..all }
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(_: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [parts, y] = core::array::from_fn(|i| call.tensor(i));
        let (queries, group, d) = (parts.extent(2), y.extent(2), y.extent(3));
        for (at, value) in merged(&parts).into_iter().enumerate() {
            let (h, m) = (at / d / queries, at / d % queries);
            if m / group < call.rows(slot::Y) {
                y.set([m / group, h, m % group, at % d], value);
            }
        }
        Ok(())
    }

    unsafe fn gpu(_: &Params, call: &gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        // SAFETY: the operands are the slots' and `check` has matched their extents; a thread writes its own elements.
        unsafe {
            let parts = Parts::new(call, Merge::of(&call.tensor(slot::PARTS)));
            let (rows, group, d) = {
                let y = call.tensor(slot::Y);
                (call.rows(&y), y.extent(2), y.extent(3))
            };
            // Query m of a head is a row's: there are as many of those as of queries together.
            let queries = parts.of.extent(2);
            let place_of = |item: u32| {
                let (h, m) = (item / queries, item % queries);
                [m / group, h, m % group]
            };
            if parts.by_eight() {
                for unit in block.mine(parts.of.extent(0) * queries * d / 8) {
                    let (at, i) = (place_of(8 * unit / d), 8 * unit % d);
                    if at[0] >= rows {
                        continue;
                    }
                    let place = parts.place(8 * unit);
                    let merged = parts.merged::<8>(place);
                    let y = call.tensor(slot::Y);
                    let row = y.row(at);
                    for j in 0..8 {
                        call.put_in_row(&y, &row, i + j as u32, merged[j]);
                    }
                }
                return Ok(());
            }
            for unit in block.mine(parts.of.extent(0) * queries * d) {
                let ([r, h, g], i) = (place_of(unit / d), unit % d);
                if r >= rows {
                    continue;
                }
                let place = parts.place(unit);
                let [merged] = parts.merged::<1>(place);
                call.put(&call.tensor(slot::Y), [r, h, g, i], merged);
            }
        }
        Ok(())
    }
}

/// Judges `parts`, as the module head has them; returns how many elements they make.
#[cfg(not(target_arch = "nvptx64"))]
pub(super) fn merged_len(parts: &Operand) -> Result<u64, Violation> {
    rules::dtype("parts", parts, &[perpetua_shared::DType::F32])?;
    rules::rank("parts", parts, 4)?;
    rules::unit_stride("parts", parts)?;
    let [heads, splits, group, width] = parts.extent;
    if splits == 0 || splits > MAX_SPLITS {
        return Err(format!("`parts` has {splits} splits, expected 1 to {MAX_SPLITS}"));
    }
    let d =
        width.checked_sub(FOUND).ok_or_else(|| format!("`parts` has rows of {width}, expected {FOUND} and more"))?;
    Ok(u64::from(heads) * u64::from(group) * u64::from(d))
}

/// What they make, as one row.
#[cfg(not(target_arch = "nvptx64"))]
pub(super) fn merged(parts: &crate::io::Tensor) -> Vec<f32> {
    let mut row = Vec::new();
    for h in 0..parts.extent(0) {
        for g in 0..parts.extent(2) {
            let found = (0..parts.extent(1)).filter(|s| parts.get([h, *s, g, 1]) != 0.0);
            let max = found.clone().map(|s| parts.get([h, s, g, 0])).fold(f32::NEG_INFINITY, f32::max);
            let weights: Vec<(usize, f32)> = found.map(|s| (s, (parts.get([h, s, g, 0]) - max).exp())).collect();
            let sum = |at: usize| weights.iter().map(|(s, weight)| weight * parts.get([h, *s, g, at])).sum::<f32>();
            let total = sum(1);
            row.extend((FOUND as usize..parts.extent(3)).map(|i| sum(i) / total));
        }
    }
    row
}

/// What an element's head and query are found with: the elements of a query, and the queries of a head, to divide by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Merge(pub(crate) [Divisor; 2]);

impl Merge {
    /// Of nothing.
    pub(crate) const NONE: Merge = Merge([Divisor(0); 2]);

    /// Of `parts` as the module head has them.
    pub(crate) fn of(parts: &gpu::Tensor) -> Merge {
        Merge::new(parts.extent(3) - FOUND, parts.extent(2))
    }

    /// Of queries of `d` elements, `group` to a head.
    pub(crate) fn new(d: u32, group: u32) -> Merge {
        Merge([Divisor::of(d), Divisor::of(group)])
    }
}

/// What splits found, operand `parts`, to be merged by whoever reads it.
#[derive(Clone, Copy)]
pub(crate) struct Parts<'a> {
    call: &'a gpu::Call<'a>,
    of: gpu::Tensor,
    merge: Merge,
}

impl Parts<'_> {
    /// Those of `call`, as the module head has them.
    ///
    /// # Safety
    /// Operand `parts` is such, which `merge` is [of](Merge::of).
    pub(crate) unsafe fn new<'a>(call: &'a gpu::Call<'a>, merge: Merge) -> Parts<'a> {
        // SAFETY: the caller's promise.
        Parts { call, of: unsafe { call.tensor(slot::PARTS) }, merge }
    }

    /// Whether eight elements may be merged at once, from every eighth on.
    fn by_eight(&self) -> bool {
        let strides = [self.of.stride(0), self.of.stride(1), self.of.stride(2)];
        are_in_eights(strides, self.of.extent(3)) && self.of.row([0]).is_aligned(16)
    }

    /// Where elements from `at` on of y, all heads' as one row, lie in the first split; the others follow by their
    /// stride.
    pub(crate) fn place(&self, at: u32) -> Place {
        let (group, d) = (self.of.extent(2), self.of.extent(3) - FOUND);
        let Merge([by_d, by_group]) = self.merge;
        let item = by_d.divide(at);
        let head = by_group.divide(item);
        Place { row: self.of.row([head, 0, item - head * group]).at(0), i: at - item * d }
    }

    /// Waits until split `split` has begun to write what it found of elements `place`. All of it, asked for by every
    /// block again and again, would be more than L2 gives beside what attention itself wants.
    ///
    /// # Safety
    /// As [`Tensor::get`](gpu::Tensor::get).
    unsafe fn await_split(&self, place: Place, split: u32) {
        if self.of.is_flagged() {
            let part = self.part(place, split);
            // SAFETY: the caller's promise.
            self.call.once_there(slot::PARTS, || unsafe { [atomic::load_relaxed(part)] });
        }
    }

    /// What splits `first` to `first + S - 1` found of elements `place` and the next N - 1, asked for: N is 1, or,
    /// [by eight](Parts::by_eight), 8.
    ///
    /// # Safety
    /// As [`Tensor::get`](gpu::Tensor::get).
    unsafe fn fetch<const S: usize, const N: usize>(&self, place: Place, first: u32) -> Found<S, N> {
        // SAFETY: the caller's promise.
        unsafe {
            if self.of.is_flagged() {
                let (one, four) = (|at| atomic::load_relaxed(at), |at| atomic::load16_relaxed(at));
                self.fetch_by(place, first, one, four)
            } else {
                cold_path();
                self.fetch_by(place, first, |at| memory::load(at), |at: *const u32| memory::load16(at.cast()))
            }
        }
    }

    /// [`fetch`](Parts::fetch), a word or four at a time.
    ///
    /// # Safety
    /// As [`fetch`](Parts::fetch).
    unsafe fn fetch_by<const S: usize, const N: usize>(
        &self,
        place: Place,
        first: u32,
        one: impl Fn(*const u32) -> u32,
        four: impl Fn(*const u32) -> [u32; 4],
    ) -> Found<S, N> {
        let mut found = Found::NOTHING;
        for ahead in 0..S {
            // Rows are of splits that are there, f32, and of `FOUND` elements and as many more as y's (caller).
            let part = self.part(place, first + ahead as u32);
            found.heads[ahead] = [one(part), one(part.wrapping_add(1))];
            let at = part.wrapping_add((FOUND + place.i) as usize);
            if N == 1 {
                found.values[ahead][0] = one(at);
            } else {
                let halves = [four(at), four(at.wrapping_add(4))];
                for j in 0..N {
                    found.values[ahead][j] = halves[j / 4][j % 4];
                }
            }
        }
        found
    }

    /// The row of split `split`; beyond the last it is the last's once more.
    fn part(&self, place: Place, split: u32) -> *const u32 {
        let (splits, step) = (self.of.extent(1), self.of.stride(1));
        let split = if split < splits { split } else { splits - 1 };
        place.row.wrapping_add((u64::from(split) * u64::from(4 * step)) as usize).cast_const().cast()
    }

    /// [`fetch`](Parts::fetch), once all is there.
    ///
    /// # Safety
    /// As [`fetch`](Parts::fetch).
    unsafe fn there<const S: usize, const N: usize>(&self, place: Place, first: u32) -> Found<S, N> {
        // SAFETY: the caller's promise.
        let fetch = || unsafe { self.fetch(place, first) };
        if self.of.is_flagged() { self.call.once_there(slot::PARTS, fetch) } else { fetch() }
    }

    /// Elements `place` and the next N - 1.
    ///
    /// # Safety
    /// As [`fetch`](Parts::fetch).
    pub(crate) unsafe fn merged<const N: usize>(&self, place: Place) -> [f32; N] {
        let (mut all, mut first) = (Merged::nothing(), 0);
        loop {
            // SAFETY: the caller's promise.
            let found = unsafe {
                self.await_split(place, first);
                self.there::<AHEAD, N>(place, first)
            };
            all.add(self, first, found);
            first += AHEAD as u32;
            if first >= self.of.extent(1) {
                return all.elements();
            }
        }
    }

    /// Calls `put(unit, merged)` for units `unit`, `unit` + `step` and so on of eight elements each, as long as `go_on`
    /// says so of one; those that `clamped` makes of them are there.
    ///
    /// PERF: what comes next is asked for before what is there is merged, both in one place: elsewhere once more, for
    /// what was asked for too early, it was as much code again.
    ///
    /// Whole warps that do it `together`, with as many units for each lane, go on together, too: `put` may have them
    /// meet. What one lane has to look for again all do; apart from each other, on their way to where they meet, it
    /// would be the chip's business whether they get there.
    ///
    /// # Safety
    /// As [`fetch`](Parts::fetch); eight elements may be [merged at once](are_in_eights).
    pub(crate) unsafe fn each_eight(
        &self,
        mut unit: u32,
        step: u32,
        together: bool,
        go_on: impl Fn(u32) -> bool,
        clamped: impl Fn(u32) -> u32,
        mut put: impl FnMut(u32, [f32; 8]),
    ) {
        let place_of = |unit: u32| self.place(8 * clamped(unit));
        // What is there, of which unit and from which split on; nothing as yet. No `Option`, whose words would be
        // nobody's on some ways, and so held in registers over all bodies.
        let (mut found, mut here, mut of, mut is_found) = (Found::<AHEAD, 8>::NOTHING, 0, 0, false);
        let (mut asked, mut wait, mut goes_on) = (Found::NOTHING, Wait::default(), true);
        // SAFETY: the caller's promise.
        unsafe {
            let (mut place, mut all, mut first) = (place_of(unit), Merged::nothing(), 0);
            self.await_split(place, 0);
            loop {
                if goes_on {
                    asked = self.fetch(place, first);
                }
                if is_found {
                    all.add(self, of, found);
                    if of + AHEAD as u32 >= self.of.extent(1) {
                        put(here, all.elements());
                        all = Merged::nothing();
                    }
                    if !goes_on {
                        return;
                    }
                }
                if self.of.is_flagged() {
                    let of_all = |bits: u32| if together { warp::union(bits) } else { bits };
                    let lacks = of_all(self.call.lacks(&asked));
                    if lacks != 0 && of_all(u32::from(!self.call.goes_on(slot::PARTS, lacks, &mut wait))) == 0 {
                        is_found = false;
                        continue;
                    }
                    self.call.ends(&wait);
                    wait = Wait::default();
                }
                (found, here, of, is_found) = (asked, unit, first, true);
                first += AHEAD as u32;
                if first >= self.of.extent(1) {
                    (unit, first) = (unit + step, 0);
                    goes_on = go_on(unit);
                    if goes_on {
                        place = place_of(unit);
                    }
                }
            }
        }
    }

    /// A word as a number: without its flag, which is in no word where there are none.
    fn number(&self, word: u32) -> f32 {
        f32::from_bits(word & if self.of.is_flagged() { !flag::MASK } else { u32::MAX })
    }
}

/// What some splits found of N elements, together.
#[derive(Clone, Copy)]
struct Merged<const N: usize> {
    max: f32,
    total: f32,
    sums: [f32; N],
}

impl<const N: usize> Merged<N> {
    fn nothing() -> Merged<N> {
        Merged { max: f32::NEG_INFINITY, total: 0.0, sums: [0.0; N] }
    }

    /// Adds what S splits of `parts`, from split `first` on, have found; those that are not there count nothing.
    fn add<const S: usize>(&mut self, parts: &Parts<'_>, first: u32, found: Found<S, N>) {
        let mut max = self.max;
        for ahead in 0..S {
            // Without positions the maximum is -inf, which makes no other smaller.
            let of = parts.number(found.heads[ahead][0]);
            max = if of > max { of } else { max };
        }
        if first > 0 {
            let shrink = if self.total != 0.0 { exp2((self.max - max) * LOG2_E) } else { 0.0 };
            self.total *= shrink;
            for j in 0..N {
                self.sums[j] *= shrink;
            }
        }
        self.max = max;
        for ahead in 0..S {
            let [largest, of] = [parts.number(found.heads[ahead][0]), parts.number(found.heads[ahead][1])];
            // A split of nothing but -inf counts nothing beside others, and alone makes 0 of 0.
            let is_there = first + (ahead as u32) < parts.of.extent(1) && of != 0.0 && largest > f32::NEG_INFINITY;
            // A power for each, 0 for what is not there: around a choice of powers there would be branches.
            let weight = exp2(if is_there { (largest - max) * LOG2_E } else { f32::NEG_INFINITY });
            self.total = fma(weight, of, self.total);
            for j in 0..N {
                self.sums[j] = fma(weight, parts.number(found.values[ahead][j]), self.sums[j]);
            }
        }
    }

    /// The elements.
    fn elements(&self) -> [f32; N] {
        let (factor, mut elements) = (reciprocal(self.total), self.sums);
        for j in 0..N {
            elements[j] *= factor;
        }
        elements
    }
}

/// Whether eight elements of parts on sixteen bytes, their rows of `width` elements apart by `strides`, may be merged
/// at once, from every eighth on.
pub(crate) fn are_in_eights([a, b, c]: [u32; 3], width: u32) -> bool {
    (a | b | c).is_multiple_of(4) && (width - FOUND).is_multiple_of(8)
}

/// Where elements of a head lie, see [`Parts::place`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    row: *mut u8,
    i: u32,
}

/// What S splits found, as words: maxima and totals, and of N elements the sums.
#[derive(Clone, Copy, Debug)]
struct Found<const S: usize, const N: usize> {
    heads: [[u32; 2]; S],
    values: [[u32; N]; S],
}

impl<const S: usize, const N: usize> Found<S, N> {
    const NOTHING: Found<S, N> = Found { heads: [[0; 2]; S], values: [[0; N]; S] };
}

impl<const S: usize, const N: usize> Read for Found<S, N> {
    fn lacks(&self, flag: u32) -> u32 {
        let mut lacks = 0;
        for ahead in 0..S {
            // By split, and those together at last: all in a row would wait for each other.
            lacks |= memory::opaque_word(self.heads[ahead].lacks(flag) | self.values[ahead].lacks(flag));
        }
        lacks
    }
}
