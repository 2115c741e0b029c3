"""Plans run on plain tensors, by name, and held against the mirror."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

import mirror
from codetta.backends.base import Backend
from codetta.backends.reference.evaluate import TORCH
from codetta.backends.reference.execute import Executable
from codetta.core.types import DTYPES
from codetta.ir.graph import Graph
from codetta.partition.plan import Plan
from codetta.partition.training import TrainingPlan


def run(plan: Plan, feed: Mapping[str, Tensor], rows: int, backend: Backend = Executable) -> dict[str, Tensor]:
    """The outputs of a plan by name, views taken."""
    buffers = backend(plan).run({n: feed[n] for n in plan.inputs}, rows)
    views = {name: (buffers[v.buffer], v.rows) for name, v in plan.outputs}
    return {name: t[slice(*r)] if r else t for name, (t, r) in views.items()}


def train(
    plan: TrainingPlan,
    feed: Mapping[str, Tensor],
    cotangents: Mapping[str, Tensor],
    rows: int,
    backend: Backend = Executable,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Forward's outputs, and the gradients by the inputs' names; cotangents are named after their outputs."""
    out = run(plan.forward, feed, rows, backend)
    memory = {**feed, **{f"d_{n}": g for n, g in cotangents.items()}, **{name: out[o] for name, o in plan.saved}}
    found = run(plan.backward, memory, rows, backend)
    return out, {n.removeprefix("d_"): g for n, g in found.items()}


def typed(graph: Graph, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inputs or outputs of a graph in the dtypes that the graph gives them, detached."""
    types = {**{mirror.name(n): n.type for n in graph.inputs}, **{key: n.type for key, n in graph.outputs}}
    return {n: v.detach().to(TORCH[DTYPES[types[n].dtype.name]]) for n, v in values.items()}


def float_inputs(graph: Graph) -> list[str]:
    """The names of the inputs that can have a gradient."""
    return [mirror.name(n) for n in graph.inputs if n.type.dtype.is_float]


def expect_training(
    graph: Graph, plan: TrainingPlan, wrt: Collection[str], rows: int, tolerance: float, seed: int = 0
) -> None:
    """Forward and backward of the plan equal plain PyTorch in float64, in value, shape and dtype; inputs are left as
    they were, and no gradient is computed that nobody asked for."""
    feed = mirror.random_feed(graph, rows, seed)
    want = mirror.outputs(graph, feed, rows)
    given = typed(graph, mirror.random_cotangents(want))
    gradients = mirror.gradients(want, feed, given, wrt)
    inputs = typed(graph, feed)
    before = {n: t.clone() for n, t in (inputs | {f"d {k}": g for k, g in given.items()}).items()}
    out, got = train(plan, inputs, given, rows)
    for key, n in graph.outputs:
        assert out[key].dtype == TORCH[n.type.dtype], key
        close(out[key], want[key], tolerance, key)
    assert got.keys() <= set(wrt)
    for n in wrt:
        expect_gradient(got.get(n), gradients[n], inputs[n], tolerance, n)
    for n, t in before.items():
        now = given[n.removeprefix("d ")] if n.startswith("d ") else inputs[n]
        assert torch.equal(t, now), f"{n} was modified"


def expect_gradient(got: Tensor | None, want: Tensor | None, like: Tensor, tolerance: float, name: str) -> None:
    """The gradient has its input's shape and dtype and autograd's value; none means that nothing depends on it, or
    that the gradient is zero everywhere."""
    if got is None or want is None:
        for g in (got, want):
            assert g is None or not g.any(), f"only one side has a gradient of {name}"
        return
    assert got.dtype == like.dtype, name
    close(got, want, 10 * tolerance, f"the gradient of {name}")


def close(got: Tensor, want: Tensor, tolerance: float, name: str) -> None:
    """The same shape, and a difference small against the whole."""
    want = want.detach()
    assert got.shape == want.shape, f"{name} has shape {tuple(got.shape)}, not {tuple(want.shape)}"
    off = (got.double() - want).norm().item()
    assert off <= tolerance * max(1.0, want.norm().item()), f"{name} is off by {off:.3g} of {want.norm().item():.3g}"
