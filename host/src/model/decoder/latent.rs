//! Latent attention (MLA; DeepSeek-V2, DeepSeek-AI 2024, section 2.1), as it is when matrices are taken together.
//!
//! A position's keys and values are made of one vector, its latent c, head by head: k = key[h] . c, v = value[h] . c.
//! So q . k is (key[h]^T . q) . c, and what a head attends to is value[h] . (the sum of weighted latents). Caches have
//! latents alone, and beside each the part of the key that its position turns, which all heads share:
//!
//! ```text
//! queries   [rows, heads, rank | turned]   key[h]^T . the still part of q, | the turned part, by its position
//! cache     [context, rank | turned]       norm(c) | the key's turned part
//! attended  [rows, heads, rank | -]        the weighted sum of the cache's rows; what is turned nobody reads of it
//! made      [rows, heads, value_dim]       value[h] . attended
//! ```
//! To attention it is a few heads of keys, of as many query heads each as a GPU's warps take at once, all of which are
//! the one cache: keys and values both.

use super::{BuildError, Cache, Decoder, rope_frequencies};
use crate::graph::kernel::{AttentionArgs, Caches, KernelGraph, Mask, Pass, RopeArgs};
use crate::graph::tensor::TensorId;
use crate::model::config::{DecoderConfig, Latent};
use crate::model::layout::latent as names;
use perpetua_shared::DType;

/// The epsilon of the norms of latents, whatever that of others is.
const EPS: f32 = 1e-6;

/// Elements of the queries that are attended with together, at most, and how many queries these are: see the device's
/// `attention`.
const MOST_QUERY: [usize; 2] = [3456, 8];

