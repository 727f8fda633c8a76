//! How many cycles a block takes between its barriers, as far as its instructions decide.
//!
//! An instruction issues when what it reads is there; its result is there a latency later. Those without a branch or
//! barrier between them issue in whatever order their operands allow, since ptxas has ordered them: one a cycle, and
//! accesses to memory not before the stores in front of them. Nothing issues before the branch in front of it. A warp's
//! way from barrier to barrier is thus what its longest chain takes or, if that is more, what issuing takes; four warp
//! schedulers issue for the block, and one path to shared memory moves 128 bytes a cycle for all its warps.
//!
//! A warp that looks whether others have written what it wants (a relaxed load), for the first time since a barrier or
//! after it has slept, begins anew there: what it did before, it did while they worked, *ahead*.
//!
//! An instruction that the [cache](InstructionCache) does not hold is waited for, by the warp that comes to it first,
//! and by others until it is there.
//!
//! What this leaves out: ptxas has fewer registers than PTX, and moves instructions across branches too; copies have
//! landed and whatever global loads want is in L2. So it says which of two programs is shorter and where one spends its
//! time, and is a lower bound rather than a forecast.
//!
//! Of [machine code](Assembled) its own instructions issue, in their order, each after the cycles that the assembler
//! has put behind the one before; loads, shuffles and special functions are waited for where it says so, which is not
//! only where they are read. Tensor cores then take as long for a product as one warp's products do; those of a
//! warpgroup are made one after the other, and waited for where the code says so. That knows ptxas's registers, moves
//! and order; still not copies' way into shared memory, and what takes and releases tiles (`docs/cycles.md`).

use super::assembled::{Assembled, LINE, Placed, SCOREBOARDS, place};
use super::decode::{Access, Instruction, Op, Pc, Pred, Slot, Space};
use super::machine::{WARP, lanes_of};
use super::rows::Row;
use std::collections::{BTreeMap, VecDeque};

/// What an instruction takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cost {
    /// Slots of the warp's scheduler.
    pub(super) issues: u32,
    /// Cycles from its issue until its result can be read.
    latency: u32,
}

const fn cost(issues: u32, latency: u32) -> Cost {
    Cost { issues, latency }
}

// Cycles of a Hopper SM. Those of fixed latency are the stalls that ptxas puts into sm_90a code; the others stand in
// published microbenchmarks of the H100, rounded; none is measured by this library yet.
const ALU: Cost = cost(1, 4);
const WIDE: Cost = cost(2, 6);
/// Conversions and the special function unit: a quarter of a warp's lanes, or fewer, a cycle.
const SPECIAL: Cost = cost(1, 20);
const SHARED: u32 = 29;
/// Of a load from global memory that finds its line in L2.
const L2: u32 = 270;
const SHUFFLE: u32 = 24;
const PRODUCT: Cost = cost(2, 33);
/// For how long a scheduler's tensor core has such a product, of machine code: measurements of the H100 have 62 % of
/// its rate for a warp's products.
const KEEPS: u64 = 7;
/// Of a product of 64 x n by sixteen columns so many n's a cycle, at 4096 flops a cycle and SM.
const GROUP_COLUMNS: u64 = 2;
const TRY_WAIT: u32 = 30;
const PARAM: Cost = cost(1, 8);
/// From the branch to what follows it.
const BRANCH: u64 = 5;
/// From the last warp's arrival to what follows.
const BARRIER: u64 = 24;
/// How much longer a predicate is on its way to a branch, or to the guard of another instruction, than to a selection.
const GUARD: u64 = 9;

