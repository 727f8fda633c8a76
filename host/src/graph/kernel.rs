//! The kernel graph: WHAT is computed (MPK: `KNGraph`).
//!
//! Operators over tensors, added in program order; a model's `build` reads like the paper. An operator names a macro
//! kernel, its tensors, and along which axes its work *can* be cut; how far each axis is cut is decided when the graph
//! is [lowered](crate::graph::lower) for a target. The operators form a DAG on petgraph, an edge per tensor that one
//! operator writes and a later one reads; several consumers, joins, residuals and updates in place are all fine.
//!
//! Every operator is judged when it is added, by its macro kernel's own `check` on the whole tensors.

use super::tensor::{BufferId, BufferKind, DTensor, OpId, TensorError, TensorId, TensorTable, row_major};
use super::threadblock::{AccessKind, BlockOp, GRID_AXES, KernelCall};
use perpetua_device::kernels::gated_linear::Gating;
use perpetua_device::kernels::linear::Activation;
use perpetua_device::kernels::routing::Counting;
use perpetua_device::kernels::{self, MacroKernel, Numbered, Spec, Use, elementwise::Function, param_words};
use perpetua_shared::control::Control;
use perpetua_shared::limits::{MAX_DRAFTS, MAX_RANK};
use perpetua_shared::{BindingId, DType, Operand, TaskFlags};
use petgraph::graph::{DiGraph, NodeIndex};
use std::collections::{HashMap, HashSet};
use std::fmt;

mod recurrent;

pub use recurrent::{ConvArgs, Gate, GateNorm, RecurrenceArgs};

/// An axis along which an operator's work can be cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Axis {
    /// Elements along it.
    pub len: usize,
    /// Per operand slot, the dimension it cuts, if any.
    pub dims: Vec<Option<u8>>,
    /// What it runs over.
    pub role: AxisRole,
}

/// What an axis runs over, which decides how it is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AxisRole {
    /// Rows of the pass (tokens).
    Rows,
    /// Output columns; cutting them cuts the weights.
    Columns,
    /// Key/value heads.
    Heads,
    /// Heads, one a block: its operands are that head's, without the dimension that this axis cuts.
    SingleHeads,
    /// Columns of every head, cut where workers are more than heads.
    HeadColumns,
    /// Cut into exactly as many blocks as it is long.
    Blocks,
}

/// One operator.
#[derive(Clone, Debug, PartialEq)]
pub struct Operator {
    /// Its name.
    pub name: String,
    /// Its macro kernel.
    pub kernel: KernelCall,
    /// Its tensors, in the macro kernel's order.
    pub slots: Vec<Option<TensorId>>,
    /// Axes it can be cut along, at most three.
    pub axes: Vec<Axis>,
    /// The cut, given by hand for an operator added by [`KernelGraph::customized`].
    pub cut: Option<BlockOp>,
}

/// Why an operator cannot be added.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// A tensor it would make is impossible.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// Its macro kernel refuses the tensors.
    #[error("operator {op}: {what}")]
    Operator {
        /// The operator.
        op: String,
        /// The rule broken.
        what: String,
    },
    /// A tensor of a name that another has.
    #[error("tensor {tensor}: {what}")]
    Redeclared {
        /// The tensor.
        tensor: String,
        /// What it was declared as, now and before.
        what: String,
    },
    /// A tensor that cannot be an output.
    #[error("output {name}: {what}")]
    Output {
        /// The output.
        name: String,
        /// What is wrong.
        what: String,
    },
}

/// What the rows of a pass are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Tokens of one sequence, one after the other.
    Sequence,
    /// Each the next token of a sequence of its own: the decoding pass of a batch.
    Batch,
    /// The next token of a sequence and drafts, guesses of those after it.
    Verify,
}

/// The graph. See the module head.
#[derive(Clone, Debug)]
pub struct KernelGraph {
    /// Buffers and tensors.
    pub table: TensorTable,
    dag: DiGraph<Operator, TensorId>,
    /// The operators' names.
    names: HashSet<String>,
    outputs: Vec<(String, TensorId)>,
    named: HashMap<String, TensorId>,
    /// The last operator that writes each buffer.
    writers: HashMap<BufferId, NodeIndex>,
    sampling_only: bool,
    /// The tokens that the rows of a pass that verifies drafts give.
    chosen: Option<TensorId>,
    /// Sequences that states and token buffers have room for, a part each.
    sequences: usize,
    /// The sequence of a batch, or the row of a pass that verifies drafts, that operators added now belong to, as their
    /// tasks' flags; 0: to none.
    part: u16,
    /// Tokens of a pass; `None` for a graph without a token dimension.
    pub rows: Option<u32>,
    /// What the rows of a pass are.
    pub pass: Pass,
    /// With which numbers a pass of many rows is read.
    pub prompt_precision: PromptPrecision,
}

/// With which numbers CPU workers read a prompt: a GPU rounds its activations to bf16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PromptPrecision {
    /// The bits that its tokens give one by one.
    Exact,
    /// Activations with 16 significant bits or more: where the core has a matrix unit (AMX) in two terms of bf16,
    /// several times as fast. Beside weights in fewer bits rounded to bf16, where the core multiplies pairs of bf16 as
    /// often as f32 (AMD's with AVX-512 BF16), up to twice as fast.
    #[default]
    High,
    /// Where it multiplies such pairs as often, activations, queries and attention's weights rounded to bf16, 1.7 times
    /// as fast: as most engines read bf16.
    Bf16,
}

impl Default for KernelGraph {
    fn default() -> KernelGraph {
        KernelGraph::new()
    }
}

impl KernelGraph {
    /// An empty graph whose intermediates are f32.
    pub fn new() -> KernelGraph {
        KernelGraph {
            table: TensorTable::default(),
            dag: DiGraph::new(),
            names: HashSet::new(),
            outputs: Vec::new(),
            named: HashMap::new(),
            writers: HashMap::new(),
            sampling_only: false,
            chosen: None,
            sequences: 1,
            part: 0,
            rows: None,
            pass: Pass::Sequence,
            prompt_precision: PromptPrecision::default(),
        }
    }

    /// An empty graph for passes of at most `rows` tokens.
    pub fn with_rows(rows: u32) -> KernelGraph {
        KernelGraph { rows: Some(rows), ..KernelGraph::new() }
    }

    /// An empty graph for passes of at most `rows` tokens of one of `sequences` sequences, which is chosen at run time.
    pub fn with_sequences(rows: u32, sequences: usize) -> KernelGraph {
        KernelGraph { sequences, ..KernelGraph::with_rows(rows) }
    }

    /// An empty graph for passes over the next token of each of `sequences` sequences, a row each.
    pub fn batch(sequences: usize) -> KernelGraph {
        KernelGraph { pass: Pass::Batch, ..KernelGraph::with_sequences(sequences as u32, sequences) }
    }

    /// An empty graph for passes over the next token of one of `sequences` sequences and drafts of those after it, at
    /// most `rows` in all.
    pub fn verify(rows: u32, sequences: usize) -> KernelGraph {
        KernelGraph { pass: Pass::Verify, ..KernelGraph::with_sequences(rows, sequences) }
    }

    /// From here on, operators belong to sequence `sequence`, or again to the whole pass. Operators of a sequence see
    /// one row, and states and token buffers declared meanwhile are the sequence's.
    fn for_sequence(&mut self, sequence: Option<usize>) {
        let is_batch = self.pass == Pass::Batch;
        assert!(sequence.is_none_or(|number| is_batch && number < self.sequences), "a sequence of the batch");
        self.part = sequence.map_or(0, TaskFlags::of_sequence);
    }

