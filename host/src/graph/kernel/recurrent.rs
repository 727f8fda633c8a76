//! Operators of layers that pass a state from row to row, and the gates behind attention.

use super::*;
use perpetua_device::kernels::{CausalConv, DeltaRule, Gated, causal_conv, delta_rule, gated};

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

/// What [`KernelGraph::delta_rule`] takes, but for the state.
#[derive(Clone, Copy, Debug)]
pub struct DeltaArgs {
    /// `[rows, key_heads, d_k]`.
    pub q: TensorId,
    /// `[rows, key_heads, d_k]`.
    pub k: TensorId,
    /// `[rows, key_heads, group, d_v]`.
    pub v: TensorId,
    /// `[rows, key_heads, group]`: how much is forgotten, with `a_log` and `dt_bias`.
    pub a: TensorId,
    /// `[rows, key_heads, group]`: how much is corrected.
    pub b: TensorId,
    /// `[key_heads, group]`.
    pub a_log: TensorId,
    /// `[key_heads, group]`.
    pub dt_bias: TensorId,
}

/// What [`KernelGraph::gated`] multiplies with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// The sigmoid.
    Sigmoid,
    /// x * sigmoid(x).
    Silu,
}

impl KernelGraph {
    /// y[r,c] = act(sum over j of w[c,j] * u[r + j + 1 - taps, c] + bias[c]) (* scale[r,c]), u = x (* gate), as `[rows, n]`. The last rows of u are kept in
    /// a state called `state`, `[taps - 1, n]` f32, for the pass after. In the pass over a batch each sequence has its own row and state, and an operator.
    pub fn causal_conv(&mut self, name: &str, args: ConvArgs, state: &str) -> Result<TensorId, GraphError> {
        let [rows, n] = self.matrix(name, "x", args.x)?;
        let y = self.intermediate(name, &[rows, n], DType::F32)?;
        self.each_of_batch(name, |graph, name, row| {
            let part = |graph: &mut KernelGraph, of: Option<TensorId>| of.map(|of| graph.part_of(of, row)).transpose();
            let x = part(graph, Some(args.x))?;
            let (gate, scale) = (part(graph, args.gate)?, part(graph, args.scale)?);
            let args = ConvArgs { x: x.unwrap_or(args.x), gate, scale, ..args };
            let y = graph.part_of(y, row)?;
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
        let params = causal_conv::Params { activation: activation as u32 };
        self.add::<CausalConv>(name, &params, &operands, &[columns])
    }

    /// Linear attention by the gated delta rule, as `[rows, key_heads * group * d_v]`: see [`perpetua_device::kernels::delta_rule`]. What it knows of the
    /// rows before is kept in a state called `state`, `[key_heads, group, d_v, d_k]` f32. In the pass over a batch each sequence has its own row and
    /// state, and an operator.
    pub fn delta_rule(&mut self, name: &str, args: DeltaArgs, state: &str) -> Result<TensorId, GraphError> {
        let [rows, heads, group, d_v] = self.dims_of(name, "v", args.v)?;
        let flat = self.intermediate(name, &[rows, heads * group * d_v], DType::F32)?;
        let y = self.reshape(flat, &[rows, heads, group, d_v])?;
        self.each_of_batch(name, |graph, name, row| {
            let mut part = |of: TensorId| graph.part_of(of, row);
            let (q, k, v, y) = (part(args.q)?, part(args.k)?, part(args.v)?, part(y)?);
            let (a, b) = (part(args.a)?, part(args.b)?);
            graph.delta_rule_into(name, DeltaArgs { q, k, v, a, b, ..args }, state, y)
        })?;
        Ok(flat)
    }

    fn delta_rule_into(&mut self, name: &str, args: DeltaArgs, state: &str, y: TensorId) -> Result<(), GraphError> {
        let DeltaArgs { q, k, v, a, b, a_log, dt_bias } = args;
        let ([_, heads, group, d_v], [_, _, d_k]) = (self.dims_of(name, "v", v)?, self.dims_of(name, "q", q)?);
        let state = self.state(state, &[heads, group, d_v, d_k], DType::F32)?;
        use delta_rule::slot::{A, A_LOG, B, DT_BIAS, K, Q, STATE, V, Y};
        let tensors =
            [(Q, q), (K, k), (V, v), (A, a), (B, b), (A_LOG, a_log), (DT_BIAS, dt_bias), (STATE, state), (Y, y)];
        let operands = tensors.map(|(slot, tensor)| (slot, Some(tensor)));
        let of_keys = [(Q, 1), (K, 1), (V, 1), (A, 1), (B, 1), (A_LOG, 0), (DT_BIAS, 0), (STATE, 0), (Y, 1)];
        let of_group = [(V, 2), (A, 2), (B, 2), (A_LOG, 1), (DT_BIAS, 1), (STATE, 1), (Y, 2)];
        let columns = Cut { len: d_v, role: AxisRole::HeadColumns, dims: &[(V, 3), (STATE, 2), (Y, 3)] };
        let cuts = [Cut::heads(heads, &of_keys), Cut::heads(group, &of_group), columns];
        self.add::<DeltaRule>(name, &delta_rule::Params {}, &operands, &cuts)
    }

    /// y = x (* rsqrt(mean(x^2) + eps) * w, head by head, where there are weights w, `[d]`) * f(`by`), f what `gate` says. x, `by`: `[rows, heads, d]`;
    /// y comes as `[rows, heads * d]`.
    pub fn gated(
        &mut self,
        name: &str,
        x: TensorId,
        norm: Option<(TensorId, f32)>,
        by: TensorId,
        gate: Gate,
    ) -> Result<TensorId, GraphError> {
        let [rows, heads, d] = self.dims_of(name, "x", x)?;
        let flat = self.intermediate(name, &[rows, heads * d], DType::F32)?;
        let y = self.reshape(flat, &[rows, heads, d])?;
        use gated::slot::{GATE, W, X, Y};
        let params = gated::Params { eps: norm.map_or(0.0, |(_, eps)| eps), is_silu: u32::from(gate == Gate::Silu) };
        let operands = [(X, Some(x)), (W, norm.map(|(w, _)| w)), (GATE, Some(by)), (Y, Some(y))];
        let of_heads = Cut::heads(heads, &[(X, 1), (GATE, 1), (Y, 1)]);
        let of_rows = Cut::rows(rows, &[(X, 0), (GATE, 0), (Y, 0)]);
        self.add::<Gated>(name, &params, &operands, &[of_heads, of_rows])?;
        Ok(flat)
    }

    /// Calls `each` once, for all rows, or in the pass over a batch for every sequence, with operators belonging to it, and for the row of its number.
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
