//! How long dependency analysis takes, and what it gives for Qwen3-8B beside the gcd rule.
//!
//! `cargo run --release --example bench_dependency`

use AccessKind::{Read, ReadWrite, Write};
use perpetua::graph::task::{Config, TaskGraph, check, lower, waited_and_needed};
use perpetua::graph::tensor::{BufferKind, TensorId};
use perpetua::graph::threadblock::{Access, AccessKind, BlockOp, ThreadBlockGraph};
use perpetua_shared::DType;
use std::collections::HashSet;
use std::time::Instant;

/// A language model's shapes.
#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    layers: usize,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    inter: usize,
    vocab: usize,
}

const PRESETS: [Shape; 5] = [
    Shape {
        name: "Qwen3-0.6B",
        layers: 28,
        hidden: 1024,
        heads: 16,
        kv_heads: 8,
        head_dim: 128,
        inter: 3072,
        vocab: 151_936,
    },
    Shape {
        name: "Qwen3-1.7B",
        layers: 28,
        hidden: 2048,
        heads: 16,
        kv_heads: 8,
        head_dim: 128,
        inter: 6144,
        vocab: 151_936,
    },
    Shape {
        name: "Qwen3-8B",
        layers: 36,
        hidden: 4096,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        inter: 12_288,
        vocab: 151_936,
    },
    Shape {
        name: "Llama-3.2-1B",
        layers: 16,
        hidden: 2048,
        heads: 32,
        kv_heads: 8,
        head_dim: 64,
        inter: 8192,
        vocab: 128_256,
    },
    Shape {
        name: "Llama-3.1-8B",
        layers: 32,
        hidden: 4096,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        inter: 14_336,
        vocab: 128_256,
    },
];

struct Builder {
    graph: ThreadBlockGraph,
}

impl Builder {
    fn tensor(&mut self, name: String, shape: &[usize], kind: BufferKind) -> TensorId {
        self.graph.table.add(&name, shape, DType::Bf16, kind).expect("a tensor that fills its buffer")
    }

    fn op(&mut self, name: &str, grid: [u32; 3], accesses: &[(TensorId, AccessKind, [i8; 3])]) {
        self.graph.ops.push(BlockOp {
            name: name.to_owned(),
            grid,
            accesses: accesses
                .iter()
                .map(|(tensor, kind, map)| {
                    Some(Access { tensor: *tensor, kind: *kind, map: map.map(|d| u8::try_from(d).ok()) })
                })
                .collect(),
            row_axis: None,
            rows: 1,
            head_axis: None,
            kernel: None,
        });
    }
}

const ALL: [i8; 3] = [-1, -1, -1];
const COLUMNS: [i8; 3] = [1, -1, -1];
const ROWS: [i8; 3] = [0, -1, -1];

