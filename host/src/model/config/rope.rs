//! Rotary position embedding: how positions turn queries and keys, and where a config.json says it.

use serde_json::{Map, Value};

use super::{Architecture, MAX_POSITIONS};
use crate::model::error::ModelError;
use crate::model::json::Fields;

/// Rotary position embedding: pair `i` of a head is turned by `position * inverse_frequencies[i]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// The base of the geometric series of wavelengths.
    pub theta: f64,
    /// How the series is stretched for contexts longer than those of the first training.
    pub scaling: RopeScaling,
}

/// See [`Rope::scaling`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// Not at all.
    Default,
    /// No pair is turned: an attention that does not know positions (NoPE; Kazemnejad et al., 2023).
    Still,
    /// Every frequency divided by `factor`.
    Linear {
        /// At least 1.
        factor: f64,
    },
    /// Of a head's pairs the first `part` alone are turned, by the frequencies that they would have if all were; all
    /// divided by `factor`.
    Proportional {
        /// From 0 to 1.
        part: f64,
        /// At least 1.
        factor: f64,
    },
    /// Low frequencies divided by `factor`, high ones kept, a smooth passage between them: Llama 3.1 and later.
    Llama3 {
        /// At least 1.
        factor: f64,
        /// Wavelengths over `original_max_position_embeddings / low_freq_factor` are stretched fully.
        low_freq_factor: f64,
        /// Wavelengths under `original_max_position_embeddings / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// The context of the first training.
        original_max_position_embeddings: usize,
    },
    /// YaRN (Peng et al., 2023): pairs that turn seldom in the first training's context have their frequencies divided
    /// by `factor`, those that turn often keep them, with a ramp over the pairs between, and attention is sharpened.
    Yarn {
        /// At least 1.
        factor: f64,
        /// Pairs that turn more often than this keep their frequencies.
        beta_fast: f64,
        /// Pairs that turn more seldom than this have them divided.
        beta_slow: f64,
        /// Whether the ramp begins and ends at whole pairs.
        truncate: bool,
        /// What queries and keys are multiplied with, each.
        attention_factor: f64,
        /// The context of the first training.
        original_max_position_embeddings: usize,
    },
    /// LongRoPE (Ding et al., 2024): each pair's frequency divided by a number of its own, found by search, and
    /// attention sharpened.
    LongRope {
        /// The numbers for a context no longer than the first training's, one a pair.
        short: Vec<f64>,
        /// Those for a longer one.
        long: Vec<f64>,
        /// What queries and keys are multiplied with, each.
        attention_factor: f64,
        /// The context of the first training.
        original_max_position_embeddings: usize,
    },
}

impl Rope {
    /// That of a layer that has none.
    pub const NONE: Rope = Rope { theta: 1.0, scaling: RopeScaling::Still };

