//! What the simulator refuses to do, and where.

use std::fmt;
use std::panic::Location;

/// What a GPU would do in silence, or not at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// Threads that must meet are at different places, or one of them has left.
    Divergence,
    /// An address that is not a multiple of the access's size.
    Misaligned,
    /// Memory that was not given to the launch.
    OutOfBounds,
    /// A write to memory that is only to be read, or a plain access to a word of atomics.
    Forbidden,
    /// A read of what nobody has written.
    Poison,
    /// Two accesses, one of them a write, that nothing orders.
    Race,
    /// A bulk copy reads through another proxy than the one that wrote, and no fence stands between.
    Proxy,
    /// An mbarrier is used before it is ready, or a wait by parity means a phase that is long over.
    Mbarrier,
    /// Bytes that an mbarrier's phase expects and that copies bring differ.
    Transactions,
    /// Nobody can go on.
    Deadlock,
    /// A panic: on the GPU, a trap.
    Panic,
    /// Nothing the program did: this machine has no room for so many threads' stacks.
    NoStacks,
}

/// An error of the simulated program.
#[derive(Clone, Debug)]
pub struct SimtError {
    /// Its kind.
    pub wrong: Wrong,
    /// What happened, in words.
    pub what: String,
    /// The block it happened in.
    pub block: u32,
    /// The thread of the block.
    pub thread: u32,
    /// The task the block runs, when it runs tasks.
    pub task: Option<u32>,
    /// The line that asked, as far up as callers are tracked.
    pub at: Option<&'static Location<'static>>,
}

impl fmt::Display for SimtError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.wrong == Wrong::NoStacks {
            return f.write_str(&self.what);
        }
        write!(
            f,
            "{:?}: {} (block {}, warp {}, lane {}",
            self.wrong,
            self.what,
            self.block,
            self.thread / 32,
            self.thread % 32
        )?;
        if let Some(task) = self.task {
            write!(f, ", t{task}")?;
        }
        if let Some(at) = self.at {
            write!(f, ", {}:{}", at.file(), at.line())?;
        }
        f.write_str(")")
    }
}

impl std::error::Error for SimtError {}
