//! Gemma 3, GLM 4, Trinity and LFM3: what attention and MLP make is normalised, too, before it is added. Gemma's heads
//! of q and k are normalised before the rotation, whose base is another in layers with a window.

use super::decoder::{BuildError, Decoder};
use super::layout::DecoderNames;
use crate::graph::kernel::KernelGraph;

/// Builds the network.
pub fn build(mut net: Decoder<'_>) -> Result<KernelGraph, BuildError> {
    let mut x = net.embed()?;
    for layer in 0..net.config.n_layers {
        let DecoderNames { before, after, .. } = DecoderNames::of(net.config.architecture);
        let [before, after] = [before, after].map(|both| both.map(|name| format!("model.layers.{layer}.{name}")));
        let h = net.norm(&before[0], x)?;
        let made = match net.config.mixer_of(layer) {
            Some(mixer) => net.mix(layer, mixer, h, None)?,
            None => {
                let projected = net.project(layer, h)?;
                let attended = net.attend(layer, projected)?;
                net.project_out(layer, attended, None)?
            }
        };
        x = net.add_normed(&after[0], made, x)?;
        let h = net.norm(&before[1], x)?;
        let made = net.mlp(layer, h, None)?;
        x = net.add_normed(&after[1], made, x)?;
    }
    net.finish(x)
}
