//! Products of one row with weights that come in tiles, in bf16, 8 bits or 4: what `linear` and `gated_linear` are made
//! of in decoding; and of experts' weights, which do not ([`afar`]).
//!
//! ```text
//! A   16 rows x 16 of k    8 rows of weights: a lane's sixteen bytes, as they lie in the tile, are four registers of A, words
//!                          0 and 2 in row g, words 1 and 3 in row g + 8
//! B   16 of k x 8 columns  the row of activations at the k that words 0 and 2 have, or words 1 and 3, in even rows of weights, or
//!                          in odd ones, hi or lo: a column for each
//! D   16 rows x 8 columns  of which row g and row g + 8 want a column each for either term; a warp's part of k; warps' parts
//!                          are added once rows enough are there
//! ```
//! A product is a sum over k in any order, so a lane takes k as they lie, eight in a row, and the four numbers that the
//! tensor core believes to be k = 2t, 2t + 1, 2t + 8 and 2t + 9 are others, the same in A and B; nothing is moved
//! between registers.
//!
//! Rows of weights are multiples of 128 bytes apart, so in the same banks of shared memory, which give a quarter of a
//! warp, two rows, 128 bytes at a time. So an odd row is at one half of a pair of chunks while the even one is at the
//! other: the products' k are not the same in both, hence the columns. B's columns are such that half a warp, which is
//! given eight bytes a lane at a time, finds all of a pair of chunks in one term.
//!
//! What counts is not the rate, which FMAs would keep up with, but how long a task takes once its row is there, since
//! every instruction stands between two hops, and how much code that is, which an SM has to have at hand ([`product`]).
//! 256 weights cost a warp 27 instructions one by one, as `rows` does it, and sums over lanes for every row; this way
//! some 3, and a sum over warps for all rows together.
//!
//! With weights of bf16 x is taken as hi + lo, both bf16 ([`terms`]), which leaves out what is below 2^-17 of an
//! element. Products are exact, sums f32. With those of 8 bits ([`eight`]) hi and lo are bytes, and sixteen bytes are
//! as many elements, so that a product has 16 x 32 and 32 x 8; all else is the same, and [`Form`] says what is not.

/// `$body` for every unit `$i` below `$n`, written out: what loops index the compiler does not always keep in
/// registers.
macro_rules! each {
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
            $crate::gpu::thin::Kind::Nibbles => {
                type $F = $crate::gpu::packed::Nibbles;
                $body
            }
        }
    };
}
pub(crate) use by_form;

pub(crate) mod afar;
mod eight;
pub(crate) mod few;
mod form;
mod four;
pub(crate) mod long;
mod product;
mod taken;
mod terms;
mod whole;

use super::packed::{Eight, Four};
use super::{BF16, INT4, MX4, Q4, Q8};
use crate::arch::shared;
use crate::block::Block;
pub(crate) use form::{Brain, Form};
use perpetua_shared::launch::TASK_THREADS;
pub(crate) use product::Product;
use terms::TERMS;
pub(crate) use terms::{First, Source, in_two};

/// Words for the sums of squares that warps have staged, after the row's; then come the sums of products.
const SQUARES: u32 = 8;

/// Words from one warp's sums to the next's, from word `parts` on: whole products' worth of them, 16 each.
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
    Nibbles,
}

impl Kind {
    /// That of weights of this type, if they have one.
    fn of(dtype: u16) -> Option<Kind> {
        let of_lines = match if dtype == INT4 { Q4 } else { dtype } {
            BF16 => 0,
            Q8 => 1,
            Q4 => 2,
            _ => return None,
        };
        // PERF: a fourth type in the match would make it a table in memory.
        Some(Kind::numbered(of_lines + u32::from(dtype == INT4)))
    }

    /// The one of this number; beyond the last, the last.
    fn numbered(number: u32) -> Kind {
        match number {
            0 => Kind::Brain,
            1 => Kind::Eight,
            2 => Kind::Four,
            _ => Kind::Nibbles,
        }
    }

    /// That of experts' weights of this type, whose levels a [table](super::packed::LookedUp) says.
    fn of_experts(dtype: u16) -> Option<Kind> {
        Kind::of(if dtype == MX4 { Q4 } else { dtype })
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
    fn of<F: Form>(k: u32, block: &Block) -> Column {
        let (g, t) = (block.lane() / 4, block.lane() % 4);
        // The column that a lane has B for, g: words 0 and 2 or 1 and 3, of even or odd rows, in the first or the
        // second term.
        let (words, parity, term) = (g % 2, g / 2 % 2, g / 4);
        let swap = F::swap(k);
        Column { at: TERMS + F::start(k, term, words, t), parity: parity & swap, own: (g % 2) & swap }
    }
}

/// A chunk of k: a lane's row of weights may have the other one of its pair, and so may its column of activations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chunk {
    number: u32,
    own: u32,
    column: u32,
}

impl Chunk {
    /// Chunk `number`, for a lane with that column.
    fn of(number: u32, column: &Column) -> Chunk {
        Chunk { number, own: number ^ column.own, column: number ^ column.parity }
    }

    /// Goes on by so many, an even number, so that pairs stay pairs.
    fn go_on(&mut self, by: u32) {
        self.number += by;
        self.own += by;
        self.column += by;
    }
}

/// What the calling warp's chunks of rows of `k` add to the sums of eight rows, and, if `HIGH`, to those of eight more,
/// of which a lane's weights begin at these bytes of the tiles: on one or the other of the first two lanes of four, for
/// even rows and for odd.
///
/// # Safety
/// As [`run`].
unsafe fn products<F: Form, const HIGH: bool>([low_at, high_at]: [u32; 2], k: u32, block: &Block) -> [f32; 2] {
    // SAFETY: the caller's promise; where chunks are pairs, a chunk's other one is there.
    unsafe {
        let (warps, chunks) = (block.warps(), k / F::CHUNK);
        let column = Column::of::<F>(k, block);
        let fetch = |chunk: &Chunk| {
            let is_there = chunk.number < chunks;
            let place = F::place(if is_there { chunk.own } else { column.own });
            let low = F::load(low_at, place);
            let high = if HIGH { F::load(high_at, place) } else { F::NO_WEIGHTS };
            (low, high, F::values(&column, chunk, chunks))
        };
        // Every other product is added to others, so that few wait for the one before.
        let mut sums = [[F::ZERO; 2]; 2];
        let mut add = |at: usize, (low, high, values): (F::Weights, F::Weights, F::Values)| {
            sums[0][at] = F::add(sums[0][at], low, values);
            if HIGH {
                sums[1][at] = F::add(sums[1][at], high, values);
            }
        };
        let (mut one, mut other) = (Chunk::of(block.warp(), &column), Chunk::of(block.warp() + warps, &column));
        // What comes next is asked for before the products. A warp without chunks multiplies with nothing.
        let (mut first, mut second) = (fetch(&one), fetch(&other));
        loop {
            one.go_on(2 * warps);
            other.go_on(2 * warps);
            if one.number >= chunks {
                add(0, first);
                add(1, second);
                break;
            }
            let next = (fetch(&one), fetch(&other));
            add(0, first);
            add(1, second);
            (first, second) = next;
        }
        [F::total(sums[0], block), if HIGH { F::total(sums[1], block) } else { 0.0 }]
    }
}
