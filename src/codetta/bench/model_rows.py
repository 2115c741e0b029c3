"""Rows, tables and JSON of whole models: rates, first steps, the state of the card, and where the time goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from codetta.bench.model_run import Found
from codetta.bench.profile import GEMMS, OTHER, SHARES
from codetta.bench.report import Report, Row, as_text
from codetta.partition.cost import MACHINES
from codetta.timing import Timing


@dataclass(frozen=True)
class ModelRow(Row):
    """A whole step. ``error`` is the first loss's difference from eager's, over that; ``peak`` counts all memory;
    first steps are seconds; ``profile`` and ``bare``, the model's GEMMs by cuBLAS, are microseconds a step, and
    ``samples`` in the order of rounds."""

    tokens_per_second: float | None = None
    tflops: float | None = None
    first_step: float | None = None
    cold_first_step: float | None = None
    profile: dict[str, float] = field(default_factory=dict)
    bare: float | None = None
    samples: tuple[float, ...] = ()
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

    def renew(self, shape: str, rows: Sequence[ModelRow]) -> None:
        """Put these in the place of all that was known of a case, on disk too."""
        self.rows = [r for r in self.rows if r.shape != shape]
        self.add(*rows)

    def to_json(self) -> dict[str, Any]:
        """As JSON; model FLOPs utilisation is a row's TFLOP/s over ``rate``."""
        return {**super().to_json(), "rate": self.rate}


# --- rows -------------------------------------------------------------------------------------------------------------


def rows_of(
    blank: ModelRow, before: Sequence[ModelRow], found: Found, reference: Found, cold: Found | None
) -> list[ModelRow]:
    """A row for each way in which steps were timed, the whole step first; one row if none was. First steps are told
    where they were taken alone: where there is a ``cold`` one beside them."""
    told_of = replace(
        blank,
        error=abs(found.loss / reference.loss - 1) if found.loss and reference.loss else None,
        peak=found.peak,
        note=found.note or (cold.note if cold else ""),
        load=_medians(found.load),
        first_step=found.first_step if cold else None,
        cold_first_step=cold.first_step if cold else None,
        profile=found.profile,
        bare=found.bare,
        found=asdict(found),
    )
    silent = replace(blank, load=told_of.load)  # what belongs to the process is told once
    rows = [told_of if i == 0 else silent for i in range(max(1, len(found.samples)))]
    return [
        _timed(replace(row, case=way), Timing(tuple(samples)), found.flops, before)
        for row, (way, samples) in zip(rows, found.samples.items(), strict=False)
    ] or rows


def _medians(load: Sequence[dict[str, float]]) -> dict[str, float]:
    """The state of the card over all turns."""
    return {name: median(turn[name] for turn in load if name in turn) for turn in load[:1] for name in turn}


def _timed(row: ModelRow, timing: Timing, flops: float, before: Iterable[ModelRow]) -> ModelRow:
    base = next((r for r in before if r.case == row.case and r.samples), None)
    return replace(
        row,
        samples=timing.samples,
        median=timing.median,
        p10=timing.p10,
        p90=timing.p90,
        rounds=len(timing.samples),
        base=base.variant if base else row.variant,
        ratio=_paired(timing.samples, base.samples) if base else 1.0,
        tokens_per_second=row.tokens / timing.median * 1e6,
        tflops=flops / timing.median / 1e6,
    )


def _paired(ours: Sequence[float], base: Sequence[float]) -> float:
    """By steps of the same round; a round that only one of them has does not count."""
    both = min(len(ours), len(base))
    return Timing(tuple(ours[:both])).over(Timing(tuple(base[:both])))


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
