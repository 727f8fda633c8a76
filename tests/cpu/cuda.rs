//! The host side of the GPU, against a driver that records every call and runs the kernel on the simulated GPU.

use perpetua::compile::Binding;
use perpetua::cuda::driver::{Context, Driver, Stream, code};
use perpetua::cuda::fake::{Fake, Options};
use perpetua::cuda::probe::{Prober, TilesFrom};
use perpetua::cuda::{Gpu, GpuError, upload_threads};
use perpetua::device_image::device_image;
use perpetua::exec::operators::operators;
use perpetua::exec::threads::usable_cores;
use perpetua::exec::{Executor, RunError, cuda};
use perpetua::model::{SynthOptions, SynthSource, synth};
use perpetua::{Device, Engine, EngineConfig, EngineError, GenerateOptions, Model};
use perpetua_device::{queue, turns};
use perpetua_shared::control::{Control, End, Step};
use perpetua_shared::image::BindingKind;
use perpetua_shared::launch::{BLOCK_THREADS, ENTRY, Mail, SHARED_BYTES};
use perpetua_shared::{EventId, Fault, ProgramId, TaskId};
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

const PROMPT: [u32; 6] = [3, 80, 41, 5, 0, 66];
const N_SMS: u32 = 3;
const MEMORY: u64 = 64 << 20;

fn small() -> (tempfile::TempDir, Model) {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let out = dir.path().join("small");
    synth(SynthSource::Preset("tiny-simt"), &out, &SynthOptions::default(), &mut |_, _| ControlFlow::Continue(()))
        .expect("a folder of its own");
    let model = Model::load(&out).expect("just written");
    (dir, model)
}

/// Without a device toolchain there is no kernel to load.
pub(crate) fn has_kernel() -> bool {
    if device_image().is_none() {
        println!("skipped: no device toolchain when this was built (./x setup installs one)");
    }
    device_image().is_some()
}

fn config(gpu: Gpu) -> EngineConfig {
    EngineConfig {
        device: Device::Cuda,
        max_context: Some(24),
        chunks: vec![4],
        gpu: Some(gpu),
        ..EngineConfig::default()
    }
}

pub(crate) fn options(max_new_tokens: usize) -> GenerateOptions {
    GenerateOptions { max_new_tokens, stop_tokens: Some(Vec::new()), ..GenerateOptions::default() }
}

fn fake() -> Arc<Fake> {
    Arc::new(Fake::new(Options::new(N_SMS, MEMORY)))
}

fn generate(engine: &mut Engine, prompt: &[u32], n: usize) -> Result<Vec<u32>, EngineError> {
    engine.generate(prompt, &options(n))?.map(|token| token.map(|token| token.id)).collect()
}

/// Of the pass that chose the last token.
fn logits(engine: &mut Engine) -> Vec<u32> {
    engine.last_logits().expect("it runs").expect("a token was made").iter().map(|logit| logit.to_bits()).collect()
}

#[test]
fn tokens_come_through_the_mailbox_and_nothing_is_left_behind() {
    if !has_kernel() {
        return;
    }
    let (dir, model) = small();
    let cpu = EngineConfig { device: Device::Cpu, threads: Some(2), gpu: None, ..config(gpu(&fake())) };
    let expected = generate(&mut Engine::new(&model, &cpu).expect("it compiles"), &PROMPT, 3).expect("it runs");
    let driver = fake();
    let mut handed = 0;
    {
        let mut engine =
            Engine::with_progress(&model, &config(gpu(&driver)), |bytes| handed += bytes).expect("resident");
        let loaded = driver.calls().len();
        // Twice: counters go on counting from run to run.
        for _ in 0..2 {
            assert_eq!(generate(&mut engine, &PROMPT, 3).expect("it runs"), expected);
        }
        // Two passes of the prompt, the second of which makes a token, and two for the others.
        let stamps = engine.stamps();
        assert_eq!(stamps.len(), 1 + 4);
        assert!(stamps.is_sorted());

        // What a run is, call by call: the prompt and the control block go in; the kernel is launched; the control
        // block and the fault record come out.
        let calls = driver.calls();
        let run: Vec<&str> = calls[loaded..].iter().map(String::as_str).collect();
        let launch = format!("cuLaunchCooperativeKernel blocks {N_SMS} threads {BLOCK_THREADS} shared {SHARED_BYTES}");
        let control = size_of::<perpetua_shared::control::Control>();
        let expected = [
            format!("cuMemcpyHtoDAsync {}", 4 * PROMPT.len()),
            "cuStreamSynchronize".to_owned(),
            format!("cuMemcpyHtoDAsync {control}"),
            "cuStreamSynchronize".to_owned(),
            launch,
            format!("cuMemcpyDtoHAsync {control}"),
            "cuStreamSynchronize".to_owned(),
            format!("cuMemcpyDtoHAsync {}", size_of::<perpetua_shared::Fault>()),
            "cuStreamSynchronize".to_owned(),
        ];
        assert_eq!(run, [&expected[..], &expected].concat());
    }
    let weights: u64 = std::fs::metadata(dir.path().join("small/model.safetensors")).expect("a file").len();
    assert!(handed + 4096 > weights, "{handed} bytes were handed over, the checkpoint has {weights}");
    assert_eq!(driver.leaks(), Vec::<String>::new());
    let calls = driver.calls();
    let of = |name: &str| calls.iter().filter(|call| call.starts_with(name)).count();
    assert_eq!((of("cuMemAlloc "), of("cuMemFree"), of("cuModuleLoadDataEx")), (1, 1 + of("cuMemFreeHost"), 1));
}

