use proptest::prelude::*;
use serde_json::json;

use super::*;

const PATH: &str = "config.json";

fn parse(value: &Value) -> Result<ModelConfig, String> {
    ModelConfig::from_value(Path::new(PATH), value).map_err(|e| e.to_string())
}

pub(super) fn decoder_of(value: &Value) -> DecoderConfig {
    match parse(value) {
        Ok(ModelConfig::Decoder(config)) => config,
        other => panic!("{other:?}"),
    }
}

pub(super) fn llama() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024, "hidden_size": 256,
        "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
    })
}

/// `base` with keys set, be it to null.
pub(super) fn with(base: Value, change: &Value) -> Value {
    let (mut base, change) = (base.as_object().expect("an object").clone(), change.as_object().expect("an object"));
    for (key, value) in change {
        base.insert(key.clone(), value.clone());
    }
    Value::Object(base)
}

/// Those of experts that are chosen by corrected sigmoids.
fn corrected(added: f64) -> Option<Sigmoids> {
    Some(Sigmoids { are_corrected: true, added })
}

/// As most are, in no layers.
fn experts_of([n, chosen, intermediate_size]: [usize; 3], normalise: bool) -> Experts {
    let (layers, shared, limited) = (Vec::new(), None, None);
    let sigmoids = None;
    let stands_beside = false;
    Experts {
        n,
        chosen,
        intermediate_size,
        normalise,
        sigmoids,
        factor: 1.0,
        layers,
        stands_beside,
        shared,
        limited,
        is_mxfp4: false,
    }
}

#[test]
fn gpt_oss() {
    // As its published file says it, in the keys of its time.
    let published = json!({
        "architectures": ["GptOssForCausalLM"], "attention_bias": true, "eos_token_id": 200_002, "experts_per_token": 4, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880, "max_position_embeddings": 131_072,
        "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 2, "num_key_value_heads": 8,
        "num_local_experts": 32, "layer_types": ["sliding_attention", "full_attention"], "rms_norm_eps": 1e-5, "sliding_window": 128,
        "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false,
        },
        "rope_theta": 150_000, "swiglu_limit": 7.0, "tie_word_embeddings": false, "vocab_size": 201_088,
    });
    let config = decoder_of(&published);
    let limited = Some(LimitedGate { limit: 7.0, alpha: 1.702 });
    let experts = Experts { layers: vec![true; 2], limited, is_mxfp4: true, ..experts_of([32, 4, 2880], true) };
    assert_eq!(config.experts, Some(experts.clone()));
    assert_eq!((config.attention_bias, config.output_bias, config.has_sinks), (true, true, true));
    assert_eq!((&config.windows[..], config.max_position_embeddings), (&[Some(128), None][..], 131_072));
    assert!(matches!(
        config.ropes[..],
        [Rope { theta: 150_000.0, scaling: RopeScaling::Yarn { factor: 32.0, truncate: false, .. } }, _]
    ));
    let of = |change: Value| with(published.clone(), &change);
    let other = decoder_of(&of(json!({
        "quantization_config": null, "layer_types": null, "swiglu_limit": 3.0, "swiglu_alpha": 1.0, "attention_bias": false,
    })));
    let limited = Some(LimitedGate { limit: 3.0, alpha: 1.0 });
    assert_eq!(other.experts, Some(Experts { limited, is_mxfp4: false, ..experts }));
    assert_eq!((&other.windows[..], other.attention_bias), (&[Some(128), None][..], false));
    for (change, expected) in [
        (json!({ "hidden_size": 2896 }), "hidden_size: 2896, expected a multiple of 32"),
        (json!({ "intermediate_size": 100 }), "intermediate_size: 100, expected a multiple of 32"),
        (json!({ "quantization_config": {"quant_method": "fp8"} }), "quantization_config: \"fp8\""),
        (json!({ "swiglu_limit": 0.0 }), "swiglu_limit: 0.0, expected"),
        (json!({ "is_causal": false }), "is_causal: false is not supported"),
        (json!({ "rope_scaling": null }), "rope_parameters: missing, expected an object"),
        (json!({ "architectures": ["LlamaForCausalLM"] }), "quantization_config: \"mxfp4\""),
    ] {
        let error = parse(&of(change)).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn mixtures_of_experts() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let open = |name: &str| read_value(&dir.join(name).join("config.json")).expect("JSON");
    let experts = |value: &Value| decoder_of(value).experts;
    let layers = vec![true, false, true];
    let of_qwen3 = Experts { layers, ..experts_of([8, 3, 64], false) };
    assert_eq!(experts(&open("tiny-qwen3-moe")), Some(of_qwen3.clone()));
    let of_mixtral = Experts { layers: vec![true; 2], ..experts_of([4, 2, 80], true) };
    assert_eq!(experts(&open("tiny-mixtral")), Some(of_mixtral));
    let eps_of = |name: &str| decoder_of(&with(open(name), &json!({ "rms_norm_eps": null }))).rms_norm_eps;
    assert_eq!((eps_of("tiny-mixtral"), eps_of("tiny-qwen3-moe")), (1e-5, 1e-6));
    // As older files call them; every second layer; none.
    let changed = |change: Value| with(open("tiny-qwen3-moe"), &change);
    let other_name = changed(json!({ "num_local_experts": null, "num_experts": 16, "norm_topk_prob": true }));
    assert_eq!(experts(&other_name), Some(Experts { n: 16, normalise: true, ..of_qwen3.clone() }));
    let second = changed(json!({ "decoder_sparse_step": 2, "mlp_only_layers": null }));
    assert_eq!(experts(&second).map(|e| e.layers), Some(vec![false, true, false]));
    assert_eq!(experts(&changed(json!({ "num_local_experts": 0 }))), None);
    assert_eq!(experts(&changed(json!({ "decoder_sparse_step": 4 }))), None);
    for (change, expected) in [
        (json!({ "num_experts_per_tok": 9 }), "num_experts_per_tok: 9, expected"),
        (json!({ "num_local_experts": 2000 }), "num_local_experts: 2000, expected"),
        (json!({ "mlp_only_layers": ["1"] }), "mlp_only_layers: [\"1\"], expected a list of whole numbers"),
        (json!({ "n_shared_experts": 1 }), "n_shared_experts: 1 is not supported"),
    ] {
        let message = parse(&changed(change)).expect_err(expected);
        assert!(message.contains(expected), "{message}");
    }
    let message = parse(&with(llama(), &json!({ "num_local_experts": 8 }))).expect_err("experts");
    assert!(message.contains("num_local_experts: 8 is not supported; supported: "), "{message}");
    let with_experts = Architecture::ALL.into_iter().filter(|of| of.has_experts()).map(Architecture::class_name);
    let with_experts: Vec<_> = with_experts.collect();
    assert!(with_experts.contains(&"MixtralForCausalLM") && !with_experts.contains(&"LlamaForCausalLM"));
    assert!(
        message.ends_with(&format!("supported: mixtures of experts of {} alone", with_experts.join(", "))),
        "{message}"
    );
}

