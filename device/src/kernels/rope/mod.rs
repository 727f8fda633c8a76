//! Prepares attention: per-head RMSNorm of q and k (when their weights are given), rotary position embedding of both,
//! and the append of k and v to the cache at the rows' positions.
//!
//! q: [rows, kv_heads, group, d], rotated in place; k: [rows, kv_heads, d]; v: [rows, kv_heads, n]; q_norm, k_norm: [d],
//! optional; frequencies: [d/2] f32; k_cache: [kv_heads, context, d]; v_cache: [kv_heads, context, n]. Without k and v,
//! and caches, there is nothing to append: another's is attended to. With [`VALUES`], values are normalised, too,
//! without weights. Row r stands at position p = first_pos + r and turns pair i by the angle p * frequencies[i], in f32.
//! Pairs are (x[i], x[i + d/2]). Norms' weights come before that, or, with [`TURNED`], behind it (Hunyuan's): the mean
//! square is the same. Where only the first 2 * t elements of a head are turned (`turned_pairs` is t), the first t are
//! (x[i], x[i + t]); the others, of frequency 0, are (x[i + t], x[i + d/2]), what is left. Pair i always comes to
//! elements i and i + d/2: so queries and keys are in another order than they came, one and the same, which their
//! products do not see. What is turned is multiplied by `factor` (YaRN's and LongRoPE's).

use super::*;
#[cfg(not(target_arch = "nvptx64"))]
use crate::io;

mod eights;

use crate::{
    arch::{WARP, memory, scalar::fma, warp},
    gpu::math::{reciprocal, rsqrt, sin_cos},
};
use core::hint::cold_path;
#[cfg(not(target_arch = "nvptx64"))]
use perpetua_shared::DType;

/// See the module head.
#[derive(Debug)]
pub struct Rope;

/// Parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    /// Added to the mean square of the head norms.
    pub eps: f32,
    /// Pairs that are turned, the first ones, at most half of a head's elements.
    pub turned_pairs: u32,
    /// Multiplies what is turned; 1 as a rule.
    pub factor: f32,
    /// [`VALUES`] and [`TURNED`], those that are so.
    pub norms: u32,
}

/// Of [`Params::norms`]: values have a norm, without weights.
pub const VALUES: u32 = 1;

/// Likewise: norms' weights are multiplied with what is turned, not with what is going to be, where all of a head is.
pub const TURNED: u32 = 2;

impl Params {
    /// Sine and cosine that turn pair `i`, by `angle`, with what multiplies it.
    #[cfg(not(target_arch = "nvptx64"))]
    pub(crate) fn turn(&self, i: usize, angle: f32) -> (f32, f32) {
        let (sin, cos) = angle.sin_cos();
        let factor = if i < self.turned_pairs as usize { self.factor } else { 1.0 };
        (sin * factor, cos * factor)
    }
}

/// The elements of pair `i` of a head of `2 * half` elements, of whose pairs the first `turned` are turned.
fn pair(i: u32, turned: u32, half: u32) -> [u32; 2] {
    if i < turned { [i, i + turned] } else { [i + turned, i + half] }
}

