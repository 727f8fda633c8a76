//! Every vector body against the reference, on every instruction set this machine has.

use super::Scratch;
use super::simd::Isa;
use crate::io::{Call, Tensor};
use crate::kernels::{MacroKernel, Numbered, Spec, param_words};
use bytemuck::Zeroable;
use perpetua_shared::task::Operand;
use perpetua_shared::{DType, Step, TaskDesc};
use proptest::prelude::*;

/// A tensor's own memory: filled with a pattern, so that writes outside the box show.
#[derive(Clone)]
struct Memory {
    words: Vec<u64>,
    operand: Operand,
}

const PATTERN: u64 = 0x7fc1_7fc1_7fc1_7fc1;

impl Memory {
    /// A tensor of `extents` whose rows are `gap` elements further apart than they must be and whose first element is
    /// `skew` elements into its memory; element i (in row-major order) is `value(i)`.
    fn new(dtype: DType, extents: &[usize], gap: usize, skew: usize, mut value: impl FnMut(usize) -> f32) -> Memory {
        let rank = extents.len();
        let mut operand = Operand {
            dtype: dtype as u16,
            rank: rank as u16,
            ..Operand::ABSENT
        };
        let mut stride = 1;
        for dim in (0..rank).rev() {
            operand.extent[dim] = extents[dim] as u32;
            operand.stride_elems[dim] = stride as u32;
            stride *= extents[dim];
            if dim == rank - 1 {
                stride += gap;
            }
        }
        operand.offset_bytes = (skew * dtype.size_bytes()) as u64;
        let bytes = (stride + skew + 8) * dtype.size_bytes();
        // NaN in every float dtype: a read outside the box shows, too.
        let memory = Memory {
            words: vec![PATTERN; bytes.div_ceil(8) + 1],
            operand,
        };
        let tensor = memory.tensor();
        let n: usize = extents.iter().product();
        for i in 0..n {
            let mut at = [0; 4];
            let mut rest = i;
            for dim in (0..rank).rev() {
                at[dim] = rest % extents[dim];
                rest /= extents[dim];
            }
            tensor.set(at, value(i));
        }
        memory
    }

    fn absent() -> Memory {
        Memory {
            words: Vec::new(),
            operand: Operand::ABSENT,
        }
    }

    fn tensor(&self) -> Tensor {
        // SAFETY: the box lies inside `words`; one thread uses it.
        unsafe { Tensor::new(self.words.as_ptr().cast_mut().cast(), &self.operand) }
    }

    /// All its elements, in row-major order.
    fn values(&self) -> Vec<f32> {
        let tensor = self.tensor();
        let e = self.operand.extent.map(|n| n as usize);
        let mut out = Vec::new();
        for a in 0..e[0] {
            for b in 0..e[1] {
                for c in 0..e[2] {
                    for d in 0..e[3] {
                        out.push(tensor.get([a, b, c, d]));
                    }
                }
            }
        }
        out
    }

    /// The words with the box's elements blanked: what no body may change.
    fn surroundings(&self) -> Vec<u64> {
        let copy = self.clone();
        if !self.operand.is_present() {
            return copy.words;
        }
        let tensor = copy.tensor();
        let e = self.operand.extent.map(|n| n as usize);
        for a in 0..e[0] {
            for b in 0..e[1] {
                for c in 0..e[2] {
                    for d in 0..e[3] {
                        tensor.set([a, b, c, d], 0.0);
                    }
                }
            }
        }
        copy.words
    }
}

/// Runs kernel `K`'s reference and CPU body on copies of `operands`; returns the operands after each.
fn both<K: MacroKernel + Numbered>(
    isa: Isa,
    params: &K::Params,
    operands: &[Memory],
    step: Step,
    row_first: u32,
) -> [Vec<Memory>; 2] {
    let spec = Spec::of(K::TASK_TYPE).expect("the kernel is listed");
    let task = TaskDesc {
        task_type: K::TASK_TYPE,
        row_first,
        params: param_words(params),
        ..TaskDesc::zeroed()
    };
    let io: Vec<Operand> = operands.iter().map(|m| m.operand).collect();
    spec.check(&task.params, &io)
        .expect("the case keeps the kernel's rules");
    let mut scratch = Scratch::with_isa(isa);
    // What earlier tasks left must not matter.
    scratch.floats = vec![f32::NAN; 100_000];
    let run = |cpu: bool, scratch: &mut Scratch| {
        let operands = operands.to_vec();
        let tensors: Vec<Tensor> = operands.iter().map(Memory::tensor).collect();
        let call = Call {
            tensors: &tensors,
            task: &task,
            step: &step,
            programs: &[],
        };
        let result = if cpu {
            (spec.cpu)(&call, scratch)
        } else {
            (spec.reference)(&call)
        };
        assert!(result.is_ok(), "{}: {result:?}", spec.name);
        operands
    };
    let results = [run(false, &mut scratch), run(true, &mut scratch)];
    for (i, operand) in operands.iter().enumerate() {
        assert!(
            operand.surroundings() == results[1][i].surroundings(),
            "operand {i} was written outside its box"
        );
    }
    results
}

