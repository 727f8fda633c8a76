//! Flags: two bits of a float that say which pass wrote it, so that whoever reads it sees that it is there.
//!
//! An event is a counter: it is triggered when all of a task's writes have reached memory, and whoever waits for it
//! reads them when it has seen the count, two trips through memory more than the data's own. A *flagged* element
//! carries its own event, as data and flag of NCCL's LL protocol do: its reader asks for the data itself, again and
//! again until the flag is the pass's.
//!
//! The flag takes the two lowest bits of an f32, 2^-22 of its value, so a row is no longer than without. It is one more
//! than the runs of the program before the pass, modulo 4. An element is written once in each run of its program and
//! nobody else writes its bytes ([`BindingKind::Flagged`](crate::image::BindingKind::Flagged)), so what a reader may
//! find is the flag of its own pass, of the one before, or, before the first, zeros, which are no flag of the first
//! pass.
//!
//! What is written so orders nothing but itself: see `image::check` for what must be ordered by events all the same.

/// The bits of an element that are its flag.
pub const MASK: u32 = 3;

/// The flag of what a pass writes whose program has run `program_runs` times before.
#[inline]
pub const fn of_run(program_runs: u32) -> u32 {
    program_runs.wrapping_add(1) & MASK
}

/// `value`, but for its lowest bits, with flag `flag`.
#[inline]
pub const fn mark(value: f32, flag: u32) -> u32 {
    value.to_bits() & !MASK | flag
}

/// What was marked.
#[inline]
pub const fn unmark(word: u32) -> f32 {
    f32::from_bits(word & !MASK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_survives_its_flag_but_for_two_bits() {
        for value in [0.0, -0.0, 1.0, -2.7, 1e-38, 3e38, f32::INFINITY, f32::NEG_INFINITY] {
            for flag in 0..=MASK {
                let word = mark(value, flag);
                assert_eq!(word & MASK, flag);
                assert!(unmark(word) == value || (unmark(word) / value - 1.0).abs() < 4e-7, "{value} with {flag}");
                assert_eq!(unmark(word).is_finite(), value.is_finite());
            }
        }
        assert!((0..=MASK).all(|flag| unmark(mark(f32::NAN, flag)).is_nan()));
    }

    #[test]
    fn no_pass_takes_what_the_one_before_left_for_its_own() {
        assert_ne!(of_run(0), 0, "zeroed memory");
        for run in [0, 1, 2, 3, 4, u32::MAX - 1, u32::MAX] {
            assert_ne!(of_run(run), of_run(run.wrapping_add(1)));
        }
    }
}
