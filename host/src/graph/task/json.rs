//! The text forms of `perpetua plan --graph`: a graph of cut operators in, tasks and events out.
//!
//! In: `tensors` (`name`, `shape`, `dtype`; or `name`, `view_of`, `offset_elems`, `shape`, `strides`) and `ops` in
//! program order (`name`, `grid`, `reads`, `writes`, each `{"tensor", "map"}`). `map[axis]` is the tensor dimension
//! that grid axis cuts, or -1. A tensor that is no view has a buffer of its own; a view's offset counts from its base's
//! first element, and the base may be a view. Beyond that, a write may say `"kind": "add"` (blocks add into it, in any
//! order) or `"update"` (in place), and an operator `"class": "just-in-time"`. Other fields are
//! [told](Described::ignored), and mean nothing.
//!
//! Out: `tasks` (`op`, `op_index`, `block`, `worker`, `waits`, `triggers`), `events` (`num_triggers`) and `workers`,
//! each a list of tasks in execution order; tasks and events are numbered by position.

use super::{TaskClass, TaskGraph, WorkerLists};
use crate::graph::tensor::{Buffer, BufferId, BufferKind, DTensor, TensorError, TensorId, TensorTable, row_major};
use crate::graph::threadblock::{Access, AccessKind, BlockOp, GRID_AXES, ThreadBlockGraph};
use perpetua_shared::DType;
use perpetua_shared::limits::MAX_RANK;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};

/// Why a text is no graph.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// It is not JSON, or not of the form above.
    #[error("not a graph: {0}")]
    Json(#[from] serde_json::Error),
    /// A tensor that cannot be.
    #[error("tensor {tensor}: {what}")]
    Tensor {
        /// The tensor.
        tensor: String,
        /// What is wrong, what is expected.
        what: String,
    },
    /// A tensor that does not fit its buffer or has too many dimensions.
    #[error(transparent)]
    Table(#[from] TensorError),
    /// An operator that cannot be.
    #[error("operator {op}: {what}")]
    Op {
        /// The operator.
        op: String,
        /// What is wrong, what is expected.
        what: String,
    },
}

#[derive(Deserialize)]
#[serde(expecting = "an object with `tensors` and `ops`")]
struct File {
    tensors: Vec<TensorText>,
    ops: Vec<OpText>,
    #[serde(flatten)]
    others: Others,
}

/// Fields that mean nothing here.
type Others = BTreeMap<String, IgnoredAny>;

#[derive(Deserialize)]
#[serde(expecting = "a tensor: an object with `name` and `shape`")]
struct TensorText {
    name: String,
    shape: Option<Vec<Value>>,
    dtype: Option<String>,
    view_of: Option<String>,
    offset_elems: Option<Value>,
    strides: Option<Vec<Value>>,
    #[serde(flatten)]
    others: Others,
}

#[derive(Deserialize)]
#[serde(expecting = "an operator: an object with `name` and `grid`")]
struct OpText {
    name: String,
    grid: Option<Vec<Value>>,
    #[serde(default)]
    reads: Vec<AccessText>,
    #[serde(default)]
    writes: Vec<AccessText>,
    class: Option<String>,
    #[serde(flatten)]
    others: Others,
}

#[derive(Deserialize)]
#[serde(expecting = "an object with `tensor` and `map`")]
struct AccessText {
    tensor: String,
    map: Option<Vec<Value>>,
    kind: Option<String>,
    #[serde(flatten)]
    others: Others,
}

/// Sizes beyond this are mistakes, and sums of a few of them stay inside 64 bits.
const MAX_SIZE: u64 = 1 << 48;

/// A graph and what its text says about operators beyond it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Described {
    /// The graph.
    pub graph: ThreadBlockGraph,
    /// Operators that are not ahead-of-time, for [`Config::classes`](super::Config::classes).
    pub classes: Vec<(u32, TaskClass)>,
    /// Fields that mean nothing here, each with what has it. One that is misspelt leaves out what it is for.
    pub ignored: Vec<String>,
}

