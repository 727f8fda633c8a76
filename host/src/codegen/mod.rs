//! Bodies of macro kernels as graphs over the memory hierarchy, and the Rust that is generated from them.
//!
//! A [`Body`] says what a block computes and on which level of memory each tile of it lies; it says nothing of
//! barriers, stages or addresses. Its operations are the macro kernels of the levels (the device crate's `gpu::tile`),
//! in the order in which a thread would make them:
//!
//! ```text
//! Global     rows of an operand, or those that an index says     load ▼ (cp.async)   split ▼ (two bf16 terms)   read ▼   ▲ write, add
//! Shared     Shared: all warps' rows, bf16                       Own: 16 rows a warp, its own                   product ▼ ▲ keep
//! Register   Eights, Sixteens: 16 rows a warp, all columns; PerRow                                     map, reduce, product, fill
//! ```
//!
//! ```text
//! Body ─▶ Plan ─▶ Rust, committed in device/src
//! WHAT    WHO waits for whom
//! ```
//! [`check()`] judges a body. [`plan`](plan::plan()) moves loads ahead by as many stages as their tiles have and finds
//! the barriers and waits: from who touches which part of a tile, as a thread's copies under way, a warp, or the block.
//! [`judge`](judge::judge()) runs what was planned on threads with vector clocks and shares no code with it.
//! [`emit`](emit::emit()) writes what was planned as Rust, which leaves its tiles behind a fence between proxies: what
//! comes next may bring others there by bulk copies. [`bodies`] are the library's own; a test generates their files
//! again.
//!
//! The levels, nested loops and access maps are TiledKernel's; that a copy is one verb whose kind follows from the two
//! levels is TileLang's; that synchronisation is found and not written is Cypress's (Yadav et al. 2025). Barriers are
//! placed as late as they may be, which needs the fewest on a straight line.

pub mod bodies;
mod check;
pub mod emit;
pub mod judge;
pub mod plan;

pub use check::check;
use std::ops::{Add, Mul, Sub};

/// Rows that each warp has.
pub const WARP_ROWS: u32 = 16;

/// Bytes of shared memory that a body may use: the ring's.
pub const CAPACITY: u32 = perpetua_shared::launch::TILE_BYTES;

/// Warps of a block.
pub const WARPS: u32 = perpetua_shared::launch::TASK_THREADS / 32;

/// A tile of a [`Body`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TileId(pub usize);

/// An operand of a [`Body`], in global memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalId(pub usize);

/// An operand.
#[derive(Clone, Debug)]
pub struct Global {
    /// Its name, a Rust identifier.
    pub name: String,
    /// Whose rows it has, and the name of the index that says which: an argument of the body. Reads gather and writes
    /// scatter.
    pub through: Option<(GlobalId, String)>,
}

/// A loop of a [`Body`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoopId(pub usize);

/// Where a tile lies, and its shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In shared memory, rows of bf16 that all warps read; so many of it take turns that loads run ahead by one less.
    Shared {
        /// Its rows.
        rows: u32,
        /// Its columns.
        columns: u32,
        /// How many take turns.
        stages: u32,
    },
    /// In shared memory, 16 rows of each warp, which no other touches: in two bf16 terms, or as f32.
    Own {
        /// Its columns.
        columns: u32,
    },
    /// In registers, 16 rows of each warp, f32, a lane's columns by eight of 32: as products take and, by rows, make
    /// them.
    Eights {
        /// Its columns.
        columns: u32,
    },
    /// Likewise, by sixteen of 64: as products by columns make them.
    Sixteens {
        /// Its columns.
        columns: u32,
    },
    /// In registers, an f32 for each row.
    PerRow,
}

/// A tile.
#[derive(Clone, Debug)]
pub struct Tile {
    /// Its name, a Rust identifier.
    pub name: String,
    /// Where it lies.
    pub place: Place,
}

/// How far a loop goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Over an operand's rows.
    Rows(GlobalId),
    /// Over its columns.
    Columns(GlobalId),
    /// Over what the block's rows see of an operand's rows: arguments of the body say how much each row does, which may
    /// be more than there are, and that it sees no more than the last `window` of these, so that the loop begins with
    /// the step in which the first row's begin.
    Seen(GlobalId),
    /// Over a share of that, from its first to its end: an argument of the body, which other blocks have other shares
    /// in.
    Share,
}

