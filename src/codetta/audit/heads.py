"""A captured loss head in an explanation: its programs, a loop over slabs counted as one, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from codetta.audit.parts import WAYS, Half, Part, half_of
from codetta.capture.backend import CapturedGraph
from codetta.capture.loss_head import HeadTask, LossHead, task_of
from codetta.capture.names import layer_of
from codetta.capture.normalise import is_parameter
from codetta.capture.traffic import moved
from codetta.nn.head_graphs import (
    backward_plan,
    exponentials_plan,
    from_exponentials_plan,
    statistics_graph,
    statistics_plan,
)
from codetta.nn.slabs import EXPONENTIALS, peak
from codetta.partition.cost import MACHINES
from codetta.partition.lifetime import Peak
from codetta.partition.plan import Plan
from codetta.partition.training import plan_boundary_fusion

EMPTY = Plan((), (), (), {})
HELD = {"own": "kept", "again": "computed again"}


@dataclass(frozen=True)
class HeadPart:
    """One head's place in an explanation, and its forward and backward plan."""

    part: Part
    plans: tuple[Plan, Plan]


def head_parts(graph: CapturedGraph) -> Iterator[HeadPart]:
    """Those of a captured graph, in order."""
    for head in graph.heads:
        yield _part_of(head)


def _part_of(found: LossHead) -> HeadPart:
    seen = task_of(found.call)
    columns, tokens = seen.sizes.columns, seen.sizes.tokens
    forward, backward = _plans(seen, columns)
    eager = moved(found.replaced, found.sources, tokens)
    graph = statistics_graph(seen.head, columns, seen.names, False)
    fusion = plan_boundary_fusion(graph, seen.wanted, seen.names if seen.wanted else ())
    halves = [half_of(p, tokens, e, f) for p, e, f in zip((forward, backward), eager, fusion, strict=True)]
    key = f"loss head {forward.digest[:8]} {backward.digest[:8]}"
    memory = Peak(peak(seen.sizes, seen.held), seen.sizes.logits if seen.stored and seen.wanted else 0)
    part = Part(key, _layers(found.call), tokens, halves[0], halves[1] + _sums(seen), memory, _note(seen))
    return HeadPart(part, (forward, backward))


def _plans(seen: HeadTask, columns: int) -> tuple[Plan, Plan]:
    if seen.mode == EXPONENTIALS and seen.wanted:
        return exponentials_plan(seen.head, columns), from_exponentials_plan(seen.head, columns, seen.wanted)
    forward = statistics_plan(seen.head, columns, seen.names, seen.stored)
    return forward, backward_plan(seen.head, columns, seen.names, seen.wanted, seen.stored) if seen.wanted else EMPTY


def _sums(seen: HeadTask) -> Half:
    """What the loop moves besides: the input's gradient is a sum in float32, read and written for every slab."""
    count = len(seen.held)
    if "x" not in seen.wanted or count == 1:
        return Half()
    size = 2 * count * seen.sizes.sums
    seconds = {m.name: dict.fromkeys(WAYS, 0.0) | {"programs": size / m.bandwidth} for m in MACHINES.values()}
    return Half(bytes=size, seconds=seconds)


def _note(seen: HeadTask) -> str:
    first, count = seen.held[0], len(seen.held)
    slabs_ = "one slab" if count == 1 else f"a loop over {count} slabs of {first.columns:,} columns"
    what = "exponentials of logits" if seen.mode == EXPONENTIALS else "logits"
    mode = "lean" if seen.mode == "lean" else "fast"
    return f"a linear layer with its loss, {mode}: {what} {HELD[first.how]}, backward as {slabs_}"


def _layers(call: fx.Node) -> tuple[str, ...]:
    weight = call.args[1]
    if not isinstance(weight, fx.Node) or weight.op != "placeholder" or not is_parameter(weight):
        return ()
    return tuple(filter(None, (layer_of(weight),)))
