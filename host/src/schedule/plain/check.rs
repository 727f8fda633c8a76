//! The judge of schedules: the laws of [`plain`](super), from the schedule's numbers alone.
//!
//! Everything is collected into intervals first (who holds which bytes when, what each engine does when), then each law
//! is one sweep over them. It shares only types with the scheduler.

use std::collections::BTreeMap;
use std::fmt;

use super::graph::{Graph, Kind};
use super::{Schedule, Spill};

/// One broken law, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation(String);

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A stretch of time in which an output holds bytes.
struct Hold {
    op: usize,
    /// From here on it holds bytes.
    first: u64,
    /// From here on they can be read.
    usable: u64,
    end: u64,
    offset: u64,
}

/// All violations found. O(n log n).
pub fn check(graph: &Graph, schedule: &Schedule) -> Result<(), Vec<Violation>> {
    let mut judge = Judge { graph, schedule, violations: Vec::new() };
    let n = graph.ops().len();
    if schedule.ops.len() != n {
        judge.say(format!("{} ops are placed, the graph has {n}", schedule.ops.len()));
    } else if let Some(spill) = schedule.spills.iter().find(|spill| spill.op as usize >= n) {
        judge.say(format!("a spill of op {}, the graph has {n}", spill.op));
    } else {
        judge.engines();
        let holds = judge.holds();
        judge.inputs(&holds);
        judge.bytes(&holds);
        judge.prefetches();
    }
    if judge.violations.is_empty() { Ok(()) } else { Err(judge.violations) }
}

struct Judge<'a> {
    graph: &'a Graph,
    schedule: &'a Schedule,
    violations: Vec<Violation>,
}

impl<'a> Judge<'a> {
    fn say(&mut self, text: String) {
        self.violations.push(Violation(text));
    }

