//! Static worker lists: whether they can be run to their end, and what they make superfluous.

use super::{Lists, TaskClass, TaskGraph};
use std::collections::{HashSet, VecDeque};
use std::fmt;

/// Which worker runs which tasks, in which order. Just-in-time tasks are in no list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerLists {
    /// Per worker, its tasks in execution order.
    pub lists: Vec<Vec<u32>>,
}

impl WorkerLists {
    /// Per task, its worker and its place in that worker's list; `None` if it is in no list.
    pub fn places(&self, n_tasks: usize) -> Vec<Option<(u32, u32)>> {
        let mut places = vec![None; n_tasks];
        for (worker, list) in self.lists.iter().enumerate() {
            for (at, task) in list.iter().enumerate() {
                if let Some(place) = places.get_mut(*task as usize) {
                    *place = Some((worker as u32, at as u32));
                }
            }
        }
        places
    }
}

/// Lists in program order, the blocks of every operator dealt out one by one. Live by construction: every task waits
/// only on earlier tasks.
pub fn assign_round_robin(graph: &TaskGraph, n_workers: usize) -> WorkerLists {
    let n_workers = n_workers.max(1);
    let mut lists = vec![Vec::new(); n_workers];
    for op in 0..graph.op_first.len().saturating_sub(1) {
        if graph.classes.get(op) == Some(&TaskClass::JustInTime) {
            continue;
        }
        for (i, task) in graph.tasks_of(op).enumerate() {
            lists[i % n_workers].push(task);
        }
    }
    WorkerLists { lists }
}

/// A worker that cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stuck {
    /// The worker; `None` for a just-in-time task that is never launched.
    pub worker: Option<u32>,
    /// The task it stands before.
    pub task: u32,
    /// An event that task waits on.
    pub event: u32,
    /// Triggers that event got.
    pub count: u32,
    /// Triggers it needs.
    pub target: u32,
}

/// A simulated run that did not end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Stall {
    /// Tasks that ran.
    pub executed: u64,
    /// Tasks in all.
    pub tasks: u64,
    /// Who cannot go on, at most [`Stall::REPORTED`] of them.
    pub stuck: Vec<Stuck>,
    /// Tasks that are in no list or in more than one, at most [`Stall::REPORTED`] of them.
    pub misplaced: Vec<u32>,
}

impl Stall {
    /// The most entries of a list in a report.
    pub const REPORTED: usize = 16;
}

impl fmt::Display for Stall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} tasks ran", self.executed, self.tasks)?;
        for task in &self.misplaced {
            write!(f, "; task t{task} is not in exactly one worker's list")?;
        }
        for s in &self.stuck {
            match s.worker {
                Some(worker) => write!(f, "; worker w{worker} stands before t{}", s.task)?,
                None => write!(f, "; just-in-time task t{} is not launched", s.task)?,
            }
            write!(f, ", which waits on e{} at {} of {} triggers", s.event, s.count, s.target)?;
        }
        Ok(())
    }
}

/// Runs the tasks as the workers would, every worker its list in order, just-in-time tasks when their last event fires.
pub fn simulate(graph: &TaskGraph, workers: &WorkerLists) -> Result<(), Stall> {
    let n_tasks = graph.tasks.len();
    let waiters = graph.waits.inverted(graph.events.len());
    let places = workers.places(n_tasks);
    let listed: usize = workers.lists.iter().map(Vec::len).sum();
    let just_in_time = |task: usize| graph.classes.get(graph.tasks[task].op as usize) == Some(&TaskClass::JustInTime);
    let mut stall = Stall { executed: 0, tasks: n_tasks as u64, stuck: Vec::new(), misplaced: Vec::new() };
    let wrong = |task: &usize| places[*task].is_some() == just_in_time(*task);
    stall.misplaced.extend((0..n_tasks).filter(wrong).take(Stall::REPORTED).map(|t| t as u32));
    if listed != places.iter().flatten().count() {
        let repeated = workers.lists.iter().enumerate().flat_map(|(w, list)| {
            let places = &places;
            list.iter().enumerate().filter_map(move |(at, task)| {
                (places.get(*task as usize) != Some(&Some((w as u32, at as u32)))).then_some(*task)
            })
        });
        stall.misplaced.extend(repeated.take(Stall::REPORTED));
    }
    if !stall.misplaced.is_empty() {
        return Err(stall);
    }

    let mut missing: Vec<u32> = (0..n_tasks).map(|t| graph.waits.of(t).len() as u32).collect();
    let mut counts = vec![0u32; graph.events.len()];
    let mut next = vec![0usize; workers.lists.len()];
    let mut ready: VecDeque<u32> = VecDeque::new();
    // An event without triggers stands fired from the start.
    for (event, target) in graph.events.iter().enumerate() {
        if *target == 0 {
            for task in waiters.of(event) {
                missing[*task as usize] -= 1;
            }
        }
    }
    let is_next = |task: u32, next: &[usize]| match places[task as usize] {
        Some((worker, at)) => next[worker as usize] == at as usize,
        None => true,
    };
    ready.extend((0..n_tasks as u32).filter(|t| missing[*t as usize] == 0 && is_next(*t, &next)));
    while let Some(task) = ready.pop_front() {
        stall.executed += 1;
        if let Some((worker, at)) = places[task as usize] {
            next[worker as usize] = at as usize + 1;
            if let Some(follower) = workers.lists[worker as usize].get(at as usize + 1)
                && missing[*follower as usize] == 0
            {
                ready.push_back(*follower);
            }
        }
        for &event in graph.triggers.of(task as usize) {
            counts[event as usize] += 1;
            if counts[event as usize] == graph.events[event as usize] {
                for &waiter in waiters.of(event as usize) {
                    missing[waiter as usize] -= 1;
                    if missing[waiter as usize] == 0 && is_next(waiter, &next) {
                        ready.push_back(waiter);
                    }
                }
            }
        }
    }
    if stall.executed == n_tasks as u64 {
        return Ok(());
    }
    let heads = workers.lists.iter().enumerate().filter_map(|(w, list)| Some((Some(w as u32), *list.get(next[w])?)));
    let unlaunched =
        (0..n_tasks as u32).filter(|t| places[*t as usize].is_none() && missing[*t as usize] > 0).map(|t| (None, t));
    stall.stuck = heads
        .chain(unlaunched)
        .filter_map(|(worker, task)| {
            let unfired = |e: &&u32| counts[**e as usize] < graph.events[**e as usize];
            let event = *graph.waits.of(task as usize).iter().find(unfired)?;
            Some(Stuck { worker, task, event, count: counts[event as usize], target: graph.events[event as usize] })
        })
        .take(Stall::REPORTED)
        .collect();
    Err(stall)
}

