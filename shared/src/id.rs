//! Indices into an image's tables, one newtype each so that they cannot be mixed. They print as the text form writes
//! them: `t12`, `e3`, `w0`, `p1`, `b4`.

use bytemuck::{Pod, Zeroable};
use core::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $letter:literal) => {
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
        pub struct $name(pub u32);

        impl $name {
            /// The index as a `usize`.
            pub const fn idx(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($letter, "{}"), self.0)
            }
        }
    };
}

id!(
    /// A task: one thread block's worth of work, run by one worker.
    TaskId, "t");
id!(
    /// An event: a counter that tasks wait on and trigger.
    EventId, "e");
id!(
    /// A worker: a resident thread block (GPU) or a pinned thread (CPU).
    WorkerId, "w");
id!(
    /// A program: the task graph of one pass (a prefill chunk size, or decode).
    ProgramId, "p");
id!(
    /// A binding: a block of memory the executor supplies (arena, one weight tensor, the KV cache, ...).
    BindingId, "b");
