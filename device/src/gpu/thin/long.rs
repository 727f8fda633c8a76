//! Rows that shared memory has no room for as terms, in registers: `down` of all but the smallest models, and all
//! products of the largest.
//!
//! A thread has units of eight elements of the row, as they are, one in so many as there are threads, and multiplies
//! them with the same units of one row of weights after another by FMAs: 17 instructions a unit, where tensor cores fed
//! from shared memory take some
//! 3. In return nothing is staged, nobody meets before the sums of all warps are there, and the ring of tiles keeps its
//!    size. A row of weights of
//! k elements takes some k / 18 cycles by the counter of docs/cycles.md, and k / 9 to come from memory.
//!
//! Of weights in 8 bits a unit is sixteen elements, of those in 4 bits 32, and activations are whole numbers of 16
//! bits, by a scale for each unit: their bytes are multiplied by fours, which in 8 bits takes half as many instructions
//! for twice as many elements.
//!
//! The first row of weights is read while the row of activations is on its way, and each next one while the one before
//! is multiplied. Of two matrices the rows take turns. A row that is too long for the registers, too, is multiplied a
//! segment after the other ([`linear::segment_len`](crate::kernels::linear::segment_len)), each with that part of all
//! rows of weights, in the order in which their tiles come.

use super::super::Call;
use super::super::flags::{Again, Read};
use super::super::rows::widen_brain;
use super::super::tiles::Tiles;
use super::taken::Taken;
use super::terms::Asked;
use super::{Brain, Eight, First, Form, Four, Kind};
use crate::arch::scalar::fma;
use crate::arch::{bulk, shared, warp};
use crate::block::{Block, FREE_SHARED};
use crate::gpu::rows::Staging;
use crate::kernels::linear::{LONG_SUMS, segment_len, slot};
use crate::kernels::{MAX_FLAGGED, MAX_FLAGGED_OF_TWO};
use perpetua_shared::Technique;
use perpetua_shared::launch::TASK_THREADS;

/// A form of weights as threads multiply them, units of a row in registers.
pub(crate) trait Units: Form {
    /// Elements of a unit: of weights, sixteen bytes; and what a row has a multiple of.
    const UNIT: u32;
    const LONG_ROW_MULTIPLE: u32;

    /// Units of a thread, at most, in products with one matrix; with two, whose bodies keep more in registers.
    const MOST: u32;
    const MOST_OF_TWO: u32;

    /// A unit of the row, asked for; and as it is multiplied.
    type Asked: Copy + Read;
    type Row: Copy;

    /// A unit that is not there.
    const NOTHING: Self::Row;

