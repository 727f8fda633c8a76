//! What is scheduled: ops that make buffers out of buffers, on two engines and in a small memory.

use std::fmt;

use thiserror::Error;

/// Which engine an op runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The data engine: moves bytes between the outside and the chip.
    Data,
    /// The compute engine.
    Compute,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Data => "data",
            Kind::Compute => "compute",
        })
    }
}

/// One op. Its output is a buffer of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Op {
    /// Unique in the graph.
    pub name: String,
    /// Its engine.
    pub kind: Kind,
    /// Its output on chip.
    pub bytes: u64,
    /// How long it occupies its engine.
    pub cycles: u64,
    /// The ops whose outputs it reads, by position; a repeated input counts once.
    pub inputs: Vec<u32>,
    /// How long one spill write or spill read of its output occupies the data engine.
    pub spill_cycles: u64,
}

impl Op {
    /// The spill cost of an op that names none: a data op is moved again as it was at first, a result moves 64 bytes a
    /// cycle.
    pub fn default_spill_cycles(kind: Kind, bytes: u64, cycles: u64) -> u64 {
        match kind {
            Kind::Data => cycles,
            Kind::Compute => bytes.div_ceil(64),
        }
    }
}

/// A graph that can be scheduled: acyclic, and every op fits together with its inputs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Graph {
    pub(super) capacity_bytes: u64,
    pub(super) alignment: u64,
    pub(super) ops: Vec<Op>,
    /// The ops in an order that respects inputs and otherwise follows the list.
    pub(super) topological: Vec<u32>,
    /// Who reads each op's output: `consumers[consumer_starts[op]..consumer_starts[op + 1]]`.
    pub(super) consumer_starts: Vec<u32>,
    pub(super) consumers: Vec<u32>,
    /// Whether a path leads from the op to a compute op.
    pub(super) feeds_compute: Vec<bool>,
}

/// Why a list of ops is no [`Graph`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GraphError {
    /// An alignment of zero.
    #[error("alignment is 0, expected at least 1")]
    ZeroAlignment,
    /// An alignment that no offset but 0 could be a multiple of.
    #[error("alignment is {alignment}, expected at most {MAX_TOTAL}")]
    LargeAlignment {
        /// As given.
        alignment: u64,
    },
    /// More ops than positions have bits for.
    #[error("{n_ops} ops, expected fewer than 2147483648")]
    TooManyOps {
        /// As given.
        n_ops: usize,
    },
    /// An input that is no position of the list.
    #[error("op `{op}`: input {input} is out of range, expected below {n_ops}")]
    UnknownInput {
        /// Whose.
        op: String,
        /// As given.
        input: u32,
        /// Ops there are.
        n_ops: usize,
    },
    /// Ops that wait on each other.
    #[error("op `{op}` waits on itself through its inputs, expected a graph without cycles")]
    Cycle {
        /// One of them.
        op: String,
    },
    /// Numbers whose sums do not fit.
    #[error("op `{op}`: {what} sum to more than {limit} up to here")]
    Overflow {
        /// The op that went over.
        op: String,
        /// Bytes, each op's padded up to the alignment, or cycles.
        what: &'static str,
        /// The most there may be.
        limit: u64,
    },
    /// An op that could not run even with the memory to itself.
    #[error(
        "op `{op}` needs {needed_bytes} bytes on chip with its inputs ({own_bytes} of its own), the capacity is {capacity_bytes}"
    )]
    CannotFit {
        /// Which.
        op: String,
        /// Its output, its inputs and the padding between them.
        needed_bytes: u64,
        /// Its output.
        own_bytes: u64,
        /// What there is.
        capacity_bytes: u64,
    },
}

/// The most bytes, each op's padded up to the alignment, and the most cycles that a graph may sum to, and the largest
/// alignment: sums of sums inside the scheduler then stay far from 2^64.
const MAX_TOTAL: u64 = 1 << 52;

