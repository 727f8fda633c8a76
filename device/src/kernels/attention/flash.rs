//! Attention of many rows of queries on the tensor cores, keys and values by blocks (Dao et al. 2022).
//!
//! Generated from `perpetua::codegen::bodies::{flash_attention, flash_attention_share}`
//! by `BLESS=1 cargo test --test cpu codegen::`: what is to change changes there. Barriers and waits follow from who touches
//! which part of a tile.

use crate::arch::scalar::{exp2, reciprocal};
use crate::arch::{copy, warp};
use crate::block::Block;
use crate::gpu::Row;
use crate::gpu::math::larger;
use crate::gpu::tile::{
    Eights, Lane, Own, PerRow, Rows, Sixteens, Tile, WARP_ROWS, last_row, where_in_window, where_seen, window_from,
    within,
};

/// y = softmax(scale * q . k^T) . v, base 2, of up to 64 columns, over the positions that each row sees, and a score without value.
///
/// # Safety
/// Every thread of the block makes this same call; the operands are there, nobody else writes them, and nobody else touches `y`,
/// whose rows are as many as those of what is read with it. The memory of tiles is the task's.
#[allow(clippy::too_many_arguments, reason = "operands, and what else it asks for")]
pub(super) unsafe fn attend_64(
    block: &Block,
    q: &Rows<impl Fn(u32) -> Row>,
    k: &Rows<impl Fn(u32) -> Row>,
    v: &Rows<impl Fn(u32) -> Row>,
    y: &Rows<impl Fn(u32) -> Row>,
    seen: impl Fn(u32) -> u32,
    window: u32,
    sinks: impl Fn(u32) -> f32,
    scale: f32,
) {
    type Keys = Tile<64, 8>;
    type Values = Tile<64, 8>;
    let queries = &Own::<8>::at(0);
    // SAFETY: the caller's promises; what stands between accesses of a tile has been found, and judged.
    unsafe {
        let mut first = 0;
        while first < y.count {
            let lane = &Lane::of(block, first, y.count);
            let seen_from = window_from(seen(first), window, 64);
            let last = last_row(block, first, y.count);
            let seen_end = within(&seen, k.count)(last);
            let seen_by = lane.each_row(y.count, &seen);
            warp::sync();
            queries.split(lane, q, 0);
            let mut sums = Sixteens::<1>::of(0.0);
            let mut max = PerRow::of(-1e30);
            let mut total = PerRow::of(0.0);
            block.sync();
            if seen_from < seen_end {
                Keys::at(28672, 2, 0).load(block, k, seen_from, 0);
                Values::at(45056, 2, 0).load(block, v, seen_from, 0);
            }
            copy::commit();
            let (mut t, mut t_round) = (seen_from, 0);
            while t < seen_end {
                let mut scores = Eights::<2>::of(0.0);
                copy::wait::<0>();
                block.sync();
                if t + 64 < seen_end {
                    Keys::at(28672, 2, t_round + 1).load(block, k, t + 64, 0);
                    Values::at(45056, 2, t_round + 1).load(block, v, t + 64, 0);
                }
                copy::commit();
                scores.add_rows(lane, queries, &Keys::at(28672, 2, t_round));
                let scores = scores
                    .map(lane, |x, row, column| where_in_window(t + column, seen_by[row], window, k.count, x * scale));
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
            let sink = PerRow(lane.each_row(y.count, &sinks));
            let all = PerRow::each(|row| larger(max.0[row], sink.0[row]));
            let shrink = PerRow::each(|row| exp2(max.0[row] - all.0[row]));
            let total = PerRow::each(|row| total.0[row] * shrink.0[row] + exp2(sink.0[row] - all.0[row]));
            let inverse = PerRow::each(|row| shrink.0[row] * reciprocal(total.0[row]));
            let sums = sums.map(lane, |x, row, _| x * inverse.0[row]);
            warp::sync();
            queries.keep(lane, &sums);
            warp::sync();
            queries.write(lane, y, 0);
            first += WARP_ROWS * block.warps();
        }
        // Whoever comes next may bring tiles there by bulk copies.
        copy::fence_tiles();
    }
}

/// y = softmax(scale * q . k^T) . v, base 2, of up to 128 columns, over the positions that each row sees, and a score without value.
///
/// # Safety
/// Every thread of the block makes this same call; the operands are there, nobody else writes them, and nobody else touches `y`,
/// whose rows are as many as those of what is read with it. The memory of tiles is the task's.
#[allow(clippy::too_many_arguments, reason = "operands, and what else it asks for")]
pub(super) unsafe fn attend_128(
    block: &Block,
    q: &Rows<impl Fn(u32) -> Row>,
    k: &Rows<impl Fn(u32) -> Row>,
    v: &Rows<impl Fn(u32) -> Row>,
    y: &Rows<impl Fn(u32) -> Row>,
    seen: impl Fn(u32) -> u32,
    window: u32,
    sinks: impl Fn(u32) -> f32,
    scale: f32,
) {
    type Keys = Tile<32, 16>;
    type Values = Tile<32, 16>;
    let queries = &Own::<16>::at(0);
    // SAFETY: the caller's promises; what stands between accesses of a tile has been found, and judged.
    unsafe {
        let mut first = 0;
        while first < y.count {
            let lane = &Lane::of(block, first, y.count);
            let seen_from = window_from(seen(first), window, 32);
            let last = last_row(block, first, y.count);
            let seen_end = within(&seen, k.count)(last);
            let seen_by = lane.each_row(y.count, &seen);
            warp::sync();
            queries.split(lane, q, 0);
            let mut sums = Sixteens::<2>::of(0.0);
            let mut max = PerRow::of(-1e30);
            let mut total = PerRow::of(0.0);
            block.sync();
            if seen_from < seen_end {
                Keys::at(57344, 2, 0).load(block, k, seen_from, 0);
                Values::at(73728, 2, 0).load(block, v, seen_from, 0);
            }
            copy::commit();
            let (mut t, mut t_round) = (seen_from, 0);
            while t < seen_end {
                let mut scores = Eights::<1>::of(0.0);
                copy::wait::<0>();
                block.sync();
                if t + 32 < seen_end {
                    Keys::at(57344, 2, t_round + 1).load(block, k, t + 32, 0);
                    Values::at(73728, 2, t_round + 1).load(block, v, t + 32, 0);
                }
                copy::commit();
                scores.add_rows(lane, queries, &Keys::at(57344, 2, t_round));
                let scores = scores
                    .map(lane, |x, row, column| where_in_window(t + column, seen_by[row], window, k.count, x * scale));
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
            let sink = PerRow(lane.each_row(y.count, &sinks));
            let all = PerRow::each(|row| larger(max.0[row], sink.0[row]));
            let shrink = PerRow::each(|row| exp2(max.0[row] - all.0[row]));
            let total = PerRow::each(|row| total.0[row] * shrink.0[row] + exp2(sink.0[row] - all.0[row]));
            let inverse = PerRow::each(|row| shrink.0[row] * reciprocal(total.0[row]));
            let sums = sums.map(lane, |x, row, _| x * inverse.0[row]);
            warp::sync();
            queries.keep(lane, &sums);
            warp::sync();
            queries.write(lane, y, 0);
            first += WARP_ROWS * block.warps();
        }
        // Whoever comes next may bring tiles there by bulk copies.
        copy::fence_tiles();
    }
}

/// found = max, total, and sums of exp2(scale * q . k^T - max) . v, of up to 64 columns, over a share of the positions that each row sees, and a score without value.
///
/// # Safety
/// Every thread of the block makes this same call; the operands are there, nobody else writes them, and nobody else touches `found`,
/// whose rows are as many as those of what is read with it. The memory of tiles is the task's.
#[allow(clippy::too_many_arguments, reason = "operands, and what else it asks for")]
pub(super) unsafe fn attend_share_64(
    block: &Block,
    q: &Rows<impl Fn(u32) -> Row>,
    k: &Rows<impl Fn(u32) -> Row>,
    v: &Rows<impl Fn(u32) -> Row>,
    found: &Rows<impl Fn(u32) -> Row>,
    seen: impl Fn(u32) -> u32,
    share: [u32; 2],
    sinks: impl Fn(u32) -> f32,
    scale: f32,
) {
    type Keys = Tile<64, 8>;
    type Values = Tile<64, 8>;
    let queries = &Own::<8>::at(0);
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
                Keys::at(28672, 2, 0).load(block, k, share[0], 0);
                Values::at(45056, 2, 0).load(block, v, share[0], 0);
            }
            copy::commit();
            let (mut t, mut t_round) = (share[0], 0);
            while t < share[1] {
                let mut scores = Eights::<2>::of(0.0);
                copy::wait::<0>();
                block.sync();
                if t + 64 < share[1] {
                    Keys::at(28672, 2, t_round + 1).load(block, k, t + 64, 0);
                    Values::at(45056, 2, t_round + 1).load(block, v, t + 64, 0);
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
            let sink = PerRow(lane.each_row(found.count, &sinks));
            let all = PerRow::each(|row| larger(max.0[row], sink.0[row]));
            let shrink = PerRow::each(|row| exp2(max.0[row] - all.0[row]));
            let total = PerRow::each(|row| total.0[row] * shrink.0[row] + exp2(sink.0[row] - all.0[row]));
            let sums = sums.map(lane, |x, row, _| x * shrink.0[row]);
            let max = PerRow::each(|row| all.0[row] * core::f32::consts::LN_2);
            warp::sync();
            queries.keep(lane, &sums);
            warp::sync();
            queries.write(lane, found, 4);
            max.write(lane, found, 0);
            total.write(lane, found, 1);
            first += WARP_ROWS * block.warps();
        }
        // Whoever comes next may bring tiles there by bulk copies.
        copy::fence_tiles();
    }
}

/// found = max, total, and sums of exp2(scale * q . k^T - max) . v, of up to 128 columns, over a share of the positions that each row sees, and a score without value.
///
/// # Safety
/// Every thread of the block makes this same call; the operands are there, nobody else writes them, and nobody else touches `found`,
/// whose rows are as many as those of what is read with it. The memory of tiles is the task's.
#[allow(clippy::too_many_arguments, reason = "operands, and what else it asks for")]
pub(super) unsafe fn attend_share_128(
    block: &Block,
    q: &Rows<impl Fn(u32) -> Row>,
    k: &Rows<impl Fn(u32) -> Row>,
    v: &Rows<impl Fn(u32) -> Row>,
    found: &Rows<impl Fn(u32) -> Row>,
    seen: impl Fn(u32) -> u32,
    share: [u32; 2],
    sinks: impl Fn(u32) -> f32,
    scale: f32,
) {
    type Keys = Tile<32, 16>;
    type Values = Tile<32, 16>;
    let queries = &Own::<16>::at(0);
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
                Keys::at(57344, 2, 0).load(block, k, share[0], 0);
                Values::at(73728, 2, 0).load(block, v, share[0], 0);
            }
            copy::commit();
            let (mut t, mut t_round) = (share[0], 0);
            while t < share[1] {
                let mut scores = Eights::<1>::of(0.0);
                copy::wait::<0>();
                block.sync();
                if t + 32 < share[1] {
                    Keys::at(57344, 2, t_round + 1).load(block, k, t + 32, 0);
                    Values::at(73728, 2, t_round + 1).load(block, v, t + 32, 0);
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
            let sink = PerRow(lane.each_row(found.count, &sinks));
            let all = PerRow::each(|row| larger(max.0[row], sink.0[row]));
            let shrink = PerRow::each(|row| exp2(max.0[row] - all.0[row]));
            let total = PerRow::each(|row| total.0[row] * shrink.0[row] + exp2(sink.0[row] - all.0[row]));
            let sums = sums.map(lane, |x, row, _| x * shrink.0[row]);
            let max = PerRow::each(|row| all.0[row] * core::f32::consts::LN_2);
            warp::sync();
            queries.keep(lane, &sums);
            warp::sync();
            queries.write(lane, found, 4);
            max.write(lane, found, 0);
            total.write(lane, found, 1);
            first += WARP_ROWS * block.warps();
        }
        // Whoever comes next may bring tiles there by bulk copies.
        copy::fence_tiles();
    }
}
