//! Attention of many rows of queries by a warpgroup, keys and values by blocks (Dao et al. 2022; of registers that
//! multiply, Shah et al. 2024).
//!
//! ```text
//! tiles     [ queries: 64 rows | keys: 64, values: 64 | ... ]  six stages of keys and values, all of bf16, swizzled as the tensor cores want them
//! warps     0 to 3, a warpgroup: 64 rows of queries, which have scores, sums of values and what follows from them in registers
//!           the others: copy the stage three blocks ahead, sixteen bytes a time
//! ```
//! A matrix there has 64 columns, and each has two, of zeros where heads have fewer. (Another body for these would be
//! faster, but the registers of its products would be others, and a worker would have too few.) Queries are scaled and
//! rounded as they come, weights (exp2 of a score less the row's largest so far) are rounded as they are multiplied
//! with values, which are read as they lie, transposed; sums, and the weights' total, are f32.
//!
//! A block of 64 positions: who copies waits for the next block's copies, fences them for the tensor cores, all meet,
//! and copies of the block three after it begin. The warpgroup begins the next block's scores; while the tensor cores
//! make these, and what the values of the block before add up to, it finds this block's weights; then sums are scaled
//! to the new largest score, and this block's values begin to be added. So whoever has met for block i knows that the
//! products with values of block i - 3 are done, whose stage the copies of block i + 3 take.
//!
//! Floor of a block: 4 * 64 * 64 * d flops at an SM's 7.5 TFLOP/s, 0.28 us at 128 dimensions, and 64 * 64 exponentials
//! at 16 a cycle and SM, 0.14 us.

use super::gpu::{Head, quotient, sink};
use super::*;
use crate::arch::copy;
use crate::arch::scalar::{exp2, f32_to_bf16_pair, reciprocal};
use crate::arch::warpgroup::{self, Matrix, Sums, Transposed, place};
use crate::arch::{bulk, each_of_four, memory, warp};
use crate::gpu::tile::{Rows, eights_at, where_in_window, window_from};
use crate::gpu::warpgroup::{Copier, MULTIPLYING, THREADS, has_room};
use crate::gpu::{BF16, Call, F32, Row, Tensor};
use core::f32::consts::LOG2_E;

/// Rows of queries, and positions of a block.
const ROWS: u32 = warpgroup::M;
const BLOCK: u32 = 64;

/// Bytes of a matrix of 64 rows of 64 columns.
const MATRIX: u32 = 64 * warpgroup::ROW;

/// Stages, and how many blocks ahead copies begin.
const STAGES: u32 = 6;
const AHEAD: u32 = STAGES - 3;

const _: () = assert!(2 * MATRIX * (1 + 2 * STAGES) <= perpetua_shared::launch::TILE_BYTES);

/// Where stage `stage` has its keys; its values are two matrices later.
const fn stage_at(stage: u32) -> u32 {
    (2 + 4 * stage) * MATRIX
}

/// `$step` for each of a thread's `$n` sums, 32 or 64, written out: those of `$group`, of eight columns, are two
/// neighbours of row g and, `$i` being 2 or 3, of row g + 8. (A loop around a convergent call is never unrolled, and
/// registers have no number at run time.)
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

/// Whether [`attend`] is for this call, whose keys and values are bf16.
///
/// # Safety
/// The operands are [`Attention`]'s.
pub(super) unsafe fn is_for(p: &Params, call: &Call<'_>, block: &Block) -> bool {
    // SAFETY: the caller's promise.
    let y = unsafe { call.tensor(slot::Y) }.dtype();
    p.is_beside_tiles == 0 && (y == BF16 || y == F32) && has_room(call, block)
}

/// Attends to all heads of the call.
///
/// # Safety
/// Every thread of the block makes this same call, and [`is_for`] is so; the operands are [`Attention`]'s, with rows of
/// whole eights that begin on sixteen bytes, and at most 128 dimensions.
pub(super) unsafe fn attend(p: &Params, call: &Call<'_>, block: &Block) {
    // SAFETY: the caller's promises.
    unsafe {
        let (heads, mut head) = (call.tensor(slot::Q).extent(1), 0);
        while head < heads {
            let q = call.tensor(memory::opaque_word(slot::Q as u32) as usize);
            let all = call.first_pos() + call.pass_rows();
            let share = if p.splits > 1 { p.share(all, call.block::<1>()) } else { (0, all) };
            Queries { p, call, head, count: call.rows(&q) * q.extent(2), d: q.extent(3), share: share.into() }
                .attend(block);
            head += 1;
        }
    }
}

