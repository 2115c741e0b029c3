"""Lowering: the source that becomes a kernel, run on torch tensors in float64 against plain expressions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codetta.backends.hopper.choose import choose, why_split
from codetta.backends.hopper.columns import NotLowered
from codetta.backends.hopper.emulate import emulate
from codetta.backends.hopper.lower import lower
from codetta.core.types import bf16, f32
from codetta.ir.program import Program
from codetta.lang.source import parse_program
from codetta.testing import relative_error

M = 37


def program(body: str, params: str, k: int = 64, form: str = "nt") -> Program:
    """An epilogue behind a bf16 GEMM."""
    return parse_program(f'@epilogue(gemm="{form}", k={k}, dtype=bf16)\ndef p(acc: {params}):\n    {body}\n')


def inputs(p: Program, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for n in p.params:
        sizes = [d if isinstance(d, int) else M for d in (n.type.rows, n.type.cols) if d is not None]
        if n.type.dtype.is_float:
            found.append(torch.randn(sizes, generator=generator, dtype=torch.float64))
        else:
            found.append(torch.randint(-3, 60, sizes, generator=generator))
    return found


def rotate(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Hugging Face's RoPE, as transformers writes it."""
    x = x.unflatten(1, (heads, -1))
    a, b = x.chunk(2, -1)
    turned = torch.cat([-b, a], -1)
    return (x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)).flatten(1)


def swiglu_backward(acc: Tensor, z: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    z = z.clone().requires_grad_()
    gate, up = z.chunk(2, 1)
    y = F.silu(gate) * up
    (dz,) = torch.autograd.grad(y, z, acc)
    return dz * r[:, None], (dz * z.detach()).sum(1), y.detach()


Expected = Callable[..., tuple[Tensor, ...]]
CASES: dict[str, tuple[Program, Expected]] = {
    "residual_rms": (
        program(
            "t = x + acc\n    return dict(h=to(t * g, bf16), t=to(t, bf16), s=sum_row(t * t))",
            "Tile[264, f32], x: Tile[264, bf16], g: RowVec[264, f32]",
        ),
        lambda acc, x, g: ((x + acc) * g, x + acc, (x + acc).square().sum(1)),
    ),
    "swiglu": (
        program(
            "z = acc * r\n    a, b = halves(z)\n    return dict(y=to(silu(a) * b, bf16), z=to(z, bf16))",
            "Tile[192, f32], r: ColVec[f32]",
        ),
        lambda acc, r: (F.silu(acc[:, :96] * r[:, None]) * acc[:, 96:] * r[:, None], acc * r[:, None]),
    ),
    "qkv_rope": (
        program(
            "t = acc * r\n    q, k, v = columns(t, 256, 128, 128)\n    a, b = halves(q, groups=4)\n"
            "    c, d = halves(k, groups=2)\n    e, f = halves(cos_)\n    g, h = halves(sin_)\n"
            "    return dict(v=to(v, bf16), q=to(join_halves(a * e - b * g, b * f + a * h, groups=4), bf16),\n"
            "                k=to(join_halves(c * e - d * g, d * f + c * h, groups=2), bf16))",
            "Tile[512, f32], r: ColVec[f32], cos_: Table[64, bf16], sin_: Table[64, bf16]",
        ),
        lambda acc, r, cos, sin: (
            acc[:, 384:] * r[:, None],
            rotate(acc[:, :256] * r[:, None], cos, sin, 4),
            rotate(acc[:, 256:384] * r[:, None], cos, sin, 2),
        ),
    ),
    "swiglu_backward": (
        program(
            "a, b = halves(z)\n    s = sigmoid(a)\n    da = acc * b * (s * (1.0 + a * (1.0 - s)))\n"
            "    db = acc * silu(a)\n    dz = to(join_halves(da, db) * r, bf16)\n"
            "    return dict(dz=dz, s=sum_row(da * a + db * b), y=to(silu(a) * b, bf16))",
            "Tile[96, f32], z: Tile[192, bf16], r: ColVec[f32]",
            form="nn",
        ),
        swiglu_backward,
    ),
    "norm_backward": (
        program(
            "return dict(dx=to(d + x * c + acc * g, bf16), s=sum_col(acc * x))",
            "Tile[72, f32], d: Tile[72, bf16], x: Tile[72, bf16], c: ColVec[f32], g: RowVec[72, bf16]",
            form="nn",
        ),
        lambda acc, d, x, c, g: (d + x * c[:, None] + acc * g, (acc * x).sum(0)),
    ),
    "loss": (
        program(
            "y = acc * r\n    return dict(y=to(y, f32), lse=logsumexp_row(y), at=select_column(y, target))",
            "Tile[40, f32], r: ColVec[f32], target: ColVec[i64]",
        ),
        lambda acc, r, target: (
            acc * r[:, None],
            (acc * r[:, None]).logsumexp(1),
            torch.where(
                (target >= 0) & (target < 40), (acc * r[:, None]).gather(1, target.clamp(0, 39)[:, None])[:, 0], 0.0
            ),
        ),
    ),
    "bias_gelu_max": (
        program(
            "z = acc * s + b\n    return dict(z=to(z, bf16), y=to(gelu_tanh(z), bf16), m=absmax_row(z))",
            "Tile[80, f32], b: RowVec[80, bf16], s: Scalar[f32]",
        ),
        lambda acc, b, s: (
            acc * s + b,
            F.gelu(acc * s + b, approximate="tanh"),
            (acc * s + b).abs().amax(1),
        ),
    ),
}


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
    "a sum over rows of what is not zero beyond the last": (
        "return dict(y=acc, s=sum_col(acc + b))",
        "Tile[64, f32], b: RowVec[64, f32]",
    ),
    "adjacent columns": ("a, b = adjacent(acc)\n    return dict(y=join_adjacent(b, a))", "Tile[64, f32]"),
    "random numbers": (
        "return dict(y=acc * random(s, row_index(acc), column_index(acc)))",
        "Tile[64, f32], s: Scalar[i64]",
    ),
    "an integer as a number": ("return dict(y=where(t == 3, acc, 0.0))", "Tile[64, f32], t: ColVec[i64]"),
    "a narrow scalar": ("return dict(y=acc * s)", "Tile[64, f32], s: Scalar[bf16]"),
    "groups": ("return dict(y=acc * rsqrt(sum_inside(acc * acc, groups=4)))", "Tile[64, f32]"),
    "an odd half": ("a, b = halves(acc, groups=2)\n    return dict(y=join_halves(b, a, groups=2))", "Tile[80, f32]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_one_kernel_says_why(name):
    body, params = REFUSED[name]
    p = program(body, params)
    with pytest.raises(NotLowered):
        choose(p)
    assert why_split(p)


@pytest.mark.parametrize("cols", [256, 384, 4096])
def test_padding_that_is_not_zero_is_in_no_tile(cols):
    """exp(0) is 1: where such a value is summed along the row, the tile's width divides the columns."""
    p = program("return dict(y=to(acc, bf16), s=sum_row(exp(acc)))", f"Tile[{cols}, f32]")
    _, config = choose(p)
    assert cols % config.tile_n == 0
    zero = program("return dict(y=to(acc, bf16), s=sum_row(exp(acc)))", f"Tile[{cols + 8}, f32]")
    assert why_split(zero)


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
