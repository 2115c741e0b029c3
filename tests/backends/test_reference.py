"""The reference backend runs plans as an epilogue would: parts per tile, one rounding a store, float32 sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import drive
import mirror
from codetta.backends.reference.evaluate import TORCH
from codetta.backends.reference.execute import Executable
from codetta.backends.reference.tiles import fold, partials
from codetta.core.node import Node, postorder
from codetta.core.types import DType, Kind, bf16, f16, f32, f64, rowvec, table, tile
from codetta.ir import ops
from codetta.ir.build import (
    add,
    apply,
    cast,
    column,
    input_,
    logsumexp_row,
    matmul,
    mul,
    part,
    parts,
    reduce,
    sum_col,
    sum_row,
)
from codetta.ir.graph import Graph
from codetta.ir.split import ADJACENT, columns, halves
from codetta.partition.plan import Plan
from codetta.partition.size import TILE_M, TILE_N
from codetta.partition.training import TrainingPlan, plan_inference, plan_training
from graphs import layer_norm, llama_segment, rms_norm, trained

WIDTHS = [1, 7, 8, 17, 769, 1000, 1001, 3420, 5003]
ROWS = [0, 1, 7, 127, 129]


def graph_of(*roots: Node) -> Graph:
    leaves = tuple(n for n in postorder(roots) if n.op is ops.INPUT)
    return Graph(leaves, tuple((f"y{i}", r) for i, r in enumerate(roots)))


def numbers(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- parts per tile -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("cols", [1, 127, 128, 129, 1001])
@pytest.mark.parametrize("fn", ["sum", "max", "absmax"])
def test_parts_are_those_of_the_tiles_and_fold_to_the_whole(fn: str, cols: int, rows: int):
    x, v = input_("x", tile(cols, f64)), numbers(rows, cols)
    of_row, of_col, of_all = (reduce(x, fn, kind) for kind in (Kind.COLVEC, Kind.ROWVEC, Kind.SCALAR))
    whole = mirror.FOLDS[fn]
    found = partials(of_row, v)
    assert found.shape == (rows, -(-cols // TILE_N))
    for i, piece in enumerate(v.split(TILE_N, 1)):
        torch.testing.assert_close(found[:, i], whole(piece, 1), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(fold(of_row, found), whole(v, 1), rtol=1e-12, atol=1e-12)
    if not rows and fn != "sum":
        return  # nothing has no largest element
    found = partials(of_col, v)
    assert found.shape == (max(-(-rows // TILE_M), 1), cols)
    for i, piece in enumerate(v.split(TILE_M, 0)):
        torch.testing.assert_close(found[i], whole(piece, 0), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(fold(of_col, found), whole(v, 0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fold(of_all, partials(of_all, v)), whole(v.reshape(-1), 0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups, inside", [(1, 300), (3, 7), (40, 6), (4, 128), (2, 200), (300, 1)])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_parts_of_a_sum_over_groups(groups: int, inside: int, rows: int):
    x, v = input_("x", tile(groups * inside, f64)), numbers(rows, groups * inside)
    total = reduce(x, "sum", Kind.TABLE, groups)
    want = v.reshape(rows, groups, inside).sum(1)
    torch.testing.assert_close(fold(total, partials(total, v)), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cols", [1, 128, 129, 1001])
def test_parts_of_a_logsumexp(cols: int):
    """C21: what fills up the last tile takes no probability, and logits near -100 stay there."""
    x, v = input_("x", tile(cols, f64)), numbers(5, cols) - 100.0
    total = logsumexp_row(x)
    found = partials(total, v)
    assert found.shape == (5, -(-cols // TILE_N))
    torch.testing.assert_close(fold(total, found), v.logsumexp(1), rtol=1e-14, atol=1e-12)


@pytest.mark.parametrize("dtype", [bf16, f16])
def test_parts_of_a_narrow_tile_are_float32(dtype: DType):
    """A bias gradient behind attention: the sum over rows of what came in."""
    graph = graph_of(sum_col(input_("x", tile(3, dtype))), sum_row(input_("x", tile(3, dtype))))
    x = numbers(1000, 3).abs().to(TORCH[dtype])
    out = drive.run(plan_inference(graph), {"x": x}, 1000)
    for got, want in ((out["y0"], x.double().sum(0)), (out["y1"], x.double().sum(1))):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)


# --- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, cols", [(k, n) for k in ("rms", "layer") for n in WIDTHS if k == "rms" or n > 1])
def test_norms_of_any_width(kind: str, cols: int):
    """C02, C03: the statistic comes in parts, the last one ragged; the divisor is the full width, once."""
    x, w = input_("x", tile(3, f64)), input_("w", tile(3, f64, rows=cols))
    first, g, b = matmul(x, w), input_("g", rowvec(cols, f64)), input_("b", rowvec(cols, f64))
    h = rms_norm(first, g) if kind == "rms" else layer_norm(first, g, b)
    graph = graph_of(matmul(h, input_("v", tile(cols, f64, rows=5))))
    wrt = drive.float_inputs(graph)
    plan = plan_training(graph, wrt, "balanced")
    assert plan.forward.count("leftover") == 0
    drive.expect_training(graph, plan, wrt, 9, 1e-8)


@pytest.mark.parametrize("cols", [1, 2, 300])
@pytest.mark.parametrize("level", [0.0, 100.0])
def test_a_layer_norm_of_equal_values_is_finite(level: float, cols: int):
    """Their variance is nothing; two sums that differ by a rounding must not make it less."""
    x, w = input_("x", tile(1, f32)), input_("w", tile(1, f32, rows=cols))
    b, v = input_("b", rowvec(cols, f32)), input_("v", tile(cols, f32, rows=4))
    graph = graph_of(matmul(layer_norm(matmul(x, w), None, b), v))
    feed = drive.typed(graph, mirror.random_feed(graph, 9))
    feed["x"], feed["w"] = torch.full((9, 1), level) + torch.arange(9)[:, None] / 7, torch.ones(cols, 1)
    plan = plan_training(graph, drive.float_inputs(graph), "balanced")
    out, got = drive.train(plan, feed, {"y0": torch.ones(9, 4)}, 9)
    drive.close(out["y0"], (feed["b"].double() @ feed["v"].double().T).expand(9, 4), 0.1, "y")
    assert all(g.isfinite().all() for g in got.values())


@pytest.mark.parametrize("cols", [2, 14, 16, 34, 768, 1000, 1002, 3420, 5006])
@pytest.mark.parametrize("how", ["gate and up", "halves", "adjacent"])
def test_pairs_of_any_width(how: str, cols: int):
    """C03: GLU of an odd number of columns a lane, whether the weights are two or one."""
    x, half = input_("x", tile(6, f64)), cols // 2
    if how == "gate and up":
        gate, up = (matmul(x, input_(f"w{i}", tile(6, f64, rows=half))) for i in range(2))
    else:
        gate, up = parts(matmul(x, input_("w", tile(6, f64, rows=cols))), halves() if how == "halves" else ADJACENT)
    graph = graph_of(mul(apply(ops.SILU, gate), up))
    wrt = drive.float_inputs(graph)
    plan = plan_training(graph, wrt, "balanced")
    assert [s.kind for s in plan.forward.steps] == ["gemm"]
    drive.expect_training(graph, plan, wrt, 9, 1e-10)


@pytest.mark.parametrize("dtype, tolerance", [(f64, 1e-11), (bf16, 0.03)])
@pytest.mark.parametrize("rows", ROWS)
def test_segments_of_any_number_of_rows(rows: int, dtype: DType, tolerance: float):
    graph = llama_segment(dtype)
    wrt = trained(graph)
    drive.expect_training(graph, plan_training(graph, wrt, "balanced"), wrt, rows, tolerance)


@pytest.mark.parametrize("memory", ["fast", "lean"])
@pytest.mark.parametrize("dtype", [f32, bf16, f16])
def test_no_rows_give_empty_outputs_and_zero_gradients(dtype: DType, memory):
    """C13."""
    graph = llama_segment(dtype, bias=True)
    plan = plan_training(graph, trained(graph), memory)
    feed = drive.typed(graph, mirror.random_feed(graph, 0))
    given = {name: torch.zeros(0, n.type.cols, dtype=TORCH[dtype]) for name, n in graph.outputs}
    out, got = drive.train(plan, feed, given, 0)
    for name, n in graph.outputs:
        assert out[name].shape == (0, n.type.cols)
        assert out[name].dtype == TORCH[dtype]
    assert got.keys() == set(trained(graph))
    for name, g in got.items():
        assert (g.shape, g.dtype) == (feed[name].shape, TORCH[dtype])
        assert torch.equal(g, torch.zeros_like(g))


# --- rounding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [bf16, f16])
def test_a_stored_tile_is_rounded_once(dtype: DType):
    """Accumulator, gain, bias and residual in float32, then one rounding: not the model's five."""
    narrow = TORCH[dtype]
    x, w, res = input_("x", tile(32, dtype)), input_("w", tile(32, dtype, rows=48)), input_("res", tile(48, dtype))
    g = input_("g", rowvec(48, dtype))
    z = cast(matmul(x, w), dtype)
    graph = graph_of(cast(add(cast(mul(cast(mul(z, g), dtype), 1 / 3), dtype), res), dtype))
    feed = drive.typed(graph, mirror.random_feed(graph, 50))
    out = drive.run(plan_inference(graph), feed, 50)["y0"]
    acc = feed["x"].float() @ feed["w"].float().T
    # the number 1/3 scales the gain, which is shorter
    once = (acc * (feed["g"].float() * (1 / 3)) + feed["res"].float()).to(narrow)
    assert torch.equal(out, once)


