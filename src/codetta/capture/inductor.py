"""What Inductor is told of our ops before it meets them."""

from __future__ import annotations

import importlib

import torch
from torch.torch_version import TorchVersion

DESCRIBES_LAZILY = TorchVersion("2.13.0a0")


def announce_ops() -> None:
    """Give Inductor its usual fallback for each of our ops. An older one describes the first call of an op that it does
    not know in a log line, shown or not, with all that the arguments are made of: text whose length doubles with every
    layer of a model, so that compilation does not end (seen with torch 2.11, a loss head behind nine layers)."""
    if TorchVersion(torch.__version__) >= DESCRIBES_LAZILY:
        return
    lowering = importlib.import_module("torch._inductor.lowering")
    ours = torch.ops.codetta
    for op in (ours.segment_forward.default, ours.segment_backward.default, ours.head_forward.default,
               ours.head_backward.default, ours.segment.default, ours.head.default, ours.attention.default,
               ours.attention_backward.default, ours.add_rows_.default):  # fmt: skip
        if op not in lowering.lowerings:
            tag = lowering.get_layout_constraint_tag(op, with_default=True)
            lowering.make_fallback(op, lowering.tag_to_layout_constraint(tag), warn=False)
