//! Sequences that come and go while others are decoded: each gets the tokens, and the text, that it gets alone.

use super::batch::{On, options, prompts};
use super::cuda::has_kernel;
use super::models::{MODELS, RECURRENT};
use super::simt::{MANY_ROWS, model as small_model};
use perpetua::engine::{BatchGeneration, EngineError};
use perpetua::exec::{RunError, cuda};
use perpetua::{Device, End, Engine, EngineConfig, GenerateOptions, Model, PromptPrecision, Token};
use perpetua_shared::EventId;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

fn fixture(name: &str) -> Model {
    Model::load(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)).unwrap()
}

fn config(device: Device, sequences: Option<usize>) -> EngineConfig {
    EngineConfig {
        device,
        threads: Some(2),
        max_context: Some(64),
        chunks: vec![5, 16],
        sequences,
        prompt_precision: PromptPrecision::Exact,
        ..EngineConfig::default()
    }
}

/// A sequence's tokens and text, and why it ended.
type Outcome = (Vec<u32>, String, Option<End>);

fn alone(engine: &mut Engine, prompt: &[u32], options: &GenerateOptions) -> Outcome {
    let options = GenerateOptions { reuse_prefix: false, ..options.clone() };
    let mut generation = engine.generate(prompt, &options).unwrap();
    let tokens: Vec<Token> = generation.by_ref().map(Result::unwrap).collect();
    (tokens.iter().map(|t| t.id).collect(), tokens.iter().map(|t| &*t.text).collect(), generation.end())
}

/// Takes up to `n` tokens into `made`.
fn take(batch: &mut BatchGeneration<'_>, n: usize, made: &mut BTreeMap<usize, Vec<Token>>) {
    for token in batch.take(n) {
        let (sequence, token) = token.unwrap();
        made.entry(sequence).or_default().push(token);
    }
}

fn outcome(batch: &BatchGeneration<'_>, sequence: usize, made: &BTreeMap<usize, Vec<Token>>) -> Outcome {
    let tokens = made.get(&sequence).map_or(&[][..], |made| made);
    (tokens.iter().map(|t| t.id).collect(), tokens.iter().map(|t| &*t.text).collect(), batch.end(sequence))
}

/// Options that differ in everything a sequence has for itself; `n` tokens.
fn own_options(number: usize, n: usize, stop: Option<u32>) -> GenerateOptions {
    let drawn = GenerateOptions { temperature: 2.5, top_k: 30, top_p: 0.95, seed: 77 + number as u64, ..options(n) };
    let of_kind = if number.is_multiple_of(2) { options(n) } else { drawn };
    GenerateOptions { stop_tokens: Some(stop.into_iter().collect()), ..of_kind }
}

/// Workers know nothing of one's stop string, and others go on as they would have.
#[test]
fn a_stop_string_ends_one_of_a_batch() {
    for name in [MODELS[0], RECURRENT[0]] {
        a_stop_string_ends_one_of(&fixture(name));
    }
}

fn a_stop_string_ends_one_of(model: &Model) {
    let prompts = prompts(model, &[9, 38, 6]);
    let mut single = Engine::new(model, &config(Device::Cpu, None)).unwrap();
    let free = options(12);
    let mut expected: Vec<Outcome> = prompts.iter().map(|prompt| alone(&mut single, prompt, &free)).collect();
    let stop = expected[1].1.chars().skip(6).take(3).collect::<String>();
    let stopped = GenerateOptions { stop_strings: vec![stop.clone()], ..free.clone() };
    expected[1] = alone(&mut single, &prompts[1], &stopped);
    assert_eq!(expected[1].2, Some(End::StopString), "{stop:?}");
    let mut engine = Engine::new(model, &config(Device::Cpu, Some(2))).unwrap();
    let mut batch = engine.batch().unwrap();
    let mut made = BTreeMap::new();
    batch.add(&prompts[0], &free).unwrap();
    batch.add(&prompts[1], &stopped).unwrap();
    while batch.room() == 0 {
        take(&mut batch, 1, &mut made);
    }
    // What goes on from there, in the cache of the one that ended, if it was that one, which workers may have gone on
    // with.
    let longer = [&prompts[1][..], &expected[1].0, &[7, 8]].concat();
    let asked = GenerateOptions { reuse_prefix: true, ..free.clone() };
    expected.insert(2, alone(&mut single, &longer, &free));
    batch.add(&longer, &asked).unwrap();
    take(&mut batch, usize::MAX, &mut made);
    batch.add(&prompts[2], &asked).unwrap();
    take(&mut batch, usize::MAX, &mut made);
    assert!(batch.is_ended() && batch.room() == 2);
    for (number, expected) in expected.iter().enumerate() {
        assert_eq!(outcome(&batch, number, &made), *expected, "sequence {number}");
    }
}

