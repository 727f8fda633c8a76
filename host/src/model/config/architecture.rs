//! The networks there are, and what sets each apart: a row of [`Traits`] for each.

use std::fmt;

use super::Activation;

/// The networks there are, named as in config.json's `architectures`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Architecture {
    /// `Qwen3ForCausalLM`: RMSNorm on each head's query and key.
    Qwen3,
    /// `Qwen3MoeForCausalLM`: Qwen3 whose MLPs are mixtures of experts, all or some.
    Qwen3Moe,
    /// `MellumForCausalLM` (Mellum 2): Qwen3 MoE, some of whose layers have a window, and turn by a base of their own.
    Mellum,
    /// `Qwen2ForCausalLM`: biases on q, k and v. Qwen 2.5 is this too.
    Qwen2,
    /// `Qwen2MoeForCausalLM`: Qwen2 whose MLPs are mixtures of experts, and beside these one that all rows go to.
    Qwen2Moe,
    /// `LlamaForCausalLM`.
    Llama,
    /// `MistralForCausalLM`: Llama with an optional attention window.
    Mistral,
    /// `Ministral3ForCausalLM`: Mistral whose heads have a width of their own. Beyond the context of the first training
    /// it multiplies queries with a number that grows with their position.
    Ministral3,
    /// `MixtralForCausalLM`: Mistral whose MLPs are mixtures of experts.
    Mixtral,
    /// `Gemma3ForCausalLM`, and the text half of `Gemma3ForConditionalGeneration`: norms before and after attention and
    /// MLP, windows in most layers, which turn positions by a base of their own.
    Gemma3,
    /// `Gemma4ForCausalLM`, and the text half of `Gemma4ForConditionalGeneration`: Gemma 3 whose layers without a
    /// window have wider heads, values that may be the keys, and norms on them. The last layers may attend to what
    /// earlier ones have in their caches; each layer may have a vector of each token of its own; beside the MLP there
    /// may be experts; logits may be capped.
    Gemma4,
    /// `Gemma4UnifiedForCausalLM`, and the text half of `Gemma4UnifiedForConditionalGeneration`: the same without
    /// vectors of layers, and without experts.
    Gemma4Unified,
    /// `SmolLM3ForCausalLM`: Llama, some of whose layers do not turn queries and keys.
    SmolLm3,
    /// `GraniteForCausalLM`: Llama with numbers that embeddings, scores, logits and what layers add are multiplied
    /// with.
    Granite,
    /// `GraniteMoeForCausalLM`: Granite whose MLPs are mixtures of experts, the matrices of all of them one tensor.
    GraniteMoe,
    /// `GraniteMoeSharedForCausalLM`: GraniteMoe with an MLP beside the experts that all rows go to.
    GraniteMoeShared,
    /// `GraniteMoeHybridForCausalLM`: the same, or that MLP alone (Granite 4.0's dense models), with RoPE or without;
    /// most layers may have a state space in the place of attention.
    GraniteMoeHybrid,
    /// `GraniteSWAForCausalLM` (Granite Swash): Granite, most of whose layers have a window, and whose heads have
    /// sinks; each layer may turn by a base of its own, or not.
    GraniteSwa,
    /// `GraniteMoeSWAForCausalLM`: the same whose MLPs are mixtures of experts.
    GraniteMoeSwa,
    /// `SeedOssForCausalLM`: Llama with biases on q, k and v.
    SeedOss,
    /// `Phi3ForCausalLM`: Llama whose q, k and v are one matrix, as are gate and up. Phi 4 is this too.
    Phi3,
    /// `Olmo2ForCausalLM`: norms after attention and MLP, and on all queries and all keys of a row.
    Olmo2,
    /// `Olmo3ForCausalLM`: OLMo 2, most of whose layers have a window.
    Olmo3,
    /// `OlmoeForCausalLM`: norms on all queries and all keys of a row, and MLPs that are mixtures of experts.
    Olmoe,
    /// `Qwen3_5ForCausalLM`, and the half of `Qwen3_5ForConditionalGeneration` that reads: most layers have linear
    /// attention, by the gated delta rule; what the others attend to goes through a gate.
    Qwen35,
    /// `Qwen3_5MoeForCausalLM`, and that half of `Qwen3_5MoeForConditionalGeneration`: Qwen3.5 whose MLPs are mixtures
    /// of experts, the matrices of all of them one tensor, and beside these an MLP that all rows go to.
    Qwen35Moe,
    /// `Qwen3NextForCausalLM`, and so Qwen3-Coder-Next: Qwen3.5 MoE, whose files have the matrices of linear attention
    /// by heads.
    Qwen3Next,
    /// `GlmForCausalLM` (GLM 4 of 2024): Llama whose gate and up are one matrix; of each head a part is turned,
    /// neighbours with each other.
    Glm,
    /// `Glm4ForCausalLM` (GLM 4 of 2025): the same with norms before and after attention and MLP.
    Glm4,
    /// `Ernie4_5ForCausalLM`: Llama whose heads are turned neighbours with each other.
    Ernie45,
    /// `Lfm2ForCausalLM`: most layers have a short convolution in the place of attention.
    Lfm2,
    /// `Lfm2MoeForCausalLM`: LFM2 whose MLPs, but for the first layers', are mixtures of experts, chosen by corrected
    /// sigmoids.
    Lfm2Moe,
    /// `Lfm3ForCausalLM`: LFM2 with norms behind attention, convolutions and MLP, too; some of its layers have a
    /// window, and what attention makes goes through a gate a head.
    Lfm3,
    /// `Glm4MoeForCausalLM` (GLM 4.5 to 4.7, Air too): mixtures of experts, chosen by corrected sigmoids, but for the
    /// first layers', with an MLP beside them that all rows go to; of each head a part is turned.
    Glm4Moe,
    /// `SolarOpenForCausalLM`: the same in all layers, whose heads are turned as a whole.
    SolarOpen,
    /// `ExaoneMoeForCausalLM` (K-EXAONE): experts as GLM's, with norms on each head's query and key. Where layers have
    /// windows, the others do not turn queries and keys.
    ExaoneMoe,
    /// `Dots1ForCausalLM` (dots.llm1): the same in all layers but the first ones, with norms on each head's query and
    /// key.
    Dots1,
    /// `AfmoeForCausalLM` (Arcee's Trinity): experts as GLM's, norms before and after attention and MLP and on each
    /// head's query and key, and what attention makes goes through a gate. Most layers have a window; the others do not
    /// turn queries and keys.
    Afmoe,
    /// `MiniMaxM2ForCausalLM`: mixtures of experts, chosen by corrected sigmoids, and norms on all queries and all keys
    /// of a row.
    MiniMaxM2,
    /// `GptOssForCausalLM`: mixtures of experts with biases, whose gates and ups are limited; each head has a sink,
    /// which takes part in what it attends to, and every second layer a window. Files have experts' matrices in MXFP4,
    /// or with gates and ups in turn.
    GptOss,
    /// `DeepseekV2ForCausalLM` (V2 Lite): [latent attention](super::Latent), and mixtures of experts in all layers but
    /// the first ones, with an MLP beside them that all rows go to.
    DeepseekV2,
    /// `DeepseekV3ForCausalLM` (Moonlight; V3, R1 and Kimi K2): the same, whose experts are chosen by corrected
    /// sigmoids.
    DeepseekV3,
    /// `Glm4MoeLiteForCausalLM` (GLM 4.7 Flash): the same.
    Glm4MoeLite,
    /// `Mistral4ForCausalLM`: DeepSeek V2 whose experts' parts add up. Beyond the context of the first training it
    /// multiplies queries, as Ministral 3 does.
    Mistral4,
    /// `YoutuForCausalLM`: Llama with latent attention.
    Youtu,
    /// `MiniCPM3ForCausalLM`: the same, with numbers that embeddings, logits and what layers add are multiplied with.
    MiniCpm3,
    /// `HunYuanDenseV1ForCausalLM` (Hunyuan's of 0.5 to 7 billion, Hunyuan-MT): Llama with norms on each head's query
    /// and key, whose factors come behind the rotation.
    HunyuanDense,
    /// `HunYuanMoEV1ForCausalLM` (Hunyuan-A13B): the same, whose MLPs are mixtures of experts, and beside these one that
    /// all rows go to.
    HunyuanMoe,
    /// `Exaone4ForCausalLM`: norms after attention and MLP, and on each head's query and key. Where layers have
    /// windows, the others do not turn queries and keys.
    Exaone4,
    /// `BertModel` and the models with a head on top of it, whose heads are not used: sentence embeddings.
    Bert,
    /// `RobertaModel`, `XLMRobertaModel`, `CamembertModel`, with a head on top or without: BERT that counts positions
    /// from another row on.
    Roberta,
    /// `ModernBertModel`, with a head on top or without: an encoder whose layers turn queries and keys, most of them
    /// with a window.
    ModernBert,
}

