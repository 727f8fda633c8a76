//! Operators of layers that pass a state from row to row, and the gates behind attention.

use super::*;
use perpetua_device::kernels::{CausalConv, Gated, Recurrence, causal_conv, gated, recurrence};

/// What [`KernelGraph::causal_conv`] takes, but for the state.
#[derive(Clone, Copy, Debug)]
pub struct ConvArgs {
    /// `[rows, n]`.
    pub x: TensorId,
    /// `[n, taps]`.
    pub w: TensorId,
    /// `[n]`.
    pub bias: Option<TensorId>,
    /// `[rows, n]`: what x is multiplied with.
    pub gate: Option<TensorId>,
    /// `[rows, n]`: what the result is multiplied with.
    pub scale: Option<TensorId>,
    /// Of the sums.
    pub activation: Activation,
}

/// What [`KernelGraph::recurrence`] takes, but for the state.
#[derive(Clone, Copy, Debug)]
pub struct RecurrenceArgs {
    /// `[rows, key_heads, d_k]`.
    pub q: TensorId,
    /// `[rows, key_heads, d_k]`.
    pub k: TensorId,
    /// `[rows, key_heads, group, d_v]`.
    pub v: TensorId,
    /// `[rows, key_heads, group]`: how much is forgotten, with `a_log` and `dt_bias`.
    pub a: TensorId,
    /// `[rows, key_heads, group]`: how much is corrected; without, it is a state space.
    pub b: Option<TensorId>,
    /// `[key_heads, group]`.
    pub a_log: TensorId,
    /// `[key_heads, group]`.
    pub dt_bias: TensorId,
    /// `[key_heads, group]`: how much of v is in the result.
    pub skip: Option<TensorId>,
}

/// What [`KernelGraph::gated`] multiplies with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// The sigmoid.
    Sigmoid,
    /// x * sigmoid(x).
    Silu,
}

/// What [`KernelGraph::gated`] normalises: a head divided by the root of its mean square and `eps`, times weights `w`,
/// `[d]`.
#[derive(Clone, Copy, Debug)]
pub enum GateNorm {
    /// Nothing.
    None,
    /// x, before it is multiplied.
    OfX {
        /// Weights.
        w: TensorId,
        /// Added to the mean square.
        eps: f32,
    },
    /// What it has become then.
    OfGated {
        /// Weights.
        w: TensorId,
        /// Added to the mean square.
        eps: f32,
    },
}

impl KernelGraph {
    /// y[r,c] = act(sum over j of w[c,j] * u[r + j + 1 - taps, c] + bias[c]) (* scale[r,c]), u = x (* gate), as `[rows,
    /// n]`. The last rows of u are kept in a state called `state`, `[taps - 1, n]` f32, for the pass after. In the pass
    /// over a batch each sequence has its own row and state, and an operator.
    pub fn causal_conv(&mut self, name: &str, args: ConvArgs, state: &str) -> Result<TensorId, GraphError> {
        let [rows, n] = self.matrix(name, "x", args.x)?;
        let y = self.intermediate(name, &[rows, n], DType::F32)?;
        self.each_of_batch(name, |graph, name, row| {
            let mut part = |of: TensorId| graph.part_of(of, row);
            let (x, y) = (part(args.x)?, part(y)?);
            let (gate, scale) = (args.gate.map(&mut part).transpose()?, args.scale.map(&mut part).transpose()?);
            let args = ConvArgs { x, gate, scale, ..args };
            graph.causal_conv_into(name, args, state, y)
        })?;
        Ok(y)
    }

    fn causal_conv_into(&mut self, name: &str, args: ConvArgs, state: &str, y: TensorId) -> Result<(), GraphError> {
        let ConvArgs { x, w, bias, gate, scale, activation } = args;
        let [n, taps] = self.matrix(name, "w", w)?;
        let state = self.state(state, &[taps.saturating_sub(1), n], DType::F32)?;
        use causal_conv::slot::{BIAS, GATE, SCALE, STATE, W, X, Y};
        let operands = [
            (X, Some(x)),
            (W, Some(w)),
            (BIAS, bias),
            (GATE, gate),
            (SCALE, scale),
            (STATE, Some(state)),
            (Y, Some(y)),
        ];
        let columns = Cut::columns(n, &[(X, 1), (W, 0), (BIAS, 0), (GATE, 1), (SCALE, 1), (STATE, 1), (Y, 1)]);
        let params = causal_conv::Params { activation: activation.number() };
        self.add::<CausalConv>(name, &params, &operands, &[columns])
    }

