//! The row of activations as products take it: in shared memory, each element hi + lo, two bf16, which leaves out what
//! is below 2^-17 of it.

use super::super::flags::{Again, Read, unmarked};
use super::super::rows::{singles, widen_brain, widen_half};
use super::super::tiles::{Tile, Tiles};
use super::super::{BF16, Call, F32, Tensor};
use super::form::Form;
use crate::arch::scalar::{f32_to_bf16_pair, fma};
use crate::arch::{atomic, bulk, memory, shared};
use crate::block::{Block, FREE_SHARED};
use crate::kernels::MAX_NORMED;
use crate::kernels::attention_merge::Parts;
use crate::kernels::linear::slot;
use core::hint::cold_path;

/// Where the row starts: pairs of hi, then pairs of lo, in the order of [`term_at`].
pub(super) const TERMS: u32 = FREE_SHARED;

const _: () = assert!(TERMS.is_multiple_of(4) && TERMS + MAX_NORMED <= shared::KEPT, "a row has room");

/// Where pair `pair` of a term stands: of each four the first and the third come first, as a product takes them.
fn term_at(pair: u32) -> u32 {
    pair / 4 * 4 + pair % 2 * 2 + pair / 2 % 2
}

/// Two bf16 of each value, the first value's in the low halves, of which it is the sum but for 2^-17 of it: both first
/// ones, and both second.
pub(crate) fn in_two(values: [f32; 2]) -> [u32; 2] {
    let high = f32_to_bf16_pair(values[0], values[1]);
    let rest = |value: f32, high: u32| value - f32::from_bits(high);
    [high, f32_to_bf16_pair(rest(values[0], high << 16), rest(values[1], high & 0xffff_0000))]
}

/// The row to be staged.
pub(crate) trait Source: Copy {
    /// Calls `put(unit, true, values)` for every unit of eight of the `k` elements, on some thread; where warps do it
    /// `together`, all lanes of one call it, neighbours with neighbouring units, and those for which there is none with
    /// `false` and the last one.
    ///
    /// # Safety
    /// Every thread of the block makes this same call; they are there, or will be, and elements may be asked for by
    /// eight.
    unsafe fn each(&self, k: u32, together: bool, block: &Block, put: impl FnMut(u32, bool, [f32; 8]));
}

/// Units of which a thread has one in so many as there are threads.
#[derive(Clone, Copy)]
struct Units {
    units: u32,
    together: bool,
    lane: u32,
}

impl Units {
    fn of(k: u32, together: bool, block: &Block) -> Units {
        Units { units: k / 8, together, lane: block.lane() }
    }

    /// Whether there is unit `unit`, or, where warps go together, one for another lane.
    fn go_on(self, unit: u32) -> bool {
        if self.together { unit - self.lane < self.units } else { unit < self.units }
    }

    /// Unit `unit`, or the last one; and whether it is there.
    fn there(self, unit: u32) -> (u32, bool) {
        let is_there = unit < self.units;
        (if is_there { unit } else { self.units - 1 }, is_there)
    }
}

/// Row 0 of operand `x`, a matrix.
#[derive(Clone, Copy)]
pub(crate) struct First<'a> {
    pub(crate) call: &'a Call<'a>,
    pub(crate) x: Tensor,
}

/// Eight elements that have been asked for.
pub(super) type Asked = ([u32; 4], [u32; 4]);

impl First<'_> {
    /// Whether elements may be asked for by eight.
    pub(super) fn is_whole(&self) -> bool {
        self.x.dtype() == F32 && self.x.address([0, 0]).addr().is_multiple_of(16)
    }

    /// Asks for unit `unit`.
    ///
    /// # Safety
    /// It is there, and the row [is whole](First::is_whole).
    pub(super) unsafe fn ask(&self, unit: u32) -> Asked {
        let place = self.x.address([0, 0]).wrapping_add(32 * unit as usize);
        let next = place.wrapping_add(16);
        // SAFETY: the caller's promise.
        unsafe {
            if self.x.is_flagged() {
                (atomic::load16_relaxed(place.cast()), atomic::load16_relaxed(next.cast()))
            } else {
                cold_path();
                (memory::load16(place), memory::load16(next))
            }
        }
    }

    /// What was asked for of unit `unit`, once it is there.
    ///
    /// # Safety
    /// As [`ask`](First::ask).
    unsafe fn unit(&self, unit: u32, asked: Asked) -> [f32; 8] {
        // SAFETY: the caller's promise.
        self.values(self.there(asked, || unsafe { self.ask(unit) }))
    }

    /// What was asked for, or what `again` finds once it is there.
    pub(super) fn there<T: Read>(&self, asked: T, again: impl Again<T>) -> T {
        if self.x.is_flagged() { self.call.there(slot::X, asked, again) } else { asked }
    }

    /// What was asked for, which is there.
    pub(super) fn values(&self, asked: Asked) -> [f32; 8] {
        if !self.x.is_flagged() {
            cold_path();
            return singles(asked.0, asked.1);
        }
        let ([a, b, c, d], [e, f, g, h]) = (unmarked(asked.0), unmarked(asked.1));
        [a, b, c, d, e, f, g, h]
    }
}

