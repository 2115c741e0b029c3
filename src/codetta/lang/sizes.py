"""A program written for any size, at given sizes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from codetta.core.node import Node, node
from codetta.core.types import Dim, Sym, Type, boolean, f64
from codetta.errors import ShapeError
from codetta.ir import ops
from codetta.ir.build import cast
from codetta.ir.program import Gemm, Program


def with_sizes(program: Program, sizes: Mapping[str, int]) -> Program:
    """The program with each named symbol ("N", or "M" for the rows) replaced by a number."""
    known = {d.name for d in symbols(program)}
    unknown = sizes.keys() - known
    if unknown:
        hint = f"it has: {', '.join(sorted(known)) or 'none'}"
        raise ShapeError(f"{program.name} has no size called {', '.join(sorted(unknown))}", hint=hint)
    leaves = [node(p.op, attrs=tuple(_at(a, sizes) for a in p.attrs), where=p.where) for p in program.params]
    gemm = program.gemm and Gemm(program.gemm.form, at_size(program.gemm.k, sizes), program.gemm.dtype)
    return Program(program.name, program.role, tuple(leaves), on_leaves(program, leaves, sizes), gemm)


def on_leaves(
    program: Program, leaves: Sequence[Node], sizes: Mapping[str, int], *, wide: bool = False
) -> tuple[tuple[str, Node], ...]:
    """The outputs over other nodes in the place of the parameters, whose dtypes they take; a ``wide`` program is
    computed in float64: it rounds to no narrower float in between, and functions of numbers alone are as wide."""
    done: dict[Node, Node] = dict(zip(program.params, leaves, strict=True))
    for n in program.body:
        if n in done:
            continue
        args = tuple(done[a] for a in n.args)
        if wide and n.op is ops.CAST and n.type.dtype.is_float:
            done[n] = cast(args[0], f64)
        else:
            if wide and n.op.family == "map" and n.type.dtype.is_float and all(a.op is ops.CONST for a in args):
                args = tuple(a if a.type.dtype is boolean else cast(a, f64) for a in args)
            done[n] = node(n.op, *args, attrs=tuple(_at(a, sizes) for a in n.attrs), where=n.where)
    return tuple((name, done[n]) for name, n in program.outputs)


def symbols(program: Program) -> list[Sym]:
    """Every symbolic size that a program names, as often as it does."""
    found = [d for n in [*program.params, *program.body] for a in n.attrs for d in _dims(a)]
    return [d for d in (*found, program.gemm and program.gemm.k) if isinstance(d, Sym)]


def learn_sizes(sizes: dict[str, Dim], name: str, declared: Type, shape: Sequence[Dim]) -> None:
    """Note what the symbols of a parameter's type stand for, given its shape; ShapeError where it does not fit."""
    wanted = [d for d in (declared.rows, declared.cols) if d is not None]
    shown = ", ".join(map(str, shape))
    if len(wanted) != len(shape):
        raise ShapeError(f"{name} is {declared}, given a tensor of shape ({shown})")
    for d, size in zip(wanted, shape, strict=True):
        if not isinstance(d, Sym):
            if d != size:
                raise ShapeError(f"{name} is {declared}, given a tensor of shape ({shown})")
            continue
        found = sizes.setdefault(d.name, _unit(d, size))
        if _times(found, d) != size:
            raise ShapeError(f"{name}: {d} is {size} here, but {d.name} is {found}")


def _unit(d: Sym, size: Dim) -> Dim:
    return int(size / d.scale) if isinstance(size, int) else Sym(size.name, size.scale / d.scale)


def _times(unit: Dim, d: Sym) -> Dim:
    if isinstance(unit, Sym):
        return Sym(unit.name, unit.scale * d.scale)
    number = unit * d.scale
    return int(number) if number.denominator == 1 else -1


def _dims(attr: Hashable) -> tuple[object, ...]:
    return (attr.rows, attr.cols) if isinstance(attr, Type) else (attr,)


def _at(attr: Hashable, sizes: Mapping[str, int]) -> Hashable:
    match attr:
        case Type():
            return at_sizes(attr, sizes)
        case Sym():
            return at_size(attr, sizes)
    return attr


def at_sizes(t: Type, sizes: Mapping[str, int]) -> Type:
    """A type with the named symbols replaced."""
    rows, cols = (None if d is None else at_size(d, sizes) for d in (t.rows, t.cols))
    return Type(t.kind, t.dtype, rows, cols)


def at_size(d: Dim, sizes: Mapping[str, int]) -> Dim:
    """A size with the named symbols replaced."""
    if not isinstance(d, Sym) or d.name not in sizes:
        return d
    number = d.scale * sizes[d.name]
    if number.denominator != 1:
        raise ShapeError(f"{d} is no whole number of columns at {d.name} = {sizes[d.name]}")
    return int(number)
