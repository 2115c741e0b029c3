"""A plan's steps prepared for a number of tokens: what does not depend on data is known before they run.

A prepared step takes a list of tensors, reads its own places in it and writes its outputs to others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from codetta.backends.hopper import memory
from codetta.backends.hopper.choose import own_kernel
from codetta.backends.hopper.columns import NotLowered
from codetta.backends.hopper.gemm import Job, compiled, job_of, launch, operand, reduced, sink_shape, values
from codetta.backends.hopper.rows import Bound, RowKernel, Spec
from codetta.backends.reference.evaluate import TORCH
from codetta.backends.stacked import STATISTICS, stacked
from codetta.core.node import Node
from codetta.errors import PlanError
from codetta.partition.plan import Step
from codetta.partition.size import dim

Tensors = list[Any]  # a tensor, or None where there is none yet, or no more
Prepared = Callable[[Tensors, int], None]  # on the GPU's current stream, whose address it is given
log = logging.getLogger("codetta")
# cuBLAS of CUDA 13.0 leaves the last token out of some weight gradients where their number is odd (4,097 of them, for
# one): an error of 1/64, seen on an H200. A number of tokens that 8 divides is right.
WHOLE_ROWS = 8


@dataclass(slots=True)
class Frame:
    """Where a plan's buffers lie in the list of tensors, and their shapes, as far as the steps so far have made them.
    ``over`` names the buffers that a step's stores may take the memory of; ``size`` is the length of the list."""

    rows: int
    device: torch.device
    places: Mapping[str, int]
    shapes: dict[str, tuple[int, ...]]
    over: Mapping[str, str]
    size: int
    cuts: dict[str, Spec] = field(default_factory=dict)

    def specs(self, names: Sequence[str]) -> list[Spec]:
        """The shapes of buffers; all are contiguous, but those that are part of what a kernel wrote."""
        return [self.cuts.get(name) or Spec.fresh(self.shapes[name]) for name in names]

    def bind(self, step: Step, kernel: RowKernel, first: Sequence[tuple[Spec, int]] = ()) -> list[Bound]:
        """A generated kernel on a step's buffers, behind the parameters that are given."""
        specs = [*(spec for spec, _ in first), *self.specs(step.loads)]
        loads = [*(place for _, place in first), *self.at(step.loads)]
        bounds, self.size = kernel.bind(specs, self.rows, self.device, loads, self.at(step.stores), self.size)
        shapes = {place: shape for bound in bounds for place, shape, _, _ in bound.outputs}
        self.shapes.update((name, shapes[self.places[name]]) for name in step.stores)
        return bounds

    def at(self, names: Sequence[str]) -> list[int]:
        """The places of buffers."""
        return [self.places[name] for name in names]


@dataclass(frozen=True, slots=True)
class Stored:
    """A step with what it runs on: our kernel for its GEMM (``job``), or the library's, and a generated map behind it
    or alone (``rows``)."""

    step: Step
    job: Job | None
    rows: RowKernel | None


def kernels_of(step: Step, rows: int, batch_invariant: bool, maps: Callable[[Step], RowKernel]) -> Stored:
    """What a step runs on: its kernel, the library's GEMM, such a GEMM with a generated map behind it, or a map. The
    library picks its algorithm by the number of rows, and ours are chosen by it; ``batch_invariant`` forbids both."""
    program = step.program
    if program.gemm is None:
        return Stored(step, None, maps(step))
    if not own_kernel(program, rows, batch_invariant):
        return Stored(step, None, None)
    try:
        return Stored(step, job_of(program, None if batch_invariant else rows), None)
    except NotLowered as reason:
        if program.is_trivial and len(program.outputs) == 1 and not batch_invariant:
            return Stored(step, None, None)
        log.info("%s: a GEMM and a map behind it, as it does not fit one kernel: %s", program.name, reason)
        if batch_invariant and not step.is_weight_gradient:
            log.warning("%s is not batch invariant: the library picks its GEMM by the number of rows", program.name)
        return Stored(step, None, maps(step))


def prepare(stored: Stored, frame: Frame) -> Prepared:
    """The step for a frame, where it notes the shapes of what it stores."""
    if stored.job is not None:
        return _fused(stored.step, stored.job, frame)
    if stored.step.program.gemm is None and stored.rows is not None:
        return _map(stored.step, stored.rows, frame)
    return _split(stored.step, stored.rows, frame) if stored.rows is not None else _bare(stored.step, frame)


