//! y[r,h,g,:] = softmax(q[r,h,g,:] . k[h,:,:]^T * scale) . v[h,:,:], over the positions row r may see.
//!
//! q, y: [rows, kv_heads, group, d] (`group` query heads share a key/value head); k, v: [kv_heads, context, d]. Row r
//! sees the last `window` of positions 0..=first_pos + r, its own included, and of the pass's as many as `ahead` after
//! it. f32 accumulation.
//!
//! sinks (causal): [kv_heads, group], optional. A query head's is one more score of each of its rows, not scaled, whose
//! value is zero.
//!
//! Split (causal, and without a window, unless there is one row), a task attends to an equal share of the positions
//! that the pass's last row sees, block axis 1 saying which, and y is what it found, for
//! [`attention_merge`](super::attention_merge): [kv_heads, 1, rows * group, [`FOUND`] + d] f32, each row the largest
//! score, the sum of exp(score - largest), two words that are nobody's, and the values' sum weighted so. Without
//! scores: as largest one less than any, and zeros. Sinks are the first split's.

use super::*;

#[cfg(not(target_arch = "nvptx64"))]
mod bidirectional;
#[cfg(not(target_arch = "nvptx64"))]
mod cpu;
mod flash;
pub(super) mod gpu;
pub(super) mod group;
#[cfg(target_arch = "x86_64")]
mod pairs;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod warpgroup;
mod wide;

/// See the module head.
#[derive(Debug)]
pub struct Attention;

/// Words before the sums in a row of what a split found, so that they begin on 16 bytes.
pub const FOUND: u32 = 4;

/// As many positions as no context has.
pub const ALL: u32 = 1 << 30;

/// Parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    /// Multiplies the scores; 1/sqrt(d) as a rule.
    pub scale: f32,
    /// How many positions a row sees, up to its own: 1 to [`ALL`].
    pub window: u32,
    /// How many of the pass's it sees after its own: 0, causal, to [`ALL`].
    pub ahead: u32,
    /// Tasks that share the positions; 1: not split.
    pub splits: u32,
    /// How CPU bodies may add up: a [`linear::Order`](super::linear::Order).
    pub order: u32,
    /// 1: the pass has tiles, which leave the memory that tensor cores attend in ([`FLASH_BYTES`]).
    pub is_beside_tiles: u32,
}

/// Bytes of the tiles' memory that tensor cores take to attend to heads of up to 64 dimensions, and of up to 128: what
/// `flash`'s bodies are made with.
pub const FLASH_BYTES: [u64; 2] = [60 << 10, 88 << 10];

impl Params {
    /// The positions that row `row` of a pass of `rows` rows from position `first_pos` on sees: first and end.
    pub fn seen(&self, [first_pos, rows]: [u32; 2], row: u32) -> (u32, u32) {
        let before = first_pos + row + 1;
        let (end, all) = (before + self.ahead, first_pos + rows);
        (before.saturating_sub(self.window), if end < all { end } else { all })
    }

    /// The positions, of those before `visible` that the window holds, that split `number` attends to: first and end.
    pub(super) fn share(&self, visible: u32, number: u32) -> (u32, u32) {
        perpetua_shared::data::share(visible, self.window, self.splits, number)
    }

    /// The positions that split `number` attends to for row `row` of a pass of `rows` rows from position `first_pos`
    /// on: first and end.
    pub(super) fn share_of(&self, [first_pos, rows]: [u32; 2], row: u32, number: u32) -> (u32, u32) {
        if self.splits <= 1 {
            return self.seen([first_pos, rows], row);
        }
        let visible = first_pos + row + 1;
        let (first, end) = self.share(first_pos + rows, number);
        (if first < visible { first } else { visible }, if end < visible { end } else { visible })
    }

    /// The cache of `positions` as far as a row sees it at most.
    pub(super) fn most_seen(&self, positions: u32) -> u32 {
        positions.min(self.window.saturating_add(self.ahead))
    }

    /// See [`window`](Params::window) and [`ahead`](Params::ahead).
    #[cfg(not(target_arch = "nvptx64"))]
    pub(super) fn check(&self) -> Result<(), Violation> {
        if !(1..=ALL).contains(&self.window) {
            return Err(format!("a window of {} positions, expected 1 to {ALL}", self.window));
        }
        if self.ahead > ALL {
            return Err(format!("{} positions ahead, expected at most {ALL}", self.ahead));
        }
        Ok(())
    }
}

/// The sink of query head `g` of head `h`, as far as split `number` of `splits` has it.
#[cfg(not(target_arch = "nvptx64"))]
pub(super) fn sink(sinks: &crate::io::Tensor, [splits, number]: [u32; 2], [h, g]: [usize; 2]) -> Option<f32> {
    (sinks.is_present() && (splits <= 1 || number == 0)).then(|| sinks.get([h, g]))
}

