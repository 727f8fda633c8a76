//! The rules of an image, judged on its bytes alone.
//!
//! 1. *Memory.* Every operand is a box inside its binding, aligned for its dtype; only memory made to be written is
//!    written; each task's operands satisfy its macro kernel's `check`.
//! 2. *Indices.* Every range of operands, waits and triggers lies in its table; every event belongs to the program of
//!    the task that names it, except the loop's own, which only `advance` uses.
//! 3. *Counts.* An event is triggered exactly `num_triggers` times in a run of its program. Each task stands in exactly
//!    one list, once: a just-in-time task, which waits on an event at least, in the program's list of these, in program
//!    order, any other in a worker's. `advance` is a worker's.
//! 4. *Live.* The lists and the events of each program admit a complete run with every worker resident (simulated),
//!    even if just-in-time tasks are launched one after the other, in order.
//! 5. *End.* `advance` is each program's last task, turns the control block and comes after every other: no task of an
//!    iteration can be running when the next begins.
//!
//! 6. *Sequences.* At most one program is for batches, and every `State` and `Tokens` binding is as many equal parts as
//!    it has rows. A task of a sequence, which only that program has, touches the sequence's part of them; a task of
//!    another program the first, which stands for any; `advance` of the program for batches all, and no other task of
//!    it any.
//!
//! 7. *Loads.* See [`loads`](super::loads): a loader's copies come from weights, land where nothing is in use that is
//!    still to be read, never wait for each other in a circle, nor for what a body may hold until they are there, and
//!    are, in order, the tiles that the tasks of its list take. What is brought ahead of a pass, of one row, are its
//!    first tiles, which wait for nothing in it and land where none of the last ones of the pass before is that may be
//!    unread; and with all tiles of its list taken a worker has no task that takes all of the memory for itself.
//!
//! 8. *Flags.* An operand is flagged exactly if its binding is. Each flagged element is written by one task, in every
//!    run of its program, a pass of one row, and read by tasks of that program alone, none of them just-in-time; who
//!    reads it waits for who writes it, as rule 4 has it. It orders nothing else: of rule 5 it is no part.
//!
//! 9. *Drafts.* At most one program verifies drafts, and its `advance`, and no other, is given the token that each of
//!    its rows chose. A task of a row is of one of its rows, which no other program has.
//!
//! That overlapping accesses are ordered (law 1) is judged on the graph, where their sizes are known.

use super::Image;
use super::flagged::Writers;
use crate::parallel::{both, side_by_side};
use perpetua_device::kernels::{Advance, Numbered, Spec, Use};
use perpetua_shared::control::Control;
use perpetua_shared::event::{EVENT_ARRIVED, EVENT_ITERATION, FIRST_PROGRAM_EVENT};
use perpetua_shared::image::{BindingKind, EVERY_SEQUENCE, ProgramDesc, VERIFIES};
use perpetua_shared::limits::{MAX_OPERANDS, MAX_PROGRAMS, MAX_RANK, MAX_SEQUENCES, MAX_TASKS};
use perpetua_shared::task::{Operand, TaskDesc};
use perpetua_shared::{DType, TaskFlags, WorkerId};
use std::fmt;
use std::ops::Range;

/// A rule that an image breaks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Where: a task, an event, a binding.
    pub at: String,
    /// What is wrong and what is expected.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.at, self.what)
    }
}

/// Violations after which there is no point in looking further.
const ENOUGH: usize = 20;

/// Tasks that are judged together: enough to be worth a thread's while.
const PART: usize = 2048;

struct Judge<'a> {
    image: &'a Image,
    broken: Vec<Violation>,
}

/// Judges every rule; see the module head.
pub(super) fn check(image: &Image) -> Result<(), Vec<Violation>> {
    let mut judge = Judge { image, broken: Vec::new() };
    judge.names();
    judge.bindings();
    // Later rules follow indices that earlier ones have found in range.
    if judge.broken.is_empty() {
        judge.programs();
    }
    if judge.broken.is_empty() {
        judge.tasks();
    }
    if judge.broken.is_empty() {
        judge.lists();
    }
    if judge.broken.is_empty() {
        // Loaders know nothing of events, nor events of loaders.
        let (loads, events) = both(|| super::loads::check(image), || Judge::of_events(image));
        match loads {
            Ok(()) => judge.broken = events,
            Err((at, what)) => judge.report(at, what),
        }
    }
    if judge.broken.is_empty() { Ok(()) } else { Err(judge.broken) }
}

