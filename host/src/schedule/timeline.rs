//! A pass as a picture: when some workers run what, and what their loaders copy meanwhile and how busy the memory is,
//! or how long they wait for weights. Predicted and measured passes are drawn alike.
//!
//! A stretch of two layers is drawn where a network has layers, else the whole pass, and at most [`LANES`] workers,
//! evenly chosen.

use crate::graph::task::svg::{LINE, escaped, open};
use std::io::{self, Write};

/// Workers drawn at most.
const LANES: usize = 12;

/// Width of the pass, and what stands left of it.
const WIDTH: f64 = 900.0;
const LEFT: f64 = 64.0;
const LANE: f64 = 26.0;
const TOP: f64 = 40.0;
/// Height of the strip that says how busy the memory is, and width of its steps.
const BUS: f64 = 48.0;
const STEP: f64 = 2.0;

const COPY: &str = "#486581";
const WAIT: &str = "#102a43";
const IDLE: &str = "#f0f4f8";

/// Colours of operators that differ to colour-blind eyes, too (Okabe and Ito 2008), then lighter and darker ones of the
/// same.
const COLOURS: [&str; 18] = [
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#80b9d9", "#f5cf80", "#80cfb9",
    "#e6bcd3", "#eaaf80", "#004b75", "#996a00", "#00694d", "#8a4a6f", "#b5def6", "#8e3f00",
];

/// From when to when, in seconds from the start of the pass.
type Stretch = [f64; 2];

/// A task, run.
#[derive(Clone, Debug, PartialEq)]
pub struct Run<'a> {
    /// Its worker.
    pub worker: u32,
    /// Its operator.
    pub op: &'a str,
    /// When.
    pub time_s: Stretch,
}

/// What else a worker's lane shows.
#[derive(Clone, Debug, PartialEq)]
pub enum Beside {
    /// Per worker, when its loader copies.
    Copies(Vec<Vec<Stretch>>),
    /// Per worker, how long its tasks wait for weights.
    Waits(Vec<Vec<Stretch>>),
}

/// A pass to be drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline<'a> {
    /// What it is: `decode on h200, predicted`.
    pub name: String,
    /// Workers there are.
    pub n_workers: usize,
    /// Its length.
    pub step_s: f64,
    /// Its tasks.
    pub runs: Vec<Run<'a>>,
    /// See [`Beside`].
    pub beside: Beside,
}

/// What an operator does, by the last word of its name: the same in every layer, for every part and every sequence.
fn kind(name: &str) -> &str {
    let is_word = |word: &&str| word.contains(|c: char| c.is_alphabetic());
    name.rsplit('.').find(is_word).unwrap_or(name).trim_start_matches(|c: char| !c.is_alphabetic())
}

/// The layer that an operator of this name belongs to.
fn layer(name: &str) -> Option<usize> {
    name.split_once("layers.")?.1.split('.').next()?.parse().ok()
}

