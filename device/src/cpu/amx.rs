//! Products on a core's matrix unit (AMX), for bf16 weights where no pass of one row has to give the same bits.
//!
//! ```text
//!  activations, packed: blocks of 16 rows,            │ hi │ hi │
//!  x = hi + lo, both bf16, in pairs along k           │ lo │ lo │  <- 32 of k
//!                                                 ├────┼────┤
//!  weights, in place: 16 rows of 32 ──────── k ──▶ │ 2 x 2 tiles  │
//!  ──────────────────────────────────────────────▶ │ of f32 sums  │
//! ```
//! hi = bf16(x), lo = bf16(x - hi), so that activations keep 16 significant bits: an output is off by sum |x| |w| * 2^-17, where
//! with bf16 activations it would be 2^-9. Twice the products, still several times as many as vectors do.
//!
//! Attention's products of prompts are formed so, too: keys stand where weights do, values transposed.
//!
//! The order of summation is the unit's, 32 of k at a time, hi before lo, whatever stands beside an output: tasks may be cut
//! in any way. It takes subnormal numbers for zeros, and an infinite weight may give NaN (times a lo of zero).
//!
//! PERF: 128x1024x1024 on one core 161 GFLOP/s where `gemm` makes 77 in the same run, at their best 295 and 99; products alone, from
//! L1, are 900 of the unit's 1100, half of them for lo (Sapphire Rapids, 2026-11-21). Packing and what follows are
//! the rest: parts of k whose activations stay in L1, and asking for tiles a step ahead, were no faster.
//!
//! Tile registers: 0 to 3 sums, 4 and 5 weights, 6 and 7 activations. The compiler uses none of them.

use super::outer::{self, Products};
use super::simd::{self, Leaf, Level, Simd};
use crate::io::Tensor;
use core::arch::{asm, x86_64::*};

/// Rows of a tile, of weights and of activations.
pub(crate) const TILE: usize = 16;

/// Elements of k that a tile has.
pub(crate) const STEP: usize = 32;

/// f32 as large as a tile, 1 KiB.
const TILE_FLOATS: usize = 256;

/// The vectors of every core that has the unit.
pub(crate) type Vectors = <simd::Avx512 as Level>::S;

/// Whether this process may use the unit: the processor has it and Linux lends it, which has to be asked once for its state of
/// 8 KiB a thread.
pub(crate) fn is_available() -> bool {
    #[cfg(all(target_os = "linux", target_pointer_width = "64"))]
    {
        use core::arch::x86_64::{__cpuid, __cpuid_count};
        unsafe extern "C" {
            fn syscall(number: i64, ...) -> i64;
        }
        const ARCH_PRCTL: i64 = 158;
        const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
        const XTILEDATA: i64 = 18;
        const BF16_AND_TILE: u32 = 1 << 22 | 1 << 24;
        // SAFETY: every x86-64 processor has `cpuid`; the call asks for a permission and touches no memory; std links the C
        // library that has it.
        unsafe {
            __cpuid(0).eax >= 7
                && __cpuid_count(7, 0).edx & BF16_AND_TILE == BF16_AND_TILE
                && syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0
        }
    }
    #[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
    false
}

/// Whether rows of `k` elements are whole tiles.
pub(crate) fn takes(k: usize) -> bool {
    k > 0 && k.is_multiple_of(STEP)
}

/// [`Products`] of bf16 weights whose rows the unit [takes].
pub(crate) struct Tiles;

impl<S: Simd> Products<S> for Tiles {
    type Elem = u16;

    /// Into blocks of 16 rows, as [`split`] leaves them.
    unsafe fn pack(x: &Tensor, first: usize, [rows, k]: [usize; 2], wide: *mut f32, packed: *mut f32, _: usize) {
        let mut r = 0;
        while r < rows {
            let n = TILE.min(rows - r);
            // SAFETY: the rows are of `k` elements; `wide` has room for n of them, `packed` for k f32 a row of whole blocks.
            unsafe {
                let (src, stride) = outer::rows_of_f32::<S>(x, first + r, [n, k], wide);
                split(core::array::from_fn(|i| src.wrapping_add(i * stride)), [n, k], packed.add(r * k));
            }
            r += n;
        }
    }