impl Judge<'_> {
    /// What is broken of the rules of events and flags.
    fn of_events(image: &Image) -> Vec<Violation> {
        let mut judge = Judge { image, broken: Vec::new() };
        judge.events();
        if judge.broken.is_empty() {
            match super::flagged::check(image) {
                Ok(writers) => judge.runs(&writers),
                Err((at, what)) => judge.report(at, what),
            }
        }
        judge.broken
    }

    fn report(&mut self, at: impl fmt::Display, what: String) {
        if self.broken.len() < ENOUGH {
            self.broken.push(Violation { at: at.to_string(), what });
        }
    }

    fn names(&mut self) {
        let heads: &[u32] = self.image.section(&self.image.sections.name_heads);
        let names: &[u8] = self.image.section(&self.image.sections.names);
        if heads[0] != 0 || *heads.last().unwrap_or(&0) as usize != names.len() || !heads.is_sorted() {
            return self.report("names", "their heads do not cut the section into pieces".to_owned());
        }
        for (op, ends) in heads.windows(2).enumerate() {
            if std::str::from_utf8(&names[ends[0] as usize..ends[1] as usize]).is_err() {
                self.report(format_args!("name of operator {op}"), "is no UTF-8".to_owned());
            }
        }
    }

    fn bindings(&mut self) {
        let mut seen = [0u32; 2];
        for (number, binding) in self.image.bindings().iter().enumerate() {
            let at = format!("b{number}");
            match BindingKind::from_u32(binding.kind) {
                None => self.report(&at, format!("kind {} is unknown", binding.kind)),
                Some(BindingKind::Control) => {
                    seen[0] += 1;
                    if binding.bytes != size_of::<Control>() as u64 {
                        self.report(
                            &at,
                            format!("{} bytes, the control block has {}", binding.bytes, size_of::<Control>()),
                        );
                    }
                }
                Some(BindingKind::Tokens) => seen[1] += 1,
                Some(_) => {}
            }
            if !binding.align_bytes.is_power_of_two() || binding.align_bytes > 4096 {
                self.report(&at, format!("alignment {}, expected a power of two up to 4096", binding.align_bytes));
            }
            if binding.bytes > 1 << 48 {
                self.report(&at, format!("{} bytes, expected at most 2^48", binding.bytes));
            }
        }
        if seen != [1, 1] {
            self.report(
                "bindings",
                format!("{} control blocks and {} token buffers, expected one of each", seen[0], seen[1]),
            );
        }
    }

    fn programs(&mut self) {
        let view = self.image.view();
        if view.programs.is_empty() || view.programs.len() > MAX_PROGRAMS || view.tasks.len() > MAX_TASKS {
            let what = format!(
                "{} programs and {} tasks, expected 1 to {MAX_PROGRAMS} and at most {MAX_TASKS}",
                view.programs.len(),
                view.tasks.len()
            );
            return self.report("image", what);
        }
        let mut next = (0u64, u64::from(FIRST_PROGRAM_EVENT.0));
        for (number, program) in view.programs.iter().enumerate() {
            let first = (u64::from(program.task_first), u64::from(program.event_first));
            if first != next || program.task_count == 0 {
                self.report(
                    format_args!("p{number}"),
                    format!("starts at task and event {first:?}, expected {next:?}"),
                );
            }
            if program.max_rows == 0 {
                self.report(format_args!("p{number}"), "takes no rows".to_owned());
            }
            if program.kind > VERIFIES {
                let what = format!("is of kind {}, expected 0 to {VERIFIES}", program.kind);
                self.report(format_args!("p{number}"), what);
            }
            if program.kind == EVERY_SEQUENCE && program.max_rows as usize > MAX_SEQUENCES {
                let what = format!("is for {} sequences, expected at most {MAX_SEQUENCES}", program.max_rows);
                self.report(format_args!("p{number}"), what);
            }
            next = (first.0 + u64::from(program.task_count), first.1 + u64::from(program.event_count));
        }
        for (kind, what) in [(EVERY_SEQUENCE, "are for batches"), (VERIFIES, "verify drafts")] {
            let n = view.programs.iter().filter(|p| p.kind == kind).count();
            if n > 1 {
                self.report("programs", format!("{n} of them {what}, expected at most 1"));
            }
        }
        let sequences = self.image.sequences() as u64;
        for (number, binding) in self.image.bindings().iter().enumerate() {
            if self.image.part_bytes(number) * sequences.max(1) != binding.bytes && self.image.part_bytes(number) > 0 {
                self.report(format_args!("b{number}"), format!("{} bytes, not {sequences} equal parts", binding.bytes));
            }
        }
        if next != (view.tasks.len() as u64, view.events.len() as u64) {
            let found = (view.tasks.len(), view.events.len());
            self.report("programs", format!("cover {next:?} tasks and events of {found:?}"));
        }
    }

    fn tasks(&mut self) {
        let programs = self.image.view().programs.iter().enumerate();
        let parts = programs.flat_map(|(number, program)| {
            let (first, end) = (program.task_first, program.task_first + program.task_count);
            (first..end).step_by(PART).map(move |at| (number, at..end.min(at + PART as u32)))
        });
        let judge = &*self;
        let found = side_by_side(parts.collect(), 1, |_, (number, ids)| judge.tasks_of(number, ids));
        self.broken.extend(found.into_iter().flatten().take(ENOUGH));
    }

    /// What is broken of tasks `ids` of program `number`.
    fn tasks_of(&self, number: usize, ids: Range<u32>) -> Vec<Violation> {
        let view = self.image.view();
        let program = &view.programs[number];
        let own = program.event_first..program.event_first + program.event_count;
        let last = program.task_first + program.task_count - 1;
        let found = ids.filter_map(|id| {
            let (task, is_last) = (&view.tasks[id as usize], id == last);
            let what = self.task(task, is_last, &own);
            let what = what.and_then(|()| self.sequence(program, task, is_last));
            let what = what.and_then(|()| self.drafts(program, task, is_last)).err()?;
            let at = format!("p{number} t{id} ({}, block {:?})", self.image.op_name(task.op), task.block);
            Some(Violation { at, what })
        });
        found.take(ENOUGH).collect()
    }

    fn task(&self, task: &TaskDesc, is_last: bool, own: &Range<u32>) -> Result<(), String> {
        let view = self.image.view();
        let inside = |first: u32, count: u64, len: usize| u64::from(first) + count <= len as u64;
        if !inside(task.operand_first, u64::from(task.operand_count), view.operands.len())
            || !inside(task.wait_first, u64::from(task.wait_count), view.waits.len())
            || !inside(task.trigger_first, u64::from(task.trigger_count), view.triggers.len())
            || task.operand_count as usize > MAX_OPERANDS
            || task.op >= self.image.header().n_ops
        {
            return Err("names operands, waits, triggers or an operator outside their tables".to_owned());
        }
        let spec = Spec::of(task.task_type).ok_or_else(|| format!("macro kernel {} does not exist", task.task_type))?;
        if (task.task_type == Advance::TASK_TYPE) != is_last {
            return Err("`advance` must be the last task of a program, and no other".to_owned());
        }
        for (slot, operand) in spec.slots.iter().zip(view.operands(task)) {
            self.operand(operand, slot.usage).map_err(|what| format!("operand `{}`: {what}", slot.name))?;
        }
        spec.check(&task.params, view.operands(task))?;
        if task.flags & TaskFlags::JUST_IN_TIME != 0 && (is_last || view.waits(task).is_empty()) {
            return Err("is just-in-time, and nothing or everything comes before it: it would be launched by no event"
                .to_owned());
        }
        let is_weight = |o: &Operand| self.image.bindings()[o.binding.idx()].kind == BindingKind::Weight as u32;
        let mut early = spec.early_reads.iter().map(|slot| &view.operands(task)[*slot]);
        if task.flags & TaskFlags::READS_EARLY != 0 && !early.all(is_weight) {
            return Err("reads early what is no weight, and may not be there yet".to_owned());
        }
        let foreign = |event: &&u32, loops_own: u32| !(own.contains(event) || is_last && **event == loops_own);
        if let Some(event) = view.waits(task).iter().find(|e| foreign(e, EVENT_ARRIVED.0)) {
            return Err(format!("waits on e{event}, which is not its program's"));
        }
        if let Some(event) = view.triggers(task).iter().find(|e| foreign(e, EVENT_ITERATION.0)) {
            return Err(format!("triggers e{event}, which is not its program's"));
        }
        let control = view.operands(task).last().filter(|_| is_last);
        if control.is_some_and(|o| self.image.bindings()[o.binding.idx()].kind != BindingKind::Control as u32) {
            return Err("must turn the control block, or the loop would not end".to_owned());
        }
        if is_last && (!view.waits(task).contains(&EVENT_ARRIVED.0) || view.triggers(task) != [EVENT_ITERATION.0]) {
            return Err("must wait on the workers' arrival and trigger the iteration's event".to_owned());
        }
        Ok(())
    }

    /// Rule 9.
    fn drafts(&self, program: &ProgramDesc, task: &TaskDesc, is_last: bool) -> Result<(), String> {
        let verifies = program.kind == VERIFIES;
        if TaskFlags::row(task.flags).is_some_and(|row| !verifies || row >= program.max_rows) {
            return Err("belongs to a row of drafts that its program does not have".to_owned());
        }
        if !is_last {
            return Ok(());
        }
        let given = self.image.view().operands(task).get(1).filter(|chosen| chosen.is_present());
        match given.map(|chosen| chosen.extent[0]) {
            None if verifies => Err("is given no tokens chosen, and its program verifies drafts".to_owned()),
            Some(rows) if !verifies || rows != program.max_rows => {
                Err(format!("is given the tokens chosen of {rows} rows, which its program does not verify"))
            }
            _ => Ok(()),
        }
    }

    /// Rule 6. The operands have been found in their bindings.
    fn sequence(&self, program: &ProgramDesc, task: &TaskDesc, is_last: bool) -> Result<(), String> {
        let is_batch = program.kind == EVERY_SEQUENCE;
        let sequence = TaskFlags::sequence(task.flags);
        if sequence.is_some_and(|number| !is_batch || number >= program.max_rows as usize) {
            return Err("belongs to a sequence that its program does not have".to_owned());
        }
        if is_batch && is_last {
            return Ok(());
        }
        for operand in self.image.view().operands(task).iter().filter(|operand| operand.is_present()) {
            let part = self.image.part_bytes(operand.binding.idx());
            if part == 0 {
                continue;
            }
            let first = match sequence {
                None if is_batch => return Err(format!("touches {}, and belongs to no sequence", operand.binding)),
                number => part * number.unwrap_or(0) as u64,
            };
            let bytes = operand.offset_bytes..operand.offset_bytes + operand.span_bytes();
            if bytes.start < first || bytes.end > first + part {
                return Err(format!("touches bytes {bytes:?} of {}, not its sequence's part", operand.binding));
            }
        }
        Ok(())
    }

    fn operand(&self, operand: &Operand, usage: Use) -> Result<(), String> {
        if !operand.is_present() {
            // Executors look up its binding before they see that it is not there.
            let absent = *operand == Operand::ABSENT;
            return absent.then_some(()).ok_or_else(|| "is absent, and says where it lies".to_owned());
        }
        let dtype = operand.dtype().ok_or_else(|| format!("dtype {} is unknown", operand.dtype))?;
        if operand.dtype > u16::from(u8::MAX) || usize::from(operand.rank) > MAX_RANK {
            return Err(format!("dtype {} or rank {} is out of range", operand.dtype, operand.rank));
        }
        let binding = self
            .image
            .bindings()
            .get(operand.binding.idx())
            .ok_or_else(|| format!("binding {} does not exist", operand.binding))?;
        let size = dtype.size_bytes() as u64;
        let align = dtype.align_bytes() as u64;
        if !operand.offset_bytes.is_multiple_of(align) || u64::from(binding.align_bytes) < align {
            return Err(format!("byte {} of {} is not aligned for {dtype}", operand.offset_bytes, operand.binding));
        }
        let beyond = operand.rank as usize..MAX_RANK;
        if operand.extent[beyond.clone()].iter().any(|n| *n != 1)
            || operand.stride_elems[beyond].iter().any(|s| *s != 0)
        {
            return Err(format!("has extents or strides beyond its rank {}", operand.rank));
        }
        // In u128: hostile extents and strides must not wrap.
        let mut last = 0u128;
        let mut empty = false;
        for (n, stride) in operand.extent.iter().zip(&operand.stride_elems) {
            empty |= *n == 0;
            last += u128::from(n.saturating_sub(1)) * u128::from(*stride);
        }
        if let Some(lines) = dtype.lines()
            && operand.rank >= 2
        {
            // A row is one thing, scales and all.
            let k = usize::from(operand.rank) - 1;
            let steps = operand.extent[..k].iter().zip(&operand.stride_elems);
            last = steps.map(|(n, stride)| u128::from(n.saturating_sub(1)) * u128::from(*stride)).sum::<u128>()
                + lines.row_bytes(operand.extent[k] as usize) as u128
                - 1;
        }
        let end = u128::from(operand.offset_bytes) + if empty { 0 } else { (last + 1) * u128::from(size) };
        if end > u128::from(binding.bytes) {
            return Err(format!("ends at byte {end} of {}, which has {}", operand.binding, binding.bytes));
        }
        let kind = BindingKind::from_u32(binding.kind);
        let constant = matches!(kind, Some(BindingKind::Weight | BindingKind::Constant | BindingKind::Input));
        if usage != Use::Read && constant {
            return Err(format!("writes {}, which is read-only", operand.binding));
        }
        if kind == Some(BindingKind::Control) && dtype != DType::U32 {
            return Err("touches the control block other than as words".to_owned());
        }
        Ok(())
    }

    fn lists(&mut self) {
        let view = self.image.view();
        let per_program = view.n_workers as usize + 2;
        if view.list_heads.first() != Some(&0) || !view.list_heads.is_sorted() {
            return self.report("lists", "their heads do not ascend from 0".to_owned());
        }
        if view.list_heads.last().copied().unwrap_or(0) as usize != view.lists.len() {
            return self.report("lists", "their heads do not end where the lists do".to_owned());
        }
        for (number, program) in view.programs.iter().enumerate() {
            let heads = &view.list_heads[number * per_program..][..per_program];
            let next_starts = view.list_heads.get((number + 1) * per_program).copied();
            if next_starts.is_some_and(|start| start != heads[per_program - 1]) {
                self.report(
                    format_args!("p{number}"),
                    "its lists do not end where the next program's start".to_owned(),
                );
            }
            let mut seen = vec![false; program.task_count as usize];
            for &id in &view.lists[heads[0] as usize..heads[per_program - 1] as usize] {
                match id.checked_sub(program.task_first).and_then(|at| seen.get_mut(at as usize)) {
                    Some(seen) if !*seen => *seen = true,
                    Some(_) => self.report(format_args!("t{id}"), "stands in the lists twice".to_owned()),
                    None => self.report(format_args!("t{id}"), format!("is not a task of p{number}")),
                }
            }
            if let Some(missing) = seen.iter().position(|seen| !seen) {
                let id = program.task_first as usize + missing;
                self.report(format_args!("t{id}"), "stands in no list".to_owned());
            }
            let launched = view.just_in_time(number);
            if !launched.is_sorted() {
                self.report(format_args!("p{number}"), "its just-in-time tasks are not in program order".to_owned());
            }
            let is_launched = |id: &u32| view.tasks[*id as usize].flags & TaskFlags::JUST_IN_TIME != 0;
            let n_launched = (program.task_first..program.task_first + program.task_count).filter(is_launched).count();
            let in_range = |id: &u32| (*id as usize) < view.tasks.len();
            let n_listed = launched.iter().copied().filter(in_range).filter(is_launched).count();
            if n_launched != launched.len() || n_listed != n_launched {
                let what = format!("{n_launched} tasks say they are just-in-time, and its list of these is another");
                self.report(format_args!("p{number}"), what);
            }
        }
    }

    fn events(&mut self) {
        let view = self.image.view();
        let mut counts = vec![0u64; view.events.len()];
        for task in view.tasks {
            view.triggers(task).iter().for_each(|event| counts[*event as usize] += 1);
        }
        counts[EVENT_ITERATION.idx()] = 1;
        counts[EVENT_ARRIVED.idx()] = u64::from(view.n_workers);
        for (event, (desc, count)) in view.events.iter().zip(counts).enumerate() {
            if u64::from(desc.num_triggers) != count || count == 0 {
                self.report(
                    format_args!("e{event}"),
                    format!("fires at {} triggers, but {count} tasks trigger it", desc.num_triggers),
                );
            }
        }
    }

    /// Runs each program's lists against its events and flags, and walks back from `advance`.
    fn runs(&mut self, writers: &Writers) {
        let view = self.image.view();
        for (number, program) in view.programs.iter().enumerate() {
            let mut counts = vec![0u32; view.events.len()];
            counts[EVENT_ARRIVED.idx()] = view.n_workers;
            // The last is the scheduler's, and launched tasks run at once: workers that wait take them.
            let lists: Vec<&[u32]> = (0..=view.n_workers).map(|w| view.list(number, WorkerId(w))).collect();
            let mut next = vec![0usize; lists.len()];
            // Workers blocked on an event, and workers that may go on.
            let mut blocked: Vec<Vec<usize>> = vec![Vec::new(); view.events.len()];
            // Likewise on a task that writes what the next one reads; how many of each list of these have been seen
            // done.
            let first = program.task_first;
            let mut is_done = vec![false; program.task_count as usize];
            let mut reading: Vec<Vec<usize>> = vec![Vec::new(); program.task_count as usize];
            let mut seen = vec![0; writers.lists().len()];
            let mut ready: Vec<usize> = (0..lists.len()).collect();
            let fired = |counts: &[u32], event: u32| counts[event as usize] >= view.events[event as usize].num_triggers;
            let mut done = 0u32;
            while let Some(worker) = ready.pop() {
                while let Some(&id) = lists[worker].get(next[worker]) {
                    let task = &view.tasks[id as usize];
                    if let Some(&event) = view.waits(task).iter().find(|e| !fired(&counts, **e)) {
                        blocked[event as usize].push(worker);
                        break;
                    }
                    let missing = writers.of(id).iter().find_map(|list| {
                        let (list, seen) = (&writers.lists()[*list as usize], &mut seen[*list as usize]);
                        *seen += list[*seen..].iter().take_while(|of| is_done[(**of - first) as usize]).count();
                        list.get(*seen)
                    });
                    if let Some(of) = missing {
                        reading[(of - first) as usize].push(worker);
                        break;
                    }
                    is_done[(id - first) as usize] = true;
                    ready.append(&mut reading[(id - first) as usize]);
                    next[worker] += 1;
                    done += 1;
                    for &event in view.triggers(task) {
                        counts[event as usize] += 1;
                        if fired(&counts, event) {
                            ready.append(&mut blocked[event as usize]);
                        }
                    }
                }
            }
            if done != program.task_count {
                let stuck =
                    lists.iter().zip(&next).enumerate().filter_map(|(w, (list, at))| Some((w, *list.get(*at)?)));
                let name = |w| if w == view.n_workers as usize { "the scheduler".to_owned() } else { format!("w{w}") };
                let stuck: Vec<String> = stuck.take(4).map(|(w, id)| format!("{} at t{id}", name(w))).collect();
                let what = format!("stops after {done} of {} tasks: {}", program.task_count, stuck.join(", "));
                return self.report(format_args!("p{number}"), what);
            }
            self.end(number);
        }
    }

    /// Every task comes before `advance`: by events, or by standing earlier in the list of a task that does.
    fn end(&mut self, number: usize) {
        let view = self.image.view();
        let program = &view.programs[number];
        let first = program.task_first;
        let mut before = vec![None; program.task_count as usize];
        for worker in 0..view.n_workers {
            for pair in view.list(number, WorkerId(worker)).windows(2) {
                before[(pair[1] - first) as usize] = Some(pair[0]);
            }
        }
        let mut producers: Vec<Vec<u32>> = vec![Vec::new(); program.event_count as usize];
        for id in first..first + program.task_count {
            for event in view.triggers(&view.tasks[id as usize]) {
                if let Some(of) = event.checked_sub(program.event_first).and_then(|e| producers.get_mut(e as usize)) {
                    of.push(id);
                }
            }
        }
        let mut seen = vec![false; program.task_count as usize];
        let mut stack = vec![first + program.task_count - 1];
        seen[program.task_count as usize - 1] = true;
        while let Some(id) = stack.pop() {
            let mut visit = |id: u32| {
                if !std::mem::replace(&mut seen[(id - first) as usize], true) {
                    stack.push(id);
                }
            };
            before[(id - first) as usize].into_iter().for_each(&mut visit);
            for event in view.waits(&view.tasks[id as usize]) {
                if let Some(of) = event.checked_sub(program.event_first).and_then(|e| producers.get_mut(e as usize)) {
                    // Taken out: each event's producers need to be visited once.
                    std::mem::take(of).into_iter().for_each(&mut visit);
                }
            }
        }
        if let Some(loose) = seen.iter().position(|seen| !seen) {
            let id = first + loose as u32;
            self.report(self.image.task_name(id), "may still run when `advance` ends the iteration".to_owned());
        }
    }
}
