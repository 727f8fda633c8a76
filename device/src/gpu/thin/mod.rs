//! Products of one row with bf16 weights that come in tiles: what `linear` and `gated_linear` are made of in decoding.
//!
//! ```text
//! A   16 rows x 16 of k    8 rows of weights: a lane's sixteen bytes, as they lie in the tile, are four registers of A, words
//!                          0 and 2 in row g, words 1 and 3 in row g + 8
//! B   16 of k x 8 columns  the row of activations at the k that words 0 and 2 have, or words 1 and 3, in even rows of weights, or
//!                          in odd ones, hi or lo: a column for each
//! D   16 rows x 8 columns  of which row g and row g + 8 want a column each for either term; a warp's part of k; warps' parts
//!                          are added once rows enough are there
//! ```
//! A product is a sum over k in any order, so a lane takes k as they lie, eight in a row, and the four numbers that the tensor
//! core believes to be k = 2t, 2t + 1, 2t + 8 and 2t + 9 are others, the same in A and B; nothing is moved between registers.
//!
//! Rows of weights are multiples of 128 bytes apart, so in the same banks of shared memory, which give a quarter of a warp, two rows,
//! 128 bytes at a time. So an odd row is at one half of a pair of chunks while the even one is at the other: the products' k are not
//! the same in both, hence the columns. B's columns are such that half a warp, which is given eight bytes a lane at a time,
//! finds all of a pair of chunks in one term.
//!
//! What counts is not the rate, which FMAs would keep up with, but how long a task takes once its row is there: the first rows of weights
//! are in registers by then ([`held`]), others in shared memory, and every instruction stands between two hops. 256 weights cost a
//! warp 27 instructions one by one, as `rows` does it, and sums over lanes for every row; this way some 3, and a sum over warps for all
//! rows together.
//!
//! x is taken as hi + lo, both bf16 ([`terms`]), which leaves out what is below 2^-17 of an element. Products are exact, sums f32.

/// `$body` for every chunk, group of rows or unit `$i` below `$n`, written out: what loops index the compiler does not always keep in
/// registers.
macro_rules! each {
    (chunk $i:ident below $n:expr => $body:block) => {
        each!($i below $n => $body; 0 1 2 3 4 5 6 7 8 9 10 11 12 13)
    };
    (group $i:ident below $n:expr => $body:block) => {
        each!($i below $n => $body; 0 1 2 3 4 5)
    };
    (unit $i:ident below $n:expr => $body:block) => {
        each!($i below $n => $body; 0 1 2 3 4 5 6 7)
    };
    ($i:ident below $n:expr => $body:block; $($number:literal)*) => {
        $({
            let $i = const { $number };
            if $i < $n $body
        })*
    };
}

mod held;
pub(crate) mod long;
mod taken;
mod terms;

use super::Call;
use super::math::{reciprocal, rsqrt};
use super::rows::Staging;
use super::tiles::Tiles;
use crate::arch::{bulk, memory, shared, warp};
use crate::block::Block;
use crate::kernels::MAX_NORMED;
use held::Held;
use perpetua_shared::launch::TASK_THREADS;
use perpetua_shared::{Fault, Technique};
use taken::Taken;
use terms::TERMS;
pub(crate) use terms::{First, Source, in_two};

/// Elements of k that a product takes of eight rows, with their bytes, and as words of a term.
const CHUNK: u32 = 32;
const CHUNK_BYTES: u32 = 2 * CHUNK;
const CHUNK_WORDS: u32 = CHUNK / 2;

/// Words for the sums of squares that warps have staged, after the row's; then come the sums of products.
const SQUARES: u32 = 8;

/// Words from one warp's sums to the next's, from word `parts` on: whole products' worth of them, 16 each.
#[inline(always)]
const fn room(parts: u32, warps: u32) -> u32 {
    (shared::KEPT - parts) / (16 * warps) * 16
}

const _: () = assert!(TASK_THREADS / 32 <= SQUARES, "every warp has a word");
const _: () =
    assert!((shared::KEPT - (TERMS + MAX_NORMED + SQUARES)) / (TASK_THREADS / 32) >= 16, "a product's rows have room");

