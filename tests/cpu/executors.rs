//! Random small graphs: every executor computes what the reference does, whatever the worker count and however tasks
//! meet; the image decodes to what was encoded; damaged images are refused.

use perpetua::compile::{Compiled, Config, Source, compile};
use perpetua::engine::Resident;
use perpetua::exec::memory::Memory;
use perpetua::exec::reference::Reference;
use perpetua::exec::threads::{Options, Threads};
use perpetua::exec::{Executor, Stopper};
use perpetua::graph::kernel::{ExpertArgs, KernelGraph};
use perpetua::graph::lower::{Target, lower};
use perpetua::graph::tensor::{BufferKind, TensorId};
use perpetua::graph::threadblock::{Access, AccessKind, BlockOp, KernelCall};
use perpetua::image::{Image, ImageError};
use perpetua::model::ModelConfig;
use perpetua::model::decoder::{self, Cache, Declared, Head};
use perpetua::model::synth::preset_config;
use perpetua::{Device, EngineConfig};
use perpetua_device::kernels::elementwise::{self, Function};
use perpetua_device::kernels::gated_linear::Gating;
use perpetua_device::kernels::linear::Activation;
use perpetua_device::kernels::routing::{Counting, Weighting};
use perpetua_device::kernels::{Elementwise, Numbered, RmsNorm, param_words};
use perpetua_shared::control::{ALL_ROWS, Control, End, Request, Step};
use perpetua_shared::image::BindingKind;
use perpetua_shared::{DType, Operand, ProgramId, TaskFlags};
use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

/// One random operator: its kind and which of the tensors so far it takes.
#[derive(Clone, Debug)]
struct Op {
    kind: u8,
    a: usize,
    b: usize,
    columns: usize,
}

/// Where a range of sizes ends: `./x test-miri` interprets these tests.
const fn below(n: usize, interpreted: usize) -> usize {
    if cfg!(miri) { interpreted } else { n }
}

fn ops() -> impl Strategy<Value = (usize, usize, Vec<Op>)> {
    let op = (0u8..7, any::<usize>(), any::<usize>(), 1..below(90, 9)).prop_map(|(kind, a, b, columns)| Op {
        kind,
        a,
        b,
        columns,
    });
    (1..below(6, 3), 1..below(90, 9), prop::collection::vec(op, 1..below(14, 5)))
}

type Weights = Arc<HashMap<String, Vec<u8>>>;

/// Values in [-1, 1) that differ from place to place.
fn values(n: usize, salt: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + salt * 104_729) % 2003) as f32 / 1001.5 - 1.0).collect()
}

/// Builds the graph; every tensor nobody reads is an output. Returns it with its weights and output widths.
fn build(rows: usize, columns: usize, ops: &[Op]) -> (KernelGraph, Weights, Vec<(String, usize)>) {
    build_on(KernelGraph::new(), rows, columns, ops)
}

/// [`build`] from an empty graph on.
fn build_on(
    mut graph: KernelGraph,
    rows: usize,
    columns: usize,
    ops: &[Op],
) -> (KernelGraph, Weights, Vec<(String, usize)>) {
    let mut weights = HashMap::new();
    let x = graph.input("x", &[rows, columns], DType::F32).unwrap();
    let mut tensors: Vec<(TensorId, usize)> = vec![(x, columns)];
    let mut read = vec![true];
    for (number, op) in ops.iter().enumerate() {
        let mut weight = |graph: &mut KernelGraph, name: &str, shape: &[usize], scale: f32| {
            let name = format!("{name}{number}");
            let len = shape.iter().product();
            let bytes =
                values(len, number).into_iter().flat_map(|x| half::bf16::from_f32(x * scale).to_ne_bytes()).collect();
            weights.insert(name.clone(), bytes);
            graph.weight(&name, shape, DType::Bf16).unwrap()
        };
        let name = format!("op{number}");
        let at = op.a % tensors.len();
        let (a, width) = tensors[at];
        // A partner of the same width, if there is one; else the tensor itself.
        let same: Vec<usize> = (0..tensors.len()).filter(|t| tensors[*t].1 == width).collect();
        let partner = same[op.b % same.len()];
        let b = tensors[partner].0;
        let scale = 1.0 / (width as f32).sqrt();
        read[at] = true;
        let made = match op.kind {
            0 => {
                let w = weight(&mut graph, "w", &[width], 1.0);
                (graph.rms_norm(&name, a, w, 1e-5).unwrap(), width)
            }
            1 => {
                let w = weight(&mut graph, "w", &[op.columns, width], scale);
                let bias = weight(&mut graph, "b", &[op.columns], 1.0);
                (graph.linear(&name, a, w, Some(bias), Activation::Gelu, None).unwrap(), op.columns)
            }
            2 => {
                read[partner] = true;
                let w = weight(&mut graph, "w", &[width, width], scale);
                (graph.linear(&name, a, w, None, Activation::None, Some(b)).unwrap(), width)
            }
            3 => {
                let gate = weight(&mut graph, "g", &[op.columns, width], scale);
                let up = weight(&mut graph, "u", &[op.columns, width], scale);
                (graph.gated_linear(&name, a, [gate, up], None, Activation::Silu).unwrap(), op.columns)
            }
            4 => {
                read[partner] = true;
                (graph.add_tensors(&name, a, b).unwrap(), width)
            }
            5 => {
                read[partner] = true;
                (graph.elementwise(&name, Function::ActivateMul, Activation::Relu, a, Some(b)).unwrap(), width)
            }
            _ => {
                read[partner] = true;
                let w = weight(&mut graph, "w", &[width], 1.0);
                let bias = weight(&mut graph, "b", &[width], 1.0);
                (graph.layer_norm(&name, a, Some(b), [w, bias], 1e-5).unwrap(), width)
            }
        };
        tensors.push(made);
        read.push(false);
    }
    let mut outputs = Vec::new();
    for (number, ((tensor, width), read)) in tensors.iter().zip(&read).enumerate() {
        if !read {
            graph.output(&format!("y{number}"), *tensor).unwrap();
            outputs.push((format!("y{number}"), *width));
        }
    }
    (graph, Arc::new(weights), outputs)
}

