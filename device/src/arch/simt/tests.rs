//! Planted bugs, each of which must be found and named, beside the same program without the bug.
#![allow(
    clippy::if_same_then_else,
    clippy::manual_is_multiple_of,
    clippy::double_ended_iterator_last,
    reason = "planted bugs are written as GPU code would write them"
)]

use super::{Access, Allocation, Options, Report, SimtError, Wrong, launch};
use crate::arch::{atomic, bulk, copy, mbarrier, memory, scalar, shared, thread, warp, warpgroup};

const WORDS: usize = 256;

/// Memory of a launch: words to write, words to read, and counters.
struct Ground {
    data: Vec<u32>,
    constant: Vec<u32>,
    counters: Vec<u32>,
}

#[derive(Clone, Copy)]
struct Place {
    data: *mut u32,
    constant: *mut u32,
    counters: *mut u32,
}

impl Place {
    fn data(&self, at: u32) -> *mut u32 {
        self.data.wrapping_add(at as usize)
    }

    /// Adds one to counter `at`, with release.
    fn signal(&self, at: usize) {
        // SAFETY: a word of the launch's counters.
        unsafe { atomic::add_release(self.counters.wrapping_add(at), 1) };
    }

    /// Waits until counter `at` is at least `target`; the last look has acquire order, if asked.
    fn wait(&self, at: usize, target: u32, acquire: bool) {
        // SAFETY: a word of the launch's counters.
        unsafe {
            while atomic::load_relaxed(self.counters.wrapping_add(at)) < target {
                thread::sleep_ns(20);
            }
            if acquire {
                atomic::load_acquire(self.counters.wrapping_add(at));
            }
        }
    }
}

/// Runs `body` on a grid under several schedules.
fn run(blocks: u32, threads: u32, body: impl Fn(Place)) -> Vec<Result<Report, Box<SimtError>>> {
    run_with(Options::new(blocks, threads, 0), body)
}

/// [`run`] with service warps and tiles, if `options` say so.
fn run_with(options: Options, body: impl Fn(Place)) -> Vec<Result<Report, Box<SimtError>>> {
    let schedule = |seed| {
        let mut ground = Ground { data: vec![0; WORDS], constant: vec![7; WORDS], counters: vec![0; 4] };
        let place = Place {
            data: ground.data.as_mut_ptr(),
            constant: ground.constant.as_mut_ptr(),
            counters: ground.counters.as_mut_ptr(),
        };
        // SAFETY: the memory outlives the launch, and only it touches it.
        let allocations = unsafe {
            vec![
                Allocation::new("data", place.data.cast(), 4 * WORDS, Access::Unwritten),
                Allocation::new("constant", place.constant.cast(), 4 * WORDS, Access::Constant),
                Allocation::new("counter", place.counters.cast(), 16, Access::Atomic),
            ]
        };
        launch(&Options { seed, ..options }, allocations, || body(place))
    };
    (0..8).map(schedule).collect()
}

/// Every schedule must find it.
#[track_caller]
fn finds(wrong: Wrong, words: &str, blocks: u32, threads: u32, body: impl Fn(Place)) -> Box<SimtError> {
    finds_with(wrong, words, Options::new(blocks, threads, 0), body)
}

#[track_caller]
fn finds_with(wrong: Wrong, words: &str, options: Options, body: impl Fn(Place)) -> Box<SimtError> {
    let errors: Vec<_> =
        run_with(options, body).into_iter().map(|outcome| outcome.expect_err("a planted bug")).collect();
    for error in &errors {
        // Who reads too early may find nothing at all.
        let early = wrong == Wrong::Race && error.wrong == Wrong::Poison;
        assert!(early || (error.wrong == wrong && error.to_string().contains(words)), "{error}");
    }
    assert!(errors.iter().any(|error| error.wrong == wrong), "{errors:?}");
    errors.into_iter().next().expect("eight runs")
}

#[track_caller]
fn passes(blocks: u32, threads: u32, body: impl Fn(Place)) -> Report {
    passes_with(Options::new(blocks, threads, 0), body)
}

#[track_caller]
fn passes_with(options: Options, body: impl Fn(Place)) -> Report {
    let reports = run_with(options, body).into_iter().map(|outcome| outcome.unwrap_or_else(|error| panic!("{error}")));
    reports.last().expect("eight runs")
}

// What follows is device code: every unsafe call is one that the simulator judges, and where it is wrong, that is the
// point. SAFETY: nothing is touched that has not been judged.

#[test]
fn a_barrier_not_all_come_to() {
    let error = finds(Wrong::Divergence, "tests.rs", 1, 64, |_| {
        if thread::thread_idx() != 37 {
            // SAFETY: see above.
            unsafe { thread::sync() };
        }
    });
    assert_eq!(error.block, 0);
    assert!(error.at.is_some_and(|at| at.file().ends_with("tests.rs")));
}

#[test]
fn lanes_at_two_barriers() {
    finds(Wrong::Divergence, "one barrier", 1, 64, |_| {
        // SAFETY: see above.
        unsafe {
            if thread::thread_idx() % 2 == 0 {
                thread::sync();
            } else {
                thread::sync();
            }
        }
    });
    // A vote is another barrier, whichever warp comes to it.
    finds(Wrong::Divergence, "one barrier", 1, 64, |_| {
        // SAFETY: see above.
        unsafe {
            if thread::thread_idx() < 32 {
                thread::sync();
            } else {
                thread::sync_or(true);
            }
        }
    });
}

