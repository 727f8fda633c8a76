//! From a body to what its threads do: loads ahead, waits and barriers.
//!
//! Loads of a loop's round are begun together, a group of copies, as many rounds ahead as their tiles have stages, less
//! one: the first of them before the loop, the others in it, just before the first operation that reads one. What runs
//! beside is then all that a round computes.
//!
//! Synchronisation is found by walking through what one thread does, each loop taken zero to several times by itself,
//! on all these ways at once, and looking at each two accesses of one tile (of one stage of it), one of them a write,
//! by different threads:
//!
//! | the earlier one | the later one | between them |
//! | --- | --- | --- |
//! | copies begun | any | a wait for their group, then the block's barrier |
//! | of a warp's own rows | of the same | the warp's |
//! | any other | any | the block's |
//!
//! A barrier that lacks goes just before the later access, or before the loop around it that the earlier one is outside
//! of: as late as it may stand, where it serves most. A wait goes before a barrier that is there already, if one is.
//! What a barrier placed later makes superfluous is taken out in the end.

use super::check::load_of;
use super::*;
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
    /// Begins the copies of these loads for the round that is `ahead` rounds after this one, or, before loop `of`, for
    /// its round `ahead`: of one that there is. They are a group, even if there is none.
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
    /// All, bytes that are nobody's in particular, by copies.
    Copies,
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

/// An access that whoever comes later may have to wait for.
#[derive(Clone, PartialEq)]
struct Access {
    /// Of which tile, and which of its stages.
    of: (TileId, u32),
    path: Path,
    /// The block, 0 while it is this one, and the rounds of the loops around it.
    rounds: Vec<u32>,
    touch: Touch,
    is_write: bool,
    /// Of copies that nobody has waited for: how many groups have been begun since.
    younger: Option<u32>,
    /// Of such copies: the last barrier since, and how many younger groups there were by then.
    met: Option<(Path, u32)>,
}

/// How often loops go round in a walk.
#[derive(Clone, Copy)]
enum Rounds {
    /// All of them so often.
    Each(u32),
    /// Each by itself as often as it may: all that makes a difference.
    Any,
}

/// The walks in which a plan has to lack nothing. The last would do; but what a round needs of the one before decides
/// where barriers stand best, so the one of many rounds comes first.
const WALKS: [Rounds; 5] = [Rounds::Each(6), Rounds::Each(2), Rounds::Each(1), Rounds::Each(0), Rounds::Any];

/// A walk through a plan, on all ways at once.
struct Walk {
    rounds: Rounds,
    /// The loops around, outermost first: which, the round, of how many.
    open: Vec<(LoopId, u32, u32)>,
    /// What is not over on one of the ways. Each access comes to its end by itself, whatever else is there, so it need
    /// not be known which of them have come together.
    pending: Vec<Access>,
}

/// A round that is past, whichever it was: who comes later is in none of its loops' runs.
const PAST: u32 = u32::MAX;

impl Plan {
    /// The first thing that it lacks.
    fn lack(&self) -> Option<Lack> {
        WALKS.iter().find_map(|rounds| {
            let mut walk = Walk { rounds: *rounds, open: Vec::new(), pending: Vec::new() };
            // Blocks of rows, one after the other.
            (0..3).find_map(|_| {
                let lack = self.walk(&self.acts, &mut Vec::new(), &mut walk).err();
                walk.leave(0);
                lack
            })
        })
    }

    /// Walks through `acts`, which stand at `path`, until something lacks.
    fn walk(&self, acts: &[Act], path: &mut Path, walk: &mut Walk) -> Result<(), Lack> {
        let mut at = 0;
        while at < acts.len() {
            let Some(id) = loop_begun(&acts[at]) else {
                self.step(&acts[at], at, 1, path, walk)?;
                at += 1;
                continue;
            };
            // From its first loads to its end a loop is gone through as often as it may go round.
            let is_it = |act: &Act| matches!(act, Act::Loop { of, .. } if of.id == id);
            let n = 1 + acts[at..].iter().position(is_it).expect("what is loaded before a loop is before a loop");
            let before = std::mem::take(&mut walk.pending);
            let mut after = Vec::new();
            for end in self.ends(id, walk.rounds) {
                walk.pending.clone_from(&before);
                for (at, act) in acts.iter().enumerate().skip(at).take(n) {
                    self.step(act, at, end, path, walk)?;
                }
                walk.pending.drain(..).for_each(|access| add(&mut after, access));
            }
            walk.pending = after;
            at += n;
        }
        Ok(())
    }

    /// How often loop `id` goes round. Where a round's loads are begun so many stages ahead, what differs is whether
    /// there are so many rounds, and whether stages come again.
    fn ends(&self, id: LoopId, rounds: Rounds) -> std::ops::RangeInclusive<u32> {
        match rounds {
            Rounds::Each(end) => end..=end,
            Rounds::Any => {
                let tiles = (0..self.body.tiles.len()).map(TileId);
                let tiles: Vec<TileId> = tiles.filter(|tile| self.loop_of(*tile) == Some(id)).collect();
                0..=stages_of(&self.body, &tiles) + 2
            }
        }
    }

