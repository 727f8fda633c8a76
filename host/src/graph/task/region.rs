//! Which bytes a block touches, as a product of sets over the axes of a buffer.
//!
//! A *boundary* of a buffer is a number of bytes `S` such that, for every tensor of the buffer, an element's address is
//! `hi * S + lo` with `lo < S`, where the dimensions whose stride `S` divides move only `hi` and all others only `lo`.
//! Boundaries that divide one another cut addresses into digits, the *axes*. Every dimension then moves exactly one
//! digit and no digit carries into the next, so a box of a tensor (a range per dimension) is the product of one set per
//! axis, and two boxes share a byte exactly when their sets meet on every axis. This is exact for all tensors whatever
//! their strides: where two tensors have no boundary in common, an axis merely becomes longer and its sets get more
//! runs.
//!
//! A column-cut matrix `[T, H*d]` and its view `[T, kv, group, d]` have the axes row and column: a cut of `kv` is one
//! run of columns, a cut of `group` is `kv` of them. A transposed view has the same axes in the other order.

use super::TaskError;
use crate::graph::tensor::{BufferId, TensorId};
use crate::graph::threadblock::{Access, BlockOp, GRID_AXES, ThreadBlockGraph, part};
use perpetua_shared::limits::MAX_RANK;
use std::collections::HashMap;
use std::rc::Rc;

/// A half-open range of coordinates on an axis.
pub(super) type Run = (u64, u64);

/// Runs one access may have on one axis, over all its parts.
pub(super) const MAX_RUNS: usize = 1 << 22;

/// A dimension, seen on its axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Dim {
    /// Coordinates from one index to the next.
    stride: u64,
    len: u64,
    /// Blocks that cut it; 1 if none does.
    parts: u32,
}

/// What all blocks of an access touch on one axis. A *part* is what distinguishes blocks there: the indices along the
/// grid axes that cut dimensions of this axis, the first running fastest.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Side {
    base: u64,
    width: u64,
    /// Cut dimensions come first, by grid axis.
    dims: Vec<Dim>,
}

impl Side {
    /// How many parts there are.
    pub(super) fn n_parts(&self) -> usize {
        self.dims.iter().map(|d| d.parts as usize).product()
    }

    /// The runs of one part, sorted and apart; `None` when there are too many.
    fn runs(&self, mut number: usize) -> Option<Vec<Run>> {
        let mut start = self.base;
        let mut dims = Vec::with_capacity(self.dims.len());
        for dim in &self.dims {
            let block = (number % dim.parts as usize) as u32;
            number /= dim.parts as usize;
            let range = part(dim.len as usize, block, dim.parts);
            if range.is_empty() {
                return Some(Vec::new());
            }
            start += range.start as u64 * dim.stride;
            if dim.stride > 0 && range.len() > 1 {
                dims.push((dim.stride, range.len() as u64));
            }
        }
        dims.sort_unstable();
        let mut runs = vec![(start, start + self.width)];
        for (stride, len) in dims {
            if let [(lo, hi)] = runs[..]
                && stride <= hi - lo
            {
                runs[0] = (lo, hi + (len - 1) * stride);
                continue;
            }
            if runs.len() as u64 * len > MAX_RUNS as u64 {
                return None;
            }
            let first = std::mem::take(&mut runs);
            for k in 0..len {
                runs.extend(first.iter().map(|(lo, hi)| (lo + k * stride, hi + k * stride)));
            }
            merge(&mut runs);
        }
        Some(runs)
    }
}

/// Sorts runs and joins those that touch.
pub(super) fn merge(runs: &mut Vec<Run>) {
    runs.sort_unstable();
    let mut kept = 0;
    for i in 0..runs.len() {
        let (lo, hi) = runs[i];
        if kept > 0 && lo <= runs[kept - 1].1 {
            runs[kept - 1].1 = runs[kept - 1].1.max(hi);
        } else {
            runs[kept] = (lo, hi);
            kept += 1;
        }
    }
    runs.truncate(kept);
}

/// The coordinates in both.
pub(super) fn intersect(a: &[Run], b: &[Run]) -> Vec<Run> {
    let (mut i, mut j) = (0, 0);
    let mut out = Vec::new();
    while i < a.len() && j < b.len() {
        let (lo, hi) = (a[i].0.max(b[j].0), a[i].1.min(b[j].1));
        if lo < hi {
            out.push((lo, hi));
        }
        if a[i].1 < b[j].1 {
            i += 1;
        } else {
            j += 1;
        }
    }
    out
}

