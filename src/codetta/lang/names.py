"""The names of the language: filled where its functions are defined, read where errors look for what was meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LANGUAGE: dict[str, Callable[..., Any]] = {}  # every function by its name
