"""What an epilogue is lowered to: one scalar function as source, and how its names are bound to memory.

Parameters and outputs go by position, so that programs that differ in names only are one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

from codetta.core.types import DType

Mode = Literal["element", "pair", "halves"]
OperandKind = Literal["tile", "row", "col", "table", "group", "scalar"]
SinkKind = Literal["row_sum", "row_max", "row_absmax", "col_sum", "col_max", "col_absmax", "lse", "select"]


@dataclass(frozen=True, slots=True)
class Operand:
    """A value that the function reads: columns ``start:stop`` of a parameter (None: all of it).

    ``inside`` is the width after which a table repeats, or of one group of a GroupVec."""

    name: str
    kind: OperandKind
    param: int
    dtype: DType
    columns: tuple[int, int] | None = None
    inside: int = 0


@dataclass(frozen=True, slots=True)
class Store:
    """A Tile that the function returns: it goes to columns ``columns`` of an output, from the accumulator's columns
    ``source`` (None: from all of them; half as many in "pair" mode)."""

    name: str
    output: int
    dtype: DType
    columns: tuple[int, int] | None = None
    source: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Sink:
    """A reduction: the function returns what is reduced, under ``name``; a product's two factors if ``factors``.

    ``index`` is the parameter that names the column of a select."""

    name: str
    output: int
    kind: SinkKind
    factors: bool = False
    index: int = -1
    columns: tuple[int, int] | None = None

    @property
    def over_rows(self) -> bool:
        """Whether it reduces rows away: a RowVec comes out."""
        return self.kind.startswith("col")


@dataclass(frozen=True, slots=True)
class Lowered:
    """An epilogue as a function of one element.

    ``mode`` says what it is called on: "element", one accumulator column; "pair", the columns j and j + N/2 of a
    stacked GEMM; "halves", one column with the one ``half`` columns away in its head, ``lane`` saying which it is.
    A range of columns begins and ends at a multiple of ``grain``; with ``whole_tiles`` no tile may be part padding,
    since a sum would count it."""

    mode: Mode
    operands: tuple[Operand, ...]
    stores: tuple[Store, ...]
    sinks: tuple[Sink, ...]
    source: str
    cols: int
    half: int = 0
    grain: int = 0
    whole_tiles: bool = False

    @property
    def digest(self) -> str:
        """A content hash."""
        return sha256(repr(self).encode()).hexdigest()

    @property
    def arguments(self) -> list[str]:
        """The function's parameters, in order."""
        return [*accumulators(self.mode), *(o.name for o in self.operands)]


def accumulators(mode: Mode) -> list[str]:
    """The parameters that stand for the accumulator."""
    return ["acc", "other", "lane"] if mode == "halves" else ["acc"]
