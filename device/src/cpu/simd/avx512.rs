//! AVX-512: sixteen lanes, thirty-two registers, masks for tails.

use super::{
    Dot, F32, Fours, Leaf, Q8, Simd, Storage, Table, UP, Widen, add_products, each, load_up_to, tiles_from, to_whole,
};
use core::arch::{asm, x86_64::*};
use core::marker::PhantomData;
use perpetua_shared::dtype::{self, Lines};

/// AVX-512 F, BW, VL and DQ.
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

macro_rules! direct {
    ($($name:ident($($arg:ident),*) = $intrinsic:ident;)*) => { $(
        #[inline(always)]
        unsafe fn $name($($arg: __m512),*) -> __m512 {
            // SAFETY: the set exists (trait contract); arithmetic only.
            unsafe { $intrinsic($($arg),*) }
        }
    )* };
}

/// The low `n <= 16` bits.
#[inline(always)]
fn first(n: usize) -> u16 {
    debug_assert!(n <= 16);
    ((1u32 << n) - 1) as u16
}

#[inline(always)]
unsafe fn round_bf16(v: __m512) -> __m256i {
    // SAFETY: arithmetic only. As `Avx2::store_bf16`: unlike `vcvtneps2bf16` it keeps subnormals, so that what is
    // stored are the reference's bits.
    unsafe {
        let bits = _mm512_castps_si512(v);
        let upper = _mm512_srli_epi32::<16>(bits);
        let odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
        let bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
        let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, bias));
        let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
        let half = _mm512_mask_or_epi32(rounded, is_nan, upper, _mm512_set1_epi32(0x40));
        _mm512_cvtepi32_epi16(half)
    }
}

#[inline(always)]
unsafe fn widen_bf16(half: __m256i) -> __m512 {
    // SAFETY: arithmetic only.
    unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half))) }
}

impl Simd for Avx512 {
    const LANES: usize = 16;
    // Twenty-four sums, four rows and an activation: 29 of 32 registers.
    const TILE_COLS: usize = 6;
    const SUMS: usize = 24;
    type F = __m512;

    direct! {
        add(a, b) = _mm512_add_ps;
        sub(a, b) = _mm512_sub_ps;
        mul(a, b) = _mm512_mul_ps;
        div(a, b) = _mm512_div_ps;
        fma(a, b, c) = _mm512_fmadd_ps;
        max(a, b) = _mm512_max_ps;
        min(a, b) = _mm512_min_ps;
        scale2(v, n) = _mm512_scalef_ps;
    }

