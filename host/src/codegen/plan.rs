//! From a body to what its threads do: loads ahead, waits and barriers.
//!
//! Loads of a loop's round are begun together, a group of copies, as many rounds ahead as their tiles have stages, less one: the first of
//! them before the loop, the others in it, just before the first operation that reads one. What runs beside is then all that a round
//! computes.
//!
//! Synchronisation is found by walking through what one thread does, every loop taken zero to several times, and looking at each two accesses
//! of one tile (of one stage of it), one of them a write, by different threads:
//!
//! | the earlier one | the later one | between them |
//! | --- | --- | --- |
//! | copies begun | any | a wait for their group, then the block's barrier |
//! | of a warp's own rows | of the same | the warp's |
//! | any other | any | the block's |
//!
//! A barrier that lacks goes just before the later access, or before the loop around it that the earlier one is outside of: as late as it
//! may stand, where it serves most. A wait goes before a barrier that is there already, if one is. What a barrier placed later makes
//! superfluous is taken out in the end.

use super::check::load_of;
use super::*;
use std::collections::BTreeMap;
use std::fmt;

/// Who meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// The lanes of a warp.
    Warp,
    /// All threads.
    Block,
}

/// Something a thread does.
#[derive(Clone, Debug)]
pub enum Act {
    /// An operation, no load.
    Do(Op),
    /// Begins the copies of these loads for the round that is `ahead` rounds after this one, or, before loop `of`, for its round
    /// `ahead`: of one that there is. They are a group, even if there is none.
    Begin {
        /// The loop whose rounds are meant; none outside all.
        of: Option<LoopId>,
        /// The loads.
        loads: Vec<Op>,
        /// How many rounds ahead.
        ahead: u32,
        /// Whether it stands before the loop.
        is_first: bool,
    },
    /// Waits until at most so many of its groups are under way, the youngest.
    Await(u32),
    /// A barrier.
    Meet(Scope),
    /// A loop.
    Loop {
        /// Without its steps.
        of: Loop,
        /// What it does.
        acts: Vec<Act>,
    },
}

/// What a body's threads do for 16 rows a warp, over and over.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The body.
    pub body: Body,
    /// What they do.
    pub acts: Vec<Act>,
}

/// Where an act stands: its place in each list on the way.
type Path = Vec<usize>;

/// Plans `body`, which has been [checked](super::check()).
pub fn plan(body: &Body) -> Plan {
    let mut plan = Plan { body: body.clone(), acts: pipelined(body, None, &body.steps) };
    while let Some(lack) = plan.lack() {
        match lack {
            Lack::Meet(path, scope) => insert(&mut plan.acts, &path, Act::Meet(scope)),
            Lack::Await(path, left) => put_wait(&mut plan.acts, &path, left),
        }
    }
    for path in plan.paths() {
        let without = plan.without(&path);
        if matches!(plan.act(&path), Some(Act::Meet(_) | Act::Await(_))) && without.lack().is_none() {
            plan = without;
        }
    }
    plan
}

/// `steps`, of loop `of`, with their loads where they are begun.
fn pipelined(body: &Body, of: Option<LoopId>, steps: &[Step]) -> Vec<Act> {
    let tiles: Vec<TileId> = steps.iter().filter_map(load_of).collect();
    let loads = loads_of(steps);
    let ahead = stages_of(body, &tiles) - 1;
    let mut acts = Vec::new();
    let mut is_begun = loads.is_empty();
    for step in steps {
        if load_of(step).is_some() {
            continue;
        }
        if !is_begun && reads(step, &tiles) {
            acts.push(Act::Begin { of, loads: loads.clone(), ahead, is_first: false });
            is_begun = true;
        }
        match step {
            Step::Op(op) => acts.push(Act::Do(op.clone())),
            Step::Loop(inner) => {
                let tiles: Vec<TileId> = inner.steps.iter().filter_map(load_of).collect();
                let loads = loads_of(&inner.steps);
                for ahead in 0..stages_of(body, &tiles) - 1 {
                    acts.push(Act::Begin { of: Some(inner.id), loads: loads.clone(), ahead, is_first: true });
                }
                let head = Loop { steps: Vec::new(), ..inner.clone() };
                acts.push(Act::Loop { of: head, acts: pipelined(body, Some(inner.id), &inner.steps) });
            }
        }
    }
    acts
}

fn loads_of(steps: &[Step]) -> Vec<Op> {
    let load = |step: &Step| match step {
        Step::Op(op @ Op::Load { .. }) => Some(op.clone()),
        _ => None,
    };
    steps.iter().filter_map(load).collect()
}

