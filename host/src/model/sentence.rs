//! Sentence embedding folders: what is done with the encoder's vectors, one per token.
//!
//! In comes a folder as sentence-transformers lays it out: modules.json names the steps (Transformer, Pooling, Dense,
//! Normalize), each in a folder of its own, the Transformer often in the top one. A folder without modules.json is a
//! plain BERT: mean pooling over all tokens, not normalised.

use std::path::{Component, Path, PathBuf};

use super::error::ModelError;
use super::json::{Fields, brief, read_value};

/// How the vectors of a sentence's tokens become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Pooling {
    /// The mean over all tokens, special ones included.
    Mean,
    /// The vector of the first token, `[CLS]`.
    Cls,
    /// The vector of the last token, special ones included: the one that a decoder has seen all others at.
    LastToken,
}

/// What a sentence embedding folder says beyond its encoder's config.json.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentenceConfig {
    /// The folder with the encoder's config.json, tokenizer.json and weights.
    pub transformer_dir: PathBuf,
    /// How the tokens' vectors become one.
    pub pooling: Pooling,
    /// Linear layers after the pooling, one after the other.
    pub dense: Vec<Dense>,
    /// Whether the result is scaled to length 1.
    pub normalize: bool,
    /// Longer sentences are cut to this many tokens, special ones included; `None`: the encoder's longest input.
    pub max_seq_length: Option<usize>,
    /// Whether the tokenizer is to put texts in lower case (it may do so by itself).
    pub lower_case: bool,
    /// Texts to put before a sentence that say what it is for, by their names. Every model has `query` and `document`,
    /// be they empty.
    pub prompts: Vec<(String, String)>,
    /// The one that is put before a sentence unless told otherwise.
    pub default_prompt: Option<String>,
    /// Which file says that a prompt's tokens are not pooled; `None`: they are.
    pub prompt_left_out_by: Option<PathBuf>,
    /// How many of the result's elements are kept, the first ones, which are not scaled again; `None`: all.
    pub truncate_dim: Option<usize>,
    /// The vectors' length as the pooling's configuration has it, to be checked against the encoder's.
    pub dim: Option<usize>,
}

/// A linear layer after the pooling. Its tensors are in a file of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dense {
    /// The folder they are in.
    pub folder: PathBuf,
    /// What stands before their names, `linear.weight` and `linear.bias`.
    pub prefix: String,
    /// Elements of what it reads.
    pub in_features: usize,
    /// Elements of what it makes.
    pub out_features: usize,
    /// Whether it has a bias.
    pub has_bias: bool,
}

impl Dense {
    /// Its tensors' names and shapes, the matrix first.
    pub fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let named = |name: &str, shape: &[usize]| (format!("{}linear.{name}", self.prefix), shape.to_vec());
        let mut tensors = vec![named("weight", &[self.out_features, self.in_features])];
        tensors.extend(self.has_bias.then(|| named("bias", &[self.out_features])));
        tensors
    }
}

