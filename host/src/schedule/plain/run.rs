//! One run of the feasible memory scheduler: the state, its steps, and the two loops made of them.
//!
//! The state is a clock, two engines, a [`LinearScan`] over the chip's memory, and for every op how many inputs it
//! still misses (in-degree), how many users its output still has (out-degree), and where its output is. A *scheduling*
//! step allocates an op's output and starts it; an *un-scheduling* step takes the next completion off the time heap,
//! frees what has lost its last user and finds out what has become ready.
//!
//! A data op whose own inputs are there counts as available on demand: its consumers do not wait on it in the in-degree
//! table, it is brought in when one of them is chosen. So memory never fills with inputs of ops that cannot run yet.
//!
//! [`Run::without_prefetch`] brings data in when a compute op has been chosen and the one before has retired.
//! [`Run::with_prefetch`] replays the compute order of such a run while the data engine works ahead of it, each load as
//! soon as its prefetch edge and the memory allow.
//!
//! Where nothing fits, an op is *forced*: room is made for it by spilling whole windows of memory, chosen by what they
//! cost to bring back and how soon that will be; if the op's own inputs are in the way, memory is emptied and they come
//! back side by side, which always succeeds because [`Graph`] refuses ops that do not fit with their inputs. Inputs
//! that were produced can come back without anything else on chip, so forcing an op always ends.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::graph::{Graph, Kind};
use super::prefetch::Load;
use super::rank_set::RankSet;
use super::{Placed, PrefetchEdge, Spill};
use crate::memory::linear_scan::{Direction, LinearScan};

/// Where an op and its output stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Not started.
    Waiting,
    /// Started; its output is allocated.
    Running,
    /// Complete and on chip.
    Resident,
    /// Complete, but spilled or dropped.
    Absent,
    /// All users have retired.
    Dead,
}

/// In which order ready compute ops are tried.
#[derive(Debug, Clone)]
pub(super) struct Policy {
    /// Lower goes first.
    pub(super) ranks: Vec<u32>,
    /// Whose inputs are on chip already goes before the rest, or not.
    pub(super) preference: Preference,
}

/// See [`Policy`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Preference {
    /// Active ops first: they finish what already occupies memory.
    Active,
    /// Only the rank counts.
    Rank,
}

/// What a run leaves behind.
#[derive(Debug, Clone)]
pub(super) struct Trace {
    pub(super) ops: Vec<Placed>,
    pub(super) spills: Vec<Spill>,
    pub(super) prefetch_edges: Vec<PrefetchEdge>,
    pub(super) makespan: u64,
    /// The compute ops as they ran.
    pub(super) compute_order: Vec<u32>,
    /// The data ops in the order of need, each with the position of the compute op it was brought in for.
    pub(super) loads: Vec<Load>,
    /// For each position of `compute_order` the bytes on chip meanwhile, without those just brought in for it.
    pub(super) base_bytes: Vec<u64>,
}

/// Ready ops tried before one is forced.
const MAX_TRIES: usize = 4096;
/// Loads looked at past one whose inputs are not there yet.
const LOOK_AHEAD: usize = 8;
const NONE: u32 = u32::MAX;
/// Marks completions of spill reads on the time heap.
const READ: u32 = 1 << 31;

/// The compute ops that could run, by rank, for a run that has an order yet to find.
#[derive(Debug, Clone)]
struct Lists {
    /// With some input on chip.
    active: RankSet,
    /// The others.
    ready: RankSet,
    /// Which op has a rank.
    by_rank: Vec<u32>,
}

/// How things stand before anything has run, shared by all runs of a graph.
pub(super) struct Start<'g> {
    graph: &'g Graph,
    degrees: Degrees,
    topological_idx: Vec<u32>,
}

/// The in-degree and out-degree tables, and what they let go.
#[derive(Clone)]
struct Degrees {
    /// Inputs each op still waits on.
    missing: Vec<u32>,
    /// Users of each output that have not retired.
    users_left: Vec<u32>,
    /// Ready data ops that no compute op waits on: those that free at least what they take, and the others.
    copy_outs: VecDeque<u32>,
    off_chain: VecDeque<u32>,
    /// Work for [`become_ready`](Self::become_ready), empty between its calls.
    stack: Vec<u32>,
}