/// What loading is, call by call: room is asked for and taken once, the kernel is got ready before anything is copied,
/// and what the host does not bring is zeroed.
#[test]
fn loading_is_so_many_calls_in_this_order() {
    let Some(embedded) = device_image().filter(|_| has_kernel()) else { return };
    let (_dir, model) = small();
    let driver = fake();
    let mut handed = 0;
    let mut engine = Engine::with_progress(&model, &config(gpu(&driver)), |bytes| handed += bytes).expect("resident");
    let calls = driver.calls();
    let device_bytes = engine.resident_mut().cuda().expect("a GPU").device_bytes();
    let compiled = engine.resident().compiled();
    let (view, loads) = (compiled.image.view(), compiled.image.loads());

    // What the image is on the device, section by section, and what is only the kernel's.
    let sections = [
        8 * compiled.bindings.len(),
        8 * compiled.bindings.len(),
        size_of_val(view.programs),
        size_of_val(view.tasks),
        4 * turns::words(&view) * view.tasks.len(),
        size_of_val(view.events),
        size_of_val(view.waits),
        size_of_val(view.triggers),
        size_of_val(view.list_heads),
        size_of_val(view.lists),
        size_of_val(loads.data_heads),
        size_of_val(loads.data),
        size_of_val(loads.prefetch_heads),
        size_of_val(loads.prefetches),
    ];
    let counters = 4 * (view.events.len() + queue::words(view.max_just_in_time()) as usize);
    let own =
        [counters, size_of::<Fault>(), 4 * N_SMS as usize, 4 * N_SMS as usize].map(|bytes| bytes.next_multiple_of(256));
    let bindings = || compiled.bindings.iter();
    assert!(bindings().all(|binding| binding.align_bytes <= 256), "256 bytes is what everything is aligned to here");
    let all = sections.iter().map(|bytes| *bytes as u64).chain(bindings().map(|binding| binding.bytes));
    let needed = all.map(|bytes| bytes.next_multiple_of(256)).sum::<u64>() + own.iter().sum::<usize>() as u64;
    assert_eq!(device_bytes, needed);

    let tokens = bindings().find(|binding| binding.kind == BindingKind::Tokens).expect("a decoder has them");
    let mut expected: Vec<String> = vec![
        "cuDeviceGetCount".into(),
        "cuDevicePrimaryCtxRetain 0".into(),
        "cuMemGetInfo".into(),
        format!("cuModuleLoadDataEx {}", if embedded.worker.cubin().is_some() { "cubin" } else { "PTX" }),
        // Once more, to see that the driver takes it whole.
        format!("cuModuleGetFunction {ENTRY}"),
        format!("cuModuleGetFunction {ENTRY}"),
        format!("cuFuncSetAttribute MAX_DYNAMIC_SHARED_SIZE_BYTES {SHARED_BYTES}"),
        format!("cuOccupancyMaxActiveBlocksPerMultiprocessor threads {BLOCK_THREADS} shared {SHARED_BYTES}"),
        format!("cuMemAlloc {needed}"),
        // The one beside the kernel's, and the kernel's.
        "cuStreamCreate".into(),
        "cuStreamCreate".into(),
        // What is staged, the word that stops, and a letter for each token and the prompt's passes.
        format!("cuMemHostAlloc {}", 1 << 20),
        "cuMemHostAlloc 4".into(),
        format!("cuMemHostAlloc {}", (tokens.bytes as usize / 4 + 1) * size_of::<Mail>()),
    ];
    let is_brought = |binding: &&Binding| binding.kind == BindingKind::Weight || binding.contents.is_some();
    let zeroed = bindings().filter(|binding| !is_brought(binding) && binding.bytes > 0);
    expected.extend(zeroed.map(|binding| format!("cuMemsetD8Async 0 {}", binding.bytes)));
    expected.push(format!("cuMemsetD8Async 0 {}", own.iter().sum::<usize>()));
    expected.push("cuStreamSynchronize".into());
    let (before, uploads) = calls.split_at(expected.len());
    assert_eq!(before, expected);

    // Then several threads bring what there is, in any order: each piece once, by a stream a thread, through two
    // buffers each as large as the largest, which are one allocation; all is given back.
    let mut pieces: Vec<usize> = sections.into_iter().filter(|bytes| *bytes > 0).collect();
    pieces.extend(bindings().filter(is_brought).map(|binding| binding.bytes as usize));
    let of = |name: &str| -> Vec<usize> {
        let arguments = uploads.iter().filter_map(|call| call.strip_prefix(name));
        let mut sizes: Vec<usize> = arguments.map(|bytes| bytes.parse().expect("a size")).collect();
        sizes.sort_unstable();
        sizes
    };
    pieces.sort_unstable();
    assert_eq!(of("cuMemcpyHtoDAsync "), pieces);
    assert_eq!(handed, pieces.iter().sum::<usize>() as u64);
    let n_threads = upload_threads(usable_cores()).min(pieces.len());
    assert_eq!(of("cuMemHostAlloc "), [2 * n_threads * pieces[pieces.len() - 1]]);
    let count = |name: &str| uploads.iter().filter(|call| *call == name).count();
    let (made, given_back) = (count("cuStreamCreate"), [count("cuStreamDestroy"), count("cuMemFreeHost")]);
    assert_eq!((made, given_back), (n_threads, [n_threads, 1]));
    assert_eq!(uploads.len(), pieces.len() + 2 * n_threads + 2 + count("cuStreamSynchronize"), "{uploads:?}");
}

