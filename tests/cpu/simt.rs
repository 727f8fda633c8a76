//! The persistent kernel's own code on the simulated GPU: the whole pass through the real worker loop, and images whose
//! events do not order what they must.

use crate::interpreted::{cases, random_model};
use perpetua::compile::{Compiled, Config, Source, compile};
use perpetua::engine::decoder_sources;
use perpetua::exec::memory::Memory;
use perpetua::exec::simt::{Options, Simt};
use perpetua::exec::{Executor, RunError, Stopper};
use perpetua::graph::lower::Target;
use perpetua::graph::tensor::BufferKind;
use perpetua::graph::threadblock::{AccessKind, BlockOp, KernelCall};
use perpetua::image::encode::{self, Parts};
use perpetua::image::{Image, ImageError};
use perpetua::model::ModelConfig;
use perpetua::model::decoder::{self, Cache, Declared, Head};
use perpetua::model::synth::preset_config;
use perpetua::model::{Quantize, SynthOptions, SynthSource, synth};
use perpetua::{Device, Engine, EngineConfig, GenerateOptions, Model};
use perpetua_device::advance::step_from;
use perpetua_device::kernels::{self, Attention, DecodeAttention, Numbered, Spec, Use, attention};
use perpetua_shared::control::{Control, End, Request, Step};
use perpetua_shared::image::BindingKind;
use perpetua_shared::launch::TILE_BYTES;
use perpetua_shared::{DType, DataOp, TaskFlags, Technique, Techniques, WorkerId};
use proptest::prelude::*;
use std::collections::{BTreeSet, HashMap};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;

/// Sizes of a network in which `tiny-simt`'s stand but for these.
type Sizes = &'static [(&'static str, usize)];

/// A network small enough for a debug build, of sizes that fit nothing.
const SMALL: Sizes = &[("num_hidden_layers", 2)];

/// Another, whose rows bulk copies and warpgroups can carry.
pub(crate) const MANY_ROWS: Sizes = &[
    ("num_hidden_layers", 2),
    ("hidden_size", 72),
    ("intermediate_size", 152),
    ("head_dim", 16),
    ("max_position_embeddings", 256),
];

/// A network of which a worker's share fills its shared memory more than once.
pub(crate) const WIDE: Sizes = &[
    ("num_hidden_layers", 2),
    ("hidden_size", 128),
    ("intermediate_size", 640),
    ("head_dim", 32),
    ("vocab_size", 512),
];

fn small() -> (tempfile::TempDir, Model) {
    model(SMALL)
}

pub(crate) fn model(sizes: Sizes) -> (tempfile::TempDir, Model) {
    model_of("tiny-simt", sizes, 0)
}

/// A model of `preset`'s sizes but for these, its weights drawn from `seed`.
pub(crate) fn model_of(preset: &str, sizes: &[(&str, usize)], seed: u64) -> (tempfile::TempDir, Model) {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let mut json = preset_config(preset).expect("a preset");
    for (key, size) in sizes {
        json[*key] = (*size).into();
    }
    let config = dir.path().join("small.json");
    std::fs::write(&config, json.to_string()).expect("written");
    let out = dir.path().join("small");
    let options = SynthOptions { seed, ..SynthOptions::default() };
    synth(SynthSource::Config(&config), &out, &options, &mut |_, _| ControlFlow::Continue(()))
        .expect("the config is sound");
    let model = Model::load(&out).expect("just written");
    (dir, model)
}

/// The same, its weights in one of `dtypes` after the other.
pub(crate) fn recast((dir, model): (tempfile::TempDir, Model), dtypes: &[DType]) -> (tempfile::TempDir, Model) {
    use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
    drop(model);
    let out = dir.path().join("small");
    let path = out.join("model.safetensors");
    let bytes = std::fs::read(&path).expect("written");
    let file = SafeTensors::deserialize(&bytes).expect("sound");
    let cast = |dtype: DType, view: &TensorView<'_>| -> (Dtype, Vec<u8>) {
        let values = view.data().chunks_exact(2).map(|two| half::bf16::from_le_bytes([two[0], two[1]]).to_f32());
        match dtype {
            DType::Bf16 => (Dtype::BF16, view.data().to_vec()),
            DType::F16 => (Dtype::F16, values.flat_map(|x| half::f16::from_f32(x).to_le_bytes()).collect()),
            _ => (Dtype::F32, values.flat_map(f32::to_le_bytes).collect()),
        }
    };
    let named = file.tensors().into_iter().zip(dtypes.iter().cycle());
    let all: Vec<_> = named.map(|((name, view), dtype)| (name, view.shape().to_vec(), cast(*dtype, &view))).collect();
    let views = all.iter().map(|(name, shape, (dtype, bytes))| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).expect("as long"))
    });
    std::fs::write(&path, serialize(views, None).expect("sound")).expect("written");
    let model = Model::load(&out).expect("just written");
    (dir, model)
}

/// The model cut finely, so that tasks of several blocks meet.
fn compiled(model: &Model, workers: u32, rows: usize) -> Compiled {
    compiled_for(model, Target { task_bytes: 1 << 10, ..Target::workers(workers) }, rows)
}

fn compiled_for(model: &Model, target: Target, rows: usize) -> Compiled {
    let sources = decoder_sources(model, &[rows], Cache::bf16(32), Head::AllLogits).expect("a sound model");
    compile(sources, &Config::new(target)).expect("it compiles")
}

fn one_pass(rows: u32) -> Control {
    let step = Step { rows, ..Step::default() };
    Control { n_tokens: rows, max_context: 32, step, ..bytemuck::Zeroable::zeroed() }
}

const IDS: [u32; 7] = [3, 80, 41, 5, 5, 0, 66];

fn run_simt(model: &Model, compiled: &Compiled, image: Image, options: Options) -> Result<(Vec<f32>, Simt), RunError> {
    run_simt_on(&IDS, model, compiled, image, options)
}

fn run_simt_on(
    ids: &[u32],
    model: &Model,
    compiled: &Compiled,
    image: Image,
    options: Options,
) -> Result<(Vec<f32>, Simt), RunError> {
    let memory = Memory::new(compiled, model).expect("a small model");
    let mut simt = Simt::new(image, memory, options);
    simt.set_tokens(0, ids);
    simt.start(one_pass(ids.len() as u32));
    let control = simt.finish()?;
    assert_eq!(control.end, End::PromptDone as u32);
    let (_, output) = compiled.programs[0].outputs.iter().find(|(name, _)| name == "logits").expect("an output");
    let logits = simt.memory().read_f32(output, ids.len());
    Ok((logits, simt))
}

/// Both keep the cache in bf16, so a last bit may turn there.
fn close(expected: &[f32], found: &[f32], what: &str) {
    assert_eq!(expected.len(), found.len());
    for (at, (a, b)) in expected.iter().zip(found).enumerate() {
        assert!((a - b).abs() <= 4e-3 + 4e-3 * a.abs(), "{what}: logit {at} is {b}, expected {a}");
    }
}