    /// What is turned of queries and keys is multiplied with this.
    pub fn factor(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } | RopeScaling::LongRope { attention_factor, .. } => {
                attention_factor
            }
            _ => 1.0,
        }
    }

    /// `dim / 2` frequencies in radians per position, of heads of which `dim` elements are turned, where there may be
    /// `context` positions. In f32 step by step as `transformers` computes them, because at large positions the
    /// rounding of a frequency is seen in the logits. (Which numbers of LongRoPE it takes, that library decides by the
    /// text so far, whose earlier keys were turned by the others.)
    pub fn inverse_frequencies(&self, dim: usize, context: usize) -> Vec<f32> {
        let powers = (0..dim / 2).map(|i| {
            let exponent = (2 * i) as f32 / dim as f32;
            // The power is taken in f64 and rounded once: what a well-rounded f32 `pow` gives on any machine.
            f64::from(self.theta as f32).powf(f64::from(exponent)) as f32
        });
        let frequencies = powers.clone().map(|power| 1.0 / power);
        match self.scaling {
            RopeScaling::Default => frequencies.collect(),
            RopeScaling::Still => vec![0.0; dim / 2],
            RopeScaling::Proportional { part, factor } => {
                let turned = (part * dim as f64 / 2.0) as usize;
                let part = frequencies.take(turned).map(|f| f / factor as f32);
                part.chain(std::iter::repeat(0.0)).take(dim / 2).collect()
            }
            RopeScaling::Linear { factor } => frequencies.map(|f| f / factor as f32).collect(),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings: original,
            } => {
                let low_freq_wavelen = (original as f64 / low_freq_factor) as f32;
                let high_freq_wavelen = (original as f64 / high_freq_factor) as f32;
                let width = (high_freq_factor - low_freq_factor) as f32;
                let (factor, low, original) = (factor as f32, low_freq_factor as f32, original as f32);
                frequencies
                    .map(|f| {
                        // A number divided by a tensor is computed as the tensor's reciprocal times the number.
                        let wavelen = (1.0 / f) * std::f32::consts::TAU;
                        if wavelen > low_freq_wavelen {
                            f / factor
                        } else if wavelen < high_freq_wavelen {
                            f
                        } else {
                            let smooth = ((1.0 / wavelen) * original - low) / width;
                            (1.0 - smooth) * f / factor + smooth * f
                        }
                    })
                    .collect()
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, truncate, original_max_position_embeddings, .. } => {
                // The pair, as a number of dimensions, that turns so often in the first training's context.
                let pair = |turns: f64| {
                    let wavelen = original_max_position_embeddings as f64 / (turns * std::f64::consts::TAU);
                    dim as f64 * wavelen.ln() / (2.0 * self.theta.ln())
                };
                let (low, high) = (pair(beta_fast), pair(beta_slow));
                let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
                let (low, high) = (low.max(0.0), high.min(dim as f64 - 1.0));
                // A ramp of no length is a step.
                let width = if low == high { 0.001 } else { high - low };
                powers
                    .enumerate()
                    .map(|(i, power)| {
                        let kept = 1.0 - ((i as f32 - low as f32) / width as f32).clamp(0.0, 1.0);
                        1.0 / (factor as f32 * power) * (1.0 - kept) + 1.0 / power * kept
                    })
                    .collect()
            }
            RopeScaling::LongRope { ref short, ref long, original_max_position_embeddings: original, .. } => {
                let divisors = if context > original { long } else { short };
                powers.zip(divisors).map(|(power, divisor)| 1.0 / (*divisor as f32 * power)).collect()
            }
        }
    }
}

/// Queries at position p are multiplied with `1 + beta * ln(1 + floor(p / original))`, as Llama 4's: with more than 1
/// beyond the first training's context.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lengthening {
    /// Above 0.
    pub beta: f64,
    /// The context of the first training, in positions.
    pub original: usize,
}

/// The largest base there may be.
pub(super) const MAX_THETA: f64 = 1e15;

const ORIGINAL: &str = "original_max_position_embeddings";

/// The embeddings of layers that attend to all positions, and of those with a window.
#[derive(Debug)]
pub(super) struct Ropes {
    pub(super) full: Rope,
    pub(super) sliding: Rope,
    /// How many elements of a head they turn, the first ones.
    pub(super) dim: usize,
    /// What queries are multiplied with besides, by their positions.
    pub(super) lengthening: Option<Lengthening>,
    /// What latent attention multiplies scores with, besides.
    pub(super) scores_factor: f64,
}