const MODULES: &str = "modules.json";
const SUPPORTED: &str = "Transformer, Pooling, any number of Dense, Normalize, in this order";
/// Where the Transformer's settings are, in the order that sentence-transformers looks for them.
const SETTINGS: [&str; 7] = [
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
];
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
            dense: Vec::new(),
            normalize: false,
            max_seq_length: None,
            lower_case: false,
            prompts: no_prompts(),
            default_prompt: None,
            prompt_left_out_by: None,
            truncate_dim: None,
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
        let modules = value.as_array().ok_or_else(|| ModelError::checkpoint(path, "expected a list of modules"))?;
        let mut seen: Vec<&str> = Vec::new();
        for module in modules {
            let module = Fields::new(path, module)?;
            let full = module.text("type")?.ok_or_else(|| module.wrong("type", SUPPORTED))?;
            let kind = full.rsplit('.').next().unwrap_or(full);
            let folder = inside(dir, &module)?;
            match (kind, seen.as_slice()) {
                ("Transformer", []) => self.transformer_dir = folder,
                ("Pooling", ["Transformer"]) => self.read_pooling(&folder.join("config.json"))?,
                ("Dense", ["Transformer", "Pooling", ..]) if !self.normalize => self.read_dense(&folder)?,
                ("Normalize", ["Transformer", "Pooling", ..]) if !self.normalize => self.normalize = true,
                _ => return Err(ModelError::unsupported(path, "modules", describe(modules), SUPPORTED)),
            }
            seen.push(kind);
        }
        if seen.len() < 2 {
            return Err(ModelError::unsupported(path, "modules", describe(modules), SUPPORTED));
        }
        self.read_settings(&dir.join("config_sentence_transformers.json"))?;
        self.prompt(None).map(|_| ())
    }

    fn read_pooling(&mut self, path: &Path) -> Result<(), ModelError> {
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
                for (key, _) in fields.entries() {
                    if let Some(mode) = key.strip_prefix("pooling_mode_")
                        && fields.flag(key)? == Some(true)
                    {
                        modes.push(mode.trim_end_matches("_tokens").trim_end_matches("_token").to_owned());
                    }
                }
                // Where no key says yes, it is the mean.
                if modes.is_empty() {
                    modes.push("mean".to_owned());
                }
            }
        }
        self.pooling = match modes.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            ["mean"] => Pooling::Mean,
            ["cls"] => Pooling::Cls,
            ["lasttoken"] => Pooling::LastToken,
            _ => {
                let given = if modes.is_empty() { "none".to_owned() } else { modes.join(" and ") };
                return Err(ModelError::unsupported(path, "pooling", given, "mean, cls or lasttoken"));
            }
        };
        self.dim = match fields.whole("word_embedding_dimension", 1..=1 << 20)? {
            Some(dim) => Some(dim),
            None => fields.whole("embedding_dimension", 1..=1 << 20)?,
        };
        self.prompt_left_out_by = fields.flag("include_prompt")?.filter(|pools| !pools).map(|_| path.to_owned());
        Ok(())
    }

    fn read_dense(&mut self, folder: &Path) -> Result<(), ModelError> {
        let path = folder.join("config.json");
        let value = read_value(&path)?;
        let fields = Fields::new(&path, &value)?;
        // Where no key says it, it is the hyperbolic tangent.
        let activation = fields.text("activation_function")?.unwrap_or("Tanh");
        if activation.rsplit('.').next() != Some("Identity") {
            return Err(ModelError::unsupported(&path, "activation_function", activation, "Identity"));
        }
        for key in ["module_input_name", "module_output_name"] {
            if fields.text(key)?.is_some_and(|name| name != "sentence_embedding") {
                return Err(fields.unsupported(key, "\"sentence_embedding\""));
            }
        }
        if fields.flag("use_residual")? == Some(true) {
            return Err(fields.unsupported("use_residual", "false"));
        }
        let in_features = fields.required_whole("in_features", 1..=1 << 20)?;
        let before = self.dense.last().map_or(self.dim, |dense| Some(dense.out_features));
        if let Some(before) = before.filter(|before| *before != in_features) {
            return Err(fields.wrong("in_features", format!("{before}, as the module before has it")));
        }
        self.dense.push(Dense {
            folder: folder.to_owned(),
            prefix: format!("{}.", folder.file_name().unwrap_or_default().to_string_lossy()),
            in_features,
            out_features: fields.required_whole("out_features", 1..=1 << 20)?,
            has_bias: fields.flag("bias")?.unwrap_or(true),
        });
        Ok(())
    }

    fn read_settings(&mut self, path: &Path) -> Result<(), ModelError> {
        if !path.exists() {
            return Ok(());
        }
        let value = read_value(path)?;
        let fields = Fields::new(path, &value)?;
        self.truncate_dim = fields.whole("truncate_dim", 1..=MAX_LENGTH)?;
        if let Some(prompts) = fields.object("prompts")? {
            for (name, prompt) in prompts.entries() {
                let text = match prompt {
                    serde_json::Value::Null => "",
                    prompt => prompt.as_str().ok_or_else(|| prompts.wrong(name, "a text"))?,
                };
                match self.prompts.iter_mut().find(|(known, _)| known == name) {
                    Some((_, known)) => *known = text.to_owned(),
                    None => self.prompts.push((name.to_owned(), text.to_owned())),
                }
            }
        }
        let Some(name) = fields.text("default_prompt_name")? else {
            return Ok(());
        };
        if !self.prompts.iter().any(|(known, _)| known == name) {
            return Err(fields.wrong("default_prompt_name", "a name in \"prompts\""));
        }
        self.default_prompt = Some(name.to_owned());
        Ok(())
    }

    fn read_limits(&mut self) -> Result<(), ModelError> {
        for name in SETTINGS {
            let path = self.transformer_dir.join(name);
            if !path.exists() {
                continue;
            }
            let value = read_value(&path)?;
            let fields = Fields::new(&path, &value)?;
            // The first file that says something.
            if fields.entries().next().is_some() {
                self.read_transformer(&fields)?;
                break;
            }
        }
        let path = self.transformer_dir.join("tokenizer_config.json");
        if self.max_seq_length.is_none() && path.exists() {
            let value = read_value(&path)?;
            // "No limit" is written as an absurdly large number here.
            let length = Fields::new(&path, &value)?.get("model_max_length").and_then(serde_json::Value::as_u64);
            self.max_seq_length = length.and_then(|n| usize::try_from(n).ok()).filter(|n| (1..=MAX_LENGTH).contains(n));
        }
        Ok(())
    }

    /// The Transformer module's own settings.
    fn read_transformer(&mut self, fields: &Fields<'_>) -> Result<(), ModelError> {
        self.max_seq_length = fields.whole("max_seq_length", 1..=MAX_LENGTH)?;
        self.lower_case = fields.flag("do_lower_case")?.unwrap_or(false);
        // What it hands to other libraries, under its older and newer names. Some of that changes nothing here.
        for (key, harmless) in [
            ("model_args", &["attn_implementation", "torch_dtype", "dtype", "add_pooling_layer"][..]),
            ("model_kwargs", &["attn_implementation", "torch_dtype", "dtype", "add_pooling_layer"]),
            ("tokenizer_args", &["model_max_length"]),
            ("processor_kwargs", &["model_max_length"]),
            ("config_args", &[]),
            ("config_kwargs", &[]),
            ("processing_kwargs", &[]),
        ] {
            let Some(given) = fields.object(key)? else { continue };
            let is_heeded = |name: &str| name == "trust_remote_code" || harmless.contains(&name);
            if let Some((name, _)) = given.entries().find(|(name, value)| !value.is_null() && !is_heeded(name)) {
                return Err(given.unsupported(name, "a model without it"));
            }
            if harmless.contains(&"model_max_length")
                && let Some(length) = given.whole("model_max_length", 1..=MAX_LENGTH)?
            {
                self.max_seq_length = Some(length);
            }
        }
        if fields.text("transformer_task")?.is_some_and(|task| task != "feature-extraction") {
            return Err(fields.unsupported("transformer_task", "\"feature-extraction\""));
        }
        if fields.get("tokenizer_name_or_path").is_some() {
            return Err(fields.unsupported("tokenizer_name_or_path", "the tokenizer in the model's folder"));
        }
        if let Some(modes) = fields.object("modality_config")?
            && let Some(text) = modes.object("text")?
        {
            for (key, usual) in [("method", "forward"), ("method_output_name", "last_hidden_state")] {
                if text.get(key).is_some_and(|value| value.as_str() != Some(usual)) {
                    return Err(text.unsupported(key, format!("\"{usual}\"")));
                }
            }
        }
        Ok(())
    }

    /// What is put before a sentence: the prompt called `name`, or the default one, if there is one.
    fn prompt(&self, name: Option<&str>) -> Result<&str, ModelError> {
        let Some(name) = name.or(self.default_prompt.as_deref()) else { return Ok("") };
        let Some((_, prompt)) = self.prompts.iter().find(|(known, _)| known == name) else {
            let known = self.prompts.iter().map(|(known, _)| known.clone()).collect();
            return Err(ModelError::Prompt { given: name.to_owned(), known });
        };
        // Mean and first token would be those after the prompt's. The last one is the same.
        if let Some(path) = &self.prompt_left_out_by
            && self.pooling != Pooling::LastToken
            && !prompt.is_empty()
        {
            return Err(ModelError::unsupported(path, "include_prompt", "false", "true where there is a prompt"));
        }
        Ok(prompt)
    }

    /// Whether a sentence is to be read in one pass: what is done with its tokens' vectors wants more than the last
    /// one's, or each depends on all tokens.
    pub fn takes_whole(&self, is_bidirectional: bool) -> bool {
        is_bidirectional || self.pooling != Pooling::LastToken
    }

    /// The text as the tokenizer is to see it, as a `prompt`, one of [`SentenceConfig::prompts`] by its name; `None`:
    /// the default one.
    ///
    /// # Errors
    /// A prompt that the model does not have.
    pub fn prepare(&self, prompt: Option<&str>, text: &str) -> Result<String, ModelError> {
        Ok(format!("{}{}", self.prompt(prompt)?, text))
    }
}

