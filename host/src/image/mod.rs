//! The image: the only thing executors see.
//!
//! An [`Image`] comes from [`encode`] or [`decode`](Image::decode) alone, and both check every rule in [`check`]: so an
//! executor that holds one may follow its indices without looking. Offsets, never pointers, inside; the same bytes are
//! sent to a GPU as they are.

pub mod check;
pub mod encode;
mod flagged;
mod loads;

use check::Violation;
use perpetua_device::kernels::Spec;
use perpetua_device::worker::ImageView;
use perpetua_shared::event::EventDesc;
use perpetua_shared::image::{BindingDesc, BindingKind, EVERY_SEQUENCE, ImageHeader, MAGIC, ProgramDesc, VERSION};
use perpetua_shared::limits::MAX_WORKERS;
use perpetua_shared::task::{Operand, TaskDesc};
use perpetua_shared::{DataOp, PrefetchOp};
use std::fmt;
use std::ops::Range;

/// A checked image.
#[derive(Clone, PartialEq, Eq)]
pub struct Image {
    /// The bytes, in words so that every descriptor is aligned.
    words: Vec<u64>,
    sections: Sections,
}

/// The sections of loaders. Heads: row `p` (of `n_workers + 1` entries) says where worker `w`'s entries of program `p`
/// start, and the end.
#[derive(Clone, Debug)]
pub struct Loads<'a> {
    /// Heads of `data`.
    pub data_heads: &'a [u32],
    /// Copies into shared memory, in each worker's order.
    pub data: &'a [DataOp],
    /// Heads of `prefetches`.
    pub prefetch_heads: &'a [u32],
    /// What the L2 cache is asked for.
    pub prefetches: &'a [PrefetchOp],
}

/// Memory an executor supplies, and what for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    /// The buffer's name; for weights, the checkpoint's.
    pub name: String,
    /// See [`BindingKind`].
    pub kind: BindingKind,
    /// Its size.
    pub bytes: u64,
    /// Alignment its start must have.
    pub align_bytes: u32,
    /// Its contents, for a constant.
    pub contents: Option<Vec<u8>>,
    /// Tensors of the checkpoint that it is, all of one size, if it is a stack: their numbers stand where its name has
    /// `*`.
    pub parts: Option<u32>,
}

impl Binding {
    /// Names of the tensors of the checkpoint that it is, for weights, in order.
    pub fn part_names(&self) -> Vec<String> {
        match self.parts {
            None => vec![self.name.clone()],
            Some(n) => (0..n).map(|number| self.name.replacen('*', &number.to_string(), 1)).collect(),
        }
    }

    /// Bytes of each of these tensors; of a binding that is no weights, its own.
    pub fn part_bytes(&self) -> u64 {
        self.bytes / u64::from(self.parts.unwrap_or(1).max(1))
    }

    /// What an image says of it.
    pub fn desc(&self) -> BindingDesc {
        BindingDesc { bytes: self.bytes, kind: self.kind as u32, align_bytes: self.align_bytes }
    }
}

/// Byte range of each section.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sections {
    bindings: Range<usize>,
    operands: Range<usize>,
    programs: Range<usize>,
    tasks: Range<usize>,
    events: Range<usize>,
    waits: Range<usize>,
    triggers: Range<usize>,
    list_heads: Range<usize>,
    lists: Range<usize>,
    data_heads: Range<usize>,
    data: Range<usize>,
    prefetch_heads: Range<usize>,
    prefetches: Range<usize>,
    name_heads: Range<usize>,
    names: Range<usize>,
    end: usize,
}

impl Sections {
    fn of(header: &ImageHeader) -> Sections {
        let mut at = size_of::<ImageHeader>();
        let mut section = |count: u64, size: usize| {
            let range = at..at + count as usize * size;
            at = range.end.next_multiple_of(8);
            range
        };
        // Counts are u32 and elements at most 80 bytes, so nothing here overflows a 64-bit usize.
        let n = u64::from;
        let programs = n(header.n_programs);
        Sections {
            bindings: section(n(header.n_bindings), size_of::<BindingDesc>()),
            operands: section(n(header.n_operands), size_of::<Operand>()),
            programs: section(programs, size_of::<ProgramDesc>()),
            tasks: section(n(header.n_tasks), size_of::<TaskDesc>()),
            events: section(n(header.n_events), size_of::<EventDesc>()),
            waits: section(n(header.n_waits), 4),
            triggers: section(n(header.n_triggers), 4),
            list_heads: section(programs * (n(header.n_workers) + 2), 4),
            lists: section(n(header.n_list_entries), 4),
            data_heads: section(programs * (n(header.n_workers) + 1), 4),
            data: section(n(header.n_data), size_of::<DataOp>()),
            prefetch_heads: section(programs * (n(header.n_workers) + 1), 4),
            prefetches: section(n(header.n_prefetches), size_of::<PrefetchOp>()),
            name_heads: section(n(header.n_ops) + 1, 4),
            names: section(n(header.n_name_bytes), 1),
            end: at,
        }
    }
}

