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

    /// Whether this id ends the text.
    pub fn is_end(&self, id: u32) -> bool {
        self.eos_token_ids.contains(&id)
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
    ids.map(Some)
        .ok_or_else(|| fields.wrong("eos_token_id", "a token id or a list of them"))
}