/// Products of several rows may have rounded what they multiply, with a relative error of 2^-9 and every product adding
/// to it.
fn near(expected: &[f32], found: &[f32], what: &str) {
    let rms = |values: &mut dyn Iterator<Item = f32>| (values.map(|x| x * x).sum::<f32>() / found.len() as f32).sqrt();
    let off = rms(&mut expected.iter().zip(found).map(|(a, b)| a - b));
    let size = rms(&mut expected[..found.len()].iter().copied());
    assert!(off <= 0.01 * size, "{what}: logits off by {off}, of {size}");
}

/// The logits of all of [`IDS`] on CPU threads.
fn on_the_cpu(model: &Model) -> Vec<f32> {
    let config = EngineConfig {
        device: Device::Cpu,
        threads: Some(2),
        all_logits: true,
        max_context: Some(32),
        chunks: vec![IDS.len()],
        ..EngineConfig::default()
    };
    Engine::new(model, &config).expect("it compiles").logits(&IDS, |_| ()).expect("it runs")
}

#[test]
fn every_number_of_workers_computes_what_the_cpu_does() {
    let (_dir, model) = small();
    let expected = on_the_cpu(&model);
    // Cut finely; and as for a GPU, where tasks whose users are all their own worker's have no event between them.
    let fine =
        [1, 4, 7].map(|workers| (workers, compiled(&model, workers, IDS.len()), close as fn(&[f32], &[f32], &str)));
    let coarse = [3, 5].map(|workers| (workers, compiled_for(&model, Target::gpu(workers), IDS.len()), near as _));
    for (workers, compiled, judge) in fine.into_iter().chain(coarse) {
        let mut first: Option<Vec<f32>> = None;
        for (seed, block_threads) in [(1, 64), (2, 64), (3, 64), (4, 32)] {
            let options = Options { seed, block_threads: Some(block_threads), ..Options::default() };
            let (logits, simt) = run_simt(&model, &compiled, compiled.image.clone(), options)
                .unwrap_or_else(|error| panic!("{workers} workers, seed {seed}: {error}"));
            judge(&expected, &logits, &format!("{workers} workers"));
            assert_eq!(simt.report().stall, None, "{workers} workers, seed {seed}: somebody slept through a change");
            // Sums depend on how many threads take part, on the schedule nothing does.
            if let (Some(first), 64) = (&first, block_threads) {
                assert!(*first == logits, "{workers} workers: seed {seed} gives other bits");
            }
            first = Some(logits);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    /// Whatever the sizes and the type of the weights, a prompt and the tokens after it race with nothing: bodies that
    /// use the tiles' memory in one pass leave it to the copies of the next.
    #[test]
    fn random_models_read_a_prompt_and_go_on(case in cases()) {
        let (_dir, model) = random_model(&case);
        let n = case.n_tokens.min(40) as u32;
        let ids: Vec<u32> = (0..n).map(|at| (at * 37 + 5) % 269).collect();
        let config = EngineConfig {
            device: Device::Simt,
            threads: Some(case.n_sms as usize),
            max_context: Some(48),
            ..EngineConfig::default()
        };
        let mut engine = Engine::new(&model, &config).expect("it compiles");
        let options = GenerateOptions { max_new_tokens: 3, ..GenerateOptions::default() };
        let tokens: Result<Vec<_>, _> = engine.generate(&ids, &options).expect("it starts").collect();
        prop_assert!(tokens.is_ok(), "{}", tokens.expect_err("it failed"));
    }
}

/// A prompt long enough for warpgroups, of sizes that fill no part: activations that only products read are bf16,
/// products are cut along rows as well, and the logits are the CPU's but for that rounding. Blocks too small for a
/// warpgroup multiply warp by warp; the blocks of rows that a shorter prompt lacks do nothing.
#[test]
fn many_rows_go_to_the_tensor_cores() {
    let (_dir, model) = model(MANY_ROWS);
    let (rows, context) = (150, 160);
    let ids: Vec<u32> = (0..rows as u32).map(|at| (at * 37 + 11) % 269).collect();
    let cpu = EngineConfig {
        device: Device::Cpu,
        threads: Some(2),
        all_logits: true,
        max_context: Some(context),
        chunks: vec![rows],
        ..EngineConfig::default()
    };
    let expected = Engine::new(&model, &cpu).expect("it compiles").logits(&ids, |_| ()).expect("it runs");
    for (workers, tokens, block_threads) in [(7, rows, 224), (7, rows, 64), (3, 40, 160)] {
        let sources = decoder_sources(&model, &[rows], Cache::bf16(context), Head::AllLogits).expect("a sound model");
        let config = Config { check: true, ..Config::new(Target::gpu(workers)) };
        let compiled = compile(sources, &config).expect("it compiles");
        let blocks = &compiled.programs[0].blocks;
        let products = blocks.ops.iter().filter(|op| op.row_axis == Some(1) && op.grid[1] > 1);
        assert!(products.count() >= 7, "products cut along rows");
        // Of each of two layers: both norms, the attention and what the gates open; and the last norm.
        let rounded = |t: &&perpetua::graph::tensor::DTensor| {
            let kind = &blocks.table.buffers[t.buffer.idx()].kind;
            t.dtype == perpetua_shared::DType::Bf16 && *kind == perpetua::graph::tensor::BufferKind::Intermediate
        };
        assert!(blocks.table.tensors.iter().filter(rounded).count() >= 9);
        let memory = Memory::new(&compiled, &model).expect("a small model");
        let options = Options { block_threads: Some(block_threads), ..Options::default() };
        let mut simt = Simt::new(compiled.image.clone(), memory, options);
        simt.set_tokens(0, &ids[..tokens]);
        let step = Step { rows: tokens as u32, ..Step::default() };
        let control =
            Control { n_tokens: tokens as u32, max_context: context as u32, step, ..bytemuck::Zeroable::zeroed() };
        simt.start(control);
        simt.finish().unwrap_or_else(|error| panic!("{workers} workers: {error}"));
        let multiplied = simt.report().products > 0;
        assert_eq!(multiplied, block_threads >= 160, "{:?}", simt.report());
        let (_, output) = compiled.programs[0].outputs.iter().find(|(name, _)| name == "logits").expect("an output");
        let logits = simt.memory().read_f32(output, tokens);
        near(&expected, &logits, &format!("{workers} workers"));
    }
}

/// Attention and the products after it launched by the blocks' schedulers: the logits have the bits they have when
/// every task stands in a list, with four workers and with more schedulers than there are tasks to launch.
#[test]
fn who_launches_a_task_changes_no_bit() {
    let (_dir, model) = small();
    for workers in [1, 4, 9] {
        let source = || decoder_sources(&model, &[IDS.len()], Cache::bf16(32), Head::AllLogits).expect("a sound model");
        let target = Target { task_bytes: 1 << 10, ..Target::workers(workers) };
        let config = Config { check: true, ..Config::new(target) };
        let listed = compile(source(), &config).expect("it compiles");
        let expected = run_simt(&model, &listed, listed.image.clone(), Options::default()).expect("it runs").0;
        let just_in_time = vec!["attention".to_owned(), "gated_linear".to_owned()];
        let launched = compile(source(), &Config { just_in_time, ..config }).expect("it compiles");
        assert!(launched.image.view().just_in_time(0).len() >= 4);
        for seed in 1..4 {
            let options = Options { seed, ..Options::default() };
            let (logits, simt) = run_simt(&model, &launched, launched.image.clone(), options)
                .unwrap_or_else(|error| panic!("{workers} workers, seed {seed}: {error}"));
            assert!(logits == expected, "{workers} workers, seed {seed}: other bits");
            assert_eq!(simt.report().stall, None, "{workers} workers, seed {seed}: somebody slept through a change");
        }
    }
}

/// The iteration in which the time is over is the last.
#[test]
fn a_deadline_ends_the_token_loop() {
    let (_dir, model) = small();
    let config = EngineConfig {
        device: Device::Simt,
        threads: Some(3),
        max_context: Some(24),
        chunks: vec![4],
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(&model, &config).expect("it compiles");
    let mut run = |n, max_time| {
        let options = GenerateOptions {
            max_new_tokens: n,
            max_time,
            stop_tokens: Some(Vec::new()),
            ..GenerateOptions::default()
        };
        let mut generation = engine.generate(&IDS[..6], &options).expect("it starts");
        let made: Vec<u32> = generation.by_ref().map(|token| token.expect("it runs").id).collect();
        (made, generation.end())
    };
    let (expected, end) = run(2, None);
    assert_eq!(end, Some(End::MaxTokens));
    assert_eq!(run(18, Some(Duration::ZERO)), (vec![], Some(End::Deadline)), "a pass reads 4 of the prompt's 6 tokens");
    // All of its tokens take a second here.
    let (made, end) = run(18, Some(Duration::from_millis(30)));
    assert_eq!(end, Some(End::Deadline), "{} tokens", made.len());
    assert!(made.len() < 18 && made.iter().zip(&expected).all(|(a, b)| a == b), "{made:?}, {expected:?}");
    assert_eq!(run(2, Some(Duration::MAX)), (expected, Some(End::MaxTokens)));
}

/// While this one runs it; and of an earlier run it stops none.
#[test]
fn another_thread_stops_the_token_loop() {
    let (_dir, model) = small();
    let sources = decoder_sources(&model, &[4], Cache::bf16(24), Head::Sample).expect("a sound model");
    let compiled = compile(sources, &Config::new(Target::workers(3))).expect("it compiles");
    let memory = Memory::new(&compiled, &model).expect("a small model");
    let mut simt = Simt::new(compiled.image.clone(), memory, Options::default());
    simt.set_tokens(0, &IDS[..6]);
    let mut run = |max_new_tokens, stopper: &Stopper| {
        let requests = [Request::greedy(max_new_tokens); _];
        let mut control = Control { n_tokens: 6, requests, max_context: 24, ..bytemuck::Zeroable::zeroed() };
        control.step = step_from(&control, compiled.image.view().programs, 0, 0);
        simt.start_with(control, stopper);
        let control = simt.finish().expect("it runs");
        (End::from_u32(control.end), control.produced)
    };
    let early = Stopper::default();
    let (end, produced) = std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(30));
            early.stop();
        });
        run(18, &early)
    });
    // All of its tokens take a second here.
    assert!(end == Some(End::Stopped) && produced < 18, "{end:?} after {produced} tokens");
    early.stop();
    assert_eq!(run(2, &Stopper::default()), (Some(End::MaxTokens), 2));
}

