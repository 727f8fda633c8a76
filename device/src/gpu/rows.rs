//! Dot products of weight rows with activation rows, a warp to each: what `linear` and `gated_linear` are made of.
//!
//! A lane takes eight consecutive elements, a warp 256; with one row of activations four such steps are in flight, 2
//! KiB of bf16 weights a warp. The first elements go one by one until the weight row stands on 16 bytes, as do the
//! last; where the activations then do not, the whole row goes one by one. So rows may start anywhere and have any
//! length.

use super::math::{bytes_less, rsqrt};
use super::packed::{Eight, Four, LookedUp, Packed};
use super::thin::First;
use super::tiles::{Tile, Tiles};
use super::{BF16, Call, F16, F32, INT4, MX4, Q4, Q8, Row, Tensor};
use crate::arch::scalar::{f16_to_f32, fma};
use crate::arch::{WARP, bulk, memory, shared, warp};
use crate::block::{Block, FREE_SHARED};
use crate::kernels::MAX_NORMED;
use crate::kernels::attention_merge::{Merge, Parts};
use crate::kernels::linear::slot;
use crate::kernels::routing::Found;
use core::marker::PhantomData;
use perpetua_shared::Fault;

/// How an element type is loaded.
trait Float {
    const BYTES: usize;

    /// One element.
    ///
    /// # Safety
    /// `from` points to one.
    unsafe fn one(from: *const u8) -> f32;

    /// Eight elements at 16-byte aligned `from`, once (`stream`) or to be read again.
    ///
    /// # Safety
    /// `from` points to eight in global memory, aligned.
    unsafe fn eight(from: *const u8, stream: bool) -> [f32; 8];

    /// [`one`](Float::one), at byte `at` of the tiles.
    ///
    /// # Safety
    /// As `bulk::load16`.
    unsafe fn tile_one(at: u32) -> f32;

    /// [`eight`](Float::eight), likewise.
    ///
    /// # Safety
    /// As `bulk::load16`.
    unsafe fn tile_eight(at: u32) -> [f32; 8];
}

pub(super) fn widen_brain(v: [u32; 4]) -> [f32; 8] {
    let (low, high) = (|u: u32| f32::from_bits(u << 16), |u: u32| f32::from_bits(u & 0xffff_0000));
    [low(v[0]), high(v[0]), low(v[1]), high(v[1]), low(v[2]), high(v[2]), low(v[3]), high(v[3])]
}

pub(super) fn widen_half(v: [u32; 4]) -> [f32; 8] {
    let (low, high) = (|u: u32| f16_to_f32(u as u16), |u: u32| f16_to_f32((u >> 16) as u16));
    [low(v[0]), high(v[0]), low(v[1]), high(v[1]), low(v[2]), high(v[2]), low(v[3]), high(v[3])]
}

/// The floats whose bits these are.
pub(crate) fn singles(a: [u32; 4], b: [u32; 4]) -> [f32; 8] {
    let f = f32::from_bits;
    [f(a[0]), f(a[1]), f(a[2]), f(a[3]), f(b[0]), f(b[1]), f(b[2]), f(b[3])]
}

unsafe fn load16(from: *const u8, stream: bool) -> [u32; 4] {
    // SAFETY: the caller promises 16 aligned bytes of global memory.
    unsafe { if stream { memory::load16_stream(from) } else { memory::load16(from) } }
}

#[derive(Clone, Copy)]
struct Single;
#[derive(Clone, Copy)]
struct Brain;
#[derive(Clone, Copy)]
struct Half;

impl Float for Single {
    const BYTES: usize = 4;

    unsafe fn one(from: *const u8) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { memory::load(from.cast::<f32>()) }
    }

    unsafe fn eight(from: *const u8, stream: bool) -> [f32; 8] {
        // SAFETY: the caller promises 32 bytes.
        unsafe { singles(load16(from, stream), load16(from.add(16), stream)) }
    }

    unsafe fn tile_one(at: u32) -> f32 {
        // SAFETY: the caller's promise.
        f32::from_bits(unsafe { bulk::load4(at) })
    }

    unsafe fn tile_eight(at: u32) -> [f32; 8] {
        // SAFETY: the caller's promise.
        unsafe { singles(bulk::load16(at), bulk::load16(at + 16)) }
    }
}

impl Float for Brain {
    const BYTES: usize = 2;

    unsafe fn one(from: *const u8) -> f32 {
        // SAFETY: the caller's promise.
        f32::from_bits(u32::from(unsafe { memory::load(from.cast::<u16>()) }) << 16)
    }

    unsafe fn eight(from: *const u8, stream: bool) -> [f32; 8] {
        // SAFETY: the caller promises 16 bytes.
        widen_brain(unsafe { load16(from, stream) })
    }

    unsafe fn tile_one(at: u32) -> f32 {
        // SAFETY: the caller's promise.
        f32::from_bits(u32::from(unsafe { bulk::load2(at) }) << 16)
    }

    unsafe fn tile_eight(at: u32) -> [f32; 8] {
        // SAFETY: the caller's promise.
        widen_brain(unsafe { bulk::load16(at) })
    }
}

impl Float for Half {
    const BYTES: usize = 2;

