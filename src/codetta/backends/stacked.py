"""Tensors that lie one after another in memory, as the one tensor that they form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Statistics:
    """How often ``stacked`` found its answer in memory, and how often it had to copy."""

    views: int = 0
    copies: int = 0


STATISTICS = Statistics()


def are_adjacent(blocks: Sequence[Tensor]) -> bool:
    """Whether the blocks of rows (weights, or biases) follow one another in one piece of memory.

    Asked when they are used: nothing guards an address, and moving, casting or sharding a model changes it."""
    first = blocks[0]
    storage, end, strides, dtype = first.untyped_storage().data_ptr(), first.data_ptr(), first.stride(), first.dtype
    for b in blocks:
        # equal storages too: blocks that the allocator happened to put side by side are not one tensor
        if b.data_ptr() != end or b.untyped_storage().data_ptr() != storage or not b.is_contiguous():
            return False
        if b.dtype is not dtype or b.stride() != strides:  # equal strides, so as wide
            return False
        end += b.nbytes
    return True


def stacked(blocks: Sequence[Tensor]) -> Tensor:
    """The blocks of rows as one tensor: a view of their memory if they are adjacent, else a copy, which is counted.

    To be called where autograd does not look, as the ops of segments are."""
    first = blocks[0]
    if len(blocks) == 1:
        return first
    if not are_adjacent(blocks):
        STATISTICS.copies += 1
        return torch.cat(list(blocks))
    STATISTICS.views += 1
    rows = sum(map(len, blocks))
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
