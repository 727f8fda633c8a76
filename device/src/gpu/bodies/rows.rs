//! Rows to and from where an index says.
//!
//! Generated from `perpetua::codegen::bodies::{gather, scatter}`
//! by `BLESS=1 cargo test --test cpu codegen::`: what is to change changes there. Barriers and waits follow from who touches
//! which part of a tile.

use crate::arch::{copy, warp};
use crate::block::Block;
use crate::gpu::Row;
use crate::gpu::tile::{Eights, Index, Lane, Own, Rows, WARP_ROWS};

/// y[i, :] = table[ids(i), :].
///
/// # Safety
/// Every thread of the block makes this same call; the operands are there, nobody else writes them, and nobody else touches `y`,
/// whose rows are as many as those of what is read with it. The memory of tiles is the task's.
/// What an index says are rows of what it is used with; those that are written, each once.
pub(super) unsafe fn gather(
    block: &Block,
    table: &Rows<impl Fn(u32) -> Row>,
    y: &Rows<impl Fn(u32) -> Row>,
    ids: &Index<impl Fn(u32) -> u32>,
) {
    let kept = &Own::<8>::at(0);
    let table_by_ids = &table.through(ids);
    // SAFETY: the caller's promises; what stands between accesses of a tile has been found, and judged.
    unsafe {
        let mut first = 0;
        while first < y.count {
            let lane = &Lane::of(block, first, y.count);
            let mut c = 0;
            while c < y.columns {
                let rows = Eights::<2>::read(lane, table_by_ids, c);
                warp::sync();
                kept.keep(lane, &rows);
                warp::sync();
                kept.write(lane, y, c);
                c += 64;
            }
            first += WARP_ROWS * block.warps();
        }
        // Whoever comes next may bring tiles there by bulk copies.
        copy::fence_tiles();
    }
}

/// y[slots(i), :] = x[i, :].
///
/// # Safety
/// Every thread of the block makes this same call; the operands are there, nobody else writes them, and nobody else touches `y`,
/// whose rows are as many as those of what is read with it. The memory of tiles is the task's.
/// What an index says are rows of what it is used with; those that are written, each once.
pub(super) unsafe fn scatter(
    block: &Block,
    x: &Rows<impl Fn(u32) -> Row>,
    y: &Rows<impl Fn(u32) -> Row>,
    slots: &Index<impl Fn(u32) -> u32>,
) {
    let kept = &Own::<8>::at(0);
    let y_by_slots = &y.through(slots);
    // SAFETY: the caller's promises; what stands between accesses of a tile has been found, and judged.
    unsafe {
        let mut first = 0;
        while first < y_by_slots.count {
            let lane = &Lane::of(block, first, y_by_slots.count);
            let mut c = 0;
            while c < y_by_slots.columns {
                let rows = Eights::<2>::read(lane, x, c);
                warp::sync();
                kept.keep(lane, &rows);
                warp::sync();
                kept.write(lane, y_by_slots, c);
                c += 64;
            }
            first += WARP_ROWS * block.warps();
        }
        // Whoever comes next may bring tiles there by bulk copies.
        copy::fence_tiles();
    }
}
