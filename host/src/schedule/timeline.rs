//! A predicted pass as a picture: when some workers compute what, what their loaders copy meanwhile, and how busy the memory is.
//!
//! A stretch of two layers is drawn where a network has layers, else the whole pass, and at most [`LANES`] workers, evenly chosen.

use super::machine::Machine;
use super::predict::Prediction;
use super::prefetch::Plan;
use crate::compile::Program;
use crate::graph::task::svg::{LINE, escaped, open};
use std::io::{self, Write};

/// Workers drawn at most.
const LANES: usize = 12;

/// Width of the pass, and what stands left of it.
const WIDTH: f64 = 900.0;
const LEFT: f64 = 64.0;
const LANE: f64 = 26.0;
/// Height of the strip that says how busy the memory is.
const BUS: f64 = 48.0;
/// Width of its steps.
const STEP: f64 = 2.0;

const COPY: &str = "#486581";
const IDLE: &str = "#f0f4f8";

/// Colours of operators that differ to colour-blind eyes, too (Okabe and Ito 2008), then lighter and darker ones of the same.
const COLOURS: [&str; 18] = [
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#80b9d9", "#f5cf80", "#80cfb9",
    "#e6bcd3", "#eaaf80", "#004b75", "#996a00", "#00694d", "#8a4a6f", "#b5def6", "#8e3f00",
];

/// What an operator does, by the last word of its name: the same in every layer, for every part and every sequence.
fn kind(name: &str) -> &str {
    let is_word = |word: &&str| word.contains(|c: char| c.is_alphabetic());
    name.rsplit('.').find(is_word).unwrap_or(name).trim_start_matches(|c: char| !c.is_alphabetic())
}

/// The layer that an operator of this name belongs to.
fn layer(name: &str) -> Option<usize> {
    name.split_once("layers.")?.1.split('.').next()?.parse().ok()
}

/// When the middle two layers of `program` run, or all of it where there are no two, in seconds; and which layers they are.
fn window(program: &Program, prediction: &Prediction) -> ([f64; 2], Option<usize>) {
    let ops = &program.blocks.ops;
    let last = ops.iter().filter_map(|op| layer(&op.name)).max().filter(|last| *last > 0);
    let Some(first) = last.map(|last| last / 2) else { return ([0.0, prediction.step_s], None) };
    let is_inside = |op: u32| layer(&ops[op as usize].name).is_some_and(|layer| layer == first || layer == first + 1);
    let (mut begin, mut end) = (f64::INFINITY, 0f64);
    for (_, span) in program.tasks.tasks.iter().zip(&prediction.spans).filter(|(task, _)| is_inside(task.op)) {
        (begin, end) = (begin.min(span.start_s), end.max(span.end_s));
    }
    ([begin, end], Some(first))
}

/// How busy the memory is in each step of the picture, 0 to 1, by the copies that `on_bus` gives of each worker.
fn busy(n_workers: usize, on_bus: impl Fn(usize) -> Vec<[f64; 2]>, [begin, end]: [f64; 2]) -> Vec<f64> {
    let steps = (WIDTH / STEP) as usize;
    let mut busy = vec![0.0; steps];
    let seconds = ((end - begin) / steps as f64).max(1e-15);
    for [from, to] in (0..n_workers).flat_map(on_bus) {
        let step_of = |at: f64| (((at - begin) / seconds).max(0.0) as usize).min(steps);
        for step in step_of(from)..(step_of(to) + 1).min(steps) {
            let (start, stop) = (begin + step as f64 * seconds, begin + (step + 1) as f64 * seconds);
            busy[step] += (to.min(stop) - from.max(start)).max(0.0) / (seconds * n_workers as f64);
        }
    }
    busy
}

