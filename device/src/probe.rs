//! The bodies of the [probes](perpetua_shared::probe).

use crate::arch::{WARP, atomic, bulk, copy, mbarrier, memory, thread, warp};
use perpetua_shared::flag;
use perpetua_shared::launch::{BLOCK_THREADS, TASK_THREADS, TILE_BARRIERS};
use perpetua_shared::probe::{GAVE_UP, ProbeParams, ROW_BYTES, ROW_WORDS, TAKEN_BYTES, UNDER_WAY, WORDS_AT};

fn word(address: u64, at: u64) -> *mut u32 {
    core::ptr::with_exposed_provenance_mut((address + at) as usize)
}

/// The block has taken as long as this.
///
/// # Safety
/// `out` has a word for every block, which it alone writes.
unsafe fn tell(params: &ProbeParams, ns: u64) {
    let out = core::ptr::with_exposed_provenance_mut::<u64>(params.out as usize);
    // SAFETY: the caller's promise.
    unsafe { memory::store(out.add(thread::block_idx() as usize), ns) };
}

/// Waits until `is_there`: whether it was in time.
fn poll(timeout_ns: u64, is_there: impl Fn() -> bool) -> bool {
    let started = thread::timer_ns();
    let mut polls = 0u32;
    while !is_there() {
        polls = polls.wrapping_add(1);
        // As workers poll.
        thread::sleep_ns(20);
        if polls.is_multiple_of(64) && thread::timer_ns() - started > timeout_ns {
            return false;
        }
    }
    true
}

/// Waits until `counter` has reached `target`: whether it did in time.
///
/// # Safety
/// The counter is a word that is only touched atomically.
unsafe fn reach(counter: *mut u32, target: u32, timeout_ns: u64) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        let is_there = poll(timeout_ns, || atomic::load_relaxed(counter) >= target);
        if is_there {
            atomic::load_acquire(counter);
        }
        is_there
    }
}

/// Waits until what barrier `tile` counts is there: whether it was in time. It does not sleep: a loader's rate is what
/// is measured.
///
/// # Safety
/// As [`mbarrier::try_wait`].
unsafe fn lands(tile: u32, parity: u32, timeout_ns: u64) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        if mbarrier::try_wait(tile, parity) {
            return true;
        }
        let started = thread::timer_ns();
        while !mbarrier::try_wait(tile, parity) {
            if thread::timer_ns() - started > timeout_ns {
                return false;
            }
        }
        true
    }
}

/// See [`READ`](perpetua_shared::probe::READ).
///
/// # Safety
/// `params` is as [`ProbeParams`] says; the grid has `blocks` blocks of one warp, with shared memory for the tiles. A
/// copy that never lands is given up.
pub unsafe fn read(params: &ProbeParams) {
    if thread::thread_idx() != 0 {
        return;
    }
    let (tile_bytes, n_tiles) = (params.tile_bytes, params.n_tiles);
    let bytes = params.bytes;
    let source = params.source + u64::from(thread::block_idx()) * bytes;
    let source: *const u8 = core::ptr::with_exposed_provenance(source as usize);
    let n = (bytes / u64::from(tile_bytes)) as u32 * params.rounds;
    let mut next = 0;
    // SAFETY: the caller's promise; one thread makes the barriers and uses them. A tile's next copy begins after its
    // last has landed, and nobody reads any.
    unsafe {
        for tile in 0..n_tiles {
            mbarrier::init(tile, 1);
        }
        mbarrier::fence();
        let began = thread::timer_ns();
        for at in 0..n + n_tiles {
            let tile = at % n_tiles;
            if at >= n_tiles {
                // Copy `at - n_tiles` was this barrier's.
                let parity = (at / n_tiles - 1) & 1;
                if at - n_tiles < n && !lands(tile, parity, params.timeout_ns) {
                    tell(params, GAVE_UP);
                    return;
                }
            }
            if at < n {
                mbarrier::arrive_expect(tile, tile_bytes);
                bulk::copy(tile * tile_bytes, source.add(next as usize), tile_bytes, tile);
                next += u64::from(tile_bytes);
                if next == bytes {
                    next = 0;
                }
            }
        }
        tell(params, thread::timer_ns() - began);
    }
}

