//! From relations between operators to events: which events an operator's tasks trigger and wait on.
//!
//! A relation between the blocks of two operators is a product of relations on axes. The events that say it are a
//! *family*: one per combination of the factors' ids. A task triggers (waits on) the product of its parts' ids.

use super::relation::Relation;
use super::{Lists, TaskGraph};
use crate::graph::threadblock::{BlockOp, GRID_AXES};
use std::collections::HashMap;
use std::rc::Rc;

/// One factor of a product, between the parts told apart by some of the producer's and some of the consumer's grid
/// axes.
#[derive(Clone, Debug)]
pub(super) struct Factor {
    pub(super) producer_axes: u8,
    pub(super) consumer_axes: u8,
    pub(super) relation: Rc<Relation>,
}

/// A relation between the blocks of two operators: those are related whose parts are related in every factor.
#[derive(Clone, Debug, Default)]
pub(super) struct Product {
    /// Factors that relate everything are left out.
    pub(super) factors: Vec<Factor>,
}

impl Product {
    /// The product of `factors`, or `None` if it relates nothing.
    pub(super) fn of(factors: impl Iterator<Item = Factor>) -> Option<Product> {
        let mut product = Product::default();
        for factor in factors {
            if factor.relation.pairs == 0 {
                return None;
            }
            if !factor.relation.is_full() {
                product.factors.push(factor);
            }
        }
        // The order of factors is the order of event numbers: equal products must number alike.
        product.factors.sort_by_key(|f| (f.producer_axes, f.consumer_axes));
        Some(product)
    }

    /// Whether `other` certainly relates whatever this does.
    pub(super) fn is_within(&self, other: &Product) -> bool {
        other.factors.iter().all(|theirs| {
            self.factors.iter().any(|mine| {
                (mine.producer_axes, mine.consumer_axes) == (theirs.producer_axes, theirs.consumer_axes)
                    && (Rc::ptr_eq(&mine.relation, &theirs.relation) || mine.relation.is_within(&theirs.relation))
            })
        })
    }

    /// Related pairs of blocks, and the pairs the events relate.
    pub(super) fn pairs(&self, producer: &BlockOp, consumer: &BlockOp) -> (u64, u64) {
        let free = |op: &BlockOp, axes: u8| -> u64 {
            (0..GRID_AXES).filter(|a| axes & 1 << a == 0).map(|a| u64::from(op.grid[a])).product()
        };
        let producer_axes = self.factors.iter().fold(0, |axes, f| axes | f.producer_axes);
        let consumer_axes = self.factors.iter().fold(0, |axes, f| axes | f.consumer_axes);
        let rest = free(producer, producer_axes).saturating_mul(free(consumer, consumer_axes));
        let times = |pairs: fn(&Relation) -> u64| {
            self.factors.iter().fold(rest, |product, f| product.saturating_mul(pairs(&f.relation)))
        };
        (times(|r| r.pairs), times(|r| r.waited_pairs))
    }
}

impl Product {
    /// Calls `visit` with the number of every block of `producer` that `block` of `consumer` is related to.
    pub(super) fn for_each_producer(
        &self,
        producer: &BlockOp,
        consumer: &BlockOp,
        block: [u32; GRID_AXES],
        mut visit: impl FnMut(usize),
    ) {
        // Per factor the parts to choose from; an axis no factor looks at is free.
        let needs = self
            .factors
            .iter()
            .map(|f| (f.producer_axes, f.relation.needs.of(part_of(f.consumer_axes, consumer.grid, block)).to_vec()));
        let bound = self.factors.iter().fold(0, |axes, f| axes | f.producer_axes);
        let free = (0..GRID_AXES)
            .filter(|a| bound & 1 << a == 0)
            .map(|a| (1u8 << a, (0..producer.grid[a]).collect::<Vec<u32>>()));
        let mut blocks = vec![0usize];
        for (axes, parts) in needs.chain(free) {
            let steps: Vec<usize> = parts.iter().map(|part| number_of(axes, producer.grid, *part as usize)).collect();
            blocks = blocks.iter().flat_map(|at| steps.iter().map(move |step| at + step)).collect();
        }
        blocks.into_iter().for_each(&mut visit);
    }
}

