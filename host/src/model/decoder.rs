//! The blocks decoder models are made of. A model's own file says how they follow each other.
//!
//! Dimension words, the same in every file: `rows` (tokens of a pass), `hidden`, `heads` (query heads), `kv_heads`,
//! `group` = heads / kv_heads, `head_dim`, `context` (positions of the KV cache), `vocab`.

use super::config::{
    Activation as ConfigActivation, Architecture, AttentionGate, DecoderConfig, DeltaRule, Experts, Heads, Lengthening,
    LimitedGate, Mixer, Norms, QkNorm, Rope, SharedExpert, Sigmoids, StateSpace,
};
use super::embedding;
use super::error::ModelError;
use super::factors;
use super::layout::{DELTA_NORM, DecoderNames, ExpertNames, GATE, MlpNames, SINKS, gate_of, norm_role};
use super::quantize::Quantized;
use super::remade;
use super::sentence::SentenceConfig;
use super::weights::Weights;
use crate::graph::kernel::{
    AttentionArgs, Caches, ConvArgs, EmbeddingArgs, ExpertArgs, Gate, GateNorm, GraphError, KernelGraph, Mask, Pass,
    RecurrenceArgs, RopeArgs,
};
use crate::graph::tensor::TensorId;
use perpetua_device::kernels::gated_linear::Gating;
use perpetua_device::kernels::linear::Activation;
use perpetua_device::kernels::routing::{Counting, Weighting};
use perpetua_shared::DType;
use std::collections::HashMap;

mod latent;

/// Why a network cannot be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The checkpoint does not hold what the network needs.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// An operator is wrong.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// A pass that verifies guesses, of a network that cannot take a row back.
    #[error(
        "{0}: layers pass a state from row to row, of which a wrong guess cannot be taken back: expected no prompt lookup"
    )]
    Guesses(Architecture),
}

/// What a pass ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// The last row's logits, and a token chosen from them.
    Sample,
    /// Every row's logits, nothing chosen.
    AllLogits,
    /// Each row is the next token of a sequence of its own: every row's logits, and a token chosen from each.
    SampleEach,
    /// The rows are a sequence's next token and drafts of those after it: every row's logits, and a token chosen from
    /// each.
    Verify,
}

/// Where element types of weights come from.
#[derive(Clone, Copy, Debug)]
pub enum Declared<'a> {
    /// A checkpoint, which must have the tensors asked for.
    Checkpoint(&'a Weights),
    /// The same, but matrices are kept in fewer bits.
    Quantized(&'a Weights, &'a Quantized),
    /// Nowhere: every weight has this type. What a network takes can be planned without having it.
    Assumed(DType),
    /// Nowhere, either, but some have other types: [`Quantize::dtypes`](super::Quantize::dtypes)', or those that are
    /// [packed](super::layout::packed) in files.
    AssumedBut(DType, &'a HashMap<String, DType>),
}

impl<'a> From<&'a Weights> for Declared<'a> {
    fn from(weights: &'a Weights) -> Declared<'a> {
        Declared::Checkpoint(weights)
    }
}

impl Declared<'_> {
    /// The type of tensor `name`, which has this shape.
    ///
    /// # Errors
    /// When the checkpoint has none, or of another shape.
    pub fn dtype(&self, name: &str, shape: &[usize]) -> Result<DType, ModelError> {
        match self {
            Declared::Checkpoint(weights) => weights.dtype(name, shape),
            Declared::Quantized(weights, kept) => {
                let stored = weights.dtype(name, shape)?;
                Ok(kept.dtype(name).unwrap_or(stored))
            }
            Declared::Assumed(dtype) => Ok(*dtype),
            Declared::AssumedBut(dtype, others) => Ok(others.get(name).copied().unwrap_or(*dtype)),
        }
    }
}

/// How `layer` turns heads in a context of so many positions, where layers turn by `ropes` the first so many of a
/// head's elements (`dims`: `[turned, head_dim]` of a layer): a frequency for each pair of a head, `[head_dim / 2]`, one
/// tensor for all layers that turn alike, and what is turned is multiplied with.
pub(super) fn rope_frequencies(
    graph: &mut KernelGraph,
    ropes: &[Rope],
    layer: usize,
    dims: impl Fn(usize) -> [usize; 2],
    context: usize,
) -> Result<(TensorId, f32), BuildError> {
    let of = |layer: usize| (&ropes[layer], dims(layer));
    let (rope, [dim, head_dim]) = of(layer);
    let name = match (0..layer).find(|other| of(*other) == of(layer)).unwrap_or(layer) {
        0 => "rope_frequencies".to_owned(),
        first => format!("rope_frequencies.{first}"),
    };
    let mut frequencies = rope.inverse_frequencies(dim, context);
    // What is not turned is turned by nothing.
    frequencies.resize(head_dim / 2, 0.0);
    Ok((graph.constant(&name, &frequencies)?, rope.factor() as f32))
}

/// The KV cache of a decoder.
#[derive(Clone, Copy, Debug)]
pub struct Cache {
    /// Sequences that have one.
    pub sequences: usize,
    /// Positions of each.
    pub context: usize,
    /// Element type.
    pub dtype: DType,
}

