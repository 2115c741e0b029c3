"""A Plan as a callable on SM90: each step one launch, in order, on the current stream."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from codetta.backends.hopper.choose import is_bare
from codetta.backends.hopper.columns import NotLowered
from codetta.backends.hopper.gemm import Job, compiled, job_of, launch, partial_shape, values
from codetta.backends.hopper.memory import empty
from codetta.backends.hopper.rows import RowKernel, compile_rows
from codetta.backends.reference.evaluate import TORCH
from codetta.backends.reference.execute import Executable as Reference
from codetta.backends.stacked import stacked
from codetta.core.node import Node
from codetta.core.types import Dim, DType
from codetta.errors import PlanError
from codetta.ir.program import param_name
from codetta.partition.plan import Plan, Step

Memory = dict[str, Tensor]
Run = Callable[[Memory, int], Sequence[Tensor]]
log = logging.getLogger("codetta")
# cuBLAS of CUDA 13.0 leaves the last token out of some weight gradients where their number is odd (4,097 of them, for
# one): an error of 1/64, seen on an H200. A number of tokens that 8 divides is right.
WHOLE_ROWS = 8
REDUCED = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
ALIGNMENT = 16  # bytes: what TMA asks of an operand's address and of its row stride


class Executable:
    """A plan ready to run: ``run(inputs)`` gives the buffers of its outputs by name."""

    def __init__(self, plan: Plan, *, batch_invariant: bool = False) -> None:
        self.plan = plan
        self.steps = [prepare(s, plan.reductions, batch_invariant) for s in plan.steps]
        self.dies = plan.last_uses()
        self.outputs = tuple(v.buffer for _, v in plan.outputs)

    def run(self, inputs: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
        """Execute; ``rows`` is the token count. The result has each buffer that an output names."""
        if rows == 0:  # nothing to launch: shapes and zeros only
            return Reference(self.plan).run(inputs, 0)
        memory = dict(inputs)
        for step, run, dying in zip(self.plan.steps, self.steps, self.dies, strict=True):
            memory.update(zip(step.stores, run(memory, rows), strict=True))
            for name in dying:
                del memory[name]
        return {name: memory[name] for name in self.outputs}


def prepare(step: Step, reductions: Mapping[str, Node], batch_invariant: bool) -> Run:
    """How a step runs: on its kernel, as a bare GEMM of the library, as such a GEMM with a generated map behind it, or
    as a generated map. The library picks its algorithm by the number of rows, our kernels do not."""
    program = step.program
    if program.gemm is None:
        loads = zip(program.params, step.loads, strict=True)
        partial = {param_name(p): reductions[b] for p, b in loads if b in reductions}
        return Map(step, compile_rows(program, partial))
    if is_bare(program) and (not batch_invariant or program.gemm.form == "tn"):
        return Bare(step, program.outputs[0][1].type.dtype)
    try:
        return Fused(step, job_of(program))
    except NotLowered as reason:
        log.info("%s: a GEMM and a map behind it, as it does not fit one kernel: %s", program.name, reason)
        return Split(step, compile_rows(program, {}))


def matmul(form: str, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The bare GEMM, accumulated in float32 and rounded once to ``dtype``."""
    if form == "tn" and a.shape[0] % WHOLE_ROWS:
        a, b = (F.pad(t, (0, 0, 0, -t.shape[0] % WHOLE_ROWS)) for t in (a, b))
    x, y = (a.t(), b) if form == "tn" else (a, b.t() if form == "nt" else b)
    with one_rounding():
        if dtype == a.dtype:
            return torch.mm(x, y)
        if a.dtype.itemsize == 2 and dtype == torch.float32:
            return torch.mm(x, y, out_dtype=dtype)
        return torch.mm(x, y).to(dtype)


def product(step: Step, memory: Memory, dtype: DType) -> Tensor:
    """The bare GEMM of a step."""
    if step.program.gemm is None:
        raise PlanError(f"{step.program.name} has no GEMM")
    return matmul(step.program.gemm.form, memory[step.a], stacked([memory[w] for w in step.b]), TORCH[dtype])


@contextmanager
def one_rounding() -> Iterator[None]:
    """The library may split a long inner dimension and, by PyTorch's default, round the parts' sums to 16 bits: ten
    times the error of one rounding. Not here. The switch is the process's; other threads lose nothing but that."""
    matmuls = torch.backends.cuda.matmul
    before = {name: (getattr(matmuls, name), getattr(matmuls, f"{name}_split_k", None)) for name in REDUCED}
    try:
        for name, (_, split) in before.items():
            setattr(matmuls, name, False if split is None else (False, split))
        yield
    finally:
        for name, (reduced, split) in before.items():
            setattr(matmuls, name, reduced if split is None else (reduced, split))


@dataclass(frozen=True, slots=True)
class Bare:
    """A GEMM without an epilogue."""

    step: Step
    dtype: DType

    def __call__(self, memory: Memory, rows: int) -> Sequence[Tensor]:
        """The one output."""
        return [product(self.step, memory, self.dtype)]


@dataclass(frozen=True, slots=True)
class Split:
    """An epilogue that is no kernel of its own: the GEMM stores its float32 accumulator, a generated map reads it."""

    step: Step
    kernel: RowKernel

    def __call__(self, memory: Memory, rows: int) -> Sequence[Tensor]:
        """The outputs of both launches."""
        acc = product(self.step, memory, self.step.program.params[0].type.dtype)
        return self.kernel([acc, *(memory[name] for name in self.step.loads)], rows)


@dataclass(frozen=True, slots=True)
class Map:
    """A finalize, a leftover or a step on weights."""

    step: Step
    kernel: RowKernel

    def __call__(self, memory: Memory, rows: int) -> Sequence[Tensor]:
        """The outputs of one launch."""
        return self.kernel([memory[name] for name in self.step.loads], rows)


class Fused:
    """A GEMM and its epilogue as one kernel."""

    def __init__(self, step: Step, job: Job) -> None:
        self.step, self.lowered, self.config = step, job.lowered, job.config
        self.sinks = {s.output: s for s in job.lowered.sinks}
        self.plan = compiled(job)

    def __call__(self, memory: Memory, rows: int) -> Sequence[Tensor]:
        """Allocate the outputs and launch."""
        step = self.step
        a, b = aligned(memory[step.a]), aligned(stacked([memory[w] for w in step.b]))
        loads = [a, *(aligned(memory[name]) for name in step.loads)]  # the accumulator's place is never read
        outputs = [self._output(i, n, rows, a.device) for i, (_, n) in enumerate(step.program.outputs)]
        launch(self.plan, a, b, values(self.lowered, loads, outputs))
        return outputs

    def _output(self, i: int, n: Node, rows: int, device: torch.device) -> Tensor:
        sink = self.sinks.get(i)
        if sink is None:
            return empty((rows, _number(n.type.cols)), TORCH[n.type.dtype], device)
        if sink.kind == "select":  # a row whose index names no column is not written
            return torch.zeros(rows, dtype=TORCH[n.type.dtype], device=device)
        width = n.args[0].type.cols if sink.over_rows else self.lowered.cols
        return empty(partial_shape(sink, rows, _number(width), self.config), torch.float32, device)


def _number(size: Dim | None) -> int:
    if not isinstance(size, int):
        raise PlanError(f"a kernel's output needs a known number of columns, not {size}")
    return size


def aligned(t: Tensor) -> Tensor:
    """The tensor itself, or a copy where its address is not one that TMA can read (a view into odd memory)."""
    return t.clone() if t.data_ptr() % ALIGNMENT else t
