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

mod architecture;
mod rope;

use std::path::Path;

use serde_json::Value;

use super::error::ModelError;
use super::json::{Fields, brief, read_value};
pub(crate) use architecture::Norms;
pub use architecture::{Architecture, QkNorm};
use architecture::{Biases, Sliding};
use perpetua_device::kernels::routing;
pub use rope::{Rope, RopeScaling};

/// The function between an MLP's two linear layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// `x * Phi(x)` with the exact normal distribution function (erf), not its tanh approximation.
    Gelu,
    /// That approximation.
    GeluTanh,
}

impl Activation {
    /// The name in `hidden_act`.
    pub const fn name(self) -> &'static str {
        match self {
            Activation::Silu => "silu",
            Activation::Gelu => "gelu",
            Activation::GeluTanh => "gelu_pytorch_tanh",
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
    /// Per layer, how positions turn queries and keys.
    pub ropes: Vec<Rope>,
    /// Elements of a head that are turned, the first ones; even.
    pub rotary_dim: usize,
    /// Scores are divided by its root: `head_dim`, unless the file has another number.
    pub query_scalar: f64,
    /// What embeddings are multiplied with.
    pub embedding_scale: f64,
    /// Whether the head is the embedding table.
    pub tie_word_embeddings: bool,
    /// Whether q, k and v have biases.
    pub attention_bias: bool,
    /// Whether the attention's output linear layer has a bias.
    pub output_bias: bool,
    /// Whether gate, up and down have biases.
    pub mlp_bias: bool,
    /// What is normalised of queries and keys, before RoPE.
    pub qk_norm: QkNorm,
    /// The longest context the model was made for.
    pub max_position_embeddings: usize,
    /// Per layer, `Some(n)`: it attends to the last `n` positions only, and `n < max_position_embeddings`.
    pub windows: Vec<Option<usize>>,
    /// The MLP's function.
    pub hidden_act: Activation,
    /// Mixtures of experts, where there are some.
    pub experts: Option<Experts>,
    /// Of a sentence model, how many elements of its vectors are kept; `None`: all. The folder says it, no config.json.
    pub embedding_dim: Option<usize>,
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
    /// Which of the encoders.
    pub architecture: Architecture,
    /// Rows of the position embedding table.
    pub max_position_embeddings: usize,
    /// Its row for a sentence's first token; less than there are.
    pub first_position: usize,
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
        let mut fields = Fields::new(path, value)?;
        refuse_what_is_not_done(&fields)?;
        let architecture = architecture(&fields)?;
        // Of a model that sees, the half that reads has its own.
        if let (Architecture::Gemma3, Some(text)) = (architecture, fields.object("text_config")?) {
            fields = text;
            refuse_what_is_not_done(&fields)?;
        }
        if !architecture.has_experts() {
            refuse_experts(&fields, &["num_experts", "num_local_experts"])?;
        }
        match architecture {
            encoder if encoder.is_encoder() => bert(&fields, encoder).map(ModelConfig::Bert),
            decoder => self::decoder(&fields, decoder).map(ModelConfig::Decoder),
        }
    }