@pytest.mark.parametrize("dtype", [bf16, f16])
def test_partials_and_statistics_stay_float32(dtype: DType):
    plan = plan_training(llama_segment(dtype), trained(llama_segment(dtype)), "balanced")
    for p in (plan.forward, plan.backward):
        vectors = {b: t for s in p.steps for b in s.stores if (t := p.buffers[b]).kind is not Kind.TILE}
        assert vectors
        for name, t in vectors.items():
            is_gradient = name in {v.buffer for n, v in p.outputs if n.startswith("d_")}
            assert t.dtype is (dtype if is_gradient else f32), name


@pytest.mark.parametrize("dtype", [f16, bf16, f32])
@pytest.mark.parametrize("behind_a_gemm", [True, False])
def test_the_sum_of_squares_of_large_values(dtype: DType, behind_a_gemm: bool):
    """C01: a row of 4096 values, all 300, gain 1: the norm is 1. Its sum of squares is 5600 times float16's largest."""
    x, res, w = input_("x", tile(8, dtype)), input_("res", tile(4096, dtype)), input_("w", tile(8, dtype, rows=4096))
    stream = cast(add(res, cast(matmul(x, w), dtype)), dtype) if behind_a_gemm else res
    r = apply(ops.RSQRT, add(mul(sum_row(mul(stream, stream)), 1 / 4096), 1e-6))
    h = cast(mul(stream, r), dtype)
    v = input_("v", tile(4096, dtype, rows=4))
    graph = graph_of(h, cast(matmul(h, v), dtype))
    feed = drive.typed(graph, mirror.random_feed(graph, 3))
    feed["res"] = torch.full((3, 4096), 300.0, dtype=TORCH[dtype])
    if "x" in feed:
        feed["x"] = torch.zeros_like(feed["x"])
    out = drive.run(plan_inference(graph), feed, 3)
    assert torch.equal(out["y0"], torch.ones_like(out["y0"]))
    drive.close(out["y1"], feed["v"].double().sum(1).expand(3, 4), max(torch.finfo(TORCH[dtype]).eps, 1e-5), "h v")


