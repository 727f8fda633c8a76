//! The feasible memory scheduler, judged by its checker, by mutations of what it makes and by exhaustive search.

use perpetua::schedule::plain::check::check;
use perpetua::schedule::plain::{Graph, Kind, Op, PrefetchEdge, Schedule, Spill, json, schedule};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use std::collections::HashSet;

/// What one op needs with its inputs, padded: enough for [`Graph::new`] to accept it.
fn need(ops: &[Op], alignment: u64) -> u64 {
    let padded = |op: &Op| op.bytes.next_multiple_of(alignment);
    let of = |op: &Op| padded(op) + op.inputs.iter().map(|&input| padded(&ops[input as usize])).sum::<u64>();
    ops.iter().map(of).max().unwrap_or(0)
}

prop_compose! {
    /// Random graphs at capacities from what the neediest op needs to three times that.
    fn graphs(max_ops: usize)(
        shapes in proptest::collection::vec(
            (any::<bool>(), 0u64..400, 0u64..30, proptest::collection::vec(any::<proptest::sample::Index>(), 0..4), proptest::option::of(0u64..20)),
            1..=max_ops,
        ),
        alignment in prop_oneof![Just(1u64), Just(16), Just(64), Just(48)],
        percent in 100u64..300,
    ) -> Graph {
        let mut ops: Vec<Op> = Vec::new();
        for (idx, (is_data, bytes, cycles, inputs, spill_cycles)) in shapes.into_iter().enumerate() {
            let kind = if is_data { Kind::Data } else { Kind::Compute };
            let mut inputs: Vec<u32> =
                if idx == 0 { vec![] } else { inputs.iter().map(|input| input.index(idx) as u32).collect() };
            inputs.sort_unstable();
            inputs.dedup();
            // Most data ops of a real graph load from outside.
            if is_data && idx % 3 != 0 {
                inputs.clear();
            }
            let spill_cycles = spill_cycles.unwrap_or_else(|| Op::default_spill_cycles(kind, bytes, cycles));
            ops.push(Op { name: format!("op{idx}"), kind, bytes, cycles, inputs, spill_cycles });
        }
        let capacity = need(&ops, alignment) * percent / 100;
        Graph::new(capacity, alignment, ops).expect("capacity is at least what the neediest op needs")
    }
}

