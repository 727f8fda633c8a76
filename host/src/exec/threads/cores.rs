//! How many workers there are, and which cores they run on.
//!
//! How many: one for each core that the affinity mask of the calling thread allows, but no more than the CPU time that
//! the process's control groups grant it lasts for. Which: an engine takes the cores to which the fewest workers of
//! this process are pinned, so that engines side by side share none as long as there are enough.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Where an engine's workers run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Pinning {
    /// Each on a core of its own, of those that the calling thread may use one that the fewest workers of this process
    /// are pinned to. Where there are more workers than cores, or a control group grants the process less time than its
    /// cores have, the system places them: it knows what else runs there.
    #[default]
    Apart,
    /// On these cores, in order; workers beyond the last where the system puts them.
    To(Vec<usize>),
    /// Where the system puts them.
    Off,
}

/// Workers pinned to each core, of all engines of this process.
static PINNED: Mutex<BTreeMap<usize, u32>> = Mutex::new(BTreeMap::new());

/// The cores that an engine's workers are pinned to, in their order; theirs until it is dropped.
#[derive(Debug)]
pub(super) struct Claim(Vec<usize>);

impl Claim {
    /// For `n_workers` workers.
    pub(super) fn new(pinning: &Pinning, n_workers: usize) -> Claim {
        let allowed = allowed_cores();
        match pinning {
            Pinning::Apart if n_workers <= allowed.len() && usable_cores() == allowed.len() => {
                Claim::among(allowed, n_workers)
            }
            Pinning::To(cores) => Claim::among(cores[..n_workers.min(cores.len())].to_vec(), n_workers),
            Pinning::Apart | Pinning::Off => Claim(Vec::new()),
        }
    }

    /// The `n` of `cores` that the fewest workers are pinned to, the first of those that are equal; all, in their
    /// order, where there are no more.
    fn among(mut cores: Vec<usize>, n: usize) -> Claim {
        let mut pinned = PINNED.lock().unwrap_or_else(PoisonError::into_inner);
        if n < cores.len() {
            cores.sort_by_key(|core| pinned.get(core).copied().unwrap_or(0));
            cores.truncate(n);
        }
        for core in &cores {
            *pinned.entry(*core).or_default() += 1;
        }
        Claim(cores)
    }

    /// The core of worker `worker`, if it is pinned.
    pub(super) fn core(&self, worker: usize) -> Option<usize> {
        self.0.get(worker).copied()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut pinned = PINNED.lock().unwrap_or_else(PoisonError::into_inner);
        for core in &self.0 {
            match pinned.get_mut(core) {
                Some(n) if *n > 1 => *n -= 1,
                _ => drop(pinned.remove(core)),
            }
        }
    }
}

/// Asks for `core`; where the system refuses (a container's limits), the thread runs unpinned.
pub(super) fn pin(core: usize) {
    #[cfg(target_os = "linux")]
    // SAFETY: a zeroed set is a valid empty set, CPU_SET stays inside it for the cores checked here, and the call only
    // reads it.
    unsafe {
        let mut set: libc::cpu_set_t = core::mem::zeroed();
        if core < 8 * size_of::<libc::cpu_set_t>() {
            libc::CPU_SET(core, &mut set);
            libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = core;
}

/// The cores the calling thread may use.
pub fn allowed_cores() -> Vec<usize> {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: a zeroed set is valid, and the call writes at most its size.
        let (set, outcome) = unsafe {
            let mut set: libc::cpu_set_t = core::mem::zeroed();
            let outcome = libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set);
            (set, outcome)
        };
        if outcome == 0 {
            // SAFETY: every index is inside the set.
            let is_set = |core: &usize| unsafe { libc::CPU_ISSET(*core, &set) };
            return (0..8 * size_of::<libc::cpu_set_t>()).filter(is_set).collect();
        }
    }
    (0..usable_cores()).collect()
}

/// How many threads can run at once: as many as there are [`allowed_cores`], or as a control group's quota of CPU time
/// lasts for, whichever is less.
pub fn usable_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cores that no machine has, so that no other test has them either.
    const CORES: std::ops::Range<usize> = 9001..9004;

    #[test]
    fn engines_share_cores_only_when_none_is_free() {
        let take = |n| Claim::among(CORES.collect(), n);
        let two = take(2);
        assert_eq!(two.0, [9001, 9002]);
        let other = take(2);
        assert_eq!(other.0, [9003, 9001], "the free one first");
        drop(two);
        assert_eq!(take(1).0, [9002], "given back");
        assert_eq!(take(3).0, [9001, 9002, 9003], "all of them, in their order");
        // What a program asks for by number counts too.
        let asked = Claim::new(&Pinning::To(vec![9002, 9001]), 1);
        assert_eq!((asked.core(0), asked.core(1)), (Some(9002), None));
        assert_eq!(take(2).0, [9001, 9002]);
        drop((asked, other));
        let pinned = PINNED.lock().unwrap_or_else(PoisonError::into_inner);
        assert_eq!(pinned.range(CORES).count(), 0, "nothing is left behind");
    }

    /// No more workers than there are cores, quota or not; and where there are more, none is pinned.
    #[test]
    fn workers_are_pinned_where_each_has_a_core() {
        let (allowed, usable) = (allowed_cores().len(), usable_cores());
        assert!((1..=allowed).contains(&usable), "{usable} of {allowed}");
        let pinned = |n| (0..n).filter_map(|worker| Claim::new(&Pinning::Apart, n).core(worker)).count();
        assert_eq!(pinned(allowed + 1), 0);
        assert_eq!(pinned(usable), if usable == allowed { usable } else { 0 });
        assert_eq!(Claim::new(&Pinning::Off, 1).core(0), None);
    }
}
