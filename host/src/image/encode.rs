//! Making an image.

use super::{Image, ImageError, Sections, checksum};
use crate::parallel::side_by_side;
use perpetua_shared::event::EventDesc;
use perpetua_shared::image::{BindingDesc, ImageHeader, MAGIC, ProgramDesc, VERSION};
use perpetua_shared::task::{Operand, TaskDesc};
use perpetua_shared::{DataOp, PrefetchOp};
use std::ops::Range;

/// Bytes that are copied at a time.
const PIECE_BYTES: usize = 1 << 20;

/// An image's sections, before they are one block of bytes.
#[derive(Clone, Debug, Default)]
pub struct Parts {
    /// Workers the lists are made for.
    pub n_workers: u32,
    /// Memory the executor supplies.
    pub bindings: Vec<BindingDesc>,
    /// Programs.
    pub programs: Vec<ProgramDesc>,
    /// Tasks of all programs.
    pub tasks: Vec<TaskDesc>,
    /// Operands of all tasks.
    pub operands: Vec<Operand>,
    /// Events of all programs; the first two are the loop's own.
    pub events: Vec<EventDesc>,
    /// Event ids.
    pub waits: Vec<u32>,
    /// Event ids.
    pub triggers: Vec<u32>,
    /// See [`perpetua_device::worker::ImageView::list_heads`].
    pub list_heads: Vec<u32>,
    /// Task ids.
    pub lists: Vec<u32>,
    /// Where each worker's data ops of each program start, and a program's end.
    pub data_heads: Vec<u32>,
    /// Copies of all workers, sources bindings.
    pub data: Vec<DataOp>,
    /// As `data_heads`, of prefetches.
    pub prefetch_heads: Vec<u32>,
    /// Prefetches of all workers.
    pub prefetches: Vec<PrefetchOp>,
    /// Operator names.
    pub op_names: Vec<String>,
}

impl Parts {
    /// Those of `image`, to make another of.
    pub fn of(image: &Image) -> Parts {
        let (view, loads) = (image.view(), image.loads());
        Parts {
            n_workers: view.n_workers,
            bindings: image.bindings().to_vec(),
            programs: view.programs.to_vec(),
            tasks: view.tasks.to_vec(),
            operands: view.operands.to_vec(),
            events: view.events.to_vec(),
            waits: view.waits.to_vec(),
            triggers: view.triggers.to_vec(),
            list_heads: view.list_heads.to_vec(),
            lists: view.lists.to_vec(),
            data_heads: loads.data_heads.to_vec(),
            data: loads.data.to_vec(),
            prefetch_heads: loads.prefetch_heads.to_vec(),
            prefetches: loads.prefetches.to_vec(),
            op_names: (0..image.header().n_ops).map(|op| image.op_name(op).to_owned()).collect(),
        }
    }
}

/// Writes `parts` as an image and checks it as [`Image::decode`] would.
///
/// # Safety
/// As [`Image::decode`].
///
/// # Errors
/// The rules the parts break.
#[allow(unsafe_code, reason = "a promise that executors rely on; nothing here does")]
pub unsafe fn encode(parts: &Parts) -> Result<Image, ImageError> {
    encode_ordered(parts)
}

/// As [`encode`], of what the compiler has made, whose events order what they must (law 1).
pub(crate) fn encode_ordered(parts: &Parts) -> Result<Image, ImageError> {
    let mut name_heads = vec![0u32];
    let mut names = Vec::new();
    for name in &parts.op_names {
        names.extend_from_slice(name.as_bytes());
        name_heads.push(names.len() as u32);
    }
    let count = |what: &str, n: usize| {
        u32::try_from(n).map_err(|_| ImageError::Format(format!("{n} {what}, expected fewer than 2^32")))
    };
    let mut header = ImageHeader {
        magic: MAGIC,
        version: VERSION,
        n_workers: parts.n_workers,
        n_bindings: count("bindings", parts.bindings.len())?,
        n_programs: count("programs", parts.programs.len())?,
        n_tasks: count("tasks", parts.tasks.len())?,
        n_operands: count("operands", parts.operands.len())?,
        n_events: count("events", parts.events.len())?,
        n_waits: count("waits", parts.waits.len())?,
        n_triggers: count("triggers", parts.triggers.len())?,
        n_list_entries: count("list entries", parts.lists.len())?,
        n_data: count("data ops", parts.data.len())?,
        n_prefetches: count("prefetches", parts.prefetches.len())?,
        n_name_bytes: count("bytes of names", names.len())?,
        n_ops: count("operators", parts.op_names.len())?,
        checksum: 0,
    };
    let sections = Sections::of(&header);
    for (what, heads, section) in [
        ("list", &parts.list_heads, &sections.list_heads),
        ("data", &parts.data_heads, &sections.data_heads),
        ("prefetch", &parts.prefetch_heads, &sections.prefetch_heads),
    ] {
        let expected = section.len() / 4;
        if heads.len() != expected {
            return Err(ImageError::Format(format!("{} {what} heads, expected {expected}", heads.len())));
        }
    }
    let mut words = vec![0u64; sections.end / 8];
    let contents: [(&Range<usize>, &[u8]); 15] = [
        (&sections.bindings, bytemuck::cast_slice(&parts.bindings)),
        (&sections.operands, bytemuck::cast_slice(&parts.operands)),
        (&sections.programs, bytemuck::cast_slice(&parts.programs)),
        (&sections.tasks, bytemuck::cast_slice(&parts.tasks)),
        (&sections.events, bytemuck::cast_slice(&parts.events)),
        (&sections.waits, bytemuck::cast_slice(&parts.waits)),
        (&sections.triggers, bytemuck::cast_slice(&parts.triggers)),
        (&sections.list_heads, bytemuck::cast_slice(&parts.list_heads)),
        (&sections.lists, bytemuck::cast_slice(&parts.lists)),
        (&sections.data_heads, bytemuck::cast_slice(&parts.data_heads)),
        (&sections.data, bytemuck::cast_slice(&parts.data)),
        (&sections.prefetch_heads, bytemuck::cast_slice(&parts.prefetch_heads)),
        (&sections.prefetches, bytemuck::cast_slice(&parts.prefetches)),
        (&sections.name_heads, bytemuck::cast_slice(&name_heads)),
        (&sections.names, &names),
    ];
    write(bytemuck::cast_slice_mut(&mut words), contents);
    header.checksum = checksum(&words[size_of::<ImageHeader>() / 8..]);
    words[..size_of::<ImageHeader>() / 8].copy_from_slice(bytemuck::cast_slice(bytemuck::bytes_of(&header)));
    Image::of_words(words)?.judged()
}

/// Writes `contents`, sections in the order in which they lie, to their places in `bytes`.
///
/// PERF: of 30 MB, Qwen3-8B's for 132 SMs, the most time goes into pages that are touched for the first time, which
/// cores do side by side.
fn write<const N: usize>(bytes: &mut [u8], contents: [(&Range<usize>, &[u8]); N]) {
    let (mut pieces, mut rest, mut at) = (Vec::new(), bytes, 0);
    for (section, from) in contents {
        let (_, tail) = rest.split_at_mut(section.start - at);
        let (to, tail) = tail.split_at_mut(section.len());
        assert_eq!(to.len(), from.len(), "the header counts what there is");
        pieces.extend(to.chunks_mut(PIECE_BYTES).zip(from.chunks(PIECE_BYTES)));
        (rest, at) = (tail, section.end);
    }
    side_by_side(pieces, 4, |_, (to, from)| to.copy_from_slice(from));
}
