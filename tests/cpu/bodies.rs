//! Generated bodies that stand alone, against plain loops: their source on the simulated GPU, which judges every
//! access, and their PTX, instruction by instruction. Rows lie apart, with NaN between them.
#![allow(unsafe_code, reason = "operands of a launch, by address")]

use crate::codegen::Choices;
use perpetua::device_image::device_kernels;
use perpetua::ptx;
use perpetua_device::gpu::bodies;
use perpetua_device::simt::{self, Access, Allocation};
use perpetua_shared::DType;
use perpetua_shared::body::{BodyParams, MAX_OPERANDS, Matrix, PREFIX};
use perpetua_shared::launch::{SHARED_BYTES, TASK_THREADS, TILE_BYTES};
use proptest::prelude::*;
use std::sync::LazyLock;

/// What runs a body.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Runs {
    Source,
    Ptx,
}

impl Choices {
    /// `1..=n`.
    fn one_to(&mut self, n: usize) -> usize {
        1 + (self.next() % n as u64) as usize
    }

    /// A multiple of eight, `8..=n`.
    fn eights_to(&mut self, n: usize) -> usize {
        8 * self.one_to(n / 8)
    }

    /// About normal.
    fn float(&mut self) -> f32 {
        (0..4).map(|_| self.next() as f32 / u64::MAX as f32 - 0.5).sum::<f32>() * 1.7
    }

    fn dtype(&mut self) -> DType {
        [DType::F32, DType::Bf16, DType::F16][self.one_to(3) - 1]
    }

    /// So many numbers below `n`, no two alike.
    fn some_of(&mut self, count: usize, n: usize) -> Vec<u32> {
        let mut all: Vec<u32> = (0..n as u32).collect();
        for at in 0..count {
            let other = at + self.one_to(n - at) - 1;
            all.swap(at, other);
        }
        all.truncate(count);
        all
    }
}

/// A matrix and its memory.
struct Tensor {
    dtype: DType,
    rows: usize,
    columns: usize,
    stride: usize,
    memory: Vec<u128>,
}

impl Tensor {
    fn nan(choices: &mut Choices, dtype: DType, [rows, columns]: [usize; 2]) -> Tensor {
        let stride = columns + 8 * (choices.one_to(3) - 1);
        let mut tensor = Tensor { dtype, rows, columns, stride, memory: vec![0; (rows * stride * 4).div_ceil(16)] };
        for at in 0..rows * stride {
            tensor.put(at, f32::NAN);
        }
        tensor
    }

    fn random(choices: &mut Choices, dtype: DType, shape: [usize; 2], scale: f32) -> Tensor {
        let mut tensor = Tensor::nan(choices, dtype, shape);
        for r in 0..shape[0] {
            for c in 0..shape[1] {
                tensor.put(r * tensor.stride + c, scale * choices.float());
            }
        }
        tensor
    }

    fn put(&mut self, at: usize, value: f32) {
        let words: &mut [u16] = bytemuck::cast_slice_mut(&mut self.memory);
        match self.dtype {
            DType::F32 => words[2 * at..2 * at + 2].copy_from_slice(&bytemuck::cast::<u32, [u16; 2]>(value.to_bits())),
            DType::Bf16 => words[at] = half::bf16::from_f32(value).to_bits(),
            _ => words[at] = half::f16::from_f32(value).to_bits(),
        }
    }

    fn get(&self, r: usize, c: usize) -> f64 {
        let (at, words): (usize, &[u16]) = (r * self.stride + c, bytemuck::cast_slice(&self.memory));
        f64::from(match self.dtype {
            DType::F32 => f32::from_bits(bytemuck::cast([words[2 * at], words[2 * at + 1]])),
            DType::Bf16 => half::bf16::from_bits(words[at]).to_f32(),
            _ => half::f16::from_bits(words[at]).to_f32(),
        })
    }

    /// What a result of this type may be off by, of a sum of numbers of size `size`: what multiplies is two terms of
    /// bf16, or more.
    fn tolerance(&self, expected: f64, size: f64) -> f64 {
        let rounding = match self.dtype {
            DType::F32 => 0.0,
            DType::Bf16 => 1.0 / 256.0,
            _ => 1.0 / 2048.0,
        };
        rounding * expected.abs() + 6e-5 * (size + 1.0)
    }
}

/// An operand: the tensor, its first column and how many it has, and how it may be touched.
struct Operand<'a> {
    tensor: &'a mut Tensor,
    columns: [usize; 2],
    access: Access,
}

fn reads(tensor: &mut Tensor) -> Operand<'_> {
    Operand { columns: [0, tensor.columns], tensor, access: Access::Constant }
}

