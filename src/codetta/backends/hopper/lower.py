"""From an epilogue Program to one scalar function and its operands, or the reason why it does not fit one kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd

from codetta.backends.hopper.columns import (
    ALIGN,
    NotLowered,
    Range,
    aligned,
    is_lanes,
    mode_of,
    range_of,
    sink_kind,
    vanishes,
)
from codetta.backends.hopper.express import Expressions
from codetta.backends.hopper.groups import Statistics
from codetta.backends.hopper.loads import LOADED, Loads
from codetta.backends.hopper.lowered import BY_LANE, Lowered, Sink, SinkKind, Store, accumulators
from codetta.core.node import Node
from codetta.core.types import DType, Kind, bf16, f16
from codetta.ir import ops
from codetta.ir.program import Program


def lower(program: Program) -> Lowered:
    """The program's epilogue as one function of an element; NotLowered says why there is none."""
    if program.gemm is None or program.role != "epilogue":
        raise NotLowered("no GEMM")
    if program.gemm.dtype not in (bf16, f16):
        raise NotLowered(f"operands in {program.gemm.dtype}: the mainloop takes bf16 and f16")
    acc = program.params[0]
    if not isinstance(acc.type.cols, int) or acc.type.cols % ALIGN:
        raise NotLowered(f"{acc.type.cols} columns are no multiple of {ALIGN}")
    mode, half = mode_of(program, acc)
    if mode == "pair" and program.gemm.form != "nt":
        raise NotLowered("lanes over all columns of x @ w, whose weight cannot be interleaved")
    loads = Loads(program, acc, mode, half)
    statistics = Statistics(loads)
    return _Lowering(loads, statistics, Expressions(loads, statistics.of)).result()


