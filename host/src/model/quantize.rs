//! Weights in 8 bits: half the bytes of bf16, chosen when a model is opened.
//!
//! Every matrix of a text generation model (projections, embedding table, head) is kept as [`DType::Q8`]: blocks of 64
//! signed bytes along a row with a scale in f32 each (see [`q8_block_at`]), `scale = max |w| / 127` with its last mantissa bits cleared so that
//! products of byte and scale are exact. Norms and biases stay as they are. Symmetric rounding to nearest; an element is
//! off by at most half a scale, 0.4 % of its block's largest.
//!
//! Quantised weights are owned: the mapped file is read once and not needed again for them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytemuck::Zeroable;
use half::{bf16, f16};
use perpetua_shared::DType;
use perpetua_shared::dtype::{Q8_BLOCK, q8_block_at, q8_row_bytes};

use super::error::ModelError;
use super::layout::TensorSpec;
use super::weights::{TensorView, Weights};

/// How weights are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantize {
    /// Signed bytes, a scale per 64.
    Q8,
}

/// Bytes that start on a cache line.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// The matrices of a checkpoint in 8 bits, by name.
pub struct Quantized {
    tensors: HashMap<String, (Vec<Line>, usize)>,
}

impl std::fmt::Debug for Quantized {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Quantized({} matrices, {} bytes)", self.tensors.len(), self.size_bytes())
    }
}

impl Quantized {
    /// Quantises the matrices among `tensors` of `weights`, on all cores; `progress` is called with the bytes of each.
    ///
    /// # Errors
    /// A tensor that is not there, has another shape or is not of floats; an element that is not finite.
    pub fn new(
        weights: &Weights,
        tensors: &[TensorSpec],
        progress: &mut dyn FnMut(u64),
    ) -> Result<Quantized, ModelError> {
        let mut quantized = HashMap::new();
        for TensorSpec { name, shape, .. } in tensors.iter().filter(|spec| is_matrix(spec)) {
            let view = weights.expect(name, shape)?;
            let bytes = DType::Q8.tensor_bytes(shape) as usize;
            let mut lines = vec![Line::zeroed(); bytes.div_ceil(64)];
            let out = &mut bytemuck::cast_slice_mut(&mut lines)[..bytes];
            if let Some(at) = matrix(&view, out) {
                return Err(ModelError::NotFinite { name: name.clone(), at });
            }
            weights.release(name);
            progress(view.bytes.len() as u64);
            quantized.insert(name.clone(), (lines, bytes));
        }
        Ok(Quantized { tensors: quantized })
    }

    /// Bytes that the matrices among `tensors` will take.
    pub fn needed(tensors: &[TensorSpec]) -> u64 {
        tensors.iter().filter(|spec| is_matrix(spec)).map(|spec| DType::Q8.tensor_bytes(&spec.shape)).sum()
    }

    /// The bytes of matrix `name`, if it was quantised.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        let (lines, bytes) = self.tensors.get(name)?;
        Some(&bytemuck::cast_slice(lines)[..*bytes])
    }

    /// Bytes of all matrices.
    pub fn size_bytes(&self) -> u64 {
        self.tensors.values().map(|(_, bytes)| *bytes as u64).sum()
    }
}

fn is_matrix(spec: &TensorSpec) -> bool {
    spec.shape.len() == 2
}

/// Quantises a matrix into `out`; the first element that is not finite, if there is one.
fn matrix(view: &TensorView<'_>, out: &mut [u8]) -> Option<[usize; 2]> {
    let &[rows, k] = view.shape else { unreachable!("the caller asked for a matrix") };
    if rows == 0 || k == 0 {
        return None;
    }
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from).min(rows);
    let per_thread = rows.div_ceil(n_threads);
    // The first of them all, whichever thread comes upon it.
    let bad = AtomicUsize::new(usize::MAX);
    std::thread::scope(|scope| {
        let row_bytes = k * view.dtype.size_bytes();
        let parts = out.chunks_mut(per_thread * q8_row_bytes(k)).zip(view.bytes.chunks(per_thread * row_bytes));
        for (part, (out, bytes)) in parts.enumerate() {
            let bad = &bad;
            scope.spawn(move || {
                let mut wide = vec![0f32; k];
                for (r, (out, bytes)) in out.chunks_mut(q8_row_bytes(k)).zip(bytes.chunks(row_bytes)).enumerate() {
                    widen(view.dtype, bytes, &mut wide);
                    if let Err(column) = row(&wide, out) {
                        bad.fetch_min((part * per_thread + r) * k + column, Ordering::Relaxed);
                        return;
                    }
                }
            });
        }
    });
    match bad.into_inner() {
        usize::MAX => None,
        at => Some([at / k, at % k]),
    }
}

