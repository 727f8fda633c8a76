//! Prints what packing and scheduling cost and reach.
use perpetua::memory::{check, csv::Table, lower_bound, pack, pack::Verdict, Problem};
use std::time::{Duration, Instant};

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if args.len() > 1 && args[1] == "large" {
        for f in &args[2..] {
            let t = Table::parse(&std::fs::read_to_string(f).unwrap()).unwrap();
            let s = Instant::now();
            let p = pack::arena(&t.buffers);
            let e = s.elapsed();
            let lb = lower_bound(&t.buffers);
            check::check(&t.buffers, u64::MAX, &p).unwrap();
            println!("{f} n {} {:?} peak/load {:.3}%", t.buffers.len(), e, (p.peak_bytes as f64 / lb as f64 - 1.0) * 100.0);
        }
        return;
    }
    let mut total = Duration::ZERO;
    for name in "ABCDEFGHIJK".chars() {
        let t = Table::parse(&std::fs::read_to_string(format!("tests/fixtures/minimalloc/{name}.1048576.csv")).unwrap()).unwrap();
        let p = Problem::new(t.buffers.clone(), 1048576).unwrap();
        let s = Instant::now();
        let v = pack::pack(&p, Duration::from_secs(std::env::var("TO").map_or(20, |x| x.parse().unwrap())));
        let e = s.elapsed();
        total += e;
        match v {
            Verdict::Solved(p) => {
                check::check(&t.buffers, 1048576, &p).unwrap();
                println!("{name} solved {e:?} peak {}", p.peak_bytes)
            }
            o => println!("{name} {o:?} {e:?}"),
        }
    }
    println!("total {total:?}");
}
