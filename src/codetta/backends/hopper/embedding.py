"""The gradient of an embedding, added to one that its weight already has, as a Triton kernel.

Ids are sorted, and one program adds up a block of features of all rows of one id, in order: the same bits every time,
no atomics, and only the rows that occur are read and written. Kernels are bound to Triton's names as those of ``rows``
are; tensors on the CPU run in Triton's interpreter, which is for tests."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from codetta.backends.hopper.rows.source import bound_kernel
from codetta.backends.hopper.stream import on_device

ROWS, BLOCK = 4, 1024  # rows at a time, and features a program
OPTIONS: dict[str, Any] = {"num_warps": 4}


def add_run(  # noqa: PLR0913, PLR0917 - a kernel's arguments
    into: tl.tensor,
    ids: tl.tensor,
    order: tl.tensor,
    rows: tl.tensor,
    count: tl.tensor,
    features: tl.tensor,
    padding: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """All rows of the id that begins here in the sorted ``ids``, a block of their features."""
    i = tl.program_id(0)
    at = tl.load(ids + i)
    if (at != padding) & (at != tl.load(ids + i - 1, mask=i > 0, other=-1)):
        k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = k < features
        out = into + at.to(tl.int64) * features + k
        before = tl.load(out, mask=inside, other=0.0).to(tl.float32)
        total = tl.full((BLOCK,), 0.0, tl.float32)
        first = i
        more = at >= 0
        while more:
            for j in tl.static_range(ROWS):
                n = first + j
                same = tl.load(ids + n, mask=n < count, other=-1) == at
                place = tl.load(order + n, mask=same, other=0) * features
                total += tl.load(rows + place + k, mask=k < tl.where(same, features, 0), other=0.0).to(tl.float32)
            first += ROWS
            more = tl.load(ids + first, mask=first < count, other=-1) == at
        tl.store(out, (before + total).to(into.dtype.element_ty), mask=inside)


def add_rows(into: Tensor, ids: Tensor, rows: Tensor, padding: int) -> None:
    """``reference.embedding.add_rows``."""
    count, features = rows.shape
    if count and features:
        with on_device(into.device):
            found, order = torch.sort(ids.to(torch.int32), stable=True)
            grid = count, -(-features // BLOCK)
            run = bound_kernel(add_run, into.device.type == "cpu")
            run[grid](into, found, order, rows, count, features, padding, ROWS=ROWS, BLOCK=BLOCK, **OPTIONS)