fn judged(graph: &Graph) -> Schedule {
    let schedule = schedule(graph);
    if let Err(violations) = check(graph, &schedule) {
        panic!("{} violations, the first: {}\n{graph:?}\n{schedule:?}", violations.len(), violations[0]);
    }
    schedule
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(500) })]

    #[test]
    fn random_graphs_are_scheduled(graph in graphs(30)) {
        let schedule = judged(&graph);
        prop_assert!(schedule.makespan >= graph.lower_bound_cycles());
        prop_assert!(schedule.makespan <= schedule.without_prefetch_makespan);
    }

    /// Where everything fits at once nothing is spilled.
    #[test]
    fn nothing_is_spilled_needlessly(graph in graphs(20)) {
        let alignment = graph.alignment();
        let total = graph.ops().iter().map(|op| op.bytes.next_multiple_of(alignment)).sum::<u64>();
        let roomy = Graph::new(total, alignment, graph.ops().to_vec()).unwrap();
        prop_assert_eq!(judged(&roomy).spills, vec![]);
    }

    /// Each mutation breaks a law whatever the schedule is.
    #[test]
    fn mutations_are_rejected(graph in graphs(16), pick in any::<proptest::sample::Index>(), by in 1u64..50) {
        let schedule = judged(&graph);
        let mut mutants: Vec<(&str, Schedule)> = Vec::new();
        let mut mutate = |what, change: &dyn Fn(&mut Schedule)| {
            let mut mutant = schedule.clone();
            change(&mut mutant);
            mutants.push((what, mutant));
        };
        let op = pick.index(graph.ops().len());
        let own = &graph.ops()[op];
        let placed = schedule.ops[op];
        mutate("longer", &|s| s.ops[op].end += by);
        mutate("later start", &|s| s.ops[op].start += by);
        mutate("makespan", &|s| s.makespan += by);
        mutate("peak", &|s| s.peak_bytes += by);
        mutate("missing op", &|s| { s.ops.pop(); });
        mutate("without prefetch", &|s| s.without_prefetch_makespan = s.makespan.wrapping_sub(1).min(s.makespan));
        if own.bytes > 0 {
            mutate("over capacity", &|s| s.ops[op].offset = graph.capacity_bytes().next_multiple_of(graph.alignment()));
            mutate("far offset", &|s| s.ops[op].offset = u64::MAX - u64::MAX % graph.alignment());
            if graph.alignment() > 1 {
                mutate("misaligned", &|s| s.ops[op].offset += 1);
            }
        }
        for &input in &own.inputs {
            let before = schedule.ops[input as usize].end;
            if before > 0 && graph.ops()[input as usize].cycles > 0 {
                mutate("before its input", &|s| {
                    s.ops[op].start = before - 1;
                    s.ops[op].end = before - 1 + own.cycles;
                });
            }
        }
        for (other, second) in graph.ops().iter().enumerate().filter(|&(other, _)| other != op) {
            if second.kind == own.kind && second.cycles > 0 && own.cycles > 0 {
                let start = schedule.ops[other].start;
                mutate("engine taken", &|s| {
                    s.ops[op].start = start;
                    s.ops[op].end = start + own.cycles;
                });
            }
            // Both hold bytes while the later of them runs.
            let its = schedule.ops[other];
            let is_plain = schedule.spills.iter().all(|spill| spill.op as usize != op && spill.op as usize != other);
            let together = placed.start.max(its.start) < placed.end.min(its.end);
            if is_plain && together && own.bytes > 0 && second.bytes > 0 {
                mutate("shared bytes", &|s| s.ops[op].offset = its.offset);
            }
            if own.kind == Kind::Data && second.kind == Kind::Compute && its.end > placed.start {
                let edge = PrefetchEdge { data: op as u32, after: other as u32 };
                mutate("edge", &|s| s.prefetch_edges.push(edge));
            }
        }
        for idx in 0..schedule.spills.len() {
            mutate("longer write", &|s| s.spills[idx].write_end += by);
            mutate("earlier write", &|s| {
                let spill = &mut s.spills[idx];
                let length = spill.write_end - spill.write_start;
                spill.write_start = s.ops[spill.op as usize].end.saturating_sub(by);
                spill.write_end = spill.write_start + length;
                if spill.write_start >= s.ops[spill.op as usize].end {
                    spill.read_end += 1;
                }
            });
            mutate("late read", &|s| {
                let spill = &mut s.spills[idx];
                let length = spill.read_end - spill.read_start;
                spill.read_start = s.makespan + by;
                spill.read_end = spill.read_start + length;
            });
            let Spill { read_start, read_end, .. } = schedule.spills[idx];
            if read_start < read_end {
                mutate("twice", &|s| s.spills.push(s.spills[idx]));
            }
        }
        for (what, mutant) in mutants {
            prop_assert!(mutant == schedule || check(&graph, &mutant).is_err(), "accepted: {} {:?} {:?}", what, mutant, schedule);
        }
    }

    #[test]
    fn no_text_makes_the_reader_panic(text in r#"(\{|\}|\[|\]|"ops"|"capacity"|"name"|:|,|-?[0-9]{1,22})*"#) {
        let _ = json::parse_graph(&text);
    }
}

/// The shortest schedule without spills, over every order in which ops could start; bytes are counted, not placed, so
/// it is a lower bound. `None` if every order runs out of memory.
fn exhaustive(graph: &Graph) -> Option<u64> {
    struct Search<'g> {
        graph: &'g Graph,
        times: Vec<Option<(u64, u64)>>,
        best: Option<u64>,
    }
    impl Search<'_> {
        fn held(&self, time: u64) -> u64 {
            let holds = |(op, times): (usize, &Option<(u64, u64)>)| {
                let Some((start, _)) = times else { return 0 };
                let users = self.graph.consumers(op as u32);
                let is_dead = !users.is_empty()
                    && users.iter().all(|&user| self.times[user as usize].is_some_and(|(_, end)| end <= time));
                if *start <= time && !is_dead { self.graph.ops()[op].bytes } else { 0 }
            };
            self.times.iter().enumerate().map(holds).sum()
        }
        fn go(&mut self, from: u64, free: [u64; 2], end: u64) {
            if self.best.is_some_and(|best| end >= best) {
                return;
            }
            if self.times.iter().all(Option::is_some) {
                self.best = Some(end);
                return;
            }
            for op in 0..self.times.len() {
                let own = &self.graph.ops()[op];
                let inputs: Option<Vec<u64>> =
                    own.inputs.iter().map(|&input| self.times[input as usize].map(|times| times.1)).collect();
                let (None, Some(inputs)) = (self.times[op], inputs) else {
                    continue;
                };
                let engine = usize::from(own.kind == Kind::Data);
                let earliest = inputs.into_iter().fold(from.max(free[engine]), u64::max);
                let mut starts: Vec<u64> =
                    self.times.iter().flatten().map(|times| times.1).filter(|&end| end > earliest).collect();
                starts.push(earliest);
                starts.sort_unstable();
                let room = self.graph.capacity_bytes() - own.bytes;
                let Some(start) = starts.into_iter().find(|&start| self.held(start) <= room) else {
                    continue;
                };
                self.times[op] = Some((start, start + own.cycles));
                let mut free = free;
                free[engine] = start + own.cycles;
                self.go(start, free, end.max(start + own.cycles));
                self.times[op] = None;
            }
        }
    }
    let mut search = Search { graph, times: vec![None; graph.ops().len()], best: None };
    search.go(0, [0; 2], 0);
    search.best
}

