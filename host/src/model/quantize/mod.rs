//! Weights in fewer bits, chosen when a model is opened.
//!
//! With [`Quantize::Q8`] every matrix of a text generation model (projections, experts, embedding table, head; no
//! router) is kept as [`DType::Q8`], half the bytes of bf16; with [`Quantize::Q4`] those of the layers as
//! [`DType::Q4`], little more than a quarter, and the embedding table and the head, whose rounding goes straight into
//! the logits, as before in 8 bits. Norms and biases stay as they are.
//!
//! Everything is owned: the mapped file is read once, its pages are given back as that goes on, and the vectors are
//! copied, so that no page of it is touched again. (A vector would bring as many neighbours as the system maps at
//! once.)

mod eight_bits;
mod four_bits;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::{bf16, f16};
use perpetua_shared::DType;

use super::aligned::AlignedBytes;
use super::config::ModelConfig;
use super::error::ModelError;
use super::layout::{Role, TensorSpec};
use super::weights::{TensorView, Weights};
use crate::parallel::spawned;

/// How weights are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantize {
    /// Signed bytes, a scale per 64.
    Q8,
    /// One of 16 levels each, a scale per 32; embedding table and head as [`Quantize::Q8`].
    Q4,
}

impl fmt::Display for Quantize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Quantize::Q8 => "q8",
            Quantize::Q4 => "q4",
        })
    }
}

impl Quantize {
    /// What the tensors of a network of this configuration are kept as, by name, but for those that stay as they are.
    pub fn dtypes(self, config: &ModelConfig) -> HashMap<String, DType> {
        let tensors = super::layout::tensors(config);
        tensors.into_iter().filter_map(|spec| self.dtype_of(&spec).map(|dtype| (spec.name, dtype))).collect()
    }

    /// What the tensor is kept as; none where it stays as it is: what is no [matrix](Role::is_matrix), and heads'
    /// matrices whose rows are so short that they would take no fewer bytes.
    fn dtype_of(self, spec: &TensorSpec) -> Option<DType> {
        let may_be_short = spec.role == Role::OfHeads;
        if spec.shape.len() != 2 || !spec.role.is_matrix() {
            return None;
        }
        let dtype = match (self, spec.role) {
            (Quantize::Q8, _) | (Quantize::Q4, Role::Embedding | Role::Head) => DType::Q8,
            (Quantize::Q4, _) => DType::Q4,
        };
        (!may_be_short || dtype.tensor_bytes(&spec.shape) < DType::Bf16.tensor_bytes(&spec.shape)).then_some(dtype)
    }
}

/// A tensor that is kept.
struct Kept {
    bytes: AlignedBytes,
    dtype: DType,
}

/// What a network takes of a checkpoint, by name: matrices in fewer bits, vectors as they were, but for those that are
/// kept in another form anyway.
pub struct Quantized {
    how: Quantize,
    tensors: HashMap<String, Kept>,
}

impl fmt::Debug for Quantized {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Quantized({}, {} tensors, {} bytes)", self.how, self.tensors.len(), self.size_bytes())
    }
}

impl Quantized {
    /// Quantises the matrices among `tensors` of `weights`, on all cores, and copies the others; `progress` is called
    /// with the bytes of each.
    ///
    /// # Errors
    /// A tensor that is not there, has another shape or is not of floats; an element that is not finite; too little
    /// memory.
    pub fn new(
        weights: &Weights,
        tensors: &[TensorSpec],
        how: Quantize,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Quantized, ModelError> {
        let mut quantized = HashMap::new();
        for spec @ TensorSpec { name, shape, .. } in tensors.iter().filter(|spec| !spec.role.is_made()) {
            // What is made in fewer bits stays so.
            let dtype = how.dtype_of(spec).filter(|_| in_fewer(weights, spec).is_none());
            // What is made of others is not kept beside what is made of it.
            let (kept, read) = match (weights.made(name, shape)?, dtype) {
                (Some((bytes, dtype)), None) => {
                    let read = bytes.len();
                    (Kept { bytes, dtype }, read)
                }
                (Some((bytes, of)), Some(dtype)) => {
                    let view = TensorView { dtype: of, shape, bytes: &bytes };
                    (Kept { bytes: in_fewer_bits(name, &view, dtype, &|_| ())?, dtype }, bytes.len())
                }
                (None, None) => {
                    let view = weights.expect(name, shape)?;
                    let mut bytes = AlignedBytes::zeroed(name, view.bytes.len())?;
                    bytes.copy_from_slice(view.bytes);
                    (Kept { bytes, dtype: view.dtype }, view.bytes.len())
                }
                (None, Some(dtype)) => {
                    let view = weights.expect(name, shape)?;
                    let bytes = in_fewer_bits(name, &view, dtype, &|part| weights.release(part))?;
                    (Kept { bytes, dtype }, view.bytes.len())
                }
            };
            // Not its own pages alone: a fault maps those around it, too.
            weights.release_all();
            progress(read as u64);
            quantized.insert(name.clone(), kept);
        }
        Ok(Quantized { how, tensors: quantized })
    }

    /// How.
    pub fn how(&self) -> Quantize {
        self.how
    }

    /// Bytes that the matrices among `tensors` of `weights` will take.
    pub fn needed(weights: &Weights, tensors: &[TensorSpec], how: Quantize) -> u64 {
        let dtype_of = |spec: &TensorSpec| in_fewer(weights, spec).or_else(|| how.dtype_of(spec));
        tensors.iter().filter_map(|spec| Some(dtype_of(spec)?.tensor_bytes(&spec.shape))).sum()
    }

    /// The bytes of tensor `name`, if it is kept here.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        Some(&self.tensors.get(name)?.bytes)
    }