fn source(graph: &KernelGraph) -> Source {
    Source { name: "random".to_owned(), graph: graph.clone(), in_token_loop: false }
}

/// All outputs after `passes` passes.
fn run(
    graph: &KernelGraph,
    weights: &Weights,
    outputs: &[(String, usize)],
    rows: usize,
    device: Device,
    workers: usize,
    dawdle: Option<u64>,
) -> Vec<f32> {
    run_launching(graph, weights, outputs, rows, device, workers, dawdle, &[])
}

/// [`run`] with the operators `just_in_time` launched so.
#[allow(clippy::too_many_arguments, reason = "a graph, where it runs and how")]
fn run_launching(
    graph: &KernelGraph,
    weights: &Weights,
    outputs: &[(String, usize)],
    rows: usize,
    device: Device,
    workers: usize,
    dawdle: Option<u64>,
    just_in_time: &[String],
) -> Vec<f32> {
    let cpu = Options { dawdle, ..Options::default() };
    let (threads, just_in_time) = (Some(workers), just_in_time.to_vec());
    let config = EngineConfig { device, threads, cpu, just_in_time, ..EngineConfig::default() };
    let mut resident = Resident::new(vec![source(graph)], weights, &config).unwrap();
    let (_, x) = graph.table.buffers.iter().zip(0..).find(|(b, _)| b.name == "x").unwrap();
    let len = graph.table.buffers[x as usize].bytes as usize / 4;
    let mut found = Vec::new();
    // Twice: the second pass meets counters that have counted and an arena that has been used.
    for pass in 0..2 {
        resident.set_input("x", bytemuck::cast_slice(&values(len, 17 + pass))).unwrap();
        resident.run_once(ProgramId(0), ALL_ROWS).unwrap();
        for (name, _) in outputs {
            let output = resident.output(ProgramId(0), name).unwrap();
            found.extend(resident.read_f32(&output, rows).unwrap());
        }
    }
    found
}

