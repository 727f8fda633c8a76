//! Which PTX a driver takes.

use std::fmt;

/// A version of the PTX ISA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PtxIsa {
    /// Of 8.6, the 8.
    pub major: u32,
    /// The 6.
    pub minor: u32,
}

impl fmt::Display for PtxIsa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Versions of CUDA, as drivers say them, and of the PTX ISA that came with each: the release history in NVIDIA's PTX
/// ISA reference. CUDA 12.6 brought none.
const RELEASES: [(u32, u32, u32); 11] = [
    (12000, 8, 0),
    (12010, 8, 1),
    (12020, 8, 2),
    (12030, 8, 3),
    (12040, 8, 4),
    (12050, 8, 5),
    (12070, 8, 6),
    (12080, 8, 7),
    (12090, 8, 8),
    (13000, 9, 0),
    (13010, 9, 1),
];

impl PtxIsa {
    /// What PTX says of itself: its `.version`.
    pub fn of_text(ptx: &str) -> Option<PtxIsa> {
        let (major, minor) =
            ptx.lines().find_map(|line| line.trim().strip_prefix(".version "))?.trim().split_once('.')?;
        Some(PtxIsa { major: major.parse().ok()?, minor: minor.parse().ok()? })
    }

    /// The newest that a driver takes which implements CUDA `version`: 1000 times its major and 10 times its minor
    /// number, as cuDriverGetVersion says it. With CUDA newer than any known here, it is at least that. `None` before
    /// CUDA 12.0.
    pub fn of_driver(version: u32) -> Option<PtxIsa> {
        let (_, major, minor) = *RELEASES.iter().rfind(|(cuda, ..)| *cuda <= version)?;
        Some(PtxIsa { major, minor })
    }

    /// Whether a driver of CUDA `version` may take newer PTX than [`PtxIsa::of_driver`] knows of.
    pub fn is_at_least(version: u32) -> bool {
        RELEASES.last().is_some_and(|(cuda, ..)| *cuda < version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drivers_take_what_came_with_their_cuda() {
        let of = |version| PtxIsa::of_driver(version).map(|isa| isa.to_string());
        assert_eq!(of(11080), None);
        let known = [(12000, "8.0"), (12050, "8.5"), (12060, "8.5"), (12070, "8.6"), (12080, "8.7"), (13000, "9.0")];
        for (version, isa) in known {
            assert_eq!((of(version).as_deref(), PtxIsa::is_at_least(version)), (Some(isa), false), "{version}");
        }
        assert_eq!((of(14000).as_deref(), PtxIsa::is_at_least(14000)), (Some("9.1"), true));
        assert!(
            PtxIsa::of_driver(12070) < PtxIsa::of_driver(12080) && PtxIsa::of_driver(12090) < PtxIsa::of_driver(13000)
        );
        assert!(RELEASES.is_sorted());
    }

    #[test]
    fn ptx_says_its_version() {
        let isa = PtxIsa::of_text("//\n// Generated\n\n.version 8.6\n.target sm_90a\n");
        assert_eq!(isa, Some(PtxIsa { major: 8, minor: 6 }));
        assert_eq!(PtxIsa::of_text(".target sm_90a\n"), None);
        if let Some(image) = crate::device_image::device_image() {
            assert!(PtxIsa::of_text(image.worker.ptx()) <= PtxIsa::of_driver(12080), "what the documentation promises");
        }
    }
}
