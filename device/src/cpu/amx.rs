//! Products on a core's matrix unit (AMX), where no pass of one row has to give the same bits.
//!
//! ```text
//!  activations, packed: blocks of 16 rows,            │ hi │ hi │
//!  x = hi + lo, both bf16, in pairs along k           │ lo │ lo │  <- 32 of k
//!                                                 ├────┼────┤
//!  weights: 16 rows of 32; bf16 in place, ── k ──▶ │ 2 x 2 tiles  │
//!  others as hi + lo, made for 32 rows at once ──▶ │ of f32 sums  │
//! ```
//! hi = bf16(x), lo = bf16(x - hi), so that activations keep 16 significant bits: an output is off by sum |x| |w| *
//! 2^-17, where with bf16 activations it would be 2^-9. Twice the products, still several times as many as vectors do.
//!
//! Weights of f32 and q8 keep 16 bits in the same way, those of f16 and q4 all of theirs: three products, lo * lo left
//! out. (MXFP4's are bf16 numbers, which are made, and have no lo.) It is below |x| |w| * 2^-16, so that an output is
//! off by sum |x| |w| * 2^-15 at most. The terms of 32 rows by [`PART`] of k are made in L1 and L2, then multiplied
//! with all activations.
//!
//! Attention's products of prompts are formed so, too: keys stand where weights do, values transposed.
//!
//! The order of summation is the unit's, 32 of k at a time, lo of activations, then hi, then hi with lo of weights,
//! whatever stands beside an output: tasks may be cut in any way. It takes subnormal numbers for zeros. An infinite
//! weight may give NaN (times a lo of zero), and so may an infinite activation where weights are in terms.
//!
//! PERF: 128x1024x1024 on one core, GFLOP/s: bf16 350, f32 276, f16 288, where `gemm` makes 99, 98 and 86, `outer` 120;
//! products alone, from L1, are 1100 of the unit, of which a half or a third counts (Sapphire Rapids, 2026-11-21).
//! Packing, splitting (a tenth at 128 rows) and what follows are the rest: parts of k whose activations stay in L1,
//! asking for tiles a step ahead, and splitting the next rows between the products were no faster. Asking for the next
//! rows' weights is worth a tenth.
//!
//! Tile registers: 0 to 3 sums, 4 and 5 weights, 6 and 7 activations. The compiler uses none of them.

use super::outer::{self, Products};
use super::simd::{self, Leaf, STEP, Simd, Vectors, Widened, brains};
use crate::io::Tensor;
use core::arch::{asm, x86_64::*};
use core::marker::PhantomData;
use core::mem::MaybeUninit;

/// Rows of a tile, of weights and of activations.
pub(crate) const TILE: usize = 16;

/// Bytes of a tile.
const TILE_BYTES: usize = 1024;

/// f32 as large as a tile.
const TILE_FLOATS: usize = TILE_BYTES / 4;

/// Whether this process may use the unit: the processor has it and Linux lends it, which has to be asked once for its
/// state of 8 KiB a thread.
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
        // SAFETY: every x86-64 processor has `cpuid`; the call asks for a permission and touches no memory; std links
        // the C library that has it.
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

/// The unit's instructions, by the tile registers they name: [`Amx`], or what tests make of them where there is no
/// unit.
///
/// # Safety
/// Of every function: the unit is there, and but for `configure` configured; memory is readable or writable by rows of
/// 64 bytes, `stride` bytes apart, as many as the tile has.
pub(crate) trait Unit: 'static {
    unsafe fn configure(config: &Config);
    unsafe fn release();
    unsafe fn zero<const TILE: u8>();
    unsafe fn load<const TILE: u8>(first: *const u8, stride: usize);
    unsafe fn store<const TILE: u8>(first: *mut u8, stride: usize);
    /// Adds the products of `W`'s rows of pairs and `X`'s columns of pairs to `SUMS`.
    unsafe fn multiply<const SUMS: u8, const W: u8, const X: u8>();
}