/// What a config.json says of them. Older files have the keys of one embedding beside all others, or in `rope_scaling`;
/// newer ones in `rope_parameters`, where each type of layer may have its own. Heads have `head_dim` elements that may be
/// turned; where that is said as a part, of `whole`.
pub(super) fn ropes(
    fields: &Fields<'_>,
    architecture: Architecture,
    max_position_embeddings: usize,
    [head_dim, whole]: [usize; 2],
) -> Result<Ropes, ModelError> {
    let traits = architecture.traits();
    let filled = |key| Ok::<_, ModelError>(fields.object(key)?.filter(|given| given.entries().next().is_some()));
    let (old, new) = (filled("rope_scaling")?, filled("rope_parameters")?);
    if architecture.is_gemma4() && new.is_none() && fields.get("rope_parameters").is_some() {
        return Err(fields.wrong("rope_parameters", "keys for each type of layer"));
    }
    if traits.ropes_by_type {
        return ropes_by_type(fields, architecture, [old, new], max_position_embeddings, head_dim);
    }
    let given = old.or(new);
    let by_type = given.as_ref().filter(|given| is_by_type(given));
    // Beside all other keys it comes before the one among them, but for layers of several types.
    let original = if by_type.is_some() { None } else { fields.whole(ORIGINAL, 1..=MAX_POSITIONS)? };
    let given = match by_type {
        Some(by_type) => {
            let mut types = by_type.entries().filter(|(_, value)| !value.is_null());
            let first = types.next();
            if types.any(|(_, other)| first.is_some_and(|(_, first)| other != first)) {
                return Err(fields.unsupported("rope_parameters", "the same parameters for every layer type"));
            }
            by_type.object(first.map_or("", |(name, _)| name))?
        }
        None => given,
    };
    let original = original.or(traits.original_context);
    let dim = match traits.turned_part {
        Some(part) => turned(fields, given.as_ref(), traits.turned_key, head_dim, part)?,
        None => head_dim,
    };
    let whole = if whole == head_dim { dim } else { whole };
    let shape = Shape { architecture, original, max_position_embeddings, dim, whole };
    // What their classes have by default is not what others have.
    if given.is_none() && matches!(architecture, Architecture::Ministral3 | Architecture::GptOss) {
        return Err(fields.wrong("rope_parameters", "an object"));
    }
    let lengthening = given.as_ref().map_or(Ok(None), |given| lengthening(given, shape))?;
    let scores_factor = match &given {
        Some(given) if traits.is_latent => scores_factor(given)?,
        _ => 1.0,
    };
    let full = rope(fields, given, (traits.theta_key, traits.rope_theta), shape)?;
    Ok(Ropes { sliding: full.clone(), full, dim, lengthening, scores_factor })
}

/// See [`Ropes::scores_factor`]: the square of YaRN's factor for all of a head's elements.
fn scores_factor(given: &Fields<'_>) -> Result<f64, ModelError> {
    if kind_of(given)? == "default" {
        return Ok(1.0);
    }
    match given.real("mscale_all_dim", YARN_WEIGHTS)? {
        None | Some(0.0) => Ok(1.0),
        Some(weight) => Ok(yarn_factor(weight, given.required_real("factor", 1.0..=1e6)?).powi(2)),
    }
}

/// Which embedding it is.
fn kind_of<'f>(given: &'f Fields<'_>) -> Result<&'f str, ModelError> {
    Ok(given.text(kind_key(given))?.unwrap_or("default"))
}

