"""The functions of the language: each builds one node of the op table on traced values and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast, overload

from codetta.core.node import Op
from codetta.core.types import Dim, DType, Kind, f32
from codetta.errors import ShapeError, TypeMismatch
from codetta.ir import ops, split
from codetta.ir.split import Split
from codetta.lang import names, record
from codetta.lang.annotations import (
    Annotation,
    ColVec,
    GroupVec,
    RowVec,
    Scalar,
    Table,
    Tile,
    V,
    Value,
    exact,
    make,
    size,
)

Operand = Value | float
Unary = Callable[[V], V]
Binary = Callable[[V | float, V | float], V]
F = TypeVar("F", bound=Callable[..., Any])

LANGUAGE = names.LANGUAGE  # every function by its name: filled here
FORMS: dict[Op, list[str]] = {}  # how to say each op


def _says(*built: Op) -> Callable[[F], F]:
    """Enter a function into the language, as a form of these ops."""

    def enter(function: F) -> F:
        LANGUAGE[function.__name__] = function
        for op in built:
            FORMS.setdefault(op, []).append(function.__name__)
        return function

    return enter


def _named(op: Op, name: str, meaning: str, function: Callable[..., Any]) -> Any:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = meaning
    return _says(op)(function)


def _unary(op: Op, meaning: str) -> Callable[[V], V]:
    def form(x: Operand) -> Value:
        return make(op, x)  # type: ignore[no-any-return]

    return cast("Callable[[V], V]", _named(op, op.name, meaning, form))


def _binary(op: Op, meaning: str) -> Callable[[V | float, V | float], V]:
    def form(a: Operand, b: Operand) -> Value:
        return make(op, a, b)  # type: ignore[no-any-return]

    return cast("Callable[[V | float, V | float], V]", _named(op, op.name, meaning, form))


# --- elementwise maps -------------------------------------------------------------------------------------------------

add = _binary(ops.ADD, "`a + b`.")
sub = _binary(ops.SUB, "`a - b`.")
mul = _binary(ops.MUL, "`a * b`.")
div = _binary(ops.DIV, "`a / b`, in floating point.")
neg = _unary(ops.NEG, "`-x`.")
abs = _unary(ops.ABS, "The absolute value of x.")
maximum = _binary(ops.MAXIMUM, "The larger of a and b.")
minimum = _binary(ops.MINIMUM, "The smaller of a and b.")

exp = _unary(ops.EXP, "e to the power of x.")
log = _unary(ops.LOG, "The natural logarithm of x.")
tanh = _unary(ops.TANH, "The hyperbolic tangent of x.")
erf = _unary(ops.ERF, "The error function of x.")
sqrt = _unary(ops.SQRT, "The square root of x, also `x ** 0.5`.")
rsqrt = _unary(ops.RSQRT, "One over the square root of x, also `x ** -0.5`.")
recip = _unary(ops.RECIP, "One over x, also `x ** -1`.")
sin = _unary(ops.SIN, "The sine of x.")
cos = _unary(ops.COS, "The cosine of x.")
sigmoid = _unary(ops.SIGMOID, "1 / (1 + exp(-x)).")
silu = _unary(ops.SILU, "x * sigmoid(x).")
gelu = _unary(ops.GELU, "x times the normal distribution function of x, exactly (erf).")
gelu_tanh = _unary(ops.GELU_TANH, "gelu in its tanh approximation.")

floordiv = _binary(ops.FLOORDIV, "`a // b` of integers, rounded down.")
mod = _binary(ops.MOD, "`a % b` of integers, with the sign of b.")

eq = _binary(ops.EQ, "`a == b`, a boolean.")
ne = _binary(ops.NE, "`a != b`, a boolean.")
lt = _binary(ops.LT, "`a < b`, a boolean.")
le = _binary(ops.LE, "`a <= b`, a boolean.")
gt = _binary(ops.GT, "`a > b`, a boolean.")
ge = _binary(ops.GE, "`a >= b`, a boolean.")
logical_and = _binary(ops.AND, "`a & b` of booleans.")
logical_or = _binary(ops.OR, "`a | b` of booleans.")
logical_not = _unary(ops.NOT, "`~x` of a boolean.")


@overload
def where(condition: Tile, a: Operand, b: Operand) -> Tile: ...
@overload
def where(condition: V, a: V | float, b: V | float) -> V: ...
@overload
def where(condition: Operand, a: Operand, b: Operand) -> Value: ...
@_says(ops.WHERE)
def where(condition: Operand, a: Operand, b: Operand) -> Value:
    """``a`` where the boolean condition holds, else ``b``."""
    return make(ops.WHERE, condition, a, b)  # type: ignore[no-any-return]


@_says(ops.CAST)
def to(x: V, dtype: DType) -> V:
    """x in another dtype."""
    return make(ops.CAST, x, attrs=(dtype,))  # type: ignore[no-any-return]


@overload
def expand(x: Operand, shape: V | type[V]) -> V: ...
@overload
def expand(x: Operand, shape: Annotation) -> Value: ...
@_says(ops.EXPAND)
def expand(x: Operand, shape: Value | Annotation | type[Value]) -> Value:
    """x repeated to the shape of a value, or to that of an annotation such as `Tile[4096]`."""
    match shape:
        case Value():
            like = shape.node.type.of(f32)
        case Annotation():
            like = shape.type
        case _:
            like = exact(shape.kind, ()).type
    return make(ops.EXPAND, x, attrs=(like,))  # type: ignore[no-any-return]


@_says(ops.RANDOM)
def random(seed: Operand, row: Operand, column: Operand) -> Value:
    """A number in [0, 1) that depends on the three integers alone."""
    return make(ops.RANDOM, seed, row, column)  # type: ignore[no-any-return]


@_says(ops.CONST)
def const(value: float) -> Scalar:
    """A number as a traced value; needed only where no other value is near, as in ``return``."""
    return make(ops.CONST, attrs=(value,))  # type: ignore[no-any-return]


@_says(ops.COLUMN)
def column_index(x: Value | int | str) -> RowVec:
    """The index of each column of x, or of that many columns."""
    return make(ops.COLUMN, attrs=(_size_of(x, "cols"),))  # type: ignore[no-any-return]


@_says(ops.ROW)
def row_index(x: Value | int | str) -> ColVec:
    """The index of each row of x, or of that many rows."""
    return make(ops.ROW, attrs=(_size_of(x, "rows"),))  # type: ignore[no-any-return]


def _size_of(x: Value | int | str, axis: str) -> Dim:
    if not isinstance(x, Value):
        return size(x)
    found: Dim | None = getattr(x.node.type, axis)
    if found is None or (axis == "cols" and x.kind not in (Kind.TILE, Kind.ROWVEC)):
        raise TypeMismatch(f"{x} has no {axis} to count", where=record.user_line(), hint="give it a Tile")
    return found


# --- reductions -------------------------------------------------------------------------------------------------------

WAYS = {"sum": "sum", "max": "largest", "absmax": "largest absolute value"}
TARGETS = {
    "row": (Kind.COLVEC, "of each row, a ColVec"),
    "col": (Kind.ROWVEC, "of each column, a RowVec"),
    "inside": (Kind.GROUPVEC, "of each row's groups, a GroupVec"),
    "groups": (Kind.TABLE, "over the groups, a Table"),
    "all": (Kind.SCALAR, "of all elements, a Scalar"),
}
R_co = TypeVar("R_co", bound=Value, covariant=True)


class Grouped(Protocol[R_co]):
    """A reduction that needs the number of groups."""

    def __call__(self, x: Value, *, groups: int) -> R_co:
        """Reduce x, whose columns are ``groups`` equal groups."""


def _reduction(fn: str, target: str) -> Callable[..., Any]:
    kind, meaning = TARGETS[target]

    def whole(x: Value) -> Value:
        return make(ops.REDUCE, x, attrs=(fn, kind, None))  # type: ignore[no-any-return]

    def grouped(x: Value, *, groups: int) -> Value:
        return make(ops.REDUCE, x, attrs=(fn, kind, groups))  # type: ignore[no-any-return]

    form = grouped if kind in (Kind.GROUPVEC, Kind.TABLE) else whole
    return _named(ops.REDUCE, f"{fn}_{target}", f"The {WAYS[fn]} {meaning}.", form)  # type: ignore[no-any-return]


sum_row, max_row, absmax_row = cast("list[Callable[[Value], ColVec]]", [_reduction(fn, "row") for fn in WAYS])
sum_col, max_col, absmax_col = cast("list[Callable[[Value], RowVec]]", [_reduction(fn, "col") for fn in WAYS])
sum_all, max_all, absmax_all = cast("list[Callable[[Value], Scalar]]", [_reduction(fn, "all") for fn in WAYS])
sum_inside, max_inside, absmax_inside = cast("list[Grouped[GroupVec]]", [_reduction(fn, "inside") for fn in WAYS])
sum_groups, max_groups, absmax_groups = cast("list[Grouped[Table]]", [_reduction(fn, "groups") for fn in WAYS])


@_says(ops.LSE)
def logsumexp_row(x: Value) -> ColVec:
    """log(sum(exp(x))) of each row, accumulated online."""
    return make(ops.LSE, x)  # type: ignore[no-any-return]


@_says(ops.SELECT)
def select_column(x: Value, index: Value) -> ColVec:
    """The element of each row at the column that the ColVec ``index`` names."""
    return make(ops.SELECT, x, index)  # type: ignore[no-any-return]


# --- columns in parts, rows in parts ----------------------------------------------------------------------------------


@_says(ops.PART)
def halves(x: V, *, groups: int = 1) -> tuple[V, V]:
    """The left and the right half of each group of columns."""
    return _parts(x, split.halves(groups))  # type: ignore[return-value]


@_says(ops.PART)
def adjacent(x: V) -> tuple[V, V]:
    """The even and the odd columns."""
    return _parts(x, split.ADJACENT)  # type: ignore[return-value]


@_says(ops.PART)
def columns(x: V, *sizes: int, groups: int = 1) -> tuple[V, ...]:
    """Neighbouring ranges of columns of these sizes, in each group."""
    return _parts(x, split.columns(*sizes, groups=groups))


@_says(ops.PART)
def equal_columns(x: V, parts: int, *, groups: int = 1) -> tuple[V, ...]:
    """That many equal ranges of columns, in each group."""
    return _parts(x, Split(groups, parts))


def _parts(x: V, how: Split) -> tuple[V, ...]:
    return tuple(make(ops.PART, x, attrs=(how, i)) for i in range(how.parts))


@_says(ops.JOIN)
def join_halves(left: Operand, right: Operand, *, groups: int = 1) -> Tile:
    """The whole whose ``halves`` these are; a half may be 0."""
    return make(ops.JOIN, left, right, attrs=(split.halves(groups),))  # type: ignore[no-any-return]


@_says(ops.JOIN)
def join_adjacent(even: Operand, odd: Operand) -> Tile:
    """The whole whose ``adjacent`` parts these are; a part may be 0."""
    return make(ops.JOIN, even, odd, attrs=(split.ADJACENT,))  # type: ignore[no-any-return]


@_says(ops.JOIN)
def join_columns(*parts: Operand, groups: int = 1, sizes: tuple[int, ...] | None = None) -> Tile:
    """The whole whose ``columns`` these are; a part may be 0, and then ``sizes`` says how wide unequal parts are."""
    if sizes is None:
        widths = {p.node.type.cols for p in parts if isinstance(p, Value) and p.kind is not Kind.SCALAR}
        if len(widths) > 1:
            sizes = tuple(_width(p) // groups for p in parts)
    how = Split(groups, len(parts)) if sizes is None else split.columns(*sizes, groups=groups)
    return make(ops.JOIN, *parts, attrs=(how,))  # type: ignore[no-any-return]


def _width(part: Operand) -> int:
    width = part.node.type.cols if isinstance(part, Value) else None
    if isinstance(width, int):
        return width
    raise ShapeError(
        f"join_columns: a part is {part}, of no known width", where=record.user_line(), hint="give sizes=(...)"
    )


@_says(ops.TURN)
def turn(x: Value) -> Value:
    """A RowVec as the ColVec of as many rows, and back."""
    return make(ops.TURN, x)  # type: ignore[no-any-return]


@_says(ops.STACK)
def stack(*parts: Operand, rows: tuple[int, ...]) -> Tile:
    """Weights of that many rows under each other; a part may be 0."""
    return make(ops.STACK, *parts, attrs=rows)  # type: ignore[no-any-return]


@_says(ops.TAKE_ROWS)
def take_rows(x: Value, start: int, stop: int) -> Tile:
    """Rows ``start`` to ``stop`` of a weight."""
    return make(ops.TAKE_ROWS, x, attrs=(start, stop))  # type: ignore[no-any-return]