/// Stages of tiles that are loaded together.
fn stages_of(body: &Body, tiles: &[TileId]) -> u32 {
    tiles.first().map_or(1, |tile| stages(body, *tile))
}

/// How many of a tile take turns.
pub(super) fn stages(body: &Body, tile: TileId) -> u32 {
    match body.tiles[tile.0].place {
        Place::Shared { stages, .. } => stages,
        _ => 1,
    }
}

/// Whether `step` reads one of `tiles`, in a loop perhaps.
fn reads(step: &Step, tiles: &[TileId]) -> bool {
    match step {
        Step::Op(op) => op.reads().iter().any(|tile| tiles.contains(tile)),
        Step::Loop(inner) => inner.steps.iter().any(|step| reads(step, tiles)),
    }
}

/// What a plan lacks.
enum Lack {
    /// A barrier, before this.
    Meet(Path, Scope),
    /// A wait for all but so many groups, before this.
    Await(Path, u32),
}

/// Which threads touch what of a tile.
#[derive(Clone, Copy, PartialEq)]
enum Touch {
    /// All, bytes that are nobody's in particular, by copies: the group, counted from 0.
    Copies(u32),
    /// Each warp its own rows: reads, splits and keeps, which lanes share differently.
    Own(Lanes),
    /// All, all of it.
    All,
}

/// How a warp's lanes share what it touches of its own rows.
#[derive(Clone, Copy, PartialEq)]
enum Lanes {
    /// Each all of it.
    Read,
    /// As splits do.
    Split,
    /// As keeps do.
    Keep,
}

/// An access, and since when.
#[derive(Clone)]
struct Access {
    path: Path,
    /// The block's number, and the rounds of the loops around it.
    rounds: Vec<u32>,
    touch: Touch,
    is_write: bool,
    /// Where it is in the walk.
    at: usize,
}

/// A walk through a plan.
#[derive(Default)]
struct Walk {
    /// How often loops go round: in turn, whichever comes next; and how many have.
    rounds: Vec<u32>,
    n_loops: usize,
    /// The loops around, outermost first: which, the round, of how many.
    open: Vec<(LoopId, u32, u32)>,
    /// By tile and stage: what may still matter.
    accesses: BTreeMap<(TileId, u32), Vec<Access>>,
    /// Barriers: when, where, and whose.
    meets: Vec<(usize, Path, Scope, u32)>,
    /// Waits: when, and the first group that they do not wait for.
    waits: Vec<(usize, u32)>,
    groups: u32,
    block: u32,
    now: usize,
    lack: Option<Lack>,
}

/// How often loops go round in each walk, in turn, whichever comes next. First the same number all the time, many first, since what a round
/// needs of the one before decides where barriers stand best; then, in so many walks, as it comes.
const ROUNDS: [u32; 4] = [6, 2, 1, 0];
const MIXED: u32 = 160;

fn walks() -> impl Iterator<Item = Vec<u32>> {
    // A linear congruence, of which the upper bits choose (Knuth, MMIX).
    let mut state = 1_u64;
    let mixed = (0..MIXED).map(move |_| {
        let next = |_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ROUNDS[(state >> 62) as usize]
        };
        (0..24).map(next).collect()
    });
    ROUNDS.iter().map(|rounds| vec![*rounds]).chain(mixed)
}

impl Plan {
    /// The first thing that it lacks.
    fn lack(&self) -> Option<Lack> {
        walks().find_map(|rounds| {
            let mut walk = Walk { rounds, ..Walk::default() };
            for block in 0..3 {
                walk.block = block;
                self.walk(&self.acts, &mut Vec::new(), &mut walk);
            }
            walk.lack
        })
    }

