//! The macro kernels: one file each, and the one list.
//!
//! A macro kernel is the device function a task runs. Its file holds all the project knows about it: shapes, `check`,
//! `cost`, the plain-loop `reference` that defines it, and its CPU and GPU bodies.

use bytemuck::Pod;
use perpetua_shared::limits::PARAM_WORDS;
use perpetua_shared::task::Operand;

use crate::{arch::memory, block::Block, gpu};
#[cfg(not(target_arch = "nvptx64"))]
use crate::{cpu::Scratch, io::Call};
use perpetua_shared::{Fault, FaultCode, Technique};

/// How a task uses an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Reads it.
    Read,
    /// Writes every element of it (that the pass's rows cover) and reads none.
    Write,
    /// Reads and writes it in place.
    Update,
    /// Reads what earlier passes left there, if it is a state, up to the pass's position, and appends. Tasks of one
    /// operator may share it: of what is appended each element has exactly one of them, which one being known at run
    /// time, that writes it, and it alone reads that.
    Append,
}

/// One operand of a macro kernel's signature.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    /// Its name in the kernel's formula.
    pub name: &'static str,
    /// How it is used.
    pub usage: Use,
    /// Whether it may be absent.
    pub optional: bool,
}

impl Slot {
    /// An operand that is read.
    pub const fn read(name: &'static str) -> Slot {
        Slot { name, usage: Use::Read, optional: false }
    }
    /// An operand that is read when present.
    pub const fn optional(name: &'static str) -> Slot {
        Slot { name, usage: Use::Read, optional: true }
    }
    /// An operand that is written when present.
    pub const fn optional_write(name: &'static str) -> Slot {
        Slot { name, usage: Use::Write, optional: true }
    }
    /// An operand that is written.
    pub const fn write(name: &'static str) -> Slot {
        Slot { name, usage: Use::Write, optional: false }
    }
    /// An operand that is appended to.
    pub const fn append(name: &'static str) -> Slot {
        Slot { name, usage: Use::Append, optional: false }
    }
    /// An operand that is appended to when present.
    pub const fn optional_append(name: &'static str) -> Slot {
        Slot { name, usage: Use::Append, optional: true }
    }
    /// An operand that is updated in place.
    pub const fn update(name: &'static str) -> Slot {
        Slot { name, usage: Use::Update, optional: false }
    }
}

/// What running a task moves and computes: scheduling and roofline use the same numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Bytes read from memory, each element once.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Floating-point operations (a multiply-add is two).
    pub flops: u64,
}

/// A rule of a macro kernel that a task's operands break, as one sentence.
#[cfg(not(target_arch = "nvptx64"))]
pub type Violation = String;

/// A device function that tasks run.
pub trait MacroKernel {
    /// Its name in text forms and reports.
    const NAME: &'static str;
    /// Its operands, in order: `slot::ALL`, which `slots!` makes beside a constant for the number of each.
    const SLOTS: &'static [Slot];
    /// Its parameters: at most [`PARAM_WORDS`] words.
    type Params: Pod;
    /// Operands, matrices, whose rows the GPU body takes from tiles when the worker's loader brings them, as it may in
    /// passes of one row: a tile of each in turn.
    const TILED: &'static [usize] = &[];

    /// Operands that the GPU body may read before the task's events have fired, where these are weights
    /// ([`READS_EARLY`](perpetua_shared::TaskFlags::READS_EARLY)).
    const EARLY_READS: &'static [usize] = &[];

    /// Operands whose elements the GPU body reads and writes as [flagged](perpetua_shared::flag) where they are: f32
    /// all.
    const FLAGGED: &'static [usize] = &[];

    /// How far a body's result may be from the [reference](MacroKernel::reference)'s `y`, where operands are about 1 in
    /// size: `TOLERANCE * (1 + |y|)`, beside the step from one number of the result's type to the next.
    const TOLERANCE: f32 = 2e-5;

