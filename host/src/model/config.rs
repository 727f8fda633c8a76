//! config.json: which network, and its sizes.
//!
//! In comes the file as `transformers` writes it today (`rope_parameters`, `dtype`) or wrote it before (`rope_theta`,
//! `rope_scaling`, `torch_dtype`); out goes a [`ModelConfig`] with every default filled in, as that library fills it.
//!
//! Laws:
//! - A key whose meaning would change the result and that is not done here is refused by name; keys that change nothing,
//!   or that nobody knows, are ignored.
//! - Every number that leaves this file is positive, bounded, and consistent with the others (`n_heads` is a multiple of
//!   `n_kv_heads`, `head_dim` is even), so later stages can multiply sizes without overflow.

use std::fmt;
use std::path::Path;

use serde_json::Value;

use super::error::ModelError;
use super::json::{Fields, brief, read_value};
use perpetua_device::kernels::routing;

/// The networks there are, named as in config.json's `architectures`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// `Qwen3ForCausalLM`: RMSNorm on each head's query and key.
    Qwen3,
    /// `Qwen3MoeForCausalLM`: Qwen3 whose MLPs are mixtures of experts, all or some.
    Qwen3Moe,
    /// `Qwen2ForCausalLM`: biases on q, k and v. Qwen 2.5 is this too.
    Qwen2,
    /// `LlamaForCausalLM`.
    Llama,
    /// `MistralForCausalLM`: Llama with an optional attention window.
    Mistral,
    /// `MixtralForCausalLM`: Mistral whose MLPs are mixtures of experts.
    Mixtral,
    /// `BertModel` and the models with a head on top of it, whose heads are not used: sentence embeddings.
    Bert,
}

impl Architecture {
    /// Every architecture.
    pub const ALL: [Architecture; 7] = [
        Architecture::Qwen3,
        Architecture::Qwen3Moe,
        Architecture::Qwen2,
        Architecture::Llama,
        Architecture::Mistral,
        Architecture::Mixtral,
        Architecture::Bert,
    ];

    /// Whether its MLPs are mixtures of experts.
    pub const fn has_experts(self) -> bool {
        matches!(self, Architecture::Qwen3Moe | Architecture::Mixtral)
    }

    /// The class name in `architectures`.
    pub const fn class_name(self) -> &'static str {
        match self {
            Architecture::Qwen3 => "Qwen3ForCausalLM",
            Architecture::Qwen3Moe => "Qwen3MoeForCausalLM",
            Architecture::Qwen2 => "Qwen2ForCausalLM",
            Architecture::Llama => "LlamaForCausalLM",
            Architecture::Mistral => "MistralForCausalLM",
            Architecture::Mixtral => "MixtralForCausalLM",
            Architecture::Bert => "BertModel",
        }
    }

    /// The name in `model_type`.
    pub const fn model_type(self) -> &'static str {
        match self {
            Architecture::Qwen3 => "qwen3",
            Architecture::Qwen3Moe => "qwen3_moe",
            Architecture::Qwen2 => "qwen2",
            Architecture::Llama => "llama",
            Architecture::Mistral => "mistral",
            Architecture::Mixtral => "mixtral",
            Architecture::Bert => "bert",
        }
    }

    fn from_class_name(name: &str) -> Option<Architecture> {
        match name {
            "BertForMaskedLM"
            | "BertForPreTraining"
            | "BertForNextSentencePrediction"
            | "BertForSequenceClassification"
            | "BertForTokenClassification"
            | "BertForQuestionAnswering"
            | "BertForMultipleChoice"
            | "BertLMHeadModel" => Some(Architecture::Bert),
            _ => Architecture::ALL.into_iter().find(|a| a.class_name() == name),
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.class_name())
    }
}

/// The function between an MLP's two linear layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// `x * Phi(x)` with the exact normal distribution function (erf), not its tanh approximation.
    Gelu,
}

impl Activation {
    /// The name in `hidden_act`.
    pub const fn name(self) -> &'static str {
        match self {
            Activation::Silu => "silu",
            Activation::Gelu => "gelu",
        }
    }
}

/// A network that predicts the next token.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Which of the decoders.
    pub architecture: Architecture,
    /// Rows of the embedding table and of the head.
    pub vocab_size: usize,
    /// Elements of the residual stream.
    pub hidden_size: usize,
    /// Elements between an MLP's linear layers.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub n_layers: usize,
    /// Query heads; a multiple of `n_kv_heads`.
    pub n_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Elements of one head; even. `n_heads * head_dim` need not be `hidden_size`.
    pub head_dim: usize,
    /// Added to the mean square before the root.
    pub rms_norm_eps: f64,
    /// How positions turn queries and keys.
    pub rope: Rope,
    /// Whether the head is the embedding table.
    pub tie_word_embeddings: bool,
    /// Whether q, k and v have biases.
    pub attention_bias: bool,
    /// Whether the attention's output linear layer has a bias.
    pub output_bias: bool,
    /// Whether gate, up and down have biases.
    pub mlp_bias: bool,
    /// Whether each head's query and key is normalised before RoPE.
    pub qk_norm: bool,
    /// The longest context the model was made for.
    pub max_position_embeddings: usize,
    /// Per layer, `Some(n)`: it attends to the last `n` positions only, and `n < max_position_embeddings`.
    pub windows: Vec<Option<usize>>,
    /// The MLP's function; [`Activation::Silu`] for all decoders there are.
    pub hidden_act: Activation,
    /// Mixtures of experts, where there are some.
    pub experts: Option<Experts>,
}

/// The mixtures of experts of a network: each row goes to some of a layer's MLPs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Experts {
    /// MLPs of a layer.
    pub n: usize,
    /// How many of them a row goes to.
    pub chosen: usize,
    /// Elements between the linear layers of each.
    pub intermediate_size: usize,
    /// Whether the parts with which those chosen count add up to 1.
    pub normalise: bool,
    /// Per layer, whether it has them; else its MLP is the usual one.
    pub layers: Vec<bool>,
}

impl DecoderConfig {
    /// The experts of layer `layer`, if it has some.
    pub fn experts_of(&self, layer: usize) -> Option<&Experts> {
        self.experts.as_ref().filter(|experts| experts.layers[layer])
    }
}

