"""``codetta::program``, an epilogue written by hand, as the nodes it is made of, to be planned with its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from codetta.capture.align import Value
from codetta.capture.contractions import gemm
from codetta.capture.layout import Atom, Dims, shape_of
from codetta.capture.scope import Meaning, Scope
from codetta.capture.sources import fake
from codetta.core.node import Node
from codetta.core.types import AXES, Type
from codetta.errors import UnsupportedError
from codetta.runtime.operator import behind, program_of

PROGRAM = torch.ops.codetta.program.default


def _program(s: Scope, x: Any, weight: Any, params: Sequence[Any], digest: str) -> Meaning:
    program = program_of(digest)
    form = program.gemm.form if program.gemm is not None else "nt"
    product = gemm(s, x, weight, transposed=form == "nt")
    rows = product.dims[:-1]
    given = [_param(s, p.type, arg, rows) for p, arg in zip(program.params[1:], params, strict=True)]
    found = behind(program, product.node, given)
    return tuple(Value(n, _dims(n.type, rows)) for _, n in found)


def _dims(t: Type, rows: Dims) -> Dims:
    """Where the dimensions of a value lie: the leading ones are those of x."""
    own = () if t.cols is None else ((Atom("column", _known(t), 1),),)
    return (*(rows if "m" in AXES[t.kind] else ()), *own)


def _known(t: Type) -> int:
    if not isinstance(t.cols, int):
        raise UnsupportedError(f"{t} has no known number of columns")
    return t.cols


def _param(s: Scope, declared: Type, arg: Any, rows: Dims) -> Node:
    """A parameter: what is understood must lie as declared; anything else enters so."""
    shape = shape_of(fake(arg)) if isinstance(arg, fx.Node) else ()
    cols = shape[-1] if declared.cols is not None and shape else None
    if not isinstance(cols, int | None):
        raise UnsupportedError(f"{arg} has no known number of columns")
    dims = _dims(Type(declared.kind, declared.dtype, declared.rows, cols), rows)
    return s.as_kind(arg, declared.kind, cols, dims)


PROGRAMS = {PROGRAM: _program}