/// The core's.
pub(crate) struct Amx;

impl Unit for Amx {
    #[inline(always)]
    unsafe fn configure(config: &Config) {
        // SAFETY: the caller's promise, as in all below.
        unsafe { asm!("ldtilecfg [{}]", in(reg) config, options(nostack, readonly)) }
    }
    #[inline(always)]
    unsafe fn release() {
        // SAFETY: as above.
        unsafe { asm!("tilerelease", options(nostack, nomem)) }
    }
    #[inline(always)]
    unsafe fn zero<const TILE: u8>() {
        // SAFETY: as above.
        unsafe { asm!("tilezero tmm{}", const TILE, options(nostack, nomem)) }
    }
    #[inline(always)]
    unsafe fn load<const TILE: u8>(first: *const u8, stride: usize) {
        // SAFETY: as above.
        unsafe {
            asm!("tileloadd tmm{}, [{}+{}*1]", const TILE, in(reg) first, in(reg) stride, options(nostack, readonly))
        }
    }
    #[inline(always)]
    unsafe fn store<const TILE: u8>(first: *mut u8, stride: usize) {
        // SAFETY: as above.
        unsafe { asm!("tilestored [{}+{}*1], tmm{}", in(reg) first, in(reg) stride, const TILE, options(nostack)) }
    }
    #[inline(always)]
    unsafe fn multiply<const SUMS: u8, const W: u8, const X: u8>() {
        // SAFETY: as above.
        unsafe { asm!("tdpbf16ps tmm{}, tmm{}, tmm{}", const SUMS, const W, const X, options(nostack, nomem)) }
    }
}

/// [`Products`] of weights whose rows the unit [takes], had as `W` says, on `U`.
pub(crate) struct Tiles<W, U = Amx>(PhantomData<(W, U)>);

impl<S: Simd, W: Source, U: Unit> Products<S> for Tiles<W, U> {
    type Elem = W::Elem;

    /// Into blocks of 16 rows, as [`split`] leaves them.
    unsafe fn pack(x: &Tensor, first: usize, [rows, k]: [usize; 2], wide: *mut f32, packed: *mut f32, _: usize) {
        let mut r = 0;
        while r < rows {
            let n = TILE.min(rows - r);
            // SAFETY: the rows are of `k` elements; `wide` has room for n of them, `packed` for k f32 a row of whole
            // blocks.
            unsafe {
                let (src, stride) = outer::rows_of_f32::<S>(x, first + r, [n, k], wide);
                split(core::array::from_fn(|i| src.wrapping_add(i * stride)), [n, k], packed.add(r * k));
            }
            r += n;
        }
    }

    unsafe fn multiply(
        w: *const W::Elem,
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
        let mut room = MaybeUninit::<W::Room>::uninit();
        // SAFETY: tiles of weights begin at n - height at most, so they are inside, as are the packed blocks and their
        // sums (see the trait). The unit is there (`is_available`).
        unsafe {
            U::configure(&config);
            let mut j = 0;
            while j < n {
                // The last tile begins where it ends with the weights: what it has in common with the one before is
                // written twice.
                let at = [j, j + TILE].map(|j| j.min(n - height));
                let tall = if n - j > TILE { 2 } else { 1 };
                let sums = at.map(|j| sums.add(j * sums_stride));
                let mut from = 0;
                while from < k {
                    // Parts of one size, which depends on k alone.
                    let part = k.div_ceil(k.div_ceil(W::PART)).next_multiple_of(STEP).min(k - from);
                    let rows = Rows { first: at.map(|j| w.add(j * w_stride)), stride: w_stride, k, height, tall };
                    let w = W::tiles(&rows, [from, part], room.as_mut_ptr());
                    let mut m = 0;
                    while m < blocks {
                        let wide = 2.min(blocks - m);
                        let place = Place {
                            w,
                            x: packed.add(m * TILE * k + from * TILE / 2),
                            k,
                            steps: part / STEP,
                            sums: sums.map(|sums| sums.add(m * TILE)),
                            sums_stride,
                            goes_on: from > 0,
                            asks: m == 0,
                        };
                        match (tall, wide) {
                            (2, 2) => block::<W, U, 2, 2>(place),
                            (2, _) => block::<W, U, 2, 1>(place),
                            (_, 2) => block::<W, U, 1, 2>(place),
                            _ => block::<W, U, 1, 1>(place),
                        }
                        m += wide;
                    }
                    from += part;
                }
                j += tall * TILE;
            }
            U::release();
        }
    }
}

