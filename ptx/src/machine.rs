//! Blocks, warps and lanes, and who runs next.
//!
//! A warp's lanes are in parts: lanes at the same instruction. A part runs until it comes to another part's place,
//! where they become one, to a branch that parts its lanes, to where these meet again, to an instruction whose lanes
//! are not all here, or to the end of its turn. Lanes that a branch has parted meet at its post-dominator, as on a
//! chip; of several parts the one that is furthest behind runs. Most of the time: a seed decides when it is otherwise,
//! and all the rest. What is for aligned lanes must not lie between the branch that has parted them and where they meet
//! again.

use super::assembled::Assembled;
use super::decode::{
    Access, Atomic, Entry, Instruction, Layout, Op, POLICY, Pc, Pred, RESERVED, Shuffle, Slot, Space, Special,
};
use super::matrix::Groups;
use super::pipeline::{CODE, InstructionCache, NOBODY, Pipeline, Spent, Stretch, shared_accesses};
use super::rows::Row;
use super::{Memory, PtxError};
use bytemuck::Pod;
use memmap2::MmapMut;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Lanes of a warp.
pub(super) const WARP: usize = 32;
/// All of them.
pub(super) const ALL: u32 = u32::MAX;

/// Words that a kernel writes to say what its blocks are at; what they do is counted then.
#[derive(Clone, Copy, Debug)]
pub struct Marks<'a> {
    /// Address of the first.
    pub first: u64,
    /// How many there are.
    pub n: u32,
    /// What an SM holds of the code.
    pub cache: InstructionCache,
    /// The entry's machine code, if that is to be counted.
    pub assembled: Option<&'a Assembled>,
}

/// A launch.
#[derive(Clone, Debug)]
pub struct Launch<'a> {
    /// The entry's name.
    pub entry: &'a str,
    /// Blocks, all of them resident.
    pub blocks: u32,
    /// Threads of each, a multiple of 32.
    pub threads: u32,
    /// Dynamic shared memory of each.
    pub shared_bytes: u32,
    /// The bytes of every parameter.
    pub params: &'a [&'a [u8]],
    /// Seed of the schedule.
    pub seed: u64,
    /// Of how many turns one is that of a part which is not the furthest behind: how far lanes stray from each other.
    pub stray: u64,
    /// What the clock says at first.
    pub began_ns: u64,
    /// Words that the kernel writes to say what its blocks are at, see [`Report::phases`]: address and number. With
    /// none, nothing is counted.
    pub marks: Option<Marks<'a>>,
    /// Instructions of warps after which it is given up; `u64::MAX`: never.
    pub most_instructions: u64,
}

impl Default for Launch<'_> {
    /// One block of a warp, of no entry and without parameters, which may take as long as it likes; lanes stray now and
    /// then.
    fn default() -> Self {
        Launch {
            entry: "",
            blocks: 1,
            threads: WARP as u32,
            shared_bytes: 0,
            params: &[],
            seed: 0,
            stray: 8,
            began_ns: 0,
            marks: None,
            most_instructions: u64::MAX,
        }
    }
}

/// What a launch did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Instructions that warps, or parts of them, ran.
    pub instructions: u64,
    /// Those of tensor cores: by a warp, and by a warpgroup's warps.
    pub products: [u64; 2],
    /// Bulk copies.
    pub copies: u64,
    /// What the clock says at the end.
    pub ended_ns: u64,
    /// For each value that a block wrote to one of [`Launch::marks`]: the issue slots that each of its warps took until
    /// it wrote another, of all blocks together; of a block that writes it again those of the last time.
    pub phases: BTreeMap<u32, Vec<u64>>,
    /// Likewise, how many cycles it took, see `pipeline.rs`: from one barrier 0 to the next those of the slowest warp;
    /// and, apart, what the fastest did before one that votes, until which some warp asks again and again for what
    /// others do, or a warp before it looked for what others write.
    pub cycles: BTreeMap<u32, [u64; 2]>,
    /// Likewise, where the first of these cycles went: until the instruction of the first line could issue, waiting for
    /// what that of the second makes; 0 for the second where it waited for its turn, and for both at barriers.
    pub spent: BTreeMap<u32, BTreeMap<(u32, u32), u64>>,
    /// Likewise of those that were ahead.
    pub spent_ahead: BTreeMap<u32, BTreeMap<(u32, u32), u64>>,
    /// Likewise, which lines of the entry's code ran, 128 bytes each (see `pipeline.rs`): bit `i % 64` of word `i / 64`
    /// is that of the `i`th.
    pub code: BTreeMap<u32, Vec<u64>>,
    /// With which line of the PTX each line of code begins, where anything is counted.
    pub code_lines: Vec<u32>,
}

/// Runs `launch` of `entry`.
pub(super) fn run(
    entry: &Entry,
    layout: &Layout,
    launch: &Launch<'_>,
    memory: &Memory,
    host: &mut dyn FnMut(),
) -> Result<Report, PtxError> {
    let refuse = |what: String| Err(PtxError::Launch { entry: entry.name.clone(), what });
    let most = entry.most_threads.unwrap_or(1024);
    if launch.threads == 0 || launch.threads > most || !launch.threads.is_multiple_of(WARP as u32) {
        return refuse(format!("{} threads a block; a multiple of {WARP} up to {most} may be", launch.threads));
    }
    let given: Vec<usize> = launch.params.iter().map(|param| param.len()).collect();
    let expected: Vec<usize> = entry.params.iter().map(|(_, bytes)| *bytes as usize).collect();
    if given != expected {
        return refuse(format!("parameters of {given:?} bytes, expected {expected:?}"));
    }
    let mut params = vec![0; entry.params.last().map_or(0, |(at, bytes)| at + bytes) as usize];
    for ((at, bytes), param) in entry.params.iter().zip(launch.params) {
        params[*at as usize..][..*bytes as usize].copy_from_slice(param);
    }
    let warps = launch.threads as usize / WARP;
    let block = |_| {
        Ok(Block {
            // Whoever reads what nobody wrote reads NaNs.
            shared: vec![0xff; (layout.shared_bytes + launch.shared_bytes) as usize],
            phases: BTreeMap::new(),
            named: Default::default(),
            warps: (0..warps).map(|_| Warp::new(entry)).collect::<std::io::Result<_>>()?,
        })
    };
    let blocks: std::io::Result<Vec<Block>> = (0..launch.blocks).map(block).collect();
    let blocks = match blocks {
        Ok(blocks) => blocks,
        Err(error) => return refuse(format!("no memory for the registers of {} blocks: {error}", launch.blocks)),
    };
    let mut machine = Machine {
        entry,
        layout,
        launch,
        memory,
        params,
        blocks,
        ready: (0..launch.blocks as usize * warps).collect(),
        asleep: Vec::new(),
        copies: VecDeque::new(),
        warps,
        marks: vec![0; launch.blocks as usize],
        marked: vec![BTreeSet::new(); launch.blocks as usize],
        issues: 0,
        before: (0..launch.blocks).map(|_| None).collect(),
        pipeline: launch.marks.map(|Marks { cache, assembled, .. }| {
            Pipeline::new(&entry.code, entry.rows, entry.preds, [launch.blocks as usize, warps], cache, assembled)
        }),
        turn: 0,
        changed: 0,
        leapt_ns: 0,
        random: launch.seed ^ 0x9e37_79b9_7f4a_7c15,
        report: Report::default(),
    };
    machine.run(host)?;
    for (mark, stretch) in std::mem::take(&mut machine.before).into_iter().flatten() {
        machine.spend(mark, &stretch);
    }
    machine.report.ended_ns = machine.now_ns();
    if let Some(pipeline) = &machine.pipeline {
        machine.report.code_lines = pipeline.first_of_lines(&entry.code);
    }
    Ok(machine.report)
}

