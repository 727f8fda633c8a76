//! Command line: arguments, what verbs share, exit status.
//!
//! 0: done. 1: the request failed, one line on stderr says why. 2: bad usage. 3: there is no GPU to check. 130: stopped
//! by Ctrl-C; what was made until then has been printed. Machine output goes to stdout or the named file, everything
//! else to stderr; progress bars only on a terminal.

mod bench;
mod chat;
mod doctor;
mod embed;
#[allow(unsafe_code, reason = "which pages of a file lie in memory")]
mod files;
mod generate;
mod gpu_check;
mod logits;
mod loss;
mod pack;
mod perplexity;
mod plan;
mod plan_graph;
mod schedule;
mod synth;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use perpetua::cuda::{Gpu, GpuError};
use perpetua::device_image::device_image;
use perpetua::exec::cuda;
use perpetua::graph::task::Stats;
use perpetua::model::layout::is_spare;
use perpetua::model::tokenizer::is_panic_caught;
use perpetua::model::{ModelError, Quantize};
use perpetua::{Device, Engine, EngineConfig, GenerateOptions, Model, PromptPrecision};
use perpetua_shared::{Technique, Techniques};
use std::fmt::Display;
use std::io::{IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What a verb returns: its failure in one line.
type Outcome = Result<(), Box<dyn std::error::Error>>;

/// Compiles a model into one persistent run of tasks and events, and runs it.
#[derive(Debug, Parser)]
#[command(version, about, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Generate text, streamed to stdout as it is made.
    Generate(generate::Args),
    /// Talk with a model, a line a turn.
    Chat(chat::Args),
    /// Write the logits of every position of a prompt.
    Logits(logits::Args),
    /// Score a model on a text; with --quantize, what that costs.
    Perplexity(perplexity::Args),
    /// Embed sentences.
    Embed(embed::Args),
    /// Compile without running, and say what came out.
    #[command(after_long_help = plan::FORMAT)]
    // A target has all the numbers of its machine: much larger than other verbs' options.
    Plan(Box<plan::Args>),
    /// Static memory packing of a CSV of buffers.
    #[command(after_long_help = pack::FORMAT)]
    Pack(pack::Args),
    /// The feasible memory scheduler on a plain graph.
    #[command(after_long_help = schedule::FORMAT)]
    Schedule(schedule::Args),
    /// Write a checkpoint of random weights with a real model's shapes.
    Synth(synth::Args),
    /// Measure step times and the share of the machine's read bandwidth.
    Bench(bench::Args),
    /// Say what this machine has and lacks.
    Doctor(doctor::Args),
    /// Show on a GPU that it computes what it should, and how fast.
    GpuCheck(gpu_check::Args),
}

/// There is no GPU to do it on: exit status 3.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct NoGpu(String);

/// The verb ran until Ctrl-C.
#[derive(Debug, thiserror::Error)]
#[error("stopped")]
struct Interrupted;

pub(crate) fn main() -> ExitCode {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !is_panic_caught() {
            usual(panic);
        }
    }));
    // clap exits with 2 by itself on bad usage.
    let outcome = match &Cli::parse().verb {
        Verb::Generate(args) => generate::run(args),
        Verb::Chat(args) => chat::run(args),
        Verb::Logits(args) => logits::run(args),
        Verb::Perplexity(args) => perplexity::run(args),
        Verb::Embed(args) => embed::run(args),
        Verb::Plan(args) => plan::run(args),
        Verb::Pack(args) => pack::run(args),
        Verb::Schedule(args) => schedule::run(args),
        Verb::Synth(args) => synth::run(args),
        Verb::Bench(args) => bench::run(args),
        Verb::Doctor(args) => doctor::run(args),
        Verb::GpuCheck(args) => gpu_check::run(args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<Interrupted>() => ExitCode::from(130),
        // Whoever read our output has gone; there is nobody to complain to.
        Err(error) if is_broken_pipe(&*error) => ExitCode::SUCCESS,
        Err(error) => {
            // One line: what follows a line break would look like another message.
            say(&error.to_string().replace('\n', " "));
            if error.is::<NoGpu>() { ExitCode::from(3) } else { ExitCode::FAILURE }
        }
    }
}

