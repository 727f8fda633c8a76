//! The records that workers on a GPU fetch tasks by ([`Turn`]), made on the host.

use crate::gpu::thin::Product;
use crate::kernels::{DecodeAttention, Numbered, decode_attention};
use crate::worker::ImageView;
use core::mem::offset_of;
use perpetua_shared::turn::TURN_EVENTS;
use perpetua_shared::{Operand, TaskDesc, Turn};

/// Words of each record of `view`.
pub fn words(view: &ImageView<'_>) -> usize {
    let operands = view.tasks.iter().map(|task| task.operand_count as usize).max().unwrap_or(0);
    (size_of::<Turn>() + operands * size_of::<Operand>()) / 4
}

/// [`Turn::known`] of `task`, whose `operands` have addresses; `is_aligned` says whether one lies on sixteen bytes,
/// whatever the sequence.
fn known(task: &TaskDesc, operands: &[Operand], is_aligned: impl Fn(&Operand) -> bool) -> [u32; 4] {
    match task.task_type {
        DecodeAttention::TASK_TYPE => decode_attention::known(task, operands, is_aligned),
        _ => Product::known(task, operands, is_aligned),
    }
}

/// The records of all tasks of `view`, one after the other, with binding `i` at address `bindings[i]`, of which a
/// sequence has `parts[i]` bytes.
///
/// # Panics
/// When the image has more bindings.
pub fn records(view: &ImageView<'_>, bindings: &[u64], parts: &[u64]) -> Vec<u32> {
    let words = words(view);
    let mut all = vec![0; words * view.tasks.len()];
    for (number, (record, task)) in (0..).zip(all.chunks_exact_mut(words).zip(view.tasks)) {
        let mut turn = Turn {
            task_type: task.task_type,
            flags: task.flags,
            next: 0,
            block: task.block,
            row_first: task.row_first,
            wait_first: task.wait_first,
            wait_count: task.wait_count,
            trigger_count: task.trigger_count,
            trigger_first: task.trigger_first,
            tiles: task.tiles,
            params: task.params,
            triggers: [0; TURN_EVENTS],
            waits: [[0; 2]; TURN_EVENTS],
            task: number,
            data_first: 0,
            known: [0; 4],
        };
        for (to, event) in turn.triggers.iter_mut().zip(view.triggers(task)) {
            *to = *event;
        }
        for (to, event) in turn.waits.iter_mut().zip(view.waits(task)) {
            *to = [*event, view.events[*event as usize].num_triggers];
        }
        let (head, rest) = record.split_at_mut(size_of::<Turn>() / 4);
        let operands: Vec<Operand> = view
            .operands(task)
            .iter()
            .map(|operand| {
                let offset_bytes = bindings[operand.binding.idx()] + operand.offset_bytes;
                Operand { offset_bytes, ..*operand }
            })
            .collect();
        let part = |operand: &Operand| parts[operand.binding.idx()];
        turn.known = known(task, &operands, |operand| (operand.offset_bytes | part(operand)).is_multiple_of(16));
        head.copy_from_slice(bytemuck::cast_slice(&[turn]));
        let words: &[u32] = bytemuck::cast_slice(&operands);
        rest[..words.len()].copy_from_slice(words);
    }
    // Just-in-time tasks, in lists of their own, have none after them, and no tiles. Those of the others stand in the
    // lists' order.
    let mut tiles = 0;
    for lists in view.list_heads.chunks_exact(view.n_workers as usize + 2) {
        for ends in lists[..=view.n_workers as usize].windows(2) {
            let list = &view.lists[ends[0] as usize..ends[1] as usize];
            for (i, &task) in list.iter().enumerate() {
                let record = task as usize * words;
                all[record + offset_of!(Turn, next) / 4] = list.get(i + 1).map_or(0, |next| next + 1);
                all[record + offset_of!(Turn, data_first) / 4] = tiles;
                tiles += view.tasks[task as usize].tiles;
            }
        }
    }
    all
}
