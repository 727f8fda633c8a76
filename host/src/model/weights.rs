//! The weights of a model folder, memory-mapped: `model.safetensors`, or shards named by
//! `model.safetensors.index.json`.
//!
//! In comes a folder; out goes a table from tensor name to dtype, shape and bytes inside the mapping, so that a weight
//! is read from the file's pages where it lies and never copied to be looked at.
//!
//! Laws:
//! - After `open` every range handed out lies inside its mapping and holds exactly `shape` elements of `dtype`; tensors
//!   of one file do not overlap and leave no gaps (the format's own rule).
//! - Every name occurs once over all shards, and where there is an index it and the shards agree.
//! - Nothing is promised about alignment: the format lets data start at any byte. A reader that wants elements must
//!   check with [`TensorView::is_aligned`] or copy.
//! - A file must not be changed while it is mapped; another process that truncates one ends this process (SIGBUS),
//!   which is the price of not copying.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use memmap2::Mmap;
use perpetua_shared::DType;
use safetensors::tensor::{Dtype as FileDtype, Metadata, SafeTensorError, SafeTensors};
use serde::de::{Deserializer as _, IgnoredAny, MapAccess, Visitor};

use super::aligned::AlignedBytes;
use super::config::Stored;
use super::error::{ModelError, shape_text};
use super::fp8;
use super::integers::{self, Found};
use super::json::{Fields, read_value};
use super::remade::{Part, Remade};
use crate::parallel::side_by_side;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// All tensors of a checkpoint.
#[derive(Debug)]
pub struct Weights {
    /// What errors call the whole.
    source: PathBuf,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Tensor>,
}

#[derive(Debug)]
enum Tensor {
    InFile(Location),
    Made(Made),
}

impl Tensor {
    fn shape(&self) -> &[usize] {
        match self {
            Tensor::InFile(location) => &location.shape,
            Tensor::Made(made) => &made.remade.shape,
        }
    }

    /// As files have it; of one that is made, if they have such.
    fn file_dtype(&self) -> Option<FileDtype> {
        match self {
            Tensor::InFile(location) => Some(location.dtype),
            Tensor::Made(made) => match made.dtype {
                DType::F32 => Some(FileDtype::F32),
                DType::Bf16 => Some(FileDtype::BF16),
                DType::F16 => Some(FileDtype::F16),
                _ => None,
            },
        }
    }

    fn size_bytes(&self) -> usize {
        match self {
            Tensor::InFile(location) => location.end - location.begin,
            Tensor::Made(made) => made.size_bytes() as usize,
        }
    }
}

/// A tensor that is [made](Remade) of others when it is first wanted.
#[derive(Debug)]
struct Made {
    remade: Remade,
    dtype: DType,
    /// What it is made of, as [`Remade::sources`] has them.
    sources: Vec<Arc<Tensor>>,
    bytes: OnceLock<AlignedBytes>,
}

impl Made {
    fn size_bytes(&self) -> u64 {
        self.dtype.tensor_bytes(&self.remade.shape)
    }
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    bytes: Mmap,
}

#[derive(Debug)]
struct Location {
    shard: usize,
    dtype: FileDtype,
    shape: Vec<usize>,
    begin: usize,
    end: usize,
}

/// One tensor where it lies in its file.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'w> {
    /// What its elements are: f32, bf16 or f16 from [`Weights::expect`], anything that has a [`DType`] from
    /// [`Weights::get`].
    pub dtype: DType,
    /// Row-major, outermost first.
    pub shape: &'w [usize],
    /// Little-endian elements, `shape` many, at whatever alignment the file gives them.
    pub bytes: &'w [u8],
}

impl TensorView<'_> {
    /// Elements.
    pub fn len_elems(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the bytes can be used as elements in place.
    pub fn is_aligned(&self) -> bool {
        (self.bytes.as_ptr() as usize).is_multiple_of(self.dtype.size_bytes())
    }
}

impl Weights {
    /// Opens the checkpoint of a model folder: its index and shards where there is an index, else its one file.
    pub fn open(dir: &Path) -> Result<Weights, ModelError> {
        let index = dir.join(INDEX);
        let single = dir.join(SINGLE);
        // As in the library that writes them, the one file wins where both are there.
        if exists(&single)? || !exists(&index)? {
            if !exists(&single)? {
                return Err(no_weights(dir));
            }
            let mut weights = Weights::of(single.clone());
            weights.add_shard(&single, "")?;
            return Ok(weights);
        }
        Weights::open_index(dir, &index)
    }

    /// Those of a file, as yet none.
    fn of(source: PathBuf) -> Weights {
        Weights { source, shards: Vec::new(), tensors: BTreeMap::new() }
    }

    /// Opens one safetensors file of any name.
    pub fn open_file(path: &Path) -> Result<Weights, ModelError> {
        let mut weights = Weights::of(path.to_owned());
        weights.add_shard(path, "")?;
        Ok(weights)
    }

