//! Everything about a model folder: WHICH network, and where its numbers are.

mod error;
mod json;

pub mod config;
pub mod weights;

pub use config::{Activation, Architecture, BertConfig, DecoderConfig, ModelConfig, Rope, RopeScaling};
pub use error::ModelError;
pub use weights::{TensorView, Weights};
