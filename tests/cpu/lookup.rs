//! Prompt lookup: tokens guessed from the text so far and verified in one pass change how long a text takes, and
//! nothing else; on a GPU, where a pass of several rows rounds what it multiplies, the logits but for that.

use super::batch::{On, judge};
use super::cuda::has_kernel;
use super::interpreted::{cases, random_model};
use super::models::{RECURRENT, attending};
use super::simt::{MANY_ROWS, broken_rule, model as small_model};
use perpetua::engine::EngineError;
use perpetua::exec::cuda;
use perpetua::image::encode::Parts;
use perpetua::model::Quantize;
use perpetua::{Device, End, Engine, EngineConfig, GenerateOptions, Model, PromptPrecision};
use perpetua_shared::image::{TOKEN_LOOP, VERIFIES};
use perpetua_shared::{ProgramId, TaskFlags};
use proptest::prelude::*;
use std::path::PathBuf;

fn fixture(name: &str) -> Model {
    Model::load(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)).unwrap()
}

fn engine(model: &Model, device: Device, threads: usize, prompt_lookup: Option<usize>) -> Engine {
    let (threads, chunks) = (Some(threads), vec![5, 16]);
    let config =
        EngineConfig { device, threads, chunks, max_context: Some(96), prompt_lookup, ..EngineConfig::default() };
    Engine::new(model, &config).unwrap()
}

fn options(max_new_tokens: usize) -> GenerateOptions {
    GenerateOptions { max_new_tokens, stop_tokens: Some(Vec::new()), ..GenerateOptions::default() }
}

/// What a run made: its tokens, why it ended, and the bits of the logits its last token was chosen from.
type Made = (Vec<u32>, Option<End>, Vec<u32>);

fn made(engine: &mut Engine, prompt: &[u32], options: &GenerateOptions) -> Made {
    let mut generation = engine.generate(prompt, options).unwrap();
    let tokens = generation.by_ref().map(|token| token.unwrap().id).collect();
    let end = generation.end();
    drop(generation);
    let logits = engine.last_logits().unwrap().unwrap();
    assert_eq!(logits.len(), engine.model().config().vocab_size());
    (tokens, end, logits.iter().map(|logit| logit.to_bits()).collect())
}

/// Passes after the one that made the first token.
fn passes(engine: &Engine, prompt: &[u32]) -> usize {
    engine.stamps().len() - 1 - engine.passes(prompt.len())
}

/// A prompt that says twice what `model` then says again, if it says anything twice.
fn prompt(model: &Model, len: usize) -> Vec<u32> {
    let vocab = model.config().vocab_size();
    (0..len).map(|i| ((i % 7 * 131 + 7) % vocab) as u32).collect()
}

#[test]
fn the_text_and_its_bits_are_those_without() {
    let mut fewer = 0;
    for name in attending() {
        let model = fixture(name);
        let prompt = prompt(&model, 23);
        let plain = made(&mut engine(&model, Device::Cpu, 1, None), &prompt, &options(40));
        assert_eq!((plain.0.len(), plain.1), (40, Some(End::MaxTokens)));
        for (threads, drafts) in [(1, 1), (2, 3), (3, 7), (5, 15)] {
            let mut engine = engine(&model, Device::Cpu, threads, Some(drafts));
            // Twice: what wrong guesses left in the caches must not matter.
            for _ in 0..2 {
                assert!(
                    made(&mut engine, &prompt, &options(40)) == plain,
                    "{name}, {drafts} drafts, {threads} workers"
                );
            }
            let passes = passes(&engine, &prompt);
            assert!(passes <= 39, "{name}: {passes}");
            fewer += 39 - passes;
        }
    }
    assert!(fewer > 50, "{fewer} passes fewer: guesses are hardly ever right, and this shows little");
}

#[test]
fn draws_are_those_without() {
    for how in [Quantize::Q8, Quantize::Q4] {
        draws_are_the_same(&fixture("tiny-llama").quantize(how, |_| {}).unwrap());
    }
}