/// What says it; older files' name comes second.
fn kind_key(given: &Fields<'_>) -> &'static str {
    if given.get("rope_type").is_some() { "rope_type" } else { "type" }
}

/// See [`Ropes::lengthening`].
fn lengthening(given: &Fields<'_>, shape: Shape) -> Result<Option<Lengthening>, ModelError> {
    // What others would say of it is not heeded.
    if !matches!(shape.architecture, Architecture::Ministral3 | Architecture::Mistral4) {
        return Ok(None);
    }
    match given.real("llama_4_scaling_beta", 0.0..=1e3)? {
        None | Some(0.0) => Ok(None),
        Some(beta) => Ok(Some(Lengthening { beta, original: original_of(given, shape)? })),
    }
}

/// The context of the first training.
fn original_of(given: &Fields<'_>, shape: Shape) -> Result<usize, ModelError> {
    match shape.original {
        Some(n) => Ok(n),
        None => Ok(given.whole(ORIGINAL, 1..=MAX_POSITIONS)?.unwrap_or(shape.max_position_embeddings)),
    }
}

/// How many elements of a head are turned, of `head_dim`: a part of them may be said beside the embedding's keys,
/// `given`, or beside all others; else it is `part`. Older files may say the number itself, as `old_key`.
fn turned(
    fields: &Fields<'_>,
    given: Option<&Fields<'_>>,
    old_key: Option<&str>,
    head_dim: usize,
    part: f64,
) -> Result<usize, ModelError> {
    const KEY: &str = "partial_rotary_factor";
    let old = old_key.map_or(Ok(None), |key| fields.whole(key, 2..=head_dim))?;
    let fields = given.filter(|given| given.get(KEY).is_some()).unwrap_or(fields);
    // Null is not as good as missing.
    let part = if fields.has(KEY) { 1.0 } else { old.map_or(part, |dim| dim as f64 / head_dim as f64) };
    let part = fields.real(KEY, 0.0..=1.0)?.unwrap_or(part);
    let dim = (head_dim as f64 * part) as usize;
    if dim == 0 || !dim.is_multiple_of(2) {
        return Err(fields.wrong(KEY, format!("an even number of a head's {head_dim} elements, at least 2")));
    }
    Ok(dim)
}

/// What layers that attend are called.
pub(super) const LAYER_TYPES: [&str; 2] = ["full_attention", "sliding_attention"];

/// Whether each type of layer has keys of its own, or null.
fn is_by_type(given: &Fields<'_>) -> bool {
    LAYER_TYPES.iter().any(|name| given.has(name)) || given.entries().all(|(_, value)| value.is_object())
}

/// Where each type of layer has its own, and what is not given is as usual. Keys of older files, `old`, are those of
/// layers without a window.
fn ropes_by_type(
    fields: &Fields<'_>,
    architecture: Architecture,
    [old, new]: [Option<Fields<'_>>; 2],
    max_position_embeddings: usize,
    head_dim: usize,
) -> Result<Ropes, ModelError> {
    let old = old.filter(|_| !architecture.is_gemma4());
    if let (true, Some(new)) = (architecture.is_gemma4(), &new) {
        let types = fields.texts("layer_types")?.unwrap_or(LAYER_TYPES.to_vec());
        let is_used = |kind: &str| kind == LAYER_TYPES[0] || types.contains(&kind);
        if let Some(missing) = LAYER_TYPES.iter().find(|kind| is_used(kind) && new.get(kind).is_none()) {
            return Err(new.wrong(missing, "an object"));
        }
        for kind in LAYER_TYPES {
            // A base beside all other keys is not heeded.
            if let Some(of_type) = new.object(kind)?.filter(|of_type| of_type.get("rope_theta").is_none()) {
                return Err(of_type.wrong("rope_theta", "a number"));
            }
        }
    } else if architecture.is_gemma4() {
        let full = Rope { theta: 1e6, scaling: RopeScaling::Proportional { part: 0.25, factor: 1.0 } };
        let sliding = Rope { theta: 1e4, scaling: RopeScaling::Default };
        return Ok(Ropes { full, sliding, dim: head_dim, lengthening: None, scores_factor: 1.0 });
    }
    if new.as_ref().is_some_and(|new| !is_by_type(new)) {
        // transformers does not heed them.
        return Err(fields.wrong("rope_parameters", "keys of full_attention and of sliding_attention"));
    }
    // These have no older files, and what their classes have by default is not what others have.
    if architecture.traits().required.contains(&"rope_parameters") {
        if old.is_some() {
            return Err(fields.unsupported("rope_scaling", "null"));
        }
        let Some(new) = &new else { return Err(fields.wrong("rope_parameters", "keys for each type of layer")) };
        let types = fields.texts("layer_types")?.unwrap_or(vec![LAYER_TYPES[0]]);
        if let Some(missing) = LAYER_TYPES.iter().find(|kind| types.contains(kind) && new.get(kind).is_none()) {
            return Err(new.wrong(missing, "an object"));
        }
    }
    let of_type = |name| new.as_ref().map_or(Ok(None), |new| new.object(name));
    let shape = Shape { architecture, original: None, max_position_embeddings, dim: head_dim, whole: head_dim };
    let of = |given, theta| rope(fields, given, theta, shape);
    let traits = architecture.traits();
    let theta = (traits.theta_key, traits.rope_theta);
    let sliding = of(of_type("sliding_attention")?, traits.sliding_theta.unwrap_or(theta))?;
    let mut full = of_type("full_attention")?;
    let mut merged = Map::new();
    let merged_value;
    if let Some(old) = old {
        match full {
            Some(full) => merged.extend(full.entries().map(|(key, value)| (key.to_owned(), value.clone()))),
            // So a `type` alone, the name from before, says nothing; nor does it in transformers.
            None => merged.extend([("rope_type".to_owned(), Value::from("default"))]),
        }
        merged.extend(old.entries().map(|(key, value)| (key.to_owned(), value.clone())));
        merged_value = Value::Object([("rope_scaling".to_owned(), Value::Object(merged))].into_iter().collect());
        full = Fields::new(fields.path(), &merged_value)?.object("rope_scaling")?;
    }
    let full = of(full, theta)?;
    if architecture.is_gemma4()
        && [&full, &sliding].iter().any(|rope| matches!(rope.scaling, RopeScaling::LongRope { .. }))
    {
        // There would be as many of its numbers as the heads of each type have pairs.
        return Err(fields.unsupported("rope_parameters", "all but longrope for this architecture"));
    }
    Ok(Ropes { full, sliding, dim: head_dim, lengthening: None, scores_factor: 1.0 })
}

/// What an embedding's keys are understood by.
#[derive(Clone, Copy)]
struct Shape {
    architecture: Architecture,
    /// The context of the first training as it is said beside all others, where that counts.
    original: Option<usize>,
    max_position_embeddings: usize,
    /// How many elements of a head are turned.
    dim: usize,
    /// As many, or more, of which that may be said to be a part.
    whole: usize,
}

/// One embedding, of which `given` has the keys that are not beside all others; the base is there called as `theta`
/// says, and has a default.
fn rope(
    fields: &Fields<'_>,
    given: Option<Fields<'_>>,
    (theta_key, default_theta): (&str, f64),
    shape: Shape,
) -> Result<Rope, ModelError> {
    const KINDS: &str = "default, linear, llama3, yarn, longrope, proportional";
    // Where a part of each head is turned anyway.
    const KINDS_OF_PARTS: &str = "default, linear, llama3, yarn, longrope";
    const PART: &str = "partial_rotary_factor";
    const THETA: std::ops::RangeInclusive<f64> = 1.0..=MAX_THETA;
    let Shape { architecture, max_position_embeddings, dim, whole, .. } = shape;
    let traits = architecture.traits();
    let (mut theta, mut stretch, mut scaling) = (None, 1.0, RopeScaling::Default);
    let (mut partial, mut is_beside) = (fields.clone(), true);
    // What stands beside all other keys is of every embedding, but for those who have each type's apart.
    let reads_beside = architecture != Architecture::Mellum && !architecture.is_gemma4();
    if let Some(given) = given {
        theta = given.real("rope_theta", THETA)?;
        let kind_key = kind_key(&given);
        let original = || original_of(&given, shape);
        scaling = match kind_of(&given)? {
            "default" => RopeScaling::Default,
            // Whatever its name says, the text's length is nothing to it.
            "dynamic" if architecture.norms_turned() && given.get("alpha").is_some() => {
                let alpha = given.required_real("alpha", 1.0..=1e6)?;
                stretch = alpha.powf(dim as f64 / (dim as f64 - 2.0));
                if dim == 2 || stretch > 1e9 {
                    return Err(given.wrong("alpha", "less, for heads of so few elements"));
                }
                RopeScaling::Default
            }
            // Positions in a picture have three numbers, which are one in text.
            "mrope" if given.get("mrope_section").is_some() => RopeScaling::Default,
            "proportional" if traits.turned_part.is_none() => {
                let beside = if reads_beside { fields.real(PART, 0.0..=1.0)? } else { None };
                RopeScaling::Proportional {
                    part: given.real(PART, 0.0..=1.0)?.or(beside).unwrap_or(1.0),
                    factor: given.real("factor", 1.0..=1e6)?.unwrap_or(1.0),
                }
            }
            "linear" => RopeScaling::Linear { factor: given.required_real("factor", 1.0..=1e6)? },
            "llama3" => {
                let low_freq_factor = given.required_real("low_freq_factor", 1e-6..=1e6)?;
                let high_freq_factor = given.required_real("high_freq_factor", 1e-6..=1e6)?;
                if high_freq_factor <= low_freq_factor {
                    return Err(
                        given.wrong("high_freq_factor", format!("more than low_freq_factor, {low_freq_factor}"))
                    );
                }
                RopeScaling::Llama3 {
                    factor: given.required_real("factor", 1.0..=1e6)?,
                    low_freq_factor,
                    high_freq_factor,
                    original_max_position_embeddings: original()?,
                }
            }
            kind if kind == "longrope" || traits.longrope_names.contains(&kind) => {
                longrope(&given, original()?, max_position_embeddings, dim)?
            }
            "yarn" => yarn(&given, original()?, max_position_embeddings)?,
            _ if traits.turned_part.is_some() => return Err(given.unsupported(kind_key, KINDS_OF_PARTS)),
            _ => return Err(given.unsupported(kind_key, KINDS)),
        };
        if given.get(PART).is_some() {
            (partial, is_beside) = (given, false);
        }
    }
    let is_proportional = matches!(scaling, RopeScaling::Proportional { .. });
    let is_heeded = traits.turned_part.is_some() || is_proportional && (reads_beside || !is_beside);
    // Of another whole it is a quotient, with its last digit.
    let turns_dim =
        |part: f64| if whole == dim { part == 1.0 } else { (whole as f64 * part - dim as f64).abs() < 1e-6 };
    if !is_heeded && partial.get(PART).is_some_and(|v| !v.as_f64().is_some_and(turns_dim)) {
        let part = dim as f64 / whole as f64;
        let expected = if whole == dim { "1 (the whole head is turned)".to_owned() } else { part.to_string() };
        return Err(partial.unsupported(PART, expected));
    }
    let theta = match theta {
        Some(theta) => theta,
        None => fields.real(theta_key, THETA)?.unwrap_or(default_theta),
    };
    let theta = theta * stretch;
    if matches!(scaling, RopeScaling::Yarn { .. }) && theta <= 1.0 {
        return Err(ModelError::key(fields.path(), theta_key, theta.to_string(), "more than 1 (YaRN)"));
    }
    Ok(Rope { theta, scaling })
}

/// LongRoPE, where the first training's context was `original` and `dim` elements of a head are turned.
fn longrope(
    given: &Fields<'_>,
    original: usize,
    max_position_embeddings: usize,
    dim: usize,
) -> Result<RopeScaling, ModelError> {
    let divisors = |key| match given.reals(key, 1e-6..=1e9)? {
        Some(list) if list.len() == dim / 2 => Ok(list),
        Some(list) => Err(ModelError::key(
            given.path(),
            key,
            format!("{} numbers", list.len()),
            format!("{}, one for each two of the {dim} elements of a head that are turned", dim / 2),
        )),
        None => Err(given.wrong(key, "a list of numbers")),
    };
    let (short, long) = (divisors("short_factor")?, divisors("long_factor")?);
    let factor = match given.real("factor", 1e-3..=1e6)? {
        Some(factor) => factor,
        None => max_position_embeddings as f64 / original as f64,
    };
    let attention_factor = match given.real("attention_factor", 1e-3..=1e3)? {
        Some(factor) => factor,
        None if factor <= 1.0 || original == 1 => 1.0,
        None => (1.0 + factor.ln() / (original as f64).ln()).sqrt(),
    };
    Ok(RopeScaling::LongRope { short, long, attention_factor, original_max_position_embeddings: original })
}

/// YaRN, where the first training's context was `original`.
fn yarn(given: &Fields<'_>, original: usize, max_position_embeddings: usize) -> Result<RopeScaling, ModelError> {
    const TURNS: std::ops::RangeInclusive<f64> = 1e-6..=1e6;
    let factor = match given.real("factor", 1.0..=1e6)? {
        Some(factor) => factor,
        None => (max_position_embeddings as f64 / original as f64).max(1.0),
    };
    let beta_fast = given.real("beta_fast", TURNS)?.unwrap_or(32.0);
    let beta_slow = given.real("beta_slow", TURNS)?.unwrap_or(1.0);
    if beta_fast < beta_slow {
        return Err(given.wrong("beta_fast", format!("at least beta_slow, {beta_slow}")));
    }
    // By how much, a file may say for the scores or for all.
    let of = |weight| yarn_factor(weight, factor);
    let (mscale, of_all) = (given.real("mscale", YARN_WEIGHTS)?, given.real("mscale_all_dim", YARN_WEIGHTS)?);
    let attention_factor = match given.real("attention_factor", 1e-3..=1e3)? {
        Some(factor) => factor,
        None => match (mscale.unwrap_or(0.0), of_all.unwrap_or(0.0)) {
            (mscale, of_all) if mscale > 0.0 && of_all > 0.0 => of(mscale) / of(of_all),
            _ => of(1.0),
        },
    };
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast,
        beta_slow,
        truncate: given.flag("truncate")?.unwrap_or(true),
        attention_factor,
        original_max_position_embeddings: original,
    })
}

