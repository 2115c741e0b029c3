"""Ready epilogues trace, print in a few lines, and come back from their text."""

import pytest

from codetta.lang import library
from codetta.lang.source import parse_program, program_text
from codetta.lang.trace import Epilogue

READY: list[Epilogue] = [
    library.residual_rms,
    library.rms_scale(4096),
    library.scaled_swiglu,
    library.geglu,
    library.rope_halves(32),
    library.rope_adjacent,
    library.bias_gelu,
    library.dropout(0.1),
    library.lse_select,
    library.row_amax,
    library.qk_norm(32, 128),
]


@pytest.mark.parametrize("ready", READY, ids=lambda e: e.program.name)
def test_text_traces_back(ready: Epilogue):
    text = program_text(ready.program)
    assert parse_program(text) == ready.program
    assert ready.__doc__ or ready.fn.__doc__ is None
    assert len(text.splitlines()) <= 8


def test_every_ready_epilogue_is_tested():
    public = {n for n, v in vars(library).items() if getattr(v, "__module__", "") == library.__name__}
    assert public - {"Outputs"} == {e.program.name for e in READY}


def test_how_they_read():
    assert program_text(library.scaled_swiglu.program) == (
        "@epilogue\n"
        'def scaled_swiglu(acc: Tile["2*N", f32], rstd: ColVec[f32]):\n'
        "    z = acc * rstd\n"
        "    t1, t2 = halves(z)\n"
        "    return dict(z=z, y=silu(t1) * t2)\n"
    )
    assert program_text(library.rope_halves(32).program) == (
        "@epilogue\n"
        'def rope_halves(acc: Tile["N", f32], c: Table["I", f32], s: Table["I", f32]):\n'
        "    t1, t2 = halves(acc, groups=32)\n"
        "    return dict(y=join_halves(t1 * c - t2 * s, t2 * c + t1 * s, groups=32))\n"
    )