    /// Judges shapes, dtypes and strides; presence and slot count have been judged before.
    #[cfg(not(target_arch = "nvptx64"))]
    fn check(params: &Self::Params, io: &[Operand]) -> Result<(), Violation>;

    /// Bytes, the first of those that tiles may have, that the GPU body takes for itself in passes of several rows
    /// whose tiles leave it some: none of these may land there.
    #[cfg(not(target_arch = "nvptx64"))]
    fn beside_tiles(params: &Self::Params, io: &[Operand]) -> u64 {
        let _ = (params, io);
        0
    }

    /// Bytes and flops of one task over all its rows.
    fn cost(params: &Self::Params, io: &[Operand]) -> Cost {
        let _ = params;
        default_cost(Self::SLOTS, io)
    }

    /// The definition: plain loops, f32 arithmetic.
    #[cfg(not(target_arch = "nvptx64"))]
    fn reference(params: &Self::Params, call: &Call<'_>) -> Result<(), Fault>;

    /// The body CPU workers run; the reference where plain loops are good enough.
    #[cfg(not(target_arch = "nvptx64"))]
    fn cpu(params: &Self::Params, call: &Call<'_>, scratch: &mut Scratch) -> Result<(), Fault> {
        let _ = scratch;
        Self::reference(params, call)
    }

    /// The body GPU workers run, on every thread of a block. It asks `block`, never the hardware, who it is.
    ///
    /// # Safety
    /// Every thread of the block makes this same call; `call` is a task of a checked image, whose waits have been met.
    unsafe fn gpu(params: &Self::Params, call: &gpu::Call<'_>, block: &Block) -> Result<(), Fault> {
        let _ = (params, block);
        Err(call.fault(FaultCode::NoSuchKernel, u32::from(call.task_type()), 0, 0))
    }

    /// Whether its tasks may be [products of one row](gpu::thin::Product), which have one body for all kernels that
    /// have such: GPU workers ask for that first.
    const THIN: bool = false;

    /// Whether GPU workers run [`gpu_early`](MacroKernel::gpu_early) instead.
    const EARLY: bool = false;

    /// As [`gpu`](MacroKernel::gpu), but begun before the task's waits have been met: what is known without other tasks
    /// is found out while they run. Calls `ready`, which ends when the waits have been met, once, on every thread,
    /// before it touches anything that another task does.
    ///
    /// # Safety
    /// Every thread of the block makes this same call; `call` is a task of a checked image.
    ///
    /// # Errors
    /// Those of `ready`, and the body's own.
    unsafe fn gpu_early(
        params: &Self::Params,
        call: &gpu::Call<'_>,
        block: &Block,
        ready: impl Fn() -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        ready()?;
        // SAFETY: the caller's promise, and the waits have been met.
        unsafe { Self::gpu(params, call, block) }
    }
}

/// Elements of a row that a product may normalise first: the GPU keeps them in shared memory.
pub const MAX_NORMED: u32 = 4096;

/// Elements of a row, or of a [segment](linear::segment_len) of it, that a product takes by flags: the GPU keeps them
/// in registers where they are more than [`MAX_NORMED`], eight times eight for each thread.
pub const MAX_FLAGGED: u32 = 64 * perpetua_shared::launch::TASK_THREADS;

/// Likewise by a product with two matrices, five times eight.
pub const MAX_FLAGGED_OF_TWO: u32 = 40 * perpetua_shared::launch::TASK_THREADS;

/// Every operand once, one flop an element written: right for the kernels that only move data.
pub fn default_cost(slots: &[Slot], io: &[Operand]) -> Cost {
    let mut cost = Cost::default();
    for (slot, operand) in slots.iter().zip(io) {
        let bytes = operand.bytes();
        if slot.usage != Use::Write {
            cost.bytes_read = total([cost.bytes_read, bytes]);
        }
        if slot.usage != Use::Read {
            cost.bytes_written = total([cost.bytes_written, bytes]);
            cost.flops = total([cost.flops, operand.len_elems()]);
        }
    }
    cost
}

/// The sum, or the largest number where that is too small: sizes are a user's, and what costs more than can be counted
/// is refused elsewhere.
fn total<const N: usize>(terms: [u64; N]) -> u64 {
    terms.into_iter().fold(0, u64::saturating_add)
}

/// The product; otherwise as [`total`].
fn product<const N: usize>(factors: [u64; N]) -> u64 {
    factors.into_iter().fold(1, u64::saturating_mul)
}

/// The operands of a task of kernel `spec`, with parameters `words`, that come in [tiles](MacroKernel::TILED): not what
/// a product's x is normalised by where that is [weighted](linear::Params::is_weighted).
#[cfg(not(target_arch = "nvptx64"))]
pub fn tiled(spec: &Spec, words: &[u32; PARAM_WORDS]) -> &'static [usize] {
    const { assert!(Linear::TILED[0] == linear::slot::NORM && GatedLinear::TILED[0] == gated_linear::slot::NORM) };
    let is_weighted = match spec.task_type {
        Linear::TASK_TYPE => params::<linear::Params>(words).is_weighted != 0,
        GatedLinear::TASK_TYPE => params::<gated_linear::Params>(words).is_weighted != 0,
        _ => false,
    };
    &spec.tiled[usize::from(is_weighted)..]
}

