//! The weights of a model folder, memory-mapped: `model.safetensors`, or shards named by `model.safetensors.index.json`.
//!
//! In comes a folder; out goes a table from tensor name to dtype, shape and bytes inside the mapping, so that a weight is
//! read from the file's pages where it lies and never copied to be looked at.
//!
//! Laws:
//! - After `open` every range handed out lies inside its mapping and holds exactly `shape` elements of `dtype`; tensors of
//!   one file do not overlap and leave no gaps (the format's own rule).
//! - Every name occurs once over all shards, and where there is an index it and the shards agree.
//! - Nothing is promised about alignment: the format lets data start at any byte. A reader that wants elements must check
//!   with [`TensorView::is_aligned`] or copy.
//! - A file must not be changed while it is mapped; another process that truncates one ends this process (SIGBUS), which
//!   is the price of not copying.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use perpetua_shared::DType;
use safetensors::tensor::{Dtype as FileDtype, Metadata, SafeTensorError, SafeTensors};
use serde::de::{Deserializer as _, IgnoredAny, MapAccess, Visitor};

use super::error::{ModelError, shape_text};
use super::json::{Fields, read_value};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// All tensors of a checkpoint.
#[derive(Debug)]
pub struct Weights {
    /// What errors call the whole.
    source: PathBuf,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Location>,
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
            let mut weights = Weights {
                source: single.clone(),
                shards: Vec::new(),
                tensors: BTreeMap::new(),
            };
            weights.add_shard(&single)?;
            return Ok(weights);
        }
        Weights::open_index(dir, &index)
    }

    /// Opens one safetensors file of any name.
    pub fn open_file(path: &Path) -> Result<Weights, ModelError> {
        let mut weights = Weights {
            source: path.to_owned(),
            shards: Vec::new(),
            tensors: BTreeMap::new(),
        };
        weights.add_shard(path)?;
        Ok(weights)
    }

    fn open_index(dir: &Path, index: &Path) -> Result<Weights, ModelError> {
        let value = read_value(index)?;
        let fields = Fields::new(index, &value)?;
        let map = fields
            .object("weight_map")?
            .ok_or_else(|| fields.wrong("weight_map", "an object of tensor: file"))?;

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

        let mut weights = Weights {
            source: index.to_owned(),
            shards: Vec::new(),
            tensors: BTreeMap::new(),
        };
        for (file, tensors) in by_shard {
            let path = dir.join(file);
            if !exists(&path)? {
                return Err(ModelError::checkpoint(
                    index,
                    format!(
                        "names {file} (for {} and others), which is not in the folder",
                        tensors[0]
                    ),
                ));
            }
            let shard = weights.shards.len();
            weights.add_shard(&path)?;
            for name in tensors {
                let held = weights.tensors.get(name).is_some_and(|l| l.shard == shard);
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

    /// Maps a file and enters its tensors into the table.
    fn add_shard(&mut self, path: &Path) -> Result<(), ModelError> {
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
            assert!(
                location.end <= bytes.len(),
                "read_metadata checks that the last tensor ends with the file"
            );
            if let Some(other) = self.tensors.insert(name.clone(), location) {
                let other = &self.shards[other.shard].path;
                return Err(ModelError::checkpoint(
                    path,
                    format!("holds {name}, which {} holds too", other.display()),
                ));
            }
        }
        self.shards.push(Shard {
            path: path.to_owned(),
            bytes,
        });
        Ok(())
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
        self.tensors.is_empty()
    }

    /// Bytes of all tensors.
    pub fn size_bytes(&self) -> usize {
        self.tensors.values().map(|l| l.end - l.begin).sum()
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.locate(name).is_some()
    }

    /// The tensor of this name, if there is one and its dtype is one of [`DType`].
    pub fn get(&self, name: &str) -> Option<TensorView<'_>> {
        let location = self.locate(name)?;
        Some(TensorView {
            dtype: known_dtype(location.dtype)?,
            shape: &location.shape,
            bytes: &self.shards[location.shard].bytes[location.begin..location.end],
        })
    }

    /// The tensor of this name, which must be there, have this shape, and be bf16, f16 or f32.
    pub fn expect(&self, name: &str, shape: &[usize]) -> Result<TensorView<'_>, ModelError> {
        let Some(location) = self.locate(name) else {
            return Err(ModelError::TensorAbsent {
                name: name.to_owned(),
                path: self.source.clone(),
            });
        };
        if location.shape != shape {
            return Err(ModelError::TensorShape {
                name: name.to_owned(),
                given: location.shape.clone(),
                expected: shape.to_owned(),
            });
        }
        match self.get(name) {
            Some(view) if matches!(view.dtype, DType::F32 | DType::Bf16 | DType::F16) => Ok(view),
            _ => Err(ModelError::TensorDtype {
                name: name.to_owned(),
                given: format!("{:?}", location.dtype).to_lowercase(),
            }),
        }
    }

    /// The files mapped, in the order they were opened.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|s| s.path.as_path())
    }

    fn locate(&self, name: &str) -> Option<&Location> {
        if let Some(location) = self.tensors.get(name) {
            return Some(location);
        }
        // BERT checkpoints converted from TensorFlow call a LayerNorm's weight and bias gamma and beta.
        let old = if let Some(stem) = name.strip_suffix("LayerNorm.weight") {
            format!("{stem}LayerNorm.gamma")
        } else {
            format!("{}LayerNorm.beta", name.strip_suffix("LayerNorm.bias")?)
        };
        self.tensors.get(&old)
    }
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
    let other = [
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "consolidated.safetensors",
        "tf_model.h5",
    ]
    .into_iter()
    .find(|name| dir.join(name).exists());
    let what = match other {
        Some(other) => format!("{SINGLE} or {INDEX} ({other} is another format, which is not read)"),
        None => format!("{SINGLE} or {INDEX}"),
    };
    ModelError::Absent {
        dir: dir.to_owned(),
        what,
    }
}

