//! What a prompt has in common with what the engine has read before is not read again: with what follows as if it had
//! been.

use super::cuda::has_kernel;
use super::interpreted::{distance, driver, on};
use super::models::{MODELS, RECURRENT};
use perpetua::{Device, Engine, EngineConfig, GenerateOptions, Model, PromptPrecision};
use perpetua_shared::ProgramId;
use proptest::prelude::*;
use std::path::PathBuf;

fn fixture(name: &str) -> Model {
    Model::load(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)).unwrap()
}

fn config(device: Device) -> EngineConfig {
    EngineConfig {
        device,
        threads: Some(2),
        max_context: Some(96),
        chunks: vec![5, 16],
        prompt_precision: PromptPrecision::Exact,
        ..EngineConfig::default()
    }
}

fn options(max_new_tokens: usize, reuse_prefix: bool) -> GenerateOptions {
    GenerateOptions { max_new_tokens, reuse_prefix, stop_tokens: Some(Vec::new()), ..GenerateOptions::default() }
}

/// Tokens that were not read again, those that were made, and the logits the last of these was chosen from.
fn made(engine: &mut Engine, prompt: &[u32], options: &GenerateOptions) -> (usize, Vec<u32>, Vec<f32>) {
    let mut generation = engine.generate(prompt, options).unwrap();
    let reused = generation.reused();
    let tokens: Vec<u32> = generation.by_ref().map(|token| token.unwrap().id).collect();
    drop(generation);
    (reused, tokens, engine.last_logits().unwrap().unwrap())
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// `engine`, which has run before, makes of `prompt` what a new one makes of it, and has `known` tokens of it.
fn judge(engine: &mut Engine, fresh: &mut Engine, prompt: &[u32], known: usize) -> Vec<u32> {
    let (reused, tokens, logits) = made(engine, prompt, &options(6, true));
    // Passes over what is new of the prompt, and one for each token after the first.
    assert_eq!(engine.stamps().len() - 1, engine.passes(prompt.len() - reused) + tokens.len() - 1);
    let (_, expected, expected_logits) = made(fresh, prompt, &options(6, false));
    assert_eq!(reused, known);
    assert_eq!(tokens, expected);
    assert_eq!(bits(&logits), bits(&expected_logits));
    tokens
}

#[test]
fn a_conversation_reads_what_is_new() {
    for name in MODELS {
        let model = fixture(name);
        let fresh = &mut Engine::new(&model, &config(Device::Cpu)).unwrap();
        let engine = &mut Engine::new(&model, &config(Device::Cpu)).unwrap();
        let first: Vec<u32> = (0..19).map(|i| i * 7 % 60).collect();
        let answer = judge(engine, fresh, &first, 0);
        // The last token made has not been read.
        let second = [&first[..], &answer, &[3, 1, 4, 1, 5]].concat();
        judge(engine, fresh, &second, 19 + 5);
        // States go on after the last token that was read, and from nowhere else.
        let known = |tokens: usize| if RECURRENT.contains(&name) { 0 } else { tokens };
        // The same again, but for its last token; then another way from its middle on; then less of it.
        judge(engine, fresh, &second, known(second.len() - 1));
        let other = [&second[..21], &[9, 9, 9]].concat();
        judge(engine, fresh, &other, known(21));
        judge(engine, fresh, &other[..8], known(7));
        judge(engine, fresh, &[59, 58], 0);
        // Without the option all is read, and what has been is still known after.
        assert_eq!(made(engine, &first, &options(6, false)).0, 0);
        judge(engine, fresh, &first, known(18));
    }
}

#[test]
fn what_others_have_left_in_the_cache_is_not_taken_for_ones_own() {
    let model = fixture("tiny-llama");
    let fresh = &mut Engine::new(&model, &config(Device::Cpu)).unwrap();
    let with = EngineConfig { sequences: Some(2), prompt_lookup: Some(4), ..config(Device::Cpu) };
    let engine = &mut Engine::new(&model, &with).unwrap();
    let prompt: Vec<u32> = (0..23).map(|i| i % 5 * 11).collect();
    let read = |engine: &mut Engine, fresh: &mut Engine, known: usize| {
        let mut generation = engine.generate(&prompt, &options(1, true)).unwrap();
        assert_eq!(generation.reused(), known);
        let token = generation.next().unwrap().unwrap().id;
        drop(generation);
        assert_eq!(vec![token], made(fresh, &prompt, &options(1, false)).1);
    };
    read(engine, fresh, 0);
    read(engine, fresh, 22);
    // Of guesses only those that were right have been read.
    let many: Vec<u32> = engine.generate(&prompt, &options(30, true)).unwrap().map(|token| token.unwrap().id).collect();
    let longer = [&prompt[..], &many, &[1]].concat();
    let (mut generation, expected) = (engine.generate(&longer, &options(1, true)).unwrap(), 23 + 30 - 1);
    assert_eq!(generation.reused(), expected);
    let token = generation.next().unwrap().unwrap().id;
    drop(generation);
    assert_eq!(vec![token], made(fresh, &longer, &options(1, false)).1);
    // A batch, a pass by hand, and a run of no tokens.
    assert_eq!(engine.generate_batch(&[&prompt[..], &[7, 7]], &options(3, true)).unwrap().count(), 6);
    read(engine, fresh, 0);
    // These write other tokens, which the cache does not have.
    let others = [50; 20];
    let reused = |engine: &mut Engine| engine.generate(&others, &options(1, true)).unwrap().reused();
    engine.resident_mut().run_last(ProgramId(0), &others).unwrap();
    assert_eq!(reused(engine), 0);
    read(engine, fresh, 0);
    assert_eq!(engine.generate(&others, &options(0, true)).unwrap().count(), 0);
    assert_eq!(reused(engine), 0);
    read(engine, fresh, 0);
    // One that is told to stop while it reads knows as much as it has read.
    let generation = engine.generate(&prompt, &options(50, false)).unwrap();
    generation.stop();
    drop(generation);
    let known = engine.generate(&prompt, &options(1, true)).unwrap().reused();
    assert!(known == 22 || known.is_multiple_of(16), "{known}");
}

/// On GPUs tokens are rounded as they were read: what follows is the same but for that.
#[test]
fn gpus_reuse_prefixes_too() {
    if !has_kernel() {
        return;
    }
    let model = fixture("tiny-qwen3");
    let cpu = &mut Engine::new(&model, &config(Device::Cpu)).unwrap();
    let gpu = EngineConfig { prompt_precision: PromptPrecision::High, ..config(Device::Simt) };
    for config in [gpu.clone(), on(&driver(3, 1), gpu)] {
        let mut engine = Engine::new(&model, &config).unwrap();
        let first: Vec<u32> = (0..19).map(|i| i * 7 % 60).collect();
        let (reused, answer, _) = made(&mut engine, &first, &options(3, true));
        assert_eq!(reused, 0);
        let second = [&first[..], &answer, &[3, 1, 4]].concat();
        let (reused, tokens, logits) = made(&mut engine, &second, &options(2, true));
        assert_eq!(reused, 19 + 2);
        let read = [&second[..], &tokens[..1]].concat();
        let expected = made(cpu, &read, &options(1, false)).2;
        let off = distance(&expected, &logits);
        assert!(off < 3e-2, "off by {off}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    /// Whatever prompts follow each other.
    #[test]
    fn any_prompt_after_any_other(
        name in proptest::sample::select(vec!["tiny-qwen2", RECURRENT[0], RECURRENT[2]]),
        prompts in proptest::collection::vec(proptest::collection::vec(0u32..2, 1..40), 1..6),
        goes_on in any::<[bool; 6]>(),
    ) {
        let model = fixture(name);
        let fresh = &mut Engine::new(&model, &config(Device::Cpu)).unwrap();
        let engine = &mut Engine::new(&model, &config(Device::Cpu)).unwrap();
        let mut in_cache = Vec::new();
        for (prompt, goes_on) in prompts.into_iter().zip(goes_on) {
            let prompt = if goes_on && in_cache.len() < 50 { [&in_cache[..], &prompt].concat() } else { prompt };
            let alike = in_cache.iter().zip(&prompt[..prompt.len() - 1]).take_while(|(a, b)| a == b).count();
            let known = if RECURRENT.contains(&name) && alike < in_cache.len() { 0 } else { alike };
            let tokens = judge(engine, fresh, &prompt, known);
            in_cache = [&prompt[..], &tokens[..tokens.len() - 1]].concat();
        }
    }
}
