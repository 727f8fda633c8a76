//! The instructions device code uses, and nothing else knows which they are.
//!
//! The modules carry the names and shapes of `cuda_std`'s (`thread`, `warp`, `shared`, `atomic`), so that code and
//! people move over easily. Two back ends stand behind them: `ptx`, which is LLVM intrinsics where an instruction is
//! convergent and inline assembly elsewhere, and, on the host, `simt`, a GPU that checks: every thread a coroutine,
//! every access judged. Whatever touches memory goes through here, so that it can.
//!
//! Convergent calls ([`thread::sync`], [`thread::sync_or`], what [`warp`] does) must be reached by every thread that
//! meets at the block's barrier, respectively of the warp, the same number of times. The block's barrier is that of the
//! warps that run tasks; service warps beside them have mbarriers.

#![cfg_attr(not(target_arch = "nvptx64"), allow(dead_code, reason = "some is used by the PTX's probe entries alone"))]

#[cfg(target_arch = "nvptx64")]
mod ptx;
#[cfg(target_arch = "nvptx64")]
use ptx as backend;

#[cfg(not(target_arch = "nvptx64"))]
pub mod simt;
#[cfg(not(target_arch = "nvptx64"))]
use simt as backend;

pub use backend::LaunchBlock;

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

/// A step for each of 0 to 3, written out as [`butterfly`] is.
macro_rules! each_of_four {
    ($i:ident => $step:expr) => {
        $crate::arch::each_of_four!(@ $i $step; 0 1 2 3)
    };
    (@ $i:ident $step:expr; $($value:literal)*) => {
        $({
            let $i = $value;
            $step
        })*
    };
}
pub(crate) use each_of_four;

/// Field `$field` of the [`LaunchBlock`] `$launch`.
macro_rules! param {
    ($launch:expr, $field:ident) => {
        $launch
            .get::<{ core::mem::offset_of!(perpetua_shared::launch::LaunchParams, $field) }, _>(|params| params.$field)
    };
}
pub(crate) use param;

/// Which thread this is, and the block's barrier.
pub(crate) mod thread {
    use super::backend;

    /// The thread's index in its block.
    pub(crate) fn thread_idx() -> u32 {
        backend::thread_idx()
    }

    /// The block's index in the grid: the worker's number. Only the entry may ask; a body never does.
    pub(crate) fn block_idx() -> u32 {
        backend::block_idx()
    }

    /// Threads of the block, service warps included, a multiple of 32.
    pub(crate) fn block_dim() -> u32 {
        backend::block_dim()
    }

    /// Those of them that run tasks and meet at the block's barrier; the others are service warps, and come after them.
    pub(crate) fn task_threads() -> u32 {
        backend::task_threads()
    }

    /// The block's barrier: what any of its threads wrote before is visible to all of them after.
    ///
    /// # Safety
    /// Every thread of the block but those of service warps makes this same call.
    #[track_caller]
    pub(crate) unsafe fn sync() {
        // SAFETY: the caller's promise.
        unsafe { backend::barrier() }
    }

    /// [`sync`], and whether any thread said `true`.
    ///
    /// # Safety
    /// As [`sync`].
    #[track_caller]
    pub(crate) unsafe fn sync_or(predicate: bool) -> bool {
        // SAFETY: the caller's promise.
        unsafe { backend::barrier_or(predicate) }
    }

    /// A barrier of its own, `1..16`, for `threads` threads: whole warps, any of the block's.
    ///
    /// # Safety
    /// That many threads make this call with the same `id`, whole warps each.
    #[track_caller]
    pub(crate) unsafe fn sync_some(id: u32, threads: u32) {
        // SAFETY: the caller's promise.
        unsafe { backend::barrier_named(id, threads) }
    }

    /// Nanoseconds of a clock all SMs share. Its step may be as coarse as a microsecond.
    pub(crate) fn timer_ns() -> u64 {
        backend::timer_ns()
    }

    /// Lets other warps run for about this long.
    pub(crate) fn sleep_ns(ns: u32) {
        backend::sleep_ns(ns);
    }

