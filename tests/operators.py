"""Two hand-written epilogues as operators, next to each other, and the same in plain PyTorch."""

from __future__ import annotations

from typing import Annotated

import torch.nn.functional as F
from torch import Tensor

import codetta
from codetta import ColVec, RowVec, Tile, halves, silu, sum_row


@codetta.epilogue
def residual_rms(acc: Tile, residual: Tile, gain: RowVec):
    x = acc + residual
    return dict(x=x, h=x * gain, ssq=sum_row(x * x))


@codetta.epilogue
def swiglu(acc: Annotated[Tile, "2*N"], rstd: ColVec):
    gate, up = halves(acc * rstd)
    return silu(gate) * up


residual_rms_op, swiglu_op = codetta.op(residual_rms), codetta.op(swiglu)


def block(x: Tensor, w: Tensor, residual: Tensor, gain: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """The operators, the second on what the first stores."""
    found = residual_rms_op(x, w, residual=residual, gain=gain)
    rstd = (found["ssq"] / residual.shape[-1] + 1e-6).rsqrt()
    return found["x"], swiglu_op(found["h"], w2, rstd=rstd)


def plain_block(x: Tensor, w: Tensor, residual: Tensor, gain: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """What ``block`` computes."""
    stream = x @ w.T + residual
    rstd = (stream.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    gate, up = (stream * rstd * gain @ w2.T).chunk(2, -1)
    return stream, F.silu(gate) * up