/// A deadline ends a launch that is under way, and one that has not begun; a launch per operator likewise.
#[test]
fn a_deadline_ends_the_kernel() {
    if !has_kernel() {
        return;
    }
    let (_dir, model) = small();
    for mode in [cuda::Mode::Persistent, cuda::Mode::PerOperator] {
        let driver = fake();
        let kernel = cuda::Options { mode, ..Default::default() };
        let mut engine = Engine::new(&model, &EngineConfig { cuda: kernel, ..config(gpu(&driver)) }).expect("resident");
        let expected = generate(&mut engine, &PROMPT, 3).expect("it runs");
        // All of its tokens take seconds here.
        for time in [Duration::ZERO, Duration::from_millis(30)] {
            let late = GenerateOptions { max_time: Some(time), ..options(18) };
            let mut generation = engine.generate(&PROMPT, &late).expect("it starts");
            let made: Vec<u32> = generation.by_ref().map(|token| token.expect("it runs").id).collect();
            assert_eq!(generation.end(), Some(End::Deadline), "{mode:?}, {time:?}: {} tokens", made.len());
            assert!(made.len() < 18 && made.iter().zip(&expected).all(|(a, b)| a == b), "{made:?}, {expected:?}");
            assert!(
                !time.is_zero() || made.is_empty(),
                "it ends with the first pass, which reads 4 of 6 tokens: {made:?}"
            );
        }
        // The next run has its own time.
        assert_eq!(generate(&mut engine, &PROMPT, 3).expect("it runs"), expected);
        drop(engine);
        assert_eq!(driver.leaks(), Vec::<String>::new());
    }
}

/// Another thread's word gets through while the kernel runs; of a run that has ended, or whose engine has gone, it is
/// not passed on.
#[test]
fn another_thread_stops_the_kernel() {
    if !has_kernel() {
        return;
    }
    let (_dir, model) = small();
    let driver = fake();
    let mut engine = Engine::new(&model, &config(gpu(&driver))).expect("resident");
    let expected = generate(&mut engine, &PROMPT, 3).expect("it runs");
    let mut generation = engine.generate(&PROMPT, &options(18)).expect("it starts");
    let kept = generation.stopper();
    let stopper = kept.clone();
    let thread = std::thread::spawn(move || {
        // All of its tokens take seconds here.
        std::thread::sleep(Duration::from_millis(30));
        stopper.stop();
    });
    let made: Vec<u32> = generation.by_ref().map(|token| token.expect("it runs").id).collect();
    thread.join().expect("it only stops");
    assert_eq!(generation.end(), Some(End::Stopped), "{} tokens", made.len());
    assert!(made.len() < 18 && made.iter().zip(&expected).all(|(a, b)| a == b), "{made:?}, {expected:?}");
    drop(generation);

    let mut generation = engine.generate(&PROMPT, &options(3)).expect("it starts");
    kept.stop();
    let unused = generation.stopper();
    let made: Vec<u32> = generation.by_ref().map(|token| token.expect("it runs").id).collect();
    assert_eq!((made, generation.end()), (expected, Some(End::MaxTokens)));
    drop(generation);
    let dropped = engine.generate(&PROMPT, &options(18)).expect("it starts").stopper();
    drop(engine);
    let calls = driver.calls().len();
    [kept, unused, dropped].iter().for_each(perpetua::Stopper::stop);
    assert_eq!(driver.calls()[calls..], [""; 0]);
    assert_eq!(driver.leaks(), Vec::<String>::new());
}

