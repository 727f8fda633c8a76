//! Tensors that files have in another form than the network reads them in: they are made of these, in memory, when they are first wanted.
//!
//! gpt-oss's experts are such, all of a layer's in one tensor. Gates and ups take turns in it, so an expert's matrix is every second row, or as
//! `transformers` writes it, every second column. Published files have the matrices in MXFP4: blocks of 32 elements along a row, sixteen bytes, an element's
//! E2M1 in half of one, the lower half first, and a byte that says which power of two they share (E8M0, OCP Microscaling Formats 1.0).

use perpetua_shared::DType;
use perpetua_shared::dtype::{Q4, Q4_BLOCK, q4_at};

use super::aligned::AlignedBytes;
use super::config::{DecoderConfig, ModelConfig};
use super::error::ModelError;
use super::layout::{ExpertNames, Role, TensorSpec};

/// Bytes of a block's elements.
const BLOCK_BYTES: usize = Q4_BLOCK / 2;

/// A tensor that is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Remade {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) of: Origin,
    /// Matrices, or rows, of what it is made of.
    pub(super) matrices: usize,
}

/// What it is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// Rows of matrix `matrix` of `blocks`, `[matrices, rows, k / 32, 16]`, with `scales`, `[matrices, rows, k / 32]`.
    Mxfp4 { blocks: String, scales: String, matrix: usize, which: Every },
    /// Columns of matrix `matrix` of `stack`, `[matrices, k, columns]`.
    Columns { stack: String, matrix: usize, which: Every },
    /// Of each row of `rows`, `[matrices, n]`, elements.
    Elements { rows: String, which: Every },
}

/// Every `step`th from `first` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Every {
    first: usize,
    step: usize,
}

impl Every {
    const ONE: Every = Every { first: 0, step: 1 };

    fn nth(self, n: usize) -> usize {
        self.first + n * self.step
    }
}

/// Where experts' matrices are, in a layer.
const GATE_UP: &str = "mlp.experts.gate_up_proj";
const DOWN: &str = "mlp.experts.down_proj";

/// Experts' biases as the network reads them, in a layer: of gates and ups, `[experts, intermediate]`, and, as files have it, of downs, `[experts, hidden]`.
pub(super) const BIASES: [&str; 3] =
    ["mlp.experts.gate_proj_bias", "mlp.experts.up_proj_bias", "mlp.experts.down_proj_bias"];

/// The layers of a decoder whose experts are remade.
fn layers(c: &DecoderConfig) -> impl Iterator<Item = usize> {
    let experts = c.experts.as_ref().filter(|experts| experts.limited.is_some());
    experts.into_iter().flat_map(|experts| (0..experts.layers.len()).filter(|layer| experts.layers[*layer]))
}

/// What is made for a network of this configuration, layer by layer.
pub(super) fn of(config: &ModelConfig) -> Vec<Remade> {
    let ModelConfig::Decoder(c) = config else { return Vec::new() };
    let Some(experts) = &c.experts else { return Vec::new() };
    let names = ExpertNames::of(c.architecture);
    let (n, k) = (experts.intermediate_size, c.hidden_size);
    let gates_and_ups = [Every { first: 0, step: 2 }, Every { first: 1, step: 2 }];
    let mut remade = Vec::new();
    for layer in layers(c).map(|layer| format!("model.layers.{layer}")) {
        let matrices = [(GATE_UP, gates_and_ups[0], [n, k]), (GATE_UP, gates_and_ups[1], [n, k])];
        let matrices = matrices.into_iter().chain([(DOWN, Every::ONE, [k, n])]).enumerate();
        for (part, (stack, which, shape)) in matrices {
            let stack = format!("{layer}.{stack}");
            remade.extend((0..experts.n).map(|matrix| {
                let of = match experts.is_mxfp4 {
                    true => Origin::Mxfp4 {
                        blocks: format!("{stack}_blocks"),
                        scales: format!("{stack}_scales"),
                        matrix,
                        which,
                    },
                    false => Origin::Columns { stack: stack.clone(), matrix, which },
                };
                Remade { name: names.matrix(part, &layer, matrix), shape: shape.to_vec(), of, matrices: experts.n }
            }));
        }
        remade.extend(gates_and_ups.into_iter().zip(BIASES).map(|(which, name)| Remade {
            name: format!("{layer}.{name}"),
            shape: vec![experts.n, n],
            of: Origin::Elements { rows: format!("{layer}.{GATE_UP}_bias"), which },
            matrices: experts.n,
        }));
    }
    remade
}

