"""Random models of every architecture, their files written by `transformers`: its results beside ours.

    pip install sentence-transformers
    cargo build --release
    python tests/peers/random_models.py text 0 200 --program target/release/perpetua       # logits, by seed
    python tests/peers/random_models.py sentences 0 100 --program target/release/perpetua  # embeddings

A seed gives sizes (few of them round), RoPE scaling, windows, biases, experts, an element type, one file or shards, keys as today's
or as older files have them; sentence models get a pooling, prompts, a head that nobody wants; with --stored files have matrices as those
of a quantised model have them. Arithmetic is f32 on both sides. The
`reference` executor must agree but for rounding; CPU threads, whose KV cache is bf16, by divergence (a router's tie that this turns
shows as WRONG beside a reference that agrees). One line a model; --only KIND... chooses among the kinds.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMaskedLM, Mistral4ForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent.parent / "fixtures"))
import packings
from make_fixtures import fp8, save_fp8, save_mxfp4, to_mxfp4

DECODERS = ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "smollm3", "granite", "phi3", "olmo2", "olmo3", "exaone4", "seed_oss", "ministral3", "glm", "glm4", "ernie4_5", "granite_swa", "gemma4_text", "gemma4_unified_text", "hunyuan_v1_dense"]
# Layers pass states from row to row, most of them.
RECURRENT = ["qwen3_5_text", "qwen3_next", "lfm2", "lfm2_moe", "lfm3"]
EXPERTS = ["mixtral", "granitemoe", "granitemoeshared", "granitemoehybrid", "qwen3_moe", "qwen2_moe", "olmoe", "qwen3_5_moe_text", "gpt_oss", "mellum", "granitemoe_swa", "hunyuan_v1_moe"]
# The same, chosen by corrected sigmoids.
BY_SIGMOID = ["lfm2_moe", "glm4_moe", "solar_open", "exaone_moe", "dots1", "afmoe", "minimax_m2"]
# Attention to latents, the first of them with experts.
LATENT = ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "youtu", "minicpm3"]
# Models that see, too, and the one in them that reads.
HALVES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "qwen3_vl": "qwen3", "qwen2_5_vl": "qwen2", "mistral3": "mistral", "gemma3": "gemma3_text", "llava": "llama", "internvl": "qwen3", "gemma4": "gemma4_text", "gemma4_unified": "gemma4_unified_text"}
ENCODERS = ["bert", "roberta", "xlm-roberta", "camembert", "modernbert"]
LAYER_TYPES = ["full_attention", "sliding_attention"]
# Each type of layer has RoPE's parameters of its own.
BY_TYPE = ["gemma3_text", "olmo3", "mellum", "lfm3", "gemma4_text", "gemma4_unified_text"]
GRANITES = ["granite", "granitemoe", "granitemoeshared", "granitemoehybrid"]
SWAS = ["granite_swa", "granitemoe_swa"]
DTYPES = [torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]


def rope(r, kind):
    """RoPE's parameters, scaled or not."""
    given = {"rope_type": r.choice(["default", "default", "linear", "llama3", "yarn"]), "rope_theta": r.choice([1e4, 5e5, 1e6, 77.0])}
    if given["rope_type"] == "default":
        return given
    given["factor"] = r.choice([1.0, 2.0, 4.0, 8.0])
    if given["rope_type"] == "llama3":
        given |= {"low_freq_factor": 1.0, "high_freq_factor": r.choice([2.0, 4.0]), "original_max_position_embeddings": r.choice([16, 64, 128])}
    if given["rope_type"] == "yarn":
        given["original_max_position_embeddings"] = r.choice([16, 32, 64, 128])
        more = [{"beta_fast": 16.0, "beta_slow": 2.0}, {"attention_factor": 1.3}, {"mscale": 1.0, "mscale_all_dim": 0.8}]
        # transformers 5.24 looks for it in the wrong place where layers have parameters by type.
        more += [{"truncate": False}] if kind not in BY_TYPE else []
        for each in more:
            given |= each if r.random() < 0.3 else {}
    return given


