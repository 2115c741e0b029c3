"""Small questions about nodes that several rules ask."""

from __future__ import annotations

from collections.abc import Iterator

from codetta.core.node import Node, Op, node
from codetta.core.types import Kind, Type, bf16, f32, rowvec, tile
from codetta.core.types import colvec as colvec_type
from codetta.errors import ShapeError
from codetta.ir import ops
from codetta.ir.build import input_

LINEAR_ROW = {ops.NEG, ops.PART, ops.CAST}


def is_number(n: Node, value: float) -> bool:
    """Whether ``n`` is the constant ``value``."""
    return n.op is ops.CONST and not isinstance(n.attrs[0], bool) and n.attrs[0] == value


def is_const(n: Node) -> bool:
    """Whether ``n`` is a number."""
    return n.op is ops.CONST and not isinstance(n.attrs[0], bool)


def number(n: Node) -> float | int:
    """The value of a constant."""
    value = n.attrs[0]
    return value if isinstance(value, float | int) else float("nan")


EXACT = {ops.EQ, ops.NE, ops.LT, ops.LE, ops.GT, ops.GE, ops.ABS}  # what a largest element is found again by


def is_arithmetic(n: Node) -> bool:
    """An elementwise map that computes in the compute dtype, whatever its operands' storage: no cast, no repetition."""
    return n.op.family == "map" and n.op not in (ops.CAST, ops.EXPAND)


def either_way(n: Node, op: Op) -> Iterator[tuple[Node, Node]]:
    """The two arguments of a commutative op, in both orders, if ``n`` is that op."""
    if n.op is op:
        yield n.args[0], n.args[1]
        yield n.args[1], n.args[0]


def row_scaled(n: Node) -> tuple[Node, Node] | None:
    """(x, r) if ``n`` is x * r with x a Tile and r one number per row."""
    for x, r in either_way(n, ops.MUL):
        if x.type.kind is Kind.TILE and r.type.kind is Kind.COLVEC:
            return x, r
    return None


def rebuilt(n: Node, *args: Node) -> Node:
    """``n`` with other arguments."""
    return node(n.op, *args, attrs=n.attrs, where=n.where)


def rebuilt_if_fitting(n: Node, *args: Node) -> Node | None:
    """As ``rebuilt``; None where these do not fit: tables of 3 and of 6 columns meet at full width only."""
    try:
        return rebuilt(n, *args)
    except ShapeError:
        return None


# leaves of the rules' examples: the sizes are small, different, and good for groups of 2 and 3
def x_tile(name: str = "x", cols: int = 12) -> Node:
    """A Tile with symbolic rows."""
    return input_(name, tile(cols))


def weight(name: str = "w", rows: int = 18, cols: int = 12) -> Node:
    """A weight with static rows."""
    return input_(name, tile(cols, rows=rows))


def gain(name: str = "g", cols: int = 12) -> Node:
    """A RowVec."""
    return input_(name, rowvec(cols))


def scale(name: str = "r") -> Node:
    """A ColVec."""
    return input_(name, colvec_type())


def narrow(n: Node) -> Node:
    """``n`` rounded to bf16."""
    return node(ops.CAST, n, attrs=(bf16,))


def shape_of(kind: Kind, cols: int = 12) -> Type:
    """A float32 type of a kind."""
    return {Kind.TILE: tile(cols), Kind.ROWVEC: rowvec(cols), Kind.COLVEC: colvec_type()}.get(kind, Type(kind, f32))