proptest! {
    #![proptest_config(ProptestConfig { cases: below(48, 1) as u32, ..ProptestConfig::default() })]

    #[test]
    fn workers_compute_what_the_reference_does((rows, columns, ops) in ops(), workers in 1usize..7, seed in any::<u64>()) {
        let (graph, weights, outputs) = build(rows, columns, &ops);
        let expected = run(&graph, &weights, &outputs, rows, Device::Reference, 1, None);
        let found = run(&graph, &weights, &outputs, rows, Device::Cpu, workers, Some(seed));
        prop_assert_eq!(expected.len(), found.len());
        for (e, f) in expected.iter().zip(&found) {
            let close = (e - f).abs() <= 1e-3 * (1.0 + e.abs()) || (e.is_nan() && f.is_nan()) || e == f;
            prop_assert!(close, "{} instead of {}", f, e);
        }
    }

    /// Passes of several rows, whose products round what they read to bf16, and have the norms between them.
    #[test]
    fn a_gpu_computes_what_the_reference_does(
        (rows, columns, mut ops) in ops(),
        workers in 1usize..7,
        of_eights in any::<bool>(),
    ) {
        let unit = if of_eights { 8 } else { 1 };
        ops.iter_mut().for_each(|op| op.columns = op.columns.div_ceil(unit) * unit);
        ops.truncate(6);
        let rows = 3 * rows + 1;
        let graph = KernelGraph::with_rows(rows as u32);
        let (graph, weights, outputs) = build_on(graph, rows, columns.div_ceil(unit) * unit, &ops);
        let expected = run(&graph, &weights, &outputs, rows, Device::Reference, 1, None);
        let found = run(&graph, &weights, &outputs, rows, Device::Simt, workers, None);
        prop_assert_eq!(expected.len(), found.len());
        // Products of large values with signs of their own may be small.
        let largest = expected.iter().fold(1f32, |largest, e| largest.max(e.abs()));
        for (e, f) in expected.iter().zip(&found) {
            prop_assert!((e - f).abs() <= 0.05 * (largest + e.abs()), "{} instead of {}", f, e);
        }
    }

    /// Each operator is just-in-time or not, by a bit of `launched`.
    #[test]
    fn who_launches_a_task_changes_no_bit(
        (rows, columns, ops) in ops(),
        workers in 1usize..7,
        launched in any::<u16>(),
        seed in any::<u64>(),
    ) {
        let (graph, weights, outputs) = build(rows, columns, &ops);
        // One that reads nothing but `x` has no event to launch it.
        let config = Config { check: false, ..Config::new(Target::cpu(workers as u32)) };
        let listed = compile(vec![source(&graph)], &config).unwrap();
        let tasks = &listed.programs[0].tasks;
        let names: Vec<String> = (0..ops.len())
            .filter(|op| launched >> op & 1 == 1 && tasks.tasks_of(*op).all(|t| !tasks.waits.of(t as usize).is_empty()))
            .map(|op| listed.programs[0].blocks.ops[op].name.clone())
            .collect();
        let compiled = compile(vec![source(&graph)], &Config { check: true, just_in_time: names.clone(), ..config }).unwrap();
        let view = compiled.image.view();
        let of_names = |task: &&perpetua_shared::TaskDesc| names.iter().any(|name| name == compiled.image.op_name(task.op));
        prop_assert_eq!(view.just_in_time(0).len(), view.tasks.iter().filter(of_names).count());
        let cpu = |dawdle, names: &[String]| run_launching(&graph, &weights, &outputs, rows, Device::Cpu, workers, dawdle, names);
        let (expected, found) = (cpu(None, &[]), cpu(Some(seed), &names));
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        prop_assert_eq!(bits(&expected), bits(&found));
    }

    #[test]
    fn compiled_graphs_keep_every_law((rows, columns, ops) in ops(), workers in 1u32..40) {
        let (graph, _, _) = build(rows, columns, &ops);
        let target = Target { task_bytes: 512, column_granule: 1, ..Target::workers(workers) };
        // `check` judges law 1 on bytes, in the arena too; encoding judges the rest.
        let compiled = compile(vec![source(&graph)], &Config { check: true, ..Config::new(target) }).unwrap();
        let again = decode(compiled.image.bytes()).unwrap();
        prop_assert_eq!(&again, &compiled.image);
        let arena = &compiled.programs[0].arena;
        prop_assert!(arena.lower_bound_bytes <= arena.peak_bytes && arena.peak_bytes <= arena.without_reuse_bytes);
    }

    #[test]
    fn damaged_images_are_refused_or_harmless((rows, columns, ops) in ops(), at in any::<prop::sample::Index>(), flip in 1u8..=255) {
        let (graph, _, _) = build(rows, columns, &ops);
        let compiled = compile(vec![source(&graph)], &Config { check: false, ..Config::new(Target::workers(3)) }).unwrap();
        let mut bytes = compiled.image.bytes().to_vec();
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        // The checksum catches any single change; with it made right again, the rules decide, and nothing may panic.
        prop_assert!(decode(&bytes).is_err());
        let damaged = with_right_checksum(bytes);
        let _ = decode(&damaged);
        let _ = decode(&damaged[..at / 8 * 8]);
    }
}

/// A decoding pass and one of four rows of a small model, whose shapes are odd, and weights for it.
fn small_model(n_workers: u32) -> (Compiled, Weights) {
    model(&preset_config("tiny-odd").unwrap(), n_workers)
}

/// [`small_model`] of another config.json.
fn model(config: &serde_json::Value, n_workers: u32) -> (Compiled, Weights) {
    let config = ModelConfig::from_value(Path::new("config.json"), config).unwrap();
    let ModelConfig::Decoder(config) = config else { panic!("a model that makes text") };
    let sources = [1, 4].map(|rows| {
        let graph = decoder::build(&config, Declared::Assumed(DType::Bf16), rows, Cache::bf16(16), Head::Sample);
        Source { name: format!("rows {rows}"), graph: graph.unwrap(), in_token_loop: true }
    });
    let config = Config { check: false, ..Config::new(Target { task_bytes: 16 << 10, ..Target::workers(n_workers) }) };
    let compiled = compile(sources.into(), &config).unwrap();
    let weights = compiled.bindings.iter().filter(|binding| binding.kind == BindingKind::Weight).map(|binding| {
        let values = values(binding.bytes as usize / 2, binding.name.len());
        (binding.name.clone(), values.into_iter().flat_map(|x| half::bf16::from_f32(x / 16.0).to_ne_bytes()).collect())
    });
    let weights = Arc::new(weights.collect());
    (compiled, weights)
}

