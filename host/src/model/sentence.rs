//! Sentence embedding folders: what is done with the encoder's vectors, one per token.
//!
//! In comes a folder as sentence-transformers lays it out: modules.json names the steps (Transformer, Pooling,
//! Normalize), each in a folder of its own, the Transformer often in the top one. A folder without modules.json is a plain
//! BERT: mean pooling over all tokens, then normalised to length 1.

use std::path::{Component, Path, PathBuf};

use super::error::ModelError;
use super::json::{Fields, brief, read_value};

/// How the vectors of a sentence's tokens become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pooling {
    /// The mean over all tokens, special ones included.
    Mean,
    /// The vector of the first token, `[CLS]`.
    Cls,
}

/// What a sentence embedding folder says beyond its encoder's config.json.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentenceConfig {
    /// The folder with the encoder's config.json, tokenizer.json and weights.
    pub transformer_dir: PathBuf,
    /// How the tokens' vectors become one.
    pub pooling: Pooling,
    /// Whether the result is scaled to length 1.
    pub normalize: bool,
    /// Longer sentences are cut to this many tokens, special ones included; `None`: the encoder's longest input.
    pub max_seq_length: Option<usize>,
    /// Whether the text is put in lower case before the tokenizer sees it (which may do so itself).
    pub lower_case: bool,
    /// Put before every sentence; mostly empty.
    pub prompt: String,
    /// The vectors' length as the pooling's configuration has it, to be checked against the encoder's.
    pub dim: Option<usize>,
}

const MODULES: &str = "modules.json";
const SUPPORTED: &str = "Transformer, Pooling, Normalize, in this order";
/// Far above any encoder's.
const MAX_LENGTH: usize = 1 << 30;

impl SentenceConfig {
    /// Whether a folder is laid out as sentence-transformers does it.
    pub fn is_there(dir: &Path) -> bool {
        dir.join(MODULES).exists()
    }

    /// Reads a folder, with modules.json or without.
    pub fn open(dir: &Path) -> Result<SentenceConfig, ModelError> {
        let mut config = SentenceConfig {
            transformer_dir: dir.to_owned(),
            pooling: Pooling::Mean,
            normalize: true,
            max_seq_length: None,
            lower_case: false,
            prompt: String::new(),
            dim: None,
        };
        let path = dir.join(MODULES);
        if path.exists() {
            config.read_modules(dir, &path)?;
        }
        config.read_limits()?;
        Ok(config)
    }

    fn read_modules(&mut self, dir: &Path, path: &Path) -> Result<(), ModelError> {
        let value = read_value(path)?;
        let modules = value
            .as_array()
            .ok_or_else(|| ModelError::checkpoint(path, "expected a list of modules"))?;
        self.normalize = false;
        let mut include_prompt = true;
        let mut seen: Vec<&str> = Vec::new();
        for module in modules {
            let module = Fields::new(path, module)?;
            let full = module.text("type")?.ok_or_else(|| module.wrong("type", SUPPORTED))?;
            let kind = full.rsplit('.').next().unwrap_or(full);
            let folder = inside(dir, &module)?;
            match (kind, seen.as_slice()) {
                ("Transformer", []) => self.transformer_dir = folder,
                ("Pooling", ["Transformer"]) => include_prompt = self.read_pooling(&folder.join("config.json"))?,
                ("Normalize", ["Transformer", "Pooling"]) => self.normalize = true,
                _ => return Err(ModelError::unsupported(path, "modules", describe(modules), SUPPORTED)),
            }
            seen.push(kind);
        }
        if seen.len() < 2 {
            return Err(ModelError::unsupported(path, "modules", describe(modules), SUPPORTED));
        }
        self.read_prompt(&dir.join("config_sentence_transformers.json"))?;
        if !include_prompt && !self.prompt.is_empty() {
            return Err(ModelError::unsupported(
                path,
                "include_prompt",
                "false",
                "true where there is a default prompt",
            ));
        }
        Ok(())
    }

