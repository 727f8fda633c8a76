//! The `perpetua` program, as scripts use it.

use crate::bad_input::copy;
use crate::cuda::has_kernel;
use perpetua::model::chat::ChatMessage;
use perpetua::model::{SynthOptions, SynthSource, synth};
use perpetua::{Device, Engine, EngineConfig, GenerateOptions, Model};
use perpetua_shared::Technique;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn fixture(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    path.to_string_lossy().into_owned()
}

fn perpetua(args: &[&str]) -> Output {
    let output = Command::new(env!("CARGO_BIN_EXE_perpetua")).args(args).output().expect("the program was built");
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

#[test]
fn generate_writes_text_and_ids() {
    let temp = tempfile::tempdir().unwrap();
    let ids_out = temp.path().join("ids.json");
    let model = fixture("tiny-qwen3");
    let prompt = "The licence gives every user the freedom to";
    let args = ["generate", "--model", &model, "--prompt", prompt, "--max-new-tokens", "24", "--ids-out"];
    let output = perpetua(&[&args[..], &[&ids_out.to_string_lossy()]].concat());
    assert!(std::str::from_utf8(&output.stdout).unwrap().trim().len() > 20);
    let ids: Vec<u32> = serde_json::from_str(&std::fs::read_to_string(&ids_out).unwrap()).unwrap();
    assert_eq!(ids[..4], [954, 196, 13, 387], "as transformers has them");
    assert_eq!(ids.len(), 24);
    let chat = perpetua(&["generate", "--model", &model, "--prompt", "Hi", "--chat", "--max-new-tokens", "4"]);
    assert!(String::from_utf8_lossy(&chat.stderr).contains("prompt"));
    // Before whichever of these is there first.
    let text = String::from_utf8(output.stdout).unwrap();
    let (_, stop) = text.trim_end().split_at(text.char_indices().nth(12).unwrap().0);
    let stopped = perpetua(&[&args[..7], &["--stop", "nowhere", "--stop", stop]].concat());
    let expected = &text[..text.find(stop).unwrap()];
    assert_eq!(String::from_utf8(stopped.stdout).unwrap(), format!("{expected}\n"));
    let empty = Command::new(env!("CARGO_BIN_EXE_perpetua")).args(&args[..5]).args(["--stop", ""]).output().unwrap();
    assert_eq!(
        String::from_utf8_lossy(&empty.stderr),
        "perpetua: stop string \"\": expected a text that is not empty\n"
    );
}

/// What `program` does with `input` as standard input: its status, and what it prints and says.
fn told(program: &mut Command, input: &[u8]) -> (Option<i32>, String, String) {
    program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = program.spawn().unwrap();
    // Whoever refuses at once may be gone before it is asked anything.
    let _ = child.stdin.take().unwrap().write_all(input);
    let output = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// A file's text, or standard input's, is what the same text on the command line is, and may be longer than that can
/// be.
#[test]
fn prompts_and_sentences_come_from_files() {
    let temp = tempfile::tempdir().unwrap();
    let file = temp.path().join("text");
    let run = |verb: &[&str], option: &str, text: &[u8]| {
        std::fs::write(&file, text).unwrap();
        let of = |path: &str| told(Command::new(env!("CARGO_BIN_EXE_perpetua")).args(verb).args([option, path]), text);
        let [read, piped] = [of(&file.to_string_lossy()), of("-")];
        assert_eq!((read.0, &read.1), (piped.0, &piped.1), "{verb:?}: {} {}", read.2, piped.2);
        read
    };
    let (text, sentences) = (fixture("tiny-qwen3"), fixture("tiny-embedding"));
    let generate = ["generate", "--model", &text, "--device", "cpu", "--max-new-tokens", "8"];
    let prompt = "The licence gives\nevery user \u{fc}";
    let given = perpetua(&[&generate[..], &["--prompt", prompt]].concat());
    let (status, out, err) = run(&generate, "--prompt-file", prompt.as_bytes());
    assert_eq!((status, out.as_bytes()), (Some(0), &given.stdout[..]), "{err}");
    let out = temp.path().join("logits");
    let logits = ["logits", "--model", &text, "--device", "cpu", "--out", &out.to_string_lossy()];
    perpetua(&[&logits[..], &["--prompt", prompt]].concat());
    let given = std::fs::read(&out).unwrap();
    assert_eq!(run(&logits, "--prompt-file", prompt.as_bytes()).0, Some(0));
    assert!(std::fs::read(&out).unwrap() == given);
    let embed = ["embed", "--model", &sentences, "--device", "cpu"];
    let given = perpetua(&[&embed[..], &["one", "", "two three"]].concat());
    let (status, out, err) = run(&embed, "--in", b"one\n\r\ntwo three\n");
    assert_eq!((status, out.as_bytes()), (Some(0), &given.stdout[..]), "{err}");
    // Longer than an argument can be, on Linux 128 KiB.
    let (status, _, err) = run(&logits, "--prompt-file", "freedom ".repeat(30_000).as_bytes());
    assert!(status == Some(1) && err.contains("the prompt has"), "{err}");
    for (verb, option) in [(&generate[..], "--prompt-file"), (&logits, "--prompt-file"), (&embed, "--in")] {
        let (status, _, err) = run(verb, option, b"caf\xe9");
        assert!(status == Some(1) && err.contains("byte 3 is not UTF-8"), "{err}");
        assert!(err.lines().count() == 1, "{err}");
    }
    let (status, _, err) = run(&embed, "--in", b"");
    assert!(status == Some(1) && err.contains("no lines: expected a sentence on each"), "{err}");
    let both = [&generate[..], &["--prompt", "a", "--prompt-file", "-"]].concat();
    for args in [&both[..], &generate, &embed] {
        let output = Command::new(env!("CARGO_BIN_EXE_perpetua")).args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
    }
}

/// What a simulated GPU takes means nothing, and is not said.
#[test]
fn rates_are_those_of_real_devices() {
    let model = fixture("tiny-qwen2");
    let said = |device: &str| {
        let args = ["generate", "--model", &model, "--prompt", "a", "--max-new-tokens", "3", "--device", device];
        String::from_utf8(perpetua(&args).stderr).unwrap()
    };
    for device in ["simt", "ptx"].into_iter().take(if has_kernel() { 2 } else { 1 }) {
        let said = said(device);
        assert!(said.trim_end().ends_with(" | prompt 1 tokens | 3 tokens") && !said.contains("/s)"), "{said}");
    }
    assert!(said("cpu").contains("/s)"));
}

/// The picture in the README is what `plan` draws.
#[test]
fn the_timeline_in_the_docs_is_todays() {
    let temp = tempfile::tempdir().unwrap();
    let picture = |args: &[&str]| {
        let file = temp.path().join("picture.svg");
        perpetua(&[&["plan", "--timeline", &file.to_string_lossy()], args].concat());
        std::fs::read_to_string(file).unwrap()
    };
    let found = picture(&["--preset", "llama-3.2-1b"]);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/step.svg");
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, &found).unwrap();
    }
    assert!(found == std::fs::read_to_string(path).unwrap(), "docs/step.svg is another: BLESS=1 writes it anew");
    // Several rows, CPU workers, a batch: nothing is drawn outside.
    for args in [
        &["--preset", "qwen3-0.6b", "--rows", "128"][..],
        &["--preset", "tiny-qwen3", "--target", "cpu:2"],
        &["--preset", "tiny-qwen3-moe", "--batch", "3", "--target", "workers:40"],
    ] {
        let text = picture(args);
        assert!(text.starts_with("<svg") && text.ends_with("</svg>\n") && !text.contains("NaN"), "{args:?}");
        let number = |line: &str, name: &str| -> Option<f64> {
            line.split_once(&format!(" {name}=\""))?.1.split('"').next()?.parse().ok()
        };
        let [width, height] = ["width", "height"].map(|name| number(&text, name).unwrap());
        let bars = text.lines().filter(|line| line.starts_with("<rect x="));
        let ends = bars.map(|line| ["x", "width", "y", "height"].map(|name| number(line, name).unwrap()));
        let ends: Vec<_> = ends.map(|[x, w, y, h]| [x + w, y + h]).collect();
        assert!(ends.len() > 10, "{args:?}");
        assert!(ends.iter().all(|[x, y]| *x <= width && *y <= height), "{args:?}: outside {width} x {height}");
    }
}

