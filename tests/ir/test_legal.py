"""The block-local rule: what an epilogue, a leftover and a finalize may compute."""

import pytest

from codetta.core.node import Node
from codetta.core.types import Kind, bf16, colvec, groupvec, i32, rowvec, table, tile
from codetta.errors import BlockLocalError, PlanError, ShapeError
from codetta.ir import build, ops, split
from codetta.ir.build import (
    add,
    input_,
    join,
    logsumexp_row,
    matmul,
    mul,
    part,
    parts,
    reduce,
    select_column,
    sum_col,
    sum_row,
)
from codetta.ir.legal import why_not
from codetta.ir.program import Gemm, Program, Role

ACC = input_("acc", tile(64))
X = input_("x", tile(64))
HALF = input_("half", tile(32))
R = input_("r", colvec())
G = input_("g", rowvec(64))
I = input_("i", colvec(i32))  # noqa: E741

HALVES, HEADS, RANGES = split.halves(), split.halves(4), split.columns(32, 16, 16)
LEFT, RIGHT = parts(ACC, HALVES)
Q, K, V = parts(ACC, RANGES)


def reason(role: Role, *outputs: Node) -> str | None:
    found = why_not(role, outputs, ACC if role == "epilogue" else None)
    return found and found.reason


@pytest.mark.parametrize(
    "value",
    [
        ACC,
        add(mul(ACC, R), mul(X, G)),
        sum_row(mul(ACC, ACC)),
        sum_col(ACC),
        logsumexp_row(ACC),
        select_column(ACC, I),
        reduce(ACC, "absmax", Kind.GROUPVEC, 4),
        reduce(ACC, "sum", Kind.TABLE, 4),
        reduce(ACC, "max", Kind.SCALAR),
        mul(ACC, reduce(ACC, "sum", Kind.GROUPVEC, 4)),  # the inside of a group lies in one tile
        mul(LEFT, RIGHT),  # a pair
        mul(mul(LEFT, RIGHT), HALF),  # a load lies wherever it is needed
        mul(part(ACC, HEADS, 0), part(ACC, HEADS, 1)),
        mul(part(ACC, split.ADJACENT, 0), part(ACC, split.ADJACENT, 1)),
        add(ACC, join(HEADS, part(ACC, HEADS, 1), part(ACC, HEADS, 0))),
        join(HALVES, HALF, mul(HALF, 2.0)),
        mul(Q, 2.0),
        join(RANGES, mul(Q, 2.0), K, 0.0),
        add(ACC, join(RANGES, Q, K, mul(V, 0.5))),
        mul(LEFT, part(X, RANGES, 0)),
        mul(part(Q, HALVES, 0), part(Q, HALVES, 1)),  # a pair inside a range
    ],
    ids=repr,
)
def test_epilogues(value: Node):
    assert reason("epilogue", value) is None


@pytest.mark.parametrize(
    "value, why",
    [
        (mul(ACC, sum_row(ACC)), "crosses tiles"),
        (add(R, sum_row(ACC)), "crosses tiles"),
        (mul(ACC, sum_col(ACC)), "crosses tiles"),
        (mul(ACC, reduce(ACC, "absmax", Kind.SCALAR)), "crosses tiles"),
        (mul(ACC, reduce(ACC, "sum", Kind.TABLE, 4)), "crosses tiles"),
        (build.sub(logsumexp_row(ACC), select_column(ACC, I)), "crosses tiles"),
        (reduce(sum_row(ACC), "sum", Kind.SCALAR), "reduces a vector"),
        (reduce(G, "sum", Kind.SCALAR), "reduces a vector"),
        (mul(Q, join(split.halves(), K, V)), "different tiles: range 1"),
        (mul(K, V), "different tiles: range 1"),
        (mul(LEFT, part(ACC, HEADS, 0)), "different tiles: a lane"),
        (join(RANGES, Q, V, K), "part 1 of a join comes from range 2"),
        (matmul(ACC, X), "no further GEMM"),
    ],
)
def test_what_an_epilogue_cannot_do(value: Node, why: str):
    assert why in (reason("epilogue", value) or "")


def test_the_reason_tells_values_in_the_callers_words():
    found = why_not("epilogue", [mul(ACC, sum_row(ACC))], ACC, lambda n: f"({n.op})")
    assert found is not None
    assert found.reason.startswith("(mul) needs (reduce), which crosses tiles")
    assert "finalize" in found.hint
    assert found.node is mul(ACC, sum_row(ACC))


def test_a_leftover_has_whole_rows_but_not_all_of_them():
    assert reason("leftover", mul(X, sum_row(X))) is None
    assert reason("leftover", build.sub(logsumexp_row(X), select_column(X, I))) is None
    assert reason("leftover", mul(part(X, RANGES, 1), part(X, RANGES, 2))) is None
    assert reason("leftover", sum_col(X)) is None
    assert "crosses rows" in (reason("leftover", mul(X, sum_col(X))) or "")


def test_a_finalize_works_on_vectors():
    assert reason("finalize", build.apply(ops.RSQRT, add(mul(R, 1 / 64), 1e-6))) is None
    assert reason("finalize", reduce(R, "sum", Kind.SCALAR)) is None
    assert reason("finalize", mul(input_("s", groupvec(4)), R)) is None
    assert "works on vectors" in (reason("finalize", mul(X, R)) or "")


def test_a_program_that_breaks_the_rule_cannot_be_built():
    with pytest.raises(BlockLocalError, match=r"bad: .*crosses tiles"):
        Program("bad", "epilogue", (ACC,), (("y", mul(ACC, sum_row(ACC))),))


@pytest.mark.parametrize(
    "role, params, outputs, gemm, problem",
    [
        ("epilogue", (), (("y", ACC),), None, "first parameter is `acc`"),
        ("epilogue", (X, ACC), (("y", ACC),), None, "first parameter is `acc`"),
        ("epilogue", (ACC, X, input_("x", rowvec(64))), (("y", ACC),), None, "different names"),
        ("epilogue", (ACC, mul(X, X)), (("y", ACC),), None, "parameters are inputs"),
        ("epilogue", (ACC,), (), None, "at least one"),
        ("epilogue", (ACC,), (("y", ACC), ("y", ACC)), None, "different names"),
        ("epilogue", (ACC,), (("y", mul(ACC, X)),), None, r"the body reads \['x'\]"),
        ("leftover", (X,), (("y", X),), Gemm("nt", 64, bf16), "a leftover has no GEMM"),
    ],
)
def test_a_malformed_program_cannot_be_built(role, params, outputs, gemm, problem):
    with pytest.raises(PlanError, match=problem):
        Program("p", role, params, outputs, gemm)


@pytest.mark.parametrize("groups, n, sizes, adjacent", [(1, 2, (8, 8), False), (1, 2, (8,), False), (4, 2, None, True)])
def test_a_split_has_one_spelling(groups, n, sizes, adjacent):
    with pytest.raises(ShapeError):
        split.Split(groups, n, sizes, adjacent)


def test_tables_load_at_any_lane():
    c = input_("c", table(8))
    left, right = parts(ACC, HEADS)
    assert reason("epilogue", join(HEADS, mul(left, c), mul(right, c))) is None
