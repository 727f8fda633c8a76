//! Tests that need no GPU.
#[path = "cpu/ptx.rs"]
mod ptx;
