//! Text to token ids and back, over `tokenizer.json` and what the files beside it say.
//!
//! Padding and truncation in the file are those of whoever saved it last, not of the model, so both are switched off;
//! sentence models ask for their own truncation.
//!
//! # Text while it is made
//! A token may end inside a character, and some decoders treat the first token of a text specially, so text cannot be
//! made token by token. [`DecodeStream`] decodes a short window of the last tokens again at each step and gives out
//! what is new. Laws:
//! - What it gives out is valid UTF-8, and what was given out is never taken back.
//! - The last few U+FFFD of a window are withheld: an unfinished character decodes to at most three of them (one per
//!   byte where the decoder works byte by byte). When the character completes they vanish; when it never does, they
//!   come out later, at the latest with [`DecodeStream::finish`].
//! - All pieces together are what decoding all tokens at once gives. (Decoders with byte fallback turn a valid
//!   character into U+FFFD when an invalid byte follows; here it was already given out, and stays.)
//! - A step costs the same however long the text is: the window is bounded.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use serde_json::Value;
use tokenizers::normalizers::{Lowercase, NormalizerWrapper, Sequence};
use tokenizers::{Encoding, TruncationDirection};

use super::declared::Declared;
use super::error::ModelError;
use super::json::read_bytes;

/// Larger than any real tokenizer.json.
const MAX_TOKENIZER_BYTES: u64 = 512 << 20;

thread_local! {
    /// Whether a panic on this thread is caught, and told as an error.
    static IS_CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Whether a panic on this thread is being caught here, so that a program's panic hook need not tell of it.
pub fn is_panic_caught() -> bool {
    IS_CAUGHT.get()
}

/// What `call` into the library gives; its last words, if it panics: it does so on some damaged files.
fn caught<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    IS_CAUGHT.set(true);
    // What is left half done is a tokenizer that is not used, or a cache of it that is emptied.
    let outcome = catch_unwind(AssertUnwindSafe(call));
    IS_CAUGHT.set(false);
    outcome.map_err(|panic| {
        let words = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
        one_line(&words.unwrap_or("the tokenizer's library gave up on it"))
    })
}

/// A model's tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    path: PathBuf,
    inner: tokenizers::Tokenizer,
    /// The end that is cut off of a text that is too long.
    cuts: TruncationDirection,
    /// Ids of a text, where it is cut.
    most: Option<usize>,
}