fn draws_are_the_same(model: &Model) {
    let prompt = prompt(model, 30);
    // Close to greedy, and far from it.
    for temperature in [0.2, 1.5] {
        let drawn = GenerateOptions { temperature, top_k: 30, top_p: 0.9, seed: 11, ..options(40) };
        let plain = made(&mut engine(model, Device::Cpu, 2, None), &prompt, &drawn);
        let mut guessing = engine(model, Device::Cpu, 2, Some(4));
        assert!(made(&mut guessing, &prompt, &drawn) == plain, "at {temperature}");
        assert!(made(&mut guessing, &prompt, &GenerateOptions { seed: 12, ..drawn }) != plain, "at {temperature}");
    }
}

/// Each row knows what the rows before it have read, guesses too. Below 1 texts repeat themselves, so that guesses are
/// right. (What penalties do: `models::tokens_that_are_there_already_are_penalised`.)
#[test]
fn penalties_are_those_without() {
    let model = fixture("tiny-qwen2");
    let prompt = prompt(&model, 20);
    for (device, n) in [(Device::Cpu, 40), (Device::Reference, 12)] {
        for penalty in [0.8, 1.1, 1.3] {
            let penalised = GenerateOptions { repetition_penalty: Some(penalty), ..options(n) };
            let plain = made(&mut engine(&model, device, 2, None), &prompt, &penalised);
            assert!(
                made(&mut engine(&model, device, 2, Some(4)), &prompt, &penalised) == plain,
                "{device:?}, {penalty}"
            );
        }
    }
}

#[test]
fn the_reference_verifies_too() {
    let model = fixture("tiny-qwen3");
    let prompt = prompt(&model, 12);
    let plain = made(&mut engine(&model, Device::Reference, 1, None), &prompt, &options(12));
    assert!(made(&mut engine(&model, Device::Reference, 1, Some(3)), &prompt, &options(12)) == plain);
}

#[test]
fn it_ends_where_it_would_end() {
    let model = fixture("tiny-llama");
    let mut plain = engine(&model, Device::Cpu, 2, None);
    let mut guessing = engine(&model, Device::Cpu, 2, Some(6));
    // At the context's end, with less room than a pass might take.
    for len in [88, 95, 96] {
        let prompt = prompt(&model, len);
        let expected = made(&mut plain, &prompt, &options(40));
        assert_eq!((expected.0.len(), expected.1), (97 - len, Some(End::ContextFull)));
        assert!(made(&mut guessing, &prompt, &options(40)) == expected, "a prompt of {len}");
    }
    // At a stop token, and at every number of tokens.
    let prompt = prompt(&model, 23);
    let whole = made(&mut plain, &prompt, &options(30)).0;
    let stopped = GenerateOptions { stop_tokens: Some(vec![whole[17]]), ..options(30) };
    let expected = made(&mut plain, &prompt, &stopped);
    assert_eq!(expected.1, Some(End::StopToken));
    assert!(made(&mut guessing, &prompt, &stopped) == expected);
    for n in 1..20 {
        assert!(made(&mut guessing, &prompt, &options(n)) == made(&mut plain, &prompt, &options(n)), "{n} tokens");
    }
    // When it is dropped, and when it is told to.
    let first = guessing.generate(&prompt, &options(60)).unwrap().next().unwrap().unwrap();
    assert_eq!(first.id, whole[0]);
    let generation = guessing.generate(&prompt, &options(60)).unwrap();
    generation.stop();
    let some: Vec<u32> = generation.map(|token| token.unwrap().id).collect();
    assert!(whole.starts_with(&some[..some.len().min(30)]));
    assert_eq!(made(&mut guessing, &prompt, &options(30)).0, whole);
}

