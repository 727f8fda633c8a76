//! Faults: how a worker says that it cannot go on. The device cannot unwind, so a fault is a record and a flag.

use bytemuck::{Pod, Zeroable};

/// What went wrong.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultCode {
    /// Nothing.
    None = 0,
    /// A wait outlasted its bound. `detail`: the event; `found`: its count; `expected`: its target.
    Timeout = 1,
    /// A token id outside the vocabulary. `found`: the id; `expected`: the vocabulary's size.
    TokenOutOfRange = 2,
    /// The image names a macro kernel this build has no body for. `detail`: its number.
    NoSuchKernel = 3,
    /// Every logit was NaN, so there was nothing to choose. `detail`: the row.
    NotANumber = 4,
    /// Another worker faulted first.
    Aborted = 5,
    /// A worker thread panicked: a defect of this program.
    Panic = 6,
    /// A [flagged](crate::flag) element was not written in time. `detail`: the task's operand; `found`: in which bits a
    /// flag there differs; `expected`: the pass's flag.
    NotWritten = 7,
}

impl FaultCode {
    /// The code numbered `number`.
    pub fn from_u32(number: u32) -> Option<FaultCode> {
        use FaultCode::*;
        [None, Timeout, TokenOutOfRange, NoSuchKernel, NotANumber, Aborted, Panic, NotWritten]
            .into_iter()
            .find(|code| *code as u32 == number)
    }
}

impl core::fmt::Display for FaultCode {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            FaultCode::None => "nothing",
            FaultCode::Timeout => "it waited in vain",
            FaultCode::TokenOutOfRange => "a token id outside the vocabulary",
            FaultCode::NoSuchKernel => "this build has no body for its macro kernel",
            FaultCode::NotANumber => "every logit is NaN",
            FaultCode::Aborted => "another worker faulted",
            FaultCode::Panic => "it panicked",
            FaultCode::NotWritten => "an element was not written in time",
        })
    }
}

/// A fault record; the first one written wins.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Fault {
    /// A [`FaultCode`].
    pub code: u32,
    /// The task that faulted, or `u32::MAX` outside any task.
    pub task: u32,
    /// The worker that ran it.
    pub worker: u32,
    /// See [`FaultCode`].
    pub detail: u32,
    /// See [`FaultCode`].
    pub found: u32,
    /// See [`FaultCode`].
    pub expected: u32,
}

impl Fault {
    /// That there has been one, which has been recorded.
    pub const RECORDED: Fault = Fault::new(FaultCode::Aborted, 0, 0, 0);

    /// A fault of `code`, not yet placed at a task and a worker.
    pub const fn new(code: FaultCode, detail: u32, found: u32, expected: u32) -> Fault {
        Fault { code: code as u32, task: u32::MAX, worker: u32::MAX, detail, found, expected }
    }
}
