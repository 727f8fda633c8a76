//! NEON: four lanes, thirty-two registers.

use super::{Leaf, Simd};
use core::arch::aarch64::*;
use perpetua_shared::dtype;

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
        // SAFETY: a vector is readable (caller).
        unsafe { vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))) }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> float32x4_t {
        // SAFETY: a vector is readable (caller).
        unsafe {
            let bytes = vcreate_s8(u64::from(p.cast::<u32>().read_unaligned()));
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))))
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
        // SAFETY: a vector is writable (caller).
        unsafe { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))) }
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
        // SAFETY: arithmetic only. NaN lanes become -inf first.
        unsafe { vmaxvq_f32(vbslq_f32(vceqq_f32(v, v), v, vdupq_n_f32(f32::NEG_INFINITY))) }
    }
    #[inline(always)]
    unsafe fn levels(line: *const u8) -> [i8; dtype::Q4.elems] {
        let mut levels = [0; dtype::Q4.elems];
        let half = dtype::Q4.elems / 2;
        let mut i = 0;
        while i < half {
            // SAFETY: inside the line (caller), and the levels.
            unsafe {
                let (table, bytes) = (vld1q_s8(dtype::Q4_LEVELS.as_ptr()), vld1q_u8(line.add(i)));
                let low = vqtbl1q_s8(table, vandq_u8(bytes, vdupq_n_u8(15)));
                let high = vqtbl1q_s8(table, vshrq_n_u8::<4>(bytes));
                vst1q_s8(levels.as_mut_ptr().add(i), low);
                vst1q_s8(levels.as_mut_ptr().add(half + i), high);
            }
            i += 16;
        }
        levels
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        super::prefetch(p);
    }
    #[inline(always)]
    unsafe fn transpose(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
        // SAFETY: the block is readable, its transpose writable (caller). The first step pairs rows 0 and 1, 2 and 3, in even and
        // odd columns; the second pairs these pairs, as vectors of two 64-bit lanes.
        unsafe {
            let row = |r: usize| vld1q_f32(src.add(r * src_stride));
            let pairs = |a, b| [vtrn1q_f32(a, b), vtrn2q_f32(a, b)].map(|v| vreinterpretq_f64_f32(v));
            let ([even01, odd01], [even23, odd23]) = (pairs(row(0), row(1)), pairs(row(2), row(3)));
            let column = |c: usize, v| vst1q_f32(dst.add(c * dst_stride), vreinterpretq_f32_f64(v));
            column(0, vtrn1q_f64(even01, even23));
            column(1, vtrn1q_f64(odd01, odd23));
            column(2, vtrn2q_f64(even01, even23));
            column(3, vtrn2q_f64(odd01, odd23));
        }
    }
}