pub(super) struct Run<'s, 'g> {
    graph: &'g Graph,
    start: &'s Start<'g>,
    scan: LinearScan,
    clock: u64,
    data_free: u64,
    compute_free: u64,
    /// Memory freed ahead of the clock, while ops are being forced, is free from this time on.
    memory_at: u64,
    /// Completions, earliest first.
    heap: BinaryHeap<Reverse<(u64, u32)>>,
    degrees: Degrees,
    state: Vec<State>,
    placed: Vec<Placed>,
    /// Where the output is now; `placed` has where it was first.
    offset: Vec<u64>,
    ready_at: Vec<u64>,
    /// Outputs on chip in no particular order, and each one's position there.
    resident: Vec<u32>,
    resident_idx: Vec<u32>,
    /// `None` where the order is given.
    lists: Option<Lists>,
    spills: Vec<Spill>,
    /// One more than the output's position in `spills` while it is outside, or 0.
    open_spill: Vec<u32>,
    marks: Vec<u32>,
    mark: u32,
    /// Of the compute ops: lower is used earlier.
    ranks: &'s [u32],
    compute_order: Vec<u32>,
}

impl<'g> Start<'g> {
    pub(super) fn new(graph: &'g Graph) -> Self {
        let n = graph.ops.len();
        let mut topological_idx = vec![0; n];
        for (idx, &op) in (0u32..).zip(&graph.topological) {
            topological_idx[op as usize] = idx;
        }
        let mut degrees = Degrees {
            missing: graph.ops.iter().map(|op| op.inputs.len() as u32).collect(),
            users_left: (0..n as u32).map(|op| graph.consumers(op).len() as u32).collect(),
            copy_outs: VecDeque::new(),
            off_chain: VecDeque::new(),
            stack: Vec::new(),
        };
        for op in 0..n as u32 {
            if graph.ops[op as usize].inputs.is_empty() {
                // The compute ops that nothing is missing of are found by the run.
                degrees.become_ready(graph, op, |_| ());
            }
        }
        Self { graph, degrees, topological_idx }
    }
}

impl Degrees {
    /// An op misses no input any more; neither, perhaps, do those that only waited for it to become available. Names
    /// the compute ops among them.
    fn become_ready(&mut self, graph: &Graph, op: u32, mut found: impl FnMut(u32)) {
        self.stack.push(op);
        while let Some(op) = self.stack.pop() {
            let own = &graph.ops[op as usize];
            if own.kind == Kind::Compute {
                found(op);
            } else if graph.feeds_compute[op as usize] {
                for &consumer in graph.consumers(op) {
                    self.missing[consumer as usize] -= 1;
                    if self.missing[consumer as usize] == 0 {
                        self.stack.push(consumer);
                    }
                }
            } else {
                let last = own.inputs.iter().filter(|&&input| self.users_left[input as usize] == 1);
                let freed_bytes: u64 = last.map(|&input| graph.ops[input as usize].bytes).sum();
                let is_copy_out = own.bytes <= freed_bytes;
                if is_copy_out { self.copy_outs.push_back(op) } else { self.off_chain.push_back(op) }
            }
        }
    }
}

impl<'s, 'g> Run<'s, 'g> {
    /// A run that has not begun.
    pub(super) fn new(start: &'s Start<'g>, ranks: &'s [u32]) -> Self {
        let graph = start.graph;
        let n = graph.ops.len();
        Self {
            graph,
            start,
            scan: LinearScan::new(graph.capacity_bytes),
            clock: 0,
            data_free: 0,
            compute_free: 0,
            memory_at: 0,
            heap: BinaryHeap::new(),
            degrees: start.degrees.clone(),
            state: vec![State::Waiting; n],
            placed: vec![Placed { start: 0, end: 0, offset: 0 }; n],
            offset: vec![0; n],
            ready_at: vec![0; n],
            resident: Vec::new(),
            resident_idx: vec![0; n],
            lists: None,
            spills: Vec::new(),
            open_spill: vec![0; n],
            marks: vec![0; n],
            mark: 0,
            ranks,
            compute_order: Vec::new(),
        }
    }

