//! Products on a matrix unit, whether or not this machine has one: its instructions in plain Rust.
//!
//! Numbers are such that what their first bf16 terms leave has their sign and is as large as it can be, and all
//! products of an output have one sign. So every product of terms that is left out shows, where with noise most of it
//! cancels: the bound is the one of the module's head, and each of the three products is at least 2^-10 of an output.

use super::Memory;
use crate::cpu::amx::{self, Amx, Config, InPlace, InTerms, Source, Tiles, Unit};
use crate::cpu::outer::Products;
use crate::cpu::simd::{F16, F32, Fours, Mx4, Q4, Q8, Vectors};
use half::bf16;
use perpetua_shared::DType;
use perpetua_shared::dtype;
use std::cell::RefCell;

/// Eight tiles of a thread, each at most 16 rows of 64 bytes, and how many rows they have.
#[derive(Clone, Copy)]
struct State {
    rows: [usize; 8],
    tiles: [[[u8; 64]; 16]; 8],
}

thread_local! {
    static STATE: RefCell<Option<State>> = const { RefCell::new(None) };
}

/// The instructions as Intel's manual defines them.
struct Emulated;

fn with_state<T>(f: impl FnOnce(&mut State) -> T) -> T {
    STATE.with_borrow_mut(|state| f(state.as_mut().expect("the unit is configured")))
}

fn f32_at(row: &[u8; 64], i: usize) -> f32 {
    f32::from_le_bytes([row[4 * i], row[4 * i + 1], row[4 * i + 2], row[4 * i + 3]])
}

fn bf16_at(row: &[u8; 64], i: usize) -> f32 {
    flushed(f32::from_bits(u32::from(u16::from_le_bytes([row[2 * i], row[2 * i + 1]])) << 16))
}

/// Subnormal numbers are zeros, as operands and as results.
fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

impl Unit for Emulated {
    unsafe fn configure(config: &Config) {
        let rows = core::array::from_fn(|tile| config.rows(tile));
        STATE.set(Some(State { rows, tiles: [[[0; 64]; 16]; 8] }));
    }
    unsafe fn release() {
        STATE.set(None);
    }
    unsafe fn zero<const TILE: u8>() {
        with_state(|state| state.tiles[usize::from(TILE)] = [[0; 64]; 16]);
    }
    unsafe fn load<const TILE: u8>(first: *const u8, stride: usize) {
        with_state(|state| {
            let tile = usize::from(TILE);
            state.tiles[tile] = [[0; 64]; 16];
            for r in 0..state.rows[tile] {
                // SAFETY: the rows are readable (caller).
                state.tiles[tile][r] = unsafe { first.add(r * stride).cast::<[u8; 64]>().read() };
            }
        });
    }
    unsafe fn store<const TILE: u8>(first: *mut u8, stride: usize) {
        with_state(|state| {
            let tile = usize::from(TILE);
            for r in 0..state.rows[tile] {
                // SAFETY: the rows are writable (caller).
                unsafe { first.add(r * stride).cast::<[u8; 64]>().write(state.tiles[tile][r]) };
            }
        });
    }
    unsafe fn multiply<const SUMS: u8, const W: u8, const X: u8>() {
        with_state(|state| {
            let [sums, w, x] = [SUMS, W, X].map(usize::from);
            assert_eq!((state.rows[sums], state.rows[x]), (state.rows[w], 16), "the tiles' shapes fit");
            for m in 0..state.rows[w] {
                for n in 0..16 {
                    // A product of two bf16 is a f32, so that its addition is the only rounding.
                    let of_pairs = |at: usize| {
                        (0..16).fold(0.0, |sum, k| {
                            let product =
                                bf16_at(&state.tiles[w][m], 2 * k + at) * bf16_at(&state.tiles[x][k], 2 * n + at);
                            flushed(sum + product)
                        })
                    };
                    let sum = flushed(of_pairs(0) + of_pairs(1));
                    let sum = flushed(f32_at(&state.tiles[sums][m], n) + sum);
                    state.tiles[sums][m][4 * n..][..4].copy_from_slice(&sum.to_le_bytes());
                }
            }
        });
    }
}

/// What the first term of `x` leaves of it, relative to `x`.
fn rest(x: f32) -> f32 {
    (x - bf16::from_f32(x).to_f32()) / x
}

/// The first of a sequence of floats of [0.5, 4), by `seed`, that `narrow` keeps large in its [`rest`].
fn large_in_rest(seed: u64, i: usize, narrow: impl Fn(f32) -> f32) -> f32 {
    let draw = |tries: usize| narrow(2.25 + 1.75 * super::noise(seed, 1000 * i + tries));
    (0..1000).map(draw).find(|x| rest(*x) >= 1.0 / 1024.0).expect("one in four is")
}

/// The sign of column `i`, in both factors.
fn sign(i: usize) -> f32 {
    if i.is_multiple_of(3) { -1.0 } else { 1.0 }
}

/// x, row by row, times w, row by row, on `U`.
fn products<W: Source, U: Unit>(x: &Memory, w: *const W::Elem, w_stride: usize, [rows, n, k]: [usize; 3]) -> Vec<f32> {
    let stride = rows.next_multiple_of(16);
    let mut packed = vec![f32::NAN; k * stride];
    let mut sums = vec![f32::NAN; n * stride];
    // SAFETY: the areas are as the trait wants them; the vectors have been found (`every_product_of_terms_counts`), as
    // has the unit.
    unsafe {
        type On<W, U> = Tiles<W, U>;
        <On<W, U> as Products<Vectors>>::pack(
            &x.tensor(),
            0,
            [rows, k],
            core::ptr::null_mut(),
            packed.as_mut_ptr(),
            stride,
        );
        let shape = [n, k, rows];
        <On<W, U> as Products<Vectors>>::multiply(
            w,
            w_stride,
            shape,
            packed.as_ptr(),
            stride,
            sums.as_mut_ptr(),
            stride,
        );
    }
    sums
}