/// A key/value head's queries. What follows from the operands is found where it is wanted: over the loops there are no
/// registers for it.
struct Queries<'a> {
    p: &'a Params,
    call: &'a Call<'a>,
    head: u32,
    /// Rows: of the group's query heads.
    count: u32,
    d: u32,
    /// Of the positions, those of the pass or the split's.
    share: [u32; 2],
}

impl Queries<'_> {
    /// An operand, of which the compiler knows nothing before.
    fn operand(&self, operand: usize) -> Tensor {
        // SAFETY: it is there (`attend`'s caller).
        unsafe { self.call.tensor(memory::opaque_word(operand as u32) as usize) }
    }

    /// How many query heads share the key/value head, and what a number is multiplied by to be divided by it.
    fn group(&self) -> (u32, f32) {
        let group = self.operand(slot::Q).extent(2);
        (group, reciprocal(group as f32))
    }

    /// Which of the pass's rows, and of the group, row `m` is, or the last one.
    fn row_of(&self, m: u32, (group, part): (u32, f32)) -> [u32; 2] {
        let m = m.min(self.count - 1);
        // SAFETY: a group has heads.
        let r = unsafe { quotient(m, group, part) };
        [r, m - r * group]
    }

    /// How many positions, from the first on and as if there were no end of them, row `m` sees, or the last one; of
    /// them the last [`window`](Queries::window).
    fn seen(&self, m: u32, group: (u32, f32)) -> u32 {
        self.call.first_pos() + self.call.row_first() + self.row_of(m, group)[0] + 1 + self.p.ahead
    }

    /// The sink of row `m`, or the last one, as scores are here; -inf where it has none.
    fn sink(&self, m: u32, group: (u32, f32)) -> f32 {
        let at = [self.head, self.row_of(m, group)[1]];
        // SAFETY: the operand is such (`attend`'s caller).
        LOG2_E * unsafe { sink(self.p.splits, self.call, memory::opaque_word(slot::SINKS as u32) as usize, at) }
    }

    fn window(&self) -> u32 {
        self.p.window + self.p.ahead
    }

    /// y = softmax(scale * q . k^T) . v over the positions that each row sees.
    ///
    /// # Safety
    /// As [`attend`].
    unsafe fn attend(&self, block: &Block) {
        let mut first = 0;
        while first < self.count {
            let group = self.group();
            let from = window_from(self.seen(first, group), self.window(), BLOCK).max(self.share[0]);
            let end = self.seen(first + ROWS - 1, group).min(self.share[1]).max(from);
            // A share without positions is a block of none.
            let steps = (end - from).div_ceil(BLOCK).max(1);
            // SAFETY: the caller's promise; all threads have the same numbers.
            unsafe {
                if block.warp() < MULTIPLYING {
                    self.multiply(block, first, [from, steps]);
                } else {
                    self.copy(block, [from, end], steps);
                }
                // The queries' place is the next ones', and the stages are whoever's comes next.
                copy::fence_tiles();
                block.sync();
            }
            first += ROWS;
        }
    }

    /// What a thread that copies does, of positions `from` to `end`.
    ///
    /// PERF: whoever copies has a row's four pieces at a time, of keys and values and of both halves of their columns,
    /// from one choice of the row: a block is no more than six rounds. With a matrix after the other it took longer
    /// than the tensor cores' products.
    unsafe fn copy(&self, block: &Block, [from, end]: [u32; 2], steps: u32) {
        let Copier { row: first_row, chunk, apart } = Copier::of(block);
        let [k, v] = [slot::K, slot::V].map(|operand| Head::new(&self.operand(operand), self.head));
        let own = |head: &Head| head.row(from).start().wrapping_add(16 * chunk as usize);
        let (mut k_at, mut v_at) = (own(&k), own(&v));
        let (first_half, second_half) = (8 * chunk < self.d, 64 + 8 * chunk < self.d);
        // Neighbours of eight rows lie in turn, and the thread's next row is a multiple of four later.
        let turned = apart % 8 / 4 * 64;
        let (mut step, mut stage) = (0, 0);
        // SAFETY: rows of the cache; a stage is copied to once all have met after the last product of what it had.
        unsafe {
            while step < AHEAD + steps {
                if step >= AHEAD {
                    copy::wait::<{ AHEAD - 1 }>();
                    copy::fence_tiles();
                    block.sync();
                }
                if step < steps {
                    let left = end - from - step * BLOCK;
                    // Behind the last position is that one again, which nobody sees.
                    let (is_there, last) = (left > 0, left.saturating_sub(1));
                    let (mut row, mut to) = (first_row, stage_at(stage) + place(first_row, chunk));
                    while row < BLOCK {
                        let of = |at: *const u8, head: &Head| {
                            at.wrapping_add((u64::from(row.min(last)) * head.bytes_apart() as u64) as usize)
                        };
                        let (k_from, v_from) = (of(k_at, &k), of(v_at, &v));
                        copy::sixteen(to, k_from, is_there & first_half);
                        copy::sixteen(to + MATRIX, k_from.wrapping_add(128), is_there & second_half);
                        copy::sixteen(to + 2 * MATRIX, v_from, is_there & first_half);
                        copy::sixteen(to + 3 * MATRIX, v_from.wrapping_add(128), is_there & second_half);
                        (row, to) = (row + apart, (to ^ turned) + apart * warpgroup::ROW);
                    }
                    let block_of = |head: &Head| BLOCK as usize * head.bytes_apart();
                    (k_at, v_at) = (k_at.wrapping_add(block_of(&k)), v_at.wrapping_add(block_of(&v)));
                }
                copy::commit();
                stage = if stage + 1 < STAGES { stage + 1 } else { 0 };
                step += 1;
            }
            copy::wait::<0>();
        }
    }

    /// Brings rows of queries from `first` on to the tiles: scaled, as bf16, zero where there are none.
    unsafe fn bring(&self, block: &Block, first: u32) {
        let (chunks, scale) = (16, self.p.scale * LOG2_E);
        let (q, group) = (self.operand(slot::Q), self.group());
        let row = |m: u32| {
            let [r, g] = self.row_of(m, group);
            q.row([r, self.head, g])
        };
        let rows = Rows { row, count: self.count, columns: self.d };
        let mut unit = block.thread;
        while unit < ROWS * chunks {
            // Four at a time, each of eight elements.
            let units = [unit, unit + THREADS, unit + 2 * THREADS, unit + 3 * THREADS];
            // SAFETY: the rows' (caller); the words are this thread's.
            unsafe {
                let eights = eights_at(&rows, units.map(|unit| (first + unit / chunks, unit % chunks * 8)));
                for i in 0..4 {
                    let [a, b, c, d, e, f, g, h] = eights[i].map(|x| x * scale);
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

    /// Begins products of the queries with the keys of stage `stage`.
    ///
    /// # Safety
    /// Both are there, and every thread of the warpgroup makes this same call.
    unsafe fn scores(&self, stage: u32) -> Sums<32> {
        let (keys, mut scores) = (stage_at(stage), Sums::zero());
        // SAFETY: the caller's promises.
        unsafe {
            warpgroup::begin();
            each_of_four!(at => scores.add(Matrix::at(0).step(at), Matrix::at(keys).step(at)));
            each_of_four!(at => scores.add(Matrix::at(MATRIX).step(at), Matrix::at(keys + MATRIX).step(at)));
            warpgroup::commit();
        }
        scores
    }

    /// What a thread of the warpgroup does.
    unsafe fn multiply(&self, block: &Block, first: u32, [from, steps]: [u32; 2]) {
        let block = &Block { thread: memory::opaque_word(block.thread), ..*block };
        let (warp, lane) = (block.warp(), block.lane());
        let rows = [first + 16 * warp + lane / 4, first + 16 * warp + lane / 4 + 8];
        let group = self.group();
        let (window, seen_by) = (self.window(), rows.map(|row| self.seen(row, group)));
        // Positions that all of the warp's rows see.
        let of_all = (self.seen(first + 16 * warp, group), self.seen(first + 16 * warp + 15, group));
        let (all_from, all_end) = (of_all.1.saturating_sub(window), of_all.0.min(self.share[1]));
        // SAFETY: the caller's promises; matrices are read once all have met after they were written, fenced.
        unsafe {
            self.bring(block, first);
            let (mut sums, mut max, mut total) = ([0.0; 64], [-1e30f32; 2], [0.0; 2]);
            let mut adding = Sums::of(sums);
            block.sync();
            let mut scores = self.scores(0).take();
            let (mut step, mut stage) = (0, 0);
            while step < steps {
                let values = stage_at(stage) + 2 * MATRIX;
                // The next block's scores are on their way over what follows. Behind the last one are the same once
                // more, which nobody takes: no condition may stand around products.
                if step + 1 < steps {
                    stage = if stage + 1 < STAGES { stage + 1 } else { 0 };
                    block.sync();
                }
                let next = self.scores(stage);

                let at = from + step * BLOCK;
                if at < all_from || at + BLOCK > all_end {
                    // Found here, not kept over the loop.
                    let t = memory::opaque_word(lane) % 4;
                    of_groups!(32: group, i => {
                        let column = at + 8 * group as u32 + 2 * t + i as u32 % 2;
                        let (of, seen) = (4 * group + i, seen_by[i / 2]);
                        scores[of] = where_in_window(column, seen, window, self.share[1], scores[of]);
                    });
                }
                let mut new = max;
                of_groups!(32: group, i => new[i / 2] = new[i / 2].max(scores[4 * group + i]));
                new = across(new, f32::max);
                let factor = [exp2(max[0] - new[0]), exp2(max[1] - new[1])];
                (max, total) = (new, [total[0] * factor[0], total[1] * factor[1]]);
                of_groups!(32: group, i => {
                    let of = 4 * group + i;
                    scores[of] = exp2(scores[of] - max[i / 2]);
                    total[i / 2] += scores[of];
                });
                warpgroup::before_waiting();
                // The products that read the weights before are done: nobody may write these registers sooner. And all
                // weights before the next products begin, between which no instruction may write what they read.
                sums = adding.take();
                let mut weights = [0; 16];
                of_groups!(32: group, i => if i % 2 == 1 {
                    let of = 4 * group + i;
                    weights[of / 2] = memory::opaque_word(f32_to_bf16_pair(scores[of - 1], scores[of]));
                });
                scores = next.take();
                of_groups!(64: group, i => sums[4 * group + i] *= factor[i / 2]);
                adding = Sums::of(sums);
                let of_values = Transposed::at(values, MATRIX);
                warpgroup::begin();
                each_of_four!(at => {
                    let of = |i: usize| weights[4 * at as usize + i];
                    adding.add_transposed([of(0), of(1), of(2), of(3)], of_values.step(at));
                });
                warpgroup::commit();
                step += 1;
            }
            sums = adding.take();
            total = across(total, |a, b| a + b);
            let is_share = self.p.splits > 1;
            let (y, group) = (self.operand(slot::Y), self.group());
            let sinks = rows.map(|row| self.sink(row, group));
            // Without a sink nothing changes.
            let new = [max[0].max(sinks[0]), max[1].max(sinks[1])];
            let shrink = [exp2(max[0] - new[0]), exp2(max[1] - new[1])];
            total = [total[0] * shrink[0] + exp2(sinks[0] - new[0]), total[1] * shrink[1] + exp2(sinks[1] - new[1])];
            max = new;
            let of = rows.map(|row| {
                let [r, g] = self.row_of(row, group);
                if is_share { y.row([self.head, 0, r * group.0 + g]) } else { y.row([r, self.head, g]) }
            });
            let t = memory::opaque_word(lane) % 4;
            let (mut factor, mut to) = ([shrink[0] * reciprocal(total[0]), shrink[1] * reciprocal(total[1])], 0);
            if is_share {
                (factor, to) = (shrink, FOUND);
                each_of_four!(i => {
                    let half = i as usize / 2;
                    if t == 0 && rows[half] < self.count {
                        let found = if i % 2 == 0 { max[half] * core::f32::consts::LN_2 } else { total[half] };
                        of[half].set(i % 2, found);
                    }
                });
            }
            // What they are written as is asked once for all.
            macro_rules! put_all {
                ($put:expr) => {
                    of_groups!(64: group, i => {
                        let (half, column) = (i % 2, 8 * group as u32 + 2 * t);
                        if i < 2 && column < self.d && rows[half] < self.count {
                            let at = 4 * group + 2 * half;
                            $put(&of[half], to + column, [sums[at] * factor[half], sums[at + 1] * factor[half]]);
                        }
                    });
                };
            }
            if y.dtype() == BF16 {
                put_all!(|row: &Row, at: u32, [a, b]: [f32; 2]| {
                    memory::store(row.at(0).wrapping_add(2 * at as usize).cast(), f32_to_bf16_pair(a, b));
                });
            } else {
                put_all!(|row: &Row, at: u32, [a, b]: [f32; 2]| {
                    let two = u64::from(a.to_bits()) | u64::from(b.to_bits()) << 32;
                    memory::store(row.at(0).wrapping_add(4 * at as usize).cast(), two);
                });
            }
        }
    }
}
