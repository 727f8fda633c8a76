//! `perpetua pack`: static memory packing of a CSV file.

use super::{at_least, name_of_text, note, read_text, seconds, writable, write_whole};
use std::error::Error;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use perpetua::memory::csv::Table;
use perpetua::memory::pack::{MAX_SEARCH_BUFFERS, Proof, Verdict, pack};
use perpetua::memory::{Problem, check, lower_bound};

/// What `--in` and `--out` name, for `--help`.
pub(crate) const FORMAT: &str = "\
In (docs/formats.md has every column): a buffer a line, alive from lower up to upper
  id,lower,upper,size,alignment
  a,0,3,4,1
  b,2,9,4,4
Out: the same, and a last column offset.";

/// What `pack` is asked.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Buffers: `id,lower,upper,size` and optionally `alignment`; lifetimes are half-open.
    #[arg(long = "in", value_name = "FILE.csv")]
    input: PathBuf,
    /// What all buffers have to fit into.
    #[arg(long, value_name = "BYTES", allow_negative_numbers = true, value_parser = at_least::<u64>(0))]
    capacity: u64,
    /// How long to look for a placement, in seconds.
    #[arg(long, value_name = "S", default_value = "60", allow_negative_numbers = true, value_parser = seconds)]
    timeout: Duration,
    /// The same rows, each with its offset.
    #[arg(long, value_name = "FILE.csv")]
    out: PathBuf,
}

/// Packs, checks and writes.
pub(crate) fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    writable([&*args.out], [&*args.input])?;
    let input = name_of_text(&args.input);
    let text = read_text(&args.input)?;
    let table = Table::parse(&text).map_err(|error| format!("{input}: {error}"))?;
    let problem = Problem::new(table.buffers.clone(), args.capacity).map_err(|error| format!("{input}: {error}"))?;
    let began = Instant::now();
    let placement = match pack(&problem, args.timeout) {
        Verdict::Solved(placement) => placement,
        Verdict::Infeasible(Proof::Load { load_bytes }) => {
            let capacity = args.capacity;
            return Err(format!("infeasible: {load_bytes} bytes are alive at once, the capacity is {capacity}").into());
        }
        Verdict::Infeasible(Proof::Exhausted) => {
            return Err(format!("infeasible: no placement of peak {} exists", args.capacity).into());
        }
        Verdict::NotFound if began.elapsed() < args.timeout => {
            return Err(format!(
                "not found in {:.1} s: more than {MAX_SEARCH_BUFFERS} buffers depend on each other, for which there are \
                 heuristics, but no search",
                began.elapsed().as_secs_f64()
            )
            .into());
        }
        Verdict::NotFound => return Err(format!("not found in {} s", args.timeout.as_secs_f64()).into()),
    };
    if let Err(violations) = check::check(problem.buffers(), args.capacity, &placement) {
        unreachable!("a placement that is found keeps the laws of packing: {}", violations[0]);
    }
    write_whole(&args.out, |file| file.write_all(table.with_offsets(&placement).as_bytes()))?;
    let load_bytes = lower_bound(problem.buffers());
    let n_buffers = problem.buffers().len();
    note(&format!("{n_buffers} buffers: peak {} bytes, lower bound {load_bytes}", placement.peak_bytes));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn pack_text(text: &str, capacity: u64) -> Result<String, String> {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (folder.path().join("in.csv"), folder.path().join("out.csv"));
        fs::write(&input, text).unwrap();
        let outcome = run(&Args { input, capacity, timeout: Duration::from_secs(5), out: out.clone() });
        assert_eq!(outcome.is_ok(), out.exists(), "a file appears only where the request was met");
        outcome.map(|()| fs::read_to_string(out).unwrap()).map_err(|error| error.to_string())
    }

    #[test]
    fn rows_come_back_with_offsets() {
        let text = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n";
        let packed = pack_text(text, 12).unwrap();
        assert_eq!(packed.lines().next(), Some("id,lower,upper,size,offset"));
        assert_eq!(packed.lines().count(), 6);
        assert_eq!(pack_text(text, 11).unwrap_err(), "infeasible: 12 bytes are alive at once, the capacity is 11");
    }

    #[test]
    fn what_is_wrong_is_said_in_one_line() {
        let error = pack_text("id,lower,upper\n", 12).unwrap_err();
        assert!(error.contains("in.csv: no column `size`") && error.lines().count() == 1, "{error}");
        let huge = format!("id,lower,upper,size\na,0,1,{}\n", u64::MAX);
        assert!(pack_text(&huge, u64::MAX).unwrap_err().contains("sum to more than"));
    }
}
