"""Builders of nodes: one small function an op, broadcasting and constants as in Python arithmetic."""

from __future__ import annotations

from codetta.core.node import Node, Op, node
from codetta.core.types import Dim, DType, Kind, Type, f32
from codetta.ir import ops
from codetta.ir.split import Split

Value = Node | float | int | bool


def const(value: float | int | bool) -> Node:
    """A number, weakly typed."""
    return node(ops.CONST, attrs=(value,))


def as_node(value: Value) -> Node:
    """A node as it is, a Python number as a constant."""
    return value if isinstance(value, Node) else const(value)


def input_(name: str, type_: Type) -> Node:
    """A named leaf."""
    return node(ops.INPUT, attrs=(name, type_))


def apply(op: Op, *args: Value) -> Node:
    """An elementwise map of the table on nodes and numbers."""
    return node(op, *(as_node(a) for a in args))


def add(a: Value, b: Value) -> Node:
    """a + b."""
    return apply(ops.ADD, a, b)


def sub(a: Value, b: Value) -> Node:
    """a - b."""
    return apply(ops.SUB, a, b)


def mul(a: Value, b: Value) -> Node:
    """a * b."""
    return apply(ops.MUL, a, b)


def div(a: Value, b: Value) -> Node:
    """a / b."""
    return apply(ops.DIV, a, b)


def neg(a: Value) -> Node:
    """-a."""
    return apply(ops.NEG, a)


def where(condition: Value, a: Value, b: Value) -> Node:
    """a where the condition holds, else b."""
    return apply(ops.WHERE, condition, a, b)


def cast(a: Node, dtype: DType) -> Node:
    """``a`` in another dtype; itself where it has it already."""
    return a if a.type.dtype is dtype else node(ops.CAST, a, attrs=(dtype,))


def expand(a: Value, like: Type) -> Node:
    """``a`` repeated to the shape of ``like``; itself where it has it already."""
    a = as_node(a)
    return a if a.type == like.of(a.type.dtype) else node(ops.EXPAND, a, attrs=(like.of(f32),))


def column(cols: Dim) -> Node:
    """The index of each column."""
    return node(ops.COLUMN, attrs=(cols,))


def row(rows: Dim) -> Node:
    """The index of each row."""
    return node(ops.ROW, attrs=(rows,))


def part(a: Node, split: Split, index: int) -> Node:
    """Part ``index`` of the columns of ``a``."""
    return node(ops.PART, a, attrs=(split, index))


def parts(a: Node, split: Split) -> tuple[Node, ...]:
    """All parts of the columns of ``a``."""
    return tuple(part(a, split, i) for i in range(split.parts))


def join(split: Split, *args: Value) -> Node:
    """Columns put together again; a part may be the number 0."""
    return node(ops.JOIN, *(as_node(a) for a in args), attrs=(split,))


def turn(a: Node) -> Node:
    """A RowVec as a ColVec of that many rows, and back."""
    return node(ops.TURN, a)


def stack(*args: Node) -> Node:
    """Weights of equal width under each other."""
    return args[0] if len(args) == 1 else node(ops.STACK, *args, attrs=tuple(a.type.rows for a in args))


def take_rows(a: Node, start: int, stop: int) -> Node:
    """Rows ``start:stop`` of a weight."""
    return node(ops.TAKE_ROWS, a, attrs=(start, stop))


def reduce(a: Node, fn: str, to: Kind, groups: int | None = None) -> Node:
    """``fn`` ("sum", "max", "absmax") over the axes that ``to`` lacks; ``groups`` for a GroupVec or Table."""
    return node(ops.REDUCE, a, attrs=(fn, to, groups if to in (Kind.GROUPVEC, Kind.TABLE) else None))


def sum_to(a: Node, to: Kind, groups: int | None = None) -> Node:
    """The sum of ``a`` over the axes that ``to`` lacks; ``a`` itself where it lacks none."""
    return a if a.type.kind is to else reduce(a, "sum", to, groups)


def sum_row(a: Node) -> Node:
    """One sum per row."""
    return sum_to(a, Kind.COLVEC)


def sum_col(a: Node) -> Node:
    """One sum per column."""
    return sum_to(a, Kind.ROWVEC)


def logsumexp_row(a: Node) -> Node:
    """log(sum(exp(a))) of each row."""
    return node(ops.LSE, a)


def select_column(a: Node, index: Node) -> Node:
    """The element of each row at the column that ``index`` names."""
    return node(ops.SELECT, a, index)


def matmul(a: Node, b: Node, form: str = "nt") -> Node:
    """A GEMM: "nt" x @ w.T, "nn" x @ w, "tn" dz.T @ x; accumulates in the compute dtype."""
    return node(ops.MATMUL, a, b, attrs=(form,))