    /// The first of the two runs: compute ops one after the other, each with the data it demands.
    pub(super) fn without_prefetch(mut self, preference: Preference) -> Trace {
        let n = self.graph.ops.len();
        let mut lists = Lists { active: RankSet::new(n), ready: RankSet::new(n), by_rank: vec![NONE; n] };
        for op in (0..n as u32).filter(|&op| self.graph.ops[op as usize].kind == Kind::Compute) {
            let rank = self.ranks[op as usize];
            assert_eq!(lists.by_rank[rank as usize], NONE, "no two compute ops have the same rank");
            lists.by_rank[rank as usize] = op;
            if self.degrees.missing[op as usize] == 0 {
                lists.ready.insert(rank);
            }
        }
        self.lists = Some(lists);
        let mut loads = Vec::new();
        let mut base_bytes = Vec::new();
        let mut needs = Vec::new();
        loop {
            while let Some(op) = self.degrees.copy_outs.pop_front() {
                self.force_data(op);
            }
            let Some(op) = self.pick(preference, &mut needs) else { break };
            let position = self.compute_order.len() as u32;
            self.force(op, &needs);
            self.compute_order.push(op);
            let mut brought_bytes = 0;
            for &data in &needs {
                loads.push(Load { op: data, position });
                if self.state[data as usize] == State::Resident {
                    brought_bytes += self.graph.ops[data as usize].bytes;
                }
            }
            let used_bytes = self.graph.capacity_bytes - self.scan.free_bytes();
            base_bytes.push(used_bytes - brought_bytes);
            self.retire_next();
        }
        while let Some(op) = self.degrees.copy_outs.pop_front().or_else(|| self.degrees.off_chain.pop_front()) {
            self.force_data(op);
        }
        self.finish(loads, base_bytes, Vec::new())
    }

    /// The second run: the same compute order, with loads as early as `edges` and the memory allow. `edges[i]` is how
    /// many compute ops must have retired before `loads[i]` may start. The ranks are the positions of that order, so
    /// distances to the next use are known exactly.
    pub(super) fn with_prefetch(mut self, first: &Trace, edges: &[u32]) -> Trace {
        let order = &first.compute_order;
        let mut base_from: Vec<u64> = first.base_bytes.clone();
        for idx in (1..base_from.len()).rev() {
            base_from[idx - 1] = base_from[idx - 1].max(base_from[idx]);
        }
        let mut prefetch_edges = Vec::new();
        let mut head = 0;
        let (mut next, mut n_retired) = (0, 0u32);
        loop {
            let mut has_started = false;
            let mut is_starved = false;
            if self.compute_free <= self.clock && next < order.len() {
                let op = order[next];
                if self.inputs_are_here(op) {
                    if self.try_start(op, Direction::Up) {
                        self.compute_order.push(op);
                        next += 1;
                        has_started = true;
                    } else {
                        is_starved = true;
                    }
                }
            }
            if self.data_free <= self.clock {
                has_started |= self.start_copy_out()
                    || self.start_read_back(order.get(next).copied(), &mut is_starved)
                    || (!is_starved && {
                        let load = self.start_load(first, edges, &mut head, n_retired);
                        if let Some(idx) = load {
                            let after = edges[idx] as usize;
                            if after > 0 && edges[idx] < first.loads[idx].position {
                                let data = first.loads[idx].op;
                                prefetch_edges.push(PrefetchEdge { data, after: order[after - 1] });
                            }
                        }
                        load.is_some()
                    })
                    || (!is_starved && self.start_off_chain(base_from.get(n_retired as usize).copied().unwrap_or(0)));
            }
            if has_started {
                continue;
            }
            if !self.heap.is_empty() {
                n_retired += self.retire_next();
                continue;
            }
            if next < order.len() {
                let op = order[next];
                let mut needs = Vec::new();
                self.collect_needs(op, &mut needs);
                self.force(op, &needs);
                self.compute_order.push(op);
                next += 1;
            } else if let Some(op) = self.degrees.copy_outs.pop_front().or_else(|| self.degrees.off_chain.pop_front()) {
                self.force_data(op);
            } else {
                break;
            }
        }
        self.finish(Vec::new(), Vec::new(), prefetch_edges)
    }

    // ---- choosing ----

