//! Products of one row with weights that come in tiles, in bf16, 8 bits or 4: what `linear` and `gated_linear` are made of in decoding; and of
//! experts' weights, which do not ([`afar`]).
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
//! With weights of bf16 x is taken as hi + lo, both bf16 ([`terms`]), which leaves out what is below 2^-17 of an element. Products are exact, sums
//! f32. With those of 8 bits ([`eight`]) hi and lo are bytes, and sixteen bytes are as many elements, so that a product has 16 x 32 and 32 x 8; all
//! else is the same, and [`Form`] says what is not.

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

/// `$body` with `$F` for the form that `$kind` names.
macro_rules! by_form {
    ($kind:expr, $F:ident => $body:expr) => {
        match $kind {
            $crate::gpu::thin::Kind::Brain => {
                type $F = $crate::gpu::thin::Brain;
                $body
            }
            $crate::gpu::thin::Kind::Eight => {
                type $F = $crate::gpu::packed::Eight;
                $body
            }
            $crate::gpu::thin::Kind::Four => {
                type $F = $crate::gpu::packed::Four;
                $body
            }
        }
    };
}
pub(crate) use by_form;

pub(crate) mod afar;
mod eight;
mod form;
mod four;
mod held;
pub(crate) mod long;
mod taken;
mod terms;
mod whole;

use super::math::{reciprocal, rsqrt};
use super::packed::{Eight, Four};
use super::rows::Staging;
use super::tiles::Tiles;
use super::{BF16, Call, F32, Q4, Q8};
use crate::arch::{memory, shared};
use crate::block::Block;
use crate::kernels::linear::slot;
pub(crate) use form::{Brain, Form};
use held::Held;
use perpetua_shared::launch::TASK_THREADS;
use perpetua_shared::{Fault, Technique};
use taken::Taken;
use terms::TERMS;
pub(crate) use terms::{First, Source, in_two};

/// Words for the sums of squares that warps have staged, after the row's; then come the sums of products.
const SQUARES: u32 = 8;

/// Words from one warp's sums to the next's, from word `parts` on: whole products' worth of them, 16 each.
#[inline(always)]
const fn room(parts: u32, warps: u32) -> u32 {
    (shared::KEPT - parts) / (16 * warps) * 16
}

const _: () = assert!(TASK_THREADS / 32 <= SQUARES, "every warp has a word");
const _: () = {
    const fn has_room(words: u32) -> bool {
        room(TERMS + words + SQUARES, TASK_THREADS / 32) >= 16
    }
    const fn longest<F: Form>() -> u32 {
        F::LONGEST / F::CHUNK * F::CHUNK_TERMS
    }
    assert!(
        has_room(longest::<Brain>()) && has_room(longest::<Eight>()) && has_room(longest::<Four>()),
        "a product's rows have room beside the longest row"
    );
};

/// The form of a call's weights, which it knows when it runs; bodies are compiled [for each](by_form).
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Brain,
    Eight,
    Four,
}

impl Kind {
    /// That of weights of this type, if they have one.
    #[inline(always)]
    fn of(dtype: u16) -> Option<Kind> {
        match dtype {
            BF16 => Some(Kind::Brain),
            Q8 => Some(Kind::Eight),
            Q4 => Some(Kind::Four),
            _ => None,
        }
    }
}

/// The form for which [`run`] does this call, of `N` matrices of weights from operand `w` on, if it does, and `source` is its one row.
///
/// # Safety
/// The operands are a kernel's that has these.
#[inline(always)]
pub(crate) unsafe fn form_of<const N: usize>(call: &Call<'_>, source: &impl Source, how: Staging) -> Option<Kind> {
    // SAFETY: the caller's promise.
    unsafe {
        let kind = Kind::of(call.tensor(slot::W).dtype())?;
        by_form!(kind, F => is_for::<F, N>(call, source, how)).then_some(kind)
    }
}

/// Whether that is form `F`.
///
/// # Safety
/// As [`form_of`].
#[inline(always)]
unsafe fn is_for<F: Form, const N: usize>(call: &Call<'_>, source: &impl Source, how: Staging) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        let (w, norm) = (call.tensor(slot::W), call.tensor(how.norm));
        let (columns, k) = (w.extent(0), w.extent(1));
        let left = call.tiles.map_or(0, Tiles::left);
        // Rows longer than a tile are more tiles than there are rows.
        let whole = left <= u32::from(norm.is_present()) + N as u32 * columns;
        let is_fit = call.are_all::<N>(F::DTYPE) && k.is_multiple_of(F::ROW_MULTIPLE) && k <= F::LONGEST;
        let has_room = !norm.is_present() || F::has_room_for_norm(k, if norm.dtype() == F32 { 4 } else { 2 });
        left > 0 && whole && is_fit && has_room && source.is_whole() && call.uses(Technique::ThinProducts)
    }
}

