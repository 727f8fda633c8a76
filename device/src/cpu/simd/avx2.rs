//! AVX2 with FMA and F16C: eight lanes, sixteen registers.

use super::{Leaf, Simd, each};
use core::arch::x86_64::*;

/// See the module head.
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

macro_rules! direct {
    ($($name:ident($($arg:ident),*) = $intrinsic:ident;)*) => { $(
        #[inline(always)]
        unsafe fn $name($($arg: __m256),*) -> __m256 {
            // SAFETY: the set exists (trait contract); arithmetic only.
            unsafe { $intrinsic($($arg),*) }
        }
    )* };
}

impl Simd for Avx2 {
    const LANES: usize = 8;
    // Twelve sums, three activations and a row fill the sixteen registers.
    const TILE_COLS: usize = 3;
    const SUMS: usize = 12;
    type F = __m256;

    direct! {
        add(a, b) = _mm256_add_ps;
        sub(a, b) = _mm256_sub_ps;
        mul(a, b) = _mm256_mul_ps;
        div(a, b) = _mm256_div_ps;
        fma(a, b, c) = _mm256_fmadd_ps;
        max(a, b) = _mm256_max_ps;
        min(a, b) = _mm256_min_ps;
    }

    #[inline(always)]
    unsafe fn call<T: Leaf>(leaf: T) -> T::Output {
        // SAFETY: the set exists (trait contract).
        unsafe { super::with_avx2(leaf) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        // SAFETY: the set exists (trait contract).
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m256 {
        // SAFETY: a vector is readable (caller).
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> __m256 {
        // SAFETY: a vector is readable (caller).
        unsafe {
            let half = _mm_loadu_si128(p.cast());
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half)))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> __m256 {
        // SAFETY: a vector is readable (caller).
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> __m256 {
        // SAFETY: a vector is readable (caller).
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m256) {
        // SAFETY: a vector is writable (caller).
        unsafe { _mm256_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: __m256) {
        // SAFETY: a vector is writable (caller). Rounding: add half of the last place, minus one when the kept part is
        // even; a NaN instead keeps its upper half with the quiet bit set.
        unsafe {
            let bits = _mm256_castps_si256(v);
            let upper = _mm256_srli_epi32::<16>(bits);
            let odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
            let bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
            let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, bias));
            let quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
            let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
            let half = _mm256_blendv_epi8(rounded, quiet, is_nan);
            let packed = _mm256_packus_epi32(half, half);
            let packed = _mm256_permute4x64_epi64::<0b1000>(packed);
            _mm_storeu_si128(p.cast(), _mm256_castsi256_si128(packed));
        }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: __m256) {
        // SAFETY: a vector is writable (caller).
        unsafe { _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }
    #[inline(always)]
    unsafe fn pow2(n: __m256) -> __m256 {
        // SAFETY: arithmetic only.
        unsafe {
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
        }
    }
    #[inline(always)]
    unsafe fn sum4(v: [__m256; 4]) -> [f32; 4] {
        // SAFETY: arithmetic only. After the first two steps lane i of each half holds a partial sum of v[i].
        unsafe {
            let [a, b, c, d] = v;
            let ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            let cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
            let low = _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd);
            let high = _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd);
            let abcd = _mm256_add_ps(low, high);
            let sums = _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps::<1>(abcd));
            core::mem::transmute::<__m128, [f32; 4]>(sums)
        }
    }
    #[inline(always)]
    unsafe fn largest(v: __m256) -> f32 {
        // SAFETY: a transmute between types of eight f32.
        let lanes = unsafe { core::mem::transmute::<__m256, [f32; 8]>(v) };
        lanes.into_iter().fold(f32::NEG_INFINITY, |best, x| if x > best { x } else { best })
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        super::prefetch(p);
    }
    #[inline(always)]
    unsafe fn transpose(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
        let mut c = 0;
        while c < 8 {
            // SAFETY: the block is readable, its transpose writable (caller). Vector i holds four columns of rows i and i + 4.
            unsafe {
                let rows = each::<_, 4>(|i| {
                    let quarter = |r: usize| _mm_loadu_ps(src.add(r * src_stride + c));
                    _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(quarter(i)), quarter(i + 4))
                });
                let (ab, cd) = (_mm256_unpacklo_ps(rows[0], rows[1]), _mm256_unpacklo_ps(rows[2], rows[3]));
                _mm256_storeu_ps(dst.add(c * dst_stride), _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd));
                _mm256_storeu_ps(dst.add((c + 1) * dst_stride), _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd));
                let (ab, cd) = (_mm256_unpackhi_ps(rows[0], rows[1]), _mm256_unpackhi_ps(rows[2], rows[3]));
                _mm256_storeu_ps(dst.add((c + 2) * dst_stride), _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd));
                _mm256_storeu_ps(dst.add((c + 3) * dst_stride), _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd));
            }
            c += 4;
        }
    }
}