    #[inline(always)]
    unsafe fn call<T: Leaf>(leaf: T) -> T::Output {
        // SAFETY: the set exists (trait contract).
        unsafe { super::with_avx512(leaf) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        // SAFETY: the set exists (trait contract).
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        // SAFETY: a vector is readable (caller).
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> __m512 {
        // SAFETY: a vector is readable (caller).
        unsafe { widen_bf16(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> __m512 {
        // SAFETY: a vector is readable (caller).
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> __m512 {
        // SAFETY: a vector is readable (caller).
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m512) {
        // SAFETY: a vector is writable (caller).
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: __m512) {
        // SAFETY: a vector is writable (caller).
        unsafe { _mm256_storeu_si256(p.cast(), round_bf16(v)) }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: __m512) {
        // SAFETY: a vector is writable (caller).
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }
    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> __m512 {
        // SAFETY: lanes under a zero mask bit are not accessed; the others are readable (caller).
        unsafe { _mm512_maskz_loadu_ps(first(n), p) }
    }
    #[inline(always)]
    unsafe fn load_bf16_part(p: *const u16, n: usize) -> __m512 {
        // SAFETY: as `load_part`.
        unsafe { widen_bf16(_mm256_maskz_loadu_epi16(first(n), p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_f16_part(p: *const u16, n: usize) -> __m512 {
        // SAFETY: as `load_part`.
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p.cast())) }
    }
    #[inline(always)]
    unsafe fn store_part(p: *mut f32, v: __m512, n: usize) {
        // SAFETY: lanes under a zero mask bit are not accessed; the others are writable (caller).
        unsafe { _mm512_mask_storeu_ps(p, first(n), v) }
    }
    #[inline(always)]
    unsafe fn store_bf16_part(p: *mut u16, v: __m512, n: usize) {
        // SAFETY: as `store_part`.
        unsafe { _mm256_mask_storeu_epi16(p.cast(), first(n), round_bf16(v)) }
    }
    #[inline(always)]
    unsafe fn store_f16_part(p: *mut u16, v: __m512, n: usize) {
        // SAFETY: as `store_part`.
        unsafe { _mm256_mask_storeu_epi16(p.cast(), first(n), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }
    #[inline(always)]
    unsafe fn pow2(n: __m512) -> __m512 {
        // SAFETY: arithmetic only.
        unsafe { _mm512_scalef_ps(_mm512_set1_ps(1.0), n) }
    }
    #[inline(always)]
    unsafe fn sum4(v: [__m512; 4]) -> [f32; 4] {
        // SAFETY: arithmetic only. After the first two steps lane i of each quarter holds a partial sum of v[i].
        unsafe {
            let [a, b, c, d] = v;
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let low = _mm512_shuffle_ps::<0b01_00_01_00>(ab, cd);
            let high = _mm512_shuffle_ps::<0b11_10_11_10>(ab, cd);
            let abcd = _mm512_add_ps(low, high);
            let half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps::<1>(abcd));
            let sums = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps::<1>(half));
            core::mem::transmute::<__m128, [f32; 4]>(sums)
        }
    }
    #[inline(always)]
    unsafe fn largest(v: __m512) -> f32 {
        // SAFETY: arithmetic only. NaN lanes become -inf first, so the order of the reduction does not matter.
        unsafe {
            let is_number = _mm512_cmp_ps_mask::<_CMP_ORD_Q>(v, v);
            _mm512_reduce_max_ps(_mm512_mask_blend_ps(is_number, _mm512_set1_ps(f32::NEG_INFINITY), v))
        }
    }
    #[inline(always)]
    unsafe fn transpose(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
        let mut c = 0;
        while c < 16 {
            // SAFETY: the block is readable, its transpose writable (caller). Vector i holds four columns of rows i, i + 4,
            // i + 8 and i + 12, so that what is left to do stays inside quarters.
            unsafe {
                let rows = each::<_, 4>(|i| {
                    let quarter = |r: usize| _mm_loadu_ps(src.add(r * src_stride + c));
                    let v = _mm512_castps128_ps512(quarter(i));
                    let v = _mm512_insertf32x4::<1>(v, quarter(i + 4));
                    let v = _mm512_insertf32x4::<2>(v, quarter(i + 8));
                    _mm512_insertf32x4::<3>(v, quarter(i + 12))
                });
                let (ab, cd) = (_mm512_unpacklo_ps(rows[0], rows[1]), _mm512_unpacklo_ps(rows[2], rows[3]));
                _mm512_storeu_ps(dst.add(c * dst_stride), _mm512_shuffle_ps::<0b01_00_01_00>(ab, cd));
                _mm512_storeu_ps(dst.add((c + 1) * dst_stride), _mm512_shuffle_ps::<0b11_10_11_10>(ab, cd));
                let (ab, cd) = (_mm512_unpackhi_ps(rows[0], rows[1]), _mm512_unpackhi_ps(rows[2], rows[3]));
                _mm512_storeu_ps(dst.add((c + 2) * dst_stride), _mm512_shuffle_ps::<0b01_00_01_00>(ab, cd));
                _mm512_storeu_ps(dst.add((c + 3) * dst_stride), _mm512_shuffle_ps::<0b11_10_11_10>(ab, cd));
            }
            c += 4;
        }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        super::prefetch(p);
    }
}

/// `n <= 32` elements of 16 bits, zero beyond.
#[inline(always)]
unsafe fn load_step(p: *const u16, n: usize) -> __m512i {
    // SAFETY: lanes under a zero mask bit are not accessed; the others are readable (caller).
    unsafe {
        if n == STEP { _mm512_loadu_si512(p.cast()) } else { _mm512_maskz_loadu_epi16((1u32 << n) - 1, p.cast()) }
    }
}

/// Where the lanes at even places of two vectors are, and those at odd ones.
#[inline(always)]
unsafe fn evens_and_odds() -> [__m512i; 2] {
    // SAFETY: the set exists (caller); arithmetic only.
    unsafe {
        let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        [even, _mm512_add_epi32(even, _mm512_set1_epi32(1))]
    }
}

/// `n <= 32` f32 as two vectors, zero beyond.
#[inline(always)]
unsafe fn load_pair(src: *const f32, n: usize) -> (__m512, __m512) {
    // SAFETY: as `load_part`; the second pointer is only used for elements that exist.
    unsafe { (Avx512::load_part(src, n.min(16)), Avx512::load_part(src.wrapping_add(16), n.saturating_sub(16))) }
}

/// A tile of four weight rows and six activation rows in assembly: 24 sums in zmm8 to zmm31, four weight vectors in
/// zmm0 to zmm3, activations in turn in zmm4 and zmm5. The compiler's own allotment of the registers spills sums or
/// moves them about. Each part of a chunk loads its weights, then multiplies them by `$op` with the vectors of the
/// activation rows at the offsets given; a chunk is 64 bytes of every weight row, and `$step` bytes of the group.
macro_rules! tile {
    ($w:ident, $by:ident, $x:ident, $chunks:ident, $sums:ident, $op:literal, $step:literal, [$($start:literal),*],
     $({ $($load:literal)* : $x0:literal $x1:literal $x2:literal $x3:literal $x4:literal $x5:literal })*) => {
        asm!(
            $($start,)*
            "2:",
            $(
                $($load,)*
                tile!(@column $op "4" $x0 "8" "14" "20" "26"),
                tile!(@column $op "5" $x1 "9" "15" "21" "27"),
                tile!(@column $op "4" $x2 "10" "16" "22" "28"),
                tile!(@column $op "5" $x3 "11" "17" "23" "29"),
                tile!(@column $op "4" $x4 "12" "18" "24" "30"),
                tile!(@column $op "5" $x5 "13" "19" "25" "31"),
            )*
            "prefetcht0 [{w0} + {by}]", "prefetcht0 [{w1} + {by}]", "prefetcht0 [{w2} + {by}]", "prefetcht0 [{w3} + {by}]",
            "add {w0}, 64", "add {w1}, 64", "add {w2}, 64", "add {w3}, 64",
            concat!("add {x}, ", $step),
            "dec {n}",
            "jnz 2b",
            w0 = inout(reg) $w[0] => _, w1 = inout(reg) $w[1] => _, w2 = inout(reg) $w[2] => _, w3 = inout(reg) $w[3] => _,
            by = in(reg) $by, x = inout(reg) $x => _, n = inout(reg) $chunks => _,
            out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _, out("zmm6") _,
            inout("zmm8") $sums[0], inout("zmm9") $sums[1], inout("zmm10") $sums[2], inout("zmm11") $sums[3],
            inout("zmm12") $sums[4], inout("zmm13") $sums[5], inout("zmm14") $sums[6], inout("zmm15") $sums[7],
            inout("zmm16") $sums[8], inout("zmm17") $sums[9], inout("zmm18") $sums[10], inout("zmm19") $sums[11],
            inout("zmm20") $sums[12], inout("zmm21") $sums[13], inout("zmm22") $sums[14], inout("zmm23") $sums[15],
            inout("zmm24") $sums[16], inout("zmm25") $sums[17], inout("zmm26") $sums[18], inout("zmm27") $sums[19],
            inout("zmm28") $sums[20], inout("zmm29") $sums[21], inout("zmm30") $sums[22], inout("zmm31") $sums[23],
            options(nostack, readonly),
        )
    };
    // An activation vector times four weight vectors.
    (@column $op:literal $x:literal $at:literal $s0:literal $s1:literal $s2:literal $s3:literal) => {
        concat!(
            "vmovups zmm", $x, ", [{x} + ", $at, "]\n",
            $op, " zmm", $s0, ", zmm0, zmm", $x, "\n",
            $op, " zmm", $s1, ", zmm1, zmm", $x, "\n",
            $op, " zmm", $s2, ", zmm2, zmm", $x, "\n",
            $op, " zmm", $s3, ", zmm3, zmm", $x,
        )
    };
}

/// bf16 weights with activations in f32. A register of 32 weights becomes two of f32 by a shift and a mask, the even
/// and the odd ones, and activations are packed in that order: two cheap instructions where widening takes four.
///
/// PERF: `vdpbf16ps` is used only in prompts, and where it is fast ([`Pairs`]). It rounds activations to bf16, and
/// retires once in two cycles where two fused multiply-adds retire in one: 75 GFLOP/s a core against 145 (Sapphire
/// Rapids, 2026-11-21). With activations split in two bf16 it is slower still, and an infinite weight becomes NaN.
pub(crate) struct EvenOdd;

impl Dot<Avx512> for EvenOdd {
    type Elem = u16;
    const CHUNK: usize = 32;
    // PERF: 36.5 of 41 GB/s on one core, with 32 lines 35 (Turin, 2026-11-24).
    const AHEAD_LINES: usize = 24;

    #[inline(always)]
    unsafe fn chunk<const R: usize, const M: usize>(
        w: &[*const u16; R],
        x: *const f32,
        c: usize,
        n: usize,
        sums: &mut [[__m512; M]; R],
    ) {
        // SAFETY: lanes under a zero mask bit are not accessed; the others are readable (caller).
        unsafe {
            let at = c * 32;
            let pairs = each::<_, R>(|r| load_step(w[r].add(at), n));
            add_products::<Avx512, R, M>(each(|r| even(pairs[r])), x.add(at * M), 32, sums);
            add_products::<Avx512, R, M>(each(|r| odd(pairs[r])), x.add(at * M + 16), 32, sums);
        }
    }
    #[inline(always)]
    unsafe fn pack(dst: *mut f32, src: *const f32, n: usize) {
        // SAFETY: `n` elements are readable and 32 writable (caller).
        unsafe {
            let (low, high) = load_pair(src, n);
            let [even, odd] = evens_and_odds();
            _mm512_storeu_ps(dst, _mm512_permutex2var_ps(low, even, high));
            _mm512_storeu_ps(dst.add(16), _mm512_permutex2var_ps(low, odd, high));
        }
    }
    const TILES_FROM: usize = tiles_from(Self::TILE_COLS);
    #[inline(always)]
    unsafe fn tile<const M: usize>(
        w: [*const u16; 4],
        by: usize,
        x: *const f32,
        chunks: usize,
        sums: &mut [[__m512; M]; 4],
    ) {
        // SAFETY: the set exists (trait contract); the caller's promises are the same. There is a tile of one width
        // only.
        unsafe { tile_bf16(w, by, x, chunks, &mut *sums.as_mut_ptr().cast()) }
    }
}

/// bf16 weights with activations rounded to bf16, as they are: one `vdpbf16ps` multiplies what takes two multiply-adds.
/// It takes subnormal numbers for zeros, and makes none.
///
/// PERF: as many a cycle as multiply-adds on AMD's cores, 490 GFLOP/s beside 263 (Turin, 2026-11-30); on Intel's one
/// for two: see [`EvenOdd`].
pub(crate) struct Pairs;

impl Dot<Avx512> for Pairs {
    type Elem = u16;
    const CHUNK: usize = STEP;
    const ROOM: usize = STEP / 2;
    const AHEAD_LINES: usize = EvenOdd::AHEAD_LINES;

    #[inline(always)]
    unsafe fn call<T: Leaf>(leaf: T) -> T::Output {
        // SAFETY: the set exists (the level's contract).
        unsafe { super::with_avx512_bf16(leaf) }
    }
    #[inline(always)]
    unsafe fn chunk<const R: usize, const M: usize>(
        w: &[*const u16; R],
        x: *const f32,
        c: usize,
        n: usize,
        sums: &mut [[__m512; M]; R],
    ) {
        // SAFETY: lanes under a zero mask bit are not accessed; the others are readable (caller). Both types are 64
        // bytes of any bits.
        unsafe {
            let pairs = |bits: __m512i| core::mem::transmute::<__m512i, __m512bh>(bits);
            let weights = each::<_, R>(|r| pairs(load_step(w[r].add(c * STEP), n)));
            let mut m = 0;
            while m < M {
                let x = pairs(_mm512_loadu_si512(x.add((c * M + m) * Self::ROOM).cast()));
                let mut r = 0;
                while r < R {
                    sums[r][m] = _mm512_dpbf16_ps(sums[r][m], weights[r], x);
                    r += 1;
                }
                m += 1;
            }
        }
    }
    #[inline(always)]
    unsafe fn pack(dst: *mut f32, src: *const f32, n: usize) {
        // SAFETY: `n` elements are readable and 64 bytes writable (caller).
        unsafe {
            let (low, high) = load_pair(src, n);
            _mm512_storeu_si512(dst.cast(), brains(low, high));
        }
    }
    const TILES_FROM: usize = tiles_from(Self::TILE_COLS);
    #[inline(always)]
    unsafe fn tile<const M: usize>(
        w: [*const u16; 4],
        by: usize,
        x: *const f32,
        chunks: usize,
        sums: &mut [[__m512; M]; 4],
    ) {
        // SAFETY: the set exists (trait contract); the caller's promises are the same. There is a tile of one width
        // only.
        unsafe { tile_pairs(w, by, x, chunks, &mut *sums.as_mut_ptr().cast()) }
    }
}

/// 32 numbers as bf16, rounded to nearest even but for subnormal ones, which become zeros.
#[inline(always)]
pub(crate) unsafe fn brains(low: __m512, high: __m512) -> __m512i {
    // SAFETY: the conversion exists (caller); both types are 64 bytes of any bits.
    unsafe { core::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) }
}

/// A row of `k` weights made bf16, in whole steps, as which it is readable and `to` writable.
pub(crate) struct BrainRow<E: Widened> {
    pub(crate) row: *const E::Elem,
    pub(crate) k: usize,
    pub(crate) to: *mut u16,
}

impl<E: Widened> Leaf for BrainRow<E> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let mut at = 0;
        while at < self.k {
            // SAFETY: whole steps of the row are readable, and writable at `to` (see the type).
            unsafe {
                let [low, high] = E::load(self.row, at);
                _mm512_storeu_si512(self.to.add(at).cast(), brains(low, high));
            }
            at += STEP;
        }
    }
}

/// f32 weights.
pub(crate) struct Whole;

impl Dot<Avx512> for Whole {
    type Elem = f32;
    const CHUNK: usize = 16;

    #[inline(always)]
    unsafe fn chunk<const R: usize, const M: usize>(
        w: &[*const f32; R],
        x: *const f32,
        c: usize,
        n: usize,
        sums: &mut [[__m512; M]; R],
    ) {
        // SAFETY: the caller's promises are the same.
        unsafe { <Widen<F32> as Dot<Avx512>>::chunk(w, x, c, n, sums) }
    }
    #[inline(always)]
    unsafe fn pack(dst: *mut f32, src: *const f32, n: usize) {
        // SAFETY: the caller's promises are the same.
        unsafe { <Widen<F32> as Dot<Avx512>>::pack(dst, src, n) }
    }
    const TILES_FROM: usize = tiles_from(Self::TILE_COLS);
    #[inline(always)]
    unsafe fn tile<const M: usize>(
        w: [*const f32; 4],
        by: usize,
        x: *const f32,
        chunks: usize,
        sums: &mut [[__m512; M]; 4],
    ) {
        // SAFETY: the set exists (trait contract); the caller's promises are the same. There is a tile of one width
        // only.
        unsafe { tile_f32(w, by, x, chunks, &mut *sums.as_mut_ptr().cast()) }
    }
}

/// [`Dot::tile`]; a function of its own, since only one with the feature may name the registers.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn tile_bf16(w: [*const u16; 4], by: usize, x: *const f32, chunks: usize, sums: &mut [__m512; 24]) {
    // SAFETY: the chunks are readable (caller); prefetches may be of any address. The mask of odd elements is all ones
    // shifted up.
    unsafe {
        tile!(w, by, x, chunks, sums, "vfmadd231ps", "768",
            ["vpternlogd zmm6, zmm6, zmm6, 255", "vpslld zmm6, zmm6, 16"],
            { "vpslld zmm0, [{w0}], 16" "vpslld zmm1, [{w1}], 16" "vpslld zmm2, [{w2}], 16" "vpslld zmm3, [{w3}], 16"
                : "0" "128" "256" "384" "512" "640" }
            { "vpandd zmm0, zmm6, [{w0}]" "vpandd zmm1, zmm6, [{w1}]" "vpandd zmm2, zmm6, [{w2}]" "vpandd zmm3, zmm6, [{w3}]"
                : "64" "192" "320" "448" "576" "704" }
        );
    }
}

/// [`Dot::tile`]; a function of its own, since only one with the feature may name the registers.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn tile_pairs(w: [*const u16; 4], by: usize, x: *const f32, chunks: usize, sums: &mut [__m512; 24]) {
    // SAFETY: the chunks are readable (caller); prefetches may be of any address.
    unsafe {
        tile!(w, by, x, chunks, sums, "vdpbf16ps", "384", [],
            { "vmovups zmm0, [{w0}]" "vmovups zmm1, [{w1}]" "vmovups zmm2, [{w2}]" "vmovups zmm3, [{w3}]"
                : "0" "64" "128" "192" "256" "320" }
        );
    }
}

/// [`Dot::tile`]; a function of its own, since only one with the feature may name the registers.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn tile_f32(w: [*const f32; 4], by: usize, x: *const f32, chunks: usize, sums: &mut [__m512; 24]) {
    // SAFETY: the chunks are readable (caller); prefetches may be of any address.
    unsafe {
        tile!(w, by, x, chunks, sums, "vfmadd231ps", "384", [],
            { "vmovups zmm0, [{w0}]" "vmovups zmm1, [{w1}]" "vmovups zmm2, [{w2}]" "vmovups zmm3, [{w3}]"
                : "0" "64" "128" "192" "256" "320" }
        );
    }
}

/// 8-bit weights with activations in 16: products of words, of which AVX-512 VNNI adds two to a lane, exactly. Of the
/// four bytes of a lane those at even places and those at odd ones become words by shifts; activations are whole
/// numbers of `max |x| / 32512` of their block.
///
/// A packed block, 192 bytes: words of the even elements [32] and of the odd ones [32]; the scale, f32.
///
/// PERF: eight instructions for 64 weights where widening takes thirteen on the same two ports; five for every further
/// row, where bytes, each activation in two of them, took seven. Decode reaches 88 % of the read bandwidth; 82 % when
/// all scales of a row followed its weights, where reading jumps ahead and back: the hardware's own prefetching wants
/// ascending addresses (Sapphire Rapids, 2 cores, 2026-11-21).
pub(crate) struct Words;

/// The largest magnitude of an activation's word: four products with bytes have 24 bits, as many as an f32.
const WORDS_MAX: f32 = 127.0 * 256.0;

impl Dot<Avx512> for Words {
    type Elem = i8;
    const CHUNK: usize = dtype::Q8.elems;
    const ROOM: usize = 48;
    const LINES: Option<Lines> = Some(dtype::Q8);