/// Reads a graph and the classes of its operators.
pub fn read_described(text: &str) -> Result<Described, GraphError> {
    let file: File = serde_json::from_str(text)?;
    let table = read_tensors(&file.tensors)?;
    let mut by_name = HashMap::with_capacity(file.tensors.len());
    for (i, tensor) in file.tensors.iter().enumerate() {
        by_name.insert(tensor.name.as_str(), TensorId(i as u32));
    }
    let mut out = Described {
        graph: ThreadBlockGraph { table, ops: Vec::with_capacity(file.ops.len()), has_tiles: false },
        classes: Vec::new(),
        ignored: ignored(&file),
    };
    for (i, op) in file.ops.iter().enumerate() {
        let fail = |what: String| GraphError::Op { op: op.name.clone(), what };
        let Some(grid) = &op.grid else {
            return Err(fail("it has no grid".to_owned()));
        };
        if grid.len() != GRID_AXES {
            return Err(fail(format!("its grid has {} axes, expected {GRID_AXES}", grid.len())));
        }
        let mut blocks = [0; GRID_AXES];
        for (axis, value) in grid.iter().enumerate() {
            blocks[axis] =
                whole(value, u64::from(u32::MAX)).map_err(|e| fail(format!("grid axis {axis} is {e}")))? as u32;
        }
        let mut accesses = Vec::with_capacity(op.reads.len() + op.writes.len());
        let reads = op.reads.iter().map(|a| (a, AccessKind::Read));
        for (access, kind) in reads.chain(op.writes.iter().map(|a| (a, AccessKind::Write))) {
            let Some(tensor) = by_name.get(access.tensor.as_str()) else {
                return Err(fail(format!("there is no tensor {}", access.tensor)));
            };
            let wrong = |given, expected| fail(format!("tensor {}: kind {given}, expected {expected}", access.tensor));
            let kind = match (kind, access.kind.as_deref()) {
                (AccessKind::Write, Some("add")) => AccessKind::ReduceAdd,
                (AccessKind::Write, Some("update")) => AccessKind::ReadWrite,
                (AccessKind::Write, None | Some("write")) => AccessKind::Write,
                (AccessKind::Write, Some(other)) => return Err(wrong(other, "write, add or update of a write")),
                (_, None | Some("read")) => AccessKind::Read,
                (_, Some(other)) => return Err(wrong(other, "read of a read")),
            };
            let map = read_map(access.map.as_deref().unwrap_or(&[]))
                .map_err(|e| fail(format!("the map of tensor {}: {e}", access.tensor)))?;
            accesses.push(Some(Access { tensor: *tensor, kind, map }));
        }
        match op.class.as_deref() {
            None | Some("ahead-of-time") => {}
            Some("just-in-time") => out.classes.push((i as u32, TaskClass::JustInTime)),
            Some(other) => {
                return Err(fail(format!("its class is {other}, expected ahead-of-time or just-in-time")));
            }
        }
        out.graph.ops.push(BlockOp {
            name: op.name.clone(),
            grid: blocks,
            accesses,
            row_axis: None,
            rows: 1,
            head_axis: None,
            kernel: None,
        });
    }
    Ok(out)
}

/// See [`Described::ignored`].
fn ignored(file: &File) -> Vec<String> {
    let named = |what: String, others: &Others| -> Vec<String> {
        others.keys().map(|field| format!("`{field}` of {what}")).collect()
    };
    let mut all = named("the graph".to_owned(), &file.others);
    all.extend(file.tensors.iter().flat_map(|tensor| named(format!("tensor {}", tensor.name), &tensor.others)));
    for op in &file.ops {
        all.extend(named(format!("operator {}", op.name), &op.others));
        let accesses = op.reads.iter().chain(&op.writes);
        all.extend(
            accesses.flat_map(|access| named(format!("operator {}'s {}", op.name, access.tensor), &access.others)),
        );
    }
    all
}

