//! What users get wrong: one clear error, nothing written, nothing broken.

use perpetua::compile::{Config, Source, compile};
use perpetua::device::kernels::gated_linear::Gating;
use perpetua::device::kernels::linear::Activation;
use perpetua::device::kernels::routing::{Counting, Weighting};
use perpetua::engine::Resident;
use perpetua::exec::RunError;
use perpetua::exec::memory::NoWeights;
use perpetua::graph::kernel::{
    AttentionArgs, EmbeddingArgs, ExpertArgs, GraphError, KernelGraph, Mask, Pooled, RopeArgs,
};
use perpetua::graph::lower::Target;
use perpetua::graph::tensor::{BufferKind, TensorId};
use perpetua::model::{SynthOptions, SynthSource, synth};
use perpetua::{Device, End, Engine, EngineConfig, EngineError, GenerateOptions, Model};
use perpetua_shared::{DType, ProgramId};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn perpetua(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_perpetua")).args(args).output().expect("the program was built")
}

/// A copy of a fixture, with the folders in it, to change.
pub(crate) fn copy(name: &str, to: &Path) -> PathBuf {
    let out = to.join(name);
    std::fs::create_dir_all(&out).unwrap();
    for entry in std::fs::read_dir(fixture(name)).unwrap() {
        let entry = entry.unwrap();
        if entry.path().is_dir() {
            copy(&format!("{name}/{}", entry.file_name().display()), to);
        } else {
            std::fs::copy(entry.path(), out.join(entry.file_name())).unwrap();
        }
    }
    out
}

/// Runs `logits` on `dir`; it must fail with one line that holds every one of `words`, and write nothing.
fn refused(dir: &Path, extra: &[&str], words: &[&str]) {
    let out = dir.join("must-not-appear.safetensors");
    let (dir_text, out_text) = (dir.to_string_lossy().into_owned(), out.to_string_lossy().into_owned());
    let mut args = vec!["logits", "--model", &dir_text, "--out", &out_text];
    args.extend_from_slice(if extra.is_empty() { &["--ids", "1,2,3"] } else { extra });
    let output = perpetua(&args);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert_eq!(message.lines().count(), 1, "one line: {message}");
    for word in words {
        assert!(message.contains(word), "{message:?} should say {word:?}");
    }
    assert!(!out.exists(), "nothing is written");
    let strays = std::fs::read_dir(dir)
        .unwrap()
        .filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().starts_with(".tmp"));
    assert_eq!(strays.count(), 0, "no temporary file is left");
}

#[test]
fn damaged_model_folders_are_refused_by_name() {
    let temp = tempfile::tempdir().unwrap();
    let damage = |name: &str, change: &dyn Fn(&Path)| {
        let to = temp.path().join(name);
        let dir = copy("tiny-qwen2", &to);
        change(&dir);
        dir
    };
    let rewrite = |file: &Path, from: &str, to: &str| {
        let text = std::fs::read_to_string(file).unwrap();
        assert!(text.contains(from));
        std::fs::write(file, text.replace(from, to)).unwrap();
    };

    let dir = damage("no-config", &|d| std::fs::remove_file(d.join("config.json")).unwrap());
    refused(&dir, &[], &["config.json"]);
    let dir = damage("no-weights", &|d| std::fs::remove_file(d.join("model.safetensors")).unwrap());
    refused(&dir, &[], &["safetensors"]);
    let dir = damage("truncated", &|d| {
        let file = std::fs::OpenOptions::new().write(true).open(d.join("model.safetensors")).unwrap();
        file.set_len(1_000_000).unwrap();
    });
    refused(&dir, &[], &["model.safetensors"]);
    let dir = damage("header-lies", &|d| {
        let path = d.join("model.safetensors");
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
        std::fs::write(path, bytes).unwrap();
    });
    refused(&dir, &[], &["model.safetensors"]);
    let dir = damage("wrong-shape", &|d| {
        rewrite(&d.join("config.json"), "\"intermediate_size\": 512", "\"intermediate_size\": 500")
    });
    refused(&dir, &[], &["shape", "512", "500"]);
    let dir =
        damage("unknown-architecture", &|d| rewrite(&d.join("config.json"), "Qwen2ForCausalLM", "WhateverForCausalLM"));
    refused(&dir, &[], &["WhateverForCausalLM"]);
    let dir = damage("missing-shard", &|d| {
        std::fs::remove_file(d.join("model.safetensors")).unwrap();
        let index = r#"{"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}"#;
        std::fs::write(d.join("model.safetensors.index.json"), index).unwrap();
    });
    refused(&dir, &[], &["model-00001-of-00002.safetensors"]);
    let dir = damage("not-json", &|d| std::fs::write(d.join("config.json"), "{").unwrap());
    refused(&dir, &[], &["config.json", "JSON"]);
}

/// Of experts one may be missing, or of another shape or type than the others.
#[test]
fn experts_that_do_not_belong_together_are_refused_by_name() {
    use safetensors::Dtype;
    let temp = tempfile::tempdir().unwrap();
    let dir = copy("tiny-mixtral", temp.path());
    let path = dir.join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let third = "model.layers.1.block_sparse_moe.experts.2.w3.weight";
    let zeros = [0; 4 * 80 * 128];
    let view = |dtype, shape: &[usize], bytes| {
        safetensors::tensor::TensorView::new(dtype, shape.to_vec(), &zeros[..bytes]).unwrap()
    };
    for (instead, expected) in [
        (None, &[third, "no such tensor"][..]),
        (Some(view(Dtype::BF16, &[81, 64], 2 * 81 * 64)), &[third, "[81, 64]", "[80, 128]"]),
        (Some(view(Dtype::F32, &[80, 128], 4 * 80 * 128)), &[third, "f32", "first expert", "bf16"]),
    ] {
        let others = file.tensors().into_iter().filter(|(name, _)| name != third);
        let instead = instead.map(|view| (third.to_owned(), view));
        std::fs::write(&path, safetensors::serialize(others.chain(instead), None).unwrap()).unwrap();
        refused(&dir, &[], expected);
    }
}

