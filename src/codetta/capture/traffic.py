"""What eager PyTorch would move through HBM for a captured segment, counted operator by operator on the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from codetta.capture.segment import Capture, Segment

aten = torch.ops.aten
GEMMS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}


def eager_bytes(gm: GraphModule, capture: Capture, index: int) -> tuple[int, int]:
    """The bytes of one segment's operators, forward and backward: every operator that is no view reads its inputs and
    writes its output; a GEMM only writes, and weight gradients do not count, as in our own plans' count."""
    region, sources = _region(gm, capture, index)
    return moved(region, sources, _tokens(capture.segments[index], sources))


def moved(region: GraphModule, sources: Sequence[fx.Node], tokens: int) -> tuple[int, int]:
    """The same of operators as a graph of their own, fed with ``sources``."""
    leaves = [_meta(n) for n in sources]
    # from inputs that are no leaves, in-place operators and views work as inside of a model
    inputs = [x.view_as(x) if isinstance(x, Tensor) and x.is_floating_point() else x for x in leaves]
    with _Count(tokens) as forward:
        returned = pytree.tree_leaves(region(*inputs))
    outputs = [y for y in returned if isinstance(y, Tensor) and y.requires_grad]
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    if not outputs or not wanted:
        return forward.bytes, 0
    cotangents = [torch.empty_like(y) for y in outputs]
    with _Count(tokens) as backward:
        torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True)
    return forward.bytes, backward.bytes


def _region(gm: GraphModule, capture: Capture, index: int) -> tuple[GraphModule, list[fx.Node]]:
    """The operators behind a segment's outputs, up to what enters it, as a graph of their own."""
    ends = [n for n, (i, _) in capture.place.items() if i == index]
    entering = {f.border.source for f in capture.segments[index].feeds}
    inside: list[fx.Node] = []
    sources: list[fx.Node] = []
    todo, seen = list(ends), set(ends)
    while todo:
        n = todo.pop()
        outside = n in entering or n.op == "placeholder" or n not in capture.growth.meaning
        (sources if outside else inside).append(n)
        new = [] if outside else [a for a in n.all_input_nodes if a not in seen]
        seen.update(new)
        todo += new
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    graph = fx.Graph()
    sources.sort(key=order.__getitem__)
    copies = {n: graph.placeholder(n.name) for n in sources}
    for n in sorted(inside, key=order.__getitem__):
        copies[n] = graph.node_copy(n, copies.__getitem__)
    graph.output(tuple(copies[n] for n in ends))
    return GraphModule(gm, graph), sources


def _meta(n: fx.Node) -> Any:
    value = n.meta["val"]
    if not isinstance(value, Tensor):
        return int(value)
    x = torch.empty([int(s) for s in value.shape], dtype=value.dtype, device="meta")
    return x.requires_grad_(value.requires_grad)


def _tokens(segment: Segment, sources: list[fx.Node]) -> int:
    """The product of the row sizes, read off an input that has them."""
    by_source = {f.border.source: f.border for f in segment.feeds}
    for n in sources:
        border = by_source.get(n)
        value = n.meta["val"]
        if border is not None and border.dims is not None and isinstance(border.type.cols, int):
            return int(value.numel()) // border.type.cols
    return 0


class _Count(TorchDispatchMode):
    """Adds up what the operators inside of the context read and write."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count it, if it is no view."""
        out = func(*args, **(kwargs or {}))
        read = {id(t): t for t in _tensors((args, kwargs))}
        written = list(_tensors(out))
        storages = {t.untyped_storage()._cdata for t in read.values()}
        if func in GEMMS:
            a, b = args[-2], args[-1]
            is_weight_gradient = a.shape[-1] == self.tokens and self.tokens not in (a.shape[-2], b.shape[-1])
            self.bytes += 0 if is_weight_gradient else sum(_size(t) for t in written)
        elif any(t.untyped_storage()._cdata not in storages for t in written) or func._schema.is_mutable:
            self.bytes += sum(_size(t) for t in [*read.values(), *written])
        return out


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor))


def _size(t: Tensor) -> int:
    """The bytes that lie behind a tensor: a repeated one is stored once."""
    return min(t.numel() * t.element_size(), t.untyped_storage().nbytes())