    #[inline(always)]
    unsafe fn call<T: Leaf>(leaf: T) -> T::Output {
        // SAFETY: the set exists (the level's contract).
        unsafe { super::with_avx512_vnni(leaf) }
    }
    #[inline(always)]
    unsafe fn pack(dst: *mut f32, src: *const f32, n: usize) {
        // SAFETY: `n` elements are readable and 192 bytes writable (caller).
        unsafe {
            let x = each::<_, 4>(|i| load_up_to::<Avx512>(src.wrapping_add(16 * i), n.saturating_sub(16 * i)));
            let largest = |a, b| _mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b));
            let max = _mm512_reduce_max_ps(largest(largest(x[0], x[1]), largest(x[2], x[3])));
            let unordered = |i: usize| _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x[i], x[i]);
            let is_nan = (unordered(0) | unordered(1) | unordered(2) | unordered(3)) != 0;
            let [inverse, scale] = to_whole(max, is_nan, WORDS_MAX);
            let words = each::<_, 4>(|i| {
                _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(x[i], _mm512_set1_ps(inverse))))
            });
            let both = |i: usize| _mm512_inserti64x4::<1>(_mm512_castsi256_si512(words[i]), words[i + 1]);
            // Of each lane's four elements the first two, and the others.
            let [even, odd] = evens_and_odds();
            let first = _mm512_permutex2var_epi32(both(0), even, both(2));
            let second = _mm512_permutex2var_epi32(both(0), odd, both(2));
            let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            let evens = _mm512_or_si512(_mm512_andnot_si512(upper, first), _mm512_slli_epi32::<16>(second));
            let odds = _mm512_or_si512(_mm512_srli_epi32::<16>(first), _mm512_and_si512(upper, second));
            _mm512_storeu_si512(dst.cast(), evens);
            _mm512_storeu_si512(dst.add(16).cast(), odds);
            *dst.add(32) = scale;
        }
    }
    #[inline(always)]
    unsafe fn chunk<const R: usize, const M: usize>(
        w: &[*const i8; R],
        x: *const f32,
        c: usize,
        _n: usize,
        sums: &mut [[__m512; M]; R],
    ) {
        // SAFETY: rows are whole blocks with their scales; packed blocks are as `pack` wrote them.
        unsafe {
            let [bytes, at_scale] = dtype::Q8.at(c);
            let weights = each::<_, R>(|r| {
                let four = _mm512_loadu_si512(w[r].add(bytes).cast());
                [_mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(four)), _mm512_srai_epi16::<8>(four)]
            });
            let mut m = 0;
            while m < M {
                let packed = x.add((c * M + m) * Self::ROOM);
                let (even, odd) = (_mm512_loadu_si512(packed.cast()), _mm512_loadu_si512(packed.add(16).cast()));
                let scale = _mm512_set1_ps(*packed.add(32));
                let mut r = 0;
                while r < R {
                    let sum = _mm512_dpwssd_epi32(_mm512_madd_epi16(weights[r][0], even), weights[r][1], odd);
                    let factor = _mm512_mul_ps(scale, _mm512_set1_ps(*w[r].add(at_scale).cast::<f32>()));
                    sums[r][m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), factor, sums[r][m]);
                    r += 1;
                }
                m += 1;
            }
        }
    }
    const TILES_FROM: usize = tiles_from(2);
    #[inline(always)]
    unsafe fn tile<const M: usize>(
        w: [*const i8; 4],
        by: usize,
        x: *const f32,
        chunks: usize,
        sums: &mut [[__m512; M]; 4],
    ) {
        // SAFETY: the set exists (trait contract); the caller's promises are the same.
        unsafe { tile_words(w, by, x, chunks, sums) }
    }
}

