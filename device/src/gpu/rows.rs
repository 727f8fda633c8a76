//! Dot products of weight rows with activation rows, a warp to each: what `linear` and `gated_linear` are made of.
//!
//! A lane takes eight consecutive elements, a warp 256, four such steps in flight: 2 KiB of bf16 weights a warp. The first
//! elements go one by one until the weight row stands on 16 bytes, as do the last; activations that then do not stand on
//! 16 bytes are loaded one by one too, so rows may start anywhere and have any length.

use super::{F32, Tensor};
use crate::arch::scalar::{f16_to_f32, fma};
use crate::arch::{WARP, memory, warp};

/// How an element type is loaded.
trait Float {
    const BYTES: usize;

    /// One element.
    ///
    /// # Safety
    /// `from` points to one.
    unsafe fn one(from: *const u8) -> f32;

    /// Eight elements at 16-byte aligned `from`, once (`stream`) or to be read again.
    ///
    /// # Safety
    /// `from` points to eight in global memory, aligned.
    unsafe fn eight(from: *const u8, stream: bool) -> [f32; 8];
}

#[inline(always)]
unsafe fn load16(from: *const u8, stream: bool) -> [u32; 4] {
    // SAFETY: the caller promises 16 aligned bytes of global memory.
    unsafe { if stream { memory::load16_stream(from) } else { memory::load16(from) } }
}

struct Single;
struct Brain;
struct Half;

impl Float for Single {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn one(from: *const u8) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<f32>().read() }
    }

    #[inline(always)]
    unsafe fn eight(from: *const u8, stream: bool) -> [f32; 8] {
        // SAFETY: the caller promises 32 bytes.
        let (a, b) = unsafe { (load16(from, stream), load16(from.add(16), stream)) };
        [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]].map(f32::from_bits)
    }
}

impl Float for Brain {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn one(from: *const u8) -> f32 {
        // SAFETY: the caller's promise.
        f32::from_bits(u32::from(unsafe { from.cast::<u16>().read() }) << 16)
    }

    #[inline(always)]
    unsafe fn eight(from: *const u8, stream: bool) -> [f32; 8] {
        // SAFETY: the caller promises 16 bytes.
        let v = unsafe { load16(from, stream) };
        let (low, high) = (|u: u32| f32::from_bits(u << 16), |u: u32| f32::from_bits(u & 0xffff_0000));
        [low(v[0]), high(v[0]), low(v[1]), high(v[1]), low(v[2]), high(v[2]), low(v[3]), high(v[3])]
    }
}

impl Float for Half {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn one(from: *const u8) -> f32 {
        // SAFETY: the caller's promise.
        f16_to_f32(unsafe { from.cast::<u16>().read() })
    }

    #[inline(always)]
    unsafe fn eight(from: *const u8, stream: bool) -> [f32; 8] {
        // SAFETY: the caller promises 16 bytes.
        let v = unsafe { load16(from, stream) };
        let (low, high) = (|u: u32| f16_to_f32(u as u16), |u: u32| f16_to_f32((u >> 16) as u16));
        [low(v[0]), high(v[0]), low(v[1]), high(v[1]), low(v[2]), high(v[2]), low(v[3]), high(v[3])]
    }
}