/// Judges [`Rope`]'s operands, the first eight of `io`, and how many pairs it turns.
#[cfg(not(target_arch = "nvptx64"))]
pub(super) fn check(turned_pairs: u32, norms: u32, io: &[Operand]) -> Result<(), Violation> {
    let [q, k, v, q_norm, k_norm, frequencies, k_cache, v_cache, ..] = io else { unreachable!("slots were counted") };
    if k.is_present() != v.is_present() || k_norm.is_present() && !k.is_present() {
        return Err("`k`, `v` and `k_norm`: expected no norm without keys, and these with values".to_owned());
    }
    let d = q.extent[3];
    if d % 2 != 0 {
        return Err(format!("head dimension {d} is odd, expected an even one"));
    }
    if norms & !(VALUES | TURNED) != 0 {
        return Err(format!("norms {norms} are unknown"));
    }
    if norms & TURNED != 0 && turned_pairs != d / 2 {
        return Err(format!("{turned_pairs} pairs of heads of {d} elements are turned and normalised, expected all"));
    }
    if turned_pairs > d / 2 {
        return Err(format!("{turned_pairs} pairs are turned, of heads of {d} elements"));
    }
    // A warp reads so much of a head before it writes in its place.
    if turned_pairs < d / 2 && d > MOST_IN_PART {
        return Err(format!(
            "{turned_pairs} pairs of heads of {d} elements are turned, expected all beyond {MOST_IN_PART}"
        ));
    }
    rules::rank("q", q, 4)?;
    for (name, operand) in [("q_norm", q_norm), ("k_norm", k_norm)] {
        rules::rank(name, operand, 1)?;
        rules::extent(name, operand, 0, d)?;
    }
    for (name, operand) in [("k", k), ("v", v)] {
        rules::rank(name, operand, 3)?;
        rules::extent(name, operand, 0, q.extent[0])?;
        rules::extent(name, operand, 1, q.extent[1])?;
    }
    rules::extent("k", k, 2, d)?;
    let of_value = if v.is_present() { v.extent[2] } else { d };
    for (name, operand, n) in [("k_cache", k_cache, d), ("v_cache", v_cache, of_value)] {
        rules::rank(name, operand, 3)?;
        rules::extent(name, operand, 0, q.extent[1])?;
        rules::extent(name, operand, 2, n)?;
    }
    for (name, operand) in [
        ("q", q),
        ("k", k),
        ("v", v),
        ("q_norm", q_norm),
        ("k_norm", k_norm),
        ("k_cache", k_cache),
        ("v_cache", v_cache),
    ] {
        rules::dtype(name, operand, &rules::FLOATS)?;
        rules::unit_stride(name, operand)?;
    }
    rules::dtype("frequencies", frequencies, &[DType::F32])?;
    rules::rank("frequencies", frequencies, 1)?;
    rules::extent("frequencies", frequencies, 0, d / 2)
}

/// What a norm multiplies `head` with.
#[cfg(not(target_arch = "nvptx64"))]
fn scale_of(head: &[f32], eps: f32) -> f32 {
    let squares: f32 = head.iter().map(|x| x * x).sum();
    1.0 / (squares / head.len() as f32 + eps).sqrt()
}

/// The value `head` as it is appended.
#[cfg(not(target_arch = "nvptx64"))]
pub(super) fn value(p: &Params, mut head: Vec<f32>) -> Vec<f32> {
    if p.norms & VALUES != 0 {
        let scale = scale_of(&head, p.eps);
        head.iter_mut().for_each(|x| *x *= scale);
    }
    head
}

/// `head`, normalised where there are weights and turned as position `pos` wants it.
#[cfg(not(target_arch = "nvptx64"))]
pub(super) fn turned(p: &Params, head: &[f32], norm: &io::Tensor, frequencies: &io::Tensor, pos: usize) -> Vec<f32> {
    let (d, eps) = (head.len(), p.eps);
    let mut scale = 1.0;
    if norm.is_present() {
        scale = scale_of(head, eps);
    }
    let weight = |i: usize| if norm.is_present() { norm.get([i]) } else { 1.0 };
    let is_before = p.norms & TURNED == 0;
    let x = |i: usize| head[i] * scale * if is_before { weight(i) } else { 1.0 };
    let mut turned = vec![0.0; d];
    for i in 0..d / 2 {
        let (sin, cos) = p.turn(i, pos as f32 * frequencies.get([i]));
        let [low, high] = pair(i as u32, p.turned_pairs, d as u32 / 2).map(|at| x(at as usize));
        turned[i] = low * cos - high * sin;
        turned[i + d / 2] = high * cos + low * sin;
    }
    if !is_before {
        turned.iter_mut().enumerate().for_each(|(i, x)| *x *= weight(i));
    }
    turned
}

/// How a warp turns heads as position `pos` wants it: two neighbouring pairs of elements a lane at a time, of `half`,
/// the first `turned` of which are turned.
#[derive(Clone, Copy)]
pub(super) struct Turn {
    pub(super) norm: gpu::Tensor,
    pub(super) frequencies: gpu::Tensor,
    pub(super) eps: f32,
    pub(super) pos: u32,
    pub(super) turned: u32,
    pub(super) factor: f32,
    /// Whether norms' weights come [behind](TURNED) that.
    pub(super) is_behind: bool,
    pub(super) half: u32,
    pub(super) lane: u32,
}

/// What has been asked for of a lane's next two pairs: frequencies, and the norm's weights as words.
#[derive(Clone, Copy)]
pub(super) struct Asked {
    frequencies: [f32; 2],
    weights: [u32; 4],
}

