//! [`Group`](super::group) for heads of more dimensions than a warp holds the sums of: Gemma's of 256 and 512, and
//! latents.
//!
//! ```text
//! shared    [ queries, as a group's | weights: of each query 16 words for 16 positions, as A wants them | maxima or totals ]
//! scores    a warp takes 16 positions of a round, and all of their dimensions
//! values    a warp takes 64 dimensions, or twice as many, and all positions of the round
//! ```
//! So no sum is anybody else's, and what warps tell each other are a round's maxima, before its weights, and these. The
//! products are those of a group: queries and weights are hi + lo.
//!
//! Floor of a task: its keys and values, from L2; scores wait for 256 dimensions at a time.

use super::group::{Group, STAGE, Seen, Sums, pitch};
use crate::arch::scalar::{exp2, high_halves, low_halves};
use crate::arch::{each_of_four, memory, shared, warp};
use crate::block::Block;
use crate::gpu::math::larger;
use crate::gpu::thin::in_two;
use core::f32::consts::LOG2_E;
use perpetua_shared::launch::TASK_THREADS;

/// Positions that a warp takes at a time.
const UNIT: u32 = 16;

/// Dimensions of a chunk, of which a warp has the sums of two.
const CHUNK: u32 = 64;

/// Where the maxima stand, and then the totals: of each warp eight queries'.
const FOUND: u32 = shared::KEPT - 8 * (TASK_THREADS / 32);

/// Where weights begin.
fn weights_at(queries: u32, d: u32) -> u32 {
    STAGE + queries * pitch(d)
}

/// Whether there is room for `queries` queries of `d` dimensions, and the weights of a unit; of several, warps share
/// the scores, too.
pub(super) fn has_room(queries: u32, d: u32) -> bool {
    weights_at(queries, d) + UNIT * queries <= FOUND
}

/// Whether there is room for the weights of so many units that most warps find scores at once.
pub(super) fn is_roomy(queries: u32, d: u32) -> bool {
    weights_at(queries, d) + 4 * UNIT * queries <= FOUND
}

/// The sums of a chunk: of eight dimensions a lane's two columns, hi and lo.
type Chunk = [[f32; 4]; 8];

/// `chunk`, of all of which `factor` times as much is left. (Functions, and whole chunks: what a closure that is called
/// in two places refers to would be in memory.)
#[inline(always)]
fn scaled(chunk: Chunk, factor: f32) -> Chunk {
    chunk.map(|four| four.map(|sum| sum * factor))
}

/// Gives `put` a lane's dimensions of `chunk`, of those below `d` eight from `at` on, and eight behind these.
#[inline(always)]
fn put_chunk((at, d): (u32, u32), chunk: Chunk, put: &impl Fn(u32, [f32; 4])) {
    // Of a lane's two columns, each hi and lo.
    let sides = [chunk.map(|[one, _, rest, _]| one + rest), chunk.map(|[_, one, _, rest]| one + rest)];
    let [[a, b, c, e, f, g, h, j], others] = sides;
    if at < d {
        put(at, [a, b, c, e]);
        put(at + 4, [f, g, h, j]);
    }
    let [a, b, c, e, f, g, h, j] = others;
    if at + 8 < d {
        put(at + 8, [a, b, c, e]);
        put(at + 12, [f, g, h, j]);
    }
}

/// `scores`, two tiles' of even and of odd eights, and 32 dimensions more, those of the query from word `at` on, by
/// `keys`.
///
/// # Safety
/// Every lane of the warp makes this same call; the words have been written before a barrier.
#[inline(always)]
unsafe fn multiplied(at: u32, [one, other]: [[u32; 4]; 2], scores: [[[f32; 4]; 2]; 2]) -> [[[f32; 4]; 2]; 2] {
    // SAFETY: the caller's promises.
    unsafe {
        let (even, odd) = (shared::load16(at), shared::load16(at + 4));
        let [[a, b], [c, d]] = scores;
        [
            [warp::mma(even, [one[0], one[1]], a), warp::mma(odd, [one[2], one[3]], b)],
            [warp::mma(even, [other[0], other[1]], c), warp::mma(odd, [other[2], other[3]], d)],
        ]
    }
}

