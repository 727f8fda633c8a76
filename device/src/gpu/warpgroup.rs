//! Products of many rows of bf16 with weights that are bf16 or in fewer bits: a warpgroup multiplies what the other
//! warps bring to shared memory.
//!
//! ```text
//! tiles     [ x: 128 rows x 64 | w: 128 rows x 64 ] 32 KiB a stage, six stages, each swizzled as the tensor cores want it
//! warps     0 to 3, a warpgroup: 2 x (64 x 128) sums in registers, four products of 16 columns a step and half
//!           the others: copy the stage four steps ahead, sixteen bytes a time
//! ```
//! With 64 rows of x or fewer the second half is left out; with 64, 32 or 16 rows of the weights, or fewer, sums are 64
//! x as many, and the second half of both matrices has the 64 columns that come next. Columns of which there are none
//! are zero; where a row would be of which there is none, there is the last one again, or zeros from the first steps
//! on: nobody takes its sums.
//!
//! Where weights are nobody's result, the first stages' are on their way before the task's events have fired; then only
//! x is waited for.
//!
//! A step: who copies waits for this step's own copies and fences them for the tensor cores; all meet; the copies of
//! four steps on begin; the warpgroup begins its products and waits for those of the step before. So whoever has met in
//! step i knows that the products of step i - 2 are done, whose stage the copies of step i take. Those who multiply
//! copy nothing: beside 128 sums they have no registers for it.
//!
//! Weights in fewer bits are copied as they are, to where they will lie as bf16: sixteen bytes of them and, beside
//! these, their scale. Whoever has copied them makes them bf16, rounded, once they are there, before all meet. So they
//! come in half the bytes, as far ahead as others. In 4 bits a line's low halves are a step's columns and its high ones
//! the next's, which copies the same bytes, out of L2 then.
//!
//! Of two matrices (gate and up) half of w's rows are the one's, half the other's. Where they lie, [`Matrices`] says:
//! operands one after the other, or rows of x that go to one expert, wherever each is.
//!
//! The memory is the ring of tiles, which nobody else uses in a pass whose worker has no tiles to load. Products are
//! exact, sums f32. Floor of a part: 2 * 128 * 128 * k flops at an SM's 7.5 TFLOP/s, 4.3 ns a column; its bytes, 512 a
//! column, come from L2.

use super::math::{scaled_bytes, short_scale};
use super::packed::{Eight, Four, LookedUp, Packed};
use super::{BF16, Call, Tensor};
use crate::arch::scalar::f32_to_bf16_pair;
use crate::arch::warpgroup::{self, Matrix, Sums, place};
use crate::arch::{WARP, bulk, copy, each_of_four, memory, shared, warp};
use crate::block::Block;
use crate::kernels::linear::slot;
use core::hint::cold_path;
use perpetua_shared::{Fault, Technique};

/// Columns of k at a time, and of them those that one instruction takes.
const STEP: u32 = 64;
const PRODUCTS: u32 = 4;

/// Stages of the pipeline, the first of them under way when it begins, and their bytes.
const STAGES: u32 = 6;
const AHEAD: u32 = STAGES - 2;
const STAGE: u32 = (ROWS + COLUMNS) * warpgroup::ROW;
const W: u32 = ROWS * warpgroup::ROW;

/// Where the second half of a matrix is.
const SECOND: u32 = warpgroup::M * warpgroup::ROW;

/// Warps that multiply.
pub(crate) const MULTIPLYING: u32 = warpgroup::THREADS / WARP;

/// Rows of x, and of the weights, that a part has at most.
pub(crate) const ROWS: u32 = 2 * warpgroup::M;
pub(crate) const COLUMNS: u32 = 128;

const _: () = {
    assert!(STAGES * STAGE <= perpetua_shared::launch::TILE_BYTES);
    assert!(2 * HALF <= STAGES * STAGE);
};

const _: () = assert!(PRODUCTS == 4 && PRODUCTS * 16 == STEP);

/// Where the matrices of a product lie, `N` of weights and x: bf16, or weights in fewer bits, each row in one piece
/// that starts on sixteen bytes.
pub(crate) trait Matrices<const N: usize>: Copy {
    /// Where x's rows are gathered: the words of shared memory, one for each of its rows, of which each says how many
    /// bytes from [`x`](Matrices::x) its row is.
    const GATHERED: Option<u32> = None;

    /// Columns of all.
    ///
    /// # Safety
    /// As for the next three: the call's operands are there.
    unsafe fn k(self) -> u32;

    /// The weights' type.
    ///
    /// # Safety
    /// See above.
    unsafe fn dtype(self) -> u16 {
        BF16
    }

