//! Every vector body against the reference, on every instruction set this machine has.

use super::Scratch;
use super::simd::Isa;
use crate::io::{Call, Tensor};
use crate::kernels::{MacroKernel, Numbered, Spec, param_words};
use bytemuck::Zeroable;
use perpetua_shared::dtype::{self, Q4, Q4_BLOCK, Q8};
use perpetua_shared::task::Operand;
use perpetua_shared::{DType, Step, TaskDesc};
use proptest::prelude::*;

#[cfg(target_arch = "x86_64")]
mod matrix_unit;
mod recurrent;

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
        let mut operand = Operand { dtype: dtype as u16, rank: rank as u8, ..Operand::ABSENT };
        let mut stride = 1;
        for dim in (0..rank).rev() {
            operand.extent[dim] = extents[dim] as u32;
            operand.stride_elems[dim] = stride as u32;
            stride *= extents[dim];
            if dim == rank - 1 {
                stride += gap;
            }
        }
        let size = dtype.size_bytes();
        operand.offset_bytes = (skew * size) as u64;
        let mut words = ((stride + skew + 8) * size).div_ceil(8) + 1;
        if cfg!(sanitized) && extents.iter().all(|n| *n > 0) {
            // The box ends where its memory does, so that the sanitizer sees the first byte beyond.
            let last: usize = (0..rank).map(|dim| (extents[dim] - 1) * operand.stride_elems[dim] as usize).sum();
            words = ((skew + last + 1) * size).div_ceil(8);
            operand.offset_bytes = (8 * words - (last + 1) * size) as u64;
        }
        // NaN in every float dtype: a read outside the box shows, too.
        let memory = Memory { words: vec![PATTERN; words], operand };
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

    /// A matrix of 8-bit weights: bytes and scales by their own functions of (row, column) and (row, block).
    fn q8(n: usize, k: usize, byte: impl Fn(usize, usize) -> i8, scale: impl Fn(usize, usize) -> f32) -> Memory {
        Memory::in_lines(DType::Q8, [n, k], |r, row| {
            for b in 0..k.div_ceil(Q8.elems) {
                let [elements, at] = Q8.at(b);
                for i in 0..Q8.elems {
                    let column = b * Q8.elems + i;
                    row[elements + i] = if column < k { byte(r, column) as u8 } else { 0 };
                }
                row[at..][..4].copy_from_slice(&scale(r, b).to_le_bytes());
            }
        })
    }

    /// A matrix of 4-bit weights: numbers of levels and scales by their own functions of (row, column) and (row,
    /// block). What lies beyond a row's last is the pattern of unwritten memory, but for the scales of whole blocks.
    fn fours(
        dtype: DType,
        [n, k]: [usize; 2],
        level: impl Fn(usize, usize) -> u8,
        scale: impl Fn(usize, usize) -> f32,
    ) -> Memory {
        Memory::in_lines(dtype, [n, k], |r, row| {
            for i in 0..k.next_multiple_of(Q4.elems) {
                let (byte, shift, at) = dtype::q4_at(i);
                if i < k {
                    row[byte] = row[byte] & !(15 << shift) | level(r, i) << shift;
                }
                let scale = if i / Q4_BLOCK * Q4_BLOCK < k { scale(r, i / Q4_BLOCK) } else { 0.0 };
                row[at..][..2].copy_from_slice(&half::bf16::from_f32(scale).to_le_bytes());
            }
        })
    }

    /// A matrix whose rows of lines `fill` writes.
    fn in_lines(dtype: DType, [n, k]: [usize; 2], fill: impl Fn(usize, &mut [u8])) -> Memory {
        let bytes = dtype.lines().expect("a type whose rows are lines").row_bytes(k);
        let mut words = vec![PATTERN; n * bytes / 8];
        for (r, row) in bytemuck::cast_slice_mut::<u64, u8>(&mut words).chunks_mut(bytes).enumerate() {
            fill(r, row);
        }
        let operand = Operand {
            dtype: dtype as u16,
            rank: 2,
            extent: [n as u32, k as u32, 1, 1],
            stride_elems: [bytes as u32, 0, 0, 0],
            ..Operand::ABSENT
        };
        Memory { words, operand }
    }

    fn absent() -> Memory {
        Memory { words: Vec::new(), operand: Operand::ABSENT }
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
        // Weights in lines are written nowhere.
        if self.operand.dtype().is_none_or(|dtype| dtype.lines().is_some()) {
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
    let task = TaskDesc { task_type: K::TASK_TYPE, row_first, params: param_words(params), ..TaskDesc::zeroed() };
    let io: Vec<Operand> = operands.iter().map(|m| m.operand).collect();
    spec.check(&task.params, &io).expect("the case keeps the kernel's rules");
    let mut scratch = Scratch::with_isa(isa);
    // What earlier tasks left must not matter. A sanitizer sees the end of what is asked for.
    scratch.floats = vec![f32::NAN; if cfg!(sanitized) { 0 } else { 100_000 }];
    let run = |cpu: bool, scratch: &mut Scratch| {
        let operands = operands.to_vec();
        let tensors: Vec<Tensor> = operands.iter().map(Memory::tensor).collect();
        let call = Call { tensors: &tensors, task: &task, step: &step, programs: &[] };
        let result = if cpu { (spec.cpu)(&call, scratch) } else { (spec.reference)(&call) };
        assert!(result.is_ok(), "{}: {result:?}", spec.name);
        operands
    };
    let results = [run(false, &mut scratch), run(true, &mut scratch)];
    for (i, operand) in operands.iter().enumerate() {
        assert!(operand.surroundings() == results[1][i].surroundings(), "operand {i} was written outside its box");
    }
    results
}

fn step(first_pos: u32, rows: u32) -> Step {
    Step { first_pos, rows, ..Step::default() }
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
        DType::Bf16 => 1.0 / 128.0,
        DType::F16 => 1.0 / 1024.0,
        _ => 1.0 / (1 << 22) as f32,
    }
}

/// Both finite and near, or both not finite (infinity against NaN differs with the order of summation).
fn near(expected: f32, got: f32, tolerance: f32) -> bool {
    if expected.is_finite() { expected == got || (expected - got).abs() <= tolerance } else { !got.is_finite() }
}

/// Compares operand `i` of both runs: relative to its size and to 1, both within `tolerance` and a unit of its dtype.
fn compare(isa: Isa, results: &[Vec<Memory>; 2], i: usize, tolerance: f32) -> Result<(), TestCaseError> {
    let unit = unit(results[0][i].tensor().dtype());
    for (at, (e, g)) in results[0][i].values().iter().zip(&results[1][i].values()).enumerate() {
        let allowed = (tolerance + unit) * (e.abs() + 1.0);
        prop_assert!(near(*e, *g, allowed), "{} at {at}: {g}, expected {e} +- {allowed}", isa.name());
    }
    Ok(())
}

/// `n` cases, or as many as the environment wants: an emulated processor takes its time.
pub(crate) fn cases(n: u32) -> ProptestConfig {
    let wanted = std::env::var_os("PROPTEST_CASES").map(|_| ProptestConfig::default());
    wanted.unwrap_or_else(|| ProptestConfig::with_cases(n))
}

/// Where a range of sizes ends: `./x test-miri` interprets these tests.
const fn below(n: usize, interpreted: usize) -> usize {
    if cfg!(miri) { interpreted } else { n }
}

/// Whether numbers become f16 and back here: Miri knows the portable conversion and not F16C's instructions, which
/// `half` takes where they are.
const HAS_F16: bool = !cfg!(all(miri, target_feature = "f16c"));

fn dtypes() -> impl Strategy<Value = DType> {
    let all = &[DType::F32, DType::Bf16, DType::F16];
    prop::sample::select(if HAS_F16 { &all[..] } else { &all[..2] })
}

/// Types of weights in fewer bits.
const FEWER_BITS: [DType; 4] = [DType::Q8, DType::Q4, DType::Mx4, DType::Int4];