/// Why a part does not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ready,
    /// Not all lanes that its instruction names are here.
    Meeting,
    /// Not all lanes that a branch has parted are here, where they meet again.
    Joining,
    /// It waits at a named barrier of the block.
    AtBarrier(u32),
    Asleep(u64),
}

/// Lanes at the same instruction.
#[derive(Clone, Debug)]
struct Part {
    pc: Pc,
    lanes: u32,
    state: State,
    /// Where it waits for others, and who all of them are: a branch's lanes, the innermost last.
    joins: Vec<(Pc, u32)>,
}

impl Part {
    /// It goes on from where lanes meet again, if all of those of `alive` are here; else it waits.
    fn join(&mut self, alive: u32) {
        self.state = State::Ready;
        while let Some((_, lanes)) = self.joins.pop_if(|(pc, _)| *pc == self.pc) {
            if lanes & alive & !self.lanes != 0 {
                self.joins.push((self.pc, lanes));
                self.state = State::Joining;
                return;
            }
        }
    }
}

/// A copy of sixteen bytes that a lane has asked for, of which the first `there` are read and the others zero.
#[derive(Clone, Copy, Debug)]
struct LaneCopy {
    lane: usize,
    group: u64,
    to: u64,
    from: u64,
    bytes: u32,
    there: u32,
}

#[derive(Debug)]
pub(super) struct Warp {
    /// [`Row`]s of every register in turn, in pages of their own: those nobody uses take no memory.
    rows: MmapMut,
    preds: Vec<u32>,
    parts: Vec<Part>,
    copies: Vec<LaneCopy>,
    /// Groups of copies that each lane has closed.
    closed: [u64; WARP],
    pub(super) groups: Groups,
    /// Instructions since it last asked for something and gave up its turn.
    busy: u64,
}

impl Warp {
    /// # Errors
    /// The system's, if it gives no memory.
    fn new(entry: &Entry) -> std::io::Result<Warp> {
        Ok(Warp {
            rows: MmapMut::map_anon((entry.rows as usize).max(1) * size_of::<Row>())?,
            preds: vec![0; entry.preds as usize],
            parts: vec![Part { pc: 0, lanes: ALL, state: State::Ready, joins: Vec::new() }],
            busy: 0,
            copies: Vec::new(),
            closed: [0; WARP],
            groups: Groups::default(),
        })
    }

    fn lanes(&self) -> u32 {
        self.parts.iter().fold(0, |lanes, part| lanes | part.lanes)
    }

    pub(super) fn row<'a>(&'a self, entry: &'a Entry, slot: Slot) -> &'a Row {
        let registers: &[Row] = bytemuck::cast_slice(&self.rows);
        registers[..entry.rows as usize]
            .get(slot as usize)
            .unwrap_or_else(|| &entry.constants[(slot - entry.rows) as usize])
    }

    pub(super) fn set(&mut self, slot: Slot, lanes: u32, value: &Row) {
        let rows: &mut [Row] = bytemuck::cast_slice_mut(&mut self.rows);
        let row = &mut rows[slot as usize];
        if lanes == ALL {
            *row = *value;
            return;
        }
        for lane in lanes_of(lanes) {
            row[lane] = value[lane];
        }
    }

    fn set_pred(&mut self, pred: u32, lanes: u32, value: u32) {
        let old = &mut self.preds[pred as usize];
        *old = *old & !lanes | value & lanes;
    }

    /// Parts at the same instruction become one: those that meet there, and those that wait for the same.
    fn merge(&mut self) {
        let alive = self.lanes();
        let mut at = 0;
        while at < self.parts.len() {
            let part = &self.parts[at];
            let is_open = |part: &Part| matches!(part.state, State::Ready | State::Meeting | State::Joining);
            let other = (at + 1..self.parts.len()).find(|other| {
                let other = &self.parts[*other];
                let same = other.joins == part.joins || other.state == State::Meeting || part.state == State::Meeting;
                other.pc == part.pc && is_open(other) && is_open(part) && same
            });
            match other {
                Some(other) => {
                    let other = self.parts.swap_remove(other);
                    let part = &mut self.parts[at];
                    part.lanes |= other.lanes;
                    let common = part.joins.iter().zip(&other.joins).take_while(|(a, b)| a == b).count();
                    part.joins.truncate(common);
                    part.join(alive);
                }
                None => at += 1,
            }
        }
        // Those they wait for may have ended.
        for part in self.parts.iter_mut().filter(|part| part.state == State::Joining) {
            part.join(alive);
        }
    }
}

/// The numbers of the lanes in a mask.
pub(super) fn lanes_of(mut lanes: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lane = lanes.trailing_zeros();
        lanes &= lanes.wrapping_sub(1);
        (lane < 32).then_some(lane as usize)
    })
}

/// An mbarrier.
#[derive(Clone, Copy, Debug)]
struct Phase {
    /// Arrivals of every phase, and those that this one still waits for.
    count: u32,
    pending: u32,
    /// Bytes that are to come less those that have.
    bytes: i64,
    /// Phases that are over.
    over: u64,
}

impl Phase {
    /// It is over if all have come.
    fn settle(&mut self) {
        if self.pending == 0 && self.bytes == 0 {
            self.over += 1;
            self.pending = self.count;
        }
    }
}

/// A barrier of the block, 0 to 15.
#[derive(Debug, Default)]
struct Named {
    expected: u32,
    arrived: u32,
    /// Lanes that voted for, and those that voted.
    votes: [u32; 2],
    waiting: Vec<usize>,
}

#[derive(Debug)]
pub(super) struct Block {
    pub(super) shared: Vec<u8>,
    phases: BTreeMap<u64, Phase>,
    named: [Named; 16],
    pub(super) warps: Vec<Warp>,
}

impl Block {
    /// Where `bytes` bytes at `at` of shared memory lie.
    pub(super) fn place(&self, at: u64, bytes: u32) -> Result<usize, String> {
        let end = at.checked_add(u64::from(bytes));
        if at < u64::from(RESERVED) || end.is_none_or(|end| end > self.shared.len() as u64) {
            return Err(format!("{bytes} bytes at {at} of shared memory, which has {}", self.shared.len()));
        }
        Ok(at as usize)
    }

