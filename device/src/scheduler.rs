//! The scheduler: launches just-in-time tasks when the last of their events fires.
//!
//! A program's just-in-time tasks are dealt out to its schedulers in program order; each scheduler looks at the next
//! few of its own that are not launched, and puts those whose events have all fired into the [queue]. On a GPU every
//! block has a scheduler, a lane beside the loader that does nothing else. CPU threads have one for all, which whoever
//! looks for a task plays, so the worker that has triggered the last event launches what it made ready before it goes
//! on.
//!
//! # Why everything is launched
//! Tasks wait only for tasks before them in program order (law 1). The first unfinished task of a program has nothing
//! left to wait for; if it is just-in-time and not launched, all before it in its scheduler's share are, so the
//! scheduler looks at it. The image's check runs this rule at its strictest: one scheduler that looks at one task at a
//! time.

use crate::queue::{self, Words};
use crate::worker::{Image, target};
use perpetua_shared::event::reached;
use perpetua_shared::{EventId, Step, TaskId};

/// What a scheduler has left to do in a pass.
#[derive(Clone, Copy, Debug)]
pub struct Scheduler {
    /// The first task of the share that is not launched, as an index into the program's just-in-time tasks.
    next: u32,
    stride: u32,
    /// How many tasks it looks at: at most 32.
    window: u32,
    /// Bit `i`: task `next + i * stride` is launched.
    launched: u32,
}

/// A task that is not launched, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pending {
    /// The task.
    pub task: TaskId,
    /// An event it waits on.
    pub event: EventId,
    /// Triggers that event had.
    pub count: u32,
    /// Triggers at which it fires.
    pub target: u32,
}

impl Scheduler {
    /// Scheduler `number` of `n` at the start of a pass; it looks at `window` tasks at a time, 1 to 32.
    pub const fn new(number: u32, n: u32, window: u32) -> Scheduler {
        assert!(window > 0 && window <= 32);
        Scheduler { next: number, stride: n, window, launched: 0 }
    }

    /// Launches what is ready of the tasks it looks at. Returns whether all of its share is launched, and the first
    /// that is not when it found none to launch.
    pub fn round<I: Image, W: Words>(&mut self, image: &I, step: &Step, words: &W) -> (bool, Option<Pending>) {
        let tasks = image.just_in_time(step.program as usize);
        let mut first = None;
        let mut has_launched = false;
        for i in 0..self.window {
            let Some(&id) = tasks.get((self.next + i * self.stride) as usize) else { break };
            if self.launched >> i & 1 != 0 {
                continue;
            }
            match pending(image, TaskId(id), step, words) {
                None => {
                    queue::push(words, step, TaskId(id));
                    self.launched |= 1 << i;
                    has_launched = true;
                }
                Some(pending) => first = first.or(Some(pending)),
            }
        }
        let done = self.launched.trailing_ones();
        self.launched = self.launched.checked_shr(done).unwrap_or(0);
        self.next += done * self.stride;
        (self.next as usize >= tasks.len(), if has_launched { None } else { first })
    }
}

/// An event that `id` still waits on.
fn pending<I: Image, W: Words>(image: &I, id: TaskId, step: &Step, words: &W) -> Option<Pending> {
    for &event in image.waits(image.task(id.0)) {
        let target = target(image, event, step, 0);
        let count = words.load(event);
        if !reached(count, target) {
            return Some(Pending { task: id, event: EventId(event), count, target });
        }
        // Partner: the release of a trigger, for those who get the task.
        words.acquire(event);
    }
    None
}
