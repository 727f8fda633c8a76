//! What the GPU bodies share: tensors as a task's operands give them, arithmetic, and the device's
//! [`Sync`](crate::sync::Sync).
//!
//! A body runs on every thread of a block. Between its start and its end the block owns what the task writes; whatever
//! one thread writes and another reads inside a body stands on two sides of a barrier. The worker loop's own barriers
//! (before a trigger, after a wait) order one task with the next.

pub mod bodies;
pub(crate) mod flags;
pub(crate) mod fours;
pub(crate) mod math;
pub(crate) mod packed;
pub(crate) mod rows;
pub(crate) mod scheduler;
pub mod sync;
pub(crate) mod thin;
pub(crate) mod tile;
pub(crate) mod tiles;
pub(crate) mod turn;
pub(crate) mod warpgroup;
pub(crate) mod weighted;
pub(crate) mod wide;

#[cfg(test)]
mod conformance;

use crate::arch::{LaunchBlock, memory, param, scalar, thread};
use crate::kernels::linear::slot;
use core::hint::cold_path;
use packed::{Eight, Four, LookedUp, Packed};
use perpetua_shared::image::ProgramDesc;
use perpetua_shared::launch::Mail;
use perpetua_shared::limits::{MAX_RANK, PARAM_WORDS};
use perpetua_shared::{DType, Fault, FaultCode, TaskFlags, Technique};

/// A tensor region in device memory. Indices are not checked here: that a box lies inside its binding is a rule of the
/// image's check, that a body stays in the box is what its tests are for.
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    base: *mut u8,
    dtype: u16,
    is_flagged: bool,
    extent: [u32; MAX_RANK],
    stride: [u32; MAX_RANK],
}

impl Tensor {
    /// Operand `at` of the task whose [turn](turn) it is.
    #[track_caller]
    fn of_turn(at: usize) -> Tensor {
        let (address, [kind, e0, e1, e2, e3, s0, s1, s2, s3]) = turn::operand(at);
        Tensor {
            base: core::ptr::with_exposed_provenance_mut(address as usize),
            dtype: kind as u16,
            is_flagged: kind >> 24 != 0,
            extent: [e0, e1, e2, e3],
            stride: [s0, s1, s2, s3],
        }
    }

    /// Whether there is a tensor.
    pub fn is_present(&self) -> bool {
        self.dtype != 0
    }

    /// Whether its elements are [flagged](perpetua_shared::flag): f32, to be touched by [`Call::put`] and [`Call::get`]
    /// alone.
    pub(crate) fn is_flagged(&self) -> bool {
        self.is_flagged
    }

    /// Elements along dimension `dim`.
    pub fn extent(&self, dim: usize) -> u32 {
        self.extent[dim]
    }

    /// Elements between neighbours along dimension `dim`.
    pub(crate) fn stride(&self, dim: usize) -> u32 {
        self.stride[dim]
    }

    /// The [`DType`] number.
    pub(crate) fn dtype(&self) -> u16 {
        self.dtype
    }

    pub(crate) fn elem_bytes(&self) -> u64 {
        // Arithmetic, since a `match` would become a table in memory. Bodies meet no type of 1 or 8 bytes.
        const FOUR: u32 = 1 << DType::F32 as u32 | 1 << DType::I32 as u32 | 1 << DType::U32 as u32;
        2 << (FOUR >> self.dtype & 1)
    }

    /// The address of the element at `at`.
    pub fn address<const N: usize>(&self, at: [u32; N]) -> *mut u8 {
        self.base.wrapping_add((self.offset(at) * self.elem_bytes()) as usize)
    }

    /// What strides make of the indices `at`.
    fn offset<const N: usize>(&self, at: [u32; N]) -> u64 {
        let mut offset = 0;
        for dim in 0..N {
            debug_assert!(at[dim] < self.extent[dim], "index {} of dimension {dim}", at[dim]);
            offset += u64::from(at[dim]) * u64::from(self.stride[dim]);
        }
        offset
    }

    /// The element at `at` of a tensor of floats, widened to f32.
    ///
    /// # Safety
    /// Every index is below its extent.
    #[track_caller]
    pub unsafe fn get<const N: usize>(&self, at: [u32; N]) -> f32 {
        // SAFETY: the element is inside the box (caller).
        unsafe { load(self.dtype, self.address(at)) }
    }

