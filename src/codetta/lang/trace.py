"""The decorators ``@epilogue``, ``@finalize`` and ``@leftover``: a plain Python function becomes a Program."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

from codetta.core.types import DType
from codetta.errors import TypeMismatch
from codetta.ir.program import Gemm, Program, Role
from codetta.lang.annotations import Value
from codetta.lang.body import program_of
from codetta.lang.record import user_frame, user_line
from codetta.lang.signature import gemm_of
from codetta.lang.source import program_text

if TYPE_CHECKING:
    from torch import Tensor

    from codetta.runtime.author import Backward

Traced = Callable[..., Value | Mapping[str, Value]]
Decorator = Callable[[Traced], "Epilogue"]


@dataclass(frozen=True)
class Epilogue:
    """A program written as a Python function; ``str()`` is its exact source."""

    program: Program
    fn: Traced

    def __post_init__(self) -> None:
        """Take over the function's name and docstring, for help()."""
        self.__dict__.update(__name__=self.program.name, __doc__=self.fn.__doc__, __module__=self.fn.__module__)

    def __str__(self) -> str:
        return program_text(self.program)

    def vjp(self, incoming: str | None = None) -> Backward:
        """The derived backward programs, in order; see ``codetta.runtime.author.vjp``."""
        from codetta.runtime.author import vjp

        return vjp(self.program, incoming)

    def run(self, *operands: Tensor, **params: Tensor | float) -> dict[str, Tensor]:
        """The outputs on PyTorch tensors; see ``codetta.runtime.author.run``."""
        from codetta.runtime.author import run

        return run(self.program, *operands, **params)


@overload
def epilogue(fn: Traced, /) -> Epilogue: ...
@overload
def epilogue(
    *, name: str | None = None, gemm: str | None = None, k: int | str | None = None, dtype: DType | None = None
) -> Decorator: ...
def epilogue(
    fn: Traced | None = None,
    /,
    *,
    name: str | None = None,
    gemm: str | None = None,
    k: int | str | None = None,
    dtype: DType | None = None,
) -> Epilogue | Decorator:
    """The function as the epilogue of a GEMM, whose result is its first parameter, ``acc: Tile``.

    ``gemm`` ("nt" x @ w.T, "nn" x @ w, "tn" dz.T @ x), its inner size ``k`` and the operands' ``dtype`` bind it to one
    GEMM; without them it fits any."""
    return _decorated("epilogue", fn, name, gemm_of(gemm, k, dtype))


@overload
def finalize(fn: Traced, /) -> Epilogue: ...
@overload
def finalize(*, name: str | None = None) -> Decorator: ...
def finalize(fn: Traced | None = None, /, *, name: str | None = None) -> Epilogue | Decorator:
    """The function as a finalize: a small step on vectors, such as turning a sum of squares into rstd."""
    return _decorated("finalize", fn, name)


@overload
def leftover(fn: Traced, /) -> Epilogue: ...
@overload
def leftover(*, name: str | None = None) -> Decorator: ...
def leftover(fn: Traced | None = None, /, *, name: str | None = None) -> Epilogue | Decorator:
    """The function as a leftover: a pass over tiles without a GEMM, where a whole row is at hand."""
    return _decorated("leftover", fn, name)


def _decorated(role: Role, fn: Traced | None, name: str | None, gemm: Gemm | None = None) -> Epilogue | Decorator:
    def decorate(f: Traced) -> Epilogue:
        if not inspect.isfunction(f):
            raise TypeMismatch(f"@{role} decorates a function, not {f!r}", where=user_line())
        return Epilogue(program_of(f, role, f.__name__ if name is None else name, gemm, user_frame().f_locals), f)

    return decorate if fn is None else decorate(fn)
