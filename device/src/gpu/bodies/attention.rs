//! Attention whose positions several blocks share, in a cache of pages, and what merges their shares (flash-decoding).
//!
//! Generated from `perpetua::codegen::bodies::{attend_share, merge}`
//! by `BLESS=1 cargo test --test cpu codegen::`: what is to change changes there. Barriers and waits follow from who touches
//! which part of a tile.

use crate::arch::scalar::{exp2, reciprocal};
use crate::arch::{copy, warp};
use crate::block::Block;
use crate::gpu::Row;
use crate::gpu::math::larger;
use crate::gpu::tile::{Eights, Index, Lane, Own, PerRow, Rows, Sixteens, Tile, WARP_ROWS, where_seen, within};

/// found = sums of exp2(scale * q . k^T - max) . v, max, total, of 64 columns, over a share of the positions that each row sees.
///
/// # Safety
/// Every thread of the block makes this same call; the operands are there, nobody else writes them, and nobody else touches `found`,
/// whose rows are as many as those of what is read with it. The memory of tiles is the task's.
/// What an index says are rows of what it is used with; those that are written, each once.
#[allow(clippy::too_many_arguments, reason = "operands, and what else it asks for")]
pub(super) unsafe fn attend_share_64(
    block: &Block,
    q: &Rows<impl Fn(u32) -> Row>,
    k: &Rows<impl Fn(u32) -> Row>,
    v: &Rows<impl Fn(u32) -> Row>,
    found: &Rows<impl Fn(u32) -> Row>,
    pages: &Index<impl Fn(u32) -> u32>,
    seen: impl Fn(u32) -> u32,
    share: [u32; 2],
    scale: f32,
) {
    type Keys = Tile<64, 8>;
    type Values = Tile<64, 8>;
    let queries = &Own::<8>::at(0);
    let k_by_pages = &k.through(pages);
    let v_by_pages = &v.through(pages);
    // SAFETY: the caller's promises; what stands between accesses of a tile has been found, and judged.
    unsafe {
        let mut first = 0;
        while first < found.count {
            let lane = &Lane::of(block, first, found.count);
            let seen_by = lane.each_row(found.count, within(&seen, share[1]));
            warp::sync();
            queries.split(lane, q, 0);
            let mut sums = Sixteens::<1>::of(0.0);
            let mut max = PerRow::of(-1e30);
            let mut total = PerRow::of(0.0);
            block.sync();
            if share[0] < share[1] {
                Keys::at(28672, 2, 0).load(block, k_by_pages, share[0], 0);
                Values::at(45056, 2, 0).load(block, v_by_pages, share[0], 0);
            }
            copy::commit();
            let (mut t, mut t_round) = (share[0], 0);
            while t < share[1] {
                let mut scores = Eights::<2>::of(0.0);
                copy::wait::<0>();
                block.sync();
                if t + 64 < share[1] {
                    Keys::at(28672, 2, t_round + 1).load(block, k_by_pages, t + 64, 0);
                    Values::at(45056, 2, t_round + 1).load(block, v_by_pages, t + 64, 0);
                }
                copy::commit();
                scores.add_rows(lane, queries, &Keys::at(28672, 2, t_round));
                let scores = scores.map(lane, |x, row, column| where_seen(t + column, seen_by[row], x * scale));
                let of_block = scores.max();
                let new = PerRow::each(|row| larger(max.0[row], of_block.0[row]));
                let factor = PerRow::each(|row| exp2(max.0[row] - new.0[row]));
                let scores = scores.map(lane, |x, row, _| exp2(x - new.0[row]));
                let of_block = scores.sum();
                total = PerRow::each(|row| total.0[row] * factor.0[row] + of_block.0[row]);
                sums = sums.map(lane, |x, row, _| x * factor.0[row]);
                sums.add_columns(lane, &scores, &Values::at(45056, 2, t_round));
                max = new;
                t += 64;
                t_round += 1;
            }
            warp::sync();
            queries.keep(lane, &sums);
            warp::sync();
            queries.write(lane, found, 0);
            max.write(lane, found, 64);
            total.write(lane, found, 65);
            first += WARP_ROWS * block.warps();
        }
        // Whoever comes next may bring tiles there by bulk copies.
        copy::fence_tiles();
    }
}

