"""A small training run for NVIDIA's memory checker, which pytest would slow down: `make memcheck`.

Every block of memory comes from the driver itself, so that an access one element beyond a tensor is seen."""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from codetta import pack_
from codetta.backends.stacked import STATISTICS
from codetta.capture.backend import backend

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


def main() -> None:
    """Two token counts, forward and backward. A gradient that holds NaN is an error."""
    torch.manual_seed(0)
    model = (
        LlamaForCausalLM(LlamaConfig(vocab_size=512, num_hidden_layers=2, use_cache=False, **SIZES)).cuda().bfloat16()
    )
    compiled = torch.compile(model, backend=backend, options={"kernels": "hopper", "inner": "eager"})
    for length in (65, 130):
        ids = torch.randint(0, 512, (2, length), device="cuda")
        compiled(input_ids=ids, labels=ids).loss.backward()
        torch.cuda.synchronize()
    if STATISTICS.copies:  # correct, but a copy in each step; said with its reason
        found = (f"{', '.join(stack.names)}: {stack.reason or 'side by side now'}" for stack in pack_(model))
        sys.stderr.write(f"{STATISTICS.copies} copies of stacked weights\n" + "\n".join(found) + "\n")
    if any(p.grad is None or p.grad.isnan().any() for p in model.parameters()):
        raise SystemExit("a gradient is missing or NaN")


if __name__ == "__main__":
    main()
