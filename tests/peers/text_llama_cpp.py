"""How fast llama.cpp reads a prompt and decodes, beside `perpetua bench`, on the weights of the same checkpoint.

    pip install llama-cpp-python gguf numpy        # built from source for this processor
    python tests/peers/text_llama_cpp.py MODEL_DIR --weights bf16 --context 64 --tokens 48 --threads 2

The GGUF file is made here from the checkpoint (Qwen3 or Llama without bias or scaling, bf16, one safetensors file), without its
tokenizer: tokens are numbers; formats of 4 bits are made of it by llama.cpp itself. Prints tokens/s of the prompt and of the median step.

With --text FILE (and tokenizers installed) it prints instead what `perpetua perplexity` does: how well the weights predict that text, by
windows of --context tokens, of which the second half is scored.
"""

import argparse
import ctypes
import json
import statistics
import tempfile
import time
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}


def gguf_name(name):
    if name in WHOLE:
        return f"{WHOLE[name]}.weight"
    _, _, layer, *part, _ = name.split(".")
    return f"blk.{layer}.{LAYER['.'.join(part)]}.weight"


def write_gguf(model_dir, path, weights):
    config = json.loads((model_dir / "config.json").read_text())
    rope = config.get("rope_parameters") or config
    is_scaled = config.get("rope_scaling") or rope.get("rope_type", "default") != "default"
    if config["model_type"] not in ("qwen3", "llama") or is_scaled:
        raise SystemExit(f"{model_dir}: expected Qwen3 or Llama without RoPE scaling, given {config['model_type']}")
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, config["model_type"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    file = np.memmap(model_dir / "model.safetensors", np.uint8, "r")
    start = 8 + int(file[:8].view(np.uint64)[0])
    for name, tensor in json.loads(bytes(file[8:start])).items():
        if name == "__metadata__":
            continue
        if tensor["dtype"] != "BF16":
            raise SystemExit(f"{name}: {tensor['dtype']}, expected BF16")
        first, end = tensor["data_offsets"]
        stored = file[start + first : start + end].view(np.uint16).reshape(tensor["shape"])
        if stored.ndim == 2 and weights != "q8_0":
            dtype, values = gguf.GGMLQuantizationType.BF16, np.ascontiguousarray(stored).view(np.uint8)
        else:
            values = (stored.astype(np.uint32) << 16).view(np.float32)
            dtype = gguf.GGMLQuantizationType.F32
            if stored.ndim == 2:
                dtype = gguf.GGMLQuantizationType.Q8_0
                values = gguf.quants.quantize(values, dtype)
        writer.add_tensor(gguf_name(name), values, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config


# llama.cpp's own mixtures: 4 bits with tables and some matrices in more.
QUANTISED = {
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "iq4_nl": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ4_NL,
    "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}


def quantised(path, ftype):
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = ftype
    made = f"{path}.quantised"
    if llama_cpp.llama_model_quantize(path.encode(), made.encode(), ctypes.byref(params)) != 0:
        raise SystemExit("llama_model_quantize failed")
    return made


def seconds(context, tokens):
    ids = (llama_cpp.llama_token * len(tokens))(*tokens)
    began = time.perf_counter()
    if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(ids, len(tokens))) != 0:
        raise SystemExit("llama_decode failed")
    llama_cpp.llama_synchronize(context)
    return time.perf_counter() - began


def nll(context, batch, ids):
    """-ln(probability) of each of the second half of `ids`, each predicted by those before it."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, True
    if llama_cpp.llama_decode(context, batch) != 0:
        raise SystemExit("llama_decode failed")
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(context)))
    rows = range((len(ids) + 1) // 2, len(ids))
    logits = [np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i - 1), (vocab,)).astype(np.float64) for i in rows]
    return np.array([np.log(np.exp(row - row.max()).sum()) + row.max() - row[ids[i]] for i, row in zip(rows, logits)])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--weights", choices=["bf16", "q8_0", *QUANTISED], default="bf16")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--text", type=Path)
    args = parser.parse_args()
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.gguf"
        config = write_gguf(args.model_dir, path, args.weights)
        if args.weights in QUANTISED:
            path = quantised(path, QUANTISED[args.weights])
        size = Path(path).stat().st_size
        model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = args.context + args.tokens
        params.n_batch = max(args.context, 1)
        params.n_threads = params.n_threads_batch = args.threads
        context = llama_cpp.llama_init_from_model(model, params)
        if args.text:
            import tokenizers

            tokenizer = tokenizers.Tokenizer.from_file(str(args.model_dir / "tokenizer.json"))
            ids = tokenizer.encode(args.text.read_text()).ids
            batch = llama_cpp.llama_batch_init(args.context, 0, 1)
            starts = range(0, len(ids) - args.context + 1, args.context)
            each = np.concatenate([nll(context, batch, ids[i : i + args.context]) for i in starts])
            print(
                f"llama-cpp-python {llama_cpp.__version__}, {args.weights} ({size / 1e6:.2f} MB): {each.size} tokens, "
                f"nll {each.mean():.4f}, perplexity {np.exp(each.mean()):.3f}"
            )
            return
        vocab = config["vocab_size"]
        # Once before, so that weights are in memory.
        seconds(context, [1])
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        prompt = args.context / seconds(context, [(37 * i + 11) % vocab for i in range(args.context)])
        steps = [seconds(context, [(91 * i + 5) % vocab]) for i in range(args.tokens)]
    print(
        f"llama-cpp-python {llama_cpp.__version__}, {args.weights} ({size / 1e6:.0f} MB), context {args.context}, {args.threads} threads: "
        f"prompt {prompt:.0f} tokens/s, decode {1 / statistics.median(steps):.1f} tokens/s"
    )


if __name__ == "__main__":
    main()