/// One pass over `tokens` rows on `workers` workers: MPK's operators, every linear cut by columns into one block per
/// worker. `shared` reuses one set of activations in all layers, as MPK's demos do.
fn model(m: Shape, tokens: usize, workers: u32, shared: bool) -> ThreadBlockGraph {
    let mut b = Builder { graph: ThreadBlockGraph::default() };
    let rows = tokens.min(8) as u32;
    let (q_width, kv_width) = (m.heads * m.head_dim, m.kv_heads * m.head_dim);
    let qkv_width = q_width + 2 * kv_width;
    let context = 4096;
    let x = b.tensor("x".into(), &[tokens, m.hidden], BufferKind::Intermediate);
    b.op("embed", [rows, 1, 1], &[(x, Write, ROWS)]);
    let mut activations: Option<[TensorId; 10]> = None;
    for layer in 0..m.layers {
        let [normed, qkv, heads, k, v, q, attended, mid, gated, silu] = match activations {
            Some(a) if shared => a,
            _ => {
                let mut t =
                    |name: &str, shape: &[usize]| b.tensor(format!("{name}{layer}"), shape, BufferKind::Intermediate);
                let normed = t("normed", &[tokens, m.hidden]);
                let qkv = t("qkv", &[tokens, qkv_width]);
                let q = t("q", &[tokens, m.heads, m.head_dim]);
                let attended = t("attended", &[tokens, q_width]);
                let mid = t("normed2_", &[tokens, m.hidden]);
                let gated = t("gate_up", &[tokens, 2, m.inter]);
                let silu = t("silu", &[tokens, m.inter]);
                let table = &mut b.graph.table;
                let group = m.heads / m.kv_heads;
                let strides = [qkv_width, group * m.head_dim, m.head_dim, 1];
                let heads = table.view("qkv.q", qkv, 0, &[tokens, m.kv_heads, group, m.head_dim], &strides);
                let strides = [qkv_width, m.head_dim, 1];
                let k = table.view("qkv.k", qkv, q_width, &[tokens, m.kv_heads, m.head_dim], &strides);
                let v = table.view("qkv.v", qkv, q_width + kv_width, &[tokens, m.kv_heads, m.head_dim], &strides);
                let [heads, k, v] = [heads, k, v].map(|t| t.expect("views inside qkv"));
                [normed, qkv, heads, k, v, q, attended, mid, gated, silu]
            }
        };
        activations = Some([normed, qkv, heads, k, v, q, attended, mid, gated, silu]);
        let cache = [m.kv_heads, context, m.head_dim];
        let key_cache = b.tensor(format!("keys{layer}"), &cache, BufferKind::State);
        let value_cache = b.tensor(format!("values{layer}"), &cache, BufferKind::State);
        let group = m.heads / m.kv_heads;
        let q_heads = b
            .graph
            .table
            .view("q.heads", q, 0, &[tokens, m.kv_heads, group * m.head_dim], &[q_width, group * m.head_dim, 1])
            .expect("a view of q");
        let out_heads = b
            .graph
            .table
            .view(
                "attended.heads",
                attended,
                0,
                &[tokens, m.kv_heads, group * m.head_dim],
                &[q_width, group * m.head_dim, 1],
            )
            .expect("a view of attended");
        let kv = m.kv_heads as u32;
        b.op("norm", [rows, 1, 1], &[(x, Read, ROWS), (normed, Write, ROWS)]);
        b.op("qkv", [workers, 1, 1], &[(normed, Read, ALL), (qkv, Write, COLUMNS)]);
        // Rotary embedding, head norms and the append to the cache, per KV head.
        b.op(
            "rope",
            [kv, 1, 1],
            &[
                (heads, Read, COLUMNS),
                (k, Read, COLUMNS),
                (v, Read, COLUMNS),
                (q_heads, Write, COLUMNS),
                (key_cache, Write, ROWS),
                (value_cache, Write, ROWS),
            ],
        );
        b.op(
            "attention",
            [kv, 1, 1],
            &[
                (q_heads, Read, COLUMNS),
                (key_cache, Read, ROWS),
                (value_cache, Read, ROWS),
                (out_heads, Write, COLUMNS),
            ],
        );
        b.op("o_proj", [workers, 1, 1], &[(attended, Read, ALL), (x, ReadWrite, COLUMNS)]);
        b.op("norm2", [rows, 1, 1], &[(x, Read, ROWS), (mid, Write, ROWS)]);
        b.op("gate_up", [workers, 1, 1], &[(mid, Read, ALL), (gated, Write, [2, -1, -1])]);
        b.op("silu_mul", [64, 1, 1], &[(gated, Read, [2, -1, -1]), (silu, Write, COLUMNS)]);
        b.op("down", [workers, 1, 1], &[(silu, Read, ALL), (x, ReadWrite, COLUMNS)]);
    }
    let normed = b.tensor("final".into(), &[tokens, m.hidden], BufferKind::Intermediate);
    let logits = b.tensor("logits".into(), &[tokens, m.vocab], BufferKind::Intermediate);
    let best = b.tensor("best".into(), &[tokens, 2 * 128], BufferKind::Intermediate);
    let token = b.tensor("token".into(), &[tokens, 1], BufferKind::State);
    b.op("norm", [rows, 1, 1], &[(x, Read, ROWS), (normed, Write, ROWS)]);
    b.op("lm_head", [600, 1, 1], &[(normed, Read, ALL), (logits, Write, COLUMNS)]);
    b.op("argmax_partial", [128, 1, 1], &[(logits, Read, COLUMNS), (best, Write, COLUMNS)]);
    b.op("argmax", [1, 1, 1], &[(best, Read, ALL), (token, Write, ALL)]);
    b.graph
}

