//! Names and shapes of a checkpoint's tensors, as the published models of each architecture have them.
//!
//! A list, in the order of the forward pass; what each tensor is for decides how `synth` fills it.

use std::collections::{HashMap, HashSet};

use perpetua_shared::DType;

use super::config::{
    Architecture, AttentionGate, BertConfig, DecoderConfig, DeltaRule, Experts, Heads, Latent, LayerInputs, Mixer,
    ModelConfig, ModernBertConfig, Norms, QkNorm, SharedExpert, StateSpace,
};
use super::{fp8, remade};

/// What a tensor is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Role {
    /// A table of vectors, one per row.
    Embedding,
    /// `[out, in]`: a matrix that is multiplied with.
    Linear,
    /// The same of all heads, one after the other: of latent attention, whose rows may be short.
    OfHeads,
    /// `[vocab, hidden]`: the matrix whose products are logits, be it the embedding table too.
    Head,
    /// Added after a matrix.
    Bias,
    /// The factors of a norm.
    Norm,
    /// The same, each less one.
    NormLessOne,
    /// The factors of the norm before the head, of a network that divides its logits: it reads each divided by that
    /// number.
    DividedNorm,
    /// The factors of a norm that the network reads each times a number of the configuration's: the router's, over the
    /// root of a row's elements, and that of [layers' inputs](super::config::LayerInputs), over the root of 2.
    ScaledNorm,
    /// `[1]`, or a number an expert: what something is multiplied with.
    Scale,
    /// `[experts, hidden]`: the matrix whose products say to which experts a row goes, or how much one counts; or how
    /// much of a state stays, and is corrected.
    Router,
    /// `[experts]`: what is added to the sigmoids by which experts are chosen.
    Correction,
    /// `[columns, 1, taps]`: the filters of a convolution, one for each column.
    Filter,
    /// The logarithms of how fast states are forgotten.
    Decay,
    /// A [`Role::Linear`] in MXFP4, which stays so.
    Mxfp4,
    /// In files: its elements, two a byte.
    Blocks,
    /// In files: the powers of two that its blocks share, a byte each.
    BlockScales,
}

impl Role {
    /// Whether the network reads something else than the checkpoint has, made of it: see `factors`.
    pub(super) fn is_made(self) -> bool {
        matches!(self, Role::NormLessOne | Role::DividedNorm | Role::ScaledNorm)
    }

    /// Whether it may be in fewer bits. A router may not: a choice is easily another, and its bytes are few.
    pub(super) fn is_matrix(self) -> bool {
        matches!(self, Role::Linear | Role::OfHeads | Role::Embedding | Role::Head)
    }
}

/// One tensor a checkpoint must hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name in the file.
    pub name: String,
    /// Its shape, outermost first; matrices are `[out, in]`.
    pub shape: Vec<usize>,
    /// What it is for.
    pub role: Role,
}

impl TensorSpec {
    fn new(name: String, shape: Vec<usize>, role: Role) -> TensorSpec {
        TensorSpec { name, shape, role }
    }

    /// Elements.
    pub fn len_elems(&self) -> u64 {
        self.shape.iter().map(|&dim| dim as u64).product()
    }

    /// Bytes in a file whose floats are of 16 bits.
    pub(super) fn bytes_in_bf16(&self) -> u64 {
        self.len_elems() * if self.is_of_bytes() { 1 } else { 2 }
    }

    /// Whether its elements are bytes.
    pub(super) fn is_of_bytes(&self) -> bool {
        matches!(self.role, Role::Blocks | Role::BlockScales)
    }
}

/// What stands before the names of an encoder's tensors where it was saved with a head on top.
pub(super) const ENCODERS: [&str; 2] = ["bert.", "roberta."];