#[test]
fn who_joins_gets_what_it_gets_alone_and_disturbs_nobody() {
    for name in MODELS {
        let model = fixture(name);
        let prompts = prompts(&model, &[9, 1, 38, 6, 17, 60]);
        let mut single = Engine::new(&model, &config(Device::Cpu, None)).unwrap();
        // One that a token ends which others make without ending.
        let stop = alone(&mut single, &prompts[2], &own_options(2, 10, None)).0[4];
        let asked: Vec<GenerateOptions> =
            (0..6).map(|number| own_options(number, 6 + number, (number == 2).then_some(stop))).collect();
        let expected: Vec<Outcome> =
            prompts.iter().zip(&asked).map(|(prompt, options)| alone(&mut single, prompt, options)).collect();
        assert_eq!((expected[2].2, expected[5].2), (Some(End::StopToken), Some(End::ContextFull)), "{name}");
        let mut engine = Engine::new(&model, &config(Device::Cpu, Some(3))).unwrap();
        let mut batch = engine.batch().unwrap();
        assert!(batch.is_ended() && batch.next().is_none() && batch.room() == 3);
        let mut made = BTreeMap::new();
        for (number, (prompt, options)) in prompts.iter().zip(&asked).enumerate() {
            // As soon as there is room, and in the middle of what others make.
            while batch.room() == 0 {
                take(&mut batch, 1, &mut made);
            }
            assert_eq!(batch.add(prompt, options).unwrap(), number);
            assert_eq!(batch.end(number), None);
            take(&mut batch, 2, &mut made);
        }
        take(&mut batch, usize::MAX, &mut made);
        assert!(batch.is_ended() && batch.room() == 3);
        for (number, expected) in expected.iter().enumerate() {
            assert_eq!(outcome(&batch, number, &made), *expected, "{name}, sequence {number}");
        }
        // It has ended, and goes on.
        assert_eq!(batch.add(&prompts[0], &asked[0]).unwrap(), 6);
        take(&mut batch, usize::MAX, &mut made);
        assert_eq!(outcome(&batch, 6, &made), expected[0], "{name}");
    }
}

#[test]
fn one_is_cancelled_one_has_no_more_time_and_the_others_go_on() {
    // So many that whoever is to be cancelled has not made all of them before.
    const N: usize = 1500;
    let model = fixture("tiny-qwen2");
    let prompts = prompts(&model, &[9, 4, 11]);
    let long = |sequences| EngineConfig { max_context: Some(2048), ..config(Device::Cpu, sequences) };
    let mut single = Engine::new(&model, &long(None)).unwrap();
    let expected: Vec<Outcome> = prompts.iter().map(|prompt| alone(&mut single, prompt, &options(N))).collect();
    let mut engine = Engine::new(&model, &long(Some(4))).unwrap();
    let mut batch = engine.generate_batch(&prompts, &options(N)).unwrap();
    let mut made = BTreeMap::new();
    take(&mut batch, 7, &mut made);
    // Before it has read all of its prompt.
    let hasty = GenerateOptions { max_time: Some(Duration::ZERO), ..options(N) };
    assert_eq!(batch.add(&[5; 40], &hasty).unwrap(), 3);
    batch.cancel(1).unwrap();
    batch.cancel(1).unwrap();
    batch.cancel(99).unwrap();
    take(&mut batch, usize::MAX, &mut made);
    assert_eq!(outcome(&batch, 0, &made), expected[0]);
    assert_eq!(outcome(&batch, 2, &made), expected[2]);
    let (cancelled, _, end) = outcome(&batch, 1, &made);
    assert_eq!(end, Some(End::Stopped));
    assert!(!cancelled.is_empty() && expected[1].0.starts_with(&cancelled), "{cancelled:?}");
    let (late, _, end) = outcome(&batch, 3, &made);
    assert!(late.len() < N && end == Some(End::Deadline), "{late:?}, {end:?}");

    // Told to stop, all end, and who comes later with them.
    batch.add(&prompts[0], &options(N)).unwrap();
    take(&mut batch, 1, &mut made);
    batch.stopper().stop();
    take(&mut batch, usize::MAX, &mut made);
    let (stopped, _, end) = outcome(&batch, 4, &made);
    assert!(expected[0].0.starts_with(&stopped) && end == Some(End::Stopped), "{stopped:?}, {end:?}");
    assert_eq!(batch.add(&prompts[0], &options(N)).unwrap(), 5);
    assert_eq!((batch.end(5), batch.next().is_none()), (Some(End::Stopped), true));
}