#[test]
fn impossible_requests_are_refused() {
    let temp = tempfile::tempdir().unwrap();
    let dir = copy("tiny-qwen2", temp.path());
    refused(&dir, &["--ids", "1,5000"], &["5000", "1023"]);
    refused(&dir, &["--prompt", ""], &["empty"]);
    refused(&dir, &["--ids", "1,2,3", "--max-context", "2"], &["3 tokens", "2"]);
    refused(&dir, &["--ids", "1,2,3", "--max-context", "100000"], &["100000", "4096"]);
    // The library's own answer: no driver, no device, or no GPU code in this build.
    if let Err(error) = perpetua::cuda::Gpu::open() {
        let expected = perpetua::device_image::device_image().map_or("no GPU code".to_owned(), |_| error.to_string());
        refused(&dir, &["--ids", "1,2,3", "--device", "cuda"], &[&expected]);
    }
    let output = perpetua(&["logits", "--model", "x"]);
    assert_eq!(output.status.code(), Some(2), "bad usage");
    let output = perpetua(&["embed", "--model", &dir.to_string_lossy(), "text"]);
    assert_eq!(output.status.code(), Some(1));
}

/// Makes every element of tensor `name` NaN.
fn poison(dir: &Path, name: &str) {
    let path = dir.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let elements = file.tensor(name).unwrap().data();
    let first = elements.as_ptr() as usize - bytes.as_ptr() as usize;
    let end = first + elements.len();
    // In bf16 and in f32.
    bytes[first..end].fill(0xff);
    std::fs::write(path, bytes).unwrap();
}

/// Results that are no numbers are written by no one, as no token is chosen from them.
#[test]
fn damaged_weights_give_no_results() {
    let temp = tempfile::tempdir().unwrap();
    let dir = copy("tiny-qwen3", temp.path());
    poison(&dir, "model.norm.weight");
    for device in ["cpu", "reference"] {
        refused(&dir, &["--ids", "1,2,3", "--device", device], &["every logit for position 0 is NaN", "damaged"]);
    }
    let dir_text = dir.to_string_lossy().into_owned();
    let output = perpetua(&["generate", "--model", &dir_text, "--prompt", "a"]);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0));

    let dir = temp.path().join("bert");
    let source = SynthSource::Preset("tiny-bert");
    synth(source, &dir, &SynthOptions::default(), &mut |_, _| ControlFlow::Continue(())).unwrap();
    poison(&dir, "embeddings.LayerNorm.bias");
    let out = temp.path().join("e.safetensors");
    for device in ["cpu", "reference"] {
        let (dir, out) = (dir.to_string_lossy(), out.to_string_lossy());
        let output = perpetua(&["embed", "--model", &dir, "--device", device, "--out", &out, "a sentence"]);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), message.lines().count()), (Some(1), 1), "{message}");
        assert!(message.contains("a sentence") && message.contains("the embedding is NaN"), "{message}");
    }
    assert!(!out.exists(), "nothing is written");
}

/// The fault of a run is what it ended with, however often one asks, and whoever's it was in a batch.
#[test]
fn a_failed_run_stays_failed_until_the_next() {
    let temp = tempfile::tempdir().unwrap();
    let dir = copy("tiny-qwen3", temp.path());
    poison(&dir, "model.norm.weight");
    let model = Model::load(&dir).unwrap();
    for device in [Device::Cpu, Device::Reference, Device::Simt] {
        let config = EngineConfig { device, threads: Some(2), max_context: Some(16), ..EngineConfig::default() };
        let mut engine = Engine::new(&model, &EngineConfig { sequences: Some(2), ..config }).unwrap();
        let is_nan = |error: &EngineError| matches!(error, EngineError::Run(RunError::NotANumber { .. }));
        let mut generation = engine.generate(&[1, 2], &GenerateOptions::default()).unwrap();
        assert!(generation.next().is_some_and(|token| token.is_err_and(|error| is_nan(&error))), "{device:?}");
        assert_eq!(generation.end(), Some(End::Failed), "{device:?}");
        drop(generation);
        assert!([(); 2].iter().all(|()| engine.last_logits().is_err_and(|error| is_nan(&error))), "{device:?}");
        let mut batch = engine.generate_batch(&[[1, 2], [2, 3]], &GenerateOptions::default()).unwrap();
        assert!(batch.next().is_some_and(|token| token.is_err()) && batch.is_ended(), "{device:?}");
        assert_eq!([0, 1].map(|sequence| batch.end(sequence)), [Some(End::Failed); 2], "{device:?}");
    }
}

/// What a graph of one's own is asked for and does not have is an error, which says what it has.
#[test]
fn passes_and_inputs_that_are_not_there_are_named() {
    let source = |value: f32| {
        let mut graph = KernelGraph::new();
        let x = graph.input("x", &[2, 4], DType::F32).unwrap();
        let one = graph.constant("one", &[value; 4]).unwrap();
        let y = graph.rms_norm("y", x, one, 0.0).unwrap();
        graph.output("y", y).unwrap();
        Source { name: "norm".to_owned(), graph, in_token_loop: false }
    };
    for device in [Device::Cpu, Device::Reference, Device::Simt] {
        let config = EngineConfig { device, threads: Some(2), ..EngineConfig::default() };
        let mut resident = Resident::new(vec![source(1.0)], &NoWeights, &config).unwrap();
        let said = |error: &dyn std::fmt::Display| error.to_string();
        let wrong = resident.set_input("z", &[0; 32]).unwrap_err();
        assert_eq!(said(&wrong), "there is no input z: expected one of [\"x\"]");
        let wrong = resident.set_input("x", &[0; 28]).unwrap_err();
        assert_eq!(said(&wrong), "input x: 28 bytes given, expected 32");
        let wrong = resident.run_once(ProgramId(77), 1).unwrap_err();
        assert_eq!(said(&wrong), "program 77: expected one of 1, counted from 0");
        let wrong = resident.run_tokens(ProgramId(0), &[1, 2]).unwrap_err();
        assert!(said(&wrong).contains("which the token buffer has room for"), "{wrong}");
        assert_eq!(resident.finish().unwrap().produced, 0, "there has been no run");
        resident.set_input("x", bytemuck::bytes_of(&[2f32; 8])).unwrap();
        resident.run_once(ProgramId(0), 2).unwrap();
        let y = resident.output(ProgramId(0), "y").unwrap();
        let found = resident.read_f32(&y, 2).unwrap();
        assert!(found.len() == 8 && found.iter().all(|y| (y - 1.0).abs() < 1e-5), "{found:?}");
    }
    let config = EngineConfig { device: Device::Reference, ..EngineConfig::default() };
    let both = Resident::new(vec![source(1.0), source(2.0)], &NoWeights, &config);
    assert!(both.is_err_and(|error| error.to_string().contains("buffer one: program norm has other contents")));
}

