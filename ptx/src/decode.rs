//! From an entry's statements to instructions whose operands are places: what the machine runs.

use super::PtxError;
use super::machine::WARP;
use super::parse::{EntryText, Operand, Statement, Variable};
use super::pipeline::Cost;
use super::rows::{self, Row};
use petgraph::algo::dominators::simple_fast;
use petgraph::graph::DiGraph;
use std::collections::HashMap;

/// Number of a row: a register's, or, from [`Entry::rows`] on, a constant's.
pub(super) type Slot = u32;
/// Number of a predicate.
pub(super) type Pred = u32;
/// Number of an instruction.
pub(super) type Pc = u32;

/// Which memory an access names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Space {
    /// Global memory, by a generic address too: nothing here makes generic addresses of any other.
    Global,
    /// The block's shared memory.
    Shared,
}

/// The form of a load or store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Access {
    pub(super) space: Space,
    /// Address and offset.
    pub(super) base: Slot,
    pub(super) offset: i64,
    /// Bytes of each of the values.
    pub(super) bytes: u32,
    /// Whether what is loaded is a signed byte, which fills a register of 16 bits.
    pub(super) is_signed: bool,
}

/// A special register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Special {
    Thread,
    Threads,
    Block,
    Blocks,
    Lane,
    TimerNs,
    Clock,
}

/// What stands for every policy of L2: its bits are the chip's own.
pub(super) const POLICY: u64 = 0x12f0_0000_0000_0000;

/// How a shuffle finds the lane it reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shuffle {
    Xor,
    Index,
    Up,
    Down,
}

/// What an atomic does to the word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Atomic {
    Add,
    /// Of f32, of each of several neighbours.
    AddFloats,
    CompareSwap,
    Or,
}

/// What an instruction does.
#[derive(Clone, Debug)]
pub(super) enum Op {
    Unary(rows::Unary, Slot, Slot),
    Binary(rows::Binary, Slot, [Slot; 2]),
    Ternary(rows::Ternary, Slot, [Slot; 3]),
    Compare(rows::Compare, Pred, [Slot; 2]),
    Select {
        d: Slot,
        yes: Slot,
        no: Slot,
        when: Pred,
    },
    /// Two predicates to one: and, or, xor.
    Logic(fn(u32, u32) -> u32, Pred, [Pred; 2]),
    Not(Pred, Pred),
    Constant(Pred, bool),
    /// Parts of a value, the lowest first, each of so many bits.
    Unpack {
        d: Vec<Option<Slot>>,
        from: Slot,
        bits: u32,
    },
    /// A value of parts, the lowest first.
    Pack {
        d: Slot,
        from: Vec<Slot>,
        bits: u32,
    },
    Special(Slot, Special),
    Param {
        d: Slot,
        at: u32,
        bytes: u32,
    },
    Load {
        d: Vec<Option<Slot>>,
        from: Access,
    },
    Store {
        to: Access,
        values: Vec<Slot>,
    },
    Atomic {
        d: Option<Slot>,
        at: Access,
        atomic: Atomic,
        values: Vec<Slot>,
    },
    Branch(Pc),
    BranchIndex(Slot, Vec<Pc>),
    Exit,
    Trap,
    /// `bar.sync`, and with a vote `bar.red.or.pred`.
    Barrier {
        id: Slot,
        threads: Slot,
        vote: Option<(Pred, Pred, bool)>,
    },
    WarpSync(Slot),
    Shuffle {
        how: Shuffle,
        d: Slot,
        value: Slot,
        by: Slot,
        clamp: Slot,
        members: Slot,
    },
    /// `redux.sync.or.b32`: the bits of all lanes' words.
    Union {
        d: Slot,
        value: Slot,
        members: Slot,
    },
    LoadMatrices {
        d: Vec<Slot>,
        from: Access,
    },
    /// m16n8k16, bf16, sums f32; or m16n8k32, signed bytes, sums of 32 bits.
    Product {
        are_bytes: bool,
        d: [Slot; 4],
        a: [Slot; 4],
        b: [Slot; 2],
        c: [Slot; 4],
    },
    /// m64nNk16 of a warpgroup, bf16, sums f32: a as four registers or, as b, in shared memory.
    GroupProduct {
        d: Vec<Slot>,
        a: Vec<Slot>,
        b: Slot,
        /// Of b, whose n is innermost then.
        is_transposed: bool,
    },
    GroupFence,
    GroupCommit,
    GroupWait(u32),
    /// An access's order is that of the schedule, which is sequential: fences of generic memory do nothing here.
    Fence,
    BarrierInit {
        at: Access,
        count: Slot,
    },
    BarrierArrive {
        at: Access,
        expect: Option<Slot>,
    },
    BarrierTry {
        d: Pred,
        at: Access,
        parity: Slot,
    },
    BulkCopy {
        to: Access,
        from: Access,
        bytes: Slot,
        barrier: Access,
        /// What `createpolicy` made, if it says how L2 is to keep the bytes.
        policy: Option<Slot>,
    },
    BulkPrefetch {
        from: Access,
        bytes: Slot,
    },
    Copy {
        to: Access,
        from: Access,
        there: Option<Slot>,
    },
    CopyCommit,
    CopyWait(u32),
    Sleep(Slot),
}

