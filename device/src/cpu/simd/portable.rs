//! Vectors as arrays: the definition of every operation, and the body where nothing better exists.

use super::{Leaf, Simd};
use half::{bf16, f16};

/// Eight lanes: two SSE2 or NEON registers.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

const N: usize = 8;

macro_rules! lanewise {
    ($($name:ident($($arg:ident),*) = $value:expr;)*) => { $(
        #[inline(always)]
        unsafe fn $name($($arg: [f32; N]),*) -> [f32; N] {
            let mut out = [0.0; N];
            let mut i = 0;
            while i < N {
                $(let $arg = $arg[i];)*
                out[i] = $value;
                i += 1;
            }
            out
        }
    )* };
}

impl Simd for Portable {
    const LANES: usize = N;
    const TILE_COLS: usize = 2;
    const SUMS: usize = 4;
    type F = [f32; N];

    lanewise! {
        add(a, b) = a + b;
        sub(a, b) = a - b;
        mul(a, b) = a * b;
        div(a, b) = a / b;
        // Two roundings: `mul_add` is a library call on targets without the instruction.
        fma(a, b, c) = a * b + c;
        max(a, b) = if a > b { a } else { b };
        min(a, b) = if a < b { a } else { b };
        pow2(n) = f32::from_bits(((n as i32 + 127) as u32) << 23);
    }

    #[inline(always)]
    unsafe fn call<T: Leaf>(leaf: T) -> T::Output {
        // SAFETY: the set exists (trait contract).
        unsafe { super::with_nothing(leaf) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> [f32; N] {
        [x; N]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> [f32; N] {
        // SAFETY: a vector is readable (caller).
        unsafe { p.cast::<[f32; N]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> [f32; N] {
        // SAFETY: a vector is readable (caller).
        unsafe { p.cast::<[u16; N]>().read_unaligned() }.map(|u| f32::from_bits(u32::from(u) << 16))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> [f32; N] {
        // SAFETY: a vector is readable (caller).
        unsafe { p.cast::<[u16; N]>().read_unaligned() }.map(|u| f16::from_bits(u).to_f32())
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> [f32; N] {
        // SAFETY: a vector is readable (caller).
        unsafe { p.cast::<[i8; N]>().read() }.map(f32::from)
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: [f32; N]) {
        // SAFETY: a vector is writable (caller).
        unsafe { p.cast::<[f32; N]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: [f32; N]) {
        // SAFETY: a vector is writable (caller).
        unsafe { p.cast::<[u16; N]>().write_unaligned(v.map(|x| bf16::from_f32(x).to_bits())) }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: [f32; N]) {
        // SAFETY: a vector is writable (caller).
        unsafe { p.cast::<[u16; N]>().write_unaligned(v.map(|x| f16::from_f32(x).to_bits())) }
    }
    #[inline(always)]
    unsafe fn sum4(v: [[f32; N]; 4]) -> [f32; 4] {
        v.map(|a| ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])))
    }
    #[inline(always)]
    unsafe fn largest(v: [f32; N]) -> f32 {
        v.into_iter().fold(f32::NEG_INFINITY, |best, x| if x > best { x } else { best })
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        super::prefetch(p);
    }
}
