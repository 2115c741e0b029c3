"""A program for any size becomes a program for given sizes."""

from typing import Annotated

import pytest

from codetta.core.types import bf16
from codetta.errors import ShapeError
from codetta.lang.annotations import RowVec, Tile
from codetta.lang.functions import expand
from codetta.lang.library import dropout, rope_halves, scaled_swiglu
from codetta.lang.sizes import with_sizes
from codetta.lang.source import parse_program, program_text
from codetta.lang.trace import epilogue


def test_sizes_reach_parameters_indices_shapes_and_the_gemm():
    @epilogue(gemm="tn", k="M", dtype=bf16)
    def f(acc: Annotated[Tile, "T", "2*N"], g: Annotated[RowVec, "2*N"]):
        return dict(y=acc * expand(g, acc), g=g)

    assert program_text(with_sizes(f.program, {"T": 8, "N": 32, "M": 128})) == (
        '@epilogue(gemm="tn", k=128, dtype=bf16)\n'
        "def f(acc: Tile[8, 64, f32], g: RowVec[64, f32]):\n"
        "    return dict(y=acc * expand(g, Tile[8, 64, f32]), g=g)\n"
    )
    assert "column_index(64)" in program_text(with_sizes(dropout(0.5).program, {"N": 64}))


def test_some_sizes_may_stay_open():
    p = with_sizes(rope_halves(4).program, {"N": 64})
    assert (
        program_text(p).splitlines()[1]
        == 'def rope_halves(acc: Tile[64, f32], c: Table["I", f32], s: Table["I", f32]):'
    )
    assert parse_program(program_text(p)) == p
    assert with_sizes(p, {}) == p


def test_a_size_that_does_not_fit():
    with pytest.raises(ShapeError, match="has no size called K") as caught:
        with_sizes(scaled_swiglu.program, {"K": 3})
    assert caught.value.hint == "it has: M, N"
    with pytest.raises(ShapeError, match="does not divide"):
        with_sizes(rope_halves(3).program, {"N": 64})
