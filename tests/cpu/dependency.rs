//! Dependency analysis: laws 1 to 3 of the task graph, against brute force over bytes.

use perpetua::graph::task::{
    Config, Defect, TaskClass, TaskError, TaskGraph, Violation, WorkerLists, assign_round_robin, check, elide, lower,
    simulate, waited_and_needed,
};
use perpetua::graph::tensor::{BufferId, BufferKind, DTensor, TensorId, TensorTable};
use perpetua::graph::threadblock::{Access, AccessKind, BlockOp, KernelCall, ThreadBlockGraph, part};
use perpetua::schedule::assign::{Slack, balance};
use perpetua_shared::DType;
use perpetua_shared::limits::PARAM_WORDS;
use proptest::prelude::*;
use std::ops::Range;

fn op(name: &str, grid: [u32; 3], accesses: Vec<Access>) -> BlockOp {
    BlockOp {
        name: name.to_owned(),
        grid,
        accesses: accesses.into_iter().map(Some).collect(),
        row_axis: None,
        rows: 1,
        head_axis: None,
        kernel: None,
    }
}

fn cut(tensor: TensorId, kind: AccessKind, map: [i8; 3]) -> Access {
    Access { tensor, kind, map: map.map(|d| u8::try_from(d).ok()) }
}

use AccessKind::{Read, ReadWrite, ReduceAdd, Write};

/// Sets of tasks, as rows of bits.
#[derive(Clone, PartialEq)]
struct Bits {
    words: usize,
    rows: Vec<u64>,
}

impl Bits {
    fn new(n: usize) -> Bits {
        let words = n.div_ceil(64);
        Bits { words, rows: vec![0; n * words] }
    }
    fn get(&self, row: usize, bit: usize) -> bool {
        self.rows[row * self.words + bit / 64] >> (bit % 64) & 1 == 1
    }
    fn set(&mut self, row: usize, bit: usize) {
        self.rows[row * self.words + bit / 64] |= 1 << (bit % 64);
    }
    fn join(&mut self, row: usize, from: usize) {
        for word in 0..self.words {
            self.rows[row * self.words + word] |= self.rows[from * self.words + word];
        }
    }
    /// Row `t` becomes all tasks before `t`, when rows name direct predecessors and `order` respects them.
    fn close(&mut self, order: impl Iterator<Item = usize>) {
        let n = self.rows.len() / self.words.max(1);
        for t in order {
            for p in 0..n {
                if self.get(t, p) && p != t {
                    self.join(t, p);
                }
            }
        }
    }
}

/// What brute force says about a graph.
struct Truth {
    /// Row `b` has `a` where the two overlap and conflict, `a` of an earlier operator.
    conflicts: Bits,
    /// The same, closed under transitivity.
    order: Bits,
    /// Two blocks of one operator conflict.
    inside: bool,
}

/// Per dimension of `access`'s tensor, the indices that `block` of `op` touches.
fn touched_box(graph: &ThreadBlockGraph, op: &BlockOp, access: &Access, block: [u32; 3]) -> Vec<Range<usize>> {
    let mut ranges: Vec<_> = graph.table[access.tensor].shape.iter().map(|n| 0..*n).collect();
    for (axis, dim) in access.map.iter().enumerate() {
        if let Some(dim) = dim {
            let range = &mut ranges[usize::from(*dim)];
            *range = part(range.end, block[axis], op.grid[axis]);
        }
    }
    ranges
}

fn truth(graph: &ThreadBlockGraph) -> Truth {
    // Per task, the bytes of all buffers it reads, adds to, writes.
    let base: Vec<usize> = graph
        .table
        .buffers
        .iter()
        .scan(0, |at, b| {
            *at += b.bytes as usize;
            Some(*at - b.bytes as usize)
        })
        .collect();
    let n_bytes: usize = graph.table.buffers.iter().map(|b| b.bytes as usize).sum();
    let mut tasks: Vec<(usize, [Vec<bool>; 3])> = Vec::new();
    for (i, op) in graph.ops.iter().enumerate() {
        for number in 0..op.n_blocks() {
            let mut touched = [vec![false; n_bytes], vec![false; n_bytes], vec![false; n_bytes]];
            for access in op.accesses.iter().flatten() {
                let tensor = &graph.table[access.tensor];
                let elem = tensor.dtype.size_bytes();
                let ranges = touched_box(graph, op, access, op.block(number));
                let mut elements = vec![tensor.offset_elems];
                for (range, stride) in ranges.into_iter().zip(&tensor.strides) {
                    elements = elements.iter().flat_map(|e| range.clone().map(move |i| e + i * stride)).collect();
                }
                let row = match access.kind {
                    Read => 0,
                    ReduceAdd | AccessKind::Append => 1,
                    Write | ReadWrite => 2,
                };
                for element in elements {
                    for byte in 0..elem {
                        touched[row][base[tensor.buffer.idx()] + element * elem + byte] = true;
                    }
                }
            }
            tasks.push((i, touched));
        }
    }
    let n = tasks.len();
    let mut conflicts = Bits::new(n);
    let mut inside = false;
    for b in 0..n {
        for a in 0..b {
            let (x, y) = (&tasks[a].1, &tasks[b].1);
            let meet = (0..n_bytes).any(|i| {
                x[2][i] && (y[0][i] || y[1][i] || y[2][i])
                    || y[2][i] && (x[0][i] || x[1][i])
                    || x[0][i] && y[1][i]
                    || x[1][i] && y[0][i]
            });
            if meet && tasks[a].0 == tasks[b].0 {
                inside = true;
            } else if meet {
                conflicts.set(b, a);
            }
        }
    }
    let mut order = conflicts.clone();
    order.close(0..n);
    Truth { conflicts, order, inside }
}