/// The whole token loop, where passes with and without just-in-time tasks take turns.
#[test]
fn the_token_loop_launches_attention_just_in_time() {
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny-qwen3");
    let model = Model::load(fixture).expect("committed");
    let tokens = |just_in_time: &[&str]| {
        let config = EngineConfig {
            device: Device::Simt,
            threads: Some(4),
            max_context: Some(16),
            chunks: vec![4],
            just_in_time: just_in_time.iter().map(|name| name.to_string()).collect(),
            ..EngineConfig::default()
        };
        let mut engine = Engine::new(&model, &config).expect("it compiles");
        let options = GenerateOptions { max_new_tokens: 3, stop_tokens: Some(vec![]), ..GenerateOptions::default() };
        let made = engine.generate(&IDS[..5], &options).expect("it starts");
        made.map(|token| token.expect("it runs").id).collect::<Vec<_>>()
    };
    assert_eq!(tokens(&["attention"]), tokens(&[]));
}

/// Two heads and nine workers: several splits of a head's positions, some of them without any in the first passes,
/// merged by every block of the product that reads them, or by tasks of their own.
#[test]
fn attention_split_over_workers_computes_what_the_cpu_does() {
    // By the product that reads what was found, or by tasks of their own, a head each.
    let gpu = || Target { split_positions: 8, ..Target::gpu(9) };
    for ((_dir, model), splits, merges, target) in
        [(model(WIDE), 3, None, gpu()), (small(), 3, Some(2), Target { hop_bytes: 0, ..gpu() })]
    {
        split_attention(&model, splits, merges, target);
    }
}

fn split_attention(model: &Model, splits: u32, merges: Option<u32>, target: Target) {
    let expected = on_the_cpu(model);
    let compiled = compiled_for(model, target, 1);
    let program = &compiled.programs[0];
    let of = |kernel: &str| {
        let is = |op: &&perpetua::graph::threadblock::BlockOp| {
            op.kernel.and_then(|kernel| Spec::of(kernel.task_type)).is_some_and(|spec| spec.name == kernel)
        };
        program.blocks.ops.iter().filter(is).map(|op| op.grid).collect::<Vec<_>>()
    };
    let attention = (of("decode_attention"), of("attention_merge"));
    // A block for each of a head's two queries.
    let merges = merges.map_or(Vec::new(), |n| vec![[n, 2, 1]; 2]);
    assert_eq!(attention, (vec![[2, splits, 1]; 2], merges));
    // Norms and rotations are done by who needs them.
    assert!(of("rms_norm").is_empty() && of("rope").is_empty());
    let (_, output) = program.outputs.iter().find(|(name, _)| name == "logits").expect("an output");
    for seed in 1..4 {
        let memory = Memory::new(&compiled, model).expect("a small model");
        let options = Options { seed, block_threads: Some(64), ..Options::default() };
        let mut simt = Simt::new(compiled.image.clone(), memory, options);
        simt.set_tokens(0, &IDS);
        let mut logits = Vec::new();
        for position in 0..IDS.len() as u32 {
            let mut control = one_pass(1);
            (control.n_tokens, control.step.first_pos) = (position + 1, position);
            simt.start(control);
            let control = simt.finish().unwrap_or_else(|error| panic!("seed {seed}, position {position}: {error}"));
            assert_eq!(control.end, End::PromptDone as u32);
            logits.extend(simt.memory().read_f32(output, 1));
        }
        close(&expected, &logits, "split");
    }
}

