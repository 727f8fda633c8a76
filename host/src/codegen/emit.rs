//! From a plan to Rust: a function of the device crate.
//!
//! Levels and shapes are types there, so that what `check` should have refused does not compile. The text has line
//! breaks and indentation, but is meant for rustfmt.

use super::bodies::File;
use super::plan::{Act, Plan, Scope, stages};
use super::*;
use std::collections::BTreeSet;
use std::fmt::Write;

/// The text of `file`, whose bodies' plans are `plans`.
pub fn emit(file: &File, plans: &[Plan]) -> String {
    let mut functions = String::new();
    let mut used = BTreeSet::new();
    for plan in plans {
        let mut emitter =
            Emitter { plan, text: String::new(), depth: 3, declared: Vec::new(), seen: None, used: &mut used };
        emitter.function();
        functions.push('\n');
        functions.push_str(&emitter.text);
    }
    let from = |module: &str| {
        let names = used.iter().filter(|(of, _)| *of == module).map(|(_, name)| *name).collect::<Vec<_>>();
        match &names[..] {
            [] => String::new(),
            [one] => format!("use crate::{module}::{one};\n"),
            _ => format!("use crate::{module}::{{{}}};\n", names.join(", ")),
        }
    };
    let [scalar, arch, math, tile] = ["arch::scalar", "arch", "gpu::math", "gpu::tile"].map(from);
    format!(
        "//! {}\n//!\n//! Generated from `perpetua::codegen::bodies::{}`\n//! by `BLESS=1 cargo test --test cpu codegen::`: what is to change changes there. \
         Barriers and waits follow from who touches\n//! which part of a tile.\n\n{scalar}{arch}use \
         crate::block::Block;\nuse crate::gpu::Row;\n{math}{tile}{functions}",
        file.doc, file.from
    )
}

struct Emitter<'a, 'b> {
    plan: &'a Plan,
    text: String,
    depth: usize,
    /// Register tiles that have a variable, by scope, outermost first.
    declared: Vec<BTreeSet<TileId>>,
    /// See [`Asks::seen`].
    seen: Option<(u32, GlobalId)>,
    used: &'b mut BTreeSet<(&'static str, &'static str)>,
}

impl Emitter<'_, '_> {
    fn line(&mut self, line: &str) {
        let _ = writeln!(self.text, "{}{line}", "    ".repeat(self.depth));
    }

    fn uses(&mut self, module: &'static str, name: &'static str) {
        self.used.insert((module, name));
    }

    fn name(&self, tile: TileId) -> &str {
        &self.plan.body.tiles[tile.0].name
    }

    fn global(&self, global: GlobalId) -> &str {
        &self.plan.body.globals[global.0].name
    }

    fn place(&self, tile: TileId) -> Place {
        self.plan.body.tiles[tile.0].place
    }

