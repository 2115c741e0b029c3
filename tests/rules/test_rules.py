"""Every rule keeps value, type and gradients in exact arithmetic; so does the pipeline, on the rules' own examples and
on random graphs. Oracle: plain PyTorch in float64, see mirror."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphs
import mirror
from codetta.core.node import Node, postorder, substitute
from codetta.core.rewrite import Fired, Rule
from codetta.core.types import ROWS, DType, Kind, Sym, Type, bf16, colvec, f16, f32, f64, i32, rowvec, table, tile
from codetta.ir import ops
from codetta.ir.build import (
    add,
    apply,
    cast,
    expand,
    input_,
    join,
    matmul,
    mul,
    neg,
    part,
    parts,
    reduce,
    sub,
    sum_row,
    where,
)
from codetta.ir.graph import Graph
from codetta.ir.split import ADJACENT, columns, halves
from codetta.rules.norm import rounded_before_gain
from codetta.rules.pairs import join_outermost
from codetta.rules.pipeline import ALL, FORWARD, LOCAL, reparameterise
from codetta.rules.siblings import merge_siblings
from graphs import layer_norm, rms_norm
from laws import expect_same, graph_of


@pytest.mark.parametrize("rule", ALL, ids=lambda r: r.law)
def test_a_rule_fires_and_keeps_value_and_gradients(rule: Rule):
    before = rule.example()
    places = [n for n in postorder([before]) if rule.apply(n) not in (None, n)]
    assert places, "it does not fire on its own example"
    after = rule.apply(places[-1])
    assert after is not None
    assert after.type == places[-1].type
    (root,) = substitute([before], {places[-1]: after})
    expect_same(graph_of(before), Graph(graph_of(before).inputs, (("y0", root),)))


@pytest.mark.parametrize("rule", ALL, ids=lambda r: r.law)
def test_the_pipeline_keeps_value_and_gradients_of_a_rules_example(rule: Rule):
    before = graph_of(rule.example())
    record: list[Fired] = []
    expect_same(before, reparameterise(before, frozen_gains=True, record=record))
    assert record, "nothing fired"


def test_laws_and_names_are_told_apart():
    assert len({r.law for r in ALL}) == len({r.name for r in ALL}) == len(ALL)
    assert set(map(id, LOCAL)) < set(map(id, FORWARD)) < set(map(id, ALL))


# --- random graphs --------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False))
def test_random_graphs_keep_value_and_gradients(random: Random):
    before = graphs.draw(random, graphs.NORMS, most=8)
    expect_same(before, reparameterise(before), tolerance=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False))
def test_random_graphs_with_frozen_gains_keep_their_value(random: Random):
    before = graphs.draw(random, graphs.NORMS, most=8)
    expect_same(before, reparameterise(before, frozen_gains=True), tolerance=1e-9)


# --- what moves, and what must not ----------------------------------------------------------------------------------


def norm_then_gemm(dtype: DType) -> Graph:
    x, g = input_("x", tile(12, dtype)), input_("g", rowvec(12, dtype))
    return graph_of(matmul(rms_norm(x, g), input_("w", tile(12, dtype, rows=8))))


def operand(graph: Graph) -> Node:
    """What the only GEMM takes as its first operand, without its rounding."""
    (gemm,) = graph.contractions
    return gemm.args[0].args[0] if gemm.args[0].op is ops.CAST else gemm.args[0]


@pytest.mark.parametrize("dtype", [f64, f32, bf16])
def test_a_row_scale_moves_behind_the_gemm(dtype: DType):
    moved = reparameterise(norm_then_gemm(dtype))
    assert not any(n.op is ops.RSQRT for n in postorder(moved.contractions))
    (root,) = moved.roots
    assert root.op is ops.MUL
    assert {a.type.kind for a in root.args} == {Kind.TILE, Kind.COLVEC}


def test_a_row_scale_is_not_moved_through_a_float16_gemm():
    """The product without the scale is stored; at a residual stream of 3e4 with a gain of 4 it overflows."""
    stays = reparameterise(norm_then_gemm(f16))
    assert any(n.op is ops.RSQRT for n in postorder(stays.contractions))
    x = torch.full((3, 12), 3.0e4, dtype=torch.float64)
    feed = {"x": x, "g": torch.full((12,), 4.0).double(), "w": torch.eye(8, 12).double()}
    h = mirror.outputs(graph_of(operand(stays)), feed, 3)["y0"]
    assert h.max() < torch.finfo(torch.float16).max
    moved = reparameterise(norm_then_gemm(bf16))
    assert mirror.outputs(graph_of(operand(moved)), feed, 3)["y0"].max() > torch.finfo(torch.float16).max


@pytest.mark.parametrize("dtype", [f16, bf16])
def test_layer_norm_in_float16_is_not_taken_apart_either(dtype: DType):
    x, w = input_("x", tile(12, dtype)), input_("w", tile(12, dtype, rows=8))
    found = reparameterise(
        graph_of(matmul(layer_norm(x, input_("g", rowvec(12, dtype)), input_("b", rowvec(12, dtype))), w))
    )
    assert any(n.op is ops.RSQRT for n in postorder(found.contractions)) is (dtype is f16)


def test_the_gain_stays_in_the_producers_epilogue_unless_it_is_frozen():
    before = norm_then_gemm(bf16)
    x, g = input_("x", tile(12, bf16)), input_("g", rowvec(12, bf16))
    assert operand(reparameterise(before)) in (mul(x, g), mul(g, x))
    folded = reparameterise(before, frozen_gains=True)
    assert operand(folded) is x
    (gemm,) = folded.contractions
    assert g in postorder([gemm.args[1]])


def test_nothing_moves_past_what_is_not_linear():
    x, w, v = input_("x", tile(12)), input_("w", tile(12, rows=12)), input_("v", tile(12, rows=8))
    r = apply(ops.RSQRT, sum_row(mul(x, x)))
    curved = matmul(apply(ops.TANH, mul(matmul(x, w), r)), v)
    moved = reparameterise(graph_of(curved))
    tanh = next(n for n in moved.nodes if n.op is ops.TANH)
    assert r in postorder([tanh])


def test_siblings_become_one_gemm_over_stacked_weights():
    x = input_("x", tile(12))
    weights = [input_(f"w{i}", tile(12, rows=n)) for i, n in enumerate((8, 4, 4))]
    q, k, v = (matmul(x, w) for w in weights)
    before = graph_of(apply(ops.TANH, q), k, neg(v))
    merged = merge_siblings(before)
    assert [n.args[1].args for n in merged.contractions] == [tuple(weights)]
    expect_same(before, merged)


def test_siblings_are_stacked_as_their_weights_are_inputs():
    """Whichever is multiplied first: forward's and backward's stacks are the same."""
    x = input_("x", tile(12))
    late, early = input_("late", tile(12, rows=8)), input_("early", tile(12, rows=16))
    roots = (("a", matmul(x, late)), ("b", matmul(x, cast(early, f32))))
    merged = merge_siblings(Graph((early, x, late), roots))
    assert [n.args[1].args for n in merged.contractions] == [(early, late)]


def test_siblings_in_another_dtype_than_their_weights():
    """Autocast: each weight is stored as float32 and rounded where it is used."""
    x = input_("x", tile(12, bf16))
    weights = [cast(input_(f"w{i}", tile(12, rows=8)), bf16) for i in range(2)]
    before = graph_of(*(matmul(x, w) for w in weights))
    merged = merge_siblings(before)
    assert [n.args[1].args for n in merged.contractions] == [tuple(weights)]
    expect_same(before, merged)


def test_siblings_of_an_unknown_inner_size():
    """What is stacked is rows: only their numbers must be known."""
    x, known, unknown = (input_(n, tile(Sym("K"), rows=r)) for n, r in (("x", ROWS), ("w", 8), ("t", Sym("L"))))
    other = input_("v", tile(Sym("K"), rows=8))
    (gemm,) = merge_siblings(graph_of(matmul(x, known), matmul(x, other))).contractions
    assert gemm.args[1].args == (known, other)
    apart = graph_of(matmul(x, known), matmul(x, unknown))
    assert merge_siblings(apart).roots == apart.roots


def test_siblings_that_meet_in_a_map_must_lie_side_by_side():
    """Two can be the lanes of a pair. Of three, some range would meet another, in another tile."""
    x = input_("x", tile(12))
    a, b, c = (matmul(x, input_(f"w{i}", tile(12, rows=8))) for i in range(3))
    pair, three = graph_of(mul(a, b)), graph_of(mul(mul(a, b), c))
    assert [len(merge_siblings(g).contractions) for g in (pair, three)] == [1, 2]
    for before in (pair, three):
        expect_same(before, merge_siblings(before))
    unequal = add(part(a, columns(4, 4), 0), matmul(x, input_("narrow", tile(12, rows=4))))
    assert len(merge_siblings(graph_of(unequal)).contractions) == 2


def test_siblings_with_different_takers_stay_apart():
    """A parallel block: q, k and v go to attention, fc1 to fc2. Their gradients come from different places."""
    x = input_("x", tile(12))
    q, k, fc1 = (matmul(x, input_(f"w{i}", tile(12, rows=12))) for i in range(3))
    fc2 = matmul(apply(ops.GELU, fc1), input_("fc2", tile(12, rows=12)))
    before = graph_of(q, k, add(x, fc2))
    merged = merge_siblings(before)
    assert len(merged.contractions) == 3
    expect_same(before, merged)


@pytest.mark.parametrize("order", [lambda x, b: (x, b), lambda x, b: (b, x)], ids=["bias last", "bias first"])
def test_siblings_share_one_sum_with_their_biases_if_each_has_one(order: Callable[[Node, Node], tuple[Node, Node]]):
    x = input_("x", tile(12))
    products = [matmul(x, input_(f"w{i}", tile(12, rows=8))) for i in range(2)]
    a, b = (add(*order(p, input_(f"b{i}", rowvec(8)))) for i, p in enumerate(products))
    before = graph_of(a, apply(ops.TANH, b))
    merged = merge_siblings(before)
    (gemm,) = merged.contractions
    assert [n for n in merged.nodes if gemm in n.args] == [n for n in merged.nodes if n.op is ops.ADD]
    expect_same(before, merged)


@pytest.mark.parametrize(
    "widths, merged",
    [((24, 8), [32]), ((27, 24), [27, 24]), ((27, 13), [40]), ((24, 27, 8), [32, 27]), ((27, 24, 13), [64])],
)
def test_an_odd_width_leaves_the_even_ones_their_kernel(widths: tuple[int, ...], merged: list[int]):
    x = input_("x", tile(12))
    before = graph_of(*(matmul(x, input_(f"w{i}", tile(12, rows=n))) for i, n in enumerate(widths)))
    after = merge_siblings(before)
    assert sorted(n.type.cols for n in after.contractions) == sorted(merged)
    expect_same(before, after)


def test_no_siblings_where_a_weight_is_computed_or_the_operand_differs():
    x, y, w = input_("x", tile(12)), input_("y", tile(12)), input_("w", tile(12, rows=8))
    assert len(merge_siblings(graph_of(matmul(x, w), matmul(y, w))).contractions) == 2
    assert len(merge_siblings(graph_of(matmul(x, w), matmul(x, mul(w, 2.0)))).contractions) == 2


# --- lanes of tables: a table may be wider or narrower than the groups that are split ------------------------------


@pytest.mark.parametrize("inside", [2, 4, 6, 12, 24])
@pytest.mark.parametrize("how", [halves(1), halves(2), halves(4), ADJACENT, columns(4, 20), columns(2, 4, groups=4)])
@pytest.mark.parametrize("order", [0, 1])
def test_lanes_of_products_with_tables(inside: int, how, order: int):
    x, cos = input_("x", tile(24, f64)), input_("cos", table(inside, f64))
    taken = parts(x, how)
    made = join(how, apply(ops.TANH, taken[0]), *taken[1:])
    scaled = mul(made, cos) if order == 0 else mul(cos, made)
    before = graph_of(scaled, part(add(x, mul(x, cos)), how, 1))
    expect_same(before, reparameterise(before))


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("how", [halves(2), halves(4), ADJACENT, columns(4, 20)])
def test_lanes_of_products_with_group_vectors(groups: int, how):
    x, cos = input_("x", tile(24, f64)), input_("cos", table(6, f64))
    v = reduce(x, "sum", Kind.GROUPVEC, groups)
    before = graph_of(part(mul(mul(x, v), cos), how, 0), join(how, *(mul(p, 2.0) for p in parts(mul(x, v), how))))
    expect_same(before, reparameterise(before))


@pytest.mark.parametrize("op", [ops.ADD, ops.SUB, ops.MAXIMUM, ops.MUL])
@pytest.mark.parametrize("other", [rowvec(12, f64), Type(Kind.COLVEC, f64, tile(1).rows, None), table(6, f64)])
def test_a_map_with_a_part_that_is_zero(op, other: Type):
    """The lane of the zero is as wide as its part, whatever the other operand is."""
    x = input_("x", tile(6, f64))
    joined, v = join(halves(), apply(ops.TANH, x), 0.0), input_("v", other)
    before = graph_of(apply(op, joined, v), apply(op, v, joined))
    expect_same(before, reparameterise(before))


@pytest.mark.parametrize("dtype", [f32, bf16])
def test_types_survive_mixed_dtypes(dtype: DType):
    """Signs, parts and joins of values that are rounded, or are the number zero."""
    x = input_("x", tile(12, dtype))
    zero = join(halves(), cast(apply(ops.TANH, x), dtype), 0.0)
    before = graph_of(
        neg(neg(x)), part(zero, halves(), 1), part(zero, halves(), 0), where(apply(ops.GT, x, 0.0), x, 0.0)
    )
    expect_same(before, reparameterise(before))


def test_comparisons_see_what_was_rounded():
    """A largest element must be found again by equality."""
    y = cast(apply(ops.TANH, input_("x", tile(12, bf16))), bf16)
    hit = apply(ops.EQ, y, reduce(y, "max", Kind.COLVEC))
    (root,) = reparameterise(graph_of(where(hit, 1.0, 0.0))).roots
    assert root.args[0] is hit


def test_lanes_are_taken_out_of_a_join_and_zeros_stay_numbers():
    x, y, g = input_("x", tile(12)), input_("y", tile(12)), input_("g", rowvec(24))
    first, second = part(g, halves(), 0), part(g, halves(), 1)
    assert join_outermost(neg(join(halves(), x, y))) is join(halves(), neg(x), neg(y))
    assert join_outermost(mul(join(halves(), x, 0.0), g)) is join(halves(), mul(x, first), 0.0)
    whole = join(halves(), expand(first, x.type), add(y, second))
    assert join_outermost(add(join(halves(), 0.0, y), g)) is whole
    assert join_outermost(add(g, join(halves(), 0.0, y))) is join(halves(), expand(first, x.type), add(second, y))


# --- statistics -----------------------------------------------------------------------------------------------------


def test_the_variance_of_a_gemms_output_is_taken_in_one_pass_and_of_anything_else_in_two():
    """One pass loses digits where the mean is large, so it is for the epilogue, which has no second."""
    x, w = input_("x", tile(12)), input_("w", tile(12, rows=12))

    def centred(h: Node) -> bool:
        found = reparameterise(graph_of(layer_norm(h, None, None)))
        squares = [n.args[0] for n in found.nodes if n.op is ops.REDUCE and n.args[0].op is ops.MUL]
        return any(s.args[0].op is ops.SUB for s in squares)

    assert centred(apply(ops.TANH, x))
    assert not centred(apply(ops.TANH, matmul(x, w)))


@pytest.mark.parametrize("form", ["nt", "nn"])
def test_layer_norm_goes_through_a_gemm_as_a_rank_one_correction(form: str):
    """Whichever way the weight lies: GPT-2 keeps it as (in, out)."""
    rows, cols = (8, 12) if form == "nt" else (12, 8)
    x, w = input_("x", tile(12, f64)), input_("w", tile(cols, f64, rows=rows))
    g, b = input_("g", rowvec(12, f64)), input_("b", rowvec(12, f64))
    first = matmul(x, input_("v", tile(12, f64, rows=12)))
    before = graph_of(matmul(layer_norm(first, g, b), w, form))
    moved = reparameterise(before)
    (gemm,) = (n for n in moved.contractions if n.args[1] is w)
    assert gemm.args[0] in (mul(first, g), mul(g, first))
    expect_same(before, moved, tolerance=1e-11)


@pytest.mark.parametrize("first", [True, False])
def test_what_a_norm_rounds_to_before_its_gain(first: bool):
    """Llama's norm rounds its rows, Gemma's multiplies by the gain first."""
    x, r, g = input_("x", tile(12, bf16)), input_("r", colvec()), input_("g", rowvec(12, bf16))

    def times(a: Node, b: Node) -> Node:
        return mul(a, b) if first else mul(b, a)

    assert rounded_before_gain(times(cast(mul(x, r), bf16), g)) is bf16
    for other in (mul(x, r), cast(mul(x, g), bf16), cast(mul(x, r), i32), x):
        assert rounded_before_gain(times(other, g)) is None
    assert rounded_before_gain(times(cast(mul(x, r), bf16), r)) is None
    assert rounded_before_gain(add(cast(mul(x, r), bf16), g)) is None


def test_subtraction_of_a_tile_is_no_shift():
    x, y, w = input_("x", tile(12, f64)), input_("y", tile(12, f64)), input_("w", tile(12, f64, rows=8))
    before = graph_of(matmul(sub(x, y), w))
    assert reparameterise(before).roots == before.roots
