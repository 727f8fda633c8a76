//! Events: monotonic counters that join tasks.
//!
//! A task *triggers* an event when it is done; the event *fires* for the `n`-th time when it has been triggered
//! `n * num_triggers` times; a task *waits on* an event until it has fired for the current run of its program. Counters
//! are never reset while workers are resident, so there is no reset to race with; comparisons are modulo 2^32.

use crate::EventId;
use bytemuck::{Pod, Zeroable};

/// One event. MPK: `EventDesc` without the task range: what is launched just in time names its events, not they it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct EventDesc {
    /// Triggers that make it fire once.
    pub num_triggers: u32,
}

/// Fires once per iteration, triggered by the program's last task after it has published the next
/// [`Step`](crate::Step).
pub const EVENT_ITERATION: EventId = EventId(0);

/// Triggered by every worker once per iteration, as soon as it has read the iteration's [`Step`](crate::Step): the last
/// task of a program waits on it, so that no step is overwritten before every worker has seen it.
pub const EVENT_ARRIVED: EventId = EventId(1);

/// The first event that is a program's own.
pub const FIRST_PROGRAM_EVENT: EventId = EventId(2);

/// Whether a counter that stands at `count` has reached `target`, modulo 2^32: right as long as the two are less than
/// 2^31 apart, which holds because no worker can be a whole iteration ahead of another.
pub const fn reached(count: u32, target: u32) -> bool {
    count.wrapping_sub(target) < 1 << 31
}

#[cfg(test)]
mod tests {
    use super::reached;

    #[test]
    fn reached_is_right_across_the_wrap() {
        assert!(reached(5, 5) && reached(6, 5) && !reached(4, 5));
        assert!(reached(3, u32::MAX - 2) && !reached(u32::MAX - 2, 3));
    }
}