fn isas() -> impl Strategy<Value = Isa> {
    let all = Isa::available();
    // Interpreted tests are run once for each.
    prop::sample::select(if cfg!(miri) { &all[all.len() - 1..] } else { all })
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

mod experts {
    use super::*;
    use crate::kernels::gated_linear::Gating;
    use crate::kernels::linear::Activation;
    use crate::kernels::routing::{Counting, Weighting};
    use crate::kernels::{ExpertsDown, ExpertsUp, experts_down, experts_up};

    /// What another order of summation may change, relative to the sum of the sizes of what is added.
    const ORDER: f32 = 1.0 / (1 << 17) as f32;

    /// A mixture's operands: what its first half makes is what its second takes.
    struct Mixture {
        logits: Memory,
        gate: Memory,
        up: Memory,
        down: Memory,
        x: Memory,
        made: Memory,
        residual: Memory,
        y: Memory,
        gate_bias: Memory,
        up_bias: Memory,
        down_bias: Memory,
        correction: Memory,
    }

    impl Mixture {
        /// The first half's.
        fn first(&self) -> [Memory; ExpertsUp::SLOTS.len()] {
            let Mixture { logits, gate, up, x, made, gate_bias, up_bias, correction, .. } = self;
            [x, logits, gate, up, made, &Memory::absent(), gate_bias, up_bias, correction].map(Memory::clone)
        }
    }

    const SILU: Gating = Gating::of(Activation::Silu.number());

    fn gating(is_limited: bool) -> Gating {
        if is_limited { Gating { activation: 0, limit: 1.25, alpha: 1.702 } } else { SILU }
    }

    fn mixture(
        wd: DType,
        [rows, experts, chosen, n, k]: [usize; 5],
        [few, biased, corrected]: [bool; 3],
        gap: usize,
        seed: u64,
    ) -> Mixture {
        let w = |of: u64, extents: [usize; 3]| Memory::new(wd, &extents, gap, 1, |i| noise(seed ^ of, i));
        let bias = |of: u64, n: usize| match biased {
            true => Memory::new(wd, &[experts, n], gap, 1, |i| noise(seed ^ of, i)),
            false => Memory::absent(),
        };
        let logit = |i| if few { (4.0 * noise(seed, i)).floor() } else { 4.0 * noise(seed, i) };
        Mixture {
            logits: Memory::new(DType::F32, &[rows, experts], gap, 0, logit),
            gate: w(1, [experts, n, k]),
            up: w(2, [experts, n, k]),
            down: w(3, [experts, k, n]),
            x: Memory::new(DType::F32, &[rows, k], gap, 1, |i| noise(seed ^ 4, i)),
            made: Memory::new(DType::F32, &[rows, chosen, n], gap, 1, |_| 77.0),
            residual: Memory::new(DType::F32, &[rows, k], 0, 1, |i| noise(seed ^ 5, i)),
            y: Memory::new(DType::F32, &[rows, k], gap, 0, |_| 77.0),
            gate_bias: bias(6, n),
            up_bias: bias(7, n),
            down_bias: bias(8, k),
            correction: match corrected {
                true => Memory::new(DType::F32, &[experts], 0, 1, |i| noise(seed ^ 9, i)),
                false => Memory::absent(),
            },
        }
    }

    proptest! {
        #![proptest_config(cases(200))]
        #[test]
        fn agree_with_their_reference(
            isa in isas(), wd in dtypes(), rows in 1..below(40, 4), experts in 1usize..9, chosen in 1usize..9, n in 1..below(23, 5),
            k in 1..below(80, 20), few in any::<bool>(), is_limited in any::<bool>(), biased in any::<bool>(), weighting in 0u32..4, corrected in any::<bool>(), order in 0u32..4,
            gap in 0usize..4, seed in any::<u64>(),
        ) {
            let (n, k) = if order >= 2 { (n.next_multiple_of(32), k.next_multiple_of(32)) } else { (n, k) };
            let chosen = chosen.min(experts);
            let counting = Counting { weighting, factor: 1.5, added: 0.25 };
            let m = mixture(wd, [rows, experts, chosen, n, k], [few, biased, corrected], gap, seed);
            let on_unit = order > 0 && isa.has_matrix_unit();
            let in_pairs = order == 3 && isa.multiplies_pairs();
            let size = match (on_unit, in_pairs) {
                (true, _) => 4.0 / (1 << 15) as f32,
                // Those of an expert that one row goes to are not rounded: a bound for both.
                (_, true) => 1.0 / 256.0,
                _ => ORDER,
            };
            let p = experts_up::Params { gating: gating(is_limited), order, counting, eps: 0.0 };
            let [expected, got] = both::<ExpertsUp>(isa, &p, &m.first(), step(0, rows as u32), 0);
            // A gate and what it opens are sums of at most k numbers below 1.
            let bound = 4.5 * size * (k * k) as f32;
            for (e, g) in expected[4].values().iter().zip(got[4].values()) {
                prop_assert!(near(*e, g, bound), "{}: {g}, expected {e} +- {bound}", isa.name());
            }
            let largest = expected[4].values().iter().fold(0.0f32, |a, b| a.max(b.abs()));
            // There are none where experts count by parts of all.
            let bias = if weighting == Weighting::All as u32 { Memory::absent() } else { m.down_bias };
            let io = [expected[4].clone(), m.logits, m.down, m.residual, m.y, bias, m.correction];
            let p = experts_down::Params { order, counting };
            let [expected, got] = both::<ExpertsDown>(isa, &p, &io, step(0, rows as u32), 0);
            let bound = 3.0 * size * (1.0 + largest * (chosen * n) as f32);
            for (e, g) in expected[4].values().iter().zip(got[4].values()) {
                prop_assert!(near(*e, g, bound), "{}: {g}, expected {e} +- {bound}", isa.name());
            }
        }

        /// A row's bits are those it has alone, where no matrix unit reads it with others.
        #[test]
        fn company_changes_no_bit(
            isa in isas(), rows in 2..below(20, 4), few in any::<bool>(), is_limited in any::<bool>(), biased in any::<bool>(),
            corrected in any::<bool>(), seed in any::<u64>(),
        ) {
            let [experts, chosen, n, k] = [6, 3, 13, 40];
            let m = mixture(DType::Bf16, [rows, experts, chosen, n, k], [few, biased, corrected], 0, seed);
            let counting = Counting::of(if corrected { Weighting::Sigmoids } else { Weighting::Chosen });
            let p = experts_up::Params { gating: gating(is_limited), order: 0, counting, eps: 0.0 };
            let row = |memory: &Memory, r: usize| {
                let mut one = memory.clone();
                one.operand.extent[0] = 1;
                one.operand.offset_bytes += (r * one.operand.stride_elems[0] as usize * 4) as u64;
                one
            };
            let up = |rows: usize, of: &dyn Fn(&Memory) -> Memory| {
                let mut io = m.first();
                for at in [experts_up::slot::X, experts_up::slot::LOGITS, experts_up::slot::Y] {
                    io[at] = of(&io[at]);
                }
                let [_, made] = both::<ExpertsUp>(isa, &p, &io, step(0, rows as u32), 0);
                let (residual, y) = (of(&m.residual), of(&m.y));
                let weights = [&m.down, &m.down_bias, &m.correction].map(Memory::clone);
                let [down, bias, correction] = weights;
                let io = [made[4].clone(), io[1].clone(), down, residual, y, bias, correction];
                let p = experts_down::Params { order: 0, counting };
                let [_, y] = both::<ExpertsDown>(isa, &p, &io, step(0, rows as u32), 0);
                y[4].values()
            };
            let all = up(rows, &Memory::clone);
            for r in 0..rows {
                prop_assert_eq!(&all[r * k..][..k], &up(1, &|memory| row(memory, r))[..]);
            }
        }
    }

    /// Activations and scales are such that in fewer bits nothing is rounded but sums.
    #[test]
    fn agree_with_their_reference_in_fewer_bits() {
        let [experts, chosen, n, k] = [5, 3, 96, 352];
        let whole = |extents: &[usize], of: usize| {
            // A block's largest is 127 of 128.
            let number = |i: usize| if i.is_multiple_of(Q4_BLOCK) { 127 } else { (37 * (i + of)) as i32 % 251 - 125 };
            Memory::new(DType::F32, extents, 0, 1, |i| number(i) as f32 / 128.0)
        };
        for wd in FEWER_BITS {
            let stack = |of: usize, [n, k]: [usize; 2]| {
                let power = |r, b| [0.5, 1.0, 2.0, 0.25][(r + b + of) % 4];
                let number = |r, i| (noise(of as u64, r * k + i).to_bits() >> 5) as u8;
                let mut all = match wd {
                    DType::Q8 => Memory::q8(experts * n, k, |r, i| number(r, i) as i8 / 2, |r, b| power(r, b) / 128.0),
                    DType::Q4 => {
                        Memory::fours(wd, [experts * n, k], |r, i| number(r, i) % 16, |r, b| power(r, b) / 64.0)
                    }
                    _ => Memory::fours(wd, [experts * n, k], |r, i| number(r, i) % 16, |r, b| power(r, b) / 8.0),
                };
                let row = all.operand.stride_elems[0];
                let (extent, stride_elems) = ([experts as u32, n as u32, k as u32, 1], [n as u32 * row, row, 0, 0]);
                all.operand = Operand { rank: 3, extent, stride_elems, ..all.operand };
                all
            };
            for (isa, rows, order) in
                Isa::available().iter().flat_map(|isa| [(isa, 1, 0), (isa, 7, 0), (isa, 7, 2), (isa, 7, 3)])
            {
                let logits = Memory::new(DType::F32, &[rows, experts], 0, 0, |i| noise(3, i));
                let counting = Counting::of(Weighting::Chosen);
                let p = experts_up::Params { gating: SILU, order, counting, eps: 0.0 };
                let y = |extents: &[usize]| Memory::new(DType::F32, extents, 0, 1, |_| 77.0);
                let [gate, up] = [1, 2].map(|of| stack(of, [n, k]));
                let none = Memory::absent;
                let io = [
                    whole(&[rows, k], 1),
                    logits.clone(),
                    gate,
                    up,
                    y(&[rows, chosen, n]),
                    none(),
                    none(),
                    none(),
                    none(),
                ];
                let of_up = both::<ExpertsUp>(*isa, &p, &io, step(0, rows as u32), 0).map(|io| io[4].values());
                let io =
                    [whole(&[rows, chosen, n], 2), logits, stack(4, [k, n]), none(), y(&[rows, k]), none(), none()];
                let p = experts_down::Params { order, counting };
                let of_down = both::<ExpertsDown>(*isa, &p, &io, step(0, rows as u32), 0).map(|io| io[4].values());
                for [expected, got] in [of_up, of_down] {
                    let largest = expected.iter().fold(0.0f32, |a, b| a.max(b.abs()));
                    assert!(largest > 1.0);
                    for (e, g) in expected.iter().zip(got) {
                        assert!(near(*e, g, 16.0 * ORDER * largest), "{wd} {} {order}: {g}, expected {e}", isa.name());
                    }
                }
            }
        }
    }

    /// Matrices that lie apart are what they are one after the other.
    #[test]
    fn parts_may_lie_apart() {
        let [rows, experts, chosen, n, k] = [3, 5, 2, 7, 24];
        let m = mixture(DType::Bf16, [rows, experts, chosen, n, k], [false; 3], 0, 9);
        let p = experts_up::Params { gating: SILU, order: 0, counting: Counting::of(Weighting::All), eps: 0.0 };
        let operands = m.first();
        let spec = Spec::of(ExpertsUp::TASK_TYPE).expect("the kernel is listed");
        let task = TaskDesc { task_type: ExpertsUp::TASK_TYPE, params: param_words(&p), ..TaskDesc::zeroed() };
        let run = |tensors: &[Tensor], cpu: bool| {
            let call = Call { tensors, task: &task, step: &step(0, rows as u32), programs: &[] };
            let mut scratch = Scratch::default();
            let result = if cpu { (spec.cpu)(&call, &mut scratch) } else { (spec.reference)(&call) };
            assert!(result.is_ok(), "{result:?}");
        };
        // Columns 2 to 5 of each expert.
        let mut boxes: Vec<Memory> = operands.to_vec();
        for at in [2, 3] {
            boxes[at].operand.extent[1] = 3;
            boxes[at].operand.offset_bytes += 2 * 2 * u64::from(boxes[at].operand.stride_elems[1]);
        }
        boxes[4].operand.extent[2] = 3;
        let part_bytes = 2 * boxes[2].operand.stride_elems[0] as usize;
        assert!(part_bytes.is_multiple_of(8), "parts begin on words");
        for cpu in [false, true] {
            let [together, apart] = [(); 2].map(|()| boxes.clone());
            run(&together.iter().map(Memory::tensor).collect::<Vec<_>>(), cpu);
            // From the last to the first, each in memory of its own.
            let parts: Vec<Vec<Vec<u64>>> = [2, 3]
                .map(|at| {
                    let words = |e: usize| apart[at].words[e * part_bytes / 8..].iter().take(part_bytes / 8 + 1);
                    (0..experts).map(|e| words(e).copied().collect()).collect()
                })
                .to_vec();
            let tables: Vec<Vec<*mut u8>> =
                parts.iter().map(|parts| parts.iter().map(|part| part.as_ptr().cast_mut().cast()).collect()).collect();
            let tensors: Vec<Tensor> = (0..6)
                .map(|at| match at {
                    // SAFETY: each part holds its matrix, and nobody writes it.
                    2 | 3 => unsafe { Tensor::of_parts(&tables[at - 2], part_bytes, &apart[at].operand) },
                    _ => apart[at].tensor(),
                })
                .collect();
            run(&tensors, cpu);
            assert_eq!(together[4].values(), apart[4].values());
        }
    }

    #[test]
    fn what_is_no_stack_of_parts_is_refused() {
        let stack = mixture(DType::Bf16, [1, 4, 1, 2, 8], [false; 3], 0, 1).gate.operand;
        let memory = [0u64; 16];
        let parts = [memory.as_ptr().cast_mut().cast::<u8>(); 4];
        let apart = stack.stride_elems[0] as usize * 2;
        let stack = Operand { offset_bytes: 0, ..stack };
        let judge = |parts: &[*mut u8], bytes: usize, operand: Operand| {
            // SAFETY: nothing is read.
            std::panic::catch_unwind(|| unsafe { Tensor::of_parts(parts, bytes, &operand).extent(0) }).is_ok()
        };
        assert!(judge(&parts, apart, stack));
        assert!(!judge(&parts[..3], apart, stack) && !judge(&parts, apart + 2, stack));
        assert!(!judge(&parts, apart, Operand { offset_bytes: 2, ..stack }));
        assert!(!judge(&parts, apart, Operand { rank: 2, ..stack }));
    }
}

mod linear {
    use super::*;
    use crate::kernels::gated_linear::{self, GatedLinear};
    use crate::kernels::linear::{Activation, Linear, MULTIPLIES, Order, Params};

    const ACTIVATIONS: [Activation; 6] = [
        Activation::None,
        Activation::Gelu,
        Activation::Silu,
        Activation::Relu,
        Activation::GeluTanh,
        Activation::Capped(3.0),
    ];

    /// What another order of summation may change, relative to sum |x| |w|.
    const ORDER: f32 = 1.0 / (1 << 18) as f32;

    /// A product's operands: x, w, bias, residual and y, and no others.
    fn io_of([x, w, bias, residual, y]: [Memory; 5]) -> [Memory; 10] {
        let [a, b, c, d, e] = [(); 5].map(|()| Memory::absent());
        [x, w, bias, residual, y, a, b, c, d, e]
    }

    /// sum |x| |w| of every output, with what a body may be off relative to it.
    fn bound(x: &Memory, w: &Memory, r: usize, n: usize) -> f32 {
        let (x, w) = (x.tensor(), w.tensor());
        let size: f32 = (0..x.extent(1)).map(|k| (x.get([r, k]) * w.get([n, k])).abs()).sum();
        size * ORDER + 1e-30
    }

    /// Whether the products of x and w are a matrix unit's.
    fn is_on_unit(isa: Isa, order: u32, x: &Memory, w: &Memory) -> bool {
        let [rows, k] = [0, 1].map(|dim| x.tensor().extent(dim));
        let least = if order == 1 && w.tensor().dtype() == DType::F32 { 32 } else { 2 };
        order > 0 && isa.has_matrix_unit() && k > 0 && k.is_multiple_of(32) && rows >= least
    }

    /// As many as `k`, in whole tiles where there is a unit for these.
    fn whole(isa: Isa, k: usize) -> usize {
        if isa.has_matrix_unit() { k.next_multiple_of(32) } else { k }
    }

    /// Whether x and w are rounded to bf16 and multiplied in pairs.
    fn is_in_pairs(isa: Isa, order: u32, x: &Memory, w: &Memory) -> bool {
        let is_for = match w.tensor().dtype() {
            DType::Q8 | DType::Q4 | DType::Mx4 | DType::Int4 => order >= Order::Prompt as u32,
            DType::Bf16 => order == Order::Rounded as u32,
            _ => false,
        };
        isa.multiplies_pairs() && x.tensor().extent(0) >= 2 && is_for
    }

    /// A matrix of what bf16 has next to the elements of this.
    fn rounded(matrix: &Memory) -> Memory {
        let (tensor, extents) = (matrix.tensor(), [0, 1].map(|dim| matrix.tensor().extent(dim)));
        Memory::new(DType::Bf16, &extents, 0, 0, |i| tensor.get([i / extents[1], i % extents[1]]))
    }

    /// [`both`], in pairs with the reference of `matrices` that are [rounded]: its operands before it, and those after
    /// each.
    fn as_taken<K: MacroKernel + Numbered, const N: usize>(
        (isa, p): (Isa, &K::Params),
        io: &[Memory; N],
        (in_pairs, matrices): (bool, &[usize]),
        (step, row_first): (Step, u32),
    ) -> ([Memory; N], [Vec<Memory>; 2]) {
        let [expected, got] = both::<K>(isa, p, io, step, row_first);
        let mut taken = io.clone();
        if !in_pairs {
            return (taken, [expected, got]);
        }
        matrices.iter().for_each(|&at| taken[at] = rounded(&io[at]));
        let [expected, _] = both::<K>(isa, p, &taken, step, row_first);
        (taken, [expected, got])
    }

    /// What pairs may be off beside the products of what is [rounded], which are exact: another order of summation, and
    /// subnormal numbers, which are zeros.
    fn bound_of_pairs(x: &Memory, w: &Memory, r: usize, n: usize) -> f32 {
        let (xt, wt) = (x.tensor(), w.tensor());
        let lost: f32 = (0..xt.extent(1)).map(|k| xt.get([r, k]).abs() + wt.get([n, k]).abs() + 2.0).sum();
        2.0 * bound(x, w, r, n) + lost * f32::MIN_POSITIVE
    }

    /// [`bound`], or what a matrix unit may be off. In two terms of bf16 a number keeps 16 bits, so that each is off by
    /// 2^-17 of its size, and its second term is at most 2^-8 of it: with bf16 weights sum |x| |w| * 2^-17; where
    /// weights are in terms too, 2^-17 for each factor and 2^-16 for the product of their second terms, which is left
    /// out, together 2^-15. Each order of summation has its part. The unit takes subnormal numbers for zeros: a term of
    /// an activation, one of a weight, a sum.
    fn bound_by(on_unit: bool, x: &Memory, w: &Memory, r: usize, n: usize) -> f32 {
        if !on_unit {
            return bound(x, w, r, n);
        }
        let terms = if w.operand.dtype == DType::Bf16 as u16 { 1.0 / 4.0 } else { 1.0 } / (1 << 15) as f32;
        let (xt, wt) = (x.tensor(), w.tensor());
        let lost: f32 = (0..xt.extent(1)).map(|k| xt.get([r, k]).abs() + wt.get([n, k]).abs() + 2.0).sum();
        bound(x, w, r, n) * (2.0 + terms / ORDER) + lost * f32::MIN_POSITIVE
    }

    proptest! {
        #![proptest_config(cases(400))]
        #[test]
        fn agrees_with_its_reference(
            isa in isas(), wd in dtypes(), xd in dtypes(), yd in dtypes(), activation in 0usize..6,
            rows in 0..below(20, 4), extra_rows in 0usize..3, n in 1..below(23, 7), k in 0..below(300, 40),
            long in any::<bool>(), gap in 0usize..9, skew in 0usize..2, bias in any::<bool>(), residual in any::<bool>(), kind in 0u32..7,
            order in 0u32..4, seed in any::<u64>(),
        ) {
            // Long rows pass the prefetch distance and the block of k; whole tiles and several of them are a matrix
            // unit's.
            let (rows, n, k) = match order {
                2.. => (below(3, 1) * rows, below(4, 2) * n, whole(isa, if long { k * below(3, 1) } else { k })),
                _ => (rows, n, if long { k * below(23, 1) } else { k }),
            };
            let x = Memory::new(xd, &[rows + extra_rows, k], gap, skew, |i| special(kind, seed, i));
            let w = Memory::new(wd, &[n, k], gap, skew, |i| special(kind, seed ^ 1, i + 5) * 0.5);
            let optional = |there: bool, extents: &[usize]| match there {
                true => Memory::new(yd, extents, 0, skew, |i| noise(seed ^ 2, i)),
                false => Memory::absent(),
            };
            let bias = optional(bias, &[n]);
            let residual = optional(residual, &[rows + extra_rows, n]);
            let y = Memory::new(yd, &[rows + extra_rows, n], gap, skew, |_| 77.0);
            let io = io_of([x, w, bias, residual, y]);
            let on_unit = is_on_unit(isa, order, &io[0], &io[1]);
            let multiplies = if io[3].operand.is_present() && seed % 3 == 0 { MULTIPLIES } else { 0 };
            let activation = ACTIVATIONS[activation].number() | multiplies;
            let p = Params { activation, eps: 0.0, order, ..Default::default() };
            let in_pairs = is_in_pairs(isa, order, &io[0], &io[1]);
            let (io, [expected, got]) =
                as_taken::<Linear, _>((isa, &p), &io, (in_pairs, &[0, 1]), (step(0, 3 + rows as u32), 3));
            let (expected, got) = (expected[4].values(), got[4].values());
            for (i, (e, g)) in expected.iter().zip(&got).enumerate() {
                let (r, c) = (i / n, i % n);
                if r >= rows {
                    prop_assert_eq!((*e, *g), (77.0, 77.0));
                    continue;
                }
                // No activation is steeper than 1.13.
                let off = if in_pairs { bound_of_pairs(&io[0], &io[1], r, c) } else { bound_by(on_unit, &io[0], &io[1], r, c) };
                let tolerance = 1.2 * off + unit(yd) * (e.abs() + 1.0);
                // An infinite output may come of a finite sum's rounding only where f16 ends. With activations in two
                // terms an infinite weight may give NaN, of which activations make what they will.
                // A cap leaves no infinity to be seen.
                let is_capped = activation & !MULTIPLIES > Activation::GeluTanh.number();
                let is_lost = (on_unit || in_pairs) && (e.is_infinite() || is_capped && off.is_infinite());
                prop_assert!(is_lost || near(*e, *g, tolerance), "{} [{r}, {c}]: {g}, expected {e} +- {tolerance}", isa.name());
            }
        }

        /// Bodies may keep activations in 15 bits of their block's largest, or 16, beside weights in 8, and in 8 beside
        /// such in 4.
        #[test]
        fn weights_in_few_bits_agree_with_their_reference(
            isa in isas(), wd in prop::sample::select(&FEWER_BITS[..]), rows in 0..below(20, 3), n in 1..below(23, 6), k in 1..below(700, 150), gap in 0usize..9,
            tiny in any::<bool>(), gated in any::<bool>(), order in 0u32..4, seed in any::<u64>(),
        ) {
            let (rows, n, k) = if order >= 2 { (below(3, 1) * rows, below(4, 2) * n, whole(isa, k)) } else { (rows, n, k) };
            // Blocks of very different sizes, some of zeros, some too small for an inverse.
            let size = |i: usize| [1.0, 100.0, 0.0, if tiny { 1e-36 } else { 1e-3 }][i / Q8.elems % 4];
            let x = Memory::new(DType::F32, &[rows, k], gap, 1, |i| size(i % k) * noise(seed, i));
            let weights = |s: u64| {
                let part = move |r: usize, i: usize| noise(seed ^ s, r * 10_000 + i);
                let scale = move |r, b| 0.01 * (noise(seed ^ s ^ 1, r * 100 + b).abs() + 0.1);
                if wd == DType::Q8 {
                    return Memory::q8(n, k, |r, i| (127.0 * part(r, i)) as i8, scale);
                }
                // Scales have signs; MXFP4's are powers of two.
                let power = |scale: f32| if wd == DType::Mx4 { 2f32.powi(scale.log2() as i32) } else { scale };
                let signed = |r, b| power(scale(r, b)) * if b % 3 == 0 { -2.0 } else { 2.0 };
                Memory::fours(wd, [n, k], |r, i| (7.999 * (1.0 + part(r, i))) as u8, signed)
            };
            let (block_elems, steps) = if wd == DType::Q8 { (Q8.elems, 16384.0) } else { (Q4_BLOCK, 254.0) };
            let y = Memory::new(DType::F32, &[rows, n], gap, 0, |_| 77.0);
            let (w, up) = (weights(2), weights(4));
            let in_pairs = is_in_pairs(isa, order, &x, &w);
            let (x, w, up, expected, got) = if gated {
                let io = [x, w, up, Memory::absent(), Memory::absent(), y, Memory::absent()];
                let p = gated_linear::Params { activation: ACTIVATIONS[0].number(), eps: 0.0, order, ..Default::default() };
                let (io, [e, g]) =
                    as_taken::<GatedLinear, _>((isa, &p), &io, (in_pairs, &[0, 1, 2]), (step(0, rows as u32), 0));
                let [x, w, up, ..] = io;
                (x, w, up, e[5].values(), g[5].values())
            } else {
                let io = io_of([x, w, Memory::absent(), Memory::absent(), y]);
                let p = Params { activation: 0, eps: 0.0, order, ..Default::default() };
                let (io, [e, g]) = as_taken::<Linear, _>((isa, &p), &io, (in_pairs, &[0, 1]), (step(0, rows as u32), 0));
                let [x, w, ..] = io;
                (x, w, up, e[4].values(), g[4].values())
            };
            let off = |w: &Memory, r: usize, c: usize| {
                let (xt, wt) = (x.tensor(), w.tensor());
                let block = |b: usize| {
                    let range = b * block_elems..((b + 1) * block_elems).min(k);
                    let largest = range.clone().map(|i| xt.get([r, i]).abs()).fold(0f32, f32::max);
                    largest * range.map(|i| wt.get([c, i]).abs()).sum::<f32>()
                };
                if in_pairs {
                    return bound_of_pairs(&x, w, r, c);
                } else if is_on_unit(isa, order, &x, w) {
                    return bound_by(true, &x, w, r, c);
                }
                (0..k.div_ceil(block_elems)).map(block).sum::<f32>() / steps + bound(&x, w, r, c)
            };
            let product = |w: &Memory, r: usize, c: usize| -> f32 {
                (0..k).map(|i| x.tensor().get([r, i]) * w.tensor().get([c, i])).sum::<f32>().abs()
            };
            for (i, (e, g)) in expected.iter().zip(&got).enumerate() {
                let (r, c) = (i / n, i % n);
                let tolerance = match gated {
                    false => off(&w, r, c),
                    true => {
                        let (dw, du) = (off(&w, r, c), off(&up, r, c));
                        dw * (product(&up, r, c) + du) + du * product(&w, r, c)
                    }
                };
                prop_assert!(near(*e, *g, 1.1 * tolerance), "{} [{r}, {c}]: {g}, expected {e} +- {tolerance}", isa.name());
            }
        }

        #[test]
        fn gated_agrees_with_its_reference(
            isa in isas(), wd in dtypes(), xd in dtypes(), rows in 0..below(14, 4), n in 1..below(23, 7), k in 1..below(500, 40),
            gap in 0usize..9, skew in 0usize..2, biased in any::<bool>(), activation in 0usize..6, order in 0u32..4,
            seed in any::<u64>(),
        ) {
            let (rows, n, k) = if order >= 2 { (below(3, 1) * rows, below(4, 2) * n, whole(isa, k)) } else { (rows, n, k) };
            let x = Memory::new(xd, &[rows, k], gap, skew, |i| noise(seed, i));
            let gate = Memory::new(wd, &[n, k], gap, skew, |i| noise(seed ^ 1, i));
            let up = Memory::new(wd, &[n, k], 0, skew, |i| noise(seed ^ 2, i));
            let bias = |s: u64| match biased {
                true => Memory::new(DType::F32, &[n], 0, skew, |i| noise(seed ^ s, i)),
                false => Memory::absent(),
            };
            let y = Memory::new(DType::F32, &[rows, n], gap, skew, |_| 77.0);
            let io = [x, gate, up, bias(3), bias(4), y, Memory::absent()];
            let p = gated_linear::Params { activation: ACTIVATIONS[activation].number(), eps: 0.0, order, ..Default::default() };
            let in_pairs = is_in_pairs(isa, order, &io[0], &io[1]);
            let (io, [expected, got]) =
                as_taken::<GatedLinear, _>((isa, &p), &io, (in_pairs, &[0, 1, 2]), (step(0, rows as u32), 0));
            let (expected, got) = (expected[5].values(), got[5].values());
            for (i, (e, g)) in expected.iter().zip(&got).enumerate() {
                let (r, c) = (i / n, i % n);
                let bound = |i: usize| match in_pairs {
                    true => bound_of_pairs(&io[0], &io[i], r, c),
                    false => bound_by(is_on_unit(isa, order, &io[0], &io[i]), &io[0], &io[i], r, c),
                };
                let (dg, du) = (1.2 * bound(1) + 1e-5, bound(2) + 1e-5);
                // Each factor is off by its bound; both factors are at most their bound's sum in size.
                let size = |d: f32| d / ORDER + 1.0;
                let tolerance = dg * size(du) + du * size(dg) + dg * du;
                prop_assert!(near(*e, *g, tolerance), "{} [{r}, {c}]: {g}, expected {e} +- {tolerance}", isa.name());
            }
        }
    }

    proptest! {
        #![proptest_config(cases(80))]
        /// Tiles of every width and height, several panels of columns, and of `k` so long that rows come in several
        /// blocks.
        #[test]
        fn sums_in_order_agree_with_their_reference(
            isa in isas(), xd in dtypes(), rows in 1..below(150, 20), n in 1..below(220, 24), k in 0..below(40, 12),
            long in any::<bool>(), gap in 0usize..9, skew in 0usize..2, bias in any::<bool>(), kind in 0u32..7, whole_tiles in any::<bool>(),
            seed in any::<u64>(),
        ) {
            let (n, k) = if long { (n % 7 + 1, k + below(2100, 20)) } else { (n, k) };
            let k = if whole_tiles { k.next_multiple_of(32) } else { k };
            let x = Memory::new(xd, &[rows, k], gap, skew, |i| special(kind, seed, i));
            let w = Memory::new(DType::F32, &[n, k], gap, skew, |i| special(kind, seed ^ 1, i + 5) * 0.5);
            let bias = if bias { Memory::new(DType::F32, &[n], 0, skew, |i| noise(seed ^ 2, i)) } else { Memory::absent() };
            let y = Memory::new(DType::F32, &[rows, n], gap, skew, |_| 77.0);
            let io = io_of([x, w, bias, Memory::absent(), y]);
            let p = Params { activation: 0, eps: 0.0, order: Order::Free as u32, ..Default::default() };
            let [expected, got] = both::<Linear>(isa, &p, &io, step(0, rows as u32), 0);
            for (i, (e, g)) in expected[4].values().iter().zip(&got[4].values()).enumerate() {
                let (r, c) = (i / n, i % n);
                let on_unit = is_on_unit(isa, p.order, &io[0], &io[1]);
                let tolerance = bound_by(on_unit, &io[0], &io[1], r, c) + unit(DType::F32) * (e.abs() + 1.0);
                prop_assert!(near(*e, *g, tolerance), "{} [{r}, {c}]: {g}, expected {e} +- {tolerance}", isa.name());
            }
        }
    }

    #[test]
    fn activations_that_are_not_finite_show_through_few_bits() {
        let eight_bit = Memory::q8(5, 130, |r, i| (r + i) as i8 | 1, |_, _| 0.1);
        // In none is the bad one's weight zero.
        let fours = |dtype| Memory::fours(dtype, [5, 130], |r, i| ((r + i) as u8 % 16) | 1, |_, _| 0.1);
        let all = [eight_bit, fours(DType::Q4), fours(DType::Mx4), fours(DType::Int4)];
        for (isa, w) in Isa::available().iter().flat_map(|isa| all.iter().map(move |w| (isa, w))) {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let x = Memory::new(DType::F32, &[1, 130], 0, 0, |i| if i == 77 { bad } else { 0.5 });
                let w = w.clone();
                let y = Memory::new(DType::F32, &[1, 5], 0, 0, |_| 0.0);
                let io = io_of([x, w, Memory::absent(), Memory::absent(), y]);
                let [_, got] = both::<Linear>(
                    *isa,
                    &Params { activation: 0, eps: 0.0, order: 0, ..Default::default() },
                    &io,
                    step(0, 1),
                    0,
                );
                assert!(got[4].values().iter().all(|y| !y.is_finite()), "{} {bad}", isa.name());
            }
        }
    }

    /// Rows and columns are cut into tasks in any way, and prompts read at once or token by token: same bits.
    #[test]
    fn bits_do_not_depend_on_how_the_work_is_cut() {
        for isa in Isa::available() {
            let weights = [DType::Bf16, DType::F16, DType::F32, DType::Q8, DType::Q4, DType::Mx4, DType::Int4];
            for (dtype, order) in weights.into_iter().flat_map(|dtype| [0, 1, 2, 3].map(|order| (dtype, order))) {
                // A pass of one row is computed as decode does, and one of few without splitting weights.
                let few = match (order, dtype) {
                    (0, _) => 1,
                    (1, DType::F32) => 32,
                    _ => 2,
                };
                for k in [64, 301, 8000] {
                    let (rows, n) = (61, 13);
                    let x = Memory::new(DType::F32, &[rows, k], 0, 0, |i| noise(1, i));
                    let weights = |first: usize, n: usize| match dtype {
                        DType::Q8 => Memory::q8(
                            n,
                            k,
                            |r, i| (127.0 * noise(2, (first + r) * k + i)) as i8,
                            |r, _| (first + r) as f32,
                        ),
                        DType::Q4 | DType::Mx4 | DType::Int4 => Memory::fours(
                            dtype,
                            [n, k],
                            |r, i| (7.999 * (1.0 + noise(2, (first + r) * k + i))) as u8,
                            |r, b| (first + r + b) as f32,
                        ),
                        _ if n == 1 => Memory::new(dtype, &[1, k], 0, 0, |i| noise(2, first * k + i)),
                        _ => Memory::new(dtype, &[n, k], 3, 1, |i| noise(2, i)),
                    };
                    let w = weights(0, n);
                    let y = Memory::new(DType::F32, &[rows, n], 0, 0, |_| 0.0);
                    let io = io_of([x.clone(), w.clone(), Memory::absent(), Memory::absent(), y]);
                    let p = Params { activation: 0, eps: 0.0, order, ..Default::default() };
                    let whole = both::<Linear>(*isa, &p, &io, step(0, rows as u32), 0)[1][4].values();
                    for r in [0, 5, 28] {
                        for c in [0, 3, 12] {
                            let x = Memory::new(DType::F32, &[few, k], 0, 1, |i| noise(1, r * k + i));
                            let w = weights(c, 1);
                            let y = Memory::new(DType::F32, &[few, 1], 0, 0, |_| 0.0);
                            let io = io_of([x, w, Memory::absent(), Memory::absent(), y]);
                            let one = both::<Linear>(*isa, &p, &io, step(0, few as u32), 0)[1][4].values();
                            assert_eq!(one[0].to_bits(), whole[r * n + c].to_bits(), "{} {dtype} {k}", isa.name());
                        }
                    }
                }
            }
        }
    }
}

