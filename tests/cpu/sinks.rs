//! Attention with sinks, from a graph of one's own on: fused with the rotation, split and merged, of one row, several
//! and a batch's.

use perpetua::compile::{Compiled, Config, Source, compile};
use perpetua::exec::Executor;
use perpetua::exec::memory::Memory;
use perpetua::exec::reference::Reference;
use perpetua::exec::simt::{self, Simt};
use perpetua::exec::threads::{self, Threads};
use perpetua::graph::kernel::{AttentionArgs, GraphError, KernelGraph, Mask, Pass, RopeArgs};
use perpetua::graph::lower::Target;
use perpetua::graph::tensor::TensorId;
use perpetua::graph::threadblock::BlockOp;
use perpetua_device::kernels::linear::Activation;
use perpetua_device::kernels::{Spec, attention, decode_attention, params};
use perpetua_shared::DType;
use perpetua_shared::control::{Control, Step};
use std::collections::HashMap;
use std::sync::Arc;

const HIDDEN: usize = 64;
const HEADS: usize = 2;
const GROUP: usize = 2;
const DIM: usize = 32;
const CONTEXT: usize = 96;

/// A query head's each: one that hardly counts, and one beside which hardly anything else does.
const SINKS: [f32; HEADS * GROUP] = [0.5, 2.0, -30.0, 30.0];

type Weights = Arc<HashMap<String, Vec<u8>>>;

/// Values in [-1, 1) that differ from place to place.
fn values(n: usize, salt: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + salt * 104_729) % 2003) as f32 / 1001.5 - 1.0).collect()
}

fn weight(graph: &mut KernelGraph, all: &mut HashMap<String, Vec<u8>>, name: &str, shape: &[usize]) -> TensorId {
    let elements = match name {
        "sinks" => SINKS.to_vec(),
        _ => values(shape.iter().product(), all.len()).into_iter().map(|x| 0.3 * x).collect(),
    };
    let bytes = elements.into_iter().flat_map(|x| half::bf16::from_f32(x).to_bits().to_ne_bytes()).collect();
    all.insert(name.to_owned(), bytes);
    graph.weight(name, shape, DType::Bf16).unwrap()
}

/// y = attention(x) . o^T, of `rows` rows, in an empty graph.
fn build(mut graph: KernelGraph, rows: usize, mask: Mask, has_sinks: bool) -> (KernelGraph, Weights) {
    let mut weights = HashMap::new();
    let x = graph.input("x", &[rows, HIDDEN], DType::F32).unwrap();
    let mut product = |graph: &mut KernelGraph, name: &str, x: TensorId, [n, k]: [usize; 2]| {
        let w = weight(graph, &mut weights, &format!("{name}.w"), &[n, k]);
        graph.linear(name, x, w, None, Activation::None, None).unwrap()
    };
    let (q_dim, kv_dim) = (HEADS * GROUP * DIM, HEADS * DIM);
    let [q, k, v] =
        [("q", q_dim), ("k", kv_dim), ("v", kv_dim)].map(|(name, n)| product(&mut graph, name, x, [n, HIDDEN]));
    let q = graph.reshape(q, &[rows, HEADS, GROUP, DIM]).unwrap();
    let [k, v] = [k, v].map(|of| graph.reshape(of, &[rows, HEADS, DIM]).unwrap());
    let frequencies = graph.constant("frequencies", &values(DIM / 2, 5)).unwrap();
    let rope = RopeArgs {
        q,
        kv: Some([k, v]),
        norms: [None; 2],
        norms_values: false,
        norms_turned: false,
        frequencies,
        turned_pairs: DIM / 2,
        factor: 1.0,
        eps: 1e-6,
    };
    let cache = |graph: &mut KernelGraph| -> Result<[TensorId; 2], GraphError> {
        let mut of = |name: &str| graph.state(name, &[HEADS, CONTEXT, DIM], DType::Bf16);
        Ok([of("keys")?, of("values")?])
    };
    let sinks = has_sinks.then(|| {
        let sinks = weight(&mut graph, &mut weights, "sinks", &[HEADS * GROUP]);
        graph.reshape(sinks, &[HEADS, GROUP]).unwrap()
    });
    let args = AttentionArgs { scale: 0.4, mask, sinks };
    let attended = if graph.pass == Pass::Batch {
        graph.attend_each("layer", rope, rope.q, args, |graph| cache(graph).map(Into::into)).unwrap()
    } else {
        let cache = cache(&mut graph).unwrap();
        graph.rope("rope", rope, cache).unwrap();
        graph.attention("attention", q, cache, args).unwrap()
    };
    let w = weight(&mut graph, &mut weights, "o.w", &[HIDDEN, q_dim]);
    let y = graph.linear("o", attended, w, None, Activation::None, None).unwrap();
    graph.output("y", y).unwrap();
    (graph, Arc::new(weights))
}

fn compiled(graph: &KernelGraph, target: Target) -> Compiled {
    let source = Source { name: "sinks".to_owned(), graph: graph.clone(), in_token_loop: false };
    compile(vec![source], &Config { check: true, ..Config::new(target) }).unwrap()
}