/// Lines of four rows that follow each other, as do their scales.
struct Group<E> {
    /// Lines of a row before them.
    before: usize,
    /// How many they are.
    n: usize,
    /// The first of each row.
    first: [*const E; 4],
    /// Bytes from it to its scale.
    scales: usize,
}

/// The groups of `chunks` lines of rows `w`. With each it is asked for the scales that lie `by` bytes beyond its own.
#[inline(always)]
fn groups<E>(lines: Lines, w: [*const E; 4], by: usize, chunks: usize) -> impl Iterator<Item = Group<E>> {
    (0..chunks).step_by(lines.per_group).map(move |before| {
        let [bytes, scales] = lines.at(before);
        for row in w {
            super::prefetch(row.wrapping_byte_add(scales).wrapping_byte_add(by).cast());
        }
        let first = w.map(|row| row.wrapping_byte_add(bytes));
        Group { before, n: lines.per_group.min(chunks - before), first, scales: scales.wrapping_sub(bytes) }
    })
}

/// A tile of [`Words`] in assembly: sums of four rows and up to six columns in zmm8 to zmm31, a row's words in zmm0 and
/// zmm1 and its scale in zmm2, products in zmm3 and zmm4. The compiler makes two instructions of the dot product, and
/// spills sums. A column is where its words are, its number and its sums; the words of up to four are loaded once for
/// all rows, into registers of sums that they do not have.
macro_rules! words {
    ($first:ident, $by:ident, $x:ident, $blocks:ident, $scale:ident, $sums:ident, $columns:literal,
     [$($loaded:literal $low:literal $high:literal),*], $([$even:literal $odd:literal $m:literal: $s0:literal $s1:literal $s2:literal $s3:literal])*) => {
        asm!(
            "2:",
            $(
                concat!("vmovdqu64 zmm", $low, ", [{x} + 192*", $loaded, "]"),
                concat!("vmovdqu64 zmm", $high, ", [{x} + 192*", $loaded, " + 64]"),
            )*
            words!(@row "w0" $($even $odd $m $s0)*),
            words!(@row "w1" $($even $odd $m $s1)*),
            words!(@row "w2" $($even $odd $m $s2)*),
            words!(@row "w3" $($even $odd $m $s3)*),
            "add {w0}, 64", "add {w1}, 64", "add {w2}, 64", "add {w3}, 64",
            concat!("add {x}, 192*", $columns),
            // Four bytes on, and 64 less, as far as the rows have gone.
            "sub {s}, 60",
            "dec {n}",
            "jnz 2b",
            w0 = inout(reg) $first[0] => _, w1 = inout(reg) $first[1] => _, w2 = inout(reg) $first[2] => _, w3 = inout(reg) $first[3] => _,
            by = in(reg) $by, x = inout(reg) $x => _, n = inout(reg) $blocks => _, s = inout(reg) $scale => _,
            out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _, out("zmm6") _, out("zmm7") _,
            inout("zmm8") $sums[0], inout("zmm9") $sums[1], inout("zmm10") $sums[2], inout("zmm11") $sums[3],
            inout("zmm12") $sums[4], inout("zmm13") $sums[5], inout("zmm14") $sums[6], inout("zmm15") $sums[7],
            inout("zmm16") $sums[8], inout("zmm17") $sums[9], inout("zmm18") $sums[10], inout("zmm19") $sums[11],
            inout("zmm20") $sums[12], inout("zmm21") $sums[13], inout("zmm22") $sums[14], inout("zmm23") $sums[15],
            inout("zmm24") $sums[16], inout("zmm25") $sums[17], inout("zmm26") $sums[18], inout("zmm27") $sums[19],
            inout("zmm28") $sums[20], inout("zmm29") $sums[21], inout("zmm30") $sums[22], inout("zmm31") $sums[23],
            options(nostack, readonly),
        )
    };
    (@row $w:literal $($even:literal $odd:literal $m:literal $sum:literal)*) => {
        concat!(
            "vpsllw zmm0, [{", $w, "}], 8\n",
            "vpsraw zmm1, [{", $w, "}], 8\n",
            "vpsraw zmm0, zmm0, 8\n",
            "vbroadcastss zmm2, dword ptr [{", $w, "} + {s}]\n",
            "prefetcht0 [{", $w, "} + {by}]\n",
            $(
                "vpmaddwd zmm3, zmm0, ", $even, "\n",
                "vpdpwssd zmm3, zmm1, ", $odd, "\n",
                "vmulps zmm4, zmm2, dword ptr [{x} + 192*", $m, " + 128]{{1to16}}\n",
                "vcvtdq2ps zmm3, zmm3\n",
                "vfmadd231ps zmm", $sum, ", zmm3, zmm4\n",
            )*
        )
    };
}

