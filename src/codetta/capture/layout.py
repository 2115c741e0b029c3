"""Where the elements of an ATen tensor lie in the (rows, columns) plane of a tensor graph.

Rows are tokens: (B, S, D) is a tile of B*S rows and D columns, (B, H, S, E) is one of B*S rows and H*E columns whose
dimensions are interleaved. Each dimension of the tensor holds atoms: runs of the row or of the column index.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal
from weakref import WeakKeyDictionary

import sympy  # type: ignore[import-untyped]
import torch

from codetta.errors import UnsupportedError

Expr = Any  # an expression of sympy's, which has no types
Size = int | Expr  # a size known now, or a symbolic one of Dynamo's
Axis = Literal["row", "column"]


@dataclass(frozen=True, slots=True)
class Atom:
    """A run of ``size`` steps of ``stride`` through the row index or the column index."""

    axis: Axis
    size: Size
    stride: Size


Dim = tuple[Atom, ...]  # outer to inner; empty for a dimension of size 1 that lies nowhere
Dims = tuple[Dim, ...]


# --- sizes ----------------------------------------------------------------------------------------------------------


def size_hint(size: int | torch.SymInt) -> int:
    """A size in the example that was captured, without a guard on it."""
    return size if isinstance(size, int) else int(size.node.hint or 0)


def size_of(value: int | torch.SymInt) -> Size:
    """A tensor's size as a number or as a symbolic expression, one form for sizes that must be equal."""
    if isinstance(value, int):
        return value
    same = _solved(value.node.shape_env)
    return _tidy(value.node.expr.subs(same) if same else value.node.expr)


_SOLVED: WeakKeyDictionary[Any, tuple[int, dict[Expr, Expr]]] = WeakKeyDictionary()


def _solved(env: Any) -> dict[Expr, Expr]:
    """What tracing has found out about products of sizes, each finding (a guard of Dynamo's) solved for a symbol: that
    the labels have as many tokens as the logits, though batch and length of each may have symbols of their own. Of
    symbols that are equal Dynamo has replaced one already."""
    known, found = _SOLVED.get(env, (0, {}))
    if known != len(env.guards):
        found = {}
        for equation in [g.expr for g in env.guards if isinstance(g.expr, sympy.Eq)]:
            a, b = (sympy.sympify(env.replace(side)).subs(found) for side in equation.args)
            own = sorted(b.free_symbols - a.free_symbols, key=str) if a.is_Mul and b.is_Mul else []
            if own and not sympy.diff(b, own[0], 2):
                solved = {own[0]: sympy.cancel(a * own[0] / b)}
                found = {s: e.subs(solved) for s, e in found.items()} | solved
        _SOLVED[env] = len(env.guards), found
    return found


