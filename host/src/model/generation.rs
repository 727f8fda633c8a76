//! generation_config.json: where to stop, and how not to repeat oneself.
//!
//! Temperature and the like in this file are the publisher's taste, not part of the model, and are not taken: decoding
//! is greedy unless the caller asks otherwise. What changes greedy decoding is taken, or, where that is not done, kept
//! by name, to be said aloud.

use std::path::Path;

use serde_json::{Map, Value};

use super::error::ModelError;
use super::json::{Fields, brief, read_value};

/// How a generation goes on and ends.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationConfig {
    /// Any of these ids ends the text; it is not part of the text itself. May be empty.
    pub eos_token_ids: Vec<u32>,
    /// What tokens that are there already are penalised by, above 0; 1: by nothing.
    pub repetition_penalty: f32,
    /// What the file asks for beyond that and would change the text, as its keys and values: none of it is applied.
    pub not_applied: Vec<(String, String)>,
}

/// Keys that change which token is the likeliest, or where the text ends, with the number that changes nothing.
const CHANGES: [(&str, f64); 15] = [
    ("encoder_repetition_penalty", 1.0),
    ("no_repeat_ngram_size", 0.0),
    ("encoder_no_repeat_ngram_size", 0.0),
    ("suppress_tokens", 0.0),
    ("begin_suppress_tokens", 0.0),
    ("bad_words_ids", 0.0),
    ("sequence_bias", 0.0),
    ("min_new_tokens", 0.0),
    ("min_length", 0.0),
    ("exponential_decay_length_penalty", 0.0),
    ("guidance_scale", 1.0),
    ("num_beams", 1.0),
    ("watermarking_config", 0.0),
    ("stop_strings", 0.0),
    ("penalty_alpha", 0.0),
];
/// The same of keys whose number is a token, be it 0.
const TOKENS: [&str; 2] = ["forced_bos_token_id", "forced_eos_token_id"];

impl GenerationConfig {
    /// Reads a folder's generation_config.json; what is not there comes from config.json, given parsed.
    pub fn open(dir: &Path, config_path: &Path, config: &Value) -> Result<GenerationConfig, ModelError> {
        let path = dir.join("generation_config.json");
        let value = if path.exists() { read_value(&path)? } else { Value::Object(Map::new()) };
        let fields = Fields::new(&path, &value)?;
        let eos_token_ids = match eos(&fields)? {
            Some(ids) => ids,
            None => eos(&Fields::new(config_path, config)?)?.unwrap_or_default(),
        };
        let repetition_penalty = penalty(&fields)?;
        Ok(GenerationConfig { eos_token_ids, repetition_penalty, not_applied: not_applied(&fields) })
    }
}

/// Whether tokens can be penalised by that.
pub(crate) fn is_penalty(penalty: f32) -> bool {
    penalty > 0.0 && penalty.is_finite()
}

/// What else was expected.
pub(crate) const PENALTIES: &str = "a number above 0 (1: none)";

fn penalty(fields: &Fields<'_>) -> Result<f32, ModelError> {
    let Some(value) = fields.get("repetition_penalty") else { return Ok(1.0) };
    let penalty = value.as_f64().map(|penalty| penalty as f32).filter(|penalty| is_penalty(*penalty));
    penalty.ok_or_else(|| fields.wrong("repetition_penalty", PENALTIES))
}

fn not_applied(fields: &Fields<'_>) -> Vec<(String, String)> {
    let changes = CHANGES.into_iter().filter(|(key, nothing)| match fields.get(key) {
        None | Some(Value::Bool(false)) => false,
        Some(Value::Number(number)) => number.as_f64() != Some(*nothing),
        Some(Value::Array(list)) => !list.is_empty(),
        Some(Value::Object(map)) => !map.is_empty(),
        Some(_) => true,
    });
    let keys = changes.map(|(key, _)| key).chain(TOKENS);
    keys.filter_map(|key| Some((key.to_owned(), brief(fields.get(key)?)))).collect()
}

