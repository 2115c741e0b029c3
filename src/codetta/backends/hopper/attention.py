"""Attention by FlashAttention 4's kernels for SM90 (package flash-attn-4), which are written in CuTe DSL as ours are.
``reference.attention`` says what they compute. They read heads where they lie, so that q, k and v may be columns of one
matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from codetta.backends.base import Attention
from codetta.backends.hopper import memory, toolchain
from codetta.backends.hopper.stream import on_device

toolchain.keep_attention_kernels()

from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd  # noqa: E402  the line above must come first


def _asked(what: Attention) -> dict[str, Any]:
    window = (None, None) if what.window is None else (what.window - 1, 0)
    sides = {"window_size_left": window[0], "window_size_right": window[1]}
    return {"softmax_scale": what.scale, "causal": what.causal and what.window is None, **sides}


def forward(q: Tensor, k: Tensor, v: Tensor, what: Attention) -> tuple[Tensor, Tensor]:
    """``reference.attention.forward``."""
    with torch.no_grad(), on_device(q.device):
        out, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, **_asked(what))
    return out, lse


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, what: Attention
) -> tuple[Tensor, Tensor, Tensor]:
    """``reference.attention.backward``; sums of q's gradient come in any order, unless PyTorch is told to be
    deterministic."""
    ordered = torch.are_deterministic_algorithms_enabled()
    with torch.no_grad(), on_device(q.device):
        into = {f"d{n}": memory.empty(t.shape, t.dtype, t.device) for n, t in (("q", q), ("k", k), ("v", v))}
        _flash_attn_bwd(q, k, v, out, d_out, lse, deterministic=ordered, **into, **_asked(what))
    return into["dq"], into["dk"], into["dv"]
