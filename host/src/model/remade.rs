//! Tensors that files have in another form than the network reads them in: they are made of these, in memory, when they
//! are first wanted.
//!
//! Matrices whose rows, and biases whose elements, stand in another order are such: those of queries and keys where
//! RoPE turns neighbours, and not one half of a head with the other (scores do not see in which order a head's elements
//! are), and those of Qwen3-Next's linear attention, which have what belongs to a key's head together.
//!
//! Latent attention has a part of each head of queries turned and the rest not, and keys and values by heads in one
//! matrix, of which it reads each key's with its columns as rows.
//!
//! Matrices in FP8 are such, see [`fp8`], and those in fewer bits, see [`integers`](super::integers); others may be made
//! of these.
//!
//! gpt-oss's experts are such, all of a layer's in one tensor. Gates and ups take turns in it, so an expert's matrix is
//! every second row, or as `transformers` writes it, every second column. Published files have the matrices in MXFP4:
//! blocks of 32 elements along a row, sixteen bytes, an element's E2M1 in half of one, the lower half first, and a byte
//! that says which power of two they share (E8M0, OCP Microscaling Formats 1.0).

use perpetua_shared::DType;
use perpetua_shared::dtype::{Q4, Q4_BLOCK, q4_at};
use safetensors::tensor::Dtype as FileDtype;

use super::aligned::AlignedBytes;
use super::config::{Architecture, DecoderConfig, DeltaRule, Heads, Latent, Mixer, ModelConfig, QkNorm};
use super::error::ModelError;
use super::fp8;
use super::integers::Integers;
use super::layout::{EXPERT_STACKS, ExpertNames, Role, TensorSpec, latent};
use super::weights::{FLOATS, float_dtype};

/// Bytes of a block's elements.
const BLOCK_BYTES: usize = Q4_BLOCK / 2;

/// A tensor that is made.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Remade {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) of: Origin,
    /// Matrices, or rows, of what it is made of.
    pub(super) matrices: usize,
}

/// What it is made of.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Origin {
    /// Rows of matrix `matrix` of `blocks`, `[matrices, rows, k / 32, 16]`, with `scales`, `[matrices, rows, k / 32]`.
    Mxfp4 { blocks: String, scales: String, matrix: usize, which: Every },
    /// Columns of matrix `matrix` of `stack`, `[matrices, k, columns]`.
    Columns { stack: String, matrix: usize, which: Every },
    /// Of each row of `rows`, `[matrices, n]`, elements.
    Elements { rows: String, which: Every },
    /// Rows of `rows`, in another order, or some of them.
    Rows { rows: String, runs: Vec<Run> },
    /// Of each of `heads` matrices whose rows follow each other in `rows`, the first rows, as columns.
    ColumnsOfHeads { rows: String, heads: usize },
    /// The matrix `elements` [in FP8](fp8), with `scales`, of shape `grid`, one for each block of so many rows and
    /// columns.
    Fp8 { elements: String, scales: String, grid: Vec<usize>, block: [usize; 2] },
    /// A matrix of [a few bits an element](super::integers).
    Integers(Box<Integers>),
}

/// So many of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    which: Every,
    n: usize,
}