/// The order events (and workers) give.
fn order_of(tasks: &TaskGraph, workers: Option<&WorkerLists>) -> Bits {
    let n = tasks.tasks.len();
    let mut order = Bits::new(n);
    let triggerers = tasks.triggers.inverted(tasks.events.len());
    for t in 0..n {
        for e in tasks.waits.of(t) {
            for p in triggerers.of(*e as usize) {
                assert!(*p < t as u32, "a wait on a later task");
                order.set(t, *p as usize);
            }
        }
    }
    for pair in workers.iter().flat_map(|w| &w.lists).flat_map(|list| list.windows(2)) {
        order.set(pair[1] as usize, pair[0] as usize);
    }
    order.close(0..n);
    order
}

fn is_complete(truth: &Truth, order: &Bits) -> bool {
    truth.conflicts.rows.iter().zip(&order.rows).all(|(needed, have)| needed & !have == 0)
}

/// Decisions of a random graph, read off a list of bytes so that shorter lists are simpler graphs.
struct Choices<'a>(std::slice::Iter<'a, u8>);

impl Choices<'_> {
    fn below(&mut self, n: usize) -> usize {
        self.0.next().map_or(0, |c| *c as usize % n)
    }
    fn chance(&mut self, of: usize) -> bool {
        self.below(of) == of - 1
    }
}

const DTYPES: [DType; 3] = [DType::Bf16, DType::U8, DType::F32];

/// A view of a buffer of `bytes` bytes.
fn random_view(c: &mut Choices, buffer: BufferId, bytes: usize, name: String) -> DTensor {
    let dtype = DTYPES[if c.chance(4) { 1 + c.below(2) } else { 0 }];
    let elems = bytes / dtype.size_bytes();
    let columns = [6, 8, 12, 4][c.below(4)];
    let rows = elems / columns;
    let (mut shape, mut strides, mut offset) = match c.below(8) {
        // The whole, as rows and columns.
        0 | 1 => (vec![rows, columns], vec![columns, 1], 0),
        // Transposed.
        2 => (vec![columns, rows], vec![1, columns], 0),
        // Columns split: heads, say.
        3 => (vec![rows, columns / 2, 2], vec![columns, 2, 1], 0),
        // A slice of columns.
        4 => {
            let first = c.below(columns);
            let n = 1 + c.below(columns - first);
            (vec![rows, n], vec![columns, 1], first)
        }
        // A slice of rows.
        5 => {
            let first = c.below(rows);
            let n = 1 + c.below(rows - first);
            (vec![n, columns], vec![columns, 1], first * columns)
        }
        // Every other column, split.
        6 => (vec![rows, columns / 2], vec![columns, 2], c.below(2)),
        // Anything that fits, overlapping or not, empty or not.
        _ => {
            let shape = vec![c.below(5), 1 + c.below(4), 1 + c.below(3)];
            (shape, vec![c.below(4), c.below(5), c.below(7)], c.below(4))
        }
    };
    let end = offset + shape.iter().zip(&strides).map(|(n, s)| n.saturating_sub(1) * s).sum::<usize>() + 1;
    if end > elems {
        (shape, strides, offset) = (vec![elems], vec![1], 0);
    }
    DTensor { name, shape, strides, dtype, buffer, offset_elems: offset }
}

fn random_graph(bytes: &[u8]) -> ThreadBlockGraph {
    let c = &mut Choices(bytes.iter());
    let mut graph = ThreadBlockGraph::default();
    let n_buffers = 1 + c.below(4);
    for b in 0..n_buffers {
        let elems = [24, 48, 36, 60][c.below(4)];
        graph.table.add(&format!("b{b}"), &[elems], DType::Bf16, BufferKind::Intermediate).unwrap();
        for v in 0..1 + c.below(3) {
            let view = random_view(c, BufferId(b as u32), 2 * elems, format!("b{b}.{v}"));
            graph.table.tensors.push(view);
        }
    }
    let n_tensors = graph.table.tensors.len();
    for i in 0..3 + c.below(7) {
        let mut grid = [1 + c.below(6) as u32, 1, 1];
        if c.chance(3) {
            grid[1] = 1 + c.below(5) as u32;
            grid[2] = 1 + c.below(3) as u32;
        }
        let mut accesses: Vec<Access> = Vec::new();
        for _ in 0..1 + c.below(4) {
            let tensor = TensorId(c.below(n_tensors) as u32);
            // Two accesses of one buffer are mostly a conflict among the blocks, hence refused: a few are enough.
            let again = accesses.iter().any(|a| graph.table[a.tensor].buffer == graph.table[tensor].buffer);
            if again && !c.chance(6) {
                continue;
            }
            let kind = [Read, Write, Read, ReadWrite, ReduceAdd][c.below(5)];
            let rank = graph.table[tensor].shape.len();
            let mut map = [-1; 3];
            let start = c.below(rank);
            let mut used = 0;
            for (axis, dim) in map.iter_mut().enumerate() {
                let must = matches!(kind, Write | ReadWrite) && grid[axis] > 1;
                if used < rank && (must || c.chance(2)) {
                    *dim = ((start + used) % rank) as i8;
                    used += 1;
                } else if must {
                    grid[axis] = 1;
                }
            }
            accesses.push(cut(tensor, kind, map));
        }
        graph.ops.push(op(&format!("op{i}"), grid, accesses));
    }
    graph
}

