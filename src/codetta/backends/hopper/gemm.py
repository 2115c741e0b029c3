"""One lowered program as one kernel: compiled for a configuration, launched on tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from codetta.backends.hopper import (
    stages,  # noqa: F401  what is compiled from here on has its stages kept
    toolchain,  # first: it prepares what the next imports read
)
from codetta.backends.hopper.choose import choose
from codetta.backends.hopper.columns import NotLowered
from codetta.backends.hopper.config import MMA_REGISTERS, Config
from codetta.backends.hopper.counters import Counter, next_counter, prepare
from codetta.backends.hopper.describe import describe
from codetta.backends.hopper.lowered import Lowered, Sink
from codetta.backends.hopper.memory import strides_of
from codetta.backends.reference.evaluate import TORCH
from codetta.core.node import Node
from codetta.core.types import Dim, DType, f32
from codetta.errors import PlanError
from codetta.ir.program import Program

# isort: split
from quack.gemm_runtime.host import GemmEpiPlan, run_gemm_epi_plan

PART_GRAIN = 16  # a row of parts begins at a multiple of so many: what folds them then loads 16 bytes at once
NOMINAL = 256  # rows and inner size of the shapes a kernel is traced with; neither enters it


@dataclass(frozen=True, slots=True)
class Job:
    """What identifies a kernel: a lowered program, the GEMM's form, the dtype of its operands and of a select's column,
    and the configuration. Sizes are no part of it."""

    lowered: Lowered
    form: str
    dtype: DType
    index: DType | None
    config: Config


def job_of(program: Program, rows: int | None = None) -> Job:
    """The kernel that a program gets for a number of tokens (None: a training step's); NotLowered says why it gets
    none. A GEMM without an epilogue gets one too; ``bare_config`` says whether it is faster than the library's."""
    return job_with(program, *choose(program, rows))


def job_with(program: Program, lowered: Lowered, config: Config) -> Job:
    """The kernel of a lowered program with a given configuration."""
    gemm = program.gemm
    if gemm is None:
        raise NotLowered("no GEMM")
    index = next((program.params[s.index].type.dtype for s in lowered.sinks if s.kind == "select"), None)
    return Job(lowered, gemm.form, gemm.dtype, index, config)


@cache
def compiled(job: Job) -> GemmEpiPlan:
    """The kernel: traced, then compiled or loaded from the cache; the same object for every M and K."""
    lowered, config = job.lowered, job.config
    module = describe(lowered, config)
    counter = _counter_for_tracing(config)  # real memory: before tensors are fakes
    with FakeTensorMode():
        arguments = _nominal(lowered, job.index, config)
        a = operand(job.form, _empty(job.dtype, NOMINAL, NOMINAL))
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
            tile_K=config.tile_k or None,
            pingpong=config.pingpong,
            is_dynamic_persistent=config.dynamic,
            tile_count_semaphore=counter,
            max_swizzle_size=config.swizzle,
            post_init_attrs=MMA_REGISTERS if config.more_registers else (),
            b_kn=not nt,
            concat_layout=("B",) if lowered.mode == "pair" else None,
            _launch=False,
        )


def operand(form: str, a: Tensor) -> Tensor:
    """The GEMM's first operand as a kernel takes it: a weight gradient's is transposed, which moves nothing."""
    return a.mT if form == "tn" else a


def launch(plan: GemmEpiPlan, a: Tensor, b: Tensor, values: Mapping[str, Any]) -> None:
    """Run a kernel on the current stream; ``a`` is what ``operand`` gives."""
    tiles = next_counter(a.device.index) if plan.scheduler_uses_semaphore else None
    run_gemm_epi_plan(plan, a, b, None, None, values, tile_count_semaphore=tiles)


def _counter_for_tracing(config: Config) -> Counter | None:
    if config.dynamic and toolchain.has_device():
        prepare(torch.cuda.current_device())
    return Counter(0) if config.dynamic else None


# --- the tensors a kernel is traced with ------------------------------------------------------------------------------


def _empty(dtype: DType, *shape: int) -> Tensor:
    return torch.empty(*shape, dtype=TORCH[dtype], device="cuda")


