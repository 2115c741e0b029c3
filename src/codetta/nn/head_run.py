"""The LM head on tensors: its statistics, slab by slab, and its gradients from what forward held."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from codetta.backends import backend_on, get_backend
from codetta.backends.base import NEW, Runnable
from codetta.backends.hopper.rounding import once
from codetta.backends.reference.evaluate import DTYPE_OF
from codetta.core.types import compute_dtype
from codetta.nn.head_gemms import InputGradient, weight_gradient
from codetta.nn.head_graphs import (
    LARGEST,
    LSE,
    TARGET,
    TOTAL,
    Head,
    exponentials_plan,
    from_exponentials_plan,
    gradient_plan,
    statistics_plan,
    weight_plan,
)
from codetta.nn.slabs import EXPONENTIALS, GRAIN, Sizes, Slab, regions, slabs, steps
from codetta.partition.plan import Plan

NOTHING_HELD = "none"  # the mode of a forward without a backward


@dataclass(frozen=True, slots=True)
class Piece:
    """A plan ready to run, its outputs by their own names."""

    run: Runnable
    inputs: tuple[str, ...]
    buffers: Mapping[str, str]

    def __call__(self, values: Mapping[str, Tensor], rows: int, into: Mapping[str, Tensor] = NEW) -> dict[str, Tensor]:
        """The outputs; those given ``into`` are written there."""
        given = {self.buffers[name]: t for name, t in into.items()}
        found = self.run.run({name: values[name] for name in self.inputs}, rows, into=given)
        return {name: found[b] for name, b in self.buffers.items()}


def piece(backend: str, plan: Plan) -> Piece:
    """A plan ready to run."""
    return Piece(get_backend(backend)(plan), plan.inputs, {name: view.buffer for name, view in plan.outputs})


@lru_cache(maxsize=256)
def _statistics(backend: str, head: Head, cols: int, wanted: tuple[str, ...], stored: bool) -> Piece:
    return piece(backend, statistics_plan(head, cols, wanted, stored))


@lru_cache(maxsize=256)
def _gradient(
    backend: str, head: Head, cols: int, given: tuple[str, ...], outputs: tuple[str, ...], kept: bool
) -> Piece:
    return piece(backend, gradient_plan(head, cols, given, outputs, kept))


@dataclass(frozen=True, slots=True)
class What:
    """What follows the linear layer, and how logits are held: the words that say so to an op. ``call`` tells apart
    calls in a graph that are otherwise the same, each of which may write over the logits that it held; 0 in eager mode,
    where nobody takes two for one."""

    scale: float
    softcap: float | None
    mode: str
    lends: bool
    call: int = 0

    @property
    def text(self) -> str:
        """As one word for each."""
        return f"{self.scale!r} {self.softcap!r} {self.mode} {int(self.lends)} {self.call}"

    @staticmethod
    @lru_cache(maxsize=256)
    def read(text: str) -> What:
        """Back from its text."""
        scale, softcap, mode, lends, call = text.split()
        return What(float(scale), None if softcap == "None" else float(softcap), mode, lends == "1", int(call))


@dataclass(frozen=True)
class Call:
    """The tensors of one call: x (tokens, features), weight (columns, features), index (tokens,), which are the
    targets' columns in int32, -1 for none, bias (columns,), and the shift of each row's logits where they are wide."""

    what: What
    x: Tensor
    weight: Tensor
    index: Tensor
    bias: Tensor | None = None
    shift: Tensor | None = None

    @property
    def head(self) -> Head:
        """What is computed."""
        bias = None if self.bias is None else DTYPE_OF[self.bias.dtype]
        return Head(self.x.shape[1], DTYPE_OF[self.x.dtype], bias, self.what.scale, self.what.softcap)

    @property
    def backend(self) -> str:
        """Who computes it."""
        return backend_on(self.x.device)

    @property
    def sizes(self) -> Sizes:
        """Its sizes."""
        fused = self.backend == "hopper" and self.x.dtype.itemsize == 2 and self.x.shape[1] % GRAIN == 0
        sums = compute_dtype(self.head.dtype).bytes
        tokens, features = self.x.shape
        return Sizes(tokens, features, self.weight.shape[0], self.x.dtype.itemsize, sums, fused)

    @property
    def slabs(self) -> tuple[Slab, ...]:
        """The slabs in backward's order."""
        mode = "lean" if self.what.mode == NOTHING_HELD else self.what.mode
        return slabs(self.sizes, mode, self.what.lends)

    def values(self, s: Slab) -> dict[str, Tensor]:
        """A slab's inputs."""
        own = self.index - s.start
        found = {"x": self.x, "weight": self.weight[s.start : s.stop], "index": own.masked_fill_(own >= s.columns, -1)}
        if self.bias is not None:
            found["bias"] = self.bias[s.start : s.stop]
        return found if self.shift is None else {**found, "shift": self.shift}

    def lent(self, memory: Tensor, s: Slab) -> Tensor:
        """The lent memory that holds a slab's logits."""
        first, rows = s.start * self.sizes.stride, self.x.shape[0]
        return memory[first : first + rows * s.columns].view(rows, s.columns)


