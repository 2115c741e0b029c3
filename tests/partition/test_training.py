"""Any graph at all compiles, in every memory mode, and is right forward and backward. Oracle: see mirror."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import drive
import graphs
import mirror
from codetta.backends.reference import tiles
from codetta.core.node import Node, postorder
from codetta.core.types import DType, Kind, bf16, colvec, f16, f32, f64, i32, rowvec, scalar, table, tile
from codetta.errors import PlanError, SettingsError
from codetta.ir import ops
from codetta.ir.build import (
    add,
    apply,
    cast,
    expand,
    input_,
    join,
    logsumexp_row,
    matmul,
    mul,
    parts,
    reduce,
    select_column,
    sub,
    sum_col,
    sum_row,
    where,
)
from codetta.ir.graph import Graph
from codetta.ir.split import Split, columns, halves
from codetta.lang.source import parse_program, program_text
from codetta.partition.build import make_plan
from codetta.partition.cut import MEMORY, Memory
from codetta.partition.plan import Plan, plan_text
from codetta.partition.training import plan_for_given, plan_inference, plan_training
from codetta.rules.pipeline import reparameterise
from graphs import layer_norm, rms_norm

EVERYTHING = graphs.USUAL + graphs.ODD + graphs.ACROSS_ROWS


@pytest.fixture(autouse=True, scope="module")
def _small_tiles():
    """So that a small graph has several tiles, the last one ragged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE_M", 3)
        patch.setattr(tiles, "TILE_N", 5)
        yield


RANDOM = st.randoms(use_true_random=False)


@settings(max_examples=120, deadline=None)
@given(RANDOM, st.sampled_from(MEMORY))
def test_random_graphs_in_float64(random: Random, memory: Memory):
    graph = graphs.draw(random, EVERYTHING)
    wrt = drive.float_inputs(graph)
    drive.expect_training(graph, plan_training(graph, wrt, memory), wrt, 5, 1e-8)


@settings(max_examples=50, deadline=None)
@given(RANDOM, st.sampled_from(MEMORY), st.sampled_from([f32, bf16, f16]))
def test_random_graphs_in_narrow_dtypes(random: Random, memory: Memory, dtype: DType):
    """Types fit, nothing is lost: a wrong term is far outside of these tolerances, rounding is far inside."""
    graph = graphs.draw(random, EVERYTHING, most=6, dtype=dtype)
    wrt = drive.float_inputs(graph)
    drive.expect_training(graph, plan_training(graph, wrt, memory), wrt, 5, 2e-3 if dtype is f32 else 0.3)


@settings(max_examples=40, deadline=None)
@given(RANDOM, st.sampled_from(MEMORY), st.sampled_from([0, 1, 3]))
def test_no_rows_one_row_one_tile_of_rows(random: Random, memory: Memory, rows: int):
    graph = graphs.draw(random, graphs.USUAL + graphs.ODD, most=8)
    wrt = drive.float_inputs(graph)
    drive.expect_training(graph, plan_training(graph, wrt, memory), wrt, rows, 1e-8)


@settings(max_examples=40, deadline=None)
@given(RANDOM, st.integers(0, 2**16))
def test_some_gradients_are_asked_for(random: Random, mask: int):
    graph = graphs.draw(random, EVERYTHING, most=8)
    wrt = [n for i, n in enumerate(drive.float_inputs(graph)) if mask >> i & 1]
    plan = plan_training(graph, wrt, "balanced")
    drive.expect_training(graph, plan, wrt, 5, 1e-8)
    assert {name for name, _ in plan.backward.outputs} <= {f"d_{n}" for n in wrt}


