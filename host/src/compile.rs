//! From kernel graphs to an image: the list of stages, readable top to bottom. `plan` has those of one program, `link`
//! makes one image of all.

mod link;

use crate::graph::flags;
use crate::graph::kernel::{GraphError, KernelGraph, Pass};
use crate::graph::lower::{self, Cut, Target};
use crate::graph::task::{self, TaskClass, TaskError, TaskGraph, WorkerLists};
use crate::graph::threadblock::{self, ThreadBlockGraph};
use crate::image::encode::encode_ordered;
use crate::image::{Image, ImageError};
use crate::machine::Machine;
use crate::parallel::side_by_side;
use crate::schedule::assign::Slack;
use crate::schedule::{arena, assign, prefetch};
use link::Link;
use perpetua_device::kernels::{Cost, Spec};
use perpetua_shared::ProgramId;
use perpetua_shared::limits::MAX_TASK_EVENTS;
use perpetua_shared::task::Operand;
use std::time::{Duration, Instant};

pub use crate::image::Binding;

/// One program to compile.
#[derive(Clone, Debug)]
pub struct Source {
    /// Its name: `decode`, `prefill 64`, ...
    pub name: String,
    /// What it computes.
    pub graph: KernelGraph,
    /// Whether the token loop may choose it by itself.
    pub in_token_loop: bool,
}

/// One program, compiled.
#[derive(Clone, Debug)]
pub struct Program {
    /// Its name.
    pub name: String,
    /// Its number in the image.
    pub id: ProgramId,
    /// Tensors that can be read back after a run.
    pub outputs: Vec<(String, Operand)>,
    /// HOW every operator is cut.
    pub blocks: ThreadBlockGraph,
    /// Tasks, and events for whatever orders them.
    pub tasks: TaskGraph,
    /// The same tasks with the events that the image has: those for what no [flag](crate::graph::flags) tells.
    pub counted: TaskGraph,
    /// Per event of `tasks`, whether flags take its place.
    pub told: Vec<bool>,
    /// Every worker's tasks.
    pub lists: WorkerLists,
    /// Per task, bytes and flops.
    pub costs: Vec<Cost>,
    /// Per task, what it reads of weights and caches, where workers have loaders.
    pub reads: Vec<prefetch::Reads>,
    /// What each worker's loader does; without workers where they have none.
    pub plan: prefetch::Plan,
    /// Where the intermediates lie.
    pub arena: arena::Arena,
    /// How long each stage took.
    pub stages: Vec<(&'static str, Duration)>,
}

/// Everything an executor and its host need.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// What the workers run.
    pub image: Image,
    /// What the image's bindings are.
    pub bindings: Vec<Binding>,
    /// The programs, in the image's order.
    pub programs: Vec<Program>,
}