/// The same tokens as the persistent kernel's, from a graph for each pass; and what such a run is, call by call.
#[test]
fn operators_in_graphs_make_the_same_tokens() {
    if !has_kernel() {
        return;
    }
    let (_dir, model) = small();
    let mut persistent = Engine::new(&model, &config(gpu(&fake()))).expect("resident");
    let expected = generate(&mut persistent, &PROMPT, 3).expect("it runs");
    let driver = fake();
    let per_operator = |driver: &Arc<Fake>| {
        let options = cuda::Options { mode: cuda::Mode::PerOperator, ..Default::default() };
        EngineConfig { cuda: options, ..config(gpu(driver)) }
    };
    {
        let mut engine = Engine::new(&model, &per_operator(&driver)).expect("resident");
        let image = engine.resident().compiled().image.clone();
        let view = image.view();
        // Each program is a chain of launches, one for each of its operators, a block for each task.
        let calls = driver.calls();
        let of_graphs: Vec<&str> =
            calls.iter().map(String::as_str).filter(|call| call.starts_with("cuGraph")).collect();
        let mut wanted = Vec::new();
        for (number, program) in view.programs.iter().enumerate() {
            wanted.push("cuGraphCreate".to_owned());
            let mut at = program.task_first;
            let mut place = "first";
            while at < program.task_first + program.task_count {
                let op = view.tasks[at as usize].op;
                let blocks = view.tasks[at as usize..].iter().take_while(|task| task.op == op).count() as u32;
                wanted.push(format!(
                    "cuGraphAddKernelNode {place}: blocks {blocks} threads {BLOCK_THREADS} shared {SHARED_BYTES} program \
                     {number} task {at}"
                ));
                at += blocks;
                place = "after a node";
            }
            wanted.extend(["cuGraphInstantiateWithFlags 0".to_owned(), "cuGraphDestroy".to_owned()]);
        }
        assert_eq!(of_graphs, wanted);

        for _ in 0..2 {
            let before = driver.calls().len();
            assert_eq!(generate(&mut engine, &PROMPT, 3).expect("it runs"), expected);
            // The same bodies on the same tiles: the same bits.
            assert_eq!(logits(&mut engine), logits(&mut persistent));
            let calls = driver.calls();
            let launches: Vec<&str> =
                calls[before..].iter().map(String::as_str).filter(|call| call.contains("aunch")).collect();
            // Two passes of the prompt, the second of which makes a token, and two for the others.
            assert_eq!(launches, ["cuGraphLaunch"; 4]);
        }
        assert!(engine.stamps().len() == 1 + 4 && engine.stamps().is_sorted());

        // The host says stop; what was launched ahead does nothing.
        let mut generation = engine.generate(&PROMPT, &options(18)).expect("it starts");
        generation.stop();
        assert_eq!(generation.by_ref().count(), 0);
        assert_eq!(generation.end(), Some(End::Stopped));
        drop(generation);

        // A token that ends the loop.
        let stop = GenerateOptions { stop_tokens: Some(vec![expected[1]]), ..options(18) };
        let made: Result<Vec<u32>, _> =
            engine.generate(&PROMPT, &stop).expect("it starts").map(|token| token.map(|token| token.id)).collect();
        let until = expected.iter().position(|token| *token == expected[1]).expect("it is there");
        assert_eq!(made.expect("it runs"), expected[..=until]);

        // A fault, and a run after it.
        let error = engine.resident_mut().run_tokens(ProgramId(1), &[1, u32::MAX]).expect_err("out of range");
        assert!(matches!(error, RunError::TokenOutOfRange { .. }), "{error}");
        // More passes than are launched ahead.
        assert_eq!(generate(&mut engine, &PROMPT, 18).expect("it runs")[..3], expected);
    }
    assert_eq!(driver.leaks(), Vec::<String>::new());

    // Every call of it that fails is told, and nothing is left behind.
    for call in ["cuGraphCreate", "cuGraphAddKernelNode", "cuGraphInstantiateWithFlags", "cuGraphLaunch"] {
        let driver = Arc::new(Fake::new(Options { fails: Some((call, 1)), ..Options::new(N_SMS, MEMORY) }));
        let error = Engine::new(&model, &per_operator(&driver))
            .and_then(|mut engine| generate(&mut engine, &PROMPT, 1))
            .expect_err(call)
            .to_string();
        assert!(error.contains(call), "{call}: {error}");
        assert_eq!(driver.leaks(), Vec::<String>::new(), "after {call} failed");
    }
}