/// Says `line` to the user on stderr, if anybody listens: `eprintln!` panics where nobody does.
fn note(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// As [`note`], of what the user should know about their request.
fn say(line: &str) {
    note(&format!("perpetua: {}", by_options(line)));
}

/// `line`, which may be the library's and name what a program sets, with the options that set it here.
fn by_options(line: &str) -> String {
    let options = [("EngineConfig::max_context", "--max-context"), ("EngineConfig::sequences", "--batch")];
    options.iter().fold(line.to_owned(), |line, (setting, option)| line.replace(setting, option))
}

fn is_broken_pipe(error: &(dyn std::error::Error + 'static)) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}

/// Where a model runs.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum DeviceName {
    /// A GPU where there is one, else the CPU.
    Auto,
    /// CPU threads.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
    /// The GPU's code on a simulated GPU that judges every access.
    Simt,
    /// The PTX of the GPU's code, instruction by instruction.
    Ptx,
    /// One thread, plain loops.
    Reference,
}

impl DeviceName {
    /// Whether this machine only simulates it: how long something takes there means nothing.
    fn is_simulated(self) -> bool {
        matches!(self, DeviceName::Simt | DeviceName::Ptx)
    }
}

/// The arguments every verb that runs a model takes.
#[derive(Clone, Debug, Args)]
struct ModelArgs {
    /// Model folder: config.json, tokenizer.json, *.safetensors.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Where to run it.
    #[arg(long, value_enum, default_value = "auto")]
    device: DeviceName,
    /// CPU workers [default: one per core this process may use]; or SMs of a GPU [default: all].
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = at_least::<usize>(1))]
    threads: Option<usize>,
    /// Keep a decoder's matrices in fewer bits, in memory of their own.
    #[arg(long, value_enum, value_name = "HOW")]
    quantize: Option<QuantizeName>,
    /// Positions of the KV cache [default: what the request needs].
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = at_least::<usize>(1))]
    max_context: Option<usize>,
    /// Read prompts with the bits that their tokens give one by one, on the CPU: without matrix units (AMX) or products
    /// of bf16, which are faster.
    #[arg(long)]
    exact: bool,
    /// Read prompts with activations rounded to bf16, on the CPU: faster where it multiplies bf16 as often as f32
    /// (AMD's with AVX-512 BF16). A GPU always does.
    #[arg(long, conflicts_with = "exact")]
    bf16_prompts: bool,
    #[command(flatten)]
    without: Without,
    /// The GPU, when it is not the system's first.
    #[arg(skip)]
    gpu: Option<Gpu>,
}

/// What a GPU does without.
#[derive(Clone, Debug, Default, Args)]
struct Without {
    /// On a GPU, leave this out, which makes it faster: where that is what a GPU does not get on with, or to see what
    /// it brings.
    #[arg(long, value_name = "TECHNIQUE", value_delimiter = ',', value_parser = technique())]
    without: Vec<Technique>,
}

impl Without {
    fn set(&self) -> Techniques {
        self.without.iter().copied().collect()
    }
}

/// A [`Technique`] by its name.
fn technique() -> impl TypedValueParser<Value = Technique> {
    let by_name = |name: String| Technique::ALL.into_iter().find(|technique| technique.name() == name);
    PossibleValuesParser::new(Technique::ALL.map(Technique::name))
        .try_map(move |name| by_name(name).ok_or("no technique"))
}

/// A whole number of an option that takes `least` or more.
fn at_least<N>(least: N) -> impl Fn(&str) -> Result<N, String> + Clone
where
    N: FromStr + PartialOrd + Display + Clone,
{
    move |text: &str| match text.parse() {
        Ok(n) if n >= least => Ok(n),
        _ => Err(format!("expected a whole number, {least} or more")),
    }
}

