//! The host's back end of [`arch`](super): a GPU that checks.
//!
//! Every GPU thread is a coroutine ([`world`]); every access to global and shared memory is judged ([`memory`]): inside
//! what the launch was given, aligned, not of poison, and ordered with all others by barriers, shuffles, releases and
//! acquires. So the device code that becomes PTX runs in `cargo test`, and what a GPU would let pass one time in a
//! thousand fails here every time, with the line, block, warp and lane.
//!
//! What it does not model: caches and the order in which plain stores become visible (programs that keep the rules
//! above cannot tell), the exact bits of `ex2.approx`, time. A fence orders nothing here: workers synchronise by
//! releases and acquires alone, and fences are for the host.

mod error;
mod memory;
mod world;

#[cfg(test)]
mod tests;

pub use error::{SimtError, Wrong};
pub use memory::{Access, Allocation};
pub use world::{Options, Report, launch, launch_beside};

use bytemuck::Pod;
use memory::{Touch, WordTouch};
use perpetua_shared::launch::LaunchParams;
use std::panic::Location;
use std::sync::atomic::{AtomicU32, Ordering};
use world::{Purpose, World, demand, suspend, with};

pub(super) fn thread_idx() -> u32 {
    with(|world| world.thread_idx())
}

pub(super) fn block_idx() -> u32 {
    with(|world| world.block_idx())
}

pub(super) fn block_dim() -> u32 {
    with(|world| world.block_dim())
}

pub(super) fn task_threads() -> u32 {
    with(|world| world.meeting_threads())
}

pub(super) fn at_task(task: u32) {
    with(|world| world.at_task(task));
}

#[track_caller]
fn meet(purpose: Purpose, vote: bool) {
    let at = Location::caller();
    if !demand(with(|world| world.barrier(0, world.meeting_threads(), purpose, vote, at))) {
        suspend();
    }
}

#[track_caller]
pub(super) unsafe fn barrier() {
    meet(Purpose::Barrier, false);
}

#[track_caller]
pub(super) unsafe fn barrier_or(predicate: bool) -> bool {
    meet(Purpose::Vote, predicate);
    // The next vote cannot end before this thread has come to it.
    with(|world| world.outcome())
}

#[track_caller]
pub(super) unsafe fn barrier_named(id: u32, threads: u32) {
    let at = Location::caller();
    if !demand(with(|world| world.barrier(id, threads, Purpose::Barrier, false, at))) {
        suspend();
    }
}

#[track_caller]
pub(super) unsafe fn warp_sync() {
    exchange(Purpose::WarpSync, 0, 0);
}

/// bf16 bits, the `high` half of a register, as f32.
fn half_of(register: u32, high: bool) -> f32 {
    f32::from_bits(if high { register & 0xffff_0000 } else { register << 16 })
}

/// d = a . b + c over the lanes' fragments, in the layout of `mma.m16n8k16`; k in ascending order, which the chip does
/// not promise.
fn multiply(lanes: &[[u32; 10]; 32]) -> [[u32; 4]; 32] {
    let a = |row: usize, k: usize| {
        let lane = (row % 8) * 4 + k % 8 / 2;
        half_of(lanes[lane][row / 8 + k / 8 * 2], k % 2 == 1)
    };
    let b = |k: usize, n: usize| half_of(lanes[n * 4 + k % 8 / 2][4 + k / 8], k % 2 == 1);
    core::array::from_fn(|lane| {
        core::array::from_fn(|i| {
            let (row, n) = (lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
            (0..16).fold(f32::from_bits(lanes[lane][6 + i]), |sum, k| a(row, k).mul_add(b(k, n), sum)).to_bits()
        })
    })
}

#[track_caller]
pub(super) unsafe fn mma(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
    let at = Location::caller();
    let c = c.map(f32::to_bits);
    let words = [a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]];
    if !demand(with(|world| world.collective(Purpose::Mma, words, multiply, at))) {
        suspend();
    }
    with(|world| world.made()).map(f32::from_bits)
}

