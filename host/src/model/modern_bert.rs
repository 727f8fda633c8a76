//! ModernBERT: norms before attention and MLP, queries and keys turned by their positions, windows in most layers,
//! gated MLPs; then pooling.

use super::config::ModernBertConfig;
use super::decoder::{BuildError, rope_frequencies};
use super::embedding;
use super::sentence::SentenceConfig;
use super::weights::Weights;
use crate::graph::kernel::{AttentionArgs, EmbeddingArgs, KernelGraph, Mask, RopeArgs};
use crate::graph::tensor::TensorId;
use perpetua_device::kernels::linear::Activation;
use perpetua_shared::DType;

struct Encoder<'a> {
    config: &'a ModernBertConfig,
    weights: &'a Weights,
    /// The longest sentence.
    context: usize,
    /// Element type of keys and values.
    dtype: DType,
    graph: KernelGraph,
}

/// Builds the network for passes of at most `rows` tokens, of sentences of at most `context`, with keys and values of
/// type `dtype`. Output `embedding`: `[1, dim]` f32.
pub fn build(
    config: &ModernBertConfig,
    sentence: &SentenceConfig,
    weights: &Weights,
    rows: usize,
    context: usize,
    dtype: DType,
) -> Result<KernelGraph, BuildError> {
    let mut net = Encoder { config, weights, context, dtype, graph: KernelGraph::with_rows(rows as u32) };
    let mut x = net.embed()?;
    for layer in 0..config.n_layers {
        // The first layer's is that of the embeddings.
        let h = if layer == 0 { x } else { net.norm(&format!("layers.{layer}.attn_norm"), x)? };
        let attended = net.attend(layer, h)?;
        let out = format!("layers.{layer}.attn.Wo");
        x = net.linear(&out, attended, config.hidden_size, config.attention_bias, x)?;
        let h = net.norm(&format!("layers.{layer}.mlp_norm"), x)?;
        let gated = net.gate(layer, h)?;
        x = net.linear(&format!("layers.{layer}.mlp.Wo"), gated, config.hidden_size, config.mlp_bias, x)?;
    }
    let x = embedding::pooled_rows(&mut net.graph, sentence, x)?;
    let h = net.norm("final_norm", x)?;
    embedding::finish(&mut net.graph, &weights.into(), sentence, h)?;
    Ok(net.graph)
}