    /// Rows of x from `m` on, `count` of them.
    ///
    /// # Safety
    /// There are so many.
    unsafe fn x(self, m: u32, count: u32) -> Rows;

    /// Rows of the weights numbered `which` from `n` on, `count` of them.
    ///
    /// # Safety
    /// There are so many of the first.
    unsafe fn weights(self, which: usize, n: u32, count: u32) -> Rows;
}

/// Rows of a matrix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    /// The first one.
    pub(crate) from: *const u8,
    /// Bytes to the next.
    pub(crate) apart: usize,
    /// How many there are.
    pub(crate) count: u32,
}

impl Rows {
    /// The same, but that the first is where sixteen bytes `chunk` of row `row` are.
    fn starting_at(self, row: u32, chunk: u32) -> Rows {
        Rows { from: self.from.wrapping_add(row as usize * self.apart + 16 * chunk as usize), ..self }
    }
}

/// Operand `x` and, from `w` on, the weights.
#[derive(Clone, Copy)]
struct InOrder<'a>(&'a Call<'a>);

impl InOrder<'_> {
    /// `count` rows of operand `operand` from `first` on.
    unsafe fn rows(self, operand: usize, first: u32, count: u32) -> Rows {
        // SAFETY: the operands are matrices, which have that row (caller).
        let matrix = unsafe { self.0.tensor(operand) };
        let apart = bytes_apart(&matrix);
        Rows { from: matrix.address([0, 0]).wrapping_add(first as usize * apart), apart, count }
    }
}

impl<const N: usize> Matrices<N> for InOrder<'_> {
    unsafe fn k(self) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { self.0.tensor(slot::W) }.extent(1)
    }

    unsafe fn dtype(self) -> u16 {
        // SAFETY: the caller's promise.
        unsafe { self.0.tensor(slot::W) }.dtype()
    }

    unsafe fn x(self, m: u32, count: u32) -> Rows {
        // SAFETY: the caller's promise.
        unsafe { self.rows(slot::X, m, count) }
    }

    unsafe fn weights(self, which: usize, n: u32, count: u32) -> Rows {
        // SAFETY: the caller's promise.
        unsafe { self.rows(slot::W + which, n, count) }
    }
}

/// Bytes from a row of `matrix`, of bf16 or in fewer bits, to the next.
pub(crate) fn bytes_apart(matrix: &Tensor) -> usize {
    matrix.stride(0) as usize * if matrix.is_packed() { 1 } else { 2 }
}

/// What becomes of the sums of a product with `N` matrices of weights.
pub(crate) trait Finish<const N: usize> {
    /// Where those of four rows of the weights go, whatever the row of x, and what is added to them on the way.
    type Columns: Copy;

    /// That of weights n, a multiple of four, to n + 3, some of them beyond the last n perhaps. A thread asks once for
    /// all its rows of a part: the operands are words of shared memory, which each four would wait for.
    ///
    /// # Safety
    /// As [`multiply`].
    unsafe fn columns(&self, n: u32) -> Self::Columns;

    /// What can be done before there are sums of the part at `place`, while its first copies are on their way.
    /// [`THREADS`] threads make the call, and meet the others before [`rows`](Finish::rows).
    ///
    /// # Safety
    /// As [`multiply`].
    unsafe fn begin(&self, place: &Place, block: &Block) {
        let _ = (place, block);
    }

    /// Takes the sums of `columns` with rows `r`, of which the same may come twice. What it returns of each counts
    /// where it [adds up](Finish::adds_up).
    ///
    /// # Safety
    /// As [`multiply`].
    unsafe fn rows<const R: usize>(&self, columns: &Self::Columns, r: [u32; R], sums: [[[f32; 4]; N]; R]) -> [f32; R];

    /// Whether what [`rows`](Finish::rows) returns is added up over a row of the part, for [`row`](Finish::row).
    ///
    /// # Safety
    /// As [`multiply`].
    unsafe fn adds_up(&self) -> bool {
        false
    }

    /// Takes what has been added up of row r of a part.
    ///
    /// # Safety
    /// As [`multiply`].
    unsafe fn row(&self, r: u32, sum: f32) {
        let _ = (r, sum);
    }
}

/// Threads that call [`Finish::begin`].
pub(crate) const THREADS: u32 = warpgroup::THREADS;

/// Whether a block that multiplies so has what it takes: the tiles' memory, and warps that copy.
pub(crate) fn has_room(call: &Call<'_>, block: &Block) -> bool {
    let is_free = call.tiles.is_some_and(|tiles| tiles.is_free());
    is_free && block.warps() > MULTIPLYING && call.uses(Technique::Warpgroups)
}