/// Whether the GPU body of a kernel of type `task_type` may take the tiles' memory for itself even in a pass of one
/// row: attention does where a key/value head has queries enough. So nothing may be on its way there by then, not even
/// for the pass after.
#[cfg(not(target_arch = "nvptx64"))]
pub fn takes_memory_for_one_row(task_type: u16) -> bool {
    task_type == Attention::TASK_TYPE
}

/// How a kernel `spec` uses its operand `slot` where it `has` the operands of which that says so: a cache to which it
/// has nothing to append it only reads.
#[cfg(not(target_arch = "nvptx64"))]
pub fn use_of(spec: &Spec, slot: usize, has: impl Fn(usize) -> bool) -> Use {
    let appends = spec.task_type != DecodeAttention::TASK_TYPE || has(decode_attention::slot::K);
    match spec.slots[slot].usage {
        Use::Append if !appends => Use::Read,
        usage => usage,
    }
}

/// Reads a kernel's parameters out of a task's words.
pub fn params<P: Pod>(words: &[u32; PARAM_WORDS]) -> P {
    bytemuck::pod_read_unaligned(&bytemuck::bytes_of(words)[..size_of::<P>()])
}

/// Writes a kernel's parameters as a task's words; the rest is zero.
pub fn param_words<P: Pod>(params: &P) -> [u32; PARAM_WORDS] {
    const { assert!(size_of::<P>() <= 4 * PARAM_WORDS, "a macro kernel's parameters must fit the task descriptor") };
    let mut words = [0; PARAM_WORDS];
    bytemuck::bytes_of_mut(&mut words)[..size_of::<P>()].copy_from_slice(bytemuck::bytes_of(params));
    words
}

/// A kernel's number in images.
pub trait Numbered {
    /// The number.
    const TASK_TYPE: u16;
}

