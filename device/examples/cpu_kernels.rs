//! Speed of the CPU bodies, beside the read bandwidth of the same minutes: `cargo run --release -p perpetua-device
//! --example cpu_kernels [gemv] [few] [gemm] [attention] [-- WORDS]`, with words only what has them in its name.
//!
//! Every figure is the median of rounds in which all measurements take turns, so that a busy machine slows them alike;
//! compare figures of one run only. Time is the threads' own, without what other programs take. Weights and caches read
//! by a measurement are larger than any cache.

use perpetua_device::cpu::Scratch;
use perpetua_device::cpu::bandwidth::read;
use perpetua_device::cpu::simd::Isa;
use perpetua_device::io::{Call, Tensor};
use perpetua_device::kernels::attention::{self, Attention};
use perpetua_device::kernels::linear::{self, Linear};
use perpetua_device::kernels::{Numbered, Spec, param_words};
use perpetua_shared::task::Operand;
use perpetua_shared::{DType, Step, TaskDesc};
use std::sync::Barrier;

const ROUNDS: usize = 5;

/// Memory that threads share, each writing only its own part.
struct Memory(Vec<u64>);

impl Memory {
    fn new(bytes: usize, word: u64) -> Memory {
        Memory(vec![word; bytes.div_ceil(8)])
    }
    fn tensor(&self, dtype: DType, offset_elems: usize, extents: &[usize]) -> Tensor {
        let mut operand = Operand { dtype: dtype as u16, rank: extents.len() as u8, ..Operand::ABSENT };
        operand.offset_bytes = (offset_elems * dtype.size_bytes()) as u64;
        let mut stride = 1;
        for dim in (0..extents.len()).rev() {
            operand.extent[dim] = extents[dim] as u32;
            operand.stride_elems[dim] = stride as u32;
            stride *= extents[dim];
        }
        assert!((offset_elems + stride) * dtype.size_bytes() <= self.0.len() * 8);
        // SAFETY: the box is inside the memory (asserted); what is written by one call is read by none at that time.
        unsafe { Tensor::new(self.0.as_ptr().cast_mut().cast(), &operand) }
    }

    /// `n` rows of `k` elements, `stride` elements apart, from `offset_bytes` on.
    fn matrix(&self, dtype: DType, offset_bytes: usize, [n, k]: [usize; 2], stride: usize) -> Tensor {
        assert!(offset_bytes + n * stride * dtype.size_bytes() <= self.0.len() * 8);
        let mut operand =
            Operand { dtype: dtype as u16, rank: 2, offset_bytes: offset_bytes as u64, ..Operand::ABSENT };
        (operand.extent[0], operand.extent[1]) = (n as u32, k as u32);
        (operand.stride_elems[0], operand.stride_elems[1]) = (stride as u32, u32::from(dtype.lines().is_none()));
        // SAFETY: the box is inside the memory (asserted); what is written by one call is read by none at that time.
        unsafe { Tensor::new(self.0.as_ptr().cast_mut().cast(), &operand) }
    }
}