#[test]
fn experts_chosen_by_corrected_sigmoids() {
    // As GLM 4.5 Air's published file has them, but for the layers.
    let glm = json!({
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": true, "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 131_072, "model_type": "glm4_moe",
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": true,
        "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 3, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_scaling": null, "rope_theta": 1_000_000, "routed_scaling_factor": 1.0,
        "tie_word_embeddings": false, "topk_group": 1, "use_qk_norm": false, "vocab_size": 151_552,
    });
    let config = decoder_of(&glm);
    let shared = Some(SharedExpert { intermediate_size: 1408, is_weighed: false });
    let (layers, sigmoids) = (vec![false, true, true], corrected(1e-20));
    let experts = Experts { layers, shared, sigmoids, ..experts_of([128, 8, 1408], true) };
    assert_eq!(config.experts, Some(experts.clone()));
    assert_eq!((config.intermediate_size, config.heads[0].rotary_dim, config.qk_norm), (10944, 64, QkNorm::None));
    assert_eq!((config.attention_bias, config.output_bias, config.rms_norm_eps), (true, false, 1e-5));
    let of = |change: Value| decoder_of(&with(glm.clone(), &change));
    let larger = of(json!({
        "use_qk_norm": true, "first_k_dense_replace": 2, "n_shared_experts": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": false,
        "num_local_experts": 64, "n_routed_experts": null, "mlp_layer_types": ["unheard of"],
    }));
    let shared = Some(SharedExpert { intermediate_size: 2816, is_weighed: false });
    let (layers, factor) = (vec![false, false, true], 2.5);
    assert_eq!(larger.experts, Some(Experts { n: 64, normalise: false, layers, shared, factor, ..experts }));
    assert_eq!(larger.qk_norm, QkNorm::Heads);
    assert_eq!(of(json!({ "first_k_dense_replace": 3 })).experts, None);
    assert_eq!(of(json!({ "n_group": 4, "topk_group": 4 })), config);
    for (change, expected) in [
        (json!({ "n_group": 8, "topk_group": 4 }), "n_group: 8 is not supported; supported: as many as topk_group"),
        (json!({ "n_routed_experts": 4096 }), "n_routed_experts: 4096, expected"),
        (json!({ "n_shared_experts": 1000 }), "n_shared_experts: 1000, expected"),
        (json!({ "moe_num_experts": 8 }), "moe_num_experts: 8 is not supported"),
        (json!({ "num_experts": 8 }), "num_experts: 8 is not supported"),
        (json!({ "num_shared_experts": 1 }), "num_shared_experts: 1 is not supported"),
    ] {
        let error = parse(&with(glm.clone(), &change)).expect_err(expected);
        assert!(error.contains(expected), "{error}");
    }
    // Solar's all have them, and may say nothing of an MLP of another kind; K-EXAONE's layers without a window do not
    // turn.
    let of_type = |model_type: &str, change: Value| {
        let mut file = with(glm.clone(), &json!({ "architectures": null, "model_type": model_type }));
        file.as_object_mut().expect("keys").shift_remove("partial_rotary_factor");
        with(file, &change)
    };
    let refused = |file: &Value, expected: &str| {
        let error = parse(file).expect_err(expected);
        assert!(error.contains(expected), "{error}");
    };
    let solar = decoder_of(&of_type("solar_open", json!({ "intermediate_size": null })));
    assert_eq!(solar.experts.map(|of| of.layers), Some(vec![true; 3]));
    assert_eq!((solar.intermediate_size, solar.heads[0].rotary_dim), (1408, 128));
    let file = of_type(
        "exaone_moe",
        json!({
            "num_experts": 16, "n_routed_experts": null, "num_shared_experts": 1, "n_shared_experts": null,
            "routed_scaling_factor": null, "sliding_window": 128, "mlp_layer_types": ["sparse", "dense", "sparse"],
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window_pattern": "LG",
        }),
    );
    for (change, expected) in [
        (json!({ "mlp_layer_types": ["dense", "sparse"] }), "mlp_layer_types: 2 entries, expected 3, one a layer"),
        (json!({ "mlp_layer_types": ["dense", "sparse", "moe"] }), "mlp_layer_types: moe is not supported"),
        (json!({ "n_shared_experts": 1 }), "n_shared_experts: 1 is not supported"),
    ] {
        refused(&with(file.clone(), &change), expected);
    }
    let exaone = decoder_of(&file);
    let of_exaone = exaone.experts.expect("experts");
    assert_eq!(
        (of_exaone.n, of_exaone.layers, of_exaone.sigmoids, of_exaone.factor),
        (16, vec![true, false, true], corrected(1e-20), 2.5)
    );
    assert_eq!((exaone.qk_norm, exaone.attention_bias), (QkNorm::Heads, false));
    assert_eq!(exaone.windows, [Some(128), None, Some(128)]);
    assert_eq!(exaone.ropes.iter().map(|rope| *rope == Rope::NONE).collect::<Vec<_>>(), [false, true, false]);
    // MiniMax's say how many elements of a head are turned, and their MLPs' size in one number.
    let file = of_type(
        "minimax_m2",
        json!({
            "rotary_dim": 64, "num_local_experts": 256, "n_routed_experts": null, "n_shared_experts": null,
            "intermediate_size": 1536, "scoring_func": "sigmoid", "use_routing_bias": true, "routed_scaling_factor": 9.0,
        }),
    );
    refused(&with(file.clone(), &json!({ "n_shared_experts": 1 })), "n_shared_experts: 1 is not supported");
    // Null says that nothing is left out.
    assert_eq!(decoder_of(&with(file.clone(), &json!({ "partial_rotary_factor": null }))).heads[0].rotary_dim, 128);
    let minimax = decoder_of(&file);
    let experts = Experts { layers: vec![true; 3], sigmoids: corrected(0.0), ..experts_of([256, 8, 1536], true) };
    assert_eq!(minimax.experts, Some(experts));
    assert_eq!((minimax.qk_norm, minimax.heads[0].rotary_dim, minimax.attention_bias), (QkNorm::Rows, 64, false));
    // LFM2's first layers have an MLP whose size is as it is said, and experts may be chosen as they are.
    let lfm = |change: Value| {
        let file = of_type(
            "lfm2_moe",
            json!({
                "num_experts": 32, "num_experts_per_tok": 4, "n_routed_experts": null, "n_shared_experts": null,
                "moe_intermediate_size": 1792, "num_dense_layers": 2, "layer_types": ["conv", "conv", "full_attention"], "norm_eps": 1e-5,
                "conv_L_cache": 3, "intermediate_size": 7168, "norm_topk_prob": null, "tie_word_embeddings": null,
            }),
        );
        decoder_of(&with(file, &change))
    };
    let config = lfm(json!({}));
    let (layers, sigmoids) = (vec![false, false, true], corrected(1e-6));
    assert_eq!(config.experts, Some(Experts { layers, sigmoids, ..experts_of([32, 4, 1792], true) }));
    assert_eq!((config.intermediate_size, config.tie_word_embeddings), (7168, true));
    assert_eq!(config.recurrent.map(|of| of.layers), Some(vec![true, true, false]));
    let plain = lfm(json!({ "use_expert_bias": false, "tie_embedding": false }));
    let sigmoids = plain.experts.and_then(|of| of.sigmoids);
    assert_eq!((sigmoids.map(|of| of.are_corrected), plain.tie_word_embeddings), (Some(false), false));
}

