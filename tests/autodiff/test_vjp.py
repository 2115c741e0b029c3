"""The derivative of every op equals autograd's, in float64, for every combination of kinds. Oracle: see mirror."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mirror
from codetta.autodiff.reverse import gradients
from codetta.autodiff.vjp import VJP
from codetta.backends.reference.evaluate import TORCH, evaluate
from codetta.core.node import Node, Op, node, postorder
from codetta.core.types import (
    AXES,
    DType,
    Kind,
    Type,
    bf16,
    boolean,
    colvec,
    f16,
    f32,
    f64,
    groupvec,
    i32,
    rowvec,
    scalar,
    table,
    tile,
)
from codetta.ir import build, ops
from codetta.ir.build import add, apply, cast, const, expand, input_, join, matmul, mul, part, reduce, take_rows, where
from codetta.ir.graph import Graph
from codetta.ir.split import ADJACENT, Split, columns, halves

ROWS, N = 5, 12
OF_KIND = {
    Kind.TILE: tile(N, f64),
    Kind.ROWVEC: rowvec(N, f64),
    Kind.COLVEC: colvec(f64),
    Kind.GROUPVEC: groupvec(3, f64),
    Kind.TABLE: table(4, f64),
    Kind.SCALAR: scalar(f64),
}
KINDS = list(Kind)


def of(kind: Kind, name: str) -> Node:
    return input_(name, OF_KIND[kind])


def expect_derivative(
    made: Node, *inputs: Node, values: dict[str, Tensor] | None = None, positive: bool = False, integers: bool = False
) -> dict[str, Tensor | None]:
    """The gradients of ``made`` by its inputs, equal to autograd's."""
    graph = Graph(inputs, (("y", made),))
    feed = mirror.random_feed(graph, ROWS)
    for n, v in list(feed.items()):
        if v.requires_grad:
            changed = v.detach().abs() + 0.1 if positive else (v.detach() * 2).round() if integers else v.detach()
            feed[n] = (values or {}).get(n, changed).clone().requires_grad_()
        else:
            feed[n] = (values or {}).get(n, v)
    want = mirror.outputs(graph, feed, ROWS)
    cotangents = mirror.random_cotangents(want)
    wrt = [n for n, v in feed.items() if v.requires_grad]
    expected = mirror.gradients(want, feed, cotangents, wrt)

    dy = input_("dy", made.type)
    found = gradients(graph, {"y": dy}, inputs)
    roots = {mirror.name(n): g for n, g in found.items() if g is not None}
    for n, g in roots.items():
        assert g.type == next(i.type for i in inputs if mirror.name(i) == n)
    given = {**{n: v.detach() for n, v in feed.items()}, "dy": cotangents["y"]}
    got = mirror.outputs(Graph((*inputs, dy), tuple(roots.items())), given, ROWS)
    for n in wrt:
        e = expected[n]
        if n not in got or e is None:
            assert e is None or not e.any(), f"no gradient of {n}"
            assert n not in got or not got[n].any(), f"a gradient of {n}"
            continue
        torch.testing.assert_close(got[n], e, rtol=1e-11, atol=1e-11)
    assert not {mirror.name(i) for i in inputs if not i.type.dtype.is_float} & roots.keys()
    return expected


# --- maps -----------------------------------------------------------------------------------------------------------

UNARY = [ops.NEG, ops.ABS, ops.EXP, ops.TANH, ops.ERF, ops.SIN, ops.COS, ops.SIGMOID, ops.SILU, ops.GELU, ops.GELU_TANH]
POSITIVE = [ops.LOG, ops.SQRT, ops.RSQRT, ops.RECIP]
COMPARISONS = [ops.EQ, ops.NE, ops.LT, ops.LE, ops.GT, ops.GE]
BINARY = [ops.ADD, ops.SUB, ops.MUL, ops.DIV, ops.MAXIMUM, ops.MINIMUM]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", [*UNARY, *POSITIVE], ids=repr)
def test_functions_of_one_argument(op: Op, kind: Kind):
    x = of(kind, "x")
    expect_derivative(apply(op, x), x, positive=op in POSITIVE)


@pytest.mark.parametrize("b", KINDS)
@pytest.mark.parametrize("a", KINDS)
@pytest.mark.parametrize("op", BINARY, ids=repr)
def test_functions_of_two_arguments(op: Op, a: Kind, b: Kind):
    x, y = of(a, "x"), of(b, "y")
    expect_derivative(apply(op, x, y), x, y, positive=op is ops.DIV)