/// `x[first + j, :] . w[n, :]` for j below R, the same in every lane; j beyond x's `rows` repeat the last row.
///
/// # Safety
/// Every lane of the warp makes this same call; `x` and `w` are matrices of floats with the same number of columns, each
/// row contiguous; `n` and `first` are rows of theirs and `rows` is at most x's.
#[inline(always)]
pub(crate) unsafe fn dots<const R: usize>(x: &Tensor, first: u32, rows: u32, w: &Tensor, n: u32, lane: u32) -> [f32; R] {
    const BF16: u16 = super::BF16;
    // SAFETY: the caller's promises; the types are the tensors'.
    unsafe {
        match (w.dtype(), x.dtype()) {
            (BF16, F32) => typed::<Brain, Single, R>(x, first, rows, w, n, lane),
            (BF16, BF16) => typed::<Brain, Brain, R>(x, first, rows, w, n, lane),
            (BF16, _) => typed::<Brain, Half, R>(x, first, rows, w, n, lane),
            (F32, F32) => typed::<Single, Single, R>(x, first, rows, w, n, lane),
            (F32, BF16) => typed::<Single, Brain, R>(x, first, rows, w, n, lane),
            (F32, _) => typed::<Single, Half, R>(x, first, rows, w, n, lane),
            (_, F32) => typed::<Half, Single, R>(x, first, rows, w, n, lane),
            (_, BF16) => typed::<Half, Brain, R>(x, first, rows, w, n, lane),
            _ => typed::<Half, Half, R>(x, first, rows, w, n, lane),
        }
    }
}

#[inline(always)]
unsafe fn typed<W: Float, X: Float, const R: usize>(
    x: &Tensor,
    first: u32,
    rows: u32,
    w: &Tensor,
    n: u32,
    lane: u32,
) -> [f32; R] {
    const STEPS: usize = 4;
    const LANES: usize = WARP as usize;
    let lane = lane as usize;
    let k = w.extent(1) as usize;
    // SAFETY: every index below is less than k, the length of all these rows; the 16-byte loads are of aligned addresses
    // and of eight elements of the row.
    unsafe {
        let w_row: *const u8 = w.address([n, 0]);
        let x_rows: [*const u8; R] = core::array::from_fn(|j| {
            let row = first + j as u32;
            x.address([if row < rows { row } else { rows - 1 }, 0]).cast_const()
        });
        let mut sums = [0f32; R];
        let add_one = |at: usize, sums: &mut [f32; R]| {
            let weight = W::one(w_row.add(at * W::BYTES));
            for j in 0..R {
                sums[j] = fma(weight, X::one(x_rows[j].add(at * X::BYTES)), sums[j]);
            }
        };

        let head = ((w_row.addr().wrapping_neg() % 16) / W::BYTES).min(k);
        for at in (lane..head).step_by(LANES) {
            add_one(at, &mut sums);
        }
        let chunks = (k - head) / 8;
        let mut aligned = true;
        for row in x_rows {
            aligned &= row.add(head * X::BYTES).addr() % 16 == 0;
        }
        let w_chunk = |chunk: usize| W::eight(w_row.add((head + 8 * chunk) * W::BYTES), true);
        let add_eight = |weights: &[f32; 8], chunk: usize, sums: &mut [f32; R]| {
            for j in 0..R {
                let from = x_rows[j].add((head + 8 * chunk) * X::BYTES);
                let values: [f32; 8] =
                    if aligned { X::eight(from, false) } else { core::array::from_fn(|i| X::one(from.add(i * X::BYTES))) };
                for i in 0..8 {
                    sums[j] = fma(weights[i], values[i], sums[j]);
                }
            }
        };
        let mut chunk = lane;
        while chunk + (STEPS - 1) * LANES < chunks {
            let weights: [[f32; 8]; STEPS] = core::array::from_fn(|s| w_chunk(chunk + s * LANES));
            for s in 0..STEPS {
                add_eight(&weights[s], chunk + s * LANES, &mut sums);
            }
            chunk += STEPS * LANES;
        }
        while chunk < chunks {
            add_eight(&w_chunk(chunk), chunk, &mut sums);
            chunk += LANES;
        }
        for at in (head + 8 * chunks + lane..k).step_by(LANES) {
            add_one(at, &mut sums);
        }
        sums.map(|sum| warp::sum(sum))
    }
}

/// `values[at]` by comparisons, since an index known only at run time would put the array into memory.
#[inline(always)]
pub(crate) fn pick(values: [f32; 4], at: u32) -> f32 {
    match at {
        0 => values[0],
        1 => values[1],
        2 => values[2],
        _ => values[3],
    }
}