/// What docs/formats.md and `--help` have as examples is read as it stands, and gives what is printed below it.
#[test]
fn the_formats_in_the_docs_are_as_they_are_written() {
    let temp = tempfile::tempdir().unwrap();
    let [input, out] = ["in", "out"].map(|name| temp.path().join(name).to_string_lossy().into_owned());
    let page = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/formats.md")).unwrap();
    let mut examples =
        page.split("\n```").filter_map(|part| part.strip_prefix("json\n").or(part.strip_prefix("csv\n")));
    let made = |verb: &[&str], example: &str| {
        std::fs::write(&input, example).unwrap();
        perpetua(&[verb, &[&input, if verb[0] == "plan" { "--tasks-json" } else { "--out" }, &out]].concat());
        std::fs::read_to_string(&out).unwrap()
    };
    let value = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
    let plan = ["plan", "--check", "--target", "workers:2", "--graph"];
    let pack = ["pack", "--capacity", "8", "--in"];
    for verb in [&plan[..], &["schedule", "--in"], &pack] {
        let [example, expected] = [(); 2].map(|()| examples.next().expect("two for each verb"));
        let found = made(verb, example);
        if verb[0] == "pack" {
            assert_eq!(found.trim_end(), expected);
        } else {
            assert_eq!(value(&found), value(expected));
        }
        // The help's is the first paragraph that is further in.
        let help = String::from_utf8(perpetua(&[verb[0], "--help"]).stdout).unwrap();
        let format = help.split_once("docs/formats.md").expect("the page is named").1;
        let lines = format.lines().skip(1).take_while(|line| line.starts_with("  "));
        made(verb, &lines.map(|line| line[2..].to_owned() + "\n").collect::<String>());
    }
    assert_eq!(examples.next(), None);
}

/// A line a turn: every answer is what the model says to all before it.
#[test]
fn chat_answers_line_by_line() {
    let folder = fixture("tiny-qwen3");
    let model = Model::load(&folder).unwrap();
    let mut messages = vec![ChatMessage::new("system", "Be brief.")];
    let mut expected = String::new();
    let mut engine = Engine::new(&model, &EngineConfig { device: Device::Cpu, ..EngineConfig::default() }).unwrap();
    for question in ["What may I do?", "And what not?"] {
        messages.push(ChatMessage::new("user", question));
        let prompt = model.encode_chat(&messages).unwrap();
        let options = GenerateOptions { max_new_tokens: 12, ..GenerateOptions::default() };
        let answer: String = engine.generate(&prompt, &options).unwrap().map(|token| token.unwrap().text).collect();
        expected += &format!("{answer}\n");
        messages.push(ChatMessage::new("assistant", answer));
    }
    let args =
        ["chat", "--model", &folder, "--system", "Be brief.", "--max-new-tokens", "12", "--device", "cpu", "--exact"];
    let chat = |input: &str, more: &[&str]| {
        told(Command::new(env!("CARGO_BIN_EXE_perpetua")).args(args).args(more), input.as_bytes())
    };
    let (status, out, err) = chat("What may I do?\n\nAnd what not?", &[]);
    assert_eq!((status, &*out), (Some(0), &*expected), "{err}");
    // Of the second turn what is new is read.
    let read: Vec<usize> =
        err.lines().filter_map(|line| line.split_once("prompt ")?.1.split(' ').next()?.parse().ok()).collect();
    assert!(read.len() == 2 && read[1] < model.encode_chat(&messages[..4]).unwrap().len() - read[0], "{err}");
    let (status, out, err) = chat("What may I do?\nAnd what not?\n", &["--max-context", "40"]);
    assert!(
        status == Some(1) && expected.starts_with(out.trim_end()) && err.contains("context"),
        "{status:?} {out} {err}"
    );
    assert_eq!(chat("", &[]).0, Some(0));
}

