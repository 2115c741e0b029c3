"""Where a tensor from outside comes from: what it is a view, a cast or a transpose of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from codetta.backends.reference.evaluate import DTYPE_OF
from codetta.capture.align import Shape
from codetta.capture.inplace import PINNED
from codetta.capture.layout import Dims, reshape, shape_of, sizes
from codetta.core.types import DType
from codetta.errors import UnsupportedError

Understood = Callable[[fx.Node], bool]

aten = torch.ops.aten

# Operators that keep the elements and their order. ``expand`` is among them for the shape that is there already; a real
# repetition has more elements.
SAME_ORDER = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.view_as.default,
    aten.reshape_as.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.expand_as.default,
)
CASTS = (
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten._to_copy.default,
    aten.type_as.default,
)
_FLIPS = (aten.t.default, aten.numpy_T.default, aten.transpose.int, aten.permute.default, aten.mT.default)


def fake(node: fx.Node) -> torch.Tensor:
    """The fake tensor of an FX node."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise UnsupportedError(f"{node.name} is no tensor")
    return value


def dtype_of(value: torch.Tensor) -> DType:
    """Our name of a tensor's dtype."""
    if value.dtype not in DTYPE_OF:
        raise UnsupportedError(f"tensors of {value.dtype} stay with PyTorch")
    return DTYPE_OF[value.dtype]


def before_views(source: fx.Node, dims: Dims, understood: Understood) -> tuple[fx.Node, Dims]:
    """The tensor of which ``source`` is a view in another shape, and how that tensor's dimensions lie.

    Each layer makes its own view of the same cosines and sines; behind the views they are one tensor."""
    while source.target in SAME_ORDER and not source.meta.get(PINNED):
        inner = source.args[0]
        if not isinstance(inner, fx.Node) or understood(inner):
            break
        found = _seen_as(dims, shape_of(fake(source)), shape_of(fake(inner)))
        if found is None:
            break
        source, dims = inner, found
    return source, dims


def _seen_as(dims: Dims, shape: Shape, inner: Shape) -> Dims | None:
    """The dimensions of a tensor of shape ``inner`` whose view of another shape lies as ``dims``, some repeated."""
    if sizes(dims) == shape:
        try:
            return reshape(dims, inner)
        except UnsupportedError:
            return None
    if [n for n in shape if n != 1] != [n for n in inner if n != 1]:
        return None
    padded = (1,) * (len(dims) - len(shape)) + shape
    repeated = [d for d, n in zip(dims, padded, strict=True) if d and n == 1]
    kept = iter([d for d, n in zip(dims, padded, strict=True) if n != 1])
    return (*repeated, *(() if n == 1 else next(kept) for n in inner))


def before_casts(arg: fx.Node, understood: Understood) -> tuple[fx.Node, Sequence[DType], bool]:
    """The tensor that an argument casts or transposes, the casts in the order they are done, and if it is turned."""
    casts: list[DType] = []
    flipped = False
    while arg.op == "call_function" and arg.args and not arg.meta.get(PINNED):
        inner = arg.args[0]
        value = inner.meta.get("val") if isinstance(inner, fx.Node) else None
        if not isinstance(inner, fx.Node) or understood(inner) or not isinstance(value, torch.Tensor):
            break
        if value.device != fake(arg).device:
            break
        if arg.target in CASTS and fake(arg).is_floating_point() and fake(inner).is_floating_point():
            casts.append(dtype_of(fake(arg)))
        elif arg.target in _FLIPS and fake(arg).dim() == 2 and arg.args[1:] not in (([0, 1],), ([-2, -1],)):
            flipped = not flipped
        else:
            break
        arg = inner
    return arg, casts[::-1], flipped