fn read_map(values: &[Value]) -> Result<[Option<u8>; GRID_AXES], String> {
    if values.len() != GRID_AXES {
        return Err(format!("{} entries, expected one per grid axis, {GRID_AXES}", values.len()));
    }
    let mut map = [None; GRID_AXES];
    for (axis, value) in values.iter().enumerate() {
        if value.as_i64() != Some(-1) {
            map[axis] = Some(whole(value, u64::from(u8::MAX)).map_err(|e| format!("entry {axis} is {e} or -1"))? as u8);
        }
    }
    Ok(map)
}

/// A whole number from 0 to `max`, or what it is instead.
fn whole(value: &Value, max: u64) -> Result<u64, String> {
    value.as_u64().filter(|n| *n <= max).ok_or_else(|| format!("{value}, expected a whole number from 0 to {max}"))
}

fn read_tensors(texts: &[TensorText]) -> Result<TensorTable, GraphError> {
    let mut by_name: HashMap<&str, usize> = HashMap::with_capacity(texts.len());
    for (i, text) in texts.iter().enumerate() {
        if by_name.insert(&text.name, i).is_some() {
            return Err(GraphError::Tensor {
                tensor: text.name.clone(),
                what: "there are two tensors of this name".to_owned(),
            });
        }
    }
    // Bases first, whatever the order of the text; a view that leads back to itself has no base.
    let mut made: Vec<Option<DTensor>> = vec![None; texts.len()];
    let mut is_in_chain = vec![false; texts.len()];
    let mut table = TensorTable::default();
    for first in 0..texts.len() {
        let mut chain = vec![first];
        is_in_chain[first] = true;
        while let Some(&at) = chain.last() {
            if made[at].is_some() {
                chain.pop();
                continue;
            }
            let text = &texts[at];
            let fail = |what: String| GraphError::Tensor { tensor: text.name.clone(), what };
            let base = match &text.view_of {
                None => None,
                Some(base) => {
                    let Some(&base) = by_name.get(base.as_str()) else {
                        return Err(fail(format!("it is a view of {base}, which does not exist")));
                    };
                    if made[base].is_none() {
                        if is_in_chain[base] {
                            let names: Vec<&str> = chain.iter().map(|i| texts[*i].name.as_str()).collect();
                            return Err(fail(format!(
                                "its views go in a circle: {} -> {}",
                                names.join(" -> "),
                                texts[base].name
                            )));
                        }
                        chain.push(base);
                        is_in_chain[base] = true;
                        continue;
                    }
                    made[base].clone()
                }
            };
            made[at] = Some(read_tensor(text, base, &mut table)?);
            chain.pop();
        }
    }
    // The table takes them in the order of the text, and checks that each lies in its buffer.
    for tensor in made.into_iter().flatten() {
        table.push(tensor)?;
    }
    Ok(table)
}

