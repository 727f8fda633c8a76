//! [`Sync`] over words of global memory.
//!
//! Hand-over between two workers: the producer's threads write, meet at their barrier, and one of them adds to the
//! counter with release; one thread of the consumer sees the count and reads it once more with acquire, then its block
//! meets at the barrier. Release and acquire order the two threads, the barriers carry that order to their blocks, so
//! plain loads after the wait see plain stores from before the trigger.

use crate::arch::{atomic, memory, thread};
use crate::sync::Sync;
use perpetua_shared::event::reached;
use perpetua_shared::{EventId, Fault, FaultCode, Step};

/// A worker's view of the words it shares with the others.
#[derive(Clone, Copy, Debug)]
pub struct Gpu {
    /// Event counters.
    pub(crate) counters: *mut u32,
    /// The step in the control block.
    pub(crate) step: *const Step,
    /// The fault record; its first word is also the flag that sends everyone home.
    pub(crate) fault: *mut Fault,
    /// The longest a wait may take.
    pub(crate) timeout_ns: u64,
}

// How long a poller sleeps, and after how many polls it looks at the clock and at the fault flag: often enough to leave
// within a few microseconds, rarely enough to keep the extra load off the path of a wait that succeeds.
const SLEEP_NS: u32 = 20;
const POLLS_PER_LOOK: u32 = 64;

impl Gpu {
    /// That of a block without others, which has a fault record and nothing to wait for.
    #[cfg(test)]
    pub(crate) fn alone(fault: *mut Fault) -> Gpu {
        Gpu { counters: core::ptr::null_mut(), step: core::ptr::null(), fault, timeout_ns: u64::MAX }
    }

    /// Polls by the calling thread alone.
    fn poll(&self, event: EventId, target: u32) -> Result<(), Fault> {
        // SAFETY: events of a checked image have a counter each.
        let counter = unsafe { self.counters.add(event.idx()) };
        let mut started = 0;
        let mut polls = 0u32;
        loop {
            // SAFETY: a word of global memory; pairs with `add_release` in `trigger`, through the acquire.
            let count = unsafe { atomic::load_relaxed(counter) };
            if reached(count, target) {
                // SAFETY: as above.
                unsafe { atomic::load_acquire(counter) };
                return Ok(());
            }
            if polls.is_multiple_of(POLLS_PER_LOOK) {
                let now = thread::timer_ns();
                if polls == 0 {
                    started = now;
                } else if now.wrapping_sub(started) > self.timeout_ns {
                    return Err(Fault::new(FaultCode::Timeout, event.0, count, target));
                }
                if self.has_fault() {
                    return Err(Fault::new(FaultCode::Aborted, event.0, count, target));
                }
            }
            polls = polls.wrapping_add(1);
            thread::sleep_ns(SLEEP_NS);
        }
    }

    /// Records, unless another fault is recorded already, that a wait inside the block outlasted its bound.
    #[inline(always)]
    pub(crate) fn give_up(&self) {
        // SAFETY: the record's first word is its code.
        unsafe { atomic::compare_exchange(self.fault.cast(), 0, FaultCode::Timeout as u32) };
    }

    /// Whether one has been recorded.
    #[inline(always)]
    pub(crate) fn has_fault(&self) -> bool {
        // SAFETY: the record's first word is its code.
        unsafe { atomic::load_relaxed(self.fault.cast()) != 0 }
    }

    /// Records `fault`, unless another is recorded already, and tells every worker to leave.
    #[inline(always)]
    pub(crate) fn report(&self, fault: &Fault) {
        // SAFETY: the record lies in global memory; only the thread whose exchange finds 0 writes the rest of it, and
        // only the host reads that, after the launch.
        unsafe {
            if atomic::compare_exchange(self.fault.cast(), 0, fault.code) == 0 {
                memory::store_volatile(&raw mut (*self.fault).task, fault.task);
                memory::store_volatile(&raw mut (*self.fault).worker, fault.worker);
                memory::store_volatile(&raw mut (*self.fault).detail, fault.detail);
                memory::store_volatile(&raw mut (*self.fault).found, fault.found);
                memory::store_volatile(&raw mut (*self.fault).expected, fault.expected);
            }
        }
    }
}

impl Sync for Gpu {
    fn wait(&self, event: EventId, target: u32) -> Result<(), Fault> {
        let mut outcome = Ok(());
        if thread::thread_idx() == 0 {
            outcome = self.poll(event, target);
        }
        // SAFETY: the worker loop is the same on every thread of the block.
        if unsafe { thread::sync_or(outcome.is_err()) } {
            // Thread 0 knows what happened; the others only that they must leave.
            outcome = outcome.and(Err(Fault::new(FaultCode::Aborted, event.0, 0, target)));
        }
        outcome
    }

    fn trigger(&self, event: EventId) {
        // SAFETY: the worker loop is the same on every thread of the block; events of a checked image have a counter each.
        unsafe {
            thread::sync();
            if thread::thread_idx() == 0 {
                atomic::add_release(self.counters.add(event.idx()), 1);
            }
        }
    }

    fn step(&self) -> Step {
        // Word by word: a volatile copy of the whole would go through local memory.
        // SAFETY: nobody writes the step now (the trait's contract), and the wait before this call has made it visible.
        unsafe {
            Step {
                program: memory::load_volatile(&raw const (*self.step).program),
                program_runs: memory::load_volatile(&raw const (*self.step).program_runs),
                first_pos: memory::load_volatile(&raw const (*self.step).first_pos),
                rows: memory::load_volatile(&raw const (*self.step).rows),
                sampling: memory::load_volatile(&raw const (*self.step).sampling),
                iteration: memory::load_volatile(&raw const (*self.step).iteration),
                // Batches are not the GPU's yet.
                sequence: 0,
            }
        }
    }
}