    /// Adds the tensors of another folder's one file, with `prefix` before their names.
    pub(super) fn add(&mut self, dir: &Path, prefix: &str) -> Result<(), ModelError> {
        let path = dir.join(SINGLE);
        if exists(&path)? { self.add_shard(&path, prefix) } else { Err(no_weights(dir)) }
    }

    /// Replaces tensor `name`, which must be there and have this shape, by `parts`, which lie in it one after the other
    /// and have as many elements each.
    ///
    /// # Panics
    /// If these are not its elements, or it is [made](Weights::remake).
    pub(super) fn take_apart(
        &mut self,
        name: &str,
        shape: &[usize],
        parts: &[String],
        part_shape: &[usize],
    ) -> Result<(), ModelError> {
        let whole = self.expect(name, shape)?;
        let part_bytes = part_shape.iter().product::<usize>() * whole.dtype.size_bytes();
        assert_eq!(parts.len() * part_bytes, whole.bytes.len(), "the parts of {name}");
        let Some((key, _)) = self.entry(name) else { unreachable!("`expect` has found it") };
        let key = key.clone();
        let Some(Tensor::InFile(Location { shard, dtype, begin, .. })) = self.tensors.remove(&key) else {
            panic!("{name} is in no file")
        };
        for (number, part) in parts.iter().enumerate() {
            let begin = begin + number * part_bytes;
            let location = Location { shard, dtype, shape: part_shape.to_vec(), begin, end: begin + part_bytes };
            if self.tensors.insert(part.clone(), Tensor::InFile(location)).is_some() {
                let path = &self.shards[shard].path;
                return Err(ModelError::checkpoint(path, format!("holds {part}, which is in {name}, too")));
            }
        }
        Ok(())
    }

    /// Puts matrices in the place of those among `tensors`, with their shapes, that files have in [FP8](super::fp8) or in
    /// [a few bits](super::integers), as `stored` says. What is said to stay is read as it is then, and nothing made of
    /// it.
    pub(super) fn unpack(
        &mut self,
        tensors: impl Iterator<Item = (String, Vec<usize>, bool)>,
        stored: Stored,
    ) -> Result<(), ModelError> {
        let is_packed = |tensor: &Tensor| match tensor {
            Tensor::InFile(Location { dtype, .. }) => float_dtype(*dtype).is_none(),
            Tensor::Made(_) => false,
        };
        if !self.tensors.values().any(is_packed) {
            return Ok(());
        }
        let block = match stored {
            Stored::Fp8 { block } | Stored::Compressed { block, .. } => block,
            _ => None,
        };
        // What a network reads may be called as what it is made of.
        let mut all = BTreeMap::new();
        for (name, shape, stays) in tensors {
            if let Some(remade) = integers::remade(&name, &shape, stored, stays, &|name| self.found(name))? {
                all.insert(remade.name.clone(), remade);
                continue;
            }
            let Some((name, Tensor::InFile(Location { dtype: FileDtype::F8_E4M3, shape, .. }))) = self.entry(&name)
            else {
                continue;
            };
            let mut scales = fp8::SCALES.iter().map(|suffix| format!("{name}{suffix}"));
            let Some((scales, tensor)) = scales.find_map(|scales| self.tensors.get_key_value(&scales)) else {
                let name = format!("{name}{}", fp8::SCALES[0]);
                return Err(ModelError::TensorAbsent { name, path: self.source.clone() });
            };
            all.insert(name.clone(), fp8::remade([name, scales], shape, tensor.shape(), block)?);
        }
        self.remake(all.into_values().collect())
    }