    /// The operators in program order.
    pub fn ops(&self) -> impl ExactSizeIterator<Item = &Operator> {
        self.dag.node_weights().collect::<Vec<_>>().into_iter()
    }

    /// The DAG: operators, and an edge per tensor that flows from one to another.
    pub fn dag(&self) -> &DiGraph<Operator, TensorId> {
        &self.dag
    }

    /// The tensors that can be read back after a run, with their names.
    pub fn outputs(&self) -> &[(String, TensorId)] {
        &self.outputs
    }

    /// From here on, operators run only in passes that sample a token.
    pub fn when_sampling(&mut self) {
        self.sampling_only = true;
    }

    /// Marks `tensor` as an output called `name`: it is kept until the end of the pass.
    ///
    /// # Errors
    /// A name that another output has, or a tensor that does not exist.
    pub fn output(&mut self, name: &str, tensor: TensorId) -> Result<(), GraphError> {
        if self.outputs.iter().any(|(other, _)| other == name) {
            return Err(GraphError::Output { name: name.to_owned(), what: "there is another of this name".to_owned() });
        }
        if tensor.idx() >= self.table.tensors.len() {
            let what = format!("tensor {tensor} does not exist");
            return Err(GraphError::Output { name: name.to_owned(), what });
        }
        self.outputs.push((name.to_owned(), tensor));
        Ok(())
    }

    fn named(&mut self, name: &str, shape: &[usize], dtype: DType, kind: BufferKind) -> Result<TensorId, GraphError> {
        if let Some(&tensor) = self.named.get(name) {
            let known = &self.table[tensor];
            let fail = |what: String| Err(GraphError::Redeclared { tensor: name.to_owned(), what });
            if known.shape != shape || known.dtype != dtype {
                let before = format!("{:?} {}", known.shape, known.dtype);
                return fail(format!("declared as {shape:?} {dtype}, before as {before}"));
            }
            if self.table.buffer_of(tensor).kind != kind {
                return fail("declared twice, for two purposes or with two contents".to_owned());
            }
            return Ok(tensor);
        }
        let tensor = self.table.add(name, shape, dtype, kind)?;
        self.named.insert(name.to_owned(), tensor);
        Ok(tensor)
    }

    /// A tensor the host writes before a run. Declaring it again gives the same tensor.
    pub fn input(&mut self, name: &str, shape: &[usize], dtype: DType) -> Result<TensorId, GraphError> {
        self.named(name, shape, dtype, BufferKind::Input)
    }

    /// A tensor of the checkpoint, by its name there.
    pub fn weight(&mut self, name: &str, shape: &[usize], dtype: DType) -> Result<TensorId, GraphError> {
        self.named(name, shape, dtype, BufferKind::Weight)
    }

    /// Matrices of the checkpoint, all of one `shape`, as one tensor `[n, ...shape]`: number 0 and up stand where its
    /// name has `*`.
    pub fn weight_stack(
        &mut self,
        name: &str,
        n: usize,
        shape: [usize; 2],
        dtype: DType,
    ) -> Result<TensorId, GraphError> {
        if !name.contains('*') {
            let what = "has no `*` where the numbers of its matrices stand".to_owned();
            return Err(GraphError::Operator { op: name.to_owned(), what });
        }
        let kind = BufferKind::WeightStack(n as u32);
        self.named(name, &[n, shape[0], shape[1]], dtype, kind)
    }

    /// A tensor kept from pass to pass, zero at the start. Every sequence has one: this is that of the sequence
    /// operators are added for, or in a pass over one sequence the first one's, which stands for any.
    pub fn state(&mut self, name: &str, shape: &[usize], dtype: DType) -> Result<TensorId, GraphError> {
        self.of_sequence(name, shape, dtype, BufferKind::State)
    }

    /// A tensor of this pass alone, for operators that append to it as they do to one that is kept.
    pub fn passing(&mut self, name: &str, shape: &[usize], dtype: DType) -> Result<TensorId, GraphError> {
        self.intermediate(name, shape, dtype)
    }

    fn of_sequence(
        &mut self,
        name: &str,
        shape: &[usize],
        dtype: DType,
        kind: BufferKind,
    ) -> Result<TensorId, GraphError> {
        if self.sequences == 1 {
            return self.named(name, shape, dtype, kind);
        }
        let part = shape.iter().product::<usize>();
        let all = self.named(name, &[self.sequences, part], dtype, kind)?;
        self.view(all, TaskFlags::sequence(self.part).unwrap_or(0) * part, shape, &row_major(shape))
    }

    /// A table of f32 made by the compiler.
    pub fn constant(&mut self, name: &str, values: &[f32]) -> Result<TensorId, GraphError> {
        self.named(name, &[values.len()], DType::F32, BufferKind::Constant(bytemuck::cast_slice(values).to_vec()))
    }

    /// The token buffer for `max_context` positions: one more, for the token made after the last. As to sequences, see
    /// [`KernelGraph::state`].
    pub fn tokens(&mut self, max_context: usize) -> Result<TensorId, GraphError> {
        self.of_sequence("tokens", &[max_context + 1], DType::I32, BufferKind::Tokens)
    }

    /// The control block, as words.
    pub fn control(&mut self) -> Result<TensorId, GraphError> {
        self.named("control", &[size_of::<Control>() / 4], DType::U32, BufferKind::Control)
    }

    /// A reshape or slice: a strided box of `base`'s buffer.
    pub fn view(
        &mut self,
        base: TensorId,
        offset_elems: usize,
        shape: &[usize],
        strides: &[usize],
    ) -> Result<TensorId, GraphError> {
        let of = &self.tensor("view", base)?.name;
        let name = format!("{of}[{}]", shape.iter().map(usize::to_string).collect::<Vec<_>>().join(","));
        Ok(self.table.view(&name, base, offset_elems, shape, strides)?)
    }

    /// Rows `first..first + n` of the matrix `base`.
    pub fn rows_of(&mut self, base: TensorId, first: usize, n: usize) -> Result<TensorId, GraphError> {
        let [_, k] = self.matrix("rows", "base", base)?;
        let strides = self.table[base].strides.clone();
        self.view(base, first.saturating_mul(strides[0]), &[n, k], &strides)
    }

    /// The matrix `base` as a stack of one, for [`KernelGraph::experts`].
    pub fn stack_of_one(&mut self, base: TensorId) -> Result<TensorId, GraphError> {
        let [rows, k] = self.matrix("stack", "base", base)?;
        let [row, unit] = self.table[base].strides[..] else { unreachable!("a matrix has two dimensions") };
        self.view(base, 0, &[1, rows, k], &[rows.saturating_mul(row), row, unit])
    }

    /// A contiguous tensor seen with another shape of as many elements.
    pub fn reshape(&mut self, base: TensorId, shape: &[usize]) -> Result<TensorId, GraphError> {
        let of = self.tensor("reshape", base)?;
        if of.strides != row_major(&of.shape)
            || of.len_elems() != shape.iter().fold(1, |len: usize, n| len.saturating_mul(*n))
        {
            return Err(GraphError::Operator {
                op: of.name.clone(),
                what: format!("shape {:?} strides {:?} cannot be seen as {shape:?}", of.shape, of.strides),
            });
        }
        self.view(base, 0, shape, &row_major(shape))
    }

    fn intermediate(&mut self, op: &str, shape: &[usize], dtype: DType) -> Result<TensorId, GraphError> {
        Ok(self.table.add(op, shape, dtype, BufferKind::Intermediate)?)
    }

