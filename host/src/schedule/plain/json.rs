//! The text form of graphs and schedules.
//!
//! In: `{"capacity": BYTES, "alignment": 64, "ops": [{"name", "kind": "data" | "compute", "bytes", "cycles", "inputs":
//! [name...], "spill_cycles"?}]}`. Out: `{"ops": [...], "spills": [...], "prefetch_edges": [...], "makespan",
//! "peak_bytes", "without_prefetch": {"makespan"}}`, times in cycles and half-open.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::Schedule;
use super::graph::{Graph, GraphError, Kind, Op};

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with `capacity` and `ops`")]
struct GraphText {
    capacity: u64,
    #[serde(default = "default_alignment")]
    alignment: u64,
    ops: Vec<OpText>,
}

fn default_alignment() -> u64 {
    64
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "an op: an object with `name`, `kind`, `bytes` and `cycles`")]
struct OpText {
    name: String,
    kind: KindText,
    bytes: u64,
    cycles: u64,
    #[serde(default)]
    inputs: Vec<String>,
    #[serde(default)]
    spill_cycles: Option<u64>,
}

#[derive(Serialize, Deserialize, Clone, Copy)]
#[serde(rename_all = "lowercase")]
enum KindText {
    Data,
    Compute,
}

impl From<KindText> for Kind {
    fn from(kind: KindText) -> Self {
        match kind {
            KindText::Data => Kind::Data,
            KindText::Compute => Kind::Compute,
        }
    }
}

/// Why a text is no graph.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ParseError {
    /// Not JSON, or not of this shape.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// A name given to two ops.
    #[error("op {second}: the name `{name}` is already op {first}'s, expected each name once")]
    DuplicateName {
        /// Which.
        name: String,
        /// Position.
        first: u32,
        /// Position.
        second: u32,
    },
    /// An input that no op is called.
    #[error("op `{op}`: no op is called `{input}`, expected the name of an op of this graph")]
    UnknownInput {
        /// Whose.
        op: String,
        /// As given.
        input: String,
    },
    /// A graph that cannot be scheduled.
    #[error("{0}")]
    Graph(#[from] GraphError),
}

/// Reads a graph.
pub fn parse_graph(text: &str) -> Result<Graph, ParseError> {
    let GraphText { capacity, alignment, ops } = serde_json::from_str(text)?;
    let mut by_name: HashMap<&str, u32> = HashMap::with_capacity(ops.len());
    for (second, op) in (0u32..).zip(&ops) {
        if let Some(first) = by_name.insert(&op.name, second) {
            return Err(ParseError::DuplicateName { name: op.name.clone(), first, second });
        }
    }
    let mut inputs: Vec<Vec<u32>> = Vec::with_capacity(ops.len());
    for op in &ops {
        let find = |input: &String| {
            let found = by_name.get(input.as_str()).copied();
            found.ok_or_else(|| ParseError::UnknownInput { op: op.name.clone(), input: input.clone() })
        };
        inputs.push(op.inputs.iter().map(find).collect::<Result<_, _>>()?);
    }
    let ops = ops.into_iter().zip(inputs).map(|(op, inputs)| {
        let OpText { name, bytes, cycles, .. } = op;
        let kind = op.kind.into();
        let spill_cycles = op.spill_cycles.unwrap_or_else(|| Op::default_spill_cycles(kind, bytes, cycles));
        Op { name, kind, bytes, cycles, inputs, spill_cycles }
    });
    Ok(Graph::new(capacity, alignment, ops.collect())?)
}

#[derive(Serialize)]
struct ScheduleText<'a> {
    ops: Vec<PlacedText<'a>>,
    spills: Vec<SpillText<'a>>,
    prefetch_edges: Vec<EdgeText<'a>>,
    makespan: u64,
    peak_bytes: u64,
    without_prefetch: WithoutText,
}

#[derive(Serialize)]
struct PlacedText<'a> {
    name: &'a str,
    engine: KindText,
    start: u64,
    end: u64,
    offset: u64,
    bytes: u64,
}