/// What is known of a lane's next two pairs without the head: sines and cosines, and what the elements are multiplied
/// by.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    turns: [(f32, f32); 2],
    factors: [f32; 4],
}

/// Pairs that a warp has at a time.
const AT_ONCE: u32 = 2 * WARP;

/// Elements of a head that is turned in part, at most: its elements move, and a warp reads the next pairs before it
/// puts these.
pub const MOST_IN_PART: u32 = 2 * 2 * AT_ONCE;

impl Turn {
    /// The lane's pairs from `first` on; lanes beyond the last have that one.
    fn pairs(&self, first: u32) -> [u32; 2] {
        let pair = |i: u32| if i < self.half { i } else { self.half - 1 };
        [pair(first + 2 * self.lane), pair(first + 2 * self.lane + 1)]
    }

    /// Their elements.
    pub(super) fn elements(&self, first: u32) -> [u32; 4] {
        let [i, j] = self.pairs(first).map(|i| pair(i, self.turned, self.half));
        [i[0], j[0], i[1], j[1]]
    }

    /// Asks for what is known of the pairs from `first` on.
    ///
    /// # Safety
    /// There are `half` frequencies, and twice as many weights, if any.
    pub(super) unsafe fn ask(&self, first: u32) -> Asked {
        // SAFETY: the caller's promise.
        unsafe {
            let frequencies = self.frequencies.row([]).gather(self.pairs(first));
            let is_normed = self.norm.is_present();
            Asked {
                frequencies,
                weights: if is_normed { self.norm.row([]).words(self.elements(first)) } else { [0; 4] },
            }
        }
    }

    /// That, of which it has been asked for.
    pub(super) fn told(&self, first: u32, asked: Asked) -> Ahead {
        let (pairs, of) = (self.pairs(first), asked.frequencies);
        let turn = |i: u32, frequency: f32| {
            let (sin, cos) = sin_cos(self.pos as f32 * frequency);
            let factor = if i < self.turned { self.factor } else { 1.0 };
            (sin * factor, cos * factor)
        };
        let factors = if self.norm.is_present() { self.norm.row([]).floats(asked.weights) } else { [1.0; 4] };
        Ahead { turns: [turn(pairs[0], of[0]), turn(pairs[1], of[1])], factors }
    }

    /// Both at once.
    ///
    /// # Safety
    /// As [`ask`](Turn::ask).
    unsafe fn ahead(&self, first: u32) -> Ahead {
        // SAFETY: the caller's promise.
        self.told(first, unsafe { self.ask(first) })
    }

    /// A warp's [`turned`]: gives `put` what becomes elements i and i + half, and i + 1 and i + 1 + half, of the head
    /// of which `from` gets some, on one lane each; where i + 1 is half, of an odd half, nobody wants the second. Lanes
    /// have read these elements and the next ones before they put them. `x` are the first pairs' elements, `ahead`
    /// theirs.
    ///
    /// # Safety
    /// Every lane of the warp makes this same call; the head is there, and see [`ask`](Turn::ask).
    pub(super) unsafe fn head(
        &self,
        mut x: [f32; 4],
        from: impl Fn([u32; 4]) -> [f32; 4],
        mut ahead: Ahead,
        put: impl Fn(u32, [f32; 2], [f32; 2]),
    ) {
        let (half, lane) = (self.half, self.lane);
        // SAFETY: the caller's promises; the conditions around the shuffles are the same for all lanes.
        unsafe {
            let mut scale = 1.0;
            if self.norm.is_present() {
                let (mut squares, mut first, mut of) = (0.0, 0, x);
                let share = reciprocal(2 * half);
                loop {
                    for n in 0..2 {
                        let is_there = first + 2 * lane + (n as u32) < half;
                        let (low, high) = if is_there { (of[n], of[n + 2]) } else { (0.0, 0.0) };
                        squares = fma(high, high, fma(low, low, squares));
                    }
                    first += AT_ONCE;
                    if first >= half {
                        break;
                    }
                    cold_path();
                    of = from(self.elements(first));
                }
                scale = rsqrt(warp::sum(squares) * share + self.eps);
            }
            let mut first = 0;
            loop {
                let (next, mut more) = (first + AT_ONCE, [0.0; 4]);
                if next < half {
                    // Heads of more than 128 elements.
                    cold_path();
                    more = from(self.elements(next));
                }
                // Lanes beyond the last pair have read that one, which may be about to be written.
                warp::sync();
                let turned =
                    |(sin, cos): (f32, f32), low: f32, high: f32| [low * cos - high * sin, high * cos + low * sin];
                let ([a, b, c, d], [of_a, of_b, of_c, of_d]) = (x, ahead.factors);
                let (mut one, mut other);
                if self.is_behind {
                    cold_path();
                    one = turned(ahead.turns[0], a * scale, c * scale);
                    other = turned(ahead.turns[1], b * scale, d * scale);
                    one = [one[0] * of_a, one[1] * of_c];
                    other = [other[0] * of_b, other[1] * of_d];
                } else {
                    one = turned(ahead.turns[0], a * scale * of_a, c * scale * of_c);
                    other = turned(ahead.turns[1], b * scale * of_b, d * scale * of_d);
                }
                let i = first + 2 * lane;
                if i < half {
                    put(i, one, other);
                }
                if next >= half {
                    return;
                }
                cold_path();
                (first, x, ahead) = (next, more, self.ahead(next));
            }
        }
    }
}