fn read_tensor(text: &TensorText, base: Option<DTensor>, table: &mut TensorTable) -> Result<DTensor, GraphError> {
    let fail = |what: String| GraphError::Tensor { tensor: text.name.clone(), what };
    let sizes = |what: &str, values: &Option<Vec<Value>>| -> Result<Option<Vec<usize>>, GraphError> {
        let Some(values) = values else { return Ok(None) };
        let read = |(i, value)| whole(value, MAX_SIZE).map_err(|e| fail(format!("{what} {i} is {e}")));
        let sizes: Result<Vec<u64>, _> = values.iter().enumerate().map(read).collect();
        Ok(Some(sizes?.into_iter().map(|n| n as usize).collect()))
    };
    let shape = sizes("dimension", &text.shape)?.ok_or_else(|| fail("it has no shape".to_owned()))?;
    if shape.len() > MAX_RANK {
        return Err(fail(format!("it has {} dimensions, expected at most {MAX_RANK}", shape.len())));
    }
    let n_elems = shape.iter().try_fold(1u64, |n, len| n.checked_mul(*len as u64)).filter(|n| *n <= MAX_SIZE);
    let Some(n_elems) = n_elems else {
        return Err(fail(format!("shape {shape:?} has more than {MAX_SIZE} elements")));
    };
    let strides = sizes("stride", &text.strides)?;
    let strides = match strides {
        Some(strides) if strides.len() != shape.len() => {
            return Err(fail(format!("it has {} strides for {} dimensions", strides.len(), shape.len())));
        }
        Some(strides) => strides,
        None => row_major(&shape),
    };
    let dtype = match &text.dtype {
        None => None,
        Some(name) => Some(DType::from_name(name).ok_or_else(|| {
            let known = DType::ALL.map(DType::name).join(", ");
            fail(format!("its dtype is {name}, expected one of {known}"))
        })?),
    };
    let offset = text.offset_elems.as_ref().map_or(Ok(0), |value| whole(value, MAX_SIZE));
    let offset = offset.map_err(|e| fail(format!("offset_elems is {e}")))? as usize;
    match base {
        Some(base) => {
            if dtype.is_some_and(|dtype| dtype != base.dtype) {
                let (given, of) = (text.dtype.as_deref().unwrap_or_default(), base.dtype);
                return Err(fail(format!("its dtype is {given}, expected that of its base, {of}")));
            }
            // Its buffer is asked only when all views are there, and not about one without elements.
            let offset_elems = base.offset_elems + offset;
            if offset_elems as u64 > MAX_SIZE {
                let what = format!("it begins at element {offset_elems} of its buffer, expected at most {MAX_SIZE}");
                return Err(fail(what));
            }
            Ok(DTensor {
                name: text.name.clone(),
                shape,
                strides,
                dtype: base.dtype,
                buffer: base.buffer,
                offset_elems,
            })
        }
        None => {
            if offset != 0 {
                return Err(fail("it has an offset but is a view of nothing".to_owned()));
            }
            if text.strides.is_some() && strides != row_major(&shape) {
                return Err(fail("it has strides of its own but is a view of nothing".to_owned()));
            }
            let dtype = dtype.ok_or_else(|| fail("it has no dtype".to_owned()))?;
            table.buffers.push(Buffer {
                name: text.name.clone(),
                bytes: n_elems * dtype.size_bytes() as u64,
                kind: BufferKind::Intermediate,
            });
            Ok(DTensor {
                name: text.name.clone(),
                shape,
                strides,
                dtype,
                buffer: BufferId(table.buffers.len() as u32 - 1),
                offset_elems: 0,
            })
        }
    }
}

/// Writes tasks, events and worker lists.
pub fn write_tasks(
    graph: &ThreadBlockGraph,
    tasks: &TaskGraph,
    workers: &WorkerLists,
    out: &mut dyn Write,
) -> io::Result<()> {
    let names: Vec<String> =
        graph.ops.iter().map(|op| serde_json::to_string(&op.name)).collect::<Result<_, serde_json::Error>>()?;
    let places = workers.places(tasks.tasks.len());
    writeln!(out, "{{\"tasks\": [")?;
    for (i, task) in tasks.tasks.iter().enumerate() {
        let [x, y, z] = task.block;
        let worker = places[i].map_or("null".to_owned(), |(worker, _)| worker.to_string());
        let name = &names[task.op as usize];
        write!(out, "{{\"op\": {name}, \"op_index\": {}, \"block\": [{x},{y},{z}], \"worker\": {worker}", task.op)?;
        let class = tasks.classes.get(task.op as usize).copied().unwrap_or_default();
        if class != TaskClass::AheadOfTime {
            write!(out, ", \"class\": \"{}\"", class.name())?;
        }
        write!(out, ", \"waits\": ")?;
        write_list(tasks.waits.of(i), out)?;
        write!(out, ", \"triggers\": ")?;
        write_list(tasks.triggers.of(i), out)?;
        writeln!(out, "}}{}", if i + 1 < tasks.tasks.len() { "," } else { "" })?;
    }
    write!(out, "],\n\"events\": [")?;
    for (i, n) in tasks.events.iter().enumerate() {
        write!(out, "{}{{\"num_triggers\": {n}}}", if i > 0 { ", " } else { "" })?;
    }
    write!(out, "],\n\"workers\": [")?;
    for (i, list) in workers.lists.iter().enumerate() {
        write!(out, "{}", if i > 0 { ",\n" } else { "" })?;
        write_list(list, out)?;
    }
    writeln!(out, "]}}")
}

