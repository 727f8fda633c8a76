//! Rule 7 of an image, judged on its bytes: what loaders bring is what bodies take, and lands where nothing is in use.

use super::Image;
use crate::parallel::{LISTS, side_by_side};
use perpetua_device::kernels::{self, Spec, linear};
use perpetua_shared::image::{BindingKind, ProgramDesc};
use perpetua_shared::launch::{PACE_PASS, TILE_BARRIERS, TILE_BYTES};
use perpetua_shared::task::{Operand, TaskDesc};
use perpetua_shared::{DataOp, PrefetchOp, WorkerId};

/// Bulk copies and prefetches go by whole units of this.
const UNIT_BYTES: u64 = 16;

/// The first thing wrong with the loaders' sections, and where.
pub(super) fn check(image: &Image) -> Result<(), (String, String)> {
    let (view, loads) = (image.view(), image.loads());
    let per_program = view.n_workers as usize + 1;
    for (what, heads, len) in
        [("data", &loads.data_heads, loads.data.len()), ("prefetch", &loads.prefetch_heads, loads.prefetches.len())]
    {
        let mut at = 0;
        for (number, row) in heads.chunks(per_program).enumerate() {
            if row[0] as usize != at
                || row.windows(2).any(|pair| pair[0] > pair[1])
                || row[per_program - 1] as usize > len
            {
                let found = "expected to ascend from where the program before ends, to the section's end at most";
                return Err((format!("p{number}"), format!("its {what} heads are {row:?}, {found}")));
            }
            at = row[per_program - 1] as usize;
        }
        if at != len {
            return Err(("image".to_owned(), format!("{len} {what} ops, but its heads end at {at}")));
        }
    }
    // Workers know nothing of each other's loaders.
    let all = (0..view.programs.len()).flat_map(|number| (0..view.n_workers).map(move |worker| (number, worker)));
    let judged = side_by_side(all.collect(), LISTS, |_, (number, worker)| of_worker(image, number, WorkerId(worker)));
    judged.into_iter().collect()
}

/// The first thing wrong with what the loader of `worker` does in program `number`, and where.
fn of_worker(image: &Image, number: usize, worker: WorkerId) -> Result<(), (String, String)> {
    let (view, loads) = (image.view(), image.loads());
    let program = &view.programs[number];
    let at = number * (view.n_workers as usize + 1) + worker.idx();
    let own = |heads: &[u32]| heads[at] as usize..heads[at + 1] as usize;
    let data = &loads.data[own(loads.data_heads)];
    let prefetches = &loads.prefetches[own(loads.prefetch_heads)];
    let place = |what: String| (format!("p{number} {worker}"), what);
    memory(image, data).map_err(place)?;
    let list = view.list(number, worker);
    ahead(program, data).map_err(place)?;
    list.iter().chain(view.just_in_time(number)).try_for_each(|id| beside(image, *id, data))?;
    near(image, list.len(), data.len(), prefetches).map_err(place)?;
    let mut left = data;
    let has_ahead = data.first().is_some_and(|op| op.ahead > 0);
    let is_in_the_way = |id: u32, left: &[DataOp]| {
        let takes_memory = kernels::takes_memory_for_one_row(view.tasks[id as usize].task_type);
        match has_ahead && left.is_empty() && takes_memory {
            true => Err((image.task_name(id), "takes the memory where tiles come ahead of a pass".to_owned())),
            false => Ok(()),
        }
    };
    // Launched just in time it may come last on any worker.
    view.just_in_time(number).iter().try_for_each(|id| is_in_the_way(*id, &[]))?;
    for &id in list {
        let task = &view.tasks[id as usize];
        let Some((own, rest)) = left.split_at_checked(task.tiles as usize) else {
            return Err((image.task_name(id), format!("{} tiles, {worker} has {}", task.tiles, left.len())));
        };
        tiles(image, task, own).map_err(|what| (image.task_name(id), what))?;
        left = rest;
        is_in_the_way(id, left)?;
    }
    if !left.is_empty() {
        return Err(place(format!("{} data ops that no task takes", left.len())));
    }
    Ok(())
}

/// The memory that a task takes beside tiles is no tile's, whenever it comes.
fn beside(image: &Image, id: u32, data: &[DataOp]) -> Result<(), (String, String)> {
    let task = &image.view().tasks[id as usize];
    let Some(spec) = Spec::of(task.task_type) else { return Ok(()) };
    let bytes = (spec.beside_tiles)(&task.params, image.view().operands(task));
    match data.iter().find(|op| u64::from(op.dest_offset_bytes) < bytes) {
        Some(op) => Err((
            image.task_name(id),
            format!("takes {bytes} bytes beside tiles, of which one lies at {}", op.dest_offset_bytes),
        )),
        None => Ok(()),
    }
}

