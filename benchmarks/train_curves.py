"""Trains a tiny and a larger Llama in bfloat16 on real text, eager and through codetta, and compares the loss curves.

All runs of a model see the same batches. Runs of one seed start from the same weights, so what lies between eager and
codetta is rounding; what lies between two seeds of eager is chance. The first should be below the second.

    python benchmarks/train_curves.py --out benchmarks/results --parallel
    python benchmarks/train_curves.py --out /tmp/curves --device cpu --small

With ``--parallel`` each model and each way is a process of its own on the one GPU: their times say nothing then, their
losses are the same. What is finished is in the folder after each run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from time import perf_counter, sleep
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
WAYS = ("eager", "codetta")
SMOOTH = 20  # losses of so many steps are averaged before they are compared
JUDGED = 32  # windows of held-out text
LAST = 100
RESULT = "train_curves.json"
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
    """The runs of one model so far, and how far they are apart."""

    subject: Subject
    parameters: int
    runs: tuple[Run, ...]

    @property
    def complete(self) -> bool:
        """Whether all runs are there; else there is nothing to compare yet."""
        return {(r.way, r.seed) for r in self.runs} == set(RUNS)

    @property
    def same_seed(self) -> list[tuple[Run, Run]]:
        """Codetta's runs, each with eager's of the same seed."""
        eager = {r.seed: r for r in self.runs if r.way == "eager"}
        return [(r, eager[r.seed]) for r in self.runs if r.way == "codetta" and r.seed in eager]

    @property
    def two_seeds(self) -> list[tuple[Run, Run]]:
        """All pairs of eager's runs."""
        return list(itertools.combinations([r for r in self.runs if r.way == "eager"], 2))

    @property
    def apart(self) -> list[float]:
        """Smoothed |codetta - eager| of the same seed, a mean over the seeds, step by step."""
        return distance(self.same_seed)

    @property
    def spread(self) -> list[float]:
        """Smoothed |eager - eager| of two seeds, a mean over all pairs, step by step."""
        return distance(self.two_seeds)

    @property
    def checks(self) -> dict[str, tuple[float, float]]:
        """What was found, and what it must not exceed; nothing while runs are missing."""
        if not self.complete:
            return {}
        ours, theirs = (fmean(abs(a.held_out - b.held_out) for a, b in p) for p in (self.same_seed, self.two_seeds))
        return {
            "training loss, mean over all steps": (fmean(self.apart), fmean(self.spread)),
            f"training loss, mean over the last {LAST}": (fmean(self.apart[-LAST:]), fmean(self.spread[-LAST:])),
            "loss on held-out text": (ours, theirs),
        }

    @property
    def ok(self) -> bool:
        """Whether all of it holds."""
        return self.complete and all(found <= allowed for found, allowed in self.checks.values())


def distance(pairs: Sequence[tuple[Run, Run]]) -> list[float]:
    """The distance of two smoothed curves, a mean over pairs; empty where there are none."""
    if not pairs:
        return []
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


Found = dict[str, Compared]  # by the model's name


def add_run(found: Found, subject: Subject, parameters: int, run: Run) -> None:
    """One more run of a model, in the order of ``RUNS``."""
    others = found[subject.name].runs if subject.name in found else ()
    runs = sorted([*others, run], key=lambda r: RUNS.index((r.way, r.seed)))
    found[subject.name] = Compared(subject, parameters, tuple(runs))


def one_by_one(given: argparse.Namespace, subjects: Sequence[Subject], console: Console) -> Iterator[Found]:
    """The runs asked for, one after another in this process."""
    corpus, found = standard_library(), Found()
    for subject in subjects:
        for way, seed in (r for r in RUNS if r[0] in given.ways):
            torch._dynamo.reset()
            run = Run(way, seed)
            with many_compilations():
                parameters = train(run, subject, corpus, given.steps, given.device)
            add_run(found, subject, parameters, run)
            took = f"{len(run.losses)} steps in {run.seconds:.0f} s, last {run.losses[-1]:.4f}"
            console.print(f"{subject.name}, {run.name}: {took}")
            yield found