/// Whether [`run`] is for this call, of `N` matrices of weights from operand 1 on, if `source` is its one row.
///
/// # Safety
/// The operands are a kernel's that has these.
#[inline(always)]
pub(crate) unsafe fn is_for<const N: usize>(call: &Call<'_>, source: &impl Source, how: Staging) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        let w = call.tensor(1);
        let (columns, k) = (w.extent(0), w.extent(1));
        let left = call.tiles.map_or(0, Tiles::left);
        // Rows longer than a tile are more tiles than there are rows.
        let whole = left <= u32::from(call.tensor(how.norm).is_present()) + N as u32 * columns;
        let is_fit = call.are_brains::<N>() && k.is_multiple_of(2 * CHUNK) && k <= MAX_NORMED;
        left > 0 && whole && is_fit && source.is_whole() && call.uses(Technique::ThinProducts)
    }
}

/// Where the activations of the terms stand that a lane has the column of, in chunk 0 of `chunks`, and which rows of weights want them: even
/// ones or odd ones.
#[inline(always)]
fn activations(chunks: u32, block: &Block) -> (u32, u32) {
    let (g, t) = (block.lane() / 4, block.lane() % 4);
    // The column that a lane has B for, g: words 0 and 2 or 1 and 3, of even or odd rows, in the first or the second term.
    let (words, parity, term) = (g % 2, g / 2 % 2, g / 4);
    (TERMS + term * chunks * CHUNK_WORDS + 4 * t + 2 * words, parity)
}

/// What a lane's two columns of two products add to the sum of its row, with the other term's: lane t has columns 2t and 2t + 1, words 0 and
/// 2 and words 1 and 3 of a parity's rows in a term; two lanes on, in the other.
///
/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn sum_of([one, other]: [[f32; 4]; 2]) -> f32 {
    let own = (one[0] + other[0]) + (one[3] + other[3]);
    // SAFETY: the caller's promise.
    own + f32::from_bits(unsafe { warp::shuffle_xor(own.to_bits(), 2) })
}