/// The operators whose kernel is called `kernel`.
fn ops<'a>(compiled: &'a Compiled, kernel: &'a str) -> Vec<&'a BlockOp> {
    let is =
        |op: &&BlockOp| op.kernel.and_then(|kernel| Spec::of(kernel.task_type)).is_some_and(|spec| spec.name == kernel);
    compiled.programs[0].blocks.ops.iter().filter(is).collect()
}

/// How many ways the attention called `kernel` is split, and how often what was found is merged.
fn splits(compiled: &Compiled, kernel: &str) -> (Vec<u32>, usize) {
    let of = |op: &&BlockOp| match kernel {
        "attention" => params::<attention::Params>(&op.kernel.unwrap().params).splits,
        _ => params::<decode_attention::Params>(&op.kernel.unwrap().params).splits,
    };
    (ops(compiled, kernel).iter().map(of).collect(), ops(compiled, "attention_merge").len())
}

/// What passes of `rows` rows make, one after the other.
fn run(compiled: &Compiled, executor: &mut dyn Executor, rows: usize) -> Vec<f32> {
    let (_, output) = compiled.programs[0].outputs.iter().find(|(name, _)| name == "y").unwrap();
    let mut made = Vec::new();
    for first in (0..60).step_by(rows) {
        executor.set_input("x", bytemuck::cast_slice(&values(rows * HIDDEN, first))).unwrap();
        let step = Step { first_pos: first as u32, rows: rows as u32, ..Step::default() };
        let n_tokens = (first + rows) as u32;
        executor.start(Control { n_tokens, max_context: u32::MAX, step, ..bytemuck::Zeroable::zeroed() });
        executor.finish().unwrap();
        executor.append_f32(output, rows, &mut made).unwrap();
    }
    made
}

fn on_the_reference(rows: usize, mask: Mask, has_sinks: bool) -> Vec<f32> {
    let (graph, weights) = build(KernelGraph::with_rows(rows as u32), rows, mask, has_sinks);
    let compiled = compiled(&graph, Target::workers(1));
    let memory = Memory::new(&compiled, &weights).unwrap();
    run(&compiled, &mut Reference::new(compiled.image.clone(), memory), rows)
}

/// `found` is off by less than `part` of its size.
fn near(expected: &[f32], found: &[f32], part: f32, what: &str) {
    assert_eq!(expected.len(), found.len(), "{what}");
    let rms = |values: &mut dyn Iterator<Item = f32>| (values.map(|x| x * x).sum::<f32>() / found.len() as f32).sqrt();
    let off = rms(&mut expected.iter().zip(found).map(|(a, b)| a - b));
    let size = rms(&mut expected.iter().copied());
    assert!(off <= part * size, "{what}: off by {off}, of {size}");
}

#[test]
fn every_cut_of_attention_has_its_sinks() {
    let split = || Target { split_positions: 8, ..Target::gpu(9) };
    let no_hops = || Target { hop_bytes: 0, ..split() };
    // Rows, what each sees, the target; the attention that it makes of them, how often that is split, and operators
    // that merge.
    let cases = [
        (1, Mask::Causal, Target::gpu(2), "decode_attention", 1, 0),
        (1, Mask::Causal, split(), "decode_attention", 4, 0),
        (1, Mask::Window(20), no_hops(), "decode_attention", 4, 1),
        (1, Mask::Window(20), Target::cpu(3), "attention", 1, 0),
        (20, Mask::Causal, Target::cpu(2), "attention", 1, 0),
        (20, Mask::Causal, no_hops(), "attention", 2, 1),
        (20, Mask::Window(20), no_hops(), "attention", 1, 0),
        (4, Mask::Causal, no_hops(), "attention", 4, 1),
    ];
    for (rows, mask, target, kernel, n_splits, n_merges) in cases {
        let what = format!("{rows} rows, {mask:?}, {}", target.name);
        let (graph, weights) = build(KernelGraph::with_rows(rows as u32), rows, mask, true);
        let is_gpu = target.has_flags;
        let compiled = compiled(&graph, target);
        assert_eq!(splits(&compiled, kernel), (vec![n_splits], n_merges), "{what}");
        let expected = on_the_reference(rows, mask, true);
        let memory = Memory::new(&compiled, &weights).unwrap();
        let mut executor: Box<dyn Executor> = if is_gpu {
            Box::new(Simt::new(compiled.image.clone(), memory, simt::Options::default()))
        } else {
            Box::new(Threads::new(compiled.image.clone(), memory, threads::Options::default()).unwrap())
        };
        // Products of several rows round what they multiply.
        let part = if is_gpu && rows > 1 { 0.01 } else { 2e-3 };
        near(&expected, &run(&compiled, &mut *executor, rows), part, &what);
        // They are not nothing.
        let without = on_the_reference(rows, mask, false);
        let is_other = expected.iter().zip(&without).filter(|(a, b)| (*a - *b).abs() > 0.05 * a.abs()).count();
        assert!(is_other > expected.len() / 2, "{what}: {is_other} of {}", expected.len());
    }
}

