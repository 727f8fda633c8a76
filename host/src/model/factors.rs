//! The factors of norms that a checkpoint has less one, as kernels multiply with them: one more each, in f32, since bf16 has not
//! the digits for it.

use std::collections::HashMap;

use perpetua_shared::DType;

use super::config::ModelConfig;
use super::layout::{self, Role};
use super::quantize::widen;
use super::weights::Weights;

/// Element type of the factors.
pub(super) const DTYPE: DType = DType::F32;

/// Those of a network, by name.
#[derive(Debug, Default)]
pub(super) struct Factors(HashMap<String, Vec<f32>>);

impl Factors {
    /// Of a network of this configuration, as far as `weights` has them: what it lacks, whoever builds the network hears.
    pub(super) fn of(config: &ModelConfig, weights: &Weights) -> Factors {
        if !config.architecture().has_norms_less_one() {
            return Factors::default();
        }
        let specs = layout::tensors(config).into_iter().filter(|spec| spec.role == Role::NormLessOne);
        let kept = specs.filter_map(|spec| {
            let view = weights.expect(&spec.name, &spec.shape).ok()?;
            let mut factors = vec![0f32; spec.len_elems() as usize];
            widen(view.dtype, view.bytes, &mut factors);
            factors.iter_mut().for_each(|factor| *factor += 1.0);
            Some((spec.name, factors))
        });
        Factors(kept.collect())
    }

    /// The bytes of tensor `name`, if it is one of them.
    pub(super) fn get(&self, name: &str) -> Option<&[u8]> {
        self.0.get(name).map(|factors| bytemuck::cast_slice(factors))
    }
}
