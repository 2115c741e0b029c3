"""What an epilogue is lowered to: one scalar function as source, and how its names are bound to memory.

Parameters and outputs go by position, so that programs that differ in names only are one kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Literal

from codetta.core.types import DType

Mode = Literal["element", "pair", "halves", "adjacent"]
OperandKind = Literal["tile", "row", "col", "table", "group", "scalar", "hit", "random"]
SinkKind = Literal["row_sum", "row_max", "row_absmax", "col_sum", "col_max", "col_absmax", "lse", "select"]


@dataclass(frozen=True, slots=True)
class Operand:
    """A value that the function reads: columns ``start:stop`` of a parameter (None: all of it).

    ``inside`` is the width after which a table repeats, or of one group of a GroupVec. A vector of one range of the
    accumulator's columns, ``source``, is 0 outside. With ``lanes`` the function gets a row vector's two values at the
    lanes of its column; a table that is ``spread`` has one value for the two. A "hit" says whether a column is the one
    that an integer ColVec names for its row; "random" is a number of a seed and the element's row and column."""

    name: str
    kind: OperandKind
    param: int
    dtype: DType
    columns: tuple[int, int] | None = None
    inside: int = 0
    source: tuple[int, int] | None = None
    lanes: bool = False
    spread: bool = False

    @property
    def by_place(self) -> bool:
        """Whether the value hangs on where an element is."""
        return self.kind in ("hit", "random")


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

    ``index`` is the parameter that names the column of a select; ``source`` the accumulator's columns that are reduced
    (None: all). What is ``masked`` need not be 0 in the padding of a tile."""

    name: str
    output: int
    kind: SinkKind
    factors: bool = False
    index: int = -1
    columns: tuple[int, int] | None = None
    source: tuple[int, int] | None = None
    masked: bool = False

    @property
    def by_row(self) -> bool:
        """Whether it leaves one part a tile of each row, side by side."""
        return self.kind != "select" and not self.over_rows

    @property
    def over_rows(self) -> bool:
        """Whether it reduces rows away: a RowVec comes out."""
        return self.kind.startswith("col")


@dataclass(frozen=True, slots=True)
class Statistic:
    """A reduction inside groups of ``inside`` columns, done before anything is stored: the second function,
    ``prepass``, returns what is reduced under ``name``; ``finish`` is the text of a function of the ``total``, whose
    value the first function reads."""

    name: str
    kind: Literal["sum", "max"]
    inside: int
    finish: str


@dataclass(frozen=True, slots=True)
class GroupStore:
    """An output (M, groups) that gets the values of a statistic, of the groups in the accumulator's columns ``source``
    (None: of all)."""

    name: str
    output: int
    statistic: str
    source: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Lowered:
    """An epilogue as a function of one element.

    ``mode`` says what it is called on: "element", one accumulator column; "pair", the columns j and j + N/2 of a
    stacked GEMM; "halves", one column with the one ``half`` columns away in its head, ``lane`` saying which it is;
    "adjacent", one column with the other of its pair. A range of columns begins and ends at a multiple of ``grain``."""

    mode: Mode
    operands: tuple[Operand, ...]
    stores: tuple[Store, ...]
    sinks: tuple[Sink, ...]
    source: str
    cols: int
    half: int = 0
    grain: int = 0
    statistics: tuple[Statistic, ...] = ()
    groups: tuple[GroupStore, ...] = ()
    prepass: str = ""

    @property
    def digest(self) -> str:
        """A content hash."""
        return sha256(repr(self).encode()).hexdigest()

    @property
    def kernel_digest(self) -> str:
        """A content hash of what is compiled: sizes, and which columns of a tensor a name stands for, are not."""
        views = (tuple(replace(x, columns=None) for x in found) for found in (self.operands, self.stores, self.sinks))
        half = 0 if self.mode == "pair" and not any(o.lanes for o in self.operands) else self.half
        operands, stores, sinks = views
        whole = replace(self, cols=0, half=half, operands=operands, stores=stores, sinks=sinks)  # type: ignore[arg-type]
        return whole.digest

    @property
    def by_lane(self) -> bool:
        """Whether the function is called on one of two lanes that are not side by side in memory."""
        return self.mode in BY_LANE


BY_LANE = ("halves", "adjacent")


def accumulators(mode: Mode) -> list[str]:
    """The parameters that stand for the accumulator."""
    return ["acc", "other", "lane"] if mode in BY_LANE else ["acc"]
