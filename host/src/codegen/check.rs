//! Judges a body.
//!
//! 0. What is named is the body's: tiles, operands, loops, and arguments. Names are Rust identifiers, and no two things
//!    in reach of each other have one. A body that breaks this is judged no further.
//! 1. Tiles have shapes that their level takes: columns of Shared and Own are multiples of 64, of Eights of 32 up to
//!    128, of Sixteens 64 or 128; Shared has rows in multiples of 32, up to 128, and at least one stage.
//! 2. Each operation has its operands on the levels, and with the shapes, that it takes.
//! 3. What is read has been written before: on the way in, or in each round of a loop around both.
//! 4. A Shared tile is loaded once, in a loop's round or outside all, and read there or in loops inside.
//! 5. Loads of one round have tiles of as many stages; outside all loops one.
//! 6. The tiles in shared memory have room.
//! 7. What is written is not read; and no two writes of an operand, nor two rounds of a loop, write the same column of
//!    it by different lanes.

use super::*;
use std::collections::{HashMap, HashSet};

/// Columns that move at once.
const CHUNK: u32 = 8;

/// Judges `body`.
///
/// # Errors
/// Every rule that it breaks, naming the tile or operand.
pub fn check(body: &Body) -> Result<(), Vec<String>> {
    named(body)?;
    let mut judge = Judge { body, written: Vec::new(), read: Vec::new(), wrong: Vec::new() };
    for tile in &body.tiles {
        judge.tile(tile);
    }
    judge.steps(&body.steps, &mut Vec::new(), &mut vec![false; body.tiles.len()]);
    judge.loads(&body.steps, true);
    judge.writes();
    let needed: u64 = (0..body.tiles.len()).map(|tile| u64::from(body.bytes(TileId(tile)))).sum();
    if needed > u64::from(CAPACITY) {
        judge.wrong.push(format!("the tiles take {needed} bytes of shared memory, expected at most {CAPACITY}"));
    }
    if judge.wrong.is_empty() { Ok(()) } else { Err(judge.wrong) }
}

/// Rule 0.
fn named(body: &Body) -> Result<(), Vec<String>> {
    let mut names = Names { body, taken: HashMap::new(), loops: HashSet::new(), wrong: Vec::new() };
    names.identifier("the body", &body.name);
    names.global(body.rows, "the body's rows");
    for (at, global) in body.globals.iter().enumerate() {
        names.take("an operand", &global.name);
        if let Some((of, index)) = &global.through {
            // Those that follow each other end with one that follows none.
            if of.0 >= at {
                let what = format!("`{}` has the rows of operand {}, expected one before it", global.name, of.0);
                names.wrong.push(what);
            }
            // Several may go by one index.
            if names.taken.get(index.as_str()) != Some(&"an index") {
                names.take("an index", index);
            }
        }
    }
    body.scalars.iter().chain(&body.of_rows).for_each(|name| names.take("an argument", name));
    body.tiles.iter().for_each(|tile| names.take("a tile", &tile.name));
    names.steps(&body.steps);
    if names.wrong.is_empty() { Ok(()) } else { Err(names.wrong) }
}

struct Names<'a> {
    body: &'a Body,
    /// What has each name.
    taken: HashMap<&'a str, &'static str>,
    loops: HashSet<usize>,
    wrong: Vec<String>,
}

impl<'a> Names<'a> {
    fn identifier(&mut self, what: &str, name: &str) {
        let is_start = |c: char| c == '_' || c.is_ascii_alphabetic();
        let is_rest = |c: char| is_start(c) || c.is_ascii_digit();
        if !name.starts_with(is_start) || !name.chars().all(is_rest) || name == "_" || KEYWORDS.contains(&name) {
            self.wrong.push(format!("{what} is called `{name}`, expected a Rust identifier"));
        }
    }

    fn take(&mut self, what: &'static str, name: &'a str) {
        self.identifier(what, name);
        if let Some(other) = self.taken.insert(name, what) {
            self.wrong.push(format!("{what} is called `{name}`, as {other} is, expected a name of its own"));
        }
    }

    fn global(&mut self, global: GlobalId, what: &str) {
        if global.0 >= self.body.globals.len() {
            let n = self.body.globals.len();
            self.wrong.push(format!("{what} are of operand {}, of which there are {n}", global.0));
        }
    }

