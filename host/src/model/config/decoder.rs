//! A decoder's config.json: its sizes, and what each layer does.

use std::ops::RangeInclusive;

use perpetua_device::kernels::{causal_conv, recurrence, routing};
use perpetua_shared::dtype::Q4_BLOCK;
use serde_json::Value;

use super::architecture::{AttentionGate, Biases, Mixture, Normalises, Recurs, Shared, Sliding, Sparse};
use super::gemma4;
use super::latent::{self, Latent};
use super::rope::{self, Lengthening, Rope, RopeScaling};
use super::{
    Activation, Architecture, MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN, MAX_INTERMEDIATE, MAX_LAYERS, MAX_POSITIONS,
    MAX_VOCAB, QkNorm, Stored, activation,
};
use crate::model::error::ModelError;
use crate::model::json::Fields;

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
    /// Query heads.
    pub n_heads: usize,
    /// Per layer, what it attends with.
    pub heads: Vec<Heads>,
    /// What attention that is latent attends with; of [`heads`](DecoderConfig::heads), the values of each count then,
    /// and what is turned.
    pub latent: Option<Latent>,
    /// Added to the mean square before the root. (Granite multiplies what layers add by m. This and the scale of
    /// embeddings are those of the same network with its rows divided by m, which norms do not see.)
    pub rms_norm_eps: f64,
    /// Per layer, how positions turn queries and keys.
    pub ropes: Vec<Rope>,
    /// What queries are multiplied with by their positions, where they are.
    pub lengthening: Option<Lengthening>,
    /// What scores are multiplied with: 1 / sqrt([`Heads::dim`]), unless the file has another number; in Gemma 4, 1.
    pub attention_scale: f64,
    /// What embeddings are multiplied with.
    pub embedding_scale: f64,
    /// What logits are divided by.
    pub logits_divisor: f64,
    /// What logits are capped by, smoothly: they become c * tanh(logit / c).
    pub logits_cap: Option<f64>,
    /// Vectors of each token that are a layer's own, where there are such.
    pub layer_inputs: Option<LayerInputs>,
    /// Whether what leaves a layer is multiplied with a number of its own.
    pub scales_layers: bool,
    /// Whether values are normalised, each head by itself, without factors.
    pub norms_values: bool,
    /// Whether the MLPs of layers without [keys of their own](Heads::cache_of) are twice as wide.
    pub doubles_mlps: bool,
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
    /// Whether a row attends to those after it, too: then it is for sentences.
    pub is_bidirectional: bool,
    /// Per layer, `Some(n)`: it attends to the last `n` positions only, or, bidirectional, to those at most `n` from
    /// its own; `n < max_position_embeddings`.
    pub windows: Vec<Option<usize>>,
    /// The MLP's function.
    pub hidden_act: Activation,
    /// Mixtures of experts, where there are some.
    pub experts: Option<Experts>,
    /// Layers that pass a state from row to row instead of attending, where there are some.
    pub recurrent: Option<Recurrent>,
    /// The gate that what attention makes goes through, where there is one.
    pub gate: Option<AttentionGate>,
    /// Whether each query head has a sink: a score beside those of the positions it attends to, whose value is zero.
    pub has_sinks: bool,
}

/// What a layer attends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Key and value heads; a divisor of [`DecoderConfig::n_heads`].
    pub n_kv: usize,
    /// Elements of one head; even. `n_heads * dim` need not be `hidden_size`.
    pub dim: usize,
    /// Elements of a head that are turned, the first ones; even.
    pub rotary_dim: usize,
    /// Whether values are the keys, as these are before their norm and their rotation.
    pub values_are_keys: bool,
    /// The layer before it to whose keys and values it attends, if it has none of its own.
    pub cache_of: Option<usize>,
}

/// What each layer takes of a token beside the row that comes from the layer before it: a part of the token's row in a
/// table, and of what a linear layer makes of its embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerInputs {
    /// Rows of the table.
    pub vocab_size: usize,
    /// Elements of a layer's part.
    pub dim: usize,
}

/// The layers of a network that do not attend.
#[derive(Clone, Debug, PartialEq)]
pub struct Recurrent {
    /// What they do instead.
    pub mixer: Mixer,
    /// Per layer, whether it is one.
    pub layers: Vec<bool>,
}

/// What a layer does in the place of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Mixer {
    /// Linear attention by the gated delta rule, behind a convolution of queries, keys and values.
    DeltaRule(DeltaRule),
    /// A state space (Mamba-2), behind a convolution, whose heads share keys and queries.
    StateSpace(StateSpace),
    /// A convolution, gated on both sides.
    Convolution {
        /// Rows that it reaches over.
        taps: usize,
        /// Whether it, and the linear layers around it, have biases.
        has_bias: bool,
    },
}

/// See [`Mixer::DeltaRule`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaRule {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values; a multiple of `key_heads`.
    pub value_heads: usize,
    /// Elements of a query or key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Rows that the convolution reaches over.
    pub taps: usize,
}

/// See [`Mixer::StateSpace`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateSpace {
    /// Heads.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements of a key or query.
    pub state_dim: usize,
    /// Rows that the convolution reaches over.
    pub taps: usize,
    /// Whether the convolution has a bias.
    pub conv_bias: bool,
    /// Whether the linear layers around it have.
    pub linear_bias: bool,
    /// Added to the mean square before the root in the norm behind it, which does not see how rows are scaled.
    pub norm_eps: f64,
}