    unsafe fn one(from: *const u8) -> f32 {
        // SAFETY: the caller's promise.
        f16_to_f32(unsafe { memory::load(from.cast::<u16>()) })
    }

    unsafe fn eight(from: *const u8, stream: bool) -> [f32; 8] {
        // SAFETY: the caller promises 16 bytes.
        widen_half(unsafe { load16(from, stream) })
    }

    unsafe fn tile_one(at: u32) -> f32 {
        // SAFETY: the caller's promise.
        f16_to_f32(unsafe { bulk::load2(at) })
    }

    unsafe fn tile_eight(at: u32) -> [f32; 8] {
        // SAFETY: the caller's promise.
        widen_half(unsafe { bulk::load16(at) })
    }
}

/// Up to R rows of activations, as [`dots`] goes through them.
trait Values<const R: usize>: Copy {
    /// Whether eight elements may be fetched at once from element `at` on, and from every eighth after it.
    fn by_eight(&self, at: usize) -> bool;

    /// Element `at` of row `j`.
    ///
    /// # Safety
    /// It is there.
    unsafe fn one(&self, j: usize, at: usize) -> f32;

    /// Eight elements of row `j` from `at` on.
    ///
    /// # Safety
    /// They are there, and [`by_eight`](Values::by_eight).
    unsafe fn eight(&self, j: usize, at: usize) -> [f32; 8];
}

/// Rows in global memory.
#[derive(Clone, Copy)]
struct Global<X, const R: usize>([*const u8; R], PhantomData<X>);

impl<X: Float + Copy, const R: usize> Global<X, R> {
    /// Those of operand `x` that count as `x.first` and on, from element `first` on.
    unsafe fn new(x: &Rows<'_>, first: u32) -> Global<X, R> {
        let mut rows = [core::ptr::null::<u8>(); R];
        for j in 0..R {
            // SAFETY: operand `x` is a matrix with that element (caller).
            rows[j] = unsafe { memory::opaque(x.call.tensor(slot::X).address([row(x, j), first])).cast_const() };
        }
        Global(rows, PhantomData)
    }
}

impl<X: Float + Copy, const R: usize> Values<R> for Global<X, R> {
    fn by_eight(&self, at: usize) -> bool {
        let mut misplaced = 0;
        for j in 0..R {
            misplaced |= self.0[j].wrapping_add(at * X::BYTES).addr() % 16;
        }
        misplaced == 0
    }

    unsafe fn one(&self, j: usize, at: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { X::one(self.0[j].add(at * X::BYTES)) }
    }

    unsafe fn eight(&self, j: usize, at: usize) -> [f32; 8] {
        // SAFETY: the caller's promise.
        unsafe { X::eight(self.0[j].add(at * X::BYTES), false) }
    }
}

/// The row that [`ready_and_staged`] has put into shared memory, from a word on.
#[derive(Clone, Copy)]
struct Staged(u32);

impl Values<1> for Staged {
    fn by_eight(&self, at: usize) -> bool {
        (self.0 + at as u32).is_multiple_of(4)
    }

    unsafe fn one(&self, _: usize, at: usize) -> f32 {
        // SAFETY: the caller's promise; nobody writes the row before the block's next barrier.
        f32::from_bits(unsafe { shared::load(self.0 + at as u32) })
    }

    unsafe fn eight(&self, _: usize, at: usize) -> [f32; 8] {
        let at = self.0 + at as u32;
        // SAFETY: as in `one`.
        unsafe { singles(shared::load16(at), shared::load16(at + 4)) }
    }
}

/// Where the staged row starts.
pub(crate) const STAGE: u32 = FREE_SHARED;

const _: () = assert!(STAGE.is_multiple_of(4) && STAGE + MAX_NORMED <= shared::KEPT, "a staged row has room");

/// The row to be staged.
trait Source: Copy {
    /// # Safety
    /// Element `at` is there.
    unsafe fn one(&self, at: u32) -> f32;
}

impl Source for First<'_> {
    unsafe fn one(&self, at: u32) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { self.call.told(slot::X, &self.x, [0, at], self.call.ask(&self.x, [0, at])) }
    }
}

/// What the splits of an attention found, merged.
impl Source for Parts<'_> {
    unsafe fn one(&self, at: u32) -> f32 {
        let place = Parts::place(self, at);
        // SAFETY: the caller's promise.
        let [merged] = unsafe { self.merged(place) };
        merged
    }
}

/// How a row is staged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Staging {
    /// The operand of weights it is normalised with, if that is there.
    pub(crate) norm: usize,
    /// Added to its mean square then.
    pub(crate) eps: f32,
    /// Whether that operand is no weights, which come in a tile, but sums of squares: see
    /// [`weighted`](super::weighted).
    pub(crate) is_weighted: bool,
    /// Whether operand `x` is what an attention's splits found, and the row what they make together.
    pub(crate) merges: bool,
    /// An operand and the dimension of it that has as many elements as the row.
    pub(crate) like: (usize, usize),
}

