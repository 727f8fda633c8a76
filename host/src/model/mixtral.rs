//! Mixtral: [Mistral](super::mistral), where a row goes to two of the MLPs that a layer has.

use super::decoder::{BuildError, Decoder};
use crate::graph::kernel::KernelGraph;

/// Builds the network.
pub fn build(mut net: Decoder<'_>) -> Result<KernelGraph, BuildError> {
    let mut x = net.embed()?;
    for layer in 0..net.config.n_layers {
        let h = net.norm(&format!("model.layers.{layer}.input_layernorm"), x)?;
        let projected = net.project(layer, h, false)?;
        let attended = net.attend(layer, projected, false)?;
        x = net.project_out(layer, attended, x)?;
        let h = net.norm(&format!("model.layers.{layer}.post_attention_layernorm"), x)?;
        x = net.experts(layer, h, x)?;
    }
    net.finish(x)
}
