//! A set of ranks, as bits with summaries: whatever its size, a change or a look at the least touches a word per level,
//! and a million ranks have four levels.

/// Ranks below a fixed number.
#[derive(Debug, Clone)]
pub(super) struct RankSet {
    /// Bit `i` of level 0 says whether rank `i` is in the set; of each level above, whether word `i` below is not zero.
    /// The last level is one word.
    levels: Vec<Vec<u64>>,
}

impl RankSet {
    /// An empty set of ranks below `n`.
    pub(super) fn new(n: usize) -> Self {
        let mut levels = vec![vec![0; n.div_ceil(64)]];
        while let Some(below) = levels.last().filter(|level| level.len() > 1) {
            levels.push(vec![0; below.len().div_ceil(64)]);
        }
        Self { levels }
    }

    pub(super) fn insert(&mut self, rank: u32) {
        let mut idx = rank as usize;
        for level in &mut self.levels {
            level[idx / 64] |= 1 << (idx % 64);
            idx /= 64;
        }
    }

    /// Whether it was there.
    pub(super) fn remove(&mut self, rank: u32) -> bool {
        let mut idx = rank as usize;
        if self.levels[0][idx / 64] & 1 << (idx % 64) == 0 {
            return false;
        }
        for level in &mut self.levels {
            level[idx / 64] &= !(1 << (idx % 64));
            if level[idx / 64] != 0 {
                break;
            }
            idx /= 64;
        }
        true
    }

    pub(super) fn first(&self) -> Option<u32> {
        self.from(0)
    }

    /// In ascending order.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> {
        std::iter::successors(self.first(), |&rank| self.from(rank + 1))
    }

    /// The least that is no less than `rank`.
    fn from(&self, rank: u32) -> Option<u32> {
        // Up to the first level whose word has something further on, then down along its lowest bits.
        let mut idx = rank as usize;
        for (height, level) in self.levels.iter().enumerate() {
            let rest = level.get(idx / 64)? & (u64::MAX << (idx % 64));
            if rest != 0 {
                let found = idx / 64 * 64 + rest.trailing_zeros() as usize;
                let down = |found: usize, level: &Vec<u64>| found * 64 + level[found].trailing_zeros() as usize;
                return Some(self.levels[..height].iter().rev().fold(found, down) as u32);
            }
            idx = idx / 64 + 1;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn it_is_a_set_in_order_at_every_height() {
        let mut state = 1u64;
        let mut random = move |below: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        for n in [0, 1, 63, 64, 65, 4096, 4097, 300_000] {
            let (mut ranks, mut set) = (RankSet::new(n), BTreeSet::new());
            for _ in 0..if n == 0 { 0 } else { 2000 } {
                let rank = random(n as u64) as u32;
                if random(3) == 0 {
                    assert_eq!(ranks.remove(rank), set.remove(&rank));
                } else {
                    ranks.insert(rank);
                    set.insert(rank);
                }
                assert_eq!(ranks.first(), set.first().copied());
            }
            assert!(ranks.iter().eq(set.iter().copied()), "{n}");
            for rank in set {
                assert!(ranks.remove(rank) && !ranks.remove(rank));
            }
            assert_eq!(ranks.first(), None);
        }
    }
}
