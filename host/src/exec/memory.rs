//! The memory an image's bindings name: what the executor allocates, and the checkpoint's bytes where they lie.

mod available;

pub use available::available_bytes;

use crate::compile::Compiled;
use crate::engine::Model;
use crate::image::{Binding, Image};
use perpetua_device::io::Tensor;
use perpetua_shared::control::{Control, Sequence};
use perpetua_shared::image::{BindingDesc, BindingKind};
use perpetua_shared::limits::MAX_SEQUENCES;
use perpetua_shared::task::Operand;
use perpetua_shared::{BindingId, DType, flag};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// A zeroed, aligned allocation.
#[derive(Debug)]
struct Owned {
    base: *mut u8,
    layout: Layout,
}

// SAFETY: it is plain memory; who may touch it when is settled by the events of the image that uses it.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

impl Owned {
    /// `None` when the system does not give so much.
    fn zeroed(bytes: u64, align: u32) -> Option<Owned> {
        let layout = Layout::from_size_align((bytes as usize).max(1), (align as usize).max(64))
            .expect("sizes and alignments are bounded by image::check");
        // SAFETY: the layout has a size of at least 1.
        let base = unsafe { alloc_zeroed(layout) };
        (!base.is_null()).then_some(Owned { base, layout })
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout, freed once.
        unsafe { dealloc(self.base, self.layout) }
    }
}

/// Bytes that outlive every executor using them: a mapped checkpoint.
pub type Keep = Arc<dyn std::any::Any + Send + Sync>;

/// Where weights come from. A checkpoint's come from a [`Model`](crate::Model); those in memory from an
/// `Arc<HashMap<String, Vec<u8>>>`.
///
/// # Safety
/// What [`bytes`](WeightSource::bytes) returns stays where it is, unchanged, as long as what
/// [`keep`](WeightSource::keep) returns, also when the source is gone: executors read it there.
pub unsafe trait WeightSource {
    /// The bytes of weight `name`, valid as long as what [`WeightSource::keep`] returns.
    fn bytes(&self, name: &str) -> Option<&[u8]>;
    /// Keeps the bytes alive.
    fn keep(&self) -> Keep;
}

/// No weights at all: for graphs without them.
#[derive(Debug)]
pub struct NoWeights;

// SAFETY: there are none.
unsafe impl WeightSource for NoWeights {
    fn bytes(&self, _: &str) -> Option<&[u8]> {
        None
    }
    fn keep(&self) -> Keep {
        Arc::new(())
    }
}

/// Weights held in memory, by name.
// SAFETY: nobody can change what an `Arc` that is held elsewhere holds.
unsafe impl WeightSource for Arc<std::collections::HashMap<String, Vec<u8>>> {
    fn bytes(&self, name: &str) -> Option<&[u8]> {
        self.get(name).map(Vec::as_slice)
    }
    fn keep(&self) -> Keep {
        self.clone()
    }
}

// SAFETY: a clone keeps the folder's mapped files and what has been quantised, and nothing changes either.
unsafe impl WeightSource for Model {
    fn bytes(&self, name: &str) -> Option<&[u8]> {
        match self.quantized().and_then(|quantized| quantized.get(name)) {
            Some(bytes) => Some(bytes),
            None => self.tensor_bytes(name),
        }
    }
    fn keep(&self) -> Keep {
        Arc::new(self.clone())
    }
}

/// The bytes of the tensors that `binding`, of weights, is.
///
/// # Errors
/// One that is missing or of another size.
pub(super) fn weight_parts<'a>(source: &'a dyn WeightSource, binding: &Binding) -> Result<Vec<&'a [u8]>, MemoryError> {
    let expected = binding.part_bytes();
    let part = |name: String| match source.bytes(&name) {
        None => Err(MemoryError::Missing(name)),
        Some(bytes) if bytes.len() as u64 != expected => {
            Err(MemoryError::Size { name, found: bytes.len() as u64, expected })
        }
        Some(bytes) => Ok(bytes),
    };
    binding.part_names().into_iter().map(part).collect()
}

