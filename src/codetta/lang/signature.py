"""A function's parameters as the named leaves of its program, and its decorator's arguments as a GEMM."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args, get_origin

from codetta.core.node import Node
from codetta.core.types import DType, Kind
from codetta.errors import CodettaError, SourceLine, TypeMismatch, UnsupportedError
from codetta.ir import build
from codetta.ir.program import Gemm, Role
from codetta.lang.annotations import KINDS, Annotation, Value, exact, size
from codetta.lang.record import source_line

CHOICE = (
    f"annotate it with one of {', '.join(c.__name__ for c in KINDS.values())}, as in `x: Tile` or `x: Tile[4096, bf16]`"
)


def parameters(fn: Callable[..., Any], role: Role, scope: Mapping[str, object]) -> tuple[Node, ...]:
    """One INPUT node for each parameter of ``fn``; text annotations are read in the scope of the decorator."""
    where = definition(fn)
    given = inspect.get_annotations(fn)
    found = []
    for p in inspect.signature(fn).parameters.values():
        _plain(p, where)
        if p.name not in given:
            raise TypeMismatch(f"parameter `{p.name}` has no annotation", where=where, hint=CHOICE)
        annotation = _annotation(p.name, _read(fn, given[p.name], scope, where), where)
        found.append(build.input_(p.name if annotation.name is None else annotation.name, annotation.type))
    if role == "epilogue":
        _accumulator_first(fn, found, where)
    return tuple(found)


def definition(fn: Callable[..., Any]) -> SourceLine:
    """The ``def`` line of a function, below its decorators."""
    file, first = fn.__code__.co_filename, fn.__code__.co_firstlineno
    candidates = (source_line(file, line) for line in range(first, first + 20))
    return next((c for c in candidates if c.text.startswith(("def ", "async def "))), source_line(file, first))


def _plain(p: inspect.Parameter, where: SourceLine) -> None:
    if p.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        raise TypeMismatch(
            f"parameter `{p.name}` is starred, positional-only or keyword-only; a program names each value it reads",
            where=where,
            hint=f"give it plain parameters: `{p.name}: Tile`",
        )
    if p.default is not inspect.Parameter.empty:
        raise TypeMismatch(
            f"parameter `{p.name}` has a default value, {p.default!r}; a program takes every value from its caller",
            where=where,
            hint=f"write the number into the body, or pass it: `{p.name}: Scalar`",
        )


def _read(fn: Callable[..., Any], annotation: object, scope: Mapping[str, object], where: SourceLine) -> object:
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, fn.__globals__, dict(scope))
    except CodettaError:
        raise
    except Exception as e:
        raise TypeMismatch(f"the annotation `{annotation}` cannot be read: {e}", where=where, hint=CHOICE) from e


def _annotation(name: str, annotation: object, where: SourceLine) -> Annotation:
    if isinstance(annotation, Annotation):
        return annotation
    sizes: tuple[object, ...] = ()
    if get_origin(annotation) is Annotated:
        annotation, *rest = get_args(annotation)
        sizes = tuple(rest)
    if isinstance(annotation, type) and issubclass(annotation, Value) and annotation is not Value:
        return exact(annotation.kind, sizes)
    raise TypeMismatch(f"parameter `{name}` is annotated {annotation!r}, no kind of value", where=where, hint=CHOICE)


def _accumulator_first(fn: Callable[..., Any], params: list[Node], where: SourceLine) -> None:
    names = [str(p.attrs[0]) for p in params]
    if names[:1] != ["acc"]:
        order = ", ".join(["acc: Tile", *(n for n in names if n != "acc")])
        problem = "has `acc` in another place" if "acc" in names else "has no parameter `acc`"
        raise TypeMismatch(
            f"the epilogue {problem}; the GEMM's result is its first parameter",
            where=where,
            hint=f"write `def {fn.__name__}({order})`; a step without a GEMM is a @finalize or a @leftover",
        )
    if params[0].type.kind is not Kind.TILE:
        raise TypeMismatch(f"`acc` is a {params[0].type}; a GEMM's result is a Tile", where=where, hint="`acc: Tile`")


def gemm_of(gemm: str | None = None, k: int | str | None = None, dtype: DType | None = None) -> Gemm | None:
    """The GEMM that a decorator's arguments describe, if they do."""
    if gemm is None and k is None and dtype is None:
        return None
    if gemm not in ("nt", "nn", "tn") or k is None or not isinstance(dtype, DType):
        raise UnsupportedError(
            f"a GEMM has a form, an inner size and an operand dtype; given are gemm={gemm!r}, k={k!r}, dtype={dtype!r}",
            hint='as in @epilogue(gemm="nt", k=4096, dtype=bf16); "nt" is x @ w.T, "nn" x @ w, "tn" dz.T @ x',
        )
    return Gemm(gemm, size(k), dtype)
