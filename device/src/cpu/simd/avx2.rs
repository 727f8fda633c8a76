//! AVX2 with FMA and F16C: eight lanes, sixteen registers.

use super::{Dot, F16, F32, Leaf, Simd, Table, UP, Widen, add_products, each, load_up_to, tiles_from, to_whole};
use core::arch::{asm, x86_64::*};
use core::marker::PhantomData;
use perpetua_shared::dtype::{self, Lines};

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
    // Twelve sums, three activations and a row fill the sixteen registers: see `tile`.
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
            // SAFETY: the block is readable, its transpose writable (caller). Vector i holds four columns of rows i and
            // i + 4.
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

/// A tile of four weight rows and three activation rows in assembly: twelve sums in ymm0 to ymm11, activations in ymm12
/// to ymm14, a weight vector in ymm15. The compiler's own allotment of the registers spills sums. Each part of a chunk
/// loads the vectors of the activation rows at the offsets given, then one weight vector after another, by the
/// instructions given, and multiplies it with them; a chunk is `$bytes` of every weight row, and `$step` bytes of the
/// group.
macro_rules! tile {
    ($w:ident, $by:ident, $x:ident, $chunks:ident, $sums:ident, $bytes:literal, $step:literal,
     $({ $x0:literal $x1:literal $x2:literal : $load:literal $at:literal $($then:literal)* })*) => {
        asm!(
            "2:",
            $(
                concat!("vmovups ymm12, [{x} + ", $x0, "]"),
                concat!("vmovups ymm13, [{x} + ", $x1, "]"),
                concat!("vmovups ymm14, [{x} + ", $x2, "]"),
                concat!($load, " ymm15, [{w0} + ", $at, "]"), $($then,)* tile!(@products "0" "1" "2"),
                concat!($load, " ymm15, [{w1} + ", $at, "]"), $($then,)* tile!(@products "3" "4" "5"),
                concat!($load, " ymm15, [{w2} + ", $at, "]"), $($then,)* tile!(@products "6" "7" "8"),
                concat!($load, " ymm15, [{w3} + ", $at, "]"), $($then,)* tile!(@products "9" "10" "11"),
            )*
            "prefetcht0 [{w0} + {by}]", "prefetcht0 [{w1} + {by}]", "prefetcht0 [{w2} + {by}]", "prefetcht0 [{w3} + {by}]",
            concat!("add {w0}, ", $bytes), concat!("add {w1}, ", $bytes),
            concat!("add {w2}, ", $bytes), concat!("add {w3}, ", $bytes),
            concat!("add {x}, ", $step),
            "dec {n}",
            "jnz 2b",
            w0 = inout(reg) $w[0] => _, w1 = inout(reg) $w[1] => _, w2 = inout(reg) $w[2] => _, w3 = inout(reg) $w[3] => _,
            by = in(reg) $by, x = inout(reg) $x => _, n = inout(reg) $chunks => _,
            inout("ymm0") $sums[0], inout("ymm1") $sums[1], inout("ymm2") $sums[2], inout("ymm3") $sums[3],
            inout("ymm4") $sums[4], inout("ymm5") $sums[5], inout("ymm6") $sums[6], inout("ymm7") $sums[7],
            inout("ymm8") $sums[8], inout("ymm9") $sums[9], inout("ymm10") $sums[10], inout("ymm11") $sums[11],
            out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
            options(nostack, readonly),
        )
    };
    // A weight vector times three activation vectors.
    (@products $s0:literal $s1:literal $s2:literal) => {
        concat!(
            "vfmadd231ps ymm", $s0, ", ymm15, ymm12\n",
            "vfmadd231ps ymm", $s1, ", ymm15, ymm13\n",
            "vfmadd231ps ymm", $s2, ", ymm15, ymm14",
        )
    };
}