fn step(first_pos: u32, rows: u32) -> Step {
    Step {
        first_pos,
        rows,
        ..Step::default()
    }
}

/// A float of [-1, 1) from a seed and an index.
fn noise(seed: u64, i: usize) -> f32 {
    let z = (seed ^ (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ z >> 29).wrapping_mul(0x94D0_49BB_1331_11EB);
    (z >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// One unit in the last place of `dtype` at `x`, relative; for rounding outputs.
fn unit(dtype: DType) -> f32 {
    match dtype {
        DType::Bf16 => 1.0 / 256.0,
        DType::F16 => 1.0 / 2048.0,
        _ => 1.0 / (1 << 22) as f32,
    }
}

/// Both finite and near, or both not finite (infinity against NaN differs with the order of summation).
fn near(expected: f32, got: f32, tolerance: f32) -> bool {
    if expected.is_finite() {
        (expected - got).abs() <= tolerance
    } else {
        !got.is_finite()
    }
}

fn dtypes() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::F32), Just(DType::Bf16), Just(DType::F16)]
}

fn isas() -> impl Strategy<Value = Isa> {
    prop::sample::select(Isa::available())
}

/// Values that arithmetic treats apart, sprinkled over noise.
fn special(kind: u32, seed: u64, i: usize) -> f32 {
    let plain = noise(seed, i);
    if !(seed as usize).wrapping_add(i).is_multiple_of(37) {
        return plain;
    }
    match kind {
        1 => f32::NAN,
        2 => f32::INFINITY,
        3 => f32::NEG_INFINITY,
        4 => f32::from_bits(3),
        5 => -f32::from_bits(0x7f_ffff),
        6 => 1e-40 * plain,
        _ => plain,
    }
}

mod linear {
    use super::*;
    use crate::kernels::gated_linear::{self, GatedLinear};
    use crate::kernels::linear::{Activation, Linear, Params};

    const ACTIVATIONS: [Activation; 5] = [
        Activation::None,
        Activation::Gelu,
        Activation::Silu,
        Activation::Relu,
        Activation::GeluTanh,
    ];

    /// sum |x| |w| of every output, with what a body may be off relative to it.
    fn bound(x: &Memory, w: &Memory, r: usize, n: usize) -> f32 {
        let (x, w) = (x.tensor(), w.tensor());
        let size: f32 = (0..x.extent(1)).map(|k| (x.get([r, k]) * w.get([n, k])).abs()).sum();
        let rounded = w.dtype() == DType::Bf16;
        size * if rounded { 1.0 / 256.0 } else { 1.0 / (1 << 18) as f32 } + 1e-30
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]
        #[test]
        fn agrees_with_its_reference(
            isa in isas(), wd in dtypes(), xd in dtypes(), yd in dtypes(), activation in 0usize..5,
            rows in 0usize..20, extra_rows in 0usize..3, n in 1usize..23, k in 0usize..300, long in any::<bool>(),
            gap in 0usize..9, skew in 0usize..2, bias in any::<bool>(), residual in any::<bool>(), kind in 0u32..7,
            seed in any::<u64>(),
        ) {
            // Long rows pass the prefetch distance and the block of k.
            let k = if long { k * 23 } else { k };
            let x = Memory::new(xd, &[rows + extra_rows, k], gap, skew, |i| special(kind, seed, i));
            let w = Memory::new(wd, &[n, k], gap, skew, |i| special(kind, seed ^ 1, i + 5) * 0.5);
            let optional = |there: bool, extents: &[usize]| match there {
                true => Memory::new(yd, extents, 0, skew, |i| noise(seed ^ 2, i)),
                false => Memory::absent(),
            };
            let bias = optional(bias, &[n]);
            let residual = optional(residual, &[rows + extra_rows, n]);
            let y = Memory::new(yd, &[rows + extra_rows, n], gap, skew, |_| 77.0);
            let io = [x, w, bias, residual, y];
            let p = Params { activation: ACTIVATIONS[activation] as u32 };
            let [expected, got] = both::<Linear>(isa, &p, &io, step(0, 3 + rows as u32), 3);
            let (expected, got) = (expected[4].values(), got[4].values());
            for (i, (e, g)) in expected.iter().zip(&got).enumerate() {
                let (r, c) = (i / n, i % n);
                if r >= rows {
                    prop_assert_eq!((*e, *g), (77.0, 77.0));
                    continue;
                }
                // No activation is steeper than 1.13.
                let tolerance = 1.2 * bound(&io[0], &io[1], r, c) + unit(yd) * (e.abs() + 1.0);
                // An infinite output may come of a finite sum's rounding only where f16 ends.
                prop_assert!(near(*e, *g, tolerance), "{} [{r}, {c}]: {g}, expected {e} +- {tolerance}", isa.name());
            }
        }