/// Where the norms of a decoder's layer stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Norms {
    /// Before attention and before the MLP.
    Before,
    /// After each, before what it made is added to the row.
    After,
    /// Both.
    Around,
}

/// What is normalised of queries and keys, before RoPE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QkNorm {
    /// Nothing.
    None,
    /// Each head by itself.
    Heads,
    /// All queries of a row together, and all keys.
    Rows,
}

/// The gate that what attention makes goes through, whose sigmoid it is multiplied with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttentionGate {
    /// Its elements stand behind those of each query, made by the same matrix.
    BesideQueries,
    /// A matrix of its own makes it.
    Elements,
    /// Likewise, one for all elements of a head.
    Heads,
}

/// Whether linear layers have biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Biases {
    Always,
    Never,
    /// What the file says under `key`; else `otherwise`.
    Said {
        key: &'static str,
        otherwise: bool,
    },
}

/// Which layers have a window, where there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sliding {
    /// None, whatever the file says.
    Never,
    /// All of them, whatever it says of types of layers.
    All,
    /// Those from `max_window_layers` on, or those that `layer_types` names.
    Later {
        /// The number of the first, where the file does not say it.
        first: usize,
        /// That it is so only if `use_sliding_window`.
        if_used: bool,
    },
    /// All of them, if `use_sliding_window`.
    AllIfUsed,
    /// All, or those that `layer_types` names.
    Named,
    /// Those that `layer_types` names.
    NamedAlone,
    /// Those that `layer_types` names; else all but every so many.
    Most {
        /// What may say how many.
        key: Option<&'static str>,
        /// How many, where the file does not.
        pattern: usize,
    },
    /// Those that `layer_types` names; else all but layer 0 and every so many behind it.
    MostBehind {
        /// How many.
        pattern: usize,
    },
    /// Every second one from the first on, of those before `max_window_layers`, or those that `layer_types` names, if
    /// `use_sliding_window`.
    Alternating,
    /// Those that do not turn queries and keys, if `use_sliding_window`; or those that `layer_types` names.
    Still,
}

/// What layers that do not attend do instead, and what `layer_types` calls them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Recurs {
    /// `linear_attention`: the gated delta rule. Where the file does not say which, all but every
    /// `full_attention_interval`th layer.
    DeltaRule,
    /// `linear_attention`, or `mamba` in older files: a state space; all of them, where the file does not say which.
    StateSpace,
    /// `conv`: a short convolution. Where the file does not say which, all but those of `full_attn_idxs`.
    Convolution {
        /// Its taps, where the file does not say it.
        taps: usize,
    },
}

/// Mixtures of experts, where the file does not say otherwise.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mixture {
    /// What may say how many there are: its names depend on the version of transformers that wrote the file.
    pub(super) keys: &'static [&'static str],
    pub(super) n: usize,
    pub(super) chosen: usize,
    /// What says how many a row goes to.
    pub(super) chosen_key: &'static str,
    /// An expert's `moe_intermediate_size`; `None`: it is `intermediate_size` that says it.
    pub(super) intermediate_size: Option<usize>,
    /// Whether the parts with which experts count add up to 1.
    pub(super) normalises: Normalises,
    pub(super) sparse: Sparse,
    pub(super) sigmoids: Option<Sigmoids>,
    /// What says what those parts are multiplied with; `None`: with 1.
    pub(super) factor_key: Option<&'static str>,
    /// That where it does not.
    pub(super) factor: f64,
    /// Into how many groups experts would come, and from how many of these they would be chosen: `n_group` and
    /// `topk_group`, which must be as many.
    pub(super) groups: [usize; 2],
    pub(super) shared: Option<Shared>,
}

/// What `norm_topk_prob` says of experts' parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Normalises {
    /// Nothing: they add up to 1.
    Always,
    /// That they do not, if it is false.
    Unless,
    /// That they do, if it is true.
    If,
    /// That they do not, which it must not deny.
    Never,
}