impl Op {
    /// Whether it is `.aligned`: behind a condition it may be where all lanes of the warp find the same, and else
    /// nowhere. What is `.sync` alone waits for lanes that come by different ways.
    pub(super) fn is_aligned(&self) -> bool {
        use Op::*;
        matches!(
            self,
            Barrier { .. }
                | LoadMatrices { .. }
                | Product { .. }
                | GroupProduct { .. }
                | GroupFence
                | GroupCommit
                | GroupWait(_)
        )
    }
}

/// An instruction, the lanes it is for, and where it stands.
#[derive(Clone, Debug)]
pub(super) struct Instruction {
    pub(super) op: Op,
    /// Lanes whose predicate is this.
    pub(super) guard: Option<(bool, Pred)>,
    pub(super) line: u32,
    pub(super) cost: Cost,
    /// It reads a word that another block may be about to write.
    pub(super) is_look: bool,
    /// Of a branch that may part lanes: where they meet again, its immediate post-dominator.
    pub(super) join: Option<Pc>,
}

/// An entry that can be run.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) name: String,
    /// Where each parameter lies in the parameters' bytes, and how many it has.
    pub(super) params: Vec<(u32, u32)>,
    pub(super) most_threads: Option<u32>,
    pub(super) code: Vec<Instruction>,
    /// Registers of a thread.
    pub(super) rows: u32,
    pub(super) preds: u32,
    pub(super) constants: Vec<Row>,
}

/// Where a module's variables lie.
#[derive(Debug, Default)]
pub(super) struct Layout {
    /// Offsets in a block's shared memory, addresses in global memory.
    pub(super) places: HashMap<String, u64>,
    /// Shared memory that is not dynamic; the dynamic part follows.
    pub(super) shared_bytes: u32,
    /// The variables in global memory, address and first bytes.
    pub(super) globals: Vec<(u64, Vec<u8>)>,
}

/// Where the variables of global memory begin: where no allocation is.
const GLOBALS: u64 = 1 << 56;

/// The first bytes of a block's shared memory are the driver's.
pub(super) const RESERVED: u32 = 1024;

