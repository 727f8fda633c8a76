//! Tasks and the tensor regions they touch.

use crate::dtype::Lines;
use crate::limits::{MAX_DRAFTS, MAX_RANK, PARAM_WORDS};
use crate::{BindingId, DType};
use bytemuck::{Pod, Zeroable};

/// A tensor region one task reads or writes: a strided box inside a binding.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Operand {
    /// Byte offset of the first element from the binding's start.
    pub offset_bytes: u64,
    /// The memory it lies in.
    pub binding: BindingId,
    /// A [`DType`] number; 0 marks an operand that is absent (an optional bias, say).
    pub dtype: u16,
    /// Dimensions that count, at most [`MAX_RANK`].
    pub rank: u8,
    /// 1 when its elements are [flagged](crate::flag), else 0.
    pub is_flagged: u8,
    /// Elements along each dimension; 1 beyond `rank`.
    pub extent: [u32; MAX_RANK],
    /// Elements from one index to the next along each dimension; 0 beyond `rank`.
    pub stride_elems: [u32; MAX_RANK],
}

impl Operand {
    /// The operand that is not there.
    pub const ABSENT: Operand = Operand {
        offset_bytes: 0,
        binding: BindingId(0),
        dtype: 0,
        rank: 0,
        is_flagged: 0,
        extent: [1; MAX_RANK],
        stride_elems: [0; MAX_RANK],
    };

    /// Its element type; `None` when absent (or damaged, which `decode` refuses).
    pub fn dtype(&self) -> Option<DType> {
        DType::from_u8(self.dtype as u8)
    }

    /// Whether there is one.
    pub const fn is_present(&self) -> bool {
        self.dtype != 0
    }

    /// Elements in the box; `u64::MAX` where that is too small a number, which it is not for an image's.
    pub fn len_elems(&self) -> u64 {
        self.extent.iter().fold(1, |len, n| len.saturating_mul(u64::from(*n)))
    }

    /// How its rows are laid out, if their elements have scales.
    pub fn lines(&self) -> Option<Lines> {
        self.dtype().and_then(DType::lines)
    }

    /// The same box in elements that have strides: of rows of [`Lines`] their bytes.
    pub fn strided(&self) -> Operand {
        let Some(lines) = self.lines().filter(|_| self.rank > 0) else { return *self };
        let mut bytes = Operand { dtype: DType::U8 as u16, ..*self };
        let last = usize::from(self.rank) - 1;
        bytes.extent[last] = u32::try_from(lines.row_bytes(self.extent[last] as usize)).unwrap_or(u32::MAX);
        bytes.stride_elems[last] = 1;
        bytes
    }

    /// Bytes in the box, 0 where there is none; as [`Operand::len_elems`].
    pub fn bytes(&self) -> u64 {
        let strided = self.strided();
        strided.len_elems().saturating_mul(strided.dtype().map_or(0, |dtype| dtype.size_bytes() as u64))
    }

    /// Bytes from the first element's start to the last element's end; 0 for an empty box. As [`Operand::len_elems`].
    pub fn span_bytes(&self) -> u64 {
        let Some(dtype) = self.dtype() else { return 0 };
        if self.lines().is_some() {
            return self.strided().span_bytes();
        }
        if self.extent.contains(&0) {
            return 0;
        }
        let steps = self.extent.iter().zip(&self.stride_elems).map(|(n, s)| u64::from(n - 1) * u64::from(*s));
        let last = steps.fold(0, u64::saturating_add);
        last.saturating_add(1).saturating_mul(dtype.size_bytes() as u64)
    }
}

/// Where the number of a row, from 1, stands in a task's flags: above the bits, below a sequence's.
const ROW_SHIFT: u32 = 2;

const ROW_MASK: u32 = TaskFlags::READS_EARLY as u32 - 1;

const _: () = assert!((MAX_DRAFTS + 1) << ROW_SHIFT <= ROW_MASK as usize);

/// Bits of [`TaskDesc::flags`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskFlags;

impl TaskFlags {
    /// The body runs only in a pass that samples; the task still waits and triggers in every pass.
    pub const ONLY_WHEN_SAMPLING: u16 = 1;
    /// The task stands in no worker's list: a scheduler launches it when its last event fires.
    pub const JUST_IN_TIME: u16 = 2;

    /// What its macro kernel reads before the task's events have fired, if it may, is weights, which nobody writes.
    pub const READS_EARLY: u16 = 1 << 7;

    /// The flags of a task that belongs to row `row` of a pass that verifies drafts, at most [`MAX_DRAFTS`] of them: it
    /// sees that row alone.
    pub const fn of_row(row: usize) -> u16 {
        assert!(row <= MAX_DRAFTS, "a row of such a pass");
        (row as u16 + 1) << ROW_SHIFT
    }

    /// The row `flags` name, if they do.
    pub const fn row(flags: u16) -> Option<u32> {
        ((flags as u32 & ROW_MASK) >> ROW_SHIFT).checked_sub(1)
    }

    /// The flags of a task that belongs to sequence `sequence` of a batch: it sees that sequence's step.
    pub const fn of_sequence(sequence: usize) -> u16 {
        (sequence as u16 + 1) << 8
    }

    /// Whether `flags` name a row or a sequence, so that the task sees a part of the pass.
    pub const fn names_part(flags: u16) -> bool {
        flags & !(Self::ONLY_WHEN_SAMPLING | Self::JUST_IN_TIME | Self::READS_EARLY) != 0
    }

    /// The sequence `flags` name, if they do.
    pub const fn sequence(flags: u16) -> Option<usize> {
        (flags as usize >> 8).checked_sub(1)
    }
}

/// One task: a macro kernel, its operands, what it waits on and what it triggers. 80 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct TaskDesc {
    /// The macro kernel's number in the device crate's list.
    pub task_type: u16,
    /// See [`TaskFlags`].
    pub flags: u16,
    /// The operator it is a block of: an index into the image's table of names.
    pub op: u32,
    /// Its block index in the operator's grid.
    pub block: [u32; 3],
    /// Its first row in the pass: rows at or above `Step::rows` are not computed.
    pub row_first: u32,
    /// `operands[operand_first..][..operand_count]`.
    pub operand_first: u32,
    /// See [`TaskDesc::operand_first`].
    pub operand_count: u32,
    /// `waits[wait_first..][..wait_count]`: the events it waits on. MPK: `dependent_event`.
    pub wait_first: u32,
    /// See [`TaskDesc::wait_first`].
    pub wait_count: u16,
    /// How many events it triggers.
    pub trigger_count: u16,
    /// `triggers[trigger_first..][..trigger_count]`: the events it triggers when done. MPK: `trigger_event`.
    pub trigger_first: u32,
    /// Data ops of its worker that bring its tiles, in the order of the worker's list.
    pub tiles: u32,
    /// The macro kernel's parameters, a `Pod` of its own.
    pub params: [u32; PARAM_WORDS],
}

impl TaskDesc {
    /// The rows of a box of `extent_rows` rows that this pass computes, given the pass's row count.
    pub fn rows(&self, extent_rows: u32, pass_rows: u32) -> u32 {
        pass_rows.saturating_sub(self.row_first).min(extent_rows)
    }
}

const _: () = assert!(size_of::<Operand>() == 48 && size_of::<TaskDesc>() == 80);
