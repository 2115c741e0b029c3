"""What forward keeps for backward: the cheapest set of values from which backward can compute the rest by maps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Literal

import networkx as nx

from codetta.core.node import Node, postorder, substitute
from codetta.errors import PlanError
from codetta.ir import ops
from codetta.ir.build import cast, input_
from codetta.ir.graph import Graph
from codetta.partition.assign import compared, operands, storage_dtypes
from codetta.partition.schedule import Time, schedule
from codetta.partition.size import bytes_of

# fast keeps every operand of a weight gradient; balanced makes those again that are wider than what their GEMM
# produces (SwiGLU's y); lean makes all of them again that an epilogue of backward has at hand (the norm's h too)
Memory = Literal["fast", "balanced", "lean"]
MEMORY: tuple[Memory, ...] = ("fast", "balanced", "lean")
_SUMS = (ops.REDUCE, ops.LSE, ops.SELECT)


@dataclass(frozen=True, slots=True)
class Kept:
    """A value that passes from forward to backward: the node it stands for, what is stored of it (rounded, for a Tile),
    its name among backward's inputs and among forward's outputs."""

    node: Node
    stored: Node
    name: str
    output: str


@dataclass(frozen=True, slots=True)
class Joint:
    """The halves of a training step. Backward's inputs are forward's inputs, kept values and cotangents, by name."""

    forward: Graph
    backward: Graph
    kept: tuple[Kept, ...]


def recomputable(forward: Graph, grads: Iterable[Node], memory: Memory) -> list[Node]:
    """The operands of weight gradients that the memory mode would make again in backward."""
    found: dict[Node, None] = {}
    made = {a: n for n in forward.contractions for a in n.args}
    for n in postorder(grads):
        if n.op is ops.MATMUL and n.attrs[0] == "tn":
            for a in n.args:
                gemm = made.get(a)
                if a.op is not ops.INPUT and a.op is not ops.MATMUL and gemm is not None:
                    wide = bytes_of(a.type.of(a.type.dtype)) > bytes_of(gemm.type.of(a.type.dtype))
                    if memory == "lean" or (memory == "balanced" and wide):
                        found[a] = None
    return list(found)


def cut(
    forward: Graph,
    grads: Mapping[str, Node],
    cotangents: Iterable[Node],
    again: Iterable[Node] = (),
    only: Iterable[Kept] | None = None,
    inputs_held: Collection[str] = (),
) -> Joint:
    """Split the joint graph. ``again`` are stored forward values that backward shall nevertheless make again; with
    ``only``, nothing but these and the named inputs may pass; PlanError where they do not suffice."""
    roots = list(grads.values())
    late = _depending_on(set(cotangents), roots)
    exact = compared(postorder(roots))
    again = set(again) - exact
    stored = _stored(forward, again, exact)
    needed = _needed(roots, late)
    time = schedule([*forward.roots, *needed]).time
    nodes = set(forward.nodes)
    # a reduction that is new and no epilogue's is a pass over a Tile, which backward makes as well
    had = {n for n in postorder(needed) if n.op in _SUMS and (n in nodes or time[n][1] < 2)}
    if only is None:
        # an operand of backward's GEMMs that forward stored: keeping it moves nothing
        free = {a for n in postorder(roots) if n in late and n.op is ops.MATMUL for a in n.args if a in stored}
        chosen = _cheapest(needed, had, lambda n: 0 if n in free else _capacity(n, stored, again, time))
        kept = _named(forward, chosen, stored, exact)
    else:
        kept = list(only)
        allowed = {n for k in kept for n in (k.node, k.stored)}
        chosen = _cheapest(needed, had, lambda n: 0 if n in allowed or _is_held(n, inputs_held) else None)
        kept = [k for k in kept if k.node in chosen or k.stored in chosen]
    mapping: dict[Node, Node] = {}
    for k in kept:
        mapping[k.stored] = mapping[k.node] = input_(k.name, k.stored.type)
    bodies = substitute(roots, mapping)
    inputs = tuple(n for n in postorder(bodies) if n.op is ops.INPUT)
    outputs = {**dict(forward.outputs), **{k.output: k.stored for k in kept}}
    backward = Graph(inputs, tuple(zip(grads, bodies, strict=True)))
    return Joint(Graph(forward.inputs, tuple(outputs.items())), backward, tuple(kept))


def _named(forward: Graph, chosen: list[Node], stored: dict[Node, Node], exact: set[Node]) -> list[Kept]:
    """The chosen values as they are stored: rounded if anything rounded is there, under the name of an output if it
    is one."""
    names = {n: name for name, n in reversed(forward.outputs)}
    taken = {*dict(forward.outputs), *(str(n.attrs[0]) for n in forward.inputs)}
    storage = storage_dtypes([*forward.roots, *chosen])
    found: list[Kept] = []
    for n in chosen:
        if n.op is ops.INPUT:
            continue
        value = stored.get(n, n)
        if value not in stored and value not in exact:
            value = cast(value, storage.get(value, value.type.dtype))
        output = names.get(value)
        if output is None:
            output = next(name for i in count() if (name := f"saved{i}") not in taken)
            names[value] = output
            taken.add(output)
        found.append(Kept(n, value, output if output.startswith("saved") else f"saved_{output}", output))
    return found


def _is_held(n: Node, inputs: Collection[str]) -> bool:
    return n.op is ops.INPUT and n.attrs[0] in inputs


def _depending_on(sources: set[Node], roots: list[Node]) -> set[Node]:
    found = set(sources)
    for n in postorder(roots):
        if any(a in found for a in n.args):
            found.add(n)
    return found


def _stored(forward: Graph, again: set[Node], exact: set[Node]) -> dict[Node, Node]:
    """Forward values that are in memory anyway, with what they are in memory as: a rounded value serves for itself."""
    found: dict[Node, Node] = {}
    storage = storage_dtypes(forward.roots)
    for n in [*forward.roots, *(a for g in forward.contractions for a in operands(g))]:
        if n in again or n.op is ops.INPUT:
            continue
        found[n] = n
        inner = n.args[0] if n.op is ops.CAST else n
        if inner.op is not ops.INPUT and inner not in exact and storage.get(inner) is n.type.dtype:
            found.setdefault(inner, n)
    return found


def _needed(roots: list[Node], late: set[Node]) -> list[Node]:
    """The forward values that backward's own nodes take as arguments."""
    found: dict[Node, None] = {}
    for n in postorder(roots):
        for a in n.args if n in late else ():
            for part in a.args if a.op is ops.STACK else (a,):
                if part not in late and part.op is not ops.CONST:
                    found[part] = None
    found.update((r, None) for r in roots if r not in late)
    return list(found)