/// [`Dot::tile`] of [`Words`]; a function of its own, since only one with the feature may name the registers.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn tile_words<const M: usize>(
    w: [*const i8; 4],
    by: usize,
    x: *const f32,
    chunks: usize,
    sums: &mut [[__m512; M]; 4],
) {
    let mut all = [_mm512_setzero_ps(); 24];
    for (all, sums) in all.chunks_exact_mut(6).zip(sums.iter()) {
        all[..M].copy_from_slice(sums);
    }
    for Group { before, n, first, scales } in groups(dtype::Q8, w, by, chunks) {
        let x = x.wrapping_add(before * M * Words::ROOM);
        // SAFETY: the blocks are readable, and their scales (caller); prefetches may be of any address.
        unsafe {
            match M {
                2 => words!(first, by, x, n, scales, all, "2", ["0" "5" "6", "1" "7" "12"],
                    ["zmm5" "zmm6" "0": "8" "14" "20" "26"]
                    ["zmm7" "zmm12" "1": "9" "15" "21" "27"]),
                3 => words!(first, by, x, n, scales, all, "3", ["0" "5" "6", "1" "7" "12", "2" "13" "18"],
                    ["zmm5" "zmm6" "0": "8" "14" "20" "26"]
                    ["zmm7" "zmm12" "1": "9" "15" "21" "27"]
                    ["zmm13" "zmm18" "2": "10" "16" "22" "28"]),
                4 => {
                    words!(first, by, x, n, scales, all, "4", ["0" "5" "6", "1" "7" "12", "2" "13" "18", "3" "19" "24"],
                    ["zmm5" "zmm6" "0": "8" "14" "20" "26"]
                    ["zmm7" "zmm12" "1": "9" "15" "21" "27"]
                    ["zmm13" "zmm18" "2": "10" "16" "22" "28"]
                    ["zmm19" "zmm24" "3": "11" "17" "23" "29"])
                }
                5 => words!(first, by, x, n, scales, all, "5", [],
                    ["[{x} + 192*0]" "[{x} + 192*0 + 64]" "0": "8" "14" "20" "26"]
                    ["[{x} + 192*1]" "[{x} + 192*1 + 64]" "1": "9" "15" "21" "27"]
                    ["[{x} + 192*2]" "[{x} + 192*2 + 64]" "2": "10" "16" "22" "28"]
                    ["[{x} + 192*3]" "[{x} + 192*3 + 64]" "3": "11" "17" "23" "29"]
                    ["[{x} + 192*4]" "[{x} + 192*4 + 64]" "4": "12" "18" "24" "30"]),
                _ => words!(first, by, x, n, scales, all, "6", [],
                    ["[{x} + 192*0]" "[{x} + 192*0 + 64]" "0": "8" "14" "20" "26"]
                    ["[{x} + 192*1]" "[{x} + 192*1 + 64]" "1": "9" "15" "21" "27"]
                    ["[{x} + 192*2]" "[{x} + 192*2 + 64]" "2": "10" "16" "22" "28"]
                    ["[{x} + 192*3]" "[{x} + 192*3 + 64]" "3": "11" "17" "23" "29"]
                    ["[{x} + 192*4]" "[{x} + 192*4 + 64]" "4": "12" "18" "24" "30"]
                    ["[{x} + 192*5]" "[{x} + 192*5 + 64]" "5": "13" "19" "25" "31"]),
            }
        }
    }
    for (all, sums) in all.chunks_exact(6).zip(sums) {
        sums.copy_from_slice(&all[..M]);
    }
}

