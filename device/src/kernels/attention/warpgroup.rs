//! Attention of many rows of queries by a warpgroup, keys and values by blocks (Dao et al. 2022; of registers that multiply, Shah et al. 2024).
//!
//! ```text
//! tiles     [ queries: 64 rows | keys: 64, values: 64 | ... ]  six stages of keys and values, all of bf16, swizzled as the tensor cores want them
//! warps     0 to 3, a warpgroup: 64 rows of queries, which have scores, sums of values and what follows from them in registers
//!           the others: copy the stage four blocks ahead, sixteen bytes a time
//! ```
//! A matrix there has 64 columns: heads of more have two. Queries are scaled and rounded as they come, weights (exp2 of a score less the row's largest so far) are
//! rounded as they are multiplied with values, which are read as they lie, transposed; sums, and the weights' total, are f32.
//!
//! A block of 64 positions: who copies waits for this block's copies, fences them for the tensor cores, all meet, and copies of the block four on begin. The
//! warpgroup begins the scores, waits for them and for what values of the block before add up to, which is scaled to the new largest score, and begins to add
//! this block's values. So whoever has met in block i knows that the products of block i - 2 are done, whose stage the copies of block i + 4 take.
//!
//! Floor of a block: 4 * 64 * 64 * d flops at an SM's 7.5 TFLOP/s, 0.28 us at 128 dimensions, and 64 * 64 exponentials at 16 a cycle and SM, 0.14 us.

use super::gpu::Head;
use super::*;
use crate::arch::copy;
use crate::arch::scalar::{exp2, f32_to_bf16_pair, reciprocal};
use crate::arch::warpgroup::{self, Matrix, Sums, Transposed, place};
use crate::arch::{bulk, each_of_four, warp};
use crate::gpu::Row;
use crate::gpu::math::larger;
use crate::gpu::tile::{Rows, eights_at, where_in_window, window_from, within};
use crate::gpu::warpgroup::{Columns, Copier, MULTIPLYING, Rows as Lying, THREADS};

/// Rows of queries, and positions of a block.
const ROWS: u32 = warpgroup::M;
const BLOCK: u32 = 64;

/// Bytes of a matrix of 64 rows of 64 columns.
const MATRIX: u32 = 64 * warpgroup::ROW;

/// Stages, and how many blocks ahead copies begin.
const STAGES: u32 = 6;
const AHEAD: u32 = STAGES - 2;

const _: () = assert!(2 * MATRIX * (1 + 2 * STAGES) <= perpetua_shared::launch::TILE_BYTES);

/// Where stage `stage`, of heads of `W` matrices, has its keys; its values are as many matrices later.
const fn stage_at<const W: usize>(stage: u32) -> u32 {
    (1 + 2 * stage) * W as u32 * MATRIX
}

/// `$step` for each of a thread's `$n` sums, 32 or 64, written out: those of `$group`, of eight columns, are two neighbours of row g and, `$i` being 2 or 3, of row
/// g + 8. (A loop around a convergent call is never unrolled, and registers have no number at run time.)
macro_rules! of_groups {
    ($n:tt: $group:ident, $i:ident => $step:expr) => {
        each_of_four!(high => {
            if 16 * high < $n {
                each_of_four!(low => {
                    let $group: usize = 4 * high + low;
                    each_of_four!($i => {
                        let $i: usize = $i;
                        $step;
                    });
                });
            }
        });
    };
}

/// What the four lanes that share two rows make of theirs, the same bits in each, since `f` commutes.
///
/// # Safety
/// Every lane of the warp makes this same call.
unsafe fn across(of: [f32; 2], f: impl Fn(f32, f32) -> f32) -> [f32; 2] {
    let other = |x: f32, mask: u32| {
        // SAFETY: every lane of the warp is here (caller).
        f32::from_bits(unsafe { warp::shuffle_xor(x.to_bits(), mask) })
    };
    let [a, b] = [f(of[0], other(of[0], 1)), f(of[1], other(of[1], 1))];
    [f(a, other(a, 2)), f(b, other(b, 2))]
}

