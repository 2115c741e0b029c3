"""Attention by FlashAttention as torch ops: where its package is installed, a graph's causal attention runs on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from codetta.backends import attention
from codetta.backends.base import Attention
from codetta.runtime.library import no_second_derivative

Forward = Callable[..., tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]
LIBRARY = torch.library.Library("codetta", "FRAGMENT")
# Heads are (batch, length, heads, size). The forward gives the result and the log-sum-exps (batch, heads, length).
WHAT = "bool causal, int? window, float scale"
LIBRARY.define(f"attention(Tensor q, Tensor k, Tensor v, {WHAT}) -> (Tensor, Tensor)")
LIBRARY.define(
    f"attention_backward(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {WHAT}) "
    "-> (Tensor, Tensor, Tensor)"
)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None, scale: float | None = None
) -> Tensor:
    """Attention of heads (batch, heads, length, size), as ``scaled_dot_product_attention`` takes them: to all, to what
    comes no later, or to that within ``window`` positions. Keys and values may have fewer heads than queries; there are
    as many of them as queries. In memory, the result has the heads of one position side by side."""
    size = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    out, _ = torch.ops.codetta.attention(*(t.transpose(1, 2) for t in (q, k, v)), causal, window, size)
    found: Tensor = out.transpose(1, 2)
    return found


def _backend(t: Tensor) -> str:
    return "hopper" if t.is_cuda else "reference"


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float) -> tuple[Tensor, Tensor]:
    run: Forward = attention(_backend(q)).forward
    return run(q, k, v, Attention(causal, window, scale))


def _backward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, causal, window, scale = given
    run: Backward = attention(_backend(tensors[0])).backward
    return run(*tensors, Attention(causal, window, scale))


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, length), dtype=torch.float32)


def _backward_fake(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.what = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, d_out: Tensor | None, d_lse: None) -> tuple[Any, ...]:
    if d_out is None:
        return (None,) * 6
    found = torch.ops.codetta.attention_backward(d_out.contiguous(), *ctx.saved_tensors, *ctx.what)
    return (*found, None, None, None)


LIBRARY.impl("attention", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("codetta::attention", _forward_fake, lib=LIBRARY)
torch.library.register_fake("codetta::attention_backward", _backward_fake, lib=LIBRARY)
torch.library.register_autograd("codetta::attention", _gradients, setup_context=_keep, lib=LIBRARY)
TWICE = no_second_derivative("FlashAttention", "compile with options={'attention': 'sdpa'}")
torch.library.register_autograd("codetta::attention_backward", TWICE, lib=LIBRARY)