#[test]
fn a_shuffle_without_all_lanes() {
    finds(Wrong::Divergence, "ShuffleXor", 1, 32, |_| {
        if thread::thread_idx() < 31 {
            // SAFETY: see above.
            unsafe { warp::shuffle_xor(1, 1) };
        }
    });
    finds(Wrong::Divergence, "barrier", 1, 32, |_| {
        // SAFETY: see above.
        unsafe {
            if thread::thread_idx() < 31 {
                warp::shuffle(1, 0);
            } else {
                thread::sync();
            }
        }
    });
    passes(1, 64, |_| {
        let lane = thread::thread_idx() % 32;
        // SAFETY: see above.
        unsafe {
            assert_eq!(warp::shuffle_xor(lane, 5), lane ^ 5);
            assert_eq!(warp::shuffle(lane, 3), 3);
            assert_eq!(warp::sum(lane as f32), 496.0);
            assert!(thread::sync_or(thread::thread_idx() == 50));
            assert!(!thread::sync_or(false));
        }
    });
}

#[test]
fn addresses_out_of_place() {
    finds(Wrong::OutOfBounds, "data + 1024 (of 1024 bytes)", 1, 32, |place| {
        // SAFETY: see above.
        unsafe { memory::store(place.data(WORDS as u32), 1) };
    });
    finds(Wrong::OutOfBounds, &format!("word {} of shared memory", shared::WORDS), 1, 32, |_| {
        // SAFETY: see above.
        unsafe { shared::store(shared::WORDS, 1) };
    });
    finds(Wrong::Misaligned, "aligned to 4", 1, 32, |place| {
        // SAFETY: see above.
        unsafe { memory::load(place.constant.wrapping_byte_add(2)) };
    });
    finds(Wrong::Misaligned, "aligned to 16", 1, 32, |place| {
        // SAFETY: see above.
        unsafe { memory::load16(place.constant.wrapping_byte_add(place.constant.align_offset(16) * 4 + 8).cast()) };
    });
    finds(Wrong::Forbidden, "only read", 1, 32, |place| {
        // SAFETY: see above.
        unsafe { memory::store(place.constant, 1) };
    });
    finds(Wrong::Forbidden, "counter[2]", 1, 32, |place| {
        // SAFETY: see above.
        unsafe { memory::load(place.counters.wrapping_add(2)) };
    });
}

#[test]
fn what_nobody_has_written() {
    finds(Wrong::Poison, "data + 20", 1, 32, |place| {
        // SAFETY: see above.
        unsafe { memory::load(place.data(5)) };
    });
    finds(Wrong::Poison, "shared word 9", 1, 32, |_| {
        // SAFETY: see above.
        unsafe { shared::load(9) };
    });
    // One task's shared memory is no other's.
    finds(Wrong::Poison, "t2", 1, 32, |_| {
        // SAFETY: see above.
        unsafe {
            thread::at_task(1);
            shared::store(thread::thread_idx(), 1);
            thread::sync();
            thread::at_task(2);
            shared::load(thread::thread_idx());
        }
    });
}

/// Bits of a word are set by all at once, and seen by those who set them; whoever stores it must have met them, and
/// nobody else reads it.
#[test]
fn bits_of_a_word() {
    let set = |has_met: bool, is_read: bool, is_stored: bool| {
        move |_: Place| {
            let (me, word) = (thread::thread_idx(), 9);
            // SAFETY: of the words of this kind all threads set bits, between the barriers that are there.
            unsafe {
                if me == 0 {
                    shared::store(word, 1 << 31);
                }
                thread::sync();
                let bit = 1 << (me % 16);
                let was = shared::or(word, bit);
                assert_eq!(was >> 31, 1);
                if has_met {
                    thread::sync();
                }
                if is_read {
                    shared::load(word);
                }
                if is_stored && me == 63 {
                    shared::store(word, 0);
                }
            }
        }
    };
    passes(1, 64, set(false, false, false));
    passes(1, 64, set(true, false, true));
    finds(Wrong::Race, "of which threads set bits", 1, 64, set(true, true, false));
    finds(Wrong::Race, "of shared word 9", 1, 64, set(false, false, true));
    finds(Wrong::Poison, "shared word 9", 1, 32, |_| {
        // SAFETY: see above.
        unsafe { shared::or(9, 1) };
    });
}

#[test]
fn races_in_a_block() {
    let exchange = |fenced: bool| {
        move |_: Place| {
            let me = thread::thread_idx();
            // SAFETY: see above.
            unsafe {
                shared::store(me, me);
                if fenced {
                    thread::sync();
                }
                let other = if fenced { shared::load(me ^ 33) } else { me };
                if !fenced && me == 1 {
                    shared::store(40, 3);
                }
                assert_eq!(other, if fenced { me ^ 33 } else { me });
            }
        }
    };
    finds(Wrong::Race, "shared word 40", 1, 64, exchange(false));
    passes(1, 64, exchange(true));
    // Reading, then writing for the next round, with one barrier too few.
    finds(Wrong::Race, "of shared word", 1, 64, |_| {
        let me = thread::thread_idx();
        // SAFETY: see above.
        unsafe {
            shared::store(me, me);
            thread::sync();
            shared::load(me ^ 32);
            shared::store(me, me);
        }
    });
    // Global memory alike, down to halves of a word.
    finds(Wrong::Race, "data", 1, 64, |place| {
        // SAFETY: see above.
        unsafe { memory::store(place.data(thread::thread_idx() / 2), 1) };
    });
    passes(1, 64, |place| {
        // SAFETY: see above.
        unsafe { memory::store(place.data(0).cast::<u16>().wrapping_add(thread::thread_idx() as usize), 1) };
    });
}