    fn function(&mut self) {
        let body = &self.plan.body;
        let asks = Asks::of(&body.steps);
        let mut arguments = vec!["block: &Block".to_owned()];
        let (mut indices, mut through) = (BTreeSet::new(), Vec::new());
        for global in &body.globals {
            match &global.through {
                None => arguments.push(format!("{}: &Rows<impl Fn(u32) -> Row>", global.name)),
                Some((table, index)) => {
                    indices.insert(index);
                    through.push(format!("let {} = &{}.through({index});", global.name, self.global(*table)));
                }
            }
        }
        arguments.extend(indices.iter().map(|name| format!("{name}: &Index<impl Fn(u32) -> u32>")));
        if asks.seen.is_some() || asks.seen_by {
            arguments.push("seen: impl Fn(u32) -> u32".to_owned());
        }
        self.seen = asks.seen;
        if self.seen.is_some() {
            arguments.push("window: u32".to_owned());
        }
        if asks.share {
            arguments.push("share: [u32; 2]".to_owned());
        }
        arguments.extend(body.of_rows.iter().map(|name| format!("{name}: impl Fn(u32) -> f32")));
        arguments.extend(body.scalars.iter().map(|name| format!("{name}: f32")));
        let (rows, written) = (self.global(body.rows).to_owned(), self.global(body.base(body.rows)).to_owned());
        for name in ["Lane", "Rows", "WARP_ROWS"] {
            self.uses("gpu::tile", name);
        }
        let mut promises = format!(
            "/// Every thread of the block makes this same call; the operands are there, nobody else writes them, and nobody else touches \
             `{written}`,\n/// whose rows are as many as those of what is read with it. The memory of tiles is the task's."
        );
        if !indices.is_empty() {
            self.uses("gpu::tile", "Index");
            promises.push_str(
                "\n/// What an index says are rows of what it is used with; those that are written, each once.",
            );
        }
        if asks.adds {
            let _ = write!(promises, "\n/// `{written}` is f32.");
        }
        // As many as clippy takes for few.
        let many = if arguments.len() > 7 {
            "#[allow(clippy::too_many_arguments, reason = \"operands, and what else it asks for\")]\n"
        } else {
            ""
        };
        let _ = write!(
            self.text,
            "/// {}\n///\n/// # Safety\n{promises}\n{many}pub(super) unsafe fn {}({}) {{\n",
            body.doc,
            body.name,
            arguments.join(", ")
        );
        let offsets = body.offsets();
        self.depth = 1;
        for tile in &body.tiles {
            if let Place::Shared { rows, columns, .. } = tile.place {
                self.uses("gpu::tile", "Tile");
                self.line(&format!("type {} = Tile<{rows}, {}>;", type_name(&tile.name), columns / 8));
            }
        }
        for (tile, offset) in body.tiles.iter().zip(&offsets) {
            if let Place::Own { columns } = tile.place {
                self.uses("gpu::tile", "Own");
                self.line(&format!("let {} = &Own::<{}>::at({offset});", tile.name, columns / 8));
            }
        }
        for line in through {
            self.line(&line);
        }
        self.line(
            "// SAFETY: the caller's promises; what stands between accesses of a tile has been found, and judged.",
        );
        self.line("unsafe {");
        self.depth = 2;
        self.line("let mut first = 0;");
        self.line(&format!("while first < {rows}.count {{"));
        self.depth = 3;
        self.line(&format!("let lane = &Lane::of(block, first, {rows}.count);"));
        if let Some((by, seen)) = asks.seen {
            let seen = self.global(seen).to_owned();
            for name in ["last_row", "window_from", "within"] {
                self.uses("gpu::tile", name);
            }
            self.line(&format!("let seen_from = window_from(seen(first), window, {by});"));
            self.line(&format!("let last = last_row(block, first, {rows}.count);"));
            self.line(&format!("let seen_end = within(&seen, {seen}.count)(last);"));
        }
        if asks.seen_by {
            let seen = if asks.share { "within(&seen, share[1])" } else { "&seen" };
            if asks.share {
                self.uses("gpu::tile", "within");
            }
            self.line(&format!("let seen_by = lane.each_row({rows}.count, {seen});"));
        }
        self.declared.push(BTreeSet::new());
        self.acts(&self.plan.acts, &[]);
        self.line("first += WARP_ROWS * block.warps();");
        self.depth = 2;
        self.line("}");
        if body.tiles.iter().any(|tile| matches!(tile.place, Place::Shared { .. } | Place::Own { .. })) {
            self.uses("arch", "copy");
            self.line("// Whoever comes next may bring tiles there by bulk copies.");
            self.line("copy::fence_tiles();");
        }
        self.depth = 1;
        self.line("}");
        self.depth = 0;
        self.line("}");
    }

