"""The op table: what each op takes and gives, what it refuses and how, and that no other table has a hole."""

import pytest

from codetta.autodiff.vjp import VJP
from codetta.backends.reference.evaluate import EVAL
from codetta.core.node import Node, node
from codetta.core.types import (
    Kind,
    Sym,
    Type,
    bf16,
    boolean,
    colvec,
    f16,
    f32,
    f64,
    groupvec,
    i32,
    i64,
    over,
    rowvec,
    scalar,
    table,
    tile,
)
from codetta.errors import CodettaError, ShapeError, TypeMismatch
from codetta.ir import build, ops
from codetta.ir.build import apply, const, expand, input_, join, matmul, part, reduce, stack, take_rows, turn
from codetta.ir.split import ADJACENT, Split, columns, halves
from codetta.lang.functions import FORMS

EVERY_OP = list(ops.OPS.values())


def of(type_: Type) -> Node:
    return input_("x", type_)


# --- no holes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", EVERY_OP, ids=repr)
def test_every_op_is_known_to_every_stage(op):
    assert op in VJP
    assert op in EVAL or op.family == "leaf"
    # an input is a parameter of the function, a GEMM an argument of its decorator
    assert op in FORMS or op in (ops.INPUT, ops.MATMUL)


def test_no_table_knows_more_than_there_is():
    known = set(EVERY_OP)
    for made in (VJP, EVAL, FORMS):
        assert set(made) <= known
    assert [op.name for op in EVERY_OP] == list(ops.OPS)
    assert {op.family for op in EVERY_OP} == {"leaf", "map", "columns", "rows", "turn", "reduce", "contraction"}


# --- what they give -------------------------------------------------------------------------------------------------

X, B = tile(12), tile(12, bf16)
FLOATS = ["exp", "log", "tanh", "erf", "sqrt", "rsqrt", "recip", "sin", "cos", "sigmoid", "silu", "gelu", "gelu_tanh"]


@pytest.mark.parametrize("name", [*FLOATS, "neg", "abs"])
@pytest.mark.parametrize("given, got", [(bf16, f32), (f16, f32), (f32, f32), (f64, f64)])
def test_maps_are_computed_wide(name, given, got):
    assert apply(ops.OPS[name], of(tile(12, given))).type == tile(12, got)


@pytest.mark.parametrize("name", FLOATS)
def test_functions_of_integers_are_floats(name):
    assert apply(ops.OPS[name], of(colvec(i64))).type == colvec(f32)