impl Tokenizer {
    /// Reads a tokenizer.json, and the files beside it that change what it means.
    pub fn open(path: &Path) -> Result<Tokenizer, ModelError> {
        let bytes = read_bytes(path, MAX_TOKENIZER_BYTES)?;
        // The library panics on some files: on syntax errors inside a decoder, and when encoding with a template that
        // names a token it does not define. Both are checked before it looks, for better words than what it says then.
        let outline: Outline = serde_json::from_slice(&bytes)
            .map_err(|e| ModelError::Json { path: path.to_owned(), message: e.to_string() })?;
        if let Some(token) = undefined_token(&outline.post_processor) {
            let message =
                format!("the post-processor's template names {token}, which its special_tokens do not define");
            return Err(ModelError::Tokenizer { path: path.to_owned(), message });
        }
        let fail = |e: &dyn std::fmt::Display| ModelError::Tokenizer { path: path.to_owned(), message: one_line(e) };
        let inner = caught(|| tokenizers::Tokenizer::from_bytes(&bytes).map_err(|e| one_line(&e)));
        let mut inner = inner.and_then(|inner| inner).map_err(|e| fail(&e))?;
        let declared = Declared::open(path.parent().unwrap_or(Path::new("")))?;
        declared.apply(&mut inner).map_err(|e| fail(&e))?;
        // Of a truncation in the file only its side counts.
        let cuts = declared.truncation_side.or(inner.get_truncation().map(|truncation| truncation.direction));
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| fail(&e))?;
        Ok(Tokenizer { path: path.to_owned(), inner, cuts: cuts.unwrap_or_default(), most: None })
    }

    /// From now on [`Tokenizer::encode`] gives at most `max_tokens` ids, special tokens included: the text is cut at
    /// its end, or at its beginning where the files say so.
    ///
    /// # Errors
    /// No room for text.
    pub fn truncate_to(&mut self, max_tokens: usize) -> Result<(), ModelError> {
        self.room(max_tokens)?;
        self.most = Some(max_tokens);
        Ok(())
    }

    /// Of `max_tokens` those that a text may have, beside the special ones.
    fn room(&self, max_tokens: usize) -> Result<usize, ModelError> {
        let n_special = self.n_special_tokens()?;
        let room = max_tokens.checked_sub(n_special).filter(|room| *room > 0);
        room.ok_or_else(|| ModelError::Text {
            message: format!("at most {max_tokens} tokens, of which {n_special} are special: no room for text"),
        })
    }

    /// From now on texts are put in lower case first. Not before special tokens are found in them: `[SEP]` stays one.
    pub fn lower_case(&mut self) -> Result<(), ModelError> {
        let mut all = match self.inner.get_normalizer() {
            None => Vec::new(),
            Some(NormalizerWrapper::Sequence(all)) => all.as_ref().to_vec(),
            Some(one) => vec![one.clone()],
        };
        if !all.iter().any(|one| matches!(one, NormalizerWrapper::Lowercase(_))) {
            all.insert(0, Lowercase.into());
        }
        let lower = self.inner.with_normalizer(Some(Sequence::new(all)));
        lower.map_err(|e| ModelError::Tokenizer { path: self.path.clone(), message: one_line(&e) })?;
        Ok(())
    }

    /// How many tokens [`Tokenizer::encode`] adds to a text of its own.
    fn n_special_tokens(&self) -> Result<usize, ModelError> {
        Ok(self.encoding(|inner| inner.encode_fast("", true))?.len())
    }

    /// The ids of a text, with the special tokens that tokenizer.json says belong around it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        match self.most {
            Some(most) => Ok(self.encode_within(text, most)?.0),
            None => Ok(self.encoding(|inner| inner.encode_fast(text, true))?.get_ids().to_vec()),
        }
    }

    /// As [`Tokenizer::encode`], at most `max_tokens` ids, special tokens included; and whether the text was cut for
    /// that.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`]; no room for text.
    pub fn encode_within(&self, text: &str, max_tokens: usize) -> Result<(Vec<u32>, bool), ModelError> {
        let room = self.room(max_tokens)?;
        let mut bare = self.encoding(|inner| inner.encode_fast(text, false))?;
        let is_cut = bare.len() > room;
        if is_cut {
            bare.truncate(room, 0, self.cuts);
        }
        let whole = self.encoding(|inner| inner.post_process(bare, None, true))?;
        Ok((whole.get_ids().to_vec(), is_cut))
    }

    /// The ids of a text that already holds its special tokens, as a chat template writes them.
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        Ok(self.encoding(|inner| inner.encode_fast(text, false))?.get_ids().to_vec())
    }

    /// What `call` of the library gives.
    fn encoding(
        &self,
        call: impl FnOnce(&tokenizers::Tokenizer) -> tokenizers::Result<Encoding>,
    ) -> Result<Encoding, ModelError> {
        match caught(|| call(&self.inner).map_err(|e| one_line(&e))) {
            Ok(Ok(encoding)) => Ok(encoding),
            Ok(Err(message)) => Err(ModelError::Text { message }),
            // No text makes a sound tokenizer panic.
            Err(message) => Err(ModelError::Tokenizer { path: self.path.clone(), message }),
        }
    }

    /// The text of ids, without special tokens. Ids that the tokenizer does not know (a model's table may have more
    /// rows than its tokenizer has tokens) give no text.
    pub fn decode(&self, ids: &[u32]) -> Result<String, ModelError> {
        match caught(|| self.inner.decode(ids, true).map_err(|e| one_line(&e))) {
            Ok(decoded) => decoded.map_err(|message| ModelError::Text { message }),
            Err(message) => Err(ModelError::Tokenizer { path: self.path.clone(), message }),
        }
    }

    /// Text of tokens that come one by one.
    pub fn decode_stream(&self) -> DecodeStream<'_> {
        DecodeStream { tokenizer: self, window: Vec::new(), shown: String::new(), clean: Vec::new() }
    }

    /// The id of a token by its text: `<|im_end|>`.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The text of one token as the vocabulary writes it.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// One more than the largest id there is.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1)
    }

    /// The file it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The part of a tokenizer.json that is looked at here; everything else is only checked to be JSON.