    /// What tensor `name` is kept as, if it is here.
    pub fn dtype(&self, name: &str) -> Option<DType> {
        Some(self.tensors.get(name)?.dtype)
    }

    /// Bytes of all tensors kept.
    pub fn size_bytes(&self) -> u64 {
        self.tensors.values().map(|kept| kept.bytes.len() as u64).sum()
    }
}

/// The type of a tensor of which files have few bits an element, as it is made of these.
fn in_fewer(weights: &Weights, spec: &TensorSpec) -> Option<DType> {
    weights.dtype(&spec.name, &spec.shape).ok().filter(|dtype| dtype.lines().is_some())
}

/// Matrix `view`, called `name`, as `dtype`; `release` as [`matrix`] has it.
fn in_fewer_bits(
    name: &str,
    view: &TensorView<'_>,
    dtype: DType,
    release: &(dyn Fn(&[u8]) + Sync),
) -> Result<AlignedBytes, ModelError> {
    let mut bytes = AlignedBytes::zeroed(name, dtype.tensor_bytes(view.shape) as usize)?;
    match matrix(view, dtype, &mut bytes, release) {
        Some(at) => Err(ModelError::NotFinite { name: name.to_owned(), at }),
        None => Ok(bytes),
    }
}

/// Bytes of a matrix that a thread reads before it gives their pages back.
const PIECE_BYTES: usize = 1 << 20;

/// Quantises a matrix into `out`, zeros, as `dtype`, calling `release` with each part of it that has been read; the
/// first element that is not finite, if there is one.
fn matrix(view: &TensorView<'_>, dtype: DType, out: &mut [u8], release: &(dyn Fn(&[u8]) + Sync)) -> Option<[usize; 2]> {
    let &[rows, k] = view.shape else { unreachable!("the caller asked for a matrix") };
    if rows == 0 || k == 0 {
        return None;
    }
    let quantize_row = row(dtype);
    let out_bytes = dtype.tensor_bytes(&[k]) as usize;
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from).min(rows);
    let per_thread = rows.div_ceil(n_threads);
    // The first of them all, whichever thread comes upon it.
    let bad = AtomicUsize::new(usize::MAX);
    std::thread::scope(|scope| {
        let row_bytes = k * view.dtype.size_bytes();
        let piece = (PIECE_BYTES / row_bytes).max(1);
        let parts = out.chunks_mut(per_thread * out_bytes).zip(view.bytes.chunks(per_thread * row_bytes));
        for (part, (out, bytes)) in parts.enumerate() {
            let bad = &bad;
            spawned(scope, move || {
                let mut wide = vec![0f32; k];
                let pieces = out.chunks_mut(piece * out_bytes).zip(bytes.chunks(piece * row_bytes));
                for (number, (out, bytes)) in pieces.enumerate() {
                    for (r, (out, bytes)) in out.chunks_mut(out_bytes).zip(bytes.chunks(row_bytes)).enumerate() {
                        widen(view.dtype, bytes, &mut wide);
                        if let Err(column) = quantize_row(&wide, out) {
                            let r = part * per_thread + number * piece + r;
                            bad.fetch_min(r * k + column, Ordering::Relaxed);
                            return;
                        }
                    }
                    release(bytes);
                }
            });
        }
    });
    match bad.into_inner() {
        usize::MAX => None,
        at => Some([at / k, at % k]),
    }
}

/// Adding 1.5 * 2^23 rounds to a whole number, in one instruction on every machine; the sum's last byte is that
/// number's.
const SHIFT: f32 = 12_582_912.0;

