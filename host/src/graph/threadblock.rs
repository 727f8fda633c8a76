//! The thread-block graph: HOW each operator is cut (MPK: `TBGraph`, `grid_dim`, `imap`, `omap`).
//!
//! Every operator gets a grid of at most three axes; for every tensor it touches, a map says which dimension each axis
//! cuts. A dimension of `n` elements cut by `g` blocks: block `b` has `[b*n/g, (b+1)*n/g)`, even or not; an axis that
//! cuts no dimension of a tensor replicates it. From grid and maps follow the tasks, the region each one touches, its
//! operands' addresses, and (in [`crate::graph::task`]) the dependencies.
//!
//! Laws ([`ThreadBlockGraph::check`]): grids and maps are in range; no two axes cut one dimension of a tensor; an axis
//! that gives each block a head has as many blocks as there are heads; a tensor that is written (other than by reduction or appending) is cut by every grid axis with more than one block, so that
//! no two blocks write the same element.

use super::tensor::{BufferKind, TensorId, TensorTable};
use perpetua_device::kernels::{self, Spec, Use};
use perpetua_shared::limits::PARAM_WORDS;
use std::fmt;

/// Grid axes an operator has.
pub const GRID_AXES: usize = 3;

/// How an operator uses a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AccessKind {
    /// Reads it.
    Read,
    /// Writes it; what stood there before is of no interest.
    Write,
    /// Reads and writes it in place.
    ReadWrite,
    /// Adds into it; several blocks may add into the same elements, in any order.
    ReduceAdd,
    /// Reads what earlier passes left there and appends; of the blocks that share it, each element appended has one,
    /// known at run time alone, that writes it, and no other reads it.
    Append,
}

impl AccessKind {
    /// Whether old contents matter to the block.
    pub fn reads(self) -> bool {
        self != AccessKind::Write
    }
    /// Whether blocks of one operator may change the same elements.
    pub fn is_shared(self) -> bool {
        matches!(self, AccessKind::ReduceAdd | AccessKind::Append)
    }
    /// Whether it changes the contents.
    pub fn writes(self) -> bool {
        self != AccessKind::Read
    }
}

impl From<Use> for AccessKind {
    /// What a macro kernel's operand of this use is to the operator that runs it.
    fn from(usage: Use) -> AccessKind {
        match usage {
            Use::Read => AccessKind::Read,
            Use::Write => AccessKind::Write,
            Use::Update => AccessKind::ReadWrite,
            Use::Append => AccessKind::Append,
        }
    }
}

/// One tensor an operator touches: MPK's `imap` entry of an input, `omap` entry of an output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// The tensor.
    pub tensor: TensorId,
    /// How it is used.
    pub kind: AccessKind,
    /// The dimension each grid axis cuts, if any.
    pub map: [Option<u8>; GRID_AXES],
}

/// The macro kernel an operator's blocks run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelCall {
    /// Its number in the device crate's list.
    pub task_type: u16,
    /// See [`perpetua_shared::TaskFlags`].
    pub flags: u16,
    /// Its parameters.
    pub params: [u32; PARAM_WORDS],
}

/// One operator, cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockOp {
    /// Its name.
    pub name: String,
    /// Blocks along each axis.
    pub grid: [u32; GRID_AXES],
    /// The tensors it touches, in the macro kernel's operand order; `None` marks an absent optional operand.
    pub accesses: Vec<Option<Access>>,
    /// The grid axis that cuts the pass's rows, if one does.
    pub row_axis: Option<u8>,
    /// Rows (tokens) that axis cuts.
    pub rows: u32,
    /// The grid axis that gives each block a head, if one does: of the dimension that it cuts, into single ones, blocks'
    /// operands know nothing.
    pub head_axis: Option<u8>,
    /// What its blocks run; `None` in a graph that is only planned, not executed.
    pub kernel: Option<KernelCall>,
}

impl BlockOp {
    /// Blocks in the grid; `u64::MAX` where that is too small a number.
    pub fn n_blocks(&self) -> u64 {
        self.grid.iter().fold(1, |n, axis| n.saturating_mul(u64::from(*axis)))
    }

    /// Whether it has weights in `slot`, which nobody writes.
    pub fn has_weights(&self, table: &TensorTable, slot: usize) -> bool {
        let access = self.accesses[slot].as_ref();
        access.is_some_and(|access| table.buffer_of(access.tensor).kind == BufferKind::Weight)
    }

