"""The reference backend's meaning of every op equals plain PyTorch's, see mirror; narrow values are computed wide."""

from __future__ import annotations

import itertools

import pytest
import torch

import mirror
from codetta.backends.reference.evaluate import EVAL, TORCH, contract, evaluate, uniform, value_of
from codetta.core.node import Node, Op, node
from codetta.core.types import (
    AXES,
    ROWS,
    DType,
    Kind,
    Type,
    bf16,
    colvec,
    f16,
    f32,
    f64,
    groupvec,
    i32,
    i64,
    rowvec,
    scalar,
    table,
    tile,
)
from codetta.errors import PlanError
from codetta.ir import build, ops
from codetta.ir.build import apply, const, input_, join, matmul, part, parts, reduce
from codetta.ir.graph import Graph
from codetta.ir.split import ADJACENT, Split, columns, halves

M, N = 5, 12
OF_KIND = {
    Kind.TILE: tile(N, f64),
    Kind.ROWVEC: rowvec(N, f64),
    Kind.COLVEC: colvec(f64),
    Kind.GROUPVEC: groupvec(3, f64),
    Kind.TABLE: table(4, f64),
    Kind.SCALAR: scalar(f64),
}
FLOATS = [op for op in EVAL if op in mirror.MAPS and op not in (ops.FLOORDIV, ops.MOD, ops.AND, ops.OR, ops.NOT)]


def expect(made: Node, *inputs: Node, rows: int = M, positive: bool = False) -> None:
    graph = Graph(inputs, (("y", made),))
    feed = {n: (v.detach().abs() + 0.1 if positive else v.detach()) for n, v in mirror.random_feed(graph, rows).items()}
    given = {n: feed[mirror.name(n)].to(TORCH[n.type.dtype]) for n in inputs}
    (got,) = evaluate([made], given)
    want = mirror.outputs(graph, feed, rows)["y"]
    assert got.shape == want.shape
    assert got.dtype == TORCH[made.type.dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-12, atol=1e-12)


def of(kind: Kind, name: str) -> Node:
    return input_(name, OF_KIND[kind])


@pytest.mark.parametrize("op", FLOATS, ids=repr)
def test_maps_of_every_combination_of_kinds(op):
    count = {ops.WHERE: 3}.get(op, 1 if op in (*mirror.UNARY, ops.NOT) else 2)
    for kinds in itertools.product(Kind, repeat=count):
        inputs = [of(k, f"x{i}") for i, k in enumerate(kinds)]
        first = [apply(ops.GT, inputs[0], 0.0)] if op is ops.WHERE else inputs[:1]
        expect(apply(op, *first, *inputs[1:]), *inputs, positive=op in (ops.LOG, ops.SQRT, ops.RSQRT, ops.DIV))


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("op", [ops.ADD, ops.SUB, ops.MUL, ops.DIV, ops.MAXIMUM, ops.MINIMUM, ops.LT], ids=repr)
def test_numbers_on_either_side(op, kind: Kind):
    x = of(kind, "x")
    expect(apply(op, x, 0.5), x)
    expect(apply(op, 0.5, x), x, positive=True)
    expect(apply(op, apply(op, 0.5, 2.0) if op is not ops.LT else 0.5, x), x, positive=True)


def test_integers_and_logic():
    i, j = input_("i", colvec(i32)), input_("j", rowvec(N, i64))
    hit = apply(ops.GT, i, 1)
    for made in (
        apply(ops.FLOORDIV, i, 2),
        apply(ops.MOD, i, 3),
        apply(ops.MOD, build.sub(i, 3), 3),
        apply(ops.FLOORDIV, build.sub(i, 3), 2),
        build.add(i, j),
        build.where(apply(ops.OR, hit, apply(ops.EQ, i, j)), i, j),
        build.where(apply(ops.AND, apply(ops.NOT, hit), True), 1.0, 0.0),
        build.cast(apply(ops.DIV, i, 2), i32),
        build.cast(i, f64),
        build.add(build.row(ROWS), build.column(N)),
    ):
        expect(made, i, j)