/// found = sums of exp2(scale * q . k^T - max) . v, max, total, of 128 columns, over a share of the positions that each row sees.
///
/// # Safety
/// Every thread of the block makes this same call; the operands are there, nobody else writes them, and nobody else touches `found`,
/// whose rows are as many as those of what is read with it. The memory of tiles is the task's.
/// What an index says are rows of what it is used with; those that are written, each once.
#[allow(clippy::too_many_arguments, reason = "operands, and what else it asks for")]
pub(super) unsafe fn attend_share_128(
    block: &Block,
    q: &Rows<impl Fn(u32) -> Row>,
    k: &Rows<impl Fn(u32) -> Row>,
    v: &Rows<impl Fn(u32) -> Row>,
    found: &Rows<impl Fn(u32) -> Row>,
    pages: &Index<impl Fn(u32) -> u32>,
    seen: impl Fn(u32) -> u32,
    share: [u32; 2],
    scale: f32,
) {
    type Keys = Tile<32, 16>;
    type Values = Tile<32, 16>;
    let queries = &Own::<16>::at(0);
    let k_by_pages = &k.through(pages);
    let v_by_pages = &v.through(pages);
    // SAFETY: the caller's promises; what stands between accesses of a tile has been found, and judged.
    unsafe {
        let mut first = 0;
        while first < found.count {
            let lane = &Lane::of(block, first, found.count);
            let seen_by = lane.each_row(found.count, within(&seen, share[1]));
            warp::sync();
            queries.split(lane, q, 0);
            let mut sums = Sixteens::<2>::of(0.0);
            let mut max = PerRow::of(-1e30);
            let mut total = PerRow::of(0.0);
            block.sync();
            if share[0] < share[1] {
                Keys::at(57344, 2, 0).load(block, k_by_pages, share[0], 0);
                Values::at(73728, 2, 0).load(block, v_by_pages, share[0], 0);
            }
            copy::commit();
            let (mut t, mut t_round) = (share[0], 0);
            while t < share[1] {
                let mut scores = Eights::<1>::of(0.0);
                copy::wait::<0>();
                block.sync();
                if t + 32 < share[1] {
                    Keys::at(57344, 2, t_round + 1).load(block, k_by_pages, t + 32, 0);
                    Values::at(73728, 2, t_round + 1).load(block, v_by_pages, t + 32, 0);
                }
                copy::commit();
                scores.add_rows(lane, queries, &Keys::at(57344, 2, t_round));
                let scores = scores.map(lane, |x, row, column| where_seen(t + column, seen_by[row], x * scale));
                let of_block = scores.max();
                let new = PerRow::each(|row| larger(max.0[row], of_block.0[row]));
                let factor = PerRow::each(|row| exp2(max.0[row] - new.0[row]));
                let scores = scores.map(lane, |x, row, _| exp2(x - new.0[row]));
                let of_block = scores.sum();
                total = PerRow::each(|row| total.0[row] * factor.0[row] + of_block.0[row]);
                sums = sums.map(lane, |x, row, _| x * factor.0[row]);
                sums.add_columns(lane, &scores, &Values::at(73728, 2, t_round));
                max = new;
                t += 32;
                t_round += 1;
            }
            warp::sync();
            queries.keep(lane, &sums);
            warp::sync();
            queries.write(lane, found, 0);
            max.write(lane, found, 128);
            total.write(lane, found, 129);
            first += WARP_ROWS * block.warps();
        }
        // Whoever comes next may bring tiles there by bulk copies.
        copy::fence_tiles();
    }
}

