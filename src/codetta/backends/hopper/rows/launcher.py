"""Compiled Triton kernels, launched by addresses: Triton's own way to a kernel takes longer than some of them run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

log = logging.getLogger("codetta")
Grid = tuple[int, int, int]
# (grid, stream, arguments): tensors are given by their addresses
Launcher = Callable[[Grid, int, Sequence[object]], None]
PARTS = ("run", "function", "packed_metadata")  # of a compiled kernel, as Inductor uses them too


def launcher_of(made: Any) -> Launcher | None:
    """How a compiled kernel is launched without Triton's look-ups; None where this Triton's kernels have other parts.

    Triton 3.2 to 3.9 agree. Hooks around launches (Proton's) are not called."""
    missing = [name for name in PARTS if getattr(made, name, None) is None]
    if missing or not callable(made.run):
        _tell(", ".join(missing) or "run")
        return None
    run, function, metadata = made.run, made.function, made.packed_metadata

    def launch(grid: Grid, stream: int, given: Sequence[object]) -> None:
        run(grid[0], grid[1], grid[2], stream, function, metadata, None, None, None, *given)

    return launch


@cache
def _tell(missing: str) -> None:
    log.info("a compiled Triton kernel has no %s here: finalizes are launched by Triton, at 10 us more each", missing)