def side_by_side(given: argparse.Namespace, subjects: Sequence[Subject], console: Console) -> Iterator[Found]:
    """A process for each model and way; what they have finished is read from their folders."""
    workers = []
    for subject, way in itertools.product(subjects, given.ways):
        folder = given.out / "parts" / f"{subject.name}-{way}".replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULT).unlink(missing_ok=True)
        asked = ["--models", subject.name, "--ways", way, "--out", folder, "--device", given.device]
        more = ["--steps", given.steps, *(["--small"] if given.small else [])]
        command = [sys.executable, __file__, *map(str, [*asked, *more])]
        with (folder / "log").open("w") as log:
            workers.append((folder, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)))
    seen = 0
    while True:
        running = any(process.poll() is None for _, process in workers)  # asked first: the last result is not missed
        found = Found()
        for folder, _ in workers:
            read(folder / RESULT, found, subjects)
        if (count := sum(len(c.runs) for c in found.values())) > seen:
            seen = count
            yield found
        if not running:
            break
        sleep(0.5)
    for folder, process in workers:
        if process.returncode:
            tail = (folder / "log").read_text()[-2000:]
            console.print(f"{folder.name}, exit {process.returncode}:\n{tail}", markup=False)


def read(path: Path, found: Found, subjects: Sequence[Subject]) -> None:
    """Add the runs of a file, if it is there and whole."""
    try:
        models = json.loads(path.read_text())["models"]
    except (FileNotFoundError, json.JSONDecodeError):  # not yet, or just being written
        return
    for model, subject in ((m, s) for m in models for s in subjects if s.name == m["name"]):
        for r in model["runs"]:
            add_run(found, subject, model["parameters"], Run(**r))


def table(found: Compared) -> Table:
    """Losses by step, and what they say."""
    p, shape = found.subject.preset, found.subject.shape
    title = (
        f"{found.subject.name}: {found.parameters / 1e6:.1f} M parameters, {p.layers} layers of {p.hidden}, bf16, "
        f"{shape[0]} x {shape[1]} tokens a step"
    )
    apart, spread = found.apart, found.spread
    columns = ("loss at step", *(r.name for r in found.runs), "|codetta - eager|", "between seeds")
    result = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False)
    total = len(found.runs[0].losses)
    for step in dict.fromkeys([*(s for s in SHOWN if s < total), total]):
        values = (f"{r.losses[step - 1]:.4f}" for r in found.runs)
        result.add_row(str(step), *values, *(f"{d[step - 1]:.1e}" if d else "" for d in (apart, spread)))
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
    size = (10, 3.4 * len(results))
    figure, grid = pyplot.subplots(len(results), 2, figsize=size, layout="constrained", dpi=110, squeeze=False)
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
                "runs": [asdict(r) for r in found.runs],
            }
            for found in results
        ],
    }


def main() -> int:
    """Run it; 1 if an agreement is not kept, or runs are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder for train_curves.json and train_curves.png")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--small", action="store_true", help="small models and batches, to try the script")
    parser.add_argument("--models", nargs="+", help=f"instead of {' and '.join(s.name for s in SUBJECTS)}")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--parallel", action="store_true", help="each model and way in a process of its own")
    given = parser.parse_args()
    console, begin = Console(width=160), perf_counter()
    subjects = [s for s in (SMALL if given.small else SUBJECTS) if given.models is None or s.name in given.models]
    given.out.mkdir(parents=True, exist_ok=True)
    results: list[Compared] = []
    for found in (side_by_side if given.parallel else one_by_one)(given, subjects, console):
        results = list(found.values())
        (given.out / RESULT).write_text(json.dumps(to_json(results, given.device), indent=1))
        if len(given.ways) == len(WAYS):
            draw(results, given.out / "train_curves.png")
    if len(given.ways) < len(WAYS):  # there is nothing to compare
        return 0
    for compared in results:
        console.print("", table(compared))
    console.print("", verdicts(results), "", f"{perf_counter() - begin:.0f} s in all")
    return 0 if len(results) == len(subjects) and all(r.ok for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
