//! What of an assistant's turn is reasoning, and what the answer.
//!
//! Models mark it in one of three ways, with tokens of their own:
//! - `<think>` and `</think>` around the reasoning, or `<seed:think>` and `</seed:think>`, or `[THINK]` and `[/THINK]`
//!   (Qwen3, GLM 4.5, MiniMax M2, SmolLM3, Seed-OSS, Mistral's and others). A template may end with the first: then a
//!   turn begins in the midst of it.
//! - `<|channel>thought`, a line's end, and `<channel|>` around it (Gemma 4): the first line is its name.
//! - Channels (gpt-oss's "harmony"):
//!   `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`. What is said in the
//!   channel `final`, or in none, is the answer, and what in any other reasoning; what stands between messages is
//!   neither.

use super::error::ModelError;
use super::tokenizer::Tokenizer;

/// What a piece of a turn is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TurnPart {
    /// What the model says to itself before it answers.
    Reasoning,
    /// What it answers.
    Answer,
}

/// Tells the one from the other, token by token. Of a model without such tokens all is the answer.
#[derive(Clone, Debug)]
pub struct ReasoningParser {
    marks: Marks,
    /// `None`: between messages.
    part: Option<TurnPart>,
    /// Of the channel's name, what has been read of it; in the midst of a part: it is still being read.
    channel: Option<String>,
    /// Nothing of the part has been given: the lines' ends that it begins with are not either.
    begins: bool,
}

