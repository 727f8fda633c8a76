//! Which weights each worker's loader brings into shared memory, for executors that run the GPU's code.
//!
//! Tasks whose kernel takes tiles ([`Spec::tiled`]), in programs of few rows, stream their weights, if bulk copies can carry
//! them: rows one after the other, on multiples of sixteen bytes. The ring is planned as all are
//! ([`prefetch`](crate::schedule::prefetch)).

use crate::image::Image;
use crate::schedule::machine::Machine;
use crate::schedule::prefetch::{self, PlanError, Stream};
use perpetua_device::kernels::{Spec, TILED_ROWS};
use perpetua_shared::image::BindingKind;
use perpetua_shared::launch::{TILE_BARRIERS, TILE_BYTES};
use perpetua_shared::{DataOp, Operand, WorkerId};

/// The sections of a launch that loaders read: see [`LaunchParams`](perpetua_shared::launch::LaunchParams).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tiles {
    /// Per program and worker, and one more, where its data ops start.
    pub heads: Vec<u32>,
    /// Data ops; their sources are bindings.
    pub data: Vec<DataOp>,
    /// Per task, how many data ops it takes.
    pub of_task: Vec<u32>,
}

impl Tiles {
    /// No tiles at all: bodies read weights from global memory.
    pub fn none(image: &Image) -> Tiles {
        let view = image.view();
        let heads = vec![0; view.programs.len() * (view.n_workers as usize + 1)];
        Tiles { heads, data: Vec::new(), of_task: vec![0; view.tasks.len()] }
    }

    /// The tiles of `image`, for workers with [`TILE_BYTES`] of shared memory.
    ///
    /// # Errors
    /// A task that needs more at once than a worker has.
    pub fn plan(image: &Image) -> Result<Tiles, PlanError> {
        let machine = Machine::H200;
        assert!(machine.capacity_bytes() <= u64::from(TILE_BYTES) && machine.n_barriers == TILE_BARRIERS);
        let view = image.view();
        let mut tiles = Tiles { of_task: vec![0; view.tasks.len()], ..Tiles::default() };
        let mut streams: Vec<Vec<Stream>> = vec![Vec::new(); view.tasks.len()];
        for (number, program) in view.programs.iter().enumerate() {
            if program.max_rows <= TILED_ROWS {
                for task in program.task_first..program.task_first + program.task_count {
                    streams[task as usize] = streams_of(image, task);
                }
            }
            for worker in 0..view.n_workers {
                tiles.heads.push(tiles.data.len() as u32);
                let list = view.list(number, WorkerId(worker));
                let plan = prefetch::plan_list(list, &streams, &machine, &|task| image.task_name(task))?;
                for compute in &plan.computes {
                    tiles.of_task[compute.task as usize] += compute.data_end - compute.data_first;
                }
                tiles.data.extend(plan.data);
            }
            tiles.heads.push(tiles.data.len() as u32);
        }
        Ok(tiles)
    }
}

fn streams_of(image: &Image, task: u32) -> Vec<Stream> {
    let view = image.view();
    let task = &view.tasks[task as usize];
    let (Some(spec), operands) = (Spec::of(task.task_type), view.operands(task)) else { return Vec::new() };
    let matrices = spec.tiled.iter().map(|slot| &operands[*slot]);
    let is_carried = |operand: &&Operand| {
        let row_bytes = u64::from(operand.extent[1]) * operand.dtype().map_or(0, |dtype| dtype.size_bytes() as u64);
        let kind = BindingKind::from_u32(image.bindings()[operand.binding.idx()].kind);
        kind == Some(BindingKind::Weight)
            && operand.rank == 2
            && operand.stride_elems[1] == 1
            && (operand.stride_elems[0] == operand.extent[1] || operand.extent[0] == 1)
            && row_bytes > 0
            && row_bytes.is_multiple_of(16)
            && operand.offset_bytes.is_multiple_of(16)
    };
    if !matrices.clone().all(|operand| is_carried(&operand)) {
        return Vec::new();
    }
    matrices.map(|operand| Stream { source: operand.binding.0, flags: 0, operand: *operand }).collect()
}
