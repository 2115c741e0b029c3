"""The cost of launching: CPU time of a segment's forward at few tokens, from an empty queue until the call returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from codetta.bench import contenders
from codetta.bench.contenders import OURS, Contender, Setting
from codetta.bench.kernels import Settings, told
from codetta.bench.layer import MEMORY, setting_of
from codetta.bench.report import Report, Row, timed
from codetta.bench.shapes import Shape
from codetta.timing import launch_times

TOKENS = 256
CALLS = 1000
BASE = "torch.compile"
MAKERS: dict[str, Callable[[Setting], Contender]] = {
    OURS: lambda s: contenders.direct(s, MEMORY, OURS),
    f"{OURS}, torch.compile": lambda s: contenders.through_dynamo(s, MEMORY, f"{OURS}, torch.compile"),
    BASE: contenders.compiled,
    "eager": contenders.eager,
}


def launch(shapes: Iterable[Shape], settings: Settings, report: Report, calls: int = CALLS) -> None:
    """A training forward of each contender, and one without gradients, many times."""
    for shape in shapes:
        s = setting_of(shape, settings.device)
        for case, grad in (("training forward", True), ("inference forward", False)):
            if settings.wants(case) and report.has_time(f"{shape.name} {case}"):
                settings.tell(f"{shape.name}: {case}")
                with torch.set_grad_enabled(grad):
                    report.add(*_timed(case, s, settings, calls))
                torch._dynamo.reset()


def _timed(case: str, s: Setting, settings: Settings, calls: int) -> list[Row]:
    blank = Row("launch", s.shape.name, s.shape.tokens, case, OURS)
    ready: dict[str, Callable[[], object]] = {}
    rows: list[Row] = []
    for name, make in MAKERS.items():
        row = replace(blank, variant=name)
        if name != BASE and not settings.wants_variant(name):
            continue
        try:
            contender = make(s)
            contender.forward()
            ready[name] = contender.forward
            rows.append(row)
        except Exception as error:  # told, and the others are measured
            rows.append(replace(row, note=told(error)))
    timings = launch_times(ready, calls=calls)
    return [timed(r, timings, BASE, {}) if r.variant in timings else r for r in rows]