/// An encoder that turns a sentence into one vector per token.
#[derive(Clone, Debug, PartialEq)]
pub struct BertConfig {
    /// Rows of the word embedding table.
    pub vocab_size: usize,
    /// Elements of one token's vector.
    pub hidden_size: usize,
    /// Elements between an MLP's linear layers.
    pub intermediate_size: usize,
    /// Encoder layers.
    pub n_layers: usize,
    /// Attention heads; divides `hidden_size`.
    pub n_heads: usize,
    /// `hidden_size / n_heads`.
    pub head_dim: usize,
    /// Added to the variance before the root.
    pub layer_norm_eps: f64,
    /// Rows of the position embedding table: the longest input.
    pub max_position_embeddings: usize,
    /// Rows of the token type embedding table. A sentence on its own is of type 0.
    pub type_vocab_size: usize,
    /// The MLP's function; [`Activation::Gelu`].
    pub hidden_act: Activation,
}

/// A config.json, understood.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelConfig {
    /// Text generation.
    Decoder(DecoderConfig),
    /// Sentence embeddings.
    Bert(BertConfig),
}

impl ModelConfig {
    /// Reads a config.json.
    pub fn open(path: &Path) -> Result<ModelConfig, ModelError> {
        ModelConfig::from_value(path, &read_value(path)?)
    }

    /// Understands a parsed config.json; `path` is what errors call it.
    pub fn from_value(path: &Path, value: &Value) -> Result<ModelConfig, ModelError> {
        let fields = Fields::new(path, value)?;
        refuse_what_is_not_done(&fields)?;
        let architecture = architecture(&fields)?;
        if !architecture.has_experts() {
            refuse_experts(&fields, &["num_experts", "num_local_experts"])?;
        }
        match architecture {
            Architecture::Bert => bert(&fields).map(ModelConfig::Bert),
            other => decoder(&fields, other).map(ModelConfig::Decoder),
        }
    }

    /// Which network it is.
    pub fn architecture(&self) -> Architecture {
        match self {
            ModelConfig::Decoder(c) => c.architecture,
            ModelConfig::Bert(_) => Architecture::Bert,
        }
    }

    /// Token ids are below this.
    pub fn vocab_size(&self) -> usize {
        match self {
            ModelConfig::Decoder(c) => c.vocab_size,
            ModelConfig::Bert(c) => c.vocab_size,
        }
    }

    /// The longest input the model was made for.
    pub fn max_position_embeddings(&self) -> usize {
        match self {
            ModelConfig::Decoder(c) => c.max_position_embeddings,
            ModelConfig::Bert(c) => c.max_position_embeddings,
        }
    }
}

/// Rotary position embedding: pair `i` of a head is turned by `position * inverse_frequencies[i]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// The base of the geometric series of wavelengths.
    pub theta: f64,
    /// How the series is stretched for contexts longer than those of the first training.
    pub scaling: RopeScaling,
}

/// See [`Rope::scaling`].
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    Default,
    /// Every frequency divided by `factor`.
    Linear {
        /// At least 1.
        factor: f64,
    },
    /// Low frequencies divided by `factor`, high ones kept, a smooth passage between them: Llama 3.1 and later.
    Llama3 {
        /// At least 1.
        factor: f64,
        /// Wavelengths over `original_max_position_embeddings / low_freq_factor` are stretched fully.
        low_freq_factor: f64,
        /// Wavelengths under `original_max_position_embeddings / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// The context of the first training.
        original_max_position_embeddings: usize,
    },
    /// YaRN (Peng et al., 2023): pairs that turn seldom in the first training's context have their frequencies divided by `factor`, those that
    /// turn often keep them, with a ramp over the pairs between, and attention is sharpened.
    Yarn {
        /// At least 1.
        factor: f64,
        /// Pairs that turn more often than this keep their frequencies.
        beta_fast: f64,
        /// Pairs that turn more seldom than this have them divided.
        beta_slow: f64,
        /// Whether the ramp begins and ends at whole pairs.
        truncate: bool,
        /// What queries and keys are multiplied with, each.
        attention_factor: f64,
        /// The context of the first training.
        original_max_position_embeddings: usize,
    },
}

impl Rope {
    /// What a query's product with a key is multiplied with, beside the attention's own scale: the square of what each is.
    pub fn score_factor(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor * attention_factor,
            _ => 1.0,
        }
    }

    /// `head_dim / 2` frequencies in radians per position, in f32 step by step as `transformers` computes them, because
    /// at large positions the rounding of a frequency is seen in the logits.
    pub fn inverse_frequencies(&self, head_dim: usize) -> Vec<f32> {
        let powers = (0..head_dim / 2).map(|i| {
            let exponent = (2 * i) as f32 / head_dim as f32;
            // The power is taken in f64 and rounded once: what a well-rounded f32 `pow` gives on any machine.
            f64::from(self.theta as f32).powf(f64::from(exponent)) as f32
        });
        let frequencies = powers.clone().map(|power| 1.0 / power);
        match self.scaling {
            RopeScaling::Default => frequencies.collect(),
            RopeScaling::Linear { factor } => frequencies.map(|f| f / factor as f32).collect(),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings: original,
            } => {
                let low_freq_wavelen = (original as f64 / low_freq_factor) as f32;
                let high_freq_wavelen = (original as f64 / high_freq_factor) as f32;
                let width = (high_freq_factor - low_freq_factor) as f32;
                let (factor, low, original) = (factor as f32, low_freq_factor as f32, original as f32);
                frequencies
                    .map(|f| {
                        // A number divided by a tensor is computed as the tensor's reciprocal times the number.
                        let wavelen = (1.0 / f) * std::f32::consts::TAU;
                        if wavelen > low_freq_wavelen {
                            f / factor
                        } else if wavelen < high_freq_wavelen {
                            f
                        } else {
                            let smooth = ((1.0 / wavelen) * original - low) / width;
                            (1.0 - smooth) * f / factor + smooth * f
                        }
                    })
                    .collect()
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, truncate, original_max_position_embeddings, .. } => {
                // The pair, as a number of dimensions, that turns so often in the first training's context.
                let pair = |turns: f64| {
                    let wavelen = original_max_position_embeddings as f64 / (turns * std::f64::consts::TAU);
                    head_dim as f64 * wavelen.ln() / (2.0 * self.theta.ln())
                };
                let (low, high) = (pair(beta_fast), pair(beta_slow));
                let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
                let (low, high) = (low.max(0.0), high.min(head_dim as f64 - 1.0));
                // A ramp of no length is a step.
                let width = if low == high { 0.001 } else { high - low };
                powers
                    .enumerate()
                    .map(|(i, power)| {
                        let kept = 1.0 - ((i as f32 - low as f32) / width as f32).clamp(0.0, 1.0);
                        1.0 / (factor as f32 * power) * (1.0 - kept) + 1.0 / power * kept
                    })
                    .collect()
            }
        }
    }
}

