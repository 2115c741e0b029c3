"""The model level: whole training runs of unmodified models, each contender in a fresh process, one after the other.

What a process does and in which order is told in ``model_run``. Contenders do not share rounds, as they do elsewhere: a
process holds a card's memory and its caches alone. So what is compared are medians, and a difference of 1.5 % is noise.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from codetta.bench.kernels import Settings
from codetta.bench.model_cases import case_named, contenders_named
from codetta.bench.model_run import FORWARD_BACKWARD, FULL, LOSS_LIMIT, Asked, Found
from codetta.bench.profile import GEMMS, OTHER, SHARES
from codetta.bench.report import OURS, Report, Row, as_text
from codetta.partition.cost import MACHINES
from codetta.timing import Timing

LEVEL = "model"
STEPS = 15
LONGEST = 900.0  # seconds that a process may take if there is no budget
SHORTEST = 60.0  # and that it gets at least, once it has begun


@dataclass(frozen=True)
class Chosen:
    """What is asked of this level: cases, timed steps, the backend's options of ours, and whether first steps are
    also taken with empty caches."""

    cases: tuple[str, ...]
    steps: int = STEPS
    options: dict[str, Any] = field(default_factory=dict)
    cold: bool = False

    @property
    def our_name(self) -> str:
        """Codetta, with the options that it got."""
        return ", ".join([OURS, *(f"{name}={value}" for name, value in self.options.items())])


@dataclass(frozen=True)
class ModelRow(Row):
    """A whole step. ``error`` is the first loss's difference from eager's, over that; ``peak`` counts all memory;
    first steps are seconds; ``profile`` and ``bare``, the model's GEMMs by cuBLAS, are microseconds a step."""

    tokens_per_second: float | None = None
    tflops: float | None = None
    first_step: float | None = None
    cold_first_step: float | None = None
    profile: dict[str, float] = field(default_factory=dict)
    bare: float | None = None
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def gemms_over_bare(self) -> float | None:
        """All GEMM kernels of the profile over the same GEMMs by cuBLAS."""
        return sum(self.profile[k] for k in GEMMS) / self.bare if self.bare and self.profile else None

    def part(self, kind: str) -> float:
        """Of the profiled step, between nothing and one."""
        return self.profile[kind] / (sum(self.profile.values()) or 1.0)


@dataclass
class ModelReport(Report):
    """A report that also says where the time goes."""

    def __rich__(self) -> RenderableType:
        rows = [r for r in self.rows if isinstance(r, ModelRow) and r.profile]
        tables = [_speed(rows, self.rate), _shares(rows)] if rows else []
        return Group(super().__rich__(), *tables)

    @property
    def rate(self) -> float | None:
        """Dense bf16 FLOP/s of the GPU by its datasheet."""
        gpu = self.environment["gpu"] or ""
        return next((m.flops for name, m in MACHINES.items() if name in gpu), None)

    def to_json(self) -> dict[str, Any]:
        """As JSON; model FLOPs utilisation is a row's TFLOP/s over ``rate``."""
        return {**super().to_json(), "rate": self.rate}


def model(chosen: Chosen, settings: Settings, report: Report) -> None:
    """Measure all contenders on all cases."""
    wanted = contenders_named(settings.variants)
    for case in [case_named(name) for name in chosen.cases]:
        measured: list[ModelRow] = []
        for contender in wanted:
            if report.has_time(f"{case.name} {contender}"):
                settings.tell(f"{case.name}: {contender}")
                options = chosen.options if contender == OURS else {}
                asked = Asked(case.name, contender, chosen.steps, settings.device, options)
                name = contender if contender != OURS else chosen.our_name
                blank = ModelRow(LEVEL, case.name, case.tokens, FULL if case.optimizer else FORWARD_BACKWARD, name)
                rows = _rows(blank, measured, *_both(asked, chosen.cold, report))
                measured += rows
                report.add(*rows)


# --- the process ------------------------------------------------------------------------------------------------------


def _both(asked: Asked, cold: bool, report: Report) -> tuple[Found, Found | None]:
    """What the process found, and if wanted what another found before, which began with empty caches."""
    if not cold:
        return ask(asked, (), _seconds(report)), None
    with tempfile.TemporaryDirectory() as folder:
        first = ask(replace(asked, first=True), caches_in(folder), _seconds(report))
        return ask(asked, caches_in(folder), _seconds(report)), first


def _seconds(report: Report) -> float:
    return LONGEST if report.seconds is None else max(report.seconds - report.elapsed, SHORTEST)


def caches_in(folder: str) -> tuple[str, ...]:
    """Settings of the environment with which everything that is compiled is kept in a folder."""
    places = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "CODETTA_CACHE_DIR": "codetta"}
    return tuple(f"{name}={Path(folder) / place}" for name, place in places.items())