mod attention {
    use super::*;
    use crate::kernels::attention::{ALL, Attention, Params};
    use crate::kernels::linear::Order;

    struct Case {
        dtype: DType,
        q_dtype: DType,
        rows: usize,
        n_kv: usize,
        group: usize,
        d: usize,
        first_pos: usize,
        /// What is seen up to the own position, and after it.
        seen: [u32; 2],
        /// Multiplies the queries: large ones make one position win.
        sharp: f32,
        /// What stands at positions nobody may see, and sometimes among those that are seen.
        kind: u32,
        order: Order,
        /// How large sinks are, if there are such.
        sinks: Option<f32>,
        seed: u64,
    }

    fn operands(c: &Case) -> [Memory; 5] {
        let context = c.first_pos + c.rows + 3;
        let q = [c.rows, c.n_kv, c.group, c.d];
        let visible = c.first_pos + c.rows;
        let cache = |s: u64| {
            Memory::new(c.dtype, &[c.n_kv, context, c.d], 5, 1, |i| {
                if i / c.d % context < visible { special(c.kind, c.seed ^ s, i) } else { f32::NAN }
            })
        };
        [
            Memory::new(c.q_dtype, &q, 1, 1, |i| c.sharp * noise(c.seed, i)),
            cache(1),
            cache(2),
            Memory::new(DType::F32, &q, 0, 0, |_| 77.0),
            c.sinks.map_or_else(Memory::absent, |size| {
                Memory::new(c.q_dtype, &[c.n_kv, c.group], 3, 1, |i| size * noise(c.seed ^ 3, i))
            }),
        ]
    }