/// One of an option that takes `least` to `most`.
fn within(least: usize, most: usize) -> impl Fn(&str) -> Result<usize, String> + Clone {
    move |text: &str| match text.parse() {
        Ok(n) if (least..=most).contains(&n) => Ok(n),
        _ => Err(format!("expected a whole number from {least} to {most}")),
    }
}

/// Seconds; more than can be counted are as long as can be.
fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(seconds) if seconds >= 0.0 => Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)),
        _ => Err("expected a number of seconds, 0 or more".to_owned()),
    }
}

/// How weights are kept: see [`Quantize`].
#[derive(Clone, Copy, Debug, ValueEnum)]
enum QuantizeName {
    /// 8 bits, a scale per 64 weights.
    Q8,
    /// 4 bits, a scale per 32 weights; the embedding table and the head in 8.
    Q4,
}

impl From<QuantizeName> for Quantize {
    fn from(name: QuantizeName) -> Quantize {
        match name {
            QuantizeName::Q8 => Quantize::Q8,
            QuantizeName::Q4 => Quantize::Q4,
        }
    }
}

impl ModelArgs {
    /// The model in folder `model`, on `gpu`.
    fn on_gpu(model: PathBuf, gpu: Gpu, without: Without) -> ModelArgs {
        let (device, gpu) = (DeviceName::Cuda, Some(gpu));
        ModelArgs {
            model,
            device,
            threads: None,
            quantize: None,
            max_context: None,
            exact: false,
            bf16_prompts: false,
            without,
            gpu,
        }
    }

    fn open(&self) -> Result<Model, Box<dyn std::error::Error>> {
        if self.exact && matches!(self.device, DeviceName::Cuda | DeviceName::Simt | DeviceName::Ptx) {
            return Err(
                "--exact is for --device cpu or reference: a GPU multiplies the rows of a prompt in bf16".into()
            );
        }
        if !self.without.without.is_empty() {
            match self.device {
                DeviceName::Cuda | DeviceName::Ptx => {}
                DeviceName::Auto if self.exact => return Err("--without is for a GPU, --exact for the CPU".into()),
                DeviceName::Auto => not_a_gpu().map_or(Ok(()), |why| Err(format!("--without is for a GPU: {why}")))?,
                _ => return Err("--without is for --device cuda or ptx: nothing else knows these techniques".into()),
            }
        }
        let model = load(&self.model)?;
        let Some(how) = self.quantize else { return Ok(model) };
        // For a while a tokenizer takes several times its file to read: better before the weights are there than beside
        // them. Whoever needs it hears what is wrong with it.
        let _ = model.tokenizer();
        let bar = progress(model.weights()?.size_bytes() as u64, "quantizing", BYTES_BAR);
        let model = model.quantize(how.into(), |bytes| bar.inc(bytes))?;
        bar.finish_and_clear();
        Ok(model)
    }

    /// Refuses what only decoders have, for an encoder; quantising it has been.
    fn check_sentences(&self, model: &Model) -> Outcome {
        if !model.config().architecture().is_encoder() {
            return Ok(());
        }
        if let Some(context) = self.max_context {
            let max = model.max_tokens();
            return Err(format!(
                "--max-context {context} is for decoders, which have a KV cache: this model takes up to {max} tokens"
            )
            .into());
        }
        if self.exact {
            return Err("--exact is for decoders: an encoder sees a sentence at once".into());
        }
        if self.bf16_prompts {
            return Err("--bf16-prompts is for decoders: an encoder's sentences are read in f32".into());
        }
        Ok(())
    }