/// The product that makes the logits finds the largest of them itself, each block its own; only the choice among these
/// is left.
#[test]
fn the_search_for_the_next_token_is_the_last_products() {
    let (_dir, model) = model(WIDE);
    let sources = decoder_sources(&model, &[1], Cache::bf16(32), Head::Sample).expect("a sound model");
    let compiled = compile(sources, &Config { check: true, ..Config::new(Target::gpu(9)) }).expect("it compiles");
    let blocks = &compiled.programs[0].blocks;
    let spec = |op: &perpetua::graph::threadblock::BlockOp| Spec::of(op.kernel.expect("a kernel").task_type);
    let named =
        |name: &str| blocks.ops.iter().filter(|op| spec(op).is_some_and(|spec| spec.name == name)).collect::<Vec<_>>();
    assert!(named("argmax_partial").is_empty());
    // And it reads its row where the last layer left it.
    assert!(named("select_row").is_empty());
    let (choices, products) = (named("sample"), named("linear"));
    let ([sample], [.., product]) = (&choices[..], &products[..]) else { panic!("one choice a pass") };
    for slot in [1, 2] {
        let found = sample.accesses[slot].as_ref().expect("what blocks found").tensor;
        assert_eq!(blocks.table[found].shape[..], [9]);
        assert_eq!(product.accesses[slot + 5].as_ref().map(|access| access.tensor), Some(found));
    }
    assert_eq!(product.grid, [9, 1, 1]);
}

#[test]
fn the_token_loop_runs_inside_the_kernel() {
    let (_dir, model) = small();
    let make = |device, threads, options: &GenerateOptions| -> Vec<u32> {
        let config = EngineConfig {
            device,
            threads: Some(threads),
            max_context: Some(24),
            // One by one: several rows' products round what they multiply.
            chunks: vec![1],
            ..EngineConfig::default()
        };
        let mut engine = Engine::new(&model, &config).expect("it compiles");
        // Twice: counters go on counting from run to run.
        let runs: Vec<Vec<u32>> = (0..2)
            .map(|_| engine.generate(&IDS, options).expect("sound").map(|token| token.expect("it runs").id).collect())
            .collect();
        assert_eq!(runs[0], runs[1]);
        runs[0].clone()
    };
    let greedy = GenerateOptions { max_new_tokens: 4, stop_tokens: Some(Vec::new()), ..GenerateOptions::default() };
    assert_eq!(make(Device::Simt, 3, &greedy), make(Device::Cpu, 2, &greedy));
    let repetition_penalty = Some(1.2);
    let drawn = GenerateOptions { temperature: 0.8, top_p: 0.9, top_k: 20, seed: 9, repetition_penalty, ..greedy };
    assert_eq!(make(Device::Simt, 2, &drawn), make(Device::Cpu, 2, &drawn));
}

/// Lets one task at a time go without its waits (the program's last task waits for those events in its stead, so the
/// image breaks no rule): what the task reads is then read too early, or what it writes is still read, and the
/// simulator must say so, unless the worker's own order is enough.
#[test]
fn a_wait_left_out_is_a_race() {
    let (_dir, model) = small();
    let compiled = compiled(&model, 4, IDS.len());
    assert!(!is_unordered(&compiled.image, true), "the image as compiled is ordered");
    let (mut caught, mut harmless) = (0, 0);
    let last = compiled.image.view().tasks.len() - 1;
    for task in 0..last {
        let mut parts = Parts::of(&compiled.image);
        let waits = compiled.image.view().waits(&parts.tasks[task]);
        if waits.is_empty() {
            continue;
        }
        let all = [compiled.image.view().waits(&parts.tasks[last]), waits].concat();
        parts.tasks[last].wait_first = parts.waits.len() as u32;
        parts.tasks[last].wait_count = all.len() as u16;
        parts.waits.extend(all);
        parts.tasks[task].wait_count = 0;
        let image = encode(&parts).unwrap_or_else(|error| panic!("t{task}: {error}"));
        // What a task touches of the cache is less than its operands say.
        let (is_race, may_race) = (is_unordered(&image, false), is_unordered(&image, true));
        match run_simt(&model, &compiled, image, Options { seed: task as u64, ..Options::default() }) {
            Err(RunError::Defect { what, .. }) => {
                assert!(what.starts_with("Race") || what.starts_with("Poison"), "{what}");
                assert!(may_race, "t{task}: nothing is wrong, but: {what}");
                caught += 1;
            }
            Err(other) => panic!("{other}"),
            Ok(_) => {
                assert!(!is_race, "t{task}: a race was not seen");
                harmless += 1;
            }
        }
    }
    println!("{caught} caught, {harmless} harmless");
    assert!(caught >= 5, "{caught} caught, {harmless} harmless");
}

/// Whether two tasks of `image` touch the same bytes of the arena (or the cache, if `with_state`), one of them writing,
/// and neither the workers' lists nor the events order them: reachability, by brute force. What an operator's tasks
/// append to is each one's own.
fn is_unordered(image: &Image, with_state: bool) -> bool {
    let view = image.view();
    let n = view.tasks.len();
    let mut after: Vec<Vec<usize>> = vec![Vec::new(); n];
    for worker in 0..view.n_workers {
        for pair in view.list(0, WorkerId(worker)).windows(2) {
            after[pair[0] as usize].push(pair[1] as usize);
        }
    }
    for (from, to) in (0..n).flat_map(|from| (0..n).map(move |to| (from, to))) {
        let triggers = view.triggers(&view.tasks[from]);
        if view.waits(&view.tasks[to]).iter().any(|event| triggers.contains(event)) {
            after[from].push(to);
        }
    }
    let reach: Vec<Vec<bool>> = (0..n)
        .map(|from| {
            let (mut seen, mut left) = (vec![false; n], vec![from]);
            while let Some(task) = left.pop() {
                for next in &after[task] {
                    if !std::mem::replace(&mut seen[*next], true) {
                        left.push(*next);
                    }
                }
            }
            seen
        })
        .collect();
    let mut touched: HashMap<(u32, u64), Vec<(usize, Use)>> = HashMap::new();
    for (number, task) in view.tasks.iter().enumerate() {
        let spec = Spec::of(task.task_type).expect("a known kernel");
        let operands: Vec<_> = view.operands(task).iter().collect();
        for (slot, operand) in operands.iter().enumerate() {
            let usage = kernels::use_of(spec, slot, |slot| operands[slot].is_present());
            let kind = BindingKind::from_u32(image.bindings()[operand.binding.idx()].kind);
            let counts = kind == Some(BindingKind::Arena) || (with_state && kind == Some(BindingKind::State));
            let Some(dtype) = operand.dtype().filter(|_| counts) else { continue };
            let (e, s) = (operand.extent, operand.stride_elems);
            for at in 0..operand.len_elems() as u32 {
                let index = [at / e[3] / e[2] / e[1], at / e[3] / e[2] % e[1], at / e[3] % e[2], at % e[3]];
                let elems: u64 = index.iter().zip(&s).map(|(i, s)| u64::from(*i) * u64::from(*s)).sum();
                let first = operand.offset_bytes + elems * dtype.size_bytes() as u64;
                for half in first / 2..(first + dtype.size_bytes() as u64) / 2 {
                    touched.entry((operand.binding.0, half)).or_default().push((number, usage));
                }
            }
        }
    }
    touched.values().any(|by| {
        by.iter().enumerate().any(|(i, (a, a_use))| {
            by[i + 1..].iter().any(|(b, b_use)| {
                let are_free = a_use == b_use && matches!(a_use, Use::Read | Use::Append);
                a != b && !are_free && !reach[*a][*b] && !reach[*b][*a]
            })
        })
    })
}