    /// Asks for unit `unit` of `row`.
    ///
    /// # Safety
    /// As [`First::ask`].
    unsafe fn ask(row: &First<'_>, unit: u32) -> Self::Asked;

    /// What was asked for, which is there.
    fn unit(row: &First<'_>, asked: Self::Asked) -> Self::Row;

    /// Unit `unit` of the row of weights that begins at byte `at` of the tiles.
    ///
    /// # Safety
    /// As [`bulk::load16`].
    unsafe fn weights(at: u32, unit: u32) -> Self::Weights;

    /// Adds the products of a thread's `i`th units to sums of which many wait for no other.
    fn multiply(sums: &mut [f32; 4], i: usize, weights: Self::Weights, row: Self::Row);
}

impl Units for Brain {
    const UNIT: u32 = 8;
    const LONG_ROW_MULTIPLE: u32 = 8;
    const MOST: u32 = 8;
    const MOST_OF_TWO: u32 = 5;
    type Asked = Asked;
    type Row = [f32; 8];
    const NOTHING: [f32; 8] = [0.0; 8];

    unsafe fn ask(row: &First<'_>, unit: u32) -> Asked {
        // SAFETY: the caller's promise.
        unsafe { row.ask(unit) }
    }

    fn unit(row: &First<'_>, asked: Asked) -> [f32; 8] {
        row.values(asked)
    }

    unsafe fn weights(at: u32, unit: u32) -> [u32; 4] {
        // SAFETY: the caller's promise.
        unsafe { bulk::load16(at + UNIT_BYTES * unit) }
    }

    fn multiply(sums: &mut [f32; 4], _: usize, weights: [u32; 4], row: [f32; 8]) {
        let weight = widen_brain(weights);
        for j in 0..8 {
            sums[j % 4] = fma(weight[j], row[j], sums[j % 4]);
        }
    }
}

/// Bytes of a unit of weights.
const UNIT_BYTES: u32 = 16;

const _: () = {
    const fn fit<U: Units>() -> bool {
        MAX_FLAGGED <= U::MOST * U::UNIT * TASK_THREADS && MAX_FLAGGED_OF_TWO <= U::MOST_OF_TWO * U::UNIT * TASK_THREADS
    }
    assert!(fit::<Brain>() && fit::<Eight>() && fit::<Four>(), "the longest row fits the threads");
};
const _: () = assert!(LONG_SUMS * (TASK_THREADS / 32) <= shared::KEPT - FREE_SHARED, "sums have room");

/// The form for which [`run`] does this call, of `N` matrices of weights from operand `w` on, if it does, and `row` is
/// its one row, taken in so many `segments`.
///
/// # Safety
/// The operands are a kernel's that has these.
pub(crate) unsafe fn form_of<const N: usize>(
    call: &Call<'_>,
    row: &First<'_>,
    how: Staging,
    segments: u32,
    block: &Block,
) -> Option<Kind> {
    // SAFETY: the caller's promise.
    unsafe {
        let kind = Kind::of(call.tensor(slot::W).dtype())?;
        by_form!(kind, F => is_for::<F, N>(call, row, how, segments, block)).then_some(kind)
    }
}

/// Whether that is form `F`.
///
/// # Safety
/// As [`form_of`].
unsafe fn is_for<F: Units, const N: usize>(
    call: &Call<'_>,
    row: &First<'_>,
    how: Staging,
    segments: u32,
    block: &Block,
) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        let (columns, k) = (call.tensor(slot::W).extent(0), call.tensor(slot::W).extent(1));
        let left = call.tiles.map_or(0, Tiles::left);
        let most = if N == 1 { F::MOST } else { F::MOST_OF_TWO };
        let is_fit = call.are_all::<N>(F::DTYPE)
            && k.is_multiple_of(F::LONG_ROW_MULTIPLE)
            && segment_len(k, segments) <= most * F::UNIT * block.threads;
        // Rows longer than a tile are more tiles than there are rows, unless they are meant to be.
        left > 0
            && left <= N as u32 * segments * columns
            && is_fit
            && !call.tensor(how.norm).is_present()
            && row.is_whole()
            // Nothing else takes rows in segments.
            && (segments > 1 || call.uses(Technique::LongRows))
    }
}

