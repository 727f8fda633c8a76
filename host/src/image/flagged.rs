//! Rule 8 of an image, judged on its bytes: whoever reads a flagged element waits for one task, which writes it in
//! every pass.

use super::Image;
use perpetua_device::kernels::{Spec, Use};
use perpetua_shared::image::{BindingKind, EVERY_SEQUENCE, ProgramDesc};
use perpetua_shared::limits::MAX_RANK;
use perpetua_shared::task::{Operand, TaskDesc, TaskFlags};
use std::collections::HashMap;
use std::ops::Range;

/// Bytes of a binding, from its start.
type Bytes = Range<u64>;

/// Flagged bytes that a task writes or reads.
struct Touch {
    binding: u32,
    bytes: Bytes,
    program: usize,
    task: u32,
}

/// Per task, the tasks that write what it reads: a list for each of its flagged operands, which others that read the
/// same have, too.
#[derive(Debug)]
pub(super) struct Writers {
    /// Numbers of lists.
    of: Vec<Vec<u32>>,
    /// Tasks.
    lists: Vec<Vec<u32>>,
}

impl Writers {
    /// Those of `task`, as numbers of lists.
    pub(super) fn of(&self, task: u32) -> &[u32] {
        &self.of[task as usize]
    }

    /// The lists.
    pub(super) fn lists(&self) -> &[Vec<u32>] {
        &self.lists
    }
}

/// Who waits for whom, or the first thing wrong with what is flagged, and where.
pub(super) fn check(image: &Image) -> Result<Writers, (String, String)> {
    let view = image.view();
    let mut writers = Writers { of: vec![Vec::new(); view.tasks.len()], lists: Vec::new() };
    // Of all programs.
    let (mut written, mut read): (Vec<Touch>, Vec<Touch>) = Default::default();
    for (number, program) in view.programs.iter().enumerate() {
        for id in program.task_first..program.task_first + program.task_count {
            let task = &view.tasks[id as usize];
            let slots = Spec::of(task.task_type).map_or(&[][..], |spec| spec.slots);
            for (slot, operand) in slots.iter().zip(view.operands(task)).filter(|(_, operand)| operand.is_present()) {
                let fail = |what: String| (image.task_name(id), format!("operand `{}` {what}", slot.name));
                let is_flagged = is_flagged(image, operand).map_err(fail)?;
                if !is_flagged {
                    continue;
                }
                let (size, room) = (elem_bytes(operand), image.bindings()[operand.binding.idx()].bytes);
                let elements = operand.extent.iter().fold(1u64, |all, n| all.saturating_mul((*n).into()));
                if elements.saturating_mul(size) > room {
                    return Err(fail(format!("has {elements} elements of {size} bytes, in a binding of {room} bytes")));
                }
                let is_written = slot.usage != Use::Read;
                judge(program, task, is_written).map_err(|what| fail(what.to_owned()))?;
                let binding = operand.binding.0;
                let touch = |bytes| Touch { binding, bytes, program: number, task: id };
                if is_written { &mut written } else { &mut read }.extend(bytes_of(operand).into_iter().map(touch));
            }
        }
    }
    written.sort_unstable_by_key(|touch| (touch.binding, touch.bytes.start));
    for pair in written.windows(2) {
        let [one, other] = pair else { continue };
        if one.binding == other.binding && other.bytes.start < one.bytes.end {
            let (bytes, binding) = (&other.bytes, other.binding);
            let what = format!("writes flagged bytes {bytes:?} of b{binding}, as does {}", image.task_name(one.task));
            return Err((image.task_name(other.task), what));
        }
    }
    let mut known: HashMap<(u32, Bytes, usize), u32> = HashMap::new();
    for Touch { binding, bytes, program, task } in read {
        let key = (binding, bytes.clone(), program);
        if let Some(list) = known.get(&key) {
            writers.of[task as usize].push(*list);
            continue;
        }
        let mut at = bytes.start;
        let first = written.partition_point(|touch| (touch.binding, touch.bytes.end) <= (binding, at));
        let mut list = Vec::new();
        for of in written[first..].iter().take_while(|of| of.binding == binding && of.bytes.start < bytes.end) {
            if of.bytes.start > at || of.program != program {
                break;
            }
            list.push(of.task);
            at = of.bytes.end;
        }
        if at < bytes.end {
            let end = bytes.end;
            let what = format!("reads flagged bytes {at}..{end} of b{binding}, which no task of its program writes");
            return Err((image.task_name(task), what));
        }
        let number = writers.lists.len() as u32;
        writers.lists.push(list);
        known.insert(key, number);
        writers.of[task as usize].push(number);
    }
    Ok(writers)
}

/// Whether `operand` says that it is flagged, as its binding does.
fn is_flagged(image: &Image, operand: &Operand) -> Result<bool, String> {
    let kind = BindingKind::from_u32(image.bindings()[operand.binding.idx()].kind);
    match (operand.is_flagged, kind == Some(BindingKind::Flagged)) {
        (0, false) => Ok(false),
        (1, true) => Ok(true),
        (says, _) => Err(format!("lies in {}, of kind {kind:?}, and its mark as flagged is {says}", operand.binding)),
    }
}

/// Whether `task` of `program` may write or read what is flagged.
fn judge(program: &ProgramDesc, task: &TaskDesc, is_written: bool) -> Result<(), &'static str> {
    if program.max_rows != 1 || program.kind == EVERY_SEQUENCE || task.row_first != 0 {
        return Err("is flagged, in a pass that may leave rows out");
    }
    if task.flags & TaskFlags::JUST_IN_TIME != 0 {
        return Err("is flagged, of a task that events alone launch");
    }
    if is_written && task.flags & TaskFlags::ONLY_WHEN_SAMPLING != 0 {
        return Err("is flagged, and not written in every pass");
    }
    Ok(())
}

/// Bytes of an element.
fn elem_bytes(operand: &Operand) -> u64 {
    operand.dtype().map_or(0, |dtype| dtype.size_bytes() as u64)
}

/// The bytes of `operand`'s box, in runs. It has no more elements than its binding has room for.
fn bytes_of(operand: &Operand) -> Vec<Bytes> {
    let size = elem_bytes(operand);
    let mut starts = vec![operand.offset_bytes];
    let mut width = size;
    // From the innermost dimension out: one that goes on where the run ends makes it longer.
    for dim in (0..MAX_RANK).rev() {
        let (n, stride) = (u64::from(operand.extent[dim]), u64::from(operand.stride_elems[dim]) * size);
        if n == 0 {
            return Vec::new();
        }
        if n > 1 && stride == width && starts.len() == 1 {
            width *= n;
        } else if n > 1 {
            starts = (0..n).flat_map(|i| starts.iter().map(move |start| start + i * stride)).collect();
        }
    }
    starts.into_iter().map(|start| start..start + width).collect()
}