    fn steps(&mut self, steps: &'a [Step]) {
        for step in steps {
            match step {
                Step::Op(op) => self.op(op),
                Step::Loop(inner) => {
                    if !self.loops.insert(inner.id.0) {
                        self.wrong.push(format!("loop `{}` has the id of another, {}", inner.name, inner.id.0));
                    }
                    if let Extent::Rows(of) | Extent::Columns(of) | Extent::Seen(of) = inner.end {
                        self.global(of, &format!("the rounds of loop `{}`", inner.name));
                    }
                    let before = self.taken.get(inner.name.as_str()).copied();
                    self.take("a loop", &inner.name);
                    self.steps(&inner.steps);
                    // The next one may have its name.
                    match before {
                        Some(before) => self.taken.insert(&inner.name, before),
                        None => self.taken.remove(inner.name.as_str()),
                    };
                }
            }
        }
    }

    fn op(&mut self, op: &Op) {
        let n = self.body.tiles.len();
        for tile in op.reads().into_iter().chain(op.writes()).filter(|tile| tile.0 >= n) {
            self.wrong.push(format!("{op:?} has tile {}, of which there are {n}", tile.0));
        }
        match op {
            Op::Load { from: global, .. }
            | Op::Split { from: global, .. }
            | Op::Read { from: global, .. }
            | Op::Write { to: global, .. } => self.global(*global, &format!("the rows of {op:?}")),
            Op::Map { expr, .. } => expr.each(&mut |expr| {
                if let Expr::Scalar(name) = expr
                    && !self.body.scalars.contains(name)
                {
                    self.wrong.push(format!("`{name}` is no argument of the body"));
                }
            }),
            Op::Ask { of, .. } if !self.body.of_rows.contains(of) => {
                self.wrong.push(format!("`{of}` is no argument of the body that says something of rows"));
            }
            _ => {}
        }
    }
}

/// Words that are no identifiers.
const KEYWORDS: [&str; 52] = [
    "abstract", "as", "async", "await", "become", "box", "break", "const", "continue", "crate", "do", "dyn", "else",
    "enum", "extern", "false", "final", "fn", "for", "gen", "if", "impl", "in", "let", "loop", "macro", "match", "mod",
    "move", "mut", "override", "priv", "pub", "ref", "return", "self", "Self", "static", "struct", "super", "trait",
    "true", "try", "type", "typeof", "unsafe", "unsized", "use", "virtual", "where", "while", "yield",
];

struct Judge<'a> {
    body: &'a Body,
    /// Writes on the way.
    written: Vec<Written>,
    /// Operands that are read.
    read: Vec<GlobalId>,
    wrong: Vec<String>,
}

/// Columns of an operand that are written.
struct Written {
    to: GlobalId,
    /// The operand that it is the base of, or is.
    by_way_of: GlobalId,
    column: Start,
    width: u32,
    /// The step of the loop whose place the first is.
    by: Option<u32>,
}

