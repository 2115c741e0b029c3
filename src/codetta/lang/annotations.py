"""The kinds of value a program works on: annotations of a function's parameters, and the traced values themselves.

``acc: Tile`` has a symbolic size and float32; ``Tile[4096, bf16]`` is exact; ``Annotated[Tile, 4096, bf16]`` says the
same in a form that type checkers accept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from numbers import Integral, Real
from types import FrameType
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar, overload

from codetta.core.node import Node, Op, node
from codetta.core.types import AXES, ROWS, Dim, DType, Kind, Sym, Type, f32
from codetta.errors import CodettaError, ShapeError, SourceLine, TypeMismatch
from codetta.ir import build, ops
from codetta.lang import record
from codetta.lang.corrections import correction, first_parts
from codetta.lang.teach import chosen, powers, renamed, taken_apart, without_numbers

V = TypeVar("V", bound="Value")
_SIZE = re.compile(r"(?:(\d+)\*)?([A-Za-z_]\w*)(?:/(\d+))?")

# --- building nodes ---------------------------------------------------------------------------------------------------


def make(op: Op, *args: object, attrs: tuple[Any, ...] = ()) -> Any:
    """The traced value of ``op`` on values and numbers; the node remembers the user's line."""
    frame = record.user_frame()
    line = record.user_line(frame)
    nodes = tuple(_operand(op, a, line) for a in args)
    try:
        made = node(op, *nodes, attrs=attrs, where=line)
    except CodettaError as e:
        message = e.message if e.message.startswith(op.name) else f"{op.name}: {e.message}"
        e.write = e.write or correction(op, nodes, attrs, names_in(frame), line)
        raise e.told(message, e.where or line) from None
    _remember(made, line, frame)
    return wrap(made)


def wrap(n: Node) -> Any:
    """The traced value around a node, of the class named like its kind."""
    return KINDS[n.type.kind](n)


def _operand(op: Op, value: object, line: SourceLine) -> Node:
    if isinstance(value, Value):
        return value.node
    number = number_of(value)
    if number is not None:
        return build.const(number)
    hint, write = "a program takes its values as parameters and its numbers as Python numbers", None
    if isinstance(value, tuple):
        hint, write = "halves, adjacent and columns give several parts: `a, b = halves(x)`", first_parts(line)
    message = f"{op.name} takes traced values and numbers, not {_described(value)}"
    raise TypeMismatch(message, where=line, hint=hint, write=write)


def number_of(value: object) -> bool | int | float | None:
    """A Python or NumPy number as a plain Python one; None for anything else."""
    match value:
        case bool():
            return value
        case Integral():
            return int(value)
        case Real():
            return float(value)
    return None


def _described(value: object) -> str:
    return repr(value) if isinstance(value, str | None) else f"a {type(value).__name__}"


def _remember(n: Node, line: SourceLine, frame: FrameType) -> None:
    trace = record.active()
    if trace is not None:
        trace.lines.setdefault(n, line)
        for node_, name in names_in(frame).items():
            trace.names.setdefault(node_, name)


def names_in(frame: FrameType) -> dict[Node, str]:
    """The variables of the user's function that hold values."""
    found: dict[Node, str] = {}
    for name, value in frame.f_locals.items():
        if isinstance(value, Value):
            found.setdefault(value.node, name)
    return found


# --- operators --------------------------------------------------------------------------------------------------------


class _OnTile(Protocol):
    """An operator with a Tile on one side: the result is a Tile."""

    def __call__(self, other: Value | float) -> Tile: ...


class _OnValue(Protocol[V]):
    """An operator on two values: of one kind, with a Tile, or of two kinds."""

    @overload
    def __call__(self, other: V | float) -> V: ...
    @overload
    def __call__(self, other: Tile) -> Tile: ...
    @overload
    def __call__(self, other: Value) -> Value: ...


class _Infix:
    """A Python operator as an op of the table; ``reflected`` where the value stands on the right."""

    def __init__(self, op: Op, *, reflected: bool = False) -> None:
        self.op, self.reflected = op, reflected

    @overload
    def __get__(self, instance: Tile, owner: object) -> _OnTile: ...
    @overload
    def __get__(self, instance: V, owner: object) -> _OnValue[V]: ...
    def __get__(self, instance: Any, owner: object) -> Any:
        if self.reflected:
            return lambda other: make(self.op, other, instance)
        return lambda other: make(self.op, instance, other)


