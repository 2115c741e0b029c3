"""Programs on random tensors of a GPU: compiled with any configuration, compared with the reference, timed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codetta.backends.hopper.binary import resources
from codetta.backends.hopper.build import in_workers, object_file
from codetta.backends.hopper.gemm import Job, columns, compiled, job_with, launch, operand, reduced, sink_shape, values
from codetta.backends.hopper.rounding import once
from codetta.backends.hopper.stages import stages_of
from codetta.backends.hopper.steps import matmul
from codetta.backends.hopper.tune import Case, Made, Pick, Times
from codetta.backends.reference.evaluate import TORCH
from codetta.backends.reference.execute import compile_body
from codetta.backends.reference.tiles import fold
from codetta.core.types import Kind, Type
from codetta.ir.program import Program, is_partial
from codetta.timing import Timing, Variant, gemm_filler, measure, measure_alone

CHECKED_ROWS = 1001  # odd, and no multiple of a tile
TILE_ERROR = 1e-2  # of a 16-bit output, relative: rounding alone gives 2e-3 in bf16
SUM_ERROR = 2e-3
MEMORY = 0.4  # the part of the GPU's memory that programs timed side by side may take
Progress = Callable[[str, int, int], None]  # what is done, how many, of how many


class Trial:
    """One program's operands and outputs at a number of rows."""

    def __init__(self, case: Case, rows: int, device: str = "cuda") -> None:
        self.case, self.rows, self.device = case, rows, device
        self.random = torch.Generator(device).manual_seed(0)
        program, gemm = case.program, case.program.gemm
        acc = program.params[0].type
        n, m = case.lowered.cols, acc.rows if isinstance(acc.rows, int) else rows
        k = gemm.k if gemm is not None and isinstance(gemm.k, int) else rows
        self.form, dtype = (gemm.form, TORCH[gemm.dtype]) if gemm is not None else ("nt", torch.bfloat16)
        self.a = self._normal((k, m) if self.form == "tn" else (m, k), dtype).mul_(k**-0.5)
        self.b = self._normal((n, k) if self.form == "nt" else (k, n), dtype)
        self.loads = [self.a, *(self._operand(p.type, n) for p in program.params[1:])]
        self.sinks = {s.output: s for s in case.lowered.sinks}
        stored = {i: node.type for i, (_, node) in enumerate(program.outputs) if i not in self.sinks}
        self.tiles = {
            i: torch.empty(m, columns(t.cols), dtype=TORCH[t.dtype], device=device) for i, t in stored.items()
        }

    def _normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.randn(tuple(shape), generator=self.random, dtype=dtype, device=self.device)

    def _operand(self, t: Type, columns: int) -> Tensor:
        shape = [d if isinstance(d, int) else self.rows for d in (t.rows, t.cols) if d is not None]
        if not t.dtype.is_float:
            return torch.randint(0, columns, shape, generator=self.random, device=self.device).to(TORCH[t.dtype])
        x = self._normal(shape, torch.float32)
        return (0.5 + x.abs() if t.kind in (Kind.ROWVEC, Kind.COLVEC) else x).to(TORCH[t.dtype])

    def ours(self, job: Job) -> tuple[Callable[[], object], list[Tensor]]:
        """The launch of a kernel, and what it writes."""
        places = range(len(self.case.program.outputs))
        outputs = [self.tiles[i] if i in self.tiles else self._sink(i, job) for i in places]
        plan, a = compiled(job), operand(self.form, self.a)
        arguments = values(job, self.loads, outputs)
        return lambda: launch(plan, a, self.b, arguments), outputs

    def _sink(self, i: int, job: Job) -> Tensor:
        sink, node = self.sinks[i], self.case.program.outputs[i][1]
        shape = sink_shape(job.lowered, sink, node, self.rows, job.config)
        return torch.full(shape, 0.0 if sink.kind == "select" else float("nan"), device=self.device)

    def library(self) -> Callable[[], object]:
        """The library's bare GEMM of the same operands, its result in their dtype."""
        return lambda: matmul(self.form, self.a, self.b, self.a.dtype)

    def errors(self, job: Job) -> Iterator[tuple[bool, float]]:
        """Of each output, whether it is a Tile, and its relative error against the reference's."""
        run, outputs = self.ours(job)
        for t in self.tiles.values():
            t.fill_(float("nan"))
        run()
        for i, (_, node) in enumerate(self.case.program.outputs):
            got = reduced(job, self.sinks[i], outputs[i]) if i in self.sinks else outputs[i]
            x, want = (fold(node, got) if is_partial(node) else got).double(), self.wanted[i].double()
            yield node.type.kind is Kind.TILE, float((x - want).norm() / want.norm())

    @cached_property
    def wanted(self) -> list[Tensor]:
        """The reference's outputs, folded."""
        program = self.case.program
        acc = matmul(self.form, self.a, self.b, torch.float32)
        known = [t.float() if t.is_floating_point() else t for t in self.loads[1:]]
        found = compile_body(program)([acc, *known], self.rows)
        return [fold(n, x) if is_partial(n) else x for (_, n), x in zip(program.outputs, found, strict=True)]

    @property
    def bytes(self) -> int:
        """The memory that it takes, with one more output for the library."""
        held = [self.a, self.b, *self.loads[1:], *self.tiles.values()]
        return sum(t.nbytes for t in held) + max((t.nbytes for t in self.tiles.values()), default=0)


