//! Functions of vectors: exp, and the activations made of it.

use super::{Simd, round};
use crate::kernels::gated_linear::Gating;
use crate::kernels::linear::Activation;

/// e^x to within 2 ulp; 0 below -104, infinity above 88.73, NaN of NaN.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2; ln 2 is taken in two parts so that r is exact enough; e^r by the polynomial of
/// the Cephes library (S. Moshier).
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::F) -> S::F {
    // SAFETY: arithmetic only.
    unsafe {
        // `x` second, so that NaN passes.
        let x = S::min(S::splat(89.0), S::max(S::splat(-104.0), x));
        let n = round::<S>(S::mul(x, S::splat(core::f32::consts::LOG2_E)));
        let r = S::fma(n, S::splat(-0.693_359_4), x);
        let r = S::fma(n, S::splat(2.121_944_4e-4), r);
        let mut p = S::splat(1.987_569_1e-4);
        for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5e-1] {
            p = S::fma(p, r, S::splat(c));
        }
        let e = S::add(S::fma(p, S::mul(r, r), r), S::splat(1.0));
        S::scale2(e, n)
    }
}

/// The error function to within 6e-7: x P(x^2) / Q(x^2) on |x| < 4, coefficients as in Eigen and XLA, enlarged by
/// 2^-22 and cut at 1, so that far arguments give exactly 1 (gelu multiplies what is missing by x).
#[inline(always)]
unsafe fn erf<S: Simd>(x: S::F) -> S::F {
    // SAFETY: arithmetic only.
    unsafe {
        let x = S::min(S::splat(4.0), S::max(S::splat(-4.0), x));
        let xx = S::mul(x, x);
        let mut p = S::splat(-2.726_142_3e-10);
        for c in [2.770_681_4e-8, -2.101_024e-6, -5.692_506_4e-5, -7.349_906_3e-4, -2.954_6e-3, -1.609_603_3e-2] {
            p = S::fma(p, xx, S::splat(c));
        }
        let mut q = S::splat(-1.456_607_2e-5);
        for c in [-2.133_740_6e-4, -1.682_827e-3, -7.373_329_2e-3, -1.426_473_9e-2] {
            q = S::fma(q, xx, S::splat(c));
        }
        let e = S::mul(S::div(S::mul(x, p), q), S::splat(1.0 + 2.4e-7));
        S::min(S::splat(1.0), S::max(S::splat(-1.0), e))
    }
}

/// x / (1 + e^-u): x * sigmoid(u).
#[inline(always)]
pub(crate) unsafe fn gated<S: Simd>(x: S::F, u: S::F) -> S::F {
    // SAFETY: arithmetic only.
    unsafe { S::div(x, S::add(S::splat(1.0), exp::<S>(S::sub(S::splat(0.0), u)))) }
}

/// `Gating::apply` of every lane.
#[inline(always)]
pub(crate) unsafe fn gate_by<S: Simd>(gating: Gating, g: S::F, u: S::F) -> S::F {
    let Gating { activation, limit, alpha } = gating;
    // SAFETY: arithmetic only.
    unsafe {
        if limit == 0.0 {
            return S::mul(activate::<S>(Activation::from_u32(activation).unwrap_or(Activation::None), g), u);
        }
        // NaN stays, being the second.
        let g = S::min(S::splat(limit), g);
        let u = S::min(S::splat(limit), S::max(S::splat(-limit), u));
        S::mul(gated::<S>(g, S::mul(S::splat(alpha), g)), S::add(u, S::splat(1.0)))
    }
}

/// `Activation::apply` of every lane.
#[inline(always)]
pub(crate) unsafe fn activate<S: Simd>(activation: Activation, x: S::F) -> S::F {
    // SAFETY: arithmetic only.
    unsafe {
        match activation {
            Activation::None => x,
            Activation::Gelu => {
                let e = erf::<S>(S::mul(x, S::splat(core::f32::consts::FRAC_1_SQRT_2)));
                S::mul(S::mul(S::splat(0.5), x), S::add(S::splat(1.0), e))
            }
            Activation::Silu => gated::<S>(x, x),
            // NaN gives 0, as `f32::max` does.
            Activation::Relu => S::max(x, S::splat(0.0)),
            Activation::GeluTanh => {
                // (1 + tanh u) / 2 = sigmoid(2u).
                let cube = S::mul(S::mul(x, x), x);
                let u = S::fma(S::splat(0.044_715), cube, x);
                gated::<S>(x, S::mul(S::splat(2.0 * 0.797_884_6), u))
            }
            Activation::Capped(cap) => {
                // tanh u = 2 sigmoid(2u) - 1: absolutely, as exact as the cap.
                let u = S::mul(x, S::splat(2.0 / cap));
                S::sub(gated::<S>(S::splat(2.0 * cap), u), S::splat(cap))
            }
        }
    }
}
