"""Trains Llamas in bfloat16 on real text, through codetta and another way, and compares the loss curves.

All runs of a model see the same batches. Runs of one seed start from the same weights, so what lies between two ways is
rounding; what lies between two seeds of one way is chance. The first should be below the second. Where both ways have
three seeds, their mean curves are compared: the distance should be below the range of a way's seeds.

    python benchmarks/train_curves.py --out benchmarks/results --parallel
    python benchmarks/train_curves.py --out out --models llama-100m --ways inductor codetta --seeds 0 1 2 \
        --steps 1000 --parallel --budget 300
    python benchmarks/train_curves.py --out /tmp/curves --device cpu --small

With ``--parallel`` each model and each way is a process of its own on the one GPU: their times say nothing then, their
losses are the same. The curves so far are in the folder all the time; behind ``--budget`` seconds all is ended, and
what there is is compared. ``--resume`` keeps the whole runs that the folder has.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

import torch
from curves import OURS, Compared, Run, Subject, draw, table, to_json, verdicts
from rich.console import Console
from torch import Tensor, nn

from codetta.audit.corpus import Corpus, standard_library
from codetta.audit.models import PRESETS, Preset, random_model
from codetta.audit.runs import many_compilations
from codetta.capture.backend import backend

RATE, WARM_UP, CLIP, BETAS, DECAY = 1e-3, 20, 1.0, (0.9, 0.95), 0.1  # the demo's recipe
RUNS = (("eager", 0), ("codetta", 0), ("eager", 1), ("eager", 2), ("codetta", 1))
WAYS = ("eager", "inductor", "codetta")
JUDGED = 32  # windows of held-out text
EVERY = 50  # steps, after which the curves so far are written
RESULT = "train_curves.json"


SUBJECTS = (
    Subject("llama-tiny", PRESETS["llama-tiny"], (8, 512)),
    Subject("llama-100m", Preset(9, 1024, 2816, 16, 8, 64, 256, tied=False, theta=1e4), (8, 512)),
)
SMALL = (
    Subject("llama-tiny", PRESETS["llama-tiny"], (2, 64)),
    Subject("llama-100m, cut down", Preset(2, 192, 528, 3, 3, 64, 256, tied=False, theta=1e4), (2, 64)),
)


def placed(batch: Mapping[str, Tensor], device: str) -> dict[str, Tensor]:
    """A batch on the device."""
    return {name: t.to(device) for name, t in batch.items()}


@dataclass(frozen=True)
class Trainee:
    """A model, and the way in which it is called. Runs of other seeds get other weights in the same memory, so that
    nothing is compiled twice."""

    subject: Subject
    model: nn.Module
    call: Callable[..., Any]
    device: str

    @property
    def parameters(self) -> int:
        """Their number."""
        return sum(p.numel() for p in self.model.parameters())

    def train(self, run: Run, corpus: Corpus, steps: int) -> Iterator[Run]:
        """Train and judge one run; it is given with its losses so far every now and then, and at the end."""
        weights = random_model(self.subject.preset.config(), torch.bfloat16, run.seed)
        self.model.load_state_dict(weights.state_dict())
        parameters, rate = list(self.model.parameters()), RATE
        fused = self.device != "cpu" or None
        optimizer = torch.optim.AdamW(parameters, lr=rate, betas=BETAS, weight_decay=DECAY, fused=fused)
        losses, begin = [], perf_counter()
        for i in range(steps):
            loss = self.call(**placed(corpus.fresh(i, self.subject.shape), self.device)).loss
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, CLIP)
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (i + 1) / WARM_UP)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if len(losses) == EVERY:
                run.losses += torch.stack(losses).tolist()
                losses = []
                yield run
        run.losses += torch.stack(losses).tolist() if losses else []
        run.seconds = perf_counter() - begin
        with torch.no_grad():  # by the eager model, whichever way the weights were trained
            judged = placed(corpus.judge(JUDGED, self.subject.shape[1]), self.device)
            run.held_out = self.model(**judged).loss.item()
        yield run


def trainee(subject: Subject, way: str, device: str) -> Trainee:
    """A model called in one of ``WAYS``."""
    model = random_model(subject.preset.config(), torch.bfloat16, 0).to(device)
    if way == "eager":
        return Trainee(subject, model, model, device)
    if way == "inductor":  # on a CPU it would compile for minutes: what is tried there is the script
        inner = "inductor" if device == "cuda" else "aot_eager"
        return Trainee(subject, model, torch.compile(model, dynamic=False, backend=inner), device)
    options = {"kernels": "hopper" if device == "cuda" else "auto"}
    ours = torch.compile(model, backend=partial(backend, options=options), dynamic=False)
    return Trainee(subject, model, ours, device)


Found = dict[str, Compared]  # by the model's name
Wanted = tuple[tuple[str, int], ...]  # ways and seeds


def wanted_of(given: argparse.Namespace) -> Wanted:
    """The runs asked for, in their order."""
    runs = itertools.product(given.ways, given.seeds) if given.seeds else (r for r in RUNS if r[0] in given.ways)
    return tuple(runs)


def add_run(found: Found, subject: Subject, parameters: int, run: Run, wanted: Wanted) -> None:
    """One more run of a model, or more of one, in the order of those wanted."""
    others = found[subject.name].runs if subject.name in found else ()
    known = {(r.way, r.seed): r for r in (*others, run)}
    found[subject.name] = Compared(subject, parameters, wanted, tuple(known[w] for w in wanted if w in known))


def one_by_one(given: argparse.Namespace, subjects: Sequence[Subject], console: Console) -> Iterator[Found]:
    """The runs asked for, one after another in this process."""
    corpus, found, wanted = standard_library(deep=True), Found(), wanted_of(given)
    if given.resume:
        read(given.out / RESULT, found, subjects, wanted, given.steps)
    for subject, way in itertools.product(subjects, given.ways):
        done = {(r.way, r.seed) for r in found[subject.name].runs} if subject.name in found else set()
        runs = [Run(w, seed) for w, seed in wanted if w == way and (w, seed) not in done]
        if not runs:
            continue
        torch._dynamo.reset()
        with many_compilations():
            model = trainee(subject, way, given.device)
            for run in runs:
                for now in model.train(run, corpus, given.steps):
                    add_run(found, subject, model.parameters, now, wanted)
                    yield found
                took = f"{len(run.losses)} steps in {run.seconds:.0f} s, last {run.losses[-1]:.4f}"
                console.print(f"{subject.name}, {run.name}: {took}")


def side_by_side(given: argparse.Namespace, subjects: Sequence[Subject], console: Console) -> Iterator[Found]:
    """A process for each model and way; what they have so far is read from their folders."""
    workers, until, wanted = [], monotonic() + given.budget, wanted_of(given)
    for subject, way in itertools.product(subjects, given.ways):
        folder = given.out / "parts" / f"{subject.name}-{way}".replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        if not given.resume:
            (folder / RESULT).unlink(missing_ok=True)
        asked = ["--models", subject.name, "--ways", way, "--out", folder, "--device", given.device]
        more = ["--steps", given.steps, *(["--small"] * given.small), *(["--resume"] * given.resume)]
        seeds = ["--seeds", *given.seeds] if given.seeds else []
        command = [sys.executable, __file__, *map(str, [*asked, *more, *seeds])]
        with (folder / "log").open("w") as log:
            workers.append((folder, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)))
    try:
        seen = 0
        while True:
            running = any(p.poll() is None for _, p in workers)  # asked first: the last result is not missed
            found = Found()
            for folder, _ in workers:
                read(folder / RESULT, found, subjects, wanted)
            if (count := sum(len(r.losses) for c in found.values() for r in c.runs)) > seen:
                seen = count
                yield found
            if not running or monotonic() > until:
                break
            sleep(1.0)
    finally:
        for folder, process in workers:
            if process.poll() is None:
                process.kill()
                console.print(f"{folder.name}: ended after {given.budget:.0f} s")
            elif process.returncode:
                tail = (folder / "log").read_text()[-2000:]
                console.print(f"{folder.name}, exit {process.returncode}:\n{tail}", markup=False)


def read(path: Path, found: Found, subjects: Sequence[Subject], wanted: Wanted, steps: int = 0) -> None:
    """Add the runs of a file, if it is there; with ``steps``, those that are whole."""
    try:
        models = json.loads(path.read_text())["models"]
    except FileNotFoundError:
        return
    for model, subject in ((m, s) for m in models for s in subjects if s.name == m["name"]):
        for run in (Run(**r) for r in model["runs"]):
            if not steps or (run.held_out is not None and len(run.losses) == steps):
                add_run(found, subject, model["parameters"], run, wanted)


def write(path: Path, found: Mapping[str, Any]) -> None:
    """As JSON, all at once: who reads or is cut off meanwhile has the file as it was or as it is."""
    other = path.with_suffix(".new")
    other.write_text(json.dumps(found, indent=1))
    other.replace(path)


def main() -> int:
    """Run it; 1 if an agreement is not kept, or runs are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder for train_curves.json and train_curves.png")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--small", action="store_true", help="small models and batches, to try the script")
    parser.add_argument("--models", nargs="+", help=f"instead of {' and '.join(s.name for s in SUBJECTS)}")
    parser.add_argument("--ways", nargs="+", default=["eager", OURS], choices=WAYS)
    parser.add_argument("--seeds", nargs="+", type=int, help="of every way, instead of three of eager and two of ours")
    parser.add_argument("--parallel", action="store_true", help="each model and way in a process of its own")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds after which --parallel ends all")
    parser.add_argument("--resume", action="store_true", help="keep the whole runs that the folder has")
    given = parser.parse_args()
    console, begin = Console(width=160), perf_counter()
    subjects = [s for s in (SMALL if given.small else SUBJECTS) if given.models is None or s.name in given.models]
    given.out.mkdir(parents=True, exist_ok=True)
    results: list[Compared] = []
    for found in (side_by_side if given.parallel else one_by_one)(given, subjects, console):
        results = list(found.values())
        write(given.out / RESULT, to_json(results, given.device))
    if OURS not in given.ways or len(given.ways) == 1:  # there is nothing to compare
        return 0
    if results:
        draw(results, given.out / "train_curves.png")
    for compared in results:
        console.print("", table(compared))
    console.print("", verdicts(results), "", f"{perf_counter() - begin:.0f} s in all")
    return 0 if len(results) == len(subjects) and all(r.ok for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