/// Whether [`multiply`] is for this call, of `N` matrices of weights from operand `w` on.
pub(crate) unsafe fn is_for<const N: usize>(call: &Call<'_>, block: &Block, rows: u32) -> bool {
    // Of few rows most of the products are of zeros, but the weights are read by far more copies at a time than
    // otherwise.
    if rows == 0 || !has_room(call, block) {
        return false;
    }
    // SAFETY: the operands are matrices (caller).
    unsafe {
        let w = call.tensor(slot::W);
        let are_alike = (w.dtype() == BF16 || w.is_packed()) && call.are_all::<N>(w.dtype());
        let mut fits = call.tensor(slot::X).dtype() == BF16 && are_alike;
        for operand in slot::X..slot::W + N {
            let matrix = call.tensor(operand);
            let is_whole = matrix.extent(1).is_multiple_of(8) && bytes_apart(&matrix).is_multiple_of(16);
            fits &= is_whole && matrix.address([0, 0]).addr().is_multiple_of(16);
        }
        fits
    }
}

/// Has `finish` [take](Finish::rows) the sums of every row of operand `x` and four rows at a time of the N weight
/// matrices, from `w` on. What it can it copies before `ready`.
///
/// # Safety
/// Every thread of the block makes this same call; [`is_for`] it; `x` has at least `rows` rows, the weights are
/// all alike, with as many columns, each row contiguous.
///
/// # Errors
/// Those of `ready`.
pub(crate) unsafe fn multiply<const N: usize>(
    call: &Call<'_>,
    block: &Block,
    rows: u32,
    ready: impl Fn() -> Result<(), Fault>,
    finish: &impl Finish<N>,
) -> Result<(), Fault> {
    // SAFETY: the caller's promises; the loops' bounds are the block's.
    unsafe {
        let (columns, matrices) = (call.tensor(slot::W).extent(0), InOrder(call));
        let reads_early = call.reads_early();
        let mut n0 = 0;
        while n0 < columns {
            let width = width_for((columns - n0) * N as u32);
            let mut m0 = 0;
            while m0 < rows {
                let is_tall = width == COLUMNS && rows - m0 > warpgroup::M;
                let (height, width_of_each) = (if is_tall { ROWS } else { warpgroup::M }, width / N as u32);
                let place =
                    Place { n0, m0, rows: within(rows, m0, height), columns: within(columns, n0, width_of_each) };
                let is_first = n0 == 0 && m0 == 0;
                let is_early = is_first && reads_early;
                let begin = || {
                    if is_first {
                        ready()?;
                    }
                    if block.warp() < MULTIPLYING {
                        finish.begin(&place, block);
                    }
                    Ok(())
                };
                if width == COLUMNS {
                    wide_part::<N>(matrices, block, &place, is_early, begin)?;
                } else if width == COLUMNS / 2 {
                    part::<N, 1, 32>(matrices, block, &place, is_early, begin)?;
                } else if width == COLUMNS / 4 {
                    part::<N, 1, 16>(matrices, block, &place, is_early, begin)?;
                } else {
                    part::<N, 1, 8>(matrices, block, &place, is_early, begin)?;
                }
                finish_all(block, &place, width_of_each, finish);
                block.sync();
                m0 += height;
            }
            n0 += width / N as u32;
        }
    }
    Ok(())
}

/// As [`multiply`], for the part at `place` of the product of `matrices`: at most [`ROWS`] rows, and [`COLUMNS`] of the
/// weights, all matrices'.
///
/// # Safety
/// Every thread of the block makes this same call, of which it is true that it [has room](has_room); the matrices have
/// that part, and the block's threads have met since their gathered rows were found.
pub(crate) unsafe fn multiply_part<const N: usize>(
    matrices: impl Matrices<N>,
    block: &Block,
    place: &Place,
    finish: &impl Finish<N>,
) {
    // SAFETY: the caller's promises.
    unsafe {
        let _ = wide_part::<N>(matrices, block, place, false, || Ok(()));
        finish_all(block, place, COLUMNS / N as u32, finish);
        block.sync();
    }
}

/// The sums of a part [`COLUMNS`] wide.
unsafe fn wide_part<const N: usize>(
    matrices: impl Matrices<N>,
    block: &Block,
    place: &Place,
    is_early: bool,
    begin: impl Fn() -> Result<(), Fault>,
) -> Result<(), Fault> {
    // SAFETY: the caller's promises.
    unsafe {
        if place.rows > warpgroup::M {
            part::<N, 2, 64>(matrices, block, place, is_early, begin)
        } else {
            part::<N, 1, 64>(matrices, block, place, is_early, begin)
        }
    }
}

/// Rows of the weights, all matrices', that a part has which is to have `left`, if it can.
fn width_for(left: u32) -> u32 {
    let mut width = COLUMNS;
    while width > COLUMNS / 8 && left <= width / 2 {
        width /= 2;
    }
    width
}

