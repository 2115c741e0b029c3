"""Programs pass a strict type checker, and their values have the kind they say."""

import re
from pathlib import Path

from mypy import api

GOOD = """
from typing import Annotated
from codetta.core.types import bf16, i64
from codetta.lang.annotations import ColVec, GroupVec, RowVec, Scalar, Table, Tile, Value
from codetta.lang.functions import exp, halves, maximum, random, rsqrt, silu, sum_inside, sum_row, where
from codetta.lang.trace import epilogue, finalize

def squared(x: Tile) -> Tile:
    return x * x

@epilogue
def residual_rms(acc: Tile, residual: Tile, gain: RowVec) -> dict[str, Value]:
    x = acc + residual
    return dict(x=x, h=x * gain, ssq=sum_row(squared(x)))

@epilogue(gemm="nt", k=4096, dtype=bf16)
def swiglu(acc: Annotated[Tile, 28672, bf16], r: ColVec) -> Tile:
    gate, up = halves(acc * r)
    return where(gate > 0, silu(gate) * up, 1.0 - up)

@finalize
def rstd(ssq: ColVec) -> dict[str, ColVec]:
    return dict(rstd=rsqrt(ssq / 4096 + 1e-6))

reveal_type(residual_rms)
def kinds(t: Tile, v: RowVec, c: ColVec, g: GroupVec) -> None:
    reveal_type(t + v)
    reveal_type(v + t)
    reveal_type(2 - v)
    reveal_type(v + c)
    reveal_type(t == v)
    reveal_type(-exp(v))
    reveal_type(maximum(v, 0.0))
    reveal_type(sum_inside(t, groups=4))
    reveal_type(halves(v))
"""
REVEALED = [
    "Epilogue",
    "Tile",
    "Tile",
    "RowVec",
    "Value",
    "Tile",
    "RowVec",
    "RowVec",
    "GroupVec",
    "tuple[RowVec, RowVec]",
]


# The public table names rooms that import PyTorch; checking them takes 20 seconds and has nothing to do with programs.
CONFIG = """
[mypy]
strict = true
[mypy-codetta.audit.*,codetta.capture.*]
follow_imports = skip
"""


def test_a_strict_checker_agrees(tmp_path: Path):
    file, config = tmp_path / "user.py", tmp_path / "mypy.ini"
    file.write_text(GOOD, encoding="utf-8")
    config.write_text(CONFIG, encoding="utf-8")
    out, err, status = api.run(["--config-file", str(config), "--cache-dir", str(tmp_path / "cache"), str(file)])
    assert (err, status) == ("", 0), out
    revealed = [line.split('"')[1] for line in out.splitlines() if "Revealed" in line]
    assert [re.sub(r"codetta[.\w]*\.", "", r) for r in revealed] == REVEALED
