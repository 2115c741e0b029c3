"""Bars in PNG files, drawn from the JSON of a run: time over the base, peak memory, and numeric errors over eager's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from codetta.bench.contenders import BARE as BARE_LAYER
from codetta.bench.report import OURS
from codetta.errors import UnsupportedError
from codetta.testing import geometric_mean

Rows = Sequence[Mapping[str, Any]]
GIB = 2.0**30
WAYS = ("inductor", "codetta")  # whose errors are drawn over eager's


def draw(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """The charts of one run of a level; the files that were written."""
    rows: Rows = [r for r in found["rows"] if r["median"] is not None]
    files = []
    for shape in dict.fromkeys(r["shape"] for r in rows):
        mine = [r for r in rows if r["shape"] == shape]
        for base in dict.fromkeys(r["base"] for r in mine if r["base"]):
            of_base = [r for r in mine if r["base"] == base]
            name = f"{found['level']}-{shape}-over-{base}".replace(" ", "-").replace(".", "-")
            title = f"{shape}, {mine[0]['tokens']:,} tokens, {found['environment']['gpu'] or 'CPU'}"
            bars = _bars(of_base, lambda r: r["ratio"], without=base)
            files += _save(bars, title, f"time over {base}", folder / f"{name}.png", line=1.0)
        peaks = _bars([r for r in mine if r["peak"]], lambda r: r["peak"] / GIB, without=BARE_LAYER)
        files += _save(peaks, f"{shape}: peak memory", "GiB above the inputs", folder / f"memory-{shape}.png")
    return files


def draw_errors(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """Numeric errors over eager's by size, from the JSON of ``benchmarks/errors.py``."""
    files = []
    for part in dict.fromkeys(r["part"] for r in found["results"]):
        results = [r for r in found["results"] if r["part"] == part]
        bars = {
            way: {f"{r['layer']}, {r['tokens']:,}: {g}": e[way] / e["eager"] for r in results for g, e in _groups(r)}
            for way in WAYS
        }
        title = f"{part}: error against float64, {found['device']}"
        files += _save(bars, title, "error over eager's", folder / f"errors-{part}.png", line=1.0)
    return files


def _groups(result: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, float]]]:
    """Each group's errors, and the geometric mean of all; what eager has exactly right cannot be divided by."""
    known = {g: e for g, e in result["groups"].items() if all(e[w] > 0 for w in ("eager", *WAYS))}
    yield from known.items()
    if known:
        yield "all", {w: geometric_mean(e[w] for e in known.values()) for w in ("eager", *WAYS)}


def _bars(rows: Rows, value: Any, *, without: str) -> dict[str, dict[str, float]]:
    """A value by variant, then by case."""
    variants = [v for v in dict.fromkeys(r["variant"] for r in rows) if v != without]
    return {v: {r["case"]: value(r) for r in rows if r["variant"] == v} for v in variants}


def _save(
    bars: Mapping[str, Mapping[str, float]], title: str, label: str, file: Path, line: float | None = None
) -> list[Path]:
    """One group of bars a case, one colour a variant, ours black; nothing if there is nothing to draw."""
    cases = list(dict.fromkeys(case for of_case in bars.values() for case in of_case))
    if not cases:
        return []
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(max(7.0, 1.4 * len(cases) * max(1.0, len(bars) / 5)), 4.5))
    width = 0.8 / len(bars)
    for variant, of_case in bars.items():
        at = [cases.index(case) + _offset(variant, [v for v in bars if case in bars[v]]) * width for case in of_case]
        heights = list(of_case.values())
        drawn = axes.bar(at, heights, width, label=variant, color="black" if variant == OURS else None)
        axes.bar_label(drawn, fmt="%.2f", fontsize=6, rotation=90, padding=2)
    if line is not None:
        axes.axhline(line, color="gray", linewidth=0.8)
    axes.set_xticks(range(len(cases)), cases, rotation=25, ha="right", fontsize=8)
    axes.set_ylabel(label)
    axes.set_title(title, fontsize=10)
    axes.margins(y=0.15)
    axes.legend(fontsize=7, ncols=3)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    plt.close(figure)
    return [file]


def _offset(variant: str, there: Sequence[str]) -> float:
    """How many bars right of the middle of its group a bar stands: those that are there stand side by side."""
    return there.index(variant) - (len(there) - 1) / 2


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UnsupportedError("charts are drawn with matplotlib", hint="pip install 'codetta[bench]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
