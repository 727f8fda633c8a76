//! The control block: what the token loop inside the kernel and the host tell each other.
//!
//! Between two iterations exactly one task (macro kernel `advance`) writes it; during an iteration everyone may read
//! it. The host writes it only while no iteration runs, with one exception: the word [`STOP`], which it may set at any
//! time.

use crate::limits::{MAX_SEQUENCES, MAX_STOP_TOKENS};
use bytemuck::{Pod, Zeroable};

/// What one iteration computes. Workers read it at the iteration's start.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Step {
    /// The program to run, or [`NO_PROGRAM`]: leave the loop.
    pub program: u32,
    /// How often this program ran before: event `e` must reach `(program_runs + 1) * num_triggers`.
    pub program_runs: u32,
    /// Position of the first row of this pass in the sequence: tokens already in the KV cache. In a pass over all
    /// sequences of a batch, each of which has its own, that of the one furthest on.
    pub first_pos: u32,
    /// Rows (tokens) of this pass; a program's tensors may have more, those rows are not computed.
    pub rows: u32,
    /// 1 when the pass ends with the last known token, so that the head and the sampler run; else 0.
    pub sampling: u32,
    /// Iterations since the workers started, this one not counted: the seed of this step's sampling is made of it.
    pub iteration: u32,
    /// The sequence whose cache and tokens the pass works on. A pass over every sequence of a batch has 0 here, and in
    /// each task of one sequence sees that sequence's step (`advance::step_of` in the device crate).
    pub sequence: u32,
}

/// One sequence of a batch. `repr(C)`, words only.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Sequence {
    /// Tokens known: its prompt's and those made.
    pub n_tokens: u32,
    /// Tokens whose keys and values are in its cache.
    pub position: u32,
    /// Tokens made so far; the host may read it (written with release order).
    pub produced: u32,
    /// An [`End`].
    pub end: u32,
}

/// What is asked of a sequence. `repr(C)`, words only.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Request {
    /// Tokens to make at most in this run; 0: read the prompt and end.
    pub max_new_tokens: u32,
    /// f32 bits; 0 means greedy.
    pub temperature: u32,
    /// f32 bits in (0, 1]; 1 keeps everything.
    pub top_p: u32,
    /// 0 keeps everything.
    pub top_k: u32,
    /// Seed of the draws, low and high word.
    pub seed: [u32; 2],
    /// f32 bits, above 0: what makes tokens that the text has already less likely, or, below 1, more; 1 changes
    /// nothing.
    pub repetition_penalty: u32,
    /// Which of [`Control::stop_tokens`] end it: bit `i` stands for number `i`.
    pub stops: u32,
}

impl Request {
    /// The likeliest tokens, at most so many, whatever they are.
    pub const fn greedy(max_new_tokens: u32) -> Request {
        Request {
            max_new_tokens,
            temperature: 0,
            top_p: 1.0f32.to_bits(),
            top_k: 0,
            seed: [0; 2],
            repetition_penalty: 1.0f32.to_bits(),
            stops: 0,
        }
    }
}

const _: () = assert!(MAX_STOP_TOKENS <= u32::BITS as usize, "every stop token has a bit");

/// [`Step::program`] of a step that ends the loop.
pub const NO_PROGRAM: u32 = u32::MAX;

/// [`Step::rows`] of a program without a token dimension: every row of every tensor is computed.
pub const ALL_ROWS: u32 = u32::MAX;

/// Why the token loop ended, as [`Control::end`] says it.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum End {
    /// Still running.
    Running = 0,
    /// The number of tokens asked for has been made.
    MaxTokens = 1,
    /// A stop token was made (it is the last of the tokens).
    StopToken = 2,
    /// The next token would not fit the context.
    ContextFull = 3,
    /// The host asked to stop.
    Stopped = 4,
    /// The tokens given have been read and none was to be made.
    PromptDone = 5,
    /// The host asked to stop because the time it had given was over. Workers do not know why: theirs is
    /// [`End::Stopped`].
    Deadline = 6,
    /// A fault ended the run, which its owner has been told. Workers record faults elsewhere.
    Failed = 7,
    /// The host found a stop string in the text. Workers do not know texts: theirs is [`End::Stopped`], or what else
    /// ended it just then.
    StopString = 8,
}

impl End {
    /// The reason numbered `number`.
    pub fn from_u32(number: u32) -> Option<End> {
        use End::*;
        [Running, MaxTokens, StopToken, ContextFull, Stopped, PromptDone, Deadline, Failed, StopString]
            .into_iter()
            .find(|end| *end as u32 == number)
    }
}

/// The control block. `repr(C)`, words only.
///
/// With [`Control::n_sequences`] 0 it is about one sequence. Else it is about a batch: [`Control::sequences`] says how
/// far each one is, `n_tokens` does not count, `produced` is the sum over all, and `end` is that of the one that ended
/// last.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Control {
    /// Set to non-zero by the host to end the loop after the iteration that runs.
    pub stop: u32,
    /// Tokens made so far by this run of the loop; the host may poll it (written with release order).
    pub produced: u32,
    /// An [`End`].
    pub end: u32,
    /// Tokens known: the prompt's and those made. `tokens[..n_tokens]` of the token buffer is valid.
    pub n_tokens: u32,
    /// Positions of the KV cache.
    pub max_context: u32,
    /// Token ids that end a sequence whose [`Request::stops`] say so.
    pub stop_tokens: [u32; MAX_STOP_TOKENS],
    /// Tokens that a pass may guess and verify at most; 0: none are guessed.
    pub max_drafts: u32,
    /// How many of them the next pass that does may have.
    pub n_drafts: u32,
    /// The program of the last pass that has ended.
    pub last_program: u32,
    /// How often each program has run since the counters were zeroed.
    pub program_runs: [u32; crate::limits::MAX_PROGRAMS],
    /// How many of [`Control::sequences`] count; 0: no batch.
    pub n_sequences: u32,
    /// The sequences of a batch.
    pub sequences: [Sequence; MAX_SEQUENCES],
    /// What is asked of each; of one sequence alone, the first.
    pub requests: [Request; MAX_SEQUENCES],
    /// The iteration that runs, or the next one.
    pub step: Step,
}

/// Byte offset of [`Control::stop`]: the one word the host may write while workers run.
pub const STOP: usize = core::mem::offset_of!(Control, stop);
/// Byte offset of [`Control::produced`]: with those of sequences, and where a pass is, what the host may read while
/// workers run.
pub const PRODUCED: usize = core::mem::offset_of!(Control, produced);
