"""Plan -> callable, one package per target."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from codetta.backends.base import Backend
from codetta.errors import SettingsError
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


def prepare(name: str, plans: Iterable[Plan], *, batch_invariant: bool = False) -> None:
    """Compile what these plans will need, side by side, before any of them runs."""
    if name == "hopper":
        build = importlib.import_module("codetta.backends.hopper.build")
        build.compile_all(build.jobs_of(plans, batch_invariant))