    /// The barrier at `at`.
    fn phase(&mut self, at: u64) -> Result<&mut Phase, String> {
        self.phases.get_mut(&at).ok_or_else(|| format!("there is no mbarrier at {at} of shared memory"))
    }
}

/// A bulk copy under way.
#[derive(Debug)]
struct BulkCopy {
    due: u64,
    block: usize,
    to: u64,
    from: u64,
    bytes: u32,
    barrier: u64,
    /// Who asked.
    line: u32,
    warp: usize,
}

pub(super) struct Machine<'a> {
    pub(super) entry: &'a Entry,
    layout: &'a Layout,
    launch: &'a Launch<'a>,
    memory: &'a Memory,
    params: Vec<u8>,
    pub(super) blocks: Vec<Block>,
    /// Warps with a part that can run, and those of which all that could are asleep, with the time the first wakes.
    ready: Vec<usize>,
    asleep: Vec<(u64, usize)>,
    copies: VecDeque<BulkCopy>,
    /// Of a block.
    warps: usize,
    /// What each block wrote last to a mark.
    marks: Vec<u32>,
    /// All that it has written there.
    marked: Vec<BTreeSet<u32>>,
    /// Issue slots so far.
    issues: u64,
    /// Of each block, what it was at between the last two of its barriers 0, unless the second voted, and how that
    /// went.
    before: Vec<Option<(u32, Stretch)>>,
    /// If anything is counted.
    pipeline: Option<Pipeline>,
    turn: u64,
    /// The turn in which something was written, landed or met last, or somebody computed.
    changed: u64,
    leapt_ns: u64,
    random: u64,
    pub(super) report: Report,
}

/// What an instruction leads to.
enum Next {
    /// The next one.
    On,
    /// Another one.
    To(Pc),
    /// Lanes to places of their own.
    Spread(Vec<(u32, Pc)>),
    /// The same again, later.
    Wait(State),
    /// The next one, so many nanoseconds later.
    Sleep(u64),
    Exit,
}

/// Instructions of a part's turn at most.
const TURN: u64 = 192;
/// Turns until a bulk copy lands at most.
const FLIGHT: u64 = 256;
/// Turns of each warp in which nothing changes until time leaps, and how far in each turn then: everybody asks for
/// something, and what ends that is their patience.
const IDLE: u64 = 64;
/// Instructions after which a warp that has asked for nothing computes something: loops that poll ask far sooner.
const BUSY: u64 = 1000;
const LEAP_NS: u64 = 10_000;
/// How long a warp sleeps at most that has asked in vain whether a phase is over.
const NAP_NS: u64 = 32;

