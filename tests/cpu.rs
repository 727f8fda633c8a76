//! Everything that is tested without a GPU, a module per subject.

#[path = "cpu/bad_input.rs"]
mod bad_input;
#[path = "cpu/batch.rs"]
mod batch;
#[path = "cpu/bodies.rs"]
mod bodies;
#[path = "cpu/codegen.rs"]
mod codegen;
#[path = "cpu/cuda.rs"]
mod cuda;
#[path = "cpu/dependency.rs"]
mod dependency;
#[path = "cpu/docs.rs"]
mod docs;
#[path = "cpu/executors.rs"]
mod executors;
#[path = "cpu/flags.rs"]
mod flags;
#[path = "cpu/held.rs"]
mod held;
#[path = "cpu/interpreted.rs"]
mod interpreted;
#[path = "cpu/joining.rs"]
mod joining;
#[path = "cpu/lookup.rs"]
mod lookup;
#[path = "cpu/memory.rs"]
mod memory;
#[path = "cpu/models.rs"]
mod models;
#[path = "cpu/program.rs"]
mod program;
#[path = "cpu/protocol.rs"]
mod protocol;
#[path = "cpu/ptx.rs"]
mod ptx;
#[path = "cpu/reuse.rs"]
mod reuse;
#[path = "cpu/schedule.rs"]
mod schedule;
#[path = "cpu/simt.rs"]
mod simt;
#[path = "cpu/sinks.rs"]
mod sinks;