impl Cost {
    /// Of the instruction `op`, which is written `opcode`.
    pub(super) fn of(opcode: &str, op: &Op) -> Cost {
        let is_64 = opcode.ends_with("64") && !opcode.starts_with("cvt");
        match op {
            Op::Unary(..) | Op::Binary(..) | Op::Ternary(..) => Cost::of_arithmetic(opcode, is_64),
            Op::Compare(..) => {
                if is_64 {
                    WIDE
                } else {
                    ALU
                }
            }
            Op::Logic(..) | Op::Not(..) => ALU,
            Op::Select { .. } => {
                if is_64 {
                    cost(2, 4)
                } else {
                    ALU
                }
            }
            // Registers side by side are one value.
            Op::Unpack { bits: 32, .. } | Op::Pack { bits: 32, .. } | Op::Constant(..) | Op::GroupFence | Op::Fence => {
                cost(0, 0)
            }
            Op::Unpack { .. } | Op::Pack { .. } => ALU,
            Op::Special(..) => cost(1, 12),
            Op::Param { .. } => PARAM,
            Op::Load { from, .. } if from.space == Space::Shared => cost(1, SHARED),
            Op::Load { .. } | Op::Atomic { .. } => cost(1, L2),
            Op::LoadMatrices { .. } => cost(1, SHARED + 4),
            Op::Shuffle { .. } | Op::Union { .. } => cost(1, SHUFFLE),
            Op::Product { .. } => PRODUCT,
            Op::BarrierTry { .. } => cost(1, TRY_WAIT),
            Op::Store { .. }
            | Op::Branch(_)
            | Op::BranchIndex(..)
            | Op::Exit
            | Op::Trap
            | Op::Barrier { .. }
            | Op::WarpSync(_)
            | Op::GroupProduct { .. }
            | Op::GroupCommit
            | Op::GroupWait(_)
            | Op::BarrierInit { .. }
            | Op::BarrierArrive { .. }
            | Op::BulkCopy { .. }
            | Op::BulkPrefetch { .. }
            | Op::Copy { .. }
            | Op::CopyCommit
            | Op::CopyWait(_)
            | Op::Sleep(_) => cost(1, 0),
        }
    }

    fn of_arithmetic(opcode: &str, is_64: bool) -> Cost {
        let mut words = opcode.split('.');
        let verb = words.next().unwrap_or("");
        let is_f64 = opcode.ends_with("f64");
        match verb {
            "mov" | "cvta" => cost(0, 0),
            // To and from 64 bits, and to fewer bits, is another name for a register.
            "cvt" if !opcode.contains(".f") && !opcode.contains("bf16") => cost(0, 0),
            "cvt" if opcode.contains("bf16") => ALU,
            "cvt" => SPECIAL,
            "ex2" | "rsqrt" | "popc" | "clz" => SPECIAL,
            // Sequences: an approximation, its correction, and a test whether that holds.
            "rcp" if opcode.contains("approx") => SPECIAL,
            "rcp" | "sqrt" => cost(8, 50),
            "div" if opcode.ends_with("f32") => cost(10, 60),
            "div" | "rem" if is_64 => cost(60, 300),
            "div" | "rem" => cost(20, 90),
            _ if is_f64 => cost(2, 8),
            "mul" | "mad" if opcode.contains(".wide") => cost(1, 5),
            "mul" | "mad" if is_64 => cost(4, 13),
            "mul" | "mad" if !opcode.ends_with("f32") => cost(1, 5),
            "bfe" => cost(2, 8),
            "dp4a" => cost(2, 5),
            _ if is_64 => WIDE,
            _ => ALU,
        }
    }
}

/// The registers and predicates an instruction reads and writes.
#[derive(Clone, Debug, Default)]
struct Operands {
    reads: Vec<Slot>,
    reads_preds: Vec<Pred>,
    writes: Vec<Slot>,
    writes_preds: Vec<Pred>,
}

