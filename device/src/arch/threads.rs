//! The test back end of [`arch`](super): every GPU thread is a thread of the host, a barrier is a barrier, a shuffle an
//! exchange between two of them. Slow and simple; it judges what the bodies compute, not how fast, and not their memory
//! model.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::sync::{Arc, Barrier};

/// A warp's meeting place.
#[derive(Debug)]
struct Warp {
    barrier: Barrier,
    lanes: [AtomicU32; 32],
}

/// A block: what its threads share.
#[derive(Debug)]
struct Block {
    index: u32,
    threads: u32,
    barrier: Barrier,
    vote: AtomicBool,
    warps: Vec<Warp>,
    shared: Vec<AtomicU32>,
}

#[derive(Clone, Debug)]
struct Place {
    block: Arc<Block>,
    thread: u32,
}

thread_local! {
    static PLACE: RefCell<Option<Place>> = const { RefCell::new(None) };
}

/// Runs `body` on every thread of `blocks` blocks of `threads` threads each.
///
/// # Panics
/// When a thread panics: the process ends, since the others would wait at their barrier for ever.
pub(crate) fn launch(blocks: u32, threads: u32, body: impl Fn() + Sync) {
    assert_eq!(threads % 32, 0, "a block is whole warps");
    let blocks: Vec<Arc<Block>> = (0..blocks)
        .map(|index| {
            Arc::new(Block {
                index,
                threads,
                barrier: Barrier::new(threads as usize),
                vote: AtomicBool::new(false),
                warps: (0..threads / 32)
                    .map(|_| Warp { barrier: Barrier::new(32), lanes: [const { AtomicU32::new(0) }; 32] })
                    .collect(),
                // Unwritten shared memory holds anything; NaN shows.
                shared: (0..super::shared::WORDS).map(|_| AtomicU32::new(0x7fc0_dead)).collect(),
            })
        })
        .collect();
    std::thread::scope(|scope| {
        for block in &blocks {
            for thread in 0..threads {
                let body = &body;
                scope.spawn(move || {
                    let place = Place { block: block.clone(), thread };
                    PLACE.with(|slot| *slot.borrow_mut() = Some(place));
                    if let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)) {
                        eprintln!("thread {thread} of block {}: {panic:?}", block.index);
                        std::process::abort();
                    }
                });
            }
        }
    });
}

fn place<T>(f: impl FnOnce(&Block, u32) -> T) -> T {
    PLACE.with(|slot| {
        let slot = slot.borrow();
        let place = slot.as_ref().expect("device code runs inside `launch`");
        f(&place.block, place.thread)
    })
}

pub(super) fn thread_idx() -> u32 {
    place(|_, thread| thread)
}

pub(super) fn block_idx() -> u32 {
    place(|block, _| block.index)
}

pub(super) fn block_dim() -> u32 {
    place(|block, _| block.threads)
}

pub(super) unsafe fn barrier() {
    place(|block, _| block.barrier.wait());
}

pub(super) unsafe fn barrier_or(predicate: bool) -> bool {
    place(|block, _| {
        if predicate {
            block.vote.store(true, Ordering::SeqCst);
        }
        block.barrier.wait();
        let any = block.vote.load(Ordering::SeqCst);
        block.barrier.wait();
        block.vote.store(false, Ordering::SeqCst);
        block.barrier.wait();
        any
    })
}

pub(super) unsafe fn shuffle_xor(value: u32, mask: u32) -> u32 {
    place(|block, thread| exchange(&block.warps[thread as usize / 32], value, thread % 32, (thread % 32) ^ mask))
}

pub(super) unsafe fn shuffle(value: u32, lane: u32) -> u32 {
    place(|block, thread| exchange(&block.warps[thread as usize / 32], value, thread % 32, lane % 32))
}

fn exchange(warp: &Warp, value: u32, lane: u32, from: u32) -> u32 {
    warp.lanes[lane as usize].store(value, Ordering::SeqCst);
    warp.barrier.wait();
    let got = warp.lanes[from as usize].load(Ordering::SeqCst);
    warp.barrier.wait();
    got
}

pub(super) fn timer_ns() -> u64 {
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    START.get_or_init(std::time::Instant::now).elapsed().as_nanos() as u64
}

pub(super) fn sleep_ns(_: u32) {
    std::thread::yield_now();
}

pub(super) unsafe fn shared_load(at: u32) -> u32 {
    place(|block, _| block.shared[at as usize].load(Ordering::Relaxed))
}

pub(super) unsafe fn shared_store(at: u32, value: u32) {
    place(|block, _| block.shared[at as usize].store(value, Ordering::Relaxed));
}

/// # Safety
/// `word` points to a live, aligned word that is only touched atomically.
unsafe fn atomic<'a>(word: *const u32) -> &'a AtomicU32 {
    // SAFETY: the caller's promise.
    unsafe { AtomicU32::from_ptr(word.cast_mut()) }
}

pub(super) unsafe fn load_relaxed(word: *const u32) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { atomic(word) }.load(Ordering::Relaxed)
}

pub(super) unsafe fn load_acquire(word: *const u32) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { atomic(word) }.load(Ordering::Acquire)
}

pub(super) unsafe fn add_release(word: *mut u32, value: u32) {
    // SAFETY: the caller's promise.
    unsafe { atomic(word) }.fetch_add(value, Ordering::Release);
}

pub(super) unsafe fn compare_exchange(word: *mut u32, old: u32, new: u32) -> u32 {
    // SAFETY: the caller's promise.
    match unsafe { atomic(word) }.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire) {
        Ok(was) | Err(was) => was,
    }
}

pub(super) fn fence_system() {
    fence(Ordering::SeqCst);
}

pub(super) fn opaque(pointer: *mut u8) -> *mut u8 {
    pointer
}

pub(super) unsafe fn load16(from: *const u8) -> [u32; 4] {
    assert_eq!(from.addr() % 16, 0, "a 16-byte load must be aligned");
    // SAFETY: the caller promises 16 readable bytes; alignment was just checked.
    unsafe { from.cast::<[u32; 4]>().read() }
}

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

pub(super) fn f16_to_f32(bits: u16) -> f32 {
    half::f16::from_bits(bits).to_f32()
}

pub(super) fn f32_to_f16(x: f32) -> u16 {
    half::f16::from_f32(x).to_bits()
}

pub(super) fn f32_to_bf16(x: f32) -> u16 {
    half::bf16::from_f32(x).to_bits()
}
