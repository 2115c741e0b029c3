"""One contender of one whole model, in a process of its own: it is told on its input what to do next, a JSON line each
time, and answers with JSON lines.

Each answer repeats all that is known so far, so that what was measured survives what goes wrong later. The duties are
the first step, whose loss and gradients must be the unmodified model's, a turn of timed steps, and a look at where the
time goes. Between duties the process holds weights and the optimizer's state, and nothing else of the GPU's memory.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from codetta.bench.environment import watching
from codetta.bench.kernels import told
from codetta.bench.model_cases import CONTENDERS, Call, Case, case_named, flops_of, gemm_sizes
from codetta.bench.profile import profiled
from codetta.errors import VerifyError
from codetta.timing import Timing, Variant

WARM_STEPS = 2
PROFILED_STEPS = 3
RATE = 1e-5
# Losses in bfloat16 are some 1e-4 apart. Liger behind torch.compile, which is wrong, was 3.6e-2 off.
LOSS_LIMIT = 2e-3
NORM_LIMIT = 2e-2


@dataclass(frozen=True)
class Asked:
    """Who runs what, where; ``options`` are those of our backend."""

    case: str
    contender: str
    device: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Found:
    """What became known. Times are in microseconds, ``first_step`` is in seconds, compilation included; ``load`` has
    the card's state in each turn; a profile is microseconds a step by kind."""

    parameters: int = 0
    flops: float = 0.0
    loss: float | None = None
    norm: float | None = None
    first_step: float | None = None
    samples: dict[str, list[float]] = field(default_factory=dict)
    load: list[dict[str, float]] = field(default_factory=list)
    peak: int | None = None
    bare: float | None = None
    profile: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, float] = field(default_factory=dict)
    longest: dict[str, float] = field(default_factory=dict)
    note: str = ""


FORWARD_BACKWARD, FULL = "forward + backward", "full step"


@dataclass
class Training:
    """A model being trained on one batch."""

    model: nn.Module
    call: Call
    batch: dict[str, Tensor]
    optimizer: torch.optim.Optimizer | None = None

    def gradients(self) -> Tensor:
        """The loss, behind its backward pass."""
        self.forget()
        loss: Tensor = self.call(**self.batch).loss
        loss.backward()
        return loss.detach()

    def step(self) -> Tensor:
        """The loss, behind the optimizer's step too if there is one."""
        loss = self.gradients()
        if self.optimizer is not None:
            self.optimizer.step()
        return loss

    def forget(self) -> None:
        """Free the gradients."""
        for p in self.model.parameters():
            p.grad = None

    @property
    def norm(self) -> float:
        """Of all gradients together."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return float(torch.stack([g.float().norm() for g in grads]).double().norm())


class Contender:
    """A contender with its model, and what was found of it."""

    def __init__(self, asked: Asked, found: Found) -> None:
        self.case, self.found, self.on_gpu = case_named(asked.case), found, asked.device == "cuda"
        model, batch = self.case.build(asked.device)
        found.parameters, found.flops = sum(p.numel() for p in model.parameters()), flops_of(model, self.case)
        self.training = Training(model, CONTENDERS[asked.contender](model, asked.options), batch)
        small = torch.ones(64, 64, device=asked.device, dtype=torch.bfloat16)
        (small @ small).sum().item()  # the libraries are loaded: no part of a first step

    def first(self, loss: float | None, norm: float | None) -> None:
        """The first step; VerifyError where its loss or its gradients are not those given."""
        training, found = self.training, self.found
        begin = perf_counter()
        found.loss = training.gradients().item()  # waits
        seconds = perf_counter() - begin
        found.norm = training.norm
        begin = perf_counter()
        if self.case.optimizer:
            training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=RATE, fused=True)
            training.optimizer.step()
            _wait()
        found.first_step = seconds + perf_counter() - begin
        for name, here, eager, limit in (
            ("the first loss", found.loss, loss, LOSS_LIMIT),
            ("the gradients' norm", found.norm, norm, NORM_LIMIT),
        ):
            if eager is not None and not abs(here - eager) <= limit * abs(eager):
                raise VerifyError(f"{name} is {here:.6g}, and {eager:.6g} eager")

    def turn(self, steps: int) -> None:
        """Steps back to back, the device waited for at their end only. The peak is of whole steps."""
        ways: dict[str, Variant] = {FORWARD_BACKWARD: self.training.gradients}
        if self.training.optimizer is not None:
            ways = {FULL: self.training.step, **ways}
        for i, (name, step) in enumerate(ways.items()):
            for _ in range(WARM_STEPS if i == 0 else 0):
                step()
            _wait()
            if i == 0 and self.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            with watching() as watched:
                times = back_to_back([step], steps, self.on_gpu)[0]
            self.found.samples.setdefault(name, []).extend(times)
            if i == 0:
                self.found.load.append(watched.values)
                self.found.peak = torch.cuda.max_memory_allocated() if self.on_gpu else None

    def profile(self) -> None:
        """Where a step's time goes, and how long its GEMMs take by cuBLAS."""
        if self.on_gpu:
            self.found.bare = bare_gemms(self.training.model, self.case, self.training.step)
        found = profiled(self.training.step, PROFILED_STEPS, self.on_gpu)
        self.found.profile, self.found.kernels, self.found.longest = found.times, found.kernels, found.longest

    def release(self) -> None:
        """Leave the GPU's memory to others."""
        self.training.forget()
        gc.collect()
        if self.on_gpu:
            _wait()
            torch.cuda.empty_cache()