/// Why bytes are no image.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// Not an image at all.
    #[error("not an image: {0}")]
    Format(String),
    /// An image of another version of the format.
    #[error("image format version {found}, expected {VERSION}")]
    Version {
        /// What it says.
        found: u32,
    },
    /// Its checksum does not fit its contents.
    #[error("image checksum {found:016x}, expected {expected:016x}: the bytes are damaged")]
    Checksum {
        /// Over the bytes given.
        found: u64,
        /// What the header says.
        expected: u64,
    },
    /// It breaks rules of the format.
    #[error("image breaks {} rule(s); first: {}", .0.len(), .0[0])]
    Rules(Vec<Violation>),
}

/// FNV-1a over 64-bit words: order-sensitive, and fast enough to be always on.
fn checksum(words: &[u64]) -> u64 {
    words.iter().fold(0xCBF2_9CE4_8422_2325, |hash, word| (hash ^ word).wrapping_mul(0x0000_0100_0000_01B3))
}

impl Image {
    /// Sequences of a batch that every `State` and `Tokens` binding has an equal part for; 1 when there is no program
    /// for batches.
    pub fn sequences(&self) -> usize {
        let programs: &[ProgramDesc] = self.section(&self.sections.programs);
        programs.iter().find(|p| p.kind == EVERY_SEQUENCE).map_or(1, |p| p.max_rows as usize)
    }

    /// Bytes of the part of binding `number` that one sequence has; 0 for a binding that all sequences share.
    pub fn part_bytes(&self, number: usize) -> u64 {
        let binding = &self.bindings()[number];
        match BindingKind::from_u32(binding.kind) {
            // An image that is being judged may have a batch of none.
            Some(BindingKind::State | BindingKind::Tokens) => binding.bytes / self.sequences().max(1) as u64,
            _ => 0,
        }
    }

    /// The image that `bytes` are, once every rule has been checked.
    ///
    /// # Safety
    /// Of two tasks that touch the same bytes, one of them writing, events say which is first, as they do in what
    /// [`compile`](crate::compile::compile) makes. That is no rule that is checked here, and whoever runs the image
    /// relies on it.
    ///
    /// # Errors
    /// What is wrong with the bytes.
    #[allow(unsafe_code, reason = "a promise that executors rely on; nothing here does")]
    pub unsafe fn decode(bytes: &[u8]) -> Result<Image, ImageError> {
        if bytes.len() < size_of::<ImageHeader>() || !bytes.len().is_multiple_of(8) {
            return Err(ImageError::Format(format!(
                "{} bytes, expected a header of {} and whole words",
                bytes.len(),
                size_of::<ImageHeader>()
            )));
        }
        let mut words = vec![0u64; bytes.len() / 8];
        bytemuck::cast_slice_mut::<u64, u8>(&mut words).copy_from_slice(bytes);
        let image = Image::of_words(words)?;
        let (found, expected) = (checksum(&image.words[size_of::<ImageHeader>() / 8..]), image.header().checksum);
        if found != expected {
            return Err(ImageError::Checksum { found, expected });
        }
        image.judged()
    }

