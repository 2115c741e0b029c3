"""How many bytes a value takes, for a nominal row count where that is only known at run time."""

from __future__ import annotations

from codetta.core.types import Dim, Kind, Type

NOMINAL_ROWS = 16_384  # the token count at which costs are compared while planning
TILE_M = TILE_N = 128  # the tile of the byte model and of the reference backend


def dim(d: Dim | None, rows: int) -> int:
    """The number a size stands for when the symbol is ``rows``."""
    if d is None:
        return 1
    return d if isinstance(d, int) else int(d.scale * rows)


def bytes_of(t: Type, rows: int = NOMINAL_ROWS) -> int:
    """The bytes of a whole value."""
    return dim(t.rows, rows) * dim(t.cols, rows) * t.dtype.bytes


def partial_bytes(source: Type, t: Type, rows: int = NOMINAL_ROWS) -> int:
    """The bytes of a reduction written one part per tile of its source."""
    if t.kind is Kind.COLVEC:
        return bytes_of(t, rows) * -(-dim(source.cols, rows) // TILE_N)
    return bytes_of(t, rows) * -(-dim(source.rows, rows) // TILE_M)
