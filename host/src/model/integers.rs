//! Matrices whose files have a few bits an element, and a scale for a group of them: GPTQ's, AWQ's, those of
//! compressed-tensors, bitsandbytes and ModelOpt.
//!
//! ```text
//! GPTQ              qweight [k / p, n]     p numbers a word down a column; scales [g, n]; qzeros [g, n / p]; g_idx [k]
//! AWQ               qweight [k, n / 8]     eight numbers a word along a row, in the order of `AWQ_ORDER`; the same, of qzeros, too
//! pack-quantized    weight_packed [n, k / p], weight_scale [n, g], weight_zero_point [n / p, g] or, a byte each, [n, g]
//! int-quantized     weight [n, k], a byte each; weight_scale [n, g], weight_zero_point [n, g]
//! bitsandbytes, 8   weight [n, k], a byte each; SCB [n], which are 127 scales
//! bitsandbytes, 4   weight [n * k / 2, 1], the higher half of a byte first; absmax a block, quant_map: what numbers stand for
//! NVFP4             weight or weight_packed [n, k / 2], E2M1, the lower half first; weight_scale [n, k / 16] in E4M3, and one of all
//! ```
//!
//! An element of the first five is its number less its group's zero, times the group's scale. The network reads
//!
//! - numbers of four bits whose zeros are all in the middle in [`DType::Int4`], where groups are whole blocks of 32: these
//!   very numbers, and scales that are rounded to bf16;
//! - other differences that fit a byte in [`DType::Q8`], where groups are whole blocks of 64: nothing is rounded, but a
//!   scale in f32, to 17 bits;
//! - else, and for numbers that stand for others, the nearest ones of bf16, as `transformers` does.

use half::bf16;
use perpetua_shared::DType;
use perpetua_shared::dtype::{MX4_LEVELS, Q4_BLOCK, Q8, q4_at};
use safetensors::tensor::Dtype as FileDtype;
use serde_json::Value;

use super::config::Stored;
use super::error::ModelError;
use super::fp8;
use super::remade::{Origin, Part, Remade};
use super::weights::{FLOATS, float_dtype, said};

/// Rows that are taken out of their words together: as many as a cache line of AWQ's words has.
const TOGETHER: usize = 128;

/// Which of eight rows AWQ's word has in its four bits i.
const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// Elements along a row that share a scale in NVFP4.
const NVFP4_GROUP: usize = 16;

/// A tensor of a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found<'w> {
    pub(super) name: &'w str,
    pub(super) dtype: FileDtype,
    pub(super) shape: &'w [usize],
    pub(super) bytes: &'w [u8],
}

/// A matrix in few bits: what it is made of, and how.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Integers {
    /// Names and shapes. What [`Numbers`] has of them are places here.
    sources: Vec<(String, Vec<usize>)>,
    numbers: Numbers,
    /// What it is made in.
    dtype: DType,
}

#[derive(Clone, Debug, PartialEq)]
enum Numbers {
    /// Whole ones, in groups of so many columns; or of those that have the same number in `order`.
    Groups { packing: Packing, group: usize, zeros: Zeros, order: Option<usize>, divisor: f32 },
    /// Those of a table, in blocks of so many elements, whichever row they are of.
    Codes { codes: usize, block: usize, nested: Option<Nested> },
    /// E2M1, all scales multiplied with, or divided by, the one of all.
    Nvfp4 { divides: bool },
}

/// Where element [r, c] of `[n, k]` is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Packing {
    /// In word [c / p, r], the first in the lowest bits.
    Columns { bits: u32 },
    /// In word [c, r / 8].
    Awq,
    /// In word [r, c / p].
    Rows { bits: u32 },
    /// A byte with a sign.
    Bytes,
}

impl Packing {
    /// Number `r` of a row of words, each plus `add`, where words go across the rows of a matrix.
    fn across(self, row: &[u8], r: usize, add: u32) -> u32 {
        let (bits, at) = match self {
            Packing::Columns { bits } => (bits, r % (32 / bits as usize)),
            Packing::Awq => (4, AWQ_ORDER.iter().position(|of| *of == r % 8).unwrap_or(0)),
            Packing::Rows { .. } | Packing::Bytes => unreachable!("their words do not"),
        };
        number(word(&row[r / (32 / bits as usize) * 4..]).wrapping_add(add), bits, at)
    }
}

/// What is taken off numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Zeros {
    /// Of all the same.
    One(i16),
    /// Words of source `at`, which stand as numbers do across rows, each plus `add`, all at once: what is beyond the bits
    /// of one number goes over to the next, as it was taken off there by those who wrote it.
    Packed { at: usize, add: u32 },
    /// Bytes of source `at`, `[n, groups]`, each so much more.
    Bytes { at: usize, more: i16 },
}

/// Scales that are numbers of a table in blocks of so many, which have a scale each, and are so much more.
#[derive(Clone, Debug, PartialEq)]
struct Nested {
    codes: usize,
    scales: usize,
    block: usize,
    more: f32,
}

/// Place of the scales among sources, behind the numbers.
const SCALES: usize = 1;

/// What looks for a tensor of a file.
pub(super) type Find<'w> = dyn Fn(&str) -> Option<Found<'w>> + 'w;

/// The matrix called `name`, of this shape, if files have it in few bits. One that `stays` is read as it is, and may be
/// in [`DType::Int4`] or [`DType::Q8`].
///
/// # Errors
/// What is missing beside its numbers, or does not fit them.
pub(super) fn remade(
    name: &str,
    shape: &[usize],
    stored: Stored,
    stays: bool,
    find: &Find<'_>,
) -> Result<Option<Remade>, ModelError> {
    let (Some(stem), &[n, k]) = (name.strip_suffix("weight"), shape) else { return Ok(None) };
    if n == 0 || k == 0 {
        return Ok(None);
    }
    let at = |suffix: &str| find(&format!("{stem}{suffix}"));
    let has = |suffix: &str| at(suffix).is_some();
    let (first, packs) = match (at("qweight"), at("weight_packed"), at("weight")) {
        (Some(words), ..) if matches!(stored, Stored::Gptq { .. } | Stored::Awq { .. }) => (words, "qweight"),
        (_, Some(words), _) => (words, "weight_packed"),
        (.., Some(bytes)) if matches!(bytes.dtype, FileDtype::I8 | FileDtype::U8) => (bytes, "weight"),
        _ => return Ok(None),
    };
    // What the files call it, which may have a prefix.
    let stem = first.name.strip_suffix(packs).unwrap_or_else(|| unreachable!("that was looked for"));
    let mut sources = Sources { stem, find, all: Vec::new(), first };
    let (numbers, dtype) = match (packs, first.dtype) {
        ("qweight", _) => sources.of_words(stored, [n, k])?,
        (_, FileDtype::I32) => sources.of_rows(stored, [n, k])?,
        ("weight", FileDtype::I8) => sources.of_bytes(stored, [n, k])?,
        _ if has("weight.absmax") => sources.of_codes([n, k])?,
        _ => sources.of_nvfp4([n, k])?,
    };
    let dtype = if stays { dtype } else { DType::Bf16 };
    let of = Origin::Integers(Box::new(Integers { sources: sources.all, numbers, dtype }));
    Ok(Some(Remade { name: format!("{stem}weight"), shape: shape.to_owned(), of, matrices: 1 }))
}

