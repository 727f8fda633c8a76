//! Judges a plan by running it: on threads with vector clocks, over memory whose every cell remembers who touched it
//! when, and what was written.
//!
//! 1. Of two accesses of a cell by different threads, one of them a write, one happens before the other.
//! 2. Copies count as writes from when they are begun until they are waited for: nobody touches their cells meanwhile,
//!    and who comes after has met who waited.
//! 3. What is read is what this block, and this round of the loop that loads it, has put there.
//!
//! Two warps of two threads stand for all. A cell is what one thread writes of a tile: of a Shared one each thread
//! copies its share and all read all of it, of an Own one each lane writes its share and its warp reads all of it.

use super::plan::{Act, Plan, Scope};
use super::*;
use std::collections::HashMap;

const THREADS: usize = 4;
const LANES: usize = 2;

/// Runs of a plan.
const RUNS: u32 = 90;

/// How often loops go round in run `run`, in turn, whichever comes next: digits of a hash.
fn rounds_of(run: u32) -> Vec<u32> {
    let digit = |at: u32| {
        let mut x = (run << 8 | at).wrapping_mul(0x9e37_79b9);
        x = (x ^ x >> 16).wrapping_mul(0x85eb_ca6b);
        [0, 0, 1, 1, 2, 3, 4, 7][(x >> 29) as usize]
    };
    // In the first few all loops are alike.
    if run < 8 { vec![run] } else { (0..29).map(digit).collect() }
}

/// Judges `plan`.
///
/// # Errors
/// The first access that breaks a rule.
pub fn judge(plan: &Plan) -> Result<(), String> {
    (0..RUNS).try_for_each(|run| {
        let mut run = Run {
            plan,
            clocks: [[0; THREADS]; THREADS],
            cells: HashMap::new(),
            begun: Vec::new(),
            rounds: rounds_of(run),
            next: 0,
            block: 0,
        };
        (0..THREADS).for_each(|thread| run.clocks[thread][thread] = 1);
        for block in 0..3 {
            run.block = block;
            run.acts(&plan.acts, &mut Vec::new())?;
        }
        Ok(())
    })
}

type Clock = [u32; THREADS];

/// What was put into a cell: in which block, and for which round of its loop.
type Tag = (u32, u32);

#[derive(Clone, Default)]
struct Cell {
    /// Who wrote it, and when by its own clock; none while copies to it are under way.
    written: Option<(usize, u32)>,
    is_under_way: bool,
    /// When each thread last read it, by its own clock.
    read: Clock,
    holds: Tag,
}

/// A cell: tile, stage, warp of an Own one, share.
type Place = (TileId, u32, usize, usize);

struct Run<'a> {
    plan: &'a Plan,
    /// By thread: what it knows of the others.
    clocks: [Clock; THREADS],
    cells: HashMap<Place, Cell>,
    /// Groups of copies: the cells of each, by thread.
    begun: Vec<[Vec<Place>; THREADS]>,
    rounds: Vec<u32>,
    next: usize,
    block: u32,
}