    /// `acts`, in loops `open`.
    fn acts(&mut self, acts: &[Act], open: &[&Loop]) {
        for (at, act) in acts.iter().enumerate() {
            match act {
                Act::Do(op) => self.op(op, &acts[at + 1..], open),
                Act::Meet(Scope::Block) => self.line("block.sync();"),
                Act::Meet(Scope::Warp) => {
                    self.uses("arch", "warp");
                    self.line("warp::sync();");
                }
                Act::Await(left) => {
                    self.uses("arch", "copy");
                    self.line(&format!("copy::wait::<{left}>();"));
                }
                Act::Begin { of, loads, ahead, is_first } => {
                    let after = acts[at + 1..].iter().find_map(|act| match act {
                        Act::Loop { of: next, .. } if Some(next.id) == *of => Some(next),
                        _ => None,
                    });
                    let inside = open.iter().find(|inner| Some(inner.id) == *of).copied();
                    self.begin(inside.or(after), loads, *ahead, *is_first, open);
                }
                Act::Loop { of, acts } => {
                    let (name, has_rounds) = (&of.name, has_stages(self.plan, acts));
                    let (from, end) = (first_of(of.end, 0), self.extent(of.end));
                    if has_rounds {
                        self.line(&format!("let (mut {name}, mut {name}_round) = ({from}, 0);"));
                    } else {
                        self.line(&format!("let mut {name} = {from};"));
                    }
                    self.line(&format!("while {name} < {end} {{"));
                    self.depth += 1;
                    self.declared.push(BTreeSet::new());
                    let inside: Vec<&Loop> = open.iter().copied().chain([of]).collect();
                    self.acts(acts, &inside);
                    self.declared.pop();
                    self.line(&format!("{name} += {};", of.by));
                    if has_rounds {
                        self.line(&format!("{name}_round += 1;"));
                    }
                    self.depth -= 1;
                    self.line("}");
                }
            }
        }
    }

    fn extent(&self, end: Extent) -> String {
        match end {
            Extent::Rows(global) => format!("{}.count", self.global(global)),
            Extent::Columns(global) => format!("{}.columns", self.global(global)),
            Extent::Seen(_) => "seen_end".to_owned(),
            Extent::Share => "share[1]".to_owned(),
        }
    }

    fn begin(&mut self, of: Option<&Loop>, loads: &[Op], ahead: u32, is_first: bool, open: &[&Loop]) {
        self.uses("arch", "copy");
        // What is ahead by no round is there: the loop has it.
        let is_sure = of.is_none() || ahead == 0 && !is_first;
        if let Some(of) = of.filter(|_| !is_sure) {
            let at = if is_first { first_of(of.end, of.by * ahead) } else { plus(&of.name, of.by * ahead) };
            self.line(&format!("if {at} < {} {{", self.extent(of.end)));
            self.depth += 1;
        }
        for load in loads {
            let Op::Load { to, from, row, column } = load else { continue };
            let place = |start: &Start| match (start.of, of) {
                (Some(id), Some(of)) if of.id == id && is_first => first_of(of.end, of.by * ahead + start.plus),
                (Some(id), Some(of)) if of.id == id => plus(&of.name, of.by * ahead + start.plus),
                _ => place_in(start, open),
            };
            let (row, column) = (place(row), place(column));
            let round = match of {
                None => "0".to_owned(),
                Some(_) if is_first => ahead.to_string(),
                Some(of) => plus(&format!("{}_round", of.name), ahead),
            };
            let tile = self.shared(*to, &round);
            self.line(&format!("{tile}.load(block, {}, {row}, {column});", self.global(*from)));
        }
        if !is_sure {
            self.depth -= 1;
            self.line("}");
        }
        self.line("copy::commit();");
    }

    /// The Shared tile whose turn it is in round `round`.
    fn shared(&self, tile: TileId, round: &str) -> String {
        let (offset, stages) = (self.plan.body.offsets()[tile.0], stages(&self.plan.body, tile));
        let round = if stages == 1 { "0" } else { round };
        format!("{}::at({offset}, {stages}, {round})", type_name(self.name(tile)))
    }

