"""Loss curves of a model that was trained in two ways with several seeds: how far apart they are."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
import torch
from rich.table import Table

from codetta.audit.models import Preset

mpl.use("Agg")
from matplotlib import pyplot

OURS = "codetta"
SMOOTH = 20  # losses of so many steps are averaged before they are compared
LAST = 100
SEEDS = 3  # of each way, from which on mean curves are compared
SHOWN = (1, 2, 5, 10, 20, 50, 100, 150, 200, 250, 300, 400, 500, 700, 1000)


@dataclass(frozen=True)
class Subject:
    """A model and the batches that it is trained on: sequences, tokens each."""

    name: str
    preset: Preset
    shape: tuple[int, int]


@dataclass
class Run:
    """One training run."""

    way: str
    seed: int
    losses: list[float] = field(default_factory=list)
    held_out: float | None = None  # until it is finished
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """How tables and pictures call it."""
        return f"{self.way}, seed {self.seed}"


@dataclass(frozen=True)
class Compared:
    """The runs of one model so far, of those that are wanted, and how far they are apart."""

    subject: Subject
    parameters: int
    wanted: tuple[tuple[str, int], ...]
    runs: tuple[Run, ...]

    @property
    def complete(self) -> bool:
        """Whether all runs are finished; else nothing is decided yet."""
        return {(r.way, r.seed) for r in self.runs if r.held_out is not None} == set(self.wanted)

    @property
    def base(self) -> str:
        """The way that codetta is compared with."""
        return next((way for way, _ in self.wanted if way != OURS), OURS)

    def of(self, way: str) -> list[Run]:
        """The runs of one way."""
        return [r for r in self.runs if r.way == way]

    @property
    def same_seed(self) -> list[tuple[Run, Run]]:
        """Codetta's runs, each with the other way's of the same seed."""
        others = {r.seed: r for r in self.of(self.base)}
        return [(r, others[r.seed]) for r in self.of(OURS) if r.seed in others]

    @property
    def two_seeds(self) -> list[tuple[Run, Run]]:
        """All pairs of the other way's runs."""
        return list(itertools.combinations(self.of(self.base), 2))

    @property
    def apart(self) -> list[float]:
        """Smoothed distance of two runs of the same seed, a mean over the seeds, step by step."""
        return distance(self.same_seed)

    @property
    def spread(self) -> list[float]:
        """Smoothed distance of two seeds of the other way, a mean over all pairs, step by step."""
        return distance(self.two_seeds)

    @property
    def means(self) -> tuple[list[float], list[float]]:
        """The distance of the smoothed mean curves, and the range of seeds, a mean over both ways, step by step; empty
        where a way has fewer than ``SEEDS``."""
        curves = [[smooth(r.losses) for r in self.of(way)] for way in (OURS, self.base)]
        if min(map(len, curves)) < SEEDS:
            return [], []
        steps = list(zip(*(zip(*of_way, strict=False) for of_way in curves), strict=False))
        return [abs(fmean(a) - fmean(b)) for a, b in steps], [(span(a) + span(b)) / 2 for a, b in steps]

    @property
    def checks(self) -> dict[str, tuple[float, float]]:
        """What was found, and what it must not exceed; nothing while runs are missing."""
        if not self.complete or not self.same_seed or not self.two_seeds:
            return {}
        name, (found, allowed) = "training loss", (self.apart, self.spread)
        held = tuple(fmean(abs(_judged(a) - _judged(b)) for a, b in p) for p in (self.same_seed, self.two_seeds))
        if self.means[0]:
            name, (found, allowed) = "mean training loss", self.means
            ours, theirs = ([_judged(r) for r in self.of(way)] for way in (OURS, self.base))
            held = abs(fmean(ours) - fmean(theirs)), (span(ours) + span(theirs)) / 2
        return {
            f"{name}, mean over all steps": (fmean(found), fmean(allowed)),
            f"{name}, mean over the last {LAST}": (fmean(found[-LAST:]), fmean(allowed[-LAST:])),
            "loss on held-out text": (held[0], held[1]),
        }

    @property
    def ok(self) -> bool:
        """Whether all of it holds."""
        return bool(self.checks) and all(found <= allowed for found, allowed in self.checks.values())


def _judged(run: Run) -> float:
    return math.nan if run.held_out is None else run.held_out


def span(values: Sequence[float]) -> float:
    """The range."""
    return max(values) - min(values)