    /// The tensor that `op` is given.
    fn tensor(&self, op: &str, tensor: TensorId) -> Result<&DTensor, GraphError> {
        self.table.tensors.get(tensor.idx()).ok_or_else(|| {
            let what = format!("tensor {tensor} does not exist");
            GraphError::Operator { op: op.to_owned(), what }
        })
    }

    fn dims(&self, op: &str, tensor: TensorId) -> Result<&[usize], GraphError> {
        Ok(&self.tensor(op, tensor)?.shape)
    }

    /// The dimensions of a tensor that `op` calls `name`.
    fn dims_of<const N: usize>(&self, op: &str, name: &str, tensor: TensorId) -> Result<[usize; N], GraphError> {
        let dims = self.dims(op, tensor)?;
        <[usize; N]>::try_from(dims).map_err(|_| {
            let what = format!("`{name}` has shape {dims:?}, expected {N} dimensions");
            GraphError::Operator { op: op.to_owned(), what }
        })
    }

    /// y[r,:] = scale * (table[tokens[pos + r],:] (+ positions[pos + r,:] + kinds[0,:])) as `[rows, hidden]`.
    pub fn embedding(&mut self, name: &str, tokens: TensorId, args: EmbeddingArgs) -> Result<TensorId, GraphError> {
        let rows = self.rows.unwrap_or(1) as usize;
        let [_, hidden] = self.matrix(name, "table", args.table)?;
        let y = self.intermediate(name, &[rows, hidden], DType::F32)?;
        self.embedding_into(name, tokens, args, y)?;
        Ok(y)
    }

    /// As [`KernelGraph::embedding`], into `y`.
    fn embedding_into(
        &mut self,
        name: &str,
        tokens: TensorId,
        EmbeddingArgs { table, positions, kinds, scale }: EmbeddingArgs,
        y: TensorId,
    ) -> Result<(), GraphError> {
        let [vocab, _] = self.matrix(name, "table", table)?;
        let [rows, _] = self.matrix(name, "y", y)?;
        use kernels::embedding::slot::{KINDS, POSITIONS, TABLE, TOKENS, Y};
        let params = kernels::embedding::Params { vocab: vocab as u32, scale };
        let operands =
            [(TOKENS, Some(tokens)), (TABLE, Some(table)), (POSITIONS, positions), (KINDS, kinds), (Y, Some(y))];
        self.add::<kernels::Embedding>(name, &params, &operands, &[Cut::rows(rows, &[(Y, 0)])])
    }

    /// y[s,:] = scale * table[the next token of sequence s,:] as `[sequences, hidden]`; an operator a sequence.
    /// `max_context`: see [`KernelGraph::tokens`].
    pub fn embedding_of_each(
        &mut self,
        name: &str,
        table: TensorId,
        scale: f32,
        max_context: usize,
    ) -> Result<TensorId, GraphError> {
        let [_, hidden] = self.matrix(name, "table", table)?;
        let y = self.intermediate(name, &[self.sequences, hidden], DType::F32)?;
        self.each_sequence(|graph, sequence| {
            let tokens = graph.tokens(max_context)?;
            let row = graph.row(y, sequence, &[1, hidden])?;
            let args = EmbeddingArgs { scale, ..EmbeddingArgs::of(table) };
            graph.embedding_into(&format!("{name}.{sequence}"), tokens, args, row)
        })?;
        Ok(y)
    }

    /// Calls `each` for every sequence of a batch, with operators belonging to it.
    fn each_sequence(
        &mut self,
        mut each: impl FnMut(&mut KernelGraph, usize) -> Result<(), GraphError>,
    ) -> Result<(), GraphError> {
        for sequence in 0..self.sequences {
            self.for_sequence(Some(sequence));
            each(self, sequence)?;
        }
        self.for_sequence(None);
        Ok(())
    }

    /// Row `row` of `base`, which is contiguous, seen with shape `shape`.
    fn row(&mut self, base: TensorId, row: usize, shape: &[usize]) -> Result<TensorId, GraphError> {
        self.view(base, row * shape.iter().product::<usize>(), shape, &row_major(shape))
    }

    /// Row `row` of `base`, whatever its strides, as one of its shape with one row.
    fn row_of(&mut self, base: TensorId, row: usize) -> Result<TensorId, GraphError> {
        let (mut shape, strides) = (self.table[base].shape.clone(), self.table[base].strides.clone());
        shape[0] = 1;
        self.view(base, row * strides[0], &shape, &strides)
    }

    fn matrix(&self, op: &str, name: &str, tensor: TensorId) -> Result<[usize; 2], GraphError> {
        self.dims_of(op, name, tensor)
    }

    /// y = x * rsqrt(mean(x^2) + eps) * w, row by row.
    pub fn rms_norm(&mut self, name: &str, x: TensorId, w: TensorId, eps: f32) -> Result<TensorId, GraphError> {
        self.normed(name, x, w, eps, [None; 2])
    }

    /// y = (residual + x * rsqrt(mean(x^2) + eps) * w) (* scale), row by row; scale: `[1]`.
    pub fn add_rms_norm(
        &mut self,
        name: &str,
        x: TensorId,
        w: TensorId,
        eps: f32,
        residual: TensorId,
        scale: Option<TensorId>,
    ) -> Result<TensorId, GraphError> {
        self.normed(name, x, w, eps, [Some(residual), scale])
    }

    fn normed(
        &mut self,
        name: &str,
        x: TensorId,
        w: TensorId,
        eps: f32,
        [residual, scale]: [Option<TensorId>; 2],
    ) -> Result<TensorId, GraphError> {
        let [rows, hidden] = self.matrix(name, "x", x)?;
        let y = self.intermediate(name, &[rows, hidden], DType::F32)?;
        use kernels::rms_norm::slot::{RESIDUAL, SCALE, SQUARES, W, WEIGHTED, X, Y};
        let params = kernels::rms_norm::Params { eps };
        let operands = [(X, Some(x)), (W, Some(w)), (Y, Some(y)), (RESIDUAL, residual), (SCALE, scale)];
        let rows = Cut::rows(rows, &[(X, 0), (Y, 0), (RESIDUAL, 0), (WEIGHTED, 0), (SQUARES, 0)]);
        self.add::<kernels::RmsNorm>(name, &params, &operands, &[rows])?;
        Ok(y)
    }

    /// y = (h - mean) * rsqrt(var + eps) * w + b with h = x (+ residual), row by row.
    pub fn layer_norm(
        &mut self,
        name: &str,
        x: TensorId,
        residual: Option<TensorId>,
        [w, b]: [TensorId; 2],
        eps: f32,
    ) -> Result<TensorId, GraphError> {
        let [rows, hidden] = self.matrix(name, "x", x)?;
        let y = self.intermediate(name, &[rows, hidden], DType::F32)?;
        use kernels::layer_norm::slot::{B, RESIDUAL, W, X, Y};
        let params = kernels::layer_norm::Params { eps };
        let operands = [(X, Some(x)), (RESIDUAL, residual), (W, Some(w)), (B, Some(b)), (Y, Some(y))];
        let rows = Cut::rows(rows, &[(X, 0), (RESIDUAL, 0), (Y, 0)]);
        self.add::<kernels::LayerNorm>(name, &params, &operands, &[rows])?;
        Ok(y)
    }

    /// y = activation(x . w^T + bias) + residual; `w` is `[n, k]`, as checkpoints store it.
    pub fn linear(
        &mut self,
        name: &str,
        x: TensorId,
        w: TensorId,
        bias: Option<TensorId>,
        activation: Activation,
        residual: Option<TensorId>,
    ) -> Result<TensorId, GraphError> {
        self.product(name, [x, w], bias, activation.number(), residual)
    }