/// Calls `ready`; then, if `staged`, puts row 0 of operand `x` into shared memory, normalised, if operand `norm` is
/// there, by its root mean square and the weights that are operand `norm`: x * rsqrt(mean(x^2) + eps) * weight, as
/// [`RmsNorm`](crate::kernels::RmsNorm) has it. The weights come from the task's next tile if it has tiles.
///
/// # Safety
/// Every thread of the block makes this same call, no thread reads what was staged before any more; operand `x` makes
/// one row of as many elements as `like` says, at most [`MAX_NORMED`], and operand `norm` has as many. Where there is a
/// norm it is `staged`.
///
/// # Errors
/// Those of `ready`.
pub(crate) unsafe fn ready_and_staged(
    call: &Call<'_>,
    how: Staging,
    staged: bool,
    block: &Block,
    ready: impl Fn() -> Result<(), Fault>,
) -> Result<(), Fault> {
    // SAFETY: the caller's promises; the tile is released whatever `ready` says.
    unsafe {
        let is_normed = call.tensor(how.norm).is_present() && !how.is_weighted;
        let tiles = call.tiles.filter(|tiles| is_normed && tiles.left() > 0);
        let tile = if let Some(tiles) = tiles { tiles.take() } else { Tile::NONE };
        let merge = if how.merges { Merge::of(&call.tensor(slot::X)) } else { Merge::NONE };
        let outcome = ready();
        if staged && outcome.is_ok() {
            if how.merges {
                stage(call, how, tile, &Parts::new(call, merge), block);
            } else {
                stage(call, how, tile, &First { call, x: call.tensor(slot::X) }, block);
            }
        }
        if let Some(tiles) = tiles {
            tiles.release(tile);
        }
        outcome
    }
}

/// Puts row 0 of operand `x` into shared memory, as [`ready_and_staged`] does where neither merge nor tiles are.
///
/// # Safety
/// As [`ready_and_staged`]; the task's waits have been met.
pub(crate) unsafe fn stage_first(call: &Call<'_>, how: Staging, block: &Block) {
    // SAFETY: the caller's promises.
    unsafe { stage(call, how, Tile::NONE, &First { call, x: call.tensor(slot::X) }, block) }
}

/// Puts row `x` into shared memory, with the norm's weights in `tile` if that has bytes.
///
/// # Safety
/// As [`ready_and_staged`].
unsafe fn stage(call: &Call<'_>, how: Staging, tile: Tile, x: &impl Source, block: &Block) {
    // SAFETY: the caller's promises; a thread writes its own words, which others read after the barrier.
    unsafe {
        let k = call.tensor(how.like.0).extent(how.like.1);
        let weights = call.tensor(how.norm);
        let mut scale = 1.0;
        if weights.is_present() {
            let mut squares = 0.0;
            for at in block.mine(k) {
                let value = x.one(at);
                squares = fma(value, value, squares);
            }
            scale = rsqrt(block.sum(squares) / k as f32 + how.eps);
        }
        for at in block.mine(k) {
            let weight = match (tile.bytes, weights.dtype()) {
                _ if !weights.is_present() => 1.0,
                (0, _) => weights.get([at]),
                (_, F32) => Single::tile_one(tile.at + 4 * at),
                (_, BF16) => Brain::tile_one(tile.at + 2 * at),
                _ => Half::tile_one(tile.at + 2 * at),
            };
            shared::store(STAGE + at, (x.one(at) * scale * weight).to_bits());
        }
        block.sync();
    }
}

/// The activations that [`dots`] multiplies: up to R rows from `first` on.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    /// Operand `x` of the call: the matrix, each row contiguous.
    pub(crate) call: &'a Call<'a>,
    /// Rows that count.
    pub(crate) rows: u32,
    /// The first one.
    pub(crate) first: u32,
    /// Whether the one row there is has been [staged](ready_and_staged).
    pub(crate) staged: bool,
}

/// `x[first + j, :] . w[n, :]` with operand `w` of the call, for j below R, the same in every lane; j beyond the rows
/// that count repeat the last one.
///
/// # Safety
/// Every lane of the warp makes this same call; operands `x` and `w` are matrices of floats with the same number of
/// columns, each row contiguous; `n` and `first` are rows of theirs and `rows` is at most x's.
pub(crate) unsafe fn dots<const R: usize>(x: Rows<'_>, w: usize, n: u32, lane: u32) -> [f32; R] {
    // SAFETY: the caller's promises; the types are the tensors'.
    let mut sums = unsafe {
        let types = (x.call.tensor(w).dtype(), x.call.tensor(slot::X).dtype());
        if R == 1 && x.staged {
            let staged = Staged(STAGE);
            let [sum] = match types.0 {
                Q8 => [in_fewer_bits::<Eight>(&x, staged, w, n, lane)],
                Q4 | MX4 | INT4 => [in_fewer_bits::<Four>(&x, staged, w, n, lane)],
                BF16 => typed::<Brain, _, 1>(&x, staged, w, n, lane),
                F16 => typed::<Half, _, 1>(&x, staged, w, n, lane),
                _ => typed::<Single, _, 1>(&x, staged, w, n, lane),
            };
            [sum; R]
        } else {
            match types {
                // Too long to be staged, and nobody's favourite, as are the other pairs below.
                _ if is_flagged::<R>(&x) => one_by_one::<R>(&x, w, n, lane),
                (Q8, F32) if R == 1 => [in_fewer_bits::<Eight>(&x, Global::<Single, 1>::new(&x, 0), w, n, lane); R],
                (Q8, BF16) if R == 1 => [in_fewer_bits::<Eight>(&x, Global::<Brain, 1>::new(&x, 0), w, n, lane); R],
                (Q4 | MX4 | INT4, F32) if R == 1 => {
                    [in_fewer_bits::<Four>(&x, Global::<Single, 1>::new(&x, 0), w, n, lane); R]
                }
                (Q4 | MX4 | INT4, BF16) if R == 1 => {
                    [in_fewer_bits::<Four>(&x, Global::<Brain, 1>::new(&x, 0), w, n, lane); R]
                }
                (BF16, F32) => typed::<Brain, _, R>(&x, Global::<Single, R>::new(&x, 0), w, n, lane),
                (BF16, BF16) => typed::<Brain, _, R>(&x, Global::<Brain, R>::new(&x, 0), w, n, lane),
                (F32, F32) => typed::<Single, _, R>(&x, Global::<Single, R>::new(&x, 0), w, n, lane),
                (F16, F32) => typed::<Half, _, R>(&x, Global::<Single, R>::new(&x, 0), w, n, lane),
                (F16, F16) => typed::<Half, _, R>(&x, Global::<Half, R>::new(&x, 0), w, n, lane),
                _ => one_by_one::<R>(&x, w, n, lane),
            }
        }
    };
    for sum in &mut sums {
        // SAFETY: whole warps are here (caller).
        *sum = unsafe { warp::sum(*sum) };
    }
    sums
}