def _numbers(lowered: Lowered) -> dict[str, Any]:
    """The arguments that are no tensors."""
    return {**({"partner": 0} if lowered.by_lane else {}), **{s.name: s.inside for s in lowered.statistics}}


def _nominal(lowered: Lowered, index: DType | None, config: Config) -> dict[str, Any]:
    m, n = NOMINAL, lowered.cols
    found = _numbers(lowered)
    for o in lowered.operands:
        start, stop = o.source or (0, n)
        shapes = {"tile": (m, n), "row": (stop - start,), "col": (m,), "scalar": (1,), "table": (m, o.inside)}
        shapes |= {"group": (m, (stop - start) // (o.inside or 1)), "hit": (m,), "random": (1,)}
        found[o.name] = _empty(o.dtype, *shapes[o.kind])
    for s in lowered.stores:
        found[s.name] = _empty(s.dtype, m, n // 2 if lowered.mode == "pair" else n)
    for g in lowered.groups:
        start, stop = g.source or (0, n)
        inside = next(s.inside for s in lowered.statistics if s.name == g.statistic)
        found[g.name] = _empty(f32, m, (stop - start) // inside)
    for k in lowered.sinks:
        shape = partial_shape(k, m, n, config)
        exact = (m, _parts(n, config)) if k.by_row else shape
        # a view of the padded tensor, which cannot be sliced where there is no GPU
        found[k.name] = torch.empty_strided(exact, strides_of(shape), dtype=torch.float32, device="cuda")
        if k.kind == "select" and index is not None:
            found[f"i{k.index}"] = _empty(index, m)
    return found


def partial_shape(sink: Sink, rows: int, cols: int, config: Config) -> tuple[int, ...]:
    """The shape of what a sink writes to: one number per row (or column) and tile, rows of parts padded; a select's is
    whole."""
    if sink.by_row:
        return rows, -(-_parts(cols, config) // PART_GRAIN) * PART_GRAIN
    return (-(-rows // config.tile_m), cols) if sink.over_rows else (rows,)


def written(sink: Sink, partial: Tensor, cols: int, config: Config) -> Tensor:
    """What a sink writes to without the padding: a kernel asks for the exact shape."""
    return partial[:, 0 : _parts(cols, config)] if sink.by_row else partial


def _parts(cols: int, config: Config) -> int:
    """How many parts a row's reduction comes in."""
    return -(-cols // config.tile_n)


def sink_shape(lowered: Lowered, sink: Sink, output: Node, rows: int, config: Config) -> tuple[int, ...]:
    """The shape of what a sink writes for a program's output: sums over rows are as wide as what is summed, and of a
    range of columns those of all are written (``reduced``)."""
    own = sink.over_rows and sink.source is None
    return partial_shape(sink, rows, columns(output.args[0].type.cols) if own else lowered.cols, config)


def columns(size: Dim | None) -> int:
    """A number of columns, which a kernel's outputs must have; PlanError where it is a symbol."""
    if not isinstance(size, int):
        raise PlanError(f"a kernel's output needs a known number of columns, not {size}")
    return size


def reduced(job: Job, sink: Sink, partial: Tensor) -> Tensor:
    """The part of what a sink wrote to that belongs to its columns."""
    lowered, config = job.lowered, job.config
    if sink.source is None:
        return written(sink, partial, lowered.cols, config)
    start, stop = sink.source
    return partial[:, start:stop] if sink.over_rows else partial[:, start // config.tile_n : _parts(stop, config)]


def values(job: Job, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> dict[str, Any]:
    """The kernel's arguments by name, from the program's parameters and its output buffers, in order."""
    lowered, found = job.lowered, _numbers(job.lowered)
    found |= {g.name: outputs[g.output] for g in lowered.groups}
    for o in lowered.operands:
        t = tensors[o.param]
        found[o.name] = t[..., o.columns[0] : o.columns[1]] if o.columns else t
    for s in lowered.stores:
        t = outputs[s.output]
        found[s.name] = t[:, s.columns[0] : s.columns[1]] if s.columns else t
    for k in lowered.sinks:
        t = outputs[k.output]
        found[k.name] = t[:, k.columns[0] : k.columns[1]] if k.columns else written(k, t, lowered.cols, job.config)
        if k.kind == "select":
            found[f"i{k.index}"] = tensors[k.index]
    return found
