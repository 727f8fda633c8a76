//! One position's attention for the queries that share a key/value head, all of them together, on tensor cores
//! (flash-decoding).
//!
//! ```text
//!           A, 16 rows                        B, 8 columns         D
//! scores    queries: 0..8 hi, 8..16 lo        8 positions' keys    a query's scores, two positions a lane
//! values    their weights, hi and lo again    8 of d               a query's sums, a lane's 8 of d from eight products
//! ```
//! Scores lie in D where the next product wants its A, so nothing moves between lanes but a maximum. Of d a lane takes
//! eight neighbours at once, 16 bytes of a key or value: which of them the tensor core believes to be which k, or which
//! column, is the same in both operands, and in what is written.
//!
//! A warp takes 16 positions at a time; warps share the positions, and what each found is merged in shared memory as
//! [`gpu`](super::gpu) does it. Queries and weights are hi + lo, both bf16, which leaves out 2^-17 of an element; sums
//! are f32. An infinite value gives NaN, where one weight alone might have left it infinite.

use super::gpu::Head;
use crate::arch::scalar::{exp2, fma, high_halves, low_halves};
use crate::arch::{each_of_four, memory, shared, warp};
use crate::block::{Block, FREE_SHARED};
#[cfg(not(target_arch = "nvptx64"))]
use crate::gpu::BF16;
use crate::gpu::math::larger;
use crate::gpu::thin::in_two;
use core::f32::consts::LOG2_E;
#[cfg(not(target_arch = "nvptx64"))]
use perpetua_shared::Operand;
use perpetua_shared::launch::TASK_THREADS;

/// Queries at most: half of A's rows.
pub(super) const QUERIES: u32 = 8;

/// Positions that a warp takes at a time.
const UNIT: u32 = 16;

/// Dimensions as many as a warp can hold the sums of, and its lanes take by four; heads of more are done
/// [otherwise](super::wide).
pub(super) const DIMENSIONS: u32 = 128;

/// Parts at most: a warp's each.
const PARTS: usize = TASK_THREADS as usize / 32;

/// Words of a row of a part before its sums: the maximum, the total and two zeros, since sums begin on 16 bytes.
const MORE: u32 = 4;

/// Where queries are staged: rows of [`pitch`] words, each word of hi before its lo, as the tensor core takes them;
/// parts come after them.
pub(super) const STAGE: u32 = FREE_SHARED;

/// Words from one staged query to the next, so that those that lanes read at once lie in different banks.
pub(super) fn pitch(d: u32) -> u32 {
    d + 4
}

/// Where parts begin.
fn parts_at(queries: u32, d: u32) -> u32 {
    STAGE + queries * pitch(d)
}

/// Words of a part.
fn part_words(queries: u32, d: u32) -> u32 {
    queries * (d + MORE)
}

/// `$body` for each part there may be, written out: what loops index would be in memory.
macro_rules! each_part {
    ($part:ident => $body:expr) => {
        each_part!(@ $part => $body; 0 1 2 3 4 5 6)
    };
    (@ $part:ident => $body:expr; $($number:literal)*) => {{
        const _: () = assert!([$($number),*].len() == PARTS);
        $({
            const $part: usize = $number;
            $body;
        })*
    }};
}

/// A key/value head and its queries.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Group {
    pub(in crate::kernels) k: Head,
    pub(in crate::kernels) v: Head,
    pub(in crate::kernels) queries: u32,
    pub(in crate::kernels) d: u32,
    pub(in crate::kernels) scale: f32,
}

/// Which positions each query sees.
pub(in crate::kernels) trait Seen {
    /// Those that query `g` sees, first and end; none, where all see all: the same for every query.
    fn by(&self, g: u32) -> Option<(u32, u32)>;
}

/// All of them.
pub(in crate::kernels) struct All;

impl Seen for All {
    fn by(&self, _: u32) -> Option<(u32, u32)> {
        None
    }
}

impl<F: Fn(u32) -> (u32, u32)> Seen for F {
    fn by(&self, g: u32) -> Option<(u32, u32)> {
        Some(self(g))
    }
}

/// What was found of four dimensions of a query.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Sums {
    pub(in crate::kernels) max: f32,
    pub(in crate::kernels) total: f32,
    pub(in crate::kernels) sums: [f32; 4],
}

