"""Lowering: the source that becomes a kernel, run on torch tensors in float64 against plain expressions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from codetta.backends.hopper.choose import choose, why_split
from codetta.backends.hopper.columns import NotLowered
from codetta.backends.hopper.emulate import emulate
from codetta.backends.hopper.lower import lower
from codetta.core.types import bf16, f32
from codetta.lang.source import parse_program
from codetta.testing import relative_error
from epilogues import CASES, inputs, program


@pytest.mark.parametrize("name", CASES)
def test_source_means_what_the_program_means(name):
    p, expected = CASES[name]
    lowered = lower(p)
    given = inputs(p)
    found = emulate(lowered, given[0], given)
    wanted = expected(*given)
    assert sorted(found) == list(range(len(wanted)))
    for i, w in enumerate(wanted):
        assert relative_error(found[i], w) < 1e-12, p.outputs[i][0]


def test_names_do_not_matter():
    """Layers whose programs differ in names only share a kernel."""
    first = program("return dict(y=to(acc + x, bf16))", "Tile[64, f32], x: Tile[64, bf16]")
    second = program("return dict(z=to(acc + w, bf16))", "Tile[64, f32], w: Tile[64, bf16]")
    assert lower(first) == lower(second)


def test_a_stored_value_is_rounded_once_and_one_in_the_middle_too():
    p = program("y = to(acc, bf16)\n    return dict(y=y, s=sum_row(y))", "Tile[64, f32]")
    given = inputs(p)
    found = emulate(lower(p), given[0], given)
    assert torch.equal(found[1], given[0].bfloat16().double().sum(1))


REFUSED = {
    "an odd width": ("return dict(y=to(acc, bf16), s=sum_row(acc))", "Tile[769, f32]"),
    "random numbers of lanes": (
        "a, b = halves(acc)\n    return dict(y=to(a * random(s, row_index(acc), column_index(32)) + b, bf16))",
        "Tile[64, f32], s: Scalar[i64]",
    ),
    "random numbers with a computed seed": (
        "return dict(y=acc * random(s + 1, row_index(acc), column_index(acc)))",
        "Tile[64, f32], s: Scalar[i64]",
    ),
    "an integer as a number": ("return dict(y=where(t == 3, acc, 0.0))", "Tile[64, f32], t: ColVec[i64]"),
    "groups of no whole subtile": ("return dict(y=acc * rsqrt(sum_inside(acc * acc, groups=8)))", "Tile[64, f32]"),
    "groups wider than any tile": ("return dict(y=acc * rsqrt(sum_inside(acc * acc, groups=2)))", "Tile[1024, f32]"),
    "a statistic of what is loaded with the tile": (
        "return dict(y=acc * rsqrt(sum_inside(x * acc, groups=2)))",
        "Tile[128, f32], x: Tile[128, bf16]",
    ),
    "a vector that is not zero outside its range": (
        "return dict(y=acc * join_columns(a + 1.0, b))",
        "Tile[384, f32], a: RowVec[256, f32], b: RowVec[128, f32]",
    ),
    "an odd half": ("a, b = halves(acc, groups=2)\n    return dict(y=join_halves(b, a, groups=2))", "Tile[80, f32]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_one_kernel_says_why(name):
    body, params = REFUSED[name]
    p = program(body, params)
    with pytest.raises(NotLowered):
        choose(p)
    assert why_split(p)


def test_operands_that_the_mainloop_does_not_take():
    p = parse_program(
        '@epilogue(gemm="nt", k=64, dtype=f32)\ndef p(acc: Tile[64, f32]):\n    return dict(y=acc * 2.0)\n'
    )
    assert "f32" in (why_split(p) or "")


MAPS = [
    "a + b",
    "a - b",
    "a * b",
    "-a",
    "silu(a)",
    "sigmoid(b)",
    "maximum(a, b)",
    "where(a > b, a, b)",
    "a * g",
    "b * r",
    "gelu(a)",
]


@given(
    st.lists(st.tuples(st.sampled_from(MAPS), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6),
    st.integers(0, 99),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_chain_of_maps(chain, seed):
    """A random straight-line program: what the generated source computes is what the same Python computes on torch."""
    names, lines = ["acc", "x"], []
    for text, i, j in chain:
        a, b = names[i % len(names)], names[j % len(names)]
        lines.append(f"t{len(lines)} = {_replaced(text, a, b)}")
        names.append(f"t{len(lines) - 1}")
    body = "\n    ".join([*lines, f"return dict(y=to({names[-1]} + acc, f32), s=sum_row({names[-1]} * acc))"])
    p = program(body, "Tile[256, f32], x: Tile[256, bf16], g: RowVec[256, f32], r: ColVec[f32]")
    acc, x, g, r = inputs(p, seed)
    scope = {"acc": acc, "x": x, "g": g, "r": r[:, None], "silu": F.silu, "gelu": F.gelu}
    scope |= {"sigmoid": torch.sigmoid, "maximum": torch.maximum, "where": torch.where}
    for line in lines:
        exec(line, scope)
    last = scope[names[-1]]
    found = emulate(lower(p), acc, [acc, x, g, r])
    torch.testing.assert_close(found[0], last + acc)
    torch.testing.assert_close(found[1], (last * acc).sum(1))


def _replaced(text: str, a: str, b: str) -> str:
    words = {"a": a, "b": b}
    return " ".join(
        words.get(w, w)
        for w in text.replace("(", " ( ").replace(")", " ) ").replace(",", " , ").replace("-a", "- a").split()
    )


def test_types_of_the_cases():
    assert CASES["swiglu"][0].outputs[1][1].type.dtype is bf16
    assert CASES["loss"][0].outputs[0][1].type.dtype is f32
