//! The reference executor: one thread, tasks in program order, plain-loop bodies in f32. Slow and obvious.

use super::at_once::{AtOnce, Loaded};
use super::memory::Memory;
use super::{RunError, Stopper};
use crate::image::Image;
use perpetua_device::advance::step_of;
use perpetua_device::io::{Call, Tensor};
use perpetua_device::kernels::Spec;
use perpetua_shared::control::{Control, NO_PROGRAM, STOP};
use perpetua_shared::{Fault, FaultCode, TaskFlags};
use std::sync::atomic::Ordering;
use std::time::Instant;

/// The executor. A run is over when it has been started.
#[derive(Debug)]
pub struct Reference {
    loaded: Loaded,
}

impl Reference {
    /// Runs `image` on `memory`.
    pub fn new(image: Image, memory: Memory) -> Reference {
        Reference { loaded: Loaded::new(image, memory) }
    }

    /// The memory.
    pub fn memory(&self) -> &Memory {
        &self.loaded.memory
    }
}

impl AtOnce for Reference {
    fn loaded(&self) -> &Loaded {
        &self.loaded
    }

    fn loaded_mut(&mut self) -> &mut Loaded {
        &mut self.loaded
    }

    fn run(&mut self, control: Control, stopper: &Stopper) -> Result<Control, RunError> {
        let Loaded { image, memory, stamps, .. } = &mut self.loaded;
        let (image, memory, view) = (&*image, &*memory, image.view());
        let base = memory.control_base();
        // SAFETY: the control block is aligned and this is the only thread that touches it.
        unsafe { base.write(control) };
        loop {
            // SAFETY: nobody else runs.
            let step = unsafe { core::ptr::addr_of!((*base).step).read() };
            if step.program == NO_PROGRAM {
                // SAFETY: as above.
                return Ok(unsafe { base.read() });
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
                // SAFETY: `image::check` has judged every box inside its binding, and in the first part where the step
                // has another sequence than the first, of which there are as many (`start_with`); nobody else runs.
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
            stamps.push(Instant::now());
        }
    }
}
