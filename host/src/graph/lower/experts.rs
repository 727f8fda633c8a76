//! Mixtures of experts in passes of several rows: an expert's rows are multiplied together.
//!
//! Of [`ExpertsUp`] and the [`ExpertsDown`] after it, whose tasks choose experts row by row, become [`ExpertRoutes`],
//! which writes down whom each row goes to, two [`RoutedLinear`]s, whose tasks share the work as those have found it,
//! and [`SlotSum`].
//!
//! PERF: the second product writes what each slot has made, f32, and the sum reads it: 512 rows of Qwen3-30B-A3B's are
//! 33 MB there and back through L2, 12 us, beside 94 us for the product's weights, and a hop. A cut along columns could
//! add in its own order and needs neither; but each of 128 blocks of 16 columns would read all slots' rows, 805 MB, 146
//! us.

use super::many_rows::are_multiplied_as_brains;
use super::*;
use crate::graph::kernel::GraphError;
use perpetua_device::kernels::gated_linear::Gating;
use perpetua_device::kernels::{ExpertRoutes, RoutedLinear, SlotSum, expert_routes, routed_linear, slot_sum};

/// `graph`, a pass over several rows, with experts' rows together where their weights are bf16 or in fewer bits.
///
/// # Errors
/// None that a graph whose operators have been judged can give.
pub(super) fn route(graph: &KernelGraph, target: &Target) -> Result<KernelGraph, GraphError> {
    let ops: Vec<&Operator> = graph.ops().collect();
    let mut routed = graph.clone();
    let mut downs: Vec<Option<Experts>> = (0..ops.len()).map(|_| None).collect();
    let mut made = Vec::with_capacity(ops.len());
    for (at, op) in ops.iter().enumerate() {
        if let Some(experts) = downs[at].take() {
            made.extend(experts.down(&mut routed.table, op, target)?);
        } else if let Some((down, experts)) = Experts::of(&mut routed.table, &ops, at)? {
            made.extend(experts.up(op, target));
            downs[down] = Some(experts);
        } else {
            made.push((*op).clone());
        }
    }
    routed.with_ops(made)
}

/// What an `ExpertsUp` and its `ExpertsDown` become.
struct Experts {
    /// Which experts rows go to, `[rows, slots]`, and how much they count.
    experts: TensorId,
    weights: TensorId,
    rows: usize,
    /// Whether the second product has the weights, being that of biases, too; else the first.
    down_weighs: bool,
}

impl Experts {
    /// Those of operator `at` of `ops`, if it is the first of two that can have their rows together, and where the
    /// second is.
    fn of(table: &mut TensorTable, ops: &[&Operator], at: usize) -> Result<Option<(usize, Experts)>, GraphError> {
        let is = |op: &Operator, task_type: u16| op.kernel.task_type == task_type && op.cut.is_none();
        let up = ops[at];
        let (true, &[Some(x), Some(logits), Some(gate), Some(second), Some(y), None, ..]) =
            (is(up, ExpertsUp::TASK_TYPE), &up.slots[..])
        else {
            return Ok(None);
        };
        let takes = |op: &&Operator| {
            is(op, ExpertsDown::TASK_TYPE) && op.slots[..experts_down::slot::W] == [Some(y), Some(logits)]
        };
        let Some(down) = (at + 1..ops.len()).find(|down| takes(&ops[*down])) else { return Ok(None) };
        // Tensor cores take two matrices of one type.
        let are_taken = table[gate].dtype == table[second].dtype
            && [Some(gate), ops[down].slots[experts_down::slot::W]]
                .iter()
                .flatten()
                .all(|t| are_multiplied_as_brains(table[*t].dtype));
        let [rows, slots, _] = table[y].shape[..] else { return Ok(None) };
        let span = |t: TensorId| 4 * table[t].strides[0] * rows;
        let fits = (2..=routed_linear::MAX_ROWS as usize).contains(&rows)
            && are_taken
            && [x, y].iter().all(|t| span(*t) <= u32::MAX as usize);
        if !fits {
            return Ok(None);
        }
        let name = |what: &str| format!("{}.{what}", up.name.strip_suffix(".up").unwrap_or(&up.name));
        let experts = table.add(&name("route"), &[rows, slots], DType::I32, BufferKind::Intermediate)?;
        let weights = table.add(&name("route.weights"), &[rows, slots], DType::F32, BufferKind::Intermediate)?;
        let down_weighs = ops[down].slots[experts_down::slot::BIAS].is_some();
        Ok(Some((down, Experts { experts, weights, rows, down_weighs })))
    }

