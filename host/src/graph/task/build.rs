//! From a thread-block graph to its tasks and events.

use super::family::{Factor, Families, Product, part_of};
use super::order::{Before, Ranges, Reach};
use super::region::{Axes, Placed, Region, Sides, intersect, subtract};
use super::relation::{Relation, Relations, regions_meet};
use super::{BlocksConflict, Config, Defect, Lists, Stats, Task, TaskClass, TaskError, TaskGraph};
use crate::graph::threadblock::{AccessKind, BlockOp, ThreadBlockGraph};
use perpetua_shared::limits::MAX_TASKS;
use std::rc::Rc;

/// How a byte is used, in the order in which the uses of one task are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Use {
    Read,
    Add,
    Write,
}

impl Use {
    const ALL: [Use; 3] = [Use::Read, Use::Add, Use::Write];

    fn of(kind: AccessKind) -> Use {
        match kind {
            AccessKind::Read => Use::Read,
            AccessKind::Write | AccessKind::ReadWrite => Use::Write,
            AccessKind::ReduceAdd | AccessKind::Append => Use::Add,
        }
    }

    /// Reads are free among themselves, and so are additions.
    fn conflicts(self, other: Use) -> bool {
        self != other || self == Use::Write
    }
}

/// An older operator and how the blocks of the one at hand depend on its blocks.
type Edge = (u32, Vec<Product>);

/// A relation of more pairs than this per block is not searched block by block for ways around it.
const MAX_SPARSE_DEGREE: u64 = 4;

/// An access of the operator at hand.
struct Touch {
    buffer: usize,
    tensor: usize,
    usage: Use,
    placed: Rc<Placed>,
    region: Region,
}

/// An older access.
struct Live {
    op: u32,
    usage: Use,
    placed: Rc<Placed>,
    /// Per kind of use, where a new access of that kind depends on this one directly: regions that do not overlap.
    direct: [Vec<Region>; 3],
}

impl Live {
    /// What a newer access covers is no longer direct in an older one it conflicts with: for every use that conflicts
    /// with the newer access, the way to the older one leads through it. Says whether anything is left.
    fn supersede(&mut self, newer: &Touch, whole: bool) -> bool {
        if self.usage.conflicts(newer.usage) {
            for usage in Use::ALL {
                if usage.conflicts(newer.usage) {
                    cut(&mut self.direct[usage as usize], &newer.region, whole);
                }
            }
        } else {
            self.pass(newer);
        }
        self.direct.iter().any(|pieces| !pieces.is_empty())
    }

    /// Two reads (or two additions) do not conflict, but where an access of the other kind came between, it orders
    /// them, and the newer one supersedes the older there too.
    fn pass(&mut self, newer: &Touch) {
        let between = if self.usage == Use::Read { Use::Add } else { Use::Read };
        // A write would find whatever nothing has come after.
        let (open, live) = (&self.direct[Use::Write as usize], &self.direct[between as usize]);
        if open == live || !live.iter().any(|piece| regions_meet(piece, &newer.region)) {
            return;
        }
        let mut closed = vec![newer.region.clone()];
        for piece in open {
            if !cut(&mut closed, piece, false) {
                return;
            }
        }
        for piece in &closed {
            cut(&mut self.direct[between as usize], piece, false);
        }
    }
}

/// Pieces a live region may fall into. Beyond this it is not cut any further: a superset of what is live gives
/// orderings that are right but implied.
const MAX_PIECES: usize = 64;

/// Makes the tasks and events of `graph`.
///
/// The graph is checked first. Run-time-bounded regions (a KV cache up to the position) count as their whole box.
pub fn lower(graph: &ThreadBlockGraph, config: &Config) -> Result<TaskGraph, TaskError> {
    graph.check().map_err(TaskError::Graph)?;
    let mut tasks = place_tasks(graph)?;
    tasks.classes = vec![TaskClass::default(); graph.ops.len()];
    for (op, class) in &config.classes {
        if let Some(at) = tasks.classes.get_mut(*op as usize) {
            *at = *class;
        }
    }
    Lowering::new(graph, config)?.run(&mut tasks)?;
    Ok(tasks)
}