/// What the model says to itself is on stderr, what it answers on stdout; templates are told what `--set` says.
#[test]
fn reasoning_is_told_from_answers() {
    let temp = tempfile::tempdir().unwrap();
    let folder = copy("tiny-qwen3", temp.path());
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        let text = std::fs::read_to_string(folder.join(file)).unwrap();
        let text = text.replace("<|endoftext|>", "<think>").replace("<|im_start|>", "</think>");
        std::fs::write(folder.join(file), text).unwrap();
    }
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content }} ({{ m.reasoning_content }})\n{% endfor %}\
                    {% if effort == 'some' %}<think>\n{% endif %}";
    std::fs::write(folder.join("chat_template.jinja"), template).unwrap();
    let model = Model::load(&folder).unwrap();
    let mut engine = Engine::new(&model, &EngineConfig { device: Device::Cpu, ..EngineConfig::default() }).unwrap();
    let mut said = |messages: &[ChatMessage], effort: &str| -> String {
        let prompt = model.encode_chat_with(messages, &[("effort", effort.into())]).unwrap();
        let options = GenerateOptions { max_new_tokens: 6, ..GenerateOptions::default() };
        engine.generate(&prompt, &options).unwrap().map(|token| token.unwrap().text).collect()
    };
    let mut messages = vec![ChatMessage::new("user", "What may I do?")];
    let [thought, answer] = ["some", "none"].map(|effort| said(&messages, effort));
    let folder = folder.to_string_lossy();
    let args = ["--model", &folder, "--max-new-tokens", "6", "--device", "cpu", "--exact", "--set"];
    let run = |verb: &str, more: &[&str], input: &str| {
        let args = [&[verb], &args[..], more].concat();
        let (status, out, err) = told(Command::new(env!("CARGO_BIN_EXE_perpetua")).args(&args), input.as_bytes());
        assert_eq!(status, Some(0), "{args:?}: {err}");
        (out, err)
    };
    let question = ["effort=some", "--chat", "--prompt", "What may I do?"];
    let (out, err) = run("generate", &question, "");
    assert!(out == "\n" && err.contains(thought.trim_start_matches('\n')), "{out} {err}");
    let (out, err) = run("generate", &[&["effort=none"], &question[1..]].concat(), "");
    assert!(out == format!("{answer}\n") && !err.contains(&thought), "{out} {err}");
    // The next turn is told both.
    let reasoning = Some(thought.trim_start_matches('\n').to_owned());
    messages.extend([
        ChatMessage { reasoning, ..ChatMessage::new("assistant", "") },
        ChatMessage::new("user", "And what not?"),
    ]);
    let (out, err) = run("chat", &["effort=some"], "What may I do?\nAnd what not?\n");
    let second = said(&messages, "some");
    assert!(out == "\n\n" && err.contains(second.trim_start_matches('\n')), "{out} {err}");
    let (out, err) = run("generate", &["effort=some", "--prompt", "What may I do?"], "");
    assert!(out.len() > 1 && err.contains("without --chat there is no template: --set not used"), "{out} {err}");
    let refused =
        Command::new(env!("CARGO_BIN_EXE_perpetua")).args(["chat", "--model", &folder, "--set", "x"]).output();
    assert_eq!(refused.unwrap().status.code(), Some(2));
}

#[test]
fn embed_writes_lines_and_safetensors() {
    let temp = tempfile::tempdir().unwrap();
    let model = temp.path().join("bert");
    let source = SynthSource::Preset("tiny-bert");
    synth(source, &model, &SynthOptions::default(), &mut |_, _| ControlFlow::Continue(())).unwrap();
    let model = model.to_string_lossy().into_owned();
    let output = perpetua(&["embed", "--model", &model, "one sentence", "another", "one sentence"]);
    let lines: Vec<serde_json::Value> =
        String::from_utf8(output.stdout).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let embedding = |i: usize| -> Vec<f64> {
        lines[i]["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
    };
    assert_eq!(lines.len(), 3);
    assert_eq!(lines[1]["text"], "another");
    assert_eq!(embedding(0), embedding(2), "the same text, the same bits");
    assert_ne!(embedding(0), embedding(1));
    let norm: f64 = embedding(0).iter().map(|x| x * x).sum();
    assert!((norm - 1.0).abs() < 1e-5, "normalised: {norm}");
    // What users run against the definition.
    let reference = perpetua(&["embed", "--device", "reference", "--model", &model, "one sentence"]);
    let line: serde_json::Value = serde_json::from_slice(&reference.stdout).unwrap();
    let cosine: f64 =
        line["embedding"].as_array().unwrap().iter().zip(embedding(0)).map(|(a, b)| a.as_f64().unwrap() * b).sum();
    assert!(cosine > 0.99999, "cosine {cosine}");
    let out = temp.path().join("e.safetensors");
    perpetua(&["embed", "--model", &model, "--out", &out.to_string_lossy(), "one sentence", "another"]);
    let bytes = std::fs::read(out).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.tensor("embeddings").unwrap().shape(), [2, embedding(0).len()]);
}

/// To the model's longest input, or to the context that was asked for: the same rule, and how many were is said once.
#[test]
fn sentences_that_are_too_long_are_cut() {
    let long = "of what anybody writes ".repeat(2000);
    for (name, device, more) in [
        ("tiny-embedding", "cpu", &["--max-context", "6"][..]),
        ("tiny-embedding", "reference", &[]),
        ("tiny-modernbert", "cpu", &[]),
    ] {
        let dir = fixture(name);
        let longer = format!("{long} and more");
        let texts = ["short", &long, &longer];
        let verb = ["embed", "--model", &dir, "--device", device];
        let output = perpetua(&[&verb[..], more, &texts].concat());
        let said = String::from_utf8(output.stderr).unwrap();
        let model = Model::load(&dir).unwrap();
        let allowed = model.max_tokens();
        let expected = match more {
            [] => format!("perpetua: 2 of 3 sentences cut to {allowed} tokens\n"),
            _ => format!("perpetua: 2 of 3 sentences cut to 6 tokens (see --max-context; the model takes {allowed})\n"),
        };
        assert_eq!(said, expected, "{name}");
        let lines = String::from_utf8(output.stdout).unwrap();
        let embeddings: Vec<serde_json::Value> = lines
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["embedding"].clone())
            .collect();
        assert!(
            embeddings[1] == embeddings[2] && embeddings[0] != embeddings[1],
            "{name}: what is cut off makes no difference"
        );
        assert!(perpetua(&[&verb[..], more, &["short"]].concat()).stderr.is_empty());
        let most = if more.is_empty() { allowed } else { 6 };
        let (ids, is_cut) = model.encode_sentence_within(None, &long, most).unwrap();
        assert_eq!((ids.len(), is_cut), (most, true));
        if !more.is_empty() {
            // The library's rule, too.
            let config = EngineConfig { device: Device::Cpu, max_context: Some(6), ..Default::default() };
            let mut embedder = perpetua::Embedder::new(&model, &config).unwrap();
            let found: Vec<f64> = embedder.embed(&long).unwrap().into_iter().map(f64::from).collect();
            let given: Vec<f64> = embeddings[1].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
            assert!(found.iter().zip(&given).all(|(a, b)| (a - b).abs() < 1e-6));
        }
    }
}