/// Quantises one row into zeros, laid out as its type says; the first element that is not finite as the error.
type QuantizeRow = fn(&[f32], &mut [u8]) -> Result<(), usize>;

fn row(dtype: DType) -> QuantizeRow {
    match dtype {
        DType::Q8 => eight_bits::row,
        DType::Q4 => four_bits::row,
        _ => unreachable!("nothing is quantised to {dtype}"),
    }
}

/// The largest magnitude of a block.
///
/// # Errors
/// The first element that is not finite.
fn largest(block: &[f32]) -> Result<f32, usize> {
    // Magnitudes compare as their bits do, and those of infinity and NaN as more than any.
    let largest = f32::from_bits(block.iter().fold(0, |largest, w| largest.max(w.abs().to_bits())));
    if largest.is_finite() { Ok(largest) } else { Err(block.iter().position(|w| !w.is_finite()).unwrap_or(0)) }
}

pub(super) fn widen(dtype: DType, bytes: &[u8], out: &mut [f32]) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    /// In pieces, by several threads, as row by row; all of the file's bytes are given back.
    #[test]
    fn a_matrix_in_pieces_is_its_rows() {
        for dtype in [DType::Q8, DType::Q4] {
            in_pieces(dtype);
        }
    }

    fn in_pieces(dtype: DType) {
        let mut random = SmallRng::seed_from_u64(3);
        let shape = [2003, 301];
        let mut weights: Vec<f32> = (0..shape[0] * shape[1]).map(|_| random.random_range(-1.0..1.0)).collect();
        let quantize = |weights: &[f32]| {
            let bytes: &[u8] = bytemuck::cast_slice(weights);
            let released = std::sync::Mutex::new(Vec::new());
            let mut out = vec![0; dtype.tensor_bytes(&shape) as usize];
            let bad = matrix(&TensorView { dtype: DType::F32, shape: &shape, bytes }, dtype, &mut out, &|part| {
                let first = part.as_ptr() as usize - bytes.as_ptr() as usize;
                released.lock().expect("no panics").push(first..first + part.len());
            });
            let mut released = released.into_inner().expect("no panics");
            released.sort_by_key(|part| part.start);
            (out, bad, released)
        };
        let (out, bad, released) = quantize(&weights);
        assert_eq!(bad, None);
        for (weights, out) in weights.chunks(shape[1]).zip(out.chunks(dtype.tensor_bytes(&shape[1..]) as usize)) {
            let mut expected = vec![0; out.len()];
            assert_eq!(row(dtype)(weights, &mut expected), Ok(()));
            assert!(out == expected);
        }
        assert_eq!(released.iter().fold(0, |at, part| if part.start == at { part.end } else { at }), 4 * weights.len());
        assert!(released.len() > 2 && released.iter().all(|part| part.len() <= PIECE_BYTES));
        weights[1999 * shape[1] + 7] = f32::NAN;
        weights[1999 * shape[1] + 300] = f32::INFINITY;
        assert_eq!(quantize(&weights).1, Some([1999, 7]));
    }

    #[test]
    fn vectors_are_kept_as_they_are() {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-qwen2");
        let folder = super::super::ModelFolder::open(dir).expect("the fixture");
        let (weights, tensors) = (folder.weights().expect("weights"), super::super::layout::tensors(folder.config()));
        for how in [Quantize::Q8, Quantize::Q4] {
            let mut read = 0;
            let quantized = Quantized::new(weights, &tensors, how, &mut |bytes| read += bytes).expect("quantised");
            let mut in_matrices = 0;
            for spec in &tensors {
                let (kept, file) =
                    (quantized.get(&spec.name).expect("all is kept"), weights.get(&spec.name).expect("there"));
                let is_matrix = spec.shape.len() == 2;
                let expected = match (how, spec.role) {
                    _ if !is_matrix => file.dtype,
                    (Quantize::Q4, Role::Linear) => DType::Q4,
                    _ => DType::Q8,
                };
                assert_eq!(quantized.dtype(&spec.name), Some(expected), "{how}: {}", spec.name);
                assert_eq!(kept.len() as u64, expected.tensor_bytes(&spec.shape), "{how}: {}", spec.name);
                assert_eq!(kept == file.bytes, !is_matrix, "{how}: {}", spec.name);
                in_matrices += if is_matrix { kept.len() as u64 } else { 0 };
            }
            assert_eq!(read, weights.size_bytes() as u64);
            assert_eq!(Quantized::needed(weights, &tensors, how), in_matrices);
        }
    }
}
