"""The LM head where forward holds exponentials of its logits, so that nothing passes over them between the GEMMs.

Of a row of logits z with the target t, forward's epilogue stores e = exp(z - c) and sums that up; c is about z_t, and
is known before. The logits' gradient is g (softmax(z) - onehot(t)) with the row's own g: a factor of the row times e,
in all columns but the target's, where one entry a row is put right. So the factor, which only the log-sum-exp tells,
is the input gradient's epilogue; for the weight's gradient x is multiplied by it, into memory that the input's gradient
takes afterwards.

A float of two bytes holds e as well as any logits' gradient: bfloat16 reaches from e^-87 to e^88, a token's loss is
log(sum e) >= 0, and the few rows with one of more than 60 are computed again, on the device
(``backends.reference.exponentials``). Logits are nowhere rounded to bfloat16, as they are where they are kept."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from codetta.backends import head_rows
from codetta.backends.base import Exponentials, HeadTensors
from codetta.core.types import bf16
from codetta.nn.head_gemms import weight_gradient
from codetta.nn.head_graphs import LSE, TARGET, Head, exponentials_plan, from_exponentials_plan
from codetta.nn.head_run import Call, Piece, Wanted, exact, piece
from codetta.nn.slabs import GRAIN, Sizes


def suits(head: Head, names: tuple[str, ...], sizes: Sizes) -> bool:
    """Whether a head can be held so: bfloat16, whose exponents are as many as float32's; a gradient that is a factor of
    the row but for one entry, so no smoothed labels, no cap; no statistics for metrics; rows of whole 16 bytes."""
    plain = head.dtype is bf16 and head.bias is None and head.softcap is None
    whole = sizes.columns % GRAIN == 0 and sizes.features % GRAIN == 0
    return plain and whole and sizes.tokens > 0 and names == (LSE, TARGET)


@lru_cache(maxsize=256)
def _forward(backend: str, head: Head, cols: int) -> Piece:
    return piece(backend, exponentials_plan(head, cols))


@lru_cache(maxsize=256)
def _input_gradient(backend: str, head: Head, cols: int) -> Piece:
    return piece(backend, from_exponentials_plan(head, cols, ("x",)))


def forward(call: Call) -> tuple[list[Tensor], list[Tensor]]:
    """The log-sum-exp and the target's logit of each row, and what is held for backward: the exponentials, the factor
    that makes each row probabilities, and the target's own."""
    rows, head = head_rows(call.backend), _tensors(call)
    near = rows.reference(head)
    values = {"x": call.x, "weight": call.weight, "index": call.index, "near": near}
    found = _forward(call.backend, call.head, call.weight.shape[0])(values, call.x.shape[0])
    lse, target, held = rows.settle(head, found[LSE], found[TARGET], near, found["held"])
    return [torch.maximum(lse, target), target], list(held)  # no loss is below 0, however the logarithm is rounded


def _tensors(call: Call) -> HeadTensors:
    return HeadTensors(call.x, call.weight, call.index, call.what.scale)


def backward(
    call: Call, held: list[Tensor], grads: Mapping[str, Tensor], wanted: Wanted
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x and weight from those of the statistics. What is held may be used again."""
    found, x, weight = Exponentials(*held), call.x, call.weight
    d_lse, d_target = (grads[name] if name in grads else torch.zeros_like(found.unit) for name in (LSE, TARGET))
    dx, dw = torch.empty_like(x), torch.empty_like(weight) if wanted.weight else None
    scaled = None if dw is None else dx  # first it holds x times the factor
    factor = head_rows(call.backend).scale_rows(_tensors(call), found, d_lse, d_target, scaled)
    with exact(x.device):
        if dw is not None:
            weight_gradient(call.backend, found.matrix, dx, dw)
        if wanted.x:
            values = {"held": found.matrix, "weight": weight, "factor": factor}
            _input_gradient(call.backend, call.head, weight.shape[0])(values, x.shape[0], {"d_x": dx})
    return dx if wanted.x else None, dw, None
