//! Text to token ids and back, over `tokenizer.json`.
//!
//! Padding and truncation in the file are those of whoever saved it last, not of the model, so both are switched off;
//! sentence models ask for their own truncation.
//!
//! # Text while it is made
//! A token may end inside a character, and some decoders treat the first token of a text specially, so text cannot be
//! made token by token. [`DecodeStream`] decodes a short window of the last tokens again at each step and gives out what
//! is new. Laws:
//! - What it gives out is valid UTF-8, and what was given out is never taken back.
//! - The last few U+FFFD of a window are withheld: an unfinished character decodes to at most three of them (one per
//!   byte where the decoder works byte by byte). When the character completes they vanish; when it never does, they come
//!   out later, at the latest with [`DecodeStream::finish`].
//! - All pieces together are what decoding all tokens at once gives. (Decoders with byte fallback turn a valid character
//!   into U+FFFD when an invalid byte follows; here it was already given out, and stays.)
//! - A step costs the same however long the text is: the window is bounded.

use std::path::{Path, PathBuf};

use tokenizers::{TruncationParams, TruncationStrategy};

use super::error::ModelError;
use super::json::read_bytes;

/// Larger than any real tokenizer.json.
const MAX_TOKENIZER_BYTES: u64 = 512 << 20;

/// A model's tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    path: PathBuf,
    inner: tokenizers::Tokenizer,
}

impl Tokenizer {
    /// Reads a tokenizer.json.
    pub fn open(path: &Path) -> Result<Tokenizer, ModelError> {
        let bytes = read_bytes(path, MAX_TOKENIZER_BYTES)?;
        let fail = |e: &dyn std::fmt::Display| ModelError::Tokenizer {
            path: path.to_owned(),
            message: one_line(e),
        };
        let mut inner = tokenizers::Tokenizer::from_bytes(&bytes).map_err(|e| fail(&e))?;
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| fail(&e))?;
        Ok(Tokenizer {
            path: path.to_owned(),
            inner,
        })
    }

    /// From now on [`Tokenizer::encode`] gives at most `max_tokens` ids, special tokens included: the text's end is cut.
    pub fn truncate_to(&mut self, max_tokens: usize) -> Result<(), ModelError> {
        let n_special = self.n_special_tokens()?;
        if max_tokens <= n_special {
            return Err(ModelError::Text {
                message: format!("at most {max_tokens} tokens, of which {n_special} are special: no room for text"),
            });
        }
        let truncation = TruncationParams {
            max_length: max_tokens,
            strategy: TruncationStrategy::LongestFirst,
            ..TruncationParams::default()
        };
        self.inner
            .with_truncation(Some(truncation))
            .map_err(|e| ModelError::Text { message: one_line(&e) })?;
        Ok(())
    }

    /// How many tokens [`Tokenizer::encode`] adds to a text of its own.
    fn n_special_tokens(&self) -> Result<usize, ModelError> {
        Ok(self.encode("")?.len())
    }

    /// The ids of a text, with the special tokens that tokenizer.json says belong around it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        self.encode_fast(text, true)
    }

    /// The ids of a text that already holds its special tokens, as a chat template writes them.
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        self.encode_fast(text, false)
    }

    fn encode_fast(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, ModelError> {
        let encoding = self
            .inner
            .encode_fast(text, add_special_tokens)
            .map_err(|e| ModelError::Text { message: one_line(&e) })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of ids, without special tokens. Ids that the tokenizer does not know (a model's table may have more
    /// rows than its tokenizer has tokens) give no text.
    pub fn decode(&self, ids: &[u32]) -> Result<String, ModelError> {
        self.inner
            .decode(ids, true)
            .map_err(|e| ModelError::Text { message: one_line(&e) })
    }

    /// Text of tokens that come one by one.
    pub fn decode_stream(&self) -> DecodeStream<'_> {
        DecodeStream {
            tokenizer: self,
            window: Vec::new(),
            shown: String::new(),
            clean: Vec::new(),
        }
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
        self.inner
            .get_vocab(true)
            .values()
            .max()
            .map_or(0, |&id| id as usize + 1)
    }

    /// The file it was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Checks that every id is below `vocab_size`.
pub fn check_token_ids(ids: &[u32], vocab_size: usize) -> Result<(), ModelError> {
    match ids.iter().position(|&id| id as usize >= vocab_size) {
        Some(position) => Err(ModelError::TokenId {
            id: ids[position],
            position,
            vocab_size,
        }),
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
/// A longer window is cut where its text was complete.
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
        if len <= LONG_WINDOW_TOKENS {
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
