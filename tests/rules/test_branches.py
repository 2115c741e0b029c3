"""Every branch of a rule: each order, kind and form that it takes fires and keeps value and gradients, and what it
excludes stays. Oracle: plain PyTorch in float64, see mirror."""

from __future__ import annotations

from itertools import product

import pytest

from codetta.core.node import Node, node
from codetta.core.types import Kind, bf16, colvec, f16, f32, groupvec, i32, rowvec, scalar, table, tile
from codetta.ir import ops
from codetta.ir.build import (
    add,
    apply,
    cast,
    div,
    expand,
    input_,
    join,
    matmul,
    mul,
    neg,
    part,
    reduce,
    sub,
    sum_col,
    sum_row,
    turn,
    where,
)
from codetta.ir.split import ADJACENT, columns, halves
from codetta.rules.pipeline import ALL
from laws import expect_same, graph_of

RULES = {r.name: r for r in ALL}
X, Y, NARROW = input_("x", tile(12)), input_("y", tile(12)), input_("xb", tile(12, bf16))
R, S, C = input_("r", colvec()), input_("rs", colvec()), input_("s", scalar())
G, B, NARROW_G = input_("g", rowvec(12)), input_("b", rowvec(12)), input_("gb", rowvec(12, bf16))
T, V, INDEX = input_("t", table(6)), input_("v", groupvec(2)), input_("i", colvec(i32))
W, U = input_("w", tile(12, rows=18)), input_("u", tile(18, rows=12))
NARROW_W, HALF_W = input_("wb", tile(12, bf16, rows=18)), input_("wh", tile(12, f16, rows=18))
Z, Q = input_("z8", tile(8)), input_("z16", tile(16))
HIT = apply(ops.GT, X, 0.0)
GEMM = matmul(X, input_("k", tile(12, rows=12)))


def rounded(x: Node) -> Node:
    return cast(x, bf16)


def a_table(inside: int) -> Node:
    return input_(f"t{inside}", table(inside))


def both_ways(a: Node, b: Node) -> list[Node]:
    return [mul(a, b), mul(b, a)]


def centred(x: Node, mean: Node) -> Node:
    return sum_row(mul(sub(x, mean), sub(x, mean)))


COMMON_FACTOR = [
    apply(op, one, other)
    for op, (r, s) in product((ops.ADD, ops.SUB), ((R, R), (R, neg(R)), (neg(R), R)))
    for one, other in product(both_ways(X, r), both_ways(Y, s))
]