impl Decoder<'_> {
    /// What layer `layer` attends to from `h`, behind its norm: `[rows, heads * value_dim]`.
    pub(in crate::model) fn attend_to_latents(
        &mut self,
        layer: usize,
        of: Latent,
        h: TensorId,
    ) -> Result<TensorId, BuildError> {
        let Latent { rank, value_dim, .. } = of;
        let n_heads = self.config.n_heads;
        let (rows, cached) = (self.graph.rows.unwrap_or(1) as usize, of.cached_dim());
        let of_layer = |part: &str| format!("model.layers.{layer}.{part}");
        let latents = self.latents(layer, of, h)?;
        let queries = self.graph.passing(&of_layer("self_attn.queries"), &[rows, n_heads, cached], DType::F32)?;
        self.turned_queries(layer, of, latents.queries_of, queries)?;
        let rope = self.latent_rope(layer, of, queries, latents)?;

        let name = of_layer("self_attn");
        let together = queries_together(n_heads, cached);
        let heads = n_heads / together;
        let q = self.graph.reshape(queries, &[rows, heads, together, cached])?;
        let args = AttentionArgs { scale: self.config.attention_scale as f32, mask: Mask::Causal, sinks: None };
        let Cache { context, dtype, .. } = self.cache;
        let passes = self.takes_whole();
        let cache = |graph: &mut KernelGraph| {
            let name = of_layer("self_attn.latent_cache");
            let (positions, kept) = match passes {
                true => (rows, graph.passing(&name, &[1, rows, cached], dtype)?),
                false => (context, graph.state(&name, &[1, context, cached], dtype)?),
            };
            let strides = [positions * cached, cached, 1];
            let turned = graph.view(kept, rank, &[1, positions, of.turned_dim], &strides)?;
            let latents = graph.view(kept, 0, &[1, positions, rank], &strides)?;
            let shared = graph.view(kept, 0, &[heads, positions, cached], &[0, cached, 1])?;
            Ok(Caches { appended: [turned, latents], attended: [shared; 2] })
        };
        let attended = if self.graph.pass == Pass::Batch {
            self.still_queries(layer, of, latents.queries_of, queries)?;
            self.graph.attend_each(&name, rope, q, args, cache)?
        } else {
            // What is turned is there before the rest, which takes longer.
            let Caches { appended, attended } = cache(&mut self.graph)?;
            self.graph.rope(&format!("{name}.rope"), rope, appended)?;
            self.still_queries(layer, of, latents.queries_of, queries)?;
            self.graph.attention(&format!("{name}.attention"), q, attended, args)?
        };

        let attended = self.graph.view(attended, 0, &[rows, n_heads, rank], &[n_heads * cached, cached, 1])?;
        let w = self.matrices_of_heads(&of_layer(names::VALUES), [value_dim, rank])?;
        let made = self.graph.passing(&of_layer(names::VALUES), &[rows, n_heads * value_dim], DType::F32)?;
        let of_heads = self.graph.reshape(made, &[rows, n_heads, value_dim])?;
        self.graph.linear_of_heads(&of_layer(names::VALUES), attended, w, of_heads)?;
        Ok(made)
    }

    /// What queries, keys and values are made of.
    fn latents(&mut self, layer: usize, of: Latent, h: TensorId) -> Result<Latents, BuildError> {
        let Latent { query_rank, rank, .. } = of;
        let DecoderConfig { hidden_size, attention_bias: has_bias, .. } = *self.config;
        let (rows, cached) = (self.graph.rows.unwrap_or(1) as usize, of.cached_dim());
        let of_layer = |part: &str| format!("model.layers.{layer}.{part}");
        let queries_of = match query_rank {
            Some(rank) => self.linear(&of_layer(names::QUERIES_OF), h, [rank, hidden_size], has_bias, None)?,
            None => h,
        };
        let both = self.linear(&of_layer(names::KEYS_OF), h, [cached, hidden_size], has_bias, None)?;
        let norm = |net: &mut Self, name: &str, x: TensorId, n: usize| -> Result<TensorId, BuildError> {
            let w = net.factors(&of_layer(name), n)?;
            Ok(net.graph.rms_norm(&of_layer(name), x, w, EPS)?)
        };
        let queries_of = match query_rank {
            Some(rank) => norm(self, names::QUERY_NORM, queries_of, rank)?,
            None => h,
        };
        let queries_of = self.lengthen(&of_layer("self_attn.q_lengthen"), queries_of)?;
        let latent = self.graph.view(both, 0, &[rows, rank], &[cached, 1])?;
        let latent = norm(self, names::KEY_NORM, latent, rank)?;
        let turned = self.graph.view(both, rank, &[rows, 1, of.turned_dim], &[cached, cached, 1])?;
        Ok(Latents { queries_of, latent: self.graph.reshape(latent, &[rows, 1, rank])?, turned })
    }

    /// Of the `queries`, `[rows, heads, rank + turned_dim]`, what is turned later.
    fn turned_queries(&mut self, layer: usize, of: Latent, x: TensorId, queries: TensorId) -> Result<(), BuildError> {
        let Latent { query_rank, rank, turned_dim, .. } = of;
        let DecoderConfig { n_heads, hidden_size, .. } = *self.config;
        let (rows, cached) = (self.graph.rows.unwrap_or(1) as usize, of.cached_dim());
        let name = format!("model.layers.{layer}.{}", names::TURNED);
        let turned = self.graph.view(queries, rank, &[rows, n_heads, turned_dim], &[n_heads * cached, cached, 1])?;
        let w = self.matrices_of_heads(&name, [turned_dim, query_rank.unwrap_or(hidden_size)])?;
        Ok(self.graph.linear_of_heads(&name, x, w, turned)?)
    }

    /// And the rest.
    fn still_queries(&mut self, layer: usize, of: Latent, x: TensorId, queries: TensorId) -> Result<(), BuildError> {
        let Latent { query_rank, rank, still_dim, .. } = of;
        let DecoderConfig { n_heads, hidden_size, .. } = *self.config;
        let (rows, cached) = (self.graph.rows.unwrap_or(1) as usize, of.cached_dim());
        let [still, keys] = [names::STILL, names::KEYS].map(|part| format!("model.layers.{layer}.{part}"));
        let inner = query_rank.unwrap_or(hidden_size);
        let made = self.linear(&still, x, [n_heads * still_dim, inner], false, None)?;
        let made = self.graph.reshape(made, &[rows, n_heads, still_dim])?;
        let latents = self.graph.view(queries, 0, &[rows, n_heads, rank], &[n_heads * cached, cached, 1])?;
        let w = self.matrices_of_heads(&keys, [rank, still_dim])?;
        Ok(self.graph.linear_of_heads(&keys, made, w, latents)?)
    }

    /// How the turned part of `queries` and of keys is turned, and what is appended.
    fn latent_rope(
        &mut self,
        layer: usize,
        of: Latent,
        queries: TensorId,
        Latents { latent, turned, .. }: Latents,
    ) -> Result<RopeArgs, BuildError> {
        let DecoderConfig { n_heads, ropes, .. } = self.config;
        let (rows, cached) = (self.graph.rows.unwrap_or(1) as usize, of.cached_dim());
        let strides = [n_heads * cached, n_heads * cached, cached, 1];
        let q = self.graph.view(queries, of.rank, &[rows, 1, *n_heads, of.turned_dim], &strides)?;
        let dims = |_| [of.turned_dim; 2];
        let (frequencies, factor) = rope_frequencies(&mut self.graph, ropes, layer, dims, self.cache.context)?;
        let turned_pairs = of.turned_dim / 2;
        let (kv, norms) = (Some([turned, latent]), [None; 2]);
        Ok(RopeArgs {
            q,
            kv,
            norms,
            norms_values: false,
            norms_turned: false,
            frequencies,
            turned_pairs,
            factor,
            eps: EPS,
        })
    }

    /// The matrices called `name`, `[heads, rows, columns]`, those of one head after the other's in the checkpoint.
    fn matrices_of_heads(&mut self, name: &str, [rows, columns]: [usize; 2]) -> Result<TensorId, BuildError> {
        let n_heads = self.config.n_heads;
        let all = self.weight(&format!("{name}.weight"), &[n_heads * rows, columns])?;
        let [row, unit] = self.graph.table[all].strides[..] else { unreachable!("a matrix has two dimensions") };
        Ok(self.graph.view(all, 0, &[n_heads, rows, columns], &[rows * row, row, unit])?)
    }
}

/// What a layer makes of its rows first.
#[derive(Clone, Copy)]
struct Latents {
    /// `[rows, query_rank]`, or the rows themselves.
    queries_of: TensorId,
    /// `[rows, 1, rank]`, normalised.
    latent: TensorId,
    /// `[rows, 1, turned_dim]`.
    turned: TensorId,
}

/// How many of `n_heads` queries of `dim` elements are attended with together.
fn queries_together(n_heads: usize, dim: usize) -> usize {
    let [elements, queries] = MOST_QUERY;
    let fits = |n: &usize| n_heads.is_multiple_of(*n) && n * dim <= elements;
    (1..=queries).rev().find(fits).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::queries_together;

    #[test]
    fn queries_are_together_as_far_as_they_have_room() {
        for (n_heads, dim, together) in
            [(16, 576, 4), (20, 576, 5), (128, 576, 4), (40, 288, 8), (32, 320, 8), (7, 4096, 1)]
        {
            assert_eq!(queries_together(n_heads, dim), together, "{n_heads} heads of {dim}");
        }
    }
}