@pytest.mark.parametrize(
    "made, expected",
    [
        (build.add(of(B), of(rowvec(12, bf16))), tile(12)),
        (build.add(of(B), 1.0), tile(12)),
        (build.add(of(tile(12, f64)), 1.0), tile(12, f64)),
        (build.add(of(colvec(i32)), 1), colvec(i32)),
        (build.add(of(colvec(i32)), of(colvec(i64))), colvec(i64)),
        (build.div(of(colvec(i32)), 2), colvec(f32)),
        (apply(ops.FLOORDIV, of(colvec(i64)), 2), colvec(i64)),
        (apply(ops.MOD, of(colvec(i32)), 2), colvec(i32)),
        (apply(ops.EQ, of(B), of(colvec())), tile(12, boolean)),
        (apply(ops.AND, of(tile(12, boolean)), True), tile(12, boolean)),
        (apply(ops.NOT, of(scalar(boolean))), scalar(boolean)),
        (build.where(of(tile(12, boolean)), of(rowvec(12, bf16)), 0.0), tile(12)),
        (build.where(of(colvec(boolean)), of(B), of(B)), tile(12)),
        (build.where(of(colvec(boolean)), of(colvec(boolean)), False), colvec(boolean)),
        (build.cast(of(X), bf16), B),
        (expand(of(colvec(bf16)), X), B),
        (expand(of(groupvec(3)), tile(12)), X),
        (expand(1.0, rowvec(7)), rowvec(7)),
        (apply(ops.RANDOM, 3, of(colvec(i32)), build.column(12)), tile(12)),
        (build.row(Sym("M")), colvec(i32)),
        (build.column(12), rowvec(12, i32)),
        (part(of(B), halves(3), 1), tile(6, bf16)),
        (part(of(table(8)), halves(), 0), table(4)),
        (part(of(rowvec(12)), columns(3, 4, 5), 1), rowvec(4)),
        (part(of(tile(Sym("N"))), halves(), 0), tile(over(Sym("N"), 2))),
        (part(of(X), ADJACENT, 1), tile(6)),
        (join(halves(2), of(B), of(B)), tile(24, bf16)),
        (join(halves(2), of(B), of(X)), tile(24)),
        (join(columns(12, 4), of(X), 0.0), tile(16)),
        (join(columns(12, 4), of(X), of(rowvec(4))), tile(16)),
        (join(halves(), of(table(6)), 0.0), table(12)),
        (join(halves(), of(rowvec(6)), of(table(6))), table(12)),
        (join(halves(), of(table(6)), of(rowvec(6))), table(12)),
        (turn(of(rowvec(5, bf16))), colvec(bf16, rows=5)),
        (turn(of(colvec(rows=5))), rowvec(5)),
        (stack(of(tile(12, bf16, rows=3)), of(tile(12, bf16, rows=4))), tile(12, bf16, rows=7)),
        (node(ops.STACK, const(0.0), of(tile(12, rows=4)), attrs=(3, 4)), tile(12, rows=7)),
        (take_rows(of(tile(12, bf16, rows=7)), 2, 5), tile(12, bf16, rows=3)),
        (reduce(of(B), "sum", Kind.COLVEC), colvec(f32)),
        (reduce(of(B), "max", Kind.COLVEC), colvec(bf16)),
        (reduce(of(X), "absmax", Kind.ROWVEC), rowvec(12)),
        (reduce(of(X), "sum", Kind.GROUPVEC, 3), groupvec(3)),
        (reduce(of(X), "sum", Kind.TABLE, 3), table(4)),
        (reduce(of(X), "sum", Kind.SCALAR), scalar()),
        (reduce(of(rowvec(12)), "sum", Kind.SCALAR), scalar()),
        (reduce(of(groupvec(3, bf16)), "sum", Kind.COLVEC), colvec()),
        (reduce(of(tile(12, rows=5)), "sum", Kind.COLVEC), colvec(rows=5)),
        (build.logsumexp_row(of(B)), colvec()),
        (build.select_column(of(B), of(colvec(i64))), colvec()),
        (matmul(of(B), of(tile(12, bf16, rows=5))), tile(5)),
        (matmul(of(tile(12, f64)), of(tile(5, f64, rows=12)), "nn"), tile(5, f64)),
        (matmul(of(tile(4, f16)), of(tile(12, f16)), "tn"), tile(12, rows=4)),
    ],
    ids=lambda v: repr(v) if isinstance(v, Node) else "",
)
def test_what_an_op_gives(made: Node, expected: Type):
    assert made.type == expected


def test_constants_are_weakly_typed():
    assert [const(v).type.dtype for v in (1, 1.0, True)] == [i32, f32, boolean]
    # a number takes the other operand's dtype, it does not widen or narrow it
    assert build.mul(of(tile(12, f64)), 2.0).type.dtype is f64
    assert build.mul(of(colvec(i64)), 2).type.dtype is i64