    /// None, or as large as scores, or far above and below them.
    fn sinks() -> impl Strategy<Value = Option<f32>> {
        prop_oneof![Just(None), Just(Some(2.0)), Just(Some(100.0)), Just(Some(6e4))]
    }

    fn params(c: &Case) -> Params {
        let ([window, ahead], order) = (c.seen, c.order as u32);
        Params { scale: 1.0 / (c.d as f32).sqrt(), window, ahead, splits: 1, order, ..Default::default() }
    }

    /// All positions, or up to so many; none after the own, all, or up to so many.
    fn seen(most: u32) -> impl Strategy<Value = [u32; 2]> {
        let before = prop_oneof![2 => Just(ALL), 1 => 1..=most];
        let after = prop_oneof![2 => Just(0), 1 => Just(ALL), 1 => 1..=most];
        (before, after).prop_map(|(before, after)| [before, after])
    }

    proptest! {
        #![proptest_config(cases(300))]
        #[test]
        fn agrees_with_its_reference(
            isa in isas(), dtype in dtypes(), rows in 1..below(40, 5), n_kv in 1usize..3, group in 1..below(10, 4),
            d in 1..below(150, 24), first_pos in 0..below(200, 70), seen in seen(150), sharp in 0.1f32..8.0, kind in 0u32..20,
            sinks in sinks(), seed in any::<u64>(),
        ) {
            let (q_dtype, order) = (DType::F32, Order::Lanes);
            agrees(isa, Case { dtype, q_dtype, rows, n_kv, group, d, first_pos, seen, sharp, kind, order, sinks, seed })?;
        }
    }