/// What the system would not give is refused with numbers; asking for it would end the program.
#[cfg(target_os = "linux")]
#[test]
fn too_little_memory_is_said() {
    let temp = tempfile::tempdir().unwrap();
    let dir = copy("tiny-qwen3", temp.path());
    let config = std::fs::read_to_string(dir.join("config.json")).unwrap();
    std::fs::write(dir.join("config.json"), config.replace(": 4096,", ": 1000000,")).unwrap();
    // A position's keys and values are 3 layers of 2 times 4 heads of 64 numbers: 3.07 GB of addresses.
    let args = ["logits", "--ids", "1", "--max-context", "1000000", "--out"];
    let out = temp.path().join("out");
    let output = Command::new("sh")
        .args(["-c", "ulimit -v 2000000; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_perpetua")])
        .args(args)
        .args([&out, Path::new("--model"), &dir])
        .output()
        .unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), message.lines().count()), (Some(1), 1), "{message}");
    assert!(message.contains("KV cache (see --max-context) and intermediates need 307"), "{message}");
    assert!(!out.exists());
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_leaves_no_file() {
    let dir = fixture("tiny-qwen2");
    let output = perpetua(&["logits", "--model", &dir.to_string_lossy(), "--ids", "1", "--out", "/dev/full"]);
    assert_eq!(output.status.code(), Some(1));
    let output = perpetua(&["logits", "--model", &dir.to_string_lossy(), "--ids", "1", "--out", "/nonexistent/x"]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert!(message.contains("/nonexistent/x"), "{message}");
}

/// An output never takes the place of what the same command reads, nor of another output: links and other spellings are
/// seen through.
#[test]
fn outputs_are_no_inputs() {
    let temp = tempfile::tempdir().unwrap();
    let dir = copy("tiny-qwen2", temp.path());
    let path = |name: &str| temp.path().join(name).to_string_lossy().into_owned();
    let in_model = |name: &str| dir.join(name).to_string_lossy().into_owned();
    let model = dir.to_string_lossy().into_owned();
    let [text, csv, graph, x] = ["t.txt", "in.csv", "graph.json", "x.svg"].map(path);
    std::fs::write(&text, "some words, and some more of them").unwrap();
    std::fs::write(&csv, "id,lower,upper,size\n1,0,3,4\n").unwrap();
    std::fs::write(&graph, r#"{"capacity": 100, "ops": []}"#).unwrap();
    let [weights, tokens, pooling] = ["model.safetensors", "tokenizer.json", "1_Pooling/config.json"].map(in_model);
    std::fs::create_dir(dir.join("1_Pooling")).unwrap();
    std::fs::write(&pooling, "{}").unwrap();
    // A shard of any name; and as the hub's cache has files.
    let shard = in_model("a.safetensors");
    std::fs::write(&shard, "").unwrap();
    std::fs::write(in_model("model.safetensors.index.json"), r#"{"weight_map": {"a": "a.safetensors"}}"#).unwrap();
    let [detour, other] = [path("tiny-qwen2/../t.txt"), path("tiny-qwen2/../x.svg")];
    let cases = vec![
        (vec!["logits", "--model", &model, "--ids", "1", "--out", &weights], "a file of the model"),
        (vec!["logits", "--model", &model, "--ids", "1", "--out", &shard], "a file of the model"),
        (vec!["generate", "--model", &model, "--prompt", "a", "--ids-out", &tokens], "a file of the model"),
        (vec!["bench", "--model", &model, "--json", &pooling], "a file of the model"),
        (vec!["embed", "--model", &model, "--in", &text, "--out", &text], "what this command reads"),
        (vec!["generate", "--model", &model, "--prompt-file", &text, "--ids-out", &text], "what this command reads"),
        (vec!["logits", "--model", &model, "--prompt-file", &text, "--out", &detour], "what this command reads"),
        (vec!["perplexity", "--model", &model, "--text", &text, "--json", &text], "what this command reads"),
        (vec!["pack", "--in", &csv, "--capacity", "8", "--out", &csv], "what this command reads"),
        (vec!["schedule", "--in", &graph, "--out", &graph], "what this command reads"),
        (vec!["plan", "--graph", &graph, "--dot", &graph], "what this command reads"),
        (vec!["plan", "--preset", "tiny-qwen3", "--svg", &x, "--dot", &other], "another output goes there"),
    ];
    #[cfg(unix)]
    let [link, blob] = ["link", "blob"].map(path);
    #[cfg(unix)]
    {
        std::fs::rename(&weights, &blob).unwrap();
        std::os::unix::fs::symlink(&blob, &weights).unwrap();
        std::os::unix::fs::symlink(&text, &link).unwrap();
    }
    #[cfg(unix)]
    let linked = [
        (vec!["logits", "--model", &model, "--ids", "1", "--out", &blob], "a file of the model"),
        (vec!["perplexity", "--model", &model, "--text", &text, "--json", &link], "what this command reads"),
    ];
    #[cfg(not(unix))]
    let linked = [];
    let sizes =
        || [&weights, &tokens, &pooling, &text, &csv, &graph].map(|path| std::fs::metadata(path).unwrap().len());
    let before = sizes();
    for (args, words) in cases.into_iter().chain(linked) {
        let output = perpetua(&args);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), message.lines().count()), (Some(1), 1), "{args:?}: {message}");
        assert!(message.contains(": cannot write: ") && message.contains(words), "{args:?}: {message}");
    }
    assert_eq!(sizes(), before);
    assert!(!Path::new(&x).exists());
    // What was written before may be written again, in the model's folder, too.
    let ids = in_model("ids.json");
    for _ in 0..2 {
        let args = ["generate", "--model", &model, "--prompt", "a", "--max-new-tokens", "1", "--ids-out", &ids];
        assert!(perpetua(&args).status.success());
    }
}

