"""What was measured: one row a variant, kept on disk from the first on; as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from codetta.bench.environment import environment
from codetta.timing import Timing

OURS = "codetta"


@dataclass(frozen=True)
class Row:
    """One variant of one case: its times in microseconds, its paired ratio to the case's base, its largest error
    against float64, the peak memory in bytes above its inputs, and why there is something that is not there."""

    level: str
    shape: str
    tokens: int
    case: str
    variant: str
    median: float | None = None
    p10: float | None = None
    p90: float | None = None
    rounds: int = 0
    base: str = ""
    ratio: float | None = None
    error: float | None = None
    peak: int | None = None
    bytes: int | None = None
    note: str = ""
    load: dict[str, float] = field(default_factory=dict)

    @property
    def bandwidth(self) -> float | None:
        """GB/s of what a step without a GEMM moves."""
        return self.bytes / self.median / 1e3 if self.bytes and self.median else None


@dataclass
class Report:
    """The rows of a run. ``seconds`` is the time that the run may take: afterwards no case is begun."""

    level: str
    out: Path | None = None
    seconds: float | None = None
    rows: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=environment)
    begin: float = field(default_factory=monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return monotonic() - self.begin

    @property
    def file(self) -> Path | None:
        """Where the JSON goes."""
        return self.out / f"{self.level}.json" if self.out else None

    def has_time(self, case: str) -> bool:
        """Whether a case may still begin; one that may not is noted."""
        if self.seconds is None or self.elapsed < self.seconds:
            return True
        self.skipped.append(case)
        return False

    def add(self, *rows: Row) -> None:
        """Keep rows, on disk too."""
        self.rows += rows
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            other = self.file.with_suffix(".new")  # a run that is cut off leaves the file as it was or as it is
            other.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
            other.replace(self.file)

    @property
    def ok(self) -> bool:
        """Whether everything of ours was right and was measured."""
        return not any(r.note for r in self.rows if r.variant.startswith(OURS))

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        rows = [{**asdict(r), "bandwidth": r.bandwidth} for r in self.rows]
        return {
            "level": self.level,
            "ok": self.ok,
            "environment": self.environment,
            "seconds": round(self.elapsed, 1),
            "skipped": self.skipped,
            "rows": rows,
        }

    def __rich__(self) -> RenderableType:
        e = self.environment
        head = f"{e['gpu'] or 'no GPU: wall times of a CPU'}, torch {e['torch']}, commit {e['commit']}, {e['date']}"
        tables = [_table(shape, [r for r in self.rows if r.shape == shape and r.median]) for shape in self.shapes]
        left = [f"[red]no time left for: {escape(', '.join(self.skipped))}[/red]"] if self.skipped else []
        return Group(head, *tables, *self._absent(), *left, f"{self.elapsed:.0f} s")

    def _absent(self) -> list[str]:
        """What was not measured, each reason once."""
        found: dict[tuple[str, str], list[str]] = {}
        for r in self.rows:
            if r.note:
                found.setdefault((r.variant, r.note), []).append(f"{r.shape} {r.case}")
        lines = [(f"no {v}: {note}", places) for (v, note), places in found.items()]
        return [
            f"[red]{escape(text)}[/red] ({escape(places[0])}{f' and {len(places) - 1} more' if places[1:] else ''})"
            for text, places in lines
        ]

    @property
    def shapes(self) -> list[str]:
        """In order of appearance."""
        return list(dict.fromkeys(r.shape for r in self.rows))


def timed(row: Row, timings: Mapping[str, Timing], base: str, load: dict[str, float]) -> Row:
    """A row with its variant's times, held against the base in the same rounds."""
    t = timings[row.variant]
    ratio = t.over(timings[base]) if base in timings else None
    times = {"median": t.median, "p10": t.p10, "p90": t.p90, "rounds": len(t.samples)}
    known = {**asdict(row), **times, "base": base if ratio is not None else "", "ratio": ratio, "load": load}
    return Row(**known)


def _table(shape: str, rows: list[Row]) -> Table:
    columns = ["case", "variant", "median us", "p10 to p90", "over base", "error"]
    has_peak, has_bytes = any(r.peak for r in rows), any(r.bandwidth for r in rows)
    columns += ["peak GiB"] * has_peak + ["GB/s"] * has_bytes
    title = f"\n{shape}, {rows[0].tokens:,} tokens" if rows else ""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, no_wrap=True, justify="left" if i < 2 else "right")
    previous = ""
    for r in rows:
        cells = ["" if r.case == previous else r.case, r.variant, as_text(r.median, ",.1f"), _spread(r)]
        cells += [as_text(r.ratio, ".3f"), as_text(r.error, ".1e")]
        cells += [as_text(r.peak and r.peak / 2**30, ".2f")] * has_peak + [as_text(r.bandwidth, ",.0f")] * has_bytes
        style = "bold" if r.variant.startswith(OURS) else None
        table.add_row(*(escape(c) for c in cells), style=style)
        previous = r.case
    return table


def as_text(value: float | None, form: str) -> str:
    """A number in that form; nothing where there is none."""
    return "" if value is None else format(value, form)


def _spread(r: Row) -> str:
    return "" if r.p10 is None or r.p90 is None else f"{r.p10:,.1f} to {r.p90:,.1f}"
