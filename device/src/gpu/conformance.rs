//! Every GPU body against its kernel's reference, on the simulated GPU: random shapes with odd tails, rows that start
//! anywhere, views with gaps, all float types, random schedules. Nothing outside an operand's box may be touched,
//! nothing read-only written, no output read before it is written; gaps inside a box hold NaN.

use super::Call;
use super::math::short_scale;
use super::sync::Gpu;
use super::tiles::{self, Lists, Tiles};
use super::turn::{self, Seen};
use super::wide;
use crate::arch::simt::{Access, Allocation, Options, Report, launch};
use crate::arch::{LaunchBlock, atomic, thread};
use crate::block::Block;
use crate::io::{self, Tensor};
use crate::kernels::decode_attention::MAX_QUERY;
use crate::kernels::routing::{Counting, Weighting};
use crate::kernels::*;
use crate::turns::records;
use crate::worker::ImageView;
use bytemuck::Zeroable;
use perpetua_shared::control::{Control, NO_PROGRAM};
use perpetua_shared::dtype::{Q4_BLOCK, Q8};
use perpetua_shared::image::{ProgramDesc, TOKEN_LOOP, VERIFIES};
use perpetua_shared::launch::{TILE_BARRIERS, TILE_BYTES};
use perpetua_shared::task::Operand;
use perpetua_shared::{BindingId, DType, DataOp, Fault, FaultCode, PrefetchOp, Step, TaskDesc, TaskFlags, flag};

/// Types of weights in fewer bits.
const FEWER_BITS: [DType; 4] = [DType::Q8, DType::Q4, DType::Mx4, DType::Int4];

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    fn below(&mut self, n: u32) -> u32 {
        (self.next() % u64::from(n)) as u32
    }

    fn one_to(&mut self, n: u32) -> u32 {
        1 + self.below(n)
    }

    /// Roughly normal.
    fn float(&mut self) -> f32 {
        (0..4).map(|_| self.next() as f32 / u64::MAX as f32 - 0.5).sum::<f32>() * 1.7
    }

    fn dtype(&mut self) -> DType {
        [DType::F32, DType::Bf16, DType::F16][self.below(3) as usize]
    }

    /// How many positions attention sees up to a row's own, and after it: all, or up to so many.
    fn seen(&mut self, most: u32) -> [u32; 2] {
        let window = self.some_window(most);
        [window, if self.flip() { 0 } else { self.some_window(most) }]
    }

    /// All positions, or up to so many.
    fn some_window(&mut self, most: u32) -> u32 {
        if self.flip() { attention::ALL } else { self.one_to(most) }
    }

    /// The number of an activation.
    fn activation(&mut self) -> u32 {
        use linear::Activation::*;
        [None, Gelu, Silu, Relu, GeluTanh, Capped(0.75)][self.below(6) as usize].number()
    }

    /// How many pairs of a head of `d` elements are turned: all, or some.
    fn turned_pairs(&mut self, d: u32) -> u32 {
        if d > rope::MOST_IN_PART || self.flip() { d / 2 } else { self.below(d / 2) }
    }

    fn flip(&mut self) -> bool {
        self.next() & 1 == 0
    }
}

/// The record of a task that stands alone, with operand `i` in the binding at `bindings[i]`.
fn turn_of(task: &TaskDesc, operands: &[Operand], bindings: &[u64]) -> Vec<u32> {
    let view = ImageView {
        programs: &[],
        tasks: &[*task],
        operands,
        events: &[],
        waits: &[],
        triggers: &[],
        list_heads: &[0, 1, 1],
        lists: &[0],
        n_workers: 1,
    };
    records(&view, bindings, &vec![0; bindings.len()])
}

/// What a launch has to know of to fetch a task by its record.
fn descriptors(turn: &[u32]) -> Allocation {
    // SAFETY: callers keep it until the launch has ended, and nobody writes it.
    unsafe { Allocation::new("the task", turn.as_ptr().cast_mut().cast(), size_of_val(turn), Access::Constant) }
}

/// One task and its memory: a binding per operand.
struct Case {
    task_type: u16,
    params: [u32; 8],
    operands: Vec<Operand>,
    memory: Vec<Vec<u128>>,
    step: Step,
    row_first: u32,
    block: u32,
    split: u32,
    tolerance: f32,
    /// Operands that tensor cores take as bf16: the reference takes them as what they are rounded to.
    rounded: &'static [usize],
    /// Whether a warpgroup does, which takes of scales of weights in 8 bits what [`short_scale`] leaves.
    by_warpgroup: bool,
    /// Of the schedule.
    seed: u64,
    /// What a loader brings of the operands, if one does, and the memory there is for it.
    data: Vec<DataOp>,
    tile_bytes: u32,
    /// Of it what the body has for itself, at the beginning.
    beside: u32,
    /// Threads of the blocks to run it with.
    threads: &'static [u32],
    report: Report,
    /// Whether it is a case of decoding, which reads every byte that its cost says, and no other.
    counts: bool,
    /// What the body has left of the operands, with the last number of threads.
    made: Vec<Vec<u128>>,
}

/// The only worker's copies, for a loader of its own.
struct OneList<'a> {
    data: &'a [DataOp],
    bindings: *const u64,
}

impl Lists for OneList<'_> {
    fn data(&self, _: u32) -> (*const DataOp, u32) {
        (self.data.as_ptr(), self.data.len() as u32)
    }

    fn prefetches(&self, _: u32) -> (*const PrefetchOp, u32) {
        (core::ptr::null(), 0)
    }

    fn goes_ahead(&self) -> bool {
        true
    }

    fn binding(&self, binding: u32, _: u32) -> *const u8 {
        // SAFETY: the launch's table has an entry for each operand.
        core::ptr::with_exposed_provenance(unsafe { *self.bindings.add(binding as usize) } as usize)
    }

    fn pace(&self) -> *mut u32 {
        core::ptr::null_mut()
    }
}

impl Case {
    fn new<K: MacroKernel + Numbered>(params: K::Params) -> Case {
        Case {
            task_type: K::TASK_TYPE,
            params: param_words(&params),
            operands: Vec::new(),
            memory: Vec::new(),
            step: Step { rows: u32::MAX, ..Step::default() },
            row_first: 0,
            block: 0,
            split: 0,
            tolerance: K::TOLERANCE,
            rounded: &[],
            by_warpgroup: false,
            seed: 0,
            data: Vec::new(),
            tile_bytes: 0,
            beside: 0,
            threads: &[64, 32, 96],
            report: Report::default(),
            counts: false,
            made: Vec::new(),
        }
    }