impl Source for First<'_> {
    unsafe fn each(&self, k: u32, together: bool, block: &Block, mut put: impl FnMut(u32, bool, [f32; 8])) {
        let (mut unit, units) = (block.thread, Units::of(k, together, block));
        if !units.go_on(unit) {
            return;
        }
        // SAFETY: the caller's promise. Two are under way: memory answers long after it is asked.
        unsafe {
            let mut asked = self.ask(units.there(unit).0);
            loop {
                let next = unit + block.threads;
                // Beyond the last it is that one again, which costs nothing but its place in the queue.
                let next_asked = self.ask(units.there(next).0);
                let (here, is_there) = units.there(unit);
                put(here, !together || is_there, self.unit(here, asked));
                if !units.go_on(next) {
                    return;
                }
                (unit, asked) = (next, next_asked);
            }
        }
    }
}

/// What the splits of an attention found, merged.
impl Source for Parts<'_> {
    unsafe fn each(&self, k: u32, together: bool, block: &Block, mut put: impl FnMut(u32, bool, [f32; 8])) {
        let units = Units::of(k, together, block);
        if units.go_on(block.thread) {
            let (go_on, clamped) = (|unit| units.go_on(unit), |unit| units.there(unit).0);
            // SAFETY: the caller's promise.
            unsafe {
                self.each_eight(block.thread, block.threads, together, go_on, clamped, |unit, merged| {
                    let (here, is_there) = units.there(unit);
                    put(here, !together || is_there, merged);
                });
            }
        }
    }
}

/// The weights of a norm, in a tile.
#[derive(Clone, Copy)]
pub(super) struct Norm {
    /// 0: there is none.
    dtype: u16,
    tile: Tile,
}

impl Norm {
    /// Those of operand `norm`, if it is there, which are the task's next tile.
    ///
    /// # Safety
    /// As [`Tiles::take`].
    pub(super) unsafe fn take(tiles: &Tiles<'_>, norm: &Tensor) -> Norm {
        // SAFETY: the caller's promise.
        Norm { dtype: norm.dtype(), tile: if norm.is_present() { unsafe { tiles.take() } } else { Tile::NONE } }
    }

    /// Whether there are any.
    pub(super) fn is_present(&self) -> bool {
        self.dtype != 0
    }

    /// Those of unit `unit`.
    ///
    /// # Safety
    /// There are some, and the tile has not been [released](Norm::release).
    unsafe fn unit(&self, unit: u32) -> [f32; 8] {
        // SAFETY: the caller's promise.
        unsafe {
            if self.dtype == F32 {
                cold_path();
                let at = self.tile.at + 32 * unit;
                return singles(bulk::load16(at), bulk::load16(at + 16));
            }
            let words = bulk::load16(self.tile.at + 16 * unit);
            if self.dtype == BF16 {
                widen_brain(words)
            } else {
                cold_path();
                widen_half(words)
            }
        }
    }

    /// Releases the tile, if there is one.
    ///
    /// # Safety
    /// As [`Tiles::release`].
    pub(super) unsafe fn release(&self, tiles: &Tiles<'_>) {
        if self.is_present() {
            // SAFETY: the caller's promise.
            unsafe { tiles.release(self.tile) }
        }
    }
}

/// Where the terms of elements 8 * `unit` to 8 * `unit` + 7 of `k` stand, hi and lo.
pub(super) fn place_of(unit: u32, k: u32) -> (u32, u32) {
    (TERMS + 4 * unit, TERMS + k / 2 + 4 * unit)
}

/// Puts these elements there.
///
/// # Safety
/// The words are the thread's own.
pub(super) unsafe fn put_terms(unit: u32, values: [f32; 8], k: u32) {
    let (high_at, low_at) = place_of(unit, k);
    let (mut high, mut low) = ([0; 4], [0; 4]);
    for i in 0..4 {
        let at = term_at(i as u32) as usize;
        [high[at], low[at]] = in_two([values[2 * i], values[2 * i + 1]]);
    }
    // SAFETY: the caller's promise.
    unsafe {
        shared::store16(high_at, high);
        shared::store16(low_at, low);
    }
}

/// Puts the `k` elements of row `x` into shared memory, as the terms that weights of form `F` are multiplied with;
/// before that each is multiplied with its weight of the norm, if there is one. The sum of the squares of those that
/// this thread had.
///
/// # Safety
/// Every thread of the block makes this same call, no thread reads what was staged before any more; `x` has `k`
/// elements, at most [`Form::LONGEST`], in whole units of eight that may be asked for at once, and so has the norm.
pub(super) unsafe fn stage<F: Form, S: Source>(x: &S, norm: &Norm, k: u32, block: &Block) -> f32 {
    // SAFETY: the caller's promises; a thread writes its own words, which others read after the barrier.
    unsafe {
        let mut squares = 0.0;
        let put = |unit: u32, is_there: bool, mut values: [f32; 8]| {
            if norm.is_present() && is_there {
                let weight = norm.unit(unit);
                for i in 0..8 {
                    squares = fma(values[i], values[i], squares);
                    values[i] *= weight[i];
                }
            }
            F::put(unit, is_there, values, k);
        };
        x.each(k, F::TOGETHER, block, put);
        block.sync();
        squares
    }
}