    /// The element at `at` of a matrix of weights, of floats or in fewer bits.
    ///
    /// # Safety
    /// As [`Tensor::get`].
    #[track_caller]
    pub(crate) unsafe fn weight(&self, at: [u32; 2]) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            match self.dtype {
                Q8 => Eight::element_of(Q8, self.packed_row([at[0]]), at[1]),
                Q4 | MX4 | INT4 => Four::element_of(self.dtype, self.packed_row([at[0]]), at[1]),
                _ => self.get(at),
            }
        }
    }

    /// Where the row at the indices `at` of weights in fewer bits begins: strides between rows are bytes there.
    pub(crate) fn packed_row<const N: usize>(&self, at: [u32; N]) -> *const u8 {
        self.base.wrapping_add(self.offset(at) as usize)
    }

    /// [`row`](Tensor::row) of weights, of floats or in fewer bits.
    pub(crate) fn weight_row<const N: usize>(&self, at: [u32; N]) -> Row {
        let base = if self.is_packed() { self.packed_row(at).cast_mut() } else { self.address(at) };
        Row { base: memory::opaque(base), dtype: self.dtype }
    }

    /// Whether it is a matrix of weights in fewer bits.
    pub(crate) fn is_packed(&self) -> bool {
        Eight::is_of(self.dtype) || Four::is_of(self.dtype)
    }

    /// Sets the element at `at` of a tensor of floats, rounding to nearest even.
    ///
    /// # Safety
    /// As [`Tensor::get`], and the calling thread is the only one to touch the element now.
    #[track_caller]
    pub unsafe fn set<const N: usize>(&self, at: [u32; N], value: f32) {
        // SAFETY: the element is inside the box (caller).
        unsafe { store(self.dtype, self.address(at), value) }
    }

    /// The contiguous elements from index 0 of the last dimension on, at the other indices `at`.
    pub(crate) fn row<const N: usize>(&self, at: [u32; N]) -> Row {
        Row { base: memory::opaque(self.address(at)), dtype: self.dtype }
    }

    /// The element at `at` of a tensor of 32-bit words.
    ///
    /// # Safety
    /// As [`Tensor::get`].
    #[track_caller]
    pub unsafe fn get_word(&self, at: u32) -> u32 {
        // SAFETY: the word is inside the box (caller); volatile, since the host may own it.
        unsafe { memory::load_volatile(self.address([at]).cast::<u32>()) }
    }

    /// Sets the element at `at` of a tensor of 32-bit words.
    ///
    /// # Safety
    /// As [`Tensor::set`].
    #[track_caller]
    pub unsafe fn set_word(&self, at: u32, value: u32) {
        // SAFETY: the word is inside the box (caller).
        unsafe { memory::store_volatile(self.address([at]).cast::<u32>(), value) }
    }
}

/// Contiguous floats, or a row of weights in fewer bits: an address and a type, all that a loop over them needs to
/// hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    base: *mut u8,
    dtype: u16,
}

impl Row {
    /// The row of a tensor that is not there.
    pub(crate) const NONE: Row = Row { base: core::ptr::null_mut(), dtype: 0 };

    /// Element `i`, widened to f32.
    ///
    /// # Safety
    /// The row has that many elements.
    #[track_caller]
    pub(crate) unsafe fn get(&self, i: u32) -> f32 {
        // Each with a factor of its own, since a shift by a variable takes several instructions.
        // SAFETY: the element is there (caller).
        unsafe {
            match self.dtype {
                F32 => memory::load(self.base.wrapping_add(4 * i as usize).cast::<f32>()),
                other => load(other, self.base.wrapping_add(2 * i as usize)),
            }
        }
    }