    /// A matrix of weights in fewer bits, or a stack of them.
    fn push_packed(&mut self, random: &mut Random, dtype: DType, extent: &[u32]) {
        let lines = dtype.lines().expect("fewer bits");
        let [outer @ .., k] = extent else { panic!("a matrix at least") };
        let (row, k_elems) = (lines.row_bytes(*k as usize), *k as usize);
        let rows = outer.iter().product::<u32>() as usize;
        let mut operand = Operand {
            binding: BindingId(self.operands.len() as u32),
            dtype: dtype as u16,
            rank: extent.len() as u8,
            offset_bytes: 64 * u64::from(random.below(3)),
            ..Operand::ABSENT
        };
        operand.extent[..extent.len()].copy_from_slice(extent);
        let mut apart = row as u32;
        for dim in (0..outer.len()).rev() {
            operand.stride_elems[dim] = apart;
            apart *= extent[dim];
        }
        let first = operand.offset_bytes as usize;
        let mut memory = vec![u128::MAX; (first + row * rows + 64).div_ceil(16)];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut memory);
        for row in bytes[first..].chunks_exact_mut(row).take(rows) {
            for line in 0..k_elems.div_ceil(lines.elems) {
                let [at, scales] = lines.at(line);
                let here = lines.elems.min(k_elems - line * lines.elems);
                if dtype == DType::Q8 {
                    for (i, byte) in row[at..at + lines.elems].iter_mut().enumerate() {
                        *byte = if i < here { random.below(255) as i8 as u8 } else { 0 };
                    }
                    row[scales..scales + 4].copy_from_slice(&(random.float() / 512.0).to_le_bytes());
                } else {
                    row[at..at + 64].fill_with(|| random.below(256) as u8);
                    for block in 0..4 {
                        let scale = match dtype {
                            _ if block * Q4_BLOCK >= here => 0.0,
                            DType::Mx4 => 2f32.powi(-5 - random.below(6) as i32),
                            _ => random.float() / 256.0,
                        };
                        row[scales + 2 * block..][..2].copy_from_slice(&half::bf16::from_f32(scale).to_le_bytes());
                    }
                }
            }
        }
        self.operands.push(operand);
        self.memory.push(memory);
        self.seed = random.next();
    }

    /// A weight matrix that bulk copies can carry.
    fn push_carried(&mut self, random: &mut Random, dtype: DType, n: u32, k: u32) {
        if dtype.lines().is_some() {
            return self.push_packed(random, dtype, &[n, k]);
        }
        self.floats(random, dtype, &[n, k]);
        let operand = self.operands.last_mut().expect("just pushed");
        operand.offset_bytes = operand.offset_bytes.next_multiple_of(16);
        operand.stride_elems[0] = k;
        let bytes = (operand.offset_bytes + operand.span_bytes() + 64) as usize;
        let memory = self.memory.last_mut().expect("just pushed");
        *memory = vec![u128::MAX; bytes.div_ceil(16)];
        // SAFETY: the box was just given room.
        let tensor = unsafe { Tensor::new(memory.as_mut_ptr().cast(), operand) };
        (0..n * k).for_each(|at| tensor.set([(at / k) as usize, (at % k) as usize], random.float()));
    }

    /// A norm of `x`, whose weights may be in several rows already, or none.
    fn maybe_norm(&mut self, random: &mut Random, rows: u32, k: u32) {
        let may_be_weighted = [Linear::TASK_TYPE, GatedLinear::TASK_TYPE].contains(&self.task_type);
        if random.flip() || rows > 1 && !may_be_weighted {
            self.absent();
        } else if rows == 1 {
            let dtype = random.dtype();
            self.floats(random, dtype, &[k]);
        } else {
            let most = [5, 150][random.below(2) as usize];
            let parts = random.one_to(most);
            let of_part = k as f32 / parts as f32;
            self.push(random, DType::F32, &[rows, parts], |random| of_part * (0.5 + random.float().abs()));
            if self.task_type == Linear::TASK_TYPE {
                let params = params::<linear::Params>(&self.params);
                self.params = param_words(&linear::Params { is_weighted: 1, eps: 1e-3, ..params });
            } else {
                let params = params::<gated_linear::Params>(&self.params);
                self.params = param_words(&gated_linear::Params { is_weighted: 1, eps: 1e-3, ..params });
            }
        }
    }

    /// Plans a ring of `capacity` bytes, or of as many as it takes for a step to be under way while the one before is
    /// held, through which matrices `slots` go, `tile` bytes at most of each at a time.
    fn stream(&mut self, slots: &[usize], tile: u32, capacity: u32) {
        let capacity = self.beside + capacity.max(3 * tile * slots.len() as u32);
        self.tile_bytes = capacity;
        let first = &self.operands[slots[0]];
        let (rows, k) = if first.rank == 1 { (1, first.extent[0]) } else { (first.extent[0], first.extent[1]) };
        let row = first.dtype().expect("weights").tensor_bytes(&[k as usize]) as u32;
        let segments = if first.rank == 2 { linear::segments(self.task_type, &self.params) } else { 1 };
        // Segments of all rows, whole rows, or pieces of one.
        let mut pieces = Vec::new();
        if segments > 1 {
            for from in (0..row).step_by(tile as usize) {
                pieces.extend((0..rows).map(|n| (n * row + from, tile.min(row - from))));
            }
        } else if row <= tile {
            let all = row * rows;
            pieces
                .extend((0..all).step_by((tile / row * row) as usize).map(|at| (at, (tile / row * row).min(all - at))));
        } else {
            for start in (0..rows).map(|n| n * row) {
                pieces.extend((0..row).step_by(tile as usize).map(|at| (start + at, tile.min(row - at))));
            }
        }
        let last = self.data.last().map(|op| (op.dest_offset_bytes + op.bytes, op.after));
        let (mut head, mut after) = last.unwrap_or((self.beside, 0));
        let steps = self.data.last().map_or(0, |op| op.used_by + 1);
        for (used_by, (at, bytes)) in (steps..).zip(pieces) {
            for slot in slots {
                if head + bytes > capacity {
                    head = self.beside;
                }
                // Everything as old as the youngest copy whose bytes or barrier this one takes must have been read.
                let taken =
                    |op: &&DataOp| op.dest_offset_bytes < head + bytes && head < op.dest_offset_bytes + op.bytes;
                let under = self.data.iter().rfind(taken).map_or(0, |op| op.used_by + 1);
                let barrier =
                    self.data.len().checked_sub(TILE_BARRIERS as usize).map_or(0, |at| self.data[at].used_by + 1);
                after = after.max(under).max(barrier);
                assert!(used_by == steps || after < used_by, "a step that waits for the one before it");
                self.data.push(DataOp {
                    source_offset_bytes: self.operands[*slot].offset_bytes + u64::from(at),
                    source: *slot as u32,
                    bytes,
                    dest_offset_bytes: head,
                    after,
                    used_by,
                    barrier: (self.data.len() as u32 % TILE_BARRIERS) as u16,
                    ahead: 0,
                });
                head += bytes;
            }
        }
    }

    /// An operand of `extent`, somewhere in a binding full of NaN, its elements given by `value`.
    fn push(&mut self, random: &mut Random, dtype: DType, extent: &[u32], value: impl FnMut(&mut Random) -> f32) {
        self.push_placed(random, dtype, extent, value, false);
    }

    /// [`push`](Case::push), all of whose rows begin on sixteen bytes where `whole`.
    fn push_placed(
        &mut self,
        random: &mut Random,
        dtype: DType,
        extent: &[u32],
        mut value: impl FnMut(&mut Random) -> f32,
        whole: bool,
    ) {
        let rank = extent.len();
        let mut operand = Operand {
            binding: BindingId(self.operands.len() as u32),
            dtype: dtype as u16,
            rank: rank as u8,
            offset_bytes: u64::from(random.below(20)) * dtype.size_bytes() as u64,
            ..Operand::ABSENT
        };
        let aligned = whole || random.flip();
        if aligned {
            operand.offset_bytes = operand.offset_bytes / 16 * 16;
        }
        let mut stride = 1;
        for dim in (0..rank).rev() {
            operand.extent[dim] = extent[dim];
            operand.stride_elems[dim] = stride;
            stride *= extent[dim];
            if dim + 1 == rank && aligned || whole {
                stride = stride.next_multiple_of(8);
            } else if random.flip() {
                stride += random.below(5);
            }
        }
        let bytes = operand.offset_bytes + operand.span_bytes() + 64;
        let mut memory = vec![u128::MAX; (bytes as usize).div_ceil(16)];
        // SAFETY: the box was just given room.
        let tensor = unsafe { Tensor::new(memory.as_mut_ptr().cast(), &operand) };
        indices(&operand).for_each(|index| tensor.set(index, value(random)));
        self.operands.push(operand);
        self.memory.push(memory);
        self.seed = random.next();
    }

    fn floats(&mut self, random: &mut Random, dtype: DType, extent: &[u32]) {
        self.push(random, dtype, extent, Random::float);
    }

    fn maybe(&mut self, random: &mut Random, extent: &[u32]) {
        if random.flip() {
            let dtype = random.dtype();
            self.floats(random, dtype, extent);
        } else {
            self.absent();
        }
    }

    /// For a [`Linear`], now and then: what is added to its outputs, or what these are multiplied with.
    fn maybe_residual(&mut self, random: &mut Random, extent: &[u32]) {
        self.maybe(random, extent);
        if self.operands[linear::slot::RESIDUAL].is_present() && random.flip() {
            self.params[0] |= linear::MULTIPLIES;
        }
    }

    /// For a product into f32, now and then: of one row, where the best of its outputs goes, of several, what is made
    /// for a product after a norm. Else nothing.
    fn maybe_best(&mut self, random: &mut Random, rows: u32, n: u32) {
        let is_f32 = self.operands[linear::slot::Y].dtype() == Some(DType::F32);
        if rows == 1 && is_f32 && random.flip() {
            self.block = random.below(3);
            let best = argmax::Params { blocks: 3, len_elems: 3 * n };
            let params = params::<linear::Params>(&self.params);
            self.params = param_words(&linear::Params { best, ..params });
            self.push(random, DType::F32, &[1], |_| 7.0);
            self.push(random, DType::I32, &[1], |_| 7.0);
            self.absent();
            self.absent();
        } else if rows > 1 && is_f32 && n <= linear::MOST_WEIGHTED && random.flip() {
            self.push(random, DType::F32, &[rows, 1], |_| 7.0);
            self.absent();
            let (weights, weighted) = (random.dtype(), random.dtype());
            self.floats(random, weights, &[n]);
            self.push(random, weighted, &[rows, n], |_| 7.0);
        } else {
            (0..4).for_each(|_| self.absent());
        }
    }

    /// Sinks of queries of `heads` x `group`, or none: as large as scores, far above all of them, or far below; each a
    /// number in f16, too.
    fn maybe_sinks(&mut self, random: &mut Random, [heads, group]: [u32; 2], is_causal: bool) {
        if !is_causal || random.below(4) == 0 {
            return self.absent();
        }
        let dtype = random.dtype();
        self.push(random, dtype, &[heads, group], |random| match random.below(8) {
            0 => 60.0,
            1 => -60.0,
            2 => 1e4 * random.float(),
            _ => 2.0 * random.float(),
        });
    }

    fn absent(&mut self) {
        self.operands.push(Operand::ABSENT);
        self.memory.push(vec![0; 1]);
    }

    /// Runs the reference and the GPU body on equal memories and compares all of it. Both must fault alike.
    fn judge(mut self, what: &str) {
        self.compare(what);
    }

    fn compare(&mut self, what: &str) {
        let spec = Spec::of(self.task_type).expect("a kernel of the list");
        spec.check(&self.params, &self.operands).expect(what);
        self.flag(spec);
        let flag = flag::of_run(self.step.program_runs);
        let reads_early = !spec.early_reads.is_empty() && self.seed & 1 == 0;
        let task = TaskDesc {
            task_type: self.task_type,
            flags: if reads_early { TaskFlags::READS_EARLY } else { 0 },
            params: self.params,
            row_first: self.row_first,
            block: [self.block, self.split, 0],
            operand_count: self.operands.len() as u32,
            // Without which no record would say that the task is a product of one row.
            tiles: self.data.len() as u32,
            ..TaskDesc::zeroed()
        };
        let program = |max_rows, kind| ProgramDesc { max_rows, kind, ..ProgramDesc::zeroed() };
        let programs = [program(1, TOKEN_LOOP), program(DRAFT_ROWS, VERIFIES)];
        let mut device = self.memory.clone();
        let tensors = |memory: &mut [Vec<u128>], operands: &[Operand]| -> Vec<Tensor> {
            let pairs = memory.iter_mut().zip(operands);
            // SAFETY: each operand has its own memory.
            pairs.map(|(m, operand)| unsafe { Tensor::new(m.as_mut_ptr().cast(), operand) }).collect()
        };
        let expected = tensors(&mut self.memory, &self.operands);
        let mut of_reference = expected.clone();
        let as_taken = |slot: usize| as_brain(&self.operands[slot], &expected[slot], self.by_warpgroup);
        let mut rounded: Vec<_> = self.rounded.iter().map(|&slot| (slot, as_taken(slot))).collect();
        for (slot, (operand, memory)) in &mut rounded {
            // SAFETY: the operand's own memory, as long as its type says.
            of_reference[*slot] = unsafe { Tensor::new(memory.as_mut_ptr().cast(), operand) };
        }
        let outcome =
            (spec.reference)(&io::Call { tensors: &of_reference, task: &task, step: &self.step, programs: &programs });

        // What is flagged and read: another block writes it, after what a pass before has left there.
        let mut late = Vec::new();
        for (slot, (operand, tensor)) in
            spec.slots.iter().zip(self.operands.iter().zip(tensors(&mut device, &self.operands)))
        {
            if operand.is_flagged != 0 && slot.usage == Use::Read {
                let address = |index: [usize; 4]| -> u64 {
                    let at = index.iter().zip(operand.stride_elems).map(|(i, stride)| *i as u64 * u64::from(stride));
                    operand.offset_bytes + 4 * at.sum::<u64>()
                };
                let words = indices(operand).map(|index| (operand.binding.idx(), address(index), tensor.get(index)));
                late.extend(words);
            }
        }
        // In any order: a thread that writes has no turn in between, so what it writes comes together.
        let mut random = Random(self.seed ^ 0x1a7e);
        for at in (1..late.len()).rev() {
            late.swap(at, random.below(at as u32 + 1) as usize);
        }
        let n_blocks = if late.is_empty() { 1 } else { 2 };
        let mut bindings: Vec<u64> = device.iter_mut().map(|m| m.as_mut_ptr().expose_provenance() as u64).collect();
        let table = bindings.as_mut_ptr();
        for &threads in self.threads {
            if threads != self.threads[0] && self.updates() {
                continue;
            }
            let stale = flag::mark(f32::NAN, flag::of_run(self.step.program_runs.wrapping_sub(1)));
            for (binding, at, _) in &late {
                let word = core::ptr::with_exposed_provenance_mut::<u32>((bindings[*binding] + at) as usize);
                // SAFETY: an element of an operand's own memory, which nothing else touches now.
                unsafe { word.write(stale) };
            }
            let late: Vec<(u64, f32)> =
                late.iter().map(|(binding, at, value)| (bindings[*binding] + at, *value)).collect();
            let faults = std::cell::RefCell::new(Vec::new());
            // SAFETY: the table and the operands' memory outlive the launch, and only it touches them.
            let mut allocations =
                vec![unsafe { Allocation::new("bindings", table.cast(), 8 * self.operands.len(), Access::Constant) }];
            for (slot, (operand, base)) in spec.slots.iter().zip(self.operands.iter().zip(&bindings)) {
                let access = match slot.usage {
                    _ if operand.is_flagged != 0 => Access::Atomic,
                    Use::Read => Access::Constant,
                    Use::Write => Access::Unwritten,
                    Use::Update | Use::Append => Access::Written,
                };
                let start = core::ptr::with_exposed_provenance_mut((*base + operand.offset_bytes) as usize);
                // SAFETY: as above; the box lies inside its memory.
                let allocation = unsafe { Allocation::new(slot.name, start, operand.span_bytes() as usize, access) };
                allocations.push(allocation.counted());
            }
            let mut fault = Fault::default();
            let record = &raw mut fault;
            // SAFETY: as above.
            allocations.push(unsafe {
                Allocation::new("the fault record", record.cast(), size_of::<Fault>(), Access::Written)
            });
            let data = self.data.as_mut_ptr();
            // SAFETY: as above.
            allocations.push(unsafe {
                Allocation::new("data", data.cast(), self.data.len() * size_of::<DataOp>(), Access::Constant)
            });
            let options = Options {
                service_warps: u32::from(!self.data.is_empty()),
                tile_bytes: self.tile_bytes,
                ..Options::new(n_blocks, threads, self.seed)
            };
            let turn = turn_of(&task, &self.operands, &bindings);
            allocations.push(descriptors(&turn));
            let n_data = self.data.len() as u32;
            let params = Gpu::params_alone(record);
            // SAFETY: a launch without events, which outlives it.
            let gpu = Gpu::new(unsafe { LaunchBlock::new(&params) });
            let lists = OneList { data: &self.data, bindings: table };
            let launched = launch(&options, allocations, || {
                let (me, block) = (thread::thread_idx(), Block { thread: thread::thread_idx(), threads });
                if thread::block_idx() == 1 {
                    for (address, value) in late.iter().skip(me as usize).step_by(thread::block_dim() as usize) {
                        let word = core::ptr::with_exposed_provenance_mut::<u32>(*address as usize);
                        // SAFETY: an element of an operand, which is only touched atomically.
                        unsafe { atomic::store_relaxed(word, flag::mark(*value, flag)) };
                    }
                    return;
                }
                // SAFETY: one thread makes the barriers, one loads, and the data ops have been planned.
                unsafe {
                    if n_data > 0 {
                        if me == 0 {
                            tiles::init(threads);
                        }
                        thread::sync_some(1, threads + 32);
                        if me >= threads {
                            if me == threads {
                                tiles::load(&lists, &gpu);
                            }
                            return;
                        }
                    }
                }
                let tiles = Tiles::new(&gpu, block.thread);
                // As if other tasks had tiles after this one's, where there is no room for what bodies do with all of
                // their memory.
                let others = u32::from(self.tile_bytes < TILE_BYTES);
                tiles.expect(others);
                if n_data > 0 {
                    // SAFETY: all threads of the task make this call.
                    unsafe { tiles.begin(&Step::default(), n_data, me == 0) };
                }
                tiles.begin_task(n_data);
                let program_runs = self.step.program_runs;
                let call = Call { program_runs, programs: &programs, tiles: Some(&tiles), launch: None };
                // SAFETY: every thread of the block makes these calls; the operands have been checked.
                let outcome = unsafe {
                    turn::fetch(turn.as_ptr(), turn.len() as u32, Seen::of(&self.step), &block);
                    block.sync();
                    run_gpu(&call, &block, || Ok(()))
                };
                if let Err(fault) = outcome {
                    faults.borrow_mut().push(fault);
                }
                if n_data > 0 {
                    assert_eq!(tiles.left(), 0, "the body takes all its tiles");
                    // SAFETY: see above.
                    unsafe { tiles.begin(&Step { program: NO_PROGRAM, ..Step::default() }, 0, me == 0) };
                }
            });
            match launched {
                Ok(report) => self.report = report,
                Err(error) => panic!("{what}: {error}\n{:?}", self.operands),
            }
            if self.counts {
                let read: u64 = self.report.read.iter().map(|(_, bytes)| bytes).sum();
                let cost = (spec.cost)(&self.params, &self.operands);
                assert_eq!(read, cost.bytes_read, "{what}: bytes read and their cost: {:?}", self.report.read);
            }
            let faults: Vec<Fault> = faults.into_inner();
            match outcome {
                Ok(()) => assert_eq!(faults, [], "{what}"),
                Err(fault) => assert_eq!(faults, vec![fault; threads as usize], "{what}: all threads leave"),
            }
            let got = tensors(&mut device, &self.operands);
            for (slot, (operand, (got, expected))) in
                spec.slots.iter().zip(self.operands.iter().zip(got.iter().zip(&expected)))
            {
                if !operand.is_present() {
                    continue;
                }
                for index in indices(operand) {
                    let (mut a, b) = (got.get(index), expected.get(index));
                    if operand.is_flagged != 0 {
                        // But for what neither writes.
                        let is_left = a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                        let is_marked = a.to_bits() & flag::MASK == flag;
                        assert!(is_left || is_marked, "{what}: {}{index:?} is flagged", slot.name);
                        a = flag::unmark(a.to_bits());
                    }
                    let step = match operand.dtype() {
                        Some(DType::Bf16) => 1.0 / 128.0,
                        Some(DType::F16) => 1.0 / 1024.0,
                        _ => 0.0,
                    };
                    let tolerance = self.tolerance + b.abs() * (self.tolerance + step);
                    assert!(
                        (a.is_nan() && b.is_nan()) || a == b || (a - b).abs() <= tolerance,
                        "{what}: {}{index:?} is {a}, expected {b} ({operand:?})",
                        slot.name
                    );
                }
            }
        }
        // Around the boxes nothing may have changed.
        for (i, operand) in self.operands.iter().enumerate().filter(|(_, o)| o.is_present() && o.rank > 0) {
            let before = operand.offset_bytes as usize;
            let after = before + operand.span_bytes() as usize;
            let bytes: &[u8] = bytemuck::cast_slice(&device[i]);
            assert!(bytes[..before].iter().all(|b| *b == 0xff) && bytes[after..].iter().all(|b| *b == 0xff), "{what}");
        }
        self.made = device;
    }

    /// Flags some of the operands that may be, in a pass of any number.
    fn flag(&mut self, spec: &Spec) {
        let mut random = Random(self.seed ^ 0xf1a6);
        self.step.program_runs = random.below(9);
        for &slot in spec.flagged {
            let operand = &mut self.operands[slot];
            operand.is_flagged = u8::from(operand.dtype() == Some(DType::F32) && random.flip());
            if spec.check(&self.params, &self.operands).is_err() {
                self.operands[slot].is_flagged = 0;
            }
            let operand = &self.operands[slot];
            if operand.is_flagged != 0 {
                // SAFETY: the operand's own memory.
                let tensor = unsafe { Tensor::new(self.memory[slot].as_mut_ptr().cast(), operand) };
                indices(operand).for_each(|at| tensor.set(at, flag::unmark(tensor.get(at).to_bits())));
            }
        }
    }

    fn updates(&self) -> bool {
        let spec = Spec::of(self.task_type).expect("a kernel of the list");
        spec.slots.iter().any(|slot| matches!(slot.usage, Use::Update | Use::Append))
    }
}