/// The mixtures of experts of a network: each row goes to some of a layer's MLPs.
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    /// MLPs of a layer.
    pub n: usize,
    /// How many of them a row goes to.
    pub chosen: usize,
    /// Elements between the linear layers of each.
    pub intermediate_size: usize,
    /// Whether the parts with which those chosen count add up to 1, or to the [factor](Experts::factor).
    pub normalise: bool,
    /// Those parts are of the sigmoids of their logits; else of the softmax.
    pub sigmoids: Option<Sigmoids>,
    /// What those parts are multiplied with.
    pub factor: f64,
    /// Per layer, whether it has them; else its MLP is the usual one.
    pub layers: Vec<bool>,
    /// Whether the usual MLP is there, too, and each of both behind a norm, what they make before one; an expert then
    /// counts so many times what its own number says.
    pub stands_beside: bool,
    /// An MLP beside them that all rows go to, if there is one.
    pub shared: Option<SharedExpert>,
    /// gpt-oss's way with gates and ups, which is with biases, the router's too.
    pub limited: Option<LimitedGate>,
    /// Whether files have their matrices in MXFP4.
    pub is_mxfp4: bool,
}

/// Experts that count by the sigmoids of their logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sigmoids {
    /// Whether a number of its own is added to each expert's where they are chosen.
    pub are_corrected: bool,
    /// What is added to the sum of those chosen, where their parts add up.
    pub added: f64,
}

/// What becomes of gates and ups, instead of act(gate) * up: g * sigmoid(alpha * g) * (u + 1), where g is the gate, but
/// no more than the limit, and u the up, but no further from 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LimitedGate {
    /// `swiglu_limit`.
    pub limit: f64,
    /// `swiglu_alpha`.
    pub alpha: f64,
}

/// See [`Experts::shared`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedExpert {
    /// Elements between its linear layers.
    pub intermediate_size: usize,
    /// Whether it counts with the sigmoid of a logit of its own; else it is simply added.
    pub is_weighed: bool,
}

impl DecoderConfig {
    /// The experts of layer `layer`, if it has some.
    pub fn experts_of(&self, layer: usize) -> Option<&Experts> {
        self.experts.as_ref().filter(|experts| experts.layers[layer])
    }

    /// How many times a head's elements its query takes of a row of queries: its gate may stand there, too.
    pub(crate) fn of_query(&self) -> usize {
        if self.gate == Some(AttentionGate::BesideQueries) { 2 } else { 1 }
    }

    /// Elements between the linear layers of the usual MLP of layer `layer`.
    pub fn intermediate_of(&self, layer: usize) -> usize {
        let times = if self.doubles_mlps && self.heads[layer].cache_of.is_some() { 2 } else { 1 };
        times * self.intermediate_size
    }

    /// What layer `layer` does in the place of attention, if it does not attend.
    pub fn mixer_of(&self, layer: usize) -> Option<Mixer> {
        self.recurrent.as_ref().filter(|recurrent| recurrent.layers[layer]).map(|recurrent| recurrent.mixer)
    }
}

/// What would have Gemma 3's layers compute something else.
fn refuse_other_gemmas(fields: &Fields<'_>) -> Result<(), ModelError> {
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if fields.get(key).is_some() {
            return Err(fields.unsupported(key, "null"));
        }
    }
    Ok(())
}