    /// y = activation(x . w^T) * factors; `factors` is of y's shape.
    pub fn linear_times(
        &mut self,
        name: &str,
        x: TensorId,
        w: TensorId,
        activation: Activation,
        factors: TensorId,
    ) -> Result<TensorId, GraphError> {
        self.product(name, [x, w], None, activation.number() | kernels::linear::MULTIPLIES, Some(factors))
    }

    fn product(
        &mut self,
        name: &str,
        [x, w]: [TensorId; 2],
        bias: Option<TensorId>,
        activation: u32,
        residual: Option<TensorId>,
    ) -> Result<TensorId, GraphError> {
        let [rows, _] = self.matrix(name, "x", x)?;
        let [n, _] = self.matrix(name, "w", w)?;
        let y = self.intermediate(name, &[rows, n], DType::F32)?;
        use kernels::linear::slot::{BIAS, RESIDUAL, W, X, Y};
        let params = kernels::linear::Params { activation, ..Default::default() };
        let operands = [(X, Some(x)), (W, Some(w)), (BIAS, bias), (RESIDUAL, residual), (Y, Some(y))];
        let columns = Cut::columns(n, &[(W, 0), (BIAS, 0), (RESIDUAL, 1), (Y, 1)]);
        self.add::<kernels::Linear>(name, &params, &operands, &[columns])?;
        Ok(y)
    }

    /// y[r,h,:] = x[r,h,:] . w[h,:,:]^T, a linear layer a head, into `y`, `[rows, heads, n]`; w: `[heads, n, k]`; x:
    /// `[rows, heads, k]`, or `[rows, k]`, which is every head's.
    pub fn linear_of_heads(&mut self, name: &str, x: TensorId, w: TensorId, y: TensorId) -> Result<(), GraphError> {
        let [heads, n, _] = self.dims_of(name, "w", w)?;
        let [rows, of_y, _] = self.dims_of(name, "y", y)?;
        let of_x = self.dims(name, x)?;
        let has_heads = of_x.len() == 3;
        for (name_of, found) in [("y", of_y), ("x", if has_heads { of_x[1] } else { heads })] {
            if found != heads {
                let what = format!("`{name_of}` has {found} heads, expected {heads}");
                return Err(GraphError::Operator { op: name.to_owned(), what });
            }
        }
        use kernels::linear::slot::{W, X, Y};
        let params = kernels::linear::Params { activation: Activation::None.number(), ..Default::default() };
        let each = [(W, 0), (Y, 1), (X, 1)];
        let each = if has_heads { &each[..] } else { &each[..2] };
        let heads = Cut { len: heads, role: AxisRole::SingleHeads, dims: each };
        let columns = Cut { len: n, role: AxisRole::HeadColumns, dims: &[(W, 1), (Y, 2)] };
        let rows = Cut::rows(rows, &[(X, 0), (Y, 0)]);
        let operands = [(X, Some(x)), (W, Some(w)), (Y, Some(y))];
        self.add::<kernels::Linear>(name, &params, &operands, &[heads, columns, rows])
    }

    /// y = activation(x . gate^T) * (x . up^T).
    pub fn gated_linear(
        &mut self,
        name: &str,
        x: TensorId,
        [gate, up]: [TensorId; 2],
        biases: Option<[TensorId; 2]>,
        activation: Activation,
    ) -> Result<TensorId, GraphError> {
        let [rows, _] = self.matrix(name, "x", x)?;
        let [n, _] = self.matrix(name, "gate", gate)?;
        let y = self.intermediate(name, &[rows, n], DType::F32)?;
        use kernels::gated_linear::slot::{GATE, GATE_BIAS, UP, UP_BIAS, X, Y};
        let params = kernels::gated_linear::Params { activation: activation.number(), ..Default::default() };
        let [gate_bias, up_bias] = biases.map_or([None; 2], |b| b.map(Some));
        let weights = [(GATE, Some(gate)), (UP, Some(up)), (GATE_BIAS, gate_bias), (UP_BIAS, up_bias)];
        let operands = [&weights[..], &[(X, Some(x)), (Y, Some(y))]].concat();
        let columns = Cut::columns(n, &[(GATE, 0), (UP, 0), (GATE_BIAS, 0), (UP_BIAS, 0), (Y, 1)]);
        self.add::<kernels::GatedLinear>(name, &params, &operands, &[columns])?;
        Ok(y)
    }

    /// A mixture of experts: residual + the sum, over the `chosen` experts that a row of `x` goes to by its `logits`,
    /// of weight * (activation(x . gate^T) * (x . up^T)) . down^T, or what their biases and another [`Gating`] make of
    /// it. gate, up: `[experts, n, k]`; down: `[experts, k, n]`. See [`kernels::routing`].
    pub fn experts(&mut self, name: &str, x: TensorId, args: ExpertArgs) -> Result<TensorId, GraphError> {
        let made = self.experts_up(name, x, args)?;
        self.experts_down(name, made, args)
    }

    /// The first half of [`KernelGraph::experts`]: what gates and ups make, `[rows, chosen, n]`.
    pub fn experts_up(&mut self, name: &str, x: TensorId, args: ExpertArgs) -> Result<TensorId, GraphError> {
        let ExpertArgs { logits, correction, gate, up, biases, chosen, counting, gating, .. } = args;
        let [gate_bias, up_bias] = biases.map_or([None; 2], |[gate, up, _]| [Some(gate), Some(up)]);
        let [rows, _] = self.matrix(name, "x", x)?;
        let [_, n, _] = self.dims_of(name, "gate", gate)?;
        let made = self.intermediate(&format!("{name}.up"), &[rows, chosen, n], DType::F32)?;
        use kernels::experts_up::slot::{CORRECTION, GATE, GATE_BIAS, LOGITS, UP, UP_BIAS, X, Y};
        let params = kernels::experts_up::Params { gating, order: 0, eps: 0.0, counting };
        let operands = [(X, x), (LOGITS, logits), (GATE, gate), (UP, up), (Y, made)].map(|(slot, t)| (slot, Some(t)));
        let operands =
            [&operands[..], &[(GATE_BIAS, gate_bias), (UP_BIAS, up_bias), (CORRECTION, correction)]].concat();
        let columns = Cut::columns(n, &[(GATE, 1), (UP, 1), (Y, 2), (GATE_BIAS, 1), (UP_BIAS, 1)]);
        self.add::<kernels::ExpertsUp>(&format!("{name}.up"), &params, &operands, &[columns])?;
        Ok(made)
    }

    /// The second half, of what the first has `made`.
    pub fn experts_down(&mut self, name: &str, made: TensorId, args: ExpertArgs) -> Result<TensorId, GraphError> {
        let ExpertArgs { logits, correction, down, biases, residual, counting, .. } = args;
        let [rows, _, _] = self.dims_of(name, "made", made)?;
        let [_, k, _] = self.dims_of(name, "down", down)?;
        use kernels::experts_down::slot::{BIAS, CORRECTION, LOGITS, RESIDUAL, W, X, Y};
        let y = self.intermediate(&format!("{name}.down"), &[rows, k], DType::F32)?;
        let params = kernels::experts_down::Params { order: 0, counting };
        let operands = [(X, made), (LOGITS, logits), (W, down), (Y, y)].map(|(slot, t)| (slot, Some(t)));
        let bias = biases.map(|[.., down]| down);
        let operands = [&operands[..], &[(RESIDUAL, residual), (BIAS, bias), (CORRECTION, correction)]].concat();
        let columns = Cut::columns(k, &[(W, 1), (RESIDUAL, 1), (Y, 1), (BIAS, 1)]);
        self.add::<kernels::ExpertsDown>(&format!("{name}.down"), &params, &operands, &[columns])?;
        Ok(y)
    }

