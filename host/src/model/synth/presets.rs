//! Models whose sizes are known by name: their config.json, as their publishers' files have it.

use serde_json::{Value, json};

use super::END;
use crate::model::config::Architecture;
use crate::model::error::ModelError;

/// Names of all presets, those of encoders last.
pub const PRESETS: [&str; 113] = [
    "qwen3-110m",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-14b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "qwen2.5-0.5b",
    "qwen1.5-moe-a2.7b",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "llama-3.1-8b",
    "mistral-7b",
    "mistral-small-24b",
    "ministral-3-8b",
    "mixtral-8x7b",
    "gemma-3-270m",
    "gemma-3-1b",
    "gemma-3-4b",
    "gemma-3-12b",
    "gemma-3-27b",
    "gemma-4-e2b",
    "gemma-4-e4b",
    "gemma-4-26b-a4b",
    "gemma-4-31b",
    "smollm3-3b",
    "granite-3.3-2b",
    "granite-3.1-1b-a400m",
    "granite-4.0-micro",
    "granite-4.0-h-micro",
    "seed-oss-36b",
    "olmoe-1b-7b",
    "phi-3-mini",
    "phi-4",
    "olmo-2-1b",
    "olmo-2-7b",
    "olmo-3-7b",
    "exaone-4-1.2b",
    "exaone-4-32b",
    "qwen3.5-0.8b",
    "qwen3.5-2b",
    "qwen3.5-9b",
    "qwen3.5-35b-a3b",
    "qwen3-next-80b-a3b",
    "glm-4-9b",
    "glm-4-32b",
    "ernie-4.5-0.3b",
    "lfm2-1.2b",
    "lfm2-8b-a1b",
    "lfm3-1.7b",
    "mellum-2-12b",
    "granite-swash-2b",
    "glm-4.5-air",
    "glm-4.7-flash",
    "deepseek-v2-lite",
    "moonlight-16b-a3b",
    "youtu-llm-2b",
    "minicpm3-4b",
    "hunyuan-a13b",
    "minimax-m2",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "tiny-qwen3",
    "tiny-qwen3-moe",
    "tiny-qwen2",
    "tiny-qwen2-moe",
    "tiny-llama",
    "tiny-mistral",
    "tiny-ministral3",
    "tiny-mixtral",
    "tiny-gemma3",
    "tiny-gemma4",
    "tiny-gemma4-moe",
    "tiny-smollm3",
    "tiny-granite",
    "tiny-granitemoe",
    "tiny-granitemoeshared",
    "tiny-granite4",
    "tiny-granite4-h",
    "tiny-seed-oss",
    "tiny-olmoe",
    "tiny-phi3",
    "tiny-olmo2",
    "tiny-olmo3",
    "tiny-exaone4",
    "tiny-qwen3.5",
    "tiny-qwen3.5-moe",
    "tiny-qwen3-next",
    "tiny-glm4",
    "tiny-ernie4.5",
    "tiny-lfm2",
    "tiny-lfm2-moe",
    "tiny-lfm3",
    "tiny-trinity",
    "tiny-mellum",
    "tiny-granite-swash",
    "tiny-glm4-moe",
    "tiny-glm4-moe-lite",
    "tiny-deepseek-v2",
    "tiny-minicpm3",
    "tiny-hunyuan",
    "tiny-minimax-m2",
    "tiny-gpt-oss",
    "tiny-odd",
    "tiny-simt",
    "tiny-long",
    "tiny-large",
    "tiny-longest",
    "tiny-bert",
    "tiny-modernbert",
    "modernbert-base",
    "modernbert-large",
];

/// How many of [`PRESETS`] are encoders.
const N_ENCODERS: usize = 4;

/// Names of the presets that make text.
pub fn text_presets() -> impl Iterator<Item = &'static str> {
    PRESETS.into_iter().take(PRESETS.len() - N_ENCODERS)
}

/// Sizes that differ between presets; the rest follows from the architecture.
struct Sizes {
    vocab: usize,
    hidden: usize,
    intermediate: usize,
    layers: usize,
    heads: (usize, usize),
    head_dim: usize,
    tied: bool,
    context: usize,
    theta: f64,
    /// Llama 3's `factor`, where it scales.
    llama3_factor: Option<f64>,
    /// Experts of a layer, to how many of them a row goes, and elements between the linear layers of each, where there
    /// are some.
    experts: Option<[usize; 3]>,
    /// Elements between the linear layers of the MLP beside them that all rows go to, where there is one.
    shared: Option<usize>,
    /// Positions of a window, where layers have one, and which do not: each whose number, from 1 on, is a multiple of
    /// the other.
    window: Option<(usize, usize)>,
    /// Scores are divided by the root of this, where that is not what all of the family do.
    query_scalar: Option<usize>,
    /// Heads of values, where layers have linear attention, or of a state space.
    values: Option<usize>,
    /// What Gemma 4's sizes are beside others'.
    gemma4: Gemma4Sizes,
    /// Where attention is latent, the elements of what queries are made of (0: of rows), of what keys and values are, of
    /// a query that no position turns, and of a value; those of heads are what positions turn.
    latent: Option<[usize; 4]>,
    /// It stands for a family in tests: where that has layers of several kinds, its few are of all kinds.
    is_tiny: bool,
}

#[derive(Default)]
struct Gemma4Sizes {
    /// Elements of a head of layers without a window.
    global_dim: usize,
    /// Key heads of these, whose values are the keys; 0: as in others.
    global_kv_heads: usize,
    /// Layers at the end without keys of their own.
    shared: usize,
    /// Elements of a layer's own vector of each token; 0: there are none.
    layer_input: usize,
}

impl Sizes {
    const fn with_gemma4(self, global_dim: usize, global_kv_heads: usize, shared: usize, layer_input: usize) -> Sizes {
        Sizes { gemma4: Gemma4Sizes { global_dim, global_kv_heads, shared, layer_input }, ..self }
    }

    const fn with_latent(self, queries: usize, rank: usize, still: usize, value: usize) -> Sizes {
        Sizes { latent: Some([queries, rank, still, value]), ..self }
    }

    const fn with_experts(self, n: usize, chosen: usize, intermediate: usize) -> Sizes {
        Sizes { experts: Some([n, chosen, intermediate]), ..self }
    }

    const fn with_shared(self, intermediate: usize) -> Sizes {
        Sizes { shared: Some(intermediate), ..self }
    }

    /// A window in all layers.
    const fn with_windows(self, positions: usize) -> Sizes {
        self.with_windows_but(usize::MAX, positions)
    }

    /// A window in all layers but each `pattern`th.
    const fn with_windows_but(self, pattern: usize, positions: usize) -> Sizes {
        Sizes { window: Some((positions, pattern)), ..self }
    }