/// Whatever the image, no task waits on another of its launch, and every task is in one.
#[test]
fn an_operator_is_a_launch_whose_tasks_wait_on_none_of_them() {
    let (_dir, model) = small();
    let config = EngineConfig { device: Device::Simt, chunks: vec![4, 8], gpu: None, ..config(gpu(&fake())) };
    let engine = Engine::new(&model, &config).expect("it compiles");
    let image = &engine.resident().compiled().image;
    let view = image.view();
    for (number, program) in view.programs.iter().enumerate() {
        let launches = operators(image, number);
        let tasks: Vec<u32> = launches.iter().cloned().flatten().collect();
        assert_eq!(tasks, Vec::from_iter(program.task_first..program.task_first + program.task_count));
        let ops: BTreeSet<u32> = tasks.iter().map(|task| view.tasks[*task as usize].op).collect();
        assert_eq!(launches.len(), ops.len(), "as many launches as operators");
        for launch in launches {
            let tasks = &view.tasks[launch.start as usize..launch.end as usize];
            let triggered: Vec<u32> = tasks.iter().flat_map(|task| view.triggers(task)).copied().collect();
            assert!(tasks.iter().flat_map(|task| view.waits(task)).all(|event| !triggered.contains(event)));
        }
    }
}

pub(crate) fn gpu(driver: &Arc<Fake>) -> Gpu {
    Gpu::with_driver(driver.clone()).expect("a device of the right kind")
}

/// Every call fails once, in turn: each failure is an error that names the call, nothing is lost but what could not be
/// given back, and a run that failed does not hang.
#[test]
fn every_call_may_fail() {
    if !has_kernel() {
        return;
    }
    let (_dir, model) = small();
    let attempt = |driver: &Arc<Fake>| -> Result<(), EngineError> {
        let gpu = Gpu::with_driver(driver.clone())?;
        let mut engine = Engine::new(&model, &config(gpu))?;
        let mut generation = engine.generate(&PROMPT, &options(1))?;
        generation.stop();
        generation.try_for_each(|token| token.map(|_| ()))?;
        drop(generation);
        // One that is stopped may have made none.
        engine.generate(&PROMPT, &options(1))?.try_for_each(|token| token.map(|_| ()))?;
        engine.last_logits()?.map(|_| ()).ok_or(EngineError::Purpose("logits"))
    };
    let driver = fake();
    attempt(&driver).expect("it runs");
    let word = |call: &String| call.split(' ').next().expect("a word").to_owned();
    let calls: BTreeSet<String> = driver.calls().iter().map(word).collect();
    assert!(calls.len() >= 18, "{calls:?}");
    // What giving back consists of; its errors have nobody to go to.
    let is_end = |call: &str| ["Destroy", "Unload", "Free", "Release"].iter().any(|end| call.contains(end));
    for call in calls {
        let name: &'static str = call.clone().leak();
        // After most other failures of a cubin the PTX is tried.
        let code = if name.starts_with("cuModule") { code::OUT_OF_MEMORY } else { 1 };
        let driver = Arc::new(Fake::new(Options { fails: Some((name, code)), ..Options::new(N_SMS, MEMORY) }));
        let outcome = attempt(&driver);
        if is_end(name) {
            outcome.unwrap_or_else(|error| panic!("{name}: {error}"));
            continue;
        }
        let error = outcome.expect_err(name).to_string();
        assert!(error.contains(name), "{name}: {error}");
        assert_eq!(driver.leaks(), Vec::<String>::new(), "after {name} failed");
    }
}

#[test]
fn devices_that_will_not_do_are_refused() {
    let with = |change: fn(&mut Options)| {
        let mut options = Options::new(N_SMS, MEMORY);
        change(&mut options);
        let driver = Arc::new(Fake::new(options));
        let error = Gpu::with_driver(driver.clone()).expect_err("refused");
        assert_eq!(driver.leaks(), Vec::<String>::new());
        error.to_string()
    };
    assert_eq!(
        with(|options| options.device.compute_capability = (8, 0)),
        "Fake H200 has compute capability 8.0: this build's GPU code is for 9.0 (H100, H200, GH200)"
    );
    assert!(with(|options| options.device.has_cooperative_launch = false).contains("no cooperative launch"));
    assert_eq!(
        with(|options| options.device.reserved_shared_bytes = 2048),
        "the driver of Fake H200 keeps 2048 bytes of each block's shared memory: this build's GPU code is for 1024"
    );
    let no_driver = with(|options| options.fails = Some(("cuDeviceGetCount", 100)));
    assert!(
        no_driver.starts_with("cuDeviceGetCount failed") && no_driver.contains("CUDA_VISIBLE_DEVICES"),
        "{no_driver}"
    );
}

#[test]
fn too_little_memory_is_refused_with_the_numbers() {
    if !has_kernel() {
        return;
    }
    let (_dir, model) = small();
    let driver = Arc::new(Fake::new(Options::new(N_SMS, 64 << 10)));
    let error = Engine::new(&model, &config(gpu(&driver))).expect_err("too little");
    let EngineError::Gpu(GpuError::Memory { free, needed, weights, cache, rest, .. }) = error else {
        panic!("{error}")
    };
    assert_eq!((free, needed), (64 << 10, weights + cache + rest));
    // K and V of one layer: 24 positions, 2 heads of 12, bf16.
    assert_eq!(cache, 2 * 24 * 2 * 12 * 2);
    assert_eq!(driver.leaks(), Vec::<String>::new());
}