/// [`multiply`] of bytes, in the layout of `mma.m16n8k32`.
fn multiply_bytes(lanes: &[[u32; 10]; 32]) -> [[u32; 4]; 32] {
    let byte_of = |register: u32, k: usize| i32::from((register >> (8 * (k % 4))) as i8);
    let a = |row: usize, k: usize| byte_of(lanes[(row % 8) * 4 + k % 16 / 4][row / 8 + k / 16 * 2], k);
    let b = |k: usize, n: usize| byte_of(lanes[n * 4 + k % 16 / 4][4 + k / 16], k);
    core::array::from_fn(|lane| {
        core::array::from_fn(|i| {
            let (row, n) = (lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
            (0..32).fold(lanes[lane][6 + i] as i32, |sum, k| sum.wrapping_add(a(row, k) * b(k, n))) as u32
        })
    })
}

#[track_caller]
pub(super) unsafe fn mma_bytes(a: [u32; 4], b: [u32; 2], c: [i32; 4]) -> [i32; 4] {
    let at = Location::caller();
    let c = c.map(|c| c as u32);
    let words = [a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]];
    if !demand(with(|world| world.collective(Purpose::MmaBytes, words, multiply_bytes, at))) {
        suspend();
    }
    with(|world| world.made()).map(|sum| sum as i32)
}

#[track_caller]
pub(super) unsafe fn ldmatrix(at: u32) -> [u32; 4] {
    let caller = Location::caller();
    // SAFETY: judged.
    let row = unsafe { shared_load16(at) };
    let words = [row[0], row[1], row[2], row[3], 0, 0, 0, 0, 0, 0];
    let spread = |lanes: &[[u32; 10]; 32]| {
        core::array::from_fn(|lane| core::array::from_fn(|i| lanes[8 * i + lane / 4][lane % 4]))
    };
    if !demand(with(|world| world.collective(Purpose::LdMatrix, words, spread, caller))) {
        suspend();
    }
    with(|world| world.made())
}

#[track_caller]
pub(super) unsafe fn mbarrier_init(number: u32, count: u32) {
    let at = Location::caller();
    demand(with(|world| world.mbarrier_init(number, count, at)));
}

pub(super) fn mbarrier_fence() {
    with(World::mbarrier_fence);
}

#[track_caller]
pub(super) unsafe fn mbarrier_arrive(number: u32) {
    let at = Location::caller();
    demand(with(|world| world.mbarrier_arrive(number, 0, at)));
}

#[track_caller]
pub(super) unsafe fn mbarrier_arrive_expect(number: u32, bytes: u32) {
    let at = Location::caller();
    demand(with(|world| world.mbarrier_arrive(number, bytes, at)));
}

#[track_caller]
pub(super) unsafe fn mbarrier_try_wait(number: u32, parity: u32) -> bool {
    let at = Location::caller();
    let over = demand(with(|world| world.mbarrier_try_wait(number, parity, at)));
    if !over {
        suspend();
        with(World::awake);
    }
    over
}

#[track_caller]
pub(super) unsafe fn mbarrier_test_wait(number: u32, parity: u32) -> bool {
    let at = Location::caller();
    demand(with(|world| world.mbarrier_test_wait(number, parity, at)))
}

#[track_caller]
pub(super) unsafe fn bulk_copy(to: u32, from: *const u8, bytes: u32, mbarrier: u32) {
    let at = Location::caller();
    demand(with(|world| world.copy(to, from.addr(), bytes, mbarrier, at)));
}

#[track_caller]
pub(super) unsafe fn bulk_prefetch(from: *const u8, bytes: u32) {
    let at = Location::caller();
    demand(with(|world| world.prefetch(from.addr(), bytes, at)));
}

pub(super) fn fence_proxy_async() {
    with(World::fence_proxy);
}

pub(super) fn shared_is_in_place() -> bool {
    true
}

/// Where the tiles start in a block's shared memory: behind the words and mbarriers, as on the chip.
const TILES: u32 = perpetua_shared::launch::BEFORE_TILES_BYTES;

pub(super) fn tile_address(at: u32) -> u32 {
    TILES + at
}

#[track_caller]
pub(super) unsafe fn copy_sixteen(to: u32, from: *const u8, is_there: bool) {
    let at = Location::caller();
    demand(with(|world| world.copy_sixteen(to, is_there.then(|| from.expose_provenance()), at)));
}

#[track_caller]
pub(super) unsafe fn copy_sixteen_if(is_mine: bool, to: u32, from: *const u8, is_there: bool) {
    if is_mine {
        // SAFETY: the caller's promise.
        unsafe { copy_sixteen(to, from, is_there) }
    }
}