/// A macro kernel, its types erased: one row of [`SPECS`].
#[cfg(not(target_arch = "nvptx64"))]
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// Its number in images.
    pub task_type: u16,
    /// See [`MacroKernel::NAME`].
    pub name: &'static str,
    /// See [`MacroKernel::SLOTS`].
    pub slots: &'static [Slot],
    /// See [`MacroKernel::TILED`].
    pub tiled: &'static [usize],
    /// See [`MacroKernel::EARLY_READS`].
    pub early_reads: &'static [usize],
    /// See [`MacroKernel::FLAGGED`].
    pub flagged: &'static [usize],
    /// See [`MacroKernel::TOLERANCE`].
    pub tolerance: f32,
    check: fn(&[u32; PARAM_WORDS], &[Operand]) -> Result<(), Violation>,
    /// See [`MacroKernel::beside_tiles`].
    pub beside_tiles: fn(&[u32; PARAM_WORDS], &[Operand]) -> u64,
    /// See [`MacroKernel::cost`].
    pub cost: fn(&[u32; PARAM_WORDS], &[Operand]) -> Cost,
    /// See [`MacroKernel::reference`].
    pub reference: fn(&Call<'_>) -> Result<(), Fault>,
    /// See [`MacroKernel::cpu`].
    pub cpu: fn(&Call<'_>, &mut Scratch) -> Result<(), Fault>,
}

#[cfg(not(target_arch = "nvptx64"))]
impl Spec {
    /// The spec numbered `task_type`.
    pub fn of(task_type: u16) -> Option<&'static Spec> {
        // The list is in the order of its numbers, which start at 1.
        let spec = SPECS.get(usize::from(task_type).checked_sub(1)?)?;
        (spec.task_type == task_type).then_some(spec)
    }

    /// Judges a task's parameters and operands.
    ///
    /// # Errors
    /// The first rule broken, naming the kernel and the operand.
    pub fn check(&self, words: &[u32; PARAM_WORDS], io: &[Operand]) -> Result<(), Violation> {
        if io.len() != self.slots.len() {
            return Err(format!("{}: {} operands given, expected {}", self.name, io.len(), self.slots.len()));
        }
        for (slot, operand) in self.slots.iter().zip(io) {
            if !slot.optional && !operand.is_present() {
                return Err(format!("{}: operand `{}` is absent, expected a tensor", self.name, slot.name));
            }
        }
        for (at, (slot, operand)) in self.slots.iter().zip(io).enumerate() {
            let may_be = self.flagged.contains(&at) && operand.dtype() == Some(perpetua_shared::DType::F32);
            if operand.is_flagged != 0 && !may_be {
                let what = "is flagged, which only some operands may be, of f32";
                return Err(format!("{}: operand `{}` {what}", self.name, slot.name));
            }
        }
        (self.check)(words, io).map_err(|violation| format!("{}: {violation}", self.name))
    }
}

/// Declares a macro kernel's operands, in order, each with its use (a constructor of [`Slot`]) and what reports call
/// it: as `slot::ALL`, and the number of each by its name, `slot::X`.
macro_rules! slots {
    ($($name:ident: $usage:ident $text:literal),+ $(,)?) => {
        /// Numbers of the operands.
        pub mod slot {
            use crate::kernels::Slot;

            #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
            enum Number { $($name),+ }
            $(
                #[doc = concat!("Of `", $text, "`.")]
                pub const $name: usize = Number::$name as usize;
            )+
            pub(super) const ALL: &[Slot] = &[$(Slot::$usage($text)),+];
        }
    };
}