@pytest.mark.parametrize("kind, to", [(a, b) for a in Kind for b in Kind if AXES[a] <= AXES[b]])
@pytest.mark.parametrize("rows", [0, 1, M])
def test_repetition(kind: Kind, to: Kind, rows: int):
    x, anchor = of(kind, "x"), input_("anchor", colvec(f64))
    expect(node(ops.EXPAND, x, attrs=(OF_KIND[to].of(f32),)), x, anchor, rows=rows)


SPLITS = [halves(), halves(3), ADJACENT, Split(1, 4), Split(2, 3), columns(5, 7), columns(1, 3, groups=3)]


@pytest.mark.parametrize("how", SPLITS, ids=repr)
@pytest.mark.parametrize("rows", [0, 1, M])
def test_columns_taken_apart_and_put_together(how: Split, rows: int):
    for kind in (Kind.TILE, Kind.ROWVEC, Kind.TABLE):
        x = input_("x", Type(kind, f64, OF_KIND[kind].rows, N))
        for i in range(how.parts):
            expect(part(x, how, i), x, rows=rows)
    x, v = of(Kind.TILE, "x"), of(Kind.ROWVEC, "v")
    taken = parts(x, how)
    expect(join(how, *taken), x, rows=rows)
    expect(join(how, taken[0], *(0.0 for _ in taken[1:])), x, rows=rows)
    expect(join(how, *taken[:-1], part(v, how, how.parts - 1)), x, v, rows=rows)
    if how.sizes is None:
        expect(join(how, *taken[::-1]), x, rows=rows)


@pytest.mark.parametrize("how", SPLITS, ids=repr)
def test_lanes_meet_everything_else(how: Split):
    """Lanes may be kept in groups inside; what they are combined with must be in the same groups."""
    x, g, c, s = of(Kind.TILE, "x"), of(Kind.ROWVEC, "g"), of(Kind.COLVEC, "c"), of(Kind.SCALAR, "s")
    first, last = part(x, how, 0), part(x, how, how.parts - 1)
    gain = part(g, how, 0)
    for made in (
        build.mul(build.mul(first, gain), c),
        build.add(build.mul(first, s), build.sum_row(first)),
        build.sum_col(first),
        build.reduce(first, "max", Kind.SCALAR),
        build.logsumexp_row(first),
        build.select_column(first, input_("i", colvec(i32))),
        build.matmul(first, first, "tn"),
        build.mul(first, last) if first.type == last.type else first,
        build.cast(build.add(first, 1.0), f64),
        build.where(apply(ops.GT, first, c), first, 0.0),
        build.take_rows(build.mul(part(input_("w", tile(N, f64, rows=4)), how, 0), 2.0), 1, 3),
    ):
        expect(made, x, g, c, s, input_("i", colvec(i32)), input_("w", tile(N, f64, rows=4)))


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
def test_reductions(fn: str, kind: Kind, to: Kind, groups: int | None):
    x = of(kind, "x")
    expect(reduce(x, fn, to, groups), x)


def test_rows_and_contractions():
    x, w = of(Kind.TILE, "x"), input_("w", tile(N, f64, rows=7))
    i, v = input_("i", colvec(i32)), input_("v", rowvec(9, f64))
    for made in (
        matmul(x, w),
        matmul(x, input_("u", tile(7, f64, rows=N)), "nn"),
        matmul(x, x, "tn"),
        build.stack(w, input_("w2", tile(N, f64, rows=2))),
        node(ops.STACK, const(0.0), w, attrs=(3, 7)),
        build.take_rows(w, 2, 5),
        build.turn(v),
        build.logsumexp_row(x),
        build.select_column(x, i),
    ):
        leaves = [x, w, i, v, input_("u", tile(7, f64, rows=N)), input_("w2", tile(N, f64, rows=2))]
        expect(made, *leaves)