/// An engine for batches, too: those do without, alone it guesses.
#[test]
fn batches_do_without() {
    let model = fixture("tiny-qwen2");
    let prompts = [prompt(&model, 23), prompt(&model, 9)];
    let config = EngineConfig {
        device: Device::Cpu,
        threads: Some(2),
        max_context: Some(96),
        sequences: Some(2),
        prompt_lookup: Some(5),
        prompt_precision: PromptPrecision::Exact,
        ..EngineConfig::default()
    };
    let mut both = Engine::new(&model, &config).unwrap();
    let mut plain = Engine::new(&model, &EngineConfig { sequences: None, prompt_lookup: None, ..config }).unwrap();
    let expected = prompts.each_ref().map(|prompt| made(&mut plain, prompt, &options(20)));
    for (prompt, expected) in prompts.iter().zip(&expected) {
        assert!(made(&mut both, prompt, &options(20)) == *expected);
    }
    let mut found = [Vec::new(), Vec::new()];
    for token in both.generate_batch(&prompts, &options(20)).unwrap() {
        let (sequence, token) = token.unwrap();
        found[sequence].push(token.id);
    }
    assert_eq!(found, expected.map(|made| made.0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn whatever_the_prompt_the_text_is_the_same(
        name in proptest::sample::select(attending().collect::<Vec<_>>()),
        prompt in proptest::collection::vec(0u32..5, 1..40),
        drafts in 1usize..16,
        threads in 1usize..4,
        temperature in prop_oneof![Just(0.0f32), Just(0.3)],
    ) {
        let model = fixture(name);
        let options = GenerateOptions { temperature, ..options(24) };
        let plain = made(&mut engine(&model, Device::Cpu, 2, None), &prompt, &options);
        prop_assert!(made(&mut engine(&model, Device::Cpu, threads, Some(drafts)), &prompt, &options) == plain);
    }
}

#[test]
fn what_cannot_be_is_refused_in_a_line() {
    let model = fixture("tiny-llama");
    let config = |prompt_lookup| EngineConfig {
        device: Device::Cpu,
        prompt_lookup: Some(prompt_lookup),
        ..EngineConfig::default()
    };
    let refused = |config: EngineConfig| Engine::new(&model, &config).unwrap_err();
    assert_eq!(refused(config(0)).to_string(), "prompt lookup 0: expected 1 to 15 tokens");
    assert_eq!(refused(config(16)).to_string(), "prompt lookup 16: expected 1 to 15 tokens");
    let logits = refused(EngineConfig { all_logits: true, ..config(4) });
    assert!(matches!(logits, EngineError::Purpose(_)), "{logits}");
    let classes = [
        "Qwen3_5ForCausalLM",
        "Lfm2ForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "Lfm2MoeForCausalLM",
        "Qwen3NextForCausalLM",
    ];
    for (name, class) in RECURRENT.into_iter().zip(classes) {
        let error = Engine::new(&fixture(name), &config(4)).unwrap_err().to_string();
        assert!(error.starts_with(class) && error.ends_with("expected no prompt lookup"), "{error}");
    }
}

const GPUS: [On; 2] = [On::Simt, On::Ptx(cuda::Mode::Persistent)];

fn gpu_config(prompt_lookup: Option<usize>) -> EngineConfig {
    EngineConfig {
        max_context: Some(96),
        chunks: vec![5, 16],
        prompt_lookup,
        prompt_precision: PromptPrecision::Exact,
        ..EngineConfig::default()
    }
}

fn cpu(model: &Model) -> Engine {
    Engine::new(model, &EngineConfig { device: Device::Cpu, threads: Some(2), ..gpu_config(None) }).unwrap()
}

/// Has `engine` go on with `prompt`, and judges its last logits by what `cpu` says after the same tokens; how many
/// passes fewer it took than one for each token.
fn judged(engine: &mut Engine, cpu: &mut Engine, prompt: &[u32], n: usize, allowed: f64, what: &str) -> usize {
    let (tokens, end, logits) = made(engine, prompt, &options(n));
    assert_eq!((tokens.len(), end), (n, Some(End::MaxTokens)), "{what}");
    let logits: Vec<f32> = logits.into_iter().map(f32::from_bits).collect();
    judge(cpu, &[prompt.to_vec()], &[tokens], &logits, allowed, &format!("{what}, {n} tokens"));
    // The simulated GPU keeps no times.
    let passes = if engine.resident_mut().cuda().is_some() { passes(engine, prompt) } else { n - 1 };
    assert!(passes < n, "{what}: {passes} passes");
    n - 1 - passes
}

/// Whatever the weights, experts and windows: after each number of tokens, which ends a run within a pass that
/// verifies, or behind it.
#[test]
fn a_gpu_verifies_guesses() {
    if !has_kernel() {
        return;
    }
    let (_dir, small) = small_model(MANY_ROWS);
    let quantized = [Quantize::Q8, Quantize::Q4].map(|how| small.quantize(how, |_| {}).unwrap());
    let others = ["tiny-qwen3-moe", "tiny-gemma3"].map(fixture);
    let mut fewer = 0;
    let (_dir, long) = small_model(&[("head_dim", 64), ("hidden_size", 72), ("max_position_embeddings", 8192)]);
    for (model, name, max_context, lengths) in [
        (&small, "small", 96, &[2, 9, 22][..]),
        (&quantized[0], "8 bits", 96, &[11]),
        (&quantized[1], "4 bits", 96, &[5]),
        (&others[0], "experts", 96, &[7]),
        (&others[1], "windows", 96, &[7]),
        (&long, "shared positions", 8192, &[9]),
    ] {
        let (prompt, mut cpu) = (prompt(model, 23), cpu(model));
        for at in GPUS {
            let config = EngineConfig { max_context: Some(max_context), ..gpu_config(Some(5)) };
            let mut engine = Engine::new(model, &at.config(5, config)).unwrap();
            let mut run = |n: &usize| judged(&mut engine, &mut cpu, &prompt, *n, 3e-2, &format!("{at:?}, {name}"));
            fewer += lengths.iter().map(&mut run).sum::<usize>();
        }
    }
    assert!(fewer > 4, "{fewer} passes fewer: guesses are hardly ever right, and this shows little");
}

#[test]
fn on_a_gpu_it_ends_where_it_would_end() {
    if !has_kernel() {
        return;
    }
    let (_dir, model) = small_model(MANY_ROWS);
    for at in GPUS {
        let mut engine = Engine::new(&model, &at.config(3, gpu_config(Some(7)))).unwrap();
        for len in [88, 95, 96] {
            let (tokens, end, _) = made(&mut engine, &prompt(&model, len), &options(40));
            assert_eq!((tokens.len(), end), (97 - len, Some(End::ContextFull)), "{at:?}");
        }
        let prompt = prompt(&model, 23);
        let whole = made(&mut engine, &prompt, &options(30));
        assert_eq!(made(&mut engine, &prompt, &options(30)), whole, "{at:?}: once more");
        let stop = whole.0[17];
        let until = whole.0.iter().position(|token| *token == stop).unwrap() + 1;
        let stopped = GenerateOptions { stop_tokens: Some(vec![stop]), ..options(30) };
        let (tokens, end, _) = made(&mut engine, &prompt, &stopped);
        assert_eq!((&tokens[..], end), (&whole.0[..until], Some(End::StopToken)), "{at:?}");
        // Dropped after its first token, and told to stop.
        let first = engine.generate(&prompt, &options(60)).unwrap().next().unwrap().unwrap();
        assert_eq!(first.id, whole.0[0], "{at:?}");
        let generation = engine.generate(&prompt, &options(60)).unwrap();
        generation.stop();
        let some: Vec<u32> = generation.map(|token| token.unwrap().id).collect();
        assert!(whole.0.starts_with(&some[..some.len().min(30)]), "{at:?}");
        assert_eq!(made(&mut engine, &prompt, &options(30)), whole, "{at:?}: afterwards");
    }
}

/// Launched ahead, passes cannot depend on the text: one for each operator guesses nothing.
#[test]
fn a_launch_per_operator_guesses_nothing() {
    if !has_kernel() {
        return;
    }
    let (_dir, model) = small_model(MANY_ROWS);
    let (prompt, at) = (prompt(&model, 23), On::Ptx(cuda::Mode::PerOperator));
    let plain = made(&mut Engine::new(&model, &at.config(3, gpu_config(None))).unwrap(), &prompt, &options(12));
    let mut engine = Engine::new(&model, &at.config(3, gpu_config(Some(5)))).unwrap();
    assert_eq!(made(&mut engine, &prompt, &options(12)), plain);
    assert_eq!(passes(&engine, &prompt), 11);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, ..ProptestConfig::default() })]

    #[test]
    fn random_models_verify_guesses_on_a_gpu(
        case in cases(),
        prompt in proptest::collection::vec(0u32..3, 2..40),
        drafts in 1usize..16,
        n in 2usize..9,
        is_late in any::<bool>(),
    ) {
        if !has_kernel() {
            return Ok(());
        }
        let (_dir, model) = random_model(&case);
        let just_in_time = if is_late { vec!["attention".to_owned()] } else { Vec::new() };
        let config = EngineConfig { just_in_time, ..gpu_config(Some(drafts)) };
        let mut cpu = cpu(&model);
        for at in GPUS {
            let mut engine = Engine::new(&model, &at.config(case.n_sms, config.clone())).unwrap();
            judged(&mut engine, &mut cpu, &prompt, n, 5e-2, &format!("{at:?}"));
        }
    }
}

