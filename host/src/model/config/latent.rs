//! What a config.json says of latent attention.

use super::architecture::Traits;
use super::{Architecture, MAX_HEAD_DIM, MAX_HIDDEN};
use crate::model::error::ModelError;
use crate::model::json::Fields;

/// Latent attention (MLA; DeepSeek-AI, 2024): all heads' keys and values are made, head by head, of one vector of
/// `rank` elements a position, and one of `turned_dim` that knows the position, which are what caches have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latent {
    /// Elements of the vector that all queries are made of, where these are not made of the row itself.
    pub query_rank: Option<usize>,
    /// Elements of the vector that keys and values are made of.
    pub rank: usize,
    /// Elements of a head's query and key that no position turns.
    pub still_dim: usize,
    /// Those that are turned; even.
    pub turned_dim: usize,
    /// Elements of a head's value.
    pub value_dim: usize,
    /// Whether files have those that are turned as neighbours.
    pub turns_neighbours: bool,
}

impl Latent {
    /// Elements of a head's query and key.
    pub fn head_dim(&self) -> usize {
        self.still_dim + self.turned_dim
    }

    /// Elements that caches have of a position.
    pub fn cached_dim(&self) -> usize {
        self.rank + self.turned_dim
    }
}

/// The largest [`Latent::rank`].
const MAX_RANK: usize = 1 << 12;

/// What the file says, of a network of `n_heads` heads and rows of `hidden_size`.
pub(super) fn latent(
    fields: &Fields<'_>,
    architecture: Architecture,
    [hidden_size, n_heads]: [usize; 2],
) -> Result<Option<Latent>, ModelError> {
    let Traits { is_latent, turns_neighbours, neighbours_key, .. } = architecture.traits();
    if !is_latent {
        return Ok(None);
    }
    const KV_HEADS: &str = "num_key_value_heads";
    if fields.whole(KV_HEADS, 1..=super::MAX_HEADS)?.is_some_and(|n| n != n_heads) {
        return Err(fields.unsupported(KV_HEADS, format!("as many as num_attention_heads, {n_heads}")));
    }
    const QUERY_RANK: &str = "q_lora_rank";
    let query_rank = fields.whole(QUERY_RANK, 1..=MAX_HIDDEN)?;
    if query_rank.is_none() && !fields.has(QUERY_RANK) {
        return Err(fields.wrong(QUERY_RANK, "a number, or null"));
    }
    const TURNED: &str = "qk_rope_head_dim";
    let turned_dim = fields.required_whole(TURNED, 2..=MAX_HEAD_DIM)?;
    if !turned_dim.is_multiple_of(2) {
        return Err(fields.wrong(TURNED, "an even number (RoPE turns pairs)"));
    }
    const VALUES: &str = "v_head_dim";
    let value_dim = match architecture {
        Architecture::MiniCpm3 => fields.whole(VALUES, 1..=MAX_HEAD_DIM)?.unwrap_or(hidden_size / n_heads),
        _ => fields.required_whole(VALUES, 1..=MAX_HEAD_DIM)?,
    };
    if value_dim == 0 {
        return Err(fields.wrong("num_attention_heads", format!("at most hidden_size, {hidden_size}")));
    }
    Ok(Some(Latent {
        query_rank,
        rank: fields.required_whole("kv_lora_rank", 1..=MAX_RANK)?,
        still_dim: fields.required_whole("qk_nope_head_dim", 1..=MAX_HEAD_DIM)?,
        turned_dim,
        value_dim,
        turns_neighbours: match neighbours_key {
            Some(key) => fields.flag(key)?.unwrap_or(turns_neighbours),
            None => turns_neighbours,
        },
    }))
}

/// What MiniCPM 3 multiplies embeddings with, and what layers add, and what it divides logits by.
pub(super) fn minicpm3_numbers(
    fields: &Fields<'_>,
    [hidden_size, n_layers]: [usize; 2],
) -> Result<[f64; 3], ModelError> {
    const NUMBERS: std::ops::RangeInclusive<f64> = 1e-6..=1e9;
    // Null is not as good as missing: it says that nothing is multiplied.
    let number = |key, otherwise: f64, none: f64| {
        Ok::<f64, ModelError>(fields.real(key, NUMBERS)?.unwrap_or(if fields.has(key) { none } else { otherwise }))
    };
    let root = (n_layers as f64).sqrt();
    let base = number("dim_model_base", 256.0, hidden_size as f64)?;
    if fields.has("scale_emb") && fields.get("scale_emb").is_none() {
        return Err(fields.wrong("scale_emb", "a number"));
    }
    Ok([number("scale_emb", 12.0, 12.0)?, number("scale_depth", 1.4, root)? / root, hidden_size as f64 / base])
}
