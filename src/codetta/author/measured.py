"""A program on a GPU: its values through our own launches, its time next to the bare GEMM and to Inductor's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from codetta.author.bind import Draw
from codetta.author.compare import STORED, Compared, difference
from codetta.author.file import Authored
from codetta.author.inputs import ACC, Given, draw_inputs, product, reference_outputs
from codetta.author.kernels import FORWARD, Kernel, Part
from codetta.backends.reference.evaluate import TORCH
from codetta.bench.baselines import BARE, COPY, baselines_of, inductor
from codetta.bench.check import accumulator, checked, poisoned
from codetta.bench.kernels import told
from codetta.bench.report import OURS
from codetta.bench.steps import Case, case_of, run_whole
from codetta.core.types import ROWS
from codetta.errors import VerifyError
from codetta.ir.program import Program, param_name
from codetta.partition.plan import Plan
from codetta.partition.size import dim
from codetta.runtime.author import OPERANDS
from codetta.timing import Timing, Variant, gemm_filler, measure

BACKEND, DEVICE = "hopper", "cuda"
CHECKED_ROWS = 1001  # odd, and no multiple of a tile
INDUCTOR = "torch.compile"
ROUNDS, SECONDS = 15, 3.0
NEAR = 1.10  # of the bare GEMM's time: what is within it is as fast as its GEMM


@dataclass(frozen=True)
class Measured:
    """A step's time in microseconds, and the bare GEMM's (for one without a GEMM: a copy of as many bytes), with the
    paired ratios; the compiled reference's beside a forward; or why there is none, as of one that ``is_wrong``."""

    program: str
    phase: str
    us: float | None = None
    base: str = BARE
    base_us: float | None = None
    ratio: float | None = None
    compile_us: float | None = None
    limited_by: str = ""
    note: str = ""
    is_wrong: bool = False

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def on_gpu(authored: Authored, program: Program, plan: Plan, sizes: Mapping[str, int]) -> list[Compared]:
    """The program's outputs through the plan's own kernels, at an odd number of rows, against the reference."""
    draw = Draw(CHECKED_ROWS, {n: s for n, s in sizes.items() if n != ROWS.name}, sizes["K"], 0)
    given = draw_inputs(authored, program, draw)
    feed = _as_stored(program, given)
    exact = {n: t.double() if t.is_floating_point() else t for n, t in feed.items()}
    if program.gemm is not None:
        exact = {ACC: product(program.gemm.form, *(exact.pop(n) for n in OPERANDS)), **exact}
    expected = reference_outputs(authored, {param_name(p): exact[param_name(p)] for p in program.params})
    with poisoned():
        memory = run_whole(plan, BACKEND, {n: t.to(DEVICE) for n, t in feed.items()}, CHECKED_ROWS)
    found = []
    for name, view in plan.outputs:
        got = memory[view.buffer].cpu()
        limit = STORED.get(got.dtype, 0.0)
        found.append(Compared(name, "gpu", limit, difference(got, expected[name]), str(draw)))
    return found


def _as_stored(program: Program, given: Given) -> dict[str, Tensor]:
    """The inputs in the dtypes of memory: the operands in the GEMM's, parameters in theirs."""
    dtype = TORCH[program.gemm.dtype] if program.gemm is not None else torch.float32
    params = {param_name(p): p for p in program.params}
    return {n: t.to(TORCH[params[n].type.dtype] if n in params else dtype) for n, t in given.leaves.items()}


def times(
    authored: Authored, program: Program, parts: Sequence[Part], kernels: Sequence[Kernel], rows: int
) -> list[Measured]:
    """Every step of ours timed at its real size; what fails is told, and the next is timed."""
    filler, found = gemm_filler() if DEVICE == "cuda" else None, []
    for part, kernel in zip(parts, kernels, strict=True):
        if kernel.kind in ("library", "failed"):
            continue
        blank = Measured(part.name, part.phase, base=COPY if part.program.gemm is None else BARE)
        try:
            case, feed = _case(part, rows)
            reference = _compiled_reference(authored, program, feed) if part.phase == FORWARD else None
            found.append(_timed(case, kernel, blank, reference, filler))
        except VerifyError as error:
            found.append(replace(blank, note=told(error), is_wrong=True))
        except Exception as error:  # any: what was measured must not be lost
            found.append(replace(blank, note=told(error)))
        torch.cuda.empty_cache()
    return found