    /// An engine's configuration for a request of `positions` tokens in all.
    fn config(&self, model: &Model, positions: usize) -> EngineConfig {
        let needed = positions.clamp(1, model.max_tokens().max(1));
        EngineConfig {
            device: match self.device {
                DeviceName::Auto => Device::Auto,
                DeviceName::Cpu => Device::Cpu,
                DeviceName::Cuda => Device::Cuda,
                DeviceName::Simt => Device::Simt,
                DeviceName::Ptx => Device::Ptx,
                DeviceName::Reference => Device::Reference,
            },
            threads: self.threads,
            max_context: Some(self.max_context.unwrap_or(needed)),
            gpu: self.gpu.clone(),
            cuda: cuda::Options { without: self.without.set(), ..cuda::Options::default() },
            prompt_precision: match (self.exact, self.bf16_prompts) {
                (true, _) => PromptPrecision::Exact,
                (_, true) => PromptPrecision::Bf16,
                _ => PromptPrecision::High,
            },
            ..EngineConfig::default()
        }
    }
}

/// Why `--device auto` is not a GPU here, if it is not.
fn not_a_gpu() -> Option<String> {
    if device_image().is_none() {
        return Some(GpuError::NoImage.to_string());
    }
    Gpu::open().err().map(|error| error.to_string())
}

/// The median of `n` measurements, and the spread of all as a percentage of it.
fn median_and_spread<E>(n: usize, mut measure: impl FnMut() -> Result<f64, E>) -> Result<(f64, f64), E> {
    let mut values = (0..n).map(|_| measure()).collect::<Result<Vec<f64>, _>>()?;
    values.sort_by(f64::total_cmp);
    let median = values[n / 2];
    Ok((median, 100.0 * (values[n - 1] - values[0]) / median))
}

/// Opens the model in `folder`, and names what of its checkpoint is used by nothing for no known reason.
fn load(folder: &Path) -> Result<Model, ModelError> {
    let model = Model::load(folder)?;
    // Where there are no weights to be had, or not all, whoever needs them says so.
    let mut unused = if model.lacks_tensors() { Vec::new() } else { model.unused_tensors().unwrap_or_default() };
    unused.retain(|name| !is_spare(model.config(), name));
    if let [first, others @ ..] = &unused[..] {
        let others = if others.is_empty() { String::new() } else { format!(" and {} more", others.len()) };
        say(&format!("{}: tensors that this network does not use: {first}{others}", folder.display()));
    }
    Ok(model)
}

/// A progress bar of `len` steps on a terminal, nothing elsewhere.
fn progress(len: u64, what: &'static str, template: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(len);
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.set_style(style);
    bar.set_message(what);
    bar
}

const BYTES_BAR: &str = "{msg} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
const TOKENS_BAR: &str = "{msg} {bar:30} {pos}/{len} tokens {eta}";

/// Reads the checkpoint's pages once, with a progress bar: the first pass over the weights then runs at full speed, and
/// a file that cannot be read says so here. Cheap when the pages are cached.
fn warm(model: &Model) -> Outcome {
    if model.quantized().is_some() {
        // What it takes of the checkpoint has been read.
        return Ok(());
    }
    let weights = model.weights()?;
    let bar = progress(weights.unmade_bytes(), "unpacking", BYTES_BAR);
    model.unpack(|bytes| bar.inc(bytes))?;
    bar.finish_and_clear();
    let bar = progress(weights.size_bytes() as u64, "reading weights", BYTES_BAR);
    let mut sum = 0u8;
    for name in weights.names().map(str::to_owned).collect::<Vec<_>>() {
        let Some(tensor) = weights.get(&name) else { continue };
        for page in tensor.bytes.chunks(1 << 20) {
            // One byte of each 4 KiB page is enough to have it read.
            sum = page.iter().step_by(4096).fold(sum, |sum, byte| sum.wrapping_add(*byte));
            bar.inc(page.len() as u64);
        }
    }
    std::hint::black_box(sum);
    bar.finish_and_clear();
    Ok(())
}

/// The model, resident; with a progress bar where its weights are handed to a GPU.
fn resident(model: &Model, config: &EngineConfig) -> Result<Engine, Box<dyn std::error::Error>> {
    let total = model.weights()?.size_bytes() as u64;
    let mut bar = None;
    let engine = Engine::with_progress(model, config, |bytes| {
        bar.get_or_insert_with(|| progress(total, "to the GPU", BYTES_BAR)).inc(bytes);
    });
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    Ok(engine?)
}