/// What a decoder's config.json says, with every default filled in. Of a model of which this is the half that reads,
/// the other says whether the head is the embedding table: `is_tied`.
pub(super) fn decoder(
    fields: &Fields<'_>,
    architecture: Architecture,
    is_tied: Option<bool>,
    stored: Stored,
) -> Result<DecoderConfig, ModelError> {
    let is_gemma = architecture == Architecture::Gemma3;
    if is_gemma {
        refuse_other_gemmas(fields)?;
    }
    if fields.get("clip_qkv").is_some() && architecture == Architecture::Olmoe {
        return Err(fields.unsupported("clip_qkv", "null"));
    }
    if let Some(missing) = architecture.traits().required.iter().find(|key| fields.get(key).is_none()) {
        return Err(fields.wrong(missing, "what this architecture has no default for here"));
    }
    if architecture == Architecture::Lfm3 && fields.flag("use_sandwich_norm")? == Some(false) {
        return Err(fields.unsupported("use_sandwich_norm", "true"));
    }
    let is_gemma4 = architecture.is_gemma4();
    // Gemma's files leave out what its configuration class has by default.
    let size = |key, range, [of_gemma3, of_gemma4]: [usize; 2]| match (is_gemma, is_gemma4) {
        (true, _) => Ok(fields.whole(key, range)?.unwrap_or(of_gemma3)),
        (_, true) => Ok(fields.whole(key, range)?.unwrap_or(of_gemma4)),
        _ => fields.required_whole(key, range),
    };
    let hidden_size = size("hidden_size", 1..=MAX_HIDDEN, [2304; 2])?;
    let n_layers = size("num_hidden_layers", 1..=MAX_LAYERS, [26, 30])?;
    let n_heads = size("num_attention_heads", 1..=MAX_HEADS, [8; 2])?;

    let traits = architecture.traits();
    let latent = latent::latent(fields, architecture, [hidden_size, n_heads])?;
    // Null is not as good as missing: it says that there are as many as heads.
    let default_kv_heads = if fields.has("num_key_value_heads") { None } else { traits.n_kv_heads };
    let n_kv_heads = fields.whole("num_key_value_heads", 1..=MAX_HEADS)?.or(default_kv_heads).unwrap_or(n_heads);
    if !n_heads.is_multiple_of(n_kv_heads) {
        return Err(fields.wrong("num_key_value_heads", format!("a divisor of num_attention_heads, {n_heads}")));
    }

    let default_head_dim = if fields.has("head_dim") { None } else { traits.head_dim };
    let said_head_dim = match latent {
        Some(latent) => Some(latent.turned_dim),
        None => fields.whole("head_dim", 1..=MAX_HEAD_DIM)?.or(default_head_dim),
    };
    let head_dim = match said_head_dim {
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

    // Of what a part may be said to be turned.
    let of_part =
        latent.filter(|_| architecture == Architecture::Mistral4).map_or(head_dim, |latent| latent.head_dim());
    let ropes = rope::ropes(fields, architecture, max_position_embeddings, [head_dim, of_part])?;
    // Files that ask for YaRN often have the number from before.
    let max_position_embeddings = match ropes.full.scaling {
        RopeScaling::Yarn { factor, original_max_position_embeddings: original, .. } => {
            max_position_embeddings.max(((factor * original as f64) as usize).min(MAX_POSITIONS))
        }
        _ => max_position_embeddings,
    };

    let has = |biases| match biases {
        Biases::Always => Ok(true),
        Biases::Never => Ok(false),
        Biases::Said { key, otherwise } => Ok::<bool, ModelError>(fields.flag(key)?.unwrap_or(otherwise)),
    };
    let attention_bias = has(traits.attention_bias)?;
    let layers = layers(fields, architecture, n_layers)?;
    let rope_of = |layer: &Layer| match (layer.slides, layer.turns) {
        (_, false) => Rope::NONE,
        (true, true) => ropes.sliding.clone(),
        (false, true) => ropes.full.clone(),
    };
    let dim = latent.map_or(head_dim, |latent| latent.value_dim);
    let of_all = Heads { n_kv: n_kv_heads, dim, rotary_dim: ropes.dim, values_are_keys: false, cache_of: None };
    let heads = match is_gemma4 {
        true => gemma4::heads(fields, n_heads, of_all, &layers.iter().map(|layer| layer.slides).collect::<Vec<_>>())?,
        false => vec![of_all; n_layers],
    };
    let mut ropes_of_layers: Vec<Rope> = layers.iter().map(rope_of).collect();
    if let Some(key) = traits.thetas_key {
        bases_of_layers(fields, key, &mut ropes_of_layers)?;
    }
    let experts = experts(fields, architecture, [hidden_size, n_layers], stored)?;
    let alone = traits.mixture.and_then(|mixture| mixture.shared).filter(|of| of.stands_alone && experts.is_none());
    // Where all layers have experts, and these a size of their own, the other one may be missing.
    let is_said = fields.get("intermediate_size").is_some();
    let are_alone = |of: &&Experts| !is_said && !of.stands_beside && of.layers.iter().all(|has| *has);
    let of_experts = experts.as_ref().filter(are_alone);
    let intermediate_size = match (alone, of_experts) {
        (Some(shared), _) => match shared_size(fields, shared, 0)? {
            0 => return Err(fields.wrong(shared.key, "at least 1, where there are no experts")),
            size => size,
        },
        (None, Some(experts)) => experts.intermediate_size,
        (None, None) if architecture == Architecture::Lfm2 => lfm2_intermediate_size(fields)?,
        (None, None) => size("intermediate_size", 1..=MAX_INTERMEDIATE, [9216; 2])?,
    };
    const SCALARS: RangeInclusive<f64> = 1e-6..=1e9;
    let query_scalar =
        if is_gemma { fields.real("query_pre_attn_scalar", SCALARS)?.unwrap_or(256.0) } else { head_dim as f64 };
    let multiplier = |key| match traits.multiplies {
        true => Ok::<f64, ModelError>(fields.real(key, SCALARS)?.unwrap_or(1.0)),
        false => Ok(1.0),
    };
    let [scale_of_embeddings, added, logits_divisor] = match architecture {
        Architecture::MiniCpm3 => latent::minicpm3_numbers(fields, [hidden_size, n_layers])?,
        _ => [multiplier("embedding_multiplier")?, multiplier("residual_multiplier")?, multiplier("logits_scaling")?],
    };
    let eps_key = traits.eps_keys.iter().find(|key| fields.get(key).is_some()).unwrap_or(&traits.eps_keys[0]);
    let rms_norm_eps = fields.real(eps_key, 0.0..=1.0)?.unwrap_or(traits.rms_norm_eps);
    let sees_all = match is_gemma4 {
        true => gemma4::sees_all(fields)?,
        false => fields.flag("use_bidirectional_attention")?.unwrap_or(false),
    };
    if sees_all && !is_gemma {
        return Err(fields.unsupported("use_bidirectional_attention", "false for this architecture"));
    }
    let is_bidirectional = sees_all || fields.flag("is_causal")? == Some(false);
    if is_bidirectional && (is_gemma4 || latent.is_some()) {
        return Err(fields.unsupported("is_causal", "true for this architecture"));
    }
    let recurrent = recurrent(fields, architecture, n_layers, rms_norm_eps)?;
    if is_bidirectional && traits.has_sinks {
        return Err(fields.unsupported("is_causal", "true, where heads have sinks"));
    }
    if is_bidirectional && recurrent.is_some() {
        return Err(fields.unsupported("is_causal", "true, where layers pass states on"));
    }
    // Gemma's windows reach as far to both sides together, others' to each.
    let of_window = if sees_all { 2 } else { 1 };
    let windows = windows(fields, architecture, &layers, of_window, max_position_embeddings)?;
    let act_key = if is_gemma || is_gemma4 { "hidden_activation" } else { "hidden_act" };
    // Its older files' name comes before today's.
    let is_lfm = matches!(architecture, Architecture::Lfm2 | Architecture::Lfm2Moe);
    let tied_before = if is_lfm { fields.flag("tie_embedding")? } else { None };
    let has_qk_norm = traits.qk_norm_key.map_or(Ok(true), |key| Ok(fields.flag(key)?.unwrap_or(false)));
    let has_gate = traits.gate_key.map_or(Ok(true), |key| Ok::<bool, ModelError>(fields.flag(key)?.unwrap_or(true)));
    let is_tied = match is_tied.or(tied_before) {
        Some(is_tied) => is_tied,
        None => fields.flag("tie_word_embeddings")?.unwrap_or(traits.tie_word_embeddings),
    };
    let vocab_size = size("vocab_size", 1..=MAX_VOCAB, [262_208, 262_144])?;
    Ok(DecoderConfig {
        architecture,
        vocab_size,
        hidden_size,
        intermediate_size,
        n_layers,
        n_heads,
        heads,
        latent,
        rms_norm_eps: rms_norm_eps / (added * added),
        ropes: ropes_of_layers,
        lengthening: ropes.lengthening,
        attention_scale: match traits.multiplies {
            true => multiplier("attention_multiplier")?,
            false if is_gemma4 => 1.0,
            false if let Some(latent) = latent => (latent.head_dim() as f64).powf(-0.5) * ropes.scores_factor,
            // Rounded as transformers does.
            false => f64::from(1.0 / (query_scalar as f32).sqrt()),
        },
        embedding_scale: match architecture {
            Architecture::Gemma3 | Architecture::Gemma4 | Architecture::Gemma4Unified => (hidden_size as f64).sqrt(),
            Architecture::Afmoe if fields.flag("mup_enabled")?.unwrap_or(false) => (hidden_size as f64).sqrt(),
            _ => scale_of_embeddings / added,
        },
        logits_divisor,
        logits_cap: if is_gemma4 { fields.real("final_logit_softcapping", 1e-3..=1e3)? } else { None },
        layer_inputs: if is_gemma4 { gemma4::layer_inputs(fields, architecture, vocab_size)? } else { None },
        scales_layers: is_gemma4,
        norms_values: is_gemma4,
        doubles_mlps: is_gemma4 && fields.flag("use_double_wide_mlp")?.unwrap_or(false),
        tie_word_embeddings: is_tied,
        attention_bias,
        output_bias: traits.output_bias.map_or(Ok(attention_bias), has)?,
        mlp_bias: has(traits.mlp_bias)?,
        qk_norm: if has_qk_norm? { traits.qk_norm } else { QkNorm::None },
        max_position_embeddings,
        is_bidirectional,
        windows,
        hidden_act: activation(fields, act_key, traits.activation)?,
        experts,
        recurrent,
        gate: if has_gate? { traits.gate } else { None },
        has_sinks: traits.has_sinks,
    })
}

/// Gives each layer's RoPE the base that `key` says, if it does; 0: it turns nothing.
fn bases_of_layers(fields: &Fields<'_>, key: &str, ropes: &mut [Rope]) -> Result<(), ModelError> {
    let Some(bases) = fields.reals(key, 0.0..=rope::MAX_THETA)? else { return Ok(()) };
    if bases.len() != ropes.len() {
        return Err(not_one_a_layer(fields, key, bases.len(), ropes.len()));
    }
    for (rope, base) in ropes.iter_mut().zip(bases) {
        match base {
            0.0 => *rope = Rope::NONE,
            // YaRN takes its logarithm.
            1.0 if matches!(rope.scaling, RopeScaling::Yarn { .. }) => {
                return Err(fields.wrong(key, "0, or numbers above 1 (YaRN)"));
            }
            1.0.. => rope.theta = base,
            _ => return Err(fields.wrong(key, "0, or numbers from 1 on")),
        }
    }
    Ok(())
}

/// Elements between the linear layers of LFM2's MLPs: two thirds of what the file says, times a number, up to a
/// multiple of another, unless it says that this is not so.
fn lfm2_intermediate_size(fields: &Fields<'_>) -> Result<usize, ModelError> {
    let before = fields.whole("block_ff_dim", 1..=MAX_INTERMEDIATE)?;
    let said = match before {
        Some(size) => size,
        None => fields.required_whole("intermediate_size", 1..=MAX_INTERMEDIATE)?,
    };
    if fields.flag("block_auto_adjust_ff_dim")? == Some(false) {
        return Ok(said);
    }
    let multiplier = fields.real("block_ffn_dim_multiplier", 0.0..=1e3)?.unwrap_or(1.0);
    let granule = fields.whole("block_multiple_of", 1..=MAX_INTERMEDIATE)?.unwrap_or(256);
    let size = ((multiplier * (2 * said / 3) as f64) as usize).next_multiple_of(granule);
    match size {
        1..=MAX_INTERMEDIATE => Ok(size),
        _ => Err(fields.wrong("intermediate_size", format!("1 to {MAX_INTERMEDIATE} elements made of it, not {size}"))),
    }
}

/// The layers that do not attend.
fn recurrent(
    fields: &Fields<'_>,
    architecture: Architecture,
    n_layers: usize,
    norm_eps: f64,
) -> Result<Option<Recurrent>, ModelError> {
    let Some(recurs) = architecture.traits().recurs else { return Ok(None) };
    // Today's names first.
    let names: &[_] = match recurs {
        Recurs::DeltaRule => &["linear_attention"],
        Recurs::StateSpace => &["linear_attention", "mamba"],
        Recurs::Convolution { .. } => &["conv"],
    };
    let before = recurs == Recurs::StateSpace && fields.get("layer_types").is_none();
    let key = if before { "layers_block_type" } else { "layer_types" };
    // Of those that attend some may have a window.
    let (attending, said) = match architecture.traits().sliding {
        Sliding::Never => (["full_attention", "attention"], "full_attention"),
        _ => (["full_attention", SLIDING], "full_attention, sliding_attention"),
    };
    let known = [names, &attending].concat();
    let supported = format!("{}, {said}", names[0]);
    let layers: Vec<bool> = match (kinds(fields, key, n_layers, &known, &supported)?, recurs) {
        (Some(kinds), _) => kinds.iter().map(|kind| names.contains(kind)).collect(),
        (None, Recurs::StateSpace) => vec![true; n_layers],
        (None, Recurs::DeltaRule) => {
            let interval = fields.whole("full_attention_interval", 1..=MAX_LAYERS)?.unwrap_or(4);
            (1..=n_layers).map(|layer| !layer.is_multiple_of(interval)).collect()
        }
        (None, Recurs::Convolution { .. }) => match fields.wholes("full_attn_idxs", 0..=MAX_LAYERS)? {
            Some(attending) => (0..n_layers).map(|layer| !attending.contains(&layer)).collect(),
            None => vec![false; n_layers],
        },
    };
    if !layers.contains(&true) {
        return Ok(None);
    }
    let taps = |key, default| Ok(fields.whole(key, 2..=causal_conv::MAX_TAPS as usize)?.unwrap_or(default));
    let mixer = match recurs {
        Recurs::StateSpace => state_space(fields, norm_eps)?,
        Recurs::Convolution { taps: usual } => Mixer::Convolution {
            taps: taps("conv_L_cache", usual)?,
            has_bias: fields.flag("conv_bias")?.unwrap_or(false),
        },
        Recurs::DeltaRule => {
            const VALUE_HEADS: &str = "linear_num_value_heads";
            let size = |key, most, default| Ok::<_, ModelError>(fields.whole(key, 1..=most)?.unwrap_or(default));
            let key_heads = size("linear_num_key_heads", MAX_HEADS, 16)?;
            let value_heads = size(VALUE_HEADS, MAX_HEADS, 32)?;
            if !value_heads.is_multiple_of(key_heads) {
                return Err(fields.wrong(VALUE_HEADS, format!("a multiple of linear_num_key_heads, {key_heads}")));
            }
            Mixer::DeltaRule(DeltaRule {
                key_heads,
                value_heads,
                key_dim: size("linear_key_head_dim", recurrence::MAX_KEY as usize, 128)?,
                value_dim: size("linear_value_head_dim", MAX_HEAD_DIM, 128)?,
                taps: taps("linear_conv_kernel_dim", 4)?,
            })
        }
    };
    Ok(Some(Recurrent { mixer, layers }))
}

/// A state space, as Granite's configuration has it.
fn state_space(fields: &Fields<'_>, norm_eps: f64) -> Result<Mixer, ModelError> {
    let whole = |key, most, default| Ok::<_, ModelError>(fields.whole(key, 1..=most)?.unwrap_or(default));
    let hidden_size = fields.required_whole("hidden_size", 1..=MAX_HIDDEN)?;
    const HEADS: &str = "mamba_n_heads";
    let heads = whole(HEADS, MAX_HEADS, 128)?;
    let inner = hidden_size * whole("mamba_expand", 64, 2)?;
    if !inner.is_multiple_of(heads) {
        return Err(fields.wrong(HEADS, format!("a divisor of mamba_expand * hidden_size, {inner}")));
    }
    const HEAD_DIM: &str = "mamba_d_head";
    let is_auto = fields.get(HEAD_DIM).is_some_and(|dim| dim == "auto");
    if !is_auto && fields.whole(HEAD_DIM, 1..=MAX_HIDDEN)?.is_some_and(|dim| dim * heads != inner) {
        return Err(fields.wrong(HEAD_DIM, format!("{}, so that {heads} heads have {inner} elements", inner / heads)));
    }
    // All heads share keys and queries, and the norm behind them is over all.
    if whole("mamba_n_groups", MAX_HEADS, 1)? != 1 {
        return Err(fields.unsupported("mamba_n_groups", "1"));
    }
    // JSON has no name for what no step is beyond.
    let least = fields.get("time_step_limit").and_then(|limits| limits.get(0)?.as_f64());
    let most = fields.get("time_step_limit").and_then(|limits| limits.get(1)?.as_f64());
    if least.is_some_and(|least| least > 0.0) || most.is_some() {
        return Err(fields.unsupported("time_step_limit", "none"));
    }
    Ok(Mixer::StateSpace(StateSpace {
        heads,
        head_dim: inner / heads,
        // More are what the class has where the file does not say it.
        state_dim: fields.required_whole("mamba_d_state", 1..=recurrence::MAX_KEY as usize)?,
        taps: fields.whole("mamba_d_conv", 2..=causal_conv::MAX_TAPS as usize)?.unwrap_or(4),
        conv_bias: fields.flag("mamba_conv_bias")?.unwrap_or(true),
        linear_bias: fields.flag("mamba_proj_bias")?.unwrap_or(false),
        norm_eps,
    }))
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
    if architecture.is_gemma4() {
        layers.iter_mut().next_back().into_iter().for_each(|layer| layer.slides = false);
    }
    if architecture.traits().is_still_without_window && window(fields, architecture)?.is_some() {
        layers.iter_mut().for_each(|layer| layer.turns = layer.slides);
    }
    Ok(layers)
}

/// Which layers turn queries and keys by their positions, as far as the file says it by itself.
fn turning_layers(fields: &Fields<'_>, architecture: Architecture, n_layers: usize) -> Result<Vec<bool>, ModelError> {
    match architecture {
        Architecture::SmolLm3 => {}
        Architecture::GraniteMoeHybrid => {
            return Ok(vec![fields.text("position_embedding_type")? == Some("rope"); n_layers]);
        }
        _ => return Ok(vec![true; n_layers]),
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

/// The kind of each layer, where `key` says it: one of those that are `known`, of which errors name the `supported`.
fn kinds<'f>(
    fields: &'f Fields<'_>,
    key: &str,
    n_layers: usize,
    known: &[&str],
    supported: &str,
) -> Result<Option<Vec<&'f str>>, ModelError> {
    let Some(kinds) = fields.texts(key)? else { return Ok(None) };
    if let Some(other) = kinds.iter().find(|kind| !known.contains(kind)) {
        return Err(ModelError::unsupported(fields.path(), key, *other, supported));
    }
    if kinds.len() != n_layers {
        return Err(not_one_a_layer(fields, key, kinds.len(), n_layers));
    }
    Ok(Some(kinds))
}

/// What `layer_types` calls a layer with a window.
const SLIDING: &str = rope::LAYER_TYPES[1];

/// Which layers have a window, where `layer_types` says it.
pub(super) fn typed_layers(fields: &Fields<'_>, n_layers: usize) -> Result<Option<Vec<bool>>, ModelError> {
    const KEY: &str = "layer_types";
    if fields.texts(KEY)?.is_none_or(|types| types.is_empty()) {
        return Ok(None);
    }
    let known = ["full_attention", "attention", SLIDING];
    let kinds = kinds(fields, KEY, n_layers, &known, "full_attention, sliding_attention")?;
    Ok(kinds.map(|kinds| kinds.into_iter().map(|kind| kind == SLIDING).collect()))
}

/// Which layers have a window, if the network has one; `turns` as [`turning_layers`] has it.
fn sliding_layers(fields: &Fields<'_>, architecture: Architecture, turns: &[bool]) -> Result<Vec<bool>, ModelError> {
    let n_layers = turns.len();
    // Of those that do not all attend, others ask for the other kinds.
    if let (Some(_), Sliding::Never) = (architecture.traits().recurs, architecture.traits().sliding) {
        return Ok(vec![false; n_layers]);
    }
    let typed = match architecture.traits().recurs {
        None => typed_layers(fields, n_layers)?,
        Some(_) => fields.texts("layer_types")?.map(|types| types.into_iter().map(|kind| kind == SLIDING).collect()),
    };
    let named = |others: &dyn Fn(usize) -> bool| match &typed {
        Some(typed) => typed.clone(),
        None => (0..n_layers).map(others).collect(),
    };
    Ok(match architecture.traits().sliding {
        Sliding::Never => vec![false; n_layers],
        Sliding::All | Sliding::AllIfUsed => vec![true; n_layers],
        Sliding::Named => named(&|_| true),
        Sliding::NamedAlone => named(&|_| false),
        Sliding::MostBehind { pattern } => named(&|layer| !layer.is_multiple_of(pattern)),
        Sliding::Later { first, .. } => {
            let first = fields.whole("max_window_layers", 0..=MAX_LAYERS)?.unwrap_or(first);
            named(&|layer| layer >= first)
        }
        Sliding::Most { key, pattern } => {
            // What no other key says decides.
            let key = key.filter(|_| typed.is_none());
            let pattern = key.map_or(Ok(None), |key| fields.whole(key, 1..=MAX_LAYERS))?.unwrap_or(pattern);
            named(&|layer| !(layer + 1).is_multiple_of(pattern))
        }
        Sliding::Alternating => {
            let end = fields.whole("max_window_layers", 0..=MAX_LAYERS)?.unwrap_or(28);
            named(&|layer| layer % 2 == 0 && layer < end)
        }
        Sliding::Still => named(&|layer| !turns[layer]),
    })
}

/// What `sliding_window` says, or what is so where it is missing, and not null.
fn window(fields: &Fields<'_>, architecture: Architecture) -> Result<Option<usize>, ModelError> {
    let traits = architecture.traits();
    let default = if fields.has("sliding_window") { None } else { traits.window };
    // Some files have 0 where windows are not used.
    let least = usize::from(traits.sliding != Sliding::Alternating);
    Ok(fields.whole("sliding_window", least..=MAX_POSITIONS)?.or(default).filter(|n| *n > 0))
}

/// The window of each layer that slides, where it is smaller than the context: of what the file says, one part in
/// `of_window`.
fn windows(
    fields: &Fields<'_>,
    architecture: Architecture,
    layers: &[Layer],
    of_window: usize,
    max_position_embeddings: usize,
) -> Result<Vec<Option<usize>>, ModelError> {
    let (window, sliding) = (window(fields, architecture)?, architecture.traits().sliding);
    let are_typed = fields.get("layer_types").is_some();
    // EXAONE's files may say so of layers that have none.
    let counts_types = match sliding {
        Sliding::Most { .. } => !matches!(architecture, Architecture::Exaone4 | Architecture::ExaoneMoe),
        Sliding::NamedAlone | Sliding::MostBehind { .. } | Sliding::Later { if_used: false, .. } | Sliding::Still => {
            true
        }
        _ => false,
    };
    if counts_types && are_typed && window.is_none() && layers.iter().any(|layer| layer.slides) {
        return Err(fields.wrong("sliding_window", "a number, for layer_types has sliding_attention"));
    }
    let is_active = match sliding {
        Sliding::Never => false,
        Sliding::All
        | Sliding::Named
        | Sliding::NamedAlone
        | Sliding::Most { .. }
        | Sliding::MostBehind { .. }
        | Sliding::Later { if_used: false, .. } => true,
        // What the types of its layers say counts, whether windows are used or not.
        Sliding::Still if are_typed => true,
        Sliding::Later { if_used: true, .. } | Sliding::AllIfUsed | Sliding::Alternating | Sliding::Still => {
            fields.flag("use_sliding_window")?.unwrap_or(false)
        }
    };
    let window = window.map(|n| n / of_window).filter(|n| is_active && *n < max_position_embeddings);
    Ok(layers.iter().map(|layer| window.filter(|_| layer.slides)).collect())
}

/// Elements between the linear layers of an MLP that all rows go to, beside experts of so many; 0: there is none.
fn shared_size(
    fields: &Fields<'_>,
    Shared { key, is_in_experts, otherwise, .. }: Shared,
    of_expert: usize,
) -> Result<usize, ModelError> {
    let each = if is_in_experts { of_expert.max(1) } else { 1 };
    Ok(each * fields.whole(key, 0..=MAX_INTERMEDIATE / each)?.unwrap_or(otherwise))
}

/// Per layer, whether it has experts, of which there are `n`.
fn sparse_layers(fields: &Fields<'_>, sparse: Sparse, n_layers: usize, n: usize) -> Result<Vec<bool>, ModelError> {
    let named = |key: &'static str| {
        let kinds = kinds(fields, key, n_layers, &["sparse", "dense"], "sparse, dense")?;
        Ok(kinds.map(|kinds| kinds.into_iter().map(|kind| kind == "sparse").collect()))
    };
    match sparse {
        Sparse::All => Ok(vec![true; n_layers]),
        Sparse::IfSaid { key } => Ok(vec![fields.flag(key)?.unwrap_or(false); n_layers]),
        Sparse::Stepped => {
            let step = fields.whole("decoder_sparse_step", 1..=MAX_LAYERS)?.unwrap_or(1);
            let dense = fields.wholes("mlp_only_layers", 0..=MAX_LAYERS)?.unwrap_or_default();
            Ok((0..n_layers).map(|layer| n > 0 && (layer + 1) % step == 0 && !dense.contains(&layer)).collect())
        }
        Sparse::Named { key } => Ok(named(key)?.unwrap_or(vec![true; n_layers])),
        Sparse::Later { key, dense, types_key } => {
            if let Some(named) = types_key.map_or(Ok(None), named)? {
                return Ok(named);
            }
            let dense = fields.whole(key, 0..=MAX_LAYERS)?.unwrap_or(dense);
            Ok((0..n_layers).map(|layer| layer >= dense).collect())
        }
    }
}

