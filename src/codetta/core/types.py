"""The types of the tensor graph: dtypes, kinds, and sizes that may be symbolic."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from codetta.errors import ShapeError, TypeMismatch


@dataclass(frozen=True, slots=True)
class DType:
    """A storage type: its short name in the language, its size in bytes, and what it holds."""

    name: str
    bytes: int
    is_float: bool

    def __repr__(self) -> str:
        return self.name


f64 = DType("f64", 8, True)
f32 = DType("f32", 4, True)
bf16 = DType("bf16", 2, True)
f16 = DType("f16", 2, True)
i64 = DType("i64", 8, False)
i32 = DType("i32", 4, False)
boolean = DType("boolean", 1, False)

DTYPES: dict[str, DType] = {d.name: d for d in (f64, f32, bf16, f16, i64, i32, boolean)}


@dataclass(frozen=True, slots=True)
class Sym:
    """A size known only at run time, times a rational: ``M``, ``N/2``, ``2*N``."""

    name: str
    scale: Fraction = Fraction(1)

    def __repr__(self) -> str:
        top, bottom = self.scale.numerator, self.scale.denominator
        text = self.name if top == 1 else f"{top}*{self.name}"
        return text if bottom == 1 else f"{text}/{bottom}"


Dim = int | Sym

ROWS = Sym("M")  # the token count, the one row symbol of a captured graph


def times(d: Dim, factor: int) -> Dim:
    """``d * factor``."""
    return d * factor if isinstance(d, int) else Sym(d.name, d.scale * factor)


def over(d: Dim, parts: int, what: str = "size") -> Dim:
    """``d / parts``; a ShapeError when an integer size does not divide."""
    if isinstance(d, Sym):
        return Sym(d.name, d.scale / parts)
    if parts <= 0 or d % parts:
        raise ShapeError(f"{what} {d} does not divide into {parts} equal parts")
    return d // parts


class Kind(Enum):
    """How a value lies over the (rows, groups, inside) axes of a GEMM's output space."""

    TILE = "Tile"
    ROWVEC = "RowVec"
    COLVEC = "ColVec"
    GROUPVEC = "GroupVec"
    TABLE = "Table"
    SCALAR = "Scalar"


AXES: dict[Kind, frozenset[str]] = {
    Kind.TILE: frozenset("mgi"),
    Kind.ROWVEC: frozenset("gi"),
    Kind.COLVEC: frozenset("m"),
    Kind.GROUPVEC: frozenset("mg"),
    Kind.TABLE: frozenset("mi"),
    Kind.SCALAR: frozenset(),
}
KIND_OF_AXES: dict[frozenset[str], Kind] = {axes: kind for kind, axes in AXES.items()}


@dataclass(frozen=True, slots=True)
class Type:
    """A kind, a dtype and sizes: ``cols`` is N for a Tile or RowVec, the number of groups for a
    GroupVec, the width of a group for a Table; None where the kind has no such axis."""

    kind: Kind
    dtype: DType
    rows: Dim | None = None
    cols: Dim | None = None

    def __post_init__(self) -> None:
        has_rows = "m" in AXES[self.kind]
        has_cols = self.kind not in (Kind.COLVEC, Kind.SCALAR)
        if has_rows != (self.rows is not None) or has_cols != (self.cols is not None):
            raise ShapeError(f"a {self.kind.value} cannot have rows={self.rows}, cols={self.cols}")

    def __repr__(self) -> str:
        sizes = [str(s) for s in (self.rows, self.cols) if s is not None]
        return f"{self.kind.value}[{', '.join([*sizes, self.dtype.name])}]"

    def of(self, dtype: DType) -> Type:
        """The same shape in another dtype."""
        return Type(self.kind, dtype, self.rows, self.cols)


def tile(cols: Dim, dtype: DType = f32, rows: Dim = ROWS) -> Type:
    """(rows, cols)."""
    return Type(Kind.TILE, dtype, rows, cols)


def rowvec(cols: Dim, dtype: DType = f32) -> Type:
    """(cols,): one number per column."""
    return Type(Kind.ROWVEC, dtype, None, cols)


def colvec(dtype: DType = f32, rows: Dim = ROWS) -> Type:
    """(rows,): one number per row."""
    return Type(Kind.COLVEC, dtype, rows, None)


def groupvec(groups: Dim, dtype: DType = f32, rows: Dim = ROWS) -> Type:
    """(rows, groups): one number per row and group of columns."""
    return Type(Kind.GROUPVEC, dtype, rows, groups)


def table(inside: Dim, dtype: DType = f32, rows: Dim = ROWS) -> Type:
    """(rows, inside): a tile repeated over the groups."""
    return Type(Kind.TABLE, dtype, rows, inside)


def scalar(dtype: DType = f32) -> Type:
    """One number."""
    return Type(Kind.SCALAR, dtype)


def compute_dtype(*dtypes: DType) -> DType:
    """The dtype in which arithmetic on these is done: float32, or float64 where one is float64; integers stay."""
    floats = [d for d in dtypes if d.is_float]
    if floats:
        return f64 if f64 in floats else f32
    return max(dtypes, key=lambda d: d.bytes)


def broadcast(a: Type, b: Type, dtype: DType) -> Type:
    """The type of an elementwise result: the union of the axes, with sizes that must agree."""
    rows = _same(a.rows, b.rows, "rows", a, b)
    axes = AXES[a.kind] | AXES[b.kind]
    kind = KIND_OF_AXES.get(axes)
    if kind is None:
        raise TypeMismatch(f"{a} and {b} do not broadcast to one kind")
    if kind in (Kind.SCALAR, Kind.COLVEC):
        return Type(kind, dtype, rows, None)
    return Type(kind, dtype, rows, _columns(a, b, kind))


def _columns(a: Type, b: Type, kind: Kind) -> Dim:
    full = {x.cols for x in (a, b) if x.kind in (Kind.TILE, Kind.ROWVEC)}
    if len(full) > 1:
        raise ShapeError(f"column counts differ: {a} and {b}")
    factors = {x.kind: x.cols for x in (a, b) if x.kind in (Kind.GROUPVEC, Kind.TABLE)}
    if full:
        (cols,) = full
        for factor_kind, size in factors.items():
            if isinstance(cols, int) and isinstance(size, int) and (size == 0 or cols % size):
                raise ShapeError(f"{cols} columns do not divide by the {size} of a {factor_kind.value}: {a} and {b}")
        if cols is None:
            raise ShapeError(f"no column count in {a} and {b}")
        return cols
    if len(factors) == 2:
        groups, inside = factors[Kind.GROUPVEC], factors[Kind.TABLE]
        if not (isinstance(groups, int) and isinstance(inside, int)):
            raise ShapeError(f"the product of a GroupVec and a Table needs known sizes: {a} and {b}")
        return groups * inside
    sizes = {x.cols for x in (a, b) if x.cols is not None}
    if len(sizes) != 1:
        raise ShapeError(f"sizes differ: {a} and {b} (as {kind.value})")
    (size,) = sizes
    return size


def _same(a: Dim | None, b: Dim | None, what: str, ta: Type, tb: Type) -> Dim | None:
    if a is None or b is None or a == b:
        return a if a is not None else b
    raise ShapeError(f"{what} differ: {ta} and {tb} ({a} != {b})")