/// Writes how `program` runs as predicted, with the copies that `plan` has its loaders make, as SVG; `machine` is what it was predicted for,
/// `target` its name.
///
/// # Errors
/// What `out` says.
pub fn write_timeline(
    program: &Program,
    plan: &Plan,
    prediction: &Prediction,
    machine: &Machine,
    target: &str,
    out: &mut dyn Write,
) -> io::Result<()> {
    let ([begin, end], first_layer) = window(program, prediction);
    let n_workers = program.lists.lists.len();
    let lanes = n_workers.min(LANES);
    let drawn: Vec<usize> = (0..lanes).map(|lane| lane * n_workers / lanes.max(1)).collect();
    let name = |op: u32| &program.blocks.ops[op as usize].name;
    // Of what is drawn.
    let mut kinds: Vec<&str> = Vec::new();
    for (task, span) in program.tasks.tasks.iter().zip(&prediction.spans) {
        if span.end_s > begin && span.start_s < end && !kinds.contains(&kind(name(task.op))) {
            kinds.push(kind(name(task.op)));
        }
    }
    let colour = |kind: &str| {
        let number = kinds.iter().position(|known| *known == kind).unwrap_or(0);
        COLOURS[number % COLOURS.len()]
    };
    let scale = WIDTH / (end - begin).max(1e-12);
    let x = |seconds: f64| LEFT + (seconds.clamp(begin, end) - begin) * scale;
    let (top, bottom) = (40.0, 40.0 + LANE * lanes as f64);
    let has_copies = prediction.loads.iter().any(|loads| !loads.is_empty());
    let bus = if has_copies { bottom + 12.0 + BUS } else { bottom };
    let legend = bus + 44.0;
    let entries: Vec<(&str, &str)> = kinds
        .iter()
        .map(|kind| (*kind, colour(kind)))
        .chain(has_copies.then_some(("copies of weights", COPY)))
        .collect();
    let longest = entries.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let cell = 36.0 + 7.0 * longest as f64;
    let columns = ((WIDTH / cell) as usize).max(1);
    open(LEFT + WIDTH + 24.0, legend + 20.0 * entries.len().div_ceil(columns) as f64 + 6.0, out)?;
    let what = match first_layer {
        Some(first) => format!("layers {first} and {} of {}", first + 1, program.name),
        None => program.name.clone(),
    };
    let title = format!(
        "{what} on {target}, predicted: {:.1} of {:.1} \u{b5}s, {lanes} of {n_workers} workers",
        (end - begin) * 1e6,
        prediction.step_s * 1e6
    );
    writeln!(out, "<text x=\"{LEFT}\" y=\"22\" font-weight=\"bold\">{}</text>", escaped(&title))?;

    // Copies, each with what follows it without a gap.
    let on_bus = |worker: usize| {
        let (loads, data) = (prediction.loads.get(worker), plan.workers.get(worker));
        let pairs = loads.into_iter().flatten().zip(data.into_iter().flat_map(|worker| &worker.data));
        let mut merged: Vec<[f64; 2]> = Vec::new();
        for ((start, _), op) in pairs {
            let stop = start + f64::from(op.bytes) / machine.bytes_per_s;
            match merged.last_mut() {
                Some(before) if *start <= before[1] + 1e-9 => before[1] = before[1].max(stop),
                _ => merged.push([*start, stop]),
            }
        }
        merged
    };
    let bar = |out: &mut dyn Write, [from, to]: [f64; 2], y: f64, height: f64, fill: &str, title: &str| {
        if to <= begin || from >= end {
            return Ok(());
        }
        let (from, to) = (x(from), x(to));
        let title = if title.is_empty() { String::new() } else { format!("<title>{}</title>", escaped(title)) };
        let width = (to - from).max(0.3);
        writeln!(
            out,
            "<rect x=\"{from:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height}\" fill=\"{fill}\">{title}</rect>"
        )
    };
    for (lane, worker) in drawn.iter().enumerate() {
        let y = top + LANE * lane as f64;
        writeln!(
            out,
            "<text x=\"{}\" y=\"{:.1}\" font-size=\"10\" text-anchor=\"end\">w{worker}</text>",
            LEFT - 6.0,
            y + 15.0
        )?;
        bar(out, [begin, end], y + 1.0, LANE - 4.0, IDLE, "")?;
        for copies in on_bus(*worker) {
            bar(out, copies, y + 1.0, 5.0, COPY, "")?;
        }
    }
    for (task, span) in program.tasks.tasks.iter().zip(&prediction.spans) {
        let Some(lane) = drawn.iter().position(|worker| *worker == span.worker as usize) else { continue };
        let (y, name) = (top + LANE * lane as f64 + 7.0, name(task.op));
        let title = format!("{name} {:?}: {:.2} \u{b5}s", task.block, (span.end_s - span.start_s) * 1e6);
        bar(out, [span.start_s, span.end_s], y, LANE - 10.0, colour(kind(name)), &title)?;
    }

    if has_copies {
        let busy = busy(n_workers, on_bus, [begin, end]);
        let points: Vec<String> = (busy.iter().zip(0..))
            .map(|(share, step)| {
                format!("{:.1},{:.1}", LEFT + (f64::from(step) + 0.5) * STEP, bus - BUS * share.min(1.0))
            })
            .collect();
        bar(out, [begin, end], bus - BUS, BUS, IDLE, "")?;
        writeln!(
            out,
            "<polygon points=\"{LEFT},{bus:.1} {} {:.1},{bus:.1}\" fill=\"{COPY}\"/>\n\
             <text x=\"{}\" y=\"{:.1}\" font-size=\"10\" text-anchor=\"end\">memory</text>",
            points.join(" "),
            LEFT + WIDTH,
            LEFT - 6.0,
            bus - BUS / 2.0 + 4.0
        )?;
    }
    // Ticks: as many as fit, at a round number of microseconds.
    let length_us = (end - begin) * 1e6;
    let every = [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 5000.0];
    let every = every.into_iter().find(|every| length_us / every <= 14.0).unwrap_or(length_us / 10.0);
    let mut at = 0.0;
    while at <= length_us {
        let x = LEFT + at * 1e-6 * scale;
        writeln!(
            out,
            "<path d=\"M{x:.1} {:.1}V{:.1}\" stroke=\"{LINE}\" stroke-width=\"0.5\"/><text x=\"{x:.1}\" y=\"{:.1}\" font-size=\"10\" \
             text-anchor=\"middle\">{}</text>",
            top - 4.0,
            bus + 4.0,
            bus + 16.0,
            if every < 1.0 { format!("{at:.1}") } else { format!("{at:.0}") }
        )?;
        at += every;
    }
    writeln!(
        out,
        "<text x=\"{}\" y=\"{:.1}\" font-size=\"10\" text-anchor=\"end\">\u{b5}s</text>",
        LEFT - 6.0,
        bus + 16.0
    )?;
    for (i, (name, fill)) in entries.iter().enumerate() {
        let (x, y) = (LEFT + cell * (i % columns) as f64, legend + 20.0 * (i / columns) as f64 - 14.0);
        writeln!(
            out,
            "<rect x=\"{x}\" y=\"{y:.1}\" width=\"12\" height=\"12\" fill=\"{fill}\"/><text x=\"{}\" y=\"{:.1}\">{}</text>",
            x + 18.0,
            y + 10.5,
            escaped(name)
        )?;
    }
    writeln!(out, "</svg>")
}