macro_rules! kernels {
    ($($number:literal => $module:ident::$kernel:ident),* $(,)?) => {
        $(pub mod $module;
        pub use $module::$kernel;
        impl Numbered for $kernel {
            const TASK_TYPE: u16 = $number;
        }
        #[cfg(all(target_arch = "nvptx64", feature = "kernels"))]
        const _: () = {
            /// # Safety
            /// As [`alone`](crate::entry::alone).
            #[unsafe(export_name = concat!("perpetua_kernel_", stringify!($module)))]
            unsafe extern "ptx-kernel" fn alone(_: perpetua_shared::launch::LaunchParams, task: u32) {
                // SAFETY: the caller's promise.
                unsafe { crate::entry::alone::<$kernel>(crate::entry::LaunchBlock::of_entry(), task) }
            }
        };)*

        /// Every macro kernel, by number.
        #[cfg(not(target_arch = "nvptx64"))]
        pub static SPECS: &[Spec] = &[$(Spec {
            task_type: $number,
            name: $kernel::NAME,
            slots: $kernel::SLOTS,
            tiled: $kernel::TILED,
            early_reads: $kernel::EARLY_READS,
            flagged: $kernel::FLAGGED,
            tolerance: $kernel::TOLERANCE,
            check: |words, io| $kernel::check(&params(words), io),
            beside_tiles: |words, io| $kernel::beside_tiles(&params(words), io),
            cost: |words, io| $kernel::cost(&params(words), io),
            reference: |call| $kernel::reference(&params(&call.task.params), call),
            cpu: |call, scratch| $kernel::cpu(&params(&call.task.params), call, scratch),
        }),*];

        /// Operands of the kernel that has the most.
        pub const MAX_SLOTS: usize = {
            let (mut most, all) = (0, [$($kernel::SLOTS.len()),*]);
            let mut at = 0;
            while at < all.len() {
                most = if all[at] > most { all[at] } else { most };
                at += 1;
            }
            most
        };

        /// Runs a task's GPU body.
        ///
        /// # Safety
        /// As [`MacroKernel::gpu`].
        pub unsafe fn run_gpu(
            call: &gpu::Call<'_>,
            block: &Block,
            ready: impl Fn() -> Result<(), Fault>,
        ) -> Result<(), Fault> {
            const EARLY: u32 = 0 $(| ($kernel::EARLY as u32) << $number)*;
            // On the host one kind of closure, so that there is one copy of the bodies, not one for each caller.
            #[cfg(not(target_arch = "nvptx64"))]
            let ready: &dyn Fn() -> Result<(), Fault> = &ready;
            let kind = call.task_type();
            // SAFETY: the caller's promise; of kernels that are not early the waits have been met.
            unsafe {
                let product = gpu::thin::Product::of(call);
                // Most bodies wait here, in one place; the others have it in them. One question: each is waited for.
                let is_early = product.is_some() | (EARLY >> (kind % 32) & 1 != 0);
                if !(is_early & call.uses(Technique::EarlyStart)) {
                    ready()?;
                }
                if let Some(product) = product {
                    return product.run(call, block, ready);
                }
                memory::forget();
                match kind {
                    $($number => gpu_body::<$kernel>(call, block, ready),)*
                    other => Err(call.fault(FaultCode::NoSuchKernel, u32::from(other), 0, 0)),
                }
            }
        }

        /// Numbers are used once: a duplicate is an unreachable-pattern error here.
        #[deny(unreachable_patterns)]
        const _: fn(u16) -> bool = |number| match number {
            $($number => true,)*
            _ => false,
        };
    };
}

/// The GPU body of a task of kernel `K`.
///
/// # Safety
/// As [`MacroKernel::gpu_early`].
unsafe fn gpu_body<K: MacroKernel>(
    call: &gpu::Call<'_>,
    block: &Block,
    ready: impl Fn() -> Result<(), Fault>,
) -> Result<(), Fault> {
    let params = params(&call.params());
    // SAFETY: the caller's promise.
    unsafe { if K::EARLY { K::gpu_early(&params, call, block, ready) } else { K::gpu(&params, call, block) } }
}

// Numbers are part of the image format: append, never reuse (reuse is a compile error).
kernels! {
    1 => embedding::Embedding,
    2 => rms_norm::RmsNorm,
    3 => linear::Linear,
    4 => gated_linear::GatedLinear,
    5 => rope::Rope,
    6 => attention::Attention,
    7 => layer_norm::LayerNorm,
    8 => elementwise::Elementwise,
    9 => select_row::SelectRow,
    10 => argmax::ArgmaxPartial,
    11 => sample::Sample,
    12 => advance::Advance,
    13 => pool::Pool,
    14 => attention_merge::AttentionMerge,
    15 => decode_attention::DecodeAttention,
    16 => experts_up::ExpertsUp,
    17 => experts_down::ExpertsDown,
    18 => expert_routes::ExpertRoutes,
    19 => routed_linear::RoutedLinear,
    20 => slot_sum::SlotSum,
    21 => causal_conv::CausalConv,
    22 => recurrence::Recurrence,
    23 => gated::Gated,
}

