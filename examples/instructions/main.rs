//! Where a decoding step's instructions go: a model's PTX, run instruction by instruction on as many SMs as a GPU has,
//! counted by the operator whose task a worker was at.
//!
//! `cargo run --release --example instructions -- MODEL_DIR [SMS [CONTEXT [OPERATOR]]] [prompt] [guesses=N] [behind=N]
//! [code=KIB,CYCLES] [ptxas=PATH] [q8|q4]`; 132 SMs and a context of 1 unless told otherwise; with `q8` or `q4` of
//! weights in 8 bits or 4; with `prompt` not the step's cycles, but those of the last pass that the first of the
//! prompt's programs makes; with `guesses` those of a pass that verifies so many of the context's last tokens; with
//! `behind` that context stands behind so many positions, which nobody has read: zeros. `perpetua synth` makes a folder
//! of the sizes you want; a layer or two say what there is to see.
//!
//! What is counted is the last step, whose code has been fetched by those before it.
//!
//! The figure to read is *cycles*: from one of the block's barriers to the next, how long the slowest warp takes by the
//! pipelines' latencies (`ptx/src/pipeline.rs`). *Ahead* is what the fastest does before the barriers that end waits,
//! and what a warp does before it looks for a row, so while others are waited for. Issue slots, beside them, are what a
//! scheduler would spend on warp 1, and on all of them. Below, what the cycles go by: what the slowest warp waits for;
//! `code` is lines of code that the SM does not hold, of which it holds so many KiB and waits for each so many cycles
//! (64 and 50 unless told otherwise; `code=0,0`: none is waited for). *Code* is how much of the entry an operator's
//! tasks run, *so far* with those before it: what instruction caches should hold. With an operator's name, or its end,
//! the lines of PTX at which it waits longest, and those that it runs.
//!
//! With `ptxas=PATH` the machine code that this ptxas makes is what counts: its instructions' order, the waits that
//! stand in it, and its lines of code, which is nearer to what a chip does (`docs/cycles.md`); issue slots are the
//! PTX's still. Without, an instruction of the PTX is one of machine code, and waits for what it reads alone.

mod cubin;

use perpetua::cuda::Gpu;
use perpetua::cuda::fake::{Fake, Options, Runs};
use perpetua::device_image::device_image;
use perpetua::exec::Executor;
use perpetua::model::Quantize;
use perpetua::ptx::InstructionCache;
use perpetua::{Device, Engine, EngineConfig, Model};
use perpetua_device::advance::step_from;
use perpetua_shared::WorkerId;
use perpetua_shared::control::{Control, Request, Step};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What cycles go by.
const CAUSES: [&str; 10] =
    ["L2", "shared", "shuffles", "products", "tiles", "arithmetic", "branches", "its turn", "barriers", "code"];

/// The last of them: the instruction itself.
const CODE: usize = CAUSES.len() - 1;

/// Which of [`CAUSES`] it is when `at` waits for what `by` makes, instructions both; empty where there is none.
fn cause(at: &str, by: &str) -> usize {
    let at = at.strip_prefix('@').and_then(|guarded| guarded.split_once(' ')).map_or(at, |(_, at)| at);
    match by.split('.').next().unwrap_or_default() {
        _ if at.is_empty() => 8,
        "ld" if by.contains(".shared") => 1,
        "ldmatrix" => 1,
        "ld" | "atom" => 0,
        "shfl" | "redux" | "vote" => 2,
        "mma" => 3,
        "mbarrier" => 4,
        _ if at.starts_with("bra") => 6,
        "" => 7,
        _ => 5,
    }
}

/// What all tasks of an operator took.
#[derive(Default)]
struct Op {
    tasks: u64,
    /// Issue slots of each warp.
    warps: Vec<u64>,
    /// After the last event and before it.
    cycles: [u64; 2],
    /// Of those after it, by two lines of the PTX, and of those before it.
    spent: [BTreeMap<(u32, u32), u64>; 2],
    /// Which lines of code ran, a bit each.
    code: Vec<u64>,
}

impl Op {
    /// Adds the lines of `code`.
    fn run(&mut self, code: &[u64]) {
        self.code.resize(self.code.len().max(code.len()), 0);
        self.code.iter_mut().zip(code).for_each(|(all, more)| *all |= more);
    }