/// Where rows or columns begin: so many after a loop's place, or after the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// The loop.
    pub of: Option<LoopId>,
    /// How many.
    pub plus: u32,
}

impl Start {
    /// With the first.
    pub const FIRST: Start = Start { of: None, plus: 0 };

    /// At `id`'s place.
    pub fn at(id: LoopId) -> Start {
        Start { of: Some(id), plus: 0 }
    }

    /// So many later.
    pub fn plus(self, n: u32) -> Start {
        Start { plus: self.plus + n, ..self }
    }
}

/// Which rows of an operand the rows of a warp are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// The row of each.
    Own,
    /// The first, for all of them: what belongs to columns.
    First,
}

/// What a write does to what is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Update {
    /// Overwrites it.
    Set,
    /// Adds to it, f32, atomically.
    Add,
}

/// How the right operand of a product lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// a . b^T: a row of it is a column of the result.
    Rows,
    /// a . b: a column of it is.
    Columns,
}

/// What a row is reduced to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Its largest number.
    Max,
    /// Its sum.
    Sum,
}

/// What a [`Map`](Op::Map) computes for each element, or row.
#[derive(Clone, Debug, PartialEq)]
pub enum Expr {
    /// The tile's number there; of [`Place::PerRow`] the row's.
    Tile(TileId),
    /// An argument of the body, f32.
    Scalar(String),
    /// A number.
    Constant(f32),
    /// `a + b`.
    Add(Box<Expr>, Box<Expr>),
    /// `a - b`.
    Sub(Box<Expr>, Box<Expr>),
    /// `a * b`.
    Mul(Box<Expr>, Box<Expr>),
    /// The larger one; `a` where `b` is NaN.
    Larger(Box<Expr>, Box<Expr>),
    /// 2^a.
    Exp2(Box<Expr>),
    /// 1 / a.
    Reciprocal(Box<Expr>),
    /// 1 / sqrt(a).
    ReciprocalRoot(Box<Expr>),
    /// The number where the row sees the column, counted from the loop's, and it is in the share where there is one;
    /// else -inf.
    Visible(LoopId, Box<Expr>),
}

/// The tile's number.
pub fn of(tile: TileId) -> Expr {
    Expr::Tile(tile)
}

/// 2^a.
pub fn exp2(a: Expr) -> Expr {
    Expr::Exp2(Box::new(a))
}

/// 1 / a.
pub fn reciprocal(a: Expr) -> Expr {
    Expr::Reciprocal(Box::new(a))
}

/// 1 / sqrt(a).
pub fn reciprocal_root(a: Expr) -> Expr {
    Expr::ReciprocalRoot(Box::new(a))
}

/// The larger one.
pub fn larger(a: Expr, b: Expr) -> Expr {
    Expr::Larger(Box::new(a), Box::new(b))
}

impl Add for Expr {
    type Output = Expr;
    fn add(self, other: Expr) -> Expr {
        Expr::Add(Box::new(self), Box::new(other))
    }
}

impl Sub for Expr {
    type Output = Expr;
    fn sub(self, other: Expr) -> Expr {
        Expr::Sub(Box::new(self), Box::new(other))
    }
}

impl Mul for Expr {
    type Output = Expr;
    fn mul(self, other: Expr) -> Expr {
        Expr::Mul(Box::new(self), Box::new(other))
    }
}

impl Expr {
    /// Calls `visit` for it and all it is made of.
    pub(crate) fn each(&self, visit: &mut impl FnMut(&Expr)) {
        visit(self);
        match self {
            Expr::Tile(_) | Expr::Scalar(_) | Expr::Constant(_) => {}
            Expr::Exp2(a) | Expr::Reciprocal(a) | Expr::ReciprocalRoot(a) | Expr::Visible(_, a) => a.each(visit),
            Expr::Add(a, b) | Expr::Sub(a, b) | Expr::Mul(a, b) | Expr::Larger(a, b) => {
                a.each(visit);
                b.each(visit);
            }
        }
    }