/// The tensors that files have for these, layer by layer.
pub(super) fn files(config: &ModelConfig) -> Vec<TensorSpec> {
    let ModelConfig::Decoder(c) = config else { return Vec::new() };
    let Some(experts) = &c.experts else { return Vec::new() };
    let (all, n, k) = (experts.n, experts.intermediate_size, c.hidden_size);
    let mut specs = Vec::new();
    let mut add = |name: String, shape: &[usize], role| specs.push(TensorSpec { name, shape: shape.to_vec(), role });
    for layer in layers(c).map(|layer| format!("model.layers.{layer}")) {
        for (stack, [rows, columns]) in [(GATE_UP, [2 * n, k]), (DOWN, [k, n])] {
            if experts.is_mxfp4 {
                let blocks = columns / Q4_BLOCK;
                add(format!("{layer}.{stack}_blocks"), &[all, rows, blocks, BLOCK_BYTES], Role::Blocks);
                add(format!("{layer}.{stack}_scales"), &[all, rows, blocks], Role::BlockScales);
            } else {
                add(format!("{layer}.{stack}"), &[all, columns, rows], Role::Linear);
            }
        }
        add(format!("{layer}.{GATE_UP}_bias"), &[all, 2 * n], Role::Bias);
    }
    specs
}

/// A tensor that another is made of: its elements' type, its shape, and its bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part<'a> {
    pub(super) dtype: DType,
    pub(super) shape: &'a [usize],
    pub(super) bytes: &'a [u8],
}

impl Remade {
    /// The tensors that it is made of.
    pub(super) fn sources(&self) -> Vec<&str> {
        match &self.of {
            Origin::Mxfp4 { blocks, scales, .. } => vec![blocks, scales],
            Origin::Columns { stack: one, .. } | Origin::Elements { rows: one, .. } => vec![one],
        }
    }

    /// The shape that `source` must have.
    pub(super) fn source_shape(&self, source: &str) -> Vec<usize> {
        let matrices = self.matrices;
        match (&self.of, &self.shape[..]) {
            (Origin::Mxfp4 { blocks, which, .. }, [rows, k]) => {
                let (rows, in_row) = (rows * which.step, k / Q4_BLOCK);
                if source == blocks { vec![matrices, rows, in_row, BLOCK_BYTES] } else { vec![matrices, rows, in_row] }
            }
            (Origin::Columns { which, .. }, [columns, k]) => vec![matrices, *k, columns * which.step],
            (Origin::Elements { which, .. }, [_, n]) => vec![matrices, n * which.step],
            _ => unreachable!("what is made has two dimensions"),
        }
    }

    /// Whether it is made of tensors of this type.
    pub(super) fn takes(&self, dtype: DType) -> bool {
        if matches!(self.of, Origin::Mxfp4 { .. }) { dtype == DType::U8 } else { dtype.is_float() }
    }

    /// The type that it is made in, of sources of type `dtype`.
    pub(super) fn dtype(&self, dtype: DType) -> DType {
        if matches!(self.of, Origin::Mxfp4 { .. }) { DType::Mx4 } else { dtype }
    }

