"""Heads for attention, and attention in PyTorch with its mask written out, to hold others against."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def heads(
    seed: int,
    counts: tuple[int, int],
    length: int,
    size: int,
    dtype: torch.dtype,
    *,
    batch: int = 2,
    keys: int = 0,
    device: str = "cpu",
) -> list[Tensor]:
    """q, k and v (batch, heads, length, size) as columns of one matrix, which want gradients; of ``counts`` heads of
    queries and of keys. ``keys``: another number of positions than of queries."""
    generator = torch.Generator().manual_seed(seed)
    columns = [n * size for n in (counts[0], counts[1], counts[1])]
    joint = torch.randn(batch, max(length, keys), sum(columns), generator=generator).to(device, dtype)
    found = [t.unflatten(-1, (-1, size)).transpose(1, 2) for t in joint.split(columns, -1)]
    return [t[:, :, : n or length].detach().requires_grad_() for t, n in zip(found, (length, keys, keys), strict=True)]


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float | None = None) -> Tensor:
    """PyTorch's own attention."""
    at = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(k.shape[2], device=q.device)
    allowed = (at >= 0) if causal else torch.ones_like(at, dtype=torch.bool)
    allowed = allowed if window is None else allowed & (at < window)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale)
