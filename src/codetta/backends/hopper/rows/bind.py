"""A launch prepared for tensors of known shapes: what remains is to allocate, to fill in addresses, and to start it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from codetta.backends.hopper import counters, memory
from codetta.backends.hopper.rows.fold import LSE_PARTS, function_of
from codetta.backends.hopper.rows.kernel import Argument, Kernel, pow2
from codetta.backends.hopper.rows.launcher import Grid, Launcher, launcher_of
from codetta.backends.hopper.rows.launches import Launch, Output
from codetta.backends.reference.evaluate import TORCH
from codetta.core.node import Node
from codetta.core.types import Kind, compute_dtype
from codetta.partition.size import dim

IN_FLIGHT = 528  # blocks that keep an H200 busy: four on each of its 132 multiprocessors
FEW_PARTS, MANY_PARTS = 32, 128  # parts of a row that are read at once
BLOCK = 2048  # numbers of a block, of all its rows
LSE_BLOCK, LSE_ROWS = 8192, 16  # those of a log-sum-exp's parts where they are many, and of no more rows than that
ALIGNED = 15  # an address with any of these bits is not one for which Triton loads 16 bytes at once


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor's shape and strides."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(t: Tensor) -> Spec:
        """Those of a tensor."""
        return Spec(tuple(t.shape), t.stride())

    @staticmethod
    def fresh(shape: Sequence[int]) -> Spec:
        """Those of a new tensor."""
        return Spec(tuple(shape), memory.strides_of(shape))


@dataclass(frozen=True, slots=True)
class Step:
    """One launch: its kernel, on the GPU and in Triton's interpreter. ``compiled`` are the kernels that Triton made of
    it, by what of the arguments it compiles for, each with the quick way to launch it."""

    launch: Launch
    kernel: Kernel
    on_gpu: Any
    on_cpu: Any
    compiled: dict[object, tuple[Any, Launcher | None]] = field(default_factory=dict)


Made = Literal["as it is", "one row", "contiguous"]


@dataclass(slots=True)
class Bound:
    """One launch on tensors of known shapes. ``given`` are its arguments with gaps: ``reads``, ``writes`` and
    ``scratch`` say which of them are tensors, by their places in the list of tensors; ``reads`` also how a parameter is
    made what kernels read: rows at any stride, everything else side by side."""

    step: Step
    device: torch.device
    grid: Grid
    bm: int
    bt: int
    outputs: list[tuple[int, tuple[int, ...], torch.dtype, bool]]
    given: list[Any]
    reads: list[tuple[int, int, Made]]
    writes: list[tuple[int, int]]
    scratch: list[tuple[int, int, torch.dtype]]
    counters: list[int]
    is_empty: bool
    quick: Launcher | None = None

    def __call__(self, tensors: list[Any], stream: int) -> None:
        """Allocate the outputs into the list of tensors, and launch on the GPU's current stream."""
        for place, shape, dtype, in_parts in self.outputs:
            if tensors[place] is not None:  # the caller gave it
                continue
            if tensors[place] is None:  # else the caller gave it
                tensors[place] = memory.empty(shape, dtype, self.device)
            if in_parts and self.is_empty:
                tensors[place].zero_()
        if self.is_empty:
            return
        if self.quick is None or not self._launch(tensors, stream):
            self._launch_by_triton(tensors)

    def _launch(self, tensors: list[Any], stream: int) -> bool:
        """By addresses; False where one of them is not aligned."""
        given, bits = self.given.copy(), 0
        for place, source, made in self.reads:
            if made == "contiguous":
                return False
            address = tensors[source].data_ptr()
            given[place] = address
            bits |= address
        for place, source in self.writes:
            given[place] = tensors[source].data_ptr()
        held = []  # until the launch
        for place, size, dtype in self.scratch:
            held.append(memory.empty((size,), dtype, self.device))
            given[place] = held[-1].data_ptr()
        for place in self.counters:
            given[place] = counters.next_counter(self.device.index).address
        if bits & ALIGNED or self.quick is None:
            return False
        self.quick(self.grid, stream, given)
        return True

    def _launch_by_triton(self, tensors: list[Any]) -> None:
        """As any Triton kernel; the first time Triton compiles it."""
        given = self.given[:-2]
        for place, source, made in self.reads:
            given[place] = _made(tensors[source], made)
        for place, source in self.writes:
            given[place] = tensors[source]
        for place, size, dtype in self.scratch:
            given[place] = memory.empty((size,), dtype, self.device)
        for place in self.counters:
            given[place] = counter(self.device)
        step = self.step
        if self.device.type == "cpu":
            step.on_cpu[self.grid](*given, BM=self.bm, BT=self.bt)
            return
        what = (a.what for a in step.kernel.arguments)
        key = (self.device, self.bm, self.bt, *map(_specialised, given, what))
        found = step.compiled.get(key)
        if found is None:
            options = {"num_warps": step.kernel.warps, "enable_fp_fusion": True}
            made = step.on_gpu[self.grid](*given, BM=self.bm, BT=self.bt, **options)
            found = step.compiled[key] = made, launcher_of(made)
        else:
            found[0][self.grid](*given, self.bm, self.bt)
        if not any(isinstance(g, Tensor) and g.data_ptr() & ALIGNED for g in given):
            self.quick = found[1]