#[test]
fn plan_prints_and_writes_what_it_is_asked_for() {
    let temp = tempfile::tempdir().unwrap();
    let file = |name: &str| temp.path().join(name).to_string_lossy().into_owned();
    let model = fixture("tiny-llama");
    let [tasks, dot, svg, trace] = ["t.json", "g.dot", "p.svg", "trace.json"].map(file);
    let output = perpetua(&[
        "plan",
        "--model",
        &model,
        "--target",
        "workers:7",
        "--check",
        "--tasks-json",
        &tasks,
        "--dot",
        &dot,
        "--svg",
        &svg,
        "--trace",
        &trace,
    ]);
    let text = String::from_utf8(output.stdout).unwrap();
    for word in ["tasks", "events", "oversync", "arena", "predicted step", "compile", "check"] {
        assert!(text.contains(word), "{text}");
    }
    let json =
        |path: &str| -> serde_json::Value { serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap() };
    let tasks = json(&tasks);
    assert_eq!(tasks["workers"].as_array().unwrap().len(), 7);
    let listed: usize = tasks["workers"].as_array().unwrap().iter().map(|w| w.as_array().unwrap().len()).sum();
    assert_eq!(listed, tasks["tasks"].as_array().unwrap().len());
    // The last operator ends the iteration, and says so; no other has a class that is not the usual one.
    let all = tasks["tasks"].as_array().unwrap();
    let classes: Vec<_> = all.iter().filter_map(|task| task.get("class")).collect();
    assert_eq!(classes, ["end"]);
    assert_eq!(all.last().unwrap()["class"], "end");
    assert!(!json(&trace)["traceEvents"].as_array().unwrap().is_empty());
    assert!(std::fs::read_to_string(&svg).unwrap().starts_with("<svg"));
    assert!(std::fs::read_to_string(&dot).unwrap().contains("digraph"));
}

/// Tasks that a scheduler launches are in no list, and in the predicted run all the same.
#[test]
fn plan_predicts_what_is_launched_just_in_time() {
    let temp = tempfile::tempdir().unwrap();
    let [tasks, trace] = ["t.json", "trace.json"].map(|name| temp.path().join(name).to_string_lossy().into_owned());
    let model = fixture("tiny-llama");
    let args = ["plan", "--model", &model, "--target", "workers:7", "--check"];
    let launched = ["--just-in-time", "attention", "--tasks-json", &tasks, "--trace", &trace, "--rows", "5"];
    let text = String::from_utf8(perpetua(&[&args[..], &launched].concat()).stdout).unwrap();
    assert!(text.contains("predicted step"), "{text}");
    let json =
        |path: &str| -> serde_json::Value { serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap() };
    let (tasks, trace) = (json(&tasks), json(&trace));
    let all = tasks["tasks"].as_array().unwrap();
    let n_launched = all.iter().filter(|task| task["class"] == "just-in-time").count();
    let listed: usize = tasks["workers"].as_array().unwrap().iter().map(|w| w.as_array().unwrap().len()).sum();
    assert!(n_launched > 0 && listed + n_launched == all.len());
    // Each ran once, and took its time.
    let runs = trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["args"]["block"].is_array());
    let mut seen = vec![0; all.len()];
    for event in runs {
        seen[event["args"]["task"].as_u64().unwrap() as usize] += 1;
        assert!(event["dur"].as_f64().unwrap() > 0.0, "{event}");
    }
    assert!(seen.iter().all(|n| *n == 1), "{seen:?}");
    // Where workers have no loaders, and where a pass is too long for them.
    for target in [["--target", "cpu:2", "--context", "128"], ["--target", "h200", "--rows", "64"]] {
        let preset = ["plan", "--preset", "tiny-qwen3", "--just-in-time", "attention"];
        let text = String::from_utf8(perpetua(&[&preset[..], &target].concat()).stdout).unwrap();
        assert!(text.contains("predicted step"), "{text}");
    }
    let none =
        Command::new(env!("CARGO_BIN_EXE_perpetua")).args(args).args(["--just-in-time", "nothing"]).output().unwrap();
    let message = String::from_utf8_lossy(&none.stderr).into_owned();
    assert_eq!((none.status.code(), message.lines().count()), (Some(1), 1), "{message}");
    assert!(message.contains("just-in-time operator nothing: there is no operator"), "{message}");
}

/// Half the bytes, nearly, where matrices are in 8 bits, fewer still in 4, and judged as ever. Of gpt-oss's experts
/// those that a token goes to are read, in the 4 bits that files have, and their biases: nobody brings the others'.
#[test]
fn plan_counts_the_experts_of_a_token() {
    let text = String::from_utf8(perpetua(&["plan", "--preset", "gpt-oss-20b", "--context", "512"]).stdout).unwrap();
    let line = text.lines().find(|line| line.starts_with("predicted step")).unwrap();
    let bytes = line.split_whitespace().skip_while(|word| *word != "for").nth(1).unwrap().parse::<f64>().unwrap() * 1e9;
    let (hidden, layers) = (2880.0, 24.0);
    let attention = 2.0 * hidden * (2.0 * 64.0 * 64.0 + 2.0 * 8.0 * 64.0);
    // Rows of 22.5 lines, and the lines of their scales.
    let experts = 4.0 * 3.0 * hidden * (23.0 + 3.0) * 64.0;
    let expected = layers * (attention + experts) + 2.0 * hidden * 201_088.0;
    assert!((bytes / expected - 1.0).abs() < 0.02, "{line}, expected about {expected:.3e} bytes");
}

#[test]
fn plan_knows_fewer_bits() {
    let step = |more: &[&str]| {
        let args = ["plan", "--preset", "llama-3.2-1b", "--check"];
        let text = String::from_utf8(perpetua(&[&args[..], more].concat()).stdout).unwrap();
        let line = text.lines().find(|line| line.starts_with("predicted step")).unwrap();
        line.split_whitespace().nth(2).unwrap().parse::<f64>().unwrap()
    };
    let [all, q8, q4] = [&[][..], &["--quantize", "q8"], &["--quantize", "q4"]].map(step);
    let on_two_cores = step(&["--quantize", "q4", "--target", "cpu:2"]);
    // An H200 waits for levels of 4 bits rather than for bytes.
    assert!(q8 < 0.9 * all && q4 < all && on_two_cores > all, "{all}, {q8}, {q4}, on two cores {on_two_cores}");
    let model = fixture("tiny-llama");
    let refused = Command::new(env!("CARGO_BIN_EXE_perpetua"))
        .args(["plan", "--model", &model, "--quantize", "q8"])
        .output()
        .unwrap();
    assert_eq!(refused.status.code(), Some(2), "{}", String::from_utf8_lossy(&refused.stderr));
}

