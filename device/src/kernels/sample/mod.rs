//! tokens[first_pos + rows] = the next token: the argmax of the partial results at temperature 0, else a draw from
//! softmax(logits / temperature) cut to the top k and then to the smallest set of mass top p (the order `transformers`
//! applies them in). logits: [1, vocab] f32; values, indices: [blocks]; control: the control block; tokens: [capacity]
//! i32, or [1], where the token alone is wanted; text: [capacity] i32, the tokens before it, where they are not in
//! `tokens`.
//!
//! Before that, where a repetition penalty is asked for, the logits of all tokens that the text has already are
//! [penalised] where they stand, each once; then the partial results do not count. (Keskar et al. 2019, CTRL, as
//! `transformers` has it: the prompt's tokens, too.)
//!
//! The draw is a function of seed and position alone, so a run can be repeated on any executor. Each sequence of a
//! batch has a [`Request`] of its own.

use super::*;
mod gpu;
#[cfg(not(target_arch = "nvptx64"))]
use crate::{
    cpu::{rows::Row, rowwise::Largest},
    io::Tensor,
};
use perpetua_shared::control::{Control, Request};
#[cfg(not(target_arch = "nvptx64"))]
use perpetua_shared::{DType, FaultCode};

/// A repetition penalty that changes nothing.
const NO_PENALTY: f32 = 1.0;

/// The logit of a token that the text has already.
fn penalised(logit: f32, penalty: f32) -> f32 {
    if logit < 0.0 { logit * penalty } else { logit / penalty }
}

/// See the module head.
#[derive(Debug)]
pub struct Sample;

/// No parameters.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {}