    /// Walks through `acts`, which stand at `path`.
    fn walk(&self, acts: &[Act], path: &mut Path, walk: &mut Walk) {
        for (at, act) in acts.iter().enumerate() {
            path.push(at);
            walk.now += 1;
            match act {
                Act::Loop { of, acts } => {
                    let end = walk.next_rounds();
                    walk.n_loops += 1;
                    for round in 0..end {
                        walk.open.push((of.id, round, end));
                        self.walk(acts, path, walk);
                        walk.open.pop();
                    }
                }
                Act::Meet(scope) => walk.meets.push((walk.now, path.clone(), *scope, walk.groups)),
                Act::Await(left) => walk.waits.push((walk.now, walk.groups.saturating_sub(*left))),
                Act::Begin { of, loads, ahead, is_first } => {
                    let (round, end) = match (of, is_first) {
                        (Some(_), true) => (*ahead, walk.next_rounds()),
                        (of, _) => {
                            let (round, end) = walk.round_of(*of);
                            (round + ahead, end)
                        }
                    };
                    for op in loads.iter().filter(|_| round < end) {
                        let tile = op.writes().expect("a load writes");
                        self.touch(tile, round, Touch::Copies(walk.groups), true, path, walk);
                    }
                    walk.groups += 1;
                }
                Act::Do(op) => {
                    let accesses = op.reads().into_iter().map(|tile| (tile, false));
                    for (tile, is_write) in accesses.chain(op.writes().map(|tile| (tile, true))) {
                        match self.body.tiles[tile.0].place {
                            Place::Own { .. } => {
                                let lanes = match op {
                                    Op::Split { .. } => Lanes::Split,
                                    Op::Keep { .. } => Lanes::Keep,
                                    _ => Lanes::Read,
                                };
                                self.touch(tile, 0, Touch::Own(lanes), is_write, path, walk);
                            }
                            Place::Shared { .. } => {
                                let (round, _) = walk.round_of(self.loop_of(tile));
                                self.touch(tile, round, Touch::All, is_write, path, walk);
                            }
                            _ => {}
                        }
                    }
                }
            }
            path.pop();
        }
    }

    /// The loop in whose rounds a tile is loaded.
    pub(super) fn loop_of(&self, tile: TileId) -> Option<LoopId> {
        fn find(steps: &[Step], of: Option<LoopId>, tile: TileId) -> Option<Option<LoopId>> {
            steps.iter().find_map(|step| match step {
                Step::Loop(inner) => find(&inner.steps, Some(inner.id), tile),
                step => (load_of(step) == Some(tile)).then_some(of),
            })
        }
        find(&self.body.steps, None, tile).flatten()
    }

    fn touch(&self, tile: TileId, round: u32, touch: Touch, is_write: bool, path: &Path, walk: &mut Walk) {
        let rounds = [walk.block].into_iter().chain(walk.open.iter().map(|(_, round, _)| *round)).collect();
        let access = Access { path: path.clone(), rounds, touch, is_write, at: walk.now };
        let key = (tile, round % stages(&self.body, tile));
        let before = walk.accesses.get(&key).cloned().unwrap_or_default();
        for earlier in before.iter().filter(|earlier| earlier.is_write || is_write) {
            // A lane that does the same once more writes what it has written.
            let is_same = earlier.touch == touch && matches!(touch, Touch::Own(_));
            if walk.lack.is_none() && earlier.at != access.at && !is_same {
                walk.lack = walk.lack_between(earlier, &access);
            }
        }
        let accesses = walk.accesses.entry(key).or_default();
        // Whoever comes after this write has to come after it alone: it came after the others.
        if is_write {
            accesses.retain(|earlier| earlier.at == access.at);
        }
        accesses.push(access);
    }
}

impl Walk {
    /// How often the next loop goes round.
    fn next_rounds(&self) -> u32 {
        self.rounds[self.n_loops % self.rounds.len()]
    }

    /// The round that loop `of` is in, and of how many; the only one where there is no loop.
    fn round_of(&self, of: Option<LoopId>) -> (u32, u32) {
        let found = self.open.iter().find(|(id, ..)| Some(*id) == of);
        found.map_or((0, 1), |(_, round, end)| (*round, *end))
    }

    fn lack_between(&self, earlier: &Access, later: &Access) -> Option<Lack> {
        let are_own = [earlier, later].iter().all(|access| matches!(access.touch, Touch::Own(_)));
        let scope = if are_own { Scope::Warp } else { Scope::Block };
        let mut since = earlier.at;
        if let Touch::Copies(group) = earlier.touch {
            match self.waits.iter().find(|(at, first)| *at > earlier.at && *first > group) {
                Some((at, _)) => since = *at,
                None => {
                    let barrier = self.meets.iter().rfind(|(at, _, of, _)| *at > earlier.at && *of >= scope);
                    return Some(match barrier {
                        Some((_, path, _, groups)) => Lack::Await(path.clone(), groups - group - 1),
                        None => Lack::Meet(before(earlier, later), scope),
                    });
                }
            }
        }
        let has_met = self.meets.iter().any(|(at, _, of, _)| *at > since && *of >= scope);
        (!has_met).then(|| Lack::Meet(before(earlier, later), scope))
    }
}

