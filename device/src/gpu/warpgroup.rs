//! Products of many rows where both matrices are bf16: a warpgroup multiplies what the other warps bring to shared
//! memory.
//!
//! ```text
//! tiles     [ x: 128 rows x 64 | w: 128 rows x 64 ] 32 KiB a stage, six stages, each swizzled as the tensor cores want it
//! warps     0 to 3, a warpgroup: 2 x (64 x 128) sums in registers, four products of 16 columns a step and half
//!           the others: copy the stage four steps ahead, sixteen bytes a time, zero where there is nothing
//! ```
//! With 64 rows of x or fewer the second half is left out; with 64 rows of the weights or fewer sums are 64 x 64.
//!
//! A step: who copies waits for this step's own copies and fences them for the tensor cores; all meet; the copies of four steps on
//! begin; the warpgroup begins its products and waits for those of the step before. So whoever has met in step i knows that
//! the products of step i - 2 are done, whose stage the copies of step i take. Those who multiply copy nothing: beside 128 sums they
//! have no registers for it.
//!
//! Of two matrices (gate and up) half of w's rows are the one's, half the other's.
//!
//! The memory is the ring of tiles, which nobody else uses in a pass whose worker has no tiles to load. Products are exact, sums f32.
//! Floor of a part: 2 * 128 * 128 * k flops at an SM's 7.5 TFLOP/s, 4.3 ns a column; its bytes, 512 a column, come from L2.

use super::wide::WIDE_ROWS;
use super::{BF16, Call};
use crate::arch::warpgroup::{self, Matrix, Sums, place};
use crate::arch::{WARP, bulk, copy, each_of_four};
use crate::block::Block;

/// Columns of k at a time, and of them those that one instruction takes.
const STEP: u32 = 64;
const PRODUCTS: u32 = 4;

/// Stages of the pipeline, the first of them under way when it begins, and their bytes.
const STAGES: u32 = 6;
const AHEAD: u32 = STAGES - 2;
const STAGE: u32 = (ROWS + COLUMNS) * warpgroup::ROW;
const W: u32 = ROWS * warpgroup::ROW;

/// Warps that multiply.
const MULTIPLYING: u32 = warpgroup::THREADS / WARP;

/// Rows of x, and of the weights, that a part has at most.
const ROWS: u32 = 2 * warpgroup::M;
const COLUMNS: u32 = 128;

const _: () = {
    assert!(STAGES * STAGE + warpgroup::ALIGN <= perpetua_shared::launch::TILE_BYTES);
    assert!(2 * HALF <= STAGES * STAGE);
};

const _: () = assert!(PRODUCTS == 4 && PRODUCTS * 16 == STEP);

/// Whether [`multiply`] is for this call, of `N` matrices of weights from operand 1 on.
#[inline(always)]
pub(crate) unsafe fn is_for<const N: usize>(call: &Call<'_>, block: &Block, rows: u32) -> bool {
    let is_free = call.tiles.is_some_and(|tiles| tiles.is_free());
    if rows <= WIDE_ROWS || !is_free || block.warps() <= MULTIPLYING {
        return false;
    }
    // SAFETY: the operands are matrices (caller).
    unsafe {
        let mut fits = true;
        for operand in 0..1 + N {
            let matrix = call.tensor(operand);
            let whole = matrix.extent(1).is_multiple_of(8) && matrix.stride(0).is_multiple_of(8);
            fits &= matrix.dtype() == BF16 && whole && matrix.address([0, 0]).addr().is_multiple_of(16);
        }
        fits
    }
}

/// Calls `finish(r, n, sums)` for every row r of operand 0 and n of the N weight matrices, operands 1 and up, of which the
/// sums are the products.
///
/// # Safety
/// Every thread of the block makes this same call; [`is_for`] it; operand 0 has at least `rows` rows, the weights are
/// all alike, with as many columns, each row contiguous.
#[inline(always)]
pub(crate) unsafe fn multiply<const N: usize>(
    call: &Call<'_>,
    block: &Block,
    rows: u32,
    finish: impl Fn(u32, u32, [f32; N]) + Copy,
) {
    // SAFETY: the caller's promises; the loops' bounds are the block's.
    unsafe {
        let columns = call.tensor(1).extent(0);
        let mut n0 = 0;
        while n0 < columns {
            let is_wide = (columns - n0) * N as u32 > COLUMNS / 2;
            let width = if is_wide { COLUMNS } else { COLUMNS / 2 };
            let mut m0 = 0;
            while m0 < rows {
                let is_tall = is_wide && rows - m0 > warpgroup::M;
                let (height, width) = (if is_tall { ROWS } else { warpgroup::M }, width / N as u32);
                let place = Place { n0, m0, rows: within(rows, m0, height), columns: within(columns, n0, width) };
                if is_tall {
                    part::<N, 2, 64>(call, block, &place);
                } else if is_wide {
                    part::<N, 1, 64>(call, block, &place);
                } else {
                    part::<N, 1, 32>(call, block, &place);
                }
                finish_all(block, &place, width, finish);
                block.sync();
                m0 += height;
            }
            n0 += width / N as u32;
        }
    }
}

/// Which part of the product: `rows` from `m0` on, `columns` of each matrix from `n0` on.
struct Place {
    n0: u32,
    m0: u32,
    rows: u32,
    columns: u32,
}

/// How many of `all` there are from `first` on, `most` at most.
#[inline(always)]
fn within(all: u32, first: u32, most: u32) -> u32 {
    if all - first < most { all - first } else { most }
}