/// Seeded, so that the mean is a number that can be compared: 5 % is promised.
#[test]
fn small_graphs_are_near_their_optimum() {
    let mut state = 11u64;
    let mut random = move |below: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % below
    };
    let (mut total_gap, mut n_graphs, mut n_spilled) = (0.0, 0, 0);
    for _ in 0..300 {
        let n_ops = 4 + random(4) as usize;
        let mut ops: Vec<Op> = Vec::new();
        for idx in 0..n_ops {
            let kind = if random(2) == 0 { Kind::Data } else { Kind::Compute };
            let n_inputs = if kind == Kind::Data { u64::from(random(4) == 0) } else { 1 + random(2) };
            let mut inputs: Vec<u32> = (0..n_inputs).filter(|_| idx > 0).map(|_| random(idx as u64) as u32).collect();
            inputs.sort_unstable();
            inputs.dedup();
            let (bytes, cycles) = (1 + random(100), 1 + random(20));
            ops.push(Op { name: format!("op{idx}"), kind, bytes, cycles, inputs, spill_cycles: 1 + random(10) });
        }
        let capacity = need(&ops, 1) * (100 + random(200)) / 100;
        let graph = Graph::new(capacity, 1, ops).unwrap();
        let Some(optimum) = exhaustive(&graph) else { continue };
        let schedule = judged(&graph);
        total_gap += schedule.makespan as f64 / optimum as f64 - 1.0;
        n_spilled += usize::from(!schedule.spills.is_empty());
        n_graphs += 1;
    }
    let mean_gap = total_gap / f64::from(n_graphs);
    println!(
        "{n_graphs} graphs, mean gap {:.2} %, {n_spilled} spilled where some order spills nothing",
        mean_gap * 100.0
    );
    assert!(n_graphs > 100 && mean_gap <= 0.05, "mean gap {mean_gap} over {n_graphs} graphs");
}

/// Whether the ops of `graph` can run in some order, each output at some offset for good, without a spill. One op after
/// the other is enough: what overlaps in time holds no less. Every order and every offset is tried; `graph` has
/// alignment 1, at most 8 ops and a capacity below 256.
fn fits_without_spills(graph: &Graph) -> bool {
    /// Ops that have run, and where the outputs still needed lie.
    type State = (u8, [u8; 8]);
    struct Search<'g> {
        ops: &'g [Op],
        capacity: u64,
        /// Per set of ops that have run, whether the rest can follow when bytes are counted, not placed.
        can_follow: Vec<bool>,
        dead_ends: HashSet<State>,
    }
    impl Search<'_> {
        fn held(&self, done: u8) -> Vec<usize> {
            let has = |op: usize| done >> op & 1 == 1;
            let is_needed = |op: usize| {
                let mut users =
                    (0..self.ops.len()).filter(|&user| self.ops[user].inputs.contains(&(op as u32))).peekable();
                users.peek().is_none() || users.any(|user| !has(user))
            };
            (0..self.ops.len()).filter(|&op| has(op) && is_needed(op)).collect()
        }
        fn ready(&self, done: u8) -> Vec<usize> {
            let has = |op: usize| done >> op & 1 == 1;
            let is_ready = |op: usize| !has(op) && self.ops[op].inputs.iter().all(|&input| has(input as usize));
            (0..self.ops.len()).filter(|&op| is_ready(op)).collect()
        }
        fn go(&mut self, done: u8, offsets: [u8; 8]) -> bool {
            if usize::from(done) + 1 == self.can_follow.len() {
                return true;
            }
            let held = self.held(done);
            let mut state = (done, [0; 8]);
            held.iter().for_each(|&op| state.1[op] = offsets[op]);
            if !self.can_follow[usize::from(done)] || self.dead_ends.contains(&state) {
                return false;
            }
            for op in self.ready(done) {
                for offset in 0..=self.capacity - self.ops[op].bytes {
                    let is_taken = |&other: &usize| {
                        let start = u64::from(offsets[other]);
                        start < offset + self.ops[op].bytes && offset < start + self.ops[other].bytes
                    };
                    if held.iter().any(is_taken) {
                        continue;
                    }
                    let mut offsets = state.1;
                    offsets[op] = offset as u8;
                    if self.go(done | 1 << op, offsets) {
                        return true;
                    }
                }
            }
            self.dead_ends.insert(state);
            false
        }
    }
    let n_sets = 1 << graph.ops().len();
    let mut search = Search {
        ops: graph.ops(),
        capacity: graph.capacity_bytes(),
        can_follow: vec![false; n_sets],
        dead_ends: HashSet::new(),
    };
    search.can_follow[n_sets - 1] = true;
    for done in (0..n_sets as u32 - 1).rev().map(|done| done as u8) {
        let held: u64 = search.held(done).iter().map(|&op| search.ops[op].bytes).sum();
        let can_run = |&op: &usize| {
            held + search.ops[op].bytes <= search.capacity && search.can_follow[usize::from(done | 1 << op)]
        };
        search.can_follow[usize::from(done)] = search.ready(done).iter().any(can_run);
    }
    search.go(0, [0; 8])
}

