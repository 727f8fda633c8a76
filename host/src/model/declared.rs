//! What the files beside tokenizer.json say of a tokenizer.
//!
//! In come tokenizer_config.json and, as in older folders, special_tokens_map.json and added_tokens.json; out goes what
//! transformers makes of a tokenizer.json with them: tokens that only they name are added, BERT's normalizer is the one
//! that its class has with their flags, and long texts may be cut at the left end.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};
use tokenizers::models::ModelWrapper;
use tokenizers::normalizers::BertNormalizer;
use tokenizers::{AddedToken, TruncationDirection};

use super::error::ModelError;
use super::json::{Fields, read_value};

const CONFIG: &str = "tokenizer_config.json";
const TOKENS: &str = "added_tokens_decoder";

/// See the module head.
#[derive(Debug, Default)]
pub(super) struct Declared {
    /// `bos_token` and the like, by their names.
    pub(super) named: Vec<(String, AddedToken)>,
    /// Those that have no name of their own.
    extra: Vec<AddedToken>,
    /// By their ids.
    numbered: BTreeMap<u32, AddedToken>,
    /// Whether these come from a file of before there were flags, which says nothing of tokens that the tokenizer has.
    is_older: bool,
    /// Which end of a text that is too long is cut off, where a file says it.
    pub(super) truncation_side: Option<TruncationDirection>,
    bert: Option<BertNormalizer>,
}

impl Declared {
    /// Reads a folder's files, of which all may be missing.
    pub(super) fn open(dir: &Path) -> Result<Declared, ModelError> {
        let of_file = |name: &str| -> Result<Map<String, Value>, ModelError> {
            let path = dir.join(name);
            match path.exists() {
                true => {
                    Ok(Fields::new(&path, &read_value(&path)?)?.entries().map(|(k, v)| (k.into(), v.clone())).collect())
                }
                false => Ok(Map::new()),
            }
        };
        let path = dir.join(CONFIG);
        let config = Value::Object(of_file(CONFIG)?);
        let fields = Fields::new(&path, &config)?;
        let mut declared = Declared {
            truncation_side: match fields.text("truncation_side")? {
                None => None,
                Some("left") => Some(TruncationDirection::Left),
                Some("right") => Some(TruncationDirection::Right),
                Some(_) => return Err(fields.wrong("truncation_side", "\"left\" or \"right\"")),
            },
            bert: bert(&fields, &of_file("config.json")?)?,
            ..Declared::default()
        };
        declared.read(&fields)?;
        if let Some(tokens) = fields.object(TOKENS)? {
            for (id, value) in tokens.entries() {
                let number = id.parse().map_err(|_| tokens.wrong(id, "an id and its token"))?;
                declared.numbered.insert(number, token(&tokens, id, value, false)?);
            }
            return Ok(declared);
        }
        // Files of before that key was there. What the first one has comes before what is in the configuration.
        const MAP: &str = "special_tokens_map.json";
        let (path, map) = (dir.join(MAP), Value::Object(of_file(MAP)?));
        declared.read(&Fields::new(&path, &map)?)?;
        declared.is_older = true;
        const ADDED: &str = "added_tokens.json";
        let (path, added) = (dir.join(ADDED), Value::Object(of_file(ADDED)?));
        let added = Fields::new(&path, &added)?;
        for (content, _) in added.entries() {
            const IDS: std::ops::RangeInclusive<usize> = 0..=u32::MAX as usize;
            let number = added.required_whole(content, IDS)? as u32;
            let is_special = declared.special().any(|token| token.content == content);
            declared.numbered.insert(number, AddedToken::from(content, is_special));
        }
        Ok(declared)
    }

    /// Tokens that stand for more than their text.
    fn special(&self) -> impl Iterator<Item = &AddedToken> {
        self.named.iter().map(|(_, token)| token).chain(&self.extra)
    }