impl Graph {
    /// Checks the ops and takes them in.
    pub fn new(capacity_bytes: u64, alignment: u64, mut ops: Vec<Op>) -> Result<Self, GraphError> {
        if alignment == 0 {
            return Err(GraphError::ZeroAlignment);
        }
        if alignment > MAX_TOTAL {
            return Err(GraphError::LargeAlignment { alignment });
        }
        let n_ops = ops.len();
        if n_ops >= 1 << 31 {
            return Err(GraphError::TooManyOps { n_ops });
        }
        let over = |op: &Op, what| GraphError::Overflow { op: op.name.clone(), what, limit: MAX_TOTAL };
        let mut total_bytes = 0u64;
        for op in &mut ops {
            op.inputs.sort_unstable();
            op.inputs.dedup();
            if let Some(&input) = op.inputs.last().filter(|&&input| input as usize >= n_ops) {
                return Err(GraphError::UnknownInput { op: op.name.clone(), input, n_ops });
            }
            let padded = op.bytes.checked_next_multiple_of(alignment).unwrap_or(u64::MAX);
            total_bytes = total_bytes.saturating_add(padded);
            if total_bytes > MAX_TOTAL {
                return Err(over(op, "padded bytes"));
            }
        }
        let mut consumer_starts = vec![0u32; n_ops + 1];
        for op in &ops {
            for &input in &op.inputs {
                consumer_starts[input as usize + 1] += 1;
            }
        }
        // An output may be saved and brought back once for each of its users, and once more at the end.
        let mut total_cycles = 0u64;
        for (op, users) in ops.iter().zip(&consumer_starts[1..]) {
            let spills = op.spill_cycles.saturating_mul(2 * (u64::from(*users) + 1));
            total_cycles = total_cycles.saturating_add(op.cycles).saturating_add(spills);
            if total_cycles > MAX_TOTAL {
                return Err(over(op, "cycles, and those of spilling for each user and at the end, there and back,"));
            }
        }
        for op in 0..n_ops {
            consumer_starts[op + 1] += consumer_starts[op];
        }
        let mut next = consumer_starts.clone();
        let mut consumers = vec![0u32; consumer_starts[n_ops] as usize];
        for (op, Op { inputs, .. }) in ops.iter().enumerate() {
            for &input in inputs {
                consumers[next[input as usize] as usize] = op as u32;
                next[input as usize] += 1;
            }
        }
        let (topological, feeds_compute) = (Vec::new(), vec![false; n_ops]);
        let mut graph = Self { capacity_bytes, alignment, ops, topological, consumer_starts, consumers, feeds_compute };
        graph.sort()?;
        for &op in graph.topological.iter().rev() {
            let feeds = |&consumer: &u32| {
                graph.ops[consumer as usize].kind == Kind::Compute || graph.feeds_compute[consumer as usize]
            };
            graph.feeds_compute[op as usize] = graph.consumers(op).iter().any(feeds);
        }
        graph.check_needs()?;
        Ok(graph)
    }

    /// The ops in the order given.
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }

    /// The bytes on chip.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// What every offset is a multiple of.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// Who reads an op's output.
    pub fn consumers(&self, op: u32) -> &[u32] {
        let (first, end) = (self.consumer_starts[op as usize], self.consumer_starts[op as usize + 1]);
        &self.consumers[first as usize..end as usize]
    }

    /// No schedule ends before this: the larger of each engine's total and the critical path.
    pub fn lower_bound_cycles(&self) -> u64 {
        let mut totals = [0u64; 2];
        let mut ends = vec![0u64; self.ops.len()];
        let mut critical = 0;
        for &op in &self.topological {
            let Op { kind, cycles, inputs, .. } = &self.ops[op as usize];
            totals[usize::from(*kind == Kind::Data)] += cycles;
            let ready = inputs.iter().map(|&input| ends[input as usize]).max().unwrap_or(0);
            ends[op as usize] = ready + cycles;
            critical = critical.max(ready + cycles);
        }
        critical.max(totals[0]).max(totals[1])
    }

    /// Kahn's algorithm. A stack would do for the scheduler; a queue keeps the order near the list's.
    fn sort(&mut self) -> Result<(), GraphError> {
        let mut missing: Vec<u32> = self.ops.iter().map(|op| op.inputs.len() as u32).collect();
        let mut order: Vec<u32> = (0..self.ops.len() as u32).filter(|&op| missing[op as usize] == 0).collect();
        let mut done = 0;
        while done < order.len() {
            let op = order[done];
            done += 1;
            for &consumer in self.consumers(op) {
                missing[consumer as usize] -= 1;
                if missing[consumer as usize] == 0 {
                    order.push(consumer);
                }
            }
        }
        if order.len() < self.ops.len() {
            // Every op left waits on another one left, so walking from input to input comes back somewhere.
            let mut at = missing.iter().position(|&missing| missing > 0).expect("some op is left");
            for _ in 0..self.ops.len() {
                let left = self.ops[at].inputs.iter().find(|&&input| missing[input as usize] > 0);
                at = *left.expect("an op left has an input left") as usize;
            }
            return Err(GraphError::Cycle { op: self.ops[at].name.clone() });
        }
        self.topological = order;
        Ok(())
    }

    fn check_needs(&self) -> Result<(), GraphError> {
        for op in &self.ops {
            let inputs = op.inputs.iter().map(|&input| self.ops[input as usize].bytes);
            let needed_bytes = packed_bytes(inputs.chain([op.bytes]), self.alignment);
            if needed_bytes > self.capacity_bytes {
                return Err(GraphError::CannotFit {
                    op: op.name.clone(),
                    needed_bytes,
                    own_bytes: op.bytes,
                    capacity_bytes: self.capacity_bytes,
                });
            }
        }
        Ok(())
    }
}

