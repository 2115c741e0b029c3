"""The demo: one small Llama trained on real text by eager PyTorch and through codetta, and what the two agree on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import nn

from codetta.audit import picture, report
from codetta.audit.corpus import Corpus, standard_library
from codetta.audit.explain import Explanation, explain, explain_graphs
from codetta.audit.models import PRESETS, Request, find, random_model
from codetta.audit.runs import many_compilations
from codetta.capture.backend import backend, recording

STEPS = 200
SHAPE = (8, 128)  # sequences, tokens each
# The usual recipe. Without warm-up and clipping, this training is chaotic: a change of the weights by one part in
# ten million grew to 1e-2 in the loss within 200 steps, and no two ways of rounding would agree.
RATE, WARM_UP, CLIP, BETAS, DECAY = 1e-3, 20, 1.0, (0.9, 0.95), 0.1
CLOSE = 20  # so many first losses must agree
WIDE_STEPS = 20
ROWS_SHOWN = (1, 2, 5, 10, 20, 50, 100, 150, 200)
SEEDS = (0, 1)
# Threads wait for each other by spinning: where another process wants a core, two of them were ten times slower than
# one. One is enough for a model of this size, and gives the same numbers on every number of cores.
THREADS = 1


@dataclass(slots=True)
class Run:
    """One training run: a loss and a time a step, and the loss on held-out text at the end."""

    name: str
    call: Callable[..., Any]
    model: nn.Module
    seed: int
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    held_out: float = float("nan")

    @property
    def step_seconds(self) -> float:
        """The median time of a step, without the first ones, which compile."""
        return median(self.seconds[3:] or self.seconds)


@dataclass(frozen=True, slots=True)
class Check:
    """An agreement that was promised: the number found, and the one that it must not exceed."""

    name: str
    found: float
    allowed: float

    @property
    def ok(self) -> bool:
        """Whether it is kept."""
        return self.found <= self.allowed


@dataclass(frozen=True, slots=True)
class Demo:
    """What ``codetta demo`` shows."""

    runs: tuple[Run, ...]
    checks: tuple[Check, ...]
    explanation: Explanation
    segment: picture.Bars
    image: Path
    text: str
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether all agreements are kept."""
        return all(c.ok for c in self.checks)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "ok": self.ok,
            "checks": [{"name": c.name, "found": c.found, "allowed": c.allowed, "ok": c.ok} for c in self.checks],
            "runs": [
                {
                    "name": r.name,
                    "seed": r.seed,
                    "losses": r.losses,
                    "held_out_loss": r.held_out,
                    "step_seconds": r.step_seconds,
                    "first_step_seconds": r.seconds[0],
                }
                for r in self.runs
            ],
            "training_seconds": self.seconds,
            "threads": THREADS,
            "forward": self.explanation.forward.to_json(),
            "backward": self.explanation.backward.to_json(),
            "bytes": {"title": self.segment.title, "forward": self.segment.forward, "backward": self.segment.backward},
            "picture": str(self.image),
            "text": self.text,
        }

    def __rich__(self) -> RenderableType:
        return Group(
            Text(self.explanation.title, style="bold"),
            Text(self.text),
            "",
            report.summary(self.explanation.forward, self.explanation.backward),
            "",
            _losses(self.runs),
            "",
            _times(self.runs, self.seconds),
            "",
            _agreements(self.checks),
            "",
            Text(f"picture: {self.image}"),
        )


def demo(
    image: Path,
    *,
    steps: int = STEPS,
    progress: Callable[[str, int, float | None], None] = lambda name, total, loss: None,
) -> Demo:
    """Train, compare and draw. ``progress`` is told a run's name, its number of steps, and the loss of each step, at
    first None."""
    picture.require()
    corpus = standard_library()
    config = PRESETS["llama-tiny"].config()
    start = perf_counter()
    # one shape throughout, whatever sizes this process compiled the same code for before
    fixed = torch._dynamo.config.patch(automatic_dynamic_shapes=False)
    with many_compilations(), _threads(THREADS), fixed, recording() as graphs:
        runs = [_start(name, config, seed) for name, seed in (("eager", 0), ("codetta", 0), ("eager, other seed", 1))]
        _train(runs, corpus, steps, progress)
        wide = _float64_runs(config)
        explanation = explain_graphs(graphs[:1], title=f"llama-tiny, {SHAPE[0]} x {SHAPE[1]} tokens, float32")
        _train(wide, corpus, min(steps, WIDE_STEPS), progress)
    seconds = perf_counter() - start
    bars = _segment_bars()
    picture.draw(image, {r.name: r.losses for r in runs}, bars)
    size = (len(corpus.train) + len(corpus.held_out)) / 1e6
    text = f"text: {size:.1f} MB of the standard library's sources ({corpus.files} files), a byte a token"
    return Demo(tuple(runs), tuple(_checks(runs, wide)), explanation, bars, image, text, seconds)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _start(name: str, config: Any, seed: int) -> Run:
    model = random_model(config, torch.float32, seed)
    call = torch.compile(model, backend=backend) if name == "codetta" else model
    return Run(name, call, model, seed, _optimizer(model))