@pytest.mark.parametrize("dtype, tolerance", [(f16, 0.003), (bf16, 0.02)])
def test_a_large_residual_stream_with_a_large_gain(dtype: DType, tolerance: float):
    """C33: magnitude 3e4, gain 4. In float16 the product without the row scale would overflow; eager's does not."""
    x, res, w = input_("x", tile(16, dtype)), input_("res", tile(64, dtype)), input_("w", tile(16, dtype, rows=64))
    stream = cast(add(res, cast(matmul(x, w), dtype)), dtype)
    h = rms_norm(stream, input_("g", rowvec(64, dtype)))
    graph = graph_of(cast(matmul(h, input_("v", tile(64, dtype, rows=32))), dtype))
    wrt = drive.float_inputs(graph)
    feed = mirror.random_feed(graph, 40)
    large = {"res": 3.0e4 * feed["res"].detach().sign(), "g": 4.0 + 0.1 * feed["g"].detach()}
    feed = {n: large.get(n, t.detach()).to(TORCH[dtype]).double().requires_grad_() for n, t in feed.items()}
    want = mirror.outputs(graph, feed, 40)
    given = drive.typed(graph, mirror.random_cotangents(want))
    exact = mirror.gradients(want, feed, given, wrt)
    out, got = drive.train(plan_training(graph, wrt, "lean"), drive.typed(graph, feed), given, 40)
    drive.close(out["y0"], want["y0"], tolerance, "y")
    for n in ("x", "w", "g", "v"):
        e = exact[n]
        assert e is not None
        drive.close(got[n], e, tolerance, n)