// Above every model there is by far, and low enough that the product of any three fits in u64.
const MAX_VOCAB: usize = 1 << 22;
const MAX_HIDDEN: usize = 1 << 17;
const MAX_INTERMEDIATE: usize = 1 << 20;
const MAX_LAYERS: usize = 1 << 10;
const MAX_HEADS: usize = 1 << 10;
const MAX_HEAD_DIM: usize = 1 << 10;
const MAX_POSITIONS: usize = 1 << 30;

fn architecture(fields: &Fields<'_>) -> Result<Architecture, ModelError> {
    let supported = || Architecture::ALL.map(Architecture::class_name).join(", ");
    if let Some(names) = fields.texts("architectures")?.filter(|names| !names.is_empty()) {
        return names
            .iter()
            .find_map(|name| Architecture::from_class_name(name))
            .ok_or_else(|| ModelError::unsupported(fields.path(), "architectures", names.join(", "), supported()));
    }
    let Some(model_type) = fields.text("model_type")? else {
        return Err(fields.wrong("architectures", format!("one of {}", supported())));
    };
    Architecture::ALL
        .into_iter()
        .find(|a| a.model_type() == model_type)
        .ok_or_else(|| fields.unsupported("model_type", Architecture::ALL.map(Architecture::model_type).join(", ")))
}

/// Keys that no architecture here heeds and that would change what the weights mean.
fn refuse_what_is_not_done(fields: &Fields<'_>) -> Result<(), ModelError> {
    for key in ["quantization_config", "compression_config"] {
        if let Some(quantization) = fields.get(key) {
            let method = quantization.get("quant_method").unwrap_or(quantization);
            return Err(ModelError::unsupported(fields.path(), key, brief(method), "weights in bf16, f16 or f32"));
        }
    }
    refuse_experts(fields, &["n_routed_experts", "moe_num_experts", "n_shared_experts"])
}

fn refuse_experts(fields: &Fields<'_>, keys: &[&str]) -> Result<(), ModelError> {
    match keys.iter().find(|key| fields.get(key).is_some_and(|v| v.as_f64() != Some(0.0))) {
        Some(key) => {
            let with = Architecture::ALL.into_iter().filter(|a| a.has_experts()).map(Architecture::class_name);
            let with = with.collect::<Vec<_>>().join(", ");
            Err(fields.unsupported(key, format!("mixtures of experts of {with} alone")))
        }
        None => Ok(()),
    }
}

/// The mixtures of experts of `architecture`, whose MLPs have `intermediate_size` where the file has no other for experts.
fn experts(
    fields: &Fields<'_>,
    architecture: Architecture,
    n_layers: usize,
    intermediate_size: usize,
) -> Result<Option<Experts>, ModelError> {
    if !architecture.has_experts() {
        return Ok(None);
    }
    const MOST: usize = routing::MAX_EXPERTS as usize;
    let is_mixtral = architecture == Architecture::Mixtral;
    // Which of its names the number has depends on the version of transformers that wrote the file.
    let key = if fields.get("num_experts").is_some() { "num_experts" } else { "num_local_experts" };
    let n = fields.whole(key, usize::from(is_mixtral)..=MOST)?.unwrap_or(if is_mixtral { 8 } else { 128 });
    let own = fields.whole("moe_intermediate_size", 1..=MAX_INTERMEDIATE)?.unwrap_or(768);
    // Which layers have them, Mixtral's files do not say.
    let (mut step, mut dense, mut normalise) = (1, Vec::new(), true);
    if !is_mixtral {
        step = fields.whole("decoder_sparse_step", 1..=MAX_LAYERS)?.unwrap_or(1);
        dense = fields.wholes("mlp_only_layers", 0..=MAX_LAYERS)?.unwrap_or_default();
        normalise = fields.flag("norm_topk_prob")?.unwrap_or(false);
    }
    let layers: Vec<bool> =
        (0..n_layers).map(|layer| n > 0 && (layer + 1) % step == 0 && !dense.contains(&layer)).collect();
    if !layers.contains(&true) {
        return Ok(None);
    }
    let most = n.min(routing::MAX_CHOSEN as usize);
    let chosen = fields.whole("num_experts_per_tok", 1..=most)?.unwrap_or(if is_mixtral { 2 } else { 8 });
    if chosen > most {
        return Err(fields.wrong("num_experts_per_tok", format!("at most {key}, {n}")));
    }
    let intermediate_size = if is_mixtral { intermediate_size } else { own };
    Ok(Some(Experts { n, chosen, intermediate_size, normalise, layers }))
}

fn activation(fields: &Fields<'_>, supported: Activation) -> Result<Activation, ModelError> {
    match (fields.text("hidden_act")?, supported) {
        (None, a) => Ok(a),
        (Some("silu" | "swish"), Activation::Silu) => Ok(Activation::Silu),
        (Some("gelu"), Activation::Gelu) => Ok(Activation::Gelu),
        (Some(_), a) => Err(fields.unsupported("hidden_act", format!("\"{}\" for this architecture", a.name()))),
    }
}

