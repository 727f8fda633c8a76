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
//! The order of summation is the unit's, 32 of k at a time, hi before lo, whatever stands beside an output: tasks may be cut
//! in any way. It takes subnormal numbers for zeros, and an infinite weight may give NaN (times a lo of zero).
//!
//! PERF: 128x1024x1024 on one core 161 GFLOP/s where `gemm` makes 77 in the same run, at their best 295 and 99; products alone, from
//! L1, are 900 of the unit's 1100, half of them for lo (Sapphire Rapids, 2026-11-21). Packing and what follows are
//! the rest: parts of k whose activations stay in L1, and asking for tiles a step ahead, were no faster.
//!
//! Tile registers: 0 to 3 sums, 4 and 5 weights, 6 and 7 activations. The compiler uses none of them.

use super::outer::{self, Products};
use super::rows::Row;
use super::simd::{Leaf, Simd};
use crate::io::Tensor;
use core::arch::asm;
use core::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use core::marker::PhantomData;

/// Rows of a tile, of weights and of activations.
const TILE: usize = 16;

/// Elements of k that a tile has.
const STEP: usize = 32;

/// f32 as large as a tile, 1 KiB.
const TILE_FLOATS: usize = 256;

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
    const ALWAYS_WIDE: bool = true;

    /// Into blocks of 16 rows: a tile of 16 pairs of k by 16 rows after the other, first all of hi, then of lo. Rows that are
    /// missing are zeros.
    unsafe fn pack(x: &Tensor, first: usize, [rows, k]: [usize; 2], wide: *mut f32, packed: *mut f32, _: usize) {
        let (hi, lo) = (wide.cast::<u16>(), wide.cast::<u16>().wrapping_add(TILE * k));
        let mut r = 0;
        while r < rows {
            let n = TILE.min(rows - r);
            // SAFETY: `wide` has room for 16 rows of k in hi and lo, `packed` for k f32 a row of whole blocks.
            unsafe {
                for i in 0..n {
                    let row = Row::of(x, [first + r + i, 0], k);
                    S::call(Split::<S> { row, hi: hi.add(i * k), lo: lo.add(i * k), set: PhantomData });
                }
                for part in [hi, lo] {
                    core::ptr::write_bytes(part.add(n * k), 0, (TILE - n) * k);
                }
                let block = packed.add(r * k);
                // A pair is as large as an f32, and moves as one.
                outer::transpose::<S>(hi.cast(), k / 2, [TILE, k / 2], block, TILE);
                outer::transpose::<S>(lo.cast(), k / 2, [TILE, k / 2], block.add(TILE * k / 2), TILE);
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

/// A row in two terms.
struct Split<S> {
    row: Row,
    hi: *mut u16,
    lo: *mut u16,
    set: PhantomData<S>,
}

impl<S: Simd> Leaf for Split<S> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Split { row, hi, lo, .. } = self;
        let mut i = 0;
        while i < row.len() {
            // SAFETY: rows are whole vectors (`takes`), and both terms have room for one (see `pack`).
            unsafe {
                let x = row.load::<S>(i, S::LANES);
                S::store_bf16(hi.add(i), x);
                let rest = S::sub(x, S::load_bf16(hi.add(i)));
                // Where hi is not finite there is no rest: NaN is neither above nor below zero.
                let rest = S::add(S::max(rest, S::splat(0.0)), S::min(rest, S::splat(0.0)));
                S::store_bf16(lo.add(i), rest);
            }
            i += S::LANES;
        }
    }
}
