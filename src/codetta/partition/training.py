"""A training step of one segment: the forward plan, the backward plan, and what passes between them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from codetta import settings
from codetta.autodiff.reverse import gradients
from codetta.core.node import Node, substitute
from codetta.errors import SettingsError
from codetta.ir.build import input_
from codetta.ir.graph import Graph
from codetta.ir.verify import verify_graph
from codetta.partition.build import make_plan
from codetta.partition.cut import MEMORY, Kept, Memory, cut, recomputable
from codetta.partition.plan import Plan
from codetta.partition.verify import verify_passage
from codetta.rules.pipeline import reparameterise, simplify, without_motion


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Backward's inputs are forward's inputs, kept values, and the cotangents ``d_<output>``; its outputs are
    ``d_<input>``. The reparameterised graph serves for backward plans of fewer cotangents."""

    forward: Plan
    backward: Plan
    graph: Graph
    kept: tuple[Kept, ...]
    wrt: tuple[str, ...]

    @property
    def saved(self) -> tuple[tuple[str, str], ...]:
        """For each value that is kept, its name among backward's inputs and among forward's outputs."""
        return tuple(dict.fromkeys((k.name, k.output) for k in self.kept))


def cotangent_name(output: str) -> str:
    """The name of the gradient that belongs to a value."""
    return f"d_{output}"


def derive(
    graph: Graph, wrt: Collection[str], given: Collection[str] | None = None
) -> tuple[dict[str, Node], list[Node]]:
    """The simplified gradients of a reparameterised graph by the named inputs, for the given outputs' cotangents."""
    chosen = {
        name: input_(cotangent_name(name), n.type)
        for name, n in graph.outputs
        if n.type.dtype.is_float and (given is None or name in given)
    }
    sources = [n for n in graph.inputs if str(n.attrs[0]) in wrt]
    kept = {n: input_(f"kept {name}", n.type) for name, n in graph.outputs}
    found = {n: g for n, g in gradients(graph, chosen, sources, kept).items() if g is not None}
    simple = substitute(simplify(list(found.values()), set(graph.nodes)), {k: n for n, k in kept.items()})
    return {cotangent_name(str(n.attrs[0])): g for n, g in zip(found, simple, strict=True)}, list(chosen.values())


def plan_training(
    graph: Graph, wrt: Collection[str], memory: Memory = "balanced", as_written: bool = False
) -> TrainingPlan:
    """Plan forward and backward of a captured graph for gradients of the named inputs. A graph that is ``as_written``
    is not reparameterised."""
    if memory not in MEMORY:
        raise SettingsError(f"memory={memory!r}", hint=f"one of {', '.join(MEMORY)}")
    forward = graph if as_written else reparameterise(graph)
    grads, cotangents = derive(forward, wrt)
    joint = cut(forward, grads, cotangents)
    backward = make_plan(joint.backward)
    again: list[Node] = []
    candidates = recomputable(forward, grads.values(), memory)
    groups = [candidates] if candidates else []  # in a model all layers are alike: one trial, not one each
    while groups:
        group = groups.pop()
        trial = cut(forward, grads, cotangents, [*again, *group])
        plan = make_plan(trial.backward)
        # made again only where an epilogue has its operands at hand, and nothing new has to be saved for it
        if plan.count("leftover") == backward.count("leftover") and len(trial.kept) + len(group) <= len(joint.kept):
            again += group
            joint, backward = trial, plan
        elif len(group) > 1:
            middle = len(group) // 2
            groups += [group[middle:], group[:middle]]
    training = TrainingPlan(make_plan(joint.forward), backward, forward, joint.kept, tuple(wrt))
    if settings.verify_ir():
        verify_graph(joint.forward)
        verify_graph(joint.backward)
        given = {cotangent_name(name): n.type for name, n in forward.outputs}
        verify_passage(training.forward, backward, training.saved, given)
    return training


def plan_for_given(training: TrainingPlan, given: Collection[str]) -> Plan:
    """The backward plan when only these outputs have a cotangent, from what is held for all of them; PlanError where
    that does not suffice."""
    grads, cotangents = derive(training.graph, training.wrt, given)
    held = training.backward.inputs
    return make_plan(cut(training.graph, grads, cotangents, only=training.kept, inputs_held=held).backward)


def plan_inference(graph: Graph) -> Plan:
    """The plan of a captured graph from which no gradient is asked."""
    return make_plan(reparameterise(graph))


def plan_boundary_fusion(graph: Graph, wrt: Collection[str], given: Collection[str]) -> tuple[Plan, Plan]:
    """Forward and backward as ideal per-boundary fusion would run them, to compare with: no map moves across a GEMM,
    every GEMM is bare, each chain between two GEMMs is one pass."""
    still = without_motion(graph)
    if not wrt:
        return make_plan(still, epilogues=False), make_plan(Graph((), ()))
    grads, cotangents = derive(still, wrt, given)
    joint = cut(still, grads, cotangents)
    return make_plan(joint.forward, epilogues=False), make_plan(joint.backward, epilogues=False)
