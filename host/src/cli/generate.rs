//! `perpetua generate`.

use super::{
    DeviceName, Interrupted, ModelArgs, Outcome, TOKENS_BAR, at_least, is_broken_pipe, note, on_interrupt, progress,
    read_text, say, seconds, to_stdout, warm, within, writable, write_whole,
};
use perpetua::engine::Generation;
use perpetua::model::chat::ChatMessage;
use perpetua::model::{ReasoningParser, TurnPart};
use perpetua::{End, Engine, EngineConfig, GenerateOptions, Model, ModelError};
use perpetua_shared::limits::MAX_DRAFTS;
use std::borrow::Cow;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("input").required(true).args(["prompt", "prompt_file"])))]
pub(crate) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The prompt.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// A file that is the prompt, the line's end at its end included; - is standard input.
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// Put the prompt into the model's chat template, as the user's turn. What the model says to itself before it
    /// answers goes to stderr then.
    #[arg(long)]
    chat: bool,
    #[command(flatten)]
    template: Template,
    /// Tokens to make at most.
    #[arg(long, value_name = "N", default_value_t = 128, allow_negative_numbers = true, value_parser = at_least::<usize>(0))]
    max_new_tokens: usize,
    #[command(flatten)]
    choice: Choice,
    /// End the text after so many seconds, its prompt's included; loading the model does not count.
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = seconds)]
    max_seconds: Option<Duration>,
    /// Write the new token ids there, as a JSON array.
    #[arg(long, value_name = "FILE")]
    ids_out: Option<PathBuf>,
}

/// What a chat template is told.
#[derive(Debug, clap::Args)]
pub(super) struct Template {
    /// Give the chat template's variable NAME this value, JSON or else text: enable_thinking=false,
    /// reasoning_effort=low; may be given several times.
    #[arg(long = "set", value_name = "NAME=VALUE", allow_hyphen_values = true, value_parser = variable)]
    variables: Vec<(String, serde_json::Value)>,
}

impl Template {
    /// Token ids of a conversation up to the assistant's next turn.
    pub(super) fn encode(&self, model: &Model, messages: &[ChatMessage]) -> Result<Vec<u32>, ModelError> {
        let variables: Vec<_> = self.variables.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
        model.encode_chat_with(messages, &variables)
    }
}

fn variable(given: &str) -> Result<(String, serde_json::Value), String> {
    match given.split_once('=') {
        Some((name, value)) if !name.is_empty() => {
            // Python's words for what JSON has others for, or else text.
            let value = match value {
                "True" => true.into(),
                "False" => false.into(),
                "None" => serde_json::Value::Null,
                _ => serde_json::from_str(value).unwrap_or_else(|_| value.into()),
            };
            Ok((name.to_owned(), value))
        }
        _ => Err("expected NAME=VALUE".to_owned()),
    }
}

/// How tokens are chosen.
#[derive(Debug, clap::Args)]
pub(super) struct Choice {
    /// Draw tokens at this temperature instead of taking the likeliest.
    #[arg(long, value_name = "T", default_value_t = 0.0, allow_negative_numbers = true)]
    temperature: f32,
    /// Draw from the smallest set of tokens that has this probability.
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true)]
    top_p: f32,
    /// Draw from the K likeliest tokens.
    #[arg(long, value_name = "K", default_value_t = 0, allow_negative_numbers = true, value_parser = at_least::<usize>(0))]
    top_k: usize,
    /// Seed of the draws.
    #[arg(long, value_name = "S", default_value_t = 0, allow_negative_numbers = true, value_parser = at_least::<u64>(0))]
    seed: u64,
    /// Divide the logits of tokens that are there already, the prompt's too, by P (multiply those below 0); 1 does
    /// nothing [default: the model's]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    repetition_penalty: Option<f32>,
    /// End the text before TEXT, which is not printed; may be given several times.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    stop: Vec<String>,
    /// Guess up to N tokens from where the text repeats itself or its prompt, and verify them in one pass: the same
    /// text in less time where it does (on a GPU but for rounding).
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = within(1, MAX_DRAFTS))]
    pub(super) prompt_lookup: Option<usize>,
}