def hugging_face_norm(x: Tensor, g: Tensor, eps: float = 1e-5) -> Tensor:
    """RMSNorm as transformers' Llama computes it."""
    wide = x.float()
    return g * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def test_the_error_of_dx_is_no_larger_than_eagers():
    """C05: bf16, hidden 4096. The row statistic is kept in float32."""
    x, g, w = input_("x", tile(4096, bf16)), input_("g", rowvec(4096, bf16)), input_("w", tile(4096, bf16, rows=64))
    graph = graph_of(cast(matmul(rms_norm(x, g), w), bf16))
    plan = plan_training(graph, ["x", "g", "w"], "balanced")
    kept = {plan.forward.buffers[dict(plan.forward.outputs)[o].buffer] for _, o in plan.saved}
    assert {t.dtype for t in kept if t.kind is Kind.COLVEC} == {f32}
    ratios: dict[str, list[float]] = {"x": [], "g": [], "w": []}
    for seed in range(5):
        feed = mirror.random_feed(graph, 32, seed)
        feed = {
            n: (t.detach() * (0.02 if n == "w" else 1.0)).bfloat16().double().requires_grad_() for n, t in feed.items()
        }
        want = mirror.outputs(graph, feed, 32)
        given = drive.typed(graph, mirror.random_cotangents(want, seed))
        exact = mirror.gradients(want, feed, given, feed)
        _, got = drive.train(plan, drive.typed(graph, feed), given, 32)
        narrow = {n: t.detach().bfloat16().requires_grad_() for n, t in feed.items()}
        y = torch.nn.functional.linear(hugging_face_norm(narrow["x"], narrow["g"]), narrow["w"])
        eager = dict(zip(narrow, torch.autograd.grad(y, list(narrow.values()), given["y0"]), strict=True))
        for n, e in exact.items():
            assert e is not None
            ours, theirs = ((t[n].double() - e).norm() / e.norm() for t in (got, eager))
            assert ours <= 1.1 * theirs + 0.5 * 2**-8, n
            ratios[n].append((ours / theirs).item())
    assert all(sum(r) / len(r) <= 1.02 for r in ratios.values()), ratios


@pytest.mark.parametrize("dtype, tolerance", [(f64, 1e-12), (bf16, 0.01)])
@pytest.mark.parametrize("spread", [0.0, 0.2])
def test_an_offset_gain(dtype: DType, tolerance: float, spread: float):
    """C06: the norm's gain is 1 + w. With w = 0 it is a plain norm with a gain of ones, and the backward knows."""
    x, w, v = input_("x", tile(16, dtype)), input_("w", rowvec(16, dtype)), input_("v", tile(16, dtype, rows=8))
    r = apply(ops.RSQRT, add(mul(sum_row(mul(x, x)), 1 / 16), 1e-6))
    offset = graph_of(cast(matmul(cast(mul(mul(x, r), add(w, 1.0)), dtype), v), dtype))
    plain = graph_of(cast(matmul(cast(mul(mul(x, r), input_("g", rowvec(16, dtype))), dtype), v), dtype))
    feed = drive.typed(offset, mirror.random_feed(offset, 9))
    feed["w"] = feed["w"] * spread
    ones = {**feed, "g": (1.0 + feed["w"].double()).to(TORCH[dtype])}
    given = {"y0": numbers(9, 8).to(TORCH[dtype])}
    a, da = drive.train(plan_training(offset, ["x", "w", "v"], "balanced"), feed, given, 9)
    b, db = drive.train(plan_training(plain, ["x", "g", "v"], "balanced"), ones, given, 9)
    if not spread:
        assert torch.equal(a["y0"], b["y0"])
        assert torch.equal(da["x"], db["x"])
        assert torch.equal(da["w"], db["g"])
    drive.close(a["y0"], b["y0"].double(), tolerance, "y")
    drive.close(da["x"], db["x"].double(), tolerance, "dx")