class Gpu:
    """The ``Bench`` of a real GPU. ``progress`` hears of each kernel compiled and each round timed."""

    def __init__(self, progress: Progress = lambda *_: None) -> None:
        self.progress = progress
        self.made: dict[Path, Made] = {}
        self.wrong: list[str] = []
        self._checked: dict[tuple[Path, Program], bool] = {}
        self._checks: dict[Program, Trial] = {}

    @cached_property
    def _filler(self) -> Variant:
        return gemm_filler()

    def compile(self, picks: Sequence[Pick], seconds: float) -> Mapping[Pick, Made]:
        """Kernels that are the same object are compiled once; all cores are used."""
        files = {pick: _file(_job(pick)) for pick in picks}
        wanted = {file: _job(pick) for pick, file in files.items() if not file.is_file()}
        done = count(1)
        in_workers(
            list(wanted.values()),
            lambda job: self.progress("compiling", next(done), len(wanted)),
            workers=os.cpu_count() or 1,
            seconds=seconds,
        )
        fresh = [f for f in dict.fromkeys(files.values()) if f.is_file() and f not in self.made]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            self.made.update(zip(fresh, pool.map(_made, fresh), strict=True))
        return {pick: self.made[file] for pick, file in files.items() if file in self.made}

    def right(self, pick: Pick) -> bool:
        """Compared at an odd number of rows. What is wrong or fails to launch is told and dropped."""
        case, config = pick
        place = _file(_job(pick)), case.program
        if place not in self._checked:
            if case.program not in self._checks:
                self._checks[case.program] = Trial(case, CHECKED_ROWS)
            self._checked[place] = self._right(self._checks[case.program], _job(pick), f"{case.program.name} {config}")
        return self._checked[place]

    def _right(self, trial: Trial, job: Job, name: str) -> bool:
        try:
            found = list(trial.errors(job))
        except (RuntimeError, ValueError, TypeError) as error:
            self.wrong.append(f"{name}: {error}")
            return False
        bad = [e for tile, e in found if not e <= (TILE_ERROR if tile else SUM_ERROR)]
        if bad:
            self.wrong.append(f"{name}: relative errors {', '.join(f'{e:.1e}' for e in bad)}")
        return not bad

    def time(self, picks: Sequence[Pick], rounds: int, seconds: float) -> Times:
        """Side by side, behind a filler."""
        return self._by_groups(picks, seconds, partial(measure, rounds=rounds, filler=self._filler))

    def time_alone(self, picks: Sequence[Pick], rounds: int, seconds: float) -> Times:
        """Each over and over."""
        return self._by_groups(picks, seconds, partial(measure_alone, rounds=rounds))

    def _by_groups(self, picks: Sequence[Pick], seconds: float, take: Callable[..., dict[str, Timing]]) -> Times:
        """As many programs at once as the memory holds."""
        found: Times = {}
        self._checks.clear()
        cases = list(dict.fromkeys(case for case, _ in picks))
        total, place = len(picks), 0
        while place < len(cases):
            trials: dict[Case, Trial] = {}
            limit = MEMORY * torch.cuda.get_device_properties(0).total_memory
            while place < len(cases) and sum(t.bytes for t in trials.values()) < limit:
                trials[cases[place]] = Trial(cases[place], cases[place].tokens)
                place += 1
            group = [p for p in picks if p[0] in trials]
            runs = {str(i): _run(trials[case], config) for i, (case, config) in enumerate(group)}
            told = partial(self.progress, f"timing {len(group)} kernels")
            with once():
                timed = take(runs, budget=seconds * len(group) / total, progress=told)
            found |= {pick: timed[str(i)].median for i, pick in enumerate(group)}
            del trials, runs
            torch.cuda.empty_cache()
        return found


def _run(trial: Trial, config: Any) -> Callable[[], object]:
    return trial.library() if config is None else trial.ours(_job((trial.case, config)))[0]


def _made(file: Path) -> Made:
    return Made(resources(file).spill_stores, stages_of(file))


@cache
def _file(job: Job) -> Path:
    return object_file(job)


def _job(pick: Pick) -> Job:
    case, config = pick
    if config is None:
        raise ValueError("the library's GEMM is not compiled")
    return job_with(case.program, case.lowered, config)