pub(super) fn copy_commit() {
    with(World::copy_commit);
}

pub(super) fn copy_wait<const LEFT: u32>() {
    with(|world| world.copy_wait(LEFT));
}

pub(super) fn fence_tiles() {
    with(World::fence_tiles);
}

/// The tile byte at which column `column` (a multiple of eight, from the start of the sixteen that a product takes) of
/// row `row` of a matrix stands, as the tensor cores find it: PTX ISA, "matrix descriptor", for K-major matrices of the
/// 128-byte swizzle.
fn place(matrix: u64, row: u32, column: u32) -> Option<u32> {
    let field = |first: u32, bits: u32| (matrix >> first) as u32 & ((1 << bits) - 1);
    let (start, stride, offset, swizzle) = (16 * field(0, 14), 16 * field(32, 14), field(49, 3), field(62, 2));
    let address = start + row / 8 * stride + row % 8 * 128 + 2 * column;
    let address = address ^ (address >> 7 & 7) << 4;
    (swizzle == 1 && offset == 0).then(|| address.checked_sub(TILES)).flatten()
}

/// The lane's part of a 64 x `2 N` product of sixteen columns, k in ascending order, which the chip does not promise.
fn multiply_group<const N: usize>(sums: &mut [f32; N], a: u64, b: u64) {
    let row = |matrix: u64, row: u32| -> [f32; 16] {
        let half = |half: u32| with(|world| world.sixteen(place(matrix, row, 8 * half).expect("judged")));
        let halves = [half(0), half(1)];
        core::array::from_fn(|k| f32::from_bits(u32::from((halves[k / 8] >> (16 * (k % 8))) as u16) << 16))
    };
    let (thread, lane) = (thread_idx() % super::warpgroup::THREADS, thread_idx() % 32);
    let first = thread / 32 * 16 + lane / 4;
    let of_a = [row(a, first), row(a, first + 8)];
    for group in 0..N as u32 / 4 {
        let of_b = [0, 1].map(|i| row(b, 8 * group + lane % 4 * 2 + i));
        for i in 0..4 {
            let sum = &mut sums[4 * group as usize + i];
            *sum = of_a[i / 2].iter().zip(&of_b[i % 2]).fold(*sum, |sum, (a, b)| a.mul_add(*b, sum));
        }
    }
}

#[track_caller]
pub(super) unsafe fn wgmma<const N: usize>(sums: &mut [f32; N], a: u64, b: u64) {
    let at = Location::caller();
    let places = |first: u32| {
        let halves = |matrix, row| [0, 1].map(|half| place(matrix, row, 8 * half));
        let rows = (first..first + 16).map(|row| (a, row)).chain((0..2 * N as u32).map(|row| (b, row)));
        rows.flat_map(|(matrix, row)| halves(matrix, row)).collect()
    };
    if !demand(with(|world| world.product([a, b], places, at))) {
        suspend();
    }
    multiply_group(sums, a, b);
}

/// The tile byte at which columns `column`, a multiple of eight, and on of row `k` of a transposed matrix stand: PTX
/// ISA, "matrix descriptor", for MN-major matrices of the 128-byte swizzle.
fn place_transposed(matrix: u64, k: u32, column: u32) -> Option<u32> {
    let apart = 16 * ((matrix >> 16) as u32 & 0x3fff);
    Some(place(matrix, k, column % 64)? + column / 64 * apart)
}

