//! Weights in 8 bits: half the bytes of bf16, chosen when a model is opened.
//!
//! Every matrix of a text generation model (projections, experts, embedding table, head; no router) is kept as [`DType::Q8`]: blocks of 64
//! signed bytes along a row with a scale in f32 each (see [`q8_block_at`]), its last mantissa bits cleared so that products
//! of byte and scale are exact. Norms and biases stay as they are. Symmetric rounding to nearest; an element is off by at
//! most half a scale, 0.42 % of its block's largest.
//!
//! The scale is that of [`CANDIDATES`] with the least squared error. Each makes the block's largest element a whole number,
//! 127 or one of those below it. How well the other 63 then lie is a matter of luck, so the best of eight draws pays although
//! seven are coarser: 12 % less squared error than with 127 alone on normal weights, 10 % on such with outliers.
//!
//! Everything is owned: the mapped file is read once, its pages are given back as that goes on, and the vectors are copied, so
//! that no page of it is touched again. (A vector would bring as many neighbours as the system maps at once.)

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytemuck::Zeroable;
use half::{bf16, f16};
use perpetua_shared::DType;
use perpetua_shared::dtype::{Q8_BLOCK, q8_block_at, q8_row_bytes};

use super::error::ModelError;
use super::layout::{Role, TensorSpec};
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

/// What a network takes of a checkpoint, by name: matrices in 8 bits, vectors as they were, but for those that are kept in another form
/// anyway.
pub struct Quantized {
    tensors: HashMap<String, (Vec<Line>, usize)>,
}

impl std::fmt::Debug for Quantized {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Quantized({} tensors, {} bytes)", self.tensors.len(), self.size_bytes())
    }
}

impl Quantized {
    /// Quantises the matrices among `tensors` of `weights`, on all cores, and copies the others; `progress` is called with the
    /// bytes of each.
    ///
    /// # Errors
    /// A tensor that is not there, has another shape or is not of floats; an element that is not finite; too little memory.
    pub fn new(
        weights: &Weights,
        tensors: &[TensorSpec],
        progress: &mut dyn FnMut(u64),
    ) -> Result<Quantized, ModelError> {
        let mut quantized = HashMap::new();
        for spec @ TensorSpec { name, shape, .. } in tensors.iter().filter(|spec| spec.role != Role::NormLessOne) {
            let view = weights.expect(name, shape)?;
            let bytes = kept_bytes(spec, &view);
            let mut lines = Vec::new();
            lines
                .try_reserve_exact(bytes.div_ceil(64))
                .map_err(|_| ModelError::NoMemory { name: name.clone(), bytes: bytes as u64 })?;
            lines.resize(bytes.div_ceil(64), Line::zeroed());
            let out = &mut bytemuck::cast_slice_mut(&mut lines)[..bytes];
            if !is_matrix(spec) {
                out.copy_from_slice(view.bytes);
            } else if let Some(at) = matrix(&view, out, &|part| weights.release(part)) {
                return Err(ModelError::NotFinite { name: name.clone(), at });
            }
            // Not its own pages alone: a fault maps those around it, too.
            weights.release_all();
            progress(view.bytes.len() as u64);
            quantized.insert(name.clone(), (lines, bytes));
        }
        Ok(Quantized { tensors: quantized })
    }

    /// Bytes that the matrices among `tensors` will take.
    pub fn needed(tensors: &[TensorSpec]) -> u64 {
        tensors.iter().filter(|spec| is_matrix(spec)).map(|spec| DType::Q8.tensor_bytes(&spec.shape)).sum()
    }

    /// The bytes of tensor `name`, if it is kept here.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        let (lines, bytes) = self.tensors.get(name)?;
        Some(&bytemuck::cast_slice(lines)[..*bytes])
    }

    /// Bytes of all tensors kept.
    pub fn size_bytes(&self) -> u64 {
        self.tensors.values().map(|(_, bytes)| *bytes as u64).sum()
    }
}

/// A router's is none: a choice is easily another, and its bytes are few.
fn is_matrix(spec: &TensorSpec) -> bool {
    spec.shape.len() == 2 && spec.role != Role::Router
}

/// Bytes of the tensor `view` as it is kept.
fn kept_bytes(spec: &TensorSpec, view: &TensorView<'_>) -> usize {
    if is_matrix(spec) { DType::Q8.tensor_bytes(&spec.shape) as usize } else { view.bytes.len() }
}

/// Bytes of a matrix that a thread reads before it gives their pages back.
const PIECE_BYTES: usize = 1 << 20;