/// What an option cannot do is refused in one line, or said, and never ignored in silence.
#[test]
fn options_without_effect_are_named() {
    let temp = tempfile::tempdir().unwrap();
    let bert = temp.path().join("bert");
    let source = SynthSource::Preset("tiny-bert");
    synth(source, &bert, &SynthOptions::default(), &mut |_, _| ControlFlow::Continue(())).unwrap();
    let bert = bert.to_string_lossy().into_owned();
    let [text, decoder] = ["tiny-qwen2", "tiny-embedding"].map(|name| fixture(name).to_string_lossy().into_owned());
    let trace = temp.path().join("t.json").to_string_lossy().into_owned();
    let [embed, bench] = ["embed", "bench"].map(|verb| vec![verb, "--device", "cpu", "--model", &bert]);
    let logits = vec!["logits", "--ids", "1", "--out", "/dev/null", "--model", &text];
    let [words, latin] = [("words.txt", &b"some words"[..]), ("latin.txt", b"caf\xe9")].map(|(name, bytes)| {
        let path = temp.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_string_lossy().into_owned()
    });
    let perplexity = vec!["perplexity", "--model", &text, "--text"];
    for (verb, args, words) in [
        (&embed, &["a", "--max-context", "64"][..], "--max-context 64 is for decoders"),
        (&embed, &["a", "--max-context", "1000000"], "up to 128 tokens"),
        (&embed, &["a", "--exact"], "--exact is for decoders"),
        (&embed, &["a", "--bf16-prompts"], "--bf16-prompts is for decoders"),
        (&embed, &["a", "--quantize", "q8"], "q8 of an encoder: expected a decoder"),
        (
            &embed,
            &["a", "--prompt-name", "x"],
            "prompt x: the model has none of this name, expected one of query, document",
        ),
        (&vec!["embed", "--model", &decoder], &["a", "--prompt-name", "x"], "expected one of query, document"),
        (&vec!["embed", "--model", &decoder], &["a", "--max-context", "1"], "special: no room for text"),
        (&vec!["embed", "--model", &text], &["a"], "Qwen2ForCausalLM for sentence embeddings without a modules.json"),
        (&vec!["generate", "--model", &decoder], &["--prompt", "a"], "a sentence model for text generation"),
        (&vec!["bench", "--model", &decoder], &["--batch", "2"], "--batch is for text models"),
        (&bench, &["--quantize", "q8"], "q8 of an encoder: expected a decoder"),
        (&bench, &["--max-context", "64"], "--max-context 64 is for decoders"),
        (&bench, &["--context", "100000"], "--context 100000: the model takes sentences of up to 128 tokens"),
        (&bench, &["--trace", &trace], "--compare, --trace and --timeline are for text models"),
        (&bench, &["--compare"], "--compare, --trace and --timeline are for text models"),
        (&logits, &["--exact", "--device", "simt"], "--exact is for --device cpu or reference"),
        (&logits, &["--exact", "--device", "ptx"], "--exact is for --device cpu or reference"),
        (&logits, &["--exact", "--device", "cuda"], "--exact is for --device cpu or reference"),
        (&vec!["bench", "--model", &text], &["--device", "simt"], "nothing to measure on --device simt"),
        (&vec!["bench", "--model", &text], &["--tokens", "1"], "--tokens 1: no step between two tokens"),
        // Judged before a model is looked for.
        (&vec!["generate", "--model", "/nonexistent", "--prompt", "a"], &["--top-p", "2"], "top-p 2: expected"),
        (&vec!["chat", "--model", "/nonexistent"], &["--temperature", "-1"], "temperature -1: expected"),
        (&vec!["plan", "--config"], &["nope.json"], "nope.json: cannot read: "),
        (&vec!["pack", "--capacity", "9", "--out", "/dev/null", "--in"], &[&latin], "latin.txt: byte 3 is not UTF-8"),
        (&bench, &["--prompt-lookup", "3"], "--prompt-lookup is for text models"),
        (&perplexity, &["/nonexistent"], "/nonexistent: no such file"),
        (&perplexity, &[&latin], "latin.txt: byte 3 is not UTF-8"),
        (&perplexity, &[&words, "--window", "1"], "--window 1: expected 2 to 4096 tokens"),
        (&perplexity, &[&words, "--window", "5000"], "--window 5000: expected 2 to 4096 tokens"),
        (&perplexity, &["/dev/null"], "/dev/null: 0 tokens: expected 2 or more"),
        (&vec!["perplexity", "--model", &bert, "--text"], &[&words], "for text generation is not supported"),
        (&logits, &["--without", "tiles", "--device", "cpu"], "--without is for --device cuda or ptx"),
        (&logits, &["--without", "tiles", "--exact"], "--without is for a GPU, --exact for the CPU"),
    ] {
        let output = perpetua(&[&verb[..], args].concat());
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), message.lines().count()), (Some(1), 1), "{args:?}: {message}");
        assert!(message.contains(words), "{message:?} should say {words:?}");
    }
    assert!(!Path::new(&trace).exists());
    // A sentence is as long as the model takes, unless told otherwise.
    let output = perpetua(&[&bench[..], &["--tokens", "1"]].concat());
    assert!(String::from_utf8_lossy(&output.stdout).contains("sentence_tokens              128"));

    let generate = |args: &[&str]| {
        let verb = ["generate", "--device", "cpu", "--prompt", "a", "--max-new-tokens", "2", "--model", &text];
        let output = perpetua(&[&verb[..], args].concat());
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let line = "perpetua: without --temperature the likeliest token is taken: --top-p, --seed not used";
    assert_eq!(generate(&["--top-p", "0.5", "--seed", "3"]).lines().next(), Some(line));
    assert!(!generate(&["--top-p", "0.5", "--temperature", "0.5"]).contains("not used"));
}