/// From now on Ctrl-C does `what` instead of ending the program. A second Ctrl-C ends it at once.
fn on_interrupt(what: impl Fn() + Send + 'static) -> Outcome {
    let mut is_second = false;
    on_every_interrupt(move || {
        if std::mem::replace(&mut is_second, true) {
            std::process::exit(130);
        }
        what();
    })
}

/// From now on Ctrl-C does `what`, every time.
fn on_every_interrupt(what: impl FnMut() + Send + 'static) -> Outcome {
    Ok(ctrlc::set_handler(what)?)
}

/// A flag that Ctrl-C sets.
fn interrupt_flag() -> Result<Arc<AtomicBool>, Box<dyn std::error::Error>> {
    let flag = Arc::new(AtomicBool::new(false));
    let set = flag.clone();
    on_interrupt(move || set.store(true, Ordering::Relaxed))?;
    Ok(flag)
}

/// What messages call the text that [`read_text`] reads.
fn name_of_text(path: &Path) -> String {
    if path == Path::new("-") { "standard input".to_owned() } else { path.display().to_string() }
}

/// The text of file `path`; of `-`, standard input's.
fn read_text(path: &Path) -> Result<String, String> {
    let (is_input, name) = (path == Path::new("-"), name_of_text(path));
    let mut bytes = Vec::new();
    let read = match is_input {
        true => std::io::stdin().lock().read_to_end(&mut bytes).map(drop),
        false => std::fs::read(path).map(|found| bytes = found),
    };
    read.map_err(|error| format!("{name}: {}", plain(&error)))?;
    String::from_utf8(bytes).map_err(|error| format!("{name}: byte {} is not UTF-8", error.utf8_error().valid_up_to()))
}

/// Where an output goes.
enum Place {
    /// A device, a pipe, an open file descriptor: it cannot be replaced by a file, and has no half-written state to
    /// hide.
    Stream,
    /// A file, written beside its place (links followed) and then renamed.
    File(PathBuf),
}

/// Where `path` leads, if something can be written there: asked before the work, so that none is done for nothing.
fn place(path: &Path) -> Result<Place, String> {
    let fail = |what: &str| format!("{}: cannot write: {what}", path.display());
    if path.metadata().is_ok_and(|meta| meta.is_dir()) {
        return Err(fail("it is a folder"));
    }
    // `/dev/stdout` may lead to a file, but stands for what is open, which a new file in its place would not be. A pipe
    // is not tried: its reader would take the end of the trial for the end of the output.
    let descriptors = ["/dev/stdout", "/dev/stderr", "/dev/fd", "/proc"];
    if descriptors.iter().any(|name| path.starts_with(name)) || path.metadata().is_ok_and(|meta| !meta.is_file()) {
        return Ok(Place::Stream);
    }
    let folder = folder_of(path);
    if !path.exists() && !folder.is_dir() {
        return Err(fail(&format!("{} is no folder", folder.display())));
    }
    let target = path.canonicalize().or_else(|_| Ok(folder.canonicalize()?.join(path.file_name().unwrap_or_default())));
    let target = target.map_err(|error: std::io::Error| fail(&plain(&error)))?;
    let folder = folder_of(&target);
    tempfile::NamedTempFile::new_in(folder).map_err(|error| fail(&plain(&error)))?;
    Ok(Place::File(target))
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The system's words alone: not its number of them, nor the name of a temporary file.
fn plain(error: &std::io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_lowercase()
}

/// Whether the outputs that were asked for can be written, see [`place`], each to a place of its own, which is none of
/// `inputs`: files, and models' folders.
fn writable<'a>(
    outputs: impl IntoIterator<Item = &'a Path>,
    inputs: impl IntoIterator<Item = &'a Path> + Clone,
) -> Outcome {
    let mut targets = Vec::new();
    for path in outputs {
        let Place::File(target) = place(path)? else { continue };
        let fail = |what: &str| format!("{}: cannot write: {what}", path.display());
        if targets.contains(&target) {
            return Err(fail("another output goes there").into());
        }
        for input in inputs.clone() {
            let is_it = |file: &Path| file.canonicalize().is_ok_and(|file| file == target);
            if is_it(input) {
                return Err(fail("it is what this command reads").into());
            }
            if input.is_dir() && checkpoint(input).iter().any(|file| is_it(file)) {
                return Err(fail(&format!("it is a file of the model {}", input.display())).into());
            }
        }
        targets.push(target);
    }
    Ok(())
}

