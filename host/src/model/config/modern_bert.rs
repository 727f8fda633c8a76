//! ModernBERT's config.json.

use super::decoder::typed_layers;
use super::rope::{self, Rope};
use super::{
    Activation, Architecture, MAX_HEADS, MAX_HIDDEN, MAX_INTERMEDIATE, MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB, activation,
};
use crate::model::error::ModelError;
use crate::model::json::Fields;

/// An encoder whose layers turn queries and keys by their positions (Warner et al., 2024).
#[derive(Clone, Debug, PartialEq)]
pub struct ModernBertConfig {
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// Elements of one token's vector.
    pub hidden_size: usize,
    /// Elements between an MLP's linear layers.
    pub intermediate_size: usize,
    /// Encoder layers.
    pub n_layers: usize,
    /// Attention heads.
    pub n_heads: usize,
    /// `hidden_size / n_heads`; even.
    pub head_dim: usize,
    /// Added to the variance before the root.
    pub norm_eps: f64,
    /// Whether norms have biases.
    pub norm_bias: bool,
    /// Whether the attention's linear layers have biases.
    pub attention_bias: bool,
    /// Whether the MLPs' linear layers have biases.
    pub mlp_bias: bool,
    /// The longest input it was made for.
    pub max_position_embeddings: usize,
    /// Per layer, how positions turn queries and keys.
    pub ropes: Vec<Rope>,
    /// Per layer, `Some(n)`: a token attends to those at most `n` from its own only.
    pub windows: Vec<Option<usize>>,
    /// The MLP's function; [`Activation::Gelu`].
    pub hidden_act: Activation,
}

/// What the file says, with every default of its configuration class filled in.
pub(super) fn modern_bert(fields: &Fields<'_>) -> Result<ModernBertConfig, ModelError> {
    let architecture = Architecture::ModernBert;
    let traits = architecture.traits();
    let size = |key, range, default| Ok::<usize, ModelError>(fields.whole(key, range)?.unwrap_or(default));
    let said = |key| Ok::<bool, ModelError>(fields.flag(key)?.unwrap_or(false));
    let hidden_size = size("hidden_size", 1..=MAX_HIDDEN, 768)?;
    let n_heads = size("num_attention_heads", 1..=MAX_HEADS, 12)?;
    if !hidden_size.is_multiple_of(2 * n_heads) {
        let expected = format!("heads of an even number of hidden_size's {hidden_size} elements (RoPE turns pairs)");
        return Err(fields.wrong("num_attention_heads", expected));
    }
    let head_dim = hidden_size / n_heads;
    let n_layers = size("num_hidden_layers", 1..=MAX_LAYERS, 22)?;
    let max_position_embeddings = size("max_position_embeddings", 1..=MAX_POSITIONS, traits.max_position_embeddings)?;
    if fields.get("rope_scaling").is_some() {
        return Err(fields.unsupported("rope_scaling", "null"));
    }
    let ropes = rope::ropes(fields, architecture, max_position_embeddings, [head_dim; 2])?;
    let every = fields.whole("global_attn_every_n_layers", 1..=MAX_LAYERS)?.unwrap_or(3);
    let most = || (0..n_layers).map(|layer| !layer.is_multiple_of(every)).collect();
    let slides = typed_layers(fields, n_layers)?.unwrap_or_else(most);
    // To both sides together.
    let window = size("local_attention", 2..=MAX_POSITIONS, 128)? / 2;
    Ok(ModernBertConfig {
        vocab_size: size("vocab_size", 1..=MAX_VOCAB, 50_368)?,
        hidden_size,
        intermediate_size: size("intermediate_size", 1..=MAX_INTERMEDIATE, 1152)?,
        n_layers,
        n_heads,
        head_dim,
        norm_eps: fields.real("norm_eps", 0.0..=1.0)?.unwrap_or(traits.rms_norm_eps),
        norm_bias: said("norm_bias")?,
        attention_bias: said("attention_bias")?,
        mlp_bias: said("mlp_bias")?,
        max_position_embeddings,
        ropes: slides.iter().map(|slides| if *slides { &ropes.sliding } else { &ropes.full }).cloned().collect(),
        windows: slides.iter().map(|slides| slides.then_some(window)).collect(),
        hidden_act: activation(fields, "hidden_activation", traits.activation)?,
    })
}