/// Which layers have experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sparse {
    /// All of them.
    All,
    /// All of them, or, unless `key` says so, none.
    IfSaid { key: &'static str },
    /// Every `decoder_sparse_step`th but for `mlp_only_layers`, or none, if there are no experts.
    Stepped,
    /// Those that `key` names; all where it is missing.
    Named { key: &'static str },
    /// All but the first so many.
    Later {
        /// What says how many.
        key: &'static str,
        /// And where it does not.
        dense: usize,
        /// What names each layer's kind, and comes before that.
        types_key: Option<&'static str>,
    },
}

/// Experts that count by the sigmoids of their logits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sigmoids {
    /// What says that a number is added to each where they are chosen; `None`: it is so.
    pub(super) corrected_key: Option<&'static str>,
    /// What is added to their sum.
    pub(super) added: f64,
}

/// An MLP beside experts that all rows go to, where the file does not say otherwise.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shared {
    /// What says its `intermediate_size`, or, if that `is_in_experts`, how many of an expert's it is; 0: there is none.
    pub(super) key: &'static str,
    pub(super) is_in_experts: bool,
    /// What that says where it is missing.
    pub(super) otherwise: usize,
    /// It counts with the sigmoid of a logit of its own.
    pub(super) is_weighed: bool,
    /// Where there are no experts, layers have it alone.
    pub(super) stands_alone: bool,
}

/// What is known of an architecture beside its configuration, and what its configuration class takes where the file
/// lacks a key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traits {
    /// The name in `architectures`.
    pub(super) class_name: &'static str,
    /// The name in `model_type`.
    pub(super) model_type: &'static str,
    pub(super) is_encoder: bool,
    /// Keys that there must be: what their class has without them is not done here.
    pub(super) required: &'static [&'static str],
    pub(super) norms: Norms,
    /// Checkpoints have the norms' factors less one.
    pub(super) norms_less_one: bool,
    pub(super) qk_norm: QkNorm,
    /// What says that it is so; `None`: it is.
    pub(super) qk_norm_key: Option<&'static str>,
    /// q, k and v are one matrix.
    pub(super) is_fused: bool,
    /// Embeddings, scores, logits and what layers add are multiplied with numbers of the file's.
    pub(super) multiplies: bool,
    pub(super) mixture: Option<Mixture>,
    /// These have biases, as has their router, and what they open is limited.
    pub(super) limits_experts: bool,
    pub(super) recurs: Option<Recurs>,
    /// Each query head has a sink.
    pub(super) has_sinks: bool,
    pub(super) gate: Option<AttentionGate>,
    /// What says, if it is false, that there is none.
    pub(super) gate_key: Option<&'static str>,
    pub(super) attention_bias: Biases,
    /// The attention's output; `None`: it has a bias where q, k and v have.
    pub(super) output_bias: Option<Biases>,
    pub(super) mlp_bias: Biases,
    pub(super) activation: Activation,
    pub(super) sliding: Sliding,
    /// The window where `sliding_window` is missing, and not null.
    pub(super) window: Option<usize>,
    /// Each type of layer may have a RoPE of its own.
    pub(super) ropes_by_type: bool,
    /// Elements of a head are turned with their neighbours; else those of one half with those of the other.
    pub(super) turns_neighbours: bool,
    /// What says, if it is false, that they are not.
    pub(super) neighbours_key: Option<&'static str>,
    /// Attention is latent.
    pub(super) is_latent: bool,
    /// What says the base of each layer, 0: that it does not turn.
    pub(super) thetas_key: Option<&'static str>,
    /// What the base of the RoPE is called beside all other keys.
    pub(super) theta_key: &'static str,
    /// The same of layers with a window, and that base; `None`: as in the others.
    pub(super) sliding_theta: Option<(&'static str, f64)>,
    /// The context of the first training, where the file does not say it; `None`: that of all.
    pub(super) original_context: Option<usize>,
    /// A part of each head may be turned alone: this one, where the file does not say it.
    pub(super) turned_part: Option<f64>,
    /// What says in older files how many elements of a head that is.
    pub(super) turned_key: Option<&'static str>,
    /// What older files call LongRoPE.
    pub(super) longrope_names: &'static [&'static str],
    /// Where layers have windows, the others do not turn queries and keys.
    pub(super) is_still_without_window: bool,
    /// Key and value heads; `None`: as many as query heads.
    pub(super) n_kv_heads: Option<usize>,
    /// `None`: `hidden_size / n_heads`.
    pub(super) head_dim: Option<usize>,
    pub(super) max_position_embeddings: usize,
    /// What may say the norms' epsilon.
    pub(super) eps_keys: &'static [&'static str],
    pub(super) rms_norm_eps: f64,
    pub(super) rope_theta: f64,
    pub(super) tie_word_embeddings: bool,
}

/// Biases where the file says so.
const fn if_said(key: &'static str) -> Biases {
    Biases::Said { key, otherwise: false }
}

/// What most have.
const USUAL: Traits = Traits {
    class_name: "",
    model_type: "",
    is_encoder: false,
    required: &[],
    norms: Norms::Before,
    norms_less_one: false,
    qk_norm: QkNorm::None,
    qk_norm_key: None,
    is_fused: false,
    multiplies: false,
    mixture: None,
    limits_experts: false,
    recurs: None,
    has_sinks: false,
    gate: None,
    gate_key: None,
    attention_bias: if_said("attention_bias"),
    output_bias: None,
    mlp_bias: Biases::Never,
    activation: Activation::Silu,
    sliding: Sliding::Never,
    window: Some(4096),
    ropes_by_type: false,
    turns_neighbours: false,
    neighbours_key: None,
    is_latent: false,
    thetas_key: None,
    theta_key: "rope_theta",
    sliding_theta: None,
    original_context: None,
    turned_part: None,
    turned_key: None,
    longrope_names: &[],
    is_still_without_window: false,
    n_kv_heads: None,
    head_dim: None,
    max_position_embeddings: 32_768,
    eps_keys: &["rms_norm_eps"],
    rms_norm_eps: 1e-6,
    rope_theta: 1e4,
    tie_word_embeddings: false,
};

/// What says every how manieth layer has no window.
const PATTERN: &str = "sliding_window_pattern";

const QWEN: Traits = Traits { sliding: Sliding::Later { first: 28, if_used: true }, n_kv_heads: Some(32), ..USUAL };

const QWEN_3_5: Traits = Traits {
    norms_less_one: true,
    qk_norm: QkNorm::Heads,
    recurs: Some(Recurs::DeltaRule),
    gate: Some(AttentionGate::BesideQueries),
    turned_part: Some(0.25),
    n_kv_heads: Some(4),
    head_dim: Some(256),
    ..USUAL
};