/// Which part of the product: `rows` from `m0` on, `columns` of each matrix from `n0` on.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) n0: u32,
    pub(crate) m0: u32,
    pub(crate) rows: u32,
    pub(crate) columns: u32,
}

/// How many of `all` there are from `first` on, `most` at most.
pub(crate) fn within(all: u32, first: u32, most: u32) -> u32 {
    if all - first < most { all - first } else { most }
}

/// The sums of `M` times 64 rows and `2 S` of the weights', to where [`finish_all`] finds them. Before `begin` nothing
/// is known of x; if it `is_early`, copies of weights begin before that.
unsafe fn part<const N: usize, const M: usize, const S: usize>(
    matrices: impl Matrices<N>,
    block: &Block,
    place: &Place,
    is_early: bool,
    begin: impl Fn() -> Result<(), Fault>,
) -> Result<(), Fault> {
    // SAFETY: the caller's promises. A stage's copies are waited for, fenced and met before its products begin, and
    // these are waited for by each warp before it meets the others, after which the stage is copied to again: see the
    // module head. Sums are kept where stages were once all warps have met after their last product.
    unsafe {
        let steps = matrices.k().div_ceil(STEP * if is_deep(M, S) { 2 } else { 1 });
        let copies = Copies::<N>::of(matrices, block, place);
        let mut early = 0;
        if is_early && block.warp() >= MULTIPLYING {
            while early < steps && early < early_stages(M, S) {
                copies.begin_weights::<M, S>(early, early);
                early += 1;
            }
        }
        let outcome = begin();
        if outcome.is_err() {
            copy::commit();
            copy::wait::<0>();
            return outcome;
        }
        let mut step = 0;
        if block.warp() < MULTIPLYING {
            let mut sums: [Sums<S>; M] = core::array::from_fn(|_| Sums::zero());
            while step < steps {
                block.sync();
                let stage = stage_of(step);
                let (a, b) = (Matrix::at(stage), Matrix::at(stage + W));
                let (second_a, second_b) = (Matrix::at(stage + SECOND), Matrix::at(stage + W + SECOND));
                warpgroup::begin();
                each_of_four!(at => {
                    sums[0].add(a.step(at), b.step(at));
                    if M == 2 {
                        sums[M - 1].add(second_a.step(at), b.step(at));
                    }
                });
                if is_deep(M, S) {
                    each_of_four!(at => sums[0].add(second_a.step(at), second_b.step(at)));
                }
                warpgroup::commit();
                warpgroup::wait::<1>();
                step += 1;
            }
            let mut take = |m: usize| core::mem::replace(&mut sums[m], Sums::zero()).take();
            let mut taken = [take(0); M];
            if M == 2 {
                taken[M - 1] = take(M - 1);
            }
            block.sync();
            keep(block, taken);
        } else {
            let mut stage = 0;
            while step < AHEAD + steps {
                if step >= AHEAD {
                    copy::wait::<{ AHEAD - 1 }>();
                    if Eight::is_of(copies.dtype) {
                        copies.widen::<Eight, M, S>(step - AHEAD);
                    } else if copies.dtype != BF16 {
                        copies.widen::<Four, M, S>(step - AHEAD);
                    }
                    copy::fence_tiles();
                    block.sync();
                }
                if step < steps {
                    copies.begin_x::<M, S>(gathered(matrices, place.m0), step, stage);
                    if step >= early {
                        copies.begin_weights::<M, S>(step, stage);
                    }
                }
                copy::commit();
                stage = if stage + 1 < STAGES { stage + 1 } else { 0 };
                step += 1;
            }
            copy::wait::<0>();
            block.sync();
        }
        block.sync();
    }
    Ok(())
}

/// Stages whose weights come before a task's events have fired: all, where they are small; where they have rows enough
/// for tensor cores to be what takes time, fewer, since who waits for the first x waits for them too.
const fn early_stages(m: usize, s: usize) -> u32 {
    match (is_deep(m, s), m) {
        (true, _) => STAGES,
        (false, 1) => AHEAD,
        _ => AHEAD / 2,
    }
}

/// Whether the second half of a stage's matrices has the next columns, where it would have no rows.
const fn is_deep(m: usize, s: usize) -> bool {
    m == 1 && 2 * s as u32 <= COLUMNS / 2
}

/// Where step `step`'s stage begins.
fn stage_of(step: u32) -> u32 {
    step % STAGES * STAGE
}

/// Which columns are copied: 64 from `first` on, as far as they are below `k`.
#[derive(Clone, Copy, Debug)]
struct Columns {
    first: u32,
    k: u32,
    /// Whether nothing of this part has been where they go.
    is_new: bool,
}

