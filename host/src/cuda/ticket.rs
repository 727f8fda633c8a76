//! Which runs of this process were launched on a GPU before others. A block takes nearly all of an SM's shared memory,
//! so a run begins when those launched before it have ended: that nothing is heard of it until then says nothing of its
//! kernel.

use super::Gpu;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A GPU: the driver, by its address, and the device's number.
type Place = (usize, u32);

/// Runs that have not ended, as far as whoever launched them knows, in the order of their launches.
static LAUNCHED: Mutex<Vec<(Place, u64)>> = Mutex::new(Vec::new());

fn launched() -> MutexGuard<'static, Vec<(Place, u64)>> {
    LAUNCHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A run's, from before its launch until its end is known.
#[derive(Debug)]
pub(crate) struct Ticket {
    place: Place,
    number: u64,
}

impl Ticket {
    /// The next one of `gpu`.
    pub(crate) fn draw(gpu: &Gpu) -> Ticket {
        let mut launched = launched();
        let place = gpu.place();
        let number = launched.last().map_or(0, |(_, last)| last + 1);
        launched.push((place, number));
        Ticket { place, number }
    }

    /// Whether a run that was launched there before is under way.
    pub(crate) fn is_waiting(&self) -> bool {
        launched().iter().any(|(place, number)| *place == self.place && *number < self.number)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        launched().retain(|(_, number)| *number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::fake::{Fake, Options};
    use std::sync::Arc;

    #[test]
    fn runs_wait_for_those_launched_before_on_the_same_gpu() {
        let gpu = || Gpu::with_driver(Arc::new(Fake::new(Options::new(1, 1 << 20)))).expect("a fake GPU");
        let (one, other) = (gpu(), gpu());
        let first = Ticket::draw(&one);
        let (second, elsewhere) = (Ticket::draw(&one.clone()), Ticket::draw(&other));
        assert!(!first.is_waiting() && second.is_waiting() && !elsewhere.is_waiting());
        let third = Ticket::draw(&one);
        drop(first);
        assert!(!second.is_waiting() && third.is_waiting());
        drop(second);
        assert!(!third.is_waiting());
    }
}
