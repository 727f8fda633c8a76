//! One image of several programs: whose memory each buffer is, and where in it each operand lies.

use super::{Binding, CompileError, Program, Source};
use crate::graph::kernel::{Pass, whole_operand};
use crate::graph::task::{TaskClass, task_operands};
use crate::graph::tensor::BufferKind;
use crate::graph::threadblock::{self, ThreadBlockGraph};
use crate::image::encode::Parts;
use crate::parallel::both;
use crate::schedule::{arena, prefetch};
use perpetua_shared::BindingId;
use perpetua_shared::event::{EVENT_ARRIVED, EVENT_ITERATION, EventDesc, FIRST_PROGRAM_EVENT};
use perpetua_shared::image::{APART, BindingKind, EVERY_SEQUENCE, ProgramDesc, TOKEN_LOOP, VERIFIES};
use perpetua_shared::task::{Operand, TaskDesc, TaskFlags};
use std::collections::HashMap;

/// The image's memory and descriptors, gathered program by program.
#[derive(Default)]
pub(super) struct Link {
    /// All programs' memory.
    pub(super) bindings: Vec<Binding>,
    by_name: HashMap<(BindingKind, String), BindingId>,
    /// Per program and buffer, its binding.
    of_buffer: Vec<Vec<BindingId>>,
    /// Per program, rows of a pass, and what its descriptor says of the token loop.
    passes: Vec<(Option<u32>, u32)>,
    /// Where each program's flagged bytes start.
    flagged_first: Vec<u64>,
}

impl Link {
    /// Gives buffers of `program`, the next one, their memory, and says where its outputs are.
    pub(super) fn add(&mut self, source: &Source, program: &mut Program) -> Result<(), CompileError> {
        self.bind(source, &program.blocks, &program.arena)?;
        for (name, tensor) in source.graph.outputs() {
            let table = &program.blocks.table;
            let is_flagged = u8::from(table.buffer_of(*tensor).kind == BufferKind::Flagged);
            let whole = Operand { is_flagged, ..whole_operand(&table[*tensor]) };
            let placed = self.place(program, table[*tensor].buffer.idx(), whole);
            program.outputs.push((name.clone(), placed));
        }
        let kind = match source.graph.pass {
            Pass::Batch => EVERY_SEQUENCE,
            Pass::Verify => VERIFIES,
            Pass::Sequence if source.in_token_loop => TOKEN_LOOP,
            Pass::Sequence => APART,
        };
        self.passes.push((source.graph.rows, kind));
        Ok(())
    }

    /// The binding of this name and kind, and its bytes so far; a new one of `bytes` if there is none.
    fn binding(&mut self, name: &str, kind: BindingKind, bytes: u64, align_bytes: u32) -> (BindingId, u64) {
        let next = BindingId(self.bindings.len() as u32);
        let id = *self.by_name.entry((kind, name.to_owned())).or_insert(next);
        if id == next {
            self.bindings.push(Binding {
                name: name.to_owned(),
                kind,
                bytes,
                align_bytes,
                contents: None,
                parts: None,
            });
        }
        (id, self.bindings[id.idx()].bytes)
    }