    /// It, made of its `sources`, which have their shapes.
    ///
    /// # Errors
    /// No memory; a scale that is no number.
    pub(super) fn make(&self, sources: &[Part<'_>]) -> Result<AlignedBytes, ModelError> {
        let [rows, k] = self.shape[..] else { unreachable!("what is made has two dimensions") };
        let dtype = self.dtype(sources[0].dtype);
        let mut made = AlignedBytes::zeroed(&self.name, dtype.tensor_bytes(&self.shape) as usize)?;
        match &self.of {
            Origin::Mxfp4 { matrix, which, .. } => {
                let [blocks, scales] = [sources[0].bytes, sources[1].bytes];
                let in_row = k / Q4_BLOCK;
                for (r, out) in made.chunks_exact_mut(Q4.row_bytes(k)).enumerate() {
                    let row = matrix * sources[0].shape[1] + which.nth(r);
                    let scales = &scales[row * in_row..][..in_row];
                    if let Some(block) = scales.iter().position(|scale| *scale == u8::MAX) {
                        return Err(ModelError::NotFinite { name: self.name.clone(), at: [r, block * Q4_BLOCK] });
                    }
                    lines(&blocks[row * in_row * BLOCK_BYTES..][..in_row * BLOCK_BYTES], scales, out);
                }
            }
            Origin::Columns { matrix, which, .. } => {
                let (bytes, columns) = (dtype.size_bytes(), sources[0].shape[2]);
                let from = &sources[0].bytes[matrix * k * columns * bytes..][..k * columns * bytes];
                transposed([rows, k], *which, bytes, (from, columns), &mut made);
            }
            Origin::Elements { which, .. } => {
                let bytes = dtype.size_bytes();
                for (at, out) in made.chunks_exact_mut(bytes).enumerate() {
                    let from = at / k * sources[0].shape[1] + which.nth(at % k);
                    out.copy_from_slice(&sources[0].bytes[from * bytes..][..bytes]);
                }
            }
        }
        Ok(made)
    }
}

/// A row of MXFP4 as [`DType::Mx4`] has it.
fn lines(blocks: &[u8], scales: &[u8], out: &mut [u8]) {
    for (number, (block, scale)) in blocks.chunks_exact(BLOCK_BYTES).zip(scales).enumerate() {
        let (first, shift, scale_at) = q4_at(number * Q4_BLOCK);
        // A block's elements lie one after the other, in one half of their bytes.
        let to = &mut out[first..][..Q4_BLOCK];
        for (pair, two) in to.chunks_exact_mut(2).zip(block) {
            pair[0] |= (two & 15) << shift;
            pair[1] |= (two >> 4) << shift;
        }
        out[scale_at..][..2].copy_from_slice(&half_of_power(*scale).to_le_bytes());
    }
}

/// 2^(number - 128), as a bf16.
fn half_of_power(number: u8) -> u16 {
    match number {
        // Two that are subnormal.
        0 => 0x20,
        1 => 0x40,
        _ => (u16::from(number) - 1) << 7,
    }
}

/// Columns of a matrix of `k` rows of `columns` elements, of so many bytes each, as rows of `k`.
fn transposed([rows, k]: [usize; 2], which: Every, bytes: usize, (from, columns): (&[u8], usize), out: &mut [u8]) {
    // So many at a time that what is read of a line is still in the first cache when the next of its elements are wanted.
    const TOGETHER: usize = 32;
    for first in (0..rows).step_by(TOGETHER) {
        let end = rows.min(first + TOGETHER);
        for (at, row) in from.chunks_exact(columns * bytes).enumerate() {
            for r in first..end {
                let element = &row[which.nth(r) * bytes..][..bytes];
                out[(r * k + at) * bytes..][..bytes].copy_from_slice(element);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use perpetua_shared::dtype::MX4_LEVELS;
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    /// Element `i` of a row, by the layout's description.
    fn element(row: &[u8], i: usize) -> f64 {
        let (byte, shift, scale) = q4_at(i);
        let level = MX4_LEVELS[usize::from(row[byte] >> shift & 15)];
        f64::from(level) * f64::from(bf16::from_le_bytes([row[scale], row[scale + 1]]).to_f32())
    }

    /// By the format's definition: a sign, two bits of exponent with a bias of 1, one of mantissa.
    fn e2m1(number: u8) -> f64 {
        let (sign, exponent, mantissa) = (number >> 3, number >> 1 & 3, f64::from(number & 1));
        let size = match exponent {
            0 => 0.5 * mantissa,
            _ => (1.0 + 0.5 * mantissa) * f64::from(1 << (exponent - 1)),
        };
        if sign == 1 { -size } else { size }
    }

    #[test]
    fn rows_of_mxfp4_are_every_number_times_every_power() {
        let mut random = SmallRng::seed_from_u64(1);
        let (matrices, rows, k) = (3, 4, 5 * Q4_BLOCK);
        let blocks: Vec<u8> = (0..matrices * 2 * rows * k / 2).map(|_| random.random()).collect();
        let scales: Vec<u8> = (0..matrices * 2 * rows * k / Q4_BLOCK).map(|_| random.random_range(0..255)).collect();
        for (matrix, first) in [(0, 0), (1, 1), (2, 0)] {
            let which = Every { first, step: 2 };
            let of = Origin::Mxfp4 { blocks: "blocks".into(), scales: "scales".into(), matrix, which };
            let remade = Remade { name: "made".into(), shape: vec![rows, k], of, matrices };
            let shapes = remade.sources().into_iter().map(|source| remade.source_shape(source));
            let shapes: Vec<_> = shapes.collect();
            assert_eq!(shapes, [vec![3, 8, 5, 16], vec![3, 8, 5]]);
            let parts = |scales| {
                let of = |shape, bytes| Part { dtype: DType::U8, shape, bytes };
                [of(&shapes[0], &blocks), of(&shapes[1], scales)]
            };
            let made = remade.make(&parts(&scales)).expect("numbers");
            for (r, row) in made.chunks_exact(Q4.row_bytes(k)).enumerate() {
                for i in 0..k {
                    let at = (matrix * 2 * rows + first + 2 * r) * k + i;
                    let number = blocks[at / 2] >> (4 * (at % 2)) & 15;
                    let expected = e2m1(number) * 2f64.powi(i32::from(scales[at / Q4_BLOCK]) - 127);
                    assert_eq!(element(row, i), expected, "row {r}, element {i}");
                }
            }
            let mut bad = scales.clone();
            bad[(matrix * 2 * rows + first + 2) * 5 + 3] = 255;
            let error = remade.make(&parts(&bad)).expect_err("NaN").to_string();
            assert!(error.contains("[1, 96] is not finite"), "{error}");
        }
    }

    #[test]
    fn columns_are_rows() {
        let (matrices, k, n) = (2, 37, 41);
        let elements: Vec<u8> = (0..matrices * k * 2 * n).flat_map(|i| (i as u16).to_le_bytes()).collect();
        for (matrix, first) in [(0, 1), (1, 0)] {
            let which = Every { first, step: 2 };
            let of = Origin::Columns { stack: "stack".into(), matrix, which };
            let remade = Remade { name: "made".into(), shape: vec![n, k], of, matrices };
            let shape = remade.source_shape("stack");
            assert_eq!(shape, [2, 37, 82]);
            let made = remade.make(&[Part { dtype: DType::Bf16, shape: &shape, bytes: &elements }]).expect("memory");
            for (at, found) in made.chunks_exact(2).enumerate() {
                let expected = (matrix * k + at % k) * 2 * n + first + 2 * (at / k);
                assert_eq!(usize::from(u16::from_le_bytes([found[0], found[1]])), expected);
            }
        }
    }

    #[test]
    fn elements_take_turns() {
        let elements: Vec<u8> = (0..24u32).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let of = Origin::Elements { rows: "rows".into(), which: Every { first: 1, step: 2 } };
        let remade = Remade { name: "made".into(), shape: vec![3, 4], of, matrices: 3 };
        assert_eq!(remade.source_shape("rows"), [3, 8]);
        let made = remade.make(&[Part { dtype: DType::F32, shape: &[3, 8], bytes: &elements }]).expect("memory");
        let found: Vec<f32> = bytemuck::cast_slice(&made).to_vec();
        assert_eq!(found, [1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0, 17.0, 19.0, 21.0, 23.0]);
    }
}