fn decoder(fields: &Fields<'_>, architecture: Architecture) -> Result<DecoderConfig, ModelError> {
    let hidden_size = fields.required_whole("hidden_size", 1..=MAX_HIDDEN)?;
    let n_layers = fields.required_whole("num_hidden_layers", 1..=MAX_LAYERS)?;
    let n_heads = fields.required_whole("num_attention_heads", 1..=MAX_HEADS)?;

    // What each configuration class takes where the key is not in the file.
    let default_kv_heads = match architecture {
        _ if fields.has("num_key_value_heads") => n_heads,
        Architecture::Mistral | Architecture::Mixtral => 8,
        Architecture::Qwen3Moe => 4,
        Architecture::Qwen2 | Architecture::Qwen3 => 32,
        _ => n_heads,
    };
    let n_kv_heads = fields.whole("num_key_value_heads", 1..=MAX_HEADS)?.unwrap_or(default_kv_heads);
    if !n_heads.is_multiple_of(n_kv_heads) {
        return Err(fields.wrong("num_key_value_heads", format!("a divisor of num_attention_heads, {n_heads}")));
    }

    let head_dim = match fields.whole("head_dim", 1..=MAX_HEAD_DIM)? {
        Some(n) => n,
        None if architecture == Architecture::Qwen3 && !fields.has("head_dim") => 128,
        None if hidden_size.is_multiple_of(n_heads) => hidden_size / n_heads,
        None => {
            return Err(fields.wrong("num_attention_heads", format!("a divisor of hidden_size, {hidden_size}")));
        }
    };
    if !head_dim.is_multiple_of(2) || head_dim > MAX_HEAD_DIM {
        return Err(ModelError::key(
            fields.path(),
            "head_dim",
            head_dim.to_string(),
            format!("an even number from 2 to {MAX_HEAD_DIM} (RoPE turns pairs)"),
        ));
    }

    let default_positions = match architecture {
        Architecture::Llama => 2048,
        Architecture::Mistral | Architecture::Mixtral => 131_072,
        _ => 32_768,
    };
    let max_position_embeddings =
        fields.whole("max_position_embeddings", 1..=MAX_POSITIONS)?.unwrap_or(default_positions);

    let default_theta = if architecture == Architecture::Mixtral { 1e6 } else { 1e4 };
    let rope = rope(fields, default_theta, max_position_embeddings)?;
    // Files that ask for YaRN often have the number from before.
    let max_position_embeddings = match rope.scaling {
        RopeScaling::Yarn { factor, original_max_position_embeddings: original, .. } => {
            max_position_embeddings.max(((factor * original as f64) as usize).min(MAX_POSITIONS))
        }
        _ => max_position_embeddings,
    };

    let flag = |key| Ok::<bool, ModelError>(fields.flag(key)?.unwrap_or(false));
    let attention_bias = match architecture {
        Architecture::Qwen2 => true,
        Architecture::Qwen3 | Architecture::Qwen3Moe | Architecture::Llama => flag("attention_bias")?,
        _ => false,
    };
    let layer_types = fields.texts("layer_types")?.unwrap_or_default();
    let intermediate_size = fields.required_whole("intermediate_size", 1..=MAX_INTERMEDIATE)?;
    Ok(DecoderConfig {
        architecture,
        vocab_size: fields.required_whole("vocab_size", 1..=MAX_VOCAB)?,
        hidden_size,
        intermediate_size,
        n_layers,
        n_heads,
        n_kv_heads,
        head_dim,
        rms_norm_eps: fields.real("rms_norm_eps", 0.0..=1.0)?.unwrap_or(1e-6),
        rope,
        tie_word_embeddings: flag("tie_word_embeddings")?,
        attention_bias,
        output_bias: attention_bias && architecture != Architecture::Qwen2,
        mlp_bias: architecture == Architecture::Llama && flag("mlp_bias")?,
        qk_norm: matches!(architecture, Architecture::Qwen3 | Architecture::Qwen3Moe),
        max_position_embeddings,
        windows: windows(fields, architecture, n_layers, &layer_types, max_position_embeddings)?,
        hidden_act: activation(fields, Activation::Silu)?,
        experts: experts(fields, architecture, n_layers, intermediate_size)?,
    })
}

/// The window of each layer that has one smaller than the context.
fn windows(
    fields: &Fields<'_>,
    architecture: Architecture,
    n_layers: usize,
    layer_types: &[&str],
    max_position_embeddings: usize,
) -> Result<Vec<Option<usize>>, ModelError> {
    const SLIDING: &str = "sliding_attention";
    if let Some(other) = layer_types.iter().find(|t| !matches!(**t, "full_attention" | SLIDING)) {
        return Err(ModelError::unsupported(fields.path(), "layer_types", *other, "full_attention, sliding_attention"));
    }
    // Where the key is missing, and not null, transformers has one.
    let window = match fields.whole("sliding_window", 1..=MAX_POSITIONS)? {
        None if !fields.has("sliding_window") && architecture != Architecture::Mixtral => Some(4096),
        window => window,
    };
    let is_active = match architecture {
        Architecture::Mistral | Architecture::Mixtral => true,
        Architecture::Qwen2 | Architecture::Qwen3 | Architecture::Qwen3Moe => {
            fields.flag("use_sliding_window")?.unwrap_or(false)
        }
        // Llama has no window, whatever the file says.
        _ => false,
    };
    let first = match architecture {
        Architecture::Mistral | Architecture::Mixtral | Architecture::Qwen3Moe => 0,
        _ => fields.whole("max_window_layers", 0..=MAX_LAYERS)?.unwrap_or(28),
    };
    if !layer_types.is_empty() && layer_types.len() != n_layers {
        let found = layer_types.len().to_string();
        return Err(ModelError::key(
            fields.path(),
            "layer_types",
            found + " entries",
            format!("{n_layers}, one a layer"),
        ));
    }
    let window = window.filter(|n| is_active && *n < max_position_embeddings);
    let slides = |layer: usize| layer_types.get(layer).map_or(layer >= first, |kind| *kind == SLIDING);
    Ok((0..n_layers).map(|layer| window.filter(|_| slides(layer))).collect())
}