/// Why memory cannot be supplied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The checkpoint has no such tensor.
    #[error("weight {0} is not in the checkpoint")]
    Missing(String),
    /// The graph has no such input.
    #[error("there is no input {name}: expected one of {known:?}")]
    NoInput {
        /// Asked for.
        name: String,
        /// There.
        known: Vec<String>,
    },
    /// What is to be written into an input has another size.
    #[error("input {name}: {found} bytes given, expected {expected}")]
    InputSize {
        /// The input.
        name: String,
        /// Bytes given.
        found: u64,
        /// Bytes it has.
        expected: u64,
    },
    /// The checkpoint's tensor has another size.
    #[error("weight {name}: {found} bytes, expected {expected}")]
    Size {
        /// The weight.
        name: String,
        /// Bytes there are.
        found: u64,
        /// Bytes the graph declares.
        expected: u64,
    },
    /// More than the machine can give.
    #[error("{what} need {bytes} bytes, but this machine has {available} available")]
    TooLarge {
        /// What for.
        what: String,
        /// Asked.
        bytes: u64,
        /// There.
        available: u64,
    },
    /// More than the system gives, whatever it says is there.
    #[error("{what} need {bytes} bytes, which the system refuses")]
    Refused {
        /// What for.
        what: String,
        /// Asked.
        bytes: u64,
    },
}

impl MemoryError {
    /// There is no input `name`, but `known`.
    pub(super) fn no_input(name: &str, known: impl Iterator<Item = String>) -> MemoryError {
        MemoryError::NoInput { name: name.to_owned(), known: known.collect() }
    }

    /// Whether input `name`, of `expected` bytes, can have `contents`.
    pub(super) fn check_input(name: &str, contents: &[u8], expected: u64) -> Result<(), MemoryError> {
        let found = contents.len() as u64;
        if found == expected { Ok(()) } else { Err(MemoryError::InputSize { name: name.to_owned(), found, expected }) }
    }
}

/// All bindings of one image, in memory.
#[derive(Debug)]
pub struct Memory {
    bases: Vec<*mut u8>,
    /// What the image says of each.
    descs: Vec<BindingDesc>,
    /// Per binding, where its tensors lie, if it is several of the checkpoint's; else none.
    stacks: Vec<Vec<*mut u8>>,
    /// Per binding, see [`Image::part_bytes`](crate::image::Image::part_bytes).
    parts: Vec<u64>,
    names: Vec<(BindingKind, String)>,
    control: usize,
    tokens: usize,
    _owned: Vec<Owned>,
    _keep: Keep,
}

// SAFETY: as for `Owned`; weights are only read.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

/// What is allocated for `compiled`, by the names that a program sets.
fn owned_by(compiled: &Compiled) -> String {
    let has_cache = compiled.bindings.iter().any(|binding| binding.kind == BindingKind::State);
    if has_cache { "KV cache (see EngineConfig::max_context) and intermediates" } else { "intermediates" }.to_owned()
}

impl Memory {
    /// Allocates what `compiled` needs and finds its weights in `source`, which stay where they are unless they are
    /// misaligned for their element type (safetensors allows that); then that one tensor is copied.
    ///
    /// # Errors
    /// A weight that is missing or of another size, or more memory than there is.
    ///
    /// # Panics
    /// When the bindings are not those of the image.
    pub fn new(compiled: &Compiled, source: &dyn WeightSource) -> Result<Memory, MemoryError> {
        let described = compiled.bindings.iter().map(Binding::desc);
        assert!(described.eq(compiled.image.bindings().iter().copied()), "the bindings must be those of the image");
        let own = |kind: BindingKind| !matches!(kind, BindingKind::Weight);
        let needed: u64 = compiled.bindings.iter().filter(|b| own(b.kind)).map(|b| b.bytes).sum();
        if let Some(available) = available_bytes()
            && needed > available
        {
            return Err(MemoryError::TooLarge { what: owned_by(compiled), bytes: needed, available });
        }
        let mut memory = Memory {
            bases: Vec::new(),
            stacks: Vec::new(),
            descs: compiled.image.bindings().to_vec(),
            parts: (0..compiled.bindings.len()).map(|number| compiled.image.part_bytes(number)).collect(),
            names: Vec::new(),
            control: usize::MAX,
            tokens: usize::MAX,
            _owned: Vec::new(),
            _keep: source.keep(),
        };
        for (number, binding) in compiled.bindings.iter().enumerate() {
            let mut owned = |contents: Option<&[u8]>| {
                let bytes = binding.part_bytes();
                let own = Owned::zeroed(bytes, binding.align_bytes).ok_or_else(|| match binding.kind {
                    BindingKind::Weight => MemoryError::Refused {
                        what: format!("bytes of {} at an address where they can be used", binding.name),
                        bytes,
                    },
                    _ => MemoryError::Refused { what: owned_by(compiled), bytes: needed },
                })?;
                if let Some(contents) = contents {
                    assert!(contents.len() as u64 <= bytes, "{} holds more than it has", binding.name);
                    // SAFETY: a fresh allocation of at least `contents.len()` bytes.
                    unsafe { core::ptr::copy_nonoverlapping(contents.as_ptr(), own.base, contents.len()) };
                }
                let base = own.base;
                memory._owned.push(own);
                Ok(base)
            };
            let lies = match binding.kind {
                BindingKind::Weight => {
                    let mut part = |bytes: &[u8]| {
                        if (bytes.as_ptr() as usize).is_multiple_of(binding.align_bytes as usize) {
                            return Ok(bytes.as_ptr().cast_mut());
                        }
                        owned(Some(bytes))
                    };
                    weight_parts(source, binding)?.into_iter().map(&mut part).collect::<Result<Vec<_>, _>>()?
                }
                _ => vec![owned(binding.contents.as_deref())?],
            };
            match binding.kind {
                BindingKind::Control => memory.control = number,
                BindingKind::Tokens => memory.tokens = number,
                _ => {}
            }
            memory.bases.push(lies.first().copied().unwrap_or(core::ptr::null_mut()));
            memory.stacks.push(if binding.parts.is_some() { lies } else { Vec::new() });
            memory.names.push((binding.kind, binding.name.clone()));
        }
        Ok(memory)
    }