/// As `avx512::EvenOdd`: a register of sixteen weights becomes two of f32, the even ones by a shift, the odd ones by
/// two, since no register is left for a mask. A chunk is a cache line, so that a tile asks for every line once.
///
/// PERF: 512x256x1024 on one core, whose FMAs reach 87 GFLOP/s with f16: 37 with the compiler's registers, 67 with a
/// mask in memory and half the chunk, 71 with this (Zen 3, 2026-11-24).
pub(crate) struct EvenOdd;

/// Weights of a register.
const PAIRS: usize = 16;

impl Dot<Avx2> for EvenOdd {
    type Elem = u16;
    const CHUNK: usize = 2 * PAIRS;

    #[inline(always)]
    unsafe fn chunk<const R: usize, const M: usize>(
        w: &[*const u16; R],
        x: *const f32,
        c: usize,
        n: usize,
        sums: &mut [[__m256; M]; R],
    ) {
        let mut part = 0;
        while part < 2 {
            let (at, x) = (c * Self::CHUNK + part * PAIRS, x.wrapping_add(c * Self::CHUNK * M + part * PAIRS));
            // SAFETY: `n` weights are readable (caller), and so is a buffer of sixteen.
            unsafe {
                let pairs = each::<_, R>(|r| {
                    let p = w[r].wrapping_add(at);
                    if n == Self::CHUNK {
                        return _mm256_loadu_si256(p.cast());
                    }
                    let mut some = [0u16; PAIRS];
                    let left = n.saturating_sub(part * PAIRS);
                    core::ptr::copy_nonoverlapping(p, some.as_mut_ptr(), if left < PAIRS { left } else { PAIRS });
                    _mm256_loadu_si256(some.as_ptr().cast())
                });
                let even = |r: usize| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs[r]));
                let odd = |r: usize| {
                    _mm256_castsi256_ps(_mm256_and_si256(pairs[r], _mm256_set1_epi32(0xffff_0000_u32 as i32)))
                };
                add_products::<Avx2, R, M>(each(even), x, Self::CHUNK, sums);
                add_products::<Avx2, R, M>(each(odd), x.add(PAIRS / 2), Self::CHUNK, sums);
            }
            part += 1;
        }
    }
    #[inline(always)]
    unsafe fn pack(dst: *mut f32, src: *const f32, n: usize) {
        let mut at = 0;
        while at < Self::CHUNK {
            // SAFETY: `n` elements are readable and a chunk writable (caller).
            unsafe {
                let from = |at: usize| load_up_to::<Avx2>(src.wrapping_add(at), n.saturating_sub(at));
                let (low, high) = (from(at), from(at + 8));
                // A shuffle takes each half's even ones of both by fours: the middle quarters change places.
                let order = |v| _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(v)));
                _mm256_storeu_ps(dst.add(at), order(_mm256_shuffle_ps::<0b10_00_10_00>(low, high)));
                _mm256_storeu_ps(dst.add(at + 8), order(_mm256_shuffle_ps::<0b11_01_11_01>(low, high)));
            }
            at += PAIRS;
        }
    }
    const TILES_FROM: usize = tiles_from(Self::TILE_COLS);
    #[inline(always)]
    unsafe fn tile<const M: usize>(
        w: [*const u16; 4],
        by: usize,
        x: *const f32,
        chunks: usize,
        sums: &mut [[__m256; M]; 4],
    ) {
        // SAFETY: the set exists (trait contract); the caller's promises are the same. There is a tile of one width
        // only.
        unsafe { tile_bf16(w, by, x, chunks, &mut *sums.as_mut_ptr().cast()) }
    }
}

