//! Task graphs as Graphviz text.

use super::TaskGraph;
use crate::graph::threadblock::ThreadBlockGraph;
use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};

/// Graphs of more tasks than this are drawn operator by operator.
pub const MAX_DRAWN_TASKS: usize = 600;

/// What the events say between two operators.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpEdge {
    /// Events that tasks of the one trigger and tasks of the other wait on.
    pub events: u32,
    /// Triggers of those events by the one.
    pub triggers: u32,
    /// Waits on those events by the other.
    pub waits: u32,
}

impl fmt::Display for OpEdge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = |n: u32| if n == 1 { "" } else { "s" };
        let OpEdge { events, triggers, waits } = *self;
        write!(f, "{events} event{}, {triggers} trigger{}, {waits} wait{}", s(events), s(triggers), s(waits))
    }
}

/// The edges between operators, `(earlier, later)`.
pub fn op_edges(tasks: &TaskGraph) -> BTreeMap<(u32, u32), OpEdge> {
    let n_events = tasks.events.len();
    let (triggerers, waiters) = (tasks.triggers.inverted(n_events), tasks.waits.inverted(n_events));
    // Per event, how many tasks of each operator are in a list; operators are contiguous in it.
    let by_op = |list: &[u32]| -> Vec<(u32, u32)> {
        let mut ops: Vec<(u32, u32)> = Vec::new();
        for task in list {
            let op = tasks.tasks[*task as usize].op;
            match ops.last_mut() {
                Some((last, n)) if *last == op => *n += 1,
                _ => ops.push((op, 1)),
            }
        }
        ops
    };
    let mut edges: BTreeMap<(u32, u32), OpEdge> = BTreeMap::new();
    for event in 0..n_events {
        let consumers = by_op(waiters.of(event));
        for (producer, triggers) in by_op(triggerers.of(event)) {
            for (consumer, waits) in &consumers {
                let edge = edges.entry((producer, *consumer)).or_default();
                edge.events += 1;
                edge.triggers += triggers;
                edge.waits += waits;
            }
        }
    }
    edges
}

/// Writes `tasks`: every task and event, or for large graphs every operator.
pub fn write_dot(graph: &ThreadBlockGraph, tasks: &TaskGraph, out: &mut dyn Write) -> io::Result<()> {
    let quoted = |text: &str| format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""));
    writeln!(out, "digraph tasks {{\n  rankdir=TB;\n  node [shape=box, fontname=\"sans-serif\"];")?;
    if tasks.tasks.len() > MAX_DRAWN_TASKS {
        for (i, op) in graph.ops.iter().enumerate() {
            let [x, y, z] = op.grid;
            writeln!(out, "  op{i} [label={}];", quoted(&format!("{}\n{x}x{y}x{z}", op.name)).replace('\n', "\\n"))?;
        }
        for ((producer, consumer), edge) in op_edges(tasks) {
            writeln!(out, "  op{producer} -> op{consumer} [label=\"{edge}\"];")?;
        }
        return writeln!(out, "}}");
    }
    for (i, op) in graph.ops.iter().enumerate() {
        writeln!(out, "  subgraph cluster_{i} {{ label={};", quoted(&op.name))?;
        for task in tasks.tasks_of(i) {
            let [x, y, z] = tasks.tasks[task as usize].block;
            writeln!(out, "    t{task} [label=\"t{task} [{x},{y},{z}]\"];")?;
        }
        writeln!(out, "  }}")?;
    }
    for (event, n) in tasks.events.iter().enumerate() {
        writeln!(out, "  e{event} [shape=circle, label=\"e{event}\\n{n}\"];")?;
    }
    for task in 0..tasks.tasks.len() {
        for event in tasks.triggers.of(task) {
            writeln!(out, "  t{task} -> e{event};")?;
        }
        for event in tasks.waits.of(task) {
            writeln!(out, "  e{event} -> t{task};")?;
        }
    }
    writeln!(out, "}}")
}