        #[test]
        fn gated_agrees_with_its_reference(
            isa in isas(), wd in dtypes(), xd in dtypes(), rows in 0usize..14, n in 1usize..23, k in 1usize..500,
            gap in 0usize..9, skew in 0usize..2, biased in any::<bool>(), activation in 0usize..5, seed in any::<u64>(),
        ) {
            let x = Memory::new(xd, &[rows, k], gap, skew, |i| noise(seed, i));
            let gate = Memory::new(wd, &[n, k], gap, skew, |i| noise(seed ^ 1, i));
            let up = Memory::new(wd, &[n, k], 0, skew, |i| noise(seed ^ 2, i));
            let bias = |s: u64| match biased {
                true => Memory::new(DType::F32, &[n], 0, skew, |i| noise(seed ^ s, i)),
                false => Memory::absent(),
            };
            let y = Memory::new(DType::F32, &[rows, n], gap, skew, |_| 77.0);
            let io = [x, gate, up, bias(3), bias(4), y];
            let p = gated_linear::Params { activation: ACTIVATIONS[activation] as u32 };
            let [expected, got] = both::<GatedLinear>(isa, &p, &io, step(0, rows as u32), 0);
            let (expected, got) = (expected[5].values(), got[5].values());
            for (i, (e, g)) in expected.iter().zip(&got).enumerate() {
                let (r, c) = (i / n, i % n);
                let (dg, du) = (1.2 * bound(&io[0], &io[1], r, c) + 1e-5, bound(&io[0], &io[2], r, c) + 1e-5);
                // Each factor is off by its bound; both factors are at most their bound's sum in size.
                let scale = if wd == DType::Bf16 { 256.0 } else { (1 << 18) as f32 };
                let size = |d: f32| d * scale + 1.0;
                let tolerance = dg * size(du) + du * size(dg) + dg * du;
                prop_assert!(near(*e, *g, tolerance), "{} [{r}, {c}]: {g}, expected {e} +- {tolerance}", isa.name());
            }
        }
    }

    /// Rows and columns are cut into tasks in any way, and prompts read at once or token by token: same bits.
    #[test]
    fn bits_do_not_depend_on_how_the_work_is_cut() {
        for isa in Isa::available() {
            for dtype in [DType::Bf16, DType::F16, DType::F32] {
                for k in [64, 301, 8000] {
                    let (rows, n) = (29, 13);
                    let x = Memory::new(DType::F32, &[rows, k], 0, 0, |i| noise(1, i));
                    let w = Memory::new(dtype, &[n, k], 3, 1, |i| noise(2, i));
                    let y = Memory::new(DType::F32, &[rows, n], 0, 0, |_| 0.0);
                    let io = [x.clone(), w.clone(), Memory::absent(), Memory::absent(), y];
                    let p = Params { activation: 0 };
                    let whole = both::<Linear>(*isa, &p, &io, step(0, rows as u32), 0)[1][4].values();
                    for r in [0, 5, 28] {
                        for c in [0, 3, 12] {
                            let x = Memory::new(DType::F32, &[1, k], 0, 1, |i| noise(1, r * k + i));
                            let w = Memory::new(dtype, &[1, k], 0, 0, |i| noise(2, c * k + i));
                            let y = Memory::new(DType::F32, &[1, 1], 0, 0, |_| 0.0);
                            let io = [x, w, Memory::absent(), Memory::absent(), y];
                            let one = both::<Linear>(*isa, &p, &io, step(0, 1), 0)[1][4].values();
                            assert_eq!(
                                one[0].to_bits(),
                                whole[r * n + c].to_bits(),
                                "{} {dtype} {k}",
                                isa.name()
                            );
                        }
                    }
                }
            }
        }
    }
}

