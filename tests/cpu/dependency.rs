//! Dependency analysis: laws 1 to 3 of the task graph.

use perpetua::graph::task::{Config, lower};
use perpetua::graph::tensor::{BufferKind, TensorTable};
use perpetua::graph::threadblock::{Access, AccessKind, BlockOp, ThreadBlockGraph};
use perpetua_shared::DType;

fn op(name: &str, grid: [u32; 3], accesses: Vec<Access>) -> BlockOp {
    BlockOp {
        name: name.to_owned(),
        grid,
        accesses: accesses.into_iter().map(Some).collect(),
        row_axis: None,
        rows: 1,
        kernel: None,
    }
}

fn cut(tensor: perpetua::graph::tensor::TensorId, kind: AccessKind, map: [i8; 3]) -> Access {
    Access {
        tensor,
        kind,
        map: map.map(|d| u8::try_from(d).ok()),
    }
}

/// One tensor of `len` elements, written by `producers` blocks and read by `consumers` blocks.
fn pair(len: usize, producers: u32, consumers: u32) -> ThreadBlockGraph {
    let mut table = TensorTable::default();
    let x = table
        .add("x", &[1, len], DType::Bf16, BufferKind::Intermediate)
        .unwrap();
    let ops = vec![
        op("write", [producers, 1, 1], vec![cut(x, AccessKind::Write, [1, -1, -1])]),
        op("read", [1, consumers, 1], vec![cut(x, AccessKind::Read, [-1, 1, -1])]),
    ];
    ThreadBlockGraph { table, ops }
}

#[test]
fn the_worked_example_gives_eight_events_of_four() {
    let tasks = lower(&pair(6144, 32, 8), &Config::default()).unwrap();
    assert_eq!(tasks.events, vec![4; 8]);
    for k in 0..8 {
        assert_eq!(tasks.waits.of(32 + k), [k as u32]);
        for p in 4 * k..4 * k + 4 {
            assert_eq!(tasks.triggers.of(p), [k as u32]);
        }
    }
}

#[test]
fn partitions_that_do_not_divide_are_exact_with_one_wait_each() {
    for (p, c) in [(600, 128), (600, 96), (132, 8), (96, 128), (96, 35), (7, 5), (8, 132)] {
        let tasks = lower(&pair(153_600, p, c), &Config::default()).unwrap();
        assert_eq!(tasks.stats.oversync, 1.0);
        assert_eq!(
            (tasks.stats.max_waits, tasks.stats.median_waits),
            (1, if c > p { 1 } else { 0 })
        );
        println!("{p} -> {c}: {:?}", tasks.stats);
    }
}
