//! The functions `core` lacks on this target, in f32 unless said otherwise.

use crate::arch::scalar::{self, exp2, fma, fma64, with_byte};
use crate::arch::{each_of_four, memory};
use crate::kernels::gated_linear::Gating;
use crate::kernels::linear::Activation;
use core::hint::cold_path;

/// e^x to about 3 ulp; 0 below 2^-126. The power of two is split off in two steps (Cody and Waite), so that the error
/// does not grow with |x|.
pub(crate) fn exp(x: f32) -> f32 {
    // Beyond these the result is 0 or infinity anyway, and the scaling stays in range. NaN passes through both.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };
    // Adding 1.5 * 2^23 rounds to a whole number.
    const ROUND: f32 = 12_582_912.0;
    let n = fma(x, core::f32::consts::LOG2_E, ROUND) - ROUND;
    // ln 2 as a number of few bits, so that n times it is exact, and the rest of it.
    let r = fma(n, -0.693_145_75, x);
    let r = fma(n, -1.428_606_8e-6, r);
    exp2(r * core::f32::consts::LOG2_E) * exp2(n)
}

/// ln x to 1e-7 and 3e-7 of itself, of a positive number that is not subnormal: x = m 2^n with m from 2/3 to 4/3, and
/// ln m = 2 atanh((m - 1) / (m + 1)).
pub(crate) fn ln(x: f32) -> f32 {
    const TWO_THIRDS: u32 = 0x3f2a_aaab;
    let n = (x.to_bits().wrapping_sub(TWO_THIRDS) as i32) >> 23;
    let m = f32::from_bits(x.to_bits().wrapping_sub((n as u32) << 23));
    let s = (m - 1.0) * scalar::reciprocal(m + 1.0);
    let z = s * s;
    let mut p = fma(1.0 / 9.0, z, 1.0 / 7.0);
    p = fma(p, z, 1.0 / 5.0);
    p = fma(p, z, 1.0 / 3.0);
    fma(n as f32, core::f32::consts::LN_2, 2.0 * fma(p * z, s, s))
}

/// ln(1 + e^x), to 1e-6 of itself. NaN passes.
pub(crate) fn softplus(x: f32) -> f32 {
    if x < 20.0 {
        let e = exp(x);
        // Of what 1 has no digits for the series has them.
        return if e < 1.0 / 512.0 { fma(fma(e, 1.0 / 3.0, -0.5), e * e, e) } else { ln(1.0 + e) };
    }
    x
}

/// 1 / sqrt(x) to 2 ulp, of a number that is not subnormal.
pub(crate) fn rsqrt(x: f32) -> f32 {
    scalar::rsqrt(x)
}

/// The larger one; `a` where `b` is NaN.
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// What [`bytes_less`] adds to its bytes; those of 2^15 have places of their own among the bits of a sum.
const ABOVE: f32 = 32_768.0;

/// Four bytes from none to 255, the lowest first, each 2^15 more.
fn raised_bytes(bytes: u32) -> [f32; 4] {
    let [a, b, c, d] = [
        with_byte::<0>(ABOVE.to_bits(), bytes),
        with_byte::<1>(ABOVE.to_bits(), bytes),
        with_byte::<2>(ABOVE.to_bits(), bytes),
        with_byte::<3>(ABOVE.to_bits(), bytes),
    ];
    [f32::from_bits(a), f32::from_bits(b), f32::from_bits(c), f32::from_bits(d)]
}

/// Four bytes as numbers, each less a whole number of up to eight bits, the lowest first. PERF: an instruction that
/// converts goes at a quarter of the rate of these two.
pub(crate) fn bytes_less(bytes: u32, less: f32) -> [f32; 4] {
    let [a, b, c, d] = raised_bytes(bytes);
    let less = ABOVE + less;
    [a - less, b - less, c - less, d - less]
}

/// The 15 highest bits of `scale`, and what [`scaled_bytes`] adds where bytes are so much more: so many that this is
/// exact, and the products are. What is lost is less than 2^-14 of the scale.
pub(crate) fn short_scale(scale: f32, more: f32) -> (f32, f32) {
    let scale = f32::from_bits(scale.to_bits() & !0x1ff);
    (scale, scale * -(ABOVE + more))
}