#[test]
fn a_shuffle_orders_reads_and_nothing_else() {
    // What has gone into a shuffle has been read: another lane may write it.
    passes(1, 32, |place| {
        let me = thread::thread_idx();
        // SAFETY: see above.
        unsafe {
            memory::store(place.data(me), me);
            thread::sync();
            let sum = warp::sum(memory::load(place.data(me)) as f32);
            memory::store(place.data(me ^ 1), sum as u32);
        }
    });
    // But it makes no write visible.
    finds(Wrong::Race, "written by", 1, 32, |place| {
        let me = thread::thread_idx();
        // SAFETY: see above.
        unsafe {
            memory::store(place.data(me), me);
            warp::shuffle(me, 0);
            memory::load(place.data(me ^ 1));
        }
    });
    // And another warp is another warp.
    finds(Wrong::Race, "", 1, 64, |place| {
        let me = thread::thread_idx();
        // SAFETY: see above.
        unsafe {
            memory::store(place.data(me), me);
            thread::sync();
            warp::shuffle(memory::load(place.data(me)), 0);
            memory::store(place.data(me ^ 32), 1);
        }
    });
}

/// Block 0 writes and signals, block 1 waits and reads: what may be left out?
#[derive(Clone, Copy)]
struct HandOver {
    barrier_before: bool,
    barrier_after: bool,
    acquire: bool,
}

fn hand_over(how: HandOver) -> impl Fn(Place) {
    move |place| {
        let me = thread::thread_idx();
        // SAFETY: see above.
        unsafe {
            if thread::block_idx() == 0 {
                memory::store(place.data(me), me);
                if how.barrier_before {
                    thread::sync();
                }
                if me == 0 {
                    place.signal(1);
                }
            } else {
                if me == 0 || !how.barrier_after {
                    place.wait(1, 1, how.acquire);
                }
                if how.barrier_after {
                    thread::sync();
                }
                memory::load(place.data(me ^ 33));
            }
        }
    }
}

#[test]
fn races_between_blocks() {
    let sound = HandOver { barrier_before: true, barrier_after: true, acquire: true };
    passes(2, 64, hand_over(sound));
    passes(2, 64, hand_over(HandOver { barrier_after: false, ..sound }));
    finds(Wrong::Race, "of block 0", 2, 64, hand_over(HandOver { barrier_before: false, ..sound }));
    finds(Wrong::Race, "of block 0", 2, 64, hand_over(HandOver { acquire: false, ..sound }));
    // The barrier that carries the order on to the block is missing.
    let lone = |place: Place| {
        let me = thread::thread_idx();
        // SAFETY: see above.
        unsafe {
            if thread::block_idx() == 0 {
                memory::store(place.data(me), me);
                thread::sync();
                if me == 0 {
                    place.signal(1);
                }
            } else {
                if me == 0 {
                    place.wait(1, 1, true);
                } else {
                    place.wait(1, 1, false);
                }
                memory::load(place.data(me));
            }
        }
    };
    finds(Wrong::Race, "of block 0", 2, 64, lone);
    // A thread that releases what it alone wrote needs no barrier, and the order passes through a third block.
    passes(3, 32, |place| {
        let me = thread::thread_idx();
        // SAFETY: see above.
        unsafe {
            match (thread::block_idx(), me) {
                (0, 0) => {
                    memory::store(place.data(0), 5);
                    place.signal(0);
                }
                (1, 0) => {
                    place.wait(0, 1, true);
                    place.signal(1);
                }
                (2, 0) => {
                    place.wait(1, 1, true);
                    assert_eq!(memory::load(place.data(0)), 5);
                }
                _ => {}
            }
        }
    });
    // Many read, one writes what they read: it must wait for all.
    let readers = |target: u32| {
        move |place: Place| {
            let (me, block) = (thread::thread_idx(), thread::block_idx());
            // SAFETY: see above.
            unsafe {
                if block == 0 {
                    if me == 0 {
                        memory::store(place.data(0), 1);
                        place.signal(0);
                        place.wait(1, target, true);
                        memory::store(place.data(0), 2);
                    }
                } else {
                    place.wait(0, 1, true);
                    memory::load(place.data(0));
                    thread::sync();
                    if me == 0 {
                        place.signal(1);
                    }
                }
            }
        }
    };
    passes(4, 32, readers(3));
    finds(Wrong::Race, "data + 0", 4, 32, readers(0));
}

#[test]
fn nobody_can_go_on() {
    let error = finds(Wrong::Deadlock, "polls counter[3], which stands at 0", 2, 32, |place| {
        if thread::thread_idx() == 0 {
            place.wait(3, 1, true);
        }
        // SAFETY: see above.
        unsafe { thread::sync() };
    });
    assert!(error.what.contains("31 at the barrier of"), "{error}");
    // Two that wait for each other.
    finds(Wrong::Deadlock, "block 1", 2, 32, |place| {
        let block = thread::block_idx() as usize;
        if thread::thread_idx() == 0 {
            place.wait(block, 1, true);
            place.signal(1 - block);
        }
    });
}

#[test]
fn a_wait_with_a_bound_ends_by_it() {
    let report = passes(1, 32, |place| {
        let started = thread::timer_ns();
        let word = place.counters.cast_const();
        // SAFETY: see above.
        while unsafe { atomic::load_relaxed(word) } == 0 && thread::timer_ns() - started < 1_000_000_000 {
            thread::sleep_ns(20);
        }
    });
    assert!(report.stall.is_some_and(|stall| stall.contains("counter[0]")));
}

#[test]
fn a_panic_is_told() {
    let mut outcomes = run(1, 32, |_| assert_ne!(thread::thread_idx(), 9, "a planted panic"));
    let error = outcomes.remove(0).expect_err("it panics");
    assert_eq!((error.wrong, error.thread), (Wrong::Panic, 9));
    assert!(error.what.contains("a planted panic"), "{error}");
}

