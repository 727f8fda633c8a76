//! Products of many rows with weights of bf16, or rounded to it, on the tensor cores: what `linear` and `gated_linear`
//! are made of in prefill.
//!
//! ```text
//!          k: 32 at a time          block: all warps          warp: 16 rows of weights
//!   x   [ up to 64 rows    ] bf16   shared by all             A, 16 x 16 by ldmatrix
//!   w   [ 16 rows per warp ] bf16   each warp its own         B, two of 16 x 8 by one ldmatrix
//! ```
//! While the warps multiply one 32 of k, the next is on its way from memory into registers. Rows in shared memory are
//! 20 words apart, so that the eight rows of an ldmatrix fall into different banks. Of two matrices (gate and up) a
//! warp takes eight rows each, so that both values of a column end in the same lane.
//!
//! Weights in fewer bits become bf16 on the way, which takes 2^-9 of each, as little beside their own steps as they are
//! beside each other.
//!
//! x is rounded to bf16, as engines that keep activations in bf16 have it; products are exact and sums are f32.
//! Tolerance per output: sum |x| |w| * 2^-8, and sum |x| |w| * 2^-18 where x has bf16 values.

use super::math::bytes_less;
use super::packed::{Eight, Four, Packed};
use super::{BF16, Call, F32, INT4, MX4, Q4, Q8, Tensor};
use crate::arch::scalar::{f32_to_bf16, f32_to_bf16_pair};
use crate::arch::{WARP, each_of_four, memory, shared, warp};
use crate::block::{Block, FREE_SHARED};
use crate::kernels::linear::slot;

/// Passes of more rows than this are worth it.
pub(super) const WIDE_ROWS: u32 = 16;

/// Elements of k at a time, and words from one row in shared memory to the next.
const STEP: u32 = 32;
const PITCH: u32 = 20;

/// Fragments of 16 rows of x at most.
const FRAGMENTS: usize = 4;

/// Words of a warp for the outputs of a fragment, 16 x 16, rows apart by one more.
const OWN_PITCH: u32 = 17;
const OWN: u32 = 16 * OWN_PITCH;

/// Warps at most, since so many tiles fit the words a task has.
const MAX_WARPS: u32 = (shared::KEPT - FREE_SHARED - FRAGMENTS as u32 * 16 * PITCH) / (16 * PITCH);

/// Whether [`multiply`] is for this call, of `N` matrices of weights from operand `w` on.
///
/// # Safety
/// The operands are a kernel's that has these.
pub(crate) unsafe fn is_for<const N: usize>(call: &Call<'_>, block: &Block, rows: u32) -> bool {
    // SAFETY: the caller's promise. Of weights in fewer bits all passes of several rows: nobody else takes them by more
    // than one at a time.
    let are_fit = unsafe {
        let w = call.tensor(slot::W);
        (w.dtype() == BF16 && rows > WIDE_ROWS || w.is_packed() && rows > 1) && call.are_all::<N>(w.dtype())
    };
    are_fit && block.warps() <= MAX_WARPS
}

