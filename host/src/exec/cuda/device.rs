//! What lies on the device, and how the host gets at it between runs. It is one allocation: the image's sections, the
//! counters and what else is the kernel's own, then the bindings. What it begins with is uploaded by several threads;
//! all else goes through one stage of pinned memory.

use super::CudaNewError;
use super::resources::Resources;
use crate::cuda::driver::{CudaError, DevicePtr, Driver, Pinned, Stream};
use crate::cuda::{Gpu, GpuError, Piece, upload};
use crate::exec::memory::{WeightSource, read_f32, weight_parts};
use crate::exec::sections::{self, Sections};
use crate::exec::threads::usable_cores;
use crate::image::{Binding, Image};
use perpetua_shared::image::BindingKind;
use perpetua_shared::launch::TaskTrace;
use perpetua_shared::{DType, Fault, Operand};

/// Alignment of everything on the device: a bulk copy's 16 bytes, and a sector of the cache.
const ALIGN: u64 = 256;

/// Pinned memory through which everything goes that is not uploaded, a part at a time.
const STAGE_BYTES: usize = 1 << 20;

/// Where things lie in the one allocation, from its start.
#[derive(Debug, Default)]
pub(super) struct Layout {
    /// Each of the image's, as they are [listed](Sections::list).
    sections: Vec<u64>,
    /// Counters, the fault record, positions and paces: zeroed together.
    pub(super) counters: u64,
    pub(super) fault: u64,
    pub(super) positions: u64,
    pub(super) paces: u64,
    pub(super) trace: u64,
    trace_end: u64,
    rooms: Vec<Room>,
    pub(super) bytes: u64,
}

/// A binding's bytes.
#[derive(Debug)]
pub(super) struct Room {
    pub(super) kind: BindingKind,
    pub(super) name: String,
    at: u64,
    bytes: u64,
}

impl Layout {
    /// Of `image`, whose sections are `sections`, with `bindings`; there is room for the times of `n_trace` tasks of
    /// each worker.
    pub(super) fn new(image: &Image, sections: &Sections<'_>, bindings: &[Binding], n_trace: u32) -> Layout {
        let view = image.view();
        let mut layout = Layout::default();
        let mut end = 0u64;
        let mut place = |bytes: usize, align: u64| {
            let at = end.next_multiple_of(align.max(ALIGN));
            end = at + bytes as u64;
            at
        };
        layout.sections = sections.list().iter().map(|section| place(section.bytes.len(), 1)).collect();
        layout.counters = place(4 * sections::counters(&view), 1);
        layout.fault = place(size_of::<Fault>(), 1);
        layout.positions = place(4 * view.n_workers as usize, 1);
        layout.paces = place(4 * view.n_workers as usize, 1);
        layout.trace = place(size_of::<TaskTrace>() * n_trace as usize * view.n_workers as usize, 1);
        layout.trace_end = place(0, 1);
        for binding in bindings {
            let Binding { kind, bytes, align_bytes, .. } = *binding;
            let at = place(bytes as usize, u64::from(align_bytes));
            layout.rooms.push(Room { kind, name: binding.name.clone(), at, bytes });
        }
        layout.bytes = end.next_multiple_of(ALIGN);
        layout
    }

    /// Refuses what does not fit the memory that `gpu` has left.
    pub(super) fn check_fits(&self, gpu: &Gpu) -> Result<(), GpuError> {
        let (free, _) = gpu.driver().memory()?;
        if self.bytes <= free {
            return Ok(());
        }
        let (weights, cache) = (self.sum_of(BindingKind::Weight), self.sum_of(BindingKind::State));
        let (device, needed) = (gpu.info().name.clone(), self.bytes);
        Err(GpuError::Memory { device, free, needed, weights, cache, rest: needed - weights - cache })
    }

    /// Bytes of all bindings of this kind.
    pub(super) fn sum_of(&self, kind: BindingKind) -> u64 {
        self.rooms.iter().filter(|room| room.kind == kind).map(|room| room.bytes).sum()
    }
}

