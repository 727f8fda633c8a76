//! The persistent kernel's own code on the simulated GPU: the whole pass through the real worker loop, and images whose
//! events do not order what they must.

use perpetua::compile::{Compiled, Config, compile};
use perpetua::engine::decoder_sources;
use perpetua::exec::RunError;
use perpetua::exec::memory::Memory;
use perpetua::exec::simt::{Options, Simt};
use perpetua::graph::lower::Target;
use perpetua::image::Image;
use perpetua::image::encode::{Parts, encode};
use perpetua::model::decoder::Head;
use perpetua::model::{SynthOptions, SynthSource, synth};
use perpetua::{Device, Engine, EngineConfig, GenerateOptions, Model};
use perpetua_shared::DType;
use perpetua_shared::control::{Control, End, Step};
use std::ops::ControlFlow;

/// A network small enough for a debug build, of sizes that fit nothing.
const CONFIG: &str = r#"{
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 269, "hidden_size": 40,
    "intermediate_size": 54, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 12, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true,
    "max_position_embeddings": 64, "torch_dtype": "bfloat16"
}"#;

fn small() -> (tempfile::TempDir, Model) {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let config = dir.path().join("small.json");
    std::fs::write(&config, CONFIG).expect("written");
    let out = dir.path().join("small");
    synth(SynthSource::Config(&config), &out, &SynthOptions::default(), &mut |_, _| ControlFlow::Continue(()))
        .expect("the config is sound");
    let model = Model::load(&out).expect("just written");
    (dir, model)
}

/// The model cut finely, so that tasks of several blocks meet.
fn compiled(model: &Model, workers: u32, rows: usize) -> Compiled {
    let sources = decoder_sources(model, 32, &[rows], DType::Bf16, Head::AllLogits).expect("a sound model");
    let target = Target { task_bytes: 1 << 10, ..Target::workers(workers) };
    compile(sources, &Config::new(target)).expect("it compiles")
}

fn one_pass(rows: u32) -> Control {
    let step = Step { rows, ..Step::default() };
    Control { n_tokens: rows, max_context: 32, step, ..bytemuck::Zeroable::zeroed() }
}

const IDS: [u32; 7] = [3, 80, 41, 5, 5, 0, 66];

fn run_simt(model: &Model, compiled: &Compiled, image: Image, options: Options) -> Result<(Vec<f32>, Simt), RunError> {
    let memory = Memory::new(compiled, model).expect("a small model");
    let mut simt = Simt::new(image, memory, options);
    simt.set_tokens(&IDS);
    simt.start(one_pass(IDS.len() as u32));
    let control = simt.finish()?;
    assert_eq!(control.end, End::PromptDone as u32);
    let (_, output) = compiled.programs[0].outputs.iter().find(|(name, _)| name == "logits").expect("an output");
    let logits = simt.memory().read_f32(output, IDS.len());
    Ok((logits, simt))
}

fn close(expected: &[f32], found: &[f32], what: &str) {
    assert_eq!(expected.len(), found.len());
    for (at, (a, b)) in expected.iter().zip(found).enumerate() {
        assert!((a - b).abs() <= 0.02 + 0.02 * a.abs(), "{what}: logit {at} is {b}, expected {a}");
    }
}

#[test]
fn every_number_of_workers_computes_the_reference() {
    let (_dir, model) = small();
    let config = EngineConfig {
        device: Device::Reference,
        all_logits: true,
        max_context: Some(32),
        chunks: vec![IDS.len()],
        ..EngineConfig::default()
    };
    let expected = Engine::new(&model, &config).expect("it compiles").logits(&IDS, |_| ()).expect("it runs");
    for workers in [1, 4, 7] {
        let compiled = compiled(&model, workers, IDS.len());
        let mut first: Option<Vec<f32>> = None;
        for (seed, block_threads) in [(1, 64), (2, 64), (3, 32)] {
            let options = Options { seed, block_threads };
            let (logits, simt) = run_simt(&model, &compiled, compiled.image.clone(), options)
                .unwrap_or_else(|error| panic!("{workers} workers, seed {seed}: {error}"));
            close(&expected, &logits, &format!("{workers} workers"));
            assert!(simt.report().stall.is_none());
            // Neither the schedule nor the block's size changes a bit.
            if let Some(first) = &first {
                assert_eq!(first, &logits, "{workers} workers, seed {seed}");
            }
            first = Some(logits);
        }
    }
}