/// Whatever a pass ends with, its intermediates share bytes: every row's logits cost no more than these logits.
#[test]
fn passes_that_choose_no_token_reuse_memory_too() {
    let config = ModelConfig::from_value(Path::new("tiny-odd"), &preset_config("tiny-odd").unwrap()).unwrap();
    let ModelConfig::Decoder(config) = config else { panic!("a model that makes text") };
    const ROWS: usize = 8;
    let arena = |head| {
        let graph = decoder::build(&config, Declared::Assumed(DType::Bf16), ROWS, Cache::bf16(16), head).unwrap();
        let source = Source { name: format!("{head:?}"), graph, in_token_loop: head == Head::Sample };
        compile(vec![source], &Config { check: true, ..Config::new(Target::workers(3)) }).unwrap().programs[0]
            .arena
            .clone()
    };
    let (all, last) = (arena(Head::AllLogits), arena(Head::Sample));
    let logits = (ROWS * config.vocab_size * size_of::<f32>()).next_multiple_of(256) as u64;
    assert!(
        all.peak_bytes <= last.peak_bytes + logits,
        "{} bytes, {} beside {logits}",
        all.peak_bytes,
        last.peak_bytes
    );
    assert!(all.peak_bytes < all.without_reuse_bytes);
}

/// An image that is decoded can be run: whatever was changed in it, the reference ends, with a result or a fault, in
/// memory that is its own. Positions are the engine's word, so what the caches and the token buffer hold is left as it
/// is.
#[test]
fn what_is_decoded_can_be_run() {
    let (compiled, weights) = small_model(3);
    let header = *compiled.image.header();
    let first = (size_of::<perpetua_shared::image::ImageHeader>() + header.n_bindings as usize * 16) / 4;
    let words: Vec<u32> = bytemuck::cast_slice(compiled.image.bytes()).to_vec();
    let mut random = SmallRng::seed_from_u64(1);
    // Extents and strides of what the caches and the token buffer hold: operands come first.
    let (operands, bindings) = (compiled.image.view().operands, compiled.image.bindings());
    let is_left = |at: usize| {
        let per = size_of::<Operand>() / 4;
        operands.get((at - first) / per).is_some_and(|operand| {
            let kind = BindingKind::from_u32(bindings[operand.binding.idx()].kind);
            (at - first) % per >= 4 && matches!(kind, Some(BindingKind::State | BindingKind::Tokens))
        })
    };
    let (mut accepted, mut ran) = (0, 0);
    for _ in 0..800 {
        let mut changed = words.clone();
        for _ in 0..random.random_range(1..3) {
            let at = random.random_range(first..words.len());
            if is_left(at) {
                continue;
            }
            changed[at] = match random.random_range(0..6) {
                0 => words[at] ^ 1 << random.random_range(0..32),
                1 => words[at].wrapping_add(1),
                2 => words[at].wrapping_sub(1),
                3 => words[random.random_range(first..words.len())],
                4 => 0,
                _ => u32::MAX,
            };
        }
        let Ok(image) = decode(&with_right_checksum(bytemuck::cast_slice(&changed).to_vec())) else { continue };
        accepted += 1;
        let control = Control {
            n_tokens: 5,
            requests: [Request::greedy(2); _],
            max_context: 16,
            step: Step { program: 1, rows: 4, ..Step::default() },
            ..bytemuck::Zeroable::zeroed()
        };
        let memory = Memory::new(&compiled, &weights).unwrap();
        let mut reference = Reference::new(image, memory);
        reference.start(control);
        ran += usize::from(reference.finish().is_ok());
    }
    assert!(accepted > 20 && ran > 20, "{accepted} of the changed images were accepted, {ran} ran to their end");
}

/// What an image's words cannot hold, and names that stand for two things.
#[test]
fn declarations_that_cannot_be_are_refused() {
    let mut graph = KernelGraph::new();
    let x = graph.input("x", &[4, 8], DType::F32).unwrap();
    assert_eq!(graph.input("x", &[4, 8], DType::F32), Ok(x), "the same again");
    let said = |outcome: Result<TensorId, perpetua::graph::kernel::GraphError>| outcome.unwrap_err().to_string();
    assert!(said(graph.weight("x", &[4, 8], DType::F32)).contains("two purposes"));
    graph.constant("table", &[1.0, 2.0]).unwrap();
    assert!(said(graph.constant("table", &[1.0, 3.0])).contains("two contents"));
    assert!(said(graph.input("huge", &[usize::MAX, usize::MAX], DType::F32)).contains("huge"));
    assert!(said(graph.reshape(x, &[usize::MAX, 2])).contains("cannot be seen as"));
    // Bytes there may be, but descriptors count elements in 32 bits.
    let wide = graph.input("wide", &[1, 1 << 33], DType::F32).unwrap();
    assert!(said(graph.elementwise("relu", Function::Activate, Activation::Relu, wide, None)).contains("4294967295"));
    // A view with gaps between its columns is nothing that rows are read from.
    let gaps = graph.view(x, 0, &[4, 4], &[8, 2]).unwrap();
    assert!(said(graph.elementwise("relu", Function::Activate, Activation::Relu, gaps, None)).contains("stride 2"));
}