    /// What comes in the place of `up`.
    fn up(&self, up: &Operator, target: &Target) -> [Operator; 2] {
        let experts_up::Params { gating, counting, .. } = kernels::params(&up.kernel.params);
        let route = Operator {
            name: format!("{}.route", up.name.strip_suffix(".up").unwrap_or(&up.name)),
            kernel: KernelCall {
                task_type: ExpertRoutes::TASK_TYPE,
                params: param_words(&expert_routes::Params { counting }),
                ..up.kernel
            },
            slots: vec![
                up.slots[experts_up::slot::LOGITS],
                Some(self.experts),
                Some(self.weights),
                up.slots[experts_up::slot::CORRECTION],
            ],
            axes: vec![self.by_rows([true, true, true, false])],
            cut: None,
        };
        use experts_up::slot::{GATE, GATE_BIAS, UP, UP_BIAS, X, Y};
        let [x, gate, second, y, bias, second_bias] = [X, GATE, UP, Y, GATE_BIAS, UP_BIAS].map(|slot| up.slots[slot]);
        let weights = (!self.down_weighs).then_some(self.weights);
        let slots = vec![x, Some(self.experts), gate, second, weights, y, bias, second_bias];
        let params = routed_linear::Params { gating, blocks: target.n_workers, has_slots: 0 };
        [route, shared(up, slots, params)]
    }

    /// What comes in the place of `down`: a product for each slot, and their sum.
    fn down(&self, table: &mut TensorTable, down: &Operator, target: &Target) -> Result<[Operator; 2], GraphError> {
        use experts_down::slot::{BIAS, RESIDUAL, W, X, Y};
        let [x, w, residual, y, bias] = [X, W, RESIDUAL, Y, BIAS].map(|slot| down.slots[slot]);
        let n = y.map_or(0, |y| table[y].shape[1]);
        let slots = table[self.experts].shape[1];
        let each =
            table.add(&format!("{}.slots", down.name), &[self.rows, slots, n], DType::F32, BufferKind::Intermediate)?;
        let params = routed_linear::Params { gating: Gating::default(), blocks: target.n_workers, has_slots: 1 };
        let weights = self.down_weighs.then_some(self.weights);
        let product = shared(down, vec![x, Some(self.experts), w, None, weights, Some(each), bias, None], params);
        let sum = Operator {
            name: format!("{}.sum", down.name),
            kernel: KernelCall {
                task_type: SlotSum::TASK_TYPE,
                params: param_words(&slot_sum::Params {}),
                ..down.kernel
            },
            slots: vec![Some(each), residual, y],
            axes: vec![self.by_rows([true; 3])],
            cut: None,
        };
        Ok([product, sum])
    }

    /// The rows that those of the operands have that say so.
    fn by_rows<const N: usize>(&self, operands: [bool; N]) -> Axis {
        let dims = operands.map(|has_rows| has_rows.then_some(0)).to_vec();
        Axis { len: self.rows, dims, role: AxisRole::Rows }
    }
}

/// A [`RoutedLinear`] in the place of `of`, a block of it for each worker.
fn shared(of: &Operator, slots: Vec<Option<TensorId>>, params: routed_linear::Params) -> Operator {
    let blocks = Axis { len: params.blocks as usize, dims: vec![None; slots.len()], role: AxisRole::Blocks };
    let kernel = KernelCall { task_type: RoutedLinear::TASK_TYPE, params: param_words(&params), ..of.kernel };
    Operator { name: of.name.clone(), kernel, slots, axes: vec![blocks], cut: None }
}

/// Whether `op` is a product of routed rows.
pub(super) fn is_routed(op: &Operator) -> bool {
    op.kernel.task_type == RoutedLinear::TASK_TYPE
}