/// A row of activations that [`two_dots`] multiplies: the one that has been [staged](ready_and_staged), or one in
/// global memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Vector {
    /// Whether it has been staged.
    pub(crate) staged: bool,
    /// Where it lies else.
    pub(crate) row: Row,
}

/// The sums of the products of `k` elements of `x` with `a` and with `b`, the same in every lane. Eight loads are under
/// way.
///
/// # Safety
/// Every lane of the warp makes this same call; the rows have so many elements.
pub(crate) unsafe fn two_dots(x: Vector, [a, b]: [Row; 2], k: u32, lane: u32) -> [f32; 2] {
    // SAFETY: the caller's promises; the types are the rows', and whole eights stand on sixteen bytes.
    unsafe {
        let are_whole = k.is_multiple_of(8) && a.is_aligned(16) && b.is_aligned(16) && a.is(BF16) && b.is(BF16);
        // A staged row goes to `thin::afar` wherever that is possible.
        let [a, b] = if are_whole && !x.staged && x.row.is(F32) && x.row.is_aligned(16) {
            two_of_brains(Global::<Single, 1>([x.row.start()], PhantomData), [a, b], k, lane)
        } else {
            [each_of_dot(x, a, k, lane), each_of_dot(x, b, k, lane)]
        };
        [warp::sum(a), warp::sum(b)]
    }
}

/// The sum of the products of `k` elements of `x` with `w`, the same in every lane.
///
/// # Safety
/// As [`two_dots`].
pub(crate) unsafe fn one_dot(x: Vector, w: Row, k: u32, lane: u32) -> f32 {
    // SAFETY: the caller's promise.
    unsafe { warp::sum(each_of_dot(x, w, k, lane)) }
}

/// A lane's share of [`two_dots`] with whole eights of bf16.
unsafe fn two_of_brains(x: impl Values<1>, [a, b]: [Row; 2], k: u32, lane: u32) -> [f32; 2] {
    let chunks = k / 8;
    let [mut s, mut t, mut u, mut v] = [[0.0; 2]; 4];
    let mut at = lane;
    // SAFETY: the caller's promises; a chunk that is not there is the first one, and does not count.
    unsafe {
        while at < chunks {
            let [c, d, e] = [at + WARP, at + 2 * WARP, at + 3 * WARP];
            let place = |chunk: u32| 8 * if chunk < chunks { chunk } else { 0 };
            let ask = |chunk: u32| [load16(a.at(place(chunk)), true), load16(b.at(place(chunk)), true)];
            let (first, second, third, fourth) = (ask(at), ask(c), ask(d), ask(e));
            let value = |chunk: u32| x.eight(0, place(chunk) as usize);
            s = added(s, first, value(at), 1.0);
            t = added(t, second, value(c), if c < chunks { 1.0 } else { 0.0 });
            u = added(u, third, value(d), if d < chunks { 1.0 } else { 0.0 });
            v = added(v, fourth, value(e), if e < chunks { 1.0 } else { 0.0 });
            at += 4 * WARP;
        }
    }
    [(s[0] + t[0]) + (u[0] + v[0]), (s[1] + t[1]) + (u[1] + v[1])]
}

/// `sums` with the products of `values` with two eights of weights, `part` of them: all or none.
fn added(sums: [f32; 2], weights: [[u32; 4]; 2], values: [f32; 8], part: f32) -> [f32; 2] {
    let (a, b) = (widen_brain(weights[0]), widen_brain(weights[1]));
    let [mut s, mut t] = sums;
    for i in 0..8 {
        let value = values[i] * part;
        s = fma(a[i], value, s);
        t = fma(b[i], value, t);
    }
    [s, t]
}