    /// The tensor of this name, as its file has it.
    fn found(&self, name: &str) -> Option<Found<'_>> {
        match self.entry(name)? {
            (name, Tensor::InFile(location)) => {
                let (dtype, shape, bytes) = (location.dtype, &location.shape[..], self.bytes_of(location));
                Some(Found { name, dtype, shape, bytes })
            }
            (_, Tensor::Made(_)) => None,
        }
    }

    /// Puts tensors that are made in the place of those that they are made of, which must be there, with the shapes and
    /// types for it.
    pub(super) fn remake(&mut self, all: Vec<Remade>) -> Result<(), ModelError> {
        // Of one several may be made.
        let mut taken: BTreeMap<String, Arc<Tensor>> = BTreeMap::new();
        for remade in all {
            let (mut sources, mut dtypes) = (Vec::new(), Vec::new());
            for name in remade.sources() {
                let source = match taken.get(name) {
                    Some(source) => source.clone(),
                    None => {
                        let key = self.entry(name).map(|(key, _)| key.clone());
                        let Some(source) = key.and_then(|key| self.tensors.remove(&key)) else {
                            return Err(ModelError::TensorAbsent { name: name.to_owned(), path: self.source.clone() });
                        };
                        taken.entry(name.to_owned()).or_insert(Arc::new(source)).clone()
                    }
                };
                let (given, expected) = (source.shape(), remade.source_shape(name));
                if *given != expected {
                    let given = given.to_owned();
                    return Err(ModelError::TensorShape { name: name.to_owned(), given, expected });
                }
                let Some(dtype) = source.file_dtype() else {
                    unreachable!("what is made in fewer bits nothing is made of")
                };
                if let Err(expected) = remade.check(name, dtype) {
                    return Err(ModelError::TensorDtype { name: name.to_owned(), given: said(dtype), expected });
                }
                dtypes.push(dtype);
                sources.push(source);
            }
            let Some(dtype) = remade.dtype(dtypes[0]) else { unreachable!("it takes that type") };
            let name = remade.name.clone();
            let made = Tensor::Made(Made { remade, dtype, sources, bytes: OnceLock::new() });
            if self.tensors.insert(name.clone(), made).is_some() {
                let path = self.source.clone();
                return Err(ModelError::checkpoint(&path, format!("holds {name}, which is made of others, too")));
            }
        }
        Ok(())
    }

    /// Makes tensor `made`.
    fn make(&self, made: &Made) -> Result<AlignedBytes, ModelError> {
        let own = made.sources.iter().map(|source| match &**source {
            Tensor::InFile(_) => Ok(None),
            Tensor::Made(made) => self.make(made).map(Some),
        });
        let own = own.collect::<Result<Vec<_>, _>>()?;
        let parts = made.sources.iter().zip(&own).map(|(source, own)| {
            let bytes = match (&**source, own) {
                (Tensor::InFile(location), _) => self.bytes_of(location),
                (Tensor::Made(_), Some(own)) => own,
                (Tensor::Made(_), None) => unreachable!("it has been made"),
            };
            Part { dtype: source.file_dtype().expect("what it is made of has a type"), shape: source.shape(), bytes }
        });
        made.remade.make(&parts.collect::<Vec<_>>())
    }

    /// The bytes of a file.
    fn bytes_of(&self, Location { shard, begin, end, .. }: &Location) -> &[u8] {
        &self.shards[*shard].bytes[*begin..*end]
    }

    /// Tensor `made`, which is kept.
    fn kept<'w>(&self, made: &'w Made) -> Result<TensorView<'w>, ModelError> {
        let bytes = match made.bytes.get() {
            Some(bytes) => bytes,
            None => {
                let bytes = self.make(made)?;
                // If another thread was faster, its bytes are the same.
                made.bytes.get_or_init(|| bytes)
            }
        };
        Ok(TensorView { dtype: made.dtype, shape: &made.remade.shape, bytes })
    }

    /// Those that are made, and have not been.
    fn unmade(&self) -> impl Iterator<Item = &Made> {
        let made = self.tensors.values().filter_map(|tensor| match tensor {
            Tensor::InFile(_) => None,
            Tensor::Made(made) => Some(made),
        });
        made.filter(|made| made.bytes.get().is_none())
    }

    /// Tensor `name`, if it is one that is made, and not kept: its bytes, and their type.
    ///
    /// # Errors
    /// Another shape; no memory.
    pub(super) fn made(&self, name: &str, shape: &[usize]) -> Result<Option<(AlignedBytes, DType)>, ModelError> {
        let Some((_, Tensor::Made(made))) = self.entry(name) else { return Ok(None) };
        self.dtype(name, shape)?;
        Ok(Some((self.make(made)?, made.dtype)))
    }

    /// Bytes of the tensors that are made, and have not been.
    pub fn unmade_bytes(&self) -> u64 {
        self.unmade().map(Made::size_bytes).sum()
    }

    /// Makes what is made of other tensors, and has not been, on all cores; `progress` is called with the bytes of some
    /// at a time.
    ///
    /// # Errors
    /// No memory; what is not a number.
    pub fn make_all(&self, progress: &mut dyn FnMut(u64)) -> Result<(), ModelError> {
        const TOGETHER: usize = 64;
        let unmade: Vec<&Made> = self.unmade().collect();
        for some in unmade.chunks(TOGETHER) {
            for tensor in side_by_side(some.to_vec(), 1, |_, made| self.kept(made)) {
                progress(tensor?.bytes.len() as u64);
            }
            self.release_all();
        }
        Ok(())
    }

    fn open_index(dir: &Path, index: &Path) -> Result<Weights, ModelError> {
        let value = read_value(index)?;
        let fields = Fields::new(index, &value)?;
        let map =
            fields.object("weight_map")?.ok_or_else(|| fields.wrong("weight_map", "an object of tensor: file"))?;

        let mut by_shard: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (tensor, file) in map.entries() {
            let file = file.as_str().ok_or_else(|| map.wrong(tensor, "a file name"))?;
            // An index names files beside itself; a path that leads elsewhere is a mistake or a trap.
            if file.is_empty() || Path::new(file).components().count() != 1 || Path::new(file).file_name().is_none() {
                return Err(map.wrong(tensor, "the name of a file beside the index"));
            }
            by_shard.entry(file).or_default().push(tensor);
        }
        if by_shard.is_empty() {
            return Err(fields.wrong("weight_map", "at least one tensor"));
        }

        let mut weights = Weights::of(index.to_owned());
        for (file, tensors) in by_shard {
            let path = dir.join(file);
            if !exists(&path)? {
                return Err(ModelError::checkpoint(
                    index,
                    format!("names {file} (for {} and others), which is not in the folder", tensors[0]),
                ));
            }
            let shard = weights.shards.len();
            weights.add_shard(&path, "")?;
            for name in tensors {
                let held = weights.shard_of(name) == Some(shard);
                if !held {
                    return Err(ModelError::checkpoint(
                        index,
                        format!("says {name} is in {file}, which does not hold it"),
                    ));
                }
            }
        }
        Ok(weights)
    }

    /// Maps a file and enters its tensors into the table, with `prefix` before their names.
    fn add_shard(&mut self, path: &Path, prefix: &str) -> Result<(), ModelError> {
        let bytes = map_file(path)?;
        let (header_bytes, metadata) = read_header(path, &bytes)?;
        let data_begin = 8 + header_bytes;
        let shard = self.shards.len();
        for (name, info) in metadata.tensors() {
            let location = Location {
                shard,
                dtype: info.dtype,
                shape: info.shape.clone(),
                begin: data_begin + info.data_offsets.0,
                end: data_begin + info.data_offsets.1,
            };
            assert!(location.end <= bytes.len(), "read_metadata checks that the last tensor ends with the file");
            let name = format!("{prefix}{name}");
            if let Some(other) = self.shard_of(&name) {
                let other = &self.shards[other].path;
                return Err(ModelError::checkpoint(path, format!("holds {name}, which {} holds too", other.display())));
            }
            self.tensors.insert(name, Tensor::InFile(location));
        }
        self.shards.push(Shard { path: path.to_owned(), bytes });
        Ok(())
    }

    /// The shard that the tensor of exactly this name is in, if there is one.
    fn shard_of(&self, name: &str) -> Option<usize> {
        match self.tensors.get(name)? {
            Tensor::InFile(location) => Some(location.shard),
            Tensor::Made(_) => None,
        }
    }

    /// Names of all tensors, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there is no tensor at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of all tensors.
    pub fn size_bytes(&self) -> usize {
        self.tensors.values().map(Tensor::size_bytes).sum()
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.entry(name).is_some()
    }

    /// What the files, or what is made of theirs, call the tensor of this name, if there is one.
    pub fn name_in_file(&self, name: &str) -> Option<&str> {
        self.entry(name).map(|(name, _)| name.as_str())
    }

    /// The tensor of this name, if there is one and its dtype is one of [`DType`]. One that is made of others is made
    /// now, if it has not been; none where there is no memory for it.
    pub fn get(&self, name: &str) -> Option<TensorView<'_>> {
        match self.entry(name)?.1 {
            Tensor::Made(made) => self.kept(made).ok(),
            Tensor::InFile(location) => Some(TensorView {
                dtype: known_dtype(location.dtype)?,
                shape: &location.shape,
                bytes: self.bytes_of(location),
            }),
        }
    }

    /// The type of the tensor of this name, which must be there, have this shape, and be bf16, f16 or f32, or made in
    /// fewer bits.
    pub fn dtype(&self, name: &str, shape: &[usize]) -> Result<DType, ModelError> {
        let Some((_, tensor)) = self.entry(name) else {
            return Err(ModelError::TensorAbsent { name: name.to_owned(), path: self.source.clone() });
        };
        if tensor.shape() != shape {
            let (given, expected) = (tensor.shape().to_owned(), shape.to_owned());
            return Err(ModelError::TensorShape { name: name.to_owned(), given, expected });
        }
        match tensor {
            Tensor::Made(made) => Ok(made.dtype),
            Tensor::InFile(Location { dtype, .. }) => float_dtype(*dtype).ok_or_else(|| ModelError::TensorDtype {
                name: name.to_owned(),
                given: said(*dtype),
                expected: FLOATS,
            }),
        }
    }

    /// The tensor of this name, as [`Weights::dtype`] wants it.
    pub fn expect(&self, name: &str, shape: &[usize]) -> Result<TensorView<'_>, ModelError> {
        self.dtype(name, shape)?;
        match self.entry(name) {
            Some((_, Tensor::Made(made))) => self.kept(made),
            _ => Ok(self.get(name).unwrap_or_else(|| unreachable!("it has a type"))),
        }
    }

    /// Gives back the memory that the pages of `part`, bytes of one of the tensors, take; they are read from the file
    /// again when they are wanted.
    pub fn release(&self, part: &[u8]) {
        #[cfg(unix)]
        for shard in &self.shards {
            let (file, part) = (shard.bytes.as_ptr_range(), part.as_ptr_range());
            if part.start < file.start || part.end > file.end {
                continue;
            }
            let first = part.start as usize - file.start as usize;
            // SAFETY: the mapping is of a file and never written, so what is dropped can be read again, the same.
            // Advice that the system does not take changes nothing.
            let _ = unsafe {
                shard.bytes.unchecked_advise_range(
                    memmap2::UncheckedAdvice::DontNeed,
                    first,
                    part.end as usize - part.start as usize,
                )
            };
        }
        #[cfg(not(unix))]
        let _ = part;
    }

    /// [`Weights::release`] of all there is.
    pub fn release_all(&self) {
        self.shards.iter().for_each(|shard| self.release(&shard.bytes));
    }

    /// The files mapped, in the order they were opened.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|s| s.path.as_path())
    }

    fn entry(&self, name: &str) -> Option<(&String, &Tensor)> {
        if let Some(entry) = self.tensors.get_key_value(name) {
            return Some(entry);
        }
        // A model that sees or hears has the one that reads as a part, with all its names or with what comes after
        // `model.`.
        let rest = name.strip_prefix("model.");
        let [inner, older] =
            ["language_model", "text_model"].map(|half| rest.map(|rest| format!("model.{half}.{rest}")));
        // One that was saved without its head has what comes after it alone.
        let parts = [Some(format!("language_model.{name}")), inner, older, rest.map(str::to_owned)];
        if let Some(entry) = parts.iter().flatten().find_map(|name| self.tensors.get_key_value(name)) {
            return Some(entry);
        }
        // BERT checkpoints converted from TensorFlow call a LayerNorm's weight and bias gamma and beta.
        let old = if let Some(stem) = name.strip_suffix("LayerNorm.weight") {
            format!("{stem}LayerNorm.gamma")
        } else {
            format!("{}LayerNorm.beta", name.strip_suffix("LayerNorm.bias")?)
        };
        self.tensors.get_key_value(&old)
    }
}