/// [`Random::float`], a number that bf16 has.
fn brain(random: &mut Random) -> f32 {
    half::bf16::from_f32(random.float()).to_f32()
}

/// The weights of a product, or of a gated one.
fn weights_of(gated: bool) -> &'static [usize] {
    if gated { &[gated_linear::slot::GATE, gated_linear::slot::UP] } else { &[linear::slot::W] }
}

/// `tensor`, the matrix or stack that `operand` is, of what bf16 has next to each element; of short scales, if it has
/// any, when `is_short`.
fn as_brain(operand: &Operand, tensor: &Tensor, is_short: bool) -> (Operand, Vec<u128>) {
    let mut rounded = Operand { offset_bytes: 0, dtype: DType::Bf16 as u16, ..*operand };
    let mut apart = 1;
    for dim in (0..operand.rank as usize).rev() {
        rounded.stride_elems[dim] = apart;
        apart *= operand.extent[dim];
    }
    let mut brains = vec![0u128; (rounded.span_bytes() as usize).div_ceil(16)];
    // SAFETY: the box was just given room.
    let to = unsafe { Tensor::new(brains.as_mut_ptr().cast(), &rounded) };
    for at @ [i, j, k, _] in indices(operand) {
        // Where elements of a row lie, their type says by the last index.
        let (mut value, row, column) =
            if operand.rank == 3 { (tensor.get([i, j, k]), [i, j], k) } else { (tensor.get([i, j]), [i, 0], j) };
        if is_short && tensor.dtype() == DType::Q8 {
            let [_, at] = Q8.at(column / Q8.elems);
            // SAFETY: the scale of the element's line.
            let scale = unsafe { tensor.address(row).add(at).cast::<f32>().read() };
            value = (value / scale).round() * short_scale(scale, 0.0).0;
        }
        to.set(at, value);
    }
    (rounded, brains)
}

/// Every index of `operand`'s box.
fn indices(operand: &Operand) -> impl Iterator<Item = [usize; 4]> {
    let e = operand.extent;
    let index = move |at: u32| [at / e[3] / e[2] / e[1], at / e[3] / e[2] % e[1], at / e[3] % e[2], at % e[3]];
    (0..operand.len_elems() as u32).map(move |at| index(at).map(|i| i as usize))
}

/// A test that judges so many random cases of each kernel, by a seed and a round, which says what kind of case it is.
macro_rules! judged {
    ($($name:ident: $cases:literal),* $(,)?) => {
        mod random {
            use super::Random;
            use crate::cpu::tests::cases;
            use proptest::prelude::*;

            $(proptest! {
                #![proptest_config(cases($cases))]
                #[test]
                fn $name(seed: u64, round in 0..$cases as usize) {
                    super::$name(&mut Random(seed), round);
                }
            })*
        }
    };
}

judged! {
    linear: 60,
    gated_linear: 30,
    tiled_linear: 40,
    thin_linear: 24,
    few_linear: 32,
    eight_linear: 64,
    four_linear: 64,
    packed_linear_of_rows: 40,
    long_linear: 48,
    segmented_linear: 24,
    merging_linear: 36,
    wide_linear: 16,
    warpgroup_linear: 24,
    norms: 30,
    embedding: 20,
    elementwise_select_pool: 40,
    rope: 150,
    attention: 24,
    attention_of_few: 40,
    attention_of_many: 16,
    split_attention: 40,
    decode_attention: 40,
    decode_attention_of_groups: 48,
    attention_merge: 40,
    splits_merged_are_the_whole: 40,
    argmax: 40,
    sample: 30,
    advance: 160,
    experts: 40,
    experts_in_fewer_bits: 40,
    routes_and_slots: 24,
    routed_linear: 24,
    routed_linear_in_shares: 6,
    causal_conv: 40,
    recurrence: 40,
    gated: 40,
}

/// Whether the pass is a sequence's first, which begins with nothing, or a later one.
fn some_first(random: &mut Random) -> u32 {
    if random.flip() { 0 } else { random.one_to(9) }
}

fn causal_conv(random: &mut Random, round: usize) {
    let rows = [1, random.one_to(7)][round % 2];
    let (n, taps) = (random.one_to(200), 1 + random.one_to([4, causal_conv::MAX_TAPS - 1][round / 2 % 2]));
    let mut case = Case::new::<CausalConv>(causal_conv::Params { activation: random.activation() });
    for extent in [[rows, n], [n, taps]] {
        let dtype = random.dtype();
        case.floats(random, dtype, &extent);
    }
    case.maybe(random, &[n]);
    case.maybe(random, &[rows, n]);
    case.maybe(random, &[rows, n]);
    case.floats(random, DType::F32, &[taps - 1, n]);
    let dtype = random.dtype();
    case.push(random, dtype, &[rows, n], |_| 7.0);
    case.step.first_pos = some_first(random);
    case.step.rows = random.below(rows + 1);
    case.judge("causal_conv");
}

fn recurrence(random: &mut Random, round: usize) {
    let rows = [1, random.one_to(9), 130 + random.below(9)][[0, 1, 0, 2][round % 4]];
    let (heads, group) = (random.one_to(2), random.one_to(2));
    // Every third time a head as models have them, in part.
    let (d_k, d_v) = if round.is_multiple_of(3) { (128, 16) } else { (random.one_to(128), random.one_to(70)) };
    let mut case = Case::new::<Recurrence>(recurrence::Params {});
    let dtype = random.dtype();
    case.floats(random, dtype, &[rows, heads, d_k]);
    case.floats(random, dtype, &[rows, heads, d_k]);
    case.floats(random, dtype, &[rows, heads, group, d_v]);
    case.floats(random, DType::F32, &[rows, heads, group]);
    case.maybe(random, &[rows, heads, group]);
    case.floats(random, dtype, &[heads, group]);
    case.push(random, dtype, &[heads, group], |random| 15.0 * random.float());
    case.floats(random, DType::F32, &[heads, group, d_v, d_k]);
    let dtype = random.dtype();
    case.push(random, dtype, &[rows, heads, group, d_v], |_| 7.0);
    case.maybe(random, &[heads, group]);
    case.step.first_pos = some_first(random);
    case.step.rows = random.below(rows + 1);
    case.judge("recurrence");
}

fn gated(random: &mut Random, round: usize) {
    let rows = [1, random.one_to(5)][round % 2];
    // Every fourth time a head alone, longer than the block.
    let (heads, d) =
        if round.is_multiple_of(4) { (1, random.one_to(1000)) } else { (random.one_to(4), random.one_to(300)) };
    let params = gated::Params { eps: 1e-5, is_silu: random.below(2), gates_first: random.below(2) };
    let mut case = Case::new::<Gated>(params);
    let dtype = random.dtype();
    case.floats(random, dtype, &[rows, heads, d]);
    case.maybe(random, &[d]);
    let gates = if random.below(3) == 0 { 1 } else { d };
    case.floats(random, dtype, &[rows, heads, gates]);
    let dtype = random.dtype();
    case.push(random, dtype, &[rows, heads, d], |_| 7.0);
    case.step.rows = random.below(rows + 1);
    case.judge("gated");
}

fn linear(random: &mut Random, round: usize) {
    let (rows, n) = (if round % 4 == 1 { 1 } else { random.one_to(6) }, random.one_to(9));
    let k = if round.is_multiple_of(3) { 1100 + random.below(300) } else { random.one_to(300) };
    let mut case =
        Case::new::<Linear>(linear::Params { activation: random.activation(), eps: 1e-5, ..Default::default() });
    for extent in [[rows, k], [n, k]] {
        let dtype = random.dtype();
        case.floats(random, dtype, &extent);
    }
    case.maybe(random, &[n]);
    case.maybe_residual(random, &[rows, n]);
    let dtype = random.dtype();
    case.push(random, dtype, &[rows, n], |_| 7.0);
    case.maybe_norm(random, rows, k);
    case.maybe_best(random, rows, n);
    case.step.rows = random.one_to(rows + 1);
    case.tolerance = 4e-4;
    case.counts = rows == 1;
    case.judge("linear");
}

fn gated_linear(random: &mut Random, round: usize) {
    let rows = match round % 4 {
        0 => 1,
        1 => random.one_to(40),
        _ => random.one_to(6),
    };
    let (n, k) = (random.one_to(9), random.one_to(400));
    let mut case = Case::new::<GatedLinear>(gated_linear::Params {
        activation: random.activation(),
        eps: 1e-5,
        ..Default::default()
    });
    // Where tensor cores may take many rows, they take them as bf16.
    let dtype = random.dtype();
    case.push(random, dtype, &[rows, k], if rows > wide::WIDE_ROWS { brain } else { Random::float });
    for extent in [[n, k], [n, k]] {
        let dtype = random.dtype();
        case.floats(random, dtype, &extent);
    }
    case.maybe(random, &[n]);
    case.maybe(random, &[n]);
    case.push(random, DType::F32, &[rows, n], |_| 7.0);
    case.maybe_norm(random, rows, k);
    case.step.rows = random.one_to(rows + 1);
    case.tolerance = 1e-3;
    case.counts = rows == 1;
    case.judge("gated_linear");
}