/// How experts count that do so by the sigmoids of their logits.
fn sigmoids(fields: &Fields<'_>, mixture: Mixture) -> Result<Option<Sigmoids>, ModelError> {
    let Some(of) = mixture.sigmoids else { return Ok(None) };
    Ok(Some(Sigmoids {
        are_corrected: of.corrected_key.map_or(Ok(true), |key| Ok(fields.flag(key)?.unwrap_or(true)))?,
        added: of.added,
    }))
}

/// Refuses experts in several groups, of which only some would be chosen from.
fn refuse_groups(fields: &Fields<'_>, architecture: Architecture, mixture: Mixture) -> Result<(), ModelError> {
    const METHOD: &str = "topk_method";
    if architecture == Architecture::DeepseekV2 {
        match fields.text(METHOD)? {
            None | Some("greedy") => return Ok(()),
            Some("group_limited_greedy") => {}
            Some(_) => return Err(fields.unsupported(METHOD, "\"greedy\"")),
        }
    }
    let number = |key, otherwise| Ok::<_, ModelError>(fields.whole(key, 1..=MAX_HIDDEN)?.unwrap_or(otherwise));
    let [of_all, of_taken] = mixture.groups;
    if number("n_group", of_all)? > number("topk_group", of_taken)? {
        return Err(fields.unsupported("n_group", "as many as topk_group"));
    }
    Ok(())
}