/// What is called otherwise in the layers of some decoders, and their last norm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecoderNames {
    /// The norms before attention, or what stands in its place, and before the MLP.
    pub(crate) before: [&'static str; 2],
    /// Those behind each.
    pub(crate) after: [&'static str; 2],
    /// The linear layer behind attention.
    pub(crate) attention_output: &'static str,
    /// What is normalised of queries and keys.
    pub(crate) qk_norms: [&'static str; 2],
    /// The norm before the head.
    pub(crate) last_norm: &'static str,
}

impl DecoderNames {
    /// Those of `architecture`.
    pub(crate) fn of(architecture: Architecture) -> DecoderNames {
        let usual = DecoderNames {
            before: ["input_layernorm", "post_attention_layernorm"],
            after: ["post_attention_layernorm", "post_feedforward_layernorm"],
            attention_output: "self_attn.o_proj",
            qk_norms: ["self_attn.q_norm", "self_attn.k_norm"],
            last_norm: "model.norm",
        };
        match architecture {
            Architecture::Lfm2 | Architecture::Lfm2Moe => DecoderNames {
                before: ["operator_norm", "ffn_norm"],
                attention_output: "self_attn.out_proj",
                qk_norms: ["self_attn.q_layernorm", "self_attn.k_layernorm"],
                last_norm: "model.embedding_norm",
                ..usual
            },
            Architecture::Lfm3 => DecoderNames {
                before: ["operator_norm", "ffn_norm"],
                after: ["post_operator_norm", "post_ffn_norm"],
                last_norm: "model.embedding_norm",
                ..usual
            },
            Architecture::Gemma3 | Architecture::Gemma4 | Architecture::Gemma4Unified => {
                DecoderNames { before: ["input_layernorm", "pre_feedforward_layernorm"], ..usual }
            }
            Architecture::Afmoe => DecoderNames {
                before: ["input_layernorm", "pre_mlp_layernorm"],
                after: ["post_attention_layernorm", "post_mlp_layernorm"],
                ..usual
            },
            Architecture::HunyuanDense | Architecture::HunyuanMoe => {
                DecoderNames { qk_norms: ["self_attn.query_layernorm", "self_attn.key_layernorm"], ..usual }
            }
            Architecture::Glm4 => DecoderNames { after: ["post_self_attn_layernorm", "post_mlp_layernorm"], ..usual },
            _ => usual,
        }
    }
}

/// The sinks of query heads, in a layer.
pub(crate) const SINKS: &str = "self_attn.sinks";

/// The matrix of attention's gate, in a layer, where it has one of its own.
pub(crate) const GATE: &str = "self_attn.gate_proj";

/// How many elements of a gate it makes in layer `layer`, if there is one.
pub(crate) fn gate_of(c: &DecoderConfig, layer: usize) -> Option<usize> {
    match c.gate? {
        AttentionGate::BesideQueries => None,
        AttentionGate::Elements => Some(c.n_heads * c.heads[layer].dim),
        AttentionGate::Heads => Some(c.n_heads),
    }
}

/// What Gemma 4 has beside Gemma 3's tensors, in a layer; the norms of what experts take, and of what these and the MLP
/// beside them make.
pub(crate) mod gemma4 {
    pub(crate) const LAYER_SCALE: &str = "layer_scalar";
    pub(crate) const INPUT_GATE: &str = "per_layer_input_gate";
    pub(crate) const INPUT_PROJECTION: &str = "per_layer_projection";
    pub(crate) const INPUT_NORM: &str = "post_per_layer_input_norm";
    pub(crate) const BEFORE_EXPERTS: &str = "pre_feedforward_layernorm_2";
    pub(crate) const BEHIND_MLP: &str = "post_feedforward_layernorm_1";
    pub(crate) const BEHIND_EXPERTS: &str = "post_feedforward_layernorm_2";
    /// The factors of the router's norm.
    pub(crate) const ROUTER_SCALE: &str = "router.scale";

    // Of all layers.
    pub(crate) const INPUTS: &str = "model.embed_tokens_per_layer.weight";
    pub(crate) const INPUTS_OF_ROWS: &str = "model.per_layer_model_projection";
    pub(crate) const NORM_OF_ROWS: &str = "model.per_layer_projection_norm.weight";
}

/// What latent attention has, in a layer.
pub(crate) mod latent {
    /// What queries are made of, and its norm.
    pub(crate) const QUERIES_OF: &str = "self_attn.q_a_proj";
    pub(crate) const QUERY_NORM: &str = "self_attn.q_a_layernorm";
    /// What keys and values are made of, with the keys' turned part behind it; and its norm.
    pub(crate) const KEYS_OF: &str = "self_attn.kv_a_proj_with_mqa";
    pub(crate) const KEY_NORM: &str = "self_attn.kv_a_layernorm";

    // What networks read, and what that is made of: queries as they are where they are not made of a latent, else, and
    // of each head first the still rows, then the turned ones; of each head, the key's rows, then the value's.
    pub(crate) const STILL: &str = "self_attn.q_still_proj";
    pub(crate) const TURNED: &str = "self_attn.q_turned_proj";
    pub(crate) const QUERIES: [&str; 2] = ["self_attn.q_proj", "self_attn.q_b_proj"];
    /// Each head's as its columns stand in files.
    pub(crate) const KEYS: &str = "self_attn.kv_b_key_proj";
    pub(crate) const VALUES: &str = "self_attn.kv_b_value_proj";
    pub(crate) const BOTH: &str = "self_attn.kv_b_proj";
}

/// The tensors that latent attention reads in a layer, but for the output's.
fn latent_tensors(c: &DecoderConfig, of: Latent, norm: Role) -> Vec<(String, Vec<usize>, Role)> {
    let Latent { query_rank, rank, still_dim, turned_dim, value_dim, .. } = of;
    let inner = query_rank.unwrap_or(c.hidden_size);
    let mut list = Vec::new();
    let mut add = |name: &str, n: usize, normed: (&str, usize)| {
        list.push((format!("{name}.weight"), vec![n, c.hidden_size], Role::Linear));
        if c.attention_bias {
            list.push((format!("{name}.bias"), vec![n], Role::Bias));
        }
        list.push((format!("{}.weight", normed.0), vec![normed.1], norm));
    };
    if let Some(rank) = query_rank {
        add(latent::QUERIES_OF, rank, (latent::QUERY_NORM, rank));
    }
    add(latent::KEYS_OF, of.cached_dim(), (latent::KEY_NORM, rank));
    let of_heads = [
        (latent::STILL, [still_dim, inner]),
        (latent::TURNED, [turned_dim, inner]),
        (latent::KEYS, [rank, still_dim]),
        (latent::VALUES, [value_dim, rank]),
    ];
    let of_heads = of_heads.map(|(name, [n, k])| (format!("{name}.weight"), vec![c.n_heads * n, k], Role::OfHeads));
    list.extend(of_heads);
    list
}

/// Where files have the matrices of all experts of a layer together: gates and ups, and downs.
pub(super) const EXPERT_STACKS: [&str; 2] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"];

/// The norm behind linear attention, in a layer.
pub(crate) const DELTA_NORM: &str = "linear_attn.norm";

/// What the factors called `name` of a norm of `c` are; those of all layers are alike.
pub(super) fn norm_role(c: &DecoderConfig, name: &str) -> Role {
    let is_last = || name.strip_suffix(".weight") == Some(DecoderNames::of(c.architecture).last_norm);
    if name == gemma4::NORM_OF_ROWS || name.ends_with(gemma4::ROUTER_SCALE) {
        Role::ScaledNorm
    } else if c.logits_divisor != 1.0 && is_last() {
        Role::DividedNorm
    } else if c.architecture.has_norms_less_one() && !name.contains(DELTA_NORM) {
        Role::NormLessOne
    } else {
        Role::Norm
    }
}

/// Every tensor that a network of this configuration reads.
pub fn tensors(config: &ModelConfig) -> Vec<TensorSpec> {
    match config {
        ModelConfig::Decoder(config) => decoder(config),
        ModelConfig::Bert(config) => bert(config),
        ModelConfig::ModernBert(config) => modern_bert(config),
    }
}

/// The types of the tensors that a network of this configuration reads in fewer bits, since files have them so.
pub fn packed(config: &ModelConfig) -> HashMap<String, DType> {
    let packed = tensors(config).into_iter().filter(|spec| spec.role == Role::Mxfp4);
    packed.map(|spec| (spec.name, DType::Mx4)).collect()
}

/// Whether `name` is a tensor that published checkpoints have and a network of this configuration has no use for. A
/// tensor that neither this nor [`tensors`] knows may mean that the network was trained as another than its
/// configuration says.
pub fn is_spare(config: &ModelConfig, name: &str) -> bool {
    match config {
        // A head that is the embeddings once more; older versions of transformers saved what they computed from the
        // configuration.
        ModelConfig::Decoder(config) => {
            // What sees or hears, in a model of which the half that reads is taken, and what that can do without.
            const OTHER_HALVES: [&str; 11] = [
                "vision_tower.",
                "vision_model.",
                "visual.",
                "audio_tower.",
                "embed_vision.",
                "vision_embedder.",
                "embed_audio.",
                "multi_modal_projector.",
                "connector.",
                "image_newline",
                // What guesses a second token.
                "mtp.",
            ];
            let part = name.strip_prefix("model.").unwrap_or(name);
            let scaled = fp8::SCALES.iter().find_map(|scales| name.strip_suffix(scales)).unwrap_or(name);
            config.tie_word_embeddings && ["lm_head.weight", "language_model.lm_head.weight"].contains(&scaled)
                || name.ends_with(".rotary_emb.inv_freq")
                || fp8::SCALES_OF_ACTIVATIONS.iter().any(|scale| name.ends_with(scale))
                || is_beyond_layers(config, part)
                || is_of_shared(config, part)
                || OTHER_HALVES.iter().any(|other| part.starts_with(other))
        }
        // Positions counted from 0, and what stands on top of the encoder.
        ModelConfig::Bert(_) => {
            let name = ENCODERS.iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name);
            name == "embeddings.position_ids"
                || ["pooler.", "cls.", "lm_head.", "classifier.", "qa_outputs."]
                    .iter()
                    .any(|head| name.starts_with(head))
        }
        ModelConfig::ModernBert(_) => ["head.", "decoder.", "classifier."].iter().any(|head| name.starts_with(head)),
    }
}

/// Whether `name` is of a layer behind all others, which guesses a second token, in a network that is published with
/// one.
fn is_beyond_layers(config: &DecoderConfig, name: &str) -> bool {
    let layer = name.strip_prefix("layers.").and_then(|name| name.split('.').next()?.parse::<usize>().ok());
    let has_one = [Architecture::Glm4Moe, Architecture::Glm4MoeLite, Architecture::DeepseekV3];
    has_one.contains(&config.architecture) && layer.is_some_and(|layer| layer >= config.n_layers)
}

/// Whether `name` is of the keys and values of a layer that has none of its own.
fn is_of_shared(config: &DecoderConfig, name: &str) -> bool {
    let of_layer = || {
        let name = name.strip_prefix("language_model.").unwrap_or(name);
        let (layer, part) = name.strip_prefix("layers.")?.split_once(".self_attn.")?;
        Some((config.heads.get(layer.parse::<usize>().ok()?)?, part))
    };
    of_layer().is_some_and(|(heads, part)| {
        heads.cache_of.is_some() && ["k_proj.", "v_proj.", "k_norm.", "v_norm."].iter().any(|of| part.starts_with(of))
    })
}

/// What the matrices of an MLP are called, in a layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MlpNames {
    /// Gate, up and down.
    pub(crate) parts: [&'static str; 3],
    /// What checkpoints have in the place of gate and up: `[2 * intermediate, hidden]`, the gate's rows first.
    pub(crate) fused: Option<&'static str>,
}

impl MlpNames {
    const GRANITE: MlpNames = MlpNames {
        parts: ["shared_mlp.gate_proj", "shared_mlp.up_proj", "shared_mlp.output_linear"],
        fused: Some("shared_mlp.input_linear"),
    };

    /// Those of the one MLP of a layer of `architecture`.
    pub(crate) fn of(architecture: Architecture) -> MlpNames {
        let usual = MlpNames { parts: ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"], fused: None };
        match architecture {
            Architecture::Phi3 | Architecture::Glm | Architecture::Glm4 => {
                MlpNames { fused: Some("mlp.gate_up_proj"), ..usual }
            }
            Architecture::GraniteMoeHybrid => MlpNames::GRANITE,
            Architecture::Lfm2 | Architecture::Lfm2Moe | Architecture::Lfm3 => {
                MlpNames { parts: ["feed_forward.w1", "feed_forward.w3", "feed_forward.w2"], ..usual }
            }
            _ => usual,
        }
    }

    /// Those of the MLP beside experts that all rows go to.
    pub(crate) fn shared(architecture: Architecture) -> MlpNames {
        match architecture {
            Architecture::GraniteMoeShared | Architecture::GraniteMoeHybrid | Architecture::GraniteMoeSwa => {
                MlpNames::GRANITE
            }
            Architecture::HunyuanMoe => MlpNames {
                parts: ["mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj", "mlp.shared_mlp.down_proj"],
                fused: None,
            },
            Architecture::Glm4Moe
            | Architecture::DeepseekV2
            | Architecture::DeepseekV3
            | Architecture::Glm4MoeLite
            | Architecture::Mistral4
            | Architecture::SolarOpen
            | Architecture::ExaoneMoe
            | Architecture::Dots1
            | Architecture::Afmoe => MlpNames {
                parts: ["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"],
                fused: None,
            },
            _ => MlpNames {
                parts: ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"],
                fused: None,
            },
        }
    }

    /// The matrix `[1, hidden]` whose product says how much a shared expert counts.
    pub(crate) const WEIGHED_BY: &'static str = "mlp.shared_expert_gate";

    /// What all their names begin with.
    pub(crate) fn prefix(&self) -> &'static str {
        self.parts[0].strip_suffix(".gate_proj").unwrap_or(self.parts[0])
    }

    /// The matrices of an MLP of `intermediate` elements between rows of `hidden`: their names, their rows and their
    /// columns.
    fn matrices(&self, hidden: usize, intermediate: usize) -> Vec<(&'static str, usize, usize)> {
        let [gate, up, down] = self.parts;
        let mut matrices = match self.fused {
            Some(fused) => vec![(fused, 2 * intermediate, hidden)],
            None => vec![(gate, intermediate, hidden), (up, intermediate, hidden)],
        };
        matrices.push((down, hidden, intermediate));
        matrices
    }
}

/// What the tensors of a mixture of experts are called, in a layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertNames {
    /// The matrix of the logits.
    pub(crate) router: &'static str,
    /// What is added to their sigmoids, where experts are chosen by these; or what they are multiplied with.
    pub(crate) correction: &'static str,
    /// The experts, of which each has its number after this.
    experts: &'static str,
    /// Gate, up and down, in an expert.
    parts: [&'static str; 3],
    /// What checkpoints have in place of the experts' matrices: `[experts, 2 * intermediate, hidden]`, gates before ups
    /// in each, and `[experts, hidden, intermediate]`.
    stacks: Option<[&'static str; 2]>,
    /// Whether some have the matrices themselves.
    may_be_apart: bool,
}

/// A tensor of a checkpoint that is several, one after the other: see [`Weights::take_apart`](super::weights::Weights).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stack {
    pub(super) name: String,
    /// Whether a checkpoint may have its parts instead.
    pub(super) may_be_apart: bool,
    pub(super) shape: Vec<usize>,
    /// Their names, and the shape of each.
    pub(super) parts: Vec<String>,
    pub(super) part_shape: [usize; 2],
}

/// The stacks that a checkpoint of this configuration has, layer by layer.
pub(super) fn stacks(config: &ModelConfig) -> Vec<Stack> {
    let ModelConfig::Decoder(c) = config else { return Vec::new() };
    let names = ExpertNames::of(c.architecture);
    let (Some(stacks), Some(experts)) = (names.stacks, &c.experts) else { return Vec::new() };
    let (opens, closes) = ([experts.intermediate_size, c.hidden_size], [c.hidden_size, experts.intermediate_size]);
    let of_layer = |layer: usize| {
        let prefix = format!("model.layers.{layer}");
        let stack = |(stack, parts, [rows, columns]): (&str, &[usize], [usize; 2])| {
            let of_expert = |number| parts.iter().map(move |part| (*part, number));
            let matrices = (0..experts.n).flat_map(of_expert);
            Stack {
                name: format!("{prefix}.{stack}"),
                may_be_apart: names.may_be_apart,
                shape: vec![experts.n, parts.len() * rows, columns],
                parts: matrices.map(|(part, number)| names.matrix(part, &prefix, number)).collect(),
                part_shape: [rows, columns],
            }
        };
        [(stacks[0], &[0, 1][..], opens), (stacks[1], &[2], closes)].map(stack)
    };
    (0..c.n_layers).filter(|layer| experts.layers[*layer]).flat_map(of_layer).collect()
}

/// [`tensors`], as files have them: stacks in the place of their parts, and behind all others what tensors are
/// [made](remade) of.
pub(super) fn tensors_of_files(config: &ModelConfig) -> Vec<TensorSpec> {
    let made: HashSet<String> = remade::of(config).into_iter().map(|remade| remade.name).collect();
    let stacks = stacks(config);
    let mut stack_of: HashMap<&str, &Stack> = HashMap::new();
    stacks.iter().for_each(|stack| stack_of.extend(stack.parts.iter().map(|part| (part.as_str(), stack))));
    let in_file = |spec: TensorSpec| match stack_of.get(spec.name.as_str()) {
        None => Some(spec),
        Some(stack) if stack.parts[0] == spec.name => {
            Some(TensorSpec { name: stack.name.clone(), shape: stack.shape.clone(), ..spec })
        }
        Some(_) => None,
    };
    let others = tensors(config).into_iter().filter(|spec| !made.contains(&spec.name)).filter_map(in_file);
    others.chain(remade::files(config)).collect()
}

impl ExpertNames {
    /// Those of `architecture`.
    pub(crate) fn of(architecture: Architecture) -> ExpertNames {
        let (usual, short) = (["gate_proj", "up_proj", "down_proj"], ["w1", "w3", "w2"]);
        let (router, experts, parts, stacks) = match architecture {
            Architecture::Mixtral | Architecture::MiniMaxM2 => {
                ("block_sparse_moe.gate", "block_sparse_moe.experts", short, None)
            }
            Architecture::Lfm2Moe => ("feed_forward.gate", "feed_forward.experts", short, None),
            Architecture::GraniteMoe | Architecture::GraniteMoeShared | Architecture::GraniteMoeHybrid => {
                let stacks = ["block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"];
                ("block_sparse_moe.router.layer", "block_sparse_moe.experts", usual, Some(stacks))
            }
            Architecture::GraniteMoeSwa => {
                let stacks = ["block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"];
                ("block_sparse_moe.router", "block_sparse_moe.experts", usual, Some(stacks))
            }
            Architecture::GptOss => ("mlp.router", "mlp.experts", usual, None),
            Architecture::HunyuanMoe => ("mlp.gate.wg", "mlp.experts", usual, None),
            Architecture::Afmoe => ("mlp.router.gate", "mlp.experts", usual, None),
            Architecture::Qwen35Moe | Architecture::Mistral4 => ("mlp.gate", "mlp.experts", usual, Some(EXPERT_STACKS)),
            Architecture::Gemma4 => {
                ("router.proj", "experts", usual, Some(["experts.gate_up_proj", "experts.down_proj"]))
            }
            _ => ("mlp.gate", "mlp.experts", usual, None),
        };
        let correction = match architecture {
            Architecture::Lfm2Moe => "feed_forward.expert_bias",
            Architecture::MiniMaxM2 => "block_sparse_moe.e_score_correction_bias",
            Architecture::ExaoneMoe => "mlp.e_score_correction_bias",
            Architecture::Afmoe => "mlp.expert_bias",
            Architecture::Gemma4 => "router.per_expert_scale",
            _ => "mlp.gate.e_score_correction_bias",
        };
        let may_be_apart = matches!(architecture, Architecture::Qwen35Moe | Architecture::Mistral4);
        ExpertNames { router, correction, experts, parts, stacks, may_be_apart }
    }

    /// Matrix `part` (0: gate, 1: up, 2: down) of expert `number` of `layer`; of all, where the number is `*`.
    pub(crate) fn matrix(&self, part: usize, layer: &str, number: impl std::fmt::Display) -> String {
        format!("{layer}.{}.{number}.{}.weight", self.experts, self.parts[part])
    }
}

fn decoder(c: &DecoderConfig) -> Vec<TensorSpec> {
    let mut list = Vec::new();
    let mut add = |name: String, shape: Vec<usize>, role| list.push(TensorSpec::new(name, shape, role));

    let norm = norm_role(c, "model.layers.*");
    let names = DecoderNames::of(c.architecture);
    let embedding = if c.tie_word_embeddings { Role::Head } else { Role::Embedding };
    add("model.embed_tokens.weight".into(), vec![c.vocab_size, c.hidden_size], embedding);
    if let Some(LayerInputs { vocab_size, dim }) = c.layer_inputs {
        add(gemma4::INPUTS.into(), vec![vocab_size, c.n_layers * dim], Role::Embedding);
        add(format!("{}.weight", gemma4::INPUTS_OF_ROWS), vec![c.n_layers * dim, c.hidden_size], Role::Linear);
        add(gemma4::NORM_OF_ROWS.into(), vec![dim], Role::ScaledNorm);
    }
    for i in 0..c.n_layers {
        let layer = format!("model.layers.{i}");
        let Heads { n_kv, dim, values_are_keys, cache_of, .. } = c.heads[i];
        let (q_dim, kv_dim) = (c.n_heads * dim, n_kv * dim);
        if c.architecture.norms() != Norms::After {
            add(format!("{layer}.{}.weight", names.before[0]), vec![c.hidden_size], norm);
        }
        let experts = c.experts_of(i);
        let mixer = c.mixer_of(i);
        let q_out = q_dim * c.of_query();
        let projections: &[_] = match (mixer, c.architecture.is_fused()) {
            (Some(_), _) => &[],
            _ if c.latent.is_some() => &[],
            (None, true) => &[("self_attn.qkv_proj", q_out + 2 * kv_dim)],
            (None, false) => &[("self_attn.q_proj", q_out), ("self_attn.k_proj", kv_dim), ("self_attn.v_proj", kv_dim)],
        };
        // Some layers have no keys of their own, some no matrix of values.
        let n_own = match (cache_of, values_are_keys) {
            (Some(_), _) => 1,
            (None, true) => 2,
            (None, false) => 3,
        };
        let projections =
            projections.iter().take(n_own).map(|(name, out)| (*name, *out, c.hidden_size, c.attention_bias));
        let output = (names.attention_output, c.hidden_size, q_dim, c.output_bias);
        let output = mixer.is_none().then_some(output);
        for (part, shape, role) in mixer.map_or(Vec::new(), |mixer| mixer_tensors(mixer, c.hidden_size)) {
            add(format!("{layer}.{part}"), shape, role);
        }
        for (part, shape, role) in c.latent.into_iter().flat_map(|of| latent_tensors(c, of, norm)) {
            add(format!("{layer}.{part}"), shape, role);
        }
        let mlp = match experts {
            None | Some(Experts { stands_beside: true, .. }) => {
                MlpNames::of(c.architecture).matrices(c.hidden_size, c.intermediate_of(i))
            }
            Some(Experts { shared: Some(shared), .. }) => {
                MlpNames::shared(c.architecture).matrices(c.hidden_size, shared.intermediate_size)
            }
            Some(_) => Vec::new(),
        };
        let mlp = mlp.into_iter().map(|(name, out, inner)| (name, out, inner, c.mlp_bias));
        for (part, out, inner, bias) in projections.chain(output).chain(mlp) {
            add(format!("{layer}.{part}.weight"), vec![out, inner], Role::Linear);
            if bias {
                add(format!("{layer}.{part}.bias"), vec![out], Role::Bias);
            }
        }
        if let (Some(gate), None) = (gate_of(c, i), mixer) {
            add(format!("{layer}.{GATE}.weight"), vec![gate, c.hidden_size], Role::Linear);
        }
        if c.has_sinks {
            add(format!("{layer}.{SINKS}"), vec![c.n_heads], Role::Bias);
        }
        if let Some(Experts { n, intermediate_size, shared, limited, is_mxfp4, sigmoids, stands_beside, .. }) = experts
        {
            let names = ExpertNames::of(c.architecture);
            add(format!("{layer}.{}.weight", names.router), vec![*n, c.hidden_size], Role::Router);
            if limited.is_some() {
                add(format!("{layer}.{}.bias", names.router), vec![*n], Role::Bias);
                for (bias, of) in
                    remade::BIASES.into_iter().zip([*intermediate_size, *intermediate_size, c.hidden_size])
                {
                    add(format!("{layer}.{bias}"), vec![*n, of], Role::Bias);
                }
            }
            if sigmoids.is_some_and(|sigmoids| sigmoids.are_corrected) {
                add(format!("{layer}.{}", names.correction), vec![*n], Role::Correction);
            }
            if *stands_beside {
                add(format!("{layer}.{}", gemma4::ROUTER_SCALE), vec![c.hidden_size], Role::ScaledNorm);
                add(format!("{layer}.{}", names.correction), vec![*n], Role::Scale);
                for which in [gemma4::BEFORE_EXPERTS, gemma4::BEHIND_MLP, gemma4::BEHIND_EXPERTS] {
                    add(format!("{layer}.{which}.weight"), vec![c.hidden_size], norm);
                }
            }
            if shared.is_some_and(|SharedExpert { is_weighed, .. }| is_weighed) {
                add(format!("{layer}.{}.weight", MlpNames::WEIGHED_BY), vec![1, c.hidden_size], Role::Router);
            }
            let (up, down) = (vec![*intermediate_size, c.hidden_size], vec![c.hidden_size, *intermediate_size]);
            for number in 0..*n {
                for (part, shape) in [&up, &up, &down].into_iter().enumerate() {
                    let role = if *is_mxfp4 { Role::Mxfp4 } else { Role::Linear };
                    add(names.matrix(part, &layer, number), shape.clone(), role);
                }
            }
        }
        let normed = match c.qk_norm {
            QkNorm::None => None,
            QkNorm::Heads => Some([dim; 2]),
            QkNorm::Rows => Some([q_dim, kv_dim]),
        };
        let normed = normed.filter(|_| mixer.is_none());
        let n_normed = if cache_of.is_some() { 1 } else { 2 };
        for (which, n) in names.qk_norms.into_iter().zip(normed.into_iter().flatten()).take(n_normed) {
            add(format!("{layer}.{which}.weight"), vec![n], norm);
        }
        let more: &[&str] = match c.architecture.norms() {
            Norms::Before => &names.before[1..],
            Norms::Around => &[names.after[0], names.before[1], names.after[1]],
            Norms::After => &names.after,
        };
        for which in more {
            add(format!("{layer}.{which}.weight"), vec![c.hidden_size], norm);
        }
        if let Some(LayerInputs { dim, .. }) = c.layer_inputs {
            add(format!("{layer}.{}.weight", gemma4::INPUT_GATE), vec![dim, c.hidden_size], Role::Linear);
            add(format!("{layer}.{}.weight", gemma4::INPUT_PROJECTION), vec![c.hidden_size, dim], Role::Linear);
            add(format!("{layer}.{}.weight", gemma4::INPUT_NORM), vec![c.hidden_size], norm);
        }
        if c.scales_layers {
            add(format!("{layer}.{}", gemma4::LAYER_SCALE), vec![1], Role::Scale);
        }
    }
    let last_norm = format!("{}.weight", names.last_norm);
    let role = norm_role(c, &last_norm);
    add(last_norm, vec![c.hidden_size], role);
    if !c.tie_word_embeddings {
        add("lm_head.weight".into(), vec![c.vocab_size, c.hidden_size], Role::Head);
    }
    list
}

/// The tensors of a layer's mixer, in a layer of `hidden` elements.
fn mixer_tensors(mixer: Mixer, hidden: usize) -> Vec<(&'static str, Vec<usize>, Role)> {
    match mixer {
        Mixer::DeltaRule(DeltaRule { key_heads, value_heads, key_dim, value_dim, taps }) => {
            let values = value_heads * value_dim;
            let mixed = 2 * key_heads * key_dim + values;
            vec![
                ("linear_attn.in_proj_qkv.weight", vec![mixed, hidden], Role::Linear),
                ("linear_attn.in_proj_z.weight", vec![values, hidden], Role::Linear),
                ("linear_attn.in_proj_b.weight", vec![value_heads, hidden], Role::Router),
                ("linear_attn.in_proj_a.weight", vec![value_heads, hidden], Role::Router),
                ("linear_attn.conv1d.weight", vec![mixed, 1, taps], Role::Filter),
                ("linear_attn.A_log", vec![value_heads], Role::Decay),
                ("linear_attn.dt_bias", vec![value_heads], Role::Bias),
                ("linear_attn.norm.weight", vec![value_dim], Role::Norm),
                ("linear_attn.out_proj.weight", vec![hidden, values], Role::Linear),
            ]
        }
        Mixer::StateSpace(StateSpace { heads, head_dim, state_dim, taps, conv_bias, linear_bias, .. }) => {
            let inner = heads * head_dim;
            let mixed = inner + 2 * state_dim;
            let all = inner + mixed + heads;
            let mut tensors = vec![
                ("mamba.in_proj.weight", vec![all, hidden], Role::Linear),
                ("mamba.conv1d.weight", vec![mixed, 1, taps], Role::Filter),
                ("mamba.A_log", vec![heads], Role::Decay),
                ("mamba.dt_bias", vec![heads], Role::Bias),
                ("mamba.D", vec![heads], Role::Bias),
                ("mamba.norm.weight", vec![inner], Role::Norm),
                ("mamba.out_proj.weight", vec![hidden, inner], Role::Linear),
            ];
            if conv_bias {
                tensors.push(("mamba.conv1d.bias", vec![mixed], Role::Bias));
            }
            if linear_bias {
                tensors.push(("mamba.in_proj.bias", vec![all], Role::Bias));
                tensors.push(("mamba.out_proj.bias", vec![hidden], Role::Bias));
            }
            tensors
        }
        Mixer::Convolution { taps, has_bias } => {
            let mut tensors = vec![
                ("conv.in_proj.weight", vec![3 * hidden, hidden], Role::Linear),
                ("conv.conv.weight", vec![hidden, 1, taps], Role::Filter),
                ("conv.out_proj.weight", vec![hidden, hidden], Role::Linear),
            ];
            if has_bias {
                tensors.extend([
                    ("conv.in_proj.bias", vec![3 * hidden], Role::Bias),
                    ("conv.conv.bias", vec![hidden], Role::Bias),
                    ("conv.out_proj.bias", vec![hidden], Role::Bias),
                ]);
            }
            tensors
        }
    }
}

fn bert(c: &BertConfig) -> Vec<TensorSpec> {
    let mut list = Vec::new();
    let mut add = |name: String, shape: Vec<usize>, role| list.push(TensorSpec::new(name, shape, role));
    for (table, rows) in [
        ("word_embeddings", c.vocab_size),
        ("position_embeddings", c.max_position_embeddings),
        ("token_type_embeddings", c.type_vocab_size),
    ] {
        add(format!("embeddings.{table}.weight"), vec![rows, c.hidden_size], Role::Embedding);
    }
    add("embeddings.LayerNorm.weight".into(), vec![c.hidden_size], Role::Norm);
    add("embeddings.LayerNorm.bias".into(), vec![c.hidden_size], Role::Bias);
    for i in 0..c.n_layers {
        let layer = format!("encoder.layer.{i}");
        for (part, out, inner) in [
            ("attention.self.query", c.hidden_size, c.hidden_size),
            ("attention.self.key", c.hidden_size, c.hidden_size),
            ("attention.self.value", c.hidden_size, c.hidden_size),
            ("attention.output.dense", c.hidden_size, c.hidden_size),
            ("intermediate.dense", c.intermediate_size, c.hidden_size),
            ("output.dense", c.hidden_size, c.intermediate_size),
        ] {
            add(format!("{layer}.{part}.weight"), vec![out, inner], Role::Linear);
            add(format!("{layer}.{part}.bias"), vec![out], Role::Bias);
        }
        for part in ["attention.output.LayerNorm", "output.LayerNorm"] {
            add(format!("{layer}.{part}.weight"), vec![c.hidden_size], Role::Norm);
            add(format!("{layer}.{part}.bias"), vec![c.hidden_size], Role::Bias);
        }
    }
    list
}

fn modern_bert(c: &ModernBertConfig) -> Vec<TensorSpec> {
    let mut list = Vec::new();
    let mut add = |name: String, shape: Vec<usize>, role| {
        list.push(TensorSpec::new(format!("model.{name}"), shape, role));
    };
    add("embeddings.tok_embeddings.weight".into(), vec![c.vocab_size, c.hidden_size], Role::Embedding);
    let mut parts = vec![("embeddings.norm".to_owned(), c.hidden_size, None, c.norm_bias)];
    for i in 0..c.n_layers {
        let layer = format!("layers.{i}");
        if i > 0 {
            parts.push((format!("{layer}.attn_norm"), c.hidden_size, None, c.norm_bias));
        }
        for (part, out, inner, has_bias) in [
            ("attn.Wqkv", 3 * c.hidden_size, Some(c.hidden_size), c.attention_bias),
            ("attn.Wo", c.hidden_size, Some(c.hidden_size), c.attention_bias),
            ("mlp_norm", c.hidden_size, None, c.norm_bias),
            ("mlp.Wi", 2 * c.intermediate_size, Some(c.hidden_size), c.mlp_bias),
            ("mlp.Wo", c.hidden_size, Some(c.intermediate_size), c.mlp_bias),
        ] {
            parts.push((format!("{layer}.{part}"), out, inner, has_bias));
        }
    }
    parts.push(("final_norm".to_owned(), c.hidden_size, None, c.norm_bias));
    for (name, out, inner, has_bias) in parts {
        let (shape, role) = match inner {
            Some(inner) => (vec![out, inner], Role::Linear),
            None => (vec![out], Role::Norm),
        };
        add(format!("{name}.weight"), shape, role);
        if has_bias {
            add(format!("{name}.bias"), vec![out], Role::Bias);
        }
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::synth::preset_config;
    use serde_json::json;
    use std::path::Path;

    /// What published checkpoints call what is called otherwise than in others, written down by hand: `synth` and
    /// networks have their names from here both.
    #[test]
    fn names_are_those_of_published_checkpoints() {
        for (preset, class, names) in [
            (
                "tiny-glm4-moe",
                "",
                &[
                    "mlp.gate.e_score_correction_bias",
                    "mlp.shared_experts.up_proj.weight",
                    "mlp.experts.6.down_proj.weight",
                ][..],
            ),
            (
                "tiny-glm4-moe",
                "SolarOpenForCausalLM",
                &["mlp.gate.e_score_correction_bias", "mlp.shared_experts.up_proj.weight"],
            ),
            (
                "tiny-glm4-moe",
                "ExaoneMoeForCausalLM",
                &["mlp.e_score_correction_bias", "mlp.shared_experts.gate_proj.weight", "self_attn.q_norm.weight"],
            ),
            (
                "tiny-minimax-m2",
                "",
                &[
                    "block_sparse_moe.e_score_correction_bias",
                    "block_sparse_moe.gate.weight",
                    "block_sparse_moe.experts.7.w2.weight",
                ],
            ),
            (
                "tiny-lfm2-moe",
                "",
                &[
                    "feed_forward.expert_bias",
                    "feed_forward.gate.weight",
                    "feed_forward.experts.0.w3.weight",
                    "ffn_norm.weight",
                ],
            ),
            (
                "tiny-trinity",
                "",
                &[
                    "mlp.router.gate.weight",
                    "mlp.expert_bias",
                    "mlp.shared_experts.down_proj.weight",
                    "pre_mlp_layernorm.weight",
                    "self_attn.gate_proj.weight",
                ],
            ),
            (
                "tiny-granitemoe",
                "GraniteMoeSWAForCausalLM",
                &["block_sparse_moe.router.weight", "block_sparse_moe.experts.gate_up_proj", "self_attn.sinks"],
            ),
            (
                "tiny-glm4",
                "",
                &[
                    "post_self_attn_layernorm.weight",
                    "post_mlp_layernorm.weight",
                    "mlp.gate_up_proj.weight",
                    "self_attn.q_proj.weight",
                ],
            ),
            (
                "tiny-glm4",
                "GlmForCausalLM",
                &["post_attention_layernorm.weight", "mlp.gate_up_proj.weight", "self_attn.k_proj.weight"],
            ),
            ("tiny-ernie4.5", "", &["mlp.gate_proj.weight", "self_attn.q_proj.weight", "self_attn.v_proj.weight"]),
            ("tiny-mixtral", "", &["block_sparse_moe.gate.weight", "block_sparse_moe.experts.0.w1.weight"]),
        ] {
            let mut file = preset_config(preset).expect("a preset");
            if !class.is_empty() {
                file["architectures"] = json!([class]);
            }
            if class.starts_with("Exaone") {
                let keys = file.as_object_mut().expect("keys");
                for (old, new) in [("n_routed_experts", "num_experts"), ("n_shared_experts", "num_shared_experts")] {
                    let value = keys.shift_remove(old).expect("it is there");
                    keys.insert(new.to_owned(), value);
                }
                keys.shift_remove("partial_rotary_factor");
            }
            let config = ModelConfig::from_value(Path::new(preset), &file).expect(preset);
            let all: HashSet<String> = tensors_of_files(&config).into_iter().map(|spec| spec.name).collect();
            for name in names.iter().map(|name| format!("model.layers.1.{name}")) {
                assert!(all.contains(&name), "{preset} {class}: {name} of {all:?}");
            }
        }
        let next =
            ModelConfig::from_value(Path::new(""), &preset_config("tiny-qwen3-next").expect("a preset")).expect("one");
        let all: HashSet<String> = tensors_of_files(&next).into_iter().map(|spec| spec.name).collect();
        for name in ["in_proj_qkvz.weight", "in_proj_ba.weight", "out_proj.weight"] {
            assert!(all.contains(&format!("model.layers.0.linear_attn.{name}")), "{name} of {all:?}");
        }
    }
}