/// A thread of a warp that does not multiply: it copies the same sixteen bytes of a row, of every so many rows of 64
/// columns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copier {
    /// Its first row, and which sixteen bytes.
    pub(crate) row: u32,
    pub(crate) chunk: u32,
    /// How many rows its next is after, a multiple of four.
    pub(crate) apart: u32,
}

impl Copier {
    /// The calling thread; those that multiply have no use for theirs.
    pub(crate) fn of(block: &Block) -> Copier {
        let first = memory::opaque_word(block.thread).saturating_sub(warpgroup::THREADS);
        Copier { row: first / 8, chunk: first % 8, apart: (block.threads - warpgroup::THREADS) / 8 }
    }

    /// Which rows and bytes of `rows` are the thread's: from its first row on, or the last there is.
    fn own(&self, rows: Rows) -> Rows {
        rows.starting_at(self.row.min(rows.count.saturating_sub(1)), self.chunk)
    }

    /// Of weights in fewer bits: the first row, of which the next is twice as far as of bf16, and which quarter of a
    /// line.
    fn packed(&self) -> (u32, u32) {
        let first = 8 * self.row + self.chunk;
        (first / 4, first % 4)
    }

    /// 64 columns of `n` rows, to the matrix at `to`. Of rows that are not there some are the last one again, whose
    /// sums nobody takes; the others are zero when it is new, and stay so.
    ///
    /// PERF: a row is a choice, an address and the copy, and none waits for another's. With a pointer that went from
    /// row to row, and comparisons for each row, a step of 128 x 128 took its copying warps twice as long as the tensor
    /// cores take for its products.
    unsafe fn rows(&self, rows: &Rows, at: Columns, to: u32, n: u32) {
        let from = rows.from.wrapping_add(2 * at.first as usize);
        let is_there = rows.count > 0 && at.first + 8 * self.chunk < at.k;
        // Neighbours of eight rows lie in turn, and the thread's next row is a multiple of four later.
        let first = to + place(self.row, self.chunk);
        let turned = first ^ (self.apart % 8 / 4 * 64);
        // From the thread's first row to the last that is there. Numbers that a compiler knows nothing of, so that
        // their product is one instruction.
        let most = memory::opaque_word(rows.count.saturating_sub(1).saturating_sub(self.row));
        let apart = || memory::opaque_word(rows.apart as u32);
        let begin = |i: u32, apart: u32| {
            let on = i * self.apart;
            let to = if i.is_multiple_of(2) { first } else { turned } + on * warpgroup::ROW;
            let from = from.wrapping_add((u64::from(on.min(most)) * u64::from(apart)) as usize);
            // SAFETY: a row of the matrix (caller).
            unsafe {
                if on + self.apart <= n {
                    copy::sixteen(to, from, is_there);
                } else {
                    copy::sixteen_if(self.row + on < n, to, from, is_there);
                }
            }
        };
        let (mut i, rounds) = (0, n.div_ceil(self.apart));
        let here = apart();
        while i < AT_ONCE.min(rounds) {
            begin(i, here);
            i += 1;
        }
        if AT_ONCE * self.apart < rows.count {
            let here = apart();
            while i < rounds {
                begin(i, here);
                i += 1;
            }
        }
        while at.is_new && self.row + i * self.apart < n {
            cold_path();
            // SAFETY: nothing is read.
            unsafe { copy::sixteen(to + place(self.row + i * self.apart, self.chunk), from, false) };
            i += 1;
        }
    }
}

/// What such a thread copies of a part.
struct Copies<const N: usize> {
    by: Copier,
    x: Rows,
    w: [Rows; N],
    /// The weights' type: of those in fewer bits it copies sixteen bytes of every so many rows, too, which are twice as
    /// many elements of a step.
    dtype: u16,
    /// Columns of all.
    k: u32,
}

/// The words that say where the rows of x are that a part from row `m` on gathers, if it does.
fn gathered<const N: usize, A: Matrices<N>>(_: A, m: u32) -> Option<u32> {
    A::GATHERED.map(|first| first + m)
}

impl<const N: usize> Copies<N> {
    /// Those of the part at `place`.
    unsafe fn of<A: Matrices<N>>(matrices: A, block: &Block, place: &Place) -> Copies<N> {
        let by = Copier::of(block);
        // SAFETY: the matrices have that part (caller).
        unsafe {
            let dtype = matrices.dtype();
            let w: [Rows; N] = core::array::from_fn(|which| matrices.weights(which, place.n0, place.columns));
            let x = matrices.x(place.m0, place.rows);
            // Of gathered rows each says where it begins; of those in fewer bits the thread's may be beyond the last,
            // of which nothing is copied.
            let x = if A::GATHERED.is_some() { x.starting_at(0, by.chunk) } else { by.own(x) };
            let w = w.map(|rows| {
                if dtype == BF16 {
                    return by.own(rows);
                }
                let (row, chunk) = by.packed();
                rows.starting_at(row, chunk)
            });
            Copies { by, x, w, dtype, k: matrices.k() }
        }
    }