/// Read as a prompt is, by a pass that samples nothing, tokens are no guesses.
#[test]
fn a_pass_that_samples_nothing_verifies_nothing() {
    let model = fixture("tiny-qwen3");
    let prompt = prompt(&model, 23);
    let plain = made(&mut engine(&model, Device::Cpu, 2, None), &prompt, &options(9));
    for device in [Device::Cpu, Device::Reference] {
        let mut engine = engine(&model, device, 2, Some(3));
        let programs = engine.resident().compiled().image.view().programs;
        let verify = programs.iter().position(|program| program.kind == VERIFIES).unwrap();
        for rows in [0, 1, 4] {
            engine.resident_mut().run_tokens(ProgramId(verify as u32), &prompt[..rows]).unwrap();
            let control = engine.resident_mut().finish().unwrap();
            assert_eq!(
                (control.produced, control.end, control.step.first_pos),
                (0, End::PromptDone as u32, rows as u32)
            );
        }
        if device == Device::Cpu {
            assert!(made(&mut engine, &prompt, &options(9)) == plain);
        }
    }
}

/// A task of a row is one that its program has, and whoever ends a pass that verifies knows what was chosen.
#[test]
fn drafts_are_judged_by_the_image() {
    let engine = engine(&fixture("tiny-qwen3"), Device::Cpu, 2, Some(3));
    let image = &engine.resident().compiled().image;
    let programs = image.view().programs;
    let verify = programs.iter().position(|program| program.kind == VERIFIES).unwrap();
    assert_eq!(programs[verify].max_rows, 4);
    let broken = |change: &dyn Fn(&mut Parts)| broken_rule(&Parts::of(image), change);
    let tasks = |program: usize| programs[program].task_first as usize..;
    let of_row = tasks(verify).start
        + image.view().tasks[tasks(verify)].iter().position(|t| TaskFlags::row(t.flags).is_some()).unwrap();
    assert!(
        broken(&|p| p.tasks[of_row].flags |= TaskFlags::of_row(4))
            .contains("a row of drafts that its program does not have")
    );
    assert!(
        broken(&|p| p.tasks[0].flags = TaskFlags::of_row(0)).contains("a row of drafts that its program does not have")
    );
    assert!(broken(&|p| p.programs[0].kind = VERIFIES).contains("2 of them verify drafts"));
    assert!(
        broken(&|p| p.programs[verify].kind = TOKEN_LOOP).contains("a row of drafts that its program does not have")
    );
    assert!(broken(&|p| p.programs[verify].max_rows = 3).contains("a row of drafts that its program does not have"));
    assert!(broken(&|p| p.programs[verify].max_rows = 5).contains("tokens chosen of 4 rows"));
}