    /// Normalises (when weights are given) and rotates q in place and k, and appends k and v, if there are such, to
    /// `cache`, keys and values of `[kv_heads, context, d]` each. Shapes: see [`perpetua_device::kernels::rope`].
    pub fn rope(&mut self, name: &str, args: RopeArgs, cache: [TensorId; 2]) -> Result<(), GraphError> {
        let RopeArgs {
            q,
            kv,
            norms: [q_norm, k_norm],
            norms_values,
            norms_turned,
            frequencies,
            turned_pairs,
            factor,
            eps,
        } = args;
        use kernels::rope::slot::{FREQUENCIES, K, K_CACHE, K_NORM, Q, Q_NORM, V, V_CACHE};
        let [rows, n_kv, _, _] = self.dims_of(name, "q", q)?;
        let heads = Cut::heads(n_kv, &[(Q, 1), (K, 1), (V, 1), (K_CACHE, 0), (V_CACHE, 0)]);
        // Of the caches a block has the positions of its rows.
        let rows = Cut::rows(rows, &[(Q, 0), (K, 0), (V, 0)]);
        let mut operands = vec![(Q, Some(q)), (Q_NORM, q_norm), (K_NORM, k_norm), (FREQUENCIES, Some(frequencies))];
        if let Some([k, v]) = kv {
            let appended = [(K, k), (V, v), (K_CACHE, cache[0]), (V_CACHE, cache[1])];
            operands.extend(appended.map(|(slot, tensor)| (slot, Some(tensor))));
        }
        use kernels::rope::{TURNED, VALUES};
        let norms = if norms_values { VALUES } else { 0 } | if norms_turned { TURNED } else { 0 };
        let params = kernels::rope::Params { eps, turned_pairs: turned_pairs as u32, factor, norms };
        self.add::<kernels::Rope>(name, &params, &operands, &[heads, rows])
    }

    /// softmax(q . k^T * scale) . v as `[rows, kv_heads * group * d]`, as `args` say. q: `[rows, kv_heads, group, d]`;
    /// k, v: `[kv_heads, context, d]`.
    pub fn attention(
        &mut self,
        name: &str,
        q: TensorId,
        [k, v]: [TensorId; 2],
        args: AttentionArgs,
    ) -> Result<TensorId, GraphError> {
        let [rows, n_kv, group, d] = self.dims_of(name, "q", q)?;
        let flat = self.intermediate(name, &[rows, n_kv * group * d], DType::F32)?;
        let y = self.reshape(flat, &[rows, n_kv, group, d])?;
        self.attention_into(name, q, [k, v], y, args)?;
        Ok(flat)
    }

    /// As [`KernelGraph::attention`], into `y`, of `q`'s shape.
    fn attention_into(
        &mut self,
        name: &str,
        q: TensorId,
        [k, v]: [TensorId; 2],
        y: TensorId,
        AttentionArgs { scale, mask, sinks }: AttentionArgs,
    ) -> Result<(), GraphError> {
        let [rows, n_kv, _, _] = self.dims_of(name, "q", q)?;
        use kernels::attention::slot::{K, Q, SINKS, V, Y};
        let [window, ahead] = mask.seen();
        let params = kernels::attention::Params { scale, window, ahead, splits: 1, ..Default::default() };
        let operands = [(Q, Some(q)), (K, Some(k)), (V, Some(v)), (Y, Some(y)), (SINKS, sinks)];
        let heads = Cut::heads(n_kv, &[(Q, 1), (K, 0), (V, 0), (Y, 1), (SINKS, 0)]);
        let rows = Cut::rows(rows, &[(Q, 0), (Y, 0)]);
        self.add::<kernels::Attention>(name, &params, &operands, &[heads, rows])
    }

    /// [`KernelGraph::rope`], and [`KernelGraph::attention`] with `queries`, of every sequence's row over its own caches,
    /// as `[sequences, kv_heads * group * d]`. `caches` gives those of the sequence that operators are added for.
    pub fn attend_each(
        &mut self,
        name: &str,
        rope: RopeArgs,
        queries: TensorId,
        args: AttentionArgs,
        mut caches: impl FnMut(&mut KernelGraph) -> Result<Caches, GraphError>,
    ) -> Result<TensorId, GraphError> {
        let [_, n_kv, group, d] = self.dims_of(name, "q", queries)?;
        self.dims_of::<4>(name, "q", rope.q)?;
        let flat = self.intermediate(&format!("{name}.attention"), &[self.sequences, n_kv * group * d], DType::F32)?;
        self.each_sequence(|graph, sequence| {
            let q = graph.row_of(rope.q, sequence)?;
            let kv = match rope.kv {
                Some([k, v]) => Some([graph.row_of(k, sequence)?, graph.row_of(v, sequence)?]),
                None => None,
            };
            let y = graph.row(flat, sequence, &[1, n_kv, group, d])?;
            let caches = caches(graph)?;
            graph.rope(&format!("{name}.rope.{sequence}"), RopeArgs { q, kv, ..rope }, caches.appended)?;
            let queries = if queries == rope.q { q } else { graph.row_of(queries, sequence)? };
            graph.attention_into(&format!("{name}.attention.{sequence}"), queries, caches.attended, y, args)
        })?;
        Ok(flat)
    }

    /// y = f(a, b) element by element; `b` is absent for [`Function::Activate`].
    pub fn elementwise(
        &mut self,
        name: &str,
        function: Function,
        activation: Activation,
        a: TensorId,
        b: Option<TensorId>,
    ) -> Result<TensorId, GraphError> {
        let [rows, n] = self.matrix(name, "a", a)?;
        let y = self.intermediate(name, &[rows, n], DType::F32)?;
        use kernels::elementwise::slot::{A, B, Y};
        let params = kernels::elementwise::Params {
            function: function as u32,
            activation: activation.number(),
            beta: 0.0,
            original: 1,
        };
        let columns = Cut::columns(n, &[(A, 1), (B, 1), (Y, 1)]);
        let rows = Cut::rows(rows, &[(A, 0), (B, 0), (Y, 0)]);
        self.add::<kernels::Elementwise>(name, &params, &[(A, Some(a)), (B, b), (Y, Some(y))], &[columns, rows])?;
        Ok(y)
    }

    /// Rows of x, each multiplied with what its position asks for: see [`Function::Lengthen`].
    pub fn lengthen(&mut self, name: &str, x: TensorId, beta: f32, original: u32) -> Result<TensorId, GraphError> {
        let [rows, n] = self.matrix(name, "a", x)?;
        let y = self.intermediate(name, &[rows, n], DType::F32)?;
        use kernels::elementwise::slot::{A, Y};
        let (function, activation) = (Function::Lengthen as u32, Activation::None.number());
        let params = kernels::elementwise::Params { function, activation, beta, original };
        let add = |graph: &mut KernelGraph, name: &str, [x, y]: [TensorId; 2], rows: usize| {
            let columns = Cut::columns(n, &[(A, 1), (Y, 1)]);
            let rows = Cut::rows(rows, &[(A, 0), (Y, 0)]);
            graph.add::<kernels::Elementwise>(name, &params, &[(A, Some(x)), (Y, Some(y))], &[columns, rows])
        };
        match self.pass {
            // Each at its own position.
            Pass::Batch => self.each_sequence(|graph, sequence| {
                let of_row = [graph.row_of(x, sequence)?, graph.row_of(y, sequence)?];
                add(graph, &format!("{name}.{sequence}"), of_row, 1)
            })?,
            _ => add(self, name, [x, y], rows)?,
        }
        Ok(y)
    }