#[derive(Serialize)]
struct SpillText<'a> {
    op: &'a str,
    write_start: u64,
    write_end: u64,
    read_start: u64,
    read_end: u64,
    offset: u64,
}

#[derive(Serialize)]
struct EdgeText<'a> {
    data: &'a str,
    after: &'a str,
}

#[derive(Serialize)]
struct WithoutText {
    makespan: u64,
}

/// Writes a schedule of `graph`.
///
/// # Panics
/// If the schedule is not one of this graph.
pub fn write_schedule(graph: &Graph, schedule: &Schedule) -> String {
    assert_eq!(graph.ops().len(), schedule.ops.len(), "a schedule has a place for every op of its graph");
    let name = |op: u32| graph.ops()[op as usize].name.as_str();
    let ops = graph.ops().iter().zip(&schedule.ops).map(|(op, placed)| PlacedText {
        name: &op.name,
        engine: match op.kind {
            Kind::Data => KindText::Data,
            Kind::Compute => KindText::Compute,
        },
        start: placed.start,
        end: placed.end,
        offset: placed.offset,
        bytes: op.bytes,
    });
    let spills = schedule.spills.iter().map(|spill| SpillText {
        op: name(spill.op),
        write_start: spill.write_start,
        write_end: spill.write_end,
        read_start: spill.read_start,
        read_end: spill.read_end,
        offset: spill.offset,
    });
    let edges = schedule.prefetch_edges.iter().map(|edge| EdgeText { data: name(edge.data), after: name(edge.after) });
    let text = ScheduleText {
        ops: ops.collect(),
        spills: spills.collect(),
        prefetch_edges: edges.collect(),
        makespan: schedule.makespan,
        peak_bytes: schedule.peak_bytes,
        without_prefetch: WithoutText { makespan: schedule.without_prefetch_makespan },
    };
    serde_json::to_string(&text).expect("numbers and strings are JSON")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_filled_in() {
        let text = r#"{"capacity": 4096, "ops": [
            {"name": "w", "kind": "data", "bytes": 1000, "cycles": 7},
            {"name": "c", "kind": "compute", "bytes": 130, "cycles": 9, "inputs": ["w", "w"]}]}"#;
        let graph = parse_graph(text).unwrap();
        assert_eq!(graph.alignment(), 64);
        assert_eq!(graph.ops()[1].inputs, [0], "an input named twice is one input");
        assert_eq!((graph.ops()[0].spill_cycles, graph.ops()[1].spill_cycles), (7, 3));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let message = |text: &str| parse_graph(text).unwrap_err().to_string();
        let one = |fields: &str| message(&format!(r#"{{"capacity": 9, "ops": [{{"name": "a", {fields}}}]}}"#));
        assert!(message("").contains("EOF"));
        for text in ["[]", "3"] {
            assert!(message(text).contains("expected an object with `capacity` and `ops`"), "{}", message(text));
        }
        assert!(message(r#"{"capacity": 9, "ops": [3]}"#).contains("expected an op: an object with `name`"));
        assert!(message(r#"{"ops": []}"#).contains("capacity"));
        assert!(one(r#""kind": "data", "bytes": -1, "cycles": 1"#).contains("-1"));
        assert!(one(r#""kind": "data", "bytes": 1"#).contains("cycles"));
        assert!(one(r#""kind": "dma", "bytes": 1, "cycles": 1"#).contains("dma"));
        assert!(one(r#""kind": "data", "bytes": 1, "cycles": 1, "inputs": ["b"]"#).contains("`b`"));
        assert!(one(r#""kind": "data", "bytes": 1, "cycles": 1, "inputs": ["a"]"#).contains("waits on itself"));
        assert!(one(r#""kind": "data", "bytes": 10, "cycles": 1"#).contains("needs 10 bytes"));
        let twice = r#"{"capacity": 9, "ops": [{"name": "a", "kind": "data", "bytes": 1, "cycles": 1},
                                               {"name": "a", "kind": "data", "bytes": 1, "cycles": 1}]}"#;
        assert!(message(twice).contains("`a` is already op 0's"));
    }
}
