//! Bodies that go through a sequence's rows one by one.

use super::*;
use crate::kernels::causal_conv::{self, CausalConv};
use crate::kernels::gated::{self, Gated};
use crate::kernels::recurrence::{self, Recurrence};

/// What one pass over all rows leaves of each operand, and what passes over one row each leave. Those in `of_rows` have
/// rows along their first dimension.
fn in_turn<K: MacroKernel + Numbered>(
    isa: Isa,
    params: &K::Params,
    io: &[Memory],
    of_rows: &[usize],
    rows: usize,
) -> [Vec<Vec<f32>>; 2] {
    let values = |memory: &Memory| if memory.operand.is_present() { memory.values() } else { Vec::new() };
    let whole = both::<K>(isa, params, io, step(0, rows as u32), 0)[1].iter().map(values).collect();
    let mut kept: Vec<Memory> = io.to_vec();
    let mut made = vec![Vec::new(); io.len()];
    for r in 0..rows {
        let mut one = kept.clone();
        for slot in of_rows {
            let memory = &mut one[*slot];
            if !memory.operand.is_present() {
                continue;
            }
            let size = memory.operand.dtype().map_or(0, DType::size_bytes) as u64;
            memory.operand.offset_bytes += r as u64 * u64::from(memory.operand.stride_elems[0]) * size;
            memory.operand.extent[0] = 1;
        }
        let [_, got] = both::<K>(isa, params, &one, step(r as u32, 1), 0);
        for (slot, memory) in got.into_iter().enumerate() {
            if of_rows.contains(&slot) {
                made[slot].extend(values(&memory));
            } else {
                made[slot] = values(&memory);
                kept[slot] = memory;
            }
        }
    }
    [whole, made]
}

fn conv_io(sizes: [usize; 3], dtypes: [DType; 2], given: [bool; 3], gap: usize, seed: u64) -> Vec<Memory> {
    let ([rows, n, taps], [xd, yd]) = (sizes, dtypes);
    let maybe = |is_there: bool, extents: &[usize], seed: u64| match is_there {
        true => Memory::new(xd, extents, gap, 1, |i| noise(seed, i)),
        false => Memory::absent(),
    };
    vec![
        Memory::new(xd, &[rows, n], gap, 1, |i| noise(seed, i)),
        Memory::new(DType::Bf16, &[n, taps], 0, 1, |i| noise(seed ^ 1, i)),
        maybe(given[0], &[n], seed ^ 2),
        maybe(given[1], &[rows, n], seed ^ 3),
        maybe(given[2], &[rows, n], seed ^ 4),
        Memory::new(DType::F32, &[taps - 1, n], gap, 0, |i| noise(seed ^ 5, i)),
        Memory::new(yd, &[rows, n], gap, 0, |_| 7.0),
    ]
}

fn recurrence_io(sizes: [usize; 5], dtypes: [DType; 2], [corrects, skips]: [bool; 2], seed: u64) -> Vec<Memory> {
    let ([rows, heads, group, d_k, d_v], [xd, yd]) = (sizes, dtypes);
    let new = |dtype, extents: &[usize], s: u64| Memory::new(dtype, extents, 0, 1, |i| noise(seed ^ s, i));
    vec![
        new(xd, &[rows, heads, d_k], 0),
        new(xd, &[rows, heads, d_k], 1),
        new(xd, &[rows, heads, group, d_v], 2),
        new(DType::F32, &[rows, heads, group], 3),
        if corrects { new(DType::F32, &[rows, heads, group], 4) } else { Memory::absent() },
        new(DType::Bf16, &[heads, group], 5),
        Memory::new(DType::F32, &[heads, group], 0, 1, |i| 30.0 * noise(seed ^ 6, i)),
        new(DType::F32, &[heads, group, d_v, d_k], 7),
        Memory::new(yd, &[rows, heads, group, d_v], 0, 1, |_| 7.0),
        if skips { new(DType::Bf16, &[heads, group], 8) } else { Memory::absent() },
    ]
}

