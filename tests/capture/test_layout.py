"""A layout says where elements lie: whatever views are taken, the elements found there are the view's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codetta.backends.reference.evaluate import evaluate
from codetta.capture import layout, views
from codetta.capture.align import Value, align, check
from codetta.capture.layout import Atom, Dims, natural, reshape, sizes
from codetta.core.node import Node
from codetta.core.types import Kind, Type, colvec, groupvec, i64, rowvec, table, tile
from codetta.errors import UnsupportedError
from codetta.ir.build import input_


def lay(plane: Tensor, dims: Dims) -> Tensor:
    """The tensor whose elements lie in ``plane`` as ``dims`` says."""
    index = {"row": torch.zeros((), dtype=torch.int64), "column": torch.zeros((), dtype=torch.int64)}
    for d in dims:
        for axis in index:
            inner = torch.zeros(1, dtype=torch.int64)
            for a in d:
                step = int(a.stride) if a.axis == axis else 0
                inner = (inner[:, None] + torch.arange(int(a.size)) * step).flatten()
            index[axis] = index[axis][..., None] + inner
    return plane[index["row"], index["column"]]


@dataclass
class Walk:
    """A tensor, and what we know of where its elements lie."""

    tensor: Tensor
    value: Value
    plane: dict[Node, Tensor]

    def holds(self) -> None:
        check(self.value, tuple(self.tensor.shape))
        (found,) = evaluate([self.value.node], self.plane)
        assert torch.equal(lay(found, self.value.dims), self.tensor)

    def step(self, dims: Callable[[], Dims], tensor: Tensor) -> Walk:
        try:
            return Walk(tensor, Value(self.value.node, dims()), self.plane)
        except UnsupportedError:
            return self


def start(shape: tuple[int, ...]) -> Walk:
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    node = input_("x", tile(shape[-1], i64))
    return Walk(tensor, Value(node, natural(shape)), {node: tensor.reshape(-1, shape[-1])})


SHAPES = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3)


@st.composite
def reshapes(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with two neighbours merged, a dimension cut in two, or one of size 1 more."""
    found = list(shape)
    at = draw(st.integers(0, max(0, len(found) - 1)))
    match draw(st.sampled_from(["merge", "cut", "insert"])):
        case "merge" if at + 1 < len(found):
            found[at : at + 2] = [found[at] * found[at + 1]]
        case "cut" if found:
            first = draw(st.sampled_from([d for d in range(1, found[at] + 1) if found[at] % d == 0]))
            found[at : at + 1] = [first, found[at] // first]
        case _:
            found.insert(at, 1)
    return tuple(found)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_chain_of_views_finds_its_elements(data: st.DataObject) -> None:
    lead, cols = data.draw(SHAPES), data.draw(st.sampled_from([4, 8, 12, 24]))
    walk = start((*lead, cols))
    walk.holds()
    for _ in range(data.draw(st.integers(1, 6))):
        walk = data.draw(st.sampled_from([reshaped, transposed, part, doubled, stacked]))(data, walk)
        walk.holds()


def reshaped(data: st.DataObject, walk: Walk) -> Walk:
    shape = data.draw(reshapes(tuple(walk.tensor.shape)))
    return walk.step(lambda: reshape(walk.value.dims, shape), walk.tensor.reshape(shape))


def transposed(data: st.DataObject, walk: Walk) -> Walk:
    order = data.draw(st.permutations(range(walk.tensor.dim())))
    return walk.step(lambda: layout.permute(walk.value.dims, order), walk.tensor.permute(order))


def part(data: st.DataObject, walk: Walk) -> Walk:
    """One of the ranges into which some dimension is cut."""
    at = data.draw(st.integers(0, walk.tensor.dim() - 1))
    size = walk.tensor.shape[at]
    edges = sorted({0, size} | data.draw(st.sets(st.integers(1, max(1, size - 1)), max_size=3)))
    blocks = [b - a for a, b in pairwise(edges)] if size > 1 else [1]
    index = data.draw(st.integers(0, len(blocks) - 1))
    try:
        value = views.parts_of(walk.value, at, blocks)[index]
    except UnsupportedError:
        return walk
    return Walk(walk.tensor.split(blocks, at)[index], value, walk.plane)


def doubled(data: st.DataObject, walk: Walk) -> Walk:
    """Two parts of a dimension, exchanged and put together again."""
    at = data.draw(st.integers(0, walk.tensor.dim() - 1))
    size = walk.tensor.shape[at]
    if size % 2 or walk.tensor.numel() > 1000:
        return walk
    try:
        a, b = views.parts_of(walk.value, at, [size // 2] * 2)
        value = views.concatenated([b, a, b], at)
    except UnsupportedError:
        return walk
    first, second = walk.tensor.split(size // 2, at)
    return Walk(torch.cat([second, first, second], at), value, walk.plane)


def stacked(data: st.DataObject, walk: Walk) -> Walk:
    at = data.draw(st.integers(0, walk.tensor.dim()))
    if walk.tensor.numel() > 1000:
        return walk
    try:
        value = views.stacked([walk.value, walk.value], at)
    except UnsupportedError:
        return walk
    return Walk(torch.stack([walk.tensor, walk.tensor], at), value, walk.plane)


def test_heads_of_a_projection_lie_where_they_should() -> None:
    walk = start((2, 3, 8))
    dims = layout.permute(reshape(walk.value.dims, (2, 3, 4, 2)), [0, 2, 1, 3])
    row, column = ((lambda n, s, axis=axis: (Atom(axis, n, s),)) for axis in ("row", "column"))
    assert dims == (row(2, 3), column(4, 2), row(3, 1), column(2, 1))
    assert sizes(dims) == (2, 4, 3, 2)


@pytest.mark.parametrize("shape", [(3, 8), (4, 6), (2, 2, 2, 2, 3)], ids=lambda s: "x".join(map(str, s)))
def test_a_view_that_mixes_rows_and_columns_is_not_understood(shape: tuple[int, ...]) -> None:
    if math.prod(shape) != 24:
        with pytest.raises(UnsupportedError):
            reshape(natural((4, 6)), shape)
    elif shape == (4, 6):
        assert reshape(natural((4, 6)), shape) == natural((4, 6))
    else:
        with pytest.raises(UnsupportedError):
            reshape(natural((4, 6)), shape)


def test_one_row_and_one_column_do_not_get_lost() -> None:
    for shape in [(1, 1, 8), (2, 3, 1), (1, 1)]:
        walk = start(shape)
        walk.holds()
        flat = (math.prod(shape[:-1]), shape[-1])
        walk.step(lambda flat=flat, walk=walk: reshape(walk.value.dims, flat), walk.tensor.reshape(flat)).holds()


def test_no_rows_at_all() -> None:
    dims = natural((2, 0, 8))
    assert sizes(reshape(dims, (0, 8))) == (0, 8)
    assert sizes(reshape(dims, (2, 0, 2, 4))) == (2, 0, 2, 4)


# --- how operands meet ------------------------------------------------------------------------------------------------


def value(type_: Type, dims: Any) -> Value:
    return Value(input_("v", type_), dims)


HEADS = layout.permute(reshape(natural((2, 3, 8)), (2, 3, 4, 2)), [0, 2, 1, 3])  # (B, H, S, E)


@pytest.mark.parametrize(
    "shape, kind, cols",
    [
        ((2, 4, 3, 2), Kind.TILE, 8),
        ((2, 1, 3, 2), Kind.TABLE, 2),  # cosines of each token
        ((1, 1, 3, 2), Kind.TABLE, 2),  # of one sequence, repeated over the batch
        ((3, 2), Kind.TABLE, 2),
        ((2, 4, 3, 1), Kind.GROUPVEC, 4),
        ((2, 1, 3, 1), Kind.COLVEC, None),
        ((2,), Kind.ROWVEC, 8),  # one gain for all heads, repeated
        ((4, 1, 1), Kind.ROWVEC, 8),
        ((4, 1, 2), Kind.ROWVEC, 8),
        ((1,), Kind.SCALAR, None),
        ((), Kind.SCALAR, None),
    ],
    ids=str,
)
def test_the_kind_of_a_newcomer(shape: tuple[int, ...], kind: Kind, cols: int | None) -> None:
    found = align([value(tile(8), HEADS)], [shape])
    assert found.dims == HEADS
    assert (found.newcomers[0].kind, found.newcomers[0].cols) == (kind, cols)


def test_a_newcomer_brings_what_is_missing() -> None:
    gain = value(rowvec(8), ((Atom("column", 8, 1),),))
    assert align([gain], [(2, 3, 8)]).dims == natural((2, 3, 8))
    rstd = value(colvec(), (*natural((2, 3, 8))[:-1], ()))
    assert align([rstd], [(2, 3, 8)]).dims == natural((2, 3, 8))
    assert align([], [(3, 8), (2, 3, 8)]).dims == natural((2, 3, 8))


def test_a_value_per_head_and_a_table_make_a_tile() -> None:
    per_head = value(groupvec(4), ((Atom("row", 2, 3),), (Atom("column", 4, 1),), (Atom("row", 3, 1),), ()))
    cosines = value(table(2), ((Atom("row", 2, 3),), (), (Atom("row", 3, 1),), (Atom("column", 2, 1),)))
    assert align([per_head, cosines], []).dims == HEADS


@pytest.mark.parametrize("shape", [(2, 3, 4, 2), (5, 2, 4, 3, 2), (2, 4, 3, 5)], ids=str)
def test_what_does_not_fit_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedError):
        align([value(tile(8), HEADS)], [shape])