/// In passes of several rows a norm between products is part of them, unless somebody else wants what it makes, or
/// makes what it reads.
#[test]
fn norms_between_products_are_part_of_them() {
    let (rows, k, n) = (20, 64, 48);
    let cases =
        [("plain", 0), ("read by another", 1), ("an output", 1), ("of a sum", 1), ("of a part", 1), ("one of two", 1)];
    for (case, normed) in cases {
        let mut graph = KernelGraph::with_rows(rows as u32);
        let mut weights = HashMap::new();
        let mut weight = |graph: &mut KernelGraph, name: &str, shape: &[usize]| {
            let scale = if shape.len() > 1 { 0.2 } else { 1.0 };
            let all =
                values(shape.iter().product(), weights.len()).into_iter().map(|x| half::bf16::from_f32(x * scale));
            weights.insert(name.to_owned(), all.flat_map(|x| x.to_bits().to_ne_bytes()).collect());
            graph.weight(name, shape, DType::Bf16).unwrap()
        };
        let x = graph.input("x", &[rows, k], DType::F32).unwrap();
        let w = weight(&mut graph, "before.w", &[k, k]);
        let mut before = graph.linear("before", x, w, None, Activation::None, Some(x)).unwrap();
        if case == "of a sum" {
            before = graph.add_tensors("sum", before, x).unwrap();
        }
        if case == "of a part" {
            before = graph.view(before, 0, &[rows, n], &[k, 1]).unwrap();
        }
        let width = if case == "of a part" { n } else { k };
        let w = weight(&mut graph, "norm.w", &[width]);
        let norm = graph.rms_norm("norm", before, w, 1e-5).unwrap();
        let (w, bias) = (weight(&mut graph, "after.w", &[n, width]), weight(&mut graph, "after.b", &[n]));
        let after = graph.linear("after", norm, w, Some(bias), Activation::Gelu, None).unwrap();
        let (gate, up) = (weight(&mut graph, "gate.w", &[k, width]), weight(&mut graph, "up.w", &[k, width]));
        let gated = graph.gated_linear("gated", norm, [gate, up], None, Activation::Silu).unwrap();
        let mut outputs = vec![("after".to_owned(), n), ("gated".to_owned(), k)];
        graph.output("after", after).unwrap();
        graph.output("gated", gated).unwrap();
        if case == "read by another" {
            let sum = graph.add_tensors("twice", norm, norm).unwrap();
            graph.output("twice", sum).unwrap();
            outputs.push(("twice".to_owned(), width));
        }
        if case == "one of two" {
            let w = weight(&mut graph, "norm2.w", &[width]);
            let other = graph.rms_norm("norm2", before, w, 1e-3).unwrap();
            let w = weight(&mut graph, "after2.w", &[n, width]);
            let after = graph.linear("after2", other, w, None, Activation::None, None).unwrap();
            graph.output("after2", after).unwrap();
            outputs.push(("after2".to_owned(), n));
        }
        if case == "an output" {
            graph.output("norm", norm).unwrap();
            outputs.push(("norm".to_owned(), width));
        }
        let lowered = lower(&graph, &Target::gpu(4)).unwrap();
        let is_norm = |op: &&BlockOp| op.kernel.is_some_and(|kernel| kernel.task_type == RmsNorm::TASK_TYPE);
        assert_eq!(lowered.ops.iter().filter(is_norm).count(), normed, "{case}");
        let weights: Weights = Arc::new(weights);
        let expected = run(&graph, &weights, &outputs, rows, Device::Reference, 1, None);
        assert!(expected.iter().any(|y| y.abs() > 0.5), "{case}");
        let found = run(&graph, &weights, &outputs, rows, Device::Simt, 4, None);
        for (e, f) in expected.iter().zip(&found) {
            assert!((e - f).abs() <= 0.02 * (1.0 + e.abs()), "{case}: {f} instead of {e}");
        }
    }
}

