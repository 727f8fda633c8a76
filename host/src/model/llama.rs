//! Llama and the families that build their layers alike; what else differs the configuration says:
//!
//! - DeepSeek V2 and V3, GLM 4.7 Flash, Mistral 4, Youtu and MiniCPM 3: attention to latents (`decoder::latent`), the
//!   first ones with experts.
//! - Hunyuan: heads of q and k normalised, with factors behind the rotation; experts.
//! - ERNIE 4.5 and GLM: heads whose neighbours are turned with each other, which shows in [`remade`](super::remade)
//!   alone.
//! - GLM 4.5 to 4.7, Solar Open, K-EXAONE, dots.llm1, MiniMax M2 and LFM2's larger ones: experts chosen by corrected
//!   sigmoids.
//! - Llama 2 to 3.2: plain grouped-query attention; Llama 3's frequency scaling is part of the rotary table. SmolLM3,
//!   too: layers that do not turn queries and keys have a table of zeros.
//! - Granite Swash: Granite with sinks and windows. Mellum: Qwen3 MoE with windows.
//! - gpt-oss: experts with biases, whose gates and ups are limited; heads with sinks; a window in every second layer.
//! - Mistral, Ministral and, with experts, Mixtral: over the last positions alone where there is a window.
//! - Qwen2 and Qwen2.5, and Seed-OSS: biases on q, k and v. Qwen2 MoE: experts, and an MLP that all rows go to, by a
//!   weight of its own.
//! - Granite, with one MLP a layer or with experts: its numbers are in the configuration's (what scores and embeddings
//!   are multiplied with, the norms' epsilon), and in the factors of the last norm. Checkpoints have all experts'
//!   matrices in one tensor, taken apart when it is opened. Beside experts, or alone, there may be an MLP that all rows
//!   go to; and state spaces in the place of attention.
//! - OLMoE: all queries of a row are normalised together, and all keys; experts.
//! - Qwen3.5, Qwen3-Next and LFM2: most layers have linear attention, or a short convolution, in the place of
//!   attention.
//! - Phi 3 and 4: their checkpoints have q, k and v as one matrix, and gate and up; of a head a part of the elements
//!   may be turned.
//! - Qwen3, with one MLP a layer or with experts: heads of q and k normalised before the rotation.

use super::decoder::{BuildError, Decoder};
use super::layout::DecoderNames;
use crate::graph::kernel::KernelGraph;

/// Builds the network.
pub fn build(mut net: Decoder<'_>) -> Result<KernelGraph, BuildError> {
    let mut x = net.embed()?;
    for layer in 0..net.config.n_layers {
        let [before_attention, before_mlp] = DecoderNames::of(net.config.architecture).before;
        let h = net.norm(&format!("model.layers.{layer}.{before_attention}"), x)?;
        x = match net.config.mixer_of(layer) {
            Some(mixer) => net.mix(layer, mixer, h, Some(x))?,
            None => {
                let attended = match net.config.latent {
                    Some(of) => net.attend_to_latents(layer, of, h)?,
                    None => {
                        let projected = net.project(layer, h)?;
                        net.attend(layer, projected)?
                    }
                };
                net.project_out(layer, attended, Some(x))?
            }
        };
        let h = net.norm(&format!("model.layers.{layer}.{before_mlp}"), x)?;
        x = net.mlp(layer, h, Some(x))?;
    }
    net.finish(x)
}
