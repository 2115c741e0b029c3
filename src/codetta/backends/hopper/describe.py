"""From a lowered program to a description of its epilogue: functions made of text, an operation for each name."""

from __future__ import annotations

import linecache
import sys
from typing import Any

from codetta.backends.hopper import toolchain  # first: it prepares what the next imports read
from codetta.backends.hopper.config import Config
from codetta.backends.hopper.device.dialect import NAMES
from codetta.backends.hopper.device.groups import GroupOut, GroupStatistic, Spread
from codetta.backends.hopper.device.ops import Partner, TableLoad, ViewStore
from codetta.backends.hopper.device.random import Random
from codetta.backends.hopper.device.sums import MaskedCol, MaskedRow
from codetta.backends.hopper.device.vectors import ColLoad, Hit, LaneRow, NarrowScalar, RowLoad
from codetta.backends.hopper.lowered import Lowered, Operand, Sink
from codetta.core.types import DType, bf16, f16, i32, i64

# isort: split
import cutlass
from quack.epilogue.frontend import EpiMod
from quack.epilogue.ops import ColVecReduce, ColVecSelect, EpiOp, OnlineLSEReduce, RowVecReduce, Scalar, TileLoad

REDUCE = {"sum": "add", "max": "max", "absmax": "max_abs"}
NARROW: dict[DType, Any] = {bf16: cutlass.BFloat16, f16: cutlass.Float16}
INTEGERS: dict[DType, Any] = {i32: cutlass.Int32, i64: cutlass.Int64}


def describe(lowered: Lowered, config: Config) -> EpiMod:
    """The epilogue as QuACK compiles it."""
    operands: dict[str, EpiOp] = {sys.intern(o.name): _load(o, lowered) for o in lowered.operands}
    statistics = {sys.intern(s.name): GroupStatistic(sys.intern(s.name), s.kind, s.finish) for s in lowered.statistics}
    if lowered.by_lane:
        operands = {"partner": Partner("partner", _apart(lowered)), **operands}
    gated = lowered.mode == "pair"
    stores = [ViewStore(sys.intern(s.name), gated, *(s.source or (0, 0)), config.narrow) for s in lowered.stores]
    extra: list[EpiOp] = [
        GroupOut(sys.intern(g.name), statistics[g.statistic], *(g.source or (0, 0))) for g in lowered.groups
    ]
    sinks = {sys.intern(s.name): _sink(s, extra) for s in lowered.sinks}
    prepass = {"prepass": _prepass(lowered), "prepass_outs": tuple(statistics)} if statistics else {}
    mode = "acc_pair" if gated else "element"
    operands |= statistics
    return EpiMod(_epilogue(lowered), outputs=stores, ops=operands, outs=sinks, mode=mode, extra_ops=extra, **prepass)


def _apart(lowered: Lowered) -> int:
    """How many columns lie between the two lanes of one, as the operations count: 0 for adjacent ones."""
    return 0 if lowered.mode == "adjacent" else lowered.half


def _epilogue(lowered: Lowered) -> Any:
    """The generated source as a function. What has two lanes, or hangs on the element's place, comes as a function of
    no interest in its argument."""
    head, _, body = lowered.source.partition("\n")
    first = [f"{o.name} = {o.name}(acc)" for o in lowered.operands if o.lanes or o.by_place]
    if lowered.by_lane:
        head = head.replace("acc, other, lane", "acc, partner")
        first.insert(0, "other, lane = partner(acc)")
    return _function("epilogue", head, "".join(f"    {line}\n" for line in first) + body, lowered.kernel_digest)


def _prepass(lowered: Lowered) -> Any:
    head, _, body = lowered.prepass.partition("\n")
    return _function("prepass", head, body, lowered.kernel_digest)


def _function(name: str, head: str, body: str, digest: str) -> Any:
    """A function made of text, which is where ``inspect`` looks for it; the digest is in its constants, so that QuACK
    never takes one for another."""
    source = f'{head}\n    """{digest}"""\n{body}'
    file = f"<codetta-{name} {digest[:16]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    scope = {"__name__": toolchain.GENERATED, **NAMES}
    exec(compile(source, file, "exec"), scope)
    return scope[name]


def _load(o: Operand, lowered: Lowered) -> EpiOp:
    name, source = sys.intern(o.name), o.source or (0, 0)
    if o.kind == "row":
        return LaneRow(name, _apart(lowered), *source) if o.lanes else RowLoad(name, *source)
    if o.kind == "group" or o.spread:
        return Spread(name, o.inside, o.spread, *source)
    if o.kind == "scalar" and o.dtype in NARROW:
        return NarrowScalar(name, NARROW[o.dtype])
    if o.kind == "random":
        return Random(name, INTEGERS[o.dtype])
    makers = {"tile": TileLoad, "col": ColLoad, "table": TableLoad, "scalar": Scalar, "hit": Hit}
    return makers[o.kind](name)


def _sink(s: Sink, extra: list[EpiOp]) -> EpiOp:
    name = sys.intern(s.name)
    if s.kind == "lse":
        return OnlineLSEReduce(name)
    if s.kind == "select":
        index = ColLoad(sys.intern(f"i{s.index}"))
        extra.append(index)
        return ColVecSelect(name, idx_op=index)
    makers: tuple[type[EpiOp], type[EpiOp]] = (MaskedRow, MaskedCol) if s.masked else (RowVecReduce, ColVecReduce)
    maker = makers[0 if s.over_rows else 1]
    return maker(name, combine=REDUCE[s.kind.partition("_")[2]], scaled=s.factors)