/// The coordinates in `a` and not in `b`.
pub(super) fn subtract(a: &[Run], b: &[Run]) -> Vec<Run> {
    let mut out = Vec::new();
    let mut j = 0;
    for &(mut lo, hi) in a {
        while j < b.len() && b[j].1 <= lo {
            j += 1;
        }
        let mut k = j;
        while k < b.len() && b[k].0 < hi {
            if b[k].0 > lo {
                out.push((lo, b[k].0));
            }
            lo = lo.max(b[k].1);
            k += 1;
        }
        if lo < hi {
            out.push((lo, hi));
        }
    }
    out
}

/// The runs of all parts of a [`Side`].
#[derive(Debug)]
pub(super) struct SideRuns {
    /// Runs and the part each belongs to, sorted by start.
    pub(super) runs: Vec<(u64, u64, u32)>,
    /// All parts together.
    pub(super) union: Rc<Vec<Run>>,
    /// Parts.
    pub(super) n_parts: usize,
}

/// Sides, each once, with their runs.
#[derive(Debug, Default)]
pub(super) struct Sides {
    ids: HashMap<Side, u32>,
    runs: Vec<Rc<SideRuns>>,
}

impl Sides {
    /// The id of `side`; `None` when it has too many runs.
    fn intern(&mut self, side: Side) -> Option<u32> {
        if let Some(id) = self.ids.get(&side) {
            return Some(*id);
        }
        let n_parts = side.n_parts();
        let mut runs = Vec::with_capacity(n_parts);
        for number in 0..n_parts {
            runs.extend(side.runs(number)?.into_iter().map(|(lo, hi)| (lo, hi, number as u32)));
            if runs.len() > MAX_RUNS {
                return None;
            }
        }
        runs.sort_unstable();
        let mut union = runs.iter().map(|(lo, hi, _)| (*lo, *hi)).collect();
        merge(&mut union);
        let id = self.runs.len() as u32;
        self.runs.push(Rc::new(SideRuns { runs, union: Rc::new(union), n_parts }));
        self.ids.insert(side, id);
        Some(id)
    }

    /// The runs of side `id`.
    pub(super) fn runs(&self, id: u32) -> &Rc<SideRuns> {
        &self.runs[id as usize]
    }
}

/// A side and the grid axes (a bit each) that tell its parts apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SideRef {
    pub(super) side: u32,
    pub(super) axes: u8,
}

/// A product of sets, one per axis of a buffer.
pub(super) type Region = Vec<Rc<Vec<Run>>>;

/// An access in the axes of its buffer.
#[derive(Clone, Debug)]
pub(super) struct Placed {
    /// Per axis.
    pub(super) sides: Vec<SideRef>,
}

/// Boundaries of every buffer, in descending order.
#[derive(Debug)]
pub(super) struct Axes {
    boundaries: Vec<Vec<u64>>,
}

fn dims_of(graph: &ThreadBlockGraph, id: TensorId) -> impl Iterator<Item = (u64, u64)> {
    let tensor = &graph.table[id];
    let elem = tensor.dtype.size_bytes() as u64;
    tensor.shape.iter().zip(&tensor.strides).map(move |(n, s)| {
        // One index (or none) never moves: its stride, whatever it says, does not count.
        (*n as u64, if *n > 1 { *s as u64 * elem } else { 0 })
    })
}

impl Axes {
    /// Finds the boundaries common to the tensors that operators access in each buffer.
    pub(super) fn find(graph: &ThreadBlockGraph) -> Result<Axes, TaskError> {
        let n_tensors = graph.table.tensors.len();
        let mut seen = vec![false; n_tensors];
        let mut of_buffer: Vec<Vec<TensorId>> = vec![Vec::new(); graph.table.buffers.len()];
        for op in &graph.ops {
            for access in op.accesses.iter().flatten() {
                if !std::mem::replace(&mut seen[access.tensor.idx()], true) {
                    check_tensor(graph, op, access.tensor)?;
                    if graph.table[access.tensor].shape.contains(&0) {
                        continue;
                    }
                    of_buffer[graph.table[access.tensor].buffer.idx()].push(access.tensor);
                }
            }
        }
        let boundaries = of_buffer
            .into_iter()
            .map(|tensors| {
                let mut candidates: Vec<u64> =
                    tensors.iter().flat_map(|t| dims_of(graph, *t).map(|(_, s)| s)).filter(|s| *s > 1).collect();
                candidates.sort_unstable_by(|a, b| b.cmp(a));
                candidates.dedup();
                let mut kept: Vec<u64> = Vec::new();
                for s in candidates {
                    if kept.last().is_none_or(|last| last % s == 0) && tensors.iter().all(|t| splits(graph, *t, s)) {
                        kept.push(s);
                    }
                }
                kept
            })
            .collect();
        Ok(Axes { boundaries })
    }