    /// Which network it is.
    pub fn architecture(&self) -> Architecture {
        match self {
            ModelConfig::Decoder(c) => c.architecture,
            ModelConfig::Bert(c) => c.architecture,
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
            ModelConfig::Bert(c) => c.max_position_embeddings - c.first_position,
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
    Architecture::from_model_type(model_type)
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

fn activation(fields: &Fields<'_>, key: &str, supported: Activation) -> Result<Activation, ModelError> {
    match (fields.text(key)?, supported) {
        (None, a) => Ok(a),
        (Some("silu" | "swish"), Activation::Silu) => Ok(Activation::Silu),
        (Some("gelu"), Activation::Gelu) => Ok(Activation::Gelu),
        (Some("gelu_pytorch_tanh"), Activation::GeluTanh) => Ok(Activation::GeluTanh),
        (Some(_), a) => Err(fields.unsupported(key, format!("\"{}\" for this architecture", a.name()))),
    }
}

/// What would have Gemma 3's layers compute something else.
fn refuse_other_gemmas(fields: &Fields<'_>) -> Result<(), ModelError> {
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if fields.get(key).is_some() {
            return Err(fields.unsupported(key, "null"));
        }
    }
    match fields.flag("use_bidirectional_attention")? {
        Some(true) => Err(fields.unsupported("use_bidirectional_attention", "false (a decoder)")),
        _ => Ok(()),
    }
}

fn decoder(fields: &Fields<'_>, architecture: Architecture) -> Result<DecoderConfig, ModelError> {
    let is_gemma = architecture == Architecture::Gemma3;
    if is_gemma {
        refuse_other_gemmas(fields)?;
    }
    // Gemma's files leave out what its configuration class has by default.
    let size = |key, range, of_gemma| match is_gemma {
        true => Ok(fields.whole(key, range)?.unwrap_or(of_gemma)),
        false => fields.required_whole(key, range),
    };
    let hidden_size = size("hidden_size", 1..=MAX_HIDDEN, 2304)?;
    let n_layers = size("num_hidden_layers", 1..=MAX_LAYERS, 26)?;
    let n_heads = size("num_attention_heads", 1..=MAX_HEADS, 8)?;

    let traits = architecture.traits();
    // Null is not as good as missing: it says that there are as many as heads.
    let default_kv_heads = if fields.has("num_key_value_heads") { None } else { traits.n_kv_heads };
    let n_kv_heads = fields.whole("num_key_value_heads", 1..=MAX_HEADS)?.or(default_kv_heads).unwrap_or(n_heads);
    if !n_heads.is_multiple_of(n_kv_heads) {
        return Err(fields.wrong("num_key_value_heads", format!("a divisor of num_attention_heads, {n_heads}")));
    }

    let default_head_dim = if fields.has("head_dim") { None } else { traits.head_dim };
    let head_dim = match fields.whole("head_dim", 1..=MAX_HEAD_DIM)?.or(default_head_dim) {
        Some(n) => n,
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

    let max_position_embeddings =
        fields.whole("max_position_embeddings", 1..=MAX_POSITIONS)?.unwrap_or(traits.max_position_embeddings);

    let ropes = rope::ropes(fields, architecture, max_position_embeddings, head_dim)?;
    // Files that ask for YaRN often have the number from before.
    let max_position_embeddings = match ropes.full.scaling {
        RopeScaling::Yarn { factor, original_max_position_embeddings: original, .. } => {
            max_position_embeddings.max(((factor * original as f64) as usize).min(MAX_POSITIONS))
        }
        _ => max_position_embeddings,
    };

    let has = |biases, key| match biases {
        Biases::Always => Ok(true),
        Biases::Never => Ok(false),
        Biases::Said => Ok::<bool, ModelError>(fields.flag(key)?.unwrap_or(false)),
    };
    let attention_bias = has(traits.attention_bias, "attention_bias")?;
    let layers = layers(fields, architecture, n_layers)?;
    let rope_of = |layer: &Layer| match (layer.slides, layer.turns) {
        (_, false) => Rope::NONE,
        (true, true) => ropes.sliding.clone(),
        (false, true) => ropes.full.clone(),
    };
    let intermediate_size = size("intermediate_size", 1..=MAX_INTERMEDIATE, 9216)?;
    const SCALARS: std::ops::RangeInclusive<f64> = 1e-6..=1e9;
    let query_scalar =
        if is_gemma { fields.real("query_pre_attn_scalar", SCALARS)?.unwrap_or(256.0) } else { head_dim as f64 };
    let act_key = if is_gemma { "hidden_activation" } else { "hidden_act" };
    Ok(DecoderConfig {
        architecture,
        vocab_size: size("vocab_size", 1..=MAX_VOCAB, 262_208)?,
        hidden_size,
        intermediate_size,
        n_layers,
        n_heads,
        n_kv_heads,
        head_dim,
        rms_norm_eps: fields.real("rms_norm_eps", 0.0..=1.0)?.unwrap_or(traits.rms_norm_eps),
        ropes: layers.iter().map(rope_of).collect(),
        rotary_dim: ropes.dim,
        query_scalar,
        embedding_scale: if is_gemma { (hidden_size as f64).sqrt() } else { 1.0 },
        tie_word_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(traits.tie_word_embeddings),
        attention_bias,
        output_bias: attention_bias && traits.output_bias,
        mlp_bias: has(traits.mlp_bias, "mlp_bias")?,
        qk_norm: traits.qk_norm,
        max_position_embeddings,
        windows: windows(fields, architecture, &layers, max_position_embeddings)?,
        hidden_act: activation(fields, act_key, traits.activation)?,
        experts: experts(fields, architecture, n_layers, intermediate_size)?,
        embedding_dim: None,
    })
}

/// What one layer does and another does not.
#[derive(Clone, Copy)]
struct Layer {
    /// It turns queries and keys by their positions.
    turns: bool,
    /// It has a window, if the network has one.
    slides: bool,
}

fn layers(fields: &Fields<'_>, architecture: Architecture, n_layers: usize) -> Result<Vec<Layer>, ModelError> {
    let turns = turning_layers(fields, architecture, n_layers)?;
    let slides = sliding_layers(fields, architecture, &turns)?;
    let mut layers: Vec<Layer> =
        turns.iter().zip(slides).map(|(turns, slides)| Layer { turns: *turns, slides }).collect();
    if architecture == Architecture::Exaone4 && window(fields, architecture)?.is_some() {
        layers.iter_mut().for_each(|layer| layer.turns = layer.slides);
    }
    Ok(layers)
}

/// Which layers turn queries and keys by their positions, as far as the file says it by itself.
fn turning_layers(fields: &Fields<'_>, architecture: Architecture, n_layers: usize) -> Result<Vec<bool>, ModelError> {
    if architecture != Architecture::SmolLm3 {
        return Ok(vec![true; n_layers]);
    }
    // Called after those that do not, it says 1 of those that do.
    let Some(given) = fields.wholes("no_rope_layers", 0..=1)? else {
        let interval = fields.whole("no_rope_layer_interval", 1..=MAX_LAYERS)?.unwrap_or(4);
        return Ok((1..=n_layers).map(|layer| !layer.is_multiple_of(interval)).collect());
    };
    if given.len() < n_layers {
        return Err(not_one_a_layer(fields, "no_rope_layers", given.len(), n_layers));
    }
    Ok(given[..n_layers].iter().map(|turns| *turns == 1).collect())
}

fn not_one_a_layer(fields: &Fields<'_>, key: &str, found: usize, n_layers: usize) -> ModelError {
    ModelError::key(fields.path(), key, format!("{found} entries"), format!("{n_layers}, one a layer"))
}

/// Which layers have a window, if the network has one; `turns` as [`turning_layers`] has it.
fn sliding_layers(fields: &Fields<'_>, architecture: Architecture, turns: &[bool]) -> Result<Vec<bool>, ModelError> {
    let n_layers = turns.len();
    const SLIDING: &str = "sliding_attention";
    let types = fields.texts("layer_types")?.unwrap_or_default();
    if let Some(other) = types.iter().find(|t| !matches!(**t, "full_attention" | SLIDING)) {
        return Err(ModelError::unsupported(fields.path(), "layer_types", *other, "full_attention, sliding_attention"));
    }
    if !types.is_empty() && types.len() != n_layers {
        return Err(not_one_a_layer(fields, "layer_types", types.len(), n_layers));
    }
    let named = |others: &dyn Fn(usize) -> bool| match types.is_empty() {
        true => (0..n_layers).map(others).collect(),
        false => types.iter().map(|kind| *kind == SLIDING).collect(),
    };
    Ok(match architecture.traits().sliding {
        Sliding::Never => vec![false; n_layers],
        Sliding::All | Sliding::AllIfUsed => vec![true; n_layers],
        Sliding::Named => named(&|_| true),
        Sliding::Later => {
            let first = fields.whole("max_window_layers", 0..=MAX_LAYERS)?.unwrap_or(28);
            named(&|layer| layer >= first)
        }
        Sliding::Most { pattern } => {
            // What no other key says decides.
            let said = if types.is_empty() { fields.whole("sliding_window_pattern", 1..=MAX_LAYERS)? } else { None };
            let pattern = said.unwrap_or(pattern);
            named(&|layer| !(layer + 1).is_multiple_of(pattern))
        }
        Sliding::Still => named(&|layer| !turns[layer]),
    })
}

/// What `sliding_window` says, or what is so where it is missing, and not null.
fn window(fields: &Fields<'_>, architecture: Architecture) -> Result<Option<usize>, ModelError> {
    let default = if fields.has("sliding_window") { None } else { architecture.traits().window };
    Ok(fields.whole("sliding_window", 1..=MAX_POSITIONS)?.or(default))
}

/// The window of each layer that slides, where it is smaller than the context.
fn windows(
    fields: &Fields<'_>,
    architecture: Architecture,
    layers: &[Layer],
    max_position_embeddings: usize,
) -> Result<Vec<Option<usize>>, ModelError> {
    let window = window(fields, architecture)?;
    let is_active = match architecture.traits().sliding {
        Sliding::Never => false,
        Sliding::All | Sliding::Named | Sliding::Most { .. } => true,
        // What the types of its layers say counts, whether windows are used or not.
        Sliding::Still if fields.get("layer_types").is_some() => {
            if window.is_none() && layers.iter().any(|layer| layer.slides) {
                return Err(fields.wrong("sliding_window", "a number, for layer_types has sliding_attention"));
            }
            true
        }
        Sliding::Later | Sliding::AllIfUsed | Sliding::Still => fields.flag("use_sliding_window")?.unwrap_or(false),
    };
    let window = window.filter(|n| is_active && *n < max_position_embeddings);
    Ok(layers.iter().map(|layer| window.filter(|_| layer.slides)).collect())
}

fn bert(fields: &Fields<'_>, architecture: Architecture) -> Result<BertConfig, ModelError> {
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
    let max_position_embeddings = fields.whole("max_position_embeddings", 1..=MAX_POSITIONS)?.unwrap_or(512);
    let first_position = match architecture {
        // The row before is the padding's.
        Architecture::Roberta => fields.whole("pad_token_id", 0..=MAX_VOCAB)?.unwrap_or(1) + 1,
        _ => 0,
    };
    if first_position >= max_position_embeddings {
        let found = max_position_embeddings.to_string();
        let expected = format!("more than {first_position}, the row of the first position");
        return Err(ModelError::key(fields.path(), "max_position_embeddings", found, expected));
    }
    Ok(BertConfig {
        architecture,
        vocab_size: fields.required_whole("vocab_size", 1..=MAX_VOCAB)?,
        hidden_size,
        intermediate_size: fields.required_whole("intermediate_size", 1..=MAX_INTERMEDIATE)?,
        n_layers: fields.required_whole("num_hidden_layers", 1..=MAX_LAYERS)?,
        n_heads,
        head_dim: hidden_size / n_heads,
        layer_norm_eps: fields.real("layer_norm_eps", 0.0..=1.0)?.unwrap_or(1e-12),
        max_position_embeddings,
        first_position,
        type_vocab_size: fields.whole("type_vocab_size", 1..=MAX_VOCAB)?.unwrap_or(2),
        hidden_act: activation(fields, "hidden_act", architecture.traits().activation)?,
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

    pub(super) fn decoder_of(value: &Value) -> DecoderConfig {
        match parse(value) {
            Ok(ModelConfig::Decoder(config)) => config,
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn llama() -> Value {
        json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024, "hidden_size": 256,
            "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
            "max_position_embeddings": 8192,
        })
    }

    /// `base` with keys set, or removed where null.
    pub(super) fn with(base: Value, change: &Value) -> Value {
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
        let eps_of = |name: &str| decoder_of(&with(open(name), &json!({ "rms_norm_eps": null }))).rms_norm_eps;
        assert_eq!((eps_of("tiny-mixtral"), eps_of("tiny-qwen3-moe")), (1e-5, 1e-6));
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
    fn gemma_3() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-gemma3");
        let tiny = read_value(&dir.join("config.json")).expect("JSON");
        let [full, sliding] = [
            Rope { theta: 1e6, scaling: RopeScaling::Linear { factor: 8.0 } },
            Rope { theta: 1e4, scaling: RopeScaling::Default },
        ];
        let config = decoder_of(&tiny);
        assert_eq!(config.windows, [Some(12), None, Some(12)]);
        assert_eq!(config.ropes, [sliding.clone(), full.clone(), sliding.clone()]);
        assert_eq!(
            (config.query_scalar, config.embedding_scale, config.qk_norm),
            (168.0, 128f64.sqrt(), QkNorm::Heads)
        );
        assert_eq!((config.hidden_act, config.tie_word_embeddings), (Activation::GeluTanh, true));

        // As the files of those that see have it: a part, with what is not as usual.
        let text = json!({ "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                           "num_hidden_layers": 34, "sliding_window": 1024,
                           "rope_scaling": { "factor": 8.0, "rope_type": "linear" } });
        let whole = json!({ "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
                            "text_config": text, "vision_config": { "hidden_size": 1152 } });
        let config = decoder_of(&whole);
        assert_eq!((config.vocab_size, config.max_position_embeddings), (262_208, 131_072));
        assert_eq!((config.n_heads, config.n_kv_heads, config.head_dim, config.query_scalar), (8, 4, 256, 256.0));
        assert_eq!((config.windows[4], config.windows[5], config.windows[6]), (Some(1024), None, Some(1024)));
        assert_eq!((&config.ropes[4], &config.ropes[5]), (&sliding, &full));
        assert_eq!(decoder_of(&with(whole.clone(), &json!({ "architectures": null }))), config);
        // As older files call it.
        let old = json!({ "rope_parameters": null, "rope_theta": 5e5, "rope_local_base_freq": 2e4, "layer_types": null,
                          "sliding_window_pattern": 2 });
        let config = decoder_of(&with(tiny.clone(), &old));
        assert_eq!(config.windows, [Some(12), None, Some(12)]);
        assert_eq!(config.ropes.iter().map(|rope| rope.theta).collect::<Vec<_>>(), [2e4, 5e5, 2e4]);
        // Nulls are as usual; older keys change those of layers without a window, and then by today's name for the type alone.
        let ropes = |change: Value| decoder_of(&with(tiny.clone(), &change)).ropes[..2].to_vec();
        let linear = |theta| Rope { theta, scaling: RopeScaling::Linear { factor: 4.0 } };
        let plain = |theta| Rope { theta, scaling: RopeScaling::Default };
        let of_full = json!({ "rope_type": "linear", "factor": 4.0, "rope_theta": 77.0 });
        let nested = json!({ "rope_parameters": { "full_attention": of_full, "sliding_attention": null } });
        assert_eq!(ropes(nested), [plain(1e4), linear(77.0)]);
        let both = json!({ "rope_parameters": { "full_attention": { "rope_theta": 50.0 }, "sliding_attention": { "rope_theta": 60.0 } },
                           "rope_scaling": { "rope_type": "linear", "factor": 4.0 } });
        assert_eq!(ropes(both), [plain(60.0), linear(50.0)]);
        let named_before = json!({ "rope_parameters": null, "rope_scaling": { "type": "linear", "factor": 4.0 } });
        assert_eq!(ropes(named_before), [plain(1e4), plain(1e6)]);
        // The context of the first training beside all other keys is none of theirs.
        let yarn = json!({ "rope_parameters": { "full_attention": { "rope_type": "yarn", "factor": 2.0 } },
                           "original_max_position_embeddings": 16, "max_position_embeddings": 128 });
        let scaling = ropes(yarn).pop().map(|rope| rope.scaling);
        assert!(
            matches!(scaling, Some(RopeScaling::Yarn { original_max_position_embeddings: 128, .. })),
            "{scaling:?}"
        );
        for (change, expected) in [
            (json!({ "rope_parameters": of_full }), "expected keys of full_attention and of sliding_attention"),
            (json!({ "final_logit_softcapping": 30.0 }), "final_logit_softcapping: 30.0 is not supported"),
            (json!({ "attn_logit_softcapping": 50.0 }), "attn_logit_softcapping: 50.0 is not supported"),
            (json!({ "use_bidirectional_attention": true }), "use_bidirectional_attention: true is not supported"),
            (json!({ "hidden_activation": "gelu" }), "hidden_activation: \"gelu\" is not supported"),
            (json!({ "query_pre_attn_scalar": 0 }), "query_pre_attn_scalar: 0, expected"),
        ] {
            let message = parse(&with(tiny.clone(), &change)).expect_err(expected);
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn fixtures() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        let open = |name: &str| match ModelConfig::open(&dir.join(name).join("config.json")) {
            Ok(ModelConfig::Decoder(c)) => c,
            other => panic!("{other:?}"),
        };
        let qwen3 = open("tiny-qwen3");
        assert_eq!((qwen3.architecture, qwen3.head_dim, qwen3.qk_norm), (Architecture::Qwen3, 64, QkNorm::Heads));
        assert_eq!(
            (qwen3.attention_bias, qwen3.tie_word_embeddings, qwen3.windows.iter().flatten().next()),
            (false, true, None)
        );
        assert_eq!(qwen3.ropes[0], Rope { theta: 1e6, scaling: RopeScaling::Default });

        let llama = open("tiny-llama");
        assert_eq!((llama.n_heads, llama.n_kv_heads, llama.rms_norm_eps), (8, 2, 1e-5));
        assert_eq!(
            llama.ropes[0].scaling,
            RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 1024
            }
        );

        let qwen2 = open("tiny-qwen2");
        assert_eq!(
            (qwen2.head_dim, qwen2.attention_bias, qwen2.output_bias, qwen2.qk_norm),
            (32, true, false, QkNorm::None)
        );
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
        assert_eq!(decoder_of(&with(llama(), &nested)).ropes[0], Rope { theta: 7e4, scaling: RopeScaling::Default });
        let mut twice = json!({"rope_parameters": new_scaling, "original_max_position_embeddings": 512});
        let of = |value: &Value| match decoder_of(&with(llama(), value)).ropes[0].scaling.clone() {
            RopeScaling::Llama3 { original_max_position_embeddings, .. } => original_max_position_embeddings,
            other => panic!("{other:?}"),
        };
        assert_eq!(of(&twice), 512, "beside the others it comes first");
        twice["original_max_position_embeddings"] = Value::Null;
        assert_eq!(of(&twice), 4096);
        let linear = json!({"rope_scaling": {"type": "linear", "factor": 2}});
        assert_eq!(decoder_of(&with(llama(), &linear)).ropes[0].scaling, RopeScaling::Linear { factor: 2.0 });
        assert_eq!(decoder_of(&llama()).ropes[0], Rope { theta: 10_000.0, scaling: RopeScaling::Default });
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
        // Those that do not ask which layer it is have it in all.
        for (name, extra) in [("Qwen3MoeForCausalLM", "num_experts"), ("MixtralForCausalLM", "num_local_experts")] {
            let mut uniform = types.clone();
            (uniform["architectures"], uniform[extra]) = (json!([name]), 8.into());
            assert_eq!(windows(uniform), [Some(64); 3], "{name}");
        }
        // And those whose types count, whatever else is said.
        let mut smol = types.clone();
        (smol["architectures"], smol["use_sliding_window"]) = (json!(["SmolLM3ForCausalLM"]), false.into());
        assert_eq!(windows(smol.clone()), [Some(64), None, Some(64)]);
        smol["sliding_window"] = Value::Null;
        let message = parse(&with(llama(), &smol)).expect_err("no window");
        assert!(message.contains("sliding_window: missing, expected a number"), "{message}");
        smol["layer_types"] = Value::Null;
        assert_eq!(windows(smol), [None; 3]);
        types["layer_types"] = json!(["sliding_attention"]);
        let message = parse(&with(llama(), &types)).expect_err("a type is missing");
        assert!(message.contains("layer_types") && message.contains("1 entries, expected 3, one a layer"), "{message}");
    }

    #[test]
    fn what_is_not_done_is_refused_by_name() {
        let refused = |change: Value| parse(&with(llama(), &change)).expect_err("must be refused");
        assert_eq!(
            refused(json!({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}})),
            "config.json: rope_scaling.rope_type: \"dynamic\" is not supported; supported: default, linear, llama3, yarn, \
             longrope"
        );
        assert_eq!(
            refused(json!({"architectures": ["GptOssForCausalLM"]})),
            "config.json: architectures: GptOssForCausalLM is not supported; supported: Qwen3ForCausalLM, \
             Qwen3MoeForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM, Gemma3ForCausalLM, \
             SmolLM3ForCausalLM, Phi3ForCausalLM, Olmo2ForCausalLM, Olmo3ForCausalLM, Exaone4ForCausalLM, BertModel, RobertaModel"
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
    fn some_layers_of_smollm3_do_not_turn() {
        let base = || with(llama(), &json!({"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 5}));
        let of = |change: Value| decoder_of(&with(base(), &change));
        let turns = |config: &DecoderConfig| config.ropes.iter().map(|rope| *rope != Rope::NONE).collect::<Vec<_>>();
        let usual = of(json!({}));
        assert_eq!(turns(&usual), [true, true, true, false, true]);
        assert_eq!((usual.ropes[0].theta, usual.tie_word_embeddings, usual.qk_norm), (2e6, true, QkNorm::None));
        assert_eq!(usual.windows, [None; 5]);
        assert_eq!(usual.ropes[3].inverse_frequencies(8, 4096), [0.0; 4]);
        assert_eq!(turns(&of(json!({"no_rope_layer_interval": 2}))), [true, false, true, false, true]);
        let given = json!({"no_rope_layers": [0, 1, 1, 1, 0, 1], "use_sliding_window": true, "sliding_window": 16});
        let given = of(given);
        assert_eq!(turns(&given), [false, true, true, true, false]);
        assert_eq!(given.windows, [Some(16), None, None, None, Some(16)], "what turns sees everything");
        for (change, expected) in [
            (json!({"no_rope_layers": [0, 1]}), "no_rope_layers: 2 entries, expected 5, one a layer"),
            (json!({"no_rope_layers": [0, 1, 2, 1, 1]}), "no_rope_layers"),
            (json!({"no_rope_layer_interval": 0}), "no_rope_layer_interval: 0, expected"),
        ] {
            let message = parse(&with(base(), &change)).expect_err(expected);
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn exaone_4_turns_where_it_slides() {
        let base = || with(llama(), &json!({"architectures": ["Exaone4ForCausalLM"], "num_hidden_layers": 4}));
        let of = |change: Value| decoder_of(&with(base(), &change));
        let turns = |config: &DecoderConfig| config.ropes.iter().map(|rope| *rope != Rope::NONE).collect::<Vec<_>>();
        let usual = of(json!({}));
        assert_eq!(usual.windows, [Some(4096), Some(4096), Some(4096), None]);
        assert_eq!(turns(&usual), [true, true, true, false]);
        assert_eq!((usual.qk_norm, usual.rms_norm_eps), (QkNorm::Heads, 1e-5));
        // Without a window all turn, even if the types of layers are said.
        let types = json!(["sliding_attention", "full_attention", "full_attention", "full_attention"]);
        let none = of(json!({"sliding_window": null, "layer_types": types}));
        assert_eq!((turns(&none), &none.windows[..]), (vec![true; 4], &[None; 4][..]));
        let some = of(json!({"sliding_window": 16, "sliding_window_pattern": 2}));
        assert_eq!((turns(&some), &some.windows[..2]), (vec![true, false, true, false], &[Some(16), None][..]));
    }

    #[test]
    fn olmo_normalises_rows() {
        let olmo = |class: &str| with(llama(), &json!({"architectures": [class], "num_hidden_layers": 4}));
        let two = decoder_of(&olmo("Olmo2ForCausalLM"));
        assert_eq!((two.qk_norm, two.ropes[0].theta, &two.windows[..]), (QkNorm::Rows, 1e4, &[None; 4][..]));
        let yarn = json!({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024});
        let three = decoder_of(&with(olmo("Olmo3ForCausalLM"), &json!({"rope_scaling": yarn, "rope_theta": 5e4})));
        assert_eq!(three.windows, [Some(4096), Some(4096), Some(4096), None]);
        assert_eq!(three.ropes[0], Rope { theta: 5e4, scaling: RopeScaling::Default });
        assert!(matches!(three.ropes[3], Rope { theta: 5e4, scaling: RopeScaling::Yarn { factor: 8.0, .. } }));
    }

    #[test]
    fn classes_without_a_head_and_encoders_with_one() {
        for (class, expected) in [
            ("Qwen3Model", Some(Architecture::Qwen3)),
            ("MistralModel", Some(Architecture::Mistral)),
            ("Gemma3TextModel", Some(Architecture::Gemma3)),
            ("BertForMaskedLM", Some(Architecture::Bert)),
            ("XLMRobertaModel", Some(Architecture::Roberta)),
            ("RobertaForSequenceClassification", Some(Architecture::Roberta)),
            ("CamembertModel", Some(Architecture::Roberta)),
            ("BertForCausalLM", None),
            ("LlamaForMaskedLM", None),
            ("Model", None),
        ] {
            assert_eq!(Architecture::from_class_name(class), expected, "{class}");
        }
        for architecture in Architecture::ALL {
            assert_eq!(Architecture::from_class_name(architecture.class_name()), Some(architecture));
            assert_eq!(Architecture::from_model_type(architecture.model_type()), Some(architecture));
        }
    }

    #[test]
    fn roberta_counts_from_the_row_after_the_paddings() {
        let base = json!({
            "architectures": ["XLMRobertaModel"], "hidden_act": "gelu", "hidden_size": 384, "intermediate_size": 1536,
            "layer_norm_eps": 1e-5, "max_position_embeddings": 514, "model_type": "xlm-roberta", "num_attention_heads": 12,
            "num_hidden_layers": 12, "pad_token_id": 1, "type_vocab_size": 1, "vocab_size": 250_002,
        });
        let of = |change: Value| parse(&with(base.clone(), &change));
        for (change, first, longest) in
            [(json!({}), 2, 512), (json!({"pad_token_id": null}), 2, 512), (json!({"pad_token_id": 0}), 1, 513)]
        {
            let config = of(change).expect("an encoder");
            let ModelConfig::Bert(bert) = &config else { panic!("{config:?}") };
            assert_eq!((bert.first_position, config.max_position_embeddings()), (first, longest));
        }
        let message = of(json!({"max_position_embeddings": 2})).expect_err("no room");
        assert_eq!(
            message,
            "config.json: max_position_embeddings: 2, expected more than 2, the row of the first position"
        );
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
                    prop_assert!(c.ropes[0].inverse_frequencies(c.rotary_dim, 4096).iter().all(|f| f.is_finite()));
                }
                Ok(ModelConfig::Bert(_)) => {}
                Err(message) => prop_assert!(!message.contains('\n'), "{}", message),
            }
        }
    }
}
