//! JSON files read key by key, so that every complaint can name file, key, value and expectation.
//!
//! `null` counts as absent, as it does for the library that writes these files.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::error::ModelError;

/// Larger than any real configuration file; a mistaken path must not fill the memory.
const MAX_JSON_BYTES: u64 = 256 << 20;

/// Reads a whole file, which must be a regular one of at most `max_bytes`.
pub(crate) fn read_bytes(path: &Path, max_bytes: u64) -> Result<Vec<u8>, ModelError> {
    let meta = std::fs::metadata(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => absent(path),
        _ => ModelError::read(path, e),
    })?;
    if !meta.is_file() {
        return Err(ModelError::checkpoint(path, "not a file"));
    }
    if meta.len() > max_bytes {
        return Err(ModelError::checkpoint(
            path,
            format!("{} bytes, expected at most {max_bytes}: not the file it is taken for", meta.len()),
        ));
    }
    std::fs::read(path).map_err(|e| ModelError::read(path, e))
}

/// `DIR: no FILE`, or of a file alone that there is none.
pub(crate) fn absent(path: &Path) -> ModelError {
    match (path.parent().filter(|dir| !dir.as_os_str().is_empty()), path.file_name()) {
        (Some(dir), Some(name)) => {
            ModelError::Absent { dir: dir.to_owned(), what: name.to_string_lossy().into_owned() }
        }
        _ => ModelError::read(path, std::io::ErrorKind::NotFound.into()),
    }
}

/// Reads and parses a JSON file.
pub(crate) fn read_value(path: &Path) -> Result<Value, ModelError> {
    let bytes = read_bytes(path, MAX_JSON_BYTES)?;
    // A byte order mark is no JSON, but some editors write one.
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    serde_json::from_slice(bytes).map_err(|e| ModelError::Json { path: path.to_owned(), message: e.to_string() })
}

/// An object of a JSON file, and where it stands.
#[derive(Clone, Debug)]
pub(crate) struct Fields<'v> {
    path: PathBuf,
    /// Dotted, with a trailing dot where not empty.
    prefix: String,
    map: &'v Map<String, Value>,
}

impl<'v> Fields<'v> {
    pub(crate) fn new(path: &Path, value: &'v Value) -> Result<Self, ModelError> {
        match value {
            Value::Object(map) => Ok(Fields { path: path.to_owned(), prefix: String::new(), map }),
            other => Err(ModelError::checkpoint(path, format!("{}, expected a JSON object", kind(other)))),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn get(&self, key: &str) -> Option<&'v Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// Whether the key is there at all, be it null.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    pub(crate) fn wrong(&self, key: &str, expected: impl Into<String>) -> ModelError {
        let given = self.get(key).map_or_else(|| "missing".to_owned(), brief);
        ModelError::key(&self.path, &format!("{}{key}", self.prefix), given, expected)
    }

    pub(crate) fn unsupported(&self, key: &str, supported: impl Into<String>) -> ModelError {
        let given = self.get(key).map_or_else(|| "missing".to_owned(), brief);
        ModelError::unsupported(&self.path, &format!("{}{key}", self.prefix), given, supported)
    }

    pub(crate) fn object(&self, key: &str) -> Result<Option<Fields<'v>>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => {
                Ok(Some(Fields { path: self.path.clone(), prefix: format!("{}{key}.", self.prefix), map }))
            }
            Some(_) => Err(self.wrong(key, "an object")),
        }
    }

    /// A whole number in `range`; `8192.0` counts as whole.
    pub(crate) fn whole(&self, key: &str, range: RangeInclusive<usize>) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = match value.as_u64() {
            Some(n) => usize::try_from(n).ok(),
            None => value.as_f64().filter(|f| f.fract() == 0.0 && *f >= 0.0 && *f < 9e15).map(|f| f as usize),
        };
        match number {
            Some(n) if range.contains(&n) => Ok(Some(n)),
            _ => Err(self.wrong(key, format!("a whole number from {} to {}", range.start(), range.end()))),
        }
    }

    pub(crate) fn required_whole(&self, key: &str, range: RangeInclusive<usize>) -> Result<usize, ModelError> {
        let expected = format!("a whole number from {} to {}", range.start(), range.end());
        self.whole(key, range)?.ok_or_else(|| self.wrong(key, expected))
    }

    /// A finite number in `range`.
    pub(crate) fn real(&self, key: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64() {
            Some(n) if n.is_finite() && range.contains(&n) => Ok(Some(n)),
            _ => Err(self.wrong(key, format!("a number from {} to {}", range.start(), range.end()))),
        }
    }

    pub(crate) fn required_real(&self, key: &str, range: RangeInclusive<f64>) -> Result<f64, ModelError> {
        let expected = format!("a number from {} to {}", range.start(), range.end());
        self.real(key, range)?.ok_or_else(|| self.wrong(key, expected))
    }

    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(_) => Err(self.wrong(key, "true or false")),
        }
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&'v str>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(_) => Err(self.wrong(key, "a string")),
        }
    }

    /// A list of strings.
    pub(crate) fn texts(&self, key: &str) -> Result<Option<Vec<&'v str>>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value
            .as_array()
            .and_then(|list| list.iter().map(Value::as_str).collect::<Option<Vec<_>>>())
            .map(Some)
            .ok_or_else(|| self.wrong(key, "a list of strings"))
    }

    /// A list of whole numbers in `range`.
    pub(crate) fn wholes(&self, key: &str, range: RangeInclusive<usize>) -> Result<Option<Vec<usize>>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let wanted = || format!("a list of whole numbers from {} to {}", range.start(), range.end());
        let whole = |v: &Value| v.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| range.contains(n));
        let list = value.as_array().and_then(|list| list.iter().map(whole).collect::<Option<Vec<_>>>());
        list.map(Some).ok_or_else(|| self.wrong(key, wanted()))
    }

    /// A list of finite numbers in `range`.
    pub(crate) fn reals(&self, key: &str, range: RangeInclusive<f64>) -> Result<Option<Vec<f64>>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let wanted = || format!("a list of numbers from {} to {}", range.start(), range.end());
        let real = |v: &Value| v.as_f64().filter(|n| range.contains(n));
        let list = value.as_array().and_then(|list| list.iter().map(real).collect::<Option<Vec<_>>>());
        list.map(Some).ok_or_else(|| self.wrong(key, wanted()))
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = (&'v str, &'v Value)> + use<'v> {
        self.map.iter().map(|(k, v)| (k.as_str(), v))
    }
}

/// What sort of JSON value it is.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// A value short enough for a one-line message.
pub(crate) fn brief(value: &Value) -> String {
    const MAX_CHARS: usize = 60;
    let text = value.to_string();
    if text.chars().count() <= MAX_CHARS {
        return text;
    }
    let head: String = text.chars().take(MAX_CHARS).collect();
    format!("{head}...")
}