/// Sizes that no machine has memory or time for are refused before any is taken.
#[test]
fn passes_that_cannot_be_compiled_are_refused_with_the_bound() {
    let temp = tempfile::tempdir().unwrap();
    let config = temp.path().join("config.json");
    let text = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 131072,
        "intermediate_size": 1048576, "num_hidden_layers": 1024, "num_attention_heads": 1024, "num_key_value_heads": 1,
        "head_dim": 1024, "max_position_embeddings": 1073741824, "rms_norm_eps": 1e-5}"#;
    std::fs::write(&config, text).unwrap();
    let config = config.to_string_lossy().into_owned();
    let tensor = "shape [2097152, 1048576] of f32 is 8796093022208 bytes, expected at most 1099511627776";
    for (rows, context, words) in [
        ("2097152", "2097152", tensor),
        ("128", "1024", "tasks read more than 1099511627776 bytes of weights in tiles up to here"),
        ("1", "2097152", "the graph has more than 16777216 tasks here"),
        ("1", "1073741824", "is 2199023255552 bytes, expected at most 1099511627776"),
        ("131072", "4194303", "tasks' flops and those before sum to more than 4611686018427387904"),
    ] {
        let args = ["plan", "--target", "cpu:1", "--config", &config, "--rows", rows, "--context", context];
        let output = perpetua(&args);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), message.lines().count()), (Some(1), 1), "{args:?}: {message}");
        assert!(message.contains(words), "{message:?} should say {words:?}");
    }
}

fn message<T: std::fmt::Debug>(result: Result<T, GraphError>) -> String {
    result.expect_err("it is refused").to_string()
}

/// Reports, outputs and launches just in time are by name.
#[test]
fn names_of_a_graph_are_given_once() {
    let mut graph = KernelGraph::new();
    let x = graph.input("x", &[2, 8], DType::F32).unwrap();
    let y = graph.add_tensors("sum", x, x).unwrap();
    assert_eq!(message(graph.add_tensors("sum", y, y)), "operator sum: there is another operator of this name");
    let z = graph.add_tensors("sum of sums", y, y).unwrap();
    graph.output("y", y).unwrap();
    assert_eq!(message(graph.output("y", z)), "output y: there is another of this name");
    assert_eq!(graph.outputs(), [("y".to_owned(), y)]);
}

/// Every method that takes tensors says which there is not, and for which operator.
#[test]
fn tensors_of_no_graph_are_refused_by_name() {
    let (far, none) = (TensorId(55), Activation::None);
    let mut graph = KernelGraph::new();
    let x = graph.input("x", &[2, 8], DType::F32).unwrap();
    let q = graph.input("q", &[2, 1, 2, 4], DType::F32).unwrap();
    let attends = AttentionArgs { scale: 1.0, mask: Mask::Causal, sinks: None };
    let rope = |q, k| RopeArgs {
        q,
        kv: Some([k; 2]),
        norms: [None; 2],
        norms_values: false,
        norms_turned: false,
        frequencies: far,
        turned_pairs: 2,
        factor: 1.0,
        eps: 1e-6,
    };
    let experts = |gate| ExpertArgs {
        logits: far,
        correction: None,
        gate,
        up: far,
        down: far,
        biases: None,
        residual: None,
        chosen: 1,
        counting: Counting::of(Weighting::All),
        gating: Gating::default(),
    };
    let of = "operator a: tensor x55 does not exist";
    for said in [
        message(graph.add_tensors("a", far, x)),
        message(graph.add_tensors("a", x, far)),
        message(graph.rms_norm("a", far, x, 1e-6)),
        message(graph.rms_norm("a", x, far, 1e-6)),
        message(graph.layer_norm("a", x, None, [x, far], 1e-6)),
        message(graph.linear("a", x, far, None, none, None)),
        message(graph.linear("a", x, x, Some(far), none, None)),
        message(graph.gated_linear("a", x, [far, x], None, none)),
        message(graph.embedding("a", x, EmbeddingArgs::of(far))),
        message(graph.embedding("a", far, EmbeddingArgs::of(x))),
        message(graph.embedding_of_each("a", far, 1.0, 4)),
        message(graph.experts("a", x, experts(far))),
        message(graph.rope("a", rope(q, far), [x, x])),
        message(graph.rope("a", rope(far, x), [x, x])),
        message(graph.attention("a", far, [x, x], attends)),
        message(graph.attention("a", q, [far, x], attends)),
        message(graph.attention("a", q, [x, x], AttentionArgs { sinks: Some(far), ..attends })),
        message(graph.attend_each("a", rope(far, x), far, attends, |_| Ok([x, x].into()))),
        message(graph.select_row("a", far)),
        message(graph.pool("a", far, Pooled::Mean, false)),
        message(graph.sample("a", far, x)),
        message(graph.sample_each("a", far, 4)),
        message(graph.sample_rows("a", far, 4)),
    ] {
        assert_eq!(said, of);
    }
    assert_eq!(message(graph.view(far, 0, &[1], &[1])), "operator view: tensor x55 does not exist");
    assert_eq!(message(graph.reshape(far, &[1])), "operator reshape: tensor x55 does not exist");
    assert_eq!(message(graph.rows_of(far, 0, 1)), "operator rows: tensor x55 does not exist");
    assert_eq!(message(graph.output("y", far)), "output y: tensor x55 does not exist");
    let view = graph.table.view("view", far, 0, &[1], &[1]).unwrap_err();
    assert_eq!(view.to_string(), "tensor view: its base x55 does not exist");
}

