//! An encoder's config.json.

use super::{
    Activation, Architecture, MAX_HEADS, MAX_HIDDEN, MAX_INTERMEDIATE, MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB, activation,
};
use crate::model::error::ModelError;
use crate::model::json::Fields;

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

/// What an encoder's config.json says, with every default filled in.
pub(super) fn encoder(fields: &Fields<'_>, architecture: Architecture) -> Result<BertConfig, ModelError> {
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