def test_the_offset_of_a_gain_is_added_in_float32():
    """C06: 1 + 2^-10 is 1 in bf16."""
    graph = graph_of(mul(input_("x", tile(16, bf16)), add(input_("w", rowvec(16, bf16)), 1.0)))
    feed = drive.typed(graph, mirror.random_feed(graph, 4))
    feed["w"] = torch.full((16,), 2.0**-10, dtype=torch.bfloat16)
    out = drive.run(plan_inference(graph), feed, 4)["y0"]
    assert torch.equal(out, feed["x"].float() * (1 + 2.0**-10))


class Trained(torch.autograd.Function):
    """A training plan under autograd."""

    @staticmethod
    def forward(ctx, plan: TrainingPlan, names: list[str], rows: int, *values: Tensor):
        ctx.plan, ctx.rows, ctx.names = plan, rows, names
        ctx.feed = dict(zip(names, values, strict=True))
        ctx.out = drive.run(plan.forward, ctx.feed, rows)
        return tuple(ctx.out[name] for name, _ in plan.graph.outputs)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        given = {f"d_{name}": g for (name, _), g in zip(ctx.plan.graph.outputs, grads, strict=True)}
        saved = {name: ctx.out[o] for name, o in ctx.plan.saved}
        got = drive.run(ctx.plan.backward, {**ctx.feed, **given, **saved}, ctx.rows)
        return None, None, None, *(got.get(f"d_{n}") for n in ctx.names)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_gradients_against_finite_differences(kind: str):
    """C07: hidden 8, random gain. No formula of ours or of autograd's is involved."""
    x, w, g, b = (
        input_("x", tile(8, f64)),
        input_("w", tile(8, f64, rows=8)),
        *(input_(k, rowvec(8, f64)) for k in "gb"),
    )
    first = add(x, matmul(x, w))
    h = rms_norm(first, g) if kind == "rms" else layer_norm(first, g, b)
    graph = graph_of(matmul(h, input_("v", tile(8, f64, rows=8))), first)
    names = [mirror.name(n) for n in graph.inputs]
    plan = plan_training(graph, names, "lean")
    values = [t.detach().requires_grad_() for t in mirror.random_feed(graph, 3).values()]
    assert torch.autograd.gradcheck(lambda *v: Trained.apply(plan, names, 3, *v), values, fast_mode=False)


def gain_gradient_error(rows: int) -> tuple[float, float]:
    """The relative error of a norm's gain gradient in bf16, upstream gradients of one sign, and that of a running sum
    in bf16."""
    x, g, w = input_("x", tile(256, bf16)), input_("g", rowvec(256, bf16)), input_("w", tile(256, bf16, rows=8))
    graph = graph_of(cast(matmul(rms_norm(x, g), w), bf16))
    feed = {n: t.detach().abs() + 0.1 for n, t in mirror.random_feed(graph, rows).items()}
    feed = {n: t.bfloat16().double().requires_grad_() for n, t in feed.items()}
    want = mirror.outputs(graph, feed, rows)
    given = {"y0": numbers(rows, 8).abs().bfloat16()}
    exact = mirror.gradients(want, feed, given, ["g"])["g"]
    plan = plan_training(graph, ["g"], "balanced")
    _, got = drive.train(plan, drive.typed(graph, feed), given, rows)
    assert exact is not None
    wide = feed["x"].detach()
    terms = (given["y0"].double() @ feed["w"].detach()) * wide * (wide.square().mean(1, True) + 1e-5).rsqrt()
    total = torch.zeros(256, dtype=torch.bfloat16)
    for t in terms.bfloat16():
        total += t
    return tuple(((t.double() - exact).norm() / exact.norm()).item() for t in (got["g"], total))  # type: ignore[return-value]


def test_the_gain_gradients_error_does_not_grow_with_the_rows():
    """C08: 16,384 rows of one sign, where a sum in bf16 stops growing."""
    few, _ = gain_gradient_error(256)
    many, naive = gain_gradient_error(16_384)
    assert naive > 0.2
    assert many < 2**-8
    assert many < 2 * few


