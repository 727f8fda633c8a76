//! `quantization_config`: how files have matrices, where not as floats of 16 or 32 bits.

use std::path::Path;

use serde_json::Value;

use super::{Architecture, architecture};
use crate::model::error::ModelError;
use crate::model::json::{Fields, brief};

/// How files have a model's matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// As floats, or as the files themselves say.
    Floats,
    /// Experts in MXFP4: gpt-oss's.
    Mxfp4,
    /// In FP8 (E4M3), all or some, with scales: one for each block of so many rows and columns, where that is said;
    /// else their shape says it.
    Fp8 {
        /// Rows and columns.
        block: Option<[usize; 2]>,
    },
}

/// The largest side of a block.
const MAX_BLOCK: usize = 1 << 16;

impl Stored {
    /// What a config.json says, itself or in the configuration of the half that reads; `path` is what errors call it.
    ///
    /// # Errors
    /// A way that is not read; several.
    pub fn of(path: &Path, value: &Value) -> Result<Stored, ModelError> {
        let whole = Fields::new(path, value)?;
        let mut stored = Stored::Floats;
        for fields in [Some(whole.clone()), whole.object("text_config")?].into_iter().flatten() {
            // The second is what compressed-tensors called it once.
            for key in ["quantization_config", "compression_config"] {
                if fields.get(key).is_none() {
                    continue;
                }
                let said = of_method(&fields, key)?;
                if ![Stored::Floats, said].contains(&stored) {
                    return Err(fields.unsupported(key, "what the other says"));
                }
                stored = said;
            }
        }
        Ok(stored)
    }
}

fn of_method(fields: &Fields<'_>, key: &str) -> Result<Stored, ModelError> {
    let is_gpt_oss = || architecture(fields).is_ok_and(|architecture| architecture == Architecture::GptOss);
    let refused = |given: &Value| {
        let supported = "weights in bf16, f16 or f32, FP8 (\"fp8\" as E4M3, \"compressed-tensors\" as \"float-quantized\", \"modelopt\" as \
                         \"FP8\", \"fbgemm_fp8\"), or gpt-oss's experts in \"mxfp4\"";
        ModelError::unsupported(fields.path(), key, brief(given), supported)
    };
    let Some(given) = fields.object(key)? else { return Ok(Stored::Floats) };
    let whole = fields.get(key).unwrap_or(&Value::Null);
    let Some(method) = given.text("quant_method")? else { return Err(refused(whole)) };
    let is = |key: &str, expected: &str| match given.get(key) {
        Some(value) if value != expected => Err(given.unsupported(key, format!("\"{expected}\""))),
        _ => Ok(()),
    };
    match (method, is_gpt_oss()) {
        ("mxfp4", true) => Ok(Stored::Mxfp4),
        ("fp8", false) => {
            is("fmt", "e4m3")?;
            // Null is not as good as missing: it says that a matrix shares one scale.
            let block =
                if given.has("weight_block_size") { block(&given, "weight_block_size")? } else { Some([128; 2]) };
            Ok(Stored::Fp8 { block })
        }
        ("compressed-tensors", false) => {
            is("format", "float-quantized")?;
            // What would change weights, or rows, once more.
            let is_empty = |value: &Value| value.as_object().is_some_and(serde_json::Map::is_empty);
            if given.get("transform_config").is_some_and(|value| !is_empty(value)) {
                return Err(given.unsupported("transform_config", "none"));
            }
            let sparsity = given.object("sparsity_config")?;
            let format = sparsity.as_ref().map_or(Ok(None), |of| of.text("format"))?;
            if let (Some(sparsity), Some(_)) = (&sparsity, format.filter(|format| *format != "dense")) {
                return Err(sparsity.unsupported("format", "\"dense\""));
            }
            Ok(Stored::Fp8 { block: of_groups(&given)? })
        }
        ("modelopt", false) => {
            is("quant_algo", "FP8")?;
            Ok(Stored::Fp8 { block: None })
        }
        ("fbgemm_fp8", false) => Ok(Stored::Fp8 { block: None }),
        _ => Err(refused(given.get("quant_method").unwrap_or(whole))),
    }
}

/// The block that all groups of compressed-tensors agree on.
fn of_groups(given: &Fields<'_>) -> Result<Option<[usize; 2]>, ModelError> {
    let Some(groups) = given.object("config_groups")? else { return Err(given.wrong("config_groups", "an object")) };
    let mut found: Option<Option<[usize; 2]>> = None;
    for (name, _) in groups.entries() {
        let group = groups.object(name)?;
        let weights = group.map(|group| group.object("weights")).transpose()?.flatten();
        let Some(weights) = weights else { return Err(groups.wrong(name, "an object with \"weights\"")) };
        if weights.text("type")? != Some("float") {
            return Err(weights.unsupported("type", "\"float\""));
        }
        if weights.whole("num_bits", 1..=64)? != Some(8) {
            return Err(weights.unsupported("num_bits", "8"));
        }
        if weights.flag("symmetric")? == Some(false) {
            return Err(weights.unsupported("symmetric", "true"));
        }
        let of = match weights.text("strategy")? {
            Some("tensor" | "channel") | None => None,
            Some("block") => block(&weights, "block_structure")?,
            Some(_) => return Err(weights.unsupported("strategy", "\"tensor\", \"channel\" or \"block\"")),
        };
        if found.is_some_and(|found| found != of) {
            return Err(given.unsupported("config_groups", "groups whose blocks are alike"));
        }
        found = Some(of);
    }
    Ok(found.flatten())
}