    /// Begins the copies of x of step `step`, to stage `stage`.
    unsafe fn begin_x<const M: usize, const S: usize>(&self, gathered: Option<u32>, step: u32, stage: u32) {
        let halves = if is_deep(M, S) { 2 } else { 1 };
        let mut half = 0;
        while half < halves {
            let to = stage * STAGE + half * SECOND;
            let at = Columns { first: STEP * (halves * step + half), k: self.k, is_new: step < STAGES };
            // SAFETY: elements inside the matrix (caller); the stage is nobody's: see `part`.
            unsafe {
                if let Some(offsets) = gathered {
                    self.gathered(offsets, at, to, M as u32 * warpgroup::M);
                } else {
                    self.by.rows(&self.x, at, to, M as u32 * warpgroup::M);
                }
            }
            half += 1;
        }
    }

    /// Likewise of the weights.
    unsafe fn begin_weights<const M: usize, const S: usize>(&self, step: u32, stage: u32) {
        let to = stage * STAGE + W;
        if self.dtype != BF16 {
            // SAFETY: elements inside the matrices (caller); the stage is nobody's: see `part`.
            return unsafe { self.packed::<M, S>(step, to) };
        }
        let halves = if is_deep(M, S) { 2 } else { 1 };
        let per = (2 * S / N) as u32;
        let mut half = 0;
        while half < halves {
            let to = to + half * SECOND;
            let at = Columns { first: STEP * (halves * step + half), k: self.k, is_new: step < STAGES };
            // SAFETY: as above.
            unsafe {
                self.by.rows(&self.w[0], at, to, per);
                if N == 2 {
                    self.by.rows(&self.w[N - 1], at, to + per * warpgroup::ROW, per);
                }
            }
            half += 1;
        }
    }

    /// Where element `i` of a row of weights in fewer bits is.
    fn element(&self, i: u32) -> (u32, u32) {
        if Eight::is_of(self.dtype) { Eight::element(i) } else { Four::element(i) }
    }

    /// Where row `row` of those that a stage has in fewer bits lies, of all matrices and both halves, if `to` is where
    /// its quarter of row 0 does.
    fn place_of_packed<const M: usize, const S: usize>(to: u32, row: u32) -> u32 {
        let gap = if is_deep(M, S) && row >= 2 * S as u32 { SECOND - 2 * S as u32 * warpgroup::ROW } else { 0 };
        to + row * warpgroup::ROW + gap
    }

    /// Begins the copies of weights in fewer bits of step `step`, a line of each row or, of a deep part, two: bytes to
    /// where their first half will lie, and sixteen bytes of scales that have theirs among them to that of the second.
    unsafe fn packed<const M: usize, const S: usize>(&self, step: u32, to: u32) {
        let (halves, rows) = (if is_deep(M, S) { 2 } else { 1 }, 2 * S as u32);
        let per = rows / N as u32;
        let ((mut row, quarter), apart) = (self.by.packed(), 2 * self.by.apart);
        let to = to + place(row, 2 * quarter) - row * warpgroup::ROW;
        let (bytes, scale) = self.element(STEP * halves * step);
        let w = &self.w[0];
        let mut from = w.from.wrapping_add(bytes as usize);
        // A group's scales come before its lines.
        let to_scales = (bytes + 16 * quarter - scale / 16 * 16) as usize;
        // Of a deep part: from its first columns' line to that of the next ones, whose scales are among the same
        // sixteen bytes.
        let to_next = self.element(STEP * (halves * step + 1)).0 - bytes;
        // From what the one matrix, or the one half, would have next to what the other has.
        let (back, next_row) = (rows as usize * w.apart, apart as usize * w.apart);
        let to_second = self.w[N - 1].from.addr().wrapping_sub(w.from.addr() + back / 2);
        let there = |half: u32| if STEP * (halves * step + half) < self.k { u32::MAX } else { 0 };
        let (is_first, is_next) = (there(0), there(1));
        // Of one matrix that is two the other may have fewer.
        let counts = [w.count, self.w[N - 1].count];
        let n = if step < STAGES { per } else { w.count };
        // SAFETY: of the matrix, whose lines are whole, if they are there (caller); the stage is nobody's: see `part`.
        let begin = |row: u32, from: *const u8| unsafe {
            let is_half = halves == 2 && row >= rows;
            let of_half = if is_half { row - rows } else { row };
            let is_second = N == 2 && of_half >= per;
            let number = if is_second { of_half - per } else { of_half };
            let line = from.wrapping_add(if is_second { to_second } else { 0 });
            let next = to_next as usize;
            let (line, to_scales) = if is_half {
                (line.wrapping_sub(back).wrapping_add(next), to_scales + next)
            } else {
                (line, to_scales)
            };
            let to = Self::place_of_packed::<M, S>(to, row);
            let is_mine = row < halves * rows && number < n;
            let is_there = number < counts[usize::from(is_second)] & if is_half { is_next } else { is_first };
            copy::sixteen_if(is_mine, to, line, is_there);
            copy::sixteen_if(is_mine, to ^ 16, line.wrapping_sub(to_scales), is_there);
        };
        while row < halves * rows {
            begin(row, from);
            begin(row + apart, from.wrapping_add(next_row));
            if at_once(S) == 3 {
                begin(row + 2 * apart, from.wrapping_add(2 * next_row));
            }
            (row, from) = (row + at_once(S) * apart, from.wrapping_add(at_once(S) as usize * next_row));
        }
    }