    /// Says which task the block turns to, for reports; costs nothing on a GPU.
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
    #[track_caller]
    pub(crate) unsafe fn shuffle_xor(value: u32, mask: u32) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { backend::shuffle_xor(value, mask) }
    }

    /// What lane `lane` passes as `value`.
    ///
    /// # Safety
    /// As [`shuffle_xor`].
    #[track_caller]
    pub(crate) unsafe fn shuffle(value: u32, lane: u32) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { backend::shuffle(value, lane) }
    }

    /// The bits that any lane passes.
    ///
    /// # Safety
    /// As [`shuffle_xor`].
    #[track_caller]
    pub(crate) unsafe fn union(value: u32) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { backend::union(value) }
    }

    /// What any lane wrote before is visible to all of them after.
    ///
    /// # Safety
    /// As [`shuffle_xor`].
    #[track_caller]
    pub(crate) unsafe fn sync() {
        // SAFETY: the caller's promise.
        unsafe { backend::warp_sync() }
    }

    /// `a . b + c` on the tensor cores: a 16 x 16 and b 16 x 8 in bf16, c 16 x 8 in f32. With `g = lane / 4` and
    /// `t = lane % 4` a lane holds, low half of a register first,
    /// a: (row g, k 2t..), (g + 8, 2t..), (g, 2t + 8..), (g + 8, 2t + 8..); b: (k 2t.., column g), (2t + 8.., g);
    /// c: (row g, column 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
    ///
    /// # Safety
    /// As [`shuffle_xor`].
    #[track_caller]
    pub(crate) unsafe fn mma(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
        // SAFETY: the caller's promise.
        unsafe { backend::mma(a, b, c) }
    }

    /// [`mma`] of signed bytes, exact as long as it fits: a 16 x 32 and b 32 x 8, c 16 x 8 in 32 bits. A lane holds,
    /// the lowest byte of a register first, a: (row g, k 4t..), (g + 8, 4t..), (g, 4t + 16..), (g + 8, 4t + 16..); b:
    /// (k 4t.., column g), (4t + 16.., g); c as there.
    ///
    /// # Safety
    /// As [`shuffle_xor`].
    #[track_caller]
    pub(crate) unsafe fn mma_bytes(a: [u32; 4], b: [u32; 2], c: [i32; 4]) -> [i32; 4] {
        // SAFETY: the caller's promise.
        unsafe { backend::mma_bytes(a, b, c) }
    }

    /// Four 8 x 8 matrices of 16-bit elements from shared memory. Lanes `8i..8i + 8` give the words at which the rows
    /// of matrix `i` start; a lane gets of each matrix row `lane / 4`, elements `2 (lane % 4)` and the next.
    ///
    /// # Safety
    /// As [`shuffle_xor`]; each row is four words of [`shared`](super::shared), from a multiple of four on. On a GPU
    /// LLVM may copy this call, so no branch around it may part a warp.
    #[track_caller]
    pub(crate) unsafe fn ldmatrix(at: u32) -> [u32; 4] {
        // SAFETY: the caller's promise.
        unsafe { backend::ldmatrix(at) }
    }

    /// The sum of the lanes' values, the same bits in every lane.
    ///
    /// # Safety
    /// As [`shuffle_xor`].
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
    pub(crate) const WORDS: u32 = 4692;

    /// Whether shared memory lies where this code takes it to be: nothing else is done before that is known.
    pub(crate) fn is_in_place() -> bool {
        backend::shared_is_in_place()
    }

    /// Words from here on outlive a task; those below are a task's own.
    pub(crate) const KEPT: u32 = WORDS - 252;

    /// Word `at`.
    ///
    /// # Safety
    /// `at < WORDS`; no other thread writes it between the barriers around this call.
    #[track_caller]
    pub(crate) unsafe fn load(at: u32) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { backend::shared_load(at) }
    }

    /// Sets word `at`.
    ///
    /// # Safety
    /// `at < WORDS`; no other thread touches it between the barriers around this call.
    #[track_caller]
    pub(crate) unsafe fn store(at: u32, value: u32) {
        // SAFETY: the caller's promise.
        unsafe { backend::shared_store(at, value) }
    }

    /// Sets those bits of word `at`; which it had before. Of neighbouring threads that do so none is lost.
    ///
    /// # Safety
    /// `at < WORDS`; the word has been [stored](store), and other threads do nothing else with it between the barriers
    /// around this call.
    #[track_caller]
    pub(crate) unsafe fn or(at: u32, bits: u32) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { backend::shared_or(at, bits) }
    }

    /// `N` words from word `at` on that stay as they are while a task runs: of those that are not looked at none is
    /// loaded, and none twice.
    ///
    /// # Safety
    /// As [`load`].
    #[track_caller]
    pub(crate) unsafe fn constant<const N: usize>(at: u32) -> [u32; N] {
        // SAFETY: the caller's promise.
        unsafe { backend::shared_constant(at) }
    }

    /// Four words from word `at` on, a multiple of four.
    ///
    /// # Safety
    /// As [`load`].
    #[track_caller]
    pub(crate) unsafe fn load16(at: u32) -> [u32; 4] {
        // SAFETY: the caller's promise.
        unsafe { backend::shared_load16(at) }
    }

    /// Two words from word `at` on, a multiple of two.
    ///
    /// # Safety
    /// As [`load`].
    #[track_caller]
    pub(crate) unsafe fn load8(at: u32) -> [u32; 2] {
        // SAFETY: the caller's promise.
        unsafe { backend::shared_load8(at) }
    }

    /// Sets two words from word `at` on, a multiple of two.
    ///
    /// # Safety
    /// As [`store`].
    #[track_caller]
    pub(crate) unsafe fn store8(at: u32, value: [u32; 2]) {
        // SAFETY: the caller's promise.
        unsafe { backend::shared_store8(at, value) }
    }

    /// Sets four words from word `at` on, a multiple of four.
    ///
    /// # Safety
    /// As [`store`].
    #[track_caller]
    pub(crate) unsafe fn store16(at: u32, value: [u32; 4]) {
        // SAFETY: the caller's promise.
        unsafe { backend::shared_store16(at, value) }
    }
}

