//! A thread block at work on a task: who is who, its barrier, and the reductions over all its threads.

use crate::arch::{WARP, butterfly, shared, thread, warp};

/// The block the calling thread belongs to.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// The calling thread's index.
    pub thread: u32,
    /// How many threads there are: a multiple of 32, at most 1024.
    pub threads: u32,
}

// Words of shared memory: the reductions' partial results come first, two words a warp; bodies use those from here on.
pub(crate) const FREE_SHARED: u32 = 64;

impl Block {
    /// The block of the calling thread, all of whose threads run tasks.
    #[cfg(test)]
    pub(crate) fn current() -> Block {
        Block { thread: thread::thread_idx(), threads: thread::block_dim() }
    }

    /// The calling thread in the block of those that run tasks; a service warp's is numbered beyond them.
    pub(crate) fn here() -> Block {
        Block { thread: thread::thread_idx(), threads: thread::task_threads() }
    }

    /// The calling thread's lane in its warp.
    pub(crate) fn lane(&self) -> u32 {
        self.thread % WARP
    }

    /// The calling thread's warp.
    pub(crate) fn warp(&self) -> u32 {
        self.thread / WARP
    }

    /// How many warps there are.
    pub(crate) fn warps(&self) -> u32 {
        self.threads / WARP
    }

    /// The indices below `n` that are this thread's: neighbours go to neighbouring lanes.
    pub(crate) fn mine(&self, n: u32) -> Mine {
        Mine { at: self.thread, n, step: self.threads }
    }

    /// The block's barrier.
    ///
    /// # Safety
    /// Every thread of the block makes this same call.
    #[track_caller]
    pub(crate) unsafe fn sync(&self) {
        // SAFETY: the caller's promise.
        unsafe { thread::sync() }
    }

    /// The sum over all threads, the same bits in each: lanes by butterfly, then warps in order.
    ///
    /// # Safety
    /// As [`Block::sync`].
    #[track_caller]
    pub(crate) unsafe fn sum(&self, value: f32) -> f32 {
        // SAFETY: every thread is here (caller). Each warp's word is written by its lane 0 alone, read after the first
        // barrier, and not written again before the second.
        unsafe {
            let partial = warp::sum(value);
            if self.lane() == 0 {
                shared::store(self.warp(), partial.to_bits());
            }
            self.sync();
            let mut total = 0.0;
            for at in 0..self.warps() {
                total += f32::from_bits(shared::load(at));
            }
            self.sync();
            total
        }
    }

    /// [`Block::sum`] in f64.
    ///
    /// # Safety
    /// As [`Block::sync`].
    #[track_caller]
    pub(crate) unsafe fn sum64(&self, mut value: f64) -> f64 {
        // SAFETY: as in `sum`, with two words a warp.
        unsafe {
            butterfly!(mask => {
                let bits = value.to_bits();
                let low = warp::shuffle_xor(bits as u32, mask);
                let high = warp::shuffle_xor((bits >> 32) as u32, mask);
                value += f64::from_bits(u64::from(low) | u64::from(high) << 32);
            });
            if self.lane() == 0 {
                shared::store(2 * self.warp(), value.to_bits() as u32);
                shared::store(2 * self.warp() + 1, (value.to_bits() >> 32) as u32);
            }
            self.sync();
            let mut total = 0.0;
            for at in 0..self.warps() {
                let (low, high) = (shared::load(2 * at), shared::load(2 * at + 1));
                total += f64::from_bits(u64::from(low) | u64::from(high) << 32);
            }
            self.sync();
            total
        }
    }

    /// The sum of whole numbers over all threads.
    ///
    /// # Safety
    /// As [`Block::sync`].
    #[track_caller]
    pub(crate) unsafe fn sum_u32(&self, mut value: u32) -> u32 {
        // SAFETY: as in `sum`.
        unsafe {
            butterfly!(mask => {
                value += warp::shuffle_xor(value, mask);
            });
            if self.lane() == 0 {
                shared::store(self.warp(), value);
            }
            self.sync();
            let mut total = 0;
            for at in 0..self.warps() {
                total += shared::load(at);
            }
            self.sync();
            total
        }
    }

    /// The best of all threads' candidates, the same in each.
    ///
    /// # Safety
    /// As [`Block::sync`].
    #[track_caller]
    pub(crate) unsafe fn best(&self, mut mine: Candidate) -> Candidate {
        // SAFETY: as in `sum64`.
        unsafe {
            butterfly!(mask => {
                mine = mine.better(Candidate {
                    value: f32::from_bits(warp::shuffle_xor(mine.value.to_bits(), mask)),
                    index: warp::shuffle_xor(mine.index, mask),
                });
            });
            if self.lane() == 0 {
                shared::store(2 * self.warp(), mine.value.to_bits());
                shared::store(2 * self.warp() + 1, mine.index);
            }
            self.sync();
            let mut best = Candidate::NONE;
            for at in 0..self.warps() {
                best = best
                    .better(Candidate { value: f32::from_bits(shared::load(2 * at)), index: shared::load(2 * at + 1) });
            }
            self.sync();
            best
        }
    }
}

/// See [`Block::mine`]. `step_by` would divide first.
#[derive(Clone, Debug)]
pub(crate) struct Mine {
    at: u32,
    n: u32,
    step: u32,
}

impl Iterator for Mine {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        let at = self.at;
        if at >= self.n {
            return None;
        }
        // What is counted is far fewer than 2^32.
        self.at = at.wrapping_add(self.step);
        Some(at)
    }
}

/// A value and where it stands, as a search for the largest compares them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Candidate {
    pub(crate) value: f32,
    pub(crate) index: u32,
}

impl Candidate {
    /// What every candidate is better than.
    pub(crate) const NONE: Candidate = Candidate { value: f32::NEG_INFINITY, index: u32::MAX };

    /// The larger of two, ties to the lower index; NaN never wins.
    pub(crate) fn better(self, other: Candidate) -> Candidate {
        if other.value > self.value || (other.value == self.value && other.index < self.index) { other } else { self }
    }
}
