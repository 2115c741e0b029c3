"""Puts segments back into the ATen graph: one call each, and views between its (rows, columns) and ATen's shapes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule

from codetta.backends.reference.evaluate import TORCH
from codetta.capture.align import Value
from codetta.capture.grow import is_tensor, reads_size
from codetta.capture.layout import Dims, Expr, Size, chain, dim_size, shape_of, size_of, sizes
from codetta.capture.scope import Border
from codetta.capture.segment import Capture
from codetta.core.types import Sym, Type
from codetta.errors import CaptureError
from codetta.ir.graph import Graph

aten = torch.ops.aten
_NEED_STRIDES = (aten.as_strided.default, aten.view.dtype, aten.view_as_complex.default)

Register = Callable[[Graph, tuple[bool, ...]], str]
Arg = fx.Node | int


def splice(gm: GraphModule, capture: Capture, register: Register) -> GraphModule:
    """The graph in which each segment is one call of ``codetta::segment``, with the same inputs and outputs."""
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    state = _Splice(gm, capture, register, order)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            state.copy(node)
    for node in gm.graph.nodes:
        if node in capture.needed and node.op != "output" and node not in capture.growth.meaning:
            state.node(node)
    output = gm.graph.output_node()
    state.graph.output(fx.map_arg(output.args[0], state.node))
    state.graph.output_node().meta = dict(output.meta)
    result = GraphModule(gm, state.graph)
    result.meta = dict(gm.meta)
    result.graph.eliminate_dead_code()
    result.graph.lint()
    result.recompile()
    return result


@dataclass(slots=True)
class _Splice:
    """The new graph under construction; everything is emitted when it is first asked for, its arguments before it."""

    gm: GraphModule
    capture: Capture
    register: Register
    order: dict[fx.Node, int]
    graph: fx.Graph = field(default_factory=fx.Graph)
    done: dict[fx.Node, fx.Node] = field(default_factory=dict)
    calls: dict[int, list[fx.Node]] = field(default_factory=dict)
    entered: dict[Border, fx.Node] = field(default_factory=dict)
    known_sizes: dict[Size, Arg] = field(default_factory=dict)
    sizes_of: dict[Size, tuple[fx.Node, int]] = field(default_factory=dict)

    # --- nodes of the old graph ---------------------------------------------------------------------------------------

    def node(self, old: fx.Node) -> fx.Node:
        """The new node with the value of an old one."""
        if old not in self.done:
            if old in self.capture.growth.meaning:
                self.done[old] = self.leave(old)
            else:
                self.copy(old)
        return self.done[old]

    def copy(self, old: fx.Node) -> fx.Node:
        """An opaque node; a view becomes a reshape, since strides may have changed."""
        if old in self.capture.growth.after:
            self.node(self.capture.growth.after[old])
        if reads_size(old) and any(a in self.capture.growth.meaning for a in old.all_input_nodes):
            found = self.size(size_of(old.meta["val"]))
            if not isinstance(found, fx.Node):
                raise CaptureError(f"{old.name} is the number {found} and no node")
            new = found
        else:
            for a in old.all_input_nodes:
                self.node(a)
            new = self.graph.node_copy(old, self.node)
            if new.target is aten.view.default:
                new.target = aten.reshape.default
            if new.target in _NEED_STRIDES:
                self._check_strides(old)
        self.done[old] = new
        self._note_sizes(new)
        return new

    def _check_strides(self, old: fx.Node) -> None:
        for a in old.all_input_nodes:
            if is_tensor(a) and a.meta["val"].stride() != self.done[a].meta["val"].stride():
                raise CaptureError(f"{old.name} depends on the strides of {a.name}, which a segment does not keep")

    # --- segments -----------------------------------------------------------------------------------------------------

    def leave(self, old: fx.Node) -> fx.Node:
        """An output of a segment in the shape of the ATen node that it stands for."""
        raw = self.output(*self.capture.place[old])
        value = self.capture.growth.meaning[old]
        if not isinstance(value, Value):
            raise CaptureError(f"{old.name} leaves a segment and is not one tensor")
        inner = [*chain(value.dims, "row"), *chain(value.dims, "column")]
        outer = [a for d in value.dims for a in d]
        shape = sizes(value.dims)
        if inner != outer:
            raw = self.reshape(raw, [a.size for a in inner])
            raw = self.call(aten.permute.default, raw, [inner.index(a) for a in outer])
        found = self.reshape(raw, shape)
        for key in ("nn_module_stack", "stack_trace"):
            if key in old.meta:
                found.meta.setdefault(key, old.meta[key])
        return found

    def output(self, segment: int, index: int) -> fx.Node:
        """An output of a segment as the segment computes it."""
        if segment not in self.calls:
            self.calls[segment] = self._call_segment(segment)
        return self.calls[segment][index]

    def _call_segment(self, index: int) -> list[fx.Node]:
        segment = self.capture.segments[index]
        inputs = [
            self.enter(feed.border) if feed.made_by is None else self.output(*feed.made_by) for feed in segment.feeds
        ]
        key = self.register(segment.graph, segment.requires_grad)
        call = self.graph.call_function(torch.ops.codetta.segment.default, (inputs, key, index))
        types = [n.type for n in segment.graph.roots]
        wanted = any(segment.requires_grad)
        rows = next(x.meta["val"].shape[0] for x, f in zip(inputs, segment.feeds, strict=True) if _is_rows(f.border))
        call.meta["val"] = [_fake(inputs[0].meta["val"], t, rows, wanted) for t in types]
        call.meta.update(segment.region)
        outputs = [self.graph.call_function(operator.getitem, (call, i)) for i in range(len(types))]
        for node, value in zip(outputs, call.meta["val"], strict=True):
            node.meta.update(segment.region)
            node.meta["val"] = value
        return outputs

    def enter(self, border: Border) -> fx.Node:
        """A tensor of PyTorch's in the shape of a segment's input."""
        if border not in self.entered:
            self.entered[border] = self._entered(border)
        return self.entered[border]

    def _entered(self, border: Border) -> fx.Node:
        x = self.node(border.source)
        if border.dims is None:
            return x
        if border.lane:
            x = self.call(aten.view_as_real.default, x)
            x = self.call(aten.select.int, x, -1, 0 if border.lane == "real" else 1)
        x, dims = self._repeated(x, border.dims)
        outer = [a for d in dims for a in d]
        inner = [*chain(dims, "row"), *chain(dims, "column")]
        if inner != outer:
            x = self.reshape(x, [a.size for a in outer])
            x = self.call(aten.permute.default, x, [outer.index(a) for a in inner])
        return self._flat(x, border.type)

    def _repeated(self, x: fx.Node, dims: Dims) -> tuple[fx.Node, Dims]:
        """A tensor repeated where its layout says so, and the layout of the dimensions that it then has."""
        shape = shape_of(x.meta["val"])
        lead = len(dims) - len(shape)
        if not any(dims[:lead]):
            dims, lead = dims[lead:], 0
        wanted = [dim_size(d) for d in dims]
        if lead or any(d and w != s for d, w, s in zip(dims, wanted, shape, strict=True)):
            x = self.call(aten.expand.default, x, [self.size(w) for w in wanted])
        return x, dims

    def _flat(self, x: fx.Node, type_: Type) -> fx.Node:
        cols = [type_.cols] if type_.cols is not None else []
        shape = [-1, *cols] if type_.rows is not None else cols
        value = x.meta["val"]
        if value.dim() == len(shape) and (not cols or value.shape[-1] == cols[0]):
            return x
        return self.call(aten.reshape.default, x, shape)

    # --- single operators ---------------------------------------------------------------------------------------------

    def reshape(self, x: fx.Node, shape: Sequence[Size]) -> fx.Node:
        """``x`` in another shape; itself if it has it."""
        if shape_of(x.meta["val"]) == tuple(shape):
            return x
        return self.call(aten.reshape.default, x, [self.size(s) for s in shape])

    def call(self, target: Any, *args: Any) -> fx.Node:
        """A new operator, with the fake value that it returns."""
        node = self.graph.call_function(target, args)
        fakes = fx.map_arg(args, lambda n: n.meta["val"])
        mode = next(v.fake_mode for v in pytree.tree_leaves(fakes) if isinstance(v, FakeTensor))
        with mode, torch.enable_grad():
            value = target(*fakes)
        node.meta["val"] = value.detach().requires_grad_(value.requires_grad) if value.requires_grad else value
        return node

    def size(self, size: Size) -> Arg:
        """A size as a number, or as a node that reads or computes it at run time."""
        if isinstance(size, int):
            return size
        if size not in self.known_sizes:
            self.known_sizes[size] = self._read(*self.sizes_of[size]) if size in self.sizes_of else self._computed(size)
        return self.known_sizes[size]

    def _read(self, x: fx.Node, dim: int) -> fx.Node:
        node = self.graph.call_function(aten.sym_size.int, (x, dim))
        node.meta["val"] = x.meta["val"].shape[dim]
        return node

    def _computed(self, size: Expr) -> Arg:
        combine = {"Mul": operator.mul, "Add": operator.add}.get(size.func.__name__)
        if combine is None or not all(a.is_integer for a in size.args):
            raise CaptureError(f"the size {size} is none of the graph's sizes, nor a product or a sum of them")
        parts = [self.size(int(a) if a.is_Integer else a) for a in size.args]
        found = parts[0]
        for p in parts[1:]:
            node = self.graph.call_function(combine, (found, p))
            node.meta["val"] = combine(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in (found, p)))
            found = node
        return found

    def _note_sizes(self, new: fx.Node) -> None:
        """Remember where symbolic sizes can be read from."""
        value = new.meta.get("val")
        if isinstance(value, torch.SymInt):
            self.known_sizes.setdefault(size_of(value), new)
        elif isinstance(value, Tensor):
            for i, s in enumerate(shape_of(value)):
                if not isinstance(s, int):
                    self.sizes_of.setdefault(s, (new, i))


def _is_rows(border: Border) -> bool:
    return isinstance(border.type.rows, Sym)


def _fake(like: Tensor, type_: Type, rows: int | torch.SymInt, wanted: bool) -> Tensor:
    """A fake tensor of this type; contiguous, as segments return them."""
    shape: list[Any] = [] if type_.rows is None else [rows]
    shape += [] if type_.cols is None else [type_.cols]
    value = like.new_empty(shape, dtype=TORCH[type_.dtype])
    return value.requires_grad_(wanted and type_.dtype.is_float)