/// See [`COPY`](perpetua_shared::probe::COPY).
///
/// # Safety
/// As [`read`], of blocks of `TASK_THREADS` threads.
pub unsafe fn copy(params: &ProbeParams) {
    let (tile_bytes, n_tiles, bytes) = (params.tile_bytes, params.n_tiles, params.bytes);
    let (own, of_all) = (16 * thread::thread_idx(), 16 * WARP * params.warps);
    let source = params.source + u64::from(thread::block_idx()) * bytes + u64::from(own);
    let source: *const u8 = core::ptr::with_exposed_provenance(source as usize);
    // None, of threads that do not copy.
    let n = if own < of_all { (bytes / u64::from(tile_bytes)) as u32 * params.rounds } else { 0 };
    let (mut tile, mut next) = (0, 0);
    let began = thread::timer_ns();
    // SAFETY: the caller's promise. A thread copies to places of its own, to each again once its last copy there, more
    // than `UNDER_WAY` tiles before, has landed, and nobody reads them.
    unsafe {
        for _ in 0..n {
            let mut at = 0;
            while at < tile_bytes {
                copy::sixteen(tile * tile_bytes + at + own, source.add((next + at) as usize), true);
                at += of_all;
            }
            copy::commit();
            copy::wait::<UNDER_WAY>();
            tile = if tile + 1 == n_tiles { 0 } else { tile + 1 };
            next += tile_bytes;
            if u64::from(next) == bytes {
                next = 0;
            }
        }
        copy::wait::<0>();
        thread::sync();
        if thread::thread_idx() == 0 {
            tell(params, thread::timer_ns() - began);
        }
    }
}

/// See [`TAKE`](perpetua_shared::probe::TAKE).
///
/// # Safety
/// As [`read`], of blocks of [`BLOCK_THREADS`] threads, the last warp for service.
pub unsafe fn take(params: &ProbeParams) {
    let (thread, n_tiles) = (thread::thread_idx(), params.n_tiles);
    let n = (params.bytes / u64::from(params.tile_bytes)) as u32 * params.rounds;
    // SAFETY: one thread makes the barriers, before one of all threads.
    unsafe {
        if thread == 0 {
            for tile in 0..n_tiles {
                mbarrier::init(tile, 1);
                mbarrier::init(EMPTY + tile, TASK_THREADS / WARP);
            }
            mbarrier::fence();
        }
        thread::sync_some(1, BLOCK_THREADS);
        if thread < TASK_THREADS {
            take_tiles(params, n);
        } else if thread == TASK_THREADS {
            bring_tiles(params, n);
        }
    }
}

/// From this one on barriers count who has released a tile.
const EMPTY: u32 = TILE_BARRIERS;

/// The loader of [`take`], with `n` tiles to bring. Where it waits in vain it leaves, and so do the others.
///
/// # Safety
/// One thread calls it, as [`take`] does.
unsafe fn bring_tiles(params: &ProbeParams, n: u32) {
    let ProbeParams { bytes, tile_bytes, n_tiles, timeout_ns, .. } = *params;
    let source = params.source + u64::from(thread::block_idx()) * bytes;
    let source: *const u8 = core::ptr::with_exposed_provenance(source as usize);
    let (mut tile, mut parity, mut next) = (0, 1, 0);
    // SAFETY: the caller's promise. A tile's next copy begins when all warps have released it.
    unsafe {
        for at in 0..n {
            // As if released before there was one.
            if !lands(EMPTY + tile, parity, timeout_ns) {
                return;
            }
            if at < n_tiles || params.is_brought != 0 {
                mbarrier::arrive_expect(tile, tile_bytes);
                bulk::copy(tile * tile_bytes, source.add(next as usize), tile_bytes, tile);
            } else {
                mbarrier::arrive(tile);
            }
            next += u64::from(tile_bytes);
            if next == bytes {
                next = 0;
            }
            tile += 1;
            if tile == n_tiles {
                (tile, parity) = (0, parity ^ 1);
            }
        }
    }
}

/// The threads of [`take`] that have `n` tiles to take, more than are there at once.
///
/// # Safety
/// Whole warps call it, [`TASK_THREADS`] threads of a block, as [`take`] does.
unsafe fn take_tiles(params: &ProbeParams, n: u32) {
    let ProbeParams { tile_bytes, n_tiles, timeout_ns, .. } = *params;
    let thread = thread::thread_idx();
    let (mut tile, mut parity, mut began, mut sum, mut is_right) = (0, 0, 0, 0u32, true);
    // SAFETY: the caller's promise. Tiles are read between their being full and their release.
    unsafe {
        for at in 0..n {
            if at == n_tiles {
                began = thread::timer_ns();
            }
            is_right = lands(tile, parity, timeout_ns);
            if !is_right {
                break;
            }
            if params.reads != 0 {
                let mut from = tile * tile_bytes + 16 * thread;
                for _ in 0..tile_bytes / TAKEN_BYTES {
                    let fours: [_; 4] = core::array::from_fn(|i| bulk::load16(from + 16 * TASK_THREADS * i as u32));
                    sum = fours.into_iter().flatten().fold(sum, u32::wrapping_add);
                    from += TAKEN_BYTES;
                }
            }
            warp::sync();
            if thread.is_multiple_of(WARP) {
                mbarrier::arrive(EMPTY + tile);
            }
            tile += 1;
            if tile == n_tiles {
                (tile, parity) = (0, parity ^ 1);
            }
        }
        let words = if params.reads != 0 { n * (tile_bytes / (4 * TASK_THREADS)) } else { 0 };
        is_right &= sum == words.wrapping_mul(0x0101_0101);
        let is_wrong = thread::sync_or(!is_right);
        if thread == 0 {
            tell(params, if is_wrong { GAVE_UP } else { thread::timer_ns() - began });
        }
    }
}

