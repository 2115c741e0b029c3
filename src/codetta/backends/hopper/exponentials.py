"""A head's rows between its GEMMs, where forward holds exponentials of its logits, as Triton kernels.
``reference.exponentials`` says what they compute. Two of them are GEMMs over the rows that have overflowed; where there
are none in a tile of rows, as nearly always, they leave at once.

Kernels are bound to Triton's names as those of ``rows`` are, so nothing here is decorated; their types are Triton's own
and are not checked. Tensors on the CPU run in Triton's interpreter, which is for tests."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from codetta.backends.base import FAR, LEAST, MOST, Exponentials, HeadTensors
from codetta.backends.hopper import memory
from codetta.backends.hopper.rows.functions import carried, exp, exp_less, larger, log_of_sum
from codetta.backends.hopper.rows.source import bound_kernel
from codetta.backends.hopper.stream import on_device

add = tl.standard._sum_combine
TILE = {"ROWS": 64, "COLUMNS": 128, "BLOCK": 64}  # of logits, where rows are computed again, and features at once
PARTS = 16  # of the columns, where rows are computed again
SETTLED = 32  # rows a program
BLOCK = 1024  # features at once
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": True}


def near_target(  # noqa: PLR0913, PLR0917 - a kernel's arguments
    x: tl.tensor,
    weight: tl.tensor,
    index: tl.tensor,
    out: tl.tensor,
    features: tl.tensor,
    scale: tl.tensor,
    FAR: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row of ``reference``."""
    i = tl.program_id(0).to(tl.int64)
    at = tl.load(index + i).to(tl.int64)
    row = tl.maximum(at, 0) * features
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for first in range(0, features, BLOCK):
        k = first + tl.arange(0, BLOCK)
        inside = k < features
        a = tl.load(x + i * features + k, mask=inside, other=0.0).to(tl.float32)
        total += a * tl.load(weight + row + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + i, tl.where(at < 0, FAR, tl.reduce(total, 0, add) * scale))