/// The rows of one or two tiles of weights.
pub(crate) struct Rows<E> {
    first: [*const E; 2],
    stride: usize,
    k: usize,
    /// Rows of a tile.
    height: usize,
    /// Tiles.
    tall: usize,
}

/// Where tiles of weights are, a step after the other.
#[derive(Clone, Copy)]
pub(crate) struct Operand {
    /// Those of the first step.
    tiles: [*const u8; 2],
    /// Bytes between rows of a tile.
    row: usize,
    /// Bytes from a step to the next.
    step: usize,
    /// First rows of the weights that are wanted next, the bytes between rows, and those of a step.
    next: [*const u8; 2],
    next_row: usize,
    next_step: usize,
}

/// How tiles of weights are had.
pub(crate) trait Source: 'static {
    /// Storage of a weight.
    type Elem;
    /// bf16 terms of a weight, of which the second's tile lies behind the first's.
    const TERMS: usize;
    /// Elements of k whose tiles are had at once, at most.
    const PART: usize;
    /// The room they take.
    type Room;

    /// The tiles of elements `from..from + part` of `rows`, whole steps.
    ///
    /// # Safety
    /// The rows are readable that far; `room` is writable, and holds what it is given as long as the tiles are used;
    /// the unit is there.
    unsafe fn tiles(rows: &Rows<Self::Elem>, part: [usize; 2], room: *mut Self::Room) -> Operand;
}

/// bf16 weights, where they are.
pub(crate) struct InPlace;

impl Source for InPlace {
    type Elem = u16;
    const TERMS: usize = 1;
    const PART: usize = usize::MAX;
    type Room = ();

    unsafe fn tiles(rows: &Rows<u16>, [from, _]: [usize; 2], _: *mut ()) -> Operand {
        let row = 2 * rows.stride;
        let tiles = rows.first.map(|w| w.wrapping_add(from).cast());
        let next = tiles.map(|w: *const u8| w.wrapping_add(2 * TILE * row));
        Operand { tiles, row, step: 2 * STEP, next, next_row: row, next_step: 2 * STEP }
    }
}

/// Weights in `TERMS` terms, two or one, made of what `E` widens to f32.
pub(crate) struct InTerms<E, const TERMS: usize>(PhantomData<E>);

/// Elements of k that [`InTerms`] splits at once.
const PART: usize = 512;

/// Tiles of a part: for each step both terms of one tile, then of the other. The second's places stay empty where there
/// is one term alone.
#[repr(align(64))]
pub(crate) struct Parts(
    #[allow(dead_code, reason = "written and read by address")] [[[[[u16; STEP]; TILE]; 2]; 2]; PART / STEP],
);

impl<E: Widened, const TERMS: usize> Source for InTerms<E, TERMS> {
    type Elem = E::Elem;
    const TERMS: usize = TERMS;
    const PART: usize = PART;
    type Room = Parts;

