//! Weights asked for before their task may run: what a loader's copies are to a GPU's worker, prefetches are to a
//! thread.

use super::simd::prefetch;
use crate::io::Tensor;

/// Streams that a product reads its weights in.
const STREAMS: usize = 4;

/// The first weights of a task, in the order in which [`gemm`](super::gemm) reads them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ahead {
    /// Where each stream is.
    at: [usize; STREAMS],
    /// Cache lines of each stream that are left.
    lines: usize,
}

impl Ahead {
    /// Of a task that streams `matrices`, one or the two of a gated product; at most `bytes`.
    pub fn of(matrices: &[Tensor], bytes: u64) -> Ahead {
        let quarter = |matrix: &Tensor, q: usize, of: usize| {
            let row_bytes = matrix.stride(0) * matrix.dtype().size_bytes();
            (
                matrix.address([0, 0]) as usize + q * (matrix.extent(0) / of) * row_bytes,
                matrix.extent(0) / of * row_bytes,
            )
        };
        let is_empty = |matrix: &Tensor| matrix.extent(0) == 0 || matrix.extent(1) == 0;
        let starts: [(usize, usize); STREAMS] = match matrices {
            [one] if !is_empty(one) => core::array::from_fn(|r| quarter(one, r, 4)),
            [gate, up] if !is_empty(gate) && !is_empty(up) => {
                core::array::from_fn(|r| quarter([gate, up][r / 2], r % 2, 2))
            }
            _ => return Ahead::default(),
        };
        let longest = starts.iter().map(|(_, bytes)| *bytes).min().unwrap_or(0);
        Ahead { at: starts.map(|(start, _)| start), lines: longest.min(bytes as usize / STREAMS) / 64 }
    }

    /// Asks for the next `lines` cache lines of each stream, as far as there are.
    #[inline]
    pub fn ask(&mut self, lines: usize) {
        for _ in 0..lines.min(self.lines) {
            for at in &mut self.at {
                prefetch(core::ptr::without_provenance(*at));
                *at += 64;
            }
        }
        self.lines -= lines.min(self.lines);
    }
}