#[test]
fn a_schedule_is_its_seed() {
    let order = |seed| {
        let log = std::cell::RefCell::new(Vec::new());
        let launched = launch(&Options::new(3, 64, seed), Vec::new(), || {
            log.borrow_mut().push((thread::block_idx(), thread::thread_idx()));
        });
        assert!(launched.is_ok());
        log.into_inner()
    };
    assert_eq!(order(5), order(5));
    assert_ne!(order(5), order(6));
}

#[test]
fn a_poller_wakes_for_whatever_it_polls() {
    // Counters that had come already leave nothing behind: the thread sleeps on the one it still waits for.
    let report = passes(2, 32, |place| {
        if thread::block_idx() == 0 {
            place.signal(0);
            place.signal(1);
            if thread::thread_idx() == 0 {
                place.wait(3, 32, true);
            }
            place.signal(2);
        } else {
            for counter in 0..3 {
                if counter == 2 {
                    place.signal(3);
                }
                // SAFETY: a word of the launch's counters; a second word is polled beside it, as a fault flag is.
                unsafe {
                    let word = |at: usize| place.counters.wrapping_add(at).cast_const();
                    while atomic::load_relaxed(word(counter)) < 32 || atomic::load_relaxed(word(3)) > 99 {
                        thread::sleep_ns(20);
                    }
                    if counter != 1 {
                        atomic::load_acquire(word(counter));
                    }
                }
            }
        }
    });
    assert_eq!(report.stall, None);
}

/// Two warps that meet, one that serves, 4 KiB of tiles.
const COPIES: Options = Options { blocks: 1, threads: 64, service_warps: 1, tile_bytes: 4096, seed: 0, began_ns: 1 };

const FULL: u32 = 0;
const EMPTY: u32 = 1;

fn is_loader() -> bool {
    thread::thread_idx() == 64
}

/// Waits for phase `phase` of `barrier`.
fn await_phase(barrier: u32, phase: u32) {
    // SAFETY: see above.
    while !unsafe { mbarrier::try_wait(barrier, phase & 1) } {}
}

/// A ring of one slot: the service warp's first lane copies 512 bytes of `constant` `rounds` times, the others read
/// them. What may be left out?
#[derive(Clone, Copy)]
struct Ring {
    rounds: u32,
    expected: u32,
    copied: u32,
    wait_full: bool,
    wait_empty: bool,
    warp_sync: bool,
    arrivals: u32,
    fence_init: bool,
    flip: bool,
}

const RING: Ring = Ring {
    rounds: 3,
    expected: 512,
    copied: 512,
    wait_full: true,
    wait_empty: true,
    warp_sync: true,
    arrivals: 2,
    fence_init: true,
    flip: true,
};

fn ring(how: Ring) -> impl Fn(Place) {
    move |place| {
        let me = thread::thread_idx();
        // The mbarriers are made by a thread that meets, and said to be so by a named barrier of all.
        // SAFETY: see above.
        unsafe {
            if me == 0 {
                mbarrier::init(FULL, 1);
                mbarrier::init(EMPTY, how.arrivals);
            }
            if me == 64 {
                mbarrier::init(2, 1);
            }
            if how.fence_init {
                mbarrier::fence();
            }
            thread::sync_some(1, 96);
            for round in 0..how.rounds {
                let phase = if how.flip { round } else { 0 };
                if is_loader() {
                    if how.wait_empty && round > 0 {
                        await_phase(EMPTY, round - 1);
                    }
                    mbarrier::arrive_expect(FULL, how.expected);
                    bulk::copy(1024, place.constant.wrapping_add(128).cast(), how.copied, FULL);
                } else if me < 64 {
                    if how.wait_full {
                        await_phase(FULL, phase);
                    }
                    assert_eq!(bulk::load16(1024 + 16 * (me % 32)), [7; 4]);
                    assert_eq!(bulk::load4(1024 + 4 * me), 7);
                    if how.warp_sync {
                        warp::sync();
                    }
                    if me % 32 == 0 {
                        mbarrier::arrive(EMPTY);
                    }
                }
            }
            if is_loader() {
                await_phase(EMPTY, how.rounds - 1);
            }
        }
    }
}

fn aligned(body: impl Fn(Place)) -> impl Fn(Place) {
    // The constants start where bulk copies may.
    move |place| {
        let skip = place.constant.align_offset(16);
        body(Place { constant: place.constant.wrapping_add(skip), ..place })
    }
}

#[test]
fn bulk_copies_through_a_ring() {
    let report = passes_with(COPIES, aligned(ring(RING)));
    assert_eq!((report.copies, report.bytes_copied, report.peak_in_flight), (3, 1536, 512));
    assert_eq!(report.stall, None);
}

#[test]
fn wrong_transaction_counts() {
    finds_with(
        Wrong::Transactions,
        "lacks 0 arrivals and 16 bytes",
        COPIES,
        aligned(ring(Ring { expected: 528, ..RING })),
    );
    finds_with(Wrong::Transactions, "bytes more than", COPIES, aligned(ring(Ring { expected: 496, ..RING })));
    // None at all: the phase ends without the bytes, and whoever waits reads too early.
    let none = aligned(ring(Ring { expected: 0, ..RING }));
    for outcome in run_with(COPIES, none) {
        let error = outcome.expect_err("a planted bug");
        assert!(matches!(error.wrong, Wrong::Transactions | Wrong::Race), "{error}");
    }
    finds_with(Wrong::Transactions, "at most", COPIES, aligned(ring(Ring { expected: 1 << 20, ..RING })));
    // A copy that nobody waits for is still under way when its block ends.
    finds_with(
        Wrong::Transactions,
        "under way",
        COPIES,
        aligned(|place| {
            // SAFETY: see above.
            unsafe {
                if thread::thread_idx() == 64 {
                    mbarrier::init(FULL, 1);
                    mbarrier::fence();
                    bulk::copy(0, place.constant.cast(), 512, FULL);
                }
            }
        }),
    );
}

