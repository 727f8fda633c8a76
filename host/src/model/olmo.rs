//! OLMo 2, OLMo 3 and EXAONE 4: what attention and MLP make is normalised before it is added, and nothing before they
//! read it. OLMo normalises all queries of a row together, and all keys, EXAONE each head's.

use super::decoder::{BuildError, Decoder};
use super::layout::DecoderNames;
use crate::graph::kernel::KernelGraph;

/// Builds the network.
pub fn build(mut net: Decoder<'_>) -> Result<KernelGraph, BuildError> {
    let mut x = net.embed()?;
    for layer in 0..net.config.n_layers {
        let after = DecoderNames::of(net.config.architecture).after.map(|name| format!("model.layers.{layer}.{name}"));
        let projected = net.project(layer, x)?;
        let attended = net.attend(layer, projected)?;
        let made = net.project_out(layer, attended, None)?;
        x = net.add_normed(&after[0], made, x)?;
        let made = net.mlp(layer, x, None)?;
        x = net.add_normed(&after[1], made, x)?;
    }
    net.finish(x)
}