/// The number, from 1 to `most`, that `key` says, or that it says of each layer, all alike.
fn each_alike(fields: &Fields<'_>, key: &str, most: usize) -> Result<Option<usize>, ModelError> {
    if !fields.get(key).is_some_and(Value::is_array) {
        return fields.whole(key, 1..=most);
    }
    let each = fields.wholes(key, 1..=most)?.unwrap_or_default();
    match each[..] {
        [first, ..] if each.iter().all(|n| *n == first) => Ok(Some(first)),
        _ => Err(fields.unsupported(key, "one number, or the same one for each layer")),
    }
}

/// The mixtures of experts of `architecture`.
fn experts(
    fields: &Fields<'_>,
    architecture: Architecture,
    [hidden_size, n_layers]: [usize; 2],
    stored: Stored,
) -> Result<Option<Experts>, ModelError> {
    const MOST: usize = routing::MAX_EXPERTS as usize;
    let Some(mixture) = architecture.traits().mixture else { return Ok(None) };
    let key = mixture.keys.iter().find(|key| fields.get(key).is_some()).unwrap_or(&mixture.keys[0]);
    let may_be_none = matches!(mixture.sparse, Sparse::Stepped | Sparse::IfSaid { .. });
    let n = fields.whole(key, usize::from(!may_be_none)..=MOST)?.unwrap_or(mixture.n);
    let sigmoids = sigmoids(fields, mixture)?;
    // They say nothing to the others.
    if sigmoids.is_some() || architecture.traits().is_latent {
        refuse_groups(fields, architecture, mixture)?;
    }
    let factor = mixture.factor_key.map_or(Ok(None), |key| fields.real(key, 1e-3..=1e3))?.unwrap_or(mixture.factor);
    let said = fields.flag("norm_topk_prob")?;
    let normalise = match mixture.normalises {
        Normalises::Always => true,
        Normalises::Unless => said.unwrap_or(true),
        Normalises::If => said.unwrap_or(false),
        Normalises::Never if said == Some(true) => {
            return Err(fields.unsupported("norm_topk_prob", "false for this architecture"));
        }
        Normalises::Never => false,
    };
    let layers = sparse_layers(fields, mixture.sparse, n_layers, n)?;
    if !layers.contains(&true) {
        return Ok(None);
    }
    if architecture.is_gemma4() {
        gemma4::check_experts(fields)?;
    }
    let intermediate_size = match mixture.intermediate_size {
        Some(size) => fields.whole("moe_intermediate_size", 1..=MAX_INTERMEDIATE)?.unwrap_or(size),
        None => fields.required_whole("intermediate_size", 1..=MAX_INTERMEDIATE)?,
    };
    let most = n.min(routing::MAX_CHOSEN as usize);
    let chosen = each_alike(fields, mixture.chosen_key, most)?.unwrap_or(mixture.chosen);
    if chosen > most {
        return Err(fields.wrong(mixture.chosen_key, format!("at most {key}, {n}")));
    }
    let shared = match mixture.shared {
        Some(of) => Some(SharedExpert {
            intermediate_size: shared_size(fields, of, intermediate_size)?,
            is_weighed: of.is_weighed,
        }),
        None => None,
    };
    let shared = shared.filter(|shared| shared.intermediate_size > 0);
    let limited = match architecture.traits().limits_experts {
        true => Some(LimitedGate {
            limit: fields.real("swiglu_limit", 1e-3..=1e9)?.unwrap_or(7.0),
            alpha: fields.real("swiglu_alpha", -1e3..=1e3)?.unwrap_or(1.702),
        }),
        false => None,
    };
    let is_mxfp4 = stored == Stored::Mxfp4;
    let rows = [("hidden_size", hidden_size), ("intermediate_size", intermediate_size)];
    if let Some((key, _)) = rows.iter().find(|(_, n)| is_mxfp4 && !n.is_multiple_of(Q4_BLOCK)) {
        return Err(fields.wrong(key, format!("a multiple of {Q4_BLOCK}, as blocks of MXFP4 are")));
    }
    Ok(Some(Experts {
        n,
        chosen,
        intermediate_size,
        normalise,
        sigmoids,
        factor,
        layers,
        stands_beside: architecture.is_gemma4(),
        shared,
        limited,
        is_mxfp4,
    }))
}