@pytest.mark.parametrize("sizes", [(3,), (3, 4), (3, 1, 4)])
def test_a_contraction_with_stacked_weights(sizes: tuple[int, ...]):
    """As with their concatenation, which is never made."""
    a, dz = torch.randn(M, 6).double(), torch.randn(M, sum(sizes)).double()
    weights = [torch.randn(n, 6).double() for n in sizes]
    torch.testing.assert_close(contract("nt", a, weights), a @ torch.cat(weights).T, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(contract("nn", dz, weights), dz @ torch.cat(weights), rtol=1e-13, atol=1e-13)


def test_an_index_that_names_no_column_gives_zero():
    """As from an epilogue that never meets the column: an ignored target, such as -100, is masked behind it."""
    x, i = input_("x", tile(4, f32)), input_("i", colvec(i64))
    values = torch.arange(20.0).reshape(5, 4)
    (got,) = evaluate([build.select_column(x, i)], {x: values, i: torch.tensor([-100, -1, 0, 3, 4])})
    assert got.tolist() == [0.0, 0.0, 8.0, 15.0, 0.0]


def test_an_index_that_is_too_large_for_a_single_column_gives_zero_too():
    x, i = input_("x", tile(1, f32)), input_("i", colvec(i64))
    (got,) = evaluate([build.select_column(x, i)], {x: torch.tensor([[2.0], [3.0]]), i: torch.tensor([0, 7])})
    assert got.tolist() == [2.0, 0.0]


@pytest.mark.parametrize("op", [ops.EXP, ops.NEG, ops.GELU], ids=repr)
def test_a_function_of_a_number(op: Op):
    (got,) = evaluate([apply(op, 0.5)], {})
    torch.testing.assert_close(got.double(), mirror.MAPS[op](torch.tensor(0.5).double()), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("rows", [1, 2, 4, M])
def test_groups_of_several_widths_meet(rows: int):
    """As many rows as groups, too: an axis taken for another shows only where the sizes differ."""
    x, fine, cos = of(Kind.TILE, "x"), input_("v", groupvec(4, f64)), input_("t", table(6, f64))
    finer = build.mul(x, fine)
    for made in (
        build.mul(finer, cos),
        build.add(finer, build.mul(x, of(Kind.TABLE, "u"))),
        part(finer, halves(2), 1),
        join(halves(2), *parts(finer, halves(2))),
        reduce(finer, "sum", Kind.GROUPVEC, 2),
    ):
        expect(made, x, fine, cos, of(Kind.TABLE, "u"), rows=rows)


def test_a_tile_is_seen_in_groups_only_where_something_has_groups():
    x, g, t = (torch.ones(s, dtype=torch.float64) for s in ((M, N), (N,), (M, 4)))
    nodes = [of(k, "x") for k in (Kind.TILE, Kind.ROWVEC, Kind.TABLE)]
    pairs = zip(nodes[1:], (g, t), strict=True)
    whole, grouped = (value_of(build.mul(nodes[0], n), [x, v], M, x.device) for n, v in pairs)
    assert (whole.shape, grouped.shape) == ((M, N), (M, 3, 4))
    halved, heads = (value_of(part(nodes[0], how, 0), [x], M, x.device) for how in (halves(), halves(3)))
    assert (halved.shape, heads.shape) == ((M, 6), (M, 3, 2))


def test_no_columns():
    x, y = input_("x", tile(0, f64)), input_("y", tile(0, f64))
    expect(join(halves(), build.add(x, 1.0), y), x, y)


def test_without_an_input_that_has_rows_there_are_none():
    g = of(Kind.ROWVEC, "g")
    (got,) = evaluate([build.add(build.row(ROWS), g)], {g: torch.ones(N, dtype=torch.float64)})
    assert got.shape == (0, N)


# --- rounding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [bf16, f16])
def test_narrow_values_are_widened_for_arithmetic_and_rounded_by_casts_alone(dtype: DType):
    narrow = TORCH[dtype]
    x, g = input_("x", tile(64, dtype)), input_("g", rowvec(64, dtype))
    a, b = torch.randn(9, 64).to(narrow), torch.randn(64).to(narrow)
    y = build.add(build.mul(x, g), build.mul(x, 1 / 3))
    wide, rounded, total, product = evaluate(
        [y, build.cast(y, dtype), build.sum_row(x), matmul(x, x, "tn")], {x: a, g: b}
    )
    exact = a.float() * b.float() + a.float() * (1 / 3)
    assert wide.dtype == total.dtype == product.dtype == torch.float32
    assert torch.equal(wide, exact)
    assert torch.equal(rounded, exact.to(narrow))
    torch.testing.assert_close(total, a.double().sum(1).float(), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(product, (a.double().T @ a.double()).float(), rtol=1e-6, atol=1e-5)


def test_a_sum_of_squares_is_float32_from_the_first_product():
    """C01: 300 squared is beyond float16."""
    x = input_("x", tile(4096, f16))
    values = torch.full((2, 4096), 300.0, dtype=torch.float16)
    (ssq,) = evaluate([build.sum_row(build.mul(x, x))], {x: values})
    assert torch.equal(ssq, torch.full((2,), 300.0 * 300.0 * 4096))


# --- random numbers, missing inputs ---------------------------------------------------------------------------------


def test_random_numbers_depend_on_their_counters_alone():
    rows, cols = torch.arange(300)[:, None], torch.arange(200)[None, :]
    u = uniform(7, rows, cols)
    assert u.dtype == torch.float32
    assert u.min() >= 0.0
    assert u.max() < 1.0
    assert torch.equal(u[17:30, 5:9], uniform(7, rows[17:30], cols[:, 5:9]))  # a tile sees what the whole sees
    assert not torch.equal(u, uniform(8, rows, cols))
    assert not torch.equal(u[:200], u[:200].T)
    assert abs(u.mean().item() - 0.5) < 0.005
    assert abs(u.var().item() - 1 / 12) < 0.002
    for lag in (u[:, 1:] * u[:, :-1], u[1:] * u[:-1]):
        assert abs(lag.mean().item() - 0.25) < 0.005
    assert u.unique().numel() > 0.99 * u.numel()


def test_random_numbers_are_a_hash_of_the_counters():
    """MurmurHash3's finaliser, in Python's own integers: every backend must draw the same."""

    def mix(h: int) -> int:
        h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
        h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
        return h ^ h >> 16

    for counters in itertools.product((0, 1, 12345, 2**31 - 1), (0, 1, 511), (0, 3, 4096)):
        h = 0x9E3779B9
        for counter in counters:
            h = mix((h + counter * 0x9E3779B1) % 2**32)
        assert uniform(*counters).item() == (h >> 8) / 2**24


def test_random_numbers_in_a_graph():
    x = of(Kind.TILE, "x")
    chance = apply(ops.RANDOM, 7, build.row(ROWS), build.column(N))
    (got,) = evaluate([build.where(apply(ops.LT, chance, 0.5), x, 0.0)], {x: torch.ones(M, N).double()})
    want = uniform(7, torch.arange(M)[:, None], torch.arange(N)[None, :]) < 0.5
    assert torch.equal(got, want.double())


def test_a_missing_input_is_named():
    x, y = of(Kind.TILE, "x"), of(Kind.TILE, "forgotten")
    with pytest.raises(PlanError, match="no value for the input forgotten"):
        evaluate([build.add(x, y)], {x: torch.zeros(M, N)})


def test_inputs_are_not_changed_by_evaluation():
    x = of(Kind.TILE, "x")
    value = torch.randn(M, N, dtype=torch.float64)
    before = value.clone()
    evaluate([build.mul(build.add(x, x), x), x], {x: value})
    assert torch.equal(value, before)
