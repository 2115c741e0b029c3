"""Nodes: equality is identity, and walks that do not care how much is shared."""

import gc
import time

import pytest

from codetta.core import node as core
from codetta.core.node import Node, node, postorder, substitute, users
from codetta.core.types import bf16, f32, rowvec, tile
from codetta.errors import ShapeError, SourceLine
from codetta.ir import ops
from codetta.ir.build import add, cast, const, input_, mul, neg

X, Y = input_("x", tile(4)), input_("y", tile(4))


def doubled(steps: int) -> Node:
    """x = x + x, many times: 2 ** steps paths."""
    x = X
    for _ in range(steps):
        x = add(x, x)
    return x


def test_the_same_computation_is_the_same_object():
    assert add(X, Y) is add(X, Y)
    assert add(X, Y) is not add(Y, X)
    assert input_("x", tile(4)) is X
    assert input_("x", tile(4, bf16)) is not X
    assert cast(X, bf16) is not cast(X, f32)
    assert cast(X, f32) is X


@pytest.mark.parametrize(
    "a, b",
    [(1, 1.0), (1, True), (1.0, True), (0, False), (0.0, -0.0), (0, 0.0), (0, -0.0), (2, 2.0)],
)
def test_numbers_that_python_calls_equal_are_different_constants(a, b):
    assert a == b
    assert const(a) is not const(b)
    for value in (a, b):
        (found,) = const(value).attrs
        assert (type(found), repr(found)) == (type(value), repr(value))
    assert (const(a).type == const(b).type) == (type(a) is type(b))


def test_not_a_number_is_one_constant():
    assert const(float("nan")) is const(float("nan"))


def test_a_shared_dag_is_walked_node_by_node():
    deep = doubled(5_000)
    start = time.perf_counter()
    hash(deep)
    assert deep == doubled(5_000)
    assert len(postorder([deep])) == 5_001
    assert len(users([deep])) == 5_001
    (again,) = substitute([deep], {X: Y})
    assert len(postorder([again])) == 5_001
    assert time.perf_counter() - start < 2.0  # with hashes of whole subtrees it would not end


def test_arguments_come_first_and_once():
    z = mul(add(X, Y), neg(add(X, Y)))
    order = postorder([z, X])
    assert order == [X, Y, add(X, Y), neg(add(X, Y)), z]


def test_a_walk_stops_where_it_is_told_to():
    z = neg(add(X, Y))
    assert postorder([z], stop=lambda n: n is add(X, Y)) == [add(X, Y), z]
    assert postorder([z], stop=lambda n: n is z) == [z]


def test_users_are_named_once_each():
    square, both = mul(X, X), add(mul(X, X), X)
    found = users([both])
    assert found == {X: [square, both], square: [both], both: []}


def test_substitution_rebuilds_what_depends_on_the_mapped_nodes_and_nothing_else():
    untouched = neg(Y)
    z, other = substitute([add(neg(X), untouched), untouched], {X: Y})
    assert z is add(neg(Y), neg(Y))
    assert other is untouched
    # the mapped node is not looked into, nor is what stands for it
    assert substitute([neg(X)], {neg(X): X, X: Y}) == [X]


def test_an_ill_typed_node_cannot_exist():
    wrong = input_("g", rowvec(5))
    with pytest.raises(ShapeError, match=r"Tile\[M, 4, f32\] and RowVec\[5, f32\]"):
        node(ops.ADD, X, wrong)


def test_nodes_cannot_be_changed_and_are_forgotten_when_nobody_holds_them():
    with pytest.raises(AttributeError):
        X.op = ops.ADD  # type: ignore[misc]
    gc.collect()
    before = len(core._POOL)
    kept = doubled(50)
    assert len(core._POOL) == before + 50
    del kept
    gc.collect()
    assert len(core._POOL) == before


def test_a_node_remembers_the_line_that_made_it_first():
    where = SourceLine("model.py", 3, "y = f(x)")
    made = node(ops.NEG, input_("fresh", tile(4)), where=where)
    assert node(ops.NEG, input_("fresh", tile(4)), where=SourceLine("other.py", 1)) is made
    assert made.where is where
    (rebuilt,) = substitute([made], {input_("fresh", tile(4)): input_("fresh too", tile(4))})
    assert rebuilt.where is where
