//! Rows of weights that no loader brings, two at a time: those of the experts that a row goes to, which are known only
//! when it has come.
//!
//! A warp has one pair of rows, gate's and up's, after the other, and a lane units of both, as in
//! [`long`](super::long). While it multiplies those of a pair the next ones are on their way: waited for one after the
//! other, each would take what L2 takes to answer.
//!
//! The row of activations has been [staged](stage). For weights in fewer bits it becomes [whole numbers](super::whole);
//! zeros fill up what it lacks of whole lines, as their rows are.
//!
//! Back from the experts ([`parts`]) a row of weights for each slot is one product. With weights in fewer bits the
//! slots' rows of activations are one long row, as whole numbers in shared memory: as many units of it at a time, a
//! *group*, as have room.

use super::super::math::rsqrt;
use super::super::packed::{Eight, Four, LookedUp, Packed};
use super::super::rows::{STAGE, Staging, singles, stage_first};
use super::super::{Call, F32, Row, Tensor};
use super::long::Units;
use super::{Brain, First, Kind, Source};
use crate::arch::scalar::fma;
use crate::arch::{WARP, each_of_four, memory, shared, warp};
use crate::block::Block;
use crate::kernels::routing::{self, Found};

/// A form of weights as lanes multiply them afar, with a row that has been staged.
pub(crate) trait Afar: Units + LookedUp {
    /// Units of a lane under way at once, of either row: four at most.
    const AT_ONCE: u32;

    /// Elements of which a row of weights is multiples, filled up if need be.
    const FILLED: u32;

    /// Weights as they come.
    type Fetched: Copy;

    /// Asks for unit `unit` of the row at `row`.
    ///
    /// # Safety
    /// The row has it, and begins on sixteen bytes.
    unsafe fn fetch(row: *const u8, unit: u32) -> Self::Fetched;

    /// What was fetched, as it is multiplied.
    fn fetched(table: Self::Table, unit: u32, fetched: Self::Fetched) -> Self::Weights;

    /// Whether the staged row is [made](Afar::make) something else.
    const IS_MADE: bool;

    /// Makes of unit `unit` of the staged row, of `k` elements, what is multiplied.
    ///
    /// # Safety
    /// The unit is the thread's own, and nobody else reads it before the block's next barrier.
    unsafe fn make(unit: u32, k: u32);

    /// Unit `unit` of the row.
    ///
    /// # Safety
    /// It has been made, and the block has met since.
    unsafe fn made(unit: u32) -> Self::Row;
}

impl Afar for Brain {
    const AT_ONCE: u32 = 4;
    const FILLED: u32 = 8;
    type Fetched = [u32; 4];
    const IS_MADE: bool = false;

    unsafe fn fetch(row: *const u8, unit: u32) -> [u32; 4] {
        // SAFETY: the caller's promise.
        unsafe { memory::load16_stream(row.wrapping_add(16 * unit as usize)) }
    }

    fn fetched((): (), _: u32, fetched: [u32; 4]) -> [u32; 4] {
        fetched
    }

    unsafe fn make(_: u32, _: u32) {}

    unsafe fn made(unit: u32) -> [f32; 8] {
        // SAFETY: the caller's promise.
        unsafe { staged_eight(8 * unit) }
    }
}

/// Eight elements of the staged row.
///
/// # Safety
/// They have been staged, and nothing else has been made of them.
unsafe fn staged_eight(at: u32) -> [f32; 8] {
    // SAFETY: the caller's promise.
    unsafe { singles(shared::load16(STAGE + at), shared::load16(STAGE + at + 4)) }
}

/// No row in fewer bits is filled up to multiples of more.
const MOST_FILLED: u32 = Four::FILLED;

const _: () = assert!(MOST_FILLED.is_multiple_of(Eight::FILLED) && Brain::FILLED == 8);

