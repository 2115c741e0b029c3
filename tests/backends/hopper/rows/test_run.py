"""Kernels against plain PyTorch in float64: parts, dtypes, ragged sizes, strides, everything that moves columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from codetta.backends.hopper.rows import bind, compile_rows
from codetta.backends.hopper.rows.launches import WHOLE_ROW
from codetta.backends.reference.evaluate import TORCH, uniform
from codetta.core.node import Node
from codetta.core.types import ROWS, Kind, bf16, colvec, f32, rowvec, scalar, table, tile
from codetta.ir import build, ops
from codetta.ir.program import Program
from codetta.lang.sizes import with_sizes
from codetta.lang.source import parse_program
from interpreted import expect_close, random_value, run

UNIT = 2.0**-8  # of bfloat16, relative to the largest value
ROUNDED = {torch.bfloat16: UNIT, torch.float16: 2.0**-11, torch.float32: 4e-6, torch.float64: 1e-13}


def values(program: Program, rows: int, seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [random_value(p.type, rows, rng) for p in program.params]


def expect(program: Program, rows: int, meaning: Callable[..., Sequence[Tensor]], params: list[Tensor]) -> None:
    """Each output is that of the meaning on the parameters in float64, rounded once."""
    wide = [p.double() if p.is_floating_point() else p for p in params]
    got = run(program, params, rows)
    for (name, n), want in zip(program.outputs, meaning(*wide), strict=True):
        dtype = TORCH[n.type.dtype]
        expect_close(name, got[name], want.to(dtype), ROUNDED.get(dtype, 0.0))


def program(text: str, **sizes: int) -> Program:
    return with_sizes(parse_program(text), sizes)


# --- leftovers --------------------------------------------------------------------------------------------------------

NORM = """
@leftover
def norm(x: Tile[{dtype}], w: RowVec[{dtype}]):
    r = rsqrt(sum_row(x * x) * 0.125 + 1e-05)
    return dict(h=to(x * r * w, {dtype}), r=r, g=to(x * w, {dtype}))
"""


def norm(x: Tensor, w: Tensor) -> list[Tensor]:
    r = (x.square().sum(1) * 0.125 + 1e-5).rsqrt()
    return [x * r[:, None] * w, r, x * w]


@pytest.mark.parametrize("cols", [1, 7, 64, 769, 5003])
@pytest.mark.parametrize("dtype", ["bf16", "f32", "f64", "f16"])
def test_rows_are_reduced_and_scaled(cols: int, dtype: str):
    p = program(NORM.format(dtype=dtype), N=cols)
    expect(p, 3, norm, values(p, 3))


def test_rows_may_be_apart():
    p = program(NORM.format(dtype="f32"), N=40)
    x, w = torch.randn(5, 96), torch.randn(80)
    expect(p, 5, norm, [x[:, 8:48], w[::2]])
    expect(p, 40, norm, [torch.randn(40, 40).t(), w[:40]])
    expect(p, 4, norm, [torch.randn(1, 40).expand(4, 40), w[:40]])


def test_rotation_and_row_sums_are_one_loop_a_width():
    p = program(
        """
@leftover
def rotated(q: Tile[48, bf16], k: Tile[24, bf16], v: Tile[24, bf16], sq: Tile[48, bf16], c: Table[12, bf16],
            s: Table[12, bf16], r: ColVec[f32]):
    a, b = halves(q, groups=4)
    d, e = halves(k, groups=2)
    s1, s2 = halves(s)
    c1, c2 = halves(c)
    t = join_columns(join_halves(a * c1 + b * s2, b * c2 - a * s1, groups=4),
                     join_halves(d * c1 + e * s2, e * c2 - d * s1, groups=2), v)
    return dict(t=to(t * r, bf16), c=(sum_row(q * sq) + sum_row(v * v)) * recip(r))
"""
    )

    def meaning(q: Tensor, k: Tensor, v: Tensor, sq: Tensor, c: Tensor, s: Tensor, r: Tensor) -> list[Tensor]:
        def back(x: Tensor) -> Tensor:
            a, b = x.unflatten(1, (-1, 12)).chunk(2, 2)
            (c1, c2), (s1, s2) = c[:, None].chunk(2, 2), s[:, None].chunk(2, 2)
            return torch.cat([a * c1 + b * s2, b * c2 - a * s1], 2).flatten(1)

        t = torch.cat([back(q), back(k), v], 1) * r[:, None]
        return [t, ((q * sq).sum(1) + (v * v).sum(1)) / r]

    expect(p, 5, meaning, values(p, 5))
    loads = compile_rows(p, {}).text.count("tl.load(")
    assert loads == 2 + 2 + 2 + 1 + 1 + 2 * 4  # q, sq, k in two lanes, v and r once; the tables' halves for q and for k


@pytest.mark.parametrize("cols", [24, WHOLE_ROW + 8])
def test_sums_over_rows_beside_sums_over_columns(cols: int):
    p = program(
        """