def longrope(r, head_dim):
    """RoPE's parameters of Phi 3's: a part of each head may be turned, by numbers of its own for each pair."""
    part = r.choice([1.0, 0.75, 0.5])
    dim = int(head_dim * part)
    if dim % 2 or dim == 0:
        part, dim = 1.0, head_dim
    given = {"rope_type": "default", "rope_theta": r.choice([1e4, 5e5]), "partial_rotary_factor": part}
    if r.random() < 0.6:
        given |= {"rope_type": "longrope", "short_factor": [r.uniform(1, 2) for _ in range(dim // 2)]}
        given |= {"long_factor": [r.uniform(1, 30) for _ in range(dim // 2)]}
        given |= r.choice([{}, {}, {"factor": 4.0}, {"attention_factor": 1.2}])
    return given


def latent(r, kind, c):
    """What configurations with latent attention have more, or instead."""
    heads, layers = c["num_attention_heads"], c["num_hidden_layers"]
    turned = r.choice([2, 4, 8, 16, 32, 64])
    c.pop("head_dim", None)
    more = {"num_key_value_heads": heads, "qk_rope_head_dim": turned, "qk_nope_head_dim": r.choice([4, 8, 11, 16, 24, 48, 64, 128])}
    more |= {"q_lora_rank": r.choice([None, 8, 24, 33, 64, 192]), "kv_lora_rank": r.choice([8, 16, 24, 33, 64, 128, 512])}
    more |= {"v_head_dim": r.choice([4, 8, 11, 16, 33, 64, 128]), "attention_bias": r.random() < 0.3}
    if kind == "deepseek_v2":  # transformers wants pairs on two elements
        more |= {key: more[key] + more[key] % 2 for key in ["qk_nope_head_dim", "kv_lora_rank"]}
    if kind in ("deepseek_v2", "minicpm3"):  # and it so
        more["hidden_size"] = heads * max(1, c["hidden_size"] // heads)
    if kind not in ("deepseek_v2", "minicpm3"):
        more["rope_interleave"] = r.random() < 0.7
    if kind == "minicpm3":
        more |= {"scale_emb": r.choice([1, 12, 3.5]), "scale_depth": r.choice([None, 1.4, 0.7]), "dim_model_base": r.choice([None, 16, 256])}
        more |= {"mlp_bias": r.random() < 0.3, "rope_parameters": longrope(r, turned)}
        more["rope_parameters"].pop("partial_rotary_factor")
        if more["rope_parameters"]["rope_type"] == "longrope":
            numbers = {key: [r.uniform(1, 2) for _ in range(turned // 2)] for key in ["short_factor", "long_factor"]}
            # The first training's context is what it looks for; these are as long.
            more["rope_parameters"] |= numbers | {"original_max_position_embeddings": c["max_position_embeddings"]}
    elif kind == "mistral4":
        yarn = {"rope_type": "yarn", "rope_theta": r.choice([1e4, 1e6]), "factor": r.choice([2.0, 16.0]), "original_max_position_embeddings": r.choice([7, 16, 50, 128])}
        more["rope_parameters"] = yarn | {"mscale": 1.0, "mscale_all_dim": r.choice([0.0, 1.0]), "llama_4_scaling_beta": r.choice([0.1, 0.5])}
    elif c["rope_parameters"]["rope_type"] == "yarn" and r.random() < 0.7:
        more["rope_parameters"] = c["rope_parameters"] | {"mscale": r.choice([0.707, 1.0]), "mscale_all_dim": r.choice([0.707, 1.0])}
    if kind == "youtu":
        more["pad_token_id"] = None  # transformers 5.24 loads that row of the embeddings as zeros
    if kind in ("youtu", "minicpm3"):
        return more
    experts = r.choice([2, 4, 8])
    more |= {"n_routed_experts": experts, "num_experts_per_tok": r.randint(1, min(experts, 4)), "moe_intermediate_size": r.choice([8, 24, 64])}
    more |= {"n_shared_experts": r.choice([1, 2]), "n_group": 1, "topk_group": 1, "routed_scaling_factor": r.choice([1.0, 2.5])}
    more |= {"norm_topk_prob": r.random() < 0.7} if kind != "deepseek_v2" else {"mlp_bias": r.random() < 0.3}
    more |= {"mlp_layer_types": [r.choice(["dense", "sparse"]) for _ in range(layers)]} if kind == "glm4_moe_lite" else {"first_k_dense_replace": r.randrange(layers + 1)}
    return more


def text_config(r, kind):
    head_dim = r.choice([2, 4, 8, 10, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128])
    kv_heads = r.choice([1, 2, 3, 4])
    heads = kv_heads * r.choice([1, 2, 3, 4, 5, 7, 8])
    while heads * head_dim > 1024 and heads > kv_heads:
        heads -= kv_heads
    has_none = ("qwen2", "qwen2_moe", *GRANITES, *SWAS, "phi3", "olmo2", "olmo3", "olmoe", "lfm2", "lfm2_moe")
    has_head_dim = kind not in (*has_none, "llama", "mistral", "smollm3") or kind not in has_none and r.random() < 0.5
    hidden = r.choice([6, 16, 33, 48, 64, 96, 100, 128, 160, 192, 200, 256, 300]) if has_head_dim else heads * head_dim
    if kind in ("llama", "gemma3_text", "smollm3", "exaone4", *GRANITES, *SWAS):  # transformers wants it so
        hidden = heads * max(1, hidden // heads)
    layers = r.choice([1, 2, 3, 4])
    c = {
        "vocab_size": r.choice([50, 128, 257, 512, 997, 1024, 3000]),
        "hidden_size": hidden,
        "intermediate_size": r.choice([8, 31, 48, 64, 96, 130, 192, 256, 333, 512]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": r.random() < 0.5,
        "rms_norm_eps": r.choice([1e-6, 1e-5, 1e-3]),
        "max_position_embeddings": r.choice([128, 256, 512, 4096]),
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": rope(r, kind),
    }
    if has_head_dim:
        c["head_dim"] = head_dim
    if kind in ("llama", "smollm3", "granite", "granite_swa"):
        c |= {"attention_bias": r.random() < 0.4, "mlp_bias": r.random() < 0.4}
    if kind in ("qwen3", "qwen3_moe", "mellum", "dots1", "afmoe", "lfm3", *GRANITES[1:], *SWAS[1:]):
        c["attention_bias"] = r.random() < 0.4
    if kind in ("mistral", "mixtral"):
        c["sliding_window"] = r.choice([None, 1, 3, 7, 16, 40, 4096])
    if kind in ("qwen2", "qwen3", "qwen3_moe", "qwen2_moe") and r.random() < 0.5:
        c |= {"use_sliding_window": True, "sliding_window": r.choice([1, 5, 16, 50]), "max_window_layers": r.randrange(layers + 1)}
    if kind == "smollm3":
        c |= {"no_rope_layers": [r.choice([0, 1]) for _ in range(layers)]} if r.random() < 0.6 else {"no_rope_layer_interval": r.choice([1, 2, 4])}
        c |= {"use_sliding_window": True, "sliding_window": r.choice([1, 5, 16, 50])} if r.random() < 0.4 else {}
    if kind in ("mixtral", *GRANITES[1:], *SWAS[1:]):
        experts = r.choice([1, 2, 4, 8])
        c |= {"num_local_experts": experts, "num_experts_per_tok": r.randint(1, min(experts, 4))}
    if kind in ("qwen3_moe", "qwen2_moe", "qwen3_next"):
        experts = r.choice([1, 4, 8, 16])
        c |= {"num_experts": experts, "num_experts_per_tok": r.randint(1, min(experts, 8)), "norm_topk_prob": r.random() < 0.5}
        c |= {"moe_intermediate_size": r.choice([8, 24, 64, 100]), "decoder_sparse_step": r.choice([1, 1, 2])}
        c["mlp_only_layers"] = r.sample(range(layers), r.randrange(2))
    if kind == "phi3":
        c |= {"sliding_window": r.choice([None, 1, 7, 40]), "original_max_position_embeddings": r.choice([16, 32, 64, 4096])}
        c["rope_parameters"] = longrope(r, head_dim)
    if kind in SWAS:
        c |= {"layer_types": [r.choice(LAYER_TYPES) for _ in range(layers)]} if r.random() < 0.7 else {}
        c |= {"sliding_window": r.choice([1, 5, 16, 128]), "layer_rope_theta": r.choice([None, [r.choice([0, 1e4, 77.0]) for _ in range(layers)]])}
    if kind in (*GRANITES, *SWAS):
        c |= {"attention_multiplier": r.choice([1 / head_dim, head_dim ** -0.5]), "embedding_multiplier": r.choice([1.0, 3.0, 12.0])}
        c |= {"residual_multiplier": r.choice([1.0, 0.22, 1.5]), "logits_scaling": r.choice([1.0, 0.5, 8.0])}
    if kind in ("qwen2_moe", "qwen3_next"):
        c |= {"shared_expert_intermediate_size": r.choice([8, 31, 64, 100])} | ({"qkv_bias": r.random() < 0.7} if kind == "qwen2_moe" else {})
    if kind in (*GRANITES[2:], *SWAS[1:]):
        c["shared_intermediate_size"] = r.choice([8, 31, 64, 130])
    if kind == "granitemoehybrid":
        kinds = r.choice([["full_attention"], ["full_attention", "linear_attention", "linear_attention"]])
        c |= {"layer_types": [r.choice(kinds) for _ in range(layers)], "position_embedding_type": r.choice(["rope", "rope", None])}
        c |= {"mamba_n_heads": 2, "mamba_expand": 2, "mamba_d_state": r.choice([4, 16, 33, 128])} | r.choice([{}, {"num_local_experts": 0}])
        c |= {"mamba_d_conv": r.choice([2, 4]), "mamba_conv_bias": r.random() < 0.7, "mamba_proj_bias": r.random() < 0.3}
    if kind == "seed_oss":
        c |= {key: r.random() < 0.5 for key in ["attention_bias", "attention_out_bias", "mlp_bias"]}
    if kind == "ministral3":
        c["sliding_window"] = r.choice([None, None, 7, 40])
        c["rope_parameters"] |= {"llama_4_scaling_beta": r.choice([0.1, 0.5]), "original_max_position_embeddings": r.choice([7, 16, 50, 128])}
    if kind == "olmoe":
        experts = r.choice([1, 4, 8, 16])
        c |= {"num_experts": experts, "num_experts_per_tok": r.randint(1, min(experts, 8)), "norm_topk_prob": r.random() < 0.5}
    if kind in ("olmo2", "olmo3", "olmoe"):
        c["attention_bias"] = r.random() < 0.4
    if kind in ("olmo3", "exaone4"):
        types = [r.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
        c |= {"layer_types": types, "sliding_window": r.choice([2, 8, 16, 64])}
    if kind == "olmo3":
        c["rope_parameters"] = {"full_attention": rope(r, kind), "sliding_attention": rope(r, kind)}
    if kind == "exaone4" and r.random() < 0.3:
        c |= {"layer_types": ["full_attention"] * layers, "sliding_window": None}
    if kind in ("glm", "glm4"):
        c["attention_bias"] = r.random() < 0.5
    if kind == "ernie4_5":
        c["use_bias"] = r.random() < 0.5
    if kind.startswith(("qwen3_5", "qwen3_next")):
        c |= {"head_dim": r.choice([8, 16, 32, 64, 256]), "attention_bias": r.random() < 0.3, "linear_conv_kernel_dim": r.choice([2, 3, 4, 4])}
        c |= {"linear_num_key_heads": (keys := r.choice([1, 2, 3])), "linear_num_value_heads": keys * r.choice([1, 2, 3])}
        c |= {"linear_key_head_dim": r.choice([4, 16, 33, 128]), "linear_value_head_dim": r.choice([4, 15, 32, 128])}
        c["rope_parameters"] = {"rope_type": "default", "rope_theta": r.choice([1e4, 1e7])} | r.choice([{}, {"partial_rotary_factor": 0.5}])
        c |= r.choice([{"full_attention_interval": r.choice([1, 2, 4])}, {"layer_types": [r.choice(["linear_attention", "full_attention"]) for _ in range(layers)]}])
    if kind == "qwen3_5_moe_text":
        experts = r.choice([1, 4, 8, 16])
        c |= {"num_experts": experts, "num_experts_per_tok": r.randint(1, min(experts, 8)), "moe_intermediate_size": r.choice([8, 24, 64, 100])}
        c |= {"shared_expert_intermediate_size": r.choice([8, 31, 64, 100])}
    if kind == "gpt_oss":
        experts = r.choice([1, 2, 4, 8])
        c |= {"num_local_experts": experts, "num_experts_per_tok": r.randint(1, min(experts, 4)), "attention_bias": r.random() < 0.7}
        c |= {"swiglu_limit": r.choice([7.0, 1.0, 0.3]), "swiglu_alpha": r.choice([1.702, 1.0]), "sliding_window": r.choice([1, 5, 16, 128])}
        c |= r.choice([{}, {"layer_types": [r.choice(LAYER_TYPES) for _ in range(layers)]}])
    if kind == "mellum":
        experts = r.choice([4, 8, 16])
        c |= {"num_experts": experts, "num_experts_per_tok": r.randint(1, min(experts, 8)), "norm_topk_prob": r.random() < 0.7}
        c |= {"moe_intermediate_size": r.choice([8, 24, 64, 100]), "mlp_layer_types": [r.choice(["dense", "sparse"]) for _ in range(layers)]}
        c |= {"layer_types": [r.choice(LAYER_TYPES) for _ in range(layers)], "sliding_window": r.choice([2, 8, 16, 64])}
        c["rope_parameters"] = {"full_attention": rope(r, kind), "sliding_attention": rope(r, kind)}
    if kind in BY_SIGMOID:
        name = {"lfm2_moe": "num_experts", "exaone_moe": "num_experts", "afmoe": "num_experts", "minimax_m2": "num_local_experts"}.get(kind, "n_routed_experts")
        experts = r.choice([2, 4, 8, 16])
        c |= {name: experts, "num_experts_per_tok": r.randint(1, min(experts, 8))}
    if kind in BY_SIGMOID[:-1]:
        c |= {"moe_intermediate_size": r.choice([8, 24, 64, 100]), "norm_topk_prob": r.random() < 0.7, "routed_scaling_factor": r.choice([1.0, 2.5])}
    if kind == "dots1":
        c |= {"first_k_dense_replace": r.randrange(layers + 1), "n_shared_experts": r.choice([1, 2]), "n_group": 1, "topk_group": 1}
        c |= r.choice([{"layer_types": [r.choice(LAYER_TYPES) for _ in range(layers)]}, {"max_window_layers": r.randrange(layers + 1)}]) | {"sliding_window": r.choice([2, 8, 16, 64])}
    if kind == "afmoe":
        c |= {"num_dense_layers": r.randrange(layers + 1), "num_shared_experts": r.choice([1, 2]), "route_scale": r.choice([1.0, 2.5]), "mup_enabled": r.random() < 0.5}
        c |= r.choice([{"layer_types": [r.choice(LAYER_TYPES) for _ in range(layers)]}, {"global_attn_every_n_layers": r.choice([1, 2, 3])}]) | {"sliding_window": r.choice([2, 8, 16, 64])}
    if kind in ("glm4_moe", "solar_open"):
        c |= {"attention_bias": r.random() < 0.5, "n_shared_experts": r.choice([1, 2]), "n_group": 1, "topk_group": 1}
    if kind == "glm4_moe":
        c |= {"first_k_dense_replace": r.randrange(layers + 1), "use_qk_norm": r.random() < 0.5}
    if kind == "exaone_moe":
        c |= {"mlp_layer_types": [r.choice(["dense", "sparse"]) for _ in range(layers)]} if r.random() < 0.5 else {"first_k_dense_replace": r.randrange(layers + 1)}
        c |= {"layer_types": [r.choice(LAYER_TYPES) for _ in range(layers)], "sliding_window": r.choice([2, 8, 16, 64]), "num_shared_experts": r.choice([1, 2])}
    if kind in ("glm4_moe", "minimax_m2", "glm", "glm4"):
        parts = [part for part in [1.0, 0.75, 0.5, 0.25] if int(head_dim * part) % 2 == 0 and int(head_dim * part) > 0]
        c["rope_parameters"]["partial_rotary_factor"] = r.choice(parts)
    if kind == "lfm2_moe":
        c |= {"num_dense_layers": r.randrange(layers + 1), "use_expert_bias": r.random() < 0.8}
    if kind == "lfm3":
        c |= {"layer_types": [r.choice(["conv", *LAYER_TYPES]) for _ in range(layers)], "conv_L_cache": r.choice([2, 3, 7]), "conv_bias": r.random() < 0.4}
        c |= {"sliding_window": r.choice([2, 8, 16, 64]), "use_attention_gate": r.random() < 0.8}
        turned = {"rope_type": "proportional", "rope_theta": r.choice([1e4, 1e6]), "partial_rotary_factor": r.choice([1.0, 0.5, 0.25])}
        c["rope_parameters"] = {"full_attention": r.choice([turned, rope(r, kind)]), "sliding_attention": rope(r, kind)}
        c["norm_eps"] = c.pop("rms_norm_eps")
    if kind in ("lfm2", "lfm2_moe"):
        c |= {"layer_types": [r.choice(["conv", "full_attention"]) for _ in range(layers)], "conv_L_cache": r.choice([2, 3, 3, 5]), "conv_bias": r.random() < 0.4}
        c["norm_eps"] = c.pop("rms_norm_eps")
    if kind == "lfm2":
        c |= {"block_multiple_of": r.choice([8, 32]), "block_auto_adjust_ff_dim": r.random() < 0.5}
        c |= {"block_ffn_dim_multiplier": r.choice([1.0, 1.3])}
    if kind.startswith("gemma4"):
        # The last one has none, whatever the file says; each type is there before those that share its keys.
        types = [r.choice(LAYER_TYPES) for _ in range(layers - 1)] + LAYER_TYPES[:1]
        c |= {"layer_types": types, "sliding_window": r.choice([2, 8, 16, 64]), "attention_k_eq_v": r.random() < 0.5, "attention_bias": r.random() < 0.2}
        c |= {"global_head_dim": r.choice([8, 16, 20, 40, 64, 80, 128]), "num_global_key_value_heads": r.choice([n for n in range(1, heads + 1) if heads % n == 0])}
        most = [n for n in range(layers) if set(types) == set(types[:layers - n])]
        c |= {"num_kv_shared_layers": r.choice(most), "use_double_wide_mlp": r.random() < 0.5, "final_logit_softcapping": r.choice([None, 30.0, 3.0])}
        turned = {"rope_type": "proportional", "rope_theta": r.choice([1e4, 1e6]), "partial_rotary_factor": r.choice([1.0, 0.5, 0.25])}
        c["rope_parameters"] = r.choice([None, {"full_attention": r.choice([turned, rope(r, kind)]), "sliding_attention": rope(r, kind)}])
    if kind == "gemma4_text":
        # transformers 5.24 does not run models with shared caches and without inputs of layers.
        c |= {"hidden_size_per_layer_input": r.choice([4, 8, 17, 32] + [0] * (c["num_kv_shared_layers"] == 0)), "vocab_size_per_layer_input": c["vocab_size"]}
        experts = r.choice([2, 4, 8])
        moe = {"num_experts": experts, "top_k_experts": r.randint(1, min(experts, 4)), "moe_intermediate_size": r.choice([8, 24, 64])}
        c |= {"enable_moe_block": True, **moe} if r.random() < 0.4 else {}
    if kind.startswith("hunyuan"):
        c["attention_bias"] = r.random() < 0.3
        if r.random() < 0.5 and head_dim > 2:
            c["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": r.choice([2.0, 1000.0]), "factor": 1.0, "beta_fast": 32, "beta_slow": 1}
    if kind == "hunyuan_v1_moe":
        experts = r.choice([1, 2, 4, 8])
        chosen = r.randint(1, min(experts, 4))
        c |= {"num_experts": experts, "moe_topk": r.choice([chosen, [chosen] * layers])}
    if kind in LATENT:
        c |= latent(r, kind, c)
    if kind == "gemma3_text":
        c |= {"query_pre_attn_scalar": r.choice([head_dim, 100, 168]), "sliding_window": r.choice([2, 8, 16, 64])}
        c["layer_types"] = [r.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
        c["rope_parameters"] = {"full_attention": rope(r, kind), "sliding_attention": rope(r, kind)}
    return c


def randomise(model, r, kind, dtype):
    """Weights that `dtype` holds, in f32, with which activations keep their size."""
    gain = r.choice([1.0, 1.4])
    embed = 0.5 if kind in ENCODERS else 0.03 if "gemma" in kind else 0.15
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(0, embed if "embed" in name else gain * (2 if "lm_head" in name else 1) / p.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                p.normal_(0, 0.3)
            elif name.endswith("A_log"):
                p.uniform_(-3, 1)
            else:
                p.uniform_(0.5, 1.5).sub_(int("gemma3" in kind or ("qwen3_5" in kind or kind == "qwen3_next") and "linear_attn.norm" not in name))
            if kind.startswith("gemma4") and name.endswith(("q_norm.weight", "k_norm.weight")):
                p.mul_(p.shape[0] ** -0.25)  # scores are not divided by the root of a head's elements
            p.copy_(p.to(dtype).float())
        # Not trained by gradients, and so no parameters.
        for name, correction in model.named_buffers():
            if name.endswith(("expert_bias", "e_score_correction_bias")):
                correction.copy_(correction.normal_(0, 0.2).to(dtype).float())
            if name.endswith("layer_scalar"):
                correction.copy_(correction.uniform_(0.5, 1.5).to(dtype).float())
    return model.eval()


def vision_config(kind, c):
    """The half that sees, as small as it may be."""
    if kind.startswith("qwen"):
        sizes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": c["hidden_size"]}
        return sizes | {"qwen2_5_vl": {"fullatt_block_indexes": [0]}, "qwen3_vl": {"deepstack_visual_indexes": [0]}}.get(kind, {})
    return {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}


def older_keys(folder, r):
    """config.json as earlier versions wrote it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    config["torch_dtype"] = config.pop("dtype", None)
    config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    if config["rope_scaling"] and r.random() < 0.5:
        config["rope_scaling"]["type"] = config["rope_scaling"].pop("rope_type")
    path.write_text(json.dumps(config))


def in_fp8(folder, r, kind):
    """The model whose matrices the files in `folder` have in FP8, from now on, as `transformers` reads them: in bf16."""
    # It knows scales of even parts alone.
    sides = {"block": r.choice([(128, 128), (16, 32), (8, 8)]), "tensor": None, "channel": (1, None)}
    strategy = r.choice(list(sides))

    def of(w):
        rows, k = sides[strategy] or w.shape
        block = (rows, k or w.shape[1])
        if w.shape[0] % block[0] or w.shape[1] % block[1]:
            return None
        made, scales = fp8(w, block)
        return made, scales.reshape([]) if strategy == "tensor" else scales

    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(sides["block"]) if strategy == "block" else None}
    save_fp8(folder, of, said)
    of_class = AutoModelForImageTextToText if kind in HALVES else Mistral4ForCausalLM if kind == "mistral4" else AutoModelForCausalLM
    model = of_class.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    for p in model.parameters():
        p.data = p.data.bfloat16().float()
    if strategy != "block" and r.random() < 0.5:  # as compressed-tensors calls them
        for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
            if path.suffix == ".json":
                path.write_text(path.read_text().replace("weight_scale_inv", "weight_scale"))
            else:
                save_file({name.replace("weight_scale_inv", "weight_scale"): each for name, each in load_file(path).items()}, path, metadata={"format": "pt"})
        weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
        said = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": said}))
    return model


# Of these others are made, or they say how a state changes: they are read in bf16 then.
IN_BF16 = {kind: ["q_proj", "k_proj"] for kind in ["glm", "glm4", "ernie4_5"]} | {"qwen3_next": ["in_proj_qkvz", "in_proj_ba"]}
IN_BF16 |= {kind: ["in_proj_a", "in_proj_b"] for kind in ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe"]}
IN_BF16 |= {kind: ["q_proj", "q_b_proj", "kv_b_proj"] for kind in LATENT}
WAYS = ["gptq", "awq", "pack-quantized", "int-quantized", "bitsandbytes", "nvfp4"]


def in_few_bits(folder, way, r, kind, turns_neighbours):
    """The model whose matrices the files in `folder` have in a few bits, from now on, as what these stand for; and what was chosen."""
    way = r.choice(WAYS) if way == "any" else way
    group, dtype, said = r.choice([16, 32, 64, 64, 128, 128, 10000]), r.choice([torch.float16, torch.bfloat16]), {}
    if way == "gptq":
        said = {"bits": r.choice([4, 4, 4, 8, 2]), "symmetric": r.random() < 0.5, "act_order": r.random() < 0.3, "version": r.choice([1, 2])}
    elif way == "pack-quantized":
        said = {"bits": r.choice([4, 4, 8]), "symmetric": r.random() < 0.6, "act_order": r.random() < 0.2}
    elif way == "bitsandbytes":
        said = r.choice([{}, {"kind": "nf4", "nested": True}, {"kind": "nf4", "nested": False}, {"kind": "fp4", "nested": r.random() < 0.5}])
    elif way == "nvfp4":
        said = {"divides": r.random() < 0.5}

    # Those are kept as they are, but for scales, which become bf16; beside them activations are rounded to 8 bits.
    are_fours = way in ["gptq", "pack-quantized"] and said["bits"] == 4 and said["symmetric"]
    dtype = torch.bfloat16 if are_fours else dtype

    def pack(w):
        if way in ["gptq", "awq", "pack-quantized", "int-quantized"]:
            return {"gptq": packings.gptq, "awq": packings.awq, "pack-quantized": packings.pack_quantized, "int-quantized": packings.int_quantized}[way](w, dtype, group=group, **said)
        if way == "nvfp4":
            return packings.nvfp4(w, dtype, **said)
        return packings.codes(w, dtype, **said) if said else packings.bytes_of_rows(w, dtype)

    def is_packed(name, w):
        # Some leave a few as they are, but no expert alone. Words of AWQ are along rows, scales of NVFP4 those of 16.
        return ("expert" in name or r.random() < 0.97) and not (way == "awq" and w.shape[0] % 8) and not (way == "nvfp4" and w.shape[1] % 16)

    plain = folder / "plain"
    plain.mkdir()
    for path in folder.glob("*.*"):
        shutil.copy(path, plain)
    of_all = packings.save(folder, pack, is_packed)

    def read(name, of):
        """As the network reads it."""
        is_exact = group % (32 if are_fours else 64) == 0 or group >= of.shape[1] or way == "bitsandbytes"
        is_exact &= not (said.get("bits") == 8 and not said["symmetric"]) and not (said.get("act_order") and group < of.shape[1])
        is_exact &= way != "nvfp4" and not (way == "bitsandbytes" and said)
        in_bf16 = IN_BF16.get(kind, []) + (["kv_a_proj_with_mqa"] if kind in LATENT and turns_neighbours else [])
        is_exact &= not any(f".{part}." in name for part in in_bf16)
        return of if is_exact else of.bfloat16().float()

    for path in plain.glob("*.safetensors"):
        tensors = {name: read(name, of_all[name]) if name in of_all else of.float() for name, of in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    of_class = AutoModelForImageTextToText if kind in HALVES else Mistral4ForCausalLM if kind == "mistral4" else AutoModelForCausalLM
    model = of_class.from_pretrained(plain, dtype=torch.float32, experts_implementation="eager").eval()
    shutil.rmtree(plain)
    return model, f"{way} {said} group {group} {str(dtype)[6:]}", are_fours


def text(r, seed, only, run, stored):
    kinds = DECODERS + RECURRENT + EXPERTS + BY_SIGMOID[1:] + LATENT + list(HALVES)
    kind = r.choice(only or [kind for kind in kinds if not stored or kind != "gpt_oss"])
    is_fp8 = stored == "fp8"
    c, dtype = text_config(r, HALVES.get(kind, kind)), torch.bfloat16 if is_fp8 else r.choice(DTYPES)
    if kind in HALVES:
        if kind.startswith("qwen"):  # a position of a picture has three numbers: which pairs each turns
            half = c.get("head_dim", c["hidden_size"] // c["num_attention_heads"]) // 2
            section = [half - 2 * (half // 3), half // 3, half // 3]
            c.pop("use_sliding_window", None) if kind == "qwen3_vl" else None  # which it has none for
            c["rope_parameters"] = {"rope_type": "default", "rope_theta": c["rope_parameters"]["rope_theta"], "mrope_section": section}
        given = {"text_config": c | {"model_type": HALVES[kind]}, "tie_word_embeddings": c["tie_word_embeddings"]}
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **given, vision_config=vision_config(kind, c)), experts_implementation="eager").float()
    else:
        # Not among those that transformers 5.24 finds by itself.
        of = Mistral4ForCausalLM._from_config if kind == "mistral4" else AutoModelForCausalLM.from_config
        model = of(AutoConfig.for_model(kind, **c), experts_implementation="eager").float()
    randomise(model, r, kind, dtype)
    # gpt-oss's experts as its published files have them.
    is_whole = all(c[key] % 32 == 0 for key in ["hidden_size", "intermediate_size"])
    packed = to_mxfp4(model) if kind == "gpt_oss" and is_whole and r.random() < 0.7 else None
    n = r.choice([1, 2, 7, 13, 33, 64, 65, 100])
    ids = torch.randint(3, c["vocab_size"], (n,))

    def logits(model):
        with torch.no_grad():
            return model(ids[None], use_cache=False).logits[0]  # its caches want a layer that attends

    expected = logits(model)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        model.to(dtype).save_pretrained(folder, max_shard_size="50GB" if packed else r.choice(["50GB", "200KB"]))
        if packed:
            save_mxfp4(model, folder, packed)
        elif is_fp8:
            expected = logits(in_fp8(folder, r, kind))
        elif stored:
            model, said, packed = in_few_bits(folder, stored, r, kind, c.get("rope_interleave", kind != "minicpm3"))
            expected = logits(model)
        # Where RoPE is not scaled, older files of gpt-oss would not say so.
        is_said = kind != "gpt_oss" or c["rope_parameters"]["rope_type"] != "default"
        if kind not in (*BY_TYPE, *HALVES, "ministral3", "mistral4") and r.random() < 0.4 and is_said:
            older_keys(folder, r)
        line, wrong = f"{seed} {kind}{f' in {said}' if stored and not is_fp8 else ' in FP8' if is_fp8 else ' in MXFP4' if packed else ''} {n} tokens {str(dtype)[6:]}", False
        for device in ["reference", "cpu"]:
            found, said = run(folder, "logits", device, ["--ids", ",".join(map(str, ids.tolist()))])
            if found is None:
                line, wrong = f"{line}, {device}: {said}", True
                continue
            p, q = expected.log_softmax(-1), found["logits"].log_softmax(-1)
            kl = (p.exp() * (p - q)).sum(-1).mean().item()
            off = (expected - found["logits"]).abs().max().item()
            # Beside these activations are rounded to 8 bits.
            wrong |= not (kl < (2e-2 if packed else 2e-3)) or device == "reference" and not (off < 1e-3)
            line += f", {device}: KL {kl:.1e} off {off:.1e}"
        return line + (f" WRONG {(folder / 'config.json').read_text()}" if wrong else ""), wrong


def sentence_folder(r, kind, dtype, folder):
    """Writes a sentence model, and returns names of prompts."""
    is_encoder = kind in ENCODERS
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    vocab = {token: at for at, token in enumerate(specials + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    heads, head_dim = r.choice([1, 2, 3, 4]), r.choice([8, 16, 24, 32, 64])
    layers, hidden = r.choice([1, 2, 3]), heads * head_dim
    c = {"vocab_size": len(vocab) + r.choice([0, 7, 100]), "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    c |= {"intermediate_size": r.choice([32, 96, 100, 257]), "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    if kind == "modernbert":
        longest = r.choice([64, 130, 514])
        c |= {"max_position_embeddings": longest, "local_attention": r.choice([2, 7, 16, 64, 600]), "norm_eps": r.choice([1e-12, 1e-5])}
        c |= {"cls_token_id": 0, "sep_token_id": 2} | {key: r.random() < 0.3 for key in ["norm_bias", "attention_bias", "mlp_bias"]}
        c |= r.choice([{"global_attn_every_n_layers": r.choice([1, 2, 3])}, {"layer_types": [r.choice(LAYER_TYPES) for _ in range(layers)]}])
        c["rope_parameters"] = {key: {"rope_type": "default", "rope_theta": r.choice([77.0, 1e4, 1.6e5])} for key in LAYER_TYPES}
    elif is_encoder:
        c |= {"max_position_embeddings": r.choice([64, 130, 514]), "type_vocab_size": r.choice([1, 2]), "layer_norm_eps": r.choice([1e-12, 1e-5])}
        c["pad_token_id"] = 1 if kind == "bert" else r.choice([1, 3])
        longest = c["max_position_embeddings"] - (0 if kind == "bert" else c["pad_token_id"] + 1)
    else:
        c |= {"max_position_embeddings": 512, "num_key_value_heads": r.choice([1, heads]), "tie_word_embeddings": r.random() < 0.5}
        c |= {"head_dim": head_dim} if kind != "qwen2" else {}
        if kind == "gemma3_text":
            c |= {"sliding_window": r.choice([2, 7, 8, 64]), "query_pre_attn_scalar": head_dim, "use_bidirectional_attention": r.random() < 0.5}
            c["layer_types"] = [r.choice(LAYER_TYPES) for _ in range(layers)]
        elif kind.startswith("gemma4"):
            types = [r.choice(LAYER_TYPES) for _ in range(layers - 1)] + LAYER_TYPES[:1]
            most = [n for n in range(layers) if set(types) == set(types[:layers - n])]
            c |= {"layer_types": types, "sliding_window": r.choice([2, 7, 64]), "global_head_dim": r.choice([8, 40]), "num_kv_shared_layers": r.choice(most)}
            c |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": c["vocab_size"]} if kind == "gemma4_text" else {}
        elif r.random() < 0.3:
            c["is_causal"] = False
        longest = r.choice([64, 300, 512])
    has_head = r.random() < 0.4
    of = (AutoModelForMaskedLM if is_encoder else AutoModelForCausalLM) if has_head else AutoModel
    randomise(of.from_config(AutoConfig.for_model(kind, **c)).float(), r, kind, dtype).to(dtype).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    around = "<s> $A </s>" if is_encoder or r.random() < 0.3 else "$A </s>"
    tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=[("<s>", 0), ("</s>", 2)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=longest, **names).save_pretrained(folder)
    modules = ["Transformer", "Pooling"] + ["Dense"] * r.choice([0, 0, 1, 2]) + ["Normalize"] * r.randint(0, 1)
    listed = [{"idx": at, "name": str(at), "path": f"{at}_{kind}" if at else "", "type": f"sentence_transformers.models.{kind}"} for at, kind in enumerate(modules)]
    inner = hidden
    for module in listed:
        if not module["path"].endswith("Dense"):
            continue
        out, bias = r.choice([16, 33, 64, 256]), r.random() < 0.5
        layer = torch.nn.Linear(inner, out, bias=bias)
        (folder / module["path"]).mkdir()
        save_file({f"linear.{name}": each.detach() for name, each in layer.named_parameters()}, folder / module["path"] / "model.safetensors")
        said = {"in_features": inner, "out_features": out, "bias": bias, "activation_function": "torch.nn.modules.linear.Identity"}
        (folder / module["path"] / "config.json").write_text(json.dumps(said))
        inner = out
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    pooling = r.choice(["mean_tokens", "cls_token", "lasttoken"])
    keys = {f"pooling_mode_{each}": each == pooling for each in ["mean_tokens", "cls_token", "lasttoken"]}
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": hidden, **keys}))
    if r.random() < 0.5:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": longest, "do_lower_case": False}))
    prompts = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": r.choice([None, "query"])}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return [None, *prompts["prompts"]]


def sentences(r, seed, only, run, _):
    from sentence_transformers import SentenceTransformer

    kind, dtype = r.choice(only or ENCODERS + DECODERS), r.choice(DTYPES)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        prompt = r.choice(sentence_folder(r, kind, dtype, folder))
        texts = ["".join(chr(r.randrange(32, 127)) for _ in range(r.choice([1, 5, 20, 60, 100, 200, 600]))) for _ in range(4)]
        library = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
        expected = torch.stack([torch.tensor(library.encode(each, prompt_name=prompt)) for each in texts])
        line, wrong = f"{seed} {kind} prompt {prompt} {str(dtype)[6:]}", False
        for device in ["reference", "cpu"]:
            named = ["--prompt-name", prompt] if prompt else []
            found, said = run(folder, "embed", device, [*named, "--", *texts])
            if found is None:
                line, wrong = f"{line}, {device}: {said}", True
                continue
            off = ((expected - found["embeddings"]).norm(dim=1) / expected.norm(dim=1)).max().item()
            wrong |= not (off < (2e-5 if device == "reference" else 3e-2))
            line += f", {device}: off {off:.1e}"
        return line + (f" WRONG {(folder / 'config.json').read_text()}" if wrong else ""), wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["text", "sentences"])
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int)
    parser.add_argument("--program", default="target/release/perpetua")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--stored", choices=["fp8", "any", *WAYS], help="how files have matrices of layers")
    args = parser.parse_args()

    def run(folder, verb, device, more):
        out = folder / "out.safetensors"
        command = [args.program, verb, "--model", str(folder), "--device", device, "--out", str(out), *more]
        done = subprocess.run(command, capture_output=True, text=True)
        return (load_file(out), done.stderr) if done.returncode == 0 else (None, done.stderr.strip())

    torch.set_num_threads(1)
    n_wrong = 0
    for seed in range(args.first, args.end):
        torch.manual_seed(seed)
        line, wrong = {"text": text, "sentences": sentences}[args.what](random.Random(seed), seed, args.only, run, args.stored)
        print(line, flush=True)
        n_wrong += wrong
    print(f"{n_wrong} of {args.end - args.first} wrong")
    raise SystemExit(bool(n_wrong))


main()