#[test]
fn hunyuan() {
    // As Hunyuan-A13B's published file has it, but for the layers.
    let rope = json!({ "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "type": "dynamic" });
    let file = json!({
        "architectures": ["HunYuanMoEV1ForCausalLM"], "attention_bias": false, "head_dim": 128, "hidden_size": 4096,
        "intermediate_size": 3072, "max_position_embeddings": 32768, "model_type": "hunyuan_v1_moe", "moe_topk": [8, 8],
        "num_attention_heads": 32, "num_experts": 64, "num_hidden_layers": 2, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_scaling": rope, "rope_theta": 10_000.0, "tie_word_embeddings": true, "vocab_size": 128_167,
    });
    let config = decoder_of(&file);
    let shared = Some(SharedExpert { intermediate_size: 3072, is_weighed: false });
    let experts = Experts { layers: vec![true; 2], shared, ..experts_of([64, 8, 3072], true) };
    assert_eq!((config.experts, config.qk_norm), (Some(experts), QkNorm::Heads));
    // The base is stretched, whatever the context.
    let theta = 1e4 * 1000f64.powf(128.0 / 126.0);
    assert_eq!((&config.ropes[0].scaling, config.ropes[0].theta), (&RopeScaling::Default, theta));
    assert!(config.architecture.norms_turned() && !Architecture::Qwen3.norms_turned());
    for (change, expected) in [
        (json!({ "moe_topk": [8, 4] }), "moe_topk: [8,4] is not supported; supported: one number, or the same one"),
        (
            json!({ "rope_scaling": { "type": "dynamic", "factor": 2.0 } }),
            "rope_scaling.type: \"dynamic\" is not supported",
        ),
        (json!({ "rope_scaling": { "type": "dynamic", "alpha": 0.5 } }), "rope_scaling.alpha: 0.5, expected"),
        (json!({ "head_dim": 2 }), "rope_scaling.alpha: 1000.0, expected less"),
    ] {
        let error = parse(&with(file.clone(), &change)).expect_err(expected);
        assert!(error.contains(expected), "{error}");
    }
    let llama = with(llama(), &json!({ "rope_scaling": { "type": "dynamic", "alpha": 2.0 } }));
    assert!(parse(&llama).expect_err("Llama heeds it not").contains("\"dynamic\" is not supported"));
}

#[test]
fn latent_attention() {
    // As GLM 4.7 Flash's published file has it, but for the layers.
    let glm = json!({
        "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": false, "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 10240, "kv_lora_rank": 512, "max_position_embeddings": 202_752,
        "model_type": "glm4_moe_lite", "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1,
        "norm_topk_prob": true, "num_attention_heads": 20, "num_experts_per_tok": 4, "num_hidden_layers": 3,
        "num_key_value_heads": 20, "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0, "q_lora_rank": 768,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5, "rope_scaling": null, "rope_theta": 1_000_000,
        "routed_scaling_factor": 1.8, "tie_word_embeddings": false, "topk_group": 1, "topk_method": "noaux_tc",
        "v_head_dim": 256, "vocab_size": 154_880,
    });
    let config = decoder_of(&glm);
    let turns_neighbours = true;
    let latent =
        Latent { query_rank: Some(768), rank: 512, still_dim: 192, turned_dim: 64, value_dim: 256, turns_neighbours };
    assert_eq!((config.latent, latent.head_dim(), latent.cached_dim()), (Some(latent), 256, 576));
    let heads = Heads { n_kv: 20, dim: 256, rotary_dim: 64, values_are_keys: false, cache_of: None };
    assert_eq!((config.heads, config.attention_scale), (vec![heads; 3], 1.0 / 16.0));
    let shared = Some(SharedExpert { intermediate_size: 1536, is_weighed: false });
    let (layers, sigmoids) = (vec![false, true, true], corrected(1e-20));
    let experts = Experts { layers, shared, sigmoids, factor: 1.8, ..experts_of([64, 4, 1536], true) };
    assert_eq!(config.experts, Some(experts.clone()));
    let of = |change: Value| decoder_of(&with(glm.clone(), &change));
    let in_halves =
        of(json!({ "rope_interleave": false, "q_lora_rank": null, "mlp_layer_types": ["sparse", "sparse", "sparse"] }));
    assert_eq!(in_halves.latent, Some(Latent { query_rank: None, turns_neighbours: false, ..latent }));
    assert_eq!(in_halves.experts.map(|of| of.layers), Some(vec![true; 3]));
    for (change, expected) in [
        (
            json!({ "num_key_value_heads": 4 }),
            "num_key_value_heads: 4 is not supported; supported: as many as num_attention_heads, 20",
        ),
        (json!({ "qk_rope_head_dim": 63 }), "qk_rope_head_dim: 63, expected an even number"),
        (json!({ "kv_lora_rank": null }), "kv_lora_rank: missing, expected"),
        (json!({ "v_head_dim": 0 }), "v_head_dim: 0, expected"),
        (json!({ "partial_rotary_factor": 0.5 }), "partial_rotary_factor: 0.5 is not supported"),
        (json!({ "n_group": 8, "topk_group": 4 }), "n_group: 8 is not supported"),
        (json!({ "is_causal": false }), "is_causal: false is not supported"),
    ] {
        let error = parse(&with(glm.clone(), &change)).expect_err(expected);
        assert!(error.contains(expected), "{error}");
    }
    let without = |key: &str, model_type: &str| {
        let mut file = with(glm.clone(), &json!({ "architectures": null, "model_type": model_type }));
        file.as_object_mut().expect("keys").shift_remove(key);
        parse(&file)
    };
    assert!(
        without("q_lora_rank", "glm4_moe_lite")
            .expect_err("missing")
            .contains("q_lora_rank: missing, expected a number, or null")
    );
    // DeepSeek V3's class has groups by default.
    assert!(without("rope_theta", "deepseek_v3").is_ok());
    assert!(without("n_group", "deepseek_v3").expect_err("groups").contains("n_group"));

    // DeepSeek V2 Lite's: YaRN's factor of all of a head's elements is the scores', twice.
    let lite = json!({
        "architectures": ["DeepseekV2ForCausalLM"], "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944,
        "kv_lora_rank": 512, "max_position_embeddings": 163_840, "model_type": "deepseek_v2", "moe_intermediate_size": 1408,
        "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": false, "num_attention_heads": 16,
        "num_experts_per_tok": 6, "num_hidden_layers": 2, "num_key_value_heads": 16, "q_lora_rank": null, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10_000, "routed_scaling_factor": 1.0,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
        "scoring_func": "softmax", "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128, "vocab_size": 102_400,
    });
    let config = decoder_of(&lite);
    let factor = 0.0707 * 40f64.ln() + 1.0;
    assert!((config.attention_scale * 192f64.sqrt() / (factor * factor) - 1.0).abs() < 1e-12);
    assert_eq!(config.ropes[0].factor(), 1.0);
    let experts = config.experts.expect("experts");
    assert_eq!((experts.sigmoids, experts.normalise, experts.layers), (None, false, vec![false, true]));
    for (change, expected) in [
        (json!({ "norm_topk_prob": true }), "norm_topk_prob: true is not supported"),
        (json!({ "topk_method": "noaux_tc" }), "topk_method: \"noaux_tc\" is not supported; supported: \"greedy\""),
        (
            json!({ "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3 }),
            "n_group: 8 is not supported",
        ),
        (json!({ "num_experts_per_tok": null }), "num_experts_per_tok: missing"),
    ] {
        let error = parse(&with(lite.clone(), &change)).expect_err(expected);
        assert!(error.contains(expected), "{error}");
    }
    // Of several groups all may be chosen from.
    assert!(
        parse(&with(lite.clone(), &json!({ "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 8 })))
            .is_ok()
    );

    // Mistral 4's says which part of a head is turned, and how queries are multiplied far away.
    let mistral = with(
        lite,
        &json!({
            "architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4", "norm_topk_prob": true, "rope_scaling": null,
            "rope_parameters": {"factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
                                "original_max_position_embeddings": 8192, "partial_rotary_factor": 64.0 / 192.0,
                                "rope_theta": 1e4, "rope_type": "yarn"},
        }),
    );
    let config = decoder_of(&mistral);
    assert_eq!((config.max_position_embeddings, config.heads[0].rotary_dim), (163_840, 64));
    assert_eq!(config.lengthening, Some(Lengthening { beta: 0.1, original: 8192 }));
    assert!(config.experts.is_some_and(|experts| experts.normalise && experts.sigmoids.is_none()));

    // MiniCPM 3's numbers, as its published file has them.
    let minicpm = json!({
        "architectures": ["MiniCPM3ForCausalLM"], "dim_model_base": 256, "hidden_size": 2560, "intermediate_size": 6400,
        "kv_lora_rank": 256, "model_type": "minicpm3", "num_attention_heads": 40, "num_hidden_layers": 62,
        "num_key_value_heads": 40, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "scale_depth": 1.4,
        "scale_emb": 12, "vocab_size": 73_448,
    });
    let config = decoder_of(&minicpm);
    let added = 1.4 / 62f64.sqrt();
    assert_eq!((config.embedding_scale, config.logits_divisor), (12.0 / added, 10.0));
    assert_eq!(config.rms_norm_eps, 1e-5 / (added * added));
    assert_eq!(config.latent.map(|of| (of.value_dim, of.turns_neighbours)), Some((64, false)));
    let plain = decoder_of(&with(minicpm, &json!({ "scale_depth": null, "dim_model_base": null })));
    assert_eq!((plain.embedding_scale, plain.logits_divisor), (12.0, 1.0));
}

#[test]
fn neighbours_are_turned() {
    let of = |name: &str, change: Value| {
        decoder_of(&with(with(llama(), &json!({ "architectures": null, "model_type": name })), &change))
    };
    for name in ["glm", "glm4"] {
        let config = of(name, json!({ "head_dim": 32 }));
        assert_eq!(
            (config.heads[0].rotary_dim, config.attention_bias, config.output_bias),
            (16, true, false),
            "{name}"
        );
        assert_eq!((config.rms_norm_eps, config.heads[0].n_kv), (1.5625e-7, 2), "{name}");
        let config = of(name, json!({ "partial_rotary_factor": 0.25, "attention_bias": false }));
        assert_eq!((config.heads[0].rotary_dim, config.attention_bias), (32, false), "{name}");
    }
    let ernie = of("ernie4_5", json!({ "use_bias": true }));
    assert_eq!((ernie.heads[0].dim, ernie.heads[0].rotary_dim, ernie.tie_word_embeddings), (128, 128, true));
    assert_eq!((ernie.attention_bias, ernie.output_bias, ernie.mlp_bias), (true, true, true));
    assert!(Architecture::Ernie45.turns_neighbours() && !Architecture::Llama.turns_neighbours());
    // As Qwen3.5's, but that experts' parts are said to add up to 1, and some layers may have none.
    let next =
        json!({ "mlp_only_layers": [0], "num_experts": 16, "num_experts_per_tok": 4, "partial_rotary_factor": 0.5 });
    let next = of("qwen3_next", next);
    let shared = Some(SharedExpert { intermediate_size: 512, is_weighed: true });
    let experts = Experts { layers: vec![false, true], shared, ..experts_of([16, 4, 512], true) };
    assert_eq!((next.experts, next.intermediate_size, next.heads[0].rotary_dim), (Some(experts), 640, 128));
    assert!(
        next.gate == Some(AttentionGate::BesideQueries)
            && matches!(next.recurrent, Some(Recurrent { mixer: Mixer::DeltaRule(_), .. }))
    );
    let plain = of("qwen3_next", json!({ "norm_topk_prob": false }));
    assert!(plain.experts.is_some_and(|experts| !experts.normalise));
}

#[test]
fn experts_that_all_rows_go_to() {
    let llama = with(llama(), &json!({ "architectures": null }));
    let of = |model_type: &str, change: &Value| {
        let typed = with(llama.clone(), &json!({ "model_type": model_type }));
        decoder_of(&with(typed, change))
    };
    let shared = |config: DecoderConfig| config.experts.and_then(|experts| experts.shared);
    // Qwen's counts by a logit of its own, and layers without experts have none.
    let qwen = json!({ "num_experts": 6, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 96 });
    let config = of("qwen2_moe", &with(qwen.clone(), &json!({ "mlp_only_layers": [0] })));
    assert_eq!((config.attention_bias, config.output_bias, config.intermediate_size), (true, false, 640));
    assert_eq!(config.experts.as_ref().map(|e| e.layers.clone()), Some(vec![false, true]));
    assert_eq!(shared(config), Some(SharedExpert { intermediate_size: 96, is_weighed: true }));
    let windows = json!({ "use_sliding_window": true, "sliding_window": 7, "qkv_bias": false });
    let config = of("qwen2_moe", &with(qwen, &windows));
    assert_eq!((config.windows, config.attention_bias), (vec![Some(7), None], false));
    // Granite's is added as it is, and is the MLP where there are no experts.
    assert_eq!(shared(of("granitemoeshared", &json!({}))), None);
    let granite = json!({ "shared_intermediate_size": 48, "layer_types": ["attention", "attention"] });
    let expected = Some(SharedExpert { intermediate_size: 48, is_weighed: false });
    assert_eq!(shared(of("granitemoeshared", &granite)), expected);
    assert_eq!(shared(of("granitemoehybrid", &granite)), expected);
    let dense = with(granite, &json!({ "num_local_experts": 0 }));
    let config = of("granitemoehybrid", &dense);
    assert_eq!((config.experts, config.intermediate_size, config.ropes), (None, 48, vec![Rope::NONE; 2]));
    let turned = with(dense.clone(), &json!({ "position_embedding_type": "rope" }));
    assert_ne!(of("granitemoehybrid", &turned).ropes[0], Rope::NONE);
    for (change, expected) in [
        (
            json!({ "layer_types": ["attention", "conv"] }),
            "layer_types: conv is not supported; supported: linear_attention",
        ),
        // All are state spaces then.
        (json!({ "layer_types": null }), "mamba_d_state: missing, expected a whole number from 1 to 128"),
        (json!({ "layer_types": ["attention"] }), "layer_types: 1 entries, expected 2"),
        (json!({ "shared_intermediate_size": 0 }), "shared_intermediate_size: 0, expected at least 1"),
    ] {
        let typed = with(llama.clone(), &json!({ "model_type": "granitemoehybrid" }));
        let message = parse(&with(with(typed, &dense), &change)).expect_err(expected);
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn halves_that_read() {
    let text = |change: &Value| with(with(llama(), &json!({ "architectures": null })), change);
    let whole = |class: &str, text: Value, change: &Value| {
        let whole =
            json!({ "architectures": [class], "model_type": "whole", "text_config": text, "vision_config": {} });
        with(whole, change)
    };
    let mrope = json!({ "type": "mrope", "mrope_section": [16, 24, 24] });
    let qwen = text(&json!({ "model_type": "qwen3_vl_text", "rope_scaling": mrope, "rope_theta": 5e6 }));
    let config = decoder_of(&whole("Qwen3VLForConditionalGeneration", qwen.clone(), &json!({})));
    assert_eq!((config.architecture, config.qk_norm), (Architecture::Qwen3, QkNorm::Heads));
    assert_eq!(config.ropes[0], Rope { theta: 5e6, scaling: RopeScaling::Default });
    // Either half may say that the head is the embedding table; where neither does, the file decides.
    for (outer, inner, is_tied) in
        [(None, None, true), (Some(false), None, false), (None, Some(false), false), (Some(true), Some(false), true)]
    {
        let text = with(qwen.clone(), &json!({ "tie_word_embeddings": inner }));
        let value = whole("Qwen3VLForConditionalGeneration", text, &json!({ "tie_word_embeddings": outer }));
        assert_eq!(decoder_of(&value).tie_word_embeddings, is_tied, "{outer:?} {inner:?}");
    }
    let mistral = text(&json!({ "model_type": "mistral", "sliding_window": null }));
    let config = decoder_of(&whole("Mistral3ForConditionalGeneration", mistral, &json!({})));
    assert_eq!(config.architecture, Architecture::Mistral);
    // Older files have no half.
    let flat =
        with(llama(), &json!({ "architectures": ["Qwen2_5_VLForConditionalGeneration"], "rope_scaling": mrope }));
    assert_eq!(decoder_of(&flat).architecture, Architecture::Qwen2);
    let message = parse(&whole(
        "MllamaForConditionalGeneration",
        text(&json!({ "model_type": "mllama_text_model" })),
        &json!({}),
    ))
    .expect_err("another");
    assert!(message.contains("text_config.model_type: \"mllama_text_model\" is not supported"), "{message}");
    let message = parse(&with(llama(), &json!({ "rope_scaling": { "type": "mrope" } }))).expect_err("no sections");
    assert!(message.contains("rope_scaling.type: \"mrope\" is not supported"), "{message}");
}

#[test]
fn ministral_multiplies_queries_by_their_positions() {
    let rope = json!({
        "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 512, "rope_theta": 1e6, "mscale": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    });
    let ministral = json!({ "architectures": ["Ministral3ForCausalLM"], "head_dim": 64, "rope_parameters": rope });
    let ministral = with(llama(), &ministral);
    let config = decoder_of(&ministral);
    assert_eq!((config.max_position_embeddings, config.ropes[0].factor()), (8192, 1.0));
    assert_eq!(config.lengthening, Some(Lengthening { beta: 0.1, original: 512 }));
    let mut without = ministral.clone();
    without["rope_parameters"]["llama_4_scaling_beta"] = 0.into();
    assert_eq!(decoder_of(&without).lengthening, None);
    // To others it says nothing.
    assert_eq!(
        decoder_of(&with(ministral.clone(), &json!({ "architectures": ["LlamaForCausalLM"] }))).lengthening,
        None
    );
    let message = parse(&with(ministral, &json!({ "rope_parameters": null }))).expect_err("its default is YaRN");
    assert!(message.contains("rope_parameters: missing, expected an object"), "{message}");
}

#[test]
fn seed_oss_has_biases() {
    let seed = with(llama(), &json!({ "architectures": ["SeedOssForCausalLM"], "head_dim": 64 }));
    let config = decoder_of(&seed);
    assert_eq!((config.attention_bias, config.output_bias, config.mlp_bias), (true, false, false));
    let config = decoder_of(&with(seed, &json!({ "attention_bias": false, "attention_out_bias": true })));
    assert_eq!((config.attention_bias, config.output_bias), (false, true));
}

#[test]
fn gemma_4() {
    let text = json!({ "hidden_size": 1536, "intermediate_size": 6144, "model_type": "gemma4_text", "num_key_value_heads": 1,
                       "num_hidden_layers": 7, "num_kv_shared_layers": 3, "use_double_wide_mlp": true,
                       "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention",
                                       "sliding_attention", "full_attention", "sliding_attention"],
                       "final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision" });
    let whole = json!({ "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
                        "text_config": text, "audio_config": null, "vision_config": { "hidden_size": 1152 } });
    let config = decoder_of(&whole);
    let of = |dim, cache_of| Heads { n_kv: 1, dim, rotary_dim: dim, values_are_keys: false, cache_of };
    // The last layer has no window, whatever the file says.
    assert_eq!(
        config.heads,
        [
            of(256, None),
            of(256, None),
            of(512, None),
            of(256, None),
            of(256, Some(3)),
            of(512, Some(2)),
            of(512, Some(2)),
        ]
    );
    let window = Some(512);
    assert_eq!(config.windows, [window, window, None, window, window, None, None]);
    assert_eq!([3, 4].map(|layer| config.intermediate_of(layer)), [6144, 12_288]);
    let full = Rope { theta: 1e6, scaling: RopeScaling::Proportional { part: 0.25, factor: 1.0 } };
    let sliding = Rope { theta: 1e4, scaling: RopeScaling::Default };
    assert_eq!((&config.ropes[1], &config.ropes[2]), (&sliding, &full));
    let frequencies = full.inverse_frequencies(512, 4096);
    assert!(frequencies[63] > 0.0 && frequencies[64..].iter().all(|f| *f == 0.0) && frequencies.len() == 256);
    assert_eq!((config.attention_scale, config.embedding_scale), (1.0, 1536f64.sqrt()));
    assert_eq!((config.logits_cap, config.n_heads, config.vocab_size), (Some(30.0), 8, 262_144));
    assert_eq!(config.layer_inputs, Some(LayerInputs { vocab_size: 262_144, dim: 256 }));
    assert!(config.norms_values && config.scales_layers && config.tie_word_embeddings && config.experts.is_none());
    assert_eq!((config.qk_norm, config.hidden_act), (QkNorm::Heads, Activation::GeluTanh));

    // The wider heads' own numbers count where values are keys.
    let more = json!({ "global_head_dim": 64, "num_global_key_value_heads": 2, "attention_k_eq_v": true,
                       "num_kv_shared_layers": 0, "hidden_size_per_layer_input": null, "layer_types": null });
    let text = with(text, &more);
    let config = decoder_of(&text);
    let wide = Heads { n_kv: 2, dim: 64, rotary_dim: 64, values_are_keys: true, cache_of: None };
    assert_eq!((config.heads[0], config.heads[5], config.heads[6]), (of(256, None), wide, wide));
    assert_eq!((config.layer_inputs, config.intermediate_of(6)), (None, 6144));
    let apart = decoder_of(&with(text.clone(), &json!({ "attention_k_eq_v": false })));
    assert_eq!(apart.heads[5], Heads { n_kv: 1, values_are_keys: false, ..wide });
    // As today's files say it, layer by layer.
    let wide_in = |layers: &[usize]| -> Value {
        let of = |layer: &usize| (layer.to_string(), json!({ "head_dim": 64, "num_key_value_heads": 2 }));
        Value::Object(layers.iter().map(of).collect())
    };
    let today =
        json!({ "global_head_dim": null, "num_global_key_value_heads": null, "per_layer_config": wide_in(&[5, 6]) });
    assert_eq!(decoder_of(&with(text.clone(), &today)), config);
    // Beside the MLP, experts.
    let moe = json!({ "enable_moe_block": true, "num_experts": 16, "top_k_experts": 4, "moe_intermediate_size": 704 });
    let experts = decoder_of(&with(text.clone(), &moe)).experts.expect("said");
    assert_eq!((experts.n, experts.chosen, experts.intermediate_size, experts.normalise), (16, 4, 704, true));
    assert!(experts.stands_beside && experts.sigmoids.is_none() && experts.layers == [true; 7]);
    // Those without any.
    let unified = json!({ "model_type": "gemma4_unified_text", "hidden_size_per_layer_input": 256 });
    let unified = decoder_of(&with(text.clone(), &unified));
    assert_eq!((unified.architecture, unified.layer_inputs), (Architecture::Gemma4Unified, None));
    assert_eq!((unified.windows[0], unified.max_position_embeddings), (Some(1024), 262_144));

    let ropes = |full: Value| json!({ "rope_parameters": { "full_attention": full, "sliding_attention": null } });
    // Null says that no layer differs, and of other keys nothing.
    let with_null = |key: &str| {
        let mut file = text.clone();
        file[key] = Value::Null;
        file
    };
    assert!(decoder_of(&with_null("per_layer_config")).heads.iter().all(|heads| (heads.n_kv, heads.dim) == (1, 256)));
    for key in ["head_dim", "num_key_value_heads", "sliding_window", "global_head_dim"] {
        let message = parse(&with_null(key)).expect_err(key).to_string();
        assert!(message.contains(&format!("{key}: missing, expected a number")), "{message}");
    }
    let none = json!({ "enable_moe_block": false, "num_experts": 0 });
    assert_eq!(decoder_of(&with(text.clone(), &none)).experts, None);
    for (change, expected) in [
        (json!({ "use_bidirectional_attention": "all" }), "use_bidirectional_attention: \"all\""),
        (json!({ "num_kv_shared_layers": 2, "layer_types": ["full_attention"] }), "layer_types: 1 entries"),
        (json!({ "num_kv_shared_layers": 6 }), "a layer of each type before those that share"),
        (json!({ "num_kv_shared_layers": 7 }), "num_kv_shared_layers: 7, expected"),
        (json!({ "global_head_dim": 63 }), "global_head_dim: 63, expected an even number"),
        (json!({ "num_global_key_value_heads": 3 }), "num_global_key_value_heads: 3, expected a divisor"),
        (json!({ "per_layer_config": wide_in(&[5]) }), "one head_dim for all layers of a type"),
        (json!({ "per_layer_config": wide_in(&[7]) }), "numbers of layers, below 7"),
        (json!({ "per_layer_config": { "5": { "sliding_window": 3 } } }), "sliding_window"),
        (json!({ "enable_moe_block": true, "num_experts": 8, "top_k_experts": 2 }), "moe_intermediate_size: missing"),
        (json!({ "enable_moe_block": true, "top_k_experts": 2, "moe_intermediate_size": 8 }), "num_experts: missing"),
        (json!({ "final_logit_softcapping": 0.0 }), "final_logit_softcapping: 0.0, expected"),
        (json!({ "final_logit_softcapping": 1e6 }), "final_logit_softcapping: 1000000.0, expected"),
        (json!({ "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 8 }), "at least vocab_size, 262144"),
        (
            json!({ "rope_parameters": { "full_attention": { "rope_type": "default" },
                                         "sliding_attention": { "rope_theta": 1e4 } } }),
            "full_attention.rope_theta: missing, expected a number",
        ),
        (json!({ "rope_parameters": {} }), "rope_parameters"),
        (ropes(json!({ "rope_type": "default", "rope_theta": 1e4 })), "sliding_attention: missing, expected an object"),
    ] {
        let message = parse(&with(text.clone(), &change)).expect_err(expected).to_string();
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn gemma_3() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-gemma3");
    let tiny = read_value(&dir.join("config.json")).expect("JSON");
    let [full, sliding] = [
        Rope { theta: 1e6, scaling: RopeScaling::Linear { factor: 8.0 } },
        Rope { theta: 1e4, scaling: RopeScaling::Default },
    ];
    let config = decoder_of(&tiny);
    assert_eq!(config.windows, [Some(12), None, Some(12)]);
    assert_eq!(config.ropes, [sliding.clone(), full.clone(), sliding.clone()]);
    assert_eq!((config.embedding_scale, config.qk_norm), (128f64.sqrt(), QkNorm::Heads));
    assert_eq!((config.hidden_act, config.tie_word_embeddings), (Activation::GeluTanh, true));

    // As the files of those that see have it: a part, with what is not as usual.
    let text = json!({ "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                       "num_hidden_layers": 34, "sliding_window": 1024,
                       "rope_scaling": { "factor": 8.0, "rope_type": "linear" } });
    let whole = json!({ "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
                        "text_config": text, "vision_config": { "hidden_size": 1152 } });
    let config = decoder_of(&whole);
    assert_eq!((config.vocab_size, config.max_position_embeddings), (262_208, 131_072));
    assert_eq!(
        (config.n_heads, config.heads[0].n_kv, config.heads[0].dim, config.attention_scale),
        (8, 4, 256, 1.0 / 16.0)
    );
    assert_eq!((config.windows[4], config.windows[5], config.windows[6]), (Some(1024), None, Some(1024)));
    assert_eq!((&config.ropes[4], &config.ropes[5]), (&sliding, &full));
    assert_eq!(decoder_of(&with(whole.clone(), &json!({ "architectures": null }))), config);
    // As older files call it.
    let old = json!({ "rope_parameters": null, "rope_theta": 5e5, "rope_local_base_freq": 2e4, "layer_types": null,
                      "sliding_window_pattern": 2 });
    let config = decoder_of(&with(tiny.clone(), &old));
    assert_eq!(config.windows, [Some(12), None, Some(12)]);
    assert_eq!(config.ropes.iter().map(|rope| rope.theta).collect::<Vec<_>>(), [2e4, 5e5, 2e4]);
    // Nulls are as usual; older keys change those of layers without a window, and then by today's name for the type
    // alone.
    let ropes = |change: Value| decoder_of(&with(tiny.clone(), &change)).ropes[..2].to_vec();
    let linear = |theta| Rope { theta, scaling: RopeScaling::Linear { factor: 4.0 } };
    let plain = |theta| Rope { theta, scaling: RopeScaling::Default };
    let of_full = json!({ "rope_type": "linear", "factor": 4.0, "rope_theta": 77.0 });
    let nested = json!({ "rope_parameters": { "full_attention": of_full, "sliding_attention": null } });
    assert_eq!(ropes(nested), [plain(1e4), linear(77.0)]);
    let both = json!({ "rope_parameters": { "full_attention": { "rope_theta": 50.0 }, "sliding_attention": { "rope_theta": 60.0 } },
                       "rope_scaling": { "rope_type": "linear", "factor": 4.0 } });
    assert_eq!(ropes(both), [plain(60.0), linear(50.0)]);
    let named_before = json!({ "rope_parameters": null, "rope_scaling": { "type": "linear", "factor": 4.0 } });
    assert_eq!(ropes(named_before), [plain(1e4), plain(1e6)]);
    // The context of the first training beside all other keys is none of theirs.
    let yarn = json!({ "rope_parameters": { "full_attention": { "rope_type": "yarn", "factor": 2.0 } },
                       "original_max_position_embeddings": 16, "max_position_embeddings": 128 });
    let scaling = ropes(yarn).pop().map(|rope| rope.scaling);
    assert!(matches!(scaling, Some(RopeScaling::Yarn { original_max_position_embeddings: 128, .. })), "{scaling:?}");
    for (change, expected) in [
        (json!({ "rope_parameters": of_full }), "expected keys of full_attention and of sliding_attention"),
        (json!({ "final_logit_softcapping": 30.0 }), "final_logit_softcapping: 30.0 is not supported"),
        (json!({ "attn_logit_softcapping": 50.0 }), "attn_logit_softcapping: 50.0 is not supported"),
        (json!({ "hidden_activation": "gelu" }), "hidden_activation: \"gelu\" is not supported"),
        (json!({ "query_pre_attn_scalar": 0 }), "query_pre_attn_scalar: 0, expected"),
    ] {
        let message = parse(&with(tiny.clone(), &change)).expect_err(expected);
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn fixtures() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let open = |name: &str| match ModelConfig::open(&dir.join(name).join("config.json")) {
        Ok(ModelConfig::Decoder(c)) => c,
        other => panic!("{other:?}"),
    };
    let qwen3 = open("tiny-qwen3");
    assert_eq!((qwen3.architecture, qwen3.heads[0].dim, qwen3.qk_norm), (Architecture::Qwen3, 64, QkNorm::Heads));
    assert_eq!(
        (qwen3.attention_bias, qwen3.tie_word_embeddings, qwen3.windows.iter().flatten().next()),
        (false, true, None)
    );
    assert_eq!(qwen3.ropes[0], Rope { theta: 1e6, scaling: RopeScaling::Default });

    let llama = open("tiny-llama");
    assert_eq!((llama.n_heads, llama.heads[0].n_kv, llama.rms_norm_eps), (8, 2, 1e-5));
    assert_eq!(
        llama.ropes[0].scaling,
        RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 1024
        }
    );

    let qwen2 = open("tiny-qwen2");
    assert_eq!(
        (qwen2.heads[0].dim, qwen2.attention_bias, qwen2.output_bias, qwen2.qk_norm),
        (32, true, false, QkNorm::None)
    );
}

#[test]
fn old_and_new_keys_say_the_same() {
    let scaling = json!({"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 4096});
    let mut new = scaling.clone();
    new["rope_type"] = "llama3".into();
    new["rope_theta"] = 500000.0.into();
    let new_scaling = new.clone();
    let mut old = scaling;
    old["type"] = "llama3".into();
    let new = decoder_of(&with(llama(), &json!({"rope_parameters": new, "dtype": "bfloat16"})));
    let nested = json!({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 7e4}}});
    let old =
        decoder_of(&with(llama(), &json!({"rope_scaling": old, "rope_theta": 500000, "torch_dtype": "bfloat16"})));
    assert_eq!(old, new);
    assert_eq!(decoder_of(&with(llama(), &nested)).ropes[0], Rope { theta: 7e4, scaling: RopeScaling::Default });
    let mut twice = json!({"rope_parameters": new_scaling, "original_max_position_embeddings": 512});
    let of = |value: &Value| match decoder_of(&with(llama(), value)).ropes[0].scaling.clone() {
        RopeScaling::Llama3 { original_max_position_embeddings, .. } => original_max_position_embeddings,
        other => panic!("{other:?}"),
    };
    assert_eq!(of(&twice), 512, "beside the others it comes first");
    twice["original_max_position_embeddings"] = Value::Null;
    assert_eq!(of(&twice), 4096);
    let linear = json!({"rope_scaling": {"type": "linear", "factor": 2}});
    assert_eq!(decoder_of(&with(llama(), &linear)).ropes[0].scaling, RopeScaling::Linear { factor: 2.0 });
    assert_eq!(decoder_of(&llama()).ropes[0], Rope { theta: 10_000.0, scaling: RopeScaling::Default });
}

#[test]
fn defaults_are_those_of_each_class() {
    let bare = |class: &str| {
        let mut map = llama().as_object().expect("an object").clone();
        map.insert("architectures".into(), json!([class]));
        map.insert("num_attention_heads".into(), 32.into());
        map.shift_remove("num_key_value_heads");
        decoder_of(&Value::Object(map))
    };
    assert_eq!(bare("LlamaForCausalLM").heads[0].n_kv, 32);
    assert_eq!(bare("MistralForCausalLM").heads[0].n_kv, 8);
    assert_eq!((bare("Qwen3ForCausalLM").heads[0].dim, bare("Qwen2ForCausalLM").heads[0].dim), (128, 8));
    let by_type = json!({"architectures": null, "model_type": "mistral"});
    assert_eq!(decoder_of(&with(llama(), &by_type)).architecture, Architecture::Mistral);
}

#[test]
fn windows_count_only_where_they_are_active() {
    // Of the first layer that has one.
    let window = |change: Value| decoder_of(&with(llama(), &change)).windows.into_iter().flatten().next();
    let mistral = json!(["MistralForCausalLM"]);
    let qwen = json!(["Qwen2ForCausalLM"]);
    assert_eq!(window(json!({"architectures": mistral, "sliding_window": null})), None);
    // Left out it is 4096.
    assert_eq!(window(json!({"architectures": mistral, "max_position_embeddings": 8192})), Some(4096));
    let left_out = json!({"architectures": qwen, "use_sliding_window": true, "max_window_layers": 0,
                          "max_position_embeddings": 8192});
    assert_eq!(window(left_out), Some(4096));
    assert_eq!(window(json!({"architectures": mistral, "sliding_window": 4096})), Some(4096));
    assert_eq!(window(json!({"architectures": mistral, "sliding_window": 8192})), None);
    assert_eq!(window(json!({"architectures": qwen, "sliding_window": 64, "use_sliding_window": false})), None);
    let on = json!({"architectures": qwen, "sliding_window": 64, "use_sliding_window": true, "max_window_layers": 1});
    assert_eq!(window(on), Some(64));
    let all_full = json!({"architectures": qwen, "sliding_window": 64, "use_sliding_window": true});
    assert_eq!(window(all_full), None);
    assert_eq!(window(json!({"sliding_window": 64})), None, "Llama has no window");
    // Which layers have one.
    let windows = |change: Value| decoder_of(&with(llama(), &change)).windows;
    let layers = json!({"architectures": qwen, "sliding_window": 64, "use_sliding_window": true,
                        "num_hidden_layers": 3, "max_window_layers": 1});
    assert_eq!(windows(layers.clone()), [None, Some(64), Some(64)]);
    let mut types = layers;
    types["layer_types"] = json!(["sliding_attention", "full_attention", "sliding_attention"]);
    assert_eq!(windows(types.clone()), [Some(64), None, Some(64)]);
    // Those that do not ask which layer it is have it in all.
    for (name, extra) in [("Qwen3MoeForCausalLM", "num_experts"), ("MixtralForCausalLM", "num_local_experts")] {
        let mut uniform = types.clone();
        (uniform["architectures"], uniform[extra]) = (json!([name]), 8.into());
        assert_eq!(windows(uniform), [Some(64); 3], "{name}");
    }
    // And those whose types count, whatever else is said.
    let mut smol = types.clone();
    (smol["architectures"], smol["use_sliding_window"]) = (json!(["SmolLM3ForCausalLM"]), false.into());
    assert_eq!(windows(smol.clone()), [Some(64), None, Some(64)]);
    smol["sliding_window"] = Value::Null;
    let message = parse(&with(llama(), &smol)).expect_err("no window");
    assert!(message.contains("sliding_window: missing, expected a number"), "{message}");
    smol["layer_types"] = Value::Null;
    assert_eq!(windows(smol), [None; 3]);
    types["layer_types"] = json!(["sliding_attention"]);
    let message = parse(&with(llama(), &types)).expect_err("a type is missing");
    assert!(message.contains("layer_types") && message.contains("1 entries, expected 3, one a layer"), "{message}");
}

#[test]
fn what_is_not_done_is_refused_by_name() {
    let refused = |change: Value| parse(&with(llama(), &change)).expect_err("must be refused");
    assert_eq!(
        refused(json!({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}})),
        "config.json: rope_scaling.rope_type: \"dynamic\" is not supported; supported: default, linear, llama3, yarn, \
         longrope, proportional"
    );
    let message = refused(json!({"architectures": ["DeepseekV32ForCausalLM"]}));
    let expected = "config.json: architectures: DeepseekV32ForCausalLM is not supported; supported: Qwen3ForCausalLM, ";
    assert!(message.starts_with(expected), "{message}");
    assert!(message.ends_with(&Architecture::ALL.map(Architecture::class_name).join(", ")), "{message}");
    for (change, word) in [
        (json!({"hidden_act": "gelu"}), "hidden_act: \"gelu\""),
        (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor: 0.5"),
        (json!({"rope_parameters": {"partial_rotary_factor": 0.25}}), "rope_parameters.partial_rotary_factor"),
        (json!({"quantization_config": {"quant_method": "hqq"}}), "quantization_config: \"hqq\""),
        (json!({"compression_config": {"quant_method": "aqlm"}}), "compression_config: \"aqlm\""),
        (json!({"num_local_experts": 8}), "num_local_experts: 8"),
        (json!({"layer_types": ["linear_attention"]}), "linear_attention"),
        (json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}}), "\"dynamic\""),
        (
            json!({"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}}),
            "rope_parameters",
        ),
    ] {
        let message = refused(change);
        assert!(message.contains(word) && message.contains("not supported"), "{message}");
    }
}

#[test]
fn senseless_numbers_are_refused() {
    let refused = |change: Value| parse(&with(llama(), &change)).expect_err("must be refused");
    assert_eq!(
        refused(json!({"hidden_size": 0})),
        "config.json: hidden_size: 0, expected a whole number from 1 to 131072"
    );
    assert_eq!(
        refused(json!({"num_key_value_heads": 3})),
        "config.json: num_key_value_heads: 3, expected a divisor of num_attention_heads, 8"
    );
    assert_eq!(
        refused(json!({"vocab_size": null})).split(", expected").next(),
        Some("config.json: vocab_size: missing")
    );
    for change in [
        json!({"hidden_size": -1}),
        json!({"hidden_size": "256"}),
        json!({"hidden_size": 1u64 << 60}),
        json!({"hidden_size": 255, "head_dim": null}),
        json!({"head_dim": 31}),
        json!({"num_hidden_layers": 2.5}),
        json!({"rms_norm_eps": -1}),
        json!({"rope_theta": 0}),
        json!({"max_position_embeddings": 0}),
        json!({"tie_word_embeddings": "yes"}),
        json!({"rope_scaling": {"type": "llama3", "factor": 8}}),
        json!({"rope_scaling": {"type": "yarn", "factor": 0.5}}),
        json!({"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 32}}),
        json!({"rope_scaling": {"type": "yarn", "factor": 4}, "rope_theta": 1}),
        json!({"rope_scaling": {"type": "yarn", "factor": 4, "truncate": 1}}),
        json!({"architectures": "LlamaForCausalLM"}),
        json!({"architectures": [], "model_type": null}),
    ] {
        let message = refused(change.clone());
        assert!(message.contains("expected") && !message.contains('\n'), "{change}: {message}");
    }
    assert!(parse(&json!([1])).expect_err("a list").contains("expected a JSON object"));
}

#[test]
fn some_layers_of_smollm3_do_not_turn() {
    let base = || with(llama(), &json!({"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 5}));
    let of = |change: Value| decoder_of(&with(base(), &change));
    let turns = |config: &DecoderConfig| config.ropes.iter().map(|rope| *rope != Rope::NONE).collect::<Vec<_>>();
    let usual = of(json!({}));
    assert_eq!(turns(&usual), [true, true, true, false, true]);
    assert_eq!((usual.ropes[0].theta, usual.tie_word_embeddings, usual.qk_norm), (2e6, true, QkNorm::None));
    assert_eq!(usual.windows, [None; 5]);
    assert_eq!(usual.ropes[3].inverse_frequencies(8, 4096), [0.0; 4]);
    assert_eq!(turns(&of(json!({"no_rope_layer_interval": 2}))), [true, false, true, false, true]);
    let given = json!({"no_rope_layers": [0, 1, 1, 1, 0, 1], "use_sliding_window": true, "sliding_window": 16});
    let given = of(given);
    assert_eq!(turns(&given), [false, true, true, true, false]);
    assert_eq!(given.windows, [Some(16), None, None, None, Some(16)], "what turns sees everything");
    for (change, expected) in [
        (json!({"no_rope_layers": [0, 1]}), "no_rope_layers: 2 entries, expected 5, one a layer"),
        (json!({"no_rope_layers": [0, 1, 2, 1, 1]}), "no_rope_layers"),
        (json!({"no_rope_layer_interval": 0}), "no_rope_layer_interval: 0, expected"),
    ] {
        let message = parse(&with(base(), &change)).expect_err(expected);
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn exaone_4_turns_where_it_slides() {
    let base = || with(llama(), &json!({"architectures": ["Exaone4ForCausalLM"], "num_hidden_layers": 4}));
    let of = |change: Value| decoder_of(&with(base(), &change));
    let turns = |config: &DecoderConfig| config.ropes.iter().map(|rope| *rope != Rope::NONE).collect::<Vec<_>>();
    let usual = of(json!({}));
    assert_eq!(usual.windows, [Some(4096), Some(4096), Some(4096), None]);
    assert_eq!(turns(&usual), [true, true, true, false]);
    assert_eq!((usual.qk_norm, usual.rms_norm_eps), (QkNorm::Heads, 1e-5));
    // Without a window all turn, even if the types of layers are said.
    let types = json!(["sliding_attention", "full_attention", "full_attention", "full_attention"]);
    let none = of(json!({"sliding_window": null, "layer_types": types}));
    assert_eq!((turns(&none), &none.windows[..]), (vec![true; 4], &[None; 4][..]));
    let some = of(json!({"sliding_window": 16, "sliding_window_pattern": 2}));
    assert_eq!((turns(&some), &some.windows[..2]), (vec![true, false, true, false], &[Some(16), None][..]));
}

#[test]
fn granite_multiplies() {
    let granite = with(llama(), &json!({"architectures": ["GraniteForCausalLM"]}));
    let plain = decoder_of(&granite);
    assert_eq!(
        (plain.attention_scale, plain.embedding_scale, plain.logits_divisor, plain.rms_norm_eps),
        (1.0, 1.0, 1.0, 1e-6)
    );
    let numbers = json!({"attention_multiplier": 0.125, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
                         "residual_multiplier": 0.5});
    let config = decoder_of(&with(granite, &numbers));
    assert_eq!(
        (config.attention_scale, config.embedding_scale, config.logits_divisor, config.rms_norm_eps),
        (0.125, 24.0, 8.0, 4e-6)
    );
    let others = decoder_of(&with(llama(), &numbers));
    assert_eq!((others.embedding_scale, others.logits_divisor), (1.0, 1.0), "nobody else does");
}

#[test]
fn some_layers_pass_states_on() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let open = |name: &str| read_value(&dir.join(name).join("config.json")).expect("JSON");
    let qwen = |change: Value| with(open("tiny-qwen3.5"), &change);
    let mixer = Mixer::DeltaRule(DeltaRule { key_heads: 2, value_heads: 4, key_dim: 32, value_dim: 24, taps: 4 });
    let config = decoder_of(&qwen(json!({})));
    let layers = vec![true, true, true, false];
    assert_eq!(config.recurrent, Some(Recurrent { mixer, layers: layers.clone() }));
    assert_eq!((config.mixer_of(2), config.mixer_of(3)), (Some(mixer), None));
    assert!(config.gate == Some(AttentionGate::BesideQueries) && config.architecture.has_norms_less_one());
    assert_eq!((config.heads[0].rotary_dim, config.heads[0].dim), (8, 32));
    // As its class has it, where the file does not say it.
    let keys = ["conv_kernel_dim", "key_head_dim", "num_key_heads", "num_value_heads", "value_head_dim"];
    let mut without: serde_json::Map<String, Value> =
        keys.iter().map(|key| (format!("linear_{key}"), Value::Null)).collect();
    without.extend([("layer_types".to_owned(), Value::Null), ("rope_parameters".to_owned(), Value::Null)]);
    let usual = decoder_of(&qwen(Value::Object(without)));
    let mixer = Mixer::DeltaRule(DeltaRule { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128, taps: 4 });
    assert_eq!((usual.recurrent, usual.heads[0].rotary_dim), (Some(Recurrent { mixer, layers }), 8));
    let every_second = qwen(json!({ "layer_types": null, "full_attention_interval": 2 }));
    assert_eq!(decoder_of(&every_second).recurrent.map(|r| r.layers), Some(vec![true, false, true, false]));
    assert_eq!(decoder_of(&qwen(json!({ "layer_types": null, "full_attention_interval": 1 }))).recurrent, None);
    // The half that reads, and experts whose size alone the file says.
    let half = json!({
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "text_config": qwen(json!({
            "architectures": null, "model_type": "qwen3_5_moe_text", "intermediate_size": null, "num_experts": 6,
            "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80,
        })),
    });
    let half = decoder_of(&half);
    let shared = SharedExpert { intermediate_size: 80, is_weighed: true };
    let experts = Experts { layers: vec![true; 4], shared: Some(shared), ..experts_of([6, 2, 48], true) };
    assert_eq!((half.experts, half.architecture), (Some(experts), Architecture::Qwen35Moe));

    // State spaces, by today's names and by older ones.
    let granite = |change: Value| {
        let sizes = json!({ "mamba_n_heads": 8, "mamba_d_head": "auto", "mamba_d_state": 16, "layer_types": ["linear_attention", "full_attention"] });
        with(with(open("tiny-granite4"), &sizes), &change)
    };
    let of_heads = StateSpace {
        heads: 8,
        head_dim: 32,
        state_dim: 16,
        taps: 4,
        conv_bias: true,
        linear_bias: false,
        norm_eps: 1e-5,
    };
    let mixer = Mixer::StateSpace(of_heads);
    assert_eq!(decoder_of(&granite(json!({}))).recurrent, Some(Recurrent { mixer, layers: vec![true, false] }));
    let older =
        granite(json!({ "layer_types": null, "layers_block_type": ["attention", "mamba"], "mamba_conv_bias": false }));
    let mixer = Mixer::StateSpace(StateSpace { conv_bias: false, ..of_heads });
    assert_eq!(decoder_of(&older).recurrent, Some(Recurrent { mixer, layers: vec![false, true] }));
    let all = decoder_of(&granite(json!({ "layer_types": null }))).recurrent;
    assert_eq!(all.map(|r| r.layers), Some(vec![true; 2]));

    let lfm2 = |change: Value| with(open("tiny-lfm2"), &change);
    let config = decoder_of(&lfm2(json!({})));
    let mixer = Mixer::Convolution { taps: 3, has_bias: false };
    assert_eq!(config.recurrent, Some(Recurrent { mixer, layers: vec![true, false, true] }));
    // Two thirds of 240, and then of other numbers, in sixteens.
    let size = |change: Value| decoder_of(&lfm2(change)).intermediate_size;
    assert_eq!([size(json!({})), size(json!({ "block_ffn_dim_multiplier": 1.3 }))], [160, 208]);
    assert_eq!(size(json!({ "block_ff_dim": 100 })), 80);
    assert_eq!(size(json!({ "block_auto_adjust_ff_dim": false })), 240);
    let older = lfm2(json!({
        "layer_types": null, "full_attn_idxs": [1], "tie_word_embeddings": true, "tie_embedding": false,
    }));
    let older = decoder_of(&older);
    assert_eq!((older.recurrent, older.tie_word_embeddings), (config.recurrent, false));
    assert_eq!(decoder_of(&lfm2(json!({ "layer_types": null, "full_attn_idxs": null }))).recurrent, None);

    for (file, expected) in [
        (qwen(json!({ "layer_types": ["linear_attention", "conv", "conv", "conv"] })), "layer_types: conv is not"),
        (qwen(json!({ "layer_types": ["linear_attention"] })), "layer_types: 1 entries, expected 4, one a layer"),
        (qwen(json!({ "linear_num_value_heads": 3 })), "linear_num_value_heads: 3, expected a multiple of"),
        (qwen(json!({ "linear_key_head_dim": 256 })), "linear_key_head_dim: 256, expected"),
        (qwen(json!({ "linear_conv_kernel_dim": 1 })), "linear_conv_kernel_dim: 1, expected"),
        (lfm2(json!({ "layer_types": ["conv", "linear_attention", "conv"] })), "layer_types: linear_attention is not"),
        (granite(json!({ "mamba_n_heads": 3 })), "mamba_n_heads: 3, expected a divisor of"),
        (granite(json!({ "mamba_d_head": 16 })), "mamba_d_head: 16, expected 32"),
        (granite(json!({ "mamba_d_state": 256 })), "mamba_d_state: 256, expected"),
        (granite(json!({ "mamba_n_groups": 2 })), "mamba_n_groups: 2 is not"),
        (granite(json!({ "time_step_limit": [0.001, 0.1] })), "time_step_limit: "),
        (qwen(json!({ "is_causal": false })), "is_causal: false is not"),
        (lfm2(json!({ "conv_L_cache": 17 })), "conv_L_cache: 17, expected"),
        (lfm2(json!({ "block_ffn_dim_multiplier": 0.0 })), "intermediate_size: 240, expected 1 to"),
    ] {
        let error = parse(&file).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    // They have no states, and layers of such types do not change that.
    assert_eq!(decoder_of(&llama()).recurrent, None);
    assert!(parse(&with(llama(), &json!({ "layer_types": ["conv", "conv"] }))).is_err());
}

#[test]
fn olmo_normalises_rows() {
    let olmo = |class: &str| with(llama(), &json!({"architectures": [class], "num_hidden_layers": 4}));
    let two = decoder_of(&olmo("Olmo2ForCausalLM"));
    assert_eq!((two.qk_norm, two.ropes[0].theta, &two.windows[..]), (QkNorm::Rows, 1e4, &[None; 4][..]));
    let yarn = json!({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024});
    let three = decoder_of(&with(olmo("Olmo3ForCausalLM"), &json!({"rope_scaling": yarn, "rope_theta": 5e4})));
    assert_eq!(three.windows, [Some(4096), Some(4096), Some(4096), None]);
    let mixture = decoder_of(&with(olmo("OlmoeForCausalLM"), &json!({"num_experts": 16})));
    let expected = Experts { layers: vec![true; 4], ..experts_of([16, 8, 640], false) };
    assert_eq!((mixture.qk_norm, mixture.experts), (QkNorm::Rows, Some(expected)));
    let message = parse(&with(olmo("OlmoeForCausalLM"), &json!({"clip_qkv": 8.0}))).expect_err("clipped");
    assert!(message.contains("clip_qkv: 8.0 is not supported"), "{message}");
    assert_eq!(three.ropes[0], Rope { theta: 5e4, scaling: RopeScaling::Default });
    assert!(matches!(three.ropes[3], Rope { theta: 5e4, scaling: RopeScaling::Yarn { factor: 8.0, .. } }));
}

#[test]
fn classes_without_a_head_and_encoders_with_one() {
    for (class, expected) in [
        ("Qwen3Model", Some(Architecture::Qwen3)),
        ("MistralModel", Some(Architecture::Mistral)),
        ("Gemma3TextModel", Some(Architecture::Gemma3)),
        ("BertForMaskedLM", Some(Architecture::Bert)),
        ("XLMRobertaModel", Some(Architecture::Roberta)),
        ("RobertaForSequenceClassification", Some(Architecture::Roberta)),
        ("CamembertModel", Some(Architecture::Roberta)),
        ("ModernBertForMaskedLM", Some(Architecture::ModernBert)),
        ("BertForCausalLM", None),
        ("LlamaForMaskedLM", None),
        ("Model", None),
    ] {
        assert_eq!(Architecture::from_class_name(class), expected, "{class}");
    }
    for architecture in Architecture::ALL {
        assert_eq!(Architecture::from_class_name(architecture.class_name()), Some(architecture));
        assert_eq!(Architecture::from_model_type(architecture.model_type()), Some(architecture));
    }
}

#[test]
fn roberta_counts_from_the_row_after_the_paddings() {
    let base = json!({
        "architectures": ["XLMRobertaModel"], "hidden_act": "gelu", "hidden_size": 384, "intermediate_size": 1536,
        "layer_norm_eps": 1e-5, "max_position_embeddings": 514, "model_type": "xlm-roberta", "num_attention_heads": 12,
        "num_hidden_layers": 12, "pad_token_id": 1, "type_vocab_size": 1, "vocab_size": 250_002,
    });
    let of = |change: Value| parse(&with(base.clone(), &change));
    for (change, first, longest) in
        [(json!({}), 2, 512), (json!({"pad_token_id": null}), 2, 512), (json!({"pad_token_id": 0}), 1, 513)]
    {
        let config = of(change).expect("an encoder");
        let ModelConfig::Bert(bert) = &config else { panic!("{config:?}") };
        assert_eq!((bert.first_position, config.max_position_embeddings()), (first, longest));
    }
    let message = of(json!({"max_position_embeddings": 2})).expect_err("no room");
    assert_eq!(message, "config.json: max_position_embeddings: 2, expected more than 2, the row of the first position");
}

#[test]
fn bert_of_a_sentence_model() {
    let base = json!({
        "architectures": ["BertModel"], "hidden_act": "gelu", "hidden_size": 384, "intermediate_size": 1536,
        "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert", "num_attention_heads": 12,
        "num_hidden_layers": 6, "position_embedding_type": "absolute", "type_vocab_size": 2, "vocab_size": 30522,
    });
    match parse(&base) {
        Ok(ModelConfig::Bert(c)) => assert_eq!((c.head_dim, c.layer_norm_eps, c.n_layers), (32, 1e-12, 6)),
        other => panic!("{other:?}"),
    }
    for change in [json!({"position_embedding_type": "relative_key"}), json!({"hidden_act": "gelu_new"})] {
        assert!(parse(&with(base.clone(), &change)).expect_err("refused").contains("not supported"));
    }
}

#[test]
fn modern_berts_layers() {
    let layers = |change: Value| match parse(&with(json!({ "architectures": ["ModernBertForMaskedLM"] }), &change)) {
        Ok(ModelConfig::ModernBert(c)) => {
            assert_eq!((c.ropes.len(), c.windows.len(), c.head_dim), (c.n_layers, c.n_layers, 64));
            c.ropes.iter().zip(&c.windows).map(|(rope, window)| (rope.theta, *window)).take(4).collect::<Vec<_>>()
        }
        other => panic!("{other:?}"),
    };
    let (all, near) = ((1.6e5, None), (1e4, Some(64)));
    assert_eq!(layers(json!({})), [all, near, near, all]);
    let older = json!({ "global_attn_every_n_layers": 2, "global_rope_theta": 5e5, "local_rope_theta": 3e4, "local_attention": 9 });
    assert_eq!(layers(older), [(5e5, None), (3e4, Some(4)), (5e5, None), (3e4, Some(4))]);
    let newer = json!({ "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
                        "rope_parameters": { "full_attention": { "rope_theta": 7e4 }, "sliding_attention": null } });
    assert_eq!(layers(newer), [near, (7e4, None)]);
    for (change, expected) in [
        (json!({ "hidden_activation": "silu" }), "hidden_activation: \"silu\" is not supported"),
        (json!({ "layer_types": ["full_attention"] }), "layer_types: 1"),
        (json!({ "num_attention_heads": 5 }), "num_attention_heads: 5, expected heads of an even number"),
        (json!({ "local_attention": 1 }), "local_attention: 1"),
        (json!({ "rope_scaling": { "rope_type": "linear", "factor": 2.0 } }), "rope_scaling: "),
    ] {
        let message = parse(&with(json!({ "model_type": "modernbert" }), &change)).expect_err(expected);
        assert!(message.contains(expected), "{message}");
    }
}

/// Gemma's window is what it sees to both sides together; that of any other decoder which is told not to be causal, to
/// each.
#[test]
fn decoders_that_see_what_comes_after() {
    let tiny = json!({ "architectures": ["Gemma3TextModel"], "sliding_window": 512, "num_hidden_layers": 6 });
    for (change, expected) in [
        (json!({}), (false, Some(512))),
        (json!({ "use_bidirectional_attention": true }), (true, Some(256))),
        (json!({ "is_causal": false }), (true, Some(512))),
        (json!({ "is_causal": true }), (false, Some(512))),
        // Half of it is what has to be less than the context.
        (json!({ "use_bidirectional_attention": true, "max_position_embeddings": 300 }), (true, Some(256))),
        (json!({ "use_bidirectional_attention": true, "max_position_embeddings": 256 }), (true, None)),
        (json!({ "max_position_embeddings": 300 }), (false, None)),
    ] {
        let config = decoder_of(&with(tiny.clone(), &change));
        assert_eq!((config.is_bidirectional, config.windows[0]), expected, "{change}");
        assert_eq!(config.windows[5], None);
    }
}

/// What is made of parts that others have.
#[test]
fn compositions() {
    let of = |name: &str, change: Value| {
        decoder_of(&with(with(llama(), &json!({ "architectures": null, "model_type": name })), &change))
    };
    let said = |name: &str, change: Value| {
        parse(&with(with(llama(), &json!({ "architectures": null, "model_type": name })), &change))
            .expect_err("refused")
    };
    let plain = |theta| Rope { theta, scaling: RopeScaling::Default };
    // Granite Swash: sinks, and windows in all layers but the first of four; each has a base, or turns nothing.
    let swash = of("granite_swa", json!({ "num_hidden_layers": 5, "layer_rope_theta": [1e4, 0, 77.0, 1e4, 0.0] }));
    assert_eq!(swash.windows, [None, Some(128), Some(128), Some(128), None]);
    assert_eq!(swash.ropes, [plain(1e4), Rope::NONE, plain(77.0), plain(1e4), Rope::NONE]);
    assert!(swash.has_sinks && swash.experts.is_none());
    let typed =
        json!({ "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7, "rope_theta": 9.0 });
    let swash = of("granitemoe_swa", typed);
    assert_eq!((swash.windows, swash.ropes), (vec![Some(7), None], vec![plain(9.0); 2]));
    assert_eq!(swash.experts.map(|of| of.layers), Some(vec![true; 2]));
    for bases in [json!([1e4]), json!([0.5, 1e4])] {
        assert!(said("granite_swa", json!({ "layer_rope_theta": bases })).contains("layer_rope_theta"));
    }
    // Mellum: kinds of layers by name, of attention and of MLPs; each kind of attention turns by a base of its own.
    let ropes = json!({ "full_attention": { "rope_theta": 5e5 }, "sliding_attention": { "rope_theta": 1e4 } });
    let change = json!({
        "layer_types": ["sliding_attention", "full_attention"], "mlp_layer_types": ["sparse", "dense"], "num_experts": 16,
        "rope_parameters": ropes, "sliding_window": 9,
    });
    let mellum = of("mellum", change);
    assert_eq!((mellum.windows, mellum.ropes), (vec![Some(9), None], vec![plain(1e4), plain(5e5)]));
    let experts = Experts { layers: vec![true, false], ..experts_of([16, 8, 896], true) };
    assert_eq!((mellum.experts, mellum.heads[0].dim, mellum.qk_norm), (Some(experts), 128, QkNorm::Heads));
    assert_eq!(of("mellum", json!({ "rope_parameters": ropes })).windows, [None, None]);
    assert!(said("mellum", json!({})).contains("rope_parameters: missing"));
    // dots.llm1: experts as GLM's, but in all layers, not normalised, and without others beside them.
    let dots = of("dots1", json!({ "num_key_value_heads": 8, "n_routed_experts": 16, "num_experts_per_tok": 4 }));
    let sigmoids = corrected(1e-20);
    let experts = Experts { layers: vec![true; 2], sigmoids, ..experts_of([16, 4, 1408], false) };
    assert_eq!((dots.experts, dots.qk_norm, dots.windows), (Some(experts), QkNorm::Heads, vec![None, None]));
    let windows =
        |change: Value| of("dots1", with(json!({ "num_key_value_heads": 8, "num_hidden_layers": 3 }), &change)).windows;
    assert_eq!(windows(json!({ "max_window_layers": 1, "sliding_window": 5 })), [None, Some(5), Some(5)]);
    assert_eq!(windows(json!({ "max_window_layers": 1, "sliding_window": null })), [None; 3]);
    // Trinity: a gate of its own matrix; where layers have no window, they do not turn.
    let trinity =
        json!({ "mup_enabled": true, "layer_types": ["sliding_attention", "full_attention"], "route_scale": 2.5 });
    let trinity = of("afmoe", trinity);
    assert_eq!((trinity.gate, trinity.embedding_scale), (Some(AttentionGate::Elements), 16.0));
    assert_eq!((trinity.ropes, trinity.windows), (vec![plain(1e4), Rope::NONE], vec![Some(1024), None]));
    let experts = trinity.experts.expect("experts");
    assert_eq!((experts.layers, experts.sigmoids, experts.factor), (vec![false, true], corrected(1e-20), 2.5));
    assert_eq!(experts.shared.map(|of| of.intermediate_size), Some(2 * 1408));
    let every = json!({ "num_hidden_layers": 4, "global_attn_every_n_layers": 2, "sliding_window_pattern": 3 });
    assert_eq!(of("afmoe", every).windows, [Some(1024), None, Some(1024), None]);
    let no_window = json!({ "layer_types": ["sliding_attention", "full_attention"], "sliding_window": null });
    assert!(said("afmoe", no_window).contains("sliding_window: missing, expected a number"));
    assert_eq!(of("afmoe", json!({})).embedding_scale, 1.0);
    // LFM3: convolutions, windows, and heads of which the first pairs alone are turned.
    let part = json!({ "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25, "factor": 2.0 });
    let change = json!({
        "num_hidden_layers": 3, "layer_types": ["conv", "sliding_attention", "full_attention"], "sliding_window": 5, "head_dim": 16,
        "rope_parameters": { "full_attention": part, "sliding_attention": { "rope_theta": 1e4 } },
    });
    let lfm = of("lfm3", change.clone());
    assert_eq!((lfm.windows, lfm.gate), (vec![None, Some(5), None], Some(AttentionGate::Heads)));
    assert_eq!((&lfm.ropes[1], lfm.heads[0].rotary_dim), (&plain(1e4), 16));
    let frequencies = lfm.ropes[2].inverse_frequencies(16, 4096);
    let powers = [1.0f32, (1e6f64.powf(1.0 / 8.0) as f32).recip()].map(|f| f / 2.0);
    assert_eq!(frequencies, [&powers[..], &[0.0; 6]].concat());
    let recurrent = lfm.recurrent.expect("convolutions");
    assert_eq!(
        (recurrent.mixer, recurrent.layers),
        (Mixer::Convolution { taps: 7, has_bias: false }, vec![true, false, false])
    );
    assert_eq!(of("lfm3", with(change.clone(), &json!({ "use_attention_gate": false }))).gate, None);
    let keys = json!({ "attention_bias": true, "rms_norm_eps": 0.5, "tie_embedding": false });
    let other = of("lfm3", with(change.clone(), &keys));
    assert_eq!((other.attention_bias, other.output_bias, other.rms_norm_eps), (true, true, 0.5));
    assert!(other.tie_word_embeddings);
    // What stands beside all keys is of every embedding, but Mellum's.
    let beside = json!({ "full_attention": { "rope_type": "proportional" }, "sliding_attention": {} });
    let beside = json!({ "rope_parameters": beside, "partial_rotary_factor": 0.5 });
    let part = |config: DecoderConfig, layer: usize| config.ropes[layer].scaling.clone();
    let expected = RopeScaling::Proportional { part: 0.5, factor: 1.0 };
    let only_full = with(beside.clone(), &json!({ "layer_types": ["conv", "full_attention"] }));
    assert!(said("lfm3", only_full).contains("partial_rotary_factor"), "the other embedding would have it, too");
    let llama = json!({ "rope_parameters": { "rope_type": "proportional" }, "partial_rotary_factor": 0.5 });
    assert_eq!(part(of("llama", llama), 0), expected);
    assert!(said("mellum", beside).contains("partial_rotary_factor"));
    assert!(said("glm4", json!({ "rope_parameters": { "rope_type": "proportional" } })).ends_with("longrope"));
    let older = json!({ "rope_scaling": { "rope_type": "linear", "factor": 8.0 } });
    assert!(said("lfm3", with(change.clone(), &older)).contains("rope_scaling"));
    let one = json!({ "rope_parameters": { "full_attention": { "rope_theta": 1e4 } } });
    assert!(said("lfm3", with(change.clone(), &one)).contains("rope_parameters.sliding_attention: missing"));
    let yarn = json!({ "rope_parameters": { "rope_type": "yarn", "factor": 2.0 }, "layer_rope_theta": [1, 1e4] });
    assert!(said("granite_swa", yarn).contains("YaRN"));
    for (key, value) in [
        ("use_sandwich_norm", json!(false)),
        ("layer_types", Value::Null),
        ("layer_types", json!(["mamba", "conv", "conv"])),
    ] {
        assert!(said("lfm3", with(change.clone(), &json!({ key: value }))).contains(key), "{key}");
    }
}

fn any_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (0u64..64).prop_map(Value::from),
        "[a-z]{0,8}".prop_map(Value::from),
        Just(json!({})),
        Just(json!([])),
        Just(json!({"type": "llama3", "factor": 1e300})),
    ]
}

proptest! {
    /// Any value under any key we read is understood or refused in one line.
    #[test]
    fn any_value_is_understood_or_refused(
        key in proptest::sample::select(vec![
            "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
            "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling",
            "rope_parameters", "tie_word_embeddings", "attention_bias", "mlp_bias", "max_position_embeddings",
            "sliding_window", "layer_types", "hidden_act", "partial_rotary_factor", "quantization_config",
        ]),
        value in any_value(),
    ) {
        match parse(&with(llama(), &json!({key: value}))) {
            Ok(ModelConfig::Decoder(c)) => {
                prop_assert!(c.heads.iter().all(|heads| c.n_heads % heads.n_kv == 0 && heads.dim % 2 == 0));
                prop_assert!(c.ropes[0].inverse_frequencies(c.heads[0].rotary_dim, 4096).iter().all(|f| f.is_finite()));
            }
            Ok(ModelConfig::Bert(_) | ModelConfig::ModernBert(_)) => {}
            Err(message) => prop_assert!(!message.contains('\n'), "{}", message),
        }
    }
}