/// Barriers in shared memory that count arrivals and, for bulk copies, bytes. A phase ends when it lacks neither;
/// phases alternate in parity, from 0 on.
///
/// Whoever waits knows only the phase's parity. So a thread that waits on a barrier waits on every phase of it, in
/// order: then `parity = phase & 1` cannot mean another one.
pub(crate) mod mbarrier {
    use super::backend;

    /// How many a block has; they go by number.
    pub(crate) const COUNT: u32 = 72;

    /// Makes barrier `number` one of `count` arrivals a phase. Threads other than the caller may use it after a
    /// [`thread::sync`](super::thread::sync), copies after a [`fence`].
    ///
    /// # Safety
    /// `number < COUNT`; once in a launch.
    #[track_caller]
    pub(crate) unsafe fn init(number: u32, count: u32) {
        // SAFETY: the caller's promise.
        unsafe { backend::mbarrier_init(number, count) }
    }

    /// Lets bulk copies see what this thread has initialised.
    pub(crate) fn fence() {
        backend::mbarrier_fence();
    }

    /// Arrives; what this thread has read and written is ordered before whatever follows a wait for this phase.
    ///
    /// # Safety
    /// The barrier is initialised and the phase lacks an arrival.
    #[track_caller]
    pub(crate) unsafe fn arrive(number: u32) {
        // SAFETY: the caller's promise.
        unsafe { backend::mbarrier_arrive(number) }
    }

    /// [`arrive`], and makes the phase expect `bytes` from bulk copies: all that are begun for it, 2^20 - 1 at most.
    ///
    /// # Safety
    /// As [`arrive`].
    #[track_caller]
    pub(crate) unsafe fn arrive_expect(number: u32, bytes: u32) {
        // SAFETY: the caller's promise.
        unsafe { backend::mbarrier_arrive_expect(number, bytes) }
    }

    /// Whether the phase of parity `parity` has ended, after having waited for a while. Before any has, the one of
    /// parity 1 counts as ended.
    ///
    /// # Safety
    /// The barrier is initialised.
    #[track_caller]
    pub(crate) unsafe fn try_wait(number: u32, parity: u32) -> bool {
        // SAFETY: the caller's promise.
        unsafe { backend::mbarrier_try_wait(number, parity) }
    }

    /// [`try_wait`], without having waited.
    ///
    /// # Safety
    /// As [`try_wait`].
    #[track_caller]
    pub(crate) unsafe fn test_wait(number: u32, parity: u32) -> bool {
        // SAFETY: the caller's promise.
        unsafe { backend::mbarrier_test_wait(number, parity) }
    }
}

/// Copies that engines make beside the threads, and the shared memory they fill: the *tiles*, by byte, apart from
/// [`shared`]'s words.
pub(crate) mod bulk {
    use super::backend;

    /// Begins to copy `bytes` bytes from global memory to tile byte `to`, to be counted by `mbarrier`. They are read
    /// once, and so the first to leave L2, where they would push out the image, activations, keys and values.
    ///
    /// # Safety
    /// All three are multiples of 16; source and destination are there; the barrier expects the bytes in this phase.
    /// Who has read the destination has arrived at a barrier that this thread has waited on. Nobody writes the source
    /// until the copy has landed; what was written to it in this launch, this thread has acquired and
    /// [`fence_proxy`]'d.
    #[track_caller]
    pub(crate) unsafe fn copy(to: u32, from: *const u8, bytes: u32, mbarrier: u32) {
        // SAFETY: the caller's promise.
        unsafe { backend::bulk_copy(to, from, bytes, mbarrier) }
    }

