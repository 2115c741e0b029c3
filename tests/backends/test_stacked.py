"""Blocks of rows as one tensor: a view exactly where they are one piece of memory, else a copy that is counted."""

import pytest
import torch

from codetta.backends.stacked import STATISTICS, are_adjacent, stacked


def blocks(*rows: int, tail: tuple[int, ...] = (4,)) -> list[torch.Tensor]:
    """Adjacent blocks, not at the beginning of their memory."""
    buffer = torch.randn(sum(rows) + 2, *tail)[2:]
    return list(buffer.split(rows))


@pytest.mark.parametrize("tail", [(4,), (1,), ()])
@pytest.mark.parametrize("rows", [(3, 2, 5), (1, 1)])
def test_adjacent_blocks_are_a_view(rows, tail):
    given = blocks(*rows, tail=tail)
    before = STATISTICS.views, STATISTICS.copies
    found = stacked(given)
    assert found.data_ptr() == given[0].data_ptr()
    assert found.is_contiguous()
    assert torch.equal(found, torch.cat(given))
    assert (STATISTICS.views, STATISTICS.copies) == (before[0] + 1, before[1])


def two_storages_side_by_side() -> list[torch.Tensor]:
    """As an allocator may place them: the second begins where the first ends, and they are not one tensor."""
    memory = torch.randn(8, 4).untyped_storage()
    half = memory.nbytes() // 2
    return [torch.empty(0).set_(s, 0, (4, 4), (4, 1)) for s in (memory[:half], memory[half:])]


APART = {
    "copies": lambda: [b.clone() for b in blocks(3, 2)],
    "another order": lambda: blocks(3, 2)[::-1],
    "a gap": lambda: blocks(3, 1, 2)[::2],
    "an overlap": lambda: [b := blocks(3)[0], b],
    "transposed": lambda: [b.t() for b in blocks(4, 4)],
    "other row sizes": lambda: [(b := torch.randn(16))[:8].view(2, 4), b[8:].view(4, 2)],
    "two storages": two_storages_side_by_side,
}


@pytest.mark.parametrize("case", APART)
def test_other_blocks_are_copied(case):
    given = APART[case]()
    assert not are_adjacent(given)
    if case != "other row sizes":
        before = STATISTICS.copies
        found = stacked(given)
        assert torch.equal(found, torch.cat(given))
        assert not any(found.data_ptr() == b.data_ptr() for b in given)
        assert STATISTICS.copies == before + 1


def test_one_block_is_itself():
    (only,) = blocks(3)
    before = STATISTICS.copies
    assert stacked([only]) is only
    assert STATISTICS.copies == before