impl Layout {
    pub(super) fn new(variables: &[Variable<'_>]) -> Layout {
        let mut layout = Layout { shared_bytes: RESERVED, ..Layout::default() };
        let mut at = GLOBALS;
        for variable in variables {
            match variable.space {
                ".shared" if variable.bytes > 0 => {
                    let start = layout.shared_bytes.next_multiple_of(variable.align);
                    layout.places.insert(variable.name.to_owned(), u64::from(start));
                    layout.shared_bytes = start + variable.bytes;
                }
                ".shared" => {}
                _ => {
                    let mut bytes = variable.init.clone();
                    bytes.resize(variable.bytes as usize, 0);
                    layout.places.insert(variable.name.to_owned(), at);
                    layout.globals.push((at, bytes));
                    at = (at + u64::from(variable.bytes)).next_multiple_of(256);
                }
            }
        }
        // Dynamic shared memory, whatever its names, begins behind all that is static.
        for variable in variables.iter().filter(|variable| variable.space == ".shared" && variable.bytes == 0) {
            let start = layout.shared_bytes.next_multiple_of(variable.align);
            layout.shared_bytes = start;
            layout.places.insert(variable.name.to_owned(), u64::from(start));
        }
        layout
    }

    /// The `bytes` bytes at `at` of global memory, if they are a variable's.
    pub(super) fn variable(&self, at: u64, bytes: usize) -> Option<&[u8]> {
        if at < GLOBALS {
            return None;
        }
        let before = self.globals.partition_point(|(start, _)| *start <= at).checked_sub(1)?;
        let (start, variable) = &self.globals[before];
        variable.get((at - start) as usize..)?.get(..bytes)
    }
}

/// The entry that `text` is, its variables where `layout` says.
pub(super) fn decode(text: &EntryText<'_>, layout: &Layout) -> Result<Entry, PtxError> {
    let mut params = Vec::new();
    let mut names = HashMap::new();
    let mut end = 0_u32;
    for (name, align, bytes) in &text.params {
        let start = end.next_multiple_of(*align);
        names.insert(*name, start);
        params.push((start, *bytes));
        end = start + bytes;
    }
    let mut decoder = Decoder {
        layout,
        params: names,
        labels: HashMap::new(),
        targets: HashMap::new(),
        scopes: vec![HashMap::new()],
        rows: 0,
        all_rows: 0,
        preds: 0,
        constants: Vec::new(),
        known: HashMap::new(),
    };
    // A label is the number of the instruction that follows.
    let mut pc = 0;
    for (line, statement) in &text.body {
        match statement {
            Statement::Label(name) => drop(decoder.labels.insert(*name, pc)),
            Statement::Targets(name, labels) => drop(decoder.targets.insert(*name, labels)),
            Statement::Instruction { .. } => pc += 1,
            Statement::Registers { kind, .. } if !is_register_kind(kind) => {
                return Err(PtxError::unread(*line, format!("registers of kind {kind} are not understood")));
            }
            Statement::Registers { kind, n, .. } if *kind != ".pred" => decoder.all_rows += n.unwrap_or(1),
            _ => {}
        }
    }
    let mut code = Vec::with_capacity(pc as usize);
    for (line, statement) in &text.body {
        match statement {
            Statement::Open => decoder.scopes.push(HashMap::new()),
            Statement::Close => drop(decoder.scopes.pop()),
            Statement::Registers { kind, name, n } => decoder.declare(kind, name, *n),
            Statement::Label(_) | Statement::Targets(..) => {}
            Statement::Instruction { guard, opcode, operands } => {
                let unread = |what: String| PtxError::unread(*line, format!("`{opcode}`: {what}"));
                let guard = guard.map(|(is, name)| decoder.pred(name).map(|pred| (is, pred))).transpose();
                let guard = guard.map_err(unread)?;
                let op = decoder.op(opcode, operands).map_err(unread)?;
                let cost = Cost::of(opcode, &op);
                let is_look = opcode.starts_with("ld.relaxed.");
                code.push(Instruction { op, guard, line: *line, cost, is_look, join: None });
            }
        }
    }
    find_joins(&mut code);
    Ok(Entry {
        name: text.name.to_owned(),
        params,
        most_threads: text.most_threads,
        code,
        rows: decoder.rows,
        preds: decoder.preds,
        constants: decoder.constants,
    })
}

/// Where lanes that a branch parts meet again: the first instruction on every way from it to the end, as ptxas has it.
fn find_joins(code: &mut [Instruction]) {
    let mut ways = DiGraph::<(), ()>::with_capacity(code.len() + 1, 2 * code.len());
    let nodes: Vec<_> = (0..=code.len()).map(|_| ways.add_node(())).collect();
    let end = nodes[code.len()];
    for (pc, instruction) in code.iter().enumerate() {
        let mut from = |next: usize| {
            ways.add_edge(nodes[next], nodes[pc], ());
        };
        let mut goes_on = instruction.guard.is_some();
        match &instruction.op {
            Op::Branch(to) => from(*to as usize),
            Op::BranchIndex(_, targets) => targets.iter().for_each(|to| from(*to as usize)),
            Op::Exit | Op::Trap => from(code.len()),
            _ => goes_on = true,
        }
        if goes_on {
            from(pc + 1);
        }
    }
    let dominators = simple_fast(&ways, end);
    for (pc, instruction) in code.iter_mut().enumerate() {
        let parts = matches!(instruction.op, Op::Branch(_)) && instruction.guard.is_some()
            || matches!(instruction.op, Op::BranchIndex(..));
        let join = dominators.immediate_dominator(nodes[pc]).filter(|join| parts && *join != end);
        instruction.join = join.map(|join| join.index() as Pc);
    }
}

fn is_register_kind(kind: &str) -> bool {
    matches!(kind, ".pred" | ".b16" | ".b32" | ".b64" | ".u32" | ".u64" | ".f32" | ".f64")
}

/// Registers of the same name and number, `%r<100>`: where the first of them is.
#[derive(Clone, Copy, Debug)]
enum Register {
    Row(Slot),
    Pred(Pred),
}

struct Decoder<'a> {
    layout: &'a Layout,
    params: HashMap<&'a str, u32>,
    labels: HashMap<&'a str, Pc>,
    targets: HashMap<&'a str, &'a Vec<&'a str>>,
    /// Declared names, with how many numbers they take (none: the name is whole), by block.
    scopes: Vec<HashMap<&'a str, (Register, Option<u32>)>>,
    /// Registers declared so far, and those that will have been at the end, behind which constants stand.
    rows: u32,
    all_rows: u32,
    preds: u32,
    constants: Vec<Row>,
    /// The constants' numbers.
    known: HashMap<u64, Slot>,
}

