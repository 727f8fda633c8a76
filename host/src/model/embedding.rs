//! What follows a sentence model's network: its tokens' vectors become one.

use super::decoder::{BuildError, Declared};
use super::sentence::{Pooling, SentenceConfig};
use crate::graph::kernel::{KernelGraph, Pooled};
use crate::graph::tensor::TensorId;
use perpetua_device::kernels::linear::Activation;

/// Of the rows of `x`, `[rows, hidden]`, those that `sentence` pools: the last one where it is that, else all.
pub(super) fn pooled_rows(
    graph: &mut KernelGraph,
    sentence: &SentenceConfig,
    x: TensorId,
) -> Result<TensorId, BuildError> {
    match sentence.pooling {
        Pooling::LastToken => Ok(graph.select_row("last_row", x)?),
        Pooling::Mean | Pooling::Cls => Ok(x),
    }
}

/// Adds to `graph` what `sentence` says is done with the vectors `x` of its [`pooled_rows`]. Output `embedding`: `[1,
/// dim]` f32.
pub(super) fn finish(
    graph: &mut KernelGraph,
    weights: &Declared<'_>,
    sentence: &SentenceConfig,
    x: TensorId,
) -> Result<(), BuildError> {
    let pooled = match sentence.pooling {
        Pooling::Mean => Pooled::Mean,
        Pooling::Cls | Pooling::LastToken => Pooled::First,
    };
    let mut h = graph.pool("pooling", x, pooled, sentence.normalize && sentence.dense.is_empty())?;
    for dense in &sentence.dense {
        let mut made = [None, None];
        for (made, (name, shape)) in made.iter_mut().zip(dense.tensors()) {
            let dtype = weights.dtype(&name, &shape)?;
            *made = Some(graph.weight(&name, &shape, dtype)?);
        }
        let [Some(w), bias] = made else { unreachable!("a linear layer has a matrix") };
        h = graph.linear(&format!("{}linear", dense.prefix), h, w, bias, Activation::None, None)?;
    }
    if sentence.normalize && !sentence.dense.is_empty() {
        h = graph.pool("normalize", h, Pooled::First, true)?;
    }
    let dim = graph.table[h].shape[1];
    if let Some(kept) = sentence.truncate_dim.filter(|kept| *kept < dim) {
        h = graph.view(h, 0, &[1, kept], &[dim, 1])?;
    }
    graph.output("embedding", h)?;
    Ok(())
}