    /// a + b.
    pub fn add_tensors(&mut self, name: &str, a: TensorId, b: TensorId) -> Result<TensorId, GraphError> {
        self.elementwise(name, Function::Add, Activation::None, a, Some(b))
    }

    /// The pass's last row, `[1, hidden]`.
    pub fn select_row(&mut self, name: &str, x: TensorId) -> Result<TensorId, GraphError> {
        let [_, hidden] = self.matrix(name, "x", x)?;
        let y = self.intermediate(name, &[1, hidden], DType::F32)?;
        use kernels::select_row::slot::{X, Y};
        self.add::<kernels::SelectRow>(name, &kernels::select_row::Params {}, &[(X, Some(x)), (Y, Some(y))], &[])?;
        Ok(y)
    }

    /// One row of the pass's rows, normalised on request, `[1, hidden]`.
    pub fn pool(&mut self, name: &str, x: TensorId, pooled: Pooled, normalise: bool) -> Result<TensorId, GraphError> {
        let [_, hidden] = self.matrix(name, "x", x)?;
        let y = self.intermediate(name, &[1, hidden], DType::F32)?;
        let params = kernels::pool::Params { mean: u32::from(pooled == Pooled::Mean), normalise: u32::from(normalise) };
        use kernels::pool::slot::{X, Y};
        self.add::<kernels::Pool>(name, &params, &[(X, Some(x)), (Y, Some(y))], &[])?;
        Ok(y)
    }

    /// Chooses the next token from `logits` `[1, vocab]` and appends it to `tokens`: greedy or by the control block's
    /// temperature, top-k and top-p, after its repetition penalty. The scan for the largest logit is cut into blocks.
    pub fn sample(&mut self, name: &str, logits: TensorId, tokens: TensorId) -> Result<(), GraphError> {
        self.choose(name, logits, tokens, None)
    }

    /// [`KernelGraph::sample`]; `tokens` may be for that token alone where `text` has those before it.
    fn choose(
        &mut self,
        name: &str,
        logits: TensorId,
        tokens: TensorId,
        text: Option<TensorId>,
    ) -> Result<(), GraphError> {
        let [_, vocab] = self.matrix(name, "logits", logits)?;
        let blocks = vocab.div_ceil(4096).clamp(1, 64);
        let values = self.intermediate("argmax_values", &[blocks], DType::F32)?;
        let indices = self.intermediate("argmax_indices", &[blocks], DType::I32)?;
        {
            use kernels::argmax::slot::{INDICES, VALUES, X};
            let params = kernels::argmax::Params { blocks: blocks as u32, len_elems: vocab as u32 };
            let operands = [(X, Some(logits)), (VALUES, Some(values)), (INDICES, Some(indices))];
            let cut = Cut { len: blocks, role: AxisRole::Blocks, dims: &[(X, 1), (VALUES, 0), (INDICES, 0)] };
            self.add::<kernels::ArgmaxPartial>(&format!("{name}.argmax"), &params, &operands, &[cut])?;
        }
        use kernels::sample::slot::{CONTROL, INDICES, LOGITS, TEXT, TOKENS, VALUES};
        let control = self.control()?;
        let found = [(LOGITS, logits), (VALUES, values), (INDICES, indices), (CONTROL, control), (TOKENS, tokens)];
        let operands = [&found.map(|(slot, tensor)| (slot, Some(tensor)))[..], &[(TEXT, text)]].concat();
        self.add::<kernels::Sample>(name, &kernels::sample::Params {}, &operands, &[])
    }

    /// [`KernelGraph::sample`] for every sequence: of `logits` `[sequences, vocab]` a row each. `max_context`: see
    /// [`KernelGraph::tokens`].
    pub fn sample_each(&mut self, name: &str, logits: TensorId, max_context: usize) -> Result<(), GraphError> {
        let [_, vocab] = self.matrix(name, "logits", logits)?;
        self.each_sequence(|graph, sequence| {
            let tokens = graph.tokens(max_context)?;
            let row = graph.row(logits, sequence, &[1, vocab])?;
            graph.sample(&format!("{name}.{sequence}"), row, tokens)
        })
    }

    /// [`KernelGraph::sample`] from each row of `logits` `[rows, vocab]` in a pass that verifies drafts: for `advance`,
    /// which knows how many of them count. `max_context`: see [`KernelGraph::tokens`].
    pub fn sample_rows(&mut self, name: &str, logits: TensorId, max_context: usize) -> Result<(), GraphError> {
        let [rows, vocab] = self.matrix(name, "logits", logits)?;
        if self.pass != Pass::Verify || rows > MAX_DRAFTS + 1 {
            let what =
                format!("{rows} rows in a pass of kind {:?}, expected at most {} of drafts", self.pass, MAX_DRAFTS + 1);
            return Err(GraphError::Operator { op: name.to_owned(), what });
        }
        let text = self.tokens(max_context)?;
        let chosen = self.intermediate("chosen", &[rows], DType::I32)?;
        for row in 0..rows {
            self.part = TaskFlags::of_row(row);
            let (logits, chosen) = (self.row(logits, row, &[1, vocab])?, self.row(chosen, row, &[1])?);
            self.choose(&format!("{name}.{row}"), logits, chosen, Some(text))?;
        }
        (self.part, self.chosen) = (0, Some(chosen));
        Ok(())
    }

    /// Ends the pass: the token loop's turn. `compile` adds it where it is missing.
    pub fn advance(&mut self) -> Result<(), GraphError> {
        let tokens = match self.named.get("tokens") {
            // The turn of a batch is every sequence's.
            Some(&tokens) => match self.dims("advance", tokens)? {
                [sequences, part] if self.pass == Pass::Batch => self.view(tokens, 0, &[sequences * part], &[1])?,
                [_, part] => self.view(tokens, 0, &[*part], &[1])?,
                _ => tokens,
            },
            None => self.tokens(0)?,
        };
        let control = self.control()?;
        self.sampling_only = false;
        use kernels::advance::slot::{CHOSEN, CONTROL, TOKENS};
        let operands = [(TOKENS, Some(tokens)), (CHOSEN, self.chosen), (CONTROL, Some(control))];
        self.add::<kernels::Advance>("advance", &kernels::advance::Params {}, &operands, &[])
    }

    /// Whether the last operator is `advance`.
    pub fn is_ended(&self) -> bool {
        self.dag.node_weights().last().is_some_and(|op| op.kernel.task_type == kernels::Advance::TASK_TYPE)
    }

