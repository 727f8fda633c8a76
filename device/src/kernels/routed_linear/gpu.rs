//! The GPU body of `routed_linear`: an expert's rows together, by a warpgroup where x is bf16 and the weights are that
//! or in fewer bits, on sixteen bytes, and the tiles' memory is free, else a warp for each product of two rows.
//!
//! ```text
//! shared memory  [ list: which row and slot | where its x is | rows of each expert | masks, then slots | its weight ]
//! ```
//! The masks, a bit for each expert that a row goes to, are how experts' rows are counted: a thread counts for its
//! experts, 32 of which have a word of each row in common, four rows at a time. Then the block goes through its units;
//! with each new expert it lists the rows that go there, in their order.

use super::*;
use crate::arch::{bulk, each_of_four, memory, shared};
use crate::block::FREE_SHARED;
use crate::gpu::math::{gate, gate_fours};
use crate::gpu::rows::{Vector, one_dot, two_dots};
use crate::gpu::warpgroup::{self, COLUMNS, Matrices, Place, ROWS, Rows, within};
use crate::gpu::{BF16, Call, Tensor};
use core::hint::cold_path;
use perpetua_shared::Technique;

/// Of an expert's rows: row and slot, the slot in the lowest bits; bytes from x's start; how much the slot counts.
const LIST: u32 = FREE_SHARED;
const OFFSETS: u32 = LIST + MAX_ROWS;
const SLOT_BITS: u32 = routing::MAX_CHOSEN.ilog2();
/// How many rows each expert has.
const COUNTS: u32 = OFFSETS + MAX_ROWS;
/// While they are counted, a bit for each expert that a row goes to: a word for 32 experts, of one row after the other.
const MASKS: u32 = COUNTS + routing::MAX_EXPERTS;
const MASK_WORDS: u32 = shared::KEPT - MASKS;
/// Afterwards, of all rows, whether they go to the expert at hand, and through which slot.
const FOUND: u32 = MASKS;
const WEIGHTS: u32 = FOUND + MAX_ROWS;

/// What [`FOUND`] has above the slot where there is one: as many as rows before have it are a row's place in the list.
const IS_FOUND: u32 = 1 << 16;

const _: () = {
    assert!(1 << SLOT_BITS == routing::MAX_CHOSEN && MAX_ROWS * routing::MAX_CHOSEN <= IS_FOUND);
    assert!(WEIGHTS + MAX_ROWS <= shared::KEPT && MASK_WORDS >= 4 * routing::MAX_EXPERTS / 32);
    assert!(LIST.is_multiple_of(4) && COUNTS.is_multiple_of(4) && MASKS.is_multiple_of(4));
};

/// Columns of one part of two matrices. One matrix is two: its second half of a part's columns is the other.
const HALF: u32 = COLUMNS / 2;

/// Bytes of a row of weights that the L2 cache is asked for a unit ahead: what the memory has time for while a part
/// ends and the next begins, some 2,500 cycles, and half as much again.
const AHEAD_BYTES: u32 = 512;

/// # Safety
/// As [`MacroKernel::gpu`].
pub(super) unsafe fn run(p: &Params, call: &Call<'_>, block: &Block) {
    // SAFETY: the operands are the slots', and every index is below its extent; what a thread has put into shared
    // memory others read behind a barrier, and another before it is put there anew: `multiply_part`'s last, or the one
    // after `plain`.
    unsafe {
        count(call, block);
        let work = Work::of(call);
        let mut mine = 0;
        for expert in block.mine(call.tensor(slot::W).extent(0)) {
            mine += work.units_of(expert);
        }
        let units = u64::from(block.sum_u32(mine));
        let share = |block: u32| (units * u64::from(block) / u64::from(p.blocks)) as u32;
        let (mut at, end) = (share(call.block::<0>()), share(call.block::<0>() + 1));
        let by_warpgroup = is_for(call, block, p);
        let mut unit = work.find(at);
        let mut listed = u32::MAX;
        while at < end {
            if unit.expert != listed {
                list(call, block, p, unit.expert);
                listed = unit.expert;
            }
            at += 1;
            let next = work.after(unit, at < end);
            let place = work.place(unit);
            if by_warpgroup {
                if at < end {
                    ask(call, block, next.expert, work.place(next).n0);
                }
                let matrices = Routed { call, expert: unit.expert };
                warpgroup::multiply_part::<2>(matrices, block, &place, &Outputs { call, p, expert: unit.expert });
            } else {
                plain(call, block, p, unit.expert, &place, work.columns);
                block.sync();
            }
            unit = next;
        }
    }
}