impl Operands {
    fn of(instruction: &Instruction) -> Operands {
        let mut all = Operands::default();
        all.reads_preds.extend(instruction.guard.map(|(_, pred)| pred));
        match &instruction.op {
            Op::Unary(_, d, a) => all.rows(&[*a], &[*d]),
            Op::Binary(_, d, ab) => all.rows(ab, &[*d]),
            Op::Ternary(_, d, abc) => all.rows(abc, &[*d]),
            Op::Compare(_, d, ab) => {
                all.reads.extend(ab);
                all.writes_preds.push(*d);
            }
            Op::Select { d, yes, no, when } => {
                all.rows(&[*yes, *no], &[*d]);
                all.reads_preds.push(*when);
            }
            Op::Logic(_, d, ab) => {
                all.reads_preds.extend(ab);
                all.writes_preds.push(*d);
            }
            Op::Not(d, a) => {
                all.reads_preds.push(*a);
                all.writes_preds.push(*d);
            }
            Op::Constant(d, _) => all.writes_preds.push(*d),
            Op::Unpack { d, from, .. } => {
                all.reads.push(*from);
                all.writes.extend(d.iter().flatten());
            }
            Op::Pack { d, from, .. } => all.rows(from, &[*d]),
            Op::Special(d, _) | Op::Param { d, .. } => all.writes.push(*d),
            Op::Load { d, from } => {
                all.reads.push(from.base);
                all.writes.extend(d.iter().flatten());
            }
            Op::Store { to, values } => {
                all.reads.push(to.base);
                all.reads.extend(values);
            }
            Op::Atomic { d, at, values, .. } => {
                all.reads.push(at.base);
                all.reads.extend(values);
                all.writes.extend(d);
            }
            Op::BranchIndex(index, _) => all.reads.push(*index),
            Op::Barrier { vote, .. } => {
                if let Some((d, vote, _)) = vote {
                    all.reads_preds.push(*vote);
                    all.writes_preds.push(*d);
                }
            }
            Op::Shuffle { d, value, by, members, .. } => all.rows(&[*value, *by, *members], &[*d]),
            Op::Union { d, value, members } => all.rows(&[*value, *members], &[*d]),
            Op::LoadMatrices { d, from } => all.rows(&[from.base], d),
            Op::Product { d, a, b, c, .. } => {
                all.rows(a, d);
                all.reads.extend(b.iter().chain(c));
            }
            Op::GroupProduct { d, a, b, .. } => {
                all.rows(a, d);
                all.reads.push(*b);
            }
            Op::BarrierInit { at, count } => all.reads.extend([at.base, *count]),
            Op::BarrierArrive { at, expect } => {
                all.reads.push(at.base);
                all.reads.extend(expect);
            }
            Op::BarrierTry { d, at, parity } => {
                all.reads.extend([at.base, *parity]);
                all.writes_preds.push(*d);
            }
            Op::BulkCopy { to, from, bytes, barrier, policy } => {
                all.reads.extend([to.base, from.base, *bytes, barrier.base]);
                all.reads.extend(policy);
            }
            Op::BulkPrefetch { from, bytes } => all.reads.extend([from.base, *bytes]),
            Op::Copy { to, from, there } => {
                all.reads.extend([to.base, from.base]);
                all.reads.extend(there);
            }
            Op::WarpSync(members) => all.reads.push(*members),
            Op::Branch(_)
            | Op::Exit
            | Op::Trap
            | Op::GroupFence
            | Op::GroupCommit
            | Op::GroupWait(_)
            | Op::Fence
            | Op::CopyCommit
            | Op::CopyWait(_)
            | Op::Sleep(_) => {}
        }
        all
    }

    fn rows(&mut self, reads: &[Slot], writes: &[Slot]) {
        self.reads.extend(reads);
        self.writes.extend(writes);
    }
}

/// A warp's, in cycles of its block.
#[derive(Clone, Debug)]
struct Clock {
    /// When registers' and predicates' values are there, and by which instruction.
    rows: Vec<(u64, Pc)>,
    preds: Vec<(u64, Pc)>,
    /// Of machine code: when all that uses a scoreboard has come, and what comes last.
    boards: [(u64, Pc); SCOREBOARDS],
    /// When the last branch or barrier had been passed.
    since: u64,
    /// The last issue after it, and how many there were.
    latest: u64,
    issues: u64,
    /// The last store's.
    stored: u64,
    /// When the last barrier had been passed, how many issues since, and how many accesses to shared memory.
    barrier: u64,
    issues_since: u64,
    accesses_since: u64,
    products_since: u64,
    /// When the tensor cores have made what it has asked for as part of a warpgroup, and each group of it that is under
    /// way.
    multiplied: u64,
    groups: VecDeque<u64>,
    /// Instructions since the last branch, with their accesses to shared memory, where machine code has another order.
    pending: Vec<(Pc, u64)>,
    /// What it has spent since on which instructions, and what before it looked first.
    spent: Vec<Spent>,
    spent_ahead: Vec<Spent>,
    /// It asks whether an mbarrier's phase is over, and it is not: what it does until then is waiting.
    waits: bool,
    /// Whether it has looked for what others write since the last barrier, and between that and the one before, and
    /// what it did until it looked last.
    looks: [bool; 2],
    ahead: u64,
}

