"""The kernels that Llama models need, found without a GPU: shapes on the meta device are enough."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

from codetta.audit.models import Request, find
from codetta.capture.backend import CapturedGraph, captured
from codetta.partition.plan import Plan

MODELS = ("llama3-1b", "llama3-8b", "llama3-70b")
DTYPES = ("bf16", "f16")
REGIMES = ("whole", "block")


@cache
def plans(model: str, dtype: str, regime: str) -> tuple[Plan, ...]:
    """Forward and backward plans of every segment of two layers, as one graph or layer by layer."""
    subject = find(Request(model, 2, 4096, 1, dtype), weights=False)
    if regime == "whole":
        return tuple(_of(captured(subject.model, **subject.batch)))
    config = subject.model.config
    width, head = config.hidden_size, config.head_dim
    kinds = {"dtype": next(subject.model.parameters()).dtype, "device": "meta"}
    x = torch.empty(1, 4096, width, **kinds).requires_grad_()
    tables = torch.empty(1, 4096, head, **kinds), torch.empty(1, 4096, head, **kinds)
    return tuple(_of(captured(subject.model.model.layers[0], x, position_embeddings=tables)))


def _of(graphs: list[CapturedGraph]) -> Iterator[Plan]:
    for graph in graphs:
        for i, (_, compiled) in enumerate(graph.compiled()):
            yield compiled.forward
            yield compiled.backward_plan(compiled.usable(graph.given(i)))