#[test]
fn a_parity_that_means_another_phase() {
    // The parity is never flipped: the first wait's phase is taken for the second's.
    for outcome in run_with(COPIES, aligned(ring(Ring { flip: false, ..RING }))) {
        let error = outcome.expect_err("a planted bug");
        assert!(matches!(error.wrong, Wrong::Mbarrier | Wrong::Race), "{error}");
    }
    // A thread that does not wait on every phase may wait for one that has long been over.
    finds_with(Wrong::Mbarrier, "has seen 0 of its phases end, but 2 have", COPIES, |_| {
        let me = thread::thread_idx();
        // SAFETY: see above.
        unsafe {
            if me == 0 {
                mbarrier::init(FULL, 1);
            }
            thread::sync_some(1, 96);
            if is_loader() {
                mbarrier::arrive(FULL);
                await_phase(FULL, 0);
                mbarrier::arrive(FULL);
                await_phase(FULL, 1);
            }
            thread::sync_some(1, 96);
            if me == 0 {
                await_phase(FULL, 0);
            }
        }
    });
}

#[test]
fn mbarriers_that_are_not_ready() {
    finds_with(Wrong::Mbarrier, "before it is initialised", COPIES, |_| {
        // SAFETY: see above.
        unsafe { mbarrier::arrive(5) };
    });
    finds_with(Wrong::Mbarrier, "second time", COPIES, |_| {
        if is_loader() {
            // SAFETY: see above.
            unsafe {
                mbarrier::init(FULL, 1);
                mbarrier::init(FULL, 1);
            }
        }
    });
    for outcome in run_with(COPIES, |_| {
        // SAFETY: see above.
        unsafe {
            if thread::thread_idx() == 0 {
                mbarrier::init(FULL, 1);
            } else if is_loader() {
                mbarrier::arrive(FULL);
            }
        }
    }) {
        let error = outcome.expect_err("a planted bug");
        assert!(matches!(error.wrong, Wrong::Mbarrier | Wrong::Race), "{error}");
    }
    finds_with(Wrong::Proxy, "no fence", COPIES, aligned(ring(Ring { fence_init: false, ..RING })));
}

#[test]
fn races_with_bulk_copies() {
    // Reading without waiting.
    finds_with(Wrong::Race, "a bulk copy to mbarrier 0", COPIES, aligned(ring(Ring { wait_full: false, ..RING })));
    // Filling what is still read, or not yet full.
    for outcome in run_with(COPIES, aligned(ring(Ring { wait_empty: false, ..RING }))) {
        let error = outcome.expect_err("a planted bug");
        assert!(matches!(error.wrong, Wrong::Race | Wrong::Mbarrier), "{error}");
    }
    // One lane arrives for all, but they have not met.
    finds_with(Wrong::Race, "a bulk copy to tile byte", COPIES, aligned(ring(Ring { warp_sync: false, ..RING })));
    // One warp's arrival is not two warps'.
    for outcome in run_with(COPIES, aligned(ring(Ring { arrivals: 1, ..RING }))) {
        let error = outcome.expect_err("a planted bug");
        assert!(matches!(error.wrong, Wrong::Race | Wrong::Mbarrier | Wrong::Transactions), "{error}");
    }
    // Nobody waits for as many.
    finds_with(
        Wrong::Deadlock,
        "mbarrier 1 in phase 0 lacks 1 arrivals",
        COPIES,
        aligned(ring(Ring { arrivals: 3, ..RING })),
    );
}

#[test]
fn a_copy_of_what_this_launch_has_written() {
    let copies = |acquire: bool, fence: bool| {
        aligned(move |place: Place| {
            let skip = place.data.align_offset(16) as u32;
            let me = thread::thread_idx();
            // SAFETY: see above.
            unsafe {
                if me < 64 {
                    memory::store(place.data(skip + me), me);
                    thread::sync();
                    if me == 0 {
                        place.signal(0);
                    }
                } else if is_loader() {
                    mbarrier::init(FULL, 1);
                    mbarrier::fence();
                    place.wait(0, 1, acquire);
                    if fence {
                        bulk::fence_proxy();
                    }
                    mbarrier::arrive_expect(FULL, 256);
                    bulk::copy(0, place.data(skip).cast(), 256, FULL);
                    await_phase(FULL, 0);
                    assert_eq!(bulk::load2(4 * 9), 9);
                }
            }
        })
    };
    passes_with(COPIES, copies(true, true));
    finds_with(Wrong::Race, "written by thread", COPIES, copies(false, true));
    finds_with(Wrong::Proxy, "without a proxy fence", COPIES, copies(true, false));
}

