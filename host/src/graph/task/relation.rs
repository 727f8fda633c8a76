//! Which parts of a consumer meet which parts of a producer on one axis, and how that is said in events.

use super::region::{Run, SideRuns, Sides, intersect};
use super::{Costs, Lists};
use std::collections::HashMap;
use std::rc::Rc;

/// A relation between producer parts and consumer parts, with the cheapest exact way of saying it: every producer part
/// triggers its ids, every consumer part waits on its ids, and the two share an id exactly when they are related.
#[derive(Debug)]
pub(super) struct Relation {
    /// Per consumer part, the producer parts, ascending.
    pub(super) needs: Lists,
    /// Per producer part, the ids it triggers.
    pub(super) triggers: Lists,
    /// Per consumer part, the ids it waits on.
    pub(super) waits: Lists,
    /// Ids.
    pub(super) n_ids: u32,
    /// Equal for equal `triggers`.
    pub(super) triggers_id: u32,
    /// Equal for equal `waits`.
    pub(super) waits_id: u32,
    /// Related pairs.
    pub(super) pairs: u64,
    /// Pairs the ids relate: `pairs`, unless coarsened.
    pub(super) waited_pairs: u64,
    /// Every producer part has a consumer part.
    pub(super) covers_producers: bool,
    /// Every consumer part has a producer part.
    pub(super) covers_consumers: bool,
}

impl Relation {
    /// Producer parts.
    pub(super) fn n_producers(&self) -> usize {
        self.triggers.len()
    }

    /// Consumer parts.
    pub(super) fn n_consumers(&self) -> usize {
        self.waits.len()
    }

    /// Whether every consumer part is related to every producer part.
    pub(super) fn is_full(&self) -> bool {
        self.pairs == self.n_producers() as u64 * self.n_consumers() as u64
    }

    /// Whether every pair of this relation is one of `other`'s; both between the same parts.
    pub(super) fn is_within(&self, other: &Relation) -> bool {
        if other.is_full() {
            return true;
        }
        if self.pairs > other.pairs {
            return false;
        }
        (0..self.n_consumers()).all(|c| {
            let (mine, theirs) = (self.needs.of(c), other.needs.of(c));
            let mut at = 0;
            mine.iter().all(|p| {
                at += theirs[at..].partition_point(|q| q < p);
                theirs.get(at) == Some(p)
            })
        })
    }
}

/// Relations, each found once: the layers of a model repeat them.
#[derive(Debug, Default)]
pub(super) struct Relations {
    clips: HashMap<Rc<Vec<Run>>, u32>,
    found: HashMap<(u32, u32, u32), Rc<Relation>>,
    list_ids: HashMap<Lists, u32>,
}

/// The clip that clips nothing.
const NO_CLIP: u32 = u32::MAX;

impl Relations {
    /// The relation of `consumer`'s parts to `producer`'s where both lie in `clip`.
    pub(super) fn between(
        &mut self,
        sides: &Sides,
        producer: u32,
        consumer: u32,
        clip: &Rc<Vec<Run>>,
        limits: (&Costs, u32),
    ) -> Rc<Relation> {
        let (p, c) = (sides.runs(producer), sides.runs(consumer));
        let clip_id = if Rc::ptr_eq(clip, &p.union) || **clip == *p.union {
            NO_CLIP
        } else {
            let next = self.clips.len() as u32;
            *self.clips.entry(clip.clone()).or_insert(next)
        };
        if let Some(relation) = self.found.get(&(producer, consumer, clip_id)) {
            return relation.clone();
        }
        let needs = meet(p, c, (clip_id != NO_CLIP).then_some(clip));
        let relation = Rc::new(self.encode(needs, p.n_parts, limits));
        self.found.insert((producer, consumer, clip_id), relation.clone());
        relation
    }

    fn id_of(&mut self, lists: &Lists) -> u32 {
        if let Some(id) = self.list_ids.get(lists) {
            return *id;
        }
        let id = self.list_ids.len() as u32;
        self.list_ids.insert(lists.clone(), id);
        id
    }

    /// Chooses the ids.
    fn encode(&mut self, needs: Lists, n_producers: usize, (costs, max_entries): (&Costs, u32)) -> Relation {
        let n_consumers = needs.len();
        let used = needs.inverted(n_producers);
        let covers_consumers = (0..n_consumers).all(|c| !needs.of(c).is_empty());
        let covers_producers = (0..n_producers).all(|p| !used.of(p).is_empty());
        let pairs = needs.entries.len() as u64;
        // One id per distinct set of producers: a consumer waits once, a producer triggers once per set it is in.
        let by_set = grouped(&needs, n_producers);
        // One id per distinct set of consumers: a producer triggers once, a consumer waits on every set it is in.
        let by_users = grouped(&used, n_consumers);
        let cost = |(once, many, n): &(Lists, Lists, u32), swap: bool| {
            let (waits, triggers) = if swap { (many, once) } else { (once, many) };
            costs.wait * waits.entries.len() as f64
                + costs.trigger * triggers.entries.len() as f64
                + costs.event * f64::from(*n)
        };
        let (waits, triggers, n_ids) = if cost(&by_set, false) <= cost(&by_users, true) {
            by_set
        } else {
            let (triggers, waits, n_ids) = by_users;
            (waits, triggers, n_ids)
        };
        let entries = (waits.entries.len() + triggers.entries.len()) as u64;
        let parts = (n_producers + n_consumers) as u64;
        let (waits, triggers, n_ids, waited_pairs) = if entries > parts * u64::from(max_entries) {
            // Too dear to be exact: every producer that has a consumer before every consumer that has a producer.
            let all = |of: &Lists| {
                let mut lists = Lists::default();
                for i in 0..of.len() {
                    lists.push(if of.of(i).is_empty() { &[] } else { &[0] });
                }
                lists
            };
            let (waits, triggers) = (all(&needs), all(&used));
            let waited = waits.entries.len() as u64 * triggers.entries.len() as u64;
            (waits, triggers, 1, waited)
        } else {
            (waits, triggers, n_ids, pairs)
        };
        Relation {
            triggers_id: self.id_of(&triggers),
            waits_id: self.id_of(&waits),
            needs,
            triggers,
            waits,
            n_ids,
            pairs,
            waited_pairs,
            covers_producers,
            covers_consumers,
        }
    }
}