#[derive(serde::Deserialize)]
struct Outline {
    #[serde(default)]
    post_processor: Value,
    /// Read only to be sure that every string in it can be.
    #[serde(default, rename = "decoder")]
    _decoder: Value,
}

/// A token that a template, here or in a sequence of processors, names without defining it.
fn undefined_token(processor: &Value) -> Option<&str> {
    if processor.get("type").and_then(Value::as_str) == Some("Sequence") {
        return processor.get("processors")?.as_array()?.iter().find_map(undefined_token);
    }
    ["single", "pair"]
        .iter()
        .filter_map(|key| processor.get(key)?.as_array())
        .flatten()
        .filter_map(|piece| piece.get("SpecialToken")?.get("id")?.as_str())
        .find(|token| processor.get("special_tokens").and_then(|defined| defined.get(token)).is_none())
}

/// Checks that every id is below `vocab_size`.
pub fn check_token_ids(ids: &[u32], vocab_size: usize) -> Result<(), ModelError> {
    match ids.iter().position(|&id| id as usize >= vocab_size) {
        Some(position) => Err(ModelError::TokenId { id: ids[position], position, vocab_size }),
        None => Ok(()),
    }
}

/// Text of tokens that come one by one; see the module head.
#[derive(Debug)]
pub struct DecodeStream<'t> {
    tokenizer: &'t Tokenizer,
    /// The last tokens: those not given out completely, and some before them as context.
    window: Vec<u32>,
    /// How much of the window's text has been given out.
    shown: String,
    /// Lengths of the window's beginnings whose text was complete, nothing withheld; ascending.
    clean: Vec<usize>,
}

/// An unfinished character has at most three bytes.
const MAX_WITHHELD_CHARS: usize = 3;
/// Tokens kept as context. The withheld characters come from at most nine tokens (three bytes each, and a token has at
/// least one), so a window cut to this length still withholds the same.
const CONTEXT_TOKENS: usize = 16;
/// A longer window is cut where its text was complete, when it is complete.
const LONG_WINDOW_TOKENS: usize = 48;
/// A window this long without such a place holds no text at all, and is cut anywhere.
const MAX_WINDOW_TOKENS: usize = 4 * LONG_WINDOW_TOKENS;

