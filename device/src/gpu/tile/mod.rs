//! Macro kernels of the memory levels, which generated bodies are made of: what moves a tile from one level to the
//! next, and what registers compute.
//!
//! ```text
//! Global     rows, wherever a function says that they lie       load, split ▼     │ read   ▲ write, add
//! Shared     Tile: rows of bf16, all warps'                                       │        │
//!            Own: 16 rows a warp, its own, in two bf16 terms or as f32  product ▼ │        ▲ keep
//! Register   Eights, Sixteens: 16 rows a warp and all columns; PerRow: a number for each ▼ row
//! ```
//! A block's warps have 16 rows each. Of a product the tensor cores see columns in whatever order both operands are in,
//! so that whoever loads takes sixteen neighbouring bytes: lane `4g + t` has of rows `g` and `g + 8` eight columns from
//! `8t` on of each 32 ([`Eights`]) as what multiplies and what comes out of a product with rows; out of a product with
//! columns come sixteen from `16t` on of each 64 ([`Sixteens`]). The types say which, so that what does not fit does
//! not compile.
//!
//! Sixteen bytes of a row in shared memory stand where [`place`] says, so that no quarter of a warp wants a bank twice:
//! the lanes of a product with rows read four neighbours of an even row and of an odd one, those of a product with
//! columns two neighbours of rows that are eight apart.
//!
//! What multiplies is hi + lo, both bf16, which leaves out 2^-17 of a number; what it is multiplied with is bf16; sums
//! are f32. None of these functions meets other threads but by shuffles: barriers are the generated body's.

/// A block for each of the first 2, 4 or 8 numbers, as far as they are below a constant, written out: a loop around a
/// convergent call is never unrolled.
macro_rules! each {
    ($i:ident in 2 $(below $n:ident)? => $body:block) => {
        each!(@ $i [$($n)?] $body 0 1)
    };
    ($i:ident in 4 $(below $n:ident)? => $body:block) => {
        each!(@ $i [$($n)?] $body 0 1 2 3)
    };
    ($i:ident in 8 => $body:block) => {
        each!(@ $i [] $body 0 1 2 3 4 5 6 7)
    };
    (@ $i:ident [] $body:block $($number:literal)*) => {
        $({
            let $i = const { $number };
            $body
        })*
    };
    (@ $i:ident [$n:ident] $body:block $($number:literal)*) => {
        $({
            let $i = const { $number };
            if $i < $n $body
        })*
    };
}

mod register;

pub(crate) use register::{Eights, PerRow, Sixteens, where_in_window, where_seen};

use super::Row;
use crate::arch::{WARP, atomic, bulk, copy, memory};
use crate::block::Block;
use crate::gpu::rows::{singles, widen_brain, widen_half};
use crate::gpu::thin::in_two;
use crate::gpu::{BF16, F32};

/// Rows that a warp has.
pub(crate) const WARP_ROWS: u32 = 16;

/// Elements of a chunk, sixteen bytes.
const CHUNK: u32 = 8;

/// Bytes of what a warp multiplies at once, 16 rows of 16 columns of bf16.
const OPERAND: u32 = 16 * WARP;

/// A lane of a warp that has rows of its own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lane {
    /// Its first row, of all that the block has, and the one that is eight later: rows beyond the last count as
    /// nothing.
    pub(crate) row: u32,
    warp: u32,
    lane: u32,
    /// Whether its warp has one at all; products of one that has none are left out.
    is_busy: bool,
}

impl Lane {
    /// The calling one, in a block whose first row is `first` of `count`.
    pub(crate) fn of(block: &Block, first: u32, count: u32) -> Lane {
        let (warp, lane) = (block.warp(), block.lane());
        let of_warp = first + WARP_ROWS * warp;
        Lane { row: of_warp + lane / 4, warp, lane, is_busy: of_warp < count }
    }

    /// The same, of which the compiler knows nothing: what follows from it is found out where it is wanted, not kept
    /// over the loops of all that is done with tiles.
    fn anew(&self) -> Lane {
        Lane { lane: memory::opaque_word(self.lane), ..*self }
    }

    /// What `of` says of its rows, the last of `count` for those that come after it.
    pub(crate) fn each_row<T>(&self, count: u32, of: impl Fn(u32) -> T) -> [T; 2] {
        let of = |row: u32| of(if row < count { row } else { count - 1 });
        [of(self.row), of(self.row + 8)]
    }