/// Whether the tensor cores can have this call's products.
unsafe fn is_for(call: &Call<'_>, block: &Block, p: &Params) -> bool {
    // SAFETY: the operands are the slots' (caller).
    unsafe {
        let (x, w, up) = (call.tensor(slot::X), call.tensor(slot::W), call.tensor(slot::UP));
        let is_whole = |tensor: &Tensor, strides: u32| {
            let bytes = if tensor.is_packed() { strides } else { 2 * strides };
            tensor.weight_row([0, 0]).is_aligned(16) && bytes.is_multiple_of(16)
        };
        let fits = x.dtype() == BF16
            && is_whole(&x, x.stride(0) | if p.has_slots != 0 { x.stride(1) } else { 0 })
            && (w.dtype() == BF16 || w.is_packed())
            && is_whole(&w, w.stride(0) | w.stride(1))
            && (!up.is_present() || up.dtype() == w.dtype() && is_whole(&up, up.stride(0) | up.stride(1)));
        fits && w.extent(2).is_multiple_of(8) && warpgroup::has_room(call, block)
    }
}

/// What there is to do.
#[derive(Clone, Copy)]
struct Work {
    /// Columns of an expert, and those that a part has; parts next to each other.
    columns: u32,
    width: u32,
    parts: u32,
    experts: u32,
}

/// A unit of it: some rows of an expert's, `ROWS` of them at most, and some columns.
#[derive(Clone, Copy)]
struct Unit {
    expert: u32,
    part: u32,
    tile: u32,
    /// How many tiles its rows are.
    tiles: u32,
}

impl Work {
    /// That of the call.
    unsafe fn of(call: &Call<'_>) -> Work {
        // SAFETY: the operands are the slots' (caller).
        unsafe {
            let [experts, columns] = [call.tensor(slot::W).extent(0), call.tensor(slot::W).extent(1)];
            let width = if call.tensor(slot::UP).is_present() { HALF } else { COLUMNS };
            Work { columns, width, parts: columns.div_ceil(width), experts }
        }
    }

    /// How many units expert `expert` has.
    unsafe fn units_of(&self, expert: u32) -> u32 {
        // SAFETY: counted before the block's last barrier (caller).
        unsafe { shared::load(COUNTS + expert) }.div_ceil(ROWS) * self.parts
    }

    /// The unit numbered `number`; none where there are no more.
    unsafe fn find(&self, number: u32) -> Unit {
        let (mut left, mut expert) = (number, 0);
        // SAFETY: counted (caller), zero behind the last expert up to four.
        unsafe {
            // Four experts at a time, then one by one.
            while expert < self.experts {
                let [a, b, c, d] = shared::load16(COUNTS + expert).map(|rows| rows.div_ceil(ROWS) * self.parts);
                if left < a + b + c + d {
                    break;
                }
                left -= a + b + c + d;
                expert += 4;
            }
            while expert < self.experts && left >= self.units_of(expert) {
                left -= self.units_of(expert);
                expert += 1;
            }
            if expert >= self.experts {
                return Unit { expert, part: 0, tile: 0, tiles: 1 };
            }
            let tiles = shared::load(COUNTS + expert).div_ceil(ROWS);
            Unit { expert, part: left / tiles, tile: left % tiles, tiles }
        }
    }

    /// The unit after `unit`, if there is one.
    unsafe fn after(&self, unit: Unit, is_there: bool) -> Unit {
        if unit.tile + 1 < unit.tiles {
            return Unit { tile: unit.tile + 1, ..unit };
        }
        if unit.part + 1 < self.parts {
            return Unit { part: unit.part + 1, tile: 0, ..unit };
        }
        let mut expert = unit.expert + 1;
        let mut tiles = 0;
        while is_there && tiles == 0 && expert < self.experts {
            // SAFETY: counted (caller).
            tiles = unsafe { shared::load(COUNTS + expert) }.div_ceil(ROWS);
            expert += 1;
        }
        Unit { expert: expert - 1, part: 0, tile: 0, tiles }
    }

