"""A program as Triton kernels, ready to run on tensors."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from codetta.backends.hopper import memory
from codetta.backends.hopper.binary import resources
from codetta.backends.hopper.rows.kernel import Argument, Kernel, pow2
from codetta.backends.hopper.rows.launches import Launch, Output, launches
from codetta.backends.hopper.rows.source import kernel_of
from codetta.backends.hopper.rows.write import write
from codetta.backends.reference.evaluate import TORCH
from codetta.core.node import Node
from codetta.core.types import DType, Kind, compute_dtype
from codetta.ir.program import Program
from codetta.partition.size import dim

IN_FLIGHT = 528  # blocks that keep an H200 busy: four on each of its 132 multiprocessors
UNSPECIALISED = ("rows", "span")  # another token count compiles nothing
COUNTERS: dict[tuple[torch.device, int], Tensor] = {}
POINTER: dict[str, str] = {
    "f64": "*fp64",
    "f32": "*fp32",
    "bf16": "*bf16",
    "f16": "*fp16",
    "i64": "*i64",
    "i32": "*i32",
    "boolean": "*i1",
}


@dataclass(frozen=True, slots=True)
class CompiledInfo:
    """What a compiled kernel uses: registers a thread, spill instructions, bytes of shared memory."""

    registers: int
    spills: int
    shared: int


@dataclass(frozen=True, slots=True)
class Step:
    """One launch: its kernel, on the GPU and in Triton's interpreter; ``compiled`` saves Triton's own look-up, which
    is slower than some of the kernels."""

    launch: Launch
    kernel: Kernel
    on_gpu: Any
    on_cpu: Any
    compiled: dict[object, Any] = field(default_factory=dict)


class RowKernel:
    """A finalize, a leftover, or an epilogue over an accumulator in memory. Tensors on the CPU run in Triton's
    interpreter, which is for tests."""

    def __init__(self, program: Program, partial: Mapping[str, Node]) -> None:
        self.program = program
        found, self.parts = launches(program, partial)
        name = re.sub(r"\W", "_", program.name, flags=re.ASCII)
        self.steps = [_step(launch, f"rows_{name}_{i}", self.parts) for i, launch in enumerate(found)]

    @property
    def text(self) -> str:
        """The source of the kernels."""
        return "\n\n".join(s.kernel.text for s in self.steps)

    def __call__(self, params: Sequence[Tensor], rows: int) -> list[Tensor]:
        """The outputs, newly allocated; ``rows`` is the token count."""
        tensors = dict(zip(self.program.params, params, strict=True))
        device = params[0].device if params else torch.device("cpu")
        results: list[Tensor | None] = [None] * len(self.program.outputs)
        for step in self.steps:
            stored = _Call(step, tensors, self.parts, rows, device).run()
            for o, t in zip(step.launch.outputs, stored, strict=True):
                if o.temporary is not None:
                    tensors[o.temporary] = t
                else:
                    results[o.slot] = t
        return [t for t in results if t is not None]

    def cross_compile(self, arch: int = 90) -> CompiledInfo:
        """What the kernels need on a GPU of that architecture, which need not be there; the largest of each."""
        found = [_compiled(s, self.parts, arch) for s in self.steps]
        return CompiledInfo(*(max(getattr(f, what) for f in found) for what in ("registers", "spills", "shared")))


def compile_rows(program: Program, partial: Mapping[str, Node]) -> RowKernel:
    """The kernels of a program; ``partial`` names the parameters that arrive in parts, with the reduction that made
    them. Triton compiles when they first run."""
    return RowKernel(program, partial)


def _step(launch: Launch, name: str, parts: Mapping[Node, Node]) -> Step:
    kernel = write(launch, name, parts)
    free = [*UNSPECIALISED, *(a.name for a in kernel.arguments if a.what == "parts")]
    made = [kernel_of(kernel.text, name, free, interpreted) for interpreted in (False, True)]
    return Step(launch, kernel, *made)


@dataclass(frozen=True, slots=True)
class Numbers:
    """A launch's rows, how many of them a block takes, and how many blocks of them there are."""

    rows: int
    span: int
    blocks: int


