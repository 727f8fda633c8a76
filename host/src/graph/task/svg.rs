//! Task graphs as a picture: operators as rows of tasks from top to bottom, events between them; for large graphs rows
//! only, with what the events say between operators beside them.

use super::dot::op_edges;
use super::{TaskClass, TaskGraph};
use crate::graph::threadblock::ThreadBlockGraph;
use std::io::{self, Write};

/// Rows of at most this many tasks are drawn with their events.
const MAX_ROW: usize = 48;
/// Rows drawn with their events at most.
const MAX_ROWS: usize = 40;

const INK: &str = "#1f2933";
const TASK: &str = "#cfe3f5";
const LATE_TASK: &str = "#f8dcb4";
const EVENT: &str = "#d9480f";
pub(crate) const LINE: &str = "#829ab1";

pub(crate) fn escaped(text: &str) -> String {
    // Of control characters XML has but three.
    let text = text.replace(|c: char| c.is_control() && !"\t\n\r".contains(c), "\u{fffd}");
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The head of a picture.
pub(crate) fn open(width: f64, height: f64, out: &mut dyn Write) -> io::Result<()> {
    writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
         viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"sans-serif\" font-size=\"12\" fill=\"{INK}\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>"
    )
}

fn fill(tasks: &TaskGraph, op: usize) -> &'static str {
    if tasks.classes.get(op) == Some(&TaskClass::JustInTime) { LATE_TASK } else { TASK }
}

/// Writes `tasks`.
pub fn write_svg(graph: &ThreadBlockGraph, tasks: &TaskGraph, out: &mut dyn Write) -> io::Result<()> {
    let longest = (0..graph.ops.len()).map(|op| tasks.tasks_of(op).len()).max().unwrap_or(0);
    if graph.ops.len() <= MAX_ROWS && longest <= MAX_ROW {
        write_tasks(graph, tasks, longest, out)
    } else {
        write_ops(graph, tasks, longest, out)
    }
}

fn name_width(graph: &ThreadBlockGraph) -> f64 {
    let longest = graph.ops.iter().map(|op| op.name.chars().count()).max().unwrap_or(0);
    24.0 + 7.0 * longest.clamp(10, 40) as f64
}

/// Every task a box, every event a dot above the first task that waits on it.
fn write_tasks(graph: &ThreadBlockGraph, tasks: &TaskGraph, longest: usize, out: &mut dyn Write) -> io::Result<()> {
    let (left, cell, row) = (name_width(graph), 34.0, 116.0);
    let width = left + cell * longest.max(6) as f64 + 20.0;
    open(width, row * graph.ops.len() as f64 + 12.0, out)?;
    let middle = left + (width - left - 20.0) / 2.0;
    // A row is centred, so that fans between rows of different lengths are even.
    let place = |task: u32| -> (f64, f64) {
        let op = tasks.tasks[task as usize].op as usize;
        let of_op = tasks.tasks_of(op);
        let at = f64::from(task - of_op.start) + 0.5 - of_op.len() as f64 / 2.0;
        (middle + at * cell, 60.0 + op as f64 * row)
    };
    let n_events = tasks.events.len();
    let (triggerers, waiters) = (tasks.triggers.inverted(n_events), tasks.waits.inverted(n_events));
    // Where each event stands: over the first row that waits on it, at the mean of those it serves. Two at one place
    // are moved apart.
    let mut spots: Vec<(f64, f64)> = Vec::with_capacity(n_events);
    let mut taken: std::collections::HashSet<(i64, i64)> = std::collections::HashSet::new();
    for event in 0..n_events {
        let first = waiters.of(event).first().map_or(0, |t| tasks.tasks[*t as usize].op);
        let served: Vec<f64> =
            waiters.of(event).iter().filter(|t| tasks.tasks[**t as usize].op == first).map(|t| place(*t).0).collect();
        let mut x = served.iter().sum::<f64>() / served.len().max(1) as f64;
        let y = 60.0 + f64::from(first) * row - 44.0;
        while !taken.insert(((x / 14.0).round() as i64, y as i64)) {
            x += 14.0;
        }
        spots.push((x, y));
    }
    writeln!(out, "<g fill=\"none\" stroke=\"{LINE}\" stroke-width=\"0.8\" stroke-opacity=\"0.75\">")?;
    for (event, (ex, ey)) in spots.iter().enumerate() {
        for task in triggerers.of(event) {
            let (x, y) = place(*task);
            let (y, bend) = (y + 12.0, (ey - y - 12.0) / 2.0);
            writeln!(
                out,
                "<path d=\"M{x:.1} {y:.1}C{x:.1} {:.1} {ex:.1} {:.1} {ex:.1} {ey:.1}\"/>",
                y + bend,
                ey - bend
            )?;
        }
        for task in waiters.of(event) {
            let (x, y) = place(*task);
            let y = y - 12.0;
            writeln!(
                out,
                "<path d=\"M{ex:.1} {ey:.1}C{ex:.1} {:.1} {x:.1} {:.1} {x:.1} {y:.1}\"/>",
                ey + 14.0,
                y - 14.0
            )?;
        }
    }
    writeln!(out, "</g>\n<g text-anchor=\"middle\" font-size=\"9\">")?;
    for (event, (x, y)) in spots.iter().enumerate() {
        let n = tasks.events[event];
        writeln!(
            out,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"6.5\" fill=\"{EVENT}\"><title>event {event}: {n} triggers, {} \
             waits</title></circle><text x=\"{x:.1}\" y=\"{:.1}\" fill=\"white\" font-size=\"7\">{n}</text>",
            waiters.of(event).len(),
            y + 2.5
        )?;
    }
    for task in 0..tasks.tasks.len() as u32 {
        let (x, y) = place(task);
        let what = tasks.tasks[task as usize];
        let name = escaped(&graph.ops[what.op as usize].name);
        writeln!(
            out,
            "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"24\" rx=\"4\" fill=\"{}\" stroke=\"{INK}\" \
             stroke-width=\"0.6\"><title>task {task}: {name} {:?}</title></rect><text x=\"{x:.1}\" y=\"{:.1}\">{task}</text>",
            x - cell / 2.0 + 2.0,
            y - 12.0,
            cell - 4.0,
            fill(tasks, what.op as usize),
            what.block,
            y + 3.5
        )?;
    }
    writeln!(out, "</g>")?;
    for (i, op) in graph.ops.iter().enumerate() {
        let y = 60.0 + i as f64 * row;
        let [gx, gy, gz] = op.grid;
        writeln!(
            out,
            "<text x=\"12\" y=\"{:.1}\" font-weight=\"bold\">{}</text><text x=\"12\" y=\"{:.1}\" font-size=\"10\">{gx} x \
             {gy} x {gz}</text>",
            y - 1.0,
            escaped(&op.name),
            y + 12.0
        )?;
    }
    writeln!(out, "</svg>")
}

