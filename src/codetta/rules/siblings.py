"""Sibling GEMMs of one operand become one over stacked weights: q, k, v; gate, up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from codetta.core.node import Node, substitute, users
from codetta.core.types import DType, Kind
from codetta.ir import legal, ops
from codetta.ir.build import add, join, matmul, part, stack
from codetta.ir.graph import Graph
from codetta.ir.split import columns

WHOLE = 8  # columns: rows of an output are whole 16 bytes then, in a dtype of 16 bits, as kernels want them


def merge_siblings(graph: Graph) -> Graph:
    """x w1', x w2' = columns of x [w1; w2]'. Siblings share the operand, its form, and whoever takes them up.

    Where one goes to another GEMM than its sibling does (a parallel block's fc1, next to q, k and v), their gradients
    come from different places, and to join them before the GEMM's own gradient would cost a pass. Where the epilogue
    combines them, they must lie side by side: two of them can be a pair of lanes, three cannot. And a width that no
    kernel could store (27) is not added to one that a kernel can (24)."""
    while (merged := next(_merged_once(graph), None)) is not None:
        graph = merged
    return graph


def _merged_once(graph: Graph) -> Iterator[Graph]:
    for group in _siblings(graph):
        for chosen in _choices(group):
            merged, whole = _merged(graph, list(chosen))
            if _is_block_local(merged, whole):
                yield merged


def _choices(group: list[Node]) -> Iterator[tuple[Node, ...]]:
    """All of a group, those of whole widths, two of them: none that would take a member's kernel away."""
    even = [n for n in group if _width([n]) % WHOLE == 0]
    for chosen in (tuple(group), tuple(even), *combinations(group, 2)):
        if len(chosen) > 1 and (_width(chosen) % WHOLE == 0 or not any(n in chosen for n in even)):
            yield chosen


def _width(group: Sequence[Node]) -> int:
    return sum(n.type.cols for n in group if isinstance(n.type.cols, int))


def _merged(graph: Graph, group: list[Node]) -> tuple[Graph, Node]:
    """The graph with the siblings of a group as one GEMM, and that GEMM."""
    weights = [n.args[1] for n in group]
    sizes = [w.type.rows for w in weights if isinstance(w.type.rows, int)]
    gemm = whole = matmul(group[0].args[0], stack(*weights), "nt")
    split = columns(*sizes)
    biased = _biases(graph, group)
    if biased is not None:
        whole = add(whole, join(split, *(b for _, b in biased)))
    replaced = [n for n, _ in biased] if biased is not None else group
    mapping = {n: part(whole, split, i) for i, n in enumerate(replaced)}
    roots = substitute(graph.roots, mapping)
    return Graph(graph.inputs, tuple((name, r) for (name, _), r in zip(graph.outputs, roots, strict=True))), gemm


def _is_block_local(graph: Graph, gemm: Node) -> bool:
    """Whether no map of the GEMM's output, up to the next GEMM, combines columns of different tiles."""
    homes: dict[Node, legal.Home] = {gemm: legal.ACC}
    for n in graph.nodes:
        if n.op is not ops.MATMUL and n.type.kind is Kind.TILE and any(a in homes for a in n.args):
            try:
                homes[n] = legal.home_of(n, [homes.get(a) for a in n.args])
            except legal.CrossColumns:
                return False
    return True


def _siblings(graph: Graph) -> Iterator[list[Node]]:
    """Groups of at least two GEMMs on one operand that the same GEMMs take up, ordered as their weights are inputs."""
    groups: dict[tuple[Node, DType], list[Node]] = {}
    for n in graph.contractions:
        w = n.args[1]
        if n.attrs[0] == "nt" and isinstance(w.type.rows, int) and n.type.kind is Kind.TILE and _is_weight(w):
            groups.setdefault((n.args[0], w.type.dtype), []).append(n)
    rank = {n: i for i, n in enumerate(graph.inputs)}
    for group in groups.values():
        group.sort(key=lambda n: rank.get(_leaf(n.args[1]), len(rank)))
    after, outside = users(graph.roots), set(graph.roots)
    for group in (g for g in groups.values() if len(g) > 1):
        alike: dict[frozenset[Node | None], list[Node]] = {}
        for n in group:
            alike.setdefault(_takers(n, after, outside), []).append(n)
        yield from (g for g in alike.values() if len(g) > 1)


def _takers(n: Node, after: dict[Node, list[Node]], outside: set[Node]) -> frozenset[Node | None]:
    """The GEMMs that take up what is made of ``n``; None is among them if it leaves the graph."""
    found: set[Node | None] = set()
    seen, stack = {n}, [n]
    while stack:
        m = stack.pop()
        if m in outside:
            found.add(None)
        for u in after[m]:
            if u.op is ops.MATMUL:
                found.add(u)
            elif u not in seen:
                seen.add(u)
                stack.append(u)
    return frozenset(found)


def _biases(graph: Graph, group: list[Node]) -> list[tuple[Node, Node]] | None:
    """For each sibling the sum with its bias, and the bias, if that sum is all that is made of it: the biases are then
    added to the whole, and their gradients are one sum over it."""
    after = users(graph.roots)
    found: list[tuple[Node, Node]] = []
    for n in group:
        if len(after[n]) != 1 or after[n][0].op is not ops.ADD or n in graph.roots:
            return None
        total = after[n][0]
        bias = total.args[1] if total.args[0] is n else total.args[0]
        if bias.type.kind is not Kind.ROWVEC or bias.op is not ops.INPUT:
            return None
        found.append((total, bias))
    return found


def _is_weight(w: Node) -> bool:
    """A leaf, or a leaf in another dtype: stacking needs no computed operand."""
    return _leaf(w).op is ops.INPUT


def _leaf(w: Node) -> Node:
    return w.args[0] if w.op is ops.CAST else w