/// Units of a row of `k` elements, whole eights.
fn units_of<F: Afar>(k: u32) -> u32 {
    k.div_ceil(F::FILLED) * (F::FILLED / F::UNIT)
}

/// A form of weights in fewer bits, whose row is made whole numbers of.
pub(crate) trait Numbered: Afar + Packed {
    /// Fours of words that a unit of the row is, five at most, beside its scale.
    const FOURS: u32;

    /// That of a unit's elements, by eights, one [stretch](Packed::stretch) after the other.
    fn of(eights: [[f32; 8]; 4]) -> Self::Row;

    /// Its fours, and the scale.
    fn in_fours(row: Self::Row) -> ([[u32; 4]; 5], f32);

    /// Of these.
    fn of_fours(fours: [[u32; 4]; 5], scale: f32) -> Self::Row;
}

/// Where the numbers of units stand.
trait Place: Copy {
    /// Word 0 of four `i`.
    fn four<P: Numbered>(self, i: u32) -> u32;

    /// The scale.
    fn scale<P: Numbered>(self) -> u32;
}

/// In the words in which the elements of so many units of the staged row have stood. Eight neighbours' sixteens begin
/// in two banks, so that of each two the order of fours is another.
#[derive(Clone, Copy)]
struct InPlace(u32);

impl Place for InPlace {
    fn four<P: Numbered>(self, i: u32) -> u32 {
        STAGE + P::stretch(self.0, i / 4) + 4 * ((self.0 / 2 + i) % 4)
    }

    fn scale<P: Numbered>(self) -> u32 {
        self.four::<P>(P::FOURS)
    }
}

/// One of a group's, whose first fours stand together, then their second ones, and so on.
#[derive(Clone, Copy)]
struct InGroup(u32);

impl Place for InGroup {
    fn four<P: Numbered>(self, i: u32) -> u32 {
        STAGE + 4 * (i * group::<P>() + self.0)
    }

    fn scale<P: Numbered>(self) -> u32 {
        STAGE + 4 * P::FOURS * group::<P>() + self.0
    }
}

/// Puts `row` there.
///
/// # Safety
/// The words are the thread's own until the block meets.
unsafe fn put<P: Numbered>(at: impl Place, row: P::Row) {
    let (fours, scale) = P::in_fours(row);
    // SAFETY: the caller's promise.
    unsafe {
        each!(unit i below P::FOURS as usize => { shared::store16(at.four::<P>(i as u32), fours[i % 5]) });
        shared::store(at.scale::<P>(), scale.to_bits());
    }
}

/// What was put there.
///
/// # Safety
/// The block has met since.
unsafe fn taken<P: Numbered>(at: impl Place) -> P::Row {
    let mut fours = [[0; 4]; 5];
    // SAFETY: the caller's promise.
    unsafe {
        each!(unit i below P::FOURS as usize => { fours[i % 5] = shared::load16(at.four::<P>(i as u32)) });
        P::of_fours(fours, f32::from_bits(shared::load(at.scale::<P>())))
    }
}

/// [`Afar::make`] of weights in fewer bits.
///
/// # Safety
/// As there.
pub(super) unsafe fn make_numbers<P: Numbered>(unit: u32, k: u32) {
    // SAFETY: the caller's promise: the numbers take the place of what they are made of, for which the row filled up
    // has room.
    unsafe {
        // Nothing has been staged beyond the row, and who reads another unit's place may find its numbers there.
        let eight = |at: u32| if at < k { staged_eight(at) } else { [0.0; 8] };
        put::<P>(InPlace(unit), P::of(eights_of::<P>(unit, k, eight)));
    }
}

/// What unit `unit` of a row of `k` elements is made of: what `eight` says of its eights, all of which it is asked for
/// at once, zeros of those that are not there.
fn eights_of<P: Numbered>(unit: u32, k: u32, eight: impl Fn(u32) -> [f32; 8]) -> [[f32; 8]; 4] {
    let (one, other) = (P::stretch(unit, 0), P::stretch(unit, P::STRETCHES - 1));
    let [a, b, c, d] = [eight(one), eight(one + 8), eight(other), eight(other + 8)];
    let there = |at: u32, values: [f32; 8]| if at < k { values } else { [0.0; 8] };
    [there(one, a), there(one + 8, b), there(other, c), there(other + 8, d)]
}

