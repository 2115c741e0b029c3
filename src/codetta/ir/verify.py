"""What must hold of every tensor graph between two passes."""

from __future__ import annotations

from collections.abc import Iterable

from codetta.core.node import Node
from codetta.errors import PlanError
from codetta.ir import ops
from codetta.ir.graph import Graph


def verify_graph(graph: Graph) -> None:
    """Raise PlanError unless the names are unique, the inputs closed, and every type what its op infers."""
    if any(n.op is not ops.INPUT for n in graph.inputs):
        raise PlanError(f"inputs that are none: {[n for n in graph.inputs if n.op is not ops.INPUT]}")
    unique("inputs", [str(n.attrs[0]) for n in graph.inputs])
    unique("outputs", [name for name, _ in graph.outputs])
    nodes = graph.nodes
    loose = {n for n in nodes if n.op is ops.INPUT} - set(graph.inputs)
    if loose:
        raise PlanError(f"the graph reads {sorted(str(n.attrs[0]) for n in loose)}, which are not among its inputs")
    for n in nodes:
        _verify_node(n)


def _verify_node(n: Node) -> None:
    if ops.OPS.get(n.op.name) is not n.op:
        raise PlanError(f"{n} is of no op of the table")
    inferred = n.op.infer(n.args, n.attrs)
    if inferred != n.type:
        raise PlanError(f"{n} should have the type {inferred}")


def unique(what: str, names: Iterable[str]) -> None:
    """Raise PlanError if a name comes twice."""
    names = list(names)
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise PlanError(f"{what} share names: {twice}")