    /// Element `i` of a row of weights, of floats or in fewer bits.
    ///
    /// # Safety
    /// As [`Row::get`].
    pub(crate) unsafe fn weight(&self, i: u32) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            match self.dtype {
                Q8 => Eight::element_of(Q8, self.base, i),
                Q4 | MX4 | INT4 => Four::element_of(self.dtype, self.base, i),
                _ => self.get(i),
            }
        }
    }

    /// Elements `at`, all of them asked for before the first is looked at: memory answers long after it is asked.
    ///
    /// # Safety
    /// As [`Row::get`].
    #[track_caller]
    pub(crate) unsafe fn gather<const N: usize>(&self, at: [u32; N]) -> [f32; N] {
        // SAFETY: the caller's promise.
        self.floats(unsafe { self.words(at) })
    }

    /// Elements `at` as they lie, a word for each, for [`floats`](Row::floats) to be made of.
    ///
    /// # Safety
    /// As [`Row::get`].
    #[track_caller]
    pub(crate) unsafe fn words<const N: usize>(&self, at: [u32; N]) -> [u32; N] {
        let mut words = [0; N];
        // SAFETY: the elements are there (caller).
        unsafe {
            if self.dtype == F32 {
                for i in 0..N {
                    words[i] = memory::load(self.base.wrapping_add(4 * at[i] as usize).cast::<u32>());
                }
            } else {
                for i in 0..N {
                    words[i] = memory::load(self.base.wrapping_add(2 * at[i] as usize).cast::<u16>()).into();
                }
            }
        }
        words
    }

    /// What [`words`](Row::words) are, widened to f32.
    pub(crate) fn floats<const N: usize>(&self, words: [u32; N]) -> [f32; N] {
        let mut values = [0.0; N];
        // One branch for all: with one for each, one would be waited for after the other.
        if self.dtype == F32 {
            for i in 0..N {
                values[i] = f32::from_bits(words[i]);
            }
        } else if self.dtype == BF16 {
            for i in 0..N {
                values[i] = f32::from_bits(words[i] << 16);
            }
        } else {
            cold_path();
            for i in 0..N {
                values[i] = scalar::f16_to_f32(words[i] as u16);
            }
        }
        values
    }

    /// Eight elements from each of `at`, multiples of eight, on, all of them asked for before the first is looked at;
    /// zero from `n` on, where the row ends.
    ///
    /// # Safety
    /// As [`Row::get`].
    #[track_caller]
    pub(crate) unsafe fn eights(&self, at: [u32; 4], n: u32) -> [[f32; 8]; 4] {
        use rows::{singles, widen_brain, widen_half};
        let there = |at: u32| if at < n { at } else { 0 };
        let [a, b, c, d] = [there(at[0]), there(at[1]), there(at[2]), there(at[3])];
        // SAFETY: the elements are there (caller), and whole eights on sixteen bytes.
        let [e, f, g, h] = unsafe {
            if !self.is_in_eights(n) {
                return [self.eight(at[0], n), self.eight(at[1], n), self.eight(at[2], n), self.eight(at[3], n)];
            }
            if self.dtype == F32 {
                let [e, f, g, h] = [self.load16(a), self.load16(b), self.load16(c), self.load16(d)];
                let [i, j, k, l] = [self.load16(a + 4), self.load16(b + 4), self.load16(c + 4), self.load16(d + 4)];
                [singles(e, i), singles(f, j), singles(g, k), singles(h, l)]
            } else {
                let [e, f, g, h] = [self.load16(a), self.load16(b), self.load16(c), self.load16(d)];
                if self.dtype == BF16 {
                    [widen_brain(e), widen_brain(f), widen_brain(g), widen_brain(h)]
                } else {
                    [widen_half(e), widen_half(f), widen_half(g), widen_half(h)]
                }
            }
        };
        let zero_from = |at: u32, eight: [f32; 8]| if at < n { eight } else { [0.0; 8] };
        [zero_from(at[0], e), zero_from(at[1], f), zero_from(at[2], g), zero_from(at[3], h)]
    }

    /// Eight elements from `at` on, one after the other; zero from `n` on.
    #[track_caller]
    unsafe fn eight(&self, at: u32, n: u32) -> [f32; 8] {
        // SAFETY: elements below `n` are there (caller).
        let one = |i: u32| if at + i < n { unsafe { self.get(at + i) } } else { 0.0 };
        [one(0), one(1), one(2), one(3), one(4), one(5), one(6), one(7)]
    }

    /// The four elements from `at`, a multiple of four, on; zero from `n` on, where the row ends.
    ///
    /// # Safety
    /// As [`Row::get`].
    #[track_caller]
    pub(crate) unsafe fn four(&self, at: u32, n: u32) -> [f32; 4] {
        let f = f32::from_bits;
        // SAFETY: elements below `n` are there (caller); on sixteen bytes, or eight.
        unsafe {
            if self.is_aligned(16) && at + 4 <= n {
                if self.dtype == F32 {
                    let [a, b, c, d] = self.load16(at);
                    return [f(a), f(b), f(c), f(d)];
                }
                let four = memory::load(self.at(at).cast::<u64>());
                let (low, high) = (four as u32, (four >> 32) as u32);
                if self.dtype == BF16 {
                    return [f(low << 16), f(low & 0xffff_0000), f(high << 16), f(high & 0xffff_0000)];
                }
                let half = |word: u32| scalar::f16_to_f32(word as u16);
                return [half(low), half(low >> 16), half(high), half(high >> 16)];
            }
            let one = |i: u32| if at + i < n { self.get(at + i) } else { 0.0 };
            [one(0), one(1), one(2), one(3)]
        }
    }

    /// Sets the four elements from `at`, a multiple of four, on, as far as they are below `n`, where the row ends.
    ///
    /// # Safety
    /// As [`set`](Row::set).
    #[track_caller]
    pub(crate) unsafe fn set_four_below(&self, at: u32, n: u32, four: [f32; 4]) {
        // SAFETY: the caller's promise.
        unsafe {
            if self.is_aligned(16) && at + 4 <= n {
                return self.set_four(at, four);
            }
            let one = |i: u32, value: f32| {
                if at + i < n {
                    self.set(at + i, value);
                }
            };
            one(0, four[0]);
            one(1, four[1]);
            one(2, four[2]);
            one(3, four[3]);
        }
    }

    /// Whether its `n` elements are whole eights that start on sixteen bytes.
    fn is_in_eights(&self, n: u32) -> bool {
        n.is_multiple_of(8) && self.is_aligned(16)
    }

    /// Sets the eight elements from `at`, a multiple of eight, on, as far as they are below `n`, where the row ends.
    ///
    /// # Safety
    /// As [`set`](Row::set).
    #[track_caller]
    pub(crate) unsafe fn set_eight(&self, at: u32, n: u32, eight: [f32; 8]) {
        let [a, b, c, d, e, f, g, h] = eight;
        // SAFETY: the caller's promise.
        unsafe {
            self.set_four_below(at, n, [a, b, c, d]);
            self.set_four_below(at + 4, n, [e, f, g, h]);
        }
    }

    /// Sets element `i`, rounding to nearest even.
    ///
    /// # Safety
    /// As [`Row::get`], and the calling thread is the only one to touch the element now.
    #[track_caller]
    pub(crate) unsafe fn set(&self, i: u32, value: f32) {
        // SAFETY: the element is there (caller).
        unsafe {
            match self.dtype {
                F32 => memory::store(self.base.wrapping_add(4 * i as usize).cast::<f32>(), value),
                other => store(other, self.base.wrapping_add(2 * i as usize), value),
            }
        }
    }

    /// Sets elements `i` and `i` + 1, `i` even, as [`set`](Row::set) does.
    ///
    /// # Safety
    /// As [`set`](Row::set), and the row starts on eight bytes.
    #[track_caller]
    pub(crate) unsafe fn set_two(&self, i: u32, [one, other]: [f32; 2]) {
        // SAFETY: the elements are there (caller), on eight bytes or four.
        unsafe {
            if self.dtype == F32 {
                memory::store(self.at(i).cast(), u64::from(one.to_bits()) | u64::from(other.to_bits()) << 32);
            } else if self.dtype == BF16 {
                memory::store(self.at(i).cast(), scalar::f32_to_bf16_pair(one, other));
            } else {
                cold_path();
                let [one, other] = [one, other].map(|value| u32::from(scalar::f32_to_f16(value)));
                memory::store(self.at(i).cast(), one | other << 16);
            }
        }
    }

    /// Sets the four elements from `i`, a multiple of four, on, as [`set`](Row::set) does.
    ///
    /// # Safety
    /// As [`set`](Row::set), and the row starts on sixteen bytes.
    #[track_caller]
    pub(crate) unsafe fn set_four(&self, i: u32, four: [f32; 4]) {
        let both = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let to = self.at(i).cast::<u64>();
        // SAFETY: the elements are there (caller), on eight bytes.
        unsafe {
            if self.dtype == F32 {
                let [a, b, c, d] = four.map(f32::to_bits);
                memory::store(to, both(a, b));
                memory::store(to.wrapping_add(1), both(c, d));
            } else if self.dtype == BF16 {
                let pair = scalar::f32_to_bf16_pair;
                memory::store(to, both(pair(four[0], four[1]), pair(four[2], four[3])));
            } else {
                cold_path();
                let pair = |a, b| u32::from(scalar::f32_to_f16(a)) | u32::from(scalar::f32_to_f16(b)) << 16;
                memory::store(to, both(pair(four[0], four[1]), pair(four[2], four[3])));
            }
        }
    }

    /// The row that starts `elems` elements later.
    pub(crate) fn after(&self, elems: u64) -> Row {
        Row { base: self.base.wrapping_add(elems as usize * if self.dtype == F32 { 4 } else { 2 }), dtype: self.dtype }
    }

    /// Whether there is one.
    pub(crate) fn is_present(&self) -> bool {
        self.dtype != 0
    }

    /// Whether its elements are of type `dtype`.
    pub(crate) fn is(&self, dtype: u16) -> bool {
        self.dtype == dtype
    }

    /// Whether it starts on a multiple of `bytes`.
    pub(crate) fn is_aligned(&self, bytes: usize) -> bool {
        self.base.addr().is_multiple_of(bytes)
    }

    /// Sixteen bytes from element `i` on.
    ///
    /// # Safety
    /// They are the row's, and start on a multiple of 16.
    #[track_caller]
    pub(crate) unsafe fn load16(&self, i: u32) -> [u32; 4] {
        // SAFETY: the caller's promise.
        unsafe { memory::load16(self.at(i)) }
    }

    /// Where it begins.
    pub(crate) fn start(&self) -> *const u8 {
        self.base
    }

    /// Where element `i`, a float, lies.
    pub(crate) fn at(&self, i: u32) -> *mut u8 {
        self.base.wrapping_add(i as usize * if self.dtype == F32 { 4 } else { 2 })
    }
}

