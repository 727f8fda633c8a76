//! Everything that is tested without a GPU, a module per subject.

#[path = "cpu/dependency.rs"]
mod dependency;
#[path = "cpu/memory.rs"]
mod memory;
#[path = "cpu/schedule.rs"]
mod schedule;
