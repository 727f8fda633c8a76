//! Passes of graphs that do not decode: encoders.
//!
//! On a target that says so, rows are cut rather than columns, as long as every worker's fill vectors: a worker goes on
//! with what it has made itself, packs only its rows, and meets the others once a layer, when attention needs all keys
//! and values. With a matrix unit it is the weights that have to be made ready, in terms, and they outweigh the rest:
//! columns are cut.
//!
//! PERF: MiniLM, 128 tokens, 2 cores: 0.83 to 0.90 of the time with columns cut, four pairs of runs in turn (Sapphire
//! Rapids, 2026-11-21); with matrix units columns took 0.83 of the time with rows cut (median of six pairs in turn; on
//! a machine that others use too, meeting more often costs more than it saves).

use super::*;

/// f32 of the longest vector, whose lanes are rows.
const LANES: u32 = 16;

/// Rows of a block at least: with fewer, weights come from the caches too often for what is done with them.
const LEAST_ROWS: u32 = 32;

/// Gives `cuts`, the operators of `graph` as they are cut by themselves, what the module head says.
pub(super) fn lower(graph: &KernelGraph, target: &Target, cuts: &mut [BlockOp]) {
    let blocks = match graph.rows {
        Some(rows) if target.cuts_rows => row_blocks(rows, target.n_workers),
        _ => 1,
    };
    for (op, cut) in graph.ops().zip(cuts) {
        let task_type = op.kernel.task_type;
        if op.cut.is_some() || blocks == 1 {
            continue;
        }
        if task_type == Linear::TASK_TYPE && is_matrix(op, &graph.table) {
            cut_in_two(op, &graph.table, cut, [blocks, target.n_workers / blocks]);
        } else if task_type == Attention::TASK_TYPE {
            for (axis, n) in op.axes.iter().zip(&mut cut.grid) {
                match axis.role {
                    AxisRole::Rows => *n = blocks,
                    AxisRole::Heads if blocks == target.n_workers => *n = 1,
                    _ => {}
                }
            }
        }
    }
}

/// Into how many blocks of equal, whole vectors `rows` rows are cut for `workers` workers, a number that divides
/// theirs.
fn row_blocks(rows: u32, workers: u32) -> u32 {
    let fits = |n: &u32| workers.is_multiple_of(*n) && rows.is_multiple_of(n * LANES) && rows / n >= LEAST_ROWS;
    (2..=workers.min(rows / LEAST_ROWS)).rev().find(fits).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::row_blocks;

    #[test]
    fn rows_are_cut_where_blocks_are_whole_vectors() {
        for (rows, workers, blocks) in [
            (128, 2, 2),
            (128, 1, 1),
            (96, 2, 2),
            (80, 2, 1),
            (48, 2, 1),
            (64, 4, 2),
            (128, 16, 4),
            (512, 3, 1),
            (96, 3, 3),
            (512, 24, 8),
            (16, 2, 1),
        ] {
            assert_eq!(row_blocks(rows, workers), blocks, "{rows} rows, {workers} workers");
        }
    }
}