    /// The special tokens that a file names.
    fn read(&mut self, fields: &Fields<'_>) -> Result<(), ModelError> {
        let mut name = |name: &str, token: AddedToken| match self.named.iter_mut().find(|(known, _)| known == name) {
            Some((_, known)) => *known = token,
            None => self.named.push((name.to_owned(), token)),
        };
        for (key, value) in fields.entries().filter(|(key, _)| key.ends_with("_token")) {
            // `add_bos_token` is no token.
            if value.is_string() || value.get("content").is_some() {
                name(key, token(fields, key, value, true)?);
            }
        }
        // The newer name, unless there is nothing.
        let is_filled = |key: &&str| {
            fields.get(key).is_some_and(|v| {
                v.as_array().is_none_or(|l| !l.is_empty()) && v.as_object().is_none_or(|m| !m.is_empty())
            })
        };
        let Some(key) = ["extra_special_tokens", "additional_special_tokens"].into_iter().find(is_filled) else {
            return Ok(());
        };
        match fields.get(key) {
            Some(Value::Object(by_name)) => {
                for (known, value) in by_name {
                    name(known, token(fields, key, value, true)?);
                }
            }
            Some(Value::Array(list)) => {
                for value in list {
                    let token = token(fields, key, value, true)?;
                    if self.extra.iter().all(|known| known.content != token.content) {
                        self.extra.push(token);
                    }
                }
            }
            _ => return Err(fields.wrong(key, "a list of tokens")),
        }
        Ok(())
    }

    /// Makes `tokenizer`, as its file has it, the one that these files say it is.
    pub(super) fn apply(&self, tokenizer: &mut tokenizers::Tokenizer) -> Result<(), tokenizers::Error> {
        if let Some(normalizer) = self.bert
            && matches!(tokenizer.get_model(), ModelWrapper::WordPiece(_))
        {
            tokenizer.with_normalizer(Some(normalizer))?;
        }
        let known = tokenizer.get_added_tokens_decoder();
        let is_new = |token: &AddedToken| match self.is_older {
            true => known.values().all(|known| known.content != token.content),
            false => known.values().all(|known| known != token),
        };
        let mut tokens: Vec<AddedToken> = self.numbered.values().filter(|token| is_new(token)).cloned().collect();
        for token in &mut tokens {
            token.special |= self.named.iter().any(|(_, named)| named.content == token.content);
        }
        const USUAL: [&str; 7] =
            ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
        let rank = |name: &str| USUAL.iter().position(|usual| *usual == name).unwrap_or(USUAL.len());
        let mut named: Vec<&(String, AddedToken)> = self.named.iter().collect();
        named.sort_by_key(|(name, _)| rank(name));
        for token in named.into_iter().map(|(_, token)| token).chain(&self.extra) {
            let is_there = |other: &AddedToken| other.content == token.content;
            if !known.values().any(is_there) && !tokens.iter().any(is_there) {
                tokens.push(token.clone());
            }
        }
        tokenizer.add_tokens(tokens)?;
        Ok(())
    }
}

/// A token: its text, or an object with its content and flags.
fn token(fields: &Fields<'_>, key: &str, value: &Value, is_special: bool) -> Result<AddedToken, ModelError> {
    if let Value::String(content) = value {
        return Ok(AddedToken::from(content, is_special));
    }
    let content = value.get("content").and_then(Value::as_str);
    let content = content.ok_or_else(|| fields.wrong(key, "a token, or an object with its content"))?;
    let flag = |name: &str| value.get(name).and_then(Value::as_bool);
    let is_special = is_special || flag("special").unwrap_or(false);
    Ok(AddedToken {
        single_word: flag("single_word").unwrap_or(false),
        lstrip: flag("lstrip").unwrap_or(false),
        rstrip: flag("rstrip").unwrap_or(false),
        normalized: flag("normalized").unwrap_or(!is_special),
        ..AddedToken::from(content, is_special)
    })
}

/// The normalizer of BERT's class, which is that of BERT models whose files name no other; `model` is their
/// config.json. It does not go by tokenizer.json.
fn bert(fields: &Fields<'_>, model: &Map<String, Value>) -> Result<Option<BertNormalizer>, ModelError> {
    let of_model = |key: &str| model.get(key).and_then(Value::as_str);
    let class = fields.text("tokenizer_class")?.or(of_model("tokenizer_class"));
    let is_bert = match class.map(|class| class.trim_end_matches("Fast")) {
        Some(class) => matches!(class, "BertTokenizer" | "DistilBertTokenizer"),
        None => of_model("model_type") == Some("bert"),
    };
    if !is_bert {
        return Ok(None);
    }
    let clean_text = true;
    let handle_chinese_chars = fields.flag("tokenize_chinese_chars")?.unwrap_or(true);
    let lowercase = fields.flag("do_lower_case")?.unwrap_or(true);
    Ok(Some(BertNormalizer::new(clean_text, handle_chinese_chars, fields.flag("strip_accents")?, lowercase)))
}