    /// Linear attention by the gated delta rule, or a state space, as `[rows, key_heads * group * d_v]`: see
    /// [`perpetua_device::kernels::recurrence`]. What it knows of the rows before is kept in a state called `state`,
    /// `[key_heads, group, d_v, d_k]` f32. In the pass over a batch each sequence has its own row and state, and an
    /// operator.
    pub fn recurrence(&mut self, name: &str, args: RecurrenceArgs, state: &str) -> Result<TensorId, GraphError> {
        let [rows, heads, group, d_v] = self.dims_of(name, "v", args.v)?;
        let flat = self.intermediate(name, &[rows, heads * group * d_v], DType::F32)?;
        let y = self.reshape(flat, &[rows, heads, group, d_v])?;
        self.each_of_batch(name, |graph, name, row| {
            let mut part = |of: TensorId| graph.part_of(of, row);
            let (q, k, v, y) = (part(args.q)?, part(args.k)?, part(args.v)?, part(y)?);
            let (a, b) = (part(args.a)?, args.b.map(&mut part).transpose()?);
            graph.recurrence_into(name, RecurrenceArgs { q, k, v, a, b, ..args }, state, y)
        })?;
        Ok(flat)
    }

    fn recurrence_into(
        &mut self,
        name: &str,
        args: RecurrenceArgs,
        state: &str,
        y: TensorId,
    ) -> Result<(), GraphError> {
        let RecurrenceArgs { q, k, v, a, b, a_log, dt_bias, skip } = args;
        let ([_, heads, group, d_v], [_, _, d_k]) = (self.dims_of(name, "v", v)?, self.dims_of(name, "q", q)?);
        let state = self.state(state, &[heads, group, d_v, d_k], DType::F32)?;
        use recurrence::slot::{A, A_LOG, B, DT_BIAS, K, Q, SKIP, STATE, V, Y};
        let tensors = [(Q, q), (K, k), (V, v), (A, a), (A_LOG, a_log), (DT_BIAS, dt_bias), (STATE, state), (Y, y)];
        let tensors = tensors.map(|(slot, tensor)| (slot, Some(tensor)));
        let operands = [&tensors[..], &[(B, b), (SKIP, skip)]].concat();
        let of_head = [(A_LOG, 0), (DT_BIAS, 0), (SKIP, 0), (STATE, 0)];
        let of_keys = [&of_head[..], &[(Q, 1), (K, 1), (V, 1), (A, 1), (B, 1), (Y, 1)]].concat();
        let of_group = [&of_head.map(|(slot, _)| (slot, 1))[..], &[(V, 2), (A, 2), (B, 2), (Y, 2)]].concat();
        let columns = Cut { len: d_v, role: AxisRole::HeadColumns, dims: &[(V, 3), (STATE, 2), (Y, 3)] };
        let cuts = [Cut::heads(heads, &of_keys), Cut::heads(group, &of_group), columns];
        self.add::<Recurrence>(name, &recurrence::Params {}, &operands, &cuts)
    }

    /// x * f(`by`), f what `gate` says, normalised head by head as `norm` says. x: `[rows, heads, d]`; `by`: the same,
    /// or `[rows, heads, 1]`; the result: `[rows, heads * d]`.
    pub fn gated(
        &mut self,
        name: &str,
        x: TensorId,
        by: TensorId,
        gate: Gate,
        norm: GateNorm,
    ) -> Result<TensorId, GraphError> {
        let [rows, heads, d] = self.dims_of(name, "x", x)?;
        let flat = self.intermediate(name, &[rows, heads * d], DType::F32)?;
        let y = self.reshape(flat, &[rows, heads, d])?;
        use gated::slot::{GATE, W, X, Y};
        let (w, eps) = match norm {
            GateNorm::None => (None, 0.0),
            GateNorm::OfX { w, eps } | GateNorm::OfGated { w, eps } => (Some(w), eps),
        };
        let gates_first = u32::from(matches!(norm, GateNorm::OfGated { .. }));
        let params = gated::Params { eps, is_silu: u32::from(gate == Gate::Silu), gates_first };
        let operands = [(X, Some(x)), (W, w), (GATE, Some(by)), (Y, Some(y))];
        let of_heads = Cut::heads(heads, &[(X, 1), (GATE, 1), (Y, 1)]);
        let of_rows = Cut::rows(rows, &[(X, 0), (GATE, 0), (Y, 0)]);
        self.add::<Gated>(name, &params, &operands, &[of_heads, of_rows])?;
        Ok(flat)
    }

    /// Calls `each` once, for all rows, or in the pass over a batch for every sequence, with operators belonging to it,
    /// and for the row of its number.
    fn each_of_batch(
        &mut self,
        name: &str,
        mut each: impl FnMut(&mut KernelGraph, &str, Option<usize>) -> Result<(), GraphError>,
    ) -> Result<(), GraphError> {
        if self.pass != Pass::Batch {
            return each(self, name, None);
        }
        self.each_sequence(|graph, sequence| each(graph, &format!("{name}.{sequence}"), Some(sequence)))
    }

    /// Row `row` of `base`; all of it where there is none.
    fn part_of(&mut self, base: TensorId, row: Option<usize>) -> Result<TensorId, GraphError> {
        row.map_or(Ok(base), |row| self.row_of(base, row))
    }
}
