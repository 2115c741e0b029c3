"""The reverse walk: what is asked for and nothing else, and inner products taken where a value is stored."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import mirror
from codetta.autodiff.reverse import gradients
from codetta.core.node import Node, postorder
from codetta.core.types import bf16, colvec, f32, f64, i32, rowvec, table, tile
from codetta.ir import ops
from codetta.ir.build import add, apply, cast, input_, join, matmul, mul, neg, part, parts, select_column, sub, where
from codetta.ir.graph import Graph
from codetta.ir.split import columns, halves
from graphs import rope_halves

ROWS = 5
X, W = input_("x", tile(6, f64)), input_("w", tile(6, f64, rows=8))
S, B = input_("s", colvec(f64)), input_("b", rowvec(8, f64))
R = apply(ops.RSQRT, apply(ops.EXP, S))  # a number per row that is never zero, as 1 / rms
ACC = matmul(X, W)
Y = mul(ACC, R)


def expect_gradients(graph: Graph, *wrt: Node, kept: tuple[str, ...] = ()) -> dict[Node, Node]:
    """Gradients of all outputs together, equal to autograd's; kept outputs enter as inputs with their value."""
    feed = mirror.random_feed(graph, ROWS)
    want = mirror.outputs(graph, feed, ROWS)
    cotangents = mirror.random_cotangents(want)
    expected = mirror.gradients(want, feed, cotangents, [mirror.name(n) for n in wrt])
    given = {name: input_(f"d {name}", n.type) for name, n in graph.outputs}
    stored = {n: input_(f"kept {name}", n.type) for name, n in graph.outputs if name in kept}
    found = gradients(graph, given, wrt, stored)
    roots = {mirror.name(n): g for n, g in found.items() if g is not None}
    values: dict[str, Tensor] = {n: t.detach() for n, t in feed.items()}
    values |= {f"d {n}": g for n, g in cotangents.items()} | {f"kept {n}": t.detach() for n, t in want.items()}
    got = mirror.outputs(Graph((), tuple(roots.items())), values, ROWS)
    for n, e in expected.items():
        assert e is not None
        torch.testing.assert_close(got[n], e, rtol=1e-11, atol=1e-11)
    return {n: g for n, g in found.items() if g is not None}


def leaves(n: Node) -> set[str]:
    return {mirror.name(m) for m in postorder([n]) if m.op is ops.INPUT}


# --- asked for, and nothing else ------------------------------------------------------------------------------------


def test_what_nothing_depends_on_has_no_gradient():
    unused = input_("unused", rowvec(4, f64))
    graph = Graph((X, W, unused), (("y", ACC),))
    found = gradients(graph, {"y": input_("dy", ACC.type)}, [unused, W])
    assert list(found) == [unused, W]
    assert found[unused] is None
    assert found[W] is not None


def test_integers_have_no_gradient():
    i = input_("i", colvec(i32))
    graph = Graph((X, i), (("y", select_column(X, i)),))
    assert gradients(graph, {"y": input_("dy", colvec(f64))}, [i])[i] is None


@pytest.mark.parametrize("wrt, gemms", [((X,), 1), ((W,), 1), ((X, W), 2), ((S,), 0), ((B,), 0)])
def test_only_what_is_asked_for_is_computed(wrt: tuple[Node, ...], gemms: int):
    """A frozen weight costs no weight gradient, a first layer no data gradient."""
    graph = Graph((X, W, S, B), (("y", apply(ops.TANH, add(Y, B))),))
    found = expect_gradients(graph, *wrt)
    backward = postorder(found.values())
    forward = set(graph.nodes)
    assert sum(n.op is ops.MATMUL for n in backward if n not in forward) == gemms


def test_outputs_without_a_cotangent_contribute_nothing():
    graph = Graph((X, W), (("y", ACC), ("z", mul(X, X))))
    dy = input_("dy", ACC.type)
    (dx,) = gradients(graph, {"y": dy}, [X]).values()
    assert dx is matmul(dy, W, "nn")
    assert gradients(graph, {"z": input_("dz", X.type)}, [W]) == {W: None}


def test_an_output_given_twice_gets_both_cotangents():
    expect_gradients(Graph((X, W), (("y", ACC), ("again", ACC))), X, W)


def test_an_output_in_the_middle_and_one_that_is_an_input():
    h = apply(ops.TANH, ACC)
    expect_gradients(Graph((X, W, B), (("h", h), ("x", X), ("y", mul(add(h, B), h)))), X, W, B)


def test_gradients_come_in_their_inputs_own_dtype_and_shape():
    x, g = input_("x", tile(6, bf16)), input_("g", rowvec(6, f32))
    graph = Graph((x, g), (("y", cast(mul(x, g), bf16)),))
    found = gradients(graph, {"y": input_("dy", tile(6, bf16))}, [x, g])
    assert [n.type for n in found.values() if n is not None] == [x.type, g.type]
    # a number repeated over a Tile has a gradient of the whole shape, even where every element is the same
    graph = Graph((X,), (("y", mul(X, 3.0)),))
    (dx,) = gradients(graph, {"y": input_("dy", tile(6, f64))}, [X]).values()
    assert dx is not None
    assert dx.type == X.type


