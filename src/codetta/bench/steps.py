"""The steps of compiled plans, each ready to run alone on the tensors that it has in a training step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from codetta.backends import get_backend
from codetta.capture.backend import CapturedGraph, captured
from codetta.capture.normalise import placeholder_name
from codetta.capture.segment import Segment as Cut
from codetta.core.node import Node
from codetta.core.types import ROWS, Kind, f32, tile
from codetta.errors import UnsupportedError
from codetta.ir import ops
from codetta.partition.plan import Plan, Step, View
from codetta.partition.training import cotangent_name
from codetta.runtime.compile import Segment as Compiled

Memory = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Alone(Plan):
    """One step as a plan of its own, which knows what reductions the parts that it reads come from."""

    folds: dict[str, Node] = field(default_factory=dict, hash=False)

    @property
    def reductions(self) -> dict[str, Node]:
        """Those of the whole plan."""
        return self.folds


@dataclass(frozen=True)
class Case:
    """A step: its name, the tensors that it reads and wrote by buffer, and what each of its operands is to the step
    (``roles``, by names that baselines know)."""

    name: str
    step: Step
    plan: Alone
    memory: Memory
    rows: int
    backend: str
    role: str = ""
    roles: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reads(self) -> Memory:
        """The tensors that the step reads."""
        return {name: self.memory[name] for name in self.plan.inputs}

    @property
    def bytes(self) -> int:
        """The size of everything that the step reads and writes."""
        return sum(t.numel() * t.element_size() for t in self.memory.values())

    def runner(self) -> Callable[[], Memory]:
        """What is timed: the step through its backend, outputs allocated, nothing else."""
        runnable, reads, rows = get_backend(self.backend)(self.plan), self.reads, self.rows
        return lambda: runnable.run(reads, rows)


def case_of(plan: Plan, step: Step, memory: Memory, rows: int, backend: str, name: str) -> Case:
    """One step of a plan that was run with all its buffers."""
    inputs = tuple(dict.fromkeys(b for b in (step.a, *step.b, *step.loads) if b))
    outputs = tuple((b, View(b)) for b in step.stores)
    folds = plan.reductions
    memory = {**memory, **{b: _filled(memory[b], folds[b]) for b in inputs if b in folds}}
    # what a reduction's parts look like is the backend's own business: their type here is what they are
    parts = {b: tile(memory[b].shape[1], f32, rows=memory[b].shape[0]) for b in plan.partials.intersection(inputs)}
    alone = Alone(inputs, outputs, (step,), {**plan.buffers, **parts}, plan.partials, folds)
    own = {b: memory[b] for b in (*inputs, *step.stores) if b in memory}
    return Case(name, step, alone, own, rows, backend)


def _filled(parts: Tensor, reduction: Node) -> Tensor:
    """Parts with the memory between their rows, which a plan's own steps jump over, filled with what changes nothing:
    a step that runs alone takes no input with gaps."""
    if parts.dim() != 2 or parts.is_contiguous():
        return parts
    least = reduction.op is ops.LSE or reduction.attrs[0] == "max"
    whole = parts.new_full((parts.shape[0], parts.stride(0)), -math.inf if least else 0.0)
    whole[:, : parts.shape[1]] = parts
    return whole


def enlarged(case: Case, wanted: int) -> Case:
    """A finalize on its rows again and again, until it moves about as many bytes as wanted: one layer's are so few that
    their time is that of a launch."""
    times = max(1, wanted // case.bytes)
    program, types = case.step.program, case.plan.buffers
    grows = {b for b in case.plan.inputs if types[b].rows == ROWS or b in case.plan.partials}
    memory = {b: t.repeat(times, *[1] * (t.dim() - 1)) if b in grows else t for b, t in case.reads.items()}
    outputs = dict(zip(case.step.stores, (n.type for _, n in program.outputs), strict=True))
    for b, t in outputs.items():
        shape = (case.memory[b].shape[0] * times, *case.memory[b].shape[1:]) if t.rows == ROWS else case.memory[b].shape
        memory[b] = case.memory[b].new_empty(shape)
    parts = {b: tile(memory[b].shape[1], f32, rows=memory[b].shape[0]) for b in case.plan.partials & memory.keys()}
    plan = replace(case.plan, buffers={**types, **parts})
    return replace(case, name=f"{case.name}, large", plan=plan, memory=memory, rows=case.rows * times)


# --- a module's plans, run once -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Module:
    """A compiled module: its one segment, what each of its inputs is called in the module, and those inputs."""

    cut: Cut
    compiled: Compiled
    key: str
    given: tuple[str, ...]
    origin: dict[str, str]
    feed: Memory


def compile_module(module: nn.Module, batch: Mapping[str, Tensor], memory: str) -> Module:
    """Capture a module whose whole graph is one segment; its weights are packed as ``torch.compile`` would."""
    torch._dynamo.reset()
    graphs = captured(module, options={"memory": memory, "logits": "always"}, **batch)
    if len(graphs) != 1 or len(graphs[0].keys) != 1:
        counts = [len(g.keys) for g in graphs]
        raise UnsupportedError(
            f"one segment was expected, there are {counts} in {len(graphs)} graphs", hint="see `codetta doctor`"
        )
    return _module(graphs[0], {**dict(module.named_parameters()), **batch})


def _module(graph: CapturedGraph, tensors: Mapping[str, Tensor]) -> Module:
    cut, compiled = next(graph.compiled())
    names = [str(n.attrs[0]) for n in compiled.graph.inputs]
    origin = {n: placeholder_name(f.border.source) for n, f in zip(names, cut.feeds, strict=True)}
    unknown = sorted(set(origin.values()) - tensors.keys())
    if unknown:
        raise UnsupportedError(f"the segment reads {', '.join(unknown)}, which is no input or parameter of the module")
    feed = {n: tensors[source] for n, source in origin.items()}
    return Module(cut, compiled, graph.keys[0], graph.given(0), origin, feed)


def run_whole(plan: Plan, backend: str, feed: Memory, rows: int) -> Memory:
    """All buffers of a plan, kept."""
    stores = [b for s in plan.steps for b in s.stores]
    every = replace(plan, outputs=tuple((b, View(b)) for b in stores))
    inputs = {n: feed[n].detach() for n in plan.inputs}
    with torch.no_grad():
        return {**inputs, **get_backend(backend)(every).run(inputs, rows)}


def cases_of(module: Module, rows: int, backend: str = "") -> Iterator[Case]:
    """Every step of forward and backward, on the tensors of one training step with random incoming gradients; on the
    backend that the module was compiled for, if no other is named."""
    compiled, backend = module.compiled, backend or module.compiled.options.backend
    forward = run_whole(compiled.forward, backend, module.feed, rows)
    for case in _of_plan(compiled.forward, forward, rows, backend):
        yield _named(module, compiled.forward, case, {})
    views = dict(compiled.forward.outputs)
    kept = {n: _taken(forward, views[output]) for n, output in compiled.training.saved}
    given = compiled.usable(module.given)
    plan = compiled.backward_plan(given)
    cotangents = {cotangent_name(n): torch.randn_like(_taken(forward, views[n])) for n in given}
    backward = run_whole(plan, backend, {**module.feed, **kept, **cotangents}, rows)
    del forward
    for case in _of_plan(plan, backward, rows, backend):
        yield _named(module, plan, case, kept)


def _taken(memory: Memory, view: View) -> Tensor:
    t = memory[view.buffer]
    return t[slice(*view.rows)] if view.rows else t


def _of_plan(plan: Plan, memory: Memory, rows: int, backend: str) -> Iterator[Case]:
    for step in plan.steps:
        yield case_of(plan, step, memory, rows, backend, step.program.name)


def _named(module: Module, plan: Plan, case: Case, kept: Memory) -> Case:
    """A case with a name that a person knows it by, and what its operands are."""
    weights, gemm = _weights(module, plan, case.step), case.step.program.gemm
    role = ROLES.get((gemm.form if gemm is not None else "", weights), "")
    if not role:
        return replace(case, name=_plain_name(case.step, weights))
    return replace(case, name=f"{'+'.join(weights)}: {role}", role=role, roles=_roles(module, case, role, kept))


# What follows the GEMM with these weights, in Llama's segment and head: "nt" forward, "nn" the data gradient.
ROLES = {
    ("nt", ("o",)): "residual, partial RMS",
    ("nt", ("gate", "up")): "SwiGLU",
    ("nt", ("down",)): "residual, partial RMS",
    ("nt", ("q", "k", "v")): "RoPE",
    ("nt", ("head",)): "log-sum-exp",
    ("nn", ("q", "k", "v")): "norm backward",
    ("nn", ("gate", "up")): "norm backward",
    ("nn", ("head",)): "norm backward",
    ("nn", ("down",)): "SwiGLU backward",
}


def _plain_name(step: Step, weights: tuple[str, ...]) -> str:
    if step.is_weight_gradient:
        return f"{'+'.join(weights)}: weight gradient"
    if step.kind == "gemm":
        return f"{'+'.join(weights)}: data gradient"
    return f"{step.kind} of {', '.join(step.stores)}"


def _weights(module: Module, plan: Plan, step: Step) -> tuple[str, ...]:
    """The modules whose weights a GEMM multiplies by, or whose gradient it is."""
    if step.is_weight_gradient:
        names = [n.removeprefix("d_") for n, view in plan.outputs if view.buffer in step.stores]
    else:
        names = list(step.b)
    return tuple(module.origin.get(n, n).removesuffix(".weight") for n in names)


def _roles(module: Module, case: Case, role: str, kept: Memory) -> dict[str, Any]:
    """A step's loads by what they are: baselines and checks know them by these names."""
    found: dict[str, Any] = {}
    if role == "RoPE":
        found["widths"] = tuple(case.memory[w].shape[0] for w in case.step.b)
    for p, name in zip(case.step.program.params[1:], case.step.loads, strict=True):
        t, kind, source = case.memory[name], p.type.kind, module.origin.get(name, "")
        if kind is Kind.TABLE or source == "target":
            found[source] = t
        elif kind is Kind.ROWVEC:
            found["gain"] = t
        elif kind is Kind.COLVEC:
            found["c" if role == "norm backward" else "rstd"] = t
        elif role == "norm backward":  # the stream that the norm read is an input or was kept; the rest is a gradient
            found["x" if name in kept or source else "incoming"] = t
        else:
            found["z" if role == "SwiGLU backward" else "residual"] = t
    return found