/// Calls `finish(n, sums, ask(n))`, on some thread, for every row n of the `N` matrices of weights of form `F`,
/// operands `w` and up, of which the sums are the products with `row`, whose `segments` come one after the other.
///
/// # Safety
/// Every thread of the block makes this same call; it is of [this form](form_of), the task's events have fired, and the
/// tiles are those of a plan for it.
pub(crate) unsafe fn run<F: Units, const N: usize>(
    call: &Call<'_>,
    row: &First<'_>,
    segments: u32,
    block: &Block,
    ask: impl Fn(u32) -> u32,
    finish: impl Fn(u32, [f32; N], u32),
) {
    // SAFETY: the caller's promises. The conditions depend on the task alone; a warp writes its own words, which others
    // read between two barriers.
    unsafe {
        let Some(tiles) = call.tiles else { return };
        let (columns, k) = (call.tensor(slot::W).extent(0), call.tensor(slot::W).extent(1));
        let early = if block.thread < columns { ask(block.thread) } else { 0 };
        let (units, per_segment) = (k / F::UNIT, segment_len(k, segments) / F::UNIT);
        // As many rows of weights at once as their sums have room for.
        let most = (LONG_SUMS / segments - 1) / N as u32;
        let mut taken = Taken::none(Taken::per_row(F::row_bytes(F::UNIT * per_segment)), N as u32);
        let mut done = 0;
        loop {
            let here = most.min(columns - done);
            for segment in 0..segments {
                let from = segment * per_segment;
                let part = Part { from, units: per_segment.min(units - from), rows: here * N as u32 };
                // Until its first unit is there a thread asks for no more: the row is as many bytes as a tile.
                let first = from + if block.thread < part.units { block.thread } else { 0 };
                let first = F::unit(row, row.there(F::ask(row, first), || F::ask(row, first)));
                let sums = segment * (part.rows + 1);
                if segments > 1 {
                    taken = Taken::none(Taken::per_row(F::row_bytes(F::UNIT * part.units)), N as u32);
                }
                match part.units.div_ceil(block.threads) {
                    0..=2 if F::MOST <= 4 => multiply::<F, N, 2>(tiles, &mut taken, row, first, part, sums, block),
                    3 if F::MOST == 4 => multiply::<F, N, 3>(tiles, &mut taken, row, first, part, sums, block),
                    0..=4 if F::MOST >= 4 => multiply::<F, N, 4>(tiles, &mut taken, row, first, part, sums, block),
                    5 if F::MOST > 4 => multiply::<F, N, 5>(tiles, &mut taken, row, first, part, sums, block),
                    6..=7 if F::MOST > 4 && N == 1 => {
                        multiply::<F, N, 7>(tiles, &mut taken, row, first, part, sums, block);
                    }
                    _ if F::MOST > 4 && N == 1 => {
                        multiply::<F, N, 8>(tiles, &mut taken, row, first, part, sums, block);
                    }
                    // No thread has more: see `is_for`.
                    _ => {}
                }
            }
            block.sync();
            for at in block.mine(here) {
                let mut sums = [0.0; N];
                for segment in 0..segments {
                    for i in 0..N {
                        let from = sums_at(segment * (here * N as u32 + 1) + at * N as u32 + i as u32 + 1, block);
                        for warp in 0..block.warps() {
                            sums[i] += f32::from_bits(shared::load(from + warp));
                        }
                    }
                }
                let n = done + at;
                finish(n, sums, if n == block.thread { early } else { ask(n) });
            }
            done += here;
            if done == columns {
                return;
            }
            block.sync();
        }
    }
}

/// Where the warps' sums of row `n` - 1 of the weights stand: row -1 is nobody's, and has room, before each segment's.
fn sums_at(n: u32, block: &Block) -> u32 {
    FREE_SHARED + n * block.warps()
}

/// A segment of the row, and of how many rows of weights it is multiplied with that part.
#[derive(Clone, Copy, Debug)]
struct Part {
    /// Its first unit, in the row.
    from: u32,
    units: u32,
    rows: u32,
}

/// Where the calling thread's units of a part are, in the row and in any row of weights; those beyond the last are the
/// first again, the thread's or the part's, which are there, and multiplied with nothing.
#[derive(Clone, Copy, Debug)]
struct Mine<const W: usize> {
    part: Part,
    /// In the part.
    units: [u32; W],
}

impl<const W: usize> Mine<W> {
    /// Whether the `i`th one is there.
    fn is_there(i: usize, part: Part, block: &Block) -> bool {
        block.thread + i as u32 * block.threads < part.units
    }

    fn new(part: Part, block: &Block) -> Mine<W> {
        let mut units = [if Self::is_there(0, part, block) { block.thread } else { 0 }; W];
        each!(unit i below W => {
            if Self::is_there(i, part, block) {
                units[i] = block.thread + i as u32 * block.threads;
            }
        });
        Mine { part, units }
    }

    /// Asks for all but the first one, in whose place there is the second.
    ///
    /// # Safety
    /// As [`First::ask`].
    unsafe fn ask<F: Units>(&self, row: &First<'_>) -> AllAsked<F, W> {
        // SAFETY: the caller's promise.
        unsafe {
            let mut asked = [F::ask(row, self.part.from + self.units[1]); W];
            each!(unit i below W => {
                if i > 1 {
                    asked[i] = F::ask(row, self.part.from + self.units[i]);
                }
            });
            AllAsked(asked)
        }
    }