# --- inner products -------------------------------------------------------------------------------------------------


def test_the_scales_gradient_comes_from_the_stored_output():
    """<dy, acc> r would need the raw product stored for nothing else."""
    found = expect_gradients(Graph((X, W, S), (("y", Y),)), S, X, W, kept=("y",))
    assert [n for n in postorder([found[S]]) if ACC in n.args] == [Y]


def test_the_inner_product_moves_through_a_linear_map_to_the_outputs():
    cos, sin = input_("cos", table(4, f64)), input_("sin", table(4, f64))
    q, k = parts(Y, columns(4, 4))
    graph = Graph(
        (X, W, S, cos, sin),
        (("q", rope_halves(q, cos, sin, 1)), ("k", neg(join(halves(2), part(k, halves(2), 1), 0.0)))),
    )
    found = expect_gradients(graph, S, X, W, kept=("q", "k"))
    assert leaves(found[S]) == {"d q", "d k", "kept q", "kept k", "s"}


@pytest.mark.parametrize("z", [add(Y, B), add(B, Y)], ids=["bias last", "bias first"])
def test_a_bias_on_the_way_is_subtracted_again(z: Node):
    """<g, m> = <g, m + b> - <g, b>: qkv with biases, rotated."""
    cos, sin = input_("cos", table(4, f64)), input_("sin", table(4, f64))
    graph = Graph((X, W, S, B, cos, sin), (("q", rope_halves(z, cos, sin, 2)),))
    found = expect_gradients(graph, S, X, W, B, kept=("q",))
    assert not {"x", "w"} & leaves(found[S])
    expect_gradients(Graph((X, W, S, B), (("z", z),)), S, B, kept=("z",))


@pytest.mark.parametrize("kept_first", [True, False])
def test_a_mask_on_the_way_is_linear(kept_first: bool):
    mask = apply(ops.GT, B, 0.0)
    z = where(mask, Y, 0.0) if kept_first else where(mask, 0.0, Y)
    found = expect_gradients(Graph((X, W, S, B), (("z", z),)), S, X, W, kept=("z",))
    assert leaves(found[S]) == {"d z", "kept z", "s"}


@pytest.mark.parametrize("z", [where(apply(ops.GT, B, 0.0), Y, 1.0), where(apply(ops.GT, B, 0.0), B, Y)], ids=repr)
def test_a_choice_between_a_value_and_another_is_not(z: Node):
    found = expect_gradients(Graph((X, W, S, B), (("z", z),)), S, X, W, kept=("z",))
    assert "kept z" not in leaves(found[S])


@pytest.mark.parametrize(
    "outputs",
    [
        {"y": apply(ops.TANH, Y)},
        {"y": Y, "t": apply(ops.TANH, Y)},
        {"y": Y, "twice": mul(Y, 2.0)},
        {"acc": ACC, "y": Y},
        {"y": mul(Y, Y)},
        {"y": sub(X, part(Y, columns(6, 2), 0))},
        {"y": add(Y, B), "z": neg(Y)},
        {"y": add(Y, 1.0)},
    ],
    ids=["curve", "and a curve", "feeds an output", "the raw product too", "square", "residual", "bias", "number"],
)
def test_what_is_not_linear_all_the_way_is_still_right(outputs: dict[str, Node]):
    expect_gradients(Graph((X, W, S, B), tuple(outputs.items())), X, W, S, kept=tuple(outputs))


@pytest.mark.parametrize(
    "make",
    [lambda s: s, neg, lambda s: sub(s, 1.0), partial(apply, ops.EXP), partial(apply, ops.SIGMOID)],
    ids=["any", "negative", "zero", "exp", "sigmoid"],
)
def test_a_scale_that_may_be_zero_is_not_divided_by(make: Callable[[Node], Node]):
    """An exponential underflows, as a gate of a token that an expert does not get."""
    graph = Graph((X, W, S), (("y", mul(ACC, make(S))),))
    dy = input_("dy", ACC.type)
    (ds,) = gradients(graph, {"y": dy}, [S]).values()
    assert ds is not None
    feed = mirror.random_feed(graph, ROWS)
    feed["s"] = torch.tensor([0.0, 1.0, -800.0, 2.0, -1.0], dtype=torch.float64).requires_grad_()
    want = mirror.outputs(graph, feed, ROWS)
    given = mirror.random_cotangents(want)
    expected = mirror.gradients(want, feed, given, ["s"])["s"]
    values = {**{n: t.detach() for n, t in feed.items()}, "dy": given["y"]}
    got = mirror.outputs(Graph((), (("s", ds),)), values, ROWS)
    torch.testing.assert_close(got["s"], expected, rtol=1e-12, atol=1e-12)
