"""A head's rows between its GEMMs, where forward holds exponentials of its logits: three Triton kernels, a row a
program. ``reference.exponentials`` says what they compute.

Kernels are bound to Triton's names as those of ``rows`` are, so nothing here is decorated; their types are Triton's own
and are not checked. Tensors on the CPU run in Triton's interpreter, which is for tests."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from codetta.backends.base import FAR, LEAST, MOST, Exponentials, HeadTensors
from codetta.backends.hopper import memory
from codetta.backends.hopper.rows.functions import exp, larger
from codetta.backends.hopper.rows.source import bound_kernel
from codetta.backends.hopper.stream import on_device

add = tl.standard._sum_combine
COLUMNS = 64  # of the vocabulary, at once, where a row is computed again
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


def settle_row(  # noqa: PLR0913, PLR0917 - a kernel's arguments
    lse: tl.tensor,
    target: tl.tensor,
    near: tl.tensor,
    index: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    held: tl.tensor,
    lse_out: tl.tensor,
    target_out: tl.tensor,
    unit: tl.tensor,
    probability: tl.tensor,
    columns: tl.tensor,
    features: tl.tensor,
    scale: tl.tensor,
    MOST: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row of ``settle``."""
    i = tl.program_id(0).to(tl.int64)
    at = tl.load(index + i)
    c = tl.load(near + i)
    s = tl.load(lse + i)
    t = tl.load(target + i)
    u = exp(-s)
    if s > MOST:  # computed again, twice: first for its log-sum-exp
        largest = tl.full(s.shape, -float("inf"), tl.float32)
        total = tl.full(s.shape, 0.0, tl.float32)
        for first in range(0, columns, COLUMNS):
            z, inside = _logits(x + i * features, weight, first, columns, features, scale, COLUMNS, BLOCK)
            z = tl.where(inside, z, -float("inf"))
            m = tl.maximum(largest, tl.reduce(z, 0, larger))
            total = total * exp(largest - m) + tl.reduce(exp(z - m), 0, add)
            largest = m
        whole = largest + tl.log(total)
        for first in range(0, columns, COLUMNS):
            z, inside = _logits(x + i * features, weight, first, columns, features, scale, COLUMNS, BLOCK)
            v = (first + tl.arange(0, COLUMNS)).to(tl.int64)
            tl.store(held + i * columns + v, exp(z - whole).to(held.dtype.element_ty), mask=inside)
        s = whole - c
        u = tl.full(u.shape, 1.0, tl.float32)
    has = at >= 0
    tl.store(lse_out + i, tl.where(has, s + c, 0.0))
    tl.store(target_out + i, tl.where(has, t + c, 0.0))
    tl.store(unit + i, tl.where(has, u, 0.0))
    tl.store(probability + i, tl.where(has, exp(t - s), 0.0))


def _logits(  # noqa: PLR0913, PLR0917 - a kernel's arguments
    x: tl.tensor,
    weight: tl.tensor,
    first: tl.tensor,
    columns: tl.tensor,
    features: tl.tensor,
    scale: tl.tensor,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Any:
    """Some logits of a row, and which of them there are."""
    v = (first + tl.arange(0, COLUMNS)).to(tl.int64)
    z = tl.full((COLUMNS,), 0.0, tl.float32)
    for start in range(0, features, BLOCK):
        k = start + tl.arange(0, BLOCK)
        a = tl.load(x + k, mask=k < features, other=0.0).to(tl.float32)
        both = (v < columns)[:, None] & (k < features)[None, :]
        w = tl.load(weight + v[:, None] * features + k[None, :], mask=both, other=0.0).to(tl.float32)
        z += tl.reduce(w * a[None, :], 1, add)
    return z * scale, v < columns


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
    """One row of ``scale``."""
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


@cache
def _kernel(name: str, interpreted: bool) -> Any:
    kernels = {"near_target": near_target, "settle_row": settle_row, "scale_row": scale_row}
    return bound_kernel(kernels[name], interpreted, (_logits,))


def _launch(name: str, x: Tensor, *given: object, **sizes: object) -> None:
    if x.shape[0]:
        _kernel(name, x.device.type == "cpu")[(x.shape[0],)](*given, **sizes, **OPTIONS)


def _numbers(x: Tensor, count: int) -> list[Tensor]:
    """New numbers, one of each row."""
    return [memory.empty((x.shape[0],), torch.float32, x.device) for _ in range(count)]


def reference(head: HeadTensors) -> Tensor:
    """``reference.exponentials.reference``."""
    x = head.x
    with on_device(x.device):
        (out,) = _numbers(x, 1)
        _launch("near_target", x, x, head.weight, head.targets, out, x.shape[1], head.scale, FAR=FAR, BLOCK=BLOCK)
    return out


def settle(
    head: HeadTensors, lse: Tensor, target: Tensor, near: Tensor, matrix: Tensor
) -> tuple[Tensor, Tensor, Exponentials]:
    """``reference.exponentials.settle``."""
    x, weight, index, scale = head
    with on_device(x.device):
        a, b, c, d = _numbers(x, 4)
        given = (lse, target, near, index, x, weight, matrix, a, b, c, d, *weight.shape, scale)
        _launch("settle_row", x, *given, MOST=MOST, COLUMNS=COLUMNS, BLOCK=COLUMNS)
    return a, b, Exponentials(matrix, c, d)


def scale_rows(head: HeadTensors, held: Exponentials, d_lse: Tensor, d_target: Tensor, into: Tensor | None) -> Tensor:
    """``reference.exponentials.scale_rows``."""
    x, weight, index, scale = head
    with on_device(x.device):
        (factor,) = _numbers(x, 1)
        given = (x, held.matrix, index, held.unit, held.probability, d_lse, d_target, factor)
        sizes = {"LEAST": LEAST, "SCALED": into is not None, "BLOCK": BLOCK}
        _launch("scale_row", x, *given, x if into is None else into, *weight.shape, scale, **sizes)
    return factor
