//! Time made small: the distinct instants of a problem, numbered, and the load at each.
//!
//! Solvers ask only which buffers are alive together, so the clock's values do not matter, only their order does.

use super::types::Buffer;

/// A problem's lifetimes as ranges of slots. Between two neighbouring distinct instants nothing is born or dies; such a
/// stretch is a slot.
pub(super) struct Timeline {
    /// For each buffer the half-open range of slots it is alive in.
    pub(super) spans: Vec<(u32, u32)>,
    /// How many slots there are.
    pub(super) n_slots: usize,
}

impl Timeline {
    /// Numbers the instants of `buffers`. O(n log n).
    ///
    /// # Panics
    /// With more than 2^31 buffers: spans are kept in 32 bits for the sake of the cache.
    pub(super) fn new(buffers: &[Buffer]) -> Self {
        assert!(buffers.len() < 1 << 31, "a placement of {} buffers is out of range", buffers.len());
        let mut instants: Vec<(u64, u32)> = Vec::with_capacity(2 * buffers.len());
        for (index, buffer) in buffers.iter().enumerate() {
            instants.push((buffer.lower, 2 * index as u32));
            instants.push((buffer.upper, 2 * index as u32 + 1));
        }
        instants.sort_unstable();
        let mut spans = vec![(0, 0); buffers.len()];
        let mut slot = 0u32;
        let mut previous = instants.first().map_or(0, |first| first.0);
        for &(instant, end) in &instants {
            if instant != previous {
                slot += 1;
                previous = instant;
            }
            let span = &mut spans[(end / 2) as usize];
            if end % 2 == 0 { span.0 = slot } else { span.1 = slot }
        }
        Self { spans, n_slots: slot as usize }
    }

    /// The bytes alive in each slot.
    pub(super) fn loads(&self, buffers: &[Buffer]) -> Vec<u64> {
        let mut deltas = vec![(0u64, 0u64); self.n_slots + 1];
        for (buffer, &(first, end)) in buffers.iter().zip(&self.spans) {
            deltas[first as usize].0 += buffer.size_bytes;
            deltas[end as usize].1 += buffer.size_bytes;
        }
        let mut load = 0;
        let mut loads: Vec<u64> = deltas
            .iter()
            .map(|(born, dead)| {
                load = load + born - dead;
                load
            })
            .collect();
        loads.truncate(self.n_slots);
        loads
    }
}

/// The most bytes alive at any one instant. No placement has a lower peak; [`pack::minimise`](super::pack::minimise)
/// says how close one comes.
///
/// # Panics
/// If the buffers are no [`Problem`](super::Problem).
pub fn lower_bound(buffers: &[Buffer]) -> u64 {
    super::pack::assert_valid(buffers);
    Timeline::new(buffers).loads(buffers).into_iter().max().unwrap_or(0)
}