    /// Makes bf16 of the weights of step `step`, which are in fewer bits: their products with the scale, rounded.
    ///
    /// PERF: two or three rows side by side; one after the other each would wait for the one before.
    unsafe fn widen<P: Packed, const M: usize, const S: usize>(&self, step: u32) {
        let (halves, rows) = (if is_deep(M, S) { 2 } else { 1 }, 2 * S as u32);
        let ((mut row, quarter), apart) = (self.by.packed(), 2 * self.by.apart);
        let to = stage_of(step) + W + place(row, 2 * quarter) - row * warpgroup::ROW;
        // The thread's first elements of the step, or of either half.
        let first = STEP * halves * step + 16 * quarter;
        let table = P::table(self.dtype);
        // SAFETY: the thread's own copies to there have been waited for (caller); the stage is nobody's: see `part`.
        let asked = |row: u32| unsafe {
            let to = Self::place_of_packed::<M, S>(to, row);
            let at = first + if halves == 2 && row >= rows { STEP } else { 0 };
            let scale_at = P::element(at).1 % 16;
            (to, at, bulk::load16(to), P::scale(bulk::load4((to ^ 16) + scale_at / 4 * 4), scale_at))
        };
        // SAFETY: as above.
        let widened = |(to, at, [a, b, c, d], scale): (u32, u32, [u32; 4], f32)| unsafe {
            let scale = short_scale(scale, P::MORE);
            let ((a, b), (c, d)) = (P::eight(table, (a, b), at), P::eight(table, (c, d), at));
            let ((a, b), (c, d)) = ((four_of(a, scale), four_of(b, scale)), (four_of(c, scale), four_of(d, scale)));
            bulk::store16(to, [a.0, a.1, b.0, b.1]);
            bulk::store16(to ^ 16, [c.0, c.1, d.0, d.1]);
        };
        while row < halves * rows {
            // Beyond the last the first comes again.
            let again = |next: u32| if next < halves * rows { next } else { row };
            let (first, second) = (asked(row), asked(again(row + apart)));
            if at_once(S) == 3 {
                let third = asked(again(row + 2 * apart));
                widened(first);
                widened(second);
                widened(third);
            } else {
                widened(first);
                widened(second);
            }
            row += at_once(S) * apart;
        }
    }

    /// As [`Copier::rows`], of x, whose row i is as many bytes from its start as the word `offsets + i` of shared
    /// memory says.
    unsafe fn gathered(&self, offsets: u32, at: Columns, to: u32, n: u32) {
        let from = self.x.from.wrapping_add(2 * at.first as usize);
        let count = if at.first + 8 * self.by.chunk < self.k { self.x.count } else { 0 };
        let n = if at.is_new || self.x.count > n { n } else { self.x.count };
        let mut row = self.by.row;
        while row < n {
            // SAFETY: a row of the matrix, if it is there (caller); its word is.
            unsafe {
                let is_there = row < count;
                let offset = shared::load(offsets + if is_there { row } else { 0 });
                copy::sixteen(to + place(row, self.by.chunk), from.wrapping_add(offset as usize), is_there);
            }
            row += self.by.apart;
        }
    }
}

/// Rows of bf16 that a thread copies before it asks whether there are more.
const AT_ONCE: u32 = 6;

/// Rows of weights in fewer bits that a thread has side by side in parts of so many columns: of the narrowest it has
/// two at most.
const fn at_once(s: usize) -> u32 {
    if 2 * s as u32 == COLUMNS / 8 { 2 } else { 3 }
}

/// Four weights of these bytes, times their scale, as bf16.
fn four_of(bytes: u32, scale: (f32, f32)) -> (u32, u32) {
    let [a, b, c, d] = scaled_bytes(bytes, scale);
    (f32_to_bf16_pair(a, b), f32_to_bf16_pair(c, d))
}