/// Whether [`lower`] with `config` keeps laws 1 and 2 on `graph`; refused graphs do not count.
fn keeps_laws(graph: &ThreadBlockGraph, config: &Config) -> Result<(), String> {
    let truth = truth(graph);
    let tasks = match lower(graph, config) {
        Ok(tasks) => tasks,
        Err(TaskError::BlocksConflict { .. }) if truth.inside => return Ok(()),
        Err(error) => return Err(format!("refused: {error}")),
    };
    if truth.inside {
        return Err("two blocks of one operator conflict, and it was not refused".to_owned());
    }
    let order = order_of(&tasks, None);
    if !is_complete(&truth, &order) {
        return Err("law 1: a conflict is not ordered".to_owned());
    }
    if order != truth.order {
        return Err("law 2: tasks are ordered that no conflict orders".to_owned());
    }
    Ok(())
}

fn cases(n: u32) -> ProptestConfig {
    ProptestConfig { cases: n, failure_persistence: None, ..ProptestConfig::default() }
}

fn choices() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(any::<u8>(), 40..280)
}

proptest! {
    #![proptest_config(cases(4000))]

    /// Laws 1 and 2, on any graph: the events order exactly what overlap orders.
    #[test]
    fn events_order_exactly_what_overlaps(bytes in choices()) {
        let graph = random_graph(&bytes);
        prop_assume!(graph.check().is_ok());
        prop_assert_eq!(keeps_laws(&graph, &Config::default()), Ok(()));
    }

    /// The judge agrees with brute force, on right graphs and on damaged ones; law 3; worker order.
    #[test]
    fn the_judge_agrees_with_brute_force(
        bytes in choices(), damage in proptest::collection::vec(any::<u16>(), 0..4), n_workers in 1usize..6,
    ) {
        let graph = random_graph(&bytes);
        prop_assume!(graph.check().is_ok());
        let truth = truth(&graph);
        let Ok(mut tasks) = lower(&graph, &Config::default()) else { return Ok(()) };
        prop_assert_eq!(check(&graph, &tasks, None), Ok(()));
        let (waited, needed) = waited_and_needed(&graph, &tasks);
        prop_assert_eq!(waited, needed, "{}{:?}", graph, graph.table.tensors);
        let workers = assign_round_robin(&tasks, n_workers);
        prop_assert_eq!(simulate(&tasks, &workers), Ok(()));

        let mut elided = tasks.clone();
        elide(&mut elided, &workers);
        prop_assert!(elided.waits.entries.len() <= tasks.waits.entries.len());
        prop_assert!(is_complete(&truth, &order_of(&elided, Some(&workers))));
        prop_assert_eq!(check(&graph, &elided, Some(&workers)), Ok(()));

        for damage in damage {
            if tasks.waits.entries.is_empty() { break }
            forget_wait(&mut tasks, damage as usize);
        }
        let complete = is_complete(&truth, &order_of(&tasks, None));
        prop_assert_eq!(check(&graph, &tasks, None).is_ok(), complete);
        let complete = is_complete(&truth, &order_of(&tasks, Some(&workers)));
        prop_assert_eq!(check(&graph, &tasks, Some(&workers)).is_ok(), complete);
    }
}

proptest! {
    #![proptest_config(cases(1000))]

    /// Whatever an event costs, exact relations stay exact; where exactness is given up, law 1 stays and the factor
    /// says so.
    #[test]
    fn costs_change_the_events_and_not_the_order(bytes in choices(), wait in 0usize..4, limit in 0u32..3) {
        let graph = random_graph(&bytes);
        prop_assume!(graph.check().is_ok());
        let mut config = Config::default();
        config.costs.wait = [0.01, 0.5, 1.0, 50.0][wait];
        prop_assert_eq!(keeps_laws(&graph, &config), Ok(()));
        config.max_entries_per_part = limit;
        let Ok(tasks) = lower(&graph, &config) else { return Ok(()) };
        prop_assert_eq!(check(&graph, &tasks, None), Ok(()));
        let (waited, needed) = waited_and_needed(&graph, &tasks);
        prop_assert!(tasks.stats.oversync >= 1.0);
        // The figure counts tensor by tensor: a pair one tensor does not need, another may.
        prop_assert!(waited == needed || tasks.stats.oversync > 1.0);
    }
}

