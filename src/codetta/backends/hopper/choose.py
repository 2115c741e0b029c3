"""Which kernel a program gets: its lowering and its configuration, or the reason why it has none."""

from __future__ import annotations

from functools import lru_cache

from codetta.backends.hopper.columns import ALIGN, NotLowered
from codetta.backends.hopper.config import Config, bucket
from codetta.backends.hopper.lower import lower
from codetta.backends.hopper.lowered import Lowered
from codetta.backends.hopper.space import candidates
from codetta.backends.hopper.table import Entry, key_of, look_up, tables
from codetta.ir.program import Program


def choose(program: Program, rows: int | None = None) -> tuple[Lowered, Config]:
    """The lowering and the configuration for a number of tokens (None: a training step's many); NotLowered says why the
    program is no single kernel. All numbers of one ``bucket`` get the same."""
    return _choose(program, bucket(rows))


@lru_cache(maxsize=4096)
def _choose(program: Program, rows: int) -> tuple[Lowered, Config]:
    lowered = lowered_of(program)
    measured = _measured(program, lowered, rows)
    if measured is not None and measured.config is not None:
        return lowered, measured.config
    found = candidates(lowered, *extent(program, lowered, rows))
    if not found:
        raise NotLowered("its ranges of columns or heads fit no tile")
    return lowered, found[0]


def bare_config(program: Program, rows: int | None = None) -> Config | None:
    """The configuration of our own kernel for a GEMM without an epilogue, where it was measured to be faster than the
    library's; None: the library's runs."""
    return _bare(program, bucket(rows))


@lru_cache(maxsize=4096)
def _bare(program: Program, rows: int) -> Config | None:
    if not is_bare(program):
        return None
    try:
        found = _measured(program, lowered_of(program), rows)
    except NotLowered:
        return None
    return found.config if found is not None else None


def own_kernel(program: Program, rows: int | None = None, batch_invariant: bool = False) -> bool:
    """Whether a program runs on a kernel of ours, if it lowers, and not as a bare GEMM of the library, which picks its
    algorithm by the number of rows. A weight gradient sums over rows: no row of it belongs to a token."""
    if not is_bare(program):
        return True
    sums_tokens = program.gemm is not None and program.gemm.form == "tn"
    return (batch_invariant and not sums_tokens) or bare_config(program, rows) is not None


def is_tuned(program: Program, rows: int | None = None) -> bool:
    """Whether a table has an entry for a program at these very sizes, and not just one near them."""
    try:
        key = key_of(program, lowered_of(program), bucket(rows))
    except NotLowered:
        return False
    return any(key in table.entries for table in tables())


def _measured(program: Program, lowered: Lowered, rows: int) -> Entry | None:
    return look_up(key_of(program, lowered, rows), lowered)


def extent(program: Program, lowered: Lowered, rows: int) -> tuple[int, int]:
    """The inner size and the rows of a program's GEMM at a number of tokens."""
    k = key_of(program, lowered, rows).k
    return (rows, k) if program.gemm is not None and program.gemm.form == "tn" else (k, rows)


def forget() -> None:
    """Read the tables anew, after one was written."""
    for known in (tables, _choose, _bare):
        known.cache_clear()


@lru_cache(maxsize=4096)
def lowered_of(program: Program) -> Lowered:
    """The program's epilogue as one function; NotLowered where the program is no single kernel at any size of tile."""
    gemm, acc = program.gemm, program.params[0].type if program.params else None
    if gemm is None or acc is None:
        raise NotLowered("no GEMM")
    if gemm.form == "tn":
        if not is_bare(program):
            raise NotLowered("an epilogue behind a weight gradient")
        if isinstance(acc.rows, int) and acc.rows % ALIGN:
            raise NotLowered(f"a gradient of {acc.rows} rows, no multiple of {ALIGN}")
    if isinstance(gemm.k, int) and gemm.k % ALIGN:
        raise NotLowered(f"an inner size of {gemm.k} is no multiple of {ALIGN}")
    return lower(program)


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