/// Cycles that went by until an instruction had issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spent {
    pub(super) at: Pc,
    /// The one whose result it waited for; [`NOBODY`] if others had to issue before it.
    pub(super) by: Pc,
    pub(super) cycles: u64,
}

/// No instruction's place.
pub(super) const NOBODY: Pc = Pc::MAX;
/// Nor is this: the instruction itself was waited for.
pub(super) const CODE: Pc = Pc::MAX - 1;

/// What a block's warps did between two barriers.
#[derive(Debug)]
pub(super) struct Stretch {
    /// How long it took, see [`Pipeline::meet`].
    pub(super) cycles: u64,
    /// Whether warps looked for what others write, for the first time since the barrier before, and how long they took
    /// until then.
    pub(super) looks: bool,
    pub(super) ahead: u64,
    /// What the slowest warp spent them on, and what was ahead.
    pub(super) spent: Vec<Spent>,
    pub(super) spent_ahead: Vec<Spent>,
}

impl Clock {
    /// It goes on at `at`, and nothing before.
    fn pass(&mut self, at: u64) {
        (self.since, self.latest, self.issues) = (at, at, 0);
    }

    /// What it has done since the last barrier it did while others were waited for; it `counts` unless that was to look
    /// once more.
    fn put_aside(&mut self, counts: bool) {
        let now = self.now();
        self.ahead += if counts { now - self.barrier } else { 0 };
        (self.barrier, self.issues_since, self.accesses_since, self.products_since) = (now, 0, 0, 0);
        if counts {
            self.spent_ahead.append(&mut self.spent);
        }
        self.spent.clear();
    }

    /// When the last of what `operands` read is there, and by which instruction: of a tie, whatever.
    fn last_of(&self, operands: &Operands) -> (u64, Pc) {
        let rows = operands.reads.iter().map(|read| self.rows.get(*read as usize).copied().unwrap_or_default());
        let preds = operands.reads_preds.iter().map(|pred| self.preds[*pred as usize]);
        rows.chain(preds).fold((0, NOBODY), Ord::max)
    }

    /// What `operands` write is there from then on, by that instruction.
    fn make(&mut self, operands: &Operands, made: (u64, Pc)) {
        operands.writes.iter().for_each(|write| self.rows[*write as usize] = made);
        operands.writes_preds.iter().for_each(|write| self.preds[*write as usize] = made);
    }

    fn now(&self) -> u64 {
        self.latest.max(self.since + self.issues)
    }
}

/// The warps of a launch.
#[derive(Debug)]
pub(super) struct Pipeline {
    operands: Vec<Operands>,
    /// Where in the code each instruction is and, if that is machine code, what it is there.
    placed: Vec<Placed>,
    is_assembled: bool,
    /// Of machine code: how long each one's result takes, if that is for its readers to wait for; and how long it keeps
    /// the tensor cores.
    latencies: Vec<Option<u64>>,
    products: Vec<u64>,
    of_groups: Vec<OfGroup>,
    warps: Vec<Clock>,
    /// How many lines of code there are.
    pub(super) n_lines: usize,
    /// What each block has of them.
    code: Vec<CodeLines>,
}

/// What an instruction is among a warpgroup's products.
#[derive(Clone, Copy, Debug)]
enum OfGroup {
    Nothing,
    /// It keeps the tensor cores for so many cycles.
    Product(u64),
    Commit,
    Wait(u32),
}

impl OfGroup {
    fn of(op: &Op) -> OfGroup {
        match op {
            Op::GroupProduct { d, .. } => OfGroup::Product(2 * d.len() as u64 / GROUP_COLUMNS),
            Op::GroupCommit => OfGroup::Commit,
            Op::GroupWait(left) => OfGroup::Wait(*left),
            _ => OfGroup::Nothing,
        }
    }
}

