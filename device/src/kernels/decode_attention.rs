//! One position's attention, all of it: [`rope`](super::rope) of the query and the new key, the append of key and value
//! to the cache, if there are such, and causal [`attention`](super::attention) over it, in one task a head or, `split`,
//! in several.
//!
//! q: [1, kv_heads, group, d]; k, v: [1, kv_heads, d], or absent, and then nothing is appended; q_norm, k_norm: [d],
//! optional; frequencies: [d/2] f32; k_cache, v_cache: [kv_heads, context, d]; y: [1, kv_heads, group, d]. q, k and v
//! are only read: the turned query stays in shared memory, group * d at most [`MAX_QUERY`]; sinks: as `attention`'s.
//! Split as `attention` is, block axis 1 saying which share of the positions is the task's, y is [kv_heads, 1, group,
//! 4 + d] for [`attention_merge`](super::attention_merge); the task whose share ends with the pass's position appends.
//! f32 accumulation; keys and values count as the cache keeps them.

#[cfg(not(target_arch = "nvptx64"))]
use super::attention::FOUND;
use super::attention::gpu::{Head, Heads, Kept, PART, SLICE, attend, keep, merge, part, put, put_sums, sink};
use super::attention::group::{self, Group};
use super::*;
use crate::arch::{memory, shared};
use crate::block::FREE_SHARED;
use crate::gpu::turn;
use core::hint::cold_path;
#[cfg(not(target_arch = "nvptx64"))]
use perpetua_shared::TaskDesc;
use perpetua_shared::data::share_by;
use perpetua_shared::divisor::Divisor;

/// See the module head.
#[derive(Debug)]
pub struct DecodeAttention;

/// Parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    /// Added to the mean square of the head norms.
    pub eps: f32,
    /// Multiplies the scores; 1/sqrt(d) as a rule.
    pub scale: f32,
    /// Tasks that share the positions; 1: not split.
    pub splits: u32,
    /// As [`attention::Params::window`], of which none is bidirectional.
    pub window: u32,
    /// As [`rope::Params::turned_pairs`].
    pub turned_pairs: u32,
    /// As [`rope::Params::factor`].
    pub factor: f32,
    /// As [`rope::Params::norms`].
    pub norms: u32,
}

impl Params {
    #[cfg(not(target_arch = "nvptx64"))]
    fn rope(&self) -> rope::Params {
        let Params { eps, turned_pairs, factor, norms, .. } = *self;
        rope::Params { eps, turned_pairs, factor, norms }
    }

    fn attention(&self) -> attention::Params {
        attention::Params {
            scale: self.scale,
            window: self.window,
            ahead: 0,
            splits: self.splits,
            ..Default::default()
        }
    }
}

/// Elements of a key/value head's queries that a task may have.
pub const MAX_QUERY: u32 = 4096;

// Words of shared memory: the turned queries, then what warps found where they share a query's positions.
const QUERY: u32 = FREE_SHARED;

const _: () = assert!(QUERY.is_multiple_of(4) && QUERY + MAX_QUERY <= shared::KEPT);
// The key is the operand after the query: found so, a choice that branches is none.
const _: () = assert!(slot::K == slot::Q + 1);
// `rope::append_value` finds them by its own numbers.
const _: () = assert!(slot::V == rope::slot::V && slot::V_CACHE == rope::slot::V_CACHE);

slots! {
    Q: read "q",
    K: optional "k",
    V: optional "v",
    Q_NORM: optional "q_norm",
    K_NORM: optional "k_norm",
    FREQUENCIES: read "frequencies",
    K_CACHE: append "k_cache",
    V_CACHE: append "v_cache",
    Y: write "y",
    SINKS: optional "sinks",
}