/// A key/value head's queries, and what they see.
pub(super) struct Queries<'a, Q, Y, S> {
    pub(super) q: &'a Rows<Q>,
    pub(super) y: &'a Rows<Y>,
    /// How many positions, from the first on, a row sees, and how many of them, the last ones.
    pub(super) seen: S,
    pub(super) window: u32,
    /// Keys and values, and their positions.
    pub(super) k: Head,
    pub(super) v: Head,
    pub(super) positions: u32,
    pub(super) d: u32,
    /// What scores are multiplied by, as powers of two.
    pub(super) scale: f32,
}

impl<Q: Fn(u32) -> Row, Y: Fn(u32) -> Row, S: Fn(u32) -> u32> Queries<'_, Q, Y, S> {
    /// y = softmax(scale * q . k^T) . v, base 2, over the positions that each row sees, of heads of at most `64 W` dimensions; `N` is `32 W`.
    ///
    /// # Safety
    /// Every thread of the block makes this same call, a block that [has room](crate::gpu::warpgroup::has_room); the operands are there, nobody else writes them,
    /// nobody else touches `y`. The tiles' memory is nobody's.
    pub(super) unsafe fn attend<const W: usize, const N: usize>(&self, block: &Block) {
        const { assert!(N == 32 * W && (W == 1 || W == 2)) };
        let mut first = 0;
        while first < self.y.count {
            let last = (first + ROWS).min(self.y.count) - 1;
            let from = window_from((self.seen)(first), self.window, BLOCK);
            let end = within(&self.seen, self.positions)(last);
            let steps = (end.saturating_sub(from)).div_ceil(BLOCK);
            // SAFETY: the caller's promises; all threads have the same numbers.
            unsafe {
                if block.warp() < MULTIPLYING {
                    self.multiply::<W, N>(block, first, [from, steps]);
                } else {
                    self.copy::<W>(block, [from, end], steps);
                }
                // The queries' place is the next ones', and the stages are whoever's comes next.
                copy::fence_tiles();
                block.sync();
            }
            first += ROWS;
        }
    }

    /// What a thread that copies does, of positions `from` to `end`.
    unsafe fn copy<const W: usize>(&self, block: &Block, [from, end]: [u32; 2], steps: u32) {
        let (by, mut step, mut stage) = (Copier::of(block), 0, 0);
        let own = |head: &Head, at: u32| {
            by.own(Lying { from: head.row(at).start(), apart: head.bytes_apart(), count: end - at })
        };
        // SAFETY: rows of the cache; a stage is copied to once all have met after the last product of what it had.
        unsafe {
            while step < AHEAD + steps {
                if step >= AHEAD {
                    copy::wait::<{ AHEAD - 1 }>();
                    copy::fence_tiles();
                    block.sync();
                }
                if step < steps {
                    let at = from + step * BLOCK;
                    let begin = |head: &Head, mut to: u32| {
                        let (rows, mut first) = (own(head, at), 0);
                        while first < 64 * W as u32 {
                            by.rows(&rows, Columns { first, k: self.d, is_new: step < STAGES }, to, BLOCK);
                            (first, to) = (first + 64, to + MATRIX);
                        }
                    };
                    let keys = stage_at::<W>(stage);
                    begin(&self.k, keys);
                    begin(&self.v, keys + W as u32 * MATRIX);
                }
                copy::commit();
                stage = if stage + 1 < STAGES { stage + 1 } else { 0 };
                step += 1;
            }
            copy::wait::<0>();
        }
    }

    /// Brings rows of queries from `first` on to the tiles: scaled, as bf16, zero where there are none.
    unsafe fn bring<const W: usize>(&self, block: &Block, first: u32) {
        let chunks = 8 * W as u32;
        let mut unit = block.thread;
        while unit < ROWS * chunks {
            // Four at a time, each of eight elements.
            let units = [unit, unit + THREADS, unit + 2 * THREADS, unit + 3 * THREADS];
            // SAFETY: the rows' (caller); the words are this thread's.
            unsafe {
                let eights = eights_at(self.q, units.map(|unit| (first + unit / chunks, unit % chunks * 8)));
                for i in 0..4 {
                    let [a, b, c, d, e, f, g, h] = eights[i].map(|x| x * self.scale);
                    let pair = f32_to_bf16_pair;
                    let (row, chunk) = (units[i] / chunks, units[i] % chunks);
                    let to = chunk / 8 * MATRIX + place(row, chunk % 8);
                    bulk::store16(to, [pair(a, b), pair(c, d), pair(e, f), pair(g, h)]);
                }
            }
            unit += 4 * THREADS;
        }
        copy::fence_tiles();
    }

    /// What a thread of the warpgroup does.
    unsafe fn multiply<const W: usize, const N: usize>(&self, block: &Block, first: u32, [from, steps]: [u32; 2]) {
        let (warp, lane) = (block.warp(), block.lane());
        let (g, t) = (lane / 4, lane % 4);
        let rows = [first + 16 * warp + g, first + 16 * warp + g + 8];
        // A row that is not there sees what the last one does.
        let seen = |row: u32| (self.seen)(row.min(self.y.count - 1));
        let seen_by = rows.map(seen);
        // Positions that all of the warp's rows see.
        let of_all = (seen(first + 16 * warp), seen(first + 16 * warp + 15));
        let (all_from, all_end) = (of_all.1.saturating_sub(self.window), of_all.0.min(self.positions));
        // SAFETY: the caller's promises; matrices are read once all have met after they were written, fenced.
        unsafe {
            self.bring::<W>(block, first);
            let mut sums = [0.0; N];
            let (mut max, mut total) = ([-1e30; 2], [0.0; 2]);
            let (mut step, mut stage) = (0, 0);
            let mut adding = Sums::<N>::of(sums);
            while step < steps {
                block.sync();
                let keys = stage_at::<W>(stage);
                let values = keys + W as u32 * MATRIX;
                let mut scores = Sums::<32>::zero();
                warpgroup::begin();
                each_of_four!(at => scores.add(Matrix::at(0).step(at), Matrix::at(keys).step(at)));
                if W == 2 {
                    each_of_four!(at => scores.add(Matrix::at(MATRIX).step(at), Matrix::at(keys + MATRIX).step(at)));
                }
                warpgroup::commit();
                let mut scores = scores.take();
                sums = adding.take();

                let at = from + step * BLOCK;
                if at < all_from || at + BLOCK > all_end {
                    of_groups!(32: group, i => {
                        let column = at + 8 * group as u32 + 2 * t + i as u32 % 2;
                        let (of, seen) = (4 * group + i, seen_by[i / 2]);
                        scores[of] = where_in_window(column, seen, self.window, self.positions, scores[of]);
                    });
                }
                let mut new = max;
                of_groups!(32: group, i => new[i / 2] = larger(new[i / 2], scores[4 * group + i]));
                new = across(new, larger);
                let factor = [exp2(max[0] - new[0]), exp2(max[1] - new[1])];
                (max, total) = (new, [total[0] * factor[0], total[1] * factor[1]]);
                of_groups!(32: group, i => {
                    let of = 4 * group + i;
                    scores[of] = exp2(scores[of] - max[i / 2]);
                    total[i / 2] += scores[of];
                });
                of_groups!(N: group, i => sums[4 * group + i] *= factor[i / 2]);
                adding = Sums::of(sums);
                let of_values = Transposed::at(values, MATRIX);
                warpgroup::begin();
                each_of_four!(at => {
                    let of = |i: usize| f32_to_bf16_pair(scores[8 * at as usize + i], scores[8 * at as usize + i + 1]);
                    adding.add_transposed([of(0), of(2), of(4), of(6)], of_values.step(at));
                });
                warpgroup::commit();
                stage = if stage + 1 < STAGES { stage + 1 } else { 0 };
                step += 1;
            }
            sums = adding.take();
            total = across(total, |a, b| a + b);
            let factor = [reciprocal(total[0]), reciprocal(total[1])];
            let of = rows.map(|row| (self.y.row)(row.min(self.y.count - 1)));
            of_groups!(N: group, i => {
                let (half, column) = (i / 2, 8 * group as u32 + 2 * t);
                if i % 2 == 0 && column < self.d && rows[half] < self.y.count {
                    let at = 4 * group + i;
                    of[half].set_two(column, [sums[at] * factor[half], sums[at + 1] * factor[half]]);
                }
            });
        }
    }
}