/// Graphs whose spill-free schedules can be enumerated, at capacities from the largest need to twice that.
fn tiny_graphs() -> impl Strategy<Value = Graph> {
    let inputs = proptest::collection::vec(any::<proptest::sample::Index>(), 0..3);
    let op = (any::<bool>(), 1u64..9, 1u64..20, inputs);
    (proptest::collection::vec(op, 3..=8), 100u64..200).prop_map(|(shapes, percent)| {
        let mut ops: Vec<Op> = Vec::new();
        for (idx, (is_data, bytes, cycles, inputs)) in shapes.into_iter().enumerate() {
            let kind = if is_data { Kind::Data } else { Kind::Compute };
            let picked = inputs.iter().filter(|_| idx > 0 && !is_data).map(|input| input.index(idx) as u32);
            let mut inputs: Vec<u32> = picked.collect();
            inputs.sort_unstable();
            inputs.dedup();
            ops.push(Op { name: format!("op{idx}"), kind, bytes, cycles, inputs, spill_cycles: 1 + bytes / 4 });
        }
        let capacity = need(&ops, 1) * percent / 100;
        Graph::new(capacity, 1, ops).expect("capacity is at least what the neediest op needs")
    })
}

/// Seeded: of the graphs that can do without spills, at least 95 % do.
#[test]
fn spills_only_where_nothing_else_fits() {
    let mut runner = TestRunner::deterministic();
    let (mut n_possible, mut n_impossible, mut n_spill_free) = (0, 0, 0);
    for _ in 0..500 {
        let graph = tiny_graphs().new_tree(&mut runner).expect("nothing is rejected").current();
        let schedule = judged(&graph);
        let is_possible = fits_without_spills(&graph);
        assert!(is_possible || !schedule.spills.is_empty(), "the search missed a schedule: {graph:?} {schedule:?}");
        n_possible += usize::from(is_possible);
        n_impossible += usize::from(!is_possible);
        n_spill_free += usize::from(schedule.spills.is_empty());
    }
    println!("{n_spill_free} spill nothing of {n_possible} graphs that need not; {n_impossible} must");
    assert!(
        n_possible >= 200 && n_impossible >= 50,
        "{n_possible} graphs that need not spill, {n_impossible} that must"
    );
    assert!(100 * n_spill_free >= 95 * n_possible, "{n_spill_free} of {n_possible} spill nothing");
}