/// Those of the scoreboards that `of` has the bits of.
fn boards(of: u8) -> impl Iterator<Item = usize> {
    (0..SCOREBOARDS).filter(move |board| of >> board & 1 == 1)
}

/// Warp schedulers of an SM.
const SCHEDULERS: usize = 4;

/// In which line of code each instruction of `code` is, and how many lines there are, if what issues has sixteen bytes
/// and all else none.
fn lines_of(code: &[Instruction]) -> (Vec<Placed>, usize) {
    let mut slots = 0;
    let placed = code.iter().map(|instruction| {
        let lines = vec![slots / LINE];
        slots += instruction.cost.issues;
        Placed { lines, ..Placed::default() }
    });
    let placed = placed.collect();
    (placed, slots.div_ceil(LINE) as usize)
}

/// What an SM holds of the code, and what it costs to fetch more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InstructionCache {
    /// KiB that are held: what was used last, at sixteen bytes an instruction.
    pub kib: usize,
    /// Cycles that a warp waits for each 128 bytes that are not.
    pub line_cycles: u64,
}

impl InstructionCache {
    /// All of the code is held.
    pub const ENDLESS: InstructionCache = InstructionCache { kib: usize::MAX / 1024, line_cycles: 0 };

    /// Two numbers that explain the traces of the first run on an H200 (`docs/cycles.md`); of caches behind this one it
    /// knows nothing.
    pub const H200: InstructionCache = InstructionCache { kib: 64, line_cycles: 50 };
}

/// The lines of code that a block's warps have used last.
#[derive(Clone, Debug)]
struct CodeLines {
    /// When each was used last, counted in uses, 0 if it is not held; and in which cycle it is there.
    lines: Vec<(u64, u64)>,
    /// Uses in their order, of which a line's last counts.
    order: VecDeque<(u32, u64)>,
    uses: u64,
    held: usize,
    cache: InstructionCache,
}

impl CodeLines {
    /// None yet, of so many.
    fn new(n_lines: usize, cache: InstructionCache) -> CodeLines {
        // An instruction that issues nothing may stand behind the last.
        CodeLines { lines: vec![(0, 0); n_lines + 1], order: VecDeque::new(), uses: 0, held: 0, cache }
    }

    /// When line `line` is there for a warp that wants it at `now`.
    fn fetch(&mut self, line: usize, now: u64) -> u64 {
        let (used, there) = self.lines[line];
        if used == self.uses && used > 0 {
            return there;
        }
        self.uses += 1;
        let there = if used == 0 { now + self.cache.line_cycles } else { there };
        self.held += usize::from(used == 0);
        self.lines[line] = (self.uses, there);
        self.order.push_back((line as u32, self.uses));
        while self.held > self.cache.kib * 1024 / (16 * LINE as usize) {
            let (line, used) = self.order.pop_front().expect("a line that is held has been used");
            if self.lines[line as usize].0 == used {
                self.lines[line as usize].0 = 0;
                self.held -= 1;
            }
        }
        there
    }
}