/// More seconds than can be counted are as many as there are, and what is no time at all is said as it was given.
#[test]
fn any_number_of_seconds_is_a_time() {
    let temp = tempfile::tempdir().unwrap();
    let [input, out] = ["in.csv", "out.csv"].map(|name| temp.path().join(name).to_string_lossy().into_owned());
    std::fs::write(&input, "id,lower,upper,size\na,0,1,4\n").unwrap();
    let pack = |timeout: &str| {
        let output = perpetua(&["pack", "--in", &input, "--capacity", "4", "--out", &out, "--timeout", timeout]);
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    for timeout in ["0.5", "1e30", "1e300", "inf"] {
        assert_eq!(pack(timeout).0, Some(0), "{timeout}");
    }
    for timeout in ["-1", "-1e300", "NaN"] {
        let (status, message) = pack(timeout);
        let says =
            format!("error: invalid value '{timeout}' for '--timeout <S>': expected a number of seconds, 0 or more");
        assert_eq!((status, message.lines().next()), (Some(2), Some(&*says)));
    }
}

/// What `plan` offers it does.
#[test]
fn presets_of_sentence_models_are_not_planned() {
    for (preset, status) in [("tiny-qwen3", 0), ("tiny-bert", 2), ("modernbert-base", 2)] {
        let output = perpetua(&["plan", "--preset", preset]);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(status), "{message}");
        assert!(status == 0 || !message.split_once("possible values").unwrap().1.contains("bert"), "{message}");
    }
}

/// The same whoever would have run it.
#[test]
fn tensors_without_elements_are_refused_by_name() {
    for shape in [[0, 4], [4, 0]] {
        let mut graph = KernelGraph::new();
        let x = graph.input("x", &shape, DType::F32).unwrap();
        let says =
            format!("operator sum: tensor x {shape:?} f32 has no elements, expected at least 1 along each dimension");
        assert_eq!(message(graph.add_tensors("sum", x, x)), says);
    }
}

/// What a pass makes has to be made before it is read; what is kept, or appended to, need not.
#[test]
fn intermediates_that_nobody_writes_are_refused_by_name() {
    let compiled = |build: &dyn Fn(&mut KernelGraph, TensorId)| {
        let mut graph = KernelGraph::new();
        let made = graph.table.add("made", &[2, 8], DType::F32, BufferKind::Intermediate).unwrap();
        build(&mut graph, made);
        let source = Source { name: "pass".to_owned(), graph, in_token_loop: false };
        compile(vec![source], &Config::new(Target::cpu(2))).map(|_| ()).map_err(|error| error.to_string())
    };
    let read = compiled(&|graph, made| {
        let y = graph.add_tensors("sum", made, made).unwrap();
        graph.output("y", y).unwrap();
    });
    let says = "operator sum: `a` is tensor made [2, 8] f32, which no operator before it writes";
    assert_eq!(read, Err(says.to_owned()));
    let given = compiled(&|graph, made| graph.output("y", made).unwrap());
    assert_eq!(given, Err("output y: it is tensor made [2, 8] f32, which no operator writes".to_owned()));
    let kept = compiled(&|graph, _| {
        let kept = graph.state("kept", &[2, 8], DType::F32).unwrap();
        let y = graph.add_tensors("sum", kept, kept).unwrap();
        graph.output("y", y).unwrap();
    });
    assert_eq!(kept, Ok(()));
}

/// What a model's publisher asks for and is not done is said, whatever it is; what changes nothing is not.
#[test]
fn what_is_not_applied_of_generation_config_is_said() {
    let temp = tempfile::tempdir().unwrap();
    let dir = copy("tiny-qwen2", temp.path());
    let said = |asked: &str| {
        std::fs::write(dir.join("generation_config.json"), asked).unwrap();
        let text = dir.to_string_lossy().into_owned();
        let output =
            perpetua(&["generate", "--device", "cpu", "--prompt", "a", "--max-new-tokens", "2", "--model", &text]);
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let line = "perpetua: not applied of generation_config.json: no_repeat_ngram_size 3, min_length 9";
    let asked = r#"{"no_repeat_ngram_size": 3, "repetition_penalty": 1.05, "min_length": 9, "temperature": 0.7}"#;
    assert_eq!(said(asked).lines().next(), Some(line));
    assert!(!said(r#"{"repetition_penalty": 1.0, "min_length": 0}"#).contains("not applied"));
}

/// More simulated SMs than this machine has room for stacks.
#[cfg(target_os = "linux")]
#[test]
fn too_many_simulated_sms_are_refused_with_the_numbers() {
    let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    // 96 threads of a worker, two mappings each.
    let sms = limit.trim().parse::<usize>().unwrap() / 192 + 1;
    if sms > 512 {
        println!("skipped: this machine allows {} mappings, enough for all SMs", limit.trim());
        return;
    }
    let model = fixture("tiny-qwen2").to_string_lossy().into_owned();
    let args = ["logits", "--ids", "1", "--out", "/dev/null", "--device", "simt", "--model", &model, "--threads"];
    let output = perpetua(&[&args[..], &[&sms.to_string()]].concat());
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), message.lines().count()), (Some(1), 1), "{message}");
    for words in [&format!("{} simulated threads", 96 * sms), "vm.max_map_count", "--threads"] {
        assert!(message.contains(words), "{message:?} should say {words:?}");
    }
}