@pytest.mark.parametrize("op", BINARY, ids=repr)
def test_a_value_and_itself(op: Op):
    x = of(Kind.TILE, "x")
    expect_derivative(apply(op, x, x), x, positive=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", BINARY, ids=repr)
def test_a_value_and_a_number(op: Op, kind: Kind):
    x = of(kind, "x")
    expect_derivative(apply(op, x, 0.7), x, positive=op is ops.DIV)
    expect_derivative(apply(op, 0.7, x), x, positive=op is ops.DIV)


@pytest.mark.parametrize("b", [Kind.TILE, Kind.ROWVEC, Kind.TABLE])
@pytest.mark.parametrize("op", [ops.MAXIMUM, ops.MINIMUM], ids=repr)
def test_ties_are_shared(op: Op, b: Kind):
    x, y = of(Kind.TILE, "x"), of(b, "y")
    expected = expect_derivative(apply(op, x, y), x, y, integers=True)
    shared = expect_derivative(
        apply(op, x, x2 := of(Kind.TILE, "z")), x, x2, values={k: torch.ones(ROWS, N).double() for k in "xz"}
    )
    assert expected["x"] is not None
    assert shared["x"] is not None
    assert torch.equal(shared["x"], shared["z"])


@pytest.mark.parametrize("condition", [Kind.TILE, Kind.ROWVEC, Kind.COLVEC, Kind.GROUPVEC])
@pytest.mark.parametrize("b", KINDS)
@pytest.mark.parametrize("a", KINDS)
def test_choices(condition: Kind, a: Kind, b: Kind):
    c, x, y = of(condition, "c"), of(a, "x"), of(b, "y")
    expect_derivative(where(apply(ops.GT, c, 0.0), x, y), c, x, y)
    expect_derivative(where(apply(ops.GT, c, 0.0), x, 0.0), c, x)


@pytest.mark.parametrize("kind, to", [(a, b) for a in KINDS for b in KINDS if AXES[a] <= AXES[b]])
def test_repetition(kind: Kind, to: Kind):
    x = of(kind, "x")
    expect_derivative(node(ops.EXPAND, x, attrs=(OF_KIND[to].of(f32),)), x)


def test_casts_between_floats_pass_gradients_and_casts_to_integers_do_not():
    x = of(Kind.TILE, "x")
    expect_derivative(cast(x, f32), x)
    expect_derivative(mul(cast(cast(x, i32), f64), x), x)
    graph = Graph((x,), (("y", cast(cast(x, i32), f64)),))
    assert gradients(graph, {"y": input_("dy", x.type)}, [x]) == {x: None}


@pytest.mark.parametrize("op", COMPARISONS, ids=repr)
def test_comparisons_have_no_derivative(op: Op):
    x, y = of(Kind.TILE, "x"), of(Kind.ROWVEC, "y")
    hit = apply(op, x, y)
    graph = Graph((x, y), (("y", where(hit, 1.0, 0.0)),))
    assert gradients(graph, {"y": input_("dy", tile(N))}, [x, y]) == {x: None, y: None}


def test_logic_integers_and_random_numbers_have_no_derivative():
    x, i = of(Kind.TILE, "x"), input_("i", colvec(i32))
    hit, row = apply(ops.GT, x, 0.0), build.row(tile(1).rows or 0)
    logic = apply(ops.OR, apply(ops.AND, hit, apply(ops.NOT, hit)), hit)
    counted = apply(ops.MOD, apply(ops.FLOORDIV, add(i, row), 2), 3)
    chance = apply(ops.RANDOM, 7, row, build.column(N))
    expect_derivative(where(logic, mul(x, counted), 0.0), x, i)
    graph = Graph((x,), (("y", mul(x, where(apply(ops.LT, chance, 0.5), 2.0, 0.0))),))
    (found,) = gradients(graph, {"y": input_("dy", tile(N, f64))}, [x]).values()
    assert found is not None


@pytest.mark.parametrize("op", [*COMPARISONS, ops.FLOORDIV, ops.MOD, ops.AND, ops.OR, ops.NOT, ops.RANDOM], ids=repr)
def test_what_has_no_derivative_gives_none_for_each_argument(op: Op):
    count = {ops.NOT: 1, ops.RANDOM: 3}.get(op, 2)
    dtype = boolean if op in (ops.AND, ops.OR, ops.NOT) else i32
    made = apply(op, *(input_(f"x{i}", colvec(dtype)) for i in range(count)))
    assert VJP[op](made, input_("dy", colvec())) == (None,) * count


def test_leaves_have_no_arguments_to_give_a_gradient():
    for leaf in (of(Kind.TILE, "x"), const(1.0), build.row(ROWS), build.column(N)):
        assert VJP[leaf.op](leaf, input_("dy", leaf.type)) == ()


def test_a_numbers_gradient_is_summed_over_the_columns_first():
    """A sum over a row is a partial of the epilogue that makes the Tile; one over all of it is not."""
    x, s = of(Kind.TILE, "x"), of(Kind.SCALAR, "s")
    (ds,) = gradients(Graph((x, s), (("y", mul(x, s)),)), {"y": input_("dy", x.type)}, [s]).values()
    assert ds is not None
    assert [n.type.kind for n in postorder([ds]) if n.op is ops.REDUCE] == [Kind.COLVEC, Kind.SCALAR]


# --- columns, rows, reductions, contractions ------------------------------------------------------------------------

SPLITS = [
    halves(),
    halves(3),
    ADJACENT,
    Split(1, 4),
    Split(2, 3),
    columns(5, 7),
    columns(1, 2, 9),
    columns(1, 3, groups=3),
]


@pytest.mark.parametrize("how", SPLITS, ids=repr)
@pytest.mark.parametrize("kind", [Kind.TILE, Kind.ROWVEC, Kind.TABLE])
def test_parts(how: Split, kind: Kind):
    x = input_("x", Type(kind, f64, OF_KIND[kind].rows, N))
    for index in range(how.parts):
        expect_derivative(part(x, how, index), x)
    # all parts at once, each with its own weight
    together = join(how, *(mul(part(x, how, i), float(i + 1)) for i in range(how.parts)))
    expect_derivative(together, x)


@pytest.mark.parametrize("how", SPLITS, ids=repr)
def test_joins(how: Split):
    widths = [len(i) for i in mirror.indices(how, N)]
    inputs = [input_(f"x{i}", tile(n, f64)) for i, n in enumerate(widths)]
    expect_derivative(join(how, *inputs), *inputs)
    expect_derivative(join(how, inputs[0], *(0.0 for _ in inputs[1:])), inputs[0])
    vector = input_("v", rowvec(widths[-1], f64))
    expect_derivative(join(how, *inputs[:-1], vector), *inputs[:-1], vector)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("fn", ["sum", "max", "absmax"])
@pytest.mark.parametrize(
    "kind, to, groups",
    [
        (Kind.TILE, Kind.COLVEC, None),
        (Kind.TILE, Kind.ROWVEC, None),
        (Kind.TILE, Kind.GROUPVEC, 3),
        (Kind.TILE, Kind.TABLE, 3),
        (Kind.TILE, Kind.SCALAR, None),
        (Kind.ROWVEC, Kind.SCALAR, None),
        (Kind.COLVEC, Kind.SCALAR, None),
        (Kind.GROUPVEC, Kind.COLVEC, None),
        (Kind.GROUPVEC, Kind.SCALAR, None),
        (Kind.TABLE, Kind.COLVEC, None),
        (Kind.TABLE, Kind.SCALAR, None),
    ],
)
def test_reductions(fn: str, kind: Kind, to: Kind, groups: int | None, ties: bool):
    x = of(kind, "x")
    expect_derivative(reduce(x, fn, to, groups), x, integers=ties)


def test_logsumexp_and_selection():
    x, i = of(Kind.TILE, "x"), input_("i", colvec(i32))
    expect_derivative(build.logsumexp_row(x), x)
    expect_derivative(build.select_column(x, i), x, i, values={"i": torch.tensor([0, 11, 4, 3, 4])})
    expect_derivative(build.sub(build.logsumexp_row(x), build.select_column(x, i)), x, i)


def test_an_index_that_names_no_column_has_no_gradient():
    """A masked target, such as -100, passes nothing on, whatever its cotangent is."""
    x, i = of(Kind.TILE, "x"), input_("i", colvec(i32))
    graph = Graph((x, i), (("y", build.select_column(x, i)),))
    (dx,) = gradients(graph, {"y": input_("dy", colvec(f64))}, [x]).values()
    assert dx is not None
    feed = {"i": torch.tensor([-100, 12, 2]), "dy": torch.ones(3).double()}
    found = mirror.outputs(Graph((), (("dx", dx),)), feed, 3)["dx"]
    assert torch.equal(found.nonzero(), torch.tensor([[2, 2]]))


@pytest.mark.parametrize("form, a, b", [("nt", (5, 4), (3, 4)), ("nn", (5, 4), (4, 3)), ("tn", (5, 4), (5, 3))])
def test_contractions(form: str, a: tuple[int, int], b: tuple[int, int]):
    x, w = (input_(n, tile(s[1], f64, rows=s[0])) for n, s in (("x", a), ("w", b)))
    expect_derivative(matmul(x, w, form), x, w)
    expect_derivative(matmul(x, mul(w, w), form), x, w)


def test_a_value_contracted_with_itself():
    x = input_("x", tile(4, f64, rows=4))
    for form in ("nt", "nn", "tn"):
        expect_derivative(matmul(x, x, form), x)


def test_rows_stacked_and_taken():
    a, b = input_("a", tile(4, f64, rows=2)), input_("b", tile(4, f64, rows=3))
    expect_derivative(build.stack(a, b), a, b)
    expect_derivative(node(ops.STACK, const(0.0), b, attrs=(2, 3)), b)
    for start, stop in ((0, 1), (1, 3), (0, 3)):
        expect_derivative(take_rows(b, start, stop), b)


def test_turned_vectors():
    v, c = input_("v", rowvec(7, f64)), input_("c", colvec(f64, rows=7))
    expect_derivative(build.turn(v), v)
    expect_derivative(build.turn(c), c)


def test_every_derivative_is_tested_here():
    by_themselves = {ops.WHERE, ops.EXPAND, ops.CAST, ops.RANDOM, ops.PART, ops.JOIN, ops.REDUCE, ops.LSE, ops.SELECT}
    by_themselves |= {ops.MATMUL, ops.STACK, ops.TAKE_ROWS, ops.TURN}
    without = {ops.FLOORDIV, ops.MOD, ops.AND, ops.OR, ops.NOT, ops.INPUT, ops.CONST, ops.COLUMN, ops.ROW}
    assert {*UNARY, *POSITIVE, *BINARY, *COMPARISONS, *by_themselves, *without} == set(VJP)


# --- far from zero --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [f32, bf16, f16])
@pytest.mark.parametrize(
    "op, exact",
    [
        (ops.GELU_TANH, lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
        (ops.GELU, torch.nn.functional.gelu),
        (ops.SILU, torch.nn.functional.silu),
        (ops.SIGMOID, torch.sigmoid),
        (ops.TANH, torch.tanh),
    ],
    ids=["gelu_tanh", "gelu", "silu", "sigmoid", "tanh"],
)
def test_large_arguments_give_no_nan_forward_or_backward(op: Op, exact: Callable[[Tensor], Tensor], dtype: DType):
    """tanh-GELU once multiplied infinity by zero; SiLU's exponential overflows on one side."""
    points = torch.tensor([[-3e4, -1000.0, -30.0, -13.0, -1.5, -0.0, 0.0, 0.4, 1.5, 13.0, 100.0, 1000.0, 3e4]])
    values = points.to(TORCH[dtype])
    x = input_("x", tile(13, dtype))
    y = cast(apply(op, x), dtype)
    (dx,) = gradients(Graph((x,), (("y", y),)), {"y": const(1.0)}, [x]).values()
    assert dx is not None
    got, slope = evaluate([y, dx], {x: values})
    wide = values.double().requires_grad_()
    want = exact(wide)
    (expected,) = torch.autograd.grad(want.sum(), wide)
    eps = max(torch.finfo(TORCH[dtype]).eps, 1e-6)
    torch.testing.assert_close(got.double(), want.detach(), rtol=eps, atol=eps)
    torch.testing.assert_close(slope.double(), expected, rtol=eps, atol=eps)


def test_gradients_of_gradients_agree():
    """The derivatives are graphs of the same ops: taken twice, they still equal autograd's."""
    x, w = input_("x", tile(6, f64)), input_("w", tile(6, f64, rows=4))
    y = apply(ops.TANH, matmul(mul(x, apply(ops.SIGMOID, x)), w))
    (dx,) = gradients(Graph((x, w), (("y", y),)), {"y": expand(1.0, tile(4, f64))}, [x]).values()
    assert dx is not None
    expect_derivative(dx, x, w)