/// The bytes that buffers of these sizes take side by side: padded up to the alignment but for one, which lies last, so
/// it is the one with the most padding.
fn packed_bytes(sizes: impl Iterator<Item = u64>, alignment: u64) -> u64 {
    let (mut total, mut most_padding) = (0u64, 0);
    for size in sizes {
        let padded = size.next_multiple_of(alignment);
        total += padded;
        most_padding = most_padding.max(padded - size);
    }
    total - most_padding
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(name: &str, bytes: u64, inputs: &[u32]) -> Op {
        let kind = if inputs.is_empty() { Kind::Data } else { Kind::Compute };
        Op { name: name.into(), kind, bytes, cycles: 10, inputs: inputs.to_vec(), spill_cycles: 10 }
    }

    #[test]
    fn what_cannot_fit_is_named_with_its_bytes() {
        let ops = vec![op("a", 100, &[]), op("b", 60, &[0])];
        let error = Graph::new(163, 64, ops.clone()).unwrap_err();
        let expected = "op `b` needs 164 bytes on chip with its inputs (60 of its own), the capacity is 163";
        assert_eq!(error.to_string(), expected);
        assert!(Graph::new(164, 64, ops).is_ok(), "b at 0 and a at 64 end at 164; the other way round they end at 188");
    }

    #[test]
    fn cycles_and_overflow_are_refused() {
        let ops = vec![op("a", 1, &[]), op("b", 1, &[2]), op("c", 1, &[1]), op("d", 1, &[2])];
        let message = Graph::new(1000, 1, ops).unwrap_err().to_string();
        assert!(message.contains("`b`") || message.contains("`c`"), "{message}");
        assert!(matches!(Graph::new(9, 1, vec![op("a", 1, &[0])]), Err(GraphError::Cycle { .. })));
        assert!(matches!(Graph::new(9, 0, vec![]), Err(GraphError::ZeroAlignment)));
        assert!(matches!(Graph::new(u64::MAX, 1, vec![op("a", u64::MAX, &[])]), Err(GraphError::Overflow { .. })));
        assert!(matches!(Graph::new(9, 1, vec![op("a", 1, &[7])]), Err(GraphError::UnknownInput { .. })));
        assert!(Graph::new(9, MAX_TOTAL, vec![op("a", 3, &[])]).is_ok(), "one buffer lies at 0");
        let two = Graph::new(9, MAX_TOTAL, vec![op("a", 3, &[]), op("b", 3, &[])]).unwrap_err().to_string();
        assert_eq!(two, "op `b`: padded bytes sum to more than 4503599627370496 up to here");
        let message = Graph::new(9, MAX_TOTAL + 1, vec![]).unwrap_err().to_string();
        assert_eq!(message, "alignment is 4503599627370497, expected at most 4503599627370496");
        // Spilled for each of its users, as it may be, it would take longer than there are numbers.
        let mut often: Vec<Op> = [&[][..], &[0], &[0], &[0]].map(|inputs| op("a", 1, inputs)).to_vec();
        often[0].spill_cycles = MAX_TOTAL / 7;
        assert!(Graph::new(9, 1, often[..1].to_vec()).is_ok());
        let message = Graph::new(9, 1, often.clone()).map(|_| ()).unwrap_err().to_string();
        assert!(message.starts_with("op `a`: cycles, and those of spilling for each user"), "{message}");
        often[0].spill_cycles = u64::MAX;
        assert!(matches!(Graph::new(9, 1, often), Err(GraphError::Overflow { .. })));
    }

    #[test]
    fn the_bound_is_the_larger_of_engines_and_path() {
        let graph = Graph::new(1000, 1, vec![op("a", 1, &[]), op("b", 1, &[]), op("c", 1, &[0]), op("d", 1, &[2])]);
        assert_eq!(graph.unwrap().lower_bound_cycles(), 30);
    }
}