/// Copies are issued in order, each when as many compute ops as it says have retired; what it overwrites must be one of
/// theirs.
fn memory(image: &Image, data: &[DataOp]) -> Result<(), String> {
    let mut after = 0;
    for (number, op) in data.iter().enumerate() {
        let fail = |what: String| Err(format!("data op {number} {what}"));
        inside(image, op.source, op.source_offset_bytes, op.bytes.into(), &[BindingKind::Weight])
            .map_err(|what| format!("data op {number} {what}"))?;
        let end = u64::from(op.dest_offset_bytes) + u64::from(op.bytes);
        if end > u64::from(TILE_BYTES) || !u64::from(op.dest_offset_bytes).is_multiple_of(UNIT_BYTES) {
            return fail(format!("goes to bytes {}..{end} of {TILE_BYTES}", op.dest_offset_bytes));
        }
        if u32::from(op.barrier) != number as u32 % TILE_BARRIERS {
            return fail(format!("has barrier {}, expected {}", op.barrier, number as u32 % TILE_BARRIERS));
        }
        if op.after > op.used_by || number > 0 && data[number - 1].used_by > op.used_by {
            return fail(format!(
                "waits for {} compute ops and is for number {}: nothing would move",
                op.after, op.used_by
            ));
        }
        after = after.max(op.after);
        if number >= TILE_BARRIERS as usize && data[number - TILE_BARRIERS as usize].used_by >= after {
            return fail(format!("takes barrier {} before its last tile has been read", op.barrier));
        }
        // Older ones have given their barriers away. What is for later compute ops was brought later.
        let older = data[number.saturating_sub(TILE_BARRIERS as usize)..number].iter().rev();
        for other in older.take_while(|other| other.used_by >= after) {
            let (start, other_end) =
                (u64::from(other.dest_offset_bytes), u64::from(other.dest_offset_bytes) + u64::from(other.bytes));
            if start < end && u64::from(op.dest_offset_bytes) < other_end {
                return fail(format!(
                    "goes to bytes {}..{end}, where one lies that is still to be read",
                    op.dest_offset_bytes
                ));
            }
        }
    }
    Ok(())
}

/// What is brought ahead of a pass, of one row, lands where the last tiles of the one before are not.
fn ahead(program: &ProgramDesc, data: &[DataOp]) -> Result<(), String> {
    let n_ahead = data.iter().take_while(|op| op.ahead > 0).count();
    if let Some(late) = data[n_ahead..].iter().position(|op| op.ahead > 0) {
        return Err(format!("data op {} is brought ahead of its pass, those before it are not", n_ahead + late));
    }
    if n_ahead > 0 && program.max_rows != 1 {
        return Err(format!("brings {n_ahead} tiles ahead of a pass of {} rows, expected one", program.max_rows));
    }
    for (number, op) in data[..n_ahead].iter().enumerate() {
        let fail = |what: String| Err(format!("data op {number}, ahead of its pass, {what}"));
        if op.after > 0 {
            return fail(format!("waits for {} compute ops of it", op.after));
        }
        // Its own barrier and those of the ones before it are taken, too.
        let unread = usize::from(op.ahead) - 1;
        if unread + number >= TILE_BARRIERS as usize || unread > data.len() {
            return fail(format!("may leave {unread} tiles unread, of {} with {TILE_BARRIERS} barriers", data.len()));
        }
        let end = op.dest_offset_bytes + op.bytes;
        let overwrites = |other: &&DataOp| {
            other.dest_offset_bytes < end && op.dest_offset_bytes < other.dest_offset_bytes + other.bytes
        };
        if data[data.len() - unread..].iter().any(|other| overwrites(&other)) {
            return fail(format!("overwrites one of the last {unread}, which are still to be read"));
        }
    }
    Ok(())
}

/// What is asked for lies in its binding, and those who ask come to an end: a loader that waits for tasks, whose worker
/// would wait for tiles, has none to bring.
fn near(image: &Image, n_tasks: usize, n_data: usize, prefetches: &[PrefetchOp]) -> Result<(), String> {
    for (number, op) in prefetches.iter().enumerate() {
        let apart = u64::from(op.stretches.saturating_sub(1)) * u64::from(op.apart_bytes);
        let span = if op.bytes == 0 { 0 } else { apart + u64::from(op.bytes) };
        // What lies together is asked for at once, by a number of bytes.
        if u32::try_from(span).is_err() {
            return Err(format!("prefetch {number} is for {span} bytes, expected fewer than 2^32"));
        }
        inside(image, op.source, op.source_offset_bytes, span, &[BindingKind::Weight, BindingKind::State])
            .map_err(|what| format!("prefetch {number} {what}"))?;
        let fits = op.stretches > 0
            && op.apart_bytes >= op.bytes
            && u64::from(op.apart_bytes).is_multiple_of(UNIT_BYTES)
            && u64::from(op.bytes).is_multiple_of(UNIT_BYTES)
            && (op.splits == 0 || op.split < op.splits);
        let before = number.checked_sub(1).map_or((0, 0), |last| (prefetches[last].before, prefetches[last].after));
        let in_order = op.before as usize <= n_data && before.0 <= op.before && before.1 <= op.after;
        let gets_on = op.after == 0 || op.after as usize <= n_tasks && op.after < PACE_PASS && n_data == 0;
        if !fits || !in_order || !gets_on {
            return Err(format!("prefetch {number} is out of order, of no whole stretches or nobody's: {op:?}"));
        }
    }
    Ok(())
}