    unsafe fn tiles(rows: &Rows<E::Elem>, part: [usize; 2], room: *mut Parts) -> Operand {
        // SAFETY: the caller's promise is the type's; `Isa` looks for these conversions beside the unit.
        unsafe { simd::with_avx512_bf16(SplitRows::<E, TERMS> { rows, part, room: room.cast() }) };
        let first = room.cast::<u8>().cast_const();
        let end = part[0] + part[1];
        let row = rows.stride * size_of::<E::Elem>();
        let next = if end < rows.k { end / STEP * E::STEP_BYTES } else { 2 * TILE * row };
        Operand {
            tiles: [first, first.wrapping_add(2 * TILE_BYTES)],
            row: 2 * STEP,
            step: 4 * TILE_BYTES,
            next: rows.first.map(|w| w.wrapping_byte_add(next).cast()),
            next_row: row,
            next_step: E::STEP_BYTES,
        }
    }
}

/// [`InTerms`]' tiles, into a room of [`Parts`].
struct SplitRows<'a, E: Widened, const TERMS: usize> {
    rows: &'a Rows<E::Elem>,
    part: [usize; 2],
    room: *mut u16,
}

impl<E: Widened, const TERMS: usize> Leaf for SplitRows<'_, E, TERMS> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let SplitRows { rows, part: [from, part], room } = self;
        for (tile, first) in rows.first.iter().enumerate().take(rows.tall) {
            for r in 0..rows.height {
                // SAFETY: a step of the row is readable; the room has tiles of as many steps as a part (see the type).
                unsafe {
                    let row = first.add(r * rows.stride);
                    let to = room.add((2 * tile * TILE + r) * STEP);
                    for step in 0..part / STEP {
                        let [low, high] = E::load(row, from + step * STEP);
                        let to = to.add(step * 4 * TILE * STEP);
                        if TERMS == 1 {
                            _mm512_store_si512(to.cast(), brains(low, high));
                            continue;
                        }
                        let [hi, lo] = finite_terms(low, high);
                        _mm512_store_si512(to.cast(), hi);
                        _mm512_store_si512(to.add(TILE * STEP).cast(), lo);
                    }
                }
            }
        }
    }
}

/// What the tile registers hold: palette 1, and of each the bytes of a row and the rows.
#[repr(C, align(64))]
pub(crate) struct Config([u8; 64]);

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

    /// Rows of a tile.
    #[cfg(test)]
    pub(crate) fn rows(&self, tile: usize) -> usize {
        assert_eq!((self.0[0], self.0[16 + 2 * tile], self.0[17 + 2 * tile]), (1, 64, 0), "rows of 64 bytes");
        usize::from(self.0[48 + tile])
    }
}

/// Where a block finds its operands: of two tiles of weights, and two neighbouring blocks of activations.
struct Place {
    w: Operand,
    x: *const f32,
    /// Of all activations.
    k: usize,
    steps: usize,
    sums: [*mut f32; 2],
    sums_stride: usize,
    /// Whether these products are added to the sums that are there.
    goes_on: bool,
    /// Whether weights that are wanted next are asked for.
    asks: bool,
}

