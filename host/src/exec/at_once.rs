//! Executors on the host's own thread: a run is over when it has been started.

use super::memory::{Memory, MemoryError};
use super::{Executor, RunError, Stopper, check_control};
use crate::image::Image;
use perpetua_shared::control::Control;
use perpetua_shared::task::Operand;
use std::fmt::Debug;
use std::time::Instant;

/// An image in its memory, and how its last run went.
#[derive(Debug)]
pub struct Loaded {
    pub(super) image: Image,
    pub(super) memory: Memory,
    outcome: Option<Result<Control, RunError>>,
    pub(super) stamps: Vec<Instant>,
}

impl Loaded {
    pub(super) fn new(image: Image, memory: Memory) -> Loaded {
        assert!(memory.serves(&image), "an image runs on memory of its own compilation");
        Loaded { image, memory, outcome: None, stamps: Vec::new() }
    }

    /// How the last run ended, if it ended well.
    fn control(&self) -> Option<&Control> {
        self.outcome.as_ref()?.as_ref().ok()
    }
}

/// What such an executor says of itself.
pub trait AtOnce: Debug + Send {
    /// What it runs.
    fn loaded(&self) -> &Loaded;
    /// See [`AtOnce::loaded`].
    fn loaded_mut(&mut self) -> &mut Loaded;
    /// As [`Executor::start_with`], to the run's end, and as [`Executor::finish`]. The first stamp is there, and the
    /// sequences have been checked.
    ///
    /// # Errors
    /// The first fault.
    fn run(&mut self, control: Control, stopper: &Stopper) -> Result<Control, RunError>;
}

impl<E: AtOnce> Executor for E {
    fn start_with(&mut self, control: Control, stopper: &Stopper) {
        let loaded = self.loaded_mut();
        check_control(&loaded.image, &control);
        loaded.stamps = vec![Instant::now()];
        let outcome = self.run(control, stopper);
        self.loaded_mut().outcome = Some(outcome);
    }

    fn finish(&mut self) -> Result<Control, RunError> {
        self.loaded().outcome.clone().unwrap_or_else(|| Ok(bytemuck::Zeroable::zeroed()))
    }

    fn produced(&self) -> u32 {
        self.loaded().control().map_or(0, |control| control.produced)
    }

    fn produced_of(&self, sequence: usize) -> u32 {
        self.loaded().control().map_or(0, |control| control.sequences[sequence].produced)
    }

    fn token(&self, position: usize) -> u32 {
        self.loaded().memory.token(position)
    }

    fn position(&self) -> u32 {
        self.loaded().control().map_or(0, |control| control.step.first_pos)
    }

    fn set_tokens(&mut self, position: usize, tokens: &[u32]) {
        // SAFETY: whoever runs has borrowed `self` until the run is over.
        unsafe { self.loaded_mut().memory.set_tokens(position, tokens) }
    }

    fn set_input(&mut self, name: &str, contents: &[u8]) -> Result<(), MemoryError> {
        // SAFETY: as `set_tokens`.
        unsafe { self.loaded_mut().memory.set_input(name, contents) }
    }

    fn append_f32(&mut self, output: &Operand, rows: usize, out: &mut Vec<f32>) -> Result<(), RunError> {
        self.loaded().memory.append_f32(output, rows, out);
        Ok(())
    }

    fn stamps(&self) -> Vec<Instant> {
        self.loaded().stamps.clone()
    }

    fn owned_bytes(&self) -> u64 {
        self.loaded().memory.owned_bytes()
    }
}