    /// `op`, in loops `open`, before `after`.
    fn op(&mut self, op: &Op, after: &[Act], open: &[&Loop]) {
        match op {
            Op::Load { .. } => unreachable!("loads are begun"),
            Op::Split { to, from, column } => {
                let column = place_in(column, open);
                let line = format!("{}.split(lane, {}, {column});", self.name(*to), self.global(*from));
                self.line(&line);
            }
            Op::Read { to, from, rows, column } => {
                let how = if *rows == Whose::Own { "read" } else { "read_first" };
                let (from, column) = (self.global(*from).to_owned(), place_in(column, open));
                let text = match self.place(*to) {
                    Place::Eights { columns } => {
                        self.uses("gpu::tile", "Eights");
                        format!("Eights::<{}>::{how}(lane, {from}, {column})", columns / 32)
                    }
                    _ => {
                        self.uses("gpu::tile", "PerRow");
                        format!("PerRow::{how}(lane, {from}, {column})")
                    }
                };
                self.set(*to, &text, after);
            }
            Op::Write { to, from, column, update } => {
                let how = if *update == Update::Add { "add" } else { "write" };
                let column = place_in(column, open);
                let line = format!("{}.{how}(lane, {}, {column});", self.name(*from), self.global(*to));
                self.line(&line);
            }
            Op::Keep { to, from } => {
                let line = format!("{}.keep(lane, &{});", self.name(*to), self.name(*from));
                self.line(&line);
            }
            Op::Fill { to, value } => {
                let value = number(*value);
                let text = match self.place(*to) {
                    Place::PerRow => {
                        self.uses("gpu::tile", "PerRow");
                        format!("PerRow::of({value})")
                    }
                    Place::Eights { columns } => {
                        self.uses("gpu::tile", "Eights");
                        format!("Eights::<{}>::of({value})", columns / 32)
                    }
                    Place::Sixteens { columns } => {
                        self.uses("gpu::tile", "Sixteens");
                        format!("Sixteens::<{}>::of({value})", columns / 64)
                    }
                    place => unreachable!("{place:?} is not filled"),
                };
                self.set(*to, &text, after);
            }
            Op::Ask { to, of } => {
                self.uses("gpu::tile", "PerRow");
                let rows = self.global(self.plan.body.rows);
                let text = format!("PerRow(lane.each_row({rows}.count, &{of}))");
                self.set(*to, &text, after);
            }
            Op::Product { into, a, b, by } => {
                let round = self.round_of(*b, open);
                // What is Own is a reference already.
                let (how, and) = match (by, self.place(*a)) {
                    (By::Rows, Place::Own { .. }) => ("add_rows", ""),
                    (By::Rows, _) => ("add_rows_of", "&"),
                    (By::Columns, _) => ("add_columns", "&"),
                };
                let (into, a, b) = (self.name(*into), self.name(*a), self.shared(*b, &round));
                self.line(&format!("{into}.{how}(lane, {and}{a}, &{b});"));
            }
            Op::Reduce { to, of, by } => {
                let how = if *by == Reduction::Max { "max" } else { "sum" };
                self.set(*to, &format!("{}.{how}()", self.name(*of)), after);
            }
            Op::Map { to, expr } => {
                let text = self.map(expr);
                self.set(*to, &text, after);
            }
        }
    }

    /// The variable that counts the rounds of the loop that loads `tile`.
    fn round_of(&self, tile: TileId, open: &[&Loop]) -> String {
        let id = self.plan.loop_of(tile);
        let of = open.iter().find(|open| Some(open.id) == id);
        of.map_or("0".to_owned(), |of| format!("{}_round", of.name))
    }

    /// Sets a register tile, before `after`: a variable of this scope's own, or one of a scope around it.
    fn set(&mut self, tile: TileId, value: &str, after: &[Act]) {
        let name = self.name(tile).to_owned();
        let (scope, around) = self.declared.split_last_mut().expect("there is a scope");
        if !scope.contains(&tile) && around.iter().any(|scope| scope.contains(&tile)) {
            return self.line(&format!("{name} = {value};"));
        }
        scope.insert(tile);
        let and = if is_changed(tile, after) { "mut " } else { "" };
        self.line(&format!("let {and}{name} = {value};"));
    }