/// A lane's share of a row's products, of any types and any alignment.
unsafe fn each_of_dot(x: Vector, w: Row, k: u32, lane: u32) -> f32 {
    let (mut sum, mut at) = (0.0, lane);
    while at < k {
        // SAFETY: `at` is below k, the length of both rows.
        unsafe {
            let value = if x.staged { Staged(STAGE).one(0, at as usize) } else { x.row.get(at) };
            sum = fma(w.weight(at), value, sum);
        }
        at += WARP;
    }
    sum
}

/// The sum, over the `chosen` experts that were `found`, of the products of row `[r, slot]` of operand `x` with row
/// `[expert, column]` of operand `w`, the same in every lane. Four loads are under way however short a row is, since
/// one expert's follow the other's.
///
/// # Safety
/// Every lane of the warp makes this same call; the operands are of rank 3 and have those rows, of one length.
pub(crate) unsafe fn dot_of_parts(
    call: &Call<'_>,
    [x, w]: [usize; 2],
    [r, column]: [u32; 2],
    chosen: u32,
    found: Found,
    lane: u32,
) -> f32 {
    // SAFETY: the caller's promises; whole eights on sixteen bytes.
    unsafe {
        let (rows, weights) = (call.tensor(x), call.tensor(w));
        let k = weights.extent(2);
        let is_whole = |tensor: &Tensor, elem: u32| {
            let apart = tensor.stride(0) | tensor.stride(1);
            tensor.weight_row([0, 0]).is_aligned(16) && (apart * elem).is_multiple_of(16)
        };
        let are_whole = k > 0 && k.is_multiple_of(8) && is_whole(&weights, 2) && is_whole(&rows, 4);
        let mut sum = 0.0;
        if are_whole && weights.dtype() == BF16 && rows.dtype() == F32 {
            let mut parts = PartsOf {
                rows,
                weights,
                at: [r, column],
                chosen,
                found,
                slot: 0,
                chunk: lane,
                from: [core::ptr::null(); 2],
            };
            parts.settle();
            let [mut s, mut t, mut u, mut v] = [0.0; 4];
            while parts.slot < chosen {
                let (a, b, c, d) = (parts.ask(), parts.ask(), parts.ask(), parts.ask());
                (s, t, u, v) = (one_added(s, a), one_added(t, b), one_added(u, c), one_added(v, d));
            }
            sum = (s + t) + (u + v);
        } else {
            let mut slot = 0;
            while slot < chosen {
                let x = Vector { staged: false, row: rows.row([r, slot]) };
                sum += each_of_dot(x, weights.weight_row([found.expert(slot), column]), k, lane);
                slot += 1;
            }
        }
        warp::sum(sum)
    }
}

/// `sum` with the products of eight weights and values.
fn one_added(mut sum: f32, (weights, values): ([u32; 4], [f32; 8])) -> f32 {
    let weights = widen_brain(weights);
    for i in 0..8 {
        sum = fma(weights[i], values[i], sum);
    }
    sum
}

/// What a lane of [`dot_of_parts`] goes through: from a chunk of eight to the one a warp further, and from a slot to
/// the next.
struct PartsOf {
    rows: Tensor,
    weights: Tensor,
    /// Row and column.
    at: [u32; 2],
    chosen: u32,
    found: Found,
    slot: u32,
    chunk: u32,
    /// The slot's weights, and what they are multiplied with.
    from: [*const u8; 2],
}

impl PartsOf {
    /// Goes on in the next slot where one has no such chunk; then, and at first, finds out where that slot's are.
    ///
    /// # Safety
    /// As [`dot_of_parts`].
    unsafe fn settle(&mut self) {
        let chunks = self.weights.extent(2) / 8;
        if self.chunk < chunks && !self.from[0].is_null() {
            return;
        }
        while self.chunk >= chunks {
            self.chunk -= chunks;
            self.slot += 1;
        }
        if self.slot < self.chosen {
            let [r, column] = self.at;
            // SAFETY: the caller's promise.
            let expert = unsafe { self.found.expert(self.slot) };
            self.from = [self.weights.address([expert, column, 0]), self.rows.address([r, self.slot, 0])];
        }
    }

    /// Asks for the weights of the chunk it is at, and what they are multiplied with, if there is one, and goes on.
    ///
    /// # Safety
    /// As [`dot_of_parts`], where all is whole.
    unsafe fn ask(&mut self) -> ([u32; 4], [f32; 8]) {
        let mut asked = ([0; 4], [0.0; 8]);
        if self.slot < self.chosen {
            let at = self.chunk as usize;
            // SAFETY: the caller's promises; the slot and the chunk are there.
            unsafe {
                let [weights, values] = self.from;
                asked =
                    (load16(weights.wrapping_add(16 * at), true), Single::eight(values.wrapping_add(32 * at), false));
                self.chunk += WARP;
                self.settle();
            }
        }
        asked
    }
}

/// The row of x that counts as `first + j`.
fn row(x: &Rows<'_>, j: usize) -> u32 {
    let row = x.first + j as u32;
    if row < x.rows { row } else { x.rows - 1 }
}

/// Whether the one row that there is says element by element whether it is there.
fn is_flagged<const R: usize>(x: &Rows<'_>) -> bool {
    // SAFETY: operand `x` is there (caller).
    R == 1 && unsafe { x.call.tensor(slot::X) }.is_flagged()
}

