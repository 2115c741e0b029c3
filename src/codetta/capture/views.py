"""ATen's views, slices and concatenations: the same node lying differently, or parts of its columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from codetta.capture.align import Value
from codetta.capture.layout import (
    ColumnDim,
    chain,
    column_dim,
    move,
    permute,
    product,
    reshape,
    resized,
    shape_of,
)
from codetta.capture.scope import Meaning, OpaqueArgument, Pair, Scope
from codetta.capture.sources import SAME_ORDER, fake
from codetta.errors import UnsupportedError
from codetta.ir import ops
from codetta.ir.build import apply, join, mul, part
from codetta.ir.split import ADJACENT, Split, columns

aten = torch.ops.aten
Rule = Callable[..., Meaning]


# --- the same elements in another shape or order ----------------------------------------------------------------------


def _reshape(s: Scope, x: Any, *_: Any) -> Value:
    """Any operator that keeps the elements and their order: the graph says the new shape."""
    v = s.value(x)
    if product(s.shape) != product(shape_of(fake(x))):
        raise UnsupportedError("a repetition along a dimension")
    return Value(v.node, reshape(v.dims, s.shape))


def _transpose(s: Scope, x: Any, a: int = 0, b: int = 1) -> Value:
    v = s.value(x)
    return Value(v.node, permute(v.dims, move(len(v.dims), a, b)) if v.dims else v.dims)


def _permute(s: Scope, x: Any, order: Sequence[int]) -> Value:
    v = s.value(x)
    return Value(v.node, permute(v.dims, order))


def _movedim(s: Scope, x: Any, source: int, to: int) -> Value:
    v = s.value(x)
    order = list(range(len(v.dims)))
    order.insert(to % len(order), order.pop(source % len(order)))
    return Value(v.node, permute(v.dims, order))


def _identity(s: Scope, x: Any, *_: Any) -> Value:
    return s.value(x)


def _dropout(s: Scope, x: Any, p: float, train: bool) -> Value:
    if train and p > 0:
        raise UnsupportedError("dropout draws random numbers of PyTorch's generator")
    return s.value(x)


# --- parts of columns -------------------------------------------------------------------------------------------------


def _cols(v: Value) -> int:
    if not isinstance(v.node.type.cols, int):
        raise UnsupportedError(f"{v.node} has no columns")
    return v.node.type.cols


def _split_of(c: ColumnDim, blocks: Sequence[int]) -> Split:
    """The split of all columns that cuts dimension ``c`` into runs of these many blocks."""
    if c.block == 1 and c.size == len(blocks) == 2:
        return ADJACENT
    return columns(*(n * c.block for n in blocks), groups=c.groups)


def parts_of(v: Value, at: int, blocks: Sequence[int]) -> list[Value]:
    """Dimension ``at`` cut into runs of these sizes, which add up to its own."""
    if len(blocks) == 1:
        return [v]
    c = column_dim(v.dims, at, _cols(v))
    split = _split_of(c, blocks)
    return [Value(part(v.node, split, i), resized(v.dims, at, c, n)) for i, n in enumerate(blocks)]


def _split(s: Scope, x: Any, *_: Any, dim: int) -> tuple[Value, ...]:
    """split, chunk: the graph says the sizes."""
    v = s.value(x)
    at = dim % len(v.dims)
    found = [shape_of(t)[at] for t in s.node.meta["val"]]
    blocks = [n for n in found if isinstance(n, int)]
    if len(blocks) != len(found) or 0 in blocks:
        raise UnsupportedError(f"parts of {found} columns")
    return tuple(parts_of(v, at, blocks))


def _slice(s: Scope, x: Any, dim: int, start: int | None, end: int | None, step: int) -> Value:
    v = s.value(x)
    at, size = dim % len(v.dims), shape_of(fake(x))[dim]
    if not isinstance(size, int) or step != 1:
        raise UnsupportedError("a slice of a dimension of unknown size, or with a step")
    begin, stop = _bounds(start, end, size)
    cuts = {0, size, begin, stop} | _sibling_cuts(x, dim % len(v.dims), size, begin, stop)
    edges = sorted(cuts)
    if begin >= stop or edges.index(stop) != edges.index(begin) + 1:
        raise UnsupportedError(f"the slice {begin}:{stop} overlaps another slice of {x}")
    blocks = [b - a for a, b in pairwise(edges)]
    return parts_of(v, at, blocks)[edges.index(begin)]


def _bounds(start: Any, end: Any, size: int) -> tuple[int, int]:
    if not all(b is None or isinstance(b, int) for b in (start, end)):
        raise UnsupportedError("a slice with bounds that are not fixed numbers")
    begin, stop, _ = slice(start, end).indices(size)
    return begin, stop


def _sibling_cuts(x: fx.Node, at: int, size: int, begin: int, stop: int) -> set[int]:
    """Where other slices cut the same dimension, so that q, k and v become parts of one split."""
    cuts: set[int] = set()
    for user in x.users:
        if user.target is aten.slice.Tensor and user.args[0] is x:
            given: tuple[Any, ...] = (*user.args[1:4], *(0, None, None)[len(user.args) - 1 :])
            if given[0] % fake(x).dim() == at:
                other = _bounds(given[1], given[2], size)
                if other[1] <= begin or other[0] >= stop:
                    cuts |= set(other)
    return cuts


def _select(s: Scope, x: Any, dim: int, index: int) -> Value:
    v = s.value(x)
    return _unbound(v, dim % len(v.dims))[index]


def _unbind(s: Scope, x: Any, dim: int) -> tuple[Value, ...]:
    v = s.value(x)
    return tuple(_unbound(v, dim % len(v.dims)))


def _unbound(v: Value, at: int) -> list[Value]:
    """Each element of a dimension of columns, without that dimension."""
    if not v.dims[at]:
        return [Value(v.node, v.dims[:at] + v.dims[at + 1 :])]
    size = column_dim(v.dims, at, _cols(v)).size
    if size > 8:
        raise UnsupportedError(f"{size} parts of one column block each")
    found = parts_of(v, at, [1] * size)
    if any(d.dims[at] for d in found):
        raise UnsupportedError("a part with a single column")
    return [Value(d.node, d.dims[:at] + d.dims[at + 1 :]) for d in found]


def _glu(s: Scope, x: Any, dim: int) -> Value:
    v = s.value(x)
    at, size = dim % len(v.dims), shape_of(fake(x))[dim]
    if not isinstance(size, int):
        raise UnsupportedError("a gated unit of unknown width")
    a, b = parts_of(v, at, [size // 2] * 2)
    return s.combine(lambda p, q: mul(p, apply(ops.SIGMOID, q)), a, b)


# --- columns put together ---------------------------------------------------------------------------------------------


def _cat(s: Scope, tensors: Sequence[Any], dim: int) -> Value:
    values = [s.value(t) for t in tensors]
    return concatenated(values, dim % len(values[0].dims))


def _stack(s: Scope, tensors: Sequence[Any], dim: int) -> Value:
    values = [s.value(t) for t in tensors]
    return stacked(values, dim % (len(values[0].dims) + 1))


def stacked(values: Sequence[Value], at: int) -> Value:
    """Values laid along a new dimension of columns."""
    return concatenated([Value(v.node, (*v.dims[:at], (), *v.dims[at:])) for v in values], at)


def concatenated(values: Sequence[Value], at: int) -> Value:
    """Values laid along a dimension of columns; one that does not exist yet gets its place outside the later ones."""
    if len(values) == 1:
        return values[0]
    if any(v.dims[at] for v in values):
        return _joined(values, at, [column_dim(v.dims, at, _cols(v)) for v in values])
    block = product(a.size for a in chain(values[0].dims[at + 1 :], "column"))
    if not isinstance(block, int) or block == 0:
        raise UnsupportedError("columns of unknown number put together")
    return _joined(values, at, [ColumnDim(_cols(v) // block, 1, block) for v in values])


def _joined(values: Sequence[Value], at: int, places: Sequence[ColumnDim]) -> Value:
    total = sum(c.size for c in places)
    if len({(c.groups, c.block) for c in places}) != 1:
        raise UnsupportedError("parts whose columns are grouped differently")
    dims = {resized(v.dims, at, c, total) for v, c in zip(values, places, strict=True)}
    if len(dims) != 1:
        raise UnsupportedError("parts whose dimensions lie differently")
    whole = ColumnDim(places[0].groups, total, places[0].block)
    return Value(join(_split_of(whole, [c.size for c in places]), *(v.node for v in values)), dims.pop())


# --- complex numbers --------------------------------------------------------------------------------------------------


def _as_complex(s: Scope, x: Any) -> Pair:
    """The last dimension, of size 2, as real and imaginary part."""
    v = s.value(x)
    return Pair(*_unbound(v, len(v.dims) - 1))


def _as_real(s: Scope, x: Any) -> Value:
    real, imag = s.complex_lanes(x)
    if not (isinstance(real, Value) and isinstance(imag, Value)):
        raise OpaqueArgument(x)
    return stacked([real, imag], len(real.dims))


COPIES = (
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
)

VIEWS: dict[Any, Rule] = {
    **dict.fromkeys(SAME_ORDER, _reshape),
    **dict.fromkeys(COPIES, _identity),
    aten.dropout.default: _dropout,
    aten.transpose.int: _transpose,
    aten.swapaxes.default: _transpose,
    aten.swapdims.default: _transpose,
    aten.t.default: _transpose,
    aten.permute.default: _permute,
    aten.movedim.int: _movedim,
    aten.split.Tensor: lambda s, x, size, dim: _split(s, x, dim=dim),
    aten.split.sizes: lambda s, x, sizes, dim: _split(s, x, dim=dim),
    aten.split_with_sizes.default: lambda s, x, sizes, dim: _split(s, x, dim=dim),
    aten.chunk.default: lambda s, x, count, dim: _split(s, x, dim=dim),
    aten.tensor_split.sections: lambda s, x, count, dim: _split(s, x, dim=dim),
    aten.unbind.int: _unbind,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.narrow.default: lambda s, x, dim, start, length: _slice(s, x, dim, start, start + length, 1),
    aten.glu.default: _glu,
    aten.cat.default: _cat,
    aten.concat.default: _cat,
    aten.stack.default: _stack,
    aten.view_as_complex.default: _as_complex,
    aten.view_as_real.default: _as_real,
}

# Operators that move no data.
_COPIES = (aten.cat.default, aten.concat.default, aten.stack.default, aten.clone.default)
FREE = frozenset({aten.detach.default, *VIEWS}) - {*_COPIES, aten.glu.default, aten.dropout.default}
