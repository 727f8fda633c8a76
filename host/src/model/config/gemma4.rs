//! What a config.json of Gemma 4's says that no other does.

use super::decoder::{Heads, LayerInputs};
use super::{Architecture, MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN, MAX_INTERMEDIATE, MAX_VOCAB};
use crate::model::error::ModelError;
use crate::model::json::Fields;

/// Whether a row of text sees those after it, too; rows of pictures are not read here.
pub(super) fn sees_all(fields: &Fields<'_>) -> Result<bool, ModelError> {
    const KEY: &str = "use_bidirectional_attention";
    match fields.text(KEY)? {
        None | Some("vision") => Ok(false),
        Some(_) => Err(fields.unsupported(KEY, "null, \"vision\"")),
    }
}

/// The vectors of each token that are a layer's own.
pub(super) fn layer_inputs(
    fields: &Fields<'_>,
    architecture: Architecture,
    vocab_size: usize,
) -> Result<Option<LayerInputs>, ModelError> {
    const KEY: &str = "hidden_size_per_layer_input";
    if architecture == Architecture::Gemma4Unified {
        return Ok(None);
    }
    // Null says that there are none.
    let otherwise = if fields.has(KEY) { 0 } else { 256 };
    let dim = fields.whole(KEY, 0..=MAX_HIDDEN / 8)?.unwrap_or(otherwise);
    const ROWS: &str = "vocab_size_per_layer_input";
    let rows = fields.whole(ROWS, 1..=MAX_VOCAB)?.unwrap_or(262_144);
    if dim > 0 && rows < vocab_size {
        return Err(fields.wrong(ROWS, format!("at least vocab_size, {vocab_size}")));
    }
    let vocab_size = rows;
    Ok((dim > 0).then_some(LayerInputs { vocab_size, dim }))
}

/// What there is no default for, where there are experts.
pub(super) fn check_experts(fields: &Fields<'_>) -> Result<(), ModelError> {
    let keys =
        [("num_experts", MAX_HIDDEN), ("top_k_experts", MAX_HIDDEN), ("moe_intermediate_size", MAX_INTERMEDIATE)];
    keys.into_iter().try_for_each(|(key, most)| fields.required_whole(key, 1..=most).map(|_| ()))
}

/// What each layer attends with; all with `usual` where the file says nothing else. `slides`: per layer, whether it has
/// a window.
pub(super) fn heads(
    fields: &Fields<'_>,
    n_heads: usize,
    usual: Heads,
    slides: &[bool],
) -> Result<Vec<Heads>, ModelError> {
    let values_are_keys = fields.flag("attention_k_eq_v")?.unwrap_or(false);
    let mut heads = vec![usual; slides.len()];
    const EACH: &str = "per_layer_config";
    const WIDE: &str = "global_head_dim";
    // Null there says that no layer differs.
    let is_by_layer = fields.has(EACH);
    let numbers = ["head_dim", KV_HEADS, "sliding_window", WIDE];
    let numbers = &numbers[..if is_by_layer { 3 } else { 4 }];
    if let Some(null) = numbers.iter().find(|key| fields.has(key) && fields.get(key).is_none()) {
        return Err(fields.wrong(null, "a number"));
    }
    if let Some(layers) = fields.object(EACH)? {
        for (key, _) in layers.entries() {
            let layer = key.parse::<usize>().ok().filter(|layer| *layer < slides.len());
            let (Some(layer), Some(given)) = (layer, layers.object(key)?) else {
                return Err(layers.unsupported(key, format!("numbers of layers, below {}", slides.len())));
            };
            if let Some((other, _)) = given.entries().find(|(key, _)| !["head_dim", KV_HEADS].contains(key)) {
                return Err(given.unsupported(other, format!("head_dim, {KV_HEADS}")));
            }
            set(&given, &mut heads[layer], "head_dim", Some(KV_HEADS), n_heads)?;
        }
        let dims =
            |sliding: bool| heads.iter().zip(slides).filter(move |(_, of)| **of == sliding).map(|(of, _)| of.dim);
        if [true, false].into_iter().any(|sliding| dims(sliding).any(|dim| Some(dim) != dims(sliding).next())) {
            return Err(fields.unsupported(EACH, "one head_dim for all layers of a type"));
        }
    } else if !is_by_layer {
        for (of, _) in heads.iter_mut().zip(slides).filter(|(_, slides)| !**slides) {
            (of.dim, of.rotary_dim) = (512, 512);
            set(fields, of, WIDE, values_are_keys.then_some("num_global_key_value_heads"), n_heads)?;
        }
    }
    const SHARED: &str = "num_kv_shared_layers";
    let first = slides.len() - fields.whole(SHARED, 0..=slides.len() - 1)?.unwrap_or(0);
    for layer in 0..slides.len() {
        heads[layer].values_are_keys = values_are_keys && !slides[layer];
        if layer >= first {
            let Some(of) = (0..first).rfind(|before| slides[*before] == slides[layer]) else {
                return Err(fields.wrong(SHARED, "a layer of each type before those that share its keys and values"));
            };
            if (heads[of].n_kv, heads[of].dim) != (heads[layer].n_kv, heads[layer].dim) {
                return Err(fields.wrong(EACH, "the same heads in layers that share keys and values"));
            }
            heads[layer].cache_of = Some(of);
        }
    }
    Ok(heads)
}

const KV_HEADS: &str = "num_key_value_heads";

/// Sets what `given` says, elements of a head and how many there are of keys.
fn set(
    given: &Fields<'_>,
    heads: &mut Heads,
    dim: &'static str,
    kv_heads: Option<&'static str>,
    n_heads: usize,
) -> Result<(), ModelError> {
    if let Some(n) = given.whole(dim, 1..=MAX_HEAD_DIM)? {
        if !n.is_multiple_of(2) {
            return Err(given.wrong(dim, format!("an even number from 2 to {MAX_HEAD_DIM} (RoPE turns pairs)")));
        }
        (heads.dim, heads.rotary_dim) = (n, n);
    }
    let Some(key) = kv_heads else { return Ok(()) };
    match given.whole(key, 1..=MAX_HEADS)? {
        Some(n) if !n_heads.is_multiple_of(n) => {
            Err(given.wrong(key, format!("a divisor of num_attention_heads, {n_heads}")))
        }
        n => {
            heads.n_kv = n.unwrap_or(heads.n_kv);
            Ok(())
        }
    }
}