/// Appends the value `v` of row `r` and head `h`, of `d` elements, to `v_cache`, at position `pos`, normalised if it
/// `is_normed`: a lane's share.
///
/// # Safety
/// Every lane of the warp makes this same call. The operands are [`Rope`]'s, the value is there, and the cache has
/// position `pos`, which nobody else touches.
pub(super) unsafe fn append_value(
    call: &gpu::Call<'_>,
    [r, h, pos]: [u32; 3],
    d: u32,
    lane: u32,
    (is_normed, eps): (bool, f32),
) {
    // SAFETY: the caller's promises.
    unsafe {
        let (v, cached) = (call.tensor(slot::V).row([r, h]), call.tensor(slot::V_CACHE).row([h, pos]));
        let four = |first: u32| {
            let at = |n: u32| if first + n < d { first + n } else { d - 1 };
            call.gather(slot::V, &v, [at(0), at(1), at(2), at(3)])
        };
        let mut scale = 1.0;
        if is_normed {
            cold_path();
            let (mut squares, mut first) = (0.0, 4 * lane);
            while first < d {
                let [a, b, c, e] = four(first);
                let has = |n: u32, x: f32| if first + n < d { x } else { 0.0 };
                let [b, c, e] = [has(1, b), has(2, c), has(3, e)];
                squares = fma(a, a, fma(b, b, fma(c, c, fma(e, e, squares))));
                first += 4 * WARP;
            }
            scale = rsqrt(warp::sum(squares) * reciprocal(d) + eps);
        }
        let mut first = 4 * lane;
        while first < d {
            let [a, b, c, e] = four(first);
            cached.set_four_below(first, d, [a * scale, b * scale, c * scale, e * scale]);
            first += 4 * WARP;
        }
    }
}

/// [`Rope`]'s body for any heads: a warp to each row's query head, and one to its key and value.
///
/// # Safety
/// Every thread of the block makes this same call; the operands are [`Rope`]'s, the cache has the rows' positions, and
/// nobody else touches these.
unsafe fn turn_all(p: &Params, call: &gpu::Call<'_>, block: &Block) {
    // SAFETY: the caller's promises. A warp owns a head, of which all its lanes have read what one of them is about to
    // write: see `Turn::head`.
    unsafe {
        // Found here, not kept over all the other kernels of a worker.
        let block = &Block { thread: memory::opaque_word(block.thread), ..*block };
        let mut item = block.warp();
        loop {
            let q = call.tensor(slot::Q);
            let (heads, group, half) = (q.extent(1), q.extent(2), q.extent(3) / 2);
            let of_head = group + u32::from(call.tensor(slot::K).is_present());
            if item >= call.rows(&q) * heads * of_head {
                return;
            }
            let (row_and_head, g) = (item / of_head, item % of_head);
            let (r, h) = (row_and_head / heads, row_and_head % heads);
            let pos = call.first_pos() + call.row_first() + r;
            let is_key = g == group;
            let from = if is_key { call.tensor(slot::K).row([r, h]) } else { q.row([r, h, g]) };
            let to = if is_key { call.tensor(slot::K_CACHE).row([h, pos]) } else { from };
            let turn = Turn {
                norm: call.tensor(if is_key { slot::K_NORM } else { slot::Q_NORM }),
                frequencies: call.tensor(slot::FREQUENCIES),
                eps: p.eps,
                pos,
                turned: p.turned_pairs,
                factor: p.factor,
                is_behind: p.norms & TURNED != 0,
                half,
                lane: block.lane(),
            };
            let x = from.gather(turn.elements(0));
            turn.head(
                x,
                |at| from.gather(at),
                turn.ahead(0),
                |i, one, other| {
                    to.set(i, one[0]);
                    to.set(i + half, one[1]);
                    if i + 1 < half {
                        to.set(i + 1, other[0]);
                        to.set(i + 1 + half, other[1]);
                    }
                },
            );
            if is_key {
                let n = call.tensor(slot::V).extent(2);
                append_value(call, [r, h, pos], n, block.lane(), (p.norms & VALUES != 0, p.eps));
            }
            item += block.warps();
        }
    }
}