    /// The compute op to run next and the data ops it needs brought in: the first that fits, active before ready; where
    /// none fits the one that needs the least.
    fn pick(&mut self, preference: Preference, needs: &mut Vec<u32>) -> Option<u32> {
        let lists = self.lists.as_ref().expect("only a run that finds an order picks");
        let (active, ready) = (lists.active.first(), lists.ready.first());
        let rank = match preference {
            Preference::Active => active.or(ready),
            Preference::Rank => active.into_iter().chain(ready).min(),
        }?;
        // Most often the very first fits, so the lists are looked at in two goes.
        let mut chosen = lists.by_rank[rank as usize];
        self.collect_needs(chosen, needs);
        if !self.fits(chosen, needs) {
            let lists = self.lists.as_ref().expect("seen above");
            let mut ranks: Vec<u32> = lists.active.iter().chain(lists.ready.iter()).take(MAX_TRIES).collect();
            if preference == Preference::Rank {
                ranks.sort_unstable();
            }
            let candidates: Vec<u32> = ranks.into_iter().map(|rank| lists.by_rank[rank as usize]).collect();
            let mut least_bytes = u64::MAX;
            for op in candidates {
                self.collect_needs(op, needs);
                if self.fits(op, needs) {
                    chosen = op;
                    break;
                }
                let bytes = self.demand(op, needs);
                if bytes < least_bytes {
                    (least_bytes, chosen) = (bytes, op);
                }
            }
            self.collect_needs(chosen, needs);
        }
        let rank = self.ranks[chosen as usize];
        let lists = self.lists.as_mut().expect("seen above");
        if !lists.active.remove(rank) {
            lists.ready.remove(rank);
        }
        Some(chosen)
    }

    /// The data ops that have to run before `op` can, in an order in which they can.
    fn collect_needs(&mut self, op: u32, needs: &mut Vec<u32>) {
        needs.clear();
        let graph = self.graph;
        self.mark += 1;
        for &input in &graph.ops[op as usize].inputs {
            if self.state[input as usize] == State::Waiting && self.marks[input as usize] != self.mark {
                self.marks[input as usize] = self.mark;
                needs.push(input);
            }
        }
        let mut done = 0;
        while done < needs.len() {
            for &input in &graph.ops[needs[done] as usize].inputs {
                if self.state[input as usize] == State::Waiting && self.marks[input as usize] != self.mark {
                    self.marks[input as usize] = self.mark;
                    needs.push(input);
                }
            }
            done += 1;
        }
        if needs.len() > 1 {
            needs.sort_unstable_by_key(|&op| self.start.topological_idx[op as usize]);
        }
    }

    fn demand(&self, op: u32, needs: &[u32]) -> u64 {
        let op = &self.graph.ops[op as usize];
        let absent = op.inputs.iter().filter(|&&input| self.state[input as usize] == State::Absent);
        let bytes = |&op: &u32| self.graph.ops[op as usize].bytes;
        op.bytes + absent.map(bytes).sum::<u64>() + needs.iter().map(bytes).sum::<u64>()
    }

    /// Whether all that `op` demands fits at once: for certain where one gap is long enough for all of it, and
    /// otherwise found by trial allocation.
    fn fits(&mut self, op: u32, needs: &[u32]) -> bool {
        let graph = self.graph;
        let own = &graph.ops[op as usize];
        let demand = self.demand(op, needs);
        if demand > self.scan.free_bytes() {
            return false;
        }
        // Best fit may put a piece into a smaller gap; it pads each piece by less than the alignment.
        let n_pieces = needs.len() + own.inputs.len() + 1;
        let padding = (n_pieces as u64).saturating_mul(graph.alignment - 1);
        let largest_gap_bytes = self.scan.largest_gap_bytes();
        if demand.saturating_add(padding) <= largest_gap_bytes {
            return true;
        }
        let absent = own.inputs.iter().filter(|&&input| self.state[input as usize] == State::Absent);
        let pieces = needs.iter().chain(absent).map(|&piece| graph.ops[piece as usize].bytes);
        if own.bytes > largest_gap_bytes || pieces.clone().any(|bytes| bytes > largest_gap_bytes) {
            return false;
        }
        let mut trial: Vec<(u64, u64)> = Vec::with_capacity(n_pieces);
        let fits = pieces.into_iter().all(|bytes| {
            let offset = self.scan.alloc(bytes, graph.alignment, Direction::Up);
            trial.extend(offset.map(|offset| (offset, bytes)));
            offset.is_some()
        }) && self.scan.find(own.bytes, graph.alignment, Direction::Up).is_some();
        for (offset, bytes) in trial {
            self.scan.free(offset, bytes);
        }
        fits
    }