impl Pipeline {
    /// For `blocks` blocks of `warps` warps that run `code`, with so many registers and predicates.
    pub(super) fn new(
        code: &[Instruction],
        rows: u32,
        preds: u32,
        [blocks, warps]: [usize; 2],
        cache: InstructionCache,
        assembled: Option<&Assembled>,
    ) -> Pipeline {
        let clock = || Clock {
            rows: vec![(0, NOBODY); rows as usize],
            preds: vec![(0, NOBODY); preds as usize],
            boards: [(0, NOBODY); SCOREBOARDS],
            since: 0,
            latest: 0,
            issues: 0,
            stored: 0,
            barrier: 0,
            issues_since: 0,
            accesses_since: 0,
            products_since: 0,
            multiplied: 0,
            groups: VecDeque::new(),
            pending: Vec::new(),
            spent: Vec::new(),
            spent_ahead: Vec::new(),
            waits: false,
            looks: [false; 2],
            ahead: 0,
        };
        let (placed, n_lines) = assembled.map_or_else(
            || lines_of(code),
            |assembled| (place(code, assembled), assembled.instructions.len().div_ceil(LINE as usize)),
        );
        let latency = |one: &Instruction| {
            let is_waited_for = matches!(
                one.op,
                Op::Load { .. }
                    | Op::LoadMatrices { .. }
                    | Op::Atomic { .. }
                    | Op::Shuffle { .. }
                    | Op::Union { .. }
                    | Op::BarrierTry { .. }
            );
            (is_waited_for || one.cost == SPECIAL).then_some(u64::from(one.cost.latency))
        };
        Pipeline {
            placed,
            is_assembled: assembled.is_some(),
            latencies: code.iter().map(latency).collect(),
            products: code.iter().map(|one| u64::from(matches!(one.op, Op::Product { .. })) * KEEPS).collect(),
            of_groups: code.iter().map(|one| OfGroup::of(&one.op)).collect(),
            n_lines,
            operands: code.iter().map(Operands::of).collect(),
            warps: (0..blocks * warps).map(|_| clock()).collect(),
            code: (0..blocks).map(|_| CodeLines::new(n_lines, cache)).collect(),
        }
    }

    /// In which lines of code the instruction at `pc` is.
    pub(super) fn lines_of(&self, pc: Pc) -> &[u32] {
        &self.placed[pc as usize].lines
    }

    /// With which line of the PTX each line of code begins.
    pub(super) fn first_of_lines(&self, code: &[Instruction]) -> Vec<u32> {
        let mut first = vec![0; self.n_lines];
        for (one, instruction) in self.placed.iter().zip(code) {
            for line in &one.lines {
                // What issues nothing may stand behind the last.
                if let Some(first) = first.get_mut(*line as usize)
                    && (*first == 0 || instruction.line < *first)
                {
                    *first = instruction.line;
                }
            }
        }
        // A line in the middle of an instruction is that one's.
        for line in 1..first.len() {
            if first[line] == 0 {
                first[line] = first[line - 1];
            }
        }
        first
    }

    /// Warp `number` has run the instruction at `pc`, in vain if `again`; `accesses` to shared memory were in it.
    pub(super) fn ran(&mut self, number: usize, pc: usize, instruction: &Instruction, accesses: u64, again: bool) {
        let clock = &mut self.warps[number];
        let is_try = matches!(instruction.op, Op::BarrierTry { .. });
        if is_try {
            clock.waits = again;
        }
        if clock.waits {
            return;
        }
        let is_sleep = matches!(instruction.op, Op::Sleep(_));
        if instruction.is_look || is_sleep {
            self.catch_up(number);
        }
        let clock = &mut self.warps[number];
        // What is read after what was looked for is there, too, as a rule: a residual beside the row.
        if instruction.is_look && clock.looks == [false; 2] {
            clock.put_aside(true);
        } else if is_sleep {
            clock.put_aside(clock.ahead == 0);
        }
        clock.looks[0] |= instruction.is_look;
        if !self.is_assembled {
            self.issue(number, pc as Pc, instruction, accesses);
            return;
        }
        clock.pending.push((pc as Pc, accesses));
        let ends_block = matches!(
            instruction.op,
            Op::Branch(_) | Op::BranchIndex(..) | Op::BarrierTry { .. } | Op::WarpSync(_) | Op::Exit
        );
        if ends_block {
            self.catch_up(number);
        }
    }

    /// Warp `number` has the code of the instruction at `pc`, once it is there.
    fn fetch(&mut self, number: usize, pc: Pc) {
        let block = number / (self.warps.len() / self.code.len());
        let clock = &mut self.warps[number];
        for line in &self.placed[pc as usize].lines {
            let wanted = clock.now();
            let there = self.code[block].fetch(*line as usize, wanted);
            if there > wanted {
                clock.pass(there);
                clock.spent.push(Spent { at: pc, by: CODE, cycles: there - wanted });
            }
        }
    }