impl Choice {
    /// The options that these are, of a text of at most `max_new_tokens`.
    pub(super) fn options(&self, max_new_tokens: usize) -> GenerateOptions {
        GenerateOptions {
            max_new_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            seed: self.seed,
            repetition_penalty: self.repetition_penalty,
            stop_strings: self.stop.clone(),
            ..GenerateOptions::default()
        }
    }

    /// Says which options of a draw are given where nothing is drawn.
    pub(super) fn note_unused(&self) {
        let given = [("--top-p", self.top_p != 1.0), ("--top-k", self.top_k != 0), ("--seed", self.seed != 0)];
        let names: Vec<&str> = given.iter().filter(|(_, is_given)| *is_given).map(|(name, _)| *name).collect();
        if self.temperature == 0.0 && !names.is_empty() {
            say(&format!("without --temperature the likeliest token is taken: {} not used", names.join(", ")));
        }
    }
}

pub(crate) fn run(args: &Args) -> Outcome {
    let options = GenerateOptions { max_time: args.max_seconds, ..args.choice.options(args.max_new_tokens) };
    options.check()?;
    writable(args.ids_out.as_deref(), args.prompt_file.as_deref().into_iter().chain([&*args.model.model]))?;
    let prompt = match (&args.prompt, &args.prompt_file) {
        (Some(text), _) => Cow::from(text),
        (None, Some(file)) => read_text(file)?.into(),
        (None, None) => unreachable!("clap asks for one of the two"),
    };
    let model = args.model.open()?;
    model.decoder()?;
    let prompt = match args.chat {
        true => args.template.encode(&model, &[ChatMessage::new("user", prompt)])?,
        false => model.encode(&prompt)?,
    };
    if !args.chat && !args.template.variables.is_empty() {
        say("without --chat there is no template: --set not used");
    }
    args.choice.note_unused();
    note_not_applied(&model);
    let began = Instant::now();
    let usual = args.model.config(&model, prompt.len().saturating_add(args.max_new_tokens));
    let config = EngineConfig { prompt_lookup: args.choice.prompt_lookup, ..usual };
    let mut engine = super::resident(&model, &config)?;
    warm(&model)?;
    let loaded = began.elapsed();
    let mut generation = engine.generate(&prompt, &options)?;
    // Until there is something to print, Ctrl-C ends the program.
    let stopper = generation.stopper();
    on_interrupt(move || stopper.stop())?;
    let parser = if args.chat { Some(model.reasoning_parser(&prompt)?) } else { None };
    let mut made = Made { parser, ..Made::default() };
    let streamed = stream(&mut generation, prompt.len(), &mut made);
    let ids = made.ids;
    let end = generation.end();
    drop(generation);
    // That nobody reads the text any more takes nothing from the tokens there are.
    if let Some(path) = &args.ids_out
        && streamed.as_ref().err().is_none_or(|error| is_broken_pipe(&**error))
    {
        write_whole(path, |file| writeln!(file, "{}", serde_json::json!(ids)))?;
    }
    streamed?;
    if end == Some(End::ContextFull) {
        let (context, allowed) = (engine.context(), model.max_tokens());
        let more = if context < allowed { "see --max-context; the model allows" } else { "the model allows" };
        say(&format!("the text ends where the context of {context} tokens is full ({more} {allowed})"));
    }
    if end == Some(End::Deadline) {
        let seconds = args.max_seconds.unwrap_or_default().as_secs_f64();
        say(&format!(
            "the text ends where its time of {seconds} s is over ({} tokens made; see --max-seconds)",
            ids.len()
        ));
    }
    let load = format!(
        "load {:.0} ms (compile {:.1} ms) | ",
        loaded.as_secs_f64() * 1e3,
        engine.resident().compile_time().as_secs_f64() * 1e3
    );
    report(&engine, args.model.device, &load, prompt.len(), ids.len());
    if end == Some(End::Stopped) { Err(Interrupted.into()) } else { Ok(()) }
}

