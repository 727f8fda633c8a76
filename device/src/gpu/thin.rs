//! Products of one row with bf16 weights that come in tiles: what `linear` and `gated_linear` are made of in decoding.
//!
//! ```text
//! A   16 rows of weights x 16 of k   straight from the tile: a lane's sixteen bytes are k for two products
//! B   16 of k x 8 columns            the row as two terms, hi and lo, of one k in columns 0 and 1, of another in 2 and 3
//! D   16 rows x 8 columns            even rows in columns 0 and 1, odd rows in 2 and 3: a warp's part of k; warps' parts are
//!                                    added once rows enough are there
//! ```
//! A product is a sum over k in any order, so a lane takes k as they lie, eight in a row, and the four numbers that the tensor
//! core believes to be k = 2t, 2t + 1, 2t + 8 and 2t + 9 are others, the same in A and B. Of two matrices (gate and up) the one
//! has A's upper eight rows, the other the lower.
//!
//! Rows of weights are multiples of 128 bytes apart, so in the same banks of shared memory, which give a quarter of a warp, two rows,
//! 128 bytes at a time. So an odd row is 64 bytes ahead of the even one, and behind it the next time: the products' k are not the
//! same in both, hence the columns.
//!
//! What counts is not the rate, which FMAs would keep up with, but how long a task takes once its event has fired: its weights
//! are in shared memory by then, and every instruction stands between two hops. 256 weights cost a warp 27 instructions one by one,
//! as `rows` does it, and sums over lanes for every row; this way 4, and a sum over warps for all rows together.
//!
//! x is taken as hi + lo, both bf16, which leaves out what is below 2^-17 of an element. Products are exact, sums f32.

use super::rows::{GAP, Prepared, TERMS};
use super::tiles::{Tile, Tiles};
use super::{BF16, Call};
use crate::arch::{bulk, shared, warp};
use crate::block::Block;
use crate::kernels::MAX_NORMED;
use perpetua_shared::launch::TASK_THREADS;

/// Elements of k that a product takes, and those that a warp takes at a time, with their bytes.
const CHUNK: u32 = 32;
const PAIR: u32 = 2 * CHUNK;
const PAIR_BYTES: u32 = 2 * PAIR;

/// Words from one warp's sums to the next's: whole products' worth of them, 16 each.
#[inline(always)]
fn room(parts: u32, warps: u32) -> u32 {
    (shared::KEPT - parts) / (16 * warps) * 16
}

const _: () =
    assert!((shared::KEPT - (TERMS + MAX_NORMED + GAP)) / (TASK_THREADS / 32) >= 16, "a product's rows have room");

/// Whether [`multiply`] is for this call, of `N` matrices of weights from operand 1 on and an operand `norm` or none.
///
/// # Safety
/// The operands are a kernel's that has these.
#[inline(always)]
pub(crate) unsafe fn is_for<const N: usize>(call: &Call<'_>, rows: u32, norm: usize) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        let w = call.tensor(1);
        let (columns, k) = (w.extent(0), w.extent(1));
        let left = call.tiles.map_or(0, Tiles::left);
        // Rows longer than a tile are more tiles than there are rows.
        let whole = left <= u32::from(call.tensor(norm).is_present()) + N as u32 * columns;
        rows == 1 && left > 0 && whole && w.dtype() == BF16 && k.is_multiple_of(PAIR) && k <= MAX_NORMED
    }
}