/// What a product multiplies with may be another task's result: then nobody reads it before that task has ended, as is
/// done with weights.
#[test]
fn products_of_what_others_make_wait_for_it() {
    let (rows, k, n) = (20, 64, 48);
    let mut graph = KernelGraph::with_rows(rows as u32);
    let x = graph.input("x", &[rows, k], DType::F32).unwrap();
    let (w, v) = (graph.weight("w", &[k, k], DType::Bf16).unwrap(), graph.weight("v", &[n, k], DType::Bf16).unwrap());
    let rounded = graph.linear("rounded", x, w, None, Activation::None, None).unwrap();
    let made = graph.table.add("made", &[n, k], DType::Bf16, BufferKind::Intermediate).unwrap();
    let params = elementwise::Params {
        function: Function::Activate as u32,
        activation: Activation::Silu.number(),
        beta: 0.0,
        original: 1,
    };
    let kernel = KernelCall { task_type: Elementwise::TASK_TYPE, flags: 0, params: param_words(&params) };
    let access = |tensor, kind| Some(Access { tensor, kind, map: [Some(0), None, None] });
    let accesses = vec![access(v, AccessKind::Read), None, access(made, AccessKind::Write)];
    let (name, grid) = ("silu".to_owned(), [5, 1, 1]);
    graph
        .customized(BlockOp { name, grid, accesses, row_axis: None, rows: 0, head_axis: None, kernel: Some(kernel) })
        .unwrap();
    let y = graph.linear("y", rounded, made, None, Activation::None, None).unwrap();
    graph.output("y", y).unwrap();
    let bytes = |salt, len: usize| -> Vec<u8> {
        values(len, salt).into_iter().flat_map(|x| half::bf16::from_f32(0.2 * x).to_bits().to_ne_bytes()).collect()
    };
    let weights: Weights =
        Arc::new(HashMap::from([("w".to_owned(), bytes(1, k * k)), ("v".to_owned(), bytes(2, n * k))]));
    let compiled = compile(vec![source(&graph)], &Config::new(Target::gpu(4))).unwrap();
    let early = |name: &str| {
        let mut tasks = compiled.image.view().tasks.iter();
        tasks.find(|task| compiled.image.op_name(task.op) == name).unwrap().flags & TaskFlags::READS_EARLY != 0
    };
    assert!(early("rounded") && !early("y"));
    let outputs = [("y".to_owned(), n)];
    let expected = run(&graph, &weights, &outputs, rows, Device::Reference, 1, None);
    let found = run(&graph, &weights, &outputs, rows, Device::Simt, 4, None);
    for (e, f) in expected.iter().zip(&found) {
        assert!((e - f).abs() <= 0.02 * (1.0 + e.abs()), "{f} instead of {e}");
    }
}

/// An operator cut by hand, as a user of the library writes one: relu over the columns of x, in uneven pieces.
#[test]
fn an_operator_cut_by_hand_is_run_and_judged() {
    let params = elementwise::Params {
        function: Function::Activate as u32,
        activation: Activation::Relu.number(),
        beta: 0.0,
        original: 1,
    };
    let kernel = KernelCall { task_type: Elementwise::TASK_TYPE, flags: 0, params: param_words(&params) };
    let by_hand = |kind: AccessKind| {
        let mut graph = KernelGraph::new();
        let x = graph.input("x", &[5, 40], DType::F32).unwrap();
        let w = graph.weight("w", &[40], DType::Bf16).unwrap();
        let normed = graph.rms_norm("norm", x, w, 1e-5).unwrap();
        let y = graph.table.add("y", &[5, 40], DType::F32, BufferKind::Intermediate).unwrap();
        let access = |tensor, kind| Some(Access { tensor, kind, map: [Some(1), None, None] });
        let accesses = vec![access(normed, AccessKind::Read), None, access(y, kind)];
        let (name, grid) = ("relu".to_owned(), [7, 1, 1]);
        graph.customized(BlockOp {
            name,
            grid,
            accesses,
            row_axis: None,
            rows: 0,
            head_axis: None,
            kernel: Some(kernel),
        })?;
        graph.output("y", y).unwrap();
        Ok::<_, perpetua::graph::kernel::GraphError>(graph)
    };
    let graph = by_hand(AccessKind::Write).unwrap();
    let weights: Weights = Arc::new(HashMap::from([("w".to_owned(), vec![0x3f; 80])]));
    let outputs = [("y".to_owned(), 40)];
    let expected = run(&graph, &weights, &outputs, 5, Device::Reference, 1, None);
    let found = run(&graph, &weights, &outputs, 5, Device::Cpu, 3, Some(1));
    assert!(expected.iter().zip(&found).all(|(e, f)| (e - f).abs() < 1e-4));
    assert!(expected.iter().any(|y| *y > 0.1) && expected.iter().all(|y| *y >= 0.0));
    // Said to be read where the kernel writes, it would be ordered with nothing.
    let error = by_hand(AccessKind::Read).unwrap_err().to_string();
    assert!(error.contains("operand `y` is given as Read, expected Write"), "{error}");
}

