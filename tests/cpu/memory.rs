//! Packing, judged by its checker, by brute force and by what must not change a verdict.

use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::time::Duration;

use perpetua::memory::pack::{MAX_SEARCH_BUFFERS, Verdict, arena, minimise, pack};
use perpetua::memory::{Buffer, Placement, Problem, check, csv::Table, linear_scan, lower_bound};
use proptest::prelude::*;

/// Long enough that no small problem ever meets it.
const LONG: Duration = Duration::from_secs(600);

fn buffers(n: RangeInclusive<usize>, n_instants: u64, max_size: u64) -> impl Strategy<Value = Vec<Buffer>> {
    lived(n, n_instants, n_instants / 2, max_size)
}

fn lived(
    n: RangeInclusive<usize>,
    n_instants: u64,
    max_life: u64,
    max_size: u64,
) -> impl Strategy<Value = Vec<Buffer>> {
    let buffer = (0..n_instants, 1..=max_life, 1..=max_size).prop_map(|(lower, life, size_bytes)| Buffer {
        lower,
        upper: lower + life,
        size_bytes,
        alignment: 1,
    });
    proptest::collection::vec(buffer, n)
}

fn aligned(n: RangeInclusive<usize>) -> impl Strategy<Value = Vec<Buffer>> {
    let alignments = proptest::collection::vec(prop_oneof![Just(1u64), Just(2), Just(3), Just(8)], *n.end());
    (buffers(n, 8, 9), alignments).prop_map(|(buffers, alignments)| {
        buffers.into_iter().zip(alignments).map(|(buffer, alignment)| buffer.aligned(alignment)).collect()
    })
}

/// Whether there is a placement, by going through time: the ways in which the buffers alive so far can lie, each birth
/// multiplied by every offset where it fits. Two ways that agree on the buffers still alive are one. Shares nothing
/// with the search but the definition of overlap, and assumes nothing of how good placements look.
fn fits_by_trying_all(buffers: &[Buffer], capacity_bytes: u64) -> bool {
    let mut by_birth = buffers.to_vec();
    by_birth.sort_by_key(|b| b.lower);
    // A way: offset and buffer for each one alive, in the order of births.
    let mut ways = HashSet::from([Vec::<(u64, usize)>::new()]);
    for (i, born) in by_birth.iter().enumerate() {
        let mut next = HashSet::new();
        for mut way in ways {
            way.retain(|&(_, j)| by_birth[j].upper > born.lower);
            for offset in (0..=capacity_bytes.saturating_sub(born.size_bytes)).step_by(born.alignment as usize) {
                let end = offset + born.size_bytes;
                let is_free = way.iter().all(|&(o, j)| end <= o || o + by_birth[j].size_bytes <= offset);
                if is_free && end <= capacity_bytes {
                    next.insert(way.iter().copied().chain([(offset, i)]).collect());
                }
            }
        }
        ways = next;
    }
    !ways.is_empty()
}

/// The lowest capacity that all ways of placing allow.
fn brute_force(buffers: &[Buffer]) -> u64 {
    (lower_bound(buffers)..).find(|&capacity| fits_by_trying_all(buffers, capacity)).unwrap()
}