    fn g(&self) -> u32 {
        self.lane / 4
    }

    fn t(&self) -> u32 {
        self.lane % 4
    }

    /// The warp's first row, of all.
    fn first(&self) -> u32 {
        self.row - self.g()
    }
}

/// The last row of a block whose first is `first`, of `count`.
pub(crate) fn last_row(block: &Block, first: u32, count: u32) -> u32 {
    let end = first + WARP_ROWS * block.warps();
    (if end < count { end } else { count }) - 1
}

/// Where to begin, by steps of `by`, if of the first `seen` the last `window` are wanted.
pub(crate) fn window_from(seen: u32, window: u32, by: u32) -> u32 {
    seen.saturating_sub(window) / by * by
}

/// What `of` says, but no more than `end`.
pub(crate) fn within(of: impl Fn(u32) -> u32, end: u32) -> impl Fn(u32) -> u32 {
    move |row| {
        let n = of(row);
        if n < end { n } else { end }
    }
}

/// Where chunk `chunk` of row `row` stands, counted from the tile's start, in rows of `chunks`, a multiple of eight.
const fn place(row: u32, chunk: u32, chunks: u32) -> u32 {
    (row * chunks + (chunk ^ (row % 2 * 4) ^ (row / 8 % 4 * 2))) * 16
}

/// Rows of a matrix in global memory: `count` of them, of `columns` elements, which are contiguous, whole chunks, and
/// begin on sixteen bytes. Row `i` lies where `row(i)` says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows<F> {
    pub(crate) row: F,
    pub(crate) count: u32,
    pub(crate) columns: u32,
}

impl<F: Fn(u32) -> Row> Rows<F> {
    /// Those that `index` says, in its order.
    pub(crate) fn through<I: Fn(u32) -> u32>(&self, index: &Index<I>) -> Rows<impl Fn(u32) -> Row> {
        Rows { row: |i| (self.row)((index.of)(i)), count: index.count, columns: self.columns }
    }
}

/// Which rows of a matrix are meant: `count` of them, row `of(i)` first to last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Index<F> {
    pub(crate) of: F,
    pub(crate) count: u32,
}

/// `R` rows of `C` chunks of bf16 in shared memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tile<const R: u32, const C: u32> {
    at: u32,
}

impl<const R: u32, const C: u32> Tile<R, C> {
    const BYTES: u32 = R * C * 16;

    /// The one from byte `byte` on, of `stages` that take turns: the one whose turn it is in step `step`.
    pub(crate) fn at(byte: u32, stages: u32, step: u32) -> Tile<R, C> {
        Tile { at: byte + step % stages * Self::BYTES }
    }

    /// Begins to copy `R` rows from row `first` and C chunks from column `column` on, zero where there are none:
    /// `cp.async`, by all threads.
    ///
    /// # Safety
    /// Every thread of the block makes this same call; the rows are there and bf16; nobody else touches the tile until
    /// all threads have waited for their copies and met.
    pub(crate) unsafe fn load(&self, block: &Block, from: &Rows<impl Fn(u32) -> Row>, first: u32, column: u32) {
        let block = Block { thread: memory::opaque_word(block.thread), ..*block };
        for unit in block.mine(R * C) {
            let (row, chunk) = (unit / C, unit % C);
            let (r, at) = (first + row, column + chunk * CHUNK);
            let is_there = r < from.count && at < from.columns;
            // SAFETY: the rows' (caller).
            unsafe {
                let from = if is_there { (from.row)(r).at(at) } else { (from.row)(0).at(0) };
                copy::sixteen(self.at + place(row, chunk, C), from, is_there);
            }
        }
    }

    /// Where chunk `chunk` of row `row` stands; those of rows that are a multiple of 32 or, without reaching the next
    /// eight, of two later stand as many rows further. A number of which the compiler knows nothing, so that it keeps
    /// this one alone.
    fn base(&self, row: u32, chunk: u32) -> u32 {
        memory::opaque_word(self.at + place(row, chunk, C))
    }

    /// The sixteen bytes that stand `rows` rows and `chunks` chunks, a multiple of eight, after `base`.
    unsafe fn chunk(base: u32, rows: u32, chunks: u32) -> [u32; 4] {
        // SAFETY: loaded, waited for and met (caller).
        unsafe { bulk::load16(base + (rows * C + chunks) * 16) }
    }
}