/// A graph of one's own with experts, of which there may be one; and their weights, which lie apart, read back as one
/// tensor.
#[test]
fn experts_are_a_stack_of_weights() {
    for (experts, chosen) in [(1, 1), (5, 2)] {
        let [rows, k, n] = [4, 24, 16];
        let mut graph = KernelGraph::new();
        let x = graph.input("x", &[rows, k], DType::F32).unwrap();
        let logits = graph.view(x, 3, &[rows, experts], &[k, 1]).unwrap();
        let mut weights = HashMap::new();
        let mut stack = |name: &str, seed: usize, shape: [usize; 2]| {
            for number in 0..experts {
                let all = values(shape[0] * shape[1], seed + number).into_iter().map(half::bf16::from_f32);
                let bytes: Vec<u8> = all.flat_map(|value| value.to_bits().to_ne_bytes()).collect();
                weights.insert(name.replace('*', &number.to_string()), bytes);
            }
            graph.weight_stack(name, experts, shape, DType::Bf16).unwrap()
        };
        let (gate, up, down) = (stack("*.gate", 10, [n, k]), stack("*.up", 20, [n, k]), stack("*.down", 30, [k, n]));
        let (counting, gating) = (Counting::of(Weighting::All), Gating::of(Activation::Silu.number()));
        let (biases, residual, correction) = (None, None, None);
        let args = ExpertArgs { logits, correction, gate, up, down, biases, residual, chosen, counting, gating };
        let y = graph.experts("experts", x, args).unwrap();
        graph.output("y", y).unwrap();
        graph.output("down", down).unwrap();
        assert!(graph.weight_stack("gate", 2, [n, k], DType::Bf16).unwrap_err().to_string().contains("has no `*`"));
        let last = weights[&format!("{}.down", experts - 1)].clone();
        let weights: Weights = Arc::new(weights);
        let expected = run(&graph, &weights, &[("y".to_owned(), k)], rows, Device::Reference, 1, None);
        assert!(expected.iter().any(|y| y.abs() > 1e-2));
        for (device, workers) in [(Device::Cpu, 3), (Device::Simt, 4)] {
            let found = run(&graph, &weights, &[("y".to_owned(), k)], rows, device, workers, None);
            let is_near = |(e, f): (&f32, &f32)| (e - f).abs() <= 1e-4 * (1.0 + e.abs());
            assert!(expected.iter().zip(&found).all(is_near), "{device:?}: {found:?}, expected {expected:?}");
        }
        for device in [Device::Reference, Device::Cpu] {
            let read = run(&graph, &weights, &[("down".to_owned(), k)], experts, device, 1, None);
            let read: Vec<u8> = read[read.len() - k * n..]
                .iter()
                .flat_map(|value| half::bf16::from_f32(*value).to_bits().to_ne_bytes())
                .collect();
            assert_eq!(read, last, "{device:?}: the last expert's");
        }
    }
}

/// What a host may do while workers run: look how far they are, read the tokens that it has seen counted, stop them, go
/// away.
#[test]
fn a_host_follows_the_token_loop() {
    let mut config = preset_config("tiny-simt").unwrap();
    let sizes = [
        ("vocab_size", 12),
        ("hidden_size", 8),
        ("intermediate_size", 8),
        ("num_attention_heads", 2),
        ("num_key_value_heads", 1),
        ("head_dim", 4),
    ];
    sizes.into_iter().for_each(|(name, size)| config[name] = size.into());
    let (compiled, weights) = model(&config, 3);
    let memory = Memory::new(&compiled, &weights).unwrap();
    let options = Options { dawdle: Some(1), ..Options::default() };
    let mut threads = Threads::new(compiled.image, memory, options).unwrap();
    // A prompt of five zeros, in a pass of four and one that makes the first token.
    let step = Step { program: 1, rows: 4, ..Step::default() };
    let requests = [Request::greedy(3); _];
    let control = Control { n_tokens: 5, requests, max_context: 16, step, ..bytemuck::Zeroable::zeroed() };
    threads.start(control);
    assert_eq!(threads.finish().unwrap().end, End::MaxTokens as u32);
    let expected: Vec<u32> = (5..8).map(|position| threads.token(position)).collect();

    // Again, on counters that have counted.
    threads.start(control);
    let (mut seen, mut position) = (Vec::new(), 0);
    while threads.is_running() || seen.len() < threads.produced() as usize {
        assert!((position..=8).contains(&threads.position()), "positions only grow");
        position = threads.position();
        if seen.len() < threads.produced() as usize {
            seen.push(threads.token(5 + seen.len()));
        } else {
            threads.rest();
        }
    }
    assert_eq!(seen, expected);
    assert_eq!(threads.finish().unwrap().produced, 3);
    threads.start(control);
    threads.stop();
    let stopped = threads.finish().unwrap();
    assert!(stopped.end == End::Stopped as u32 || stopped.produced == 3, "{} tokens", stopped.produced);
    // From another thread; and of a run that has ended it stops none.
    let stopper = Stopper::default();
    threads.start_with(control, &stopper);
    std::thread::scope(|scope| _ = scope.spawn(|| stopper.stop()));
    let stopped = threads.finish().unwrap();
    assert!(stopped.end == End::Stopped as u32 || stopped.produced == 3, "{} tokens", stopped.produced);
    threads.start(control);
    stopper.stop();
    assert_eq!(threads.finish().unwrap().end, End::MaxTokens as u32);
    // One that has been told before ends the run with its first pass, which makes no token.
    threads.start_with(control, &stopper);
    let stopped = threads.finish().unwrap();
    assert_eq!((stopped.end, stopped.produced), (End::Stopped as u32, 0));
    threads.start(control);
    drop(threads);
}