const MISTRAL: Traits = Traits {
    attention_bias: Biases::Never,
    sliding: Sliding::Named,
    n_kv_heads: Some(8),
    max_position_embeddings: 131_072,
    ..USUAL
};

const GRANITE: Traits = Traits { multiplies: true, max_position_embeddings: 2048, ..USUAL };

const GRANITE_SWA: Traits = Traits {
    has_sinks: true,
    sliding: Sliding::MostBehind { pattern: 4 },
    window: Some(128),
    thetas_key: Some("layer_rope_theta"),
    ..GRANITE
};

const OLMO: Traits =
    Traits { norms: Norms::After, qk_norm: QkNorm::Rows, max_position_embeddings: 2048, rms_norm_eps: 1e-5, ..USUAL };

const EXPERTS: Mixture = Mixture {
    keys: &["num_experts", "num_local_experts"],
    n: 8,
    chosen: 2,
    chosen_key: "num_experts_per_tok",
    intermediate_size: None,
    normalises: Normalises::Always,
    sparse: Sparse::All,
    sigmoids: None,
    factor_key: None,
    factor: 1.0,
    groups: [1; 2],
    shared: None,
};

/// What experts' parts are multiplied with, in most that say it.
const FACTOR: Option<&str> = Some("routed_scaling_factor");

const GRANITE_SHARED: Shared = Shared {
    key: "shared_intermediate_size",
    is_in_experts: false,
    otherwise: 0,
    is_weighed: false,
    stands_alone: false,
};

const QWEN_SHARED: Shared = Shared {
    key: "shared_expert_intermediate_size",
    is_in_experts: false,
    otherwise: 5632,
    is_weighed: true,
    stands_alone: false,
};

/// So small that it is a guard against dividing by 0 alone.
const SIGMOIDS: Sigmoids = Sigmoids { corrected_key: None, added: 1e-20 };

const GLM_SHARED: Shared =
    Shared { key: "n_shared_experts", is_in_experts: true, otherwise: 1, is_weighed: false, stands_alone: false };

const GLM_EXPERTS: Mixture = Mixture {
    keys: &["n_routed_experts", "num_local_experts"],
    n: 128,
    chosen: 8,
    chosen_key: "num_experts_per_tok",
    intermediate_size: Some(1408),
    normalises: Normalises::Unless,
    sparse: Sparse::Later { key: "first_k_dense_replace", dense: 1, types_key: None },
    sigmoids: Some(SIGMOIDS),
    factor_key: FACTOR,
    factor: 1.0,
    groups: [1; 2],
    shared: Some(GLM_SHARED),
};

/// Whose files say whether neighbours are turned.
const DEEPSEEK: Traits =
    Traits { is_latent: true, turns_neighbours: true, neighbours_key: Some("rope_interleave"), ..USUAL };

const HUNYUAN: Traits = Traits { qk_norm: QkNorm::Heads, max_position_embeddings: 2048, rms_norm_eps: 1e-5, ..USUAL };

const GLM: Traits = Traits {
    output_bias: Some(Biases::Never),
    n_kv_heads: Some(8),
    max_position_embeddings: 131_072,
    rms_norm_eps: 1e-5,
    ..USUAL
};

const GLM_DENSE: Traits = Traits {
    attention_bias: Biases::Said { key: "attention_bias", otherwise: true },
    turns_neighbours: true,
    turned_part: Some(0.5),
    n_kv_heads: Some(2),
    head_dim: Some(128),
    rms_norm_eps: 1.5625e-7,
    ..GLM
};

const LFM: Traits = Traits {
    qk_norm: QkNorm::Heads,
    recurs: Some(Recurs::Convolution { taps: 3 }),
    attention_bias: Biases::Never,
    n_kv_heads: Some(8),
    max_position_embeddings: 128_000,
    eps_keys: &["norm_eps"],
    rms_norm_eps: 1e-5,
    rope_theta: 1e6,
    tie_word_embeddings: true,
    ..USUAL
};

const EXAONE: Traits = Traits {
    qk_norm: QkNorm::Heads,
    attention_bias: Biases::Never,
    sliding: Sliding::Most { key: Some(PATTERN), pattern: 4 },
    is_still_without_window: true,
    n_kv_heads: Some(32),
    max_position_embeddings: 2048,
    rms_norm_eps: 1e-5,
    ..USUAL
};

/// The window and the experts are Gemma 4's.
const GEMMA_4: Traits = Traits {
    norms: Norms::Around,
    qk_norm: QkNorm::Heads,
    activation: Activation::GeluTanh,
    sliding: Sliding::Most { key: None, pattern: 6 },
    window: Some(512),
    ropes_by_type: true,
    n_kv_heads: Some(4),
    head_dim: Some(256),
    max_position_embeddings: 131_072,
    tie_word_embeddings: true,
    ..USUAL
};

const ENCODER: Traits = Traits { is_encoder: true, activation: Activation::Gelu, ..USUAL };

impl Architecture {
    /// Every architecture.
    pub const ALL: [Architecture; 52] = [
        Architecture::Qwen3,
        Architecture::Qwen3Moe,
        Architecture::Mellum,
        Architecture::Qwen2,
        Architecture::Qwen2Moe,
        Architecture::Llama,
        Architecture::Mistral,
        Architecture::Ministral3,
        Architecture::Mixtral,
        Architecture::Gemma3,
        Architecture::Gemma4,
        Architecture::Gemma4Unified,
        Architecture::SmolLm3,
        Architecture::Granite,
        Architecture::GraniteMoe,
        Architecture::GraniteMoeShared,
        Architecture::GraniteMoeHybrid,
        Architecture::GraniteSwa,
        Architecture::GraniteMoeSwa,
        Architecture::SeedOss,
        Architecture::Phi3,
        Architecture::Olmo2,
        Architecture::Olmo3,
        Architecture::Olmoe,
        Architecture::Qwen35,
        Architecture::Qwen35Moe,
        Architecture::Qwen3Next,
        Architecture::Glm,
        Architecture::Glm4,
        Architecture::Ernie45,
        Architecture::Lfm2,
        Architecture::Lfm2Moe,
        Architecture::Lfm3,
        Architecture::Glm4Moe,
        Architecture::SolarOpen,
        Architecture::ExaoneMoe,
        Architecture::Dots1,
        Architecture::Afmoe,
        Architecture::MiniMaxM2,
        Architecture::GptOss,
        Architecture::DeepseekV2,
        Architecture::DeepseekV3,
        Architecture::Glm4MoeLite,
        Architecture::Mistral4,
        Architecture::Youtu,
        Architecture::MiniCpm3,
        Architecture::HunyuanDense,
        Architecture::HunyuanMoe,
        Architecture::Exaone4,
        Architecture::Bert,
        Architecture::Roberta,
        Architecture::ModernBert,
    ];