def forward(call: Call, wanted: tuple[str, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """The wanted statistics of each row, and what is held for backward: slabs of logits, then the lent memory."""
    cuts, backend, head, rows = call.slabs, call.backend, call.head, call.x.shape[0]
    held: list[Tensor] = []
    lends = any(s.how == "lent" for s in cuts)
    memory = call.weight.new_empty(call.weight.numel()) if lends else None
    parts: dict[str, list[Tensor]] = {name: [] for name in wanted}
    for s in regions(cuts, call.sizes.fused):
        stored = s.how != "again"
        into = {"logits": call.lent(memory, s)} if s.how == "lent" and memory is not None else NEW
        found = _statistics(backend, head, s.columns, wanted, stored)(call.values(s), rows, into)
        if s.how == "own":
            held.append(found["logits"])
        for name in wanted:
            parts[name].append(found[name])
    return [_whole(name, parts[name]) for name in wanted], held if memory is None else [*held, memory]


def _whole(name: str, parts: list[Tensor]) -> Tensor:
    """One statistic of whole rows from those of ranges of columns."""
    if len(parts) == 1:
        return parts[0]
    every = torch.stack(parts)
    if name == LARGEST:
        return every.amax(0)
    return every.sum(0) if name in (TARGET, TOTAL) else every.logsumexp(0)


def plans(head: Head, columns: int, tokens: int) -> list[Plan]:
    """The plans of a training step by kernels, in either mode, with lent memory and without, without options of the
    loss."""
    sizes = Sizes(tokens, head.features, columns, head.dtype.bytes)
    ways = [*((mode, lends) for mode in ("fast", "lean") for lends in (True, False)), (EXPONENTIALS, False)]
    return list(dict.fromkeys(p for way in ways for p in slab_plans(head, sizes, *way)))


def slab_plans(
    head: Head, sizes: Sizes, mode: str, lends: bool, names: tuple[str, ...] = (LSE, TARGET), *, trains: bool = True
) -> list[Plan]:
    """The plans with a GEMM of a step that holds logits that way; what ``trains`` not has no backward."""
    if mode == EXPONENTIALS and trains:
        behind = [
            from_exponentials_plan(head, sizes.columns, ("x",)),
            weight_plan(head.dtype, sizes.columns, head.features),
        ]
        return [exponentials_plan(head, sizes.columns), *behind]
    held = slabs(sizes, mode, lends)
    found = [statistics_plan(head, s.columns, names, s.how != "again") for s in regions(held, sizes.fused)]
    if not trains:
        return found
    found += [gradient_plan(head, s.columns, names, ("logits",), False) for s in held if s.how == "again"]
    return [*found, weight_plan(head.dtype, sizes.columns, head.features)] if len(held) == 1 else found


@dataclass(frozen=True)
class Wanted:
    """Which gradients a backward is to give."""

    x: bool
    weight: bool
    bias: bool


def backward(
    call: Call, lse: Tensor, held: list[Tensor], grads: Mapping[str, Tensor], wanted: Wanted, given_up: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, weight and bias from those of the statistics. With ``given_up``, what is ``held`` may hold
    anything afterwards, and the lent memory is the weight's gradient."""
    cuts = call.slabs
    own = iter(held)
    memory = held[-1] if any(s.how == "lent" for s in cuts) else None
    dw = _new_weight_gradient(call, memory if given_up else None) if wanted.weight else None
    bias: list[Tensor] = []
    pieces = [p for s in cuts for p in _pieces(call, s, next(own) if s.how == "own" else None, given_up)]
    dx = InputGradient(single=len(pieces) == 1)
    shared = {LSE: lse, **{f"d_{name}": g for name, g in grads.items()}}
    with exact(call.x.device):
        for s, own_logits in pieces:
            kept = call.lent(memory, s) if s.how == "lent" and memory is not None else own_logits
            found = _slab_gradients(call, s, kept, shared, wanted, given_up)
            if wanted.bias:
                bias.append(found["d_bias"])
            if dw is not None:
                weight_gradient(call.backend, found["d_logits"], call.x, dw[s.start : s.stop])
            if wanted.x:
                dx.add(found["d_logits"], call.weight[s.start : s.stop])
            del found  # before the next slab's
    db = torch.cat(bias).to(call.bias.dtype) if bias and call.bias is not None else None
    return dx.rounded(call.x) if wanted.x else None, dw, db


def exact(device: torch.device) -> AbstractContextManager[None]:
    """Products of the library's that are rounded once."""
    return once() if device.type == "cuda" else nullcontext()


def _new_weight_gradient(call: Call, memory: Tensor | None) -> Tensor:
    if memory is None:
        return torch.empty_like(call.weight)
    whole: Tensor = memory.new_empty(0)  # no view: nobody else has that memory
    whole.set_(memory.untyped_storage(), 0, call.weight.shape, (call.weight.shape[1], 1))
    return whole


def _pieces(call: Call, s: Slab, logits: Tensor | None, given_up: bool) -> list[tuple[Slab, Tensor | None]]:
    """A slab as backward takes it, with its logits if it has its own."""
    parts = steps(call.sizes, (s,), given_up)
    return [(p, None if logits is None else logits[:, p.start - s.start : p.stop - s.start]) for p in parts]


def _slab_gradients(
    call: Call, s: Slab, kept: Tensor | None, shared: Mapping[str, Tensor], wanted: Wanted, given_up: bool
) -> dict[str, Tensor]:
    """A slab's ``d_logits``, and its part of ``d_bias``, which is summed before anything is rounded."""
    values, rows = {**call.values(s), **shared}, call.x.shape[0]
    given = tuple(name.removeprefix("d_") for name in shared if name != LSE)
    asked = {"bias": wanted.bias, "logits": wanted.x or wanted.weight}
    outputs = tuple(name for name, is_asked in asked.items() if is_asked)
    if kept is None:
        return _gradient(call.backend, call.head, s.columns, given, outputs, False)(values, rows)
    found: dict[str, Tensor] = {}
    for name in outputs:  # the logits last, as they may be written over what the bias's sum reads
        into = {"d_logits": kept} if name == "logits" and s.how == "own" and given_up else NEW
        run = _gradient(call.backend, call.head, s.columns, given, (name,), True)
        found |= run({**values, "kept": kept}, rows, into)
    return found
