"""What became of a model: programs, leftovers with reasons, opaque calls with reasons, bytes, and time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from codetta.audit.half import Half, half_of
from codetta.audit.models import as_batch
from codetta.capture.backend import CapturedGraph, captured
from codetta.capture.segment import OpaqueCall, Segment
from codetta.capture.traffic import eager_bytes
from codetta.core.types import ROWS, Kind
from codetta.ir.graph import Graph
from codetta.partition.cost import MACHINES
from codetta.partition.plan import Plan
from codetta.partition.training import plan_boundary_fusion
from codetta.runtime.compile import Segment as Compiled

EMPTY = Plan((), (), (), {})


@dataclass(frozen=True, slots=True)
class Part:
    """One segment: where it lies, its token count, what it costs; parts of the same ``key`` have the same plans."""

    key: str
    layers: tuple[str, ...]
    rows: int
    forward: Half
    backward: Half


@dataclass(frozen=True, slots=True)
class Opaque:
    """Calls that stay with PyTorch for one reason: how many, in which layers, and how many take part in backward."""

    name: str
    reason: str
    count: int
    differentiable: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What ``codetta.explain`` found; ``plans`` are the forward and backward plan of each key."""

    title: str
    graphs: int
    parts: tuple[Part, ...]
    opaque: tuple[Opaque, ...]
    plans: dict[str, tuple[Plan, Plan]]
    notes: tuple[str, ...] = ()

    @property
    def forward(self) -> Half:
        """The sum over segments."""
        return sum((p.forward for p in self.parts), Half(opaque=sum(o.count for o in self.opaque)))

    @property
    def backward(self) -> Half:
        """The sum over segments."""
        return sum((p.backward for p in self.parts), Half(opaque=sum(o.differentiable for o in self.opaque)))

    def to_json(self) -> dict[str, Any]:
        """As JSON; the programs of each key once."""
        return as_json(self)

    def __rich__(self) -> Any:
        return as_rich(self)

    def __str__(self) -> str:
        return as_text(self)


def explain(model: nn.Module, *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> Explanation:
    """What ``torch.compile(model, backend="codetta")`` would make of this call; one dict alone is keyword arguments.

    Nothing is computed if the model and the arguments are on the meta device. Otherwise the model runs once."""
    if len(args) == 1 and not kwargs and isinstance(args[0], (Mapping, Tensor)):
        args, kwargs = (), as_batch(model, args[0])
    graphs = captured(model, *args, options=options, **kwargs)
    return explain_graphs(graphs, title=type(model).__name__, notes=_cache_notes(model, graphs, kwargs))


def explain_graphs(graphs: list[CapturedGraph], *, title: str, notes: Iterable[str] = ()) -> Explanation:
    """The explanation of captured graphs."""
    known: dict[tuple[str, int], tuple[Half, Half]] = {}
    plans: dict[str, tuple[Plan, Plan]] = {}
    parts: list[Part] = []
    for graph in graphs:
        for i, (segment, compiled) in enumerate(graph.compiled()):
            key, rows = graph.keys[i], token_rows(segment)
            if (key, rows) not in known:
                given = compiled.usable(graph.given(i)) if compiled.wrt else ()
                plans[key] = compiled.forward, compiled.backward(given)[0] if given else EMPTY
                known[key, rows] = _halves(graph, i, compiled, given, rows)
            parts.append(Part(key, _layers(segment), rows, *known[key, rows]))
    if len(graphs) > 1:
        notes = [*notes, f"Dynamo split the model into {len(graphs)} graphs; a segment does not cross from one to another"]
    if not any(p.forward.gemms for p in parts):
        notes = [*notes, "nothing was understood: no segment contains a GEMM"]
    return Explanation(title, len(graphs), tuple(parts), tuple(opaque_calls(graphs)), plans, tuple(notes))


def token_rows(segment: Segment) -> int:
    """What M stands for in a segment."""
    for node, feed in zip(segment.graph.inputs, segment.feeds, strict=True):
        value = feed.border.source.meta.get("val")
        if node.type.rows != ROWS or not isinstance(value, Tensor):
            continue
        if node.type.kind is Kind.COLVEC:
            return int(value.numel())
        if node.type.kind is Kind.TILE and isinstance(node.type.cols, int) and node.type.cols:
            return int(value.numel()) // node.type.cols
    return 0


def opaque_calls(graphs: Iterable[CapturedGraph]) -> list[Opaque]:
    """The operators that stay with PyTorch, alike ones together. Views move nothing and are left out."""
    found: dict[tuple[str, str], list[tuple[OpaqueCall, bool]]] = {}
    for graph in graphs:
        nodes = {n.name: n for n in graph.gm.graph.nodes}
        for call in graph.capture.opaque:
            node = nodes[call.name]
            if not _is_view(node):
                value = node.meta.get("val")
                wanted = isinstance(value, Tensor) and value.requires_grad
                found.setdefault((_operator(node), call.reason), []).append((call, wanted))
    return [
        Opaque(name, reason, len(calls), sum(w for _, w in calls), tuple(dict.fromkeys(_layer(c.layer) for c, _ in calls)))
        for (name, reason), calls in found.items()
    ]


def _halves(graph: CapturedGraph, i: int, compiled: Compiled, given: tuple[str, ...], rows: int) -> tuple[Half, Half]:
    forward, backward = compiled.forward, compiled.backward(given)[0] if given else EMPTY
    eager = eager_bytes(graph.gm, graph.capture, i)
    fusion = plan_boundary_fusion(compiled.graph, compiled.wrt, given)
    return half_of(forward, rows, eager[0], fusion[0]), half_of(backward, rows, eager[1] if given else 0, fusion[1])


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def _operator(node: fx.Node) -> str:
    """``aten.embedding.default`` is ``embedding``."""
    name = str(node.target)
    return name.split(".")[1] if name.startswith("aten.") else name


def _layer(name: str) -> str:
    return name.removeprefix("L.self.")


def _layers(segment: Segment) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_layer(n) for n in segment.layers))