/// A batch's step, too: a worker that has parts of several sequences' attention, and merges some, waits for the others'
/// parts of one only when it has done its own of all.
#[test]
fn plan_decodes_batches() {
    let temp = tempfile::tempdir().unwrap();
    let tasks = temp.path().join("t.json").to_string_lossy().into_owned();
    let plan = ["plan", "--preset", "qwen3-0.6b", "--batch", "5", "--check", "--tasks-json", &tasks];
    let text = String::from_utf8(perpetua(&plan).stdout).unwrap();
    for words in ["decode of 5 for h200", "copies of", "predicted step", "every overlap ordered"] {
        assert!(text.contains(words), "{text}");
    }
    let tasks: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&tasks).unwrap()).unwrap();
    let name = |task: usize| tasks["tasks"][task]["op"].as_str().unwrap();
    let (mut n_merges, mut n_parts) = (0, 0);
    for list in tasks["workers"].as_array().unwrap() {
        let names = list.as_array().unwrap().iter().map(|task| name(task.as_u64().unwrap() as usize));
        let mut last = "";
        for name in names.filter(|name| name.contains("self_attn.attention")) {
            // Within a layer.
            let layer = |name: &str| name.split(".self_attn").next().unwrap().to_owned();
            assert!(
                layer(last) != layer(name) || !last.ends_with("merge") || name.ends_with("merge"),
                "{last}, {name}"
            );
            (n_merges, n_parts) = (n_merges + usize::from(name.ends_with("merge")), n_parts + 1);
            last = name;
        }
    }
    // 28 layers of 8 heads, three parts of each, and of each query a merge.
    assert_eq!((n_merges, n_parts), (28 * 8 * 2 * 5, 28 * 8 * 5 * 5));
    let refused = |args: &[&str], status: i32, words: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_perpetua")).arg("plan").args(args).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(status), "{message}");
        assert!(message.contains(words), "{message:?} should say {words:?}");
    };
    refused(&["--preset", "qwen3-0.6b", "--batch", "65"], 2, "expected a whole number from 1 to 64");
    refused(&["--preset", "qwen3-0.6b", "--batch", "2", "--rows", "2"], 2, "cannot be used with");
    refused(&["--graph", "none.json", "--batch", "2"], 2, "cannot be used with");
    let model = fixture("tiny-qwen3");
    let text = String::from_utf8(perpetua(&["plan", "--model", &model, "--batch", "3", "--target", "cpu:2"]).stdout);
    assert!(text.unwrap().contains("decode of 3 for cpu:2"));
}

/// Of windows of 40 tokens the second twenty are scored, each by what the tokens before it in its window predict.
#[test]
fn perplexity_scores_the_second_half_of_each_window() {
    let temp = tempfile::tempdir().unwrap();
    let (text, json) = (temp.path().join("text.txt"), temp.path().join("figures.json"));
    let words: Vec<String> = (0..60).map(|i| format!("the {i}th freedom")).collect();
    std::fs::write(&text, words.join(", ")).unwrap();
    let dir = fixture("tiny-qwen3");
    let figures = |more: &[&str]| -> serde_json::Value {
        let (text, json) = (text.to_string_lossy(), json.to_string_lossy());
        let args = ["perplexity", "--model", &dir, "--text", &text, "--json", &json, "--window", "40"];
        perpetua(&[&args[..], more].concat());
        serde_json::from_slice(&std::fs::read(temp.path().join("figures.json")).unwrap()).unwrap()
    };
    let model = Model::load(&dir).unwrap();
    let ids = model.encode(&words.join(", ")).unwrap();
    let windows: Vec<&[u32]> = ids.chunks_exact(40).collect();
    assert!(windows.len() > 3 && !ids.len().is_multiple_of(40), "some windows, and some left over");
    let config = EngineConfig { device: Device::Reference, all_logits: true, ..Default::default() };
    let mut engine = Engine::new(&model, &config).unwrap();
    let (mut sum, vocab) = (0f64, model.config().vocab_size());
    for window in &windows {
        let logits = engine.logits(window, |_| ()).unwrap();
        for i in 20..40 {
            let row = &logits[(i - 1) * vocab..i * vocab];
            let total: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
            sum -= (f64::from(row[window[i] as usize]).exp() / total).ln();
        }
    }
    let found = figures(&[]);
    let expected = sum / (20 * windows.len()) as f64;
    assert_eq!(found["tokens_scored"], 20 * windows.len());
    let nll = found["nll_nats"].as_f64().unwrap();
    assert!((nll - expected).abs() < 2e-3, "{nll}, expected {expected}");
    assert!((found["perplexity"].as_f64().unwrap() - nll.exp()).abs() < 1e-6 * nll.exp());
    // Beside the checkpoint: its figure again, and 8 bits cost a little, 4 more.
    let [q8, q4] = ["q8", "q4"].map(|how| figures(&["--quantize", how]));
    for quantized in [&q8, &q4] {
        assert_eq!(quantized["checkpoint"]["nll_nats"], found["nll_nats"]);
        let change = quantized["nll_nats"].as_f64().unwrap() - nll;
        assert!((quantized["change"]["nll_nats"].as_f64().unwrap() - change).abs() < 1e-9);
    }
    let kl = |figures: &serde_json::Value| figures["change"]["mean_kl_nats"].as_f64().unwrap();
    assert!(0.0 < kl(&q8) && 10.0 * kl(&q8) < kl(&q4) && kl(&q4) < 1.0, "{} {}", kl(&q8), kl(&q4));
}