/// Says what the model's publisher asks for that would change the text and is not done.
pub(super) fn note_not_applied(model: &Model) {
    let asked: Vec<String> =
        model.generation().not_applied.iter().map(|(key, value)| format!("{key} {value}")).collect();
    if !asked.is_empty() {
        say(&format!("not applied of generation_config.json: {}", asked.join(", ")));
    }
}

/// What a generation has made.
#[derive(Debug, Default)]
pub(super) struct Made {
    pub(super) ids: Vec<u32>,
    /// Without one all is the answer.
    pub(super) parser: Option<ReasoningParser>,
    pub(super) answer: String,
    pub(super) reasoning: String,
}

/// Prints what `generation` makes as it is made, and a line's end, and adds it to `made`: answers on stdout, reasoning
/// on stderr, dimmed on a terminal. Shows how far its prompt of so many tokens has been read.
pub(super) fn stream(generation: &mut Generation<'_>, prompt: usize, made: &mut Made) -> Outcome {
    let bar = progress(prompt as u64, "reading prompt", TOKENS_BAR);
    // The bar draws on stderr from a thread of its own: no lock is held there.
    let (mut out, mut beside) = (std::io::stdout().lock(), std::io::stderr());
    let dim = if beside.is_terminal() { ["\x1b[2m", "\x1b[0m"] } else { [""; 2] };
    while !generation.is_ended() {
        let Some(token) = generation.poll(Duration::from_millis(50))? else {
            bar.set_position(generation.prompt_done() as u64);
            continue;
        };
        bar.finish_and_clear();
        made.ids.push(token.id);
        let said = match &mut made.parser {
            Some(parser) => parser.push(token.id, &token.text),
            None => Some((TurnPart::Answer, token.text.as_str())),
        };
        match said {
            Some((TurnPart::Reasoning, text)) => {
                made.reasoning.push_str(text);
                // Nobody may be listening.
                let _ = write!(beside, "{}{text}{}", dim[0], dim[1]).and_then(|()| beside.flush());
            }
            Some((TurnPart::Answer, text)) => {
                if made.answer.is_empty() {
                    end_line(&mut beside, &made.reasoning);
                }
                made.answer.push_str(text);
                to_stdout(out.write_all(text.as_bytes()).and_then(|()| out.flush()))?;
            }
            None => {}
        }
    }
    bar.finish_and_clear();
    if made.answer.is_empty() {
        end_line(&mut beside, &made.reasoning);
    }
    to_stdout(out.write_all(b"\n").and_then(|()| out.flush()))
}

/// Ends the line that `written` ends in, if it does in one.
fn end_line(out: &mut impl Write, written: &str) {
    if !written.is_empty() && !written.ends_with('\n') {
        let _ = writeln!(out);
    }
}

/// Says on stderr where the time went of a run that has read `prompt` tokens and made others, dimmed on a terminal.
pub(super) fn report(engine: &Engine, device: DeviceName, load: &str, prompt: usize, made: usize) {
    let dim = if std::io::stderr().is_terminal() { ("\x1b[2m", "\x1b[0m") } else { ("", "") };
    if device.is_simulated() {
        return note(&format!("{}{load}prompt {prompt} tokens | {made} tokens{}", dim.0, dim.1));
    }
    let stamps = engine.stamps();
    // When the first token was there.
    let first = engine.passes(prompt);
    if made == 0 || stamps.len() <= first {
        return;
    }
    let passes = stamps.len() - 1 - first;
    let fewer = if passes + 1 < made { format!(", {passes} passes") } else { String::new() };
    let prefill = stamps[first] - stamps[0];
    let decode = stamps[stamps.len() - 1] - stamps[first];
    let rate = |n: usize, time: Duration| n as f64 / time.as_secs_f64().max(1e-9);
    let made = match made - 1 {
        0 => "1 token".to_owned(),
        more => format!(
            "{made} tokens, {more} of them in {:.1} ms ({:.1}/s{fewer})",
            decode.as_secs_f64() * 1e3,
            rate(more, decode)
        ),
    };
    note(&format!(
        "{}{load}prompt {prompt} tokens in {:.1} ms ({:.0}/s) | {made}{}",
        dim.0,
        prefill.as_secs_f64() * 1e3,
        rate(prompt, prefill),
        dim.1
    ));
}
