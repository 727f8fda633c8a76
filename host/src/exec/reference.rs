//! The reference executor: one thread, tasks in program order, plain-loop bodies in f32. Slow and obvious.

use super::RunError;
use super::memory::Memory;
use crate::image::Image;
use perpetua_device::io::{Call, Tensor};
use perpetua_device::kernels::Spec;
use perpetua_shared::control::{Control, NO_PROGRAM};
use perpetua_shared::{Fault, FaultCode, TaskFlags};

/// Runs the token loop from the control block's step on, until it ends.
///
/// # Errors
/// The first fault.
pub fn run(image: &Image, memory: &Memory, mut between: impl FnMut()) -> Result<(), RunError> {
    let view = image.view();
    loop {
        // SAFETY: nobody else runs.
        let step = unsafe { core::ptr::addr_of!((*memory.control_base().cast::<Control>()).step).read() };
        if step.program == NO_PROGRAM {
            return Ok(());
        }
        let program = view.programs[step.program as usize];
        for id in program.task_first..program.task_first + program.task_count {
            let task = &view.tasks[id as usize];
            if step.sampling == 0 && task.flags & TaskFlags::ONLY_WHEN_SAMPLING != 0 {
                continue;
            }
            // SAFETY: `image::check` has judged every box inside its binding; nobody else runs.
            let tensors: Vec<Tensor> = view
                .operands(task)
                .iter()
                .map(|operand| unsafe { Tensor::new(memory.bases()[operand.binding.idx()], operand) })
                .collect();
            let call = Call { tensors: &tensors, task, step: &step, programs: view.programs };
            let spec = Spec::of(task.task_type);
            let outcome = spec.map_or(
                Err(Fault::new(FaultCode::NoSuchKernel, u32::from(task.task_type), 0, 0)),
                |spec| (spec.reference)(&call),
            );
            outcome.map_err(|fault| RunError::of(&Fault { task: id, worker: 0, ..fault }, image))?;
        }
        between();
    }
}