/// Weights from tiles: rows shorter and longer than a tile, rings that hold two tiles or all, one to sixteen rows of x.
fn tiled_linear(random: &mut Random, round: usize) {
    let dtype = random.dtype();
    let per_16 = 16 / dtype.size_bytes() as u32;
    let n = random.one_to(20);
    let k = per_16 * random.one_to(if round.is_multiple_of(4) { 120 } else { 20 });
    let tile = 16 * (1 + random.below(40));
    judge_tiled(random, dtype, [n, k], tile, round % 2 == 1, &[64, 32, 96]);
}

/// One row and bf16 weights in whole rows: the tensor cores', more rows than a warp keeps sums of among them.
fn thin_linear(random: &mut Random, round: usize) {
    let k = 32 * random.one_to(if round.is_multiple_of(6) { 128 } else { 20 });
    let n = random.one_to(if round % 4 == 1 { 400 } else { 60 });
    let n = if k > 1000 { n.min(40) } else { n };
    let tile = 2 * k * random.one_to(20);
    judge_tiled(random, DType::Bf16, [n, k], tile, round % 2 == 1, &[96, 224, 32]);
}

/// A few rows and bf16 weights in whole rows: the tensor cores', more rows of weights than sums have room for among
/// them, in tiles that are no eights; normed, weighted for the next norm or neither.
fn few_linear(random: &mut Random, round: usize) {
    let rows = 1 + random.one_to(linear::MOST_FEW - 1);
    let k = 32 * random.one_to(if round.is_multiple_of(6) { 128 } else { 20 });
    let n = random.one_to(if round % 4 == 1 { 300 } else { 60 });
    let n = if k > 1000 { n.min(40) } else { n };
    let tile = 2 * k * random.one_to(20);
    let gated = round % 2 == 1;
    let mut case = if gated {
        Case::new::<GatedLinear>(gated_linear::Params {
            activation: random.activation(),
            eps: 1e-5,
            ..Default::default()
        })
    } else {
        Case::new::<Linear>(linear::Params { activation: random.activation(), eps: 1e-5, ..Default::default() })
    };
    case.threads = &[224, 160];
    if gated {
        case.tolerance *= ((k as f32).sqrt() / 8.0).max(1.0);
    }
    case.push_carried(random, DType::Bf16, rows, k);
    for _ in 0..1 + u32::from(gated) {
        case.push_carried(random, DType::Bf16, n, k);
    }
    case.maybe(random, &[n]);
    if gated {
        case.maybe(random, &[n]);
    } else {
        case.maybe_residual(random, &[rows, n]);
    }
    let dtype = random.dtype();
    case.push(random, dtype, &[rows, n], |_| 7.0);
    case.maybe_norm(random, rows, k);
    if !gated {
        case.maybe_best(random, rows, n);
    }
    case.step.rows = random.one_to(rows);
    let spec = Spec::of(case.task_type).expect("a kernel of the list");
    case.beside = (spec.beside_tiles)(&case.params, &case.operands) as u32;
    let capacity = 4 * tile + 16 * random.below(400);
    case.stream(weights_of(gated), tile, capacity);
    case.compare("few linear");
    let weights = DType::Bf16.tensor_bytes(&[n as usize, k as usize]) * (1 + u64::from(gated));
    assert_eq!((case.report.bytes_copied, &case.report.stall), (weights, &None));
    assert!(case.report.warp_products > 0, "the tensor cores'");
}

/// One row and weights in 8 bits: the tensor cores', by lines in pairs or not; in registers, where it is long; one by
/// one, where its lines are not whole or a norm has no room.
fn eight_linear(random: &mut Random, round: usize) {
    let k = match round % 8 {
        0 => 64 * random.one_to(220),
        1 => random.one_to(700),
        2 => 16 * random.one_to(700),
        3 => 4096,
        _ => 64 * random.one_to(24),
    };
    let n = random.one_to(if k > 2000 { 40 } else { 200 });
    let tile = DType::Q8.tensor_bytes(&[k as usize]) as u32 * random.one_to(20);
    judge_tiled(random, DType::Q8, [n, k], tile, round / 8 % 2 == 1, &[96, 224, 32]);
}

/// As [`eight_linear`], in 4 bits, of lines of 128; now and then of the type that is experts' alone.
fn four_linear(random: &mut Random, round: usize) {
    let k = match round % 8 {
        0 => 128 * random.one_to(110),
        1 => random.one_to(700),
        2 => 32 * random.one_to(350),
        3 => [4096, 2048, 8192][round / 8 % 3],
        _ => 128 * random.one_to(20),
    };
    let n = random.one_to(if k > 2000 { 40 } else { 200 });
    let tile = DType::Q4.tensor_bytes(&[k as usize]) as u32 * random.one_to(20);
    let weights = [DType::Q4, DType::Q4, DType::Q4, DType::Int4, DType::Mx4][random.below(5) as usize];
    judge_tiled(random, weights, [n, k], tile, round / 8 % 2 == 1, &[96, 224, 32]);
}

/// Several rows, and one whose weights no loader brings.
fn packed_linear_of_rows(random: &mut Random, round: usize) {
    let weights = FEWER_BITS[round % 3];
    let rows = if (round / 3).is_multiple_of(4) { 1 } else { random.one_to(40) };
    let (n, k) = (random.one_to(60), random.one_to(400));
    let gated = random.flip();
    let mut case = if gated {
        Case::new::<GatedLinear>(gated_linear::Params {
            activation: random.activation(),
            eps: 1e-5,
            ..Default::default()
        })
    } else {
        Case::new::<Linear>(linear::Params { activation: random.activation(), eps: 1e-5, ..Default::default() })
    };
    let dtype = random.dtype();
    case.push(random, dtype, &[rows, k], if rows > 1 { brain } else { Random::float });
    for _ in 0..1 + u32::from(gated) {
        case.push_packed(random, weights, &[n, k]);
    }
    case.maybe(random, &[n]);
    if gated {
        case.maybe(random, &[n]);
    } else {
        case.maybe_residual(random, &[rows, n]);
    }
    case.push(random, DType::F32, &[rows, n], |_| 7.0);
    case.maybe_norm(random, rows, k);
    if !gated {
        case.maybe_best(random, rows, n);
    }
    case.step.rows = random.one_to(rows + 1);
    case.tolerance = 1e-3;
    if rows.min(case.step.rows) > 1 {
        case.rounded = weights_of(gated);
    }
    case.judge("a product with weights in fewer bits");
}

/// One row, longer than shared memory has room for or of no whole chunks: in registers, where there are threads enough
/// for it; of one matrix or two, with more rows of weights than sums have room for among them.
fn long_linear(random: &mut Random, round: usize) {
    let k = 8 * match round % 4 {
        0 => random.one_to(1792),
        1 => 1 + 2 * random.below(8),
        _ => random.one_to(400),
    };
    let n = random.one_to(if round % 4 == 1 { 1400 } else { 24 });
    let tile = 2 * k * random.one_to(3);
    let gated = random.flip();
    judge_tiled(random, DType::Bf16, [n, k], tile, gated, &[96, 224, 32]);
}

/// One row that is taken in segments, of a few elements or of as many as there are registers.
fn segmented_linear(random: &mut Random, round: usize) {
    let segments = 2 + random.below(3);
    let len = 8 * random.one_to(if round.is_multiple_of(3) { 1792 } else { 60 });
    // The last one has fewer, or as many.
    let k = (segments - 1) * len + 8 * (1 + random.below(len / 8));
    let len = linear::segment_len(k, segments);
    if (segments - 1) * len >= k {
        return;
    }
    let most = linear::LONG_SUMS / segments - 1;
    let n = if k < 1000 && round % 2 == 1 { 1 + random.below(most) } else { random.one_to(20) };
    let params = linear::Params { activation: random.activation(), segments, ..Default::default() };
    let mut case = Case::new::<Linear>(params);
    case.threads = &[224];
    case.push_carried(random, DType::F32, 1, k);
    case.push_carried(random, DType::Bf16, n, k);
    case.maybe(random, &[n]);
    case.maybe_residual(random, &[1, n]);
    case.push(random, DType::F32, &[1, n], |_| 7.0);
    case.absent();
    case.maybe_best(random, 1, n);
    case.step.rows = 1;
    case.tolerance *= ((k as f32).sqrt() / 64.0).max(1.0);
    let capacity = 4 * 2 * len + 16 * random.below(400);
    case.stream(&[linear::slot::W], 2 * len, capacity);
    case.counts = true;
    case.compare("segmented linear");
    assert_eq!((case.report.bytes_copied, &case.report.stall), (u64::from(n * k) * 2, &None));
}

/// A product of one row with matrices of `[n, k]`, which come in tiles of at most `tile` bytes.
fn judge_tiled(random: &mut Random, dtype: DType, [n, k]: [u32; 2], tile: u32, gated: bool, threads: &'static [u32]) {
    let mut capacity = 4 * tile + 16 * random.below(400);
    let x_dtype = if random.flip() { DType::F32 } else { random.dtype() };
    let mut case = if gated {
        Case::new::<GatedLinear>(gated_linear::Params {
            activation: random.activation(),
            eps: 1e-5,
            ..Default::default()
        })
    } else {
        Case::new::<Linear>(linear::Params { activation: random.activation(), eps: 1e-5, ..Default::default() })
    };
    case.threads = threads;
    if gated {
        // What one sum is off by is multiplied with the other, which is as large as the root of k, and more in one of
        // many.
        case.tolerance *= ((k as f32).sqrt() / 8.0).max(1.0);
    }
    // Rounding to whole numbers must not lose what is none.
    let none = if dtype.lines().is_some() && random.below(6) == 0 { random.below(k) } else { k };
    if none < k {
        // The reference's ReLU takes NaN for less than zero.
        case.params[0] = linear::Activation::None.number();
    }
    let mut at = 0;
    case.push(random, x_dtype, &[1, k], |random| {
        at += 1;
        if at == none + 1 { f32::NAN } else { random.float() }
    });
    for _ in 0..1 + u32::from(gated) {
        case.push_carried(random, dtype, n, k);
    }
    case.maybe(random, &[n]);
    if gated {
        case.maybe(random, &[n]);
    } else {
        case.maybe_residual(random, &[1, n]);
    }
    case.push(random, DType::F32, &[1, n], |_| 7.0);
    let normed = k <= MAX_NORMED && k.is_multiple_of(8) && random.flip();
    let mut norm_bytes = 0;
    if normed {
        let dtype = if dtype.lines().is_some() { [DType::F32, DType::Bf16][random.below(2) as usize] } else { dtype };
        case.push_carried(random, dtype, 1, k);
        let norm = case.operands.last_mut().expect("just pushed");
        (norm.rank, norm.extent, norm.stride_elems) = (1, [k, 1, 1, 1], [1, 1, 1, 1]);
        norm_bytes = k * dtype.size_bytes() as u32;
        // The whole of it is one tile, which is there until the row is, beside the first of each matrix.
        capacity = capacity.max(norm_bytes + 2 * tile);
        case.stream(&[case.operands.len() - 1], norm_bytes, capacity);
    } else {
        case.absent();
    }
    if !gated {
        case.maybe_best(random, 1, n);
    }
    case.step.rows = 1;
    case.stream(weights_of(gated), tile, capacity);
    case.counts = true;
    case.compare("tiled linear");
    // Each byte of the weights is read from memory once, as the cost says.
    let weights = dtype.tensor_bytes(&[n as usize, k as usize]) * (1 + u64::from(gated)) + u64::from(norm_bytes);
    assert_eq!((case.report.bytes_copied, &case.report.stall), (weights, &None));
}

/// What splits found, the last of them nothing; in some rounds of nine rows in which everything was -inf, or NaN.
fn push_parts(case: &mut Case, random: &mut Random, [heads, splits, group, d]: [u32; 4], round: usize) {
    let (mut at, width) = (0, attention::FOUND + d);
    let found = random.one_to(splits);
    case.push(random, DType::F32, &[heads, splits, group, width], |random| {
        let (split, word) = (at / width / group % splits, at % width);
        at += 1;
        match (word, split < found) {
            (0, false) => f32::NEG_INFINITY,
            (_, false) => 0.0,
            // Far apart, so that most hardly count.
            (0, true) if round % 9 == 4 && random.below(3) == 0 => f32::NEG_INFINITY,
            (0, true) => 30.0 * random.float(),
            (1, true) if round % 9 == 7 && random.below(3) == 0 => f32::NAN,
            (1, true) => 1.0 + random.float().abs(),
            _ => random.float(),
        }
    });
}