    /// Does `act`, which stands at `at` of the list at `path`; where it is of a loop that comes, that one goes round
    /// `end` times.
    fn step(&self, act: &Act, at: usize, end: u32, path: &mut Path, walk: &mut Walk) -> Result<(), Lack> {
        path.push(at);
        match act {
            Act::Loop { of, acts } => {
                for round in 0..end {
                    walk.open.push((of.id, round, end));
                    self.walk(acts, path, walk)?;
                    walk.open.pop();
                }
                walk.leave(1 + walk.open.len());
            }
            Act::Meet(scope) => walk.meet(*scope, path),
            Act::Await(left) => {
                for access in walk.pending.iter_mut().filter(|access| access.younger >= Some(*left)) {
                    (access.younger, access.met) = (None, None);
                }
            }
            Act::Begin { of, loads, ahead, is_first } => {
                let (now, end) = if *is_first { (0, end) } else { walk.round_of(*of) };
                let round = now + ahead;
                // Beyond the last round there is nothing to load.
                let loads = loads.iter().filter(|_| round < end);
                let tiles = loads.map(|op| (op.writes().expect("a load writes"), round, Touch::Copies, true));
                let accesses = tiles.map(|touched| self.access(touched, path, walk)).collect();
                walk.pending.iter_mut().filter_map(|access| access.younger.as_mut()).for_each(|younger| *younger += 1);
                walk.touch(accesses)?;
            }
            Act::Do(op) => {
                let tiles = op.reads().into_iter().map(|tile| (tile, false));
                let tiles = tiles.chain(op.writes().map(|tile| (tile, true)));
                let touched = tiles.filter_map(|(tile, is_write)| match self.body.tiles[tile.0].place {
                    Place::Own { .. } => {
                        let lanes = match op {
                            Op::Split { .. } => Lanes::Split,
                            Op::Keep { .. } => Lanes::Keep,
                            _ => Lanes::Read,
                        };
                        Some((tile, 0, Touch::Own(lanes), is_write))
                    }
                    Place::Shared { .. } => Some((tile, walk.round_of(self.loop_of(tile)).0, Touch::All, is_write)),
                    _ => None,
                });
                let accesses = touched.map(|touched| self.access(touched, path, walk)).collect();
                walk.touch(accesses)?;
            }
        }
        path.pop();
        Ok(())
    }

    /// An access of a tile in a round, by the act at `path`.
    fn access(&self, (tile, round, touch, is_write): (TileId, u32, Touch, bool), path: &Path, walk: &Walk) -> Access {
        Access {
            of: (tile, round % stages(&self.body, tile)),
            path: path.clone(),
            rounds: [0].into_iter().chain(walk.open.iter().map(|(_, round, _)| *round)).collect(),
            touch,
            is_write,
            younger: (touch == Touch::Copies).then_some(0),
            met: None,
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
}

/// The loop that begins here: with itself, or with the first loads of its rounds.
fn loop_begun(act: &Act) -> Option<LoopId> {
    match act {
        Act::Loop { of, .. } => Some(of.id),
        Act::Begin { of, is_first: true, .. } => *of,
        _ => None,
    }
}

/// Adds `access` to `accesses`, unless it is one of them.
fn add(accesses: &mut Vec<Access>, access: Access) {
    if !accesses.contains(&access) {
        accesses.push(access);
    }
}

impl Walk {
    /// The round that loop `of` is in, and of how many; the only one where there is no loop.
    fn round_of(&self, of: Option<LoopId>) -> (u32, u32) {
        let found = self.open.iter().find(|(id, ..)| Some(*id) == of);
        found.map_or((0, 1), |(_, round, end)| (*round, *end))
    }

    /// The run of the loops from the `depth`th on is over, or at 0 the block.
    fn leave(&mut self, depth: usize) {
        for mut access in std::mem::take(&mut self.pending) {
            access.rounds.iter_mut().skip(depth).for_each(|round| *round = PAST);
            add(&mut self.pending, access);
        }
    }

    /// A barrier, which stands at `path`: what it is enough for is over.
    fn meet(&mut self, scope: Scope, path: &Path) {
        self.pending.retain(|access| match access.touch {
            Touch::Own(_) => false,
            Touch::Copies | Touch::All => scope == Scope::Warp || access.younger.is_some(),
        });
        for access in self.pending.iter_mut().filter(|_| scope == Scope::Block) {
            access.met = access.younger.map(|younger| (path.clone(), younger));
        }
    }

    /// What an act does, if nothing lacks between it and what is pending.
    fn touch(&mut self, accesses: Vec<Access>) -> Result<(), Lack> {
        for later in &accesses {
            let others =
                self.pending.iter().filter(|earlier| earlier.of == later.of && (earlier.is_write || later.is_write));
            for earlier in others {
                // A lane that does the same once more writes what it has written.
                let is_same = earlier.touch == later.touch && matches!(later.touch, Touch::Own(_));
                if !is_same {
                    return Err(lack_between(earlier, later));
                }
            }
        }
        // Whoever comes after a write has to come after it alone: it came after the others.
        let is_written = |of| accesses.iter().any(|access| access.is_write && access.of == of);
        self.pending.retain(|earlier| !is_written(earlier.of));
        accesses.into_iter().for_each(|access| add(&mut self.pending, access));
        Ok(())
    }
}

/// What lacks before `later`, for which `earlier` is not over.
fn lack_between(earlier: &Access, later: &Access) -> Lack {
    match &earlier.met {
        Some((path, younger)) => Lack::Await(path.clone(), *younger),
        None => {
            let scope = if matches!(earlier.touch, Touch::Own(_)) { Scope::Warp } else { Scope::Block };
            Lack::Meet(before(earlier, later), scope)
        }
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