    /// Which part of its expert's product a unit is.
    unsafe fn place(&self, unit: Unit) -> Place {
        let (m0, n0) = (unit.tile * ROWS, unit.part * self.width);
        // SAFETY: counted (caller).
        let rows = within(unsafe { shared::load(COUNTS + unit.expert) }, m0, ROWS);
        Place { n0, m0, rows, columns: within(self.columns, n0, HALF) }
    }
}

/// The experts of slots `slot` to `slot + 3` of row `row`, asked for together; the last one's where there are no more.
unsafe fn four_of(call: &Call<'_>, row: u32, slot: u32) -> [(u32, u32); 4] {
    // SAFETY: the operands are the slots', the row is there (caller).
    unsafe {
        let experts = call.tensor(slot::EXPERTS);
        let (from, last) = (experts.address([row, 0]).cast::<u32>(), experts.extent(1) - 1);
        let there = |slot: u32| if slot < last { slot } else { last };
        let [a, b, c, d] = [there(slot), there(slot + 1), there(slot + 2), there(slot + 3)];
        let of = |slot: u32| memory::load(from.wrapping_add(slot as usize));
        let (e, f, g, h) = (of(a), of(b), of(c), of(d));
        [(a, e), (b, f), (c, g), (d, h)]
    }
}

/// `masks`, the words of 128 experts from number `128 * four` on, with the bits of four of any.
fn with_bits(masks: [u32; 4], [a, b, c, d]: [u32; 4], four: u32) -> [u32; 4] {
    let word = |i: u32| {
        let bit = |expert: u32| if expert / 32 == 4 * four + i { 1 << (expert % 32) } else { 0 };
        masks[i as usize] | (bit(a) | bit(b)) | (bit(c) | bit(d))
    };
    [word(0), word(1), word(2), word(3)]
}

/// Counts the rows of each expert.
unsafe fn count(call: &Call<'_>, block: &Block) {
    // SAFETY: a thread writes its own masks, which others read behind a barrier, and the counts of its experts.
    unsafe {
        let rows = call.rows(&call.tensor(slot::EXPERTS));
        let (experts, slots) = (call.tensor(slot::W).extent(0), call.tensor(slot::EXPERTS).extent(1));
        for expert in block.mine(experts.next_multiple_of(4)) {
            shared::store(COUNTS + expert, 0);
        }
        // Words of a row, by fours; and how many rows' there is room for.
        let fours = experts.div_ceil(128);
        let most = MASK_WORDS / (4 * fours) / 4 * 4;
        let mut first = 0;
        while first < rows {
            let n = within(rows, first, most);
            let all = n.next_multiple_of(4);
            for at in block.mine(all * fours) {
                let (four, row) = (at / all, at % all);
                let mut masks = [0; 4];
                let mut slot = 0;
                while row < n && slot < slots {
                    let chosen = four_of(call, first + row, slot).map(|(_, expert)| expert);
                    masks = with_bits(masks, chosen, four);
                    slot += 4;
                }
                for i in 0..4 {
                    shared::store(MASKS + (4 * four + i) * all + row, masks[i as usize]);
                }
            }
            block.sync();
            for expert in block.mine(experts) {
                let (from, bit) = (MASKS + expert / 32 * all, expert % 32);
                let (mut count, mut row) = (shared::load(COUNTS + expert), 0);
                while row < all {
                    let [a, b, c, d] = shared::load16(from + row).map(|mask| mask >> bit & 1);
                    count += (a + b) + (c + d);
                    row += 4;
                }
                shared::store(COUNTS + expert, count);
            }
            block.sync();
            first += most;
        }
    }
}

