"""The lines of an epilogue's function: each value once, named, at a column of the accumulator or at its two lanes.

Lanes: where a program pairs columns, its finest column space is that of one lane, and the accumulator's has two. A
value of the finest space is emitted once; one of the wider space once a lane."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from codetta.backends.hopper.columns import NotLowered, Range, is_lanes, vanishes
from codetta.backends.hopper.loads import Loads
from codetta.backends.hopper.scalar import ROUND, TEXT, constant
from codetta.core.node import Node
from codetta.core.types import DType, Kind
from codetta.ir import ops
from codetta.ir.build import apply, mul
from codetta.ir.split import Split

Key = tuple[Node, int | None, Range | None]
UNSPLIT = (Kind.COLVEC, Kind.SCALAR, Kind.GROUPVEC)  # the same at both lanes of a column


@dataclass(slots=True)
class Expressions:
    """Emits values into ``lines``. ``within`` is the range of columns that the value being emitted is for;
    ``statistic`` names the value of a reduction inside groups."""

    loads: Loads
    statistic: Callable[[Node, Range | None], str | None]
    lines: list[str] = field(default_factory=list)
    within: Range | None = None
    _names: dict[Key, str] = field(default_factory=dict)
    _lines: dict[str, str] = field(default_factory=dict)  # the name that each text has
    _needs: set[int] = field(default_factory=set)  # the lanes that what is being emitted must be in
    _needed: dict[Key, set[int]] = field(default_factory=dict)

    def at(self, n: Node, lane: int | None) -> str:
        """The name of a value: at the own column of the finest space, or at lane 0 or 1 of the wider one."""
        if n.op is ops.CONST:
            text = constant(n.attrs[0])
            if text is None:
                raise NotLowered(f"a constant {n.attrs[0]!r}")
            return text
        if n.type.kind in UNSPLIT:
            lane = None
        if n.op is ops.INPUT:
            return self._leaf(n, lane)
        key = (n, lane, self.within)
        if key not in self._names:
            outer, self._needs = self._needs, set()
            text = self._text(n, lane)
            self._names[key], self._needed[key] = self._line(text), self._needs
            self._needs = outer
        self._needs |= self._needed[key]
        return self._names[key]

    def _line(self, text: str) -> str:
        """The name of a text's value: the same text is one line, whatever node and range of columns it is for."""
        if text.isidentifier():
            return text
        if text not in self._lines:
            self._lines[text] = f"t{len(self._lines)}"
            self.lines.append(f"{self._lines[text]} = {text}")
        return self._lines[text]

    def by_lane(self, node: Node) -> str:
        """The value at the function's own column: one of the two lanes."""
        lanes = []
        for lane in (0, 1):
            self._needs = set()
            lanes.append(self.at(node, lane))
            if self._needs - {lane}:
                raise NotLowered("a table is read at the other half of a head")
        return self._choice(*lanes)

    def _choice(self, first: str, second: str) -> str:
        if self.loads.mode == "adjacent":  # in which lane a column is is known only once loops are unrolled
            return f"where(lane == 0, {first}, {second})"
        return f"{first} if lane == 0 else {second}"

    def _text(self, n: Node, lane: int | None) -> str:
        if n.op is ops.PART:
            return self._part(n, lane)
        if n.op is ops.JOIN:
            return self._join(n, lane)
        if n.op is ops.CAST:
            dtype = n.attrs[0]
            if not isinstance(dtype, DType) or dtype not in ROUND:
                raise NotLowered(f"a cast to {dtype} inside the epilogue")
            return ROUND[dtype].format(self.at(n.args[0], lane))
        if n.op is ops.SILU:  # its derivative wants the same sigmoid
            (x,) = n.args
            return self.at(mul(x, apply(ops.SIGMOID, x)), lane)
        if n.type.kind is Kind.GROUPVEC and (name := self.statistic(n, self.within)):
            return name
        if n.op is ops.EQ and any(a.op is ops.COLUMN for a in n.args):
            columns, index = n.args if n.args[0].op is ops.COLUMN else n.args[::-1]
            return self.loads.hit(columns, index, self.within)
        if n.op is ops.RANDOM:
            seed, row, column = n.args
            return self.loads.random(seed, row, column, self.within)
        if n.op not in TEXT:
            raise NotLowered(f"{n.op.name} inside an epilogue")
        return TEXT[n.op].format(*(self.at(a, lane) for a in n.args))

    def _part(self, n: Node, lane: int | None) -> str:
        split, index = n.attrs
        if not isinstance(split, Split) or not isinstance(index, int):
            raise NotLowered(f"{n}")
        if is_lanes(n):
            if lane is not None:
                raise NotLowered("lanes of lanes")
            return self.at(n.args[0], index)
        if split.groups != 1 or self.within is None:
            raise NotLowered("a range of columns that is not one output's")
        return self.at(n.args[0], lane)

    def _join(self, n: Node, lane: int | None) -> str:
        if is_lanes(n):
            if lane is None:
                raise NotLowered("lanes joined and used beside values of one lane")
            return self.at(n.args[lane], None)
        split = n.attrs[0]
        if n.type.kind is not Kind.ROWVEC or not isinstance(split, Split) or split.groups != 1:
            raise NotLowered("ranges of columns joined inside an epilogue")
        parts = split.ranges(self.loads.cols)
        if all(vanishes(a, over_rows=False) for a in n.args):  # each is 0 outside its own range
            return " + ".join(self._in_range(a, lane, part) for a, part in zip(n.args, parts, strict=True))
        if self.within not in parts:
            raise NotLowered("ranges of columns joined inside an epilogue")
        return self.at(n.args[parts.index(self.within)], lane)

    def _in_range(self, n: Node, lane: int | None, part: Range) -> str:
        outer, self.within = self.within, part
        text = self.at(n, lane)
        self.within = outer
        return text

    def _leaf(self, n: Node, lane: int | None) -> str:
        if n is self.loads.acc:
            return self._accumulator(lane)
        text, needs = self.loads.leaf(n, lane, self.within)
        self._needs |= needs
        return text

    def _accumulator(self, lane: int | None) -> str:
        mode = self.loads.mode
        if mode == "element":
            if lane is not None:
                raise NotLowered("lanes of the accumulator")
            return "acc"
        if lane is None:
            raise NotLowered("the accumulator beside its lanes")
        if mode == "pair":
            return f"acc[{lane}]"
        key = (self.loads.acc, lane, None)
        if key not in self._names:
            self._names[key] = f"acc{lane}"
            first, second = ("acc", "other") if lane == 0 else ("other", "acc")
            choice = (
                f"where(lane == 0, {first}, {second})" if mode == "adjacent" else f"{first} if lane == 0 else {second}"
            )
            self.lines.append(f"acc{lane} = {choice}")
        return self._names[key]