    const fn with_query_scalar(self, scalar: usize) -> Sizes {
        Sizes { query_scalar: Some(scalar), ..self }
    }

    const fn with_values(self, heads: usize) -> Sizes {
        Sizes { values: Some(heads), ..self }
    }

    /// `layer_types` and `sliding_window`.
    fn windows(&self) -> (Vec<&'static str>, Value) {
        let pattern = self.window.map_or(1, |(_, pattern)| pattern);
        let kind = |layer: usize| if layer.is_multiple_of(pattern) { "full_attention" } else { "sliding_attention" };
        ((1..=self.layers).map(kind).collect(), self.window.map_or(Value::Null, |(positions, _)| positions.into()))
    }
}

/// The config.json of a preset.
pub fn preset_config(name: &str) -> Result<Value, ModelError> {
    use Architecture::{
        Afmoe, DeepseekV2, DeepseekV3, Ernie45, Exaone4, Gemma3, Gemma4, Glm4, Glm4Moe, Glm4MoeLite, GptOss, Granite,
        GraniteMoe, GraniteMoeHybrid, GraniteMoeShared, GraniteSwa, HunyuanDense, HunyuanMoe, Lfm2, Lfm2Moe, Lfm3,
        Llama, Mellum, MiniCpm3, MiniMaxM2, Ministral3, Mistral, Mixtral, Olmo2, Olmo3, Olmoe, Phi3, Qwen2, Qwen2Moe,
        Qwen3, Qwen3Moe, Qwen3Next, Qwen35, Qwen35Moe, SeedOss, SmolLm3, Youtu,
    };
    const QWEN_VOCAB: usize = 151_936;
    const QWEN_VOCAB_2: usize = 248_320;
    const LLAMA_VOCAB: usize = 128_256;
    const GEMMA_VOCAB: usize = 262_144;
    // Of those that see, too.
    const GEMMA_VOCAB_2: usize = 262_208;
    #[rustfmt::skip]
    let rows = [
        //                                     vocab        hidden inter. layers heads     dim  tied   context   theta  factor
        ("qwen3-110m",        Qwen3,   sizes(32_000,      768,  2048,  12, (12, 4),  64, true,   40_960, 1e6, None)),
        ("qwen3-0.6b",        Qwen3,   sizes(QWEN_VOCAB,  1024, 3072,  28, (16, 8), 128, true,   40_960, 1e6, None)),
        ("qwen3-1.7b",        Qwen3,   sizes(QWEN_VOCAB,  2048, 6144,  28, (16, 8), 128, true,   40_960, 1e6, None)),
        ("qwen3-4b",          Qwen3,   sizes(QWEN_VOCAB,  2560, 9728,  36, (32, 8), 128, true,   40_960, 1e6, None)),
        ("qwen3-8b",          Qwen3,   sizes(QWEN_VOCAB,  4096, 12288, 36, (32, 8), 128, false,  40_960, 1e6, None)),
        ("qwen3-14b",         Qwen3,   sizes(QWEN_VOCAB,  5120, 17408, 40, (40, 8), 128, false,  40_960, 1e6, None)),
        ("qwen3-32b",         Qwen3,   sizes(QWEN_VOCAB,  5120, 25600, 64, (64, 8), 128, false,  40_960, 1e6, None)),
        ("qwen3-30b-a3b",     Qwen3Moe, sizes(QWEN_VOCAB, 2048, 6144,  48, (32, 4), 128, false,  40_960, 1e6, None)
            .with_experts(128, 8, 768)),
        ("qwen2.5-0.5b",      Qwen2,   sizes(QWEN_VOCAB,  896,  4864,  24, (14, 2),  64, true,   32_768, 1e6, None)),
        ("qwen1.5-moe-a2.7b", Qwen2Moe, sizes(QWEN_VOCAB, 2048, 5632,  24, (16, 16), 128, false,  8_192, 1e6, None)
            .with_experts(60, 4, 1408).with_shared(5632)),
        ("llama-3.2-1b",      Llama,   sizes(LLAMA_VOCAB, 2048, 8192,  16, (32, 8),  64, true,  131_072, 5e5, Some(32.0))),
        ("llama-3.2-3b",      Llama,   sizes(LLAMA_VOCAB, 3072, 8192,  28, (24, 8), 128, true,  131_072, 5e5, Some(32.0))),
        ("llama-3.1-8b",      Llama,   sizes(LLAMA_VOCAB, 4096, 14336, 32, (32, 8), 128, false, 131_072, 5e5, Some(8.0))),
        ("mistral-7b",        Mistral, sizes(32_768,      4096, 14336, 32, (32, 8), 128, false,  32_768, 1e6, None)),
        ("mistral-small-24b", Mistral, sizes(131_072,     5120, 32768, 40, (32, 8), 128, false,  32_768, 1e8, None)),
        ("ministral-3-8b",    Ministral3, sizes(131_072,  4096, 14336, 34, (32, 8), 128, false, 262_144, 1e6, None)),
        ("mixtral-8x7b",      Mixtral, sizes(32_000,      4096, 14336, 32, (32, 8), 128, false,  32_768, 1e6, None)
            .with_experts(8, 2, 14336)),
        ("gemma-3-270m",      Gemma3,  sizes(GEMMA_VOCAB,   640,  2048, 18, (4, 1),  256, true,   32_768, 1e6, None)
            .with_windows_but(6, 512)),
        ("gemma-3-1b",        Gemma3,  sizes(GEMMA_VOCAB,   1152, 6912, 26, (4, 1),  256, true,   32_768, 1e6, None)
            .with_windows_but(6, 512)),
        ("gemma-3-4b",        Gemma3,  sizes(GEMMA_VOCAB_2, 2560, 10240, 34, (8, 4), 256, true,  131_072, 1e6, None)
            .with_windows_but(6, 1024)),
        ("gemma-3-12b",       Gemma3,  sizes(GEMMA_VOCAB_2, 3840, 15360, 48, (16, 8), 256, true, 131_072, 1e6, None)
            .with_windows_but(6, 1024)),
        ("gemma-3-27b",       Gemma3,  sizes(GEMMA_VOCAB_2, 5376, 21504, 62, (32, 16), 128, true, 131_072, 1e6, None)
            .with_windows_but(6, 1024).with_query_scalar(168)),
        ("gemma-4-e2b",       Gemma4,  sizes(GEMMA_VOCAB,   1536, 6144, 35, (8, 1),  256, true,  131_072, 1e6, None)
            .with_windows_but(5, 512).with_gemma4(512, 0, 20, 256)),
        ("gemma-4-e4b",       Gemma4,  sizes(GEMMA_VOCAB,   2560, 10240, 42, (8, 2), 256, true,  131_072, 1e6, None)
            .with_windows_but(6, 512).with_gemma4(512, 0, 18, 256)),
        ("gemma-4-26b-a4b",   Gemma4,  sizes(GEMMA_VOCAB,   2816, 2112, 30, (16, 8), 256, true,  262_144, 1e6, None)
            .with_experts(128, 8, 704).with_windows_but(6, 1024).with_gemma4(512, 2, 0, 0)),
        ("gemma-4-31b",       Gemma4,  sizes(GEMMA_VOCAB,   5376, 21504, 60, (32, 16), 256, true, 262_144, 1e6, None)
            .with_windows_but(6, 1024).with_gemma4(512, 4, 0, 0)),
        ("smollm3-3b",        SmolLm3, sizes(LLAMA_VOCAB, 2048, 11008, 36, (16, 4), 128, true,   65_536, 5e6, None)),
        ("granite-3.3-2b",    Granite, sizes(49_159,      2048, 8192,  40, (32, 8),  64, true,  131_072, 1e7, None)),
        ("granite-3.1-1b-a400m", GraniteMoe, sizes(49_155, 1024, 512,  24, (16, 8),  64, true,  131_072, 1.5e6, None)
            .with_experts(32, 8, 512)),
        ("granite-4.0-micro", GraniteMoeHybrid, sizes(100_352, 2560, 8192, 40, (40, 8), 64, true, 131_072, 1e7, None)
            .with_shared(8192)),
        ("granite-4.0-h-micro", GraniteMoeHybrid, sizes(100_352, 2048, 8192, 40, (32, 8), 64, true, 131_072, 1e4, None)
            .with_shared(8192).with_values(64)),
        ("seed-oss-36b",      SeedOss, sizes(155_136,     5120, 27648, 64, (80, 8), 128, false, 524_288, 1e7, None)),
        ("olmoe-1b-7b",       Olmoe,   sizes(50_304,      2048, 1024,  16, (16, 16), 128, false,  4_096, 1e4, None)
            .with_experts(64, 8, 1024)),
        ("phi-3-mini",        Phi3,    sizes(32_064,      3072, 8192,  32, (32, 32), 96, false,   4_096, 1e4, None)
            .with_windows(2047)),
        ("phi-4",             Phi3,    sizes(100_352,     5120, 17920, 40, (40, 10), 128, false, 16_384, 2.5e5, None)),
        ("olmo-2-1b",         Olmo2,   sizes(100_352,     2048, 8192,  16, (16, 16), 128, false,  4_096, 5e5, None)),
        ("olmo-2-7b",         Olmo2,   sizes(100_352,     4096, 11008, 32, (32, 32), 128, false,  4_096, 5e5, None)),
        ("olmo-3-7b",         Olmo3,   sizes(100_278,     4096, 11008, 32, (32, 32), 128, false, 65_536, 5e5, None)
            .with_windows_but(4, 4096)),
        ("exaone-4-1.2b",     Exaone4, sizes(102_400,     2048, 4096,  30, (32, 8),  64, true,   65_536, 1e6, Some(16.0))),
        ("exaone-4-32b",      Exaone4, sizes(102_400,     5120, 27392, 64, (40, 8), 128, false, 131_072, 1e6, Some(16.0))
            .with_windows_but(4, 4096)),
        ("qwen3.5-0.8b",      Qwen35,  sizes(QWEN_VOCAB_2, 1024, 3584, 24, (8, 2),  256, true,  262_144, 1e7, None)
            .with_values(16)),
        ("qwen3.5-2b",        Qwen35,  sizes(QWEN_VOCAB_2, 2048, 6144, 24, (8, 2),  256, true,  262_144, 1e7, None)
            .with_values(16)),
        ("qwen3.5-9b",        Qwen35,  sizes(QWEN_VOCAB_2, 4096, 12288, 32, (16, 4), 256, false, 262_144, 1e7, None)
            .with_values(32)),
        ("qwen3.5-35b-a3b",   Qwen35Moe, sizes(QWEN_VOCAB_2, 2048, 512, 40, (16, 2), 256, false, 262_144, 1e7, None)
            .with_values(32).with_experts(256, 8, 512).with_shared(512)),
        ("qwen3-next-80b-a3b", Qwen3Next, sizes(QWEN_VOCAB, 2048, 5120, 48, (16, 2), 256, false, 262_144, 1e7, None)
            .with_values(32).with_experts(512, 10, 512).with_shared(512)),
        ("glm-4-9b",          Glm4,    sizes(151_552,     4096, 13696, 40, (32, 2), 128, false,  32_768, 1e4, None)),
        ("glm-4-32b",         Glm4,    sizes(151_552,     6144, 23040, 61, (48, 2), 128, false,  32_768, 1e4, None)),
        ("ernie-4.5-0.3b",    Ernie45, sizes(103_424,     1024, 3072,  18, (16, 2), 128, true,  131_072, 5e5, None)),
        ("lfm2-1.2b",         Lfm2,    sizes(65_536,      2048, 8192,  16, (32, 8),  64, true,  128_000, 1e6, None)),
        ("lfm2-8b-a1b",       Lfm2Moe, sizes(65_536,      2048, 7168,  24, (32, 8),  64, true,  128_000, 1e6, None)
            .with_experts(32, 4, 1792)),
        ("lfm3-1.7b",         Lfm3,    sizes(128_000,     2048, 7680,  24, (16, 4), 128, true,   32_768, 1e6, None)
            .with_windows(256)),
        ("mellum-2-12b",      Mellum,  sizes(98_304,      2304, 7168,  28, (32, 4), 128, false, 131_072, 5e5, None)
            .with_experts(64, 8, 896).with_windows_but(4, 1024)),
        ("granite-swash-2b",  GraniteSwa, sizes(100_352,  2560, 8192,  24, (20, 4), 128, true,    8_192, 1e4, None)
            .with_windows(128)),
        ("glm-4.5-air",       Glm4Moe, sizes(151_552,     4096, 10944, 46, (96, 8), 128, false, 131_072, 1e6, None)
            .with_experts(128, 8, 1408)),
        ("glm-4.7-flash",     Glm4MoeLite, sizes(154_880, 2048, 10240, 47, (20, 20), 64, false, 202_752, 1e6, None)
            .with_experts(64, 4, 1536).with_latent(768, 512, 192, 256)),
        ("deepseek-v2-lite",  DeepseekV2, sizes(102_400,  2048, 10944, 27, (16, 16), 64, false, 163_840, 1e4, None)
            .with_experts(64, 6, 1408).with_latent(0, 512, 128, 128)),
        ("moonlight-16b-a3b", DeepseekV3, sizes(163_840,  2048, 11264, 27, (16, 16), 64, false,   8_192, 5e4, None)
            .with_experts(64, 6, 1408).with_latent(0, 512, 128, 128)),
        ("youtu-llm-2b",      Youtu,   sizes(LLAMA_VOCAB, 2048, 6144,  32, (16, 16), 64, true,  131_072, 1.6e6, None)
            .with_latent(1536, 512, 128, 128)),
        ("minicpm3-4b",       MiniCpm3, sizes(73_448,     2560, 6400,  62, (40, 40), 32, true,   32_768, 1e4, None)
            .with_latent(768, 256, 64, 64)),
        ("hunyuan-a13b",      HunyuanMoe, sizes(128_167,  4096, 3072,  32, (32, 8), 128, true,   32_768, 1e4, None)
            .with_experts(64, 8, 3072)),
        ("minimax-m2",        MiniMaxM2, sizes(200_064,   3072, 1536,  62, (48, 8), 128, false, 196_608, 5e6, None)
            .with_experts(256, 8, 1536)),
        ("gpt-oss-20b",       GptOss,  sizes(201_088,     2880, 2880,  24, (64, 8),  64, false, 131_072, 1.5e5, None)
            .with_experts(32, 4, 2880).with_windows_but(2, 128)),
        ("gpt-oss-120b",      GptOss,  sizes(201_088,     2880, 2880,  36, (64, 8),  64, false, 131_072, 1.5e5, None)
            .with_experts(128, 4, 2880).with_windows_but(2, 128)),
        ("tiny-qwen3",        Qwen3,   sizes(1024,        256,  768,    3, (8, 4),   64, true,    4_096, 1e6, None)),
        ("tiny-qwen3-moe",    Qwen3Moe, sizes(1024,       128,  256,    3, (4, 2),   32, true,    4_096, 1e6, None)
            .with_experts(8, 3, 64)),
        ("tiny-qwen2",        Qwen2,   sizes(1024,        192,  512,    2, (6, 2),   32, true,    4_096, 1e4, None)),
        ("tiny-qwen2-moe",    Qwen2Moe, sizes(1024,        96,  208,    3, (6, 2),   16, false,   4_096, 1e4, None)
            .with_experts(6, 2, 48).with_shared(80)),
        ("tiny-llama",        Llama,   sizes(1024,        256,  640,    2, (8, 2),   32, false,   8_192, 5e5, Some(8.0))),
        ("tiny-mistral",      Mistral, sizes(1024,        128,  384,    2, (4, 2),   32, false,   4_096, 1e4, None)
            .with_windows(12)),
        ("tiny-ministral3",   Ministral3, sizes(1024,      96,  208,    2, (4, 2),   32, false,   4_096, 1e4, None)),
        ("tiny-mixtral",      Mixtral, sizes(1024,         96,   80,    2, (6, 2),   16, false,   4_096, 1e6, None)
            .with_experts(4, 2, 80)),
        ("tiny-gemma3",       Gemma3,  sizes(1024,         96,  208,    3, (4, 2),   40, true,    4_096, 1e6, None)
            .with_windows_but(2, 12).with_query_scalar(64)),
        ("tiny-gemma4",       Gemma4,  sizes(1024,         96,  208,    5, (4, 2),   24, true,    4_096, 1e6, None)
            .with_windows_but(2, 12).with_gemma4(40, 0, 3, 24)),
        ("tiny-gemma4-moe",   Gemma4,  sizes(1024,         96,  104,    3, (4, 2),   24, true,    4_096, 1e6, None)
            .with_experts(8, 3, 48).with_windows_but(2, 12).with_gemma4(40, 1, 0, 0)),
        ("tiny-smollm3",      SmolLm3, sizes(1024,         96,  208,    4, (6, 2),   16, true,    4_096, 2e6, None)),
        ("tiny-granite",      Granite, sizes(1024,         96,  208,    2, (6, 2),   16, true,    4_096, 1e4, None)),
        ("tiny-granitemoe",   GraniteMoe, sizes(1024,      96,   80,    2, (6, 2),   16, true,    4_096, 1e4, None)
            .with_experts(8, 3, 80)),
        ("tiny-granitemoeshared", GraniteMoeShared, sizes(1024, 96, 80, 2, (6, 2),   16, true,    4_096, 1e4, None)
            .with_experts(8, 3, 80).with_shared(48)),
        ("tiny-granite4",     GraniteMoeHybrid, sizes(1024, 96,  208,   2, (6, 2),   16, true,    4_096, 1e4, None)
            .with_shared(208)),
        ("tiny-granite4-h",   GraniteMoeHybrid, sizes(1024, 96, 208,    3, (6, 2),   16, true,    4_096, 1e4, None)
            .with_shared(208).with_values(6)),
        ("tiny-seed-oss",     SeedOss, sizes(1024,         96,  208,    2, (4, 2),   32, false,   4_096, 1e4, None)),
        ("tiny-olmoe",        Olmoe,   sizes(1024,         96,   80,    2, (4, 2),   24, false,   4_096, 1e4, None)
            .with_experts(8, 3, 80)),
        ("tiny-phi3",         Phi3,    sizes(1024,         128,  208,    2, (4, 2),   32, false,      64, 1e4, None)),
        ("tiny-olmo2",        Olmo2,   sizes(1024,         96,  208,    2, (4, 2),   24, false,   4_096, 5e5, None)),
        ("tiny-olmo3",        Olmo3,   sizes(1024,         96,  208,    4, (4, 2),   24, true,    4_096, 5e5, None)
            .with_windows_but(2, 12)),
        ("tiny-exaone4",      Exaone4, sizes(1024,         96,  208,    4, (6, 2),   16, true,    4_096, 1e6, Some(16.0))
            .with_windows_but(2, 12)),
        ("tiny-qwen3.5",      Qwen35,  sizes(1024,         96,  208,    4, (4, 2),   32, true,    4_096, 1e6, None)
            .with_values(4)),
        ("tiny-qwen3.5-moe",  Qwen35Moe, sizes(1024,       96,   48,    2, (4, 2),   32, true,    4_096, 1e6, None)
            .with_values(4).with_experts(8, 2, 48).with_shared(80)),
        ("tiny-qwen3-next",   Qwen3Next, sizes(1024,       96,  208,    2, (4, 2),   32, false,   4_096, 1e6, None)
            .with_values(4).with_experts(8, 2, 48).with_shared(80)),
        ("tiny-glm4",         Glm4,    sizes(1024,         96,  208,    2, (6, 2),   16, false,   4_096, 1e4, None)),
        ("tiny-ernie4.5",     Ernie45, sizes(1024,         96,  208,    2, (6, 2),   16, true,    4_096, 5e5, None)),
        ("tiny-lfm2",         Lfm2,    sizes(1024,         96,  208,    3, (6, 2),   16, true,    4_096, 1e6, None)),
        ("tiny-lfm2-moe",     Lfm2Moe, sizes(1024,         96,  208,    3, (6, 2),   16, true,    4_096, 1e6, None)
            .with_experts(8, 3, 48)),
        ("tiny-lfm3",         Lfm3,    sizes(1024,         96,  208,    5, (6, 2),   16, true,    4_096, 1e6, None)
            .with_windows(12)),
        ("tiny-trinity",      Afmoe,   sizes(1024,         96,  208,    3, (6, 2),   16, false,   4_096, 1e4, None)
            .with_experts(8, 3, 48).with_windows_but(2, 12)),
        ("tiny-mellum",       Mellum,  sizes(1024,         96,  208,    3, (6, 2),   16, false,   4_096, 5e5, None)
            .with_experts(8, 3, 48).with_windows_but(2, 12)),
        ("tiny-granite-swash", GraniteSwa, sizes(1024,     96,  208,    5, (6, 2),   16, true,    4_096, 1e4, None)
            .with_windows(12)),
        ("tiny-glm4-moe",     Glm4Moe, sizes(1024,         96,  208,    3, (6, 2),   16, false,   4_096, 1e6, None)
            .with_experts(7, 2, 48)),
        ("tiny-glm4-moe-lite", Glm4MoeLite, sizes(1024,    96,  208,    3, (6, 6),   16, false,   4_096, 1e6, None)
            .with_experts(7, 2, 48).with_latent(40, 48, 24, 20)),
        ("tiny-deepseek-v2",  DeepseekV2, sizes(1024,      96,  208,    2, (4, 4),   16, false,   4_096, 1e4, None)
            .with_experts(6, 2, 48).with_latent(0, 48, 24, 32)),
        ("tiny-minicpm3",     MiniCpm3, sizes(1024,        96,  208,    2, (4, 4),   16, true,    4_096, 1e4, None)
            .with_latent(0, 80, 24, 32)),
        ("tiny-hunyuan",      HunyuanDense, sizes(1024,    96,  208,    2, (6, 2),   16, true,    4_096, 1e4, None)),
        ("tiny-minimax-m2",   MiniMaxM2, sizes(1024,       96,   48,    2, (6, 2),   16, false,   4_096, 5e6, None)
            .with_experts(8, 3, 48)),
        ("tiny-gpt-oss",      GptOss,  sizes(1024,         96,   64,    2, (8, 2),   16, false,   4_096, 1.5e5, None)
            .with_experts(8, 3, 64).with_windows_but(2, 12)),
        // No size here is a multiple of what a vector, a tile or a page holds.
        ("tiny-odd",          Qwen3,   sizes(1009,        100,  273,    3, (5, 1),   20, false,   1_000, 1e4, None)),
        // The same, and small enough for a simulated GPU in a debug build.
        ("tiny-simt",         Qwen3,   sizes(269,          40,   54,    1, (4, 2),   12, true,       64, 1e4, None)),
        // Tiny but for one row, which a GPU has no shared memory for, and for heads as large models have them.
        ("tiny-long",         Qwen3,   sizes(269,         512,  9088,   1, (4, 2),  128, true,      256, 1e4, None)),
        // Likewise of the row that all products read, and with a row that it has no registers for either.
        ("tiny-large",        Qwen3,   sizes(269,        4104,   272,  1, (2, 1),  128, true,      256, 1e4, None)),
        ("tiny-longest",      Qwen3,   sizes(269,         264, 14600,  1, (2, 1),  128, true,      256, 1e4, None)),
    ];
    let modern = match name {
        "modernbert-base" => Some([50_368, 768, 1152, 22, 12, 8192, 128]),
        "modernbert-large" => Some([50_368, 1024, 2624, 28, 16, 8192, 128]),
        "tiny-modernbert" => Some([1024, 96, 144, 4, 6, 128, 8]),
        _ => None,
    };
    if let Some([vocab, hidden, intermediate, layers, heads, context, window]) = modern {
        return Ok(json!({
            "architectures": ["ModernBertModel"], "model_type": "modernbert", "vocab_size": vocab, "hidden_size": hidden,
            "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
            "max_position_embeddings": context, "local_attention": window, "global_attn_every_n_layers": 3,
            "global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0, "hidden_activation": "gelu", "norm_eps": 1e-5,
            "norm_bias": false, "attention_bias": false, "mlp_bias": false, "pad_token_id": 0, "dtype": "bfloat16",
        }));
    }
    if name == "tiny-bert" {
        return Ok(json!({
            "architectures": ["BertModel"], "model_type": "bert", "vocab_size": 1024, "hidden_size": 96,
            "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 6, "hidden_act": "gelu",
            "layer_norm_eps": 1e-12, "max_position_embeddings": 128, "type_vocab_size": 2, "pad_token_id": 0,
            "position_embedding_type": "absolute", "dtype": "bfloat16",
        }));
    }
    let Some((_, architecture, sizes)) = rows.into_iter().find(|(row, ..)| *row == name) else {
        return Err(ModelError::Preset { given: name.to_owned(), known: PRESETS.to_vec() });
    };
    Ok(decoder_json(architecture, &Sizes { is_tiny: name.starts_with("tiny-"), ..sizes }))
}

