"""One lowered program as one kernel: compiled for a configuration, launched on tensors."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from codetta.backends.hopper import toolchain  # first: it prepares what the next imports read
from codetta.backends.hopper.choose import choose
from codetta.backends.hopper.columns import NotLowered
from codetta.backends.hopper.config import Config
from codetta.backends.hopper.device.dialect import NAMES
from codetta.backends.hopper.device.ops import (
    ColLoad,
    OtherHalf,
    RowLoad,
    TableLoad,
    ViewStore,
)
from codetta.backends.hopper.lowered import Lowered, Operand, Sink
from codetta.backends.reference.evaluate import TORCH
from codetta.core.types import DType, f32
from codetta.ir.program import Program

# isort: split
from quack.epilogue.frontend import EpiMod
from quack.epilogue.ops import ColVecReduce, ColVecSelect, EpiOp, OnlineLSEReduce, RowVecReduce, Scalar, TileLoad
from quack.gemm_runtime.host import GemmEpiPlan, run_gemm_epi_plan

REDUCE = {"sum": "add", "max": "max", "absmax": "max_abs"}
NOMINAL = 256  # rows and inner size of the shapes a kernel is traced with; neither enters it


@dataclass(frozen=True, slots=True)
class Job:
    """What identifies a kernel: a lowered program, the GEMM's form ("nt" or "nn"), the dtype of its operands and of a
    select's column, and the configuration. Sizes are no part of it."""

    lowered: Lowered
    form: str
    dtype: DType
    index: DType | None
    config: Config


def job_of(program: Program) -> Job:
    """The kernel that a program gets by default; NotLowered says why it gets none."""
    lowered, config = choose(program)
    gemm = program.gemm
    if gemm is None:
        raise NotLowered("no GEMM")
    index = next((program.params[s.index].type.dtype for s in lowered.sinks if s.kind == "select"), None)
    return Job(lowered, gemm.form, gemm.dtype, index, config)


@cache
def compiled(job: Job) -> GemmEpiPlan:
    """The kernel: traced, then compiled or loaded from the cache; the same object for every M and K."""
    lowered, config = job.lowered, job.config
    module = _module(lowered, config)
    with FakeTensorMode():
        arguments = _nominal(lowered, job.index, config)
        a = _empty(job.dtype, NOMINAL, NOMINAL)
        nt = job.form == "nt"
        b = _empty(job.dtype, lowered.cols, NOMINAL) if nt else _empty(job.dtype, NOMINAL, lowered.cols)
        return module.gemm(
            a,
            b,
            None,
            epi_args=arguments,
            tile_M=config.tile_m,
            tile_N=config.tile_n,
            cluster_M=config.cluster_m,
            cluster_N=config.cluster_n,
            pingpong=config.pingpong,
            b_kn=not nt,
            concat_layout=("B",) if lowered.mode == "pair" else None,
            _launch=False,
        )


def launch(plan: GemmEpiPlan, a: Tensor, b: Tensor, values: Mapping[str, Any]) -> None:
    """Run a kernel on the current stream."""
    run_gemm_epi_plan(plan, a, b, None, None, values)


# --- from a lowered program to QuACK's description --------------------------------------------------------------------


def _module(lowered: Lowered, config: Config) -> EpiMod:
    function = _function(lowered)
    operands: dict[str, EpiOp] = {sys.intern(o.name): _load(o) for o in lowered.operands}
    if lowered.mode == "halves":
        operands = {"partner": OtherHalf("partner", lowered.half), **operands}
    gated = lowered.mode == "pair"
    stores = [ViewStore(sys.intern(s.name), gated, *(s.source or (0, 0)), config.narrow) for s in lowered.stores]
    extra: list[EpiOp] = []
    sinks = {sys.intern(s.name): _sink(s, extra) for s in lowered.sinks}
    mode = "acc_pair" if gated else "element"
    return EpiMod(function, outputs=stores, ops=operands, outs=sinks, mode=mode, extra_ops=extra)


def _function(lowered: Lowered) -> Any:
    """The generated source as a function: its text is where ``inspect`` looks for it, its digest is in its constants,
    so that QuACK never takes one for another."""
    head, _, body = lowered.source.partition("\n")
    head = head.replace("acc, other, lane", "acc, partner")
    first = "    other, lane = partner(acc)\n" if lowered.mode == "halves" else ""
    source = f'{head}\n    """{lowered.digest}"""\n{first}{body}'
    file = f"<codetta-epilogue {lowered.digest[:16]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    scope = {"__name__": toolchain.GENERATED, **NAMES}
    exec(compile(source, file, "exec"), scope)
    return scope["epilogue"]


def _load(o: Operand) -> EpiOp:
    makers = {"tile": TileLoad, "row": RowLoad, "col": ColLoad, "table": TableLoad, "scalar": Scalar}
    return makers[o.kind](sys.intern(o.name))


def _sink(s: Sink, extra: list[EpiOp]) -> EpiOp:
    name = sys.intern(s.name)
    if s.kind == "lse":
        return OnlineLSEReduce(name)
    if s.kind == "select":
        index = ColLoad(sys.intern(f"i{s.index}"))
        extra.append(index)
        return ColVecSelect(name, idx_op=index)
    maker = RowVecReduce if s.over_rows else ColVecReduce
    return maker(name, combine=REDUCE[s.kind.partition("_")[2]], scaled=s.factors)


# --- the tensors a kernel is traced with ------------------------------------------------------------------------------


def _empty(dtype: DType, *shape: int) -> Tensor:
    return torch.empty(*shape, dtype=TORCH[dtype], device="cuda")


def _nominal(lowered: Lowered, index: DType | None, config: Config) -> dict[str, Any]:
    m, n = NOMINAL, lowered.cols
    shapes = {"tile": (m, n), "row": (n,), "col": (m,), "scalar": (1,)}
    found: dict[str, Any] = {"partner": 0} if lowered.mode == "halves" else {}
    for o in lowered.operands:
        found[o.name] = _empty(o.dtype, *((m, o.inside) if o.kind == "table" else shapes[o.kind]))
    for s in lowered.stores:
        found[s.name] = _empty(s.dtype, m, n // 2 if lowered.mode == "pair" else n)
    for k in lowered.sinks:
        found[k.name] = _empty(f32, *partial_shape(k, m, n, config))
        if k.kind == "select" and index is not None:
            found[f"i{k.index}"] = _empty(index, m)
    return found


def partial_shape(sink: Sink, rows: int, cols: int, config: Config) -> tuple[int, ...]:
    """The shape of what a sink writes: one number per row (or column) and tile; a select's is whole."""
    if sink.kind == "select":
        return (rows,)
    if sink.over_rows:
        return -(-rows // config.tile_m), cols
    return rows, -(-cols // config.tile_n)


def values(lowered: Lowered, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> dict[str, Any]:
    """The kernel's arguments by name, from the program's parameters and its output buffers, in order."""
    found: dict[str, Any] = {"partner": 0} if lowered.mode == "halves" else {}
    for o in lowered.operands:
        t = tensors[o.param]
        found[o.name] = t[..., o.columns[0] : o.columns[1]] if o.columns else t
    for s in lowered.stores:
        t = outputs[s.output]
        found[s.name] = t[:, s.columns[0] : s.columns[1]] if s.columns else t
    for k in lowered.sinks:
        t = outputs[k.output]
        found[k.name] = t[:, k.columns[0] : k.columns[1]] if k.columns else t
        if k.kind == "select":
            found[f"i{k.index}"] = tensors[k.index]
    return found