impl Group {
    /// As [`attend`](Group::attend), of more than 128 dimensions.
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn attend_widely<To>(
        &self,
        (first, end): (u32, u32),
        seen: &impl Seen,
        block: &Block,
        to: impl Fn(u32) -> To,
        put: impl Fn(&To, u32, Sums),
    ) {
        let (queries, d) = (self.queries, self.d);
        let weights = weights_at(queries, d);
        // As many units as are there, and have room; counted, since a division takes longer.
        let mut parts = 1;
        for more in 1..TASK_THREADS / 32 {
            let has_room = weights + (more + 1) * UNIT * queries <= FOUND;
            parts += u32::from(more < block.warps() && has_room);
        }
        let (lane, number) = (block.lane(), block.warp());
        let (g, t) = (lane / 4, lane % 4);
        let query = if g < queries { g } else { queries - 1 };
        let query_at = STAGE + query * pitch(d) + 8 * t;
        let seen = seen.by(query);
        let mut chunk = number;
        // SAFETY: the caller's promises: positions are clamped to the last, so rows are the cache's, and dimensions are
        // below d; the queries have been staged. Conditions around barriers are the same for all threads, those around
        // what lanes do together for all of a warp's. Maxima and weights are written by their warp before a barrier and
        // read between that and the next one.
        unsafe {
            let mut begun = 0;
            loop {
                let (mut max, mut total) = (f32::NEG_INFINITY, 0.0);
                let (mut sums, mut more): (Chunk, Chunk) = ([[0.0; 4]; 8], [[0.0; 4]; 8]);
                let mut at = first;
                while at < end {
                    let left = (end - at).div_ceil(UNIT);
                    let here = if left < parts { left } else { parts };
                    let own = at + UNIT * number;
                    let mut scores = [f32::NEG_INFINITY; 4];
                    if number < here {
                        scores = self.scores((own, end), query_at, lane);
                    }
                    let is_there = |i: usize| {
                        let at = own + 8 * (i as u32 / 2) + 2 * t + i as u32 % 2;
                        number < here && at < end && seen.is_none_or(|(first, end)| first <= at && at < end)
                    };
                    each_of_four!(i => if !is_there(i) {
                        scores[i] = f32::NEG_INFINITY;
                    });
                    let mut largest = larger(larger(scores[0], scores[1]), larger(scores[2], scores[3]));
                    largest = larger(largest, f32::from_bits(warp::shuffle_xor(largest.to_bits(), 1)));
                    largest = larger(largest, f32::from_bits(warp::shuffle_xor(largest.to_bits(), 2)));
                    if t == 0 {
                        shared::store(FOUND + 8 * number + g, largest.to_bits());
                    }
                    block.sync();
                    let mut largest = max;
                    let mut other = 0;
                    while other < here {
                        largest = larger(largest, f32::from_bits(shared::load(FOUND + 8 * other + g)));
                        other += 1;
                    }
                    if largest > max {
                        let shrink = exp2((max - largest) * LOG2_E);
                        total *= shrink;
                        (sums, more) = (scaled(sums, shrink), scaled(more, shrink));
                    }
                    max = largest;
                    // Who has seen none yet has no maximum, either.
                    let weight = |i: usize| {
                        let weight = exp2((scores[i] - max) * LOG2_E);
                        if seen.is_none() || is_there(i) { weight } else { 0.0 }
                    };
                    if number < here {
                        let found = [weight(0), weight(1), weight(2), weight(3)];
                        total += (found[0] + found[1]) + (found[2] + found[3]);
                        if g < queries {
                            let [near, near_rest] = in_two([found[0], found[1]]);
                            let [far, far_rest] = in_two([found[2], found[3]]);
                            let to = weights + (g * parts + number) * UNIT + 4 * t;
                            shared::store16(to, [near, near_rest, far, far_rest]);
                        }
                    }
                    block.sync();
                    let mut unit = 0;
                    while unit < here {
                        let a = shared::load16(weights + (query * parts + unit) * UNIT + 4 * t);
                        let (from, second) = (at + UNIT * unit, chunk + block.warps());
                        if CHUNK * chunk < d {
                            sums = self.add(a, (from, end), CHUNK * chunk, lane, sums);
                        }
                        if CHUNK * second < d {
                            more = self.add(a, (from, end), CHUNK * second, lane, more);
                        }
                        unit += 1;
                    }
                    at += UNIT * here;
                }
                total += f32::from_bits(warp::shuffle_xor(total.to_bits(), 1));
                total += f32::from_bits(warp::shuffle_xor(total.to_bits(), 2));
                // Whoever reads maxima has done so before the last barrier.
                if t == 0 {
                    shared::store(FOUND + 8 * number + g, total.to_bits());
                }
                block.sync();
                let (mut all, mut other) = (0.0, 0);
                while other < block.warps() {
                    all += f32::from_bits(shared::load(FOUND + 8 * other + g));
                    other += 1;
                }
                if g < queries {
                    let to = to(g);
                    let put = |i: u32, sums: [f32; 4]| put(&to, i, Sums { max, total: all, sums });
                    put_chunk((CHUNK * chunk + 16 * t, d), sums, &put);
                    put_chunk((CHUNK * (chunk + block.warps()) + 16 * t, d), more, &put);
                }
                // More than all warps have: their scores once more.
                begun += 2 * block.warps() * CHUNK;
                if begun >= d {
                    return;
                }
                block.sync();
                chunk += 2 * block.warps();
            }
        }
    }

