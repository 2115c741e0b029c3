"""The layer level: the segment between two attentions, forward and forward with backward, each contender side by side.

Timed is the whole Python call. Forward is a training forward: it saves what backward needs, and what it returns is
freed behind it. Forward with backward is that and ``torch.autograd.grad`` of x, y, all weights and both gains, given
random gradients of x2, q, k and v. The base is the time of the bare cuBLAS GEMMs of the same shapes, 4 or 12 of them.
Every contender's outputs and gradients are first held against the module in float32, and what all read must be as it
was: Liger, which works in place, has copies, made before anything is timed. A contender's peak memory is that of one
step, above the inputs, with what the step returns.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from codetta.bench import contenders
from codetta.bench.check import compared
from codetta.bench.contenders import BARE, OURS, Contender, Outputs, Setting
from codetta.bench.environment import watching
from codetta.bench.kernels import Settings, told
from codetta.bench.report import Report, Row, timed
from codetta.bench.shapes import Segment, Shape, build, cotangents, segment_batch
from codetta.bench.shared import Shared, copies
from codetta.errors import VerifyError
from codetta.timing import Variant, measure

CASE_SECONDS = 12.0
FORWARD, BOTH = "forward", "forward + backward"
MEMORY = "fast"  # what the headline runs with
MAKERS: dict[str, Callable[[Setting], Contender]] = {
    OURS: lambda s: contenders.direct(s, MEMORY, OURS),
    f"{OURS}, lean": lambda s: contenders.direct(s, "lean", f"{OURS}, lean"),
    f"{OURS}, balanced": lambda s: contenders.direct(s, "balanced", f"{OURS}, balanced"),
    f"{OURS}, torch.compile": lambda s: contenders.through_dynamo(s, MEMORY, f"{OURS}, torch.compile"),
    "torch.compile": contenders.compiled,
    "Liger": lambda s: contenders.liger(s, compile_it=False),
    "Liger, compiled": lambda s: contenders.liger(s, compile_it=True),
    "eager": contenders.eager,
}


def layer(shapes: Iterable[Shape], settings: Settings, report: Report) -> None:
    """Measure the segment at each shape."""
    for shape in shapes:
        if report.has_time(shape.name):
            try:
                _at(shape, settings, report)
            except Exception as error:  # told, and the next shape is measured
                report.add(Row("layer", shape.name, shape.tokens, "", OURS, note=told(error)))
        torch._dynamo.reset()
        gc.collect()
        if settings.device == "cuda":
            torch.cuda.empty_cache()


def setting_of(shape: Shape, device: str) -> Setting:
    """The module and its inputs."""
    module = build(Segment, shape, device)
    return Setting(shape, module, segment_batch(shape, device))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Entrant:
    """A contender with the incoming gradients that it gets: everybody's, or copies if it may write over them."""

    contender: Contender
    given: Outputs

    @classmethod
    def of(cls, contender: Contender, given: Outputs) -> Entrant:
        """Copies are made here, once."""
        return cls(contender, copies(given) if contender.writes else given)

    def step(self) -> tuple[Outputs, list[Tensor]]:
        """What is timed: forward with backward."""
        return self.contender.step(self.given)

    def check(self, expected: Mapping[str, Tensor], shared: Shared) -> float:
        """The largest error; VerifyError where one is off, or where it wrote over what others read."""
        try:
            error = check(self.contender, self.given, expected)
        except Exception as wrong:
            spoiled = shared.restore()
            if spoiled:
                raise VerifyError(f"{told(wrong)}; and it wrote over {', '.join(spoiled)}") from wrong
            raise
        shared.prove_unwritten(self.contender.name)
        return error

    def peak(self) -> int | None:
        """The most memory of one step in bytes above what there was, outputs and gradients included; None on a CPU."""
        if not self.given["x2"].is_cuda:
            return None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        held = self.step()
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated() - before
        del held
        return most


def _at(shape: Shape, settings: Settings, report: Report) -> None:
    s = setting_of(shape, settings.device)
    expected, given = reference(s)
    shared = shared_of(s, given)
    blank = Row("layer", shape.name, shape.tokens, "", "")
    ready: dict[str, Entrant] = {}
    checked: list[Row] = []
    for name, make in MAKERS.items():
        if not settings.wants_variant(name):
            continue
        settings.tell(f"{shape.name}: {name}")
        row = replace(blank, variant=name)
        try:
            entrant = Entrant.of(make(s), given)
            checked.append(replace(row, error=entrant.check(expected, shared), peak=entrant.peak()))
            ready[name] = entrant
        except Exception as error:  # somebody else's kernels may fail in any way; that is a result, too
            checked.append(replace(row, note=told(error)))
    del expected, shared
    for case, backward in ((FORWARD, False), (BOTH, True)):
        if settings.wants(case) and report.has_time(f"{shape.name} {case}"):
            settings.tell(f"{shape.name}: {case}")
            report.add(*_timed(case, blank, _variants(s, ready, backward), checked, settings))


def shared_of(s: Setting, given: Outputs) -> Shared:
    """Inputs, incoming gradients and weights, by the names that a person knows them by."""
    gradients = {f"the gradient of {n}": t for n, t in given.items()}
    return Shared({**s.batch, **gradients, **dict(s.module.named_parameters())})


def _variants(s: Setting, ready: Mapping[str, Entrant], backward: bool) -> dict[str, Variant]:
    calls = {name: e.step if backward else e.contender.forward for name, e in ready.items()}
    return {BARE: contenders.bare(s, backward=backward), **calls}


def _timed(
    case: str, blank: Row, variants: Mapping[str, Variant], checked: Iterable[Row], settings: Settings
) -> list[Row]:
    with watching() as watched:
        timings = measure(variants, rounds=settings.rounds, filler=settings.filler, budget=CASE_SECONDS)
    rows = [replace(blank, variant=BARE), *checked]
    named = (replace(r, case=case, peak=r.peak if case == BOTH else None) for r in rows)
    return [timed(r, timings, BARE, watched.values) if r.variant in timings else r for r in named]


def reference(s: Setting) -> tuple[Outputs, Outputs]:
    """Outputs and gradients of the module in float32, from the same numbers, and the incoming gradients of all."""
    tf32, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    wide = deepcopy(s.module).float()
    batch = {n: t.detach().float().requires_grad_(t.requires_grad) for n, t in s.batch.items()}
    exact = Setting(s.shape, wide, batch)
    contender = Contender("float32", lambda: wide(**batch), exact.wrt())
    given = {n: t.to(torch.bfloat16) for n, t in cotangents(_shapes(s)).items()}
    outputs, gradients = contender.step({n: t.float() for n, t in given.items()})
    torch.backends.cuda.matmul.allow_tf32 = tf32
    return {**{n: t.detach() for n, t in outputs.items()}, **contender.named(gradients)}, given


def _shapes(s: Setting) -> Outputs:
    x = s.batch["x"].detach()
    widths = dict(zip("qkv", s.shape.qkv, strict=True))
    return {"x2": x, **{n: x.new_empty(x.shape[0], w) for n, w in widths.items()}}


def check(contender: Contender, given: Outputs, expected: Mapping[str, Tensor]) -> float:
    """The largest error of a contender's outputs and gradients; VerifyError where one is off."""
    outputs, gradients = contender.step(given)
    found = {**{n: t.detach() for n, t in outputs.items()}, **contender.named(gradients)}
    return compared(contender.name, found, expected)