    /// Whether this is memory for `image`: executors rely on it, whose boxes lie in bindings of its sizes.
    pub(super) fn serves(&self, image: &Image) -> bool {
        self.descs == image.bindings()
            && (0..self.parts.len()).all(|number| self.parts[number] == image.part_bytes(number))
    }

    /// Start of every binding, by its number.
    pub(super) fn bases(&self) -> &[*mut u8] {
        &self.bases
    }

    /// Start of binding `number` as a pass over sequence `sequence` sees it.
    ///
    /// # Safety
    /// `sequence` is below the image's number of sequences.
    pub(super) unsafe fn base(&self, number: BindingId, sequence: u32) -> *mut u8 {
        // SAFETY: a binding has a part for each of the image's sequences.
        unsafe { self.bases[number.idx()].add(self.parts[number.idx()] as usize * sequence as usize) }
    }

    /// Where the tensors lie that binding `number` is, if it is several of the checkpoint's, and the bytes of each.
    pub(super) fn stack(&self, number: BindingId) -> Option<(&[*mut u8], usize)> {
        let stack = self.stacks[number.idx()].as_slice();
        let bytes = self.descs[number.idx()].bytes as usize;
        (!stack.is_empty()).then(|| (stack, bytes / stack.len()))
    }

    /// The box `operand` as a pass over sequence `sequence` sees it.
    ///
    /// # Safety
    /// As [`Memory::base`], and what [`Tensor::new`] wants of the box.
    pub(super) unsafe fn tensor(&self, operand: &Operand, sequence: u32) -> Tensor {
        if !operand.is_present() {
            return Tensor::ABSENT;
        }
        // SAFETY: the caller's promises; that a box of a stack lies in each of its parts is judged by `of_parts`.
        unsafe {
            match self.stack(operand.binding) {
                Some((parts, bytes)) => Tensor::of_parts(parts, bytes, operand),
                None => Tensor::new(self.base(operand.binding, sequence), operand),
            }
        }
    }

    /// How far sequence `number` of a batch is.
    ///
    /// # Safety
    /// Nobody writes the control block meanwhile.
    pub(super) unsafe fn sequence(&self, number: usize) -> Sequence {
        assert!(number < MAX_SEQUENCES, "image::check knows the sequences there are");
        // SAFETY: in range, and nobody writes it now (caller).
        unsafe { (&raw const (*self.control_base()).sequences).cast::<Sequence>().add(number).read_volatile() }
    }

    /// Where the control block lies.
    pub(super) fn control_base(&self) -> *mut Control {
        self.bases[self.control].cast()
    }

    /// A word of the control block that host and workers share while workers run.
    pub(super) fn control_word(&self, offset_bytes: usize) -> &AtomicU32 {
        debug_assert!(offset_bytes.is_multiple_of(4) && offset_bytes < size_of::<Control>());
        // SAFETY: inside the control block, aligned, and only accessed atomically while workers run.
        unsafe { AtomicU32::from_ptr(self.bases[self.control].add(offset_bytes).cast()) }
    }

    /// The token at `position`. Callers know it has been written: by them, or before a `produced` they have seen.
    pub(crate) fn token(&self, position: usize) -> u32 {
        assert!(
            (position as u64 + 1) * 4 <= self.descs[self.tokens].bytes,
            "position {position} is outside the token buffer"
        );
        // SAFETY: in range; written before (caller), and no token is written once it has been counted.
        unsafe { self.bases[self.tokens].cast::<u32>().add(position).read_volatile() }
    }

    /// Tokens the buffer holds.
    fn token_capacity(&self) -> usize {
        (self.descs[self.tokens].bytes / 4) as usize
    }