class Value:
    """A traced value: a node, with Python's operators on it. Its kind is its class."""

    __slots__ = ("node",)
    kind: ClassVar[Kind]

    def __init__(self, n: Node) -> None:
        self.node = n

    __add__, __radd__ = _Infix(ops.ADD), _Infix(ops.ADD, reflected=True)
    __sub__, __rsub__ = _Infix(ops.SUB), _Infix(ops.SUB, reflected=True)
    __mul__, __rmul__ = _Infix(ops.MUL), _Infix(ops.MUL, reflected=True)
    __truediv__, __rtruediv__ = _Infix(ops.DIV), _Infix(ops.DIV, reflected=True)
    __floordiv__, __rfloordiv__ = _Infix(ops.FLOORDIV), _Infix(ops.FLOORDIV, reflected=True)
    __mod__, __rmod__ = _Infix(ops.MOD), _Infix(ops.MOD, reflected=True)
    __and__, __rand__ = _Infix(ops.AND), _Infix(ops.AND, reflected=True)
    __or__, __ror__ = _Infix(ops.OR), _Infix(ops.OR, reflected=True)
    __lt__, __le__, __gt__, __ge__ = _Infix(ops.LT), _Infix(ops.LE), _Infix(ops.GT), _Infix(ops.GE)
    __eq__ = _Infix(ops.EQ)  # type: ignore[assignment]  # a comparison of values is a value, not a bool
    __ne__ = _Infix(ops.NE)  # type: ignore[assignment]
    __hash__ = object.__hash__
    __array_ufunc__ = None  # NumPy's numbers leave the operation to us

    def __neg__(self: V) -> V:
        return make(ops.NEG, self)  # type: ignore[no-any-return]

    def __invert__(self: V) -> V:
        return make(ops.NOT, self)  # type: ignore[no-any-return]

    def __abs__(self: V) -> V:
        return make(ops.ABS, self)  # type: ignore[no-any-return]

    def __pow__(self: V, exponent: float) -> V:
        """The powers that are one op; no general power exists."""
        match number_of(exponent):
            case 2:
                return make(ops.MUL, self, self)  # type: ignore[no-any-return]
            case -1:
                return make(ops.RECIP, self)  # type: ignore[no-any-return]
            case 0.5:
                return make(ops.SQRT, self)  # type: ignore[no-any-return]
            case -0.5:
                return make(ops.RSQRT, self)  # type: ignore[no-any-return]
        shown = exponent if number_of(exponent) is not None else "that"
        hint, line = "write a product, or exp(p * log(x)) where x is positive", record.user_line()
        message = f"** takes the exponents 2, -1, 0.5 and -0.5, not {shown}"
        raise TypeMismatch(message, where=line, hint=hint, write=powers(line))

    def __rpow__(self, base: object) -> NoReturn:
        hint, line = "write exp(x * log(base)), with the logarithm as a number", record.user_line()
        raise TypeMismatch("a power with a traced exponent", where=line, hint=hint, write=powers(line))

    def __bool__(self) -> bool:
        message = (
            f"`if`, `while`, `and`, `or`, `not` and chained comparisons need a bool now; this {self} has no value yet"
        )
        hint = "choose with where(condition, a, b), combine with & | ~, and clamp with maximum(a, b) or minimum(a, b)"
        line = record.user_line()
        raise TypeMismatch(message, where=line, hint=hint, write=chosen(line))

    def _no_number(self) -> NoReturn:
        message = f"float(), int(), len() and range() need a number now; this {self} has no value yet"
        hint, line = "take the number as a Python constant, or the value as a Scalar parameter", record.user_line()
        raise TypeMismatch(message, where=line, hint=hint, write=without_numbers(line))

    __float__ = __int__ = __index__ = __len__ = __complex__ = __round__ = _no_number

    def __iter__(self) -> NoReturn:
        self._no_parts()

    def __getitem__(self, index: object) -> NoReturn:
        self._no_parts()

    def _no_parts(self) -> NoReturn:
        message = f"a {self} is seen one tile at a time and cannot be indexed or unpacked"
        hint = "columns come apart with halves, adjacent, columns or equal_columns; a column is picked by select_column"
        line = record.user_line()
        raise TypeMismatch(message, where=line, hint=hint, write=taken_apart(line))

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> NoReturn:
        """Refuse PyTorch's functions, which would not be traced."""
        name = getattr(func, "__name__", "a function")
        hint, line = "use the function of that name from codetta, or a Python operator", record.user_line()
        write = renamed(line, name)
        raise TypeMismatch(f"torch's {name} on a traced {cls.__name__}", where=line, hint=hint, write=write)

    def __repr__(self) -> str:
        return repr(self.node.type)

    def __class_getitem__(cls, item: object) -> Annotation:
        """An exact annotation: sizes, then the dtype, as in ``Tile[4096, bf16]``."""
        return exact(cls.kind, item if isinstance(item, tuple) else (item,))