type Decoded<T> = Result<T, String>;

/// Bits of the last type in `opcode`.
fn width(opcode: &str) -> Decoded<u32> {
    let is_type = |part: &&str| {
        let digits = part.trim_start_matches(['b', 'u', 's', 'f']);
        digits.len() < part.len() && ["8", "16", "32", "64"].contains(&digits)
    };
    let last = opcode.split('.').rfind(is_type).ok_or("has no type")?;
    last[1..].parse().map_err(|_| "has no type".to_owned())
}

impl<'a> Decoder<'a> {
    fn declare(&mut self, kind: &str, name: &'a str, n: Option<u32>) {
        let count = n.unwrap_or(1);
        let register = if kind == ".pred" {
            self.preds += count;
            Register::Pred(self.preds - count)
        } else {
            self.rows += count;
            Register::Row(self.rows - count)
        };
        self.scopes.last_mut().expect("the entry's own is never closed").insert(name, (register, n));
    }

    fn register(&self, name: &str) -> Option<Register> {
        let prefix = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let number = name[prefix.len()..].parse::<u32>();
        self.scopes.iter().rev().find_map(|scope| {
            let numbered = scope.get(prefix).and_then(|(register, n)| {
                let number = number.as_ref().ok().filter(|number| n.is_some_and(|n| **number < n))?;
                Some(match register {
                    Register::Row(first) => Register::Row(first + number),
                    Register::Pred(first) => Register::Pred(first + number),
                })
            });
            numbered.or_else(|| scope.get(name).filter(|(_, n)| n.is_none()).map(|(register, _)| *register))
        })
    }

    fn pred(&self, name: &str) -> Decoded<Pred> {
        match self.register(name) {
            Some(Register::Pred(pred)) => Ok(pred),
            _ => Err(format!("{name} is not a predicate")),
        }
    }

    fn pred_of(&self, operand: &Operand<'_>) -> Decoded<Pred> {
        match operand {
            Operand::Name(name) => self.pred(name),
            other => Err(format!("{other:?} is not a predicate")),
        }
    }

    fn constant(&mut self, bits: u64) -> Slot {
        *self.known.entry(bits).or_insert_with(|| {
            self.constants.push([bits; WARP]);
            self.all_rows + self.constants.len() as u32 - 1
        })
    }

    /// Where a source lies: a register, a number of `width` bits, or a variable's address.
    fn source(&mut self, operand: &Operand<'_>, width: u32) -> Decoded<Slot> {
        match operand {
            Operand::Number(bits) => Ok(self.constant(bits & (u64::MAX >> (64 - width)))),
            Operand::Name(name) => match (self.register(name), self.layout.places.get(*name)) {
                (Some(Register::Row(row)), _) => Ok(row),
                (None, Some(place)) => Ok(self.constant(*place)),
                _ => Err(format!("{name} is neither a register nor a variable")),
            },
            other => Err(format!("{other:?} is not a value")),
        }
    }