/// 4-bit weights with activations in 8 bits: levels are found by a shuffle of bytes, moved up by 64 so that they have
/// no sign, and multiplied by the byte dot product of VNNI, or in two steps as AVX2 has them, exactly. Activations are
/// `scale * byte`, with the scale `max |x| / 127` of a block: of the error of a product they make a part in hundreds,
/// the weights' own rounding being twenty times as coarse.
///
/// A packed line, 384 bytes: signed bytes of both halves [2][64]; per lane what moving the levels up added, negative
/// [2][16 i32]; the scale of each lane's block [2][16 f32].
pub(crate) struct Levels<T, const HAS_VNNI: bool>(PhantomData<T>);

/// f32 of that.
const LEVELS_ROOM: usize = 96;

impl<T, const HAS_VNNI: bool> Levels<T, HAS_VNNI> {
    /// to + sums of four products of levels moved up with signed bytes a lane.
    #[inline(always)]
    unsafe fn dot_bytes(to: __m512i, levels: __m512i, signed: __m512i) -> __m512i {
        // SAFETY: the set exists (caller); arithmetic only.
        unsafe {
            if HAS_VNNI {
                return _mm512_dpbusd_epi32(to, levels, signed);
            }
            let pairs = _mm512_maddubs_epi16(levels, signed);
            _mm512_add_epi32(to, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        }
    }
}

impl<T: Table, const HAS_VNNI: bool> Dot<Avx512> for Levels<T, HAS_VNNI> {
    type Elem = u8;
    const CHUNK: usize = dtype::Q4.elems;
    const ROOM: usize = LEVELS_ROOM;
    const LINES: Option<Lines> = Some(dtype::Q4);
    const TILE_COLS: usize = 4;

