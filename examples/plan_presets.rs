//! What one decode step of every preset would take on an H200, with and without prefetch across operators, and why: the
//! table of `docs/memory.md`.
//!
//! `cargo run --release --example plan_presets [-- CONTEXT]` (512 positions by default).

use perpetua::compile::{Config, Source, compile};
use perpetua::graph::lower::Target;
use perpetua::model::ModelConfig;
use perpetua::model::decoder::{Cache, Declared, Head, build};
use perpetua::model::synth::preset_config;
use perpetua::schedule::predict::{Prefetch, predict};
use perpetua::schedule::prefetch;
use perpetua_shared::DType;
use std::path::Path;

const PRESETS: [&str; 10] = [
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-8b",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "llama-3.1-8b",
    "mistral-7b",
    "qwen3-30b-a3b",
    "mixtral-8x7b",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let context = std::env::args().nth(1).map_or(Ok(512), |text| text.parse())?;
    println!(
        "| preset | step, us | floor, us | bus busy | lost to events | to full memory | at the end | busy without prefetch across operators | arena, bytes | its lower bound | without reuse | flagged | copies |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    for name in PRESETS {
        let ModelConfig::Decoder(config) = ModelConfig::from_value(Path::new(name), &preset_config(name)?)? else {
            unreachable!("these presets are decoders")
        };
        let graph = build(&config, Declared::Assumed(DType::Bf16), 1, Cache::bf16(context), Head::Sample)?;
        let target = Target::h200();
        let machine = target.machine;
        let source = Source { name: "decode".to_owned(), graph, in_token_loop: true };
        let compiled = compile(vec![source], &Config { check: false, ..Config::new(target) })?;
        let program = &compiled.programs[0];
        let plan = &program.plan;
        prefetch::check(plan, &program.lists, &program.reads).map_err(|broken| broken[0].clone())?;
        let run = |prefetch| {
            predict(&program.tasks, &program.told, plan, &program.reads, &program.costs, &machine, prefetch)
                .ok_or("the worker lists do not run to their end")
        };
        let (across, within) = (run(Prefetch::AcrossTasks)?, run(Prefetch::WithinTask)?);
        let share = |part_s: f64| 100.0 * part_s / across.step_s;
        println!(
            "| {name} | {:.0} | {:.0} | {:.1} % | {:.1} % | {:.1} % | {:.1} % | {:.1} % | {} | {} | {} | {} | {} |",
            across.step_s * 1e6,
            across.floor_s * 1e6,
            100.0 * across.busy_share(),
            share(across.loader.event_s),
            share(across.loader.full_s),
            share(across.loader.tail_s),
            100.0 * within.busy_share(),
            program.arena.peak_bytes,
            program.arena.lower_bound_bytes,
            program.arena.without_reuse_bytes,
            program.arena.flagged_bytes,
            plan.n_data(),
        );
    }
    Ok(())
}