/// Products that merge what splits found themselves: weights in tiles, for tensor cores or not, and from global memory.
fn merging_linear(random: &mut Random, round: usize) {
    let (heads, group, splits, n) = (random.one_to(3), random.one_to(4), random.one_to(9), random.one_to(40));
    let of_tensor_cores = [DType::Bf16, DType::Q8, DType::Q4, DType::Int4][round / 3 % 4];
    let whole = if of_tensor_cores == DType::Bf16 { 32 } else { 128 };
    let d = [whole, 8 * random.one_to(12), 2 * random.one_to(30)][round % 3];
    let k = heads * group * d;
    let mut case = Case::new::<Linear>(linear::Params {
        activation: random.activation(),
        eps: 0.0,
        merges: 1,
        ..Default::default()
    });
    push_parts(&mut case, random, [heads, splits, group, d], 0);
    let dtype = random.dtype();
    let from_tiles = round % 4 != 3 && k.is_multiple_of(8);
    if from_tiles {
        case.push_carried(random, if round.is_multiple_of(3) { of_tensor_cores } else { dtype }, n, k);
    } else {
        case.floats(random, dtype, &[n, k]);
    }
    case.maybe(random, &[n]);
    case.maybe_residual(random, &[1, n]);
    case.push(random, DType::F32, &[1, n], |_| 7.0);
    case.absent();
    case.maybe_best(random, 1, n);
    case.step.rows = random.one_to(3);
    case.tolerance = 1e-3;
    if from_tiles {
        case.threads = &[96, 224];
        let row = case.operands[linear::slot::W].dtype().expect("weights").tensor_bytes(&[k as usize]) as u32;
        case.stream(&[linear::slot::W], row * random.one_to(5), row * 7);
    }
    case.counts = true;
    case.judge("merging linear");
}

/// Rows enough for the tensor cores, which round x to bf16.
fn wide_linear(random: &mut Random, round: usize) {
    let (rows, n, k) = (16 + random.one_to(70), random.one_to(60), random.one_to(120));
    let x = |case: &mut Case, random: &mut Random| {
        let dtype = random.dtype();
        case.push(random, dtype, &[rows, k], if round.is_multiple_of(4) { Random::float } else { brain });
        (case.rounded, case.tolerance) = (&[linear::slot::X], 3e-4);
    };
    let mut case =
        Case::new::<Linear>(linear::Params { activation: random.activation(), eps: 0.0, ..Default::default() });
    x(&mut case, random);
    case.floats(random, DType::Bf16, &[n, k]);
    case.maybe(random, &[n]);
    case.maybe_residual(random, &[rows, n]);
    case.push(random, DType::F32, &[rows, n], |_| 7.0);
    case.maybe_norm(random, rows, k);
    case.maybe_best(random, rows, n);
    case.step.rows = 16 + random.one_to(rows - 16);
    case.judge("wide linear");

    let mut case = Case::new::<GatedLinear>(gated_linear::Params {
        activation: linear::Activation::Relu.number(),
        ..Default::default()
    });
    x(&mut case, random);
    case.floats(random, DType::Bf16, &[n, k]);
    case.floats(random, DType::Bf16, &[n, k]);
    case.maybe(random, &[n]);
    case.maybe(random, &[n]);
    case.push(random, DType::F32, &[rows, n], |_| 7.0);
    case.maybe_norm(random, rows, k);
    case.tolerance *= 4.0;
    case.judge("wide gated_linear");
}

/// Matrices on multiples of sixteen bytes, weights in fewer bits too: a warpgroup's products, over one part and
/// several, with tails of every kind.
fn warpgroup_linear(random: &mut Random, round: usize) {
    let (rows, n) = (1 + random.one_to([40, 120, 200, 14][round % 4]), random.one_to([150, 40, 150, 14][round % 4]));
    let k = 8 * random.one_to([12, 70][round / 2 % 2]);
    let weights = [DType::Bf16, DType::Q8, DType::Q4, DType::Mx4, DType::Int4][random.below(5) as usize];
    let begin = |case: &mut Case, random: &mut Random, n_weights: u32| {
        (case.tile_bytes, case.threads, case.tolerance) = (TILE_BYTES, &[224, 160, 192], 2e-3);
        case.push_carried(random, DType::Bf16, rows, k);
        for _ in 0..n_weights {
            case.push_carried(random, weights, n, k);
        }
        (case.rounded, case.by_warpgroup) = (weights_of(n_weights == 2), true);
    };
    let multiplied = |case: &Case| case.report.products > 0;
    let mut case =
        Case::new::<Linear>(linear::Params { activation: random.activation(), eps: 0.0, ..Default::default() });
    begin(&mut case, random, 1);
    case.maybe(random, &[n]);
    case.maybe_residual(random, &[rows, n]);
    let dtype = random.dtype();
    case.push(random, dtype, &[rows, n], |_| 7.0);
    case.maybe_norm(random, rows, k);
    case.maybe_best(random, rows, n);
    case.step.rows = random.one_to(rows);
    case.compare("warpgroup linear");
    assert!(multiplied(&case));

    let mut case = Case::new::<GatedLinear>(gated_linear::Params {
        activation: linear::Activation::Relu.number(),
        ..Default::default()
    });
    begin(&mut case, random, 2);
    case.maybe(random, &[n]);
    case.maybe(random, &[n]);
    case.push(random, DType::Bf16, &[rows, n], |_| 7.0);
    case.maybe_norm(random, rows, k);
    // A product of two such sums.
    case.tolerance *= 8.0;
    case.compare("warpgroup gated_linear");
    assert!(multiplied(&case));
}

fn norms(random: &mut Random, round: usize) {
    let (rows, hidden) = (random.one_to(4), [random.one_to(300), 8 * random.one_to(270)][round % 2]);
    let mut case = Case::new::<RmsNorm>(rms_norm::Params { eps: 1e-5 });
    for extent in [&[rows, hidden][..], &[hidden], &[rows, hidden]] {
        let dtype = random.dtype();
        case.floats(random, dtype, extent);
    }
    case.maybe(random, &[rows, hidden]);
    if rows > 1 && case.operands[rms_norm::slot::Y].dtype() == Some(DType::F32) && random.flip() {
        let (weights, weighted) = (random.dtype(), random.dtype());
        case.floats(random, weights, &[hidden]);
        case.push(random, weighted, &[rows, hidden], |_| 7.0);
        case.push(random, DType::F32, &[rows, 1], |_| 7.0);
    } else {
        (0..3).for_each(|_| case.absent());
    }
    let is_added = case.operands[rms_norm::slot::RESIDUAL].is_present();
    if is_added {
        case.maybe(random, &[1])
    } else {
        case.absent()
    }
    case.step.rows = random.one_to(rows);
    case.counts = rows == 1;
    // A flagged row is one that a worker's threads have room for, four eights each.
    if rows == 1 && hidden > 32 * case.threads[1] {
        case.threads = &[224];
    }
    case.judge("rms_norm");

    let mut case = Case::new::<LayerNorm>(layer_norm::Params { eps: 1e-5 });
    let dtype = random.dtype();
    case.floats(random, dtype, &[rows, hidden]);
    case.maybe(random, &[rows, hidden]);
    for extent in [&[hidden][..], &[hidden], &[rows, hidden]] {
        case.floats(random, dtype, extent);
    }
    case.tolerance = 1e-4;
    case.counts = rows == 1;
    case.judge("layer_norm");
}

fn embedding(random: &mut Random, round: usize) {
    let (rows, hidden, vocab) = (random.one_to(4), random.one_to(80), random.one_to(50));
    let mut case = Case::new::<Embedding>(embedding::Params { vocab, scale: [1.0, 8.5][round / 2 % 2] });
    // Every fourth time an id may lie outside.
    let ids = if round.is_multiple_of(4) { vocab + 2 } else { vocab };
    case.push(random, DType::I32, &[12], |random| random.below(ids) as f32);
    let dtype = random.dtype();
    case.floats(random, dtype, &[vocab, hidden]);
    case.maybe(random, &[12, hidden]);
    case.maybe(random, &[2, hidden]);
    case.push(random, DType::F32, &[rows, hidden], |_| 7.0);
    case.row_first = random.below(3);
    case.step.first_pos = random.below(4);
    case.step.rows = case.row_first + rows;
    case.counts = rows == 1 && ids == vocab;
    case.judge("embedding");
}

fn elementwise_select_pool(random: &mut Random, round: usize) {
    let (rows, n) = (random.one_to(5), random.one_to(200));
    let (function, activation) = (round as u32 % 5, random.activation());
    let original = random.one_to(9);
    let params = elementwise::Params { function, activation, beta: 0.25, original };
    let mut case = Case::new::<Elementwise>(params);
    let dtype = random.dtype();
    case.floats(random, dtype, &[rows, n]);
    if [elementwise::Function::Activate, elementwise::Function::Lengthen].iter().any(|f| *f as u32 == function) {
        case.absent();
    } else {
        case.floats(random, dtype, &[rows, n]);
    }
    case.push(random, dtype, &[rows, n], |_| 7.0);
    case.step.rows = random.one_to(rows);
    case.step.first_pos = random.below(100);
    case.counts = rows == 1;
    case.judge("elementwise");

    let mut case = Case::new::<SelectRow>(select_row::Params {});
    case.floats(random, dtype, &[rows, n]);
    case.push(random, DType::F32, &[1, n], |_| 7.0);
    case.step.rows = random.one_to(rows);
    case.counts = rows == 1;
    case.judge("select_row");

    let mut case = Case::new::<Pool>(pool::Params { mean: round as u32 % 2, normalise: random.below(2) });
    case.floats(random, dtype, &[rows, n]);
    case.push(random, DType::F32, &[1, n], |_| 7.0);
    case.step.rows = random.one_to(rows);
    case.counts = rows == 1;
    case.judge("pool");
}

fn rope(random: &mut Random, round: usize) {
    // Every second time heads that lanes take by eights; of those now and then more rows than are done together.
    let by_eights = round % 2 == 1;
    let (rows, heads, group) = (random.one_to(3), random.one_to(3), random.one_to(3));
    let rows = if round % 8 == 1 { 37 + rows } else { rows };
    let d = if by_eights {
        16 * random.one_to([9, 20][round / 8 % 2])
    } else {
        2 * random.one_to([50, 140][round / 2 % 2])
    };
    let turned_pairs = random.turned_pairs(d);
    let turned_pairs = if by_eights && turned_pairs < d / 2 { turned_pairs / 4 * 4 } else { turned_pairs };
    let context = 56;
    let norms = if turned_pairs == d / 2 { random.below(4) } else { random.below(2) };
    let mut case = Case::new::<Rope>(rope::Params { eps: 1e-6, turned_pairs, factor: 1.25, norms });
    // Now and then there is nothing to append.
    let appends = random.below(4) > 0;
    let (dtype, cached) = if by_eights { (DType::F32, DType::Bf16) } else { (random.dtype(), random.dtype()) };
    // Values may be of another size.
    let n = if random.below(4) > 0 { d } else { random.one_to(300) };
    case.push_placed(random, dtype, &[rows, heads, group, d], Random::float, by_eights);
    for extent in [&[rows, heads, d][..], &[rows, heads, n]] {
        if appends { case.push_placed(random, dtype, extent, Random::float, by_eights) } else { case.absent() }
    }
    case.maybe(random, &[d]);
    if appends {
        case.maybe(random, &[d])
    } else {
        case.absent()
    }
    case.push(random, DType::F32, &[d / 2], |random| random.float().abs());
    for extent in [&[heads, context, d][..], &[heads, context, n]] {
        if appends { case.push_placed(random, cached, extent, Random::float, by_eights) } else { case.absent() }
    }
    if by_eights {
        case.threads = [&[224], &[160], &[32]][random.below(3) as usize];
    }
    case.row_first = random.below(3);
    case.step.first_pos = random.below(8);
    case.step.rows = case.row_first + random.one_to(rows);
    case.counts = rows == 1;
    case.judge("rope");
}

fn attention(random: &mut Random, round: usize) {
    // Every third time one row and head, as in decoding, so that warps share positions.
    let decodes = round % 3 == 1;
    let (rows, heads, group) =
        if decodes { (1, 1, random.one_to(2)) } else { (random.one_to(3), random.one_to(2), random.one_to(3)) };
    let d = if round.is_multiple_of(6) { 270 } else { [random.one_to(140), 64][round % 2] };
    let context = 120;
    let [window, ahead] = random.seen(40);
    let mut case =
        Case::new::<Attention>(attention::Params { scale: 0.3, window, ahead, splits: 1, ..Default::default() });
    let dtype = random.dtype();
    case.floats(random, dtype, &[rows, heads, group, d]);
    case.floats(random, dtype, &[heads, context, d]);
    case.floats(random, dtype, &[heads, context, d]);
    case.push(random, DType::F32, &[rows, heads, group, d], |_| 7.0);
    case.maybe_sinks(random, [heads, group], ahead == 0);
    case.row_first = random.below(3);
    case.step.first_pos = random.below(context - 8);
    case.step.rows = case.row_first + random.one_to(rows);
    case.judge("attention");
}