#[test]
fn bulk_copies_out_of_place() {
    let copy = |to: u32, skip: usize, bytes: u32| {
        aligned(move |place: Place| {
            if is_loader() {
                // SAFETY: see above.
                unsafe {
                    mbarrier::init(FULL, 1);
                    mbarrier::fence();
                    mbarrier::arrive_expect(FULL, bytes);
                    bulk::copy(to, place.constant.wrapping_byte_add(skip).cast(), bytes, FULL);
                    await_phase(FULL, 0);
                }
            }
        })
    };
    passes_with(COPIES, copy(4096 - 64, 16, 64));
    finds_with(Wrong::OutOfBounds, "of 4096", COPIES, copy(4096 - 48, 16, 64));
    finds_with(Wrong::OutOfBounds, "from constant", COPIES, copy(0, 1024 - 32, 64));
    finds_with(Wrong::Misaligned, "to tile byte 8", COPIES, copy(8, 0, 64));
    finds_with(Wrong::Misaligned, "of 40 bytes", COPIES, copy(0, 0, 40));
    finds_with(Wrong::Misaligned, "from constant", COPIES, copy(0, 8, 64));
    finds_with(Wrong::Poison, "which no copy has filled", COPIES, |_| {
        // SAFETY: see above.
        unsafe { bulk::load16(64) };
    });
    finds_with(Wrong::OutOfBounds, "prefetch", COPIES, |place| {
        // SAFETY: see above.
        unsafe { bulk::prefetch(place.constant.wrapping_add(place.constant.align_offset(16)).cast(), 4096) };
    });
}

/// What all threads of a block have read, of which some never meet at the block's own barrier.
#[test]
fn a_barrier_of_all_threads() {
    let overwrites = |all: bool| {
        move |place: Place| {
            let me = thread::thread_idx();
            // SAFETY: see above.
            unsafe {
                if me == 0 {
                    memory::store(place.data(5), 1);
                }
                thread::sync_some(1, 96);
                assert_eq!(memory::load(place.data(5)), 1);
                if all {
                    thread::sync_some(1, 96);
                } else if me < 64 {
                    thread::sync();
                }
                if me == 0 {
                    memory::store(place.data(5), 2);
                }
            }
        }
    };
    passes_with(COPIES, overwrites(true));
    let errors = run_with(COPIES, overwrites(false));
    assert!(errors.iter().any(|outcome| outcome.as_ref().is_err_and(|error| error.wrong == Wrong::Race)));
}

#[test]
fn named_barriers() {
    // Two pairs of warps, each at its own barrier.
    let pairs = |first: u32| {
        move |_: Place| {
            let me = thread::thread_idx();
            // SAFETY: see above.
            unsafe {
                shared::store(me, me);
                thread::sync_some(first + me / 64, 64);
                assert_eq!(shared::load(me ^ 33), me ^ 33);
            }
        }
    };
    passes(1, 128, pairs(1));
    // At one barrier any two warps meet, not the right ones.
    let error = run(1, 128, |_| {
        let me = thread::thread_idx();
        // SAFETY: see above.
        unsafe {
            shared::store(me, me);
            thread::sync_some(1, 64);
            shared::load(me ^ 33);
        }
    });
    let early = |error: &SimtError| matches!(error.wrong, Wrong::Race | Wrong::Poison);
    assert!(error.iter().any(|outcome| outcome.as_ref().is_err_and(|error| early(error))));
    finds(Wrong::Divergence, "no such barrier", 1, 64, |_| {
        // SAFETY: see above.
        unsafe { thread::sync_some(16, 64) };
    });
    finds(Wrong::Divergence, "they have ended", 1, 64, |_| {
        if thread::thread_idx() < 32 {
            // SAFETY: see above.
            unsafe { thread::sync_some(1, 96) };
        }
    });
}

#[test]
fn a_warps_matrix_product() {
    passes(1, 32, |_| {
        let lane = thread::thread_idx();
        let bf16 = |x: f32| u32::from(half::bf16::from_f32(x).to_bits());
        // a[i, k] = i + k / 16, b[k, n] = k - n: small numbers that bf16 has.
        let a = |row: u32, k: u32| row as f32 + (k % 2) as f32;
        let b = |k: u32, n: u32| k as f32 - n as f32;
        // SAFETY: see above.
        unsafe {
            // Row r of a at words 8r, in memory as matrices have them.
            for at in (lane..128).step_by(32) {
                let (row, pair) = (at / 8, at % 8);
                shared::store(at, bf16(a(row, 2 * pair)) | bf16(a(row, 2 * pair + 1)) << 16);
            }
            warp::sync();
            let fragment = warp::ldmatrix(8 * (lane % 16) + 4 * (lane / 16));
            let (g, t) = (lane / 4, lane % 4);
            let pair = |k: u32| bf16(b(k, g)) | bf16(b(k + 1, g)) << 16;
            let d = warp::mma(fragment, [pair(2 * t), pair(2 * t + 8)], [0.5; 4]);
            for (i, d) in d.into_iter().enumerate() {
                let (row, n) = (g + i as u32 / 2 * 8, 2 * t + i as u32 % 2);
                let expected: f32 = (0..16).map(|k| a(row, k) * b(k, n)).sum();
                assert_eq!(d, expected + 0.5, "row {row}, column {n}");
            }
        }
    });
    passes(1, 32, |_| {
        let lane = thread::thread_idx();
        // a[i, k] = 7 i - 3 k, b[k, n] = 3 k - 13 n: of either sign.
        let (a, b) = (|row: u32, k: u32| 7 * row as i32 - 3 * k as i32, |k: u32, n: u32| 3 * k as i32 - 13 * n as i32);
        let four = |one: &dyn Fn(u32) -> i32| u32::from_le_bytes(core::array::from_fn(|i| one(i as u32) as i8 as u8));
        let (g, t) = (lane / 4, lane % 4);
        let of_a = |row: u32, k: u32| four(&|i| a(row, k + i));
        let of_b = |k: u32| four(&|i| b(k + i, g));
        let (k, more) = (4 * t, 4 * t + 16);
        // SAFETY: see above.
        let d = unsafe {
            warp::mma_bytes(
                [of_a(g, k), of_a(g + 8, k), of_a(g, more), of_a(g + 8, more)],
                [of_b(k), of_b(more)],
                [9; 4],
            )
        };
        for (i, d) in d.into_iter().enumerate() {
            let (row, n) = (g + i as u32 / 2 * 8, 2 * t + i as u32 % 2);
            let expected: i32 = (0..32).map(|k| a(row, k) * b(k, n)).sum();
            assert_eq!(d, expected + 9, "row {row}, column {n}");
        }
        assert_eq!(scalar::dot_bytes(0x7f80_01ff, 0x02fe_0305, -4), 127 * 2 + 128 * 2 + 3 - 5 - 4);
        assert_eq!(scalar::permute(0x4433_2211, 0x8877_6655, 0xffff_e8c0), 0x11);
        assert_eq!(scalar::permute(0x4433_2211, 0x8877_6655, 0x7f32), 0x88ff_4433);
        assert_eq!(scalar::low_bytes([0x0a1b, 0xff02c3, 0xd4, 0x77_00e5]), [0xe5d4_c31b, 0x0000_020a]);
    });
    finds(Wrong::Divergence, "Mma", 1, 32, |_| {
        if thread::thread_idx() != 3 {
            // SAFETY: see above.
            unsafe { warp::mma([0; 4], [0; 2], [0.0; 4]) };
        }
    });
    // A warp that has not met reads what another lane may still be writing.
    finds(Wrong::Race, "of shared word", 1, 32, |_| {
        let lane = thread::thread_idx();
        // SAFETY: see above.
        unsafe {
            shared::store16(4 * lane, [lane; 4]);
            thread::sync();
            shared::store16(4 * lane, [lane; 4]);
            warp::ldmatrix(4 * (lane ^ 1));
        }
    });
}