impl Machine<'_> {
    pub(super) fn random(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 16) % below
    }

    /// Every warp runs one instruction a nanosecond.
    fn now_ns(&self) -> u64 {
        let warps = (self.blocks.len() * self.warps).max(1) as u64;
        self.launch.began_ns + self.leapt_ns + self.report.instructions / warps
    }

    fn run(&mut self, host: &mut dyn FnMut()) -> Result<(), PtxError> {
        loop {
            host();
            self.turn += 1;
            if self.turn - self.changed > IDLE * (self.blocks.len() * self.warps) as u64 {
                self.leapt_ns += LEAP_NS;
            }
            while self.copies.iter().any(|copy| copy.due <= self.turn) {
                self.land()?;
            }
            if !self.asleep.is_empty() {
                let now = self.now_ns();
                let ready = &mut self.ready;
                self.asleep.retain(|(until, warp)| {
                    if *until <= now {
                        ready.push(*warp);
                    }
                    *until > now
                });
            }
            if self.ready.is_empty() {
                if !self.copies.is_empty() {
                    self.turn = self.copies.iter().map(|copy| copy.due).min().unwrap_or(self.turn);
                } else if let Some(first) = self.asleep.iter().map(|(until, _)| *until).min() {
                    self.leapt_ns += first - self.now_ns();
                } else if self.blocks.iter().all(|block| block.warps.iter().all(|warp| warp.parts.is_empty())) {
                    return Ok(());
                } else {
                    return Err(PtxError::Stuck(self.who_waits()));
                }
                continue;
            }
            if self.report.instructions > self.launch.most_instructions {
                return Err(PtxError::Stuck(format!(
                    "{} instructions, and no end; {}",
                    self.report.instructions,
                    self.who_waits()
                )));
            }
            let at = self.random(self.ready.len() as u64) as usize;
            let number = self.ready[at];
            if !self.take_turn(number)? {
                let at = self.ready.iter().position(|ready| *ready == number).expect("it was");
                self.ready.swap_remove(at);
            }
        }
    }

    /// Where everybody is.
    fn who_waits(&self) -> String {
        let mut places: BTreeMap<(u32, String), u32> = BTreeMap::new();
        for part in self.blocks.iter().flat_map(|block| &block.warps).flat_map(|warp| &warp.parts) {
            let line = self.entry.code.get(part.pc as usize).map_or(0, |instruction| instruction.line);
            let state = match part.state {
                State::Asleep(_) => "asleep".to_owned(),
                state => format!("{state:?}"),
            };
            *places.entry((line, state)).or_default() += part.lanes.count_ones();
        }
        let places = places.iter().map(|((line, state), lanes)| format!("{lanes} threads at line {line} ({state})"));
        places.collect::<Vec<_>>().join(", ")
    }

    /// The first copy that is due lands.
    fn land(&mut self) -> Result<(), PtxError> {
        let first = (0..self.copies.len()).min_by_key(|at| self.copies[*at].due).expect("there is one");
        let copy = self.copies.remove(first).expect("just found");
        self.changed = self.turn;
        let fault = |what| PtxError::Fault {
            line: copy.line,
            block: copy.block as u32,
            warp: copy.warp as u32,
            lanes: 0,
            what,
        };
        let memory = self.memory;
        let block = &mut self.blocks[copy.block];
        let at = block.place(copy.to, copy.bytes).map_err(fault)?;
        memory.read(copy.from, &mut block.shared[at..at + copy.bytes as usize]).map_err(fault)?;
        let phase = block.phase(copy.barrier).map_err(fault)?;
        phase.bytes -= i64::from(copy.bytes);
        phase.settle();
        Ok(())
    }

    /// Runs a part of warp `number`; whether it has one that can run still.
    fn take_turn(&mut self, number: usize) -> Result<bool, PtxError> {
        let (b, w) = (number / self.warps, number % self.warps);
        let now = self.now_ns();
        let (seldom, pick, turn) =
            (self.random(self.launch.stray.max(1)) == 0, self.random(32) as usize, 1 + self.random(TURN));
        let warp = &mut self.blocks[b].warps[w];
        let alive = warp.lanes();
        for part in &mut warp.parts {
            if matches!(part.state, State::Asleep(until) if until <= now) {
                part.join(alive);
            }
        }
        if warp.parts.len() > 1 {
            warp.merge();
        }
        // Who waits for others may have to go on for them to come: seldom, or when nobody else can.
        let is_stuck = !warp.parts.iter().any(|part| part.state == State::Ready);
        let can = |part: &Part| part.state == State::Ready || part.state == State::Joining && (seldom || is_stuck);
        let able = || (0..warp.parts.len()).filter(|at| can(&warp.parts[*at]));
        let chosen = match seldom {
            true => able().nth(pick % able().count().max(1)),
            false => able().min_by_key(|at| warp.parts[*at].pc),
        };
        let Some(at) = chosen else {
            return self.rest(number);
        };
        let mut part = warp.parts.swap_remove(at);
        if part.state == State::Joining {
            while part.joins.pop_if(|(pc, _)| *pc == part.pc).is_some() {}
            part.state = State::Ready;
        }
        self.run_part(b, w, part, turn)?;
        Ok(true)
    }

    /// What becomes of a warp without a part that can run: it sleeps, waits at a barrier, is gone, or can never go on.
    fn rest(&mut self, number: usize) -> Result<bool, PtxError> {
        let (b, w) = (number / self.warps, number % self.warps);
        let parts = &self.blocks[b].warps[w].parts;
        let wakes = parts.iter().filter_map(|part| match part.state {
            State::Asleep(until) => Some(until),
            _ => None,
        });
        if let Some(until) = wakes.min() {
            self.asleep.push((until, number));
        } else if parts.iter().any(|part| part.state == State::Meeting)
            && !parts.iter().any(|part| matches!(part.state, State::AtBarrier(_)))
        {
            let places = parts
                .iter()
                .map(|part| format!("lanes {:#010x} at line {}", part.lanes, self.entry.code[part.pc as usize].line));
            let what = format!("lanes that must meet do not: {}", places.collect::<Vec<_>>().join(", "));
            return Err(self.fault(b, w, &parts[0], what));
        }
        Ok(false)
    }

    fn fault(&self, block: usize, warp: usize, part: &Part, what: String) -> PtxError {
        PtxError::Fault {
            line: self.entry.code.get(part.pc as usize).map_or(0, |instruction| instruction.line),
            block: block as u32,
            warp: warp as u32,
            lanes: part.lanes,
            what,
        }
    }

    fn run_part(&mut self, b: usize, w: usize, part: Part, most: u64) -> Result<(), PtxError> {
        let (before, mark) = (self.issues, self.marks[b]);
        let ran = self.run_instructions(b, w, part, most);
        if self.pipeline.is_some() {
            let phase = self.report.phases.entry(mark).or_insert_with(|| vec![0; self.warps]);
            phase[w] += self.issues - before;
        }
        ran
    }

    fn run_instructions(&mut self, b: usize, w: usize, mut part: Part, most: u64) -> Result<(), PtxError> {
        let entry = self.entry;
        let is_alone = self.blocks[b].warps[w].parts.is_empty();
        let mut done = 0;
        let mark = self.marks[b];
        while done < most && self.marks[b] == mark {
            let Some(instruction) = entry.code.get(part.pc as usize) else {
                return Err(self.fault(b, w, &part, "runs beyond the entry's end".to_owned()));
            };
            if let Some((join, _)) = part.joins.last().filter(|(join, _)| *join != part.pc)
                && instruction.op.is_aligned()
            {
                // Lanes may come here one after the other and meet still: on a chip, nobody says that they do.
                let line = entry.code.get(*join as usize).map_or(0, |instruction| instruction.line);
                let what = format!("for aligned lanes, behind a branch that parts them until line {line}");
                return Err(self.fault(b, w, &part, what));
            }
            let next = match self.step(b, w, part.lanes, part.pc) {
                Ok(next) => next,
                Err(what) => return Err(self.fault(b, w, &part, what)),
            };
            self.report.instructions += 1;
            done += 1;
            let busy = &mut self.blocks[b].warps[w].busy;
            *busy = if matches!(next, Next::Sleep(_)) { 0 } else { *busy + 1 };
            if *busy > BUSY {
                self.changed = self.turn;
            }
            if self.pipeline.is_some() {
                self.count(b, w, part.lanes, part.pc, &next);
            }
            match next {
                Next::On => part.pc += 1,
                Next::To(pc) => part.pc = pc,
                Next::Spread(places) => {
                    part.joins.extend(instruction.join.map(|join| (join, part.lanes)));
                    let warp = &mut self.blocks[b].warps[w];
                    let alive = warp.lanes() | part.lanes;
                    warp.parts.extend(places.into_iter().map(|(lanes, pc)| {
                        let mut one = Part { pc, lanes, ..part.clone() };
                        one.join(alive);
                        one
                    }));
                    return Ok(());
                }
                Next::Wait(state) => {
                    part.state = state;
                    break;
                }
                Next::Sleep(ns) => {
                    // It joins others, if that is to be, when it wakes.
                    part.pc += 1;
                    part.state = State::Asleep(self.now_ns() + ns);
                    break;
                }
                Next::Exit => return Ok(()),
            }
            if part.joins.last().is_some_and(|(pc, _)| *pc == part.pc) {
                let alive = self.blocks[b].warps[w].lanes() | part.lanes;
                part.join(alive);
                if part.state == State::Joining {
                    break;
                }
            }
            // Where another part is, the two may become one.
            if !is_alone && self.blocks[b].warps[w].parts.iter().any(|other| other.pc == part.pc) {
                break;
            }
        }
        self.blocks[b].warps[w].parts.push(part);
        Ok(())
    }

    /// Warp `w` has run an instruction, and what it led to.
    fn count(&mut self, b: usize, w: usize, lanes: u32, pc: Pc, next: &Next) {
        let instruction = &self.entry.code[pc as usize];
        // Who waits for other lanes comes again; barriers count when all have come.
        if matches!(next, Next::Wait(_)) || matches!(instruction.op, Op::Barrier { .. }) {
            return;
        }
        self.issues += u64::from(instruction.cost.issues);
        let access = match &instruction.op {
            Op::Load { d, from } => Some((from, d.len())),
            Op::Store { to, values } => Some((to, values.len())),
            // Each lane has the address of a row of sixteen bytes.
            Op::LoadMatrices { from, .. } => Some((from, 1)),
            _ => None,
        };
        let accesses = access.filter(|(access, _)| access.space == Space::Shared).map_or(0, |(access, values)| {
            let lanes = self.guarded(b, w, lanes, instruction);
            shared_accesses(&self.addresses(b, w, access), lanes, access, values)
        });
        let again = matches!((&instruction.op, next), (Op::BarrierTry { .. }, Next::Sleep(_)));
        if let Some(pipeline) = &mut self.pipeline {
            let code = self.report.code.entry(self.marks[b]).or_insert_with(|| vec![0; pipeline.n_lines / 64 + 1]);
            for line in pipeline.lines_of(pc) {
                code[*line as usize / 64] |= 1 << (line % 64);
            }
            pipeline.ran(b * self.warps + w, pc as usize, instruction, accesses, again);
        }
    }

    /// A block that was at `mark` has come to a barrier.
    fn spend(&mut self, mark: u32, stretch: &Stretch) {
        self.report.cycles.entry(mark).or_default()[0] += stretch.cycles;
        stretch.spent.iter().for_each(|spent| self.spend_on(mark, false, spent));
    }

    /// Likewise, of one instruction, ahead or not.
    fn spend_on(&mut self, mark: u32, is_ahead: bool, spent: &Spent) {
        let line = |pc: Pc| match pc {
            NOBODY => 0,
            CODE => u32::MAX,
            pc => self.entry.code[pc as usize].line,
        };
        let lines = if is_ahead { &mut self.report.spent_ahead } else { &mut self.report.spent };
        *lines.entry(mark).or_default().entry((line(spent.at), line(spent.by))).or_default() += spent.cycles;
    }

    /// Those of the lanes that an instruction's guard lets run it.
    fn guarded(&self, b: usize, w: usize, lanes: u32, instruction: &Instruction) -> u32 {
        instruction.guard.map_or(lanes, |(is, pred)| {
            let holds = self.blocks[b].warps[w].preds[pred as usize];
            lanes & if is { holds } else { !holds }
        })
    }

    /// All `lanes` of a part run `instruction`.
    #[inline]
    fn step(&mut self, b: usize, w: usize, part: u32, pc: Pc) -> Result<Next, String> {
        let entry = self.entry;
        let instruction = &entry.code[pc as usize];
        let lanes = self.guarded(b, w, part, instruction);
        if lanes == 0 {
            return Ok(Next::On);
        }
        let warp = &mut self.blocks[b].warps[w];
        let mut d = [0; WARP];
        match &instruction.op {
            Op::Unary(f, to, a) => {
                f(&mut d, warp.row(entry, *a));
                warp.set(*to, lanes, &d);
            }
            Op::Binary(f, to, [x, y]) => {
                f(&mut d, warp.row(entry, *x), warp.row(entry, *y));
                warp.set(*to, lanes, &d);
            }
            Op::Ternary(f, to, [x, y, z]) => {
                f(&mut d, warp.row(entry, *x), warp.row(entry, *y), warp.row(entry, *z));
                warp.set(*to, lanes, &d);
            }
            Op::Compare(f, to, [x, y]) => {
                let holds = f(warp.row(entry, *x), warp.row(entry, *y));
                warp.set_pred(*to, lanes, holds);
            }
            Op::Select { d: to, yes, no, when } => {
                let (yes, no, when) = (warp.row(entry, *yes), warp.row(entry, *no), warp.preds[*when as usize]);
                for lane in 0..WARP {
                    d[lane] = if when >> lane & 1 == 1 { yes[lane] } else { no[lane] };
                }
                warp.set(*to, lanes, &d);
            }
            Op::Logic(f, to, [x, y]) => {
                let value = f(warp.preds[*x as usize], warp.preds[*y as usize]);
                warp.set_pred(*to, lanes, value);
            }
            Op::Not(to, a) => {
                let value = !warp.preds[*a as usize];
                warp.set_pred(*to, lanes, value);
            }
            Op::Constant(to, value) => warp.set_pred(*to, lanes, if *value { ALL } else { 0 }),
            Op::Unpack { d: parts, from, bits } => {
                let from = *warp.row(entry, *from);
                for (at, to) in parts.iter().enumerate() {
                    let Some(to) = to else { continue };
                    let value = from.map(|value| value >> (at as u32 * bits) & (u64::MAX >> (64 - bits)));
                    warp.set(*to, lanes, &value);
                }
            }
            Op::Pack { d: to, from, bits } => {
                for (at, from) in from.iter().enumerate() {
                    let from = warp.row(entry, *from);
                    for lane in 0..WARP {
                        d[lane] |= from[lane] << (at as u32 * bits);
                    }
                }
                warp.set(*to, lanes, &d);
            }
            Op::Special(to, special) => {
                let now_ns = self.now_ns();
                for lane in 0..WARP {
                    d[lane] = match special {
                        Special::Thread => (w * WARP + lane) as u64,
                        Special::Threads => u64::from(self.launch.threads),
                        Special::Block => b as u64,
                        Special::Blocks => u64::from(self.launch.blocks),
                        Special::Lane => lane as u64,
                        Special::TimerNs | Special::Clock => now_ns,
                    };
                }
                self.blocks[b].warps[w].set(*to, lanes, &d);
            }
            Op::Param { d: to, at, bytes } => {
                let Some(bytes) = self.params.get(*at as usize..(at + bytes) as usize) else {
                    return Err("reads beyond the parameters".to_owned());
                };
                let mut value = [0; 8];
                value[..bytes.len()].copy_from_slice(bytes);
                warp.set(*to, lanes, &[u64::from_le_bytes(value); WARP]);
            }
            Op::Branch(to) if lanes == part => return Ok(Next::To(*to)),
            Op::Branch(to) => return Ok(Next::Spread(vec![(lanes, *to), (part & !lanes, pc + 1)])),
            Op::BranchIndex(index, targets) => {
                let index = *warp.row(entry, *index);
                let mut places: Vec<(u32, Pc)> = Vec::new();
                for lane in lanes_of(lanes) {
                    let target = targets.get(index[lane] as usize);
                    let pc = *target.ok_or_else(|| format!("branch {} of {}", index[lane], targets.len()))?;
                    match places.iter_mut().find(|(_, other)| *other == pc) {
                        Some((lanes, _)) => *lanes |= 1 << lane,
                        None => places.push((1 << lane, pc)),
                    }
                }
                return Ok(match places[..] {
                    [(_, pc)] => Next::To(pc),
                    _ => Next::Spread(places),
                });
            }
            Op::Exit if lanes == part => return Ok(Next::Exit),
            Op::Exit | Op::Barrier { .. } if lanes != part => return Err("for some lanes only".to_owned()),
            Op::Trap => return Err("trap: a check of the kernel's own has failed".to_owned()),
            Op::Load { d: to, from } => self.load(b, w, lanes, to, from)?,
            Op::Store { to, values } => self.store(b, w, lanes, to, values)?,
            Op::Atomic { d: to, at, atomic, values } => self.atomic(b, w, lanes, (*to, at, *atomic), values)?,
            Op::WarpSync(members) => {
                if let Some(wait) = meet(warp, part, named(warp.row(entry, *members), lanes)?)? {
                    return Ok(wait);
                }
            }
            Op::Shuffle { how, d: to, value, by, clamp, members } => {
                if let Some(wait) = meet(warp, part, named(warp.row(entry, *members), lanes)?)? {
                    return Ok(wait);
                }
                let (value, by) = (warp.row(entry, *value), warp.row(entry, *by));
                if warp.row(entry, *clamp)[0] != if *how == Shuffle::Up { 0 } else { 31 } {
                    return Err("a shuffle within less than the warp is not understood".to_owned());
                }
                for lane in lanes_of(lanes) {
                    let by = by[lane] as usize & 31;
                    let from = match how {
                        Shuffle::Xor => Some(lane ^ by),
                        Shuffle::Index => Some(by),
                        Shuffle::Up => lane.checked_sub(by),
                        Shuffle::Down => Some(lane + by),
                    };
                    let from = from.filter(|from| *from < WARP).unwrap_or(lane);
                    if lanes >> from & 1 == 0 {
                        return Err(format!("lane {lane} wants the word of lane {from}, which is not here"));
                    }
                    d[lane] = value[from];
                }
                warp.set(*to, lanes, &d);
            }
            Op::Union { d: to, value, members } => {
                if let Some(wait) = meet(warp, part, named(warp.row(entry, *members), lanes)?)? {
                    return Ok(wait);
                }
                let value = warp.row(entry, *value);
                let all = lanes_of(lanes).fold(0, |all, lane| all | value[lane]);
                lanes_of(lanes).for_each(|lane| d[lane] = all);
                warp.set(*to, lanes, &d);
            }
            Op::Barrier { id, threads, vote } => {
                let alive = warp.lanes() | part;
                if let Some(wait) = meet(warp, part, alive)? {
                    return Ok(wait);
                }
                let (id, threads) = (warp.row(entry, *id)[0] as u32, warp.row(entry, *threads)[0] as u32);
                return self.arrive(b, w, lanes, id, threads, *vote);
            }
            Op::LoadMatrices { .. }
            | Op::Product { .. }
            | Op::GroupProduct { .. }
            | Op::GroupFence
            | Op::GroupCommit
            | Op::GroupWait(_) => {
                if let Some(wait) = meet(warp, part, ALL)? {
                    return Ok(wait);
                }
                return self.matrices(b, w, &instruction.op).map(|()| Next::On);
            }
            Op::Fence => {}
            Op::BarrierInit { at, count } => {
                let (at, count) = (self.addresses(b, w, at), *self.blocks[b].warps[w].row(entry, *count));
                for lane in lanes_of(lanes) {
                    let count = count[lane] as u32;
                    if count == 0 || count >= 1 << 20 {
                        return Err(format!("an mbarrier of {count} arrivals"));
                    }
                    self.blocks[b].place(at[lane], 8)?;
                    let phase = Phase { count, pending: count, bytes: 0, over: 0 };
                    self.blocks[b].phases.insert(at[lane], phase);
                }
            }
            Op::BarrierArrive { at, expect } => {
                let at = self.addresses(b, w, at);
                let expect = expect.map(|expect| *self.blocks[b].warps[w].row(entry, expect));
                for lane in lanes_of(lanes) {
                    let phase = self.blocks[b].phase(at[lane])?;
                    phase.bytes += expect.map_or(0, |bytes| bytes[lane] as i64);
                    if phase.bytes >= 1 << 20 {
                        return Err(format!("{} bytes expected in one phase; the barrier counts to 2^20", phase.bytes));
                    }
                    phase.pending = phase
                        .pending
                        .checked_sub(1)
                        .ok_or_else(|| format!("more than {} arrivals in one phase", phase.count))?;
                    phase.settle();
                }
            }
            Op::BarrierTry { d: to, at, parity } => {
                let (at, parity) = (self.addresses(b, w, at), *self.blocks[b].warps[w].row(entry, *parity));
                let mut over = 0;
                for lane in lanes_of(lanes) {
                    let phase = self.blocks[b].phase(at[lane])?;
                    over |= u32::from(phase.over & 1 != parity[lane] & 1) << lane;
                }
                self.blocks[b].warps[w].set_pred(*to, lanes, over);
                if over != lanes {
                    // As on a chip, who asks in vain is suspended for a little: those it waits for have the turns
                    // meanwhile.
                    return Ok(Next::Sleep(1 + self.random(NAP_NS)));
                }
            }
            Op::BulkCopy { to, from, bytes, barrier, policy } => {
                if let Some(policy) = policy {
                    let policies = self.blocks[b].warps[w].row(entry, *policy);
                    if lanes_of(lanes).any(|lane| policies[lane] != POLICY) {
                        return Err("a bulk copy by a policy that createpolicy has not made".to_owned());
                    }
                }
                let (to, from) = (self.addresses(b, w, to), self.addresses(b, w, from));
                let (bytes, barrier) = (*self.blocks[b].warps[w].row(entry, *bytes), self.addresses(b, w, barrier));
                for lane in lanes_of(lanes) {
                    let (to, from, bytes) = (to[lane], from[lane], bytes[lane] as u32);
                    if bytes == 0 || !(to | from | u64::from(bytes)).is_multiple_of(16) {
                        return Err(format!(
                            "a bulk copy of {bytes} bytes from {from:#x} to {to}: not all multiples of 16"
                        ));
                    }
                    self.blocks[b].place(to, bytes)?;
                    self.memory.check(from, u64::from(bytes))?;
                    let due = self.turn + 1 + self.random(FLIGHT);
                    let (barrier, line) = (barrier[lane], instruction.line);
                    self.report.copies += 1;
                    self.copies.push_back(BulkCopy { due, block: b, to, from, bytes, barrier, line, warp: w });
                }
            }
            Op::BulkPrefetch { from, bytes } => {
                let (from, bytes) = (self.addresses(b, w, from), *self.blocks[b].warps[w].row(entry, *bytes));
                for lane in lanes_of(lanes) {
                    if bytes[lane] == 0 || !(from[lane] | bytes[lane]).is_multiple_of(16) {
                        return Err(format!(
                            "a prefetch of {} bytes at {:#x}: not multiples of 16",
                            bytes[lane], from[lane]
                        ));
                    }
                    if bytes[lane] >= 1 << 20 {
                        let bytes = bytes[lane];
                        return Err(format!(
                            "a prefetch of {bytes} bytes; the instruction has room for fewer than 2^20"
                        ));
                    }
                    self.memory.check(from[lane], bytes[lane])?;
                }
            }
            Op::Copy { to, from, there } => {
                let bytes = to.bytes;
                let (to, from) = (self.addresses(b, w, to), self.addresses(b, w, from));
                let there = there.map(|there| *self.blocks[b].warps[w].row(entry, there));
                for lane in lanes_of(lanes) {
                    let (to, from) = (to[lane], from[lane]);
                    let there = there.map_or(bytes, |there| (there[lane] as u32).min(bytes));
                    if !(to | if there > 0 { from } else { 0 }).is_multiple_of(u64::from(bytes)) {
                        return Err(format!("a copy of {bytes} bytes from {from:#x} to {to}: not aligned"));
                    }
                    self.blocks[b].place(to, bytes)?;
                    let group = self.blocks[b].warps[w].closed[lane];
                    let copy = LaneCopy { lane, group, to, from, bytes, there };
                    if self.random(4) == 0 {
                        self.land_lane(b, &copy)?;
                    } else {
                        self.blocks[b].warps[w].copies.push(copy);
                    }
                }
            }
            Op::CopyCommit => lanes_of(lanes).for_each(|lane| warp.closed[lane] += 1),
            Op::CopyWait(left) => {
                let closed = warp.closed;
                let is_over =
                    |copy: &LaneCopy| lanes >> copy.lane & 1 == 1 && copy.group + u64::from(*left) < closed[copy.lane];
                let (over, rest): (Vec<_>, Vec<_>) = std::mem::take(&mut warp.copies).into_iter().partition(is_over);
                warp.copies = rest;
                for copy in over {
                    self.land_lane(b, &copy)?;
                }
            }
            Op::Sleep(ns) => {
                let ns = warp.row(entry, *ns)[lanes.trailing_zeros() as usize];
                return Ok(Next::Sleep(ns.max(1)));
            }
            Op::Exit => unreachable!("of all lanes or refused"),
        }
        Ok(Next::On)
    }

    fn land_lane(&mut self, b: usize, copy: &LaneCopy) -> Result<(), String> {
        let mut bytes = [0; 16];
        if copy.there > 0 {
            self.memory.read(copy.from, &mut bytes[..copy.there as usize])?;
        }
        let at = self.blocks[b].place(copy.to, copy.bytes)?;
        self.blocks[b].shared[at..at + copy.bytes as usize].copy_from_slice(&bytes[..copy.bytes as usize]);
        Ok(())
    }

    /// The address of every lane; only those of lanes that take part mean anything.
    pub(super) fn addresses(&self, b: usize, w: usize, access: &Access) -> Row {
        let base = self.blocks[b].warps[w].row(self.entry, access.base);
        base.map(|base| base.wrapping_add_signed(access.offset))
    }

    /// A value of memory. By its type, so that how many bytes are copied is known: this is most of what is done here.
    fn read<T: Pod>(&self, b: usize, space: Space, at: u64) -> Result<T, String> {
        if space == Space::Shared {
            let block = &self.blocks[b];
            let start = block.place(at, size_of::<T>() as u32)?;
            return Ok(bytemuck::pod_read_unaligned(&block.shared[start..start + size_of::<T>()]));
        }
        match self.layout.variable(at, size_of::<T>()) {
            Some(variable) => Ok(bytemuck::pod_read_unaligned(variable)),
            None => self.memory.value(at),
        }
    }

    /// Block `b` has written `mark`. What has been counted of an earlier time is forgotten, in which there was code to
    /// fetch, perhaps, that is held now.
    fn mark(&mut self, b: usize, mark: u32) {
        if std::mem::replace(&mut self.marks[b], mark) != mark && !self.marked[b].insert(mark) {
            self.report.phases.remove(&mark);
            self.report.cycles.remove(&mark);
            self.report.spent.remove(&mark);
            self.report.spent_ahead.remove(&mark);
        }
    }

    fn write(&mut self, b: usize, space: Space, at: u64, bytes: &[u8]) -> Result<(), String> {
        self.changed = self.turn;
        if space == Space::Global {
            let (first, n) = self.launch.marks.map_or((0, 0), |marks| (marks.first, marks.n));
            if at.wrapping_sub(first) < 4 * u64::from(n)
                && let Ok(word) = bytes.try_into()
            {
                self.mark(b, u32::from_le_bytes(word));
            }
            return self.memory.write(at, bytes);
        }
        let block = &mut self.blocks[b];
        let start = block.place(at, bytes.len() as u32)?;
        if let Some((other, _)) = block.phases.range(at.saturating_sub(7)..at + bytes.len() as u64).next() {
            return Err(format!("writes {} bytes at {at} over the mbarrier at {other}", bytes.len()));
        }
        block.shared[start..start + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn load(&mut self, b: usize, w: usize, lanes: u32, to: &[Option<Slot>], from: &Access) -> Result<(), String> {
        match (from.bytes, to.len()) {
            (1, 1) => self.load_values::<u8, 1>(b, w, lanes, to, from),
            (2, 1) => self.load_values::<u16, 1>(b, w, lanes, to, from),
            (4, 1) => self.load_values::<u32, 1>(b, w, lanes, to, from),
            (8, 1) => self.load_values::<u64, 1>(b, w, lanes, to, from),
            (2, 2) => self.load_values::<u16, 2>(b, w, lanes, to, from),
            (4, 2) => self.load_values::<u32, 2>(b, w, lanes, to, from),
            (8, 2) => self.load_values::<u64, 2>(b, w, lanes, to, from),
            (2, 4) => self.load_values::<u16, 4>(b, w, lanes, to, from),
            (4, 4) => self.load_values::<u32, 4>(b, w, lanes, to, from),
            (bytes, n) => Err(format!("a load of {n} values of {bytes} bytes is not understood")),
        }
    }

    /// Each lane loads `N` values.
    fn load_values<T: Pod + Into<u64>, const N: usize>(
        &mut self,
        b: usize,
        w: usize,
        lanes: u32,
        to: &[Option<Slot>],
        from: &Access,
    ) -> Result<(), String> {
        let at = self.addresses(b, w, from);
        let mut values = [[T::zeroed(); N]; WARP];
        for lane in lanes_of(lanes) {
            aligned(at[lane], size_of::<[T; N]>())?;
            values[lane] = self.read(b, from.space, at[lane])?;
        }
        let warp = &mut self.blocks[b].warps[w];
        for (n, to) in to.iter().enumerate() {
            let Some(to) = to else { continue };
            let mut row = [0; WARP];
            for lane in 0..WARP {
                row[lane] = values[lane][n].into();
            }
            if from.is_signed {
                row = row.map(|byte| u64::from(i16::from(byte as u8 as i8).cast_unsigned()));
            }
            warp.set(*to, lanes, &row);
        }
        Ok(())
    }

    fn store(&mut self, b: usize, w: usize, lanes: u32, to: &Access, values: &[Slot]) -> Result<(), String> {
        let at = self.addresses(b, w, to);
        let each = to.bytes as usize;
        let bytes = each * values.len();
        for lane in lanes_of(lanes) {
            aligned(at[lane], bytes)?;
            let mut value = [0; 16];
            for (n, from) in values.iter().enumerate() {
                let word = self.blocks[b].warps[w].row(self.entry, *from)[lane].to_le_bytes();
                value[n * each..][..each].copy_from_slice(&word[..each]);
            }
            self.write(b, to.space, at[lane], &value[..bytes])?;
        }
        Ok(())
    }

    fn atomic(
        &mut self,
        b: usize,
        w: usize,
        lanes: u32,
        (to, at, atomic): (Option<Slot>, &Access, Atomic),
        values: &[Slot],
    ) -> Result<(), String> {
        let addresses = self.addresses(b, w, at);
        let (bytes, mut before) = (at.bytes as usize, [0; WARP]);
        for lane in lanes_of(lanes) {
            if atomic == Atomic::AddFloats {
                aligned(addresses[lane], bytes * values.len())?;
                for (n, from) in values.iter().enumerate() {
                    let address = addresses[lane] + (bytes * n) as u64;
                    let before: f32 = self.read(b, at.space, address)?;
                    let value = f32::from_bits(self.blocks[b].warps[w].row(self.entry, *from)[lane] as u32);
                    self.write(b, at.space, address, &(before + value).to_le_bytes())?;
                }
                continue;
            }
            aligned(addresses[lane], bytes)?;
            before[lane] = match bytes {
                4 => u64::from(self.read::<u32>(b, at.space, addresses[lane])?),
                8 => self.read::<u64>(b, at.space, addresses[lane])?,
                bytes => return Err(format!("an atomic operation on {bytes} bytes")),
            };
            let warp = &self.blocks[b].warps[w];
            let value = |n: usize| warp.row(self.entry, values[n])[lane];
            let after = match atomic {
                Atomic::Add => before[lane].wrapping_add(value(0)),
                Atomic::CompareSwap if before[lane] == value(0) => value(1),
                Atomic::CompareSwap => before[lane],
                Atomic::Or => before[lane] | value(0),
                Atomic::AddFloats => unreachable!("done above"),
            };
            self.write(b, at.space, addresses[lane], &after.to_le_bytes()[..bytes])?;
        }
        if let Some(to) = to {
            self.blocks[b].warps[w].set(to, lanes, &before);
        }
        Ok(())
    }

    /// A warp has come to barrier `id`: where its vote goes, what it is, and whether all must be for it.
    fn arrive(
        &mut self,
        b: usize,
        w: usize,
        lanes: u32,
        id: u32,
        threads: u32,
        vote: Option<(Pred, Pred, bool)>,
    ) -> Result<Next, String> {
        let block = &mut self.blocks[b];
        let named = block.named.get_mut(id as usize).ok_or_else(|| format!("barrier {id}: there are 16"))?;
        if threads == 0 || !threads.is_multiple_of(WARP as u32) {
            return Err(format!("a barrier of {threads} threads, not of whole warps"));
        }
        if named.arrived > 0 && named.expected != threads {
            return Err(format!("barrier {id} of {threads} threads, which others take for one of {}", named.expected));
        }
        named.expected = threads;
        named.arrived += WARP as u32;
        if let Some((_, vote, _)) = vote {
            named.votes[0] += (block.warps[w].preds[vote as usize] & lanes).count_ones();
            named.votes[1] += lanes.count_ones();
        }
        if named.arrived > threads {
            return Err(format!("{} threads at barrier {id}, which is for {threads}", named.arrived));
        }
        if named.arrived < threads {
            named.waiting.push(w);
            return Ok(Next::Wait(State::AtBarrier(id)));
        }
        let Named { votes, waiting, .. } = std::mem::take(named);
        self.changed = self.turn;
        if let Some(pipeline) = &mut self.pipeline {
            let numbers: Vec<usize> = waiting.iter().chain([&w]).map(|w| b * self.warps + w).collect();
            let stretch = pipeline.meet(&numbers, self.warps, vote.is_some());
            if id == 0 {
                let mark = self.marks[b];
                match (vote.is_some(), self.before[b].take()) {
                    // What stands before a task's wait is done while others are waited for, and begins before the block
                    // says where it is.
                    (true, before) => {
                        let ahead = before.map_or(0, |(_, before)| before.cycles);
                        self.report.cycles.entry(mark).or_default()[1] += stretch.cycles + ahead;
                    }
                    (false, before) => {
                        if stretch.looks {
                            let ahead = before.as_ref().map_or(0, |(_, before)| before.cycles) + stretch.ahead;
                            self.report.cycles.entry(mark).or_default()[1] += ahead;
                            let before = before.map_or(Vec::new(), |(_, before)| before.spent);
                            for spent in before.iter().chain(&stretch.spent_ahead) {
                                self.spend_on(mark, true, spent);
                            }
                        } else if let Some((mark, before)) = before {
                            self.spend(mark, &before);
                        }
                        self.before[b] = Some((mark, stretch));
                    }
                }
            }
        }
        let (entry, block) = (self.entry, &mut self.blocks[b]);
        let settle = |warp: &mut Warp, lanes: u32, vote: Option<(Pred, Pred, bool)>| {
            if let Some((d, _, is_and)) = vote {
                let holds = if is_and { votes[0] == votes[1] } else { votes[0] > 0 };
                warp.set_pred(d, lanes, if holds { ALL } else { 0 });
            }
        };
        settle(&mut block.warps[w], lanes, vote);
        for other in waiting {
            let warp = &mut block.warps[other];
            let at = warp.parts.iter().position(|part| part.state == State::AtBarrier(id)).expect("it waits here");
            let Part { pc, lanes, .. } = warp.parts[at];
            if let Op::Barrier { vote, .. } = entry.code[pc as usize].op {
                settle(warp, lanes, vote);
            }
            let alive = warp.lanes();
            warp.parts[at].pc = pc + 1;
            warp.parts[at].join(alive);
            let number = b * self.warps + other;
            // Another part of that warp may have kept it among those that run.
            if !self.ready.contains(&number) {
                self.asleep.retain(|(_, asleep)| *asleep != number);
                self.ready.push(number);
            }
        }
        Ok(Next::On)
    }
}

/// Fails unless `bytes` bytes at `at` are aligned.
fn aligned(at: u64, bytes: usize) -> Result<(), String> {
    // A power of two: by the bits below it, since a division takes far longer.
    if at & (bytes as u64 - 1) == 0 { Ok(()) } else { Err(format!("{bytes} bytes at {at:#x}, which is not aligned")) }
}

/// The lanes that `members` names, the same in all of `lanes`.
fn named(members: &Row, lanes: u32) -> Result<u32, String> {
    let first = members[lanes.trailing_zeros() as usize] as u32;
    match lanes_of(lanes).find(|lane| members[*lane] as u32 != first) {
        Some(lane) => Err(format!("lane {lane} names lanes {:#x}, others {first:#x}", members[lane])),
        None => Ok(first),
    }
}

/// Waits until a part is all of `wanted`.
fn meet(warp: &Warp, part: u32, wanted: u32) -> Result<Option<Next>, String> {
    let gone = wanted & !(warp.lanes() | part);
    if gone != 0 {
        return Err(format!("lanes {gone:#010x}, which it names, have ended"));
    }
    if part & !wanted != 0 {
        return Err(format!("lanes {:#010x} are not among those it names", part & !wanted));
    }
    Ok((part != wanted).then_some(Next::Wait(State::Meeting)))
}
