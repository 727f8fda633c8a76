//! What perpetua's host and device agree on, byte for byte.
//!
//! Everything in this crate is plain old data (`repr(C)`, no padding, no pointers) or a constant: the descriptors an
//! [`image`] is made of, the numbers of the [`event`]s and control words the worker loop relies on, and every
//! [maximum](limits). It knows neither graphs nor CUDA, allocates nothing and holds no `unsafe`.
#![no_std]
#![forbid(unsafe_code)]

pub mod body;
pub mod control;
pub mod data;
pub mod divisor;
pub mod dtype;
pub mod event;
pub mod fault;
pub mod flag;
pub mod id;
pub mod image;
pub mod launch;
pub mod limits;
pub mod probe;
pub mod task;
pub mod technique;
pub mod turn;

pub use control::Step;
pub use data::{DataOp, PrefetchOp};
pub use dtype::DType;
pub use event::EventDesc;
pub use fault::{Fault, FaultCode};
pub use id::{BindingId, EventId, ProgramId, TaskId, WorkerId};
pub use task::{Operand, TaskDesc, TaskFlags};
pub use technique::{Technique, Techniques};
pub use turn::Turn;
