"""Bars in PNG files, drawn from the JSON of a run: time over the base, peak memory, and numeric errors over eager's; of
the layer level also one picture with all its sizes, and of whole models the parts of their steps."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from codetta.bench import profile
from codetta.bench.contenders import BARE as BARE_LAYER
from codetta.bench.report import OURS
from codetta.errors import SettingsError, UnsupportedError
from codetta.testing import geometric_mean

Rows = Sequence[Mapping[str, Any]]
GIB = 2.0**30
WAYS = ("inductor", "codetta")  # whose errors are drawn over eager's
OVERVIEW = "layer.png"
SHOWN = {OURS: "#d1495b", "torch.compile": "#7fa3c7", "Liger": "#b8bec8"}  # who is in the overview
INK = "#333333"
SHARES = {  # of a step, from left to right
    profile.OUR_GEMM: "#d1495b",
    profile.LIBRARY_GEMM: "#e8a0a9",
    profile.ATTENTION: "#7fa3c7",
    profile.OPTIMIZER: "#8fb996",
    profile.OTHER: "#e3c567",
    profile.GAPS: "#dddddd",
}


def draw(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """The charts of one run of a level, or of ``benchmarks/errors.py``; the files that were written."""
    if "results" in found:
        return draw_errors(found, folder)
    if found["level"] == "model":
        return draw_shares(found, folder)
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
    if found["level"] == "layer":
        files += draw_overview(found, folder / OVERVIEW)
    return files


def draw_one(found: Mapping[str, Any], file: Path) -> list[Path]:
    """One picture of a run: of the layer level the overview, of others their chart if they have but one."""
    if found.get("level") == "layer":
        return draw_overview(found, file)
    with TemporaryDirectory() as folder:
        files = draw(found, Path(folder))
        if len(files) > 1:
            raise SettingsError(f"one picture for {', '.join(f.name for f in files)}", hint="give a folder")
        for drawn in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(drawn, file)
    return [file] if files else []


def draw_overview(found: Mapping[str, Any], file: Path) -> list[Path]:
    """How much more or less time than the bare GEMMs each of ``SHOWN`` takes, one panel a case, one group a shape."""
    rows: Rows = [r for r in found["rows"] if r["ratio"] is not None and r["variant"] in SHOWN]
    cases = list(dict.fromkeys(r["case"] for r in rows))
    if not cases:
        return []
    plt = _pyplot()
    figure, panels = plt.subplots(1, len(cases), figsize=(9.6, 3.8), sharey=True, squeeze=False, layout="constrained")
    for axes, case in zip(panels[0], cases, strict=True):
        _panel(axes, case, [r for r in rows if r["case"] == case])
    panels[0][0].set_ylabel("time over the bare cuBLAS GEMMs, %", color=INK)
    handles, labels = panels[0][0].get_legend_handles_labels()
    gpu = found["environment"]["gpu"] or "CPU"
    title = f"one Llama-3 layer between two attentions, {gpu}, bf16; 0 is the GEMMs alone, less is better"
    figure.suptitle(title, fontsize=10, color=INK)
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return _written(figure, file)


def _panel(axes: Any, case: str, rows: Rows) -> None:
    shapes = list(dict.fromkeys((r["shape"], r["tokens"]) for r in rows))
    there = [v for v in SHOWN if any(r["variant"] == v for r in rows)]
    width = 0.8 / len(there)
    for variant in there:
        mine = [r for r in rows if r["variant"] == variant]
        at = [shapes.index((r["shape"], r["tokens"])) + _offset(variant, there) * width for r in mine]
        heights = [100 * (r["ratio"] - 1) for r in mine]
        drawn = axes.bar(at, heights, width * 0.94, label=variant, color=SHOWN[variant])
        weight = "bold" if variant == OURS else "normal"
        axes.bar_label(drawn, fmt="%+.1f", fontsize=8, color=INK, padding=2, fontweight=weight)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xticks(range(len(shapes)), [f"{name.upper()}\n{tokens:,} tokens" for name, tokens in shapes])
    axes.set_title(case, fontsize=10, color=INK, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    axes.margins(y=0.12)


def draw_shares(found: Mapping[str, Any], out: Path, variants: Sequence[str] = ()) -> list[Path]:
    """Where a whole model's step goes: one stacked bar a variant, in milliseconds, parts in per cent; of all variants,
    or of those named, in their order. ``out`` is a folder, or the PNG of a single case."""
    rows: Rows = [r for r in found["rows"] if r["profile"] and (not variants or r["variant"] in variants)]
    cases = list(dict.fromkeys(r["shape"] for r in rows))
    if out.suffix == ".png" and len(cases) > 1:
        raise SettingsError(f"one picture for {len(cases)} cases: {', '.join(cases)}", hint="give a folder")
    files = []
    for case in cases:
        mine = sorted((r for r in rows if r["shape"] == case), key=lambda r: _place(r["variant"], variants))
        figure, axes = _pyplot().subplots(figsize=(9.6, 1.4 + 0.6 * len(mine)), layout="constrained")
        for kind, color in SHARES.items():
            _stack(axes, mine, kind, color)
        for i, r in enumerate(mine):
            axes.text(sum(r["profile"].values()) / 1e3, i, _speed(r), va="center", fontsize=8, color=INK)
        axes.margins(x=0.16)
        axes.set_xlim(left=0)
        axes.set_yticks(range(len(mine)), [r["variant"] for r in mine])
        axes.invert_yaxis()
        axes.set_xlabel("ms a step, profiled", color=INK)
        gpu = found["environment"]["gpu"] or "CPU"
        axes.set_title(f"{case}, {mine[0]['tokens']:,} tokens, {mine[0]['case']}, {gpu}", fontsize=10, color=INK)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(fontsize=8, ncols=len(SHARES), loc="outside lower center", frameon=False)
        files += _written(figure, out if out.suffix == ".png" else out / f"model-{case}.png")
    return files


def _place(variant: str, variants: Sequence[str]) -> int:
    return list(variants).index(variant) if variant in variants else 0


def _speed(r: Mapping[str, Any]) -> str:
    """A step's time where nothing is profiled, and how much faster than the base it is."""
    if not r["median"]:
        return ""
    return f"  {r['median'] / 1e3:,.1f} ms" + (f", {1 / r['ratio']:.2f}x" if r["base"] != r["variant"] else "")


def _stack(axes: Any, rows: Rows, kind: str, color: str) -> None:
    """One kind's part of every bar; those under 4 % get no number."""
    kinds = list(SHARES)
    before = [sum(r["profile"][k] for k in kinds[: kinds.index(kind)]) / 1e3 for r in rows]
    times = [r["profile"][kind] / 1e3 for r in rows]
    drawn = axes.barh(range(len(rows)), times, left=before, label=kind, color=color)
    parts = [r["profile"][kind] / (sum(r["profile"].values()) or 1.0) for r in rows]
    labels = [f"{p:.0%}" if p >= 0.04 else "" for p in parts]
    axes.bar_label(drawn, labels, label_type="center", fontsize=8, color=INK)


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
    figure, axes = plt.subplots(figsize=(_wide(len(cases), len(bars)), 4.8), layout="constrained")
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
    figure.legend(fontsize=7, ncols=min(4, len(bars)), loc="outside lower center", frameon=False)  # hides no label
    return _written(figure, file)


def _written(figure: Any, file: Path) -> list[Path]:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    _pyplot().close(figure)
    return [file]


def _wide(cases: int, variants: int) -> float:
    return max(7.0, 1.4 * cases * max(1.0, variants / 5))


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
