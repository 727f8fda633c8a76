//! The instruction sets, found once at run time, behind one trait.
//!
//! A body is written once, generic over [`Level`], as a [`Body`]; [`Isa::run`] calls its instance for the chosen set.
//! Its inner loops are [`Leaf`]s, each compiled as a `#[target_feature]` function into which every `#[inline(always)]`
//! building block is inlined. So builds for the plain target run as fast as builds for the machine.
//!
//! An [`Isa`] beyond the portable one can only be had from detection; holding it is the proof that its instructions
//! exist, which makes `run` safe.
//!
//! Law of the bodies: the order of summation of an output element is a function of the level, the dtypes, the length
//! of the sum and the operator's parameters alone, never of how many rows or columns are computed beside it. Tasks may
//! be cut in any way and decoding token by token gives the bits that reading the prompt in one pass gives.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
mod vecmath;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::{Avx512 as Vectors, BrainRow, Pairs, STEP, Widened, brains};
pub(crate) use vecmath::{activate, exp, gate_by, gated};

use core::marker::PhantomData;
use perpetua_shared::dtype::{self, Lines};
use std::sync::OnceLock;

/// Vectors of f32 and what the bodies do with them.
///
/// Every function is unsafe for two reasons: the instruction set must be there (which [`Isa`] proves), and pointers
/// must be valid for the elements named.
pub(crate) trait Simd: Copy + 'static {
    /// f32 elements of a vector.
    const LANES: usize;
    /// Columns of the widest tile of dot products (its rows are four) that the registers hold.
    const TILE_COLS: usize;
    /// Vectors of sums that a tile of outer products may keep: what the registers hold beside its operands.
    const SUMS: usize;
    /// The vector.
    type F: Copy;

    /// Calls `leaf` with the set enabled.
    unsafe fn call<T: Leaf>(leaf: T) -> T::Output;

    unsafe fn splat(x: f32) -> Self::F;
    unsafe fn load(p: *const f32) -> Self::F;
    unsafe fn load_bf16(p: *const u16) -> Self::F;
    unsafe fn load_f16(p: *const u16) -> Self::F;
    unsafe fn load_i8(p: *const i8) -> Self::F;
    unsafe fn store(p: *mut f32, v: Self::F);
    /// Rounds to nearest even, as `half` does.
    unsafe fn store_bf16(p: *mut u16, v: Self::F);
    /// Rounds to nearest even, as `half` does.
    unsafe fn store_f16(p: *mut u16, v: Self::F);

    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// a * b + c; in one rounding where the set has it.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `if a > b { a } else { b }`: a NaN in either gives `b`.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// `if a < b { a } else { b }`: a NaN in either gives `b`.
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    /// 2^n for whole n in -126..=127.
    unsafe fn pow2(n: Self::F) -> Self::F;
    /// The sums of four vectors, each by the same tree.
    unsafe fn sum4(v: [Self::F; 4]) -> [f32; 4];
    /// The largest lane, NaN ignored as [`Simd::max`] does.
    unsafe fn largest(v: Self::F) -> f32;
    /// Asks for the cache line at `p`; any address will do.
    unsafe fn prefetch(p: *const u8);
    /// The levels of a line of [`dtype::Q4`], in the order of its elements, as `table` has them.
    ///
    /// # Safety
    /// The 64 bytes of the line are readable.
    #[inline(always)]
    unsafe fn levels(table: &[i8; 16], line: *const u8) -> [i8; dtype::Q4.elems] {
        let mut levels = [0; dtype::Q4.elems];
        let half = dtype::Q4.elems / 2;
        let mut i = 0;
        while i < half {
            // SAFETY: inside the line (caller).
            let byte = usize::from(unsafe { *line.add(i) });
            (levels[i], levels[half + i]) = (table[byte & 15], table[byte >> 4]);
            i += 1;
        }
        levels
    }

    /// The first `n < LANES` elements, zero beyond; memory beyond is not touched.
    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> Self::F {
        let mut lanes = [0f32; 16];
        // SAFETY: `n` elements are readable (caller) and fit; the whole buffer is at least a vector.
        unsafe {
            core::ptr::copy_nonoverlapping(p, lanes.as_mut_ptr(), n);
            Self::load(lanes.as_ptr())
        }
    }
    /// As [`Simd::load_part`].
    #[inline(always)]
    unsafe fn load_bf16_part(p: *const u16, n: usize) -> Self::F {
        let mut lanes = [0u16; 16];
        // SAFETY: as `load_part`.
        unsafe {
            core::ptr::copy_nonoverlapping(p, lanes.as_mut_ptr(), n);
            Self::load_bf16(lanes.as_ptr())
        }
    }
    /// As [`Simd::load_part`].
    #[inline(always)]
    unsafe fn load_f16_part(p: *const u16, n: usize) -> Self::F {
        let mut lanes = [0u16; 16];
        // SAFETY: as `load_part`.
        unsafe {
            core::ptr::copy_nonoverlapping(p, lanes.as_mut_ptr(), n);
            Self::load_f16(lanes.as_ptr())
        }
    }
    /// Stores the first `n < LANES` elements; memory beyond is not touched.
    #[inline(always)]
    unsafe fn store_part(p: *mut f32, v: Self::F, n: usize) {
        let mut lanes = [0f32; 16];
        // SAFETY: as `load_part`, writable.
        unsafe {
            Self::store(lanes.as_mut_ptr(), v);
            core::ptr::copy_nonoverlapping(lanes.as_ptr(), p, n);
        }
    }
    /// As [`Simd::store_part`].
    #[inline(always)]
    unsafe fn store_bf16_part(p: *mut u16, v: Self::F, n: usize) {
        let mut lanes = [0u16; 16];
        // SAFETY: as `load_part`, writable.
        unsafe {
            Self::store_bf16(lanes.as_mut_ptr(), v);
            core::ptr::copy_nonoverlapping(lanes.as_ptr(), p, n);
        }
    }
    /// As [`Simd::store_part`].
    #[inline(always)]
    unsafe fn store_f16_part(p: *mut u16, v: Self::F, n: usize) {
        let mut lanes = [0u16; 16];
        // SAFETY: as `load_part`, writable.
        unsafe {
            Self::store_f16(lanes.as_mut_ptr(), v);
            core::ptr::copy_nonoverlapping(lanes.as_ptr(), p, n);
        }
    }
    /// v * 2^n for whole n in -150..=129, rounded once when the result is subnormal or infinite.
    #[inline(always)]
    unsafe fn scale2(v: Self::F, n: Self::F) -> Self::F {
        // SAFETY: arithmetic only. Two factors because 2^n itself may not be a normal number.
        unsafe {
            let half = round::<Self>(Self::mul(n, Self::splat(0.5)));
            Self::mul(Self::mul(v, Self::pow2(half)), Self::pow2(Self::sub(n, half)))
        }
    }
    /// dst[c][r] = src[r][c] for a square block of vectors; strides in elements.
    #[inline(always)]
    unsafe fn transpose(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
        let mut c = 0;
        while c < Self::LANES {
            let mut lanes = [0f32; 16];
            let mut r = 0;
            // SAFETY: the block is readable, its transpose writable (caller).
            unsafe {
                while r < Self::LANES {
                    lanes[r] = *src.add(r * src_stride + c);
                    r += 1;
                }
                Self::store(dst.add(c * dst_stride), Self::load(lanes.as_ptr()));
            }
            c += 1;
        }
    }
    /// The sum of a vector, by the tree of [`Simd::sum4`].
    #[inline(always)]
    unsafe fn sum(v: Self::F) -> f32 {
        // SAFETY: arithmetic only.
        unsafe { Self::sum4([v; 4])[0] }
    }
}