impl Cache {
    /// One sequence's, of `context` positions, in bf16.
    pub fn bf16(context: usize) -> Cache {
        Cache { sequences: 1, context, dtype: DType::Bf16 }
    }
}

/// Builds the decoder `config` describes, for passes of at most `rows` tokens: of one sequence, or with
/// [`Head::SampleEach`] of all of them.
///
/// # Errors
/// What the checkpoint lacks, or an operator that cannot be.
pub fn build<'a>(
    config: &'a DecoderConfig,
    weights: impl Into<Declared<'a>>,
    rows: usize,
    cache: Cache,
    head: Head,
) -> Result<KernelGraph, BuildError> {
    build_layers(Decoder::new(config, weights, rows, cache, head))
}

/// Builds the decoder `config` describes with what `sentence` says is done with its rows' vectors, for passes of at
/// most `rows` tokens. Where these [take a sentence whole](SentenceConfig::takes_whole), there is no cache, but keys
/// and values of its type.
///
/// # Errors
/// As [`build`].
pub fn build_embedder<'a>(
    config: &'a DecoderConfig,
    sentence: &'a SentenceConfig,
    weights: impl Into<Declared<'a>>,
    rows: usize,
    cache: Cache,
) -> Result<KernelGraph, BuildError> {
    let net = Decoder::new(config, weights, rows, cache, Head::AllLogits);
    build_layers(Decoder { sentence: Some(sentence), ..net })
}

fn build_layers(net: Decoder<'_>) -> Result<KernelGraph, BuildError> {
    if net.head == Head::Verify && net.config.recurrent.is_some() {
        return Err(BuildError::Guesses(net.config.architecture));
    }
    match net.config.architecture.norms() {
        _ if net.config.architecture.is_gemma4() => super::gemma4::build(net),
        Norms::Before => super::llama::build(net),
        Norms::Around => super::gemma3::build(net),
        Norms::After => super::olmo::build(net),
    }
}

/// A decoder under construction.
#[derive(Debug)]
pub struct Decoder<'a> {
    /// The network's sizes.
    pub config: &'a DecoderConfig,
    /// The graph it is built in.
    pub graph: KernelGraph,
    weights: Declared<'a>,
    cache: Cache,
    head: Head,
    /// Instead of the head: what is done with the rows' vectors.
    sentence: Option<&'a SentenceConfig>,
    /// By layer: keys and values that nobody wants after the pass.
    passing: HashMap<usize, [TensorId; 2]>,
}

/// Queries, keys and values of one layer, `[rows, heads * head_dim]` and twice `[rows, kv_heads * head_dim]`; without
/// keys and values, where they are [another layer's](Heads::cache_of). Attention's [gate](DecoderConfig::gate) may
/// stand behind each query, or by itself.
#[derive(Clone, Copy, Debug)]
pub struct Projected {
    q: TensorId,
    kv: Option<[TensorId; 2]>,
    gate: Option<TensorId>,
}