/// What a part contributes to the number of a block.
fn number_of(axes: u8, grid: [u32; GRID_AXES], mut part: usize) -> usize {
    let (mut number, mut radix) = (0, 1);
    for (axis, n) in grid.iter().enumerate() {
        if axes & 1 << axis != 0 {
            number += part % *n as usize * radix;
            part /= *n as usize;
        }
        radix *= *n as usize;
    }
    number
}

/// The part of `block` among those that `axes` tell apart.
pub(super) fn part_of(axes: u8, grid: [u32; GRID_AXES], block: [u32; GRID_AXES]) -> usize {
    let (mut part, mut radix) = (0, 1);
    for axis in 0..GRID_AXES {
        if axes & 1 << axis != 0 {
            part += block[axis] as usize * radix;
            radix *= grid[axis] as usize;
        }
    }
    part
}

/// One end of a family, at an operator.
#[derive(Clone, Debug)]
struct End {
    family: usize,
    /// Per factor, the grid axes of this operator and its relation.
    factors: Vec<(u8, Rc<Relation>)>,
}

/// A consumer with its axes and interned waits, per factor.
type User = (u32, Vec<(u8, u32)>);

#[derive(Debug)]
struct Family {
    n_events: u32,
    /// Producer side: axes and the interned triggers, per factor.
    key: Vec<(u8, u32)>,
    /// Consumers, each with its axes and interned waits, per factor.
    users: Vec<User>,
}

/// The families of a graph.
#[derive(Debug)]
pub(super) struct Families {
    families: Vec<Family>,
    /// Per operator, the families it triggers.
    out: Vec<Vec<End>>,
    /// Per operator, the families it waits on.
    into: Vec<Vec<End>>,
}

impl Families {
    pub(super) fn new(n_ops: usize) -> Families {
        Families { families: Vec::new(), out: vec![Vec::new(); n_ops], into: vec![Vec::new(); n_ops] }
    }

    /// Orders `consumer`'s blocks after `producer`'s as `product` says. Consumers with the same sets of producers share
    /// the events.
    pub(super) fn add(&mut self, producer: usize, consumer: usize, product: &Product) {
        let counts = |f: &&Factor| f.producer_axes != 0 || f.relation.n_ids > 1;
        let key: Vec<(u8, u32)> =
            product.factors.iter().filter(counts).map(|f| (f.producer_axes, f.relation.triggers_id)).collect();
        let counts = |f: &&Factor| f.consumer_axes != 0 || f.relation.n_ids > 1;
        let user: Vec<(u8, u32)> =
            product.factors.iter().filter(counts).map(|f| (f.consumer_axes, f.relation.waits_id)).collect();
        let same = self.out[producer].iter().map(|end| end.family).find(|f| self.families[*f].key == key);
        let family = same.unwrap_or_else(|| {
            self.families.push(Family {
                n_events: product.factors.iter().map(|f| f.relation.n_ids).product(),
                key,
                users: Vec::new(),
            });
            let family = self.families.len() - 1;
            self.out[producer].push(End {
                family,
                factors: product.factors.iter().map(|f| (f.producer_axes, f.relation.clone())).collect(),
            });
            family
        });
        self.families[family].users.push((consumer as u32, user));
        self.into[consumer].push(End {
            family,
            factors: product.factors.iter().map(|f| (f.consumer_axes, f.relation.clone())).collect(),
        });
    }