FIRES: dict[str, list[Node]] = {
    "add_zero": [add(0.0, X), sub(X, 0.0)],
    "mul_one": [mul(1.0, X), div(X, 1.0)],
    "neg_neg": [neg(neg(NARROW))],
    "add_neg": [add(neg(Y), X), add(X, neg(R))],
    "sign_outermost": [mul(Y, neg(X)), mul(G, neg(X)), mul(neg(R), X), mul(X, neg(R))],
    "fold_numbers": [mul(2.0, 3.0), mul(mul(R, 2.0), 3.0)],
    "number_into_vector": [mul(m, 3.0) for m in (*both_ways(R, X), *both_ways(G, X))],
    "double": [add(G, G)],
    "double_behind": [add(add(G, X), X)],
    "expand_in_map": [add(X, expand(R, X.type)), where(HIT, X, expand(R, X.type)), mul(expand(C, X.type), X)],
    "expand_after_map": [add(expand(R, X.type), expand(S, X.type)), mul(2.0, expand(G, X.type))],
    "round_before_arithmetic": [
        *(add(X, rounded(Y)), add(rounded(X), rounded(Y)), where(HIT, X, rounded(Y)), mul(cast(NARROW, f32), X)),
        *(sum_row(rounded(X)), reduce(cast(NARROW, f32), "sum", Kind.ROWVEC)),
    ],
    "cast_of_cast": [cast(rounded(X), f16), cast(cast(NARROW, f32), bf16)],
    "cast_after_columns": [part(rounded(neg(X)), halves(2), 0), turn(rounded(neg(G)))],
    "cast_after_join": [join(halves(), rounded(neg(X)), 0.0), join(halves(), 0.0, rounded(neg(X)))],
    "row_factor_leaves_sum": [sum_row(mul(R, X)), sum_row(mul(X, C)), sum_row(mul(C, X))],
    "column_factor_leaves_sum": [sum_col(m) for m in (*both_ways(G, X), *both_ways(C, X))],
    "sign_leaves_sum": [sum_col(neg(X)), reduce(neg(X), "sum", Kind.GROUPVEC, 3), reduce(neg(R), "sum", Kind.SCALAR)],
    "common_row_factor": COMMON_FACTOR,
    "part_of_join": [
        *(part(join(halves(), X, Y), halves(), 1), part(join(halves(), X, 0.0), halves(), 1)),
        *(part(join(halves(), X, G), halves(), 1), part(join(halves(), X, NARROW), halves(), 1)),
    ],
    "join_of_parts": [join(how, *(part(X, how, i) for i in range(3))) for how in (columns(3, 4, 5), columns(4, 4, 4))],
    "row_shift_leaves_matmul": [
        *(matmul(sub(X, R), W), matmul(mul(G, sub(X, R)), W), matmul(sub(X, R), U, "nn")),
        *(matmul(mul(sub(X, R), G), U, "nn"), matmul(rounded(mul(sub(NARROW, R), G)), NARROW_W)),
    ],
    "column_shift_leaves_matmul": [
        *(matmul(add(B, mul(X, R)), W), matmul(add(mul(R, X), B), U, "nn")),
        matmul(rounded(add(mul(NARROW, R), B)), NARROW_W),
    ],
    "variance_in_one_pass": [centred(GEMM, div(sum_row(GEMM), 12)), centred(GEMM, mul(sum_row(GEMM), 1 / 12))],
    "gain_into_frozen_weight": [matmul(mul(G, X), W), matmul(mul(X, G), U, "nn"), matmul(rounded(mul(X, G)), NARROW_W)],
    "join_outermost": [
        *(neg(join(halves(), X, Y)), mul(2.0, join(ADJACENT, X, Y)), add(join(halves(), X, Y), join(halves(), Y, X))),
        *(add(join(halves(), X, Y), input_("r", colvec())), mul(join(halves(), T, T), input_("t2", table(12)))),
        # tables as wide as groups, wider, and so narrow that they repeat inside every part
        *(mul(join(halves(2), X, Y), a_table(n)) for n in (12, 24, 6, 3)),
        *(mul(a_table(4), join(columns(4, 8, groups=2), Z, Q)), mul(join(ADJACENT, X, Y), a_table(6))),
    ],
    "sum_of_join": [
        *(sum_row(join(columns(12, 4), X, input_("z", tile(4)))), sum_row(join(halves(), X, 0.0))),
        sum_row(join(columns(12, 12, 12), X, 0.0, Y)),
    ],
    "lane_of_table_product": [
        part(mul(V, T), halves(2), 0),  # a group is the same in both of its lanes
        *(part(mul(T, X), halves(2), 0), part(add(T, mul(Y, T)), halves(2), 1), part(sub(X, T), halves(2), 1)),
    ],
    "row_scale_outermost": [
        *(m for other in (G, T, V, C, S) for m in both_ways(mul(X, R), other)),
        *(mul(mul(R, X), G), mul(mul(X, R), 2.0)),
    ],
    "row_scale_leaves_sign": [neg(mul(R, X))],
    "row_scale_leaves_join": [join(halves(), mul(R, X), 0.0), join(halves(), mul(X, R), mul(R, Y))],
    "row_scale_leaves_matmul": [
        *(matmul(mul(R, X), W), matmul(mul(X, R), U, "nn"), matmul(rounded(mul(NARROW, R)), NARROW_W)),
    ],
}