    /// Words whose header is an image's, and as many as it counts. Neither its checksum nor any rule has been looked
    /// at.
    fn of_words(words: Vec<u64>) -> Result<Image, ImageError> {
        let header: ImageHeader =
            *bytemuck::from_bytes(&bytemuck::cast_slice::<u64, u8>(&words)[..size_of::<ImageHeader>()]);
        if header.magic != MAGIC {
            return Err(ImageError::Format(format!("it starts with {:02x?}, expected {MAGIC:02x?}", header.magic)));
        }
        if header.version != VERSION {
            return Err(ImageError::Version { found: header.version });
        }
        if header.n_workers == 0 || header.n_workers as usize > MAX_WORKERS {
            return Err(ImageError::Format(format!("{} workers, expected 1 to {MAX_WORKERS}", header.n_workers)));
        }
        let sections = Sections::of(&header);
        if sections.end != words.len() * 8 {
            return Err(ImageError::Format(format!(
                "{} bytes, but its header counts {}",
                words.len() * 8,
                sections.end
            )));
        }
        Ok(Image { words, sections })
    }

    /// The same, if it breaks no rule.
    fn judged(self) -> Result<Image, ImageError> {
        check::check(&self).map_err(ImageError::Rules)?;
        Ok(self)
    }

    fn section<T: bytemuck::AnyBitPattern>(&self, range: &Range<usize>) -> &[T] {
        bytemuck::cast_slice(&bytemuck::cast_slice::<u64, u8>(&self.words)[range.clone()])
    }

    /// The bytes, as they are stored or sent.
    pub fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }

    /// The header.
    pub fn header(&self) -> &ImageHeader {
        bytemuck::from_bytes(&self.bytes()[..size_of::<ImageHeader>()])
    }

    /// The memory an executor must supply.
    pub fn bindings(&self) -> &[BindingDesc] {
        self.section(&self.sections.bindings)
    }

    /// Everything the worker loop follows.
    pub fn view(&self) -> ImageView<'_> {
        ImageView {
            programs: self.section(&self.sections.programs),
            tasks: self.section(&self.sections.tasks),
            operands: self.section(&self.sections.operands),
            events: self.section(&self.sections.events),
            waits: self.section(&self.sections.waits),
            triggers: self.section(&self.sections.triggers),
            list_heads: self.section(&self.sections.list_heads),
            lists: self.section(&self.sections.lists),
            n_workers: self.header().n_workers,
        }
    }

    /// What the workers' loaders follow.
    pub fn loads(&self) -> Loads<'_> {
        Loads {
            data_heads: self.section(&self.sections.data_heads),
            data: self.section(&self.sections.data),
            prefetch_heads: self.section(&self.sections.prefetch_heads),
            prefetches: self.section(&self.sections.prefetches),
        }
    }

    /// The name of operator `op`, for reports; empty when there is none.
    pub fn op_name(&self, op: u32) -> &str {
        let heads: &[u32] = self.section(&self.sections.name_heads);
        let names: &[u8] = self.section(&self.sections.names);
        match (heads.get(op as usize), heads.get(op as usize + 1)) {
            (Some(first), Some(end)) => std::str::from_utf8(&names[*first as usize..*end as usize]).unwrap_or(""),
            _ => "",
        }
    }

    /// Task `task` by name: operator, block.
    pub fn task_name(&self, task: u32) -> String {
        match self.view().tasks.get(task as usize) {
            Some(desc) => format!("t{task} ({}, block {:?})", self.op_name(desc.op), desc.block),
            None => "no task".to_owned(),
        }
    }

    /// Operand `operand` of task `task`, as its macro kernel calls it.
    pub fn operand_name(&self, task: u32, operand: u32) -> String {
        let spec = self.view().tasks.get(task as usize).and_then(|desc| Spec::of(desc.task_type));
        spec.and_then(|spec| spec.slots.get(operand as usize)).map_or("?", |slot| slot.name).to_owned()
    }
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Image").field("bytes", &(self.words.len() * 8)).field("header", self.header()).finish()
    }
}

impl fmt::Display for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let view = self.view();
        for (number, program) in view.programs.iter().enumerate() {
            writeln!(f, "p{number} rows {} kind {}", program.max_rows, program.kind)?;
            let first = program.task_first as usize;
            for (at, task) in view.tasks[first..first + program.task_count as usize].iter().enumerate() {
                let kernel = perpetua_device::kernels::Spec::of(task.task_type).map_or("?", |spec| spec.name);
                writeln!(
                    f,
                    "  t{} {kernel} {} {:?} waits {:?} triggers {:?}",
                    first + at,
                    self.op_name(task.op),
                    task.block,
                    view.waits(task),
                    view.triggers(task)
                )?;
            }
        }
        Ok(())
    }
}
