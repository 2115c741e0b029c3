"""Plan -> callable, one package per target."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from codetta.backends.base import Backend, HeadRows
from codetta.backends.hopper.support import why_not, why_not_installed
from codetta.errors import SettingsError, UnsupportedError
from codetta.ir.program import Program
from codetta.partition.plan import Plan

# Where each backend's Executable lives. It is imported when it is asked for: kernels need packages that few have.
BACKENDS = {
    "reference": "codetta.backends.reference.execute",
    "hopper": "codetta.backends.hopper.execute",
}


def get_backend(name: str) -> Backend:
    """The backend of that name; SettingsError names those there are."""
    if name not in BACKENDS:
        raise SettingsError(f"no backend {name!r}", hint=f"there are: {', '.join(sorted(BACKENDS))}")
    backend: Backend = importlib.import_module(BACKENDS[name]).Executable
    return backend


def backend_on(device: torch.device) -> str:
    """The name of the backend for what is not captured: kernels where they run on that device."""
    return "hopper" if device.type == "cuda" and why_not(device) is None else "reference"


def head_rows(name: str) -> HeadRows:
    """A backend's functions of a head's rows."""
    found: Any = importlib.import_module(f"codetta.backends.{name}.exponentials")
    rows: HeadRows = found
    return rows


def attention(name: str) -> Any:
    """A backend's attention: ``reference.attention``."""
    return importlib.import_module(f"codetta.backends.{name}.attention")


def add_rows(name: str) -> Callable[[Tensor, Tensor, Tensor, int], None]:
    """A backend's way to add an embedding's gradient to what its weight already has: ``reference.embedding``."""
    found: Callable[[Tensor, Tensor, Tensor, int], None]
    found = importlib.import_module(f"codetta.backends.{name}.embedding").add_rows
    return found


def get_bench(progress: Callable[[str, int, int], None]) -> Any:
    """What compiles and times kernels on this GPU; UnsupportedError says why there are none."""
    reason = why_not()
    if reason is not None:
        raise UnsupportedError(f"there is nothing to tune here: {reason}", hint="codetta doctor says more")
    return importlib.import_module("codetta.backends.hopper.trial").Gpu(progress)


def as_kernels(programs: Sequence[Program], rows: int) -> list[Any]:
    """What each program is as a kernel for SM90 (``hopper.built``); UnsupportedError where none can be compiled."""
    reason = why_not_installed()
    if reason is not None:
        raise UnsupportedError(f"kernels cannot be compiled here: {reason}", hint="codetta doctor says more")
    found: list[Any] = importlib.import_module("codetta.backends.hopper.built").built(programs, rows)
    return found


def prepare(
    name: str, plans: Iterable[Plan], *, batch_invariant: bool = False, rows: int | None = None
) -> Callable[[], None]:
    """Begin to compile what these plans will need for a number of tokens, side by side. What is returned waits for that
    and must be called before any of them runs."""
    if name != "hopper":
        return lambda: None
    build = importlib.import_module("codetta.backends.hopper.build")
    wait: Callable[[], None] = build.begin(build.jobs_of(plans, batch_invariant, rows))
    return wait
