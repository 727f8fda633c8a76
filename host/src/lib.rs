//! perpetua compiles a tensor program into one persistent kernel of tasks and events, and runs it.
//!
//! A model becomes a kernel graph, each operator is cut into a thread-block graph, blocks become tasks joined by
//! events, tasks get workers, times and addresses, all of it is written as one image, and an executor runs the image.

// Where it is allowed, each block carries its proof.
#![deny(unsafe_code)]

pub mod codegen;
pub mod compile;
#[allow(unsafe_code, reason = "the driver's functions")]
pub mod cuda;
pub mod device_image;
pub mod engine;
#[allow(unsafe_code, reason = "memory that tasks share in the order of their events")]
pub mod exec;
pub mod graph;
pub mod image;
pub mod machine;
pub mod memory;
pub mod model;
mod parallel;
mod random;
pub mod schedule;

/// README.md, ARCHITECTURE.md and docs/kernels.md: their examples are compiled as tests.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../../README.md")]
    mod readme {}
    #[doc = include_str!("../../ARCHITECTURE.md")]
    mod architecture {}
    #[doc = include_str!("../../docs/kernels.md")]
    mod kernels {}
}

/// Macro kernels and what they are called with: activations, costs, the worker loop.
pub use perpetua_device as device;
/// PTX run instruction by instruction, without a GPU.
pub use perpetua_ptx as ptx;
/// What host and device agree on: element types, ids, the control block, the image's descriptors.
pub use perpetua_shared as shared;

pub use engine::{
    BatchGeneration, Device, Embedder, Engine, EngineConfig, EngineError, GenerateOptions, Generation, Model, Stopper,
    Token,
};
pub use graph::kernel::PromptPrecision;
pub use model::chat::ChatMessage;
pub use model::{ModelError, Quantize};
pub use perpetua_shared::control::End;
