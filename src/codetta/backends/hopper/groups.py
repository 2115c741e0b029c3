"""Reductions inside groups of columns: done on the accumulator before anything is stored, in a function of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from codetta.backends.hopper.columns import NotLowered, Range, range_of
from codetta.backends.hopper.express import Expressions
from codetta.backends.hopper.loads import Loads, check_groups
from codetta.backends.hopper.lowered import GroupStore, Statistic
from codetta.backends.hopper.scalar import TEXT, constant
from codetta.core.node import Node, postorder
from codetta.core.types import Kind, f32
from codetta.ir import ops

FOLDS: dict[object, Literal["sum", "max"]] = {"sum": "sum", "max": "max", "absmax": "max"}
READABLE = ("row", "col", "scalar")  # tiles and tables have not arrived when the function runs


@dataclass(slots=True)
class Statistics:
    """The statistics that a program needs, and the function that is run before all else."""

    loads: Loads
    found: list[Statistic] = field(default_factory=list)
    stores: list[GroupStore] = field(default_factory=list)
    before: Expressions = field(init=False)
    returned: dict[str, str] = field(default_factory=dict)  # by name: what is reduced
    reads: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """The function sees single columns, whatever the mode of the other."""
        own = Loads(self.loads.program, self.loads.acc, "element", 0)
        self.before = Expressions(own, lambda n, within: None)

    def of(self, n: Node, within: Range | None) -> str | None:
        """The name of a value per row and group that follows from one reduction and constants; None if it is not."""
        reductions = {m for m in postorder([n], stop=_is_reduction) if _is_reduction(m)}
        if len(reductions) != 1 or any(m.op is ops.INPUT for m in postorder([n], stop=_is_reduction)):
            return None
        (reduction,) = reductions
        (x,) = reduction.args
        columns = range_of(x, self.loads.acc) or within
        width = columns[1] - columns[0] if columns else self.loads.cols
        if x.type.cols != width or not isinstance(n.type.cols, int):
            raise NotLowered(f"a reduction inside groups of {x.type} behind {self.loads.acc.type}")
        inside = check_groups("a reduction", width, n.type.cols, self.loads.mode, self.loads.half)
        self.before.within = columns
        value = self.before.at(x, None)
        if reduction.attrs[0] == "absmax":
            value = f"abs({value})"
        finish = _finish(n, reduction)
        kind = FOLDS[reduction.attrs[0]]
        for s in self.found:
            if (s.kind, s.inside, s.finish, self.returned[s.name]) == (kind, inside, finish, value):
                return s.name
        made = Statistic(f"g{len(self.found)}", kind, inside, finish)
        self.found.append(made)
        self.returned[made.name] = value
        return made.name

    def store(self, name: str, output: int, root: Node) -> None:
        """Give an output the values of a statistic."""
        source = range_of(root, self.loads.acc)
        statistic = self.of(root, source)
        if statistic is None or root.type.dtype is not f32:
            raise NotLowered(f"{name}: {root.type} by {root.op.name}")
        self.stores.append(GroupStore(f"o{output}", output, statistic, source))

    def function(self) -> str:
        """The function's source; empty if there is nothing to reduce."""
        if not self.found:
            return ""
        taken = self.before.loads.found
        if late := [o.name for o in taken.values() if o.kind not in READABLE]:
            raise NotLowered(f"a reduction inside groups of what is loaded with the tile: {', '.join(late)}")
        self.loads.found.update({name: o for name, o in taken.items() if name not in self.loads.found})
        returned = ", ".join(f"'{name}': {text}" for name, text in self.returned.items())
        lines = [*self.before.lines, f"return {{{returned}}}"]
        head = f"def prepass({', '.join(['acc', *taken])}):"
        return "\n".join([head, *("    " + line for line in lines)]) + "\n"


def _is_reduction(n: Node) -> bool:
    return n.op is ops.REDUCE and n.type.kind is Kind.GROUPVEC


def _finish(n: Node, reduction: Node) -> str:
    """The text of a value as a function of the reduction's ``total``."""
    if n is reduction:
        return "total"
    if n.op is ops.CONST:
        text = constant(n.attrs[0])
        if text is not None:
            return text
    if n.op not in TEXT:
        raise NotLowered(f"{n.op.name} of a reduction inside groups")
    return f"({TEXT[n.op].format(*(_finish(a, reduction) for a in n.args))})"
