//! The reference executor: one thread, tasks in program order, plain-loop bodies in f32. Slow and obvious.

use super::memory::Memory;
use super::{RunError, Stopper, check_sequences};
use crate::image::Image;
use perpetua_device::advance::step_of;
use perpetua_device::io::{Call, Tensor};
use perpetua_device::kernels::Spec;
use perpetua_shared::control::{Control, NO_PROGRAM, STOP};
use perpetua_shared::{Fault, FaultCode, TaskFlags};
use std::sync::atomic::Ordering;
use std::time::Instant;

/// The executor. A run is over when [`Reference::start`] returns.
#[derive(Debug)]
pub struct Reference {
    image: Image,
    memory: Memory,
    outcome: Option<Result<Control, RunError>>,
    stamps: Vec<Instant>,
}

impl Reference {
    /// Runs `image` on `memory`.
    pub fn new(image: Image, memory: Memory) -> Reference {
        assert!(memory.serves(&image), "an image runs on memory of its own compilation");
        Reference { image, memory, outcome: None, stamps: Vec::new() }
    }

    /// The memory.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Runs the token loop from `control`'s step until it ends.
    pub fn start(&mut self, control: Control) {
        self.start_with(control, &Stopper::default());
    }

    /// As [`Reference::start`]; the pass in which `stopper` is told is the last.
    pub fn start_with(&mut self, control: Control, stopper: &Stopper) {
        check_sequences(&self.image, &control);
        let base = self.memory.control_base();
        self.stamps = vec![Instant::now()];
        // SAFETY: the control block is aligned and this is the only thread that touches it.
        unsafe { base.write(control) };
        let ran = self.run(stopper);
        // SAFETY: as above.
        self.outcome = Some(ran.map(|()| unsafe { base.read() }));
    }

    /// Tokens the last run made.
    pub fn produced(&self) -> u32 {
        match &self.outcome {
            Some(Ok(control)) => control.produced,
            _ => 0,
        }
    }

    /// Those of them for sequence `number` of a batch.
    pub fn produced_of(&self, number: usize) -> u32 {
        match &self.outcome {
            Some(Ok(control)) => control.sequences[number].produced,
            _ => 0,
        }
    }

    /// How the last run ended.
    ///
    /// # Errors
    /// Its fault.
    pub fn finish(&mut self) -> Result<Control, RunError> {
        self.outcome.clone().unwrap_or_else(|| Ok(bytemuck::Zeroable::zeroed()))
    }

    /// When the last run started, and when each of its passes ended.
    pub fn stamps(&self) -> &[Instant] {
        &self.stamps
    }

    fn run(&mut self, stopper: &Stopper) -> Result<(), RunError> {
        let (image, memory) = (&self.image, &self.memory);
        let view = image.view();
        loop {
            // SAFETY: nobody else runs.
            let step = unsafe { core::ptr::addr_of!((*memory.control_base()).step).read() };
            if step.program == NO_PROGRAM {
                return Ok(());
            }
            let program = view.programs[step.program as usize];
            for id in program.task_first..program.task_first + program.task_count {
                let task = &view.tasks[id as usize];
                if stopper.is_told() {
                    memory.control_word(STOP).store(1, Ordering::Relaxed);
                }
                if step.sampling == 0 && task.flags & TaskFlags::ONLY_WHEN_SAMPLING != 0 {
                    continue;
                }
                // SAFETY: `image::check` has judged every box inside its binding, and in the first part where the step has
                // another sequence than the first, of which there are as many (`start`); nobody else runs.
                let tensors: Vec<Tensor> = view
                    .operands(task)
                    .iter()
                    .map(|operand| unsafe { memory.tensor(operand, step.sequence) })
                    .collect();
                // SAFETY: nobody else runs.
                let step = step_of(task.flags, &step, |number| unsafe { memory.sequence(number) });
                let call = Call { tensors: &tensors, task, step: &step, programs: view.programs };
                let outcome = Spec::of(task.task_type)
                    .map_or(Err(Fault::new(FaultCode::NoSuchKernel, u32::from(task.task_type), 0, 0)), |spec| {
                        (spec.reference)(&call)
                    });
                outcome.map_err(|fault| RunError::of(&Fault { task: id, worker: 0, ..fault }, image))?;
            }
            self.stamps.push(Instant::now());
        }
    }
}
