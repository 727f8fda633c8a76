//! Where bytes live: buffers with lifetimes get offsets in one arena.
//!
//! The problem is dynamic storage allocation. In go [`Buffer`]s, each alive over a half-open interval of some discrete
//! clock and of a fixed size; out comes a [`Placement`], one offset per buffer. Drawn with time to the right and
//! addresses upwards, every buffer is a rectangle that may slide up and down but not sideways:
//!
//! ```text
//!   bytes
//!     ^   +-----+  +---------+
//!     |   |  b  |  |    c    |      a and c are alive together, so they share no byte;
//!     |   +-----+--+--+------+      b and c never are, so they may.
//!     |   |     a     |  +---+
//!     |   |           |  | d |
//!     +---+-----------+--+---+--> time
//! ```
//!
//! Laws, judged by [`check`], which shares no code with what it judges:
//! 1. two buffers alive at the same instant share no byte;
//! 2. every offset is a multiple of its buffer's alignment;
//! 3. no buffer reaches past the capacity, and `peak_bytes` is the highest byte any buffer reaches.
//!
//! The parts, from fast to thorough: [`linear_scan`] (an allocator driven by time, and a packing heuristic made of it),
//! [`first_fit`] (buffers in a chosen order, each as low as it goes), `search` (exact), and [`pack`], which puts them
//! together. [`csv`] reads and writes the files of the minimalloc benchmarks.
//!
//! This module knows no models and no graphs: only intervals and sizes.

pub mod check;
pub mod csv;
pub mod first_fit;
pub mod linear_scan;
pub mod pack;
mod search;
mod timeline;
mod types;

pub use timeline::lower_bound;
pub use types::{Buffer, Placement, Problem, ProblemError};