@settings(max_examples=40, deadline=None)
@given(RANDOM, st.integers(0, 2**16))
def test_some_cotangents_are_given(random: Random, mask: int):
    """From what forward keeps for all of them, or a clear error."""
    graph = graphs.draw(random, EVERYTHING, most=8)
    given = [name for i, (name, _) in enumerate(graph.outputs) if mask >> i & 1]
    wrt = drive.float_inputs(graph)
    training = plan_training(graph, wrt, "balanced")
    try:
        plan = plan_for_given(training, given)
    except PlanError:
        reject()  # too many of these, and hypothesis complains
    feed = mirror.random_feed(graph, 5)
    want = mirror.outputs(graph, feed, 5)
    cotangents = {n: g for n, g in mirror.random_cotangents(want).items() if n in given}
    expected = mirror.gradients(want, feed, cotangents, wrt)
    inputs = drive.typed(graph, feed)
    out = drive.run(training.forward, inputs, 5)
    memory = {**inputs, **{f"d_{n}": g for n, g in cotangents.items()}, **{n: out[o] for n, o in training.saved}}
    got = drive.run(plan, memory, 5)
    for n in wrt:
        drive.expect_gradient(got.get(f"d_{n}"), expected[n], inputs[n], 1e-8, n)


@settings(max_examples=30, deadline=None)
@given(RANDOM)
def test_inference_and_plans_without_epilogues(random: Random):
    graph = graphs.draw(random, EVERYTHING)
    feed = mirror.random_feed(graph, 5)
    want = mirror.outputs(graph, feed, 5)
    frozen = make_plan(reparameterise(graph, frozen_gains=True))
    bare = make_plan(graph, epilogues=False)
    assert not any(s.has_epilogue for s in bare.steps)
    for plan in (plan_inference(graph), frozen, bare):
        out = drive.run(plan, drive.typed(graph, feed), 5)
        for name, w in want.items():
            drive.close(out[name], w, 1e-8, name)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
def test_the_same_graph_gives_the_same_plan(seed: int):
    def digests() -> tuple[str, str]:
        graph = graphs.draw(Random(seed), EVERYTHING)
        plan = plan_training(graph, drive.float_inputs(graph), "balanced")
        return plan.forward.digest, plan.backward.digest

    assert digests() == digests()


# --- what once went wrong, or easily could ---------------------------------------------------------------------

X, Y, W = input_("x", tile(8, f64)), input_("y", tile(8, f64)), input_("w", tile(8, f64, rows=8))
G, V = input_("g", rowvec(8, f64)), input_("v", tile(8, f64, rows=8))
C, S = input_("c", colvec(f64)), input_("s", scalar(f64))
Z = matmul(X, W)


def graph_of(*roots: Node) -> Graph:
    leaves = tuple(n for n in postorder(roots) if n.op is ops.INPUT)
    return Graph(leaves, tuple((f"y{i}", r) for i, r in enumerate(roots)))


def largest(x: Node, kind: Kind, groups: int | None = None) -> Node:
    return mul(x, reduce(x, "max", kind, groups))


