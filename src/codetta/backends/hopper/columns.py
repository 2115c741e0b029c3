"""What lowering asks of a program: how its columns pair, where an output's columns come from, what is zero."""

from __future__ import annotations

from codetta.backends.hopper.lowered import Mode, SinkKind
from codetta.backends.hopper.scalar import FINITE, KEEPS_ZERO, is_zero
from codetta.core.node import Node, postorder
from codetta.core.types import Kind
from codetta.ir import ops
from codetta.ir.program import Program
from codetta.ir.split import Split

Range = tuple[int, int]
ALIGN = 8  # columns: TMA wants rows of whole 16 bytes


class NotLowered(Exception):
    """Why a program is no single kernel; it then runs as a GEMM and a generated map behind it. Never shown to users
    as an error."""


def is_lanes(n: Node) -> bool:
    """A part or a join of two lanes."""
    split = n.attrs[0]
    return n.op in (ops.PART, ops.JOIN) and isinstance(split, Split) and split.is_pair


def depends(n: Node, acc: Node) -> bool:
    """Whether a value is made of the accumulator."""
    return acc in postorder([n])


def mode_of(program: Program, acc: Node) -> tuple[Mode, int]:
    """How the lanes of the accumulator are reached, and how far apart they are in "halves" mode."""
    parts = [n for n in program.body if n.op in (ops.PART, ops.JOIN) and is_lanes(n)]
    lanes = [n for n in parts if n.op is ops.PART and n.type.kind is Kind.TILE and depends(n, acc)]
    adjacent = {isinstance(n.attrs[0], Split) and n.attrs[0].adjacent for n in lanes or parts}
    if len(adjacent) > 1:
        raise NotLowered("lanes of adjacent columns beside lanes in halves")
    if adjacent == {True}:
        if not lanes:
            raise NotLowered("adjacent columns made of values of single columns")
        return "adjacent", 1
    if not lanes:
        return "element", 0
    halves = set()
    for n in lanes:
        split, cols = n.attrs[0], n.args[0].type.cols
        if not isinstance(split, Split) or not isinstance(cols, int):
            raise NotLowered(f"{n}")
        halves.add(cols // (2 * split.groups))
    if len(halves) > 1:
        raise NotLowered(f"lanes of different widths: {sorted(halves)}")
    (half,) = halves
    cols = acc.type.cols
    if isinstance(cols, int) and half * 2 == cols and any(n.type.cols == half for _, n in program.outputs):
        aligned("a lane", half)
        return "pair", half
    if half % 16:
        raise NotLowered(f"halves of {half} columns are no multiple of 16")
    return "halves", half


def range_of(n: Node, acc: Node) -> Range | None:
    """The accumulator's columns that a value comes from, where those are one range of it."""
    found: set[Range] = set()
    for m in postorder([n], stop=lambda m: m.op is ops.PART and not is_lanes(m)):
        if m is acc:
            return None
        if m.op is ops.PART and not is_lanes(m):
            split, index = m.attrs
            if isinstance(split, Split) and isinstance(index, int) and m.type.kind is Kind.TILE:
                whole = m.args[0].type.cols
                if whole != acc.type.cols or not isinstance(whole, int) or split.groups != 1:
                    raise NotLowered("ranges within ranges of columns")
                found.add(split.ranges(whole)[index])
    if len(found) > 1:
        raise NotLowered(f"one output from several ranges of columns: {sorted(found)}")
    return next(iter(found), None)


def sink_kind(root: Node) -> SinkKind:
    """Which reduction of a Tile an output is."""
    if root.op is ops.LSE:
        return "lse"
    if root.op is ops.SELECT:
        return "select"
    if root.op is ops.REDUCE and root.args[0].type.kind is Kind.TILE:
        to = {Kind.COLVEC: "row", Kind.ROWVEC: "col"}.get(root.type.kind)
        if to is not None:
            return f"{to}_{root.attrs[0]}"  # type: ignore[return-value]
    raise NotLowered(f"an output {root.type} by {root.op.name}")


def vanishes(n: Node, over_rows: bool) -> bool:
    """Whether a value is zero where the accumulator and every Tile is, beyond the last row (or column)."""
    if n.op is ops.INPUT:
        along = Kind.COLVEC if over_rows else Kind.ROWVEC
        return n.type.kind in (Kind.TILE, Kind.TABLE, along) or (over_rows and n.type.kind is Kind.GROUPVEC)
    if n.op is ops.CONST:
        return is_zero(n)
    if n.op is ops.MUL:
        a, b = n.args
        return (vanishes(a, over_rows) and finite(b)) or (vanishes(b, over_rows) and finite(a))
    if n.op is ops.WHERE:
        return all(vanishes(a, over_rows) for a in n.args[1:])
    zero = n.op in KEEPS_ZERO or n.op in (ops.ADD, ops.SUB, ops.CAST, ops.PART, ops.JOIN)
    return zero and all(vanishes(a, over_rows) for a in n.args)


def finite(n: Node) -> bool:
    """Whether a value is finite where what is loaded is."""
    if n.op in (ops.INPUT, ops.CONST):
        return True
    return (n.op in FINITE or n.op in (ops.PART, ops.JOIN, ops.WHERE)) and all(finite(a) for a in n.args)


def aligned(what: str, width: int) -> None:
    """NotLowered where a view of columns would begin at an odd address."""
    if width % ALIGN:
        raise NotLowered(f"{what} of {width} columns is no multiple of {ALIGN}")