/// Every operator a bar as long as it has tasks; edges to the next operator in words, longer ones as arcs.
fn write_ops(graph: &ThreadBlockGraph, tasks: &TaskGraph, longest: usize, out: &mut dyn Write) -> io::Result<()> {
    let (left, row, bar) = (name_width(graph), 44.0, 420.0);
    let edges = op_edges(tasks);
    let span = edges.keys().map(|(a, b)| b - a).max().unwrap_or(1).min(12);
    let arcs = left + bar + 70.0;
    open(arcs + 30.0 + 22.0 * f64::from(span), row * graph.ops.len() as f64 + 20.0, out)?;
    let y_of = |op: u32| 20.0 + f64::from(op) * row;
    for (i, op) in graph.ops.iter().enumerate() {
        let n = tasks.tasks_of(i).len();
        let (y, width) = (y_of(i as u32), (bar * n as f64 / longest.max(1) as f64).max(4.0));
        let [gx, gy, gz] = op.grid;
        writeln!(
            out,
            "<text x=\"12\" y=\"{:.1}\" font-weight=\"bold\">{}</text><rect x=\"{left:.1}\" y=\"{:.1}\" width=\"{width:.1}\" \
             height=\"18\" rx=\"3\" fill=\"{}\" stroke=\"{INK}\" stroke-width=\"0.6\"><title>{gx} x {gy} x {gz}</title></rect>",
            y + 4.0,
            escaped(&op.name),
            y - 9.0,
            fill(tasks, i)
        )?;
        // Where there is room, the single tasks.
        let cell = width / n.max(1) as f64;
        if cell >= 3.0 {
            write!(out, "<path stroke=\"{INK}\" stroke-width=\"0.3\" d=\"")?;
            for k in 1..n {
                write!(out, "M{:.1} {:.1}v18", left + cell * k as f64, y - 9.0)?;
            }
            writeln!(out, "\"/>")?;
        }
        writeln!(out, "<text x=\"{:.1}\" y=\"{:.1}\" font-size=\"10\">{n}</text>", left + width + 6.0, y + 4.0)?;
    }
    for ((from, to), edge) in &edges {
        let (a, b) = (y_of(*from), y_of(*to));
        let what = edge.to_string();
        if to - from == 1 {
            let x = left + 14.0;
            writeln!(
                out,
                "<path d=\"M{x:.1} {:.1}V{:.1}\" stroke=\"{EVENT}\" stroke-width=\"1.4\"/><path d=\"M{:.1} {:.1}h8l-4 6z\" \
                 fill=\"{EVENT}\"/><text x=\"{:.1}\" y=\"{:.1}\" font-size=\"10\" fill=\"{EVENT}\">{what}</text>",
                a + 9.0,
                b - 14.0,
                x - 4.0,
                b - 15.0,
                x + 10.0,
                (a + b) / 2.0 + 3.5
            )?;
        } else {
            let reach = arcs + 22.0 * f64::from((to - from).min(span));
            writeln!(
                out,
                "<path d=\"M{arcs:.1} {:.1}C{reach:.1} {:.1} {reach:.1} {:.1} {arcs:.1} {:.1}\" fill=\"none\" \
                 stroke=\"{EVENT}\" stroke-width=\"1.2\"><title>{} to {}: {what}</title></path><path d=\"M{arcs:.1} {:.1}l7 \
                 -4v8z\" fill=\"{EVENT}\"/>",
                a + 2.0,
                a + 2.0,
                b - 2.0,
                b - 2.0,
                escaped(&graph.ops[*from as usize].name),
                escaped(&graph.ops[*to as usize].name),
                b - 2.0
            )?;
        }
    }
    writeln!(out, "</svg>")
}