/// Rows of queries on tensor cores: several keys' blocks, rows that see part of one, heads that are not whole tiles,
/// several parts.
fn attention_of_many(random: &mut Random, round: usize) {
    let (rows, heads, group) = (15 + random.one_to(50), random.one_to(2), random.one_to(3));
    let d = 8 * random.one_to([8, 16][round % 2]);
    // Now and then more blocks than memory has stages.
    let is_long = round % 8 == 7;
    let context = if is_long { 900 } else { [90, 300][round / 2 % 2] };
    let splits = if round % 3 == 2 && !is_long { 1 + random.one_to(9) } else { 1 };
    let [window, ahead] = if splits > 1 { [attention::ALL, 0] } else { random.seen(150) };
    // Among tiles of others, or none.
    let is_beside_tiles = if is_long { 0 } else { random.below(2) };
    let scale = core::f32::consts::LN_2 / 2.0;
    let params = attention::Params { scale, window, ahead, splits, is_beside_tiles, ..Default::default() };
    let mut case = Case::new::<Attention>(params);
    (case.tile_bytes, case.threads) = (TILE_BYTES, &[224, 160, 32]);
    if is_beside_tiles != 0 {
        case.tile_bytes = (1 << 10) + attention::FLASH_BYTES[usize::from(d > 64)] as u32;
    }
    case.row_first = random.below(3);
    case.step.first_pos = random.below(context - rows - 4);
    if is_long {
        case.step.first_pos = 600 + random.below(200);
    }
    case.step.rows = case.row_first + random.one_to(rows);
    let visible = case.step.first_pos + case.step.rows;
    let dtype = random.dtype();
    if is_beside_tiles == 0 {
        // Queries, times a power of two, and weights are rounded to bf16: of 500 cases one was off by 2.02e-2.
        case.tolerance = if dtype == DType::Bf16 { 4e-3 } else { 2.5e-2 };
    }
    case.push_placed(random, dtype, &[rows, heads, group, d], Random::float, true);
    for _ in 0..2 {
        push_cache(&mut case, random, DType::Bf16, [heads, context, d], visible, true);
    }
    let (dtype, is_whole) = (random.dtype(), random.below(4) > 0);
    if splits > 1 {
        // What is found is not divided by how many positions there were.
        case.tolerance *= (context / splits) as f32;
        case.split = if random.flip() { 0 } else { random.below(splits) };
        // Rows one after the other, an odd number of sixteens of bytes each.
        let width = attention::FOUND + d;
        case.push_placed(random, DType::F32, &[heads, 1, rows * group * width], |_| 7.0, is_whole);
        let y = case.operands.last_mut().expect("just pushed");
        (y.rank, y.extent) = (4, [heads, 1, rows * group, width]);
        (y.stride_elems[2], y.stride_elems[3]) = (width * y.stride_elems[2], y.stride_elems[2]);
    } else {
        case.push_placed(random, dtype, &[rows, heads, group, d], |_| 7.0, is_whole);
    }
    case.maybe_sinks(random, [heads, group], ahead == 0);
    case.compare("attention of many");
    // The last shares of few positions among many have none.
    let (first, end) = perpetua_shared::data::share(visible, window, splits, case.split);
    let is_for_tensor_cores = is_whole && first < end && (case.step.rows - case.row_first) * group >= 2;
    assert!(case.report.warp_products > 0 || !is_for_tensor_cores, "share {first}..{end}");
}

/// A few rows whose queries of a head are as few as those of one row in decoding, or any of wide heads: windows, shares
/// of the positions of which rows see a part or nothing.
fn attention_of_few(random: &mut Random, round: usize) {
    let group = random.one_to(4);
    let is_wide = round / 2 % 2 == 1;
    let (rows, heads) = (2 + random.below(if is_wide { 20 } else { 8 / group - 1 }), random.one_to(2));
    let d = 32 * if is_wide { 4 + random.one_to(14) } else { random.one_to(4) };
    let context = [40, 300][round % 2];
    let splits = if round.is_multiple_of(3) { 1 } else { 1 + random.one_to(9) };
    let window = if splits > 1 || random.flip() { attention::ALL } else { random.one_to(60) };
    let is_beside_tiles = random.below(2);
    let params = attention::Params { scale: 0.3, window, splits, is_beside_tiles, ..Default::default() };
    let mut case = Case::new::<Attention>(params);
    case.threads = if is_wide { &[224, 96, 32] } else { &[224, 96] };
    case.row_first = random.below(3);
    case.step.first_pos = random.below(context - rows - 4);
    case.step.rows = case.row_first + random.one_to(rows);
    let visible = case.step.first_pos + case.step.rows;
    let dtype = random.dtype();
    case.push(random, dtype, &[rows, heads, group, d], Random::float);
    for _ in 0..2 {
        push_cache(&mut case, random, DType::Bf16, [heads, context, d], visible, true);
    }
    // Queries and weights of values as two terms of bf16.
    case.tolerance = 2e-3;
    if splits > 1 {
        case.tolerance *= (context / splits) as f32;
        case.split = if random.flip() { 0 } else { random.below(splits) };
        let (width, is_whole) = (attention::FOUND + d, random.below(4) > 0);
        case.push_placed(random, DType::F32, &[heads, 1, rows * group * width], |_| 7.0, is_whole);
        let y = case.operands.last_mut().expect("just pushed");
        (y.rank, y.extent) = (4, [heads, 1, rows * group, width]);
        (y.stride_elems[2], y.stride_elems[3]) = (width * y.stride_elems[2], y.stride_elems[2]);
    } else {
        let dtype = random.dtype();
        case.push(random, dtype, &[rows, heads, group, d], |_| 7.0);
    }
    case.maybe_sinks(random, [heads, group], true);
    case.compare("attention of few");
    let (first, end) = perpetua_shared::data::share(visible, window, splits, case.split);
    let is_for_tensor_cores = first < end && (case.step.rows - case.row_first) * group >= 2;
    assert!(case.report.warp_products > 0 || !is_for_tensor_cores, "share {first}..{end}");
}

/// A cache of `heads`, NaN from position `visible` on, its rows on sixteen bytes where `whole`.
fn push_cache(
    case: &mut Case,
    random: &mut Random,
    dtype: DType,
    [heads, context, d]: [u32; 3],
    visible: u32,
    whole: bool,
) {
    let mut at = 0;
    let value = |random: &mut Random| {
        at += 1;
        if (at - 1) / d % context < visible { random.float() } else { f32::NAN }
    };
    case.push_placed(random, dtype, &[heads, context, d], value, whole);
}

fn split_attention(random: &mut Random, round: usize) {
    let (heads, group, splits) = (random.one_to(2), random.one_to(5), 1 + random.one_to(15));
    let d = if round.is_multiple_of(10) { 270 } else { [random.one_to(70), 64][round % 2] };
    // Fewer positions than splits, too: some splits have none.
    let context = [20, 120, 700][round % 3];
    let visible = random.one_to(context);
    let dtype = random.dtype();
    let window = random.some_window(context);
    let mut case =
        Case::new::<Attention>(attention::Params { scale: 0.3, window, ahead: 0, splits, ..Default::default() });
    case.floats(random, dtype, &[1, heads, group, d]);
    push_cache(&mut case, random, dtype, [heads, context, d], visible, false);
    push_cache(&mut case, random, dtype, [heads, context, d], visible, false);
    case.push(random, DType::F32, &[heads, 1, group, attention::FOUND + d], |_| 7.0);
    case.maybe_sinks(random, [heads, group], true);
    case.split = if round.is_multiple_of(4) { splits - 1 } else { random.below(splits) };
    (case.step.first_pos, case.step.rows) = (visible - 1, 1);
    case.judge("attention, split");
}

/// A case of `visible` positions, the last of which is yet to be appended, in caches of type `dtype`.
fn decode_attention_case(
    random: &mut Random,
    dtype: DType,
    [heads, group, d, splits]: [u32; 4],
    (context, visible): (u32, u32),
    scale: f32,
) -> Case {
    let window = random.some_window(context);
    let turned_pairs = random.turned_pairs(d);
    let norms = if turned_pairs == d / 2 { random.below(4) } else { random.below(2) };
    let params = decode_attention::Params { eps: 1e-6, scale, splits, window, turned_pairs, factor: 1.25, norms };
    // Now and then another layer has appended.
    let appends = random.below(4) > 0;
    let mut case = Case::new::<DecodeAttention>(params);
    case.floats(random, DType::F32, &[1, heads, group, d]);
    for extent in [&[1, heads, d][..], &[1, heads, d]] {
        if appends { case.floats(random, dtype, extent) } else { case.absent() }
    }
    case.maybe(random, &[d]);
    if appends {
        case.maybe(random, &[d])
    } else {
        case.absent()
    }
    case.push(random, DType::F32, &[d / 2], |random| random.float().abs());
    let kept = if appends { visible - 1 } else { visible };
    push_cache(&mut case, random, dtype, [heads, context, d], kept, false);
    push_cache(&mut case, random, dtype, [heads, context, d], kept, false);
    let y = if splits > 1 { [heads, 1, group, attention::FOUND + d] } else { [1, heads, group, d] };
    case.push(random, DType::F32, &y, |_| 7.0);
    case.maybe_sinks(random, [heads, group], true);
    (case.step.first_pos, case.step.rows) = (visible - 1, 1);
    case
}

fn decode_attention(random: &mut Random, round: usize) {
    let (heads, group, splits) = (random.one_to(2), random.one_to(9), [1, 1 + random.one_to(15)][round % 2]);
    let d = if round.is_multiple_of(10) {
        [270, 520].map(|most| most.min(MAX_QUERY / group / 2 * 2))[round / 10 % 2]
    } else {
        [2 * random.one_to(35), 64][round % 3 % 2]
    };
    // Fewer positions than splits, too: some splits have none.
    let context = [20, 120, 700][round % 3];
    let visible = if round % 4 == 2 { context } else { random.one_to(context) };
    let dtype = random.dtype();
    let mut case = decode_attention_case(random, dtype, [heads, group, d, splits], (context, visible), 0.3);
    case.split = if round.is_multiple_of(4) { splits - 1 } else { random.below(splits) };
    case.counts = splits == 1 && visible == context;
    case.judge("decode_attention");
}

/// Whole 32s of dimensions of bf16: the queries of a head together, where rows lie on 16 bytes, as every other does.
fn decode_attention_of_groups(random: &mut Random, round: usize) {
    let (heads, group, splits) = (random.one_to(2), random.one_to(8), [1, 1 + random.one_to(15)][round % 2]);
    let d = [64, 256, 128, 32, 96, 576, 160, 512][round / 2 % 8];
    let group = group.min(MAX_QUERY / d);
    let context = [20, 120, 700][round % 3];
    let visible = if round % 4 == 2 { context } else { random.one_to(context) };
    // A new key is rounded to bf16, so a score is the further off the more elements it sums: they count for less, as in
    // models.
    let scale = 0.3 * (160.0 / d as f32).sqrt().min(1.0);
    let mut case = decode_attention_case(random, DType::Bf16, [heads, group, d, splits], (context, visible), scale);
    case.threads = &[96, 224, 32];
    case.split = if round.is_multiple_of(4) { splits - 1 } else { random.below(splits) };
    case.counts = splits == 1 && visible == context;
    case.judge("decode_attention, groups");
}

fn attention_merge(random: &mut Random, round: usize) {
    let (heads, group, splits) = (random.one_to(3), random.one_to(5), random.one_to(attention_merge::MAX_SPLITS));
    let (rows, d) = (if round % 4 == 3 { random.one_to(4) } else { 1 }, random.one_to(140));
    let mut case = Case::new::<AttentionMerge>(attention_merge::Params {});
    push_parts(&mut case, random, [heads, splits, rows * group, d], round);
    let dtype = random.dtype();
    case.push(random, dtype, &[rows, heads, group, d], |_| 7.0);
    case.step.rows = random.one_to(rows);
    case.counts = case.step.rows == rows;
    case.judge("attention_merge");
}

