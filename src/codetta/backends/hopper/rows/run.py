"""A program as Triton kernels, ready to run on tensors."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from codetta.backends.hopper.binary import resources
from codetta.backends.hopper.rows.bind import Bound, Spec, Step, bind, block_of
from codetta.backends.hopper.rows.kernel import Argument
from codetta.backends.hopper.rows.launches import Launch, Output, launches
from codetta.backends.hopper.rows.source import kernel_of
from codetta.backends.hopper.rows.write import write
from codetta.backends.hopper.stream import on_device, stream_of
from codetta.core.node import Node
from codetta.core.types import Kind, compute_dtype
from codetta.ir.program import Program

MANY = 1002  # parts that a kernel is compiled for where there are none: a head's of 128,256 logits
UNSPECIALISED = ("rows", "span")  # another token count compiles nothing
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
    """What a compiled kernel uses: registers a thread, spill instructions, bytes of shared memory, and how many of its
    loads are of 16 bytes a thread."""

    registers: int
    spills: int
    shared: int
    wide_loads: int


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
        device = params[0].device if params else torch.device("cpu")
        stores = range(len(params), len(params) + len(self.program.outputs))
        launches, size = self.bind([Spec.of(t) for t in params], rows, device, range(len(params)), stores, stores.stop)
        tensors: list[Any] = [*params, *([None] * (size - len(params)))]
        with on_device(device):
            for launch in launches:
                launch(tensors, stream_of(device))
        return [tensors[i] for i in stores]

    def bind(
        self,
        specs: Sequence[Spec],
        rows: int,
        device: torch.device,
        loads: Sequence[int],
        stores: Sequence[int],
        free: int,
    ) -> tuple[list[Bound], int]:
        """Prepare all launches for parameters of these shapes on a device. They work on a list of tensors: parameters
        lie at ``loads``, outputs go to ``stores``, what passes between launches to places from ``free`` on. Also
        given back is the first place that is still free then."""
        known: dict[Node, Spec] = dict(zip(self.program.params, specs, strict=True))
        places: dict[Node | Output, int] = dict(zip(self.program.params, loads, strict=True))
        bounds: list[Bound] = []
        for step in self.steps:
            for o in step.launch.outputs:
                places[o] = free if o.temporary is not None else stores[o.slot]
                free += o.temporary is not None
            bound = bind(step, known, places, self.parts, rows, device)
            for o, (place, shape, _, _) in zip(step.launch.outputs, bound.outputs, strict=True):
                if o.temporary is not None:
                    known[o.temporary], places[o.temporary] = Spec.fresh(shape), place
            bounds.append(bound)
        return bounds, free

    def cross_compile(self, arch: int = 90) -> CompiledInfo:
        """What the kernels need on a GPU of that architecture, which need not be there; the largest of each."""
        found = [_compiled(s, self.parts, arch) for s in self.steps]
        return CompiledInfo(*(max(getattr(f, what) for f in found) for what in CompiledInfo.__slots__))


def compile_rows(program: Program, partial: Mapping[str, Node]) -> RowKernel:
    """The kernels of a program; ``partial`` names the parameters that arrive in parts, with the reduction that made
    them. Triton compiles when they first run."""
    return RowKernel(program, partial)


def _step(launch: Launch, name: str, parts: Mapping[Node, Node]) -> Step:
    kernel = write(launch, name, parts)
    free = [*UNSPECIALISED, *(a.name for a in kernel.arguments if a.what == "parts")]
    made = [kernel_of(kernel.text, name, free, interpreted) for interpreted in (False, True)]
    return Step(launch, kernel, *made)


def _compiled(step: Step, parts: Mapping[Node, Node], arch: int) -> CompiledInfo:
    kernel = step.kernel
    signature: dict[str, str] = {a.name: _signature(a) for a in kernel.arguments}
    aligned = [a.what in ("input", "output", "scratch", "counter") for a in kernel.arguments]
    aligned = [
        ok or (a.what == "stride" and a.node is not None and _even(a.node, parts))
        for ok, a in zip(aligned, kernel.arguments, strict=True)
    ]
    attrs = {(i,): [["tt.divisibility", 16]] for i, ok in enumerate(aligned) if ok}
    vectors = [a.node for a in kernel.arguments if a.what == "parts" and a.node and a.node.type.kind is Kind.COLVEC]
    bt, bm = block_of(kernel, dict.fromkeys(vectors, MANY), parts)
    constants = {"BM": bm, "BT": bt}
    source = ASTSource(step.on_gpu, {**signature, "BM": "constexpr", "BT": "constexpr"}, constants, attrs)
    made = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": kernel.warps, "enable_fp_fusion": True}
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(made.asm["cubin"])
        found = resources(file)
    wide = len(re.findall(r"ld\.global\S*\.v4\.b32", made.asm["ptx"]))
    return CompiledInfo(found.registers, found.spill_stores + found.spill_loads, made.metadata.shared, wide)


def _signature(a: Argument) -> str:
    if a.what == "counter":
        return "*i32"
    if a.what == "output" and a.output is not None:
        return POINTER[a.output.value.type.dtype.name]
    if a.what in ("input", "scratch") and a.node is not None:
        return POINTER[(a.node.type.dtype if a.what == "input" else compute_dtype(a.node.type.dtype)).name]
    return "i32"


def _even(n: Node, parts: Mapping[Node, Node]) -> bool:
    """Whether rows of that many columns keep their alignment; rows of parts are padded until they do."""
    return n in parts or (isinstance(n.type.cols, int) and n.type.cols % 16 == 0)
