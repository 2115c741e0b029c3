"""A program as launches: usually one; several where a value is needed that only the end of another launch knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from codetta.backends.hopper.rows.emit import known
from codetta.core.node import Node, node, postorder, substitute
from codetta.core.types import Dim, Kind
from codetta.ir import ops
from codetta.ir.program import Program
from codetta.partition.plan import partial_outputs

WHOLE_ROW = 8192  # columns that a kernel can hold at once, where sums over rows need the row's own reductions


@dataclass(frozen=True, slots=True)
class Output:
    """A value that a launch stores: in ``slot`` of the program's results, or for a later launch where ``temporary``
    is its parameter there. ``value`` is what is computed, at rows or columns: a turned vector is stored as it is."""

    value: Node
    slot: int
    in_parts: bool
    temporary: Node | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """Outputs that one kernel computes over the same rows, or over columns alone (``rows`` is None)."""

    rows: Dim | None
    outputs: tuple[Output, ...]


def is_global(n: Node) -> bool:
    """A reduction that a kernel knows only when all its blocks are done."""
    if n.op is not ops.REDUCE:
        return False
    source = n.args[0].type
    return (source.rows is not None and n.type.rows is None) or source.kind is Kind.ROWVEC


def is_row_reduction(n: Node) -> bool:
    """A reduction over the columns of each row."""
    return n.op is ops.LSE or (n.op is ops.REDUCE and n.attrs[1] is Kind.COLVEC)


def by_group(n: Node) -> bool:
    """A reduction inside groups of columns."""
    return n.op is ops.REDUCE and n.attrs[1] is Kind.GROUPVEC


def launches(program: Program, partial: Mapping[str, Node]) -> tuple[list[Launch], dict[Node, Node]]:
    """The launches in order, and for each parameter (the temporaries between launches too) that comes in parts the
    reduction that made it."""
    parts = {p: partial[str(p.attrs[0])] for p in program.params if str(p.attrs[0]) in partial}
    wanted = [
        Output(n, i, in_parts)
        for i, ((_, n), in_parts) in enumerate(zip(program.outputs, partial_outputs(program), strict=True))
    ]
    done: list[Launch] = []
    while early := _needed_early(wanted):
        temporaries = {n: node(ops.INPUT, attrs=(f"between_{len(parts)}_{i}", n.type)) for i, n in enumerate(early)}
        for n, t in temporaries.items():
            in_parts = n.type.kind is Kind.ROWVEC and is_global(n)
            done += _grouped([Output(n, -1, in_parts, t)])
            if in_parts:
                parts[t] = n
        values = substitute([o.value for o in wanted], temporaries)
        wanted = [Output(v, o.slot, o.in_parts, o.temporary) for o, v in zip(wanted, values, strict=True)]
    return done + _grouped(wanted), parts


def _needed_early(wanted: list[Output]) -> list[Node]:
    """Values that must be whole in memory before the launch that computes these outputs."""
    depth: dict[Node, int] = {}
    below: dict[Node, frozenset[Node]] = {}
    for n in postorder(o.value for o in wanted):
        depth[n] = max((depth[a] + is_global(a) for a in n.args), default=0)
        own = [frozenset([a]) if is_global(a) else below[a] for a in n.args]
        below[n] = frozenset().union(*own)
    found: dict[Node, None] = {}
    for o in wanted:
        n = o.value
        sources = below[n] | ({n} if is_global(n) else frozenset())
        whole = n.type.kind is Kind.SCALAR and not o.in_parts
        simple = whole and len({_key_of_source(s) for s in sources}) <= 1 and all(depth[s] == 0 for s in sources)
        if below[n] and not simple:
            found.update(dict.fromkeys(s for s in _all_below(n) if depth[s] == 0 and s is not n))
        if (n.type.kind is Kind.ROWVEC and is_global(n)) and not _fits_whole_rows(wanted):
            found.update(dict.fromkeys(m for m in postorder(n.args) if is_row_reduction(m)))
    return [n for n in found if not any(m in found for m in postorder(n.args))]


def _all_below(n: Node) -> list[Node]:
    return [m for m in postorder([n]) if is_global(m)]


def _fits_whole_rows(wanted: list[Output]) -> bool:
    """Whether rows are short enough to be held whole, all of them; groups are looked at one after the other."""
    every = postorder(o.value for o in wanted)
    short = all(known(m.type.cols) <= WHOLE_ROW for m in every if m.type.kind is Kind.TILE)
    return short and not any(map(by_group, every))


def _key_of_source(n: Node) -> Dim | str:
    rows = n.args[0].type.rows
    return "columns" if rows is None else rows


def _stored(o: Output) -> Output:
    """The output, a turned vector as the vector that it is in memory."""
    value = o.value
    while value.op is ops.TURN:
        value = value.args[0]
    return Output(value, o.slot, o.in_parts, o.temporary)


def _grouped(wanted: list[Output]) -> list[Launch]:
    """Outputs over the same rows together; numbers where what they are made of is summed."""
    groups: dict[Dim | None, list[Output]] = {}
    alone: list[Output] = []
    for o in map(_stored, wanted):
        n = o.value
        sources = [s for s in _all_below(n) if not any(is_global(m) for m in postorder(s.args))]
        if n.type.rows is not None:
            groups.setdefault(n.type.rows, []).append(o)
        elif sources:
            groups.setdefault(sources[0].args[0].type.rows, []).append(o)
        elif n.type.kind is Kind.SCALAR:
            alone.append(o)
        else:
            groups.setdefault(None, []).append(o)
    if alone:
        groups.setdefault(next(iter(groups), None), []).extend(alone)
    return [launch for rows, outputs in groups.items() for launch in _separated(rows, outputs)]


def in_blocks(outputs: Sequence[Output]) -> bool:
    """Whether each block of rows stores its part of all sums over rows: beside values that are computed group by group,
    where to read everything again would cost more than the parts."""
    sums = [o for o in outputs if is_global(o.value)]
    grouped = any(map(by_group, postorder(o.value for o in outputs)))
    apart = any(o.value.type.rows is not None for o in outputs)
    return grouped and apart and bool(sums) and all(o.in_parts and o.value.type.kind is Kind.ROWVEC for o in sums)


def _separated(rows: Dim | None, outputs: list[Output]) -> list[Launch]:
    """Sums over rows in a launch of their own, where rows are too long to be held whole and something else is
    computed per row; but not where every block of rows may store its own part of them."""
    sums = [o for o in outputs if o.value.type.kind is Kind.ROWVEC and rows is not None]
    rest = [o for o in outputs if o not in sums]
    per_row = any(is_row_reduction(m) or m.op is ops.SELECT for o in rest for m in postorder([o.value]))
    per_row |= any(o.value.type.kind in (Kind.COLVEC, Kind.SCALAR) for o in rest)
    if sums and rest and per_row and not _fits_whole_rows(outputs) and not in_blocks(outputs):
        return [Launch(rows, tuple(rest)), Launch(rows, tuple(sums))]
    return [Launch(rows, tuple(outputs))]
