"""A Plan as a callable: every step in order on PyTorch tensors, one rounding per store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from codetta.backends.base import NEW
from codetta.backends.reference.evaluate import EVAL, Value, as_tensor, contract, expand_to, leaf
from codetta.backends.reference.tiles import fold, partials
from codetta.core.node import Node, Op, postorder
from codetta.core.types import Kind
from codetta.ir import ops
from codetta.ir.program import Program
from codetta.partition.plan import Plan, Step, partial_outputs

Instruction = tuple[Callable[[list[Value], int], Value], int]


@dataclass(frozen=True, slots=True)
class Body:
    """A program's expressions as straight-line code over slots; the parameters' slots come first."""

    size: int
    code: tuple[Instruction, ...]
    results: tuple[int, ...]
    program: Program

    def __call__(self, params: Sequence[Tensor], rows: int) -> list[Tensor]:
        """Run on the parameters' values (the accumulator first in an epilogue); ``rows`` is what M stands for."""
        slots: list[Value] = [*params, *([0.0] * (self.size - len(params)))]
        for run, target in self.code:
            slots[target] = run(slots, rows)
        device = params[0].device if params else torch.device("cpu")
        roots = (n for _, n in self.program.outputs)
        return [as_tensor(slots[i], n.type, device) for i, n in zip(self.results, roots, strict=True)]


def compile_body(program: Program) -> Body:
    """The code of a program; outputs that are partials stay in parts."""
    slot: dict[Node, int] = {p: i for i, p in enumerate(program.params)}
    code: list[Instruction] = []
    in_parts = {n for (_, n), p in zip(program.outputs, partial_outputs(program), strict=True) if p}
    order = [n for n in postorder(n for _, n in program.outputs) if n not in slot]
    last = {m: n for n in order for a in n.args for m in in_memory_of(a)}
    kept = {m for _, n in program.outputs for m in in_memory_of(n)}
    for n in order:
        slot[n] = len(slot)
        args = [slot[a] for a in n.args]
        free = [
            a for a in dict.fromkeys(n.args) if last[a] is n and a not in kept and _is_fresh(a) and a.type == n.type
        ]
        if n.op in IN_PLACE and n.args[0] in free and n.args.count(n.args[0]) == 1:
            code.append((_overwriting(n, args), slot[n]))
        else:
            code.append((_instruction(n, args, n in in_parts), slot[n]))
    return Body(len(slot), tuple(code), tuple(slot[n] for _, n in program.outputs), program)


IN_PLACE: dict[Op, Callable[[Tensor, Value], Tensor]] = {
    ops.ADD: lambda a, b: a.add_(b),
    ops.SUB: lambda a, b: a.sub_(b),
    ops.MUL: lambda a, b: a.mul_(b),
}
VIEWS = {ops.PART, ops.EXPAND, ops.TURN, ops.TAKE_ROWS, ops.CAST}
FRESH = {*IN_PLACE, ops.DIV, ops.EXP, ops.SIGMOID, ops.SILU, ops.TANH, ops.NEG}


def in_memory_of(n: Node) -> list[Node]:
    """``n`` and the values in whose memory it may lie: what is written over one of them is written over it."""
    return [n, *(m for a in n.args for m in in_memory_of(a))] if n.op in VIEWS else [n]


def _is_fresh(n: Node) -> bool:
    """Whether a value lies in memory of its own: a map's result in the compute dtype, as large as a Tile."""
    return n.op in FRESH and n.type.kind is Kind.TILE and n.type.dtype.is_float


def _overwriting(n: Node, args: list[int]) -> Callable[[list[Value], int], Value]:
    """The instruction that writes over its first argument, which nobody reads any more, where the shapes allow it."""
    run, over = EVAL[n.op](n), IN_PLACE[n.op]
    first, second = args

    def instruction(slots: list[Value], rows: int) -> Value:
        a, b = slots[first], slots[second]
        same = not isinstance(b, Tensor) or not b.dim() or (isinstance(a, Tensor) and b.shape == a.shape)
        if isinstance(a, Tensor) and same and (not isinstance(b, Tensor) or b.dtype == a.dtype):
            return over(a, b)
        return run(a, b)

    return instruction


def _instruction(n: Node, args: list[int], in_parts: bool) -> Callable[[list[Value], int], Value]:
    if not n.args:
        return lambda slots, rows: leaf(n, rows, _device(slots))
    if n.op is ops.EXPAND:
        return lambda slots, rows: expand_to(n, slots[args[0]], rows)
    if in_parts:
        return lambda slots, rows: partials(n, as_tensor(slots[args[0]], n.args[0].type, _device(slots)))
    run = EVAL[n.op](n)
    if len(args) == 1:
        (only,) = args
        return lambda slots, rows: run(slots[only])
    if len(args) == 2:
        first, second = args
        return lambda slots, rows: run(slots[first], slots[second])
    return lambda slots, rows: run(*(slots[i] for i in args))


def _device(slots: list[Value]) -> torch.device:
    return next((v.device for v in slots if isinstance(v, Tensor)), torch.device("cpu"))


class Executable:
    """A plan ready to run: ``run(inputs)`` gives the buffers of its outputs by name."""

    def __init__(self, plan: Plan, *, batch_invariant: bool = False) -> None:
        """PyTorch's GEMM may choose its algorithm by the number of rows: ``batch_invariant`` is not seen to here."""
        self.plan = plan
        self.bodies = [compile_body(s.program) for s in plan.steps]
        self.dies = plan.last_uses()
        self.reductions = plan.reductions

    def run(
        self,
        inputs: Mapping[str, Tensor],
        rows: int,
        given_up: frozenset[str] = frozenset(),
        into: Mapping[str, Tensor] = NEW,
    ) -> dict[str, Tensor]:
        """Execute; ``rows`` is the token count. The result has each buffer that an output names. Nothing is written
        over inputs, ``given_up`` or not."""
        memory: dict[str, Tensor] = dict(inputs)
        with torch.no_grad():
            for i, (step, body) in enumerate(zip(self.plan.steps, self.bodies, strict=True)):
                params = [self._load(memory, name) for name in step.loads]
                if step.program.gemm is not None:
                    acc = contract(step.program.gemm.form, memory[step.a], [memory[w] for w in step.b])
                    params.insert(0, acc)
                memory.update(zip(step.stores, body(params, rows), strict=True))
                own_memory(memory, step)
                for name in self.dies[i]:
                    del memory[name]
        memory.update({name: given.copy_(memory[name]) for name, given in into.items()})
        return {v.buffer: memory[v.buffer] for _, v in self.plan.outputs}

    def _load(self, memory: Mapping[str, Tensor], name: str) -> Tensor:
        return fold(self.reductions[name], memory[name]) if name in self.reductions else memory[name]


def own_memory(memory: dict[str, Tensor], step: Step) -> None:
    """What a step stored becomes contiguous, in memory that nothing else shares."""
    taken = {memory[n].untyped_storage().data_ptr() for n in (step.a, *step.b, *step.loads) if n}
    for name in step.stores:
        t = memory[name].contiguous()
        storage = t.untyped_storage()
        if storage.nbytes() != t.numel() * t.element_size() or (storage.data_ptr() in taken and storage.nbytes()):
            t = t.clone(memory_format=torch.contiguous_format)
        taken.add(t.untyped_storage().data_ptr())
        memory[name] = t
