"""A generated kernel: its text, what its arguments are, and over which blocks it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from codetta.backends.hopper.rows.emit import known
from codetta.backends.hopper.rows.fold import PARTS_OF_COLUMN
from codetta.backends.hopper.rows.launches import WHOLE_ROW, Launch, Output, by_group, in_blocks
from codetta.core.node import Node, postorder
from codetta.core.types import Dim, Kind
from codetta.ir import ops


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a kernel: ``what`` it is, and of which parameter, output or total."""

    name: str
    what: str  # input, stride, parts, output, scratch, counter, rows, span
    node: Node | None = None
    output: Output | None = None


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel's text and how to launch it: on blocks of ``block`` rows (0: by the number of parts), or on runs of
    rows as long as it takes; by ``chunks`` of columns."""

    name: str
    text: str
    arguments: tuple[Argument, ...]
    rows: Dim | None
    chunks: int
    block: int
    warps: int
    width: int
    in_runs: bool


@dataclass(slots=True)
class Sink:
    """What becomes of an expression: stored, reduced over columns, over rows, or over all."""

    what: str  # store, row, columns, total
    node: Node
    output: Output | None = None

    @property
    def source(self) -> Node:
        """The expression itself."""
        return self.node if self.what == "store" else self.node.args[0]


def pow2(n: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << max(n - 1, 0).bit_length()


@dataclass(slots=True)
class Form:
    """How a launch runs over its rows and columns: in blocks of ``block`` rows and at most ``widest`` columns, or of
    whole groups of columns."""

    in_runs: bool
    by_chunks: bool
    widest: int
    block: int
    width: int
    grouped: bool = False

    def step(self, extent: int) -> int:
        """The columns of a block."""
        return min(pow2(extent), self.widest)


def form_of(launch: Launch, sinks: Sequence[Sink], parts: Mapping[Node, Node]) -> Form:
    """One row a program and loops over its columns; blocks of rows and columns where no row is needed whole; runs of
    rows where columns are summed, unless each block stores its part, or all rows of what is folded first."""
    sources = [s.source for s in sinks if s.source.type.cols is not None]
    # a sum over rows that is folded first: so that few blocks wait for their turn at the counter
    totals = not sources and any(n.type.rows is not None for n in parts) and any(s.what == "total" for s in sinks)
    in_runs = totals or (any(s.what == "columns" for s in sinks) and not in_blocks(launch.outputs))
    vectors = any(o.value.type.cols is None and o.value.type.kind is not Kind.SCALAR for o in launch.outputs)
    per_row = any(s.what == "row" or s.source.type.cols is None for s in sinks)
    by_chunks = not per_row and not vectors and bool(sources)
    if launch.rows is None:
        return Form(False, True, 32, 1, 32 * PARTS_OF_COLUMN) if parts else Form(False, True, 1024, 1, 1024)
    tiles = {n for s in sources for n in postorder([s]) if n.op is ops.INPUT and n.type.kind is Kind.TILE}
    widest = 4096 if len(tiles) <= 2 else 2048 if len(tiles) <= 4 else 1024
    if in_runs:
        widest = 256 if by_chunks else WHOLE_ROW
    elif by_chunks:
        widest = min(widest, 2048)
    inside = [known(n.args[0].type.cols) // known(n.type.cols) for s in sources for n in postorder([s]) if by_group(n)]
    if inside:  # a block of a group's columns is short, and takes more rows
        widest = min(widest, max(pow2(max(inside)), 128))
    width = min(max((pow2(known(s.type.cols)) for s in sources), default=0), widest)
    block = 0 if not width or any(n.type.rows is not None for n in parts) else max(1, 2048 // width)
    return Form(in_runs, by_chunks, widest, block, width, bool(inside))
