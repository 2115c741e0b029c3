"""How long buffers live: what a step may be written over, and the most bytes that are in use at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from codetta.core.node import Node, postorder
from codetta.core.types import Kind
from codetta.ir import ops
from codetta.ir.program import Program
from codetta.ir.split import Split
from codetta.partition.plan import Plan, Step
from codetta.partition.size import bytes_of, partial_bytes
from codetta.partition.training import TrainingPlan


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes above a segment's inputs and incoming gradients: the most at once, and what lies between forward and
    backward (outputs and saved values)."""

    bytes: int
    between: int


def private(training: TrainingPlan) -> frozenset[str]:
    """The inputs of backward that nobody but backward can see: values that forward returns for it alone. Where autograd
    gives the graph up, their memory is backward's to write to."""
    public = {name for name, _ in training.graph.outputs}
    results = [output for _, output in training.saved]
    return frozenset(name for name, o in training.saved if o not in public and results.count(o) == 1)


def overwritten(plan: Plan, given_up: Collection[str] = ()) -> list[dict[str, str]]:
    """For each step, its stores that can be written over a buffer it reads, which then is in use no more: one of the
    plan's own, or one of the inputs ``given_up``, where nothing that the plan returns may lie."""
    returned = {v.buffer for _, v in plan.outputs}
    found: list[dict[str, str]] = []
    for step, dying in zip(plan.steps, plan.last_uses(), strict=True):
        over: dict[str, str] = {}
        for store, load in _matches(step):
            is_ours = load not in plan.inputs or (load in given_up and store not in returned)
            free = load in dying and store not in over and load not in over.values()
            if is_ours and free and plan.buffers[store] == plan.buffers[load]:
                over[store] = load
        found.append(over)
    return found


def _matches(step: Step) -> Iterator[tuple[str, str]]:
    """The stores and loads of an epilogue that touch the same elements for the same accumulators."""
    program = step.program
    if program.gemm is None:
        return
    for store, (_, n) in zip(step.stores, program.outputs, strict=True):
        for load, p in zip(step.loads, program.params[1:], strict=True):
            if load not in (step.a, *step.b) and n.type.kind is Kind.TILE and _same_elements(program, n, p):
                yield store, load


def _same_elements(program: Program, stored: Node, p: Node) -> bool:
    """Whether each element of the parameter is read where the same element is stored, and only there: both whole, or
    both in the same ranges of columns (gate and up). Then what a tile overwrites no other tile still reads."""
    if p.type.kind is not Kind.TILE:
        return False
    joins = [n for n in postorder([stored]) if n.op is ops.JOIN]
    lanes = joins[0].attrs[0] if joins else None
    if len(joins) > 1 or (isinstance(lanes, Split) and not _one_lane_each(lanes, program.params[0], p)):
        return False
    roots = [n for _, n in program.outputs]
    below = {p}
    for n in postorder(roots):
        if below.isdisjoint(n.args):
            continue
        below.add(n)
        if n.op is ops.PART and n.args[0] is p and n.attrs[0] == lanes:
            continue
        if n in joins:
            continue
        if n.op in (ops.PART, ops.JOIN) or n.type.kind is Kind.GROUPVEC or (lanes is not None and p in n.args):
            return False
    return True


def _one_lane_each(lanes: Split, acc: Node, whole: Node) -> bool:
    """Whether the lanes are ranges of columns as wide as the accumulator: one element of each belongs to one of it."""
    ranges = lanes.groups == 1 and lanes.sizes is None and not lanes.adjacent
    return ranges and lanes.part_cols(whole.type.cols or 0, 0) == acc.type.cols


def peak(training: TrainingPlan, rows: int, given_up: bool = True) -> Peak:
    """The most bytes of a training step; with ``given_up``, where no second backward is to come."""
    forward, before = _most(training.forward, rows, 0, ())
    backward, _ = _most(training.backward, rows, before, private(training) if given_up else ())
    return Peak(max(forward, backward), before)


def peak_of(plan: Plan, rows: int) -> int:
    """The most bytes of one plan above its inputs."""
    return _most(plan, rows, 0, ())[0]


def _most(plan: Plan, rows: int, held: int, given_up: Collection[str]) -> tuple[int, int]:
    """The most bytes at once and those at the end. Saved values (``held``) stay until backward returns."""
    reductions = plan.reductions
    live: dict[str, int] = {}
    most = held
    for step, dying, over in zip(plan.steps, plan.last_uses(), overwritten(plan, given_up), strict=True):
        for b in step.stores:
            n = reductions.get(b)
            size = bytes_of(plan.buffers[b], rows) if n is None else partial_bytes(n.args[0].type, n.type, rows)
            live[b] = live.pop(over[b], 0) if b in over else size
        most = max(most, held + sum(live.values()))
        for b in dying:
            live.pop(b, None)
    return most, held + sum(live.values())