    #[inline(always)]
    unsafe fn call<L: Leaf>(leaf: L) -> L::Output {
        // SAFETY: the set exists (the level's contract).
        unsafe { if HAS_VNNI { super::with_avx512_vnni(leaf) } else { super::with_avx512(leaf) } }
    }
    #[inline(always)]
    unsafe fn pack(dst: *mut f32, src: *const f32, n: usize) {
        let mut half = 0;
        while half < 2 {
            // SAFETY: `n` elements are readable and 384 bytes writable (caller).
            unsafe {
                let scales = dst.add(64 + 16 * half);
                let mut block = 0;
                while block < 2 {
                    let at = 64 * half + 32 * block;
                    let (low, high) = load_pair(src.wrapping_add(at), n.saturating_sub(at).min(32));
                    let max = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
                    let is_nan = (_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(low, high)) != 0;
                    let [inverse, scale] = to_whole(max, is_nan, 127.0);
                    let inverse = _mm512_set1_ps(inverse);
                    let bytes = dst.cast::<u8>().add(at);
                    let rounded = |x| _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(x, inverse)));
                    _mm_storeu_si128(bytes.cast(), rounded(low));
                    _mm_storeu_si128(bytes.add(16).cast(), rounded(high));
                    _mm256_storeu_ps(scales.add(8 * block), _mm256_set1_ps(scale));
                    block += 1;
                }
                let bytes = _mm512_loadu_si512(dst.add(16 * half).cast());
                let added = Self::dot_bytes(_mm512_setzero_si512(), _mm512_set1_epi8(UP), bytes);
                _mm512_storeu_si512(dst.add(32 + 16 * half).cast(), _mm512_sub_epi32(_mm512_setzero_si512(), added));
            }
            half += 1;
        }
    }
    #[inline(always)]
    unsafe fn chunk<const R: usize, const M: usize>(
        w: &[*const u8; R],
        x: *const f32,
        c: usize,
        _n: usize,
        sums: &mut [[__m512; M]; R],
    ) {
        // SAFETY: rows are whole lines with their scales; packed lines are as `pack` wrote them.
        unsafe {
            let [bytes, scales] = dtype::Q4.at(c);
            let levels = _mm512_broadcast_i32x4(_mm_loadu_si128(T::MOVED_UP.as_ptr().cast()));
            let nibble = _mm512_set1_epi8(15);
            let mut half = 0;
            while half < 2 {
                let weights = each::<_, R>(|r| {
                    let line = _mm512_loadu_si512(w[r].add(bytes).cast());
                    let numbers = if half == 0 { line } else { _mm512_srli_epi16::<4>(line) };
                    _mm512_shuffle_epi8(levels, _mm512_and_si512(numbers, nibble))
                });
                let spread = spread(half);
                let factors = each::<_, R>(|r| {
                    let four = _mm512_set1_epi64(w[r].add(scales).cast::<i64>().read_unaligned());
                    _mm512_castsi512_ps(_mm512_shuffle_epi8(four, spread))
                });
                let mut m = 0;
                while m < M {
                    let packed = x.add((c * M + m) * Self::ROOM);
                    let bytes = _mm512_loadu_si512(packed.add(16 * half).cast());
                    let added = _mm512_loadu_si512(packed.add(32 + 16 * half).cast());
                    let scale = _mm512_loadu_ps(packed.add(64 + 16 * half));
                    let mut r = 0;
                    while r < R {
                        let sum = _mm512_cvtepi32_ps(Self::dot_bytes(added, weights[r], bytes));
                        sums[r][m] = _mm512_fmadd_ps(sum, _mm512_mul_ps(scale, factors[r]), sums[r][m]);
                        r += 1;
                    }
                    m += 1;
                }
                half += 1;
            }
        }
    }
    const TILES_FROM: usize = if HAS_VNNI { tiles_from(2) } else { usize::MAX };
    #[inline(always)]
    unsafe fn tile<const M: usize>(
        w: [*const u8; 4],
        by: usize,
        x: *const f32,
        chunks: usize,
        sums: &mut [[__m512; M]; 4],
    ) {
        // SAFETY: the set exists (trait contract), with VNNI (above); the caller's promises are the same.
        unsafe { tile_levels(&T::MOVED_UP, w, by, x, chunks, sums) }
    }
}

/// A tile of [`Levels`] in assembly: sums of four rows and up to four columns in zmm16 to zmm31; of half a line the
/// rows' levels in zmm0 to zmm3 and their scales, spread, in zmm4 to zmm7; a column's bytes, what is to be added and
/// its scales in zmm8 to zmm10, products in zmm11 and zmm12; the table of levels, the mask of a number and where the
/// first half's scales go in zmm13 to zmm15, the second's in memory. A column is its number and its sums.
macro_rules! levels {
    ($first:ident, $by:ident, $x:ident, $lines:ident, $scales:ident, $sums:ident, $constants:ident, $columns:literal,
     $([$m:literal: $s0:literal $s1:literal $s2:literal $s3:literal])*) => {
        asm!(
            "2:",
            "vpandd zmm0, zmm14, [{w0}]", "vpandd zmm1, zmm14, [{w1}]", "vpandd zmm2, zmm14, [{w2}]", "vpandd zmm3, zmm14, [{w3}]",
            levels!(@rows "zmm15"),
            $(levels!(@column $m "0" $s0 $s1 $s2 $s3),)*
            "vpsrlw zmm0, [{w0}], 4", "vpsrlw zmm1, [{w1}], 4", "vpsrlw zmm2, [{w2}], 4", "vpsrlw zmm3, [{w3}], 4",
            "vpandd zmm0, zmm0, zmm14", "vpandd zmm1, zmm1, zmm14", "vpandd zmm2, zmm2, zmm14", "vpandd zmm3, zmm3, zmm14",
            levels!(@rows "[{second}]"),
            $(levels!(@column $m "64" $s0 $s1 $s2 $s3),)*
            "prefetcht0 [{w0} + {by}]", "prefetcht0 [{w1} + {by}]", "prefetcht0 [{w2} + {by}]", "prefetcht0 [{w3} + {by}]",
            "add {w0}, 64", "add {w1}, 64", "add {w2}, 64", "add {w3}, 64",
            concat!("add {x}, 384*", $columns),
            // Eight bytes on, and 64 less, as far as the rows have gone.
            "sub {s}, 56",
            "dec {n}",
            "jnz 2b",
            w0 = inout(reg) $first[0] => _, w1 = inout(reg) $first[1] => _, w2 = inout(reg) $first[2] => _, w3 = inout(reg) $first[3] => _,
            by = in(reg) $by, x = inout(reg) $x => _, n = inout(reg) $lines => _, s = inout(reg) $scales => _, second = in(reg) &raw const $constants[3],
            out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _, out("zmm6") _, out("zmm7") _,
            out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _, out("zmm12") _,
            in("zmm13") $constants[0], in("zmm14") $constants[1], in("zmm15") $constants[2],
            inout("zmm16") $sums[0], inout("zmm17") $sums[1], inout("zmm18") $sums[2], inout("zmm19") $sums[3],
            inout("zmm20") $sums[4], inout("zmm21") $sums[5], inout("zmm22") $sums[6], inout("zmm23") $sums[7],
            inout("zmm24") $sums[8], inout("zmm25") $sums[9], inout("zmm26") $sums[10], inout("zmm27") $sums[11],
            inout("zmm28") $sums[12], inout("zmm29") $sums[13], inout("zmm30") $sums[14], inout("zmm31") $sums[15],
            options(nostack, readonly),
        )
    };
    // Levels of the numbers in zmm0 to zmm3; scales of the half that `$spread` spreads.
    (@rows $spread:literal) => {
        concat!(
            "vpbroadcastq zmm4, qword ptr [{w0} + {s}]\n", "vpbroadcastq zmm5, qword ptr [{w1} + {s}]\n",
            "vpbroadcastq zmm6, qword ptr [{w2} + {s}]\n", "vpbroadcastq zmm7, qword ptr [{w3} + {s}]\n",
            "vpshufb zmm0, zmm13, zmm0\n", "vpshufb zmm1, zmm13, zmm1\n", "vpshufb zmm2, zmm13, zmm2\n", "vpshufb zmm3, zmm13, zmm3\n",
            "vpshufb zmm4, zmm4, ", $spread, "\n", "vpshufb zmm5, zmm5, ", $spread, "\n",
            "vpshufb zmm6, zmm6, ", $spread, "\n", "vpshufb zmm7, zmm7, ", $spread,
        )
    };
    (@column $m:literal $at:literal $s0:literal $s1:literal $s2:literal $s3:literal) => {
        concat!(
            "vmovdqu64 zmm8, [{x} + 384*", $m, " + ", $at, "]\n",
            "vmovdqu64 zmm9, [{x} + 384*", $m, " + 128 + ", $at, "]\n",
            "vmovdqu64 zmm10, [{x} + 384*", $m, " + 256 + ", $at, "]\n",
            levels!(@row "0" "4" $s0), levels!(@row "1" "5" $s1), levels!(@row "2" "6" $s2), levels!(@row "3" "7" $s3),
        )
    };
    (@row $levels:literal $scales:literal $sum:literal) => {
        concat!(
            "vmovdqa64 zmm11, zmm9\n",
            "vpdpbusd zmm11, zmm", $levels, ", zmm8\n",
            "vmulps zmm12, zmm10, zmm", $scales, "\n",
            "vcvtdq2ps zmm11, zmm11\n",
            "vfmadd231ps zmm", $sum, ", zmm11, zmm12\n",
        )
    };
}