    /// The binding of each buffer of the next program.
    fn bind(&mut self, source: &Source, blocks: &ThreadBlockGraph, arena: &arena::Arena) -> Result<(), CompileError> {
        let (arena_id, arena_bytes) =
            self.binding("arena", BindingKind::Arena, arena.peak_bytes, arena::ALIGN_BYTES as u32);
        self.bindings[arena_id.idx()].bytes = arena_bytes.max(arena.peak_bytes);
        // After those of other programs: a flag counts the runs of one.
        let mut flagged = (None, 0);
        if arena.flagged_bytes > 0 {
            let (id, first) = self.binding("flagged", BindingKind::Flagged, 0, arena::ALIGN_BYTES as u32);
            self.bindings[id.idx()].bytes += arena.flagged_bytes;
            flagged = (Some(id), first);
        }
        self.flagged_first.push(flagged.1);
        // A checkpoint's tensors are used where they lie; only their element's alignment can be hoped for.
        let mut weight_align = vec![1; blocks.table.buffers.len()];
        for tensor in &blocks.table.tensors {
            weight_align[tensor.buffer.idx()] = tensor.dtype.align_bytes() as u32;
        }
        let mut of_buffer = Vec::with_capacity(blocks.table.buffers.len());
        for (buffer, weight_align) in blocks.table.buffers.iter().zip(weight_align) {
            let (kind, align) = match &buffer.kind {
                BufferKind::Intermediate => {
                    of_buffer.push(arena_id);
                    continue;
                }
                BufferKind::Flagged => {
                    of_buffer.push(flagged.0.expect("what is flagged has bytes"));
                    continue;
                }
                BufferKind::Input => (BindingKind::Input, 64),
                BufferKind::Weight | BufferKind::WeightStack(_) => (BindingKind::Weight, weight_align),
                BufferKind::Constant(_) => (BindingKind::Constant, 64),
                BufferKind::State => (BindingKind::State, 256),
                BufferKind::Control => (BindingKind::Control, 64),
                BufferKind::Tokens => (BindingKind::Tokens, 64),
            };
            let before = self.bindings.len();
            let (id, bytes) = self.binding(&buffer.name, kind, buffer.bytes, align);
            let is_known = id.idx() < before;
            let known = &mut self.bindings[id.idx()];
            if kind == BindingKind::Tokens {
                // A program that makes no tokens asks for a token buffer of one.
                known.bytes = bytes.max(buffer.bytes);
            } else if bytes != buffer.bytes {
                return Err(CompileError::Binding {
                    name: buffer.name.clone(),
                    program: source.name.clone(),
                    found: buffer.bytes,
                    expected: bytes,
                });
            }
            let (contents, parts) = match &buffer.kind {
                BufferKind::Constant(contents) => (Some(contents.clone()), None),
                BufferKind::WeightStack(n) => (None, Some(*n)),
                _ => (None, None),
            };
            if is_known && (known.contents != contents || known.parts != parts) {
                return Err(CompileError::Contents { name: buffer.name.clone(), program: source.name.clone() });
            }
            (known.contents, known.parts) = (contents, parts);
            of_buffer.push(id);
        }
        self.of_buffer.push(of_buffer);
        Ok(())
    }

    /// `operand`, which counts from the start of buffer `buffer` of `program`, moved to its binding.
    fn place(&self, program: &Program, buffer: usize, operand: Operand) -> Operand {
        let binding = self.of_buffer[program.id.idx()][buffer];
        let shift = match program.blocks.table.buffers[buffer].kind {
            BufferKind::Intermediate => program.arena.offsets[buffer],
            BufferKind::Flagged => self.flagged_first[program.id.idx()] + program.arena.offsets[buffer],
            _ => 0,
        };
        Operand { binding, offset_bytes: operand.offset_bytes + shift, ..operand }
    }

    /// What the image has of `programs`, all that were added.
    pub(super) fn parts(&self, programs: &[Program], n_workers: u32) -> Parts {
        let mut parts = Parts {
            n_workers,
            bindings: self.bindings.iter().map(Binding::desc).collect(),
            events: vec![EventDesc { num_triggers: 1 }, EventDesc { num_triggers: n_workers }],
            ..Parts::default()
        };
        debug_assert_eq!(parts.events.len(), FIRST_PROGRAM_EVENT.idx());
        // Data ops are as long as all of the others.
        let (data, ()) = both(
            || self.loads(programs, |plan| &plan.data, |op| &mut op.source),
            || {
                for (program, (rows, kind)) in programs.iter().zip(&self.passes) {
                    self.add_program(&mut parts, program, *rows, *kind);
                }
            },
        );
        (parts.data_heads, parts.data) = data;
        (parts.prefetch_heads, parts.prefetches) = self.loads(programs, |plan| &plan.prefetches, |op| &mut op.source);
        // Each program's row of heads ends where the next one's starts.
        debug_assert_eq!(parts.list_heads.len(), programs.len() * (n_workers as usize + 2));
        parts
    }

