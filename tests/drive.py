"""Plans of ours run on plain tensors, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from codetta.backends.reference.execute import Executable
from codetta.ir.graph import Graph
from codetta.partition.plan import Plan
from codetta.partition.training import TrainingPlan


def run(plan: Plan, feed: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    """The outputs of a plan by name, views taken."""
    buffers = Executable(plan).run({n: feed[n] for n in plan.inputs}, rows)
    views = {name: (buffers[v.buffer], v.rows) for name, v in plan.outputs}
    return {name: t[slice(*r)] if r else t for name, (t, r) in views.items()}


def train(
    plan: TrainingPlan, feed: Mapping[str, Tensor], cotangents: Mapping[str, Tensor], rows: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Forward's outputs and saved values; backward's gradients. Cotangents are named after their outputs."""
    out = run(plan.forward, feed, rows)
    memory = dict(feed)
    memory.update((f"d_{name}", g) for name, g in cotangents.items())
    memory.update((name, out[output]) for name, output in plan.saved)
    return out, run(plan.backward, memory, rows)


def names(graph: Graph) -> list[str]:
    """The names of a graph's inputs."""
    return [str(n.attrs[0]) for n in graph.inputs]


def float_inputs(graph: Graph) -> list[str]:
    """The names of the inputs that can have a gradient."""
    return [str(n.attrs[0]) for n in graph.inputs if n.type.dtype.is_float]


def kinds(plan: Plan, *which: str) -> Sequence[int]:
    """How many steps of each kind."""
    return tuple(plan.count(k) for k in which)
