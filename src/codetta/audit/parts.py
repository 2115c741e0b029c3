"""What an explanation is made of: the counts and costs of a plan, of a segment, and the calls that stay outside."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from codetta.partition.cost import MACHINES, Cost, Machine, plan_cost, roofline_seconds, step_cost
from codetta.partition.lifetime import Peak
from codetta.partition.plan import Plan

WAYS = ("programs", "boundary_fusion", "eager")  # as codetta plans it; ideal fusion between GEMMs; operator by operator


@dataclass(frozen=True, slots=True)
class Half:
    """Forward or backward: counts, bytes of activations, FLOPs, and the least time by machine and way."""

    gemms: int = 0
    epilogues: int = 0
    data_gradients: int = 0
    data_gradient_epilogues: int = 0
    finalizes: int = 0
    leftovers: int = 0
    prepares: int = 0
    opaque: int = 0
    bytes: int = 0
    bytes_boundary_fusion: int = 0
    bytes_eager: int = 0
    weight_gradient_bytes: int = 0
    prepare_bytes: int = 0
    flops: int = 0
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    leftover_reasons: tuple[str, ...] = ()

    def __add__(self, other: Half) -> Half:
        mine, theirs = asdict(self), asdict(other)
        seconds = {
            machine: {way: self.seconds.get(machine, {}).get(way, 0.0) + t for way, t in times.items()}
            for machine, times in other.seconds.items()
        }
        numbers = {k: mine[k] + theirs[k] for k in mine if k != "seconds"}
        return Half(**numbers, seconds=seconds or self.seconds)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"leftover_reasons": list(self.leftover_reasons)}


@dataclass(frozen=True, slots=True)
class Part:
    """One segment or loss head: where it lies, its token count, what it costs, the most memory that it needs; what is
    to be said of it. Parts with the same ``key`` have the same plans."""

    key: str
    layers: tuple[str, ...]
    rows: int
    forward: Half
    backward: Half
    memory: Peak
    note: str = ""


@dataclass(frozen=True, slots=True)
class Opaque:
    """Calls that stay with PyTorch for one reason: how many, how many take part in backward, in which modules."""

    name: str
    reason: str
    count: int
    differentiable: int
    modules: tuple[str, ...]


def half_of(plan: Plan, rows: int, eager: int, fusion: Plan) -> Half:
    """The counts and costs of a plan, beside those of eager operators and of ideal fusion between GEMMs."""
    cost = plan_cost(plan, rows)
    gemms = [s for s in plan.steps if s.kind == "gemm"]
    data = [s for s in gemms if s.program.gemm is not None and s.program.gemm.form == "nn"]
    return Half(
        gemms=len(gemms),
        epilogues=plan.epilogues,
        data_gradients=len(data),
        data_gradient_epilogues=sum(s.has_epilogue for s in data),
        finalizes=plan.count("finalize"),
        leftovers=plan.count("leftover"),
        prepares=plan.count("prepare"),
        bytes=cost.bytes,
        bytes_boundary_fusion=plan_cost(fusion, rows).bytes,
        bytes_eager=eager,
        weight_gradient_bytes=cost.weight_gradient_bytes,
        prepare_bytes=cost.prepare_bytes,
        flops=cost.flops,
        seconds={name: _seconds(plan, rows, eager, fusion, m) for name, m in MACHINES.items()},
        leftover_reasons=tuple(s.reason for s in plan.steps if s.kind == "leftover"),
    )


def groups(parts: Iterable[Part]) -> dict[str, list[int]]:
    """The positions of the parts of each key, in the order in which keys appear."""
    found: dict[str, list[int]] = {}
    for i, p in enumerate(parts):
        found.setdefault(p.key, []).append(i)
    return found


def _seconds(plan: Plan, rows: int, eager: int, fusion: Plan, machine: Machine) -> dict[str, float]:
    """The least time each way. Eager: every GEMM of ours bare, then everything else at the memory's rate."""
    steps = [step_cost(plan, s, rows) for s in plan.steps]
    bare = [Cost(0, c.weight_gradient_bytes, 0, c.flops, c.operand_bytes) for c in steps if c.flops]
    fused = [step_cost(fusion, s, rows) for s in fusion.steps]
    return {
        "programs": roofline_seconds(steps, machine),
        "boundary_fusion": roofline_seconds(fused, machine),
        "eager": roofline_seconds(bare, machine) + eager / machine.bandwidth,
    }