/// The prompts of a model that says nothing of them.
fn no_prompts() -> Vec<(String, String)> {
    ["query", "document"].map(|name| (name.to_owned(), String::new())).to_vec()
}

/// A module's folder, which must lie inside the model's.
fn inside(dir: &Path, module: &Fields<'_>) -> Result<PathBuf, ModelError> {
    let relative = Path::new(module.text("path")?.unwrap_or(""));
    if relative.components().all(|c| matches!(c, Component::Normal(_) | Component::CurDir)) {
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
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::{Value, json};

    use super::*;

    fn folder(files: &[(&str, Value)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a temporary folder");
        for (name, value) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().expect("inside")).expect("a folder in it");
            fs::write(path, value.to_string()).expect("a file in it");
        }
        dir
    }

    fn modules(kinds: &[(&str, &str)]) -> (&'static str, Value) {
        let list = kinds
            .iter()
            .map(|(kind, path)| json!({"path": path, "type": format!("sentence_transformers.models.{kind}")}));
        ("modules.json", list.collect())
    }

    const USUAL: [(&str, &str); 3] = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")];

    fn mean() -> Value {
        json!({"word_embedding_dimension": 384, "pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true,
               "pooling_mode_max_tokens": false, "pooling_mode_mean_sqrt_len_tokens": false})
    }

    fn refusal(files: &[(&str, Value)]) -> String {
        SentenceConfig::open(folder(files).path()).expect_err("must be refused").to_string()
    }

    #[test]
    fn the_usual_layout() {
        let dir = folder(&[
            modules(&USUAL),
            ("1_Pooling/config.json", mean()),
            ("sentence_bert_config.json", json!({"max_seq_length": 256, "do_lower_case": false})),
        ]);
        let config = SentenceConfig::open(dir.path()).expect("the usual layout");
        assert_eq!(
            config,
            SentenceConfig {
                transformer_dir: dir.path().join(""),
                pooling: Pooling::Mean,
                dense: Vec::new(),
                normalize: true,
                max_seq_length: Some(256),
                lower_case: false,
                prompts: no_prompts(),
                default_prompt: None,
                prompt_left_out_by: None,
                truncate_dim: None,
                dim: Some(384),
            }
        );
    }

    #[test]
    fn cls_pooling_in_subfolders_without_normalising() {
        let dir = folder(&[
            modules(&[("Transformer", "0_Transformer"), ("Pooling", "1_Pooling")]),
            ("1_Pooling/config.json", json!({"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false})),
            ("0_Transformer/tokenizer_config.json", json!({"model_max_length": 128})),
            ("0_Transformer/sentence_bert_config.json", json!({"max_seq_length": null, "do_lower_case": true})),
        ]);
        let config = SentenceConfig::open(dir.path()).expect("a layout with subfolders");
        assert_eq!(config.transformer_dir, dir.path().join("0_Transformer"));
        assert_eq!((config.pooling, config.normalize), (Pooling::Cls, false));
        assert_eq!((config.max_seq_length, config.lower_case), (Some(128), true));
        assert_eq!(config.prepare(None, "  An \u{c9}cole ").expect("no prompt"), "  An \u{c9}cole ");
    }

    #[test]
    fn the_transformers_own_settings() {
        let usual = |name: &'static str, settings: Value| {
            [modules(&USUAL), ("1_Pooling/config.json", mean()), (name, settings)]
        };
        let length =
            |files: &[(&str, Value)]| SentenceConfig::open(folder(files).path()).expect("valid").max_seq_length;
        assert_eq!(length(&usual("sentence_roberta_config.json", json!({"max_seq_length": 6}))), Some(6));
        // The first one that is not empty.
        let mut both = usual("sentence_xlnet_config.json", json!({"max_seq_length": 6})).to_vec();
        both.push(("sentence_bert_config.json", json!({})));
        assert_eq!(length(&both), Some(6));
        both[3].1 = json!({"max_seq_length": 7});
        assert_eq!(length(&both), Some(7));
        const BERT: &str = "sentence_bert_config.json";
        for key in ["tokenizer_args", "processor_kwargs"] {
            let settings = json!({"max_seq_length": 64, key: {"model_max_length": 5, "trust_remote_code": true}});
            assert_eq!(length(&usual(BERT, settings)), Some(5), "{key}");
        }
        let harmless = json!({"max_seq_length": 9, "model_args": {"attn_implementation": "sdpa"}, "config_args": {},
                              "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
                              "transformer_task": "feature-extraction", "module_output_name": "token_embeddings"});
        assert_eq!(length(&usual(BERT, harmless)), Some(9));
        for (settings, expected) in [
            (json!({"config_args": {"layer_norm_eps": 0.5}}), "config_args.layer_norm_eps: 0.5 is not supported"),
            (
                json!({"tokenizer_args": {"do_lower_case": false}}),
                "tokenizer_args.do_lower_case: false is not supported",
            ),
            (json!({"model_kwargs": {"subfolder": "x"}}), "model_kwargs.subfolder"),
            (json!({"processing_kwargs": {"text": {"max_length": 5}}}), "processing_kwargs.text"),
            (json!({"transformer_task": "fill-mask"}), "transformer_task: \"fill-mask\" is not supported"),
            (json!({"tokenizer_name_or_path": "x"}), "tokenizer_name_or_path"),
            (json!({"modality_config": {"text": {"method": "encode"}}}), "modality_config.text.method: \"encode\""),
        ] {
            let message = refusal(&usual(BERT, settings));
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn a_plain_bert_is_pooled_by_the_mean_and_not_normalised() {
        let dir = folder(&[("tokenizer_config.json", json!({"model_max_length": 1e30}))]);
        let config = SentenceConfig::open(dir.path()).expect("a plain folder");
        assert_eq!((config.pooling, config.normalize, config.max_seq_length), (Pooling::Mean, false, None));
        assert!(!SentenceConfig::is_there(dir.path()));
    }

    #[test]
    fn what_older_and_shorter_files_mean() {
        let config = |pooling: Value, settings: Value| {
            let files =
                [modules(&USUAL), ("1_Pooling/config.json", pooling), ("config_sentence_transformers.json", settings)];
            SentenceConfig::open(folder(&files).path()).expect("valid")
        };
        let pooling = |pooling: Value| config(pooling, json!({})).pooling;
        assert_eq!(pooling(json!({"pooling_mode_cls_token": true})), Pooling::Cls);
        assert_eq!(pooling(json!({"pooling_mode_lasttoken": true})), Pooling::LastToken);
        assert_eq!(pooling(json!({"pooling_mode_mean_tokens": false, "pooling_mode_cls_token": false})), Pooling::Mean);
        assert_eq!(pooling(json!({})), Pooling::Mean);
        for settings in [
            json!({}),
            json!({"prompts": {"query": null}}),
            json!({"prompts": {}, "default_prompt_name": "query"}),
            json!({"default_prompt_name": "document"}),
        ] {
            let config = config(mean(), settings);
            for name in [None, Some("query"), Some("document")] {
                assert_eq!(config.prepare(name, "a").expect("an empty prompt"), "a");
            }
        }
    }

    #[test]
    fn prompts_are_put_before() {
        const FILE: &str = "config_sentence_transformers.json";
        let mut prompts = json!({"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"});
        let usual = |prompts: &Value| [modules(&USUAL), ("1_Pooling/config.json", mean()), (FILE, prompts.clone())];
        let config = SentenceConfig::open(folder(&usual(&prompts)).path()).expect("prompts");
        let prepared = |name, text| config.prepare(name, text).expect("a prompt");
        assert_eq!(prepared(None, "hi"), "query: hi");
        assert_eq!((prepared(Some("query"), "a"), prepared(Some("document"), "a")), ("query: a".into(), "a".into()));
        let message = config.prepare(Some("passage"), "hi").expect_err("no such prompt").to_string();
        assert_eq!(message, "prompt passage: the model has none of this name, expected one of query, document");
        let mut without = usual(&prompts);
        without[1].1 = json!({"pooling_mode_mean_tokens": true, "include_prompt": false});
        assert!(refusal(&without).contains("1_Pooling/config.json: include_prompt: false"));
        prompts["default_prompt_name"] = "other".into();
        assert!(refusal(&usual(&prompts)).contains("default_prompt_name"));
        prompts["default_prompt_name"] = Value::Null;
        without[2].1 = prompts.clone();
        let config = SentenceConfig::open(folder(&without).path()).expect("without a prompt it can be done");
        assert_eq!(config.prepare(None, "a").expect("none"), "a");
        assert!(config.prepare(Some("query"), "a").expect_err("not pooled").to_string().contains("include_prompt"));
        without[1].1 = json!({"pooling_mode": "cls", "include_prompt": false});
        let config = SentenceConfig::open(folder(&without).path()).expect("without a prompt it can be done");
        assert!(
            config.prepare(Some("query"), "a").expect_err("the first token").to_string().contains("include_prompt")
        );
        // Whose last token is what counts, does not care.
        without[1].1 =
            json!({"pooling_mode_mean_tokens": false, "pooling_mode_lasttoken": true, "include_prompt": false});
        let config = SentenceConfig::open(folder(&without).path()).expect("the last token");
        assert_eq!(
            (config.pooling, config.prepare(Some("query"), "a").ok()),
            (Pooling::LastToken, Some("query: a".into()))
        );
        prompts["prompts"]["query"] = 1.into();
        assert!(refusal(&usual(&prompts)).contains("query: 1, expected a text"));
    }

    #[test]
    fn a_result_may_be_cut() {
        let usual = |dim: Value| {
            let settings = json!({ "truncate_dim": dim });
            [modules(&USUAL), ("1_Pooling/config.json", mean()), ("config_sentence_transformers.json", settings)]
        };
        let config = SentenceConfig::open(folder(&usual(8.into())).path()).expect("a length");
        assert_eq!((config.truncate_dim, config.normalize), (Some(8), true));
        assert_eq!(SentenceConfig::open(folder(&usual(Value::Null)).path()).expect("none").truncate_dim, None);
        assert!(refusal(&usual(0.into())).contains("truncate_dim: 0, expected"));
    }

    #[test]
    fn what_is_not_done_is_refused_by_name() {
        let other = [USUAL[0], USUAL[1], ("LayerNorm", "2_LayerNorm")];
        let message = refusal(&[modules(&other), ("1_Pooling/config.json", mean())]);
        assert!(message.contains("modules: Transformer, Pooling, LayerNorm is not supported"), "{message}");
        let late = [USUAL[0], USUAL[1], USUAL[2], ("Dense", "3_Dense")];
        let message = refusal(&[modules(&late), ("1_Pooling/config.json", mean())]);
        assert!(message.contains("modules: Transformer, Pooling, Normalize, Dense is not supported"), "{message}");
        for (pooling, word) in [
            (json!({"pooling_mode_max_tokens": true}), "max"),
            (json!({"pooling_mode_mean_tokens": true, "pooling_mode_lasttoken": true}), "mean and lasttoken"),
            (json!({"pooling_mode": []}), "none"),
            (json!({"pooling_mode": "weightedmean"}), "weightedmean"),
        ] {
            let message = refusal(&[modules(&USUAL), ("1_Pooling/config.json", pooling)]);
            assert!(
                message.contains(&format!("pooling: {word} is not supported; supported: mean, cls or lasttoken")),
                "{message}"
            );
        }
        assert!(refusal(&[modules(&USUAL[..1])]).contains("modules: Transformer is not supported"));
        assert!(refusal(&[("modules.json", json!({}))]).contains("expected a list"));
        assert!(refusal(&[("modules.json", json!([]))]).contains("modules: none"));
        assert!(refusal(&[modules(&[("Transformer", "../elsewhere")])]).contains("inside the model's"));
        assert!(refusal(&[modules(&USUAL)]).contains("1_Pooling: no config.json"));
    }
}