pub mod routing;

#[cfg(not(target_arch = "nvptx64"))]
pub(crate) mod rules {
    //! The phrases every `check` is made of.
    use super::Violation;
    use perpetua_shared::DType;
    use perpetua_shared::task::Operand;

    pub(crate) const FLOATS: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

    /// A matrix `[n, k]` of weights, in floats or in fewer bits with whole rows.
    pub(crate) fn weights(name: &str, operand: &Operand) -> Result<(), Violation> {
        rank(name, operand, 2)?;
        unit_stride(name, operand)?;
        let Some(lines) = operand.lines() else { return dtype(name, operand, &FLOATS) };
        let row = lines.row_bytes(operand.extent[1] as usize);
        if operand.stride_elems[0] as usize != row || !operand.offset_bytes.is_multiple_of(64) {
            let (stride, offset) = (operand.stride_elems[0], operand.offset_bytes);
            return Err(format!(
                "`{name}` has rows of {stride} bytes from byte {offset}, expected {row} from a multiple of 64"
            ));
        }
        Ok(())
    }

    pub(crate) fn dtype(name: &str, operand: &Operand, allowed: &[DType]) -> Result<(), Violation> {
        match operand.dtype() {
            Some(dtype) if allowed.contains(&dtype) => Ok(()),
            Some(dtype) => Err(format!("`{name}` is {dtype}, expected one of {allowed:?}")),
            None => Ok(()),
        }
    }

    pub(crate) fn extent(name: &str, operand: &Operand, dim: usize, expected: u32) -> Result<(), Violation> {
        if !operand.is_present() || operand.extent[dim] == expected {
            return Ok(());
        }
        Err(format!("`{name}` has {} elements along dimension {dim}, expected {expected}", operand.extent[dim]))
    }

    /// A flagged row is read into shared memory or, of whole units and by weights of bf16 or in fewer bits, into
    /// registers, all of it: it has at most `most` elements there.
    pub(crate) fn flagged_row(name: &str, operand: &Operand, weights: &[&Operand], most: u32) -> Result<(), Violation> {
        let [rows, k, ..] = operand.extent;
        let are = |dtype: DType| weights.iter().all(|w| w.dtype() == Some(dtype));
        let is_whole_of = |dtype: DType, unit: u32| are(dtype) && k.is_multiple_of(unit);
        let is_four = is_whole_of(DType::Q4, 128) || is_whole_of(DType::Int4, 128);
        let is_whole = is_whole_of(DType::Bf16, 8) || is_whole_of(DType::Q8, 64) || is_four;
        let most = if is_whole { most } else { super::MAX_NORMED };
        if operand.is_flagged == 0 || rows == 1 && k <= most {
            return Ok(());
        }
        Err(format!("`{name}` is {rows} x {k} and flagged, expected one row of at most {most} then"))
    }

    /// Bodies of many rows know no flags.
    pub(crate) fn flagged_in(operands: &[(&str, &Operand)], rows: u32) -> Result<(), Violation> {
        match operands.iter().find(|(_, operand)| operand.is_flagged != 0 && rows != 1) {
            Some((name, _)) => Err(format!("`{name}` is flagged in a product of {rows} rows, expected one row then")),
            None => Ok(()),
        }
    }

    pub(crate) fn rank(name: &str, operand: &Operand, expected: u8) -> Result<(), Violation> {
        if !operand.is_present() || operand.rank == expected {
            return Ok(());
        }
        Err(format!("`{name}` has rank {}, expected {expected}", operand.rank))
    }