    fn map(&mut self, expr: &Expr) -> String {
        let tiles = expr.tiles();
        let matrices: Vec<TileId> = tiles.into_iter().filter(|tile| self.place(*tile) != Place::PerRow).collect();
        if let Expr::Tile(tile) = expr {
            return self.name(*tile).to_owned();
        }
        let mut asks = [false; 2];
        expr.each(&mut |part| {
            asks[0] |= matches!(part, Expr::Tile(tile) if self.place(*tile) == Place::PerRow);
            asks[0] |= matches!(part, Expr::Visible(..));
            asks[1] |= matches!(part, Expr::Visible(..));
        });
        let value = self.expr(expr, &matrices, 0);
        let [row, column] =
            [(asks[0], "row"), (asks[1], "column")].map(|(is_asked, name)| if is_asked { name } else { "_" });
        match matrices[..] {
            [one] => format!("{}.map(lane, |x, {row}, {column}| {value})", self.name(one)),
            [one, other] => {
                format!("{}.map_with(lane, &{}, |x, z, {row}, {column}| {value})", self.name(one), self.name(other))
            }
            _ => {
                self.uses("gpu::tile", "PerRow");
                format!("PerRow::each(|{row}| {value})")
            }
        }
    }

    /// `expr`, in brackets where its operator binds less than `level`; numbers of `matrices`, at most two, are the
    /// closure's arguments.
    fn expr(&mut self, expr: &Expr, matrices: &[TileId], level: u8) -> String {
        let (text, own) = match expr {
            Expr::Tile(tile) if matrices.first() == Some(tile) => ("x".to_owned(), 3),
            Expr::Tile(tile) if matrices.contains(tile) => ("z".to_owned(), 3),
            Expr::Tile(tile) => (format!("{}.0[row]", self.name(*tile)), 3),
            Expr::Scalar(name) => (name.clone(), 3),
            Expr::Constant(value) => (number(*value), 3),
            Expr::Add(a, b) => (format!("{} + {}", self.expr(a, matrices, 1), self.expr(b, matrices, 2)), 1),
            Expr::Sub(a, b) => (format!("{} - {}", self.expr(a, matrices, 1), self.expr(b, matrices, 2)), 1),
            Expr::Mul(a, b) => (format!("{} * {}", self.expr(a, matrices, 2), self.expr(b, matrices, 3)), 2),
            Expr::Larger(a, b) => {
                self.uses("gpu::math", "larger");
                (format!("larger({}, {})", self.expr(a, matrices, 0), self.expr(b, matrices, 0)), 3)
            }
            Expr::Exp2(a) => {
                self.uses("arch::scalar", "exp2");
                (format!("exp2({})", self.expr(a, matrices, 0)), 3)
            }
            Expr::Reciprocal(a) => {
                self.uses("arch::scalar", "reciprocal");
                (format!("reciprocal({})", self.expr(a, matrices, 0)), 3)
            }
            Expr::ReciprocalRoot(a) => {
                self.uses("arch::scalar", "rsqrt");
                (format!("rsqrt({})", self.expr(a, matrices, 0)), 3)
            }
            Expr::Visible(id, a) => {
                let name = loop_name(&self.plan.body.steps, *id).unwrap_or_default();
                let a = self.expr(a, matrices, 0);
                if let Some((_, seen)) = self.seen {
                    self.uses("gpu::tile", "where_in_window");
                    let count = format!("{}.count", self.global(seen));
                    (format!("where_in_window({name} + column, seen_by[row], window, {count}, {a})"), 3)
                } else {
                    self.uses("gpu::tile", "where_seen");
                    (format!("where_seen({name} + column, seen_by[row], {a})"), 3)
                }
            }
        };
        if own < level { format!("({text})") } else { text }
    }
}

