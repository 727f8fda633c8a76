//! What host and device agree on, byte for byte.
#![no_std]
#![forbid(unsafe_code)]

pub mod dtype;
pub use dtype::DType;