/// A window is no longer than the context that was asked for; one scored token says nothing of others.
#[test]
fn perplexity_takes_its_window_from_the_context() {
    let temp = tempfile::tempdir().unwrap();
    let [text, json] = ["text.txt", "figures.json"].map(|name| temp.path().join(name).to_string_lossy().into_owned());
    std::fs::write(&text, "every user has the freedom to run it and to read what it does ".repeat(4)).unwrap();
    let dir = fixture("tiny-qwen3");
    let perplexity = ["perplexity", "--model", &dir, "--device", "cpu", "--text", &text, "--json", &json];
    let figures = |more: &[&str]| -> (serde_json::Value, String) {
        let printed = perpetua(&[&perplexity[..], more].concat()).stdout;
        (serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap(), String::from_utf8(printed).unwrap())
    };
    let expected = figures(&["--window", "10"]).0;
    assert_eq!(figures(&["--max-context", "10"]).0, expected);
    assert!(expected["nll_standard_error"].as_f64().unwrap() > 0.0);
    std::fs::write(&text, "freedom to").unwrap();
    let (one, printed) = figures(&[]);
    assert_eq!((&one["tokens_scored"], &one["nll_standard_error"]), (&1.into(), &serde_json::Value::Null), "{printed}");
    let line = printed.lines().find(|line| line.starts_with("nll_standard_error")).unwrap();
    assert!(line.ends_with(" cannot be estimated"), "{printed}");
    for (more, words) in [
        (&["--max-context", "1"], "--max-context 1: expected 2 or more, the tokens of a window"),
        (&["--max-context", "100000"], "max context 100000: expected 1 to 4096"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_perpetua")).args(perplexity).args(more).output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && message.contains(words), "{message}");
    }
}

#[test]
fn bench_measures_a_small_model() {
    let temp = tempfile::tempdir().unwrap();
    let json = temp.path().join("bench.json");
    let model = fixture("tiny-qwen2");
    let args = ["--context", "16", "--tokens", "8", "--threads", "2", "--json", &json.to_string_lossy()];
    perpetua(&[&["bench", "--model", &model][..], &args].concat());
    let figures: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
    for key in ["step_ms_median", "share_of_bandwidth_percent", "prefill_tokens_per_s", "compile_ms", "event_ns"] {
        assert!(figures[key].as_f64().unwrap() > 0.0, "{key}: {figures}");
    }
    assert!(figures["first_token_ms"]["16"].as_f64().unwrap() > 0.0, "{figures}");
    assert!(figures.get("sequences").is_none());
    let args = ["bench", "--model", &model, "--context", "9", "--tokens", "1", "--batch", "3", "--max-context", "64"];
    let args = [&args[..], &["--threads", "1"]].concat();
    let printed = String::from_utf8(perpetua(&args).stdout).unwrap();
    assert!(!printed.contains("event_ns"), "one worker waits for nobody: {printed}");
    let figure = |name: &str| -> f64 {
        let line = printed.lines().find(|line| line.split_whitespace().next() == Some(name));
        let line = line.unwrap_or_else(|| panic!("no {name} in {printed}"));
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    assert_eq!(figure("sequences"), 3.0);
    // Printed to three places.
    assert!((figure("tokens_per_s") - 3.0 * figure("tokens_per_s_each")).abs() <= 0.003 * figure("tokens_per_s"));
    assert!(figure("share_of_bandwidth_percent") > 0.0 && figure("prefill_tokens_per_s") > 0.0);
    assert!(figure("times_alone") > 0.0);
    // What passes over guesses take: as many lines as there may be guesses.
    let args =
        ["bench", "--model", &model, "--context", "9", "--tokens", "2", "--threads", "2", "--prompt-lookup", "4"];
    let printed = String::from_utf8(perpetua(&[&args[..], &["--device", "cpu"]].concat()).stdout).unwrap();
    assert_eq!(
        printed.lines().filter(|line| line.contains("_guesses ") && line.contains(" times a step")).count(),
        4,
        "{printed}"
    );
}

/// Not more than a control group's quota of CPU time lasts for, which the standard library knows too.
#[test]
fn doctor_counts_the_workers_there_are_by_default() {
    let printed = String::from_utf8(perpetua(&["doctor"]).stdout).unwrap();
    let cores = printed.lines().find_map(|line| line.strip_prefix("cores")).unwrap();
    let n = std::thread::available_parallelism().unwrap().to_string();
    assert_eq!(cores.split_whitespace().next(), Some(&n[..]), "{printed}");
    let config = perpetua::EngineConfig { device: perpetua::Device::Cpu, ..Default::default() };
    let engine = perpetua::Engine::new(&perpetua::Model::load(fixture("tiny-qwen2")).unwrap(), &config).unwrap();
    assert_eq!(engine.resident().compiled().image.header().n_workers.to_string(), n);
}

#[test]
fn synth_refuses_a_folder_with_something_in_it() {
    let temp = tempfile::tempdir().unwrap();
    std::fs::write(temp.path().join("precious"), "x").unwrap();
    let out = temp.path().to_string_lossy().into_owned();
    let args = ["synth", "--preset", "tiny-qwen3", "--out", &out];
    let output = Command::new(env!("CARGO_BIN_EXE_perpetua")).args(args).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 1, "nothing was written");
}

/// What does not fit is not begun; what the system does not write is named as it was given, and nothing of it stays.
#[cfg(target_os = "linux")]
#[test]
fn synth_looks_at_the_disk_first() {
    let temp = tempfile::tempdir().unwrap();
    let out = temp.path().join("model").to_string_lossy().into_owned();
    let config = temp.path().join("config.json");
    let fixture = std::fs::read_to_string(PathBuf::from(fixture("tiny-qwen3")).join("config.json")).unwrap();
    let mut huge: serde_json::Value = serde_json::from_str(&fixture).unwrap();
    huge["hidden_size"] = (1 << 17).into();
    huge["intermediate_size"] = (1 << 20).into();
    huge["num_hidden_layers"] = (1 << 10).into();
    huge.as_object_mut().unwrap().remove("layer_types");
    std::fs::write(&config, huge.to_string()).unwrap();
    // So that it is stopped at once where it begins: no file of more than 100 blocks, and no signal that says so.
    let synth = |args: &[&str]| {
        let limited = "trap '' XFSZ; ulimit -f 100; exec \"$@\"";
        let output = Command::new("sh")
            .args(["-c", limited, "sh", env!("CARGO_BIN_EXE_perpetua"), "synth", "--out", &out])
            .args(args)
            .output()
            .unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), message.lines().count()), (Some(1), 1), "{message}");
        message
    };
    let message = synth(&["--config", &config.to_string_lossy()]);
    assert!(message.contains(&format!("{out}: cannot write: its weights take")), "{message}");
    let message = synth(&["--preset", "tiny-qwen3"]);
    assert!(message.contains(&format!("{out}/")) && message.contains("cannot write: file too large"), "{message}");
    assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 1, "nothing of it stays");
}

#[cfg(unix)]
#[test]
fn ctrl_c_stops_cleanly() {
    use std::io::Read;
    use std::process::Stdio;
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("model");
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-qwen3/config.json");
    synth(SynthSource::Config(&config), &dir, &SynthOptions::default(), &mut |_, _| ControlFlow::Continue(())).unwrap();
    // No token ends this text, so only the signal does.
    std::fs::write(dir.join("generation_config.json"), "{}").unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_perpetua"))
        .args(["generate", "--prompt", "x", "--max-new-tokens", "4000", "--model", &dir.to_string_lossy()])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut text = vec![0u8; 1];
    stdout.read_exact(&mut text).unwrap();
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    stdout.read_to_end(&mut text).unwrap();
    let status = child.wait().unwrap();
    // Fast enough a machine may be done before the signal comes.
    assert!(matches!(status.code(), Some(130 | 0)), "{status:?}");
    assert!(std::str::from_utf8(&text).is_ok(), "what was printed is valid UTF-8");
}