/// Rows and columns of a block.
fn block(fields: &Fields<'_>, key: &str) -> Result<Option<[usize; 2]>, ModelError> {
    let Some(sides) = fields.wholes(key, 1..=MAX_BLOCK)? else { return Ok(None) };
    sides.try_into().map(Some).map_err(|_| fields.wrong(key, "rows and columns, two whole numbers"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(quantization: Value) -> Result<Stored, String> {
        let config = json!({ "architectures": ["Qwen3ForCausalLM"], "quantization_config": quantization });
        Stored::of(Path::new("c"), &config).map_err(|error| error.to_string())
    }

    #[test]
    fn ways_to_say_fp8_are_known() {
        let qwen = json!({
            "activation_scheme": "dynamic", "fmt": "e4m3", "modules_to_not_convert": ["lm_head"], "quant_method": "fp8",
            "weight_block_size": [128, 64],
        });
        assert_eq!(of(qwen), Ok(Stored::Fp8 { block: Some([128, 64]) }));
        let mistral = json!({ "activation_scheme": "static", "quant_method": "fp8", "weight_block_size": null });
        assert_eq!(of(mistral), Ok(Stored::Fp8 { block: None }));
        let group = |weights: Value| {
            json!({ "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": { "group_0": {
            "targets": ["Linear"], "weights": weights,
        } } })
        };
        let of_rows = group(json!({ "num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true }));
        assert_eq!(of(of_rows), Ok(Stored::Fp8 { block: None }));
        let of_blocks = json!({ "num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128] });
        assert_eq!(of(group(of_blocks)), Ok(Stored::Fp8 { block: Some([128, 128]) }));
        // Where it is not said, blocks are what those who began with it have.
        assert_eq!(of(json!({ "quant_method": "fp8" })), Ok(Stored::Fp8 { block: Some([128, 128]) }));
        assert_eq!(of(json!({ "quant_method": "modelopt", "quant_algo": "FP8" })), Ok(Stored::Fp8 { block: None }));
        assert_eq!(of(json!({ "quant_method": "fbgemm_fp8" })), Ok(Stored::Fp8 { block: None }));
        assert_eq!(of(Value::Null), Ok(Stored::Floats));
        // That of the half that reads, and what compressed-tensors called it before.
        let half = json!({ "model_type": "x", "text_config": { "compression_config": group(json!({ "num_bits": 8, "type": "float" })) } });
        assert_eq!(Stored::of(Path::new("c"), &half).expect("known"), Stored::Fp8 { block: None });
    }

    #[test]
    fn other_ways_are_refused_by_name() {
        let said = |quantization: Value, expected: &str| {
            let message = of(quantization).expect_err("refused");
            assert!(message.contains(expected), "{message}");
        };
        said(json!({ "quant_method": "gptq", "bits": 4 }), "quantization_config: \"gptq\"");
        said(json!({ "quant_method": "mxfp4" }), "quantization_config: \"mxfp4\"");
        said(json!({ "bits": 4 }), "quantization_config: {\"bits\":4}");
        said(json!({ "quant_method": "fp8", "fmt": "e5m2" }), "quantization_config.fmt: \"e5m2\"");
        said(json!({ "quant_method": "fp8", "weight_block_size": [128] }), "rows and columns");
        said(json!({ "quant_method": "modelopt", "quant_algo": "NVFP4" }), "quantization_config.quant_algo: \"NVFP4\"");
        said(json!({ "quant_method": "compressed-tensors", "format": "pack-quantized" }), "format: \"pack-quantized\"");
        let groups = |of: &[Value]| {
            let groups: serde_json::Map<_, _> =
                of.iter().enumerate().map(|(n, w)| (format!("g{n}"), json!({ "weights": w }))).collect();
            json!({ "quant_method": "compressed-tensors", "config_groups": groups })
        };
        said(groups(&[json!({ "num_bits": 8, "type": "int" })]), "config_groups.g0.weights.type: \"int\"");
        said(groups(&[json!({ "num_bits": 4, "type": "float" })]), "num_bits: 4");
        said(groups(&[json!({ "num_bits": 8, "type": "float", "strategy": "group" })]), "strategy: \"group\"");
        let other = json!({ "num_bits": 8, "type": "float", "strategy": "block", "block_structure": [8, 8] });
        said(groups(&[json!({ "num_bits": 8, "type": "float" }), other]), "config_groups");
        said(json!({ "quant_method": "compressed-tensors" }), "config_groups: missing");
        let float = json!({ "num_bits": 8, "type": "float" });
        said(groups(&[json!({ "num_bits": 8, "type": "float", "symmetric": false })]), "weights.symmetric: false");
        for (key, value, expected) in [
            ("transform_config", json!({ "config_groups": { "u": {} } }), "transform_config: {"),
            ("sparsity_config", json!({ "format": "sparse-24-bitmask" }), "sparsity_config.format: \"sparse"),
        ] {
            let mut more = groups(std::slice::from_ref(&float));
            more[key] = value;
            said(more, expected);
        }
        // Two that do not agree.
        let both = json!({
            "architectures": ["Qwen3ForCausalLM"], "quantization_config": { "quant_method": "fbgemm_fp8" },
            "text_config": { "model_type": "qwen3", "quantization_config": { "quant_method": "fp8" } },
        });
        let message = Stored::of(Path::new("c"), &both).expect_err("refused").to_string();
        assert!(message.contains("text_config.quantization_config"), "{message}");
    }
}