/// Sums of `N` tiles of weights by `M` blocks of activations.
///
/// # Safety
/// The operands are there, and so is the unit, configured.
#[inline(always)]
unsafe fn block<W: Source, U: Unit, const N: usize, const M: usize>(place: Place) {
    let Place { w, x, k, steps, sums, sums_stride, goes_on, asks } = place;
    // Of every tile of sums, by its row and column.
    macro_rules! each {
        ($($n:literal $m:literal $call:expr;)*) => { $(
            if $n < N && $m < M {
                $call;
            }
        )* };
    }
    let weights = |step: usize, term: usize| {
        let [w0, w1] = w.tiles.map(|tile| tile.wrapping_add(step * w.step + term * TILE_BYTES));
        // SAFETY: the operands are there, in their registers (see the head).
        unsafe {
            U::load::<4>(w0, w.row);
            if N == 2 {
                U::load::<5>(w1, w.row);
            }
        }
    };
    let activations = |step: usize, term: usize| {
        let x = x.wrapping_add(step * TILE_FLOATS + term * TILE * k / 2);
        // SAFETY: as above.
        unsafe {
            U::load::<6>(x.cast(), 64);
            if M == 2 {
                U::load::<7>(x.wrapping_add(TILE * k).cast(), 64);
            }
        }
    };
    let multiply = || {
        // SAFETY: as above.
        unsafe {
            each! {
                0 0 U::multiply::<0, 4, 6>();
                0 1 U::multiply::<1, 4, 7>();
                1 0 U::multiply::<2, 5, 6>();
                1 1 U::multiply::<3, 5, 7>();
            }
        }
    };
    let at = |n: usize, m: usize| sums[n].wrapping_add(m * TILE).cast::<u8>();
    let stride = 4 * sums_stride;
    // SAFETY: the caller's promise; what is asked for may be any address.
    unsafe {
        if goes_on {
            each! {
                0 0 U::load::<0>(at(0, 0), stride);
                0 1 U::load::<1>(at(0, 1), stride);
                1 0 U::load::<2>(at(1, 0), stride);
                1 1 U::load::<3>(at(1, 1), stride);
            }
        } else {
            each! { 0 0 U::zero::<0>(); 0 1 U::zero::<1>(); 1 0 U::zero::<2>(); 1 1 U::zero::<3>(); }
        }
        for step in 0..steps {
            weights(step, 0);
            activations(step, 1);
            multiply();
            activations(step, 0);
            multiply();
            if W::TERMS == 2 {
                weights(step, 1);
                multiply();
            }
            if asks {
                for tile in w.next.iter().take(N) {
                    let mut line = tile.wrapping_add(step * w.next_step);
                    for _ in 0..TILE {
                        ask::<W>(line);
                        line = line.wrapping_add(w.next_row);
                    }
                }
            }
        }
        each! {
            0 0 U::store::<0>(at(0, 0), stride);
            0 1 U::store::<1>(at(0, 1), stride);
            1 0 U::store::<2>(at(1, 0), stride);
            1 1 U::store::<3>(at(1, 1), stride);
        }
    }
}

/// Asks for a step of a row: into L2.
///
/// PERF: with `_mm_prefetch` the compiler keeps an address for every row, most of them in memory, and 128x384x1536 in
/// f32 takes 1.1 of the time (Sapphire Rapids, 2026-11-21).
#[inline(always)]
unsafe fn ask<W: Source>(line: *const u8) {
    // SAFETY: any address may be asked for.
    unsafe {
        asm!("prefetcht1 [{line}]", line = in(reg) line, options(nostack, readonly));
        if STEP * size_of::<W::Elem>() > 64 {
            asm!("prefetcht1 [{line} + 64]", line = in(reg) line, options(nostack, readonly));
        }
    }
}

/// Packs the first `n` of `rows`, of `k` elements, in two terms: a tile of 16 pairs of k by 16 rows after the other,
/// first all of hi, then of lo. Rows that are missing are zeros.
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
            // SAFETY: a step of every row is readable, as are both tiles, and two of the block writable (see `split`);
            // what is asked for may be any address.
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
        let hi = brains(low, high);
        let low = rest(low, _mm512_castsi512_si256(hi));
        let high = rest(high, _mm512_extracti64x4_epi64::<1>(hi));
        [hi, brains(low, high)]
    }
}

/// [`terms`] of elements that are finite: of others lo is NaN.
#[inline(always)]
unsafe fn finite_terms(low: __m512, high: __m512) -> [__m512i; 2] {
    // SAFETY: arithmetic only; 32 bf16 are 64 bytes.
    unsafe {
        let hi = brains(low, high);
        let wide = |half| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)));
        let low = _mm512_sub_ps(low, wide(_mm512_castsi512_si256(hi)));
        let high = _mm512_sub_ps(high, wide(_mm512_extracti64x4_epi64::<1>(hi)));
        [hi, brains(low, high)]
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
