"""Each map and reduction into a step: stored is what a later step reads, the rest is computed where it is needed.

The steps are built from the last to the first, so that what a step must write is known when it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from codetta.core.node import Node, node, postorder
from codetta.core.types import DType, Kind, f32
from codetta.ir import ops
from codetta.ir.graph import Graph
from codetta.partition.schedule import START, Schedule, Time, schedule
from codetta.partition.size import bytes_of


@dataclass(frozen=True, slots=True)
class Slot:
    """A value in memory: whole, or (``partial``) one part per tile, to be folded by a finalize."""

    node: Node
    partial: bool = False


@dataclass(slots=True)
class Draft:
    """A step before it is named: its GEMM if it has one, what it writes, and from where it reads which values."""

    time: Time
    gemm: Node | None
    writes: list[Slot]
    reads: dict[Node, Slot] = field(default_factory=dict)
    computed: set[Node] = field(default_factory=set)

    @property
    def is_finalize(self) -> bool:
        """Works on vectors, behind a step that wrote partials."""
        return self.time[1] % 2 == 1


@dataclass(slots=True)
class Assignment:
    """All drafts in order of execution."""

    drafts: list[Draft]
    schedule: Schedule


def operands(gemm: Node) -> list[Node]:
    """The operands of a GEMM; stacked weights one by one, as nobody stacks them in memory."""
    return [p for a in gemm.args for p in (a.args if a.op is ops.STACK else (a,))]


def stored_root(n: Node) -> Node:
    """The value that must be in memory for ``n`` to be an output: rows of a stacked gradient are a view."""
    return n.args[0] if n.op is ops.TAKE_ROWS and n.args[0].op is not ops.INPUT else n


def compared(nodes: Iterable[Node]) -> set[Node]:
    """Tiles that are compared with their own largest element: every step must see the same bits of them, so they are
    never made again nor rounded on the way (the derivative of a maximum)."""
    both = (_source(a) for n in nodes if n.op is ops.EQ for a in n.args)
    return {a for a in both if a.type.dtype.is_float and a.type.kind is Kind.TILE and a.op is not ops.INPUT}


def _source(n: Node) -> Node:
    """What ``n`` can be made of again without loss."""
    return _source(n.args[0]) if n.op in (ops.ABS, ops.PART) else n


def storage_dtypes(roots: Iterable[Node]) -> dict[Node, DType]:
    """The dtype in which each Tile is stored between steps. Arithmetic is wider than what it works on: a Tile is stored
    as the Tiles from outside and the operands of GEMMs are that it is made of, where these are all the same. A Tile of
    vectors alone (LayerNorm's mean times column sums) has no say in what it is added to."""
    found: dict[Node, DType] = {}
    for n in postorder(roots):
        if n.type.kind is Kind.TILE and n.type.dtype.is_float:
            made_of = {found[a] for a in (n.args[:1] if n.op is ops.MATMUL else n.args) if a in found}
            if not made_of and n.args and n.op is not ops.CAST:
                continue
            one = made_of.pop() if len(made_of) == 1 else n.type.dtype
            found[n] = one if one.bytes < n.type.dtype.bytes else n.type.dtype
    return found


def own_roots(graph: Graph) -> list[tuple[str, Node]]:
    """The outputs; one that is an input is copied to a buffer of its own."""
    copies = ((name, n.op is ops.INPUT, n) for name, n in graph.outputs)
    return [(name, node(ops.EXPAND, n, attrs=(n.type.of(f32),)) if is_input else n) for name, is_input, n in copies]


def assign(graph: Graph, epilogues: bool = True) -> Assignment:
    """Distribute the graph over steps; without ``epilogues``, GEMMs only store their output."""
    work = _Assign([n for _, n in own_roots(graph)], epilogues)
    times = {*work.time.values(), *((i, 0) for i in range(len(work.order) + 1))}
    for t in sorted({(i, s + d) for i, s in times for d in (0, 1, 2)} - {START}, reverse=True):
        work.build(t)
    return Assignment(_first_writers(work.drafts[::-1]), work.schedule)


class _Assign:
    """The walk: what is written when, as far as the steps built so far (the later ones) need it."""

    def __init__(self, roots: list[Node], epilogues: bool) -> None:
        self.schedule = schedule(roots, epilogues)
        self.order, self.time = self.schedule.order, self.schedule.time
        self.drafts: list[Draft] = []
        self.exact = compared(self.time)
        storage = storage_dtypes(roots)
        self.first_use: dict[Node, int] = {}
        for i, gemm in enumerate(self.order, 1):
            for a in operands(gemm):
                self.first_use.setdefault(a, i)
        self.written: dict[Slot, Time] = {}
        self.rounded: dict[Node, Node] = {}  # a value, as the rounded one that is stored anyway
        for n in [*self.first_use, *(stored_root(r) for r in roots)]:
            if n.op is not ops.INPUT:
                self.need(n)
                if n.op is ops.CAST and n.args[0].op is not ops.INPUT and storage.get(n.args[0]) is n.type.dtype:
                    self.rounded.setdefault(n.args[0], n)
        for n in [r for r in self.rounded if r in self.exact or r in roots]:
            del self.rounded[n]  # asked for unrounded as well

    def need(self, n: Node) -> Slot:
        """Have ``n`` written where it is first known."""
        slot = Slot(n)
        i, s = self.time[n]
        if n.op is ops.SELECT and s % 2 == 1:  # complete when its epilogue is done: nothing to fold
            s -= 1
        self.written[slot] = (i, s) if (i, s) != START else (0, 1)  # a vector made of inputs alone
        return slot

    def build(self, t: Time) -> None:
        """Draft the steps at one time."""
        gemm = self.order[t[0] - 1] if t[1] == 0 else None
        writes = [slot for slot, at in self.written.items() if at == t]
        groups = [writes] if gemm is not None else connected(writes, lambda slot: self._shared(slot, t))
        for group in groups:
            draft = Draft(t, gemm, group)
            for slot in group:
                self._fill(draft, slot.node)
            self._host(draft)
            self.drafts.append(draft)

    def _fill(self, d: Draft, output: Node) -> None:
        """Walk from an output to what must be read; what must be read is written by an earlier step."""
        d.computed.add(output)
        stack = [output]
        first = True
        while stack:
            n = stack.pop()
            slot = None if first else self._read(n, d)
            if first and n is not d.gemm and self._folded(n, d.time) is not None:
                slot = self._folded(n, d.time)
            first = False
            if slot is not None:
                d.reads[n] = slot
            elif n is not d.gemm:
                d.computed.add(n)
                stack.extend(a for a in reversed(n.args) if a not in d.computed or a is output)

    def _folded(self, n: Node, t: Time) -> Slot | None:
        """In a finalize, the reduction of a Tile that the step just before wrote in parts."""
        if t[1] % 2 == 0 or self.time[n] != t or not n.args or n.args[0].type.kind is not Kind.TILE:
            return None
        slot = Slot(n, n.op is not ops.SELECT)
        self.written[slot] = (t[0], t[1] - 1)
        return slot

    def _read(self, n: Node, d: Draft) -> Slot | None:
        """The slot from which a step reads ``n``, or None if it computes it."""
        if n.op is ops.INPUT:
            return Slot(n)
        if not n.args or n is d.gemm:
            return None
        t = self.time[n]
        if t == d.time:
            return self._folded(n, d.time)
        if d.is_finalize and self._from_vectors(n):
            return None
        if self._in_memory(n, d.time):
            return Slot(self.rounded.get(n, n))
        if n.type.kind is not Kind.TILE:
            return None if t == START else self.need(n)
        # what a leftover would make is made here; of a value taken in parts, the whole is stored
        if n not in self.exact and (t[1] >= 2 or n.op is ops.PART or self._cheap(n, d)):
            return None
        return self.need(n)

    def _in_memory(self, n: Node, t: Time) -> bool:
        return n.op is ops.INPUT or self.written.get(Slot(self.rounded.get(n, n)), t) < t

    def _from_vectors(self, n: Node) -> bool:
        return all(m.type.kind is not Kind.TILE for m in postorder([n]))

    def _leaves(self, n: Node, t: Time) -> list[Node]:
        """The Tiles in memory, or GEMMs, from which ``n`` is computed by maps."""
        inside = postorder([n], stop=lambda m: m is not n and self._is_leaf(m, t))
        return [m for m in inside if m.type.kind is Kind.TILE and (m is not n or not m.args) and self._is_leaf(m, t)]

    def _is_leaf(self, n: Node, t: Time) -> bool:
        return n.type.kind is not Kind.TILE or n.op is ops.MATMUL or self._in_memory(n, t)

    def _cheap(self, n: Node, d: Draft) -> bool:
        """Whether computing ``n`` again reads no more than storing and reading it would move."""
        if n.op is ops.MATMUL:
            return False
        leaves = self._leaves(n, d.time)
        if any(not self._in_memory(m, d.time) for m in leaves):
            return False
        extra = sum(bytes_of(m.type) for m in leaves if m not in d.reads)
        return extra <= 2 * bytes_of(n.type)

    def _host(self, d: Draft) -> None:
        """Write here what an earlier leftover would have to write, where this step has all of it at hand."""
        for slot, t in list(self.written.items()):
            n = slot.node
            if slot.partial or t >= d.time or slot in d.reads.values() or not n.args:
                continue
            if d.is_finalize:
                if t[1] % 2 == 1 and n in d.computed and self._from_vectors(n):
                    self._move(d, slot)
            elif d.gemm is not None and t[1] >= 2 and t[1] % 2 == 0 and n.type.kind is Kind.TILE:
                late = self.first_use.get(n, len(self.order) + 1) > d.time[0]
                if late and n.type.rows == d.gemm.type.rows and self._at_hand(slot, d):
                    self._move(d, slot)

    def _at_hand(self, slot: Slot, d: Draft) -> bool:
        """Whether the step reads every Tile from which the slot's value is made, were it not written elsewhere."""
        before = self.written.pop(slot)
        leaves = self._leaves(slot.node, d.time)
        self.written[slot] = before
        return bool(leaves) and all(m in d.reads for m in leaves)

    def _move(self, d: Draft, slot: Slot) -> None:
        self.written[slot] = d.time
        d.writes.append(slot)
        self._fill(d, slot.node)

    def _shared(self, slot: Slot, t: Time) -> list[Node]:
        """What ties outputs into one finalize (the partials) or one leftover (the Tiles)."""
        n = slot.node
        inside = postorder([n], stop=lambda m: m is not n and (self._in_memory(m, t) or self._folded(m, t) is not None))
        if t[1] % 2 == 1:
            return [m for m in inside if self._folded(m, t) is not None] or [n]
        return [m for m in inside if m.type.kind is Kind.TILE] or [n]


def connected(items: Iterable[Slot], keys: Callable[[Slot], list[Node]]) -> list[list[Slot]]:
    """Items in groups, two in one group where they share a key, directly or through others."""
    groups: list[tuple[set[Node], list[Slot]]] = []
    for item in items:
        found = set(keys(item))
        touching = [g for g in groups if not g[0].isdisjoint(found)]
        merged = (found.union(*(g[0] for g in touching)), [x for g in touching for x in g[1]] + [item])
        groups = [g for g in groups if g not in touching] + [merged]
    return [members for _, members in groups]


def _first_writers(drafts: list[Draft]) -> list[Draft]:
    """Each slot is written once, by the earliest step that does; a step that writes nothing is dropped."""
    seen: set[Slot] = set()
    for d in drafts:
        d.writes = [s for s in dict.fromkeys(d.writes) if s not in seen]
        seen.update(d.writes)
    return [d for d in drafts if d.writes]
