//! Rows that shared memory has no room for as terms, in registers: `down` of all but the smallest models.
//!
//! A thread has units of eight elements of the row, as they are, one in so many as there are threads, and multiplies them with the same
//! units of one row of weights after another by FMAs: 17 instructions a unit, where tensor cores fed from shared memory take some
//! 3. In return nothing is staged, nobody meets before the sums of all warps are there, and the ring of tiles keeps its size. A row of weights of
//! k elements takes some k / 18 cycles by the counter of docs/gpu.md, and k / 9 to come from memory.
//!
//! The first row of weights is read while the row of activations is on its way, and each next one while the one before is multiplied.

use super::super::flags::{Again, Read};
use super::super::rows::widen_brain;
use super::super::tiles::Tiles;
use super::super::{BF16, Call};
use super::taken::Taken;
use super::terms::Asked;
use super::{First, Source};
use crate::arch::scalar::fma;
use crate::arch::{bulk, shared, warp};
use crate::block::{Block, FREE_SHARED};
use crate::gpu::rows::Staging;
use crate::kernels::MAX_FLAGGED;
use perpetua_shared::launch::TASK_THREADS;

/// Elements that a thread multiplies at once: sixteen bytes of weights.
const UNIT: u32 = 8;

/// Units of a thread, at most.
const MOST: u32 = 8;

const _: () = assert!(MAX_FLAGGED <= MOST * UNIT * TASK_THREADS, "the longest row fits the threads");

/// Whether [`run`] is for this call, if `row` is its one row.
///
/// # Safety
/// The operands are a kernel's that has these.
#[inline(always)]
pub(crate) unsafe fn is_for(call: &Call<'_>, row: &First<'_>, how: Staging, block: &Block) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        let w = call.tensor(1);
        let (columns, k) = (w.extent(0), w.extent(1));
        let left = call.tiles.map_or(0, Tiles::left);
        let is_fit = w.dtype() == BF16 && k.is_multiple_of(UNIT) && k <= MOST * UNIT * block.threads;
        let has_room = (columns + 1) * block.warps() <= shared::KEPT - FREE_SHARED;
        // Rows longer than a tile are more tiles than there are rows.
        left > 0 && left <= columns && is_fit && has_room && !call.tensor(how.norm).is_present() && row.is_whole()
    }
}

/// Calls `finish(n, [sum], ask(n))`, on some thread, for every row n of the weights, operand 1, of which the sum is the product with `row`.
///
/// # Safety
/// Every thread of the block makes this same call; [`is_for`] it, the task's events have fired, and the tiles are those of a plan for it.
#[inline(always)]
pub(crate) unsafe fn run(
    call: &Call<'_>,
    row: &First<'_>,
    block: &Block,
    ask: impl Fn(u32) -> u32,
    finish: impl Fn(u32, [f32; 1], u32),
) {
    // SAFETY: the caller's promises. The condition depends on the task alone; a warp writes its own words, which others read after the barrier.
    unsafe {
        let Some(tiles) = call.tiles else { return };
        let (columns, k) = (call.tensor(1).extent(0), call.tensor(1).extent(1));
        let early = if block.thread < columns { ask(block.thread) } else { 0 };
        // Until its first unit is there a thread asks for no more: the row is as many bytes as a tile.
        let first = if block.thread < k / UNIT { block.thread } else { 0 };
        let first = row.unit(first, row.ask(first));
        let (n, last) = match (k / UNIT).div_ceil(block.threads) {
            0..=4 => multiply::<4>(tiles, row, first, k, block),
            5 => multiply::<5>(tiles, row, first, k, block),
            6..=7 => multiply::<7>(tiles, row, first, k, block),
            _ => multiply::<{ MOST as usize }>(tiles, row, first, k, block),
        };
        put(n, last, block);
        block.sync();
        for n in block.mine(columns) {
            let mut sum = 0.0;
            for warp in 0..block.warps() {
                sum += f32::from_bits(shared::load(sums_at(n + 1, block) + warp));
            }
            finish(n, [sum], if n == block.thread { early } else { ask(n) });
        }
    }
}

/// Where the warps' sums of row `n` - 1 of the weights stand: row -1 is nobody's, and has room.
#[inline(always)]
fn sums_at(n: u32, block: &Block) -> u32 {
    FREE_SHARED + n * block.warps()
}

/// Where the calling thread's units are, in the row and in any row of weights; those beyond the last are the first again, the thread's or the
/// row's, which are there, and multiplied with nothing.
#[derive(Clone, Copy, Debug)]
struct Mine<const W: usize>([u32; W]);

impl<const W: usize> Mine<W> {
    /// Whether the `i`th one is there, of rows of `units`.
    #[inline(always)]
    fn is_there(i: usize, units: u32, block: &Block) -> bool {
        block.thread + i as u32 * block.threads < units
    }