/// Likewise of `a`, the warp's rows in registers, and a transposed matrix.
#[track_caller]
pub(super) unsafe fn wgmma_transposed<const N: usize>(sums: &mut [f32; N], a: [u32; 4], b: u64) {
    let at = Location::caller();
    let chunks = 2 * N as u32 / 8;
    let places = |_| (0..16 * chunks).map(|i| place_transposed(b, i / chunks, i % chunks * 8)).collect();
    if !demand(with(|world| world.product([0, b], places, at))) {
        suspend();
    }
    // Whose row it is has its other columns in neighbouring lanes.
    let t = thread_idx() % 4;
    let mut of_a = [[0.0; 16]; 2];
    for (n, word) in a.into_iter().enumerate() {
        for other in 0..4 {
            // SAFETY: every lane of the warp is here (caller).
            let bits = unsafe { shuffle(word, thread_idx() % 32 - t + other) };
            let column = 2 * other as usize + 8 * (n / 2);
            of_a[n % 2][column] = f32::from_bits(bits << 16);
            of_a[n % 2][column + 1] = f32::from_bits(bits & 0xffff_0000);
        }
    }
    for group in 0..chunks {
        let rows: [u128; 16] = core::array::from_fn(|k| {
            with(|world| world.sixteen(place_transposed(b, k as u32, 8 * group).expect("judged")))
        });
        for i in 0..4 {
            let column = 2 * t + i % 2;
            let sum = &mut sums[(4 * group + i) as usize];
            *sum = of_a[i as usize / 2].iter().zip(&rows).fold(*sum, |sum, (a, row)| {
                a.mul_add(f32::from_bits(u32::from((row >> (16 * column)) as u16) << 16), sum)
            });
        }
    }
}

#[track_caller]
fn products(purpose: Purpose, left: u32) {
    let at = Location::caller();
    if !demand(with(|world| world.products(purpose, left, at))) {
        suspend();
    }
}

#[track_caller]
pub(super) unsafe fn wgmma_fence() {
    products(Purpose::ProductsBegin, 0);
}

#[track_caller]
pub(super) unsafe fn wgmma_commit() {
    products(Purpose::ProductsCommit, 0);
}

#[track_caller]
pub(super) unsafe fn wgmma_wait<const LEFT: u32>() {
    products(Purpose::ProductsWait, LEFT);
}

pub(super) fn wgmma_before_waiting() {}

pub(super) fn wgmma_taken<const N: usize>(sums: [f32; N]) -> [f32; N] {
    sums
}

#[track_caller]
pub(super) unsafe fn tile_store16(at: u32, value: [u32; 4]) {
    let caller = Location::caller();
    let bytes = value.iter().rev().fold(0, |bytes, word| bytes << 32 | u128::from(*word));
    demand(with(|world| world.tile_store(at, bytes, caller)));
}

#[track_caller]
pub(super) unsafe fn tile_load16(at: u32) -> [u32; 4] {
    let caller = Location::caller();
    let value = demand(with(|world| world.tile(at, 16, caller)));
    core::array::from_fn(|i| (value >> (32 * i)) as u32)
}

#[track_caller]
pub(super) unsafe fn tile_load8(at: u32) -> [u32; 2] {
    let caller = Location::caller();
    let value = demand(with(|world| world.tile(at, 8, caller))) >> (8 * (at % 16));
    [value as u32, (value >> 32) as u32]
}

#[track_caller]
pub(super) unsafe fn tile_load4(at: u32) -> u32 {
    let caller = Location::caller();
    let value = demand(with(|world| world.tile(at, 4, caller)));
    (value >> (8 * (at % 16))) as u32
}

#[track_caller]
pub(super) unsafe fn tile_load2(at: u32) -> u16 {
    let caller = Location::caller();
    let value = demand(with(|world| world.tile(at, 2, caller)));
    (value >> (8 * (at % 16))) as u16
}

#[track_caller]
pub(super) unsafe fn shared_load16(at: u32) -> [u32; 4] {
    assert!(at.is_multiple_of(4), "sixteen bytes at word {at}");
    // SAFETY: judged.
    unsafe { [shared_load(at), shared_load(at + 1), shared_load(at + 2), shared_load(at + 3)] }
}

#[track_caller]
pub(super) unsafe fn shared_load8(at: u32) -> [u32; 2] {
    assert!(at.is_multiple_of(2), "eight bytes at word {at}");
    // SAFETY: judged.
    unsafe { [shared_load(at), shared_load(at + 1)] }
}

#[track_caller]
pub(super) unsafe fn shared_store8(at: u32, [a, b]: [u32; 2]) {
    assert!(at.is_multiple_of(2), "eight bytes at word {at}");
    // SAFETY: judged.
    unsafe {
        shared_store(at, a);
        shared_store(at + 1, b);
    }
}

#[track_caller]
pub(super) unsafe fn shared_store16(at: u32, value: [u32; 4]) {
    assert!(at.is_multiple_of(4), "sixteen bytes at word {at}");
    for (i, word) in value.into_iter().enumerate() {
        // SAFETY: judged.
        unsafe { shared_store(at + i as u32, word) }
    }
}