@pytest.mark.parametrize(
    "roots",
    [
        (X,),
        (G, C, S, W),
        (X, X, Z, Z),
        (mul(G, 2.0), apply(ops.EXP, C), mul(S, S)),
        (mul(W, G), sum_row(W), reduce(W, "max", Kind.SCALAR)),
        (rms_norm(Z, G), Z),
        (layer_norm(matmul(rms_norm(Z, G), V), G, G),),
        (add(X, rms_norm(matmul(X, W), G)),),
        (matmul(add(X, rms_norm(matmul(X, W), G)), V), rms_norm(Z, None)),
        (mul(Y, sum_col(Z)), sum_col(Z)),
        (mul(Z, sum_col(Z)),),
        (matmul(mul(Z, sum_col(Z)), V), reduce(Z, "sum", Kind.SCALAR)),
        (matmul(mul(Z, reduce(Z, "sum", Kind.SCALAR)), V),),
        (reduce(Z, "sum", Kind.TABLE, 2), reduce(Z, "sum", Kind.GROUPVEC, 2)),
        (reduce(Z, "absmax", Kind.SCALAR), reduce(Z, "max", Kind.TABLE, 4), reduce(Z, "max", Kind.ROWVEC)),
        (matmul(Z, W), matmul(Z, V), matmul(X, V)),
        (matmul(matmul(X, W), W),),
        (matmul(X, W), matmul(X, matmul(W, V))),
        (matmul(X, Y, "tn"), Z),
        (sub(logsumexp_row(Z), select_column(Z, input_("i", colvec(i32)))),),
        (logsumexp_row(Z), apply(ops.EXP, sub(Z, logsumexp_row(Z)))),
        (largest(Z, Kind.COLVEC), largest(apply(ops.TANH, Z), Kind.GROUPVEC, 2)),
        (matmul(largest(apply(ops.TANH, Z), Kind.COLVEC), V),),
        (where(apply(ops.GT, Z, Y), Z, Y), apply(ops.MAXIMUM, Z, Y)),
        (mul(Z, 0.0), add(Z, 0.0), mul(Z, 1.0)),
        (mul(sum_row(Z), sum_col(Z)),),
        (apply(ops.TANH, apply(ops.SIGMOID, join(halves(1), parts(Z, halves(1))[0], 0.0))),),  # the 0 in float64 too
        (mul(expand(input_("t", table(2, f64)), X.type), input_("u", table(4, f64))),),
        (matmul(apply(ops.TANH, mul(expand(input_("t", table(2, f64)), X.type), input_("u", table(4, f64)))), W),),
    ],
    ids=lambda roots: ", ".join(repr(r.op) for r in roots),
)
@pytest.mark.parametrize("memory", MEMORY)
def test_odd_graphs(roots: tuple[Node, ...], memory: Memory):
    graph = graph_of(*roots)
    wrt = drive.float_inputs(graph)
    drive.expect_training(graph, plan_training(graph, wrt, memory), wrt, 7, 1e-9)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize("dtype", [bf16, f16, f32])
@pytest.mark.parametrize("kind", [Kind.COLVEC, Kind.ROWVEC, Kind.GROUPVEC, Kind.SCALAR])
@pytest.mark.parametrize("fn", ["max", "absmax"])
def test_a_largest_element_is_found_again_in_backward(fn: str, kind: Kind, dtype: DType, rounded: bool, memory: Memory):
    """The derivative compares with the maximum: a value that was rounded or made again on the way would not be found,
    and the gradient would be 0 / 0."""
    x, w = input_("x", tile(8, dtype)), input_("w", tile(8, dtype, rows=8))
    h = apply(ops.TANH, mul(matmul(x, w), 0.3))
    h = cast(h, dtype) if rounded else h
    big = cast(mul(h, apply(ops.TANH, reduce(h, fn, kind, 2))), dtype)
    graph = Graph((x, w), (("y", cast(matmul(big, w), dtype)), ("h", cast(h, dtype))))
    plan = plan_training(graph, ["x", "w"], memory)
    drive.expect_training(graph, plan, ["x", "w"], 7, 1e-5 if dtype is f32 else 0.02)


@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_layer_norm_far_from_zero(shift: float):
    """Of what no GEMM makes, the variance is taken in two passes."""
    x, g = input_("x", tile(96, f32)), input_("g", rowvec(96, f32))
    w = input_("w", tile(96, f32, rows=8))
    graph = Graph((x, g, w), (("y", matmul(layer_norm(x, g, None), w)),))
    plan = plan_training(graph, ["g"], "balanced")
    feed = mirror.random_feed(graph, 4)
    feed["x"] = (feed["x"].detach() + shift).float().double()
    want = mirror.outputs(graph, feed, 4)["y"]
    got = drive.run(plan.forward, drive.typed(graph, feed), 4)["y"]
    drive.close(got, want, 2e-3, "y")


@pytest.mark.parametrize(
    "root, reason",
    [
        (mul(X, 2.0), r"no GEMM here produces x: "),
        (add(parts(Z, columns(2, 6))[0], parts(Z, Split(1, 4))[3]), "combines columns of different tiles: range 0 of"),
        (mul(Z, sum_col(Z)), "a statistic of the whole output of the GEMM"),
        (mul(Z, apply(ops.RSQRT, sum_row(mul(Z, Z)))), "a statistic of the whole output of the GEMM"),
    ],
)
def test_a_leftover_says_why_it_is_one(root: Node, reason: str):
    (leftover,) = (s for s in plan_inference(graph_of(root)).steps if s.kind == "leftover")
    assert re.search(reason, leftover.reason)