/// The tasks, without events.
fn place_tasks(graph: &ThreadBlockGraph) -> Result<TaskGraph, TaskError> {
    let mut out = TaskGraph::default();
    let mut n_tasks = 0;
    for op in &graph.ops {
        n_tasks += op.n_blocks();
        if n_tasks > MAX_TASKS as u64 {
            return Err(TaskError::TooManyTasks { op: op.name.clone() });
        }
    }
    out.tasks.reserve_exact(n_tasks as usize);
    for (i, op) in graph.ops.iter().enumerate() {
        out.op_first.push(out.tasks.len() as u32);
        let [nx, ny, nz] = op.grid;
        for z in 0..nz {
            for y in 0..ny {
                for x in 0..nx {
                    out.tasks.push(Task { op: i as u32, block: [x, y, z] });
                }
            }
        }
    }
    out.op_first.push(out.tasks.len() as u32);
    Ok(out)
}

struct Lowering<'a> {
    graph: &'a ThreadBlockGraph,
    config: &'a Config,
    axes: Axes,
    sides: Sides,
    relations: Relations,
    /// Per buffer, whether anything writes it: what nobody writes orders nobody.
    written: Vec<bool>,
    /// Per buffer, the accesses still live.
    live: Vec<Vec<Live>>,
    before: Vec<Before<Ranges>>,
    /// Per operator, what it depends on directly, nearest first.
    edges: Vec<Vec<Edge>>,
    families: Families,
    stats: Stats,
}

impl<'a> Lowering<'a> {
    fn new(graph: &'a ThreadBlockGraph, config: &'a Config) -> Result<Self, TaskError> {
        let axes = Axes::find(graph)?;
        let n_buffers = graph.table.buffers.len();
        let mut written = vec![false; n_buffers];
        for access in graph.ops.iter().flat_map(|op| op.accesses.iter().flatten()) {
            written[graph.table[access.tensor].buffer.idx()] |= access.kind.writes();
        }
        Ok(Lowering {
            graph,
            config,
            axes,
            sides: Sides::default(),
            relations: Relations::default(),
            written,
            live: (0..n_buffers).map(|_| Vec::new()).collect(),
            before: Vec::with_capacity(graph.ops.len()),
            edges: Vec::with_capacity(graph.ops.len()),
            families: Families::new(graph.ops.len()),
            stats: Stats::default(),
        })
    }

    fn run(mut self, tasks: &mut TaskGraph) -> Result<(), TaskError> {
        for op in 0..self.graph.ops.len() {
            let touches = self.touches(op)?;
            self.refuse_conflicts_inside(op, &touches)?;
            let edges = self.direct_edges(&touches);
            self.keep_edges(op, edges);
            self.enliven(op, &touches);
        }
        self.families.write(&self.graph.ops, tasks);
        let (median_waits, max_waits) = middle_and_most(&tasks.waits);
        tasks.stats = Stats {
            ops: self.graph.ops.len() as u64,
            tasks: tasks.tasks.len() as u64,
            events: tasks.events.len() as u64,
            waits: tasks.waits.entries.len() as u64,
            triggers: tasks.triggers.entries.len() as u64,
            oversync: if self.stats.pairs == 0 {
                1.0
            } else {
                self.stats.waited_pairs as f64 / self.stats.pairs as f64
            },
            median_waits,
            max_waits,
            ..self.stats
        };
        Ok(())
    }