    /// Places `access` of `op`.
    pub(super) fn place(
        &self,
        graph: &ThreadBlockGraph,
        op: &BlockOp,
        access: &Access,
        sides: &mut Sides,
    ) -> Result<Placed, TaskError> {
        let tensor = &graph.table[access.tensor];
        let boundaries = &self.boundaries[tensor.buffer.idx()];
        let elem = tensor.dtype.size_bytes() as u64;
        let offset = tensor.offset_elems as u64 * elem;
        let dims: Vec<(u64, u64)> = dims_of(graph, access.tensor).collect();
        let mut placed = Placed { sides: Vec::with_capacity(boundaries.len() + 1) };
        let mut above: Option<u64> = None;
        for level in 0..=boundaries.len() {
            let unit = boundaries.get(level).copied().unwrap_or(1);
            let on_axis = |stride: u64| stride.is_multiple_of(unit) && above.is_none_or(|s| !stride.is_multiple_of(s));
            let within = above.map_or(offset, |s| offset % s);
            let mut side =
                Side { base: within / unit, width: if level == boundaries.len() { elem } else { 1 }, dims: Vec::new() };
            let mut axes = 0;
            let mut cut = 0u8;
            for axis in 0..GRID_AXES {
                let Some(dim) = access.map[axis] else { continue };
                cut |= 1 << dim;
                let (len, stride) = dims[dim as usize];
                if on_axis(stride) {
                    // An axis of one block tells no blocks apart.
                    if op.grid[axis] > 1 {
                        axes |= 1 << axis;
                    }
                    side.dims.push(Dim { stride: stride / unit, len, parts: op.grid[axis] });
                }
            }
            let uncut = dims.iter().enumerate().filter(|(i, _)| cut & 1 << i == 0);
            side.dims.extend(uncut.filter(|(_, (_, stride))| on_axis(*stride)).map(|(_, (len, stride))| Dim {
                stride: stride / unit,
                len: *len,
                parts: 1,
            }));
            let Some(id) = sides.intern(side) else {
                return Err(TaskError::Fragmented {
                    op: op.name.clone(),
                    tensor: tensor.name.clone(),
                    limit: MAX_RUNS,
                });
            };
            placed.sides.push(SideRef { side: id, axes });
            above = Some(unit);
        }
        Ok(placed)
    }
}

/// Whether `s` is a boundary for tensor `id`.
fn splits(graph: &ThreadBlockGraph, id: TensorId, s: u64) -> bool {
    let tensor = &graph.table[id];
    let elem = tensor.dtype.size_bytes() as u64;
    let low: u64 = dims_of(graph, id).filter(|(_, stride)| stride % s != 0).map(|(n, stride)| (n - 1) * stride).sum();
    (tensor.offset_elems as u64 * elem) % s + low + elem <= s
}

/// Refuses a tensor whose bytes are not all in its buffer, so that all arithmetic after this stays inside 64 bits.
fn check_tensor(graph: &ThreadBlockGraph, op: &BlockOp, id: TensorId) -> Result<(), TaskError> {
    let tensor = &graph.table[id];
    let malformed = |what: String| TaskError::Malformed { op: op.name.clone(), tensor: tensor.name.clone(), what };
    if tensor.shape.len() != tensor.strides.len() {
        let (strides, rank) = (tensor.strides.len(), tensor.shape.len());
        return Err(malformed(format!("{strides} strides for {rank} dimensions")));
    }
    if tensor.shape.len() > MAX_RANK {
        let rank = tensor.shape.len();
        return Err(malformed(format!("{rank} dimensions, expected at most {MAX_RANK}")));
    }
    let BufferId(buffer) = tensor.buffer;
    let Some(buffer) = graph.table.buffers.get(buffer as usize) else {
        return Err(malformed(format!("its buffer {} does not exist", tensor.buffer)));
    };
    if tensor.shape.contains(&0) {
        return Ok(());
    }
    let mut last = tensor.offset_elems as u128;
    for (n, s) in tensor.shape.iter().zip(&tensor.strides) {
        last = last.saturating_add((*n as u128 - 1).saturating_mul(*s as u128));
    }
    let end = last.saturating_add(1).saturating_mul(tensor.dtype.size_bytes() as u128);
    if end > u128::from(buffer.bytes) || end > u128::from(u64::MAX / 2) {
        return Err(TaskError::OutOfBounds {
            op: op.name.clone(),
            tensor: tensor.name.clone(),
            end: u64::try_from(end).unwrap_or(u64::MAX),
            buffer: buffer.name.clone(),
            bytes: buffer.bytes,
        });
    }
    Ok(())
}