/// What errors call a type of files.
pub(super) fn said(dtype: FileDtype) -> String {
    format!("{dtype:?}").to_lowercase()
}

/// What errors call the types of elements that networks read as they are.
pub(super) const FLOATS: &str = "bf16, f16 or f32";

/// The type of such.
pub(super) fn float_dtype(dtype: FileDtype) -> Option<DType> {
    known_dtype(dtype).filter(|dtype| dtype.is_float())
}

fn known_dtype(dtype: FileDtype) -> Option<DType> {
    Some(match dtype {
        FileDtype::F32 => DType::F32,
        FileDtype::BF16 => DType::Bf16,
        FileDtype::F16 => DType::F16,
        FileDtype::I32 => DType::I32,
        FileDtype::U32 => DType::U32,
        FileDtype::U8 => DType::U8,
        FileDtype::I64 => DType::I64,
        _ => return None,
    })
}

fn exists(path: &Path) -> Result<bool, ModelError> {
    path.try_exists().map_err(|e| ModelError::read(path, e))
}

fn no_weights(dir: &Path) -> ModelError {
    let other = ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.safetensors", "tf_model.h5"]
        .into_iter()
        .find(|name| dir.join(name).exists());
    let what = match other {
        Some(other) => format!("{SINGLE} or {INDEX} ({other} is another format, which is not read)"),
        None => format!("{SINGLE} or {INDEX}"),
    };
    ModelError::Absent { dir: dir.to_owned(), what }
}