    unsafe fn multiply(
        w: *const u16,
        w_stride: usize,
        [n, k, rows]: [usize; 3],
        packed: *const f32,
        _: usize,
        sums: *mut f32,
        sums_stride: usize,
    ) {
        let height = TILE.min(n);
        let config = Config::new(height as u8);
        let blocks = rows.div_ceil(TILE);
        // SAFETY: tiles of weights begin at n - height at most, so they are inside, as are the packed blocks and their sums (see
        // the trait). The unit is there (`is_available`).
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly));
            let mut j = 0;
            while j < n {
                // The last tile begins where it ends with the weights: what it has in common with the one before is written twice.
                let at = [j, j + TILE].map(|j| j.min(n - height));
                let tall = if n - j > TILE { 2 } else { 1 };
                let mut m = 0;
                while m < blocks {
                    let wide = 2.min(blocks - m);
                    let place = Place {
                        w: at.map(|j| w.add(j * w_stride)),
                        w_stride,
                        k,
                        x: packed.add(m * TILE * k),
                        sums: at.map(|j| sums.add(j * sums_stride + m * TILE)),
                        sums_stride,
                        ahead: if m == 0 { 2 * TILE * w_stride } else { 0 },
                    };
                    match (tall, wide) {
                        (2, 2) => block::<2, 2>(place),
                        (2, _) => block::<2, 1>(place),
                        (_, 2) => block::<1, 2>(place),
                        _ => block::<1, 1>(place),
                    }
                    m += wide;
                }
                j += tall * TILE;
            }
            asm!("tilerelease", options(nostack, nomem));
        }
    }
}

/// What the tile registers hold: palette 1, and of each the bytes of a row and the rows.
#[repr(C, align(64))]
struct Config([u8; 64]);

impl Config {
    /// Weights and sums of `height` rows.
    fn new(height: u8) -> Config {
        let mut config = [0; 64];
        config[0] = 1;
        for tile in 0..8 {
            config[16 + 2 * tile] = 64;
            config[48 + tile] = if tile < 6 { height } else { TILE as u8 };
        }
        Config(config)
    }
}

/// Where a block finds its operands: of two tiles of weights, and two neighbouring blocks of activations.
struct Place {
    w: [*const u16; 2],
    w_stride: usize,
    k: usize,
    x: *const f32,
    sums: [*mut f32; 2],
    sums_stride: usize,
    /// How far behind its weights those lie that are asked for; 0: none.
    ahead: usize,
}

/// Sums of `N` tiles of weights by `M` blocks of activations.
///
/// # Safety
/// The operands are there, and so is the unit, configured.
#[inline(always)]
unsafe fn block<const N: usize, const M: usize>(place: Place) {
    let Place { w, w_stride, k, x, sums, sums_stride, ahead } = place;
    let (w_bytes, sums_bytes) = (2 * w_stride, 4 * sums_stride);
    // SAFETY: the caller's promise; what is asked for may be any address.
    unsafe {
        asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem));
        for step in 0..k / STEP {
            let w = w.map(|w| w.add(step * STEP));
            asm!("tileloadd tmm4, [{w}+{s}*1]", w = in(reg) w[0], s = in(reg) w_bytes, options(nostack, readonly));
            if N == 2 {
                asm!("tileloadd tmm5, [{w}+{s}*1]", w = in(reg) w[1], s = in(reg) w_bytes, options(nostack, readonly));
            }
            for term in 0..2 {
                let x = x.add(step * TILE_FLOATS + term * TILE * k / 2);
                asm!("tileloadd tmm6, [{x}+{s}*1]", x = in(reg) x, s = in(reg) 64usize, options(nostack, readonly));
                if M == 2 {
                    let x = x.add(TILE * k);
                    asm!("tileloadd tmm7, [{x}+{s}*1]", x = in(reg) x, s = in(reg) 64usize, options(nostack, readonly));
                }
                asm!("tdpbf16ps tmm0, tmm4, tmm6", options(nostack, nomem));
                if M == 2 {
                    asm!("tdpbf16ps tmm1, tmm4, tmm7", options(nostack, nomem));
                }
                if N == 2 {
                    asm!("tdpbf16ps tmm2, tmm5, tmm6", options(nostack, nomem));
                }
                if N == 2 && M == 2 {
                    asm!("tdpbf16ps tmm3, tmm5, tmm7", options(nostack, nomem));
                }
            }
            if ahead != 0 {
                for tile in w.iter().take(N) {
                    for r in 0..TILE {
                        let line = tile.wrapping_add(ahead + r * w_stride);
                        _mm_prefetch::<_MM_HINT_T1>(line.cast());
                    }
                }
            }
        }
        let s = sums_bytes;
        asm!("tilestored [{y}+{s}*1], tmm0", y = in(reg) sums[0], s = in(reg) s, options(nostack));
        if M == 2 {
            asm!("tilestored [{y}+{s}*1], tmm1", y = in(reg) sums[0].add(TILE), s = in(reg) s, options(nostack));
        }
        if N == 2 {
            asm!("tilestored [{y}+{s}*1], tmm2", y = in(reg) sums[1], s = in(reg) s, options(nostack));
        }
        if N == 2 && M == 2 {
            asm!("tilestored [{y}+{s}*1], tmm3", y = in(reg) sums[1].add(TILE), s = in(reg) s, options(nostack));
        }
    }
}