#[test]
fn more_workers_than_sms_are_refused() {
    let (_dir, model) = small();
    let config = EngineConfig { threads: Some(N_SMS as usize + 1), ..config(gpu(&fake())) };
    let error = Engine::new(&model, &config).expect_err("too many").to_string();
    assert_eq!(error, "threads 4: expected 1 to 3, the number of the GPU's SMs");
}

#[test]
fn drills_end_in_their_errors_and_the_engine_goes_on() {
    if !has_kernel() {
        return;
    }
    let (_dir, model) = small();
    let driver = fake();
    let mut engine = Engine::new(&model, &config(gpu(&driver))).expect("resident");
    let expected = generate(&mut engine, &PROMPT, 2).expect("it runs");

    // An event that never fires. The first that the prompt's pass waits for, as all workers do: nobody loses patience
    // with what it leads to before.
    let event = {
        let view = engine.resident().compiled().image.view();
        let tasks = view.tasks.iter().skip(view.programs[1].task_first as usize);
        tasks.flat_map(|task| view.waits(task)).next().copied().expect("a pass of several operators")
    };
    engine.resident_mut().cuda().expect("a GPU").miscount(EventId(event)).expect("idle");
    let error = generate(&mut engine, &PROMPT, 2).expect_err("it stalls");
    let EngineError::Run(RunError::Stalled { missing, others, .. }) = &error else { panic!("{error}") };
    assert!(missing.starts_with(&format!("event e{event} stands at")), "{error}");
    assert!(others.contains("began"), "{error}");
    assert_eq!(generate(&mut engine, &PROMPT, 2).expect("it runs again"), expected);

    // A row that is never written: the embedding's.
    let first = TaskId(engine.resident().compiled().image.view().programs[0].task_first);
    engine.resident_mut().cuda().expect("a GPU").mute(first, true).expect("idle");
    let mut made = Vec::new();
    let mut generation = engine.generate(&PROMPT, &options(2)).expect("it starts");
    let error = generation.try_for_each(|token| token.map(|token| made.push(token.id))).expect_err("it stalls");
    drop(generation);
    // What is made of numbers that are not there is nobody's token.
    assert!(made.len() < 2 && expected.starts_with(&made), "{made:?} of {expected:?}");
    let EngineError::Run(RunError::Stalled { missing, task, others, .. }) = &error else { panic!("{error}") };
    assert!(missing.starts_with("operand `x` has elements without flag"), "{error}");
    assert!(task.contains("layers.0") && others.contains("began"), "{error}");
    engine.resident_mut().cuda().expect("a GPU").mute(first, false).expect("idle");
    assert_eq!(generate(&mut engine, &PROMPT, 2).expect("it runs again"), expected);

    // The host says stop before the first token.
    let mut generation = engine.generate(&PROMPT, &options(20)).expect("it starts");
    generation.stop();
    assert_eq!(generation.by_ref().count(), 0, "stopped in the first pass, which reads 4 of 6 tokens");
    assert_eq!(generation.end(), Some(End::Stopped));
    drop(generation);
    assert_eq!(generate(&mut engine, &PROMPT, 2).expect("it runs again"), expected);

    // A generation dropped under way.
    drop(engine.generate(&PROMPT, &options(20)).expect("it starts"));
    drop(engine);
    assert_eq!(driver.leaks(), Vec::<String>::new());
}

/// A kernel that does not end: the host gives up, says so, and leaves alone what the kernel may still write.
#[test]
fn a_kernel_that_hangs_is_given_up() {
    if !has_kernel() {
        return;
    }
    let (_dir, model) = small();
    let driver = Arc::new(Fake::new(Options { hangs: true, ..Options::new(N_SMS, MEMORY) }));
    let kernel = cuda::Options { timeout: Duration::ZERO, recorder: true, ..Default::default() };
    let mut engine = Engine::new(&model, &EngineConfig { cuda: kernel, ..config(gpu(&driver)) }).expect("resident");
    let loaded = driver.calls().len();
    let error = generate(&mut engine, &PROMPT, 1).expect_err("it hangs").to_string();
    assert!(error.contains("has not been heard of") && error.contains("cannot be used any more"), "{error}");
    assert!(error.ends_with("; last, 3 workers (w0, ...) began nothing yet"), "{error}");
    assert_eq!(generate(&mut engine, &PROMPT, 1).expect_err("still").to_string(), error);
    drop(engine);
    let calls = driver.calls();
    let after: Vec<&String> = calls[loaded..].iter().skip_while(|call| !call.starts_with("cuLaunch")).skip(1).collect();
    // It was told to stop; nobody waited for anything, and nothing was given back, the context included.
    assert_eq!(after, ["cuMemcpyHtoDAsync 4"]);
}