proptest! {
    #![proptest_config(cases(300))]

    #[test]
    fn causal_conv_agrees_with_its_reference(
        isa in isas(), xd in dtypes(), yd in dtypes(), rows in 0usize..5, n in 1usize..300, taps in 2usize..7,
        given in any::<[bool; 3]>(), gap in 0usize..4, first in 0u32..2, activation in 0u32..5, seed in any::<u64>(),
    ) {
        let n = below(n, n % 40 + 1);
        let io = conv_io([rows, n, taps], [xd, yd], given, gap, seed);
        let results = both::<CausalConv>(isa, &causal_conv::Params { activation }, &io, step(first, rows as u32), 0);
        compare(isa, &results, causal_conv::slot::Y, 4e-6)?;
        compare(isa, &results, causal_conv::slot::STATE, 0.0)?;
    }

    #[test]
    fn delta_rule_agrees_with_its_reference(
        isa in isas(), xd in dtypes(), yd in dtypes(), rows in 0usize..7, heads in 1usize..3, group in 1usize..3,
        d_k in 1usize..129, d_v in 1usize..70, given in any::<[bool; 2]>(), first in 0u32..2, seed in any::<u64>(),
    ) {
        let (d_k, d_v) = (below(d_k, d_k % 20 + 1), below(d_v, d_v % 9 + 1));
        let io = recurrence_io([rows, heads, group, d_k, d_v], [xd, yd], given, seed);
        let results = both::<Recurrence>(isa, &recurrence::Params {}, &io, step(first, rows as u32), 0);
        compare(isa, &results, recurrence::slot::Y, 2e-5)?;
        compare(isa, &results, recurrence::slot::STATE, 2e-5)?;
    }

    #[test]
    fn gated_agrees_with_its_reference(
        isa in isas(), xd in dtypes(), yd in dtypes(), rows in 0usize..4, heads in 1usize..4, d in 1usize..150,
        is_normed: bool, is_one: bool, is_silu in 0u32..2, gates_first in 0u32..2, gap in 0usize..3, seed in any::<u64>(),
    ) {
        let io = [
            Memory::new(xd, &[rows, heads, d], gap, 1, |i| noise(seed, i)),
            if is_normed { Memory::new(xd, &[d], 0, 1, |i| noise(seed ^ 1, i)) } else { Memory::absent() },
            Memory::new(xd, &[rows, heads, if is_one { 1 } else { d }], gap, 1, |i| 20.0 * noise(seed ^ 2, i)),
            Memory::new(yd, &[rows, heads, d], gap, 1, |_| 7.0),
        ];
        let results = both::<Gated>(isa, &gated::Params { eps: 1e-6, is_silu, gates_first }, &io, step(0, rows as u32), 0);
        compare(isa, &results, gated::slot::Y, 2e-5)?;
    }

    /// Rows one by one, from a state that holds anything, give the bits of one pass.
    #[test]
    fn rows_one_by_one_give_the_bits_of_all(
        isa in isas(), rows in 1usize..7, n in 1usize..150, taps in 2usize..6, d_k in 1usize..129, d_v in 1usize..70,
        given in any::<[bool; 3]>(), seed in any::<u64>(),
    ) {
        let (d_k, d_v) = (below(d_k, d_k % 20 + 1), below(d_v, d_v % 9 + 1));
        let bits = |all: &[Vec<Vec<f32>>; 2]| all.each_ref().map(|all| {
            all.iter().flatten().map(|x| x.to_bits()).collect::<Vec<u32>>()
        });
        let io = conv_io([rows, n, taps], [DType::F32; 2], given, 0, seed);
        let of_rows = {
            use causal_conv::slot::{GATE, SCALE, X, Y};
            [X, GATE, SCALE, Y]
        };
        let [whole, made] = bits(&in_turn::<CausalConv>(isa, &causal_conv::Params { activation: 2 }, &io, &of_rows, rows));
        prop_assert_eq!(whole, made, "a convolution, {}", isa.name());
        let io = recurrence_io([rows, 1, 2, d_k, d_v], [DType::F32; 2], [given[0], given[1]], seed);
        let of_rows = {
            use recurrence::slot::{A, B, K, Q, V, Y};
            [Q, K, V, A, B, Y]
        };
        let [whole, made] = bits(&in_turn::<Recurrence>(isa, &recurrence::Params {}, &io, &of_rows, rows));
        prop_assert_eq!(whole, made, "a recurrence, {}", isa.name());
    }
}
