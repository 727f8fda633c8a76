//! `perpetua schedule`: the feasible memory scheduler on a plain graph.

use super::{name_of_text, note, read_text, writable, write_whole};
use std::error::Error;
use std::path::PathBuf;

use perpetua::schedule::plain;

/// What `--in` and `--out` name, for `--help`.
pub(crate) const FORMAT: &str = r#"In (docs/formats.md has every field): bytes and cycles
  {"capacity": 256, "alignment": 64,
   "ops": [{"name": "w", "kind": "data", "bytes": 128, "cycles": 10},
           {"name": "y", "kind": "compute", "bytes": 64, "cycles": 20, "inputs": ["w"],
            "spill_cycles": 1}]}
Out:
  {"ops": [{"name", "engine", "start", "end", "offset", "bytes"}],
   "spills": [{"op", "write_start", "write_end", "read_start", "read_end", "offset"}],
   "prefetch_edges": [{"data", "after"}],
   "makespan", "peak_bytes", "without_prefetch": {"makespan"}}"#;

/// What `schedule` is asked.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The graph: capacity, alignment and ops.
    #[arg(long = "in", value_name = "FILE.json")]
    input: PathBuf,
    /// Start, end and offset of every op, spills and prefetch edges.
    #[arg(long, value_name = "FILE.json")]
    out: PathBuf,
}

/// Schedules, checks and writes.
pub(crate) fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    writable([&*args.out], [&*args.input])?;
    let input = name_of_text(&args.input);
    let text = read_text(&args.input)?;
    let graph = plain::json::parse_graph(&text).map_err(|error| format!("{input}: {error}"))?;
    let schedule = plain::schedule(&graph);
    if let Err(violations) = plain::check::check(&graph, &schedule) {
        return Err(
            format!("{input}: the schedule found breaks a law ({}); a defect of this program", violations[0]).into()
        );
    }
    write_whole(&args.out, |file| file.write_all(plain::json::write_schedule(&graph, &schedule).as_bytes()))?;
    note(&format!(
        "{} ops: makespan {} cycles, lower bound {}, without prefetch {}; peak {} of {} bytes, {} spills",
        graph.ops().len(),
        schedule.makespan,
        graph.lower_bound_cycles(),
        schedule.without_prefetch_makespan,
        schedule.peak_bytes,
        graph.capacity_bytes(),
        schedule.spills.len(),
    ));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn schedule_text(text: &str) -> Result<String, String> {
        let folder = tempfile::tempdir().unwrap();
        let (input, out) = (folder.path().join("in.json"), folder.path().join("out.json"));
        fs::write(&input, text).unwrap();
        let outcome = run(&Args { input, out: out.clone() });
        assert_eq!(outcome.is_ok(), out.exists(), "a file appears only where the request was met");
        outcome.map(|()| fs::read_to_string(out).unwrap()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_load_and_its_use() {
        let text = r#"{"capacity": 256, "alignment": 64, "ops": [
            {"name": "w", "kind": "data", "bytes": 128, "cycles": 10, "inputs": []},
            {"name": "y", "kind": "compute", "bytes": 64, "cycles": 5, "inputs": ["w"]}]}"#;
        let written = schedule_text(text).unwrap();
        assert!(written.contains(r#"{"name":"y","engine":"compute","start":10,"end":15,"offset":"#), "{written}");
        assert!(written.contains(r#""makespan":15,"peak_bytes":192,"without_prefetch":{"makespan":15}"#), "{written}");
    }

    #[test]
    fn what_is_wrong_is_said_in_one_line() {
        let text = r#"{"capacity": 100, "ops": [{"name": "w", "kind": "data", "bytes": 128, "cycles": 10}]}"#;
        let error = schedule_text(text).unwrap_err();
        assert!(error.contains("op `w` needs 128 bytes") && error.lines().count() == 1, "{error}");
        assert!(schedule_text("{").unwrap_err().contains("in.json: "));
    }
}
