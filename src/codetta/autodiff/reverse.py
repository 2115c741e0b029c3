"""The reverse walk: cotangents of a graph's outputs in, gradients of its inputs out, as nodes of the same graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from codetta.autodiff.inner import inner_product
from codetta.autodiff.vjp import VJP
from codetta.core.node import Node, postorder
from codetta.core.types import Kind
from codetta.ir import ops
from codetta.ir.build import add, apply, cast, expand, mul
from codetta.ir.graph import Graph


def gradients(
    graph: Graph, cotangents: Mapping[str, Node], wrt: Iterable[Node], kept: Mapping[Node, Node] | None = None
) -> dict[Node, Node | None]:
    """For each node of ``wrt``, the sum over the named outputs of cotangent times Jacobian, in the node's own dtype;
    None where no given output depends on it.

    ``kept`` are stand-ins for stored outputs, used where an inner product can be taken with the stored value; a caller
    that rewrites the result before putting the outputs back keeps the rules from looking inside them."""
    wrt = list(wrt)
    walk = Reverse(graph, [_named(graph, name) for name in cotangents], kept or {})
    walk.seed(cotangents)
    walk.run(wrt)
    return {w: None if (g := walk.cotangent.get(w)) is None else cast(expand(g, w.type), w.type.dtype) for w in wrt}


def _named(graph: Graph, name: str) -> Node:
    return dict(graph.outputs)[name]


class Reverse:
    """One walk: the cotangents found so far, and what the forward graph keeps in memory."""

    def __init__(self, graph: Graph, outputs: list[Node], kept: Mapping[Node, Node]) -> None:
        self.graph = graph
        self.kept = kept
        self.order = postorder(outputs)
        self.cotangent: dict[Node, Node] = {}
        self.external: dict[Node, Node] = {}
        self.users: dict[Node, list[Node]] = {n: [] for n in self.order}
        for n in self.order:
            for a in dict.fromkeys(n.args):
                self.users[a].append(n)
        operands = {a for n in graph.nodes if n.op is ops.MATMUL for a in n.args}
        self.stored = {*graph.roots, *operands, *graph.inputs}

    def seed(self, cotangents: Mapping[str, Node]) -> None:
        """Start from the outputs' own cotangents."""
        for name, g in cotangents.items():
            out = _named(self.graph, name)
            self.external[out] = g if out not in self.external else add(self.external[out], g)
        self.cotangent.update(self.external)

    def run(self, wrt: Iterable[Node]) -> None:
        """Walk from the outputs to ``wrt``, through the nodes that depend on it only."""
        active = set(wrt)
        for n in self.order:
            if any(a in active for a in n.args):
                active.add(n)
        for n in reversed(self.order):
            g = self.cotangent.get(n)
            if g is None or n not in active or not n.args:
                continue
            for a, d in zip(n.args, self._pull(n, g, active), strict=True):
                if d is not None and a in active:
                    seen = self.cotangent.get(a)
                    self.cotangent[a] = d if seen is None else add(seen, d)

    def _pull(self, n: Node, g: Node, active: set[Node]) -> tuple[Node | None, ...]:
        """The cotangents of ``n``'s arguments. A row scale behind a GEMM takes its own from the scaled value.

        For y = x * r the derivative by r is <dy, x> = <dy, y> / r. The scaled y, or what a linear map makes of it, is
        stored anyway; the raw x would have to be stored for this alone. The paper's identity for RMSNorm's backward
        (CODA, section 4) is this step."""
        if n.op is ops.MUL and n.type.kind is Kind.TILE:
            for x, r in (n.args, n.args[::-1]):
                if r in active and is_positive_row_scale(r) and x.type.kind is Kind.TILE and x not in self.stored:
                    dr = mul(inner_product(self, n), apply(ops.RECIP, r))
                    dx = mul(g, r) if x in active else None
                    return (dx, dr) if x is n.args[0] else (dr, dx)
        return VJP[n.op](n, g)


def is_positive_row_scale(r: Node) -> bool:
    """A number per row that may be divided by, such as 1 / rms. An exponential may not: it underflows to zero."""
    return r.type.kind is Kind.COLVEC and r.op is ops.RSQRT