impl<'a> Decoder<'a> {
    /// An empty decoder. See [`build`].
    pub fn new(
        config: &'a DecoderConfig,
        weights: impl Into<Declared<'a>>,
        rows: usize,
        cache: Cache,
        head: Head,
    ) -> Decoder<'a> {
        let graph = match head {
            Head::SampleEach => KernelGraph::batch(cache.sequences),
            Head::Verify => KernelGraph::verify(rows as u32, cache.sequences),
            Head::Sample | Head::AllLogits => KernelGraph::with_sequences(rows as u32, cache.sequences),
        };
        Decoder { config, graph, weights: weights.into(), cache, head, sentence: None, passing: HashMap::new() }
    }

    /// Whether a sentence is seen at once: nobody wants a layer's keys and values later.
    fn takes_whole(&self) -> bool {
        self.sentence.is_some_and(|sentence| sentence.takes_whole(self.config.is_bidirectional))
    }

    /// The checkpoint's tensor `name`, which must have this shape.
    pub fn weight(&mut self, name: &str, shape: &[usize]) -> Result<TensorId, BuildError> {
        let dtype = self.weights.dtype(name, shape)?;
        Ok(self.graph.weight(name, shape, dtype)?)
    }

    /// `[rows, hidden]`: the embeddings of the pass's tokens.
    pub fn embed(&mut self) -> Result<TensorId, BuildError> {
        let table = self.embedding_table()?;
        self.look_up("embed_tokens", table, self.config.embedding_scale as f32)
    }

    fn embedding_table(&mut self) -> Result<TensorId, BuildError> {
        self.weight("model.embed_tokens.weight", &[self.config.vocab_size, self.config.hidden_size])
    }

    /// RMSNorm with the weights called `name`.
    pub fn norm(&mut self, name: &str, x: TensorId) -> Result<TensorId, BuildError> {
        let w = self.factors(name, self.config.hidden_size)?;
        Ok(self.graph.rms_norm(name, x, w, self.config.rms_norm_eps as f32)?)
    }

    /// x + RMSNorm of `made`, with the weights called `name`.
    pub fn add_normed(&mut self, name: &str, made: TensorId, x: TensorId) -> Result<TensorId, BuildError> {
        self.add_normed_scaled(name, made, x, None)
    }

    /// The same, times the number called `scale`, if that is given.
    pub fn add_normed_scaled(
        &mut self,
        name: &str,
        made: TensorId,
        x: TensorId,
        scale: Option<&str>,
    ) -> Result<TensorId, BuildError> {
        let w = self.factors(name, self.config.hidden_size)?;
        let scale = scale.map(|scale| self.weight(scale, &[1])).transpose()?;
        Ok(self.graph.add_rms_norm(name, made, w, self.config.rms_norm_eps as f32, x, scale)?)
    }

    /// The `n` factors of the norm called `name`.
    fn factors(&mut self, name: &str, n: usize) -> Result<TensorId, BuildError> {
        self.factors_in(&format!("{name}.weight"), n)
    }

    /// Those that are tensor `name`.
    pub(super) fn factors_in(&mut self, name: &str, n: usize) -> Result<TensorId, BuildError> {
        let stored = self.weights.dtype(name, &[n])?;
        let dtype = if norm_role(self.config, name).is_made() { factors::DTYPE } else { stored };
        Ok(self.graph.weight(name, &[n], dtype)?)
    }

    /// x . w^T (+ bias) (+ residual) with the weights called `name`, `[out, in]`.
    pub(super) fn linear(
        &mut self,
        name: &str,
        x: TensorId,
        shape: [usize; 2],
        has_bias: bool,
        residual: Option<TensorId>,
    ) -> Result<TensorId, BuildError> {
        let w = self.weight(&format!("{name}.weight"), &shape)?;
        self.linear_with(w, name, x, has_bias, residual)
    }

    /// The same with the weights `w`.
    fn linear_with(
        &mut self,
        w: TensorId,
        name: &str,
        x: TensorId,
        has_bias: bool,
        residual: Option<TensorId>,
    ) -> Result<TensorId, BuildError> {
        let out = self.graph.table[w].shape[0];
        let bias = if has_bias { Some(self.weight(&format!("{name}.bias"), &[out])?) } else { None };
        Ok(self.graph.linear(name, x, w, bias, Activation::None, residual)?)
    }

    /// Matrices of `inner` columns, each with so many rows as stand beside its name; where the checkpoint has them as
    /// one, in their order, that is called `fused`.
    fn matrices<const N: usize>(
        &mut self,
        parts: [(&str, usize); N],
        fused: Option<&str>,
        inner: usize,
    ) -> Result<[TensorId; N], BuildError> {
        let mut matrices = [TensorId(0); N];
        let Some(fused) = fused else {
            for (matrix, (name, rows)) in matrices.iter_mut().zip(parts) {
                *matrix = self.weight(&format!("{name}.weight"), &[rows, inner])?;
            }
            return Ok(matrices);
        };
        let all = self.weight(&format!("{fused}.weight"), &[parts.iter().map(|(_, rows)| rows).sum(), inner])?;
        let mut first = 0;
        for (matrix, (_, rows)) in matrices.iter_mut().zip(parts) {
            *matrix = self.graph.rows_of(all, first, rows)?;
            first += rows;
        }
        Ok(matrices)
    }

    /// The projections of layer `layer`, with biases where the configuration has them.
    pub fn project(&mut self, layer: usize, x: TensorId) -> Result<Projected, BuildError> {
        let DecoderConfig { hidden_size, n_heads, attention_bias: has_bias, .. } = *self.config;
        let Heads { n_kv, dim, values_are_keys, cache_of, .. } = self.config.heads[layer];
        let names = ["q", "k", "v", "qkv"].map(|which| format!("model.layers.{layer}.self_attn.{which}_proj"));
        let [q, k, v, qkv] = names.each_ref().map(String::as_str);
        let (q_dim, kv_dim) = (n_heads * dim * self.config.of_query(), n_kv * dim);
        let fused = self.config.architecture.is_fused().then_some(qkv);
        let gate = match gate_of(self.config, layer) {
            Some(n) => Some(self.linear(&format!("model.layers.{layer}.{GATE}"), x, [n, hidden_size], false, None)?),
            None => None,
        };
        let mut apart = |name: &str, n: usize| self.linear(name, x, [n, hidden_size], has_bias, None);
        let (q, kv) = match (cache_of, values_are_keys) {
            (Some(_), _) => (apart(q, q_dim)?, None),
            (None, true) => (apart(q, q_dim)?, Some([apart(k, kv_dim)?; 2])),
            (None, false) => {
                let [of_q, of_k, of_v] = self.matrices([(q, q_dim), (k, kv_dim), (v, kv_dim)], fused, hidden_size)?;
                let q = self.linear_with(of_q, q, x, has_bias, None)?;
                let k = self.linear_with(of_k, k, x, has_bias, None)?;
                (q, Some([k, self.linear_with(of_v, v, x, has_bias, None)?]))
            }
        };
        Ok(Projected { q, kv, gate })
    }

    /// Rotates queries and keys (normalised first, where the configuration says so), appends keys and values to the
    /// layer's cache and attends, causally or in the layer's window: `[rows, heads * head_dim]`.
    pub fn attend(&mut self, layer: usize, mut p: Projected) -> Result<TensorId, BuildError> {
        let DecoderConfig { n_heads, rms_norm_eps, qk_norm, norms_values, .. } = *self.config;
        let Heads { n_kv, dim, rotary_dim, cache_of, .. } = self.config.heads[layer];
        let rows = self.graph.rows.unwrap_or(1) as usize;
        let prefix = format!("model.layers.{layer}.self_attn");
        let names = DecoderNames::of(self.config.architecture);
        let [of_q, of_k] = names.qk_norms.map(|which| format!("model.layers.{layer}.{which}"));
        let norms = match qk_norm {
            QkNorm::Heads => {
                let of_k = if p.kv.is_some() { Some(self.factors(&of_k, dim)?) } else { None };
                [Some(self.factors(&of_q, dim)?), of_k]
            }
            QkNorm::None => [None; 2],
            QkNorm::Rows => {
                let keys = p.kv.as_mut().map(|[k, _]| (k, of_k, n_kv));
                for (made, name, heads) in [(&mut p.q, of_q, n_heads)].into_iter().chain(keys) {
                    let w = self.factors(&name, heads * dim)?;
                    *made = self.graph.rms_norm(&name, *made, w, rms_norm_eps as f32)?;
                }
                [None; 2]
            }
        };
        p.q = self.lengthen(&format!("{prefix}.q_lengthen"), p.q)?;
        let group = n_heads / n_kv;
        // Per head, what its query takes of the row, and a gate, if there are gates.
        let taken = dim * self.config.of_query();
        let strides = [n_heads * taken, group * taken, taken, 1];
        let q = self.graph.view(p.q, 0, &[rows, n_kv, group, dim], &strides)?;
        let kv = match p.kv {
            Some([k, v]) => {
                let heads = [rows, n_kv, dim];
                Some([self.graph.reshape(k, &heads)?, self.graph.reshape(v, &heads)?])
            }
            None => None,
        };
        let Cache { context, dtype, .. } = self.cache;
        let DecoderConfig { ropes, heads, .. } = self.config;
        let dims = |layer: usize| [heads[layer].rotary_dim, heads[layer].dim];
        let (frequencies, factor) = rope_frequencies(&mut self.graph, ropes, layer, dims, context)?;
        let takes_whole = self.takes_whole();
        let keeper = cache_of.unwrap_or(layer);
        let known = self.passing.get(&keeper).copied();
        let cache = |graph: &mut KernelGraph| {
            if let Some(both) = known {
                return Ok(both);
            }
            let mut of = |which: &str| {
                let name = format!("model.layers.{keeper}.self_attn.{which}_cache");
                match takes_whole {
                    true => graph.passing(&name, &[n_kv, rows, dim], dtype),
                    false => graph.state(&name, &[n_kv, context, dim], dtype),
                }
            };
            Ok([of("k")?, of("v")?])
        };
        let eps = rms_norm_eps as f32;
        let turned_pairs = rotary_dim / 2;
        let norms_turned = self.config.architecture.norms_turned();
        // A norm behind it does not see the factor, but for its epsilon.
        let (factor, eps) = if norms_turned { (1.0, eps / (factor * factor)) } else { (factor, eps) };
        let rope = RopeArgs { q, kv, norms, norms_values, norms_turned, frequencies, turned_pairs, factor, eps };
        let scale = self.config.attention_scale as f32;
        let mask = match (self.config.is_bidirectional, self.config.windows[layer]) {
            (false, None) => Mask::Causal,
            (false, Some(n)) => Mask::Window(n),
            (true, None) => Mask::Bidirectional,
            (true, Some(n)) => Mask::Around(n),
        };
        let sinks = match self.config.has_sinks {
            true => {
                let sinks = self.weight(&format!("model.layers.{layer}.{SINKS}"), &[n_heads])?;
                Some(self.graph.reshape(sinks, &[n_kv, group])?)
            }
            false => None,
        };
        let args = AttentionArgs { scale, mask, sinks };
        let attended = if self.graph.pass == Pass::Batch {
            self.graph.attend_each(&prefix, rope, q, args, |graph| cache(graph).map(Caches::from))?
        } else {
            let cache = cache(&mut self.graph)?;
            if takes_whole {
                self.passing.insert(keeper, cache);
            }
            self.graph.rope(&format!("{prefix}.rope"), rope, cache)?;
            self.graph.attention(&format!("{prefix}.attention"), q, cache, args)?
        };
        let shape = [rows, n_heads, dim];
        let gates = match (self.config.gate, p.gate) {
            (None, _) => return Ok(attended),
            (Some(AttentionGate::Heads), Some(gate)) => self.graph.reshape(gate, &[rows, n_heads, 1])?,
            (Some(_), Some(gate)) => self.graph.reshape(gate, &shape)?,
            (Some(_), None) => self.graph.view(p.q, dim, &shape, &[n_heads * taken, taken, 1])?,
        };
        let heads = self.graph.reshape(attended, &shape)?;
        Ok(self.graph.gated(&format!("{prefix}.gate"), heads, gates, Gate::Sigmoid, GateNorm::None)?)
    }

    /// Queries, or what they are made of, multiplied as their positions ask for, where some are far enough.
    fn lengthen(&mut self, name: &str, x: TensorId) -> Result<TensorId, BuildError> {
        match self.config.lengthening {
            Some(Lengthening { beta, original }) if self.cache.context > original => {
                Ok(self.graph.lengthen(name, x, beta as f32, original as u32)?)
            }
            _ => Ok(x),
        }
    }

    /// (x +) what `mixer`, which layer `layer` has in the place of attention, makes of h.
    pub fn mix(
        &mut self,
        layer: usize,
        mixer: Mixer,
        h: TensorId,
        x: Option<TensorId>,
    ) -> Result<TensorId, BuildError> {
        match mixer {
            Mixer::DeltaRule(of) => self.delta_rule(layer, of, h, x),
            Mixer::StateSpace(of) => self.state_space(layer, of, h, x),
            Mixer::Convolution { taps, has_bias } => self.convolution(layer, taps, has_bias, h, x),
        }
    }

    /// (x +) norm(state space(silu(convolution(h . in^T))) * silu(gate)) . out^T, where gate, too, is a part of h .
    /// in^T.
    fn state_space(
        &mut self,
        layer: usize,
        of: StateSpace,
        h: TensorId,
        x: Option<TensorId>,
    ) -> Result<TensorId, BuildError> {
        let StateSpace { heads, head_dim, state_dim, taps, conv_bias, linear_bias, norm_eps } = of;
        let rows = self.graph.rows.unwrap_or(1) as usize;
        let hidden_size = self.config.hidden_size;
        let inner = heads * head_dim;
        let mixed = inner + 2 * state_dim;
        let all = inner + mixed + heads;
        let of_layer = |name: &str| format!("model.layers.{layer}.mamba.{name}");
        // The gate, what is convolved, and how far each head's time goes on.
        let parts = self.linear(&of_layer("in_proj"), h, [all, hidden_size], linear_bias, None)?;
        let gate = self.graph.view(parts, 0, &[rows, 1, inner], &[all, inner, 1])?;
        let u = self.graph.view(parts, inner, &[rows, mixed], &[all, 1])?;
        let a = self.graph.view(parts, inner + mixed, &[rows, 1, heads], &[all, heads, 1])?;
        let w = self.filters(&of_layer("conv1d"), mixed, taps)?;
        let bias = if conv_bias { Some(self.weight(&of_layer("conv1d.bias"), &[mixed])?) } else { None };
        let args = ConvArgs { x: u, w, bias, gate: None, scale: None, activation: self.activation() };
        let made = self.graph.causal_conv(&of_layer("conv1d"), args, &of_layer("conv_state"))?;
        let v = self.graph.view(made, 0, &[rows, 1, heads, head_dim], &[mixed, inner, head_dim, 1])?;
        let mut of_state = |first: usize| self.graph.view(made, first, &[rows, 1, state_dim], &[mixed, state_dim, 1]);
        let (k, q) = (of_state(inner)?, of_state(inner + state_dim)?);
        let mut of_heads = |name: &str| -> Result<TensorId, BuildError> {
            let weights = self.weight(&of_layer(name), &[heads])?;
            Ok(self.graph.reshape(weights, &[1, heads])?)
        };
        let (a_log, dt_bias, skip) = (of_heads("A_log")?, of_heads("dt_bias")?, Some(of_heads("D")?));
        let args = RecurrenceArgs { q, k, v, a, b: None, a_log, dt_bias, skip };
        let made = self.graph.recurrence(&of_layer("state_space"), args, &of_layer("state"))?;
        let made = self.graph.reshape(made, &[rows, 1, inner])?;
        let w = self.factors(&of_layer("norm"), inner)?;
        let norm = GateNorm::OfGated { w, eps: norm_eps as f32 };
        let gated = self.graph.gated(&of_layer("gate"), made, gate, Gate::Silu, norm)?;
        self.linear(&of_layer("out_proj"), gated, [hidden_size, inner], linear_bias, x)
    }

    /// (x +) (norm(delta rule(silu(convolution(h . qkv^T)))) * silu(h . z^T)) . out^T.
    fn delta_rule(
        &mut self,
        layer: usize,
        of: DeltaRule,
        h: TensorId,
        x: Option<TensorId>,
    ) -> Result<TensorId, BuildError> {
        let DeltaRule { key_heads, value_heads, key_dim, value_dim, taps } = of;
        let (rows, group) = (self.graph.rows.unwrap_or(1) as usize, value_heads / key_heads);
        let DecoderConfig { hidden_size, rms_norm_eps, .. } = *self.config;
        let (keys, values) = (key_heads * key_dim, value_heads * value_dim);
        let mixed = 2 * keys + values;
        let of_layer = |name: &str| format!("model.layers.{layer}.linear_attn.{name}");
        let mut project = |name: &str, n: usize| self.linear(&of_layer(name), h, [n, hidden_size], false, None);
        let (qkv, z) = (project("in_proj_qkv", mixed)?, project("in_proj_z", values)?);
        let (b, a) = (project("in_proj_b", value_heads)?, project("in_proj_a", value_heads)?);
        let w = self.filters(&of_layer("conv1d"), mixed, taps)?;
        let args = ConvArgs { x: qkv, w, bias: None, gate: None, scale: None, activation: self.activation() };
        let qkv = self.graph.causal_conv(&of_layer("conv1d"), args, &of_layer("conv_state"))?;
        let heads = [rows, key_heads, key_dim];
        let of_keys = [mixed, key_dim, 1];
        let q = self.graph.view(qkv, 0, &heads, &of_keys)?;
        let k = self.graph.view(qkv, keys, &heads, &of_keys)?;
        let of_values = [mixed, group * value_dim, value_dim, 1];
        let v = self.graph.view(qkv, 2 * keys, &[rows, key_heads, group, value_dim], &of_values)?;
        let a = self.graph.reshape(a, &[rows, key_heads, group])?;
        let b = self.graph.reshape(b, &[rows, key_heads, group])?;
        let mut of_heads = |name: &str| -> Result<TensorId, BuildError> {
            let weights = self.weight(&of_layer(name), &[value_heads])?;
            Ok(self.graph.reshape(weights, &[key_heads, group])?)
        };
        let (a_log, dt_bias) = (of_heads("A_log")?, of_heads("dt_bias")?);
        let args = RecurrenceArgs { q, k, v, a, b: Some(b), a_log, dt_bias, skip: None };
        let made = self.graph.recurrence(&of_layer("delta_rule"), args, &of_layer("recurrent_state"))?;
        let (heads, gates) = {
            let shape = [rows, value_heads, value_dim];
            (self.graph.reshape(made, &shape)?, self.graph.reshape(z, &shape)?)
        };
        let norm = self.factors(&format!("model.layers.{layer}.{DELTA_NORM}"), value_dim)?;
        let norm = GateNorm::OfX { w: norm, eps: rms_norm_eps as f32 };
        let gated = self.graph.gated(&of_layer("gate"), heads, gates, Gate::Silu, norm)?;
        self.linear(&of_layer("out_proj"), gated, [hidden_size, values], false, x)
    }

    /// (x +) (c * convolution(b * u)) . out^T, where b, c and u are h . in^T.
    fn convolution(
        &mut self,
        layer: usize,
        taps: usize,
        has_bias: bool,
        h: TensorId,
        x: Option<TensorId>,
    ) -> Result<TensorId, BuildError> {
        let hidden = self.config.hidden_size;
        let rows = self.graph.rows.unwrap_or(1) as usize;
        let of_layer = |name: &str| format!("model.layers.{layer}.conv.{name}");
        let all = self.linear(&of_layer("in_proj"), h, [3 * hidden, hidden], has_bias, None)?;
        let mut part = |number: usize| self.graph.view(all, number * hidden, &[rows, hidden], &[3 * hidden, 1]);
        let (gate, scale, u) = (part(0)?, part(1)?, part(2)?);
        let w = self.filters(&of_layer("conv"), hidden, taps)?;
        let bias = if has_bias { Some(self.weight(&of_layer("conv.bias"), &[hidden])?) } else { None };
        let args = ConvArgs { x: u, w, bias, gate: Some(gate), scale: Some(scale), activation: Activation::None };
        let made = self.graph.causal_conv(&of_layer("conv"), args, &of_layer("state"))?;
        self.linear(&of_layer("out_proj"), made, [hidden, hidden], has_bias, x)
    }

    /// The filters called `name`, `[columns, taps]`.
    fn filters(&mut self, name: &str, columns: usize, taps: usize) -> Result<TensorId, BuildError> {
        let filters = self.weight(&format!("{name}.weight"), &[columns, 1, taps])?;
        Ok(self.graph.reshape(filters, &[columns, taps])?)
    }

    /// attended . o_proj^T (+ x).
    pub fn project_out(
        &mut self,
        layer: usize,
        attended: TensorId,
        x: Option<TensorId>,
    ) -> Result<TensorId, BuildError> {
        let DecoderConfig { hidden_size, n_heads, output_bias, .. } = *self.config;
        let dim = self.config.heads[layer].dim;
        let name = format!("model.layers.{layer}.{}", DecoderNames::of(self.config.architecture).attention_output);
        self.linear(&name, attended, [hidden_size, n_heads * dim], output_bias, x)
    }

    /// (x +) what the layer's MLP makes of h: the one there is, or of [several](Decoder::experts) those that each row
    /// goes to.
    pub fn mlp(&mut self, layer: usize, h: TensorId, x: Option<TensorId>) -> Result<TensorId, BuildError> {
        let architecture = self.config.architecture;
        let Some(experts) = self.config.experts_of(layer) else { return self.usual_mlp(layer, h, x) };
        // First, so that nobody waits for them behind the MLP that all rows go to.
        let logits = self.router_logits(layer, experts, h)?;
        let x = match experts.shared {
            None => x,
            Some(SharedExpert { intermediate_size, is_weighed: false }) => {
                Some(self.dense_mlp(layer, &MlpNames::shared(architecture), intermediate_size, h, x)?)
            }
            Some(SharedExpert { intermediate_size, is_weighed: true }) => {
                Some(self.weighed_mlp(layer, intermediate_size, h, x)?)
            }
        };
        self.experts(layer, experts, logits, h, x)
    }

    /// What says to which experts rows `h` go.
    pub(super) fn router_logits(
        &mut self,
        layer: usize,
        experts: &Experts,
        h: TensorId,
    ) -> Result<TensorId, BuildError> {
        let router = format!("model.layers.{layer}.{}", ExpertNames::of(self.config.architecture).router);
        self.linear(&router, h, [experts.n, self.config.hidden_size], experts.limited.is_some(), None)
    }

    /// (x +) what the usual MLP of layer `layer` makes of h.
    pub(super) fn usual_mlp(&mut self, layer: usize, h: TensorId, x: Option<TensorId>) -> Result<TensorId, BuildError> {
        let names = MlpNames::of(self.config.architecture);
        self.dense_mlp(layer, &names, self.config.intermediate_of(layer), h, x)
    }

    /// (x +) (act(h . gate^T) * (h . up^T)) . down^T, the matrices called `names`.
    fn dense_mlp(
        &mut self,
        layer: usize,
        names: &MlpNames,
        intermediate_size: usize,
        h: TensorId,
        x: Option<TensorId>,
    ) -> Result<TensorId, BuildError> {
        let DecoderConfig { hidden_size, mlp_bias, .. } = *self.config;
        let activation = self.activation();
        let of_layer = |name| format!("model.layers.{layer}.{name}");
        let (prefix, fused) = (of_layer(names.prefix()), names.fused.map(of_layer));
        let [gate, up, down] = names.parts.map(of_layer);
        let [gate, up] = [gate.as_str(), &up];
        let matrices =
            self.matrices([(gate, intermediate_size), (up, intermediate_size)], fused.as_deref(), hidden_size)?;
        let biases = match mlp_bias {
            true => Some([
                self.weight(&format!("{gate}.bias"), &[intermediate_size])?,
                self.weight(&format!("{up}.bias"), &[intermediate_size])?,
            ]),
            false => None,
        };
        let gated = self.graph.gated_linear(&format!("{prefix}.gate_up"), h, matrices, biases, activation)?;
        self.linear(&down, gated, [hidden_size, intermediate_size], mlp_bias, x)
    }

    /// (x +) sigmoid(h . weigher^T) * what an MLP that all rows go to makes of h: a mixture of one, so that the first
    /// of its products multiplies.
    fn weighed_mlp(
        &mut self,
        layer: usize,
        intermediate_size: usize,
        h: TensorId,
        residual: Option<TensorId>,
    ) -> Result<TensorId, BuildError> {
        let DecoderConfig { architecture, hidden_size, .. } = *self.config;
        let names = MlpNames::shared(architecture);
        let of_layer = |name| format!("model.layers.{layer}.{name}");
        let logits = self.linear(&of_layer(MlpNames::WEIGHED_BY), h, [1, hidden_size], false, None)?;
        let [gate, up, down] = names.parts.map(|name| format!("{}.weight", of_layer(name)));
        let mut stack = |name: &str, [rows, columns]: [usize; 2]| -> Result<TensorId, BuildError> {
            let matrix = self.weight(name, &[rows, columns])?;
            Ok(self.graph.stack_of_one(matrix)?)
        };
        let opens = [intermediate_size, hidden_size];
        let (gate, up, down) =
            (stack(&gate, opens)?, stack(&up, opens)?, stack(&down, [hidden_size, intermediate_size])?);
        let (counting, gating) = (Counting::of(Weighting::Sigmoid), Gating::of(self.activation().number()));
        let (correction, biases, chosen) = (None, None, 1);
        let args = ExpertArgs { logits, correction, gate, up, down, biases, residual, chosen, counting, gating };
        Ok(self.graph.experts(&of_layer(names.prefix()), h, args)?)
    }

    /// What stands between an MLP's products.
    pub(super) fn activation(&self) -> Activation {
        match self.config.hidden_act {
            ConfigActivation::Silu => Activation::Silu,
            ConfigActivation::Gelu => Activation::Gelu,
            ConfigActivation::GeluTanh => Activation::GeluTanh,
        }
    }

    /// (x +) what the experts make of h that its rows go to, by the router's `logits`.
    fn experts(
        &mut self,
        layer: usize,
        experts: &Experts,
        logits: TensorId,
        h: TensorId,
        x: Option<TensorId>,
    ) -> Result<TensorId, BuildError> {
        let args = self.expert_args(layer, experts, logits, x)?;
        Ok(self.graph.experts(&format!("model.layers.{layer}.experts"), h, args)?)
    }

    /// The experts of layer `layer`.
    pub(super) fn expert_args(
        &mut self,
        layer: usize,
        experts: &Experts,
        logits: TensorId,
        residual: Option<TensorId>,
    ) -> Result<ExpertArgs, BuildError> {
        let Experts { n, chosen, intermediate_size, normalise, sigmoids, factor, limited, stands_beside, .. } =
            *experts;
        let hidden_size = self.config.hidden_size;
        let names = ExpertNames::of(self.config.architecture);
        let prefix = format!("model.layers.{layer}");
        let mut stack = |part: usize, shape: [usize; 2]| -> Result<TensorId, BuildError> {
            let expected = self.weights.dtype(&names.matrix(part, &prefix, 0), &shape)?;
            for name in (1..n).map(|number| names.matrix(part, &prefix, number)) {
                let given = self.weights.dtype(&name, &shape)?;
                if given != expected {
                    return Err(ModelError::MixedExperts { name, given, expected }.into());
                }
            }
            Ok(self.graph.weight_stack(&names.matrix(part, &prefix, '*'), n, shape, expected)?)
        };
        let opens = [intermediate_size, hidden_size];
        let (gate, up, down) = (stack(0, opens)?, stack(1, opens)?, stack(2, [hidden_size, intermediate_size])?);
        let (counting, correction) = match sigmoids {
            None => {
                let name = format!("{prefix}.{}", names.correction);
                let scales = if stands_beside { Some(self.weight(&name, &[n])?) } else { None };
                (Counting::of(if normalise { Weighting::Chosen } else { Weighting::All }), scales)
            }
            Some(Sigmoids { are_corrected, added }) => {
                let weighting = if normalise { Weighting::Sigmoids } else { Weighting::Sigmoid };
                let name = format!("{prefix}.{}", names.correction);
                let correction = if are_corrected { Some(self.weight(&name, &[n])?) } else { None };
                (Counting { added: added as f32, ..Counting::of(weighting) }, correction)
            }
        };
        let counting = Counting { factor: factor as f32, ..counting };
        let (mut gating, mut biases) = (Gating::of(self.activation().number()), None);
        if let Some(LimitedGate { limit, alpha }) = limited {
            gating = Gating { limit: limit as f32, alpha: alpha as f32, ..Gating::default() };
            let [gates, ups, downs] = remade::BIASES.map(|name| format!("{prefix}.{name}"));
            let of_opens = [n, intermediate_size];
            biases = Some([
                self.weight(&gates, &of_opens)?,
                self.weight(&ups, &of_opens)?,
                self.weight(&downs, &[n, hidden_size])?,
            ]);
        }
        Ok(ExpertArgs { logits, correction, gate, up, down, biases, residual, chosen, counting, gating })
    }

    /// From here on nothing is kept for later passes: it is for those alone whose rows' logits somebody wants.
    pub(super) fn when_sampling(&mut self) {
        if self.head != Head::AllLogits && self.sentence.is_none() {
            self.graph.when_sampling();
        }
    }

    /// The vectors of the pass's tokens in `table`, `[rows, columns]`, times `scale`, by an operator called `op`.
    pub(super) fn look_up(&mut self, op: &str, table: TensorId, scale: f32) -> Result<TensorId, BuildError> {
        let context = self.cache.context;
        if self.graph.pass == Pass::Batch {
            return Ok(self.graph.embedding_of_each(op, table, scale, context)?);
        }
        let tokens = self.graph.tokens(context)?;
        Ok(self.graph.embedding(op, tokens, EmbeddingArgs { scale, ..EmbeddingArgs::of(table) })?)
    }

    /// The final norm, the head, and what the pass ends with. Output `logits`: `[1, vocab]` or `[rows, vocab]` f32; or
    /// `embedding`: `[1, dim]` f32.
    pub fn finish(mut self, x: TensorId) -> Result<KernelGraph, BuildError> {
        if let Some(sentence) = self.sentence {
            let x = embedding::pooled_rows(&mut self.graph, sentence, x)?;
            let h = self.norm(DecoderNames::of(self.config.architecture).last_norm, x)?;
            embedding::finish(&mut self.graph, &self.weights, sentence, h)?;
            return Ok(self.graph);
        }
        self.when_sampling();
        let x = if self.head == Head::Sample { self.graph.select_row("last_row", x)? } else { x };
        let h = self.norm(DecoderNames::of(self.config.architecture).last_norm, x)?;
        let head = match self.config.tie_word_embeddings {
            true => self.embedding_table()?,
            false => self.weight("lm_head.weight", &[self.config.vocab_size, self.config.hidden_size])?,
        };
        let capped = self.config.logits_cap.map_or(Activation::None, |cap| Activation::Capped(cap as f32));
        let logits = self.graph.linear("lm_head", h, head, None, capped, None)?;
        self.graph.output("logits", logits)?;
        match self.head {
            Head::Sample => {
                let tokens = self.graph.tokens(self.cache.context)?;
                self.graph.sample("sample", logits, tokens)?;
            }
            Head::SampleEach => self.graph.sample_each("sample", logits, self.cache.context)?,
            Head::Verify => self.graph.sample_rows("sample", logits, self.cache.context)?,
            Head::AllLogits => {}
        }
        Ok(self.graph)
    }
}
