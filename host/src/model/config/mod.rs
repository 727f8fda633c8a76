//! config.json: which network, and its sizes.
//!
//! In comes the file as `transformers` writes it today (`rope_parameters`, `dtype`) or wrote it before (`rope_theta`,
//! `rope_scaling`, `torch_dtype`); out goes a [`ModelConfig`] with every default filled in, as that library fills it.
//!
//! Laws:
//! - A key whose meaning would change the result and that is not done here is refused by name; keys that change
//!   nothing, or that nobody knows, are ignored.
//! - Every number that leaves this file is positive, bounded, and consistent with the others (`n_heads` is a multiple
//!   of each layer's heads of keys, whose elements are even), so later stages can multiply sizes without overflow.

mod architecture;
mod decoder;
mod encoder;
mod gemma4;
mod latent;
mod modern_bert;
mod rope;
mod stored;

use std::path::Path;

use serde_json::Value;

use super::error::ModelError;
use super::json::{Fields, read_value};
pub(crate) use architecture::Norms;
pub use architecture::{Architecture, AttentionGate, QkNorm};
pub use decoder::{
    DecoderConfig, DeltaRule, Experts, Heads, LayerInputs, LimitedGate, Mixer, Recurrent, SharedExpert, Sigmoids,
    StateSpace,
};
pub use encoder::BertConfig;
pub use latent::Latent;
pub use modern_bert::ModernBertConfig;
pub use rope::{Lengthening, Rope, RopeScaling};
pub use stored::Stored;

/// The function between an MLP's two linear layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
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

/// A config.json, understood.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[allow(clippy::large_enum_variant, reason = "a model has one")]
pub enum ModelConfig {
    /// Text generation.
    Decoder(DecoderConfig),
    /// Sentence embeddings.
    Bert(BertConfig),
    /// Sentence embeddings, too.
    ModernBert(ModernBertConfig),
}

impl ModelConfig {
    /// Reads a config.json.
    pub fn open(path: &Path) -> Result<ModelConfig, ModelError> {
        ModelConfig::from_value(path, &read_value(path)?)
    }

    /// Understands a parsed config.json; `path` is what errors call it.
    pub fn from_value(path: &Path, value: &Value) -> Result<ModelConfig, ModelError> {
        let mut fields = Fields::new(path, value)?;
        let stored = Stored::of(path, value)?;
        let mut is_tied = None;
        // Of a model that sees or hears, the half that reads has a configuration of its own.
        let architecture = match fields.object("text_config")? {
            None => architecture(&fields)?,
            Some(text) => {
                let says_its_own = text.get("model_type").is_some();
                let architecture = if says_its_own { of_model_type(&text)? } else { architecture(&fields)? };
                // Either may say it, and where neither does, the file decides.
                const KEY: &str = "tie_word_embeddings";
                let said = [fields.flag(KEY)?, text.flag(KEY)?];
                is_tied = Some(said.contains(&Some(true)) || said == [None; 2]);
                fields = text;
                architecture
            }
        };
        refuse_experts(&fields, architecture)?;
        match architecture {
            Architecture::ModernBert => modern_bert::modern_bert(&fields).map(ModelConfig::ModernBert),
            of if of.is_encoder() => encoder::encoder(&fields, of).map(ModelConfig::Bert),
            of => decoder::decoder(&fields, of, is_tied, stored).map(ModelConfig::Decoder),
        }
    }

    /// Which network it is.
    pub fn architecture(&self) -> Architecture {
        match self {
            ModelConfig::Decoder(c) => c.architecture,
            ModelConfig::Bert(c) => c.architecture,
            ModelConfig::ModernBert(_) => Architecture::ModernBert,
        }
    }

    /// Token ids are below this.
    pub fn vocab_size(&self) -> usize {
        match self {
            ModelConfig::Decoder(c) => c.vocab_size,
            ModelConfig::Bert(c) => c.vocab_size,
            ModelConfig::ModernBert(c) => c.vocab_size,
        }
    }

    /// Elements of a token's vector.
    pub fn hidden_size(&self) -> usize {
        match self {
            ModelConfig::Decoder(c) => c.hidden_size,
            ModelConfig::Bert(c) => c.hidden_size,
            ModelConfig::ModernBert(c) => c.hidden_size,
        }
    }

    /// Whether a token's vector depends on those after it.
    pub fn is_bidirectional(&self) -> bool {
        match self {
            ModelConfig::Decoder(c) => c.is_bidirectional,
            ModelConfig::Bert(_) | ModelConfig::ModernBert(_) => true,
        }
    }

    /// Whether some of its layers pass a state from row to row: a text goes on after the last token that was read, and
    /// from no other.
    pub fn passes_states(&self) -> bool {
        matches!(self, ModelConfig::Decoder(c) if c.recurrent.is_some())
    }

    /// The longest input the model was made for.
    pub fn max_position_embeddings(&self) -> usize {
        match self {
            ModelConfig::Decoder(c) => c.max_position_embeddings,
            ModelConfig::Bert(c) => c.max_position_embeddings - c.first_position,
            ModelConfig::ModernBert(c) => c.max_position_embeddings,
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
    if fields.get("model_type").is_none() {
        return Err(fields.wrong("architectures", format!("one of {}", supported())));
    }
    of_model_type(fields)
}

fn of_model_type(fields: &Fields<'_>) -> Result<Architecture, ModelError> {
    fields
        .text("model_type")?
        .and_then(Architecture::from_model_type)
        .ok_or_else(|| fields.unsupported("model_type", Architecture::ALL.map(Architecture::model_type).join(", ")))
}

/// What says that there are experts, or more of them, where `architecture` heeds it not.
fn refuse_experts(fields: &Fields<'_>, architecture: Architecture) -> Result<(), ModelError> {
    const KEYS: [&str; 6] = [
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
        "n_shared_experts",
        "num_shared_experts",
    ];
    let mut others = KEYS.iter().filter(|key| architecture.expert_keys().all(|own| own != **key));
    match others.find(|key| fields.get(key).is_some_and(|v| v.as_f64() != Some(0.0))) {
        Some(key) => {
            let with = Architecture::ALL.into_iter().filter(|a| a.has_experts()).map(Architecture::class_name);
            let with = with.collect::<Vec<_>>().join(", ");
            Err(fields.unsupported(key, format!("mixtures of experts of {with} alone")))
        }
        None => Ok(()),
    }
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

#[cfg(test)]
mod tests;
