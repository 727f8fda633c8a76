//! y = act(x . w^T + bias) + residual, or, with [`MULTIPLIES`], times it. x: [rows, k]; w: [n, k] (as checkpoints store
//! it); bias: [n]; residual, y: [rows, n]; f32 accumulation. Reads the weights once: n*k elements, 2*rows*n*k flops.
//! With `norm`, [k], x is first normalised as [`rms_norm`](super::rms_norm) does, in f32: one row of at most
//! [`MAX_NORMED`] elements. With `merges` x is [kv_heads, splits, group, 4 + d] f32, from which every task first makes
//! its row, as long, as [`attention_merge`](super::attention_merge) does.
//!
//! With `values` and `indices`, of one row, y's largest element and where it stands go there too, as
//! [`argmax_partial`](super::argmax) has them of its part.
//!
//! A norm between two products of several rows may be in both of them, so that nobody stands between. The one before it
//! makes, of at most [`MOST_WEIGHTED`] columns, `weighted` = y * `weights`, [n], and for `values`, [rows, 1], the sums
//! of the squares of y. The one after it has that for x (`is_weighted`), and for `norm` the sums of all the parts of a
//! row, [rows, parts]: 1 / root of their mean it multiplies its sums with.

use super::*;

#[cfg(not(target_arch = "nvptx64"))]
pub(super) mod cpu;
mod gpu;
pub(crate) use self::gpu::joined;

/// See the module head.
#[derive(Debug)]
pub struct Linear;

/// What is applied to each output before the residual is added.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// Nothing.
    None,
    /// x * Phi(x), with the error function (BERT's `gelu`).
    Gelu,
    /// x * sigmoid(x).
    Silu,
    /// max(x, 0).
    Relu,
    /// The tanh approximation of gelu (`gelu_new`, `gelu_pytorch_tanh`).
    GeluTanh,
    /// c * tanh(x / c): no further from 0 than the cap c, a normal number above 0.
    Capped(f32),
}

impl Activation {
    /// Its number, in parameters: of a cap its bits, which no other is as large as.
    pub const fn number(self) -> u32 {
        match self {
            Activation::None => 0,
            Activation::Gelu => 1,
            Activation::Silu => 2,
            Activation::Relu => 3,
            Activation::GeluTanh => 4,
            Activation::Capped(cap) => cap.to_bits(),
        }
    }

    /// The activation numbered `number`.
    pub fn from_u32(number: u32) -> Option<Activation> {
        use Activation::*;
        let cap = f32::from_bits(number);
        let capped = (cap.is_normal() && cap > 0.0).then_some(Capped(cap));
        [None, Gelu, Silu, Relu, GeluTanh].into_iter().find(|a| a.number() == number).or(capped)
    }

    /// The function itself.
    #[cfg(not(target_arch = "nvptx64"))]
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Activation::None => x,
            Activation::Gelu => 0.5 * x * (1.0 + crate::cpu::math::erf(x * std::f32::consts::FRAC_1_SQRT_2)),
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::Relu => x.max(0.0),
            Activation::GeluTanh => {
                let inner = (2.0 / std::f32::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
                0.5 * x * (1.0 + inner.tanh())
            }
            Activation::Capped(cap) => cap * (x / cap).tanh(),
        }
    }
}

/// How CPU bodies may add up an output's products. Each is one order, whatever is computed beside the output.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As is fast from one row on: in graphs that decode, where a prompt must give the bits of its rows one by one.
    Lanes = 0,
    /// As is fast for many rows, whatever that is: in graphs that do not decode.
    Free = 1,
    /// In prompts: as [`Order::Lanes`], so that tokens one by one give the same bits, except where the core has a
    /// matrix unit that takes the weights, or attention's keys and values, or where weights in fewer bits are
    /// [`Order::Rounded`].
    Prompt = 2,
    /// As [`Order::Prompt`], but where the core multiplies pairs of bf16 as often as f32 activations are rounded to
    /// bf16, too, and with them queries and attention's weights.
    Rounded = 3,
}