/// [`Afar::made`] of weights in fewer bits.
///
/// # Safety
/// As there.
pub(super) unsafe fn made_numbers<P: Numbered>(unit: u32) -> P::Row {
    // SAFETY: the caller's promise.
    unsafe { taken::<P>(InPlace(unit)) }
}

/// The form in which the rows of two stacks of weights, operands `gate` and `up` of so many elements, can be taken
/// here, if they can.
///
/// # Safety
/// The call has these operands.
pub(crate) unsafe fn form_of(call: &Call<'_>, [gate, up]: [usize; 2]) -> Option<Kind> {
    // SAFETY: the caller's promise.
    unsafe {
        let (gate, up) = (call.tensor(gate), call.tensor(up));
        let kind = Kind::of_experts(gate.dtype())?;
        let strides = gate.stride(0) | gate.stride(1) | up.stride(0) | up.stride(1);
        let bytes = if gate.is_packed() { strides } else { 2 * strides };
        let are_aligned = gate.weight_row([0, 0]).is_aligned(16) && up.weight_row([0, 0]).is_aligned(16);
        let k = gate.extent(2);
        // A choice of forms would be a table in memory.
        let filled = if gate.is_packed() { k.next_multiple_of(MOST_FILLED) } else { k };
        let has_room = k > 0 && k.is_multiple_of(8) && filled <= routing::most_staged(gate.extent(0));
        (has_room && gate.dtype() == up.dtype() && are_aligned && bytes.is_multiple_of(16)).then_some(kind)
    }
}

/// Stages `row`, of `k` elements, as [`stage_first`] does, eight at a time; as that does if they are no whole eights.
///
/// # Safety
/// As there.
pub(crate) unsafe fn stage(row: &First<'_>, how: Staging, k: u32, block: &Block) {
    // SAFETY: the caller's promises; a thread writes its own words, which others read behind the barrier.
    unsafe {
        if !row.is_whole() || !k.is_multiple_of(8) {
            return stage_first(row.call, how, block);
        }
        let norm = row.call.tensor(how.norm);
        let (units, weights) = (k / 8, norm.row([0]));
        let fetch = |unit: u32| {
            let at = |i: u32| 8 * (unit + i * block.threads);
            weights.eights([at(0), at(1), at(2), at(3)], k)
        };
        // Before the row is waited for.
        let mut eights = if norm.is_present() { fetch(block.thread) } else { [[0.0; 8]; 4] };
        let mut squares = 0.0;
        let put = |unit: u32, _: bool, values: [f32; 8]| {
            for i in 0..8 {
                squares = fma(values[i], values[i], squares);
            }
            put_staged(unit, values);
        };
        row.each(k, false, block, put);
        if norm.is_present() {
            let scale = rsqrt(block.sum(squares) / k as f32 + how.eps);
            let mut unit = block.thread;
            while unit < units {
                each_of_four!(i => {
                    let unit = unit + i * block.threads;
                    if unit < units {
                        let (mut values, weights) = (staged_eight(8 * unit), eights[i as usize]);
                        for i in 0..8 {
                            values[i] = values[i] * scale * weights[i];
                        }
                        put_staged(unit, values);
                    }
                });
                unit += 4 * block.threads;
                if unit < units {
                    eights = fetch(unit);
                }
            }
        }
        block.sync();
    }
}

/// Stages eight elements, those of unit `unit` of eight.
///
/// # Safety
/// Their words are the thread's own until the block meets.
unsafe fn put_staged(unit: u32, values: [f32; 8]) {
    let [a, b, c, d, e, f, g, h] = values.map(f32::to_bits);
    // SAFETY: the caller's promise.
    unsafe {
        shared::store16(STAGE + 8 * unit, [a, b, c, d]);
        shared::store16(STAGE + 8 * unit + 4, [e, f, g, h]);
    }
}