@leftover
def both(x: Tile[f32], g: Tile[f32]):
    r = rsqrt(sum_row(x * x))
    return dict(w=sum_col(g * (x * r)), d=g * r - x * sum_row(x * g), all=sum_all(x * r), top=max_col(g))
""",
        N=cols,
    )

    def meaning(x: Tensor, g: Tensor) -> list[Tensor]:
        r = x.square().sum(1, keepdim=True).rsqrt()
        return [(g * x * r).sum(0), g * r - x * (x * g).sum(1, keepdim=True), (x * r).sum(), g.amax(0)]

    expect(p, 9, meaning, values(p, 9))


def test_a_group_is_normed_and_rotated():
    p = program(
        """
@epilogue
def qk(acc: Tile[60, f32], w: RowVec[60, f32], c: Table[20, f32]):
    r = rsqrt(sum_inside(acc * acc, groups=3))
    a, b = halves(acc * r * w, groups=3)
    c1, c2 = halves(c)
    return dict(y=to(join_halves(a * c1 - b, b * c2 + a, groups=3), bf16), r=r, big=absmax_inside(acc, groups=3))
"""
    )

    def meaning(acc: Tensor, w: Tensor, c: Tensor) -> list[Tensor]:
        x = acc.unflatten(1, (3, 20))
        r = x.square().sum(2).rsqrt()
        a, b = (x * r[:, :, None] * w.reshape(3, 20)).chunk(2, 2)
        c1, c2 = c[:, None].chunk(2, 2)
        return [torch.cat([a * c1 - b, b * c2 + a], 2).flatten(1), r, x.abs().amax(2)]

    expect(p, 4, meaning, values(p, 4))


def test_the_head_of_a_model():
    p = program(
        """
@epilogue
def head(acc: Tile[5003, f32], r: ColVec[f32], target: ColVec[i64]):
    y = to(acc * r, bf16)
    return dict(y=y, lse=logsumexp_row(y), at=select_column(y, target))
"""
    )
    acc, r = 30 * torch.randn(6, 5003), torch.rand(6)
    target = torch.tensor([0, 5002, -100, 5003, 17, -1])
    y = (acc * r[:, None]).bfloat16()
    found = run(p, [acc, r, target], 6)
    at = torch.tensor([y[0, 0].item(), y[1, 5002].item(), 0.0, 0.0, y[4, 17].item(), 0.0])
    expect_close("y", found["y"], y, 0.0)
    expect_close("lse", found["lse"], y.double().logsumexp(1).float(), 1e-6)
    expect_close("at", found["at"], at, 0.0)


def test_log_sum_exp_of_infinities():
    p = program("@leftover\ndef f(x: Tile[40, f32]):\n    return dict(y=logsumexp_row(x))")
    x = torch.randn(5, 40)
    x[0], x[1, 3], x[2, 4], x[3] = -torch.inf, torch.inf, torch.nan, 1e4
    expect_close("y", run(p, [x], 5)["y"], x.double().logsumexp(1).float(), 1e-6)


def test_adjacent_columns_and_casts_inside():
    p = program(
        """
@leftover
def f(x: Tile[36, f32], y: Tile[36, f16]):
    a, b = adjacent(x)
    c, d = adjacent(y)
    return dict(z=join_adjacent(a * d, to(b, bf16) + c), n=to(x * 3.0, i64), m=x > y, h=to(to(x, f16), f32))