#[track_caller]
fn exchange(purpose: Purpose, value: u32, source: u32) -> u32 {
    let at = Location::caller();
    if !demand(with(|world| world.exchange(purpose, value, source, at))) {
        suspend();
    }
    with(|world| world.value())
}

#[track_caller]
pub(super) unsafe fn shuffle_xor(value: u32, mask: u32) -> u32 {
    exchange(Purpose::ShuffleXor, value, thread_idx() ^ mask)
}

#[track_caller]
pub(super) unsafe fn shuffle(value: u32, lane: u32) -> u32 {
    exchange(Purpose::Shuffle, value, lane)
}

#[track_caller]
pub(super) unsafe fn union(mut value: u32) -> u32 {
    for lane in [1, 2, 4, 8, 16] {
        value |= exchange(Purpose::Union, value, thread_idx() ^ lane);
    }
    value
}

pub(super) fn trap() -> ! {
    panic!("a trap")
}

pub(super) fn timer_ns() -> u64 {
    with(|world| world.now_ns())
}

pub(super) fn sleep_ns(ns: u32) {
    with(|world| world.sleep(ns));
    suspend();
    with(World::awake);
}

#[track_caller]
pub(super) unsafe fn shared_load(at: u32) -> u32 {
    let caller = Location::caller();
    demand(with(|world| world.shared(at, WordTouch::Load, caller)))
}

#[track_caller]
pub(super) unsafe fn shared_constant<const N: usize>(at: u32) -> [u32; N] {
    let caller = Location::caller();
    let word = |world: &mut World, i: usize| world.shared(at + i as u32, WordTouch::Load, caller);
    demand(with(|world| {
        let mut words = [0; N];
        (0..N).try_for_each(|i| word(world, i).map(|word| words[i] = word)).map(|()| words)
    }))
}

#[track_caller]
pub(super) unsafe fn shared_store(at: u32, value: u32) {
    let caller = Location::caller();
    demand(with(|world| world.shared(at, WordTouch::Store(value), caller)));
}

#[track_caller]
pub(super) unsafe fn shared_or(at: u32, bits: u32) -> u32 {
    let caller = Location::caller();
    demand(with(|world| world.shared(at, WordTouch::Or(bits), caller)))
}

/// Judges an access of `bytes` bytes.
#[track_caller]
fn touch(address: usize, bytes: usize, align: usize, kind: Touch) {
    let caller = Location::caller();
    demand(with(|world| world.touch(address, bytes, align, kind, caller)));
}

/// The word as an atomic, once it has been judged.
#[track_caller]
fn atomic<'a>(word: *const u32, kind: Touch) -> &'a AtomicU32 {
    touch(word.addr(), 4, 4, kind);
    // SAFETY: an aligned word of a live allocation, as has been judged; others touch it atomically, or in this thread.
    unsafe { AtomicU32::from_ptr(word.cast_mut()) }
}

#[track_caller]
pub(super) unsafe fn load_relaxed(word: *const u32) -> u32 {
    let value = atomic(word, Touch::Poll).load(Ordering::Relaxed);
    with(|world| world.polled(word.addr()));
    value
}

#[track_caller]
pub(super) unsafe fn load16_relaxed(words: *const u32) -> [u32; 4] {
    touch(words.addr(), 16, 16, Touch::Poll);
    // SAFETY: four words of a live allocation, as has been judged.
    [0, 1, 2, 3].map(|at| unsafe { load_relaxed(words.add(at)) })
}

pub(super) fn settled() {
    with(World::settled);
}

#[track_caller]
pub(super) unsafe fn store_relaxed(word: *mut u32, value: u32) {
    atomic(word, Touch::Atomic).store(value, Ordering::Relaxed);
    with(|world| world.changed(word.addr()));
}

#[track_caller]
pub(super) unsafe fn store16_relaxed(words: *mut u32, values: [u32; 4]) {
    touch(words.addr(), 16, 16, Touch::Atomic);
    for (at, value) in values.into_iter().enumerate() {
        // SAFETY: four words of a live allocation, as has been judged.
        unsafe { store_relaxed(words.add(at), value) };
    }
}

#[track_caller]
pub(super) unsafe fn load_acquire(word: *const u32) -> u32 {
    let value = atomic(word, Touch::Poll).load(Ordering::Acquire);
    with(|world| world.acquire(word.addr()));
    value
}

