//! Gemma 4: Gemma 3's norms, with more than these between attention and the end of a layer.
//!
//! - Layers without a window have heads of other sizes, and values that may be their keys; all values are normalised.
//!   The last layers may attend to the caches of earlier ones (see [`Heads::cache_of`](super::config::Heads)): what
//!   comes from the first of them on keeps nothing, so passes of many rows that read a prompt end before it.
//! - Beside the MLP there may be experts. Both read what attention left, each behind a norm of its own, the router
//!   behind a third; what they make is normalised apart, added, and normalised again.
//! - A layer may take a vector of its own of each token: g = gelu(x . gate^T) * input, x + norm(g . projection^T). The
//!   inputs of all layers are norm(x0 . rows^T) + the token's row of a table, over the root of 2, where x0 are
//!   embeddings. (The norm does not see that the product is multiplied with 1 / sqrt(hidden), but for its epsilon.)
//! - What leaves a layer is multiplied with a number of the layer's.

use super::config::{DecoderConfig, Experts, LayerInputs};
use super::decoder::{BuildError, Decoder};
use super::layout::{DecoderNames, gemma4 as names};
use crate::graph::kernel::KernelGraph;
use crate::graph::tensor::TensorId;

/// Builds the network.
pub fn build(mut net: Decoder<'_>) -> Result<KernelGraph, BuildError> {
    let mut x = net.embed()?;
    let inputs = match net.config.layer_inputs {
        Some(of) => Some(Inputs::of(&mut net, of, x)?),
        None => None,
    };
    let DecoderNames { before, after, .. } = DecoderNames::of(net.config.architecture);
    for layer in 0..net.config.n_layers {
        // A row alone is nearly always one that is sampled from, and what is not made in every pass has no flags.
        let keeps_nothing = net.config.heads[layer..].iter().all(|heads| heads.cache_of.is_some());
        if keeps_nothing && net.graph.rows != Some(1) {
            net.when_sampling();
        }
        let of_layer = |name: &str| format!("model.layers.{layer}.{name}");
        let h = net.norm(&of_layer(before[0]), x)?;
        let projected = net.project(layer, h)?;
        let attended = net.attend(layer, projected)?;
        let made = net.project_out(layer, attended, None)?;
        x = net.add_normed(&of_layer(after[0]), made, x)?;

        let made = match net.config.experts_of(layer) {
            Some(experts) => beside_experts(&mut net, layer, experts, x)?,
            None => {
                let h = net.norm(&of_layer(before[1]), x)?;
                net.usual_mlp(layer, h, None)?
            }
        };
        let scale = of_layer(names::LAYER_SCALE);
        x = match &inputs {
            None => net.add_normed_scaled(&of_layer(after[1]), made, x, Some(&scale))?,
            Some(inputs) => {
                x = net.add_normed(&of_layer(after[1]), made, x)?;
                let made = inputs.with(&mut net, layer, x)?;
                net.add_normed_scaled(&of_layer(names::INPUT_NORM), made, x, Some(&scale))?
            }
        };
    }
    net.finish(x)
}

/// norm(what the MLP makes of x behind its norm) + norm(what the experts make of x behind theirs). The router comes
/// first, so that nobody waits for it behind the MLP, and that norm of one block where all others wait for experts.
fn beside_experts(net: &mut Decoder<'_>, layer: usize, experts: &Experts, x: TensorId) -> Result<TensorId, BuildError> {
    let DecoderConfig { architecture, hidden_size, rms_norm_eps, .. } = *net.config;
    let of_layer = |name: &str| format!("model.layers.{layer}.{name}");
    let router = of_layer(names::ROUTER_SCALE);
    let w = net.factors_in(&router, hidden_size)?;
    let routed = net.graph.rms_norm(&router, x, w, rms_norm_eps as f32)?;
    let logits = net.router_logits(layer, experts, routed)?;
    let h = net.norm(&of_layer(DecoderNames::of(architecture).before[1]), x)?;
    let by_mlp = net.usual_mlp(layer, h, None)?;
    let h = net.norm(&of_layer(names::BEFORE_EXPERTS), x)?;
    let (name, args) = (of_layer("experts"), net.expert_args(layer, experts, logits, None)?);
    let made = net.graph.experts_up(&name, h, args)?;
    let by_mlp = net.norm(&of_layer(names::BEHIND_MLP), by_mlp)?;
    let by_experts = net.graph.experts_down(&name, made, args)?;
    net.add_normed(&of_layer(names::BEHIND_EXPERTS), by_experts, by_mlp)
}

/// What all layers' inputs are made of: rows of a table, and what a linear layer makes of embeddings, `[rows, layers *
/// dim]` each.
struct Inputs {
    of: LayerInputs,
    looked_up: TensorId,
    of_rows: TensorId,
}

impl Inputs {
    /// Those of rows whose embeddings are `x`.
    fn of(net: &mut Decoder<'_>, of: LayerInputs, x: TensorId) -> Result<Inputs, BuildError> {
        let n = net.config.n_layers * of.dim;
        let table = net.weight(names::INPUTS, &[of.vocab_size, n])?;
        // The table's numbers count sqrt(dim) times.
        let looked_up = net.look_up("embed_tokens_per_layer", table, (of.dim as f32 / 2.0).sqrt())?;
        let of_rows = net.linear(names::INPUTS_OF_ROWS, x, [n, net.config.hidden_size], false, None)?;
        Ok(Inputs { of, looked_up, of_rows })
    }

    /// (gelu(x . gate^T) * the input of layer `layer`) . projection^T.
    fn with(&self, net: &mut Decoder<'_>, layer: usize, x: TensorId) -> Result<TensorId, BuildError> {
        let (config, dim, name) = (net.config, self.of.dim, |part: &str| format!("model.layers.{layer}.{part}"));
        let (rows, n) = (net.graph.rows.unwrap_or(1) as usize, config.n_layers * dim);
        let mut part = |of: TensorId| net.graph.view(of, layer * dim, &[rows, dim], &[n, 1]);
        let (looked_up, of_rows) = (part(self.looked_up)?, part(self.of_rows)?);
        let w = net.factors_in(names::NORM_OF_ROWS, dim)?;
        let eps = (config.rms_norm_eps * config.hidden_size as f64) as f32;
        let input = net.graph.add_rms_norm(&name("per_layer_input"), of_rows, w, eps, looked_up, None)?;
        let gate = name(names::INPUT_GATE);
        let w = net.weight(&format!("{gate}.weight"), &[dim, config.hidden_size])?;
        let gated = net.graph.linear_times(&gate, x, w, net.activation(), input)?;
        net.linear(&name(names::INPUT_PROJECTION), gated, [config.hidden_size, dim], false, None)
    }
}