#[test]
fn a_token_outside_the_vocabulary_is_the_kernels_fault_record() {
    let (_dir, model) = small();
    let compiled = compiled(&model, 4, IDS.len());
    let memory = Memory::new(&compiled, &model).expect("a small model");
    let mut simt = Simt::new(compiled.image.clone(), memory, Options::default());
    simt.set_tokens(0, &[3, 80, 269, 5, 5, 0, 66]);
    simt.start(one_pass(IDS.len() as u32));
    assert_eq!(simt.finish().unwrap_err(), RunError::TokenOutOfRange { id: 269, position: 2, vocab: 269 });
    // And the executor can be used again.
    simt.set_tokens(0, &IDS);
    simt.start(one_pass(IDS.len() as u32));
    simt.finish().expect("it runs");
}

/// All matrices come by copies, and 64 KiB of them are under way at some time.
#[test]
fn loaders_have_64_kib_under_way() {
    let (_dir, model) = model(WIDE);
    // One worker, so that its share is the whole network's weights, several times what it has of shared memory.
    let compiled = compiled(&model, 1, 1);
    let run = |without: Techniques, seed: u64| {
        let options = Options { without, seed, block_threads: Some(64) };
        run_simt_on(&IDS[..1], &model, &compiled, compiled.image.clone(), options)
            .unwrap_or_else(|error| panic!("{error}"))
    };
    let (without, _) = run(Technique::Tiles.into(), 1);
    for seed in 1..4 {
        let (logits, simt) = run(Techniques::NONE, seed);
        close(&without, &logits, "from tiles");
        let report = simt.report();
        println!(
            "{} copies, {} KiB, {} KiB under way at most",
            report.copies,
            report.bytes_copied >> 10,
            report.peak_in_flight >> 10
        );
        // All matrices come by copies, each byte once.
        let hidden = 128;
        let per_layer = hidden * (128 + 64 + 64) + 128 * hidden + 3 * 640 * hidden;
        assert_eq!(report.bytes_copied, 2 * (2 * per_layer + 512 * hidden));
        assert!(report.peak_in_flight >= 64 << 10, "{report:?}");
        assert_eq!(report.stall, None);
    }
}

/// Of each token but the first some tiles are brought before it begins, each byte once; and as many in vain after the
/// last.
#[test]
fn a_tokens_first_tiles_are_brought_ahead() {
    let (_dir, model) = model(WIDE);
    let sources = decoder_sources(&model, &[1], Cache::bf16(32), Head::Sample).expect("a sound model");
    let compiled = compile(sources, &Config::new(Target::workers(2))).expect("it compiles");
    let loads = compiled.image.loads();
    let bytes = |op: &DataOp| u64::from(op.bytes);
    let ahead: u64 = loads.data.iter().filter(|op| op.ahead > 0).map(bytes).sum();
    assert!(ahead > u64::from(TILE_BYTES), "{ahead} bytes on two workers");
    let all: u64 = loads.data.iter().map(bytes).sum();
    for seed in 1..4 {
        let memory = Memory::new(&compiled, &model).expect("a small model");
        let mut simt = Simt::new(compiled.image.clone(), memory, Options { seed, ..Options::default() });
        simt.set_tokens(0, &IDS[..1]);
        let step = Step { rows: 1, sampling: 1, ..Step::default() };
        simt.start(Control { requests: [Request::greedy(3); _], step, ..one_pass(1) });
        let control = simt.finish().unwrap_or_else(|error| panic!("{error}"));
        assert_eq!((control.end, control.produced), (End::MaxTokens as u32, 3));
        assert_eq!(simt.report().bytes_copied, 3 * all + ahead);
    }
}

/// A step of so many of qwen3-0.6b's layers on an H200.
fn compiled_for_h200(layers: usize) -> Compiled {
    let mut json = preset_config("qwen3-0.6b").expect("a preset");
    json["num_hidden_layers"] = layers.into();
    let config = ModelConfig::from_value(Path::new("config.json"), &json).expect("a sound config");
    let ModelConfig::Decoder(config) = config else { panic!("a model that makes text") };
    let graph = decoder::build(&config, Declared::Assumed(DType::Bf16), 1, Cache::bf16(512), Head::Sample);
    let source = Source { name: "decode".to_owned(), graph: graph.expect("a sound graph"), in_token_loop: true };
    compile(vec![source], &Config::new(Target::h200())).expect("it compiles")
}

/// From the time on that 64 KiB have been begun, a worker's copy finds as many begun and not released when it may begin
/// at the latest.
#[test]
fn plans_let_64_kib_be_under_way_all_the_time() {
    let compiled = compiled_for_h200(2);
    let loads = compiled.image.loads();
    for ends in loads.data_heads.windows(2) {
        let ops = &loads.data[ends[0] as usize..ends[1] as usize];
        let mut begun = 0;
        for (at, op) in ops.iter().enumerate() {
            let unreleased = |other: &&DataOp| other.used_by >= op.after;
            let under_way: u64 = ops[..=at].iter().filter(unreleased).map(|op| u64::from(op.bytes)).sum();
            begun += u64::from(op.bytes);
            assert!(under_way >= begun.min(64 << 10), "copy {at} of {}: {under_way} bytes may be under way", ops.len());
        }
        assert!(begun > 4 * u64::from(TILE_BYTES), "{begun} bytes, which are not much more than fit at once");
    }
}

/// Layers are cut alike, the first as well, whose row the embedding makes; the same workers attend in all of them; and
/// the choice of a token and what follows it are one worker's.
#[test]
fn layers_are_cut_alike_and_attention_stays_where_it_is() {
    let layers = 6;
    let compiled = compiled_for_h200(layers);
    let (program, view) = (&compiled.programs[0], compiled.image.view());
    // The workers that have tasks of an operator, as often as they have some.
    let workers = |name: &str| -> Vec<u32> {
        let op = program.blocks.ops.iter().position(|op| op.name == name).expect("an operator");
        let is_its = |task: &&u32| program.tasks.tasks_of(op).contains(*task);
        (0..view.n_workers)
            .flat_map(|worker| view.list(0, WorkerId(worker)).iter().filter(is_its).map(move |_| worker))
            .collect()
    };
    let of = |layer: usize, what: &str| workers(&format!("model.layers.{layer}.self_attn.{what}"));
    let attends = of(0, "attention");
    assert!(attends.len() < view.n_workers as usize / 2, "{} of {}", attends.len(), view.n_workers);
    for layer in 0..layers {
        let mut side_by_side = ["q_proj", "k_proj", "v_proj"].map(|what| of(layer, what)).concat();
        side_by_side.sort_unstable();
        assert_eq!(side_by_side, (0..view.n_workers).collect::<Vec<_>>(), "one of the three each in layer {layer}");
        assert_eq!(of(layer, "attention"), attends, "layer {layer}");
    }
    assert_eq!(workers("sample"), workers("advance"));
    assert!(!attends.contains(&workers("sample")[0]), "which does not attend");
}

