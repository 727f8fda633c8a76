//! BERT and RoBERTa as sentence embedding models use them: post-norm encoder layers, bidirectional attention, then
//! pooling.

use super::config::BertConfig;
use super::decoder::BuildError;
use super::embedding;
use super::sentence::SentenceConfig;
use super::weights::Weights;
use crate::graph::kernel::{AttentionArgs, EmbeddingArgs, KernelGraph, Mask};
use crate::graph::tensor::TensorId;
use perpetua_device::kernels::linear::Activation;

struct Encoder<'a> {
    config: &'a BertConfig,
    weights: &'a Weights,
    prefix: &'a str,
    graph: KernelGraph,
}

/// Builds the network for passes of at most `rows` tokens. Output `embedding`: `[1, dim]` f32.
pub fn build(
    config: &BertConfig,
    sentence: &SentenceConfig,
    weights: &Weights,
    prefix: &str,
    rows: usize,
) -> Result<KernelGraph, BuildError> {
    let mut net = Encoder { config, weights, prefix, graph: KernelGraph::with_rows(rows as u32) };
    let mut x = net.embed()?;
    for layer in 0..config.n_layers {
        let attended = net.attend(layer, x)?;
        let name = |part: &str| format!("encoder.layer.{layer}.{part}");
        let h = net.linear(&name("attention.output.dense"), attended, config.hidden_size, Activation::None)?;
        x = net.norm(&name("attention.output.LayerNorm"), h, Some(x))?;
        let h = net.linear(&name("intermediate.dense"), x, config.intermediate_size, Activation::Gelu)?;
        let h = net.linear(&name("output.dense"), h, config.hidden_size, Activation::None)?;
        x = net.norm(&name("output.LayerNorm"), h, Some(x))?;
    }
    let x = embedding::pooled_rows(&mut net.graph, sentence, x)?;
    embedding::finish(&mut net.graph, &weights.into(), sentence, x)?;
    Ok(net.graph)
}

impl Encoder<'_> {
    fn weight(&mut self, name: &str, shape: &[usize]) -> Result<TensorId, BuildError> {
        let name = format!("{}{name}", self.prefix);
        let dtype = self.weights.expect(&name, shape)?.dtype;
        Ok(self.graph.weight(&name, shape, dtype)?)
    }

    fn embed(&mut self) -> Result<TensorId, BuildError> {
        let BertConfig { vocab_size, hidden_size, max_position_embeddings, first_position, type_vocab_size, .. } =
            *self.config;
        let longest = max_position_embeddings - first_position;
        let tokens = self.graph.tokens(longest)?;
        let table = self.weight("embeddings.word_embeddings.weight", &[vocab_size, hidden_size])?;
        let positions =
            self.weight("embeddings.position_embeddings.weight", &[max_position_embeddings, hidden_size])?;
        let positions =
            self.graph.view(positions, first_position * hidden_size, &[longest, hidden_size], &[hidden_size, 1])?;
        let kinds = self.weight("embeddings.token_type_embeddings.weight", &[type_vocab_size, hidden_size])?;
        let args = EmbeddingArgs { positions: Some(positions), kinds: Some(kinds), ..EmbeddingArgs::of(table) };
        let x = self.graph.embedding("embeddings", tokens, args)?;
        self.norm("embeddings.LayerNorm", x, None)
    }

    fn norm(&mut self, name: &str, x: TensorId, residual: Option<TensorId>) -> Result<TensorId, BuildError> {
        let hidden = [self.config.hidden_size];
        let w = self.weight(&format!("{name}.weight"), &hidden)?;
        let b = self.weight(&format!("{name}.bias"), &hidden)?;
        Ok(self.graph.layer_norm(name, x, residual, [w, b], self.config.layer_norm_eps as f32)?)
    }

    fn linear(&mut self, name: &str, x: TensorId, out: usize, act: Activation) -> Result<TensorId, BuildError> {
        let inner = self.graph.table[x].shape[1];
        let w = self.weight(&format!("{name}.weight"), &[out, inner])?;
        let bias = self.weight(&format!("{name}.bias"), &[out])?;
        Ok(self.graph.linear(name, x, w, Some(bias), act, None)?)
    }

    /// Bidirectional attention over the pass's rows: `[rows, hidden]`.
    fn attend(&mut self, layer: usize, x: TensorId) -> Result<TensorId, BuildError> {
        let BertConfig { hidden_size, n_heads, head_dim, .. } = *self.config;
        let rows = self.graph.rows.unwrap_or(1) as usize;
        let name = |part: &str| format!("encoder.layer.{layer}.attention.self.{part}");
        let q = self.linear(&name("query"), x, hidden_size, Activation::None)?;
        let k = self.linear(&name("key"), x, hidden_size, Activation::None)?;
        let v = self.linear(&name("value"), x, hidden_size, Activation::None)?;
        let q = self.graph.reshape(q, &[rows, n_heads, 1, head_dim])?;
        // Keys and values seen head by head: [heads, rows, head_dim].
        let by_head =
            |graph: &mut KernelGraph, t| graph.view(t, 0, &[n_heads, rows, head_dim], &[head_dim, hidden_size, 1]);
        let kv = [by_head(&mut self.graph, k)?, by_head(&mut self.graph, v)?];
        let scale = 1.0 / (head_dim as f32).sqrt();
        let args = AttentionArgs { scale, mask: Mask::Bidirectional, sinks: None };
        Ok(self.graph.attention(&name("attention"), q, kv, args)?)
    }
}