/// What a record says of a task ([`Turn::known`](perpetua_shared::Turn::known)): whether its queries are taken as a
/// [`Group`], and its splits, to divide by.
#[cfg(not(target_arch = "nvptx64"))]
pub(crate) fn known(task: &TaskDesc, operands: &[Operand], is_aligned: impl Fn(&Operand) -> bool) -> [u32; 4] {
    let [q, k, v] = [slot::Q, slot::K_CACHE, slot::V_CACHE].map(|slot| &operands[slot]);
    let is_fit = Group::is_fit(q.extent[2], [k, v]) && is_aligned(k) && is_aligned(v);
    let by_splits = Divisor::of(params::<Params>(&task.params).splits.max(1));
    [if is_fit { FITS } else { 0 }, by_splits.0, 0, 0]
}

/// No [`Product`](crate::gpu::thin::Product)'s, whose lowest bits are not 0.
const FITS: u32 = 4;

impl MacroKernel for DecodeAttention {
    const NAME: &'static str = "decode_attention";
    const SLOTS: &'static [Slot] = slot::ALL;
    type Params = Params;
    const FLAGGED: &'static [usize] = &[slot::Q, slot::K, slot::V, slot::Y];
    /// Queries and weights of values as two terms of bf16.
    const TOLERANCE: f32 = 2e-3;

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(p: &Params, io: &[Operand]) -> Result<(), Violation> {
        rope::check(p.turned_pairs, p.norms, io)?;
        p.attention().check()?;
        let [q, .., k_cache, v_cache, y, sinks] = io else { unreachable!("slots were counted") };
        rules::extent("q", q, 0, 1)?;
        let [_, heads, group, d] = q.extent;
        if group.saturating_mul(d) > MAX_QUERY {
            return Err(format!("`q` has {group} x {d} elements a key/value head, expected at most {MAX_QUERY}"));
        }
        rules::extent("v_cache", v_cache, 1, k_cache.extent[1])?;
        rules::extent("v_cache", v_cache, 2, d)?;
        attention::check_sinks(sinks, q)?;
        rules::rank("y", y, 4)?;
        rules::unit_stride("y", y)?;
        if p.splits <= 1 {
            rules::dtype("y", y, &rules::FLOATS)?;
            return (0..4).try_for_each(|dim| rules::extent("y", y, dim, q.extent[dim]));
        }
        rules::dtype("y", y, &[perpetua_shared::DType::F32])?;
        let parts = [heads, 1, group, d.saturating_add(FOUND)];
        (0..4).try_for_each(|dim| rules::extent("y", y, dim, parts[dim]))
    }

