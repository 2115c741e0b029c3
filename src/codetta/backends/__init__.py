"""Plan -> callable, one package per target."""

from __future__ import annotations

from codetta.backends.base import Backend
from codetta.backends.reference.execute import Executable
from codetta.errors import SettingsError

BACKENDS: dict[str, Backend] = {"reference": Executable}


def get_backend(name: str) -> Backend:
    """The backend of that name; SettingsError names those there are."""
    if name not in BACKENDS:
        raise SettingsError(f"no backend {name!r}", hint=f"there are: {', '.join(sorted(BACKENDS))}")
    return BACKENDS[name]