impl Timeline<'_> {
    /// When the middle two layers run, or all of it where there are no two; and the first of the two.
    fn window(&self) -> (Stretch, Option<usize>) {
        let last = self.runs.iter().filter_map(|run| layer(run.op)).max().filter(|last| *last > 0);
        let Some(first) = last.map(|last| last / 2) else { return ([0.0, self.step_s], None) };
        let inside =
            self.runs.iter().filter(|run| layer(run.op).is_some_and(|layer| (first..=first + 1).contains(&layer)));
        let time = inside
            .map(|run| run.time_s)
            .reduce(|[begin, end]: Stretch, [from, to]: Stretch| [begin.min(from), end.max(to)]);
        time.map_or(([0.0, self.step_s], None), |time| (time, Some(first)))
    }

    /// Writes it as SVG.
    ///
    /// # Errors
    /// What `out` says.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let (window, first_layer) = self.window();
        let [begin, end] = window;
        let lanes = self.n_workers.min(LANES);
        let drawn: Vec<usize> = (0..lanes).map(|lane| lane * self.n_workers / lanes.max(1)).collect();
        let is_inside = |[from, to]: Stretch| to > begin && from < end;
        let mut kinds: Vec<&str> = Vec::new();
        for run in self.runs.iter().filter(|run| is_inside(run.time_s)) {
            if !kinds.contains(&kind(run.op)) {
                kinds.push(kind(run.op));
            }
        }
        let colour = |kind: &str| {
            let number = kinds.iter().position(|known| *known == kind).unwrap_or(0);
            COLOURS[number % COLOURS.len()]
        };
        let (thin, thin_name, thin_fill, copies) = match &self.beside {
            Beside::Copies(copies) => (copies, "copies of weights", COPY, Some(copies)),
            Beside::Waits(waits) => (waits, "waiting for weights", WAIT, None),
        };
        let has_copies = copies.is_some_and(|copies| copies.iter().any(|copies| !copies.is_empty()));
        let has_thin = has_copies || (copies.is_none() && !thin.is_empty());
        let bottom = TOP + LANE * lanes as f64 + if has_copies { 12.0 + BUS } else { 0.0 };

        // The legend, in as many columns as there is room for.
        let entries: Vec<(&str, &str)> =
            kinds.iter().map(|kind| (*kind, colour(kind))).chain(has_thin.then_some((thin_name, thin_fill))).collect();
        let longest = entries.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        let cell = 36.0 + 7.0 * longest as f64;
        let columns = ((WIDTH / cell) as usize).max(1);
        let legend = bottom + 30.0;
        open(LEFT + WIDTH + 24.0, legend + 20.0 * (entries.len().div_ceil(columns) + 1) as f64, out)?;
        let what = first_layer.map_or(String::new(), |first| format!("layers {first} and {} of ", first + 1));
        let title = format!(
            "{what}{}: {:.1} of {:.1} \u{b5}s, {lanes} of {} workers",
            self.name,
            (end - begin) * 1e6,
            self.step_s * 1e6,
            self.n_workers
        );
        writeln!(out, "<text x=\"{LEFT}\" y=\"22\" font-weight=\"bold\">{}</text>", escaped(&title))?;

        let scale = WIDTH / (end - begin).max(1e-12);
        let x = |seconds: f64| LEFT + (seconds.clamp(begin, end) - begin) * scale;
        let bar = |out: &mut dyn Write, time: Stretch, y: f64, height: f64, fill: &str, title: &str| {
            if !is_inside(time) {
                return Ok(());
            }
            let (from, to) = (x(time[0]), x(time[1]));
            let width = (to - from).max(0.3);
            let title = if title.is_empty() { String::new() } else { format!("<title>{}</title>", escaped(title)) };
            writeln!(
                out,
                "<rect x=\"{from:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height}\" fill=\"{fill}\">{title}</rect>"
            )
        };
        let label = |out: &mut dyn Write, y: f64, text: &str| {
            let x = LEFT - 6.0;
            writeln!(out, "<text x=\"{x}\" y=\"{y:.1}\" font-size=\"10\" text-anchor=\"end\">{text}</text>")
        };
        for (lane, worker) in drawn.iter().enumerate() {
            let y = TOP + LANE * lane as f64;
            label(out, y + 15.0, &format!("w{worker}"))?;
            bar(out, window, y + 1.0, LANE - 4.0, IDLE, "")?;
            for time in thin.get(*worker).into_iter().flatten() {
                bar(out, *time, y + 1.0, 5.0, thin_fill, "")?;
            }
        }
        for run in &self.runs {
            let Some(lane) = drawn.iter().position(|worker| *worker == run.worker as usize) else { continue };
            let title = format!("{}: {:.2} \u{b5}s", run.op, (run.time_s[1] - run.time_s[0]) * 1e6);
            bar(out, run.time_s, TOP + LANE * lane as f64 + 7.0, LANE - 10.0, colour(kind(run.op)), &title)?;
        }
        if let Some(copies) = copies.filter(|_| has_copies) {
            let points: Vec<String> = (busy(copies, self.n_workers, window).iter().zip(0..))
                .map(|(share, step)| {
                    format!("{:.1},{:.1}", LEFT + (f64::from(step) + 0.5) * STEP, bottom - BUS * share.min(1.0))
                })
                .collect();
            bar(out, window, bottom - BUS, BUS, IDLE, "")?;
            let (points, right) = (points.join(" "), LEFT + WIDTH);
            let polygon = format!("{LEFT},{bottom:.1} {points} {right:.1},{bottom:.1}");
            writeln!(out, "<polygon points=\"{polygon}\" fill=\"{COPY}\"/>")?;
            label(out, bottom - BUS / 2.0 + 4.0, "memory")?;
        }
        let length_us = (end - begin) * 1e6;
        let every = tick_us(length_us);
        for tick in 0..=(length_us / every) as u32 {
            let at = f64::from(tick) * every;
            let (x, y) = (LEFT + at * 1e-6 * scale, bottom + 16.0);
            let text = if every < 1.0 { format!("{at:.1}") } else { format!("{at:.0}") };
            let (from, to) = (TOP - 4.0, bottom + 4.0);
            writeln!(out, "<path d=\"M{x:.1} {from:.1}V{to:.1}\" stroke=\"{LINE}\" stroke-width=\"0.5\"/>")?;
            writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"10\" text-anchor=\"middle\">{text}</text>")?;
        }
        label(out, bottom + 16.0, "\u{b5}s")?;
        for (i, (name, fill)) in entries.iter().enumerate() {
            let (x, y) = (LEFT + cell * (i % columns) as f64, legend + 20.0 * (i / columns) as f64);
            writeln!(out, "<rect x=\"{x}\" y=\"{y:.1}\" width=\"12\" height=\"12\" fill=\"{fill}\"/>")?;
            writeln!(out, "<text x=\"{}\" y=\"{:.1}\">{}</text>", x + 18.0, y + 10.5, escaped(name))?;
        }
        writeln!(out, "</svg>")
    }
}