fn writes(tensor: &mut Tensor) -> Operand<'_> {
    Operand { columns: [0, tensor.columns], tensor, access: Access::Unwritten }
}

/// Runs the body called `name`.
fn run(runs: Runs, name: &str, seed: u64, operands: &mut [Operand<'_>], index: &mut [u32], arguments: BodyParams) {
    let mut params = arguments;
    let mut matrices = [Matrix::default(); MAX_OPERANDS];
    let mut boxes = Vec::new();
    for (matrix, operand) in matrices.iter_mut().zip(&mut *operands) {
        let (tensor, [first, columns]) = (&mut *operand.tensor, operand.columns);
        let size = tensor.dtype.size_bytes();
        let start = tensor.memory.as_mut_ptr().cast::<u8>().wrapping_add(first * size);
        *matrix = Matrix {
            address: start.expose_provenance() as u64,
            rows: tensor.rows as u32,
            columns: columns as u32,
            stride_elems: tensor.stride as u32,
            dtype: tensor.dtype as u32,
        };
        boxes.push((start, ((tensor.rows - 1) * tensor.stride + columns) * size, operand.access));
    }
    let index_bytes = size_of_val(index);
    params.operands = matrices;
    params.index = index.as_mut_ptr().expose_provenance() as u64;
    params.index_len = (index_bytes / 4) as u32;
    boxes.push((index.as_mut_ptr().cast(), index_bytes, Access::Constant));
    match runs {
        Runs::Source => {
            let mut choices = Choices(seed);
            let options = simt::Options {
                tile_bytes: TILE_BYTES,
                ..simt::Options::new(1, 32 * choices.one_to(TASK_THREADS as usize / 32) as u32, seed)
            };
            let allocations = boxes.iter().enumerate().map(|(at, (start, bytes, access))| {
                // SAFETY: the operands and the index are borrowed until the launch has ended.
                unsafe { Allocation::new(format!("operand {at}"), *start, *bytes, *access) }
            });
            // SAFETY: every thread runs it, on operands as the body wants them.
            simt::launch(&options, allocations.collect(), || unsafe { bodies::run(name, &params) })
                .unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        Runs::Ptx => {
            static MODULE: LazyLock<Option<ptx::Module>> =
                LazyLock::new(|| device_kernels().map(|text| ptx::Module::parse(text).expect("our PTX is understood")));
            let Some(module) = &*MODULE else { return };
            let mut memory = ptx::Memory::default();
            for (at, (start, bytes, access)) in boxes.iter().enumerate().filter(|(_, (_, bytes, _))| *bytes > 0) {
                // SAFETY: as above.
                unsafe {
                    let is_constant = matches!(access, Access::Constant);
                    memory.add(format!("operand {at}"), start.addr() as u64, *start, *bytes as u64, is_constant);
                }
            }
            let launch = ptx::Launch {
                entry: &format!("{PREFIX}{name}"),
                threads: TASK_THREADS,
                shared_bytes: SHARED_BYTES,
                params: &[bytemuck::bytes_of(&params)],
                seed,
                ..ptx::Launch::default()
            };
            module.launch(&launch, &memory).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }
}

/// Whether `y` is what `expected` says of each element, with the size of what it is the sum of; and NaN still where
/// nothing is.
fn assert_is(name: &str, y: &Tensor, expected: impl Fn(usize, usize) -> (f64, f64)) {
    for r in 0..y.rows {
        for c in 0..y.columns {
            let ((expected, size), got) = (expected(r, c), y.get(r, c));
            let off = (got - expected).abs();
            assert!(off <= y.tolerance(expected, size), "{name}: y[{r}, {c}] is {got}, expected {expected}");
        }
        for c in y.columns..y.stride {
            assert!(y.get(r, c).is_nan(), "{name}: row {r} is written beyond its end");
        }
    }
}

/// The sum of `n` numbers, and that of their magnitudes.
fn sum(n: usize, of: impl Fn(usize) -> f64) -> (f64, f64) {
    (0..n).fold((0.0, 0.0), |(sum, size), i| (sum + of(i), size + of(i).abs()))
}

fn back_to_back(runs: Runs, seed: u64) {
    let choices = &mut Choices(seed);
    let (m, k, n, columns) = (choices.one_to(70), choices.eights_to(200), choices.one_to(150), choices.eights_to(128));
    let dtypes = [choices.dtype(), choices.dtype()];
    let mut x = Tensor::random(choices, dtypes[0], [m, k], 1.0);
    let mut a = Tensor::random(choices, DType::Bf16, [n, k], 0.2);
    let mut b = Tensor::random(choices, DType::Bf16, [n, columns], 0.2);
    let mut y = Tensor::nan(choices, dtypes[1], [m, columns]);
    let mut operands = [reads(&mut x), reads(&mut a), reads(&mut b), writes(&mut y)];
    run(runs, "back_to_back", seed, &mut operands, &mut [], BodyParams::default());
    let between: Vec<Vec<f64>> =
        (0..m).map(|r| (0..n).map(|i| sum(k, |k| x.get(r, k) * a.get(i, k)).0).collect()).collect();
    assert_is("back_to_back", &y, |r, c| sum(n, |i| between[r][i] * b.get(i, c)));
}

fn normed_linear(runs: Runs, seed: u64) {
    let choices = &mut Choices(seed);
    let (m, k, n) = (choices.one_to(70), choices.eights_to(300), choices.eights_to(150));
    let dtypes = [choices.dtype(), choices.dtype(), choices.dtype()];
    let mut x = Tensor::random(choices, dtypes[0], [m, k], 3.0);
    let mut g = Tensor::random(choices, dtypes[1], [1, k], 1.0);
    let mut w = Tensor::random(choices, DType::Bf16, [n, k], 0.3);
    let mut y = Tensor::nan(choices, dtypes[2], [m, n]);
    let eps = 1e-5;
    let arguments = BodyParams { scalars: [1.0 / k as f32, eps], ..BodyParams::default() };
    let mut operands = [reads(&mut x), reads(&mut g), reads(&mut w), writes(&mut y)];
    run(runs, "normed_linear", seed, &mut operands, &mut [], arguments);
    let squares = |r| sum(k, |i| x.get(r, i) * x.get(r, i)).0 / k as f64;
    let factor: Vec<f64> = (0..m).map(|r| 1.0 / (squares(r) + f64::from(eps)).sqrt()).collect();
    assert_is("normed_linear", &y, |r, c| sum(k, |i| factor[r] * x.get(r, i) * g.get(0, i) * w.get(c, i)));
}

fn gated_mlp(runs: Runs, seed: u64) {
    let choices = &mut Choices(seed);
    let (m, k, inner) = (choices.one_to(40), choices.eights_to(150), choices.eights_to(150));
    let n = choices.eights_to(150);
    let dtype = choices.dtype();
    let mut x = Tensor::random(choices, dtype, [m, k], 1.0);
    let [mut gate, mut up] = [0.3, 0.2].map(|scale| Tensor::random(choices, DType::Bf16, [inner, k], scale));
    let mut down = Tensor::random(choices, DType::Bf16, [n, inner], 0.2);
    let mut y = Tensor::random(choices, DType::F32, [m, n], 1.0);
    let before: Vec<Vec<f64>> = (0..m).map(|r| (0..n).map(|c| y.get(r, c)).collect()).collect();
    let adds = |tensor| Operand { access: Access::Written, ..reads(tensor) };
    let mut operands = [reads(&mut x), reads(&mut gate), reads(&mut up), reads(&mut down), adds(&mut y)];
    run(runs, "gated_mlp", seed, &mut operands, &mut [], BodyParams::default());
    let between = |r: usize, i: usize| {
        let [gate, up] = [&gate, &up].map(|w| sum(k, |k| x.get(r, k) * w.get(i, k)).0);
        gate / (1.0 + (-gate).exp()) * up
    };
    let between: Vec<Vec<f64>> = (0..m).map(|r| (0..inner).map(|i| between(r, i)).collect()).collect();
    assert_is("gated_mlp", &y, |r, c| {
        let (sum, size) = sum(inner, |i| between[r][i] * down.get(c, i));
        (before[r][c] + sum, before[r][c].abs() + size)
    });
}

/// Shares of the positions, each by a launch of its own, and their merging.
fn shared_attention(runs: Runs, seed: u64) {
    let choices = &mut Choices(seed);
    let wide = if choices.one_to(2) == 1 { 64 } else { 128 };
    let (group, rows) = (choices.one_to(8), choices.one_to(3));
    let (d, m, first) = (choices.eights_to(wide), group * rows, choices.one_to(300));
    let (positions, splits) = (first + rows - 1, choices.one_to(4));
    let dtypes = [choices.dtype(), choices.dtype()];
    let mut q = Tensor::random(choices, dtypes[0], [m, d], 1.5);
    let n = positions + choices.one_to(20);
    let mut pages = choices.some_of(positions, n);
    // Rows of the caches that no page is of hold NaN.
    let [mut k, mut v] = [0, 1].map(|_| {
        let mut cache = Tensor::nan(choices, DType::Bf16, [n, d]);
        for row in &pages {
            (0..d).for_each(|c| cache.put(*row as usize * cache.stride + c, choices.float()));
        }
        cache
    });
    let mut found = Tensor::nan(choices, DType::F32, [m, splits * (wide + 8)]);
    let scale = 0.3_f32;
    for split in 0..splits {
        let share = [split, split + 1].map(|at| (positions * at / splits) as u32);
        let arguments = BodyParams {
            seen_first: first as u32,
            seen_group: group as u32,
            share,
            scalars: [scale * std::f32::consts::LOG2_E, 0.0],
            ..BodyParams::default()
        };
        let part = Operand { columns: [split * (wide + 8), wide + 8], ..writes(&mut found) };
        let mut operands = [reads(&mut q), reads(&mut k), reads(&mut v), part];
        run(runs, &format!("attend_share_{wide}"), seed + split as u64, &mut operands, &mut pages, arguments);
    }
    let mut y = Tensor::nan(choices, dtypes[1], [m, d]);
    let mut operands = [reads(&mut found), writes(&mut y)];
    run(runs, &format!("merge_{wide}"), seed, &mut operands, &mut [], BodyParams::default());
    let weights = |r: usize| -> Vec<f64> {
        let score = |t: &u32| f64::from(scale) * sum(d, |i| q.get(r, i) * k.get(*t as usize, i)).0;
        let scores: Vec<f64> = pages[..first + r / group].iter().map(score).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores.iter().map(|score| (score - max).exp()).sum();
        scores.iter().map(|score| (score - max).exp() / total).collect()
    };
    let weights: Vec<Vec<f64>> = (0..m).map(weights).collect();
    assert_is("shared attention", &y, |r, c| sum(weights[r].len(), |t| weights[r][t] * v.get(pages[t] as usize, c)));
}

fn gather(runs: Runs, seed: u64) {
    let choices = &mut Choices(seed);
    let (m, n, columns) = (choices.one_to(100), choices.one_to(50), choices.eights_to(200));
    let dtypes = [choices.dtype(), choices.dtype()];
    let mut table = Tensor::random(choices, dtypes[0], [n, columns], 1.0);
    let mut ids: Vec<u32> = (0..m).map(|_| choices.one_to(n) as u32 - 1).collect();
    let mut y = Tensor::nan(choices, dtypes[1], [m, columns]);
    let mut operands = [reads(&mut table), writes(&mut y)];
    run(runs, "gather", seed, &mut operands, &mut ids, BodyParams::default());
    assert_is("gather", &y, |r, c| (table.get(ids[r] as usize, c), 0.0));
}

fn scatter(runs: Runs, seed: u64) {
    let choices = &mut Choices(seed);
    let (m, columns) = (choices.one_to(100), choices.eights_to(200));
    let n = m + choices.one_to(30);
    let dtypes = [choices.dtype(), choices.dtype()];
    let mut x = Tensor::random(choices, dtypes[0], [m, columns], 1.0);
    let mut slots = choices.some_of(m, n);
    let mut y = Tensor::random(choices, dtypes[1], [n, columns], 1.0);
    let before: Vec<Vec<f64>> = (0..n).map(|r| (0..columns).map(|c| y.get(r, c)).collect()).collect();
    let mut operands = [reads(&mut x), writes(&mut y)];
    run(runs, "scatter", seed, &mut operands, &mut slots, BodyParams::default());
    assert_is("scatter", &y, |r, c| {
        let from = slots.iter().position(|slot| *slot as usize == r);
        (from.map_or(before[r][c], |from| x.get(from, c)), 0.0)
    });
}

/// Bodies, and what tests them.
type Case = (&'static [&'static str], fn(Runs, u64));

/// All of them.
const CASES: &[Case] = &[
    (&["back_to_back"], back_to_back),
    (&["normed_linear"], normed_linear),
    (&["gated_mlp"], gated_mlp),
    (&["attend_share_64", "attend_share_128", "merge_64", "merge_128"], shared_attention),
    (&["gather"], gather),
    (&["scatter"], scatter),
];

#[test]
fn each_body_has_a_case() {
    let mut named: Vec<&str> = CASES.iter().flat_map(|(names, _)| names.iter().copied()).collect();
    let mut bodies = bodies::NAMES.to_vec();
    named.sort_unstable();
    bodies.sort_unstable();
    assert_eq!(named, bodies);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn their_source_computes_what_they_say(seed in any::<u32>()) {
        for (_, case) in CASES {
            case(Runs::Source, u64::from(seed));
        }
    }

    #[test]
    fn their_ptx_computes_what_they_say(seed in any::<u32>()) {
        if device_kernels().is_none() {
            println!("skipped: no device toolchain when this was built (./x setup installs one)");
            return Ok(());
        }
        for (_, case) in CASES {
            case(Runs::Ptx, u64::from(seed));
        }
    }
}
