//! Products with what comes before or after them.
//!
//! Generated from `perpetua::codegen::bodies::{back_to_back, normed_linear, gated_mlp}`
//! by `BLESS=1 cargo test --test cpu codegen::`: what is to change changes there. Barriers and waits follow from who touches
//! which part of a tile.

use crate::arch::scalar::{exp2, reciprocal, rsqrt};
use crate::arch::{copy, warp};
use crate::block::Block;
use crate::gpu::Row;
use crate::gpu::tile::{Eights, Lane, Own, PerRow, Rows, Sixteens, Tile, WARP_ROWS};

/// y = (x . a^T) . b, of up to 128 columns.
///
/// # Safety
/// Every thread of the block makes this same call; the operands are there, nobody else writes them, and nobody else touches `y`,
/// whose rows are as many as those of what is read with it. The memory of tiles is the task's.
pub(super) unsafe fn back_to_back(
    block: &Block,
    x: &Rows<impl Fn(u32) -> Row>,
    a: &Rows<impl Fn(u32) -> Row>,
    b: &Rows<impl Fn(u32) -> Row>,
    y: &Rows<impl Fn(u32) -> Row>,
) {
    type First = Tile<64, 8>;
    type Second = Tile<64, 16>;
    let kept = &Own::<16>::at(57344);
    // SAFETY: the caller's promises; what stands between accesses of a tile has been found, and judged.
    unsafe {
        let mut first = 0;
        while first < y.count {
            let lane = &Lane::of(block, first, y.count);
            let mut sums = Sixteens::<2>::of(0.0);
            block.sync();
            if 0 < a.count {
                Second::at(24576, 2, 0).load(block, b, 0, 0);
            }
            copy::commit();
            let (mut n, mut n_round) = (0, 0);
            while n < a.count {
                let mut between = Eights::<2>::of(0.0);
                block.sync();
                if 0 < x.columns {
                    First::at(0, 3, 0).load(block, a, n, 0);
                }
                copy::commit();
                if 64 < x.columns {
                    First::at(0, 3, 1).load(block, a, n, 64);
                }
                copy::commit();
                copy::wait::<1>();
                block.sync();
                let (mut k, mut k_round) = (0, 0);
                while k < x.columns {
                    let rows = Eights::<2>::read(lane, x, k);
                    copy::wait::<1>();
                    block.sync();
                    if k + 128 < x.columns {
                        First::at(0, 3, k_round + 2).load(block, a, n, k + 128);
                    }
                    copy::commit();
                    between.add_rows_of(lane, &rows, &First::at(0, 3, k_round));
                    k += 64;
                    k_round += 1;
                }
                if n + 64 < a.count {
                    Second::at(24576, 2, n_round + 1).load(block, b, n + 64, 0);
                }
                copy::commit();
                sums.add_columns(lane, &between, &Second::at(24576, 2, n_round));
                n += 64;
                n_round += 1;
            }
            kept.keep(lane, &sums);
            warp::sync();
            kept.write(lane, y, 0);
            first += WARP_ROWS * block.warps();
        }
        // Whoever comes next may bring tiles there by bulk copies.
        copy::fence_tiles();
    }
}

/// y = (x / rms(x) * g) . w^T; `mean` is 1 over the columns.
///
/// # Safety
/// Every thread of the block makes this same call; the operands are there, nobody else writes them, and nobody else touches `y`,
/// whose rows are as many as those of what is read with it. The memory of tiles is the task's.
pub(super) unsafe fn normed_linear(
    block: &Block,
    x: &Rows<impl Fn(u32) -> Row>,
    g: &Rows<impl Fn(u32) -> Row>,
    w: &Rows<impl Fn(u32) -> Row>,
    y: &Rows<impl Fn(u32) -> Row>,
    mean: f32,
    eps: f32,
) {
    type Weights = Tile<64, 8>;
    let kept = &Own::<8>::at(24576);
    // SAFETY: the caller's promises; what stands between accesses of a tile has been found, and judged.
    unsafe {
        let mut first = 0;
        while first < y.count {
            let lane = &Lane::of(block, first, y.count);
            let mut squares = Eights::<2>::of(0.0);
            let mut i = 0;
            while i < x.columns {
                let rows = Eights::<2>::read(lane, x, i);
                squares = squares.map_with(lane, &rows, |x, z, _, _| x + z * z);
                i += 64;
            }
            let factor = squares.sum();
            let factor = PerRow::each(|row| rsqrt(factor.0[row] * mean + eps));
            let mut n = 0;
            while n < w.count {
                let mut sums = Eights::<2>::of(0.0);
                block.sync();
                if 0 < x.columns {
                    Weights::at(0, 3, 0).load(block, w, n, 0);
                }
                copy::commit();
                if 64 < x.columns {
                    Weights::at(0, 3, 1).load(block, w, n, 64);
                }
                copy::commit();
                let (mut k, mut k_round) = (0, 0);
                while k < x.columns {
                    let rows = Eights::<2>::read(lane, x, k);
                    let gains = Eights::<2>::read_first(lane, g, k);
                    let rows = rows.map_with(lane, &gains, |x, z, _, _| x * z);
                    copy::wait::<1>();
                    block.sync();
                    if k + 128 < x.columns {
                        Weights::at(0, 3, k_round + 2).load(block, w, n, k + 128);
                    }
                    copy::commit();
                    sums.add_rows_of(lane, &rows, &Weights::at(0, 3, k_round));
                    k += 64;
                    k_round += 1;
                }
                let sums = sums.map(lane, |x, row, _| x * factor.0[row]);
                kept.keep(lane, &sums);
                warp::sync();
                kept.write(lane, y, n);
                n += 64;
            }
            first += WARP_ROWS * block.warps();
        }
        // Whoever comes next may bring tiles there by bulk copies.
        copy::fence_tiles();
    }
}