    /// The accesses of `op` that can conflict with any other.
    fn touches(&mut self, op: usize) -> Result<Vec<Touch>, TaskError> {
        let block_op = &self.graph.ops[op];
        let mut touches = Vec::with_capacity(block_op.accesses.len());
        for access in block_op.accesses.iter().flatten() {
            let tensor = &self.graph.table[access.tensor];
            let buffer = tensor.buffer.idx();
            if !self.written[buffer] || tensor.shape.contains(&0) {
                continue;
            }
            let placed = self.axes.place(self.graph, block_op, access, &mut self.sides)?;
            let region: Region = placed.sides.iter().map(|s| self.sides.runs(s.side).union.clone()).collect();
            touches.push(Touch {
                buffer,
                tensor: access.tensor.idx(),
                usage: Use::of(access.kind),
                placed: Rc::new(placed),
                region,
            });
        }
        touches.sort_by_key(|touch| touch.usage);
        Ok(touches)
    }

    /// The relation of two accesses inside `clip`.
    fn product(&mut self, producer: &Placed, consumer: &Placed, clip: &Region) -> Option<Product> {
        let limits = (&self.config.costs, self.config.max_entries_per_part);
        let (relations, sides) = (&mut self.relations, &self.sides);
        Product::of(producer.sides.iter().zip(&consumer.sides).zip(clip).map(|((p, c), clip)| Factor {
            producer_axes: p.axes,
            consumer_axes: c.axes,
            relation: relations.between(sides, p.side, c.side, clip, limits),
        }))
    }

    /// Blocks of one operator run in any order, so no block may write what another touches.
    fn refuse_conflicts_inside(&mut self, op: usize, touches: &[Touch]) -> Result<(), TaskError> {
        let block_op = &self.graph.ops[op];
        if block_op.n_blocks() == 1 {
            return Ok(());
        }
        for (i, a) in touches.iter().enumerate() {
            for b in &touches[i..] {
                if a.buffer != b.buffer || !a.usage.conflicts(b.usage) || !regions_meet(&a.region, &b.region) {
                    continue;
                }
                let Some(product) = self.product(&a.placed, &b.placed, &a.region) else {
                    continue;
                };
                if let Some(blocks) = off_diagonal(&product, block_op) {
                    let name = |t: &Touch| self.graph.table.tensors[t.tensor].name.clone();
                    return Err(TaskError::BlocksConflict(Box::new(BlocksConflict {
                        op: block_op.name.clone(),
                        blocks,
                        buffer: self.graph.table.buffers[a.buffer].name.clone(),
                        first: name(a),
                        second: name(b),
                    })));
                }
            }
        }
        Ok(())
    }

    /// Every older operator that these accesses depend on directly, nearest first.
    ///
    /// Accesses are taken one after the other, reads before additions before writes, each superseding what it covers:
    /// where one operator touches a byte in two conflicting ways it is one task that does both, so what the first of
    /// them is ordered after, the second is too.
    fn direct_edges(&mut self, touches: &[Touch]) -> Vec<Edge> {
        let mut found: Vec<(u32, Product)> = Vec::new();
        for touch in touches {
            let mut live = std::mem::take(&mut self.live[touch.buffer]);
            for old in &live {
                let skipped = match self.config.defect {
                    Some(Defect::DropWar) => old.usage == Use::Read,
                    Some(Defect::DropWaw) => old.usage != Use::Read && touch.usage != Use::Read,
                    _ => false,
                };
                if skipped || !old.usage.conflicts(touch.usage) {
                    continue;
                }
                for piece in &old.direct[touch.usage as usize] {
                    if regions_meet(piece, &touch.region)
                        && let Some(product) = self.product(&old.placed, &touch.placed, piece)
                    {
                        found.push((old.op, product));
                    }
                }
            }
            let whole = self.config.defect == Some(Defect::SupersedeWhole);
            live.retain_mut(|old| old.supersede(touch, whole));
            self.live[touch.buffer] = live;
        }
        found.sort_by_key(|(op, _)| std::cmp::Reverse(*op));
        let mut edges: Vec<Edge> = Vec::new();
        for (op, product) in found {
            if edges.last().is_none_or(|(last, _)| *last != op) {
                edges.push((op, Vec::new()));
            }
            if let Some((_, products)) = edges.last_mut() {
                if self.config.defect == Some(Defect::FirstTensorOnly) && !products.is_empty()
                    || products.iter().any(|p| product.is_within(p))
                {
                    continue;
                }
                products.retain(|p| !p.is_within(&product));
                products.push(product);
            }
        }
        edges
    }

