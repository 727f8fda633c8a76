//! Where a decoding step's instructions go: a model's PTX, run instruction by instruction on as many SMs as a GPU has, counted
//! by the operator whose task a worker was at.
//!
//! `cargo run --release --example instructions -- MODEL_DIR [SMS [CONTEXT]]`; 132 SMs and a context of 1 unless told otherwise.
//! `perpetua synth` makes a folder of the sizes you want; a layer or two say what there is to see.
//!
//! The figure to read is *cycles*: from one of the block's barriers to the next, how long the slowest warp takes by the pipelines'
//! latencies (`host/src/ptx/pipeline.rs`). *Ahead* is what the fastest does before the barriers that end waits, so while others are
//! waited for. Issue slots, beside them, are what a scheduler would spend on warp 1, and on all of them.

use perpetua::cuda::Gpu;
use perpetua::cuda::fake::{Fake, Options, Runs};
use perpetua::{Device, Engine, EngineConfig, GenerateOptions, Model};
use std::collections::BTreeMap;
use std::sync::Arc;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let folder = args.next().ok_or("expected a model folder")?;
    let sms: u32 = args.next().map_or(Ok(132), |arg| arg.parse())?;
    let context: usize = args.next().map_or(Ok(1), |arg| arg.parse())?;
    let steps = 2;
    let model = Model::load(&folder)?;
    let driver =
        Arc::new(Fake::new(Options { runs: Runs::Ptx, stray: 1 << 12, counts: true, ..Options::new(sms, 1 << 40) }));
    let config = EngineConfig {
        device: Device::Cuda,
        gpu: Some(Gpu::with_driver(driver.clone())?),
        max_context: Some(context + steps),
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(&model, &config)?;
    let options =
        GenerateOptions { max_new_tokens: steps, stop_tokens: Some(Vec::new()), ..GenerateOptions::default() };
    let ids: Vec<u32> = (0..context as u32).collect();
    engine.generate(&ids, &options)?.try_for_each(|token| token.map(|_| ()))?;

    let report = driver.report();
    let image = engine.resident().compiled().image.clone();
    let view = image.view();
    // The program of the passes that follow the prompt: the first.
    let program = view.programs[0];
    let mut ops: BTreeMap<u32, (String, u32, Vec<u64>, [u64; 2])> = BTreeMap::new();
    for id in program.task_first..program.task_first + program.task_count {
        let task = &view.tasks[id as usize];
        let op = ops.entry(task.op).or_insert_with(|| (image.op_name(task.op).to_owned(), 0, vec![0; 8], [0; 2]));
        op.1 += 1;
        let cycles = report.cycles.get(&(id + 1)).copied().unwrap_or_default();
        op.3 = [op.3[0] + cycles[0], op.3[1] + cycles[1]];
        let phase = report.phases.get(&(id + 1));
        phase.into_iter().flatten().zip(&mut op.2).for_each(|(count, sum)| *sum += count);
    }
    println!("{:32} {:>6} {:>9} {:>9} {:>9} {:>9}", "operator", "tasks", "cycles", "ahead", "warp 1", "all warps");
    let passes = if context == 1 { steps } else { steps - 1 } as u64;
    let (mut path, mut total) = (0, 0);
    for (name, tasks, warps, [cycles, ahead]) in ops.values() {
        let each = |count: u64| count / (u64::from(*tasks) * passes);
        let (warp, all) = (each(warps[1]), each(warps.iter().sum()));
        println!("{name:32} {tasks:6} {:9} {:9} {warp:9} {all:9}", each(*cycles), each(*ahead));
        path += each(*cycles);
        total += warps.iter().sum::<u64>() / passes;
    }
    println!("one after another: {path} cycles; in all {total} issue slots of all warps a step");
    Ok(())
}