# --- memory ---------------------------------------------------------------------------------------------------------


def storages(tensors: dict[str, Tensor]) -> list[int]:
    return [t.untyped_storage().data_ptr() for t in tensors.values() if t.numel()]


@pytest.mark.parametrize("dtype", [f64, bf16])
def test_outputs_are_contiguous_and_share_memory_with_nothing(dtype: DType):
    """An output that is an input, given twice, a lane, a repeated vector or a number is a tensor of its own."""
    x, w, g = input_("x", tile(8, dtype)), input_("w", tile(8, dtype, rows=8)), input_("g", rowvec(8, dtype))
    z = cast(matmul(x, w), dtype)
    roots = (x, x, z, z, part(z, halves(2), 0), part(x, columns(3, 5), 1), cast(add(g, 0.0), dtype), w, sum_row(x))
    more = (mul(sum_row(x), input_("t", table(4, dtype))), part(x, ADJACENT, 1), mul(column(8), 1.0))
    graph = graph_of(*roots, *more)
    feed = drive.typed(graph, mirror.random_feed(graph, 5))
    want = mirror.outputs(graph, {n: t.double() for n, t in feed.items()}, 5)
    buffers = Executable(plan_inference(graph)).run(feed, 5)
    assert all(t.is_contiguous() for t in buffers.values())
    found = storages(feed) + storages(buffers)
    assert len(found) == len(set(found))
    out = drive.run(plan_inference(graph), feed, 5)
    for name, v in want.items():
        drive.close(out[name], v, 1e-12 if dtype is f64 else 0.01, name)


def test_strided_inputs_are_read_in_place():
    """C10, C11: an expanded upstream gradient, column slices of a wider parent, a transposed weight."""
    graph = llama_segment(f64)
    wrt = trained(graph)
    plan = plan_training(graph, wrt, "balanced")
    feed = drive.typed(graph, mirror.random_feed(graph, 7))
    given = {name: torch.ones(7, n.type.cols, dtype=torch.float64) for name, n in graph.outputs}
    _, want = drive.train(plan, feed, given, 7)
    strided = {n: torch.cat([t, t], -1)[..., : t.shape[-1]] if t.dim() == 2 else t for n, t in feed.items()}
    strided["wo"] = feed["wo"].T.contiguous().T
    assert not strided["y"].is_contiguous()
    ones = {name: torch.ones((), dtype=torch.float64).expand(7, n.type.cols) for name, n in graph.outputs}
    _, got = drive.train(plan, strided, ones, 7)
    for n, g in want.items():
        torch.testing.assert_close(got[n], g, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [f32, bf16])
def test_the_same_inputs_give_the_same_bits(dtype: DType):
    graph = llama_segment(dtype, bias=True)
    plan = plan_training(graph, trained(graph), "lean")
    feed = drive.typed(graph, mirror.random_feed(graph, 200))
    given = {name: numbers(200, int(str(n.type.cols))).to(TORCH[dtype]) for name, n in graph.outputs}
    first, second = (drive.train(plan, feed, given, 200) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize(
    "seen",
    [lambda x: part(x, halves(), 1), lambda x: part(x, columns(3, 5), 1), lambda x: part(x, halves(2), 0)],
    ids=["half", "range", "lane of groups"],
)
def test_what_is_written_over_is_read_by_nobody_any_more(seen: Callable[[Node], Node]):
    """A lane is a view: its whole must not be written over while the lane is still to be read."""
    x, y = input_("x", tile(8, f32)), input_("y", tile(8, f32))
    whole = apply(ops.SIGMOID, x)
    lane = seen(whole)
    # the lane is taken first, then comes the last use of the whole itself, then the lane is read again
    graph = graph_of(mul(lane, 3.0), add(mul(whole, y), 1.0), mul(lane, 5.0), lane)
    feed = drive.typed(graph, mirror.random_feed(graph, 5))
    want = mirror.outputs(graph, {n: t.double() for n, t in feed.items()}, 5)
    out = drive.run(plan_inference(graph), feed, 5)
    for name, v in want.items():
        drive.close(out[name], v, 1e-6, name)


def test_an_empty_plan_runs():
    assert Executable(Plan((), (), (), {})).run({}, 5) == {}
