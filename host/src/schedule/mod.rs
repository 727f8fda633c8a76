//! WHERE and WHEN things run: workers, orders, times, and what is on chip meanwhile.

pub mod arena;
pub mod assign;
pub mod plain;
pub mod predict;
pub mod prefetch;
pub mod timeline;
