"""What a plan moves and computes: bytes, FLOPs, and the time that a machine needs at least.

Counted is every load and store in HBM but the A and B operands of GEMMs; a GEMM's own output store is counted. The
gradients of weights, which every implementation stores alike, are counted apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from codetta.core.node import Node
from codetta.ir.program import Program
from codetta.partition.plan import Plan, Step, partial_outputs
from codetta.partition.size import bytes_of, dim, partial_bytes


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes of activations and vectors, bytes of weight gradients, bytes of prepared weights, and FLOPs of GEMMs."""

    bytes: int = 0
    weight_gradient_bytes: int = 0
    prepare_bytes: int = 0
    flops: int = 0
    operand_bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.bytes + other.bytes,
            self.weight_gradient_bytes + other.weight_gradient_bytes,
            self.prepare_bytes + other.prepare_bytes,
            self.flops + other.flops,
            self.operand_bytes + other.operand_bytes,
        )


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU's rates by its datasheet: dense bf16 FLOP/s and HBM bytes/s."""

    name: str
    flops: float
    bandwidth: float


# dense bf16 rates and memory bandwidths of the SXM parts, from NVIDIA's datasheets
MACHINES = {
    "H100": Machine("H100", 989e12, 3.35e12),
    "H200": Machine("H200", 989e12, 4.8e12),
    "B200": Machine("B200", 2250e12, 8e12),
}


def plan_cost(plan: Plan, rows: int) -> Cost:
    """The cost of all steps at a token count."""
    return sum((step_cost(plan, s, rows) for s in plan.steps), Cost())


def step_cost(plan: Plan, step: Step, rows: int) -> Cost:
    """The cost of one step."""
    sources = {b: n for s in plan.steps for b, (_, n) in zip(s.stores, s.program.outputs, strict=True)}
    loads = sum(_buffer_bytes(plan, sources, b, rows) for b in step.loads)
    stores = _stores(step.program, rows)
    if step.kind == "prepare":
        return Cost(prepare_bytes=loads + stores)
    if step.is_weight_gradient:
        return Cost(loads, stores, 0, _flops(step, rows), _operands(plan, step, rows))
    return Cost(loads + stores, 0, 0, _flops(step, rows), _operands(plan, step, rows))


def _buffer_bytes(plan: Plan, sources: dict[str, Node], buffer: str, rows: int) -> int:
    if buffer in plan.partials:
        n = sources[buffer]
        return partial_bytes(n.args[0].type, n.type, rows)
    return bytes_of(plan.buffers[buffer], rows)


def _stores(program: Program, rows: int) -> int:
    parts = zip((n for _, n in program.outputs), partial_outputs(program), strict=True)
    return sum(partial_bytes(n.args[0].type, n.type, rows) if p else bytes_of(n.type, rows) for n, p in parts)


def _flops(step: Step, rows: int) -> int:
    gemm = step.program.gemm
    if gemm is None:
        return 0
    acc = step.program.params[0].type
    return 2 * dim(acc.rows, rows) * dim(acc.cols, rows) * dim(gemm.k, rows)


def _operands(plan: Plan, step: Step, rows: int) -> int:
    return sum(bytes_of(plan.buffers[b], rows) for b in (step.a, *step.b) if b)


def roofline_seconds(costs: Iterable[Cost], machine: Machine) -> float:
    """The sum over steps of the larger of arithmetic and memory time; operands of GEMMs are read once."""
    return sum(
        max(
            c.flops / machine.flops,
            (c.bytes + c.weight_gradient_bytes + c.prepare_bytes + c.operand_bytes) / machine.bandwidth,
        )
        for c in costs
    )
