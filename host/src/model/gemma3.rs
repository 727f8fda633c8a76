//! Gemma 3: what attention and MLP make is normalised, too, before it is added; heads of q and k are normalised before the rotation, whose
//! base is another in layers with a window.

use super::decoder::{BuildError, Decoder};
use crate::graph::kernel::KernelGraph;

/// Builds the network.
pub fn build(mut net: Decoder<'_>) -> Result<KernelGraph, BuildError> {
    let mut x = net.embed()?;
    for layer in 0..net.config.n_layers {
        let norm = |which: &str| format!("model.layers.{layer}.{which}_layernorm");
        let h = net.norm(&norm("input"), x)?;
        let projected = net.project(layer, h)?;
        let attended = net.attend(layer, projected)?;
        let made = net.project_out(layer, attended, None)?;
        x = net.add_normed(&norm("post_attention"), made, x)?;
        let h = net.norm(&norm("pre_feedforward"), x)?;
        let made = net.mlp(layer, h, None)?;
        x = net.add_normed(&norm("post_feedforward"), made, x)?;
    }
    net.finish(x)
}
