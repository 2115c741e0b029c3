"""The kernel level: each step of a Llama layer's plans and of the head's, alone, next to its baselines.

Timed is one call of a step: allocating its outputs and launching it, on tensors of a training step. Steps with a GEMM
are held against the bare cuBLAS GEMM of the same operands into a buffer that exists; passes and finalizes against a
device copy that reads and writes as many bytes together. Everything is checked first, and what is wrong is not timed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from codetta.bench.baselines import BARE, COPY, Baseline, Call, baselines_of
from codetta.bench.check import accumulator, checked, compared, plainly
from codetta.bench.environment import watching
from codetta.bench.peers import also_expected, peers_of
from codetta.bench.report import OURS, Report, Row, timed
from codetta.bench.shapes import HEAD_TOKENS, Head, Segment, Shape, build, head_batch, segment_batch
from codetta.bench.steps import Case, cases_of, compile_module, enlarged
from codetta.errors import CodettaError
from codetta.timing import Variant, measure

ROUNDS = 15
LARGE, LARGE_ON_CPU = 256 * 2**20, 2**16  # bytes of a finalize on large inputs
CASE_SECONDS = 3.0  # after which a case has had rounds enough, if there were at least five


@dataclass(frozen=True)
class Settings:
    """How a run goes: how many rounds; ``only`` cases with one of these texts in their name; besides ours and the base
    only ``variants`` whose name begins so; the memory mode; where; whether QuACK tries its tiles first."""

    rounds: int = ROUNDS
    only: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    memory: str = "balanced"
    device: str = "cpu"
    tuned: bool = False
    filler: Variant | None = None
    tell: Callable[[str], None] = lambda _: None

    def wants(self, name: str) -> bool:
        """Whether a case is to be measured."""
        return not self.only or any(text in name for text in self.only)

    def wants_variant(self, name: str) -> bool:
        """Whether a variant is to be measured."""
        return not self.variants or name in (OURS, BARE, COPY) or name.startswith(self.variants)


Source = Callable[[Shape, Settings], Iterator[tuple[Shape, Case]]]


def kernels(shapes: Iterable[Shape], settings: Settings, report: Report) -> None:
    """Measure all cases of all shapes."""
    for shape in shapes:
        for source in (_segment_cases, _head_cases):
            _tolerantly(source, shape, settings, report)
            torch._dynamo.reset()
            gc.collect()
            if settings.device == "cuda":
                torch.cuda.empty_cache()


def _segment_cases(s: Shape, settings: Settings) -> Iterator[tuple[Shape, Case]]:
    batch = segment_batch(s, settings.device)
    module = compile_module(build(Segment, s, settings.device), batch, settings.memory)
    yield from ((s, case) for case in with_large(cases_of(module, s.tokens)))


def _head_cases(s: Shape, settings: Settings) -> Iterator[tuple[Shape, Case]]:
    s = replace(s, tokens=min(s.tokens, HEAD_TOKENS))
    module = compile_module(build(Head, s, settings.device), head_batch(s, settings.device), settings.memory)
    for case in with_large(cases_of(module, s.tokens)):
        name = case.name if case.name.startswith("head") else f"head: {case.name}"
        yield s, replace(case, name=name)


def with_large(cases: Iterable[Case]) -> Iterator[Case]:
    """Every case, and the finalizes also on many more rows."""
    for case in cases:
        yield case
        if case.step.kind == "finalize":
            yield enlarged(case, LARGE if next(iter(case.memory.values())).is_cuda else LARGE_ON_CPU)


def _tolerantly(source: Source, shape: Shape, settings: Settings, report: Report) -> None:
    """What fails is told as a row, and the next is measured."""
    try:
        for s, case in source(shape, settings):
            if settings.wants(case.name) and report.has_time(f"{shape.name} {case.name}"):
                settings.tell(f"{s.name} {case.name}")
                report.add(*measured(case, s, settings))
    except Exception as error:  # any: what was measured and what is still to be measured must not be lost
        report.add(Row("kernels", shape.name, shape.tokens, source.__name__.strip("_"), OURS, note=told(error)))


def measured(case: Case, shape: Shape, settings: Settings, level: str = "kernels") -> list[Row]:
    """One case: ours and its baselines, checked, then timed together."""
    blank = Row(level, shape.name, shape.tokens, case.name, OURS)
    try:
        rows, variants = _checked(case, blank, settings)
        with watching() as watched, torch.no_grad():
            timings = measure(variants, rounds=settings.rounds, filler=settings.filler, budget=CASE_SECONDS)
    except Exception as error:  # any, as above
        return [replace(blank, note=told(error))]
    base = COPY if case.step.program.gemm is None else BARE
    return [timed(r, timings, base, watched.values) if r.variant in timings else r for r in rows]


def _checked(case: Case, blank: Row, settings: Settings) -> tuple[list[Row], dict[str, Variant]]:
    """A row for ours and for each baseline, and the calls of those that are right."""
    rows: list[Row] = []
    variants: dict[str, Variant] = {}
    acc = accumulator(case)
    try:
        run = case.runner()
        size = case.bytes if acc is None else None
        rows.append(replace(blank, error=checked(case, run, acc), bytes=size))
        variants[OURS] = run
    except Exception as error:  # any, as above; the baselines are measured all the same
        rows.append(replace(blank, note=told(error)))
    expected = also_expected(case, plainly(case, acc)) if case.role and acc is not None else {}
    for baseline in _wanted(case, settings):
        row = replace(blank, variant=baseline.name)
        try:
            call = baseline.prepare()
            rows.append(replace(row, error=_error(baseline, call, expected)))
            variants[baseline.name] = call
        except Exception as error:  # somebody else's kernels may fail in any way; that is a result, too
            rows.append(replace(row, note=told(error)))
    return rows, variants


def _wanted(case: Case, settings: Settings) -> Sequence[Baseline]:
    found = [*baselines_of(case), *peers_of(case, tuned=settings.tuned)]
    return [b for b in found if settings.wants_variant(b.name)]


def _error(baseline: Baseline, call: Call, expected: Mapping[str, Tensor]) -> float | None:
    """The error of a baseline's first call; None where it has nothing to show. Without NaN in fresh memory: that is a
    global state, and what Inductor compiled under it would be compiled again without."""
    with torch.no_grad():
        found = baseline.in_halves(call())
    return compared(baseline.name, found, expected) if found else None


def told(error: Exception) -> str:
    """The first line of an error, with its kind if it is none of ours."""
    first = (str(error).strip().splitlines() or [""])[0]
    return (first if isinstance(error, CodettaError) else f"{type(error).__name__}: {first}")[:300]