/// The allocation, the streams, and what goes between them and the host.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) resources: Resources,
    pub(super) layout: Layout,
    base: DevicePtr,
    stage: Pinned,
    /// The kernel's.
    pub(super) stream: Stream,
    /// Beside the kernel.
    pub(super) side: Stream,
}

impl Device {
    /// Room for `layout`, taken by `resources`. Nothing is in it yet.
    pub(super) fn new(mut resources: Resources, layout: Layout) -> Result<Device, CudaError> {
        let base = resources.alloc(layout.bytes)?;
        let side = resources.stream()?;
        let stream = match resources.gpu().stream() {
            Some(stream) => stream,
            None => resources.stream()?,
        };
        let stage = resources.pinned(STAGE_BYTES)?;
        Ok(Device { resources, layout, base, stage, stream, side })
    }

    /// Brings what there is of the image and the bindings, and zeroes all else; `progress` is called with the bytes
    /// that have been handed over.
    ///
    /// # Safety
    /// `sections` and `bindings` are those of the layout, and nothing runs.
    pub(super) unsafe fn bring(
        &self,
        sections: &Sections<'_>,
        bindings: &[Binding],
        weights: &dyn WeightSource,
        progress: impl FnMut(u64),
    ) -> Result<(), CudaNewError> {
        let mut pieces = Vec::new();
        let mut piece = |at: u64, bytes| pieces.push(Piece { to: self.place(at), bytes });
        let list = sections.list();
        for (section, at) in list.iter().zip(&self.layout.sections) {
            piece(*at, section.bytes);
        }
        for (binding, room) in bindings.iter().zip(&self.layout.rooms) {
            match (binding.kind, &binding.contents) {
                (BindingKind::Weight, _) => {
                    let mut to = room.at;
                    for part in weight_parts(weights, binding)? {
                        piece(to, part);
                        to += part.len() as u64;
                    }
                }
                (_, Some(contents)) => piece(room.at, contents),
                (_, None) if binding.bytes == 0 => {}
                // SAFETY: the binding's room, which nothing uses yet.
                (_, None) => unsafe { self.zero(room.at, room.at + room.bytes)? },
            }
        }
        // SAFETY: as above; what is the kernel's own follows each other.
        unsafe { self.zero(self.layout.counters, self.layout.trace_end)? };
        self.driver().synchronize(self.stream)?;
        // SAFETY: every piece goes to a place of the layout that was made for it, and nothing runs.
        unsafe { upload(self.gpu(), &pieces, usable_cores(), progress)? };
        Ok(())
    }

    /// Clean counters and flags, no fault and nobody anywhere.
    ///
    /// # Safety
    /// No kernel runs.
    pub(super) unsafe fn start_over(&self) -> Result<(), CudaError> {
        let _entered = self.gpu().enter()?;
        // SAFETY: what is the kernel's own follows each other, as do a binding's bytes; no kernel runs.
        unsafe {
            self.zero(self.layout.counters, self.layout.trace)?;
            for room in self.layout.rooms.iter().filter(|room| room.kind == BindingKind::Flagged) {
                self.zero(room.at, room.at + room.bytes)?;
            }
        }
        self.driver().synchronize(self.stream)
    }

    /// No times of any task, by the time the stream gets there.
    ///
    /// # Safety
    /// No kernel runs.
    pub(super) unsafe fn zero_trace(&self) -> Result<(), CudaError> {
        let _entered = self.gpu().enter()?;
        // SAFETY: the trace's place.
        unsafe { self.zero(self.layout.trace, self.layout.trace_end) }
    }

    /// Zeroes bytes `first..end` of the allocation, by the time the stream gets there.
    ///
    /// # Safety
    /// They lie in it, and nobody uses them until then.
    unsafe fn zero(&self, first: u64, end: u64) -> Result<(), CudaError> {
        // SAFETY: as said above.
        unsafe { self.driver().set(self.place(first), 0, end - first, self.stream) }
    }