pub(crate) const F32: u16 = DType::F32 as u16;
pub(crate) const BF16: u16 = DType::Bf16 as u16;
const F16: u16 = DType::F16 as u16;
pub(crate) const Q8: u16 = DType::Q8 as u16;
pub(crate) const Q4: u16 = DType::Q4 as u16;
pub(crate) const MX4: u16 = DType::Mx4 as u16;
pub(crate) const INT4: u16 = DType::Int4 as u16;

// Where `Tensor::of_turn` finds it.
const _: () = assert!(core::mem::offset_of!(perpetua_shared::Operand, is_flagged) == 15);

/// The float of type `dtype` at `from`, as f32.
#[track_caller]
unsafe fn load(dtype: u16, from: *const u8) -> f32 {
    // SAFETY: the caller promises an aligned element of that type.
    unsafe {
        match dtype {
            F32 => memory::load(from.cast::<f32>()),
            BF16 => f32::from_bits(u32::from(memory::load(from.cast::<u16>())) << 16),
            _ => {
                cold_path();
                scalar::f16_to_f32(memory::load(from.cast::<u16>()))
            }
        }
    }
}

/// Writes `value` at `to` as a float of type `dtype`.
#[track_caller]
unsafe fn store(dtype: u16, to: *mut u8, value: f32) {
    // SAFETY: the caller promises an aligned element of that type.
    unsafe {
        match dtype {
            F32 => memory::store(to.cast::<f32>(), value),
            BF16 => memory::store(to.cast::<u16>(), scalar::f32_to_bf16(value)),
            _ => {
                cold_path();
                memory::store(to.cast::<u16>(), scalar::f32_to_f16(value));
            }
        }
    }
}