"""
    )

    def meaning(x: Tensor, y: Tensor) -> list[Tensor]:
        z = torch.stack([x[:, ::2] * y[:, 1::2], x[:, 1::2].bfloat16() + y[:, ::2]], 2).flatten(1)
        return [z, (x.float() * 3).long(), x > y, x.half()]

    expect(p, 4, meaning, values(p, 4))


def test_random_numbers_are_the_same_bits():
    u = build.apply(ops.RANDOM, -12345678901, build.row(ROWS), build.column(50))
    p = Program("r", "leftover", (build.input_("x", tile(50)),), (("u", u),))
    want = uniform(torch.tensor(-12345678901), torch.arange(7)[:, None], torch.arange(50))
    assert torch.equal(run(p, [torch.zeros(7, 50)], 7)["u"], want)


# --- steps on weights -------------------------------------------------------------------------------------------------


def test_weights_are_stacked_taken_apart_and_turned():
    a, b = build.input_("a", tile(33, bf16, 5)), build.input_("b", tile(33, bf16, 7))
    gain = build.input_("gain", rowvec(33, bf16))
    whole = build.stack(a, b)
    outputs = {
        "whole": whole,
        "some": build.cast(build.mul(build.take_rows(whole, 3, 9), gain), bf16),
        "shift": build.turn(build.sum_row(build.mul(whole, gain))),
        "column": build.turn(gain),
        "deep": build.mul(build.turn(build.sum_row(b)), 2.0),
    }
    p = Program("weights", "leftover", (a, b, gain), tuple(outputs.items()))

    def meaning(a: Tensor, b: Tensor, gain: Tensor) -> list[Tensor]:
        w = torch.cat([a, b])
        return [w, w[3:9] * gain, (w * gain).sum(1), gain, 2 * b.sum(1)]

    expect(p, 4, meaning, values(p, 4))


# --- finalizes: parameters in parts -----------------------------------------------------------------------------------


def source(fn: str, kind: Kind) -> Node:
    x = build.input_("acc", tile(64))
    return build.logsumexp_row(x) if fn == "lse" else build.reduce(x, fn, kind)


FOLDS = {"sum": torch.sum, "max": torch.amax, "lse": torch.logsumexp}


@pytest.mark.parametrize("fn", FOLDS)
@pytest.mark.parametrize("parts", [1, 3, 16, 150, 501, 2051])
def test_parts_of_a_column(fn: str, parts: int):
    s, r = build.input_("s", colvec()), build.input_("r", colvec(f32))
    p = Program("fold", "finalize", (s, r), (("y", build.mul(s, r)), ("s", s)))
    x, r_ = torch.randn(37, parts), torch.rand(37)
    found = run(p, [x, r_], 37, {"s": source(fn, Kind.COLVEC)})
    want = FOLDS[fn](x.double(), 1)
    expect_close("y", found["y"], (want * r_).float(), 2e-6)
    expect_close("s", found["s"], want.float(), 2e-6)


@pytest.mark.parametrize("parts", [3, 8, 1002])
def test_log_sum_exp_of_parts_that_are_none(parts: int):
    """Infinities and NaN among parts, and memory behind them that is not theirs."""
    s = build.input_("s", colvec())
    p = Program("fold", "finalize", (s,), (("s", s),))
    whole = torch.full((6, parts + 14), torch.nan)
    x = whole[:, :parts]
    x[:] = 90 * torch.randn(6, parts)
    x[0], x[1], x[2, 1:], x[3, -1], x[4, 0] = -torch.inf, torch.inf, -torch.inf, torch.nan, torch.inf
    found = run(p, [x], 6, {"s": source("lse", Kind.COLVEC)})
    expect_close("s", found["s"], x.double().logsumexp(1).float(), 2e-6)


@pytest.mark.parametrize("parts", [1, 3, 8, 1002, 2051])
def test_log_sum_exp_where_one_part_is_all(parts: int):
    """A target that is all but certain: its probability less one is what lse - z leaves, so that lse is z to half a
    unit of one, whatever its size and whatever was rounded under way; elsewhere it is float64's to a unit in the last
    place."""
    s = build.input_("s", colvec())
    p = Program("fold", "finalize", (s,), (("s", s),))
    top = 100 * torch.randn(40)
    x = (top[:, None] - 40 - 50 * torch.rand(40, parts)).contiguous()
    x[torch.arange(40), torch.randint(parts, (40,))] = top
    assert ((run(p, [x], 40, {"s": source("lse", Kind.COLVEC)})["s"] - top).abs() <= 2.0**-24).all()
    x = 30 * torch.randn(40, parts) + 200
    want = x.double().logsumexp(1)
    got = run(p, [x], 40, {"s": source("lse", Kind.COLVEC)})["s"]
    assert ((got - want).abs() <= 0.75 * want * 2.0**-23).all()


@pytest.mark.parametrize("cols", [1, 33, 128])
@pytest.mark.parametrize("parts", [1, 5, 70])
def test_parts_of_a_row(cols: int, parts: int):
    s = build.input_("s", rowvec(cols))
    p = Program("fold", "finalize", (s,), (("y", build.cast(s, bf16)), ("n", build.reduce(s, "sum", Kind.SCALAR))))
    x = torch.randn(parts, cols)
    found = run(p, [x], 9, {"s": source("sum", Kind.ROWVEC)})
    expect_close("y", found["y"], x.double().sum(0).bfloat16(), UNIT)
    expect_close("n", found["n"], x.double().sum().float(), 1e-5)


def test_parts_of_a_number_and_of_a_table():
    n, t = build.input_("n", scalar()), build.input_("t", table(6))
    p = Program("fold", "finalize", (n, t), (("n", build.mul(n, 2.0)), ("t", t)))
    x, y = torch.randn(30, 50), torch.randn(4, 5 * 6)
    reductions = {
        "n": source("sum", Kind.SCALAR),
        "t": build.reduce(build.input_("x", tile(60)), "sum", Kind.TABLE, 10),
    }
    found = run(p, [x, y], 4, reductions)
    expect_close("n", found["n"], 2 * x.double().sum().float(), 1e-5)
    expect_close("t", found["t"], y.double().unflatten(1, (5, 6)).sum(1).float(), 1e-6)


LOSS = """
@finalize
def loss(target: ColVec[i64], lse: ColVec[f32], at: ColVec[f32]):
    used = target != -100
    count = sum_all(where(used, 1.0, 0.0))
    total = sum_all(where(used, where((target >= 0) & (target < 50), lse - at, nan), 0.0))
    return dict(loss=where(count > 0.0, total / maximum(count, 1.0), count / count), lse=lse, count=count)
