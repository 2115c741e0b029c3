"""Reductions as an epilogue makes them: one part per tile, then folded. This is what "tile-faithful" means."""

from __future__ import annotations

import torch
from torch import Tensor

from codetta.backends.reference.evaluate import TORCH
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
    """The parts of a reduction of a Tile: (M, column tiles) for a ColVec, (row tiles, N) for a RowVec."""
    x = x.to(TORCH[n.type.dtype])
    if n.op is ops.LSE:
        return torch.logsumexp(in_tiles(x, 1, TILE_N, -torch.inf), 2)
    fn, to = n.attrs[0], n.attrs[1]
    if to not in (Kind.COLVEC, Kind.ROWVEC):
        raise PlanError(f"no partial form of {n}")
    dim, size = (1, TILE_N) if to is Kind.COLVEC else (0, TILE_M)
    if fn == "sum":
        if x.shape[dim] <= size:
            return x.sum(dim, keepdim=True)
        return in_tiles(x, dim, size, 0.0).sum(dim + 1)
    low = 0.0 if fn == "absmax" else -torch.inf
    return in_tiles(x.abs() if fn == "absmax" else x, dim, size, low).amax(dim + 1)


def fold(n: Node, parts: Tensor) -> Tensor:
    """The reduction from its parts, in a fixed order."""
    dim = 1 if n.type.kind is Kind.COLVEC else 0
    if n.op is ops.LSE:
        return torch.logsumexp(parts, 1)
    return parts.sum(dim) if n.attrs[0] == "sum" else parts.amax(dim)
