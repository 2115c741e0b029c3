"""The driver: a captured graph and what is asked of it, to a segment that can run. One line a stage."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

from codetta.backends import get_backend
from codetta.backends.base import Runnable
from codetta.core.node import postorder
from codetta.core.types import ROWS, Type
from codetta.errors import PlanError
from codetta.ir import ops
from codetta.ir.graph import Graph
from codetta.partition.cut import Memory
from codetta.partition.lifetime import private
from codetta.partition.plan import Plan, plan_text
from codetta.partition.training import (
    TrainingPlan,
    cotangent_name,
    plan_for_given,
    plan_inference,
    plan_training,
)


@dataclass(frozen=True)
class Options:
    """How segments are compiled: where they run, what forward keeps for backward, whether a copy of parameters that
    were to be packed is told, and whether a row's result must not depend on how many rows there are."""

    backend: str = "reference"
    memory: Memory = "balanced"
    packed: bool = False
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True)
class BackwardCall:
    """Backward for the cotangents of some outputs: its plan, ready to run; of each of the plan's inputs the place among
    what is passed (``Segment.kept``, then the cotangents); those whose memory may be written to; and the buffers that
    it returns: gradients that are rows of one stacked gradient come as that one."""

    plan: Plan
    run: Runnable
    feed: tuple[tuple[str, int], ...]
    given_up: frozenset[str]
    buffers: tuple[str, ...]