/// [`encode::encode`]: what comes of it runs on the simulated GPU alone, which judges every access.
pub(crate) fn encode(parts: &Parts) -> Result<Image, ImageError> {
    // SAFETY: a simulated GPU is one thread of this machine.
    unsafe { encode::encode(parts) }
}

/// The first rule that `whole` breaks once it is changed.
pub(crate) fn broken_rule(whole: &Parts, change: &dyn Fn(&mut Parts)) -> String {
    let mut parts = whole.clone();
    change(&mut parts);
    match encode(&parts) {
        Err(ImageError::Rules(broken)) => broken[0].to_string(),
        other => panic!("expected broken rules, found {other:?}"),
    }
}

/// However many tasks there are, which cores judge in parts: wherever the broken one is, it is named.
#[test]
fn a_broken_task_is_found_among_thousands() {
    let compiled = compiled_for_h200(12);
    let (whole, ops) = (Parts::of(&compiled.image), &compiled.programs[0].blocks.ops);
    let n = whole.tasks.len();
    assert!(n > 6000, "{n} tasks");
    for id in (0..n - 1).step_by(1023).chain([2047, 2048, 2049, n - 2, n - 1]) {
        let found = broken_rule(&whole, &|parts| parts.tasks[id].task_type = u16::MAX);
        let at = format!("p0 t{id} ({}, ", ops[whole.tasks[id].op as usize].name);
        assert!(found.starts_with(&at) && found.contains("65535 does not exist"), "{id}: {found}");
    }
}

/// Rows in fewer bits have their scales among their lines: a tile with part of one is refused, which of a row of floats
/// it is not.
#[test]
fn rows_in_fewer_bits_come_in_whole_tiles() {
    let (_dir, model) = model_of("tiny-simt", &[("hidden_size", 40), ("intermediate_size", 1088)], 3);
    let [in_8_bits, in_4_bits] =
        [Quantize::Q8, Quantize::Q4].map(|how| model.quantize(how, |_| {}).expect("it is quantised"));
    let of_one_row = |model: &Model, dtype: DType| {
        let sources = decoder_sources(model, &[1], Cache::bf16(32), Head::Sample).expect("a sound model");
        let whole = Parts::of(&compile(sources, &Config::new(Target::gpu(40))).expect("it compiles").image);
        let row = dtype.tensor_bytes(&[1088]);
        let at = whole.data.iter().position(|op| u64::from(op.bytes) == row).expect("a row of its own");
        broken_rule(&whole, &|parts| parts.data[at].bytes -= 64)
    };
    for found in [of_one_row(&in_8_bits, DType::Q8), of_one_row(&in_4_bits, DType::Q4)] {
        assert!(found.contains("neither whole rows"), "{found}");
    }
    let of_floats = of_one_row(&model, DType::Bf16);
    assert!(!of_floats.contains("neither whole rows"), "{of_floats}");
}

/// Each rule of the loaders' sections refuses an image that breaks it.
#[test]
fn broken_loads_are_named() {
    let (_dir, model) = model(WIDE);
    let sources = decoder_sources(&model, &[1], Cache::bf16(32), Head::Sample).expect("a sound model");
    let target = Target { split_positions: 8, ..Target::gpu(2) };
    let compiled = compile(sources, &Config::new(target)).expect("it compiles");
    let whole = Parts::of(&compiled.image);
    assert!(encode(&whole).is_ok() && whole.data.len() > 40 && !whole.prefetches.is_empty());
    let says = |change: &dyn Fn(&mut Parts), expected: &str| {
        let found = broken_rule(&whole, change);
        assert!(found.contains(expected), "{found}, expected {expected}");
    };
    // A copy that waits for what it overwrites, in the first worker's list.
    let late = (0..whole.data.len()).find(|at| whole.data[*at].after > 0).expect("a ring that wraps");
    assert!(late < whole.data_heads[1] as usize);
    says(&|parts| parts.data[late..].iter_mut().for_each(|op| op.after = 0), "still to be read");
    says(&|parts| parts.data[late].after = parts.data[late].used_by + 1, "nothing would move");
    says(&|parts| parts.data[1].used_by = 0, "nothing would move");
    let follows = |pair: &[DataOp]| {
        let end = pair[0].source_offset_bytes + u64::from(pair[0].bytes);
        (pair[0].source, end, pair[0].used_by + 1) == (pair[1].source, pair[1].source_offset_bytes, pair[1].used_by)
    };
    let next = 1 + whole.data.windows(2).position(follows).expect("a matrix of two tiles");
    says(&|parts| parts.data[next].after = parts.data[next].used_by, "may be held until it is there");
    let first = whole.data[0].ahead;
    assert!(first > 1 && whole.data[1].ahead > 1 && whole.data[late].ahead == 0);
    says(&|parts| parts.data[0].ahead = 0, "those before it are not");
    says(&|parts| parts.data[late].ahead = 1, "of it");
    says(&|parts| parts.data[late + 1].ahead = 1, "is brought ahead of its pass");
    says(&|parts| parts.data[0].ahead = first + 1, "overwrites one of the last");
    says(&|parts| parts.data[0].ahead = 40, "tiles unread, of");
    says(&|parts| parts.programs[0].max_rows = 2, "ahead of a pass of 2 rows");
    says(&|parts| parts.data[2].barrier = 7, "barrier 7, expected 2");
    says(&|parts| parts.data[0].dest_offset_bytes = 212_990, "of 212992");
    says(&|parts| parts.data[0].source_offset_bytes += 8, "bytes from 8");
    says(&|parts| parts.data[0].source_offset_bytes = 1 << 40, "which has");
    says(&|parts| parts.data[0].source = 999, "does not exist");
    says(&|parts| parts.data[0].bytes -= 16, "begin with the vector");
    says(&|parts| parts.data[1].bytes -= 16, "neither whole rows");
    says(&|parts| parts.data[next - 1].source_offset_bytes += 256, "no tile for byte");
    says(&|parts| parts.data_heads[1] = parts.data_heads[2] + 1, "expected to ascend");
    says(&|parts| parts.prefetches[0].bytes += 8, "which has");
    let cache = whole.prefetches.iter().position(|op| op.splits > 0).expect("a cache");
    says(&|parts| parts.prefetches[cache].split = 99, "no whole stretches");
    says(&|parts| parts.prefetches[cache].apart_bytes = 8, "which has");
    says(&|parts| parts.prefetches[cache].apart_bytes -= 16, "no whole stretches");
    says(&|parts| parts.prefetches[cache].stretches = 1 << 20, "which has");
    says(&|parts| parts.prefetches[cache].before = u32::MAX, "out of order");
    // The worker may wait for a tile that this loader brings only then.
    says(&|parts| parts.prefetches.iter_mut().for_each(|op| op.after = 1), "out of order");
    let with_tiles = whole.tasks.iter().position(|task| task.tiles > 1).expect("a product");
    says(&|parts| parts.tasks[with_tiles].tiles -= 1, "no tile for byte");
    let without = whole.tasks.iter().position(|task| task.tiles == 0).expect("the embedding");
    says(&|parts| parts.tasks[without].tiles = 1, "takes none");
    says(&|parts| parts.tasks.iter_mut().for_each(|task| task.tiles = 0), "that no task takes");
}