#[track_caller]
pub(super) unsafe fn add_release(word: *mut u32, value: u32) {
    atomic(word, Touch::Atomic).fetch_add(value, Ordering::Release);
    with(|world| {
        world.release(word.addr());
        world.changed(word.addr());
    });
}

#[track_caller]
pub(super) unsafe fn store_release(word: *mut u32, value: u32) {
    atomic(word, Touch::Atomic).store(value, Ordering::Release);
    with(|world| {
        world.release_anew(word.addr());
        world.changed(word.addr());
    });
}

#[track_caller]
pub(super) unsafe fn add_four(to: *mut f32, four: [f32; 4]) {
    touch(to.addr(), 16, 16, Touch::Atomic);
    for (at, value) in four.into_iter().enumerate() {
        let word = atomic(to.wrapping_add(at).cast_const().cast(), Touch::Atomic);
        // One thread runs at a time.
        word.store((f32::from_bits(word.load(Ordering::Relaxed)) + value).to_bits(), Ordering::Relaxed);
        with(|world| world.changed(to.wrapping_add(at).addr()));
    }
}

#[track_caller]
pub(super) unsafe fn add_relaxed(word: *mut u32, value: u32) {
    // SAFETY: the caller's promise.
    unsafe { fetch_add(word, value) };
}

#[track_caller]
pub(super) unsafe fn fetch_add(word: *mut u32, value: u32) -> u32 {
    let was = atomic(word, Touch::Atomic).fetch_add(value, Ordering::Relaxed);
    with(|world| world.changed(word.addr()));
    was
}

#[track_caller]
pub(super) unsafe fn compare_exchange(word: *mut u32, old: u32, new: u32) -> u32 {
    let outcome = atomic(word, Touch::Atomic).compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire);
    with(|world| {
        world.acquire(word.addr());
        if outcome.is_ok() {
            world.release(word.addr());
            world.changed(word.addr());
        }
    });
    outcome.unwrap_or_else(|was| was)
}

pub(super) fn opaque_word(word: u32) -> u32 {
    word
}

pub(super) fn forget() {}

pub(super) fn rolled() {}

pub(super) fn opaque(pointer: *mut u8) -> *mut u8 {
    pointer
}

#[track_caller]
pub(super) unsafe fn load<T: Copy>(from: *const T) -> T {
    touch(from.addr(), size_of::<T>(), align_of::<T>(), Touch::Read);
    // SAFETY: aligned and inside a live allocation, as has been judged; the caller promises the type.
    unsafe { from.read() }
}

#[track_caller]
pub(super) unsafe fn load_volatile<T: Copy>(from: *const T) -> T {
    // SAFETY: the caller's promise.
    unsafe { load(from) }
}

/// The launch block, which a simulated kernel, too, has by value: reading it is no access to memory.
#[derive(Clone, Copy, Debug)]
pub struct LaunchBlock(*const LaunchParams);

impl LaunchBlock {
    /// Of a launch with `params`.
    ///
    /// # Safety
    /// They outlive the launch, and nobody writes them meanwhile.
    pub unsafe fn new(params: &LaunchParams) -> LaunchBlock {
        LaunchBlock(params)
    }

    /// What `field` takes out of it, which lies `AT` bytes from its start.
    #[inline(always)]
    pub(crate) fn get<const AT: usize, T: Pod>(self, field: impl FnOnce(&LaunchParams) -> T) -> T {
        // SAFETY: see `new`.
        field(unsafe { &*self.0 })
    }
}

#[track_caller]
pub(super) unsafe fn store<T: Copy>(to: *mut T, value: T) {
    touch(to.addr(), size_of::<T>(), align_of::<T>(), Touch::Write);
    // SAFETY: aligned and inside a live allocation that is written, as has been judged.
    unsafe { to.write(value) }
}

#[track_caller]
pub(super) unsafe fn store_volatile<T: Copy>(to: *mut T, value: T) {
    // SAFETY: the caller's promise.
    unsafe { store(to, value) }
}

#[track_caller]
pub(super) unsafe fn constant<'a, T>(start: *const T, len: usize) -> &'a [T] {
    if len == 0 {
        return &[];
    }
    touch(start.addr(), len * size_of::<T>(), align_of::<T>(), Touch::View);
    // SAFETY: aligned and inside a live allocation that nobody writes, as has been judged; the caller promises the
    // type.
    unsafe { core::slice::from_raw_parts(start, len) }
}

