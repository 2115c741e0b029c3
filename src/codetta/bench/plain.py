"""What each kind of program computes, in plain PyTorch: what Inductor is given, and what results are held against.

Arithmetic is float32, or float64 where the accumulator is; what is stored is then rounded to bfloat16, or not at all.
``acc`` is the GEMM's result; the other arguments are a program's operands by the names that ``Case.roles`` gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Outputs = dict[str, Tensor]
Expression = Callable[..., Outputs]


@dataclass(frozen=True)
class Kind:
    """A kind of program: its expression with gate and up one after the other, and, where it has such a pair, with gate
    and up in alternating columns, of the weight (``pairs_weight``) and of the pre-activation."""

    stacked: Expression
    interleaved: Expression | None = None
    pairs_weight: bool = False


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()


def _stored(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.to(torch.bfloat16)


def _scaled(acc: Tensor, rstd: Tensor | None) -> Tensor:
    return _wide(acc) if rstd is None else _wide(acc) * rstd[:, None]


def residual_rms(acc: Tensor, residual: Tensor, gain: Tensor) -> Outputs:
    """The stream, the next GEMM's input without its row scale, and the sum of squares."""
    x = _wide(acc) + residual
    return {"x": _stored(x), "h": _stored(x * gain), "ssq": x.square().sum(-1)}


def rms_scale(acc: Tensor, rstd: Tensor) -> Outputs:
    """A norm's row scale behind its GEMM."""
    return {"y": _stored(_scaled(acc, rstd))}


def swiglu(acc: Tensor, rstd: Tensor | None = None) -> Outputs:
    """The gated activation, and its argument for backward."""
    z = _scaled(acc, rstd)
    gate, up = z.chunk(2, -1)
    return {"z": _stored(z), "y": _stored(functional.silu(gate) * up)}


def swiglu_interleaved(acc: Tensor, rstd: Tensor | None = None) -> Outputs:
    """The same of alternating columns."""
    z = _scaled(acc, rstd)
    gate, up = z.unflatten(-1, (-1, 2)).unbind(-1)
    return {"z": _stored(z), "y": _stored(functional.silu(gate) * up)}


def rope(acc: Tensor, cos: Tensor, sin: Tensor, widths: Sequence[int], rstd: Tensor | None = None) -> Outputs:
    """q and k turned, v as it is; ``widths`` are their columns, and those of q alone where there is nothing else."""
    q, *rest = _scaled(acc, rstd).split(list(widths), -1)
    found = {"q": _stored(_turned(q, cos, sin))}
    if rest:
        found |= {"k": _stored(_turned(rest[0], cos, sin)), "v": _stored(rest[1])}
    return found


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads = x.unflatten(-1, (-1, cos.shape[1]))
    a, b = heads.chunk(2, -1)
    turned: Tensor = heads * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]
    return turned.flatten(-2)


def log_sum_exp(acc: Tensor, target: Tensor, rstd: Tensor | None = None) -> Outputs:
    """The logits, their log-sum-exp, and the target's."""
    logits = _scaled(acc, rstd)
    picked = logits.gather(1, target[:, None]).squeeze(1)
    return {"logits": _stored(logits), "lse": logits.logsumexp(-1), "picked": picked}


def norm_backward(acc: Tensor, x: Tensor, c: Tensor, gain: Tensor, incoming: Tensor | None = None) -> Outputs:
    """RMSNorm's data gradient, added to the stream's, and the gain's gradient; c holds the row's inner product."""
    g = _wide(acc)
    dx = g * gain + x * c[:, None]
    return {"dx": _stored(dx if incoming is None else dx + incoming), "dgain": (g * x).sum(0)}


def residual_rms_backward(acc: Tensor, x: Tensor, gain: Tensor, incoming: Tensor) -> Outputs:
    """The gradient of the stream before its row's correction, and the row's inner product that the correction needs."""
    g = _wide(acc) * gain
    return {"dx": _stored(g + incoming), "inner": (g * x).sum(-1)}


def swiglu_backward(acc: Tensor, z: Tensor, rstd: Tensor | None = None) -> Outputs:
    """The gradient of the pre-activation, the activation again, and the row's sum of gradient times argument."""
    gate, up = _wide(z).chunk(2, -1)
    dgate, dup, y = _swiglu_parts(_wide(acc), gate, up)
    inner = (dgate * gate + dup * up).sum(-1)
    dz = torch.cat([dgate, dup], -1)
    return {"dz": _stored(dz if rstd is None else dz * rstd[:, None]), "y": _stored(y), "inner": inner}


def swiglu_backward_interleaved(acc: Tensor, z: Tensor, rstd: Tensor | None = None) -> Outputs:
    """The same of alternating columns."""
    gate, up = _wide(z).unflatten(-1, (-1, 2)).unbind(-1)
    dgate, dup, y = _swiglu_parts(_wide(acc), gate, up)
    inner = (dgate * gate + dup * up).sum(-1)
    dz = torch.stack([dgate, dup], -1).flatten(-2)
    return {"dz": _stored(dz if rstd is None else dz * rstd[:, None]), "y": _stored(y), "inner": inner}


def _swiglu_parts(g: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    s = gate.sigmoid()
    silu = gate * s
    return g * up * s * (1 + gate * (1 - s)), g * silu, silu * up


KINDS = {
    "residual, partial RMS": Kind(residual_rms),
    "RMS scale": Kind(rms_scale),
    "SwiGLU": Kind(swiglu, swiglu_interleaved, pairs_weight=True),
    "RoPE": Kind(rope),
    "log-sum-exp": Kind(log_sum_exp),
    "norm backward": Kind(norm_backward),
    "residual, partial RMS backward": Kind(residual_rms_backward),
    "SwiGLU backward": Kind(swiglu_backward, swiglu_backward_interleaved),
}


def interleaved(t: Tensor, dim: int) -> Tensor:
    """The first half of a dimension and the second in turn."""
    return torch.stack(t.chunk(2, dim), dim + 1).flatten(dim, dim + 1)