/// Four warps that multiply, and 26 KiB of tiles.
const GROUP: Options =
    Options { blocks: 1, threads: 128, service_warps: 0, tile_bytes: 26 << 10, seed: 0, began_ns: 1 };

/// 64 and 128 rows brought to the tiles and multiplied, twice. What may be left out?
#[derive(Clone, Copy)]
struct Multiply {
    wait: bool,
    fence: bool,
    meet: bool,
    begin: bool,
    commit: bool,
    wait_products: bool,
    same: bool,
    aligned: bool,
    wait_last: bool,
}

const MULTIPLY: Multiply = Multiply {
    wait: true,
    fence: true,
    meet: true,
    begin: true,
    commit: true,
    wait_products: true,
    same: true,
    aligned: true,
    wait_last: true,
};

fn multiply(how: Multiply) -> impl Fn(Place) {
    move |place| {
        let me = thread::thread_idx();
        let first = if how.aligned { 0 } else { 128 };
        let source: *const u8 = place.constant.wrapping_add(place.constant.align_offset(16)).cast();
        // SAFETY: see above.
        unsafe {
            let mut sums = warpgroup::Sums::<64>::zero();
            for _ in 0..2 {
                for unit in (me..192 * 8).step_by(128) {
                    let (row, chunk) = (unit / 8, unit % 8);
                    // The last eight columns are nothing.
                    copy::sixteen(first + warpgroup::place(row, chunk), source.add(16), chunk < 7);
                }
                copy::commit();
                if how.wait {
                    copy::wait::<0>();
                }
                if how.fence {
                    copy::fence_tiles();
                }
                if how.meet {
                    thread::sync();
                }
                let a = warpgroup::Matrix::at(first);
                let b = warpgroup::Matrix::at(first + if how.same || me < 32 { 64 * 128 } else { 0 });
                if how.begin {
                    warpgroup::begin();
                }
                for step in 0..4 {
                    sums.add(a.step(step), b.step(step));
                }
                if how.commit {
                    warpgroup::commit();
                }
                if how.wait_products {
                    warpgroup::wait::<0>();
                    thread::sync();
                }
            }
            let sums = sums.take();
            // The words' high halves are 0, and 7 in the low ones is a denormal: squared it is nothing.
            assert!(sums.iter().all(|sum| *sum == 0.0), "{sums:?}");
            if !how.wait_last {
                copy::sixteen(first, source, true);
            }
        }
    }
}

#[test]
fn a_warpgroups_products() {
    let report = passes_with(GROUP, multiply(MULTIPLY));
    assert_eq!(report.products, 2 * 4 * 4);
    let finds = |wrong, words, how| {
        finds_with(wrong, words, GROUP, multiply(how));
    };
    finds(Wrong::Poison, "nobody has waited for", Multiply { wait: false, fence: false, ..MULTIPLY });
    finds(Wrong::Proxy, "has not fenced it", Multiply { fence: false, ..MULTIPLY });
    finds(Wrong::Race, "of tile byte", Multiply { meet: false, ..MULTIPLY });
    finds(Wrong::Divergence, "outside a warpgroup's begin", Multiply { begin: false, ..MULTIPLY });
    finds(Wrong::Divergence, "before their products are committed", Multiply { commit: false, ..MULTIPLY });
    finds(Wrong::Race, "which a product still reads", Multiply { wait_products: false, ..MULTIPLY });
    finds(Wrong::Divergence, "differ in product", Multiply { same: false, ..MULTIPLY });
    finds(Wrong::Transactions, "copies that it has not waited for", Multiply { wait_last: false, ..MULTIPLY });
    finds(Wrong::Misaligned, "a multiple of 1024", Multiply { aligned: false, ..MULTIPLY });
}

