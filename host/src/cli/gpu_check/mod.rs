//! `perpetua gpu-check`: one command that shows, on a machine with nothing but a driver, that the GPU computes what it
//! should and how fast. A record per section, as JSON.

mod check;
#[allow(unsafe_code, reason = "process groups and signals")]
mod group;
mod kernel_cases;

use super::{NoGpu, Outcome, Without, at_least, plain, print, write_whole};
use check::Check;
use group::Group;
use perpetua::cuda::fake::{Fake, Options as FakeOptions, Runs};
use perpetua::cuda::{Gpu, GpuError};
use perpetua_shared::Technique;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// What to do, in this order [default: all but `bench-8b` and `bench-14b`].
    #[arg(value_enum, value_name = "SECTION")]
    sections: Vec<Section>,
    /// Where the records go: a file a section.
    #[arg(long, value_name = "DIR", default_value = "records")]
    out: PathBuf,
    /// The folder with the checkpoints and what `transformers` made of them.
    #[arg(long, value_name = "DIR", default_value = "fixtures")]
    fixtures: PathBuf,
    /// Where checkpoints of random weights are made, and removed again [default: the system's folder for such].
    #[arg(long, value_name = "DIR")]
    scratch: Option<PathBuf>,
    /// Sections that have not begun after so many seconds are left out.
    #[arg(long, value_name = "S", default_value_t = 500, allow_negative_numbers = true, value_parser = at_least::<u64>(1))]
    budget: u64,
    /// Measure PyTorch through torch.compile as well, which takes minutes to compile.
    #[arg(long)]
    torch_compile: bool,
    /// On a simulated GPU of 4 SMs: what can be tried before the chip. Its times mean nothing.
    #[arg(long)]
    simulated: bool,
    /// As --simulated, with the kernels' PTX, instruction by instruction, instead of their source.
    #[arg(long, requires = "simulated")]
    interpreted: bool,
    /// With --simulated: kernels of the sizes that a GPU is given, which takes minutes with --interpreted, and far
    /// longer without.
    #[arg(long, requires = "simulated")]
    in_full: bool,
    #[command(flatten)]
    without: Without,
    /// Do the one section in this process: what a section's own process is told.
    #[arg(long, hide = true)]
    alone: bool,
    /// A simulated GPU that does not survive launches with this technique: to see what is made of a real one that does
    /// not.
    #[arg(long, hide = true, requires = "simulated", value_parser = super::technique())]
    fatal: Option<Technique>,
    /// Have the driver write the GPU's state into this file if it comes to an exception.
    #[arg(skip)]
    core: Option<PathBuf>,
}

/// A part of the check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Section {
    /// What the driver says.
    Facts,
    /// The rate at which loaders can read.
    Ceiling,
    /// How long workers take to hear of each other.
    Latency,
    /// The rate at which weights come to the GPU, beside the bus's and the disk's.
    Load,
    /// Every macro kernel against its reference.
    Kernels,
    /// Logits and tokens against `transformers`.
    Fixtures,
    /// Embeddings of texts against `sentence-transformers`.
    Sentences,
    /// What goes wrong ends in the error that says so, within a second.
    Drills,
    /// Ten thousand tokens in one launch.
    Long,
    /// Step times of a model of Qwen3-0.6B's shapes.
    #[value(name = "bench-0.6b")]
    BenchSmall,
    /// Of Llama-3.2-1B's.
    #[value(name = "bench-llama-1b")]
    BenchLlama,
    /// Of Qwen3-1.7B's.
    #[value(name = "bench-1.7b")]
    BenchMiddle,
    /// Of Qwen3-8B's: 16 GB of weights are made for it.
    #[value(name = "bench-8b")]
    BenchLarge,
    /// Of Qwen3-14B's: 30 GB.
    #[value(name = "bench-14b")]
    BenchLargest,
    /// Logits of 1,024 positions beside PyTorch's in bf16, both against float32.
    Accuracy,
    /// compute-sanitizer over a short generation, where it is installed.
    Sanitizer,
}

impl Section {
    /// What is short and needs no kernel of ours to be right comes first.
    const USUAL: [Section; 14] = [
        Section::Facts,
        Section::Ceiling,
        Section::Latency,
        Section::Kernels,
        Section::Fixtures,
        Section::Sentences,
        Section::Drills,
        Section::Load,
        Section::Long,
        Section::BenchSmall,
        Section::BenchLlama,
        Section::BenchMiddle,
        Section::Accuracy,
        Section::Sanitizer,
    ];

    /// What it may take: a few times what it should.
    fn limit(self, args: &Args) -> Duration {
        let compile = if args.torch_compile { 300 } else { 0 };
        Duration::from_secs(match self {
            // How long a simulated one takes says nothing: what else its machine does may be most of it.
            _ if args.simulated => 3600,
            // A minute of it for the driver's compiler, where it does not take the cubin; it keeps what it made for the
            // others.
            Section::Facts => 150,
            Section::Ceiling | Section::Latency => 60,
            // Most of it is the reference executor's.
            Section::Kernels => 180,
            Section::Fixtures | Section::Drills | Section::Load | Section::Long => 90,
            Section::Sentences => 60,
            Section::BenchSmall | Section::BenchLlama | Section::BenchMiddle => 150 + compile,
            Section::BenchLarge => 300 + compile,
            Section::BenchLargest => 480 + compile,
            Section::Accuracy => 150,
            Section::Sanitizer => 60,
        })
    }