/// Seconds this thread has run: unlike wall time it leaves out what other programs take of the cores.
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
fn thread_seconds() -> f64 {
    unsafe extern "C" {
        fn clock_gettime(clock: i32, time: *mut [i64; 2]) -> i32;
    }
    const CLOCK_THREAD_CPUTIME_ID: i32 = 3;
    let mut time = [0; 2];
    // SAFETY: 64-bit Linux's timespec is two 64-bit words; std links the C library that has the function.
    let failed = unsafe { clock_gettime(CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(failed, 0, "the thread's clock can be read");
    time[0] as f64 + time[1] as f64 * 1e-9
}

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
fn thread_seconds() -> f64 {
    use std::time::Instant;
    thread_local! { static START: Instant = Instant::now(); }
    START.with(|start| start.elapsed().as_secs_f64())
}

/// Seconds that the busiest of `threads` threads runs to do `work(thread)`.
fn timed(threads: usize, work: impl Fn(usize) + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads)
            .map(|thread| {
                let (barrier, work) = (&barrier, &work);
                scope.spawn(move || {
                    barrier.wait();
                    let start = thread_seconds();
                    work(thread);
                    thread_seconds() - start
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().expect("the thread ends")).fold(0.0, f64::max)
    })
}

fn call<K: Numbered>(tensors: &[Tensor], params: [u32; 8], step: Step, scratch: &mut Scratch) {
    let task = TaskDesc { task_type: K::TASK_TYPE, params, ..bytemuck::Zeroable::zeroed() };
    let spec = Spec::of(K::TASK_TYPE).expect("the kernel is listed");
    let call = Call { tensors, task: &task, step: &step, programs: &[] };
    (spec.cpu)(&call, scratch).expect("the kernel runs");
}

/// A line of the report: what is measured, in which unit, and one round of it.
struct Line<'a> {
    name: String,
    unit: &'static str,
    round: Box<dyn Fn() -> f64 + 'a>,
}

fn report(mut lines: Vec<Line<'_>>) {
    let words: Vec<String> = std::env::args().skip_while(|arg| arg != "--").skip(1).collect();
    lines.retain(|line| words.iter().all(|word| line.name.contains(&**word)));
    let mut samples = vec![Vec::new(); lines.len()];
    for _ in 0..ROUNDS {
        for (line, samples) in lines.iter().zip(&mut samples) {
            samples.push((line.round)());
        }
    }
    for (line, samples) in lines.iter().zip(&mut samples) {
        samples.sort_by(f64::total_cmp);
        let [low, median, high] = [0, ROUNDS / 2, ROUNDS - 1].map(|i| samples[i]);
        println!("{:44} {median:8.2} {:8}  ({low:.2} to {high:.2})", line.name, line.unit);
    }
    println!();
}

fn gemv() {
    let bytes = 1200usize << 20;
    let weights = Memory::new(bytes, 0x3c10_bc20_3c30_3c40);
    let x = Memory::new(1 << 20, 0x3f10_0000_bf00_0000);
    let y = Memory::new(1 << 20, 0);
    let mut lines = Vec::new();
    for threads in [1, 2] {
        let words = &weights.0;
        lines.push(Line {
            name: format!("read, {threads} threads"),
            unit: "GB/s",
            round: Box::new(move || {
                let part = words.len() / threads;
                let seconds = timed(threads, |t| {
                    std::hint::black_box(read(bytemuck::cast_slice(&words[t * part..][..part])));
                });
                bytes as f64 / seconds / 1e9
            }),
        });
        for isa in Isa::available() {
            for (dtype, k) in [(DType::Bf16, 1024), (DType::Bf16, 4096), (DType::F16, 4096), (DType::F32, 4096)] {
                let (weights, x, y) = (&weights, &x, &y);
                lines.push(Line {
                    name: format!("gemv {dtype} k={k}, {threads} threads, {}", isa.name()),
                    unit: "GB/s",
                    round: Box::new(move || {
                        // Tasks of 512 KiB of weights, as `graph::lower` cuts them.
                        let n = (512 << 10) / (k * dtype.size_bytes());
                        let tasks = bytes / (n * k * dtype.size_bytes()) / threads;
                        let seconds = timed(threads, |t| {
                            let mut scratch = Scratch::with_isa(*isa);
                            let x = x.tensor(DType::F32, 0, &[1, k]);
                            let y = y.tensor(DType::F32, t * 4096, &[1, n]);
                            for task in 0..tasks {
                                let w = weights.tensor(dtype, (t * tasks + task) * n * k, &[n, k]);
                                let none = Tensor::ABSENT;
                                let io = [x, w, none, none, y, none, none, none];
                                let p = param_words(&linear::Params::default());
                                call::<Linear>(&io, p, Step { rows: 1, ..Step::default() }, &mut scratch);
                            }
                        });
                        (tasks * threads * n * k * dtype.size_bytes()) as f64 / seconds / 1e9
                    }),
                });
            }
        }
    }
    report(lines);
}

/// Products of few rows: what a step of a batch does, or a pass that verifies guesses. As fast as memory, or as the
/// products.
fn few() {
    let bytes = 600usize << 20;
    let weights = Memory::new(bytes, 0x3c10_bc20_3c30_3c40);
    let x = Memory::new(1 << 20, 0x3f10_0000_bf00_0000);
    let y = Memory::new(8 << 20, 0);
    let mut lines = Vec::new();
    for isa in Isa::available().iter().filter(|isa| **isa != Isa::PORTABLE) {
        for dtype in [DType::Bf16, DType::Q8, DType::Q4, DType::Mx4] {
            for (k, rows) in [1024, 3072].into_iter().flat_map(|k| [1, 2, 4, 5, 6, 8, 12, 16].map(|rows| (k, rows))) {
                let (weights, x, y) = (&weights, &x, &y);
                let row_bytes = dtype.tensor_bytes(&[k]) as usize;
                lines.push(Line {
                    name: format!("{rows} rows, {dtype} k={k}, 1 thread, {}", isa.name()),
                    unit: "GB/s",
                    round: Box::new(move || {
                        let n = (512 << 10) / row_bytes;
                        let tasks = bytes / (n * row_bytes);
                        let seconds = timed(1, |_| {
                            let mut scratch = Scratch::with_isa(*isa);
                            let (x, y) = (x.tensor(DType::F32, 0, &[rows, k]), y.tensor(DType::F32, 0, &[rows, n]));
                            for task in 0..tasks {
                                let w =
                                    weights.matrix(dtype, task * n * row_bytes, [n, k], row_bytes / dtype.size_bytes());
                                let none = Tensor::ABSENT;
                                let io = [x, w, none, none, y, none, none, none];
                                let p = param_words(&linear::Params::default());
                                call::<Linear>(&io, p, Step { rows: rows as u32, ..Step::default() }, &mut scratch);
                            }
                        });
                        bytes as f64 / seconds / 1e9
                    }),
                });
            }
        }
    }
    report(lines);
}

fn gemm() {
    let weights = Memory::new(128 << 20, 0x3c10_bc20_3c30_3c40);
    let x = Memory::new(64 << 20, 0x3f10_0000_bf00_0000);
    let y = Memory::new(64 << 20, 0);
    let mut lines = Vec::new();
    for isa in Isa::available() {
        use linear::Order::{Free, Lanes, Prompt, Rounded};
        for (dtype, rows, n, k, order) in [
            (DType::Bf16, 512, 256, 1024, Lanes),
            (DType::Bf16, 512, 256, 3072, Lanes),
            (DType::Bf16, 512, 128, 12288, Lanes),
            (DType::Bf16, 64, 256, 4096, Lanes),
            (DType::Bf16, 4, 256, 4096, Lanes),
            (DType::Bf16, 512, 256, 1024, Free),
            (DType::Bf16, 128, 1024, 1024, Free),
            (DType::Bf16, 128, 1024, 3072, Free),
            (DType::Bf16, 32, 1024, 1024, Free),
            (DType::F32, 512, 256, 1024, Lanes),
            (DType::F32, 512, 256, 1024, Free),
            (DType::F32, 128, 192, 384, Lanes),
            (DType::F32, 128, 192, 384, Free),
            (DType::F32, 128, 192, 1536, Lanes),
            (DType::F32, 128, 192, 1536, Free),
            (DType::F32, 16, 192, 384, Lanes),
            (DType::F32, 16, 192, 384, Free),
            (DType::F32, 48, 192, 384, Free),
            (DType::F32, 64, 384, 384, Free),
            (DType::F32, 64, 1536, 384, Free),
            (DType::F32, 64, 384, 1536, Free),
            (DType::F32, 128, 1024, 1024, Free),
            (DType::F32, 4, 192, 384, Free),
            (DType::F16, 128, 1024, 1024, Lanes),
            (DType::F16, 128, 1024, 1024, Free),
            (DType::Bf16, 128, 1024, 1024, Rounded),
            (DType::Bf16, 128, 1024, 3072, Rounded),
            (DType::Bf16, 32, 1024, 1024, Rounded),
            (DType::Q8, 128, 1024, 1024, Lanes),
            (DType::Q8, 128, 1024, 1024, Prompt),
            (DType::Q8, 128, 1024, 3072, Prompt),
            (DType::Q8, 32, 1024, 1024, Lanes),
            (DType::Q8, 32, 1024, 1024, Prompt),
            (DType::Q4, 128, 1024, 1024, Lanes),
            (DType::Q4, 128, 1024, 1024, Prompt),
            (DType::Q4, 128, 1024, 3072, Prompt),
            (DType::Q4, 32, 1024, 1024, Lanes),
            (DType::Q4, 32, 1024, 1024, Prompt),
        ] {
            let (weights, x, y) = (&weights, &x, &y);
            let row_bytes = dtype.tensor_bytes(&[k]) as usize;
            lines.push(Line {
                name: format!("gemm {dtype} {rows}x{n}x{k}, {order:?}, 1 thread, {}", isa.name()),
                unit: "GFLOP/s",
                round: Box::new(move || {
                    let tasks = if *isa == Isa::PORTABLE { 1 } else { 8 };
                    let seconds = timed(1, |_| {
                        let mut scratch = Scratch::with_isa(*isa);
                        for task in 0..tasks {
                            let w = weights.matrix(dtype, task * n * row_bytes, [n, k], row_bytes / dtype.size_bytes());
                            let x = x.tensor(DType::F32, 0, &[rows, k]);
                            let y = y.tensor(DType::F32, 0, &[rows, n]);
                            let none = Tensor::ABSENT;
                            let io = [x, w, none, none, y, none, none, none];
                            let p = param_words(&linear::Params { order: order as u32, ..Default::default() });
                            call::<Linear>(&io, p, Step { rows: rows as u32, ..Step::default() }, &mut scratch);
                        }
                    });
                    (2 * tasks * rows * n * k) as f64 / seconds / 1e9
                }),
            });
        }
    }
    report(lines);
}

fn attend() {
    let (n_kv, d) = (8, 128);
    let bytes = 1200usize << 20;
    let cache = Memory::new(bytes, 0x3c10_bc20_3c30_3c40);
    let q = Memory::new(64 << 20, 0x3f10_0000_bf00_0000);
    let y = Memory::new(64 << 20, 0);
    let words = &cache.0;
    let mut lines = vec![Line {
        name: "read, 1 thread".into(),
        unit: "GB/s",
        round: Box::new(move || {
            let seconds = timed(1, |_| {
                std::hint::black_box(read(bytemuck::cast_slice(words)));
            });
            bytes as f64 / seconds / 1e9
        }),
    }];
    let params = param_words(&attention::Params {
        scale: 0.09,
        window: attention::ALL,
        ahead: 0,
        splits: 1,
        ..Default::default()
    });
    for isa in Isa::available() {
        for (context, group, dtype) in [
            (512, 2, DType::Bf16),
            (4096, 1, DType::Bf16),
            (4096, 2, DType::Bf16),
            (4096, 4, DType::Bf16),
            (4096, 8, DType::Bf16),
            (4096, 2, DType::F16),
        ] {
            let (cache, q, y) = (&cache, &q, &y);
            lines.push(Line {
                name: format!("attention {dtype}, t={context}, group {group}, {}", isa.name()),
                unit: "GB/s",
                round: Box::new(move || {
                    let half = n_kv * context * d;
                    let layers = (600usize << 20) / (4 * half);
                    let seconds = timed(1, |_| {
                        let mut scratch = Scratch::with_isa(*isa);
                        let q = q.tensor(DType::F32, 0, &[1, n_kv, group, d]);
                        let y = y.tensor(DType::F32, 0, &[1, n_kv, group, d]);
                        for layer in 0..layers {
                            let k = cache.tensor(dtype, 2 * layer * half, &[n_kv, context, d]);
                            let v = cache.tensor(dtype, (2 * layer + 1) * half, &[n_kv, context, d]);
                            let step = Step { first_pos: context as u32 - 1, rows: 1, ..Step::default() };
                            call::<Attention>(&[q, k, v, y, Tensor::ABSENT], params, step, &mut scratch);
                        }
                    });
                    (layers * 4 * half) as f64 / seconds / 1e9
                }),
            });
        }
        use linear::Order::{Lanes, Rounded};
        for (dtype, before, rows, group, n_kv, d, window, ahead, order) in [
            (DType::Bf16, 0, 512, 2, 8, 128, attention::ALL, 0, Lanes),
            (DType::Bf16, 0, 128, 2, 8, 128, attention::ALL, 0, Rounded),
            (DType::Bf16, 384, 128, 2, 8, 128, attention::ALL, 0, Rounded),
            (DType::Bf16, 1920, 128, 2, 8, 128, attention::ALL, 0, Rounded),
            (DType::Bf16, 1920, 128, 4, 8, 64, attention::ALL, 0, Rounded),
            (DType::F32, 0, 128, 1, 12, 32, attention::ALL, attention::ALL, Lanes),
            (DType::F32, 0, 16, 1, 12, 32, attention::ALL, attention::ALL, Lanes),
            (DType::F32, 0, 1024, 1, 12, 64, attention::ALL, attention::ALL, Lanes),
            (DType::F32, 0, 1024, 1, 12, 64, 65, 64, Lanes),
        ] {
            let (cache, q, y) = (&cache, &q, &y);
            lines.push(Line {
                name: format!(
                    "attention {dtype}, {rows} rows after {before}, {n_kv}x{group}x{d}, {window}+{ahead}, {order:?}, {}",
                    isa.name()
                ),
                unit: "GFLOP/s",
                round: Box::new(move || {
                    let order = order as u32;
                    let params = attention::Params { scale: 0.09, window, ahead, splits: 1, order, ..Default::default() };
                    let context = before + rows;
                    let seconds = timed(1, |_| {
                        let mut scratch = Scratch::with_isa(*isa);
                        let q = q.tensor(DType::F32, 0, &[rows, n_kv, group, d]);
                        let y = y.tensor(DType::F32, 0, &[rows, n_kv, group, d]);
                        let k = cache.tensor(dtype, 0, &[n_kv, context, d]);
                        let v = cache.tensor(dtype, n_kv * context * d, &[n_kv, context, d]);
                        let step = Step { first_pos: before as u32, rows: rows as u32, ..Step::default() };
                        call::<Attention>(&[q, k, v, y, Tensor::ABSENT], param_words(&params), step, &mut scratch);
                    });
                    let of_row = |row| params.seen([before as u32, rows as u32], row as u32);
                    let seen: usize = (0..rows).map(of_row).map(|(first, end)| (end - first) as usize).sum();
                    (4 * n_kv * group * d * seen) as f64 / seconds / 1e9
                }),
            });
        }
    }
    report(lines);
}

fn main() {
    let chosen: Vec<String> = std::env::args().skip(1).take_while(|arg| arg != "--").collect();
    let wanted = |name: &str| chosen.is_empty() || chosen.iter().any(|c| c == name);
    println!(
        "best instruction set: {}; medians of {ROUNDS} interleaved rounds (lowest to highest)\n",
        Isa::best().name()
    );
    if wanted("gemv") {
        gemv();
    }
    if wanted("few") {
        few();
    }
    if wanted("gemm") {
        gemm();
    }
    if wanted("attention") {
        attend();
    }
}