impl Run<'_> {
    /// Runs `acts` in rounds `open` of the loops around.
    fn acts(&mut self, acts: &[Act], open: &mut Vec<(LoopId, u32, u32)>) -> Result<(), String> {
        for act in acts {
            match act {
                Act::Meet(Scope::Block) => self.meet(&[0, 1, 2, 3]),
                Act::Meet(Scope::Warp) => {
                    self.meet(&[0, 1]);
                    self.meet(&[2, 3]);
                }
                Act::Await(left) => self.wait(*left as usize),
                Act::Begin { of, loads, ahead, is_first } => {
                    let (round, end) = match open.iter().find(|(id, ..)| Some(*id) == *of) {
                        Some((_, round, end)) => (round + ahead, *end),
                        // Before the loop: the rounds that it will have come next.
                        None if *is_first => (*ahead, self.rounds[self.next % self.rounds.len()]),
                        None => (0, 1),
                    };
                    let mut cells: [Vec<Place>; THREADS] = Default::default();
                    // Beyond the last round there is nothing to load.
                    for load in loads.iter().filter(|_| round < end) {
                        let Op::Load { to, .. } = load else { continue };
                        let super::Place::Shared { stages, .. } = self.plan.body.tiles[to.0].place else { continue };
                        let stage = round % stages;
                        for (thread, cells) in cells.iter_mut().enumerate() {
                            let place = (*to, stage, 0, thread);
                            self.write(thread, place, (self.block, round))?;
                            self.cells.entry(place).or_default().is_under_way = true;
                            cells.push(place);
                        }
                    }
                    self.begun.push(cells);
                }
                Act::Do(op) => self.op(op, open)?,
                Act::Loop { of, acts } => {
                    let end = self.rounds[self.next % self.rounds.len()];
                    self.next += 1;
                    for round in 0..end {
                        open.push((of.id, round, end));
                        self.acts(acts, open)?;
                        open.pop();
                    }
                }
            }
        }
        Ok(())
    }

    fn op(&mut self, op: &Op, open: &[(LoopId, u32, u32)]) -> Result<(), String> {
        // Reads first: an operation's threads have read what they write over.
        for tile in op.reads() {
            match self.plan.body.tiles[tile.0].place {
                super::Place::Own { .. } => {
                    for thread in 0..THREADS {
                        for lane in 0..LANES {
                            self.read(thread, (tile, 0, thread / LANES, lane), None)?;
                        }
                    }
                }
                super::Place::Shared { stages, .. } => {
                    let round = open.iter().find(|(id, ..)| loads_in(&self.plan.body.steps, *id, tile));
                    let round = round.map_or(0, |(_, round, _)| *round);
                    for thread in 0..THREADS {
                        for share in 0..THREADS {
                            self.read(thread, (tile, round % stages, 0, share), Some((self.block, round)))?;
                        }
                    }
                }
                _ => {}
            }
        }
        if let Some(tile) = op.writes()
            && let super::Place::Own { .. } = self.plan.body.tiles[tile.0].place
        {
            // Lanes share what they keep otherwise than what they split.
            let other = usize::from(matches!(op, Op::Keep { .. }));
            for thread in 0..THREADS {
                self.write(thread, (tile, 0, thread / LANES, (thread + other) % LANES), (self.block, 0))?;
            }
        }
        Ok(())
    }

    /// `threads` know what each of them does.
    fn meet(&mut self, threads: &[usize]) {
        let mut all = [0; THREADS];
        for thread in threads {
            (0..THREADS).for_each(|other| all[other] = all[other].max(self.clocks[*thread][other]));
        }
        for thread in threads {
            self.clocks[*thread] = all;
            // What it does from here on is later than what the others now know of it.
            self.clocks[*thread][*thread] += 1;
        }
    }

    /// All groups but the last `left` have ended: what they wrote each thread's copies wrote now.
    fn wait(&mut self, left: usize) {
        let ended = self.begun.len().saturating_sub(left);
        for group in &mut self.begun[..ended] {
            for (thread, cells) in group.iter_mut().enumerate() {
                for place in cells.drain(..) {
                    let cell = self.cells.entry(place).or_default();
                    (cell.is_under_way, cell.written) = (false, Some((thread, self.clocks[thread][thread])));
                }
            }
        }
    }

    fn describe(&self, (tile, stage, ..): Place) -> String {
        format!("`{}`, stage {stage}, in block {}", self.plan.body.tiles[tile.0].name, self.block)
    }

    /// Whether `thread` knows of what was written to the cell.
    fn sees_write(&self, thread: usize, cell: &Cell) -> bool {
        !cell.is_under_way && cell.written.is_none_or(|(by, at)| by == thread || self.clocks[thread][by] >= at)
    }

    fn read(&mut self, thread: usize, place: Place, expected: Option<Tag>) -> Result<(), String> {
        let cell = self.cells.get(&place).cloned().unwrap_or_default();
        if !self.sees_write(thread, &cell) {
            return Err(format!("thread {thread} reads {} and may come before who writes it", self.describe(place)));
        }
        if let Some(expected) = expected
            && (cell.written.is_none() || cell.holds != expected)
        {
            let (what, held) = (self.describe(place), cell.holds);
            return Err(format!("thread {thread} reads {what}: of block and round {held:?}, expected {expected:?}"));
        }
        self.cells.entry(place).or_default().read[thread] = self.clocks[thread][thread];
        Ok(())
    }

    fn write(&mut self, thread: usize, place: Place, holds: Tag) -> Result<(), String> {
        let cell = self.cells.get(&place).cloned().unwrap_or_default();
        let knows_reads = (0..THREADS).all(|other| other == thread || self.clocks[thread][other] >= cell.read[other]);
        if !self.sees_write(thread, &cell) || !knows_reads {
            return Err(format!("thread {thread} writes {} and may come before who is not done", self.describe(place)));
        }
        let written = Some((thread, self.clocks[thread][thread]));
        *self.cells.entry(place).or_default() = Cell { written, holds, ..Cell::default() };
        Ok(())
    }
}

/// Whether loop `id` is the one whose round loads `tile`.
fn loads_in(steps: &[Step], id: LoopId, tile: TileId) -> bool {
    steps.iter().any(|step| match step {
        Step::Loop(inner) if inner.id == id => {
            inner.steps.iter().any(|step| matches!(step, Step::Op(Op::Load { to, .. }) if *to == tile))
        }
        Step::Loop(inner) => loads_in(&inner.steps, id, tile),
        Step::Op(_) => false,
    })
}