/// What the splits' definitions find and the merge's puts together is what attention's says.
fn splits_merged_are_the_whole(random: &mut Random, round: usize) {
    let (heads, group, splits, d) = (random.one_to(2), random.one_to(3), 1 + random.one_to(15), random.one_to(20));
    let (visible, rows) = (random.one_to(56), if round.is_multiple_of(2) { 1 } else { random.one_to(5) });
    let mut case = Case::new::<Attention>(attention::Params {
        scale: 0.5,
        window: attention::ALL,
        ahead: 0,
        splits: 1,
        ..Default::default()
    });
    case.floats(random, DType::F32, &[rows, heads, group, d]);
    push_cache(&mut case, random, DType::F32, [heads, 64, d], visible + rows - 1, false);
    push_cache(&mut case, random, DType::F32, [heads, 64, d], visible + rows - 1, false);
    case.push(random, DType::F32, &[rows, heads, group, d], |_| 7.0);
    case.push(random, DType::F32, &[heads, splits, rows * group, attention::FOUND + d], |_| 7.0);
    case.push(random, DType::F32, &[rows, heads, group, d], |_| 7.0);
    case.maybe_sinks(random, [heads, group], true);
    let step = Step { first_pos: visible - 1, rows, ..Step::default() };
    let run = |kernel: &Spec, params, slots: &[usize], memory: &mut [Vec<u128>], block, operands: &[Operand]| {
        let tensor = |slot: &usize| {
            // SAFETY: each operand has its own memory.
            unsafe { Tensor::new(memory[*slot].as_ptr().cast_mut().cast(), &operands[*slot]) }
        };
        let tensors: Vec<Tensor> = slots.iter().map(tensor).collect();
        let task = TaskDesc { task_type: kernel.task_type, params, block, ..TaskDesc::zeroed() };
        let io: Vec<Operand> = slots.iter().map(|slot| operands[*slot]).collect();
        kernel.check(&params, &io).expect("a task");
        (kernel.reference)(&io::Call { tensors: &tensors, task: &task, step: &step, programs: &[] }).expect("sound");
        tensors[kernel.slots.iter().position(|slot| slot.usage == Use::Write).expect("an output")]
    };
    let [attention, merge] = [Attention::TASK_TYPE, AttentionMerge::TASK_TYPE].map(|n| Spec::of(n).expect("listed"));
    let expected = run(attention, case.params, &[0, 1, 2, 3, 6], &mut case.memory, [0; 3], &case.operands);
    let params =
        param_words(&attention::Params { scale: 0.5, window: attention::ALL, ahead: 0, splits, ..Default::default() });
    let whole = case.operands[4];
    for split in 0..splits {
        case.operands[4].extent[1] = 1;
        case.operands[4].offset_bytes = whole.offset_bytes + u64::from(split * whole.stride_elems[1] * 4);
        run(attention, params, &[0, 1, 2, 4, 6], &mut case.memory, [0, split, 0], &case.operands);
    }
    case.operands[4] = whole;
    let merged = run(merge, [0; 8], &[4, 5], &mut case.memory, [0; 3], &case.operands);
    for index in indices(&case.operands[5]) {
        let (a, b) = (merged.get(index), expected.get(index));
        assert!((a - b).abs() <= 1e-5, "round {round}: {index:?} is {a}, expected {b}");
    }
}

/// Logits with many equals, some of them NaN or infinite.
fn logit(random: &mut Random) -> f32 {
    match random.below(12) {
        0 => f32::NAN,
        1 => f32::NEG_INFINITY,
        2..5 => 1.0,
        _ => random.float() * 3.0,
    }
}

fn argmax(random: &mut Random, round: usize) {
    let n = random.one_to(150);
    let mut case = Case::new::<ArgmaxPartial>(argmax::Params { blocks: 3, len_elems: 3 * n });
    case.push(random, DType::F32, &[1, n], |random| if round.is_multiple_of(8) { f32::NAN } else { logit(random) });
    case.push(random, DType::F32, &[1], |_| 7.0);
    case.push(random, DType::I32, &[1], |_| 7.0);
    case.block = random.below(3);
    case.counts = true;
    case.judge("argmax_partial");
}

/// Rows of the program that verifies drafts.
const DRAFT_ROWS: u32 = 6;

/// The control block as an operand's words.
fn push_control(case: &mut Case, random: &mut Random, control: &Control) {
    let words: Vec<u32> = bytemuck::cast_slice(std::slice::from_ref(control)).to_vec();
    let at = case.operands.len();
    case.push(random, DType::U32, &[words.len() as u32], |_| 0.0);
    let operand = &case.operands[at];
    let start = operand.offset_bytes as usize / 4;
    bytemuck::cast_slice_mut::<u128, u32>(&mut case.memory[at])[start..][..words.len()].copy_from_slice(&words);
}

fn sample(random: &mut Random, round: usize) {
    let n = random.one_to(120);
    let mut control = Control::zeroed();
    let request = &mut control.requests[0];
    request.temperature = if round.is_multiple_of(5) { 0.0f32 } else { 0.5 + random.below(3) as f32 * 0.4 }.to_bits();
    request.top_k = if random.flip() { 0 } else { random.one_to(n + 3) };
    request.top_p = if random.flip() { 1.0f32 } else { 0.05 + random.below(90) as f32 / 100.0 }.to_bits();
    request.seed = [random.next() as u32, random.next() as u32];
    request.repetition_penalty =
        if round.is_multiple_of(3) { 1.0f32 } else { 0.6 + random.below(12) as f32 / 8.0 }.to_bits();
    let mut case = Case::new::<Sample>(sample::Params {});
    let mut logits = Vec::new();
    case.push(random, DType::F32, &[1, n], |random| {
        logits.push(if round % 10 == 7 { f32::NAN } else { logit(random) });
        *logits.last().expect("just pushed")
    });
    let mut best = (f32::NEG_INFINITY, -1);
    for (i, l) in logits.iter().enumerate() {
        if *l > best.0 || (best.1 < 0 && !l.is_nan()) {
            best = (*l, i as i32);
        }
    }
    // The winner among parts of which some hold nothing.
    let at = random.below(4);
    let mut i = 0;
    case.push(random, DType::F32, &[4], |_| {
        i += 1;
        if i - 1 == at { best.0 } else { f32::NEG_INFINITY }
    });
    let mut i = 0;
    case.push(random, DType::I32, &[4], |_| {
        i += 1;
        if i - 1 == at { best.1 as f32 } else { -1.0 }
    });
    push_control(&mut case, random, &control);
    // The buffer, or the token alone and the buffer; some tokens twice.
    let text =
        |case: &mut Case, random: &mut Random| case.push(random, DType::I32, &[20], |random| random.below(n) as f32);
    if random.flip() {
        text(&mut case, random);
        case.absent();
    } else {
        case.push(random, DType::I32, &[1], |_| 99.0);
        text(&mut case, random);
    }
    case.step.first_pos = random.below(8);
    case.step.rows = random.one_to(8);
    case.judge("sample");
}

fn advance(random: &mut Random, round: usize) {
    let verifies = round.is_multiple_of(2);
    let mut control = Control::zeroed();
    control.n_tokens = random.one_to(24);
    control.requests[0].max_new_tokens = random.below(12);
    control.max_context = 20 + random.below(10);
    control.produced = random.below(3);
    control.stop = u32::from(random.below(5) == 0);
    control.requests[0].stops = if random.flip() { 0 } else { random.below(4) };
    control.stop_tokens[0] = 99;
    control.stop_tokens[2] = 98;
    control.max_drafts = random.below(DRAFT_ROWS);
    control.n_drafts = random.one_to(DRAFT_ROWS).min(control.max_drafts);
    control.program_runs[..2].fill_with(|| random.below(9));
    let first_pos = if verifies || random.flip() { control.n_tokens - 1 } else { random.below(control.n_tokens) };
    control.step = Step {
        program: u32::from(verifies),
        first_pos,
        rows: if verifies { random.one_to(DRAFT_ROWS) } else { 1 },
        sampling: u32::from(random.below(4) > 0),
        iteration: random.below(9),
        ..Step::default()
    };
    let mut case = Case::new::<Advance>(advance::Params {});
    case.step = control.step;
    // Few, so that a text goes as it has gone before, and drafts are chosen.
    let mut text = [0; 40];
    text.fill_with(|| 97 + random.below(3));
    let mut tokens = text.iter();
    case.push(random, DType::I32, &[40], |_| *tokens.next().expect("one each") as f32);
    if verifies {
        let mut drafts = text[first_pos as usize + 1..].iter();
        case.push(random, DType::I32, &[DRAFT_ROWS], |random| {
            let draft = *drafts.next().expect("the text is long enough");
            (if random.below(4) == 0 { 97 + random.below(3) } else { draft }) as f32
        });
    } else {
        case.absent();
    }
    // The body works on the block in place, as a control block: whole words from its binding's start.
    push_control(&mut case, random, &control);
    case.judge("advance");
}

/// By an activation, or with a limit that some sums pass.
fn gating(random: &mut Random) -> gated_linear::Gating {
    match random.below(3) {
        0 => gated_linear::Gating { activation: 0, limit: 0.5 + random.below(3) as f32, alpha: 1.702 },
        _ => gated_linear::Gating::of(random.below(5)),
    }
}

/// Those of both of an expert's matrices, or none.
fn push_biases(case: &mut Case, random: &mut Random, shape: [u32; 2]) {
    let are_there = random.flip();
    for _ in 0..2 {
        if are_there {
            let dtype = random.dtype();
            case.floats(random, dtype, &shape);
        } else {
            case.absent();
        }
    }
}

/// How much experts count, in any way.
fn counting(random: &mut Random) -> Counting {
    let (factor, added) = ([1.0, 2.5][random.below(2) as usize], [0.0, 0.25][random.below(2) as usize]);
    Counting { weighting: random.below(4), factor, added }
}

/// Biases of second halves, now and then, where experts may have some.
fn push_down_bias(case: &mut Case, random: &mut Random, counting: Counting, shape: [u32; 2]) {
    if counting.weighting == Weighting::All as u32 { case.absent() } else { case.maybe(random, &shape) }
}

/// What corrects logits that count by sigmoids, or what the others count, now and then; numbers of which some are
/// equal, if they are `few`.
fn push_correction(case: &mut Case, random: &mut Random, experts: u32, few: bool) {
    if random.flip() {
        return case.absent();
    }
    let dtype = random.dtype();
    case.push(random, dtype, &[experts], |r| if few { r.below(3) as f32 / 4.0 } else { r.float() });
}

/// Of logits whose numbers are few, so that some are equal; one expert or many, all of them or a few.
fn experts(random: &mut Random, round: usize) {
    let rows = if round.is_multiple_of(2) { 1 } else { random.one_to(4) };
    let experts = [1, 3, 8, 130][random.below(4) as usize];
    let chosen = random.one_to(experts.min(9));
    let (n, k) =
        (random.one_to(9), if round.is_multiple_of(3) { 1100 + random.below(300) } else { random.one_to(200) });
    let few = random.flip();
    let logits = |case: &mut Case, random: &mut Random| {
        case.push(random, DType::F32, &[rows, experts], |r| if few { r.below(4) as f32 } else { 3.0 * r.float() });
    };
    let begin = |case: &mut Case, random: &mut Random| {
        case.step.rows = random.one_to(rows + 1);
        case.counts = rows == 1;
    };
    let counting = counting(random);
    let params = experts_up::Params { gating: gating(random), order: 0, eps: 1e-5, counting };
    let of_down = experts_down::Params { order: 0, counting };
    let mut case = Case::new::<ExpertsUp>(params);
    let dtype = random.dtype();
    case.floats(random, dtype, &[rows, k]);
    logits(&mut case, random);
    for _ in 0..2 {
        let dtype = random.dtype();
        case.floats(random, dtype, &[experts, n, k]);
    }
    let dtype = random.dtype();
    case.push(random, dtype, &[rows, chosen, n], |_| 7.0);
    case.maybe_norm(random, rows, k);
    push_biases(&mut case, random, [experts, n]);
    push_correction(&mut case, random, experts, few);
    begin(&mut case, random);
    case.judge("experts_up");

    let mut case = Case::new::<ExpertsDown>(of_down);
    let dtype = random.dtype();
    case.floats(random, dtype, &[rows, chosen, k]);
    logits(&mut case, random);
    let dtype = random.dtype();
    case.floats(random, dtype, &[experts, n, k]);
    case.maybe(random, &[rows, n]);
    let dtype = random.dtype();
    case.push(random, dtype, &[rows, n], |_| 7.0);
    push_down_bias(&mut case, random, counting, [experts, n]);
    push_correction(&mut case, random, experts, few);
    begin(&mut case, random);
    case.judge("experts_down");

    // As checkpoints and intermediates lie, and products read them: in eights that stand on sixteen bytes. A row that
    // is normalised is staged.
    let k = 8 * random.one_to(400);
    let mut case = Case::new::<ExpertsUp>(params);
    case.push_placed(random, DType::F32, &[rows, k], Random::float, true);
    logits(&mut case, random);
    for _ in 0..2 {
        case.push_placed(random, DType::Bf16, &[experts, n, k], Random::float, true);
    }
    case.push(random, DType::F32, &[rows, chosen, n], |_| 7.0);
    case.maybe_norm(random, rows, k);
    push_biases(&mut case, random, [experts, n]);
    push_correction(&mut case, random, experts, few);
    begin(&mut case, random);
    case.judge("experts_up of whole eights");

    let k = 8 * random.one_to(40);
    let mut case = Case::new::<ExpertsDown>(of_down);
    case.push_placed(random, DType::F32, &[rows, chosen, k], Random::float, true);
    logits(&mut case, random);
    case.push_placed(random, DType::Bf16, &[experts, n, k], Random::float, true);
    case.push(random, DType::F32, &[rows, n], Random::float);
    case.push(random, DType::F32, &[rows, n], |_| 7.0);
    push_down_bias(&mut case, random, counting, [experts, n]);
    push_correction(&mut case, random, experts, few);
    begin(&mut case, random);
    case.judge("experts_down of whole eights");
}

