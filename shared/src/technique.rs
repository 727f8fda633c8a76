//! What makes the GPU's kernel fast, and what it can do without: to find which of them a chip does not take, and what
//! each brings.

use bytemuck::{Pod, Zeroable};

/// Something that other code does in its place, more slowly, when a launch [leaves it
/// out](crate::launch::LaunchParams::without).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Technique {
    /// Loaders bring weights into shared memory; without, bodies read them from global memory.
    Tiles,
    /// Loaders bring the first tiles of the next token while this one ends.
    TilesAhead,
    /// Loaders ask the L2 cache for what bodies are about to read from global memory.
    L2Prefetch,
    /// Rows of one pass carry [flags](crate::flag); without, events order them. A matter of the image, not of the
    /// launch.
    Flags,
    /// Bodies that can begin before their events have fired do.
    EarlyStart,
    /// Products of one row, and the norms and merges before them, go through tensor cores; without, through FMAs.
    ThinProducts,
    /// Rows too long for shared memory stay in registers.
    LongRows,
    /// In decoding, tensor cores attend for all the queries that share a head; without, a warp takes one after the
    /// other.
    GroupAttention,
    /// Products of several rows go to warpgroups (`wgmma`); without, to warps (`mma`).
    Warpgroups,
    /// Attention of several rows goes through tensor cores; without, a warp takes one query after the other.
    FlashAttention,
}

impl Technique {
    /// All there are.
    pub const ALL: [Technique; 10] = [
        Technique::Tiles,
        Technique::TilesAhead,
        Technique::L2Prefetch,
        Technique::Flags,
        Technique::EarlyStart,
        Technique::ThinProducts,
        Technique::LongRows,
        Technique::GroupAttention,
        Technique::Warpgroups,
        Technique::FlashAttention,
    ];

    /// What it is called where users name it.
    pub const fn name(self) -> &'static str {
        match self {
            Technique::Tiles => "tiles",
            Technique::TilesAhead => "tiles-ahead",
            Technique::L2Prefetch => "l2-prefetch",
            Technique::Flags => "flags",
            Technique::EarlyStart => "early-start",
            Technique::ThinProducts => "thin-products",
            Technique::LongRows => "long-rows",
            Technique::GroupAttention => "group-attention",
            Technique::Warpgroups => "warpgroups",
            Technique::FlashAttention => "flash-attention",
        }
    }

    /// Whether tokens' numbers are the same to the last bit without it.
    pub const fn keeps_bits(self) -> bool {
        matches!(self, Technique::TilesAhead | Technique::L2Prefetch | Technique::EarlyStart)
    }
}

/// A set of [`Technique`]s: bit `t` is the one numbered `t`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct Techniques(u32);

impl Techniques {
    /// None of them.
    pub const NONE: Techniques = Techniques(0);

    /// These and `technique`.
    #[must_use]
    pub const fn with(self, technique: Technique) -> Techniques {
        Techniques(self.0 | 1 << technique as u32)
    }

    /// Whether `technique` is one of them.
    #[inline]
    pub const fn has(self, technique: Technique) -> bool {
        self.0 >> technique as u32 & 1 != 0
    }

    /// Those there are.
    pub fn iter(self) -> impl Iterator<Item = Technique> {
        Technique::ALL.into_iter().filter(move |technique| self.has(*technique))
    }
}

impl From<Technique> for Techniques {
    fn from(technique: Technique) -> Techniques {
        Techniques::NONE.with(technique)
    }
}

impl FromIterator<Technique> for Techniques {
    fn from_iter<I: IntoIterator<Item = Technique>>(techniques: I) -> Techniques {
        techniques.into_iter().fold(Techniques::NONE, Techniques::with)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_what_it_was_made_of() {
        for (at, technique) in Technique::ALL.into_iter().enumerate() {
            assert_eq!(technique as usize, at, "{technique:?}");
            let only = Techniques::from(technique);
            assert!(only.iter().eq([technique]));
            assert!(!Techniques::NONE.has(technique));
        }
        let all: Techniques = Technique::ALL.into_iter().collect();
        assert!(all.iter().eq(Technique::ALL));
    }
}