/// Lists the rows of expert `expert`, in their order.
unsafe fn list(call: &Call<'_>, block: &Block, p: &Params, expert: u32) {
    // SAFETY: a thread writes its rows' own words, which others read behind a barrier; a place in the list has one row.
    unsafe {
        let (rows, slots) = (call.rows(&call.tensor(slot::EXPERTS)), call.tensor(slot::EXPERTS).extent(1));
        for row in block.mine(rows.next_multiple_of(4)) {
            let (mut found, mut slot) = (0, 0);
            while row < rows && slot < slots {
                let is_it = |(slot, of): (u32, u32)| if of == expert { IS_FOUND | slot } else { 0 };
                let [a, b, c, d] = four_of(call, row, slot).map(is_it);
                found |= (a | b) | (c | d);
                slot += 4;
            }
            shared::store(FOUND + row, found);
        }
        block.sync();
        for row in block.mine(rows) {
            let found = shared::load(FOUND + row);
            if found == 0 {
                continue;
            }
            let (mut before, mut other) = (0, 0);
            while other + 4 <= row {
                let [a, b, c, d] = shared::load16(FOUND + other);
                before += (a + b) + (c + d);
                other += 4;
            }
            let [a, b, c, _] = shared::load16(FOUND + other);
            let of = |one: u32, place: u32| if other + place < row { one } else { 0 };
            before += of(a, 0) + of(b, 1) + of(c, 2);
            let (place, slot) = (before / IS_FOUND, found % IS_FOUND);
            let x = call.tensor(slot::X);
            let elems = row * x.stride(0) + if p.has_slots != 0 { slot * x.stride(1) } else { 0 };
            shared::store(LIST + place, row << SLOT_BITS | slot);
            shared::store(OFFSETS + place, elems * x.elem_bytes() as u32);
            let weights = call.tensor(slot::WEIGHTS);
            let weight = if weights.is_present() { weights.get([row, slot]) } else { 1.0 };
            shared::store(WEIGHTS + place, weight.to_bits());
        }
        block.sync();
    }
}

/// Has the L2 cache ask for the first columns of what a part from column `n0` of expert `expert` on reads of the
/// weights.
unsafe fn ask(call: &Call<'_>, block: &Block, expert: u32, n0: u32) {
    if !call.uses(Technique::L2Prefetch) || block.thread >= COLUMNS {
        return;
    }
    // SAFETY: the row is there, in whole units on sixteen bytes ([`is_for`]).
    unsafe {
        let is_second = call.tensor(slot::UP).is_present() && block.thread >= HALF;
        let weights = call.tensor(if is_second { slot::UP } else { slot::W });
        let n = n0 + if is_second { block.thread - HALF } else { block.thread };
        if n < weights.extent(1) {
            // Of weights in fewer bits rows follow each other.
            let bytes = if weights.is_packed() { weights.stride(1) } else { 2 * weights.extent(2) };
            let from = weights.weight_row([expert, n]).start();
            bulk::prefetch(from, if bytes < AHEAD_BYTES { bytes } else { AHEAD_BYTES });
        }
    }
}

// A pair's second matrix is the next operand.
const _: () = assert!(slot::UP == slot::W + 1);

/// The matrices of expert `expert`, and the rows of x that are listed.
#[derive(Clone, Copy)]
struct Routed<'a> {
    call: &'a Call<'a>,
    expert: u32,
}

impl Matrices<2> for Routed<'_> {
    const GATHERED: Option<u32> = Some(OFFSETS);

    unsafe fn k(self) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { self.call.tensor(slot::W) }.extent(2)
    }

    unsafe fn dtype(self) -> u16 {
        // SAFETY: the caller's promise.
        unsafe { self.call.tensor(slot::W) }.dtype()
    }

    unsafe fn x(self, _: u32, count: u32) -> Rows {
        // SAFETY: the caller's promise.
        Rows { from: unsafe { self.call.tensor(slot::X) }.address([0, 0]), apart: 0, count }
    }

    unsafe fn weights(self, which: usize, n: u32, count: u32) -> Rows {
        // SAFETY: the caller's promise.
        unsafe {
            let is_pair = self.call.tensor(slot::UP).is_present();
            let weights = self.call.tensor(if is_pair { slot::W + which } else { slot::W });
            let (all, next) = (weights.extent(1), n + HALF);
            let (n, count) = match which {
                1 if !is_pair && next < all => (next, within(all, next, HALF)),
                1 if !is_pair => (n, 0),
                _ => (n, count),
            };
            let apart = weights.stride(1) as usize * if weights.is_packed() { 1 } else { 2 };
            Rows { from: weights.weight_row([self.expert, n]).start(), apart, count }
        }
    }
}

/// Where sums become outputs.
struct Outputs<'a> {
    call: &'a Call<'a>,
    p: &'a Params,
    expert: u32,
}