/// How far apart ticks stand on a length of so many microseconds: a 1, 2 or 5 of some decimal place, so that there are
/// not too many.
fn tick_us(length_us: f64) -> f64 {
    let mut factors = [2.0, 2.5, 2.0].into_iter().cycle();
    let mut every = 0.1;
    while length_us / every > 14.0 {
        every *= factors.next().unwrap_or(2.0);
    }
    every
}

/// How busy the memory is in each step of a picture of `begin` to `end`, 0 to 1, by all workers' copies.
fn busy(copies: &[Vec<Stretch>], n_workers: usize, [begin, end]: Stretch) -> Vec<f64> {
    let steps = (WIDTH / STEP) as usize;
    let mut busy = vec![0.0; steps];
    let seconds = ((end - begin) / steps as f64).max(1e-15);
    for [from, to] in copies.iter().flatten() {
        let step_of = |at: f64| (((at - begin) / seconds).max(0.0) as usize).min(steps);
        for step in step_of(*from)..(step_of(*to) + 1).min(steps) {
            let (start, stop) = (begin + step as f64 * seconds, begin + (step + 1) as f64 * seconds);
            busy[step] += (to.min(stop) - from.max(start)).max(0.0) / (seconds * n_workers as f64);
        }
    }
    busy
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_are_told_apart_by_what_they_do() {
        assert_eq!(kind("model.layers.3.self_attn.q_proj"), "q_proj");
        assert_eq!(kind("model.layers.3.self_attn.attention.0 merge"), "merge");
        assert_eq!(kind("sample.2"), "sample");
        assert_eq!(kind("embed_tokens"), "embed_tokens");
        assert_eq!((layer("model.layers.12.mlp.up"), layer("lm_head")), (Some(12), None));
    }

    #[test]
    fn ticks_stand_at_round_numbers() {
        let lengths = [0.0, 1.4, 1.5, 7.0, 14.0, 57.6, 280.0, 6_500.0];
        assert_eq!(lengths.map(tick_us), [0.1, 0.1, 0.2, 0.5, 1.0, 5.0, 20.0, 500.0]);
    }

    /// Layers that nobody runs in the middle: all is drawn.
    #[test]
    fn a_window_is_never_empty() {
        let run = |op, time_s| Run { worker: 0, op, time_s };
        let runs = vec![run("layers.0.a", [0.0, 1e-6]), run("layers.9.a", [1e-6, 3e-6])];
        let timeline =
            Timeline { name: "x".to_owned(), n_workers: 1, step_s: 3e-6, runs, beside: Beside::Waits(Vec::new()) };
        assert_eq!(timeline.window(), ([0.0, 3e-6], None));
        timeline.write(&mut Vec::new()).expect("memory takes it");
    }

    #[test]
    fn memory_is_as_busy_as_all_copies_make_it() {
        // Of two workers one copies all the time, one in the second half.
        let shares = busy(&[vec![[0.0, 8.0]], vec![[4.0, 6.0], [6.0, 9.0]]], 2, [0.0, 8.0]);
        assert_eq!(shares.len(), 450);
        assert!(shares[..225].iter().all(|share| (share - 0.5).abs() < 1e-9));
        assert!(shares[225..].iter().all(|share| (share - 1.0).abs() < 1e-9));
    }
}
