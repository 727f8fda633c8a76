//! The instructions device code uses, and nothing else knows which they are.
//!
//! The modules carry the names and shapes of `cuda_std`'s (`thread`, `warp`, `shared`, `atomic`), so that code and people
//! move over easily. Two back ends stand behind them: `ptx`, which is LLVM intrinsics where an instruction is convergent
//! and inline assembly elsewhere, and, on the host, `simt`, a GPU that checks: every thread a coroutine, every access
//! judged. Whatever touches memory goes through here, so that it can.
//!
//! Convergent calls ([`thread::sync`], [`thread::sync_or`], the shuffles) must be reached by every thread
//! of the block, respectively of the warp, the same number of times.

#[cfg(target_arch = "nvptx64")]
mod ptx;
#[cfg(target_arch = "nvptx64")]
use ptx as backend;

#[cfg(not(target_arch = "nvptx64"))]
pub mod simt;
#[cfg(not(target_arch = "nvptx64"))]
use simt as backend;

/// Lanes of a warp.
pub(crate) const WARP: u32 = 32;

/// The five steps of a butterfly over a warp, written out: a loop around a convergent call is never unrolled.
macro_rules! butterfly {
    ($mask:ident => $step:expr) => {
        $crate::arch::butterfly!(@ $mask $step; 16 8 4 2 1)
    };
    (@ $mask:ident $step:expr; $($value:literal)*) => {
        $({
            let $mask = $value;
            $step
        })*
    };
}
pub(crate) use butterfly;

/// Which thread this is, and the block's barrier.
pub(crate) mod thread {
    use super::backend;

    /// The thread's index in its block.
    #[inline(always)]
    pub(crate) fn thread_idx() -> u32 {
        backend::thread_idx()
    }

    /// The block's index in the grid: the worker's number. Only the entry may ask; a body never does.
    #[inline(always)]
    pub(crate) fn block_idx() -> u32 {
        backend::block_idx()
    }

    /// Threads of the block, a multiple of 32.
    #[inline(always)]
    pub(crate) fn block_dim() -> u32 {
        backend::block_dim()
    }

    /// The block's barrier: what any of its threads wrote before is visible to all of them after.
    ///
    /// # Safety
    /// Every thread of the block makes this same call.
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn sync() {
        // SAFETY: the caller's promise.
        unsafe { backend::barrier() }
    }

    /// [`sync`], and whether any thread said `true`.
    ///
    /// # Safety
    /// As [`sync`].
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn sync_or(predicate: bool) -> bool {
        // SAFETY: the caller's promise.
        unsafe { backend::barrier_or(predicate) }
    }

    /// Nanoseconds of a clock all SMs share. Its step may be as coarse as a microsecond.
    #[inline(always)]
    pub(crate) fn timer_ns() -> u64 {
        backend::timer_ns()
    }

    /// Lets other warps run for about this long.
    #[inline(always)]
    pub(crate) fn sleep_ns(ns: u32) {
        backend::sleep_ns(ns);
    }

    /// Says which task the block turns to, for reports; costs nothing on a GPU.
    #[inline(always)]
    pub(crate) fn at_task(task: u32) {
        backend::at_task(task);
    }
}

/// What the 32 lanes of a warp do together.
pub(crate) mod warp {
    use super::backend;

    /// What the lane whose number differs in the bits of `mask` passes as `value`.
    ///
    /// # Safety
    /// Every lane of the warp makes this same call.
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn shuffle_xor(value: u32, mask: u32) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { backend::shuffle_xor(value, mask) }
    }

    /// What lane `lane` passes as `value`.
    ///
    /// # Safety
    /// As [`shuffle_xor`].
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn shuffle(value: u32, lane: u32) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { backend::shuffle(value, lane) }
    }

    /// The sum of the lanes' values, the same bits in every lane.
    ///
    /// # Safety
    /// As [`shuffle_xor`].
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn sum(mut value: f32) -> f32 {
        // SAFETY: the caller's promise; addition commutes, so both partners get the same bits.
        super::butterfly!(mask => value += f32::from_bits(unsafe { shuffle_xor(value.to_bits(), mask) }));
        value
    }

    /// The largest of the lanes' values, none of which is NaN.
    ///
    /// # Safety
    /// As [`shuffle_xor`].
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn max(mut value: f32) -> f32 {
        super::butterfly!(mask => {
            // SAFETY: the caller's promise.
            let other = f32::from_bits(unsafe { shuffle_xor(value.to_bits(), mask) });
            if other > value {
                value = other;
            }
        });
        value
    }
}

/// The block's shared memory: [`shared::WORDS`] words, for reductions and for handing a value to the whole block.
pub(crate) mod shared {
    use super::backend;

    /// How many words there are.
    pub(crate) const WORDS: u32 = 2048;

    /// Word `at`.
    ///
    /// # Safety
    /// `at < WORDS`; no other thread writes it between the barriers around this call.
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn load(at: u32) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { backend::shared_load(at) }
    }

    /// Sets word `at`.
    ///
    /// # Safety
    /// `at < WORDS`; no other thread touches it between the barriers around this call.
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn store(at: u32, value: u32) {
        // SAFETY: the caller's promise.
        unsafe { backend::shared_store(at, value) }
    }
}

/// Words several workers touch at once. `core`'s atomics lose their ordering on this target (rust-lang/rust#136480), so
/// these are the only ones.
pub(crate) mod atomic {
    use super::backend;

