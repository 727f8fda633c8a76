#!/usr/bin/env python3
"""Batch-1 decode in PyTorch, on the weights of a checkpoint: one CUDA graph a step, by the fastest of its ways to attend, and with
--compile the same step through torch.compile first; and how long prompts take to their first token, a graph for each length. Prints one
JSON object: microseconds a step, median and extremes of five runs, and milliseconds by prompt length, the median of five.

    pytorch.py MODEL_DIR [--context N] [--tokens N] [--compile] [--device cpu]
    pytorch.py MODEL_DIR --logits FILE [--device cpu]

With --logits: how far the logits of FILE (safetensors: input_ids [T], logits f32 [T, vocab]) and those of PyTorch in bf16 are
from PyTorch's in float32 on the same weights.

It wants PyTorch and nothing else. --device cpu runs a few steps without graphs: to try the script, not to measure.
"""
import argparse
import json
import mmap
import pathlib
import statistics
import struct
import sys
import time
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I64": torch.int64}


# Since PyTorch 2.5 keys and values may have fewer heads than queries.
HAS_GQA = "enable_gqa" in (F.scaled_dot_product_attention.__doc__ or "")


def attend(q, k, v):
    """Causal attention, [heads, positions, dim]; several heads of q share one of k and v."""
    if HAS_GQA:
        return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
    k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (k, v))
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]


def tensors(path):
    """The tensors of a safetensors file, by name."""
    with open(path, "rb") as file:
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    (n,) = struct.unpack("<Q", view[:8])
    for name, entry in json.loads(view[8 : 8 + n]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            data = bytearray(view[8 + n + begin : 8 + n + end])
            yield name, torch.frombuffer(data, dtype=DTYPES[entry["dtype"]]).reshape(entry["shape"])


def weights(folder, device):
    """All tensors of the folder's safetensors files."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor.to(device, torch.bfloat16) for path in files for name, tensor in tensors(path)}


class Decoder(torch.nn.Module):
    """Llama, Mistral, Qwen2 and Qwen3: the operators an engine would call, a static cache, greedy choice."""

    def __init__(self, folder, length, device):
        super().__init__()
        self.config = config = json.loads((folder / "config.json").read_text())
        self.w = weights(folder, device)
        self.heads, self.groups = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.eps = config["rms_norm_eps"]
        self.layers = config["num_hidden_layers"]
        theta = (config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta", 10000.0)
        frequency = theta ** (-torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency)
        angle = torch.cat([angle, angle], -1).to(device)
        self.exact_cos, self.exact_sin = angle.cos(), angle.sin()
        self.cos, self.sin = self.exact_cos.bfloat16(), self.exact_sin.bfloat16()
        shape = (self.layers, 1, self.groups, length, self.dim)
        self.k = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self.v = torch.zeros_like(self.k)
        self.at = torch.arange(length, device=device)
        self.token = torch.ones(1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)

    def forward(self, ids, dtype, keep=False):
        """Logits of every position, the bf16 weights widened to `dtype` and all arithmetic in it; to `keep` keys and values for the
        tokens that come after, of the last position alone."""
        cast = lambda name: self.w[name].to(dtype) if name in self.w else None
        linear = lambda x, name: F.linear(x, cast(name + ".weight"), cast(name + ".bias"))
        norm = lambda x, name: F.rms_norm(x, (x.shape[-1],), cast(name), self.eps)
        n = len(ids)
        x = cast("model.embed_tokens.weight")[ids]
        cos, sin = self.exact_cos[:n].to(dtype), self.exact_sin[:n].to(dtype)
        for i in range(self.layers):
            p = f"model.layers.{i}."
            h = norm(x, p + "input_layernorm.weight")
            split = lambda name, heads: linear(h, p + name).view(n, heads, self.dim)
            q, k = split("self_attn.q_proj", self.heads), split("self_attn.k_proj", self.groups)
            v = split("self_attn.v_proj", self.groups)
            if p + "self_attn.q_norm.weight" in self.w:
                q, k = norm(q, p + "self_attn.q_norm.weight"), norm(k, p + "self_attn.k_norm.weight")
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
            q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
            if keep:
                self.k[i, 0, :, :n].copy_(k)
                self.v[i, 0, :, :n].copy_(v)
            a = attend(q, k, v)
            x = x + linear(a.transpose(0, 1).reshape(n, -1), p + "self_attn.o_proj")
            h = norm(x, p + "post_attention_layernorm.weight")
            x = x + linear(F.silu(linear(h, p + "mlp.gate_proj")) * linear(h, p + "mlp.up_proj"), p + "mlp.down_proj")
        x = norm(x[-1:] if keep else x, "model.norm.weight")
        head = cast("lm_head.weight")
        return F.linear(x, cast("model.embed_tokens.weight") if head is None else head).float()

    def norm(self, x, name):
        return F.rms_norm(x, (x.shape[-1],), self.w[name], self.eps)

    def linear(self, x, name):
        return F.linear(x, self.w[name + ".weight"], self.w.get(name + ".bias"))

    def rotate(self, x, cos, sin):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    def step(self):
        """One token: reads `token` at `position`, leaves the next one there."""
        x = self.w["model.embed_tokens.weight"][self.token]
        cos, sin = self.cos[self.position], self.sin[self.position]
        # Added to the scores: of a mask of booleans every attention would make such a one again.
        mask = torch.zeros_like(self.at, dtype=x.dtype).masked_fill(self.at > self.position, float("-inf")).view(1, 1, 1, -1)
        for i in range(self.layers):
            p = f"model.layers.{i}."
            h = self.norm(x, p + "input_layernorm.weight")
            q = self.linear(h, p + "self_attn.q_proj").view(1, self.heads, 1, self.dim)
            k = self.linear(h, p + "self_attn.k_proj").view(1, self.groups, 1, self.dim)
            v = self.linear(h, p + "self_attn.v_proj").view(1, self.groups, 1, self.dim)
            if p + "self_attn.q_norm.weight" in self.w:
                q = self.norm(q, p + "self_attn.q_norm.weight")
                k = self.norm(k, p + "self_attn.k_norm.weight")
            q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
            self.k[i].index_copy_(2, self.position, k)
            self.v[i].index_copy_(2, self.position, v)
            # The heads that share keys as rows of one query: with `enable_gqa` and a mask no fused kernel would take it.
            q = q.view(1, self.groups, self.heads // self.groups, self.dim)
            a = F.scaled_dot_product_attention(q, self.k[i], self.v[i], attn_mask=mask)
            x = x + self.linear(a.reshape(1, -1), p + "self_attn.o_proj")
            h = self.norm(x, p + "post_attention_layernorm.weight")
            h = F.silu(self.linear(h, p + "mlp.gate_proj")) * self.linear(h, p + "mlp.up_proj")
            x = x + self.linear(h, p + "mlp.down_proj")
        x = self.norm(x, "model.norm.weight")
        head = self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"])
        self.token.copy_(F.linear(x, head).argmax(-1))
        self.position.add_(1)

    def read(self, ids):
        """A prompt, from position 0 on: leaves the next token, and the position that it goes to."""
        self.token.copy_(self.forward(ids, torch.bfloat16, keep=True).argmax(-1))
        self.position.fill_(len(ids))


def graph_of(model, step):
    """`step`, captured after it has run on a stream of its own."""
    stream = torch.cuda.Stream()
    # What prepared the step has been done by then.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def milliseconds(replay, n):
    """Of `n` replays together."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(n):
        replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def measure(model, replay, context, tokens):
    times = []
    for _ in range(5):
        model.position.fill_(context)
        times.append(milliseconds(replay, tokens) * 1e3 / tokens)
    return {"step_us": statistics.median(times), "fastest_us": min(times), "slowest_us": max(times)}


def by_attention(model, context, tokens):
    """The step by each way to attend that takes it: what this version chooses may not be its best. The fastest, and all."""
    found = {}
    for name, way in [("chosen", nullcontext()), ("efficient", sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)), ("math", sdpa_kernel(SDPBackend.MATH))]:
        # The last measurement ended where the cache does.
        model.position.fill_(context)
        try:
            with way:
                found[name] = measure(model, graph_of(model, model.step).replay, context, tokens)
        except RuntimeError as error:
            if name == "chosen":
                raise
            found[name] = str(error)
    measured = [(record["step_us"], name) for name, record in found.items() if isinstance(record, dict)]
    name = min(measured)[1]
    return found[name] | {"attention": name, "by_attention": found}