/// A chain of `n_ops` linears and aligned operators of `workers` blocks.
fn chain(n_ops: usize, workers: u32) -> ThreadBlockGraph {
    let mut b = Builder { graph: ThreadBlockGraph::default() };
    let width = 12_288;
    let mut last = b.tensor("x".into(), &[1, width], BufferKind::Intermediate);
    for i in 0..n_ops {
        let next = b.tensor(format!("x{i}"), &[1, width], BufferKind::Intermediate);
        let (grid, map) = match i % 4 {
            0 => (workers, ALL),
            1 => (96, COLUMNS),
            2 => (workers, COLUMNS),
            _ => (8, COLUMNS),
        };
        b.op("op", [grid, 1, 1], &[(last, Read, map), (next, Write, COLUMNS)]);
        last = next;
    }
    b.graph
}

/// What the gcd rule says between two operators.
struct GcdEdge {
    producer: usize,
    consumer: usize,
    events: u64,
    pairs: u64,
}

/// What the gcd rule gives for the same cuts: per direct pair of operators and tensor, `gcd` of the part counts per
/// dimension, one event per cell, every producer of a cell before every consumer of it. As there, an edge goes when its
/// ends are joined by a longer path (which is not sound in general), and only the first tensor of a pair counts.
fn gcd_rule(graph: &ThreadBlockGraph) -> Vec<GcdEdge> {
    fn gcd(a: u64, b: u64) -> u64 {
        if b == 0 { a } else { gcd(b, a % b) }
    }
    let mut writer: std::collections::HashMap<TensorId, (usize, &Access)> = std::collections::HashMap::new();
    let mut out = Vec::new();
    let mut ancestors: Vec<HashSet<usize>> = Vec::new();
    for (i, op) in graph.ops.iter().enumerate() {
        let mut edges: Vec<(usize, &Access, &Access)> = Vec::new();
        for access in op.accesses.iter().flatten().filter(|a| a.kind.reads()) {
            // A view counts as its base: the rule knows tensors only, so a cut of a view's dimension is one of columns.
            let tensor = &graph.table[access.tensor];
            let base = |id: TensorId| graph.table[id].buffer == tensor.buffer;
            let Some((p, written)) = writer.iter().find(|(id, _)| base(**id)).map(|(_, w)| *w) else {
                continue;
            };
            if edges.iter().all(|(other, ..)| *other != p) {
                edges.push((p, written, access));
            }
        }
        let mine: HashSet<usize> = edges.iter().flat_map(|(p, ..)| ancestors[*p].iter().copied().chain([*p])).collect();
        let stripped = |p: usize| edges.iter().any(|(other, ..)| ancestors[*other].contains(&p));
        for (p, written, access) in edges.iter().copied().filter(|(p, ..)| !stripped(*p)) {
            let producer = &graph.ops[p];
            let parts = |op: &BlockOp, a: &Access, dim: u8| -> u64 {
                let axis = (0..3).find(|x| a.map[*x] == Some(dim));
                axis.map_or(1, |x| u64::from(op.grid[x]))
            };
            let n: u64 = (0..4).map(|d| gcd(parts(producer, written, d), parts(op, access, d))).product();
            out.push(GcdEdge {
                producer: p,
                consumer: i,
                events: n,
                pairs: producer.n_blocks() / n * (op.n_blocks() / n) * n,
            });
        }
        ancestors.push(mine);
        for access in op.accesses.iter().flatten().filter(|a| a.kind.writes()) {
            let buffer = graph.table[access.tensor].buffer;
            writer.retain(|id, _| graph.table[*id].buffer != buffer);
            writer.insert(access.tensor, (i, access));
        }
    }
    out
}