const YARN_WEIGHTS: std::ops::RangeInclusive<f64> = 0.0..=1e3;

/// How much sharper attention is where frequencies are divided by `factor`, at least 1: 1 or more, as the paper has it.
fn yarn_factor(weight: f64, factor: f64) -> f64 {
    0.1 * weight * factor.ln() + 1.0
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::{decoder_of, llama, with};
    use super::*;

    /// Figures computed from the paper's formulas, in f64, by other means.
    #[test]
    fn yarn_divides_what_turns_seldom() {
        let near = |found: &[f32], expected: &[f64]| {
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(expected) {
                assert!((f64::from(*found) / expected - 1.0).abs() < 1e-5, "{found}, expected {expected}");
            }
        };
        // As Qwen3's files ask for it, beside the number of positions from before.
        let scaling = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768});
        let change = json!({"rope_scaling": scaling, "rope_theta": 1e6, "max_position_embeddings": 40960});
        let config = decoder_of(&with(llama(), &change));
        assert_eq!(config.max_position_embeddings, 131_072);
        let all = config.ropes[0].inverse_frequencies(128, 4096);
        let (kept, expected) = (
            [0, 23, 24, 30, 39, 40, 41, 63],
            [
                1.0,
                6.978_305_848_598_663e-3,
                5.375_321_490_790_102e-3,
                1.064_360_981_247_001_7e-3,
                6.490_394_320_837_028e-5,
                4.445_698_525_097_307e-5,
                3.582_531_425_592_407e-5,
                3.102_344_401_879_299e-7,
            ],
        );
        near(&kept.map(|i| all[i]), &expected);
        assert!((config.ropes[0].factor() - 1.138_629_436_111_989).abs() < 1e-12);

        let scaling = json!({"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "truncate": false,
                             "mscale": 1.0, "mscale_all_dim": 1.0});
        let rope = decoder_of(&with(llama(), &json!({"rope_scaling": scaling, "rope_theta": 1e4}))).ropes[0].clone();
        let expected = [
            1.0,
            0.514_909_984_348_849,
            0.243_596_404_813_701_07,
            0.111_139_816_138_681_29,
            0.047_965_076_075_703_68,
            0.018_799_993_111_229_703,
            0.005_976_137_225_861_21,
            0.002_222_849_262_548_653_7,
            0.001_25,
            0.000_702_926_656_487_936_4,
        ];
        near(&rope.inverse_frequencies(32, 4096)[..10], &expected);
        assert_eq!(rope.factor(), 1.0);
        // No factor: what the file's numbers of positions say.
        let scaling = json!({"type": "yarn", "original_max_position_embeddings": 1024, "attention_factor": 1.5});
        let rope = decoder_of(&with(llama(), &json!({"rope_scaling": scaling, "max_position_embeddings": 4096}))).ropes
            [0]
        .clone();
        assert!(matches!(rope.scaling, RopeScaling::Yarn { factor: 4.0, beta_fast: 32.0, beta_slow: 1.0, .. }));
        assert_eq!(rope.factor(), 1.5);
    }

    /// Values made with every operation rounded to f32 by a program of its own.
    #[test]
    fn inverse_frequencies_are_those_of_the_reference() {
        let plain = Rope { theta: 1e6, scaling: RopeScaling::Default }.inverse_frequencies(128, 4096);
        assert_eq!(plain.len(), 64);
        for (i, expected) in [(0, 1.0), (1, 0.805_842_2), (31, 0.001_240_937_9), (63, 1.240_937_8e-6)] {
            assert_close(plain[i], expected);
        }
        let linear = Rope { theta: 1e6, scaling: RopeScaling::Linear { factor: 4.0 } }.inverse_frequencies(128, 4096);
        assert!(plain.iter().zip(&linear).all(|(a, b)| a / 4.0 == *b));

        let scaling = RopeScaling::Llama3 {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        let llama = Rope { theta: 500_000.0, scaling }.inverse_frequencies(64, 4096);
        for (i, expected) in [
            (0, 1.0),
            (1, 0.663_601_3),
            (14, 0.003_211_446),
            (15, 0.001_290_548),
            (16, 0.000_429_556_7),
            (17, 9.708_286e-5),
            (18, 1.946_163_9e-5),
            (31, 9.418_306e-8),
        ] {
            assert_close(llama[i], expected);
        }
    }

    /// Values of `transformers` 5.24, for the fixture.
    #[test]
    fn longrope_goes_by_the_context() {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-phi3");
        let file = crate::model::json::read_value(&dir.join("config.json")).expect("JSON");
        let config = decoder_of(&file);
        assert_eq!((config.heads[0].dim, config.heads[0].rotary_dim), (32, 24));
        let of = |context| config.ropes[0].inverse_frequencies(config.heads[0].rotary_dim, context);
        let expected =
            [(8, [0.455_057_74, 0.209_168_42, 0.000_143_628_95]), (9, [0.421_962_6, 0.165_725_74, 7.181_448e-6])];
        for (context, expected) in expected {
            let found = of(context);
            assert_eq!((found.len(), found[0]), (12, 1.0));
            [1, 2, 11].into_iter().zip(expected).for_each(|(i, expected)| assert_close(found[i], expected));
        }
        assert!((config.ropes[0].factor() - 3f64.sqrt()).abs() < 1e-12, "the root of 1 + ln(64) / ln(8)");
        // By its older name and keys; as plain as the older ones are; what is wrong.
        let scaling = |change: &serde_json::Value| {
            let scaling = with(file["rope_parameters"].clone(), &json!({"rope_type": null, "type": "su"}));
            with(file.clone(), &json!({"rope_parameters": null, "rope_scaling": with(scaling, change)}))
        };
        assert_eq!(decoder_of(&scaling(&json!({}))), config);
        let plain = decoder_of(&with(file.clone(), &json!({"rope_parameters": null, "partial_rotary_factor": null})));
        assert_eq!((&plain.ropes[0].scaling, plain.heads[0].rotary_dim), (&RopeScaling::Default, 32));
        for (change, expected) in [
            (json!({"short_factor": [1, 2]}), "short_factor: 2 numbers, expected 12, one for each two of the 24"),
            (json!({"long_factor": null}), "long_factor: missing, expected a list of numbers"),
            (json!({"long_factor": vec![0; 12]}), "long_factor"),
            (json!({"partial_rotary_factor": 0.02}), "partial_rotary_factor: 0.02, expected an even number"),
        ] {
            let message = crate::model::ModelConfig::from_value(std::path::Path::new("config.json"), &scaling(&change));
            let message = message.expect_err(expected).to_string();
            assert!(message.contains(expected), "{message}");
        }
        let llama = with(llama(), &json!({"partial_rotary_factor": 0.5}));
        let message = crate::model::ModelConfig::from_value(std::path::Path::new("config.json"), &llama);
        assert!(message.expect_err("a part").to_string().contains("the whole head is turned"));
    }

    fn assert_close(given: f32, expected: f32) {
        assert!((given - expected).abs() <= 2e-7 * expected, "{given:e}, expected {expected:e}");
    }
}