    /// From which line to before which one all of them ran.
    fn stretches(&self) -> Vec<(usize, usize)> {
        let ran = |line: &usize| self.code[line / 64] >> (line % 64) & 1 == 1;
        let mut stretches: Vec<(usize, usize)> = Vec::new();
        for line in (0..64 * self.code.len()).filter(ran) {
            match stretches.last_mut() {
                Some((_, end)) if *end == line => *end += 1,
                _ => stretches.push((line, line + 1)),
            }
        }
        stretches
    }

    /// KiB of instruction cache that they take.
    fn code_kib(&self) -> usize {
        self.code.iter().map(|word| word.count_ones() as usize).sum::<usize>() * 128 / 1024
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (words, rest): (Vec<_>, Vec<_>) = std::env::args().skip(1).partition(|arg| {
        ["behind=", "guesses=", "code=", "ptxas="].iter().any(|word| arg.starts_with(word))
            || ["prompt", "q8", "q4"].contains(&&arg[..])
    });
    let is_given = |word: &str| words.iter().any(|given| given == word);
    let is_prompt = is_given("prompt");
    let behind = words.iter().find_map(|word| word.strip_prefix("behind=")).map_or(Ok(0), str::parse::<usize>)?;
    let guesses = words.iter().find_map(|word| word.strip_prefix("guesses=")).map(str::parse::<usize>).transpose()?;
    let cache = match words.iter().find_map(|word| word.strip_prefix("code=")) {
        None => InstructionCache::H200,
        Some(given) => {
            let (kib, line_cycles) = given.split_once(',').ok_or("expected code=KIB,CYCLES")?;
            InstructionCache { kib: kib.parse()?, line_cycles: line_cycles.parse()? }
        }
    };
    let worker = &device_image().ok_or("this build has no GPU code")?.worker;
    let ptx = worker.ptx();
    let assembled = words.iter().find_map(|word| word.strip_prefix("ptxas=")).map(|ptxas| {
        let arch = ptx.lines().find_map(|line| line.strip_prefix(".target ")).ok_or("PTX for nothing")?;
        cubin::assembled(ptxas.as_ref(), arch.trim(), ptx, worker.entry).map(Arc::new)
    });
    let assembled = assembled.transpose()?;
    let mut args = rest.into_iter();
    let folder = args.next().ok_or("expected a model folder")?;
    let sms: u32 = args.next().map_or(Ok(132), |arg| arg.parse())?;
    let context: usize = args.next().map_or(Ok(1), |arg| arg.parse())?;
    let wanted = args.next();
    // The first of the steps behind a prompt fetches code that the others find. The last counts.
    let steps = if is_prompt || guesses.is_some() { 1 } else { 3 };
    let mut model = Model::load(&folder)?;
    let how = [Quantize::Q8, Quantize::Q4].into_iter().find(|how| is_given(&how.to_string()));
    if let Some(how) = how {
        model = model.quantize(how, |_| {})?;
    }
    let driver = Arc::new(Fake::new(Options {
        runs: Runs::Ptx,
        stray: 1 << 12,
        counts: Some(cache),
        assembled,
        ..Options::new(sms, 1 << 40)
    }));
    let config = EngineConfig {
        device: Device::Cuda,
        gpu: Some(Gpu::with_driver(driver.clone())?),
        max_context: Some(behind + context + steps),
        prompt_lookup: guesses,
        ..EngineConfig::default()
    };
    let mut engine = Engine::new(&model, &config)?;
    let ids: Vec<u32> = (0..(behind + context) as u32).map(|at| at % model.config().vocab_size() as u32).collect();
    let mut control = Control {
        n_tokens: ids.len() as u32,
        max_context: (ids.len() + steps) as u32,
        requests: [Request::greedy(steps as u32); _],
        ..bytemuck::Zeroable::zeroed()
    };
    let programs = engine.resident().compiled().image.view().programs;
    control.step = step_from(&control, programs, behind as u32, 0);
    if let Some(guesses) = guesses {
        let rows = guesses as u32 + 1;
        let program = programs.iter().position(|program| program.max_rows == rows).ok_or("no such pass")? as u32;
        control.n_tokens = (ids.len() - guesses) as u32;
        (control.max_drafts, control.n_drafts) = (guesses as u32, guesses as u32);
        control.step = Step { program, first_pos: control.n_tokens - 1, rows, sampling: 1, ..Step::default() };
    }
    engine.resident_mut().cuda().ok_or("not on a GPU")?.set_tokens(0, &ids);
    engine.resident_mut().start(control);
    engine.resident_mut().finish()?;

    let report = driver.report();
    let image = engine.resident().compiled().image.clone();
    let view = image.view();
    // The program of the passes that follow the prompt is the first.
    let number = if is_prompt || guesses.is_some() { control.step.program as usize } else { 0 };
    let program = view.programs[number];
    let mut ops: BTreeMap<u32, Op> = BTreeMap::new();
    for id in program.task_first..program.task_first + program.task_count {
        let op = ops.entry(view.tasks[id as usize].op).or_default();
        op.tasks += 1;
        let phase = report.phases.get(&(id + 1));
        op.warps.resize(8, 0);
        phase.into_iter().flatten().zip(&mut op.warps).for_each(|(count, sum)| *sum += count);
        let cycles = report.cycles.get(&(id + 1)).copied().unwrap_or_default();
        op.cycles = [op.cycles[0] + cycles[0], op.cycles[1] + cycles[1]];
        report.code.get(&(id + 1)).into_iter().for_each(|code| op.run(code));
        for (all, spent) in op.spent.iter_mut().zip([&report.spent, &report.spent_ahead]) {
            for (lines, cycles) in spent.get(&(id + 1)).into_iter().flatten() {
                *all.entry(*lines).or_default() += cycles;
            }
        }
    }
    println!(
        "{:32} {:>6} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "operator", "tasks", "cycles", "ahead", "warp 1", "all warps", "code, KiB", "so far"
    );
    let (mut path, mut total, mut all_code) = (0, 0, Op::default());
    for (number, op) in &ops {
        let each = |count: u64| count / op.tasks;
        let (name, [cycles, ahead]) = (image.op_name(*number), op.cycles.map(each));
        let (warp, all) = (each(op.warps[1]), each(op.warps.iter().sum()));
        all_code.run(&op.code);
        let code = [op.code_kib(), all_code.code_kib()];
        println!("{name:32} {:6} {cycles:9} {ahead:9} {warp:9} {all:9} {:9} {:9}", op.tasks, code[0], code[1]);
        path += cycles;
        total += op.warps.iter().sum::<u64>();
    }
    println!("one after another: {path} cycles; in all {total} issue slots of all warps a step");
    let ran_by = |worker: u32| {
        let mut code = Op::default();
        let list = view.list(number, WorkerId(worker));
        list.iter().filter_map(|id| report.code.get(&(id + 1))).for_each(|ran| code.run(ran));
        code.code_kib()
    };
    let most = (0..view.n_workers).map(ran_by).max().unwrap_or(0);
    let (ran, all) = (all_code.code_kib(), report.code_lines.len() / 8);
    println!("of the entry's code, {all} KiB, {ran} KiB ran, on no worker more than {most} KiB");

    let lines: Vec<&str> = ptx.lines().map(str::trim).collect();
    let line = |number: u32| (number as usize).checked_sub(1).and_then(|at| lines.get(at)).map_or("", |line| *line);
    println!("\n{:40}{}", "cycles by what they wait for", CAUSES.map(|cause| format!(" {cause:>10}")).concat());
    for (number, op) in ops {
        let each = |count: u64| count / op.tasks;
        let name = image.op_name(number);
        let is_wanted = wanted.as_ref().is_some_and(|wanted| name.ends_with(wanted));
        let code = if is_wanted { op.stretches() } else { Vec::new() };
        for (spent, when) in op.spent.into_iter().zip(["", ", ahead"]) {
            let mut causes = [0; CAUSES.len()];
            for ((at, by), cycles) in &spent {
                causes[if *by == u32::MAX { CODE } else { cause(line(*at), line(*by)) }] += cycles;
            }
            println!("{:40}{}", name.to_owned() + when, causes.map(|cycles| format!(" {:10}", each(cycles))).concat());
            if is_wanted {
                let mut longest: Vec<_> = spent.into_iter().collect();
                longest.sort_by_key(|(_, cycles)| std::cmp::Reverse(*cycles));
                for ((at, by), cycles) in longest.into_iter().filter(|(_, cycles)| each(*cycles) > 9) {
                    println!("  {:6} {at:7}: {:60} <- {by:6}: {}", each(cycles), line(at), line(by));
                }
            }
        }
        for (first, end) in code {
            let at = |line: usize| report.code_lines.get(line).copied().unwrap_or(u32::MAX);
            println!("  {:6} bytes of code: lines {} to {}", (end - first) * 128, at(first), at(end));
        }
    }
    Ok(())
}