#[derive(Clone, Debug)]
enum Marks {
    None,
    /// The token before and the one behind, and their texts.
    Around {
        open: (u32, &'static str),
        close: (u32, &'static str),
        /// The first line of what is between them is its name.
        is_named: bool,
    },
    /// What ends a message, or begins the next one, too.
    Channels {
        channel: u32,
        message: u32,
        ends: Vec<u32>,
    },
}

impl Marks {
    fn of(tokenizer: &Tokenizer) -> Marks {
        const NAMED: [&str; 2] = ["<|channel>", "<channel|>"];
        const AROUND: [[&str; 2]; 4] =
            [["<think>", "</think>"], ["<seed:think>", "</seed:think>"], ["[THINK]", "[/THINK]"], NAMED];
        let id = |text: &str| tokenizer.token_id(text);
        if let (Some(channel), Some(message)) = (id("<|channel|>"), id("<|message|>")) {
            let ends = ["<|start|>", "<|end|>", "<|call|>", "<|return|>"].into_iter().filter_map(id).collect();
            return Marks::Channels { channel, message, ends };
        }
        let both = |both: [&'static str; 2]| {
            let [open, close] = both;
            let is_named = both == NAMED;
            Some(Marks::Around { open: (id(open)?, open), close: (id(close)?, close), is_named })
        };
        AROUND.into_iter().find_map(both).unwrap_or(Marks::None)
    }
}

impl ReasoningParser {
    /// For the turn that follows `prompt`, a conversation as a template has written it.
    ///
    /// # Errors
    /// A tokenizer that cannot give the prompt's text.
    pub fn new(tokenizer: &Tokenizer, prompt: &[u32]) -> Result<ReasoningParser, ModelError> {
        let marks = Marks::of(tokenizer);
        let mut parser = ReasoningParser { marks, part: Some(TurnPart::Answer), channel: None, begins: false };
        match parser.marks.clone() {
            Marks::None => {}
            Marks::Around { open, close, is_named } => {
                // One with words behind it is not the template's, but what somebody has said.
                let last = prompt.iter().rposition(|id| [open.0, close.0].contains(id));
                let last = last.filter(|at| prompt[*at] == open.0).map(|at| tokenizer.decode(&prompt[at + 1..]));
                let rest = last.transpose()?;
                let name = rest.as_deref().filter(|_| is_named).map(|rest| rest.split_once('\n').unwrap_or((rest, "")));
                let is_begun = match name {
                    Some((name, rest)) => rest.trim().is_empty() && !name.contains(char::is_whitespace),
                    None => rest.as_deref().is_some_and(|rest| rest.trim().is_empty()),
                };
                parser.part = Some(if is_begun { TurnPart::Reasoning } else { TurnPart::Answer });
                let has_line = rest.is_some_and(|rest| rest.contains('\n'));
                parser.channel = (is_named && is_begun && !has_line).then(String::new);
            }
            Marks::Channels { channel, message, ends } => {
                let is_mark = |id: &u32| [channel, message].contains(id) || ends.contains(id);
                let mut rest = prompt;
                while let Some(at) = rest.iter().position(is_mark) {
                    // All that matters of the text between is a channel's name.
                    let name = if parser.channel.is_some() { tokenizer.decode(&rest[..at])? } else { String::new() };
                    parser.channel.iter_mut().for_each(|channel| channel.push_str(&name));
                    parser.mark(rest[at]);
                    rest = &rest[at + 1..];
                }
                if parser.channel.is_some() {
                    parser.channel = Some(tokenizer.decode(rest)?);
                }
            }
        }
        parser.begins = parser.part == Some(TurnPart::Reasoning);
        Ok(parser)
    }

    /// What token `id`, which completes `text`, adds to which part; nothing, if it is or belongs to what marks them.
    pub fn push<'t>(&mut self, id: u32, text: &'t str) -> Option<(TurnPart, &'t str)> {
        let before = self.part;
        if self.mark(id) {
            // What was still incomplete is of the part before.
            let own = match &self.marks {
                Marks::Around { open, .. } if open.0 == id => open.1,
                Marks::Around { close, .. } => close.1,
                _ => "",
            };
            let rest = text.strip_suffix(own).unwrap_or(text);
            return before.map(|part| (part, rest)).filter(|(_, rest)| !rest.is_empty());
        }
        let Some(part) = self.part else {
            self.channel.iter_mut().for_each(|channel| channel.push_str(text));
            return None;
        };
        let text = match (&self.channel, text.split_once('\n')) {
            (None, _) => text,
            (Some(_), None) => return None,
            (Some(_), Some((_, rest))) => {
                self.channel = None;
                rest
            }
        };
        let text = if self.begins { text.trim_start_matches(['\r', '\n']) } else { text };
        self.begins &= text.is_empty();
        (!text.is_empty()).then_some((part, text))
    }

    /// Whether token `id` is a mark, and what it does if it is.
    fn mark(&mut self, id: u32) -> bool {
        match &self.marks {
            Marks::Around { open, close, is_named } if [open.0, close.0].contains(&id) => {
                self.part = Some(if id == open.0 { TurnPart::Reasoning } else { TurnPart::Answer });
                self.channel = (*is_named && id == open.0).then(String::new);
            }
            Marks::Channels { channel, .. } if *channel == id => {
                (self.part, self.channel) = (None, Some(String::new()))
            }
            Marks::Channels { message, .. } if *message == id => {
                let is_answer = self.channel.take().is_none_or(|name| name.trim_start().starts_with("final"));
                self.part = Some(if is_answer { TurnPart::Answer } else { TurnPart::Reasoning });
            }
            Marks::Channels { ends, .. } if ends.contains(&id) => (self.part, self.channel) = (None, None),
            _ => return false,
        }
        self.begins = true;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::json::read_value;
    use serde_json::{Value, json};
    use std::path::Path;

    /// A fixture's tokenizer, with more tokens; those of gpt-oss are special, so that they have no text.
    fn tokenizer(more: &[&str], special: bool) -> Tokenizer {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-qwen3/tokenizer.json");
        let mut file = read_value(&fixture).expect("JSON");
        let first = file["model"]["vocab"].as_object().expect("tokens").len();
        for (id, token) in (first..).zip(more) {
            file["added_tokens"].as_array_mut().expect("a list").push(json!({
                "id": id, "content": token, "lstrip": false, "rstrip": false, "normalized": false, "single_word": false, "special": special,
            }));
            file["model"]["vocab"][*token] = Value::from(id);
        }
        let dir = tempfile::tempdir().expect("a temporary folder");
        let path = dir.path().join("tokenizer.json");
        std::fs::write(&path, file.to_string()).expect("written");
        Tokenizer::open(&path).expect("a tokenizer")
    }

    /// What a turn after `prompt` says in each part, told token by token.
    fn parts(tokenizer: &Tokenizer, prompt: &str, turn: &str) -> [String; 2] {
        let ids = |text| tokenizer.encode_rendered(text).expect("ids");
        let mut parser = ReasoningParser::new(tokenizer, &ids(prompt)).expect("a parser");
        let (mut stream, mut said) = (tokenizer.decode_stream(), [String::new(), String::new()]);
        for id in ids(turn) {
            let text = stream.push(id).expect("text");
            if let Some((part, text)) = parser.push(id, &text) {
                said[usize::from(part == TurnPart::Answer)].push_str(text);
            }
        }
        said
    }

    #[test]
    fn what_stands_between_thoughts_marks_is_reasoning() {
        for marks in [["<think>", "</think>"], ["<seed:think>", "</seed:think>"], ["[THINK]", "[/THINK]"]] {
            let tokenizer = tokenizer(&marks, false);
            let [open, close] = marks;
            for (prompt, turn, expected) in [
                ("Hi", format!("{open}\nLet me see.\n{close}\n\nYes.\n"), ["Let me see.\n", "Yes.\n"]),
                // The template has written the mark, or that there is to be no reasoning.
                (&format!("Hi{open}\n"), format!("Well.{close}Yes"), ["Well.", "Yes"]),
                (&format!("Hi{open}\n\n{close}\n\n"), "\nYes".to_owned(), ["", "\nYes"]),
                ("Hi", "No reasoning".to_owned(), ["", "No reasoning"]),
                // Somebody asks what the mark means.
                (&format!("What is {open} for?"), "\nThis.".to_owned(), ["", "\nThis."]),
                ("Hi", format!("{open}never ended"), ["never ended", ""]),
                ("Hi", format!("a{open}b{close}c{open}d{close}e"), ["bd", "ace"]),
            ] {
                assert_eq!(parts(&tokenizer, prompt, &turn), expected, "{prompt}{turn}");
            }
        }
    }

    #[test]
    fn a_thoughts_first_line_is_its_name() {
        for special in [false, true] {
            let tokenizer = tokenizer(&["<|channel>", "<channel|>"], special);
            for (prompt, turn, expected) in [
                ("Hi", "<|channel>thought\nLet me see.\n<channel|>Yes.\n", ["Let me see.\n", "Yes.\n"]),
                // The template has written the mark, a part of the name, or that there is to be no reasoning.
                ("Hi<|channel>thought\n", "Well.<channel|>Yes", ["Well.", "Yes"]),
                ("Hi<|channel>tho", "ught\nWell.<channel|>Yes", ["Well.", "Yes"]),
                ("Hi<|channel>thought\n<channel|>", "Yes\nno", ["", "Yes\nno"]),
                ("What is <|channel> for?\nmodel\n", "This", ["", "This"]),
                ("Hi", "No reasoning", ["", "No reasoning"]),
            ] {
                assert_eq!(parts(&tokenizer, prompt, turn), expected, "{prompt}{turn}");
            }
        }
    }

    #[test]
    fn what_is_said_in_the_last_channel_is_the_answer() {
        let marks = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>"];
        let tokenizer = tokenizer(&marks, true);
        let user = "<|start|>user<|message|>Hi<|end|><|start|>assistant";
        for (prompt, turn, expected) in [
            (
                user,
                "<|channel|>analysis<|message|>Well.<|end|><|start|>assistant<|channel|>final<|message|>\nYes.<|return|>",
                ["Well.", "Yes."],
            ),
            (user, "<|channel|>commentary to=functions.x<|message|>{}<|call|>", ["{}", ""]),
            (user, "<|message|>Yes", ["", "Yes"]),
            // A template may have written the channel, or a part of its name.
            (&format!("{user}<|channel|>final<|message|>"), "Yes", ["", "Yes"]),
            (&format!("{user}<|channel|>ana"), "lysis<|message|>Well", ["Well", ""]),
            // Text that is no conversation.
            ("Once upon", " a time", ["", " a time"]),
        ] {
            assert_eq!(parts(&tokenizer, prompt, turn), expected, "{prompt}{turn}");
        }
    }

    #[test]
    fn without_marks_all_is_the_answer() {
        assert_eq!(parts(&tokenizer(&[], false), "Hi", "\n<think>Yes"), ["", "\n<think>Yes"]);
    }

    #[test]
    fn a_characters_beginning_is_of_the_part_before() {
        let tokenizer = tokenizer(&["<think>", "</think>"], false);
        let [open, close] = ["<think>", "</think>"].map(|mark| tokenizer.token_id(mark).expect("it has one"));
        let mut parser = ReasoningParser::new(&tokenizer, &[open]).expect("a parser");
        assert_eq!(parser.push(5, "\n"), None);
        assert_eq!(parser.push(close, "\u{fffd}</think>"), Some((TurnPart::Reasoning, "\u{fffd}")));
        assert_eq!(parser.push(5, "\n"), None);
        assert_eq!(parser.push(6, "a\n"), Some((TurnPart::Answer, "a\n")));
        assert_eq!(parser.push(5, "\n"), Some((TurnPart::Answer, "\n")));
    }
}
