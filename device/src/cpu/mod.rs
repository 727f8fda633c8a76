//! What the CPU bodies share: scratch memory, and (in its own files) the vector code.
//!
//! - [`simd`]: the instruction sets, found once at run time, behind one trait.
//! - [`rows`]: runs of elements of any float dtype, as the bodies read and write them.
//! - [`gemm`]: dot products of weight rows with activation rows, from one row (decode) to hundreds (prefill).
//! - [`outer`]: products as sums of outer products, faster where no single row has to be; [`amx`]: on a matrix unit.
//! - [`rowwise`]: norms, element-wise functions, rotary embedding.
//! - [`recurrent`]: what goes through a sequence's rows one by one, from state to state.
//! - [`math`]: functions std does not have.
//! - [`ahead`]: weights asked for before their task may run.
//! - [`bandwidth`]: a plain read of memory, to measure the rest against.

pub mod ahead;
pub mod bandwidth;
pub mod math;
pub mod simd;

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
pub(crate) mod gemm;
pub(crate) mod outer;
pub(crate) mod recurrent;
pub(crate) mod rows;
pub(crate) mod rowwise;

use crate::kernels::routing::Route;

/// A worker's scratch memory: reused from task to task, so that bodies allocate nothing once warm.
#[derive(Debug, Default)]
pub struct Scratch {
    /// The instruction set its bodies use; by default the best there is.
    pub isa: simd::Isa,
    /// Packed activations, partial sums, scores: see [`Scratch::areas`].
    pub floats: Vec<f32>,
    /// Candidates of the sampler.
    pub candidates: Vec<(f32, u32)>,
    /// A bit for each token, which the sampler sets of those that the text has.
    pub(crate) seen: Vec<u32>,
    /// Rows that go to experts, and what these read and write of them, one after the other.
    pub(crate) routes: Vec<Route>,
    /// See above.
    pub(crate) gathered: Vec<f32>,
}

/// f32 elements of a cache line.
const LINE: usize = 16;

impl Scratch {
    /// Scratch of a worker that uses `isa`.
    pub fn with_isa(isa: simd::Isa) -> Scratch {
        Scratch { isa, ..Scratch::default() }
    }

    /// Disjoint areas of at least `lens` f32 each, every one starting on a cache line. What they hold is left over
    /// from earlier tasks. They are valid until the next call.
    pub(crate) fn areas<const N: usize>(&mut self, lens: [usize; N]) -> [*mut f32; N] {
        let total: usize = lens.iter().map(|len| len.next_multiple_of(LINE)).sum::<usize>() + LINE;
        if self.floats.len() < total {
            self.floats.resize(total, 0.0);
        }
        let base = self.floats.as_mut_ptr();
        let mut at = base.align_offset(4 * LINE);
        lens.map(|len| {
            // SAFETY: the areas' rounded lengths and the first one's alignment add up to `total` at most.
            let area = unsafe { base.add(at) };
            at += len.next_multiple_of(LINE);
            area
        })
    }
}

#[cfg(test)]
pub(crate) mod tests;