fn inside(image: &Image, source: u32, first: u64, bytes: u64, kinds: &[BindingKind]) -> Result<(), String> {
    let Some(binding) = image.bindings().get(source as usize) else {
        return Err(format!("reads binding {source}, which does not exist"));
    };
    let kind = BindingKind::from_u32(binding.kind);
    if !kind.is_some_and(|kind| kinds.contains(&kind)) {
        return Err(format!("reads binding {source}, which is of kind {kind:?}, expected one of {kinds:?}"));
    }
    let in_units = first.is_multiple_of(UNIT_BYTES) && bytes.is_multiple_of(UNIT_BYTES) && bytes > 0;
    match first.checked_add(bytes) {
        Some(end) if end <= binding.bytes && in_units => Ok(()),
        _ => Err(format!("reads {bytes} bytes from {first} of binding {source}, which has {}", binding.bytes)),
    }
}

/// A task's tiles are what its kernel takes, in the order in which it does: a vector first, whole; then of each matrix
/// a tile in turn, whole rows or, of longer rows, pieces, one after the other until all are there; where a row is taken
/// in segments, one segment of every row after the other. Each may arrive while those of the compute op before it, if
/// that is the task's, too, have not been released.
fn tiles(image: &Image, task: &TaskDesc, data: &[DataOp]) -> Result<(), String> {
    if data.is_empty() {
        return Ok(());
    }
    let view = image.view();
    let slots = Spec::of(task.task_type).map_or(&[][..], |spec| kernels::tiled(spec, &task.params));
    let operands: Vec<&Operand> =
        slots.iter().map(|slot| &view.operands(task)[*slot]).filter(|operand| operand.is_present()).collect();
    if operands.is_empty() {
        return Err("has tiles, but its kernel takes none here".to_owned());
    }
    let (vectors, matrices): (Vec<&Operand>, Vec<&Operand>) = operands.into_iter().partition(|o| o.rank < 2);
    let is_at = |op: &DataOp, operand: &Operand, at: u64| {
        (op.source, op.source_offset_bytes) == (operand.binding.0, operand.offset_bytes + at)
    };
    for op in data {
        if op.used_by > data[0].used_by && op.after >= op.used_by {
            let (after, held) = (op.after, op.used_by - 1);
            return Err(format!(
                "has a tile that waits for {after} compute ops, number {held} among them, which may be held until it is there"
            ));
        }
    }
    let mut data = data.iter();
    for vector in vectors {
        let fits = |op: &&DataOp| is_at(op, vector, 0) && u64::from(op.bytes) == vector.bytes();
        data.next().filter(fits).ok_or("does not begin with the vector it takes whole")?;
    }
    let Some(first) = matrices.first() else { return Err("takes no matrix".to_owned()) };
    let row = first.bytes() / u64::from(first.extent[0].max(1));
    let dense = |o: &Operand| o.extent[0] == 1 || o.stride_elems[0] == o.strided().extent[1];
    if !matrices.iter().all(|o| o.bytes() == first.bytes() && o.extent == first.extent && dense(o)) || row == 0 {
        return Err("takes matrices that tiles cannot carry".to_owned());
    }
    // Rows in lines have their scales among them: a part of one is nothing.
    let is_in_lines = first.lines().is_some();
    let segments = linear::segments(task.task_type, &task.params);
    if segments > 1 {
        let len = row / u64::from(first.extent[1]) * u64::from(linear::segment_len(first.extent[1], segments));
        for segment in 0..u64::from(segments) {
            for n in 0..u64::from(first.extent[0]) {
                let (from, to) = (segment * len, row.min((segment + 1) * len));
                let fits = |op: &&DataOp| is_at(op, first, n * row + from) && u64::from(op.bytes) == to - from;
                data.next().filter(fits).ok_or_else(|| format!("has no tile for segment {segment} of row {n}"))?;
            }
        }
        return match data.next() {
            None => Ok(()),
            Some(_) => Err("has more tiles than its segments".to_owned()),
        };
    }
    let (mut at, bytes) = (0, first.bytes());
    while at < bytes {
        let mut len = None;
        for matrix in &matrices {
            let op = data.next().filter(|op| is_at(op, matrix, at) && *len.get_or_insert(op.bytes) == op.bytes);
            op.ok_or_else(|| format!("has no tile for byte {at} of its matrices"))?;
        }
        let len = u64::from(len.unwrap_or(0));
        let whole_rows = at.is_multiple_of(row) && len.is_multiple_of(row);
        if at + len > bytes || !whole_rows && (is_in_lines || at % row + len > row) {
            return Err(format!("has a tile of {len} bytes from {at}, neither whole rows of {row} nor part of one"));
        }
        at += len;
    }
    match data.next() {
        None => Ok(()),
        Some(_) => Err("has more tiles than its matrices".to_owned()),
    }
}
