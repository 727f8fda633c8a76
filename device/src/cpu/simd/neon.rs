//! NEON: four lanes, thirty-two registers.

use super::{Leaf, Simd};
use core::arch::aarch64::*;

/// See the module head.
#[derive(Clone, Copy)]
pub(crate) struct Neon;

macro_rules! direct {
    ($($name:ident($($arg:ident),*) = $value:expr;)*) => { $(
        #[inline(always)]
        unsafe fn $name($($arg: float32x4_t),*) -> float32x4_t {
            // SAFETY: the set exists (trait contract); arithmetic only.
            unsafe { $value }
        }
    )* };
}

impl Simd for Neon {
    const LANES: usize = 4;
    const TILE_COLS: usize = 6;
    const SUMS: usize = 24;
    type F = float32x4_t;

    direct! {
        add(a, b) = vaddq_f32(a, b);
        sub(a, b) = vsubq_f32(a, b);
        mul(a, b) = vmulq_f32(a, b);
        div(a, b) = vdivq_f32(a, b);
        fma(a, b, c) = vfmaq_f32(c, a, b);
        // Not `vmaxq_f32`, which hands NaN on.
        max(a, b) = vbslq_f32(vcgtq_f32(a, b), a, b);
        min(a, b) = vbslq_f32(vcltq_f32(a, b), a, b);
        pow2(n) = vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127))));
    }

    #[inline(always)]
    unsafe fn call<T: Leaf>(leaf: T) -> T::Output {
        // SAFETY: the set exists (trait contract).
        unsafe { super::with_neon(leaf) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> float32x4_t {
        // SAFETY: the set exists (trait contract).
        unsafe { vdupq_n_f32(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> float32x4_t {
        // SAFETY: a vector is readable (caller).
        unsafe { vld1q_f32(p) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> float32x4_t {
        // SAFETY: a vector is readable (caller).
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p))) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> float32x4_t {
        // The vector conversion is not stable; `half` uses the scalar instruction.
        // SAFETY: a vector is readable (caller).
        unsafe {
            let lanes = p.cast::<[u16; 4]>().read_unaligned().map(|u| half::f16::from_bits(u).to_f32());
            vld1q_f32(lanes.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> float32x4_t {
        // SAFETY: a vector is readable (caller).
        unsafe {
            let lanes = p.cast::<[i8; 4]>().read().map(f32::from);
            vld1q_f32(lanes.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: float32x4_t) {
        // SAFETY: a vector is writable (caller).
        unsafe { vst1q_f32(p, v) }
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: float32x4_t) {
        // SAFETY: a vector is writable (caller). See `Avx2::store_bf16`.
        unsafe {
            let bits = vreinterpretq_u32_f32(v);
            let upper = vshrq_n_u32::<16>(bits);
            let bias = vaddq_u32(vandq_u32(upper, vdupq_n_u32(1)), vdupq_n_u32(0x7fff));
            let rounded = vshrq_n_u32::<16>(vaddq_u32(bits, bias));
            let quiet = vorrq_u32(upper, vdupq_n_u32(0x40));
            vst1_u16(p, vmovn_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet)));
        }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: float32x4_t) {
        let mut lanes = [0f32; 4];
        // SAFETY: a vector is writable (caller).
        unsafe {
            vst1q_f32(lanes.as_mut_ptr(), v);
            p.cast::<[u16; 4]>().write_unaligned(lanes.map(|x| half::f16::from_f32(x).to_bits()));
        }
    }
    #[inline(always)]
    unsafe fn sum4(v: [float32x4_t; 4]) -> [f32; 4] {
        let mut sums = [0f32; 4];
        // SAFETY: arithmetic only; `sums` is a vector.
        unsafe { vst1q_f32(sums.as_mut_ptr(), vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3]))) };
        sums
    }
    #[inline(always)]
    unsafe fn largest(v: float32x4_t) -> f32 {
        // SAFETY: the set exists (trait contract). `maxnm` ignores NaN.
        let best = unsafe { vmaxnmvq_f32(v) };
        if best.is_nan() { f32::NEG_INFINITY } else { best }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch reads nothing and faults on nothing.
        unsafe { core::arch::asm!("prfm pldl1keep, [{}]", in(reg) p, options(nostack, readonly, preserves_flags)) }
    }
}
