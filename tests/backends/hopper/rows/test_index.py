"""Columns as digits: every form gives the columns that plain indexing gives."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from codetta.backends.hopper.rows.index import Digits, digits, divided, identity, part_in_whole, whole_in_part
from codetta.ir.split import ADJACENT, Split, columns, halves

SPLITS = [(ADJACENT, 24), *((halves(g), 24) for g in (1, 2, 4)), (Split(1, 3), 24), (Split(2, 3), 24)]
SPLITS += [(columns(4, 8), 12), (columns(4, 8, groups=2), 24), (columns(2, 4, 6, groups=3), 36)]


def listed(d: Digits) -> Tensor:
    k = torch.arange(d.extent)
    return k // d.width * d.outer + k % d.width * d.inner + d.offset


def indices(split: Split, cols: int, part: int) -> Tensor:
    """The columns of a part, by cutting up the columns themselves."""
    every = torch.arange(cols)
    if split.adjacent:
        return every[part :: split.parts]
    grouped = every.reshape(split.groups, -1)
    return torch.split(grouped, split.sizes or grouped.shape[1] // split.parts, 1)[part].flatten()


@pytest.mark.parametrize("split, cols", SPLITS)
def test_a_part_in_its_whole(split: Split, cols: int):
    for part in range(split.parts):
        own = indices(split, cols, part)
        found = part_in_whole(identity(len(own)), split, cols, part)
        assert found is not None
        assert torch.equal(listed(found), own)
        assert found.last == own.max()
        assert whole_in_part(found, split, cols) == (part, identity(len(own)))


@pytest.mark.parametrize("split, cols", SPLITS)
def test_a_whole_lies_in_no_single_part(split: Split, cols: int):
    assert whole_in_part(identity(cols), split, cols) is None


@given(*(st.integers(0, 6) for _ in range(3)), st.integers(1, 24), st.integers(1, 24), st.integers(1, 12))
def test_quotient_and_remainder(outer: int, inner: int, offset: int, extent: int, width: int, by: int):
    d = digits(extent, width, outer, inner, offset)
    k = torch.arange(extent)
    assert torch.equal(listed(d), k // width * outer + k % width * inner + offset)
    found = divided(d, by)
    if found is not None:
        assert torch.equal(listed(found[0]), listed(d) // by)
        assert torch.equal(listed(found[1]), listed(d) % by)
