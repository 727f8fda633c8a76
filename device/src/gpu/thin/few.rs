//! Products of a few rows whose weights come in tiles: what `linear` and `gated_linear` are made of where a pass has
//! two to eight rows, those of a small batch or of guesses. Their activations are bf16, as those of [many
//! rows](super::super::warpgroup) are, whose norms and [`Finish`] they have.
//!
//! ```text
//! A   16 rows x 16 of k    rows of weights, of one matrix, or eight of each of two: of the sixteen bytes that a lane loads from a row, words 0 and 1
//!                          of two rows are one product's operand, words 2 and 3 another's
//! B   16 of k x 8 columns  eight rows of activations: the same sixteen bytes of each
//! D   16 rows x 8 columns  a warp's part of k; warps' parts are added once rows enough are there
//! ```
//! As with [one row](super) a product takes k as they lie, so nothing is moved between registers. A tile is read once
//! for all rows; a quarter of a warp, two rows of weights, wants the same banks twice, which is half of what shared
//! memory gives and three times what memory brings.
//!
//! The activations lie in the memory that the pass's tiles [leave](crate::kernels::MacroKernel::beside_tiles) at its
//! beginning, rows apart by half a line more than whole ones, so that neighbours have other banks.
//!
//! Floor: the weights' bytes, as for one row; the activations', which come from L2, are as many as those of so many
//! rows of weights.

use super::super::tiles::Tiles;
use super::super::warpgroup::{Finish, Place, bytes_apart};
use super::super::{BF16, Call};
use super::taken::Taken;
use crate::arch::{WARP, bulk, copy, shared, warp};
use crate::block::{Block, FREE_SHARED};
use crate::kernels::linear::{self, slot};
use core::hint::cold_path;
use perpetua_shared::launch::TASK_THREADS;
use perpetua_shared::{Fault, Technique};

/// Rows of activations at most.
pub(crate) const ROWS: u32 = linear::MOST_FEW;

/// Elements of k at a time, and their bytes.
const CHUNK: u32 = 32;
const CHUNK_BYTES: u32 = 2 * CHUNK;

/// Words of warps' sums of squares, which begin where [`Finish`] has no more words of its own, and of a row of weights'
/// sums: in another bank than those of the row four further on.
const SQUARES: u32 = FREE_SHARED + super::super::warpgroup::ROWS;
const SUMS: u32 = SQUARES + ROWS * WARPS;
const PITCH: u32 = ROWS + 2;
const WARPS: u32 = TASK_THREADS / WARP;

/// Rows of weights, all matrices', whose sums have room, for each warp.
const MOST: u32 = (shared::KEPT - SUMS) / WARPS / PITCH;

const _: () = assert!(MOST >= 2 * 16 && SUMS.is_multiple_of(2) && PITCH.is_multiple_of(2) && ROWS == 8);

/// Whether [`multiply`] is for this call, of `N` matrices of weights.
///
/// # Safety
/// The operands are those of a product.
pub(crate) unsafe fn is_for<const N: usize>(call: &Call<'_>, rows: u32) -> bool {
    let left = call.tiles.map_or(0, Tiles::left);
    if left == 0 || rows == 0 || !call.uses(Technique::ThinProducts) {
        return false;
    }
    // SAFETY: the operands are matrices (caller).
    unsafe {
        let x = call.tensor(slot::X);
        let are_brains = (x.dtype() == BF16) & call.are_all::<N>(BF16);
        let is_whole = bytes_apart(&x).is_multiple_of(16) && x.address([0, 0]).addr().is_multiple_of(16);
        let [rows, k] = [x.extent(0), x.extent(1)];
        are_brains && is_whole && rows > 1 && rows <= ROWS && k.is_multiple_of(CHUNK)
    }
}