#[test]
fn what_cannot_join_is_refused_and_the_others_go_on() {
    let model = fixture("tiny-llama");
    let prompts = prompts(&model, &[3, 5, 4]);
    let mut engine = Engine::new(&model, &config(Device::Cpu, Some(2))).unwrap();
    let mut batch = engine.generate_batch(&prompts[..2], &options(12)).unwrap();
    let refused = |batch: &mut BatchGeneration<'_>, prompt: &[u32], options| batch.add(prompt, &options).unwrap_err();
    let full = refused(&mut batch, &prompts[2], options(1));
    assert!(matches!(full, EngineError::Full { sequences: 2 }), "{full}");
    assert_eq!(batch.add(&prompts[2], &options(0)).unwrap(), 2, "what wants nothing needs no room");
    assert_eq!(batch.end(2), Some(End::MaxTokens));
    (0..2).for_each(|number| batch.cancel(number).unwrap());
    assert!(matches!(refused(&mut batch, &[], options(1)), EngineError::EmptyPrompt));
    assert!(matches!(refused(&mut batch, &[1; 65], options(1)), EngineError::PromptTooLong { tokens: 65, .. }));
    assert!(refused(&mut batch, &[5000], options(1)).to_string().contains("token id 5000"));
    let cold = GenerateOptions { temperature: -1.0, ..options(1) };
    assert!(matches!(refused(&mut batch, &[1], cold), EngineError::Option { name: "temperature", .. }));
    let stops = |range: std::ops::Range<u32>| GenerateOptions { stop_tokens: Some(range.collect()), ..options(3) };
    // Under way until its tokens have been taken, however fast it is.
    let one = batch.add(&prompts[0], &stops(100..116)).unwrap();
    let error = refused(&mut batch, &prompts[1], stops(115..117)).to_string();
    assert_eq!(error, "stop tokens 17 different ones of all sequences under way: expected at most 16");
    let other = batch.add(&prompts[1], &stops(110..116)).unwrap();
    assert!(batch.by_ref().all(|token| token.is_ok()));
    assert_eq!([one, other].map(|number| batch.end(number)), [Some(End::MaxTokens); 2]);
}

#[test]
fn who_joins_reads_only_what_its_cache_lacks() {
    let model = fixture("tiny-qwen3");
    let mut single = Engine::new(&model, &config(Device::Cpu, None)).unwrap();
    let mut engine = Engine::new(&model, &config(Device::Cpu, Some(2))).unwrap();
    let asked = GenerateOptions { reuse_prefix: true, ..options(8) };
    let prompts = prompts(&model, &[20, 20]);
    let mut batch = engine.batch().unwrap();
    let mut made = BTreeMap::new();
    prompts.iter().for_each(|prompt| _ = batch.add(prompt, &asked).unwrap());
    take(&mut batch, usize::MAX, &mut made);
    for (number, prompt) in prompts.iter().enumerate().rev() {
        // The next turn of either conversation finds its own cache.
        let before = made[&number].iter().map(|token| token.id);
        let next: Vec<u32> = prompt.iter().copied().chain(before).chain([7, 8, 9]).collect();
        let expected = alone(&mut single, &next, &asked);
        let sequence = batch.add(&next, &asked).unwrap();
        take(&mut batch, usize::MAX, &mut made);
        assert_eq!(outcome(&batch, sequence, &made), expected, "the second turn of {number}");
        assert_eq!(
            batch.reused(sequence),
            next.len() - 4,
            "all but the token that had been made last, and those that are new"
        );
    }
}

/// On the simulated GPU a run is over when it has been started; by the PTX it goes on beside whoever adds.
#[test]
fn sequences_join_on_a_gpu() {
    if !has_kernel() {
        return;
    }
    let (_dir, model) = small_model(MANY_ROWS);
    let prompts = prompts(&model, &[9, 21, 1]);
    for at in [On::Simt, On::Ptx(cuda::Mode::Persistent), On::Ptx(cuda::Mode::PerOperator)] {
        let mut engine = Engine::new(&model, &at.config(3, config(Device::Cpu, Some(2)))).unwrap();
        let asked = [own_options(0, 5, None), own_options(1, 4, None), own_options(3, 3, None)];
        // Beside another with a row of its own in the pass, rounding may be another: who was there before is compared
        // with itself.
        let mut run = |n: usize| {
            let mut batch = engine.batch().unwrap();
            let mut made = BTreeMap::new();
            for (prompt, options) in prompts.iter().zip(&asked) {
                while batch.room() == 0 {
                    take(&mut batch, 1, &mut made);
                }
                batch.add(prompt, options).unwrap();
                take(&mut batch, n, &mut made);
            }
            take(&mut batch, usize::MAX, &mut made);
            (0..3).map(|number| outcome(&batch, number, &made)).collect::<Vec<_>>()
        };
        let expected = run(usize::MAX);
        assert!(expected.iter().all(|(_, _, end)| *end == Some(End::MaxTokens)), "{at:?}");
        assert_eq!(expected.iter().map(|(ids, ..)| ids.len()).collect::<Vec<_>>(), [5, 4, 3]);
        for n in [0, 1, 3] {
            assert_eq!(run(n), expected, "{at:?}, after {n} tokens");
        }
    }
}