    fn destination(&self, operand: &Operand<'_>) -> Decoded<Slot> {
        match operand {
            Operand::Name(name) => match self.register(name) {
                Some(Register::Row(row)) => Ok(row),
                _ => Err(format!("{name} is not a register")),
            },
            other => Err(format!("{other:?} is not a register")),
        }
    }

    /// A destination, or a vector of some of which not all are wanted.
    fn destinations(&self, operand: &Operand<'_>) -> Decoded<Vec<Option<Slot>>> {
        let one = |operand: &Operand<'_>| match operand {
            Operand::Nothing => Ok(None),
            operand => self.destination(operand).map(Some),
        };
        match operand {
            Operand::Vector(all) => all.iter().map(one).collect(),
            operand => Ok(vec![one(operand)?]),
        }
    }

    fn sources(&mut self, operand: &Operand<'_>, width: u32) -> Decoded<Vec<Slot>> {
        match operand {
            Operand::Vector(all) => all.iter().map(|operand| self.source(operand, width)).collect(),
            operand => Ok(vec![self.source(operand, width)?]),
        }
    }

    fn sources_n<const N: usize>(&mut self, operand: &Operand<'_>, width: u32) -> Decoded<[Slot; N]> {
        self.sources(operand, width)?.try_into().map_err(|_| format!("wants {N} values in a vector"))
    }

    fn access(&mut self, space: Space, operand: &Operand<'_>, bytes: u32) -> Decoded<Access> {
        let Operand::Address(base, offset) = operand else { return Err(format!("{operand:?} is not an address")) };
        Ok(Access { space, base: self.source(&Operand::Name(base), 64)?, offset: *offset, bytes, is_signed: false })
    }

    fn label(&self, operand: &Operand<'_>) -> Decoded<Pc> {
        match operand {
            Operand::Name(name) => self.labels.get(name).copied().ok_or_else(|| format!("there is no label {name}")),
            other => Err(format!("{other:?} is not a label")),
        }
    }

    fn op(&mut self, opcode: &str, operands: &[Operand<'a>]) -> Decoded<Op> {
        if let Some(op) = self.arithmetic(opcode, operands)? {
            return Ok(op);
        }
        if let Some(op) = self.memory(opcode, operands)? {
            return Ok(op);
        }
        if let Some(op) = self.asynchronous(opcode, operands)? {
            return Ok(op);
        }
        Ok(match (opcode, operands) {
            ("bra" | "bra.uni", [to]) => Op::Branch(self.label(to)?),
            ("brx.idx", [index, Operand::Name(table)]) => {
                let labels = *self.targets.get(table).ok_or_else(|| format!("there is no table {table}"))?;
                let targets: Decoded<Vec<Pc>> = labels.iter().map(|label| self.label(&Operand::Name(label))).collect();
                Op::BranchIndex(self.source(index, 32)?, targets?)
            }
            ("ret" | "exit", []) => Op::Exit,
            ("trap", []) => Op::Trap,
            ("bar.sync" | "barrier.sync.aligned" | "barrier.cta.sync.aligned", [id, threads]) => {
                Op::Barrier { id: self.source(id, 32)?, threads: self.source(threads, 32)?, vote: None }
            }
            ("bar.red.or.pred" | "bar.red.and.pred", [d, id, threads, vote]) => Op::Barrier {
                id: self.source(id, 32)?,
                threads: self.source(threads, 32)?,
                vote: Some((self.pred_of(d)?, self.pred_of(vote)?, opcode == "bar.red.and.pred")),
            },
            ("bar.warp.sync", [members]) => Op::WarpSync(self.source(members, 32)?),
            _ if opcode.starts_with("shfl.sync.") => {
                let [d, value, by, clamp, members] = operands else { return Err("wants five operands".to_owned()) };
                let how = match opcode {
                    "shfl.sync.bfly.b32" => Shuffle::Xor,
                    "shfl.sync.idx.b32" => Shuffle::Index,
                    "shfl.sync.up.b32" => Shuffle::Up,
                    "shfl.sync.down.b32" => Shuffle::Down,
                    _ => return Err("is not understood".to_owned()),
                };
                Op::Shuffle {
                    how,
                    d: self.destination(d)?,
                    value: self.source(value, 32)?,
                    by: self.source(by, 32)?,
                    clamp: self.source(clamp, 32)?,
                    members: self.source(members, 32)?,
                }
            }
            ("redux.sync.or.b32", [d, value, members]) => Op::Union {
                d: self.destination(d)?,
                value: self.source(value, 32)?,
                members: self.source(members, 32)?,
            },
            ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", [d, from]) => Op::LoadMatrices {
                d: self.destinations(d)?.into_iter().collect::<Option<_>>().ok_or("wants all four registers")?,
                from: self.access(Space::Shared, from, 16)?,
            },
            (
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
                | "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32",
                [d, a, b, c],
            ) => Op::Product {
                are_bytes: opcode.ends_with("s32"),
                d: self.sources_n(d, 32)?,
                a: self.sources_n(a, 32)?,
                b: self.sources_n(b, 32)?,
                c: self.sources_n(c, 32)?,
            },
            ("nanosleep.u32", [ns]) => Op::Sleep(self.source(ns, 32)?),
            _ if opcode.starts_with("fence.") || opcode.starts_with("membar.") => Op::Fence,
            _ => return Err("is not understood".to_owned()),
        })
    }

    fn arithmetic(&mut self, opcode: &str, operands: &[Operand<'a>]) -> Decoded<Option<Op>> {
        let special = |name: &str| {
            Some(match name {
                "%tid.x" => Special::Thread,
                "%ntid.x" => Special::Threads,
                "%ctaid.x" => Special::Block,
                "%nctaid.x" => Special::Blocks,
                "%laneid" => Special::Lane,
                "%globaltimer" => Special::TimerNs,
                "%clock" | "%clock64" => Special::Clock,
                _ => return None,
            })
        };
        Ok(Some(match (opcode, operands) {
            ("mov.pred", [d, Operand::Number(bits)]) => Op::Constant(self.pred_of(d)?, *bits != 0),
            ("mov.pred", [d, a]) => {
                let a = self.pred_of(a)?;
                Op::Logic(|a, b| a | b, self.pred_of(d)?, [a, a])
            }
            ("not.pred", [d, a]) => Op::Not(self.pred_of(d)?, self.pred_of(a)?),
            ("and.pred" | "or.pred" | "xor.pred", [d, a, b]) => {
                let f = match opcode {
                    "and.pred" => |a, b| a & b,
                    "or.pred" => |a, b| a | b,
                    _ => |a, b| a ^ b,
                };
                Op::Logic(f, self.pred_of(d)?, [self.pred_of(a)?, self.pred_of(b)?])
            }
            (_, [d, Operand::Name(name)]) if opcode.starts_with("mov.") && special(name).is_some() => {
                Op::Special(self.destination(d)?, special(name).expect("just seen"))
            }
            (_, [Operand::Vector(parts), from]) if opcode.starts_with("mov.") => Op::Unpack {
                d: self.destinations(&operands[0])?,
                from: self.source(from, width(opcode)?)?,
                bits: width(opcode)? / parts.len() as u32,
            },
            (_, [d, Operand::Vector(parts)]) if opcode.starts_with("mov.") => {
                let bits = width(opcode)? / parts.len() as u32;
                Op::Pack { d: self.destination(d)?, from: self.sources(&operands[1], bits)?, bits }
            }
            (_, [d, yes, no, when]) if opcode.starts_with("selp.") => {
                let bits = width(opcode)?;
                let (yes, no) = (self.source(yes, bits)?, self.source(no, bits)?);
                Op::Select { d: self.destination(d)?, yes, no, when: self.pred_of(when)? }
            }
            (_, [d, a]) if let Some(f) = rows::unary(opcode) => {
                Op::Unary(f, self.destination(d)?, self.source(a, width(opcode)?)?)
            }
            (_, [d, a, b]) if let Some(f) = rows::compare(opcode) => {
                let bits = width(opcode)?;
                Op::Compare(f, self.pred_of(d)?, [self.source(a, bits)?, self.source(b, bits)?])
            }
            (_, [d, a, b]) if let Some(f) = rows::binary(opcode) => {
                let bits = width(opcode)?;
                Op::Binary(f, self.destination(d)?, [self.source(a, bits)?, self.source(b, bits)?])
            }
            (_, [d, a, b, c]) if let Some(f) = rows::ternary(opcode) => {
                let bits = width(opcode)?;
                let sources = [self.source(a, bits)?, self.source(b, bits)?, self.source(c, bits)?];
                Op::Ternary(f, self.destination(d)?, sources)
            }
            _ => return Ok(None),
        }))
    }

    fn memory(&mut self, opcode: &str, operands: &[Operand<'a>]) -> Decoded<Option<Op>> {
        let mut words = opcode.split('.');
        let verb = words.next().unwrap_or("");
        if !matches!(verb, "ld" | "st" | "atom" | "red") {
            return Ok(None);
        }
        let bytes = width(opcode)? / 8;
        // Everything between the verb and the type: which memory, which order, how many.
        let (mut space, mut n, mut function) = (Some(Space::Global), 1, None);
        let is_signed = opcode.ends_with(".s8");
        for word in words {
            match word {
                "s8" if verb == "ld" && matches!(&operands[0], Operand::Name(name) if name.starts_with("%rs")) => {}
                "global" | "volatile" | "relaxed" | "acquire" | "release" | "acq_rel" | "gpu" | "cta" | "sys"
                | "L1::no_allocate" | "L1::evict_last" | "L1::evict_first" => {}
                "shared" | "shared::cta" => space = Some(Space::Shared),
                "param" => space = None,
                "v2" => n = 2,
                "v4" => n = 4,
                "add" => function = Some(Atomic::Add),
                "cas" => function = Some(Atomic::CompareSwap),
                "or" => function = Some(Atomic::Or),
                "b8" | "u8" | "b16" | "u16" | "b32" | "u32" | "b64" | "u64" | "f32" | "f64" => {}
                _ => return Err(format!("`.{word}` is not understood")),
            }
        }
        let vector = |values: usize| if values == n { Ok(()) } else { Err(format!("{values} values, not {n}")) };
        Ok(Some(match (verb, operands) {
            ("ld", [d, Operand::Address(name, offset)]) if space.is_none() => {
                let start = self.params.get(name).ok_or_else(|| format!("there is no parameter {name}"))?;
                let at = u32::try_from(offset + i64::from(*start)).map_err(|_| "before the parameter".to_owned())?;
                Op::Param { d: self.destination(d)?, at, bytes }
            }
            ("ld", [d, from]) => {
                let d = self.destinations(d)?;
                vector(d.len())?;
                let access = self.access(space.unwrap_or(Space::Global), from, bytes)?;
                Op::Load { d, from: Access { is_signed, ..access } }
            }
            ("st", [to, values]) => {
                let to = self.access(space.ok_or("parameters are not written")?, to, bytes)?;
                let values = self.sources(values, 8 * bytes)?;
                vector(values.len())?;
                Op::Store { to, values }
            }
            ("atom" | "red", _) => {
                let atomic = function.ok_or("is not understood")?;
                let (d, rest) = match operands {
                    [Operand::Nothing, rest @ ..] if verb == "atom" => (None, rest),
                    [d, rest @ ..] if verb == "atom" => (Some(self.destination(d)?), rest),
                    rest => (None, rest),
                };
                let [at, values @ ..] = rest else { return Err("wants an address".to_owned()) };
                let is_float = opcode.ends_with(".f32");
                let atomic = if is_float && atomic == Atomic::Add { Atomic::AddFloats } else { atomic };
                let values = match values {
                    [one] => self.sources(one, 8 * bytes)?,
                    more => more.iter().map(|value| self.source(value, 8 * bytes)).collect::<Decoded<_>>()?,
                };
                let is_whole = match atomic {
                    Atomic::AddFloats => d.is_none() && values.len() == n,
                    Atomic::Add => values.len() == 1 && n == 1,
                    Atomic::Or => values.len() == 1 && n == 1 && !is_float,
                    Atomic::CompareSwap => values.len() == 2 && n == 1 && !is_float,
                };
                if !is_whole {
                    return Err("wants other operands".to_owned());
                }
                Op::Atomic { d, at: self.access(space.unwrap_or(Space::Global), at, bytes)?, atomic, values }
            }
            _ => return Err("wants other operands".to_owned()),
        }))
    }

    fn asynchronous(&mut self, opcode: &str, operands: &[Operand<'a>]) -> Decoded<Option<Op>> {
        let count = |operand: &Operand<'_>| match operand {
            Operand::Number(n) => Ok(*n as u32),
            other => Err(format!("{other:?} is not a number")),
        };
        Ok(Some(match (opcode, operands) {
            ("mbarrier.init.shared::cta.b64", [at, n]) => {
                Op::BarrierInit { at: self.access(Space::Shared, at, 8)?, count: self.source(n, 32)? }
            }
            ("mbarrier.arrive.shared::cta.b64", [Operand::Nothing, at]) => {
                Op::BarrierArrive { at: self.access(Space::Shared, at, 8)?, expect: None }
            }
            ("mbarrier.arrive.expect_tx.shared::cta.b64", [Operand::Nothing, at, bytes]) => {
                let expect = Some(self.source(bytes, 32)?);
                Op::BarrierArrive { at: self.access(Space::Shared, at, 8)?, expect }
            }
            // One waits a little where the other does not: here whoever asks in vain gives others the turn.
            (
                "mbarrier.try_wait.parity.shared::cta.b64" | "mbarrier.test_wait.parity.shared::cta.b64",
                [d, at, parity],
            ) => Op::BarrierTry {
                d: self.pred_of(d)?,
                at: self.access(Space::Shared, at, 8)?,
                parity: self.source(parity, 32)?,
            },
            (
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                | "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint",
                [to, from, bytes, barrier, policy @ ..],
            ) if policy.len() == usize::from(opcode.ends_with("hint")) => Op::BulkCopy {
                to: self.access(Space::Shared, to, 16)?,
                from: self.access(Space::Global, from, 16)?,
                bytes: self.source(bytes, 32)?,
                barrier: self.access(Space::Shared, barrier, 8)?,
                policy: policy.first().map(|policy| self.source(policy, 64)).transpose()?,
            },
            ("createpolicy.fractional.L2::evict_first.b64", [d, _]) => {
                let mov = rows::unary("mov.b64").expect("listed");
                Op::Unary(mov, self.destination(d)?, self.constant(POLICY))
            }
            ("cp.async.bulk.prefetch.L2.global", [from, bytes]) => {
                Op::BulkPrefetch { from: self.access(Space::Global, from, 16)?, bytes: self.source(bytes, 32)? }
            }
            ("cp.async.cg.shared.global", [to, from, bytes, there @ ..]) if there.len() < 2 => {
                let bytes = count(bytes)?;
                Op::Copy {
                    to: self.access(Space::Shared, to, bytes)?,
                    from: self.access(Space::Global, from, bytes)?,
                    there: there.first().map(|there| self.source(there, 32)).transpose()?,
                }
            }
            ("cp.async.commit_group", []) => Op::CopyCommit,
            ("cp.async.wait_group", [left]) => Op::CopyWait(count(left)?),
            ("wgmma.fence.sync.aligned", []) => Op::GroupFence,
            ("wgmma.commit_group.sync.aligned", []) => Op::GroupCommit,
            ("wgmma.wait_group.sync.aligned", [left]) => Op::GroupWait(count(left)?),
            (_, [d, a, b, scale @ ..]) if opcode.starts_with("wgmma.mma_async.sync.aligned.m64n") => {
                // Sums are added to, signs kept; matrices in shared memory have k innermost, or b beside registers n.
                let in_registers = matches!(a, Operand::Vector(_));
                let k_innermost = [1, 1, 1, 0, 0].map(Operand::Number);
                let is_transposed = in_registers && scale == [1, 1, 1, 1].map(Operand::Number);
                let n = opcode["wgmma.mma_async.sync.aligned.m64n".len()..].strip_suffix("k16.f32.bf16.bf16");
                let n: usize = n.and_then(|n| n.parse().ok()).ok_or("is not understood")?;
                if !is_transposed && scale != &k_innermost[..if in_registers { 4 } else { 5 }] {
                    return Err(format!("{scale:?} is not understood"));
                }
                let d = self.sources(d, 32)?;
                if d.len() != n / 2 {
                    return Err(format!("{} sums, not {}", d.len(), n / 2));
                }
                let a = if in_registers { self.sources_n::<4>(a, 32)?.to_vec() } else { vec![self.source(a, 64)?] };
                Op::GroupProduct { d, a, b: self.source(b, 64)?, is_transposed }
            }
            _ => return Ok(None),
        }))
    }
}
