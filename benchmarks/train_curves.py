"""Trains a tiny and a larger Llama in bfloat16 on real text, eager and through codetta, and compares the loss curves.

All runs of a model see the same batches. Runs of one seed start from the same weights, so what lies between eager and
codetta is rounding; what lies between two seeds of eager is chance. The first should be below the second.

    python benchmarks/train_curves.py --out benchmarks/results
    python benchmarks/train_curves.py --out /tmp/curves --device cpu --small
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import matplotlib as mpl
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from codetta.audit.corpus import Corpus, standard_library
from codetta.audit.models import PRESETS, Preset, random_model
from codetta.audit.runs import many_compilations
from codetta.capture.backend import backend

mpl.use("Agg")
from matplotlib import pyplot

RATE, WARM_UP, CLIP, BETAS, DECAY = 1e-3, 20, 1.0, (0.9, 0.95), 0.1  # the demo's recipe
RUNS = (("eager", 0), ("codetta", 0), ("eager", 1), ("eager", 2), ("codetta", 1))
SMOOTH = 20  # losses of so many steps are averaged before they are compared
JUDGED = 32  # windows of held-out text
LAST = 100
SHOWN = (1, 2, 5, 10, 20, 50, 100, 150, 200, 250, 300)


@dataclass(frozen=True)
class Subject:
    """A model and the batches that it is trained on: sequences, tokens each."""

    name: str
    preset: Preset
    shape: tuple[int, int]


SUBJECTS = (
    Subject("llama-tiny", PRESETS["llama-tiny"], (8, 512)),
    Subject("llama-100m", Preset(9, 1024, 2816, 16, 8, 64, 256, tied=False, theta=1e4), (8, 512)),
)
SMALL = (
    Subject("llama-tiny", PRESETS["llama-tiny"], (2, 64)),
    Subject("llama-100m, cut down", Preset(2, 192, 528, 3, 3, 64, 256, tied=False, theta=1e4), (2, 64)),
)


@dataclass
class Run:
    """One training run."""

    way: str
    seed: int
    losses: list[float] = field(default_factory=list)
    held_out: float = float("nan")
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """How tables and pictures call it."""
        return f"{self.way}, seed {self.seed}"


@dataclass(frozen=True)
class Compared:
    """The runs of one model, and how far they are apart."""

    subject: Subject
    parameters: int
    runs: tuple[Run, ...]

    def of(self, way: str, seed: int) -> Run:
        """One of the runs."""
        return next(r for r in self.runs if (r.way, r.seed) == (way, seed))

    @property
    def apart(self) -> list[float]:
        """Smoothed |codetta - eager| of the same seed, a mean over the seeds that both have, step by step."""
        seeds = [r.seed for r in self.runs if r.way == "codetta"]
        pairs = [(self.of("codetta", s), self.of("eager", s)) for s in seeds]
        return distance(pairs)

    @property
    def spread(self) -> list[float]:
        """Smoothed |eager - eager| of two seeds, a mean over all pairs, step by step."""
        eager = [r for r in self.runs if r.way == "eager"]
        return distance(list(itertools.combinations(eager, 2)))

    @property
    def checks(self) -> dict[str, tuple[float, float]]:
        """What was found, and what it must not exceed."""
        eager = [r.held_out for r in self.runs if r.way == "eager"]
        seeds = [r.seed for r in self.runs if r.way == "codetta"]
        ours = fmean(abs(self.of("codetta", s).held_out - self.of("eager", s).held_out) for s in seeds)
        theirs = fmean(abs(a - b) for a, b in itertools.combinations(eager, 2))
        return {
            "training loss, mean over all steps": (fmean(self.apart), fmean(self.spread)),
            f"training loss, mean over the last {LAST}": (fmean(self.apart[-LAST:]), fmean(self.spread[-LAST:])),
            "loss on held-out text": (ours, theirs),
        }

    @property
    def ok(self) -> bool:
        """Whether all of it holds."""
        return all(found <= allowed for found, allowed in self.checks.values())


def distance(pairs: Sequence[tuple[Run, Run]]) -> list[float]:
    """The distance of two smoothed curves, a mean over pairs."""
    curves = [[abs(a - b) for a, b in zip(smooth(x.losses), smooth(y.losses), strict=True)] for x, y in pairs]
    return [fmean(at) for at in zip(*curves, strict=True)]


def smooth(values: Sequence[float]) -> list[float]:
    """Each value averaged with those before it, at most ``SMOOTH`` of them."""
    return [fmean(values[max(0, i + 1 - SMOOTH) : i + 1]) for i in range(len(values))]


def placed(batch: Mapping[str, Tensor], device: str) -> dict[str, Tensor]:
    """A batch on the device."""
    return {name: t.to(device) for name, t in batch.items()}


def train(run: Run, subject: Subject, corpus: Corpus, steps: int, device: str) -> int:
    """Train and judge one run; the number of its parameters."""
    model = random_model(subject.preset.config(), torch.bfloat16, run.seed).to(device)
    options = {"logits": "never", "kernels": "hopper" if device == "cuda" else "auto"}  # nobody reads the logits
    call: Callable[..., Any] = (
        torch.compile(model, backend=partial(backend, options=options), dynamic=False)
        if run.way == "codetta"
        else model
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY, fused=device != "cpu" or None
    )
    losses, begin = [], perf_counter()
    for i in range(steps):
        loss = call(**placed(corpus.batch(i, subject.shape), device)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (i + 1) / WARM_UP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    run.losses = torch.stack(losses).tolist()
    run.seconds = perf_counter() - begin
    with torch.no_grad():  # by the eager model, whichever way the weights were trained
        run.held_out = model(**placed(corpus.judge(JUDGED, subject.shape[1]), device)).loss.item()
    return sum(p.numel() for p in model.parameters())


def compare(subject: Subject, corpus: Corpus, steps: int, device: str, console: Console) -> Compared:
    """All runs of one model."""
    runs = tuple(Run(way, seed) for way, seed in RUNS)
    parameters = 0
    for run in runs:
        torch._dynamo.reset()
        with many_compilations():
            parameters = train(run, subject, corpus, steps, device)
        console.print(f"{subject.name}, {run.name}: {steps} steps in {run.seconds:.0f} s, last {run.losses[-1]:.4f}")
    return Compared(subject, parameters, runs)


def table(found: Compared) -> Table:
    """Losses by step, and what they say."""
    p, shape = found.subject.preset, found.subject.shape
    title = (
        f"{found.subject.name}: {found.parameters / 1e6:.1f} M parameters, {p.layers} layers of {p.hidden}, bf16, "
        f"{shape[0]} x {shape[1]} tokens a step"
    )
    columns = ("loss at step", *(r.name for r in found.runs), "|codetta - eager|", "between seeds")
    result = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False)
    total = len(found.runs[0].losses)
    for step in dict.fromkeys([*(s for s in SHOWN if s < total), total]):
        values = (f"{r.losses[step - 1]:.4f}" for r in found.runs)
        result.add_row(str(step), *values, f"{found.apart[step - 1]:.1e}", f"{found.spread[step - 1]:.1e}")
    result.add_row("held-out text", *(f"{r.held_out:.4f}" for r in found.runs))
    return result


def verdicts(results: Sequence[Compared]) -> Table:
    """What was promised, found and allowed."""
    result = Table("", "|codetta - eager| below eager's own spread", "found", "allowed", box=None, pad_edge=False)
    for found in results:
        for name, (value, most) in found.checks.items():
            state = "[green]yes[/green]" if value <= most else "[red]NO[/red]"
            result.add_row(state, f"{found.subject.name}: {name}", f"{value:.2e}", f"{most:.2e}")
    return result


def draw(results: Sequence[Compared], path: Path) -> None:
    """A row a model: the curves, and how far apart they are."""
    figure, grid = pyplot.subplots(len(results), 2, figsize=(10, 3.4 * len(results)), layout="constrained", dpi=110)
    colors = {("eager", 0): "#b8bec8", ("codetta", 0): "#d1495b"}
    for found, (left, right) in zip(results, grid, strict=True):
        for r in found.runs:
            first = (r.way, r.seed) == ("eager", 0)
            color = colors.get((r.way, r.seed), "#7fa3c7" if r.way == "eager" else "#e8a0a9")
            left.plot(range(1, len(r.losses) + 1), r.losses, color=color, lw=5.0 if first else 1.0, label=r.name)
        left.set(title=f"{found.subject.name}: {found.parameters / 1e6:.0f} M parameters", xlabel="step")
        left.set(ylabel="loss (nats per byte)")
        right.plot(range(1, len(found.apart) + 1), found.apart, color="#d1495b", label="|codetta - eager|, same seed")
        right.plot(range(1, len(found.spread) + 1), found.spread, color="#7fa3c7", label="|eager - eager|, two seeds")
        right.set(title=f"differences, smoothed over {SMOOTH} steps", xlabel="step", yscale="log")
        for axes in (left, right):
            axes.legend(frameon=False, fontsize=8)
            axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


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
                "runs": [
                    {
                        "way": r.way,
                        "seed": r.seed,
                        "losses": r.losses,
                        "held_out_loss": r.held_out,
                        "seconds": r.seconds,
                    }
                    for r in found.runs
                ],
            }
            for found in results
        ],
    }


def main() -> int:
    """Run it; 1 if an agreement is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder for train_curves.json and train_curves.png")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--small", action="store_true", help="small models and batches, to try the script")
    given = parser.parse_args()
    console = Console(width=160)
    given.out.mkdir(parents=True, exist_ok=True)
    corpus, begin = standard_library(), perf_counter()
    subjects = SMALL if given.small else SUBJECTS
    results = [compare(s, corpus, given.steps, given.device, console) for s in subjects]
    for found in results:
        console.print("", table(found))
    console.print("", verdicts(results), "", f"{perf_counter() - begin:.0f} s in all")
    (given.out / "train_curves.json").write_text(json.dumps(to_json(results, given.device), indent=1))
    draw(results, given.out / "train_curves.png")
    return 0 if all(r.ok for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