/// y += (silu(x . gate^T) * (x . up^T)) . down^T.
///
/// # Safety
/// Every thread of the block makes this same call; the operands are there, nobody else writes them, and nobody else touches `y`,
/// whose rows are as many as those of what is read with it. The memory of tiles is the task's.
/// `y` is f32.
pub(super) unsafe fn gated_mlp(
    block: &Block,
    x: &Rows<impl Fn(u32) -> Row>,
    gate: &Rows<impl Fn(u32) -> Row>,
    up: &Rows<impl Fn(u32) -> Row>,
    down: &Rows<impl Fn(u32) -> Row>,
    y: &Rows<impl Fn(u32) -> Row>,
) {
    type Gates = Tile<64, 8>;
    type Ups = Tile<64, 8>;
    type Downs = Tile<64, 8>;
    let kept = &Own::<8>::at(73728);
    // SAFETY: the caller's promises; what stands between accesses of a tile has been found, and judged.
    unsafe {
        let mut first = 0;
        while first < y.count {
            let lane = &Lane::of(block, first, y.count);
            let mut i = 0;
            while i < gate.count {
                let mut opens = Eights::<2>::of(0.0);
                let mut values = Eights::<2>::of(0.0);
                if 0 < x.columns {
                    Gates::at(0, 3, 0).load(block, gate, i, 0);
                    Ups::at(24576, 3, 0).load(block, up, i, 0);
                }
                copy::commit();
                if 64 < x.columns {
                    Gates::at(0, 3, 1).load(block, gate, i, 64);
                    Ups::at(24576, 3, 1).load(block, up, i, 64);
                }
                copy::commit();
                block.sync();
                let (mut k, mut k_round) = (0, 0);
                while k < x.columns {
                    let rows = Eights::<2>::read(lane, x, k);
                    copy::wait::<1>();
                    block.sync();
                    if k + 128 < x.columns {
                        Gates::at(0, 3, k_round + 2).load(block, gate, i, k + 128);
                        Ups::at(24576, 3, k_round + 2).load(block, up, i, k + 128);
                    }
                    copy::commit();
                    opens.add_rows_of(lane, &rows, &Gates::at(0, 3, k_round));
                    values.add_rows_of(lane, &rows, &Ups::at(24576, 3, k_round));
                    k += 64;
                    k_round += 1;
                }
                let opens = opens.map(lane, |x, _, _| x * reciprocal(1.0 + exp2(x * -core::f32::consts::LOG2_E)));
                let values = opens.map_with(lane, &values, |x, z, _, _| x * z);
                if 0 < down.count {
                    Downs::at(49152, 3, 0).load(block, down, 0, i);
                }
                copy::commit();
                if 64 < down.count {
                    Downs::at(49152, 3, 1).load(block, down, 64, i);
                }
                copy::commit();
                block.sync();
                let (mut n, mut n_round) = (0, 0);
                while n < down.count {
                    let mut part = Eights::<2>::of(0.0);
                    copy::wait::<1>();
                    block.sync();
                    if n + 128 < down.count {
                        Downs::at(49152, 3, n_round + 2).load(block, down, n + 128, i);
                    }
                    copy::commit();
                    part.add_rows_of(lane, &values, &Downs::at(49152, 3, n_round));
                    kept.keep(lane, &part);
                    warp::sync();
                    kept.add(lane, y, n);
                    n += 64;
                    n_round += 1;
                }
                i += 64;
            }
            first += WARP_ROWS * block.warps();
        }
        // Whoever comes next may bring tiles there by bulk copies.
        copy::fence_tiles();
    }
}