/// Element `at` of row `j`, however it lies.
unsafe fn value<const R: usize>(x: &Rows<'_>, j: usize, at: u32) -> f32 {
    // SAFETY: the element is there (caller), or will be.
    unsafe {
        match x.call.tensor(slot::X) {
            _ if x.staged => Staged(STAGE).one(j, at as usize),
            x_all if is_flagged::<R>(x) => First { call: x.call, x: x_all }.one(at),
            x_all => x_all.get([row(x, j), at]),
        }
    }
}

/// A lane's share of [`dots`] for any types and any alignment.
unsafe fn one_by_one<const R: usize>(x: &Rows<'_>, w: usize, n: u32, lane: u32) -> [f32; R] {
    // SAFETY: operand `x` is a matrix like operand `w` (caller).
    let w = unsafe { x.call.tensor(w) };
    let mut sums = [0f32; R];
    let mut at = lane;
    while at < w.extent(1) {
        // SAFETY: `at` is below k, the length of all these rows.
        unsafe {
            let weight = w.weight([n, at]);
            for j in 0..R {
                sums[j] = fma(weight, value::<R>(x, j, at), sums[j]);
            }
        }
        at += WARP;
    }
    sums
}

/// A lane's share of [`dots`] in steps of eight elements.
unsafe fn typed<W: Float, V: Values<R>, const R: usize>(
    x: &Rows<'_>,
    values: V,
    w_at: usize,
    n: u32,
    lane: u32,
) -> [f32; R] {
    const LANES: usize = WARP as usize;
    // SAFETY: the operand is a matrix (caller).
    let w = unsafe { x.call.tensor(w_at) };
    let k = w.extent(1) as usize;
    let w_row: *const u8 = memory::opaque(w.address([n, 0]));
    let head = ((w_row.addr().wrapping_neg() % 16) / W::BYTES).min(k);
    if !values.by_eight(head) {
        // SAFETY: the caller's promises.
        return unsafe { one_by_one(x, w_at, n, lane) };
    }
    let body = w_row.wrapping_add(head * W::BYTES);
    let chunks = (k - head) / 8;
    let lane = lane as usize;
    let mut sums = [0f32; R];
    // SAFETY: every element is one of the first k of its row; chunks start on 16 bytes in all rows.
    unsafe {
        let mut chunk = lane;
        if R == 1 {
            // Decoding: the weights' latency is all there is, so four loads are under way before the first is used.
            while chunk + 3 * LANES < chunks {
                let a = W::eight(body.add(8 * chunk * W::BYTES), true);
                let b = W::eight(body.add(8 * (chunk + LANES) * W::BYTES), true);
                let c = W::eight(body.add(8 * (chunk + 2 * LANES) * W::BYTES), true);
                let d = W::eight(body.add(8 * (chunk + 3 * LANES) * W::BYTES), true);
                multiply(&mut sums, &a, &values, head + 8 * chunk);
                multiply(&mut sums, &b, &values, head + 8 * (chunk + LANES));
                multiply(&mut sums, &c, &values, head + 8 * (chunk + 2 * LANES));
                multiply(&mut sums, &d, &values, head + 8 * (chunk + 3 * LANES));
                chunk += 4 * LANES;
            }
        }
        while chunk < chunks {
            let weights = W::eight(body.add(8 * chunk * W::BYTES), true);
            multiply(&mut sums, &weights, &values, head + 8 * chunk);
            chunk += LANES;
        }
        // What stands before the first chunk and after the last: fewer than 8 elements each, a lane to each.
        let tail = head + 8 * chunks;
        let at = if lane < head { lane } else { tail + lane - head };
        if lane < head + k - tail {
            let weight = W::one(w_row.add(at * W::BYTES));
            for j in 0..R {
                sums[j] = fma(weight, values.one(j, at), sums[j]);
            }
        }
    }
    sums
}

/// A lane's share of [`dots`] of one row with weights in fewer bits, in steps of sixteen elements. (More rows go to
/// `wide`.)
unsafe fn in_fewer_bits<P: Packed>(x: &Rows<'_>, values: impl Values<1>, w_at: usize, n: u32, lane: u32) -> f32 {
    // SAFETY: the operand is a matrix (caller).
    let w = unsafe { x.call.tensor(w_at) };
    let (row, k) = (memory::opaque(w.packed_row([n]).cast_mut()), w.extent(1));
    if !values.by_eight(0) || !row.addr().is_multiple_of(16) {
        // SAFETY: the caller's promises.
        let [sum] = unsafe { one_by_one(x, w_at, n, lane) };
        return sum;
    }
    let (units, table) = (k / 16, P::table(w.dtype()));
    let mut sum = 0.0;
    // SAFETY: every element is one of the first k of its row; sixteen are a line's, on sixteen bytes.
    unsafe {
        // Of a unit that is not there the first one, times zero.
        let ask = |unit: u32| {
            let is_there = unit < units;
            let at = if is_there { 16 * unit } else { 0 };
            let (byte, scale_at) = P::element(at);
            let scale = P::scale(memory::load(row.wrapping_add(scale_at as usize / 4 * 4).cast()), scale_at);
            (at, memory::load16_stream(row.wrapping_add(byte as usize)), if is_there { scale } else { 0.0 })
        };
        let mut unit = lane;
        while unit < units {
            // As in `typed`, four loads are under way before the first is used.
            let (a, b) = (ask(unit), ask(unit + WARP));
            let (c, d) = (ask(unit + 2 * WARP), ask(unit + 3 * WARP));
            sum = sixteen_added::<P>(table, sum, a, &values);
            sum = sixteen_added::<P>(table, sum, b, &values);
            sum = sixteen_added::<P>(table, sum, c, &values);
            sum = sixteen_added::<P>(table, sum, d, &values);
            unit += 4 * WARP;
        }
        let at = 16 * units + lane;
        if at < k {
            sum = fma(w.weight([n, at]), values.one(0, at as usize), sum);
        }
    }
    sum
}

