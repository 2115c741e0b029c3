"""A program written for any size, at given sizes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from codetta.core.node import Node, node
from codetta.core.types import Dim, Sym, Type
from codetta.errors import ShapeError
from codetta.ir.program import Gemm, Program


def with_sizes(program: Program, sizes: Mapping[str, int]) -> Program:
    """The program with each named symbol ("N", or "M" for the rows) replaced by a number."""
    unknown = sizes.keys() - {d.name for d in _symbols(program)}
    if unknown:
        known = ", ".join(sorted({d.name for d in _symbols(program)})) or "none"
        raise ShapeError(f"{program.name} has no size called {', '.join(sorted(unknown))}", hint=f"it has: {known}")
    done: dict[Node, Node] = {}
    for n in [*program.params, *program.body]:
        attrs = tuple(_at(a, sizes) for a in n.attrs)
        done[n] = node(n.op, *(done[a] for a in n.args), attrs=attrs, where=n.where)
    gemm = program.gemm and Gemm(program.gemm.form, _dim(program.gemm.k, sizes), program.gemm.dtype)
    outputs = tuple((name, done[n]) for name, n in program.outputs)
    return Program(program.name, program.role, tuple(done[p] for p in program.params), outputs, gemm)


def _symbols(program: Program) -> list[Sym]:
    found = [d for n in [*program.params, *program.body] for a in n.attrs for d in _dims(a)]
    return [d for d in (*found, program.gemm and program.gemm.k) if isinstance(d, Sym)]


def _dims(attr: Hashable) -> tuple[object, ...]:
    return (attr.rows, attr.cols) if isinstance(attr, Type) else (attr,)


def _at(attr: Hashable, sizes: Mapping[str, int]) -> Hashable:
    match attr:
        case Type():
            rows, cols = (None if d is None else _dim(d, sizes) for d in (attr.rows, attr.cols))
            return Type(attr.kind, attr.dtype, rows, cols)
        case Sym():
            return _dim(attr, sizes)
    return attr


def _dim(d: Dim, sizes: Mapping[str, int]) -> Dim:
    if not isinstance(d, Sym) or d.name not in sizes:
        return d
    number = d.scale * sizes[d.name]
    if number.denominator != 1:
        raise ShapeError(f"{d} is no whole number of columns at {d.name} = {sizes[d.name]}")
    return int(number)