# --- GEMMs of the library ---------------------------------------------------------------------------------------------


def matmul(form: str, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The bare GEMM, accumulated in float32 and rounded once to ``dtype`` (see ``rounding``)."""
    if form == "tn" and a.shape[0] % WHOLE_ROWS:
        a, b = (F.pad(t, (0, 0, 0, -t.shape[0] % WHOLE_ROWS)) for t in (a, b))
    x, y = (a.t(), b) if form == "tn" else (a, b.t() if form == "nt" else b)
    if dtype == a.dtype:
        return torch.mm(x, y)
    if a.dtype.itemsize == 2 and dtype == torch.float32:
        return torch.mm(x, y, out_dtype=dtype)
    return torch.mm(x, y).to(dtype)


def _operands(step: Step, frame: Frame) -> Callable[[Tensors], tuple[Tensor, Tensor]]:
    a, b = frame.places[step.a], frame.at(step.b)
    if len(b) == 1:
        only = b[0]
        return lambda tensors: (tensors[a], tensors[only])
    stack = _stack(step, frame)
    return lambda tensors: (tensors[a], stack([tensors[i] for i in b]))


def _stack(step: Step, frame: Frame) -> Callable[[list[Tensor]], Tensor]:
    """The blocks of a weight as one tensor, as ``stacked`` gives it, in fewer looks: the plan knows their shapes."""
    shapes = [frame.shapes[name] for name in step.b]
    size = step.program.gemm.dtype.bytes if step.program.gemm is not None else 0
    ends = [size * e for e in accumulate(prod(shape) for shape in shapes)]
    whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    strides = memory.strides_of(whole)

    def view(blocks: list[Tensor]) -> Tensor:
        first = blocks[0]
        address = first.data_ptr()
        for block, end in zip(blocks[1:], ends, strict=False):
            if block.data_ptr() != address + end:
                return stacked(blocks)
        storage = first.untyped_storage()
        if address + ends[-1] > storage.data_ptr() + storage.nbytes():  # side by side by chance
            return stacked(blocks)
        STATISTICS.views += 1
        return memory.view(first, whole, strides, 0)

    return view


def _bare(step: Step, frame: Frame) -> Prepared:
    """A GEMM without an epilogue."""
    (_, n), form, of = step.program.outputs[0], _form(step), _operands(step, frame)
    dtype, place = TORCH[n.type.dtype], frame.places[step.stores[0]]
    _note(step, [n], frame)

    def run(tensors: Tensors, stream: int) -> None:
        found = matmul(form, *of(tensors), dtype)
        tensors[place] = found if tensors[place] is None else tensors[place].copy_(found)

    return run


def _split(step: Step, kernel: RowKernel, frame: Frame) -> Prepared:
    """An epilogue that is no kernel of its own: the GEMM stores its float32 accumulator, a generated map reads it."""
    acc, form, of = step.program.params[0].type, _form(step), _operands(step, frame)
    place, dtype = frame.size, TORCH[acc.dtype]
    frame.size += 1
    whole = Spec.fresh((dim(acc.rows, frame.rows), dim(acc.cols, frame.rows)))
    launches = frame.bind(step, kernel, [(whole, place)])

    def run(tensors: Tensors, stream: int) -> None:
        tensors[place] = matmul(form, *of(tensors), dtype)
        for bound in launches:
            bound(tensors, stream)
        tensors[place] = None

    return run


def _map(step: Step, kernel: RowKernel, frame: Frame) -> Prepared:
    """A finalize, a leftover or a step on weights."""
    launches = frame.bind(step, kernel)
    if len(launches) == 1:
        return launches[0]

    def run(tensors: Tensors, stream: int) -> None:
        for bound in launches:
            bound(tensors, stream)

    return run


def _form(step: Step) -> str:
    if step.program.gemm is None:
        raise PlanError(f"{step.program.name} has no GEMM")
    return step.program.gemm.form


def _note(step: Step, outputs: Sequence[Node], frame: Frame) -> None:
    for store, n in zip(step.stores, outputs, strict=True):
        frame.shapes[store] = tuple(dim(d, frame.rows) for d in (n.type.rows, n.type.cols) if d is not None)


# --- kernels of ours --------------------------------------------------------------------------------------------------


View = tuple[int, tuple[int, ...], tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class Columns:
    """A buffer, or ``columns`` of it, in the place of a tensor while a kernel's arguments are listed."""

    place: int
    shape: tuple[int, ...]
    columns: tuple[int, int] | None = None

    def __getitem__(self, index: tuple[object, slice]) -> Columns:
        return Columns(self.place, self.shape, (index[1].start, index[1].stop))

    @property
    def view(self) -> View:
        """The place, and the arguments of ``memory.view``."""
        start, stop = self.columns or (0, self.shape[-1])
        return self.place, (*self.shape[:-1], stop - start), memory.strides_of(self.shape), start


def _fused(step: Step, job: Job, frame: Frame) -> Prepared:
    """A GEMM and its epilogue as one kernel: allocate the outputs, take views, launch."""
    form, plan, device = job.form, compiled(job), frame.device
    a, of = frame.places[step.a], _operands(step, frame)
    new, zeros, same = _outputs(step, job, frame)
    loads = [Columns(a, frame.shapes[step.a]), *(Columns(frame.places[x], frame.shapes[x]) for x in step.loads)]
    outputs = [Columns(frame.places[x], frame.shapes[x]) for x in step.stores]
    arguments = values(job, loads, outputs)  # type: ignore[arg-type]
    fixed = {name: v for name, v in arguments.items() if not isinstance(v, Columns)}
    given = {name: v for name, v in arguments.items() if isinstance(v, Columns)}
    whole = [(name, v.place) for name, v in given.items() if v.columns is None]
    views = [(name, *v.view) for name, v in given.items() if v.columns is not None]
    cuts = _cuts(step, job, outputs, frame)

    def run(tensors: Tensors, stream: int) -> None:
        left, right = of(tensors)
        for place, shape, dtype in new:
            if tensors[place] is None:  # else the caller gave it
                tensors[place] = memory.empty(shape, dtype, device)
        for place, shape, dtype in zeros:
            t = tensors[place]
            tensors[place] = torch.zeros(shape, dtype=dtype, device=device) if t is None else t.zero_()
        for place, load in same:
            if tensors[place] is None:
                tensors[place] = tensors[load]
        found = fixed.copy()
        for name, place in whole:
            found[name] = tensors[place]
        for name, place, shape, strides, offset in views:
            found[name] = memory.view(tensors[place], shape, strides, offset)
        launch(plan, operand(form, left), right, found)
        for place, shape, strides, offset in cuts:
            tensors[place] = memory.view(tensors[place], shape, strides, offset)

    return run


def _cuts(step: Step, job: Job, outputs: Sequence[Columns], frame: Frame) -> list[View]:
    """The partials that are part of what a kernel writes: those of some columns, or all but the padding."""
    found = []
    for sink in job.lowered.sinks:
        whole = outputs[sink.output]
        part: Columns = reduced(job, sink, whole)  # type: ignore[arg-type, assignment]
        if part.view != whole.view:
            found.append(part.view)
            frame.cuts[step.stores[sink.output]] = Spec(part.view[1], part.view[2])
    return found


Made = list[tuple[int, tuple[int, ...], torch.dtype]]


def _outputs(step: Step, job: Job, frame: Frame) -> tuple[Made, Made, list[tuple[int, int]]]:
    """The outputs: new ones, those that begin as zeros, and those that are written over a load, by their places."""
    _note(step, [n for _, n in step.program.outputs], frame)
    sinks = {s.output: s for s in job.lowered.sinks}
    rows = dim(step.program.params[0].type.rows, frame.rows)
    over = frame.over if job.lowered.mode == "element" else {}
    new: Made = []
    zeros: Made = []
    same: list[tuple[int, int]] = []
    for i, (store, (_, n)) in enumerate(zip(step.stores, step.program.outputs, strict=True)):
        place, sink, dtype = frame.places[store], sinks.get(i), TORCH[n.type.dtype]
        if store in over:
            same.append((place, frame.places[over[store]]))
        elif sink is None:
            new.append((place, frame.shapes[store], dtype))
        elif sink.kind == "select":  # a row whose index names no column is not written
            zeros.append((place, frame.shapes[store], dtype))
        else:
            frame.shapes[store] = sink_shape(job.lowered, sink, n, rows, job.config)
            new.append((place, frame.shapes[store], torch.float32))
    return new, zeros, same
