//! Rows that tell their readers themselves that they are there: which are flagged, what events are left, and the rules
//! of images.

use super::simt::{WIDE, broken_rule, encode, model};
use perpetua::compile::{Compiled, Config, compile};
use perpetua::engine::decoder_sources;
use perpetua::graph::lower::Target;
use perpetua::graph::tensor::BufferKind;
use perpetua::image::encode::Parts;
use perpetua::model::decoder::{Cache, Head};
use perpetua::{Model, exec};
use perpetua_device::kernels::Spec;
use perpetua_shared::image::BindingKind;
use perpetua_shared::{TaskDesc, TaskFlags, WorkerId};

fn decoding(model: &Model, target: Target, just_in_time: &[&str]) -> Compiled {
    let sources = decoder_sources(model, &[1], Cache::bf16(32), Head::Sample).expect("a sound model");
    let just_in_time = just_in_time.iter().map(|name| name.to_string()).collect();
    compile(sources, &Config { check: true, just_in_time, ..Config::new(target) }).expect("it compiles")
}

/// Operators of `compiled` whose tasks wait on events, or trigger some.
fn with_events(compiled: &Compiled) -> Vec<String> {
    let view = compiled.image.view();
    let has = |task: &TaskDesc| !view.waits(task).is_empty() || !view.triggers(task).is_empty();
    let by_events = |op: &u32| view.tasks.iter().any(|task| task.op == *op && has(task));
    (0..compiled.image.header().n_ops).filter(by_events).map(|op| compiled.image.op_name(op).to_owned()).collect()
}

#[test]
fn layers_are_told_by_flags_and_the_end_by_events() {
    let (_dir, model) = model(WIDE);
    let flagged = decoding(&model, Target::gpu(9), &[]);
    let program = &flagged.programs[0];
    let kinds = |compiled: &Compiled| -> Vec<(String, BufferKind)> {
        let buffers = &compiled.programs[0].blocks.table.buffers;
        let touched = buffers.iter().enumerate().filter(|(number, _)| {
            let table = &compiled.programs[0].blocks.table;
            let mut accesses = compiled.programs[0].blocks.ops.iter().flat_map(|op| op.accesses.iter().flatten());
            accesses.any(|access| table[access.tensor].buffer.idx() == *number)
        });
        touched.map(|(_, buffer)| (buffer.name.clone(), buffer.kind.clone())).collect()
    };
    let of = |kind: BufferKind| kinds(&flagged).into_iter().filter(|(_, is)| *is == kind).count();
    // The embedding; of each of two layers q, k and v, what splits find, o, what the gates open, and the layer's own.
    assert_eq!(of(BufferKind::Flagged), 1 + 2 * 7);
    // What blocks found of the next token, and the logits they found it in.
    assert_eq!(of(BufferKind::Intermediate), 3);
    assert_eq!(with_events(&flagged), ["lm_head", "sample", "advance"]);
    assert!(program.told.iter().filter(|is_told| **is_told).count() > 10 && program.told.contains(&false));

    let counted = decoding(&model, Target { has_flags: false, ..Target::gpu(9) }, &[]);
    assert!(kinds(&counted).iter().all(|(_, kind)| *kind != BufferKind::Flagged));
    assert!(!counted.image.bindings().iter().any(|binding| binding.kind == BindingKind::Flagged as u32));
    assert_eq!(with_events(&counted).len(), counted.image.header().n_ops as usize);
    assert!(!counted.programs[0].told.contains(&true));
    // All there is to order is the same.
    assert_eq!(program.tasks.stats.pairs, counted.programs[0].tasks.stats.pairs);

    // What a scheduler launches it launches by events.
    let launched = decoding(&model, Target::gpu(9), &["decode_attention"]);
    let untold = kinds(&launched).into_iter().filter(|(_, kind)| *kind == BufferKind::Flagged).count();
    assert_eq!(untold, 1 + 2 * 3);
    // One too long to be read into registers at once is as well.
    let (_dir, long) = super::simt::model(&[("num_hidden_layers", 1), ("intermediate_size", 14_344)]);
    let long = decoding(&long, Target::gpu(9), &[]);
    assert_eq!(kinds(&long).into_iter().filter(|(_, kind)| *kind == BufferKind::Flagged).count(), 1 + 7);
    // A row of no whole eights too long for shared memory is nobody's by flags, and takes no others with it.
    let (_dir, long) = super::simt::model(&[("num_hidden_layers", 1), ("intermediate_size", 4100)]);
    let long = decoding(&long, Target::gpu(9), &[]);
    assert_eq!(kinds(&long).into_iter().filter(|(_, kind)| *kind == BufferKind::Flagged).count(), 1 + 6);
    let names = with_events(&long);
    assert_eq!(names[..2], ["model.layers.0.mlp.gate_up", "model.layers.0.mlp.down_proj"], "{names:?}");
    // A norm of a row too long for a product to have it is by flags what it takes, and not what each worker makes for
    // itself.
    let (_dir, wide) = super::simt::model(&[("num_hidden_layers", 1), ("hidden_size", 4104)]);
    let wide = kinds(&decoding(&wide, Target::gpu(9), &[]));
    let copies = wide.iter().filter(|(name, _)| name.ends_with(" copies")).map(|(_, kind)| kind.clone());
    let copies: Vec<BufferKind> = copies.collect();
    assert!(!copies.is_empty() && copies.iter().all(|kind| *kind == BufferKind::Intermediate), "{wide:?}");
    let normed = ["embed_tokens", "model.layers.0.self_attn.o_proj"];
    let is_flagged = |name: &str| wide.contains(&(name.to_owned(), BufferKind::Flagged));
    assert!(normed.into_iter().all(is_flagged), "{wide:?}");
}

