//! What each section does.

use super::kernel_cases::{Case, KERNEL_TOLERANCE, Named, PRESETS, ROUNDED_TOLERANCE, cases, uncovered};
use super::{Args, Section, print_figures};
use crate::cli::bench::Measured;
use crate::cli::perplexity::Prediction;
use crate::cli::{
    ModelArgs, Outcome, bench, bytes, files, greedy_options, logits, median_and_spread, plain, write_whole,
};
use perpetua::compile::Source;
use perpetua::cuda::driver::{CudaError, DevicePtr, code};
use perpetua::cuda::probe::{Prober, TilesFrom};
use perpetua::cuda::{self, Gpu, GpuError};
use perpetua::device_image::device_image;
use perpetua::engine::Resident;
use perpetua::exec::memory::available_bytes;
use perpetua::exec::threads::usable_cores;
use perpetua::exec::{self, RunError};
use perpetua::model::{ModelConfig, Quantize, SynthOptions, SynthSource, Weights, synth};
use perpetua::{Device, Embedder, Engine, EngineConfig, EngineError, GenerateOptions, Model};
use perpetua_device::kernels::{Advance, ArgmaxPartial, MacroKernel, Sample};
use perpetua_shared::control::End;
use perpetua_shared::launch::{TILE_BARRIERS, TILE_BYTES};
use perpetua_shared::{EventId, Operand, ProgramId, TaskId, Technique};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Seek};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant, SystemTime};

type Figures = Result<Value, Box<dyn std::error::Error>>;

/// One section under way.
pub(super) struct Check<'a> {
    args: &'a Args,
    gpu: Gpu,
    section: Section,
    began: Instant,
}

/// Waits for `child`, which is killed if it takes longer than `limit`; how it ended.
fn within(limit: Duration, child: &mut Child) -> Result<ExitStatus, String> {
    let began = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status),
            Ok(None) if began.elapsed() < limit => std::thread::sleep(Duration::from_millis(20)),
            outcome => {
                // It may have ended by itself meanwhile.
                let _ = child.kill();
                let _ = child.wait();
                let limit = limit.as_secs();
                return Err(outcome.err().map_or(format!("not done after {limit} s"), |error| error.to_string()));
            }
        }
    }
}

/// As [`within`], of a command's output, that is not shown.
fn output_within(limit: Duration, command: &mut Command) -> Result<(ExitStatus, String, String), String> {
    let file = || tempfile::tempfile().map_err(|error| error.to_string());
    let (mut out, mut err) = (file()?, file()?);
    let to = |file: &File| file.try_clone().map_err(|error| error.to_string());
    command.stdin(Stdio::null()).stdout(to(&out)?).stderr(to(&err)?);
    let status = within(limit, &mut command.spawn().map_err(|error| error.to_string())?)?;
    let text = |file: &mut File| {
        let mut bytes = Vec::new();
        file.rewind().and_then(|()| file.read_to_end(&mut bytes)).map_err(|error| error.to_string())?;
        Ok::<_, String>(String::from_utf8_lossy(&bytes).into_owned())
    };
    Ok((status, text(&mut out)?, text(&mut err)?))
}