/// Where workers were is told of a stall, and, if it is recorded, of a run in which the device is lost.
#[test]
fn what_workers_began_last_is_told() {
    if !has_kernel() {
        return;
    }
    let (_dir, model) = small();
    for recorder in [false, true] {
        let kernel = cuda::Options { recorder, ..Default::default() };
        let on = |driver: &Arc<Fake>| EngineConfig { cuda: kernel, ..config(gpu(driver)) };
        let mut engine = Engine::new(&model, &on(&fake())).expect("resident");
        let events = engine.resident().compiled().image.view().events.len() as u32;
        engine.resident_mut().cuda().expect("a GPU").miscount(EventId(events - 1)).expect("idle");
        let error = generate(&mut engine, &PROMPT, 3).expect_err("an event never fires").to_string();
        let (_, others) = error.split_once("; last, ").expect("where the others were");
        assert!(others.contains(" began t") && !others.contains("nothing yet"), "{error}");

        // When the kernel has ended.
        let lost = ("cuMemcpyDtoHAsync", 719);
        let driver = Arc::new(Fake::new(Options { fails: Some(lost), ..Options::new(N_SMS, MEMORY) }));
        let mut engine = Engine::new(&model, &on(&driver)).expect("resident");
        let error = generate(&mut engine, &PROMPT, 3).expect_err("the device is lost").to_string();
        assert!(error.starts_with(lost.0), "{error}");
        assert_eq!(error.contains("; last, ") && error.contains(" began t"), recorder, "{error}");
    }
}

