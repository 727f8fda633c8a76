//! What tasks touch, move and compute.

use super::{Task, TaskGraph};
use crate::graph::lower::block_operand;
use crate::graph::tensor::OpId;
use crate::graph::threadblock::{Access, ThreadBlockGraph};
use perpetua_device::kernels::{Cost, Spec};
use perpetua_shared::Operand;

/// What `task` touches, operand by operand, without addresses (offsets count from the buffers' starts), in `buffer`.
pub fn task_operands<'a>(blocks: &ThreadBlockGraph, task: &Task, buffer: &'a mut Vec<Operand>) -> &'a [Operand] {
    let operand = |access: &Option<Access>| {
        access.as_ref().map_or(Operand::ABSENT, |access| block_operand(blocks, OpId(task.op), access, task.block))
    };
    buffer.clear();
    buffer.extend(blocks.ops[task.op as usize].accesses.iter().map(operand));
    buffer
}

/// What each task moves and computes.
pub fn task_costs(blocks: &ThreadBlockGraph, tasks: &TaskGraph) -> Vec<Cost> {
    let mut buffer = Vec::new();
    let cost = |task: &Task| {
        let op = &blocks.ops[task.op as usize];
        let Some((kernel, spec)) = op.kernel.and_then(|kernel| Some((kernel, Spec::of(kernel.task_type)?))) else {
            return Cost::default();
        };
        (spec.cost)(&kernel.params, task_operands(blocks, task, &mut buffer))
    };
    tasks.tasks.iter().map(cost).collect()
}