    /// The scores of a lane's query at its positions of the unit that begins at `own`: 2 t, 2 t + 1, and those eight
    /// further on.
    ///
    /// # Safety
    /// Every lane of the warp makes this same call, `own` being below `end`; see [`attend`](Group::attend).
    #[inline(always)]
    unsafe fn scores(&self, (own, end): (u32, u32), query_at: u32, lane: u32) -> [f32; 4] {
        let (g, t, d) = (lane / 4, lane % 4, self.d);
        let row = |i: u32| {
            let at = if own + i < end { own + i } else { end - 1 };
            self.k.row(at).at(8 * t)
        };
        let keys = [row(g), row(g + 8)];
        let mut scores = [[[0f32; 4]; 2]; 2];
        let mut first = 0;
        // SAFETY: the caller's promises; dimensions are below d, a multiple of 32.
        unsafe {
            while first < d {
                // Memory answers long after it is asked.
                let (mut near, mut far) = ([[[0; 4]; 2]; 4], [[[0; 4]; 2]; 4]);
                each_of_four!(c => if first + 32 * (c as u32) < d {
                    let at = 2 * (first as usize + 32 * c);
                    near[c] = [memory::load16(keys[0].wrapping_add(at)), memory::load16(keys[1].wrapping_add(at))];
                });
                each_of_four!(c => if first + 128 + 32 * (c as u32) < d {
                    let at = 2 * (first as usize + 128 + 32 * c);
                    far[c] = [memory::load16(keys[0].wrapping_add(at)), memory::load16(keys[1].wrapping_add(at))];
                });
                each_of_four!(c => if first + 32 * (c as u32) < d {
                    scores = multiplied(query_at + first + 32 * c as u32, near[c], scores);
                });
                each_of_four!(c => if first + 128 + 32 * (c as u32) < d {
                    scores = multiplied(query_at + first + 128 + 32 * c as u32, far[c], scores);
                });
                first += 256;
            }
        }
        let score = |tile: usize, i: usize| {
            let [even, odd] = scores[tile];
            ((even[i] + odd[i]) + (even[i + 2] + odd[i + 2])) * self.scale
        };
        [score(0, 0), score(0, 1), score(1, 0), score(1, 1)]
    }

    /// `sums` and the dimensions from `chunk` on of the values of the unit that begins at `from`, by weights `a`.
    ///
    /// # Safety
    /// Every lane of the warp makes this same call, `from` being below `end`; see [`attend`](Group::attend).
    #[inline(always)]
    unsafe fn add(&self, a: [u32; 4], (from, end): (u32, u32), chunk: u32, lane: u32, mut sums: Chunk) -> Chunk {
        let (g, t, d) = (lane / 4, lane % 4, self.d);
        // Columns beyond the last dimensions are those again, and nobody looks at what comes of them.
        let i = if chunk + 8 * g < d { chunk + 8 * g } else { d - 8 };
        let row = |i_of: u32| {
            let at = if from + i_of < end { from + i_of } else { end - 1 };
            self.v.row(at).at(i)
        };
        // SAFETY: the caller's promises.
        unsafe {
            let one = memory::load16(row(2 * t));
            let two = memory::load16(row(2 * t + 1));
            let three = memory::load16(row(2 * t + 8));
            let four = memory::load16(row(2 * t + 9));
            each_of_four!(r => {
                let low = [low_halves(one[r], two[r]), low_halves(three[r], four[r])];
                let high = [high_halves(one[r], two[r]), high_halves(three[r], four[r])];
                sums[2 * r] = warp::mma(a, low, sums[2 * r]);
                sums[2 * r + 1] = warp::mma(a, high, sums[2 * r + 1]);
            });
        }
        sums
    }
}
