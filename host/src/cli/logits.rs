//! `perpetua logits`.

use super::{ModelArgs, Outcome, TOKENS_BAR, at_least, progress, read_text, resident, warm, writable, write_whole};
use perpetua::{Engine, EngineConfig, Model};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("input").required(true).args(["ids", "prompt", "prompt_file"])))]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Token ids, separated by commas.
    #[arg(long, value_name = "1,2,3", value_delimiter = ',', allow_negative_numbers = true, value_parser = at_least::<u32>(0))]
    ids: Option<Vec<u32>>,
    /// A text to tokenize instead.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// A file to tokenize instead, the line's end at its end included; - is standard input.
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// Where the logits go: safetensors with `input_ids` i64 [T] and `logits` f32 [T, vocab].
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

/// Rows of a pass: logits of more at once would cost memory for nothing.
const CHUNK: usize = 128;

pub(crate) fn run(args: &Args) -> Outcome {
    writable([&*args.out], args.prompt_file.as_deref().into_iter().chain([&*args.model.model]))?;
    let read = args.prompt_file.as_deref().map(read_text).transpose()?;
    let model = args.model.open()?;
    model.decoder()?;
    let ids = match (&args.ids, args.prompt.as_ref().or(read.as_ref())) {
        (Some(ids), _) => ids.clone(),
        (None, Some(prompt)) => model.encode(prompt)?,
        (None, None) => unreachable!("clap asks for one of the three"),
    };
    let mut engine = engine(&args.model, &model, ids.len())?;
    let bar = progress(ids.len() as u64, "prefill", TOKENS_BAR);
    let logits = engine.logits(&ids, |done| bar.set_position(done as u64))?;
    bar.finish_and_clear();
    write(&args.out, &ids, &logits, logits.len() / ids.len())
}

/// What makes the logits of up to `positions` tokens.
pub(super) fn engine(args: &ModelArgs, model: &Model, positions: usize) -> Result<Engine, Box<dyn std::error::Error>> {
    let config =
        EngineConfig { all_logits: true, chunks: vec![positions.clamp(1, CHUNK)], ..args.config(model, positions) };
    let engine = resident(model, &config)?;
    warm(model)?;
    Ok(engine)
}

/// Writes `logits`, `[ids.len(), vocab]`, and the ids as safetensors, from where they lie: they may be most of memory.
pub(super) fn write(path: &Path, ids: &[u32], logits: &[f32], vocab: usize) -> Outcome {
    let wide: Vec<i64> = ids.iter().map(|id| i64::from(*id)).collect();
    let parts: [&[u8]; 2] = [bytemuck::cast_slice(&wide), bytemuck::cast_slice(logits)];
    let (first, all) = (parts[0].len(), parts[0].len() + parts[1].len());
    let info = |dtype, shape, data_offsets| TensorInfo { dtype, shape, data_offsets };
    let tensors = vec![
        ("input_ids".to_owned(), info(Dtype::I64, vec![ids.len()], (0, first))),
        ("logits".to_owned(), info(Dtype::F32, vec![ids.len(), vocab], (first, all))),
    ];
    let mut header = serde_json::to_vec(&Metadata::new(None, tensors)?)?;
    // So that the data is aligned for its elements.
    header.resize(header.len().next_multiple_of(size_of::<u64>()), b' ');
    write_whole(path, |file| {
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(&header)?;
        parts.iter().try_for_each(|part| file.write_all(part))
    })
}