#[test]
fn the_token_loop_runs_inside_the_kernel() {
    let (_dir, model) = small();
    let make = |device, threads, options: &GenerateOptions| -> Vec<u32> {
        let config = EngineConfig {
            device,
            threads: Some(threads),
            max_context: Some(24),
            chunks: vec![4],
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
    let drawn = GenerateOptions { temperature: 0.8, top_p: 0.9, top_k: 20, seed: 9, ..greedy };
    assert_eq!(make(Device::Simt, 2, &drawn), make(Device::Cpu, 2, &drawn));
}

/// The sections of an image, to make another of.
fn parts(image: &Image) -> Parts {
    let view = image.view();
    let ops = view.tasks.iter().map(|task| task.op + 1).max().unwrap_or(0);
    Parts {
        n_workers: view.n_workers,
        bindings: image.bindings().to_vec(),
        programs: view.programs.to_vec(),
        tasks: view.tasks.to_vec(),
        operands: view.operands.to_vec(),
        events: view.events.to_vec(),
        waits: view.waits.to_vec(),
        triggers: view.triggers.to_vec(),
        list_heads: view.list_heads.to_vec(),
        lists: view.lists.to_vec(),
        op_names: (0..ops).map(|op| image.op_name(op).to_owned()).collect(),
    }
}

/// Leaves out one task's waits at a time, in every image that this leaves live: what the task reads is then read too
/// early, or overwrites what is still read, and the simulator must say so, unless the worker's own order is enough.
#[test]
fn a_wait_left_out_is_a_race() {
    let (_dir, model) = small();
    let compiled = compiled(&model, 4, IDS.len());
    let (mut caught, mut harmless) = (0, 0);
    for task in 0..compiled.image.view().tasks.len() {
        let mut parts = parts(&compiled.image);
        if parts.tasks[task].wait_count == 0 || task % 5 != 0 {
            continue;
        }
        parts.tasks[task].wait_count = 0;
        // Rule 5 refuses those whose wait holds the end of the program together.
        let Ok(image) = encode(&parts) else { continue };
        match run_simt(&model, &compiled, image, Options { seed: task as u64, ..Options::default() }) {
            Err(RunError::Defect { what, .. }) => {
                assert!(what.starts_with("Race") || what.starts_with("Poison"), "{what}");
                caught += 1;
            }
            Err(other) => panic!("{other}"),
            Ok(_) => harmless += 1,
        }
    }
    println!("{caught} caught, {harmless} harmless");
    assert!(caught >= 5 && caught > 2 * harmless, "{caught} caught, {harmless} harmless");
}

#[test]
fn a_token_outside_the_vocabulary_is_the_kernels_fault_record() {
    let (_dir, model) = small();
    let compiled = compiled(&model, 4, IDS.len());
    let memory = Memory::new(&compiled, &model).expect("a small model");
    let mut simt = Simt::new(compiled.image.clone(), memory, Options::default());
    simt.set_tokens(&[3, 80, 269, 5, 5, 0, 66]);
    simt.start(one_pass(IDS.len() as u32));
    assert_eq!(simt.finish().unwrap_err(), RunError::TokenOutOfRange { id: 269, position: 2, vocab: 269 });
    // And the executor can be used again.
    simt.set_tokens(&IDS);
    simt.start(one_pass(IDS.len() as u32));
    simt.finish().expect("it runs");
}