impl Order {
    /// The order numbered `number`.
    pub fn from_u32(number: u32) -> Option<Order> {
        [Order::Lanes, Order::Free, Order::Prompt, Order::Rounded].into_iter().find(|order| *order as u32 == number)
    }
}

/// Beside an activation's number: outputs are multiplied with the residual, instead of added to it. No number has this
/// bit, since caps are above 0.
pub const MULTIPLIES: u32 = 1 << 31;

/// Parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    /// An [`Activation`], with [`MULTIPLIES`] or without.
    pub activation: u32,
    /// Added to the mean square of x, where it is normalised.
    pub eps: f32,
    /// An [`Order`].
    pub order: u32,
    /// 1: x is what the splits of an attention found, and the row what [`attention_merge`](super::attention_merge)
    /// makes of it.
    pub merges: u32,
    /// How many [segments](segment_len) the row of x is taken in, each with that part of all of w, of which the tiles
    /// come in that order; 0 or 1: it is taken whole.
    pub segments: u32,
    /// Where there are `values`: how the whole row is cut into y of the operator's blocks.
    pub best: argmax::Params,
    /// 1: the norm's weights are in x, and `norm` is sums of squares.
    pub is_weighted: u32,
}

impl Params {
    /// Its activation alone.
    #[cfg(not(target_arch = "nvptx64"))]
    fn activation(&self) -> Option<Activation> {
        Activation::from_u32(self.activation & !MULTIPLIES)
    }

    /// See [`MULTIPLIES`].
    #[cfg(not(target_arch = "nvptx64"))]
    fn multiplies(&self) -> bool {
        self.activation & MULTIPLIES != 0
    }
}

/// How many segments the task of a kernel of type `task_type`, with parameters `words`, takes its row in.
#[cfg(not(target_arch = "nvptx64"))]
pub fn segments(task_type: u16, words: &[u32; PARAM_WORDS]) -> u32 {
    if task_type == Linear::TASK_TYPE { params::<Params>(words).segments.max(1) } else { 1 }
}

/// Elements of each of the `segments` that a row of `k` is taken in; the last has what is left.
pub const fn segment_len(k: u32, segments: u32) -> u32 {
    if segments > 1 { k.div_ceil(8).div_ceil(segments) * 8 } else { k }
}

/// Rows of weights whose sums the GPU has room for where a row of x is longer than [`MAX_NORMED`], and one more for
/// each segment.
pub const LONG_SUMS: u32 = 625;

/// Columns of a task that makes `weighted`: those of which the GPU has the sums of a row together.
pub const MOST_WEIGHTED: u32 = 128;

/// Rows of activations at most that are multiplied with weights in tiles where they are several: see the device's
/// `gpu::thin::few`.
pub const MOST_FEW: u32 = 8;

/// Bytes from one of them, of `k` elements, to the next, in the memory that tiles leave.
pub(crate) const fn few_pitch(k: u32) -> u32 {
    (2 * k).next_multiple_of(128) + 64
}

/// Bytes of that memory that a product of `x` takes beside its tiles, if it may come in tiles.
#[cfg(not(target_arch = "nvptx64"))]
pub(super) fn beside_tiles(x: &Operand) -> u64 {
    let [rows, k, ..] = x.extent;
    let are_few = x.dtype() == Some(perpetua_shared::DType::Bf16) && (2..=MOST_FEW).contains(&rows);
    if are_few { u64::from(rows) * u64::from(few_pitch(k)) } else { 0 }
}

/// What a task must be that makes of `y` what a product after a norm reads.
#[cfg(not(target_arch = "nvptx64"))]
fn check_weighted(p: &Params, y: &Operand, [weights, weighted, values]: [&Operand; 3]) -> Result<(), Violation> {
    let n = y.extent[1];
    if n > MOST_WEIGHTED || p.merges != 0 || p.segments > 1 {
        return Err(format!("`weighted` is of {n} columns, expected at most {MOST_WEIGHTED}, of a plain product"));
    }
    rules::weighted(y, [weights, weighted], ("values", values))
}