slots! {
    Q: update "q",
    K: optional "k",
    V: optional "v",
    Q_NORM: optional "q_norm",
    K_NORM: optional "k_norm",
    FREQUENCIES: read "frequencies",
    K_CACHE: optional_append "k_cache",
    V_CACHE: optional_append "v_cache",
}

impl MacroKernel for Rope {
    const NAME: &'static str = "rope";
    const SLOTS: &'static [Slot] = slot::ALL;
    type Params = Params;

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(p: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [_, k, _, _, _, _, k_cache, v_cache] = io else { unreachable!("slots were counted") };
        if [k_cache, v_cache].map(Operand::is_present) != [k.is_present(); 2] {
            return Err("`k_cache` and `v_cache`: expected both where there are keys and values, else none".to_owned());
        }
        check(p.turned_pairs, p.norms, io)
    }

    fn cost(_: &Params, io: &[Operand]) -> Cost {
        // The cache is touched only at the rows appended.
        let [read @ .., k_cache, _] = io else { return Cost::default() };
        let [q, k, v, ..] = read else { return Cost::default() };
        let elem = k_cache.dtype().map_or(0, |d| d.size_bytes() as u64);
        let appended = product([total([k.len_elems(), v.len_elems()]), elem]);
        Cost {
            bytes_read: read.iter().fold(0, |sum, operand| total([sum, operand.bytes()])),
            bytes_written: total([q.bytes(), appended]),
            flops: product([6, total([q.len_elems(), k.len_elems()])]),
        }
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(p: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [q, k, v, q_norm, k_norm, frequencies, k_cache, v_cache] = core::array::from_fn(|i| call.tensor(i));
        let (n_kv, group, d) = (q.extent(1), q.extent(2), q.extent(3));
        let turn = |x: Vec<f32>, norm: &io::Tensor, pos: usize| turned(p, &x, norm, &frequencies, pos);
        for r in 0..call.rows(slot::Q) {
            let pos = call.step.first_pos as usize + call.task.row_first as usize + r;
            for h in 0..n_kv {
                for g in 0..group {
                    let turned = turn((0..d).map(|i| q.get([r, h, g, i])).collect(), &q_norm, pos);
                    turned.iter().enumerate().for_each(|(i, x)| q.set([r, h, g, i], *x));
                }
                if !k.is_present() {
                    continue;
                }
                let turned = turn((0..d).map(|i| k.get([r, h, i])).collect(), &k_norm, pos);
                turned.iter().enumerate().for_each(|(i, x)| k_cache.set([h, pos, i], *x));
                let value = value(p, (0..v.extent(2)).map(|i| v.get([r, h, i])).collect());
                value.iter().enumerate().for_each(|(i, x)| v_cache.set([h, pos, i], *x));
            }
        }
        Ok(())
    }

    unsafe fn gpu(p: &Params, call: &gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        // SAFETY: the operands are the slots' and `check` has matched their extents; a position is below the context,
        // as the token loop's steps are.
        unsafe {
            if eights::is_for(p, call, block) {
                eights::turn_all(p, call, block);
            } else {
                turn_all(p, call, block);
            }
        }
        Ok(())
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn cpu(p: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
        let [q, k, v, q_norm, k_norm, frequencies, k_cache, v_cache] = core::array::from_fn(|i| call.tensor(i));
        let (rows, params, isa) = (call.rows(slot::Q), *p, scratch.isa);
        let first = call.step.first_pos as usize + call.task.row_first as usize;
        isa.run(crate::cpu::rowwise::Rope {
            rows,
            first,
            params,
            q,
            k,
            v,
            q_norm,
            k_norm,
            frequencies,
            k_cache,
            v_cache,
            scratch,
        });
        Ok(())
    }
}