/// Has `finish` [take](Finish::rows) the sums of each of the `rows` rows of operand `x` and four rows at a time of the
/// N weight matrices, from `w` on, which come in tiles. What it can it does before `ready`.
///
/// # Safety
/// Every thread of the block makes this same call; [`is_for`] it; `x` has at least `rows` rows; the tiles are those of
/// a plan for this task, and leave the [memory](crate::kernels::MacroKernel::beside_tiles) that it takes.
///
/// # Errors
/// Those of `ready`.
pub(crate) unsafe fn multiply<const N: usize>(
    call: &Call<'_>,
    block: &Block,
    rows: u32,
    ready: impl Fn() -> Result<(), Fault>,
    finish: &impl Finish<N>,
) -> Result<(), Fault> {
    // SAFETY: the caller's promises. All conditions but those around what a lane keeps depend on the task alone. A warp
    // writes its own sums, which others read between two barriers; lanes of rows that are not there read others.
    unsafe {
        let Some(tiles) = call.tiles else { return Ok(()) };
        let (columns, k) = (call.tensor(slot::W).extent(0), call.tensor(slot::W).extent(1));
        let (matrices, per) = (N as u32, 16 / N as u32);
        let oldest = tiles.next();
        let row_bytes = 2 * k;
        let mut taken = Taken::none(Taken::per_row(row_bytes), matrices);
        taken.take(tiles);
        let outcome = ready();
        if outcome.is_err() {
            cold_path();
            tiles.release_some(oldest, tiles.next().wrapping_sub(oldest));
            return outcome;
        }
        let pitch = linear::few_pitch(k);
        begin_copies(call, pitch, [rows, k], block);
        if block.thread < super::super::warpgroup::THREADS {
            finish.begin(&Place { n0: 0, m0: 0, rows, columns }, block);
        }
        copy::wait::<0>();
        block.sync();
        let (g, t) = (block.lane() / 4, block.lane() % 4);
        // A column that nobody asks for is another one once more.
        let own_x = (if g < rows { g } else { 0 }) * pitch + 16 * t;
        let most = MOST / matrices / 4 * 4;
        let parts = SUMS + block.warp() * (MOST * PITCH);
        // Where a lane finds its two rows of weights, and where their sums go: of one matrix the second is eight
        // further on, of two it is the other's.
        let row = |i: u32| if N == 2 { g } else { g + 8 * i };
        let place = |taken: &Taken, i: u32, row: u32| taken.at(if N == 2 { i } else { 0 }) + row * row_bytes + 16 * t;
        let adds_up = finish.adds_up();
        let (mut first, mut kept, mut squares) = (0, 0, 0.0);
        loop {
            while kept < most && (taken.done < taken.rows || tiles.left() >= matrices) {
                let oldest = taken.oldest(tiles);
                if taken.done == taken.rows {
                    taken.take(tiles);
                }
                let room = per.min(most - kept);
                let mut here = room.min(taken.rows - taken.done);
                let mut at = [0; 2];
                for i in 0..2 {
                    at[i as usize] = place(&taken, i, taken.done + row(i).min(here - 1));
                }
                taken.done += here;
                // What these leave empty the next tiles fill: see `product`.
                if here < room && tiles.left() >= matrices {
                    taken.take(tiles);
                    taken.done = taken.rows.min(room - here);
                    for i in 0..2 {
                        if row(i) >= here {
                            at[i as usize] = place(&taken, i, (row(i) - here).min(taken.done - 1));
                        }
                    }
                    here += taken.done;
                }
                let [a, b, c, d] = products(at, own_x, k, block);
                let to = |i: u32| parts + ((kept + row(i)) * matrices + if N == 2 { i } else { 0 }) * PITCH + 2 * t;
                if row(0) < here {
                    shared::store8(to(0), [a.to_bits(), b.to_bits()]);
                }
                if row(1) < here {
                    shared::store8(to(1), [c.to_bits(), d.to_bits()]);
                }
                kept += here;
                taken.release(tiles, oldest);
            }
            block.sync();
            // A thread has one row, and four columns after others.
            for at in block.mine(kept.div_ceil(4) * ROWS) {
                let (r, n) = (at % ROWS, at / ROWS * 4);
                if r < rows {
                    let (from, last) = (SUMS + n * matrices * PITCH + r, kept - 1 - n);
                    let mut values = [four(from, [matrices, last], block); N];
                    values[N - 1] = four(from + (matrices - 1) * PITCH, [matrices, last], block);
                    let [of_row] = finish.rows(&finish.columns(first + n), [r], [values]);
                    squares += of_row;
                }
            }
            first += kept;
            if taken.done == taken.rows && tiles.left() < matrices {
                break;
            }
            kept = 0;
            block.sync();
        }
        if adds_up {
            squares += f32::from_bits(warp::shuffle_xor(squares.to_bits(), 8));
            squares += f32::from_bits(warp::shuffle_xor(squares.to_bits(), 16));
            if block.lane() < ROWS {
                shared::store(SQUARES + block.warp() * ROWS + block.lane(), squares.to_bits());
            }
            block.sync();
            if block.thread < rows {
                let mut sum = 0.0;
                for warp in 0..block.warps() {
                    sum += f32::from_bits(shared::load(SQUARES + warp * ROWS + block.thread));
                }
                finish.row(block.thread, sum);
            }
        }
        // Whoever comes next may bring tiles to where the activations are by bulk copies.
        copy::fence_tiles();
        Ok(())
    }
}