def ask(asked: Asked, environment: Sequence[str], seconds: float) -> Found:
    """What the last line of a fresh process says; if it is ended or dies, with a note."""
    path = f"PYTHONPATH={os.pathsep.join(p for p in sys.path if p)}"
    command = ["env", path, *environment, sys.executable, "-m", "codetta.bench.model_run", json.dumps(asdict(asked))]
    with tempfile.TemporaryFile("w+") as log:
        # a session of its own, so that the compilers that it started end with it
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
        try:
            said, _ = process.communicate(timeout=seconds)
            late = False
        except subprocess.TimeoutExpired:
            _end(process)
            said, _ = process.communicate()
            late = True
        finally:
            _end(process)
        found = _last(said)
        if late:
            found.note = f"ended after {seconds:.0f} s"
        elif process.returncode and not found.note:
            log.seek(0)
            lines = log.read().strip().splitlines()
            found.note = f"the process ended with {process.returncode}: {lines[-1] if lines else ''}"[:300]
    return found


def _end(process: subprocess.Popen[str]) -> None:
    """The process and all that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _last(said: str) -> Found:
    for line in reversed(said.splitlines()):
        with suppress(json.JSONDecodeError, TypeError):
            return Found(**json.loads(line))
    return Found()


# --- rows -------------------------------------------------------------------------------------------------------------


def _rows(blank: ModelRow, before: Sequence[ModelRow], found: Found, cold: Found | None) -> list[ModelRow]:
    """A row for each way in which steps were timed, the whole step first; one row if none was."""
    told_of = replace(
        blank,
        error=abs(found.loss / found.eager_loss - 1) if found.loss and found.eager_loss else None,
        peak=found.peak,
        note=found.note or (cold.note if cold else "") or _other_model(found, before),
        load=found.load,
        first_step=found.first_step,
        cold_first_step=cold.first_step if cold else None,
        profile=found.profile,
        bare=found.bare,
        found=asdict(found),
    )
    silent = replace(blank, load=found.load)  # what belongs to the process is told once
    rows = [told_of if i == 0 else silent for i in range(max(1, len(found.samples)))]
    return [
        _timed(replace(row, case=way), Timing(tuple(samples)), found.flops, before)
        for row, (way, samples) in zip(rows, found.samples.items(), strict=False)
    ] or rows


def _other_model(found: Found, before: Iterable[ModelRow]) -> str:
    """Why the processes did not train the same model, if so."""
    for eager in (r.found.get("eager_loss") for r in before):
        if eager and found.eager_loss and abs(found.eager_loss / eager - 1) > LOSS_LIMIT:
            return f"eager's first loss is {found.eager_loss:.6g} here and was {eager:.6g}: another model"
    return ""


def _timed(row: ModelRow, timing: Timing, flops: float, before: Iterable[ModelRow]) -> ModelRow:
    base = next((r for r in before if r.case == row.case and r.median), None)
    return replace(
        row,
        median=timing.median,
        p10=timing.p10,
        p90=timing.p90,
        rounds=len(timing.samples),
        base=base.variant if base else row.variant,
        ratio=timing.median / base.median if base and base.median else 1.0,
        tokens_per_second=row.tokens / timing.median * 1e6,
        tflops=flops / timing.median / 1e6,
    )


# --- tables -----------------------------------------------------------------------------------------------------------


def _speed(rows: Sequence[ModelRow], rate: float | None) -> Table:
    """Rates, first steps, and the state of the card."""
    columns = ("case", "variant", "ms", "tokens/s", "TFLOP/s", "MFU", "first step s", "empty caches", "MHz", "W")
    table = _table("Speed", columns)
    for r in rows:
        used = r.tflops * 1e12 / rate if r.tflops and rate else None
        cells = [as_text(r.median and r.median / 1e3, ",.1f"), as_text(r.tokens_per_second, ",.0f")]
        cells += [as_text(r.tflops, ",.0f"), as_text(used, ".1%")]
        cells += [as_text(r.first_step, ".1f"), as_text(r.cold_first_step, ".1f")]
        cells += [as_text(r.load.get(name), ",.0f") for name in ("clocks.sm", "power.draw")]
        table.add_row(r.shape, r.variant, *cells)
    return table


def _shares(rows: Sequence[ModelRow]) -> Table:
    """Milliseconds of a profiled step, by kind."""
    table = _table("Profiled steps, ms", ("case", "variant", *SHARES, "others' share", "GEMMs over cuBLAS"))
    for r in rows:
        times = (f"{r.profile[kind] / 1e3:,.1f}" for kind in SHARES)
        table.add_row(r.shape, r.variant, *times, f"{r.part(OTHER):.1%}", as_text(r.gemms_over_bare, ".3f"))
    return table


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", box=None, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < 2 else "right")
    return table