/// One layer's hand-offs and the tail's, ours beside the gcd rule's.
fn hand_offs(graph: &ThreadBlockGraph, tasks: &TaskGraph, rule: &[GcdEdge]) {
    let triggerers = tasks.triggers.inverted(tasks.events.len());
    println!("\n| hand-off | tasks | ours: events, waits, pairs | gcd rule: events, pairs | its factor |");
    println!("| --- | --- | --- | --- | --- |");
    for consumer in (10..19).chain(graph.ops.len() - 3..graph.ops.len()) {
        let (mut pairs, mut events, mut waits) = (HashSet::new(), HashSet::new(), 0);
        let mut producers: HashSet<usize> = HashSet::new();
        for task in tasks.tasks_of(consumer) {
            for event in tasks.waits.of(task as usize) {
                events.insert(*event);
                waits += 1;
                for first in triggerers.of(*event as usize) {
                    producers.insert(tasks.tasks[*first as usize].op as usize);
                    pairs.insert((*first, task));
                }
            }
        }
        let theirs: Vec<&GcdEdge> =
            rule.iter().filter(|e| e.consumer == consumer && producers.contains(&e.producer)).collect();
        let (gcd_events, gcd_pairs) = theirs.iter().fold((0, 0), |(e, p), edge| (e + edge.events, p + edge.pairs));
        let names: Vec<&str> = producers.iter().map(|p| graph.ops[*p].name.as_str()).collect();
        let blocks: u64 = producers.iter().map(|p| graph.ops[*p].n_blocks()).sum();
        println!(
            "| {} -> {} | {blocks} -> {} | {}, {waits}, {} | {gcd_events}, {gcd_pairs} | {:.2} |",
            names.join(" + "),
            graph.ops[consumer].name,
            graph.ops[consumer].n_blocks(),
            events.len(),
            pairs.len(),
            gcd_pairs as f64 / pairs.len() as f64
        );
    }
}

fn seconds(graph: &ThreadBlockGraph, rounds: usize) -> f64 {
    let mut times: Vec<f64> = (0..rounds)
        .map(|_| {
            let start = Instant::now();
            let tasks = lower(graph, &Config::default()).expect("a right graph");
            assert!(!tasks.tasks.is_empty());
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[rounds / 2]
}

fn main() {
    let full = !std::env::args().any(|a| a == "--small");
    println!(
        "| model, 132 workers | ops | tasks | events | waits | triggers | pairs | factor | median, max waits | lower ms | check ms |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    for (tokens, shared) in [(1, false), (1, true), (64, false)] {
        for m in PRESETS {
            let graph = model(m, tokens, 132, shared);
            let tasks = lower(&graph, &Config::default()).expect("a right graph");
            let start = Instant::now();
            check(&graph, &tasks, None).expect("right events");
            let judged = start.elapsed().as_secs_f64();
            let s = tasks.stats;
            let how = if shared { ", shared activations" } else { "" };
            println!(
                "| {}, {tokens} token(s){how} | {} | {} | {} | {} | {} | {} | {:.3} | {}, {} | {:.2} | {:.1} |",
                m.name,
                s.ops,
                s.tasks,
                s.events,
                s.waits,
                s.triggers,
                s.pairs,
                s.oversync,
                s.median_waits,
                s.max_waits,
                seconds(&graph, 9) * 1e3,
                judged * 1e3
            );
        }
    }
    let graph = model(PRESETS[2], 1, 132, false);
    let tasks = lower(&graph, &Config::default()).expect("a right graph");
    let (waited, needed) = waited_and_needed(&graph, &tasks);
    let rule = gcd_rule(&graph);
    let (events, pairs) = rule.iter().fold((0, 0), |(e, p), edge| (e + edge.events, p + edge.pairs));
    println!(
        "\nQwen3-8B, 1 token: waited {waited}, needed {needed} (counted from bytes); gcd rule: {} edges, {events} events, \
         {pairs} pairs",
        rule.len()
    );
    hand_offs(&graph, &tasks, &rule);
    println!("\n| tasks | lower ms | ns per task |\n| --- | --- | --- |");
    for n_ops in [110, 1_100, 11_000].into_iter().take(if full { 3 } else { 1 }) {
        let graph = chain(n_ops, 132);
        let n_tasks: u64 = graph.ops.iter().map(BlockOp::n_blocks).sum();
        let t = seconds(&graph, 9);
        println!("| {n_tasks} | {:.2} | {:.1} |", t * 1e3, t * 1e9 / n_tasks as f64);
    }
}
