//! `perpetua embed`.

use super::{
    Interrupted, ModelArgs, Outcome, interrupt_flag, progress, read_text, say, to_stdout, warm, writable, write_whole,
};
use perpetua::Embedder;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::borrow::Cow;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::Ordering;

#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("input").required(true).args(["file", "texts"])))]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Write the embeddings there instead: safetensors with `embeddings` f32 [n, dim]. A name that ends in .json or
    /// .jsonl gets the JSON lines.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// What the sentences are for, a prompt of the model's by its name: `query`, say, or `document` [default: the
    /// model's default prompt, if it has one].
    #[arg(long, value_name = "NAME")]
    prompt_name: Option<String>,
    /// A file of the sentences instead, one a line; - is standard input.
    #[arg(long = "in", value_name = "FILE")]
    file: Option<PathBuf>,
    /// The sentences.
    #[arg(value_name = "TEXT")]
    texts: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Outcome {
    writable(args.out.as_deref(), args.file.as_deref().into_iter().chain([&*args.model.model]))?;
    let texts = match &args.file {
        None => Cow::from(&args.texts),
        Some(file) => read_text(file)?.lines().map(str::to_owned).collect(),
    };
    if let (true, Some(file)) = (texts.is_empty(), &args.file) {
        return Err(format!("{}: no lines: expected a sentence on each", file.display()).into());
    }
    let interrupted = interrupt_flag()?;
    let model = args.model.open()?;
    model.sentence_model()?;
    args.model.check_sentences(&model)?;
    // Before weights are touched: the cache is as long as the longest sentence.
    let allowed = model.max_tokens();
    let most = args.model.max_context.unwrap_or(allowed).min(allowed);
    let encode = |text: &String| {
        let encoded = model.encode_sentence_within(args.prompt_name.as_deref(), text, most);
        encoded.map_err(|error| format!("{text:?}: {error}"))
    };
    let sentences = texts.iter().map(encode).collect::<Result<Vec<_>, _>>()?;
    let longest = sentences.iter().map(|(ids, _)| ids.len()).max().unwrap_or(0);
    let n_cut = sentences.iter().filter(|(_, is_cut)| *is_cut).count();
    if n_cut > 0 {
        let more =
            if most < allowed { format!(" (see --max-context; the model takes {allowed})") } else { String::new() };
        say(&format!("{n_cut} of {} sentences cut to {most} tokens{more}", texts.len()));
    }
    let mut embedder = Embedder::new(&model, &args.model.config(&model, longest))?;
    warm(&model)?;
    let bar = progress(texts.len() as u64, "embedding", "{msg} {bar:30} {pos}/{len} {eta}");
    let mut embeddings = Vec::with_capacity(texts.len());
    for (text, (ids, _)) in texts.iter().zip(&sentences) {
        if interrupted.load(Ordering::Relaxed) {
            return Err(Interrupted.into());
        }
        let embedding = embedder.embed_ids(ids).map_err(|error| format!("{text:?}: {error}"))?;
        embeddings.push(embedding);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let lines = |out: &mut dyn Write| {
        for (text, embedding) in texts.iter().zip(&embeddings) {
            writeln!(out, "{}", serde_json::json!({"text": text, "embedding": embedding}))?;
        }
        out.flush()
    };
    match &args.out {
        None => to_stdout(lines(&mut std::io::stdout().lock())),
        Some(path)
            if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("json") || e.eq_ignore_ascii_case("jsonl")) =>
        {
            write_whole(path, lines)
        }
        Some(path) => {
            let flat: Vec<f32> = embeddings.iter().flatten().copied().collect();
            let shape = vec![embeddings.len(), flat.len() / embeddings.len()];
            let view = TensorView::new(Dtype::F32, shape, bytemuck::cast_slice(&flat))?;
            let bytes = safetensors::serialize([("embeddings", view)], None)?;
            write_whole(path, |file| file.write_all(&bytes))
        }
    }
}