def _float64_runs(config: Any) -> list[Run]:
    """The captured graph in float64, as it was captured and rewritten into programs."""
    found = []
    for name, rewrite in (("captured graph, float64", False), ("codetta, float64", True)):
        model = random_model(config, torch.float32, SEEDS[0]).double()
        options = {"widen": True, "rewrite": rewrite}
        call = torch.compile(model, backend=partial(backend, options=options))
        found.append(Run(name, call, model, SEEDS[0], _optimizer(model)))
    return found


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY)


def _train(runs: Sequence[Run], corpus: Corpus, steps: int, progress: Callable[[str, int, float | None], None]) -> None:
    """Train side by side, a step of each in turn, so that the machine's moods hit all alike."""
    for r in runs:
        progress(r.name, steps, None)
    for i in range(steps):
        for r in runs:
            batch = corpus.batch(r.seed * 1_000_003 + i, SHAPE)
            begin = perf_counter()
            loss = r.call(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(r.model.parameters(), CLIP)
            for group in r.optimizer.param_groups:
                group["lr"] = RATE * min(1.0, (i + 1) / WARM_UP)
            r.optimizer.step()
            r.optimizer.zero_grad()
            r.losses.append(loss.item())
            r.seconds.append(perf_counter() - begin)
            progress(r.name, steps, r.losses[-1])
    judged = corpus.judge(32, SHAPE[1])
    for r in runs:
        with torch.no_grad():
            r.held_out = r.model(**judged).loss.item()


def _checks(runs: Sequence[Run], wide: Sequence[Run]) -> list[Check]:
    eager, ours, other = runs
    first = min(CLOSE, len(eager.losses))
    return [
        Check(f"float32: the first {first} losses, largest relative difference", _apart(eager, ours, first), 1e-5),
        Check(
            "float32: loss on held-out text, difference; allowed is that between two seeds",
            abs(ours.held_out - eager.held_out),
            abs(other.held_out - eager.held_out),
        ),
        Check(
            f"float64: {len(wide[0].losses)} losses, largest relative difference",
            _apart(wide[0], wide[1], len(wide[0].losses)),
            1e-9,
        ),
    ]


def _apart(a: Run, b: Run, count: int) -> float:
    return max(abs(x - y) / abs(x) for x, y in zip(a.losses[:count], b.losses[:count], strict=True))


def _segment_bars() -> picture.Bars:
    """Bytes of a whole layer's segment of Llama-3-8B: from one attention's output to the next one's input."""
    subject = find(Request("llama3-8b", layers=2), weights=False)
    middle = explain(subject.model, **subject.batch).parts[1]
    ways = {"eager operators": "bytes_eager", "ideal fusion between GEMMs": "bytes_boundary_fusion", "codetta": "bytes"}
    forward, backward = (
        {name: float(getattr(half, attribute)) for name, attribute in ways.items()}
        for half in (middle.forward, middle.backward)
    )
    return picture.Bars(f"counted: a layer of Llama-3-8B, {middle.rows:,} tokens, bf16", forward, backward)


def _losses(runs: Sequence[Run]) -> Table:
    table = Table("loss at step", *(r.name for r in runs), "codetta - eager", box=None, pad_edge=False)
    total = len(runs[0].losses)
    for step in dict.fromkeys([s for s in ROWS_SHOWN if s < total] + [total]):
        values = [r.losses[step - 1] for r in runs]
        table.add_row(str(step), *(f"{v:.6f}" for v in values), f"{values[1] - values[0]:+.1e}")
    held = [r.held_out for r in runs]
    table.add_row("held-out text", *(f"{v:.6f}" for v in held), f"{held[1] - held[0]:+.1e}")
    return table


def _times(runs: Sequence[Run], seconds: float) -> Table:
    table = Table("time of a step", "median", "first", box=None, pad_edge=False)
    for r in runs[:2]:
        table.add_row(r.name, f"{r.step_seconds * 1e3:.0f} ms", f"{r.seconds[0] * 1e3:.0f} ms")
    ratio = runs[1].step_seconds / runs[0].step_seconds
    note = f"reference backend, {THREADS} thread; all training {seconds:.0f} s"
    table.add_row("codetta / eager", f"{ratio:.2f}", note)
    return table


def _agreements(checks: Sequence[Check]) -> Table:
    table = Table("", "agreement", "found", "allowed", box=None, pad_edge=False)
    for c in checks:
        state = "[green]yes[/green]" if c.ok else "[red]NO[/red]"
        table.add_row(state, c.name, f"{c.found:.2e}", f"{c.allowed:.2e}")
    return table