impl Check<'_> {
    pub(super) fn new(args: &Args, gpu: Gpu, section: Section) -> Check<'_> {
        Check { args, gpu, section, began: Instant::now() }
    }

    pub(super) fn run(&self) -> Outcome {
        let outcome = self.figures();
        let (name, seconds) = (self.args.title(self.section), self.began.elapsed().as_secs_f64());
        let (key, value) = match outcome {
            Ok(figures) => ("figures", figures),
            Err(error) => ("error", Value::from(error.to_string())),
        };
        // What was kept before something failed stays.
        let kept = std::fs::read(self.args.record(self.section)).ok();
        let kept: Option<Value> = kept.and_then(|text| serde_json::from_slice(&text).ok());
        let mut record = self.record();
        if let Some(mut kept) = kept {
            record["figures"] = kept["figures"].take();
        }
        record[key] = value;
        // The record tells how it went.
        self.write(&record)?;
        print_figures(&name, seconds, key, &record[key])
    }

    fn record(&self) -> Value {
        let date = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        json!({
            "section": self.section.name(),
            "unix_time": date,
            "device": self.gpu.info().name,
            "driver_cuda_version": self.gpu.driver().version().unwrap_or(0),
            "device_image": perpetua::device_image::device_image().map(|image| image.built_with),
            "simulated": self.args.simulated,
            "without": self.args.without.set().iter().map(Technique::name).collect::<Vec<_>>(),
            "seconds": self.began.elapsed().as_secs_f64(),
        })
    }

    fn write(&self, record: &Value) -> Outcome {
        write_whole(&self.args.record(self.section), |file| writeln!(file, "{record:#}"))
    }

    /// Writes what there is, so that it is there whatever happens next.
    fn keep(&self, figures: impl Into<Value>) -> Outcome {
        let mut record = self.record();
        record["figures"] = figures.into();
        record["unfinished"] = true.into();
        self.write(&record)
    }

    fn figures(&self) -> Figures {
        match self.section {
            Section::Facts => self.facts(),
            Section::Ceiling => self.ceiling(),
            Section::Latency => self.latency(),
            Section::Load => self.load(),
            Section::Kernels => self.kernels(),
            Section::Fixtures => self.fixtures(),
            Section::Sentences => self.sentences(),
            Section::Drills => self.drills(),
            Section::Long => self.long(),
            Section::BenchSmall => self.bench("qwen3-0.6b"),
            Section::BenchLlama => self.bench("llama-3.2-1b"),
            Section::BenchMiddle => self.bench("qwen3-1.7b"),
            Section::BenchLarge => self.bench("qwen3-8b"),
            Section::BenchLargest => self.bench("qwen3-14b"),
            Section::Accuracy => self.accuracy(),
            Section::Sanitizer => self.sanitizer(),
        }
    }

    fn config(&self) -> EngineConfig {
        EngineConfig {
            device: Device::Cuda,
            gpu: Some(self.gpu.clone()),
            cuda: self.options(),
            ..EngineConfig::default()
        }
    }

    /// How the kernel behaves where it is not measured: should it not get on with the GPU, workers' tasks are known.
    fn options(&self) -> exec::cuda::Options {
        exec::cuda::Options { without: self.args.without.set(), recorder: true, ..Default::default() }
    }

    /// A model of the shapes of `preset`; of smaller ones than any on a simulated GPU.
    fn synth(&self, preset: &str) -> Result<(tempfile::TempDir, Model), Box<dyn std::error::Error>> {
        self.synth_as_is(if self.args.simulated { "tiny-simt" } else { preset })
    }

    fn synth_as_is(&self, preset: &str) -> Result<(tempfile::TempDir, Model), Box<dyn std::error::Error>> {
        let scratch = self.args.scratch.clone().unwrap_or_else(std::env::temp_dir);
        let dir = tempfile::tempdir_in(&scratch)
            .map_err(|error| format!("{}: cannot make a folder there: {}", scratch.display(), plain(&error)))?;
        let out = dir.path().join(preset);
        synth(SynthSource::Preset(preset), &out, &SynthOptions::default(), &mut |_, _| ControlFlow::Continue(()))?;
        Ok((dir, Model::load(&out)?))
    }

    fn facts(&self) -> Figures {
        let _entered = self.gpu.enter()?;
        let info = self.gpu.info();
        let (free, total) = self.gpu.driver().memory()?;
        cuda::check_device(info)?;
        let smi = Command::new("nvidia-smi")
            .args(["--query-gpu=driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,ecc.mode.current"])
            .arg("--format=csv,noheader")
            .output();
        let smi = smi.ok().filter(|output| output.status.success());
        let mut facts = json!({
            "name": info.name,
            "compute_capability": format!("{}.{}", info.compute_capability.0, info.compute_capability.1),
            "sms": info.n_sms,
            "shared_bytes_per_block": info.shared_bytes,
            "l2": bytes(u64::from(info.l2_bytes)),
            "memory_free": bytes(free),
            "memory_total": bytes(total),
            "nvidia_smi": smi.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()),
            "host_memory_available": available_bytes().map(bytes),
        });
        self.keep(facts.clone())?;
        // The first load: the driver's compiler, if it comes to that, has it in its cache for the other sections.
        for module in device_image().ok_or(GpuError::NoImage)?.modules() {
            let began = Instant::now();
            let loaded = self.gpu.try_load(module)?;
            let seconds = began.elapsed().as_secs_f64();
            facts["gpu_code"][module.entry] = json!({"loaded": loaded.to_string(), "seconds": seconds});
            self.keep(facts.clone())?;
        }
        Ok(facts)
    }

    fn prober(&self) -> Result<Prober, GpuError> {
        // Far more than the second-level cache, little enough to be read in a millisecond.
        Prober::new(self.gpu.clone(), if self.args.simulated { 4 << 20 } else { 4 << 30 })
    }

    fn ceiling(&self) -> Figures {
        let n_sms = self.gpu.info().n_sms;
        let mut prober = self.prober()?;
        let rate = |median: f64, spread: f64| json!({"gb_per_s": median / 1e9, "spread_percent": spread});
        let mut rates = serde_json::Map::new();
        let mut best = 0f64;
        for tile_kib in [4, 8, 16, 32] {
            for in_flight_kib in [32, 64, 96, 128, 192, 208] {
                let n_tiles = in_flight_kib / tile_kib;
                if n_tiles == 0 || n_tiles > TILE_BARRIERS || in_flight_kib << 10 > TILE_BYTES {
                    continue;
                }
                let (median, spread) = median_and_spread(5, || prober.read(n_sms, tile_kib << 10, n_tiles))?;
                best = best.max(median);
                let key = format!("{tile_kib} KiB x {n_tiles}");
                rates.insert(key, rate(median, spread));
            }
            self.keep(rates.clone())?;
        }
        let rounds = if self.args.simulated { 2 } else { 64 };
        let mut of_l2 = serde_json::Map::new();
        for (tile_kib, n_tiles) in [(2, 32), (4, 32), (16, 8)] {
            let (median, spread) = median_and_spread(5, || prober.read_l2(rounds, n_sms, tile_kib << 10, n_tiles))?;
            of_l2.insert(format!("{tile_kib} KiB x {n_tiles}"), rate(median, spread));
        }
        // A tile of products of many rows, nearly, and as many warps as copy it; and all.
        let mut by_threads = serde_json::Map::new();
        for warps in [3, 7] {
            let (median, spread) = median_and_spread(5, || prober.copy_l2(rounds, n_sms, 63 << 9, warps))?;
            by_threads.insert(format!("{warps} warps"), rate(median, spread));
        }
        Ok(json!({
            "best_gb_per_s": best / 1e9,
            "by_tile_and_number_in_flight": rates,
            "l2": of_l2,
            "l2_by_threads": by_threads,
        }))
    }

    fn latency(&self) -> Figures {
        let n_sms = self.gpu.info().n_sms;
        let rounds = if self.args.simulated { 20 } else { 10_000 };
        let mut prober = self.prober()?;
        let (hop, hop_spread) = median_and_spread(5, || prober.hop(rounds).map(|time| time.as_secs_f64()))?;
        let figure = |time: f64, spread: f64| json!({"us": time * 1e6, "spread_percent": spread});
        let mut rows = serde_json::Map::new();
        for (way, blocks, by_flags) in
            [("behind_a_counter", 2, false), ("by_flags", 2, true), ("by_flags_to_all_sms", n_sms, true)]
        {
            let (time, spread) =
                median_and_spread(5, || prober.hand(blocks, rounds, by_flags).map(|time| time.as_secs_f64()))?;
            rows.insert(way.to_owned(), figure(time, spread));
        }
        let mut barriers = serde_json::Map::new();
        for blocks in [2, 16, 64, n_sms] {
            if blocks <= n_sms {
                let (time, spread) =
                    median_and_spread(5, || prober.meet(blocks, rounds).map(|time| time.as_secs_f64()))?;
                barriers.insert(blocks.to_string(), figure(time, spread));
            }
        }
        let mut figures =
            json!({"hop_us": hop * 1e6, "hop_spread_percent": hop_spread, "row": rows, "barrier_by_sms": barriers});
        self.keep(figures.clone())?;
        // The source has no such kernel.
        if !self.args.simulated || self.args.interpreted {
            figures["code"] = self.code(&mut prober)?;
            self.keep(figures.clone())?;
        }
        figures["tile"] = self.tiles(&mut prober)?;
        Ok(figures)
    }

    /// What a tile costs those who take it from their loader: of two sizes, wherever it comes from, and whether it is
    /// read or not.
    fn tiles(&self, prober: &mut Prober) -> Figures {
        let n_sms = self.gpu.info().n_sms;
        let n = if self.args.simulated { 40 } else { 4000 };
        let mut all = serde_json::Map::new();
        for tile_bytes in [Prober::TILE_STEP, 2 * Prober::TILE_STEP] {
            let n_tiles = TILE_BYTES / tile_bytes;
            let mut ways = serde_json::Map::new();
            for (name, from) in
                [("there", TilesFrom::Nowhere), ("from_l2", TilesFrom::L2), ("from_memory", TilesFrom::Memory)]
            {
                for (reads, suffix) in [(false, ""), (true, "_and_read")] {
                    let (time, spread) = median_and_spread(5, || {
                        Ok::<_, GpuError>(prober.take(n_sms, (tile_bytes, n_tiles), n, from, reads)?.as_secs_f64())
                    })?;
                    ways.insert(format!("{name}{suffix}"), json!({"ns": time * 1e9, "spread_percent": spread}));
                }
            }
            all.insert(format!("{} KiB x {n_tiles}", tile_bytes >> 10), ways.into());
        }
        Ok(all.into())
    }

    /// What a line of straight code, 128 bytes, costs by how much of it there is: the first time, and each time after;
    /// on one SM, and on all.
    fn code(&self, prober: &mut Prober) -> Figures {
        let mut all = serde_json::Map::new();
        let rounds = if self.args.simulated { 3 } else { 101 };
        for blocks in [1, self.gpu.info().n_sms] {
            let mut by_kib = serde_json::Map::new();
            for kib in Prober::CODE_KIB.step_by(*Prober::CODE_KIB.start() as usize) {
                let lines = f64::from(kib * 8);
                let mut ns = |rounds| -> Result<f64, GpuError> {
                    Ok(median_and_spread(3, || prober.code(blocks, kib, rounds).map(|time| time.as_secs_f64()))?.0
                        * 1e9)
                };
                let (once, often) = (ns(1)?, ns(rounds)?);
                let again = (often - once) / f64::from(rounds - 1);
                by_kib.insert(
                    kib.to_string(),
                    json!({"first_ns_a_line": once / lines, "again_ns_a_line": again / lines}),
                );
            }
            all.insert(format!("{blocks}_sms"), by_kib.into());
        }
        Ok(all.into())
    }

    /// How fast a checkpoint comes to the device, from memory and from the disk, and what part that is of the slower of
    /// the bus and of reading the file, each measured alone. The bar is no condition: others may use the disk.
    fn load(&self) -> Figures {
        let (_dir, model) = self.synth("llama-3.2-1b")?;
        let folder = model.dir().to_owned();
        drop(model);
        let weights = Weights::open(&folder)?;
        let paths: Vec<PathBuf> = weights.files().map(Path::to_owned).collect();
        let all = weights.size_bytes() as u64;
        // Pages of a file that is mapped stay in memory.
        drop(weights);
        let cores = usable_cores();
        let n_threads = cuda::upload_threads(cores);
        let mut prober = Prober::new(self.gpu.clone(), all)?;
        // A second's work, at least where a bus has as many lanes as it should.
        let (bus, bus_spread) =
            median_and_spread(5, || prober.bus(if self.args.simulated { 1 << 20 } else { 8 << 30 }))?;
        // What a load begins and ends with, be it of much or little.
        let (buffers, buffers_spread) =
            median_and_spread(3, || Ok::<_, GpuError>(prober.upload_buffers(cores)?.as_secs_f64()))?;
        let mut figures = json!({
            "bus_gb_per_s": bus / 1e9,
            "bus_spread_percent": bus_spread,
            "threads": n_threads,
            "buffers_ms": buffers * 1e3,
            "buffers_spread_percent": buffers_spread,
        });
        self.keep(figures.clone())?;
        for from in ["memory", "disk"] {
            let prepare = || match from {
                "disk" => files::forget(&paths),
                // What was just written is there already, unless there is too little of it.
                _ => files::read_through(&paths, n_threads, LOAD_MOST).map(|_| ()),
            };
            let mut most = all;
            let (file, file_spread) = median_and_spread(3, || {
                prepare()?;
                let (bytes, took) = files::read_through(&paths, n_threads, LOAD_MOST)?;
                // No more is brought to the device than could be read in the time.
                most = most.min(bytes);
                Ok::<_, Box<dyn std::error::Error>>(bytes as f64 / took.as_secs_f64().max(1e-9))
            })?;
            let (mut n_bytes, mut there) = (0, None);
            let (upload, upload_spread) = median_and_spread(3, || {
                prepare()?;
                there = files::in_memory(&paths)?;
                // Mapped anew, as for an engine: no page of it is in the page table yet.
                let weights = Weights::open(&folder)?;
                let mut left = most as usize;
                let pieces = weights.names().filter_map(|name| weights.get(name)).map(|tensor| {
                    let piece = &tensor.bytes[..tensor.bytes.len().min(left)];
                    left -= piece.len();
                    piece
                });
                let pieces: Vec<&[u8]> = pieces.collect();
                n_bytes = pieces.iter().map(|piece| piece.len()).sum();
                let took = prober.upload(&pieces, cores)?;
                Ok::<_, Box<dyn std::error::Error>>(n_bytes as f64 / took.as_secs_f64().max(1e-9))
            })?;
            figures[format!("from_{from}")] = json!({
                "share_percent": 100.0 * upload / bus.min(file),
                "bar_percent": LOAD_BAR_PERCENT,
                "slower": if bus < file { "bus" } else { "file" },
                "upload_gb_per_s": upload / 1e9,
                "upload_spread_percent": upload_spread,
                "file_gb_per_s": file / 1e9,
                "file_spread_percent": file_spread,
                "bytes": n_bytes,
                "in_memory_before_percent": there.map(|there| 100.0 * there),
            });
            self.keep(figures.clone())?;
        }
        Ok(figures)
    }

    /// Small networks whose every intermediate is an output, on the GPU and on the reference executor: the operator
    /// where they part is where the fault is. What is wrong is kept, and the next one looked at.
    fn kernels(&self) -> Figures {
        let mut judged = Judged::default();
        for preset in PRESETS {
            let (_dir, model) = self.synth_as_is(preset)?;
            for case in cases(preset, self.args.simulated && !self.args.in_full) {
                let model = case.model(&model)?;
                self.judge(preset, &Pass::new(case, &model)?, &model, &mut judged)?;
                self.keep(judged.figures())?;
            }
        }
        let mut figures = judged.figures();
        if let Err(error) = self.draws(&mut figures) {
            judged.wrong.push(error.to_string());
        }
        let missing = uncovered(|name| figures.contains_key(name));
        if judged.wrong.is_empty() && !missing.is_empty() {
            judged.wrong.push(format!("no figure for {}: the check is not whole", missing.join(", ")));
        }
        if judged.wrong.is_empty() { Ok(figures.into()) } else { Err(judged.wrong.join("; ").into()) }
    }

    /// Judges one pass on the GPU. Of the first operator that is wrong it is looked for the techniques without which it
    /// is right, once for each macro kernel.
    fn judge(&self, preset: &str, pass: &Pass, model: &Model, judged: &mut Judged) -> Outcome {
        let rows = pass.case.rows;
        let (_, expected) = pass.run(model, None)?;
        let usual = self.options().without;
        let on_gpu = |without| {
            let options = exec::cuda::Options { without, ..self.options() };
            pass.run(model, Some((self.gpu.clone(), options)))
        };
        let (kernels, found) = match on_gpu(usual) {
            Ok(found) => found,
            Err(error) => return judged.failed(format!("{preset}, {rows} rows: {error}")),
        };
        let first_wrong = pass.first_wrong(&expected, &found);
        for (number, (name, kernel)) in pass.names.iter().zip(kernels).enumerate() {
            let off = off(&expected[number], &found[number]);
            let place = format!("{preset}, {rows} rows, {}", name.op);
            judged.note(kernel, off, &place);
            // What comes after it is wrong for that reason alone.
            if first_wrong == Some(number) {
                let mut cures = String::new();
                let techniques = Technique::ALL.into_iter().filter(|technique| !usual.has(*technique));
                for technique in techniques.filter(|_| judged.is_new(kernel)) {
                    // One that fails is no cure.
                    let found = on_gpu(usual.with(technique));
                    if found.is_ok_and(|(_, found)| pass.first_wrong(&expected, &found).is_none()) {
                        cures += if cures.is_empty() { ", right without " } else { ", or without " };
                        cures += technique.name();
                    }
                }
                judged.wrong.push(format!("{kernel}: off by {off:.1e} of the largest value in {place}{cures}"));
                judged.sought.insert(kernel);
            }
        }
        Ok(())
    }

    /// What chooses tokens writes no floats: the same tokens as on the CPU, and the same end. The largest logit is
    /// sought by an operator of its own in the pass that ends a prompt; in those after it, by the head's product. Draws
    /// are made after a prompt of one token, which rounds nothing: one close to the edge between two tokens would soon
    /// fall on the other side otherwise.
    fn draws(&self, figures: &mut serde_json::Map<String, Value>) -> Outcome {
        let (_dir, model) = self.synth("tiny-qwen3")?;
        let engine = |device| {
            let config = EngineConfig { device, max_context: Some(64), chunks: vec![8], ..self.config() };
            Engine::new(&model, &config)
        };
        let mut engines = [engine(Device::Cpu)?, engine(Device::Cuda)?];
        // How many tokens are the same from the first on.
        let mut compare = |prompt: &[u32], options: &GenerateOptions, what: &str| {
            let (mut made, mut ends) = (Vec::new(), Vec::new());
            for engine in &mut engines {
                let mut generation = engine.generate(prompt, options)?;
                let tokens = generation.by_ref().map(|token| token.map(|token| token.id));
                made.push(tokens.collect::<Result<Vec<u32>, _>>()?);
                ends.push(generation.end());
            }
            let same = made[0].iter().zip(&made[1]).take_while(|(a, b)| a == b).count();
            // What is close to the edge between two tokens may fall on either side, sooner or later.
            if same < options.max_new_tokens.min(4) || made[1].len() != options.max_new_tokens || ends[0] != ends[1] {
                return Err(
                    format!("{what}: {:?}, {:?}; on the CPU {:?}, {:?}", made[1], ends[1], made[0], ends[0]).into()
                );
            }
            Ok::<usize, Box<dyn std::error::Error>>(same)
        };
        let n = if self.args.simulated { 2 } else { 16 };
        let figure = |(made, same): (usize, usize)| json!({"tokens_made": made, "as_on_the_cpu": same});
        let (mut drawn, mut all) = ((0, 0), (0, 0));
        let draws = [
            (0.0, 1.0, 0, 1.0),
            (0.0, 1.0, 0, 1.3),
            (0.8, 1.0, 0, 1.0),
            (0.8, 1.0, 20, 1.1),
            (0.8, 0.7, 0, 1.0),
            (1.5, 0.9, 50, 0.9),
        ];
        for (temperature, top_p, top_k, penalty) in
            draws.into_iter().take(if self.args.simulated { 3 } else { usize::MAX })
        {
            let repetition_penalty = Some(penalty);
            let options =
                GenerateOptions { temperature, top_p, top_k, repetition_penalty, seed: 7, ..greedy_options(n) };
            let what = format!("tokens, temperature {temperature}, top-p {top_p}, top-k {top_k}, penalty {penalty}");
            let prompt: &[u32] = if temperature > 0.0 { &[5] } else { &[5, 6, 7, 8] };
            let same = compare(prompt, &options, &what)?;
            figures.insert(what, figure((n, same)));
            all = (all.0 + n, all.1 + same);
            if temperature > 0.0 {
                drawn = (drawn.0 + n, drawn.1 + same);
            }
        }
        for prompt in 0..n as u32 {
            compare(&[17 * prompt, 6, 7, 8], &greedy_options(1), "a prompt's first token")?;
        }
        figures.insert(ArgmaxPartial::NAME.to_owned(), figure((n, n)));
        figures.insert(Sample::NAME.to_owned(), figure(drawn));
        figures.insert(Advance::NAME.to_owned(), figure(all));
        Ok(())
    }

    fn fixtures(&self) -> Figures {
        let mut figures = serde_json::Map::new();
        let names: &[&str] = if self.args.simulated { &SIMULATED_FIXTURES } else { &FIXTURES };
        for &name in names {
            let model = Model::load(self.args.fixtures.join(name))?;
            let bytes = self.expected(name, "safetensors")?;
            let file = SafeTensors::deserialize(&bytes)?;
            let (mut kl, mut positions, mut same, mut judged) = (0.0, 0, 0, 0);
            let n_cases = if self.args.simulated { 1 } else { usize::MAX };
            for case in (0..n_cases).map_while(|i| file.tensor(&format!("case{i}.input_ids")).ok().map(|_| i)) {
                let (prompt, greedy) = (ids(&file, case, "input_ids")?, ids(&file, case, "greedy_ids")?);
                let of_case = |what: &str| floats(&file, &format!("case{case}.{what}"));
                let (logits, margins) = (of_case("logits")?, of_case("margin")?);
                let n_new = if self.args.simulated { 2 } else { greedy.len() };
                let max_context = Some((prompt.len() + n_new).min(model.max_tokens()));
                let config = EngineConfig { max_context, ..self.config() };
                let vocab = model.config().vocab_size();
                let found = Engine::new(&model, &EngineConfig { all_logits: true, ..config.clone() })?
                    .logits(&prompt, |_| ())?;
                kl += found
                    .chunks(vocab)
                    .zip(logits.chunks(vocab))
                    .map(|(found, expected)| Prediction::of(expected).divergence(&Prediction::of(found)))
                    .sum::<f64>();
                positions += prompt.len();
                let options = greedy_options(n_new);
                let made: Result<Vec<u32>, _> = Engine::new(&model, &config)?
                    .generate(&prompt, &options)?
                    .map(|token| token.map(|t| t.id))
                    .collect();
                // Up to the first token that rounding may turn.
                let certain = margins.iter().take_while(|margin| **margin > 0.1).count().min(n_new);
                let made = made?;
                same += made.iter().zip(&greedy[..certain]).take_while(|(a, b)| a == b).count();
                judged += certain;
            }
            let kl = kl / f64::from(positions as u32);
            let prompt = ids(&file, 0, "input_ids")?;
            let in_8_bits = self.in_fewer_bits(&model, Quantize::Q8, &prompt)?;
            let in_4_bits = self.in_fewer_bits(&model, Quantize::Q4, &prompt)?;
            figures.insert(
                name.to_owned(),
                json!({
                    "positions": positions, "mean_kl": kl, "greedy_tokens": judged, "as_expected": same,
                    "in_8_bits": in_8_bits, "in_4_bits": in_4_bits,
                }),
            );
            self.keep(figures.clone())?;
            let is_off = |kl: f64, most: f64| kl.is_nan() || kl > most;
            // Of one position each, where the others are means.
            let is_any_off = in_8_bits.iter().chain(&in_4_bits).any(|kl| is_off(*kl, 5e-3));
            if is_off(kl, 1e-3) || is_any_off || same < judged {
                return Err(format!("{name}: {}", figures[name]).into());
            }
        }
        figures.insert("guesses".to_owned(), self.guesses(&Model::load(self.args.fixtures.join(FIXTURES[0]))?)?);
        Ok(figures.into())
    }

    /// What `model` makes with guesses of a text that repeats itself, beside its logits after the same tokens: how much
    /// less likely than the likeliest a token is at most, how far the last one's logits are off, and in how many
    /// passes.
    fn guesses(&self, model: &Model) -> Figures {
        let n = if self.args.simulated { 4 } else { 48 };
        let vocab = model.config().vocab_size();
        let prompt: Vec<u32> = (0..23).map(|i| ((i % 7 * 131 + 7) % vocab) as u32).collect();
        let config = EngineConfig { max_context: Some(prompt.len() + n), ..self.config() };
        let mut engine = Engine::new(model, &EngineConfig { prompt_lookup: Some(5), ..config.clone() })?;
        let made = engine.generate(&prompt, &greedy_options(n))?.map(|token| token.map(|t| t.id));
        let made: Vec<u32> = made.collect::<Result<_, _>>()?;
        let passes = engine.stamps().len().saturating_sub(1);
        let last = engine.last_logits()?.ok_or("no logits after tokens")?;
        let ids = [&prompt[..], &made[..n - 1]].concat();
        let logits = Engine::new(model, &EngineConfig { all_logits: true, ..config })?.logits(&ids, |_| ())?;
        let rows = logits.chunks(vocab).skip(prompt.len() - 1);
        let short = rows.clone().zip(&made).map(|(row, token)| {
            let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            most - row[*token as usize]
        });
        let (short, expected) = (short.fold(0.0, f32::max), rows.last().ok_or("no logits")?);
        let kl = Prediction::of(expected).divergence(&Prediction::of(&last));
        let found = json!({"tokens": n, "passes": passes, "most_short_of_the_likeliest": short, "kl": kl});
        if short > 0.25 || kl.is_nan() || kl > 1e-3 {
            return Err(format!("guesses: {found}").into());
        }
        Ok(found)
    }

    /// What another program made of the fixture `name`, in its file of this kind.
    fn expected(&self, name: &str, kind: &str) -> Result<Vec<u8>, String> {
        let path = self.args.fixtures.join(format!("{name}.expected.{kind}"));
        std::fs::read(&path).map_err(|error| format!("{}: {}", path.display(), plain(&error)))
    }

    /// Encoders and a decoder that see a text at once, and one that reads it in passes as it reads prompts; decoders in
    /// 8 bits, too, beside the reference executor with the same weights.
    fn sentences(&self) -> Figures {
        let mut figures = serde_json::Map::new();
        for (name, bound) in [
            ("tiny-xlm-roberta", KERNEL_TOLERANCE),
            ("tiny-embedding", ROUNDED_TOLERANCE),
            ("tiny-embeddinggemma", ROUNDED_TOLERANCE),
            ("tiny-modernbert", ROUNDED_TOLERANCE),
        ] {
            let model = Model::load(self.args.fixtures.join(name))?;
            let bytes = self.expected(name, "safetensors")?;
            let embeddings = floats(&SafeTensors::deserialize(&bytes)?, "embeddings")?;
            let listed: Value = serde_json::from_slice(&self.expected(name, "json")?)?;
            let listed =
                listed["cases"].as_array().filter(|cases| !cases.is_empty()).ok_or("a fixture without texts")?;
            let texts: Vec<_> =
                listed.iter().map(|case| (case["prompt_name"].as_str(), case["text"].as_str())).collect();
            let n_texts = if self.args.simulated { 2 } else { texts.len() };
            // The farthest that any is, as a part of its length.
            let farthest = |model: &Model, expected: &mut dyn FnMut(usize) -> Result<Vec<f32>, EngineError>| {
                let mut embedder = Embedder::new(model, &self.config())?;
                texts.iter().enumerate().take(n_texts).try_fold(0f64, |farthest, (at, (prompt, text))| {
                    let found = embedder.embed_as(*prompt, text.unwrap_or_default())?;
                    Ok::<_, EngineError>(farthest.max(distance(&expected(at)?, &found)))
                })
            };
            let dim = embeddings.len() / texts.len();
            let off = farthest(&model, &mut |at| Ok(embeddings[at * dim..][..dim].to_vec()))?;
            let in_8_bits = if matches!(model.config(), ModelConfig::Decoder(_)) {
                let model = model.quantize(Quantize::Q8, |_| {})?;
                let reference = EngineConfig { device: Device::Reference, ..EngineConfig::default() };
                let mut reference = Embedder::new(&model, &reference)?;
                let mut expected = |at: usize| reference.embed_as(texts[at].0, texts[at].1.unwrap_or_default());
                Some(farthest(&model, &mut expected)?)
            } else {
                None
            };
            figures.insert(name.to_owned(), json!({"texts": n_texts, "off": off, "in_8_bits_off": in_8_bits}));
            self.keep(figures.clone())?;
            if off > bound || in_8_bits.is_some_and(|off| off > bound) {
                return Err(format!("{name}: {}", figures[name]).into());
            }
        }
        Ok(figures.into())
    }

    /// How far `model` with weights in fewer bits is from the reference executor with the same, after `prompt` and
    /// where a token more has been decoded: their divergences. None of a mixture of experts: no GPU kernel reads its
    /// matrices then.
    fn in_fewer_bits(
        &self,
        model: &Model,
        how: Quantize,
        prompt: &[u32],
    ) -> Result<Vec<f64>, Box<dyn std::error::Error>> {
        if matches!(model.config(), ModelConfig::Decoder(config) if config.experts.is_some()) {
            return Ok(Vec::new());
        }
        let model = model.quantize(how, |_| {})?;
        let max_context = Some((prompt.len() + 2).min(model.max_tokens()));
        let logits = |config: EngineConfig, n: usize| -> Result<Vec<f32>, EngineError> {
            let mut engine = Engine::new(&model, &EngineConfig { max_context, ..config })?;
            engine.generate(prompt, &greedy_options(n))?.try_for_each(|token| token.map(|_| ()))?;
            Ok(engine.last_logits()?.unwrap_or_default())
        };
        let divergence = |n: usize| {
            let reference = EngineConfig { device: Device::Reference, ..EngineConfig::default() };
            let (expected, found) = (logits(reference, n)?, logits(self.config(), n)?);
            Ok(Prediction::of(&expected).divergence(&Prediction::of(&found)))
        };
        [1, 2].into_iter().map(divergence).collect()
    }

    fn drills(&self) -> Figures {
        let (_dir, model) = self.synth("tiny-qwen3")?;
        let config = EngineConfig { max_context: Some(64), chunks: vec![8], ..self.config() };
        let mut engine = Engine::new(&model, &config)?;
        let prompt: Vec<u32> = (1..12).collect();
        let mut times = serde_json::Map::new();
        let mut note = |what: &str, began: Instant, said: String| -> Outcome {
            let seconds = began.elapsed().as_secs_f64();
            times.insert(what.to_owned(), json!({"seconds": seconds, "said": said}));
            self.keep(times.clone())?;
            if seconds > 1.0 && !self.args.simulated {
                return Err(format!("{what}: took {seconds:.2} s, expected at most 1").into());
            }
            Ok(())
        };
        let tokens = |engine: &mut Engine, prompt: &[u32], n: usize| -> Result<Vec<u32>, EngineError> {
            engine.generate(prompt, &greedy_options(n))?.map(|token| token.map(|token| token.id)).collect()
        };
        let expected = tokens(&mut engine, &prompt, 3)?;

        let last = engine.resident().compiled().image.view().events.len() as u32 - 1;
        engine.resident_mut().cuda().ok_or("a GPU engine")?.miscount(EventId(last))?;
        let began = Instant::now();
        match tokens(&mut engine, &prompt, 3) {
            Err(error @ EngineError::Run(RunError::Stalled { .. })) => {
                note("an event that never fires", began, error.to_string())?;
            }
            other => return Err(format!("an event that never fires: {other:?}").into()),
        }
        if tokens(&mut engine, &prompt, 3)? != expected {
            return Err("after a stall the engine makes other tokens".into());
        }

        // The first task of the passes that follow the prompt: the embedding.
        let task = TaskId(engine.resident().compiled().image.view().programs[0].task_first);
        engine.resident_mut().cuda().ok_or("a GPU engine")?.mute(task, true)?;
        let began = Instant::now();
        // Whoever has waited in vain goes on with what lies there: of that no token may come.
        let mut made = Vec::new();
        let mut generation = engine.generate(&prompt, &greedy_options(3))?;
        let outcome = generation.try_for_each(|token| token.map(|token| made.push(token.id)));
        drop(generation);
        match outcome {
            Err(error @ EngineError::Run(RunError::Stalled { .. }))
                if made.len() < 2 && expected.starts_with(&made) =>
            {
                note("a row that nobody writes", began, error.to_string())?;
            }
            other => return Err(format!("a row that nobody writes: {made:?} of {expected:?}, {other:?}").into()),
        }
        engine.resident_mut().cuda().ok_or("a GPU engine")?.mute(task, false)?;
        if tokens(&mut engine, &prompt, 3)? != expected {
            return Err("after a row that nobody wrote the engine makes other tokens".into());
        }

        let mut generation = engine.generate(&prompt, &greedy_options(50))?;
        let began = Instant::now();
        generation.stop();
        let made = generation.by_ref().count();
        let end = generation.end();
        drop(generation);
        if end != Some(End::Stopped) && made < 50 {
            return Err(format!("told to stop, it ended with {end:?} after {made} tokens").into());
        }
        note("the host says stop", began, format!("{end:?} after {made} tokens"))?;

        let began = Instant::now();
        let late = GenerateOptions { max_time: Some(Duration::ZERO), ..greedy_options(50) };
        let mut generation = engine.generate(&prompt, &late)?;
        let made = generation.by_ref().map(|token| token.map(|_| 1)).sum::<Result<usize, _>>()?;
        let end = generation.end();
        drop(generation);
        if end != Some(End::Deadline) && made < 50 {
            return Err(format!("with its time over, it ended with {end:?} after {made} tokens").into());
        }
        note("a deadline", began, format!("{end:?} after {made} tokens"))?;

        let began = Instant::now();
        // Past the engine, which would refuse it before the GPU sees it.
        match engine.resident_mut().run_tokens(ProgramId(1), &[1, u32::MAX]) {
            Err(error @ RunError::TokenOutOfRange { .. }) => {
                note("a token the vocabulary has not", began, error.to_string())?;
            }
            other => return Err(format!("a token out of range: {other:?}").into()),
        }
        if tokens(&mut engine, &prompt, 3)? != expected {
            return Err("after a fault the engine makes other tokens".into());
        }
        drop(engine);

        let hogs = self.hog()?;
        let began = Instant::now();
        let refused = match Engine::new(&model, &config) {
            Err(error @ EngineError::Gpu(_)) => note("too little memory", began, error.to_string()),
            Err(error) => Err(error.into()),
            Ok(_) => Err("an engine was made where there is no memory".into()),
        };
        self.release(hogs)?;
        refused.map(|()| times.into())
    }

    /// Takes what memory there is, but for crumbs: what the driver says is free it does not give in one piece.
    fn hog(&self) -> Result<Vec<DevicePtr>, CudaError> {
        let _entered = self.gpu.enter()?;
        let mut hogs = Vec::new();
        let (mut bytes, _) = self.gpu.driver().memory()?;
        while bytes >= 64 << 10 {
            match self.gpu.driver().alloc(bytes) {
                Ok(hog) => hogs.push(hog),
                Err(error) if error.code == code::OUT_OF_MEMORY => bytes /= 2,
                Err(error) => return Err(error),
            }
        }
        Ok(hogs)
    }

    /// Gives back what [`Check::hog`] took.
    #[allow(unsafe_code, reason = "device memory of its own")]
    fn release(&self, hogs: Vec<DevicePtr>) -> Result<(), CudaError> {
        let _entered = self.gpu.enter()?;
        for hog in hogs {
            // SAFETY: allocated by `hog`, freed once, used by nobody.
            unsafe { self.gpu.driver().free(hog)? };
        }
        Ok(())
    }

    fn long(&self) -> Figures {
        let n = if self.args.simulated { 8 } else { 10_000 };
        let (_dir, model) = self.synth("qwen3-110m")?;
        let n = n.min(model.max_tokens() - 16);
        // A rate is measured, so workers do not tell what they do.
        let cuda = exec::cuda::Options { recorder: false, ..self.options() };
        let config = EngineConfig { max_context: Some(n + 16), cuda, ..self.config() };
        let mut engine = Engine::new(&model, &config)?;
        let began = Instant::now();
        let mut made = 0usize;
        for token in engine.generate(&[1, 2, 3, 4], &greedy_options(n))? {
            token?;
            made += 1;
        }
        if made != n {
            return Err(format!("{made} tokens, expected {n}").into());
        }
        let seconds = began.elapsed().as_secs_f64();
        Ok(json!({"tokens_in_one_launch": made, "seconds": seconds, "tokens_per_s": made as f64 / seconds}))
    }

    /// Five runs, the step's losses, other ways through the same code, and PyTorch's step on the same weights.
    fn bench(&self, preset: &str) -> Figures {
        // What is tried on a simulated GPU is how it goes, not how fast.
        let (context, tokens) = if self.args.simulated { (9, 2) } else { (512, 64) };
        let (_dir, model) = self.synth(preset)?;
        let folder = model.dir().to_owned();
        let trace = self.args.out.join(format!("{preset}.trace.json"));
        let runs = if self.args.simulated { 1 } else { 5 };
        let args = bench::Args::of(
            ModelArgs::on_gpu(folder.clone(), self.gpu.clone(), self.args.without.clone()),
            context,
            tokens,
            runs,
            trace,
        )
        .guessing(self.most_guesses(preset));
        // PyTorch's turn comes as soon as there is our own step's time, before anything that may fail.
        let mut pytorch = None;
        let outcome = bench::generator(&args, &model, &mut |figures| {
            let mut figures = figures.clone();
            self.keep(figures.clone())?;
            beside(&mut figures, pytorch.get_or_insert_with(|| self.peer(&folder)));
            self.keep(figures)
        });
        let Measured { mut figures, mut failures } = outcome?;
        figures["model"] = preset.into();
        beside(&mut figures, pytorch.get_or_insert_with(|| self.peer(&folder)));
        for sequences in self.batches(preset) {
            self.keep(figures.clone())?;
            match bench::whole(&args.uncompared(Some(*sequences)), &model) {
                Ok(batch) => figures["sequences_together"][sequences.to_string()] = kept(&batch, &["times_alone"]),
                Err(error) => failures.push(format!("{sequences} sequences: {error}")),
            }
        }
        // Making 4 bits' levels takes longest, and what is beyond the section's time is lost.
        for (name, how) in [("in_8_bits", Quantize::Q8), ("in_4_bits", Quantize::Q4)] {
            self.keep(figures.clone())?;
            match self.bench_quantized(&args, &model, how, &figures) {
                Ok(found) => figures[name] = found,
                Err(error) => failures.push(format!("{name}: {error}")),
            }
        }
        self.keep(figures.clone())?;
        if failures.is_empty() { Ok(figures) } else { Err(failures.join("; ").into()) }
    }

    /// The step with `model`'s weights in fewer bits, and how many times as fast it is as that of `figures`.
    fn bench_quantized(&self, args: &bench::Args, model: &Model, how: Quantize, figures: &Value) -> Figures {
        let quantized = model.quantize(how, |_| {})?;
        let found = bench::whole(&args.uncompared(None), &quantized)?;
        let mut of_interest = kept(&found, &["accuracy"]);
        if let [Some(all), Some(fewer)] = [figures, &found].map(|of| of["step_ms_median"].as_f64()) {
            of_interest["times_as_fast"] = json!(all / fewer);
        }
        Ok(of_interest)
    }

    /// How many sequences are decoded together in further runs: of the smallest model alone, for want of time.
    fn batches(&self, preset: &str) -> &'static [usize] {
        match preset {
            "qwen3-0.6b" if self.args.simulated => &[2],
            "qwen3-0.6b" => &[4, 16, 64],
            _ => &[],
        }
    }

    /// How many guesses a pass verifies at most, where that is measured: of small models, for want of time.
    fn most_guesses(&self, preset: &str) -> Option<usize> {
        let is_small = ["qwen3-0.6b", "llama-3.2-1b"].contains(&preset);
        is_small.then_some(if self.args.simulated { 1 } else { 7 })
    }

    /// PyTorch with CUDA graphs on the same weights.
    fn peer(&self, model: &Path) -> Value {
        let compile: &[&str] = if self.args.torch_compile { &["--compile"] } else { &[] };
        let arguments: Vec<&OsStr> = ["--context", "512"].iter().chain(compile).map(OsStr::new).collect();
        self.script(model, &arguments)
    }

    /// What the script beside this program says of `model`; or why it says nothing.
    fn script(&self, model: &Path, arguments: &[&OsStr]) -> Value {
        let script = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join("pytorch.py")));
        let Some(script) = script.filter(|script| script.exists()) else {
            return json!("no pytorch.py beside the program");
        };
        let mut command = python();
        command.arg(script).arg(model).args(arguments);
        if self.args.simulated {
            command.args(["--device", "cpu"]);
        }
        let limit = if self.args.torch_compile { 380 } else { 80 };
        match output_within(Duration::from_secs(limit), &mut command) {
            Err(error) => json!(format!("python3: {error}")),
            Ok((_, out, err)) => {
                serde_json::from_str(&out).unwrap_or_else(|_| json!(err.lines().last().unwrap_or("it said nothing")))
            }
        }
    }

    /// No worse than the usual bf16 engine, on the same weights.
    fn accuracy(&self) -> Figures {
        let n = if self.args.simulated { 24 } else { 1024 };
        let (dir, model) = self.synth("qwen3-0.6b")?;
        let vocab = model.config().vocab_size();
        let ids: Vec<u32> = (0..n as u64).map(|i| (i * 7919 % vocab as u64) as u32).collect();
        let config = EngineConfig { all_logits: true, max_context: Some(n), ..self.config() };
        let logits = Engine::new(&model, &config)?.logits(&ids, |_| ())?;
        let path = dir.path().join("logits.safetensors");
        logits::write(&path, &ids, &logits, vocab)?;
        let found = self.script(model.dir(), &["--logits".as_ref(), path.as_os_str()]);
        for key in ["mean_kl", "mean_abs_nll_change"] {
            let of = |whose: &str| found[whose][key].as_f64();
            if let (Some(ours), Some(theirs)) = (of("ours"), of("pytorch_bf16"))
                && ours > theirs
            {
                return Err(format!("{key} {ours:.2e}, PyTorch's in bf16 is {theirs:.2e}: {found}").into());
            }
        }
        Ok(found)
    }

    fn sanitizer(&self) -> Figures {
        let exe = std::env::current_exe()?;
        // A toolkit's folder of programs is often in nobody's PATH.
        let name = ["/usr/local/cuda/bin/compute-sanitizer"].into_iter().find(|path| Path::new(path).exists());
        let mut command = Command::new(name.unwrap_or("compute-sanitizer"));
        // A call that fails and is seen to is no error: a cubin that the driver does not take is one.
        command
            .args(["--error-exitcode", "9", "--tool", "memcheck", "--report-api-errors", "no"])
            .arg(exe)
            .args(["generate", "--device", "cuda", "--prompt", "The", "--max-new-tokens", "2", "--model"])
            .arg(self.args.fixtures.join("tiny-qwen3"));
        match output_within(Duration::from_secs(50), &mut command) {
            Err(error) => Ok(json!({"left_out": format!("compute-sanitizer: {error}")})),
            Ok((status, ..)) if status.success() => Ok(json!({"memcheck": "no errors"})),
            // On some virtual machines.
            Ok((_, out, _)) if out.contains("Device not supported") => {
                Ok(json!({"left_out": "compute-sanitizer: device not supported"}))
            }
            Ok((_, out, err)) => Err((out + &err).into()),
        }
    }
}