/// Calls `finish(n, sums, before(n))`, on some thread, for every row n of the N weight matrices, operands 1 and up, of which the sums are
/// `scale` times the products with the row that [`stage`](super::rows::stage) has put into shared memory as terms. What `before`
/// fetches is asked for before the products.
///
/// # Safety
/// Every thread of the block makes this same call; [`is_for`] it, and the tiles are those of a plan for this task.
#[inline(always)]
pub(crate) unsafe fn multiply<const N: usize>(
    call: &Call<'_>,
    tiles: &Tiles<'_>,
    block: &Block,
    (prepared, scale): (&Prepared, f32),
    before: impl Fn(u32) -> f32,
    finish: impl Fn(u32, [f32; N], f32),
) {
    // SAFETY: the caller's promises. All conditions but those around what a lane keeps depend on the tiles alone. A warp writes its
    // own sums, which others read between two barriers; lanes of rows that are not there read the last one's weights.
    unsafe {
        let k = call.tensor(1).extent(1);
        let (lane, warps) = (block.lane(), block.warps());
        let (g, t) = (lane / 4, lane % 4);
        let per = 16 / N as u32;
        // An odd row's part of a pair of chunks comes first by that much, and last by that much less.
        let (ahead, behind) = (g % 2 * CHUNK, CHUNK - g % 2 * CHUNK);
        let b_at = TERMS + g % 2 * (k / 2 + GAP) + 4 * t;
        let (b_ahead, b_behind) = (b_at + g / 2 % 2 * (CHUNK / 2), b_at + (1 - g / 2 % 2) * (CHUNK / 2));
        let parts = TERMS + k + GAP;
        let pitch = room(parts, warps);
        let own = parts + block.warp() * pitch;
        let early = if block.thread < call.tensor(1).extent(0) { before(block.thread) } else { 0.0 };
        let mut taken = [Tile::NONE; N];
        // The first row whose sums are kept, and how many are; rows of the tiles at hand, and those done.
        let (mut first, mut rows, mut done) = (0, 0, 0);
        loop {
            let mut kept = 0;
            while (done < rows || tiles.left() >= N as u32) && (kept + per) * N as u32 <= pitch {
                if done == rows {
                    for i in 0..N {
                        taken[i] = tiles.take();
                    }
                    (rows, done) = (((u64::from(taken[0].bytes) * u64::from(prepared.per_row)) >> 32) as u32, 0);
                }
                let here = if rows - done < per { rows - done } else { per };
                let row = |at: u32, least: u32| done + least + if at + least < here { at } else { here - least - 1 };
                let low_at = taken[0].at + row(g, 0) * 2 * k + 16 * t;
                // With one matrix the lower rows are there from the ninth on.
                let has_high = N == 2 || here > 8;
                let high_at = match (N, has_high) {
                    (2, _) => taken[N - 1].at + row(g, 0) * 2 * k + 16 * t,
                    (_, true) => taken[0].at + row(g, 8) * 2 * k + 16 * t,
                    _ => low_at,
                };
                let fetch = |pair: u32, ahead: u32, b_at: u32| {
                    let from = pair * PAIR_BYTES + 2 * ahead;
                    let low = bulk::load16(low_at + from);
                    let high = if has_high { bulk::load16(high_at + from) } else { [0; 4] };
                    (low, high, shared::load16(b_at + pair * (PAIR / 2)))
                };
                // Each added to every other time, so that few products wait for the one before.
                let mut sums = [[0f32; 4]; 4];
                let mut add = |at: usize, (low, high, b): ([u32; 4], [u32; 4], [u32; 4])| {
                    sums[at] = warp::mma([low[0], high[0], low[1], high[1]], [b[0], b[1]], sums[at]);
                    sums[at + 1] = warp::mma([low[2], high[2], low[3], high[3]], [b[2], b[3]], sums[at + 1]);
                };
                let mut pair = block.warp();
                while pair < k / PAIR {
                    let (one, other) = (fetch(pair, ahead, b_ahead), fetch(pair, behind, b_behind));
                    add(0, one);
                    add(2, other);
                    pair += warps;
                }
                // Columns 0 and 1 are the first of four lanes', columns 2 and 3 the second's.
                if t == g % 2 {
                    let sum = |i: usize| {
                        let column = |i: usize| (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
                        (column(i) + column(i + 1)).to_bits()
                    };
                    let at = own + (kept + g) * N as u32;
                    if g < here {
                        shared::store(at, sum(0));
                    }
                    if N == 2 && g < here {
                        shared::store(at + 1, sum(2));
                    }
                    if N == 1 && g + 8 < here {
                        shared::store(at + 8, sum(2));
                    }
                }
                kept += here;
                done += here;
                if done == rows {
                    for i in 0..N {
                        tiles.release(taken[i]);
                    }
                }
            }
            block.sync();
            for at in block.mine(kept) {
                let mut sums = [0f32; N];
                for warp in 0..warps {
                    for i in 0..N {
                        sums[i] += f32::from_bits(shared::load(parts + warp * pitch + at * N as u32 + i as u32));
                    }
                }
                for i in 0..N {
                    sums[i] *= scale;
                }
                let n = first + at;
                finish(n, sums, if n == block.thread { early } else { before(n) });
            }
            first += kept;
            if done == rows && tiles.left() < N as u32 {
                return;
            }
            block.sync();
        }
    }
}