    proptest! {
        #![proptest_config(cases(100))]
        /// On a matrix unit where there is one, or in pairs: tiles of queries and blocks of positions, whole ones and
        /// parts of them.
        #[test]
        fn of_prompts_agrees_with_its_reference(
            q_dtype in dtypes(), rows in 1..below(40, 4), n_kv in 1..below(3, 2), group in 1..below(5, 3), d in 1..below(4, 2),
            ragged in 0usize..32, rounds in any::<bool>(), first_pos in 0..below(600, 10), seen in seen(400), sharp in 0.1f32..8.0, kind in 0u32..20,
            sinks in sinks(), seed in any::<u64>(),
        ) {
            let ragged = if Isa::best().has_matrix_unit() { 0 } else { ragged };
            let (dtype, d, order) = (DType::Bf16, 32 * d - ragged, if rounds { Order::Rounded } else { Order::Prompt });
            let case = Case { dtype, q_dtype, rows, n_kv, group, d, first_pos, seen, sharp, kind, order, sinks, seed };
            agrees(Isa::best(), case)?;
        }
    }

    fn agrees(isa: Isa, case: Case) -> Result<(), TestCaseError> {
        // Where they see what comes after them, more rows; and what one does not see, f32's body multiplies with zero.
        let sees_alike = case.seen[1] == 0 || case.seen == [ALL; 2];
        let rows = case.rows * if case.seen[1] > 0 { 2 } else { 1 };
        let sinks = if case.seen[1] > 0 { None } else { case.sinks };
        let case = Case { rows, kind: if sees_alike { case.kind } else { 0 }, sinks, ..case };
        let (io, step) = (operands(&case), step(case.first_pos as u32, case.rows as u32));
        let [mut expected, got] = both::<Attention>(isa, &params(&case), &io, step, 0);
        // In pairs queries are rounded, and exponentials, each by 2^-9 of itself: no value is larger than 1.
        let in_pairs = case.order == Order::Rounded && isa.multiplies_pairs();
        let mut tolerance = 1.0 / 1024.0;
        if in_pairs {
            let (mut io, q) = (io.clone(), io[0].tensor());
            let [rows, n_kv, group, d] = [case.rows, case.n_kv, case.group, case.d];
            io[0] = Memory::new(DType::Bf16, &[rows, n_kv, group, d], 0, 0, |i| {
                q.get([i / d / group / n_kv, i / d / group % n_kv, i / d % group, i % d])
            });
            [expected, _] = both::<Attention>(isa, &params(&case), &io, step, 0);
            tolerance += 1.0 / 512.0;
        }
        for (i, (e, g)) in expected[3].values().iter().zip(&got[3].values()).enumerate() {
            prop_assert!(near(*e, *g, tolerance), "{} at {i}: {g}, expected {e}", isa.name());
        }
        Ok(())
    }

