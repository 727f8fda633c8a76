//! Checkpoints of random weights with real models' shapes: for benches and tests where the real one cannot be had.
//!
//! In comes a preset's name or a config.json, and a seed; out goes a folder laid out as a model repository is. The
//! weights are scaled by their fan-in, so that activations keep their size through any number of layers and logits are
//! spread about as a trained model's are.
//!
//! Laws:
//! - The same configuration and seed give the same bytes, whatever the number of threads: each chunk of each tensor has
//!   a generator of its own, and everything up to the rounding to bf16 is integer arithmetic or exactly rounded.
//! - The folder appears whole or not at all: it is written beside its place and renamed; on any error, or when the
//!   caller stops it, what was written is removed.
//! - Memory use does not grow with the model.

mod presets;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use half::bf16;
use perpetua_shared::dtype::Q4_BLOCK;
use serde_json::{Map, Value, json};

use super::config::{ModelConfig, Stored};
use super::error::ModelError;
use super::json::read_value;
use super::layout::{Role, TensorSpec, tensors_of_files};
use crate::random::split_mix;
pub use presets::{PRESETS, preset_config, text_presets};

/// Where a synthetic model's sizes come from.
#[derive(Clone, Copy, Debug)]
pub enum SynthSource<'a> {
    /// A name of [`PRESETS`].
    Preset(&'a str),
    /// A config.json.
    Config(&'a Path),
}

/// How a synthetic model is written.
#[derive(Clone, Debug)]
pub struct SynthOptions {
    /// Other seeds give other weights.
    pub seed: u64,
    /// Weights beyond this go to another file; a single tensor is never split.
    pub max_shard_bytes: u64,
    /// Threads that make weights, at least one.
    pub n_threads: usize,
}

impl Default for SynthOptions {
    fn default() -> Self {
        let n_threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(8));
        SynthOptions { seed: 0, max_shard_bytes: 5_000_000_000, n_threads }
    }
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SynthSummary {
    /// Weights.
    pub n_params: u64,
    /// Their bytes.
    pub size_bytes: u64,
    /// The files they are in.
    pub weight_files: Vec<String>,
}

/// Writes a synthetic model to `out`, which must not exist or be empty.
///
/// `progress` is called with bytes of weights written and their total, at least at the start and the end, and may stop
/// the writing.
///
/// # Errors
/// A source that is none, a folder with something in it, less free on its disk than the weights take, or what the
/// system says.
pub fn synth(
    source: SynthSource<'_>,
    out: &Path,
    options: &SynthOptions,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<SynthSummary, ModelError> {
    let (config_path, mut value) = match source {
        SynthSource::Preset(name) => (PathBuf::from(format!("preset {name}")), preset_config(name)?),
        SynthSource::Config(path) => (path.to_owned(), read_value(path)?),
    };
    let config = ModelConfig::from_value(&config_path, &value)?;
    let stored = Stored::of(&config_path, &value)?;
    if config.vocab_size() < N_OWN_TOKENS {
        return Err(ModelError::key(
            &config_path,
            "vocab_size",
            config.vocab_size().to_string(),
            format!("at least {N_OWN_TOKENS}: 256 bytes and {} special tokens", SPECIAL_TOKENS.len()),
        ));
    }
    if let Value::Object(map) = &mut value {
        // Of the half that reads a model of its own.
        if let Some(Value::Object(text)) = map.shift_remove("text_config") {
            *map = text;
            if let ModelConfig::Decoder(config) = &config {
                map.insert("tie_word_embeddings".into(), config.tie_word_embeddings.into());
            }
        }
        if stored != Stored::Mxfp4 {
            // What is written is in bf16.
            map.shift_remove("compression_config");
            map.shift_remove("quantization_config");
        }
        map.shift_remove("torch_dtype");
        map.insert("dtype".into(), "bfloat16".into());
        map.insert("architectures".into(), json!([config.architecture().class_name()]));
        map.insert("model_type".into(), config.architecture().model_type().into());
    }
    refuse_taken(out)?;

    let specs = tensors_of_files(&config);
    let bytes = specs.iter().map(TensorSpec::bytes_in_bf16).sum::<u64>();
    let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if let Some(available) = free_bytes(parent).filter(|available| *available < bytes) {
        return Err(ModelError::NoSpace { path: out.to_owned(), bytes, available });
    }
    let mut folder = UnfinishedFolder::create(out)?;
    let written = write_texts(folder.path(), &config, &value)
        .and_then(|()| write_weights(folder.path(), &specs, options, progress))
        // Whoever asked knows of one folder.
        .map_err(|error| match error {
            ModelError::Write { path, source } => match path.strip_prefix(folder.path()) {
                Ok(file) => ModelError::write(&out.join(file), source),
                Err(_) => ModelError::Write { path, source },
            },
            other => other,
        });
    let summary = written?;
    folder.publish(out)?;
    Ok(summary)
}

/// What is free for this user on the disk of `folder`, where the system says it.
fn free_bytes(folder: &Path) -> Option<u64> {
    #[cfg(unix)]
    return rustix::fs::statvfs(folder).ok().map(|disk| disk.f_bavail.saturating_mul(disk.f_frsize));
    #[cfg(not(unix))]
    {
        let _ = folder;
        None
    }
}

fn refuse_taken(out: &Path) -> Result<(), ModelError> {
    match std::fs::read_dir(out) {
        Ok(mut entries) => match entries.next() {
            None => Ok(()),
            Some(_) => Err(ModelError::NotEmpty { path: out.to_owned() }),
        },
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(e) if e.kind() == std::io::ErrorKind::NotADirectory => Err(ModelError::NotEmpty { path: out.to_owned() }),
        Err(e) => Err(ModelError::read(out, e)),
    }
}

/// A folder beside its final place, removed with all in it unless it is published.
struct UnfinishedFolder {
    path: PathBuf,
    published: bool,
}

impl UnfinishedFolder {
    fn create(out: &Path) -> Result<UnfinishedFolder, ModelError> {
        let Some(name) = out.file_name() else {
            return Err(ModelError::write(out, std::io::Error::other("not the name of a new folder")));
        };
        let path = out.with_file_name(format!(".{}.unfinished-{}", name.to_string_lossy(), std::process::id()));
        std::fs::create_dir(&path).map_err(|e| ModelError::write(out, e))?;
        Ok(UnfinishedFolder { path, published: false })
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn publish(&mut self, out: &Path) -> Result<(), ModelError> {
        // An empty folder may stand in the place; not every system renames over it.
        match std::fs::remove_dir(out) {
            Ok(()) => {}
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(ModelError::write(out, e)),
        }
        std::fs::rename(&self.path, out).map_err(|e| ModelError::write(out, e))?;
        self.published = true;
        Ok(())
    }
}

impl Drop for UnfinishedFolder {
    fn drop(&mut self) {
        if !self.published {
            // Best effort: the error that led here is the one to report.
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

// ---- weights ----

/// Weights made and written at a time; even, so that no element is split.
const CHUNK_BYTES: usize = 2 << 20;
/// Finished chunks that may wait to be written, per thread.
const WAITING_CHUNKS: usize = 2;
/// Data starts at a multiple of this, so that tensors whose sizes are such multiples too can be used in place.
const DATA_ALIGNMENT: usize = 64;

fn write_weights(
    dir: &Path,
    specs: &[TensorSpec],
    options: &SynthOptions,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<SynthSummary, ModelError> {
    // Of blocks a byte is two, and what they share none.
    let params = |spec: &TensorSpec| match spec.role {
        Role::Blocks => 2 * spec.len_elems(),
        Role::BlockScales => 0,
        _ => spec.len_elems(),
    };
    let n_params = specs.iter().map(params).sum::<u64>();
    let total = specs.iter().map(TensorSpec::bytes_in_bf16).sum::<u64>();
    let shards = cut_into_shards(specs, options.max_shard_bytes);
    let files: Vec<String> = match shards.len() {
        1 => vec!["model.safetensors".to_owned()],
        n => (1..=n).map(|i| format!("model-{i:05}-of-{n:05}.safetensors")).collect(),
    };
    if progress(0, total).is_break() {
        return Err(ModelError::Stopped);
    }

    let mut done = 0;
    for (shard, file) in shards.iter().zip(&files) {
        let path = dir.join(file);
        let fail = |e| ModelError::write(&path, e);
        let mut out = File::create(&path).map_err(fail)?;
        out.write_all(&header(&specs[shard.clone()])).map_err(fail)?;
        for_each_chunk(specs, shard.clone(), options, &mut |bytes| {
            out.write_all(bytes).map_err(fail)?;
            done += bytes.len() as u64;
            match progress(done, total) {
                ControlFlow::Continue(()) => Ok(()),
                ControlFlow::Break(()) => Err(ModelError::Stopped),
            }
        })?;
    }
    assert_eq!(done, total, "every tensor is written once");

    if files.len() > 1 {
        let mut map = Map::new();
        for (shard, file) in shards.iter().zip(&files) {
            map.extend(specs[shard.clone()].iter().map(|s| (s.name.clone(), Value::from(file.as_str()))));
        }
        let index = json!({ "metadata": { "total_parameters": n_params, "total_size": total }, "weight_map": map });
        write_json(&dir.join("model.safetensors.index.json"), &index)?;
    }
    Ok(SynthSummary { n_params, size_bytes: total, weight_files: files })
}

/// Runs of tensors of at most `max_bytes`, at least one tensor each.
fn cut_into_shards(specs: &[TensorSpec], max_bytes: u64) -> Vec<std::ops::Range<usize>> {
    let (mut shards, mut first, mut bytes) = (Vec::new(), 0, 0);
    for (i, spec) in specs.iter().enumerate() {
        let size = spec.bytes_in_bf16();
        if i > first && bytes + size > max_bytes {
            shards.push(first..i);
            (first, bytes) = (i, 0);
        }
        bytes += size;
    }
    shards.push(first..specs.len());
    shards
}

/// A safetensors header: its length, then JSON, padded with spaces.
fn header(specs: &[TensorSpec]) -> Vec<u8> {
    let mut map = Map::new();
    map.insert("__metadata__".into(), json!({ "format": "pt" }));
    let mut begin = 0;
    for spec in specs {
        let (end, dtype) = (begin + spec.bytes_in_bf16(), if spec.is_of_bytes() { "U8" } else { "BF16" });
        map.insert(spec.name.clone(), json!({ "dtype": dtype, "shape": spec.shape, "data_offsets": [begin, end] }));
        begin = end;
    }
    let mut text = Value::Object(map).to_string().into_bytes();
    let padded = (8 + text.len()).next_multiple_of(DATA_ALIGNMENT) - 8;
    text.resize(padded, b' ');
    let mut header = (padded as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    header
}

/// Makes the tensors' bytes on several threads and hands them out in order.
fn for_each_chunk(
    specs: &[TensorSpec],
    shard: std::ops::Range<usize>,
    options: &SynthOptions,
    sink: &mut dyn FnMut(&[u8]) -> Result<(), ModelError>,
) -> Result<(), ModelError> {
    // Chunk c is made by thread c % n, and each thread's chunks come out of its channel in order.
    let n_threads = options.n_threads.max(1);
    std::thread::scope(|scope| {
        let receivers = (0..n_threads).map(|thread| {
            let (sender, receiver) = sync_channel(WAITING_CHUNKS);
            let shard = shard.clone();
            let work = move || make_chunks(specs, shard, options.seed, thread, n_threads, &sender);
            std::thread::Builder::new().spawn_scoped(scope, work).map_err(ModelError::Threads)?;
            Ok::<_, ModelError>(receiver)
        });
        let receivers: Vec<Receiver<Vec<u8>>> = receivers.collect::<Result<_, _>>()?;
        // Leaving early drops the receivers, which ends the threads at their next send.
        for chunk in 0.. {
            match receivers[chunk % n_threads].recv() {
                Ok(bytes) => sink(&bytes)?,
                Err(_) => return Ok(()),
            }
        }
        Ok(())
    })
}

/// Sends every `n_threads`-th chunk of the shard's tensors, starting with the `thread`-th.
fn make_chunks(
    specs: &[TensorSpec],
    shard: std::ops::Range<usize>,
    seed: u64,
    thread: usize,
    n_threads: usize,
    sender: &SyncSender<Vec<u8>>,
) {
    let mut chunk = 0;
    for tensor in shard {
        let spec = &specs[tensor];
        let table = value_table(spec);
        let mut left = spec.bytes_in_bf16();
        let mut part = 0u64;
        while left > 0 {
            let bytes = left.min(CHUNK_BYTES as u64) as usize;
            if chunk % n_threads == thread {
                let mut random = SplitMix::new(&[seed, tensor as u64, part]);
                let values = match spec.role {
                    Role::Blocks => random_bytes(u8::MAX, 0, bytes, &mut random),
                    Role::BlockScales => {
                        let fan_in = spec.shape.last().map_or(1, |blocks| blocks * Q4_BLOCK);
                        random_bytes(1, block_scale(fan_in), bytes, &mut random)
                    }
                    _ => random_values(&table, bytes, &mut random),
                };
                if sender.send(values).is_err() {
                    return;
                }
            }
            left -= bytes as u64;
            part += 1;
            chunk += 1;
        }
    }
}

const TABLE_BITS: u32 = 12;
const TABLE_LEN: usize = 1 << TABLE_BITS;

/// The values a tensor's elements are drawn from: enough of them that no kernel can tell, few enough for the first
/// cache.
fn value_table(spec: &TensorSpec) -> Vec<u16> {
    let fan_in = spec.shape.last().map_or(1.0, |&n| n as f64);
    let spread = |std: f64| move |_: usize, normal: f64| std * normal;
    let values: Box<dyn Fn(usize, f64) -> f64> = match spec.role {
        // Bytes have no table.
        Role::Blocks | Role::BlockScales => Box::new(|_, _| 0.0),
        Role::Linear | Role::OfHeads | Role::Mxfp4 => Box::new(spread(1.6 / fan_in.sqrt())),
        Role::Head | Role::Router => Box::new(spread(3.2 / fan_in.sqrt())),
        Role::Embedding => Box::new(spread(0.15)),
        Role::Bias => Box::new(spread(0.3)),
        // So that it decides now and then, and not always.
        Role::Correction => Box::new(spread(0.1)),
        // As many rows as it reaches over count alike.
        Role::Filter => Box::new(spread(1.6 / fan_in.sqrt())),
        // Of a state 0.97 to 0.15 stays, where what a row says is 0.
        Role::Decay => Box::new(|i, _| 4.0 * (i as f64 + 0.5) / TABLE_LEN as f64 - 3.0),
        Role::Norm | Role::DividedNorm | Role::ScaledNorm | Role::Scale => {
            Box::new(|i, _| 0.5 + (i as f64 + 0.5) / TABLE_LEN as f64)
        }
        Role::NormLessOne => Box::new(|i, _| (i as f64 + 0.5) / TABLE_LEN as f64 - 0.5),
    };
    // A fixed sample of the normal distribution (a sum of twelve uniform numbers has variance 1), each value with its
    // negative, so that the mean is exactly 0.
    let mut random = SplitMix::new(&[]);
    let mut table = Vec::with_capacity(TABLE_LEN);
    for i in 0..TABLE_LEN / 2 {
        let sum: u64 = (0..12).map(|_| random.next() >> 32).sum();
        let normal = (sum as f64 - 6.0 * (1u64 << 32) as f64) / (1u64 << 32) as f64;
        table.push(bf16::from_f64(values(2 * i, normal)).to_bits());
        table.push(bf16::from_f64(values(2 * i + 1, -normal)).to_bits());
    }
    table
}

fn random_values(table: &[u16], bytes: usize, random: &mut SplitMix) -> Vec<u8> {
    const DRAWS: usize = (u64::BITS / TABLE_BITS) as usize;
    // A length known to the compiler, so that no index is checked.
    let table: &[u16; TABLE_LEN] = table.try_into().expect("value_table makes TABLE_LEN values");
    let mut out = vec![0u8; bytes];
    for group in out.chunks_mut(2 * DRAWS) {
        let mut bits = random.next();
        for element in group.chunks_exact_mut(2) {
            element.copy_from_slice(&table[bits as usize % TABLE_LEN].to_le_bytes());
            bits >>= TABLE_BITS;
        }
    }
    out
}

/// The lower of two E8M0 scales, a power of two, between which blocks of all E2M1 numbers are spread about as a
/// [`Role::Linear`] with rows of `fan_in` is.
fn block_scale(fan_in: usize) -> u8 {
    // The root of the mean of the squares of the sixteen numbers is 2.9.
    let spread = 1.6 / (fan_in as f64).sqrt() / 2.9;
    (127.0 + spread.log2().floor()).clamp(0.0, 253.0) as u8
}

/// Bytes `from` and up to as many more as the bits of `mask` say.
fn random_bytes(mask: u8, from: u8, bytes: usize, random: &mut SplitMix) -> Vec<u8> {
    let mut out = vec![0u8; bytes];
    for group in out.chunks_mut(8) {
        let drawn = random.next().to_le_bytes();
        group.iter_mut().zip(drawn).for_each(|(byte, drawn)| *byte = from + (drawn & mask));
    }
    out
}

/// Steele, Lea and Flood's SplitMix64: a counter and a mixing function, so a stream can start anywhere at no cost.
struct SplitMix(u64);

impl SplitMix {
    /// A stream of its own for each list of numbers.
    fn new(path: &[u64]) -> SplitMix {
        let mut stream = SplitMix(0x7065_7270_6574_7561);
        for &number in path {
            stream = SplitMix(stream.next() ^ number);
        }
        SplitMix(stream.next())
    }

    fn next(&mut self) -> u64 {
        split_mix(&mut self.0)
    }
}

// ---- texts ----

const SPECIAL_TOKENS: [&str; 5] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "[CLS]", "[SEP]"];
/// `<|im_end|>`.
const END: usize = 2;
const N_OWN_TOKENS: usize = SPECIAL_TOKENS.len() + 256;
const CHAT_TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}\
                             {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn write_texts(dir: &Path, config: &ModelConfig, value: &Value) -> Result<(), ModelError> {
    write_json(&dir.join("config.json"), value)?;
    write_json(&dir.join("tokenizer.json"), &tokenizer_json(config))?;
    match config.is_bidirectional() {
        false => {
            write_json(&dir.join("generation_config.json"), &json!({ "eos_token_id": END }))?;
            write_json(
                &dir.join("tokenizer_config.json"),
                &json!({
                    "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL_TOKENS[END],
                    "pad_token": SPECIAL_TOKENS[0], "model_max_length": config.max_position_embeddings(),
                }),
            )?;
            let path = dir.join("chat_template.jinja");
            std::fs::write(&path, CHAT_TEMPLATE).map_err(|e| ModelError::write(&path, e))
        }
        true => {
            write_json(
                &dir.join("tokenizer_config.json"),
                &json!({
                    "tokenizer_class": "PreTrainedTokenizerFast", "cls_token": SPECIAL_TOKENS[3],
                    "sep_token": SPECIAL_TOKENS[4], "pad_token": SPECIAL_TOKENS[0],
                    "model_max_length": config.max_position_embeddings(),
                }),
            )?;
            let module = |idx: usize, path: &str, kind: &str| {
                json!({ "idx": idx, "name": idx.to_string(), "path": path,
                        "type": format!("sentence_transformers.models.{kind}") })
            };
            write_json(
                &dir.join("modules.json"),
                &json!([
                    module(0, "", "Transformer"),
                    module(1, "1_Pooling", "Pooling"),
                    module(2, "2_Normalize", "Normalize")
                ]),
            )?;
            for folder in ["1_Pooling", "2_Normalize"] {
                let path = dir.join(folder);
                std::fs::create_dir(&path).map_err(|e| ModelError::write(&path, e))?;
            }
            write_json(
                &dir.join("1_Pooling/config.json"),
                &json!({
                    "word_embedding_dimension": config.hidden_size(), "pooling_mode_cls_token": false,
                    "pooling_mode_mean_tokens": true, "pooling_mode_max_tokens": false,
                    "pooling_mode_mean_sqrt_len_tokens": false,
                }),
            )?;
            write_json(
                &dir.join("sentence_bert_config.json"),
                &json!({ "max_seq_length": config.max_position_embeddings(), "do_lower_case": false }),
            )
        }
    }
}

/// A byte-level tokenizer: every byte is a token, so every text has one. The rest of the vocabulary is made-up words,
/// never the result of encoding (there are no merges), which let a random model's output be seen as text.
fn tokenizer_json(config: &ModelConfig) -> Value {
    let mut vocab = Map::new();
    let mut add = |token: String| {
        let id = vocab.len();
        vocab.insert(token, id.into());
    };
    SPECIAL_TOKENS.iter().for_each(|token| add((*token).to_owned()));
    (0..=255).for_each(|byte| add(byte_char(byte).to_string()));
    (0..config.vocab_size().saturating_sub(N_OWN_TOKENS)).for_each(|n| add(made_up_word(n)));

    let added: Vec<Value> = SPECIAL_TOKENS
        .iter()
        .enumerate()
        .map(|(id, token)| {
            json!({ "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": true })
        })
        .collect();
    let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    let sequence = json!({ "Sequence": { "id": "A", "type_id": 0 } });
    let token = |id: usize| json!({ "SpecialToken": { "id": SPECIAL_TOKENS[id], "type_id": 0 } });
    let definition = |id: usize| json!({ "id": SPECIAL_TOKENS[id], "ids": [id], "tokens": [SPECIAL_TOKENS[id]] });
    let (single, special) = match config.is_bidirectional() {
        false => (json!([sequence]), json!({})),
        true => (
            json!([token(3), sequence, token(4)]),
            json!({ SPECIAL_TOKENS[3]: definition(3), SPECIAL_TOKENS[4]: definition(4) }),
        ),
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": { "type": "TemplateProcessing", "single": single,
                            "pair": [sequence, { "Sequence": { "id": "B", "type_id": 1 } }], "special_tokens": special },
        "decoder": byte_level,
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                   "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                   "vocab": vocab, "merges": [] },
    })
}

/// The character that stands for a byte in byte-level vocabularies: itself where it can be seen, else one of those from
/// U+0100 on, in order.
pub(crate) fn byte_char(byte: u8) -> char {
    let seen = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if seen(byte) {
        return char::from(byte);
    }
    let unseen_before = (0..byte).filter(|&b| !seen(b)).count() as u32;
    char::from_u32(0x100 + unseen_before).expect("68 characters from U+0100 on are all valid")
}

/// A different word for each number, with the mark of a leading space: `Ġbolo`.
fn made_up_word(mut n: usize) -> String {
    const CONSONANTS: &[u8] = b"bdfghjklmnprstvz";
    const VOWELS: &[u8] = b"aeiou";
    const SYLLABLES: usize = CONSONANTS.len() * VOWELS.len();
    let mut word = String::from(byte_char(b' '));
    // Two syllables at least, so that no word is shorter than the longest suffix of another number's digits.
    let mut at_least = 2;
    while n > 0 || at_least > 0 {
        let syllable = n % SYLLABLES;
        word.push(char::from(CONSONANTS[syllable / VOWELS.len()]));
        word.push(char::from(VOWELS[syllable % VOWELS.len()]));
        n /= SYLLABLES;
        at_least -= usize::from(at_least > 0);
    }
    word
}

fn write_json(path: &Path, value: &Value) -> Result<(), ModelError> {
    let fail = |e: std::io::Error| ModelError::write(path, e);
    let mut out = BufWriter::new(File::create(path).map_err(fail)?);
    serde_json::to_writer_pretty(&mut out, value).map_err(|e| fail(e.into()))?;
    out.write_all(b"\n").map_err(fail)?;
    out.flush().map_err(fail)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::fs;

    use super::*;
    use crate::model::layout::tensors;
    use crate::model::{ModelFolder, Weights};

    fn quiet(_: u64, _: u64) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    fn make(dir: &Path, preset: &str, options: &SynthOptions) -> Result<SynthSummary, ModelError> {
        synth(SynthSource::Preset(preset), dir, options, &mut quiet)
    }

    fn entries(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(dir)
            .expect("a folder")
            .map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn every_preset_is_understood_and_has_its_real_size() {
        for name in PRESETS {
            let config = ModelConfig::from_value(Path::new(name), &preset_config(name).expect(name)).expect(name);
            let is_text = matches!(config, ModelConfig::Decoder(_));
            assert_eq!(text_presets().any(|text| text == name), is_text, "{name}");
            let params: u64 = tensors(&config).iter().map(TensorSpec::len_elems).sum();
            // As the publishers count them.
            let expected: u64 = match name {
                "qwen3-0.6b" => 596_049_920,
                "qwen3-1.7b" => 1_720_574_976,
                "qwen3-4b" => 4_022_468_096,
                "qwen3-8b" => 8_190_735_360,
                "qwen3-14b" => 14_768_307_200,
                "qwen3-32b" => 32_762_123_264,
                "qwen2.5-0.5b" => 494_032_768,
                "llama-3.2-1b" => 1_235_814_400,
                "llama-3.2-3b" => 3_212_749_824,
                "llama-3.1-8b" => 8_030_261_248,
                "mistral-7b" => 7_248_023_552,
                "mistral-small-24b" => 23_572_403_200,
                "qwen3-30b-a3b" => 30_532_122_624,
                "mixtral-8x7b" => 46_702_792_704,
                "gemma-3-270m" => 268_098_176,
                "gemma-3-1b" => 999_885_952,
                // Of which 2,348,810,240 are the inputs of layers.
                "gemma-4-e2b" => 4_628_569_379,
                "gemma-4-e4b" => 7_463_013_418,
                "gemma-4-26b-a4b" => 25_233_141_790,
                "gemma-4-31b" => 30_697_345_340,
                "modernbert-base" => 149_014_272,
                "modernbert-large" => 394_781_696,
                _ => continue,
            };
            assert_eq!(params, expected, "{name}");
        }
        let message = preset_config("gpt-2").expect_err("unknown").to_string();
        assert!(message.starts_with("preset gpt-2: unknown; known: qwen3-110m, qwen3-0.6b"), "{message}");
    }

    #[test]
    fn every_tiny_preset_is_a_whole_model() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let tiny: Vec<_> = PRESETS.into_iter().filter(|name| name.starts_with("tiny-")).collect();
        for &name in &tiny {
            let out = dir.path().join(name);
            let summary = make(&out, name, &SynthOptions::default()).expect(name);
            let folder = ModelFolder::open(&out).expect(name);
            let weights = folder.weights().expect(name);
            // What is made of files' blocks has rows of whole lines.
            assert!(weights.size_bytes() as u64 == summary.size_bytes || weights.unmade_bytes() > 0, "{name}");
            for spec in tensors(folder.config()) {
                let view = weights.expect(&spec.name, &spec.shape).expect(name);
                assert!(view.is_aligned());
            }
            let text = "Na\u{ef}ve \u{6771}\u{4eac}!";
            let ids = folder.encode(text).expect(name);
            assert_eq!(folder.tokenizer().expect(name).decode(&ids).expect(name), text);
            assert_eq!(folder.tokenizer().expect(name).vocab_size(), folder.config().vocab_size());
            if folder.sentence().is_some() {
                assert_eq!((ids[0], ids[ids.len() - 1]), (3, 4));
                assert_eq!(folder.encode_sentence(None, &"x".repeat(1000)).expect(name).len(), 128);
            } else {
                assert_eq!(folder.generation().eos_token_ids, [2]);
                assert!(!folder.chat_template().expect(name).render(&[]).expect(name).is_empty());
            }
        }
        assert_eq!(entries(dir.path()).len(), tiny.len(), "nothing unfinished is left");
    }

    #[test]
    fn shards_and_threads_do_not_change_the_weights() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let (one, many) = (dir.path().join("one"), dir.path().join("many"));
        make(&one, "tiny-odd", &SynthOptions { seed: 5, n_threads: 1, ..SynthOptions::default() }).expect("one file");
        let options = SynthOptions { seed: 5, n_threads: 3, max_shard_bytes: 150_000 };
        let summary = make(&many, "tiny-odd", &options).expect("shards");
        assert!(summary.weight_files.len() > 3 && !many.join("model.safetensors").exists());
        let other = dir.path().join("other");
        make(&other, "tiny-odd", &SynthOptions { seed: 6, ..SynthOptions::default() }).expect("another seed");

        let [one, many, other] = [one, many, other].map(|dir| Weights::open(&dir).expect("weights"));
        assert_eq!(one.len(), many.len());
        let mut differ = 0;
        for name in one.names() {
            let bytes = |w: &Weights| w.get(name).expect(name).bytes.to_vec();
            assert_eq!(bytes(&one), bytes(&many), "{name}");
            differ += usize::from(bytes(&one) != bytes(&other));
        }
        assert_eq!(differ, one.len());
    }

    #[test]
    fn weights_are_spread_as_their_role_asks() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let out = dir.path().join("m");
        make(&out, "tiny-llama", &SynthOptions::default()).expect("a model");
        let weights = Weights::open(&out).expect("weights");
        let moments = |name: &str| {
            let bytes = weights.get(name).expect(name).bytes;
            let values: Vec<f64> = bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f64()).collect();
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / values.len() as f64;
            assert!(values.iter().all(|v| v.is_finite()));
            (mean, variance.sqrt())
        };
        for (name, mean, std) in [
            ("model.embed_tokens.weight", 0.0, 0.15),
            ("model.layers.1.mlp.down_proj.weight", 0.0, 1.6 / 640f64.sqrt()),
            ("lm_head.weight", 0.0, 3.2 / 16.0),
            ("model.norm.weight", 1.0, 1.0 / 12f64.sqrt()),
        ] {
            let (given_mean, given_std) = moments(name);
            assert!((given_mean - mean).abs() < 0.1 * std.max(0.3), "{name}: mean {given_mean}");
            assert!((given_std / std - 1.0).abs() < 0.1, "{name}: std {given_std}, expected {std}");
        }
    }

    #[test]
    fn a_config_file_will_do() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let path = dir.path().join("c.json");
        let mut config = preset_config("tiny-odd").expect("a preset");
        config["architectures"] = Value::Null;
        config["torch_dtype"] = "float32".into();
        config["quantization_config"] = json!({ "quant_method": "fp8", "weight_block_size": [128, 128] });
        fs::write(&path, config.to_string()).expect("a file");
        let out = dir.path().join("m");
        let from = |path: &Path| synth(SynthSource::Config(path), &out, &SynthOptions::default(), &mut quiet);
        from(&path).expect("a model");
        let written = read_value(&out.join("config.json")).expect("JSON");
        assert_eq!((&written["dtype"], &written["architectures"][0]), (&json!("bfloat16"), &json!("Qwen3ForCausalLM")));
        assert!(written.get("torch_dtype").is_none() && written.get("quantization_config").is_none());
        assert!(!ModelFolder::open(&out).expect("a model").lacks_tensors());

        config["vocab_size"] = 100.into();
        fs::write(&path, config.to_string()).expect("a file");
        assert!(
            from(&path).expect_err("too few tokens").to_string().contains("vocab_size: 100, expected at least 261")
        );
    }

    #[test]
    fn nothing_is_overwritten_and_nothing_half_done_is_left() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let out = dir.path().join("m");
        fs::create_dir(&out).expect("an empty folder");
        let options = SynthOptions::default();
        let stopped = synth(SynthSource::Preset("tiny-llama"), &out, &options, &mut |done, _| match done {
            0 => ControlFlow::Continue(()),
            _ => ControlFlow::Break(()),
        });
        assert!(matches!(stopped, Err(ModelError::Stopped)));
        assert_eq!(entries(dir.path()), ["m"]);
        assert!(entries(&out).is_empty());

        make(&out, "tiny-llama", &options).expect("an empty folder may be filled");
        let message = make(&out, "tiny-llama", &options).expect_err("taken").to_string();
        assert!(message.contains("already exists and is not empty"), "{message}");
        fs::write(dir.path().join("f"), "x").expect("a file");
        assert!(make(&dir.path().join("f"), "tiny-llama", &options).is_err());
        assert!(make(&dir.path().join("no/m"), "tiny-llama", &options).is_err());
        assert_eq!(entries(dir.path()), ["f", "m"]);
    }

    #[test]
    fn made_up_words_are_all_different() {
        let words: HashSet<_> = (0..200_000).map(made_up_word).collect();
        assert_eq!(words.len(), 200_000);
        assert_eq!((0..=255).map(byte_char).collect::<HashSet<_>>().len(), 256);
        assert_eq!(
            (byte_char(b' '), byte_char(b'a'), byte_char(0), byte_char(0xad)),
            ('\u{120}', 'a', '\u{100}', '\u{143}')
        );
    }
}
