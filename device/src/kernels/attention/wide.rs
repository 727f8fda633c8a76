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

/// Whether there is room for `queries` queries of `d` dimensions, and the weights of a unit; of several, warps share the
/// scores, too.
pub(super) fn has_room(queries: u32, d: u32) -> bool {
    weights_at(queries, d) + UNIT * queries <= FOUND
}

/// The sums of a chunk: of eight dimensions a lane's two columns, hi and lo.
type Chunk = [[f32; 4]; 8];

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
                        for n in 0..8 {
                            for i in 0..4 {
                                sums[n][i] *= shrink;
                                more[n][i] *= shrink;
                            }
                        }
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
                            self.add(a, (from, end), CHUNK * chunk, lane, &mut sums);
                        }
                        if CHUNK * second < d {
                            self.add(a, (from, end), CHUNK * second, lane, &mut more);
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
                    let put = |at: u32, of: &Chunk| {
                        for side in 0..2 {
                            let i = at + 16 * t + 8 * side as u32;
                            if i < d {
                                let sum = |j: usize| of[j][side] + of[j][side + 2];
                                let found = |sums| Sums { max, total: all, sums };
                                put(&to, i, found([sum(0), sum(1), sum(2), sum(3)]));
                                put(&to, i + 4, found([sum(4), sum(5), sum(6), sum(7)]));
                            }
                        }
                    };
                    put(CHUNK * chunk, &sums);
                    put(CHUNK * (chunk + block.warps()), &more);
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
                let mut add = |at: u32, [one, other]: [[u32; 4]; 2]| {
                    let (even, odd) = (shared::load16(query_at + at), shared::load16(query_at + at + 4));
                    scores[0][0] = warp::mma(even, [one[0], one[1]], scores[0][0]);
                    scores[1][0] = warp::mma(even, [other[0], other[1]], scores[1][0]);
                    scores[0][1] = warp::mma(odd, [one[2], one[3]], scores[0][1]);
                    scores[1][1] = warp::mma(odd, [other[2], other[3]], scores[1][1]);
                };
                each_of_four!(c => if first + 32 * (c as u32) < d {
                    add(first + 32 * c as u32, near[c]);
                });
                each_of_four!(c => if first + 128 + 32 * (c as u32) < d {
                    add(first + 128 + 32 * c as u32, far[c]);
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

    /// Adds to `sums` the dimensions from `chunk` on of the values of the unit that begins at `from`, by weights `a`.
    ///
    /// # Safety
    /// Every lane of the warp makes this same call, `from` being below `end`; see [`attend`](Group::attend).
    #[inline(always)]
    unsafe fn add(&self, a: [u32; 4], (from, end): (u32, u32), chunk: u32, lane: u32, sums: &mut Chunk) {
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
    }
}