    /// Numbers the events and writes every task's waits and triggers. Families that the same tasks wait on in the same
    /// way become one: no task waits longer, and each waits once.
    pub(super) fn write(self, ops: &[BlockOp], graph: &mut TaskGraph) {
        let mut first_event = Vec::with_capacity(self.families.len());
        let mut n_events = 0;
        let mut by_users: HashMap<&[User], u32> = HashMap::new();
        for family in &self.families {
            let first = *by_users.entry(&family.users).or_insert(n_events);
            if first == n_events {
                n_events += family.n_events;
            }
            first_event.push(first);
        }
        let mut events = vec![0u32; n_events as usize];
        for (lists, ends, of) in [
            (&mut graph.waits, &self.into, (|r| &r.waits) as fn(&Relation) -> &Lists),
            (&mut graph.triggers, &self.out, |r| &r.triggers),
        ] {
            lists.heads.reserve_exact(graph.tasks.len());
            lists.entries.reserve_exact(ops.iter().zip(ends).map(|(op, ends)| n_entries(op, ends, of)).sum());
        }
        let mut scratch = Scratch::default();
        for (i, op) in ops.iter().enumerate() {
            scratch.write(op, &self.into[i], &first_event, |r| &r.waits, &mut graph.waits);
            let from = graph.triggers.entries.len();
            scratch.write(op, &self.out[i], &first_event, |r| &r.triggers, &mut graph.triggers);
            for event in &graph.triggers.entries[from..] {
                events[*event as usize] += 1;
            }
        }
        graph.events = events;
    }
}

/// Entries the lists of `op`'s blocks will have, before equal ones fall together.
fn n_entries(op: &BlockOp, ends: &[End], lists: fn(&Relation) -> &Lists) -> usize {
    let of_end = |end: &End| -> usize {
        let bound = end.factors.iter().fold(0, |axes, (a, _)| axes | a);
        let free = (0..GRID_AXES).filter(|a| bound & 1 << a == 0).map(|a| op.grid[a] as usize).product::<usize>();
        end.factors.iter().fold(free, |n, (_, relation)| n.saturating_mul(lists(relation).entries.len()))
    };
    ends.iter().map(of_end).sum()
}

#[derive(Default)]
struct Scratch {
    list: Vec<u32>,
    ids: Vec<u32>,
    more: Vec<u32>,
}

impl Scratch {
    /// Appends the list of every block of `op`.
    fn write(
        &mut self,
        op: &BlockOp,
        ends: &[End],
        first_event: &[u32],
        lists: fn(&Relation) -> &Lists,
        into: &mut Lists,
    ) {
        // PERF: most operators wait for all of another and are waited for as a whole: one list serves all blocks.
        if ends.iter().all(|end| end.factors.is_empty()) {
            self.list_of(op, ends, first_event, [0; GRID_AXES], lists);
            (0..op.n_blocks()).for_each(|_| into.push(&self.list));
            return;
        }
        let [nx, ny, nz] = op.grid;
        for z in 0..nz {
            for y in 0..ny {
                for x in 0..nx {
                    self.list_of(op, ends, first_event, [x, y, z], lists);
                    into.push(&self.list);
                }
            }
        }
    }

    /// The events of one block, ascending.
    fn list_of(
        &mut self,
        op: &BlockOp,
        ends: &[End],
        first_event: &[u32],
        block: [u32; GRID_AXES],
        lists: fn(&Relation) -> &Lists,
    ) {
        self.list.clear();
        for end in ends {
            self.product(op, end, block, lists);
            let first = first_event[end.family];
            self.list.extend(self.ids.iter().map(|id| first + id));
        }
        if self.list.len() > 1 {
            self.list.sort_unstable();
            self.list.dedup();
        }
    }

    /// The ids of one block in one family.
    fn product(&mut self, op: &BlockOp, end: &End, block: [u32; GRID_AXES], lists: fn(&Relation) -> &Lists) {
        self.ids.clear();
        self.ids.push(0);
        for (axes, relation) in &end.factors {
            let ids = lists(relation).of(part_of(*axes, op.grid, block));
            match ids {
                [id] => self.ids.iter_mut().for_each(|at| *at = *at * relation.n_ids + id),
                _ => {
                    self.more.clear();
                    for at in &self.ids {
                        self.more.extend(ids.iter().map(|id| at * relation.n_ids + id));
                    }
                    std::mem::swap(&mut self.ids, &mut self.more);
                }
            }
        }
    }
}