/// A number in [0, 1) from the seed and a position (SplitMix64's finaliser, Steele et al. 2014).
pub fn uniform(seed: [u32; 2], position: u32) -> f64 {
    let seed = u64::from(seed[0]) | u64::from(seed[1]) << 32;
    let mut z = seed.wrapping_add(u64::from(position).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((z ^ z >> 31) >> 11) as f64 / (1u64 << 53) as f64
}

/// Where field `$field` of sequence `$sequence`'s request is in the control block, in bytes.
macro_rules! request {
    ($field:ident of $sequence:expr) => {
        core::mem::offset_of!(Control, requests)
            + $sequence as usize * size_of::<Request>()
            + core::mem::offset_of!(Request, $field)
    };
}
use request;

slots! {
    LOGITS: update "logits",
    VALUES: read "values",
    INDICES: read "indices",
    CONTROL: read "control",
    TOKENS: update "tokens",
    TEXT: optional "text",
}

impl MacroKernel for Sample {
    const NAME: &'static str = "sample";
    const SLOTS: &'static [Slot] = slot::ALL;
    type Params = Params;

    #[cfg(not(target_arch = "nvptx64"))]
    fn check(_: &Params, io: &[Operand]) -> Result<(), Violation> {
        let [logits, values, indices, control, tokens, text] = io else { unreachable!("slots were counted") };
        rules::dtype("logits", logits, &[DType::F32])?;
        rules::rank("logits", logits, 2)?;
        rules::unit_stride("logits", logits)?;
        rules::dtype("values", values, &[DType::F32])?;
        rules::dtype("indices", indices, &[DType::I32])?;
        rules::extent("indices", indices, 0, values.extent[0])?;
        rules::dtype("control", control, &[DType::U32])?;
        rules::rank("control", control, 1)?;
        rules::unit_stride("control", control)?;
        rules::extent("control", control, 0, (size_of::<Control>() / 4) as u32)?;
        rules::dtype("tokens", tokens, &[DType::I32])?;
        rules::rank("tokens", tokens, 1)?;
        if !text.is_present() {
            let is_alone = tokens.extent[0] == 1;
            return if is_alone { Err("a token alone, and no text beside it".to_owned()) } else { Ok(()) };
        }
        rules::dtype("text", text, &[DType::I32])?;
        rules::rank("text", text, 1)
    }

    fn cost(_: &Params, io: &[Operand]) -> Cost {
        // What a greedy choice takes: of the logits and the text nothing, of the tokens one.
        let [_, values, indices, ..] = io else { return Cost::default() };
        let bytes_read = total([values.bytes(), indices.bytes()]);
        Cost { bytes_read, bytes_written: size_of::<i32>() as u64, flops: 0 }
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(_: &Params, call: &Call<'_>) -> Result<(), Fault> {
        let largest =
            |logits: &Tensor| (0..logits.extent(1)).map(|i| logits.get([0, i])).fold(f32::NEG_INFINITY, f32::max);
        sample(call, &mut Scratch::default(), largest)
    }

    #[cfg(not(target_arch = "nvptx64"))]
    fn cpu(_: &Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
        let isa = scratch.isa;
        let largest = |logits: &Tensor| isa.run(Largest(Row::of(logits, [0, 0], logits.extent(1))));
        sample(call, scratch, largest)
    }

    unsafe fn gpu(_: &Params, call: &crate::gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        // SAFETY: the caller's promise.
        unsafe { gpu::run(call, block) }
    }
}

/// The body; `largest` of the logits, NaN below everything.
#[cfg(not(target_arch = "nvptx64"))]
fn sample(call: &Call<'_>, scratch: &mut Scratch, largest: impl FnOnce(&Tensor) -> f32) -> Result<(), Fault> {
    // A sequence that has ended, or a row that the pass does not have.
    if call.rows(slot::LOGITS) == 0 {
        return Ok(());
    }
    let [logits, values, indices, control, tokens, text] = core::array::from_fn(|i| call.tensor(i));
    let word = |offset: usize| super::advance::load(&control, offset / 4);
    let sequence = call.step.sequence;
    let float = |offset: usize| f32::from_bits(word(offset));
    let temperature = float(request!(temperature of sequence));
    let penalty = float(request!(repetition_penalty of sequence));
    let position = call.step.first_pos + call.step.rows;
    let vocab = logits.extent(1);
    let mut best = None;
    if penalty == NO_PENALTY {
        for b in 0..values.extent(0) {
            let (value, index) = (values.get([b]), indices.get_i32([b]));
            if index >= 0 && best.is_none_or(|(most, _)| value > most) {
                best = Some((value, index));
            }
        }
    } else {
        let text = if text.is_present() { &text } else { &tokens };
        let text = text.slice::<i32, 1>([0], position as usize);
        penalise(logits.slice_mut::<f32, 2>([0, 0], vocab), text, penalty, &mut scratch.seen);
        let most = largest(&logits);
        let elements = logits.slice::<f32, 2>([0, 0], vocab);
        best = elements.iter().position(|logit| *logit == most).map(|at| (most, at as i32));
    }
    let Some((max, mut token)) = best else { return Err(Fault::new(FaultCode::NotANumber, position, 0, 0)) };
    if temperature > 0.0 {
        let top_k = word(request!(top_k of sequence)) as usize;
        let top_p = float(request!(top_p of sequence));
        let seed_at = request!(seed of sequence);
        token = draw(
            logits.slice::<f32, 2>([0, 0], vocab),
            max,
            temperature,
            top_k,
            top_p,
            uniform([word(seed_at), word(seed_at + 4)], position),
            &mut scratch.candidates,
        ) as i32;
    }
    let at = if tokens.extent(0) == 1 { 0 } else { position as usize };
    tokens.set_i32([at], token);
    Ok(())
}

/// Penalises those `logits` of which the token is in `text`. `seen` is for a bit of each.
#[cfg(not(target_arch = "nvptx64"))]
fn penalise(logits: &mut [f32], text: &[i32], penalty: f32, seen: &mut Vec<u32>) {
    seen.clear();
    seen.resize(logits.len().div_ceil(32), 0);
    for token in text.iter().map(|token| *token as usize) {
        let Some(logit) = logits.get_mut(token) else { continue };
        let (word, bit) = (&mut seen[token / 32], 1 << (token % 32));
        if *word & bit == 0 {
            *logit = penalised(*logit, penalty);
        }
        *word |= bit;
    }
}

/// Draws an index of `logits` (the largest of which is `max`) with the uniform number `u`.
#[cfg(not(target_arch = "nvptx64"))]
pub fn draw(
    logits: &[f32],
    max: f32,
    temperature: f32,
    top_k: usize,
    top_p: f32,
    u: f64,
    candidates: &mut Vec<(f32, u32)>,
) -> u32 {
    candidates.clear();
    let weight = |l: f32| if l == max { 1.0 } else { ((l - max) / temperature).exp() };
    // Weights that round to zero can never be drawn; dropping them keeps the sort short.
    candidates.extend(logits.iter().enumerate().map(|(i, l)| (weight(*l), i as u32)).filter(|(w, _)| *w > 0.0));
    let by_weight = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
    if top_k > 0 && top_k < candidates.len() {
        candidates.select_nth_unstable_by(top_k - 1, by_weight);
        candidates.truncate(top_k);
    }
    if top_p < 1.0 {
        candidates.sort_unstable_by(by_weight);
        let total: f64 = candidates.iter().map(|(w, _)| f64::from(*w)).sum();
        let mut mass = 0.0;
        let keep = candidates.iter().take_while(|(w, _)| {
            let before = mass;
            mass += f64::from(*w);
            before < f64::from(top_p) * total
        });
        let keep = keep.count().max(1);
        candidates.truncate(keep);
    } else {
        // The draw walks the candidates; in index order it does not depend on how the selection left them.
        candidates.sort_unstable_by_key(|(_, i)| *i);
    }
    let total: f64 = candidates.iter().map(|(w, _)| f64::from(*w)).sum();
    let mut left = u * total;
    for (w, i) in candidates.iter() {
        left -= f64::from(*w);
        if left < 0.0 {
            return *i;
        }
    }
    candidates.last().map_or(0, |(_, i)| *i)
}