    /// Whether every intermediate is written before it is read, so that nobody sees another's bytes. What the host or
    /// an earlier pass left is there from the start, and who appends asks for nothing.
    pub(crate) fn check_written(&self) -> Result<(), GraphError> {
        let mut is_written: Vec<bool> =
            self.table.buffers.iter().map(|buffer| buffer.kind != BufferKind::Intermediate).collect();
        for op in self.dag.node_weights() {
            let spec = Spec::of(op.kernel.task_type).expect("operators are judged when they are added");
            let usage = |slot| kernels::use_of(spec, slot, |slot| op.slots[slot].is_some());
            let tensors = || op.slots.iter().enumerate().filter_map(|(slot, t)| Some((slot, &self.table[(*t)?])));
            // What was there of a token that is chosen beside the text is of no interest.
            let beside_text = (op.kernel.task_type == kernels::Sample::TASK_TYPE)
                .then(|| op.slots[kernels::sample::slot::TEXT].and(op.slots[kernels::sample::slot::TOKENS]))
                .flatten();
            for (slot, tensor) in tensors() {
                let is_read = matches!(usage(slot), Use::Read | Use::Update);
                let is_new = beside_text.is_some_and(|chosen| self.table[chosen].buffer == tensor.buffer);
                if is_read && !is_new && !is_written[tensor.buffer.idx()] {
                    let name = spec.slots[slot].name;
                    let what = format!("`{name}` is tensor {tensor}, which no operator before it writes");
                    return Err(GraphError::Operator { op: op.name.clone(), what });
                }
            }
            for (_, tensor) in tensors().filter(|(slot, _)| usage(*slot) != Use::Read) {
                is_written[tensor.buffer.idx()] = true;
            }
        }
        match self.outputs.iter().find(|(_, tensor)| !is_written[self.table[*tensor].buffer.idx()]) {
            Some((name, tensor)) => {
                let what = format!("it is tensor {}, which no operator writes", self.table[*tensor]);
                Err(GraphError::Output { name: name.clone(), what })
            }
            None => Ok(()),
        }
    }

    /// Adds an operator the library has no method for: any macro kernel, with the cut given by hand. `op.accesses` are
    /// the macro kernel's operands in order, `op.kernel` must be set. docs/kernels.md has an example. (MPK:
    /// `KN_CUSTOMIZED_OP`.)
    ///
    /// # Errors
    /// An operand or a kernel that does not exist, or is not used as the macro kernel uses it.
    pub fn customized(&mut self, op: BlockOp) -> Result<OpId, GraphError> {
        let Some(kernel) = op.kernel else {
            return Err(GraphError::Operator { op: op.name, what: "has no macro kernel to run".to_owned() });
        };
        let slots = op.accesses.iter().map(|access| access.as_ref().map(|access| access.tensor)).collect();
        self.push(Operator { name: op.name.clone(), kernel, slots, axes: Vec::new(), cut: Some(op) })
    }

    /// This graph's tensors, outputs and passes with other operators.
    ///
    /// # Errors
    /// An operator that is judged wrong.
    pub(super) fn with_ops(&self, ops: impl IntoIterator<Item = Operator>) -> Result<KernelGraph, GraphError> {
        let mut graph =
            KernelGraph { dag: DiGraph::new(), names: HashSet::new(), writers: HashMap::new(), ..self.clone() };
        ops.into_iter().try_for_each(|op| graph.push(op).map(|_| ()))?;
        Ok(graph)
    }

    /// An operator that runs macro kernel `K` with `operands`, each beside its slot (no other is there), cut along
    /// `cuts`.
    fn add<K: MacroKernel + Numbered>(
        &mut self,
        name: &str,
        params: &K::Params,
        operands: &[(usize, Option<TensorId>)],
        cuts: &[Cut<'_>],
    ) -> Result<(), GraphError> {
        debug_assert!(cuts.len() <= GRID_AXES);
        let mut slots = vec![None; K::SLOTS.len()];
        operands.iter().for_each(|(slot, tensor)| slots[*slot] = *tensor);
        let axes = cuts.iter().map(|cut| cut.axis(K::SLOTS.len())).collect();
        let flags = if self.sampling_only { TaskFlags::ONLY_WHEN_SAMPLING } else { 0 } | self.part;
        let kernel = KernelCall { task_type: K::TASK_TYPE, flags, params: param_words(params) };
        self.push(Operator { name: name.to_owned(), kernel, slots, axes, cut: None }).map(|_| ())
    }

    fn push(&mut self, op: Operator) -> Result<OpId, GraphError> {
        let fail = |what: String| GraphError::Operator { op: op.name.clone(), what };
        let spec = Spec::of(op.kernel.task_type)
            .ok_or_else(|| fail(format!("macro kernel {} does not exist", op.kernel.task_type)))?;
        op.slots.iter().flatten().try_for_each(|t| self.tensor(&op.name, *t).map(|_| ()))?;
        // Nothing would be cut into no blocks.
        if let Some(tensor) =
            op.slots.iter().flatten().map(|t| &self.table[*t]).find(|tensor| tensor.shape.contains(&0))
        {
            return Err(fail(format!("tensor {tensor} has no elements, expected at least 1 along each dimension")));
        }
        let too_long = |tensor: &&DTensor| tensor.shape.iter().chain(&tensor.strides).any(|n| *n > u32::MAX as usize);
        if let Some(tensor) = op.slots.iter().flatten().map(|t| &self.table[*t]).find(too_long) {
            let what = format!("tensor {tensor}, strides {:?}: expected at most {} of each", tensor.strides, u32::MAX);
            return Err(fail(what));
        }
        // Launches just in time are by name, and so are reports.
        if self.names.contains(&op.name) {
            return Err(fail("there is another operator of this name".to_owned()));
        }
        // A cut by hand is judged block by block when it is lowered; here only the signature counts.
        if let Some(cut) = &op.cut {
            judge_cut(spec, cut).map_err(fail)?;
        } else {
            let heads = op.axes.iter().find(|axis| axis.role == AxisRole::SingleHeads);
            let operand = |(slot, tensor): (usize, &Option<TensorId>)| {
                let Some(tensor) = *tensor else { return Operand::ABSENT };
                let whole = whole_operand(&self.table[tensor]);
                of_one_head(whole, heads.and_then(|axis| axis.dims[slot]))
            };
            let io: Vec<Operand> = op.slots.iter().enumerate().map(operand).collect();
            spec.check(&op.kernel.params, &io).map_err(fail)?;
        }
        self.names.insert(op.name.clone());
        // An edge from the last writer of each tensor's buffer that this operator reads.
        let node = self.dag.add_node(op);
        let mut written = Vec::new();
        let slots = self.dag[node].slots.clone();
        for (slot, tensor) in slots.iter().enumerate().filter_map(|(slot, t)| Some((slot, (*t)?))) {
            let usage = kernels::use_of(spec, slot, |slot| slots[slot].is_some());
            let buffer = self.table[tensor].buffer;
            if usage != Use::Write
                && let Some(&writer) = self.writers.get(&buffer)
            {
                self.dag.add_edge(writer, node, tensor);
            }
            if usage != Use::Read {
                written.push((buffer, node));
            }
        }
        self.writers.extend(written);
        Ok(OpId(node.index() as u32))
    }
}

/// Whether a cut given by hand has its macro kernel's signature: dependencies follow what it says of each tensor's use,
/// and the kernel does what its slots say.
fn judge_cut(spec: &Spec, cut: &BlockOp) -> Result<(), String> {
    if cut.accesses.len() != spec.slots.len() {
        return Err(format!("{} tensors given, {} takes {}", cut.accesses.len(), spec.name, spec.slots.len()));
    }
    for (slot, access) in cut.accesses.iter().enumerate() {
        let Some(access) = access else { continue };
        let fitting = AccessKind::from(kernels::use_of(spec, slot, |slot| cut.accesses[slot].is_some()));
        // Reading and writing covers all else.
        if access.kind != fitting && access.kind != AccessKind::ReadWrite {
            let name = spec.slots[slot].name;
            return Err(format!("operand `{name}` is given as {:?}, expected {fitting:?}", access.kind));
        }
    }
    for (what, axis) in [("rows are cut", cut.row_axis), ("heads are given", cut.head_axis)] {
        if let Some(axis) = axis.filter(|axis| usize::from(*axis) >= GRID_AXES) {
            return Err(format!("{what} by axis {axis}, expected one of {GRID_AXES}"));
        }
    }
    Ok(())
}

/// Which row [`KernelGraph::pool`] makes of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooled {
    /// Their mean.
    Mean,
    /// The first of them.
    First,
}

