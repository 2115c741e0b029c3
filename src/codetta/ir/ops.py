"""The one table of ops: every op of the tensor graph with its type rule."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from codetta.core.node import Infer, Node, Op
from codetta.core.types import (
    AXES,
    DTYPES,
    Dim,
    DType,
    Kind,
    Type,
    boolean,
    broadcast,
    colvec,
    compute_dtype,
    f32,
    i32,
    over,
    rowvec,
    scalar,
)
from codetta.errors import ShapeError, TypeMismatch
from codetta.ir.split import Split

Args = tuple[Node, ...]
Attrs = tuple[Hashable, ...]

OPS: dict[str, Op] = {}


def _op(name: str, infer: Infer, family: str) -> Op:
    OPS[name] = Op(name, infer, family)
    return OPS[name]


# --- leaves ---------------------------------------------------------------------------------------------------------


def _input(args: Args, attrs: Attrs) -> Type:
    found = attrs[1]
    if not isinstance(found, Type):
        raise TypeMismatch(f"an input needs a name and a Type, got {attrs}")
    return found


def _const(args: Args, attrs: Attrs) -> Type:
    value = attrs[0]
    if isinstance(value, bool):
        return scalar(boolean)
    return scalar(i32) if isinstance(value, int) else scalar(f32)


INPUT = _op("input", _input, "leaf")  # (name, type)
CONST = _op("const", _const, "leaf")  # (value,): weakly typed, as Python numbers are
COLUMN = _op("column", lambda args, attrs: rowvec(_dim(attrs[0]), i32), "leaf")  # (cols,): the index of each column
ROW = _op("row", lambda args, attrs: colvec(i32, _dim(attrs[0])), "leaf")  # (rows,): the index of each row


def _dim(value: object) -> Dim:
    if isinstance(value, bool) or not isinstance(value, Dim):
        raise ShapeError(f"not a size: {value!r}")
    return value


# --- elementwise maps -----------------------------------------------------------------------------------------------


def _map(result: Callable[[tuple[DType, ...]], DType]) -> Infer:
    def infer(args: Args, attrs: Attrs) -> Type:
        out = args[0].type
        for a in args[1:]:
            out = broadcast(out, a.type, f32)
        return out.of(result(tuple(a.type.dtype for a in args)))

    return infer


def _float(dtypes: tuple[DType, ...]) -> DType:
    return compute_dtype(*dtypes, f32)


def _arithmetic(dtypes: tuple[DType, ...]) -> DType:
    if boolean in dtypes:
        raise TypeMismatch(f"arithmetic on a boolean: {list(dtypes)}; use where(condition, 1.0, 0.0)")
    return compute_dtype(*dtypes)


def _logical(dtypes: tuple[DType, ...]) -> DType:
    if any(d is not boolean for d in dtypes):
        raise TypeMismatch(f"a logical op needs booleans, got {list(dtypes)}")
    return boolean


def _integer(dtypes: tuple[DType, ...]) -> DType:
    if any(d.is_float or d is boolean for d in dtypes):
        raise TypeMismatch(f"an integer op needs integers, got {list(dtypes)}")
    return compute_dtype(*dtypes)


def _where(args: Args, attrs: Attrs) -> Type:
    if args[0].type.dtype is not boolean:
        raise TypeMismatch(f"where: the condition is {args[0].type}, not a boolean")
    both = [a.type.dtype for a in args[1:]]
    dtype = both[0] if both[0] is both[1] is boolean else _arithmetic(tuple(both))
    return broadcast(broadcast(args[1].type, args[2].type, dtype), args[0].type, dtype)


def _cast(args: Args, attrs: Attrs) -> Type:
    if not isinstance(attrs[0], DType):
        there = ", ".join(DTYPES)
        raise TypeMismatch(f"to: {attrs[0]!r} is no dtype that can be stored", hint=f"there are: {there}")
    return args[0].type.of(attrs[0])


NEG, ABS = (_op(name, _map(_arithmetic), "map") for name in ("neg", "abs"))
EXP, LOG, TANH, ERF, SQRT, RSQRT, RECIP, SIN, COS = (
    _op(name, _map(_float), "map") for name in ("exp", "log", "tanh", "erf", "sqrt", "rsqrt", "recip", "sin", "cos")
)
SIGMOID, SILU, GELU, GELU_TANH = (_op(n, _map(_float), "map") for n in ("sigmoid", "silu", "gelu", "gelu_tanh"))
ADD, SUB, MUL, MAXIMUM, MINIMUM = (
    _op(name, _map(_arithmetic), "map") for name in ("add", "sub", "mul", "maximum", "minimum")
)
DIV = _op("div", _map(_float), "map")
FLOORDIV, MOD = (_op(name, _map(_integer), "map") for name in ("floordiv", "mod"))
EQ, NE, LT, LE, GT, GE = (_op(name, _map(lambda d: boolean), "map") for name in ("eq", "ne", "lt", "le", "gt", "ge"))
AND, OR, NOT = (_op(name, _map(_logical), "map") for name in ("logical_and", "logical_or", "logical_not"))
WHERE = _op("where", _where, "map")
CAST = _op("to", _cast, "map")  # (dtype,)
RANDOM = _op("random", lambda args, attrs: _map(_integer)(args, attrs).of(f32), "map")  # seed, row, column -> [0, 1)


def _expand(args: Args, attrs: Attrs) -> Type:
    t, shape = args[0].type, attrs[0]
    if not isinstance(shape, Type) or broadcast(t, shape, t.dtype) != shape.of(t.dtype):
        raise TypeMismatch(f"{t} does not expand to {shape}")
    return shape.of(t.dtype)


EXPAND = _op("expand", _expand, "map")  # (type,): the value repeated to the shape of that type, in its own dtype


# --- columns in parts, rows in parts, vectors turned ------------------------------------------------------------------


def _part(args: Args, attrs: Attrs) -> Type:
    t, split, index = args[0].type, attrs[0], attrs[1]
    if t.kind not in (Kind.TILE, Kind.ROWVEC, Kind.TABLE) or t.cols is None:
        raise TypeMismatch(f"only a Tile, RowVec or Table has parts of columns, not {t}")
    if not isinstance(split, Split) or not isinstance(index, int):
        raise TypeMismatch(f"a part needs a Split and an index, got {attrs}")
    return Type(t.kind, t.dtype, t.rows, split.part_cols(t.cols, index))


def _join(args: Args, attrs: Attrs) -> Type:
    split = attrs[0]
    if not isinstance(split, Split):
        raise TypeMismatch(f"a join needs a Split, got {split!r}")
    parts = [a.type for a in args if a.type.kind is not Kind.SCALAR]
    if not parts:
        raise TypeMismatch("a join needs at least one part that is no plain number")
    dtype = _arithmetic(tuple(a.type.dtype for a in args)) if len({a.type.dtype for a in args}) > 1 else parts[0].dtype
    wider = next((p.kind for p in parts if p.kind is not Kind.ROWVEC), Kind.ROWVEC)  # a RowVec joins any of them
    kind = Kind.TILE if any(p.kind is Kind.TILE for p in parts) else wider
    if any(p.kind not in (kind, Kind.ROWVEC) for p in parts):
        raise TypeMismatch(f"parts of different kinds: {parts}")
    rows = {p.rows for p in parts if p.rows is not None}
    if len(rows) > 1:
        raise ShapeError(f"parts with different rows: {parts}")
    cols = split.joined_cols(tuple(a.type.cols for a in args))
    return Type(kind, dtype, next(iter(rows), None), cols)


def _turn(args: Args, attrs: Attrs) -> Type:
    t = args[0].type
    if t.kind is Kind.ROWVEC and t.cols is not None:
        return colvec(t.dtype, t.cols)
    if t.kind is Kind.COLVEC and t.rows is not None:
        return rowvec(t.rows, t.dtype)
    raise TypeMismatch(f"turn takes a RowVec or a ColVec, not {t}")


def _stack(args: Args, attrs: Attrs) -> Type:
    tiles = [a.type for a in args if a.type.kind is Kind.TILE]
    if not tiles or len({(t.cols, t.dtype) for t in tiles}) > 1 or len(attrs) != len(args):
        raise ShapeError(f"stack: the parts need equal columns and dtypes: {tiles}")
    sizes = [s for s in attrs if isinstance(s, int)]
    if len(sizes) < len(args):
        raise ShapeError(f"stack: the parts need known row counts, not {attrs}")
    for a, size in zip(args, sizes, strict=True):
        if a.type.kind is Kind.TILE and a.type.rows != size:
            raise ShapeError(f"stack: a part has {a.type.rows} rows, not {size}")
    return Type(Kind.TILE, tiles[0].dtype, sum(sizes), tiles[0].cols)


def _rows(args: Args, attrs: Attrs) -> Type:
    t, (start, stop) = args[0].type, attrs
    if t.kind is not Kind.TILE or not (isinstance(start, int) and isinstance(stop, int)):
        raise TypeMismatch(f"rows {attrs} of {t}")
    if not (isinstance(t.rows, int) and 0 <= start < stop <= t.rows):
        raise ShapeError(f"rows {start}:{stop} of {t}")
    return Type(Kind.TILE, t.dtype, stop - start, t.cols)


PART = _op("part", _part, "columns")  # (split, index)
JOIN = _op("join", _join, "columns")  # (split,): a part may be the number 0
TURN = _op("turn", _turn, "turn")  # a RowVec as a ColVec, and back
STACK = _op("stack", _stack, "rows")  # (rows of each part): siblings' weights; a part may be the number 0
TAKE_ROWS = _op("take_rows", _rows, "rows")  # (start, stop)


# --- reductions -----------------------------------------------------------------------------------------------------


def _reduce(args: Args, attrs: Attrs) -> Type:
    t, (fn, to, count) = args[0].type, attrs
    if not isinstance(to, Kind) or fn not in ("sum", "max", "absmax"):
        raise TypeMismatch(f"reduce {attrs}")
    if not AXES[to] < AXES[t.kind]:
        raise TypeMismatch(f"{t} cannot be reduced to a {to.value}")
    if (count is None) == (to in (Kind.GROUPVEC, Kind.TABLE)):
        raise TypeMismatch(f"a reduction of {t} to a {to.value} with groups={count}")
    dtype = compute_dtype(t.dtype) if fn == "sum" else t.dtype
    if to is Kind.SCALAR:
        return scalar(dtype)
    if to is Kind.COLVEC and t.rows is not None:
        return colvec(dtype, t.rows)
    if to is Kind.ROWVEC and t.cols is not None:
        return rowvec(t.cols, dtype)
    if not isinstance(count, int) or t.cols is None:
        raise TypeMismatch(f"a reduction to a {to.value} needs the number of groups")
    cols: Dim = count if to is Kind.GROUPVEC else over(t.cols, count, "column count")
    over(t.cols, count, "column count")
    return Type(to, dtype, t.rows, cols)


def _row_of_tile(args: Args, attrs: Attrs) -> Type:
    t = args[0].type
    if t.kind is not Kind.TILE or t.rows is None:
        raise TypeMismatch(f"needs a Tile, got {t}")
    if len(args) == 2 and (args[1].type.kind is not Kind.COLVEC or args[1].type.dtype.is_float):
        raise TypeMismatch(f"select_column: the indices are {args[1].type}, not an integer ColVec")
    return colvec(compute_dtype(t.dtype), t.rows)


REDUCE = _op("reduce", _reduce, "reduce")  # (fn, kind, groups): fn is sum, max or absmax
LSE = _op("logsumexp_row", _row_of_tile, "reduce")  # online, over the row
SELECT = _op("select_column", _row_of_tile, "reduce")  # the column named by a ColVec of indices

# --- contractions ---------------------------------------------------------------------------------------------------


def _matmul(args: Args, attrs: Attrs) -> Type:
    a, b, form = args[0].type, args[1].type, attrs[0]
    if a.kind is not Kind.TILE or b.kind is not Kind.TILE or form not in ("nt", "nn", "tn"):
        raise TypeMismatch(f"matmul {form}: {a} with {b}")
    if a.dtype is not b.dtype or not a.dtype.is_float:
        raise TypeMismatch(f"matmul {form}: both operands need one float dtype: {a} with {b}")
    inner = {"nt": (a.cols, b.cols), "nn": (a.cols, b.rows), "tn": (a.rows, b.rows)}[str(form)]
    if inner[0] != inner[1]:
        raise ShapeError(f"matmul {form}: inner sizes differ: {a} with {b} ({inner[0]} != {inner[1]})")
    rows = a.cols if form == "tn" else a.rows
    return Type(Kind.TILE, compute_dtype(a.dtype), rows, b.rows if form == "nt" else b.cols)


MATMUL = _op("matmul", _matmul, "contraction")  # (form,): nt is x @ w.T, nn is x @ w, tn is dz.T @ x