"""


@pytest.mark.parametrize("rows", [0, 1, 300, 1500])
def test_a_loss_is_added_up_by_the_last_block(rows: int):
    p = program(LOSS)
    rng = torch.Generator().manual_seed(rows)
    parts, at = 3 * torch.randn(rows, 4, generator=rng), torch.randn(rows, generator=rng)
    target = torch.randint(0, 50, (rows,), generator=rng)
    target[::3] = -100
    lse = parts.double().logsumexp(1)
    used = target != -100
    for _ in range(2):  # the count of blocks is 0 again
        found = run(p, [target, parts, at], rows, {"lse": source("lse", Kind.COLVEC)})
        expect_close("loss", found["loss"], (lse - at)[used].mean().float(), 2e-6)
        expect_close("lse", found["lse"], lse.float(), 2e-6)
        expect_close("count", found["count"], used.sum().float(), 0.0)


def test_a_block_takes_rows_in_turns(monkeypatch: pytest.MonkeyPatch):
    """A block of a loss goes on to further rows where there are more than blocks that run at once."""
    monkeypatch.setattr(bind, "IN_FLIGHT", 3)
    test_a_loss_is_added_up_by_the_last_block(1100)


def test_what_a_total_divides_comes_in_a_second_launch():
    p = program(
        "@finalize\ndef f(x: ColVec[f32], b: RowVec[9, f32]):\n    return dict(y=x / sum_all(x), z=b * sum_all(b))"
    )
    expect(p, 600, lambda x, b: [x / x.sum(), b * b.sum()], values(p, 600))
    assert len(compile_rows(p, {}).steps) == 4


# --- edges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows, cols", [(0, 16), (3, 0), (0, 0)])
def test_nothing_at_all(rows: int, cols: int):
    x, v = build.input_("x", tile(cols)), build.input_("v", rowvec(cols))
    outputs = {
        "y": build.mul(x, v),
        "s": build.sum_row(x),
        "c": build.sum_col(x),
        "n": build.reduce(x, "sum", Kind.SCALAR),
    }
    p = Program("none", "leftover", (x, v), tuple(outputs.items()))
    expect(p, rows, lambda x, v: [x * v, x.sum(1), x.sum(0), x.sum()], values(p, rows))


@pytest.mark.parametrize("name", ["sigmoid", "silu", "gelu_tanh", "tanh", "gelu"])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_functions_far_out_and_near_zero(name: str, dtype: str):
    p = program(f"@leftover\ndef f(x: Tile[{dtype}]):\n    return dict(y={name}(x))", N=400)
    size = torch.logspace(-6, 4, 200, dtype=torch.float64)
    x = torch.cat([size, -size]).to(torch.float32).to(TORCH[p.params[0].type.dtype])[None]
    meaning = {
        "sigmoid": torch.sigmoid,
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "tanh": torch.tanh,
    }[name]
    y, want = run(p, [x], 1)["y"].double(), meaning(x.double())
    unit = 2.0**-23 if dtype == "f32" else 2.0**-42
    where = x > {"sigmoid": -40, "gelu": -1, "gelu_tanh": -1}.get(name, -20)  # below, the tails cancel or are 0
    assert y.isfinite().all()
    assert ((y - want)[where].abs() <= 16 * unit * want[where].abs()).all()
    assert ((y - want).abs() <= 1e-5 * torch.clamp(want.abs(), min=1.0)).all()