@dataclass(slots=True)
class _Lowering:
    loads: Loads
    statistics: Statistics
    express: Expressions
    returned: list[str] = field(default_factory=list)
    grain: int = 0

    def result(self) -> Lowered:
        stores: list[Store] = []
        sinks: list[Sink] = []
        for i, (name, root) in enumerate(self.loads.program.outputs):
            if root.type.kind is Kind.TILE:
                stores += self._stores(i, root)
            elif root.type.kind is Kind.GROUPVEC:
                self.statistics.store(name, i, root)
            else:
                sinks += self._sinks(i, root)
        prepass = self.statistics.function()
        loads, found, groups = self.loads, tuple(self.statistics.found), tuple(self.statistics.stores)
        for s in groups:
            self.grain = gcd(self.grain, *(s.source or ()))
        names = [*accumulators(loads.mode), *loads.found, *(s.name for s in found)]
        body = [*self.express.lines, f"return {{{', '.join(self.returned)}}}"]
        source = "\n".join([f"def epilogue({', '.join(names)}):", *("    " + line for line in body)]) + "\n"
        return Lowered(
            loads.mode,
            tuple(loads.found.values()),
            tuple(stores),
            tuple(sinks),
            source,
            loads.cols,
            loads.half,
            self.grain,
            found,
            groups,
            prepass,
        )

    def _name(self, output: int) -> str:
        return self.loads.program.outputs[output][0]

    def _enter(self, within: Range | None) -> None:
        """What is emitted from here on is for these columns of the accumulator."""
        self.express.within = None if within == (0, self.loads.cols) else within
        if self.express.within is not None:
            self.grain = gcd(self.grain, *self.express.within)

    # --- stores -------------------------------------------------------------------------------------------------------

    def _stores(self, output: int, root: Node) -> list[Store]:
        width, dtype = root.type.cols, root.type.dtype
        if not isinstance(width, int) or dtype not in LOADED:
            raise NotLowered(f"{self._name(output)} is {root.type}")
        value = root.args[0] if root.op is ops.CAST else root
        self._enter(range_of(value, self.loads.acc) if value.op is not ops.JOIN or is_lanes(value) else None)
        made = self._store(output, value, width, dtype)
        self._enter(None)
        return made

    def _store(self, output: int, node: Node, width: int, dtype: DType) -> list[Store]:
        within, base, mode = self.express.within, self.loads.base, self.loads.mode
        own = (within[1] - within[0]) if within else self.loads.cols
        if mode == "pair" and dtype.bytes != 2:
            raise NotLowered(f"{self._name(output)}: lanes are stored in 16 bits, not {dtype}")
        if mode in BY_LANE:
            if width != own:
                raise NotLowered(f"{self._name(output)} has {width} columns, the accumulator {own}")
            return [self._returned(f"o{output}", output, self.express.by_lane(node), dtype, None)]
        if width == (base if within is None else own):
            return [self._returned(f"o{output}", output, self.express.at(node, None), dtype, None)]
        if width != 2 * base or within is not None:
            raise NotLowered(f"{self._name(output)} has {width} columns, the accumulator {own}")
        aligned(self._name(output), base)
        made = []
        for lane in (0, 1):
            text = self.express.at(node, lane)
            made.append(self._returned(f"o{output}_{lane}", output, text, dtype, (lane * base, (lane + 1) * base)))
        return made

    def _returned(self, name: str, output: int, text: str, dtype: DType, view: Range | None) -> Store:
        self.returned.append(f"'{name}': {text}")
        return Store(name, output, dtype, view, self.express.within)

    # --- reductions --------------------------------------------------------------------------------------------------

    def _sinks(self, output: int, root: Node) -> list[Sink]:
        kind, x = sink_kind(root), root.args[0]
        whole = kind in ("lse", "select") or x.type.cols == self.loads.cols
        self._enter(None if whole else range_of(x, self.loads.acc))
        made = self._sink(output, root, kind, x)
        self._enter(None)
        return made

    def _sink(self, output: int, root: Node, kind: SinkKind, x: Node) -> list[Sink]:
        base, cols, mode, within = self.loads.base, self.loads.cols, self.loads.mode, self.express.within
        masked = needs_mask(kind, x)
        numbers = any(a.op is ops.CONST for a in x.args)
        factors = kind.endswith("_sum") and x.op is ops.MUL and mode != "pair" and not masked and not numbers
        index = self._index(output, root) if root.op is ops.SELECT else -1
        if mode == "pair" and kind.startswith(("col", "lse", "select")):
            raise NotLowered(f"{self._name(output)}: {kind} of interleaved columns")
        if x.type.cols == (within[1] - within[0] if within else cols):
            values = self._own(x, factors)
        elif x.type.cols == base and mode == "pair":
            values = f"pack({self.express.at(x, None)}, 0.0)"
        elif x.type.cols == 2 * base and mode == "element":
            return self._lane_sinks(output, kind, x)
        else:
            raise NotLowered(f"{self._name(output)}: a reduction of {x.type} behind {self.loads.acc.type}")
        self.returned.append(f"'s{output}': {values}")
        return [Sink(f"s{output}", output, kind, factors, index, None, within, masked)]

    def _index(self, output: int, root: Node) -> int:
        """The parameter that names the column of a select."""
        if root.args[1].op is not ops.INPUT:
            raise NotLowered(f"{self._name(output)}: the column is computed in the epilogue")
        return self.loads.program.params.index(root.args[1])

    def _lane_sinks(self, output: int, kind: SinkKind, x: Node) -> list[Sink]:
        """A reduction of a value twice as wide as the accumulator."""
        values = [self.express.at(x, lane) for lane in (0, 1)]
        masked, base = needs_mask(kind, x), self.loads.base
        if kind == "row_sum":
            self.returned.append(f"'s{output}': {values[0]} + {values[1]}")
            return [Sink(f"s{output}", output, kind, masked=masked)]
        if not kind.startswith("col"):
            raise NotLowered(f"{self._name(output)}: {kind} of two lanes")
        made = []
        for lane, value in enumerate(values):
            self.returned.append(f"'s{output}_{lane}': {value}")
            view = (lane * base, (lane + 1) * base)
            made.append(Sink(f"s{output}_{lane}", output, kind, columns=view, masked=masked))
        return made

    def _own(self, x: Node, factors: bool) -> str:
        if factors:
            return f"({self._own(x.args[0], False)}, {self._own(x.args[1], False)})"
        if x.type.kind is not Kind.TILE or self.loads.mode == "element":
            return self.express.at(x, None)
        if self.loads.mode in BY_LANE:
            return f"({self.express.by_lane(x)})"
        return f"pack({self.express.at(x, 0)}, {self.express.at(x, 1)})"


def needs_mask(kind: SinkKind, x: Node) -> bool:
    """Whether what is summed is not 0 in a tile's padding, where the accumulator and all loads are 0. Maxima and
    log-sum-exp are masked anyway."""
    return kind.endswith(("_sum", "_absmax")) and not vanishes(x, over_rows=kind.startswith("col"))