@dataclass
class _Call:
    """One launch on tensors."""

    step: Step
    tensors: dict[Node, Tensor]
    parts: Mapping[Node, Node]
    rows: int
    device: torch.device

    def run(self) -> list[Tensor]:
        """Allocate the outputs and launch."""
        kernel = self.step.kernel
        extent = dim(kernel.rows, self.rows)
        inputs = {a.node: self.prepared(a.node) for a in kernel.arguments if a.what == "input" and a.node is not None}
        bt, bm = self.block(inputs)
        blocks = max(-(-extent // bm), 1) if kernel.rows is not None else 1
        span = bm
        if kernel.in_runs:
            span = bm * max(1, -(-blocks // max(1, IN_FLIGHT // kernel.chunks)))
            blocks = max(-(-extent // span), 1)
        stored = [self.output(o.value, o.in_parts, blocks) for o in self.step.launch.outputs]
        totals = any(o.value.type.kind is Kind.SCALAR for o in self.step.launch.outputs)
        if (extent == 0 and not totals) or all(t.numel() == 0 for t in stored):
            return [t.zero_() if o.in_parts else t for o, t in zip(self.step.launch.outputs, stored, strict=True)]
        outputs = dict(zip(self.step.launch.outputs, stored, strict=True))
        numbers = Numbers(extent, span, blocks)
        given = [self.argument(a, self.of(a, inputs), outputs, numbers) for a in kernel.arguments]
        self.start((blocks, kernel.chunks, 1), given, bm, bt)
        return stored

    def of(self, a: Argument, inputs: Mapping[Node, Tensor]) -> Tensor | None:
        """The parameter that an argument tells of."""
        return None if a.node is None else inputs.get(a.node)

    def start(self, grid: tuple[int, int, int], given: list[object], bm: int, bt: int) -> None:
        """Launch, on the tensors' device and its current stream."""
        step = self.step
        if self.device.type == "cpu":
            step.on_cpu[grid](*given, BM=bm, BT=bt)
            return
        key = (self.device, bt, *map(_specialised, given, (a.what for a in step.kernel.arguments)))
        with torch.cuda.device(self.device):
            made = step.compiled.get(key)
            if made is None:
                options = {"num_warps": step.kernel.warps, "enable_fp_fusion": True}
                step.compiled[key] = step.on_gpu[grid](*given, BM=bm, BT=bt, **options)
            else:
                made[grid](*given, bm, bt)

    def block(self, inputs: Mapping[Node, Tensor]) -> tuple[int, int]:
        """How many parts of a vector, and how many rows, a block takes; both follow from the columns, not the rows."""
        counts = [inputs[n].shape[-1] for n in inputs if n in self.parts and n.type.kind is Kind.COLVEC]
        bt = min(pow2(max(counts, default=1)), 128)
        if self.step.kernel.block:
            return bt, self.step.kernel.block
        width = self.step.kernel.width
        return bt, max(1, min(256, 2048 // max(width, bt if counts else 1)))

    def prepared(self, n: Node) -> Tensor:
        """A parameter as kernels read it: rows at any stride, everything else side by side."""
        t = self.tensors[n]
        if n in self.parts and n.type.kind is Kind.SCALAR:
            return t.reshape(1, -1)
        if t.dim() == 2 and (t.stride(1) == 1 or t.shape[1] <= 1):
            return t
        return t.contiguous()

    def output(self, n: Node, in_parts: bool, blocks: int) -> Tensor:
        """Memory for an output."""
        t = n.type
        shape = [dim(size, self.rows) for size in (t.rows, t.cols) if size is not None]
        if in_parts:
            extent = dim(n.args[0].type.rows, self.rows) if n.op.family == "reduce" else 1
            count = blocks if extent else 0
            shape = {
                Kind.COLVEC: [*shape, 1],
                Kind.ROWVEC: [count, *shape],
                Kind.SCALAR: [count, self.step.kernel.chunks],
            }.get(t.kind, shape)
        return memory.empty(shape, TORCH[t.dtype], self.device)

    def argument(self, a: Argument, t: Tensor | None, outputs: Mapping[Output, Tensor], numbers: Numbers) -> object:
        """What a kernel is given."""
        if a.what == "output" and a.output is not None:
            return outputs[a.output]
        if a.what == "scratch" and a.node is not None:
            size = numbers.blocks * self.step.kernel.chunks
            return torch.empty(size, dtype=TORCH[_wide(a.node.type.dtype)], device=self.device)
        if a.what == "counter":
            return counter(self.device)
        if a.what in ("rows", "span"):
            return numbers.rows if a.what == "rows" else numbers.span
        if t is None or a.what == "input":
            return t
        axis = 0 if a.node is not None and a.node.type.kind is Kind.ROWVEC else t.dim() - 1
        return t.stride(0) if a.what == "stride" else t.shape[axis]


def _specialised(value: object, what: str) -> object:
    """What of an argument Triton compiles for: alignment, a stride of 1, the width of integers."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if not isinstance(value, int):
        return None
    return value >= 1 << 31, what == "stride" and (value % 16 == 0, value == 1)


def _wide(dtype: DType) -> DType:
    return compute_dtype(dtype)


def counter(device: torch.device) -> Tensor:
    """The count of blocks that are done, 0 between launches; launches of one stream run one after the other."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    if (device, stream) not in COUNTERS:
        COUNTERS[device, stream] = torch.zeros(1, dtype=torch.int32, device=device)
    return COUNTERS[device, stream]


def _compiled(step: Step, parts: Mapping[Node, Node], arch: int) -> CompiledInfo:
    kernel = step.kernel
    signature: dict[str, str] = {a.name: _signature(a) for a in kernel.arguments}
    aligned = [a.what in ("input", "output", "scratch", "counter") for a in kernel.arguments]
    aligned = [
        ok or (a.what == "stride" and a.node is not None and _even(a.node, parts))
        for ok, a in zip(aligned, kernel.arguments, strict=True)
    ]
    attrs = {(i,): [["tt.divisibility", 16]] for i, ok in enumerate(aligned) if ok}
    constants = {"BM": kernel.block or 16, "BT": 128 if not kernel.block else 1}
    source = ASTSource(step.on_gpu, {**signature, "BM": "constexpr", "BT": "constexpr"}, constants, attrs)
    made = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": kernel.warps, "enable_fp_fusion": True}
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(made.asm["cubin"])
        found = resources(file)
    return CompiledInfo(found.registers, found.spill_stores + found.spill_loads, made.metadata.shared)


def _signature(a: Argument) -> str:
    if a.what == "counter":
        return "*i32"
    if a.what == "output" and a.output is not None:
        return POINTER[a.output.value.type.dtype.name]
    if a.what in ("input", "scratch") and a.node is not None:
        return POINTER[(a.node.type.dtype if a.what == "input" else _wide(a.node.type.dtype)).name]
    return "i32"


def _even(n: Node, parts: Mapping[Node, Node]) -> bool:
    """Whether rows of that many columns keep their alignment."""
    return n not in parts and isinstance(n.type.cols, int) and n.type.cols % 16 == 0