    /// Turns edges into events, but for those that nearer ones imply.
    fn keep_edges(&mut self, op: usize, edges: Vec<Edge>) {
        let mut before = Before::<Ranges>::default();
        let mut kept: Vec<usize> = Vec::new();
        for (at, (producer, products)) in edges.iter().enumerate() {
            self.stats.edges += 1;
            let all =
                |holds: fn(&Relation) -> bool| products.iter().any(|p| p.factors.iter().all(|f| holds(&f.relation)));
            let mut reach = Reach {
                full: products.iter().any(|p| p.factors.is_empty()),
                covers_consumers: all(|r| r.covers_consumers),
                covers_producers: all(|r| r.covers_producers),
            };
            let known = &self.before[*producer as usize];
            let implied = if self.config.defect == Some(Defect::StripResiduals) {
                before.each.contains(*producer)
            } else if before.all.contains(*producer) {
                reach = Reach::ALL;
                true
            } else {
                self.leads_through(op, &edges[at], kept.iter().map(|k| &edges[*k]))
            };
            before.learn(*producer, known, reach);
            if implied {
                self.stats.implied_edges += 1;
                continue;
            }
            kept.push(at);
            for product in products {
                let ops = &self.graph.ops;
                let (pairs, waited) = product.pairs(&ops[*producer as usize], &ops[op]);
                self.stats.pairs += pairs;
                self.stats.waited_pairs += waited;
                self.families.add(*producer as usize, op, product);
            }
        }
        self.before.push(before);
        self.edges.push(edges);
    }

    /// Whether every pair of `edge` into `op` is a chain of two pairs, through one of the `nearer` operators: aligned
    /// operators in a row, say. Looked at task by task, so only where the relations are sparse.
    fn leads_through<'e>(
        &self,
        op: usize,
        (producer, products): &Edge,
        nearer: impl Iterator<Item = &'e Edge>,
    ) -> bool {
        let ops = &self.graph.ops;
        let (first, last) = (&ops[*producer as usize], &ops[op]);
        let is_sparse = |products: &[Product], a: &BlockOp, b: &BlockOp| {
            let pairs = products.iter().fold(0u64, |sum, p| sum.saturating_add(p.pairs(a, b).0));
            pairs <= MAX_SPARSE_DEGREE * (a.n_blocks() + b.n_blocks())
        };
        if !is_sparse(products, first, last) {
            return false;
        }
        let ways: Vec<(&BlockOp, &[Product], &[Product])> = nearer
            .filter_map(|(through, to_last)| {
                let middle = &ops[*through as usize];
                let (_, to_middle) = self.edges[*through as usize].iter().find(|(op, _)| op == producer)?;
                (is_sparse(to_last, middle, last) && is_sparse(to_middle, first, middle)).then_some((
                    middle,
                    &to_middle[..],
                    &to_last[..],
                ))
            })
            .collect();
        if ways.is_empty() {
            return false;
        }
        let mut reached = vec![0u32; first.n_blocks() as usize];
        (0..last.n_blocks()).all(|number| {
            let (block, stamp) = (last.block(number), number as u32 + 1);
            for (middle, to_middle, to_last) in &ways {
                for product in *to_last {
                    product.for_each_producer(middle, last, block, |m| {
                        for product in *to_middle {
                            product.for_each_producer(first, middle, middle.block(m as u64), |f| reached[f] = stamp);
                        }
                    });
                }
            }
            let mut all = true;
            for product in products {
                product.for_each_producer(first, last, block, |f| all &= reached[f] == stamp);
            }
            all
        })
    }

    /// The accesses are live from now on.
    fn enliven(&mut self, op: usize, touches: &[Touch]) {
        for (i, touch) in touches.iter().enumerate() {
            let mut direct = Use::ALL
                .map(|usage| if usage.conflicts(touch.usage) { vec![touch.region.clone()] } else { Vec::new() });
            // Where one operator also writes, it is one task that does both, and its write is all that counts.
            let writes = |j: usize, w: &Touch| {
                w.buffer == touch.buffer && w.usage == Use::Write && (touch.usage != Use::Write || j < i)
            };
            for (_, write) in touches.iter().enumerate().filter(|(j, w)| writes(*j, w)) {
                direct.iter_mut().for_each(|pieces| _ = cut(pieces, &write.region, false));
            }
            // Where it also adds, a later write comes after the addition; a later addition must still heed the read.
            if touch.usage == Use::Read {
                for add in touches.iter().filter(|a| a.buffer == touch.buffer && a.usage == Use::Add) {
                    cut(&mut direct[Use::Write as usize], &add.region, false);
                }
            }
            if direct.iter().all(Vec::is_empty) {
                continue;
            }
            self.live[touch.buffer].push(Live {
                op: op as u32,
                usage: touch.usage,
                placed: touch.placed.clone(),
                direct,
            });
        }
    }
}