/// `sum` with sixteen weights in fewer bits, of one scale, times the elements of the row from `at` on.
unsafe fn sixteen_added<P: Packed>(
    table: P::Table,
    sum: f32,
    (at, [w0, w1, w2, w3], scale): (u32, [u32; 4], f32),
    values: &impl Values<1>,
) -> f32 {
    // SAFETY: the caller promises that the row has these elements, aligned.
    let (low, high) = unsafe { (values.eight(0, at as usize), values.eight(0, at as usize + 8)) };
    let part = |sum: f32, bytes: u32, values: [f32; 4]| {
        let [a, b, c, d] = bytes_less(bytes, P::MORE);
        fma(d, values[3], fma(c, values[2], fma(b, values[1], fma(a, values[0], sum))))
    };
    let eight = |words: (u32, u32), [a, b, c, d, e, f, g, h]: [f32; 8]| {
        let (one, other) = P::eight(table, words, at);
        part(part(0.0, one, [a, b, c, d]), other, [e, f, g, h])
    };
    fma(eight((w0, w1), low) + eight((w2, w3), high), scale, sum)
}

/// What becomes of sums of `N` matrices' rows. (A closure need not become part of its caller, if that is large, and
/// what does not is a call.)
pub(crate) trait Outputs<const N: usize> {
    /// Writes output `n` of the one row, of which these are the sums.
    ///
    /// # Safety
    /// The call's operands have it.
    unsafe fn finish(&self, n: u32, sums: [f32; N]);
}

/// Takes the task's tiles, which hold the rows of its N weight matrices (operands `w` and up, all alike), a tile of
/// each in turn: whole rows, or, of rows longer than a tile, pieces. A warp's row is the one whose number it is, and so
/// on by the number of warps; `outputs.finish(n, sums)` is called on one lane for each row n of the matrices.
///
/// # Safety
/// Every thread of the block makes this same call; operand `x` is a matrix of floats of one row and the tiles are those
/// of a plan for this task; `staged` where the row has been [staged](ready_and_staged).
pub(crate) unsafe fn tiled<const N: usize>(
    call: &Call<'_>,
    tiles: &Tiles<'_>,
    block: &Block,
    staged: bool,
    outputs: &impl Outputs<N>,
) {
    // SAFETY: the caller's promises; the conditions around `tile_dot` depend on the warp and the task alone.
    unsafe {
        let w = call.tensor(slot::W);
        // Of weights in fewer bits a row is its bytes, of which a tile never has a part.
        let (k, elem) = match w.dtype() {
            Q8 => (Eight::row_bytes(w.extent(1)), 1),
            Q4 | MX4 | INT4 => (Four::row_bytes(w.extent(1)), 1),
            F32 => (w.extent(1), 4),
            _ => (w.extent(1), 2),
        };
        let lane = block.lane();
        // Where in the matrices the next tile starts, and whose row that is.
        let (mut n, mut first, mut warp) = (0, 0, 0);
        let mut sums = [0f32; N];
        while tiles.left() >= N as u32 {
            let mut taken = [tiles.take(); N];
            for i in 1..N {
                taken[i] = tiles.take();
            }
            let len = taken[0].bytes / elem;
            let mut at = 0;
            while at < len {
                let part = if k - first < len - at { k - first } else { len - at };
                if warp == block.warp() {
                    // The same code serves all matrices; after N turns each is in its place again.
                    let mut which = 0;
                    while which < N {
                        let stretch = Stretch { at: taken[0].at + at * elem, first, len: part };
                        let row = Rows { call, rows: 1, first: 0, staged };
                        let sum = sums[0] + tile_dot(row, 1 + which, stretch, lane);
                        turn(&mut taken);
                        turn(&mut sums);
                        sums[N - 1] = sum;
                        which += 1;
                    }
                    if first + part == k {
                        if lane == 0 {
                            outputs.finish(n, sums);
                        }
                        sums = [0.0; N];
                    }
                }
                at += part;
                first += part;
                if first == k {
                    first = 0;
                    n += 1;
                    warp = if warp + 1 == block.warps() { 0 } else { warp + 1 };
                }
            }
            for i in 0..N {
                tiles.release(taken[i]);
            }
        }
    }
}