impl Run {
    fn new(first: usize, step: usize, n: usize) -> Run {
        Run { which: Every { first, step }, n }
    }
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

const GATE_UP: &str = EXPERT_STACKS[0];
const DOWN: &str = EXPERT_STACKS[1];

/// Experts' biases as the network reads them, in a layer: of gates and ups, `[experts, intermediate]`, and, as files
/// have it, of downs, `[experts, hidden]`.
pub(super) const BIASES: [&str; 3] =
    ["mlp.experts.gate_proj_bias", "mlp.experts.up_proj_bias", "mlp.experts.down_proj_bias"];

/// The layers of a decoder whose experts are remade.
fn layers(c: &DecoderConfig) -> impl Iterator<Item = usize> {
    let experts = c.experts.as_ref().filter(|experts| experts.limited.is_some());
    experts.into_iter().flat_map(|experts| (0..experts.layers.len()).filter(|layer| experts.layers[*layer]))
}

/// What is made for a network of this configuration.
pub(super) fn of(config: &ModelConfig) -> Vec<Remade> {
    let ModelConfig::Decoder(c) = config else { return Vec::new() };
    experts(c).into_iter().chain(reordered(c).into_iter().map(|(remade, _)| remade)).collect()
}

/// What is made of tensors whose rows stand in another order, and each of these, layer by layer.
fn reordered(c: &DecoderConfig) -> Vec<(Remade, TensorSpec)> {
    let mut all = Vec::new();
    for layer in 0..c.n_layers {
        let mut add = |made: &str, of: &str, role, [from, columns]: [usize; 2], runs: Vec<Run>| {
            let name = |part: &str| format!("model.layers.{layer}.{part}");
            let n = runs.iter().map(|run| run.n).sum();
            let shape = |rows: usize| if role == Role::Bias { vec![rows] } else { vec![rows, columns] };
            let of = TensorSpec { name: name(of), shape: shape(from), role };
            let origin = Origin::Rows { rows: of.name.clone(), runs };
            all.push((Remade { name: name(made), shape: shape(n), of: origin, matrices: from }, of));
        };
        if let Some(of) = c.latent {
            all.extend(of_latent(c, of, layer));
            continue;
        }
        match c.mixer_of(layer) {
            None if c.architecture.turns_neighbours() => {
                assert!(
                    c.qk_norm == QkNorm::None && c.gate.is_none(),
                    "norms' factors and gates stand in files' order"
                );
                let Heads { n_kv, dim, rotary_dim, .. } = c.heads[layer];
                for (part, heads) in [("q", c.n_heads), ("k", n_kv)] {
                    let runs = || halves(heads, dim, rotary_dim);
                    let (name, n) = (format!("self_attn.{part}_proj"), heads * dim);
                    let (weight, bias) = (format!("{name}.weight"), format!("{name}.bias"));
                    add(&weight, &weight, Role::Linear, [n, c.hidden_size], runs());
                    if c.attention_bias {
                        add(&bias, &bias, Role::Bias, [n, 1], runs());
                    }
                }
            }
            Some(Mixer::DeltaRule(rule)) if c.architecture == Architecture::Qwen3Next => {
                let DeltaRule { key_heads: heads, value_heads, key_dim, value_dim, .. } = rule;
                let per_key = value_heads / heads;
                let (values, of_head) = (per_key * value_dim, 2 * (key_dim + per_key * value_dim));
                let of_all =
                    |first: usize, n: usize| (0..heads).map(move |head| Run::new(head * of_head + first, 1, n));
                let qkv = of_all(0, key_dim).chain(of_all(key_dim, key_dim)).chain(of_all(2 * key_dim, values));
                let z = of_all(2 * key_dim + values, values);
                let (of, role, from) =
                    ("linear_attn.in_proj_qkvz.weight", Role::Linear, [heads * of_head, c.hidden_size]);
                add("linear_attn.in_proj_qkv.weight", of, role, from, qkv.collect());
                add("linear_attn.in_proj_z.weight", of, role, from, z.collect());
                let part = |number: usize| {
                    (0..heads).map(move |head| Run::new((2 * head + number) * per_key, 1, per_key)).collect()
                };
                let (of, role, from) =
                    ("linear_attn.in_proj_ba.weight", Role::Router, [2 * value_heads, c.hidden_size]);
                add("linear_attn.in_proj_b.weight", of, role, from, part(0));
                add("linear_attn.in_proj_a.weight", of, role, from, part(1));
            }
            _ => {}
        }
    }
    all
}

/// What latent attention reads of layer `layer` that is made, and of what each.
fn of_latent(c: &DecoderConfig, of: Latent, layer: usize) -> Vec<(Remade, TensorSpec)> {
    let Latent { query_rank, rank, still_dim, turned_dim, value_dim, turns_neighbours } = of;
    let (heads, of_query, of_both) = (c.n_heads, of.head_dim(), still_dim + value_dim);
    let mut all = Vec::new();
    let mut add =
        |[made, of]: [&str; 2], kind, [from, columns]: [usize; 2], shape, origin: &dyn Fn(String) -> Origin| {
            let name = |part: &str| format!("model.layers.{layer}.{part}.{kind}");
            let (shape_of, role) = match kind {
                "bias" => (vec![from], Role::Bias),
                _ => (vec![from, columns], Role::Linear),
            };
            let of = TensorSpec { name: name(of), shape: shape_of, role };
            all.push((Remade { name: name(made), shape, of: origin(of.name.clone()), matrices: from }, of));
        };
    let rows = |runs: Vec<Run>| move |rows: String| Origin::Rows { rows, runs: runs.clone() };
    // Those of a head from `first` on that are turned, one half and the other.
    let turned = |first: usize| match turns_neighbours {
        true => vec![Run::new(first, 2, turned_dim / 2), Run::new(first + 1, 2, turned_dim / 2)],
        false => vec![Run::new(first, 1, turned_dim)],
    };
    if turns_neighbours {
        let runs = [vec![Run::new(0, 1, rank)], turned(rank)].concat();
        let names = [latent::KEYS_OF; 2];
        let (n, k) = (of.cached_dim(), c.hidden_size);
        add(names, "weight", [n, k], vec![n, k], &rows(runs.clone()));
        if c.attention_bias {
            add(names, "bias", [n, 1], vec![n], &rows(runs));
        }
    }
    let (queries, k) = (latent::QUERIES[usize::from(query_rank.is_some())], query_rank.unwrap_or(c.hidden_size));
    let from = [heads * of_query, k];
    let still = (0..heads).map(|head| Run::new(head * of_query, 1, still_dim)).collect();
    add([latent::STILL, queries], "weight", from, vec![heads * still_dim, k], &rows(still));
    let turned = (0..heads).flat_map(|head| turned(head * of_query + still_dim)).collect();
    add([latent::TURNED, queries], "weight", from, vec![heads * turned_dim, k], &rows(turned));
    let from = [heads * of_both, rank];
    let columns = |rows| Origin::ColumnsOfHeads { rows, heads };
    add([latent::KEYS, latent::BOTH], "weight", from, vec![heads * rank, still_dim], &columns);
    let values = (0..heads).map(|head| Run::new(head * of_both + still_dim, 1, value_dim)).collect();
    add([latent::VALUES, latent::BOTH], "weight", from, vec![heads * value_dim, rank], &rows(values));
    all
}

/// The elements of heads whose first `turned` are turned as neighbours, so that in their place are those of one half,
/// those of the other, and the rest.
fn halves(heads: usize, head_dim: usize, turned: usize) -> Vec<Run> {
    let of_head = |head: usize| {
        let first = head * head_dim;
        [
            Run::new(first, 2, turned / 2),
            Run::new(first + 1, 2, turned / 2),
            Run::new(first + turned, 1, head_dim - turned),
        ]
    };
    (0..heads).flat_map(of_head).collect()
}

/// gpt-oss's experts, layer by layer.
fn experts(c: &DecoderConfig) -> Vec<Remade> {
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

/// The tensors that files have for these.
pub(super) fn files(config: &ModelConfig) -> Vec<TensorSpec> {
    let ModelConfig::Decoder(c) = config else { return Vec::new() };
    let mut reordered: Vec<TensorSpec> = reordered(c).into_iter().map(|(_, spec)| spec).collect();
    // Of one several are made, one after the other.
    reordered.dedup();
    files_of_experts(c).into_iter().chain(reordered).collect()
}

fn files_of_experts(c: &DecoderConfig) -> Vec<TensorSpec> {
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
    pub(super) dtype: FileDtype,
    pub(super) shape: &'a [usize],
    pub(super) bytes: &'a [u8],
}

impl Remade {
    /// The tensors that it is made of.
    pub(super) fn sources(&self) -> Vec<&str> {
        match &self.of {
            Origin::Mxfp4 { blocks: elements, scales, .. } | Origin::Fp8 { elements, scales, .. } => {
                vec![elements, scales]
            }
            Origin::Integers(of) => of.sources(),
            Origin::Columns { stack: one, .. }
            | Origin::Elements { rows: one, .. }
            | Origin::Rows { rows: one, .. }
            | Origin::ColumnsOfHeads { rows: one, .. } => vec![one],
        }
    }

    /// The shape that `source` must have.
    pub(super) fn source_shape(&self, source: &str) -> Vec<usize> {
        let matrices = self.matrices;
        match (&self.of, &self.shape[..]) {
            (Origin::Fp8 { elements, grid, .. }, shape) => if source == elements { shape } else { grid }.to_vec(),
            (Origin::Integers(of), _) => of.source_shape(source),
            (Origin::Mxfp4 { blocks, which, .. }, [rows, k]) => {
                let (rows, in_row) = (rows * which.step, k / Q4_BLOCK);
                if source == blocks { vec![matrices, rows, in_row, BLOCK_BYTES] } else { vec![matrices, rows, in_row] }
            }
            (Origin::Columns { which, .. }, [columns, k]) => vec![matrices, *k, columns * which.step],
            (Origin::Elements { which, .. }, [_, n]) => vec![matrices, n * which.step],
            (Origin::Rows { .. }, [_, of_row @ ..]) => [&[matrices], of_row].concat(),
            (Origin::ColumnsOfHeads { heads, .. }, [columns, _]) => vec![matrices, columns / heads],
            _ => unreachable!("what is made has two dimensions"),
        }
    }

    /// The type that it is made in, of its first source in type `dtype`; none where that is not taken.
    pub(super) fn dtype(&self, dtype: FileDtype) -> Option<DType> {
        match (&self.of, dtype) {
            (Origin::Mxfp4 { .. }, FileDtype::U8) => Some(DType::Mx4),
            (Origin::Fp8 { .. }, FileDtype::F8_E4M3) => Some(DType::Bf16),
            (Origin::Mxfp4 { .. } | Origin::Fp8 { .. }, _) => None,
            (Origin::Integers(of), _) => Some(of.dtype()),
            (_, dtype) => float_dtype(dtype),
        }
    }

    /// Whether its `source` may be of this type.
    ///
    /// # Errors
    /// Those that it may be of.
    pub(super) fn check(&self, source: &str, dtype: FileDtype) -> Result<(), &'static str> {
        let (takes, expected) = match &self.of {
            Origin::Mxfp4 { .. } => (dtype == FileDtype::U8, "u8"),
            Origin::Fp8 { scales, .. } if source == scales => (fp8::may_be_scales(dtype), "f32, bf16, f16 or f8_e8m0"),
            Origin::Fp8 { .. } => (dtype == FileDtype::F8_E4M3, "f8_e4m3"),
            // That has been seen to when it was found.
            Origin::Integers(_) => (true, ""),
            _ => (float_dtype(dtype).is_some(), FLOATS),
        };
        if takes { Ok(()) } else { Err(expected) }
    }

    /// It, made of its `sources`, which have their shapes.
    ///
    /// # Errors
    /// No memory; a scale that is no number.
    pub(super) fn make(&self, sources: &[Part<'_>]) -> Result<AlignedBytes, ModelError> {
        let [rows, k] = [self.shape[0], self.shape[1..].iter().product()];
        let dtype = self.dtype(sources[0].dtype).unwrap_or_else(|| unreachable!("a source of another type"));
        let mut made = AlignedBytes::zeroed(&self.name, dtype.tensor_bytes(&self.shape) as usize)?;
        let not_finite = |at: [usize; 2]| ModelError::NotFinite { name: self.name.clone(), at };
        match &self.of {
            Origin::Fp8 { block, .. } => {
                fp8::widen(sources[0].bytes, k, &sources[1], *block, &mut made).map_err(not_finite)?;
            }
            Origin::Integers(of) => of.make(sources, [rows, k], &mut made).map_err(not_finite)?,
            Origin::Mxfp4 { matrix, which, .. } => {
                let [blocks, scales] = [sources[0].bytes, sources[1].bytes];
                let in_row = k / Q4_BLOCK;
                for (r, out) in made.chunks_exact_mut(Q4.row_bytes(k)).enumerate() {
                    let row = matrix * sources[0].shape[1] + which.nth(r);
                    let scales = &scales[row * in_row..][..in_row];
                    if let Some(block) = scales.iter().position(|scale| *scale == u8::MAX) {
                        return Err(not_finite([r, block * Q4_BLOCK]));
                    }
                    lines(&blocks[row * in_row * BLOCK_BYTES..][..in_row * BLOCK_BYTES], scales, out);
                }
            }
            Origin::Columns { matrix, which, .. } => {
                let (bytes, columns) = (dtype.size_bytes(), sources[0].shape[2]);
                let from = &sources[0].bytes[matrix * k * columns * bytes..][..k * columns * bytes];
                transposed([rows, k], *which, bytes, (from, columns), &mut made);
            }
            Origin::Rows { runs, .. } => {
                let bytes = k * dtype.size_bytes();
                let from = runs.iter().flat_map(|run| (0..run.n).map(|at| run.which.nth(at)));
                for (out, row) in made.chunks_exact_mut(bytes).zip(from) {
                    out.copy_from_slice(&sources[0].bytes[row * bytes..][..bytes]);
                }
            }
            Origin::ColumnsOfHeads { heads, .. } => {
                let (bytes, columns) = (dtype.size_bytes(), rows / heads);
                let of_head = self.matrices / heads * columns * bytes;
                for (out, from) in
                    made.chunks_exact_mut(columns * k * bytes).zip(sources[0].bytes.chunks_exact(of_head))
                {
                    let from = &from[..k * columns * bytes];
                    transposed([columns, k], Every::ONE, bytes, (from, columns), out);
                }
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
    // So many at a time that what is read of a line is still in the first cache when the next of its elements are
    // wanted.
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
                let of = |shape, bytes| Part { dtype: FileDtype::U8, shape, bytes };
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
            let made =
                remade.make(&[Part { dtype: FileDtype::BF16, shape: &shape, bytes: &elements }]).expect("memory");
            for (at, found) in made.chunks_exact(2).enumerate() {
                let expected = (matrix * k + at % k) * 2 * n + first + 2 * (at / k);
                assert_eq!(usize::from(u16::from_le_bytes([found[0], found[1]])), expected);
            }
        }
    }

    #[test]
    fn rows_stand_in_another_order() {
        // Two heads of ten, six of them turned: by the definition, neighbours stand half of that apart.
        let runs = halves(2, 10, 6);
        let order = |runs: &[Run]| -> Vec<usize> {
            runs.iter().flat_map(|run| (0..run.n).map(|at| run.which.nth(at))).collect()
        };
        let head = [0, 2, 4, 1, 3, 5, 6, 7, 8, 9];
        assert_eq!(order(&runs), [head, head.map(|at| at + 10)].concat());
        for shape in [vec![20], vec![20, 3]] {
            let k: usize = shape[1..].iter().product();
            let elements: Vec<u8> = (0..20 * k as u32).flat_map(|i| (i as f32).to_le_bytes()).collect();
            let of = Origin::Rows { rows: "rows".into(), runs: runs.clone() };
            let remade = Remade { name: "made".into(), shape: shape.clone(), of, matrices: 20 };
            assert_eq!(remade.source_shape("rows"), shape);
            let made = remade.make(&[Part { dtype: FileDtype::F32, shape: &shape, bytes: &elements }]).expect("memory");
            let found: Vec<f32> = bytemuck::cast_slice(&made).to_vec();
            let expected = order(&runs).into_iter().flat_map(|row| (0..k).map(move |at| (row * k + at) as f32));
            assert!(found.into_iter().eq(expected));
        }
        // Of 3 heads' queries, keys, values and gates the first three, and some of them.
        let some = [Run::new(4, 1, 2), Run::new(1, 3, 3)];
        assert_eq!(order(&some), [4, 5, 1, 4, 7]);
    }

    #[test]
    fn elements_take_turns() {
        let elements: Vec<u8> = (0..24u32).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let of = Origin::Elements { rows: "rows".into(), which: Every { first: 1, step: 2 } };
        let remade = Remade { name: "made".into(), shape: vec![3, 4], of, matrices: 3 };
        assert_eq!(remade.source_shape("rows"), [3, 8]);
        let made = remade.make(&[Part { dtype: FileDtype::F32, shape: &[3, 8], bytes: &elements }]).expect("memory");
        let found: Vec<f32> = bytemuck::cast_slice(&made).to_vec();
        assert_eq!(found, [1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0, 17.0, 19.0, 21.0, 23.0]);
    }
}