def measure_rows(  # noqa: PLR0913, PLR0917 - a kernel's arguments
    lse: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    features: tl.tensor,
    scale: tl.tensor,
    MOST: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The log-sum-exp of one part of the columns, as a maximum and a sum, for some rows of which one has overflowed."""
    i, bad = _overflowed(lse, rows, MOST, ROWS)
    part = tl.program_id(1)
    if _any(bad):
        m = tl.full((ROWS,), -float("inf"), tl.float32)
        s = tl.full((ROWS,), 0.0, tl.float32)
        width = _width(columns, PARTS, COLUMNS)
        for first in range(part * width, tl.minimum(part * width + width, columns), COLUMNS):
            v = (first + tl.arange(0, COLUMNS)).to(tl.int64)
            z = _logits(x, weight, i, v, rows, columns, features, ROWS, COLUMNS, BLOCK) * scale
            z = tl.where((v < columns)[None, :], z, -float("inf"))
            new = larger(m, tl.reduce(z, 1, larger))
            s = s * carried(m, new) + tl.reduce(exp_less(z, new[:, None]), 1, add)
            m = new
        tl.store(largest + i * PARTS + part, m, mask=i < rows)
        tl.store(total + i * PARTS + part, s, mask=i < rows)


def rewrite_rows(  # noqa: PLR0913, PLR0917 - a kernel's arguments
    lse: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    held: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    features: tl.tensor,
    scale: tl.tensor,
    MOST: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Probabilities in the place of exponentials, in one part of the columns, for those of some rows that have
    overflowed."""
    i, bad = _overflowed(lse, rows, MOST, ROWS)
    part = tl.program_id(1)
    if _any(bad):
        whole = _joined(largest, total, i, bad, PARTS)
        width = _width(columns, PARTS, COLUMNS)
        for first in range(part * width, tl.minimum(part * width + width, columns), COLUMNS):
            v = (first + tl.arange(0, COLUMNS)).to(tl.int64)
            z = _logits(x, weight, i, v, rows, columns, features, ROWS, COLUMNS, BLOCK) * scale
            e = exp(z - whole[:, None]).to(held.dtype.element_ty)
            tl.store(held + i[:, None] * columns + v[None, :], e, mask=bad[:, None] & (v < columns)[None, :])


def _logits(  # noqa: PLR0913, PLR0917 - a kernel's arguments
    x: tl.tensor,
    weight: tl.tensor,
    i: tl.tensor,
    v: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    features: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """A tile of logits, before their factor."""
    z = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for first in range(0, features, BLOCK):
        k = first + tl.arange(0, BLOCK)
        inside = k < features
        a = tl.load(x + i[:, None] * features + k[None, :], mask=(i < rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(
            weight + v[None, :] * features + k[:, None], mask=(v < columns)[None, :] & inside[:, None], other=0.0
        )
        z = tl.dot(a, b, z)
    return z


def _overflowed(lse: tl.tensor, rows: tl.tensor, MOST: tl.constexpr, ROWS: tl.constexpr) -> Any:
    """A program's rows, and which of them have overflowed."""
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    return i, tl.load(lse + i, mask=i < rows, other=0.0) > MOST


def _any(bad: tl.tensor) -> tl.tensor:
    """Whether one of some rows has."""
    return tl.reduce(bad.to(tl.int32), 0, larger) > 0


def _width(columns: tl.tensor, PARTS: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    """The columns of a part, whole tiles."""
    return (columns + PARTS * COLUMNS - 1) // (PARTS * COLUMNS) * COLUMNS


def _joined(largest: tl.tensor, total: tl.tensor, i: tl.tensor, bad: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """The log-sum-exp of those rows from what was measured of their parts."""
    place = i[:, None] * PARTS + tl.arange(0, PARTS)[None, :]
    m = tl.load(largest + place, mask=bad[:, None], other=0.0)
    s = tl.load(total + place, mask=bad[:, None], other=1.0)
    top = tl.reduce(m, 1, larger)
    return log_of_sum(top, tl.reduce(s * carried(m, top[:, None]), 1, add))


def settle_rows(  # noqa: PLR0913, PLR0917 - a kernel's arguments
    lse: tl.tensor,
    target: tl.tensor,
    near: tl.tensor,
    index: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    lse_out: tl.tensor,
    target_out: tl.tensor,
    unit: tl.tensor,
    probability: tl.tensor,
    rows: tl.tensor,
    MOST: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """The numbers of some rows, those of rows that have overflowed from what was measured of them since."""
    i, bad = _overflowed(lse, rows, MOST, ROWS)
    inside = i < rows
    c = tl.load(near + i, mask=inside, other=0.0)
    s = tl.load(lse + i, mask=inside, other=0.0)
    t = tl.load(target + i, mask=inside, other=0.0)
    u = exp(-s)
    if _any(bad):
        s = tl.where(bad, _joined(largest, total, i, bad, PARTS) - c, s)
        u = tl.where(bad, 1.0, u)
    has = tl.load(index + i, mask=inside, other=-1) >= 0
    tl.store(lse_out + i, tl.where(has, s + c, 0.0), mask=inside)
    tl.store(target_out + i, tl.where(has, t + c, 0.0), mask=inside)
    tl.store(unit + i, tl.where(has, u, 0.0), mask=inside)
    tl.store(probability + i, tl.where(has, exp(t - s), 0.0), mask=inside)


def scale_row(  # noqa: PLR0913, PLR0917 - a kernel's arguments
    x: tl.tensor,
    held: tl.tensor,
    index: tl.tensor,
    unit: tl.tensor,
    probability: tl.tensor,
    d_lse: tl.tensor,
    d_target: tl.tensor,
    factor: tl.tensor,
    scaled: tl.tensor,
    columns: tl.tensor,
    features: tl.tensor,
    scale: tl.tensor,
    LEAST: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row of ``scale_rows``."""
    i = tl.program_id(0).to(tl.int64)
    at = tl.load(index + i).to(tl.int64)
    u = tl.load(unit + i)
    dl = tl.load(d_lse + i)
    dt = tl.load(d_target + i)
    least = dt * LEAST
    d = tl.where(tl.abs(dl) < tl.abs(least), least, dl) * u
    entry = tl.where(d == 0.0, 0.0, tl.fma(tl.load(probability + i), dl, dt) / d)
    tl.store(held + i * columns + at, entry.to(held.dtype.element_ty), mask=at >= 0)
    f = d * scale
    tl.store(factor + i, f)
    if SCALED:
        for first in range(0, features, BLOCK):
            k = first + tl.arange(0, BLOCK)
            a = tl.load(x + i * features + k, mask=k < features, other=0.0).to(tl.float32)
            tl.store(scaled + i * features + k, (a * f).to(scaled.dtype.element_ty), mask=k < features)


CALLED = (_logits, _overflowed, _any, _width, _joined)
KERNELS = {fn.__name__: fn for fn in (near_target, measure_rows, rewrite_rows, settle_rows, scale_row)}


def kernel(name: str, interpreted: bool) -> Any:
    """One of these kernels, for the GPU or for Triton's interpreter."""
    return bound_kernel(KERNELS[name], interpreted, CALLED)


def _launch(name: str, grid: tuple[int, ...], on: torch.device, *given: object, **sizes: object) -> None:
    if all(grid):
        kernel(name, on.type == "cpu")[grid](*given, **sizes, **OPTIONS)


def _numbers(x: Tensor, count: int, *more: int) -> list[Tensor]:
    """New numbers, one of each row, or a row of ``more``."""
    return [memory.empty((x.shape[0], *more), torch.float32, x.device) for _ in range(count)]


def reference(head: HeadTensors) -> Tensor:
    """``reference.exponentials.reference``."""
    x = head.x
    with on_device(x.device):
        (out,) = _numbers(x, 1)
        given = (x, head.weight, head.targets, out, x.shape[1], head.scale)
        _launch("near_target", x.shape[:1], x.device, *given, FAR=FAR, BLOCK=BLOCK)
    return out


def settle(
    head: HeadTensors, lse: Tensor, target: Tensor, near: Tensor, matrix: Tensor
) -> tuple[Tensor, Tensor, Exponentials]:
    """``reference.exponentials.settle``."""
    x, weight, index, scale = head
    rows = x.shape[0]
    tiles, sizes = (-(-rows // TILE["ROWS"]), PARTS), (rows, *weight.shape, scale)
    with on_device(x.device):
        largest, total = _numbers(x, 2, PARTS)
        parts = (lse, x, weight, largest, total)
        _launch("measure_rows", tiles, x.device, *parts, *sizes, MOST=MOST, PARTS=PARTS, **TILE)
        _launch("rewrite_rows", tiles, x.device, *parts, matrix, *sizes, MOST=MOST, PARTS=PARTS, **TILE)
        a, b, c, d = _numbers(x, 4)
        given = (lse, target, near, index, largest, total, a, b, c, d, rows)
        blocks = (-(-rows // SETTLED),)
        _launch("settle_rows", blocks, x.device, *given, MOST=MOST, PARTS=PARTS, ROWS=SETTLED)
    return a, b, Exponentials(matrix, c, d)


def scale_rows(head: HeadTensors, held: Exponentials, d_lse: Tensor, d_target: Tensor, into: Tensor | None) -> Tensor:
    """``reference.exponentials.scale_rows``."""
    x, weight, index, scale = head
    with on_device(x.device):
        (factor,) = _numbers(x, 1)
        given = (x, held.matrix, index, held.unit, held.probability, d_lse, d_target, factor)
        sizes = {"LEAST": LEAST, "SCALED": into is not None, "BLOCK": BLOCK}
        more = (x if into is None else into, *weight.shape, scale)
        _launch("scale_row", x.shape[:1], x.device, *given, *more, **sizes)
    return factor