/// [`Dot::tile`] of [`Levels`]; a function of its own, since only one with the feature may name the registers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn tile_levels<const M: usize>(
    levels: &[i8; 16],
    w: [*const u8; 4],
    by: usize,
    x: *const f32,
    chunks: usize,
    sums: &mut [[__m512; M]; 4],
) {
    // SAFETY: sixteen bytes of the table.
    let table = unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(levels.as_ptr().cast())) };
    let constants = [table, _mm512_set1_epi8(15), spread(0), spread(1)];
    let mut all = [_mm512_setzero_ps(); 16];
    for (all, sums) in all.chunks_exact_mut(4).zip(sums.iter()) {
        all[..M].copy_from_slice(sums);
    }
    for Group { before, n, first, scales } in groups(dtype::Q4, w, by, chunks) {
        let x = x.wrapping_add(before * M * LEVELS_ROOM);
        // SAFETY: the lines are readable, and their scales (caller); prefetches may be of any address.
        unsafe {
            match M {
                2 => {
                    levels!(first, by, x, n, scales, all, constants, "2", ["0": "16" "20" "24" "28"] ["1": "17" "21" "25" "29"])
                }
                3 => {
                    levels!(first, by, x, n, scales, all, constants, "3", ["0": "16" "20" "24" "28"] ["1": "17" "21" "25" "29"] ["2": "18" "22" "26" "30"])
                }
                _ => {
                    levels!(first, by, x, n, scales, all, constants, "4", ["0": "16" "20" "24" "28"] ["1": "17" "21" "25" "29"] ["2": "18" "22" "26" "30"] ["3": "19" "23" "27" "31"])
                }
            }
        }
    }
    for (all, sums) in all.chunks_exact(4).zip(sums) {
        sums.copy_from_slice(&all[..M]);
    }
}

/// Where in the lanes the scales of a half of a line go: of its four the two of this half, each the upper bytes of
/// eight lanes.
#[inline]
#[target_feature(enable = "avx512f")]
fn spread(half: usize) -> __m512i {
    let (first, second) = if half == 0 { (0x0100_8080, 0x0302_8080) } else { (0x0504_8080, 0x0706_8080) };
    _mm512_inserti64x4::<1>(_mm512_set1_epi32(first), _mm256_set1_epi32(second))
}

/// Elements of k that are two vectors, one of bf16, and what a matrix unit's tile has of a row.
pub(crate) const STEP: usize = 32;

/// Weights that become f32, a step at a time: what bf16 is made of.
pub(crate) trait Widened: 'static {
    /// Storage of a weight.
    type Elem;
    /// Bytes of a step of a row.
    const STEP_BYTES: usize = STEP * size_of::<Self::Elem>();
    /// Elements `at..at + STEP`, whole steps from the start, of the row at `row`.
    ///
    /// # Safety
    /// They are readable; the vectors exist.
    unsafe fn load(row: *const Self::Elem, at: usize) -> [__m512; 2];
}

impl<E: Storage + 'static> Widened for E {
    type Elem = E::Elem;
    #[inline(always)]
    unsafe fn load(row: *const E::Elem, at: usize) -> [__m512; 2] {
        // SAFETY: the elements are readable (caller).
        unsafe { [E::load::<Avx512>(row.add(at)), E::load::<Avx512>(row.add(at + STEP / 2))] }
    }
}

impl Widened for Q8 {
    type Elem = i8;
    #[inline(always)]
    unsafe fn load(row: *const i8, at: usize) -> [__m512; 2] {
        let [bytes, scale] = dtype::Q8.at(at / dtype::Q8.elems);
        // SAFETY: rows are whole blocks, with their scales (caller).
        unsafe {
            let bytes = row.add(bytes + at % dtype::Q8.elems);
            let scale = Avx512::splat(*row.add(scale).cast::<f32>());
            let first = Avx512::mul(Avx512::load_i8(bytes), scale);
            [first, Avx512::mul(Avx512::load_i8(bytes.add(STEP / 2)), scale)]
        }
    }
}

impl<T: Table> Widened for Fours<T> {
    type Elem = u8;
    const STEP_BYTES: usize = STEP / 2;
    #[inline(always)]
    unsafe fn load(row: *const u8, at: usize) -> [__m512; 2] {
        // A step is a block.
        let (byte, shift, scale) = dtype::q4_at(at);
        // SAFETY: rows are whole lines, with their scales (caller); levels are as many as four bits name.
        unsafe {
            let bytes = _mm256_loadu_si256(row.add(byte).cast());
            let numbers = if shift == 0 { bytes } else { _mm256_srli_epi16::<4>(bytes) };
            let levels = _mm256_broadcastsi128_si256(_mm_loadu_si128(T::LEVELS.as_ptr().cast()));
            let levels = _mm256_shuffle_epi8(levels, _mm256_and_si256(numbers, _mm256_set1_epi8(15)));
            let scale = Avx512::splat(super::bf16_to_f32(*row.add(scale).cast::<u16>()));
            let times_scale = |levels| _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(levels)), scale);
            [times_scale(_mm256_castsi256_si128(levels)), times_scale(_mm256_extracti128_si256::<1>(levels))]
        }
    }
}

#[inline(always)]
unsafe fn even(pairs: __m512i) -> __m512 {
    // SAFETY: arithmetic only.
    unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)) }
}

#[inline(always)]
unsafe fn odd(pairs: __m512i) -> __m512 {
    // SAFETY: arithmetic only.
    unsafe { _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32))) }
}