/// Calls `finish(r, n, sums)` for every row r of operand `x` and n of the N weight matrices, operands `w` and up, of
/// which the sums are the products.
///
/// # Safety
/// Every thread of the block makes this same call; operand `x` is a matrix of floats of at least `rows` rows, the
/// weights are matrices of bf16 or in fewer bits, all alike, with as many columns, each row contiguous.
pub(crate) unsafe fn multiply<const N: usize>(
    call: &Call<'_>,
    block: &Block,
    rows: u32,
    finish: impl Fn(u32, u32, [f32; N]),
) {
    // SAFETY: the caller's promises; loop bounds are the block's, or, around what a warp does, the warp's. A barrier
    // stands between writing a step's tiles and reading them, and between that and writing the next.
    unsafe {
        let (columns, k) = {
            let w = call.tensor(slot::W);
            (w.extent(0), w.extent(1))
        };
        let lane = block.lane();
        let per_warp = 16 / N as u32;
        let fragments = if block.warps() < FRAGMENTS as u32 { block.warps() } else { FRAGMENTS as u32 };
        let x_tile = FREE_SHARED;
        let w_tile = FREE_SHARED + FRAGMENTS as u32 * 16 * PITCH;
        // Where this lane's rows of the fragments start: matrices of 8 x 8, rows first for x, k first for w.
        let a_at = x_tile + (lane % 16) * PITCH + lane / 16 * 4;
        let b_at = w_tile + (block.warp() * 16 + lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 4;
        let mut n0 = 0;
        while n0 < columns {
            let mut m0 = 0;
            while m0 < rows {
                let mut sums = [[[0f32; 4]; 2]; FRAGMENTS];
                let place = Place { n0, m0, rows, columns, k };
                let mut next = Fetched::of::<N>(call, block, &place, 0);
                let mut k0 = 0;
                while k0 < k {
                    next.keep(block, x_tile, w_tile, fragments);
                    block.sync();
                    k0 += STEP;
                    if k0 < k {
                        next = Fetched::of::<N>(call, block, &place, k0);
                    }
                    for half in 0..2 {
                        let b = warp::ldmatrix(b_at + 8 * half);
                        // Indices known as it is compiled: others would put the sums into memory.
                        each_of_four!(m => if m < fragments as usize {
                            let a = warp::ldmatrix(a_at + m as u32 * 16 * PITCH + 8 * half);
                            sums[m][0] = warp::mma(a, [b[0], b[1]], sums[m][0]);
                            sums[m][1] = warp::mma(a, [b[2], b[3]], sums[m][1]);
                        });
                    }
                    block.sync();
                }
                // A fragment at a time through the warp's words, so that one piece of code finishes all outputs,
                // neighbours in neighbouring lanes.
                let own = x_tile + block.warp() * OWN;
                let mut m = 0;
                while m < fragments {
                    for i in 0..4 {
                        let to = own + (lane / 4 + i as u32 / 2 * 8) * OWN_PITCH + lane % 4 * 2 + i as u32 % 2;
                        shared::store(to, sums[0][0][i].to_bits());
                        shared::store(to + 8, sums[0][1][i].to_bits());
                    }
                    warp::sync();
                    let mut at = lane;
                    while at < 16 * per_warp {
                        let (row, column) = (at / per_warp, at % per_warp);
                        let (r, n) = (m0 + 16 * m + row, n0 + block.warp() * per_warp + column);
                        if r < rows && n < columns {
                            let from = own + row * OWN_PITCH + column;
                            let mut values = [f32::from_bits(shared::load(from)); N];
                            values[N - 1] = f32::from_bits(shared::load(from + 8 * (N as u32 - 1)));
                            finish(r, n, values);
                        }
                        at += WARP;
                    }
                    warp::sync();
                    sums = [sums[1], sums[2], sums[3], sums[0]];
                    m += 1;
                }
                block.sync();
                m0 += 16 * fragments;
            }
            n0 += per_warp * block.warps();
        }
    }
}

/// Which part of the product.
struct Place {
    n0: u32,
    m0: u32,
    rows: u32,
    columns: u32,
    k: u32,
}

/// What a thread brings of a step: twice eight elements of a row of each, zero where there are none.
struct Fetched {
    x: [[f32; 8]; 2],
    w: [[u32; 4]; 2],
}

impl Fetched {
    unsafe fn of<const N: usize>(call: &Call<'_>, block: &Block, place: &Place, k0: u32) -> Fetched {
        let mut fetched = Fetched { x: [[0.0; 8]; 2], w: [[0; 4]; 2] };
        // SAFETY: elements inside the matrices (caller).
        unsafe {
            let x = call.tensor(slot::X);
            let mut unit = block.thread;
            while unit < 2 * block.threads {
                let (row, at) = (unit / 4, k0 + unit % 4 * 8);
                let r = place.m0 + row;
                let is_x = row < FRAGMENTS as u32 * 16 && r < place.rows && at < place.k;
                fetched.x[0] = fetched.x[1];
                fetched.x[1] = if is_x { eight_of(&x, r, at, place.k) } else { [0.0; 8] };
                let per_warp = 16 / N as u32;
                let n = place.n0 + row / 16 * per_warp + row % per_warp;
                // A tile's second eight rows are the second matrix's, where there are two.
                let w = call.tensor(slot::W + (row % 16 / per_warp) as usize);
                let is_w = n < place.columns && at < place.k;
                fetched.w[0] = fetched.w[1];
                fetched.w[1] = match w.dtype() {
                    _ if !is_w => [0; 4],
                    Q8 => packed_of::<Eight>(&w, n, at),
                    Q4 | MX4 | INT4 => packed_of::<Four>(&w, n, at),
                    _ => bits_of(&w, n, at, place.k),
                };
                unit += block.threads;
            }
        }
        fetched
    }

    /// Writes it to the tiles.
    unsafe fn keep(&self, block: &Block, x_tile: u32, w_tile: u32, fragments: u32) {
        for i in 0..2 {
            let unit = block.thread + i as u32 * block.threads;
            let to = unit / 4 * PITCH + unit % 4 * 4;
            let x = &self.x[i];
            let pair = |at: usize| u32::from(f32_to_bf16(x[at])) | u32::from(f32_to_bf16(x[at + 1])) << 16;
            // SAFETY: the thread's own words.
            unsafe {
                if unit / 4 < fragments * 16 {
                    shared::store16(x_tile + to, [pair(0), pair(2), pair(4), pair(6)]);
                }
                shared::store16(w_tile + to, self.w[i]);
            }
        }
    }
}

/// Eight elements of row `r` of `x` from `at` on, zero from `k` on.
unsafe fn eight_of(x: &Tensor, r: u32, at: u32, k: u32) -> [f32; 8] {
    let mut eight = [0f32; 8];
    let from = x.address([r, at]);
    // SAFETY: elements before `k` are the row's.
    unsafe {
        if x.dtype() == F32 && at + 8 <= k && from.addr().is_multiple_of(16) {
            let (a, b) = (memory::load16(from), memory::load16(from.add(16)));
            for i in 0..4 {
                eight[i] = f32::from_bits(a[i]);
                eight[i + 4] = f32::from_bits(b[i]);
            }
        } else {
            // Each goes to the end, and after eight is where it belongs.
            for i in 0..8 {
                let value = if at + i < k { x.get([r, at + i]) } else { 0.0 };
                eight = [eight[1], eight[2], eight[3], eight[4], eight[5], eight[6], eight[7], value];
            }
        }
    }
    eight
}

/// Eight weights in fewer bits, of row `n` from `at` on, a multiple of eight, as bf16; beyond the row's end they are
/// numbers.
unsafe fn packed_of<P: Packed>(w: &Tensor, n: u32, at: u32) -> [u32; 4] {
    let row = w.packed_row([n]);
    let (byte, scale_at) = P::element(at);
    // SAFETY: of the row (caller), whose lines are whole.
    unsafe {
        let first: *const u32 = row.wrapping_add(byte as usize).cast();
        let words = (memory::load(first), memory::load(first.wrapping_add(1)));
        let scale = P::scale(memory::load(row.wrapping_add(scale_at as usize / 4 * 4).cast()), scale_at);
        let (low, high) = P::eight(P::table(w.dtype()), words, at);
        let ([a, b, c, d], [e, f, g, h]) = (bytes_less(low, P::MORE), bytes_less(high, P::MORE));
        let pair = |one: f32, other: f32| f32_to_bf16_pair(one * scale, other * scale);
        [pair(a, b), pair(c, d), pair(e, f), pair(g, h)]
    }
}

/// [`eight_of`] for bf16, as they are.
unsafe fn bits_of(w: &Tensor, n: u32, at: u32, k: u32) -> [u32; 4] {
    let from = w.address([n, at]);
    // SAFETY: elements before `k` are the row's.
    unsafe {
        if at + 8 <= k && from.addr().is_multiple_of(16) {
            return memory::load16_stream(from);
        }
        let mut bits = [0u32; 4];
        for i in 0..8 {
            let value = if at + i < k { memory::load(from.cast::<u16>().add(i as usize)) } else { 0 };
            let [a, b, c, d] = bits;
            bits = [a >> 16 | b << 16, b >> 16 | c << 16, c >> 16 | d << 16, d >> 16 | u32::from(value) << 16];
        }
        bits
    }
}