/// What host threads run must be ordered by events.
#[test]
#[should_panic(expected = "is a GPU's")]
fn threads_refuse_an_image_with_flags() {
    let (_dir, model) = model(WIDE);
    let compiled = decoding(&model, Target::gpu(3), &[]);
    let memory = exec::memory::Memory::new(&compiled, &model).expect("a small model");
    let _ = exec::threads::Threads::new(compiled.image, memory, exec::threads::Options::default());
}

/// Rule 8, each part of it broken once.
#[test]
fn broken_flags_are_named() {
    let (_dir, model) = model(WIDE);
    let compiled = decoding(&model, Target::gpu(3), &[]);
    let mut whole = Parts::of(&compiled.image);
    // Loaders have rules of their own.
    whole.tasks.iter_mut().for_each(|task| task.tiles = 0);
    (whole.data, whole.prefetches) = (Vec::new(), Vec::new());
    whole.data_heads.fill(0);
    whole.prefetch_heads.fill(0);
    assert!(encode(&whole).is_ok());
    let says = |change: &dyn Fn(&mut Parts), expected: &str| {
        let found = broken_rule(&whole, change);
        assert!(found.contains(expected), "{found}, expected {expected}");
    };
    let flagged = compiled.bindings.iter().position(|b| b.kind == BindingKind::Flagged).expect("rows by flags");
    // Operand `slot` of the first block of operator `op`.
    let task = |op: &str| {
        let is = |task: &&TaskDesc| compiled.image.op_name(task.op) == op;
        whole.tasks.iter().position(|task| is(&task)).expect("an operator")
    };
    let operand = |op: &str, slot: &str| {
        let task = &whole.tasks[task(op)];
        let slots = Spec::of(task.task_type).expect("a kernel").slots;
        task.operand_first as usize + slots.iter().position(|s| s.name == slot).expect("a slot")
    };
    let (q, o) = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj");
    let (written, read) = (operand(q, "y"), operand(q, "x"));
    assert_eq!(whole.operands[written].binding.idx(), flagged);
    says(&|parts| parts.operands[written].is_flagged = 0, "its mark as flagged is 0");
    says(&|parts| parts.operands[operand("lm_head", "y")].is_flagged = 1, "its mark as flagged is 1");
    says(&|parts| parts.operands[read + 1].is_flagged = 1, "is flagged, which only some operands may be");
    says(&|parts| parts.programs[0].max_rows = 2, "in a pass that may leave rows out");
    says(&|parts| parts.tasks[task(q)].flags |= TaskFlags::ONLY_WHEN_SAMPLING, "not written in every pass");
    let other = operand(o, "y");
    says(&|parts| parts.operands[written].offset_bytes = parts.operands[other].offset_bytes, "as does");
    let again = |parts: &mut Parts| {
        let operand = &mut parts.operands[operand("embed_tokens", "y")];
        (operand.extent[0], operand.stride_elems[0]) = (u32::MAX, 0);
    };
    says(&again, "elements of 4 bytes, in a binding of");
    let end = whole.bindings[flagged].bytes;
    let moved = |parts: &mut Parts| {
        parts.bindings[flagged].bytes += 1 << 12;
        parts.operands[written].offset_bytes = end;
    };
    says(&moved, "which no task of its program writes");
    // A reader before who writes for it, on one worker.
    let view = compiled.image.view();
    let ops = [q, o].map(|op| whole.tasks[task(op)].op);
    let both = (0..view.n_workers).find_map(|worker| {
        let list = view.list(0, WorkerId(worker));
        let [writer, reader] = ops.map(|op| list.iter().position(|task| view.tasks[*task as usize].op == op));
        Some((worker as usize, writer?, reader?))
    });
    let (worker, writer, reader) = both.expect("a worker that has one of each");
    let backwards = |parts: &mut Parts| {
        let first = parts.list_heads[worker] as usize;
        parts.lists.swap(first + writer, first + reader);
    };
    says(&backwards, "stops after");
    // Who has told by flags alone may run beside the pass that follows.
    let unheard = |parts: &mut Parts| {
        let list = view.list(0, WorkerId(1));
        let last = *list.last().expect("a list") as usize;
        let event = view.triggers(&view.tasks[last])[0] as usize;
        parts.tasks[last].trigger_count = 0;
        parts.events[event].num_triggers -= 1;
    };
    says(&unheard, "may still run when `advance` ends the iteration");
}