/// Makes of the staged row of `k` elements what [`pairs`] multiplies.
///
/// # Safety
/// Every thread of the block makes this same call, and has met the others since they staged the row, whose form is
/// [this](form_of).
pub(crate) unsafe fn make<F: Afar>(k: u32, block: &Block) {
    if !F::IS_MADE {
        return;
    }
    for unit in block.mine(units_of::<F>(k)) {
        // SAFETY: the caller's promises; a barrier follows.
        unsafe { F::make(unit, k) };
    }
    // SAFETY: as above.
    unsafe { block.sync() };
}

/// Units of two rows on their way.
#[derive(Clone, Copy)]
struct Asked<F: Afar> {
    gate: [F::Fetched; 4],
    up: [F::Fetched; 4],
}

/// Calls `finish(slot, column, sums, ask(slot, column))`, on one lane, for each of the `chosen` experts that were
/// `found` and every row, a column, of its two matrices, of which the sums are the products with the row that has been
/// [made](make).
///
/// # Safety
/// Every thread of the block makes this same call; operands `gate` and `up` are of [this form](form_of), one as large
/// as the other.
pub(crate) unsafe fn pairs<F: Afar>(
    call: &Call<'_>,
    [gate, up]: [usize; 2],
    (found, chosen): (Found, u32),
    block: &Block,
    ask: impl Fn(u32, u32) -> [f32; 2],
    finish: impl Fn(u32, u32, [f32; 2], [f32; 2]),
) {
    // SAFETY: the caller's promises; conditions around what a warp does together are the warp's.
    unsafe {
        let (n, units) = (call.tensor(gate).extent(1), units_of::<F>(call.tensor(gate).extent(2)));
        let (columns, table) = (Counted::by(n), F::table(call.tensor(gate).dtype()));
        let rows_of = |at: u32| {
            let [slot, column] = columns.split(at);
            let place = [found.expert(slot), column];
            [call.tensor(gate).weight_row(place), call.tensor(up).weight_row(place)]
        };
        let all = chosen * n;
        let mut at = block.warp();
        if at >= all {
            return;
        }
        let (mut rows, mut first, mut sums) = (rows_of(at), 0, [[0.0; 4]; 2]);
        let mut asked = ask_units::<F>(rows, block.lane(), units);
        let early_of = |at: u32| {
            let [slot, column] = columns.split(at);
            ask(slot, column)
        };
        let mut early = early_of(at);
        loop {
            let is_last = first + F::AT_ONCE * WARP >= units;
            let next_first = if is_last { 0 } else { first + F::AT_ONCE * WARP };
            let next_at = if is_last { at + block.warps() } else { at };
            let has_more = next_at < all;
            let mut next = asked;
            if has_more {
                if is_last {
                    rows = rows_of(next_at);
                }
                next = ask_units::<F>(rows, next_first + block.lane(), units);
            }
            each_of_four!(i => if i < F::AT_ONCE {
                let unit = first + i * WARP + block.lane();
                // One that is not there was asked for as the first.
                let (unit, row) = if unit < units { (unit, F::made(unit)) } else { (0, F::NOTHING) };
                let i = i as usize;
                F::multiply(&mut sums[0], i, F::fetched(table, unit, asked.gate[i]), row);
                F::multiply(&mut sums[1], i, F::fetched(table, unit, asked.up[i]), row);
            });
            if is_last {
                let total = |[a, b, c, d]: [f32; 4]| warp::sum((a + b) + (c + d));
                let totals = [total(sums[0]), total(sums[1])];
                if block.lane() == 0 {
                    let [slot, column] = columns.split(at);
                    finish(slot, column, totals, early);
                }
                sums = [[0.0; 4]; 2];
                if has_more {
                    early = early_of(next_at);
                }
            }
            if !has_more {
                return;
            }
            (at, first, asked) = (next_at, next_first, next);
        }
    }
}

