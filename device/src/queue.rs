//! The queue of tasks that are launched just in time: schedulers append, workers that wait take.
//!
//! One queue for all workers, in words that stand after the event counters: where the next task is taken (`HEAD`),
//! where the next is put (`TAIL`), both counting on for ever, then a power of two of slots.
//!
//! ```text
//! push    ticket = TAIL++ ── publish slot[ticket] = tag(ticket, pass) | task
//! take    HEAD != TAIL and slot[HEAD] has the tag of HEAD and my pass? ── claim: HEAD == h -> h + 1 ── acquire slot[h]
//! ```
//! # Why one, and why a task is claimed
//! A queue for each worker makes the scheduler guess who will be idle when the task is ready; a worker in a long task
//! then keeps it waiting while others have nothing to do. Nor does a worker draw a ticket before there is a task: the
//! one with the next ticket may be busy when the task comes. Here whoever waits for anything takes what there is, so a
//! task that is ready stands in the queue only while every worker runs another.
//!
//! # Why nothing is lost, taken twice or overwritten
//! - Tickets are drawn by addition, so a slot has one writer a lap; a claim succeeds for one worker a ticket.
//! - A slot's tag is its lap, so what is left of the lap before is not taken for a task: a ticket that is drawn and not
//!   yet published looks like the end of the queue. The scheduler publishes it with its next instruction.
//! - A worker that has not yet seen its pass end may find tasks of the next. It has that pass's step, not the new one,
//!   so the tag has a bit of the pass, too, and it leaves them: nobody can be two passes behind.
//! - A slot has been read before it is written again: there are at least as many as a program has such tasks, all of
//!   them end before their iteration does (a rule of the image), and a scheduler launches those of the next one later.
//! - What the scheduler acquired from the events (all that the task waits for) it releases with the slot, and the
//!   worker acquires it from there.

use perpetua_shared::limits::MAX_TASKS;
use perpetua_shared::{Step, TaskId};

/// Words that workers and schedulers share: the event counters, by event, then those of the queue.
pub trait Words {
    /// How many events there are: the queue's first word.
    fn n_events(&self) -> u32;

    /// How many slots there are, a power of two; not asked when no program has just-in-time tasks.
    fn n_slots(&self) -> u32;

    /// Reads word `at`, ordering nothing.
    fn load(&self, at: u32) -> u32;

    /// Reads word `at`; what was written before the release it sees is visible afterwards.
    fn acquire(&self, at: u32) -> u32;

    /// Writes word `at`, releasing all this thread wrote or has acquired.
    fn publish(&self, at: u32, value: u32);

    /// Adds one to word `at`, ordering nothing; returns what it was.
    fn draw(&self, at: u32) -> u32;

    /// Sets word `at` to `new` if it is `old`, ordering nothing; whether it was.
    fn claim(&self, at: u32, old: u32, new: u32) -> bool;
}

const HEAD: u32 = 0;
const TAIL: u32 = 1;
const SLOTS: u32 = 2;

/// A task's number and the lap share a word.
const TASK_BITS: u32 = MAX_TASKS.trailing_zeros();
const _: () = assert!(MAX_TASKS.is_power_of_two() && TASK_BITS <= 24);

/// Words of a queue for programs with at most `n_tasks` just-in-time tasks; none when that is 0.
pub const fn words(n_tasks: u32) -> u32 {
    match slots(n_tasks) {
        0 => 0,
        slots => SLOTS + slots,
    }
}

/// Slots of a queue for programs with at most `n_tasks` just-in-time tasks.
pub const fn slots(n_tasks: u32) -> u32 {
    match n_tasks {
        0 => 0,
        n => n.next_power_of_two(),
    }
}

/// What a slot says in the lap of `ticket` and the pass `step`, but for the task; never 0, what slots hold at first, in
/// the first lap.
fn tag(ticket: u32, n_slots: u32, step: &Step) -> u32 {
    let lap = (ticket >> n_slots.trailing_zeros()).wrapping_add(1);
    (lap << 1 | step.iteration & 1) << TASK_BITS
}

fn slot<W: Words>(words: &W, ticket: u32) -> u32 {
    words.n_events() + SLOTS + (ticket & (words.n_slots() - 1))
}

/// Appends `task` of the pass `step`, whose events have fired, as this thread has acquired.
pub fn push<W: Words>(words: &W, step: &Step, task: TaskId) {
    let ticket = words.draw(words.n_events() + TAIL);
    words.publish(slot(words, ticket), tag(ticket, words.n_slots(), step) | task.0);
}

/// Takes the task that has been there longest, if there is one, and it is of the pass `step`.
pub fn take<W: Words>(words: &W, step: &Step) -> Option<TaskId> {
    let first = words.n_events();
    loop {
        let (head, tail) = (words.load(first + HEAD), words.load(first + TAIL));
        if head == tail {
            return None;
        }
        let at = slot(words, head);
        let found = words.load(at);
        if found >> TASK_BITS << TASK_BITS != tag(head, words.n_slots(), step) {
            return None;
        }
        if words.claim(first + HEAD, head, head.wrapping_add(1)) {
            words.acquire(at);
            return Some(TaskId(found & ((1 << TASK_BITS) - 1)));
        }
    }
}