/// What query row `q` finds at `positions` of head `h`: the largest score, the `sink` being one, the sum of exp(score -
/// largest), and the values summed with these weights.
#[cfg(not(target_arch = "nvptx64"))]
pub(super) fn attended(
    q: &[f32],
    [k, v]: [&crate::io::Tensor; 2],
    h: usize,
    positions: core::ops::Range<usize>,
    scale: f32,
    sink: Option<f32>,
) -> (f32, f32, Vec<f32>) {
    let score = |t| scale * q.iter().enumerate().map(|(i, q)| q * k.get([h, t, i])).sum::<f32>();
    let mut scores: Vec<f32> = positions.clone().map(score).collect();
    let max = scores.iter().copied().chain(sink).fold(f32::NEG_INFINITY, f32::max);
    scores.iter_mut().for_each(|s| *s = (*s - max).exp());
    let sum = |i| positions.clone().zip(&scores).map(|(t, s)| s * v.get([h, t, i])).sum::<f32>();
    let total = scores.iter().sum::<f32>() + sink.map_or(0.0, |sink| (sink - max).exp());
    (max, total, (0..q.len()).map(sum).collect())
}

/// Judges `sinks`, of the heads of queries `q`.
#[cfg(not(target_arch = "nvptx64"))]
pub(super) fn check_sinks(sinks: &Operand, q: &Operand) -> Result<(), Violation> {
    rules::dtype("sinks", sinks, &rules::FLOATS)?;
    rules::rank("sinks", sinks, 2)?;
    rules::unit_stride("sinks", sinks)?;
    (0..2).try_for_each(|dim| rules::extent("sinks", sinks, dim, q.extent[dim + 1]))
}

slots! {
    Q: read "q",
    K: read "k",
    V: read "v",
    Y: write "y",
    SINKS: optional "sinks",
}

impl MacroKernel for Attention {
    const NAME: &'static str = "attention";
    const SLOTS: &'static [Slot] = slot::ALL;
    type Params = Params;
    const TOLERANCE: f32 = 1e-4;

    #[cfg(not(target_arch = "nvptx64"))]
    fn beside_tiles(p: &Params, io: &[Operand]) -> u64 {
        let flash = FLASH_BYTES[usize::from(io[slot::Q].extent[3] > 64)];
        if p.is_beside_tiles != 0 { flash } else { 0 }
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(p: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [q, k, v, y, sinks] = io else { unreachable!("slots were counted") };
        p.check()?;
        check_sinks(sinks, q)?;
        if sinks.is_present() && p.ahead > 0 {
            return Err("`sinks` beside positions that are not all before, expected none".to_owned());
        }
        for (name, operand, rank) in [("q", q, 4), ("k", k, 3), ("v", v, 3), ("y", y, 4)] {
            rules::dtype(name, operand, &rules::FLOATS)?;
            rules::rank(name, operand, rank)?;
            rules::unit_stride(name, operand)?;
        }
        for (name, operand) in [("k", k), ("v", v)] {
            rules::extent(name, operand, 0, q.extent[1])?;
            rules::extent(name, operand, 1, k.extent[1])?;
            rules::extent(name, operand, 2, q.extent[3])?;
        }
        if p.splits <= 1 {
            return (0..4).try_for_each(|dim| rules::extent("y", y, dim, q.extent[dim]));
        }
        rules::dtype("y", y, &[perpetua_shared::DType::F32])?;
        if p.ahead > 0 {
            return Err(format!("{} splits of positions that are not all before, expected 1", p.splits));
        }
        if p.window != ALL {
            rules::extent("q", q, 0, 1)?;
        }
        let queries = q.extent[0].saturating_mul(q.extent[2]);
        let parts = [q.extent[1], 1, queries, q.extent[3].saturating_add(FOUND)];
        (0..4).try_for_each(|dim| rules::extent("y", y, dim, parts[dim]))
    }

    fn cost(p: &Params, io: &[Operand]) -> Cost {
        // Over the whole context: the length at run time is not known here.
        let [q, k, ..] = io else { return Cost::default() };
        let mut share = [Operand::ABSENT; slot::ALL.len()];
        share.copy_from_slice(io);
        let most = |cache: &Operand| p.most_seen(cache.extent[1]).div_ceil(p.splits.max(1));
        let flops = product([4, q.len_elems(), u64::from(most(k))]);
        for cache in [slot::K, slot::V] {
            share[cache].extent[1] = most(&share[cache]);
        }
        Cost { flops, ..default_cost(Self::SLOTS, &share) }
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(p: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [q, k, v, y, sinks] = core::array::from_fn(|i| call.tensor(i));
        let (n_kv, group, d) = (q.extent(1), q.extent(2), q.extent(3));
        for r in 0..call.rows(slot::Q) {
            let pass = [call.step.first_pos, call.step.rows];
            let (first, end) = p.share_of(pass, call.task.row_first + r as u32, call.task.block[1]);
            let positions = first as usize..end as usize;
            for h in 0..n_kv {
                for g in 0..group {
                    let q = (0..d).map(|i| q.get([r, h, g, i])).collect::<Vec<_>>();
                    let sink = sink(&sinks, [p.splits, call.task.block[1]], [h, g]);
                    let (max, total, sums) = attended(&q, [&k, &v], h, positions.clone(), p.scale, sink);
                    if p.splits <= 1 {
                        (0..d).for_each(|i| y.set([r, h, g, i], sums[i] / total));
                    } else {
                        let query = r * group + g;
                        y.set([h, 0, query, 0], max);
                        y.set([h, 0, query, 1], total);
                        (0..d).for_each(|i| y.set([h, 0, query, FOUND as usize + i], sums[i]));
                    }
                }
            }
        }
        Ok(())
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn cpu(p: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
        cpu::run(p, call, scratch)
    }

    unsafe fn gpu(p: &Params, call: &crate::gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        // SAFETY: the caller's promise.
        unsafe { gpu::run(p, call, block) }
    }
}