/// f16 and f32 weights: as [`Widen`] multiplies them, with a tile.
macro_rules! widened {
    ($(#[$doc:meta] $name:ident: $storage:ident, $elem:ty, $tile:ident;)*) => { $(
        #[$doc]
        pub(crate) struct $name;

        impl Dot<Avx2> for $name {
            type Elem = $elem;
            const CHUNK: usize = 8;

            #[inline(always)]
            unsafe fn chunk<const R: usize, const M: usize>(
                w: &[*const $elem; R],
                x: *const f32,
                c: usize,
                n: usize,
                sums: &mut [[__m256; M]; R],
            ) {
                // SAFETY: the caller's promises are the same.
                unsafe { <Widen<$storage> as Dot<Avx2>>::chunk(w, x, c, n, sums) }
            }
            #[inline(always)]
            unsafe fn pack(dst: *mut f32, src: *const f32, n: usize) {
                // SAFETY: the caller's promises are the same.
                unsafe { <Widen<$storage> as Dot<Avx2>>::pack(dst, src, n) }
            }
            const TILES_FROM: usize = tiles_from(Self::TILE_COLS);
            #[inline(always)]
            unsafe fn tile<const M: usize>(w: [*const $elem; 4], by: usize, x: *const f32, chunks: usize, sums: &mut [[__m256; M]; 4]) {
                // SAFETY: the set exists (trait contract); the caller's promises are the same. There is a tile of one
                // width only.
                unsafe { $tile(w, by, x, chunks, &mut *sums.as_mut_ptr().cast()) }
            }
        }
    )* };
}
widened! {
    /// f16 weights.
    Half: F16, u16, tile_f16;
    /// f32 weights.
    Whole: F32, f32, tile_f32;
}

/// 4-bit weights with activations in 8 bits, as `avx512::Levels`: the products of unsigned and signed bytes are added
/// in pairs to 16 bits, which levels of seven bits cannot pass, and these in pairs to 32.
///
/// A packed line, 512 bytes of which 272 are used: signed bytes [128]; for each block per lane what moving the levels
/// up added, negative [4][8 i32]; the blocks' scales [4 f32].
pub(crate) struct Levels<T>(PhantomData<T>);

/// Sums of four products of unsigned bytes below 128 with signed ones a lane.
#[inline(always)]
unsafe fn dot_bytes(unsigned: __m256i, signed: __m256i) -> __m256i {
    // SAFETY: the set exists (caller); arithmetic only.
    unsafe { _mm256_madd_epi16(_mm256_maddubs_epi16(unsigned, signed), _mm256_set1_epi16(1)) }
}

impl<T: Table> Dot<Avx2> for Levels<T> {
    type Elem = u8;
    const CHUNK: usize = dtype::Q4.elems;
    const LINES: Option<Lines> = Some(dtype::Q4);
    const TILE_COLS: usize = 2;