/// Why a graph cannot be compiled.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CompileError {
    /// An operator is wrong.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// Cuts break laws.
    #[error("{} law(s) of the thread-block graph broken; first: {}", .0.len(), .0[0])]
    Blocks(Vec<threadblock::Violation>),
    /// Dependencies cannot be derived.
    #[error(transparent)]
    Tasks(#[from] TaskError),
    /// The events do not order what they must: a defect of this library.
    #[error("{} ordering(s) missing; first: {}", .0.len(), .0[0])]
    Dependencies(Vec<task::Violation>),
    /// A pass that takes longer than can be counted.
    #[error("operator {op}: its tasks' {what} and those before sum to more than {MAX_PASS_COST}")]
    Cost {
        /// The operator that went over.
        op: String,
        /// Bytes or flops.
        what: &'static str,
    },
    /// An operator cannot be launched just in time.
    #[error("just-in-time operator {op}: {why}")]
    JustInTime {
        /// The operator, or the name that no operator has.
        op: String,
        /// Why not.
        why: &'static str,
    },
    /// A task waits on more events than its descriptor counts, or triggers more.
    #[error("operator {op}, block {block:?}: {what} {given} events, expected at most {MAX_TASK_EVENTS}")]
    TaskEvents {
        /// The task's operator.
        op: String,
        /// Which of its blocks.
        block: [u32; 3],
        /// `waits on` or `triggers`.
        what: &'static str,
        /// How many.
        given: usize,
    },
    /// A task's tiles do not fit a worker.
    #[error(transparent)]
    Plan(#[from] prefetch::PlanError),
    /// A plan of shared memory breaks laws: a defect of this library.
    #[error("{} law(s) of the shared-memory plan broken; first: {}", .0.len(), .0[0])]
    Tiles(Vec<prefetch::Violation>),
    /// The image breaks rules.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// One name stands for two different buffers.
    #[error("buffer {name}: {found} bytes in program {program}, {expected} before")]
    Binding {
        /// The buffer.
        name: String,
        /// The program.
        program: String,
        /// Bytes there.
        found: u64,
        /// Bytes in an earlier program.
        expected: u64,
    },
    /// One name stands for two constants, or for two stacks of weights.
    #[error("buffer {name}: program {program} has other contents, or another number of tensors, than one before")]
    Contents {
        /// The buffer.
        name: String,
        /// The program.
        program: String,
    },
}

/// What else the caller wants.
#[derive(Clone, Debug)]
pub struct Config {
    /// What to compile for.
    pub target: Target,
    /// Judge that every overlap is ordered, in the arena too, by the independent checker.
    pub check: bool,
    /// Operators whose tasks a scheduler launches when their events fire, for whichever worker is idle then; the others
    /// stand in workers' lists. Each entry is an operator's name, or a macro kernel's for all operators of that kernel.
    pub just_in_time: Vec<String>,
}

impl Config {
    /// For `target`, checked in debug builds.
    pub fn new(target: Target) -> Config {
        Config { target, check: cfg!(debug_assertions), just_in_time: Vec::new() }
    }
}

/// Compiles `sources` into one image. The stages of each program are those of `plan`, in order: kernel graph →
/// thread-block graph → tasks and events → worker lists → arena → loaders' plans → (checks); then one image of all.
/// Programs know nothing of each other before the image, so they are compiled side by side.
///
/// # Errors
/// The first stage that fails, with what is wrong.
pub fn compile(sources: Vec<Source>, config: &Config) -> Result<Compiled, CompileError> {
    let mut link = Link::default();
    let mut programs = Vec::with_capacity(sources.len());
    for planned in side_by_side(sources, 1, |number, source| plan(number, source, config)) {
        let (source, mut program) = planned?;
        link.add(&source, &mut program)?;
        programs.push(program);
    }
    check_names(&programs, config)?;
    let mut clock = Clock::new();
    let image = encode_ordered(&link.parts(&programs, config.target.n_workers))?;
    clock.lap("image");
    if let Some(last) = programs.last_mut() {
        last.stages.append(&mut clock.laps);
    }
    Ok(Compiled { image, bindings: link.bindings, programs })
}

/// Whether `op` is called `name`, or its kernel is.
fn is_named(op: &threadblock::BlockOp, name: &str) -> bool {
    op.name == name || op.kernel.and_then(|kernel| Spec::of(kernel.task_type)).is_some_and(|spec| spec.name == name)
}

/// The classes of operators that `config` asks for, and that of the last, `advance`.
fn classes(blocks: &ThreadBlockGraph, config: &Config) -> Vec<(u32, TaskClass)> {
    let is_launched = |op: &threadblock::BlockOp| config.just_in_time.iter().any(|name| is_named(op, name));
    let launched = blocks.ops.iter().enumerate().filter(|(_, op)| is_launched(op));
    let mut classes: Vec<_> = launched.map(|(op, _)| (op as u32, TaskClass::JustInTime)).collect();
    if let Some(last) = blocks.ops.len().checked_sub(1) {
        classes.insert(0, (last as u32, TaskClass::EndIteration));
    }
    classes
}

/// Every name in [`Config::just_in_time`] is that of an operator, or of a kernel that some have.
fn check_names(programs: &[Program], config: &Config) -> Result<(), CompileError> {
    let has = |program: &Program, name: &str| program.blocks.ops.iter().any(|op| is_named(op, name));
    match config.just_in_time.iter().find(|name| !programs.iter().any(|program| has(program, name))) {
        Some(name) => {
            let why = "there is no operator or kernel of that name";
            Err(CompileError::JustInTime { op: name.clone(), why })
        }
        None => Ok(()),
    }
}

/// Every just-in-time task has an event that launches it, and is not the last.
fn check_launches(blocks: &ThreadBlockGraph, tasks: &TaskGraph) -> Result<(), CompileError> {
    for op in (0..tasks.classes.len()).filter(|op| tasks.classes[*op] == TaskClass::JustInTime) {
        let why = if op + 1 == tasks.classes.len() {
            "it ends the iteration, which is for a worker's list"
        } else if let Some(why) = tasks.why_not_launched(op) {
            why
        } else {
            continue;
        };
        return Err(CompileError::JustInTime { op: blocks.ops[op].name.clone(), why });
    }
    Ok(())
}

/// The most bytes, and the most flops, that the tasks of a pass may sum to: days of any machine, and sums of both stay
/// inside 64 bits.
const MAX_PASS_COST: u64 = 1 << 62;

fn check_costs(blocks: &ThreadBlockGraph, tasks: &TaskGraph, costs: &[Cost]) -> Result<(), CompileError> {
    let (mut bytes, mut flops) = (0u64, 0u64);
    for (task, cost) in tasks.tasks.iter().zip(costs) {
        bytes = bytes.saturating_add(cost.bytes_read).saturating_add(cost.bytes_written);
        flops = flops.saturating_add(cost.flops);
        for (what, sum) in [("bytes", bytes), ("flops", flops)] {
            if sum > MAX_PASS_COST {
                return Err(CompileError::Cost { op: blocks.ops[task.op as usize].name.clone(), what });
            }
        }
    }
    Ok(())
}

/// Everything about program `number` that the others do not matter to: its stages.
fn plan(number: usize, mut source: Source, config: &Config) -> Result<(Source, Program), CompileError> {
    if !source.graph.is_ended() {
        source.graph.advance()?;
    }
    source.graph.check_written()?;
    let target = &config.target;
    let mut clock = Clock::new();
    let (blocks, classes) = cut(&source.graph, config)?;
    clock.lap("cut");
    let task_config = task::Config { classes, ..Default::default() };
    let mut tasks = task::lower(&blocks, &task_config)?;
    check_launches(&blocks, &tasks)?;
    let by_events = flags::without_flagged(&blocks);
    let has_flagged = by_events != blocks;
    let mut counted = if has_flagged { task::lower(&by_events, &task_config)? } else { tasks.clone() };
    clock.lap("dependencies");
    let costs = task::task_costs(&blocks, &tasks);
    check_costs(&blocks, &tasks, &costs)?;
    // Many rows' products have the tiles' memory for themselves.
    let has_tiles = target.has_loaders && blocks.has_tiles;
    let machine = lower::machine_of(&blocks, target);
    let reads = reads_of(&blocks, &tasks, &costs, has_tiles, target);
    // Without tiles nobody does anything before its turn.
    let in_tiles = has_tiles.then(|| (&reads[..], machine.capacity_bytes()));
    let lists = lists_of(&blocks, &tasks, &costs, in_tiles, target);
    clock.lap("workers");
    // Before the arena: what `advance` does not wait for would have to be kept to the end.
    end_with_last_task(&mut tasks, None);
    // Of what flags order nobody need know but a worker's last, which comes after the others.
    end_with_last_task(&mut counted, has_flagged.then_some(&lists));
    let outputs: Vec<_> = source.graph.outputs().iter().map(|(_, tensor)| *tensor).collect();
    let arena = arena::plan(&blocks, &counted, &outputs);
    clock.lap("arena");
    if target.cut == Cut::PerWorker {
        task::elide(&mut tasks, &lists);
        task::elide(&mut counted, &lists);
    }
    check_task_events(&blocks, &counted)?;
    clock.lap("last");
    let is_repeated = source.in_token_loop && source.graph.rows == Some(1);
    let plan = match target.has_loaders {
        true => tiles_of(&blocks, &tasks, &lists, &reads, is_repeated, &machine)?,
        false => prefetch::Plan::default(),
    };
    clock.lap("tiles");
    let told = flags::told(&blocks, &tasks);
    let mut program = Program {
        name: source.name.clone(),
        id: ProgramId(number as u32),
        outputs: Vec::new(),
        blocks,
        tasks,
        counted,
        told,
        lists,
        costs,
        reads,
        plan,
        arena,
        stages: Vec::new(),
    };
    if config.check {
        judge(&program, &by_events, target)?;
        clock.lap("check");
    }
    program.stages = clock.laps;
    Ok((source, program))
}

/// The operators of `graph`, cut and, where they can be, flagged, and their classes.
fn cut(graph: &KernelGraph, config: &Config) -> Result<(ThreadBlockGraph, Vec<(u32, TaskClass)>), CompileError> {
    let mut blocks = lower::lower(graph, &config.target).map_err(CompileError::Blocks)?;
    let classes = classes(&blocks, config);
    // In a batch a sequence may have ended, and its tasks write nothing.
    if config.target.has_flags && graph.rows == Some(1) && graph.pass == Pass::Sequence {
        let is_launched = |op: usize| classes.contains(&(op as u32, TaskClass::JustInTime));
        flags::flag(&mut blocks, |op| !is_launched(op));
    }
    Ok((blocks, classes))
}

/// Per task, what it reads of weights and caches; nothing where nobody asks for it ahead.
fn reads_of(
    blocks: &ThreadBlockGraph,
    tasks: &TaskGraph,
    costs: &[Cost],
    has_tiles: bool,
    target: &Target,
) -> Vec<prefetch::Reads> {
    match target.has_loaders {
        true if has_tiles => prefetch::reads(blocks, tasks, costs),
        true => prefetch::reads_of_many_rows(blocks, tasks, costs, &target.machine),
        false => Vec::new(),
    }
}

/// Every worker's tasks; `in_tiles` is what each task reads, if that comes in tiles, and the room for these.
fn lists_of(
    blocks: &ThreadBlockGraph,
    tasks: &TaskGraph,
    costs: &[Cost],
    in_tiles: Option<(&[prefetch::Reads], u64)>,
    target: &Target,
) -> WorkerLists {
    match target.cut {
        Cut::TaskBytes => {
            let weight: Vec<u64> =
                costs.iter().map(|cost| cost.bytes_read + cost.bytes_written + cost.flops / 64).collect();
            assign::assign(tasks, &weight, target.n_workers)
        }
        Cut::PerWorker => {
            let bytes = |task: usize| in_tiles.map_or(costs[task].bytes_read, |(reads, _)| reads[task].bytes());
            let weight: Vec<u64> = (0..costs.len()).map(|task| bytes(task) + costs[task].flops / 64).collect();
            let slack = Slack { ahead: in_tiles.map_or(0, |(_, room)| room), hop: target.hop_bytes };
            assign::balance(blocks, tasks, &weight, target.n_workers, slack)
        }
    }
}

/// What each worker's loader does; if the program `is_repeated`, some of it ahead of the next pass.
fn tiles_of(
    blocks: &ThreadBlockGraph,
    tasks: &TaskGraph,
    lists: &WorkerLists,
    reads: &[prefetch::Reads],
    is_repeated: bool,
    machine: &Machine,
) -> Result<prefetch::Plan, CompileError> {
    let mut plan = prefetch::plan(blocks, tasks, lists, reads, machine)?;
    let takes_memory = |op: u32| blocks.ops[op as usize].takes_memory_for_one_row();
    // Any worker may be the one to run a task that is launched just in time, at the end of its list, too.
    let may_come_last =
        (0..).zip(&tasks.classes).any(|(op, class)| *class == TaskClass::JustInTime && takes_memory(op));
    if is_repeated && !may_come_last {
        plan.repeat(|task| takes_memory(tasks.tasks[task as usize].op));
    }
    Ok(plan)
}

/// Judges `program` by checkers that share no code with what made it; `by_events` are its blocks without what is
/// flagged.
fn judge(program: &Program, by_events: &ThreadBlockGraph, target: &Target) -> Result<(), CompileError> {
    let check = |blocks: &ThreadBlockGraph, tasks: &TaskGraph| {
        task::check(blocks, tasks, Some(&program.lists)).map_err(CompileError::Dependencies)
    };
    // All there is to order; then what events must, by events alone.
    check(&program.blocks, &program.tasks)?;
    check(by_events, &program.counted)?;
    check(&arena::in_arena(by_events, &program.arena), &program.counted)?;
    if target.has_loaders {
        prefetch::check(&program.plan, &program.lists, &program.reads).map_err(CompileError::Tiles)?;
    }
    Ok(())
}

struct Clock {
    since: Instant,
    laps: Vec<(&'static str, Duration)>,
}

impl Clock {
    fn new() -> Clock {
        Clock { since: Instant::now(), laps: Vec::new() }
    }
    fn lap(&mut self, name: &'static str) {
        let now = Instant::now();
        self.laps.push((name, now - self.since));
        self.since = now;
    }
}

/// Makes the last task, `advance`, wait for every task that nobody else waits for; of those in one of `lists` the last.
fn end_with_last_task(tasks: &mut TaskGraph, lists: Option<&WorkerLists>) {
    let Some(last) = tasks.tasks.len().checked_sub(1) else { return };
    let mut leaves: Vec<u32> = tasks.leaves().into_iter().filter(|task| *task as usize != last).collect();
    if let Some(lists) = lists {
        let places = lists.places(tasks.tasks.len());
        let is_last = |(worker, at): (u32, u32)| at as usize + 1 == lists.lists[worker as usize].len();
        leaves.retain(|task| places[*task as usize].is_none_or(is_last));
    }
    if leaves.is_empty() {
        return;
    }
    let event = tasks.events.len() as u32;
    tasks.events.push(leaves.len() as u32);
    tasks.waits = with_entry(&tasks.waits, &[last as u32], event);
    tasks.triggers = with_entry(&tasks.triggers, &leaves, event);
}

/// No task waits on, or triggers, more events than its descriptor counts.
fn check_task_events(blocks: &ThreadBlockGraph, tasks: &TaskGraph) -> Result<(), CompileError> {
    for (number, task) in tasks.tasks.iter().enumerate() {
        // The last task has an event more of each: see `Link::add_program`.
        let more = usize::from(number + 1 == tasks.tasks.len());
        for (what, lists) in [("waits on", &tasks.waits), ("triggers", &tasks.triggers)] {
            let given = lists.of(number).len() + more;
            if given > MAX_TASK_EVENTS {
                let op = blocks.ops[task.op as usize].name.clone();
                return Err(CompileError::TaskEvents { op, block: task.block, what, given });
            }
        }
    }
    Ok(())
}

/// `lists` with `entry` added to each of the lists `to`, which ascend.
fn with_entry(lists: &task::Lists, to: &[u32], entry: u32) -> task::Lists {
    let mut added = task::Lists::default();
    let mut to = to.iter().peekable();
    let mut list = Vec::new();
    for number in 0..lists.len() {
        list.clear();
        list.extend_from_slice(lists.of(number));
        if to.next_if(|next| **next as usize == number).is_some() {
            list.push(entry);
        }
        added.push(&list);
    }
    added
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two tasks, the second of which waits on `waits` events; the first triggers `triggers`.
    fn judged(waits: usize, triggers: usize) -> Result<(), String> {
        let op = threadblock::BlockOp {
            name: "split".to_owned(),
            grid: [2, 1, 1],
            accesses: Vec::new(),
            row_axis: None,
            rows: 0,
            head_axis: None,
            kernel: None,
        };
        let blocks = ThreadBlockGraph { ops: vec![op], ..Default::default() };
        let events: Vec<u32> = (0..waits.max(triggers) as u32).collect();
        let lists = |first: &[u32], second: &[u32]| {
            let mut lists = task::Lists::default();
            [first, second].into_iter().for_each(|list| lists.push(list));
            lists
        };
        let task = |x| task::Task { op: 0, block: [x, 0, 0] };
        let tasks = TaskGraph {
            tasks: vec![task(0), task(1)],
            waits: lists(&[], &events[..waits]),
            triggers: lists(&events[..triggers], &[]),
            ..Default::default()
        };
        check_task_events(&blocks, &tasks).map_err(|error| error.to_string())
    }

    #[test]
    fn more_events_than_a_task_counts_are_refused() {
        // The second is the last, and waits for the iteration's start too.
        assert_eq!(judged(65_534, 65_535), Ok(()));
        let said = |what| Err(format!("operator split, block {what} events, expected at most 65535"));
        assert_eq!(judged(65_535, 1), said("[1, 0, 0]: waits on 65536"));
        assert_eq!(judged(1, 65_536), said("[0, 0, 0]: triggers 65536"));
    }
}
