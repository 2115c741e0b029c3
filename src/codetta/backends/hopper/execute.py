"""A Plan as a callable on SM90: each step one launch, in order, on the current stream."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from codetta.backends.base import NEW
from codetta.backends.hopper.rounding import once
from codetta.backends.hopper.rows import RowKernel, Spec, compile_rows
from codetta.backends.hopper.steps import Frame, Prepared, Stored, Tensors, kernels_of, prepare
from codetta.backends.hopper.stream import device_of, on_device, stream_of
from codetta.backends.reference.execute import Executable as Reference
from codetta.ir.program import param_name
from codetta.partition.lifetime import overwritten
from codetta.partition.plan import Plan, Step
from codetta.partition.size import dim

ALIGNMENT = 15  # an address with any of these bits is none that TMA can read
PREPARED = 64  # numbers of tokens for which a plan stays prepared

Strided = tuple[tuple[int, int], ...]  # places of inputs whose rows are apart in memory, with the elements between


@dataclass(frozen=True, slots=True)
class Schedule:
    """A plan's steps for a number of tokens, each with the places of what nobody needs after it; the length of the list
    that they work on; the inputs that must begin at 16 bytes, as TMA asks; those whose rows are apart in memory;
    whether a step is a GEMM of the library."""

    steps: list[tuple[Prepared, list[int]]]
    size: int
    read_by_tma: list[int]
    strided: frozenset[int]
    uses_library: bool


class Executable:
    """A plan ready to run: ``run(inputs)`` gives the buffers of its outputs by name."""

    def __init__(self, plan: Plan, *, batch_invariant: bool = False) -> None:
        self.plan, self.batch_invariant = plan, batch_invariant
        self.dies = plan.last_uses()
        self.reductions = plan.reductions
        names = dict.fromkeys([*plan.inputs, *(b for s in plan.steps for b in s.stores)])
        self.places = {name: i for i, name in enumerate(names)}
        self.outputs = {v.buffer: self.places[v.buffer] for _, v in plan.outputs}
        by_gemms = {name for s in plan.steps if s.program.gemm is not None for name in (s.a, *s.b, *s.loads)}
        self.by_rows = {i for i, name in enumerate(plan.inputs) if name not in by_gemms}
        self._maps: dict[str, RowKernel] = {}
        self._schedules: dict[tuple[int, torch.device, Collection[str], Strided], Schedule] = {}

    def run(
        self,
        inputs: Mapping[str, Tensor],
        rows: int,
        given_up: frozenset[str] = frozenset(),
        into: Mapping[str, Tensor] = NEW,
    ) -> dict[str, Tensor]:
        """Execute; ``rows`` is the token count. The result has each buffer that an output names, in the memory that
        ``into`` gives for it. Inputs that are ``given_up`` may hold anything afterwards."""
        if rows == 0:  # nothing to launch: shapes and zeros only
            return Reference(self.plan).run(inputs, 0, into=into)
        tensors: Tensors = [inputs[name] for name in self.plan.inputs]
        device, loose = device_of(tensors), [i for i, t in enumerate(tensors) if not t.is_contiguous()]
        strided = self._strided(tensors, loose) if loose and not given_up else ()
        schedule = self._schedules.get((rows, device, given_up, strided))
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            self._run(schedule or self._schedule(rows, device, given_up, strided), tensors, loose, device, into)
        else:
            with on_device(device):
                self._run(schedule or self._schedule(rows, device, given_up, strided), tensors, loose, device, into)
        return {name: tensors[place] for name, place in self.outputs.items()}

    def _run(
        self, schedule: Schedule, tensors: Tensors, loose: list[int], device: torch.device, into: Mapping[str, Tensor]
    ) -> None:
        stream = stream_of(device)
        make_ready(tensors, [i for i in loose if i not in schedule.strided], schedule.read_by_tma)
        tensors += [None] * (schedule.size - len(tensors))
        for name, t in into.items():
            tensors[self.places[name]] = t
        with once() if schedule.uses_library else nullcontext():
            for step, dying in schedule.steps:
                step(tensors, stream)
                for place in dying:
                    tensors[place] = None

    def _strided(self, tensors: Tensors, loose: list[int]) -> Strided:
        """The ``loose`` inputs that are columns of something wider, where only generated maps read them, which take
        rows at any stride."""
        found = [(i, tensors[i]) for i in loose if i in self.by_rows]
        return tuple((i, t.stride(0)) for i, t in found if t.dim() == 2 and t.stride(1) == 1)

    def _schedule(self, rows: int, device: torch.device, given_up: frozenset[str], strided: Strided) -> Schedule:
        """Prepare all steps."""
        if len(self._schedules) >= PREPARED:
            self._schedules.clear()
        types = self.plan.buffers
        shapes = {
            name: tuple(dim(d, rows) for d in (types[name].rows, types[name].cols) if d is not None)
            for name in self.plan.inputs
        }
        names = self.plan.inputs
        cuts = {names[i]: Spec(shapes[names[i]], (stride, 1)) for i, stride in strided}
        frame = Frame(rows, device, self.places, shapes, {}, len(self.places), cuts)
        stored = [kernels_of(s, rows, self.batch_invariant, self._map) for s in self.plan.steps]
        steps = []
        for one, over, dying in zip(stored, overwritten(self.plan, given_up), self.dies, strict=True):
            frame.over = over
            steps.append((prepare(one, frame), frame.at(dying)))
        read = {name for one in stored if one.job for name in (one.step.a, *one.step.b, *one.step.loads)}
        aligned = [i for i, name in enumerate(self.plan.inputs) if name in read]
        as_they_are = frozenset(i for i, _ in strided)
        found = Schedule(steps, frame.size, aligned, as_they_are, any(_is_library(s) for s in stored))
        self._schedules[rows, device, given_up, strided] = found
        return found

    def _map(self, step: Step) -> RowKernel:
        """The generated kernel of a step, which is the same for every number of tokens."""
        name = step.program.name
        if name not in self._maps:
            params = step.program.params[1:] if step.program.gemm is not None else step.program.params
            loads = zip(params, step.loads, strict=True)
            partial = {param_name(p): self.reductions[b] for p, b in loads if b in self.reductions}
            self._maps[name] = compile_rows(step.program, partial)
        return self._maps[name]


def _is_library(stored: Stored) -> bool:
    return stored.job is None and stored.step.program.gemm is not None


def make_ready(tensors: Tensors, loose: list[int], read_by_tma: list[int]) -> None:
    """Inputs as kernels take them: themselves, or copies where they are ``loose`` in memory, or begin where TMA cannot
    read (a view into odd memory)."""
    bits = 0
    for i in loose:
        tensors[i] = tensors[i].contiguous()
    for i in read_by_tma:
        bits |= tensors[i].data_ptr()
    if bits & ALIGNMENT:
        for i in read_by_tma:
            if tensors[i].data_ptr() & ALIGNMENT:
                tensors[i] = tensors[i].clone()