    /// Copies `bytes` to the device and waits for it.
    ///
    /// # Safety
    /// There is room for them at `to`, and no kernel runs that uses it.
    pub(super) unsafe fn write(&self, to: DevicePtr, bytes: &[u8]) -> Result<(), CudaError> {
        let _entered = self.resources.enter()?;
        for (i, part) in bytes.chunks(STAGE_BYTES).enumerate() {
            // SAFETY: the stage is as large and nobody reads it: every use of it ends by waiting for the stream.
            unsafe {
                self.stage.host.copy_from_nonoverlapping(part.as_ptr(), part.len());
                self.driver().copy_in(to.offset((i * STAGE_BYTES) as u64), self.stage.host, part.len(), self.stream)?;
            }
            self.driver().synchronize(self.stream)?;
        }
        Ok(())
    }

    /// Copies from the device into `bytes`.
    ///
    /// # Safety
    /// There are as many bytes at `from`, and no kernel runs that writes them.
    pub(super) unsafe fn read(&self, from: DevicePtr, bytes: &mut [u8]) -> Result<(), CudaError> {
        let _entered = self.resources.enter()?;
        for (i, part) in bytes.chunks_mut(STAGE_BYTES).enumerate() {
            // SAFETY: as in `write`.
            unsafe {
                self.driver().copy_out(
                    self.stage.host,
                    from.offset((i * STAGE_BYTES) as u64),
                    part.len(),
                    self.stream,
                )?;
                self.driver().synchronize(self.stream)?;
                self.stage.host.copy_to_nonoverlapping(part.as_mut_ptr(), part.len());
            }
        }
        Ok(())
    }

    /// Appends rows `..rows` of `output`, whose elements become f32s, to `out`.
    ///
    /// # Safety
    /// It is an operand of the image's, and no kernel runs that writes it.
    pub(super) unsafe fn append_f32(&self, output: &Operand, rows: usize, out: &mut Vec<f32>) -> Result<(), CudaError> {
        // From the box's first element to its last.
        let size = output.dtype().map_or(4, DType::size_bytes) as u64;
        let dims = 0..usize::from(output.rank);
        let last: u64 = dims.map(|d| u64::from(output.extent[d].max(1) - 1) * u64::from(output.stride_elems[d])).sum();
        let bytes = ((last + 1) * size) as usize;
        let mut words = vec![0u64; bytes.div_ceil(8)];
        let from = self.at(output.binding.idx()).offset(output.offset_bytes);
        // SAFETY: the image's check has judged the box inside its binding, and no kernel runs.
        unsafe { self.read(from, &mut bytemuck::cast_slice_mut(&mut words)[..bytes])? };
        let operand = Operand { offset_bytes: 0, ..*output };
        // SAFETY: the words hold the whole box, from its first element on.
        out.append(&mut unsafe { read_f32(words.as_mut_ptr().cast(), &operand, rows) });
        Ok(())
    }

    /// The address of what lies `at` bytes from the start.
    pub(super) fn place(&self, at: u64) -> DevicePtr {
        self.base.offset(at)
    }

    /// The addresses of the image's sections, as they are [listed](Sections::list).
    pub(super) fn sections(&self) -> impl ExactSizeIterator<Item = u64> {
        self.layout.sections.iter().map(|at| self.place(*at).0)
    }

    /// The bindings' addresses.
    pub(super) fn bindings(&self) -> Vec<u64> {
        self.layout.rooms.iter().map(|room| self.place(room.at).0).collect()
    }

    /// The address of binding `binding`.
    pub(super) fn at(&self, binding: usize) -> DevicePtr {
        self.place(self.layout.rooms[binding].at)
    }

    /// Bytes of binding `binding`.
    pub(super) fn bytes_of(&self, binding: usize) -> u64 {
        self.layout.rooms[binding].bytes
    }

    /// The first binding that is so.
    pub(super) fn find(&self, is_it: impl FnMut(&Room) -> bool) -> Option<usize> {
        self.layout.rooms.iter().position(is_it)
    }

    /// What bindings of `kind` are called.
    pub(super) fn names_of(&self, kind: BindingKind) -> impl Iterator<Item = String> {
        self.layout.rooms.iter().filter(move |room| room.kind == kind).map(|room| room.name.clone())
    }

    /// Where it is.
    pub(super) fn gpu(&self) -> &Gpu {
        self.resources.gpu()
    }

    /// Who is asked for all of this.
    pub(super) fn driver(&self) -> &dyn Driver {
        self.resources.driver()
    }
}