impl DecodeStream<'_> {
    /// Takes the next token and gives what text it makes certain, often all of its own, sometimes none.
    pub fn push(&mut self, id: u32) -> Result<String, ModelError> {
        self.window.push(id);
        let mut text = self.tokenizer.decode(&self.window)?;
        let sure = certain(&text);
        if !sure.starts_with(&self.shown) && !self.shown.starts_with(sure) && !self.clean.is_empty() {
            // The decoder takes back what it said (byte fallback). What was given out stays, and the rest starts anew.
            self.restart();
            text = self.tokenizer.decode(&self.window)?;
        }
        let sure = certain(&text);
        let new = sure.strip_prefix(self.shown.as_str()).unwrap_or_default().to_owned();
        self.shown.push_str(&new);
        if self.shown == text {
            self.clean.push(self.window.len());
        }
        self.shorten()?;
        Ok(new)
    }

    /// Whether the tokens so far end with a whole character: nothing is withheld.
    pub fn is_whole(&self) -> bool {
        self.window.len() == self.clean.last().copied().unwrap_or(0)
    }

    /// Gives what is still withheld: characters that were never finished, as U+FFFD.
    pub fn finish(mut self) -> Result<String, ModelError> {
        let text = self.tokenizer.decode(&self.window)?;
        if let Some(rest) = text.strip_prefix(self.shown.as_str()) {
            return Ok(rest.to_owned());
        }
        if self.clean.is_empty() {
            return Ok(String::new());
        }
        self.restart();
        self.tokenizer.decode(&self.window)
    }

    /// Forgets everything up to the last place where the text was complete.
    fn restart(&mut self) {
        let given = self.clean.last().copied().unwrap_or(0);
        self.window.drain(..given);
        self.clean.clear();
        self.shown.clear();
    }

    /// Keeps the window bounded, so that a step costs the same however long the text is.
    fn shorten(&mut self) -> Result<(), ModelError> {
        let len = self.window.len();
        // What the window shows would not be what it has shown while the decoder takes some of that back (byte
        // fallback).
        if len <= LONG_WINDOW_TOKENS || !self.is_whole() && len <= MAX_WINDOW_TOKENS {
            return Ok(());
        }
        let cut = match self.clean.iter().rev().find(|&&n| n + CONTEXT_TOKENS <= len) {
            Some(&clean) => clean,
            None if len > MAX_WINDOW_TOKENS => len - CONTEXT_TOKENS,
            None => return Ok(()),
        };
        self.window.drain(..cut);
        self.clean.retain(|&n| n > cut);
        self.clean.iter_mut().for_each(|n| *n -= cut);
        self.shown = certain(&self.tokenizer.decode(&self.window)?).to_owned();
        Ok(())
    }
}

/// A text without the U+FFFD at its end that may still become a character.
fn certain(text: &str) -> &str {
    let mut sure = text;
    for _ in 0..MAX_WITHHELD_CHARS {
        match sure.strip_suffix(char::REPLACEMENT_CHARACTER) {
            Some(shorter) => sure = shorter,
            None => break,
        }
    }
    sure
}