    /// The most that is asked for at once: the instruction has sixteen bits for how many sixteen bytes it is, and ptxas
    /// cuts what is more.
    pub(crate) const MOST_PREFETCHED: u32 = 1 << 19;

    /// Asks for `bytes` bytes, at most [`MOST_PREFETCHED`], to be brought into L2.
    ///
    /// # Safety
    /// Both are multiples of 16; the bytes are there.
    #[track_caller]
    pub(crate) unsafe fn prefetch(from: *const u8, bytes: u32) {
        // SAFETY: the caller's promise.
        unsafe { backend::bulk_prefetch(from, bytes) }
    }

    /// What this thread knows of writes to global memory, the copies it begins from here on know too.
    pub(crate) fn fence_proxy() {
        backend::fence_proxy_async();
    }

    /// Sets sixteen bytes of the tiles, from byte `at` on, a multiple of 16.
    ///
    /// # Safety
    /// They are there, and nobody else touches them between the barriers around this call.
    #[track_caller]
    pub(crate) unsafe fn store16(at: u32, value: [u32; 4]) {
        // SAFETY: the caller's promise.
        unsafe { backend::tile_store16(at, value) }
    }

    /// Sixteen bytes of the tiles, from byte `at` on, a multiple of 16.
    ///
    /// # Safety
    /// A copy has filled them, and this thread has waited for the barrier that counted it; or another thread, met
    /// since.
    #[track_caller]
    pub(crate) unsafe fn load16(at: u32) -> [u32; 4] {
        // SAFETY: the caller's promise.
        unsafe { backend::tile_load16(at) }
    }

    /// Eight bytes, from a multiple of eight on.
    ///
    /// # Safety
    /// As [`load16`].
    #[track_caller]
    pub(crate) unsafe fn load8(at: u32) -> [u32; 2] {
        // SAFETY: the caller's promise.
        unsafe { backend::tile_load8(at) }
    }

    /// Four bytes, from a multiple of four on.
    ///
    /// # Safety
    /// As [`load16`].
    #[track_caller]
    pub(crate) unsafe fn load4(at: u32) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { backend::tile_load4(at) }
    }

    /// Two bytes, from a multiple of two on.
    ///
    /// # Safety
    /// As [`load16`].
    #[track_caller]
    pub(crate) unsafe fn load2(at: u32) -> u16 {
        // SAFETY: the caller's promise.
        unsafe { backend::tile_load2(at) }
    }
}

/// Copies of sixteen bytes that a thread begins by itself, from global memory into the tiles, and waits for by itself.
pub(crate) mod copy {
    use super::backend;

    /// Begins to copy sixteen bytes from `from` to tile byte `to`; with `!is_there` they become zero, and nothing is
    /// read.
    ///
    /// # Safety
    /// `to` is a multiple of 16 inside the tiles, which nobody else touches until this thread has waited and met them;
    /// `from` is one too, of readable global memory if `is_there`, which nobody writes until then.
    #[track_caller]
    pub(crate) unsafe fn sixteen(to: u32, from: *const u8, is_there: bool) {
        // SAFETY: the caller's promise.
        unsafe { backend::copy_sixteen(to, from, is_there) }
    }

    /// [`sixteen`] if `is_mine`, without a branch.
    ///
    /// # Safety
    /// As [`sixteen`], if `is_mine`.
    #[track_caller]
    pub(crate) unsafe fn sixteen_if(is_mine: bool, to: u32, from: *const u8, is_there: bool) {
        // SAFETY: the caller's promise.
        unsafe { backend::copy_sixteen_if(is_mine, to, from, is_there) }
    }

    /// What this thread has begun since it last said so is a group.
    pub(crate) fn commit() {
        backend::copy_commit();
    }

    /// Waits until at most `LEFT` of this thread's groups are under way, the youngest ones.
    #[track_caller]
    pub(crate) fn wait<const LEFT: u32>() {
        backend::copy_wait::<LEFT>();
    }

    /// What this thread, and its copies, waited for, have written to the tiles, the tensor cores see once it has met
    /// who starts them; so do bulk copies that overwrite it.
    pub(crate) fn fence_tiles() {
        backend::fence_tiles();
    }
}

