"""Cuts the understood part of an ATen graph into segments, each a tensor graph of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from types import FunctionType
from typing import Any

from torch import Tensor, fx
from torch.fx import GraphModule

from codetta.capture.align import Value
from codetta.capture.grow import Growth, grow, is_tensor, reads_size
from codetta.capture.inplace import PINNED
from codetta.capture.layout import size_hint
from codetta.capture.loss_head import head_loss
from codetta.capture.names import input_names, layer_of, module_of, output_names
from codetta.capture.scope import Border
from codetta.capture.views import FREE
from codetta.core.node import Node, postorder, substitute
from codetta.core.types import ROWS, Kind
from codetta.errors import CaptureError
from codetta.ir import ops
from codetta.ir.build import input_
from codetta.ir.graph import Graph


@dataclass(frozen=True, slots=True)
class Feed:
    """Where an input of a segment comes from: output ``made_by[1]`` of segment ``made_by[0]``, or a tensor of PyTorch's
    that enters as ``border`` says."""

    border: Border
    made_by: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """One tensor graph, what its inputs are fed with, which of them want a gradient, and where in the model it lies."""

    graph: Graph
    feeds: tuple[Feed, ...]
    requires_grad: tuple[bool, ...]
    layers: tuple[str, ...]
    region: dict[str, Any] = field(default_factory=dict)


def token_rows(segment: Segment) -> int:
    """What M stands for in a segment; where a size is symbolic, in the example that it was captured with."""
    for node, feed in zip(segment.graph.inputs, segment.feeds, strict=True):
        value = feed.border.source.meta.get("val")
        if node.type.rows != ROWS or not isinstance(value, Tensor):
            continue
        size, columns = prod(map(size_hint, value.shape)), node.type.cols
        if node.type.kind is Kind.COLVEC:
            return size
        if node.type.kind is Kind.TILE and isinstance(columns, int) and columns:
            return size // columns
    return 0


@dataclass(frozen=True, slots=True)
class OpaqueCall:
    """An operator that stays with PyTorch: its node's name, the operator, why, and in which module. Views are free, and
    not listed; nor is a loss head, which is programs of ours."""

    name: str
    op: str
    reason: str
    module: str


@dataclass(frozen=True, slots=True)
class Capture:
    """The segments in an order in which they can run, the rest, which segment's output each understood node is, and
    the nodes whose values must exist outside of segments."""

    segments: list[Segment]
    opaque: list[OpaqueCall]
    place: dict[fx.Node, tuple[int, int]]
    needed: frozenset[fx.Node]
    growth: Growth


@dataclass(slots=True)
class _Part:
    """A segment under construction: its members, and the outputs asked for, each with its nodes in the ATen graph."""

    members: list[fx.Node]
    outputs: dict[Node, list[fx.Node]] = field(default_factory=dict)

    def inputs(self) -> list[Node]:
        """The INPUT nodes, in the order of first use."""
        return [n for n in postorder(self.outputs) if n.op is ops.INPUT]


def cut(gm: GraphModule) -> Capture:
    """The segments of a normalised graph."""
    growth = grow(gm.graph)
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    parts = _parts(growth, order)
    part_of = {n: i for i, p in enumerate(parts) for n in p.members}
    needed = _needed(gm.graph, growth)
    for n in sorted(needed & part_of.keys(), key=order.__getitem__):
        parts[part_of[n]].outputs.setdefault(_value(growth, n).node, []).append(n)
    kept = [p for p in parts if p.outputs]
    number = {n: i for i, p in enumerate(kept) for n in p.members}
    threads = _threaded(growth, kept)
    place = {n: (i, j) for i, p in enumerate(kept) for j, ns in enumerate(p.outputs.values()) for n in ns}
    segments = [_segment(growth, i, p, place, threads) for i, p in enumerate(kept)]
    left = [n for n in gm.graph.nodes if n.op == "call_function" and n in needed and n not in number]
    opaque = [
        OpaqueCall(n.name, _name(n.target), growth.reasons[n], module_of(n))
        for n in left
        if is_tensor(n) and n.target not in FREE and n.target is not head_loss
    ]
    return Capture(segments, opaque, place, frozenset(needed), growth)


def _name(target: object) -> str:
    """An operator's name; a Python function's, not where it lies in memory."""
    return target.__name__ if isinstance(target, FunctionType) else str(target)


def _value(growth: Growth, n: fx.Node) -> Value:
    found = growth.meaning[n]
    if not isinstance(found, Value):
        raise CaptureError(f"{n.name} is used outside of its segment, and it is not one real tensor")
    return found


# --- which nodes belong together --------------------------------------------------------------------------------------


def _parts(growth: Growth, order: dict[fx.Node, int]) -> list[_Part]:
    """Understood nodes of one stage that read each other, or read the same activation, in an order that can run."""
    parent: dict[object, object] = {}

    def root(x: object) -> object:
        while parent.setdefault(x, x) is not x:
            x = parent[x]
        return x

    for n in growth.meaning:
        for m in growth.reads[n]:
            parent[root(n)] = root(m)
        for key in _shared_activations(growth, n):
            parent[root(n)] = root(key)
    groups: dict[object, list[fx.Node]] = {}
    for n in sorted(growth.meaning, key=order.__getitem__):
        groups.setdefault(root(n), []).append(n)
    return [_Part(members) for members in sorted(groups.values(), key=lambda m: (growth.stage[m[0]], order[m[0]]))]


def _shared_activations(growth: Growth, n: fx.Node) -> Iterable[object]:
    """What makes nodes that read the same activation one segment: sibling GEMMs, which then become one."""
    for border in growth.enters[n]:
        if border.dims is not None and border.type.kind is Kind.TILE:
            yield border.source, border.dims, growth.stage[n], n.meta.get("ac_graph_id")


def _needed(graph: fx.Graph, growth: Growth) -> set[fx.Node]:
    """The nodes whose value must exist outside of segments: opaque ones that are used, understood ones they use."""
    todo = [n for n in graph.nodes if n.op == "output" or n.meta.get(PINNED) or (n not in growth.meaning and _acts(n))]
    seen: set[fx.Node] = set(todo)
    while todo:
        n = todo.pop()
        if n in growth.meaning:
            behind = [growth.borders[m].source for m in postorder([_value(growth, n).node]) if m.op is ops.INPUT]
        else:
            behind = [] if reads_size(n) else list(n.all_input_nodes)
        new = [a for a in behind if a not in seen]
        seen.update(new)
        todo += new
    return seen


def _acts(n: fx.Node) -> bool:
    return n.op == "call_function" and n.is_impure()


# --- threads ----------------------------------------------------------------------------------------------------------


def _threaded(growth: Growth, parts: list[_Part]) -> dict[tuple[int, Node], tuple[int, int]]:
    """For each later reader of a differentiable activation, the first reader's output that it reads instead.

    The first reader hands the activation on as an output, so that the gradients of all readers are summed inside
    backward programs and not by an addition of autograd's, which would move two activations more. What is handed on is
    a copy, one activation more, once a block that is compiled alone: a result of an operator may not lie in the memory
    of an argument, and a schema has no way to say that one tensor of a list does."""
    first: dict[Node, int] = {}
    found: dict[tuple[int, Node], tuple[int, int]] = {}
    for i, p in enumerate(parts):
        for leaf in p.inputs():
            border = growth.borders[leaf]
            wanted = border.dims is not None and border.type.kind is Kind.TILE
            if not (wanted and growth.wants_gradient(border.source)):
                continue
            origin = first.setdefault(leaf, i)
            if origin != i and _region(parts[origin]) == _region(p):
                outputs = parts[origin].outputs
                outputs.setdefault(leaf, [])
                found[i, leaf] = (origin, list(outputs).index(leaf))
    return found


def _region(p: _Part) -> dict[str, Any]:
    """The checkpointing tags of a segment, which all its members share."""
    first = p.members[0].meta
    return {key: first[key] for key in ("recompute", "ac_graph_id") if key in first}


# --- one segment ------------------------------------------------------------------------------------------------------


def _segment(
    growth: Growth,
    index: int,
    part: _Part,
    place: dict[fx.Node, tuple[int, int]],
    threads: dict[tuple[int, Node], tuple[int, int]],
) -> Segment:
    roots = list(part.outputs)
    borders = {leaf: growth.borders[leaf] for leaf in _as_read(growth, part)}
    names = input_names(roots, borders)
    renamed = {leaf: input_(name, leaf.type) for leaf, name in names.items()}
    outputs = zip(output_names(roots, names), substitute(roots, renamed), strict=True)
    feeds = [Feed(b, threads.get((index, leaf)) or _raw(growth, b, place)) for leaf, b in borders.items()]
    layers = dict.fromkeys(filter(None, (layer_of(b.source) for b in borders.values())))
    return Segment(
        graph=Graph(tuple(renamed[leaf] for leaf in borders), tuple(outputs)),
        feeds=tuple(feeds),
        requires_grad=tuple(growth.wants_gradient(b.source) for b in borders.values()),
        layers=tuple(layers),
        region=_region(part),
    )


def _as_read(growth: Growth, part: _Part) -> list[Node]:
    """The INPUT nodes in the order in which the model reads them: q, k, v."""
    first: dict[Border, int] = {}
    for i, n in enumerate(part.members):
        for border in growth.enters[n]:
            first.setdefault(border, i)
    return sorted(part.inputs(), key=lambda leaf: first.get(growth.borders[leaf], len(part.members)))


def _raw(growth: Growth, border: Border, place: dict[fx.Node, tuple[int, int]]) -> tuple[int, int] | None:
    """The output of an earlier segment that a border can take as it is, because it keeps its layout."""
    meaning = growth.meaning.get(border.source)
    same = isinstance(meaning, Value) and meaning.dims == border.dims and meaning.node.type == border.type
    return place[border.source] if same else None