/// The files that make `folder` a model, and the folders of its modules: those that are known by name, and those that
/// an index names. Others lie there, like what was written before.
fn checkpoint(folder: &Path) -> Vec<PathBuf> {
    const INDEX: &str = "model.safetensors.index.json";
    const NAMES: [&str; 13] = [
        INDEX,
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
        "modules.json",
        "config_sentence_transformers.json",
    ];
    let is_one = |name: &str| {
        NAMES.contains(&name)
            || name.starts_with("model") && name.ends_with(".safetensors")
            || name.starts_with("sentence_") && name.ends_with("_config.json")
    };
    let entries = |folder: &Path| folder.read_dir().into_iter().flatten().flatten().map(|entry| entry.path());
    let folders = entries(folder).filter(|path| path.is_dir()).chain([folder.to_owned()]);
    let files = folders.flat_map(|folder| entries(&folder).collect::<Vec<_>>());
    let mut files: Vec<PathBuf> =
        files.filter(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(is_one)).collect();
    let index = std::fs::read(folder.join(INDEX)).ok().and_then(|text| serde_json::from_slice(&text).ok());
    let index: serde_json::Value = index.unwrap_or_default();
    let shards = index["weight_map"].as_object().into_iter().flat_map(|map| map.values());
    files.extend(shards.filter_map(|shard| Some(folder.join(shard.as_str()?))));
    files
}

/// Writes `path` whole or not at all.
fn write_whole(path: &Path, write: impl FnOnce(&mut dyn Write) -> std::io::Result<()>) -> Outcome {
    let fail = |error: std::io::Error| format!("{}: cannot write: {}", path.display(), plain(&error));
    let target = match place(path)? {
        Place::File(target) => target,
        Place::Stream => {
            // Appending: what has been printed to the same file stays.
            let file = std::fs::OpenOptions::new().append(true).open(path).map_err(fail)?;
            let mut buffered = std::io::BufWriter::new(file);
            write(&mut buffered).map_err(fail)?;
            return Ok(buffered.flush().map_err(fail)?);
        }
    };
    let mut file = tempfile::NamedTempFile::new_in(folder_of(&target)).map_err(fail)?;
    {
        let mut buffered = std::io::BufWriter::new(file.as_file_mut());
        write(&mut buffered).map_err(fail)?;
        buffered.flush().map_err(fail)?;
    }
    // A full disk may show only now.
    file.as_file().sync_all().map_err(fail)?;
    // As it was, if it is there.
    match std::fs::metadata(&target) {
        Ok(before) => file.as_file().set_permissions(before.permissions()).map_err(fail)?,
        Err(_) => set_default_mode(file.as_file()).map_err(fail)?,
    }
    file.persist(&target).map_err(|error| fail(error.error))?;
    Ok(())
}

/// A temporary file is private; what is left for the user has the mode their umask gives.
#[cfg(target_os = "linux")]
#[allow(unsafe_code, reason = "the process's umask")]
fn set_default_mode(file: &std::fs::File) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    // SAFETY: umask only swaps a number of this process; it is put back at once.
    let mask = unsafe {
        let mask = libc::umask(0o022);
        libc::umask(mask);
        mask
    };
    file.set_permissions(std::fs::Permissions::from_mode(0o666 & !mask))
}

