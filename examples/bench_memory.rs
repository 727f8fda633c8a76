//! What packing and scheduling cost and reach on this machine.
//!
//! `cargo run --release --example bench_memory [-- FILE.csv...]`: the minimalloc benchmarks at their capacity, every
//! file named (peak over load), a million synthetic buffers, and the scheduler at scale. Every result is judged before
//! it is printed.

use std::time::{Duration, Instant};

use perpetua::memory::pack::{self, Verdict};
use perpetua::memory::{Buffer, Problem, check, csv::Table, lower_bound};
use perpetua::schedule::plain::{self, Graph, Kind, Op};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");
    let mut files = vec![format!("{fixtures}/dsa/G_1.csv"), format!("{fixtures}/dsa/resnet50.csv")];
    files.extend(std::env::args().skip(1));
    // What cannot be read ends the program before anything is measured.
    let files = files.into_iter().map(|file| Ok((read(&file)?, file))).collect::<Result<Vec<_>, String>>()?;
    let mut total = Duration::ZERO;
    for name in "ABCDEFGHIJK".chars() {
        let buffers = read(&format!("{fixtures}/minimalloc/{name}.1048576.csv"))?;
        let problem = Problem::new(buffers, 1_048_576).expect("a benchmark is a problem");
        let start = Instant::now();
        let verdict = pack::pack(&problem, Duration::from_secs(30));
        let elapsed = start.elapsed();
        total += elapsed;
        match verdict {
            Verdict::Solved(placement) => {
                check::check(problem.buffers(), 1_048_576, &placement).expect("found placements keep the laws");
                println!("minimalloc {name}: {elapsed:.2?}");
            }
            other => println!("minimalloc {name}: {other:?} in {elapsed:.2?}"),
        }
    }
    println!("minimalloc, all: {total:.2?}");
    let start = Instant::now();
    let c = pack::minimise(&read(&format!("{fixtures}/minimalloc/C.1048576.csv"))?, Duration::from_secs(30));
    println!("minimise C: {} (optimal: {}) in {:.2?}", c.placement.peak_bytes, c.is_optimal(), start.elapsed());

    for (buffers, file) in &files {
        arena(file, buffers);
    }
    arena("a million synthetic buffers", &synthetic(1_000_000));

    for n_ops in [10_000, 100_000, 1_000_000] {
        let graph = decode(n_ops / 2, 13);
        let start = Instant::now();
        let schedule = plain::schedule(&graph);
        let elapsed = start.elapsed();
        plain::check::check(&graph, &schedule).expect("schedules keep the laws");
        let bound = graph.lower_bound_cycles();
        println!(
            "schedule {n_ops} ops: {elapsed:.2?}, makespan {} ({:.2} % over the bound, {} without prefetch), {} spills",
            schedule.makespan,
            (schedule.makespan as f64 / bound as f64 - 1.0) * 100.0,
            schedule.without_prefetch_makespan,
            schedule.spills.len()
        );
    }
    Ok(())
}

fn read(file: &str) -> Result<Vec<Buffer>, String> {
    let text = std::fs::read_to_string(file).map_err(|error| format!("{file}: {error}"))?;
    Ok(Table::parse(&text).map_err(|error| format!("{file}: {error}"))?.buffers)
}

fn arena(name: &str, buffers: &[Buffer]) {
    let start = Instant::now();
    let placement = pack::arena(buffers);
    let elapsed = start.elapsed();
    check::check(buffers, u64::MAX, &placement).expect("placements keep the laws");
    let over = placement.peak_bytes as f64 / lower_bound(buffers) as f64 - 1.0;
    println!("arena {name}: {} buffers in {elapsed:.2?}, peak {:.3} % over the load", buffers.len(), over * 100.0);
}

/// Lives of all lengths, mostly short, and sizes of all magnitudes: the shape of a compiler's intermediates.
fn synthetic(n: u64) -> Vec<Buffer> {
    let mut state = 1u64;
    let mut random = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        state >> 33
    };
    let buffer = |i| {
        let life = 1 + (1u64 << (random() % 12)) * (random() % 8);
        Buffer::new(i, i + life, 64 << (random() % 14))
    };
    (0..n).map(buffer).collect()
}

/// Tiles through a ring, as a worker decodes: every compute op reads one tile and the result before it.
fn decode(n_tiles: u32, ring: u64) -> Graph {
    let mut ops = Vec::with_capacity(2 * n_tiles as usize);
    for idx in 0..n_tiles {
        let op = |name, kind, bytes, cycles, inputs| Op { name, kind, bytes, cycles, inputs, spill_cycles: 450 };
        ops.push(op(format!("w{idx}"), Kind::Data, 16384, 450, vec![]));
        let inputs = if idx == 0 { vec![0] } else { vec![2 * idx - 1, 2 * idx] };
        let cycles = if idx % 32 == 0 { 2000 } else { 150 };
        ops.push(op(format!("c{idx}"), Kind::Compute, 64, cycles, inputs));
    }
    Graph::new(ring * 16384 + 128, 64, ops).expect("two tiles and two results fit")
}