/// What the four warps of a warpgroup, aligned by four, do together: products on the tensor cores, of matrices that lie
/// in the tiles, beside the threads.
///
/// A matrix there has 64 columns of bf16 at a time, 128 bytes, its rows one after the other from a multiple of 1024
/// bytes on; sixteen bytes `c` of row `r` stand at [`place`](warpgroup::place)`(r, c)`, so that eight rows' fall into
/// all banks (the 128-byte swizzle). [`begin`](warpgroup::begin), then products, then [`commit`](warpgroup::commit);
/// nobody writes the matrices before every warp has [`wait`](warpgroup::wait)ed.
pub(crate) mod warpgroup {
    use super::backend;

    /// Threads of a warpgroup.
    pub(crate) const THREADS: u32 = 128;

    /// Bytes that a row of a matrix in the tiles has, and what a matrix, and the first tile, starts at a multiple of.
    pub(crate) const ROW: u32 = 128;
    pub(crate) const ALIGN: u32 = 1024;

    /// Rows of a in one product. Of b there are twice as many as [`Sums`] a thread has: 16, 32, 64 or 128.
    pub(crate) const M: u32 = 64;

    /// Where sixteen bytes `chunk`, `0..8`, of row `row` stand, counted from the matrix's start.
    pub(crate) const fn place(row: u32, chunk: u32) -> u32 {
        row * ROW + (chunk ^ (row % 8)) * 16
    }

    /// A matrix as the tensor cores are told of it: the address in units of sixteen bytes, from bit 32 on the units
    /// from eight rows to the next, in bits 62 and 63 the swizzle, 1: of 128 bytes.
    #[derive(Clone, Copy, Debug)]
    pub(crate) struct Matrix(u64);

    impl Matrix {
        /// The one that starts at tile byte `at`.
        pub(crate) fn at(at: u32) -> Matrix {
            // Of the address 18 bits.
            let units = (backend::tile_address(at) as u64 / 16) & 0x3fff;
            Matrix(units | 1 << 16 | (8 * ROW as u64 / 16) << 32 | 1 << 62)
        }

        /// The same from column `16 * step` on, `0..4`.
        pub(crate) fn step(self, step: u32) -> Matrix {
            Matrix(self.0 + 2 * step as u64)
        }
    }

    /// A matrix of which a product takes rows where it takes columns of another: the transposed one, "MN-major". More
    /// than 64 of its columns lie in matrices one after the other.
    #[derive(Clone, Copy, Debug)]
    pub(crate) struct Transposed(u64);

    impl Transposed {
        /// The one that starts at tile byte `at`, if its next 64 columns start `apart` bytes later.
        pub(crate) fn at(at: u32, apart: u32) -> Transposed {
            // Units from 64 columns to the next stand where that of other matrices does not count.
            Transposed(Matrix::at(at).0 & !(0x3fff << 16) | u64::from(apart / 16) << 16)
        }

        /// The same from row `16 * step` on.
        pub(crate) fn step(self, step: u32) -> Transposed {
            Transposed(self.0 + u64::from(16 * ROW / 16 * step))
        }
    }

    /// Sums of products, `N` a thread and 64 x `2 N` a warpgroup, nobody's but the tensor cores' until they are taken.
    /// `N` is 8, 16, 32 or 64.
    #[derive(Debug)]
    pub(crate) struct Sums<const N: usize>([f32; N]);

    impl<const N: usize> Sums<N> {
        /// All zero.
        pub(crate) fn zero() -> Sums<N> {
            const { assert!(N == 8 || N == 16 || N == 32 || N == 64) };
            Sums([0.0; N])
        }

        /// Adds, in time, a . b^T over sixteen columns of both: 64 rows of `a`, `2 N` of `b`.
        ///
        /// # Safety
        /// Every thread of the warpgroup makes this same call, between [`begin`] and [`commit`]; the matrices are
        /// there: written by copies that are waited for, fenced ([`super::copy::fence_tiles`]) and met. On a GPU LLVM
        /// may copy this call, so no branch around it may part a warp.
        #[track_caller]
        pub(crate) unsafe fn add(&mut self, a: Matrix, b: Matrix) {
            // SAFETY: the caller's promise.
            unsafe { backend::wgmma(&mut self.0, a.0, b.0) }
        }

