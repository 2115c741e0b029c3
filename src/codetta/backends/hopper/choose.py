"""Which kernel a program gets: its lowering and its default configuration, or the reason why it has none."""

from __future__ import annotations

from functools import lru_cache

from codetta.backends.hopper.columns import ALIGN, NotLowered
from codetta.backends.hopper.config import Config, candidates
from codetta.backends.hopper.lower import lower
from codetta.backends.hopper.lowered import Lowered
from codetta.ir.program import Program


@lru_cache(maxsize=4096)
def choose(program: Program) -> tuple[Lowered, Config]:
    """The lowering and the configuration; NotLowered says why the program is no single kernel."""
    gemm = program.gemm
    if gemm is None or gemm.form == "tn":
        raise NotLowered("an epilogue behind a weight gradient" if gemm is not None else "no GEMM")
    if isinstance(gemm.k, int) and gemm.k % ALIGN:
        raise NotLowered(f"an inner size of {gemm.k} is no multiple of {ALIGN}")
    lowered = lower(program)
    found = candidates(lowered)
    if not found:
        raise NotLowered("its ranges of columns or heads fit no tile")
    return lowered, found[0]


def why_split(program: Program) -> str | None:
    """Why a program runs as a GEMM and a map behind it; None if it is one kernel."""
    try:
        choose(program)
    except NotLowered as reason:
        return str(reason)
    return None


def is_bare(program: Program) -> bool:
    """A GEMM that stores its accumulator once: the library's own kernel does that."""
    return program.is_trivial and len(program.outputs) == 1