fn map_file(path: &Path) -> Result<Mmap, ModelError> {
    // Looked at before it is opened: opening a pipe would wait for a writer.
    let meta = std::fs::metadata(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => super::json::absent(path),
        _ => ModelError::read(path, e),
    })?;
    if !meta.is_file() {
        return Err(ModelError::checkpoint(path, "not a file"));
    }
    let file = File::open(path).map_err(|e| ModelError::read(path, e))?;
    if meta.len() < 8 {
        return Err(ModelError::checkpoint(path, format!("{} bytes: too short for a safetensors file", meta.len())));
    }
    // SAFETY: the mapping is read-only, and every access goes through a slice of the length
    // the file had when mapped. That the file is not changed meanwhile is the law in the module head, kept by whoever
    // runs the program; it cannot be enforced on a file system shared with others.
    #[allow(unsafe_code, reason = "the mapping of files")]
    let map = unsafe { Mmap::map(&file) };
    map.map_err(|e| ModelError::read(path, e))
}

/// Header length in bytes, and the header, which has been checked against the file's length.
fn read_header(path: &Path, bytes: &[u8]) -> Result<(usize, Metadata), ModelError> {
    let fail = |message: String| ModelError::checkpoint(path, message);
    if bytes.starts_with(b"version https://git-lfs") {
        return Err(fail("a pointer of Git LFS, not the file itself (`git lfs pull` fetches it)".to_owned()));
    }
    let claimed = bytes.first_chunk::<8>().map_or(0, |b| u64::from_le_bytes(*b));
    let (header_bytes, metadata) = SafeTensors::read_metadata(bytes).map_err(|e| {
        fail(match e {
            SafeTensorError::HeaderTooLarge | SafeTensorError::InvalidHeaderLength => format!(
                "header of {claimed} bytes does not fit in a file of {} bytes; truncated, or not safetensors",
                bytes.len()
            ),
            SafeTensorError::MetadataIncompleteBuffer => wrong_length(bytes, claimed),
            SafeTensorError::InvalidOffset(name) => {
                format!("{name}: data_offsets overlap another tensor, leave a gap or run backwards")
            }
            SafeTensorError::TensorInvalidInfo => {
                format!("{}: data_offsets do not match shape and dtype", misfit(bytes, claimed))
            }
            SafeTensorError::ValidationOverflow => {
                format!("{}: more elements than can be counted", misfit(bytes, claimed))
            }
            other => format!("not a safetensors file: {other}"),
        })
    })?;
    if let Some(name) = first_duplicate(&bytes[8..8 + header_bytes]) {
        return Err(fail(format!("holds {name} twice")));
    }
    Ok((header_bytes, metadata))
}