impl Sums {
    /// What is found where there is no position.
    pub(in crate::kernels) const NONE: Sums = Sums { max: f32::NEG_INFINITY, total: 0.0, sums: [0.0; 4] };

    /// With a `sink`, which -inf is not.
    pub(in crate::kernels) fn with(self, sink: f32) -> Sums {
        if sink > f32::NEG_INFINITY {
            let max = larger(self.max, sink);
            let shrink = exp2((self.max - max) * LOG2_E);
            let total = fma(self.total, shrink, exp2((sink - max) * LOG2_E));
            return Sums { max, total, sums: self.sums.map(|sum| sum * shrink) };
        }
        self
    }
}

/// Whether there is room for `queries` queries of `d` dimensions, and these are as many as a warp takes.
pub(in crate::kernels) fn has_room(queries: u32, d: u32) -> bool {
    let has_room = if d <= DIMENSIONS {
        parts_at(queries, d) + part_words(queries, d) <= shared::KEPT
    } else {
        super::wide::has_room(queries, d)
    };
    queries <= QUERIES && d.is_multiple_of(32) && has_room
}

/// Stages elements `i` and `i + 1` of query `g`, of `d` elements, `i` even.
///
/// # Safety
/// The words are nobody else's until the block's next barrier; the group [fits](Group::is_fit).
pub(in crate::kernels) unsafe fn stage(d: u32, g: u32, i: u32, values: [f32; 2]) {
    // SAFETY: the caller's promise.
    unsafe { shared::store8(STAGE + g * pitch(d) + i, in_two(values)) }
}

impl Group {
    /// Whether keys and values `caches`, [heads, positions, d] on sixteen bytes, can be read as tensor cores want them,
    /// and there is room for `queries` queries.
    #[cfg(not(target_arch = "nvptx64"))]
    pub(in crate::kernels) fn is_fit(queries: u32, caches: [&Operand; 2]) -> bool {
        let fits = |cache: &Operand| {
            let [head, step, ..] = cache.stride_elems;
            cache.dtype == BF16 && step.is_multiple_of(8) && (cache.extent[0] == 1 || head.is_multiple_of(8))
        };
        has_room(queries, caches[0].extent[2]) && caches.into_iter().all(fits)
    }

    /// Attends to positions `first..end`, and calls `put(to(g), i, found)`, on some thread, for dimensions i to i + 3
    /// of each query g. Of those positions a query may see some alone: from the first one's unit on, [as](Seen) `seen`
    /// says.
    ///
    /// # Safety
    /// Every thread of the block makes this same call, after a barrier since all queries were [staged](stage); the
    /// group [fits](Group::is_fit); the cache holds the positions; nobody reads parts of an earlier call any more.
    pub(in crate::kernels) unsafe fn attend<To>(
        &self,
        (first, end): (u32, u32),
        seen: &impl Seen,
        block: &Block,
        to: impl Fn(u32) -> To,
        put: impl Fn(&To, u32, Sums),
    ) {
        if self.d > DIMENSIONS {
            // SAFETY: the caller's promises.
            return unsafe { self.attend_widely((first, end), seen, block, to, put) };
        }
        let (parts_at, words) = (parts_at(self.queries, self.d), part_words(self.queries, self.d));
        // As many as have work, are there, and have room; counted, since a division takes longer.
        let units = (end - first).div_ceil(UNIT);
        let mut parts = 1;
        for more in 1..PARTS as u32 {
            let has_room = parts_at + (more + 1) * words <= shared::KEPT;
            parts += u32::from(more < units && more < block.warps() && has_room);
        }
        // SAFETY: the caller's promises; conditions around barriers and warps' calls are the same for all their
        // threads. A part is written by its warp before a barrier and read after it.
        unsafe {
            if block.warp() < parts {
                let at = parts_at + block.warp() * words;
                self.find((first, end), seen, (block.warp(), parts), block.lane(), at);
            }
            block.sync();
            // A lane has four dimensions, of all parts; those beyond the last are the last once more, with no weight,
            // and not put.
            let i = 4 * block.lane();
            let at = if i < self.d { i } else { 0 };
            let mut g = block.warp();
            while g < self.queries {
                // Found before the parts are, which takes as long.
                let to = to(g);
                // Looked for anew for each query: the places of all, found before, would be as much code.
                let from = memory::opaque_word(parts_at + g * (self.d + MORE));
                let (mut heads, mut sums) = ([[0.0; 2]; PARTS], [[0.0; 4]; PARTS]);
                each_part!(PART => {
                    let is_there = (PART as u32) < parts;
                    let from = from + if is_there { PART as u32 * words } else { 0 };
                    let [max, total] = shared::load8(from).map(f32::from_bits);
                    heads[PART] = [if is_there { max } else { f32::NEG_INFINITY }, total];
                    sums[PART] = shared::load16(from + MORE + at).map(f32::from_bits);
                });
                let mut all = Sums::NONE;
                each_part!(PART => all.max = larger(all.max, heads[PART][0]));
                // With every score at -inf (a NaN or an overflow upstream) weights are NaN, as in the reference;
                // without positions, where the total is 0, they are 0.
                let origin = if heads[0][1] == 0.0 { 0.0 } else { all.max };
                each_part!(PART => {
                    let weight = exp2((heads[PART][0] - origin) * LOG2_E);
                    all.total = fma(heads[PART][1], weight, all.total);
                    let ([a, b, c, d], [e, f, g, h]) = (sums[PART], all.sums);
                    all.sums = [fma(a, weight, e), fma(b, weight, f), fma(c, weight, g), fma(d, weight, h)];
                });
                if i < self.d {
                    put(&to, i, all);
                }
                g += block.warps();
            }
        }
    }

