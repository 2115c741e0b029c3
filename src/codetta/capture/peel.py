"""Which operators of an ATen graph change nothing, and so are peeled off it."""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

aten = torch.ops.aten

# Each returns its first argument, or a view of it, when it changes nothing.
ALIASES = frozenset(
    {
        aten.alias.default,
        aten.contiguous.default,
        aten.detach.default,
        aten.dropout.default,
        aten.expand.default,
        aten.expand_as.default,
        aten.feature_dropout.default,
        aten.flatten.using_ints,
        aten.narrow.default,
        aten.permute.default,
        aten.reshape.default,
        aten.slice.Tensor,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.to.device,
        aten.to.dtype,
        aten.to.dtype_layout,
        aten.to.other,
        aten.transpose.int,
        aten.type_as.default,
        aten.unflatten.int,
        aten.view.default,
        aten.view.dtype,
        aten.view_as.default,
    }
)

# The spellings of a cast; the plain ones all become ``aten.to.dtype(x, dtype)``.
CASTS = frozenset(
    {
        aten.to.device,
        aten.to.dtype,
        aten.to.dtype_layout,
        aten.to.other,
        aten.type_as.default,
        aten._to_copy.default,
    }
)

# Each returns a copy of its first argument: as good as the original, unless somebody writes to one or gets both.
COPIES = frozenset({aten.clone.default, aten._to_copy.default, aten.cat.default, aten.concat.default})


def is_identity(node: Node, source: Tensor, result: Any, *, copies: bool) -> bool:
    """Whether ``node`` is its tensor argument ``source`` again; ``copies`` says if a copy may be peeled."""
    target, args = node.target, node.args
    if target not in ALIASES | COPIES or (not copies and (target in COPIES or _options(node).get("copy"))):
        return False
    if target is aten.dropout.default or target is aten.feature_dropout.default:
        return bool(args[1] == 0 or not args[2])
    return isinstance(result, Tensor) and same_layout(source, result)


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether two fake tensors agree in all that can be known without looking at their data."""
    return (
        a.dtype == b.dtype
        and a.device == b.device
        and a.layout == b.layout
        and a.requires_grad == b.requires_grad
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
        and a.dim() == b.dim()
        and statically_known_true(sym_eq(tuple(a.shape), tuple(b.shape)))
        and statically_known_true(sym_eq(tuple(a.stride()), tuple(b.stride())))
    )


def is_full_slice(node: Node) -> bool:
    """Whether a slice runs from 0 to the end in steps of 1, whatever the size is."""
    if node.target is not aten.slice.Tensor:
        return False
    options = _options(node)
    end = options.get("end")
    whole = end is None or (isinstance(end, int) and end == sys.maxsize)
    return whole and options.get("start") in (None, 0) and options.get("step", 1) == 1


def plain_cast(node: Node, source: Any, result: Any) -> bool:
    """Whether ``node`` only changes the dtype of ``source``, however it is spelled."""
    if node.target not in CASTS or not isinstance(source, Tensor) or not isinstance(result, Tensor):
        return False
    options = _options(node)
    return (
        source.dtype != result.dtype
        and source.device == result.device
        and source.layout == result.layout
        and options.get("memory_format") in (None, torch.preserve_format)
        and not options.get("pin_memory")
    )


def _options(node: Node) -> dict[str, Any]:
    """The arguments of a call by name."""
    target: Any = node.target
    return {**dict(zip((a.name for a in target._schema.arguments), node.args, strict=False)), **node.kwargs}


def is_empty_part(part: Tensor, whole: Tensor) -> bool:
    """Whether ``part`` adds nothing to the concatenation ``whole``: no elements, and no say in its dtype."""
    return part.dtype == whole.dtype and any(statically_known_true(n == 0) for n in part.shape)