class Segment:
    """A graph compiled for gradients of the inputs that ask for one; plans are made when first needed."""

    def __init__(self, graph: Graph, wrt: Collection[str], options: Options) -> None:
        self.graph = graph
        self.wrt = tuple(str(n.attrs[0]) for n in graph.inputs if str(n.attrs[0]) in wrt)
        self.options = options
        self._plans: dict[tuple[str, ...], Plan] = {}
        self._backward: dict[tuple[str, ...], tuple[Plan, Runnable]] = {}
        self._reached: dict[tuple[str, ...], set[str]] = {}
        self._calls: dict[tuple[bool, ...], BackwardCall] = {}
        self.names = tuple(str(n.attrs[0]) for n in graph.inputs)

    @cached_property
    def training(self) -> TrainingPlan:
        """The joint plan for the cotangents of all outputs."""
        return plan_training(self.graph, self.wrt, self.options.memory)

    @cached_property
    def forward(self) -> Plan:
        """The forward plan: it writes what backward needs only if a gradient is asked for."""
        return self.training.forward if self.wrt else plan_inference(self.graph)

    @cached_property
    def run_forward(self) -> Runnable:
        """The forward plan on its backend."""
        return self._runnable(self.forward)

    def _runnable(self, plan: Plan) -> Runnable:
        return get_backend(self.options.backend)(plan, batch_invariant=self.options.batch_invariant)

    @cached_property
    def results(self) -> list[str]:
        """The names of what forward returns: the graph's outputs, then the saved values that are none of them."""
        names = [name for name, _ in self.graph.outputs]
        return [*names, *(name for name, _ in self.forward.outputs if name not in names)]

    @cached_property
    def result_buffers(self) -> list[tuple[str, bool]]:
        """The buffer of each result, and whether no result before it has the same."""
        views = dict(self.forward.outputs)
        buffers = [views[name].buffer for name in self.results]
        return [(b, b not in buffers[:i]) for i, b in enumerate(buffers)]

    def backward(self, given: tuple[str, ...]) -> tuple[Plan, Runnable]:
        """The backward plan for cotangents of the outputs ``given`` alone; ``usable`` says which can be asked for."""
        if given not in self._backward:
            plan = self.backward_plan(given)
            self._backward[given] = plan, self._runnable(plan)
        return self._backward[given]

    def backward_call(self, given: tuple[bool, ...]) -> BackwardCall:
        """Backward for the cotangents of the outputs that are ``given``."""
        if given not in self._calls:
            names = tuple(name for (name, _), g in zip(self.graph.outputs, given, strict=True) if g)
            plan, run = self.backward(names)
            inputs, results = self.kept
            kept = {self.results[i]: place for place, i in enumerate(results, len(inputs))}
            places = {self.names[i]: place for place, i in enumerate(inputs)}
            places.update((name, kept[output]) for name, output in self.training.saved if output in kept)
            places.update((cotangent_name(n), place) for place, n in enumerate(names, len(inputs) + len(results)))
            feed = tuple((name, places[name]) for name in plan.inputs)
            buffers = tuple(dict.fromkeys(view.buffer for _, view in plan.outputs))
            given_up = private(self.training) & set(plan.inputs)
            self._calls[given] = BackwardCall(plan, run, feed, given_up, buffers)
        return self._calls[given]

    def backward_plan(self, given: tuple[str, ...]) -> Plan:
        """The backward plan alone; PlanError where what forward keeps does not suffice."""
        if given not in self._plans:
            whole = given == self.floats
            self._plans[given] = self.training.backward if whole else plan_for_given(self.training, given)
        return self._plans[given]

    @cached_property
    def floats(self) -> tuple[str, ...]:
        """The outputs that can have a cotangent."""
        return tuple(name for name, n in self.graph.outputs if n.type.dtype.is_float)

    def usable(self, given: tuple[str, ...]) -> tuple[str, ...]:
        """``given`` itself if what forward keeps suffices for it; else all outputs, the others' cotangents zero."""
        try:
            self.backward_plan(given)
        except PlanError:
            return self.floats
        return given

    @cached_property
    def stacks(self) -> tuple[tuple[int, ...], ...]:
        """The inputs, by position, that its plans read as one tensor; forward's order where the two differ."""
        position = {str(n.attrs[0]): i for i, n in enumerate(self.graph.inputs)}
        plans = [self.forward, *([self.training.backward] if self.wrt else [])]
        found = dict.fromkeys(names for plan in plans for names in plan.stacks)
        return tuple(tuple(position[name] for name in names) for names in found if set(names) <= position.keys())

    @cached_property
    def kept(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What autograd holds between forward and backward: positions among the inputs, and among the results."""
        needed, saved = set(self.training.backward.inputs), dict(self.training.saved)
        held = {saved[name] for name in needed if name in saved}
        inputs = tuple(i for i, n in enumerate(self.graph.inputs) if str(n.attrs[0]) in needed)
        return inputs, tuple(i for i, name in enumerate(self.results) if name in held)

    def reached(self, given: tuple[str, ...]) -> set[str]:
        """The inputs on which these outputs depend: another input's gradient is None, not zero, as in PyTorch."""
        if given not in self._reached:
            roots = [n for name, n in self.graph.outputs if name in given]
            nodes = postorder(roots, lambda n: not n.type.dtype.is_float)  # no gradient passes a comparison
            self._reached[given] = {str(n.attrs[0]) for n in nodes if n.op is ops.INPUT}
        return self._reached[given]

    @cached_property
    def constant(self) -> tuple[int, ...]:
        """The positions of results that no gradient reaches, as they depend on no input that wants one."""
        names = [name for name, _ in self.graph.outputs]
        live = [name in self.floats and not self.reached((name,)).isdisjoint(self.wrt) for name in names]
        return tuple(i for i, name in enumerate(self.results) if i >= len(names) or not live[i])

    @cached_property
    def row_input(self) -> int:
        """The position of an input whose first dimension is the token count."""
        types = {str(n.attrs[0]): n.type for n in self.graph.inputs}
        found = rows_from(types, types)
        if found is None:
            raise PlanError(f"none of the inputs has token rows: {', '.join(types)}")
        return found

    @cached_property
    def key(self) -> str:
        """A content hash: the same segment has the same key in every process, another one another."""
        text = plan_text(plan_inference(self.graph)) + repr((self.wrt, self.options, self.forward.digest))
        return sha256(text.encode()).hexdigest()[:32]

    def type_of(self, result: str) -> Type:
        """The type of one of ``results``."""
        view = dict(self.forward.outputs)[result]
        return self.forward.buffers[view.buffer]


def rows_from(names: Iterable[str], types: Mapping[str, Type]) -> int | None:
    """The position of the first value whose leading dimension is the token count; None where none has it."""
    return next((i for i, name in enumerate(names) if types[name].rows == ROWS), None)
