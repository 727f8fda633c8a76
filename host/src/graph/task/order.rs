//! What is known to run before an operator, as sets of operators.

/// A set of operators. It may forget some: what is not in it is merely not known to run before.
pub(crate) trait OpSet {
    /// Adds operator `op`.
    fn insert(&mut self, op: u32);
    /// Adds all of `other`.
    fn union(&mut self, other: &Self);
}

/// A set of operators, as sorted half-open ranges. When there are more than [`Ranges::MAX`] the oldest are forgotten:
/// an ordering not known to be implied is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ranges {
    ranges: Vec<(u32, u32)>,
}

impl Ranges {
    const MAX: usize = 32;

    pub(super) fn contains(&self, op: u32) -> bool {
        let at = self.ranges.partition_point(|r| r.1 <= op);
        self.ranges.get(at).is_some_and(|r| r.0 <= op)
    }
}

impl OpSet for Ranges {
    fn insert(&mut self, op: u32) {
        if !self.contains(op) {
            self.union(&Ranges { ranges: vec![(op, op + 1)] });
        }
    }

    fn union(&mut self, other: &Ranges) {
        if other.ranges.is_empty() || other.ranges == self.ranges {
            return;
        }
        let (a, b) = (std::mem::take(&mut self.ranges), &other.ranges);
        let (mut i, mut j) = (0, 0);
        while i < a.len() || j < b.len() {
            let next = if j == b.len() || i < a.len() && a[i].0 <= b[j].0 {
                i += 1;
                a[i - 1]
            } else {
                j += 1;
                b[j - 1]
            };
            match self.ranges.last_mut() {
                Some(last) if next.0 <= last.1 => last.1 = last.1.max(next.1),
                _ => self.ranges.push(next),
            }
        }
        if self.ranges.len() > Ranges::MAX {
            self.ranges.drain(..self.ranges.len() - Ranges::MAX);
        }
    }
}

/// What is known about one operator `C`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Before<S> {
    /// Operators all of whose tasks run before every task of `C`.
    pub(crate) all: S,
    /// Operators each task of which runs before some task of `C`.
    pub(crate) each: S,
}

/// What a direct relation `B` to `C` says at the level of operators.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reach {
    /// Every task of `C` comes after every task of `B`.
    pub(crate) full: bool,
    /// Every task of `C` comes after some task of `B`.
    pub(crate) covers_consumers: bool,
    /// Every task of `B` comes before some task of `C`.
    pub(crate) covers_producers: bool,
}

impl Reach {
    /// Every task of `B` before every task of `C`.
    pub(super) const ALL: Reach = Reach { full: true, covers_consumers: true, covers_producers: true };
}

impl<S: OpSet> Before<S> {
    /// Learns that `C` comes after `producer` as `reach` says, `known` being what is known about the producer.
    pub(crate) fn learn(&mut self, producer: u32, known: &Before<S>, reach: Reach) {
        if reach.full {
            // a before some b, and every b before every c.
            self.all.union(&known.each);
            self.all.insert(producer);
        }
        if reach.covers_consumers {
            // Every a before every b, and some b before every c.
            self.all.union(&known.all);
        }
        if reach.covers_producers {
            // Every a before some b, and every b before some c.
            self.each.union(&known.each);
            self.each.insert(producer);
        }
        // Every a before every b, and some b before some c.
        self.each.union(&known.all);
        self.each.union(&self.all);
    }
}

#[cfg(test)]
mod tests {
    use super::{OpSet, Ranges};

    #[test]
    fn a_set_of_operators_is_a_union_of_ranges() {
        let mut set = Ranges::default();
        for op in [5, 1, 2, 9, 4, 3] {
            set.insert(op);
        }
        assert_eq!(set.ranges, [(1, 6), (9, 10)]);
        assert!(set.contains(4) && !set.contains(6) && set.contains(9) && !set.contains(0));
    }

    #[test]
    fn the_oldest_ranges_are_forgotten_first() {
        let mut set = Ranges::default();
        for op in 0..100 {
            set.insert(2 * op);
        }
        assert!(set.contains(198) && !set.contains(0) && set.ranges.len() == Ranges::MAX);
    }
}