fn rope(fields: &Fields<'_>, default_theta: f64, max_position_embeddings: usize) -> Result<Rope, ModelError> {
    const KINDS: &str = "default, linear, llama3, yarn";
    const ORIGINAL: &str = "original_max_position_embeddings";
    let mut given = match fields.object("rope_scaling")? {
        Some(old) if old.entries().next().is_some() => Some(old),
        _ => fields.object("rope_parameters")?,
    };
    // Per layer type: {"full_attention": {..}, "sliding_attention": {..}}. One rope serves all layers here.
    if let Some(outer) = &given
        && outer.entries().next().is_some()
        && outer.entries().all(|(_, v)| v.is_object())
    {
        let mut values = outer.entries().map(|(_, v)| v);
        let first = values.next();
        if values.any(|v| Some(v) != first) {
            return Err(fields.unsupported("rope_parameters", "the same parameters for every layer type"));
        }
        let key = outer.entries().next().map(|(k, _)| k).unwrap_or_default();
        given = outer.object(key)?;
    }

    const THETA: std::ops::RangeInclusive<f64> = 1.0..=1e15;
    let (mut theta, mut scaling) = (None, RopeScaling::Default);
    let mut partial = fields.clone();
    if let Some(given) = given {
        theta = given.real("rope_theta", THETA)?;
        let kind_key = if given.get("rope_type").is_some() { "rope_type" } else { "type" };
        // Beside all other keys it comes before the one among them.
        let original = || match fields.whole(ORIGINAL, 1..=MAX_POSITIONS)? {
            Some(n) => Ok(n),
            None => Ok(given.whole(ORIGINAL, 1..=MAX_POSITIONS)?.unwrap_or(max_position_embeddings)),
        };
        scaling = match given.text(kind_key)?.unwrap_or("default") {
            "default" => RopeScaling::Default,
            "linear" => RopeScaling::Linear { factor: given.required_real("factor", 1.0..=1e6)? },
            "llama3" => {
                let low_freq_factor = given.required_real("low_freq_factor", 1e-6..=1e6)?;
                let high_freq_factor = given.required_real("high_freq_factor", 1e-6..=1e6)?;
                if high_freq_factor <= low_freq_factor {
                    return Err(
                        given.wrong("high_freq_factor", format!("more than low_freq_factor, {low_freq_factor}"))
                    );
                }
                RopeScaling::Llama3 {
                    factor: given.required_real("factor", 1.0..=1e6)?,
                    low_freq_factor,
                    high_freq_factor,
                    original_max_position_embeddings: original()?,
                }
            }
            "yarn" => yarn(&given, original()?, max_position_embeddings)?,
            _ => return Err(given.unsupported(kind_key, KINDS)),
        };
        if given.get("partial_rotary_factor").is_some() {
            partial = given;
        }
    }
    if partial.get("partial_rotary_factor").is_some_and(|v| v.as_f64() != Some(1.0)) {
        return Err(partial.unsupported("partial_rotary_factor", "1 (the whole head is turned)"));
    }
    let theta = match theta {
        Some(theta) => theta,
        None => fields.real("rope_theta", THETA)?.unwrap_or(default_theta),
    };
    if matches!(scaling, RopeScaling::Yarn { .. }) && theta <= 1.0 {
        return Err(ModelError::key(fields.path(), "rope_theta", theta.to_string(), "more than 1 (YaRN)"));
    }
    Ok(Rope { theta, scaling })
}

/// YaRN, where the first training's context was `original`.
fn yarn(given: &Fields<'_>, original: usize, max_position_embeddings: usize) -> Result<RopeScaling, ModelError> {
    const TURNS: std::ops::RangeInclusive<f64> = 1e-6..=1e6;
    let factor = match given.real("factor", 1.0..=1e6)? {
        Some(factor) => factor,
        None => (max_position_embeddings as f64 / original as f64).max(1.0),
    };
    let beta_fast = given.real("beta_fast", TURNS)?.unwrap_or(32.0);
    let beta_slow = given.real("beta_slow", TURNS)?.unwrap_or(1.0);
    if beta_fast < beta_slow {
        return Err(given.wrong("beta_fast", format!("at least beta_slow, {beta_slow}")));
    }
    // 1 or more, as the paper has it; by how much a file may say, for the scores or for all.
    let of = |weight: f64| 0.1 * weight * factor.ln() + 1.0;
    const WEIGHTS: std::ops::RangeInclusive<f64> = 0.0..=1e3;
    let (mscale, of_all) = (given.real("mscale", WEIGHTS)?, given.real("mscale_all_dim", WEIGHTS)?);
    let attention_factor = match given.real("attention_factor", 1e-3..=1e3)? {
        Some(factor) => factor,
        None => match (mscale.unwrap_or(0.0), of_all.unwrap_or(0.0)) {
            (mscale, of_all) if mscale > 0.0 && of_all > 0.0 => of(mscale) / of(of_all),
            _ => of(1.0),
        },
    };
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast,
        beta_slow,
        truncate: given.flag("truncate")?.unwrap_or(true),
        attention_factor,
        original_max_position_embeddings: original,
    })
}

