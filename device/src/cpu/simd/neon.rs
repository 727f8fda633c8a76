//! NEON: four lanes, thirty-two registers.

use super::{Dot, Leaf, Simd, Table, each, load_up_to, to_whole};
use core::arch::{aarch64::*, asm};
use core::marker::PhantomData;
use perpetua_shared::dtype::{self, Lines};

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
    unsafe fn levels(table: &[i8; 16], line: *const u8) -> [i8; dtype::Q4.elems] {
        let mut levels = [0; dtype::Q4.elems];
        let half = dtype::Q4.elems / 2;
        let mut i = 0;
        while i < half {
            // SAFETY: inside the line (caller), and the levels.
            unsafe {
                let (table, bytes) = (vld1q_s8(table.as_ptr()), vld1q_u8(line.add(i)));
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
        // SAFETY: the block is readable, its transpose writable (caller). The first step pairs rows 0 and 1, 2 and 3,
        // in even and odd columns; the second pairs these pairs, as vectors of two 64-bit lanes.
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

/// to + sums of four products of signed bytes a lane: `vdotq_s32`, which std does not have on stable Rust.
///
/// # Safety
/// The core has `dotprod`, and the function that this is inlined into enables it.
#[inline(always)]
unsafe fn dot_bytes(to: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let mut sums = to;
    // SAFETY: the instruction exists (caller); arithmetic only.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {a:v}.16b, {b:v}.16b",
            sums = inout(vreg) sums, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}

/// The largest magnitude of the first `n` of `N` vectors' elements at `src`, NaN where one is, and the vectors, zero
/// beyond.
///
/// # Safety
/// `n` elements are readable; the set exists.
#[inline(always)]
unsafe fn largest_of<const N: usize>(src: *const f32, n: usize) -> ([float32x4_t; N], f32) {
    // SAFETY: the caller's promises.
    unsafe {
        let x = each::<_, N>(|i| load_up_to::<Neon>(src.wrapping_add(4 * i), n.saturating_sub(4 * i)));
        let (mut largest, mut i) = (vabsq_f32(x[0]), 1);
        while i < N {
            // Hands NaN on.
            largest = vmaxq_f32(largest, vabsq_f32(x[i]));
            i += 1;
        }
        (x, vmaxvq_f32(largest))
    }
}

/// Sixteen whole numbers that fit signed bytes, as such.
#[inline(always)]
unsafe fn to_bytes(whole: [int32x4_t; 4]) -> int8x16_t {
    // SAFETY: the set exists (caller); arithmetic only.
    unsafe {
        let halves = |a, b| vmovn_s16(vcombine_s16(vmovn_s32(a), vmovn_s32(b)));
        vcombine_s8(halves(whole[0], whole[1]), halves(whole[2], whole[3]))
    }
}

/// 8-bit weights with activations in 15 bits, `x = scale * (128 * high + low)`; bytes are multiplied by
/// `sdot`, which takes both with their signs, exactly.
///
/// A packed block, 256 bytes of which 132 are used: `high` [64] and `low` [64] signed bytes; the scale, f32.
///
/// PERF: a block of four rows times one of activations is 98 instructions; widened it is sixteen times 24 (counted,
/// rustc 1.95). How fast that is nobody has measured.
pub(crate) struct Bytes;

/// The largest magnitude of 128 * high + low with both signed bytes.
const BYTES_MAX: f32 = 127.0 * 128.0;

impl Dot<Neon> for Bytes {
    type Elem = i8;
    const CHUNK: usize = dtype::Q8.elems;
    const LINES: Option<Lines> = Some(dtype::Q8);
    // Two sets of whole sums beside the sums, a quarter of the weights, and activations: thirty registers.
    const TILE_COLS: usize = 2;

    #[inline(always)]
    unsafe fn call<T: Leaf>(leaf: T) -> T::Output {
        // SAFETY: the set exists (the level's contract).
        unsafe { super::with_neon_dotprod(leaf) }
    }
    #[inline(always)]
    unsafe fn pack(dst: *mut f32, src: *const f32, n: usize) {
        // SAFETY: `n` elements are readable and 256 bytes writable (caller).
        unsafe {
            let (x, max) = largest_of::<16>(src, n);
            let [inverse, scale] = to_whole(max, max.is_nan(), BYTES_MAX);
            let mut quarter = 0;
            while quarter < 4 {
                let whole = each::<_, 4>(|i| vcvtnq_s32_f32(vmulq_n_f32(x[4 * quarter + i], inverse)));
                let high = each::<_, 4>(|i| vshrq_n_s32::<7>(vaddq_s32(whole[i], vdupq_n_s32(64))));
                let low = each::<_, 4>(|i| vsubq_s32(whole[i], vshlq_n_s32::<7>(high[i])));
                let bytes = dst.cast::<i8>().add(16 * quarter);
                vst1q_s8(bytes, to_bytes(high));
                vst1q_s8(bytes.add(64), to_bytes(low));
                quarter += 1;
            }
            *dst.add(32) = scale;
        }
    }
    #[inline(always)]
    unsafe fn chunk<const R: usize, const M: usize>(
        w: &[*const i8; R],
        x: *const f32,
        c: usize,
        _n: usize,
        sums: &mut [[float32x4_t; M]; R],
    ) {
        // SAFETY: rows are whole blocks with their scales; packed blocks are as `pack` wrote them.
        unsafe {
            let [bytes, at_scale] = dtype::Q8.at(c);
            let packed = |m: usize| x.add((c * M + m) * dtype::Q8.elems);
            let mut own = [[[vdupq_n_s32(0); 2]; M]; R];
            let mut quarter = 0;
            while quarter < 4 {
                let weights = each::<_, R>(|r| vld1q_s8(w[r].add(bytes + 16 * quarter)));
                let mut m = 0;
                while m < M {
                    let of = packed(m).cast::<i8>().add(16 * quarter);
                    let (high, low) = (vld1q_s8(of), vld1q_s8(of.add(64)));
                    let mut r = 0;
                    while r < R {
                        let [of_high, of_low] = own[r][m];
                        own[r][m] = [dot_bytes(of_high, weights[r], high), dot_bytes(of_low, weights[r], low)];
                        r += 1;
                    }
                    m += 1;
                }
                quarter += 1;
            }
            let mut r = 0;
            while r < R {
                let scale = *w[r].add(at_scale).cast::<f32>();
                let mut m = 0;
                while m < M {
                    let [high, low] = own[r][m];
                    let sum = vcvtq_f32_s32(vaddq_s32(vshlq_n_s32::<7>(high), low));
                    sums[r][m] = vfmaq_n_f32(sums[r][m], sum, scale * *packed(m).add(32));
                    m += 1;
                }
                r += 1;
            }
        }
    }
}

/// 4-bit weights with activations in 8 bits, as `avx512::Levels` has them: a look-up in a register makes numbers
/// levels, `sdot` multiplies them.
///
/// A packed line, 512 bytes of which 144 are used: signed bytes [128]; the blocks' scales [4 f32].
///
/// PERF: a line of four rows times one of activations is 197 instructions; widened it is 32 times 24, and what makes
/// levels of bytes (counted as [`Bytes`]'s).
pub(crate) struct Levels<T>(PhantomData<T>);

impl<T: Table> Dot<Neon> for Levels<T> {
    type Elem = u8;
    const CHUNK: usize = dtype::Q4.elems;
    const LINES: Option<Lines> = Some(dtype::Q4);
    const TILE_COLS: usize = 2;

    #[inline(always)]
    unsafe fn call<L: Leaf>(leaf: L) -> L::Output {
        // SAFETY: the set exists (the level's contract).
        unsafe { super::with_neon_dotprod(leaf) }
    }
    #[inline(always)]
    unsafe fn pack(dst: *mut f32, src: *const f32, n: usize) {
        let mut block = 0;
        while block < 4 {
            let at = block * dtype::Q4_BLOCK;
            // SAFETY: `n` elements are readable and 512 bytes writable (caller).
            unsafe {
                let (x, max) = largest_of::<8>(src.wrapping_add(at), n.saturating_sub(at));
                let [inverse, scale] = to_whole(max, max.is_nan(), 127.0);
                let whole = each::<_, 8>(|i| vcvtnq_s32_f32(vmulq_n_f32(x[i], inverse)));
                let bytes = dst.cast::<i8>().add(at);
                vst1q_s8(bytes, to_bytes([whole[0], whole[1], whole[2], whole[3]]));
                vst1q_s8(bytes.add(16), to_bytes([whole[4], whole[5], whole[6], whole[7]]));
                *dst.add(32 + block) = scale;
            }
            block += 1;
        }
    }
    #[inline(always)]
    unsafe fn chunk<const R: usize, const M: usize>(
        w: &[*const u8; R],
        x: *const f32,
        c: usize,
        _n: usize,
        sums: &mut [[float32x4_t; M]; R],
    ) {
        // SAFETY: rows are whole lines with their scales; packed lines are as `pack` wrote them.
        unsafe {
            let [bytes, scales] = dtype::Q4.at(c);
            let levels = vld1q_s8(T::LEVELS.as_ptr());
            let packed = |m: usize| x.add((c * M + m) * dtype::Q4.elems);
            // A line's four scales times those of its activations.
            let factors = each::<_, R>(|r| {
                let four = Neon::load_bf16(w[r].add(scales).cast());
                each::<_, M>(|m| vmulq_f32(four, vld1q_f32(packed(m).add(32))))
            });
            macro_rules! block {
                ($block:literal) => {
                    let weights = each::<_, R>(|r| {
                        each::<_, 2>(|i| {
                            let line = vld1q_u8(w[r].add(bytes + 32 * ($block % 2) + 16 * i));
                            let number =
                                if $block < 2 { vandq_u8(line, vdupq_n_u8(15)) } else { vshrq_n_u8::<4>(line) };
                            vqtbl1q_s8(levels, number)
                        })
                    });
                    let mut m = 0;
                    while m < M {
                        let of = packed(m).cast::<i8>().add(dtype::Q4_BLOCK * $block);
                        let (first, second) = (vld1q_s8(of), vld1q_s8(of.add(16)));
                        let mut r = 0;
                        while r < R {
                            let sum = dot_bytes(vdupq_n_s32(0), weights[r][0], first);
                            let sum = vcvtq_f32_s32(dot_bytes(sum, weights[r][1], second));
                            sums[r][m] = vfmaq_laneq_f32::<$block>(sums[r][m], sum, factors[r][m]);
                            r += 1;
                        }
                        m += 1;
                    }
                };
            }
            block!(0);
            block!(1);
            block!(2);
            block!(3);
        }
    }
}