fn widen(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        DType::F32 => {
            for (out, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *out = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        _ => {
            for (out, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                let bits = u16::from_le_bytes([b[0], b[1]]);
                *out = if dtype == DType::F16 { f16::from_bits(bits).to_f32() } else { bf16::from_bits(bits).to_f32() };
            }
        }
    }
}

/// Quantises one row into zeros, laid out as [`q8_block_at`] says; the first element that is not finite as the error.
fn row(weights: &[f32], out: &mut [u8]) -> Result<(), usize> {
    for (i, block) in weights.chunks(Q8_BLOCK).enumerate() {
        let largest = block.iter().fold(0f32, |largest, w| largest.max(w.abs()));
        if let Some(bad) = block.iter().position(|w| !w.is_finite()) {
            return Err(i * Q8_BLOCK + bad);
        }
        // 17 significant bits, rounded up so that no quotient passes 127.
        let scale = f32::from_bits((largest / 127.0).to_bits().next_multiple_of(1 << 7));
        let [bytes, at] = q8_block_at(i);
        for (out, w) in out[bytes..].iter_mut().zip(block) {
            // Adding 1.5 * 2^23 rounds to a whole number, in one instruction on every machine. 0 / 0 is NaN, which the
            // cast makes zero.
            const SHIFT: f32 = 12_582_912.0;
            *out = ((w / scale + SHIFT) - SHIFT) as i8 as u8;
        }
        out[at..][..4].copy_from_slice(&scale.to_le_bytes());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Element i of a quantised row, by the layout's description.
    fn element(row: &[u8], i: usize) -> f32 {
        let [bytes, at] = q8_block_at(i / Q8_BLOCK);
        let scale = f32::from_le_bytes([row[at], row[at + 1], row[at + 2], row[at + 3]]);
        f32::from(row[bytes + i % Q8_BLOCK] as i8) * scale
    }

    proptest! {
        #[test]
        fn elements_are_off_by_half_a_scale(
            weights in prop::collection::vec(prop_oneof![-1f32..1.0, -1e-3f32..1e-3, Just(0.0), -3e38f32..3e38], 1..300),
        ) {
            let k = weights.len();
            let mut out = vec![0; q8_row_bytes(k)];
            prop_assert_eq!(row(&weights, &mut out), Ok(()));
            for (i, w) in weights.iter().enumerate() {
                let block = &weights[i / Q8_BLOCK * Q8_BLOCK..];
                let largest = block[..block.len().min(Q8_BLOCK)].iter().fold(0f32, |l, w| l.max(w.abs()));
                let off = (f64::from(element(&out, i)) - f64::from(*w)).abs();
                prop_assert!(off <= f64::from(largest) / 127.0 * 0.502, "element {i}: {w} is off by {off}");
            }
            let padding = (k..k.next_multiple_of(Q8_BLOCK)).map(|i| out[q8_block_at(i / Q8_BLOCK)[0] + i % Q8_BLOCK]);
            prop_assert!(padding.into_iter().all(|b| b == 0), "padding must be zero");
        }
    }

    #[test]
    fn an_infinite_element_is_named() {
        let mut weights = vec![0.5; 130];
        weights[97] = f32::NEG_INFINITY;
        assert_eq!(row(&weights, &mut vec![0; q8_row_bytes(130)]), Err(97));
    }
}