/// Takes away the `n`-th wait.
fn forget_wait(tasks: &mut TaskGraph, n: usize) {
    let n = n % tasks.waits.entries.len();
    tasks.waits.entries.remove(n);
    for head in &mut tasks.waits.heads {
        if *head as usize > n {
            *head -= 1;
        }
    }
}

/// Every broken rule is noticed by the property the right rules keep.
#[test]
fn broken_rules_are_noticed() {
    use proptest::test_runner::{Config as RunnerConfig, TestCaseError, TestError, TestRunner};
    for defect in
        [Defect::DropWar, Defect::DropWaw, Defect::FirstTensorOnly, Defect::StripResiduals, Defect::SupersedeWhole]
    {
        let config = Config { defect: Some(defect), ..Config::default() };
        let mut runner = TestRunner::new(RunnerConfig {
            cases: 4000,
            failure_persistence: None,
            max_shrink_iters: 200,
            ..RunnerConfig::default()
        });
        let result = runner.run(&choices(), |bytes| {
            let graph = random_graph(&bytes);
            prop_assume!(graph.check().is_ok());
            keeps_laws(&graph, &config).map_err(TestCaseError::fail)
        });
        match result {
            Err(TestError::Fail(reason, _)) => assert!(reason.message().starts_with("law 1"), "{defect:?}: {reason}"),
            other => panic!("{defect:?} went unnoticed: {other:?}"),
        }
    }
}

/// One tensor of `len` elements, written by `producers` blocks and read by `consumers` blocks.
fn pair(len: usize, producers: u32, consumers: u32) -> ThreadBlockGraph {
    let mut table = TensorTable::default();
    let x = table.add("x", &[1, len], DType::Bf16, BufferKind::Intermediate).unwrap();
    let ops = vec![
        op("write", [producers, 1, 1], vec![cut(x, Write, [1, -1, -1])]),
        op("read", [1, consumers, 1], vec![cut(x, Read, [-1, 1, -1])]),
    ];
    ThreadBlockGraph { table, ops, ..Default::default() }
}

#[test]
fn the_worked_example_gives_eight_events_of_four() {
    let tasks = lower(&pair(6144, 32, 8), &Config::default()).unwrap();
    assert_eq!(tasks.events, vec![4; 8]);
    for k in 0..8 {
        assert_eq!(tasks.waits.of(32 + k), [k as u32]);
        for p in 4 * k..4 * k + 4 {
            assert_eq!(tasks.triggers.of(p), [k as u32]);
        }
    }
}