        /// Adds, in time, a . b over sixteen columns of `a`, 64 rows in registers, and as many rows of `b`, `2 N`
        /// columns. As in [`take`](Sums::take), of the sixteen a thread has two of four rows and eights of columns: of
        /// row g from column 2t on, of row g + 8, and the same from column 8 + 2t on. `N` is 32 or 64.
        ///
        /// # Safety
        /// As [`add`](Sums::add).
        #[track_caller]
        pub(crate) unsafe fn add_transposed(&mut self, a: [u32; 4], b: Transposed) {
            const { assert!(N == 32 || N == 64) };
            // SAFETY: the caller's promise.
            unsafe { backend::wgmma_transposed(&mut self.0, a, b.0) }
        }

        /// The sums, once all products are done. With `w` the warp in its group, `g = lane / 4` and `t = lane % 4`,
        /// number `i` stands at row `16w + g + 8 (i / 2 % 2)`, column `8 (i / 4) + 2t + i % 2`.
        ///
        /// # Safety
        /// As [`commit`]; nothing is uncommitted.
        #[track_caller]
        pub(crate) unsafe fn take(self) -> [f32; N] {
            // SAFETY: the caller's promise.
            unsafe { backend::wgmma_wait::<0>() }
            backend::wgmma_taken(self.0)
        }

        /// Sums that are `sums` before anything is added.
        pub(crate) fn of(sums: [f32; N]) -> Sums<N> {
            const { assert!(N == 8 || N == 16 || N == 32 || N == 64) };
            Sums(sums)
        }
    }

    /// Orders what the threads did to sums before the products that follow.
    ///
    /// # Safety
    /// As [`commit`].
    #[track_caller]
    pub(crate) unsafe fn begin() {
        // SAFETY: the caller's promise.
        unsafe { backend::wgmma_fence() }
    }

    /// The products since the last call are a group.
    ///
    /// # Safety
    /// Every thread of the warpgroup makes this same call.
    #[track_caller]
    pub(crate) unsafe fn commit() {
        // SAFETY: the caller's promise.
        unsafe { backend::wgmma_commit() }
    }

    /// Has what is computed before this call be issued before products are waited for after it: ptxas moves waits up
    /// past all that does not need what they wait for. A barrier of memory is the one thing that it moves neither past.
    pub(crate) fn before_waiting() {
        backend::wgmma_before_waiting();
    }

    /// Waits until at most `LEFT` groups are under way, the youngest ones.
    ///
    /// # Safety
    /// As [`commit`].
    #[track_caller]
    pub(crate) unsafe fn wait<const LEFT: u32>() {
        // SAFETY: the caller's promise.
        unsafe { backend::wgmma_wait::<LEFT>() }
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
    #[track_caller]
    pub(crate) unsafe fn load_relaxed(word: *const u32) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { backend::load_relaxed(word) }
    }

    /// Four words from `words` on, each as [`load_relaxed`] has it.
    ///
    /// # Safety
    /// They are words of global memory, aligned to sixteen bytes.
    #[track_caller]
    pub(crate) unsafe fn load16_relaxed(words: *const u32) -> [u32; 4] {
        // SAFETY: the caller's promise.
        unsafe { backend::load16_relaxed(words) }
    }

    /// Writes the four words from `words` on, each as [`store_relaxed`] does.
    ///
    /// # Safety
    /// As [`load16_relaxed`].
    #[track_caller]
    pub(crate) unsafe fn store16_relaxed(words: *mut u32, values: [u32; 4]) {
        // SAFETY: the caller's promise.
        unsafe { backend::store16_relaxed(words, values) }
    }

    /// What this thread has polled it has found: for a simulated GPU, which lets a thread that polls sleep until a word
    /// changes.
    pub(crate) fn settled() {
        backend::settled();
    }

    /// Writes `word`, ordering nothing.
    ///
    /// # Safety
    /// As [`load_relaxed`].
    #[track_caller]
    pub(crate) unsafe fn store_relaxed(word: *mut u32, value: u32) {
        // SAFETY: the caller's promise.
        unsafe { backend::store_relaxed(word, value) }
    }