/// Calls `finish(n, sums, ask(n))`, on some thread, for every row n of the N weight matrices, operands 1 and up, of which the sums are
/// the products with the row `source`. What it can it does before `ready`, and asks for before the products; `H`
/// products' weights it holds in registers by then.
///
/// # Safety
/// Every thread of the block makes this same call; [`is_for`] it, and the tiles are those of a plan for this task.
///
/// # Errors
/// Those of `ready`.
#[inline(always)]
pub(crate) unsafe fn run<const N: usize, const H: usize>(
    call: &Call<'_>,
    source: &impl Source,
    how: Staging,
    block: &Block,
    ready: impl Fn() -> Result<(), Fault>,
    ask: impl Fn(u32) -> u32,
    finish: impl Fn(u32, [f32; N], u32),
) -> Result<(), Fault> {
    // SAFETY: the caller's promises. All conditions but those around what a lane keeps depend on the tiles alone. A warp writes its
    // own sums, which others read between two barriers; lanes of rows that are not there read weights of others.
    unsafe {
        let Some(tiles) = call.tiles else { return Ok(()) };
        let (norm, k) = (call.tensor(how.norm), call.tensor(1).extent(1));
        if norm.is_present() {
            terms::keep_norm(tiles, &norm, k, block);
        }
        let held = Held::<N, H>::new(tiles, k, block);
        let share = if norm.is_present() { reciprocal(k) } else { 0.0 };
        let outcome = ready();
        if outcome.is_err() {
            held.release(tiles);
            return outcome;
        }
        // Found out anew, all that follows from it, too: weights are held where it would be.
        let block = &Block { thread: memory::opaque_word(block.thread), threads: block.threads };
        let squares = terms::stage(source, &norm, k, block);
        let (lane, warps) = (block.lane(), block.warps());
        let (g, t) = (lane / 4, lane % 4);
        let per = 16 / N as u32;
        let (squares_at, parts) = (TERMS + k, TERMS + k + SQUARES);
        let pitch = room(parts, warps);
        let own = parts + block.warp() * pitch;
        let early = if block.thread < call.tensor(1).extent(0) { ask(block.thread) } else { 0 };
        // Where a lane finds its two rows of weights: of one matrix the second is eight further on, of two it is the other's.
        let row = |i: u32| if N == 1 { g + 8 * i } else { g };
        let place = |taken: &Taken<N>, i: u32, row: u32| taken.at[i as usize % N] + row * 2 * k + 16 * t;
        let squares = held.multiply(own, k, squares, block);
        if lane == 0 {
            shared::store(squares_at + block.warp(), squares.to_bits());
        }
        let mut taken = held.taken;
        // The first row whose sums are kept, and how many are.
        let (mut first, mut kept) = (0, held.rows);
        loop {
            while (taken.done < taken.rows || tiles.left() >= N as u32) && (kept + per) * N as u32 <= pitch {
                let oldest = taken.oldest(tiles);
                if taken.done == taken.rows {
                    taken.take(tiles);
                }
                let mut here = per.min(taken.rows - taken.done);
                let mut at = [0; 2];
                for i in 0..2 {
                    at[i as usize] = place(&taken, i, taken.done + row(i).min(here - 1));
                }
                taken.done += here;
                // What these leave empty the next tiles fill, for which those that are held need not be released (`DataOp::after`).
                if here < per && tiles.left() >= N as u32 {
                    taken.take(tiles);
                    taken.done = taken.rows.min(per - here);
                    for i in 0..2 {
                        if row(i) >= here {
                            at[i as usize] = place(&taken, i, (row(i) - here).min(taken.done - 1));
                        }
                    }
                    here += taken.done;
                }
                let sums = if N == 2 || here > 8 {
                    products::<true>(at, k / CHUNK, block)
                } else {
                    products::<false>(at, k / CHUNK, block)
                };
                if t == g % 2 {
                    for i in 0..2 {
                        if row(i) < here {
                            let to = if N == 1 { row(i) } else { 2 * g + i };
                            shared::store(own + kept * N as u32 + to, sums[i as usize].to_bits());
                        }
                    }
                }
                kept += here;
                taken.release(tiles, oldest);
            }
            block.sync();
            // 1 / root of the mean square, which all of the row has a part in: so every product is multiplied with it, and none waits.
            let mut scale = 1.0;
            if norm.is_present() {
                let mut total = 0.0;
                for warp in 0..warps {
                    total += f32::from_bits(shared::load(squares_at + warp));
                }
                scale = rsqrt(total * share + how.eps);
            }
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
                finish(n, sums, if n == block.thread { early } else { ask(n) });
            }
            first += kept;
            if taken.done == taken.rows && tiles.left() < N as u32 {
                return Ok(());
            }
            kept = 0;
            block.sync();
        }
    }
}

/// What the calling warp's chunks of `chunks` add to the sums of eight rows, and, if `HIGH`, to those of eight more, of which a
/// lane's weights begin at these bytes of the tiles: on one or the other of the first two lanes of four, for even rows and for odd.
///
/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn products<const HIGH: bool>([low_at, high_at]: [u32; 2], chunks: u32, block: &Block) -> [f32; 2] {
    // SAFETY: the caller's promise; chunks are pairs, so that a chunk's other one is there.
    unsafe {
        let warps = block.warps();
        let g = block.lane() / 4;
        let (b_at, parity) = activations(chunks, block);
        let fetch = |chunk: u32| {
            let from = (chunk ^ (g % 2)) * CHUNK_BYTES;
            let low = bulk::load16(low_at + from);
            let high = if HIGH { bulk::load16(high_at + from) } else { [0; 4] };
            (low, high, shared::load8(b_at + (chunk ^ parity) * CHUNK_WORDS))
        };
        // Every other product is added to others, so that few wait for the one before.
        let mut sums = [[[0f32; 4]; 2]; 2];
        let mut add = |at: usize, (low, high, b): ([u32; 4], [u32; 4], [u32; 2])| {
            sums[0][at] = warp::mma(low, b, sums[0][at]);
            if HIGH {
                sums[1][at] = warp::mma(high, b, sums[1][at]);
            }
        };
        let mut chunk = block.warp();
        while chunk + warps < chunks {
            let (one, other) = (fetch(chunk), fetch(chunk + warps));
            add(0, one);
            add(1, other);
            chunk += 2 * warps;
        }
        if chunk < chunks {
            add(0, fetch(chunk));
        }
        [sum_of(sums[0]), if HIGH { sum_of(sums[1]) } else { 0.0 }]
    }
}