    #[test]
    fn decoding_token_by_token_gives_the_bits_of_one_pass() {
        for isa in Isa::available() {
            // On a matrix unit too the bits are the rows' own.
            let bf16 = [Order::Lanes, Order::Prompt, Order::Rounded].map(|order| (DType::Bf16, order));
            // Where there are no pairs, a prompt that may be rounded is as any.
            let orders = bf16.into_iter().chain([(DType::F32, Order::Lanes)]);
            let orders = orders.filter(|(_, order)| *order != Order::Rounded || isa.multiplies_pairs());
            let ways = [(ALL, None), (ALL, Some(3.0)), (70, None), (70, Some(3.0))];
            for ((dtype, order), (window, sinks)) in orders.flat_map(|order| ways.map(|way| (order, way))) {
                let (rows, n_kv, group, d) = if order == Order::Lanes { (150, 2, 3, 48) } else { (270, 2, 3, 32) };
                let case = Case {
                    dtype,
                    q_dtype: DType::F32,
                    rows,
                    n_kv,
                    group,
                    d,
                    first_pos: 0,
                    seen: [window, 0],
                    sharp: 3.0,
                    kind: 0,
                    order,
                    sinks,
                    seed: 7,
                };
                let io = operands(&case);
                let whole = both::<Attention>(*isa, &params(&case), &io, step(0, rows as u32), 0)[1][3].values();
                let row = n_kv * group * d;
                for r in [0, 1, 62, 63, 64, 65, 100, 149, 255, 256, 269].into_iter().filter(|r| *r < rows) {
                    let q = Memory::new(DType::F32, &[1, n_kv, group, d], 0, 0, |i| 3.0 * noise(7, r * row + i));
                    let y = Memory::new(DType::F32, &[1, n_kv, group, d], 0, 0, |_| 77.0);
                    let io = [q, io[1].clone(), io[2].clone(), y, io[4].clone()];
                    let one = both::<Attention>(*isa, &params(&case), &io, step(r as u32, 1), 0)[1][3].values();
                    assert!(
                        one.iter().zip(&whole[r * row..]).all(|(a, b)| a.to_bits() == b.to_bits()),
                        "{} {dtype} {order:?} row {r} of {window}, sinks {sinks:?}",
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
            q_dtype: DType::F32,
            rows: 2,
            n_kv: 1,
            group: 1,
            d: 4,
            first_pos: 0,
            seen: [ALL, 0],
            sharp: 1.0,
            kind: 0,
            order: Order::Lanes,
            sinks: None,
            seed: 1,
        };
        let io = operands(&case);
        for isa in Isa::available() {
            let [expected, got] = both::<Attention>(*isa, &params(&case), &io, step(0, 5), 5);
            assert_eq!(expected[3].values(), got[3].values());
        }
    }
}

mod rowwise {
    use super::*;
    use crate::kernels::argmax::{self, ArgmaxPartial};
    use crate::kernels::elementwise::{self, Elementwise, Function};
    use crate::kernels::embedding::{self, Embedding};
    use crate::kernels::layer_norm::{self, LayerNorm};
    use crate::kernels::linear::Activation;
    use crate::kernels::pool::{self, Pool};
    use crate::kernels::rms_norm::{self, RmsNorm};
    use crate::kernels::rope::{self, Rope};
    use crate::kernels::select_row::{self, SelectRow};

    /// Operand `i` of both runs is the same to the bit, or NaN in both.
    fn same(isa: Isa, results: &[Vec<Memory>; 2], i: usize) -> Result<(), TestCaseError> {
        for (at, (e, g)) in results[0][i].values().iter().zip(&results[1][i].values()).enumerate() {
            prop_assert!(
                e.to_bits() == g.to_bits() || e.is_nan() && g.is_nan(),
                "{} at {at}: {g}, expected {e}",
                isa.name()
            );
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(cases(300))]
        #[test]
        fn norms_agree_with_their_references(
            isa in isas(), xd in dtypes(), wd in dtypes(), yd in dtypes(), rows in 0usize..5, extra in 0usize..2,
            hidden in 1..below(300, 70), gap in 0usize..5, skew in 0usize..2, with_residual in any::<bool>(), kind in 0u32..12,
            seed in any::<u64>(),
        ) {
            let extents = [rows + extra, hidden];
            let x = Memory::new(xd, &extents, gap, skew, |i| special(kind, seed, i));
            let w = Memory::new(wd, &[hidden], 0, skew, |i| noise(seed ^ 1, i));
            let b = Memory::new(wd, &[hidden], 0, skew, |i| noise(seed ^ 2, i));
            let residual = match with_residual {
                true => Memory::new(yd, &extents, gap, skew, |i| noise(seed ^ 3, i)),
                false => Memory::absent(),
            };
            let y = Memory::new(yd, &extents, 0, 0, |_| 7.0);
            let pass = step(0, rows as u32);
            let [d, e, f] = [(); 3].map(|()| Memory::absent());
            let scale = if skew == 0 || !with_residual { Memory::absent() } else { Memory::new(wd, &[1], 0, 1, |_| 0.75) };
            let io = [x.clone(), w.clone(), y.clone(), residual.clone(), d, e, f, scale];
            compare(isa, &both::<RmsNorm>(isa, &rms_norm::Params { eps: 1e-6 }, &io, pass, 0), 2, 1e-5)?;
            // A variance near nothing magnifies what the mean's order of summation leaves: 2^-24 / sqrt(eps).
            let io = [x, residual, w, b, y];
            compare(isa, &both::<LayerNorm>(isa, &layer_norm::Params { eps: 1e-5 }, &io, pass, 0), 4, 5e-5)?;
        }

        #[test]
        fn elementwise_agrees_with_its_reference(
            isa in isas(), ad in dtypes(), bd in dtypes(), yd in dtypes(), rows in 0usize..4, n in 1usize..70,
            gap in 0usize..5, skew in 0usize..2, function in 0usize..5, activation in 0usize..6, size in 0.0f32..100.0,
            first in 0u32..5000, original in 1u32..100, kind in 0u32..7, seed in any::<u64>(),
        ) {
            let functions =
                [Function::Add, Function::Mul, Function::Activate, Function::ActivateMul, Function::Lengthen];
            let function = functions[function];
            let activation = [
                Activation::None, Activation::Gelu, Activation::Silu, Activation::Relu, Activation::GeluTanh,
                Activation::Capped(2.0),
            ][activation];
            let a = Memory::new(ad, &[rows, n], gap, skew, |i| size * special(kind, seed, i));
            let b = match function {
                Function::Activate | Function::Lengthen => Memory::absent(),
                _ => Memory::new(bd, &[rows, n], gap, skew, |i| noise(seed ^ 1, i)),
            };
            let y = Memory::new(yd, &[rows, n], gap, skew, |_| 7.0);
            let (function, activation) = (function as u32, activation.number());
            let p = elementwise::Params { function, activation, beta: 0.1, original };
            let results = both::<Elementwise>(isa, &p, &[a, b, y], step(first, rows as u32), 0);
            // Of gelu |x| * 6e-7 is allowed.
            compare(isa, &results, 2, 1e-6 * (size + 1.0))?;
        }

        #[test]
        fn rope_agrees_with_its_reference(
            isa in isas(), cache in dtypes(), rows in 0usize..4, n_kv in 1usize..3, group in 1usize..4,
            half in 1..below(70, 20), first in 0..below(50, 4), normed in any::<bool>(), part in 0.0..2.0,
            appends in any::<bool>(), value in 0..below(300, 40), norms in 0u32..4, kind in 0u32..7,
            seed in any::<u64>(),
        ) {
            let d = 2 * half;
            // Of values of the same size, or another.
            let n = if value % 2 == 0 { d } else { value };
            // All, or some.
            let turned_pairs = half.min((part * half as f64) as usize) as u32;
            let norm = |s: u64| match normed {
                true => Memory::new(DType::Bf16, &[d], 0, 1, |i| noise(seed ^ s, i)),
                false => Memory::absent(),
            };
            let of_head = |s: u64, d| match appends {
                true => Memory::new(DType::F32, &[rows, n_kv, d], 3, 1, |i| special(kind, seed ^ s, i)),
                false => Memory::absent(),
            };
            let of_cache = |d| match appends {
                true => Memory::new(cache, &[n_kv, first + rows + 2, d], 0, 1, |_| 7.0),
                false => Memory::absent(),
            };
            let io = [
                Memory::new(DType::F32, &[rows, n_kv, group, d], 3, 1, |i| special(kind, seed, i)),
                of_head(1, d),
                of_head(2, n),
                norm(3),
                if appends { norm(4) } else { Memory::absent() },
                Memory::new(DType::F32, &[half], 0, 1, |i| 1.0 / (i + 1) as f32),
                of_cache(d),
                of_cache(n),
            ];
            let norms = if turned_pairs == half as u32 { norms } else { norms & rope::VALUES };
            let params = rope::Params { eps: 1e-6, turned_pairs, factor: 1.25, norms };
            let results = both::<Rope>(isa, &params, &io, step(first as u32, rows as u32), 0);
            for i in [0, 6, 7].into_iter().filter(|i| *i == 0 || appends) {
                compare(isa, &results, i, 1e-5)?;
            }
            // Values that are not normalised are copied, subnormal ones too.
            if appends && norms & rope::VALUES == 0 {
                same(isa, &results, 7)?;
            }
        }

        #[test]
        fn rows_are_picked_and_added_as_the_references_do(
            isa in isas(), td in dtypes(), yd in dtypes(), rows in 1usize..6, hidden in 1..below(100, 40), gap in 0usize..3,
            bert in any::<bool>(), mean in 0u32..2, normalise in 0u32..2, kind in 0u32..7, seed in any::<u64>(),
        ) {
            let tokens = Memory::new(DType::I32, &[rows + 3], 0, 0, |i| ((seed as usize).wrapping_add(i) % 9) as f32);
            let table = Memory::new(td, &[9, hidden], gap, 1, |i| special(kind, seed, i));
            let optional = |n: usize| match bert {
                true => Memory::new(td, &[n, hidden], gap, 1, |i| special(kind, seed ^ n as u64, i)),
                false => Memory::absent(),
            };
            let y = Memory::new(yd, &[rows, hidden], gap, 1, |_| 7.0);
            let io = [tokens, table.clone(), optional(rows + 3), optional(2), y.clone()];
            let scale = [1.0, 7.3][kind as usize % 2];
            let results = both::<Embedding>(isa, &embedding::Params { vocab: 9, scale }, &io, step(3, rows as u32), 0);
            compare(isa, &results, 4, 0.0)?;
            if !bert {
                same(isa, &results, 4)?;
            }

            let one = Memory::new(yd, &[1, hidden], 0, 1, |_| 7.0);
            let results =
                both::<SelectRow>(isa, &select_row::Params {}, &[table.clone(), one.clone()], step(0, rows as u32), 0);
            same(isa, &results, 1)?;
            let p = pool::Params { mean, normalise };
            compare(isa, &both::<Pool>(isa, &p, &[table, one], step(0, rows as u32), 0), 1, 1e-5)?;
        }

        #[test]
        fn argmax_is_its_reference_exactly(
            isa in isas(), n in 0usize..200, levels in 1i32..50, nan in 0usize..4, low in any::<bool>(), seed in any::<u64>(),
        ) {
            // Few levels make ties; -inf and NaN among them or alone.
            let x = Memory::new(DType::F32, &[1, n], 0, 1, |i| {
                let value = (noise(seed, i) * levels as f32).round();
                if nan == 3 || nan > 0 && i % 3 < nan { f32::NAN } else if low { f32::NEG_INFINITY } else { value }
            });
            let io = [x, Memory::new(DType::F32, &[1], 0, 0, |_| 1.0), Memory::new(DType::I32, &[1], 0, 0, |_| 1.0)];
            let p = argmax::Params { blocks: 1, len_elems: n as u32 };
            let [expected, got] = both::<ArgmaxPartial>(isa, &p, &io, step(0, 1), 0);
            prop_assert_eq!(expected[1].values()[0].to_bits(), got[1].values()[0].to_bits());
            prop_assert_eq!(expected[2].values(), got[2].values());
        }
    }
}

mod vectors {
    use super::*;
    use crate::cpu::simd::{Body, Leaf, Level, Simd, exp};
    use core::marker::PhantomData;
    use half::{bf16, f16};

    struct Exp<'a>(&'a mut [f32; 16]);
    struct ExpLeaf<'a, S>(&'a mut [f32; 16], PhantomData<S>);

    impl Body for Exp<'_> {
        type Output = ();
        unsafe fn run<L: Level>(self) {
            // SAFETY: the level exists (caller).
            unsafe { L::S::call(ExpLeaf::<L::S>(self.0, PhantomData)) }
        }
    }