    /// Reads a pooling configuration; returns whether a prompt's tokens are pooled too.
    fn read_pooling(&mut self, path: &Path) -> Result<bool, ModelError> {
        let value = read_value(path)?;
        let fields = Fields::new(path, &value)?;
        let mut modes: Vec<String> = Vec::new();
        match fields.get("pooling_mode") {
            Some(serde_json::Value::String(mode)) => modes.push(mode.clone()),
            Some(serde_json::Value::Array(list)) => {
                modes.extend(list.iter().map(|m| m.as_str().map_or_else(|| brief(m), str::to_owned)));
            }
            Some(_) => return Err(fields.wrong("pooling_mode", "the name of a pooling")),
            None => {
                // A pooling without any of these keys takes the mean.
                if fields.flag("pooling_mode_mean_tokens")?.unwrap_or(true) {
                    modes.push("mean".to_owned());
                }
                for (key, _) in fields.entries().filter(|(k, _)| *k != "pooling_mode_mean_tokens") {
                    if let Some(mode) = key.strip_prefix("pooling_mode_")
                        && fields.flag(key)? == Some(true)
                    {
                        modes.push(mode.trim_end_matches("_tokens").trim_end_matches("_token").to_owned());
                    }
                }
            }
        }
        self.pooling = match modes.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            ["mean"] => Pooling::Mean,
            ["cls"] => Pooling::Cls,
            _ => {
                let given = if modes.is_empty() {
                    "none".to_owned()
                } else {
                    modes.join(" and ")
                };
                return Err(ModelError::unsupported(path, "pooling", given, "mean or cls"));
            }
        };
        self.dim = match fields.whole("word_embedding_dimension", 1..=1 << 20)? {
            Some(dim) => Some(dim),
            None => fields.whole("embedding_dimension", 1..=1 << 20)?,
        };
        Ok(fields.flag("include_prompt")?.unwrap_or(true))
    }

    fn read_prompt(&mut self, path: &Path) -> Result<(), ModelError> {
        if !path.exists() {
            return Ok(());
        }
        let value = read_value(path)?;
        let fields = Fields::new(path, &value)?;
        let Some(name) = fields.text("default_prompt_name")? else {
            return Ok(());
        };
        let prompts = fields.object("prompts")?;
        let prompt = prompts.as_ref().map(|p| p.text(name)).transpose()?.flatten();
        self.prompt = prompt
            .ok_or_else(|| fields.wrong("default_prompt_name", "a name in \"prompts\""))?
            .to_owned();
        Ok(())
    }

    fn read_limits(&mut self) -> Result<(), ModelError> {
        let path = self.transformer_dir.join("sentence_bert_config.json");
        if path.exists() {
            let value = read_value(&path)?;
            let fields = Fields::new(&path, &value)?;
            self.max_seq_length = fields.whole("max_seq_length", 1..=MAX_LENGTH)?;
            self.lower_case = fields.flag("do_lower_case")?.unwrap_or(false);
        }
        let path = self.transformer_dir.join("tokenizer_config.json");
        if self.max_seq_length.is_none() && path.exists() {
            let value = read_value(&path)?;
            // "No limit" is written as an absurdly large number here.
            let length = Fields::new(&path, &value)?
                .get("model_max_length")
                .and_then(serde_json::Value::as_u64);
            self.max_seq_length = length
                .and_then(|n| usize::try_from(n).ok())
                .filter(|n| (1..=MAX_LENGTH).contains(n));
        }
        Ok(())
    }

    /// The text as the tokenizer is to see it.
    pub fn prepare(&self, text: &str) -> String {
        let text = format!("{}{}", self.prompt, text);
        let text = text.trim();
        if self.lower_case {
            text.to_lowercase()
        } else {
            text.to_owned()
        }
    }
}

/// A module's folder, which must lie inside the model's.
fn inside(dir: &Path, module: &Fields<'_>) -> Result<PathBuf, ModelError> {
    let relative = Path::new(module.text("path")?.unwrap_or(""));
    if relative
        .components()
        .all(|c| matches!(c, Component::Normal(_) | Component::CurDir))
    {
        Ok(dir.join(relative))
    } else {
        Err(module.wrong("path", "a folder inside the model's"))
    }
}

fn describe(modules: &[serde_json::Value]) -> String {
    let names: Vec<_> = modules
        .iter()
        .filter_map(|m| m.get("type")?.as_str())
        .map(|full| full.rsplit('.').next().unwrap_or(full))
        .collect();
    if names.is_empty() {
        "none".to_owned()
    } else {
        names.join(", ")
    }
}
