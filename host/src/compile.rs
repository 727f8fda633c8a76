//! From kernel graphs to an image: the list of stages, readable top to bottom.

use crate::graph::flags;
use crate::graph::kernel::{GraphError, KernelGraph, Pass};
use crate::graph::lower::{self, Cut, Target};
use crate::graph::task::{self, TaskClass, TaskError, TaskGraph, WorkerLists};
use crate::graph::tensor::BufferKind;
use crate::graph::threadblock::{self, ThreadBlockGraph};
use crate::image::encode::{Parts, encode};
use crate::image::{Image, ImageError};
use crate::parallel::{both, side_by_side};
use crate::schedule::{arena, assign, prefetch};
use perpetua_device::kernels::{Cost, Spec};
use perpetua_shared::event::{EVENT_ARRIVED, EVENT_ITERATION, EventDesc, FIRST_PROGRAM_EVENT};
use perpetua_shared::image::{BindingKind, EVERY_SEQUENCE, ProgramDesc, VERIFIES};
use perpetua_shared::limits::MAX_TASK_EVENTS;
use perpetua_shared::task::{Operand, TaskDesc, TaskFlags};
use perpetua_shared::{BindingId, ProgramId};
use std::collections::HashMap;
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

/// Compiles `sources` into one image. The stages of each program, in order:
/// kernel graph → thread-block graph → tasks and events → worker lists → arena → (checks); then one image of all.
/// Programs know nothing of each other before the image, so they are compiled side by side.
///
/// # Errors
/// The first stage that fails, with what is wrong.
pub fn compile(sources: Vec<Source>, config: &Config) -> Result<Compiled, CompileError> {
    let mut layout = Layout::default();
    let mut programs = Vec::with_capacity(sources.len());
    for planned in side_by_side(sources, 1, |number, source| plan(number, source, config)) {
        let (source, mut program) = planned?;
        layout.add(&source, &program.blocks, &program.arena)?;
        for (name, tensor) in source.graph.outputs() {
            let table = &program.blocks.table;
            let buffer = table[*tensor].buffer.idx();
            let is_flagged = u8::from(table.buffers[buffer].kind == BufferKind::Flagged);
            let whole = Operand { is_flagged, ..crate::graph::kernel::whole_operand(&table[*tensor]) };
            program.outputs.push((name.clone(), layout.place(&program, buffer, whole)));
        }
        let in_token_loop = match source.graph.pass {
            Pass::Batch => EVERY_SEQUENCE,
            Pass::Verify => VERIFIES,
            Pass::Sequence => u32::from(source.in_token_loop),
        };
        layout.sources.push((source.graph.rows, in_token_loop));
        programs.push(program);
    }
    for name in &config.just_in_time {
        if !programs.iter().any(|program| program.blocks.ops.iter().any(|op| is_named(op, name))) {
            return Err(CompileError::JustInTime {
                op: name.clone(),
                why: "there is no operator or kernel of that name",
            });
        }
    }
    let mut clock = Clock::new();
    let image = encode(&layout.parts(&programs, config.target.n_workers))?;
    clock.lap("image");
    if let Some(last) = programs.last_mut() {
        last.stages.append(&mut clock.laps);
    }
    Ok(Compiled { image, bindings: layout.bindings, programs })
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

/// Every just-in-time task has an event that launches it, and is not the last.
fn check_launches(blocks: &ThreadBlockGraph, tasks: &TaskGraph) -> Result<(), CompileError> {
    for (op, class) in tasks.classes.iter().enumerate().filter(|(_, class)| **class == TaskClass::JustInTime) {
        debug_assert_eq!(*class, TaskClass::JustInTime);
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

/// Everything about program `number` that the others do not matter to.
fn plan(number: usize, mut source: Source, config: &Config) -> Result<(Source, Program), CompileError> {
    if !source.graph.is_ended() {
        source.graph.advance()?;
    }
    let mut clock = Clock::new();
    let mut blocks = lower::lower(&source.graph, &config.target).map_err(CompileError::Blocks)?;
    let classes = classes(&blocks, config);
    // In a batch a sequence may have ended, and its tasks write nothing.
    if config.target.has_flags && source.graph.rows == Some(1) && source.graph.pass == Pass::Sequence {
        let is_launched = |op: usize| classes.contains(&(op as u32, TaskClass::JustInTime));
        flags::flag(&mut blocks, |op| !is_launched(op));
    }
    clock.lap("cut");
    let task_config = task::Config { classes, ..Default::default() };
    let mut tasks = task::lower(&blocks, &task_config)?;
    check_launches(&blocks, &tasks)?;
    let by_events = flags::without_flagged(&blocks);
    let has_flagged = by_events != blocks;
    let mut counted = if has_flagged { task::lower(&by_events, &task_config)? } else { tasks.clone() };
    clock.lap("dependencies");
    let costs = task::task_costs(&blocks, &tasks);
    let machine = &config.target.machine;
    // Several rows' products have the tiles' memory for themselves.
    let has_tiles = config.target.has_loaders && source.graph.rows == Some(1);
    let reads = match config.target.has_loaders {
        true if has_tiles => prefetch::reads(&blocks, &tasks, &costs),
        true => prefetch::reads_of_many_rows(&blocks, &tasks, &costs, machine),
        false => Vec::new(),
    };
    let lists = match config.target.cut {
        Cut::TaskBytes => {
            let weight: Vec<u64> =
                costs.iter().map(|cost| cost.bytes_read + cost.bytes_written + cost.flops / 64).collect();
            assign::assign(&tasks, &weight, config.target.n_workers)
        }
        Cut::PerWorker => {
            let bytes = |task: usize| if has_tiles { reads[task].bytes() } else { costs[task].bytes_read };
            let weight: Vec<u64> = (0..costs.len()).map(|task| bytes(task) + costs[task].flops / 64).collect();
            // Without tiles nobody does anything before its turn.
            let ahead = if has_tiles { machine.capacity_bytes() } else { 0 };
            assign::balance(&blocks, &tasks, &weight, config.target.n_workers, ahead)
        }
    };
    clock.lap("workers");
    let outputs: Vec<_> = source.graph.outputs().iter().map(|(_, tensor)| *tensor).collect();
    // Before the arena: what `advance` does not wait for would have to be kept to the end.
    end_with_last_task(&mut tasks, None);
    // Of what flags order nobody need know but a worker's last, which comes after the others.
    end_with_last_task(&mut counted, has_flagged.then_some(&lists));
    let arena = arena::plan(&blocks, &counted, &outputs);
    clock.lap("arena");
    if config.target.cut == Cut::PerWorker {
        task::elide(&mut tasks, &lists);
        task::elide(&mut counted, &lists);
    }
    check_task_events(&blocks, &counted)?;
    clock.lap("last");
    let mut plan = match config.target.has_loaders {
        true => prefetch::plan(&blocks, &tasks, &lists, &reads, machine)?,
        false => prefetch::Plan::default(),
    };
    let takes_memory = |op: u32| blocks.ops[op as usize].takes_memory_for_one_row();
    // Any worker may be the one to run a task that is launched just in time, at the end of its list, too.
    let may_come_last =
        (0..).zip(&tasks.classes).any(|(op, class)| *class == TaskClass::JustInTime && takes_memory(op));
    if source.in_token_loop && source.graph.rows == Some(1) && !may_come_last {
        plan.repeat(|task| takes_memory(tasks.tasks[task as usize].op));
    }
    clock.lap("tiles");
    if config.check {
        // All there is to order; then what events must, by events alone.
        task::check(&blocks, &tasks, Some(&lists)).map_err(CompileError::Dependencies)?;
        task::check(&by_events, &counted, Some(&lists)).map_err(CompileError::Dependencies)?;
        let in_arena = arena::in_arena(&by_events, &arena);
        task::check(&in_arena, &counted, Some(&lists)).map_err(CompileError::Dependencies)?;
        if config.target.has_loaders {
            prefetch::check(&plan, &lists, &reads).map_err(CompileError::Tiles)?;
        }
        clock.lap("check");
    }
    let told = flags::told(&blocks, &tasks);
    let program = Program {
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
        stages: clock.laps,
    };
    Ok((source, program))
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
        // The last task has an event more of each: see `Layout::add_program`.
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

/// The image's memory and descriptors, gathered program by program.
#[derive(Default)]
struct Layout {
    bindings: Vec<Binding>,
    by_name: HashMap<(BindingKind, String), BindingId>,
    /// Per program and buffer, its binding.
    of_buffer: Vec<Vec<BindingId>>,
    sources: Vec<(Option<u32>, u32)>,
    /// Where each program's flagged bytes start.
    flagged_first: Vec<u64>,
}

impl Layout {
    fn binding(&mut self, name: &str, kind: BindingKind, bytes: u64, align_bytes: u32) -> (BindingId, u64) {
        let next = BindingId(self.bindings.len() as u32);
        let id = *self.by_name.entry((kind, name.to_owned())).or_insert(next);
        if id == next {
            self.bindings.push(Binding {
                name: name.to_owned(),
                kind,
                bytes,
                align_bytes,
                contents: None,
                parts: None,
            });
        }
        (id, self.bindings[id.idx()].bytes)
    }

    fn add(&mut self, source: &Source, blocks: &ThreadBlockGraph, arena: &arena::Arena) -> Result<(), CompileError> {
        let (arena_id, arena_bytes) =
            self.binding("arena", BindingKind::Arena, arena.peak_bytes, arena::ALIGN_BYTES as u32);
        self.bindings[arena_id.idx()].bytes = arena_bytes.max(arena.peak_bytes);
        // After those of other programs: a flag counts the runs of one.
        let mut flagged = (None, 0);
        if arena.flagged_bytes > 0 {
            let (id, first) = self.binding("flagged", BindingKind::Flagged, 0, arena::ALIGN_BYTES as u32);
            self.bindings[id.idx()].bytes += arena.flagged_bytes;
            flagged = (Some(id), first);
        }
        self.flagged_first.push(flagged.1);
        // A checkpoint's tensors are used where they lie; only their element's alignment can be hoped for.
        let mut weight_align = vec![1; blocks.table.buffers.len()];
        for tensor in &blocks.table.tensors {
            weight_align[tensor.buffer.idx()] = tensor.dtype.align_bytes() as u32;
        }
        let mut of_buffer = Vec::with_capacity(blocks.table.buffers.len());
        for (buffer, weight_align) in blocks.table.buffers.iter().zip(weight_align) {
            let (kind, align) = match &buffer.kind {
                BufferKind::Intermediate => {
                    of_buffer.push(arena_id);
                    continue;
                }
                BufferKind::Flagged => {
                    of_buffer.push(flagged.0.expect("what is flagged has bytes"));
                    continue;
                }
                BufferKind::Input => (BindingKind::Input, 64),
                BufferKind::Weight | BufferKind::WeightStack(_) => (BindingKind::Weight, weight_align),
                BufferKind::Constant(_) => (BindingKind::Constant, 64),
                BufferKind::State => (BindingKind::State, 256),
                BufferKind::Control => (BindingKind::Control, 64),
                BufferKind::Tokens => (BindingKind::Tokens, 64),
            };
            let (id, bytes) = self.binding(&buffer.name, kind, buffer.bytes, align);
            let known = &mut self.bindings[id.idx()];
            if kind == BindingKind::Tokens {
                // A program that makes no tokens asks for a token buffer of one.
                known.bytes = bytes.max(buffer.bytes);
            } else if bytes != buffer.bytes {
                return Err(CompileError::Binding {
                    name: buffer.name.clone(),
                    program: source.name.clone(),
                    found: buffer.bytes,
                    expected: bytes,
                });
            }
            match &buffer.kind {
                BufferKind::Constant(contents) => known.contents = Some(contents.clone()),
                BufferKind::WeightStack(n) => known.parts = Some(*n),
                _ => {}
            }
            of_buffer.push(id);
        }
        self.of_buffer.push(of_buffer);
        Ok(())
    }

    /// `operand`, which counts from the start of buffer `buffer` of `program`, moved to its binding.
    fn place(&self, program: &Program, buffer: usize, operand: Operand) -> Operand {
        let binding = self.of_buffer[program.id.idx()][buffer];
        let shift = match program.blocks.table.buffers[buffer].kind {
            BufferKind::Intermediate => program.arena.offsets[buffer],
            BufferKind::Flagged => self.flagged_first[program.id.idx()] + program.arena.offsets[buffer],
            _ => 0,
        };
        Operand { binding, offset_bytes: operand.offset_bytes + shift, ..operand }
    }

    fn parts(&self, programs: &[Program], n_workers: u32) -> Parts {
        let mut parts = Parts {
            n_workers,
            bindings: self.bindings.iter().map(Binding::desc).collect(),
            events: vec![EventDesc { num_triggers: 1 }, EventDesc { num_triggers: n_workers }],
            ..Parts::default()
        };
        debug_assert_eq!(parts.events.len(), FIRST_PROGRAM_EVENT.idx());
        // Data ops are as long as all of the others.
        let (data, ()) = both(
            || self.loads(programs, |plan| &plan.data, |op| &mut op.source),
            || {
                for (program, (rows, in_token_loop)) in programs.iter().zip(&self.sources) {
                    self.add_program(&mut parts, program, *rows, *in_token_loop);
                }
            },
        );
        (parts.data_heads, parts.data) = data;
        (parts.prefetch_heads, parts.prefetches) = self.loads(programs, |plan| &plan.prefetches, |op| &mut op.source);
        // Each program's row of heads ends where the next one's starts.
        debug_assert_eq!(parts.list_heads.len(), programs.len() * (n_workers as usize + 2));
        parts
    }

    /// Where those that each worker's loader has in each program start, and all of them: `own` are a plan's, whose `source` becomes a binding.
    fn loads<T: Copy>(
        &self,
        programs: &[Program],
        own: impl Fn(&prefetch::WorkerPlan) -> &[T],
        source: impl Fn(&mut T) -> &mut u32,
    ) -> (Vec<u32>, Vec<T>) {
        let plans = programs.iter().flat_map(|program| &program.plan.workers);
        let (mut heads, mut ops) = (Vec::new(), Vec::with_capacity(plans.map(|plan| own(plan).len()).sum()));
        for program in programs {
            let of_buffer = &self.of_buffer[program.id.idx()];
            for worker in 0..program.lists.lists.len() {
                heads.push(ops.len() as u32);
                let own = program.plan.workers.get(worker).map_or(&[][..], &own);
                ops.extend(own.iter().map(|op| {
                    let mut op = *op;
                    let source = source(&mut op);
                    *source = of_buffer[*source as usize].0;
                    op
                }));
            }
            heads.push(ops.len() as u32);
        }
        (heads, ops)
    }

    fn add_program(&self, parts: &mut Parts, program: &Program, rows: Option<u32>, in_token_loop: u32) {
        let (task_first, event_first) = (parts.tasks.len() as u32, parts.events.len() as u32);
        let op_first = parts.op_names.len() as u32;
        let graph = &program.counted;
        parts.op_names.extend(program.blocks.ops.iter().map(|op| op.name.clone()));
        parts.events.extend(graph.events.iter().map(|n| EventDesc { num_triggers: *n }));
        let mut tiles = vec![0; graph.tasks.len()];
        for compute in program.plan.workers.iter().flat_map(|worker| &worker.computes) {
            tiles[compute.task as usize] += compute.data_end - compute.data_first;
        }
        let mut buffer = Vec::new();
        for (number, task) in graph.tasks.iter().enumerate() {
            let op = &program.blocks.ops[task.op as usize];
            let is_last = number + 1 == graph.tasks.len();
            let (operand_first, wait_first, trigger_first) =
                (parts.operands.len(), parts.waits.len(), parts.triggers.len());
            for (access, operand) in op.accesses.iter().zip(task::task_operands(&program.blocks, task, &mut buffer)) {
                let placed = match access {
                    Some(access) => self.place(program, program.blocks.table[access.tensor].buffer.idx(), *operand),
                    None => *operand,
                };
                parts.operands.push(placed);
            }
            parts.waits.extend(graph.waits.of(number).iter().map(|event| event + event_first));
            parts.triggers.extend(graph.triggers.of(number).iter().map(|event| event + event_first));
            if is_last {
                parts.waits.push(EVENT_ARRIVED.0);
                parts.triggers.push(EVENT_ITERATION.0);
            }
            let row_first = op.row_axis.map_or(0, |axis| {
                threadblock::part(op.rows as usize, task.block[axis as usize], op.grid[axis as usize]).start as u32
            });
            let count = |n: usize| u16::try_from(n).expect("check_task_events has counted");
            let kernel = op.kernel.expect("a kernel graph's operators have macro kernels");
            let is_launched = graph.classes[task.op as usize] == TaskClass::JustInTime;
            let reads_early = !op.early_reads(&program.blocks.table).is_empty();
            let flags = kernel.flags
                | if is_launched { TaskFlags::JUST_IN_TIME } else { 0 }
                | if reads_early { TaskFlags::READS_EARLY } else { 0 };
            parts.tasks.push(TaskDesc {
                task_type: kernel.task_type,
                flags,
                op: op_first + task.op,
                block: task.block,
                row_first,
                operand_first: operand_first as u32,
                operand_count: op.accesses.len() as u32,
                wait_first: wait_first as u32,
                wait_count: count(parts.waits.len() - wait_first),
                trigger_count: count(parts.triggers.len() - trigger_first),
                trigger_first: trigger_first as u32,
                tiles: tiles[number],
                params: kernel.params,
            });
        }
        for list in &program.lists.lists {
            parts.list_heads.push(parts.lists.len() as u32);
            parts.lists.extend(list.iter().map(|task| task + task_first));
        }
        parts.list_heads.push(parts.lists.len() as u32);
        let is_launched = |task: &u32| graph.classes[graph.tasks[*task as usize].op as usize] == TaskClass::JustInTime;
        let launched = (0..graph.tasks.len() as u32).filter(is_launched);
        parts.lists.extend(launched.map(|task| task + task_first));
        parts.list_heads.push(parts.lists.len() as u32);
        parts.programs.push(ProgramDesc {
            max_rows: rows.unwrap_or(u32::MAX),
            task_first,
            task_count: graph.tasks.len() as u32,
            event_first,
            event_count: graph.events.len() as u32,
            in_token_loop,
        });
    }
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