    /// Whether it runs PyTorch, too.
    fn has_peer(self) -> bool {
        use Section::*;
        matches!(self, BenchSmall | BenchLlama | BenchMiddle | BenchLarge | BenchLargest | Accuracy)
    }

    /// Whether it is about checkpoints and what others made of them.
    fn has_fixtures(self) -> bool {
        matches!(self, Section::Fixtures | Section::Sentences)
    }

    fn name(self) -> String {
        clap::ValueEnum::to_possible_value(&self).map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// A process that loads PyTorch and ends, while sections run that do not want it: from a disk that nobody has read yet
/// that takes longer than what is measured.
struct Reader(Option<Child>);

impl Reader {
    fn of_pytorch() -> Reader {
        let mut command = check::python();
        command.args(["-c", "import torch"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // Without a Python there is nothing to read, and the sections say so.
        Reader(command.spawn().ok())
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Sections run in this order in processes of their own: a GPU context that one has lost, a crash or a hang takes no
/// other section with it.
pub(crate) fn run(args: &Args) -> Outcome {
    let gpu = match open(args) {
        Err(error @ (GpuError::Driver(_) | GpuError::NoDevice)) => return Err(NoGpu(error.to_string()).into()),
        other => other,
    };
    let sections = if args.sections.is_empty() { &Section::USUAL[..] } else { &args.sections };
    // Without them sections fail for nothing that a GPU does, and what it does would be looked for in vain.
    if let Some(section) = sections.iter().find(|section| section.has_fixtures())
        && !args.fixtures.is_dir()
    {
        let (folder, section) = (args.fixtures.display(), section.name());
        return Err(format!("{folder}: no such folder: expected the checkpoints for {section} (see --fixtures)").into());
    }
    let gpu = gpu?;
    std::fs::create_dir_all(&args.out).map_err(|error| {
        format!("{}: cannot make this folder for the records: {}", args.out.display(), plain(&error))
    })?;
    if let (true, &[section]) = (args.alone, sections) {
        group::follow();
        return Check::new(args, gpu, section).run();
    }
    drop(gpu);
    let began = Instant::now();
    // After the last section that begins in time there is no more than this.
    let end = Duration::from_secs(args.budget.saturating_add(40));
    let mut failed = Vec::new();
    let reader = sections.iter().any(|section| section.has_peer()).then(Reader::of_pytorch);
    for section in sections {
        if began.elapsed() > Duration::from_secs(args.budget) {
            print(&format!("{:14} left out: {} s are over\n", section.name(), args.budget))?;
        } else if !apart(args, *section, section.limit(args).min(end.saturating_sub(began.elapsed())))? {
            failed.push(section.name());
        }
    }
    drop(reader);
    // Last: it takes what time there is, and no other section waits for what it finds.
    if failed.contains(&Section::Fixtures.name()) {
        // A budget that no clock will show is none: the search ends by itself.
        let far = || began + Duration::from_secs(1 << 30);
        search(args, Section::Fixtures, began.checked_add(end).unwrap_or_else(far))?;
    }
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}", failed.join(", ")).into()) }
}

/// Does `section` in a process of its own; whether it did what it should. However it ends, there is a record, with the
/// figures that were there.
fn apart(args: &Args, section: Section, limit: Duration) -> Result<bool, Box<dyn std::error::Error>> {
    let (name, path) = (section.name(), args.record(section));
    let title = args.title(section);
    if path.exists() {
        std::fs::remove_file(&path)
            .map_err(|error| format!("{}: cannot remove the old record: {}", path.display(), plain(&error)))?;
    }
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["gpu-check", &name, "--alone"]).arg("--out").arg(&args.out).arg("--fixtures").arg(&args.fixtures);
    // Removed with what a section that is killed leaves there; where none can be made, those that want it say so.
    let scratch = args.scratch.clone().unwrap_or_else(std::env::temp_dir);
    let own = tempfile::tempdir_in(&scratch).ok();
    command.arg("--scratch").arg(own.as_ref().map_or(&*scratch, |own| own.path()));
    command.args(args.torch_compile.then_some("--torch-compile")).args(args.simulated.then_some("--simulated"));
    command.args(args.interpreted.then_some("--interpreted")).args(args.in_full.then_some("--in-full"));
    for (flag, techniques) in [("--without", &args.without.without[..]), ("--fatal", args.fatal.as_slice())] {
        for technique in techniques {
            command.args([flag, technique.name()]);
        }
    }
    if let Some(core) = &args.core {
        // Without memory's contents; and the process goes on, to say what it was told.
        let flags = "skip_nonrelocated_elf_images,skip_global_memory,skip_shared_memory,skip_local_memory,skip_abort";
        command.envs([("CUDA_ENABLE_COREDUMP_ON_EXCEPTION", "1"), ("CUDA_COREDUMP_GENERATION_FLAGS", flags)]);
        command.env("CUDA_COREDUMP_FILE", core);
    }
    let began = Instant::now();
    let ended = Group::spawn(&mut command)?.within(limit);
    let text = std::fs::read(&path).unwrap_or_default();
    let record: Option<Value> = serde_json::from_slice(&text).ok();
    if let Some(record) = record.as_ref().filter(|record| record["unfinished"].is_null()) {
        return Ok(record["error"].is_null());
    }
    let what = match ended {
        Err(error) => error,
        Ok(status) => format!("the section's process ended with {status}"),
    };
    let mut record = record.unwrap_or_else(|| json!({"section": name, "simulated": args.simulated}));
    record["seconds"] = json!(began.elapsed().as_secs_f64());
    record["error"] = what.clone().into();
    write_whole(&path, |file| writeln!(file, "{record:#}"))?;
    print_figures(&title, began.elapsed().as_secs_f64(), "error", &what.into())?;
    Ok(false)
}

/// Looks for what it is that `section`, which has failed, does not get on with: does it again, without all techniques,
/// and without each, as long as there is time. The section's record says how that went; each trial has one in a folder
/// of its own.
fn search(args: &Args, section: Section, end: Instant) -> Outcome {
    // Of what is left out already there is nothing to find.
    let rest: Vec<Technique> =
        Technique::ALL.into_iter().filter(|technique| !args.without.without.contains(technique)).collect();
    let mut trials = vec![("again".to_owned(), Vec::new()), ("without-all".to_owned(), rest.clone())];
    trials.extend(rest.iter().map(|technique| (format!("without-{}", technique.name()), vec![*technique])));
    let mut outcomes = serde_json::Map::new();
    for (name, techniques) in trials {
        let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else {
            outcomes.insert(name, "no time left".into());
            continue;
        };
        let out = args.out.join(&name);
        std::fs::create_dir_all(&out)
            .map_err(|error| format!("{}: cannot make this folder for a record: {}", out.display(), plain(&error)))?;
        let core = (name == "again").then(|| out.join("gpu.core"));
        let without = Without { without: [&args.without.without[..], &techniques].concat() };
        let trial = Args { out, without, core, ..args.clone() };
        let is_done = apart(&trial, section, section.limit(args).min(left))?;
        let is_hopeless = !is_done && name == "without-all";
        outcomes.insert(name, is_done.into());
        if is_hopeless {
            // It is something else.
            break;
        }
    }
    print(&format!("{:14} {}\n", section.name(), verdict(&outcomes)))?;
    let path = args.record(section);
    let text = std::fs::read(&path).map_err(|error| format!("{}: {}", path.display(), plain(&error)))?;
    let mut record: Value = serde_json::from_slice(&text)?;
    record["done_in_trials"] = outcomes.into();
    write_whole(&path, |file| writeln!(file, "{record:#}"))
}

/// What the `outcomes` of a [`search`] come to.
fn verdict(outcomes: &serde_json::Map<String, Value>) -> String {
    let of = |name: &str| outcomes.get(name).and_then(Value::as_bool);
    let cures =
        Technique::ALL.map(Technique::name).into_iter().filter(|name| of(&format!("without-{name}")) == Some(true));
    let cures: Vec<&str> = cures.collect();
    match (of("again"), of("without-all")) {
        (Some(true), _) => "is done when it is tried again: it fails by chance".to_owned(),
        (_, Some(false)) => "fails without all techniques, too: it is something else".to_owned(),
        (_, None) => "no time was left to look for what it is".to_owned(),
        (_, Some(true)) if cures.is_empty() => "is done without all techniques, but not without one alone".to_owned(),
        (_, Some(true)) => format!("is done without {}", cures.join(", or without ")),
    }
}

impl Args {
    /// `section`, and how it is done otherwise than usually.
    fn title(&self, section: Section) -> String {
        let names: Vec<&str> = self.without.without.iter().map(|technique| technique.name()).collect();
        let without = if names.is_empty() { String::new() } else { format!(" without {}", names.join(", ")) };
        format!("{}{without}", section.name())
    }

    fn record(&self, section: Section) -> PathBuf {
        self.out.join(format!("{}.json", section.name()))
    }
}

fn open(args: &Args) -> Result<Gpu, GpuError> {
    if !args.simulated {
        return Gpu::open();
    }
    let mut options = FakeOptions::new(4, 1 << 30);
    // What must be more than the cache holds is then soon read.
    options.device.l2_bytes = 64 << 10;
    options.fatal = args.fatal;
    if args.interpreted {
        options.runs = Runs::Ptx;
    }
    Gpu::with_driver(Arc::new(Fake::new(options)))
}

fn print_figures(name: &str, seconds: f64, key: &str, value: &Value) -> Outcome {
    let mut text = format!("{name:14} {} in {seconds:.1} s\n", if key == "error" { "FAILED" } else { "done" });
    match value {
        Value::Object(figures) => {
            figures.iter().for_each(|(what, value)| text.push_str(&format!("    {what:28} {value}\n")));
        }
        other => text.push_str(&format!("    {other}\n")),
    }
    print(&text)
}