fn fits(buffers: Vec<Buffer>, capacity_bytes: u64) -> bool {
    let problem = Problem::new(buffers, capacity_bytes).unwrap();
    match pack(&problem, LONG) {
        Verdict::Solved(placement) => {
            assert_eq!(check::check_pairs(problem.buffers(), capacity_bytes, &placement), Ok(()));
            true
        }
        Verdict::Infeasible(_) => false,
        Verdict::NotFound => panic!("small problems are settled"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_search_agrees_with_brute_force(buffers in lived(1..=12, 10, 3, 6)) {
        let lowest = brute_force(&buffers);
        prop_assert!(fits(buffers.clone(), lowest));
        prop_assert!(!fits(buffers.clone(), lowest - 1));
        let minimum = minimise(&buffers, LONG);
        prop_assert!(minimum.is_optimal());
        prop_assert_eq!(minimum.placement.peak_bytes, lowest);
    }

    #[test]
    fn alignments_agree_with_brute_force(buffers in aligned(1..=7)) {
        let lowest = brute_force(&buffers);
        prop_assert!(fits(buffers.clone(), lowest));
        prop_assert!(!fits(buffers, lowest - 1));
    }

    /// Dense problems, so that the load often cannot be reached; the verdicts must not depend on how they are put.
    #[test]
    fn verdicts_survive_permutation_scaling_and_reversal(buffers in buffers(2..=12, 6, 12), seed in any::<u64>(), slack in 0u64..3) {
        let capacity = lower_bound(&buffers) + slack;
        let verdict = fits(buffers.clone(), capacity);
        let mut permuted = buffers.clone();
        permuted.rotate_left(seed as usize % buffers.len());
        permuted.swap(0, (seed >> 32) as usize % buffers.len());
        prop_assert_eq!(fits(permuted, capacity), verdict);
        let scaled = buffers.iter().map(|b| Buffer { size_bytes: b.size_bytes * 1000, ..*b }).collect();
        prop_assert_eq!(fits(scaled, capacity * 1000 + 999), verdict);
        let reversed = buffers.iter().map(|b| Buffer { lower: 100 - b.upper, upper: 100 - b.lower, ..*b }).collect();
        prop_assert_eq!(fits(reversed, capacity), verdict);
    }

    #[test]
    fn heuristics_keep_the_laws(buffers in aligned(0..=60)) {
        let load = lower_bound(&buffers);
        for placement in [arena(&buffers), linear_scan::place(&buffers)] {
            prop_assert_eq!(check::check_pairs(&buffers, placement.peak_bytes, &placement), Ok(()));
            prop_assert!(placement.peak_bytes >= load);
        }
    }

    /// The sweep and the pairs agree on placements that are mostly wrong.
    #[test]
    fn both_judges_agree(buffers in aligned(1..=8), offsets in proptest::collection::vec(0u64..40, 8)) {
        let offsets: Vec<u64> = offsets[..buffers.len()].to_vec();
        let peak_bytes = buffers.iter().zip(&offsets).map(|(b, o)| b.size_bytes + o).max().unwrap();
        let placement = Placement { offsets, peak_bytes };
        prop_assert_eq!(check::check(&buffers, 30, &placement).is_ok(), check::check_pairs(&buffers, 30, &placement).is_ok());
    }

    #[test]
    fn no_text_makes_the_reader_panic(text in "(id|lower|upper|size|,|\n|-|[0-9]{1,22}|[a-z]| )*") {
        let _ = Table::parse(&text);
    }
}

/// Rectangles cut out of a square by guillotine cuts fit it exactly: an optimum known by construction.
#[test]
fn tilings_are_packed_without_waste() {
    let mut state = 7u64;
    let mut random = move |below: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % below
    };
    for _ in 0..20 {
        let mut rectangles = vec![(0u64, 64u64, 64u64)];
        while rectangles.len() < 24 {
            let idx = random(rectangles.len() as u64) as usize;
            let (lower, upper, size) = rectangles[idx];
            if random(2) == 0 && upper - lower > 1 {
                let cut = lower + 1 + random(upper - lower - 1);
                rectangles[idx] = (lower, cut, size);
                rectangles.push((cut, upper, size));
            } else if size > 1 {
                let cut = 1 + random(size - 1);
                rectangles[idx] = (lower, upper, cut);
                rectangles.push((lower, upper, size - cut));
            }
        }
        let buffers = rectangles.into_iter().map(|(lower, upper, size)| Buffer::new(lower, upper, size)).collect();
        assert!(fits(buffers, 64));
    }
}

fn fixture(path: &str) -> Table {
    let path = format!("{}/tests/fixtures/{path}", env!("CARGO_MANIFEST_DIR"));
    Table::parse(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn minimalloc_benchmarks_are_solved_at_their_capacity() {
    for name in "ABCDEFGHIJK".chars() {
        let table = fixture(&format!("minimalloc/{name}.1048576.csv"));
        let problem = Problem::new(table.buffers, 1_048_576).unwrap();
        let Verdict::Solved(placement) = pack(&problem, LONG) else { panic!("{name} has a placement") };
        assert_eq!(check::check(problem.buffers(), 1_048_576, &placement), Ok(()), "{name}");
    }
}

#[test]
fn the_minimum_of_c_is_its_load() {
    let minimum = minimise(&fixture("minimalloc/C.1048576.csv").buffers, LONG);
    assert!(minimum.is_optimal());
    assert_eq!(minimum.placement.peak_bytes, 1_039_360);
}

/// A part that the search is not given is left as the heuristics have it, however much time there is.
#[test]
fn a_part_too_large_for_the_search_takes_no_time() {
    let c = fixture("minimalloc/C.1048576.csv").buffers;
    let end = c.iter().map(|buffer| buffer.upper).max().unwrap();
    // Two at a time, from the middle of C's last instant on.
    let others = (0..MAX_SEARCH_BUFFERS as u64).map(|i| Buffer::new(end - 1 + i, end + 1 + i, 1));
    let buffers: Vec<Buffer> = c.into_iter().chain(others).collect();
    for timeout in [LONG, Duration::MAX] {
        let minimum = minimise(&buffers, timeout);
        assert_eq!(minimum.lower_bound_bytes, lower_bound(&buffers));
        assert!(!minimum.is_optimal(), "else nothing would be looked for");
    }
}

#[test]
fn the_example_has_no_slack() {
    let table = fixture("minimalloc/example-input.12.csv");
    assert!(fits(table.buffers.clone(), 12));
    assert!(!fits(table.buffers, 11));
}

/// Ratchet: these may improve silently, and worsen only with a reason in the same commit.
#[test]
fn arenas_of_real_models_stay_near_their_load() {
    for (name, most_permille) in [("G_1", 0), ("resnet50", 4)] {
        let buffers = fixture(&format!("dsa/{name}.csv")).buffers;
        let placement = arena(&buffers);
        assert_eq!(check::check(&buffers, u64::MAX, &placement), Ok(()));
        let load = lower_bound(&buffers);
        let over_permille = (placement.peak_bytes - load) as f64 / load as f64 * 1000.0;
        assert!(over_permille <= f64::from(most_permille), "{name}: {over_permille} permille over its load");
    }
}

#[test]
fn edges_of_the_range() {
    assert!(fits(vec![], 0));
    assert!(fits(vec![Buffer::new(0, u64::MAX, 0), Buffer::new(0, 1, 5)], 5), "a buffer of no bytes is nowhere");
    assert!(fits(vec![Buffer::new(0, u64::MAX, 1 << 60), Buffer::new(u64::MAX - 1, u64::MAX, 1 << 60)], 1 << 61));
    assert!(fits(vec![Buffer::new(0, 2, 1), Buffer::new(0, 2, 1).aligned(1 << 40)], 2), "the aligned one lies at 0");
    assert!(Problem::new(vec![Buffer::new(3, 3, 1)], 9).is_err());
    assert!(Problem::new(vec![Buffer::new(0, 1, u64::MAX)], 9).is_err());
}
