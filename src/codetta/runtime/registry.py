"""The segments that this process has compiled, by their content key."""

from __future__ import annotations

from codetta.errors import PlanError
from codetta.ir.graph import Graph
from codetta.runtime.compile import Options, Segment

_SEGMENTS: dict[str, Segment] = {}
_BY_GRAPH: dict[tuple[Graph, tuple[str, ...], Options], str] = {}


def register(graph: Graph, requires_grad: tuple[bool, ...], options: Options) -> str:
    """Compile a segment, or find it compiled (layers of one structure share theirs), and return its key."""
    wrt = tuple(str(n.attrs[0]) for n, needed in zip(graph.inputs, requires_grad, strict=True) if needed)
    found = _BY_GRAPH.get((graph, wrt, options))
    if found is None:
        segment = Segment(graph, wrt, options)
        found = segment.key
        _SEGMENTS.setdefault(found, segment)
        _BY_GRAPH[graph, wrt, options] = found
    return found


def segment_of(key: str) -> Segment:
    """The segment of a key."""
    if key not in _SEGMENTS:
        raise PlanError(f"no segment {key} in this process", hint="compile the model again in this process")
    return _SEGMENTS[key]