def _timed(case: Case, kernel: Kernel, blank: Measured, reference: Variant | None, filler: Variant | None) -> Measured:
    run = case.runner()
    checked(case, run, accumulator(case))
    variants: dict[str, Variant] = {OURS: run, blank.base: next(iter(baselines_of(case))).prepare()}
    note = ""
    if reference is not None:
        try:
            reference()
            variants[INDUCTOR] = reference
        except Exception as error:  # a reference that Inductor does not take is no reason to time nothing
            note = f"{INDUCTOR}: {told(error)}"
    with torch.no_grad():
        timings = measure(variants, rounds=ROUNDS, filler=filler, budget=SECONDS)
    return _measured(blank, kernel, timings, note)


def _measured(blank: Measured, kernel: Kernel, timings: Mapping[str, Timing], note: str) -> Measured:
    ours, base = timings[OURS], timings[blank.base]
    ratio = ours.over(base)
    limited = f"its GEMM: within {NEAR:.2f} of it" if ratio <= NEAR else _reason(kernel)
    other = timings[INDUCTOR].median if INDUCTOR in timings else None
    return replace(
        blank, us=ours.median, base_us=base.median, ratio=ratio, compile_us=other, limited_by=limited, note=note
    )


def _reason(kernel: Kernel) -> str:
    """Beyond its GEMM's time a kernel waits for memory, or does more between two tiles than the next products hide."""
    return "epilogue arithmetic" if kernel.limited_by == "arithmetic" else kernel.limited_by


def _case(part: Part, rows: int) -> tuple[Case, dict[str, Tensor]]:
    """The step, and its plan's inputs, random: GEMMs of numbers of about one give such numbers, as in models. Parts of
    reductions are made by the steps before it."""
    plan = part.plan
    random = torch.Generator(DEVICE).manual_seed(0)
    gemms = [(s.program.gemm, s.b) for s in plan.steps if s.program.gemm is not None]
    scales = {name: gemm.k**-0.5 for gemm, b in gemms for name in b if isinstance(gemm.k, int)}
    feed = {}
    for name in plan.inputs:
        t = plan.buffers[name]
        shape = [dim(d, rows) for d in (t.rows, t.cols) if d is not None]
        if t.dtype.is_float:
            x = torch.randn(shape, generator=random, device=DEVICE) * scales.get(name, 1.0)
            feed[name] = x.to(TORCH[t.dtype])
            if t.rows is not None and t.cols is None:
                feed[name] = feed[name].abs() + 0.5
        else:
            feed[name] = torch.randint(0, 8, shape, generator=random, device=DEVICE).to(TORCH[t.dtype])
    memory = run_whole(plan, BACKEND, feed, rows)
    return case_of(plan, part.step, memory, rows, BACKEND, part.name), feed


def _compiled_reference(authored: Authored, program: Program, feed: Mapping[str, Tensor]) -> Variant:
    """The reference behind its GEMM as ``torch.compile`` makes it, storing what the program stores."""
    dtypes = {name: TORCH[n.type.dtype] for name, n in program.outputs}
    form = program.gemm.form if program.gemm is not None else ""

    def call(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        params = dict(given)
        acc = {ACC: product(form, *(params.pop(n) for n in OPERANDS))} if form else {}
        found = authored.reference(**acc, **params)
        found = {"out": found} if isinstance(found, Tensor) else found
        return {n: t.to(dtypes[n]) for n, t in found.items()}

    fast = inductor(call, DEVICE == "cuda")
    return lambda: fast(feed)