    /// Warp `number` issues the instruction at `pc`, in whatever order operands allow.
    fn issue(&mut self, number: usize, pc: Pc, instruction: &Instruction, accesses: u64) {
        self.fetch(number, pc);
        let clock = &mut self.warps[number];
        let operands = &self.operands[pc as usize];
        let before = clock.now();
        let mut last = clock.last_of(operands).max((clock.since, NOBODY));
        if let Some((_, guard)) = instruction.guard {
            let (there, by) = clock.preds[guard as usize];
            last = last.max((there + GUARD, by));
        }
        let (mut at, by) = last;
        let is_store =
            matches!(instruction.op, Op::Store { .. } | Op::Atomic { .. } | Op::BarrierArrive { .. } | Op::Fence);
        if is_store || matches!(instruction.op, Op::Load { .. } | Op::LoadMatrices { .. }) {
            at = at.max(clock.stored);
        }
        let Cost { issues, latency } = instruction.cost;
        clock.issues += u64::from(issues);
        clock.issues_since += u64::from(issues);
        clock.accesses_since += accesses;
        let there = at + u64::from(latency) + accesses.saturating_sub(1);
        clock.make(operands, (there, pc));
        if issues > 0 {
            clock.latest = clock.latest.max(at);
        }
        if is_store {
            clock.stored = clock.stored.max(at + 1);
        }
        if matches!(instruction.op, Op::Branch(_) | Op::BranchIndex(..)) {
            let passed = clock.now().max(at)
                + if operands.reads_preds.is_empty() && operands.reads.is_empty() { 1 } else { BRANCH };
            clock.pass(passed);
        }
        let cycles = clock.now() - before;
        if cycles > 0 {
            let by = if at > before { by } else { NOBODY };
            clock.spent.push(Spent { at: pc, by, cycles });
        }
    }

    /// Warp `number` issues what is pending, in machine code's order, and after each instruction waits for as long as
    /// the assembler has it wait. What that does not know, loads, shuffles, special functions, their readers wait for.
    fn catch_up(&mut self, number: usize) {
        // Those that are nothing of their own follow what they read: they are other names of it.
        let mut made: BTreeMap<Slot, u32> = BTreeMap::new();
        let mut in_order = Vec::new();
        for (pc, accesses) in std::mem::take(&mut self.warps[number].pending) {
            let (one, operands) = (&self.placed[pc as usize], &self.operands[pc as usize]);
            let behind = || operands.reads.iter().filter_map(|read| made.get(read)).max().copied().unwrap_or(0);
            let last = if one.issues > 0 { one.last } else { behind() };
            made.extend(operands.writes.iter().map(|write| (*write, last)));
            in_order.push((last, pc, accesses));
        }
        in_order.sort_by_key(|(last, ..)| *last);
        for (_, pc, accesses) in in_order {
            self.fetch(number, pc);
            let (one, operands) = (&self.placed[pc as usize], &self.operands[pc as usize]);
            let clock = &mut self.warps[number];
            let (mut now, (last, by)) = (clock.now(), clock.last_of(operands));
            let of_boards = boards(one.waits).map(|board| clock.boards[board]);
            let (until, for_whom) = of_boards.fold((last, by), Ord::max);
            if one.issues > 0 && until > now {
                clock.spent.push(Spent { at: pc, by: for_whom, cycles: until - now });
                now = until;
            }
            let made = match self.latencies[pc as usize] {
                Some(latency) => (now.max(last) + latency + accesses.saturating_sub(1), pc),
                None if one.issues == 0 => (last, by),
                None => (0, NOBODY),
            };
            clock.make(operands, made);
            if self.latencies[pc as usize].is_some() {
                boards(one.uses).for_each(|board| clock.boards[board] = clock.boards[board].max(made));
            }
            if one.cycles > 0 {
                clock.spent.push(Spent { at: pc, by: pc, cycles: one.cycles });
            }
            match self.of_groups[pc as usize] {
                OfGroup::Nothing => {}
                OfGroup::Product(cycles) => clock.multiplied = clock.multiplied.max(now) + cycles,
                OfGroup::Commit => clock.groups.push_back(clock.multiplied),
                OfGroup::Wait(left) => {
                    while clock.groups.len() > left as usize {
                        let made = clock.groups.pop_front().unwrap_or(0);
                        if made > now {
                            clock.spent.push(Spent { at: pc, by: pc, cycles: made - now });
                            now = made;
                        }
                    }
                }
            }
            clock.issues_since += u64::from(one.issues);
            clock.accesses_since += accesses;
            clock.products_since += self.products[pc as usize];
            clock.pass(now + one.cycles);
        }
    }