/// Packs the first `n` of `rows`, of `k` elements, in two terms: a tile of 16 pairs of k by 16 rows after the other, first all
/// of hi, then of lo. Rows that are missing are zeros.
///
/// # Safety
/// The rows are readable, `k` is whole [tiles](takes), `block` has room for 16 * k f32; the unit is there.
pub(crate) unsafe fn split(rows: [*const f32; TILE], [n, k]: [usize; 2], block: *mut f32) {
    // SAFETY: the unit is there, and `Isa` looks for these conversions beside it.
    unsafe { simd::with_avx512_bf16(Split { rows, n, k, block }) }
}

/// [`split`].
struct Split {
    rows: [*const f32; TILE],
    n: usize,
    k: usize,
    block: *mut f32,
}

impl Leaf for Split {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Split { rows, n, k, block } = self;
        let mut terms = Terms([[[0; STEP]; TILE]; 2]);
        let Terms([his, los]) = &mut terms;
        for step in 0..k / STEP {
            // SAFETY: a step of every row is readable, as are both tiles, and two of the block writable (see `split`); what is
            // asked for may be any address.
            unsafe {
                for r in 0..n {
                    let x = rows[r].add(step * STEP);
                    let [hi, lo] = self::terms(_mm512_loadu_ps(x), _mm512_loadu_ps(x.add(16)));
                    _mm512_store_si512(his[r].as_mut_ptr().cast(), hi);
                    _mm512_store_si512(los[r].as_mut_ptr().cast(), lo);
                }
                // A pair is as large as an f32, and moves as one.
                let to = block.add(step * TILE_FLOATS);
                Vectors::transpose(his.as_ptr().cast(), STEP / 2, to, TILE);
                Vectors::transpose(los.as_ptr().cast(), STEP / 2, to.add(TILE * k / 2), TILE);
            }
        }
    }
}

/// A step of rows in two terms: rows of whole cache lines.
#[repr(align(64))]
struct Terms([[[u16; STEP]; TILE]; 2]);

/// 32 elements, of both vectors, in two terms: hi and lo.
#[inline(always)]
pub(crate) unsafe fn terms(low: __m512, high: __m512) -> [__m512i; 2] {
    // SAFETY: arithmetic only; 32 bf16 are 64 bytes.
    unsafe {
        let hi = core::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
        let low = rest(low, _mm512_castsi512_si256(hi));
        let high = rest(high, _mm512_extracti64x4_epi64::<1>(hi));
        [hi, core::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low))]
    }
}

/// Of 32 elements, 0 and 16, 1 and 17, ...
#[inline(always)]
pub(crate) unsafe fn in_pairs(elements: __m512i) -> __m512i {
    // SAFETY: arithmetic only.
    unsafe {
        let first = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        let second = _mm512_slli_epi32::<16>(_mm512_add_epi32(first, _mm512_set1_epi32(16)));
        _mm512_permutexvar_epi16(_mm512_or_si512(first, second), elements)
    }
}

/// x - hi; 0 where hi is not finite, and the difference NaN.
#[inline(always)]
unsafe fn rest(x: __m512, hi: __m256i) -> __m512 {
    // SAFETY: arithmetic only.
    unsafe {
        let hi = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(hi)));
        let rest = _mm512_sub_ps(x, hi);
        _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_ORD_Q>(rest, rest), rest)
    }
}