/// The sums of `M` times 64 rows and `2 S` of the weights', to where [`finish_all`] finds them.
#[inline(always)]
unsafe fn part<const N: usize, const M: usize, const S: usize>(call: &Call<'_>, block: &Block, place: &Place) {
    // SAFETY: the caller's promises. A stage's copies are waited for, fenced and met before its products begin, and these are
    // waited for by each warp before it meets the others, after which the stage is copied to again: see the module head.
    // Sums are kept where stages were once all warps have met after their last product.
    unsafe {
        let steps = call.tensor(1).extent(1).div_ceil(STEP);
        let mut step = 0;
        if block.warp() < MULTIPLYING {
            let mut sums: [Sums<S>; M] = core::array::from_fn(|_| Sums::zero());
            while step < steps {
                block.sync();
                let stage = stage_of(step);
                let (a, b) = (Matrix::at(stage), Matrix::at(stage + W));
                let second = Matrix::at(stage + warpgroup::M * warpgroup::ROW);
                warpgroup::begin();
                each_of_four!(at => {
                    sums[0].add(a.step(at), b.step(at));
                    if M == 2 {
                        sums[M - 1].add(second.step(at), b.step(at));
                    }
                });
                warpgroup::commit();
                warpgroup::wait::<1>();
                step += 1;
            }
            let sums = sums.map(|sums| sums.take());
            block.sync();
            keep(block, sums);
        } else {
            while step < AHEAD {
                fetch::<N, M, S>(call, block, place, step, steps);
                step += 1;
            }
            while step < AHEAD + steps {
                copy::wait::<{ AHEAD - 1 }>();
                copy::fence_tiles();
                block.sync();
                fetch::<N, M, S>(call, block, place, step, steps);
                step += 1;
            }
            copy::wait::<0>();
            block.sync();
        }
        block.sync();
    }
}

/// Where step `step`'s stage begins.
#[inline(always)]
fn stage_of(step: u32) -> u32 {
    warpgroup::first() + step % STAGES * STAGE
}

/// Begins the copies of step `step` that are this thread's, of a warp that does not multiply: a group, with nothing in it from `steps` on.
#[inline(always)]
unsafe fn fetch<const N: usize, const M: usize, const S: usize>(
    call: &Call<'_>,
    block: &Block,
    at: &Place,
    step: u32,
    steps: u32,
) {
    // SAFETY: elements inside the matrices (caller); the stage is nobody's: see `part`.
    unsafe {
        if step < steps {
            let (stage, k0) = (stage_of(step), step * STEP);
            let x = call.tensor(0);
            let (first, threads) = (block.thread - warpgroup::THREADS, block.threads - warpgroup::THREADS);
            let mut unit = first;
            while unit < M as u32 * warpgroup::M * 8 {
                let (row, chunk) = (unit / 8, unit % 8);
                let (r, k) = (at.m0 + row, k0 + 8 * chunk);
                let is_there = row < at.rows && k < x.extent(1);
                let from = x.address(if is_there { [r, k] } else { [0, 0] });
                copy::sixteen(stage + place(row, chunk), from, is_there);
                unit += threads;
            }
            let per = (2 * S / N) as u32;
            let mut which = 0;
            while which < N as u32 {
                let w = call.tensor(1 + which as usize);
                let mut unit = first;
                while unit < per * 8 {
                    let (row, chunk) = (unit / 8, unit % 8);
                    let (n, k) = (at.n0 + row, k0 + 8 * chunk);
                    let is_there = row < at.columns && k < w.extent(1);
                    let from = w.address(if is_there { [n, k] } else { [0, 0] });
                    copy::sixteen(stage + W + place(which * per + row, chunk), from, is_there);
                    unit += threads;
                }
                which += 1;
            }
        }
    }
    copy::commit();
}

/// Words from a group of eight columns to the next, and bytes from one half of the rows to the other, where sums lie to be
/// finished: a thread's four of a group stand together.
const GROUP: u32 = (warpgroup::THREADS + 4) * 16;
const HALF: u32 = COLUMNS / 8 * GROUP;

/// Where the sum of row `row` and column `column` of a part stands.
#[inline(always)]
fn place_of_sum(row: u32, column: u32) -> u32 {
    let (half, row) = (row / warpgroup::M, row % warpgroup::M);
    let thread = row / 16 * WARP + row % 8 * 4 + column % 8 / 2;
    half * HALF + column / 8 * GROUP + thread * 16 + row % 16 / 8 * 8 + column % 2 * 4
}

/// Puts a thread's sums where all find them.
#[inline(always)]
unsafe fn keep<const M: usize, const S: usize>(block: &Block, sums: [[f32; S]; M]) {
    // SAFETY: nobody reads the stages any more, nor writes them (caller).
    unsafe {
        for m in 0..M {
            let to = warpgroup::first() + m as u32 * HALF + block.thread * 16;
            for group in 0..S as u32 / 4 {
                let four = core::array::from_fn(|i| sums[m][4 * group as usize + i].to_bits());
                bulk::store16(to + group * GROUP, four);
            }
        }
    }
    copy::fence_tiles();
}

/// Finishes what [`keep`] has kept, of matrices `width` columns apart, neighbours in neighbouring lanes.
#[inline(always)]
unsafe fn finish_all<const N: usize>(block: &Block, place: &Place, width: u32, finish: impl Fn(u32, u32, [f32; N])) {
    let mut at = block.thread;
    while at < place.rows * width {
        let (row, column) = (at / width, at % width);
        if column < place.columns {
            let from = warpgroup::first() + place_of_sum(row, column);
            // SAFETY: kept before the block's barrier; r and n are inside the operands.
            unsafe {
                let mut values = [f32::from_bits(bulk::load4(from)); N];
                values[N - 1] = f32::from_bits(bulk::load4(from + (N as u32 - 1) * width / 8 * GROUP));
                finish(place.m0 + row, place.n0 + column, values);
            }
        }
        at += block.threads;
    }
}