    fn name(&self, op: usize) -> &'a str {
        &self.graph.ops()[op].name
    }

    /// Durations, and that no engine does two things at a time.
    fn engines(&mut self) {
        let mut busy: [Vec<(u64, u64, usize)>; 2] = [Vec::new(), Vec::new()];
        let mut last = 0;
        for (op, placed) in self.schedule.ops.iter().enumerate() {
            let own = &self.graph.ops()[op];
            if placed.start.checked_add(own.cycles) != Some(placed.end) {
                self.say(format!(
                    "`{}` runs [{}, {}), expected {} cycles",
                    own.name, placed.start, placed.end, own.cycles
                ));
            }
            busy[usize::from(own.kind == Kind::Data)].push((placed.start, placed.end, op));
            last = last.max(placed.end);
        }
        for spill in &self.schedule.spills {
            let op = spill.op as usize;
            let own = &self.graph.ops()[op];
            let is_dropped = own.kind == Kind::Data && spill.write_start == spill.write_end;
            if !is_dropped && spill.write_start.checked_add(own.spill_cycles) != Some(spill.write_end) {
                let Spill { write_start, write_end, .. } = spill;
                self.say(format!(
                    "`{}` is saved in [{write_start}, {write_end}), expected {} cycles",
                    own.name, own.spill_cycles
                ));
            }
            let never_read = self.graph.consumers(spill.op).is_empty()
                && spill.read_start == spill.read_end
                && spill.read_start == self.schedule.makespan;
            if !never_read && spill.read_start.checked_add(own.spill_cycles) != Some(spill.read_end) {
                let Spill { read_start, read_end, .. } = spill;
                self.say(format!(
                    "`{}` is read in [{read_start}, {read_end}), expected {} cycles",
                    own.name, own.spill_cycles
                ));
            }
            if spill.read_start < spill.write_end {
                self.say(format!(
                    "`{}` is read back at {}, before it is out at {}",
                    own.name, spill.read_start, spill.write_end
                ));
            }
            if !is_dropped {
                busy[1].push((spill.write_start, spill.write_end, op));
            }
            if !never_read {
                busy[1].push((spill.read_start, spill.read_end, op));
            }
            last = last.max(spill.write_end).max(spill.read_end);
        }
        if last != self.schedule.makespan {
            self.say(format!("the makespan is {last}, {} claimed", self.schedule.makespan));
        }
        for (engine, mut busy) in ["compute", "data"].into_iter().zip(busy) {
            busy.sort_unstable();
            for pair in busy.windows(2) {
                if pair[1].0 < pair[0].1 {
                    let (a, b) = (self.name(pair[0].2), self.name(pair[1].2));
                    self.say(format!("the {engine} engine does `{a}` and `{b}` at the same time, at {}", pair[1].0));
                }
            }
        }
    }

    /// Who holds what when: each op's holds, in time order. Spills lie between an output's completion and its last use.
    fn holds(&mut self) -> Vec<Vec<Hold>> {
        let mut spills: Vec<Vec<&Spill>> = vec![Vec::new(); self.schedule.ops.len()];
        self.schedule.spills.iter().for_each(|spill| spills[spill.op as usize].push(spill));
        let mut holds = Vec::with_capacity(self.schedule.ops.len());
        for (op, placed) in self.schedule.ops.iter().enumerate() {
            let mut own = Vec::with_capacity(1 + spills[op].len());
            let users = self.graph.consumers(op as u32);
            let death =
                users.iter().map(|&user| self.schedule.ops[user as usize].end).max().unwrap_or(self.schedule.makespan);
            let mut hold = Hold { op, first: placed.start, usable: placed.end, end: death, offset: placed.offset };
            spills[op].sort_by_key(|spill| (spill.write_start, spill.read_start));
            for spill in &spills[op] {
                if spill.write_start < hold.usable {
                    self.say(format!(
                        "`{}` is spilled at {}, before it is there at {}",
                        self.name(op),
                        spill.write_start,
                        hold.usable
                    ));
                }
                if spill.write_end > death || spill.read_end > death {
                    self.say(format!("`{}` is spilled after its last use at {death}", self.name(op)));
                }
                let next =
                    Hold { op, first: spill.read_start, usable: spill.read_end, end: death, offset: spill.offset };
                hold.end = spill.write_end;
                own.push(std::mem::replace(&mut hold, next));
            }
            own.push(hold);
            holds.push(own);
        }
        holds
    }

    /// Inputs are complete and resident from start to end.
    fn inputs(&mut self, holds: &[Vec<Hold>]) {
        for (op, placed) in self.schedule.ops.iter().enumerate() {
            for &input in &self.graph.ops()[op].inputs {
                let is_there =
                    holds[input as usize].iter().any(|hold| hold.usable <= placed.start && placed.end <= hold.end);
                if !is_there {
                    let (start, end) = (placed.start, placed.end);
                    self.say(format!(
                        "`{}` runs [{start}, {end}) but its input `{}` is not there all the time",
                        self.name(op),
                        self.name(input as usize)
                    ));
                }
            }
        }
    }

    /// Bytes: alignment, capacity, no sharing, and the peak.
    fn bytes(&mut self, holds: &[Vec<Hold>]) {
        let holds: Vec<&Hold> = holds.iter().flatten().collect();
        let mut events: Vec<(u64, bool, usize)> = Vec::new();
        for (idx, hold) in holds.iter().enumerate() {
            let bytes = self.graph.ops()[hold.op].bytes;
            if bytes == 0 {
                continue;
            }
            if hold.offset % self.graph.alignment() != 0 {
                self.say(format!(
                    "`{}` is at {}, expected a multiple of {}",
                    self.name(hold.op),
                    hold.offset,
                    self.graph.alignment()
                ));
            }
            if hold.offset.checked_add(bytes).is_none_or(|end| end > self.graph.capacity_bytes()) {
                self.say(format!(
                    "`{}` at {} ends past the capacity {}",
                    self.name(hold.op),
                    hold.offset,
                    self.graph.capacity_bytes()
                ));
            } else if hold.first < hold.end {
                events.push((hold.first, true, idx));
                events.push((hold.end, false, idx));
            }
        }
        // Ends sort before begins at one time, because holds are half-open.
        events.sort_unstable();
        let mut held: BTreeMap<(u64, usize), u64> = BTreeMap::new();
        let (mut now_bytes, mut peak_bytes) = (0u64, 0u64);
        for (time, begins, idx) in events {
            let hold = holds[idx];
            let bytes = self.graph.ops()[hold.op].bytes;
            if !begins {
                held.remove(&(hold.offset, idx));
                now_bytes -= bytes;
                continue;
            }
            let end = hold.offset + bytes;
            let below = held.range(..(hold.offset, idx)).next_back().filter(|&(_, &below_end)| below_end > hold.offset);
            let above = held.range((hold.offset, idx)..).next().filter(|&(&(above, _), _)| above < end);
            for (&(_, other), _) in below.into_iter().chain(above) {
                self.say(format!(
                    "`{}` and `{}` hold the same bytes at {time}",
                    self.name(hold.op),
                    self.name(holds[other].op)
                ));
            }
            held.insert((hold.offset, idx), end);
            now_bytes = now_bytes.saturating_add(bytes);
            peak_bytes = peak_bytes.max(now_bytes);
        }
        if peak_bytes != self.schedule.peak_bytes {
            self.say(format!("the peak is {peak_bytes} bytes, {} claimed", self.schedule.peak_bytes));
        }
    }

    /// Prefetch edges are kept, and the second run is no later than the first.
    fn prefetches(&mut self) {
        let n = self.schedule.ops.len();
        for edge in &self.schedule.prefetch_edges {
            let (data, after) = (edge.data as usize, edge.after as usize);
            if data >= n || after >= n {
                self.say(format!("a prefetch edge from op {after} to op {data}, the graph has {n}"));
            } else if self.graph.ops()[data].kind != Kind::Data || self.graph.ops()[after].kind != Kind::Compute {
                self.say(format!(
                    "a prefetch edge from `{}` to `{}`, expected from compute to data",
                    self.name(after),
                    self.name(data)
                ));
            } else if self.schedule.ops[data].start < self.schedule.ops[after].end {
                self.say(format!(
                    "`{}` starts before `{}` has retired, against its prefetch edge",
                    self.name(data),
                    self.name(after)
                ));
            }
        }
        if self.schedule.makespan > self.schedule.without_prefetch_makespan {
            let without = self.schedule.without_prefetch_makespan;
            self.say(format!("the makespan {} is later than without prefetch, {without}", self.schedule.makespan));
        }
    }
}