    #[inline(always)]
    fn new(units: u32, block: &Block) -> Mine<W> {
        let mut mine = [if Self::is_there(0, units, block) { block.thread } else { 0 }; W];
        each!(unit i below W => {
            if Self::is_there(i, units, block) {
                mine[i] = block.thread + i as u32 * block.threads;
            }
        });
        Mine(mine)
    }

    /// Asks for all but the first one, in whose place there is the second.
    ///
    /// # Safety
    /// As [`First::ask`].
    #[inline(always)]
    unsafe fn ask(&self, row: &First<'_>) -> Units<W> {
        // SAFETY: the caller's promise.
        unsafe {
            let mut asked = [row.ask(self.0[1]); W];
            each!(unit i below W => {
                if i > 1 {
                    asked[i] = row.ask(self.0[i]);
                }
            });
            Units(asked)
        }
    }

    /// Weights of the next row of `k`, which is there; its tile is released.
    ///
    /// # Safety
    /// As [`Tiles::take`].
    #[inline(always)]
    unsafe fn fetch(&self, taken: &mut Taken<1>, tiles: &Tiles<'_>, k: u32) -> [[u32; 4]; W] {
        // SAFETY: the caller's promise.
        unsafe {
            let oldest = taken.oldest(tiles);
            if taken.done == taken.rows {
                taken.take(tiles);
            }
            let at = taken.at[0] + taken.done * 2 * k;
            let mut weights = [[0; 4]; W];
            each!(unit i below W => { weights[i] = bulk::load16(at + 16 * self.0[i]) });
            taken.done += 1;
            taken.release(tiles, oldest);
            weights
        }
    }
}

/// What [`Mine::ask`] asked for.
#[derive(Clone, Copy)]
struct Units<const W: usize>([Asked; W]);

impl<const W: usize> Read for Units<W> {
    #[inline(always)]
    fn lacks(&self, flag: u32) -> u32 {
        let mut lacks = 0;
        each!(unit i below W => { lacks |= self.0[i].lacks(flag) });
        lacks
    }
}

impl<const W: usize> Again<Units<W>> for &(Mine<W>, &First<'_>) {
    #[inline(always)]
    fn again(&self) -> Units<W> {
        // SAFETY: `multiply` has asked for them before.
        unsafe { self.0.ask(self.1) }
    }
}

/// Puts what the calling warp adds to the sums of all rows of weights but the last into shared memory: how many rows there are, and what the
/// thread adds to the last. The row of `k` elements has `W` units for each thread, or fewer, of which `first` is the first.
///
/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn multiply<const W: usize>(
    tiles: &Tiles<'_>,
    row: &First<'_>,
    first: [f32; 8],
    k: u32,
    block: &Block,
) -> (u32, f32) {
    // SAFETY: the caller's promises.
    unsafe {
        let units = k / UNIT;
        let mine = Mine::<W>::new(units, block);
        let mut asked = mine.ask(row);
        let mut taken = Taken::<1>::none(k);
        let mut weights = mine.fetch(&mut taken, tiles, k);
        if row.x.is_flagged() {
            asked = row.call.there(0, asked, &(mine, row));
        }
        let mut x = [if Mine::<W>::is_there(0, units, block) { first } else { [0.0; 8] }; W];
        each!(unit i below W => {
            if i > 0 {
                x[i] = if Mine::<W>::is_there(i, units, block) { row.values(asked.0[i]) } else { [0.0; 8] };
            }
        });
        // Of the row of weights before this one, over the lanes; beside this one's products, which need not wait for it.
        let (mut n, mut last) = (0, 0.0);
        loop {
            let has_more = taken.done < taken.rows || tiles.left() > 0;
            let next = if has_more { mine.fetch(&mut taken, tiles, k) } else { [[0; 4]; W] };
            let mut sums = [0f32; 4];
            each!(unit i below W => {
                let weight = widen_brain(weights[i]);
                for j in 0..8 {
                    sums[j % 4] = fma(weight[j], x[i][j], sums[j % 4]);
                }
            });
            put(n, last, block);
            last = (sums[0] + sums[1]) + (sums[2] + sums[3]);
            n += 1;
            if !has_more {
                return (n, last);
            }
            weights = next;
        }
    }
}

/// Puts the sum over the calling warp's lanes of their `part`s of row n - 1 of the weights where it belongs.
///
/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn put(n: u32, part: f32, block: &Block) {
    // SAFETY: the caller's promise; the word is the warp's.
    unsafe {
        let sum = warp::sum(part);
        if block.lane() == 0 {
            shared::store(sums_at(n, block) + block.warp(), sum.to_bits());
        }
    }
}
