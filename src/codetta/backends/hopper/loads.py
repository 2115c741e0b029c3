"""The operands that an epilogue's function reads, and how its text names their values at a column and at its lanes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from codetta.backends.hopper.columns import NotLowered, Range, aligned
from codetta.backends.hopper.lowered import BY_LANE, Mode, Operand, OperandKind
from codetta.core.node import Node
from codetta.core.types import Kind, bf16, f16, f32, i32
from codetta.ir import ops
from codetta.ir.program import Program, param_name

KINDS: dict[Kind, OperandKind] = {
    Kind.TILE: "tile",
    Kind.ROWVEC: "row",
    Kind.COLVEC: "col",
    Kind.TABLE: "table",
    Kind.GROUPVEC: "group",
    Kind.SCALAR: "scalar",
}
LOADED = {bf16, f16, f32}


@dataclass(slots=True)
class Loads:
    """Operands by name, in the order in which the function takes them."""

    program: Program
    acc: Node
    mode: Mode
    half: int
    found: dict[str, Operand] = field(default_factory=dict)

    @property
    def cols(self) -> int:
        """The accumulator's columns."""
        return self.acc.type.cols if isinstance(self.acc.type.cols, int) else 0

    @property
    def base(self) -> int:
        """The columns of the finest space, that of one lane, which is emitted once."""
        return self.cols if self.mode == "element" else self.cols // 2

    def leaf(self, n: Node, lane: int | None, within: Range | None) -> tuple[str, set[int]]:
        """The text of a parameter's value where the function is: in lane space, or at ``lane`` of the wider space; and
        the lanes that the column itself must be in for the text to be right."""
        kind, dtype = KINDS[n.type.kind], n.type.dtype
        if dtype not in LOADED:  # integers would be rounded to float32
            raise NotLowered(f"{param_name(n)} is {n.type}")
        at = self.program.params.index(n)
        operand = Operand(f"p{at}", kind, at, dtype)
        if kind in ("col", "scalar"):
            return self._named(operand), set()
        width = n.type.cols
        if not isinstance(width, int):
            raise NotLowered(f"{param_name(n)} is {n.type}")
        if kind == "table":
            return self._table(operand, param_name(n), width, lane)
        if kind == "group":
            return self._group(operand, param_name(n), width, within), set()
        if kind == "row":
            return self._row(operand, n, width, lane, within), set()
        return self._tile(operand, n, width, lane), set()

    def hit(self, columns: Node, index: Node, within: Range | None) -> str:
        """The text of whether the own column is the one that a ColVec of indices names."""
        if index.op is not ops.INPUT or index.type.kind is not Kind.COLVEC or index.type.dtype is not i32:
            raise NotLowered(f"columns are compared with {index.type}, no ColVec[i32] in memory")
        if self.mode != "element" or within is not None or columns.type.cols != self.cols:
            raise NotLowered("the index of a column of lanes or of a range")
        at = self.program.params.index(index)
        return self._named(Operand(f"p{at}_hit", "hit", at, i32))

    def random(self, seed: Node, row: Node, column: Node, within: Range | None) -> str:
        """The text of the own element's random number."""
        if seed.op is not ops.INPUT or seed.type.kind is not Kind.SCALAR:
            raise NotLowered(f"random with a seed {seed.type} that is no Scalar in memory")
        if row.op is not ops.ROW or column.op is not ops.COLUMN:
            raise NotLowered("random of other integers than the own row and column")
        if self.mode != "element" or within is not None or column.type.cols != self.cols:
            raise NotLowered("random numbers of lanes or of a range of columns")
        at = self.program.params.index(seed)
        return self._named(Operand(f"p{at}_random", "random", at, seed.type.dtype))

    def _named(self, operand: Operand) -> str:
        self.found.setdefault(operand.name, operand)
        return operand.name

    def _tile(self, operand: Operand, n: Node, width: int, lane: int | None) -> str:
        if width == self.cols and self.mode == "element":
            return self._named(operand)
        if width == 2 * self.cols and self.mode == "element" and lane is not None:
            return self._named(self._view(operand, lane, param_name(n)))
        raise NotLowered(f"{param_name(n)}: {n.type} behind an accumulator of {self.cols} columns with lanes")

    def _view(self, operand: Operand, lane: int, name: str) -> Operand:
        """Half of a value that is twice as wide as the accumulator."""
        aligned(name, self.base)
        view = (lane * self.base, (lane + 1) * self.base)
        return replace(operand, name=f"{operand.name}_{lane}", columns=view)

    def _row(self, operand: Operand, n: Node, width: int, lane: int | None, within: Range | None) -> str:
        """A vector over the columns: all of them, those of one range, or those of a value twice as wide."""
        name = param_name(n)
        if within is not None and width == within[1] - within[0] and width != self.cols:
            operand = replace(operand, name=f"{operand.name}_{within[0]}", source=within)
        elif width == 2 * self.cols and self.mode == "element" and lane is not None:
            return self._named(self._view(operand, lane, name))
        elif width != self.cols:
            raise NotLowered(f"{name}: {n.type} behind an accumulator of {self.cols} columns with lanes")
        if self.mode == "element":
            return self._named(operand)
        if lane is None:
            raise NotLowered(f"{name}: {n.type} beside values of one lane")
        if self.mode in BY_LANE:
            return f"{self._named(replace(operand, name=f'{operand.name}_lanes', lanes=True))}[{lane}]"
        if operand.dtype is not f32 or operand.source:
            raise NotLowered(f"{name}: a stacked vector of lanes must be float32")
        return f"{self._named(operand)}[{lane}]"

    def _group(self, operand: Operand, name: str, groups: int, within: Range | None) -> str:
        """One value a row and group; both lanes of a column lie in one group."""
        start, stop = within or (0, self.cols)
        inside = check_groups(name, stop - start, groups, self.mode, self.half)
        if within is not None:
            operand = replace(operand, name=f"{operand.name}_{start}", source=within)
        return self._named(replace(operand, inside=inside))

    def _table(self, operand: Operand, name: str, width: int, lane: int | None) -> tuple[str, set[int]]:
        """A table is as wide as a head, or as one lane of it."""
        if self.mode == "pair":
            raise NotLowered(f"{name} is a table, in mode {self.mode}")
        if width % 16:
            raise NotLowered(f"{name} repeats after {width} columns, no multiple of 16")
        operand = replace(operand, inside=width)
        if self.mode == "element":
            return self._named(operand), set()
        if self.mode == "adjacent" and lane is None:  # a column's pair is at half its place
            return self._named(replace(operand, spread=True)), set()
        if self.mode == "adjacent" or width == 2 * self.half:
            if lane is None:
                raise NotLowered(f"{name} is as wide as a head beside values of half a head")
            return self._named(operand), {lane}
        if width != self.half:
            raise NotLowered(f"{name} repeats after {width} columns, heads have {2 * self.half}")
        return self._named(operand), set()


def check_groups(name: str, width: int, groups: int, mode: Mode, half: int) -> int:
    """The columns of one group; NotLowered where groups do not lie whole in tiles, or part the lanes of a column."""
    inside = width // groups
    if mode == "pair":
        raise NotLowered(f"{name} has one value a group of columns, which lie interleaved")
    if inside % 16 or (mode in BY_LANE and inside % (2 * half)):
        raise NotLowered(f"{name} has one value every {inside} columns")
    return inside
