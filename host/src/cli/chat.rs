//! `perpetua chat`.

use super::generate::{Choice, Made, Template, note_not_applied, report, stream};
use super::{ModelArgs, Outcome, at_least, note, on_every_interrupt, say, warm};
use perpetua::engine::DEFAULT_MAX_CONTEXT;
use perpetua::model::chat::ChatMessage;
use perpetua::{End, Engine, EngineConfig, GenerateOptions, Stopper};
use std::io::{BufRead, IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// What the model is told before the conversation.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    system: Option<String>,
    #[command(flatten)]
    template: Template,
    /// Tokens of an answer at most.
    #[arg(long, value_name = "N", default_value_t = 1024, allow_negative_numbers = true, value_parser = at_least::<usize>(0))]
    max_new_tokens: usize,
    #[command(flatten)]
    choice: Choice,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let options = GenerateOptions { reuse_prefix: true, ..args.choice.options(args.max_new_tokens) };
    options.check()?;
    let model = args.model.open()?;
    model.decoder()?;
    args.choice.note_unused();
    note_not_applied(&model);
    let mut messages: Vec<ChatMessage> = args.system.iter().map(|text| ChatMessage::new("system", text)).collect();
    // A model without a template, or whose template knows no system's words, says so before its weights are read.
    args.template.encode(&model, &[&messages[..], &[ChatMessage::new("user", "")]].concat())?;
    let usual = args.model.config(&model, DEFAULT_MAX_CONTEXT);
    let config = EngineConfig { prompt_lookup: args.choice.prompt_lookup, ..usual };
    let mut engine = super::resident(&model, &config)?;
    warm(&model)?;
    let answering = Arc::new(Mutex::new(None::<Stopper>));
    let stopped = answering.clone();
    // Ctrl-C ends the answer under way, or, where there is none, the conversation.
    on_every_interrupt(move || match stopped.lock().unwrap_or_else(PoisonError::into_inner).take() {
        Some(stopper) => stopper.stop(),
        None => std::process::exit(130),
    })?;
    let is_person = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
    if is_person {
        note("A line is a turn. Ctrl-C ends an answer, Ctrl-D the conversation.");
    }
    let mut lines = std::io::stdin().lock().lines();
    loop {
        if is_person {
            let _ = write!(std::io::stderr(), "> ");
        }
        let Some(line) = lines.next() else { return Ok(()) };
        let line = line.map_err(|error| format!("standard input: {}", super::plain(&error)))?;
        if line.trim().is_empty() {
            continue;
        }
        messages.push(ChatMessage::new("user", line));
        messages.push(answer(&mut engine, args, &messages, &options, &answering)?);
    }
}

/// Prints what the model says to `messages`, and returns it.
fn answer(
    engine: &mut Engine,
    args: &Args,
    messages: &[ChatMessage],
    options: &GenerateOptions,
    answering: &Mutex<Option<Stopper>>,
) -> Result<ChatMessage, Box<dyn std::error::Error>> {
    let model = engine.model().clone();
    let prompt = args.template.encode(&model, messages)?;
    let mut generation = engine.generate(&prompt, options)?;
    let known = generation.reused();
    *answering.lock().unwrap_or_else(PoisonError::into_inner) = Some(generation.stopper());
    let mut made = Made { parser: Some(model.reasoning_parser(&prompt)?), ..Made::default() };
    stream(&mut generation, prompt.len(), &mut made)?;
    answering.lock().unwrap_or_else(PoisonError::into_inner).take();
    let end = generation.end();
    drop(generation);
    if end == Some(End::ContextFull) {
        return Err(format!(
            "the context of {} tokens is full (see --max-context; the model allows {})",
            engine.context(),
            model.max_tokens()
        )
        .into());
    }
    if end == Some(End::MaxTokens) {
        say("the answer ends where it has as many tokens as it may have (see --max-new-tokens)");
    }
    let before = if known > 0 { format!("{known} tokens known | ") } else { String::new() };
    report(engine, args.model.device, &before, prompt.len() - known, made.ids.len());
    let reasoning = Some(made.reasoning).filter(|reasoning| !reasoning.is_empty());
    Ok(ChatMessage { reasoning, ..ChatMessage::new("assistant", made.answer) })
}