    /// Weights of the next row, which is there, of the first matrix or, after it, of the next; once it is all matrices'
    /// their tiles are released.
    ///
    /// # Safety
    /// As [`Tiles::take`].
    unsafe fn fetch<F: Units, const N: usize>(
        &self,
        matrix: u32,
        taken: &mut Taken,
        tiles: &Tiles<'_>,
    ) -> [F::Weights; W] {
        // SAFETY: the caller's promise.
        unsafe {
            let oldest = taken.oldest(tiles);
            if matrix == 0 && taken.done == taken.rows {
                taken.take(tiles);
            }
            let at = taken.at(matrix) + taken.done * F::row_bytes(F::UNIT * self.part.units);
            let mut weights = [F::NO_WEIGHTS; W];
            each!(unit i below W => { weights[i] = F::weights(at, self.units[i]) });
            if matrix + 1 == N as u32 {
                taken.done += 1;
                taken.release(tiles, oldest);
            }
            weights
        }
    }
}

/// What [`Mine::ask`] asked for.
#[derive(Clone, Copy)]
struct AllAsked<F: Units, const W: usize>([F::Asked; W]);

impl<F: Units, const W: usize> Read for AllAsked<F, W> {
    fn lacks(&self, flag: u32) -> u32 {
        let mut lacks = 0;
        each!(unit i below W => { lacks |= self.0[i].lacks(flag) });
        lacks
    }
}

impl<F: Units, const W: usize> Again<AllAsked<F, W>> for &(Mine<W>, &First<'_>) {
    fn again(&self) -> AllAsked<F, W> {
        // SAFETY: `multiply` has asked for them before.
        unsafe { self.0.ask(self.1) }
    }
}

/// Puts what the calling warp adds to the sums of the `part`'s rows of weights into shared memory, of the first one as
/// row `sums`. The part has `W` units for each thread, or fewer, of which `first` is the first.
///
/// # Safety
/// As [`run`].
unsafe fn multiply<F: Units, const N: usize, const W: usize>(
    tiles: &Tiles<'_>,
    taken: &mut Taken,
    row: &First<'_>,
    first: F::Row,
    part: Part,
    sums: u32,
    block: &Block,
) {
    // SAFETY: the caller's promises.
    unsafe {
        let mine = Mine::<W>::new(part, block);
        let asked = mine.ask::<F>(row);
        let mut weights = mine.fetch::<F, N>(0, taken, tiles);
        let asked = row.there(asked, &(mine, row));
        let mut x = [if Mine::<W>::is_there(0, part, block) { first } else { F::NOTHING }; W];
        each!(unit i below W => {
            if i > 0 {
                x[i] = if Mine::<W>::is_there(i, part, block) { F::unit(row, asked.0[i]) } else { F::NOTHING };
            }
        });
        // Of the row of weights before this one, over the lanes; beside this one's products, which need not wait for
        // it.
        let (mut n, mut last) = (0, 0.0);
        loop {
            let has_more = n + 1 < part.rows;
            let next = if has_more { mine.fetch::<F, N>((n + 1) % N as u32, taken, tiles) } else { [F::NO_WEIGHTS; W] };
            let mut products = [0f32; 4];
            each!(unit i below W => { F::multiply(&mut products, i, weights[i], x[i]) });
            put(sums + n, last, block);
            last = (products[0] + products[1]) + (products[2] + products[3]);
            n += 1;
            if !has_more {
                put(sums + n, last, block);
                return;
            }
            weights = next;
        }
    }
}

/// Puts the sum over the calling warp's lanes of their `part`s of row n - 1 of the weights where it belongs.
///
/// # Safety
/// As [`run`].
unsafe fn put(n: u32, part: f32, block: &Block) {
    // SAFETY: the caller's promise; the word is the warp's.
    unsafe {
        let sum = warp::sum(part);
        if block.lane() == 0 {
            shared::store(sums_at(n, block) + block.warp(), sum.to_bits());
        }
    }
}