/// A link stays a link; what stands for something open is written to, never replaced; what cannot be written is said
/// before any work is done.
#[cfg(target_os = "linux")]
#[test]
fn outputs_go_where_they_were_told_to() {
    let temp = tempfile::tempdir().unwrap();
    let model = fixture("tiny-qwen2").to_string_lossy().into_owned();
    let generate = |ids_out: &Path, stdout: std::process::Stdio| {
        let args = ["generate", "--model", &model, "--prompt", "- hi", "--max-new-tokens", "2", "--ids-out"];
        Command::new(env!("CARGO_BIN_EXE_perpetua")).args(args).arg(ids_out).stdout(stdout).output().unwrap()
    };
    let [target, link, text] = ["target", "link", "text"].map(|name| temp.path().join(name));
    std::fs::write(&target, "old").unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    assert!(generate(&link, std::process::Stdio::null()).status.success());
    assert!(link.is_symlink());
    let ids = std::fs::read_to_string(&target).unwrap();
    assert!(ids.starts_with('['), "{ids}");
    // As `--ids-out /dev/stdout >text`.
    let file = std::fs::File::create(&text).unwrap();
    assert!(generate(Path::new("/proc/self/fd/1"), file.into()).status.success());
    let text = std::fs::read(&text).unwrap();
    assert!(text.ends_with(ids.as_bytes()) && text.len() > ids.len(), "the text, and then the ids");
    for place in [temp.path(), &temp.path().join("none/ids")] {
        let output = generate(place, std::process::Stdio::piped());
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), message.lines().count(), output.stdout.len()), (Some(1), 1, 0), "{message}");
    }
    assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 3, "no temporary file is left");
    let bert = temp.path().join("bert");
    let source = SynthSource::Preset("tiny-bert");
    synth(source, &bert, &SynthOptions::default(), &mut |_, _| ControlFlow::Continue(())).unwrap();
    let bert = bert.to_string_lossy().into_owned();
    for args in [
        &["doctor"][..],
        &["plan", "--model", &model, "--target", "cpu:2"],
        &["generate", "--model", &model, "--device", "cpu", "--prompt", "a", "--max-new-tokens", "2"],
        &["embed", "--model", &bert, "--device", "cpu", "a"],
    ] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_perpetua")).args(args).stdout(full).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), message.lines().count()), (Some(1), 1), "{message}");
        assert_eq!(message.trim(), "perpetua: standard output: cannot write: no space left on device", "{args:?}");
    }
}

#[test]
fn the_library_refuses_what_the_program_refuses() {
    let model = Model::load(fixture("tiny-llama")).unwrap();
    let config =
        EngineConfig { device: Device::Cpu, max_context: Some(16), threads: Some(2), ..EngineConfig::default() };
    let mut engine = Engine::new(&model, &config).unwrap();
    let options = GenerateOptions::default();
    assert!(matches!(engine.generate(&[], &options), Err(EngineError::EmptyPrompt)));
    assert!(matches!(
        engine.generate(&[1; 17], &options),
        Err(EngineError::PromptTooLong { tokens: 17, context: 16, .. })
    ));
    assert!(matches!(engine.generate(&[1024], &options), Err(EngineError::Model(_))));
    let hot = GenerateOptions { temperature: f32::NAN, ..options.clone() };
    assert!(matches!(engine.generate(&[1], &hot), Err(EngineError::Option { name: "temperature", .. })));
    for chunks in [vec![0], (1..40).collect()] {
        let config = EngineConfig { chunks, ..config.clone() };
        assert!(matches!(Engine::new(&model, &config), Err(EngineError::Option { name: "chunks", .. })));
    }
    let wrong = engine.resident_mut().run_tokens(ProgramId(0), &[1, 2]).unwrap_err();
    assert_eq!(wrong.to_string(), "2 rows of program 0: expected 1 at most");
    let none = GenerateOptions { max_new_tokens: 0, ..options };
    assert_eq!(engine.generate(&[1], &none).unwrap().count(), 0);
    assert_eq!(
        engine
            .generate(&[1; 16], &GenerateOptions { stop_tokens: Some(vec![]), ..Default::default() })
            .unwrap()
            .count(),
        1
    );
}

/// Without a tokenizer there are ids; with one that cannot be used, an error, not empty texts.
#[test]
fn a_broken_tokenizer_is_no_missing_one() {
    let temp = tempfile::tempdir().unwrap();
    let dir = copy("tiny-qwen2", temp.path());
    let generate = || -> Result<usize, EngineError> {
        let config = EngineConfig { device: Device::Cpu, max_context: Some(8), ..EngineConfig::default() };
        let mut engine = Engine::new(&Model::load(&dir)?, &config)?;
        let options = GenerateOptions { max_new_tokens: 2, stop_tokens: Some(vec![]), ..GenerateOptions::default() };
        engine.generate(&[1, 2], &options)?.try_fold(0, |n, token| token.map(|_| n + 1))
    };
    std::fs::write(dir.join("tokenizer.json"), "{}").unwrap();
    assert!(generate().unwrap_err().to_string().contains("tokenizer.json"));
    std::fs::remove_file(dir.join("tokenizer.json")).unwrap();
    assert_eq!(generate().unwrap(), 2);
}

/// A bias that the configuration does not have changes what the network computes: said once, and on stderr alone.
#[test]
fn tensors_that_the_network_does_not_use_are_named() {
    let temp = tempfile::tempdir().unwrap();
    let dir = copy("tiny-llama", temp.path());
    let path = dir.join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let norm = file.tensor("model.norm.weight").unwrap();
    let names = ["q_proj.bias", "rotary_emb.inv_freq", "v_proj.bias"];
    let others = names.map(|name| (format!("model.layers.1.self_attn.{name}"), norm.clone()));
    let all: Vec<_> = file.tensors().into_iter().chain(others).collect();
    std::fs::write(&path, safetensors::serialize(all, None).unwrap()).unwrap();
    let dir = dir.to_string_lossy().into_owned();
    let line = format!(
        "perpetua: {dir}: tensors that this network does not use: model.layers.1.self_attn.q_proj.bias and 1 more"
    );
    let whole = fixture("tiny-llama").to_string_lossy().into_owned();
    for verb in [&["generate", "--prompt", "a", "--max-new-tokens", "2"][..], &["plan", "--target", "cpu:2"]] {
        let run = |dir: &str| perpetua(&[verb, &["--model", dir]].concat());
        let (found, expected) = (run(&dir), run(&whole));
        let said = String::from_utf8_lossy(&found.stderr).into_owned();
        assert!(found.status.success(), "{said}");
        assert_eq!(said.lines().filter(|said| *said == line).count(), 1, "{said}");
        assert!(!String::from_utf8_lossy(&expected.stderr).contains("does not use"));
        if verb[0] == "generate" {
            assert_eq!(found.stdout, expected.stdout);
        }
    }
}