/// The median and the largest length of a list.
fn middle_and_most(lists: &Lists) -> (u32, u32) {
    let mut n_of_length: Vec<usize> = Vec::new();
    for ends in lists.heads.windows(2) {
        let length = (ends[1] - ends[0]) as usize;
        if length >= n_of_length.len() {
            n_of_length.resize(length + 1, 0);
        }
        n_of_length[length] += 1;
    }
    let mut below = 0;
    let middle = n_of_length.iter().position(|n| {
        below += n;
        below > lists.len() / 2
    });
    (middle.unwrap_or(0) as u32, n_of_length.len().saturating_sub(1) as u32)
}

/// Takes `region` out of `pieces`; leaves them alone and says `false` when they would become too many.
fn cut(pieces: &mut Vec<Region>, region: &Region, whole: bool) -> bool {
    if !pieces.iter().any(|p| regions_meet(p, region)) {
        return true;
    }
    let mut left: Vec<Region> = Vec::new();
    for piece in pieces.iter() {
        if !regions_meet(piece, region) {
            left.push(piece.clone());
            continue;
        }
        if whole {
            continue;
        }
        // Peel off, axis by axis, what lies outside; what remains inside on every axis goes.
        let mut inside = piece.clone();
        for axis in 0..piece.len() {
            let outside = subtract(&inside[axis], &region[axis]);
            if !outside.is_empty() {
                let mut peeled = inside.clone();
                peeled[axis] = Rc::new(outside);
                left.push(peeled);
                inside[axis] = Rc::new(intersect(&inside[axis], &region[axis]));
            }
        }
    }
    if left.len() > MAX_PIECES {
        return false;
    }
    *pieces = left;
    true
}

/// Two different blocks of `op` that `product`, a relation of the operator with itself, relates.
fn off_diagonal(product: &Product, op: &BlockOp) -> Option<[[u32; 3]; 2]> {
    let related = |a: [u32; 3], b: [u32; 3]| {
        product.factors.iter().all(|f| {
            let consumer = f.relation.needs.of(part_of(f.consumer_axes, op.grid, b));
            consumer.binary_search(&(part_of(f.producer_axes, op.grid, a) as u32)).is_ok()
        })
    };
    let n_diagonal = (0..op.n_blocks()).filter(|n| related(op.block(*n), op.block(*n))).count() as u64;
    if product.pairs(op, op).0 == n_diagonal {
        return None;
    }
    // Rare, and only for the message.
    for n in 0..op.n_blocks() {
        for m in 0..op.n_blocks() {
            if n != m && related(op.block(m), op.block(n)) {
                return Some([op.block(m), op.block(n)]);
            }
        }
    }
    None
}
