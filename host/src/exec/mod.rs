//! Running images.
//!
//! An [`Executor`] sees an [`Image`](crate::image::Image), the [memory](memory::Memory) its bindings name, and nothing
//! above them.
//!
//! - [`reference`]: one thread, tasks in program order, plain-loop bodies: the definition of correct.
//! - [`cuda`]: the persistent kernel on an NVIDIA GPU.
//! - [`simt`]: the GPU's code on a simulated GPU that judges every access.
//! - [`threads`]: resident CPU workers running the device crate's worker loop: the embedded default.

mod at_once;
pub mod cuda;
pub mod memory;
pub mod operators;
pub mod reference;
mod sections;
pub mod simt;
mod stopper;
pub mod threads;

pub use stopper::Stopper;

use crate::image::Image;
use memory::MemoryError;
use perpetua_shared::control::{ALL_ROWS, Control, NO_PROGRAM};
use perpetua_shared::limits::MAX_PROGRAMS;
use perpetua_shared::task::Operand;
use perpetua_shared::{Fault, FaultCode, ProgramId};
use std::fmt::Debug;
use std::time::{Duration, Instant};

/// What runs an image. One run is under way at a time: whatever starts another, writes memory or reads outputs waits
/// for its end.
pub trait Executor: Debug + Send {
    /// Starts a run of the token loop from `control`, whose `step` says where. What earlier runs have counted
    /// (`program_runs`, the iteration) is kept where workers wait for numbers that only grow: those fields of `control`
    /// are overwritten. The iteration in which `stopper`, of this run alone, is told is the last, or on a GPU the one
    /// soon after. An error waits in [`Executor::finish`].
    ///
    /// # Panics
    /// Where `control` asks for what the image does not have: a program, rows, sequences. Positions are the caller's to
    /// keep below the context.
    fn start_with(&mut self, control: Control, stopper: &Stopper);

    /// As [`Executor::start_with`], of a run that nobody stops.
    fn start(&mut self, control: Control) {
        self.start_with(control, &Stopper::default());
    }

    /// Waits for the run to end and says how: the control block as it was left; zeros before there has been one.
    ///
    /// # Errors
    /// Of the last run, however often it is asked for: its first fault, what the simulated GPU objects to, or a device
    /// that is lost.
    fn finish(&mut self) -> Result<Control, RunError>;

    /// Tokens made so far in this run, by all sequences together. Those counted can be read.
    fn produced(&self) -> u32;

    /// Those of them for sequence `sequence` of a batch.
    fn produced_of(&self, sequence: usize) -> u32;

    /// The token at `position` of the token buffer: one of a prompt's, or one that [`Executor::produced`] has counted.
    fn token(&self, position: usize) -> u32;

    /// Writes `tokens` at `position` of the token buffer.
    fn set_tokens(&mut self, position: usize, tokens: &[u32]);

    /// Writes the input called `name`.
    ///
    /// # Errors
    /// When there is no such input, or it has another size.
    fn set_input(&mut self, name: &str, contents: &[u8]) -> Result<(), MemoryError>;

    /// Reads rows `..rows` of an f32 output, or its first `rows` elements when it has rank 1, to the end of `out`.
    ///
    /// # Errors
    /// A device that is lost.
    fn append_f32(&mut self, output: &Operand, rows: usize, out: &mut Vec<f32>) -> Result<(), RunError>;

    /// When the last run started, and when each of its iterations ended.
    fn stamps(&self) -> Vec<Instant>;

    /// Bytes allocated beside the weights: cache, intermediates, tables.
    fn owned_bytes(&self) -> u64;

    /// Whether a run is under way. Not where one is over when it has been started.
    fn is_running(&mut self) -> bool {
        false
    }

    /// Waits a moment for something to happen in the run under way.
    fn rest(&self) {}

    /// Tokens in the cache, as far as the run under way has told.
    fn position(&self) -> u32 {
        0
    }

    /// Time all workers together have waited for events since the executor was made, where that is measured.
    fn waited(&self) -> Duration {
        Duration::ZERO
    }

    /// What an event costs: from a worker's trigger until another, which has been waiting for it, goes on. `None` where
    /// that is not measured, or where there is one worker, which waits for none.
    fn event_cost(&mut self) -> Option<Duration> {
        None
    }

    /// The executor, where it is a GPU: for traces and drills.
    fn cuda(&mut self) -> Option<&mut cuda::Cuda> {
        None
    }
}

/// Has `control` count on from an earlier run, which left these: events' counters do.
fn count_on(control: &mut Control, program_runs: [u32; MAX_PROGRAMS], iteration: u32) {
    control.program_runs = program_runs;
    control.step.iteration = iteration;
    if control.step.program != NO_PROGRAM {
        control.step.program_runs = program_runs[control.step.program as usize];
    }
}

/// What executors rely on where a control block comes from the host.
fn check_control(image: &Image, control: &Control) {
    let (there, step) = (image.sequences(), &control.step);
    assert!(
        control.n_sequences as usize <= there && (step.sequence as usize) < there,
        "a control block for {} sequences, a step of s{}: the image has {there}",
        control.n_sequences,
        step.sequence
    );
    if step.program != NO_PROGRAM
        && let Err(error) = check_pass(image, ProgramId(step.program), step.rows)
    {
        panic!("{error}");
    }
}

/// Whether `image` has such a program, and it so many rows.
///
/// # Errors
/// What is asked for, and what there is.
pub(crate) fn check_pass(image: &Image, program: ProgramId, rows: u32) -> Result<(), RunError> {
    let programs = image.view().programs;
    let (given, expected) = match programs.get(program.idx()) {
        None => (format!("program {}", program.0), format!("one of {}, counted from 0", programs.len())),
        Some(known) if rows > known.max_rows && rows != ALL_ROWS => {
            (format!("{rows} rows of program {}", program.0), format!("{} at most", known.max_rows))
        }
        Some(_) => return Ok(()),
    };
    Err(RunError::Pass { given, expected })
}

/// A run that ended in a fault, in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
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
    /// A pass that the image does not have.
    #[error("{given}: expected {expected}")]
    Pass {
        /// What was asked for.
        given: String,
        /// What there is.
        expected: String,
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
            Some(code) => RunError::Defect { task, worker, what: code.to_string() },
            None => RunError::Defect { task, worker, what: format!("a fault of no known kind: {fault:?}") },
        }
    }
}