STAYS: dict[str, list[Node]] = {
    "add_zero": [add(X, 1.0), sub(0.0, X), add(NARROW, 0.0), mul(X, 0.0)],
    "mul_one": [mul(X, 0.0), div(1.0, X), add(X, 1.0), mul(NARROW, 1.0)],
    "neg_neg": [neg(X), neg(apply(ops.ABS, X)), apply(ops.ABS, neg(X))],
    "add_neg": [sub(X, neg(Y)), add(X, Y)],
    "sign_outermost": [mul(neg(X), R), mul(R, neg(X)), mul(X, Y), add(neg(X), Y)],
    "number_last": [mul(X, 2.0), mul(2.0, 3.0), add(2.0, X)],
    "fold_numbers": [mul(mul(X, Y), 2.0), mul(2.0, X), mul(add(X, 2.0), 2.0), add(mul(X, 2.0), 2.0)],
    "number_into_vector": [mul(mul(X, Y), 2.0), mul(mul(X, R), Y), mul(mul(R, R), 2.0), mul(mul(R, G), 2.0)],
    "double": [add(INDEX, INDEX), sub(X, X), add(X, Y)],
    "double_behind": [add(add(X, Y), X), add(add(INDEX, INDEX), INDEX), add(sub(Y, X), X), sub(add(Y, X), X)],
    "recip_sqrt": [apply(ops.RECIP, R), apply(ops.SQRT, apply(ops.RECIP, R))],
    "divide_by_row": [div(X, G), div(G, T), div(X, Y), div(R, S), mul(X, R)],
    "expand_in_map": [expand(expand(C, R.type), X.type), add(expand(R, X.type), S), sum_row(expand(R, X.type))],
    "expand_after_map": [
        *(expand(expand(C, R.type), X.type), add(X, R), neg(X), add(expand(R, X.type), expand(G, X.type))),
        sum_row(expand(R, X.type)),
    ],
    "round_before_arithmetic": [
        *(apply(op, rounded(X), Y) for op in (ops.EQ, ops.NE, ops.LT, ops.LE, ops.GT, ops.GE)),
        *(apply(ops.ABS, rounded(X)), node(ops.LSE, rounded(X)), cast(rounded(X), f32), expand(rounded(R), X.type)),
        *(neg(cast(cast(X, i32), f32)), add(cast(X, i32), INDEX), reduce(rounded(X), "max", Kind.COLVEC)),
    ],
    "cast_of_cast": [cast(cast(X, i32), f32), cast(cast(INDEX, f32), bf16), cast(rounded(X), i32), rounded(neg(X))],
    "cast_after_columns": [part(rounded(X), halves(), 0), part(X, halves(), 0), sum_row(rounded(neg(X)))],
    "cast_before_rows": [rounded(node(ops.TAKE_ROWS, W, attrs=(2, 5))), rounded(neg(X))],
    "cast_after_join": [
        *(join(halves(), rounded(X), rounded(neg(Y))), join(halves(), rounded(neg(X)), NARROW)),
        *(join(halves(), cast(neg(X), i32), cast(neg(Y), i32)), join(halves(), rounded(cast(X, i32)), 0.0)),
        sum_row(rounded(neg(X))),
    ],
    "row_factor_leaves_sum": [sum_row(mul(X, G)), sum_row(add(X, R)), reduce(mul(X, R), "max", Kind.COLVEC)],
    "column_factor_leaves_sum": [sum_col(mul(X, R)), sum_col(add(X, G)), reduce(mul(X, G), "max", Kind.ROWVEC)],
    "sign_leaves_sum": [reduce(neg(X), "max", Kind.COLVEC), sum_row(X), neg(neg(X))],
    "row_factor_leaves_where": [
        *(where(HIT, G, 0.0), where(HIT, Y, 0.0), where(HIT, R, 1.0), where(HIT, 0.0, R)),
        where(apply(ops.GT, S, 0.0), R, 0.0),
    ],
    "common_row_factor": [
        *(add(mul(X, R), mul(Y, S)), add(mul(X, G), mul(Y, G)), add(mul(X, R), Y), add(X, mul(Y, R))),
        *(mul(mul(X, R), mul(Y, R)), add(mul(X, neg(R)), mul(Y, neg(S))), add(mul(R, S), mul(R, S))),
    ],
    "part_of_join": [part(join(halves(), X, Y), halves(2), 0), part(X, halves(), 0), part(neg(X), halves(), 1)],
    "join_of_parts": [
        *(join(halves(), part(X, halves(), 1), part(X, halves(), 0)), join(halves(), part(X, halves(), 0), 0.0)),
        *(join(halves(), part(X, halves(), 0), part(Y, halves(), 1)), join(halves(), X, Y)),
        *(join(ADJACENT, part(X, halves(), 0), part(X, halves(), 1)), neg(part(X, halves(), 0))),
        *(join(halves(), one, part(X, halves(), 1)) for one in (0.0, input_("x6", tile(6)))),
    ],
    "row_shift_leaves_matmul": [
        *(matmul(sub(X, Y), W), matmul(sub(X, G), W), matmul(mul(sub(X, R), S), W), matmul(add(X, R), W)),
        *(matmul(cast(sub(X, R), f16), HALF_W), matmul(sub(X, R), Y, "tn"), matmul(sub(R, X), W), neg(sub(X, R))),
    ],
    "column_shift_leaves_matmul": [
        *(matmul(add(X, B), W), matmul(add(mul(X, R), Y), W), matmul(add(mul(X, R), B), Y, "tn")),
        *(matmul(cast(add(mul(X, R), B), f16), HALF_W), neg(add(mul(X, R), B)), matmul(sub(mul(X, R), B), W)),
    ],
    "variance_in_one_pass": [
        *(centred(X, mul(sum_row(X), 1 / 12)), centred(GEMM, mul(sum_row(GEMM), 1 / 11)), centred(GEMM, R)),
        *(centred(GEMM, mul(sum_row(X), 1 / 12)), centred(GEMM, div(sum_row(GEMM), 11)), sum_row(mul(GEMM, GEMM))),
        *(sum_row(mul(sub(GEMM, R), sub(GEMM, S))), sum_row(GEMM), sum_col(mul(sub(GEMM, R), sub(GEMM, R)))),
    ],
    "gain_into_frozen_weight": [
        *(matmul(mul(X, R), W), matmul(mul(X, Y), W), matmul(mul(X, G), mul(W, 2.0)), matmul(mul(X, neg(G)), W)),
        *(matmul(mul(X, G), Y, "tn"), matmul(add(X, G), W), matmul(cast(mul(X, G), f16), HALF_W)),
    ],
    "join_outermost": [
        *(mul(join(halves(), X, Y), R), mul(join(halves(), X, Y), V), sum_row(join(halves(), X, Y)), mul(X, Y)),
        *(cast(join(halves(), X, Y), bf16), neg(join(halves(), G, B)), mul(join(ADJACENT, X, Y), a_table(3))),
        *(mul(join(halves(2), X, Y), a_table(n)) for n in (4, 8)),
        mul(join(columns(4, 8, groups=2), Z, Q), a_table(8)),
    ],
    "sum_of_join": [sum_col(join(halves(), X, Y)), reduce(join(halves(), X, Y), "max", Kind.COLVEC), sum_row(X)],
    "lane_of_table_product": [
        part(mul(input_("v3", groupvec(3)), a_table(4)), halves(2), 0),
        *(part(mul(X, T), ADJACENT, 0), part(mul(X, Y), halves(2), 0), part(div(X, T), halves(2), 1)),
        *(part(mul(X, T), columns(4, 4, 4), 1), part(mul(X, T), columns(2, 4, groups=2), 1), neg(mul(X, T))),
    ],
    "row_scale_outermost": [mul(mul(X, R), Y), mul(X, R), mul(mul(X, G), T), add(mul(X, R), G), mul(X, 2.0)],
    "row_scale_leaves_sign": [neg(mul(X, G)), neg(X), apply(ops.ABS, mul(X, R))],
    "row_scale_leaves_join": [
        *(join(halves(), mul(X, R), mul(Y, S)), join(halves(), mul(X, R), Y), join(halves(), X, Y)),
        join(halves(), mul(X, G), mul(Y, G)),
    ],
    "row_scale_leaves_matmul": [
        *(matmul(mul(X, R), Y, "tn"), matmul(cast(mul(X, R), f16), HALF_W), matmul(mul(X, G), W)),
        *(matmul(X, mul(W, input_("rw", colvec(rows=18)))), neg(mul(X, R))),
    ],
}


def cases(table_of: dict[str, list[Node]]) -> list[object]:
    return [pytest.param(k, n, id=f"{k} {i}") for k, found in table_of.items() for i, n in enumerate(found)]


@pytest.mark.parametrize("name, before", cases(FIRES))
def test_a_branch_fires_and_keeps_value_and_gradients(name: str, before: Node):
    after = RULES[name].apply(before)
    assert after is not None
    assert after is not before
    expect_same(graph_of(before), graph_of(after))


@pytest.mark.parametrize("name, before", cases(STAYS))
def test_what_a_rule_excludes_stays(name: str, before: Node):
    assert RULES[name].apply(before) in (None, before)


def test_every_rule_is_here():
    assert set(STAYS) == set(RULES)
    assert set(FIRES) <= set(RULES)
