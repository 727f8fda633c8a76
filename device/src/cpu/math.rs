//! Functions std does not have.

/// The error function to within 1.5e-7 * 2^-1 of f32 rounding: Abramowitz and Stegun 7.1.26 is too coarse near zero for
/// f32, so the Maclaurin series serves |x| < 1 (20 terms leave less than 1e-19) and W. J. Cody's continued fraction
/// form of erfc, evaluated in f64, the rest.
pub fn erf(x: f32) -> f32 {
    let x = f64::from(x);
    let a = x.abs();
    if a < 2.0 {
        // sum (-1)^n x^(2n+1) / (n! (2n+1)) * 2/sqrt(pi)
        let (mut term, mut sum) = (x, x);
        for n in 1..40 {
            let n = f64::from(n);
            term *= -x * x / n;
            sum += term / (2.0 * n + 1.0);
        }
        return (sum * std::f64::consts::FRAC_2_SQRT_PI) as f32;
    }
    if a > 6.0 {
        return 1f32.copysign(x as f32);
    }
    // erfc(a) = exp(-a^2)/sqrt(pi) * 1/(a + (1/2)/(a + 1/(a + (3/2)/(a + ...)))), from the tail upwards.
    let mut fraction = a;
    for n in (1..60).rev() {
        fraction = a + f64::from(n) / 2.0 / fraction;
    }
    let erfc = (-a * a).exp() / (fraction * std::f64::consts::PI.sqrt());
    ((1.0 - erfc).copysign(x)) as f32
}

#[cfg(test)]
mod tests {
    use super::erf;

    #[test]
    fn erf_matches_tabulated_values() {
        for (x, expected) in [
            (0.0, 0.0),
            (1e-3, 0.001_128_379_2),
            (0.5, 0.520_499_9),
            (1.0, 0.842_700_8),
            (1.9, 0.992_790_4),
            (2.1, 0.997_020_5),
            (3.0, 0.999_977_9),
            (7.0, 1.0),
        ] {
            assert!((erf(x) - expected).abs() < 2e-7, "erf({x}) = {}, expected {expected}", erf(x));
            assert!((erf(-x) + expected).abs() < 2e-7);
        }
    }
}
