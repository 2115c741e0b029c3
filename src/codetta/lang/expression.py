"""How a node reads in the language: one expression over the texts of its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from codetta.core.node import Node, Op
from codetta.core.types import ROWS, Kind, Type
from codetta.ir import ops
from codetta.ir.split import ADJACENT, Split


@dataclass(frozen=True, slots=True)
class Text:
    """An expression's text, and how tightly its outermost operator binds: ATOM for a name or a call."""

    text: str
    binds: int

    def __str__(self) -> str:
        return self.text


ATOM, PREFIX = 9, 8
INFIX: dict[Op, tuple[str, int]] = {
    ops.MUL: ("*", 7),
    ops.DIV: ("/", 7),
    ops.FLOORDIV: ("//", 7),
    ops.MOD: ("%", 7),
    ops.ADD: ("+", 6),
    ops.SUB: ("-", 6),
    ops.AND: ("&", 5),
    ops.OR: ("|", 4),
    ops.EQ: ("==", 3),
    ops.NE: ("!=", 3),
    ops.LT: ("<", 3),
    ops.LE: ("<=", 3),
    ops.GT: (">", 3),
    ops.GE: (">=", 3),
}
SIGN: dict[Op, str] = {ops.NEG: "-", ops.NOT: "~"}
COMPARISON = 3
TARGET_NAMES = {
    Kind.COLVEC: "row",
    Kind.ROWVEC: "col",
    Kind.GROUPVEC: "inside",
    Kind.TABLE: "groups",
    Kind.SCALAR: "all",
}


def expression(n: Node, operand: Callable[[Node], Text]) -> Text:
    """The text of ``n`` over those of its arguments."""
    if n.op is ops.CONST:
        return number(n.attrs[0])
    args = [operand(a) for a in n.args]
    numbers = [a.op is ops.CONST for a in n.args]
    if n.op in INFIX and _infix(n, numbers):
        sign, binds = INFIX[n.op]
        left, right = args
        loose = binds if binds == COMPARISON else binds - 1  # comparisons chain, the others group to the left
        return Text(f"{_above(left, loose)} {sign} {_above(right, binds)}", binds)
    if n.op in SIGN and not numbers[0]:
        return Text(SIGN[n.op] + _above(args[0], PREFIX), PREFIX)
    if n.op is ops.PART:
        return Text(f"{split_call(n, args[0])}[{n.attrs[1]}]", ATOM)
    name, extra = CALLS.get(n.op, _plain_call)(n)
    return Text(f"{name}({', '.join([*map(str, args), *extra])})", ATOM)


def number(value: object) -> Text:
    """A Python number that reads back as the same constant."""
    if isinstance(value, float) and not math.isfinite(value):
        text = "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    else:
        text = repr(value)
    return Text(text, PREFIX if text.startswith("-") else ATOM)


def size_text(d: object) -> str:
    """A size as annotations spell it."""
    return str(d) if isinstance(d, int) else f'"{d}"'


def type_text(t: Type) -> str:
    """A type as an exact annotation; M rows are understood."""
    rows = [] if t.rows is None or t.rows == ROWS else [size_text(t.rows)]
    cols = [] if t.cols is None else [size_text(t.cols)]
    return f"{t.kind.value}[{', '.join([*rows, *cols, t.dtype.name])}]"


def split_call(n: Node, whole: Text) -> str:
    """The call that gives all parts of which ``n`` is one."""
    name, extra = _split(n.attrs[0])
    return f"{name}({', '.join([str(whole), *extra])})"


def _infix(n: Node, numbers: list[bool]) -> bool:
    """Whether Python would hand the operator to us, with the operands in this order."""
    return not all(numbers) and not (INFIX[n.op][1] == COMPARISON and numbers[0])


def _above(t: Text, limit: int) -> str:
    return t.text if t.binds > limit else f"({t})"


# --- calls with more than the arguments -------------------------------------------------------------------------------

Call = tuple[str, list[str]]  # the function, and what follows the arguments


def _plain_call(n: Node) -> Call:
    return n.op.name, []


def _groups(split: Split) -> list[str]:
    return [f"groups={split.groups}"] if split.groups != 1 else []


def _split(split: object) -> Call:
    if not isinstance(split, Split):
        return "columns", [repr(split)]
    if split == ADJACENT:
        return "adjacent", []
    if split.is_pair:
        return "halves", _groups(split)
    if split.sizes is None:
        return "equal_columns", [str(split.parts), *_groups(split)]
    return "columns", [*map(str, split.sizes), *_groups(split)]


def _join(n: Node) -> Call:
    split = n.attrs[0]
    name, _ = _split(split)
    if not isinstance(split, Split) or name == "adjacent":
        return "join_adjacent", []
    if split.is_pair:
        return "join_halves", _groups(split)
    has_number = any(a.type.kind is Kind.SCALAR for a in n.args)
    sizes = [f"sizes={split.sizes}"] if split.sizes is not None and has_number else []
    return "join_columns", [*_groups(split), *sizes]


def _reduce(n: Node) -> Call:
    fn, to, groups = n.attrs
    target = TARGET_NAMES[to] if isinstance(to, Kind) else "all"
    return f"{fn}_{target}", [f"groups={groups}"] if groups is not None else []


CALLS: dict[Op, Callable[[Node], Call]] = {
    ops.CAST: lambda n: ("to", [str(n.attrs[0])]),
    ops.EXPAND: lambda n: ("expand", [type_text(n.attrs[0]) if isinstance(n.attrs[0], Type) else repr(n.attrs[0])]),
    ops.COLUMN: lambda n: ("column_index", [size_text(n.attrs[0])]),
    ops.ROW: lambda n: ("row_index", [size_text(n.attrs[0])]),
    ops.JOIN: _join,
    ops.STACK: lambda n: ("stack", [f"rows={n.attrs}"]),
    ops.TAKE_ROWS: lambda n: ("take_rows", [str(n.attrs[0]), str(n.attrs[1])]),
    ops.REDUCE: _reduce,
}