/// Compares both units' products of `W` with exact ones; `off` is what an output may be off, relative to its size.
fn check<W: Source>(name: &str, w: &Memory, w_stride: usize, rows: usize, off: f64) {
    let [n, k] = [0, 1].map(|dim| w.tensor().extent(dim));
    let x = Memory::new(DType::F32, &[rows, k], 0, 0, |i| sign(i % k) * large_in_rest(7, i, |x| x));
    let first = w.tensor().address([0, 0]).cast();
    let mut units = vec![("emulated", products::<W, Emulated>(&x, first, w_stride, [rows, n, k]))];
    if amx::is_available() {
        units.push(("core's", products::<W, Amx>(&x, first, w_stride, [rows, n, k])));
    }
    let (xt, wt) = (x.tensor(), w.tensor());
    for r in 0..rows {
        for j in 0..n {
            let exact: f64 = (0..k).map(|i| f64::from(xt.get([r, i])) * f64::from(wt.get([j, i]))).sum();
            for (unit, sums) in &units {
                let found = f64::from(sums[j * rows.next_multiple_of(16) + r]);
                let found_off = (found - exact).abs() / exact;
                assert!(
                    found_off <= off,
                    "{name} on the {unit} unit, {rows}x{n}x{k} [{r}, {j}]: off by {found_off:.1e}"
                );
            }
        }
    }
}

#[test]
fn every_product_of_terms_counts() {
    use std::arch::is_x86_feature_detected as has;
    if !(has!("avx512f") && has!("avx512bw") && has!("avx512vl") && has!("avx512dq") && has!("avx512bf16")) {
        println!("skipped: this machine has no vectors that split numbers into bf16 terms");
        return;
    }
    // Of the module's head, and an ulp for every addition an output's sum goes through at most.
    let off = |terms: i32, k: usize| 2f64.powi(terms) + (3 * k / 32 + 17) as f64 * 2f64.powi(-24);
    // One tile and less, two and parts of them, and k in several parts.
    for (rows, n, k) in [(1, 16, 32), (16, 7, 96), (33, 40, 64), (17, 33, 1056)] {
        let of = |dtype: DType, narrow: fn(f32) -> f32| {
            Memory::new(dtype, &[n, k], 0, 0, |i| sign(i % k) * large_in_rest(11, i, narrow))
        };
        check::<InTerms<F32, 2>>("f32", &of(DType::F32, |x| x), k, rows, off(-15, k));
        check::<InTerms<F16, 2>>("f16", &of(DType::F16, |x| half::f16::from_f32(x).to_f32()), k, rows, off(-15, k));
        // Exact weights: the second term of activations alone.
        let exact = Memory::new(DType::Bf16, &[n, k], 0, 0, |i| sign(i % k) * (1.0 + (i % 100) as f32 / 128.0));
        check::<InPlace>("bf16", &exact, k, rows, off(-17, k));
        // Of the bytes from 64 on, those that are large in what their block's scale makes of them.
        let bytes = |scale: f32| (64..=127).filter(move |byte| rest(f32::from(*byte) * scale) >= 1.0 / 1024.0);
        let scale = |r: usize, b: usize| {
            let draw = |tries: usize| 0.02 + 0.01 * super::noise(13, 1000 * (40 * r + b) + tries);
            (0..1000).map(draw).find(|scale| bytes(*scale).count() >= 4).expect("one in four bytes is")
        };
        let byte = |r: usize, i: usize| {
            let large: Vec<i8> = bytes(scale(r, i / dtype::Q8.elems)).collect();
            sign(i) as i8 * large[(7 * r + i) % large.len()]
        };
        let eight_bit = Memory::q8(n, k, byte, scale);
        check::<InTerms<Q8, 2>>("q8", &eight_bit, dtype::Q8.row_bytes(k), rows, off(-15, k));
        // Likewise of the levels with either sign.
        let levels = |scale: f32, sign: f32| {
            let of = move |number: &u8| f32::from(dtype::Q4_LEVELS[usize::from(*number)]) * scale;
            (0..16).filter(move |number| of(number) * sign > 0.0 && rest(of(number)) >= 1.0 / 1024.0)
        };
        let scale = |r: usize, b: usize| {
            let draw = |tries: usize| 0.04 + 0.01 * super::noise(17, 1000 * (40 * r + b) + tries);
            let drawn = (0..1000).map(|tries| half::bf16::from_f32(draw(tries)).to_f32());
            let has_both = |scale: &f32| [-1.0, 1.0].iter().all(|sign| levels(*scale, *sign).count() >= 2);
            drawn.into_iter().find(has_both).expect("one in four levels is")
        };
        let level = |r: usize, i: usize| {
            let large: Vec<u8> = levels(scale(r, i / dtype::Q4_BLOCK), sign(i)).collect();
            large[(7 * r + i) % large.len()]
        };
        let four_bit = Memory::fours(DType::Q4, [n, k], level, scale);
        check::<InTerms<Fours<Q4>, 2>>("q4", &four_bit, dtype::Q4.row_bytes(k), rows, off(-15, k));
        // Exact in the first term, with either sign.
        let level = |r: usize, i: usize| (7 * r + i) as u8 % 7 + if sign(i) < 0.0 { 9 } else { 1 };
        let exact = Memory::fours(DType::Mx4, [n, k], level, |r, b| [0.5, 2.0, 0.125][(r + b) % 3]);
        check::<InTerms<Fours<Mx4>, 1>>("mxfp4", &exact, dtype::Q4.row_bytes(k), rows, off(-17, k));
    }
}