    #[inline(always)]
    unsafe fn pack(dst: *mut f32, src: *const f32, n: usize) {
        let mut block = 0;
        while block < 4 {
            // SAFETY: `n` elements are readable and 512 bytes writable (caller).
            unsafe {
                let at = block * dtype::Q4_BLOCK;
                let x =
                    each::<_, 4>(|i| load_up_to::<Avx2>(src.wrapping_add(at + 8 * i), n.saturating_sub(at + 8 * i)));
                let size = |v| _mm256_andnot_ps(_mm256_set1_ps(-0.0), v);
                let largest = |a, b| _mm256_max_ps(a, b);
                let max = Avx2::largest(largest(largest(size(x[0]), size(x[1])), largest(size(x[2]), size(x[3]))));
                let unordered = |a, b| _mm256_cmp_ps::<_CMP_UNORD_Q>(a, b);
                let is_nan = _mm256_movemask_ps(_mm256_or_ps(unordered(x[0], x[1]), unordered(x[2], x[3]))) != 0;
                let [inverse, scale] = to_whole(max, is_nan, 127.0);
                let whole = each::<_, 4>(|i| _mm256_cvtps_epi32(_mm256_mul_ps(x[i], _mm256_set1_ps(inverse))));
                // Packing takes halves of both in turn.
                let pairs = |a, b| _mm256_packs_epi32(a, b);
                let mixed = _mm256_packs_epi16(pairs(whole[0], whole[1]), pairs(whole[2], whole[3]));
                let bytes = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
                _mm256_storeu_si256(dst.cast::<u8>().add(at).cast(), bytes);
                let added = dot_bytes(_mm256_set1_epi8(UP), bytes);
                _mm256_storeu_si256(dst.add(32 + 8 * block).cast(), _mm256_sub_epi32(_mm256_setzero_si256(), added));
                *dst.add(64 + block) = scale;
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
        sums: &mut [[__m256; M]; R],
    ) {
        // SAFETY: rows are whole lines with their scales; packed lines are as `pack` wrote them.
        unsafe {
            let [bytes, scales] = dtype::Q4.at(c);
            let levels = _mm256_broadcastsi128_si256(_mm_loadu_si128(T::MOVED_UP.as_ptr().cast()));
            let nibble = _mm256_set1_epi8(15);
            let packed = |m: usize| x.add((c * M + m) * dtype::Q4.elems);
            // A line's four scales times those of its activations, in both halves.
            let factors = each::<_, R>(|r| {
                let bits = _mm_cvtepu16_epi32(_mm_loadl_epi64(w[r].add(scales).cast()));
                let four = _mm_castsi128_ps(_mm_slli_epi32::<16>(bits));
                each::<_, M>(|m| {
                    let both = _mm_mul_ps(four, _mm_loadu_ps(packed(m).add(64)));
                    _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(both), both)
                })
            });
            macro_rules! block {
                ($block:literal) => {
                    let weights = each::<_, R>(|r| {
                        let line = _mm256_loadu_si256(w[r].add(bytes + 32 * ($block % 2)).cast());
                        let numbers = if $block < 2 { line } else { _mm256_srli_epi16::<4>(line) };
                        _mm256_shuffle_epi8(levels, _mm256_and_si256(numbers, nibble))
                    });
                    let mut m = 0;
                    while m < M {
                        let bytes = _mm256_loadu_si256(packed(m).add(8 * $block).cast());
                        let added = _mm256_loadu_si256(packed(m).add(32 + 8 * $block).cast());
                        let mut r = 0;
                        while r < R {
                            let sum = _mm256_cvtepi32_ps(_mm256_add_epi32(added, dot_bytes(weights[r], bytes)));
                            let factor = _mm256_permute_ps::<{ $block * 0b01_01_01_01 }>(factors[r][m]);
                            sums[r][m] = _mm256_fmadd_ps(sum, factor, sums[r][m]);
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

/// [`Dot::tile`]; a function of its own, since only one with the feature may name the registers.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile_bf16(w: [*const u16; 4], by: usize, x: *const f32, chunks: usize, sums: &mut [__m256; 12]) {
    // SAFETY: the chunks are readable (caller); prefetches may be of any address.
    unsafe {
        tile!(w, by, x, chunks, sums, "64", "384",
            { "0" "128" "256" : "vmovdqu" "0" "vpslld ymm15, ymm15, 16" }
            { "32" "160" "288" : "vmovdqu" "0" "vpsrld ymm15, ymm15, 16" "vpslld ymm15, ymm15, 16" }
            { "64" "192" "320" : "vmovdqu" "32" "vpslld ymm15, ymm15, 16" }
            { "96" "224" "352" : "vmovdqu" "32" "vpsrld ymm15, ymm15, 16" "vpslld ymm15, ymm15, 16" }
        );
    }
}

/// [`Dot::tile`]; a function of its own, since only one with the feature may name the registers.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile_f16(w: [*const u16; 4], by: usize, x: *const f32, chunks: usize, sums: &mut [__m256; 12]) {
    // SAFETY: as `tile_bf16`.
    unsafe { tile!(w, by, x, chunks, sums, "16", "96", { "0" "32" "64" : "vcvtph2ps" "0" }) }
}

/// [`Dot::tile`]; a function of its own, since only one with the feature may name the registers.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile_f32(w: [*const f32; 4], by: usize, x: *const f32, chunks: usize, sums: &mut [__m256; 12]) {
    // SAFETY: as `tile_bf16`.
    unsafe { tile!(w, by, x, chunks, sums, "32", "96", { "0" "32" "64" : "vmovups" "0" }) }
}