    /// The tiles it reads, in the order in which they stand.
    pub(crate) fn tiles(&self) -> Vec<TileId> {
        let mut tiles = Vec::new();
        self.each(&mut |expr| {
            if let Expr::Tile(tile) = expr
                && !tiles.contains(tile)
            {
                tiles.push(*tile);
            }
        });
        tiles
    }
}

/// An operation: a macro kernel of the levels that its operands lie on.
#[derive(Clone, Debug)]
pub enum Op {
    /// Global to Shared, by all threads, beside them.
    Load {
        /// The tile.
        to: TileId,
        /// The operand.
        from: GlobalId,
        /// Its first row.
        row: Start,
        /// Its first column.
        column: Start,
    },
    /// Global to Own: the block's rows, as two terms.
    Split {
        /// The tile.
        to: TileId,
        /// The operand.
        from: GlobalId,
        /// The first column.
        column: Start,
    },
    /// Global to registers.
    Read {
        /// Eights, or PerRow of each row: the one column.
        to: TileId,
        /// The operand.
        from: GlobalId,
        /// Which of its rows.
        rows: Whose,
        /// The first column.
        column: Start,
    },
    /// A constant, everywhere.
    Fill {
        /// The tile, in registers.
        to: TileId,
        /// The number.
        value: f32,
    },
    /// Adds a product.
    Product {
        /// Eights by rows, Sixteens by columns.
        into: TileId,
        /// Own or Eights by rows, Eights by columns.
        a: TileId,
        /// Shared.
        b: TileId,
        /// How it lies.
        by: By,
    },
    /// An argument of the body, what it says of each row.
    Ask {
        /// PerRow.
        to: TileId,
        /// Which.
        of: String,
    },
    /// Element by element of one tile of its shape, of Eights also of two, or row by row.
    Map {
        /// In registers.
        to: TileId,
        /// What.
        expr: Expr,
    },
    /// A number for each row.
    Reduce {
        /// PerRow.
        to: TileId,
        /// Eights.
        of: TileId,
        /// Which.
        by: Reduction,
    },
    /// Registers to Own, as f32.
    Keep {
        /// Own.
        to: TileId,
        /// Eights or Sixteens.
        from: TileId,
    },
    /// To the block's rows in Global.
    Write {
        /// The operand.
        to: GlobalId,
        /// Own, as f32, or PerRow: to one column.
        from: TileId,
        /// The first column.
        column: Start,
        /// How; PerRow is set.
        update: Update,
    },
}

/// A part of a body.
#[derive(Clone, Debug)]
pub enum Step {
    /// An operation.
    Op(Op),
    /// A loop.
    Loop(Loop),
}

/// A loop, in steps of `by` from 0 on.
#[derive(Clone, Debug)]
pub struct Loop {
    /// Which.
    pub id: LoopId,
    /// Its variable, a Rust identifier.
    pub name: String,
    /// Its step.
    pub by: u32,
    /// How far it goes.
    pub end: Extent,
    /// What it does.
    pub steps: Vec<Step>,
}

/// A body: see the [module](self). All of it is done for each 16 rows a warp that the block has of the rows of `rows`.
#[derive(Clone, Debug)]
pub struct Body {
    /// Its name, a Rust identifier.
    pub name: String,
    /// What it computes, as its documentation.
    pub doc: String,
    /// Its operands.
    pub globals: Vec<Global>,
    /// Its other arguments', f32.
    pub scalars: Vec<String>,
    /// Those that say an f32 of each row.
    pub of_rows: Vec<String>,
    /// Its tiles.
    pub tiles: Vec<Tile>,
    /// The operand whose rows the block goes over: one it writes.
    pub rows: GlobalId,
    /// What it does with 16 rows a warp.
    pub steps: Vec<Step>,
    n_loops: usize,
}

