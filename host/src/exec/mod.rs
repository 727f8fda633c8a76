//! Running images.
//!
//! An executor sees an [`Image`](crate::image::Image), the [memory](memory::Memory) its bindings name, and nothing above
//! them.
//!
//! - [`reference`]: one thread, tasks in program order, plain-loop bodies: the definition of correct.
//! - [`cuda`]: the persistent kernel on an NVIDIA GPU.
//! - [`simt`]: the GPU's code on a simulated GPU that judges every access.
//! - [`threads`]: resident CPU workers running the device crate's worker loop: the embedded default.

pub mod cuda;
pub mod memory;
pub mod operators;
pub mod reference;
pub mod simt;
mod stopper;
pub mod threads;

pub use stopper::Stopper;

use crate::image::Image;
use perpetua_shared::control::Control;
use perpetua_shared::{Fault, FaultCode};

/// What executors of batches rely on where a control block comes from the host.
fn check_sequences(image: &Image, control: &Control) {
    let there = image.sequences();
    assert!(
        control.n_sequences as usize <= there && (control.step.sequence as usize) < there,
        "a control block for {} sequences, a step of s{}: the image has {there}",
        control.n_sequences,
        control.step.sequence
    );
}

/// A run that ended in a fault, in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunError {
    /// A token id that the model does not have.
    #[error("token id {id} at position {position} is out of range: the vocabulary has {vocab}")]
    TokenOutOfRange {
        /// The id.
        id: u32,
        /// Where it stands.
        position: u32,
        /// Ids there are.
        vocab: u32,
    },
    /// No logit was a number.
    #[error("every logit for position {position} is NaN: the weights, or what they were multiplied with, are damaged")]
    NotANumber {
        /// The position.
        position: u32,
    },
    /// An embedding has elements that are no numbers.
    #[error("the embedding is NaN: the weights, or what they were multiplied with, are damaged")]
    EmbeddingNotANumber,
    /// A wait outlasted its bound.
    #[error("{worker} stalled in {task}: {missing}{others}")]
    Stalled {
        /// Who waited.
        worker: String,
        /// In which task.
        task: String,
        /// For what: an event and its counts, or an operand that has not been written.
        missing: String,
        /// Where the other workers were, where that is known.
        others: String,
    },
    /// More simulated threads than this machine has room for.
    #[error("{0}")]
    NoStacks(String),
    /// The driver, or the device under it.
    #[error(transparent)]
    Cuda(#[from] crate::cuda::driver::CudaError),
    /// The same in a run of which it is [recorded](cuda::Options::recorder) where workers were.
    #[error("{error}{others}")]
    Lost {
        /// What the driver says.
        error: crate::cuda::driver::CudaError,
        /// Where they were.
        others: String,
    },
    /// A defect of this library.
    #[error("{task} on {worker} failed: {what}")]
    Defect {
        /// The task.
        task: String,
        /// The worker.
        worker: String,
        /// What happened.
        what: String,
    },
}

impl RunError {
    fn of(fault: &Fault, image: &crate::image::Image) -> RunError {
        let task = image.task_name(fault.task);
        let worker = format!("w{}", fault.worker);
        match FaultCode::from_u32(fault.code) {
            Some(FaultCode::TokenOutOfRange) => {
                RunError::TokenOutOfRange { id: fault.found, position: fault.detail, vocab: fault.expected }
            }
            Some(FaultCode::NotANumber) => RunError::NotANumber { position: fault.detail },
            Some(FaultCode::Timeout) => {
                let missing = format!("event e{} stands at {}, expected {}", fault.detail, fault.found, fault.expected);
                RunError::Stalled { worker, task, missing, others: String::new() }
            }
            Some(FaultCode::NotWritten) => {
                let operand = image.operand_name(fault.task, fault.detail);
                let missing = format!("operand `{operand}` has elements without flag {}, this pass's", fault.expected);
                RunError::Stalled { worker, task, missing, others: String::new() }
            }
            code => RunError::Defect { task, worker, what: format!("{code:?}") },
        }
    }
}