/// What numbers less their zeros are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rest {
    /// From -8 to 7: the zeros of numbers of four bits are in the middle.
    Fours,
    Bytes,
    Other,
}

impl Rest {
    /// What they are made in, in rows of `k` in groups of so many.
    fn dtype(self, group: usize, k: usize, order: Option<usize>) -> DType {
        let are_whole = |block: usize| order.is_none() && (group >= k || group.is_multiple_of(block));
        match self {
            Rest::Fours if are_whole(Q4_BLOCK) => DType::Int4,
            Rest::Fours | Rest::Bytes if are_whole(Q8.elems) => DType::Q8,
            _ => DType::Bf16,
        }
    }
}

/// The tensors of a matrix, as they are found.
struct Sources<'f, 'w> {
    stem: &'w str,
    find: &'f Find<'w>,
    first: Found<'w>,
    all: Vec<(String, Vec<usize>)>,
}

impl<'w> Sources<'_, 'w> {
    fn name(&self, suffix: &str) -> String {
        format!("{}{suffix}", self.stem)
    }

    /// Takes one that may be missing.
    fn maybe(&mut self, suffix: &str) -> Option<(usize, Found<'w>)> {
        let found = (self.find)(&self.name(suffix))?;
        self.all.push((found.name.to_owned(), found.shape.to_owned()));
        Some((self.all.len() - 1, found))
    }

    fn need(&mut self, suffix: &str) -> Result<(usize, Found<'w>), ModelError> {
        let beside = self.first.name;
        self.maybe(suffix)
            .ok_or_else(|| ModelError::BesideAbsent { name: self.name(suffix), beside: beside.to_owned() })
    }

    /// The first of all, words, of which there should be these.
    fn words(&mut self, suffix: &str, expected: &[usize]) -> Result<(), ModelError> {
        let (_, found) = self.need(suffix)?;
        typed(found, FileDtype::I32)?;
        shaped(found, expected)
    }

    /// Scales, floats, of which there is one a group; and how many columns that is, `group` if one says so.
    fn scales(
        &mut self,
        suffix: &str,
        group: Option<usize>,
        k: usize,
        shape_of: impl Fn(usize) -> Vec<usize>,
        groups_of: impl Fn(&[usize]) -> Option<usize>,
    ) -> Result<usize, ModelError> {
        let (_, found) = self.need(suffix)?;
        if float_dtype(found.dtype).is_none() {
            let given = said(found.dtype);
            return Err(ModelError::TensorDtype { name: found.name.to_owned(), given, expected: FLOATS });
        }
        let groups = groups_of(found.shape).filter(|groups| (1..=k).contains(groups));
        let expected = |groups: usize| {
            let (name, given) = (found.name.to_owned(), found.shape.to_owned());
            Err(ModelError::TensorShape { name, given, expected: shape_of(groups) })
        };
        // Of compressed-tensors all may share one.
        let is_one = |found: Found<'_>| suffix == "weight_scale" && found.shape.iter().all(|n| *n == 1);
        // A layer may have others than config.json says of most.
        let size = |groups: usize| match group {
            Some(group) if k.div_ceil(group) == groups => Some(group),
            _ => k.is_multiple_of(groups).then_some(k / groups),
        };
        match groups.map(|groups| (groups, size(groups))) {
            Some((groups, Some(size))) if shape_of(groups) == found.shape || is_one(found) => Ok(size),
            _ => expected(group.map_or(1, |group| k.div_ceil(group))),
        }
    }

    /// GPTQ's and AWQ's.
    fn of_words(&mut self, stored: Stored, [n, k]: [usize; 2]) -> Result<(Numbers, DType), ModelError> {
        let first = self.first.shape;
        let (packing, bits, group, are_less) = match stored {
            Stored::Awq { group } => (Packing::Awq, 4, group, false),
            Stored::Gptq { bits, group, zeros_less_one } => {
                // Layers may have more bits than others.
                let bits = [bits, 4, 8, 2].into_iter().find(|bits| first == [k.div_ceil(32 / bits), n]).unwrap_or(bits);
                (Packing::Columns { bits: bits as u32 }, bits, group, zeros_less_one)
            }
            _ => unreachable!("the caller looked"),
        };
        let in_word = 32 / bits;
        match packing {
            Packing::Awq => self.words("qweight", &[k, n.div_ceil(in_word)])?,
            _ => self.words("qweight", &[k.div_ceil(in_word), n])?,
        }
        let of_first = |shape: &[usize]| shape.first().copied();
        let group = self.scales("scales", group, k, |groups| vec![groups, n], of_first)?;
        let groups = k.div_ceil(group);
        let (at, zeros) = self.need("qzeros")?;
        typed(zeros, FileDtype::I32)?;
        shaped(zeros, &[groups, n.div_ceil(in_word)])?;
        let order = self.order("g_idx", group, k)?;
        // One in each number of a word.
        let ones = u32::MAX / ((1u32 << bits) - 1);
        // Of differences of eight bits only those from the middle are bytes.
        let (add, middle) = (if are_less { ones } else { 0 }, 1 << (bits - 1));
        // Whole words at once: of most matrices there are no others, and all of them are asked where a model is opened.
        let whole = n / in_word;
        let of_row = |row: &[u8]| {
            row.chunks_exact(4).take(whole).all(|bytes| word(bytes).wrapping_add(add) == ones * middle)
                && (whole * in_word..n).all(|r| packing.across(row, r, add) == middle)
        };
        let are_in_middle = zeros.bytes.chunks_exact(zeros.bytes.len() / groups).all(of_row);
        let rest = match bits {
            4 if are_in_middle => Rest::Fours,
            8 if !are_in_middle => Rest::Other,
            _ => Rest::Bytes,
        };
        let numbers = Numbers::Groups { packing, group, zeros: Zeros::Packed { at, add }, order, divisor: 1.0 };
        Ok((numbers, rest.dtype(group, k, order)))
    }

    /// compressed-tensors', in words.
    fn of_rows(&mut self, stored: Stored, [n, k]: [usize; 2]) -> Result<(Numbers, DType), ModelError> {
        let first = self.first.shape;
        let bits = [4, 8, 2].into_iter().find(|bits| first == [n, k.div_ceil(32 / bits)]).unwrap_or(4);
        let in_word = 32 / bits;
        self.words("weight_packed", &[n, k.div_ceil(in_word)])?;
        let group = self.scales_of_rows(stored, [n, k])?;
        let groups = k.div_ceil(group);
        let middle = 1 << (bits - 1);
        let zeros = match self.maybe("weight_zero_point") {
            None => Zeros::One(middle),
            Some((at, found)) if found.dtype == FileDtype::I8 => {
                shaped(found, &[n, groups])?;
                Zeros::Bytes { at, more: middle }
            }
            Some((at, found)) => {
                typed(found, FileDtype::I32)?;
                shaped(found, &[n.div_ceil(in_word), groups])?;
                Zeros::Packed { at, add: 0 }
            }
        };
        let order = self.order("weight_g_idx", group, k)?;
        if let Some((_, shape)) = self.maybe("weight_shape") {
            shaped(shape, &[2])?;
        }
        let numbers =
            Numbers::Groups { packing: Packing::Rows { bits: bits as u32 }, group, zeros, order, divisor: 1.0 };
        let rest = match (bits, zeros) {
            (4, Zeros::One(_)) => Rest::Fours,
            (8, Zeros::Bytes { .. } | Zeros::Packed { .. }) => Rest::Other,
            _ => Rest::Bytes,
        };
        Ok((numbers, rest.dtype(group, k, order)))
    }

    fn scales_of_rows(&mut self, stored: Stored, [n, k]: [usize; 2]) -> Result<usize, ModelError> {
        let group = if let Stored::Compressed { group, .. } = stored { group } else { None };
        // One of all is `[1]`.
        let groups_of = |shape: &[usize]| match shape {
            [] | [1] => Some(1),
            [_, groups] => Some(*groups),
            _ => None,
        };
        self.scales("weight_scale", group, k, |groups| vec![n, groups], groups_of)
    }

    /// Bytes: compressed-tensors', or those of bitsandbytes.
    fn of_bytes(&mut self, stored: Stored, [n, k]: [usize; 2]) -> Result<(Numbers, DType), ModelError> {
        let (_, first) = self.need("weight")?;
        shaped(first, &[n, k])?;
        let packing = Packing::Bytes;
        if (self.find)(&self.name("SCB")).is_some() {
            let group = self.scales("SCB", None, k, |_| vec![n], |_| Some(1))?;
            self.maybe("weight_format");
            let numbers = Numbers::Groups { packing, group, zeros: Zeros::One(0), order: None, divisor: 127.0 };
            return Ok((numbers, DType::Q8));
        }
        let group = self.scales_of_rows(stored, [n, k])?;
        let zeros = match self.maybe("weight_zero_point") {
            None => Zeros::One(0),
            Some((at, found)) => {
                typed(found, FileDtype::I8)?;
                shaped(found, &[n, k.div_ceil(group)])?;
                Zeros::Bytes { at, more: 0 }
            }
        };
        let numbers = Numbers::Groups { packing, group, zeros, order: None, divisor: 1.0 };
        let rest = if zeros == Zeros::One(0) { Rest::Bytes } else { Rest::Other };
        Ok((numbers, rest.dtype(group, k, None)))
    }

    /// In which group each column is, where they do not follow each other.
    fn order(&mut self, suffix: &str, group: usize, k: usize) -> Result<Option<usize>, ModelError> {
        let Some((at, found)) = self.maybe(suffix) else { return Ok(None) };
        typed(found, FileDtype::I32)?;
        shaped(found, &[k])?;
        let (mut follow, groups) = (true, k.div_ceil(group));
        for (column, of) in found.bytes.chunks_exact(4).map(word).enumerate() {
            if of as usize >= groups {
                return Err(ModelError::OutOfRange { name: found.name.to_owned(), at: column, given: of, end: groups });
            }
            follow &= of as usize == column / group;
        }
        Ok((!follow).then_some(at))
    }

    /// Four bits of bitsandbytes.
    fn of_codes(&mut self, [n, k]: [usize; 2]) -> Result<(Numbers, DType), ModelError> {
        let (_, first) = self.need("weight")?;
        let bytes = (n * k).div_ceil(2);
        if first.shape.iter().product::<usize>() != bytes {
            shaped(first, &[bytes, 1])?;
        }
        let (_, absmax) = self.need("weight.absmax")?;
        let (codes, map) = self.need("weight.quant_map")?;
        typed(map, FileDtype::F32)?;
        shaped(map, &[16])?;
        let kinds = ["nf4", "fp4"].map(|kind| format!("weight.quant_state.bitsandbytes__{kind}"));
        let suffix = kinds.iter().find(|suffix| (self.find)(&self.name(suffix)).is_some()).unwrap_or(&kinds[0]);
        let (_, state) = self.need(suffix)?;
        typed(state, FileDtype::U8)?;
        let says = |key: &str| {
            let value: Option<Value> = serde_json::from_slice(state.bytes).ok();
            value.and_then(|value| value.get(key).cloned())
        };
        let whole = |key: &str| says(key).and_then(|value| value.as_u64()).filter(|value| *value > 0);
        let unclear = |key: &str| ModelError::TensorSays {
            name: state.name.to_owned(),
            what: key.to_owned(),
            expected: "a number above zero",
        };
        let block = whole("blocksize").ok_or_else(|| unclear("blocksize"))? as usize;
        let blocks = (n * k).div_ceil(block);
        shaped(absmax, &[blocks])?;
        let nested = if absmax.dtype == FileDtype::U8 {
            let inner = whole("nested_blocksize").ok_or_else(|| unclear("nested_blocksize"))? as usize;
            let more = says("nested_offset").and_then(|value| value.as_f64());
            let more = more.ok_or_else(|| unclear("nested_offset"))? as f32;
            let (scales, of_blocks) = self.need("weight.nested_absmax")?;
            typed(of_blocks, FileDtype::F32)?;
            shaped(of_blocks, &[blocks.div_ceil(inner)])?;
            let (codes, map) = self.need("weight.nested_quant_map")?;
            typed(map, FileDtype::F32)?;
            shaped(map, &[256])?;
            Some(Nested { codes, scales, block: inner, more })
        } else {
            typed(absmax, FileDtype::F32)?;
            None
        };
        Ok((Numbers::Codes { codes, block, nested }, DType::Bf16))
    }

    fn of_nvfp4(&mut self, [n, k]: [usize; 2]) -> Result<(Numbers, DType), ModelError> {
        // ModelOpt's have a number to multiply scales with, compressed-tensors' one to divide them by.
        let (divides, suffix, of_all) = match self.first.name.ends_with("weight_packed") {
            true => (true, "weight_packed", "weight_global_scale"),
            false => (false, "weight", "weight_scale_2"),
        };
        let (_, first) = self.need(suffix)?;
        typed(first, FileDtype::U8)?;
        shaped(first, &[n, k.div_ceil(2)])?;
        let (_, scales) = self.need("weight_scale")?;
        typed(scales, FileDtype::F8_E4M3)?;
        shaped(scales, &[n, k.div_ceil(NVFP4_GROUP)])?;
        let (_, one) = self.need(of_all)?;
        typed(one, FileDtype::F32)?;
        if one.shape.iter().any(|n| *n != 1) {
            shaped(one, &[1])?;
        }
        Ok((Numbers::Nvfp4 { divides }, DType::Bf16))
    }
}