# --- what they refuse -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: matmul(of(tile(8)), of(tile(6, rows=5))), ShapeError, r"\[M, 8, f32\].*\[5, 6, f32\] \(8 != 6\)"),
        (lambda: matmul(of(tile(8)), of(tile(6, rows=5)), "nn"), ShapeError, r"nn: inner sizes differ.*\(8 != 5\)"),
        (lambda: matmul(of(tile(8)), of(tile(6, rows=5)), "tn"), ShapeError, r"tn: inner sizes differ.*\(M != 5\)"),
        (lambda: matmul(of(tile(8, bf16)), of(tile(8, rows=5))), TypeMismatch, r"one float dtype: .*bf16.*f32"),
        (lambda: matmul(of(tile(8, i32)), of(tile(8, i32, rows=5))), TypeMismatch, "one float dtype"),
        (lambda: matmul(of(tile(8)), of(rowvec(8))), TypeMismatch, r"matmul nt: Tile.* with RowVec\[8, f32\]"),
        (lambda: matmul(of(tile(8)), of(tile(8)), "tt"), TypeMismatch, "matmul tt"),
        (lambda: build.add(of(tile(8)), of(tile(6))), ShapeError, r"Tile\[M, 8, f32\] and Tile\[M, 6, f32\]"),
        (lambda: build.add(of(tile(8, boolean)), 1.0), TypeMismatch, r"arithmetic on a boolean.*use where\("),
        (lambda: apply(ops.AND, of(colvec(i32)), True), TypeMismatch, "a logical op needs booleans, got .*i32"),
        (lambda: apply(ops.MOD, of(colvec()), 2), TypeMismatch, "an integer op needs integers, got .*f32"),
        (lambda: apply(ops.FLOORDIV, of(colvec(boolean)), 2), TypeMismatch, "an integer op needs integers"),
        (lambda: build.where(of(X), 1.0, 0.0), TypeMismatch, r"the condition is Tile\[M, 12, f32\], not a boolean"),
        (lambda: build.where(of(colvec(boolean)), 1.0, True), TypeMismatch, "arithmetic on a boolean"),
        (lambda: build.where(of(colvec(boolean)), True, 1.0), TypeMismatch, "arithmetic on a boolean"),
        (lambda: expand(of(tile(8)), tile(6)), CodettaError, r"Tile\[M, 8, f32\]"),
        (lambda: expand(of(X), rowvec(12)), TypeMismatch, r"Tile\[M, 12, f32\] does not expand to RowVec\[12, f32\]"),
        (lambda: part(of(colvec()), halves(), 0), TypeMismatch, r"has parts of columns, not ColVec\[M, f32\]"),
        (lambda: part(of(X), halves(4), 0), ShapeError, "group width 3 does not divide into 2"),
        (lambda: part(of(X), halves(5), 0), ShapeError, "column count 12 does not divide into 5"),
        (lambda: part(of(X), halves(), 2), ShapeError, "part 2 of 2"),
        (lambda: part(of(X), columns(4, 5), 0), ShapeError, r"\(4, 5\) columns do not add up to the 12"),
        (lambda: join(halves(), of(X), of(tile(8))), ShapeError, r"different column counts: \(12, 8\)"),
        (lambda: join(halves(), of(X)), ShapeError, "1 parts given for a split in 2"),
        (lambda: join(columns(8, 4), of(tile(4)), of(X)), ShapeError, "a part has 4 columns, the split says 1 x 8"),
        (lambda: join(halves(), 0.0, 1.0), TypeMismatch, "no plain number"),
        (lambda: join(halves(), of(X), of(colvec())), TypeMismatch, "parts of different kinds"),
        (lambda: join(halves(), of(X), of(tile(12, rows=5))), ShapeError, "different rows"),
        (lambda: stack(of(tile(8, rows=2)), of(tile(6, rows=2))), ShapeError, "stack: the parts need equal columns"),
        (lambda: node(ops.STACK, of(tile(8, rows=2)), attrs=(3,)), ShapeError, "a part has 2 rows, not 3"),
        (lambda: node(ops.STACK, of(tile(8)), attrs=(Sym("M"),)), ShapeError, "known row counts"),
        (lambda: take_rows(of(tile(8, rows=4)), 2, 5), ShapeError, r"rows 2:5 of Tile\[4, 8, f32\]"),
        (lambda: take_rows(of(tile(8, rows=4)), 2, 2), ShapeError, "rows 2:2"),
        (lambda: take_rows(of(tile(8)), 0, 2), ShapeError, r"rows 0:2 of Tile\[M, 8, f32\]"),
        (lambda: turn(of(X)), TypeMismatch, r"turn takes a RowVec or a ColVec, not Tile\[M, 12, f32\]"),
        (lambda: reduce(of(X), "mean", Kind.COLVEC), TypeMismatch, "mean"),
        (lambda: reduce(of(rowvec(12)), "sum", Kind.COLVEC), TypeMismatch, r"RowVec\[12, f32\] cannot be reduced"),
        (lambda: reduce(of(X), "sum", Kind.TILE), TypeMismatch, "cannot be reduced to a Tile"),
        (lambda: reduce(of(X), "sum", Kind.GROUPVEC), TypeMismatch, "groups=None"),
        (lambda: reduce(of(X), "sum", Kind.GROUPVEC, 5), ShapeError, "column count 12 does not divide into 5"),
        (lambda: node(ops.REDUCE, of(X), attrs=("sum", Kind.COLVEC, 3)), TypeMismatch, "groups=3"),
        (lambda: build.logsumexp_row(of(colvec())), TypeMismatch, r"needs a Tile, got ColVec\[M, f32\]"),
        (
            lambda: build.select_column(of(X), of(colvec())),
            TypeMismatch,
            r"the indices are ColVec\[M, f32\], not an int",
        ),
        (lambda: build.select_column(of(X), of(rowvec(12, i32))), TypeMismatch, "not an integer ColVec"),
        (lambda: build.column(2.5), ShapeError, "not a size: 2.5"),  # type: ignore[arg-type]
        (lambda: build.row(True), ShapeError, "not a size: True"),
        (lambda: node(ops.INPUT, attrs=("x", 4)), TypeMismatch, "an input needs a name and a Type"),
        (lambda: node(ops.CAST, of(X), attrs=("bf16",)), TypeMismatch, "'bf16' is no dtype"),
        (lambda: node(ops.PART, of(X), attrs=(2, 0)), TypeMismatch, "a part needs a Split"),
    ],
)
def test_what_an_op_refuses_and_how(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    "one, other",
    [(columns(4, 4), Split(1, 2)), (columns(4, 4, groups=3), halves(3)), (halves(), Split(1, 2))],
)
def test_a_split_has_one_spelling(one, other):
    assert one == other