def distance(pairs: Sequence[tuple[Run, Run]]) -> list[float]:
    """The distance of two smoothed curves, a mean over pairs; empty where there are none."""
    if not pairs:
        return []
    curves = [[abs(a - b) for a, b in zip(smooth(x.losses), smooth(y.losses), strict=False)] for x, y in pairs]
    return [fmean(at) for at in zip(*curves, strict=False)]


def smooth(values: Sequence[float]) -> list[float]:
    """Each value averaged with those before it, at most ``SMOOTH`` of them."""
    return [fmean(values[max(0, i + 1 - SMOOTH) : i + 1]) for i in range(len(values))]


def table(found: Compared) -> Table:
    """Losses by step, and what they say."""
    p, shape = found.subject.preset, found.subject.shape
    title = (
        f"{found.subject.name}: {found.parameters / 1e6:.1f} M parameters, {p.layers} layers of {p.hidden}, bf16, "
        f"{shape[0]} x {shape[1]} tokens a step"
    )
    apart, spread = found.apart, found.spread
    between = f"|{OURS} - {found.base}|"
    columns = ("loss at step", *(r.name for r in found.runs), between, "between seeds")
    result = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False)
    total = min(len(r.losses) for r in found.runs)
    for step in dict.fromkeys([*(s for s in SHOWN if s < total), total]):
        values = (f"{r.losses[step - 1]:.4f}" for r in found.runs)
        result.add_row(str(step), *values, *(f"{d[step - 1]:.1e}" if d else "" for d in (apart, spread)))
    result.add_row("held-out text", *(f"{_judged(r):.4f}" for r in found.runs))
    return result


def verdicts(results: Sequence[Compared]) -> Table:
    """What was promised, found and allowed."""
    columns = ("", f"{OURS} and the other way are less apart than seeds", "found", "allowed")
    result = Table(*columns, box=None, pad_edge=False)
    for found in results:
        for name, (value, most) in found.checks.items():
            state = "[green]yes[/green]" if value <= most else "[red]NO[/red]"
            result.add_row(state, f"{found.subject.name}: {name}", f"{value:.2e}", f"{most:.2e}")
    return result


def draw(results: Sequence[Compared], path: Path) -> None:
    """A row a model: the curves, and how far apart they are."""
    size = (10, 3.4 * len(results))
    figure, grid = pyplot.subplots(len(results), 2, figsize=size, layout="constrained", dpi=150, squeeze=False)
    for found, (left, right) in zip(results, grid, strict=True):
        for way, color, wide in ((found.base, "#7fa3c7", 3.0), (OURS, "#d1495b", 0.9)):
            for i, r in enumerate(found.of(way)):
                label = f"{way}, {len(found.of(way))} seeds" if i == 0 else None
                left.plot(range(1, len(r.losses) + 1), smooth(r.losses), color=color, lw=wide, label=label)
        left.set(title=f"{found.subject.name}: {found.parameters / 1e6:.0f} M parameters", xlabel="step")
        left.set(ylabel=f"loss (nats per byte), smoothed over {SMOOTH} steps")
        lines = {f"|{OURS} - {found.base}|, same seed": found.apart, f"{found.base}, two seeds": found.spread}
        if found.means[0]:
            lines = {"distance of the mean curves": found.means[0], "range of seeds": found.means[1]}
        for (label, line), color in zip(lines.items(), ("#d1495b", "#7fa3c7"), strict=True):
            right.plot(range(1, len(line) + 1), line, color=color, label=label)
        right.set(title="how far apart they are", xlabel="step", yscale="log")
        for axes in (left, right):
            axes.legend(frameon=False, fontsize=8)
            axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    pyplot.close(figure)


def to_json(results: Sequence[Compared], device: str) -> dict[str, Any]:
    """Everything that was measured, with what it ran on."""
    return {
        "ok": all(r.ok for r in results),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "command": sys.argv,
        "models": [
            {
                "name": found.subject.name,
                "parameters": found.parameters,
                "shape": found.subject.shape,
                "checks": {n: {"found": f, "allowed": a, "ok": f <= a} for n, (f, a) in found.checks.items()},
                "apart": found.apart,
                "spread": found.spread,
                "means_apart": found.means[0],
                "range_of_seeds": found.means[1],
                "runs": [asdict(r) for r in found.runs],
            }
            for found in results
        ],
    }