/// [`bytes_less`] times a [`short_scale`] of as much. PERF: an instruction each less than this and a product.
pub(crate) fn scaled_bytes(bytes: u32, (scale, more): (f32, f32)) -> [f32; 4] {
    let [a, b, c, d] = raised_bytes(bytes);
    [fma(a, scale, more), fma(b, scale, more), fma(c, scale, more), fma(d, scale, more)]
}

/// 1 / n, found here and not where it is wanted: a division takes long.
pub(crate) fn reciprocal(n: u32) -> f32 {
    f32::from_bits(memory::opaque_word((1.0 / n as f32).to_bits()))
}

/// tanh, absolute error below 3e-7.
fn tanh(x: f32) -> f32 {
    1.0 - 2.0 * scalar::reciprocal(exp(2.0 * x) + 1.0)
}

/// The error function, absolute error below 5e-7: Abramowitz and Stegun 7.1.26.
fn erf(x: f32) -> f32 {
    let a = if x < 0.0 { -x } else { x };
    let t = scalar::reciprocal(fma(0.327_591_1, a, 1.0));
    let mut p = fma(1.061_405_4, t, -1.453_152);
    p = fma(p, t, 1.421_413_8);
    p = fma(p, t, -0.284_496_72);
    p = fma(p, t, 0.254_829_6);
    let y = 1.0 - p * t * exp(-a * a);
    if x < 0.0 { -y } else { y }
}

/// Sine and cosine of an angle of any size that is exact in f32: the quarter turns are taken off in f64, whose error at
/// 10^6 radians is below 1e-9; the rest, at most pi/4, goes through the Taylor polynomials (remainders below 2e-9).
pub(crate) fn sin_cos(angle: f32) -> (f32, f32) {
    const ROUND: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52
    let angle = f64::from(angle);
    let shifted = fma64(angle, core::f64::consts::FRAC_2_PI, ROUND);
    let quarter = shifted.to_bits() as u32 & 3;
    let r = fma64(shifted - ROUND, -core::f64::consts::FRAC_PI_2, angle) as f32;
    let r2 = r * r;
    let mut s = fma(1.0 / 362_880.0, r2, -1.0 / 5040.0);
    s = fma(s, r2, 1.0 / 120.0);
    s = fma(s, r2, -1.0 / 6.0);
    let s = fma(s * r2, r, r);
    let mut c = fma(-1.0 / 3_628_800.0, r2, 1.0 / 40_320.0);
    c = fma(c, r2, -1.0 / 720.0);
    c = fma(c, r2, 1.0 / 24.0);
    c = fma(c, r2, -0.5);
    let c = fma(c, r2, 1.0);
    let (sin, cos) = if quarter & 1 == 0 { (s, c) } else { (c, s) };
    let with_sign = |x: f32, is_negative: u32| f32::from_bits(x.to_bits() ^ is_negative << 31);
    (with_sign(sin, quarter >> 1), with_sign(cos, (quarter + 1) >> 1 & 1))
}

/// The activation numbered `activation` (see [`Activation`]) of `x`.
pub(crate) fn activate(activation: u32, x: f32) -> f32 {
    // One question after the other, and few for those that most models have.
    if activation == NONE {
        return x;
    }
    if activation == SILU {
        return silu(x);
    }
    cold_path();
    match activation {
        GELU => gelu(x),
        RELU => relu(x),
        GELU_TANH => gelu_tanh(x),
        cap => capped(f32::from_bits(cap), x),
    }
}

/// [`activate`] of fours, at most four of them, with one question for all: none of them waits for another.
pub(crate) fn activate_fours<const R: usize>(activation: u32, fours: [[f32; 4]; R]) -> [[f32; 4]; R] {
    if activation == NONE {
        return fours;
    }
    if activation == SILU {
        return of_each(fours, silu);
    }
    cold_path();
    match activation {
        GELU => of_each(fours, gelu),
        RELU => of_each(fours, relu),
        GELU_TANH => of_each(fours, gelu_tanh),
        cap => of_each(fours, |x| capped(f32::from_bits(cap), x)),
    }
}

/// `f` of each. Written out, since arrays that a loop goes through are in memory if it stays one.
fn of_each<const R: usize>(mut fours: [[f32; 4]; R], f: impl Fn(f32) -> f32) -> [[f32; 4]; R] {
    const { assert!(R <= 4) };
    each_of_four!(i => if i < R {
        let [a, b, c, d] = fours[i];
        fours[i] = [f(a), f(b), f(c), f(d)];
    });
    fours
}