/// What a row of `x` that is taken in segments, and `w`, must be.
#[cfg(not(target_arch = "nvptx64"))]
fn check_segments(p: &Params, [x, w, norm]: [&Operand; 3]) -> Result<(), Violation> {
    use perpetua_shared::DType;
    let (segments, k) = (p.segments, w.extent[1]);
    if segments <= 1 {
        return Ok(());
    }
    let len = segment_len(k, segments);
    if k % 8 != 0 || len > MAX_FLAGGED || u64::from(segments - 1) * u64::from(len) >= u64::from(k) {
        return Err(format!(
            "{segments} segments of a row of {k}, expected none empty, none of more than {MAX_FLAGGED}, all of eights"
        ));
    }
    let is_plain = p.merges == 0 && !norm.is_present() && x.extent[0] == 1 && x.offset_bytes.is_multiple_of(16);
    if !is_plain || x.dtype() != Some(DType::F32) || w.dtype() != Some(DType::Bf16) {
        let (x, w) = (x.dtype(), w.dtype());
        return Err(format!("{segments} segments of {x:?} by {w:?}, expected one row in F32, as it lies, by Bf16"));
    }
    if u64::from(segments) * (u64::from(w.extent[0]) + 1) > u64::from(LONG_SUMS) {
        return Err(format!(
            "{segments} segments by {} rows, expected at most {LONG_SUMS} sums, with one for each segment",
            w.extent[0]
        ));
    }
    Ok(())
}

slots! {
    X: read "x",
    W: read "w",
    BIAS: optional "bias",
    RESIDUAL: optional "residual",
    Y: write "y",
    NORM: optional "norm",
    VALUES: optional_write "values",
    INDICES: optional_write "indices",
    WEIGHTS: optional "weights",
    WEIGHTED: optional_write "weighted",
}

