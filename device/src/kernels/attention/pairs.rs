//! Sums of values in prompts where the core multiplies pairs of bf16 as often as f32: exponentials are rounded to bf16,
//! as tensor cores take them, and two positions are added by one instruction.
//!
//! It adds the product of a pair's upper halves, then that of the lower ones, each rounded as an addition of its own.
//! So the earlier position stands above, and a row's bits do not depend on where parts begin and end: of a pair that is
//! cut, the half that is not there is zero times zero.

use super::cpu::{BLOCK, Part, Sums};
use crate::cpu::simd::{Leaf, STEP, Vectors, brains, with_avx512_bf16};
use core::arch::x86_64::*;
use core::mem::transmute;

/// Positions in pairs.
pub(super) struct InPairs;

impl Sums<Vectors> for InPairs {
    type Elem = u16;

    unsafe fn prepare(scores: *mut f32) {
        // SAFETY: the caller's promises are the type's.
        unsafe { with_avx512_bf16(Round(scores)) }
    }

    unsafe fn add<const M: usize>(part: Part) {
        // SAFETY: the caller's promises are the type's.
        unsafe { with_avx512_bf16(AddPairs::<M>(part)) }
    }
}

/// Makes pairs of the exponentials of a block, in the first half of their room.
struct Round(*mut f32);

impl Leaf for Round {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let mut at = 0;
        while at < BLOCK {
            // SAFETY: a block of scores; what is written lies at or before what has been read.
            unsafe {
                let (low, high) = (_mm512_loadu_ps(self.0.add(at)), _mm512_loadu_ps(self.0.add(at + STEP / 2)));
                _mm512_storeu_si512(self.0.add(at / 2).cast(), _mm512_rol_epi32::<16>(brains(low, high)));
            }
            at += STEP;
        }
    }
}

/// Adds a part for `M` queries, 32 columns at a time.
struct AddPairs<const M: usize>(Part);

/// Columns of V, up to 32, and where the pairs of the first 16 and of the others are among those of two rows: the
/// earlier row's elements are the upper halves.
#[derive(Clone, Copy)]
struct Columns {
    first: *const u16,
    stride: usize,
    mask: u32,
    halves: [__m512i; 2],
}

/// Which halves of a pair are of the part.
const BOTH: u32 = u32::MAX;
const FIRST: u32 = 0xffff_0000;
const SECOND: u32 = 0xffff;

impl<const M: usize> AddPairs<M> {
    /// Adds what is of the part of positions `t` and `t + 1`, whose exponentials are at `pair`.
    ///
    /// # Safety
    /// The positions are V's, queries' pairs stand [`BLOCK`] f32 apart; the set exists.
    #[inline(always)]
    unsafe fn add<const OF: u32>(v: Columns, t: usize, pair: *const u32, acc: &mut [[__m512; 2]; M]) {
        // SAFETY: lanes under a zero mask bit are not accessed, the others are of V's rows. All of these types are 64
        // bytes of any bits.
        unsafe {
            let row = v.first.wrapping_add(t * v.stride);
            let first = _mm512_maskz_loadu_epi16(if OF & FIRST != 0 { v.mask } else { 0 }, row.cast());
            let row = row.wrapping_add(v.stride);
            let second = _mm512_maskz_loadu_epi16(if OF & SECOND != 0 { v.mask } else { 0 }, row.cast());
            let low = transmute::<__m512i, __m512bh>(_mm512_permutex2var_epi16(first, v.halves[0], second));
            let high = transmute::<__m512i, __m512bh>(_mm512_permutex2var_epi16(first, v.halves[1], second));
            let mut q = 0;
            while q < M {
                let pair = _mm512_set1_epi32((*pair.add(q * BLOCK) & OF) as i32);
                let pair = transmute::<__m512i, __m512bh>(pair);
                acc[q][0] = _mm512_dpbf16_ps(acc[q][0], low, pair);
                acc[q][1] = _mm512_dpbf16_ps(acc[q][1], high, pair);
                q += 1;
            }
        }
    }
}

impl<const M: usize> Leaf for AddPairs<M> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Part { tile, m, start, end, values } = self.0;
        let lanes: [u16; STEP] = core::array::from_fn(|i| i as u16 / 2 + if i % 2 == 0 { STEP as u16 } else { 0 });
        let mut i = 0;
        while i < values.d {
            // SAFETY: the positions are V's, the columns below `d`; sums are whole steps.
            unsafe {
                let low = _mm512_loadu_si512(lanes.as_ptr().cast());
                let v = Columns {
                    first: values.base.cast::<u16>().add(i),
                    stride: values.stride,
                    mask: if values.d - i < STEP { (1 << (values.d - i)) - 1 } else { u32::MAX },
                    halves: [low, _mm512_add_epi16(low, _mm512_set1_epi16(STEP as i16 / 2))],
                };
                let sums = tile.sums.add(m * tile.width + i);
                let pairs: *const u32 = tile.scores.add(m * BLOCK).cast();
                let mut acc = [[_mm512_setzero_ps(); 2]; M];
                let mut q = 0;
                while q < M {
                    let own = sums.add(q * tile.width);
                    acc[q] = [_mm512_loadu_ps(own), _mm512_loadu_ps(own.add(STEP / 2))];
                    q += 1;
                }
                let mut t = start;
                if t % 2 == 1 && t < end {
                    Self::add::<SECOND>(v, t - 1, pairs.add(t / 2), &mut acc);
                    t += 1;
                }
                while t + 2 <= end {
                    Self::add::<BOTH>(v, t, pairs.add(t / 2), &mut acc);
                    t += 2;
                }
                if t < end {
                    Self::add::<FIRST>(v, t, pairs.add(t / 2), &mut acc);
                }
                let mut q = 0;
                while q < M {
                    let own = sums.add(q * tile.width);
                    _mm512_storeu_ps(own, acc[q][0]);
                    _mm512_storeu_ps(own.add(STEP / 2), acc[q][1]);
                    q += 1;
                }
            }
            i += STEP;
        }
    }
}