/// What came of the passes so far.
#[derive(Default)]
struct Judged {
    /// By macro kernel how far it was off, at most, and where.
    worst: BTreeMap<&'static str, (f64, String)>,
    /// What was wrong, or failed.
    wrong: Vec<String>,
    /// Macro kernels for which cures have been looked for.
    sought: BTreeSet<&'static str>,
    n_failed: usize,
}

/// Passes that may fail to run before the others are given up.
const MOST_FAILED: usize = 3;

impl Judged {
    fn note(&mut self, kernel: &'static str, off: f64, place: &str) {
        let entry = self.worst.entry(kernel).or_insert((0.0, String::new()));
        if off >= entry.0 {
            *entry = (off, place.to_owned());
        }
    }

    /// Whether cures of this kernel have still to be looked for.
    fn is_new(&self, kernel: &str) -> bool {
        !self.sought.contains(kernel)
    }

    /// A pass did not run; an error if so many have not that the GPU seems to be lost.
    fn failed(&mut self, what: String) -> Outcome {
        self.wrong.push(what);
        self.n_failed += 1;
        if self.n_failed < MOST_FAILED { Ok(()) } else { Err(self.wrong.join("; ").into()) }
    }

    fn figures(&self) -> serde_json::Map<String, Value> {
        let of_kernels = self.worst.iter().map(|(kernel, (off, place))| {
            let figure = json!({"off": off, "in": place});
            ((*kernel).to_owned(), figure)
        });
        let wrong = (!self.wrong.is_empty()).then(|| ("wrong".to_owned(), json!(self.wrong)));
        of_kernels.chain(wrong).collect()
    }
}

