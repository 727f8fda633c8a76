//! Prompt lookup: tokens guessed from the text so far and verified in one pass change how long a text takes, and nothing else.

use super::models::MODELS;
use super::simt::broken_rule;
use perpetua::compile::{CompileError, Config, compile};
use perpetua::engine::{EngineError, decoder_sources};
use perpetua::graph::lower::Target;
use perpetua::image::encode::Parts;
use perpetua::model::Quantize;
use perpetua::model::decoder::{Cache, Head};
use perpetua::{Device, End, Engine, EngineConfig, GenerateOptions, Model};
use perpetua_shared::image::VERIFIES;
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
    let logits = engine.last_logits().unwrap();
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
    for name in MODELS {
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
        exact: true,
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
        name in proptest::sample::select(&MODELS[..]),
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
    let on_gpu = refused(EngineConfig { device: Device::Simt, ..config(4) });
    assert_eq!(
        on_gpu.to_string(),
        "prompt lookup on a GPU: expected device cpu or reference: no GPU kernel verifies guesses"
    );
    let logits = refused(EngineConfig { all_logits: true, ..config(4) });
    assert!(matches!(logits, EngineError::Purpose(_)), "{logits}");
    let sources = decoder_sources(&model, &[4], Cache::bf16(64), Head::Verify).unwrap();
    let refused = compile(sources, &Config::new(Target::gpu(4))).unwrap_err();
    assert!(matches!(&refused, CompileError::Drafts(name) if name == "verify 4"), "{refused}");
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
        let verify = programs.iter().position(|program| program.in_token_loop == VERIFIES).unwrap();
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
    let verify = programs.iter().position(|program| program.in_token_loop == VERIFIES).unwrap();
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
    assert!(broken(&|p| p.programs[0].in_token_loop = VERIFIES).contains("2 of them verify drafts"));
    assert!(
        broken(&|p| p.programs[verify].in_token_loop = 1).contains("a row of drafts that its program does not have")
    );
    assert!(broken(&|p| p.programs[verify].max_rows = 3).contains("a row of drafts that its program does not have"));
    assert!(broken(&|p| p.programs[verify].max_rows = 5).contains("tokens chosen of 4 rows"));
}
