"""What the environment asks of codetta; the only reader of environment variables."""

import logging
import os
from pathlib import Path
from typing import TypeVar

from codetta.errors import SettingsError

T = TypeVar("T")

_SWITCH = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def disabled() -> bool:
    """Whether ``CODETTA_DISABLE`` asks the backend to pass every graph through untouched, for bisecting."""
    return _choice("CODETTA_DISABLE", _SWITCH, default=False)


def verify_ir() -> bool:
    """Whether ``CODETTA_VERIFY_IR`` asks for the IR verifier between all passes."""
    return _choice("CODETTA_VERIFY_IR", _SWITCH, default=False)


def checked() -> bool:
    """Whether ``CODETTA_CHECK`` asks to look at values first, which waits for the GPU: a loss at its targets."""
    return _choice("CODETTA_CHECK", _SWITCH, default=False)


def log_level() -> int:
    """The level of the ``codetta`` logger that ``CODETTA_LOG`` asks for; warnings and worse by default."""
    return _choice("CODETTA_LOG", _LEVELS, default=logging.WARNING)


def cache_dir() -> Path:
    """Where codetta keeps what it compiled: ``CODETTA_CACHE_DIR``, by default ``codetta`` in the user's cache."""
    given = os.environ.get("CODETTA_CACHE_DIR", "").strip()
    if given:
        return Path(given).expanduser().absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))  # relative paths there are to be ignored, says its specification
    return (base if base.is_absolute() else Path.home() / ".cache") / "codetta"


def _choice(name: str, choices: dict[str, T], *, default: T) -> T:
    """The meaning of variable ``name``; unset or empty means ``default``."""
    given = os.environ.get(name, "").strip().lower()
    if not given:
        return default
    if given not in choices:
        raise SettingsError(f"{name}={given!r} means nothing", hint=f"use one of: {', '.join(choices)}")
    return choices[given]