/// A pass whose intermediates are compared.
struct Pass {
    case: Case,
    source: Source,
    names: Vec<Named>,
    ids: Vec<u32>,
}

impl Pass {
    fn new(case: Case, model: &Model) -> Result<Pass, EngineError> {
        let (source, names) = case.source(model)?;
        let n = (case.rows * case.passes) as u32;
        let ids = (0..n).map(|i| (i * 7919 + 3) % model.config().vocab_size() as u32).collect();
        Ok(Pass { case, source, names, ids })
    }

    /// The intermediates, and what each is a figure of: on the GPU or, without one, of the reference executor.
    fn run(
        &self,
        model: &Model,
        gpu: Option<(Gpu, exec::cuda::Options)>,
    ) -> Result<(Vec<&'static str>, Vec<Vec<f32>>), EngineError> {
        let sources = vec![self.source.clone()];
        let config = match gpu {
            Some((gpu, cuda)) => EngineConfig { device: Device::Cuda, gpu: Some(gpu), cuda, ..EngineConfig::default() },
            None => EngineConfig { device: Device::Reference, ..EngineConfig::default() },
        };
        let mut resident = Resident::new(sources, model, &config)?;
        let kernels = self.names.iter().map(|name| name.figure(resident.compiled())).collect();
        match self.case.passes {
            1 => resident.run_tokens(ProgramId(0), &self.ids)?,
            _ => (1..=self.ids.len()).try_for_each(|n| resident.run_last(ProgramId(0), &self.ids[..n]))?,
        }
        let values: Result<_, EngineError> = self
            .names
            .iter()
            .map(|name| {
                let output = resident.output(ProgramId(0), &name.output);
                let output = output.ok_or(EngineError::Purpose("outputs"))?;
                let n = output.extent[0] as usize;
                Ok(resident.read_f32(&flat(&output), self.case.rows.min(n))?)
            })
            .collect();
        Ok((kernels, values?))
    }