impl Body {
    /// One with these operands, of which the last is written, row by row, and the others read. [`rows`](Body::rows) is
    /// the last, too.
    pub fn new<const N: usize>(name: &str, doc: &str, globals: [&str; N]) -> (Body, [GlobalId; N]) {
        let body = Body {
            name: name.to_owned(),
            doc: doc.to_owned(),
            globals: globals.map(|name| Global { name: name.to_owned(), through: None }).to_vec(),
            scalars: Vec::new(),
            of_rows: Vec::new(),
            tiles: Vec::new(),
            rows: GlobalId(N - 1),
            steps: Vec::new(),
            n_loops: 0,
        };
        (body, std::array::from_fn(GlobalId))
    }

    /// The rows of `table` that the index `index` says, in its order.
    pub fn through(&mut self, table: GlobalId, index: &str) -> GlobalId {
        let name = format!("{}_by_{index}", self.globals[table.0].name);
        self.globals.push(Global { name, through: Some((table, index.to_owned())) });
        GlobalId(self.globals.len() - 1)
    }

    /// The operand whose rows `global` has.
    pub fn base(&self, global: GlobalId) -> GlobalId {
        self.globals[global.0].through.as_ref().map_or(global, |(of, _)| self.base(*of))
    }

    /// A tile.
    pub fn tile(&mut self, name: &str, place: Place) -> TileId {
        self.tiles.push(Tile { name: name.to_owned(), place });
        TileId(self.tiles.len() - 1)
    }

    /// An argument.
    pub fn scalar(&mut self, name: &str) -> Expr {
        self.scalars.push(name.to_owned());
        Expr::Scalar(name.to_owned())
    }

    /// Asks argument `name` next, of each row, to tile `to`.
    pub fn ask(&mut self, name: &str, to: TileId) {
        self.of_rows.push(name.to_owned());
        self.op(Op::Ask { to, of: name.to_owned() });
    }

    /// Does `op` next.
    pub fn op(&mut self, op: Op) {
        self.steps.push(Step::Op(op));
    }

    /// Does next what `fill` adds, in a loop.
    pub fn each(&mut self, name: &str, by: u32, end: Extent, fill: impl FnOnce(&mut Body, LoopId)) {
        let id = LoopId(self.n_loops);
        self.n_loops += 1;
        let before = std::mem::take(&mut self.steps);
        fill(self, id);
        let steps = std::mem::replace(&mut self.steps, before);
        self.steps.push(Step::Loop(Loop { id, name: name.to_owned(), by, end, steps }));
    }

    /// Bytes of a tile in shared memory, as many as there are numbers for; 0 of others.
    pub fn bytes(&self, tile: TileId) -> u32 {
        match self.tiles[tile.0].place {
            Place::Shared { rows, columns, stages } => {
                2_u32.saturating_mul(rows).saturating_mul(columns).saturating_mul(stages)
            }
            Place::Own { columns } => (4 * WARP_ROWS * WARPS).saturating_mul(columns),
            _ => 0,
        }
    }

    /// Where each tile begins in shared memory: one after the other, since a loop's next round finds all of them alive.
    pub fn offsets(&self) -> Vec<u32> {
        let mut next = 0;
        let mut after = |tile| {
            next += self.bytes(TileId(tile));
            next - self.bytes(TileId(tile))
        };
        (0..self.tiles.len()).map(&mut after).collect()
    }
}

impl Op {
    /// The tiles it reads.
    pub(crate) fn reads(&self) -> Vec<TileId> {
        match self {
            Op::Load { .. } | Op::Split { .. } | Op::Read { .. } | Op::Fill { .. } | Op::Ask { .. } => Vec::new(),
            Op::Product { into, a, b, .. } => vec![*into, *a, *b],
            Op::Map { expr, .. } => expr.tiles(),
            Op::Reduce { of, .. } => vec![*of],
            Op::Keep { from, .. } | Op::Write { from, .. } => vec![*from],
        }
    }

    /// The tile it writes.
    pub(crate) fn writes(&self) -> Option<TileId> {
        match self {
            Op::Load { to, .. } | Op::Split { to, .. } | Op::Fill { to, .. } | Op::Map { to, .. } => Some(*to),
            Op::Read { to, .. } | Op::Reduce { to, .. } | Op::Keep { to, .. } | Op::Ask { to, .. } => Some(*to),
            Op::Product { into, .. } => Some(*into),
            Op::Write { .. } => None,
        }
    }
}
