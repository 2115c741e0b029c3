"""A Plan: the ordered steps of a graph, and which buffer each of them reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256

from codetta.core.node import Node
from codetta.core.types import Kind, Type
from codetta.ir import ops
from codetta.ir.program import Program, is_partial
from codetta.ir.split import Split
from codetta.lang.source import program_text


@dataclass(frozen=True, slots=True)
class View:
    """A buffer, or rows ``start:stop`` of one (a weight's share of a stacked gradient)."""

    buffer: str
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One launch: a program, the buffers of its GEMM's operands (several for stacked weights), of its parameters
    (without ``acc``) and of its outputs; for a leftover, why it could not go into an epilogue."""

    program: Program
    a: str
    b: tuple[str, ...]
    loads: tuple[str, ...]
    stores: tuple[str, ...]
    reason: str = ""
    on_weights: bool = False

    @property
    def kind(self) -> str:
        """gemm, finalize, leftover, or prepare (a leftover on weights: a cast, a fold)."""
        if self.program.role == "epilogue":
            return "gemm"
        return "prepare" if self.on_weights else self.program.role

    @property
    def is_weight_gradient(self) -> bool:
        """dz.T @ x."""
        return self.program.gemm is not None and self.program.gemm.form == "tn"

    @property
    def has_epilogue(self) -> bool:
        """A GEMM that does more than store its accumulator, or its columns, in the storage dtype."""
        if self.kind != "gemm":
            return False
        plain = (ops.INPUT, ops.CAST, ops.PART)
        return any(n.op not in plain for n in self.program.body) or len(self.loads) > 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in order of execution; every buffer's type; a partial buffer is one that a finalize must fold."""

    inputs: tuple[str, ...]
    outputs: tuple[tuple[str, View], ...]
    steps: tuple[Step, ...]
    buffers: dict[str, Type] = field(hash=False)
    partials: frozenset[str] = frozenset()

    def count(self, kind: str) -> int:
        """How many steps are of that kind."""
        return sum(s.kind == kind for s in self.steps)

    @property
    def epilogues(self) -> int:
        """GEMMs with a non-trivial epilogue."""
        return sum(s.has_epilogue for s in self.steps)

    @property
    def stacks(self) -> tuple[tuple[str, ...], ...]:
        """The inputs that steps read as one tensor, in order: siblings' weights, and biases joined as their columns."""
        read = [s.b for s in self.steps if len(s.b) > 1] + [names for s in self.steps for names in _joined(s)]
        return tuple(names for names in dict.fromkeys(read) if set(names) <= set(self.inputs))

    @property
    def reductions(self) -> dict[str, Node]:
        """The reduction that made each partial buffer."""
        stored = (pair for s in self.steps for pair in zip(s.stores, s.program.outputs, strict=True))
        return {b: n for b, (_, n) in stored if b in self.partials}

    def last_uses(self) -> list[list[str]]:
        """For each step, the buffers that no later step reads and no output names."""
        kept = {v.buffer for _, v in self.outputs}
        last: dict[str, int] = {}
        for i, s in enumerate(self.steps):
            last.update({name: i for name in (s.a, *s.b, *s.loads, *s.stores) if name and name not in kept})
        return [[name for name, i in last.items() if i == step] for step in range(len(self.steps))]

    @property
    def digest(self) -> str:
        """A content hash: the same plan has the same digest in every process."""
        return sha256(plan_text(self).encode()).hexdigest()[:32]


def _joined(step: Step) -> Iterator[tuple[str, ...]]:
    """The buffers of vectors that a step reads side by side, whole."""
    params = step.program.params[1:] if step.program.role == "epilogue" else step.program.params
    buffer = dict(zip(params, step.loads, strict=True))
    for n in (n for n in step.program.body if n.op is ops.JOIN and n.type.kind is Kind.ROWVEC):
        split = n.attrs[0]
        side_by_side = isinstance(split, Split) and split.groups == 1 and not split.adjacent
        if side_by_side and all(a in buffer for a in n.args):
            yield tuple(buffer[a] for a in n.args)


def partial_outputs(program: Program) -> tuple[bool, ...]:
    """Which outputs of a step are written one part per tile (an epilogue) or per block of rows (a leftover)."""
    if program.role == "finalize":
        return (False,) * len(program.outputs)
    if program.role == "leftover":
        return tuple(is_partial(n) and n.type.rows is None for _, n in program.outputs)
    return tuple(is_partial(n) for _, n in program.outputs)


def plan_text(plan: Plan) -> str:
    """The plan in language form: each step's program, then the call that binds it to buffers."""
    lines = [f"# inputs: {', '.join(f'{n}: {plan.buffers[n]}' for n in plan.inputs)}"]
    for s in plan.steps:
        if s.reason:
            lines.append(f"# {s.kind}: {s.reason}")
        lines.append(program_text(s.program).rstrip())
        operands = [s.a, "[" + "; ".join(s.b) + "]" if len(s.b) > 1 else s.b[0]] if s.a else []
        lines.append(f"# {', '.join(s.stores)} = {s.program.name}({', '.join([*operands, *s.loads])})\n")
    views = (f"{n}={v.buffer}" + (f"[{v.rows[0]}:{v.rows[1]}]" if v.rows else "") for n, v in plan.outputs)
    return "\n".join([*lines, f"# outputs: {', '.join(views)}\n"])