/// A chain of tiles through a ring: the shape of decoding. Weights are read, never written back.
fn decode(n_tiles: usize, ring: u64) -> Graph {
    let mut ops = Vec::new();
    for idx in 0..n_tiles as u32 {
        let load = Op {
            name: format!("w{idx}"),
            kind: Kind::Data,
            bytes: 16384,
            cycles: 450,
            inputs: vec![],
            spill_cycles: 450,
        };
        let inputs = if idx == 0 { vec![0] } else { vec![2 * idx - 1, 2 * idx] };
        let compute = Op {
            name: format!("c{idx}"),
            kind: Kind::Compute,
            bytes: 64,
            cycles: 150 + 600 * u64::from(idx % 8 == 0),
            inputs,
            spill_cycles: 1,
        };
        ops.extend([load, compute]);
    }
    Graph::new(ring * 16384 + 128, 64, ops).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(40) })]

    /// Any ring that holds two tiles, the least a tile and its successor need.
    #[test]
    fn decoding_never_spills(n_tiles in 1usize..300, ring in 2u64..16) {
        prop_assert_eq!(judged(&decode(n_tiles, ring)).spills, vec![]);
    }
}

#[test]
fn decoding_keeps_the_data_engine_busy_and_spills_nothing() {
    let graph = decode(400, 4);
    let schedule = judged(&graph);
    assert_eq!(schedule.spills, vec![]);
    assert!(!schedule.prefetch_edges.is_empty());
    let busy = 400.0 * 450.0 / schedule.makespan as f64;
    assert!(busy > 0.98, "the data engine is busy {busy} of the time");
    let without = schedule.without_prefetch_makespan;
    assert!(without as f64 > 1.3 * schedule.makespan as f64, "{without} without prefetch");
}

/// A result that must wait while a large op needs the room: saved, and read back.
#[test]
fn what_must_leave_comes_back() {
    let text = r#"{"capacity": 1024, "alignment": 64, "ops": [
        {"name": "x", "kind": "compute", "bytes": 512, "cycles": 10, "inputs": []},
        {"name": "w", "kind": "data", "bytes": 512, "cycles": 10, "inputs": []},
        {"name": "y", "kind": "compute", "bytes": 512, "cycles": 10, "inputs": ["w"]},
        {"name": "z", "kind": "compute", "bytes": 0, "cycles": 10, "inputs": ["x", "y"]},
        {"name": "u", "kind": "compute", "bytes": 64, "cycles": 10, "inputs": ["x"]},
        {"name": "v", "kind": "compute", "bytes": 0, "cycles": 10, "inputs": ["u", "y"]}]}"#;
    let graph = json::parse_graph(text).unwrap();
    let schedule = judged(&graph);
    assert!(!schedule.spills.is_empty());
    assert!(json::write_schedule(&graph, &schedule).contains(r#""spills":[{"op":"#));
}

/// More results than fit: some end outside, and say so.
#[test]
fn results_that_do_not_fit_end_outside() {
    let op = |name: &str| Op {
        name: name.into(),
        kind: Kind::Compute,
        bytes: 100,
        cycles: 5,
        inputs: vec![],
        spill_cycles: 7,
    };
    let graph = Graph::new(128, 64, vec![op("a"), op("b"), op("c")]).unwrap();
    let schedule = judged(&graph);
    let outside = schedule.spills.iter().filter(|spill| spill.read_start == spill.read_end).count();
    assert_eq!((outside, schedule.spills.len()), (2, 2));
}

/// Buffers that can only ever lie at 0, one after the other.
#[test]
fn large_alignments_are_scheduled_up_to_a_bound() {
    let text = |alignment: u64| {
        format!(
            r#"{{"capacity": 9, "alignment": {alignment}, "ops": [
            {{"name": "a", "kind": "data", "bytes": 3, "cycles": 1}},
            {{"name": "b", "kind": "compute", "bytes": 0, "cycles": 1, "inputs": ["a"]}},
            {{"name": "c", "kind": "data", "bytes": 3, "cycles": 1}},
            {{"name": "d", "kind": "compute", "bytes": 0, "cycles": 1, "inputs": ["c"]}}]}}"#
        )
    };
    let schedule = judged(&json::parse_graph(&text(1 << 51)).unwrap());
    assert_eq!((schedule.ops[0].offset, schedule.ops[2].offset), (0, 0));
    let message = |alignment| json::parse_graph(&text(alignment)).unwrap_err().to_string();
    assert!(message(1 << 52).contains("op `c`: padded bytes sum to more than"), "{}", message(1 << 52));
    for alignment in [1 << 63, u64::MAX] {
        assert_eq!(message(alignment), format!("alignment is {alignment}, expected at most 4503599627370496"));
    }
}

#[test]
fn nothing_is_scheduled_in_no_time() {
    let graph = Graph::new(0, 64, vec![]).unwrap();
    let schedule = judged(&graph);
    assert_eq!((schedule.makespan, schedule.peak_bytes), (0, 0));
}