    fn inputs_are_here(&self, op: u32) -> bool {
        self.graph.ops[op as usize]
            .inputs
            .iter()
            .all(|&input| self.state[input as usize] == State::Resident && self.ready_at[input as usize] <= self.clock)
    }

    // ---- scheduling ----

    /// Starts an op whose inputs are here, if its output fits.
    fn try_start(&mut self, op: u32, direction: Direction) -> bool {
        let Some(offset) = self.scan.alloc(self.graph.ops[op as usize].bytes, self.graph.alignment, direction) else {
            return false;
        };
        self.start(op, offset);
        self.heap.push(Reverse((self.placed[op as usize].end, op)));
        true
    }

    /// Data ops that free at least what they take go first.
    fn start_copy_out(&mut self) -> bool {
        let Some(&op) = self.degrees.copy_outs.front() else {
            return false;
        };
        let can_start = self.inputs_are_here(op) && self.try_start(op, Direction::Up);
        if can_start {
            self.degrees.copy_outs.pop_front();
        }
        can_start
    }

    /// Brings back an input of the next compute op.
    fn start_read_back(&mut self, next: Option<u32>, is_starved: &mut bool) -> bool {
        let Some(next) = next else { return false };
        let absent = |&&input: &&u32| self.state[input as usize] == State::Absent;
        let Some(&input) = self.graph.ops[next as usize].inputs.iter().find(absent) else {
            return false;
        };
        let room = self.scan.alloc(self.graph.ops[input as usize].bytes, self.graph.alignment, Direction::Up);
        let Some(offset) = room else {
            *is_starved = true;
            return false;
        };
        self.read_back(input, offset);
        self.heap.push(Reverse((self.ready_at[input as usize], input | READ)));
        true
    }

    /// Starts the next load whose edge allows it; its position in the list.
    fn start_load(&mut self, first: &Trace, edges: &[u32], head: &mut usize, n_retired: u32) -> Option<usize> {
        while *head < first.loads.len() && self.state[first.loads[*head].op as usize] != State::Waiting {
            *head += 1;
        }
        for (idx, &Load { op, .. }) in first.loads.iter().enumerate().skip(*head).take(LOOK_AHEAD) {
            if self.state[op as usize] != State::Waiting {
                continue;
            }
            if edges[idx] > n_retired {
                return None;
            }
            if self.inputs_are_here(op) {
                return self.try_start(op, Direction::Down).then_some(idx);
            }
        }
        None
    }

    /// Ops off the compute chain fill what is left of the data engine, as long as the compute ops to come keep their
    /// room.
    fn start_off_chain(&mut self, base_bytes: u64) -> bool {
        let Some(&op) = self.degrees.off_chain.front() else {
            return false;
        };
        let own_bytes = self.graph.ops[op as usize].bytes;
        let resident_bytes = self.graph.capacity_bytes - self.scan.free_bytes();
        let can_start = own_bytes + resident_bytes.max(base_bytes) <= self.graph.capacity_bytes
            && self.inputs_are_here(op)
            && self.try_start(op, Direction::Up);
        if can_start {
            self.degrees.off_chain.pop_front();
        }
        can_start
    }

    fn start(&mut self, op: u32, offset: u64) {
        let own = &self.graph.ops[op as usize];
        let engine_free = match own.kind {
            Kind::Data => &mut self.data_free,
            Kind::Compute => &mut self.compute_free,
        };
        let mut start = (*engine_free).max(self.clock).max(self.memory_at);
        for &input in &own.inputs {
            debug_assert_eq!(self.state[input as usize], State::Resident, "inputs are resident when an op starts");
            start = start.max(self.ready_at[input as usize]);
        }
        let end = start + own.cycles;
        *engine_free = end;
        self.placed[op as usize] = Placed { start, end, offset };
        self.offset[op as usize] = offset;
        self.ready_at[op as usize] = end;
        self.state[op as usize] = State::Running;
        self.enter(op);
    }

    fn enter(&mut self, op: u32) {
        self.resident_idx[op as usize] = self.resident.len() as u32;
        self.resident.push(op);
    }