fn write_list(list: &[u32], out: &mut dyn Write) -> io::Result<()> {
    write!(out, "[")?;
    for (i, n) in list.iter().enumerate() {
        write!(out, "{}{n}", if i > 0 { "," } else { "" })?;
    }
    write!(out, "]")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::task::{Config, assign_round_robin, lower};

    const EXAMPLE: &str = r#"{"tensors": [
        {"name": "x", "shape": [1, 4096], "dtype": "bf16"},
        {"name": "q_head1", "view_of": "q_half", "offset_elems": 128, "shape": [1, 128], "strides": [4096, 1]},
        {"name": "q_half", "view_of": "q", "offset_elems": 0, "shape": [1, 2048], "strides": [4096, 1]},
        {"name": "q", "shape": [1, 4096], "dtype": "bf16"}],
      "ops": [
        {"name": "linear", "grid": [32, 1, 1], "reads": [{"tensor": "x", "map": [-1, -1, -1]}],
         "writes": [{"tensor": "q", "map": [1, -1, -1]}]},
        {"name": "norm", "grid": [1, 1, 1], "reads": [{"tensor": "q_head1", "map": [-1, -1, -1]}],
         "writes": [{"tensor": "q_head1", "map": [-1, -1, -1]}]}]}"#;

    fn read_graph(text: &str) -> Result<ThreadBlockGraph, GraphError> {
        read_described(text).map(|described| described.graph)
    }

    #[test]
    fn kinds_are_those_of_their_side() {
        let read = r#""reads": [{"tensor": "x", "#;
        let write = r#""writes": [{"tensor": "q", "#;
        for (side, kind, expected) in [
            (write, "read", "op linear: tensor q: kind read, expected write, add or update of a write"),
            (read, "add", "op linear: tensor x: kind add, expected read of a read"),
        ] {
            let text = EXAMPLE.replace(side, &format!(r#"{side}"kind": "{kind}", "#));
            let message = read_graph(&text).expect_err(expected).to_string();
            assert!(message.ends_with(&expected["op linear: ".len()..]), "{message}");
        }
    }

    #[test]
    fn a_view_of_a_view_is_the_bytes_it_says() {
        let graph = read_graph(EXAMPLE).unwrap();
        assert_eq!((graph.table.tensors[1].offset_elems, graph.table.buffers.len()), (128, 2));
        let tasks = lower(&graph, &Config::default()).unwrap();
        assert_eq!(tasks.events, [1]);
        assert_eq!(tasks.triggers.of(1), [0], "head 1 is block 1 of the linear");
        let mut text = Vec::new();
        write_tasks(&graph, &tasks, &assign_round_robin(&tasks, 4), &mut text).unwrap();
        let json: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(json["tasks"][32]["waits"], serde_json::json!([0]));
        assert_eq!(json["tasks"][32]["op"], "norm");
        assert_eq!(json["tasks"][5]["worker"], 1);
        assert_eq!(json["events"], serde_json::json!([{"num_triggers": 1}]));
        assert_eq!(json["workers"].as_array().unwrap().len(), 4);
    }

    /// `n` views, each of the one after it and so many elements behind it, and what the last is a view of.
    fn chain(n: usize, offset_elems: u64, shape: &str) -> String {
        let view = |i: usize| {
            let next = i + 1;
            format!(
                r#"{{"name": "v{i}", "view_of": "v{next}", "offset_elems": {offset_elems}, "shape": {shape}, "strides": [1]}}, "#
            )
        };
        let views: String = (0..n).map(view).collect();
        format!(r#"{{"tensors": [{views}{{"name": "v{n}", "shape": [4], "dtype": "f32"}}], "ops": []}}"#)
    }

    #[test]
    fn chains_of_views_are_followed_however_long_and_far() {
        let graph = read_graph(&chain(100_000, 0, "[4]")).unwrap();
        assert!(graph.table.tensors.iter().all(|tensor| tensor.buffer == BufferId(0)));
        for shape in ["[4]", "[0]"] {
            let message = read_graph(&chain(70_000, MAX_SIZE, shape)).unwrap_err().to_string();
            let expected = "it begins at element 562949953421312 of its buffer, expected at most 281474976710656";
            assert_eq!(message, format!("tensor v69998: {expected}"));
        }
    }

    #[test]
    fn mistakes_are_named() {
        for (from, to, says) in [
            ("\"q_half\", \"view_of\": \"q\"", "\"q_half\", \"view_of\": \"q_head1\"", "circle"),
            ("\"view_of\": \"q\"", "\"view_of\": \"nobody\"", "view of nobody, which does not exist"),
            ("{\"name\": \"x\"", "{\"name\": \"q\"", "tensor q: there are two"),
            ("\"tensor\": \"x\"", "\"tensor\": \"y\"", "operator linear: there is no tensor y"),
            ("[1, 2048]", "[-1, 2048]", "tensor q_half: dimension 0 is -1"),
            ("[1, 2048]", "[1e30, 2048]", "tensor q_half: dimension 0 is 1e+30"),
            ("[1, 2048]", "[281474976710656, 2048]", "tensor q_half: shape"),
            ("[1, 2048]", "[1, 8192]", "q_half: ends at byte"),
            ("\"offset_elems\": 0", "\"offset_elems\": 1.5", "tensor q_half: offset_elems is 1.5"),
            ("\"dtype\": \"bf16\"", "\"dtype\": \"b16\"", "tensor x: its dtype is b16"),
            (", \"dtype\": \"bf16\"", "", "tensor x: it has no dtype"),
            ("\"shape\": [1, 2048], ", "", "tensor q_half: it has no shape"),
            ("[32, 1, 1]", "[32, 1]", "operator linear: its grid has 2 axes"),
            ("[32, 1, 1]", "[-32, 1, 1]", "operator linear: grid axis 0 is -32"),
            ("[1, -1, -1]", "[1, -2, -1]", "operator linear: the map of tensor q: entry 1 is -2"),
            ("\"name\": \"linear\", ", "", "missing field `name`"),
            ("\"ops\"", "\"operators\"", "missing field `ops`"),
            (
                "{\"name\": \"linear\"",
                "3, {\"name\": \"linear\"",
                "expected an operator: an object with `name` and `grid`",
            ),
            ("[", "", "not a graph"),
        ] {
            let text = EXAMPLE.replacen(from, to, 1);
            assert_ne!(text, EXAMPLE, "{from}");
            let error = read_graph(&text).unwrap_err().to_string();
            assert!(error.contains(says), "{error:?} does not say {says:?}");
        }
        for (from, to, says) in [
            ("\"reads\"", "\"raeds\"", "`raeds` of operator linear"),
            ("\"map\"", "\"map\": [-1, -1, -1], \"maps\"", "`maps` of operator linear's x"),
            ("\"dtype\"", "\"seen\": 3, \"dtype\"", "`seen` of tensor x"),
            ("\"ops\"", "\"by\": \"me\", \"ops\"", "`by` of the graph"),
        ] {
            let described = read_described(&EXAMPLE.replacen(from, to, 1)).unwrap();
            assert_eq!(described.ignored, [says]);
        }
        assert_eq!(read_described(EXAMPLE).unwrap().ignored, [""; 0]);
        for text in ["[]", "3"] {
            let error = read_graph(text).unwrap_err().to_string();
            assert!(error.contains("expected an object with `tensors` and `ops`"), "{error}");
        }
    }

    #[test]
    fn what_the_graph_checks_is_left_to_it() {
        let text = EXAMPLE.replacen("[32, 1, 1]", "[0, 1, 1]", 1);
        let error = lower(&read_graph(&text).unwrap(), &Config::default()).unwrap_err().to_string();
        assert!(error.contains("operator linear") && error.contains("zero"), "{error}");
        let text = EXAMPLE.replacen("[32, 1, 1]", "[4294967295, 4294967295, 4294967295]", 1);
        let error = lower(&read_graph(&text).unwrap(), &Config::default()).unwrap_err().to_string();
        assert!(error.contains("operator linear") && error.contains("blocks"), "{error}");
    }
}
