//! generation_config.json: where to stop.
//!
//! Temperature and the like in this file are the publisher's taste, not part of the model, and are not taken: decoding
//! is greedy unless the caller asks otherwise.

use std::path::Path;

use serde_json::Value;

use super::error::ModelError;
use super::json::{Fields, read_value};

/// How a generation ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GenerationConfig {
    /// Any of these ids ends the text; it is not part of the text itself. May be empty.
    pub eos_token_ids: Vec<u32>,
}

impl GenerationConfig {
    /// Reads a folder's generation_config.json; what is not there comes from config.json, given parsed.
    pub fn open(dir: &Path, config_path: &Path, config: &Value) -> Result<GenerationConfig, ModelError> {
        let path = dir.join("generation_config.json");
        if path.exists() {
            let value = read_value(&path)?;
            if let Some(eos_token_ids) = eos(&Fields::new(&path, &value)?)? {
                return Ok(GenerationConfig { eos_token_ids });
            }
        }
        let eos_token_ids = eos(&Fields::new(config_path, config)?)?.unwrap_or_default();
        Ok(GenerationConfig { eos_token_ids })
    }
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
    fn senseless_stop_ids_are_refused() {
        let message = stops(Some(json!({"eos_token_id": "</s>"})), &json!({})).expect_err("a string");
        assert!(message.ends_with("eos_token_id: \"</s>\", expected a token id or a list of them"), "{message}");
        assert!(stops(None, &json!({"eos_token_id": [1, -1]})).is_err());
        assert!(stops(Some(json!([])), &json!({})).is_err());
    }
}