/// Where sums lie to be finished: a thread's four of a group of eight columns, two neighbours of row g and two of row g + 8, stand together. Bytes from a group to
/// the next, and from one half of the rows to the other.
///
/// Whoever finishes them reads those of two neighbouring lanes one after the other. With lanes in the order 0, 1, 3, 2
/// and a gap of two lanes from group to group, the lanes that memory serves at once, of four groups, find eight times
/// sixteen bytes in different banks.
const GROUP: u32 = (warpgroup::THREADS + 2) * 16;
const HALF: u32 = COLUMNS / 8 * GROUP;

/// Where among the four lanes that have the same row those of lane `t` stand.
const fn turned(t: u32) -> u32 {
    t ^ t >> 1
}

/// Puts a thread's sums where all find them.
unsafe fn keep<const M: usize, const S: usize>(block: &Block, sums: [[f32; S]; M]) {
    // SAFETY: nobody reads the stages any more, nor writes them (caller).
    unsafe {
        // Found here: the places of all groups would be held over the products otherwise.
        let thread = memory::opaque_word(block.thread);
        let own = (thread / 4 * 4 + turned(thread % 4)) * 16;
        for m in 0..M {
            for group in 0..S as u32 / 4 {
                let four = core::array::from_fn(|i| sums[m][4 * group as usize + i].to_bits());
                bulk::store16(m as u32 * HALF + own + group * GROUP, four);
            }
        }
    }
    copy::fence_tiles();
}

/// Finishes what [`keep`] has kept, of matrices `width` columns apart: a thread has four columns of every so many pairs
/// of rows, neighbours in neighbouring lanes.
///
/// PERF: what there is to ask of operands is asked once for both rows. With one row at a time, and sums that half of
/// the lanes looked for in the same bank, a part's end took as long as 1,024 columns of its products.
unsafe fn finish_all<const N: usize>(block: &Block, place: &Place, width: u32, finish: &impl Finish<N>) {
    let block = &Block { thread: memory::opaque_word(block.thread), ..*block };
    let (of_row, lane) = (width / 4, block.lane());
    let (mut pair, column) = (block.thread / of_row, block.thread % of_row * 4);
    // A row and the one eight later, whose sums stand together.
    let row_of = |pair: u32| pair / 8 * 16 + pair % 8;
    let is_column = column < place.columns;
    // Two lanes' sums of a group, and from the one to the other.
    let from = column / 8 * GROUP + column % 8 / 4 * 48;
    let (next, second) = (16u32.wrapping_sub(column % 8 / 4 * 32), (N as u32 - 1) * width / 8 * GROUP);
    // SAFETY: the caller's promise; the column is there, or the first one is.
    let (adds_up, columns) =
        unsafe { (finish.adds_up(), finish.columns(place.n0 + if is_column { column } else { 0 })) };
    // Whole warps, a row's lanes of which add up together.
    while row_of(pair - lane / of_row) < place.rows {
        let row = row_of(pair);
        let (is_there, has_other) = (row < place.rows, row + 8 < place.rows);
        // Of one row that has no other there are two.
        let rows = [place.m0 + row, place.m0 + if has_other { row + 8 } else { row }];
        let mut sums = [0.0; 2];
        if is_there && is_column {
            let at = from + row / warpgroup::M * HALF + (row % warpgroup::M / 16 * WARP + row % 8 * 4) * 16;
            // SAFETY: kept before the block's barrier; rows and columns are inside the operands.
            unsafe {
                let two = |at: u32| {
                    let [a, b, e, f] = bulk::load16(at).map(f32::from_bits);
                    let [c, d, g, h] = bulk::load16(at.wrapping_add(next)).map(f32::from_bits);
                    let above = [a, b, c, d];
                    [above, if has_other { [e, f, g, h] } else { above }]
                };
                let [of_row, of_other] = two(at);
                let mut values = [[of_row; N], [of_other; N]];
                if N == 2 {
                    [values[0][N - 1], values[1][N - 1]] = two(at + second);
                }
                sums = finish.rows(&columns, rows, values);
            }
        }
        if adds_up {
            let mut mask = 1;
            while mask < of_row {
                // SAFETY: of the warp, which comes here together.
                sums = sums.map(|sum| sum + f32::from_bits(unsafe { warp::shuffle_xor(sum.to_bits(), mask) }));
                mask *= 2;
            }
            if is_there && column == 0 {
                // SAFETY: the part has those rows.
                unsafe {
                    finish.row(rows[0], sums[0]);
                    finish.row(rows[1], sums[1]);
                }
            }
        }
        pair += block.threads / of_row;
    }
}