def test_a_memory_mode_that_does_not_exist():
    with pytest.raises(SettingsError, match="memory='greedy'\n  hint: one of fast, balanced, lean"):
        plan_training(graph_of(Z), ["x"], "greedy")  # type: ignore[arg-type]


def test_lean_keeps_less_than_balanced_and_balanced_less_than_fast():
    h = rms_norm(Z, G)
    gate, up = (matmul(h, input_(f"w{i}", tile(8, f64, rows=24))) for i in range(2))
    y = matmul(mul(apply(ops.SILU, gate), up), input_("down", tile(24, f64, rows=8)))
    graph = graph_of(add(Z, y))

    def kept(memory: Memory) -> int:
        plan = plan_training(graph, drive.float_inputs(graph), memory)
        return sum(int(plan.forward.buffers[o].cols or 0) for _, o in plan.saved)

    assert kept("lean") < kept("balanced") < kept("fast")


def test_nothing_is_computed_for_a_gradient_that_nobody_wants():
    frozen = plan_training(graph_of(apply(ops.TANH, Z)), ["x"], "balanced")
    assert [s.is_weight_gradient for s in frozen.backward.steps if s.kind == "gemm"] == [False]
    first = plan_training(graph_of(apply(ops.TANH, Z)), ["w"], "balanced")
    assert [s.is_weight_gradient for s in first.backward.steps if s.kind == "gemm"] == [True]
    nothing = plan_training(graph_of(apply(ops.TANH, Z)), [], "balanced")
    assert nothing.backward == Plan((), (), (), {})
    assert nothing.saved == ()


def test_an_unused_input_and_a_gradient_of_it():
    graph = Graph((X, W, G), (("y", Z),))
    plan = plan_training(graph, ["x", "w", "g"], "balanced")
    assert {name for name, _ in plan.backward.outputs} == {"d_x", "d_w"}
    assert "g" in plan.forward.inputs
    assert "g" not in plan.backward.inputs


def test_names_of_a_model_do_not_matter():
    """Inputs called like the language's own words, like steps, like saved values, or with dots and dashes."""
    names = ["acc", "saved0", "sin", "layers.0.w-q", "t1", "sums", "d_x", "class", "1st", "dict"]
    inputs = [input_(n, tile(8, f64, rows=8)) for n in names]
    h = X
    for w in inputs:
        h = apply(ops.TANH, rms_norm(matmul(h, w), None))
    graph = Graph((X, *inputs), (("saved1", h), ("t", mul(h, 2.0)), ("acc1", h)))
    wrt = drive.float_inputs(graph)
    plan = plan_training(graph, wrt, "balanced")
    drive.expect_training(graph, plan, wrt, 4, 1e-9)
    for s in (*plan.forward.steps, *plan.backward.steps):
        assert parse_program(program_text(s.program)) == s.program
    assert plan_text(plan.forward)


def test_a_rank_one_term_does_not_widen_what_is_stored():
    """LayerNorm's mean leaves through the GEMM as a float32 Tile of two vectors; what is kept of the sum is bf16."""
    x, w = input_("x", tile(12, bf16)), input_("w", tile(8, bf16, rows=12))
    g, b = input_("g", rowvec(12, bf16)), input_("b", rowvec(12, bf16))
    first = matmul(x, input_("v", tile(12, bf16, rows=12)))
    hidden = cast(matmul(cast(layer_norm(first, g, b), bf16), w, "nn"), bf16)
    out = cast(matmul(cast(apply(ops.TANH, hidden), bf16), input_("u", tile(12, bf16, rows=8)), "nn"), bf16)
    inputs = tuple(n for n in postorder([out]) if n.op is ops.INPUT)
    training = plan_training(Graph(inputs, (("y", out),)), ("x", "w", "v", "u"))
    kept = [training.backward.buffers[name] for name, _ in training.saved]
    assert {t.dtype for t in kept if t.kind is Kind.TILE} == {bf16}