impl Encoder<'_> {
    /// The tensor `name`, which a checkpoint with a head has behind `model.`.
    fn weight(&mut self, name: &str, shape: &[usize]) -> Result<TensorId, BuildError> {
        let name = format!("model.{name}");
        let dtype = self.weights.expect(&name, shape)?.dtype;
        Ok(self.graph.weight(&name, shape, dtype)?)
    }

    /// `n` biases called `name`, if there are some.
    fn bias(&mut self, name: &str, n: usize, is_there: bool) -> Result<Option<TensorId>, BuildError> {
        if is_there { Ok(Some(self.weight(&format!("{name}.bias"), &[n])?)) } else { Ok(None) }
    }

    fn embed(&mut self) -> Result<TensorId, BuildError> {
        let tokens = self.graph.tokens(self.context)?;
        let table =
            self.weight("embeddings.tok_embeddings.weight", &[self.config.vocab_size, self.config.hidden_size])?;
        let x = self.graph.embedding("embeddings", tokens, EmbeddingArgs::of(table))?;
        self.norm("embeddings.norm", x)
    }

    fn norm(&mut self, name: &str, x: TensorId) -> Result<TensorId, BuildError> {
        let hidden = self.config.hidden_size;
        let w = self.weight(&format!("{name}.weight"), &[hidden])?;
        let b = match self.bias(name, hidden, self.config.norm_bias)? {
            Some(b) => b,
            None => self.graph.constant("no_bias", &vec![0.0; hidden])?,
        };
        Ok(self.graph.layer_norm(name, x, None, [w, b], self.config.norm_eps as f32)?)
    }

    /// x . w^T (+ bias) + residual, `[rows, out]`.
    fn linear(
        &mut self,
        name: &str,
        x: TensorId,
        out: usize,
        has_bias: bool,
        residual: TensorId,
    ) -> Result<TensorId, BuildError> {
        let inner = self.graph.table[x].shape[1];
        let w = self.weight(&format!("{name}.weight"), &[out, inner])?;
        let bias = self.bias(name, out, has_bias)?;
        Ok(self.graph.linear(name, x, w, bias, Activation::None, Some(residual))?)
    }

    /// Attention over the pass's rows, all of them or those near by: `[rows, hidden]`.
    fn attend(&mut self, layer: usize, x: TensorId) -> Result<TensorId, BuildError> {
        let ModernBertConfig { hidden_size, n_heads, head_dim, norm_eps, attention_bias, .. } = *self.config;
        let rows = self.graph.rows.unwrap_or(1) as usize;
        let name = format!("layers.{layer}.attn");
        // One matrix, and one bias, for all three.
        let fused = self.weight(&format!("{name}.Wqkv.weight"), &[3 * hidden_size, hidden_size])?;
        let bias = self.bias(&format!("{name}.Wqkv"), 3 * hidden_size, attention_bias)?;
        let mut part = |number: usize, which: &str| -> Result<TensorId, BuildError> {
            let w = self.graph.rows_of(fused, number * hidden_size, hidden_size)?;
            let bias = match bias {
                Some(bias) => Some(self.graph.view(bias, number * hidden_size, &[hidden_size], &[1])?),
                None => None,
            };
            Ok(self.graph.linear(&format!("{name}.{which}"), x, w, bias, Activation::None, None)?)
        };
        let [q, k, v] = [part(0, "query")?, part(1, "key")?, part(2, "value")?];
        let q = self.graph.reshape(q, &[rows, n_heads, 1, head_dim])?;
        let k = self.graph.reshape(k, &[rows, n_heads, head_dim])?;
        let v = self.graph.reshape(v, &[rows, n_heads, head_dim])?;
        let (frequencies, factor) =
            rope_frequencies(&mut self.graph, &self.config.ropes, layer, |_| [head_dim; 2], self.context)?;
        let eps = norm_eps as f32;
        let args = RopeArgs {
            q,
            kv: Some([k, v]),
            norms: [None; 2],
            norms_values: false,
            norms_turned: false,
            frequencies,
            turned_pairs: head_dim / 2,
            factor,
            eps,
        };
        let mut made =
            |which: &str| self.graph.passing(&format!("{name}.{which}"), &[n_heads, rows, head_dim], self.dtype);
        let cache = [made("keys")?, made("values")?];
        self.graph.rope(&format!("{name}.rope"), args, cache)?;
        let mask = self.config.windows[layer].map_or(Mask::Bidirectional, Mask::Around);
        let scale = 1.0 / (head_dim as f32).sqrt();
        let args = AttentionArgs { scale, mask, sinks: None };
        Ok(self.graph.attention(&format!("{name}.attention"), q, cache, args)?)
    }

    /// gelu(x . a^T) * (x . b^T), `[rows, intermediate]`, where a and b are one matrix.
    fn gate(&mut self, layer: usize, x: TensorId) -> Result<TensorId, BuildError> {
        let ModernBertConfig { hidden_size, intermediate_size, mlp_bias, .. } = *self.config;
        let name = format!("layers.{layer}.mlp.Wi");
        let fused = self.weight(&format!("{name}.weight"), &[2 * intermediate_size, hidden_size])?;
        let mut half = |n: usize| self.graph.rows_of(fused, n * intermediate_size, intermediate_size);
        let matrices = [half(0)?, half(1)?];
        let biases = match self.bias(&name, 2 * intermediate_size, mlp_bias)? {
            Some(bias) => {
                let mut half = |n: usize| self.graph.view(bias, n * intermediate_size, &[intermediate_size], &[1]);
                Some([half(0)?, half(1)?])
            }
            None => None,
        };
        Ok(self.graph.gated_linear(&name, x, matrices, biases, Activation::Gelu)?)
    }
}