    /// What is made of `y` for a product after a norm, of which these are `weights` and `weighted`; operand `squares`
    /// has that name.
    pub(crate) fn weighted(
        y: &Operand,
        [weights, weighted]: [&Operand; 2],
        (name, squares): (&str, &Operand),
    ) -> Result<(), Violation> {
        let [rows, n, ..] = y.extent;
        if y.is_flagged != 0 {
            return Err("`y` is flagged, expected a plain one beside `weighted`".to_owned());
        }
        dtype("y", y, &[DType::F32])?;
        dtype(name, squares, &[DType::F32])?;
        for (name, operand, of_rank) in [("weights", weights, 1), ("weighted", weighted, 2), (name, squares, 2)] {
            dtype(name, operand, &FLOATS)?;
            rank(name, operand, of_rank)?;
            unit_stride(name, operand)?;
        }
        extent("weights", weights, 0, n)?;
        for (name, operand, columns) in [("weighted", weighted, n), (name, squares, 1)] {
            extent(name, operand, 0, rows)?;
            extent(name, operand, 1, columns)?;
        }
        Ok(())
    }

    /// `y` is one row, of as many elements as those of `x`.
    pub(crate) fn one_row_of(x: &Operand, y: &Operand) -> Result<(), Violation> {
        for (name, operand) in [("x", x), ("y", y)] {
            dtype(name, operand, &FLOATS)?;
            rank(name, operand, 2)?;
            unit_stride(name, operand)?;
            extent(name, operand, 1, x.extent[1])?;
        }
        extent("y", y, 0, 1)
    }

    /// What a product normalises `x` by: weights or, where these are in it already (`is_weighted`), sums of squares of
    /// its rows' parts.
    pub(crate) fn norm(norm: &Operand, x: &Operand, is_weighted: u32) -> Result<(), Violation> {
        if is_weighted != 0 {
            if !norm.is_present() {
                return Err("`norm` is absent, expected the sums of squares of a weighted `x`".to_owned());
            }
            dtype("norm", norm, &[DType::F32])?;
            rank("norm", norm, 2)?;
            unit_stride("norm", norm)?;
            return extent("norm", norm, 0, x.extent[0]);
        }
        if !norm.is_present() {
            return Ok(());
        }
        dtype("norm", norm, &FLOATS)?;
        rank("norm", norm, 1)?;
        unit_stride("norm", norm)?;
        extent("norm", norm, 0, x.extent[1])?;
        if x.extent[0] != 1 || x.extent[1] > super::MAX_NORMED {
            let [rows, k, ..] = x.extent;
            return Err(format!("`x` is {rows} x {k}, expected one row of at most {} to normalise", super::MAX_NORMED));
        }
        Ok(())
    }

    /// The last dimension is contiguous, so that bodies may take slices of it; of rows of lines, that they are one
    /// thing.
    pub(crate) fn unit_stride(name: &str, operand: &Operand) -> Result<(), Violation> {
        let last = usize::from(operand.rank.max(1)) - 1;
        let expected = u32::from(operand.lines().is_none());
        if !operand.is_present() || operand.extent[last] <= 1 || operand.stride_elems[last] == expected {
            return Ok(());
        }
        Err(format!("`{name}` has stride {} along its last dimension, expected {expected}", operand.stride_elems[last]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use perpetua_shared::DType;

    /// Of the largest operands there are, too, which nothing has refused yet.
    #[test]
    fn costs_stay_in_their_bits() {
        for dtype in DType::ALL {
            let largest = Operand {
                dtype: dtype as u16,
                rank: 4,
                extent: [u32::MAX; 4],
                stride_elems: [u32::MAX; 4],
                ..Operand::ABSENT
            };
            for (spec, words) in SPECS.iter().flat_map(|spec| [0, 1, u32::MAX].map(|word| (spec, [word; PARAM_WORDS])))
            {
                let cost = (spec.cost)(&words, &[largest; MAX_SLOTS][..spec.slots.len()]);
                assert!(cost.bytes_written > 0, "{}: {cost:?}", spec.name);
            }
        }
    }
}