    fn leave(&mut self, op: u32) {
        let idx = self.resident_idx[op as usize] as usize;
        self.resident.swap_remove(idx);
        if let Some(&moved) = self.resident.get(idx) {
            self.resident_idx[moved as usize] = idx as u32;
        }
        self.scan.free(self.offset[op as usize], self.graph.ops[op as usize].bytes);
    }

    // ---- un-scheduling ----

    /// Takes the completions at the earliest time off the heap; how many compute ops were among them.
    fn retire_next(&mut self) -> u32 {
        let Some(Reverse((time, _))) = self.heap.peek().copied() else {
            return 0;
        };
        self.clock = self.clock.max(time);
        let mut n_compute = 0;
        while let Some(&Reverse((end, op))) = self.heap.peek() {
            if end > self.clock {
                break;
            }
            self.heap.pop();
            if op & READ == 0 {
                n_compute += u32::from(self.graph.ops[op as usize].kind == Kind::Compute);
                self.retire(op);
            }
        }
        n_compute
    }

    /// An op is complete: its inputs lose a user, its consumers an input.
    ///
    /// A forced op retires before its end, so an input's last user to retire need not be the last to end: what is freed
    /// is free from the latest end on.
    fn retire(&mut self, op: u32) {
        let graph = self.graph;
        self.state[op as usize] = State::Resident;
        for &input in &graph.ops[op as usize].inputs {
            self.degrees.users_left[input as usize] -= 1;
            if self.degrees.users_left[input as usize] == 0 {
                self.memory_at = self.memory_at.max(self.last_use(input));
                self.state[input as usize] = State::Dead;
                self.leave(input);
            }
        }
        // Consumers of a data op on the compute chain stopped waiting on it when it became available.
        let is_awaited = graph.ops[op as usize].kind == Kind::Compute || !graph.feeds_compute[op as usize];
        for &consumer in graph.consumers(op) {
            if is_awaited {
                self.degrees.missing[consumer as usize] -= 1;
                if self.degrees.missing[consumer as usize] == 0 {
                    let found = |op: u32| {
                        let Some(lists) = &mut self.lists else { return };
                        let mut inputs = graph.ops[op as usize].inputs.iter();
                        let is_active = inputs.any(|&input| self.state[input as usize] == State::Resident);
                        let list = if is_active { &mut lists.active } else { &mut lists.ready };
                        list.insert(self.ranks[op as usize]);
                    };
                    self.degrees.become_ready(graph, consumer, found);
                    continue;
                }
            }
            if let Some(lists) = &mut self.lists
                && self.degrees.missing[consumer as usize] == 0
                && graph.ops[consumer as usize].kind == Kind::Compute
            {
                let rank = self.ranks[consumer as usize];
                if lists.ready.remove(rank) {
                    lists.active.insert(rank);
                }
            }
        }
    }

    /// The latest end of the users that have retired, or 0.
    fn last_use(&self, op: u32) -> u64 {
        let users = self.graph.consumers(op).iter();
        let retired = users.filter(|&&user| !matches!(self.state[user as usize], State::Waiting | State::Running));
        retired.map(|&user| self.placed[user as usize].end).max().unwrap_or(0)
    }

    // ---- forcing ----

    /// Runs `needs` and starts `op`, whatever has to leave for it. Nothing else is running.
    fn force(&mut self, op: u32, needs: &[u32]) {
        for &data in needs {
            self.execute(data, op);
            self.retire(data);
        }
        self.execute(op, op);
        self.heap.push(Reverse((self.placed[op as usize].end, op)));
        self.clock = self.clock.max(self.memory_at);
    }

    /// Runs a data op off the compute chain while nothing else is running.
    fn force_data(&mut self, op: u32) {
        let mut needs = Vec::new();
        self.collect_needs(op, &mut needs);
        for &data in needs.iter().chain([&op]) {
            self.execute(data, op);
            self.retire(data);
        }
        self.clock = self.clock.max(self.memory_at);
    }