impl Judge<'_> {
    fn tile(&mut self, tile: &Tile) {
        let whole = |n: u32, of: u32, most: u32| n > 0 && n.is_multiple_of(of) && n <= most;
        let fits = match tile.place {
            Place::Shared { rows, columns, stages } => whole(rows, 32, 128) && whole(columns, 64, 1024) && stages > 0,
            Place::Own { columns } => whole(columns, 64, 1024),
            Place::Eights { columns } => whole(columns, 32, 128),
            Place::Sixteens { columns } => whole(columns, 64, 128),
            Place::PerRow => true,
        };
        if !fits {
            self.wrong.push(format!("`{}` is {:?}, which its level does not take", tile.name, tile.place));
        }
    }

    fn place(&self, tile: TileId) -> Place {
        self.body.tiles[tile.0].place
    }

    fn name(&self, tile: TileId) -> &str {
        &self.body.tiles[tile.0].name
    }

    fn expect(&mut self, is_so: bool, tile: TileId, expected: &str) {
        if !is_so {
            let (name, place) = (self.name(tile).to_owned(), self.place(tile));
            self.wrong.push(format!("`{name}` is {place:?}, expected {expected}"));
        }
    }

    /// Rules 2 and 3, and the half of 4 that says who may read, of `steps` in `loops`, with their steps; `written` are
    /// the tiles written on the way.
    fn steps(&mut self, steps: &[Step], loops: &mut Vec<(LoopId, u32)>, written: &mut [bool]) {
        for step in steps {
            match step {
                Step::Loop(inner) => {
                    if inner.by == 0 {
                        self.wrong.push(format!("loop `{}` has steps of 0", inner.name));
                    }
                    loops.push((inner.id, inner.by));
                    // It may have no rounds: what it writes counts for nothing after it.
                    self.steps(&inner.steps, loops, &mut written.to_vec());
                    loops.pop();
                }
                Step::Op(op) => {
                    for tile in op.reads() {
                        if !written[tile.0] {
                            let name = self.name(tile).to_owned();
                            self.wrong
                                .push(format!("`{name}` is read by {op:?}, expected to have been written before"));
                        }
                    }
                    self.op(op, loops);
                    if let Some(tile) = op.writes() {
                        written[tile.0] = true;
                    }
                }
            }
        }
    }

    /// Judges where `what` begins, at a multiple of `whole`. The step of the loop that it goes with.
    fn start(&mut self, start: Start, whole: u32, what: &str, loops: &[(LoopId, u32)]) -> Option<u32> {
        let of = start.of.map(|id| loops.iter().find(|(open, _)| *open == id));
        let by = of.map(|found| found.map_or(0, |(_, by)| *by));
        match of {
            Some(None) => self.wrong.push(format!("{what} begins at the place of a loop it is not in")),
            _ if !start.plus.is_multiple_of(whole) || !by.unwrap_or(0).is_multiple_of(whole) => {
                let got = format!("begins {} after the place of a loop by {}", start.plus, by.unwrap_or(0));
                self.wrong.push(format!("{what} {got}, expected multiples of {whole}"));
            }
            _ => {}
        }
        by
    }

    fn op(&mut self, op: &Op, loops: &[(LoopId, u32)]) {
        match op {
            Op::Load { to, from, row, column } => {
                self.expect(matches!(self.place(*to), Place::Shared { .. }), *to, "Shared, as loads fill");
                let name = self.name(*to).to_owned();
                self.start(*row, 1, &format!("the row of `{name}`"), loops);
                self.start(*column, CHUNK, &format!("the column of `{name}`"), loops);
                self.read.push(self.body.base(*from));
            }
            Op::Split { to, from, column } => {
                self.expect(matches!(self.place(*to), Place::Own { .. }), *to, "Own, as splits fill");
                let name = self.name(*to).to_owned();
                self.start(*column, CHUNK, &format!("the column of `{name}`"), loops);
                self.read.push(self.body.base(*from));
            }
            Op::Read { to, from, rows, column } => {
                let place = self.place(*to);
                let is_fit = matches!(place, Place::Eights { .. }) || place == Place::PerRow && *rows == Whose::Own;
                self.expect(is_fit, *to, "Eights, or PerRow of each row, as reads fill");
                let (whole, name) = (if place == Place::PerRow { 1 } else { CHUNK }, self.name(*to).to_owned());
                self.start(*column, whole, &format!("the column of `{name}`"), loops);
                self.read.push(self.body.base(*from));
            }
            Op::Fill { to, .. } => self.expect(self.is_register(*to), *to, "registers"),
            Op::Ask { to, .. } => self.expect(self.place(*to) == Place::PerRow, *to, "a number for each row"),
            Op::Product { into, a, b, by } => self.product(*into, *a, *b, *by),
            Op::Map { to, expr } => {
                self.expect(self.is_register(*to), *to, "registers");
                let shape = self.place(*to);
                for tile in expr.tiles() {
                    let fits = self.place(tile) == shape || self.place(tile) == Place::PerRow;
                    self.expect(fits, tile, &format!("{shape:?} or PerRow beside `{}`", self.name(*to)));
                }
                let matrices = expr.tiles().iter().filter(|tile| self.place(**tile) != Place::PerRow).count();
                let most = if matches!(shape, Place::Eights { .. }) { 2 } else { 1 };
                if shape != Place::PerRow && !(1..=most).contains(&matrices) {
                    let (name, expected) = (self.name(*to), if most == 2 { "one or two" } else { "one" });
                    let what = format!("`{name}` is made of {matrices} tiles of its shape, expected {expected}");
                    self.wrong.push(what);
                }
                expr.each(&mut |expr| {
                    if let Expr::Visible(id, _) = expr
                        && (loops.iter().all(|(open, _)| open != id) || shape == Place::PerRow)
                    {
                        let name = self.body.tiles[to.0].name.clone();
                        self.wrong.push(format!("`{name}` asks what rows see, expected columns, in the loop it names"));
                    }
                });
            }
            Op::Reduce { to, of, .. } => {
                self.expect(self.place(*to) == Place::PerRow, *to, "PerRow");
                self.expect(matches!(self.place(*of), Place::Eights { .. }), *of, "Eights");
            }
            Op::Keep { to, from } => {
                let columns = match self.place(*from) {
                    Place::Eights { columns } | Place::Sixteens { columns } => columns,
                    _ => 0,
                };
                self.expect(columns > 0, *from, "Eights or Sixteens");
                let fits = matches!(self.place(*to), Place::Own { columns: room } if room >= columns);
                self.expect(fits, *to, &format!("Own of at least {columns} columns"));
            }
            Op::Write { to, from, column, update } => {
                let (width, whole) = match self.place(*from) {
                    Place::Own { columns } => (columns, 4),
                    Place::PerRow if *update == Update::Set => (1, 1),
                    _ => (0, 1),
                };
                self.expect(width > 0, *from, "Own, or PerRow where it is set");
                let what = format!("the column that `{}` goes to", self.name(*from));
                let by = self.start(*column, whole, &what, loops);
                let base = self.body.base(*to);
                self.written.push(Written { to: base, by_way_of: *to, column: *column, width, by });
            }
        }
    }

    /// Rule 7.
    fn writes(&mut self) {
        for (at, write) in self.written.iter().enumerate() {
            let name = &self.body.globals[write.to.0].name;
            if self.read.contains(&write.to) {
                self.wrong.push(format!("`{name}` is read and written, expected one of both"));
            }
            let (first, end) = (write.column.plus, write.column.plus.saturating_add(write.width));
            if write.by.is_some_and(|by| end > by) {
                self.wrong
                    .push(format!("columns {first} to {end} of `{name}` are written in each round of a loop by fewer"));
            }
            for other in self.written[..at].iter().filter(|other| other.to == write.to) {
                // The same columns, as wide, of the same rows are the same lanes'.
                let is_same =
                    (other.by_way_of, other.column, other.width) == (write.by_way_of, write.column, write.width);
                let is_apart = end <= other.column.plus || other.column.plus.saturating_add(other.width) <= first;
                if !is_same && (other.column.of != write.column.of || !is_apart) {
                    self.wrong.push(format!("columns {first} to {end} of `{name}` may be written twice"));
                }
            }
        }
    }

    fn product(&mut self, into: TileId, a: TileId, b: TileId, by: By) {
        let Place::Shared { rows, columns, .. } = self.place(b) else {
            return self.expect(false, b, "Shared, as products' right operands");
        };
        let (made, summed) = match by {
            By::Rows => (Place::Eights { columns: rows }, columns),
            By::Columns => (Place::Sixteens { columns }, rows),
        };
        self.expect(self.place(into) == made, into, &format!("{made:?}"));
        let left = match (by, self.place(a)) {
            (By::Columns, _) | (By::Rows, Place::Eights { .. }) => Place::Eights { columns: summed },
            (By::Rows, _) => Place::Own { columns: summed },
        };
        self.expect(self.place(a) == left, a, &format!("{left:?}"));
    }

    fn is_register(&self, tile: TileId) -> bool {
        !matches!(self.place(tile), Place::Shared { .. } | Place::Own { .. })
    }

    /// Rules 4 and 5.
    fn loads(&mut self, steps: &[Step], is_outside: bool) {
        let loaded: Vec<TileId> = steps.iter().filter_map(load_of).collect();
        let stages = |tile: &TileId| match self.place(*tile) {
            Place::Shared { stages, .. } => stages,
            _ => 1,
        };
        let all: Vec<u32> = loaded.iter().map(stages).collect();
        if all.windows(2).any(|two| two[0] != two[1]) || is_outside && all.iter().any(|stages| *stages != 1) {
            let names: Vec<&str> = loaded.iter().map(|tile| self.name(*tile)).collect();
            let expected = if is_outside { "1 outside all loops" } else { "as many of each" };
            self.wrong.push(format!("{names:?} are loaded together and have {all:?} stages, expected {expected}"));
        }
        for (at, tile) in loaded.iter().enumerate() {
            let elsewhere = count(&self.body.steps, &|op| matches!(op, Op::Load { to, .. } if to == tile));
            let read = count(&self.body.steps, &|op| op.reads().contains(tile));
            let read_here = count(steps, &|op| op.reads().contains(tile));
            if loaded[..at].contains(tile) || elsewhere != 1 || read != read_here {
                let name = self.name(*tile);
                let got =
                    format!("loaded {elsewhere} times, and read {read} times, {read_here} of them where it is loaded");
                self.wrong.push(format!("`{name}` is {got}, expected once and everywhere"));
            }
        }
        for step in steps {
            if let Step::Loop(inner) = step {
                self.loads(&inner.steps, false);
            }
        }
    }
}

/// The tile that `step` loads.
pub(super) fn load_of(step: &Step) -> Option<TileId> {
    match step {
        Step::Op(Op::Load { to, .. }) => Some(*to),
        _ => None,
    }
}

/// Operations of `steps`, loops' too, that are `such`.
fn count(steps: &[Step], such: &impl Fn(&Op) -> bool) -> usize {
    let of = |step: &Step| match step {
        Step::Op(op) => usize::from(such(op)),
        Step::Loop(inner) => count(&inner.steps, such),
    };
    steps.iter().map(of).sum()
}