/// Before `later`, or before the outermost loop around it that `earlier` is not in the same run of.
fn before(earlier: &Access, later: &Access) -> Path {
    // Of the rounds the first is the block's, which is no loop of the path.
    let mut depth = 0;
    while depth + 1 < later.path.len()
        && earlier.path.get(depth) == Some(&later.path[depth])
        && earlier.path.len() > depth + 1
        && earlier.rounds[..=depth] == later.rounds[..=depth]
    {
        depth += 1;
    }
    later.path[..=depth].to_vec()
}

/// The list that `path` ends in, and the place in it.
fn list_of<'a>(acts: &'a mut Vec<Act>, path: &[usize]) -> (&'a mut Vec<Act>, usize) {
    match path {
        [at] => (acts, *at),
        [at, rest @ ..] => match &mut acts[*at] {
            Act::Loop { acts, .. } => list_of(acts, rest),
            _ => unreachable!("only loops have acts in them"),
        },
        [] => unreachable!("a path leads somewhere"),
    }
}

fn insert(acts: &mut Vec<Act>, path: &[usize], act: Act) {
    let (list, at) = list_of(acts, path);
    list.insert(at, act);
}

fn remove(acts: &mut Vec<Act>, path: &[usize]) {
    let (list, at) = list_of(acts, path);
    list.remove(at);
}

/// A wait for all but `left` groups before the act at `path`; one that stands there waits for more.
fn put_wait(acts: &mut Vec<Act>, path: &[usize], left: u32) {
    let (list, at) = list_of(acts, path);
    match at.checked_sub(1).map(|before| &mut list[before]) {
        Some(Act::Await(old)) => *old = left.min(*old),
        _ => list.insert(at, Act::Await(left)),
    }
}

fn act_at<'a>(acts: &'a [Act], path: &[usize]) -> Option<&'a Act> {
    match path {
        [at] => acts.get(*at),
        [at, rest @ ..] => match acts.get(*at)? {
            Act::Loop { acts, .. } => act_at(acts, rest),
            _ => None,
        },
        [] => None,
    }
}

impl Plan {
    /// Where its acts stand, the last ones first, so that taking one out moves none that is still to come.
    pub fn paths(&self) -> Vec<Path> {
        fn of(acts: &[Act], path: &mut Path, all: &mut Vec<Path>) {
            for (at, act) in acts.iter().enumerate() {
                path.push(at);
                all.push(path.clone());
                if let Act::Loop { acts, .. } = act {
                    of(acts, path, all);
                }
                path.pop();
            }
        }
        let mut all = Vec::new();
        of(&self.acts, &mut Vec::new(), &mut all);
        all.reverse();
        all
    }

    /// The act at a path.
    pub fn act(&self, path: &[usize]) -> Option<&Act> {
        act_at(&self.acts, path)
    }

    /// The plan without the act at `path`.
    pub fn without(&self, path: &[usize]) -> Plan {
        let mut plan = self.clone();
        remove(&mut plan.acts, path);
        plan
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn lines(plan: &Plan, acts: &[Act], depth: usize, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            let name = |tile: &TileId| plan.body.tiles[tile.0].name.as_str();
            for act in acts {
                write!(f, "{:1$}", "", 2 * depth)?;
                match act {
                    Act::Meet(scope) => writeln!(f, "meet {scope:?}")?,
                    Act::Await(left) => writeln!(f, "await all but {left}")?,
                    Act::Begin { loads, ahead, is_first, .. } => {
                        let tiles: Vec<&str> = loads.iter().filter_map(Op::writes).map(|t| name(&t)).collect();
                        let round = if *is_first { "round" } else { "ahead" };
                        writeln!(f, "begin {} {round} {ahead}", tiles.join(", "))?;
                    }
                    Act::Do(op) => {
                        let reads: Vec<&str> = op.reads().iter().map(&name).collect();
                        let text = format!("{op:?}");
                        let verb = text.split_whitespace().next().unwrap_or_default().to_lowercase();
                        let to = op.writes().map_or(String::new(), |tile| format!(" {}", name(&tile)));
                        let from = if reads.is_empty() { String::new() } else { format!(" <- {}", reads.join(", ")) };
                        writeln!(f, "{verb}{to}{from}")?;
                    }
                    Act::Loop { of, acts } => {
                        writeln!(f, "each {} by {}", of.name, of.by)?;
                        lines(plan, acts, depth + 1, f)?;
                    }
                }
            }
            Ok(())
        }
        lines(self, &self.acts, 0, f)
    }
}