#[track_caller]
pub(super) unsafe fn exclusive<'a, T>(at: *mut T) -> &'a mut T {
    touch(at.addr(), size_of::<T>(), align_of::<T>(), Touch::Read);
    touch(at.addr(), size_of::<T>(), align_of::<T>(), Touch::Write);
    // SAFETY: aligned and inside a live allocation that is written, as has been judged; the caller promises the rest.
    unsafe { &mut *at }
}

#[track_caller]
pub(super) unsafe fn load16(from: *const u8) -> [u32; 4] {
    touch(from.addr(), 16, 16, Touch::Read);
    // SAFETY: aligned and inside a live allocation, as has been judged.
    unsafe { from.cast::<[u32; 4]>().read() }
}

#[track_caller]
pub(super) unsafe fn store16(to: *mut u8, words: [u32; 4]) {
    touch(to.addr(), 16, 16, Touch::Write);
    // SAFETY: aligned and inside a live allocation, as has been judged.
    unsafe { to.cast::<[u32; 4]>().write(words) }
}

#[track_caller]
pub(super) unsafe fn load16_stream(from: *const u8) -> [u32; 4] {
    // SAFETY: the caller's promise.
    unsafe { load16(from) }
}

pub(super) fn fma(a: f32, b: f32, c: f32) -> f32 {
    a.mul_add(b, c)
}

pub(super) fn fma64(a: f64, b: f64, c: f64) -> f64 {
    a.mul_add(b, c)
}

pub(super) fn exp2(x: f32) -> f32 {
    let y = x.exp2();
    if y < f32::MIN_POSITIVE { 0.0 } else { y }
}

pub(super) fn sqrt(x: f32) -> f32 {
    x.sqrt()
}

pub(super) fn rsqrt(x: f32) -> f32 {
    (1.0 / f64::from(flushed(x)).sqrt()) as f32
}

pub(super) fn reciprocal(x: f32) -> f32 {
    flushed(1.0 / flushed(x))
}

/// `x`, or a zero of its sign where it is subnormal.
fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

pub(super) fn f16_to_f32(bits: u16) -> f32 {
    half::f16::from_bits(bits).to_f32()
}

pub(super) fn f32_to_f16(x: f32) -> u16 {
    half::f16::from_f32(x).to_bits()
}

pub(super) fn f32_to_bf16(x: f32) -> u16 {
    half::bf16::from_f32(x).to_bits()
}

pub(super) fn f32_to_bf16_pair(low: f32, high: f32) -> u32 {
    u32::from(f32_to_bf16(low)) | u32::from(f32_to_bf16(high)) << 16
}

pub(super) fn dot_bytes(a: u32, b: u32, c: i32) -> i32 {
    let pairs = a.to_le_bytes().into_iter().zip(b.to_le_bytes());
    pairs.fold(c, |sum, (a, b)| sum.wrapping_add(i32::from(a as i8) * i32::from(b as i8)))
}

pub(super) fn low_bytes_in_turn(first: u32, second: u32) -> u32 {
    // As the instruction's selector has it: the bytes 0 of both, then their bytes 1.
    first & 0xff | (second & 0xff) << 8 | (first & 0xff00) << 8 | (second & 0xff00) << 16
}

pub(super) fn permute(low: u32, high: u32, numbers: u32) -> u32 {
    let bytes = (u64::from(high) << 32 | u64::from(low)).to_le_bytes();
    let one = |at: usize| {
        let number = numbers >> (4 * at) & 15;
        let byte = bytes[number as usize & 7];
        if number < 8 { byte } else { ((byte as i8) >> 7) as u8 }
    };
    u32::from_le_bytes(core::array::from_fn(one))
}

pub(super) fn with_byte<const AT: u32>(word: u32, from: u32) -> u32 {
    word & !0xff00 | (from >> (8 * AT) & 0xff) << 8
}

pub(super) fn low_halves(first: u32, second: u32) -> u32 {
    first & 0xffff | second << 16
}

pub(super) fn high_halves(first: u32, second: u32) -> u32 {
    first >> 16 | second & 0xffff_0000
}