/// Memory is made for one image, and no other is run on it.
#[test]
#[should_panic(expected = "memory of its own compilation")]
fn an_image_runs_on_no_other_memory() {
    let (compiled, weights) = small_model(2);
    let (graph, _, _) = build(2, 8, &[]);
    let other = compile(vec![source(&graph)], &Config::new(Target::workers(2))).unwrap();
    Reference::new(other.image, Memory::new(&compiled, &weights).unwrap());
}

/// [`Image::decode`]: what comes of it is run by one thread at most.
fn decode(bytes: &[u8]) -> Result<Image, ImageError> {
    // SAFETY: without another thread there is nothing to order.
    unsafe { Image::decode(bytes) }
}

/// Puts the checksum the contents have into the header.
fn with_right_checksum(mut bytes: Vec<u8>) -> Vec<u8> {
    if let Err(ImageError::Checksum { found, .. }) = decode(&bytes) {
        let at = std::mem::offset_of!(perpetua_shared::image::ImageHeader, checksum);
        bytes[at..at + 8].copy_from_slice(&found.to_ne_bytes());
    }
    bytes
}

/// Each rule of `image::check` refuses an image that breaks it.
#[test]
fn broken_rules_are_named() {
    let ops: Vec<Op> = (0..6).map(|i| Op { kind: i % 4, a: i as usize, b: 0, columns: 40 }).collect();
    let (graph, _, _) = build(3, 64, &ops);
    let target = Target { task_bytes: 512, ..Target::workers(3) };
    let image = compile(vec![source(&graph)], &Config { check: true, ..Config::new(target) }).unwrap().image;
    let header = *image.header();
    // Sections in order; see perpetua_shared::image.
    let mut at = size_of::<perpetua_shared::image::ImageHeader>();
    let mut section = |n: u32, size: usize| {
        let start = at;
        at = (start + n as usize * size).next_multiple_of(8);
        start
    };
    let _bindings = section(header.n_bindings, 16);
    let operands = section(header.n_operands, 48);
    let programs = section(header.n_programs, 24);
    let tasks = section(header.n_tasks, size_of::<perpetua_shared::TaskDesc>());
    let events = section(header.n_events, 4);
    let waits = section(header.n_waits, 4);
    let triggers = section(header.n_triggers, 4);
    let _heads = section(header.n_programs * (header.n_workers + 2), 4);
    let lists = section(header.n_list_entries, 4);
    let changed = |at: usize, word: u32| {
        let mut bytes = image.bytes().to_vec();
        bytes[at..at + 4].copy_from_slice(&word.to_ne_bytes());
        match decode(&with_right_checksum(bytes)) {
            Err(ImageError::Rules(broken)) => broken[0].to_string(),
            other => panic!("expected broken rules, found {other:?}"),
        }
    };
    assert!(changed(operands, 0xFFFF_FFFC).contains("ends at byte"));
    assert!(changed(operands, 1).contains("not aligned"));
    assert!(changed(operands + 8, 77).contains("binding b77 does not exist"));
    assert!(changed(programs + 4, 1).contains("starts at task"));
    assert!(changed(tasks, 60_000).contains("does not exist"));
    assert!(changed(tasks + 24, u32::MAX).contains("outside their tables"));
    assert!(changed(events + 8, 99).contains("fires at 99 triggers"));
    assert!(changed(events + 4, 1).contains("tasks trigger it"));
    assert!(changed(triggers, 0).contains("not its program's"));
    assert!(changed(waits, u32::MAX).contains("not its program's"));
    let second = u32::from_ne_bytes(image.bytes()[lists + 4..lists + 8].try_into().unwrap());
    assert!(changed(lists, second).contains("twice"));
    // A task that waits on what it triggers itself never starts.
    let view = image.view();
    let own = view.tasks.iter().find(|t| t.wait_count > 0 && t.trigger_count > 0).unwrap();
    let trigger = view.triggers[own.trigger_first as usize];
    assert!(changed(waits + own.wait_first as usize * 4, trigger).contains("stops after"));
}