def shape_of(value: torch.Tensor) -> tuple[Size, ...]:
    """The sizes of a (fake) tensor."""
    return tuple(size_of(s) for s in value.shape)


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes, 1 of none."""
    found: Size = 1
    for s in sizes:
        found = s if found == 1 else _tidy(found * s)
    return found


def quotient(a: Size, b: Size) -> Size | None:
    """``a / b`` where that is known to be whole, else ``None``."""
    if a == b:
        return 1
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    return None if b == 0 else _symbolic_quotient(a, b)


@lru_cache(maxsize=4096)
def _symbolic_quotient(a: Size, b: Size) -> Size | None:
    ratio = sympy.cancel(sympy.sympify(a) / b)
    return _tidy(ratio) if sympy.fraction(ratio)[1] == 1 else None


def _tidy(value: Size) -> Size:
    """One form for equal sizes, so that ``==`` decides."""
    if isinstance(value, int):
        return value
    value = sympy.expand(value)
    return int(value) if value.is_Integer else value


# --- dimensions -----------------------------------------------------------------------------------------------------


def dim_size(dim: Dim) -> Size:
    """The size of a dimension."""
    return product(a.size for a in dim)


def sizes(dims: Dims) -> tuple[Size, ...]:
    """The shape of a tensor with these dimensions."""
    return tuple(dim_size(d) for d in dims)


def atoms(dims: Dims, axis: Axis) -> list[Atom]:
    """All atoms of an axis, in the order of the dimensions."""
    return [a for d in dims for a in d if a.axis == axis]


def chain(dims: Dims, axis: Axis) -> list[Atom]:
    """The atoms of an axis, outer to inner; an error unless they cover a whole index, each element once."""
    left, found, stride = atoms(dims, axis), list[Atom](), product(())
    while left:
        inner = next((a for a in left if a.stride == stride), None)
        if inner is None:
            raise UnsupportedError(f"the {axis}s of {show(dims)} are not all there")
        left.remove(inner)
        found.append(inner)
        stride = product((stride, inner.size))
    return found[::-1]


def merged(run: Iterable[Atom]) -> Dim:
    """The atoms of one dimension, neighbours that continue each other as one."""
    found: list[Atom] = []
    for a in run:
        last = found[-1] if found else None
        if last is not None and last.axis == a.axis and last.stride == product((a.size, a.stride)):
            found[-1] = Atom(a.axis, product((last.size, a.size)), a.stride)
        else:
            found.append(a)
    return tuple(found)


def natural(shape: Sequence[Size]) -> Dims:
    """The layout of an activation of which nothing is known: the last dimension is the columns, the others the rows."""
    lead, cols = shape[:-1], shape[-1]
    dims = [*row_dims(lead), (Atom("column", cols, 1),)]
    return tuple(dims)


def row_dims(shape: Sequence[Size]) -> list[Dim]:
    """Dimensions that together are the rows, outer to inner. One row is an atom too: no axis may get lost."""
    if all(s == 1 for s in shape):
        return [(Atom("row", 1, 1),) if i == 0 else () for i in range(len(shape))]
    strides = [product(shape[i + 1 :]) for i in range(len(shape))]
    return [() if s == 1 else (Atom("row", s, t),) for s, t in zip(shape, strides, strict=True)]


def show(dims: Dims) -> str:
    """A layout for people: ``(B, 4c16, S, 16c1)`` says which dimension holds which columns at which stride."""
    words = ["*".join(f"{a.size}{a.axis[0]}{a.stride}" for a in d) or "1" for d in dims]
    return f"({', '.join(words)})"


# --- views ----------------------------------------------------------------------------------------------------------


def reshape(dims: Dims, shape: Sequence[Size]) -> Dims:
    """The same elements in the same order under another shape; an error where a dimension would cut an atom."""
    flat = [a for d in dims for a in d]
    todo = [a for a in flat if a.size != 1][::-1]
    found: list[Dim] = []
    for size in shape:
        taken: list[Atom] = []
        left: Size = size
        while left != 1:
            if not todo:
                raise UnsupportedError(f"{show(dims)} cannot be seen as {tuple(shape)}")
            left = _take(todo, taken, left)
        found.append(merged(taken))
    if todo:
        raise UnsupportedError(f"{show(dims)} cannot be seen as {tuple(shape)}")
    return _with_singles(found, [a for a in flat if a.size == 1])


def _take(todo: list[Atom], taken: list[Atom], left: Size) -> Size:
    """Move the next atom, or as much of it as ``left`` asks for, into a dimension; what is still missing."""
    a = todo.pop()
    rest = quotient(left, a.size)
    if rest is not None:
        taken.append(a)
        return rest
    inner = quotient(a.size, left)
    if inner is None:
        raise UnsupportedError(f"a dimension of {a.size} cannot be cut into {left} and a rest")
    taken.append(Atom(a.axis, left, product((inner, a.stride))))
    todo.append(Atom(a.axis, inner, a.stride))
    return 1


def _with_singles(dims: list[Dim], singles: list[Atom]) -> Dims:
    """An axis of one element goes where a dimension of size 1 is, else to the end: there is only index 0."""
    if singles and not dims:
        raise UnsupportedError("a tensor without dimensions has no rows and no columns")
    found = list(dims)
    for a in singles:
        free = [i for i, d in enumerate(found) if not d] or [len(found) - 1]
        at = free[0] if a.axis == "row" else free[-1]
        found[at] = (*found[at], a)
    return tuple(found)


def permute(dims: Dims, order: Sequence[int]) -> Dims:
    """Dimension ``order[i]`` at place ``i``."""
    return tuple(dims[i] for i in order)


def move(rank: int, a: int, b: int) -> list[int]:
    """The order that exchanges two dimensions."""
    order = list(range(rank))
    order[a], order[b] = order[b], order[a]
    return order


# --- parts of columns -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ColumnDim:
    """A dimension of columns: ``groups`` times ``size`` blocks of ``block`` columns each."""

    groups: int
    size: int
    block: int


def column_dim(dims: Dims, at: int, cols: int) -> ColumnDim:
    """How dimension ``at`` lies in ``cols`` columns; an error where it is not one run of columns."""
    if len(dims[at]) != 1 or dims[at][0].axis != "column":
        raise UnsupportedError(f"dimension {at} of {show(dims)} is not a run of columns")
    (a,) = dims[at]
    if not (isinstance(a.size, int) and isinstance(a.stride, int)) or a.size == 0:
        raise UnsupportedError(f"dimension {at} of {show(dims)} has no fixed number of columns")
    return ColumnDim(cols // (a.size * a.stride), a.size, a.stride)


def resized(dims: Dims, at: int, old: ColumnDim, size: int) -> Dims:
    """The dimensions after dimension ``at``, which is ``old``, has got ``size`` blocks; columns stay without gaps."""
    span = old.size * old.block

    def fit(a: Atom) -> Atom:
        if a.axis == "row" or not isinstance(a.stride, int) or a.stride < span:
            return a
        return Atom("column", a.size, a.stride // span * size * old.block)

    found = [tuple(fit(a) for a in d) for d in dims]
    found[at] = (Atom("column", size, old.block),)
    return without_single_columns(tuple(found))


def without_single_columns(dims: Dims) -> Dims:
    """The dimensions without column atoms of size 1, save one where there is nothing else."""
    single = [a for a in atoms(dims, "column") if a.size == 1]
    if not single:
        return dims
    keep = single[0] if len(single) == len(atoms(dims, "column")) else None
    found: list[Dim] = []
    for d in dims:
        kept = tuple(a for a in d if a.axis == "row" or a.size != 1 or a is keep)
        keep = None if keep in kept else keep
        found.append(kept)
    return tuple(found)