#[test]
fn partitions_that_do_not_divide_are_exact_with_one_wait_each() {
    for (p, c) in [(600, 128), (600, 96), (132, 8), (96, 128), (96, 35), (7, 5), (8, 132)] {
        let graph = pair(153_600, p, c);
        let tasks = lower(&graph, &Config::default()).unwrap();
        assert_eq!((tasks.stats.oversync, tasks.stats.max_waits), (1.0, 1));
        assert_eq!(check(&graph, &tasks, None), Ok(()));
        let (waited, needed) = waited_and_needed(&graph, &tasks);
        assert_eq!(waited, needed);
        if 153_600 % (p * c) == 0 || (p, c) == (7, 5) {
            assert_eq!(waited, u64::from(p + c - gcd(p, c)));
        }
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// A full read behind a full read: the older one is implied, and a join of two full reads is one wait.
#[test]
fn orderings_that_follow_from_nearer_ones_are_dropped_and_joins_share_an_event() {
    let mut table = TensorTable::default();
    let mut add = |name: &str| table.add(name, &[1, 64], DType::Bf16, BufferKind::Intermediate).unwrap();
    let (h, a, b, y) = (add("h"), add("a"), add("b"), add("y"));
    let whole = [-1, -1, -1];
    let by_x = [1, -1, -1];
    let ops = vec![
        op("embed", [4, 1, 1], vec![cut(h, Write, by_x)]),
        op("left", [8, 1, 1], vec![cut(h, Read, whole), cut(a, Write, by_x)]),
        op("right", [8, 1, 1], vec![cut(h, Read, whole), cut(b, Write, by_x)]),
        op("join", [6, 1, 1], vec![cut(a, Read, whole), cut(b, Read, whole), cut(h, Read, by_x), cut(y, Write, by_x)]),
    ];
    let graph = ThreadBlockGraph { table, ops, ..Default::default() };
    let tasks = lower(&graph, &Config::default()).unwrap();
    assert_eq!(tasks.events, [4, 16]);
    assert_eq!(tasks.stats.implied_edges, 1);
    assert!((20..26).all(|t| tasks.waits.of(t) == [1]));
    assert_eq!(tasks.leaves(), (20..26).collect::<Vec<u32>>());
    assert_eq!(check(&graph, &tasks, None), Ok(()));
}

/// MPK strips u -> v when u -> w -> v exists; with aligned tiles only v[i] after u[i] is left of "v reads all of u".
#[test]
fn a_residual_that_reads_everything_stays_beside_an_aligned_path() {
    let mut table = TensorTable::default();
    let mut add = |name: &str| table.add(name, &[1, 64], DType::Bf16, BufferKind::Intermediate).unwrap();
    let (u, w, v) = (add("u"), add("w"), add("v"));
    let by_x = [1, -1, -1];
    let ops = vec![
        op("u", [8, 1, 1], vec![cut(u, Write, by_x)]),
        op("w", [8, 1, 1], vec![cut(u, Read, by_x), cut(w, Write, by_x)]),
        op("v", [8, 1, 1], vec![cut(w, Read, by_x), cut(u, Read, [-1, -1, -1]), cut(v, Write, by_x)]),
    ];
    let graph = ThreadBlockGraph { table, ops, ..Default::default() };
    assert_eq!(keeps_laws(&graph, &Config::default()), Ok(()));
    let config = Config { defect: Some(Defect::StripResiduals), ..Config::default() };
    let tasks = lower(&graph, &config).unwrap();
    let broken = check(&graph, &tasks, None).unwrap_err();
    assert_eq!(broken.len(), 56, "56 missing orderings");
    let Violation::Unordered { first, second, first_tensor, bytes, .. } = &broken[0] else { panic!("{:?}", broken[0]) };
    assert_eq!((*first, *second, first_tensor.as_str(), bytes.clone()), (1, 16, "u", 16..32));
}

/// A chain of aligned operators that ends by overwriting its start: the way through the chain orders what is
/// overwritten.
#[test]
fn an_aligned_chain_implies_its_ends() {
    let mut table = TensorTable::default();
    let mut add = |name: &str| table.add(name, &[1, 64], DType::Bf16, BufferKind::Intermediate).unwrap();
    let (u, v) = (add("u"), add("v"));
    let by_x = [1, -1, -1];
    let ops = vec![
        op("first", [8, 1, 1], vec![cut(u, Write, by_x)]),
        op("scale", [8, 1, 1], vec![cut(u, Read, by_x), cut(v, Write, by_x)]),
        op("skip", [8, 1, 1], vec![cut(u, Read, by_x), cut(v, ReadWrite, by_x)]),
        op("again", [8, 1, 1], vec![cut(v, Read, by_x), cut(u, Write, by_x)]),
    ];
    let graph = ThreadBlockGraph { table, ops, ..Default::default() };
    assert_eq!(keeps_laws(&graph, &Config::default()), Ok(()));
    let tasks = lower(&graph, &Config::default()).unwrap();
    assert_eq!((tasks.stats.max_waits, tasks.stats.waits), (1, 24));
}

/// The random graphs are worth testing: most have conflicts, many have chains, some are refused.
#[test]
fn random_graphs_are_of_all_kinds() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let (mut ordered, mut implied, mut several, mut inside) = (0, 0, 0, 0);
    for _ in 0..400 {
        let graph = random_graph(&choices().new_tree(&mut runner).unwrap().current());
        assert_eq!(graph.check(), Ok(()));
        match lower(&graph, &Config::default()) {
            Ok(tasks) => {
                ordered += usize::from(tasks.stats.pairs > 8);
                implied += usize::from(tasks.stats.implied_edges > 0);
                several += usize::from(tasks.stats.max_waits > 2);
            }
            Err(_) => inside += 1,
        }
    }
    println!("of 400: {ordered} with conflicts, {implied} with implied ones, {several} with 3 waits, {inside} refused");
    assert!(ordered > 100 && implied > 50 && several > 10 && inside > 20);
}

/// What keeps a graph from having a task graph is said with operator, tensor and reason.
#[test]
fn bad_graphs_are_refused_by_name() {
    let refusal = |change: &dyn Fn(&mut ThreadBlockGraph)| {
        let mut graph = pair(64, 4, 4);
        change(&mut graph);
        lower(&graph, &Config::default()).unwrap_err().to_string()
    };
    let says = |text: String, words: &[&str]| {
        for word in words {
            assert!(text.contains(word), "{text:?} does not say {word:?}");
        }
    };
    says(refusal(&|g| g.ops[1].grid[0] = 0), &["read", "zero axis"]);
    says(refusal(&|g| g.ops[1].accesses[0].as_mut().unwrap().map[0] = Some(2)), &["read", "dimension 2", "x"]);
    says(refusal(&|g| g.ops[1].accesses[0].as_mut().unwrap().map[0] = Some(1)), &["two grid axes", "dimension 1"]);
    says(refusal(&|g| g.ops[1].accesses[0].as_mut().unwrap().tensor = TensorId(7)), &["read", "x7", "not exist"]);
    // A head a block, but sixteen for each.
    says(refusal(&|g| g.ops[1].head_axis = Some(1)), &["read", "axis 1", "4 blocks", "x", "64"]);
    says(refusal(&|g| g.ops[0].accesses[0].as_mut().unwrap().map[0] = None), &["write", "same element"]);
    says(refusal(&|g| g.table.tensors[0].offset_elems = 1), &["write", "x", "ends at byte 130", "128"]);
    says(refusal(&|g| g.table.tensors[0].strides[1] = usize::MAX), &["write", "x", "ends at byte"]);
    // Blocks that write the same bytes through a view whose steps overlap.
    says(
        refusal(&|g| {
            g.table.tensors[0].shape = vec![8, 8];
            g.table.tensors[0].strides = vec![4, 1];
            g.ops[0].accesses[0].as_mut().unwrap().map[0] = Some(0);
        }),
        &["write", "blocks", "x", "same bytes"],
    );
    // In place, but every block reads all of it.
    says(
        refusal(&|g| {
            let all = cut(TensorId(0), Read, [-1, -1, -1]);
            g.ops[0].accesses.push(Some(all));
        }),
        &["write", "blocks", "not ordered"],
    );
    says(
        refusal(&|g| {
            g.ops[0].grid = [1 << 12, 1, 1];
            g.ops[1].grid = [1 << 12, 1 << 12, 1];
        }),
        &["read", "more than"],
    );
}

/// Columns written by a linear, read per KV head and per position in its group, and transposed.
#[test]
fn grouped_heads_and_transposed_views_are_exact() {
    let mut table = TensorTable::default();
    let (tokens, kv, group, dim) = (3, 8, 4, 16);
    let q = table.add("q", &[tokens, kv * group * dim], DType::Bf16, BufferKind::Intermediate).unwrap();
    let width = kv * group * dim;
    let heads = table.view("q.heads", q, 0, &[tokens, kv, group, dim], &[width, group * dim, dim, 1]).unwrap();
    let turned = table.view("q.turned", q, 0, &[width, tokens], &[1, width]).unwrap();
    let linear = op("linear", [13, 1, 1], vec![cut(q, Write, [1, -1, -1])]);
    for access in [
        cut(heads, Read, [1, -1, -1]),
        cut(heads, Read, [2, -1, -1]),
        cut(heads, Read, [1, 2, 0]),
        cut(turned, Read, [0, 1, -1]),
    ] {
        let grid = [8, 4, 3];
        let read = op("read", grid, vec![access]);
        let graph = ThreadBlockGraph {
            table: table.clone(),
            ops: vec![linear.clone(), read, linear.clone()],
            ..Default::default()
        };
        let tasks = lower(&graph, &Config::default()).unwrap();
        assert_eq!(tasks.stats.oversync, 1.0);
        assert_eq!(check(&graph, &tasks, None), Ok(()));
        assert!(is_complete(&truth(&graph), &order_of(&tasks, None)));
        assert!(order_of(&tasks, None) == truth(&graph).order);
    }
}

/// Partial sums: two operators add into one tensor in any order, after what cleared it and before what reads it.
#[test]
fn additions_are_free_among_themselves() {
    let mut table = TensorTable::default();
    let x = table.add("x", &[1, 32], DType::F32, BufferKind::Intermediate).unwrap();
    let ops = vec![
        op("clear", [1, 1, 1], vec![cut(x, Write, [-1, -1, -1])]),
        op("first", [4, 2, 1], vec![cut(x, ReduceAdd, [1, -1, -1])]),
        op("second", [4, 2, 1], vec![cut(x, ReduceAdd, [-1, 1, -1])]),
        op("read", [1, 1, 1], vec![cut(x, Read, [-1, -1, -1])]),
    ];
    let graph = ThreadBlockGraph { table, ops, ..Default::default() };
    assert_eq!(keeps_laws(&graph, &Config::default()), Ok(()));
    let tasks = lower(&graph, &Config::default()).unwrap();
    assert_eq!(tasks.events, [1, 16], "one event after clearing, one when all have added");
}

#[test]
fn just_in_time_tasks_stand_in_no_list_and_need_an_event() {
    let graph = pair(64, 4, 2);
    let classes = vec![(1, TaskClass::JustInTime)];
    let config = Config { classes, ..Config::default() };
    let tasks = lower(&graph, &config).unwrap();
    let workers = assign_round_robin(&tasks, 3);
    assert_eq!(workers.lists.iter().map(Vec::len).sum::<usize>(), 4);
    assert_eq!(check(&graph, &tasks, Some(&workers)), Ok(()));
    let config = Config { classes: vec![(0, TaskClass::JustInTime)], ..Config::default() };
    let tasks = lower(&graph, &config).unwrap();
    let broken = check(&graph, &tasks, None).unwrap_err();
    assert!(matches!(broken[0], Violation::NeverLaunched { task: 0, .. }), "{broken:?}");
}

/// Workers 0 and 1 have a large block each, and worker 2 none: of what comes next, three operators of one block each,
/// it takes as much more than the others as it can have taken in before; and no worker two of those that run side by
/// side.
#[test]
fn who_had_nothing_to_do_does_not_keep_the_others_waiting() {
    let mut table = TensorTable::default();
    let [x, y, z] = ["x", "y", "z"].map(|name| table.add(name, &[2], DType::F32, BufferKind::Intermediate).unwrap());
    let large = op("large", [2, 1, 1], vec![cut(x, Write, [0, -1, -1])]);
    let next = |name, from, to: Option<TensorId>| {
        let written = to.map(|to| cut(to, Write, [-1, -1, -1]));
        op(name, [1, 1, 1], [cut(from, Read, [-1, -1, -1])].into_iter().chain(written).collect())
    };
    let cost = [1000, 1000, 100, 100, 100];
    let lists = |ops: Vec<BlockOp>, ahead, hop| {
        let graph = ThreadBlockGraph { table: table.clone(), ops, ..Default::default() };
        balance(&graph, &lower(&graph, &Config::default()).unwrap(), &cost, 3, Slack { ahead, hop }).lists
    };
    let chain = || vec![large.clone(), next("a", x, Some(y)), next("b", y, Some(z)), next("c", z, None)];
    assert_eq!(lists(chain(), u64::MAX, 0), [vec![0], vec![1], vec![2, 3, 4]]);
    assert_eq!(lists(chain(), 150, 0), [vec![0, 4], vec![1], vec![2, 3]]);
    assert_eq!(lists(chain(), 50, 99), [vec![0, 3], vec![1, 4], vec![2]]);
    // Where a hop would take longer than they do, all are one worker's.
    assert_eq!(lists(chain(), 50, 100), [vec![0], vec![1], vec![2, 3, 4]]);
    let side_by_side = vec![large.clone(), next("q", x, None), next("k", x, None), next("v", x, None)];
    assert_eq!(lists(side_by_side, u64::MAX, u64::MAX), [vec![0, 3], vec![1, 4], vec![2]]);
}

/// Layers of two kernels with fewer blocks than there are workers, among blocks for all of uneven cost.
#[test]
fn a_kernel_of_few_blocks_stays_where_its_code_is() {
    const MANY: u16 = 1;
    const FEW: u16 = 2;
    const ONE: u16 = 3;
    let (n_workers, n_layers) = (8u32, 12);
    let mut table = TensorTable::default();
    let mut ops = Vec::new();
    let mut costs = Vec::new();
    let mut last = table.add("x", &[8], DType::F32, BufferKind::Intermediate).unwrap();
    for layer in 0..n_layers {
        // The blocks of two sequences run side by side.
        for (kernel, n_blocks, sequences) in [(MANY, 8, 1), (FEW, 2, 2), (ONE, 1, 1)] {
            let next = table.add(&format!("{layer}.{kernel}"), &[8], DType::F32, BufferKind::Intermediate).unwrap();
            for sequence in 0..sequences {
                let len = 8 / sequences;
                let half = table.view("half", next, sequence * len, &[len], &[1]).unwrap();
                let accesses = vec![cut(last, Read, [-1, -1, -1]), cut(half, Write, [0, -1, -1])];
                let call = KernelCall { task_type: kernel, flags: 0, params: [0; PARAM_WORDS] };
                ops.push(BlockOp { kernel: Some(call), ..op("op", [n_blocks, 1, 1], accesses) });
                costs.extend((0..n_blocks).map(|block| 100 + u64::from(block * 7 + layer * 5) % 8 * 10));
            }
            last = next;
        }
    }
    let graph = ThreadBlockGraph { table, ops, ..Default::default() };
    let tasks = lower(&graph, &Config::default()).unwrap();
    let lists = balance(&graph, &tasks, &costs, n_workers, Slack { ahead: 0, hop: 0 }).lists;
    assert_eq!(check(&graph, &tasks, Some(&WorkerLists { lists: lists.clone() })), Ok(()));
    let who = |kernel: u16| -> Vec<usize> {
        let is_of = |task: &u32| graph.ops[tasks.tasks[*task as usize].op as usize].kernel.unwrap().task_type == kernel;
        (0..lists.len()).filter(|worker| lists[*worker].iter().any(is_of)).collect()
    };
    assert_eq!((who(MANY).len(), who(FEW).len(), who(ONE).len()), (8, 4, 1));
    assert!(!who(FEW).contains(&who(ONE)[0]), "another kernel's code goes elsewhere: {:?} {:?}", who(FEW), who(ONE));
}

#[test]
fn lists_that_wait_on_themselves_stall_and_the_report_names_the_event() {
    let graph = pair(64, 2, 2);
    let tasks = lower(&graph, &Config::default()).unwrap();
    let backwards = WorkerLists { lists: vec![vec![2, 0], vec![3, 1]] };
    let stall = simulate(&tasks, &backwards).unwrap_err();
    assert_eq!((stall.executed, stall.stuck.len()), (0, 2));
    assert_eq!((stall.stuck[0].task, stall.stuck[0].event, stall.stuck[0].target), (2, 0, 1));
    let missing = WorkerLists { lists: vec![vec![0, 1, 2]] };
    assert_eq!(simulate(&tasks, &missing).unwrap_err().misplaced, [3]);
    let twice = WorkerLists { lists: vec![vec![0, 1, 2, 3], vec![0]] };
    assert_eq!(simulate(&tasks, &twice).unwrap_err().misplaced, [0]);
}

/// Counters that do not add up, ids that do not exist, cycles.
#[test]
fn the_judge_names_broken_counters_and_cycles() {
    let graph = pair(64, 4, 2);
    let right = lower(&graph, &Config::default()).unwrap();
    let mut tasks = right.clone();
    tasks.events[1] += 1;
    assert_eq!(check(&graph, &tasks, None).unwrap_err(), [Violation::Count { event: 1, target: 3, triggers: 2 }]);
    let mut tasks = right.clone();
    tasks.waits.entries[0] = 9;
    assert!(matches!(&check(&graph, &tasks, None).unwrap_err()[0], Violation::Shape(text) if text.contains("e9")));
    let mut tasks = right.clone();
    tasks.triggers.entries.push(1);
    *tasks.triggers.heads.last_mut().unwrap() += 1;
    tasks.events[1] += 1;
    assert!(matches!(check(&graph, &tasks, None).unwrap_err()[0], Violation::Cycle { tasks: 1, first: 5, .. }));
    let mut tasks = right;
    tasks.op_first[1] = 3;
    assert!(matches!(check(&graph, &tasks, None).unwrap_err()[0], Violation::Shape(_)));
}

/// Pictures show every task and every event, or every operator.
#[test]
fn pictures_show_what_there_is() {
    use perpetua::graph::task::{dot::write_dot, svg::write_svg};
    for (producers, consumers) in [(32, 8), (600, 128)] {
        let graph = pair(153_600, producers, consumers);
        let tasks = lower(&graph, &Config::default()).unwrap();
        let (mut dot, mut svg) = (Vec::new(), Vec::new());
        write_dot(&graph, &tasks, &mut dot).unwrap();
        write_svg(&graph, &tasks, &mut svg).unwrap();
        let (dot, svg) = (String::from_utf8(dot).unwrap(), String::from_utf8(svg).unwrap());
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
        if producers == 32 {
            assert_eq!(dot.matches(" -> ").count(), tasks.triggers.entries.len() + tasks.waits.entries.len());
            assert_eq!(svg.matches("<circle").count(), tasks.events.len());
            assert_eq!(svg.matches("<title>task ").count(), tasks.tasks.len());
        } else {
            assert_eq!(dot.matches(" -> ").count(), 1);
            assert!(svg.contains("128 events, 720 triggers, 128 waits"));
        }
    }
}

/// The program: figures on stdout, files whole or not at all, and status 1 with operator, tensor and reason.
#[test]
fn plan_graph_writes_tasks_and_refuses_bad_graphs() {
    use std::process::Command;
    let program = env!("CARGO_BIN_EXE_perpetua");
    let folder = tempfile::tempdir().unwrap();
    let plan = |text: &str, more: &[&str]| {
        let path = folder.path().join("graph.json");
        std::fs::write(&path, text).unwrap();
        let out = folder.path().join("tasks.json");
        let _ = std::fs::remove_file(&out);
        let mut command = Command::new(program);
        command.args(["plan", "--target", "workers:4", "--graph"]).arg(&path).arg("--tasks-json").arg(&out);
        let done = command.args(more).output().unwrap();
        let written = std::fs::read_to_string(&out).ok();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (done.status.code(), text(done.stdout), text(done.stderr), written)
    };
    let good = r#"{"tensors": [{"name": "q", "shape": [1, 6144], "dtype": "bf16"}],
        "ops": [{"name": "linear", "grid": [32, 1, 1], "reads": [], "writes": [{"tensor": "q", "map": [1, -1, -1]}]},
                {"name": "attention", "grid": [1, 8, 1], "reads": [{"tensor": "q", "map": [-1, 1, -1]}], "writes": []}]}"#;
    let (status, stdout, stderr, written) = plan(good, &["--check"]);
    assert_eq!((status, stderr.as_str()), (Some(0), ""));
    assert!(stdout.contains("events           8\n") && stdout.contains("oversync         1.000\n"), "{stdout}");
    let json: serde_json::Value = serde_json::from_str(&written.unwrap()).unwrap();
    assert_eq!(json["events"].as_array().unwrap().len(), 8);
    assert_eq!(json["tasks"][32]["waits"], serde_json::json!([0]));
    assert_eq!(json["workers"].as_array().unwrap().len(), 4);
    for (from, to, says) in [
        ("[1, 8, 1]", "[1, 0, 1]", "operator attention"),
        ("[-1, 1, -1]", "[-1, 2, -1]", "dimension 2 of tensor q"),
        ("[-1, 1, -1]", "[1, 1, -1]", "two grid axes cut dimension 1 of tensor q"),
        (
            "\"writes\": [{\"tensor\": \"q\", \"map\": [1,",
            "\"writes\": [{\"tensor\": \"q\", \"map\": [-1,",
            "same element",
        ),
    ] {
        let bad = good.replace(from, to);
        assert_ne!(bad, good);
        let (status, _, stderr, written) = plan(&bad, &[]);
        assert!(status == Some(1) && stderr.contains(says) && written.is_none(), "{stderr:?} does not say {says:?}");
    }
    let late = good.replace(r#""name": "linear","#, r#""name": "linear", "class": "just-in-time","#);
    let (status, _, stderr, written) = plan(&late, &["--check"]);
    let says = "just-in-time operator linear: a task of it waits for no other";
    assert!(status == Some(1) && stderr.contains(says) && written.is_none(), "{stderr:?} does not say {says:?}");
}