    /// What warp `number` of `parts` finds, to the words from `to` on.
    ///
    /// # Safety
    /// As [`attend`](Group::attend); every lane of the warp makes this same call, whose words those are.
    unsafe fn find(&self, (first, end): (u32, u32), seen: &impl Seen, (number, parts): (u32, u32), lane: u32, to: u32) {
        let (queries, d) = (self.queries, self.d);
        let (g, t) = (lane / 4, lane % 4);
        // Rows of A beyond the last query are that query again, and nobody looks at what comes of them.
        let query = if g < queries { g } else { queries - 1 };
        let query_at = STAGE + query * pitch(d) + 8 * t;
        let seen = seen.by(query);
        // So are columns of B beyond the last dimensions.
        let column = |chunk: u32| {
            let i = 64 * chunk + 8 * g;
            2 * (if i < d { i } else { d - 8 }) as usize
        };
        let columns = [column(0), column(1)];
        let row =
            |head: &Head, t: u32| head.first.at(0).wrapping_add((u64::from(t) * u64::from(2 * head.step)) as usize);
        let (keys, values) = (|t: u32| row(&self.k, t), |t: u32| row(&self.v, t));
        let (mut max, mut total, mut sums) = (f32::NEG_INFINITY, 0.0, [[0f32; 4]; 16]);
        let mut at = first + UNIT * number;
        // SAFETY: positions are clamped to the last, so rows are the cache's, and dimensions are below d (caller); the
        // queries have been staged. Conditions around what lanes do together are the same for all of them.
        unsafe {
            while at < end {
                let row = |i: u32| if at + i < end { at + i } else { end - 1 };
                let keys = [keys(row(g)), keys(row(g + 8))];
                let rows = [2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9].map(row);
                // Of two tiles of positions; of every other sixteen dimensions apart, so that no product waits for the
                // one before.
                let mut scores = [[[0f32; 4]; 2]; 2];
                let (mut fetched, mut held) = ([[[0; 4]; 2]; 4], [[0; 4]; 4]);
                // Memory answers long after it is asked: all keys, and half of the values, before the first is used.
                each_of_four!(c => if c == 0 || 32 * c < d {
                    for tile in 0..2 {
                        let at = keys[tile].wrapping_add(16 * t as usize + 64 * c as usize);
                        fetched[c as usize][tile] = memory::load16(at);
                    }
                });
                each_of_four!(row => held[row] = memory::load16(values(rows[row]).wrapping_add(columns[0])));
                each_of_four!(c => if c == 0 || 32 * c < d {
                    let at = query_at + 32 * c;
                    let (even, odd) = (shared::load16(at), shared::load16(at + 4));
                    let [one, other] = fetched[c as usize];
                    scores[0][0] = warp::mma(even, [one[0], one[1]], scores[0][0]);
                    scores[1][0] = warp::mma(even, [other[0], other[1]], scores[1][0]);
                    scores[0][1] = warp::mma(odd, [one[2], one[3]], scores[0][1]);
                    scores[1][1] = warp::mma(odd, [other[2], other[3]], scores[1][1]);
                });
                // The other half, where the keys were; their addresses are found anew, for want of registers.
                let mut more = [[0; 4]; 4];
                if d > 64 {
                    each_of_four!(row => {
                        more[row] = memory::load16(values(memory::opaque_word(rows[row])).wrapping_add(columns[1]));
                    });
                }
                let is_there = |tile: usize, i: usize| {
                    let at = at + 8 * tile as u32 + 2 * t + i as u32;
                    at < end && seen.is_none_or(|(first, end)| first <= at && at < end)
                };
                let score = |tile: usize, i: usize| {
                    let [even, odd] = scores[tile];
                    let sum = (even[i] + odd[i]) + (even[i + 2] + odd[i + 2]);
                    if is_there(tile, i) { sum * self.scale } else { f32::NEG_INFINITY }
                };
                let scores = [score(0, 0), score(0, 1), score(1, 0), score(1, 1)];
                let mut largest = max;
                for score in &scores {
                    largest = larger(largest, *score);
                }
                largest = larger(largest, f32::from_bits(warp::shuffle_xor(largest.to_bits(), 1)));
                largest = larger(largest, f32::from_bits(warp::shuffle_xor(largest.to_bits(), 2)));
                if at >= first + UNIT * parts && largest > max {
                    let shrink = exp2((max - largest) * LOG2_E);
                    total *= shrink;
                    for sum in &mut sums {
                        for i in 0..4 {
                            sum[i] *= shrink;
                        }
                    }
                }
                max = largest;
                let mut weights = scores.map(|score| exp2((score - max) * LOG2_E));
                // Who has seen none yet has no maximum, either.
                if seen.is_some() {
                    let only = |is_there: bool, weight: f32| if is_there { weight } else { 0.0 };
                    let [a, b, c, d] = weights;
                    weights = [
                        only(is_there(0, 0), a),
                        only(is_there(0, 1), b),
                        only(is_there(1, 0), c),
                        only(is_there(1, 1), d),
                    ];
                }
                total += (weights[0] + weights[1]) + (weights[2] + weights[3]);
                let [near, near_rest] = in_two([weights[0], weights[1]]);
                let [far, far_rest] = in_two([weights[2], weights[3]]);
                let a = [near, near_rest, far, far_rest];
                each_of_four!(r => {
                    let [one, two, three, four] = held;
                    sums[2 * r] = warp::mma(a, [low_halves(one[r], two[r]), low_halves(three[r], four[r])], sums[2 * r]);
                    sums[2 * r + 1] =
                        warp::mma(a, [high_halves(one[r], two[r]), high_halves(three[r], four[r])], sums[2 * r + 1]);
                });
                if d > 64 {
                    each_of_four!(r => {
                        let [one, two, three, four] = more;
                        sums[2 * r + 8] =
                            warp::mma(a, [low_halves(one[r], two[r]), low_halves(three[r], four[r])], sums[2 * r + 8]);
                        sums[2 * r + 9] =
                            warp::mma(a, [high_halves(one[r], two[r]), high_halves(three[r], four[r])], sums[2 * r + 9]);
                    });
                }
                at += UNIT * parts;
            }
            total += f32::from_bits(warp::shuffle_xor(total.to_bits(), 1));
            total += f32::from_bits(warp::shuffle_xor(total.to_bits(), 2));
            if g >= queries {
                return;
            }
            let to = to + g * (d + MORE);
            for chunk in 0..2 {
                for side in 0..2 {
                    let i = 64 * chunk + 16 * t + 8 * side;
                    if i < d {
                        let sum = |j: u32| {
                            let sum = sums[(8 * chunk + j) as usize];
                            (sum[side as usize] + sum[side as usize + 2]).to_bits()
                        };
                        shared::store16(to + MORE + i, [sum(0), sum(1), sum(2), sum(3)]);
                        shared::store16(to + MORE + i + 4, [sum(4), sum(5), sum(6), sum(7)]);
                    }
                }
            }
            if t == 0 {
                shared::store16(to, [max.to_bits(), total.to_bits(), 0, 0]);
            }
        }
    }
}
