"""Epilogue files as text, for the tests of `codetta check`."""

from __future__ import annotations

from pathlib import Path

HEAD = """
import torch
import torch.nn.functional as F

from codetta import (
    ColVec, GroupVec, RowVec, Scalar, Table, Tile, columns, epilogue, erf, exp, f32, finalize, halves, i64, join_halves,
    leftover, rsqrt, select_column, silu, sum_inside, sum_row, to, where,
)

"""

SWIGLU = """
@epilogue
def swiglu(acc: Tile["2*N"], bias: RowVec["2*N"], rstd: ColVec):
    z = acc * rstd + bias
    gate, up = halves(z)
    return dict(z=z, y=silu(gate) * up, ssq=sum_row(z * z))

def swiglu_reference(acc, bias, rstd):
    z = acc * rstd[:, None] + bias
    gate, up = z.chunk(2, dim=1)
    return dict(z=z, y=F.silu(gate) * up, ssq=z.square().sum(1))
"""


def written(folder: Path, text: str, head: str = HEAD) -> str:
    """A file with that text; its path."""
    file = folder / "given.py"
    file.write_text(head + text, encoding="utf-8")
    return str(file)