impl MacroKernel for Linear {
    const NAME: &'static str = "linear";
    const SLOTS: &'static [Slot] = slot::ALL;
    type Params = Params;
    /// Sums in another order, and rows of activations as two terms of bf16.
    const TOLERANCE: f32 = 2e-3;
    const TILED: &'static [usize] = &[slot::NORM, slot::W];
    const EARLY_READS: &'static [usize] = &[slot::W];
    const FLAGGED: &'static [usize] = &[slot::X, slot::RESIDUAL, slot::Y];

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(p: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [x, w, bias, residual, y, norm, values, indices, weights, weighted] = io else {
            unreachable!("slots were counted")
        };
        if p.activation().is_none() {
            return Err(format!("activation {} is unknown", p.activation));
        }
        if p.multiplies() && !residual.is_present() {
            return Err("`residual` is absent, expected what outputs are multiplied with".to_owned());
        }
        if Order::from_u32(p.order).is_none() {
            return Err(format!("order of summation {} is unknown", p.order));
        }
        rules::weights("w", w)?;
        for (name, operand, rank) in [("bias", bias, 1), ("residual", residual, 2), ("y", y, 2)] {
            rules::dtype(name, operand, &rules::FLOATS)?;
            rules::rank(name, operand, rank)?;
            rules::unit_stride(name, operand)?;
        }
        check_segments(p, [x, w, norm])?;
        let rows = if p.merges != 0 {
            if norm.is_present() {
                return Err("`norm` is present, expected none where `x` is merged".to_owned());
            }
            let k = attention_merge::merged_len(x)?;
            if k > u64::from(MAX_NORMED) {
                return Err(format!("`x` merges into {k} elements, expected at most {MAX_NORMED}"));
            }
            rules::extent("w", w, 1, k as u32)?;
            1
        } else {
            rules::dtype("x", x, &rules::FLOATS)?;
            rules::rank("x", x, 2)?;
            rules::unit_stride("x", x)?;
            rules::extent("w", w, 1, x.extent[1])?;
            rules::norm(norm, x, p.is_weighted)?;
            rules::flagged_row("x", x, &[w], MAX_FLAGGED.saturating_mul(p.segments.max(1)))?;
            x.extent[0]
        };
        rules::extent("bias", bias, 0, w.extent[0])?;
        rules::flagged_in(&[("residual", residual), ("y", y)], rows)?;
        for (name, operand) in [("residual", residual), ("y", y)] {
            rules::extent(name, operand, 0, rows)?;
            rules::extent(name, operand, 1, w.extent[0])?;
        }
        let are_present = [values, indices, weights, weighted].map(Operand::is_present);
        match are_present {
            [false, false, false, false] => Ok(()),
            [true, true, false, false] => argmax::check(&p.best, [y, values, indices]),
            [true, false, true, true] => check_weighted(p, y, [weights, weighted, values]),
            _ => Err(format!(
                "of `values`, `indices`, `weights` and `weighted` {are_present:?} are present, expected the first two, all but the second, or none"
            )),
        }
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn beside_tiles(_: &Params, io: &[Operand]) -> u64 {
        beside_tiles(&io[slot::X])
    }

    fn cost(p: &Params, io: &[Operand]) -> Cost {
        let [x, w, ..] = io else { return Cost::default() };
        let rows = if p.merges != 0 { 1 } else { x.extent[0] };
        let all = default_cost(Self::SLOTS, io);
        let unread = if p.merges != 0 { attention_merge::unread_bytes(x) } else { 0 };
        let flops = product([2, u64::from(rows), w.len_elems()]);
        Cost { flops, bytes_read: all.bytes_read.saturating_sub(unread), ..all }
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(p: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let [x, w, bias, residual, y, norm, values, indices, weights, weighted] =
            core::array::from_fn(|i| call.tensor(i));
        let activation = p.activation().unwrap_or(Activation::None);
        let rows = if p.merges != 0 { 1 } else { call.rows(slot::X) };
        for r in 0..rows {
            let x = if p.merges != 0 {
                attention_merge::merged(&x)
            } else {
                rms_norm::row(&x, r, &norm, p.eps, p.is_weighted != 0)
            };
            let mut sum_of_squares = 0.0;
            for n in 0..w.extent(0) {
                let mut sum: f32 = x.iter().enumerate().map(|(k, x)| x * w.get([n, k])).sum();
                if bias.is_present() {
                    sum += bias.get([n]);
                }
                sum = activation.apply(sum);
                if p.multiplies() {
                    sum *= residual.get([r, n]);
                } else if residual.is_present() {
                    sum += residual.get([r, n]);
                }
                y.set([r, n], sum);
                if weighted.is_present() {
                    weighted.set([r, n], sum * weights.get([n]));
                    sum_of_squares += sum * sum;
                }
            }
            if weighted.is_present() {
                values.set([r, 0], sum_of_squares);
            }
        }
        if indices.is_present() {
            argmax::find(&p.best, call, [&y, &values, &indices]);
        }
        Ok(())
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn cpu(p: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
        // Lowered for workers that read x from afar: CPUs keep the norm, the merge, and the search, an operator of its
        // own.
        if [slot::NORM, slot::VALUES].iter().any(|operand| call.tensor(*operand).is_present()) || p.merges != 0 {
            return Self::reference(p, call);
        }
        cpu::run(p, call, scratch)
    }

    const THIN: bool = true;
    const EARLY: bool = true;

    unsafe fn gpu_early(
        p: &Params,
        call: &crate::gpu::Call<'_>,
        block: &Block,
        ready: impl Fn() -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        // SAFETY: the caller's promise.
        unsafe { gpu::run(p, call, block, ready) }
    }
}
