//! `quantization_config`: how files have matrices, where not as floats of 16 or 32 bits.

use std::path::Path;

use serde_json::Value;

use super::{Architecture, architecture};
use crate::model::error::ModelError;
use crate::model::json::{Fields, brief};

/// How files have a model's matrices. What of it the files themselves say is not said here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// As floats, or as the files themselves say: those of bitsandbytes and ModelOpt.
    Floats,
    /// Experts in MXFP4: gpt-oss's.
    Mxfp4,
    /// In FP8 (E4M3), all or some, with scales: one for each block of so many rows and columns, where that is said;
    /// else their shape says it.
    Fp8 {
        /// Rows and columns.
        block: Option<[usize; 2]>,
    },
    /// As compressed-tensors has them: in FP8, FP4 or whole numbers of a few bits.
    Compressed {
        /// Rows and columns that share a scale, in FP8.
        block: Option<[usize; 2]>,
        /// Columns that do, of whole numbers; none: a row's, or as the scales' shape says.
        group: Option<usize>,
    },
    /// As GPTQ has them.
    Gptq {
        /// Bits of a number, of most matrices.
        bits: usize,
        /// Columns that share a scale; none: a row's.
        group: Option<usize>,
        /// Whether files have zeros less by one, as they first did.
        zeros_less_one: bool,
    },
    /// As AWQ has them.
    Awq {
        /// Columns that share a scale; none: a row's.
        group: Option<usize>,
    },
}

/// The largest side of a block, and most columns of a group.
const MAX_BLOCK: usize = 1 << 16;

/// What is read.
const SUPPORTED: &str = "weights in bf16, f16 or f32, \"fp8\" (E4M3), \"fbgemm_fp8\", \"modelopt\" (\"FP8\" and \"NVFP4\"), \
                         \"compressed-tensors\", \"gptq\", \"awq\", \"auto-round\" as one of these two, \"bitsandbytes\", or gpt-oss's \
                         experts in \"mxfp4\"";

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
    let refused = |given: &Value| ModelError::unsupported(fields.path(), key, brief(given), SUPPORTED);
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
            one_of(&given, "format", &FORMATS)?;
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
            of_groups(&given)
        }
        ("modelopt", false) => {
            one_of(&given, "quant_algo", &["FP8", "NVFP4"])?;
            Ok(Stored::Fp8 { block: None })
        }
        ("fbgemm_fp8", false) => Ok(Stored::Fp8 { block: None }),
        ("gptq", false) => of_gptq(&given),
        ("awq", false) => of_awq(&given),
        ("auto-round", false) => match given.text("packing_format")? {
            Some("auto_round:auto_gptq") => of_gptq(&given),
            Some("auto_round:auto_awq") => of_awq(&given),
            _ => Err(given.unsupported("packing_format", "\"auto_round:auto_gptq\" or \"auto_round:auto_awq\"")),
        },
        // Matrices that are said to be in fewer bits, and are not, would be made so when they are read.
        ("bitsandbytes", false) => Ok(Stored::Floats),
        _ => Err(refused(given.get("quant_method").unwrap_or(whole))),
    }
}

/// Those of compressed-tensors that are read.
const FORMATS: [&str; 6] = [
    "float-quantized",
    "naive-quantized",
    "int-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mixed-precision",
];

/// That `key`, if it is there, is one of these.
fn one_of(fields: &Fields<'_>, key: &str, known: &[&str]) -> Result<(), ModelError> {
    match fields.text(key)? {
        Some(said) if !known.contains(&said) => {
            let known: Vec<String> = known.iter().map(|known| format!("\"{known}\"")).collect();
            Err(fields.unsupported(key, known.join(", ")))
        }
        _ => Ok(()),
    }
}

/// That `key`, if it is there, is one of these numbers.
fn one_of_bits(fields: &Fields<'_>, key: &str, known: &[usize]) -> Result<(), ModelError> {
    match fields.whole(key, 1..=64)? {
        Some(bits) if !known.contains(&bits) => {
            let known: Vec<String> = known.iter().map(usize::to_string).collect();
            Err(fields.unsupported(key, known.join(" or ")))
        }
        _ => Ok(()),
    }
}

/// Columns of a group; -1 is a whole row, as none is.
fn group(fields: &Fields<'_>) -> Result<Option<usize>, ModelError> {
    match fields.get("group_size") {
        Some(value) if *value == -1 => Ok(None),
        _ => fields.whole("group_size", 1..=MAX_BLOCK),
    }
}

fn of_gptq(given: &Fields<'_>) -> Result<Stored, ModelError> {
    one_of_bits(given, "bits", &[2, 4, 8])?;
    let bits = given.whole("bits", 1..=64)?.unwrap_or(4);
    // What there is besides is laid out for one kernel.
    let key = if given.has("checkpoint_format") { "checkpoint_format" } else { "format" };
    one_of(given, key, &["gptq", "gptq_v2"])?;
    if given.flag("is_marlin_format")? == Some(true) {
        return Err(given.unsupported("is_marlin_format", "false"));
    }
    Ok(Stored::Gptq { bits, group: group(given)?, zeros_less_one: given.text(key)? != Some("gptq_v2") })
}