/// `eos_token_id`: a number, or a list of them.
fn eos(fields: &Fields<'_>) -> Result<Option<Vec<u32>>, ModelError> {
    let Some(value) = fields.get("eos_token_id") else {
        return Ok(None);
    };
    let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
    let ids = match value {
        Value::Array(list) => list.iter().map(id).collect::<Option<Vec<_>>>(),
        single => id(single).map(|id| vec![id]),
    };
    ids.map(Some).ok_or_else(|| fields.wrong("eos_token_id", "a token id or a list of them"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn stops(generation: Option<Value>, config: &Value) -> Result<Vec<u32>, String> {
        let dir = tempfile::tempdir().expect("a temporary folder");
        if let Some(value) = generation {
            std::fs::write(dir.path().join("generation_config.json"), value.to_string()).expect("a file in it");
        }
        GenerationConfig::open(dir.path(), Path::new("config.json"), config)
            .map(|c| c.eos_token_ids)
            .map_err(|e| e.to_string())
    }

    #[test]
    fn stop_ids_come_from_either_file() {
        let config = json!({"eos_token_id": 7});
        assert_eq!(stops(Some(json!({"eos_token_id": 2, "temperature": 0.6})), &config), Ok(vec![2]));
        assert_eq!(stops(Some(json!({"eos_token_id": [3, 4]})), &config), Ok(vec![3, 4]));
        assert_eq!(stops(Some(json!({"eos_token_id": null})), &config), Ok(vec![7]));
        assert_eq!(stops(None, &config), Ok(vec![7]));
        assert_eq!(stops(None, &json!({})), Ok(vec![]));
    }

    #[test]
    fn what_is_not_applied_is_known() {
        let of = |value: Value| {
            let dir = tempfile::tempdir().expect("a temporary folder");
            std::fs::write(dir.path().join("generation_config.json"), value.to_string()).expect("a file in it");
            let config = GenerationConfig::open(dir.path(), Path::new("config.json"), &json!({})).expect("valid");
            config.not_applied.into_iter().map(|(key, value)| format!("{key} {value}")).collect::<Vec<_>>()
        };
        let nothing = json!({"repetition_penalty": 1.05, "no_repeat_ngram_size": 0, "min_length": 0, "suppress_tokens": [],
                             "bad_words_ids": null, "num_beams": 1, "temperature": 0.6, "do_sample": true, "use_cache": true});
        assert_eq!(of(nothing), [""; 0]);
        let all = json!({"repetition_penalty": 1.05, "no_repeat_ngram_size": 3, "min_new_tokens": 2, "suppress_tokens": [1],
                         "forced_eos_token_id": 0, "stop_strings": "x"});
        let expected = [
            "no_repeat_ngram_size 3",
            "suppress_tokens [1]",
            "min_new_tokens 2",
            "stop_strings \"x\"",
            "forced_eos_token_id 0",
        ];
        assert_eq!(of(all), expected);
    }

    #[test]
    fn a_repetition_penalty_is_a_number_above_zero() {
        let of = |value: Value| {
            let dir = tempfile::tempdir().expect("a temporary folder");
            std::fs::write(dir.path().join("generation_config.json"), value.to_string()).expect("a file in it");
            let config = GenerationConfig::open(dir.path(), Path::new("config.json"), &json!({}));
            config.map(|config| config.repetition_penalty).map_err(|error| error.to_string())
        };
        assert_eq!(of(json!({})), Ok(1.0));
        assert_eq!(of(json!({"repetition_penalty": null})), Ok(1.0));
        assert_eq!(of(json!({"repetition_penalty": 1.05})), Ok(1.05));
        for wrong in [json!(0), json!(-1.0), json!("1.1"), json!(1e300)] {
            let message = of(json!({"repetition_penalty": wrong})).expect_err("not a penalty");
            assert!(message.contains("repetition_penalty") && message.contains(PENALTIES), "{message}");
        }
    }

    #[test]
    fn senseless_stop_ids_are_refused() {
        let message = stops(Some(json!({"eos_token_id": "</s>"})), &json!({})).expect_err("a string");
        assert!(message.ends_with("eos_token_id: \"</s>\", expected a token id or a list of them"), "{message}");
        assert!(stops(None, &json!({"eos_token_id": [1, -1]})).is_err());
        assert!(stops(Some(json!([])), &json!({})).is_err());
    }
}