fn bert(fields: &Fields<'_>) -> Result<BertConfig, ModelError> {
    let hidden_size = fields.required_whole("hidden_size", 1..=MAX_HIDDEN)?;
    let n_heads = fields.required_whole("num_attention_heads", 1..=MAX_HEADS)?;
    if !hidden_size.is_multiple_of(n_heads) {
        return Err(fields.wrong("num_attention_heads", format!("a divisor of hidden_size, {hidden_size}")));
    }
    if fields.text("position_embedding_type")?.is_some_and(|t| t != "absolute") {
        return Err(fields.unsupported("position_embedding_type", "\"absolute\""));
    }
    for key in ["is_decoder", "add_cross_attention"] {
        if fields.flag(key)? == Some(true) {
            return Err(fields.unsupported(key, "false (an encoder)"));
        }
    }
    Ok(BertConfig {
        vocab_size: fields.required_whole("vocab_size", 1..=MAX_VOCAB)?,
        hidden_size,
        intermediate_size: fields.required_whole("intermediate_size", 1..=MAX_INTERMEDIATE)?,
        n_layers: fields.required_whole("num_hidden_layers", 1..=MAX_LAYERS)?,
        n_heads,
        head_dim: hidden_size / n_heads,
        layer_norm_eps: fields.real("layer_norm_eps", 0.0..=1.0)?.unwrap_or(1e-12),
        max_position_embeddings: fields.whole("max_position_embeddings", 1..=MAX_POSITIONS)?.unwrap_or(512),
        type_vocab_size: fields.whole("type_vocab_size", 1..=MAX_VOCAB)?.unwrap_or(2),
        hidden_act: activation(fields, Activation::Gelu)?,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    const PATH: &str = "config.json";

    fn parse(value: &Value) -> Result<ModelConfig, String> {
        ModelConfig::from_value(Path::new(PATH), value).map_err(|e| e.to_string())
    }

    fn decoder_of(value: &Value) -> DecoderConfig {
        match parse(value) {
            Ok(ModelConfig::Decoder(config)) => config,
            other => panic!("{other:?}"),
        }
    }

    fn llama() -> Value {
        json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024, "hidden_size": 256,
            "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
            "max_position_embeddings": 8192,
        })
    }

    /// `base` with keys set, or removed where null.
    fn with(base: Value, change: &Value) -> Value {
        let (mut base, change) = (base.as_object().expect("an object").clone(), change.as_object().expect("an object"));
        for (key, value) in change {
            base.insert(key.clone(), value.clone());
        }
        Value::Object(base)
    }

    #[test]
    fn mixtures_of_experts() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        let open = |name: &str| read_value(&dir.join(name).join("config.json")).expect("JSON");
        let experts = |value: &Value| decoder_of(value).experts;
        let layers = vec![true, false, true];
        let of_qwen3 = Experts { n: 8, chosen: 3, intermediate_size: 64, normalise: false, layers };
        assert_eq!(experts(&open("tiny-qwen3-moe")), Some(of_qwen3.clone()));
        let of_mixtral = Experts { n: 4, chosen: 2, intermediate_size: 80, normalise: true, layers: vec![true; 2] };
        assert_eq!(experts(&open("tiny-mixtral")), Some(of_mixtral));
        // As older files call them; every second layer; none.
        let changed = |change: Value| with(open("tiny-qwen3-moe"), &change);
        let other_name = changed(json!({ "num_local_experts": null, "num_experts": 16, "norm_topk_prob": true }));
        assert_eq!(experts(&other_name), Some(Experts { n: 16, normalise: true, ..of_qwen3.clone() }));
        let second = changed(json!({ "decoder_sparse_step": 2, "mlp_only_layers": null }));
        assert_eq!(experts(&second).map(|e| e.layers), Some(vec![false, true, false]));
        assert_eq!(experts(&changed(json!({ "num_local_experts": 0 }))), None);
        assert_eq!(experts(&changed(json!({ "decoder_sparse_step": 4 }))), None);
        for (change, expected) in [
            (json!({ "num_experts_per_tok": 9 }), "num_experts_per_tok: 9, expected"),
            (json!({ "num_local_experts": 2000 }), "num_local_experts: 2000, expected"),
            (json!({ "mlp_only_layers": ["1"] }), "mlp_only_layers: [\"1\"], expected a list of whole numbers"),
            (json!({ "n_shared_experts": 1 }), "n_shared_experts: 1 is not supported"),
        ] {
            let message = parse(&changed(change)).expect_err(expected);
            assert!(message.contains(expected), "{message}");
        }
        let message = parse(&with(llama(), &json!({ "num_local_experts": 8 }))).expect_err("experts");
        assert!(message.contains("num_local_experts: 8 is not supported; supported: "), "{message}");
        assert!(message.ends_with("Qwen3MoeForCausalLM, MixtralForCausalLM alone"), "{message}");
    }

    #[test]
    fn fixtures() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        let open = |name: &str| match ModelConfig::open(&dir.join(name).join("config.json")) {
            Ok(ModelConfig::Decoder(c)) => c,
            other => panic!("{other:?}"),
        };
        let qwen3 = open("tiny-qwen3");
        assert_eq!((qwen3.architecture, qwen3.head_dim, qwen3.qk_norm), (Architecture::Qwen3, 64, true));
        assert_eq!(
            (qwen3.attention_bias, qwen3.tie_word_embeddings, qwen3.windows.iter().flatten().next()),
            (false, true, None)
        );
        assert_eq!(qwen3.rope, Rope { theta: 1e6, scaling: RopeScaling::Default });

        let llama = open("tiny-llama");
        assert_eq!((llama.n_heads, llama.n_kv_heads, llama.rms_norm_eps), (8, 2, 1e-5));
        assert_eq!(
            llama.rope.scaling,
            RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 1024
            }
        );

        let qwen2 = open("tiny-qwen2");
        assert_eq!((qwen2.head_dim, qwen2.attention_bias, qwen2.output_bias, qwen2.qk_norm), (32, true, false, false));
    }

    #[test]
    fn old_and_new_keys_say_the_same() {
        let scaling = json!({"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                             "original_max_position_embeddings": 4096});
        let mut new = scaling.clone();
        new["rope_type"] = "llama3".into();
        new["rope_theta"] = 500000.0.into();
        let new_scaling = new.clone();
        let mut old = scaling;
        old["type"] = "llama3".into();
        let new = decoder_of(&with(llama(), &json!({"rope_parameters": new, "dtype": "bfloat16"})));
        let nested = json!({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 7e4}}});
        let old =
            decoder_of(&with(llama(), &json!({"rope_scaling": old, "rope_theta": 500000, "torch_dtype": "bfloat16"})));
        assert_eq!(old, new);
        assert_eq!(decoder_of(&with(llama(), &nested)).rope, Rope { theta: 7e4, scaling: RopeScaling::Default });
        let mut twice = json!({"rope_parameters": new_scaling, "original_max_position_embeddings": 512});
        let of = |value: &Value| match decoder_of(&with(llama(), value)).rope.scaling {
            RopeScaling::Llama3 { original_max_position_embeddings, .. } => original_max_position_embeddings,
            other => panic!("{other:?}"),
        };
        assert_eq!(of(&twice), 512, "beside the others it comes first");
        twice["original_max_position_embeddings"] = Value::Null;
        assert_eq!(of(&twice), 4096);
        let linear = json!({"rope_scaling": {"type": "linear", "factor": 2}});
        assert_eq!(decoder_of(&with(llama(), &linear)).rope.scaling, RopeScaling::Linear { factor: 2.0 });
        assert_eq!(decoder_of(&llama()).rope, Rope { theta: 10_000.0, scaling: RopeScaling::Default });
    }

    #[test]
    fn defaults_are_those_of_each_class() {
        let bare = |class: &str| {
            let mut map = llama().as_object().expect("an object").clone();
            map.insert("architectures".into(), json!([class]));
            map.insert("num_attention_heads".into(), 32.into());
            map.shift_remove("num_key_value_heads");
            decoder_of(&Value::Object(map))
        };
        assert_eq!(bare("LlamaForCausalLM").n_kv_heads, 32);
        assert_eq!(bare("MistralForCausalLM").n_kv_heads, 8);
        assert_eq!((bare("Qwen3ForCausalLM").head_dim, bare("Qwen2ForCausalLM").head_dim), (128, 8));
        let by_type = json!({"architectures": null, "model_type": "mistral"});
        assert_eq!(decoder_of(&with(llama(), &by_type)).architecture, Architecture::Mistral);
    }

    /// Figures computed from the paper's formulas, in f64, by other means.
    #[test]
    fn yarn_divides_what_turns_seldom() {
        let near = |found: &[f32], expected: &[f64]| {
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(expected) {
                assert!((f64::from(*found) / expected - 1.0).abs() < 1e-5, "{found}, expected {expected}");
            }
        };
        // As Qwen3's files ask for it, beside the number of positions from before.
        let scaling = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768});
        let change = json!({"rope_scaling": scaling, "rope_theta": 1e6, "max_position_embeddings": 40960});
        let config = decoder_of(&with(llama(), &change));
        assert_eq!(config.max_position_embeddings, 131_072);
        let all = config.rope.inverse_frequencies(128);
        let (kept, expected) = (
            [0, 23, 24, 30, 39, 40, 41, 63],
            [
                1.0,
                6.978_305_848_598_663e-3,
                5.375_321_490_790_102e-3,
                1.064_360_981_247_001_7e-3,
                6.490_394_320_837_028e-5,
                4.445_698_525_097_307e-5,
                3.582_531_425_592_407e-5,
                3.102_344_401_879_299e-7,
            ],
        );
        near(&kept.map(|i| all[i]), &expected);
        assert!((config.rope.score_factor() - 1.138_629_436_111_989f64.powi(2)).abs() < 1e-12);

        let scaling = json!({"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "truncate": false,
                             "mscale": 1.0, "mscale_all_dim": 1.0});
        let rope = decoder_of(&with(llama(), &json!({"rope_scaling": scaling, "rope_theta": 1e4}))).rope;
        let expected = [
            1.0,
            0.514_909_984_348_849,
            0.243_596_404_813_701_07,
            0.111_139_816_138_681_29,
            0.047_965_076_075_703_68,
            0.018_799_993_111_229_703,
            0.005_976_137_225_861_21,
            0.002_222_849_262_548_653_7,
            0.001_25,
            0.000_702_926_656_487_936_4,
        ];
        near(&rope.inverse_frequencies(32)[..10], &expected);
        assert_eq!(rope.score_factor(), 1.0);
        // No factor: what the file's numbers of positions say.
        let scaling = json!({"type": "yarn", "original_max_position_embeddings": 1024, "attention_factor": 1.5});
        let rope = decoder_of(&with(llama(), &json!({"rope_scaling": scaling, "max_position_embeddings": 4096}))).rope;
        assert!(matches!(rope.scaling, RopeScaling::Yarn { factor: 4.0, beta_fast: 32.0, beta_slow: 1.0, .. }));
        assert_eq!(rope.score_factor(), 2.25);
    }

    #[test]
    fn windows_count_only_where_they_are_active() {
        // Of the first layer that has one.
        let window = |change: Value| decoder_of(&with(llama(), &change)).windows.into_iter().flatten().next();
        let mistral = json!(["MistralForCausalLM"]);
        let qwen = json!(["Qwen2ForCausalLM"]);
        assert_eq!(window(json!({"architectures": mistral, "sliding_window": null})), None);
        // Left out it is 4096.
        assert_eq!(window(json!({"architectures": mistral, "max_position_embeddings": 8192})), Some(4096));
        let left_out = json!({"architectures": qwen, "use_sliding_window": true, "max_window_layers": 0,
                              "max_position_embeddings": 8192});
        assert_eq!(window(left_out), Some(4096));
        assert_eq!(window(json!({"architectures": mistral, "sliding_window": 4096})), Some(4096));
        assert_eq!(window(json!({"architectures": mistral, "sliding_window": 8192})), None);
        assert_eq!(window(json!({"architectures": qwen, "sliding_window": 64, "use_sliding_window": false})), None);
        let on =
            json!({"architectures": qwen, "sliding_window": 64, "use_sliding_window": true, "max_window_layers": 1});
        assert_eq!(window(on), Some(64));
        let all_full = json!({"architectures": qwen, "sliding_window": 64, "use_sliding_window": true});
        assert_eq!(window(all_full), None);
        assert_eq!(window(json!({"sliding_window": 64})), None, "Llama has no window");
        // Which layers have one.
        let windows = |change: Value| decoder_of(&with(llama(), &change)).windows;
        let layers = json!({"architectures": qwen, "sliding_window": 64, "use_sliding_window": true,
                            "num_hidden_layers": 3, "max_window_layers": 1});
        assert_eq!(windows(layers.clone()), [None, Some(64), Some(64)]);
        let mut types = layers;
        types["layer_types"] = json!(["sliding_attention", "full_attention", "sliding_attention"]);
        assert_eq!(windows(types.clone()), [Some(64), None, Some(64)]);
        types["layer_types"] = json!(["sliding_attention"]);
        let message = parse(&with(llama(), &types)).expect_err("a type is missing");
        assert!(message.contains("layer_types") && message.contains("1 entries, expected 3, one a layer"), "{message}");
    }

    #[test]
    fn what_is_not_done_is_refused_by_name() {
        let refused = |change: Value| parse(&with(llama(), &change)).expect_err("must be refused");
        assert_eq!(
            refused(json!({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}})),
            "config.json: rope_scaling.rope_type: \"longrope\" is not supported; supported: default, linear, llama3, yarn"
        );
        assert_eq!(
            refused(json!({"architectures": ["GptOssForCausalLM"]})),
            "config.json: architectures: GptOssForCausalLM is not supported; supported: Qwen3ForCausalLM, \
             Qwen3MoeForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM, BertModel"
        );
        for (change, word) in [
            (json!({"hidden_act": "gelu"}), "hidden_act: \"gelu\""),
            (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor: 0.5"),
            (json!({"rope_parameters": {"partial_rotary_factor": 0.25}}), "rope_parameters.partial_rotary_factor"),
            (json!({"quantization_config": {"quant_method": "fp8"}}), "quantization_config: \"fp8\""),
            (json!({"compression_config": {"quant_method": "compressed-tensors"}}), "compression_config"),
            (json!({"num_local_experts": 8}), "num_local_experts: 8"),
            (json!({"layer_types": ["linear_attention"]}), "linear_attention"),
            (json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}}), "\"dynamic\""),
            (
                json!({"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}}),
                "rope_parameters",
            ),
        ] {
            let message = refused(change);
            assert!(message.contains(word) && message.contains("not supported"), "{message}");
        }
    }

    #[test]
    fn senseless_numbers_are_refused() {
        let refused = |change: Value| parse(&with(llama(), &change)).expect_err("must be refused");
        assert_eq!(
            refused(json!({"hidden_size": 0})),
            "config.json: hidden_size: 0, expected a whole number from 1 to 131072"
        );
        assert_eq!(
            refused(json!({"num_key_value_heads": 3})),
            "config.json: num_key_value_heads: 3, expected a divisor of num_attention_heads, 8"
        );
        assert_eq!(
            refused(json!({"vocab_size": null})).split(", expected").next(),
            Some("config.json: vocab_size: missing")
        );
        for change in [
            json!({"hidden_size": -1}),
            json!({"hidden_size": "256"}),
            json!({"hidden_size": 1u64 << 60}),
            json!({"hidden_size": 255, "head_dim": null}),
            json!({"head_dim": 31}),
            json!({"num_hidden_layers": 2.5}),
            json!({"rms_norm_eps": -1}),
            json!({"rope_theta": 0}),
            json!({"max_position_embeddings": 0}),
            json!({"tie_word_embeddings": "yes"}),
            json!({"rope_scaling": {"type": "llama3", "factor": 8}}),
            json!({"rope_scaling": {"type": "yarn", "factor": 0.5}}),
            json!({"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 32}}),
            json!({"rope_scaling": {"type": "yarn", "factor": 4}, "rope_theta": 1}),
            json!({"rope_scaling": {"type": "yarn", "factor": 4, "truncate": 1}}),
            json!({"architectures": "LlamaForCausalLM"}),
            json!({"architectures": [], "model_type": null}),
        ] {
            let message = refused(change.clone());
            assert!(message.contains("expected") && !message.contains('\n'), "{change}: {message}");
        }
        assert!(parse(&json!([1])).expect_err("a list").contains("expected a JSON object"));
    }

    #[test]
    fn bert_of_a_sentence_model() {
        let base = json!({
            "architectures": ["BertModel"], "hidden_act": "gelu", "hidden_size": 384, "intermediate_size": 1536,
            "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert", "num_attention_heads": 12,
            "num_hidden_layers": 6, "position_embedding_type": "absolute", "type_vocab_size": 2, "vocab_size": 30522,
        });
        match parse(&base) {
            Ok(ModelConfig::Bert(c)) => assert_eq!((c.head_dim, c.layer_norm_eps, c.n_layers), (32, 1e-12, 6)),
            other => panic!("{other:?}"),
        }
        for change in [json!({"position_embedding_type": "relative_key"}), json!({"hidden_act": "gelu_new"})] {
            assert!(parse(&with(base.clone(), &change)).expect_err("refused").contains("not supported"));
        }
    }

    /// Values made with every operation rounded to f32 by a program of its own.
    #[test]
    fn inverse_frequencies_are_those_of_the_reference() {
        let plain = Rope { theta: 1e6, scaling: RopeScaling::Default }.inverse_frequencies(128);
        assert_eq!(plain.len(), 64);
        for (i, expected) in [(0, 1.0), (1, 0.805_842_2), (31, 0.001_240_937_9), (63, 1.240_937_8e-6)] {
            assert_close(plain[i], expected);
        }
        let linear = Rope { theta: 1e6, scaling: RopeScaling::Linear { factor: 4.0 } }.inverse_frequencies(128);
        assert!(plain.iter().zip(&linear).all(|(a, b)| a / 4.0 == *b));

        let scaling = RopeScaling::Llama3 {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        let llama = Rope { theta: 500_000.0, scaling }.inverse_frequencies(64);
        for (i, expected) in [
            (0, 1.0),
            (1, 0.663_601_3),
            (14, 0.003_211_446),
            (15, 0.001_290_548),
            (16, 0.000_429_556_7),
            (17, 9.708_286e-5),
            (18, 1.946_163_9e-5),
            (31, 9.418_306e-8),
        ] {
            assert_close(llama[i], expected);
        }
    }

    fn assert_close(given: f32, expected: f32) {
        assert!((given - expected).abs() <= 2e-7 * expected, "{given:e}, expected {expected:e}");
    }

    fn any_value() -> impl Strategy<Value = Value> {
        prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            (0u64..64).prop_map(Value::from),
            "[a-z]{0,8}".prop_map(Value::from),
            Just(json!({})),
            Just(json!([])),
            Just(json!({"type": "llama3", "factor": 1e300})),
        ]
    }

    proptest! {
        /// Any value under any key we read is understood or refused in one line.
        #[test]
        fn any_value_is_understood_or_refused(
            key in proptest::sample::select(vec![
                "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling",
                "rope_parameters", "tie_word_embeddings", "attention_bias", "mlp_bias", "max_position_embeddings",
                "sliding_window", "layer_types", "hidden_act", "partial_rotary_factor", "quantization_config",
            ]),
            value in any_value(),
        ) {
            match parse(&with(llama(), &json!({key: value}))) {
                Ok(ModelConfig::Decoder(c)) => {
                    prop_assert!(c.n_heads % c.n_kv_heads == 0 && c.head_dim % 2 == 0);
                    prop_assert!(c.rope.inverse_frequencies(c.head_dim).iter().all(|f| f.is_finite()));
                }
                Ok(ModelConfig::Bert(_)) => {}
                Err(message) => prop_assert!(!message.contains('\n'), "{}", message),
            }
        }
    }
}