/// What [`Gating`] makes of a column's sums.
pub(crate) fn gate(gating: Gating, g: f32, u: f32) -> f32 {
    if gating.limit == 0.0 {
        return activate(gating.activation, g) * u;
    }
    limited(gating, g, u)
}

/// [`gate`] of fours, at most four of them.
pub(crate) fn gate_fours<const R: usize>(gating: Gating, g: [[f32; 4]; R], u: [[f32; 4]; R]) -> [[f32; 4]; R] {
    let mut made = g;
    if gating.limit == 0.0 {
        made = activate_fours(gating.activation, g);
    }
    each_of_four!(i => if i < R {
        let (a, b) = (made[i], u[i]);
        let of = |c: usize| if gating.limit == 0.0 { a[c] * b[c] } else { limited(gating, a[c], b[c]) };
        made[i] = [of(0), of(1), of(2), of(3)];
    });
    made
}

/// [`gate`] with a limit.
fn limited(gating: Gating, g: f32, u: f32) -> f32 {
    let Gating { limit, alpha, .. } = gating;
    let g = if g > limit { limit } else { g };
    let u = if u > limit { limit } else { u };
    let u = if u < -limit { -limit } else { u };
    g * scalar::reciprocal(1.0 + exp(-alpha * g)) * (u + 1.0)
}

const NONE: u32 = Activation::None.number();
const GELU: u32 = Activation::Gelu.number();
const SILU: u32 = Activation::Silu.number();
const RELU: u32 = Activation::Relu.number();
const GELU_TANH: u32 = Activation::GeluTanh.number();

pub(crate) fn silu(x: f32) -> f32 {
    x * scalar::reciprocal(1.0 + exp(-x))
}

fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + erf(x * core::f32::consts::FRAC_1_SQRT_2))
}

fn relu(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
}

fn gelu_tanh(x: f32) -> f32 {
    const SQRT_2_OVER_PI: f32 = 0.797_884_6;
    0.5 * x * (1.0 + tanh(SQRT_2_OVER_PI * fma(0.044_715 * x * x, x, x)))
}

/// [`Activation::Capped`].
fn capped(cap: f32, x: f32) -> f32 {
    cap * tanh(x * scalar::reciprocal(cap))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_match_f64() {
        for i in -20_000..20_000 {
            let x = i as f32 * 0.005;
            let (e, expected) = (f64::from(exp(x)), f64::from(x).exp());
            if x > -87.0 && x < 88.0 {
                assert!((e - expected).abs() <= 5e-7 * expected, "exp({x}) = {e}, expected {expected}");
            }
            assert!((f64::from(tanh(x)) - f64::from(x).tanh()).abs() < 3e-7, "tanh({x})");
            assert!((erf(x) - crate::cpu::math::erf(x)).abs() < 5e-7, "erf({x})");
        }
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-200.0), 0.0);
        assert!(exp(100.0).is_infinite() && exp(f32::NAN).is_nan());
    }

    #[test]
    fn bytes_are_their_numbers() {
        for (byte, others) in (0..=255u8).zip((0..=255u8).rev()) {
            for at in 0..4 {
                let mut bytes = [others; 4];
                bytes[at] = byte;
                for less in [128.0, 64.0] {
                    let (word, expected) = (u32::from_le_bytes(bytes), bytes.map(|byte| f32::from(byte) - less));
                    assert_eq!(bytes_less(word, less), expected, "{bytes:?}");
                    for scale in [0.0, 1.0, 0.3, -1e-3, 7.7e-30, 1e30] {
                        let (short, more) = short_scale(scale, less);
                        assert!((short - scale).abs() <= scale.abs() / 16384.0, "{scale} as {short}");
                        assert_eq!(scaled_bytes(word, (short, more)), expected.map(|byte| byte * short), "{bytes:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn sine_and_cosine_hold_at_every_position() {
        for position in (0..131_072u32).step_by(7) {
            for frequency in [1.0f32, 0.749_894_2, 0.1, 0.001] {
                let angle = position as f32 * frequency;
                let (s, c) = sin_cos(angle);
                let (es, ec) = f64::from(angle).sin_cos();
                assert!((f64::from(s) - es).abs() < 2e-7, "sin({angle}) = {s}, expected {es}");
                assert!((f64::from(c) - ec).abs() < 2e-7, "cos({angle}) = {c}, expected {ec}");
            }
        }
    }
}