fn one_line(error: &dyn std::fmt::Display) -> String {
    error.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn fixture() -> Tokenizer {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-qwen3/tokenizer.json");
        Tokenizer::open(&path).expect("the fixture")
    }

    fn from_json(value: &Value) -> Result<Tokenizer, String> {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let path = dir.path().join("tokenizer.json");
        std::fs::write(&path, value.to_string()).expect("a file in it");
        Tokenizer::open(&path).map_err(|e| e.to_string())
    }

    /// A tokenizer as Llama 2 and Mistral have it: a mark for spaces, and a token per byte for what it does not know.
    fn byte_fallback() -> Tokenizer {
        let mut vocab = serde_json::Map::new();
        vocab.insert("<unk>".into(), 0.into());
        for byte in 0..=255 {
            vocab.insert(format!("<0x{byte:02X}>"), (byte + 1).into());
        }
        for token in ["\u{2581}", "a", "b", "\u{2581}a", "\u{2581}b"] {
            vocab.insert(token.into(), vocab.len().into());
        }
        from_json(&json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "pre_tokenizer": null,
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "\u{2581}"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"}]},
            "post_processor": null,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
                      "vocab": vocab, "merges": [["\u{2581}", "a"], ["\u{2581}", "b"]]},
        }))
        .expect("a tokenizer with byte fallback")
    }

    fn pieces(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
        let mut stream = tokenizer.decode_stream();
        let mut pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).expect("decodes")).collect();
        pieces.push(stream.finish().expect("decodes"));
        pieces
    }

    #[test]
    fn the_fixtures_prompt_has_the_expected_ids() {
        let tokenizer = fixture();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-qwen3.expected.safetensors");
        let expected = crate::model::Weights::open_file(&path).expect("the expected ids");
        let ids: Vec<u32> = expected
            .get("case0.input_ids")
            .expect("ids")
            .bytes
            .chunks_exact(8)
            .map(|b| b[0] as u32 | (b[1] as u32) << 8)
            .collect();
        let text = "The licence gives every user the freedom to";
        assert_eq!(tokenizer.encode(text).expect("encodes"), ids);
        assert_eq!(tokenizer.decode(&ids).expect("decodes"), text);
        assert_eq!((tokenizer.token_id("<|im_end|>"), tokenizer.token(2).as_deref()), (Some(2), Some("<|im_end|>")));
        assert_eq!(tokenizer.decode(&[0, 1, 2, 99_999]).expect("decodes"), "", "special and unknown ids have no text");
    }

    #[test]
    fn ids_are_checked_against_the_models_vocabulary() {
        assert!(check_token_ids(&[0, 1023], 1024).is_ok());
        assert_eq!(
            check_token_ids(&[5, 1024], 1024).expect_err("out of range").to_string(),
            "token id 1024 at position 1: expected 0 to 1023"
        );
    }

    #[test]
    fn half_characters_are_withheld() {
        for tokenizer in [fixture(), byte_fallback()] {
            let text = "a \u{6771}\u{4eac} \u{1f680} b";
            let ids = tokenizer.encode(text).expect("encodes");
            let pieces = pieces(&tokenizer, &ids);
            assert_eq!(pieces.concat(), text);
            assert!(pieces.iter().all(|p| !p.contains(char::REPLACEMENT_CHARACTER)), "{pieces:?}");
            // The first three bytes of the rocket never get their fourth.
            let cut = ids.len() - 3;
            let pieces = super::tests::pieces(&tokenizer, &ids[..cut]);
            assert!(pieces[..cut].iter().all(|p| !p.contains(char::REPLACEMENT_CHARACTER)), "{pieces:?}");
            assert!(pieces[cut].contains(char::REPLACEMENT_CHARACTER), "{pieces:?}");
        }
    }

    #[test]
    fn long_runs_of_bytes_stay_whole() {
        for tokenizer in [fixture(), byte_fallback()] {
            let text = "\u{1f680}".repeat(100);
            let ids = tokenizer.encode(&text).expect("encodes");
            assert!(pieces(&tokenizer, &ids).concat() == text);
        }
    }

    #[test]
    fn what_was_given_out_stays() {
        let tokenizer = byte_fallback();
        let id = |byte: u32| byte + 1;
        let ids = [id(0xe6), id(0x9d), id(0xb1), id(0xff), tokenizer.token_id("a").expect("a")];
        assert_eq!(pieces(&tokenizer, &ids).concat(), "\u{6771}\u{fffd}a");
    }

    #[test]
    fn truncation_keeps_the_special_tokens() {
        let mut value: Value = serde_json::from_slice(
            &std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-qwen3/tokenizer.json"))
                .expect("the fixture"),
        )
        .expect("JSON");
        value["padding"] = json!({"strategy": {"Fixed": 128}, "direction": "Right", "pad_to_multiple_of": null,
                                  "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"});
        value["truncation"] = json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
        value["post_processor"]["single"] = json!([
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}]);
        value["post_processor"]["special_tokens"] = json!({
            "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]},
            "<|im_end|>": {"id": "<|im_end|>", "ids": [2], "tokens": ["<|im_end|>"]}});
        let mut tokenizer = from_json(&value).expect("a tokenizer");
        let text = "one two three four five six seven eight nine ten";
        let whole = tokenizer.encode(text).expect("encodes");
        assert!(whole.len() > 10 && whole.len() < 100, "neither cut nor padded: {}", whole.len());
        assert_eq!(tokenizer.encode_rendered(text).expect("encodes"), whole[1..whole.len() - 1]);
        tokenizer.truncate_to(6).expect("room for text");
        let cut = tokenizer.encode(text).expect("encodes");
        assert_eq!((cut.len(), &cut[..5], cut[5]), (6, &whole[..5], 2));
        // At the other end, as either file says it; the one beside comes first.
        let left = json!({"truncation_side": "left"});
        value["truncation"]["direction"] = "Left".into();
        let right = json!({"truncation_side": "right"});
        for (files, is_left) in [(vec![(CONFIG, left)], true), (vec![], true), (vec![(CONFIG, right)], false)] {
            let mut tokenizer = beside(&value, &files).expect("a tokenizer");
            tokenizer.truncate_to(6).expect("room for text");
            let cut = tokenizer.encode(text).expect("encodes");
            let last = &whole[whole.len() - 5..];
            assert!(if is_left { cut[0] == 1 && cut[1..] == *last } else { cut[5] == 2 && cut[..5] == whole[..5] });
        }
        assert!(
            beside(&value, &[(CONFIG, json!({"truncation_side": "top"}))])
                .expect_err("no side")
                .contains("truncation_side")
        );
        assert!(tokenizer.truncate_to(2).expect_err("no room").to_string().contains("no room for text"));
    }

    /// A folder with a tokenizer.json and other files.
    fn beside(tokenizer: &Value, files: &[(&str, Value)]) -> Result<Tokenizer, String> {
        let dir = tempfile::tempdir().expect("a temporary folder");
        for (name, value) in files.iter().chain([&("tokenizer.json", tokenizer.clone())]) {
            std::fs::write(dir.path().join(name), value.to_string()).expect("a file in it");
        }
        Tokenizer::open(&dir.path().join("tokenizer.json")).map_err(|e| e.to_string())
    }

    fn fixture_json() -> Value {
        serde_json::from_slice(&std::fs::read(fixture().path()).expect("the fixture")).expect("JSON")
    }

    const CONFIG: &str = "tokenizer_config.json";

    /// What transformers 5.24 makes of the same files.
    #[test]
    fn tokens_that_only_other_files_have_are_added() {
        let id = |files: &[(&str, Value)]| beside(&fixture_json(), files).expect("a tokenizer").token_id("<tool>");
        let next = fixture().vocab_size() as u32;
        assert_eq!(id(&[(CONFIG, json!({"add_bos_token": true, "pad_token": null}))]), None);
        let flags = json!({"content": "<tool>", "lstrip": false, "rstrip": false, "normalized": false,
                           "single_word": false, "special": false});
        for files in [
            [(CONFIG, json!({"added_tokens_decoder": {"1020": flags}}))],
            [(CONFIG, json!({"extra_special_tokens": ["<tool>"]}))],
            [(CONFIG, json!({"extra_special_tokens": [], "additional_special_tokens": ["<tool>"]}))],
            [(CONFIG, json!({"extra_special_tokens": {"tool_token": "<tool>"}}))],
            [(CONFIG, json!({"tool_token": "<tool>"}))],
            [(CONFIG, json!({"bos_token": {"__type": "AddedToken", "content": "<tool>"}}))],
            [("added_tokens.json", json!({"<tool>": 1022}))],
            [("special_tokens_map.json", json!({"eos_token": {"content": "<tool>", "lstrip": true}}))],
        ] {
            assert_eq!(id(&files), Some(next), "{files:?}");
            let tokenizer = beside(&fixture_json(), &files).expect("a tokenizer");
            assert!(tokenizer.encode("a <tool> b").expect("encodes").contains(&next), "{files:?}");
        }
        // The newer file says all there is to say of added tokens.
        let old = [(CONFIG, json!({"added_tokens_decoder": {}})), ("added_tokens.json", json!({"<tool>": 1022}))];
        assert_eq!(id(&old), None);
        // One of the vocabulary's becomes a token of its own.
        let mut without = fixture_json();
        without["added_tokens"].as_array_mut().expect("a list").retain(|token| token["content"] != "<|im_end|>");
        let tokenizer = beside(&without, &[(CONFIG, json!({"eos_token": "<|im_end|>"}))]).expect("a tokenizer");
        let ids = tokenizer.encode("a<|im_end|>").expect("encodes");
        assert_eq!(tokenizer.token(ids[ids.len() - 1]).as_deref(), Some("<|im_end|>"));
        assert_eq!(tokenizer.decode(&ids).expect("decodes"), "a", "it is special");
        for (file, value, expected) in [
            (CONFIG, json!({"added_tokens_decoder": {"x": flags}}), "added_tokens_decoder.x"),
            (CONFIG, json!({"added_tokens_decoder": {"5": 1}}), "added_tokens_decoder.5: 1, expected a token"),
            (CONFIG, json!({"extra_special_tokens": [1]}), "extra_special_tokens: [1], expected a token"),
            ("added_tokens.json", json!({"<tool>": -1}), "<tool>: -1, expected a whole number"),
        ] {
            let message = beside(&fixture_json(), &[(file, value)]).expect_err(expected);
            assert!(message.contains(expected), "{message}");
        }
    }

    /// BERT's tokenizer, whose tokenizer.json keeps capitals, over a few words.
    fn bert(files: &[(&str, Value)]) -> Result<Vec<String>, String> {
        let words = ["[UNK]", "an", "An", "\u{e9}cole", "ecole", "\u{65e5}", "\u{65e5}\u{65e5}"];
        let vocab: serde_json::Map<_, _> =
            words.iter().enumerate().map(|(id, word)| ((*word).into(), id.into())).collect();
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "post_processor": null, "decoder": null,
            "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": false,
                           "strip_accents": false, "lowercase": false},
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                      "max_input_chars_per_word": 100, "vocab": vocab},
        });
        let tokenizer = beside(&tokenizer, files)?;
        let ids = tokenizer.encode("An \u{c9}cole \u{65e5}\u{65e5}").map_err(|e| e.to_string())?;
        Ok(ids.into_iter().filter_map(|id| tokenizer.token(id)).collect())
    }

    /// As transformers 5.24 has it.
    #[test]
    fn berts_flags_come_before_its_normalizer() {
        let as_it_is = ["An", "[UNK]", "\u{65e5}\u{65e5}"];
        let usual = ["an", "ecole", "\u{65e5}", "\u{65e5}"];
        let config = |value: Value| bert(&[(CONFIG, value)]).expect("a tokenizer");
        assert_eq!(bert(&[]).expect("a tokenizer"), as_it_is);
        assert_eq!(config(json!({"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": true})), as_it_is);
        assert_eq!(config(json!({"tokenizer_class": "BertTokenizer"})), usual);
        assert_eq!(config(json!({"tokenizer_class": "BertTokenizerFast", "do_lower_case": true})), usual);
        let flags =
            json!({"tokenizer_class": "BertTokenizer", "do_lower_case": false, "tokenize_chinese_chars": false});
        assert_eq!(config(flags), as_it_is);
        let accents = json!({"tokenizer_class": "BertTokenizer", "strip_accents": false});
        assert_eq!(config(accents), ["an", "\u{e9}cole", "\u{65e5}", "\u{65e5}"]);
        // A BERT that names no class has it.
        let model = |value: Value| bert(&[("config.json", value)]).expect("a tokenizer");
        assert_eq!(model(json!({"model_type": "bert"})), usual);
        assert_eq!(model(json!({"model_type": "roberta"})), as_it_is);
        let message = bert(&[(CONFIG, json!({"tokenizer_class": "BertTokenizer", "do_lower_case": 1}))]);
        assert!(message.expect_err("a number").contains("do_lower_case: 1, expected true or false"));
    }

    #[test]
    fn lower_case_leaves_special_tokens() {
        let mut tokenizer = fixture();
        let ids = |tokenizer: &Tokenizer, text: &str| tokenizer.encode(text).expect("encodes");
        let expected = ids(&tokenizer, "ab<|im_end|>c");
        tokenizer.lower_case().expect("a normalizer");
        assert_eq!(ids(&tokenizer, "aB<|im_end|>C"), expected);
        assert_ne!(ids(&tokenizer, "<|IM_END|>"), ids(&tokenizer, "<|im_end|>"));
        // Letter by letter: no other sigma at a word's end.
        assert_eq!(ids(&tokenizer, "\u{39f}\u{3a3}"), ids(&tokenizer, "\u{3bf}\u{3c3}"));
        tokenizer.lower_case().expect("again");
        assert_eq!(ids(&tokenizer, "aB<|im_end|>C"), expected);
    }

    #[test]
    fn what_is_no_tokenizer_is_refused() {
        let message = from_json(&json!({"version": "1.0"})).expect_err("no model");
        assert!(message.contains("not a usable tokenizer") && !message.contains('\n'), "{message}");
        assert!(from_json(&json!([])).is_err());
        // Both of these make the library panic when it sees them.
        let mut value: Value =
            serde_json::from_slice(&std::fs::read(fixture().path()).expect("the fixture")).expect("JSON");
        value["post_processor"]["single"] = json!([{"SpecialToken": {"id": "[CLS]", "type_id": 0}}]);
        assert!(from_json(&value).expect_err("not defined").contains("names [CLS], which"));
        value["post_processor"] = json!({"type": "Sequence", "processors": [value["post_processor"]]});
        assert!(from_json(&value).expect_err("not defined").contains("names [CLS], which"));
        let cut = tempfile::tempdir().expect("a temporary folder");
        let path = cut.path().join("tokenizer.json");
        std::fs::write(&path, r#"{"version": "1.0", "decoder": {"type": "ByteLevel", "trim"#).expect("a file in it");
        assert!(Tokenizer::open(&path).expect_err("cut").to_string().contains("not valid JSON: EOF"));
        let dir = tempfile::tempdir().expect("a temporary folder");
        let message = Tokenizer::open(&dir.path().join("tokenizer.json")).expect_err("nothing there").to_string();
        assert!(message.ends_with("no tokenizer.json"), "{message}");
    }

    /// A window that has become too long between two bytes of a character, while the decoder takes back the character
    /// before.
    #[test]
    fn nothing_is_given_twice_where_a_window_is_cut() {
        let tokenizer = byte_fallback();
        let character = tokenizer.encode("\u{e9}").expect("encodes").len();
        for before in 0..64 {
            let text = format!("{}{}", "a".repeat(before), "\u{e9}".repeat(40));
            let ids = tokenizer.encode(&text).expect("encodes");
            assert!(character > 1 && ids.len() > LONG_WINDOW_TOKENS);
            assert_eq!(pieces(&tokenizer, &ids).concat(), text, "{before} before");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Any tokens at all: the pieces are what decoding all at once gives.
        #[test]
        fn pieces_make_the_whole(ids in proptest::collection::vec(0u32..1030, 0..200)) {
            let tokenizer = fixture();
            prop_assert_eq!(pieces(&tokenizer, &ids).concat(), tokenizer.decode(&ids).expect("decodes"));
        }

        /// Mostly broken bytes, with windows cut inside them.
        #[test]
        fn broken_bytes_make_the_whole(bytes in proptest::collection::vec(prop_oneof![0x80u8..=0xff, any::<u8>()], 0..600)) {
            let tokenizer = fixture();
            let ids: Vec<u32> = bytes
                .iter()
                .filter_map(|&b| tokenizer.token_id(&crate::model::synth::byte_char(b).to_string()))
                .collect();
            prop_assert_eq!(ids.len(), bytes.len());
            let pieces = pieces(&tokenizer, &ids);
            prop_assert_eq!(pieces.concat(), String::from_utf8_lossy(&bytes));
        }

        /// Valid text through byte fallback, in which runs of bytes may be long.
        #[test]
        fn text_through_byte_fallback_is_whole(text in "[ab \u{e9}\u{6771}\u{1f680}]{0,60}") {
            let tokenizer = byte_fallback();
            let ids = tokenizer.encode(&text).expect("encodes");
            let pieces = pieces(&tokenizer, &ids);
            prop_assert_eq!(pieces.concat(), tokenizer.decode(&ids).expect("decodes"));
            prop_assert!(pieces.iter().all(|p| !p.contains(char::REPLACEMENT_CHARACTER)));
        }
    }
}