/// A run that fails ends all of its sequences, says so once, and leaves nothing that is taken for a prefix; the batch
/// goes on.
#[test]
fn a_fault_ends_all_and_the_batch_goes_on() {
    if !has_kernel() {
        return;
    }
    let (_dir, model) = small_model(MANY_ROWS);
    let prompts = prompts(&model, &[9, 4]);
    let mut engine =
        Engine::new(&model, &On::Ptx(cuda::Mode::Persistent).config(3, config(Device::Cpu, Some(2)))).unwrap();
    let asked = GenerateOptions { reuse_prefix: true, ..options(3) };
    let run = |batch: &mut BatchGeneration<'_>| {
        let mut made = BTreeMap::new();
        let numbers = [0, 1].map(|at| batch.add(&prompts[at], &asked).unwrap());
        take(batch, usize::MAX, &mut made);
        numbers.map(|number| outcome(batch, number, &made))
    };
    let expected = run(&mut engine.batch().unwrap());
    let last = engine.resident().compiled().image.view().events.len() as u32 - 1;
    engine.resident_mut().cuda().unwrap().miscount(EventId(last)).unwrap();
    let mut batch = engine.batch().unwrap();
    // Whoever joins next, or takes a token, hears of it.
    let number = batch.add(&prompts[0], &asked).unwrap();
    let error = batch.find_map(Result::err).expect("an event never fires");
    assert!(matches!(&error, EngineError::Run(RunError::Stalled { .. })), "{error}");
    assert!(batch.next().is_none() && batch.is_ended() && batch.room() == 2);
    assert_eq!(batch.end(number), Some(End::Failed));
    assert_eq!(run(&mut batch), expected);
    assert_eq!([1, 2].map(|number| batch.reused(number)), [0, 0]);
}

/// What is done with a batch.
#[derive(Clone, Debug)]
enum Deed {
    Add { length: usize, n: usize, reuse: bool },
    Take(usize),
    Cancel(usize),
}

fn deeds() -> impl Strategy<Value = Vec<Deed>> {
    let deed = prop_oneof![
        4 => (1usize..50, 0usize..12, any::<bool>()).prop_map(|(length, n, reuse)| Deed::Add { length, n, reuse }),
        3 => (0usize..9).prop_map(Deed::Take),
        1 => (0usize..12).prop_map(Deed::Cancel),
    ];
    proptest::collection::vec(deed, 1..24)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    /// Whoever comes and goes when, everyone gets what it gets alone, or the beginning of it where it was cancelled.
    #[test]
    fn any_coming_and_going(
        name in proptest::sample::select(vec!["tiny-llama", RECURRENT[0]]),
        deeds in deeds(),
        sequences in 1usize..4,
        threads in 1usize..4,
    ) {
        let model = fixture(name);
        let mut single = Engine::new(&model, &config(Device::Cpu, None)).unwrap();
        let with = EngineConfig { threads: Some(threads), ..config(Device::Cpu, Some(sequences)) };
        let mut engine = Engine::new(&model, &with).unwrap();
        let mut batch = engine.batch().unwrap();
        let (mut made, mut asked) = (BTreeMap::new(), Vec::new());
        for deed in deeds {
            match deed {
                Deed::Add { length, n, reuse } => {
                    // Few different prompts, so that some begin as others do.
                    let prompt: Vec<u32> = (0..length).map(|i| (i / 20 * (length % 3) + i % 7 + 5) as u32).collect();
                    let options = GenerateOptions { reuse_prefix: reuse, ..own_options(length, n, Some(11)) };
                    match batch.add(&prompt, &options) {
                        Ok(number) => {
                            prop_assert_eq!(number, asked.len());
                            asked.push((prompt, options));
                        }
                        Err(EngineError::Full { .. }) => prop_assert!(n > 0 && batch.room() == 0),
                        Err(error) => return Err(TestCaseError::fail(error.to_string())),
                    }
                }
                Deed::Take(n) => take(&mut batch, n, &mut made),
                Deed::Cancel(number) => batch.cancel(number).unwrap(),
            }
        }
        take(&mut batch, usize::MAX, &mut made);
        for (number, (prompt, options)) in asked.iter().enumerate() {
            let (expected, text, end) = alone(&mut single, prompt, options);
            let (ids, part, found) = outcome(&batch, number, &made);
            if found == Some(End::Stopped) {
                prop_assert!(expected.starts_with(&ids), "{:?} of {:?}", ids, expected);
            } else {
                prop_assert_eq!((ids, part, found), (expected, text, end));
            }
        }
    }
}
