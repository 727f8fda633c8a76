//! WHEN things run: orders, times, and what is on chip meanwhile.
pub mod plain;