/// The bias of column `n` of expert `expert`, operand `operand`; 0 where there are none.
unsafe fn bias_of(call: &Call<'_>, operand: usize, [expert, n]: [u32; 2]) -> f32 {
    // SAFETY: the operands are the slots', the column is there (caller).
    unsafe {
        let bias = call.tensor(operand);
        if bias.is_present() { bias.get([expert, n]) } else { 0.0 }
    }
}

impl warpgroup::Finish<2> for Outputs<'_> {
    type Columns = u32;

    unsafe fn columns(&self, n: u32) -> u32 {
        n
    }

    unsafe fn rows<const R: usize>(&self, &n: &u32, listed: [u32; R], sums: [[[f32; 4]; 2]; R]) -> [f32; R] {
        // SAFETY: the rows are listed, and have that column (caller); of one matrix, one a half further too, if it is
        // there.
        unsafe {
            let (y, is_pair) = (self.call.tensor(slot::Y), self.call.tensor(slot::UP).is_present());
            let end = y.extent(2);
            let (mut first, mut second) = (sums.map(|[a, _]| a), sums.map(|[_, b]| b));
            if self.call.tensor(slot::BIAS).is_present() {
                cold_path();
                let of = |operand: usize, n: u32| {
                    let one = |n: u32| if n < end { bias_of(self.call, operand, [self.expert, n]) } else { 0.0 };
                    [one(n), one(n + 1), one(n + 2), one(n + 3)]
                };
                let other = if is_pair { of(slot::UP_BIAS, n) } else { of(slot::BIAS, n + HALF) };
                (first, second) = (with_each(first, of(slot::BIAS, n)), with_each(second, other));
            }
            if is_pair {
                first = gate_fours(self.p.gating, first, second);
            }
            each_of_four!(i => if i < R {
                let (entry, weight) = (shared::load(LIST + listed[i]), f32::from_bits(shared::load(WEIGHTS + listed[i])));
                let row = y.row([entry >> SLOT_BITS, entry % routing::MAX_CHOSEN]);
                let (a, b) = (first[i], second[i]);
                row.set_four_below(n, end, a.map(|a| weight * a));
                if !is_pair && n + HALF < end {
                    row.set_four_below(n + HALF, end, b.map(|b| weight * b));
                }
            });
        }
        [0.0; R]
    }
}

/// `fours` with `more` added to each.
fn with_each<const R: usize>(mut fours: [[f32; 4]; R], more: [f32; 4]) -> [[f32; 4]; R] {
    each_of_four!(i => if i < R {
        let ([a, b, c, d], [e, f, g, h]) = (fours[i], more);
        fours[i] = [a + e, b + f, c + g, d + h];
    });
    fours
}

/// The part at `place` of expert `expert`'s product, a warp for each row and column.
unsafe fn plain(call: &Call<'_>, block: &Block, p: &Params, expert: u32, place: &Place, columns: u32) {
    // SAFETY: rows and columns are below their extents; what the loop does whole warps do together.
    unsafe {
        let is_pair = call.tensor(slot::UP).is_present();
        let width = within(columns, place.n0, if is_pair { HALF } else { COLUMNS });
        let mut at = block.warp();
        while at < place.rows * width {
            let (i, n) = (place.m0 + at / width, place.n0 + at % width);
            let (x, w) = (call.tensor(slot::X), call.tensor(slot::W).weight_row([expert, n]));
            let elems = u64::from(shared::load(OFFSETS + i)) / x.elem_bytes();
            let (x, k) = (Vector { staged: false, row: x.row([0, 0]).after(elems) }, call.tensor(slot::W).extent(2));
            let [a, b] = if is_pair {
                two_dots(x, [w, call.tensor(slot::UP).weight_row([expert, n])], k, block.lane())
            } else {
                [one_dot(x, w, k, block.lane()), 0.0]
            };
            if block.lane() == 0 {
                let (entry, weight) = (shared::load(LIST + i), f32::from_bits(shared::load(WEIGHTS + i)));
                let of = |sum: f32, operand: usize| sum + bias_of(call, operand, [expert, n]);
                let first = of(a, slot::BIAS);
                let made = if is_pair { gate(p.gating, first, of(b, slot::UP_BIAS)) } else { first };
                call.tensor(slot::Y).set([entry >> SLOT_BITS, entry % routing::MAX_CHOSEN, n], weight * made);
            }
            at += block.warps();
        }
    }
}
