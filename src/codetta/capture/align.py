"""How operands of an elementwise operator meet: which rows and columns each dimension is, and what a newcomer is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codetta.capture.layout import Atom, Dim, Dims, Size, atoms, chain, dim_size, product, row_dims, show
from codetta.core.node import Node
from codetta.core.types import Kind
from codetta.errors import UnsupportedError

Shape = tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """An ATen tensor that is understood: its node, and where each of its dimensions lies in the node's plane.

    Column atoms count in the node's own columns: groups for a GroupVec, the inside of a group for a Table."""

    node: Node
    dims: Dims


@dataclass(frozen=True, slots=True)
class Form:
    """What a tensor from outside becomes: the kind, its column count, and its dimensions (some repeated to fit)."""

    kind: Kind
    cols: int | None
    dims: Dims


@dataclass(frozen=True, slots=True)
class Alignment:
    """The dimensions of a result, and the form of each newcomer."""

    dims: Dims
    newcomers: tuple[Form, ...]


def align(known: Sequence[Value], newcomers: Sequence[Shape]) -> Alignment:
    """Broadcast understood values and tensors of which only the shape is known, as ATen broadcasts their shapes."""
    rank = max([len(v.dims) for v in known] + [len(s) for s in newcomers])
    cols = _common_columns([v.node for v in known])
    dims: Dims = ((),) * rank
    for v in known:
        dims = _union(dims, _padded(_lifted(v, cols), rank))
    for shape in sorted(newcomers, key=lambda s: sum(size != 1 for size in s), reverse=True):
        dims = _with_free(dims, shape)
    return Alignment(dims, tuple(form_of(shape, dims) for shape in newcomers))


def _common_columns(nodes: Sequence[Node]) -> int | None:
    """The column count of the plane in which all values lie, or ``None`` where no value says it."""
    found: dict[Kind, set[object]] = {}
    for n in nodes:
        found.setdefault(n.type.kind, set()).add(n.type.cols)
    full = found.get(Kind.TILE, set()) | found.get(Kind.ROWVEC, set())
    groups, inside = found.get(Kind.GROUPVEC, set()), found.get(Kind.TABLE, set())
    if max(len(full), len(groups), len(inside)) > 1:
        raise UnsupportedError(f"the operands have different column counts: {[n.type for n in nodes]}")
    sizes = [next(iter(s)) for s in (full, groups, inside) if s]
    if full and isinstance(sizes[0], int):
        return sizes[0]
    if len(sizes) == 2 and isinstance(sizes[0], int) and isinstance(sizes[1], int):
        return sizes[0] * sizes[1]
    return None