#[allow(clippy::too_many_arguments)] // a table's row
const fn sizes(
    vocab: usize,
    hidden: usize,
    intermediate: usize,
    layers: usize,
    heads: (usize, usize),
    head_dim: usize,
    tied: bool,
    context: usize,
    theta: f64,
    llama3_factor: Option<f64>,
) -> Sizes {
    Sizes {
        vocab,
        hidden,
        intermediate,
        layers,
        heads,
        head_dim,
        tied,
        context,
        theta,
        llama3_factor,
        experts: None,
        shared: None,
        window: None,
        query_scalar: None,
        values: None,
        gemma4: Gemma4Sizes { global_dim: 0, global_kv_heads: 0, shared: 0, layer_input: 0 },
        latent: None,
        is_tiny: false,
    }
}

fn decoder_json(architecture: Architecture, s: &Sizes) -> Value {
    let mut rope = json!({ "rope_theta": s.theta, "rope_type": "default" });
    if let Some(factor) = s.llama3_factor {
        rope = json!({
            "factor": factor, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192.min(s.context / 8), "rope_theta": s.theta, "rope_type": "llama3",
        });
    }
    use Architecture::{
        DeepseekV3, Exaone4, Glm4MoeLite, GptOss, Granite, GraniteMoeHybrid, HunyuanDense, HunyuanMoe, Llama, MiniCpm3,
        Ministral3, Mistral, Mixtral, Olmoe, Phi3,
    };
    let has_larger_eps = matches!(
        architecture,
        GptOss
            | Llama
            | Mistral
            | Ministral3
            | Mixtral
            | Granite
            | GraniteMoeHybrid
            | Olmoe
            | Phi3
            | Exaone4
            | Glm4MoeLite
            | MiniCpm3
            | DeepseekV3
            | HunyuanDense
            | HunyuanMoe
    );
    let eps = if has_larger_eps { 1e-5 } else { 1e-6 };
    let mut config = json!({
        "architectures": [architecture.class_name()],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "bos_token_id": null,
        "dtype": "bfloat16",
        "eos_token_id": END,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "initializer_range": 0.02,
        "intermediate_size": s.intermediate,
        "max_position_embeddings": s.context,
        "model_type": architecture.model_type(),
        "num_attention_heads": s.heads.0,
        "num_hidden_layers": s.layers,
        "num_key_value_heads": s.heads.1,
        "rms_norm_eps": eps,
        "rope_parameters": rope.clone(),
        "tie_word_embeddings": s.tied,
        "use_cache": true,
        "vocab_size": s.vocab,
    });
    // Each family's own keys, present in its files and in no other's.
    match (architecture, &mut config) {
        (
            Architecture::Qwen2 | Architecture::Qwen2Moe | Architecture::Qwen3 | Architecture::Qwen3Moe,
            Value::Object(map),
        ) => {
            if matches!(architecture, Architecture::Qwen2 | Architecture::Qwen2Moe) {
                map.shift_remove("attention_bias");
                map.shift_remove("head_dim");
            }
            map.insert("sliding_window".into(), Value::Null);
            map.insert("use_sliding_window".into(), false.into());
        }
        (Architecture::Mistral, Value::Object(map)) => {
            map.shift_remove("attention_bias");
            map.insert("sliding_window".into(), s.windows().1);
        }
        (Architecture::Mixtral, Value::Object(map)) => {
            map.shift_remove("attention_bias");
            map.insert("sliding_window".into(), Value::Null);
        }
        (Architecture::Ministral3, Value::Object(map)) => {
            map.shift_remove("attention_bias");
            map.insert("sliding_window".into(), Value::Null);
            let rope = json!({
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": s.context / 16, "rope_theta": s.theta, "rope_type": "yarn",
            });
            map.insert("rope_parameters".into(), rope);
        }
        (Architecture::Qwen35 | Architecture::Qwen35Moe | Architecture::Qwen3Next, Value::Object(map)) => {
            // Of the tiny ones every second layer attends.
            let interval = if s.is_tiny { 2 } else { 4 };
            let [keys, key_dim, value_dim] = if s.is_tiny { [2, 24, 16] } else { [16, 128, 128] };
            let kind = |layer: usize| match layer.is_multiple_of(interval) {
                true => "full_attention",
                false => "linear_attention",
            };
            map.insert("full_attention_interval".into(), interval.into());
            map.insert("layer_types".into(), (1..=s.layers).map(kind).collect());
            map.insert("linear_conv_kernel_dim".into(), 4.into());
            map.insert("linear_key_head_dim".into(), key_dim.into());
            map.insert("linear_num_key_heads".into(), keys.into());
            map.insert("linear_num_value_heads".into(), s.values.into());
            map.insert("linear_value_head_dim".into(), value_dim.into());
            let rope = json!({ "partial_rotary_factor": 0.25, "rope_theta": s.theta, "rope_type": "default" });
            map.insert("rope_parameters".into(), rope);
            if architecture == Architecture::Qwen35Moe {
                map.shift_remove("intermediate_size");
            }
        }
        (Architecture::Lfm2 | Architecture::Lfm2Moe, Value::Object(map)) => {
            let attending: &[usize] = match (s.is_tiny, architecture) {
                (true, _) => &[1],
                (false, Architecture::Lfm2) => &[2, 5, 8, 10, 12, 14],
                (false, _) => &[2, 6, 10, 14, 18, 21],
            };
            let kind = |layer: usize| if attending.contains(&layer) { "full_attention" } else { "conv" };
            for key in ["attention_bias", "head_dim", "hidden_act", "rms_norm_eps"] {
                map.shift_remove(key);
            }
            if architecture == Architecture::Lfm2 {
                map.insert("block_auto_adjust_ff_dim".into(), false.into());
            } else {
                map.insert("norm_topk_prob".into(), true.into());
                map.insert("num_dense_layers".into(), if s.is_tiny { 1 } else { 2 }.into());
                map.insert("routed_scaling_factor".into(), 1.0.into());
                map.insert("use_expert_bias".into(), true.into());
            }
            map.insert("conv_L_cache".into(), 3.into());
            map.insert("conv_bias".into(), false.into());
            map.insert("layer_types".into(), (0..s.layers).map(kind).collect());
            map.insert("norm_eps".into(), 1e-5.into());
        }
        (Architecture::Lfm3, Value::Object(map)) => {
            let kind = |layer: usize| match layer % 4 {
                2 => "full_attention",
                0 if layer > 0 => "sliding_attention",
                _ => "conv",
            };
            for key in ["hidden_act", "rms_norm_eps"] {
                map.shift_remove(key);
            }
            map.insert("conv_L_cache".into(), 7.into());
            map.insert("conv_bias".into(), false.into());
            map.insert("layer_types".into(), (0..s.layers).map(kind).collect());
            map.insert("norm_eps".into(), 1e-5.into());
            let full = json!({ "partial_rotary_factor": 0.5, "rope_theta": s.theta, "rope_type": "proportional" });
            let sliding = json!({ "rope_theta": 1e4, "rope_type": "default" });
            map.insert("rope_parameters".into(), json!({ "full_attention": full, "sliding_attention": sliding }));
            map.insert("sliding_window".into(), s.windows().1);
            map.insert("use_attention_gate".into(), true.into());
            map.insert("use_sandwich_norm".into(), true.into());
        }
        (Architecture::Mellum, Value::Object(map)) => {
            let (types, window) = s.windows();
            map.insert("layer_types".into(), types.into());
            map.insert("norm_topk_prob".into(), true.into());
            let sliding = json!({ "rope_theta": 1e4, "rope_type": "default" });
            map.insert("rope_parameters".into(), json!({ "full_attention": rope, "sliding_attention": sliding }));
            map.insert("sliding_window".into(), window);
        }
        (Architecture::Afmoe, Value::Object(map)) => {
            let (types, window) = s.windows();
            map.insert("layer_types".into(), types.into());
            map.insert("mup_enabled".into(), true.into());
            map.insert("num_dense_layers".into(), 1.into());
            map.insert("num_shared_experts".into(), 1.into());
            map.insert("route_scale".into(), 2.5.into());
            map.insert("sliding_window".into(), window);
        }
        (Architecture::Glm4Moe, Value::Object(map)) => {
            map.insert("attention_bias".into(), true.into());
            map.insert("first_k_dense_replace".into(), 1.into());
            map.insert("n_group".into(), 1.into());
            map.insert("n_shared_experts".into(), 1.into());
            map.insert("norm_topk_prob".into(), true.into());
            map.insert("num_nextn_predict_layers".into(), 0.into());
            map.insert("partial_rotary_factor".into(), 0.5.into());
            // The tiny one is as the larger ones, which all have norms on heads.
            map.insert("routed_scaling_factor".into(), if s.is_tiny { 2.5 } else { 1.0 }.into());
            map.insert("topk_group".into(), 1.into());
            map.insert("use_qk_norm".into(), s.is_tiny.into());
        }
        (Architecture::DeepseekV2 | Architecture::DeepseekV3 | Architecture::Glm4MoeLite, Value::Object(map)) => {
            let is_v2 = architecture == Architecture::DeepseekV2;
            map.insert("first_k_dense_replace".into(), 1.into());
            map.insert("n_group".into(), 1.into());
            map.insert("n_shared_experts".into(), if architecture == Architecture::Glm4MoeLite { 1 } else { 2 }.into());
            map.insert("norm_topk_prob".into(), (!is_v2).into());
            let factor = match architecture {
                Architecture::DeepseekV2 => 1.0,
                Architecture::DeepseekV3 => 2.446,
                _ => 1.8,
            };
            map.insert("routed_scaling_factor".into(), factor.into());
            map.insert("topk_group".into(), 1.into());
            if is_v2 {
                map.insert("topk_method".into(), "greedy".into());
                let rope = json!({
                    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                    "original_max_position_embeddings": s.context / 40, "rope_theta": s.theta, "rope_type": "yarn",
                });
                map.insert("rope_parameters".into(), rope);
            }
        }
        (Architecture::MiniCpm3, Value::Object(map)) => {
            map.insert("dim_model_base".into(), if s.is_tiny { 32 } else { 256 }.into());
            map.insert("scale_depth".into(), 1.4.into());
            map.insert("scale_emb".into(), 12.into());
            // Numbers of its own for each pair.
            let divisors = |step: f64| (0..s.head_dim / 2).map(|i| 1.0 + step * i as f64).collect::<Vec<_>>();
            rope = json!({
                "long_factor": divisors(0.25), "original_max_position_embeddings": s.context, "rope_theta": s.theta,
                "rope_type": "longrope", "short_factor": divisors(0.25),
            });
            map.insert("rope_parameters".into(), rope);
        }
        (Architecture::Youtu, Value::Object(_)) => {}
        (Architecture::HunyuanDense | Architecture::HunyuanMoe, Value::Object(map)) => {
            let rope = json!({
                "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0,
                "rope_theta": s.theta, "rope_type": "dynamic",
            });
            map.insert("rope_parameters".into(), rope);
        }
        (Architecture::Glm4, Value::Object(map)) => {
            // Of those with 32 billion weights no attention has biases.
            map.insert("attention_bias".into(), (s.layers <= 40).into());
            map.insert("partial_rotary_factor".into(), 0.5.into());
        }
        (Architecture::Ernie45, Value::Object(map)) => {
            map.shift_remove("attention_bias");
            map.insert("use_bias".into(), false.into());
        }
        (Architecture::MiniMaxM2, Value::Object(map)) => {
            map.shift_remove("attention_bias");
            map.insert("rotary_dim".into(), (s.head_dim / 2).into());
        }
        (Architecture::GptOss, Value::Object(map)) => {
            map.insert("attention_bias".into(), true.into());
            let (types, window) = s.windows();
            map.insert("layer_types".into(), types.into());
            map.insert("sliding_window".into(), window);
            map.insert("swiglu_limit".into(), 7.0.into());
            let rope = json!({
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": s.context / 32,
                "rope_theta": s.theta, "rope_type": "yarn", "truncate": false,
            });
            map.insert("rope_parameters".into(), rope);
            let all_but_experts =
                ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"];
            let quantization = json!({ "modules_to_not_convert": all_but_experts, "quant_method": "mxfp4" });
            map.insert("quantization_config".into(), quantization);
        }
        (Architecture::SeedOss, Value::Object(map)) => {
            map.insert("attention_bias".into(), true.into());
            map.insert("attention_out_bias".into(), false.into());
            map.insert("mlp_bias".into(), false.into());
        }
        (Architecture::Gemma3, Value::Object(map)) => {
            map.shift_remove("hidden_act");
            map.insert("hidden_activation".into(), "gelu_pytorch_tanh".into());
            map.insert("query_pre_attn_scalar".into(), s.query_scalar.unwrap_or(s.head_dim).into());
            let (types, window) = s.windows();
            map.insert("sliding_window".into(), window);
            map.insert("layer_types".into(), types.into());
            let mut full = rope;
            // Stretched for contexts eight times those of the first training.
            if s.context > 100_000 {
                full = json!({ "factor": 8.0, "rope_theta": s.theta, "rope_type": "linear" });
            }
            let sliding = json!({ "rope_theta": 1e4, "rope_type": "default" });
            map.insert("rope_parameters".into(), json!({ "full_attention": full, "sliding_attention": sliding }));
        }
        (Architecture::Gemma4, Value::Object(map)) => {
            map.shift_remove("hidden_act");
            map.insert("hidden_activation".into(), "gelu_pytorch_tanh".into());
            let (types, window) = s.windows();
            map.insert("sliding_window".into(), window);
            map.insert("layer_types".into(), types.into());
            let full = json!({ "partial_rotary_factor": 0.25, "rope_theta": s.theta, "rope_type": "proportional" });
            let sliding = json!({ "rope_theta": 1e4, "rope_type": "default" });
            map.insert("rope_parameters".into(), json!({ "full_attention": full, "sliding_attention": sliding }));
            let Gemma4Sizes { global_dim, global_kv_heads, shared, layer_input } = s.gemma4;
            map.insert("global_head_dim".into(), global_dim.into());
            let global_kv_heads = Some(global_kv_heads).filter(|n| *n > 0);
            map.insert("num_global_key_value_heads".into(), json!(global_kv_heads));
            map.insert("attention_k_eq_v".into(), global_kv_heads.is_some().into());
            map.insert("num_kv_shared_layers".into(), shared.into());
            // Those of E2B.
            map.insert("use_double_wide_mlp".into(), (2 * shared > s.layers).into());
            map.insert("hidden_size_per_layer_input".into(), layer_input.into());
            map.insert("vocab_size_per_layer_input".into(), s.vocab.into());
            map.insert("final_logit_softcapping".into(), 30.0.into());
            map.insert("enable_moe_block".into(), s.experts.is_some().into());
        }
        (Architecture::SmolLm3, Value::Object(map)) => {
            map.insert("mlp_bias".into(), false.into());
            map.insert("no_rope_layer_interval".into(), if s.is_tiny { 2.into() } else { 4.into() });
            map.insert("use_sliding_window".into(), false.into());
        }
        (
            Architecture::Granite
            | Architecture::GraniteMoe
            | Architecture::GraniteMoeShared
            | Architecture::GraniteMoeHybrid
            | Architecture::GraniteSwa,
            Value::Object(map),
        ) => {
            map.shift_remove("head_dim");
            let logits_scaling = match architecture {
                Architecture::Granite => 8.0,
                Architecture::GraniteMoeHybrid => 10.0,
                _ => 6.0,
            };
            if matches!(architecture, Architecture::Granite | Architecture::GraniteSwa) {
                map.insert("mlp_bias".into(), false.into());
            }
            if architecture == Architecture::GraniteSwa {
                let kind = |layer: usize| if layer.is_multiple_of(4) { "full_attention" } else { "sliding_attention" };
                map.insert("layer_types".into(), (0..s.layers).map(kind).collect());
                map.insert("sliding_window".into(), s.windows().1);
            }
            if architecture == Architecture::GraniteMoeHybrid {
                let attends = |layer: usize| match (s.values, s.is_tiny) {
                    (None, _) => true,
                    (Some(_), true) => layer == 1,
                    (Some(_), false) => layer % 10 == 5,
                };
                let kind = |layer: usize| if attends(layer) { "attention" } else { "mamba" };
                map.insert("layer_types".into(), (0..s.layers).map(kind).collect());
                map.insert("num_local_experts".into(), 0.into());
                // Where the other layers know the order, these need not.
                let positions = if s.values.is_some() { "nope" } else { "rope" };
                map.insert("position_embedding_type".into(), positions.into());
                if let Some(heads) = s.values {
                    map.insert("mamba_d_conv".into(), 4.into());
                    map.insert("mamba_d_head".into(), (2 * s.hidden / heads).into());
                    map.insert("mamba_d_state".into(), if s.is_tiny { 24 } else { 128 }.into());
                    map.insert("mamba_expand".into(), 2.into());
                    map.insert("mamba_n_groups".into(), 1.into());
                    map.insert("mamba_n_heads".into(), heads.into());
                }
            }
            map.insert("attention_multiplier".into(), (1.0 / s.head_dim as f64).into());
            map.insert("embedding_multiplier".into(), 12.0.into());
            map.insert("logits_scaling".into(), logits_scaling.into());
            map.insert("residual_multiplier".into(), 0.22.into());
        }
        (Architecture::Phi3, Value::Object(map)) => {
            map.shift_remove("attention_bias");
            map.shift_remove("head_dim");
            map.insert("sliding_window".into(), s.windows().1);
            let mut original = s.context;
            if s.is_tiny {
                // As the smaller ones of the fourth generation: a part of each head turned, by numbers of its own for
                // each pair.
                original /= 4;
                let pairs = s.head_dim * 3 / 8;
                let divisors = |step: f64| (0..pairs).map(|i| 1.0 + step * i as f64).collect::<Vec<_>>();
                rope = json!({
                    "long_factor": divisors(0.25), "partial_rotary_factor": 0.75, "rope_theta": s.theta, "rope_type": "longrope",
                    "short_factor": divisors(0.0625),
                });
                map.insert("rope_parameters".into(), rope);
            }
            map.insert("original_max_position_embeddings".into(), original.into());
        }
        (Architecture::Olmo2 | Architecture::Olmoe, Value::Object(map)) => {
            map.shift_remove("head_dim");
        }
        (Architecture::Olmo3 | Architecture::Exaone4, Value::Object(map)) => {
            let is_olmo = architecture == Architecture::Olmo3;
            map.shift_remove(if is_olmo { "head_dim" } else { "attention_bias" });
            let (types, window) = s.windows();
            map.insert("layer_types".into(), types.into());
            map.insert("sliding_window".into(), window);
            if is_olmo {
                let full = json!({
                    "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                    "original_max_position_embeddings": s.context / 8, "rope_theta": s.theta, "rope_type": "yarn",
                });
                map.insert("rope_parameters".into(), json!({ "full_attention": full, "sliding_attention": rope }));
            }
        }
        (_, Value::Object(map)) => {
            map.insert("mlp_bias".into(), false.into());
        }
        _ => {}
    }
    if let (Some([queries, rank, still, value]), Value::Object(map)) = (s.latent, &mut config) {
        map.shift_remove("head_dim");
        map.insert("kv_lora_rank".into(), rank.into());
        map.insert("q_lora_rank".into(), json!(Some(queries).filter(|n| *n > 0)));
        map.insert("qk_nope_head_dim".into(), still.into());
        map.insert("qk_rope_head_dim".into(), s.head_dim.into());
        map.insert("v_head_dim".into(), value.into());
        if architecture != Architecture::MiniCpm3 && architecture != Architecture::DeepseekV2 {
            map.insert("rope_interleave".into(), true.into());
        }
    }
    if let (Some([n, chosen, intermediate]), Value::Object(map)) = (s.experts, &mut config) {
        let key = match architecture {
            Architecture::Qwen35Moe
            | Architecture::Qwen3Next
            | Architecture::Lfm2Moe
            | Architecture::Mellum
            | Architecture::Gemma4
            | Architecture::HunyuanMoe
            | Architecture::Afmoe => "num_experts",
            Architecture::Glm4Moe | Architecture::Glm4MoeLite | Architecture::DeepseekV2 | Architecture::DeepseekV3 => {
                "n_routed_experts"
            }
            _ => "num_local_experts",
        };
        map.insert(key.into(), n.into());
        let chosen_key = match architecture {
            Architecture::Gemma4 => "top_k_experts",
            Architecture::HunyuanMoe => "moe_topk",
            _ => "num_experts_per_tok",
        };
        map.insert(chosen_key.into(), chosen.into());
        if matches!(
            architecture,
            Architecture::Qwen35Moe
                | Architecture::Lfm2Moe
                | Architecture::DeepseekV2
                | Architecture::DeepseekV3
                | Architecture::Glm4MoeLite
                | Architecture::Glm4Moe
                | Architecture::Mellum
                | Architecture::Gemma4
                | Architecture::Afmoe
        ) {
            map.insert("moe_intermediate_size".into(), intermediate.into());
        } else if matches!(architecture, Architecture::Qwen3Moe | Architecture::Qwen2Moe | Architecture::Qwen3Next) {
            map.insert("moe_intermediate_size".into(), intermediate.into());
            map.insert("decoder_sparse_step".into(), 1.into());
            // The tiny ones have an MLP of the usual kind in between.
            map.insert("mlp_only_layers".into(), if s.is_tiny { json!([1]) } else { json!([]) });
            map.insert("norm_topk_prob".into(), (architecture != Architecture::Qwen2Moe).into());
        }
    }
    if let (Some(intermediate), Value::Object(map)) = (s.shared, &mut config) {
        let is_qwen =
            matches!(architecture, Architecture::Qwen2Moe | Architecture::Qwen35Moe | Architecture::Qwen3Next);
        let key = if is_qwen { "shared_expert_intermediate_size" } else { "shared_intermediate_size" };
        map.insert(key.into(), intermediate.into());
    }
    config
}
