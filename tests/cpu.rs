//! Everything that needs no GPU.

#[path = "cpu/dependency.rs"]
mod dependency;