    /// Where those that each worker's loader has in each program start, and all of them: `own` are a plan's, whose
    /// `source` becomes a binding.
    fn loads<T: Copy>(
        &self,
        programs: &[Program],
        own: impl Fn(&prefetch::WorkerPlan) -> &[T],
        source: impl Fn(&mut T) -> &mut u32,
    ) -> (Vec<u32>, Vec<T>) {
        let plans = programs.iter().flat_map(|program| &program.plan.workers);
        let (mut heads, mut ops) = (Vec::new(), Vec::with_capacity(plans.map(|plan| own(plan).len()).sum()));
        for program in programs {
            let of_buffer = &self.of_buffer[program.id.idx()];
            for worker in 0..program.lists.lists.len() {
                heads.push(ops.len() as u32);
                let own = program.plan.workers.get(worker).map_or(&[][..], &own);
                ops.extend(own.iter().map(|op| {
                    let mut op = *op;
                    let source = source(&mut op);
                    *source = of_buffer[*source as usize].0;
                    op
                }));
            }
            heads.push(ops.len() as u32);
        }
        (heads, ops)
    }

    fn add_program(&self, parts: &mut Parts, program: &Program, rows: Option<u32>, kind: u32) {
        let (task_first, event_first) = (parts.tasks.len() as u32, parts.events.len() as u32);
        let op_first = parts.op_names.len() as u32;
        let graph = &program.counted;
        parts.op_names.extend(program.blocks.ops.iter().map(|op| op.name.clone()));
        parts.events.extend(graph.events.iter().map(|n| EventDesc { num_triggers: *n }));
        let mut tiles = vec![0; graph.tasks.len()];
        for compute in program.plan.workers.iter().flat_map(|worker| &worker.computes) {
            tiles[compute.task as usize] += compute.data_end - compute.data_first;
        }
        let mut buffer = Vec::new();
        for (number, task) in graph.tasks.iter().enumerate() {
            let op = &program.blocks.ops[task.op as usize];
            let is_last = number + 1 == graph.tasks.len();
            let (operand_first, wait_first, trigger_first) =
                (parts.operands.len(), parts.waits.len(), parts.triggers.len());
            for (access, operand) in op.accesses.iter().zip(task_operands(&program.blocks, task, &mut buffer)) {
                let placed = match access {
                    Some(access) => self.place(program, program.blocks.table[access.tensor].buffer.idx(), *operand),
                    None => *operand,
                };
                parts.operands.push(placed);
            }
            parts.waits.extend(graph.waits.of(number).iter().map(|event| event + event_first));
            parts.triggers.extend(graph.triggers.of(number).iter().map(|event| event + event_first));
            if is_last {
                parts.waits.push(EVENT_ARRIVED.0);
                parts.triggers.push(EVENT_ITERATION.0);
            }
            let row_first = op.row_axis.map_or(0, |axis| {
                threadblock::part(op.rows as usize, task.block[axis as usize], op.grid[axis as usize]).start as u32
            });
            let count = |n: usize| u16::try_from(n).expect("check_task_events has counted");
            let kernel = op.kernel.expect("a kernel graph's operators have macro kernels");
            let is_launched = graph.classes[task.op as usize] == TaskClass::JustInTime;
            let reads_early = !op.early_reads(&program.blocks.table).is_empty();
            let flags = kernel.flags
                | if is_launched { TaskFlags::JUST_IN_TIME } else { 0 }
                | if reads_early { TaskFlags::READS_EARLY } else { 0 };
            parts.tasks.push(TaskDesc {
                task_type: kernel.task_type,
                flags,
                op: op_first + task.op,
                block: task.block,
                row_first,
                operand_first: operand_first as u32,
                operand_count: op.accesses.len() as u32,
                wait_first: wait_first as u32,
                wait_count: count(parts.waits.len() - wait_first),
                trigger_count: count(parts.triggers.len() - trigger_first),
                trigger_first: trigger_first as u32,
                tiles: tiles[number],
                params: kernel.params,
            });
        }
        for list in &program.lists.lists {
            parts.list_heads.push(parts.lists.len() as u32);
            parts.lists.extend(list.iter().map(|task| task + task_first));
        }
        parts.list_heads.push(parts.lists.len() as u32);
        let is_launched = |task: &u32| graph.classes[graph.tasks[*task as usize].op as usize] == TaskClass::JustInTime;
        let launched = (0..graph.tasks.len() as u32).filter(is_launched);
        parts.lists.extend(launched.map(|task| task + task_first));
        parts.list_heads.push(parts.lists.len() as u32);
        parts.programs.push(ProgramDesc {
            max_rows: rows.unwrap_or(u32::MAX),
            task_first,
            task_count: graph.tasks.len() as u32,
            event_first,
            event_count: graph.events.len() as u32,
            kind,
        });
    }
}