/// Asks for the cache line at `p`, which may be any address, on targets that know how.
#[inline(always)]
pub(crate) fn prefetch(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing and faults on nothing; SSE is part of the target.
    unsafe {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(p.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        core::arch::asm!("prfm pldl1keep, [{}]", in(reg) p, options(nostack, readonly, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = p;
}

/// The nearest whole number, ties to even, for |x| < 2^22: adding 1.5 * 2^23 leaves no fraction bits.
#[inline(always)]
pub(crate) unsafe fn round<S: Simd>(x: S::F) -> S::F {
    // SAFETY: arithmetic only.
    unsafe {
        let shift = S::splat(12_582_912.0);
        S::sub(S::add(x, shift), shift)
    }
}

/// How rows of one dtype are multiplied with packed activations, a step of [`Dot::CHUNK`] at a time.
pub(crate) trait Dot<S: Simd> {
    /// Storage of a weight.
    type Elem: Copy;
    /// Weights of a step.
    const CHUNK: usize;
    /// f32 that a step of packed activations takes the room of.
    const ROOM: usize = Self::CHUNK;
    /// Weights of a cache line, whole steps.
    const LINE_ELEMS: usize = {
        let elems = 64 / size_of::<Self::Elem>();
        if elems > Self::CHUNK { elems } else { Self::CHUNK }
    };
    /// Columns of the widest tile whose sums the registers hold.
    const TILE_COLS: usize = S::TILE_COLS;

    /// Calls `leaf`, which uses this product, with the set enabled.
    #[inline(always)]
    unsafe fn call<T: Leaf>(leaf: T) -> T::Output {
        // SAFETY: the caller's promises are the same.
        unsafe { S::call(leaf) }
    }
    /// Packs a step of `n <= CHUNK` activations into its [`Dot::ROOM`], zero beyond.
    unsafe fn pack(dst: *mut f32, src: *const f32, n: usize);
    /// sums[r][m] += the products of step `c` of the weight rows `w` and of the packed group of `M` activation rows at
    /// `x`, summed within a lane in a fixed order. The step has `n` weights, [`Dot::CHUNK`] or, at a row's end, fewer;
    /// none beyond is read. Where the caller names the constant, no code is left for the other case.
    unsafe fn chunk<const R: usize, const M: usize>(
        w: &[*const Self::Elem; R],
        x: *const f32,
        c: usize,
        n: usize,
        sums: &mut [[S::F; M]; R],
    );
    /// How far ahead weights are asked for, in cache lines of each row.
    ///
    /// PERF: without, a product of one row reached 72 % of the read bandwidth, with 32 93 % (Emerald Rapids, 2 cores,
    /// 2026-11-20).
    const AHEAD_LINES: usize = 32;
    /// How rows lie that are kept in lines, with their scales among them.
    const LINES: Option<Lines> = None;
    /// Asks for cache line `line` of the weights of the row at `row`, which may be any address, and with the first of a
    /// group for the group's scales.
    #[inline(always)]
    unsafe fn prefetch(row: *const Self::Elem, line: usize) {
        let ask = |offset: usize| {
            // SAFETY: any address may be asked for.
            unsafe { S::prefetch(row.wrapping_byte_add(offset).cast()) }
        };
        let Some(lines) = Self::LINES else { return ask(64 * line) };
        let [bytes, scales] = lines.at(line);
        if line.is_multiple_of(lines.per_group) {
            ask(scales);
        }
        ask(bytes);
    }

    /// Columns from which on groups have a [`Dot::tile`].
    const TILES_FROM: usize = usize::MAX;
    /// [`Dot::chunk`] of steps `0..chunks`, `chunks > 0`, for four rows and a group of `M`, in assembly: the same bits.
    /// Meanwhile it is asked for what lies `by` bytes beyond what is read of each row.
    ///
    /// # Safety
    /// The steps are readable, in the rows and in the group at `x`.
    unsafe fn tile<const M: usize>(
        _w: [*const Self::Elem; 4],
        _by: usize,
        _x: *const f32,
        _chunks: usize,
        _sums: &mut [[S::F; M]; 4],
    ) {
        unreachable!("asked for only from as many columns on")
    }
}

/// [`Dot::TILES_FROM`] of tiles from `columns` on: none for Miri, which interprets no assembly.
#[cfg(target_arch = "x86_64")]
const fn tiles_from(columns: usize) -> usize {
    if cfg!(miri) { usize::MAX } else { columns }
}

/// sums[r][m] += w[r] * the vector at `x + m * stride`.
#[inline(always)]
unsafe fn add_products<S: Simd, const R: usize, const M: usize>(
    w: [S::F; R],
    x: *const f32,
    stride: usize,
    sums: &mut [[S::F; M]; R],
) {
    let mut m = 0;
    while m < M {
        // SAFETY: the vectors are readable (caller).
        unsafe {
            let xm = S::load(x.add(m * stride));
            let mut r = 0;
            while r < R {
                sums[r][m] = S::fma(w[r], xm, sums[r][m]);
                r += 1;
            }
        }
        m += 1;
    }
}

/// Weights widened to f32 on load; activations in f32.
pub(crate) struct Widen<E>(PhantomData<E>);
/// Storage marker: bf16.
pub(crate) struct Bf16;
/// Storage marker: f16.
pub(crate) struct F16;
/// Storage marker: f32.
pub(crate) struct F32;

/// Elements that [`Widen`] can load.
pub(crate) trait Storage {
    /// Its bits.
    type Elem: Copy;
    unsafe fn load<S: Simd>(p: *const Self::Elem) -> S::F;
    unsafe fn load_part<S: Simd>(p: *const Self::Elem, n: usize) -> S::F;
}

macro_rules! storage {
    ($($marker:ident, $elem:ty, $load:ident, $load_part:ident;)*) => { $(
        impl Storage for $marker {
            type Elem = $elem;
            #[inline(always)]
            unsafe fn load<S: Simd>(p: *const $elem) -> S::F {
                // SAFETY: the caller's promises are the same.
                unsafe { S::$load(p) }
            }
            #[inline(always)]
            unsafe fn load_part<S: Simd>(p: *const $elem, n: usize) -> S::F {
                // SAFETY: the caller's promises are the same.
                unsafe { S::$load_part(p, n) }
            }
        }
    )* };
}
storage! {
    Bf16, u16, load_bf16, load_bf16_part;
    F16, u16, load_f16, load_f16_part;
    F32, f32, load, load_part;
}

impl<S: Simd, E: Storage> Dot<S> for Widen<E> {
    type Elem = E::Elem;
    const CHUNK: usize = S::LANES;

    #[inline(always)]
    unsafe fn pack(dst: *mut f32, src: *const f32, n: usize) {
        // SAFETY: `n` elements are readable and a vector is writable (caller).
        unsafe { S::store(dst, if n == S::LANES { S::load(src) } else { S::load_part(src, n) }) }
    }
    #[inline(always)]
    unsafe fn chunk<const R: usize, const M: usize>(
        w: &[*const E::Elem; R],
        x: *const f32,
        c: usize,
        n: usize,
        sums: &mut [[S::F; M]; R],
    ) {
        // SAFETY: the caller's promises are the same.
        unsafe {
            let at = c * S::LANES;
            let load = |r: usize| {
                let p = w[r].add(at);
                if n == S::LANES { E::load::<S>(p) } else { E::load_part::<S>(p, n) }
            };
            add_products::<S, R, M>(each(load), x.add(at * M), S::LANES, sums);
        }
    }
}

/// `[f(0), f(1), ..]`: unlike `array::from_fn` surely inlined, as vectors must be.
#[inline(always)]
fn each<T: Copy, const R: usize>(f: impl Fn(usize) -> T) -> [T; R] {
    let mut all = [f(0); R];
    let mut r = 1;
    while r < R {
        all[r] = f(r);
        r += 1;
    }
    all
}

/// 8-bit weights ([`DType::Q8`](perpetua_shared::DType::Q8)); activations in f32. A step is a block: its products are
/// summed unscaled, which spares a multiplication a weight at the price of a second set of sums.
pub(crate) struct Q8;

/// 4-bit weights, whose levels are those of `T`; activations in f32. A step is a line, in blocks as [`Q8`] has them.
pub(crate) struct Fours<T>(PhantomData<T>);

/// What the numbers of a type of 4-bit weights stand for.
pub(crate) trait Table: 'static {
    /// At most 63 either way: two products of such a number, moved up by 64, with a signed byte fit 16 bits.
    const LEVELS: [i8; 16];
    /// They, moved up so that they have no sign.
    #[cfg(target_arch = "x86_64")]
    const MOVED_UP: [i8; 16] = moved_up(Self::LEVELS);
}

/// [`DType::Q4`](perpetua_shared::DType::Q4)'s.
pub(crate) struct Q4;

impl Table for Q4 {
    const LEVELS: [i8; 16] = dtype::Q4_LEVELS;
}

/// [`DType::Mx4`](perpetua_shared::DType::Mx4)'s.
pub(crate) struct Mx4;

impl Table for Mx4 {
    const LEVELS: [i8; 16] = dtype::MX4_LEVELS;
}

/// [`DType::Int4`](perpetua_shared::DType::Int4)'s.
pub(crate) struct Int4;

impl Table for Int4 {
    const LEVELS: [i8; 16] = dtype::INT4_LEVELS;
}

/// By how much.
#[cfg(target_arch = "x86_64")]
const UP: i8 = 64;

/// All of `levels`, moved up.
#[cfg(target_arch = "x86_64")]
const fn moved_up(levels: [i8; 16]) -> [i8; 16] {
    let (mut up, mut i) = (levels, 0);
    while i < 16 {
        assert!(-63 <= levels[i] && levels[i] <= 63);
        up[i] += UP;
        i += 1;
    }
    up
}

impl<S: Simd> Dot<S> for Q8 {
    type Elem = i8;
    const CHUNK: usize = dtype::Q8.elems;
    const LINES: Option<Lines> = Some(dtype::Q8);
    // Two sets of sums.
    const TILE_COLS: usize = if S::TILE_COLS > 1 { S::TILE_COLS / 2 } else { 1 };

    #[inline(always)]
    unsafe fn pack(dst: *mut f32, src: *const f32, n: usize) {
        // SAFETY: the caller's promises are the same.
        unsafe { pack_line::<S>(dst, src, n, dtype::Q8) }
    }
    #[inline(always)]
    unsafe fn chunk<const R: usize, const M: usize>(
        w: &[*const i8; R],
        x: *const f32,
        c: usize,
        _n: usize,
        sums: &mut [[S::F; M]; R],
    ) {
        // SAFETY: rows are whole blocks, padded with zeros, with their scales.
        unsafe {
            let [bytes, scale] = dtype::Q8.at(c);
            let scale = |r: usize| *w[r].add(scale).cast::<f32>();
            let elems = dtype::Q8.elems;
            add_block::<S, R, M>(each(|r| w[r].add(bytes)), elems, scale, x.add(c * M * elems), elems, sums);
        }
    }
}

impl<S: Simd, T: Table> Dot<S> for Fours<T> {
    type Elem = u8;
    const CHUNK: usize = dtype::Q4.elems;
    const LINES: Option<Lines> = Some(dtype::Q4);
    const TILE_COLS: usize = <Q8 as Dot<S>>::TILE_COLS;

    #[inline(always)]
    unsafe fn pack(dst: *mut f32, src: *const f32, n: usize) {
        // SAFETY: the caller's promises are the same.
        unsafe { pack_line::<S>(dst, src, n, dtype::Q4) }
    }
    #[inline(always)]
    unsafe fn chunk<const R: usize, const M: usize>(
        w: &[*const u8; R],
        x: *const f32,
        c: usize,
        _n: usize,
        sums: &mut [[S::F; M]; R],
    ) {
        // SAFETY: rows are whole lines with their scales, those of blocks beyond the last zero.
        unsafe {
            let [bytes, scales] = dtype::Q4.at(c);
            let levels = each::<_, R>(|r| S::levels(&T::LEVELS, w[r].add(bytes)));
            let x = x.add(c * M * dtype::Q4.elems);
            let mut block = 0;
            while block * dtype::Q4_BLOCK < dtype::Q4.elems {
                let at = block * dtype::Q4_BLOCK;
                let scale = |r: usize| bf16_to_f32(*w[r].add(scales).cast::<u16>().add(block));
                let bytes = each(|r| levels[r].as_ptr().add(at));
                add_block::<S, R, M>(bytes, dtype::Q4_BLOCK, scale, x.add(at), dtype::Q4.elems, sums);
                block += 1;
            }
        }
    }
}

/// The bf16 of these bits.
#[inline(always)]
pub(crate) fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Packs the activations of a line of weights as they are, zero beyond `n`.
///
/// # Safety
/// `n` elements are readable, a line's writable; the set exists.
#[inline(always)]
unsafe fn pack_line<S: Simd>(dst: *mut f32, src: *const f32, n: usize, lines: Lines) {
    let mut at = 0;
    while at < lines.elems {
        // SAFETY: the caller's promises.
        unsafe { S::store(dst.add(at), load_up_to::<S>(src.wrapping_add(at), n.saturating_sub(at))) };
        at += S::LANES;
    }
}

/// sums[r][m] += scale(r) * the products of a block of `elems` bytes at `bytes[r]` with the activations at `x + m *
/// stride`: whole vectors.
///
/// # Safety
/// They are readable; the set exists.
#[inline(always)]
unsafe fn add_block<S: Simd, const R: usize, const M: usize>(
    bytes: [*const i8; R],
    elems: usize,
    scale: impl Fn(usize) -> f32,
    x: *const f32,
    stride: usize,
    sums: &mut [[S::F; M]; R],
) {
    // SAFETY: the caller's promises.
    unsafe {
        let mut own = [[S::splat(0.0); M]; R];
        let mut at = 0;
        while at < elems {
            add_products::<S, R, M>(each(|r| S::load_i8(bytes[r].add(at))), x.add(at), stride, &mut own);
            at += S::LANES;
        }
        let mut r = 0;
        while r < R {
            let scale = S::splat(scale(r));
            let mut m = 0;
            while m < M {
                sums[r][m] = S::fma(scale, own[r][m], sums[r][m]);
                m += 1;
            }
            r += 1;
        }
    }
}

/// The factor that makes the numbers of a block, the largest of them `max`, whole ones up to `most`, and the scale that
/// undoes it. What is too small for an inverse becomes zero; NaN and infinity come back with the scale.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[inline(always)]
fn to_whole(max: f32, is_nan: bool, most: f32) -> [f32; 2] {
    [if max > 1e-33 { most / max } else { 0.0 }, if is_nan { f32::NAN } else { max / most }]
}

/// The first `n` elements, zero beyond, where `n` may be more than a vector.
#[inline(always)]
unsafe fn load_up_to<S: Simd>(p: *const f32, n: usize) -> S::F {
    // SAFETY: `n` elements are readable (caller).
    unsafe { if n >= S::LANES { S::load(p) } else { S::load_part(p, n) } }
}

/// An instruction set as bodies see it: vectors, and how bf16 rows are multiplied.
pub(crate) trait Level: 'static {
    /// Its vectors.
    type S: Simd;
    /// bf16 weights with activations in f32.
    type Bf16: Dot<Self::S, Elem = u16>;
    /// f16 weights.
    type F16: Dot<Self::S, Elem = u16>;
    /// f32 weights.
    type F32: Dot<Self::S, Elem = f32>;
    /// 8-bit weights.
    type Q8: Dot<Self::S, Elem = i8>;
    /// 4-bit weights.
    type Fours<T: Table>: Dot<Self::S, Elem = u8>;
}

macro_rules! widening_level {
    ($($(#[$attribute:meta])* $level:ident: $simd:ty;)*) => { $(
        $(#[$attribute])*
        pub(crate) struct $level;
        $(#[$attribute])*
        impl Level for $level {
            type S = $simd;
            type Bf16 = Widen<Bf16>;
            type F16 = Widen<F16>;
            type F32 = Widen<F32>;
            type Q8 = Q8;
            type Fours<T: Table> = Fours<T>;
        }
    )* };
}
widening_level! {
    #[doc = "Plain Rust on arrays; the compiler uses what the target has."]
    Portable: portable::Portable;
    #[cfg(target_arch = "aarch64")]
    #[doc = "NEON; bf16 widened."]
    Neon: neon::Neon;
}

/// NEON with its dot product of bytes, which all but the first aarch64 cores have.
#[cfg(target_arch = "aarch64")]
pub(crate) struct NeonDotprod;
#[cfg(target_arch = "aarch64")]
impl Level for NeonDotprod {
    type S = neon::Neon;
    type Bf16 = Widen<Bf16>;
    type F16 = Widen<F16>;
    type F32 = Widen<F32>;
    type Q8 = neon::Bytes;
    type Fours<T: Table> = neon::Levels<T>;
}

/// AVX2 with FMA and F16C.
#[cfg(target_arch = "x86_64")]
pub(crate) struct Avx2;
#[cfg(target_arch = "x86_64")]
impl Level for Avx2 {
    type S = avx2::Avx2;
    type Bf16 = avx2::EvenOdd;
    type F16 = avx2::Half;
    type F32 = avx2::Whole;
    type Q8 = Q8;
    type Fours<T: Table> = avx2::Levels<T>;
}

/// AVX-512.
#[cfg(target_arch = "x86_64")]
pub(crate) struct Avx512;
#[cfg(target_arch = "x86_64")]
impl Level for Avx512 {
    type S = avx512::Avx512;
    type Bf16 = avx512::EvenOdd;
    type F16 = Widen<F16>;
    type F32 = avx512::Whole;
    type Q8 = Q8;
    type Fours<T: Table> = avx512::Levels<T, false>;
}

/// AVX-512 with its dot product of bytes.
#[cfg(target_arch = "x86_64")]
pub(crate) struct Avx512Vnni;
#[cfg(target_arch = "x86_64")]
impl Level for Avx512Vnni {
    type S = avx512::Avx512;
    type Bf16 = avx512::EvenOdd;
    type F16 = Widen<F16>;
    type F32 = avx512::Whole;
    type Q8 = avx512::Words;
    type Fours<T: Table> = avx512::Levels<T, true>;
}

/// Work that runs on any level: it touches no vectors itself but calls [`Leaf`]s through [`Simd::call`] or
/// [`Dot::call`].
pub(crate) trait Body {
    /// What it yields.
    type Output;
    /// Does it.
    ///
    /// # Safety
    /// The level's instructions exist.
    unsafe fn run<L: Level>(self) -> Self::Output;
}

/// An inner loop, compiled with its instruction set enabled. `run` must be `#[inline(always)]`, as must all it calls
/// that touches vectors, or the vectors travel through memory. Leaves are kept apart, never inlined into one another:
/// all tiles in one function took the compiler minutes.
pub(crate) trait Leaf {
    /// What it yields.
    type Output;
    /// Does it.
    ///
    /// # Safety
    /// The instructions exist; the fields keep what the type's documentation asks of them.
    unsafe fn run(self) -> Self::Output;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    #[cfg(target_arch = "x86_64")]
    Avx512Amx,
    #[cfg(target_arch = "aarch64")]
    Neon,
    #[cfg(target_arch = "aarch64")]
    NeonDotprod,
}

/// An instruction set that this machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(Known);

impl Default for Isa {
    fn default() -> Isa {
        Isa::best()
    }
}

impl Isa {
    /// Plain Rust, on every machine.
    pub const PORTABLE: Isa = Isa(Known::Portable);

    /// Every set this machine has, the best one last.
    pub fn available() -> &'static [Isa] {
        static AVAILABLE: OnceLock<Vec<Isa>> = OnceLock::new();
        AVAILABLE.get_or_init(|| {
            #[allow(unused_mut, reason = "targets without vector code push nothing")]
            let mut sets = vec![Isa::PORTABLE];
            #[cfg(target_arch = "x86_64")]
            {
                use std::arch::is_x86_feature_detected as has;
                if has!("avx2") && has!("fma") && has!("f16c") {
                    sets.push(Isa(Known::Avx2));
                    if has!("avx512f") && has!("avx512bw") && has!("avx512vl") && has!("avx512dq") {
                        sets.push(Isa(Known::Avx512));
                        if has!("avx512vnni") {
                            sets.push(Isa(Known::Avx512Vnni));
                            if has!("avx512bf16") {
                                if is_amd() {
                                    sets.push(Isa(Known::Avx512Bf16));
                                }
                                // Cores with the unit have these conversions; `amx` counts on them.
                                if super::amx::is_available() {
                                    sets.push(Isa(Known::Avx512Amx));
                                }
                            }
                        }
                    }
                }
            }
            #[cfg(target_arch = "aarch64")]
            if std::arch::is_aarch64_feature_detected!("neon") {
                sets.push(Isa(Known::Neon));
                if std::arch::is_aarch64_feature_detected!("dotprod") {
                    sets.push(Isa(Known::NeonDotprod));
                }
            }
            sets
        })
    }

    /// The best set this machine has: what workers use.
    pub fn best() -> Isa {
        *Isa::available().last().unwrap_or(&Isa::PORTABLE)
    }

    /// Its name, as `bench` prints it.
    pub fn name(self) -> &'static str {
        match self.0 {
            Known::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Known::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Known::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Known::Avx512Vnni => "avx512-vnni",
            #[cfg(target_arch = "x86_64")]
            Known::Avx512Bf16 => "avx512-bf16",
            #[cfg(target_arch = "x86_64")]
            Known::Avx512Amx => "avx512-amx",
            #[cfg(target_arch = "aarch64")]
            Known::Neon => "neon",
            #[cfg(target_arch = "aarch64")]
            Known::NeonDotprod => "neon-dotprod",
        }
    }

    /// Whether the core has a matrix unit beside the vectors, for `cpu::amx`.
    pub fn has_matrix_unit(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self.0 == Known::Avx512Amx;
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Whether its vectors multiply pairs of bf16 as often as f32, for `simd::avx512::Pairs`.
    pub fn multiplies_pairs(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self.0 == Known::Avx512Bf16;
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Runs `body` with this set.
    #[inline]
    pub(crate) fn run<B: Body>(self, body: B) -> B::Output {
        // SAFETY: an `Isa` other than the portable one comes only from `available`, which found its features.
        unsafe {
            match self.0 {
                Known::Portable => body.run::<Portable>(),
                #[cfg(target_arch = "x86_64")]
                Known::Avx2 => body.run::<Avx2>(),
                #[cfg(target_arch = "x86_64")]
                Known::Avx512 => body.run::<Avx512>(),
                #[cfg(target_arch = "x86_64")]
                Known::Avx512Vnni | Known::Avx512Bf16 | Known::Avx512Amx => body.run::<Avx512Vnni>(),
                #[cfg(target_arch = "aarch64")]
                Known::Neon => body.run::<Neon>(),
                #[cfg(target_arch = "aarch64")]
                Known::NeonDotprod => body.run::<NeonDotprod>(),
            }
        }
    }
}

/// Whether the processor is AMD's, all of which that multiply pairs of bf16 do so as often as f32. By its name and not
/// by its speed, since what it computes with decides about bits.
#[cfg(target_arch = "x86_64")]
fn is_amd() -> bool {
    let leaf = core::arch::x86_64::__cpuid(0);
    [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).as_flattened() == b"AuthenticAMD"
}

macro_rules! with_features {
    ($($arch:literal $name:ident $features:literal;)*) => { $(
        #[cfg(target_arch = $arch)]
        #[target_feature(enable = $features)]
        #[inline(never)]
        pub(crate) unsafe fn $name<T: Leaf>(leaf: T) -> T::Output {
            // SAFETY: the features are enabled here, so the caller has found them.
            unsafe { leaf.run() }
        }
    )* };
}
with_features! {
    "x86_64" with_avx2 "avx2,fma,f16c";
    "x86_64" with_avx512 "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c";
    "x86_64" with_avx512_vnni "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c";
    "x86_64" with_avx512_bf16 "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c";
    "aarch64" with_neon "neon";
    "aarch64" with_neon_dotprod "neon,dotprod";
}

#[inline(never)]
unsafe fn with_nothing<T: Leaf>(leaf: T) -> T::Output {
    // SAFETY: the caller's promises are the same.
    unsafe { leaf.run() }
}