#[test]
fn gpu_check_says_that_there_is_no_gpu_and_tries_what_it_can_without() {
    let temp = tempfile::tempdir().unwrap();
    let out = temp.path().join("records");
    let out_text = out.to_string_lossy().into_owned();
    if perpetua::cuda::Gpu::open().is_err() {
        let output = Command::new(env!("CARGO_BIN_EXE_perpetua"))
            .args(["gpu-check", "facts", "--out", &out_text])
            .output()
            .expect("the program was built");
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(3), "{message}");
        assert_eq!(message.lines().count(), 1, "{message}");
        assert!(!out.exists(), "nothing is written");
    }
    if !has_kernel() {
        return;
    }
    perpetua(&["gpu-check", "--simulated", "--out", &out_text, "facts", "latency", "load", "bench-0.6b"]);
    for section in ["facts", "latency", "load", "bench-0.6b"] {
        let text = std::fs::read_to_string(out.join(format!("{section}.json"))).expect("a record");
        let record: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(record["section"], section);
        assert_eq!(record["simulated"], true);
        assert_eq!(record["device"], "Fake H200");
        assert!(record["unix_time"].as_u64().is_some() && record["seconds"].as_f64().is_some(), "{text}");
        assert!(record["figures"].is_object() && record["error"].is_null() && record["unfinished"].is_null(), "{text}");
        let number = |path: &str| record.pointer(path).and_then(serde_json::Value::as_f64).expect(path);
        if section == "load" {
            let bus = number("/figures/bus_gb_per_s");
            assert!(bus > 0.0 && number("/figures/threads") >= 4.0 && number("/figures/buffers_ms") > 0.0, "{text}");
            for from in ["from_memory", "from_disk"] {
                let figure = |name: &str| number(&format!("/figures/{from}/{name}"));
                let (upload, file) = (figure("upload_gb_per_s"), figure("file_gb_per_s"));
                assert!(upload > 0.0 && file > 0.0 && figure("bytes") > 0.0, "{text}");
                assert!((figure("share_percent") / 100.0 * bus.min(file) / upload - 1.0).abs() < 1e-6, "{text}");
                assert_eq!(figure("bar_percent"), 80.0);
                if cfg!(target_os = "linux") {
                    // How much the system keeps of what it is told to forget is its own affair.
                    let there = figure("in_memory_before_percent");
                    assert!(there == 100.0 || from == "from_disk" && (0.0..100.0).contains(&there), "{text}");
                }
            }
        }
        if section.starts_with("bench") {
            let parts = ["prologue", "hops_exposed", "waiting_for_data", "computing", "tail"];
            let sum: f64 = parts.iter().map(|part| number(&format!("/figures/loss/{part}_us"))).sum();
            let step = number("/figures/loss/step_us");
            assert!((sum / step - 1.0).abs() < 1e-3, "{sum} us in parts of {step}: {text}");
            assert!(number("/figures/loss/floor_us") > 0.0, "{text}");
            assert!(record["figures"]["verifying"]["1_guesses"].is_string(), "{text}");
            let without = Technique::ALL.map(|technique| format!("without/{}", technique.name()));
            for way in without.into_iter().chain(["launch_per_operator".to_owned()]) {
                assert_eq!(number(&format!("/figures/{way}/same_tokens")), 2.0, "{text}");
                assert!(number(&format!("/figures/{way}/times_the_persistent_step")) > 0.0, "{text}");
            }
            assert!(out.join("qwen3-0.6b.trace.json").is_file());
            let picture = std::fs::read_to_string(out.join("qwen3-0.6b.trace.svg")).unwrap();
            assert!(
                picture.contains("measured: ") && picture.contains(">down_proj</text>") && !picture.contains("NaN")
            );
        }
    }
}

/// What would leave out all sections, or fail for want of files, is refused before any begins.
#[test]
fn gpu_check_refuses_what_comes_to_nothing() {
    let temp = tempfile::tempdir().unwrap();
    let out = temp.path().join("records").to_string_lossy().into_owned();
    let none = temp.path().join("none").to_string_lossy().into_owned();
    let refused = |args: &[&str], status: i32, words: &str| {
        let check = ["gpu-check", "--simulated", "--out", &out];
        let output = Command::new(env!("CARGO_BIN_EXE_perpetua")).args(check).args(args).output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "{message}");
        assert!(message.contains(words), "{message:?} should say {words:?}");
        assert!(output.stdout.is_empty() && !Path::new(&out).exists(), "{message}");
    };
    refused(&["facts", "--budget", "0"], 2, "expected a whole number, 1 or more");
    for args in [&["facts", "fixtures"][..], &["sentences"], &[]] {
        refused(&[args, &["--fixtures", &none]].concat(), 1, &format!("{none}: no such folder"));
    }
}

/// What a section of gpu-check, told `how` and where its fixtures are, ends with: its status, its record, and what it
/// prints.
fn checked(section: &str, fixtures: &str, out: &Path, how: &[&str]) -> (Option<i32>, serde_json::Value, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_perpetua"))
        .args(["gpu-check", "--simulated", section, "--fixtures", fixtures, "--out"])
        .arg(out)
        // However busy the machine is: a simulated GPU takes its time.
        .args(["--budget", "86400"])
        .args(how)
        .output()
        .expect("the program was built");
    let text = std::fs::read_to_string(out.join(format!("{section}.json"))).expect("a record");
    (output.status.code(), serde_json::from_str(&text).expect("JSON"), String::from_utf8(output.stdout).unwrap())
}

/// Embeddings are as expected, and those that are not are found.
#[test]
fn sentences_are_checked() {
    if !has_kernel() {
        return;
    }
    let temp = tempfile::tempdir().unwrap();
    let out = temp.path().join("records");
    let check = |fixtures: &str| checked("sentences", fixtures, &out, &[]);
    let (status, record, _) = check(&fixture(""));
    assert_eq!(status, Some(0), "{record}");
    let off = |model: &str, what: &str| record["figures"][model][what].as_f64();
    for off in [
        off("tiny-xlm-roberta", "off"),
        off("tiny-modernbert", "off"),
        off("tiny-embedding", "off"),
        off("tiny-embedding", "in_8_bits_off"),
        off("tiny-embeddinggemma", "off"),
        off("tiny-embeddinggemma", "in_8_bits_off"),
    ] {
        assert!(off.is_some_and(|off| off > 0.0 && off < 6e-2), "{record}");
    }

    // The texts of the one with the embeddings of others.
    let name = "tiny-xlm-roberta";
    copy(name, temp.path());
    for kind in ["safetensors", "json"] {
        let file = format!("{name}.expected.{kind}");
        std::fs::copy(fixture(&file), temp.path().join(&file)).unwrap();
    }
    let texts = temp.path().join(format!("{name}.expected.json"));
    let swapped = std::fs::read_to_string(&texts).unwrap().replace("The cat sat on the mat.", "The cat did not.");
    std::fs::write(&texts, swapped).unwrap();
    let (status, record, _) = check(&temp.path().to_string_lossy());
    let error = record["error"].as_str().unwrap_or_default();
    assert!(status == Some(1) && error.starts_with("tiny-xlm-roberta: "), "{record}");
}

/// What a benchmark is told to do without it does without, and so do those it is compared with.
#[test]
fn a_benchmark_does_without_what_it_is_told_to() {
    if !has_kernel() {
        return;
    }
    let temp = tempfile::tempdir().unwrap();
    let out = temp.path().to_string_lossy().into_owned();
    perpetua(&["gpu-check", "--simulated", "--out", &out, "--without", "flags,tiles", "bench-0.6b"]);
    let text = std::fs::read_to_string(temp.path().join("bench-0.6b.json")).expect("a record");
    let record: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let without = record["figures"]["without"].as_object().expect("comparisons");
    for technique in Technique::ALL {
        let is_left_out = [Technique::Flags, Technique::Tiles].contains(&technique);
        assert_eq!(without.contains_key(technique.name()), !is_left_out, "{technique:?}: {text}");
    }
    // Without tiles these have nothing to do: sums are the same, and so are tokens.
    assert_eq!(without["thin-products"]["same_tokens"], 2, "{text}");
}

