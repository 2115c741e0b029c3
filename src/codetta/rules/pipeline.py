"""The whole order of the passes, on one screen."""

from __future__ import annotations

from collections.abc import Collection

from codetta import settings
from codetta.core.node import Node
from codetta.core.rewrite import Fired, rewrite
from codetta.ir.graph import Graph
from codetta.ir.verify import verify_graph
from codetta.rules.canon import CANON
from codetta.rules.norm import FROZEN, NORM
from codetta.rules.pairs import PAIRS
from codetta.rules.scale import SCALE, THROUGH
from codetta.rules.siblings import merge_siblings

LOCAL = [*CANON, *PAIRS, *SCALE]
FORWARD = [*LOCAL, *THROUGH, *NORM]
ALL = [*FORWARD, *FROZEN]


def reparameterise(graph: Graph, frozen_gains: bool = False, record: list[Fired] | None = None) -> Graph:
    """A forward graph with every row-wise map moved across the GEMMs that it commutes with, siblings merged.

    Siblings are merged first and last: q, k, v share their operand from the start, or only once the scale has left."""
    graph = merge_siblings(_verified(graph))
    graph = _mapped(graph, rewrite(graph.roots, ALL if frozen_gains else FORWARD, record=record))
    return _verified(merge_siblings(graph))


def without_motion(graph: Graph) -> Graph:
    """A forward graph in normal form, siblings merged, with every map where the model has it."""
    graph = merge_siblings(graph)
    return _mapped(graph, rewrite(graph.roots, LOCAL))


def simplify(roots: list[Node], forward: Collection[Node], record: list[Fired] | None = None) -> list[Node]:
    """Gradients in normal form; the forward nodes in them stay what they are, so that saved values are found."""
    return rewrite(roots, LOCAL, frozen=forward, record=record)


def _verified(graph: Graph) -> Graph:
    if settings.verify_ir():
        verify_graph(graph)
    return graph


def _mapped(graph: Graph, roots: list[Node]) -> Graph:
    return Graph(graph.inputs, tuple((name, r) for (name, _), r in zip(graph.outputs, roots, strict=True)))