/// Each element where its descriptor says, 64 x 64 by 128 x 64.
#[test]
fn a_warpgroups_sums() {
    let bf16 = |x: f32| u128::from(half::bf16::from_f32(x).to_bits());
    let a = |row: u32, k: u32| (row % 16) as f32 + (k % 3) as f32;
    let b = |row: u32, k: u32| (row % 11) as f32 - (k % 5) as f32;
    let chunk = |of: &dyn Fn(u32, u32) -> f32, row: u32, at: u32| {
        (0..8).rev().fold(0u128, |bits, i| bits << 16 | bf16(of(row, 8 * at + i)))
    };
    let mut matrices: Vec<u128> = (0..64 * 8).map(|at| chunk(&a, at / 8, at % 8)).collect();
    matrices.extend((0..128 * 8).map(|at| chunk(&b, at / 8, at % 8)));
    let source = matrices.as_mut_ptr();
    // SAFETY: the memory outlives the launch, which only reads it.
    let allocation = unsafe { Allocation::new("matrices", source.cast(), 16 * matrices.len(), Access::Constant) };
    let launched = launch(&GROUP, vec![allocation], || {
        let me = thread::thread_idx();
        // SAFETY: see above.
        unsafe {
            for unit in (me..192 * 8).step_by(128) {
                let from = source.wrapping_add(unit as usize).cast();
                copy::sixteen(warpgroup::place(unit / 8, unit % 8), from, true);
            }
            copy::commit();
            copy::wait::<0>();
            copy::fence_tiles();
            thread::sync();
            let matrix = |row: u32| warpgroup::Matrix::at(row * warpgroup::ROW);
            let mut sums = warpgroup::Sums::<64>::zero();
            warpgroup::begin();
            for step in 0..4 {
                sums.add(matrix(0).step(step), matrix(64).step(step));
            }
            warpgroup::commit();
            let (warp, g, t) = (me / 32, me % 32 / 4, me % 4);
            for (i, sum) in (0..).zip(sums.take()) {
                let (row, column) = (16 * warp + g + 8 * (i / 2 % 2), 8 * (i / 4) + 2 * t + i % 2);
                let expected: f32 = (0..64).map(|k| a(row, k) * b(column, k)).sum();
                assert_eq!(sum, expected, "row {row}, column {column}");
            }
        }
    });
    launched.unwrap_or_else(|error| panic!("{error}"));
}

/// Each element where its descriptor says, 64 x 32 in registers by 32 x 128, which lie as they are read for other
/// products.
#[test]
fn a_warpgroups_sums_with_a_transposed_matrix() {
    let bf16 = |x: f32| half::bf16::from_f32(x).to_bits();
    let a = |row: u32, k: u32| (row % 16) as f32 + (k % 3) as f32;
    let b = |k: u32, column: u32| (column % 11) as f32 - (k % 5) as f32;
    let chunk = |k: u32, at: u32| (0..8).rev().fold(0u128, |bits, i| bits << 16 | u128::from(bf16(b(k, 8 * at + i))));
    let mut matrices: Vec<u128> = (0..32 * 16).map(|at| chunk(at / 16, at % 16)).collect();
    let source = matrices.as_mut_ptr();
    // SAFETY: the memory outlives the launch, which only reads it.
    let allocation = unsafe { Allocation::new("matrix", source.cast(), 16 * matrices.len(), Access::Constant) };
    let launched = launch(&GROUP, vec![allocation], || {
        let me = thread::thread_idx();
        let (warp, g, t) = (me / 32, me % 32 / 4, me % 4);
        // SAFETY: see above.
        unsafe {
            // The second 64 columns begin 8192 bytes after the first.
            for unit in (me..32 * 16).step_by(128) {
                let (k, at) = (unit / 16, unit % 16);
                let to = at / 8 * 8192 + warpgroup::place(k, at % 8);
                copy::sixteen(to, source.wrapping_add(unit as usize).cast(), true);
            }
            copy::commit();
            copy::wait::<0>();
            copy::fence_tiles();
            thread::sync();
            let matrix = warpgroup::Transposed::at(0, 8192);
            let mut sums = warpgroup::Sums::<64>::of([1.0; 64]);
            warpgroup::begin();
            for step in 0..2 {
                let of_a = [0, 1, 2, 3].map(|n| {
                    let (row, k) = (16 * warp + g + 8 * (n % 2), 16 * step + 2 * t + 8 * (n / 2));
                    u32::from(bf16(a(row, k))) | u32::from(bf16(a(row, k + 1))) << 16
                });
                sums.add_transposed(of_a, matrix.step(step));
            }
            warpgroup::commit();
            for (i, sum) in (0..).zip(sums.take()) {
                let (row, column) = (16 * warp + g + 8 * (i / 2 % 2), 8 * (i / 4) + 2 * t + i % 2);
                let expected: f32 = 1.0 + (0..32).map(|k| a(row, k) * b(k, column)).sum::<f32>();
                assert_eq!(sum, expected, "row {row}, column {column}");
            }
        }
    });
    launched.unwrap_or_else(|error| panic!("{error}"));
}

/// Said with the numbers, before any thread is made.
#[cfg(target_os = "linux")]
#[test]
fn more_stacks_than_a_process_may_have_are_refused() {
    let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").expect("Linux has it");
    let limit: u32 = limit.trim().parse().expect("a number");
    let options = Options::new(limit.div_ceil(2048), 1024, 0);
    let error = launch(&options, Vec::new(), || unreachable!("no thread runs")).expect_err("refused");
    assert_eq!(error.wrong, Wrong::NoStacks);
    let said = error.to_string();
    for word in
        [format!("{} simulated threads", options.blocks * 1024), format!("may have {limit} "), "--threads".into()]
    {
        assert!(said.contains(&word), "{said:?} should say {word:?}");
    }
}