/// Asks for a lane's next units of both rows, from unit `first` on; for the first one where there is none.
///
/// # Safety
/// As [`Afar::fetch`].
unsafe fn ask_units<F: Afar>([gate, up]: [Row; 2], first: u32, units: u32) -> Asked<F> {
    let place = |i: u32| if first + i * WARP < units { first + i * WARP } else { 0 };
    // SAFETY: the caller's promise.
    unsafe {
        let mut asked = Asked { gate: [F::fetch(gate.start(), place(0)); 4], up: [F::fetch(up.start(), place(0)); 4] };
        each_of_four!(i => if 0 < i && i < F::AT_ONCE {
            asked.gate[i as usize] = F::fetch(gate.start(), place(i));
            asked.up[i as usize] = F::fetch(up.start(), place(i));
        });
        asked
    }
}

/// Columns of a task whose sums have room beside a group, and where these stand.
const MOST_COLUMNS: u32 = 64;
const SUMS: u32 = routing::FREE_END - MOST_COLUMNS;

/// Units of a group: all lanes' at once, some times.
const fn group<P: Numbered>() -> u32 {
    let together = P::AT_ONCE * WARP;
    (SUMS - STAGE) / (4 * P::FOURS + 1) / together * together
}

const _: () = assert!(SUMS.is_multiple_of(4) && group::<Eight>() >= 384 && group::<Four>() >= 192);

/// Whether [`parts`] does this call of form `P`: the slots' rows of operand `x`, each with a row of operand `w`.
///
/// # Safety
/// The call has these operands, of rank 3.
pub(crate) unsafe fn has_parts<P: Numbered>(call: &Call<'_>, [x, w]: [usize; 2]) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        let (x, w) = (call.tensor(x), call.tensor(w));
        let (k, slots) = (w.extent(2), x.extent(1));
        let is_whole = k > 0 && k.is_multiple_of(8);
        let are_aligned = x.address([0, 0, 0]).addr().is_multiple_of(16)
            && (x.stride(0) | x.stride(1)).is_multiple_of(4)
            && w.weight_row([0, 0]).is_aligned(16)
            && (w.stride(0) | w.stride(1)).is_multiple_of(16);
        let has_room = w.extent(1) <= MOST_COLUMNS || slots * units_of::<P>(k) <= group::<P>();
        x.dtype() == F32 && P::is_of(w.dtype()) && is_whole && are_aligned && has_room
    }
}

/// Numbers that are counted in so many.
#[derive(Clone, Copy)]
struct Counted {
    by: u32,
    /// 2^32 / `by`, rounded up.
    share: u32,
}

impl Counted {
    fn by(by: u32) -> Counted {
        Counted { by, share: (u32::MAX / by).wrapping_add(1) }
    }

    /// How many times as many `number` is, and what is left. Exact as long as `number` times as many is below 2^32.
    fn split(self, number: u32) -> [u32; 2] {
        let times = if self.by == 1 { number } else { ((u64::from(number) * u64::from(self.share)) >> 32) as u32 };
        [times, number - times * self.by]
    }
}

/// The units of all slots of a row.
#[derive(Clone, Copy)]
struct Slots {
    w: Tensor,
    found: Found,
    /// Of each slot.
    units: Counted,
}

impl Slots {
    /// Asks for a lane's next units of row `column` of the weights, from `first` on; for the first one where there is
    /// none before `end`.
    ///
    /// # Safety
    /// As [`Afar::fetch`].
    unsafe fn ask<P: Numbered>(self, column: u32, first: u32, end: u32) -> [P::Fetched; 4] {
        let fetch = |i: u32| {
            let number = first + i * WARP;
            let [slot, unit] = self.units.split(if number < end { number } else { 0 });
            // SAFETY: the caller's promise; the slot is one of those chosen.
            unsafe { P::fetch(self.w.weight_row([self.found.expert(slot), column]).start(), unit) }
        };
        let mut asked = [fetch(0); 4];
        each_of_four!(i => if 0 < i && i < P::AT_ONCE {
            asked[i as usize] = fetch(i);
        });
        asked
    }
}

