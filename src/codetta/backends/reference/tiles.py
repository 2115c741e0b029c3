"""Reductions as an epilogue makes them: one part per tile, then folded. This is what "tile-faithful" means."""

from __future__ import annotations

import torch
from torch import Tensor

from codetta.backends.reference.evaluate import TORCH, in_groups
from codetta.core.node import Node
from codetta.core.types import Kind
from codetta.errors import PlanError
from codetta.ir import ops
from codetta.partition.size import TILE_M, TILE_N


def in_tiles(x: Tensor, dim: int, size: int, fill: float) -> Tensor:
    """``x`` with dimension ``dim`` cut into tiles of ``size``, the last one filled up with ``fill``."""
    extent = x.shape[dim]
    count = max(-(-extent // size), 1)
    missing = count * size - extent
    if missing:
        shape = list(x.shape)
        shape[dim] = missing
        x = torch.cat([x, x.new_full(shape, fill)], dim)
    return x.reshape(*x.shape[:dim], count, size, *x.shape[dim + 1 :])


def partials(n: Node, x: Tensor) -> Tensor:
    """The parts of a reduction of a Tile: (M, column tiles) for a ColVec, (row tiles, N) for a RowVec, (M, blocks of
    whole groups times inside) for a Table, (row tiles, column tiles) for a Scalar."""
    x = x.to(TORCH[n.type.dtype])
    if n.op is ops.LSE:
        return torch.logsumexp(in_tiles(x, 1, TILE_N, -torch.inf), 2)
    fn, to, groups = n.attrs
    if to is Kind.COLVEC:
        return _parts(str(fn), x, 1, TILE_N)
    if to is Kind.ROWVEC:
        return _parts(str(fn), x, 0, TILE_M)
    if to is Kind.SCALAR:
        return _parts(str(fn), _parts(str(fn), x, 1, TILE_N), 0, TILE_M)
    if to is not Kind.TABLE or not isinstance(groups, int):
        raise PlanError(f"no partial form of {n}")
    grouped = in_groups(x, groups)
    return _parts(str(fn), grouped, 1, max(TILE_N // max(grouped.shape[2], 1), 1)).flatten(1)


def _parts(fn: str, x: Tensor, dim: int, size: int) -> Tensor:
    if fn == "sum":
        one, dtype = x.shape[dim] <= size, x.dtype
        return x.sum(dim, True, dtype=dtype) if one else in_tiles(x, dim, size, 0.0).sum(dim + 1, dtype=dtype)
    low = 0.0 if fn == "absmax" else -torch.inf
    return in_tiles(x.abs() if fn == "absmax" else x, dim, size, low).amax(dim + 1)


def fold(n: Node, parts: Tensor) -> Tensor:
    """The reduction from its parts, in a fixed order."""
    if n.op is ops.LSE:
        return torch.logsumexp(parts, 1)
    if n.type.kind is Kind.TABLE and isinstance(n.type.cols, int):
        parts = in_groups(parts, parts.shape[1] // n.type.cols)
    dim = {Kind.ROWVEC: (0,), Kind.SCALAR: (0, 1)}.get(n.type.kind, (1,))
    return parts.sum(dim, dtype=parts.dtype) if n.attrs[0] == "sum" else parts.amax(dim)
