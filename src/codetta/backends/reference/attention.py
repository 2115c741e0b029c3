"""Attention of heads in groups, forward and backward, in PyTorch: what ``hopper.attention`` computes, whole matrices of
weights at a time. Heads are (batch, length, heads, size); keys and values may have fewer of them than queries."""

from __future__ import annotations

import torch
from torch import Tensor

from codetta.backends.base import Attention


def forward(q: Tensor, k: Tensor, v: Tensor, what: Attention) -> tuple[Tensor, Tensor]:
    """The result, contiguous, and the log-sum-exps of scores (batch, heads, length) in float32."""
    scores = _scores(q, k, what)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    out = torch.einsum("bkgqs,bskd->bqkgd", weights, _wide(v))
    return out.reshape(q.shape).to(q.dtype).contiguous(), lse.flatten(1, 2).float()


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, what: Attention
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, contiguous (FlashAttention-2, arXiv 2307.08691, section 2.3)."""
    groups = k.shape[2]
    d, o = (_grouped(_wide(t), groups) for t in (d_out, out))
    lse = lse.reshape(lse.shape[0], groups, -1, lse.shape[2]).to(d.dtype)
    weights = (_scores(q, k, what) - lse[..., None]).exp()
    d_weights = torch.einsum("bqkgd,bskd->bkgqs", d, _wide(v))
    mean = (d * o).sum(-1).permute(0, 2, 3, 1)
    d_scores = weights * (d_weights - mean[..., None]) * what.scale
    d_q = torch.einsum("bkgqs,bskd->bqkgd", d_scores, _wide(k))
    d_k = torch.einsum("bkgqs,bqkgd->bskd", d_scores, _grouped(_wide(q), groups))
    d_v = torch.einsum("bkgqs,bqkgd->bskd", weights, d)
    found = zip((d_q.reshape(q.shape), d_k, d_v), (q, k, v), strict=True)
    return tuple(g.to(t.dtype).contiguous() for g, t in found)  # type: ignore[return-value]


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _grouped(t: Tensor, groups: int) -> Tensor:
    """(batch, length, groups, heads of a group, size)."""
    batch, length, heads, size = t.shape
    return t.reshape(batch, length, groups, heads // groups, size)


def _scores(q: Tensor, k: Tensor, what: Attention) -> Tensor:
    """(batch, groups, heads of a group, queries, keys), minus infinity where nothing is looked at."""
    scores = torch.einsum("bqkgd,bskd->bkgqs", _grouped(_wide(q), k.shape[2]), _wide(k)) * what.scale
    at = torch.arange(q.shape[1], device=q.device)[:, None] - torch.arange(k.shape[1], device=q.device)
    hidden = at < 0 if what.causal else torch.zeros_like(at, dtype=torch.bool)
    if what.window is not None:
        hidden = hidden | (at >= what.window)
    return scores.masked_fill(hidden, -torch.inf)