def first_token(model, n):
    """Milliseconds of a prompt of `n` tokens, the median of five."""
    ids = torch.arange(1, n + 1, device=model.token.device) % len(model.w["model.embed_tokens.weight"])
    graph = graph_of(model, lambda: model.read(ids))
    return statistics.median(milliseconds(graph.replay, 1) for _ in range(5))


def distance(exact, found, ids):
    """Mean divergence from `exact`, and the mean change of what the true next tokens cost, in nats."""
    kl = cost = 0.0
    for at in range(len(exact)):
        p, q = exact[at].double().log_softmax(-1), found[at].double().log_softmax(-1)
        kl += float((p.exp() * (p - q)).sum())
        if at + 1 < len(ids):
            cost += abs(float(p[ids[at + 1]] - q[ids[at + 1]]))
    return {"mean_kl": kl / len(exact), "mean_abs_nll_change": cost / max(1, len(exact) - 1)}


def judge(model, path, device):
    file = dict(tensors(path))
    ids = file["input_ids"].to(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    exact = model.forward(ids, torch.float32)
    return {
        "positions": len(ids),
        "ours": distance(exact, file["logits"].to(device), ids),
        "pytorch_bf16": distance(exact, model.forward(ids, torch.bfloat16), ids),
    }


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--logits", type=pathlib.Path)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    if args.logits:
        model = Decoder(args.model, 4096, args.device)
        json.dump(judge(model, args.logits, args.device), sys.stdout)
        return
    # Whole sixteens of positions: fused kernels want a mask's rows so, and would copy it.
    model = Decoder(args.model, (args.context + args.tokens + 15) // 16 * 16, args.device)
    record = {"torch": torch.__version__, "context": args.context}
    if args.device == "cpu":
        tokens = []
        model.read(torch.ones(min(args.context, 16), dtype=torch.long))
        began = time.perf_counter()
        for _ in range(args.tokens):
            model.step()
            tokens.append(int(model.token))
        record |= {"tokens": tokens, "step_us": (time.perf_counter() - began) * 1e6 / args.tokens}
    else:
        record["cuda_graph"] = by_attention(model, args.context, args.tokens)
        lengths = [n for n in (16, 64, 256) if n < args.context] + [args.context]
        record["first_token_ms"] = {str(n): first_token(model, n) for n in lengths}
        if args.compile:
            compiled = torch.compile(model.step, fullgraph=True, dynamic=False)
            record["compiled"] = measure(model, graph_of(model, compiled).replay, args.context, args.tokens)
    json.dump(record, sys.stdout)


main()