/// Quantises a matrix into `out`, calling `release` with each part of it that has been read; the first element that is not
/// finite, if there is one.
fn matrix(view: &TensorView<'_>, out: &mut [u8], release: &(dyn Fn(&[u8]) + Sync)) -> Option<[usize; 2]> {
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
        let piece = (PIECE_BYTES / row_bytes).max(1);
        let parts = out.chunks_mut(per_thread * q8_row_bytes(k)).zip(view.bytes.chunks(per_thread * row_bytes));
        for (part, (out, bytes)) in parts.enumerate() {
            let bad = &bad;
            scope.spawn(move || {
                let mut wide = vec![0f32; k];
                let pieces = out.chunks_mut(piece * q8_row_bytes(k)).zip(bytes.chunks(piece * row_bytes));
                for (number, (out, bytes)) in pieces.enumerate() {
                    for (r, (out, bytes)) in out.chunks_mut(q8_row_bytes(k)).zip(bytes.chunks(row_bytes)).enumerate() {
                        widen(view.dtype, bytes, &mut wide);
                        if let Err(column) = row(&wide, out) {
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

/// Whole numbers that a block's largest element may become.
const CANDIDATES: [f32; 8] = [127.0, 126.0, 125.0, 124.0, 123.0, 122.0, 121.0, 120.0];

/// Adding 1.5 * 2^23 rounds to a whole number, in one instruction on every machine; the sum's last byte is that number's.
const SHIFT: f32 = 12_582_912.0;

/// Quantises one row into zeros, laid out as [`q8_block_at`] says; the first element that is not finite as the error.
fn row(weights: &[f32], out: &mut [u8]) -> Result<(), usize> {
    for (i, part) in weights.chunks(Q8_BLOCK).enumerate() {
        let mut block = [0f32; Q8_BLOCK];
        block[..part.len()].copy_from_slice(part);
        // Magnitudes compare as their bits do, and those of infinity and NaN as more than any.
        let largest = block.iter().fold(0, |largest, w| largest.max(w.abs().to_bits()));
        let largest = f32::from_bits(largest);
        if !largest.is_finite() {
            return Err(i * Q8_BLOCK + part.iter().position(|w| !w.is_finite()).unwrap_or(0));
        }
        if largest == 0.0 {
            continue;
        }
        let scale = best_scale(&block, largest);
        let [bytes, at] = q8_block_at(i);
        for (out, w) in out[bytes..][..Q8_BLOCK].iter_mut().zip(&block) {
            *out = (w / scale + SHIFT).to_bits() as u8;
        }
        out[at..][..4].copy_from_slice(&scale.to_le_bytes());
    }
    Ok(())
}

/// The scale of a block whose largest magnitude is `largest`; see the module head.
fn best_scale(block: &[f32; Q8_BLOCK], largest: f32) -> f32 {
    // 17 significant bits, rounded up so that no quotient passes its candidate.
    let scales = CANDIDATES.map(|whole| f32::from_bits((largest / whole).to_bits().next_multiple_of(1 << 7)));
    let inverses = scales.map(|scale| 1.0 / scale);
    // A vector's lanes are the candidates, so that nothing is summed across them; two sums, so that neither waits.
    let mut errors = [[0f32; CANDIDATES.len()]; 2];
    for pair in block.chunks_exact(2) {
        for (w, errors) in pair.iter().zip(&mut errors) {
            for (error, inverse) in errors.iter_mut().zip(&inverses) {
                let exact = w * inverse;
                let off = exact - ((exact + SHIFT) - SHIFT);
                *error += off * off;
            }
        }
    }
    let mut best = (f32::INFINITY, scales[0]);
    for (c, scale) in scales.into_iter().enumerate() {
        // In squares of the first scale. NaN, of scales so small that they have no inverse, is less than nothing.
        let error = (errors[0][c] + errors[1][c]) * (CANDIDATES[0] / CANDIDATES[c]).powi(2);
        if error < best.0 {
            best = (error, scale);
        }
    }
    best.1
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

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
                prop_assert!(off <= f64::from(largest) / 120.0 * 0.502, "element {i}: {w} is off by {off}");
            }
            let padding = (k..k.next_multiple_of(Q8_BLOCK)).map(|i| out[q8_block_at(i / Q8_BLOCK)[0] + i % Q8_BLOCK]);
            prop_assert!(padding.into_iter().all(|b| b == 0), "padding must be zero");
        }
    }

    /// Against the scale that makes the largest element 127, which needs no search.
    #[test]
    fn the_best_of_several_scales_is_closer() {
        let mut random = SmallRng::seed_from_u64(7);
        let mut normal = move || -> f64 { (0..12).map(|_| random.random_range(-0.5..0.5f64)).sum() };
        for kind in ["normal", "with outliers"] {
            // One in twenty three times as wide: outliers, as trained matrices have them.
            let width = |i: usize| if kind == "with outliers" && i.is_multiple_of(20) { 0.06 } else { 0.02 };
            let weights: Vec<f32> = (0..1 << 17).map(|i| bf16::from_f64(width(i) * normal()).to_f32()).collect();
            let mut out = vec![0; q8_row_bytes(weights.len())];
            assert_eq!(row(&weights, &mut out), Ok(()));
            let (mut found, mut plain) = (0.0, 0.0);
            for (b, block) in weights.chunks(Q8_BLOCK).enumerate() {
                let scale = block.iter().fold(0f32, |largest, w| largest.max(w.abs())) / 127.0;
                for (i, w) in block.iter().enumerate() {
                    found += f64::from(element(&out, b * Q8_BLOCK + i) - w).powi(2);
                    plain += f64::from((w / scale).round() * scale - w).powi(2);
                }
            }
            println!("{kind}: {:.4} of the squared error", found / plain);
            assert!(found < 0.92 * plain, "{kind}: {found:e}, {plain:e} with the largest at 127");
        }
    }

    #[test]
    fn blocks_of_extremes_are_kept() {
        // Zeros, scales without an inverse, squares that overflow: each block is close to what it was.
        for largest in [0.0, 1e-44, 1e-39, 3e38f32] {
            let weights: Vec<f32> = (0..Q8_BLOCK).map(|i| largest * (i as f32 / 31.5 - 1.0)).collect();
            let mut out = vec![0; q8_row_bytes(Q8_BLOCK)];
            assert_eq!(row(&weights, &mut out), Ok(()));
            for (i, w) in weights.iter().enumerate() {
                // The least scale there is has 17 bits too.
                assert!((element(&out, i) - w).abs() <= (largest / 239.0).max(1e-43), "{largest:e}: element {i}");
            }
        }
    }

    #[test]
    fn an_infinite_element_is_named() {
        let mut weights = vec![0.5; 130];
        weights[97] = f32::NEG_INFINITY;
        assert_eq!(row(&weights, &mut vec![0; q8_row_bytes(130)]), Err(97));
    }

    /// In pieces, by several threads, as row by row; all of the file's bytes are given back.
    #[test]
    fn a_matrix_in_pieces_is_its_rows() {
        let mut random = SmallRng::seed_from_u64(3);
        let shape = [2003, 301];
        let mut weights: Vec<f32> = (0..shape[0] * shape[1]).map(|_| random.random_range(-1.0..1.0)).collect();
        let quantize = |weights: &[f32]| {
            let bytes: &[u8] = bytemuck::cast_slice(weights);
            let released = std::sync::Mutex::new(Vec::new());
            let mut out = vec![0; DType::Q8.tensor_bytes(&shape) as usize];
            let bad = matrix(&TensorView { dtype: DType::F32, shape: &shape, bytes }, &mut out, &|part| {
                let first = part.as_ptr() as usize - bytes.as_ptr() as usize;
                released.lock().expect("no panics").push(first..first + part.len());
            });
            let mut released = released.into_inner().expect("no panics");
            released.sort_by_key(|part| part.start);
            (out, bad, released)
        };
        let (out, bad, released) = quantize(&weights);
        assert_eq!(bad, None);
        for (weights, out) in weights.chunks(shape[1]).zip(out.chunks(q8_row_bytes(shape[1]))) {
            let mut expected = vec![0; out.len()];
            assert_eq!(row(weights, &mut expected), Ok(()));
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
        let mut read = 0;
        let quantized = Quantized::new(weights, &tensors, &mut |bytes| read += bytes).expect("quantised");
        for spec in &tensors {
            let (kept, file) =
                (quantized.get(&spec.name).expect("all is kept"), weights.get(&spec.name).expect("there"));
            let expected = if is_matrix(spec) { DType::Q8.tensor_bytes(&spec.shape) } else { file.bytes.len() as u64 };
            assert_eq!(kept.len() as u64, expected, "{}", spec.name);
            assert_eq!(kept == file.bytes, !is_matrix(spec), "{}", spec.name);
        }
        assert_eq!(read, weights.size_bytes() as u64);
    }
}
