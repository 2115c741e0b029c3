"""From an epilogue Program to one scalar function and its operands, or the reason why it does not fit one kernel.

Lanes: where a program pairs columns, its finest column space is that of one lane, and the accumulator's has two. A
value of the finest space is emitted once; one of the wider space once a lane."""

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
from codetta.backends.hopper.lowered import Lowered, Mode, Operand, OperandKind, Sink, SinkKind, Store, accumulators
from codetta.backends.hopper.scalar import ROUND, TEXT, constant
from codetta.core.node import Node
from codetta.core.types import DType, Kind, bf16, f16, f32
from codetta.ir import ops
from codetta.ir.build import apply, mul
from codetta.ir.program import Program, param_name
from codetta.ir.split import Split

KINDS: dict[Kind, OperandKind] = {
    Kind.TILE: "tile",
    Kind.ROWVEC: "row",
    Kind.COLVEC: "col",
    Kind.TABLE: "table",
    Kind.GROUPVEC: "group",
    Kind.SCALAR: "scalar",
}
LOADED = {bf16, f16, f32}


def lower(program: Program) -> Lowered:
    """The program's epilogue as one function of an element; NotLowered says why there is none."""
    if program.gemm is None or program.role != "epilogue":
        raise NotLowered("no GEMM")
    if program.gemm.dtype not in (bf16, f16):
        raise NotLowered(f"operands in {program.gemm.dtype}: the mainloop takes bf16 and f16")
    acc = program.params[0]
    if not isinstance(acc.type.cols, int) or acc.type.cols % ALIGN:
        raise NotLowered(f"{acc.type.cols} columns are no multiple of {ALIGN}")
    return _Lowering(program, acc).result()


