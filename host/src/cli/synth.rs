//! `perpetua synth`.

use super::{BYTES_BAR, Interrupted, Outcome, at_least, bytes, interrupt_flag, note, progress};
use perpetua::model::synth::PRESETS;
use perpetua::model::{SynthOptions, SynthSource, synth};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::Ordering;

#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("source").required(true).args(["preset", "config"])))]
pub(crate) struct Args {
    /// A real model's shapes.
    #[arg(long, value_name = "NAME", value_parser = clap::builder::PossibleValuesParser::new(PRESETS))]
    preset: Option<String>,
    /// A config.json to take the shapes from.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The folder to write; it must not exist or be empty.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Seed of the weights.
    #[arg(long, value_name = "S", default_value_t = 0, allow_negative_numbers = true, value_parser = at_least::<u64>(0))]
    seed: u64,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let interrupted = interrupt_flag()?;
    let source = match (&args.preset, &args.config) {
        (Some(name), _) => SynthSource::Preset(name),
        (None, Some(path)) => SynthSource::Config(path),
        (None, None) => unreachable!("clap asks for one of the two"),
    };
    let bar = progress(0, "writing weights", BYTES_BAR);
    let options = SynthOptions { seed: args.seed, ..SynthOptions::default() };
    let written = synth(source, &args.out, &options, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
        if interrupted.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    bar.finish_and_clear();
    if interrupted.load(Ordering::Relaxed) {
        return Err(Interrupted.into());
    }
    let summary = written?;
    note(&format!(
        "{}: {:.1} million weights, {} in {} file(s)",
        args.out.display(),
        summary.n_params as f64 / 1e6,
        bytes(summary.size_bytes),
        summary.weight_files.len()
    ));
    Ok(())
}