/// Passes of a few rows take their weights from tiles, and attend to a head's queries as in decoding, a few at a time;
/// where these are more, tensor cores take memory that tiles leave. Weights in fewer bits, or more rows, have no tiles.
#[test]
fn a_few_rows_have_tiles_that_leave_bodies_their_memory() {
    let (_dir, wide) = model(WIDE);
    let many_queries = [("num_attention_heads", 18), ("num_key_value_heads", 2)];
    let (_other_dir, shared) = model([WIDE, &many_queries].concat().leak());
    let verified = |model: &Model, rows: usize| {
        let sources = decoder_sources(model, &[rows], Cache::bf16(64), Head::Verify).expect("a sound model");
        compile(sources, &Config::new(Target { split_positions: 8, ..Target::gpu(4) })).expect("it compiles")
    };
    let in_fewer_bits = wide.quantize(Quantize::Q8, |_| {}).expect("quantized");
    let n_tiles = |compiled: &Compiled| compiled.image.view().tasks.iter().filter(|task| task.tiles > 0).count();
    assert_eq!((n_tiles(&verified(&in_fewer_bits, 4)), n_tiles(&verified(&wide, 9))), (0, 0));
    for (model, is_beside) in [(&wide, false), (&shared, true)] {
        let compiled = verified(model, 4);
        let blocks = &compiled.programs[0].blocks;
        let mut attentions =
            blocks.ops.iter().filter_map(|op| op.kernel).filter(|k| k.task_type == Attention::TASK_TYPE);
        assert!(attentions.clone().count() == 2 && n_tiles(&compiled) > 8);
        let params = |kernel: KernelCall| kernels::params::<attention::Params>(&kernel.params);
        assert!(attentions.all(|kernel| (params(kernel).is_beside_tiles != 0) == is_beside));
        let whole = Parts::of(&compiled.image);
        assert!(encode(&whole).is_ok() && whole.data.iter().all(|op| op.dest_offset_bytes >= 1 << 10));
        let broken = broken_rule(&whole, &|parts| parts.data[0].dest_offset_bytes = 0);
        assert!(broken.contains("bytes beside tiles, of which one lies at 0"), "{broken}");
    }
}

/// Heads that share a key/value head are too large together to be turned where they attend, so that attention is an
/// operator of its own; with queries enough it takes the tiles' memory, though the pass has one row. Launched just in
/// time it may do so when nothing is left of a list.
#[test]
fn attention_that_takes_the_memory_has_no_tiles_ahead() {
    const SIZES: Sizes =
        &[("num_attention_heads", 64), ("num_key_value_heads", 1), ("head_dim", 72), ("num_hidden_layers", 1)];
    let (_dir, model) = model(SIZES);
    for just_in_time in [vec![], vec!["attention".to_owned()]] {
        let engine = |device| {
            let just_in_time = just_in_time.clone();
            let config = EngineConfig {
                device,
                threads: Some(2),
                max_context: Some(16),
                just_in_time,
                ..EngineConfig::default()
            };
            Engine::new(&model, &config).expect("resident")
        };
        let (mut on_gpu, mut on_cpu) = (engine(Device::Simt), engine(Device::Cpu));
        let compiled = on_gpu.resident().compiled();
        let decoding = &compiled.programs[0];
        let is_attention = |op: &BlockOp| op.kernel.is_some_and(|kernel| kernel.task_type == Attention::TASK_TYPE);
        assert!(decoding.blocks.ops.iter().any(is_attention));
        // In the lists tiles of later operators come after it.
        assert_eq!(decoding.plan.repeats(), just_in_time.is_empty());
        if !just_in_time.is_empty() {
            let found = broken_rule(&Parts::of(&compiled.image), &|parts| parts.data[0].ahead = 1);
            assert!(found.contains("takes the memory where tiles come ahead"), "{found}");
        }

        let options =
            GenerateOptions { max_new_tokens: 4, stop_tokens: Some(Vec::new()), ..GenerateOptions::default() };
        let tokens = |engine: &mut Engine| -> Vec<u32> {
            let generation = engine.generate(&[5], &options).expect("it begins");
            generation.map(|token| token.expect("it goes on").id).collect()
        };
        assert_eq!(tokens(&mut on_gpu), tokens(&mut on_cpu));
    }
}

