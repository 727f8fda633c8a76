//! Division by what is known long before: a multiplication. A GPU has no other for whole numbers than some twenty
//! instructions, one after the other.

/// What a number is divided by, as the word that it is multiplied with: 2^32 over it, rounded up; 0 stands for 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Divisor(pub u32);

impl Divisor {
    /// To divide by `n`, which is not 0.
    #[inline]
    pub const fn of(n: u32) -> Divisor {
        Divisor(if n > 1 { u32::MAX / n + 1 } else { 0 })
    }

    /// `x / n`, rounded down; exactly, as long as x * (n - 1) is below 2^32.
    #[inline]
    pub const fn divide(self, x: u32) -> u32 {
        if self.0 == 0 { x } else { ((x as u64 * self.0 as u64) >> 32) as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotients_are_exact_as_far_as_promised() {
        for n in (1..70).chain([96, 128, 255, 256, 1000, 4096, 65_535]) {
            let most = if n > 1 { u32::MAX / (n - 1) } else { u32::MAX };
            let near = |at: u32| (at.saturating_sub(2)..=at.saturating_add(2)).filter(move |x| *x <= most);
            for x in (0..300).chain(near(most)).chain(near(most / n * n)).chain(near(most / 2 / n * n)) {
                assert_eq!(Divisor::of(n).divide(x), x / n, "{x} / {n}");
            }
        }
    }
}