/// Where a lane finds what it multiplies with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Column {
    /// The activations of its column of chunk 0, from this word on.
    at: u32,
    /// 1 if it has the other chunk of each pair.
    parity: u32,
    /// 1 if the lane's row of weights has.
    own: u32,
}

impl Column {
    /// That of the calling lane, for a row of `k`.
    #[inline(always)]
    fn of<F: Form>(k: u32, block: &Block) -> Column {
        let (g, t) = (block.lane() / 4, block.lane() % 4);
        // The column that a lane has B for, g: words 0 and 2 or 1 and 3, of even or odd rows, in the first or the second term.
        let (words, parity, term) = (g % 2, g / 2 % 2, g / 4);
        let swap = F::swap(k);
        Column { at: TERMS + F::start(k, term, words, t), parity: parity & swap, own: (g % 2) & swap }
    }
}

/// Calls `finish(n, sums, ask(n))`, on some thread, for every row n of the N weight matrices, of form `F`, operands `w` and up, of which the sums are
/// the products with the row `source`. What it can it does before `ready`, and asks for before the products; `H`
/// products' weights it holds in registers by then.
///
/// # Safety
/// Every thread of the block makes this same call; it is of [this form](form_of), and the tiles are those of a plan for this task.
///
/// # Errors
/// Those of `ready`.
#[inline(always)]
pub(crate) unsafe fn run<F: Form, const N: usize, const H: usize>(
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
        let (norm, k) = (call.tensor(how.norm), call.tensor(slot::W).extent(1));
        if norm.is_present() {
            terms::keep_norm::<F>(tiles, &norm, k, block);
        }
        let held = Held::<F, N, H>::new(tiles, k, block);
        let share = if norm.is_present() { reciprocal(k) } else { 0.0 };
        let outcome = ready();
        if outcome.is_err() {
            held.release(tiles);
            return outcome;
        }
        // Found out anew, all that follows from it, too: weights are held where it would be.
        let block = &Block { thread: memory::opaque_word(block.thread), threads: block.threads };
        let squares = terms::stage::<F, _>(source, &norm, k, block);
        let (lane, warps) = (block.lane(), block.warps());
        let (g, t) = (lane / 4, lane % 4);
        let per = 16 / N as u32;
        let (squares_at, parts) = (TERMS + F::words(k), TERMS + F::words(k) + SQUARES);
        let pitch = room(parts, warps);
        let own = parts + block.warp() * pitch;
        let early = if block.thread < call.tensor(slot::W).extent(0) { ask(block.thread) } else { 0 };
        // Where a lane finds its two rows of weights: of one matrix the second is eight further on, of two it is the other's.
        let row = |i: u32| if N == 1 { g + 8 * i } else { g };
        let place =
            |taken: &Taken<N>, i: u32, row: u32| taken.at[i as usize % N] + row * F::row_bytes(k) + F::lane_at(block);
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
                    products::<F, true>(at, k, block)
                } else {
                    products::<F, false>(at, k, block)
                };
                if t == g % 2 * F::swap(k) {
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

/// What the calling warp's chunks of rows of `k` add to the sums of eight rows, and, if `HIGH`, to those of eight more, of which a
/// lane's weights begin at these bytes of the tiles: on one or the other of the first two lanes of four, for even rows and for odd.
///
/// # Safety
/// As [`run`].
#[inline(always)]
unsafe fn products<F: Form, const HIGH: bool>([low_at, high_at]: [u32; 2], k: u32, block: &Block) -> [f32; 2] {
    // SAFETY: the caller's promise; where chunks are pairs, a chunk's other one is there.
    unsafe {
        let (warps, chunks) = (block.warps(), k / F::CHUNK);
        let column = Column::of::<F>(k, block);
        let fetch = {
            #[inline(always)]
            |chunk: u32| {
                let place = F::place(chunk ^ column.own);
                let low = F::load(low_at, place);
                let high = if HIGH { F::load(high_at, place) } else { F::NO_WEIGHTS };
                (low, high, F::values(&column, chunk, chunks))
            }
        };
        // Every other product is added to others, so that few wait for the one before.
        let mut sums = [[F::ZERO; 2]; 2];
        let mut add = {
            #[inline(always)]
            |at: usize, (low, high, values): (F::Weights, F::Weights, F::Values)| {
                sums[0][at] = F::add(sums[0][at], low, values);
                if HIGH {
                    sums[1][at] = F::add(sums[1][at], high, values);
                }
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
        [F::total(sums[0], block), if HIGH { F::total(sums[1], block) } else { 0.0 }]
    }
}