    /// The first of the intermediates `found` that is not as `expected`.
    fn first_wrong(&self, expected: &[Vec<f32>], found: &[Vec<f32>]) -> Option<usize> {
        let tolerance = self.case.tolerance();
        expected.iter().zip(found).position(|(expected, found)| off(expected, found) > tolerance)
    }
}

/// How far `found` is from `expected`, as a part of the largest value expected.
fn off(expected: &[f32], found: &[f32]) -> f64 {
    let scale = expected.iter().fold(1e-6f32, |max, x| max.max(x.abs()));
    let off = expected.iter().zip(found).map(|(e, f)| if f.is_finite() { (e - f).abs() } else { f32::MAX });
    f64::from(off.fold(0.0, f32::max) / scale)
}

/// How far `found` is from `expected`, as a part of its length; infinitely, where anything is not a number.
fn distance(expected: &[f32], found: &[f32]) -> f64 {
    let length = |of: &mut dyn Iterator<Item = f32>| of.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let off = length(&mut expected.iter().zip(found).map(|(a, b)| a - b)) / length(&mut expected.iter().copied());
    if off.is_finite() && expected.len() == found.len() { off } else { f64::INFINITY }
}

/// Models with what `transformers` makes of them, one of each that has operators of its own, or a part of one.
const FIXTURES: [&str; 22] = [
    "tiny-qwen3",
    "tiny-llama",
    "tiny-qwen2",
    "tiny-mistral",
    "tiny-qwen3-moe",
    "tiny-qwen2-moe",
    "tiny-mixtral",
    "tiny-gemma3",
    "tiny-smollm3",
    "tiny-phi3",
    "tiny-olmo2",
    "tiny-qwen3.5",
    "tiny-lfm2",
    "tiny-granite4-h",
    "tiny-gpt-oss",
    "tiny-glm4-moe",
    "tiny-gemma4",
    "tiny-gemma4-moe",
    "tiny-glm4-moe-lite",
    "tiny-hunyuan",
    "tiny-qwen3-awq",
    "tiny-llama-gptq",
];