/// Nobody's reading on, be it what is printed or what is said beside it, is no failure of what was asked for.
#[test]
fn closed_pipes_end_it_quietly() {
    let temp = tempfile::tempdir().unwrap();
    let path = |name: &str| temp.path().join(name).to_string_lossy().into_owned();
    let [csv, packed, synth, records] = ["in.csv", "out.csv", "synth", "records"].map(path);
    std::fs::write(&csv, "id,lower,upper,size\n1,0,3,4\n").unwrap();
    let model = fixture("tiny-qwen2");
    let check = ["gpu-check", "--simulated", "--out", &records, "facts"];
    let mut requests = vec![
        vec!["generate", "--model", &model, "--prompt", "a", "--max-new-tokens", "2"],
        vec!["plan", "--model", &model, "--target", "cpu:2"],
        vec!["doctor"],
        vec!["pack", "--in", &csv, "--capacity", "8", "--out", &packed],
        vec!["synth", "--preset", "tiny-simt", "--out", &synth],
    ];
    if perpetua::device_image::device_image().is_some() {
        requests.push(check.to_vec());
    }
    for args in requests {
        let closed = || std::io::pipe().unwrap().1;
        let status =
            Command::new(env!("CARGO_BIN_EXE_perpetua")).args(&args).stdout(closed()).stderr(closed()).status();
        assert_eq!(status.unwrap().code(), Some(0), "{args:?}");
    }
}

/// The first process that `parent` starts.
#[cfg(target_os = "linux")]
fn child_of(parent: &mut std::process::Child) -> String {
    let pid = parent.id();
    loop {
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        if let Some(child) = children.split_whitespace().next() {
            return child.to_owned();
        }
        assert!(parent.try_wait().unwrap().is_none(), "it ended before it started a process");
    }
}

/// A section that dies leaves a record that says so, and takes no other with it; one that fails keeps what it had.
#[cfg(target_os = "linux")]
#[test]
fn a_gpu_check_outlives_its_sections() {
    if !has_kernel() {
        return;
    }
    let temp = tempfile::tempdir().unwrap();
    let out = temp.path().join("records");
    // A folder, and nothing in it.
    let fixtures = temp.path().join("none");
    std::fs::create_dir(&fixtures).unwrap();
    let mut check = Command::new(env!("CARGO_BIN_EXE_perpetua"))
        .args(["gpu-check", "--simulated", "kernels", "fixtures", "facts", "--out"])
        .arg(&out)
        .arg("--fixtures")
        .arg(&fixtures)
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let section = child_of(&mut check);
    assert!(Command::new("kill").args(["-KILL", &section]).status().unwrap().success());
    assert_eq!(check.wait().unwrap().code(), Some(1));
    let record = |section: &str| -> serde_json::Value {
        let text = std::fs::read_to_string(out.join(format!("{section}.json"))).expect("a record");
        serde_json::from_str(&text).expect("JSON")
    };
    let said = |section: &str| record(section)["error"].as_str().expect("an error").to_owned();
    assert!(said("kernels").contains("signal: 9"), "{}", said("kernels"));
    assert!(said("fixtures").contains("none/tiny-qwen3"), "{}", said("fixtures"));
    assert!(record("facts")["figures"].is_object() && record("facts")["error"].is_null());
}

/// Where fixtures fail, what it is that the GPU does not get on with is looked for, and found.
#[test]
fn what_a_gpu_does_not_get_on_with_is_found() {
    if !has_kernel() {
        return;
    }
    let temp = tempfile::tempdir().unwrap();
    let out = temp.path().join("records");
    let check = |fixtures: &str, how: &[&str]| {
        let (status, record, said) = checked("fixtures", fixtures, &out, how);
        assert_eq!(status, Some(1), "{record}");
        (record, said)
    };
    // What is left out already is not looked for.
    let (record, said) = check(&fixture(""), &["--fatal", "thin-products", "--without", "early-start,tiles"]);
    assert!(said.ends_with("fixtures       is done without thin-products\n"), "{said}");
    assert!(said.starts_with("fixtures without early-start, tiles FAILED"), "{said}");
    assert_eq!(record["without"], serde_json::json!(["tiles", "early-start"]));
    let error = record["error"].as_str().expect("what the driver said");
    assert!(error.contains("fatal here") && error.contains("; last, 4 workers (w0, ...) began nothing yet"), "{error}");
    let trials = record["done_in_trials"].as_object().expect("trials");
    assert_eq!(trials.len(), Technique::ALL.len());
    for (name, is_done) in trials {
        let expected = ["without-all", "without-thin-products"].contains(&name.as_str());
        assert_eq!(is_done.as_bool(), Some(expected), "{name}");
        let trial = std::fs::read_to_string(out.join(name).join("fixtures.json")).expect("a record of its own");
        assert_eq!(trial.contains("\"error\""), !expected, "{trial}");
    }
    // What has to do with no technique is not looked for for long.
    let none = temp.path().join("none");
    std::fs::create_dir(&none).unwrap();
    let (record, said) = check(&none.to_string_lossy(), &[]);
    assert!(said.contains("fails without all techniques, too"), "{said}");
    assert_eq!(record["done_in_trials"], serde_json::json!({"again": false, "without-all": false}));
}

/// However a check is ended, its section does not go on without it: it would have the GPU to itself, and nobody to end
/// it.
#[cfg(target_os = "linux")]
#[test]
fn a_section_does_not_outlive_its_gpu_check() {
    if !has_kernel() {
        return;
    }
    let temp = tempfile::tempdir().unwrap();
    let mut check = Command::new(env!("CARGO_BIN_EXE_perpetua"))
        .args(["gpu-check", "--simulated", "kernels", "--out"])
        .arg(temp.path())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let section = child_of(&mut check);
    check.kill().unwrap();
    check.wait().unwrap();
    // Whoever inherits it may be slow to clear it away: what is left then has no memory map.
    let runs = || std::fs::read_to_string(format!("/proc/{section}/maps")).is_ok_and(|maps| !maps.is_empty());
    for _ in 0..1000 {
        if !runs() {
            let record = std::fs::read_to_string(temp.path().join("kernels.json"));
            assert!(record.is_err() || record.is_ok_and(|text| text.contains("unfinished")), "it was ended, not done");
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("process {section} goes on");
}
