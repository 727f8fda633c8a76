"""What rounding to bf16 costs an encoder of random weights, as `perpetua gpu-check kernels` measures it: how far what each layer attends to is off,
as a part of the largest value, in transformers with f32 alone, against the same with what products read rounded (`rounded`), and all in bf16 (`bf16`).

    perpetua synth --preset tiny-modernbert --out DIR
    python tests/peers/rounding.py DIR [ROWS ...]
"""

import sys

import torch
from transformers import AutoModel


def attended(folder, how, ids):
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if how == "rounded":

        def round_inputs(module, args):
            return tuple(x.bfloat16().float() for x in args)

        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(round_inputs)
                if name.endswith("Wqkv"):
                    module.register_forward_hook(lambda module, args, out: out.bfloat16().float())
    elif how == "bf16":
        model = model.bfloat16()
    seen = []
    for layer in model.layers:
        layer.attn.Wo.register_forward_pre_hook(lambda module, args: seen.append(args[0].float()))
    with torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    return seen


def main():
    folder, *rows = sys.argv[1:]
    for n in map(int, rows or [7, 40, 100]):
        ids = ((torch.arange(n) * 7 + 3) % 256)[None]
        exact = attended(folder, "f32", ids)
        for how in ["rounded", "bf16"]:
            found = attended(folder, how, ids)
            off = [((a - b).abs().max() / a.abs().max()).item() for a, b in zip(exact, found)]
            print(f"{n} rows, {how}: " + ", ".join(f"{part:.3f}" for part in off))


main()