/// The header names more or fewer bytes than the file has.
fn wrong_length(bytes: &[u8], header_bytes: u64) -> String {
    let expected = parse_infos(bytes, header_bytes)
        .iter()
        .filter_map(|(_, info)| info.get("data_offsets")?.get(1)?.as_u64())
        .max()
        .unwrap_or(0)
        .saturating_add(8)
        .saturating_add(header_bytes);
    let given = bytes.len() as u64;
    let cause = if given < expected { "truncated" } else { "longer than its header says" };
    format!("{given} bytes, expected {expected}: {cause}")
}

/// The first tensor whose shape and dtype do not give the length of its data.
fn misfit(bytes: &[u8], header_bytes: u64) -> String {
    for (name, info) in parse_infos(bytes, header_bytes) {
        let Ok(info) = serde_json::from_value::<safetensors::tensor::TensorInfo>(info) else {
            continue;
        };
        let bits = info.shape.iter().try_fold(info.dtype.bitsize(), |n, &dim| n.checked_mul(dim));
        let length = info.data_offsets.1.checked_sub(info.data_offsets.0);
        if bits.map(|b| b / 8) != length {
            return format!("{name} {}", shape_text(&info.shape));
        }
    }
    "a tensor".to_owned()
}

/// The entries of a header that has parsed once, for messages only.
fn parse_infos(bytes: &[u8], header_bytes: u64) -> Vec<(String, serde_json::Value)> {
    let header = usize::try_from(header_bytes).ok().and_then(|n| bytes.get(8..n.checked_add(8)?));
    match header.map(serde_json::from_slice) {
        Some(Ok(serde_json::Value::Object(map))) => map.into_iter().filter(|(k, _)| k != "__metadata__").collect(),
        _ => Vec::new(),
    }
}