/// Rows of all warps in shared memory, each of which touches its own alone: C chunks of a hi term and as many of a lo,
/// as the tensor cores take them, or the same elements as f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Own<const C: u32> {
    byte: u32,
}

impl<const C: u32> Own<C> {
    const WARP_BYTES: u32 = WARP_ROWS * C * 32;

    /// The one from byte `byte` on.
    pub(crate) fn at(byte: u32) -> Own<C> {
        Own { byte }
    }

    fn of(&self, lane: &Lane) -> u32 {
        self.byte + lane.warp * Self::WARP_BYTES
    }

    /// Brings the warp's rows, C chunks from column `column` on, as two terms, zero where there are none.
    ///
    /// # Safety
    /// Every lane of the warp makes this same call; the rows are there; none of the others touches the warp's part now.
    pub(crate) unsafe fn split(&self, lane: &Lane, from: &Rows<impl Fn(u32) -> Row>, column: u32) {
        let (lane, to) = (&lane.anew(), self.of(lane));
        let mut unit = lane.lane;
        // Two at a time: whole ones, since a warp has 4 rows of eight chunks or more at once.
        while unit < WARP_ROWS / 2 * C {
            let place_of = |unit: u32| (lane.first() + unit / C, column + unit % C * CHUNK);
            let ((r, at), (other, other_at)) = (place_of(unit), place_of(unit + WARP));
            // SAFETY: the rows' (caller); the words are this lane's.
            unsafe {
                let [a, b, c, d] = eights_at(from, [(r, at), (r + 8, at), (other, other_at), (other + 8, other_at)]);
                Self::put(to, unit, [a, b]);
                Self::put(to, unit + WARP, [c, d]);
            }
            unit += 2 * WARP;
        }
    }

    /// Puts eight elements of a row, and of the one eight later, in two terms where the `unit`th chunk of both goes.
    unsafe fn put(to: u32, unit: u32, [first, second]: [[f32; 8]; 2]) {
        let (row, chunk) = (unit / C, unit % C);
        let (first, second) = (in_terms(first), in_terms(second));
        let to = to + Self::operand(chunk / 4) + (row * 4 + chunk % 4) * 16;
        each!(s in 2 => {
            each!(term in 2 => {
                let [a, b] = [2 * s, 2 * s + 1];
                let words = [first[a][term], second[a][term], first[b][term], second[b][term]];
                // SAFETY: the lane's (caller).
                unsafe { bulk::store16(to + (2 * s + term) as u32 * OPERAND, words) };
            });
        });
    }

    /// Where the operands of a product with the `group`th 32 columns stand, those of the first 16 first, of each hi and
    /// lo: a warp's [`OPERAND`] bytes, which each lane loads as it gives them to the tensor cores.
    const fn operand(group: u32) -> u32 {
        group * 4 * OPERAND
    }

    /// The terms of the lane's rows in the `group`th 32 columns: of the first 16 and of the others, hi and lo of each.
    unsafe fn terms(&self, lane: &Lane, group: u32) -> [[[u32; 4]; 2]; 2] {
        let from = memory::opaque_word(self.of(lane) + Self::operand(group) + lane.lane * 16);
        // SAFETY: split by this warp, which has met since (caller).
        [0, 2].map(|s| [s, s + 1].map(|at| unsafe { bulk::load16(from + at * OPERAND) }))
    }

    /// Puts the warp's rows there as f32, for [`write`](Own::write).
    ///
    /// # Safety
    /// Every lane of the warp makes this same call, and none still reads what was there.
    pub(crate) unsafe fn keep(&self, lane: &Lane, rows: &impl Fours) {
        let (lane, to) = (&lane.anew(), self.of(lane));
        // SAFETY: the words are this lane's.
        rows.each_four(lane.t(), |half, column, four| unsafe {
            bulk::store16(to + place(lane.g() + 8 * half, column / 4, 2 * C), four.map(f32::to_bits));
        });
    }

    /// Writes the warp's [kept](Own::keep) rows from column `column` on, as far as there are such, in the rows' type:
    /// neighbours by neighbouring lanes.
    ///
    /// # Safety
    /// Every lane of the warp makes this same call, and they have met since they kept them; nobody else touches the
    /// rows.
    pub(crate) unsafe fn write(&self, lane: &Lane, to: &Rows<impl Fn(u32) -> Row>, column: u32) {
        // SAFETY: the caller's promises; an element is one lane's.
        unsafe { self.each_kept(lane, to, column, |row, at, four| row.set_four(at, four)) };
    }