    /// See [`Traits`].
    pub(super) const fn traits(self) -> Traits {
        match self {
            Architecture::Qwen3 => Traits {
                class_name: "Qwen3ForCausalLM",
                model_type: "qwen3",
                qk_norm: QkNorm::Heads,
                head_dim: Some(128),
                ..QWEN
            },
            Architecture::Qwen3Moe => Traits {
                class_name: "Qwen3MoeForCausalLM",
                model_type: "qwen3_moe",
                qk_norm: QkNorm::Heads,
                mixture: Some(Mixture {
                    n: 128,
                    chosen: 8,
                    intermediate_size: Some(768),
                    normalises: Normalises::If,
                    sparse: Sparse::Stepped,
                    ..EXPERTS
                }),
                sliding: Sliding::AllIfUsed,
                n_kv_heads: Some(4),
                ..QWEN
            },
            Architecture::Mellum => Traits {
                class_name: "MellumForCausalLM",
                model_type: "mellum",
                required: &["rope_parameters"],
                qk_norm: QkNorm::Heads,
                mixture: Some(Mixture {
                    n: 64,
                    chosen: 8,
                    intermediate_size: Some(896),
                    normalises: Normalises::Unless,
                    sparse: Sparse::Named { key: "mlp_layer_types" },
                    ..EXPERTS
                }),
                sliding: Sliding::NamedAlone,
                window: Some(1024),
                ropes_by_type: true,
                n_kv_heads: Some(4),
                head_dim: Some(128),
                max_position_embeddings: 131_072,
                rope_theta: 5e5,
                ..USUAL
            },
            Architecture::Qwen2 => Traits {
                class_name: "Qwen2ForCausalLM",
                model_type: "qwen2",
                attention_bias: Biases::Always,
                output_bias: Some(Biases::Never),
                ..QWEN
            },
            Architecture::Qwen2Moe => Traits {
                class_name: "Qwen2MoeForCausalLM",
                model_type: "qwen2_moe",
                mixture: Some(Mixture {
                    n: 60,
                    chosen: 4,
                    intermediate_size: Some(1408),
                    normalises: Normalises::If,
                    sparse: Sparse::Stepped,
                    shared: Some(QWEN_SHARED),
                    ..EXPERTS
                }),
                attention_bias: Biases::Said { key: "qkv_bias", otherwise: true },
                output_bias: Some(Biases::Never),
                sliding: Sliding::Alternating,
                n_kv_heads: Some(16),
                ..QWEN
            },
            Architecture::Llama => Traits {
                class_name: "LlamaForCausalLM",
                model_type: "llama",
                mlp_bias: if_said("mlp_bias"),
                max_position_embeddings: 2048,
                ..USUAL
            },
            Architecture::Mistral => Traits { class_name: "MistralForCausalLM", model_type: "mistral", ..MISTRAL },
            Architecture::Ministral3 => Traits {
                class_name: "Ministral3ForCausalLM",
                model_type: "ministral3",
                sliding: Sliding::All,
                window: None,
                head_dim: Some(128),
                max_position_embeddings: 262_144,
                rms_norm_eps: 1e-5,
                rope_theta: 1e6,
                ..MISTRAL
            },
            Architecture::Mixtral => Traits {
                class_name: "MixtralForCausalLM",
                model_type: "mixtral",
                mixture: Some(EXPERTS),
                sliding: Sliding::All,
                window: None,
                rms_norm_eps: 1e-5,
                rope_theta: 1e6,
                ..MISTRAL
            },
            Architecture::Gemma3 => Traits {
                class_name: "Gemma3ForCausalLM",
                model_type: "gemma3_text",
                norms: Norms::Around,
                norms_less_one: true,
                qk_norm: QkNorm::Heads,
                activation: Activation::GeluTanh,
                sliding: Sliding::Most { key: Some(PATTERN), pattern: 6 },
                ropes_by_type: true,
                sliding_theta: Some(("rope_local_base_freq", 1e4)),
                n_kv_heads: Some(4),
                head_dim: Some(256),
                max_position_embeddings: 131_072,
                rope_theta: 1e6,
                tie_word_embeddings: true,
                ..USUAL
            },
            Architecture::Gemma4 => Traits {
                class_name: "Gemma4ForCausalLM",
                model_type: "gemma4_text",
                mixture: Some(Mixture {
                    keys: &["num_experts"],
                    chosen_key: "top_k_experts",
                    // `gemma4` has seen that the file says it.
                    intermediate_size: Some(1),
                    sparse: Sparse::IfSaid { key: "enable_moe_block" },
                    ..EXPERTS
                }),
                ..GEMMA_4
            },
            Architecture::Gemma4Unified => Traits {
                class_name: "Gemma4UnifiedForCausalLM",
                model_type: "gemma4_unified_text",
                window: Some(1024),
                max_position_embeddings: 262_144,
                ..GEMMA_4
            },
            Architecture::SmolLm3 => Traits {
                class_name: "SmolLM3ForCausalLM",
                model_type: "smollm3",
                mlp_bias: if_said("mlp_bias"),
                sliding: Sliding::Still,
                window: None,
                n_kv_heads: Some(4),
                rope_theta: 2e6,
                tie_word_embeddings: true,
                ..USUAL
            },
            Architecture::Granite => Traits {
                class_name: "GraniteForCausalLM",
                model_type: "granite",
                mlp_bias: if_said("mlp_bias"),
                ..GRANITE
            },
            Architecture::GraniteMoe => Traits {
                class_name: "GraniteMoeForCausalLM",
                model_type: "granitemoe",
                mixture: Some(EXPERTS),
                ..GRANITE
            },
            Architecture::GraniteMoeShared => Traits {
                class_name: "GraniteMoeSharedForCausalLM",
                model_type: "granitemoeshared",
                mixture: Some(Mixture { shared: Some(GRANITE_SHARED), ..EXPERTS }),
                ..GRANITE
            },
            Architecture::GraniteMoeHybrid => Traits {
                class_name: "GraniteMoeHybridForCausalLM",
                model_type: "granitemoehybrid",
                recurs: Some(Recurs::StateSpace),
                mixture: Some(Mixture {
                    sparse: Sparse::Stepped,
                    shared: Some(Shared { otherwise: 1024, stands_alone: true, ..GRANITE_SHARED }),
                    ..EXPERTS
                }),
                ..GRANITE
            },
            Architecture::GraniteSwa => Traits {
                class_name: "GraniteSWAForCausalLM",
                model_type: "granite_swa",
                mlp_bias: if_said("mlp_bias"),
                max_position_embeddings: 8192,
                rms_norm_eps: 1e-5,
                tie_word_embeddings: true,
                ..GRANITE_SWA
            },
            Architecture::GraniteMoeSwa => Traits {
                class_name: "GraniteMoeSWAForCausalLM",
                model_type: "granitemoe_swa",
                mixture: Some(Mixture { shared: Some(GRANITE_SHARED), ..EXPERTS }),
                ..GRANITE_SWA
            },
            Architecture::SeedOss => Traits {
                class_name: "SeedOssForCausalLM",
                model_type: "seed_oss",
                attention_bias: Biases::Said { key: "attention_bias", otherwise: true },
                output_bias: Some(if_said("attention_out_bias")),
                mlp_bias: if_said("mlp_bias"),
                n_kv_heads: Some(8),
                head_dim: Some(128),
                max_position_embeddings: 524_288,
                ..USUAL
            },
            Architecture::Phi3 => Traits {
                class_name: "Phi3ForCausalLM",
                model_type: "phi3",
                is_fused: true,
                attention_bias: Biases::Never,
                sliding: Sliding::All,
                window: None,
                original_context: Some(4096),
                turned_part: Some(1.0),
                longrope_names: &["su", "yarn"],
                max_position_embeddings: 4096,
                rms_norm_eps: 1e-5,
                ..USUAL
            },
            Architecture::Olmo2 => Traits { class_name: "Olmo2ForCausalLM", model_type: "olmo2", ..OLMO },
            Architecture::Olmo3 => Traits {
                class_name: "Olmo3ForCausalLM",
                model_type: "olmo3",
                sliding: Sliding::Most { key: Some(PATTERN), pattern: 4 },
                ropes_by_type: true,
                rope_theta: 5e5,
                ..OLMO
            },
            Architecture::Olmoe => Traits {
                class_name: "OlmoeForCausalLM",
                model_type: "olmoe",
                norms: Norms::Before,
                mixture: Some(Mixture { n: 64, chosen: 8, normalises: Normalises::If, ..EXPERTS }),
                max_position_embeddings: 4096,
                ..OLMO
            },
            Architecture::Qwen35 => Traits { class_name: "Qwen3_5ForCausalLM", model_type: "qwen3_5_text", ..QWEN_3_5 },
            Architecture::Qwen35Moe => Traits {
                class_name: "Qwen3_5MoeForCausalLM",
                model_type: "qwen3_5_moe_text",
                mixture: Some(Mixture {
                    n: 256,
                    chosen: 8,
                    intermediate_size: Some(512),
                    shared: Some(Shared { otherwise: 512, ..QWEN_SHARED }),
                    ..EXPERTS
                }),
                n_kv_heads: Some(2),
                ..QWEN_3_5
            },
            Architecture::Qwen3Next => Traits {
                class_name: "Qwen3NextForCausalLM",
                model_type: "qwen3_next",
                mixture: Some(Mixture {
                    n: 512,
                    chosen: 10,
                    intermediate_size: Some(512),
                    normalises: Normalises::Unless,
                    sparse: Sparse::Stepped,
                    shared: Some(Shared { otherwise: 512, ..QWEN_SHARED }),
                    ..EXPERTS
                }),
                n_kv_heads: Some(2),
                ..QWEN_3_5
            },
            Architecture::Glm => Traits { class_name: "GlmForCausalLM", model_type: "glm", ..GLM_DENSE },
            Architecture::Glm4 => {
                Traits { class_name: "Glm4ForCausalLM", model_type: "glm4", norms: Norms::Around, ..GLM_DENSE }
            }
            Architecture::Ernie45 => Traits {
                class_name: "Ernie4_5ForCausalLM",
                model_type: "ernie4_5",
                turns_neighbours: true,
                attention_bias: if_said("use_bias"),
                mlp_bias: if_said("use_bias"),
                n_kv_heads: Some(2),
                head_dim: Some(128),
                max_position_embeddings: 131_072,
                rms_norm_eps: 1e-5,
                rope_theta: 5e5,
                tie_word_embeddings: true,
                ..USUAL
            },
            Architecture::GptOss => Traits {
                class_name: "GptOssForCausalLM",
                model_type: "gpt_oss",
                mixture: Some(Mixture { n: 128, chosen: 4, ..EXPERTS }),
                limits_experts: true,
                has_sinks: true,
                attention_bias: Biases::Said { key: "attention_bias", otherwise: true },
                sliding: Sliding::Most { key: Some(PATTERN), pattern: 2 },
                window: Some(128),
                n_kv_heads: Some(8),
                head_dim: Some(64),
                max_position_embeddings: 131_072,
                rms_norm_eps: 1e-5,
                rope_theta: 1.5e5,
                ..USUAL
            },
            Architecture::Lfm2 => Traits { class_name: "Lfm2ForCausalLM", model_type: "lfm2", ..LFM },
            Architecture::Lfm2Moe => Traits {
                class_name: "Lfm2MoeForCausalLM",
                model_type: "lfm2_moe",
                mixture: Some(Mixture {
                    keys: &["num_experts"],
                    n: 32,
                    chosen: 4,
                    intermediate_size: Some(1792),
                    normalises: Normalises::Unless,
                    sparse: Sparse::Later { key: "num_dense_layers", dense: 2, types_key: None },
                    sigmoids: Some(Sigmoids { corrected_key: Some("use_expert_bias"), added: 1e-6 }),
                    factor_key: FACTOR,
                    ..EXPERTS
                }),
                ..LFM
            },
            Architecture::Lfm3 => Traits {
                class_name: "Lfm3ForCausalLM",
                model_type: "lfm3",
                required: &["layer_types", "rope_parameters"],
                norms: Norms::Around,
                recurs: Some(Recurs::Convolution { taps: 7 }),
                gate: Some(AttentionGate::Heads),
                gate_key: Some("use_attention_gate"),
                sliding: Sliding::NamedAlone,
                window: Some(256),
                ropes_by_type: true,
                attention_bias: if_said("attention_bias"),
                n_kv_heads: Some(4),
                head_dim: Some(128),
                eps_keys: &["norm_eps", "rms_norm_eps"],
                ..LFM
            },
            Architecture::Glm4Moe => Traits {
                class_name: "Glm4MoeForCausalLM",
                model_type: "glm4_moe",
                qk_norm: QkNorm::Heads,
                qk_norm_key: Some("use_qk_norm"),
                mixture: Some(GLM_EXPERTS),
                turned_part: Some(0.5),
                ..GLM
            },
            Architecture::SolarOpen => Traits {
                class_name: "SolarOpenForCausalLM",
                model_type: "solar_open",
                mixture: Some(Mixture { intermediate_size: Some(1280), sparse: Sparse::All, ..GLM_EXPERTS }),
                turned_part: Some(1.0),
                head_dim: Some(128),
                rope_theta: 1e6,
                ..GLM
            },
            Architecture::ExaoneMoe => Traits {
                class_name: "ExaoneMoeForCausalLM",
                model_type: "exaone_moe",
                mixture: Some(Mixture {
                    keys: &["num_experts"],
                    sparse: Sparse::Later {
                        key: "first_k_dense_replace",
                        dense: 1,
                        types_key: Some("mlp_layer_types"),
                    },
                    n: 64,
                    intermediate_size: Some(1024),
                    factor: 2.5,
                    shared: Some(Shared { key: "num_shared_experts", ..GLM_SHARED }),
                    ..GLM_EXPERTS
                }),
                ..EXAONE
            },
            Architecture::Dots1 => Traits {
                class_name: "Dots1ForCausalLM",
                model_type: "dots1",
                qk_norm: QkNorm::Heads,
                mixture: Some(Mixture {
                    normalises: Normalises::If,
                    sparse: Sparse::Later { key: "first_k_dense_replace", dense: 0, types_key: None },
                    shared: Some(Shared { otherwise: 0, ..GLM_SHARED }),
                    ..GLM_EXPERTS
                }),
                sliding: Sliding::Later { first: 62, if_used: false },
                n_kv_heads: Some(32),
                max_position_embeddings: 2048,
                ..USUAL
            },
            Architecture::Afmoe => Traits {
                class_name: "AfmoeForCausalLM",
                model_type: "afmoe",
                norms: Norms::Around,
                qk_norm: QkNorm::Heads,
                gate: Some(AttentionGate::Elements),
                mixture: Some(Mixture {
                    keys: &["num_experts", "num_local_experts"],
                    n: 64,
                    chosen: 6,
                    normalises: Normalises::Always,
                    sparse: Sparse::Later { key: "num_dense_layers", dense: 1, types_key: None },
                    factor_key: Some("route_scale"),
                    shared: Some(Shared { key: "num_shared_experts", otherwise: 2, ..GLM_SHARED }),
                    ..GLM_EXPERTS
                }),
                sliding: Sliding::Most { key: Some("global_attn_every_n_layers"), pattern: 4 },
                window: Some(1024),
                is_still_without_window: true,
                head_dim: Some(128),
                max_position_embeddings: 16_384,
                rms_norm_eps: 1e-5,
                ..USUAL
            },
            Architecture::MiniMaxM2 => Traits {
                class_name: "MiniMaxM2ForCausalLM",
                model_type: "minimax_m2",
                qk_norm: QkNorm::Rows,
                mixture: Some(Mixture {
                    n: 256,
                    chosen: 8,
                    sigmoids: Some(Sigmoids { added: 0.0, ..SIGMOIDS }),
                    ..EXPERTS
                }),
                attention_bias: Biases::Never,
                turned_part: Some(1.0),
                turned_key: Some("rotary_dim"),
                n_kv_heads: Some(8),
                head_dim: Some(128),
                max_position_embeddings: 196_608,
                rope_theta: 5e6,
                ..USUAL
            },
            Architecture::DeepseekV2 => Traits {
                class_name: "DeepseekV2ForCausalLM",
                model_type: "deepseek_v2",
                neighbours_key: None,
                required: &["num_experts_per_tok"],
                mixture: Some(Mixture {
                    n: 64,
                    intermediate_size: Some(1407),
                    normalises: Normalises::Never,
                    sparse: Sparse::Later { key: "first_k_dense_replace", dense: 0, types_key: None },
                    sigmoids: None,
                    shared: Some(Shared { otherwise: 2, ..GLM_SHARED }),
                    ..GLM_EXPERTS
                }),
                mlp_bias: if_said("mlp_bias"),
                max_position_embeddings: 2048,
                ..DEEPSEEK
            },
            Architecture::DeepseekV3 => Traits {
                class_name: "DeepseekV3ForCausalLM",
                model_type: "deepseek_v3",
                mixture: Some(Mixture {
                    n: 256,
                    intermediate_size: Some(2048),
                    sparse: Sparse::Later { key: "first_k_dense_replace", dense: 3, types_key: None },
                    factor: 2.5,
                    groups: [8, 4],
                    ..GLM_EXPERTS
                }),
                max_position_embeddings: 4096,
                ..DEEPSEEK
            },
            Architecture::Glm4MoeLite => Traits {
                class_name: "Glm4MoeLiteForCausalLM",
                model_type: "glm4_moe_lite",
                mixture: Some(Mixture {
                    n: 64,
                    chosen: 4,
                    intermediate_size: Some(1536),
                    sparse: Sparse::Later {
                        key: "first_k_dense_replace",
                        dense: 1,
                        types_key: Some("mlp_layer_types"),
                    },
                    factor: 1.8,
                    ..GLM_EXPERTS
                }),
                max_position_embeddings: 202_752,
                rms_norm_eps: 1e-5,
                ..DEEPSEEK
            },
            Architecture::Mistral4 => Traits {
                class_name: "Mistral4ForCausalLM",
                model_type: "mistral4",
                required: &["rope_parameters"],
                mixture: Some(Mixture {
                    chosen: 4,
                    intermediate_size: Some(2048),
                    sparse: Sparse::Later { key: "first_k_dense_replace", dense: 0, types_key: None },
                    sigmoids: None,
                    ..GLM_EXPERTS
                }),
                max_position_embeddings: 1_048_576,
                ..DEEPSEEK
            },
            Architecture::Youtu => Traits {
                class_name: "YoutuForCausalLM",
                model_type: "youtu",
                max_position_embeddings: 131_072,
                tie_word_embeddings: true,
                ..DEEPSEEK
            },
            Architecture::MiniCpm3 => Traits {
                class_name: "MiniCPM3ForCausalLM",
                model_type: "minicpm3",
                turns_neighbours: false,
                neighbours_key: None,
                mlp_bias: if_said("mlp_bias"),
                rms_norm_eps: 1e-5,
                tie_word_embeddings: true,
                ..DEEPSEEK
            },
            Architecture::HunyuanDense => {
                Traits { class_name: "HunYuanDenseV1ForCausalLM", model_type: "hunyuan_v1_dense", ..HUNYUAN }
            }
            Architecture::HunyuanMoe => Traits {
                class_name: "HunYuanMoEV1ForCausalLM",
                model_type: "hunyuan_v1_moe",
                mixture: Some(Mixture {
                    n: 1,
                    chosen: 1,
                    chosen_key: "moe_topk",
                    shared: Some(Shared { key: "intermediate_size", ..GRANITE_SHARED }),
                    ..EXPERTS
                }),
                ..HUNYUAN
            },
            Architecture::Exaone4 => {
                Traits { class_name: "Exaone4ForCausalLM", model_type: "exaone4", norms: Norms::After, ..EXAONE }
            }
            Architecture::Bert => Traits { class_name: "BertModel", model_type: "bert", ..ENCODER },
            Architecture::Roberta => Traits { class_name: "RobertaModel", model_type: "roberta", ..ENCODER },
            Architecture::ModernBert => Traits {
                class_name: "ModernBertModel",
                model_type: "modernbert",
                ropes_by_type: true,
                theta_key: "global_rope_theta",
                sliding_theta: Some(("local_rope_theta", 1e4)),
                max_position_embeddings: 8192,
                rms_norm_eps: 1e-5,
                rope_theta: 1.6e5,
                ..ENCODER
            },
        }
    }