def _cheapest(needed: list[Node], had: set[Node], capacity_of: Callable[[Node], int | None]) -> list[Node]:
    """A minimum cut, by bytes written and read, between what cannot be computed again (inputs, GEMMs, and the sums that
    forward ``had``) and what is needed.

    Of equal cuts the one nearest to backward is taken, so a scaled value rather than the raw accumulator."""
    exact = compared(postorder(needed))
    flow: nx.DiGraph[object] = nx.DiGraph()
    flow.add_nodes_from(("need", "have"))
    for n in postorder(needed):
        capacity = capacity_of(n)
        flow.add_edge((n, "in"), (n, "out"), **({} if capacity is None else {"capacity": capacity}))
        for a in n.args:
            flow.add_edge((a, "out"), (n, "in"))
        if n.op in (ops.INPUT, ops.MATMUL) or n in had or n in exact:
            flow.add_edge("have", (n, "in"))
    for n in needed:
        flow.add_edge((n, "out"), "need")
    try:
        _, (_, near) = nx.minimum_cut(flow, "have", "need")  # near: all that can reach "need" once the cut is made
    except nx.NetworkXUnbounded as e:
        raise PlanError("what forward keeps does not suffice for these gradients") from e
    return [n for n in postorder(needed) if (n, "out") in near and (n, "in") not in near]


def _capacity(n: Node, stored: dict[Node, Node], again: set[Node], time: dict[Node, Time]) -> int | None:
    """What keeping ``n`` costs in bytes; None where it cannot be kept. What only a leftover of forward could make is
    read there once more."""
    if n in again or (not n.args and n.op is not ops.INPUT):
        return None
    if n.op is ops.INPUT or n in stored:
        return 1 + bytes_of(stored.get(n, n).type)
    if n.op is ops.PART:
        return None  # the whole is kept
    return 2 * bytes_of(n.type) * (2 if n.op is ops.MATMUL or time[n][1] >= 2 else 1)