fn typed(found: Found<'_>, dtype: FileDtype) -> Result<(), ModelError> {
    let expected = match dtype {
        FileDtype::I32 => "i32",
        FileDtype::I8 => "i8",
        FileDtype::U8 => "u8",
        FileDtype::F32 => "f32",
        FileDtype::F8_E4M3 => "f8_e4m3",
        _ => unreachable!("no other is asked for"),
    };
    match found.dtype == dtype {
        true => Ok(()),
        false => Err(ModelError::TensorDtype { name: found.name.to_owned(), given: said(found.dtype), expected }),
    }
}

fn shaped(found: Found<'_>, expected: &[usize]) -> Result<(), ModelError> {
    match found.shape == expected {
        true => Ok(()),
        false => {
            let (given, expected) = (found.shape.to_owned(), expected.to_owned());
            Err(ModelError::TensorShape { name: found.name.to_owned(), given, expected })
        }
    }
}

/// The numbers of a word, as many as `out` has.
fn take_apart(word: u32, bits: u32, out: &mut [i16]) {
    match <&mut [i16; 8]>::try_from(&mut *out) {
        // A whole word of most matrices: without a loop.
        Ok(out) if bits == 4 => *out = [0, 1, 2, 3, 4, 5, 6, 7].map(|i| (word >> (4 * i) & 15) as i16),
        _ => out.iter_mut().enumerate().for_each(|(i, out)| *out = number(word, bits, i) as i16),
    }
}

