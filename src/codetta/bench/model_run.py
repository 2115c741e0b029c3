"""One contender of one whole model, in a process of its own: asked by a JSON argument, answers with JSON lines.

Each line repeats all that is known so far, so that what was measured survives what goes wrong later. In order: the
unmodified model's loss and gradient norm, the contender's first step, and only if it gave the same, times and memory,
the model's bare GEMMs in the same state of the card, and the profile.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
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

WARM_STEPS = 3
PROFILED_STEPS = 3
RATE = 1e-5
# Losses in bfloat16 are some 1e-4 apart. Liger behind torch.compile, which is wrong, was 3.6e-2 off.
LOSS_LIMIT = 2e-3
NORM_LIMIT = 2e-2


@dataclass(frozen=True)
class Asked:
    """What the process is to do: ``steps`` are timed; ``first`` ends it behind the first step."""

    case: str
    contender: str
    steps: int
    device: str
    options: dict[str, Any] = field(default_factory=dict)
    first: bool = False


@dataclass
class Found:
    """What became known. Times are in microseconds, ``first_step`` is in seconds, compilation included; a profile is
    microseconds a step by kind."""

    parameters: int = 0
    flops: float = 0.0
    loss: float | None = None
    norm: float | None = None
    eager_loss: float | None = None
    eager_norm: float | None = None
    first_step: float | None = None
    samples: dict[str, list[float]] = field(default_factory=dict)
    load: dict[str, float] = field(default_factory=dict)
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
        for p in self.model.parameters():
            p.grad = None
        loss: Tensor = self.call(**self.batch).loss
        loss.backward()
        return loss.detach()

    def step(self) -> Tensor:
        """The loss, behind the optimizer's step too if there is one."""
        loss = self.gradients()
        if self.optimizer is not None:
            self.optimizer.step()
        return loss

    @property
    def norm(self) -> float:
        """Of all gradients together."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return float(torch.stack([g.float().norm() for g in grads]).double().norm())


def run(asked: Asked, found: Found) -> Iterator[str]:
    """Fill in what is found; after each part its name is given."""
    case, on_gpu = case_named(asked.case), asked.device == "cuda"
    model, batch = case.build(asked.device)
    found.parameters, found.flops = sum(p.numel() for p in model.parameters()), flops_of(model, case)
    plain = Training(model, model, batch)
    found.eager_loss, found.eager_norm = plain.gradients().item(), plain.norm
    model.zero_grad()
    if on_gpu:
        torch.cuda.empty_cache()
    yield "eager"
    training = Training(model, CONTENDERS[asked.contender](model, asked.options), batch)
    _first_step(training, case, found)
    yield "first step"
    if asked.first:
        return
    _timed(training, asked.steps, found, on_gpu)
    yield "times"
    if on_gpu:
        found.bare = bare_gemms(model, case, training.step)
        yield "bare GEMMs"
    profile = profiled(training.step, PROFILED_STEPS, on_gpu)
    found.profile, found.kernels, found.longest = profile.times, profile.kernels, profile.longest
    yield "profile"


def _first_step(training: Training, case: Case, found: Found) -> None:
    """VerifyError where the loss or the gradients are not eager's."""
    begin = perf_counter()
    found.loss = training.gradients().item()  # waits
    seconds = perf_counter() - begin
    found.norm = training.norm
    begin = perf_counter()
    if case.optimizer:
        training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=RATE, fused=True)
        training.optimizer.step()
        _wait()
    found.first_step = seconds + perf_counter() - begin
    for name, ours, eager, limit in (
        ("the first loss", found.loss, found.eager_loss or 0.0, LOSS_LIMIT),
        ("the gradients' norm", found.norm, found.eager_norm or 0.0, NORM_LIMIT),
    ):
        if not abs(ours - eager) <= limit * abs(eager):
            raise VerifyError(f"{name} is {ours:.6g}, and {eager:.6g} eager")


def _timed(training: Training, steps: int, found: Found, on_gpu: bool) -> None:
    """Steps back to back, the device waited for at the end only; the peak is of whole steps, with all that there is."""
    ways: dict[str, Variant] = {FORWARD_BACKWARD: training.gradients}
    if training.optimizer is not None:
        ways = {FULL: training.step, **ways}
    for name, step in ways.items():
        for _ in range(WARM_STEPS):
            step()
        if on_gpu and found.peak is None:
            _wait()
            torch.cuda.reset_peak_memory_stats()
        with watching() as watched:
            found.samples[name] = back_to_back([step], steps, on_gpu)[0]
        if on_gpu and found.peak is None:
            found.peak = torch.cuda.max_memory_allocated()
        found.load = found.load or watched.values


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
            tensors[rows, columns] = torch.randn(rows, columns, device=weight.device).to(weight.dtype)
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


def main(argument: str) -> int:
    """Write a line after each part; 1 if one failed."""
    found = Found()
    try:
        asked = Asked(**json.loads(argument))
        for _ in run(asked, found):
            _say(found)
    except Exception as error:  # any: what is known by now is told, with what went wrong
        found.note = told(error)
        _say(found)
        return 1
    return 0


def _say(found: Found) -> None:
    sys.stdout.write(json.dumps(asdict(found)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