/// Those of them that a simulated GPU, which takes half a minute for each, is given: a dense one, and one of experts.
const SIMULATED_FIXTURES: [&str; 2] = ["tiny-qwen3", "tiny-qwen3-moe"];

/// What loading should reach of the slower of the bus and the disk.
const LOAD_BAR_PERCENT: f64 = 80.0;

/// The longest that a file is read at a time: a slow disk shows its rate with a part of it.
const LOAD_MOST: Duration = Duration::from_secs(4);

/// `operand` with all its dimensions but the first as one; those the compiler makes are dense.
fn flat(operand: &Operand) -> Operand {
    if operand.rank <= 2 {
        return *operand;
    }
    let mut flat = Operand { rank: 2, ..*operand };
    flat.extent = [operand.extent[0], operand.extent[1..usize::from(operand.rank)].iter().product(), 1, 1];
    flat.stride_elems = [operand.stride_elems[0], 1, 0, 0];
    flat
}

/// Puts PyTorch's figures beside ours, and how many times as fast ours are.
fn beside(figures: &mut Value, pytorch: &Value) {
    figures["pytorch"] = pytorch.clone();
    if let Some(theirs) = pytorch["cuda_graph"]["step_us"].as_f64() {
        let ours = figures["step_ms_median"].as_f64().unwrap_or(f64::NAN);
        figures["times_as_fast_as_pytorch"] = json!(theirs / 1e3 / ours);
    }
    if let Some(theirs) = pytorch["first_token_ms"].as_object() {
        let ratio = |(n, theirs): (&String, &Value)| {
            let ratio = theirs.as_f64()? / figures["first_token_ms"][n].as_f64()?;
            Some((n.clone(), json!(ratio)))
        };
        let ratios: serde_json::Map<String, Value> = theirs.iter().filter_map(ratio).collect();
        figures["first_token_times_as_fast_as_pytorch"] = ratios.into();
    }
}

/// The Python to run scripts with.
pub(super) fn python() -> Command {
    Command::new(std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into()))
}

/// Of what was measured, the step's time and rate, and `more`.
fn kept(figures: &Value, more: &[&str]) -> Value {
    let names = ["step_ms_median", "step_ms_of_runs", "tokens_per_s", "share_of_bandwidth_percent"];
    let kept = names.iter().chain(more).map(|name| ((*name).to_owned(), figures[*name].clone()));
    kept.collect::<serde_json::Map<_, _>>().into()
}

fn ids(file: &SafeTensors<'_>, case: usize, what: &str) -> Result<Vec<u32>, Box<dyn std::error::Error>> {
    let tensor = file.tensor(&format!("case{case}.{what}"))?;
    Ok(tensor.data().chunks_exact(8).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect())
}

fn floats(file: &SafeTensors<'_>, name: &str) -> Result<Vec<f32>, Box<dyn std::error::Error>> {
    Ok(file.tensor(name)?.data().chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect())
}