/// A layer without keys of its own reads what an earlier one has appended in the same pass, which nothing but an event
/// orders: the rows between them are flagged.
#[test]
fn shared_caches_are_read_behind_what_is_appended() {
    let model =
        Model::load(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-gemma4")).expect("a fixture");
    let config = EngineConfig { device: Device::Simt, threads: Some(20), ..EngineConfig::default() };
    let mut on_gpu = Engine::new(&model, &EngineConfig { max_context: Some(512), ..config.clone() }).expect("resident");
    let decoding = &on_gpu.resident().compiled().programs[0];
    let kinds = |op: &BlockOp| -> Vec<AccessKind> {
        let of_kernel = op.kernel.is_some_and(|kernel| kernel.task_type == DecodeAttention::TASK_TYPE);
        let caches = op
            .accesses
            .iter()
            .flatten()
            .filter(|access| of_kernel && decoding.blocks.table.buffer_of(access.tensor).kind == BufferKind::State);
        caches.map(|access| access.kind).collect()
    };
    let kinds: Vec<AccessKind> = decoding.blocks.ops.iter().flat_map(kinds).collect();
    assert_eq!(kinds, [[AccessKind::Append; 6], [AccessKind::Read; 6]].concat());
    let options = GenerateOptions { max_new_tokens: 3, stop_tokens: Some(Vec::new()), ..GenerateOptions::default() };
    let tokens = |engine: &mut Engine| -> Vec<u32> {
        let generation = engine.generate(&[5, 80, 7], &options).expect("it begins");
        generation.map(|token| token.expect("it goes on").id).collect()
    };
    let mut on_cpu =
        Engine::new(&model, &EngineConfig { device: Device::Cpu, threads: Some(2), ..config }).expect("resident");
    assert_eq!(tokens(&mut on_gpu), tokens(&mut on_cpu));
}

/// In a pass of several rows, where there are no tiles, loaders ask for what their worker is going to read, of weights
/// that several tasks read once; and wait for no task that their worker has not.
#[test]
fn several_rows_are_asked_for_at_their_workers_pace() {
    let (_dir, model) = model(MANY_ROWS);
    let compiled = compiled_for(&model, Target::gpu(2), 24);
    let program = compiled.programs.iter().find(|program| program.blocks.ops.iter().any(|op| op.rows > 1));
    let program = program.expect("it reads prompts");
    let mut asked: HashMap<u32, u64> = HashMap::new();
    for op in program.plan.workers.iter().flat_map(|worker| &worker.prefetches) {
        assert!(op.splits == 0 && op.stretches == 1, "all of it is little: {op:?}");
        *asked.entry(op.source).or_default() += u64::from(op.bytes);
    }
    for (number, buffer) in program.blocks.table.buffers.iter().enumerate() {
        let found = asked.remove(&(number as u32)).unwrap_or(0);
        match buffer.kind {
            BufferKind::Weight => assert_eq!(found, buffer.bytes / 16 * 16, "{}", buffer.name),
            _ => assert_eq!(found, 0, "{}", buffer.name),
        }
    }
    let whole = Parts::of(&compiled.image);
    let says = |change: &dyn Fn(&mut Parts), expected: &str| {
        let found = broken_rule(&whole, change);
        assert!(found.contains(expected), "{found}, expected {expected}");
    };
    assert!(encode(&whole).is_ok());
    // A loader that waits for each task to begin changes nothing.
    let ids: Vec<u32> = (0..24).map(|at| at * 7 % 90).collect();
    let run = |image| run_simt_on(&ids, &model, &compiled, image, Options::default()).expect("a sound image").0;
    let mut paced = whole.clone();
    paced.prefetches.iter_mut().for_each(|op| op.after = op.used_by);
    assert!(paced.prefetches.iter().any(|op| op.after > 5));
    assert_eq!(run(encode(&paced).expect("as sound")), run(compiled.image.clone()));
    // More tasks than the worker has; fewer than the one before.
    says(&|parts| parts.prefetches.last_mut().expect("there is one").after = 1 << 19, "nobody's");
    says(&|parts| parts.prefetches[0].after = 1, "out of order");
    // Products begin with weights before their events have fired, which must be there then.
    let early = whole.tasks.iter().find(|task| task.flags & TaskFlags::READS_EARLY != 0).expect("a product");
    let weights = whole.operands[early.operand_first as usize + 1].binding;
    says(&|parts| parts.bindings[weights.idx()].kind = BindingKind::Input as u32, "reads early what is no weight");
}

/// What only a token's choice wants read is asked for only where one is chosen.
#[test]
fn a_prompts_passes_that_choose_no_token_do_not_ask_for_the_head() {
    let (_dir, model) = model(MANY_ROWS);
    for (head, marked) in [(Head::Sample, &["lm_head", "model.norm"][..]), (Head::AllLogits, &[])] {
        let sources = decoder_sources(&model, &[24], Cache::bf16(32), head).expect("a sound model");
        let compiled = compile(sources, &Config::new(Target::gpu(2))).expect("it compiles");
        let (mut found, mut others) = (BTreeSet::new(), BTreeSet::new());
        for program in &compiled.programs {
            for (list, worker) in program.lists.lists.iter().zip(&program.plan.workers) {
                for op in &worker.prefetches {
                    let reader = program.tasks.tasks[list[op.used_by as usize] as usize].op;
                    let names = if op.only_when_sampling > 0 { &mut found } else { &mut others };
                    names.insert(program.blocks.ops[reader as usize].name.as_str());
                }
            }
        }
        assert!(found.iter().eq(marked), "{head:?}: {found:?}");
        assert!(others.len() > 10 && marked.iter().all(|name| !others.contains(name)), "{head:?}: {others:?}");
    }
}

/// Rows that are taken in segments come so, and no other way.
#[test]
fn broken_segments_are_named() {
    const LONG: usize = 14_344;
    let (_dir, model) = model(&[("num_hidden_layers", 1), ("intermediate_size", LONG)]);
    let whole = Parts::of(&compiled_for(&model, Target::gpu(2), 1).image);
    assert!(encode(&whole).is_ok());
    // Of the two the first is a unit longer.
    let parts = [7176, 7168].map(|elems| 2 * elems);
    let of = |part: u32| whole.data.iter().filter(|op| op.bytes == part).count();
    assert!(of(parts[0]) > 1 && of(parts[0]) == of(parts[1]));
    let at = whole.data.iter().position(|op| op.bytes == parts[0]).expect("it was counted");
    let says = |change: &dyn Fn(&mut Parts), expected: &str| {
        let found = broken_rule(&whole, change);
        assert!(found.contains(expected), "{found}, expected {expected}");
    };
    says(&|parts| parts.data[at].source_offset_bytes += 2 * LONG as u64, "no tile for segment 0 of row 0");
    says(&|parts| parts.data[at + 1].bytes -= 16, "no tile for segment 0 of row 1");
    let task = whole.tasks.iter().position(|task| task.tiles as usize == 2 * task_rows(&whole, at)).expect("down");
    says(&|parts| parts.tasks[task].tiles -= 1, "no tile for segment 1 of row");
}

/// How many rows of weights in segments the worker takes whose copy number `at` is the first of them.
fn task_rows(whole: &Parts, at: usize) -> usize {
    let bytes = whole.data[at].bytes;
    whole.data[at..].iter().take_while(|op| op.bytes == bytes).count()
}

/// The rules of just-in-time tasks, each broken once.
#[test]
fn broken_launches_are_named() {
    let (_dir, model) = small();
    let sources = decoder_sources(&model, &[IDS.len()], Cache::bf16(32), Head::AllLogits).expect("a sound model");
    let config = Config { just_in_time: vec!["attention".to_owned()], ..Config::new(Target::workers(3)) };
    let compiled = compile(sources, &config).expect("it compiles");
    let whole = Parts::of(&compiled.image);
    // Of a program's lists the last is the schedulers'.
    let end = whole.list_heads[4] as usize;
    let first = whole.list_heads[3] as usize;
    let launched: Vec<usize> = whole.lists[first..end].iter().map(|task| *task as usize).collect();
    assert!(encode(&whole).is_ok() && launched.len() > 1);
    let says = |change: &dyn Fn(&mut Parts), expected: &str| {
        let found = broken_rule(&whole, change);
        assert!(found.contains(expected), "{found}, expected {expected}");
    };
    let (one, last) = (launched[0], whole.tasks.len() - 1);
    let listed =
        (0..last).find(|task| !launched.contains(task) && whole.tasks[*task].wait_count > 0).expect("a product");
    says(&|parts| parts.tasks[one].wait_count = 0, "it would be launched by no event");
    says(&|parts| parts.tasks[last].flags |= TaskFlags::JUST_IN_TIME, "it would be launched by no event");
    says(&|parts| parts.lists.swap(first, first + 1), "its just-in-time tasks are not in program order");
    let number = |n: usize| format!("{n} tasks say they are just-in-time, and its list of these is another");
    says(&|parts| parts.tasks[one].flags ^= TaskFlags::JUST_IN_TIME, &number(launched.len() - 1));
    says(&|parts| parts.tasks[listed].flags |= TaskFlags::JUST_IN_TIME, &number(launched.len() + 1));
    let one_for_another = |parts: &mut Parts| {
        [one, listed].into_iter().for_each(|task| parts.tasks[task].flags ^= TaskFlags::JUST_IN_TIME);
    };
    says(&one_for_another, &number(launched.len()));
    says(&|parts| parts.lists[first] = parts.lists[first + 1], "stands in the lists twice");
    // It waits on what it triggers itself.
    let own = whole.triggers[whole.tasks[one].trigger_first as usize];
    says(&|parts| parts.waits[parts.tasks[one].wait_first as usize] = own, &format!("the scheduler at t{one}"));
}