fn map_file(path: &Path) -> Result<Mmap, ModelError> {
    let file = File::open(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => super::json::absent(path),
        _ => ModelError::read(path, e),
    })?;
    let meta = file.metadata().map_err(|e| ModelError::read(path, e))?;
    if !meta.is_file() {
        return Err(ModelError::checkpoint(path, "not a file"));
    }
    if meta.len() < 8 {
        return Err(ModelError::checkpoint(
            path,
            format!("{} bytes: too short for a safetensors file", meta.len()),
        ));
    }
    // SAFETY: the mapping is read-only and private to this process, and every access goes through a slice of the length
    // the file had when mapped. That the file is not changed meanwhile is the law in the module head, kept by whoever
    // runs the program; it cannot be enforced on a file system shared with others.
    #[allow(unsafe_code)]
    let map = unsafe { Mmap::map(&file) };
    map.map_err(|e| ModelError::read(path, e))
}

/// Header length in bytes, and the header, which has been checked against the file's length.
fn read_header(path: &Path, bytes: &[u8]) -> Result<(usize, Metadata), ModelError> {
    let fail = |message: String| ModelError::checkpoint(path, message);
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
    let cause = if given < expected {
        "truncated"
    } else {
        "longer than its header says"
    };
    format!("{given} bytes, expected {expected}: {cause}")
}

/// The first tensor whose shape and dtype do not give the length of its data.
fn misfit(bytes: &[u8], header_bytes: u64) -> String {
    for (name, info) in parse_infos(bytes, header_bytes) {
        let Ok(info) = serde_json::from_value::<safetensors::tensor::TensorInfo>(info) else {
            continue;
        };
        let bits = info
            .shape
            .iter()
            .try_fold(info.dtype.bitsize(), |n, &dim| n.checked_mul(dim));
        let length = info.data_offsets.1.checked_sub(info.data_offsets.0);
        if bits.map(|b| b / 8) != length {
            return format!("{name} {}", shape_text(&info.shape));
        }
    }
    "a tensor".to_owned()
}

/// The entries of a header that has parsed once, for messages only.
fn parse_infos(bytes: &[u8], header_bytes: u64) -> Vec<(String, serde_json::Value)> {
    let header = usize::try_from(header_bytes)
        .ok()
        .and_then(|n| bytes.get(8..n.checked_add(8)?));
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
    serde_json::Deserializer::from_slice(header)
        .deserialize_map(Keys)
        .ok()
        .flatten()
}
