"""Lanes: together they are every column once, and they leave no join to be decided element by element."""

import pytest
import torch

from codetta.backends.hopper.rows.cut import cut, loops
from codetta.core.node import Node
from codetta.core.types import tile
from codetta.ir import build, ops, split
from codetta.ir.split import Split

X = build.input_("x", tile(48))
SPLITS = [
    *(split.halves(g) for g in (1, 2, 4)),
    split.ADJACENT,
    Split(1, 3),
    split.columns(12, 36),
    split.columns(2, 4, groups=8),
]


def turned(x: Node, how: Split) -> Node:
    return build.join(how, *(build.neg(p) for p in build.parts(x, how)))


@pytest.mark.parametrize("outer", SPLITS)
@pytest.mark.parametrize("inner", SPLITS)
def test_every_column_once(outer: Split, inner: Split):
    first, *rest = build.parts(X, outer)
    try:
        first = turned(first, inner)
    except ops.ShapeError:
        pytest.skip("the inner split does not fit")
    found = [d for lanes in cut(build.mul(build.join(outer, first, *rest), 2.0)) for d in lanes]
    k = [torch.arange(d.extent) for d in found]
    columns = [j // d.width * d.outer + j % d.width * d.inner + d.offset for j, d in zip(k, found, strict=True)]
    assert torch.cat(columns).sort().values.equal(torch.arange(48))


def test_what_reads_the_same_columns_shares_a_loop():
    rotated, square = turned(X, split.halves(4)), build.mul(X, X)
    (loop,) = loops([(0, rotated), (1, square)])
    assert loop.extent == 24
    assert loop.works[0].lanes == loop.works[1].lanes
