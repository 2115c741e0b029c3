"""Ready epilogues: the long tail of a Transformer block, a few lines each."""

from __future__ import annotations

from typing import Annotated

from codetta.core.types import i64
from codetta.lang.annotations import ColVec, RowVec, Scalar, Table, Tile, Value
from codetta.lang.functions import (
    absmax_row,
    adjacent,
    column_index,
    gelu,
    gelu_tanh,
    halves,
    join_adjacent,
    join_halves,
    logsumexp_row,
    random,
    row_index,
    rsqrt,
    select_column,
    silu,
    sum_inside,
    sum_row,
    where,
)
from codetta.lang.trace import Epilogue, epilogue, finalize

Outputs = dict[str, Value]


@epilogue
def residual_rms(acc: Tile, residual: Tile, gain: RowVec) -> Outputs:
    """The residual stream, the next GEMM's input without its row scale, and the partial sums of squares it takes."""
    x = acc + residual
    return dict(x=x, h=x * gain, ssq=sum_row(x * x))


def rms_scale(width: int, eps: float = 1e-6) -> Epilogue:
    """RMSNorm's row scale from the sums of squares of rows of that width."""

    @finalize(name="rms_scale")
    def program(ssq: ColVec) -> Outputs:
        return dict(rstd=rsqrt(ssq / float(width) + eps))

    return program


@epilogue
def scaled_swiglu(acc: Annotated[Tile, "2*N"], rstd: ColVec) -> Outputs:
    """SwiGLU of gate | up, scaled by the norm whose input fed the GEMM; z is kept for the backward."""
    z = acc * rstd
    gate, up = halves(z)
    return dict(z=z, y=silu(gate) * up)


@epilogue
def geglu(acc: Annotated[Tile, "2*N"]) -> Outputs:
    """GeGLU of gate | up (tanh approximation); z is kept for the backward."""
    gate, up = halves(acc)
    return dict(z=acc, y=gelu_tanh(gate) * up)


def rope_halves(heads: int) -> Epilogue:
    """RoPE on that many heads, a head's two halves paired (Hugging Face); c and s are half a head wide."""

    @epilogue(name="rope_halves")
    def program(acc: Tile, c: Table, s: Table) -> Outputs:
        a, b = halves(acc, groups=heads)
        return dict(y=join_halves(a * c - b * s, b * c + a * s, groups=heads))

    return program


@epilogue
def rope_adjacent(acc: Tile, c: Table, s: Table) -> Outputs:
    """RoPE with neighbouring columns paired (Meta, torchtitan); c and s are half a head wide."""
    a, b = adjacent(acc)
    return dict(y=join_adjacent(a * c - b * s, b * c + a * s))


@epilogue
def bias_gelu(acc: Tile, bias: RowVec) -> Outputs:
    """A biased GELU; z is kept for the backward."""
    z = acc + bias
    return dict(z=z, y=gelu(z))


def dropout(p: float) -> Epilogue:
    """Dropout with probability p; the same seed drops the same elements, so that no mask is stored."""

    @epilogue(name="dropout")
    def program(acc: Tile, seed: Annotated[Scalar, i64]) -> Outputs:
        kept = random(seed, row_index(acc), column_index(acc)) >= p
        return dict(y=where(kept, acc * (1 / (1 - p)), 0.0))

    return program


@epilogue
def lse_select(acc: Tile, target: Annotated[ColVec, i64]) -> Outputs:
    """Cross-entropy's two row statistics of the logits, which are not stored: the loss is lse - picked."""
    return dict(lse=logsumexp_row(acc), picked=select_column(acc, target))


@epilogue
def row_amax(acc: Tile) -> Outputs:
    """The result with each row's largest absolute value, from which a quantisation scale is made."""
    return dict(y=acc, amax=absmax_row(acc))


def qk_norm(heads: int, head_dim: int, eps: float = 1e-6) -> Epilogue:
    """RMSNorm of each head, whole inside one epilogue: a head's columns lie in one tile."""

    @epilogue(name="qk_norm")
    def program(acc: Tile, gain: RowVec) -> Outputs:
        rstd = rsqrt(sum_inside(acc * acc, groups=heads) / float(head_dim) + eps)
        return dict(y=acc * rstd * gain, rstd=rstd)

    return program