/// Drops the waits and triggers that the order of a worker's own list makes superfluous: a task need not wait on an
/// event whose triggers all come earlier on its worker, and need not trigger an event whose waiting tasks all come
/// later on its worker, or that a later task of its worker triggers. Every pair of tasks stays ordered by events and
/// worker order together.
///
/// A task whose triggers all go this way is a leaf to [`TaskGraph::leaves`]: what waits for all leaves waits for a few
/// more tasks than it must.
pub fn elide(graph: &mut TaskGraph, workers: &WorkerLists) {
    let n_tasks = graph.tasks.len();
    let n_events = graph.events.len();
    let places = workers.places(n_tasks);
    let after = |later: u32, earlier: u32| match (places[later as usize], places[earlier as usize]) {
        (Some((w, at)), Some((v, before))) => w == v && before < at,
        _ => false,
    };
    let triggerers = graph.triggers.inverted(n_events);
    let waits = retained(&graph.waits, |task, event| !triggerers.of(event as usize).iter().all(|t| after(task, *t)));
    let waiters = waits.inverted(n_events);
    // Tasks that trigger an event which a later one of their worker triggers, too.
    let mut told_later = HashSet::new();
    let mut last: Vec<Option<u32>> = vec![None; workers.lists.len()];
    for event in 0..n_events {
        for &task in triggerers.of(event) {
            let Some((worker, _)) = places[task as usize] else { continue };
            if let Some(other) = last[worker as usize].replace(task) {
                let is_later = after(task, other);
                told_later.insert((if is_later { other } else { task }, event as u32));
                if !is_later {
                    last[worker as usize] = Some(other);
                }
            }
        }
        for &task in triggerers.of(event) {
            if let Some((worker, _)) = places[task as usize] {
                last[worker as usize] = None;
            }
        }
    }
    let triggers = retained(&graph.triggers, |task, event| {
        !waiters.of(event as usize).iter().all(|t| after(*t, task)) && !told_later.contains(&(task, event))
    });
    // An event nobody waits on lost all its triggers just now; one without triggers has no waiting task left, since
    // each of its triggers came before all of them.
    let mut counts = vec![0u32; n_events];
    for event in &triggers.entries {
        counts[*event as usize] += 1;
    }
    let mut number = vec![0u32; n_events];
    graph.events.clear();
    for (event, count) in counts.iter().enumerate() {
        number[event] = graph.events.len() as u32;
        if *count > 0 {
            graph.events.push(*count);
        }
    }
    let renumbered = |lists: Lists| {
        let mut lists = retained(&lists, |_, event| counts[event as usize] > 0);
        lists.entries.iter_mut().for_each(|event| *event = number[*event as usize]);
        lists
    };
    graph.waits = renumbered(waits);
    graph.triggers = renumbered(triggers);
    graph.stats.events = graph.events.len() as u64;
    graph.stats.waits = graph.waits.entries.len() as u64;
    graph.stats.triggers = graph.triggers.entries.len() as u64;
}

fn retained(lists: &Lists, keep: impl Fn(u32, u32) -> bool) -> Lists {
    let mut out = Lists::default();
    for i in 0..lists.len() {
        out.entries.extend(lists.of(i).iter().filter(|e| keep(i as u32, **e)));
        out.end_list();
    }
    out
}