/// See [`HOP`](perpetua_shared::probe::HOP).
///
/// # Safety
/// As [`read`], all blocks resident.
pub unsafe fn hop(params: &ProbeParams) {
    let block = thread::block_idx();
    if thread::thread_idx() != 0 || block > 1 {
        return;
    }
    let (counters, timeout_ns) = (params.counters, params.timeout_ns);
    let (mine, other) = (word(counters, 128 * u64::from(block)), word(counters, 128 * u64::from(1 - block)));
    // SAFETY: the caller's promise.
    unsafe {
        let began = thread::timer_ns();
        for round in 0..params.rounds {
            if block == 0 {
                atomic::add_release(mine, 1);
            }
            if !reach(other, round + 1, timeout_ns) {
                tell(params, GAVE_UP);
                return;
            }
            if block == 1 {
                atomic::add_release(mine, 1);
            }
        }
        tell(params, thread::timer_ns() - began);
    }
}

/// See [`HAND`](perpetua_shared::probe::HAND). Of two rounds the second is of what the first has brought, so nobody is
/// ahead.
///
/// # Safety
/// As [`hop`], but of blocks of `TASK_THREADS` threads, with `source` writable.
pub unsafe fn hand(params: &ProbeParams) {
    let (block, thread) = (thread::block_idx(), thread::thread_idx());
    if block > 1 && params.by_flags == 0 {
        return;
    }
    // A thread's words, four side by side, as bodies read them.
    let in_row = |row: u32| u64::from(row) * ROW_BYTES + u64::from(4 * ROW_WORDS * thread);
    let flagged = |row: u32| word(params.counters, WORDS_AT + in_row(row));
    let plain = |row: u32| word(params.source, in_row(row));
    let counter = |row: u32| word(params.counters, 128 * u64::from(row));
    let marked = |round: u32| flag::mark(round as f32, flag::of_run(round));
    if block > 1 {
        // SAFETY: the caller's promise; nobody writes the row again after the last round.
        let has_ended = || unsafe { atomic::load16_relaxed(flagged(0))[0] == marked(params.rounds) };
        if !poll(params.timeout_ns, has_ended) && thread == 0 {
            // SAFETY: as above.
            unsafe { tell(params, GAVE_UP) };
        }
        atomic::settled();
        return;
    }
    // SAFETY: the caller's promise; a thread writes words of its own, which others read behind a counter or only touch
    // atomically, and writes them again when its block has heard that they have been read. Conditions around barriers
    // are the whole block's.
    let give = |round: u32| unsafe {
        if params.by_flags != 0 {
            for i in 0..ROW_WORDS as usize {
                atomic::store_relaxed(flagged(block).add(i), marked(round));
            }
            return;
        }
        for i in 0..ROW_WORDS as usize {
            memory::store(plain(block).add(i), round);
        }
        thread::sync();
        if thread == 0 {
            atomic::add_release(counter(block), 1);
        }
    };
    // SAFETY: as above.
    let take = |round: u32| unsafe {
        let mut is_there = true;
        if params.by_flags != 0 {
            let from = flagged(1 - block);
            is_there = poll(params.timeout_ns, || {
                let words = atomic::load16_relaxed(from);
                let mut lacks = 0;
                for i in 0..ROW_WORDS as usize {
                    lacks |= (words[i] ^ flag::of_run(round)) & flag::MASK;
                }
                lacks == 0
            });
            atomic::settled();
            return !thread::sync_or(!is_there);
        }
        if thread == 0 {
            is_there = reach(counter(1 - block), round, params.timeout_ns);
        }
        if thread::sync_or(!is_there) {
            return false;
        }
        let words = memory::load16(plain(1 - block).cast());
        for i in 0..ROW_WORDS as usize {
            is_there &= words[i] == round;
        }
        !thread::sync_or(!is_there)
    };
    let began = thread::timer_ns();
    for round in 1..=params.rounds {
        if block == 0 {
            give(round);
        }
        if !take(round) {
            if thread == 0 {
                // SAFETY: the caller's promise.
                unsafe { tell(params, GAVE_UP) };
            }
            return;
        }
        if block == 1 {
            give(round);
        }
    }
    if thread == 0 {
        // SAFETY: as above.
        unsafe { tell(params, thread::timer_ns() - began) };
    }
}

/// See [`MEET`](perpetua_shared::probe::MEET).
///
/// # Safety
/// As [`hop`].
pub unsafe fn meet(params: &ProbeParams) {
    if thread::thread_idx() != 0 {
        return;
    }
    let (counter, blocks) = (word(params.counters, 0), params.blocks);
    // SAFETY: the caller's promise.
    unsafe {
        let began = thread::timer_ns();
        for round in 0..params.rounds {
            atomic::add_release(counter, 1);
            if !reach(counter, (round + 1) * blocks, params.timeout_ns) {
                tell(params, GAVE_UP);
                return;
            }
        }
        tell(params, thread::timer_ns() - began);
    }
}