/// Calls `finish(column, sum, ask(column))`, on one lane, for every row, a column, of the matrices of the `chosen`
/// experts that were `found`, of which the sum over slots is that of the products with row `[r, slot]` of operand `x`.
///
/// # Safety
/// Every thread of the block makes this same call, which [has parts](has_parts), and nobody reads shared memory that a
/// task may have, but for what was found.
pub(crate) unsafe fn parts<P: Numbered>(
    call: &Call<'_>,
    [x, w]: [usize; 2],
    (r, found, chosen): (u32, Found, u32),
    block: &Block,
    ask: impl Fn(u32) -> (u32, f32),
    finish: impl Fn(u32, f32, (u32, f32)),
) {
    // SAFETY: the caller's promises; a group's numbers are a thread's each, read behind one barrier and written anew
    // behind another; a column's sum is one lane's.
    unsafe {
        let (x, w) = (call.tensor(x), call.tensor(w));
        let (n, k, table) = (w.extent(1), w.extent(2), P::table(w.dtype()));
        let units = units_of::<P>(k);
        let (slots, all) = (Slots { w, found, units: Counted::by(units) }, chosen * units);
        let mut from = 0;
        while from < all {
            let left = all - from;
            let end = from + if left < group::<P>() { left } else { group::<P>() };
            for at in block.mine(end - from) {
                let [slot, unit] = slots.units.split(from + at);
                let row = x.address([r, slot, 0]);
                let eight = |first: u32| {
                    // Of one that is not there the row's first comes.
                    let first = if first < k { first } else { 0 };
                    let at = row.wrapping_add(4 * first as usize);
                    singles(memory::load16(at), memory::load16(at.wrapping_add(16)))
                };
                put::<P>(InGroup(at), P::of(eights_of::<P>(unit, k, eight)));
            }
            block.sync();
            let mut column = block.warp();
            let (mut first, mut sums) = (from, [0.0; 4]);
            let mut early = if column < n { ask(column) } else { (0, 0.0) };
            let mut asked = if column < n {
                slots.ask::<P>(column, from + block.lane(), end)
            } else {
                slots.ask::<P>(0, from, end)
            };
            while column < n {
                let is_last = first + P::AT_ONCE * WARP >= end;
                let next_first = if is_last { from } else { first + P::AT_ONCE * WARP };
                let next_column = if is_last { column + block.warps() } else { column };
                let mut next = asked;
                if next_column < n {
                    next = slots.ask::<P>(next_column, next_first + block.lane(), end);
                }
                each_of_four!(i => if i < P::AT_ONCE {
                    let number = first + i * WARP + block.lane();
                    let is_there = number < end;
                    let [_, unit] = slots.units.split(if is_there { number } else { 0 });
                    let row = if is_there { taken::<P>(InGroup(number - from)) } else { P::NOTHING };
                    P::multiply(&mut sums, i as usize, P::fetched(table, unit, asked[i as usize]), row);
                });
                if is_last {
                    let sum = warp::sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
                    if block.lane() == 0 {
                        let before = if from > 0 { f32::from_bits(shared::load(SUMS + column)) } else { 0.0 };
                        if end == all {
                            finish(column, before + sum, early);
                        } else {
                            shared::store(SUMS + column, (before + sum).to_bits());
                        }
                    }
                    sums = [0.0; 4];
                    if next_column < n {
                        early = ask(next_column);
                    }
                }
                (column, first, asked) = (next_column, next_first, next);
            }
            // What the group is is read until here.
            block.sync();
            from = end;
        }
    }
}