#[cfg(not(target_os = "linux"))]
fn set_default_mode(_: &std::fs::File) -> std::io::Result<()> {
    Ok(())
}

/// How writing to standard output went. That nobody reads on stays an error of its own kind, which [`main`] knows.
fn to_stdout(written: std::io::Result<()>) -> Outcome {
    written.map_err(|error| match error.kind() {
        std::io::ErrorKind::BrokenPipe => error.into(),
        _ => format!("standard output: cannot write: {}", plain(&error)).into(),
    })
}

/// Prints `text`, whole lines. Nobody's reading on is no reason to leave other outputs unwritten.
fn print(text: &str) -> Outcome {
    let mut out = std::io::stdout().lock();
    match to_stdout(out.write_all(text.as_bytes()).and_then(|()| out.flush())) {
        Err(error) if is_broken_pipe(&*error) => Ok(()),
        outcome => outcome,
    }
}

/// Prints `figures`, and writes them as JSON where that was asked for.
fn report(figures: &serde_json::Value, json: Option<&Path>) -> Outcome {
    let mut text = String::new();
    lines(figures, "", &mut text);
    print(&text)?;
    json.map_or(Ok(()), |path| write_whole(path, |file| writeln!(file, "{figures:#}")))
}

/// A line for each figure, those of a table further in.
fn lines(figures: &serde_json::Value, margin: &str, out: &mut String) {
    let width = 28 - margin.len();
    for (name, value) in figures.as_object().into_iter().flatten() {
        let text = match value {
            serde_json::Value::Number(n) if n.is_f64() => match n.as_f64().unwrap_or(0.0) {
                // What three places would not show.
                x if x != 0.0 && x.abs() < 0.01 => format!("{x:.2e}"),
                x => format!("{x:.3}"),
            },
            serde_json::Value::String(text) => text.clone(),
            serde_json::Value::Null => "cannot be estimated".to_owned(),
            serde_json::Value::Object(_) => {
                out.push_str(&format!("{margin}{name}\n"));
                lines(value, &format!("{margin}  "), out);
                continue;
            }
            value => value.to_string(),
        };
        out.push_str(&format!("{margin}{name:width$} {text}\n"));
    }
}

/// Figures, a line for each.
#[derive(Default)]
struct Rows(String);

impl Rows {
    fn row(&mut self, what: &str, text: impl std::fmt::Display) {
        self.0.push_str(&format!("{what:16} {text}\n"));
    }

    /// What a task graph consists of.
    fn stats(&mut self, stats: &Stats) {
        self.row("ops", stats.ops);
        self.row("tasks", stats.tasks);
        self.row("events", stats.events);
        let waits = format!("{} (median {} a task, at most {})", stats.waits, stats.median_waits, stats.max_waits);
        self.row("waits", waits);
        self.row("triggers", stats.triggers);
        self.row("pairs", stats.pairs);
        self.row("oversync", format!("{:.3}", stats.oversync));
    }

    /// How long the stages of compiling took, and all together.
    fn stages(&mut self, stages: &[(&str, Duration)]) {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let each: Vec<String> = stages.iter().map(|(stage, time)| format!("{stage} {:.2} ms", ms(*time))).collect();
        let total = stages.iter().map(|(_, time)| *time).sum();
        self.row("compile", format!("{:.2} ms: {}", ms(total), each.join(", ")));
    }
}

/// `1234567` bytes as `1.2 MB`.
fn bytes(n: u64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{value:.2} {}", units[unit]) }
}

/// The likeliest tokens, so many of them, whichever they are.
fn greedy_options(max_new_tokens: usize) -> GenerateOptions {
    GenerateOptions { max_new_tokens, stop_tokens: Some(Vec::new()), ..GenerateOptions::default() }
}

/// Whether the model makes text.
fn is_generator(model: &Model) -> bool {
    model.sentence().is_none()
}