/// A run that waits for another's kernel to end is silent for that reason, and not given up for it.
#[test]
fn a_run_behind_another_is_not_given_up() {
    if !has_kernel() {
        return;
    }
    let (_dir, model) = small();
    let driver = Arc::new(Fake::new(Options { hangs: true, ..Options::new(N_SMS, MEMORY) }));
    let kernel = cuda::Options { timeout: Duration::ZERO, ..Default::default() };
    let engine = || Engine::new(&model, &EngineConfig { cuda: kernel, ..config(gpu(&driver)) }).expect("resident");
    let (mut first, mut second) = (engine(), engine());
    let stops = || driver.calls().iter().filter(|call| *call == "cuMemcpyHtoDAsync 4").count();
    let loaded = stops();
    let is_running = |engine: &mut Engine| engine.resident_mut().cuda().expect("a GPU").is_running();
    for engine in [&mut first, &mut second] {
        let control = Control { step: Step { rows: 1, ..Step::default() }, ..bytemuck::Zeroable::zeroed() };
        engine.resident_mut().cuda().expect("a GPU").start(control);
    }
    // The first is told to stop, and given up; the second only then.
    while is_running(&mut first) {
        assert!(is_running(&mut second) && stops() <= loaded + 1, "the second was told to stop");
        std::thread::sleep(Duration::from_millis(1));
    }
    while stops() < loaded + 2 {
        assert!(is_running(&mut second), "it was given up without being told to stop");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A cubin newer than the driver: the driver compiles the PTX.
#[test]
fn where_the_cubin_is_refused_the_ptx_is_compiled() {
    if device_image().is_none_or(|image| image.worker.cubin().is_none()) {
        println!("skipped: no cubin in this build (./x setup fetches ptxas)");
        return;
    }
    let (_dir, model) = small();
    let refuses =
        |call, code| Arc::new(Fake::new(Options { fails: Some((call, code)), ..Options::new(N_SMS, MEMORY) }));
    // Whether the driver says so at once, in words of its own, or only when it is asked for the kernel.
    for (call, code) in [("cuModuleLoadDataEx", 209), ("cuModuleLoadDataEx", 999), ("cuModuleGetFunction", 209)] {
        let driver = refuses(call, code);
        Engine::new(&model, &config(gpu(&driver))).expect("resident");
        let loads: Vec<String> = driver.calls().into_iter().filter(|call| call.starts_with("cuModuleLoad")).collect();
        assert_eq!(loads, ["cuModuleLoadDataEx cubin", "cuModuleLoadDataEx PTX"]);
        assert_eq!(driver.leaks(), Vec::<String>::new());
    }
    // What no other code mends is told.
    for code in [2, 719] {
        let driver = refuses("cuModuleLoadDataEx", code);
        let error = Engine::new(&model, &config(gpu(&driver))).expect_err("refused").to_string();
        assert!(error.contains("cuModuleLoadDataEx") && error.contains(&format!("({code})")), "{error}");
        assert_eq!(driver.calls().iter().filter(|call| call.starts_with("cuModuleLoad")).count(), 1);
    }
}

#[test]
fn a_programs_own_context_and_stream_stay_its_own() {
    if !has_kernel() {
        return;
    }
    let (_dir, model) = small();
    let driver = fake();
    let context = driver.retain_context(0).expect("a context");
    driver.push_context(context).expect("pushed");
    let stream = driver.create_stream().expect("a stream");
    {
        let gpu = Gpu::adopt_from(driver.clone(), context, Some(stream)).expect("a device of the right kind");
        let mut engine = Engine::new(&model, &config(gpu)).expect("resident");
        assert_eq!(generate(&mut engine, &PROMPT, 1).expect("it runs").len(), 1);
    }
    assert_eq!(driver.leaks(), ["1 contexts", "1 streams", "1 contexts left current"]);
    let _: (Context, Stream) = (context, stream);
}

#[test]
fn a_trace_says_when_each_task_ran() {
    if !has_kernel() {
        return;
    }
    let (_dir, model) = small();
    let config = EngineConfig { cuda: cuda::Options { n_trace: 8, ..Default::default() }, ..config(gpu(&fake())) };
    let mut engine = Engine::new(&model, &config).expect("resident");
    generate(&mut engine, &PROMPT, 1).expect("it runs");
    let image = engine.resident().compiled().image.clone();
    let trace = engine.resident_mut().cuda().expect("a GPU").trace().expect("idle");
    for worker in 0..N_SMS {
        let row: Vec<_> = trace.iter().filter(|(w, _)| w.0 == worker).map(|(_, entry)| entry).collect();
        let times: Vec<u64> = row.iter().flat_map(|entry| [entry.began_ns, entry.ended_ns]).collect();
        assert!(times.is_sorted(), "{times:?}");
        // The first pass, of the program for several rows; it makes no token, so what would make one is left out.
        let mut list = image.view().list(1, perpetua_shared::WorkerId(worker)).iter();
        let first: Vec<_> = row.iter().filter(|entry| entry.iteration == 0).collect();
        assert!(!first.is_empty() && first.iter().all(|entry| list.any(|task| *task == entry.task)), "{row:?}");
    }
}

#[test]
fn errors_say_what_to_do() {
    let driver =
        Arc::new(Fake::new(Options { fails: Some(("cuMemAlloc", code::OUT_OF_MEMORY)), ..Options::new(1, 1 << 20) }));
    let _gpu = gpu(&driver);
    let context = driver.retain_context(0).expect("a context");
    driver.push_context(context).expect("pushed");
    let error = driver.alloc(1).expect_err("as ordered");
    assert_eq!(
        error.to_string(),
        "cuMemAlloc failed: CUDA_ERROR_AS_ORDERED (2); free device memory (other processes use it too), or ask for less \
         with EngineConfig::max_context"
    );
}

#[test]
fn probes_measure_what_they_say() {
    if !has_kernel() {
        return;
    }
    // Of an L2 with less than four tiles for every SM.
    let mut options = Options::new(N_SMS, MEMORY);
    options.device.l2_bytes = 64 << 10;
    let driver = Arc::new(Fake::new(options));
    {
        let mut prober = Prober::new(gpu(&driver), 1 << 20).expect("resident");
        for (tile_bytes, n_tiles) in [(4096, 32), (16 << 10, 13), (4096, 1)] {
            assert!(prober.read(N_SMS, tile_bytes, n_tiles).expect("it runs") > 0.0);
            assert!(prober.read_l2(2, N_SMS, tile_bytes, n_tiles).expect("it runs") > 0.0);
            assert!(prober.copy_l2(2, N_SMS, 3072, 3).expect("it runs") > 0.0);
        }
        for (from, reads) in [(TilesFrom::Nowhere, false), (TilesFrom::L2, true), (TilesFrom::Memory, true)] {
            let tile_bytes = Prober::TILE_STEP;
            assert!(prober.take(N_SMS, (tile_bytes, 3), 10, from, reads).expect("it runs").as_nanos() > 0);
        }
        assert!(prober.upload_buffers(2).expect("it runs").as_nanos() > 0);
        assert!(prober.hop(50).expect("it runs").as_nanos() > 0);
        for by_flags in [false, true] {
            assert!(prober.hand(2 + u32::from(by_flags), 5, by_flags).expect("it runs").as_nanos() > 0);
        }
        assert!(prober.meet(N_SMS, 50).expect("it runs").as_nanos() > 0);
        // What is brought, copy by copy: a whole number of those the memory has room for; and pieces, each in parts,
        // once.
        let mut brought = |bring: &mut dyn FnMut(&mut Prober)| -> Vec<usize> {
            let began = driver.calls().len();
            bring(&mut prober);
            let calls = driver.calls().split_off(began);
            let copies = calls.iter().filter_map(|call| call.strip_prefix("cuMemcpyHtoDAsync "));
            copies.map(|bytes| bytes.parse().expect("a number")).collect()
        };
        let copies = brought(&mut |prober| assert!(prober.bus(5 << 20).expect("it runs") > 0.0));
        assert_eq!(copies, [1 << 20; 5]);
        let pieces = [&[1; 700_000][..], &[2; 3], &[], &[4; 300_000]];
        let mut copies = brought(&mut |prober| {
            assert!(prober.upload(&pieces, 2).expect("it runs").as_nanos() > 0);
        });
        copies.sort_unstable();
        assert_eq!(copies, [3, 300_000, 700_000]);
    }
    assert_eq!(driver.leaks(), Vec::<String>::new());
}