    /// Reads `word`, ordering nothing.
    ///
    /// # Safety
    /// `word` points to an aligned word of global memory.
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn load_relaxed(word: *const u32) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { backend::load_relaxed(word) }
    }

    /// Reads `word`; what was written before the [`add_release`] it sees is visible afterwards.
    ///
    /// # Safety
    /// As [`load_relaxed`].
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn load_acquire(word: *const u32) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { backend::load_acquire(word) }
    }

    /// Adds to `word`, after everything this thread wrote or has seen by a barrier.
    ///
    /// # Safety
    /// As [`load_relaxed`].
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn add_release(word: *mut u32, value: u32) {
        // SAFETY: the caller's promise.
        unsafe { backend::add_release(word, value) }
    }

    /// Sets `word` to `new` if it is `old`; returns what it was.
    ///
    /// # Safety
    /// As [`load_relaxed`].
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn compare_exchange(word: *mut u32, old: u32, new: u32) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { backend::compare_exchange(word, old, new) }
    }

    /// Everything this thread wrote or has seen is visible to the host before what it writes from here on.
    #[inline(always)]
    pub(crate) fn fence_system() {
        backend::fence_system();
    }
}

/// Global memory. All loads are coherent ones (never `ld.global.nc`), so they may read what another worker wrote before an
/// event.
pub(crate) mod memory {
    use super::backend;

    /// Reads a value.
    ///
    /// # Safety
    /// `from` points to a `T`, aligned, that nobody writes meanwhile.
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn load<T: Copy>(from: *const T) -> T {
        // SAFETY: the caller's promise.
        unsafe { backend::load(from) }
    }

    /// Writes a value.
    ///
    /// # Safety
    /// `to` points to room for a `T`, aligned, that nobody else touches meanwhile.
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn store<T: Copy>(to: *mut T, value: T) {
        // SAFETY: the caller's promise.
        unsafe { backend::store(to, value) }
    }

    /// [`load`], never left out or kept: the host may own the value, or a register be too dear for it.
    ///
    /// # Safety
    /// As [`load`].
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn load_volatile<T: Copy>(from: *const T) -> T {
        // SAFETY: the caller's promise.
        unsafe { backend::load_volatile(from) }
    }

    /// [`store`], never left out.
    ///
    /// # Safety
    /// As [`store`].
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn store_volatile<T: Copy>(to: *mut T, value: T) {
        // SAFETY: the caller's promise.
        unsafe { backend::store_volatile(to, value) }
    }

    /// `len` values that nobody writes during the launch.
    ///
    /// # Safety
    /// They are there, aligned.
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn constant<'a, T>(start: *const T, len: usize) -> &'a [T] {
        // SAFETY: the caller's promise.
        unsafe { backend::constant(start, len) }
    }

    /// A value to work on in place.
    ///
    /// # Safety
    /// `at` points to a `T`, aligned, that no other thread touches while the reference is used.
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn exclusive<'a, T>(at: *mut T) -> &'a mut T {
        // SAFETY: the caller's promise.
        unsafe { backend::exclusive(at) }
    }

    /// Sixteen bytes that will be read again soon: activations.
    ///
    /// # Safety
    /// `from` points to 16 readable bytes of global memory, 16-byte aligned, that nobody writes meanwhile.
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn load16(from: *const u8) -> [u32; 4] {
        // SAFETY: the caller's promise.
        unsafe { backend::load16(from) }
    }

    /// The same pointer, of which the compiler knows nothing more: what is computed from it stays where it is written
    /// instead of being hoisted, for every branch not taken as well, into registers that a loop then lacks.
    #[inline(always)]
    pub(crate) fn opaque(pointer: *mut u8) -> *mut u8 {
        backend::opaque(pointer)
    }

    /// Sixteen bytes that are read once: weights, which would only push activations out of L1.
    ///
    /// # Safety
    /// As [`load16`].
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn load16_stream(from: *const u8) -> [u32; 4] {
        // SAFETY: the caller's promise.
        unsafe { backend::load16_stream(from) }
    }
}

/// One-instruction arithmetic that `core` does not have.
pub(crate) mod scalar {
    use super::backend;

    /// `a * b + c`, rounded once. The compiler fuses nothing by itself.
    #[inline(always)]
    pub(crate) fn fma(a: f32, b: f32, c: f32) -> f32 {
        backend::fma(a, b, c)
    }

    /// `a * b + c` in f64, rounded once.
    #[inline(always)]
    pub(crate) fn fma64(a: f64, b: f64, c: f64) -> f64 {
        backend::fma64(a, b, c)
    }

    /// 2^x to 2 ulp; below 2^-126 it is 0.
    #[inline(always)]
    pub(crate) fn exp2(x: f32) -> f32 {
        backend::exp2(x)
    }

    /// The square root, correctly rounded.
    #[inline(always)]
    pub(crate) fn sqrt(x: f32) -> f32 {
        backend::sqrt(x)
    }

    /// Widens IEEE binary16 bits.
    #[inline(always)]
    pub(crate) fn f16_to_f32(bits: u16) -> f32 {
        backend::f16_to_f32(bits)
    }

    /// Rounds to binary16 bits, to nearest even.
    #[inline(always)]
    pub(crate) fn f32_to_f16(x: f32) -> u16 {
        backend::f32_to_f16(x)
    }

    /// Rounds to bfloat16 bits, to nearest even.
    #[inline(always)]
    pub(crate) fn f32_to_bf16(x: f32) -> u16 {
        backend::f32_to_bf16(x)
    }
}

#[cfg(target_arch = "nvptx64")]
pub(crate) use ptx::trap;