    /// Reads `word`; what was written before the [`add_release`] it sees is visible afterwards.
    ///
    /// # Safety
    /// As [`load_relaxed`].
    #[track_caller]
    pub(crate) unsafe fn load_acquire(word: *const u32) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { backend::load_acquire(word) }
    }

    /// Adds to `word`, after everything this thread wrote or has seen by a barrier.
    ///
    /// # Safety
    /// As [`load_relaxed`].
    #[track_caller]
    pub(crate) unsafe fn add_release(word: *mut u32, value: u32) {
        // SAFETY: the caller's promise.
        unsafe { backend::add_release(word, value) }
    }

    /// Writes `word`, after everything this thread wrote or has seen by an acquire or a barrier.
    ///
    /// # Safety
    /// As [`load_relaxed`].
    #[track_caller]
    pub(crate) unsafe fn store_release(word: *mut u32, value: u32) {
        // SAFETY: the caller's promise.
        unsafe { backend::store_release(word, value) }
    }

    /// Adds to `word`, ordering nothing, and without waiting for what it was.
    ///
    /// # Safety
    /// As [`load_relaxed`].
    #[track_caller]
    pub(crate) unsafe fn add_relaxed(word: *mut u32, value: u32) {
        // SAFETY: the caller's promise.
        unsafe { backend::add_relaxed(word, value) }
    }

    /// Adds to `word`, ordering nothing; returns what it was.
    ///
    /// # Safety
    /// As [`load_relaxed`].
    #[track_caller]
    pub(crate) unsafe fn fetch_add(word: *mut u32, value: u32) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { backend::fetch_add(word, value) }
    }

    /// Adds to four numbers from `to` on, each by itself, ordering nothing.
    ///
    /// # Safety
    /// They are numbers of global memory, aligned to sixteen bytes, that nobody touches meanwhile but by adding.
    #[track_caller]
    pub(crate) unsafe fn add_four(to: *mut f32, four: [f32; 4]) {
        // SAFETY: the caller's promise.
        unsafe { backend::add_four(to, four) }
    }

    /// Sets `word` to `new` if it is `old`; returns what it was.
    ///
    /// # Safety
    /// As [`load_relaxed`].
    #[track_caller]
    pub(crate) unsafe fn compare_exchange(word: *mut u32, old: u32, new: u32) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { backend::compare_exchange(word, old, new) }
    }
}

/// Global memory. All loads are coherent ones (never `ld.global.nc`), so they may read what another worker wrote before
/// an event.
pub(crate) mod memory {
    use super::backend;

    /// Reads a value.
    ///
    /// # Safety
    /// `from` points to a `T`, aligned, that nobody writes meanwhile.
    #[track_caller]
    pub(crate) unsafe fn load<T: Copy>(from: *const T) -> T {
        // SAFETY: the caller's promise.
        unsafe { backend::load(from) }
    }

    /// Writes a value.
    ///
    /// # Safety
    /// `to` points to room for a `T`, aligned, that nobody else touches meanwhile.
    #[track_caller]
    pub(crate) unsafe fn store<T: Copy>(to: *mut T, value: T) {
        // SAFETY: the caller's promise.
        unsafe { backend::store(to, value) }
    }

    /// [`load`], never left out or kept: the host may own the value. It goes past L1, which others' writes do not
    /// reach.
    ///
    /// # Safety
    /// As [`load`].
    #[track_caller]
    pub(crate) unsafe fn load_volatile<T: Copy>(from: *const T) -> T {
        // SAFETY: the caller's promise.
        unsafe { backend::load_volatile(from) }
    }

    /// [`store`], never left out.
    ///
    /// # Safety
    /// As [`store`].
    #[track_caller]
    pub(crate) unsafe fn store_volatile<T: Copy>(to: *mut T, value: T) {
        // SAFETY: the caller's promise.
        unsafe { backend::store_volatile(to, value) }
    }

    /// `len` values that nobody writes during the launch.
    ///
    /// # Safety
    /// They are there, aligned.
    #[track_caller]
    pub(crate) unsafe fn constant<'a, T>(start: *const T, len: usize) -> &'a [T] {
        // SAFETY: the caller's promise.
        unsafe { backend::constant(start, len) }
    }

    /// A value to work on in place.
    ///
    /// # Safety
    /// `at` points to a `T`, aligned, that no other thread touches while the reference is used.
    #[track_caller]
    pub(crate) unsafe fn exclusive<'a, T>(at: *mut T) -> &'a mut T {
        // SAFETY: the caller's promise.
        unsafe { backend::exclusive(at) }
    }

    /// Sixteen bytes that will be read again soon: activations.
    ///
    /// # Safety
    /// `from` points to 16 readable bytes of global memory, 16-byte aligned, that nobody writes meanwhile.
    #[track_caller]
    pub(crate) unsafe fn load16(from: *const u8) -> [u32; 4] {
        // SAFETY: the caller's promise.
        unsafe { backend::load16(from) }
    }

    /// Sets sixteen bytes of global memory.
    ///
    /// # Safety
    /// `to` points to 16 bytes of global memory, 16-byte aligned, that nobody else touches meanwhile.
    #[track_caller]
    pub(crate) unsafe fn store16(to: *mut u8, words: [u32; 4]) {
        // SAFETY: the caller's promise.
        unsafe { backend::store16(to, words) }
    }

