//! Compiles a tensor program into one persistent kernel of tasks and events, and runs it.
pub mod memory;
pub mod schedule;