/// Numbers the distinct non-empty lists: per list its number (no entry for an empty one), per key the numbers of the
/// lists it is in, and how many there are. Numbers go by content, so that equal sets of lists get equal numbers.
fn grouped(lists: &Lists, n_keys: usize) -> (Lists, Lists, u32) {
    let mut distinct: HashMap<&[u32], u32> = HashMap::new();
    let mut order: Vec<&[u32]> = Vec::new();
    for i in 0..lists.len() {
        let list = lists.of(i);
        // Neighbours are often equal; the map is asked only when they are not.
        if !list.is_empty() && (i == 0 || lists.of(i - 1) != list) && distinct.insert(list, 0).is_none() {
            order.push(list);
        }
    }
    order.sort_unstable();
    let mut members = Lists::default();
    for (number, list) in order.iter().enumerate() {
        distinct.insert(list, number as u32);
        members.push(list);
    }
    let mut once = Lists::default();
    for i in 0..lists.len() {
        let list = lists.of(i);
        if list.is_empty() {
            once.push(&[]);
        } else {
            once.push(&[distinct[list]]);
        }
    }
    (once, members.inverted(n_keys), order.len() as u32)
}

/// Per consumer part, the producer parts it meets inside `clip`.
fn meet(producer: &SideRuns, consumer: &SideRuns, clip: Option<&Rc<Vec<Run>>>) -> Lists {
    let clipped = |side: &SideRuns| -> Vec<(u64, u64, u32)> {
        let Some(clip) = clip else { return side.runs.clone() };
        let mut runs = Vec::with_capacity(side.runs.len());
        for &(lo, hi, part) in &side.runs {
            let first = clip.partition_point(|r| r.1 <= lo);
            runs.extend(clip[first..].iter().take_while(|r| r.0 < hi).map(|r| (r.0.max(lo), r.1.min(hi), part)));
        }
        runs.sort_unstable();
        runs
    };
    let (p, c) = (clipped(producer), clipped(consumer));
    let mut lists = Lists::default();
    if producer.n_parts == 1 {
        // Uncut on this axis: all that counts is whether the two meet.
        let union: Vec<Run> = p.iter().map(|r| (r.0, r.1)).collect();
        let mut touched = vec![false; consumer.n_parts];
        for &(lo, hi, part) in &c {
            touched[part as usize] |= !intersect_one(&union, lo, hi);
        }
        for t in touched {
            lists.push(if t { &[0] } else { &[] });
        }
        return lists;
    }
    // A producer run that ends at or before `lo` meets nothing from `lo` on; the running maximum of the ends makes that
    // a prefix even when runs of one side overlap.
    let mut max_end = Vec::with_capacity(p.len());
    let mut max = 0;
    for &(_, hi, _) in &p {
        max = max.max(hi);
        max_end.push(max);
    }
    let mut pairs: Vec<u64> = Vec::new();
    let mut first = 0;
    let mut bound = 1 << 20;
    for &(lo, hi, part) in &c {
        while first < p.len() && max_end[first] <= lo {
            first += 1;
        }
        for &(p_lo, p_hi, p_part) in &p[first..] {
            if p_lo >= hi {
                break;
            }
            if p_hi > lo {
                pairs.push(u64::from(part) << 32 | u64::from(p_part));
            }
        }
        if pairs.len() > bound {
            pairs.sort_unstable();
            pairs.dedup();
            bound = bound.max(2 * pairs.len());
        }
    }
    pairs.sort_unstable();
    pairs.dedup();
    let mut at = 0;
    for part in 0..consumer.n_parts as u64 {
        while at < pairs.len() && pairs[at] >> 32 == part {
            lists.entries.push(pairs[at] as u32);
            at += 1;
        }
        lists.end_list();
    }
    lists
}

/// Whether no run of `union` meets `lo..hi`.
fn intersect_one(union: &[Run], lo: u64, hi: u64) -> bool {
    let first = union.partition_point(|r| r.1 <= lo);
    union.get(first).is_none_or(|r| r.0 >= hi)
}

/// Whether two regions share an element.
pub(super) fn regions_meet(a: &[Rc<Vec<Run>>], b: &[Rc<Vec<Run>>]) -> bool {
    a.iter().zip(b).all(|(a, b)| Rc::ptr_eq(a, b) && !a.is_empty() || !intersect(a, b).is_empty())
}