fn of_awq(given: &Fields<'_>) -> Result<Stored, ModelError> {
    one_of_bits(given, "bits", &[4])?;
    let known = |key: &str| match given.text(key)? {
        Some(said) if !said.eq_ignore_ascii_case("gemm") => Err(given.unsupported(key, "\"gemm\"")),
        _ => Ok(()),
    };
    ["version", "format", "checkpoint_format"].into_iter().try_for_each(known)?;
    Ok(Stored::Awq { group: group(given)? })
}

/// What all groups of compressed-tensors agree on.
fn of_groups(given: &Fields<'_>) -> Result<Stored, ModelError> {
    let Some(groups) = given.object("config_groups")? else { return Err(given.wrong("config_groups", "an object")) };
    let (mut found, mut in_groups): (Option<Option<[usize; 2]>>, Vec<Option<usize>>) = (None, Vec::new());
    for (name, _) in groups.entries() {
        let group = groups.object(name)?;
        let weights = group.map(|group| group.object("weights")).transpose()?.flatten();
        let Some(weights) = weights else { return Err(groups.wrong(name, "an object with \"weights\"")) };
        let is_float = match weights.text("type")? {
            Some("int") => false,
            Some("float") => true,
            _ => return Err(weights.unsupported("type", "\"float\" or \"int\"")),
        };
        if !weights.has("num_bits") {
            return Err(weights.wrong("num_bits", "4 or 8"));
        }
        one_of_bits(&weights, "num_bits", &[4, 8])?;
        let (is_fp4, strategy) = (is_float && weights.whole("num_bits", 1..=64)? == Some(4), weights.text("strategy")?);
        if is_float && weights.flag("symmetric")? == Some(false) {
            return Err(weights.unsupported("symmetric", "true"));
        }
        if !is_float {
            if !matches!(strategy, Some("tensor" | "channel" | "group") | None) {
                return Err(weights.unsupported("strategy", "\"tensor\", \"channel\" or \"group\""));
            }
            in_groups.push(self::group(&weights)?);
            continue;
        }
        let of = match strategy {
            Some("tensor_group") if is_fp4 => continue,
            Some("tensor" | "channel") | None if !is_fp4 => None,
            Some("block") if !is_fp4 => block(&weights, "block_structure")?,
            _ if is_fp4 => return Err(weights.unsupported("strategy", "\"tensor_group\", of numbers of 4 bits")),
            _ => return Err(weights.unsupported("strategy", "\"tensor\", \"channel\" or \"block\"")),
        };
        if found.is_some_and(|found| found != of) {
            return Err(given.unsupported("config_groups", "groups whose blocks are alike"));
        }
        found = Some(of);
    }
    // Where layers differ the shapes of their scales say how many share one.
    let of_all = in_groups.first().copied().flatten().filter(|_| in_groups.iter().all(|of| *of == in_groups[0]));
    Ok(Stored::Compressed { block: found.flatten(), group: of_all })
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
        assert_eq!(of(of_rows), Ok(Stored::Compressed { block: None, group: None }));
        let of_blocks = json!({ "num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128] });
        assert_eq!(of(group(of_blocks)), Ok(Stored::Compressed { block: Some([128, 128]), group: None }));
        // Where it is not said, blocks are what those who began with it have.
        assert_eq!(of(json!({ "quant_method": "fp8" })), Ok(Stored::Fp8 { block: Some([128, 128]) }));
        assert_eq!(of(json!({ "quant_method": "modelopt", "quant_algo": "FP8" })), Ok(Stored::Fp8 { block: None }));
        assert_eq!(of(json!({ "quant_method": "fbgemm_fp8" })), Ok(Stored::Fp8 { block: None }));
        assert_eq!(of(Value::Null), Ok(Stored::Floats));
        // That of the half that reads, and what compressed-tensors called it before.
        let half = json!({ "model_type": "x", "text_config": { "compression_config": group(json!({ "num_bits": 8, "type": "float" })) } });
        assert_eq!(Stored::of(Path::new("c"), &half).expect("known"), Stored::Compressed { block: None, group: None });
    }

    #[test]
    fn ways_to_say_a_few_bits_are_known() {
        let gptq = |more: Value| {
            let mut said =
                json!({ "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": true, "sym": true });
            said.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
            of(said)
        };
        let of_gptq = |bits, group, zeros_less_one| Ok(Stored::Gptq { bits, group, zeros_less_one });
        assert_eq!(gptq(json!({})), of_gptq(4, Some(128), true));
        assert_eq!(gptq(json!({ "checkpoint_format": "gptq", "bits": 8 })), of_gptq(8, Some(128), true));
        assert_eq!(gptq(json!({ "checkpoint_format": "gptq_v2", "group_size": -1 })), of_gptq(4, None, false));
        assert_eq!(gptq(json!({ "format": "gptq_v2" })), of_gptq(4, Some(128), false));
        let rounded = json!({ "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq" });
        assert_eq!(gptq(rounded), of_gptq(4, Some(128), true));
        let awq = json!({ "quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMM", "zero_point": true });
        assert_eq!(of(awq), Ok(Stored::Awq { group: Some(64) }));
        let rounded = json!({ "quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4 });
        assert_eq!(of(rounded), Ok(Stored::Awq { group: None }));
        assert_eq!(of(json!({ "quant_method": "bitsandbytes", "load_in_4bit": true })), Ok(Stored::Floats));
        assert_eq!(of(json!({ "quant_method": "modelopt", "quant_algo": "NVFP4" })), Ok(Stored::Fp8 { block: None }));
        let groups = |format: &str, of: &[Value]| {
            let groups: serde_json::Map<_, _> =
                of.iter().enumerate().map(|(n, w)| (format!("g{n}"), json!({ "weights": w }))).collect();
            json!({ "quant_method": "compressed-tensors", "format": format, "config_groups": groups })
        };
        let ints = |bits: usize, group: usize| json!({ "num_bits": bits, "type": "int", "strategy": "group", "group_size": group, "symmetric": false });
        let compressed = |block, group| Ok(Stored::Compressed { block, group });
        assert_eq!(of(groups("pack-quantized", &[ints(4, 32)])), compressed(None, Some(32)));
        assert_eq!(of(groups("pack-quantized", &[ints(4, 32), ints(8, 64)])), compressed(None, None));
        let of_rows = json!({ "num_bits": 8, "type": "int", "strategy": "channel", "group_size": null });
        assert_eq!(of(groups("int-quantized", &[of_rows])), compressed(None, None));
        let fp4 = json!({ "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16 });
        assert_eq!(of(groups("nvfp4-pack-quantized", std::slice::from_ref(&fp4))), compressed(None, None));
        let fp8 = json!({ "num_bits": 8, "type": "float", "strategy": "block", "block_structure": [8, 8] });
        assert_eq!(of(groups("mixed-precision", &[fp4, fp8, ints(4, 64)])), compressed(Some([8, 8]), Some(64)));
    }

    #[test]
    fn other_ways_are_refused_by_name() {
        let said = |quantization: Value, expected: &str| {
            let message = of(quantization).expect_err("refused");
            assert!(message.contains(expected), "{message}");
        };
        said(json!({ "quant_method": "hqq" }), "quantization_config: \"hqq\"");
        said(json!({ "quant_method": "gptq", "bits": 3 }), "quantization_config.bits: 3");
        said(json!({ "quant_method": "gptq", "checkpoint_format": "marlin" }), "checkpoint_format: \"marlin\"");
        said(json!({ "quant_method": "gptq", "is_marlin_format": true }), "is_marlin_format: true");
        said(json!({ "quant_method": "gptq", "group_size": 0 }), "group_size: 0");
        said(json!({ "quant_method": "awq", "bits": 8 }), "quantization_config.bits: 8");
        said(json!({ "quant_method": "awq", "version": "gemv" }), "quantization_config.version: \"gemv\"");
        said(json!({ "quant_method": "auto-round", "packing_format": "x" }), "packing_format: \"x\"");
        said(json!({ "quant_method": "mxfp4" }), "quantization_config: \"mxfp4\"");
        said(json!({ "bits": 4 }), "quantization_config: {\"bits\":4}");
        said(json!({ "quant_method": "fp8", "fmt": "e5m2" }), "quantization_config.fmt: \"e5m2\"");
        said(json!({ "quant_method": "fp8", "weight_block_size": [128] }), "rows and columns");
        said(json!({ "quant_method": "modelopt", "quant_algo": "W4A8" }), "quantization_config.quant_algo: \"W4A8\"");
        said(json!({ "quant_method": "compressed-tensors", "format": "marlin-24" }), "format: \"marlin-24\"");
        let groups = |of: &[Value]| {
            let groups: serde_json::Map<_, _> =
                of.iter().enumerate().map(|(n, w)| (format!("g{n}"), json!({ "weights": w }))).collect();
            json!({ "quant_method": "compressed-tensors", "config_groups": groups })
        };
        said(groups(&[json!({ "num_bits": 8, "type": "nf" })]), "config_groups.g0.weights.type: \"nf\"");
        said(groups(&[json!({ "num_bits": 5, "type": "int" })]), "num_bits: 5");
        said(groups(&[json!({ "type": "int" })]), "num_bits: missing");
        said(groups(&[json!({ "num_bits": 8, "type": "int", "strategy": "block" })]), "strategy: \"block\"");
        said(groups(&[json!({ "num_bits": 4, "type": "float", "strategy": "channel" })]), "strategy: \"channel\"");
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