/// A key that stands twice in the header; JSON parsers silently keep the last one.
fn first_duplicate(header: &[u8]) -> Option<String> {
    struct Keys;
    impl<'de> Visitor<'de> for Keys {
        type Value = Option<String>;
        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an object")
        }
        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let (mut seen, mut duplicate) = (std::collections::HashSet::new(), None);
            while let Some((key, IgnoredAny)) = map.next_entry::<String, IgnoredAny>()? {
                if seen.contains(&key) {
                    duplicate.get_or_insert(key);
                } else {
                    seen.insert(key);
                }
            }
            Ok(duplicate)
        }
    }
    serde_json::Deserializer::from_slice(header).deserialize_map(Keys).ok().flatten()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    /// A safetensors file with this header and this much data.
    fn file_bytes(header: &str, data: &[u8]) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(data);
        bytes
    }

    fn small(names: &[&str]) -> Vec<u8> {
        let mut header = serde_json::Map::new();
        for (i, name) in names.iter().enumerate() {
            header.insert(
                (*name).to_owned(),
                json!({"dtype": "BF16", "shape": [2, 3], "data_offsets": [12 * i, 12 * i + 12]}),
            );
        }
        file_bytes(&Value::Object(header).to_string(), &vec![7; 12 * names.len()])
    }

    fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a temporary folder");
        for (name, bytes) in files {
            fs::write(dir.path().join(name), bytes).expect("a file in it");
        }
        dir
    }

    fn refusal(files: &[(&str, &[u8])]) -> String {
        let dir = folder(files);
        let message = Weights::open(dir.path()).expect_err("must be refused").to_string();
        assert!(!message.contains('\n'), "{message}");
        message.replace(&format!("{}", dir.path().display()), "DIR")
    }

    #[test]
    fn a_fixture_is_read_in_place() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-qwen3");
        let weights = Weights::open(&dir).expect("the fixture");
        let embedding = weights.expect("model.embed_tokens.weight", &[1024, 256]).expect("the embedding");
        assert_eq!((embedding.dtype, embedding.bytes.len()), (DType::Bf16, 2 * 1024 * 256));
        assert_eq!((embedding.len_elems(), embedding.is_aligned()), (1024 * 256, true));
        assert_eq!(
            weights.expect("model.norm.weight", &[512]).expect_err("wrong shape").to_string(),
            "model.norm.weight: shape [256], expected [512]"
        );
        assert!(
            weights.expect("lm_head.weight", &[1024, 256]).expect_err("tied").to_string().contains("no such tensor")
        );
        assert_eq!(weights.names().count(), weights.len());
        assert!(weights.size_bytes() < 6_430_624);
    }

    #[test]
    fn a_tensor_is_taken_apart_where_it_lies() {
        let header = json!({"other": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]},
                            "stack": {"dtype": "BF16", "shape": [2, 2, 3], "data_offsets": [2, 26]}});
        let dir = folder(&[("model.safetensors", &file_bytes(&header.to_string(), &(0..26).collect::<Vec<_>>()))]);
        let parts = ["a", "b", "c", "d"].map(str::to_owned);
        let mut weights = Weights::open(dir.path()).expect("sound");
        let mut refused = |name: &str, shape: &[usize], parts: &[String]| {
            weights.take_apart(name, shape, parts, &[1, 3]).expect_err("refused").to_string()
        };
        assert!(refused("heap", &[2, 2, 3], &parts).contains("heap: no such tensor"));
        assert_eq!(refused("stack", &[2, 6], &parts), "stack: shape [2, 2, 3], expected [2, 6]");
        weights.take_apart("stack", &[2, 2, 3], &parts, &[1, 3]).expect("four rows");
        assert_eq!(weights.names().collect::<Vec<_>>(), ["a", "b", "c", "d", "other"]);
        for (number, part) in parts.iter().enumerate() {
            let first = 2 + 6 * number as u8;
            assert_eq!(weights.expect(part, &[1, 3]).expect("there").bytes, (first..first + 6).collect::<Vec<_>>());
        }
        let again = Weights::open(dir.path()).expect("sound").take_apart(
            "stack",
            &[2, 2, 3],
            &["x", "other", "y", "z"].map(str::to_owned),
            &[1, 3],
        );
        assert!(again.expect_err("two of a name").to_string().ends_with("holds other, which is in stack, too"));
    }

    #[test]
    fn shards_are_one_table() {
        let index =
            json!({"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}}).to_string();
        let dir = folder(&[
            (INDEX, index.as_bytes()),
            ("1.safetensors", &small(&["a"])),
            ("2.safetensors", &small(&["b", "c"])),
        ]);
        let weights = Weights::open(dir.path()).expect("two shards");
        assert_eq!(weights.names().collect::<Vec<_>>(), ["a", "b", "c"]);
        assert_eq!(weights.files().count(), 2);
        assert_eq!(weights.get("c").expect("c").bytes, [7; 12]);
    }

    #[test]
    fn indexes_that_lie_are_refused() {
        let index = |map: Value| json!({ "weight_map": map }).to_string();
        let one = small(&["a"]);
        let missing = index(json!({"a": "1.safetensors", "b": "2.safetensors"}));
        assert_eq!(
            refusal(&[(INDEX, missing.as_bytes()), ("1.safetensors", &one)]),
            format!("DIR/{INDEX}: names 2.safetensors (for b and others), which is not in the folder")
        );
        let absent = index(json!({"a": "1.safetensors", "z": "1.safetensors"}));
        assert_eq!(
            refusal(&[(INDEX, absent.as_bytes()), ("1.safetensors", &one)]),
            format!("DIR/{INDEX}: says z is in 1.safetensors, which does not hold it")
        );
        let twice = index(json!({"a": "1.safetensors", "b": "2.safetensors"}));
        let both = small(&["a", "b"]);
        assert_eq!(
            refusal(&[(INDEX, twice.as_bytes()), ("1.safetensors", &one), ("2.safetensors", &both)]),
            "DIR/2.safetensors: holds a, which DIR/1.safetensors holds too"
        );
        let outside = index(json!({"a": "../1.safetensors"}));
        assert!(refusal(&[(INDEX, outside.as_bytes())]).contains("beside the index"));
        assert!(refusal(&[(INDEX, b"{}")]).contains("weight_map: missing"));
        assert!(refusal(&[(INDEX, b"{")]).contains("not valid JSON"));
    }

    #[test]
    fn files_that_lie_are_refused() {
        let whole = small(&["a", "b"]);
        let cut = &whole[..whole.len() - 5];
        assert_eq!(
            refusal(&[(SINGLE, cut)]),
            format!("DIR/{SINGLE}: {} bytes, expected {}: truncated", cut.len(), whole.len())
        );
        assert!(refusal(&[(SINGLE, &[&whole[..], &[0]].concat())]).contains("longer than its header says"));
        assert!(refusal(&[(SINGLE, &whole[..20])]).contains("does not fit in a file of 20 bytes"));
        assert!(refusal(&[(SINGLE, b"")]).contains("too short"));
        let huge = [&u64::MAX.to_le_bytes()[..], &[b'{'; 100]].concat();
        assert!(refusal(&[(SINGLE, &huge)]).contains("does not fit"));

        let entry = |shape: &str, from: u64, to: u64| {
            format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":[{from},{to}]}}}}"#)
        };
        let header = |h: String| refusal(&[(SINGLE, &file_bytes(&h, &[0; 24]))]);
        assert_eq!(
            header(entry("[7]", 0, 24)),
            format!("DIR/{SINGLE}: a [7]: data_offsets do not match shape and dtype")
        );
        assert!(header(entry("[18446744073709551615,9]", 0, 24)).contains("more elements than can be counted"));
        assert!(header(entry("[5]", 4, 24)).contains("a: data_offsets overlap"));
        assert!(header(entry("[6]", 24, 0)).contains("data_offsets"));
        assert!(header("[]".into()).contains("not a safetensors file"));
        let twice = r#"{"a":{"dtype":"F32","shape":[6],"data_offsets":[0,24]},"a":{"dtype":"F32","shape":[6],"data_offsets":[0,24]}}"#;
        let message = header(twice.into());
        assert!(message.contains("twice") || message.contains("duplicate"), "{message}");
    }

    #[test]
    fn what_is_not_a_checkpoint_is_refused() {
        assert_eq!(refusal(&[]), format!("DIR: no {SINGLE} or {INDEX}"));
        assert!(refusal(&[("pytorch_model.bin", b"")]).contains("another format"));
        let dir = folder(&[]);
        fs::create_dir(dir.path().join(SINGLE)).expect("a folder");
        assert!(Weights::open(dir.path()).expect_err("a folder").to_string().contains("not a file"));
        assert!(Weights::open_file(&dir.path().join("x")).expect_err("nothing").to_string().contains("no x"));
    }

    #[test]
    fn other_dtypes_are_refused_when_asked_for() {
        let header = r#"{"a":{"dtype":"I64","shape":[3],"data_offsets":[0,24]},"b":{"dtype":"F64","shape":[3],"data_offsets":[24,48]}}"#;
        let dir = folder(&[(SINGLE, &file_bytes(header, &[1; 48]))]);
        let weights = Weights::open(dir.path()).expect("a well-formed file");
        assert_eq!(weights.get("a").map(|v| v.dtype), Some(DType::I64));
        assert!(weights.get("b").is_none() && weights.contains("b"));
        let message = weights.expect("b", &[3]).expect_err("f64").to_string();
        assert_eq!(message, "b: dtype f64, expected bf16, f16 or f32");
        assert!(weights.expect("a", &[3]).expect_err("i64").to_string().contains("dtype i64"));
    }

    #[test]
    fn the_old_names_of_layer_norms_are_known() {
        let dir = folder(&[(SINGLE, &small(&["x.LayerNorm.beta", "x.LayerNorm.gamma"]))]);
        let weights = Weights::open(dir.path()).expect("a well-formed file");
        assert!(weights.expect("x.LayerNorm.weight", &[2, 3]).is_ok() && weights.contains("x.LayerNorm.bias"));
        assert!(!weights.contains("x.weight"));
    }

    proptest! {
        /// Whatever is done to a file, it opens or is refused; what opens can be read to its last byte.
        #[test]
        fn a_damaged_file_never_panics(
            cut in 0usize..200,
            changes in proptest::collection::vec((0usize..200, any::<u8>()), 0..4),
        ) {
            let mut bytes = small(&["a", "b"]);
            for (at, byte) in changes {
                let len = bytes.len();
                bytes[at % len] = byte;
            }
            bytes.truncate(bytes.len().saturating_sub(cut / 4));
            let dir = folder(&[(SINGLE, &bytes)]);
            match Weights::open(dir.path()) {
                Ok(weights) => {
                    for name in weights.names() {
                        if let Some(view) = weights.get(name) {
                            prop_assert_eq!(view.bytes.len(), view.len_elems() * view.dtype.size_bytes());
                            prop_assert!(view.bytes.iter().map(|&b| usize::from(b)).sum::<usize>() < usize::MAX);
                        }
                    }
                }
                Err(error) => prop_assert!(!error.to_string().is_empty()),
            }
        }

        /// Numbers of a header replaced by others, so that it still parses.
        #[test]
        fn a_header_with_other_numbers_never_panics(
            numbers in proptest::collection::vec(prop_oneof![0u64..40, any::<u64>()], 8),
            dtype in proptest::sample::select(vec!["F32", "BF16", "F64", "I8", "F4", "BOOL", "none"]),
        ) {
            let n = &numbers;
            let header = json!({
                "a": {"dtype": dtype, "shape": [n[0], n[1]], "data_offsets": [n[2], n[3]]},
                "b": {"dtype": "F16", "shape": [n[4], n[5]], "data_offsets": [n[6], n[7]]},
            });
            let dir = folder(&[(SINGLE, &file_bytes(&header.to_string(), &[0; 64]))]);
            if let Ok(weights) = Weights::open(dir.path()) {
                prop_assert!(weights.size_bytes() == 64);
            }
        }
    }
}
