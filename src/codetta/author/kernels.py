"""The kernels of a program and of its derived backward at real sizes: what their code uses and what limits them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from codetta.author.bind import DEFAULTS, compiled_form, real_sizes
from codetta.author.file import Authored
from codetta.author.numbers import has_backward
from codetta.backends import as_kernels
from codetta.core.node import substitute
from codetta.core.types import ROWS, DType, Type, tile
from codetta.ir.build import input_, matmul
from codetta.ir.graph import Graph
from codetta.ir.program import Program
from codetta.partition.build import make_plan
from codetta.partition.cost import MACHINES, step_cost
from codetta.partition.plan import Plan, Step
from codetta.runtime.author import NEXT, OPERANDS, Backward, vjp

MACHINE = MACHINES["H200"]
FEWEST_STAGES = 3  # with fewer, loads of the mainloop are waited for
FORWARD, TRAINING, BACKWARD = "forward", "forward, in training", "backward"


@dataclass(frozen=True)
class Part:
    """A step of a plan that belongs to the program, and its part in training."""

    name: str
    phase: str
    plan: Plan
    step: Step

    @property
    def program(self) -> Program:
        """What it runs."""
        return self.step.program


@dataclass(frozen=True)
class Kernel:
    """One step as code. ``kind`` is "kernel" (ours, with its GEMM in it), "library" (a bare GEMM), "split" (that and a
    generated kernel behind it), "rows" (generated, without a GEMM) or "failed"; only the first has numbers of code."""

    program: str
    phase: str
    kind: str
    reason: str = ""
    tile: tuple[int, int] | None = None
    config: str = ""
    registers: int | None = None
    stack_bytes: int | None = None
    spill_stores: int | None = None
    spill_loads: int | None = None
    stages: int | None = None
    shared_bytes: int | None = None
    flops: int = 0
    bytes: int = 0
    arithmetic_us: float = 0.0
    memory_us: float = 0.0

    @property
    def spills(self) -> bool:
        """Whether its code writes registers to memory and reads them back."""
        return bool(self.spill_stores or self.spill_loads)

    @property
    def limited_by(self) -> str:
        """What to look at first, as far as the code tells; a clock says more."""
        if self.kind == "split":
            return "a second pass over memory"
        if self.spills:
            return "spills"
        if self.stages is not None and self.stages < FEWEST_STAGES:
            return "pipeline stages"
        return "arithmetic" if self.arithmetic_us >= self.memory_us else "bytes"

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "limited_by": self.limited_by}


def parts_of(program: Program) -> tuple[list[Part], Backward | None]:
    """The steps of a program: its own, the same in training where it stores more, and the derived backward."""
    plan = forward_plan(program)
    own = [s for s in plan.steps if s.program.role == program.role] or list(plan.steps)
    found = [Part(program.name, FORWARD, plan, s) for s in own]
    if program.role != "epilogue" or not has_backward(program):
        return found, None
    back = vjp(program, width=DEFAULTS["N"])
    first = next(s for s in back.training.forward.steps if s.kind == "gemm")
    if _stores(first.program) != _stores(own[0].program):
        found.append(Part(program.name, TRAINING, back.training.forward, first))
    steps = [s for s in back.training.backward.steps if s.program in back.programs and f"d_{NEXT}" not in s.stores]
    return [*found, *(Part(s.program.name, BACKWARD, back.training.backward, s) for s in steps)], back


def gemms_of(authored: Authored, dtype: DType, *, derived: bool) -> tuple[list[Program], int]:
    """A file's program at its real sizes, with ``derived`` also what training makes of it, and its number of rows."""
    sizes = real_sizes(authored.program, authored.sizes)
    parts, _ = parts_of(compiled_form(authored.program, sizes, dtype))
    wanted = [p for p in parts if p.step.kind == "gemm" and (derived or p.phase == FORWARD)]
    return [replace(p.program, name=p.name) for p in wanted], sizes[ROWS.name]


def _stores(program: Program) -> list[str]:
    return sorted(repr(n.type) for _, n in program.outputs)


def forward_plan(program: Program) -> Plan:
    """The program alone as a plan: its GEMM's operands and its parameters in, its outputs whole."""
    gemm, outputs = program.gemm, program.outputs
    if gemm is None:
        return make_plan(Graph(program.params, outputs))
    acc, *params = program.params
    x, w = (input_(name, t) for name, t in zip(OPERANDS, operand_types(program), strict=True))
    bodies = substitute([n for _, n in outputs], {acc: matmul(x, w, gemm.form)})
    names = [name for name, _ in outputs]
    return make_plan(Graph((x, w, *params), tuple(zip(names, bodies, strict=True))))


def operand_types(program: Program) -> tuple[Type, Type]:
    """The types of the GEMM's operands."""
    acc, gemm = program.params[0].type, program.gemm
    if gemm is None or acc.cols is None or acc.rows is None:
        raise TypeError(f"{program.name} has no GEMM")
    x = tile(acc.rows, gemm.dtype, rows=gemm.k) if gemm.form == "tn" else tile(gemm.k, gemm.dtype, rows=acc.rows)
    w = tile(gemm.k, gemm.dtype, rows=acc.cols) if gemm.form == "nt" else tile(acc.cols, gemm.dtype, rows=gemm.k)
    return x, w


def kernels(parts: Sequence[Part], rows: int) -> list[Kernel]:
    """Every step compiled for SM90; UnsupportedError where none can be."""
    found = []
    for part, built in zip(parts, as_kernels([p.program for p in parts], rows), strict=True):
        cost = step_cost(part.plan, part.step, rows)
        moved = cost.bytes + cost.weight_gradient_bytes + cost.operand_bytes
        seconds = cost.flops / MACHINE.flops, moved / MACHINE.bandwidth
        plain = Kernel(part.name, part.phase, getattr(built, "kind", "kernel"), flops=cost.flops, bytes=moved)
        plain = replace(plain, arithmetic_us=1e6 * seconds[0], memory_us=1e6 * seconds[1])
        if plain.kind == "kernel":
            found.append(replace(plain, **{name: getattr(built, name) for name in built.__slots__}))
        else:
            found.append(replace(plain, reason=built.reason))
    return found
