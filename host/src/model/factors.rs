//! The factors of norms of which a checkpoint has something else, as kernels multiply with them, in f32: where it has
//! them less one, one more each, since bf16 has not the digits for it; before the head of a network that divides its
//! logits, each divided by the number; and those of Gemma 4 that stand for a product with a number.

use std::collections::HashMap;

use perpetua_shared::DType;

use super::config::ModelConfig;
use super::layout::gemma4::NORM_OF_ROWS;
use super::layout::{self, Role};
use super::quantize::widen;
use super::weights::Weights;

/// Element type of the factors.
pub(super) const DTYPE: DType = DType::F32;

/// Those of a network, by name.
#[derive(Debug, Default)]
pub(super) struct Factors(HashMap<String, Vec<f32>>);

impl Factors {
    /// Of a network of this configuration, as far as `weights` has them: what it lacks, whoever builds the network
    /// hears.
    pub(super) fn of(config: &ModelConfig, weights: &Weights) -> Factors {
        let ModelConfig::Decoder(decoder) = config else { return Factors::default() };
        let specs = layout::tensors(config).into_iter().filter(|spec| spec.role.is_made());
        let kept = specs.filter_map(|spec| {
            let view = weights.expect(&spec.name, &spec.shape).ok()?;
            let mut factors = vec![0f32; spec.len_elems() as usize];
            widen(view.dtype, view.bytes, &mut factors);
            factors.iter_mut().for_each(|factor| match spec.role {
                Role::DividedNorm => *factor /= decoder.logits_divisor as f32,
                Role::ScaledNorm if spec.name == NORM_OF_ROWS => *factor *= std::f32::consts::FRAC_1_SQRT_2,
                Role::ScaledNorm => *factor *= (decoder.hidden_size as f32).sqrt().recip(),
                _ => *factor += 1.0,
            });
            Some((spec.name, factors))
        });
        Factors(kept.collect())
    }

    /// The bytes of tensor `name`, if it is one of them.
    pub(super) fn get(&self, name: &str) -> Option<&[u8]> {
        self.0.get(name).map(|factors| bytemuck::cast_slice(factors))
    }
}