    /// The slots that its tasks may read before their events have fired, if these are weights.
    pub fn early_reads(&self, table: &TensorTable) -> &'static [usize] {
        let early = self.kernel.and_then(|kernel| Spec::of(kernel.task_type)).map_or(&[][..], |spec| spec.early_reads);
        if early.iter().all(|slot| self.has_weights(table, *slot)) { early } else { &[] }
    }

    /// The slots whose operands come in tiles, if they do: see [`kernels::tiled`].
    pub fn tiled(&self) -> &'static [usize] {
        let kernel = self.kernel.and_then(|kernel| Some((kernel, Spec::of(kernel.task_type)?)));
        kernel.map_or(&[][..], |(kernel, spec)| kernels::tiled(spec, &kernel.params))
    }

    /// See [`kernels::takes_memory_for_one_row`].
    pub fn takes_memory_for_one_row(&self) -> bool {
        self.kernel.is_some_and(|kernel| kernels::takes_memory_for_one_row(kernel.task_type))
    }

    /// The block numbered `number`, x running fastest.
    pub fn block(&self, number: u64) -> [u32; GRID_AXES] {
        let [x, y, _] = self.grid.map(u64::from);
        [(number % x) as u32, (number / x % y) as u32, (number / (x * y)) as u32]
    }
}

/// All operators, cut, in program order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ThreadBlockGraph {
    /// Buffers and tensors.
    pub table: TensorTable,
    /// Operators, indexed by [`OpId`](super::tensor::OpId).
    pub ops: Vec<BlockOp>,
    /// Whether its tasks take their weights from tiles, where workers have loaders: in passes of one row, and of a few.
    pub has_tiles: bool,
}

/// The half-open range block `block` of `blocks` has of `len` elements.
pub fn part(len: usize, block: u32, blocks: u32) -> std::ops::Range<usize> {
    let at = |b: u32| (len as u128 * u128::from(b) / u128::from(blocks)) as usize;
    at(block)..at(block + 1)
}

impl ThreadBlockGraph {
    /// Every law broken, by operator and tensor.
    pub fn check(&self) -> Result<(), Vec<Violation>> {
        let mut broken = Vec::new();
        for op in &self.ops {
            let mut report = |what: String| broken.push(Violation { op: op.name.clone(), what });
            if op.grid.contains(&0) {
                report(format!("grid {:?} has a zero axis, expected at least 1 block on each", op.grid));
                continue;
            }
            if op.n_blocks() > perpetua_shared::limits::MAX_TASKS as u64 {
                report(format!("grid {:?} has more than {} blocks", op.grid, perpetua_shared::limits::MAX_TASKS));
                continue;
            }
            for access in op.accesses.iter().flatten() {
                let Some(tensor) = self.table.tensors.get(access.tensor.idx()) else {
                    report(format!("tensor {} does not exist", access.tensor));
                    continue;
                };
                let mut seen = Vec::new();
                for (axis, dim) in access.map.iter().enumerate() {
                    let Some(dim) = *dim else {
                        if access.kind.writes() && !access.kind.is_shared() && op.grid[axis] > 1 {
                            report(format!(
                                "writes tensor {} from {} blocks of axis {axis} that cuts none of its dimensions: two blocks would write the same element",
                                tensor.name, op.grid[axis]
                            ));
                        }
                        continue;
                    };
                    if usize::from(dim) >= tensor.shape.len() {
                        report(format!(
                            "axis {axis} is mapped to dimension {dim} of tensor {}, which has {}",
                            tensor.name,
                            tensor.shape.len()
                        ));
                    } else if seen.contains(&dim) {
                        report(format!("two grid axes cut dimension {dim} of tensor {}", tensor.name));
                    } else if op.head_axis == Some(axis as u8)
                        && tensor.shape[usize::from(dim)] != op.grid[axis] as usize
                    {
                        report(format!(
                            "axis {axis} gives {} blocks a head each of tensor {}, which has {}",
                            op.grid[axis],
                            tensor.name,
                            tensor.shape[usize::from(dim)]
                        ));
                    }
                    seen.push(dim);
                }
            }
        }
        if broken.is_empty() { Ok(()) } else { Err(broken) }
    }
}

/// A law an operator breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("operator {op}: {what}")]
pub struct Violation {
    /// The operator.
    pub op: String,
    /// What is wrong, what is expected.
    pub what: String,
}

impl fmt::Display for ThreadBlockGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for op in &self.ops {
            write!(f, "{} grid {}x{}x{}", op.name, op.grid[0], op.grid[1], op.grid[2])?;
            for access in op.accesses.iter().flatten() {
                let kind = match access.kind {
                    AccessKind::Read => "reads",
                    AccessKind::Write => "writes",
                    AccessKind::ReadWrite => "updates",
                    AccessKind::ReduceAdd => "adds",
                    AccessKind::Append => "appends",
                };
                let map = access.map.map(|dim| dim.map_or("-".to_owned(), |d| d.to_string())).join(",");
                write!(f, " {kind} {}[{map}]", self.table[access.tensor].name)?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