mod attention {
    use super::*;
    use crate::kernels::attention::{Attention, Params};

    struct Case {
        dtype: DType,
        rows: usize,
        n_kv: usize,
        group: usize,
        d: usize,
        first_pos: usize,
        causal: bool,
        /// Multiplies the queries: large ones make one position win.
        sharp: f32,
        /// What stands at positions nobody may see, and sometimes among those that are seen.
        kind: u32,
        seed: u64,
    }

    fn operands(c: &Case) -> [Memory; 4] {
        let context = c.first_pos + c.rows + 3;
        let q = [c.rows, c.n_kv, c.group, c.d];
        let visible = c.first_pos + c.rows;
        let cache = |s: u64| {
            Memory::new(c.dtype, &[c.n_kv, context, c.d], 5, 1, |i| {
                if i / c.d % context < visible {
                    special(c.kind, c.seed ^ s, i)
                } else {
                    f32::NAN
                }
            })
        };
        [
            Memory::new(DType::F32, &q, 1, 1, |i| c.sharp * noise(c.seed, i)),
            cache(1),
            cache(2),
            Memory::new(DType::F32, &q, 0, 0, |_| 77.0),
        ]
    }

    fn params(c: &Case) -> Params {
        Params {
            scale: 1.0 / (c.d as f32).sqrt(),
            causal: u32::from(c.causal),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]
        #[test]
        fn agrees_with_its_reference(
            isa in isas(), dtype in dtypes(), rows in 1usize..40, n_kv in 1usize..3, group in 1usize..10,
            d in 1usize..150, first_pos in 0usize..200, causal in any::<bool>(), sharp in 0.1f32..8.0, kind in 0u32..20,
            seed in any::<u64>(),
        ) {
            // Bidirectional rows see the pass's rows.
            let first_pos = if causal { first_pos } else { 0 };
            let case = Case { dtype, rows, n_kv, group, d, first_pos, causal, sharp, kind, seed };
            let io = operands(&case);
            let [expected, got] = both::<Attention>(isa, &params(&case), &io, step(first_pos as u32, rows as u32), 0);
            for (i, (e, g)) in expected[3].values().iter().zip(&got[3].values()).enumerate() {
                prop_assert!(near(*e, *g, 1.0 / 1024.0), "{} at {i}: {g}, expected {e}", isa.name());
            }
        }
    }

    #[test]
    fn decoding_token_by_token_gives_the_bits_of_one_pass() {
        for isa in Isa::available() {
            for dtype in [DType::Bf16, DType::F32] {
                let (rows, n_kv, group, d) = (150, 2, 3, 48);
                let case = Case {
                    dtype,
                    rows,
                    n_kv,
                    group,
                    d,
                    first_pos: 0,
                    causal: true,
                    sharp: 3.0,
                    kind: 0,
                    seed: 7,
                };
                let io = operands(&case);
                let whole = both::<Attention>(*isa, &params(&case), &io, step(0, rows as u32), 0)[1][3].values();
                let row = n_kv * group * d;
                for r in [0, 1, 62, 63, 64, 65, 100, 149] {
                    let q = Memory::new(DType::F32, &[1, n_kv, group, d], 0, 0, |i| 3.0 * noise(7, r * row + i));
                    let y = Memory::new(DType::F32, &[1, n_kv, group, d], 0, 0, |_| 77.0);
                    let io = [q, io[1].clone(), io[2].clone(), y];
                    let one = both::<Attention>(*isa, &params(&case), &io, step(r as u32, 1), 0)[1][3].values();
                    assert!(
                        one.iter()
                            .zip(&whole[r * row..])
                            .all(|(a, b)| a.to_bits() == b.to_bits()),
                        "{} {dtype} row {r}",
                        isa.name()
                    );
                }
            }
        }
    }

    #[test]
    fn sees_nothing_without_rows() {
        let case = Case {
            dtype: DType::F32,
            rows: 2,
            n_kv: 1,
            group: 1,
            d: 4,
            first_pos: 0,
            causal: true,
            sharp: 1.0,
            kind: 0,
            seed: 1,
        };
        let io = operands(&case);
        for isa in Isa::available() {
            let [expected, got] = both::<Attention>(*isa, &params(&case), &io, step(0, 5), 5);
            assert_eq!(expected[3].values(), got[3].values());
        }
    }
}
