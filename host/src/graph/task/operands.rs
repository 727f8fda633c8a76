//! What tasks touch, move and compute.

use super::{Task, TaskGraph};
use crate::graph::kernel::{of_one_head, whole_operand};
use crate::graph::lower::block_operands;
use crate::graph::tensor::{BufferKind, OpId};
use crate::graph::threadblock::{Access, AccessKind, BlockOp, ThreadBlockGraph};
use perpetua_device::kernels::{self, Attention, Cost, DecodeAttention, Numbered, Spec, attention, decode_attention};
use perpetua_shared::Operand;

/// What `task` touches, operand by operand, without addresses (offsets count from the buffers' starts), in `buffer`.
pub fn task_operands<'a>(blocks: &ThreadBlockGraph, task: &Task, buffer: &'a mut Vec<Operand>) -> &'a [Operand] {
    buffer.clear();
    buffer.extend(block_operands(blocks, OpId(task.op), task.block));
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

/// Bytes that a pass over one sequence has to read from memory: of each operator the weights, once however many tasks
/// read them (of experts' those that rows go to, of tables the rows looked up), and the keys and values of `position`
/// positions, or as many as a window has. What tasks read of each other's results is in caches, and often in many at
/// once.
pub fn bytes_from_memory(blocks: &ThreadBlockGraph, position: usize) -> u64 {
    blocks.ops.iter().map(|op| weight_bytes(blocks, op) + cached_bytes(blocks, op, position)).sum()
}

fn weight_bytes(blocks: &ThreadBlockGraph, op: &BlockOp) -> u64 {
    let Some((kernel, spec)) = op.kernel.and_then(|kernel| Some((kernel, Spec::of(kernel.task_type)?))) else {
        return 0;
    };
    // Of one that has a head a block, a head's.
    let (heads, head_axis) = match op.head_axis.map(usize::from) {
        Some(axis) => (u64::from(op.grid[axis]), Some(axis)),
        None => (1, None),
    };
    let whole = |access: &Option<Access>| {
        let Some(access) = access else { return Operand::ABSENT };
        let operand = whole_operand(&blocks.table[access.tensor]);
        of_one_head(operand, head_axis.and_then(|axis| access.map[axis]))
    };
    let operands: Vec<Operand> = op.accesses.iter().map(whole).collect();
    let read = (spec.cost)(&kernel.params, &operands).bytes_read;
    let (mut weights, mut rest, mut has_stack) = (0, 0, false);
    for (access, operand) in op.accesses.iter().zip(&operands) {
        let Some(access) = access.as_ref().filter(|access| access.kind.reads()) else { continue };
        match blocks.table.buffer_of(access.tensor).kind {
            BufferKind::WeightStack(_) => has_stack = true,
            BufferKind::Weight => weights += operand.bytes(),
            _ => rest += operand.bytes(),
        }
    }
    // The cost knows how many of the experts, and how many rows of a table.
    heads * if has_stack { read.saturating_sub(rest) } else { weights.min(read) }
}

/// Of what passes from row to row, which is read and written whole.
fn state_bytes(blocks: &ThreadBlockGraph, op: &BlockOp) -> u64 {
    let kept = op.accesses.iter().flatten().filter(|access| access.kind == AccessKind::ReadWrite);
    let kept = kept.filter(|access| blocks.table.buffer_of(access.tensor).kind == BufferKind::State);
    kept.map(|access| whole_operand(&blocks.table[access.tensor]).bytes()).sum()
}

fn cached_bytes(blocks: &ThreadBlockGraph, op: &BlockOp, position: usize) -> u64 {
    let Some(kernel) = op.kernel else { return 0 };
    let window = match kernel.task_type {
        DecodeAttention::TASK_TYPE => kernels::params::<decode_attention::Params>(&kernel.params).window,
        Attention::TASK_TYPE => kernels::params::<attention::Params>(&kernel.params).window,
        _ => return state_bytes(blocks, op),
    };
    let caches = op.accesses.iter().flatten().map(|access| access.tensor);
    let caches = caches.filter(|cache| blocks.table.buffer_of(*cache).kind == BufferKind::State);
    let of_cache = |cache| {
        // [heads, positions, d].
        let cache = &blocks.table[cache];
        let (bytes, positions) = (cache.dtype.tensor_bytes(&cache.shape), cache.shape[1]);
        bytes / positions.max(1) as u64 * position.min(positions).min(window as usize) as u64
    };
    caches.map(of_cache).sum()
}

#[cfg(test)]
mod tests {
    use super::bytes_from_memory;
    use crate::compile::{Config, Source, compile};
    use crate::graph::lower::Target;
    use crate::model::ModelConfig;
    use crate::model::decoder::{Cache, Declared, Head, build};
    use crate::model::synth::preset_config;
    use perpetua_shared::DType;
    use std::path::Path;

    /// By what the configurations say, and whoever it is compiled for.
    #[test]
    fn weights_are_read_once() {
        // Qwen3-0.6B: 28 layers, 16 heads and 8 for keys, of 128; a token's row of the table, which is the head, too.
        let layer = 1024 * 128 * (16 + 2 * 8 + 16) + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128;
        let dense = 2 * (28 * layer + 1024 + 1024 * 151_936 + 1024);
        // Gemma 3 1B: 26 layers, all but every sixth of them with a window of 512 positions; one head for keys, of 256.
        let windows = |position: u64| 2 * 2 * 256 * (4 * position + 22 * position.min(512));
        // OLMoE: 16 layers; 8 of 64 experts.
        let experts = 2 * 16 * 8 * 3 * 2048 * 1024;
        for target in [Target::h200(), Target::gpu(16), Target::cpu(2)] {
            let read = |preset: &str, position| {
                let value = preset_config(preset).expect("there is one");
                let Ok(ModelConfig::Decoder(config)) = ModelConfig::from_value(Path::new(preset), &value) else {
                    panic!("{preset} is a decoder")
                };
                let graph = build(&config, Declared::Assumed(DType::Bf16), 1, Cache::bf16(2048), Head::Sample);
                let source = Source { name: "decode".to_owned(), graph: graph.expect("sound"), in_token_loop: true };
                let compiled = compile(vec![source], &Config::new(target.clone())).expect("it compiles");
                bytes_from_memory(&compiled.programs[0].blocks, position)
            };
            let (found, name) = (read("qwen3-0.6b", 0), &target.name);
            // Sines and cosines come on top.
            assert!(found.abs_diff(dense) < dense / 1000, "{name}: {found}, of {dense}");
            assert_eq!(read("qwen3-0.6b", 500) - found, 500 * 28 * 2 * 8 * 128 * 2, "{name}");
            assert_eq!(read("gemma-3-1b", 1500) - read("gemma-3-1b", 0), windows(1500), "{name}");
            let (found, rest) = (read("olmoe-1b-7b", 0), 2 * (16 * (4 * 2048 * 2048 + 64 * 2048) + 50_304 * 2048));
            assert!(found.abs_diff(experts + rest) < found / 500, "{name}: {found}, of {}", experts + rest);
        }
    }
}
