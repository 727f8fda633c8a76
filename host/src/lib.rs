//! perpetua.
pub mod graph;