/// The same with weights in fewer bits, whole units of them and parts; x staged or not.
fn experts_in_fewer_bits(random: &mut Random, round: usize) {
    let weights = FEWER_BITS[round % 3];
    let rows = if (round / 3).is_multiple_of(3) { random.one_to(4) } else { 1 };
    let experts = [1, 3, 8][random.below(3) as usize];
    let chosen = random.one_to(experts);
    let n = random.one_to(9);
    let k = match random.below(4) {
        0 => random.one_to(1500),
        1 => 128 * random.one_to(12),
        2 => 8 * random.one_to(100),
        _ => 32 * random.one_to(100),
    };
    let logits =
        |case: &mut Case, random: &mut Random| case.push(random, DType::F32, &[rows, experts], |r| 3.0 * r.float());
    let counting = counting(random);
    let params = experts_up::Params { gating: gating(random), order: 0, eps: 1e-5, counting };
    let mut case = Case::new::<ExpertsUp>(params);
    let dtype = random.dtype();
    case.floats(random, dtype, &[rows, k]);
    logits(&mut case, random);
    case.push_packed(random, weights, &[experts, n, k]);
    let other = if random.below(4) == 0 { DType::Q8 } else { weights };
    case.push_packed(random, other, &[experts, n, k]);
    case.push(random, DType::F32, &[rows, chosen, n], |_| 7.0);
    case.maybe_norm(random, rows, k);
    push_biases(&mut case, random, [experts, n]);
    push_correction(&mut case, random, experts, false);
    case.step.rows = random.one_to(rows + 1);
    case.judge("experts_up with weights in fewer bits");

    let mut case = Case::new::<ExpertsDown>(experts_down::Params { order: 0, counting });
    // Long ones are several groups.
    let k = if random.below(3) == 0 { 32 * (80 + random.below(240)) } else { k };
    let n = if k > 2000 { n } else { n * random.one_to(8) };
    let (dtype, is_whole) = if random.below(4) > 0 { (DType::F32, true) } else { (random.dtype(), false) };
    case.push_placed(random, dtype, &[rows, chosen, k], Random::float, is_whole);
    logits(&mut case, random);
    case.push_packed(random, weights, &[experts, n, k]);
    case.maybe(random, &[rows, n]);
    case.push(random, DType::F32, &[rows, n], |_| 7.0);
    push_down_bias(&mut case, random, counting, [experts, n]);
    push_correction(&mut case, random, experts, false);
    case.step.rows = random.one_to(rows + 1);
    case.judge("experts_down with weights in fewer bits");
}

/// Rows of no whole lines are read by units, as those of whole ones, and not element by element.
#[test]
fn experts_rows_need_no_whole_lines() {
    let (experts, chosen, n) = (5, 3, 16);
    for (seed, (weights, k)) in
        (1..).zip(FEWER_BITS.into_iter().flat_map(|weights| [8, 96, 160, 352, 2880].map(|k| (weights, k))))
    {
        let mut random = Random(seed);
        let logits =
            |case: &mut Case, random: &mut Random| case.push(random, DType::F32, &[1, experts], |r| 3.0 * r.float());
        let judge = |mut case: Case, matrices: u32, what: &str| {
            (case.step.rows, case.threads) = (1, &[96]);
            case.compare(what);
            let elems = u64::from(chosen * n * k * matrices);
            assert!(k < 2880 || case.report.bytes_read < 3 * elems, "{what}: {elems}, {:?}", case.report);
        };
        let gating = gated_linear::Gating::of(1);
        let counting = Counting::of(Weighting::Chosen);
        let mut case = Case::new::<ExpertsUp>(experts_up::Params { gating, order: 0, eps: 1e-5, counting });
        case.push_placed(&mut random, DType::F32, &[1, k], Random::float, true);
        logits(&mut case, &mut random);
        case.push_packed(&mut random, weights, &[experts, n, k]);
        case.push_packed(&mut random, weights, &[experts, n, k]);
        case.push(&mut random, DType::F32, &[1, chosen, n], |_| 7.0);
        case.floats(&mut random, DType::F32, &[k]);
        (0..3).for_each(|_| case.absent());
        judge(case, 2, "experts_up");

        let mut case = Case::new::<ExpertsDown>(experts_down::Params { order: 0, counting });
        case.push_placed(&mut random, DType::F32, &[1, chosen, k], Random::float, true);
        logits(&mut case, &mut random);
        case.push_packed(&mut random, weights, &[experts, n, k]);
        case.floats(&mut random, DType::F32, &[1, n]);
        case.push(&mut random, DType::F32, &[1, n], |_| 7.0);
        (0..2).for_each(|_| case.absent());
        judge(case, 1, "experts_down");
    }
}

/// What stands around products of routed rows: which experts rows go to, and the sum of what these make.
fn routes_and_slots(random: &mut Random, round: usize) {
    let rows = random.one_to(6);
    let experts = [1, 3, 8, 130][random.below(4) as usize];
    let chosen = random.one_to(experts.min(9));
    let (counting, few) = (counting(random), random.flip());
    let mut case = Case::new::<ExpertRoutes>(expert_routes::Params { counting });
    case.push(random, DType::F32, &[rows, experts], |r| if few { r.below(4) as f32 } else { 3.0 * r.float() });
    case.push(random, DType::I32, &[rows, chosen], |_| 7.0);
    case.push(random, DType::F32, &[rows, chosen], |_| 7.0);
    push_correction(&mut case, random, experts, few);
    case.step.rows = random.one_to(rows + 1);
    case.judge("expert_routes");

    let n = random.one_to(if round.is_multiple_of(2) { 40 } else { 300 });
    let mut case = Case::new::<SlotSum>(slot_sum::Params {});
    let dtype = random.dtype();
    case.floats(random, dtype, &[rows, chosen, n]);
    case.maybe(random, &[rows, n]);
    let dtype = random.dtype();
    case.push(random, dtype, &[rows, n], |_| 7.0);
    case.step.rows = random.one_to(rows + 1);
    case.judge("slot_sum");
}

/// Rows that go to `chosen` of `experts` experts: where `few`, mostly to the last ones.
fn push_routes(case: &mut Case, random: &mut Random, [rows, experts, chosen]: [u32; 3], few: bool) {
    let mut all = Vec::new();
    for _ in 0..rows {
        let mut left: Vec<u32> = (0..experts).collect();
        for _ in 0..chosen {
            let last = left.len() as u32 - 1;
            let at = if few && random.below(8) > 0 { last } else { random.below(last + 1) };
            all.push(left.remove(at as usize) as f32);
        }
    }
    let mut all = all.into_iter();
    case.push(random, DType::I32, &[rows, chosen], |_| all.next().expect("a number for each"));
}

/// Gated rows, or those of slots, of one expert and of many, on the tensor cores and without; parts with no second
/// tile, and with several, experts with no row, with one, and with more than a part has.
fn routed_case(random: &mut Random, round: usize, blocks: u32) -> (Case, bool) {
    let by_warpgroup = !round.is_multiple_of(4) || blocks > 1;
    let experts = [1, 3, 9, 131][random.below(4) as usize];
    let chosen = random.one_to(experts.min(5));
    let rows = random.one_to(if by_warpgroup { [20, 200, 40, 300][round / 4 % 4] } else { 5 });
    let (n, k) = (random.one_to(if experts > 100 { 20 } else { 200 }), 8 * random.one_to(12));
    let k = if by_warpgroup { k } else { random.one_to(100) };
    let is_pair = random.flip();
    let gating = if is_pair { gating(random) } else { gated_linear::Gating::default() };
    let has_slots = u32::from(random.flip());
    let mut case = Case::new::<RoutedLinear>(routed_linear::Params { gating, blocks, has_slots });
    if by_warpgroup {
        (case.tile_bytes, case.threads) = (TILE_BYTES, &[224, 160]);
    }
    let dtype = |random: &mut Random| if by_warpgroup { DType::Bf16 } else { random.dtype() };
    let x: &[u32] = if has_slots == 1 { &[rows, chosen, k] } else { &[rows, k] };
    let own = dtype(random);
    case.push_placed(random, own, x, Random::float, by_warpgroup);
    let few = random.flip();
    push_routes(&mut case, random, [rows, experts, chosen], few);
    // On tensor cores both alike.
    let fewer = [None, Some(DType::Q8), Some(DType::Q4), Some(DType::Mx4), Some(DType::Int4)][random.below(5) as usize];
    let push = |case: &mut Case, random: &mut Random| match fewer {
        Some(dtype) => case.push_packed(random, dtype, &[experts, n, k]),
        None => {
            let own = dtype(random);
            case.push_placed(random, own, &[experts, n, k], Random::float, by_warpgroup);
        }
    };
    push(&mut case, random);
    if is_pair {
        push(&mut case, random);
    } else {
        case.absent();
    }
    if by_warpgroup {
        use routed_linear::slot::{UP, W};
        (case.rounded, case.by_warpgroup) = (&[W, UP][..1 + usize::from(is_pair)], true);
    }
    if random.flip() {
        case.floats(random, DType::F32, &[rows, chosen]);
    } else {
        case.absent();
    }
    let own = random.dtype();
    case.push(random, own, &[rows, chosen, n], |_| 7.0);
    if is_pair {
        push_biases(&mut case, random, [experts, n]);
    } else {
        case.maybe(random, &[experts, n]);
        case.absent();
    }
    case.step.rows = random.one_to(rows + 1);
    (case, by_warpgroup)
}

fn routed_linear(random: &mut Random, round: usize) {
    let (mut case, by_warpgroup) = routed_case(random, round, 1);
    case.compare("routed_linear");
    assert_eq!(case.report.products > 0, by_warpgroup);
}

/// Blocks that share the work do each part of it once, all of it together, and none much more than another.
fn routed_linear_in_shares(random: &mut Random, round: usize) {
    let blocks = 2 + random.below(4);
    let seed = random.next();
    let run = |blocks: u32, block: u32| {
        let (mut case, _) = routed_case(&mut Random(seed), 4 * round + 1, blocks);
        // As many rows as the one block has, and no reference but that.
        (case.block, case.threads, case.tolerance) = (block, &[160], if blocks > 1 { 1e30 } else { case.tolerance });
        case.compare("routed_linear");
        let y = &case.operands[routed_linear::slot::Y];
        // SAFETY: the operand's own memory.
        let y_made = unsafe { Tensor::new(case.made[routed_linear::slot::Y].as_mut_ptr().cast(), y) };
        indices(y).map(|index| y_made.get(index)).collect::<Vec<f32>>()
    };
    let whole = run(1, 0);
    let parts: Vec<Vec<f32>> = (0..blocks).map(|block| run(blocks, block)).collect();
    for (at, value) in whole.iter().enumerate() {
        let by = parts.iter().filter(|part| part[at] != 7.0).count();
        assert_eq!(by, usize::from(*value != 7.0), "element {at}");
        assert!(parts.iter().all(|part| part[at] == 7.0 || part[at] == *value), "element {at}");
    }
}

#[test]
fn a_number_nobody_has_is_a_fault() {
    let task = TaskDesc { task_type: u16::MAX, ..TaskDesc::zeroed() };
    let options = Options::new(1, 32, 1);
    let turn = turn_of(&task, &[], &[]);
    let launched = launch(&options, vec![descriptors(&turn)], || {
        let call = Call { program_runs: 0, programs: &[], tiles: None, launch: None };
        // SAFETY: every thread makes these calls, and no body runs.
        let outcome = unsafe {
            turn::fetch(turn.as_ptr(), turn.len() as u32, Seen::default(), &Block::current());
            Block::current().sync();
            run_gpu(&call, &Block::current(), || Ok(()))
        };
        assert_eq!(outcome.map_err(|fault| fault.code), Err(FaultCode::NoSuchKernel as u32));
    });
    assert!(launched.is_ok(), "{launched:?}");
}
