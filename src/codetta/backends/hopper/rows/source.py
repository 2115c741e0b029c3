"""Generated source text as a Triton kernel, for the GPU or for Triton's interpreter."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from types import FunctionType
from typing import Any

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from codetta.backends.hopper.rows.functions import FUNCTIONS

Wrap = Callable[..., Any]


def _interpreted(fn: FunctionType, **options: Any) -> Any:
    return InterpretedFunction(fn)


def _bind(scope: dict[str, Any], functions: Sequence[Any], wrap: Wrap) -> dict[str, Any]:
    """The globals of a kernel with these functions among them, each seeing the others."""
    for fn in functions:
        bound = FunctionType(fn.__code__, scope, fn.__name__)
        bound.__module__, bound.__doc__, bound.__annotations__ = fn.__module__, fn.__doc__, fn.__annotations__
        scope[fn.__name__] = wrap(bound)
    return scope


def _names(wrap: Wrap) -> dict[str, Any]:
    """The globals of a kernel: the language, and the functions of ours."""
    return _bind({"tl": tl, "add": tl.standard._sum_combine, "__name__": __name__}, FUNCTIONS, wrap)


@cache
def bound_kernel(fn: Any, interpreted: bool, called: tuple[Any, ...] = ()) -> Any:
    """A kernel that is written by hand, with the functions that it calls, as those of generated text are bound."""
    names, wrap = (ON_CPU, _interpreted) if interpreted else (ON_GPU, triton.jit)
    return _bind(dict(names), (*called, fn), wrap)[fn.__name__]


ON_GPU: dict[str, Any] = _names(triton.jit)
ON_CPU: dict[str, Any] = _names(_interpreted)


def kernel_of(text: str, name: str, unspecialised: Sequence[str], interpreted: bool = False) -> Any:
    """The function ``name`` of the text, as a kernel; the text is kept where tracebacks and Triton look for it."""
    file = f"<codetta {name} {sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope = dict(ON_CPU if interpreted else ON_GPU)
    exec(compile(text, file, "exec"), scope)
    fn = scope[name]
    return _interpreted(fn) if interpreted else triton.jit(fn, do_not_specialize=list(unspecialised))