@dataclass(slots=True)
class _Lowering:
    program: Program
    acc: Node
    operands: dict[str, Operand] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    names: dict[tuple[Node, int | None, Range | None], str] = field(default_factory=dict)
    grain: int = 0
    half: int = 0
    whole_tiles: bool = False
    mode: Mode = "element"
    range: Range | None = None
    needs: set[int] = field(default_factory=set)  # the lanes that what is being emitted must be in
    needed: dict[tuple[Node, int | None, Range | None], set[int]] = field(default_factory=dict)

    def result(self) -> Lowered:
        cols = self.cols
        self.mode, self.half = mode_of(self.program, self.acc)
        if self.mode == "pair" and self.program.gemm is not None and self.program.gemm.form != "nt":
            raise NotLowered("lanes over all columns of x @ w, whose weight cannot be interleaved")
        stores: list[Store] = []
        sinks: list[Sink] = []
        returned: list[str] = []
        for i, (_, root) in enumerate(self.program.outputs):
            if root.type.kind is Kind.TILE:
                stores += self._stores(i, root, returned)
            else:
                sinks += self._sinks(i, root, returned)
        if not stores:
            raise NotLowered("nothing is stored but reductions of a GEMM that is not stored")
        head = f"def epilogue({', '.join([*accumulators(self.mode), *self.operands])}):"
        body = [*self.lines, f"return {{{', '.join(returned)}}}"]
        source = "\n".join([head, *("    " + line for line in body)]) + "\n"
        found = tuple(self.operands.values())
        return Lowered(
            self.mode, found, tuple(stores), tuple(sinks), source, cols, self.half, self.grain, self.whole_tiles
        )

    @property
    def cols(self) -> int:
        return self.acc.type.cols if isinstance(self.acc.type.cols, int) else 0

    @property
    def base(self) -> int:
        """The columns of the finest space that is emitted once."""
        return self.cols if self.mode == "element" else self.cols // 2

    # --- stores -------------------------------------------------------------------------------------------------------

    def _stores(self, output: int, root: Node, returned: list[str]) -> list[Store]:
        width, dtype = root.type.cols, root.type.dtype
        if not isinstance(width, int) or dtype not in LOADED:
            raise NotLowered(f"{self._name(output)} is {root.type}")
        value = root.args[0] if root.op is ops.CAST else root
        self.range = range_of(value, self.acc) if value.op is not ops.JOIN or is_lanes(value) else None
        if self.range == (0, self.cols):
            self.range = None
        if self.range is not None:
            self.grain = gcd(self.grain, *self.range)
        made = self._store(output, value, width, dtype, returned)
        self.range = None
        return made

    def _store(self, output: int, node: Node, width: int, dtype: DType, returned: list[str]) -> list[Store]:
        own = (self.range[1] - self.range[0]) if self.range else self.cols
        if self.mode == "pair" and dtype.bytes != 2:
            raise NotLowered(f"{self._name(output)}: lanes are stored in 16 bits, not {dtype}")
        if self.mode == "halves":
            if width != own:
                raise NotLowered(f"{self._name(output)} has {width} columns, the accumulator {own}")
            return [self._returned(f"o{output}", output, self._by_lane(node), dtype, None, returned)]
        if width == (self.base if self.range is None else own):
            return [self._returned(f"o{output}", output, self._emit(node, None), dtype, None, returned)]
        if width != 2 * self.base or self.range is not None:
            raise NotLowered(f"{self._name(output)} has {width} columns, the accumulator {own}")
        aligned(self._name(output), self.base)
        made = []
        for lane in (0, 1):
            view = (lane * self.base, (lane + 1) * self.base)
            text = self._emit(node, lane)
            made.append(self._returned(f"o{output}_{lane}", output, text, dtype, view, returned))
        return made

    def _name(self, output: int) -> str:
        return self.program.outputs[output][0]

    def _returned(
        self, name: str, output: int, text: str, dtype: DType, view: Range | None, returned: list[str]
    ) -> Store:
        returned.append(f"'{name}': {text}")
        return Store(name, output, dtype, view, self.range)

    def _by_lane(self, node: Node) -> str:
        """The value at the function's own column: one of the two lanes, known where the source runs."""
        lanes = []
        for lane in (0, 1):
            self.needs = set()
            lanes.append(self._emit(node, lane))
            if self.needs - {lane}:
                raise NotLowered("a table is read at the other half of a head")
        return f"{lanes[0]} if lane == 0 else {lanes[1]}"

    # --- reductions --------------------------------------------------------------------------------------------------

    def _sinks(self, output: int, root: Node, returned: list[str]) -> list[Sink]:
        kind = sink_kind(root)
        x = root.args[0]
        factors = root.op is ops.REDUCE and root.attrs[0] == "sum" and x.op is ops.MUL and self.mode != "pair"
        if root.op is ops.REDUCE and root.attrs[0] == "sum":
            self._check_padding(output, x, over_rows=kind.startswith("col"))
        index = -1
        if root.op is ops.SELECT:
            if root.args[1].op is not ops.INPUT:
                raise NotLowered(f"{self._name(output)}: the column is computed in the epilogue")
            index = self.program.params.index(root.args[1])
        if self.mode == "pair" and kind.startswith(("col", "lse", "select")):
            raise NotLowered(f"{self._name(output)}: {kind} of interleaved columns")
        if x.type.cols == self.cols:
            values = self._own(x, factors)
        elif x.type.cols == self.base and self.mode == "pair":
            values = f"pack({self._emit(x, None)}, 0.0)"
        elif x.type.cols == 2 * self.base and self.mode == "element":
            return self._lane_sinks(output, kind, x, returned)
        else:
            raise NotLowered(f"{self._name(output)}: a reduction of {x.type} behind {self.acc.type}")
        returned.append(f"'s{output}': {values}")
        return [Sink(f"s{output}", output, kind, factors, index)]

    def _lane_sinks(self, output: int, kind: SinkKind, x: Node, returned: list[str]) -> list[Sink]:
        """A reduction of a value twice as wide as the accumulator."""
        values = [self._emit(x, lane) for lane in (0, 1)]
        if kind == "row_sum":
            returned.append(f"'s{output}': {values[0]} + {values[1]}")
            return [Sink(f"s{output}", output, kind)]
        if not kind.startswith("col"):
            raise NotLowered(f"{self._name(output)}: {kind} of two lanes")
        made = []
        for lane, value in enumerate(values):
            returned.append(f"'s{output}_{lane}': {value}")
            view = (lane * self.base, (lane + 1) * self.base)
            made.append(Sink(f"s{output}_{lane}", output, kind, columns=view))
        return made

    def _own(self, x: Node, factors: bool) -> str:
        if factors:
            return f"({self._own(x.args[0], False)}, {self._own(x.args[1], False)})"
        if x.type.kind is not Kind.TILE or self.mode == "element":
            return self._emit(x, None)
        if self.mode == "halves":
            return f"({self._by_lane(x)})"
        return f"pack({self._emit(x, 0)}, {self._emit(x, 1)})"

    def _check_padding(self, output: int, x: Node, over_rows: bool) -> None:
        """A sum runs over whole tiles: beyond the last row or column the accumulator and all loads are zero, and so
        must be what is summed, or there must be nothing beyond; the number of rows is not known."""
        if vanishes(x, over_rows):
            return
        if over_rows:
            raise NotLowered(f"{self._name(output)} sums what is not zero in a tile's padding")
        self.whole_tiles = True

    # --- expressions -------------------------------------------------------------------------------------------------

    def _emit(self, n: Node, lane: int | None) -> str:
        """The name of a node's value: at the own column of the finest space, or at lane 0 or 1 of the wider one."""
        if n.op is ops.CONST:
            text = constant(n.attrs[0])
            if text is None:
                raise NotLowered(f"a constant {n.attrs[0]!r}")
            return text
        if n.type.kind in (Kind.COLVEC, Kind.SCALAR):
            lane = None
        if n.op is ops.INPUT:
            return self._leaf(n, lane)
        key = (n, lane, self.range)
        if key not in self.names:
            outer, self.needs = self.needs, set()
            text = self._text(n, lane)
            if not text.isidentifier():
                self.lines.append(f"t{len(self.names)} = {text}")
                text = f"t{len(self.names)}"
            self.names[key], self.needed[key] = text, self.needs
            self.needs = outer
        self.needs |= self.needed[key]
        return self.names[key]

    def _text(self, n: Node, lane: int | None) -> str:
        if n.op is ops.PART:
            return self._part(n, lane)
        if n.op is ops.JOIN:
            return self._join(n, lane)
        if n.op is ops.CAST:
            dtype = n.attrs[0]
            if not isinstance(dtype, DType) or dtype not in ROUND:
                raise NotLowered(f"a cast to {dtype} inside the epilogue")
            return ROUND[dtype].format(self._emit(n.args[0], lane))
        if n.op is ops.SILU:  # its derivative wants the same sigmoid
            (x,) = n.args
            return self._emit(mul(x, apply(ops.SIGMOID, x)), lane)
        if n.op not in TEXT:
            raise NotLowered(f"{n.op.name} inside an epilogue")
        return TEXT[n.op].format(*(self._emit(a, lane) for a in n.args))

    def _part(self, n: Node, lane: int | None) -> str:
        split, index = n.attrs
        if not isinstance(split, Split) or not isinstance(index, int):
            raise NotLowered(f"{n}")
        if is_lanes(n):
            if lane is not None:
                raise NotLowered("lanes of lanes")
            return self._emit(n.args[0], index)
        if split.groups != 1 or self.range is None:
            raise NotLowered("a range of columns that is not one output's")
        return self._emit(n.args[0], lane)

    def _join(self, n: Node, lane: int | None) -> str:
        if not is_lanes(n):
            raise NotLowered("ranges of columns joined inside an epilogue")
        if lane is None:
            raise NotLowered("lanes joined and used beside values of one lane")
        return self._emit(n.args[lane], None)

    def _leaf(self, n: Node, lane: int | None) -> str:
        if n is self.acc:
            return self._accumulator(lane)
        kind, dtype = KINDS[n.type.kind], n.type.dtype
        if dtype not in LOADED or (kind == "scalar" and dtype is not f32):  # integers would be rounded to float32
            raise NotLowered(f"{param_name(n)} is {n.type}")
        at = self.program.params.index(n)
        if kind in ("col", "scalar"):
            return self._operand(Operand(f"p{at}", kind, at, dtype))
        return self._wide(n, at, kind, lane)

    def _wide(self, n: Node, at: int, kind: OperandKind, lane: int | None) -> str:
        """A load that has columns."""
        name, width, dtype = param_name(n), n.type.cols, n.type.dtype
        if not isinstance(width, int):
            raise NotLowered(f"{name} is {n.type}")
        if kind in ("table", "group"):
            return self._repeated(n, at, kind, width, lane)
        if self.range is not None and width == self.range[1] - self.range[0]:
            raise NotLowered(f"{name} has the columns of one range only")
        if self.mode == "pair" and kind == "row" and width == self.cols:
            text = self._operand(Operand(f"p{at}", kind, at, dtype))
            if dtype is not f32 or lane is None:
                raise NotLowered(f"{name}: a stacked vector of lanes must be float32")
            return f"{text}[{lane}]"
        if width == self.cols and self.mode == "element":
            return self._operand(Operand(f"p{at}", kind, at, dtype))
        if width == 2 * self.cols and self.mode == "element" and lane is not None:
            aligned(name, self.base)
            view = (lane * self.base, (lane + 1) * self.base)
            return self._operand(Operand(f"p{at}_{lane}", kind, at, dtype, view))
        raise NotLowered(f"{name}: {n.type} behind an accumulator of {self.cols} columns with lanes")

    def _repeated(self, n: Node, at: int, kind: OperandKind, width: int, lane: int | None) -> str:
        name = param_name(n)
        if kind == "group" or self.mode == "pair":
            raise NotLowered(f"{name} is a {kind}, in mode {self.mode}")
        if self.mode == "halves" and width == 2 * self.half:
            if lane is None:
                raise NotLowered(f"{name} is as wide as a head beside values of half a head")
            self.needs.add(lane)
        elif self.mode == "halves" and width != self.half:
            raise NotLowered(f"{name} repeats after {width} columns, heads have {2 * self.half}")
        if width % 16:
            raise NotLowered(f"{name} repeats after {width} columns, no multiple of 16")
        return self._operand(Operand(f"p{at}", kind, at, n.type.dtype, None, width))

    def _accumulator(self, lane: int | None) -> str:
        if self.mode == "element":
            if lane is not None:
                raise NotLowered("lanes of the accumulator")
            return "acc"
        if lane is None:
            raise NotLowered("the accumulator beside its lanes")
        if self.mode == "pair":
            return f"acc[{lane}]"
        key = (self.acc, lane, None)
        if key not in self.names:
            self.names[key] = f"acc{lane}"
            first, second = ("acc", "other") if lane == 0 else ("other", "acc")
            self.lines.append(f"acc{lane} = {first} if lane == 0 else {second}")
        return self.names[key]

    def _operand(self, operand: Operand) -> str:
        self.operands.setdefault(operand.name, operand)
        return operand.name