    /// As [`write`](Own::write), but adds to what is there, f32; others may add, too.
    ///
    /// # Safety
    /// As there, but that others may add meanwhile.
    pub(crate) unsafe fn add(&self, lane: &Lane, to: &Rows<impl Fn(u32) -> Row>, column: u32) {
        // SAFETY: the caller's promises; four elements of f32 are sixteen bytes on a multiple of 16 (`Rows`).
        unsafe { self.each_kept(lane, to, column, |row, at, four| atomic::add_four(row.at(at).cast(), four)) };
    }

    /// Calls `put` for each four neighbours of what the warp has kept, those of the lane.
    unsafe fn each_kept(
        &self,
        lane: &Lane,
        to: &Rows<impl Fn(u32) -> Row>,
        column: u32,
        put: impl Fn(Row, u32, [f32; 4]),
    ) {
        let (lane, from) = (&lane.anew(), self.of(lane));
        let mut unit = lane.lane;
        // Two at a time, so that one need not wait for where the other is.
        while unit < WARP_ROWS * 2 * C {
            let (row, four) = (|unit: u32| unit / (2 * C), |unit: u32| unit % (2 * C));
            let place_of = |unit: u32| (lane.first() + row(unit), column + 4 * four(unit));
            let ((r, at), (other, other_at)) = (place_of(unit), place_of(unit + WARP));
            let is_there = |r: u32, at: u32| r < to.count && at < to.columns;
            let row_of = |r: u32| (to.row)(if r < to.count { r } else { 0 });
            // SAFETY: kept, and met since (caller).
            let kept =
                |unit: u32| unsafe { bulk::load16(from + place(row(unit), four(unit), 2 * C)).map(f32::from_bits) };
            let (first, second) = ((row_of(r), kept(unit)), (row_of(other), kept(unit + WARP)));
            if is_there(r, at) {
                put(first.0, at, first.1);
            }
            if is_there(other, other_at) {
                put(second.0, other_at, second.1);
            }
            unit += 2 * WARP;
        }
    }
}

/// Registers whose columns come by fours.
pub(crate) trait Fours {
    /// Calls `put(half, column, four)` for each four neighbouring columns of lane `t`'s rows, of the first (half 0) and
    /// the second.
    fn each_four(&self, t: u32, put: impl Fn(u32, u32, [f32; 4]));
}

/// Eight elements of a row from a column on, of each of `places`, all of them asked for before the first is looked at;
/// zero where there are none.
///
/// # Safety
/// The rows are there.
pub(crate) unsafe fn eights_at<const N: usize>(
    from: &Rows<impl Fn(u32) -> Row>,
    places: [(u32, u32); N],
) -> [[f32; 8]; N] {
    let place = |i: usize| {
        let (r, at) = places[i];
        let row = (from.row)(if r < from.count { r } else { 0 });
        row.after(u64::from(if at < from.columns { at } else { 0 }))
    };
    let (mut rows, mut low, mut high) = ([place(0); N], [[0; 4]; N], [[0; 4]; N]);
    for i in 1..N {
        rows[i] = place(i);
    }
    let mut eights = [[0.0; 8]; N];
    // SAFETY: the rows' (caller), which begin on sixteen bytes, as whole eights of them do (`Rows`).
    unsafe {
        for i in 0..N {
            low[i] = rows[i].load16(0);
        }
        // One branch for all: with one for each, one would be waited for after the other.
        if rows[0].is(F32) {
            for i in 0..N {
                high[i] = rows[i].load16(4);
            }
            for i in 0..N {
                eights[i] = singles(low[i], high[i]);
            }
        } else if rows[0].is(BF16) {
            for i in 0..N {
                eights[i] = widen_brain(low[i]);
            }
        } else {
            for i in 0..N {
                eights[i] = widen_half(low[i]);
            }
        }
    }
    for i in 0..N {
        let (r, at) = places[i];
        if r >= from.count || at >= from.columns {
            eights[i] = [0.0; 8];
        }
    }
    eights
}

/// Eight elements, two at a time, hi and lo of each two.
fn in_terms(e: [f32; 8]) -> [[u32; 2]; 4] {
    [in_two([e[0], e[1]]), in_two([e[2], e[3]]), in_two([e[4], e[5]]), in_two([e[6], e[7]])]
}