/// Whoever gives a number that an option does not take, or options that exclude each other, hears the same from all
/// verbs: what is expected, and status 2.
#[test]
fn command_lines_that_are_not_understood_are_2() {
    let model = fixture("tiny-qwen3").to_string_lossy().into_owned();
    let [plan, graph] = [["plan", "--preset", "tiny-qwen3"], ["plan", "--graph", "none.json"]];
    let verb = |verb| [verb, "--model", &model];
    let [generate, bench, chat] = ["generate", "bench", "chat"].map(verb);
    let many = |least: usize| format!("expected a whole number, {least} or more");
    let to = |most: usize| format!("expected a whole number from 1 to {most}");
    let excluded = || "cannot be used with".to_owned();
    let mut cases = vec![
        (&plan, vec!["--batch", "0"], to(64)),
        (&plan, vec!["--batch", "65"], to(64)),
        (&plan, vec!["--batch", "-1"], to(64)),
        (&bench, vec!["--batch", "0"], to(64)),
        (&bench, vec!["--batch", "65"], to(64)),
        (&plan, vec!["--prompt-lookup", "16"], to(15)),
        (&bench, vec!["--prompt-lookup", "16"], to(15)),
        (&generate, vec!["--prompt", "a", "--prompt-lookup", "0"], to(15)),
        (&plan, vec!["--rows", "0"], many(1)),
        (&plan, vec!["--rows", "-1"], many(1)),
        (&plan, vec!["--context", "0"], many(1)),
        (&bench, vec!["--context", "0"], many(1)),
        (&bench, vec!["--tokens", "0"], many(1)),
        (&bench, vec!["--runs", "0"], many(1)),
        (&bench, vec!["--threads", "0"], many(1)),
        (&chat, vec!["--max-context", "0"], many(1)),
        (&chat, vec!["--seed", "-1"], many(0)),
        (&chat, vec!["--top-k", "x"], many(0)),
        (&chat, vec!["--max-new-tokens", "-1"], many(0)),
        (&generate, vec!["--prompt", "a", "--max-seconds", "-1"], "expected a number of seconds, 0 or more".to_owned()),
        (&["pack", "--in", "a"], vec!["--out", "b", "--capacity", "-5"], many(0)),
        (
            &["pack", "--in", "a"],
            vec!["--out", "b", "--capacity", "5", "--timeout", "-5"],
            "number of seconds".to_owned(),
        ),
        (&["synth", "--preset", "tiny-qwen3"], vec!["--out", "b", "--seed", "-1"], many(0)),
        (&plan, vec!["--batch", "2", "--prompt-lookup", "2"], excluded()),
        (&bench, vec!["--batch", "2", "--prompt-lookup", "2"], excluded()),
    ];
    // What a plain graph says itself.
    for option in ["--rows", "--context", "--batch", "--prompt-lookup", "--just-in-time", "--trace", "--timeline"] {
        cases.push((&graph, vec![option, "2"], excluded()));
    }
    for (verb, args, words) in cases {
        let output = perpetua(&[&verb[..], &args].concat());
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{verb:?} {args:?}: {message}");
        assert!(message.contains(&words), "{verb:?} {args:?}: {message:?} should say {words:?}");
    }
}

/// What only a GPU has is refused where `--device auto` is none, as where another device is named.
#[test]
fn techniques_are_a_gpus() {
    let model = fixture("tiny-qwen3").to_string_lossy().into_owned();
    let has_gpu = perpetua::device_image::device_image().is_some() && perpetua::cuda::Gpu::open().is_ok();
    if has_gpu {
        return;
    }
    let output = perpetua(&["generate", "--model", &model, "--prompt", "a", "--without", "tiles"]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), message.lines().count()), (Some(1), 1), "{message}");
    assert!(message.starts_with("perpetua: --without is for a GPU: "), "{message}");
}

#[test]
fn batches_that_cannot_be_are_refused() {
    let model = fixture("tiny-qwen3").to_string_lossy().into_owned();
    for (args, words) in [
        (&["--batch", "2", "--device", "ptx", "--trace", "t.json"][..], "not with --batch"),
        (&["--batch", "64", "--max-context", "4096", "--tokens", "4096"], "the model has 4096"),
        (&["--batch", "2", "--max-context", "140"], "--max-context 140: --context and --tokens need 160 positions"),
    ] {
        let output = perpetua(&[&["bench", "--model", &model], args].concat());
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), message.lines().count()), (Some(1), 1), "{message}");
        assert!(message.contains(words), "{message:?} should say {words:?}");
    }
}

/// Files on which the tokenizers' library panics: a line of ours, and no more.
#[test]
fn damaged_tokenizers_are_refused_in_one_line() {
    let temp = tempfile::tempdir().unwrap();
    let dir = copy("tiny-qwen3", temp.path());
    let path = dir.join("tokenizer.json");
    let whole: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let prompt = ["--prompt", "a b"];
    for (part, key, value) in [
        ("model", "continuing_subword_prefix", serde_json::json!("   ")),
        ("", "normalizer", serde_json::json!({"type": "Replace", "pattern": {"String": ""}, "content": "abc"})),
        ("", "normalizer", serde_json::json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"})),
        (
            "",
            "post_processor",
            serde_json::json!({"type": "TemplateProcessing", "single": [{"Sequence": {"id": "B", "type_id": 0}}],
                               "pair": [], "special_tokens": {}}),
        ),
    ] {
        let mut damaged = whole.clone();
        let of = if part.is_empty() { &mut damaged } else { &mut damaged[part] };
        of[key] = value;
        std::fs::write(&path, damaged.to_string()).unwrap();
        refused(&dir, &prompt, &["tokenizer.json"]);
    }
}