    impl<S: Simd> Leaf for ExpLeaf<'_, S> {
        type Output = ();
        #[inline(always)]
        unsafe fn run(self) {
            // SAFETY: sixteen elements are whole vectors.
            unsafe {
                for i in (0..16).step_by(S::LANES) {
                    let p = self.0.as_mut_ptr().add(i);
                    S::store(p, exp::<S>(S::load(p)));
                }
            }
        }
    }

    #[test]
    fn exp_is_within_two_units_everywhere() {
        for isa in Isa::available() {
            let mut worst = 0.0f64;
            let blocks = below(20_000, 40);
            for block in 0..blocks {
                let step = 200.0 / (16 * blocks) as f32;
                let xs: [f32; 16] = core::array::from_fn(|i| -110.0 + (block * 16 + i) as f32 * step);
                let mut ys = xs;
                isa.run(Exp(&mut ys));
                for (x, y) in xs.iter().zip(ys) {
                    let exact = f64::from(*x).exp();
                    if exact > f64::from(f32::MAX) {
                        assert_eq!(y, f32::INFINITY, "{} exp({x})", isa.name());
                    } else if exact < f64::from(f32::MIN_POSITIVE) {
                        // Subnormal: absolute error.
                        assert!((f64::from(y) - exact).abs() <= 3e-45, "{} exp({x}) = {y}", isa.name());
                    } else {
                        worst = worst.max((f64::from(y) - exact).abs() / exact * (1u64 << 24) as f64);
                    }
                }
            }
            assert!(worst <= 4.0, "{}: {worst} half units", isa.name());
            let mut special = [f32::NAN; 16];
            special[1] = f32::INFINITY;
            special[2] = f32::NEG_INFINITY;
            isa.run(Exp(&mut special));
            assert!(special[0].is_nan() && special[1] == f32::INFINITY && special[2] == 0.0, "{special:?}");
        }
    }

    /// NaN is no largest lane; where there is nothing else it is -inf.
    #[test]
    fn the_largest_lane_is_a_number() {
        struct Largest<'a>(&'a [f32; 16]);
        struct LargestLeaf<'a, S>(&'a [f32; 16], PhantomData<S>);
        impl Body for Largest<'_> {
            type Output = Vec<f32>;
            unsafe fn run<L: Level>(self) -> Vec<f32> {
                // SAFETY: the level exists (caller).
                unsafe { L::S::call(LargestLeaf::<L::S>(self.0, PhantomData)) }
            }
        }
        impl<S: Simd> Leaf for LargestLeaf<'_, S> {
            type Output = Vec<f32>;
            #[inline(always)]
            unsafe fn run(self) -> Vec<f32> {
                // SAFETY: sixteen elements are whole vectors.
                self.0.chunks_exact(S::LANES).map(|lanes| unsafe { S::largest(S::load(lanes.as_ptr())) }).collect()
            }
        }
        for isa in Isa::available() {
            for nan in [f32::NAN, -f32::NAN] {
                for (at, best) in (0..16).map(|at| (at, at as f32 - 20.0)).chain([(3, f32::INFINITY), (5, -0.0)]) {
                    let mut lanes = [nan; 16];
                    lanes[at] = best;
                    let found = isa.run(Largest(&lanes));
                    let lane = at / (16 / found.len());
                    for (i, found) in found.into_iter().enumerate() {
                        assert_eq!(
                            found,
                            if i == lane { best } else { f32::NEG_INFINITY },
                            "{} {at} {nan}",
                            isa.name()
                        );
                    }
                }
            }
        }
    }

    /// Storing and loading 16-bit floats is `half`'s conversion bit for bit, for every upper half and many lower ones.
    #[test]
    fn half_precision_conversions_are_exact() {
        struct Convert<'a>(&'a [f32; 16], &'a mut [u16; 32]);
        struct ConvertLeaf<'a, S>(Convert<'a>, PhantomData<S>);
        impl Body for Convert<'_> {
            type Output = ();
            unsafe fn run<L: Level>(self) {
                // SAFETY: the level exists (caller).
                unsafe { L::S::call(ConvertLeaf::<L::S>(self, PhantomData)) }
            }
        }
        impl<S: Simd> Leaf for ConvertLeaf<'_, S> {
            type Output = ();
            #[inline(always)]
            unsafe fn run(self) {
                // SAFETY: sixteen elements are whole vectors.
                unsafe {
                    for i in (0..16).step_by(S::LANES) {
                        let v = S::load(self.0.0.as_ptr().add(i));
                        S::store_bf16(self.0.1.as_mut_ptr().add(i), v);
                        if HAS_F16 {
                            S::store_f16(self.0.1.as_mut_ptr().add(16 + i), v);
                        }
                    }
                }
            }
        }
        for isa in Isa::available() {
            for upper in (0..=u16::MAX).step_by(below(1, 997)) {
                let xs: [f32; 16] = core::array::from_fn(|i| {
                    let lower = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff, 0x1000, 0x0fff][i % 8];
                    f32::from_bits(u32::from(upper) << 16 | lower)
                });
                let mut bits = [0; 32];
                isa.run(Convert(&xs, &mut bits));
                for i in 0..16 {
                    let b = bf16::from_f32(xs[i]).to_bits();
                    assert_eq!(bits[i], b, "{} bf16 of {:x}", isa.name(), xs[i].to_bits());
                    if !HAS_F16 {
                        continue;
                    }
                    let h = f16::from_f32(xs[i]).to_bits();
                    let both_nan = f16::from_bits(h).is_nan() && f16::from_bits(bits[16 + i]).is_nan();
                    assert!(bits[16 + i] == h || both_nan, "{} f16 of {:x}", isa.name(), xs[i].to_bits());
                }
            }
        }
    }
}