/// As Rust writes it.
fn number(value: f32) -> String {
    let sign = if value.is_sign_negative() { "-" } else { "" };
    match value.abs() {
        f32::INFINITY if sign == "-" => "f32::NEG_INFINITY".to_owned(),
        f32::INFINITY => "f32::INFINITY".to_owned(),
        std::f32::consts::LOG2_E => format!("{sign}core::f32::consts::LOG2_E"),
        std::f32::consts::LN_2 => format!("{sign}core::f32::consts::LN_2"),
        value => format!("{sign}{value:?}"),
    }
}

/// So many after the first place of a loop that goes as far as `end`.
fn first_of(end: Extent, n: u32) -> String {
    match end {
        Extent::Share => plus("share[0]", n),
        Extent::Seen(_) => plus("seen_from", n),
        _ => n.to_string(),
    }
}

/// Where `start` is, in loops `open`.
fn place_in(start: &Start, open: &[&Loop]) -> String {
    let of = start.of.and_then(|id| open.iter().find(|open| open.id == id));
    of.map_or(start.plus.to_string(), |of| plus(&of.name, start.plus))
}

/// `name + n`.
fn plus(name: &str, n: u32) -> String {
    if n == 0 { name.to_owned() } else { format!("{name} + {n}") }
}

/// `name`, as types are written.
fn type_name(name: &str) -> String {
    let word = |word: &str| word[..1].to_uppercase() + &word[1..];
    name.split('_').map(word).collect()
}

/// Whether a variable of `tile` changes in `after`: added to, or set in a loop, before it is made anew.
fn is_changed(tile: TileId, after: &[Act]) -> bool {
    for act in after {
        match act {
            Act::Do(Op::Product { into, .. }) if *into == tile => return true,
            Act::Do(op) if op.writes() == Some(tile) => return false,
            Act::Loop { acts, .. } if writes(tile, acts) => return true,
            _ => {}
        }
    }
    false
}

fn writes(tile: TileId, acts: &[Act]) -> bool {
    acts.iter().any(|act| match act {
        Act::Do(op) => op.writes() == Some(tile),
        Act::Loop { acts, .. } => writes(tile, acts),
        _ => false,
    })
}

/// Whether rounds of the loop whose acts these are have tiles that take turns.
fn has_stages(plan: &Plan, acts: &[Act]) -> bool {
    let is_staged = |load: &Op| load.writes().is_some_and(|tile| stages(&plan.body, tile) > 1);
    acts.iter().any(|act| matches!(act, Act::Begin { loads, is_first: false, .. } if loads.iter().any(is_staged)))
}

/// What `steps` ask for beside operands, as arguments, and of the operand that they write.
#[derive(Default)]
struct Asks {
    /// How far the block's first and last row see, in steps of so many, of the operand whose rows are seen.
    seen: Option<(u32, GlobalId)>,
    /// How far each row does.
    seen_by: bool,
    share: bool,
    /// That it can be added to.
    adds: bool,
}

impl Asks {
    fn of(steps: &[Step]) -> Asks {
        let mut asks = Asks::default();
        asks.add(steps);
        asks
    }

    fn add(&mut self, steps: &[Step]) {
        for step in steps {
            match step {
                Step::Op(Op::Map { expr, .. }) => {
                    expr.each(&mut |expr| self.seen_by |= matches!(expr, Expr::Visible(..)));
                }
                Step::Op(op) => self.adds |= matches!(op, Op::Write { update: Update::Add, .. }),
                Step::Loop(inner) => {
                    if let Extent::Seen(of) = inner.end {
                        self.seen = self.seen.or(Some((inner.by, of)));
                    }
                    self.share |= inner.end == Extent::Share;
                    self.add(&inner.steps);
                }
            }
        }
    }
}

fn loop_name(steps: &[Step], id: LoopId) -> Option<String> {
    steps.iter().find_map(|step| match step {
        Step::Loop(inner) if inner.id == id => Some(inner.name.clone()),
        Step::Loop(inner) => loop_name(&inner.steps, id),
        Step::Op(_) => None,
    })
}