    /// The same pointer, of which the compiler knows nothing more: what is computed from it stays where it is written
    /// instead of being hoisted, for every branch not taken as well, into registers that a loop then lacks.
    pub(crate) fn opaque(pointer: *mut u8) -> *mut u8 {
        backend::opaque(pointer)
    }

    /// [`opaque`] for a number.
    pub(crate) fn opaque_word(word: u32) -> u32 {
        backend::opaque_word(word)
    }

    /// What has been read is read again: held from here on it would cost registers.
    pub(crate) fn forget() {
        backend::forget();
    }

    /// At the start of a loop's body: it stays a loop. What turns PTX into instructions unrolls others to ask for
    /// several rounds' operands at once, in registers that there may not be.
    pub(crate) fn rolled() {
        backend::rolled();
    }

    /// Sixteen bytes that are read once: weights, which would only push activations out of L1.
    ///
    /// # Safety
    /// As [`load16`].
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
    pub(crate) fn fma(a: f32, b: f32, c: f32) -> f32 {
        backend::fma(a, b, c)
    }

    /// `a * b + c` in f64, rounded once.
    pub(crate) fn fma64(a: f64, b: f64, c: f64) -> f64 {
        backend::fma64(a, b, c)
    }

    /// 2^x to 2 ulp; below 2^-126 it is 0.
    pub(crate) fn exp2(x: f32) -> f32 {
        backend::exp2(x)
    }

    /// 1 / sqrt(x) to 2 ulp; subnormal numbers count as zero.
    pub(crate) fn rsqrt(x: f32) -> f32 {
        backend::rsqrt(x)
    }

    /// 1 / x to 1 ulp; subnormal numbers, and results, count as zero. A correctly rounded one is ten instructions and a
    /// call.
    pub(crate) fn reciprocal(x: f32) -> f32 {
        backend::reciprocal(x)
    }

    /// The square root, correctly rounded.
    pub(crate) fn sqrt(x: f32) -> f32 {
        backend::sqrt(x)
    }

    /// Widens IEEE binary16 bits.
    pub(crate) fn f16_to_f32(bits: u16) -> f32 {
        backend::f16_to_f32(bits)
    }

    /// Rounds to binary16 bits, to nearest even.
    pub(crate) fn f32_to_f16(x: f32) -> u16 {
        backend::f32_to_f16(x)
    }

    /// Rounds to bfloat16 bits, to nearest even.
    pub(crate) fn f32_to_bf16(x: f32) -> u16 {
        backend::f32_to_bf16(x)
    }

    /// [`f32_to_bf16`] of two, the first in the low half.
    pub(crate) fn f32_to_bf16_pair(low: f32, high: f32) -> u32 {
        backend::f32_to_bf16_pair(low, high)
    }

    /// `c` and the products of the four signed bytes of `a` with those of `b`.
    pub(crate) fn dot_bytes(a: u32, b: u32, c: i32) -> i32 {
        backend::dot_bytes(a, b, c)
    }

    /// The lowest bytes of four words, and their second bytes, the first word's in the lowest place.
    pub(crate) fn low_bytes([a, b, c, d]: [u32; 4]) -> [u32; 2] {
        let (ab, cd) = (backend::low_bytes_in_turn(a, b), backend::low_bytes_in_turn(c, d));
        [low_halves(ab, cd), high_halves(ab, cd)]
    }

    /// Four of the eight bytes of `low` and `high`, numbered by the four bits each of `numbers`' low half; where the
    /// highest of these is set, what the byte's own highest bit is, eight times.
    pub(crate) fn permute(low: u32, high: u32, numbers: u32) -> u32 {
        backend::permute(low, high, numbers)
    }

    /// `word`, with byte `AT` of `from` in place of its second lowest.
    pub(crate) fn with_byte<const AT: u32>(word: u32, from: u32) -> u32 {
        backend::with_byte::<AT>(word, from)
    }

    /// The low halves of both words, the first's in the low half.
    pub(crate) fn low_halves(first: u32, second: u32) -> u32 {
        backend::low_halves(first, second)
    }

    /// The high halves, likewise.
    pub(crate) fn high_halves(first: u32, second: u32) -> u32 {
        backend::high_halves(first, second)
    }
}

/// Ends the grid with an error that the host sees at its next call.
pub(crate) fn trap() -> ! {
    backend::trap()
}
