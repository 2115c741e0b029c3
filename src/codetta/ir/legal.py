"""What may be computed where: the block-local rule of epilogues, the row-local rule of leftovers.

This is the only statement of what fuses; the language enforces it and the partition asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from codetta.core.node import Node, postorder
from codetta.core.types import AXES, Kind
from codetta.errors import SourceLine
from codetta.ir import ops
from codetta.ir.split import Split

# Where an element of a tile lives, relative to the accumulator's columns: None is "anywhere" (a load can be made at
# any coordinates), ACC is the accumulator's own place; parts and joins of columns wrap a place.
Home = tuple[object, ...] | None
ACC: Home = ("acc",)

WAY_OUT = "reduce it to a partial here, finalize, and use the result in the next program's epilogue"


@dataclass(frozen=True, slots=True)
class Violation:
    """Why a set of values cannot be computed in one program."""

    reason: str
    hint: str
    node: Node

    @property
    def where(self) -> SourceLine | None:
        """The line that made the node."""
        return self.node.where


Tell = Callable[[Node], str]


def why_not(role: str, roots: Iterable[Node], acc: Node | None = None, tell: Tell = repr) -> Violation | None:
    """The reason these values cannot be one epilogue, leftover or finalize, or ``None`` if they can; ``tell`` gives
    the words for a value."""
    roots = list(roots)
    order = postorder(roots)
    contraction = next((n for n in order if n.op is ops.MATMUL), None)
    if contraction is not None:
        return Violation(
            f"a {role} holds no further GEMM, found {tell(contraction)}", "one GEMM per program", contraction
        )
    if role == "finalize":
        wide = next((n for n in order if n.type.kind is Kind.TILE), None)
        return (
            None
            if wide is None
            else Violation(f"a finalize works on vectors, not on the Tile {tell(wide)}", "use a leftover", wide)
        )
    return _crossing(role, order, tell) or (_columns(order, acc, tell) if role == "epilogue" else None)


def crosses(role: str, n: Node) -> bool:
    """Whether ``n`` is only known when other tiles (of an epilogue) or other rows (of a leftover) are done too."""
    if n.op in (ops.LSE, ops.SELECT):
        return role == "epilogue"
    if n.op is not ops.REDUCE:
        return False
    lost = AXES[n.args[0].type.kind] - AXES[n.type.kind]
    if role == "leftover":
        return "m" in lost
    return lost != {"i"}  # the inside of a group lies in one tile


def _crossing(role: str, order: list[Node], tell: Tell) -> Violation | None:
    other = "tiles" if role == "epilogue" else "rows"
    for n in order:
        if crosses(role, n) and n.args[0].type.kind is not Kind.TILE:
            reason = f"{tell(n)} reduces a vector, which is not whole inside one program"
            return Violation(reason, "do it in a finalize", n)
        for a in n.args:
            if crosses(role, a):
                reason = f"{tell(n)} needs {tell(a)}, which crosses {other}: it is known only when all {other} are done"
                return Violation(reason, WAY_OUT, n)
    return None


def _columns(order: list[Node], acc: Node | None, tell: Tell) -> Violation | None:
    homes: dict[Node, Home] = {}
    for n in order:
        if n is acc:
            homes[n] = ACC
            continue
        try:
            homes[n] = home_of(n, [homes[a] for a in n.args])
        except CrossColumns as e:
            hint = "take the two parts as a pair (halves or adjacent), or store them and combine in the next program"
            return Violation(f"{tell(n)} combines columns that lie in different tiles: {e}", hint, n)
    return None


class CrossColumns(Exception):
    """Raised inside this module and the partition when columns of different tiles meet."""


def home_of(n: Node, homes: list[Home]) -> Home:
    """Where the elements of ``n`` live, given where its arguments' do; raises CrossColumns."""
    if n.op is ops.PART and isinstance(split := n.attrs[0], Split):
        return _part_home(split, n.attrs[1], homes[0])
    if n.op is ops.JOIN and isinstance(split := n.attrs[0], Split):
        return _join_home(split, homes)
    if n.type.kind is not Kind.TILE:
        return None
    return _agree([h for h in homes if h is not None])


def _agree(homes: list[Home]) -> Home:
    if any(h != homes[0] for h in homes):
        raise CrossColumns(" and ".join(_place(h) for h in dict.fromkeys(homes)))
    return homes[0] if homes else None


def _part_home(split: Split, index: object, home: Home) -> Home:
    if home is None:
        return None
    if split.is_pair:
        return home[2] if home[:2] == ("double", split) else ("lane", split, home)  # type: ignore[return-value]
    return ("range", split, home, index)


def _join_home(split: Split, homes: list[Home]) -> Home:
    if all(h is None for h in homes):
        return None
    if split.is_pair:
        inner = _agree([h for h in homes if h is not None])
        return inner[2] if inner is not None and inner[:2] == ("lane", split) else ("double", split, inner)  # type: ignore[return-value]
    outer: list[Home] = []
    for i, h in enumerate(homes):
        if h is not None:
            if h[:2] != ("range", split) or h[3] != i:
                raise CrossColumns(f"part {i} of a join comes from {_place(h)}")
            outer.append(h[2])  # type: ignore[arg-type]
    return _agree(outer)


def _place(home: Home) -> str:
    if home is None:
        return "a load"
    if home[0] == "acc":
        return "the accumulator's columns"
    inner = _place(home[2])  # type: ignore[arg-type]
    if home[0] == "range":
        return f"range {home[3]} of {inner}"
    return f"a lane of {inner}" if home[0] == "lane" else f"a pair over {inner}"
