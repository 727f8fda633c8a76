//! The judge: does a placement keep the laws of [`memory`](super)?
//!
//! It shares nothing with the solvers but the types. [`check`] sweeps time once with the buffers alive kept in address
//! order, O(n log n); [`check_pairs`] looks at every pair and is what `check` itself is judged by.

use std::collections::BTreeMap;
use std::fmt;

use super::types::{Buffer, Placement};

/// One broken law. Buffers are named by their position.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Violation {
    /// The placement has another number of offsets than there are buffers.
    Count {
        /// Offsets given.
        n_offsets: usize,
        /// Buffers to place.
        n_buffers: usize,
    },
    /// An offset that is no multiple of the alignment.
    Misaligned {
        /// Which buffer.
        buffer: usize,
        /// Where it was put.
        offset: u64,
        /// What it asked for.
        alignment: u64,
    },
    /// A buffer that ends past the capacity.
    OverCapacity {
        /// Which buffer.
        buffer: usize,
        /// Where it was put.
        offset: u64,
        /// Its bytes.
        size_bytes: u64,
        /// What it had to fit into.
        capacity_bytes: u64,
    },
    /// Two buffers alive together that share bytes.
    Overlap {
        /// The one of the lower position.
        first: usize,
        /// The other.
        second: usize,
    },
    /// `peak_bytes` is not the highest byte reached.
    Peak {
        /// As claimed.
        claimed: u64,
        /// As found.
        found: u64,
    },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Count { n_offsets, n_buffers } => write!(f, "{n_offsets} offsets for {n_buffers} buffers"),
            Self::Misaligned { buffer, offset, alignment } => {
                write!(f, "buffer {buffer}: offset {offset} is no multiple of its alignment {alignment}")
            }
            Self::OverCapacity { buffer, offset, size_bytes, capacity_bytes } => {
                write!(f, "buffer {buffer}: {size_bytes} bytes at {offset} end past the capacity {capacity_bytes}")
            }
            Self::Overlap { first, second } => write!(f, "buffers {first} and {second} are alive together and overlap"),
            Self::Peak { claimed, found } => write!(f, "peak is {found} bytes, {claimed} claimed"),
        }
    }
}

/// All violations that a sweep over time meets. Of several buffers that overlap at one place at least one pair is
/// named.
pub fn check(buffers: &[Buffer], capacity_bytes: u64, placement: &Placement) -> Result<(), Vec<Violation>> {
    let mut violations = each_alone(buffers, capacity_bytes, placement);
    if placement.offsets.len() == buffers.len() {
        // Deaths sort before births at one instant, because lifetimes are half-open.
        let mut events: Vec<(u64, bool, usize)> = Vec::with_capacity(2 * buffers.len());
        for (buffer, b) in buffers.iter().enumerate().filter(|(_, b)| b.size_bytes > 0 && b.lower < b.upper) {
            events.push((b.lower, true, buffer));
            events.push((b.upper, false, buffer));
        }
        events.sort_unstable();
        let mut alive: BTreeMap<(u64, usize), u64> = BTreeMap::new();
        for (_, born, buffer) in events {
            let first = placement.offsets[buffer];
            if !born {
                alive.remove(&(first, buffer));
                continue;
            }
            let end = first.saturating_add(buffers[buffer].size_bytes);
            let below = alive.range(..(first, buffer)).next_back().filter(|&(_, &below_end)| below_end > first);
            let above = alive.range((first, buffer)..).next().filter(|&(&(above_first, _), _)| above_first < end);
            for (&(_, other), _) in below.into_iter().chain(above) {
                violations.push(Violation::Overlap { first: buffer.min(other), second: buffer.max(other) });
            }
            alive.insert((first, buffer), end);
        }
    }
    if violations.is_empty() { Ok(()) } else { Err(violations) }
}

/// The same verdict by looking at every pair: O(n^2), for tests.
pub fn check_pairs(buffers: &[Buffer], capacity_bytes: u64, placement: &Placement) -> Result<(), Vec<Violation>> {
    let mut violations = each_alone(buffers, capacity_bytes, placement);
    if placement.offsets.len() == buffers.len() {
        let end = |i: usize| placement.offsets[i].saturating_add(buffers[i].size_bytes);
        for second in 0..buffers.len() {
            for first in 0..second {
                let (a, b) = (&buffers[first], &buffers[second]);
                let together = a.lower.max(b.lower) < a.upper.min(b.upper);
                let bottom = placement.offsets[first].max(placement.offsets[second]);
                if together && bottom < end(first).min(end(second)) {
                    violations.push(Violation::Overlap { first, second });
                }
            }
        }
    }
    if violations.is_empty() { Ok(()) } else { Err(violations) }
}

/// The laws that concern no pair.
fn each_alone(buffers: &[Buffer], capacity_bytes: u64, placement: &Placement) -> Vec<Violation> {
    let mut violations = Vec::new();
    if placement.offsets.len() != buffers.len() {
        violations.push(Violation::Count { n_offsets: placement.offsets.len(), n_buffers: buffers.len() });
        return violations;
    }
    let mut found = 0;
    for (buffer, (b, &offset)) in buffers.iter().zip(&placement.offsets).enumerate() {
        if b.alignment == 0 || offset % b.alignment != 0 {
            violations.push(Violation::Misaligned { buffer, offset, alignment: b.alignment });
        }
        let end = offset.checked_add(b.size_bytes);
        if end.is_none_or(|end| end > capacity_bytes) {
            let size_bytes = b.size_bytes;
            violations.push(Violation::OverCapacity { buffer, offset, size_bytes, capacity_bytes });
        }
        found = found.max(end.unwrap_or(u64::MAX));
    }
    if found != placement.peak_bytes {
        violations.push(Violation::Peak { claimed: placement.peak_bytes, found });
    }
    violations
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two(lower: u64, offset: u64) -> Result<(), Vec<Violation>> {
        let buffers = [Buffer::new(0, 4, 8), Buffer::new(lower, 9, 8).aligned(4)];
        let placement = Placement { offsets: vec![0, offset], peak_bytes: (offset + 8).max(8) };
        let verdict = check(&buffers, 16, &placement);
        assert_eq!(verdict.is_ok(), check_pairs(&buffers, 16, &placement).is_ok());
        verdict
    }

    #[test]
    fn half_open_lifetimes_may_touch() {
        assert_eq!(two(4, 0), Ok(()));
        assert_eq!(two(3, 0), Err(vec![Violation::Overlap { first: 0, second: 1 }]));
        assert_eq!(two(3, 8), Ok(()));
    }

    #[test]
    fn every_law_is_named() {
        assert_eq!(two(4, 6), Err(vec![Violation::Misaligned { buffer: 1, offset: 6, alignment: 4 }]));
        let over = Violation::OverCapacity { buffer: 1, offset: 12, size_bytes: 8, capacity_bytes: 16 };
        assert_eq!(two(4, 12), Err(vec![over]));
        let buffers = [Buffer::new(0, 1, 8)];
        let peak = check(&buffers, 16, &Placement { offsets: vec![0], peak_bytes: 9 });
        assert_eq!(peak, Err(vec![Violation::Peak { claimed: 9, found: 8 }]));
        let count = check(&buffers, 16, &Placement { offsets: vec![], peak_bytes: 0 });
        assert_eq!(count, Err(vec![Violation::Count { n_offsets: 0, n_buffers: 1 }]));
        let wild = check(&buffers, 16, &Placement { offsets: vec![u64::MAX], peak_bytes: u64::MAX });
        assert!(wild.is_err());
    }
}