    /// Writes `tokens` at `position`.
    ///
    /// # Safety
    /// No worker runs.
    pub(crate) unsafe fn set_tokens(&self, position: usize, tokens: &[u32]) {
        assert!(position + tokens.len() <= self.token_capacity(), "tokens must fit the token buffer");
        // SAFETY: in range; nobody else touches the buffer (caller).
        unsafe {
            let at = self.bases[self.tokens].cast::<u32>().add(position);
            core::ptr::copy_nonoverlapping(tokens.as_ptr(), at, tokens.len());
        }
    }

    /// Writes the input called `name`.
    ///
    /// # Errors
    /// When there is no such input, or it has another size.
    ///
    /// # Safety
    /// No worker runs.
    pub(crate) unsafe fn set_input(&self, name: &str, contents: &[u8]) -> Result<(), MemoryError> {
        let inputs = || self.names.iter().enumerate().filter(|(_, (kind, _))| *kind == BindingKind::Input);
        let Some((number, _)) = inputs().find(|(_, (_, known))| known == name) else {
            return Err(MemoryError::no_input(name, inputs().map(|(_, (_, known))| known.clone())));
        };
        MemoryError::check_input(name, contents, self.descs[number].bytes)?;
        // SAFETY: the binding has exactly this many bytes and nobody else touches it (caller).
        unsafe { core::ptr::copy_nonoverlapping(contents.as_ptr(), self.bases[number], contents.len()) };
        Ok(())
    }

    /// Reads rows `rows` of a float output, or its first `rows` elements when it has rank 1.
    ///
    /// # Panics
    /// When the output is not one of this memory's, or not of floats.
    pub fn read_f32(&self, output: &Operand, rows: usize) -> Vec<f32> {
        let mut out = Vec::new();
        self.append_f32(output, rows, &mut out);
        out
    }

    /// As [`Memory::read_f32`], to the end of `out`.
    pub(crate) fn append_f32(&self, output: &Operand, rows: usize, out: &mut Vec<f32>) {
        let bytes = self.descs.get(output.binding.idx()).map_or(0, |desc| desc.bytes);
        let dtype = output.dtype();
        let is_float = dtype.is_none_or(|dtype| matches!(dtype, DType::F32 | DType::Bf16 | DType::F16));
        assert!(is_float, "an output of {dtype:?}: expected floats");
        assert!(
            dtype.is_some_and(|dtype| output.offset_bytes.is_multiple_of(dtype.align_bytes() as u64))
                && output.offset_bytes.checked_add(output.span_bytes()).is_some_and(|end| end <= bytes),
            "an output of another compilation: {output:?}"
        );
        // SAFETY: it lies inside its binding, aligned; no worker runs while the caller holds the executor.
        let tensor = unsafe { self.tensor(output, 0) };
        append_f32(&tensor, output, rows, out);
    }

    /// Bytes the executor allocated: everything but the weights used in place.
    pub fn owned_bytes(&self) -> u64 {
        self._owned.iter().map(|own| own.layout.size() as u64).sum()
    }
}

/// Rows `..rows` of the box `operand` in the binding at `base`, or its first `rows` elements when it has rank 1.
///
/// # Safety
/// The box lies in memory at `base`, and nobody writes it.
pub(super) unsafe fn read_f32(base: *mut u8, operand: &Operand, rows: usize) -> Vec<f32> {
    let mut out = Vec::new();
    // SAFETY: the caller's promise.
    append_f32(&unsafe { Tensor::new(base, operand) }, operand, rows, &mut out);
    out
}

/// As [`read_f32`], of `tensor`, which is that box, to the end of `out`.
fn append_f32(tensor: &Tensor, operand: &Operand, rows: usize, out: &mut Vec<f32>) {
    let rows = rows.min(tensor.extent(0));
    let number = |value: f32| if operand.is_flagged != 0 { flag::unmark(value.to_bits()) } else { value };
    if operand.rank == 1 {
        out.extend((0..rows).map(|i| number(tensor.get([i]))));
        return;
    }
    let [_, e1, e2, e3] = operand.extent.map(|n| n as usize);
    out.reserve(rows * e1 * e2 * e3);
    for (r, a) in (0..rows).flat_map(|r| (0..e1).map(move |a| (r, a))) {
        for b in 0..e2 {
            out.extend((0..e3).map(|c| number(tensor.get([r, a, b, c]))));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Owned;

    #[test]
    fn what_the_system_refuses_is_no_memory() {
        assert!(Owned::zeroed(1 << 60, 64).is_none());
        let own = Owned::zeroed(100, 256).expect("a hundred bytes");
        assert!((own.base as usize).is_multiple_of(256));
        // SAFETY: a hundred bytes that have been written.
        assert!(unsafe { std::slice::from_raw_parts(own.base, 100) }.iter().all(|byte| *byte == 0));
    }
}