/// Begins to copy `rows` rows of operand `x`, of `k`, each `pitch` bytes after the one before, the first to the first
/// byte that tiles may have.
unsafe fn begin_copies(call: &Call<'_>, pitch: u32, [rows, k]: [u32; 2], block: &Block) {
    // SAFETY: the rows are there, and so is the memory (caller), which nobody reads before all have waited and met.
    unsafe {
        let x = call.tensor(slot::X);
        let (mut from, apart) = (x.address([0, 0]).cast_const(), bytes_apart(&x));
        for r in 0..rows {
            for unit in block.mine(k / 8) {
                copy::sixteen(r * pitch + 16 * unit, from.wrapping_add(16 * unit as usize), true);
            }
            from = from.wrapping_add(apart);
        }
        copy::commit();
    }
}

/// What the calling warp's chunks of rows of `k` add to the sums of sixteen rows of weights, of which a lane has those
/// whose bytes begin at `low` and `high` of the tiles, with eight rows of activations, of which it has that at `x`: as
/// `mma` leaves them.
///
/// # Safety
/// As [`multiply`].
unsafe fn products([low, high]: [u32; 2], x: u32, k: u32, block: &Block) -> [f32; 4] {
    let (warps, chunks) = (block.warps(), k / CHUNK);
    let fetch = |chunk: u32| {
        // Beyond the last the first comes again, and is not added.
        let at = if chunk < chunks { chunk * CHUNK_BYTES } else { 0 };
        // SAFETY: inside the rows (caller).
        unsafe { (bulk::load16(low + at), bulk::load16(high + at), bulk::load16(x + at)) }
    };
    // Of two chunks and two products each: none waits for another.
    let mut sums = [[[0.0; 4]; 2]; 2];
    let mut add = |which: usize, (low, high, x): ([u32; 4], [u32; 4], [u32; 4])| {
        // SAFETY: whole warps (caller).
        unsafe {
            sums[which][0] = warp::mma([low[0], high[0], low[1], high[1]], [x[0], x[1]], sums[which][0]);
            sums[which][1] = warp::mma([low[2], high[2], low[3], high[3]], [x[2], x[3]], sums[which][1]);
        }
    };
    let mut chunk = block.warp();
    if chunk < chunks {
        let (mut one, mut other) = (fetch(chunk), fetch(chunk + warps));
        loop {
            let has_other = chunk + warps < chunks;
            chunk += 2 * warps;
            if chunk >= chunks {
                add(0, one);
                if has_other {
                    add(1, other);
                }
                break;
            }
            let next = (fetch(chunk), fetch(chunk + warps));
            add(0, one);
            add(1, other);
            (one, other) = next;
        }
    }
    let [[a, b], [c, d]] = sums;
    let one = |i: usize| (a[i] + b[i]) + (c[i] + d[i]);
    [one(0), one(1), one(2), one(3)]
}

/// The sums of all warps of four rows of weights, `apart` rows apart, the first of which stands at word `from` for the
/// first warp: of those up to number `last`, which comes again for others.
unsafe fn four(from: u32, [apart, last]: [u32; 2], block: &Block) -> [f32; 4] {
    let at = |i: u32| from + i.min(last) * apart * PITCH;
    let places = [at(0), at(1), at(2), at(3)];
    let mut sums = [0.0; 4];
    for warp in 0..block.warps() {
        for i in 0..4 {
            // SAFETY: kept before the block's barrier (caller).
            sums[i] += f32::from_bits(unsafe { shared::load(places[i] + warp * (MOST * PITCH)) });
        }
    }
    sums
}