class Tile(Value):
    """Rows by columns: a value in the GEMM's output space, seen one tile at a time. ``Tile[cols, dtype]``, with the
    symbol M rows, or ``Tile[rows, cols, dtype]``."""

    __slots__ = ()
    kind = Kind.TILE


class RowVec(Value):
    """One number per column, the same in all rows: a gain, a bias. ``RowVec[cols, dtype]``."""

    __slots__ = ()
    kind = Kind.ROWVEC


class ColVec(Value):
    """One number per row, the same in all columns: rstd, a target. ``ColVec[dtype]``, ``ColVec[rows, dtype]``."""

    __slots__ = ()
    kind = Kind.COLVEC


class GroupVec(Value):
    """One number per row and group of columns: rstd of each head. ``GroupVec[groups, dtype]``."""

    __slots__ = ()
    kind = Kind.GROUPVEC


class Table(Value):
    """Rows by the inside of a group, repeated over the groups: RoPE's cos and sin. ``Table[inside, dtype]``."""

    __slots__ = ()
    kind = Kind.TABLE


class Scalar(Value):
    """One number. ``Scalar[dtype]``."""

    __slots__ = ()
    kind = Kind.SCALAR


KINDS: dict[Kind, type[Value]] = {c.kind: c for c in (Tile, RowVec, ColVec, GroupVec, Table, Scalar)}

# --- annotations ------------------------------------------------------------------------------------------------------

SYMBOLS = {Kind.TILE: "N", Kind.ROWVEC: "N", Kind.GROUPVEC: "G", Kind.TABLE: "I"}  # sizes that are not given


@dataclass(frozen=True, slots=True)
class Annotation:
    """What an annotation says: a type, and the parameter's name where Python cannot say it."""

    type: Type
    name: str | None = None

    def named(self, name: str) -> Annotation:
        """The same for a parameter whose name is no Python name, or one of the language."""
        return replace(self, name=name)


def exact(kind: Kind, items: tuple[object, ...]) -> Annotation:
    """The annotation with these sizes and, last, this dtype; what is left out is symbolic, or float32."""
    dtype, sizes = f32, items
    if items and isinstance(items[-1], DType):
        dtype, sizes = items[-1], items[:-1]
    dims = [size(s) for s in sizes]
    has_rows, symbol = "m" in AXES[kind], SYMBOLS.get(kind)
    if len(dims) > has_rows + (symbol is not None):
        given = ", ".join(map(str, items))
        raise ShapeError(f"{kind.value}[{given}] has too many sizes", hint=KINDS[kind].__doc__)
    cols = None if symbol is None else dims.pop() if dims else Sym(symbol)
    rows = (dims.pop() if dims else ROWS) if has_rows else None
    return Annotation(Type(kind, dtype, rows, cols))


def size(given: object) -> Dim:
    """A size from an int, a symbol, or text such as "N", "2*N" or "N/2"."""
    if isinstance(given, Sym):
        return given
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    found = _SIZE.fullmatch(given.replace(" ", "")) if isinstance(given, str) else None
    if found is None:
        hint = 'a size is an int, or text such as "N", "2*N" or "N/2"; the dtype comes last'
        raise ShapeError(f"{given!r} is no size", hint=hint)
    top, name, bottom = found.groups()
    return Sym(name, Fraction(int(top or 1), int(bottom or 1)))
