"""How long ONNX Runtime takes for one sentence of a BERT checkpoint, beside `perpetua bench`.

    pip install onnxruntime onnx numpy safetensors
    python tests/peers/minilm_onnxruntime.py MODEL_DIR --tokens 128 --threads 2

The graph is made here from the checkpoint, with the fused operators that ONNX Runtime's own optimizer for transformers puts
into such models (Attention, SkipLayerNormalization, BiasGelu), so that the figure is the best it gives. Prints milliseconds
and the first elements of the embedding, to compare.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file

FUSED = "com.microsoft"


class Graph:
    """Nodes and initializers of an ONNX graph under construction."""

    def __init__(self, weights):
        self.weights, self.nodes, self.initializers = weights, [], {}

    def constant(self, name, value):
        self.initializers.setdefault(name, numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def weight(self, name):
        return self.constant(name, self.weights[name])

    def node(self, op, inputs, domain="", **attributes):
        name = f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], domain=domain, **attributes))
        return name

    def product(self, x, name):
        return self.node("MatMul", [x, self.constant(f"{name}.transposed", self.weights[f"{name}.weight"].T)])

    def norm(self, x, skip, name, bias, eps):
        """LayerNorm(x + bias + skip)."""
        inputs = [x, skip, self.weight(f"{name}.weight"), self.weight(f"{name}.bias"), self.weight(bias)]
        return self.node("SkipLayerNormalization", inputs, FUSED, epsilon=eps)


def build(folder, tokens):
    config = json.loads((folder / "config.json").read_text())
    weights = {name.removeprefix("bert."): w for name, w in load_file(folder / "model.safetensors").items()}
    eps = config["layer_norm_eps"]
    graph = Graph(weights)
    x = graph.node("Gather", [graph.weight("embeddings.word_embeddings.weight"), "ids"])
    positions = weights["embeddings.position_embeddings.weight"][:tokens]
    kind = weights["embeddings.token_type_embeddings.weight"][0]
    x = graph.node("Add", [x, graph.constant("positions", (positions + kind)[None])])
    norm = [graph.weight(f"embeddings.LayerNorm.{part}") for part in ("weight", "bias")]
    x = graph.node("LayerNormalization", [x, *norm], axis=-1, epsilon=eps)
    for layer in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{layer}."
        parts = [f"{at}attention.self.{part}" for part in ("query", "key", "value")]
        qkv = np.concatenate([weights[f"{part}.weight"].T for part in parts], axis=1)
        bias = np.concatenate([weights[f"{part}.bias"] for part in parts])
        inputs = [x, graph.constant(f"{at}qkv", qkv), graph.constant(f"{at}qkv.bias", bias)]
        attended = graph.node("Attention", inputs, FUSED, num_heads=config["num_attention_heads"])
        name = f"{at}attention.output"
        x = graph.norm(graph.product(attended, f"{name}.dense"), x, f"{name}.LayerNorm", f"{name}.dense.bias", eps)
        inner = graph.product(x, f"{at}intermediate.dense")
        inner = graph.node("BiasGelu", [inner, graph.weight(f"{at}intermediate.dense.bias")], FUSED)
        name = f"{at}output"
        x = graph.norm(graph.product(inner, f"{name}.dense"), x, f"{name}.LayerNorm", f"{name}.dense.bias", eps)
    axes = graph.constant("axes", np.array([1], np.int64))
    graph.nodes.append(helper.make_node("ReduceMean", [x, axes], ["mean"], keepdims=0))
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, [1, tokens])
    mean = helper.make_tensor_value_info("mean", TensorProto.FLOAT, None)
    made = helper.make_graph(graph.nodes, "bert", [ids], [mean], list(graph.initializers.values()))
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(FUSED, 1)]
    return helper.make_model(made, opset_imports=opsets, ir_version=10), config["vocab_size"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sentences", type=int, default=80)
    args = parser.parse_args()
    model, vocab = build(args.folder, args.tokens)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = args.threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    ids = (np.arange(args.tokens) * 37 % vocab)[None].astype(np.int64)
    times = []
    for _ in range(10 + args.sentences):
        start = time.perf_counter()
        [[mean]] = session.run(None, {"ids": ids})
        times.append((time.perf_counter() - start) * 1e3)
    times = np.array(times[10:])
    mean /= np.linalg.norm(mean)
    print(f"onnxruntime {onnxruntime.__version__}, {args.tokens} tokens, {args.threads} threads: median "
          f"{np.median(times):.3f} ms, p5 {np.percentile(times, 5):.3f}, p95 {np.percentile(times, 95):.3f}; {mean[:4]}")


if __name__ == "__main__":
    main()
