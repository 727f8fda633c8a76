//! What the CPU bodies share: scratch memory, and (in its own files) the vector code.

pub mod math;

/// A worker's scratch memory: reused from task to task, so that bodies allocate nothing once warm.
#[derive(Debug, Default)]
pub struct Scratch {
    /// Converted activations.
    pub half: Vec<u16>,
    /// Partial sums, scores.
    pub floats: Vec<f32>,
    /// Candidates of the sampler.
    pub candidates: Vec<(f32, u32)>,
}