/// In the pass over a batch each sequence's attention is fused, and split, too; the sinks are all sequences'.
#[test]
fn a_batch_has_its_sinks() {
    let (graph, _) = build(KernelGraph::batch(3), 3, Mask::Causal, true);
    let compiled = compiled(&graph, Target { split_positions: 8, hop_bytes: 0, ..Target::gpu(18) });
    assert_eq!(splits(&compiled, "decode_attention"), (vec![3; 3], 3));
    for op in ops(&compiled, "decode_attention") {
        let sinks = op.accesses[decode_attention::slot::SINKS].as_ref().unwrap();
        assert_eq!(sinks.map, [Some(0), None, None]);
    }
}

#[test]
fn sinks_are_refused_where_they_cannot_be() {
    let mut graph = KernelGraph::with_rows(4);
    let q = graph.input("q", &[4, HEADS, GROUP, DIM], DType::F32).unwrap();
    let cache = graph.input("cache", &[HEADS, CONTEXT, DIM], DType::F32).unwrap();
    let mut said = |shape: &[usize], mask: Mask| {
        let sinks = Some(graph.input(&format!("{shape:?}"), shape, DType::F32).unwrap());
        graph.attention("a", q, [cache; 2], AttentionArgs { scale: 1.0, mask, sinks }).unwrap_err().to_string()
    };
    let expected = "expected none";
    assert!(said(&[HEADS, GROUP], Mask::Bidirectional).contains(expected));
    assert!(said(&[HEADS, GROUP], Mask::Around(3)).contains(expected));
    assert!(said(&[HEADS * GROUP], Mask::Causal).contains("`sinks` has rank 1, expected 2"));
    let wrong = said(&[HEADS, GROUP + 1], Mask::Causal);
    assert!(wrong.contains("`sinks` has 3 elements along dimension 1, expected 2"), "{wrong}");
}

/// The definition, written once more: a softmax over one number more, which nothing is added for.
#[test]
fn a_sink_is_a_score_without_a_value() {
    let rows = 3;
    let mut graph = KernelGraph::with_rows(rows as u32);
    let mut weights = HashMap::new();
    let x = graph.input("x", &[rows, HEADS * GROUP * DIM], DType::F32).unwrap();
    let q = graph.reshape(x, &[rows, HEADS, GROUP, DIM]).unwrap();
    let cache = ["k", "v"].map(|name| weight(&mut graph, &mut weights, name, &[HEADS, CONTEXT, DIM]));
    let sinks = weight(&mut graph, &mut weights, "sinks", &[HEADS * GROUP]);
    let sinks = Some(graph.reshape(sinks, &[HEADS, GROUP]).unwrap());
    let y = graph.attention("a", q, cache, AttentionArgs { scale: 0.4, mask: Mask::Causal, sinks }).unwrap();
    graph.output("y", y).unwrap();
    let element = |name: &str, at: usize| {
        let bytes = &weights[name][2 * at..];
        f64::from(half::bf16::from_bits(u16::from_ne_bytes([bytes[0], bytes[1]])).to_f32())
    };
    let x = values(rows * HEADS * GROUP * DIM, 1);
    let mut expected = Vec::new();
    for (row, head) in (0..rows).flat_map(|row| (0..HEADS * GROUP).map(move |head| (row, head))) {
        let place = |t: usize, i: usize| (head / GROUP * CONTEXT + t) * DIM + i;
        let query = |i: usize| f64::from(x[(row * HEADS * GROUP + head) * DIM + i]);
        let score = |t: usize| 0.4 * (0..DIM).map(|i| query(i) * element("k", place(t, i))).sum::<f64>();
        let weight_of = |t: usize| score(t).exp();
        let total = element("sinks", head).exp() + (0..=row).map(weight_of).sum::<f64>();
        let sum = |i: usize| (0..=row).map(|t| weight_of(t) * element("v", place(t, i))).sum::<f64>();
        expected.extend((0..DIM).map(|i| (sum(i) / total) as f32));
    }
    let compiled = compiled(&graph, Target::workers(1));
    let memory = Memory::new(&compiled, &Arc::new(weights.clone())).unwrap();
    let mut reference = Reference::new(compiled.image.clone(), memory);
    reference.set_input("x", bytemuck::cast_slice(&x)).unwrap();
    let step = Step { rows: rows as u32, ..Step::default() };
    reference.start(Control { n_tokens: rows as u32, max_context: u32::MAX, step, ..bytemuck::Zeroable::zeroed() });
    reference.finish().unwrap();
    let mut found = Vec::new();
    let (_, output) = &compiled.programs[0].outputs[0];
    reference.append_f32(output, rows, &mut found).unwrap();
    assert!(expected.iter().zip(&found).all(|(a, b)| (a - b).abs() <= 1e-5), "{found:?}, expected {expected:?}");
}