/// y = what shares of the positions found together, 72 columns of `found` each.
///
/// # Safety
/// Every thread of the block makes this same call; the operands are there, nobody else writes them, and nobody else touches `y`,
/// whose rows are as many as those of what is read with it. The memory of tiles is the task's.
pub(super) unsafe fn merge_64(block: &Block, found: &Rows<impl Fn(u32) -> Row>, y: &Rows<impl Fn(u32) -> Row>) {
    let kept = &Own::<8>::at(0);
    // SAFETY: the caller's promises; what stands between accesses of a tile has been found, and judged.
    unsafe {
        let mut first = 0;
        while first < y.count {
            let lane = &Lane::of(block, first, y.count);
            let mut sums = Eights::<2>::of(0.0);
            let mut max = PerRow::of(-1e30);
            let mut total = PerRow::of(0.0);
            let mut n = 0;
            while n < found.columns {
                let part = Eights::<2>::read(lane, found, n);
                let of_part = PerRow::read(lane, found, n + 64);
                let new = PerRow::each(|row| larger(max.0[row], of_part.0[row]));
                let old = PerRow::each(|row| exp2(max.0[row] - new.0[row]));
                let factor = PerRow::each(|row| exp2(of_part.0[row] - new.0[row]));
                sums = sums.map_with(lane, &part, |x, z, row, _| x * old.0[row] + z * factor.0[row]);
                let of_part = PerRow::read(lane, found, n + 65);
                total = PerRow::each(|row| total.0[row] * old.0[row] + of_part.0[row] * factor.0[row]);
                max = new;
                n += 72;
            }
            let factor = PerRow::each(|row| reciprocal(total.0[row]));
            let sums = sums.map(lane, |x, row, _| x * factor.0[row]);
            warp::sync();
            kept.keep(lane, &sums);
            warp::sync();
            kept.write(lane, y, 0);
            first += WARP_ROWS * block.warps();
        }
        // Whoever comes next may bring tiles there by bulk copies.
        copy::fence_tiles();
    }
}

/// y = what shares of the positions found together, 136 columns of `found` each.
///
/// # Safety
/// Every thread of the block makes this same call; the operands are there, nobody else writes them, and nobody else touches `y`,
/// whose rows are as many as those of what is read with it. The memory of tiles is the task's.
pub(super) unsafe fn merge_128(block: &Block, found: &Rows<impl Fn(u32) -> Row>, y: &Rows<impl Fn(u32) -> Row>) {
    let kept = &Own::<16>::at(0);
    // SAFETY: the caller's promises; what stands between accesses of a tile has been found, and judged.
    unsafe {
        let mut first = 0;
        while first < y.count {
            let lane = &Lane::of(block, first, y.count);
            let mut sums = Eights::<4>::of(0.0);
            let mut max = PerRow::of(-1e30);
            let mut total = PerRow::of(0.0);
            let mut n = 0;
            while n < found.columns {
                let part = Eights::<4>::read(lane, found, n);
                let of_part = PerRow::read(lane, found, n + 128);
                let new = PerRow::each(|row| larger(max.0[row], of_part.0[row]));
                let old = PerRow::each(|row| exp2(max.0[row] - new.0[row]));
                let factor = PerRow::each(|row| exp2(of_part.0[row] - new.0[row]));
                sums = sums.map_with(lane, &part, |x, z, row, _| x * old.0[row] + z * factor.0[row]);
                let of_part = PerRow::read(lane, found, n + 129);
                total = PerRow::each(|row| total.0[row] * old.0[row] + of_part.0[row] * factor.0[row]);
                max = new;
                n += 136;
            }
            let factor = PerRow::each(|row| reciprocal(total.0[row]));
            let sums = sums.map(lane, |x, row, _| x * factor.0[row]);
            warp::sync();
            kept.keep(lane, &sums);
            warp::sync();
            kept.write(lane, y, 0);
            first += WARP_ROWS * block.warps();
        }
        // Whoever comes next may bring tiles there by bulk copies.
        copy::fence_tiles();
    }
}
