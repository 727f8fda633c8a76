//! Mistral and, with experts, Mixtral: Llama's layers, over the last positions alone where the configuration has a window.

use super::decoder::{BuildError, Decoder};
use crate::graph::kernel::KernelGraph;

/// Builds the network.
pub fn build(mut net: Decoder<'_>) -> Result<KernelGraph, BuildError> {
    let mut x = net.embed()?;
    for layer in 0..net.config.n_layers {
        let h = net.norm(&format!("model.layers.{layer}.input_layernorm"), x)?;
        let projected = net.project(layer, h, false)?;
        let attended = net.attend(layer, projected, false)?;
        x = net.project_out(layer, attended, Some(x))?;
        let h = net.norm(&format!("model.layers.{layer}.post_attention_layernorm"), x)?;
        x = net.mlp(layer, h, Some(x))?;
    }
    net.finish(x)
}