    fn cost(p: &Params, io: &[Operand]) -> Cost {
        // Over the whole context: the length at run time is not known here.
        let [read @ .., k_cache, v_cache, y, sinks] = io else { return Cost::default() };
        let [q, k, ..] = read else { return Cost::default() };
        let splits = u64::from(p.splits.max(1));
        let positions = u64::from(k_cache.extent[1]);
        let most = u64::from(p.attention().most_seen(k_cache.extent[1])).div_ceil(splits);
        let share = |o: &Operand| o.bytes() / positions.max(1) * most;
        let of_caches = total([share(k_cache), share(v_cache)]);
        Cost {
            bytes_read: read.iter().chain([sinks]).fold(of_caches, |sum, x| total([sum, x.bytes()])),
            bytes_written: y.bytes(),
            flops: total([product([6, total([q.len_elems(), k.len_elems()])]), product([4, q.len_elems(), most])]),
        }
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(p: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [q, k, v, q_norm, k_norm, frequencies, k_cache, v_cache, y, sinks] =
            core::array::from_fn(|i| call.tensor(i));
        let (heads, group, d) = (q.extent(1), q.extent(2), q.extent(3));
        let pos = call.step.first_pos as usize;
        let turn = |x: Vec<f32>, norm: &crate::io::Tensor| rope::turned(&p.rope(), &x, norm, &frequencies, pos);
        let (first, end) = p.attention().share(pos as u32 + 1, call.task.block[1]);
        let positions = first as usize..end as usize;
        for h in 0..heads {
            if k.is_present() && positions.contains(&pos) {
                let key = turn((0..d).map(|i| k.get([0, h, i])).collect(), &k_norm);
                key.iter().enumerate().for_each(|(i, x)| k_cache.set([h, pos, i], *x));
                let value = rope::value(&p.rope(), (0..d).map(|i| v.get([0, h, i])).collect());
                value.iter().enumerate().for_each(|(i, x)| v_cache.set([h, pos, i], *x));
            }
            for g in 0..group {
                let q = turn((0..d).map(|i| q.get([0, h, g, i])).collect(), &q_norm);
                let sink = attention::sink(&sinks, [p.splits, call.task.block[1]], [h, g]);
                let caches = [&k_cache, &v_cache];
                let (max, total, sums) = attention::attended(&q, caches, h, positions.clone(), p.scale, sink);
                if p.splits <= 1 {
                    (0..d).for_each(|i| y.set([0, h, g, i], sums[i] / total));
                } else {
                    y.set([h, 0, g, 0], max);
                    y.set([h, 0, g, 1], total);
                    (0..d).for_each(|i| y.set([h, 0, g, FOUND as usize + i], sums[i]));
                }
            }
        }
        Ok(())
    }

    const EARLY: bool = true;

    unsafe fn gpu_early(
        p: &Params,
        call: &gpu::Call<'_>,
        block: &Block,
        ready: impl Fn() -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        // SAFETY: norms and frequencies are constants, and all else is touched once `ready` has ended. The operands are
        // the slots' and `check` has matched their extents; the position is below the context, as the token loop's
        // steps are. Conditions around barriers are the same for all threads, those around shuffles for all lanes.
        // Queries are written by their warp before a barrier and read after it, as is the appended row; what warps
        // found stands between two barriers.
        unsafe {
            let heads = call.tensor(slot::Q).extent(1);
            let pos = call.first_pos();
            let [is_fit, by_splits, ..] = turn::known();
            let (first, end) = share_by(pos + 1, p.window, p.splits, Divisor(by_splits), call.block::<1>());
            let is_fit = (is_fit == FITS) & call.uses(Technique::GroupAttention);
            let appends = first <= pos && pos < end && call.tensor(slot::K).is_present();
            let queries = memory::opaque_word(call.tensor(slot::Q).extent(2));
            let d = memory::opaque_word(call.tensor(slot::Q).extent(3));
            let half = d / 2;
            let turn_of = |g: u32, lane: u32| {
                let (norm, frequencies) = (
                    call.tensor(if g == queries { slot::K_NORM } else { slot::Q_NORM }),
                    call.tensor(slot::FREQUENCIES),
                );
                let (turned, factor, is_behind) = (p.turned_pairs, p.factor, p.norms & rope::TURNED != 0);
                rope::Turn { norm, frequencies, eps: p.eps, pos, turned, factor, is_behind, half, lane }
            };
            // How it is turned is asked for before the query is there.
            let mut asked = turn_of(block.warp(), block.lane()).ask(0);
            ready()?;
            let mut h = 0;
            loop {
                // Each part computes anew what it wants: held over the others it would cost them registers.
                let block = &Block { thread: memory::opaque_word(block.thread), threads: block.threads };
                let lane = block.lane();
                let group_of = || {
                    let (q, k, v) = (call.tensor(slot::Q), call.tensor(slot::K_CACHE), call.tensor(slot::V_CACHE));
                    let (queries, d) = (memory::opaque_word(q.extent(2)), memory::opaque_word(q.extent(3)));
                    Group { k: Head::new(&k, h), v: Head::new(&v, h), queries, d, scale: p.scale }
                };
                // The queries, and then the key and the value.
                let mut g = block.warp();
                let rows = queries + if appends { 2 } else { 0 };
                while g < rows {
                    let is_key = g == queries;
                    if g > queries {
                        rope::append_value(call, [0, h, pos], d, lane, (p.norms & rope::VALUES != 0, p.eps));
                        break;
                    }
                    let from =
                        if is_key { call.tensor(slot::K).row([0, h]) } else { call.tensor(slot::Q).row([0, h, g]) };
                    let to = call.tensor(slot::K_CACHE).row([h, pos]);
                    let from = |at| call.gather(slot::Q + usize::from(is_key), &from, at);
                    let head = turn_of(g, lane);
                    let ahead = head.told(0, asked);
                    head.head(from(head.elements(0)), from, ahead, |i, one, other| match (is_key, is_fit) {
                        (false, true) => {
                            group::stage(d, g, i, [one[0], other[0]]);
                            group::stage(d, g, i + half, [one[1], other[1]]);
                        }
                        (true, true) => {
                            to.set_two(i, [one[0], other[0]]);
                            to.set_two(i + half, [one[1], other[1]]);
                        }
                        (_, false) => {
                            cold_path();
                            let put = |i: u32, value: f32| {
                                if is_key {
                                    to.set(i, value);
                                } else {
                                    shared::store(QUERY + g * d + i, value.to_bits());
                                }
                            };
                            put(i, one[0]);
                            put(i + half, one[1]);
                            if i + 1 < half {
                                put(i + 1, other[0]);
                                put(i + 1 + half, other[1]);
                            }
                        }
                    });
                    g += block.warps();
                    if g <= queries {
                        asked = turn_of(g, lane).ask(0);
                    }
                }
                block.sync();
                if is_fit {
                    let block = Block { thread: memory::opaque_word(block.thread), threads: block.threads };
                    let y = call.tensor(slot::Y);
                    let to = |g| {
                        let row = if p.splits > 1 { y.row([h, 0, g]) } else { y.row([0, h, g]) };
                        (row, sink(p.splits, call, slot::SINKS, [h, g]))
                    };
                    group_of().attend((first, end), &group::All, &block, to, |(row, sink), i, found| {
                        put_sums(p.splits, (call, &call.tensor(slot::Y)), row, i, found.with(*sink));
                    });
                } else {
                    cold_path();
                    one_by_one(p, call, block, h, (first, end));
                }
                h += 1;
                if h >= heads {
                    return Ok(());
                }
                block.sync();
                asked = turn_of(block.warp(), lane).ask(0);
            }
        }
    }
}

/// Attends to positions `first..end` of head `h` query by query, a warp to each or, where there are fewer queries than
/// warps, to a part of the positions.
///
/// # Safety
/// As [`MacroKernel::gpu`], after a barrier since the turned queries were stored from word [`QUERY`] on.
unsafe fn one_by_one(p: &Params, call: &gpu::Call<'_>, block: &Block, h: u32, (first, end): (u32, u32)) {
    // What is computed from these stays here: few caches are read so.
    let block = &Block { thread: memory::opaque_word(block.thread), threads: block.threads };
    // SAFETY: the caller's promises; conditions around barriers are the same for all threads.
    unsafe {
        let lane = block.lane();
        let (group, d) = {
            let q = call.tensor(slot::Q);
            (memory::opaque_word(q.extent(2)), memory::opaque_word(q.extent(3)))
        };
        let parts_at = QUERY + group * d;
        let has_room = (shared::KEPT - parts_at) / PART;
        let warps = if block.warps() < has_room { block.warps() } else { has_room };
        let parts = if group > warps { 1 } else { warps / group };
        let mut slice = 0;
        while slice < d {
            if slice > 0 {
                block.sync();
            }
            let mut unit = block.warp();
            while unit < group * parts {
                // Fetched anew for every head: held over the loops they would cost them registers.
                let (k, v) = (Head::new(&call.tensor(slot::K_CACHE), h), Head::new(&call.tensor(slot::V_CACHE), h));
                let g = unit / parts;
                let head = Heads { q: Kept(QUERY + g * d), k, v, d, scale: p.scale };
                let (from, to) = part((first, end), unit % parts, parts);
                let found = attend(&head, slice, from, to, lane);
                if parts == 1 {
                    put(&p.attention(), (call, [slot::Y, slot::SINKS]), [0, h, g], d, slice, lane, found);
                } else {
                    keep(parts_at + unit * PART, &found, lane);
                }
                unit += block.warps();
            }
            if parts > 1 {
                block.sync();
                let g = block.warp();
                if g < group {
                    let found = merge(parts_at + g * parts * PART, parts, (first, end), lane);
                    put(&p.attention(), (call, [slot::Y, slot::SINKS]), [0, h, g], d, slice, lane, found);
                }
            }
            slice += SLICE;
        }
    }
}