    /// Makes room for one op, brings its absent inputs back, and starts it. Inputs of `target` leave only if they must.
    fn execute(&mut self, op: u32, target: u32) {
        let graph = self.graph;
        let inputs = &graph.ops[op as usize].inputs;
        let mut own_offset = None;
        let absent_first = inputs.iter().chain([&op]);
        for &piece in absent_first {
            if piece != op && self.state[piece as usize] != State::Absent {
                continue;
            }
            let Some(offset) = self.make_room(graph.ops[piece as usize].bytes, op, target) else {
                own_offset = Some(self.compact(op));
                break;
            };
            if piece == op { own_offset = Some(offset) } else { self.read_back(piece, offset) }
        }
        let offset = own_offset.expect("the op itself is the last piece");
        self.start(op, offset);
    }

    /// Empties the memory and brings the inputs of `op` back side by side; the offset for its output.
    fn compact(&mut self, op: u32) -> u64 {
        while let Some(&victim) = self.resident.last() {
            self.spill(victim);
        }
        let graph = self.graph;
        let alignment = graph.alignment;
        let bytes = |piece: u32| graph.ops[piece as usize].bytes;
        let mut pieces: Vec<u32> = graph.ops[op as usize].inputs.clone();
        pieces.push(op);
        // The one with the most padding goes last, as the graph's own check of what fits has it.
        pieces.sort_by_key(|&piece| (bytes(piece).next_multiple_of(alignment) - bytes(piece), piece));
        let mut next = 0;
        let mut own_offset = 0;
        for piece in pieces {
            let offset = if bytes(piece) == 0 { 0 } else { next };
            self.scan.take(offset, bytes(piece));
            if piece == op {
                own_offset = offset
            } else {
                self.read_back(piece, offset)
            }
            next = (next + bytes(piece)).next_multiple_of(alignment);
        }
        own_offset
    }

    /// Bytes for a piece of `op`: free ones, or a window whose buffers are the cheapest to spill. `None` if every
    /// window holds something `op` reads.
    fn make_room(&mut self, bytes: u64, op: u32, target: u32) -> Option<u64> {
        let graph = self.graph;
        if let Some(offset) = self.scan.alloc(bytes, graph.alignment, Direction::Up) {
            return Some(offset);
        }
        self.mark += 1;
        let pinned = self.mark;
        self.mark += 1;
        let wanted = self.mark;
        for &input in &graph.ops[target as usize].inputs {
            self.marks[input as usize] = wanted;
        }
        for &input in &graph.ops[op as usize].inputs {
            self.marks[input as usize] = pinned;
        }
        let now = self.ranks[target as usize];
        // Each buffer on chip with its first byte and its end, in address order.
        let mut held: Vec<(u64, u64, u32)> = Vec::with_capacity(self.resident.len());
        held.extend(self.resident.iter().filter_map(|&victim| {
            let (offset, bytes) = (self.offset[victim as usize], graph.ops[victim as usize].bytes);
            (bytes > 0).then_some((offset, offset + bytes, victim))
        }));
        held.sort_unstable();
        // Prefix sums over them make every window's price two look-ups. Pinned ones have none.
        let mut prices: Vec<(u32, u32, u128)> = Vec::with_capacity(held.len() + 1);
        let (mut n_pinned, mut n_wanted, mut price) = (0, 0, 0);
        prices.push((n_pinned, n_wanted, price));
        for &(_, _, victim) in &held {
            let mark = self.marks[victim as usize];
            if mark == pinned || self.state[victim as usize] != State::Resident {
                n_pinned += 1;
            } else {
                n_wanted += u32::from(mark == wanted);
                price += self.price(victim, now);
            }
            prices.push((n_pinned, n_wanted, price));
        }
        let mut best: Option<((u32, u128, u64), usize, usize)> = None;
        let starts = held.iter().flat_map(|&(first, end, _)| [first, end]);
        // Windows come in ascending order, and so do the first buffer in each and the first past it.
        let (mut from, mut to) = (0, 0);
        for start in [0].into_iter().chain(starts) {
            let first = start.next_multiple_of(graph.alignment);
            let end = first.saturating_add(bytes);
            if end > graph.capacity_bytes {
                break;
            }
            while held.get(from).is_some_and(|&(_, held_end, _)| held_end <= first) {
                from += 1;
            }
            while held.get(to).is_some_and(|&(held_first, ..)| held_first < end) {
                to += 1;
            }
            if prices[to].0 > prices[from].0 {
                continue;
            }
            let key = (prices[to].1 - prices[from].1, prices[to].2 - prices[from].2, first);
            if best.as_ref().is_none_or(|best| key < best.0) {
                best = Some((key, from, to));
            }
        }
        let ((.., first), from, to) = best?;
        for &(_, _, victim) in &held[from..to] {
            self.spill(victim);
        }
        self.scan.take(first, bytes);
        Some(first)
    }