/// A call of the macro kernel of the task whose [turn](turn) it is.
#[derive(Debug)]
pub struct Call<'a> {
    /// See [`Step`](perpetua_shared::Step).
    pub(crate) program_runs: u32,
    /// The image's programs, for the kernel that chooses the next one.
    pub programs: &'a [ProgramDesc],
    /// The worker's tiles, where a loader brings some.
    pub(crate) tiles: Option<&'a tiles::Tiles<'a>>,
    /// The launch, where there is one that has a host to talk to.
    pub(crate) launch: Option<LaunchBlock>,
}

impl Call<'_> {
    /// Operand `i`, in the order the kernel's file gives.
    ///
    /// # Safety
    /// The kernel has that many operands (the image's check counted them), and uses this one as its slot says: while
    /// the tensor is in use nobody else writes what it reads or touches what it writes.
    #[track_caller]
    pub unsafe fn tensor(&self, i: usize) -> Tensor {
        Tensor::of_turn(i)
    }

    /// Whether `N` matrices of weights, from operand `w` on, are of type `dtype`, all of them: a checkpoint may have
    /// two that are taken side by side in two types.
    ///
    /// # Safety
    /// The kernel has that many operands.
    pub(crate) unsafe fn are_all<const N: usize>(&self, dtype: u16) -> bool {
        let mut are = true;
        // A range without its end is other code in `gated_linear`.
        for operand in slot::W..=slot::W + N - 1 {
            // SAFETY: the caller's promise.
            are &= unsafe { self.tensor(operand) }.dtype() == dtype;
        }
        are
    }

    /// Whether the launch does not leave `technique` out.
    pub(crate) fn uses(&self, technique: Technique) -> bool {
        self.launch.is_none_or(|launch| !param!(launch, without).has(technique))
    }

    /// The code of the launch's fault, 0 where there is none: what the pass has made after one may be of rows that
    /// somebody has waited for in vain.
    pub(crate) fn fault_code(&self) -> u32 {
        self.tiles.map_or(0, |tiles| tiles.sync().fault_code())
    }

    /// Tells the host by entry `at` of the mailbox that the pass has ended, how many tokens are in the cache, and which
    /// token it has made there.
    ///
    /// # Safety
    /// The pass's last task calls it, on one thread, and for an entry once a launch.
    pub(crate) unsafe fn tell(&self, at: u32, in_cache: u32, token: Option<u32>) {
        let Some(launch) = self.launch else { return };
        if at >= param!(launch, n_mail) {
            return;
        }
        let mail = core::ptr::with_exposed_provenance_mut::<Mail>(param!(launch, mailbox) as usize);
        // SAFETY: the entry is in the mailbox (the launch's promise), and this call's alone (the caller's).
        unsafe {
            let mail = mail.add(at as usize);
            memory::store_volatile(&raw mut (*mail).stamp_ns, thread::timer_ns());
            memory::store_volatile(&raw mut (*mail).word, Mail::word_of(in_cache, token));
        }
    }

    /// [`Step::first_pos`](perpetua_shared::Step::first_pos), as the task sees it.
    #[track_caller]
    pub fn first_pos(&self) -> u32 {
        turn::seen().first_pos
    }

    /// [`Step::rows`](perpetua_shared::Step::rows), as the task sees it.
    #[track_caller]
    pub fn pass_rows(&self) -> u32 {
        turn::seen().rows
    }

    /// The sequence that the task belongs to; of the pass otherwise.
    #[track_caller]
    pub(crate) fn sequence(&self) -> u32 {
        turn::seen().sequence
    }

    /// Records a fault of the task, unless another is recorded already, and tells every worker to leave; what the body
    /// returns then.
    pub(crate) fn fault(&self, code: FaultCode, detail: u32, found: u32, expected: u32) -> Fault {
        let fault = Fault::new(code, detail, found, expected);
        if let Some(tiles) = self.tiles {
            // The record says where the task stands; the block is the worker.
            tiles.sync().report(&Fault { task: turn::task(), worker: thread::block_idx(), ..fault });
        }
        // On a GPU nobody else is told which, for the reason that `Sync::wait` gives; tests are.
        if cfg!(target_arch = "nvptx64") { Fault::RECORDED } else { fault }
    }

    /// The macro kernel's number.
    #[track_caller]
    pub fn task_type(&self) -> u16 {
        turn::task_type()
    }

    /// Whether what its kernel may read before its events have fired is weights: see [`TaskFlags::READS_EARLY`].
    pub(crate) fn reads_early(&self) -> bool {
        turn::flags() & TaskFlags::READS_EARLY != 0
    }

    /// The macro kernel's parameters, as words.
    #[track_caller]
    pub fn params(&self) -> [u32; PARAM_WORDS] {
        turn::params()
    }

    /// The task's index along axis `AXIS` of its operator's grid.
    #[track_caller]
    pub fn block<const AXIS: usize>(&self) -> u32 {
        turn::block::<AXIS>()
    }

    /// The task's first row in the pass.
    #[track_caller]
    pub fn row_first(&self) -> u32 {
        turn::row_first()
    }

    /// How many of `tensor`'s rows (dimension 0) this pass computes.
    #[track_caller]
    pub fn rows(&self, tensor: &Tensor) -> u32 {
        let left = turn::seen().rows.saturating_sub(turn::row_first());
        if left < tensor.extent(0) { left } else { tensor.extent(0) }
    }
}