    /// The `numbers` of warps of a block have come to a barrier; how long the slowest, or, if `is_wait`, the fastest
    /// took since its last one. Where some looked for what others write, they count alone, from then on.
    pub(super) fn meet(&mut self, numbers: &[usize], warps: usize, is_wait: bool) -> Stretch {
        numbers.iter().for_each(|number| self.catch_up(*number));
        let clocks = || numbers.iter().map(|number| (&self.warps[*number], *number));
        let now = clocks().map(|(clock, _)| clock.now()).max().unwrap_or(0);
        let looks = !is_wait && clocks().any(|(clock, _)| clock.looks == [true, false]);
        let counted: Vec<usize> =
            clocks().filter(|(clock, _)| !looks || clock.looks[0]).map(|(_, number)| number).collect();
        let took = counted.iter().map(|number| {
            let clock = &self.warps[*number];
            (clock.now() - clock.barrier + if is_wait { clock.ahead } else { 0 }, *number)
        });
        let took = if is_wait { took.min() } else { took.max() };
        let (took, slowest) = took.expect("somebody has come to the barrier");
        let (mut slots, mut products) = ([0; SCHEDULERS], [0; SCHEDULERS]);
        let mut accesses = 0;
        for number in &counted {
            let clock = &self.warps[*number];
            slots[number % warps % SCHEDULERS] += clock.issues_since;
            products[number % warps % SCHEDULERS] += clock.products_since;
            accesses += clock.accesses_since;
        }
        let busy = slots.into_iter().chain(products).max().unwrap_or(0).max(accesses);
        let took = if is_wait { took } else { took.max(busy) };
        let mut spent = std::mem::take(&mut self.warps[slowest].spent);
        // The barrier's own, and what other warps' instructions and banks took.
        let rest = took + BARRIER - spent.iter().map(|spent| spent.cycles).sum::<u64>();
        spent.push(Spent { at: NOBODY, by: NOBODY, cycles: rest });
        let ahead = if looks { self.warps[slowest].ahead } else { 0 };
        let spent_ahead = std::mem::take(&mut self.warps[slowest].spent_ahead);
        for number in numbers {
            let clock = &mut self.warps[*number];
            clock.pass(now + BARRIER);
            clock.barrier = now + BARRIER;
            (clock.issues_since, clock.accesses_since, clock.products_since, clock.ahead) = (0, 0, 0, 0);
            clock.looks = [false, clock.looks[0]];
            clock.spent.clear();
            clock.spent_ahead.clear();
        }
        Stretch { cycles: took + BARRIER, looks, ahead, spent, spent_ahead }
    }
}

/// How many times 128 bytes an access of a warp takes from shared memory: a bank gives one word of four bytes at a
/// time, words of 8 and 16 bytes go by half and quarter warps.
pub(super) fn shared_accesses(at: &Row, lanes: u32, access: &Access, values: usize) -> u64 {
    let bytes = u64::from(access.bytes) * values as u64;
    let group = (128 / bytes.max(4)) as usize;
    let mut accesses = 0;
    for first in (0..WARP).step_by(group) {
        let mut banks: [Vec<u64>; 32] = Default::default();
        for lane in lanes_of(lanes).filter(|lane| (first..first + group).contains(lane)) {
            for word in at[lane] / 4..(at[lane] + bytes).div_ceil(4) {
                let bank = &mut banks[(word % 32) as usize];
                if !bank.contains(&word) {
                    bank.push(word);
                }
            }
        }
        accesses += banks.iter().map(Vec::len).max().unwrap_or(0) as u64;
    }
    accesses
}