/// A lane's share of the products with a row of operand `w`, weights in fewer bits, at byte `row` of the tiles.
unsafe fn one_by_one_of_tile<P: Packed>(x: &Rows<'_>, w: &Tensor, row: u32, lane: u32) -> f32 {
    let (mut sum, mut at) = (0.0, lane);
    while at < w.extent(1) {
        let (byte, scale) = P::element(at);
        // SAFETY: `at` is below k, the length of the row.
        unsafe {
            let (word, scale_word) = (bulk::load4(row + byte / 4 * 4), bulk::load4(row + scale / 4 * 4));
            let weight = P::one(P::table(w.dtype()), word, at) * P::scale(scale_word, scale);
            sum = fma(weight, value::<1>(x, 0, at), sum);
        }
        at += WARP;
    }
    sum
}

/// Moves the first to the end.
fn turn<T: Copy, const N: usize>(values: &mut [T; N]) {
    let first = values[0];
    for i in 1..N {
        values[i - 1] = values[i];
    }
    values[N - 1] = first;
}

/// Part of a weight row in a tile.
#[derive(Clone, Copy)]
struct Stretch {
    /// The tile's byte it starts at, a multiple of 16.
    at: u32,
    /// The element of the row it starts with.
    first: u32,
    /// Its elements.
    len: u32,
}

/// What `part` of a row of operand `w` adds to [`dots`] of one row of x.
unsafe fn tile_dot(x: Rows<'_>, w: usize, part: Stretch, lane: u32) -> f32 {
    // SAFETY: the caller's promises; the types are the tensors'; whole warps are here.
    unsafe {
        let types = (x.call.tensor(w).dtype(), x.call.tensor(slot::X).dtype());
        let sum = if Eight::is_of(types.0) {
            one_by_one_of_tile::<Eight>(&x, &x.call.tensor(w), part.at, lane)
        } else if Four::is_of(types.0) {
            one_by_one_of_tile::<Four>(&x, &x.call.tensor(w), part.at, lane)
        } else if x.staged {
            let staged = Staged(STAGE + part.first);
            match types.0 {
                BF16 => tile_typed::<Brain, _>(&x, staged, part, lane),
                F16 => tile_typed::<Half, _>(&x, staged, part, lane),
                _ => tile_typed::<Single, _>(&x, staged, part, lane),
            }
        } else {
            match types {
                (BF16, F32) if !is_flagged::<1>(&x) => {
                    tile_typed::<Brain, _>(&x, Global::<Single, 1>::new(&x, part.first), part, lane)
                }
                (F32, F32) if !is_flagged::<1>(&x) => {
                    tile_typed::<Single, _>(&x, Global::<Single, 1>::new(&x, part.first), part, lane)
                }
                (F16, F32) if !is_flagged::<1>(&x) => {
                    tile_typed::<Half, _>(&x, Global::<Single, 1>::new(&x, part.first), part, lane)
                }
                (BF16, _) => tile_one_by_one::<Brain>(&x, part, lane),
                (F16, _) => tile_one_by_one::<Half>(&x, part, lane),
                _ => tile_one_by_one::<Single>(&x, part, lane),
            }
        };
        warp::sum(sum)
    }
}

/// A lane's share of [`tile_dot`] for any x.
unsafe fn tile_one_by_one<W: Float>(x: &Rows<'_>, part: Stretch, lane: u32) -> f32 {
    // SAFETY: x has the elements the part goes by.
    unsafe {
        let mut sum = 0.0;
        let mut at = lane;
        while at < part.len {
            let weight = W::tile_one(part.at + at * W::BYTES as u32);
            sum = fma(weight, value::<1>(x, 0, part.first + at), sum);
            at += WARP;
        }
        sum
    }
}

/// A lane's share of [`tile_dot`] in steps of eight elements; `values` start where the part does.
unsafe fn tile_typed<W: Float, V: Values<1>>(x: &Rows<'_>, values: V, part: Stretch, lane: u32) -> f32 {
    // SAFETY: the values are those the part goes by (caller).
    unsafe {
        if !values.by_eight(0) {
            return tile_one_by_one::<W>(x, part, lane);
        }
        let chunks = part.len / 8;
        let mut sums = [0f32; 1];
        let mut chunk = lane;
        while chunk < chunks {
            let weights = W::tile_eight(part.at + 8 * chunk * W::BYTES as u32);
            multiply(&mut sums, &weights, &values, 8 * chunk as usize);
            chunk += WARP;
        }
        let at = 8 * chunks + lane;
        if at < part.len {
            let weight = W::tile_one(part.at + at * W::BYTES as u32);
            sums[0] = fma(weight, values.one(0, at as usize), sums[0]);
        }
        sums[0]
    }
}

/// Adds eight weights times the elements of each row from `at` on.
unsafe fn multiply<V: Values<R>, const R: usize>(sums: &mut [f32; R], weights: &[f32; 8], values: &V, at: usize) {
    for j in 0..R {
        // SAFETY: the caller promises that the rows have these elements, aligned.
        let values = unsafe { values.eight(j, at) };
        for i in 0..8 {
            sums[j] = fma(weights[i], values[i], sums[j]);
        }
    }
}

/// `values[at]` by comparisons, since an index known only at run time would put the array into memory.
pub(crate) fn pick(values: [f32; 4], at: u32) -> f32 {
    match at {
        0 => values[0],
        1 => values[1],
        2 => values[2],
        _ => values[3],
    }
}