def _lifted(v: Value, cols: int | None) -> Dims:
    """The dimensions of a value, column atoms counted in the whole plane."""
    groups = v.node.type.cols
    if v.node.type.kind is not Kind.GROUPVEC or cols is None or not isinstance(groups, int):
        return v.dims
    if groups == 0 or cols % groups:
        raise UnsupportedError(f"{cols} columns are no {groups} groups")
    return _scaled(v.dims, cols // groups)


def _scaled(dims: Dims, factor: int) -> Dims:
    def scale(a: Atom) -> Atom:
        return a if a.axis == "row" else Atom(a.axis, a.size, product((a.stride, factor)))

    return tuple(tuple(scale(a) for a in d) for d in dims)


def _padded(dims: Dims, rank: int) -> Dims:
    return ((),) * (rank - len(dims)) + dims


def _union(a: Dims, b: Dims) -> Dims:
    found: list[Dim] = []
    for x, y in zip(a, b, strict=True):
        if x and y and x != y:
            raise UnsupportedError(f"dimensions lie differently: {show(a)} meets {show(b)}")
        found.append(x or y)
    return tuple(found)


def _with_free(dims: Dims, shape: Shape) -> Dims:
    """The dimensions, with a place for those of a newcomer that no understood value has."""
    lead, found = len(dims) - len(shape), list(dims)
    if shape and not dims[-1] and not atoms(dims, "column"):
        found[-1] = (Atom("column", shape[-1], 1),)
    if len(shape) > 1 and not atoms(dims, "row"):
        free = [i for i in range(lead, len(dims)) if not found[i]]
        for i, d in zip(free, row_dims([shape[i - lead] for i in free]), strict=True):
            found[i] = d
    for i, size in enumerate(shape, lead):
        if size != 1 and not found[i]:
            raise UnsupportedError(f"no place for dimension {i} of a tensor of shape {shape} beside {show(dims)}")
    return tuple(found)


def form_of(shape: Shape, dims: Dims) -> Form:
    """What a tensor of this shape is among values that lie as ``dims``; repeated along dimensions where it must be."""
    lead = len(dims) - len(shape)
    mine = [i >= lead and bool(d) and shape[i - lead] == dim_size(d) for i, d in enumerate(dims)]
    for i, size in enumerate(shape, lead):
        if size not in (1, dim_size(dims[i])):
            raise UnsupportedError(f"a tensor of shape {shape} does not fit {show(dims)}")
    covered = _whole_rows(dims, mine)
    kept = tuple(d if c else () for d, c in zip(dims, covered, strict=True))
    rows, columns = bool(atoms(kept, "row")), atoms(kept, "column")
    if not columns:
        return Form(Kind.COLVEC if rows else Kind.SCALAR, None, kept)
    if len(columns) == len(atoms(dims, "column")):
        return Form(Kind.TILE if rows else Kind.ROWVEC, _count(kept), kept)
    return (_partial_columns(kept) if rows else None) or _repeated(dims, kept, rows=rows)


def _whole_rows(dims: Dims, mine: list[bool]) -> list[bool]:
    """Which dimensions a newcomer has after it is repeated over the rows that it lacks, if it has any."""
    rows = [any(a.axis == "row" for a in d) for d in dims]
    touched = any(r and m for r, m in zip(rows, mine, strict=True))
    return [m or (touched and r) for r, m in zip(rows, mine, strict=True)]


def _repeated(dims: Dims, kept: Dims, *, rows: bool) -> Form:
    """The form of a newcomer that is repeated over the columns that it lacks."""
    whole = tuple(k or (d if any(a.axis == "column" for a in d) else ()) for d, k in zip(dims, kept, strict=True))
    if len(atoms(whole, "row")) not in (0, len(atoms(dims, "row"))) or bool(atoms(whole, "row")) != rows:
        raise UnsupportedError(f"rows and columns share a dimension of {show(dims)}")
    return Form(Kind.TILE if rows else Kind.ROWVEC, _count(whole), whole)


def _partial_columns(kept: Dims) -> Form | None:
    """A Table where the kept columns are the inside of every group, a GroupVec where they are the groups."""
    strides = [a.stride for a in atoms(kept, "column")]
    if 1 in strides:
        try:
            return Form(Kind.TABLE, _count(kept), kept)
        except UnsupportedError:
            return None
    inside = min(s for s in strides if isinstance(s, int))
    groups = tuple(
        tuple(a if a.axis == "row" else Atom(a.axis, a.size, _divided(a.stride, inside)) for a in d) for d in kept
    )
    try:
        return Form(Kind.GROUPVEC, _count(groups), groups)
    except UnsupportedError:
        return None


def _divided(stride: Size, inside: int) -> Size:
    if not isinstance(stride, int) or stride % inside:
        raise UnsupportedError(f"columns at stride {stride} are no groups of {inside}")
    return stride // inside


def _count(dims: Dims) -> int:
    """The column count of dimensions that hold whole columns."""
    cols = product(a.size for a in chain(dims, "column"))
    if not isinstance(cols, int):
        raise UnsupportedError(f"the column count {cols} is not known before run time")
    return cols


def check(v: Value, shape: Shape) -> None:
    """Raise unless the dimensions of ``v`` have this shape and cover the node's plane, each element once."""
    found = tuple(dim_size(d) for d in v.dims)
    if found != shape:
        raise UnsupportedError(f"{show(v.dims)} is not of shape {shape}")
    t = v.node.type
    rows, columns = chain(v.dims, "row"), chain(v.dims, "column")
    cols = product(a.size for a in columns)
    if bool(rows) != (t.rows is not None) or bool(columns) != (t.cols is not None) or (columns and cols != t.cols):
        raise UnsupportedError(f"{show(v.dims)} does not lie on a {t}")