def back_to_back(calls: list[Callable[[], object]], rounds: int, on_gpu: bool) -> list[list[float]]:
    """Microseconds of each call, one after the other in every round: from where the one before ended to where it ends,
    so that gaps count."""
    marks = [_mark(on_gpu)]
    for _ in range(rounds):
        for call in calls:
            call()
            marks.append(_mark(on_gpu))
    _wait()
    spans = [_between(a, b) for a, b in pairwise(marks)]
    return [spans[i :: len(calls)] for i in range(len(calls))]


def _mark(on_gpu: bool) -> Any:
    if not on_gpu:
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(a: Any, b: Any) -> float:
    return (b - a) * 1e6 if isinstance(a, float) else float(a.elapsed_time(b)) * 1e3


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def bare_gemms(model: nn.Module, case: Case, step: Variant, rounds: int = 5) -> float:
    """Microseconds of a step's GEMMs by cuBLAS into buffers that exist, in turn with whole steps: the same clocks."""
    weight = next(model.parameters())
    sizes = list(gemm_sizes(model))
    tensors: dict[tuple[int, int], Tensor] = {}

    def buffer(rows: int, columns: int) -> Tensor:
        if (rows, columns) not in tensors:
            tensors[rows, columns] = torch.randn(rows, columns, device=weight.device, dtype=weight.dtype)
        return tensors[rows, columns]

    operands = {s: (buffer(case.tokens, s[1]), buffer(*s), buffer(case.tokens, s[0])) for s in sizes}
    results = {s: tuple(torch.empty_like(t) for t in operands[s]) for s in operands}

    def gemms() -> None:
        for s in sizes:
            x, w, _ = operands[s]
            torch.mm(x, w.t(), out=results[s][2])
        for s in reversed(sizes):
            x, w, dy = operands[s]
            torch.mm(dy, w, out=results[s][0])
            torch.mm(dy.t(), x, out=results[s][1])

    gemms()
    step()
    _, samples = back_to_back([step, gemms], rounds, weight.is_cuda)
    return Timing(tuple(samples)).median


DUTIES: Mapping[str, Callable[..., None]] = {
    "first": Contender.first,
    "turn": Contender.turn,
    "profile": Contender.profile,
}


def serve(asked: Asked, lines: Iterable[str], say: Callable[[str], object]) -> int:
    """Answer once the model is there, and behind each duty; 1 where something failed, which ends it."""
    found = Found()
    try:
        contender = Contender(asked, found)
        say(json.dumps(asdict(found)))
        for line in lines:
            duty = json.loads(line)
            DUTIES[duty.pop("do")](contender, **duty)
            contender.release()
            say(json.dumps(asdict(found)))
    except Exception as error:  # any: what is known by now is told, with what went wrong
        found.note = told(error)
        say(json.dumps(asdict(found)))
        return 1
    return 0


def main(argument: str) -> int:
    """Serve on the standard streams. What libraries print goes to the error stream."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return serve(Asked(**json.loads(argument)), sys.stdin, lambda text: answers.write(text + "\n"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