    /// The class name in `architectures`.
    pub const fn class_name(self) -> &'static str {
        self.traits().class_name
    }

    /// The name in `model_type`.
    pub const fn model_type(self) -> &'static str {
        self.traits().model_type
    }

    /// Whether it is an encoder: its vectors are a sentence's, not the next token's.
    pub const fn is_encoder(self) -> bool {
        self.traits().is_encoder
    }

    /// Whether its checkpoints have the factors of norms less one.
    pub const fn has_norms_less_one(self) -> bool {
        self.traits().norms_less_one
    }

    /// Whether it is one of Gemma 4's.
    pub(crate) const fn is_gemma4(self) -> bool {
        matches!(self, Architecture::Gemma4 | Architecture::Gemma4Unified)
    }

    /// Whether its MLPs are mixtures of experts.
    pub const fn has_experts(self) -> bool {
        self.traits().mixture.is_some()
    }

    /// What may say how many experts there are, and how many of their size are beside them.
    pub(super) fn expert_keys(self) -> impl Iterator<Item = &'static str> {
        let mixture = self.traits().mixture;
        let shared = mixture.and_then(|mixture| mixture.shared).map(|shared| shared.key);
        mixture.into_iter().flat_map(|mixture| mixture.keys).copied().chain(shared)
    }

    /// Whether elements of a head are turned with their neighbours, where attention is not latent.
    pub(crate) const fn turns_neighbours(self) -> bool {
        self.traits().turns_neighbours && !self.traits().is_latent
    }

    /// Whether the factors of norms on heads come behind the rotation.
    pub(crate) const fn norms_turned(self) -> bool {
        matches!(self, Architecture::HunyuanDense | Architecture::HunyuanMoe)
    }

    /// Whether its checkpoints have q, k and v as one matrix.
    pub const fn is_fused(self) -> bool {
        self.traits().is_fused
    }

    /// Where a layer's norms stand.
    pub(crate) const fn norms(self) -> Norms {
        self.traits().norms
    }

    /// The architecture of a class: its own, the same without a head, or an encoder with one.
    pub(super) fn from_class_name(class: &str) -> Option<Architecture> {
        const HEADS: [&str; 9] = [
            "Model",
            "ForMaskedLM",
            "ForPreTraining",
            "ForNextSentencePrediction",
            "ForSequenceClassification",
            "ForTokenClassification",
            "ForQuestionAnswering",
            "ForMultipleChoice",
            "LMHeadModel",
        ];
        match HEADS.iter().find_map(|head| class.strip_suffix(head)) {
            Some("Bert") => Some(Architecture::Bert),
            Some("Roberta" | "XLMRoberta" | "Camembert") => Some(Architecture::Roberta),
            Some("ModernBert") => Some(Architecture::ModernBert),
            _ if matches!(class, "Gemma3ForConditionalGeneration" | "Gemma3TextModel") => Some(Architecture::Gemma3),
            _ if matches!(class, "Gemma4ForConditionalGeneration" | "Gemma4TextModel") => Some(Architecture::Gemma4),
            _ if matches!(class, "Gemma4UnifiedForConditionalGeneration" | "Gemma4UnifiedTextModel") => {
                Some(Architecture::Gemma4Unified)
            }
            _ if class == "Qwen3_5TextModel" => Some(Architecture::Qwen35),
            _ if class == "Qwen3_5MoeTextModel" => Some(Architecture::Qwen35Moe),
            // Their older files have no half: text is read by what stands beside all other keys.
            _ if matches!(class, "Qwen2VLForConditionalGeneration" | "Qwen2_5_VLForConditionalGeneration") => {
                Some(Architecture::Qwen2)
            }
            _ if class == "MinistralForCausalLM" => Some(Architecture::Mistral),
            _ => {
                let of_text =
                    |a: &Architecture| class.strip_suffix("Model") == a.class_name().strip_suffix("ForCausalLM");
                Architecture::ALL.into_iter().find(|a| a.class_name() == class || !a.is_encoder() && of_text(a))
            }
        }
    }

    /// The architecture of a `model_type`.
    pub(super) fn from_model_type(name: &str) -> Option<Architecture> {
        match name {
            "gemma3" => Some(Architecture::Gemma3),
            "gemma4" => Some(Architecture::Gemma4),
            "gemma4_unified" => Some(Architecture::Gemma4Unified),
            "qwen2_vl" | "qwen2_vl_text" | "qwen2_5_vl" | "qwen2_5_vl_text" => Some(Architecture::Qwen2),
            "qwen3_vl_text" => Some(Architecture::Qwen3),
            "qwen3_5" => Some(Architecture::Qwen35),
            "qwen3_5_moe" => Some(Architecture::Qwen35Moe),
            "ministral" => Some(Architecture::Mistral),
            "xlm-roberta" | "camembert" => Some(Architecture::Roberta),
            _ => Architecture::ALL.into_iter().find(|a| a.model_type() == name),
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.class_name())
    }
}