/// Which positions a row attends to, its own being one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mask {
    /// All of the pass's rows.
    Bidirectional,
    /// Of these, those that are at most so far from its own.
    Around(usize),
    /// All up to its own.
    Causal,
    /// The last so many up to its own, at least 1.
    Window(usize),
}

impl Mask {
    /// See the macro kernel's `window` and `ahead`.
    fn seen(self) -> [u32; 2] {
        use kernels::attention::ALL;
        let at_most = |n: usize| u32::try_from(n).map_or(ALL, |n| n.min(ALL));
        match self {
            Mask::Bidirectional => [ALL, ALL],
            Mask::Around(n) => [at_most(n.saturating_add(1)), at_most(n)],
            Mask::Causal => [ALL, 0],
            Mask::Window(n) => [at_most(n), 0],
        }
    }
}

/// What [`KernelGraph::embedding`] takes.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingArgs {
    /// `[vocab, hidden]`.
    pub table: TensorId,
    /// `[positions, hidden]`.
    pub positions: Option<TensorId>,
    /// `[kinds, hidden]`.
    pub kinds: Option<TensorId>,
    /// What the sum is multiplied with.
    pub scale: f32,
}

impl EmbeddingArgs {
    /// The rows of `table` as they are.
    pub fn of(table: TensorId) -> EmbeddingArgs {
        EmbeddingArgs { table, positions: None, kinds: None, scale: 1.0 }
    }
}

/// What [`KernelGraph::experts`] takes.
#[derive(Clone, Copy, Debug)]
pub struct ExpertArgs {
    /// `[rows, experts]` f32.
    pub logits: TensorId,
    /// `[experts]`: what is added to the logits' sigmoids where experts are chosen, not where they count.
    pub correction: Option<TensorId>,
    /// `[experts, n, k]`.
    pub gate: TensorId,
    /// `[experts, n, k]`.
    pub up: TensorId,
    /// `[experts, k, n]`.
    pub down: TensorId,
    /// Of gate and up, `[experts, n]`, and of down, `[experts, k]`; not of experts that count as
    /// [`Weighting::All`](perpetua_device::kernels::routing::Weighting::All).
    pub biases: Option<[TensorId; 3]>,
    /// `[rows, k]`.
    pub residual: Option<TensorId>,
    /// Experts that a row goes to.
    pub chosen: usize,
    /// How much an expert counts.
    pub counting: Counting,
    /// What becomes of what gate and up make.
    pub gating: Gating,
}

/// What [`KernelGraph::attention`] takes, but for the tensors it attends with.
#[derive(Clone, Copy, Debug)]
pub struct AttentionArgs {
    /// Multiplies the scores.
    pub scale: f32,
    /// What each row sees.
    pub mask: Mask,
    /// `[kv_heads, group]`, where rows see no position after their own: of each query head a score more, whose value is
    /// zero.
    pub sinks: Option<TensorId>,
}

/// A layer's caches of keys and values, `[kv_heads, context, d]` each: what is appended to, and what is attended to.
#[derive(Clone, Copy, Debug)]
pub struct Caches {
    /// What [`KernelGraph::rope`] takes.
    pub appended: [TensorId; 2],
    /// What [`KernelGraph::attention`] takes.
    pub attended: [TensorId; 2],
}

impl From<[TensorId; 2]> for Caches {
    /// The same for both.
    fn from(both: [TensorId; 2]) -> Caches {
        Caches { appended: both, attended: both }
    }
}

/// What [`KernelGraph::rope`] takes, but for the cache.
#[derive(Clone, Copy, Debug)]
pub struct RopeArgs {
    /// `[rows, kv_heads, group, d]`, rotated in place.
    pub q: TensorId,
    /// Keys and values, `[rows, kv_heads, d]` each, which may be one tensor; `None`: nothing is appended, and the cache
    /// is another layer's.
    pub kv: Option<[TensorId; 2]>,
    /// Weights of the per-head norms of q and k, `[d]` each.
    pub norms: [Option<TensorId>; 2],
    /// Whether values have such a norm, without weights.
    pub norms_values: bool,
    /// Whether weights are multiplied with what is turned, all of each head, and not with what is going to be.
    pub norms_turned: bool,
    /// `[d/2]` f32, radians per position.
    pub frequencies: TensorId,
    /// How many pairs are turned, the first ones; of frequencies beyond theirs all are 0.
    pub turned_pairs: usize,
    /// What multiplies them; 1 as a rule.
    pub factor: f32,
    /// Epsilon of the norms.
    pub eps: f32,
}

/// An [`Axis`] of `len` elements, with the dimension that it cuts of each slot that it cuts.
struct Cut<'a> {
    len: usize,
    role: AxisRole,
    dims: &'a [(usize, u8)],
}

impl<'a> Cut<'a> {
    fn rows(len: usize, dims: &'a [(usize, u8)]) -> Cut<'a> {
        Cut { len, role: AxisRole::Rows, dims }
    }

    fn columns(len: usize, dims: &'a [(usize, u8)]) -> Cut<'a> {
        Cut { len, role: AxisRole::Columns, dims }
    }

    fn heads(len: usize, dims: &'a [(usize, u8)]) -> Cut<'a> {
        Cut { len, role: AxisRole::Heads, dims }
    }

    /// Of an operator with so many slots.
    fn axis(&self, slots: usize) -> Axis {
        let mut dims = vec![None; slots];
        self.dims.iter().for_each(|(slot, dim)| dims[*slot] = Some(*dim));
        Axis { len: self.len, dims, role: self.role }
    }
}

/// The whole of `tensor` as an operand without an address.
pub fn whole_operand(tensor: &DTensor) -> Operand {
    let mut operand = Operand {
        offset_bytes: (tensor.offset_elems * tensor.dtype.size_bytes()) as u64,
        binding: BindingId(0),
        dtype: tensor.dtype as u16,
        rank: tensor.shape.len() as u8,
        ..Operand::ABSENT
    };
    for dim in 0..tensor.shape.len().min(MAX_RANK) {
        operand.extent[dim] = tensor.shape[dim] as u32;
        operand.stride_elems[dim] = tensor.strides[dim] as u32;
    }
    operand
}

/// `operand` of a head alone, if heads are a dimension of it.
pub(super) fn of_one_head(mut operand: Operand, dim: Option<u8>) -> Operand {
    let Some(dim) = dim else { return operand };
    let (first, end) = (usize::from(dim), usize::from(operand.rank));
    for (of, beyond) in [(&mut operand.extent, 1), (&mut operand.stride_elems, 0)] {
        of[first..end].rotate_left(1);
        of[end - 1] = beyond;
    }
    operand.rank -= 1;
    operand
}

impl fmt::Display for KernelGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for node in self.dag.node_indices() {
            let op = &self.dag[node];
            let kernel = Spec::of(op.kernel.task_type).map_or("?", |spec| spec.name);
            write!(f, "op{} {} {kernel}(", node.index(), op.name)?;
            let names = op.slots.iter().map(|slot| slot.map_or("-".to_owned(), |t| self.table[t].to_string()));
            writeln!(f, "{})", names.collect::<Vec<_>>().join(", "))?;
        }
        Ok(())
    }
}