def _made(t: Tensor, made: Made) -> Tensor:
    if made == "as it is":
        return t
    return t.reshape(1, -1) if made == "one row" else t.contiguous()


def bind(
    step: Step,
    specs: Mapping[Node, Spec],
    places: Mapping[Node | Output, int],
    parts: Mapping[Node, Node],
    rows: int,
    device: torch.device,
) -> Bound:
    """Prepare a launch for parameters (temporaries too) of these shapes, which lie at these places of a list."""
    kernel, launch = step.kernel, step.launch
    how = {a.node: _how(a.node, specs[a.node], parts) for a in kernel.arguments if a.what == "input" and a.node}
    extent = dim(kernel.rows, rows)
    vectors = {n: s.shape[-1] for n, (_, s) in how.items() if n in parts and n.type.kind is Kind.COLVEC}
    bt, bm = block_of(kernel, vectors, parts)
    blocks = max(-(-extent // bm), 1) if kernel.rows is not None else 1
    span = bm
    if kernel.in_runs:
        span = bm * max(1, -(-blocks // max(1, IN_FLIGHT // kernel.chunks)))
        blocks = max(-(-extent // span), 1)
    outputs = [
        (places[o], shape_of(kernel, o, rows, blocks), TORCH[o.value.type.dtype], o.in_parts) for o in launch.outputs
    ]
    totals = any(o.value.type.kind is Kind.SCALAR for o in launch.outputs)
    is_empty = (extent == 0 and not totals) or all(prod(shape) == 0 for _, shape, _, _ in outputs)
    bound = Bound(step, device, (blocks, kernel.chunks, 1), bm, bt, outputs, [], [], [], [], [], is_empty)
    for i, a in enumerate(kernel.arguments):
        bound.given.append(_number(a, how, extent, span))
        if a.what == "input" and a.node is not None:
            bound.reads.append((i, places[a.node], how[a.node][0]))
        elif a.what == "output" and a.output is not None:
            bound.writes.append((i, places[a.output]))
        elif a.what == "scratch" and a.node is not None:
            bound.scratch.append((i, blocks * kernel.chunks, TORCH[compute_dtype(a.node.type.dtype)]))
        elif a.what == "counter":
            bound.counters.append(i)
    bound.given += [bm, bt]
    return bound


def _how(n: Node, spec: Spec, parts: Mapping[Node, Node]) -> tuple[Made, Spec]:
    """How a parameter is made what kernels read, and what it is then."""
    shape = spec.shape
    if n in parts and n.type.kind is Kind.SCALAR:
        return "one row", Spec.fresh((1, prod(shape)))
    rows_apart = len(shape) == 2 and (spec.strides[1] == 1 or shape[1] <= 1)
    if rows_apart or spec == Spec.fresh(shape) or (len(shape) == 1 and shape[0] <= 1):
        return "as it is", spec
    return "contiguous", Spec.fresh(shape)


def block_of(kernel: Kernel, counts: Mapping[Node, int], parts: Mapping[Node, Node]) -> tuple[int, int]:
    """How many parts of a vector, and how many rows, a block takes; both follow from the columns, not the rows."""
    most = pow2(max(counts.values(), default=1))
    if any(function_of(parts[n]) == "lse" for n in counts):
        bt = min(most, LSE_PARTS)
        return bt, min(256, max(BLOCK // bt, min(LSE_ROWS, LSE_BLOCK // bt)))
    # What follows the sum of a row is done by every thread that holds a part of it: few threads take a row, unless it
    # is so long that this does not count.
    bt = most if most <= FEW_PARTS else FEW_PARTS if most <= MANY_PARTS else MANY_PARTS
    if kernel.block:
        return bt, kernel.block
    return bt, max(1, min(256, BLOCK // max(kernel.width, bt if counts else 1)))


def shape_of(kernel: Kernel, o: Output, rows: int, blocks: int) -> tuple[int, ...]:
    """The shape of an output."""
    n, t = o.value, o.value.type
    shape = tuple(dim(size, rows) for size in (t.rows, t.cols) if size is not None)
    if not o.in_parts:
        return shape
    extent = dim(n.args[0].type.rows, rows) if n.op.family == "reduce" else 1
    count = blocks if extent else 0
    in_parts = {Kind.COLVEC: (*shape, 1), Kind.ROWVEC: (count, *shape), Kind.SCALAR: (count, kernel.chunks)}
    return in_parts.get(t.kind, shape)


def _number(a: Argument, how: Mapping[Node, tuple[Made, Spec]], extent: int, span: int) -> int | None:
    """An argument that is a number; None for one that is a tensor, or is not used."""
    if a.what in ("rows", "span"):
        return extent if a.what == "rows" else span
    if a.node is None or a.node not in how or a.what not in ("stride", "parts"):
        return None
    spec = how[a.node][1]
    if a.what == "stride":
        return spec.strides[0]
    return spec.shape[0 if a.node.type.kind is Kind.ROWVEC else -1]


def _specialised(value: object, what: str) -> object:
    """What of an argument Triton compiles for: alignment, a stride of 1, the width of integers."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if not isinstance(value, int):
        return None
    return value >= 1 << 31, what == "stride" and (value % 16 == 0, value == 1)


def counter(device: torch.device) -> Tensor:
    """The count of blocks that are done, 0 between launches."""
    return counters.next_as_tensor(device.index) if device.type == "cuda" else torch.zeros(1, dtype=torch.int32)