/// Number `at` of a word of numbers of so many bits, the first in the lowest.
fn number(word: u32, bits: u32, at: usize) -> u32 {
    word >> (bits * at as u32) & ((1 << bits) - 1)
}

fn word(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

impl Integers {
    /// The tensors that it is made of.
    pub(super) fn sources(&self) -> Vec<&str> {
        self.sources.iter().map(|(name, _)| name.as_str()).collect()
    }

    /// The shape that `source` must have: what it was found with.
    pub(super) fn source_shape(&self, source: &str) -> Vec<usize> {
        let of = self.sources.iter().find(|(name, _)| name == source);
        of.map_or_else(Vec::new, |(_, shape)| shape.clone())
    }

    /// The type that it is made in.
    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Writes it, `[n, k]`, to `out`, zeros, made of `parts`; as an error the place of an element that is no number.
    pub(super) fn make(&self, parts: &[Part<'_>], [n, k]: [usize; 2], out: &mut [u8]) -> Result<(), [usize; 2]> {
        let row_bytes = self.dtype.tensor_bytes(&[k]) as usize;
        match &self.numbers {
            Numbers::Groups { packing, group, zeros, order, divisor } => {
                let groups = Groups {
                    words: parts[0].bytes,
                    zeros: (
                        *zeros,
                        if let Zeros::Packed { at, .. } | Zeros::Bytes { at, .. } = zeros {
                            parts[*at].bytes
                        } else {
                            &[]
                        },
                    ),
                    scales: fp8::numbers(&parts[SCALES]).into_iter().map(|scale| scale / divisor).collect(),
                    order: order.map(|at| parts[at].bytes.chunks_exact(4).map(|of| word(of) as usize).collect()),
                    packing: *packing,
                    group: *group,
                    shape: [n, k],
                };
                groups.make(self.dtype, row_bytes, out)
            }
            Numbers::Codes { codes, block, nested } => {
                let table = fp8::numbers(&parts[*codes]);
                let scales = match nested {
                    None => fp8::numbers(&parts[SCALES]),
                    Some(Nested { codes, scales, block, more }) => {
                        let (table, of_blocks) = (fp8::numbers(&parts[*codes]), fp8::numbers(&parts[*scales]));
                        let numbers = parts[SCALES].bytes.iter().enumerate();
                        numbers.map(|(at, number)| table[usize::from(*number)] * of_blocks[at / block] + more).collect()
                    }
                };
                let number = |at: usize| usize::from(parts[0].bytes[at / 2] >> (4 - at % 2 * 4) & 15);
                in_bf16([n, k], out, |r, c| table[number(r * k + c)] * scales[(r * k + c) / block])
            }
            Numbers::Nvfp4 { divides } => {
                let of_all = fp8::numbers(&parts[2])[0];
                let [bytes_of_row, groups] = [k.div_ceil(2), k.div_ceil(NVFP4_GROUP)];
                let number = |r: usize, c: usize| parts[0].bytes[r * bytes_of_row + c / 2] >> (c % 2 * 4) & 15;
                let scale = |r: usize, c: usize| {
                    let scale = fp8::number_or_nan(parts[SCALES].bytes[r * groups + c / NVFP4_GROUP]);
                    if *divides { scale / of_all } else { scale * of_all }
                };
                // Levels are twice the numbers.
                in_bf16([n, k], out, |r, c| f32::from(MX4_LEVELS[usize::from(number(r, c))]) / 2.0 * scale(r, c))
            }
        }
    }
}

/// Writes these elements.
fn in_bf16([n, k]: [usize; 2], out: &mut [u8], element: impl Fn(usize, usize) -> f32) -> Result<(), [usize; 2]> {
    let mut rows = out.chunks_exact_mut(2 * k).take(n).enumerate();
    rows.try_for_each(|(r, row)| row_in_bf16(r, row, |c| element(r, c)))
}

/// Writes those of row `r`.
fn row_in_bf16(r: usize, out: &mut [u8], element: impl Fn(usize) -> f32) -> Result<(), [usize; 2]> {
    for (c, out) in out.chunks_exact_mut(2).enumerate() {
        let element = bf16::from_f32(element(c));
        if !element.is_finite() {
            return Err([r, c]);
        }
        out.copy_from_slice(&element.to_le_bytes());
    }
    Ok(())
}

/// A matrix of [groups](Numbers::Groups).
struct Groups<'p> {
    words: &'p [u8],
    zeros: (Zeros, &'p [u8]),
    scales: Vec<f32>,
    order: Option<Vec<usize>>,
    packing: Packing,
    group: usize,
    shape: [usize; 2],
}

impl Groups<'_> {
    fn make(&self, dtype: DType, row_bytes: usize, out: &mut [u8]) -> Result<(), [usize; 2]> {
        let k = self.shape[1];
        // An odd number of cache lines: rows that are written side by side would push each other out otherwise.
        let pitch = (k.div_ceil(32) | 1) * 32;
        let mut numbers = vec![0; TOGETHER * pitch];
        for (some, out) in out.chunks_mut(TOGETHER * row_bytes).enumerate() {
            let (first, rows) = (some * TOGETHER, out.len() / row_bytes);
            self.numbers(first, rows, pitch, &mut numbers);
            let made = out.chunks_exact_mut(row_bytes).zip(numbers.chunks_exact(pitch));
            for (r, (out, numbers)) in (first..).zip(made) {
                match dtype {
                    DType::Int4 => self.in_fours(r, &numbers[..k], out)?,
                    DType::Q8 => self.in_blocks(r, &numbers[..k], out)?,
                    _ => self.in_bf16(r, &numbers[..k], out)?,
                }
            }
        }
        Ok(())
    }

    /// Those of rows from `first` on, as files have them, a row every `pitch`.
    fn numbers(&self, first: usize, rows: usize, pitch: usize, out: &mut [i16]) {
        let [n, k] = self.shape;
        let words = |at: usize| word(&self.words[4 * at..]);
        match self.packing {
            Packing::Columns { bits } => {
                let in_word = 32 / bits as usize;
                for (at, column) in (0..k).step_by(in_word).enumerate() {
                    let here = in_word.min(k - column);
                    for r in 0..rows {
                        take_apart(words(at * n + first + r), bits, &mut out[r * pitch + column..][..here]);
                    }
                }
            }
            Packing::Awq => {
                let in_row = n.div_ceil(8);
                for column in 0..k {
                    // Beyond the last row there is room.
                    for eight in (0..rows).step_by(8) {
                        let word = words(column * in_row + (first + eight) / 8);
                        for (i, of) in AWQ_ORDER.into_iter().enumerate() {
                            out[(eight + of) * pitch + column] = (word >> (4 * i) & 15) as i16;
                        }
                    }
                }
            }
            Packing::Rows { bits } => {
                let in_word = 32 / bits as usize;
                for (r, out) in out.chunks_exact_mut(pitch).take(rows).enumerate() {
                    for (at, out) in out[..k].chunks_mut(in_word).enumerate() {
                        take_apart(words((first + r) * k.div_ceil(in_word) + at), bits, out);
                    }
                }
            }
            Packing::Bytes => {
                let bytes = self.words.chunks_exact(k).skip(first);
                for (out, bytes) in out.chunks_exact_mut(pitch).zip(bytes).take(rows) {
                    out.iter_mut().zip(bytes).for_each(|(out, byte)| *out = i16::from(*byte as i8));
                }
            }
        }
    }

    /// What is taken off the numbers of row `r` in group `group`.
    fn zero(&self, r: usize, group: usize) -> i16 {
        let [n, k] = self.shape;
        let groups = k.div_ceil(self.group);
        let (zeros, bytes) = self.zeros;
        match zeros {
            Zeros::One(zero) => zero,
            Zeros::Bytes { more, .. } => i16::from(bytes[r * groups + group] as i8) + more,
            Zeros::Packed { add, .. } => {
                let row = |words: usize| &bytes[4 * group * words..];
                let zero = match self.packing {
                    Packing::Columns { bits } => self.packing.across(row(n.div_ceil(32 / bits as usize)), r, add),
                    Packing::Awq => self.packing.across(row(n.div_ceil(8)), r, add),
                    Packing::Rows { bits } => {
                        let in_word = 32 / bits as usize;
                        number(word(&bytes[4 * (r / in_word * groups + group)..]), bits, r % in_word)
                    }
                    Packing::Bytes => unreachable!("bytes have bytes"),
                };
                zero as i16
            }
        }
    }

    fn scale(&self, r: usize, group: usize) -> f32 {
        let [n, k] = self.shape;
        match self.packing {
            _ if self.scales.len() == 1 => self.scales[0],
            Packing::Columns { .. } | Packing::Awq => self.scales[group * n + r],
            Packing::Rows { .. } | Packing::Bytes => self.scales[r * k.div_ceil(self.group) + group],
        }
    }

    /// Row `r` as [`DType::Q8`] has it.
    fn in_blocks(&self, r: usize, numbers: &[i16], out: &mut [u8]) -> Result<(), [usize; 2]> {
        for (group, numbers) in numbers.chunks(self.group).enumerate() {
            let (zero, scale) = (self.zero(r, group), self.scale(r, group));
            // The nearest of 17 bits.
            let kept = f32::from_bits((scale.to_bits() + 0x3f + (scale.to_bits() >> 7 & 1)) & !0x7f);
            let first = group * self.group;
            if !kept.is_finite() {
                return Err([r, first]);
            }
            for (at, numbers) in (first / Q8.elems..).zip(numbers.chunks(Q8.elems)) {
                let [bytes, scales] = Q8.at(at);
                out[bytes..].iter_mut().zip(numbers).for_each(|(out, number)| *out = (number - zero) as u8);
                out[scales..][..4].copy_from_slice(&kept.to_le_bytes());
            }
        }
        Ok(())
    }

    /// Row `r` as [`DType::Int4`] has it.
    fn in_fours(&self, r: usize, numbers: &[i16], out: &mut [u8]) -> Result<(), [usize; 2]> {
        for (group, numbers) in numbers.chunks(self.group).enumerate() {
            let (scale, first) = (bf16::from_f32(self.scale(r, group)), group * self.group);
            // The largest product is.
            if !(scale.to_f32() * 8.0).is_finite() {
                return Err([r, first]);
            }
            for (at, numbers) in (first..).step_by(Q4_BLOCK).zip(numbers.chunks(Q4_BLOCK)) {
                // Neighbours are, all in one half of their bytes.
                let (byte, shift, scale_at) = q4_at(at);
                out[byte..].iter_mut().zip(numbers).for_each(|(out, number)| *out |= (*number as u8) << shift);
                out[scale_at..][..2].copy_from_slice(&scale.to_le_bytes());
            }
        }
        Ok(())
    }

    fn in_bf16(&self, r: usize, numbers: &[i16], out: &mut [u8]) -> Result<(), [usize; 2]> {
        let groups = self.shape[1].div_ceil(self.group);
        let of: Vec<(i16, f32)> = (0..groups).map(|group| (self.zero(r, group), self.scale(r, group))).collect();
        let group = |c: usize| self.order.as_ref().map_or(c / self.group, |order| order[c]);
        row_in_bf16(r, out, |c| {
            let (zero, scale) = of[group(c)];
            f32::from(numbers[c] - zero) * scale
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use half::f16;
    use perpetua_shared::dtype::Q4;
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    /// Tensors by their names.
    #[derive(Default)]
    struct Files(BTreeMap<String, (FileDtype, Vec<usize>, Vec<u8>)>);

    impl Files {
        fn add(&mut self, name: &str, dtype: FileDtype, shape: &[usize], bytes: Vec<u8>) {
            self.0.insert(name.to_owned(), (dtype, shape.to_owned(), bytes));
        }

        fn words(&mut self, name: &str, shape: &[usize], words: &[u32]) {
            self.add(name, FileDtype::I32, shape, words.iter().flat_map(|word| word.to_le_bytes()).collect());
        }

        fn floats(&mut self, name: &str, shape: &[usize], floats: &[f32]) {
            self.add(name, FileDtype::F32, shape, floats.iter().flat_map(|float| float.to_le_bytes()).collect());
        }

        fn halves(&mut self, name: &str, shape: &[usize], floats: &[f32]) {
            let bytes = floats.iter().flat_map(|float| f16::from_f32(*float).to_le_bytes()).collect();
            self.add(name, FileDtype::F16, shape, bytes);
        }

        fn remade(&self, shape: &[usize], stored: Stored, stays: bool) -> Result<Option<Remade>, ModelError> {
            let find = |name: &str| {
                let (name, (dtype, shape, bytes)) = self.0.get_key_value(name)?;
                Some(Found { name, dtype: *dtype, shape, bytes })
            };
            remade("w.weight", shape, stored, stays, &find)
        }

        /// The elements of the matrix that is made, and in what.
        fn made(&self, [n, k]: [usize; 2], stored: Stored, stays: bool) -> (DType, Vec<f32>) {
            let remade = self.remade(&[n, k], stored, stays).expect("all is there").expect("it is packed");
            let parts = self.parts(&remade);
            let dtype = remade.dtype(parts[0].dtype).expect("it is made in one");
            let bytes = remade.make(&parts).expect("numbers");
            let element = |r: usize, c: usize| match dtype {
                DType::Q8 => {
                    let row = &bytes[r * Q8.row_bytes(k)..];
                    let [at, scale] = Q8.at(c / Q8.elems);
                    let scale = f32::from_bits(word(&row[scale..]));
                    f32::from(row[at + c % Q8.elems] as i8) * scale
                }
                DType::Int4 => {
                    let row = &bytes[r * Q4.row_bytes(k)..];
                    let (byte, shift, scale) = q4_at(c);
                    let number = i32::from(row[byte] >> shift & 15) - 8;
                    number as f32 * bf16::from_le_bytes([row[scale], row[scale + 1]]).to_f32()
                }
                _ => bf16::from_bits(u16::from_le_bytes([bytes[2 * (r * k + c)], bytes[2 * (r * k + c) + 1]])).to_f32(),
            };
            (dtype, (0..n * k).map(|at| element(at / k, at % k)).collect())
        }

        fn parts(&self, remade: &Remade) -> Vec<Part<'_>> {
            let part = |name: &str| {
                let (dtype, shape, bytes) = &self.0[name];
                assert_eq!(remade.source_shape(name), *shape, "{name}");
                Part { dtype: *dtype, shape, bytes }
            };
            remade.sources().into_iter().map(part).collect()
        }
    }

    /// Puts number `at` of a word's, of so many bits, into it.
    fn put(word: &mut u32, at: usize, bits: u32, number: u32) {
        *word |= number << (at as u32 * bits);
    }

    const GPTQ: Stored = Stored::Gptq { bits: 4, group: Some(64), zeros_less_one: true };

    /// A matrix of random numbers, zeros and scales, [n, k], in groups of so many columns, or in another order.
    struct Random {
        shape: [usize; 2],
        group: usize,
        numbers: Vec<u32>,
        zeros: Vec<u32>,
        scales: Vec<f32>,
        order: Vec<usize>,
    }

    impl Random {
        fn new(random: &mut SmallRng, shape: [usize; 2], group: usize, bits: u32, in_order: bool) -> Random {
            let [n, k] = shape;
            let groups = k.div_ceil(group);
            let mut some = |n: usize| (0..n).map(|_| random.random_range(0..1 << bits)).collect::<Vec<u32>>();
            let (numbers, zeros) = (some(n * k), some(n * groups));
            let scales = (0..n * groups).map(|_| f16::from_f32(random.random_range(-1.0..1.0)).to_f32()).collect();
            let order = (0..k).map(|c| if in_order { c / group } else { random.random_range(0..groups) }).collect();
            Random { shape, group, numbers, zeros, scales, order }
        }

        fn groups(&self) -> usize {
            self.shape[1].div_ceil(self.group)
        }

        fn element(&self, r: usize, c: usize) -> f32 {
            let group = r * self.groups() + self.order[c];
            (self.numbers[r * self.shape[1] + c] as f32 - self.zeros[group] as f32) * self.scales[group]
        }

        /// That the matrix is what was made, in `expected`.
        fn judge(&self, (dtype, made): (DType, Vec<f32>), expected: DType, what: &str) {
            assert_eq!(dtype, expected, "{what}");
            let k = self.shape[1];
            for (at, found) in made.into_iter().enumerate() {
                let exact = self.element(at / k, at % k);
                let expected = match dtype {
                    DType::Q8 => exact,
                    DType::Int4 => {
                        let scale = self.scales[at / k * self.groups() + self.order[at % k]];
                        (self.numbers[at] as f32 - 8.0) * bf16::from_f32(scale).to_f32()
                    }
                    _ => bf16::from_f32(exact).to_f32(),
                };
                assert_eq!(found, expected, "{what}: element [{}, {}]", at / k, at % k);
            }
        }

        fn gptq(&self, bits: u32, zeros_less_one: bool) -> Files {
            let ([n, k], groups, in_word) = (self.shape, self.groups(), 32 / bits as usize);
            let mut words = vec![0; k.div_ceil(in_word) * n];
            for (at, number) in self.numbers.iter().enumerate() {
                let (r, c) = (at / k, at % k);
                put(&mut words[c / in_word * n + r], c % in_word, bits, *number);
            }
            let mut zeros = vec![0; groups * n.div_ceil(in_word)];
            for (at, zero) in self.zeros.iter().enumerate() {
                let (r, group) = (at / groups, at % groups);
                put(&mut zeros[group * n.div_ceil(in_word) + r / in_word], r % in_word, bits, *zero);
            }
            if zeros_less_one {
                let ones = (0..in_word).fold(0, |ones, at| ones | 1 << (at as u32 * bits));
                zeros.iter_mut().for_each(|word: &mut u32| *word = word.wrapping_sub(ones));
            }
            let mut files = Files::default();
            files.words("w.qweight", &[k.div_ceil(in_word), n], &words);
            files.words("w.qzeros", &[groups, n.div_ceil(in_word)], &zeros);
            files.halves("w.scales", &[groups, n], &self.across());
            files.words("w.g_idx", &[k], &self.order.iter().map(|group| *group as u32).collect::<Vec<_>>());
            files
        }

        /// Scales, [groups, n].
        fn across(&self) -> Vec<f32> {
            let [n, groups] = [self.shape[0], self.groups()];
            (0..n * groups).map(|at| self.scales[at % n * groups + at / n]).collect()
        }

        fn awq(&self) -> Files {
            let ([n, k], groups) = (self.shape, self.groups());
            let in_row = n.div_ceil(8);
            // Where a word has the first, the second, .. of eight rows.
            let place = [0, 4, 1, 5, 2, 6, 3, 7];
            let (mut words, mut zeros) = (vec![0; k * in_row], vec![0; groups * in_row]);
            for (at, number) in self.numbers.iter().enumerate() {
                put(&mut words[at % k * in_row + at / k / 8], place[at / k % 8], 4, *number);
            }
            for (at, zero) in self.zeros.iter().enumerate() {
                put(&mut zeros[at % groups * in_row + at / groups / 8], place[at / groups % 8], 4, *zero);
            }
            let mut files = Files::default();
            files.words("w.qweight", &[k, in_row], &words);
            files.words("w.qzeros", &[groups, in_row], &zeros);
            files.halves("w.scales", &[groups, n], &self.across());
            files
        }

        /// As compressed-tensors has it, with zeros, in words or bytes.
        fn rows(&self, bits: u32, zeros_in_bytes: bool) -> Files {
            let ([n, k], groups, in_word) = (self.shape, self.groups(), 32 / bits as usize);
            let mut words = vec![0; n * k.div_ceil(in_word)];
            for (at, number) in self.numbers.iter().enumerate() {
                put(&mut words[at / k * k.div_ceil(in_word) + at % k / in_word], at % k % in_word, bits, *number);
            }
            let mut zeros = vec![0; n.div_ceil(in_word) * groups];
            for (at, zero) in self.zeros.iter().enumerate() {
                put(&mut zeros[at / groups / in_word * groups + at % groups], at / groups % in_word, bits, *zero);
            }
            let mut files = Files::default();
            files.words("w.weight_packed", &[n, k.div_ceil(in_word)], &words);
            files.halves("w.weight_scale", &[n, groups], &self.scales);
            if zeros_in_bytes {
                let bytes = self.zeros.iter().map(|zero| (*zero as i32 - (1 << (bits - 1))) as u8).collect();
                files.add("w.weight_zero_point", FileDtype::I8, &[n, groups], bytes);
            } else {
                files.words("w.weight_zero_point", &[n.div_ceil(in_word), groups], &zeros);
            }
            files.add("w.weight_shape", FileDtype::I64, &[2], vec![0; 16]);
            files
        }
    }

    /// Sizes of which words are full, and others; more rows than are taken together.
    const SHAPES: [[usize; 2]; 4] = [[8, 128], [13, 192], [150, 100], [1, 9]];

    #[test]
    fn elements_are_numbers_less_zeros_times_scales() {
        let mut random = SmallRng::seed_from_u64(11);
        for (shape, group) in SHAPES.into_iter().flat_map(|shape| [(shape, 64), (shape, 32), (shape, 128)]) {
            let in_blocks =
                |bits: u32| if bits < 8 && (group % 64 == 0 || group >= shape[1]) { DType::Q8 } else { DType::Bf16 };
            for bits in [2, 4, 8] {
                let of = Random::new(&mut random, shape, group, bits, true);
                for zeros_less_one in [false, true] {
                    let stored = Stored::Gptq { bits: bits as usize, group: Some(group), zeros_less_one };
                    let files = of.gptq(bits, zeros_less_one);
                    of.judge(
                        files.made(shape, stored, true),
                        in_blocks(bits),
                        &format!("GPTQ, {bits} bits of {shape:?}"),
                    );
                    of.judge(files.made(shape, stored, false), DType::Bf16, "what others are made of");
                }
                if bits > 2 {
                    let stored = Stored::Compressed { block: None, group: Some(group) };
                    for zeros_in_bytes in [false, true] {
                        let made = of.rows(bits, zeros_in_bytes).made(shape, stored, true);
                        of.judge(made, in_blocks(bits), &format!("rows of {bits} bits of {shape:?}"));
                    }
                }
            }
            let of = Random::new(&mut random, shape, group, 4, true);
            of.judge(of.awq().made(shape, Stored::Awq { group: Some(group) }, true), in_blocks(4), "AWQ");
            // Scales' shape says it, too.
            if shape[1] % group == 0 {
                of.judge(of.awq().made(shape, Stored::Awq { group: None }, true), in_blocks(4), "AWQ, not said");
            }
        }
        let of = Random::new(&mut random, [9, 256], 64, 4, false);
        of.judge(of.gptq(4, true).made([9, 256], GPTQ, true), DType::Bf16, "groups in another order");
    }

    /// Of zeros in the middle scales alone are rounded.
    #[test]
    fn numbers_of_four_bits_are_kept_where_zeros_are_in_the_middle() {
        let mut random = SmallRng::seed_from_u64(15);
        for (shape, group) in SHAPES.into_iter().flat_map(|shape| [(shape, 16), (shape, 32), (shape, 96), (shape, 500)])
        {
            let mut of = Random::new(&mut random, shape, group.min(shape[1]), 4, true);
            of.zeros.fill(8);
            let expected = if group % 32 == 0 || group >= shape[1] { DType::Int4 } else { DType::Bf16 };
            for zeros_less_one in [false, true] {
                let stored = Stored::Gptq { bits: 4, group: Some(of.group), zeros_less_one };
                let files = of.gptq(4, zeros_less_one);
                of.judge(files.made(shape, stored, true), expected, &format!("GPTQ, {shape:?} by {group}"));
                of.judge(files.made(shape, stored, false), DType::Bf16, "what others are made of");
            }
            of.judge(of.awq().made(shape, Stored::Awq { group: Some(of.group) }, true), expected, "AWQ");
            let mut files = of.rows(4, false);
            files.0.remove("w.weight_zero_point");
            let stored = Stored::Compressed { block: None, group: Some(of.group) };
            of.judge(files.made(shape, stored, true), expected, "rows");
            // One zero is another.
            let last = of.zeros.len() - 1;
            of.zeros[last] = 9;
            let expected = if group % 64 == 0 || group >= shape[1] { DType::Q8 } else { DType::Bf16 };
            of.judge(
                of.gptq(4, true).made(
                    shape,
                    Stored::Gptq { bits: 4, group: Some(of.group), zeros_less_one: true },
                    true,
                ),
                expected,
                "GPTQ, another zero",
            );
        }
    }

    /// Differences from the middle of eight bits are bytes; all others are not.
    #[test]
    fn bytes_are_kept_where_zeros_are_in_the_middle() {
        let mut random = SmallRng::seed_from_u64(12);
        let shape = [10, 130];
        let mut of = Random::new(&mut random, shape, 64, 8, true);
        of.zeros.fill(128);
        for zeros_less_one in [false, true] {
            let stored = Stored::Gptq { bits: 8, group: Some(64), zeros_less_one };
            of.judge(of.gptq(8, zeros_less_one).made(shape, stored, true), DType::Q8, "GPTQ, 8 bits");
        }
        let compressed = Stored::Compressed { block: None, group: Some(64) };
        let mut files = of.rows(8, false);
        files.0.remove("w.weight_zero_point");
        of.judge(files.made(shape, compressed, true), DType::Q8, "rows of 8 bits without zeros");
        let mut files = Files::default();
        let bytes = || of.numbers.iter().map(|number| (number.wrapping_sub(128)) as u8).collect();
        files.add("w.weight", FileDtype::I8, &shape, bytes());
        files.halves("w.weight_scale", &[shape[0], 3], &of.scales);
        of.judge(files.made(shape, compressed, true), DType::Q8, "bytes");
        files.add("w.weight_zero_point", FileDtype::I8, &[shape[0], 3], vec![0; 30]);
        of.judge(files.made(shape, compressed, true), DType::Bf16, "bytes with zeros");
        // A row's scale; and one of all.
        let of_rows = Random::new(&mut random, shape, 130, 8, true);
        let mut of_rows = Random { zeros: vec![128; 10], ..of_rows };
        let mut files = Files::default();
        let bytes = of_rows.numbers.iter().map(|number| (number.wrapping_sub(128)) as u8).collect();
        files.add("w.weight", FileDtype::I8, &shape, bytes);
        files.floats("w.SCB", &[10], &of_rows.scales.iter().map(|scale| scale * 127.0).collect::<Vec<_>>());
        of_rows.judge(files.made(shape, Stored::Floats, true), DType::Q8, "bytes of bitsandbytes");
        files.0.remove("w.SCB");
        files.halves("w.weight_scale", &[1], &[0.75]);
        of_rows.scales.fill(0.75);
        of_rows.judge(files.made(shape, compressed, true), DType::Q8, "bytes, one scale");
    }

    #[test]
    fn numbers_stand_for_others() {
        let mut random = SmallRng::seed_from_u64(13);
        let [n, k] = [7usize, 45];
        let bytes: Vec<u8> = (0..(n * k).div_ceil(2)).map(|_| random.random()).collect();
        let table: Vec<f32> = (0..16).map(|number| number as f32 / 8.0 - 1.0).collect();
        let blocks = (n * k).div_ceil(64);
        let absmax: Vec<f32> = (0..blocks).map(|block| 2f32.powi(block as i32 % 3)).collect();
        let mut files = Files::default();
        files.add("w.weight", FileDtype::U8, &[bytes.len(), 1], bytes.clone());
        files.floats("w.weight.absmax", &[blocks], &absmax);
        files.floats("w.weight.quant_map", &[16], &table);
        let state = |says: &str| says.as_bytes().to_vec();
        files.add("w.weight.quant_state.bitsandbytes__fp4", FileDtype::U8, &[17], state("{\"blocksize\": 64}"));
        let expected: Vec<f32> = (0..n * k)
            .map(|at| {
                table[usize::from(if at % 2 == 0 { bytes[at / 2] >> 4 } else { bytes[at / 2] & 15 })] * absmax[at / 64]
            })
            .collect();
        assert_eq!(files.made([n, k], Stored::Floats, true), (DType::Bf16, expected.clone()));
        // Scales that are numbers themselves: less 2, in blocks of two, each half.
        let nested: Vec<u8> = absmax.iter().map(|scale| (2.0 * (scale - 2.0) + 100.0) as u8).collect();
        files.add("w.weight.absmax", FileDtype::U8, &[blocks], nested);
        files.floats("w.weight.nested_absmax", &[blocks.div_ceil(2)], &vec![0.5; blocks.div_ceil(2)]);
        files.floats("w.weight.nested_quant_map", &[256], &(0..256).map(|i| i as f32 - 100.0).collect::<Vec<_>>());
        let says = "{\"blocksize\": 64, \"nested_blocksize\": 2, \"nested_offset\": 2.0}";
        files.add("w.weight.quant_state.bitsandbytes__fp4", FileDtype::U8, &[says.len()], state(says));
        assert_eq!(files.made([n, k], Stored::Floats, true), (DType::Bf16, expected));

        // NVFP4, by the definition of its parts: E2M1 and E4M3.
        let [n, k] = [3, 40];
        let bytes: Vec<u8> = (0..n * k / 2).map(|_| random.random()).collect();
        let scales: Vec<u8> = (0..n * 3).map(|at| 0x30 + at as u8).collect();
        let e2m1 = |number: u8| {
            let (exponent, mantissa) = (number >> 1 & 3, f32::from(number & 1) / 2.0);
            let size = if exponent == 0 { mantissa } else { (1.0 + mantissa) * 2f32.powi(i32::from(exponent) - 1) };
            if number & 8 == 0 { size } else { -size }
        };
        let e4m3 = |byte: u8| (1.0 + f32::from(byte & 7) / 8.0) * 2f32.powi(i32::from(byte >> 3) - 7);
        let expected: Vec<f32> = (0..n * k)
            .map(|at| e2m1(bytes[at / 2] >> (at % 2 * 4) & 15) * e4m3(scales[at / k * 3 + at % k / 16]) * 0.25)
            .collect();
        for (numbers, of_all, one) in
            [("w.weight", "w.weight_scale_2", 0.25), ("w.weight_packed", "w.weight_global_scale", 4.0)]
        {
            let mut files = Files::default();
            files.add(numbers, FileDtype::U8, &[n, k / 2], bytes.clone());
            files.add("w.weight_scale", FileDtype::F8_E4M3, &[n, 3], scales.clone());
            files.floats(of_all, &[], &[one]);
            assert_eq!(files.made([n, k], Stored::Floats, true), (DType::Bf16, expected.clone()), "{numbers}");
        }
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let mut random = SmallRng::seed_from_u64(14);
        let shape = [16, 128];
        let of = Random::new(&mut random, shape, 64, 4, true);
        let refused = |change: &dyn Fn(&mut Files), expected: &str| {
            let mut files = of.gptq(4, true);
            change(&mut files);
            let message = files.remade(&shape, GPTQ, true).expect_err("refused").to_string();
            assert!(message.contains(expected), "{message:?} does not say {expected:?}");
        };
        for (name, beside) in [("w.scales", "w.qweight"), ("w.qzeros", "w.qweight")] {
            refused(&|files| drop(files.0.remove(name)), &format!("{name}: no such tensor, expected beside {beside}"));
        }
        refused(
            &|files| files.words("w.qweight", &[16, 17], &[0; 272]),
            "w.qweight: shape [16, 17], expected [16, 16]",
        );
        refused(&|files| files.words("w.qzeros", &[2, 3], &[0; 6]), "w.qzeros: shape [2, 3], expected [2, 2]");
        refused(&|files| files.halves("w.scales", &[3, 16], &[1.0; 48]), "w.scales: shape [3, 16], expected [2, 16]");
        refused(&|files| files.halves("w.scales", &[1, 1], &[1.0]), "w.scales: shape [1, 1], expected [2, 16]");
        refused(&|files| files.halves("w.scales", &[32], &[1.0; 32]), "w.scales: shape [32], expected [2, 16]");
        refused(&|files| files.words("w.scales", &[2, 16], &[0; 32]), "w.scales: dtype i32, expected bf16, f16 or f32");
        refused(&|files| files.halves("w.qzeros", &[2, 2], &[0.0; 4]), "w.qzeros: dtype f16, expected i32");
        refused(&|files| files.words("w.g_idx", &[128], &[2; 128]), "w.g_idx: element 0 is 2, expected less than 2");
        let mut files = of.gptq(4, true);
        let mut scales = of.across();
        scales[16 + 3] = f32::INFINITY;
        files.halves("w.scales", &[2, 16], &scales);
        for stays in [true, false] {
            let remade = files.remade(&shape, GPTQ, stays).expect("all is there").expect("it is packed");
            let message = remade.make(&files.parts(&remade)).expect_err("no number").to_string();
            assert!(message.contains("w.weight: element [3, 64] is not finite"), "{message}");
        }
        // Of other files nothing is made.
        assert_eq!(files.remade(&shape, Stored::Floats, true).expect("no error"), None);
        let mut files = Files::default();
        files.halves("w.weight", &shape, &[0.0; 2048]);
        assert_eq!(files.remade(&shape, GPTQ, true).expect("no error"), None);
        let mut files = Files::default();
        files.add("w.weight", FileDtype::U8, &[1024, 1], vec![0; 1024]);
        let says = |files: &Files| files.remade(&shape, Stored::Floats, true).expect_err("refused").to_string();
        assert!(says(&files).contains("w.weight: shape [1024, 1], expected [16, 64]"), "{}", says(&files));
        files.floats("w.weight.absmax", &[32], &[1.0; 32]);
        files.floats("w.weight.quant_map", &[16], &[1.0; 16]);
        files.add("w.weight.quant_state.bitsandbytes__nf4", FileDtype::U8, &[2], b"{}".to_vec());
        assert!(says(&files).contains("no usable \"blocksize\""), "{}", says(&files));
    }
}