    /// What spilling a buffer costs: the cycles to bring it back (and first to save it), less the later that is.
    fn price(&self, victim: u32, now: u32) -> u128 {
        let own = &self.graph.ops[victim as usize];
        let cycles = match own.kind {
            Kind::Data => own.spill_cycles,
            Kind::Compute => 2 * own.spill_cycles,
        };
        let waiting = |&&user: &&u32| self.state[user as usize] == State::Waiting;
        let next_use = self.graph.consumers(victim).iter().filter(waiting).map(|&user| self.ranks[user as usize]).min();
        let distance = next_use.unwrap_or(u32::MAX).saturating_sub(now).max(1);
        // Mostly one division of u64 does.
        match u32::try_from(cycles + 1) {
            Ok(cycles) => u128::from((u64::from(cycles) << 32) / u64::from(distance)),
            Err(_) => (u128::from(cycles + 1) << 32) / u128::from(distance),
        }
    }

    fn spill(&mut self, victim: u32) {
        debug_assert_eq!(self.state[victim as usize], State::Resident, "only complete outputs are spilled");
        let own = &self.graph.ops[victim as usize];
        let idle = self.ready_at[victim as usize].max(self.last_use(victim)).max(self.memory_at).max(self.clock);
        let (write_start, write_end) = match own.kind {
            Kind::Data => (idle, idle),
            Kind::Compute => {
                let start = idle.max(self.data_free);
                self.data_free = start + own.spill_cycles;
                (start, self.data_free)
            }
        };
        self.memory_at = self.memory_at.max(write_end);
        self.leave(victim);
        self.state[victim as usize] = State::Absent;
        let offset = self.offset[victim as usize];
        self.spills.push(Spill { op: victim, write_start, write_end, read_start: 0, read_end: 0, offset });
        self.open_spill[victim as usize] = self.spills.len() as u32;
    }

    /// Occupies the data engine with bringing a spilled output back to bytes already taken for it.
    fn read_back(&mut self, op: u32, offset: u64) {
        let read_start = self.data_free.max(self.clock).max(self.memory_at);
        let read_end = read_start + self.graph.ops[op as usize].spill_cycles;
        self.data_free = read_end;
        self.ready_at[op as usize] = read_end;
        self.offset[op as usize] = offset;
        self.state[op as usize] = State::Resident;
        self.enter(op);
        let spill = &mut self.spills[self.open_spill[op as usize] as usize - 1];
        (spill.read_start, spill.read_end, spill.offset) = (read_start, read_end, offset);
        self.open_spill[op as usize] = 0;
    }

    /// Results that were spilled and that nobody reads come back as far as they fit; the rest stays outside, which is
    /// written as a read of no length at the very end.
    fn finish(mut self, loads: Vec<Load>, base_bytes: Vec<u64>, prefetch_edges: Vec<PrefetchEdge>) -> Trace {
        debug_assert!(self.state.iter().all(|&state| state != State::Waiting), "every op has run");
        let outside: Vec<u32> = (0..self.spills.len() as u32)
            .filter(|&spill| self.open_spill[self.spills[spill as usize].op as usize] == spill + 1)
            .collect();
        let mut unread = Vec::new();
        for spill in outside {
            let op = self.spills[spill as usize].op;
            match self.scan.alloc(self.graph.ops[op as usize].bytes, self.graph.alignment, Direction::Up) {
                Some(offset) => self.read_back(op, offset),
                None => unread.push(spill),
            }
        }
        let makespan = self.placed.iter().map(|placed| placed.end).max().unwrap_or(0);
        let makespan = self.spills.iter().map(|spill| spill.write_end.max(spill.read_end)).fold(makespan, u64::max);
        for spill in unread {
            let spill = &mut self.spills[spill as usize];
            (spill.read_start, spill.read_end) = (makespan, makespan);
        }
        Trace {
            ops: self.placed,
            spills: self.spills,
            prefetch_edges,
            makespan,
            compute_order: self.compute_order,
            loads,
            base_bytes,
        }
    }
}
