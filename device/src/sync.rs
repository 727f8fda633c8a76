//! The few atomics the protocol uses, as a trait: GPU words, std atomics and a model checker's all fit, so the
//! [worker loop](crate::worker) is one source on all of them.

use crate::queue::Words;
use perpetua_shared::{EventId, Fault, Step, TaskId};

/// What a worker needs of the memory it shares with the other workers.
///
/// Ordering contract: everything written before [`trigger`](Sync::trigger) is visible after the
/// [`wait`](Sync::wait) that the trigger satisfies. [`step`](Sync::step) is called only between a wait on
/// `EVENT_ITERATION` and the trigger of `EVENT_ARRIVED`, so it races with no write.
pub trait Sync: Words {
    /// Returns `None` once `event`'s counter has [`reached`](perpetua_shared::event::reached) `target`; or, in a pass
    /// whose program has just-in-time tasks, one of these, [taken](crate::queue::take) from the queue, to be run first.
    /// `pass` is the step of such a pass.
    ///
    /// # Errors
    /// A fault when the wait outlasts its bound, or another worker has faulted; [`Fault::RECORDED`] where whoever found
    /// it has recorded it.
    fn wait(&self, event: EventId, target: u32, pass: Option<&Step>) -> Result<Option<TaskId>, Fault>;

    /// Adds one to `event`'s counter, releasing all this worker wrote.
    fn trigger(&self, event: EventId);

    /// The current step, from the control block.
    fn step(&self) -> Step;
}
